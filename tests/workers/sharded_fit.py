"""What a sharded step measures, and what ``fit`` foretells of it.

``torchrun --nproc-per-node 2 sharded_fit.py CASE,... folder`` compares them. Each rank writes what it found to
``folder/RANK.json``: case -> way -> name -> [foretold, measured].
"""

import copy
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from backsketch import blocks_of, peak_memory, saved_memory
from backsketch.fitting.batches import ResizableBatch
from backsketch.fitting.meta_copy import meta_copy
from backsketch.fitting.rank_share import RankShare
from backsketch.fitting.subject import Subject, WaySteps
from backsketch.fitting.ways import ways_for
from backsketch.storage import cpu_kernel
from backsketch.tensor_storages import sizes
from small import gpt2, llama, roberta, vit, without_dropout

WAYS = ("exact", "checkpointing", "sketches and rest")
MEASURED_STEPS = 8


def uneven():
    """No dimension 0 is even, apart from those of attention."""
    return without_dropout(llama, vocabulary=997, num_hidden_layers=3, intermediate_size=251)


def wide():
    """The vocabulary is most of the model, so that the peak is where its weights or gradients are gathered."""
    model, batch = without_dropout(llama, vocabulary=20011, num_hidden_layers=2, hidden_size=64, intermediate_size=64)
    return model, {name: tensor[:1, :8] for name, tensor in batch.items()}


CASES = {
    "uneven": uneven,
    "wide": wide,
    "roberta": lambda: without_dropout(roberta, num_hidden_layers=4),
    "gpt2": lambda: without_dropout(gpt2),
    "vit": lambda: without_dropout(vit, num_hidden_layers=3),
}


def foretold(model, batch, way, ranks):
    """Return what ``fit`` foretells of a rank."""
    own, blocks = meta_copy(model), blocks_of(model)
    inputs = ResizableBatch.of(((), batch))
    subject = Subject(own, blocks, inputs.sized, None)
    count = len(blocks) if way.checkpointed == "all" else 0
    step = WaySteps(subject, way, few=False).at(inputs.batch, inputs.length, count)
    share = RankShare.of(own, blocks, "adamw", ranks)
    return {
        "weights": share.weights,
        "gradients": share.gradients,
        "states": share.states,
        "activations": step.kept,
        "peak": step.peak(share).total,
    }


def measured(model, batch, way):
    """Shard a model and return what its steps after the second measure on this rank.

    A thread of gloo lets go of the tensors of a finished exchange a little late at times, which raises a peak now and
    then: the least of several steps is that of the model.
    """
    blocks = blocks_of(model)
    way.apply(model, blocks if way.checkpointed == "all" else ())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name in blocks:
        fully_shard(model.get_submodule(name), mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in [model, *(model.get_submodule(name) for name in blocks)]:
        module.set_custom_reduce_scatter(InPlace())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(2):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    peaks = []
    for _ in range(MEASURED_STEPS):
        with peak_memory(model, optimizer) as peak, saved_memory(model) as saved:
            loss = model(**batch).loss
            kept = saved.activations
            loss.backward()
            del loss
            gradients = held(parameter.grad for parameter in model.parameters())
            optimizer.step()
        optimizer.zero_grad()
        peaks.append(peak.total)
    states = (value for state in optimizer.state.values() for value in state.values())
    return {
        "weights": held([*model.parameters(), *model.buffers()]),
        "gradients": gradients,
        "states": held(states),
        "activations": kept,
        "peak": min(peaks),
    }


class InPlace:
    """Reduce and scatter without memory of its own, as NCCL does; gloo reduces a copy of its input."""

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        dist.all_reduce(input_tensor, op=op, group=group)
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])


def held(tensors):
    return sum(sizes(tensor for tensor in tensors if isinstance(tensor, Tensor)).values())


def compare(make):
    torch.manual_seed(0)
    model, batch = make()
    batch = {name: tensor.clone() for name, tensor in batch.items()}
    found = {}
    for way in ways_for(model, True):
        if way.name in WAYS:
            told = foretold(model, batch, way, dist.get_world_size())
            real = measured(copy.deepcopy(model), batch, way)
            found[way.name] = {name: [told[name], real[name]] for name in told}
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    cpu_kernel._LEAST_VALUES = 1  # fused, as on meta
    dist.init_process_group("gloo")
    names, folder = sys.argv[1].split(","), Path(sys.argv[2])
    outcome = {name: compare(CASES[name]) for name in names}
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(outcome))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # a thread of torch may still run when the interpreter ends, which then aborts now and then
