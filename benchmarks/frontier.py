"""What every setting keeps, the noise it adds and the time it takes, on real activations.

``backsketch frontier`` with the reports of this repository as --out; --help tells more.
"""

import sys
from pathlib import Path

from backsketch.cli import main
from backsketch.programs.page_keeping import restart_keeping_pages

if __name__ == "__main__":
    restart_keeping_pages()
    raise SystemExit(main(["frontier", "--out", str(Path(__file__).parent / "reports"), *sys.argv[1:]]))
