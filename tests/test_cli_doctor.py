"""``backsketch doctor``: it finds this machine healthy, and finds what is wrong where something is."""

import json
import platform
from importlib import metadata

import pytest
import torch

pytest.importorskip("typer")

from backsketch import SKETCHES, __version__
from backsketch.cli import doctor, environment, main, selftest
from backsketch.cli.selftest import Finding, self_test
from backsketch.sketches.rows import Rows
from commands import call, check_mistake


@pytest.fixture
def _few(monkeypatch):
    """Take few draws, and a probe that needs no second Python with torch."""
    monkeypatch.setattr(selftest, "DRAWS", 40)
    monkeypatch.setattr(environment, "_PROBE", "")


def test_this_machine_is_healthy():
    run = call("doctor", "--json")
    assert (run.returncode, run.stderr) == (0, "")
    found = json.loads(run.stdout)
    assert found["healthy"]
    assert found["versions"] == {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "backsketch": __version__,
    }
    assert found["bf16_on_cpu"]["works"]
    assert found["kernels"]["CPU"] == "fused, in C++"
    tested = [finding["config"].split()[0] for finding in found["self_test"] if finding["device"] == "cpu"]
    assert tested == [*SKETCHES, "rows"]
    assert all(0 < finding["standard_error"] < 0.05 for finding in found["self_test"])


@pytest.mark.usefixtures("_few")
def test_what_it_shows_fits_a_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert shown.endswith("healthy\n")
    assert shown.count("\n  ok ") == len(SKETCHES) + 1
    assert f"torch           {torch.__version__}" in shown
    assert "bf16 on CPU     works" in shown
    assert "packing on CPU  fused, in C++" in shown


@pytest.mark.usefixtures("_few")
def test_it_says_why_rows_are_not_packed_by_fused_kernels(monkeypatch, capsys):
    monkeypatch.setattr("backsketch.cpu_library.why_not", lambda: "no compiler found")
    monkeypatch.setattr(environment, "triton_is_here", lambda: False)
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "plain PyTorch, which takes longer: no compiler found" in shown
    assert "some 50 launches more a layer" in shown


@pytest.mark.usefixtures("_few")
def test_each_test_is_shown_when_it_is_done(monkeypatch, capsys):
    shown = []

    def watched(devices):
        for finding in self_test(devices):
            shown.append(capsys.readouterr().out)
            yield finding

    monkeypatch.setattr(doctor, "self_test", watched)
    assert main(["doctor"]) == 0
    assert f"torch           {torch.__version__}" in shown[0]
    assert all(text.startswith("  ok    cpu") and text.count("\n") == 1 for text in shown[1:])


@pytest.mark.usefixtures("_few")
def test_it_uses_one_thread_and_gives_the_others_back(monkeypatch):
    threads, right = [], selftest.sketched_linear  # type: ignore[attr-defined]

    def watched(*given):
        threads.append(torch.get_num_threads())
        return right(*given)

    monkeypatch.setattr(selftest, "sketched_linear", watched)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for _ in self_test(["cpu"]):
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert set(threads) == {1}


@pytest.mark.usefixtures("_few")
def test_a_biased_gradient_is_found(monkeypatch, capsys):
    monkeypatch.setattr(Rows, "gain", property(lambda self: 1.5 * self.rows / self.dim))
    assert main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["healthy"]
    failed = [finding["config"] for finding in found["self_test"] if not finding["ok"]]
    assert failed == ["rows 25%", "rows 98.5%, 3 bits, rotated"]
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "FAIL  cpu     rows 25%" in shown
    assert "not healthy" in shown


@pytest.mark.usefixtures("_few")
@pytest.mark.parametrize(("place", "name"), [(0, "output"), (1, "∂X"), (2, "∂b")])
def test_what_should_be_exact_is_compared_bit_for_bit(place, name, monkeypatch):
    right = selftest.sketched_linear  # type: ignore[attr-defined]

    def slightly_wrong(x, weight, bias, config):
        out = right(x, weight, bias, config)
        if place == 0:
            return out + 1e-3
        tensor = (None, x, bias)[place]
        return out + 1e-3 * (tensor - tensor.detach()).sum()

    monkeypatch.setattr(selftest, "sketched_linear", slightly_wrong)
    found = next(self_test(["cpu"]))
    assert found.wrong == (name,)
    assert not found.ok


def test_a_finding_without_spread_is_not_ok():
    assert not Finding("rows", "cpu", (), 0.0, 0.0).ok


@pytest.mark.usefixtures("_few")
def test_random_numbers_are_as_before():
    state = torch.get_rng_state()
    first, again = list(self_test(["cpu"])), list(self_test(["cpu"]))
    assert first == again
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.usefixtures("_few")
def test_a_missing_extra_is_named_with_what_installs_it(monkeypatch, capsys):
    def version(package):
        if package == "scipy":
            raise metadata.PackageNotFoundError
        return "1.0"

    monkeypatch.setattr(metadata, "version", version)
    assert main(["doctor", "--json"]) == 0
    extras = json.loads(capsys.readouterr().out)["extras"]
    assert list(extras) == ["cli", "transformers", "lightning", "peft"]
    assert extras["transformers"]["packages"]["scipy"] is None
    assert extras["transformers"]["install"] == "pip install 'backsketch[transformers]'"
    assert extras["peft"] == {"packages": {"peft": "1.0"}, "install": None}
    assert main(["doctor"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "tensorboard 1.0 missing scipy: pip install 'backsketch[transformers]'" in shown


DIES = "import os, signal; os.environ.get('ONEDNN_MAX_CPU_ISA') or os.kill(os.getpid(), signal.SIGILL)"


@pytest.mark.parametrize(
    ("probe", "expected", "text"),
    [
        ("", {"works": True, "ends_with": None, "fix": None}, "bf16 on CPU works"),
        (
            DIES,
            {"works": False, "ends_with": "an illegal instruction", "fix": environment.FIX},
            "Set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 before torch is imported",
        ),
        (
            "raise SystemExit(3)",
            {"works": False, "ends_with": "exit code 3", "fix": None},
            "do not train in bf16 on this CPU",
        ),
    ],
)
def test_the_bf16_trap_is_found_in_a_process_of_its_own(probe, expected, text, monkeypatch, capsys):
    monkeypatch.setattr(environment, "_PROBE", probe)
    monkeypatch.setattr(selftest, "DRAWS", 40)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    assert environment.Bf16Probe().result() == expected
    assert main(["doctor"]) == 0
    assert text in " ".join(capsys.readouterr().out.split())


def test_a_mistake_is_one_line_and_exit_code_2(capsys):
    check_mistake(["doctor", "--colour"], "No such option: --colour", capsys)
