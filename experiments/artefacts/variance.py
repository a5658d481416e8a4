"""The ratio of variances and its components over training: the paper's figure."""

from __future__ import annotations

from matplotlib.figure import Figure

from backsketch.plots import noise_figure

from .artefact import Artefact, Record, table, where_from

WINDOW = 8


def render(records: list[Record]) -> tuple[str, Figure | None]:
    """Return the figure of the layer that was watched, and its figures at the beginning, middle and end."""
    record = records[0]
    points = record["results"]["noise"]["records"]
    layer = points[0]["layer"]
    quantities = ("alignment", "sgd_variance", "sketch_variance", "ratio", "scaled_ratio", "bound")
    thirds = [
        points[: len(points) // 3],
        points[len(points) // 3 : 2 * len(points) // 3],
        points[2 * len(points) // 3 :],
    ]
    lines = [[name, *(f"{_median([point[name] for point in part]):.3g}" for part in thirds)] for name in quantities]
    settings = record["settings"]
    config, recipe = settings["config"], settings["recipe"]
    text = (
        f"{settings['model']} on {settings['task']}, batch {recipe['batch_size']}, {config['kind']} at "
        f"ρ = {config['ratio']}, layer `{layer}`; medians over the thirds of training:\n\n"
        f"{table(['', 'first', 'second', 'third'], lines)}\n\n"
        f"`scaled_ratio` is B_proj/(B−1)·D²/D²_SGD, the left side of the paper's Theorem 1, and `bound` (α+1)/α its "
        f"right side; curves are running means over {WINDOW} measured steps, and ratios those of the means.\n\n"
        f"{where_from(records)}\n"
    )
    return text, noise_figure(points, layer, window=WINDOW)


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


ARTEFACT = Artefact("variance", "Ratio of variances over training (figure)", ("variance",), render)
