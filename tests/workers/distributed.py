"""What two ranks started by torchrun check: ``torchrun --nproc-per-node 2 distributed.py NAME folder``.

A file of its own because torchrun runs a script. Rank 0 writes what a check measured to ``folder/NAME.json``.
"""

import copy
import json
import math
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from backsketch import (
    NoiseLimit,
    NoiseMonitor,
    RestConfig,
    SketchConfig,
    peak_memory,
    plan,
    saved_memory,
    sketch_,
    summary,
    unsketch_,
)
from backsketch.integrations.session import Session
from backsketch.rest.saving import observe_saving

ROWS, FEATURES, OUTPUTS = 64, 16, 8
CONFIG = SketchConfig(ratio=0.25)
REST = RestConfig(pointwise=2, product=2, min_elements=64)


class Model(nn.Module):
    """Two layers, the first of them in a block of its own."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.GELU())
        self.head = nn.Linear(FEATURES, OUTPUTS)

    def forward(self, x):
        return self.head(self.block(x))


def make_model(config=CONFIG):
    torch.manual_seed(11)
    model = Model()
    return model if config is None else sketch_(model, config)


def data(rank=0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(ROWS, FEATURES, generator=generator), torch.randn(ROWS, OUTPUTS, generator=generator)


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def weight_gradient(module, call, x, y):
    """Return ∂W of the head after one step on the loss mean(out · y)."""
    module.zero_grad()
    (call(x).float() * y).sum().backward()
    return full(module.head.weight.grad).float().clone()


def sample(module, call, x, y, count):
    torch.manual_seed(5)  # every rank the same, as trainers do
    return torch.stack([weight_gradient(module, call, x, y) for _ in range(count)])


def measure(samples, exact):
    """Return the projection of the mean on the exact gradient, its standard error, and the noise."""
    projection = (samples * exact).flatten(1).sum(1) / exact.square().sum()
    error = projection.std() / len(samples) ** 0.5
    noise = (samples - exact).square().sum((1, 2)).mean()
    return {"projection": projection.mean().item(), "error": error.item(), "noise": noise.item()}


def exact_gradient(ranks):
    """Return ∂W over the batches of all ``ranks`` in one process, averaged as DDP does."""
    model = make_model(None)
    return torch.stack([weight_gradient(model, model, *data(rank)) for rank in ranks]).mean(0)


def ddp():
    """Gradients in expectation with a batch of its own on every rank; noise with one and the same batch."""
    model = make_model()
    parallel = DistributedDataParallel(model)
    everywhere = measure(sample(model, parallel, *data(dist.get_rank()), 400), exact_gradient([0, 1]))
    together = measure(sample(model, parallel, *data(), 400), exact_gradient([0]))
    alone = measure(sample(model, model, *data(), 400), exact_gradient([0]))
    return {"mean": everywhere, "noise": together["noise"] / alone["noise"]}


def ddp_compiled():
    model = make_model()
    parallel = torch.compile(DistributedDataParallel(model), backend="aot_eager")
    return {"mean": measure(sample(model, parallel, *data(dist.get_rank()), 300), exact_gradient([0, 1]))}


def shard(model, policy=None):
    policy = policy or MixedPrecisionPolicy()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def fsdp():
    """Gradients in expectation, noise, and the mixed precision policy."""
    model = shard(make_model())
    everywhere = measure(sample(model, model, *data(dist.get_rank()), 300), exact_gradient([0, 1]))
    together = measure(sample(model, model, *data(), 300), exact_gradient([0]))
    single = make_model()
    alone = measure(sample(single, single, *data(), 300), exact_gradient([0]))

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    half = shard(make_model(), policy)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.dtype) or t, lambda t: t):  # type: ignore[func-returns-value]
        out = half(data()[0])
    assert out.dtype == torch.bfloat16
    assert torch.float32 not in saved
    low = measure(sample(half, half, *data(dist.get_rank()), 300), exact_gradient([0, 1]))
    assert half.head.weight.grad.dtype == torch.float32
    return {"mean": everywhere, "noise": together["noise"] / alone["noise"], "bf16": low}


def with_rest(wrap):
    """Everything else in few bits: gradients in expectation, noise, and how many tensors are packed.

    Linear layers are not sketched, so the noise is that of the input of the head, which is kept in two bits.
    """
    model = sketch_(make_model(None), {"*": None}, rest=REST)
    call = wrap(model)
    kept = []
    with observe_saving(lambda family, tensor, packed: kept.append(packed)):
        everywhere = measure(sample(model, call, *data(dist.get_rank()), 200), exact_gradient([0, 1]))
    together = measure(sample(model, call, *data(), 200), exact_gradient([0]))
    single = sketch_(make_model(None), {"*": None}, rest=REST)
    alone = measure(sample(single, single, *data(), 200), exact_gradient([0]))
    packed = sum(each is not None for each in kept) / 200
    return {"mean": everywhere, "noise": together["noise"] / alone["noise"], "packed": packed}


def ddp_rest():
    return with_rest(DistributedDataParallel)


def fsdp_rest():
    return with_rest(shard)


def fsdp_measured():
    """What a sharded model keeps: by the measures themselves, in a plan, and in a trainer's session."""
    exact, model = shard(make_model(None)), shard(make_model())
    x, y = data()
    loss = lambda out: (out * y).sum()  # noqa: E731
    kept = []
    for each in (exact, model):
        with saved_memory(each) as saved:
            total = loss(each(x))
        kept.append(saved.activations)
        total.backward()
    with peak_memory(model) as peak:
        loss(model(x)).backward()
    ends = sum(change for item, change, _ in peak.changes if item.role == "parameters")
    shards = sum(parameter.to_local().untyped_storage().nbytes() for parameter in model.parameters())
    exact(x)  # and no backward, which would put the gathered parameters back
    planned = plan(exact, x, budget="60%", loss=loss)
    gathered = [name for name, parameter in exact.named_parameters() if not isinstance(parameter, DTensor)]
    session = Session(exact, None)
    session.begin(planned)
    session.step_begin()
    with session.measuring():
        loss(exact(x)).backward()
    report = session.report()
    session.end()
    reported = report["backsketch/kept_bytes"]
    return {
        "kept": kept,
        "planned": len(planned),
        "gathered": gathered,
        "reported": reported,
        "weights": [ends, shards],
    }


def fsdp_converted_after():
    """Convert a model that is sharded already, one layer of it by itself, and restore it."""
    model = make_model(None)
    fully_shard(model.head, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    sketch_(shard(model), CONFIG)
    sketched = [layer.type for layer in summary(model).sketched]
    mean = measure(sample(model, model, *data(dist.get_rank()), 300), exact_gradient([0, 1]))
    unsketch_(model)
    exact = weight_gradient(model, model, *data(dist.get_rank()))
    return {
        "mean": mean,
        "sketched": sketched,
        "restored": [type(model.block[0]).__name__, type(model.head).__name__],
        "error": (exact - exact_gradient([0, 1])).abs().max().item(),
    }


def train(model, call, optimizer, steps):
    x, y = data(dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        (call(x) - y).square().mean().backward()
        optimizer.step()


def weights_of(model):
    return [full(parameter).detach().clone() for parameter in model.parameters()]


def same(first, second):
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def ddp_resume():
    """A run stopped after three steps and resumed ends with the weights of one that was not, bit for bit."""

    def start():
        model = make_model()
        return model, DistributedDataParallel(model), torch.optim.AdamW(model.parameters(), lr=0.01)

    torch.manual_seed(3)
    model, parallel, optimizer = start()
    train(model, parallel, optimizer, 3)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), torch.get_rng_state()))
    train(model, parallel, optimizer, 3)

    resumed, parallel, optimizer = start()
    resumed.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    torch.set_rng_state(saved[2])
    train(resumed, parallel, optimizer, 3)
    return {
        "same": same(weights_of(model), weights_of(resumed)),
        "plain": list(saved[0]) == list(make_model(None).state_dict()),
    }


def ddp_limit():
    """NoiseLimit under DDP, where rank 1 measures NaN in some steps, and a budget in bytes that the limit exceeds."""
    torch.manual_seed(3)
    model = make_model(SketchConfig(ratio=1.0, bits=4))
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    budget = 1200
    controller = NoiseLimit(model, 1e-3, 3, budget=budget, monitor=NoiseMonitor(model).start())
    x, y = data(dist.get_rank())
    for step in range(12):
        broken = step in (1, 2, 5) and dist.get_rank() == 1
        ((parallel(x) - y).square().mean() * (math.nan if broken else 1)).backward()
        if step in (1, 2, 5):
            optimizer.zero_grad()  # as a gradient scaler does
        optimizer.step()
        optimizer.zero_grad()
    controller.stop()
    mine = [str(change) for change in controller.changes], {name: str(c) for name, c in controller.configs.items()}
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    return {
        "alike": all(each == mine for each in ranks),
        "changes": len(controller.changes),
        "kept": controller.kept_bytes / budget,
        "finite": all(math.isfinite(value) for own in controller.state_dict()["averages"].values() for value in own),
    }


def fsdp_resume():
    """The same, sharded; and a sharded state dict loads into a plain model."""

    def start():
        model = shard(make_model())
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    torch.manual_seed(3)
    model, optimizer = start()
    train(model, model, optimizer, 3)
    saved = copy.deepcopy((*get_state_dict(model, optimizer), torch.get_rng_state()))
    train(model, model, optimizer, 3)

    resumed, optimizer = start()
    set_state_dict(resumed, optimizer, model_state_dict=saved[0], optim_state_dict=saved[1])
    torch.set_rng_state(saved[2])
    train(resumed, resumed, optimizer, 3)
    plain = make_model(None)
    plain.load_state_dict({name: full(tensor) for name, tensor in model.state_dict().items()})
    return {
        "same": same(weights_of(model), weights_of(resumed)),
        "plain": same(weights_of(model), weights_of(plain)),
        "restored": type(unsketch_(model).head) is nn.Linear,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    names, folder = sys.argv[1].split(","), Path(sys.argv[2])
    for name in names:
        outcome = globals()[name]()
        if dist.get_rank() == 0:
            (folder / f"{name}.json").write_text(json.dumps(outcome))
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # a thread of torch may still run when the interpreter ends, which then aborts now and then
