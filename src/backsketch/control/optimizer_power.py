"""With which power of 1 + r the learning rate of an optimizer has to fall to hold the noise level."""

from __future__ import annotations

from torch import optim

from ..argument_checks import check_share

_PROPORTIONAL = (optim.SGD,)
_DIVIDES_BY_ROOT = (optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.RMSprop, optim.Adagrad, optim.Adafactor)


def power_for(optimizer: optim.Optimizer, power: float | None) -> float:
    """Return ``power``, or by default 1 for SGD and 1/2 for optimizers that divide by the root of a second moment."""
    if power is not None:
        return check_share("power", power)
    if isinstance(optimizer, _PROPORTIONAL):
        return 1.0
    if isinstance(optimizer, _DIVIDES_BY_ROOT):
        return 0.5
    raise ValueError(
        f"power must be given for {type(optimizer).__name__}, of which it is not known how a step grows with the "
        "gradient: 1 if it is proportional to the gradient, as in SGD, 0.5 if it is divided by the root of a second "
        "moment, as in Adam"
    )
