"""How a config splits the rows of an input into independent blocks."""

from __future__ import annotations

from functools import lru_cache

from ..config import SketchConfig
from ..sketches import SKETCHES, Blocked, BlockKind, Whole, make_sketch
from ..sketches.law import RowBlocks


@lru_cache(maxsize=256)
def row_blocks_of(config: SketchConfig, rows: int) -> RowBlocks:
    """Return the blocks into which ``config`` splits an input of ``rows`` rows."""
    sketch = make_sketch(config.kind, rows, config.dim_for(rows), 0, config.block)
    count, height = 1, rows
    if isinstance(sketch, Blocked):
        count, height = sketch.count, sketch.height
    elif isinstance(sketch, BlockKind):
        height = sketch.block_height(rows)
    whole = isinstance(sketch, Whole)
    mirrors = () if whole else SKETCHES[config.kind].mirrors(height)
    return RowBlocks(config.kind, rows, sketch.dim, count, height, mirrors, whole)
