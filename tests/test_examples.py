"""The examples run as they stand, are short, and print what convinces."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
PRINTED = {
    "choose_a_budget": ["its input is held anyway", "expected noise", "budget must"],
    "compile_and_amp": ["compiled, fp32", "autocast to torch.float16"],
    "data_parallel": ["ratio 0."],
    "hugging_face_trainer": ["step 12: kept"],
    "lightning_trainer": ["layers SketchedLinear", "after the fit: Linear"],
    "lora_with_peft": ["MiB ->", "merged: Linear"],
    "padded_batches": ["times the noise"],
    "quick_start": ["3 of 3 linear layers are sketched", "Linear again"],
    "watch_the_noise": ["the paper's Gaussian", "ours in the same bytes"],
}


def test_every_example_is_known_here():
    assert sorted(path.stem for path in EXAMPLES.glob("*.py")) == sorted(PRINTED)


@pytest.mark.parametrize("name", PRINTED)
def test_an_example_is_short_and_prints_what_it_promises(name, tmp_path):
    path = EXAMPLES / f"{name}.py"
    assert len(path.read_text().splitlines()) < 60
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, path], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert run.returncode == 0, run.stderr
    for text in PRINTED[name]:
        assert text in run.stdout
    assert not list(tmp_path.iterdir())
