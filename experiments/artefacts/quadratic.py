"""The stationary loss on a quadratic with known noise, against theory."""

from __future__ import annotations

from matplotlib.figure import Figure

from . import style
from .artefact import MISSING, Artefact, Record, table, ways, where_from

_COLORS = {"exact": style.INK, "sketched": "#c0392b", "scheduled": "#0b7a75"}


def render(records: list[Record]) -> tuple[str, Figure | None]:
    """Return a line for each optimizer and way, and the loss over the steps."""
    optimizers = ways(records, "optimizer")
    figure, panels = style.panels(len(optimizers), (5.5 * len(optimizers), 4.2))
    lines = []
    for axes, optimizer in zip(panels, optimizers, strict=True):
        own = {record["cell"]["way"]: record for record in records if record["cell"]["optimizer"] == optimizer}
        exact = own["exact"]["results"]["excess"] if "exact" in own else None
        for way, record in own.items():
            results, settings = record["results"], record["settings"]
            lines.append(
                [
                    f"{optimizer}, {way}",
                    f"{results['excess']:.4e} ± {results['standard_error']:.1e}",
                    MISSING if exact is None else f"{results['excess'] / exact:.3f}",
                    "none" if results["theory"] is None else f"{results['theory']:.4e}",
                    f"{results['rate_factor']:.3f}",
                ]
            )
            every = (settings["burn_in"] + settings["steps"]) / max(1, len(results["curve"]))
            steps = [every * index for index in range(len(results["curve"]))]
            axes.plot(steps, results["curve"], color=_COLORS.get(way, style.QUIET), linewidth=0.9, label=way)
            if results["theory"] is not None:
                axes.axhline(results["theory"], color=_COLORS.get(way, style.QUIET), linestyle=":", linewidth=1.2)
        axes.set(xlabel="step", ylabel="excess loss", title=optimizer)
        axes.set_ylim(bottom=0)
    style.legend(figure, panels[0], 3)
    settings = records[0]["settings"]
    text = (
        f"Linear regression, {settings['rows']} rows, {settings['inputs']} inputs, {settings['chains']} independent "
        f"outputs; rows at ρ = {settings['ratio']} add {1 / settings['ratio'] - 1:.3g} times SGD's noise. Mean excess "
        f"loss of an output over {settings['steps']} steps after {settings['burn_in']}, with its standard error, as a "
        f"multiple of exact training's, and what theory says ([mathematics](../../docs/mathematics.md); dotted lines). "
        f"There is no theory for Adam here, only a heuristic:\n\n"
        f"{table(['training', 'excess loss', 'of exact', 'theory', 'rate factor'], lines)}\n\n{where_from(records)}\n"
    )
    return text, figure


ARTEFACT = Artefact("quadratic", "Stationary loss on a quadratic with known noise", ("quadratic",), render)
