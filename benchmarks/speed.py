"""How fast a training step is beside nn.Linear, the paper's method, checkpointing and offloading.

``backsketch bench`` with the reports of this repository as --out; --help tells more.
"""

import sys
from pathlib import Path

from backsketch.cli import main

if __name__ == "__main__":
    raise SystemExit(main(["bench", "--out", str(Path(__file__).parent / "reports"), *sys.argv[1:]]))
