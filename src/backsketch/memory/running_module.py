"""Which module of a model is running."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle


class RunningModule:
    """Inside the block, ``name`` is the innermost module of ``model`` whose forward is running, or None."""

    def __init__(self, model: nn.Module | None) -> None:
        self._model = model
        self._stack: list[str] = []
        self._handles: list[RemovableHandle] = []

    @property
    def name(self) -> str | None:
        return self._stack[-1] if self._stack else None

    def entered(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note that a module starts; subclasses also read its arguments."""
        self._stack.append(name)

    def left(self) -> None:
        """Note that the innermost module is done."""
        self._stack.pop()

    def __enter__(self) -> RunningModule:
        for name, module in () if self._model is None else self._model.named_modules():
            self._handles.append(module.register_forward_pre_hook(self._enter(name), prepend=True, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))
        return self

    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._stack.clear()

    def _enter(self, name: str) -> Any:
        return lambda module, args, kwargs: self.entered(name, module, args, kwargs)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.left()
