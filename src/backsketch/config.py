"""SketchConfig: what a layer keeps of its input for backward, and how."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property

import torch

from .argument_checks import check_bits, check_flag, check_positive, check_share
from .sketches import SKETCHES
from .storage.sizes import row_share

DEFAULT_RATIO = 0.1
STORED_BITS = (8, 4, 3, 2)

# (bits, rotate) -> D² / D²_SGD of rounding all rows: the mean over the layers in benchmarks/reports/frontier.json
ROUNDING_NOISE = {
    (8, False): 0.000096,
    (4, False): 0.028,
    (3, False): 0.13,
    (2, False): 0.69,
    (8, True): 0.000027,
    (4, True): 0.0077,
    (3, True): 0.035,
    (2, True): 0.19,
}


@dataclass(frozen=True, kw_only=True)
class SketchConfig:
    """Say what is kept of an input of B rows: the kind of sketch, its size B_proj, and how its rows are stored.

    Attributes:
        kind: a key of ``SKETCHES``.
        ratio: ρ = B_proj / B, in (0, 1]. Without ``ratio`` and ``dim`` it is 0.1.
        dim: B_proj itself, whatever the batch; excludes ``ratio``.
        min_dim: the least B_proj. A batch with fewer rows than this is kept whole.
        max_dim: the largest B_proj.
        block: rows a block for the dense and transform kinds, which then cost one small matrix a block instead of
            one matrix (or transform) over all rows. ``rows`` and ``hash`` touch each row once and have no matrix to
            block, so it changes nothing for them.
        bits: how kept rows are stored: as they are (None), or in 8, 4, 3 or 2 bits a value, without bias.
        center: keep the mean row exactly and sketch only what is left.
        rotate: with ``bits``, multiply each group of 128 features by a fixed orthonormal matrix before rounding, and
            undo that on the weight gradient. Outliers then cost much less noise, at a few per cent of a step's time.
    """

    kind: str = "rows"
    ratio: float | None = None
    dim: int | None = None
    min_dim: int = 1
    max_dim: int | None = None
    block: int | None = None
    bits: int | None = None
    center: bool = False
    rotate: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str):
            raise TypeError(f"kind must be a string, got {self.kind!r}")
        if self.kind not in SKETCHES:
            raise ValueError(f"kind must be one of {', '.join(sorted(SKETCHES))}, got {self.kind!r}")
        if self.ratio is not None and self.dim is not None:
            raise ValueError(f"give ratio or dim, not both: got ratio={self.ratio!r} and dim={self.dim!r}")
        if self.ratio is not None:
            object.__setattr__(self, "ratio", check_share("ratio", self.ratio))
        for name in ("dim", "min_dim", "max_dim", "block"):
            value = getattr(self, name)
            if value is not None or name == "min_dim":
                object.__setattr__(self, name, check_positive(name, value))
        if self.max_dim is not None and self.min_dim > self.max_dim:
            raise ValueError(f"min_dim must be at most max_dim, got min_dim={self.min_dim} and max_dim={self.max_dim}")
        object.__setattr__(self, "bits", check_bits("bits", self.bits, STORED_BITS))
        check_flag("center", self.center)
        check_flag("rotate", self.rotate)
        if self.rotate and self.bits is None:
            raise ValueError(
                "rotate=True needs bits, one of "
                f"{STORED_BITS}: it lowers the noise of rounding, and rows stored as they are (bits=None) have none"
            )
        self.as_json  # noqa: B018  # now, as torch.compile can read it but not make it

    @classmethod
    def recommended(cls, keep: float = 0.1, dtype: torch.dtype = torch.float32) -> SketchConfig:
        """Return our best setting that keeps at most about the share ``keep`` of the bytes of an input in ``dtype``.

        Rows in few bits, rotated: of the numbers of bits the one with the least noise on a real encoder when as many
        rows are kept as fit (benchmarks/reports/frontier.json). Bytes that all rows do not need are not used.

        Args:
            keep: the share to keep, in (0, 1]. Of fp32 inputs 0.1 is nearly all rows in 3 bits; of bf16 inputs, which
                are half as large, 0.71 of the rows in 2 bits.
            dtype: the inputs' own type: under autocast that of autocast.
        """
        share = check_share("keep", keep)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise TypeError(f"dtype must be a floating-point torch.dtype, got {dtype!r}")
        if share == 1:
            return cls(ratio=1.0)
        ratios = {bits: min(1.0, share / row_share(bits, dtype.itemsize)) for bits in STORED_BITS}
        bits = min(ratios, key=lambda each: (1 + ROUNDING_NOISE[each, True]) / ratios[each])
        return cls(ratio=ratios[bits], bits=bits, rotate=True)

    @cached_property
    def as_json(self) -> str:
        """Return all fields in one string, the form in which a graph takes them."""
        return json.dumps({field.name: getattr(self, field.name) for field in fields(self)})

    @property
    def keeps_all(self) -> bool:
        """Tell whether an input of any number of rows is kept as it is."""
        return self.ratio == 1 and self.max_dim is None and self.bits is None

    def keeps_input(self, rows: int) -> bool:
        """Tell whether an input of ``rows`` rows is kept as it is: too few to compress, and none rounded."""
        return self.bits is None and self.dim_for(rows) == rows

    def dim_for(self, rows: int) -> int:
        """Return B_proj for an input of ``rows`` rows: never 0 unless ``rows`` is, never above ``rows``."""
        # Of a symbolic size max and min would ask the value, and torch.compile would make a graph for every batch size.
        symbolic = isinstance(rows, torch.SymInt)
        larger: Callable[[int, int], int] = torch.sym_max if symbolic else max
        smaller: Callable[[int, int], int] = torch.sym_min if symbolic else min
        dim = round((self.ratio or DEFAULT_RATIO) * rows) if self.dim is None else self.dim
        dim = larger(dim, self.min_dim)
        if self.max_dim is not None:
            dim = smaller(dim, self.max_dim)
        return smaller(dim, rows)

    def __str__(self) -> str:
        """Name the kind, the size and whatever is not at its default."""
        size = f"ratio={round(self.ratio or DEFAULT_RATIO, 4)}" if self.dim is None else f"dim={self.dim}"
        others = [field for field in fields(self) if field.name not in ("kind", "ratio", "dim")]
        changed = [f"{f.name}={value}" for f in others if (value := getattr(self, f.name)) != f.default]
        return ", ".join([self.kind, size, *changed])


def check_config(config: object) -> SketchConfig:
    """Return ``config`` if it is one, so that a wrong argument fails before the first step."""
    if not isinstance(config, SketchConfig):
        raise TypeError(f"config must be a SketchConfig, got {config!r}")
    return config
