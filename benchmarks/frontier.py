"""What every setting keeps, the noise it adds and the time it takes, on real activations.

``backsketch frontier`` with the reports of this repository as --out; --help tells more.
"""

import sys
from pathlib import Path

from backsketch.cli import main

if __name__ == "__main__":
    raise SystemExit(main(["frontier", "--out", str(Path(__file__).parent / "reports"), *sys.argv[1:]]))
