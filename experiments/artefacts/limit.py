"""The controller at several limits: noise, bytes and loss over a short fine-tuning."""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, StrMethodFormatter

from . import style
from .artefact import Artefact, Record, table, where_from

_COLORS = ("#2f6db5", "#0b7a75", "#d9820a", "#8e5ea2")
_DASHES = ("-", "--", ":", "-.")  # by task and seed
SETTLED = 30  # steps in which the controller finds its first configs


def render(records: list[Record]) -> tuple[str, Figure | None]:
    """Return a line for each run, and noise and bytes over the steps by limit, one line style a task and seed."""
    figure, (noise, kept) = style.panels(2, (11, 4.4))
    runs = list(dict.fromkeys(_run(record) for record in records))
    limits = list(dict.fromkeys(limit for record in records if (limit := record["settings"].get("limit")) is not None))
    lines = []
    for record in sorted(records, key=lambda record: runs.index(_run(record))):
        limit, results = record["settings"].get("limit"), record["results"]
        if limit is None:
            lines.append([_run(record), "exact", "0", "0", "100%", "", "", "", *_losses(results)])
            continue
        color, dashes = _COLORS[limits.index(limit) % len(_COLORS)], _DASHES[runs.index(_run(record)) % len(_DASHES)]
        steps = [point["step"] for point in results["points"]]
        label = f"{limit}, {_run(record)}"
        noise.plot(steps, [point["noise"] for point in results["points"]], dashes, color=color, label=label)
        noise.axhline(limit, color=color, linewidth=0.8)
        share = [point["bytes"] / point["exact_bytes"] for point in results["points"]]
        kept.plot(steps, [100 * each for each in share], dashes, color=color)
        lines.append([_run(record), f"limit {limit}", *_numbers(results), *_losses(results)])
    noise.set(xlabel="step", ylabel="added noise / SGD's noise", yscale="log")
    noise.yaxis.set_major_locator(LogLocator(subs=(1, 3)))  # limits are of this kind: 0.03, 0.1, 0.3
    noise.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    noise.minorticks_off()
    kept.set(xlabel="step", ylabel="kept of linear inputs, % of fp32")
    if limits:
        style.legend(figure, noise, max(len(limits), 3))
    header = [
        "task", "training", "mean noise", "worst noise", "mean bytes", "fixed, same worst noise",
        "fixed, same mean noise", "changes", "training loss", "evaluation loss", "accuracy",
    ]  # fmt: skip
    settings = records[0]["settings"]
    text = (
        f"{settings['model']}, {settings['steps']} steps. Noise and "
        f"bytes are over the measured steps after step {SETTLED}, in which the controller has found its first configs; "
        f"bytes are a share of what exact layers keep of their inputs. Fixed configs are the same for all layers: "
        f"the cheapest ones, chosen in hindsight, whose worst or mean noise over the same steps is at most that of the "
        f"run. Training loss is the mean of the last third:\n\n"
        f"{table(header, lines)}\n\n{where_from(records)}\n"
    )
    return text, figure


def settled(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the points after the first configs were found."""
    return [point for point in results["points"] if point["step"] > SETTLED]


def cheapest_fixed(
    points: list[dict[str, Any]], summary: Callable[[list[float]], float], most: float
) -> tuple[str, float] | None:
    """Return the config with the least bytes, as a share of exact bytes, whose worst or mean noise is at most that."""
    names = [name for name in points[0]["fixed"] if summary([point["fixed"][name][0] for point in points]) <= most]
    shares = {name: mean(point["fixed"][name][1] / point["exact_bytes"] for point in points) for name in names}
    return min(shares.items(), key=lambda item: item[1], default=None)


def _run(record: Record) -> str:
    return f"{record['settings']['task']}, seed {record['settings']['seed']}"


def _numbers(results: dict[str, Any]) -> list[str]:
    points = settled(results)
    worst, average = max(point["noise"] for point in points), mean(point["noise"] for point in points)
    return [
        f"{average:.4f}",
        f"{worst:.4f}",
        f"{100 * mean(point['bytes'] / point['exact_bytes'] for point in points):.2f}%",
        _told(cheapest_fixed(points, max, worst)),
        _told(cheapest_fixed(points, mean, average)),
        str(len(results["changes"])),
    ]


def _told(fixed: tuple[str, float] | None) -> str:
    return "none" if fixed is None else f"{100 * fixed[1]:.2f}% ({fixed[0].removesuffix(', rotate=True')})"


def _losses(results: dict[str, Any]) -> list[str]:
    losses, validation = results["losses"], results["validation"]
    late = mean(losses[len(losses) * 2 // 3 :])
    return [f"{late:.3f}", f"{validation['loss']:.3f}", f"{100 * validation['accuracy']:.1f}"]


ARTEFACT = Artefact("limit", "NoiseLimit at several limits", ("noise_limit", "noise_limit_held_out"), render)
