"""The picture of a Fit: a stacked bar for each way, against the card's limit."""

from __future__ import annotations

import textwrap
from pathlib import Path

from ..memory.live_storages import ACTIVATIONS, GRADIENTS, OPTIMIZER_STATES, PARAMETERS, TRANSIENTS
from ..table import readable
from .fit_result import Fit
from .timeline import GATHERED

_PARTS = {
    PARAMETERS: ("weights", "#3b4a8f"),
    GRADIENTS: ("gradients", "#1f6f8b"),
    OPTIMIZER_STATES: ("optimiser states", "#7fb3c8"),
    GATHERED: ("gathered and reduced", "#8e5ea2"),
    ACTIVATIONS: ("activations", "#d98e04"),
    TRANSIENTS: ("transients", "#c9c9c9"),
}
_FARTHEST = 8  # times the longest bar, at which the card's limit is still drawn


def draw_fit(found: Fit, path: Path, title: str = "") -> None:
    """Write the picture to a file whose ending tells its format."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("the picture needs matplotlib: pip install 'backsketch[cli]'") from error
    unit, scale = found.unit
    names = [row.title for row in found.rows]
    figure = Figure(figsize=(9, 1.6 + 0.42 * len(names)), layout="constrained")
    axes = figure.subplots()
    starts = [0.0] * len(names)
    for part, (label, color) in _PARTS.items():
        sizes = [row.peak.parts.get(part, 0) / scale for row in found.rows]
        if any(sizes):
            axes.barh(names, sizes, left=starts, label=label, color=color, height=0.7)
        starts = [start + size for start, size in zip(starts, sizes, strict=True)]
    limit = found.memory / scale
    shown = limit <= _FARTHEST * max(starts)
    widest = max(*starts, limit) if shown else max(starts)
    for place, (row, total) in enumerate(zip(found.rows, starts, strict=True)):
        color = "#222222" if found.fits(row) else "#b3261e"
        axes.text(total + widest * 0.01, place, f"{total:.1f}", va="center", color=color, fontsize=9)
    card = f"card: {readable(found.memory)}"
    if shown:
        axes.axvline(limit, color="#b3261e", linestyle="--", linewidth=1.2)
        above = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        axes.text(limit, -0.7, card, color="#b3261e", ha="center", fontsize=9, bbox=above)
    else:  # bars would be too short to see
        axes.text(widest * 1.09, -0.7, f"{card}, far to the right", color="#b3261e", ha="right", fontsize=9)
    axes.set(xlabel=f"peak of a training step, {unit}", xlim=(0, widest * 1.1), ylim=(len(names) - 0.4, -0.9))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    size = f"batch {found.batch}" + ("" if found.length is None else f", length {found.length}")
    ranks = "" if found.ranks == 1 else f", {found.ranks} ranks"
    about = ", ".join(filter(None, [title, size])) + f", {found.optimizer}{ranks}"
    figure.suptitle(f"{textwrap.fill(found.headline, 100)}\n{about}", fontsize=11)
    figure.legend(loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)
