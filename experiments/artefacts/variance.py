"""The ratio of variances and its components over training: the paper's figure."""

from __future__ import annotations

from itertools import pairwise
from statistics import median

from matplotlib.figure import Figure

from backsketch.plots import noise_figure

from .artefact import Artefact, Record, table, where_from
from .names import ordered, shown

WINDOW = 8
_QUANTITIES = ("alignment", "sgd_variance", "sketch_variance", "ratio", "scaled_ratio", "bound")


def render(records: list[Record]) -> tuple[str, Figure | None]:
    """Return the figure of the layer that was watched, and its figures at the beginning, middle and end."""
    runs = {record["cell"]["way"]: record for record in records}
    points = {way: runs[way]["results"]["noise"]["records"] for way in ordered(list(runs))}
    first, *others = points
    parts = [[name, *_thirds(points[first], name)] for name in _QUANTITIES]
    ratios = [[shown(way), _kept(runs[way]), *_thirds(points[way], "ratio")] for way in points]
    settings, layer = runs[first]["settings"], points[first][0]["layer"]
    text = (
        f"{settings['model']} on {settings['task']}, batch {settings['recipe']['batch_size']}, layer `{layer}`, "
        f"{shown(first)}; medians over the thirds of training:\n\n"
        f"{table(['', 'first', 'second', 'third'], parts)}\n\n"
        f"`ratio` is D²/D²_SGD, `scaled_ratio` B_proj/(B−1) times that, the left side of the paper's Theorem 1, and "
        f"`bound` (α+1)/α its right side; curves are running means over {WINDOW} measured steps, and ratios those of "
        f"the means.\n\n"
        f"`ratio` beside that of other sketches, with what a step keeps for backward in all; all but the paper's "
        f"leave padded rows out, and a ratio of 0 means that what is kept holds every other row:\n\n"
        f"{table(['training', 'kept', 'first', 'second', 'third'], ratios)}\n\n{where_from(records)}\n"
    )
    beside = {shown(way).strip("*"): points[way] for way in others if way.startswith("recommended")}
    return text, noise_figure(points[first], layer, window=WINDOW, others=beside)


def _thirds(points: list[Record], name: str) -> list[str]:
    """Return the median of a quantity in each third of the points."""
    ends = [len(points) * third // 3 for third in range(4)]
    return [f"{median(point[name] for point in points[start:end]):.3g}" for start, end in pairwise(ends)]


def _kept(record: Record) -> str:
    return f"{record['results']['memory']['kept_bytes'] / 2**20:,.0f} MiB"


ARTEFACT = Artefact("variance", "Ratio of variances over training (figure)", ("variance",), render)
