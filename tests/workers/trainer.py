"""A training script as a user would write it, for ``accelerate launch``: ``trainer.py folder``."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from training import train

if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    trainer = train(folder, ddp_backend="gloo")
    rank = trainer.args.process_index
    weights = {name: tensor.detach() for name, tensor in trainer.model.named_parameters()}
    torch.save(
        {"world": trainer.args.world_size, "weights": weights, "log": trainer.state.log_history}, folder / f"{rank}.pt"
    )
    torch.distributed.barrier()  # a rank that leaves early takes its peer's connections with it
    torch.distributed.destroy_process_group()
