"""check_recurrent: refuse models whose memory no one can tell without the device: fused recurrent layers."""

from __future__ import annotations

from torch import nn


def check_recurrent(model: nn.Module) -> None:
    """Raise ValueError that names the recurrent layers of a model.

    Devices run them in one kernel each, whose library alone knows what it keeps for backward. The meta device runs
    them token by token instead: it keeps a third of what an LSTM keeps on a CPU.
    """
    found = {name: type(module).__name__ for name, module in model.named_modules() if isinstance(module, nn.RNNBase)}
    if found:
        name, kind = next(iter(found.items()))
        others = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise ValueError(
            f"model must have no nn.RNN, nn.GRU or nn.LSTM, of which the device's library alone knows what it keeps, "
            f"got {kind} in {name or 'the model itself'}{others}: peak_memory and saved_memory measure a real step"
        )
