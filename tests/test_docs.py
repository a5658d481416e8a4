"""What the pages say: their code runs in its order, their commands exist, their links lead somewhere."""

import json
import re
import shlex
import socket
from pathlib import Path

import pytest
import torch.distributed as dist

from backsketch import SketchConfig
from backsketch.cli.app import app
from backsketch.linear.keeping import kept_bytes

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "experiments" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
README = (ROOT / "README.md").read_text()
LINK = re.compile(r"\]\(([^)#]+)[^)]*\)")
COMMAND = re.compile(r"^backsketch (.*)$", flags=re.MULTILINE)
SCRIPT = re.compile(r"python ((?:benchmarks|experiments|examples)/[\w/]+\.py)")
PRINTED = {
    "README.md": ["linear layers are sketched", "kept for backward"],
    "quickstart.md": ["MiB ->", "linear layers are sketched", "kept for backward", "added noise / SGD's noise"],
    "memory.md": ["its input is held anyway by model.layers.0.self_attn", "expected noise"],
    "reproducing.md": ["Lemma 2 as printed says"],
}


@pytest.fixture
def one_process(monkeypatch, tmp_path):
    """Stand in a scratch directory as the only process that torchrun started."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    for name, value in {
        "RANK": 0,
        "WORLD_SIZE": 1,
        "LOCAL_RANK": 0,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": port,
    }.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.chdir(tmp_path)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")  # of what the pages use
@pytest.mark.parametrize(
    "page", [page for page in PAGES if "```python" in page.read_text()], ids=lambda page: page.name
)
def test_the_code_of_a_page_runs(page, one_process, capsys):
    names = {"__name__": page.stem}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL):
        exec(compile(block, page.name, "exec"), names)
    printed = capsys.readouterr().out
    for text in PRINTED.get(page.name, []):
        assert text in printed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_links_lead_somewhere(page):
    for target in LINK.findall(page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_commands_exist_with_their_options(page):
    known = {command.name or command.callback.__name__: command.callback for command in app.registered_commands}
    for line in COMMAND.findall(page.read_text()):
        command, *words = shlex.split(line, comments=True)
        assert command in known, line
        parameters = known[command].__annotations__
        options = [word.removeprefix("--").replace("-", "_") for word in words if word.startswith("--")]
        assert [option for option in options if option not in parameters and option != "json"] == [], line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_scripts_that_are_named_exist(page):
    for script in SCRIPT.findall(page.read_text()):
        assert (ROOT / script).is_file(), script


@pytest.mark.parametrize("pattern", [LINK, COMMAND, SCRIPT], ids=["links", "commands", "scripts"])
def test_what_is_looked_for_in_the_pages_is_found(pattern):
    assert sum(len(pattern.findall(page.read_text())) for page in PAGES) > 5


def test_the_settings_of_the_readme_have_the_noise_of_the_record():
    results = json.loads((ROOT / "benchmarks" / "reports" / "frontier.json").read_text())["results"]
    points = [*results["points"], *(point for budget in results["budgets"].values() for point in budget)]

    def noise(masked, **config):
        found = [p["noise"] for p in points if p["masked"] == masked and config.items() <= p["config"].items()]
        return float(f"{found[0]:.2g}")

    rows = re.findall(r"^\| .*?`(SketchConfig.*?)`.*?\| ([\d.]+)% \| (\S*) ?\| (\S+) \|$", README, flags=re.MULTILINE)
    assert len(rows) == 5
    for setting, kept, padded, unpadded in rows:
        config = eval(setting, {"SketchConfig": SketchConfig})
        share = kept_bytes(config, 100_000, 768, 4) / (100_000 * 768 * 4)
        assert f"{100 * share:.1f}" == kept, setting
        fields = {
            name: getattr(config, name)
            for name in ("kind", "ratio", "bits", "rotate")
            if getattr(config, name) is not None
        }
        assert float(unpadded) == noise(False, **fields), setting
        if padded:
            assert float(padded) == noise(True, **fields), setting


def test_the_speeds_of_linear_sketches_are_those_of_the_record():
    page = (ROOT / "docs" / "choosing.md").read_text()
    results = json.loads((ROOT / "benchmarks" / "reports" / "speed.json").read_text())["results"]
    layers, encoder = ({entry["name"]: entry for entry in results[part]} for part in ("layers", "encoder"))
    rows = re.findall(r"^\| (.+?) \| ([\d.]*) ?\| ([\d.]+) \| (\d+) MiB \|$", page, flags=re.MULTILINE)
    assert len(rows) == 8
    for name, layer, whole, kept in rows:
        assert layer == (f"{layers[name]['speed']:.2f}" if name in layers else ""), name
        assert (whole, kept) == (f"{encoder[name]['speed']:.2f}", f"{encoder[name]['kept'] / 2**20:.0f}"), name


def test_the_tables_of_whole_steps_are_those_of_the_record():
    pytest.importorskip("peft")
    from backsketch_bench.whole_step_pages import memory_table, readme_table, remark, ways_table

    record = json.loads((ROOT / "benchmarks" / "reports" / "whole_step.json").read_text())
    memory = (ROOT / "docs" / "memory.md").read_text()
    assert readme_table(record) in README
    assert memory_table(record) in memory
    assert ways_table(record) in memory
    assert remark(record) in README
    assert remark(record) in memory
