"""RestConfig: in how many bits everything but the inputs of sketched layers is kept for backward."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TypeAlias

from ..argument_checks import check_bits, check_positive, is_integer
from ..config import STORED_BITS

Rest: TypeAlias = "bool | int | RestConfig | None"  # what ``rest=`` takes; False is refused
FAMILIES = ("pointwise", "product", "attention", "norm", "other")


@dataclass(frozen=True, kw_only=True)
class RestConfig:
    """Say in how many bits each family of operations keeps what it saves for backward.

    A number of bits is one of 8, 4, 3, 2, or None: as it is. Masks and dropout always take 1 bit and are exact.

    Attributes:
        pointwise: the derivatives of activation functions. Backward multiplies by them, so the gradient is exactly
            unbiased.
        product: the operands of products and matrix products, the inputs of linear layers that are not sketched, and v
            and the output of attention. Unbiased.
        attention: q, k and softmax. Backward is not linear in them, so rounding adds a bias; 8 bits are as precise as
            bf16.
        norm: the inputs of norms, which are not linear either.
        other: whatever the other operations save that packing knows. Below 8 bits it adds a bias.
        checkpoint: the inputs that activation checkpointing keeps.
        min_elements: a tensor with fewer values stays as it is.
    """

    pointwise: int | None = 3
    product: int | None = 4
    attention: int | None = 8
    norm: int | None = 8
    other: int | None = 8
    checkpoint: int | None = None
    min_elements: int = 4096

    def __post_init__(self) -> None:
        for name in (*FAMILIES, "checkpoint"):
            object.__setattr__(self, name, check_bits(name, getattr(self, name), STORED_BITS))
        object.__setattr__(self, "min_elements", check_positive("min_elements", self.min_elements))

    @classmethod
    def recommended(cls) -> RestConfig:
        """Return our best setting: what ``rest=True`` means."""
        return cls()

    @classmethod
    def of(cls, rest: object) -> RestConfig | None:
        """Return what ``rest=`` means: None is None, True the recommended config, a config is itself.

        A number of bits holds for every family; masks and dropout take one bit, since fewer cost nothing there.
        """
        if rest is None or isinstance(rest, RestConfig):
            return rest
        if rest is True:
            return cls.recommended()
        if not is_integer(rest):
            hint = "; None leaves everything else as it is now, and unsketch_ switches it off" if rest is False else ""
            raise TypeError(f"rest must be None, True, a number of bits or a RestConfig, got {rest!r}{hint}")
        if rest not in STORED_BITS:
            raise ValueError(f"rest as a number of bits must be one of {STORED_BITS}, got {rest!r}")
        bits = int(rest)
        return cls(**dict.fromkeys(FAMILIES, bits))

    def in_words(self) -> str:
        """Name every family with its bits: "pointwise 3 bits, product 4, attention 8, norm 8, other 8"."""
        names = FAMILIES if self.checkpoint is None else (*FAMILIES, "checkpoint")
        bits = {name: getattr(self, name) for name in names}
        first = next((name for name in bits if bits[name] is not None), None)
        words = {name: "as it is" if number is None else str(number) for name, number in bits.items()}
        return ", ".join(f"{name} {words[name]}{' bits' if name == first else ''}" for name in names)

    def __str__(self) -> str:
        """Name whatever is not at its default."""
        changed = [f"{f.name}={value}" for f in fields(self) if (value := getattr(self, f.name)) != f.default]
        return ", ".join(changed) or "recommended"
