"""The benchmarks run, and what does not depend on the clock is checked."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    out = tmp_path_factory.mktemp("speed")
    command = [sys.executable, BENCHMARKS / "speed.py", "--quick", "--part", "transient", "--out", out]
    subprocess.run(command, check=True, capture_output=True)
    assert (out / "speed.json").exists()
    assert next(out.glob("*.md")).read_text().count("MiB") > 10
    return json.loads((out / "speed.json").read_text())


def test_a_record_says_what_it_was_made_with(record):
    assert set(record) == {"when", "settings", "versions", "commit", "machine", "results"}


def test_a_row_or_blocked_sketch_needs_no_more_than_what_it_keeps(record):
    """Beyond nn.Linear, a step's peak is what is kept and at most 1 MiB."""
    for row in record["results"]["transient"]:
        if row["name"].startswith(("rows", "hash")) or "block" in row["name"]:
            assert row["beyond_linear"] <= row["kept"] + 2**20, row["name"]


def test_a_wrong_part_is_named():
    run = subprocess.run([sys.executable, BENCHMARKS / "speed.py", "--part", "colour"], capture_output=True, text=True)
    assert run.returncode == 2
    assert "colour" in run.stderr
