"""PeakKept: the most bytes that autograd held for backward at once, counted as it goes."""

from __future__ import annotations

from typing import Any
from weakref import finalize

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ..memory.saved import Held
from ..tensor_storages import model_tensors, sizes


class PeakKept:
    """Count what autograd holds of everything computed inside, each storage once, the model's own tensors apart."""

    def __init__(self, model: nn.Module) -> None:
        self.bytes = 0
        self._own = sizes(model_tensors(model)).keys()
        self._claims: dict[int, int] = {}
        self._now = 0
        self._hooks = saved_tensors_hooks(self._pack, Held.release)

    def __enter__(self) -> PeakKept:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    def _pack(self, tensor: Tensor) -> Held:
        held = Held(tensor, None)
        for key, size in sizes([tensor]).items():
            if key not in self._own:
                if not self._claims.get(key):
                    self._now += size
                    self.bytes = max(self.bytes, self._now)
                self._claims[key] = self._claims.get(key, 0) + 1
                finalize(held, self._release, key, size).atexit = False
        return held

    def _release(self, key: int, size: int) -> None:
        self._claims[key] -= 1
        if not self._claims[key]:
            self._now -= size
