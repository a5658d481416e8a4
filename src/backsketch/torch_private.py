"""Private names of torch: every use of a name that torch does not document, with the reason for it.

tests/test_torch_private.py fails in clear words when torch changes one of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from functools import lru_cache, partial
from io import StringIO
from types import FunctionType
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._C import _functorch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["TorchDispatchMode", "is_traceable_wrapper_subclass", "tree_leaves", "tree_map_only"]

_SAVED = "_raw_saved_"
_OUTPUTS = tuple(_SAVED + name for name in ("result", "output", "out"))
_NAMES = {"Grad": "grad", "Vmap": "vmap", "Jvp": "jvp", "Functionalize": "functionalize"}

# Torch shows what its nodes and hooks hold since 2.8. Before, no one can tell who holds an input.
SHOWS_WHAT_IS_SAVED = hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks") and hasattr(
    torch._C._autograd.SavedTensor, "data"
)

# Fused attention, of which torch documents only the function that chooses a kernel.
FLASH_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
EFFICIENT_ATTENTION = torch.ops.aten._scaled_dot_product_efficient_attention

# The product with the weights of experts, as versions of torch name it; none before torch 2.8.
GROUPED_PRODUCTS: list[Callable[..., Tensor]] = [
    getattr(space, name) for space, name in ((F, "grouped_mm"), (torch, "_grouped_mm")) if hasattr(space, name)
]


# Where code runs


def in_backward() -> bool:
    """Tell whether autograd is running a backward pass in this thread; there is no public way to ask."""
    return torch._C._current_graph_task_id() != -1


def saves_for_checkpoint() -> bool:
    """Tell whether non-reentrant checkpointing handles what is saved for backward now; False before torch 2.8.

    torch.utils.checkpoint has no public flag for it.
    """
    if not SHOWS_WHAT_IS_SAVED:
        return False
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and hooks[0].__module__ == torch.utils.checkpoint.__name__


def runs_for_selective_checkpoint() -> bool:
    """Tell whether selective checkpointing is active, even if other hooks handle the saved tensors."""
    count = torch._C._len_torch_dispatch_stack()
    if not count:
        return False
    modes = (torch._C._get_dispatch_stack_at(place) for place in range(count))
    return any(type(mode).__module__ == torch.utils.checkpoint.__name__ for mode in modes)


def is_exporting() -> bool:
    """Tell whether torch.export is tracing; always False in torch 2.6, which cannot tell."""
    return bool(getattr(torch.compiler, "is_exporting", lambda: False)())


def is_tracing() -> bool:
    """Tell whether torch.jit.trace is running; the function is public, but type checkers do not find it."""
    tracing: bool = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    return tracing


def is_fake(tensor: Tensor) -> bool:
    """Tell whether a tensor has a shape, a dtype and a device, but no values, as inside FakeTensorMode."""
    return isinstance(tensor, FakeTensor)


def without_function_modes() -> Any:
    """Return a context in which no function mode sees what runs, such as the Python code of meta kernels."""
    return torch._C.DisableTorchFunction()


def backward_under_modes(loss: Tensor) -> None:
    """Run backward of a scalar while the function modes of this thread stay on.

    ``loss.backward()`` is a function like others: the innermost mode that handles it is off while it runs, so what a
    checkpoint runs again would not pass through the mode.
    """
    one = torch.ones_like(loss, memory_format=torch.preserve_format)
    torch.autograd.graph._engine_run_backward(
        (loss,), (one,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def with_globals(function: Callable[..., Any], **others: Any) -> Callable[..., Any]:
    """Return a function of the same code in which global names mean ``others``, where torch gives no other way in."""
    code: Any = function
    copied = FunctionType(code.__code__, code.__globals__ | others, code.__name__, code.__defaults__)
    copied.__kwdefaults__ = code.__kwdefaults__
    return copied


def as_plain_tensors() -> Any:
    """Return a context in which tensors of a subclass are treated as plain ones; torch documents it under this name."""
    return torch._C.DisableTorchFunctionSubclass()


# Memory


def memory_id(tensor: Tensor) -> int:
    """Return a number for the storage behind a tensor: a data pointer is 0 for every empty or meta storage."""
    return storage_id(tensor.untyped_storage())


def storage_id(storage: torch.UntypedStorage) -> int:
    """Return a number that no other living storage has."""
    return int(storage._cdata)


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; there is no public name for it."""
    return int(tensor._version)


def not_a_view(tensor: Tensor) -> Tensor:
    """Return the same memory as a tensor that is no view for autograd, so that it may be changed in place.

    The public way would be a copy.
    """
    plain: Tensor = torch.ops.aten._unsafe_view.default(tensor, tensor.shape)
    return plain


def base_of(tensor: Tensor) -> Tensor:
    """Return the tensor that a view looks into, or the tensor itself; there is no public name for it."""
    return tensor if tensor._base is None else tensor._base


# The graph


def producer_of(tensor: Tensor) -> Any:
    """Return the graph node of the operation that made the memory behind a tensor, or None for memory of a leaf."""
    base = tensor._base if tensor._is_view() else tensor
    return None if base is None else base.grad_fn


def is_node_of(node: Any, function: type[torch.autograd.Function]) -> bool:
    """Tell whether a graph node was left by a Function; the class that torch makes for its nodes has no public name."""
    return type(node) is function._backward_cls


# Nodes whose result has the values of their one input; torch has no list of them.
VIEWS_AND_CASTS = frozenset(
    f"{name}Backward{version}"
    for name in (
        *("Alias", "AsStrided", "Expand", "Permute", "ReshapeAlias", "Select", "Slice", "Split", "SplitWithSizes"),
        *("Squeeze", "T", "ToCopy", "Transpose", "Unbind", "Unsqueeze", "UnsafeView", "View"),
    )
    for version in range(3)
)


def saves_its_output(node: Any) -> bool:
    """Tell whether an operation saves its output for backward, by the names of what its node shows."""
    return SHOWS_WHAT_IS_SAVED and any(hasattr(node, name) for name in _OUTPUTS)


def saved_by(node: Any) -> Iterator[Any]:
    """Yield what a node holds, as it holds it: tensors, or what hooks made of them. Nothing is unpacked.

    The public ``node._saved_result`` would unpack it, which may copy it back from another device, or run a checkpoint.
    """
    kind: Any = type(node)
    for name in _saved_names(kind) if SHOWS_WHAT_IS_SAVED else ():
        try:
            saved = getattr(node, name)
        except RuntimeError:  # freed by an earlier backward
            continue
        for each in saved if isinstance(saved, (tuple, list)) else (saved,):
            yield getattr(each, "data", None)


@lru_cache(maxsize=1024)
def _saved_names(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith(_SAVED))


# Hooks on saved tensors

Hooks: TypeAlias = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


def innermost_hooks() -> Hooks | None:
    """Return the pack and unpack that take what is saved now; before torch 2.8 only if ``replacing_hooks`` saw them.

    There is no public way to ask.
    """
    if SHOWS_WHAT_IS_SAVED:
        hooks: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return hooks
    entered = _entered_hooks()
    return entered[-1] if entered else None


def unwatched(hooks: Hooks | None) -> Hooks | None:
    """Return the hooks that are there without a meter: hooks that only watch have an attribute ``hooks``."""
    return hooks if hooks is None else getattr(hooks[0], "hooks", hooks)


@contextmanager
def replacing_hooks(replace: Callable[[Hooks], Hooks]) -> Iterator[None]:
    """Enter, inside the block, what ``replace`` makes of the hooks that saved_tensors_hooks is given.

    Torch runs the innermost hooks alone, and has no public way to see what they keep. Blocks inside and in other
    threads must give the same ``replace``, which is asked once.
    """
    global _replacing
    with _replacing_lock:
        _replacing += 1
        if _replacing == 1:
            _replace_methods(replace)
    try:
        yield
    finally:
        with _replacing_lock:
            _replacing -= 1
            if not _replacing:
                saved_tensors_hooks.__enter__, saved_tensors_hooks.__exit__ = _ENTER, _EXIT  # type: ignore[method-assign]


def _replace_methods(replace: Callable[[Hooks], Hooks]) -> None:
    def enter(self: saved_tensors_hooks) -> None:
        hooks = replace((self.pack_hook, self.unpack_hook))
        _ENTER(saved_tensors_hooks(*hooks))
        _entered_hooks().append(hooks)

    def leave(self: saved_tensors_hooks, *error: object) -> None:
        _EXIT(self, *error)
        if entered := _entered_hooks():  # not what was entered before the block
            entered.pop()

    saved_tensors_hooks.__enter__, saved_tensors_hooks.__exit__ = enter, leave  # type: ignore[method-assign]


def _entered_hooks() -> list[Hooks]:
    entered: list[Hooks] = _of_thread.__dict__.setdefault("entered", [])
    return entered


_ENTER, _EXIT = saved_tensors_hooks.__enter__, saved_tensors_hooks.__exit__
_replacing, _replacing_lock, _of_thread = 0, threading.Lock(), threading.local()


def call_checkpoint_savers_by(call: Callable[[Callable[..., Any], tuple[Any, ...]], Any]) -> None:
    """Let ``call`` call the functions that save the inputs of checkpoints, from now on; asked again, it does nothing.

    Both kinds of checkpointing save their inputs by a Function of their own, and hooks cannot tell who is saving.
    """
    of_checkpoint: Any = torch.utils.checkpoint
    frame = of_checkpoint._CheckpointFrame
    savers = [(of_checkpoint.CheckpointFunction, "apply")]
    # Non-reentrant checkpointing has its frame save them; before that was so, it had another Function.
    savers.append((frame, "save_inputs") if hasattr(frame, "save_inputs") else (of_checkpoint._NoopSaveInputs, "apply"))
    for owner, name in savers:
        save = getattr(owner, name)
        if not isinstance(save, _CalledBy):
            setattr(owner, name, _CalledBy(call, save))


class _CalledBy:
    """A function that another one calls; as an attribute of a class it is a method if that function is one."""

    def __init__(self, call: Callable[[Callable[..., Any], tuple[Any, ...]], Any], save: Callable[..., Any]) -> None:
        self._call, self._save = call, save

    def __call__(self, *args: Any) -> Any:
        return self._call(self._save, args)

    def __get__(self, owner: Any, kind: type) -> Callable[..., Any]:
        bound = owner is not None and isinstance(self._save, FunctionType)
        return partial(self, owner) if bound else self


# torch.func


def transforms_active() -> bool:
    """Tell whether a transform of torch.func is running; it has no public way to ask."""
    return torch._C._are_functorch_transforms_active()


def transform_levels() -> list[str]:
    """Name the transforms that are running, outermost first."""
    return [_NAMES.get(level.key().name, level.key().name) for level in _functorch.get_interpreter_stack() or ()]


def is_wrapped(tensor: Tensor) -> bool:
    """Tell whether a transform of torch.func has wrapped a tensor."""
    return bool(_functorch.is_functorch_wrapped_tensor(tensor))


def unwrapped(tensor: Tensor) -> Tensor:
    """Return the tensor inside the wrapper of a transform."""
    inner: Tensor = _functorch.get_unwrapped(tensor)
    return inner


# Modules


def runs_inside_compile() -> bool:
    """Tell whether torch.compile runs or traces the code around this, also where it could not trace it.

    ``torch.compiler.is_compiling`` tells the latter alone.
    """
    from torch._C._dynamo import eval_frame

    return torch.compiler.is_compiling() or eval_frame.get_eval_frame_callback() is not None


def own_parameters(module: nn.Module) -> Iterator[Tensor]:
    """Yield a module's own parameters, or in a replica of DataParallel their copies, which are plain tensors."""
    return (parameter for parameter in module._parameters.values() if parameter is not None)


def inside_compiled(model: nn.Module) -> nn.Module:
    """Return the model inside the wrapper that torch.compile put around it, or the model itself."""
    if isinstance(model, torch._dynamo.OptimizedModule):
        inner: nn.Module = model._orig_mod
        return inner
    return model


# Compiled code


def compiled_cpp(source: str) -> Any:
    """Compile C++ as torch.compile does, or find it in torch's cache on disk, and return the loaded library.

    torch.utils.cpp_extension would do it too, but needs Ninja, and a minute for torch's headers.
    """
    with redirect_stderr(StringIO()):  # older versions of torch say where CUDA is if there is no GPU
        from torch._inductor.codecache import CppCodeCache  # takes a second to import

        return CppCodeCache.load(source)


def has_plain_memory(tensor: Tensor) -> bool:
    """Tell whether the values of a tensor lie at its address as they are.

    They do not in a subclass, in a wrapper, under a lazy negation, and in zeros that autograd makes without memory.
    """
    lazy = tensor.is_neg() or tensor._is_zerotensor()
    return type(tensor) in (Tensor, nn.Parameter) and not lazy and not transforms_active()
