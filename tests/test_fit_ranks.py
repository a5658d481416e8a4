"""fit with ranks: what it foretells of a rank is what a step sharded by FSDP2 then measures, over gloo on two ranks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cases import needs_shown_saves

pytestmark = needs_shown_saves
WORKER = Path(__file__).parent / "workers" / "sharded_fit.py"
HELD = ("weights", "gradients", "activations")


def ranks_of(cases, folder):
    """Return what each of two ranks found: case -> way -> name -> [foretold, measured]."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = subprocess.run(
        [*launch, str(WORKER), ",".join(cases), str(folder)], capture_output=True, text=True, timeout=900, check=False
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def check(found, name):
    for rank, outcome in enumerate(found):
        assert outcome[name], name
        for way, sizes in outcome[name].items():
            assert [sizes[each][0] for each in HELD] == [sizes[each][1] for each in HELD], (name, way, rank, sizes)
            states, peak = sizes["states"], sizes["peak"]
            unpadded = states[0] - states[1]  # the last rank holds no padding in its states
            assert (unpadded >= 0) if rank else (unpadded == 0), (name, way, rank, sizes)
            assert peak[0] - unpadded == pytest.approx(peak[1], rel=5e-4), (name, way, rank, sizes)


def test_a_sharded_step_measures_what_is_foretold(tmp_path):
    found = ranks_of(["uneven", "wide"], tmp_path)
    for name in ("uneven", "wide"):
        check(found, name)


@pytest.mark.slow
def test_so_do_sharded_steps_of_other_models(tmp_path):
    found = ranks_of(["roberta", "gpt2", "vit"], tmp_path)
    for name in ("roberta", "gpt2", "vit"):
        check(found, name)
