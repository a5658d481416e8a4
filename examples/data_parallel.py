"""Train on two processes with DDP: each rank has its own sketch, so the noise of their mean is half that of one."""

import os
import socket

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import backsketch as bs

RANKS, DRAWS = 2, 200


def work(rank, port):
    """Measure how far averaged gradients lie from the exact one."""
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    torch.manual_seed(0)  # the same on all ranks: weights, data and the generator that seeds come from
    layer, batch = nn.Linear(32, 16, bias=False), torch.randn(256, 32)
    layer(batch).square().mean().backward()
    exact, layer.weight.grad = layer.weight.grad, None
    alone = bs.sketch_(nn.Sequential(layer), bs.SketchConfig(ratio=0.1))
    together = DistributedDataParallel(alone)
    noise = {"one rank": error(alone, batch, exact), "mean of two": error(together, batch, exact)}
    if rank == 0:
        for name, value in noise.items():
            print(f"{name}: squared error of the weight gradient {value:.5f}")
        print(f"ratio {noise['mean of two'] / noise['one rank']:.2f}")
    dist.barrier()
    dist.destroy_process_group()


def error(model, batch, exact):
    """Return the mean squared distance of gradients from the exact one."""
    total = 0.0
    for _ in range(DRAWS):
        model(batch).square().mean().backward()
        (parameter,) = model.parameters()
        total += (parameter.grad - exact).square().sum().item() / DRAWS
        parameter.grad = None
    return total


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    spawn(work, (port,), nprocs=RANKS)
