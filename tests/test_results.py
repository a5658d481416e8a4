"""A record says what it was made with."""

import json

import torch

import backsketch
from backsketch.programs import result_files as results


def test_a_record_has_its_settings_versions_commit_and_machine(tmp_path):
    path = results.write_record(tmp_path / "deep" / "a.json", settings={"a": 1}, results=[2], packages=["numpy", "nil"])
    record = json.loads(path.read_text())
    assert set(record) == {"when", "settings", "versions", "commit", "machine", "results"}
    assert (record["settings"], record["results"]) == ({"a": 1}, [2])
    assert record["versions"]["backsketch"] == backsketch.__version__
    assert record["versions"]["torch"] == torch.__version__
    assert record["versions"]["numpy"]
    assert record["versions"]["nil"] is None
    assert set(record["machine"]) >= {"cpu", "cores", "threads"}
    assert list(path.parent.iterdir()) == [path]


def test_without_git_the_commit_is_unknown(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert results.commit() == "unknown"


def test_a_record_names_the_commit_that_was_loaded(monkeypatch):
    monkeypatch.setattr(results, "commit", lambda: "a later one")
    assert results.make_record(settings={}, results=[])["commit"] == results.LOADED != "a later one"
