"""Train on a pretend accelerator and on the CPU, and print what differs as JSON.

A process of its own, because a device is registered for good.
"""

import copy
import json
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

import pretend_device as pretend

pretend.register()
_Generator = torch.Generator


class Generator:
    """A generator of the CPU, whatever the device: Python cannot give a device its own."""

    def __new__(cls, device=None):
        return _Generator()


setattr(torch, "Generator", Generator)  # noqa: B010 (a type is not assigned to)

import backsketch as bs  # noqa: E402
import small  # noqa: E402
from backsketch.linear import checkpointing  # noqa: E402
from backsketch.storage.packing import without_fused_kernels  # noqa: E402

checkpointing._warned = True
FEATURES, OUTPUTS = 300, 40
LENGTHS = torch.tensor([24, 20, 10, 5])
MASK = torch.arange(24) < LENGTHS[:, None]
BF16, FP16 = torch.bfloat16, torch.float16
LAYERS = {
    "recommended": (bs.SketchConfig.recommended(), torch.float32, True),
    "recommended bf16": (bs.SketchConfig.recommended(dtype=BF16), BF16, False),
    "rows as they are": (bs.SketchConfig(ratio=0.3), torch.float32, True),
    "4 bits rotated": (bs.SketchConfig(ratio=1.0, bits=4, rotate=True), BF16, True),
    "3 bits of half, centred": (bs.SketchConfig(ratio=0.5, bits=3, center=True), torch.float32, True),
    "8 bits fp16": (bs.SketchConfig(ratio=1.0, bits=8), FP16, False),
    "2 bits": (bs.SketchConfig(ratio=0.6, bits=2), torch.float32, False),
    **{
        kind: (bs.SketchConfig(kind=kind, ratio=0.3, block=8 * (place % 2) or None, bits=4), torch.float32, False)
        for place, kind in enumerate(bs.SKETCHES)
    },
}


def error(one, other):
    return float((one - other.cpu()).abs().max() / one.abs().max().clamp(min=1e-30))


def saving_to(kept):
    """Return a context in which whatever is saved for backward is noted too."""

    def pack(tensor):
        kept.append(tensor)
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)


def layer_case(config, dtype, masked):
    """Compare what a layer keeps and its gradients."""
    torch.manual_seed(0)
    layer = bs.SketchedLinear(FEATURES, OUTPUTS, config=config, dtype=dtype)
    x, y = (torch.randn(*MASK.shape, size, dtype=dtype) for size in (FEATURES, OUTPUTS))
    y = y * MASK.unsqueeze(-1)
    found: list[Any] = []
    for device in ("cpu", pretend.NAME):
        own, own_x = copy.deepcopy(layer).to(device), x.to(device, copy=True).requires_grad_()
        own_y, mask = y.to(device), MASK.to(device)
        kept: list[torch.Tensor] = []
        torch.manual_seed(3)
        pretend.reads.clear()
        pretend.calls.clear()
        with bs.valid_rows(mask) if masked else nullcontext(), saving_to(kept):
            out = own(own_x)
        out.backward(own_y)
        reads = list(pretend.reads)
        found.append((kept, (out.detach(), own_x.grad, own.weight.grad, own.bias.grad)))
    (host_kept, host), (kept, device) = found
    return {
        "kept": [torch.equal(one.detach(), other.detach().cpu()) for one, other in zip(host_kept, kept, strict=True)],
        "errors": [error(one, other) for one, other in zip(host, device, strict=True)],
        "reads": reads,
        "calls": len(pretend.calls),
    }


WAYS: dict[str, Any] = {
    "all, padded": {"rest": True, "padded": True},
    "linear layers, checkpointed": {"reentrant": False, "padded": True},
    "all, checkpointed, dropout": {"rest": True, "reentrant": True, "dropout": 0.1},
    "all, monitored": {"rest": bs.RestConfig(norm=4), "monitored": True},
    "all, autocast": {"rest": True, "autocast": True},
}


def make_model(dropout):
    return small.roberta(num_hidden_layers=1, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)


def train(device, convert, *, padded=False, dropout=0.0, reentrant=None, monitored=False, autocast=False):
    """Train two steps; return losses, gradients, bytes kept, what was read, and records of the monitor."""
    torch.manual_seed(0)
    model, batch = make_model(dropout)
    if padded:
        batch["attention_mask"] = (torch.arange(small.LENGTH) < torch.tensor([32, 28, 16, 5])[:, None]).long()
    convert(model.train())
    model.to(device)
    batch = {name: each.to(device) for name, each in batch.items()}
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = bs.NoiseMonitor(model) if monitored else nullcontext()
    losses, kept = [], []
    torch.manual_seed(3)
    pretend.reads.clear()
    with monitor:
        for _ in range(2):
            optimizer.zero_grad()
            with bs.saved_memory(model) as memory, torch.autocast(device, torch.bfloat16, enabled=autocast):
                loss = model(**batch).loss
            kept.append(memory.total)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    reads = list(pretend.reads)
    records = monitor.to_records() if monitored else []
    gradients = torch.cat([each.grad.flatten().cpu() for each in model.parameters()])
    return [float(each) for each in losses], gradients, kept, reads, records


def model_case(rest=None, **options):
    """Compare training, and what was read with what an exact model reads."""
    exact = train(pretend.NAME, lambda model: model, padded=options.get("padded", False))
    found = [train(device, lambda model: bs.sketch_(model, rest=rest), **options) for device in ("cpu", pretend.NAME)]
    (host_losses, host_gradients, host_kept, _, host_records), (losses, gradients, kept, reads, records) = found
    variances = [[record["sketch_variance"] for record in each] for each in (host_records, records)]
    return {
        "losses": [host_losses, losses],
        "error": error(host_gradients, gradients),
        "kept": [host_kept, kept],
        "reads": [exact[3], reads],
        "variances": variances,
    }


def profiles():
    """Return the bytes of a profile on each device."""
    found = []
    for device in ("cpu", pretend.NAME, "meta"):
        torch.manual_seed(0)
        model, batch = make_model(0.0)
        batch = {name: each.to(device) for name, each in batch.items()}
        result = bs.profile(model.train().to(device), **batch, rest=True)
        found.append([result.kept_before, result.kept_after, result.peak_before.total, result.peak_after.total])
    return found


def broken_promise():
    """Return the warnings of two steps in which masked rows get a gradient."""
    layer = bs.SketchedLinear(FEATURES, OUTPUTS, config=bs.SketchConfig(ratio=0.5)).to(pretend.NAME)
    x, mask = torch.randn(*MASK.shape, FEATURES).to(pretend.NAME), MASK.to(pretend.NAME)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            with bs.valid_rows(mask):
                out = layer(x)
            out.sum().backward()
    return [str(each.message) for each in told]


def without_amp():
    """Monitor a layer on the device as if it had no autocast, and return how many records there are."""
    del torch.get_device_module(pretend.NAME).get_amp_supported_dtype
    layer = bs.SketchedLinear(FEATURES, OUTPUTS, config=bs.SketchConfig(kind="hash", dim=1)).to(pretend.NAME)
    with bs.NoiseMonitor(layer) as monitor:
        layer(torch.randn(*MASK.shape, FEATURES).to(pretend.NAME)).sum().backward()
    return len(monitor.to_records())


with without_fused_kernels():
    measured = {
        "layers": {name: layer_case(*case) for name, case in LAYERS.items()},
        "models": {name: model_case(**way) for name, way in WAYS.items()},
        "profiles": profiles(),
        "told": broken_promise(),
        "without amp": without_amp(),
    }
print(json.dumps(measured))
