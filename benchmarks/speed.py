"""How fast a training step is beside nn.Linear, the paper's method, checkpointing and offloading.

``backsketch bench`` with the reports of this repository as --out; --help tells more.
"""

import sys
from pathlib import Path

from backsketch.cli import main
from backsketch.programs.page_keeping import restart_keeping_pages

if __name__ == "__main__":
    restart_keeping_pages()
    raise SystemExit(main(["bench", "--out", str(Path(__file__).parent / "reports"), *sys.argv[1:]]))
