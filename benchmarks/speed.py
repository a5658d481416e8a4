"""How fast a training step is beside nn.Linear, the paper's method, checkpointing and offloading: see --help."""

import typer

from backsketch_bench.speed import main

if __name__ == "__main__":
    typer.run(main)
