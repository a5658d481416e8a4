"""The controller at several limits: noise, bytes and loss over a short fine-tuning."""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean
from typing import Any

from matplotlib.figure import Figure

from . import style
from .artefact import Artefact, Record, table, where_from

_COLORS = ("#2f6db5", "#0b7a75", "#d9820a", "#8e5ea2")
SETTLED = 30  # steps in which the controller finds its first configs


def render(records: list[Record]) -> tuple[str, Figure | None]:
    """Return a line for each limit, and noise and bytes over the steps."""
    figure, (noise, kept) = style.panels(2, (11, 4.4))
    lines = []
    limited = [record for record in records if record["settings"].get("limit") is not None]
    for color, record in zip(_COLORS, limited, strict=False):
        limit, results = record["settings"]["limit"], record["results"]
        points = [point for point in results["points"] if point["step"] > SETTLED]
        steps = [point["step"] for point in results["points"]]
        noise.plot(steps, [point["noise"] for point in results["points"]], color=color, label=f"limit {limit}")
        noise.axhline(limit, color=color, linestyle=":")
        share = [point["bytes"] / point["exact_bytes"] for point in results["points"]]
        kept.plot(steps, [100 * each for each in share], color=color, label=f"limit {limit}")
        worst = max(point["noise"] for point in points)
        average = mean(point["noise"] for point in points)
        by_worst, by_mean = cheapest_fixed(points, max, worst), cheapest_fixed(points, mean, average)
        lines.append(
            [
                f"limit {limit}",
                f"{average:.4f}",
                f"{worst:.4f}",
                f"{100 * mean(point['bytes'] / point['exact_bytes'] for point in points):.2f}%",
                _told(by_worst),
                _told(by_mean),
                str(len(results["changes"])),
                *_losses(results),
            ]
        )
    for record in records:
        if record["settings"].get("limit") is None:
            lines.append(["exact", "0", "0", "100%", "", "", "", *_losses(record["results"])])
    noise.set(xlabel="step", ylabel="added noise / SGD's noise", yscale="log")
    kept.set(xlabel="step", ylabel="kept of linear inputs, % of fp32")
    if limited:
        style.legend(figure, noise, len(limited))
    settings = records[0]["settings"]
    header = [
        "training", "mean noise", "worst noise", "mean bytes", "fixed, same worst noise", "fixed, same mean noise",
        "changes", "training loss", "evaluation loss", "accuracy",
    ]  # fmt: skip
    text = (
        f"{settings['model']} on {settings['task']}, {settings['steps']} steps, seed {settings['seed']}. Noise and "
        f"bytes are over the measured steps after step {SETTLED}, in which the controller has found its first configs; "
        f"bytes are a share of what exact layers keep of their inputs. Fixed configs are the same for all layers: "
        f"the cheapest ones, chosen in hindsight, whose worst or mean noise over the same steps is at most that of the "
        f"run. Training loss is the mean of the last third:\n\n"
        f"{table(header, lines)}\n\n{where_from(records)}\n"
    )
    return text, figure


def cheapest_fixed(
    points: list[dict[str, Any]], summary: Callable[[list[float]], float], most: float
) -> tuple[str, float] | None:
    """Return the config with the least bytes, as a share of exact bytes, whose worst or mean noise is at most that."""
    names = [name for name in points[0]["fixed"] if summary([point["fixed"][name][0] for point in points]) <= most]
    shares = {name: mean(point["fixed"][name][1] / point["exact_bytes"] for point in points) for name in names}
    return min(shares.items(), key=lambda item: item[1], default=None)


def _told(fixed: tuple[str, float] | None) -> str:
    return "none" if fixed is None else f"{100 * fixed[1]:.2f}% ({fixed[0].removesuffix(', rotate=True')})"


def _losses(results: dict[str, Any]) -> list[str]:
    losses, validation = results["losses"], results["validation"]
    late = mean(losses[len(losses) * 2 // 3 :])
    return [f"{late:.3f}", f"{validation['loss']:.3f}", f"{100 * validation['accuracy']:.1f}"]


ARTEFACT = Artefact("limit", "NoiseLimit at several limits", ("noise_limit",), render)
