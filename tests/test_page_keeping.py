"""A benchmark runs with an allocator that keeps its pages, and its record says so."""

import json
import os
import sys

import pytest

from backsketch.programs import page_keeping
from commands import call, python

PROBE = """
import resource
import torch
from backsketch.programs.page_keeping import restart_keeping_pages
restart_keeping_pages()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.empty(4096, 3072).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(min(faults() for _ in range(12)))  # a block that was freed may first be too small by some bytes
"""
GLIBC = pytest.mark.skipif(not page_keeping.is_glibc(), reason="only glibc has these variables")


@pytest.fixture(autouse=True)
def _plain(monkeypatch):
    for name in page_keeping.KEEPING:
        monkeypatch.delenv(name, raising=False)


def test_a_restarted_process_faults_no_page_in_again(tmp_path):
    (tmp_path / "probe.py").write_text(PROBE)
    restarted = python(str(tmp_path / "probe.py"))
    assert (restarted.returncode, restarted.stderr) == (0, "")
    assert not page_keeping.is_glibc() or int(restarted.stdout) < 100  # of 12288 pages


@GLIBC
def test_what_the_user_has_chosen_stays(tmp_path):
    (tmp_path / "probe.py").write_text(PROBE)
    chosen = python(str(tmp_path / "probe.py"), MALLOC_TRIM_THRESHOLD_="1000000", MALLOC_MMAP_THRESHOLD_="1000000")
    assert int(chosen.stdout) >= 12288


@GLIBC
def test_an_allocator_is_described():
    assert page_keeping.allocator({}) == "glibc, gives large blocks back"
    assert page_keeping.allocator(page_keeping.KEEPING) == page_keeping.KEEPS
    assert page_keeping.allocator({"MALLOC_TRIM_THRESHOLD_": "1"}) == "glibc with MALLOC_TRIM_THRESHOLD_=1"
    assert page_keeping.allocator({"LD_PRELOAD": "other.so"}).endswith("LD_PRELOAD=other.so")
    assert page_keeping.without_keeping({**page_keeping.KEEPING, "A": "b"}) == {"A": "b"}


def test_other_systems_are_left_alone(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(os, "execve", None)
    page_keeping.restart_keeping_pages()
    assert page_keeping.allocator() == "of the system (darwin), as it is"


@GLIBC
def test_the_command_keeps_pages_and_its_record_says_so(tmp_path):
    run = call("bench", "--quick", "--part", "overhead", "--threads", "1", "--json", cwd=tmp_path)
    assert (run.returncode, run.stderr) == (0, "")
    assert json.loads(run.stdout)["machine"]["allocator"] == page_keeping.KEEPS
