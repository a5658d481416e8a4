"""LogitCurve: what a model does to its logits before the loss: a scale, or a soft cap as in Gemma 2."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LogitCurve:
    """The function z -> after · z, or after · tanh(before · z) where it ``bends``."""

    before: float = 1.0
    bends: bool = False
    after: float = 1.0

    def scaled(self, factor: float) -> LogitCurve:
        """Return this curve, and then a multiplication."""
        return replace(self, after=self.after * factor)

    def bent(self) -> LogitCurve | None:
        """Return this curve, and then tanh; None if it has one."""
        return None if self.bends else LogitCurve(before=self.after, bends=True)

    @property
    def is_straight(self) -> bool:
        """Tell whether it leaves logits as they are."""
        return not self.bends and self.after == 1.0

    def apply_(self, logits: Tensor) -> Tensor:
        """Change logits in place, and return them."""
        if self.bends:
            logits.mul_(self.before).tanh_()
        return logits if self.after == 1.0 else logits.mul_(self.after)

    def slope(self, curved: Tensor) -> Tensor | float:
        """Return the derivative at logits of which ``curved`` are the values."""
        if not self.bends:
            return self.after
        if self.after == 0:
            return 0.0
        return curved.div(self.after).square_().neg_().add_(1.0).mul_(self.before * self.after)
