"""An accelerator with real values and without hardware: a device type whose memory is the host's and kernels the CPU's.

Torch's key for devices from outside PyTorch takes Python functions as kernels. One runs every operation on CPU tensors
over the same memory. Nothing else in torch or in the code under test knows that this device is a CPU. Registration is
for good, so it belongs in a process of its own.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_map

NAME = "pretend"
SETUP = "_setup_privateuseone_for_python_backend"
available = hasattr(backend_registration, SETUP)

_aten = torch.ops.aten
_LIKE_A_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_CASTING = torch._C.DispatchKeySet(torch._C._dispatch_key_parse("AutocastPrivateUse1"))
_nothing = torch._C._acc.create_empty_tensor
_WAITING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_CAST_DOWN = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm")

reads: list[str] = []  # operations whose result the host needs, so that it waits for the device
calls: list[str] = []  # operations on the device
_libraries: list[torch.library.Library] = []


def register():
    """Make the device known to torch, with autocast."""
    module = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        _is_in_bad_fork=lambda: False,
        manual_seed_all=lambda seed: None,
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
    )
    getattr(backend_registration, SETUP)(NAME, backend_module=module)
    every, some = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    every.fallback(_run, "PrivateUse1")
    every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for name, kernel in (("empty.memory_format", _empty), ("empty_strided", _empty_strided), ("_copy_from", _copy)):
        some.impl(name, kernel, "PrivateUse1")
    for name in _CAST_DOWN:
        some.impl(name, _cast(name, lambda: torch.get_autocast_dtype(NAME)), "AutocastPrivateUse1")
    some.impl("cross_entropy_loss", _cast("cross_entropy_loss", lambda: torch.float32), "AutocastPrivateUse1")
    _libraries.extend((every, some))


def _run(operator, *args, **kwargs):
    """Run an operation by the CPU's kernel on the memory of its arguments."""
    calls.append(str(operator))
    if _WAITING.intersection(operator.tags):
        reads.append(str(operator))
    pairs = []

    def to_host(value):
        if isinstance(value, torch.device):
            return torch.device("cpu") if value.type == NAME else value
        if not _is_here(value):
            return value
        pairs.append((value, _on_host(value)))
        return pairs[-1][1]

    def from_host(value):
        if not isinstance(value, Tensor):
            return value
        for own, host in pairs:
            if value is host:
                return own
        for own, host in pairs:
            if value.untyped_storage()._cdata == host.untyped_storage()._cdata:
                return _placed(_nothing((0,), value.dtype), value, own.untyped_storage())
        return _on_device(value)

    numbers = zip(args, operator._schema.arguments, strict=False)
    args = tuple(_as_tensor(value) if str(argument.type) == "Tensor" else value for value, argument in numbers)
    results = operator(*tree_map(to_host, args), **tree_map(to_host, kwargs))
    for own, host in pairs:
        if own.shape != host.shape:  # resized, as an ``out`` without values
            _placed(own, host, _storage_over(host))
    return tree_map(from_host, results)


def _as_tensor(value):
    """Return a number as a tensor, as torch had it before it called Python."""
    is_real = isinstance(value, float)
    return torch.tensor(value, dtype=torch.float64 if is_real else None) if isinstance(value, (int, float)) else value


def _empty(size, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    return _on_device(torch.empty(size, dtype=dtype, device="cpu", memory_format=memory_format))


def _empty_strided(size, stride, *, dtype=None, layout=None, device=None, pin_memory=None):
    return _on_device(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


def _copy(source, target, non_blocking=False):
    if not _is_here(target) and not non_blocking:
        reads.append("copy to the host")
    (_on_host(target) if _is_here(target) else target).copy_(_on_host(source) if _is_here(source) else source)
    return target


def _cast(name, dtype):
    """Return the kernel of an operation that autocast runs in a type."""
    operator = getattr(_aten, name).default

    def cast(value):
        floating = isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64
        return value.to(dtype()) if floating else value

    def run(*args, **kwargs):
        with torch._C._ExcludeDispatchKeyGuard(_CASTING):
            return operator(*tree_map(cast, args), **tree_map(cast, kwargs))

    return run


def _is_here(value):
    return isinstance(value, Tensor) and value.device.type == NAME


def _on_host(tensor):
    """Return a CPU tensor over the memory of one on the device."""
    memory = tensor.untyped_storage().host
    return torch.empty(0, dtype=tensor.dtype).set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())


def _on_device(values):
    return _placed(_nothing((0,), values.dtype), values, _storage_over(values))


def _storage_over(values):
    host = values.untyped_storage()
    storage: Any = torch._C._construct_storage_from_data_pointer(host.data_ptr(), torch.device(NAME, 0), host.nbytes())
    storage.host = host  # which lives as long
    return storage


def _placed(tensor, values, storage):
    """Let a tensor of the device look at its memory as CPU values do at theirs."""
    layout = values.storage_offset(), values.shape, values.stride()
    return _aten.set_.source_Storage_storage_offset.redispatch(_LIKE_A_CPU, tensor, storage, *layout)
