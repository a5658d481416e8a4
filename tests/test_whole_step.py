"""Whole steps: what the benchmark measures and writes, and that kept bytes are those that the process really holds."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("matplotlib")

from backsketch_bench import whole_step
from backsketch_bench.whole_step_command import main
from backsketch_bench.whole_step_measuring import BLOCKS
from backsketch_bench.whole_step_subjects import DTYPES, SUBJECTS
from backsketch_bench.whole_step_table import by_name, table, title, totals
from backsketch_bench.whole_step_ways import ADAPTER_WAYS, FULL_WAYS
from cases import needs_shown_saves
from commands import python

ROOT = Path(__file__).parent.parent
MIB = 2**20
RECORD = ROOT / "benchmarks" / "reports" / "whole_step.json"
RESIDENT = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"} | dict.fromkeys(
    ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), "65536"  # freed memory goes back to the system at once
)  # fmt: skip

pytestmark = needs_shown_saves


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    return whole_step.run(
        ["encoder-float32", "language-model-bfloat16-deep"], tmp_path_factory.mktemp("whole") / "made.json", quick=True
    )


def test_every_way_is_measured_and_none_changes_the_next(record):
    entries = by_name(record, "encoder-float32")
    assert list(entries) == [way.name for way in (*FULL_WAYS, *ADAPTER_WAYS)]
    assert entries["exact"]["time"] == 1
    kept = {name: entry["kept"] for name, entry in entries.items()}
    assert kept["whole step"] < kept["whole step, 8 bits"] < kept["linear sketches"] < kept["exact"]
    assert kept["LoRA, whole step"] < kept["LoRA"] / 3
    assert kept["checkpointing"] < kept["exact"] / 4
    assert all(sum(entry["parts"].values()) == entry["peak"] for entry in entries.values())


def test_a_deep_model_is_not_timed(record):
    entries = by_name(record, "language-model-bfloat16-deep")
    assert entries["whole step"]["kept"] < entries["exact"]["kept"] / 3
    assert not any("time" in entry for entry in entries.values())


def test_tables_begin_with_totals(record):
    shown = totals(record)
    assert [row[0] for row in shown.rows] == ["encoder-float32", "language-model-bfloat16, all blocks"]
    assert shown.rows[0][3].startswith("1.00 / ")
    assert shown.rows[1][3] == "- / - / -"
    assert (
        title(record, "language-model-bfloat16-deep")
        == "SmolLM2-135M without logits, bfloat16, 3 blocks, batch 1 × 128"
    )
    assert table(record, "encoder-float32").rows[0][:3] == ("exact", f"{shown.rows[0][1].split()[0]}", "100%")


@pytest.fixture
def counted(monkeypatch):
    """Measure nothing, and count what would have been."""
    ran = []
    entry = {"kept": MIB, "peak": 2 * MIB, "parts": {"activations": MIB}, "place": "", "seconds": 1.0, "time": 1.0}

    def measure(part, quick, rounds, clock):
        ran.append((part.name, clock.__name__))
        return [{"name": way.name, **entry} for way in FULL_WAYS]

    monkeypatch.setattr(whole_step.Part, "measure", measure)
    return ran


def test_finished_parts_are_not_measured_again(counted, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("os.getloadavg", lambda: (0.4, 0.0, 0.0))
    chosen = ["--quick", "--part", "encoder-float32"]
    main(tmp_path, chosen)
    main(tmp_path, [*chosen, "--part", "dropout-bfloat16"])
    assert counted == [("encoder-float32", "perf_counter"), ("dropout-bfloat16", "perf_counter")]
    shown = capsys.readouterr().out
    assert shown.startswith("Totals")
    assert "Others used the machine" not in shown
    assert (tmp_path / "quick" / "whole_step.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit):
        main(tmp_path, ["--out", str(tmp_path / "quick")])
    assert "was made with other settings" in capsys.readouterr().err


def test_a_busy_machine_is_written_down_and_timed_by_its_processor(counted, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("os.getloadavg", lambda: (3.0, 0.0, 0.0))
    main(tmp_path, ["--quick", "--part", "encoder-float32"])
    assert counted == [("encoder-float32", "process_time")]
    assert "Others used the machine" in capsys.readouterr().out
    written = json.loads((tmp_path / "quick" / "whole_step.json").read_text())["results"]["encoder-float32"]
    assert (written["busy"], written["clock"], written["load before"]) == (True, "processor time", 3.0)


def test_the_committed_record_is_whole():
    written = json.loads(RECORD.read_text())
    assert set(written["results"]) == set(whole_step.PARTS)
    assert written["settings"]["batches"] == {
        name: "{} x {}".format(*each.words(False)) for name, each in SUBJECTS.items()
    }
    assert written["settings"]["timed blocks"] == BLOCKS
    assert {part.dtype for part in whole_step.PARTS.values()} == set(DTYPES)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("way", ["exact", "rest"])
def test_kept_bytes_are_those_by_which_the_process_grows(way):
    ran = python(str(ROOT / "tests" / "workers" / "resident.py"), way, **RESIDENT)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["grown"] == pytest.approx(found["kept"], abs=0.15 * found["kept"] + 8 * MIB)
    assert found["left"] < 8 * MIB
    assert (found["kept"] < 50 * MIB) == (way == "rest")
