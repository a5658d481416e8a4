"""Let experiments import the benchmarks, which they build on."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
