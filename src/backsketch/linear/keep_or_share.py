"""What one call of a layer keeps of its input: which rows count, and whether another layer has kept it already."""

from __future__ import annotations

from torch import Tensor

from ..config import SketchConfig
from ..masks.scopes import valid_for
from ..numerics import as_rows
from .keeping import keep
from .sharing import Kept, shared


def keep_or_share(
    source: Tensor, x: Tensor, seed: Tensor, reader: int, config: SketchConfig
) -> tuple[Tensor | None, Kept]:
    """Return which rows count, (rows,) or None for all, and what is kept of x.

    Args:
        source: what the layer was given; x: the same as it is computed with, which autocast may have cast.
        reader: tells the layer from others, which may share what it keeps.
    """
    valid = valid_for(x, seed)
    purpose = (config, x.dtype, id(valid))
    return valid, shared(source, purpose, reader, lambda: keep(as_rows(x), config, seed, valid))
