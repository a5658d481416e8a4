"""The peak of a step: no config of any layer raises it above the exact layer's."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from backsketch import SketchConfig, peak_memory, sketch_, valid_rows
from backsketch.torch_private import backward_under_modes
from cases import KINDS

# rows, in_features, out_features
SHAPES = {
    "lm_head": (256, 1024, 64000),
    "head of Llama 3": (2048, 4096, 128256),
    "up": (2048, 4096, 14336),
    "down": (2048, 14336, 4096),
    "many rows": (16384, 1024, 1024),
    "few rows": (8, 4096, 4096),
    "one output": (16384, 4096, 1),
    "narrow to wide": (16384, 64, 4096),
    "wide to narrow": (8192, 4096, 512),
}
SMALL = {"lm_head": (64, 128, 8000), "wide to narrow": (512, 1024, 64), "many rows": (8192, 128, 128)}
HELPERS = 6 * 2**20  # bytes that sketching may take for a moment, whatever the size of a layer

CONFIGS = [SketchConfig.recommended(), SketchConfig.recommended(0.27), SketchConfig(ratio=0.1)]
CONFIGS += [SketchConfig(ratio=1.0, bits=8), SketchConfig(ratio=1.0, bits=3, center=True)]
CONFIGS += [SketchConfig(ratio=1.0, bits=2, rotate=True), SketchConfig.recommended(dtype=torch.bfloat16)]
CONFIGS += [SketchConfig(ratio=0.9, center=True), SketchConfig(ratio=0.9, bits=8)]
CONFIGS += [SketchConfig(kind="hadamard", ratio=0.25, block=64, center=center) for center in (False, True)]
CONFIGS += [SketchConfig(kind="hadamard", ratio=0.9, block=64, bits=bits) for bits in (None, 8)]
KINDS_DRAWN = [SketchConfig(kind=kind, ratio=0.1, center=True) for kind in KINDS]
KINDS_DRAWN += [SketchConfig(kind="hash", ratio=0.9, center=True, bits=bits) for bits in (None, 8)]
KINDS_DRAWN += [SketchConfig(kind=kind, ratio=0.25, block=64, bits=4) for kind in KINDS]


def peak(layer, rows, dtype, mask=None):
    """Return the peak of a step whose input is made on the way and read by this layer alone, as in a network."""
    device = layer.weight.device
    source = torch.randn(rows, layer.in_features, dtype=dtype, device=device).requires_grad_()
    weights = torch.ones(rows, 1, dtype=dtype, device=device) if mask is None else mask.unsqueeze(1).to(dtype)
    layer.zero_grad()
    with peak_memory(layer) as watched, nullcontext() if mask is None else valid_rows(mask):
        (layer(source * 2) * weights).sum().backward()
    return watched.total


def peaks(shape, dtype, device, configs):
    """Return the peak of the exact layer, and of each config the larger one of a step with a mask and one without."""
    rows, inputs, outputs = shape
    layer = nn.Linear(inputs, outputs, device=device, dtype=dtype)
    exact = peak(layer, rows, dtype)
    mask = torch.arange(rows, device=device) % 4 > 0
    found = {}
    for config in configs:
        sketch_(layer, config)
        found[str(config)] = max(peak(layer, rows, dtype), peak(layer, rows, dtype, mask))
    return exact, found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_no_config_raises_the_peak_of_a_layer(shape, dtype):
    """On the meta device, where layers of any size cost nothing to run."""
    exact, found = peaks(SHAPES[shape], dtype, "meta", CONFIGS)
    worst = max(found, key=found.get)
    assert found[worst] <= 1.02 * exact, f"{worst}: {found[worst] / exact:.3f} of exact"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SMALL)
def test_no_kind_takes_more_than_small_helpers_beside_it(shape, dtype):
    """On a CPU, where every kind is really drawn."""
    exact, found = peaks(SMALL[shape], dtype, "cpu", CONFIGS + KINDS_DRAWN)
    worst = max(found, key=found.get)
    assert found[worst] <= 1.02 * exact + HELPERS, f"{worst}: {(found[worst] - exact) / 2**20:.1f} MiB above exact"


class Seen(TorchFunctionMode):
    """Note the functions that pass."""

    def __init__(self):
        super().__init__()
        self.functions = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.functions.append(func)
        return func(*args, **(kwargs or {}))


def test_what_is_no_optimizer_is_named():
    with pytest.raises(TypeError, match=r"^optimizer must be an Optimizer of torch, got int"):
        peak_memory(nn.Linear(4, 4), 3)  # type: ignore[arg-type]


def test_what_the_meter_asks_of_tensors_passes_no_mode():
    """Each operation of a backward under modes would otherwise cost several calls of every mode."""
    x = torch.randn(4, 4, requires_grad=True)
    with Seen() as seen, peak_memory():
        backward_under_modes((x * x).sum())
    assert torch.Tensor.sum in seen.functions
    assert torch.Tensor.untyped_storage not in seen.functions
