"""Kernels launched, bytes moved and the time estimated from them for a step on an accelerator: see --help."""

from pathlib import Path

from backsketch_bench.launches_command import main

if __name__ == "__main__":
    main(Path(__file__).parent / "reports")
