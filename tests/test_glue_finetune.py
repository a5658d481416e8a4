"""Fine-tuning: a run writes its record, can be stopped and continued, and does what its settings say."""

import errno
import itertools
import json
import os
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file, save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import (
    AutoModelForSequenceClassification,
    BartConfig,
    BertConfig,
    BertForSequenceClassification,
    ModernBertConfig,
    RobertaConfig,
    RobertaForSequenceClassification,
    TrainerCallback,
    XLNetConfig,
)

from backsketch import SketchConfig, SketchedLinear
from backsketch.masks.scopes import masked_rows
from backsketch.programs.glue import finetune as tuning
from backsketch.programs.glue import watch
from backsketch.programs.glue.finetune import Interrupted, finetune
from backsketch.programs.glue.loading import encode
from backsketch.programs.glue.reading import Examples
from backsketch.programs.glue.recipe import recipe_for
from backsketch.programs.glue.settings import Settings
from backsketch.programs.glue.tasks import TASKS, find_task
from glue_files import write_task
from tiny_bert import save_tiny_bert

pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning")

GLUE = Path(os.environ.get("BACKSKETCH_GLUE", Path(__file__).parents[2] / "shared" / "glue"))
HEADED = [BertConfig(), RobertaConfig(), ModernBertConfig(), BartConfig(), XLNetConfig()]
EVAL_POINT = {"step", "epoch", "loss", "score"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a directory with the files of all tasks, and a model."""
    folder = tmp_path_factory.mktemp("glue")
    for task in TASKS.values():
        write_task(folder, task)
    save_tiny_bert(folder / "model")
    return folder


def settings(place, task="cola", **changes):
    recipe = recipe_for(find_task(task), epochs=2, batch_size=8, learning_rate=1e-2)
    options = {"config": SketchConfig(ratio=0.5), "recipe": recipe, "seed": 1, "save_model": True, **changes}
    return Settings(task=task, model=str(place / "model"), data=place, **options)


def weights(out):
    return AutoModelForSequenceClassification.from_pretrained(out / "model").state_dict()


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


class Press(TrainerCallback):
    """Press Ctrl-C in a step, or in the evaluation after so many steps."""

    def __init__(self, step, evaluating=False):
        self.step, self.evaluating = step, evaluating

    def on_step_begin(self, args, state, control, **kwargs):
        self.press(state, not self.evaluating)

    def on_prediction_step(self, args, state, control, **kwargs):
        self.press(state, self.evaluating)

    def press(self, state, now):
        if now and state.global_step == self.step:
            self.step = None
            os.kill(os.getpid(), signal.SIGINT)


def test_a_record_has_all_that_a_run_is_known_by(place, tmp_path):
    record = finetune(settings(place), tmp_path)
    assert record == json.loads((tmp_path / "record.json").read_text())
    assert set(record) == {"when", "settings", "versions", "commit", "machine", "results"}
    assert record["versions"]["transformers"]
    assert record["settings"]["config"]["ratio"] == 0.5
    assert record["settings"]["recipe"]["epochs"] == 2
    assert str(place) not in json.dumps(record)
    results = record["results"]
    assert results["steps"] == 6
    assert results["examples"] == {"train": 24, "eval": 12, "skipped": 0}
    assert [point["step"] for point in results["curves"]["train"]] == [1, 2, 3, 4, 5, 6]
    assert [point["step"] for point in results["curves"]["eval"]] == [3, 6]
    assert set(results["curves"]["eval"][0]) == EVAL_POINT | {"matthews"}
    assert results["score"] == results["curves"]["eval"][-1]["score"] == results["metrics"]["matthews"]
    assert results["noise"]["curve"][0]["ratio"] > 0
    assert len(results["noise"]["layers"]) == 12
    assert not [name for name in results["noise"]["layers"] if "classifier" in name or "pooler" in name]
    assert 0 < results["memory"]["kept_bytes"] < results["memory"]["peak_bytes"]
    assert results["memory"]["most_kept_bytes_while_training"] <= results["memory"]["kept_bytes"]
    assert results["throughput"]["samples_per_second"] > 0
    assert {path.name for path in tmp_path.iterdir()} == {
        "log.json", "model", "record.json", "settings.json", "tensorboard",
    }  # fmt: skip
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert {"train/loss", "eval/matthews"} <= set(board.Tags()["scalars"])
    assert any("backsketch/noise" in tag for tag in board.Tags()["scalars"])


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_every_task_trains(task, place, tmp_path):
    record = finetune(settings(place, task.name, max_steps=1, save_model=False), tmp_path)
    assert set(record["results"]["metrics"]) == set(task.all_metrics)


def test_one_run_of_mnli_is_evaluated_on_both_its_files(place, tmp_path):
    options = {"max_steps": 2, "noise_every": 0}
    both, matched, mismatched = (
        finetune(settings(place, task, **options), tmp_path / task)["results"] for task in ("mnli", "mnli-m", "mnli-mm")
    )
    other = shutil.copytree(place, tmp_path / "other")
    path = other / "MNLI" / "dev_mismatched.tsv"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:4]))
    fewer = finetune(settings(other, "mnli", **options), tmp_path / "fewer")["results"]
    assert both["metrics"]["accuracy"] == fewer["metrics"]["accuracy"] == matched["metrics"]["accuracy"]
    assert both["metrics"]["accuracy_mismatched"] == mismatched["metrics"]["accuracy"]
    assert (both["examples"]["eval"], fewer["examples"]["eval"]) == (24, 15)
    for results in (both, fewer):
        assert results["score"] == pytest.approx(sum(results["metrics"].values()) / 2)
        assert results["curves"]["eval"][-1]["accuracy_mismatched"] == results["metrics"]["accuracy_mismatched"]


def test_an_easy_task_is_learned(place, tmp_path):
    recipe = recipe_for(find_task("sst-2"), epochs=20, batch_size=8, learning_rate=1e-2)
    assert finetune(settings(place, "sst-2", recipe=recipe), tmp_path)["results"]["score"] == 1.0


def test_exact_training_keeps_more_and_adds_no_noise(place, tmp_path):
    exact = finetune(settings(place, config=None), tmp_path / "exact")["results"]
    sketched = finetune(settings(place, config=SketchConfig(ratio=0.1)), tmp_path / "sketched")["results"]
    assert exact["noise"] == {"curve": [], "layers": {}, "records": []}
    assert exact["memory"]["batch_shape"] == sketched["memory"]["batch_shape"]
    assert exact["memory"]["kept_bytes"] > sketched["memory"]["kept_bytes"]
    assert not same(weights(tmp_path / "exact"), weights(tmp_path / "sketched"))


def test_the_seed_decides_a_run(place, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        finetune(settings(place, seed=seed), tmp_path / name)
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert not same(weights(tmp_path / "a"), weights(tmp_path / "c"))


@pytest.mark.parametrize(
    ("step", "budget"), [(1, None), (2, None), (4, "40%")], ids=["in an epoch", "at its end", "with a plan"]
)
def test_a_stopped_run_continues_as_if_it_had_not_been(step, budget, place, tmp_path):
    chosen = settings(place, budget=budget, noise_layers=("*.0.output.dense",))
    whole = finetune(chosen, tmp_path / "whole")["results"]
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted, match=f"stopped after step {step + 1} of 6"):
        finetune(chosen, tmp_path / "parts", callbacks=(Press(step),))
    assert signal.getsignal(signal.SIGINT) is before
    assert not (tmp_path / "parts" / "record.json").exists()
    parts = finetune(chosen, tmp_path / "parts")["results"]
    assert parts["resumed_from_step"] == step + 1
    assert same(weights(tmp_path / "parts"), weights(tmp_path / "whole"))
    assert parts["curves"] == whole["curves"]
    assert parts["memory"] == whole["memory"]
    assert parts["planned"] == whole["planned"]
    assert (budget is None) == (whole["planned"] is None)
    assert [record["step"] for record in parts["noise"]["records"]] == [1, 2, 3, 4, 5, 6]
    assert parts["noise"]["records"] == whole["noise"]["records"]
    assert {"alignment", "sgd_variance", "sketch_variance", "ratio", "bound"} <= whole["noise"]["records"][0].keys()
    assert not list((tmp_path / "parts").glob("checkpoint-*"))


@pytest.mark.parametrize("state", [None, '{"epoch": 1.'], ids=["no state", "half a state"])
def test_a_checkpoint_that_was_cut_short_is_passed_over(state, place, tmp_path):
    with pytest.raises(Interrupted):
        finetune(settings(place), tmp_path, callbacks=(Press(1),))
    cut = shutil.copytree(tmp_path / "checkpoint-2", tmp_path / "checkpoint-3")
    (cut / "trainer_state.json").unlink()
    if state is not None:
        (cut / "trainer_state.json").write_text(state)
    results = finetune(settings(place), tmp_path)["results"]
    assert (results["resumed_from_step"], results["steps"]) == (2, 6)


class Slow(TrainerCallback):
    """Make each step take a time that is known, by a clock that only this turns."""

    def __init__(self, monkeypatch, seconds):
        self.now, self.seconds = 0.0, seconds
        monkeypatch.setattr(watch, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.now += self.seconds[state.global_step]


def test_throughput_counts_the_steps_before_a_stop(place, tmp_path, monkeypatch):
    chosen = settings(place, noise_every=0)
    slow = Slow(monkeypatch, [100.0, 2.0, 3.0, 100.0, 5.0, 6.0])  # the first of each process warms up
    with pytest.raises(Interrupted):
        finetune(chosen, tmp_path, callbacks=(Press(2), slow))
    results = finetune(chosen, tmp_path, callbacks=(slow,))["results"]
    assert results["resumed_from_step"] == 3
    assert results["throughput"] == {"step_seconds": 4.0, "samples_per_second": 2.0}


@pytest.mark.parametrize("steps", [5, 6], ids=["in an epoch", "at its end"])
def test_a_run_that_had_only_its_record_to_write_makes_no_further_step(steps, place, tmp_path, monkeypatch):
    slow = Slow(monkeypatch, [100.0, 2.0, 2.0, 2.0, 2.0, 2.0])
    chosen = settings(place, noise_every=0, max_steps=steps, budget="40%")
    whole = finetune(chosen, tmp_path / "whole", callbacks=(slow,))["results"]
    with monkeypatch.context() as broken:
        broken.setattr(tuning, "write_record", None)
        with pytest.raises(TypeError):
            finetune(chosen, tmp_path / "parts", callbacks=(slow,))
    shutil.rmtree(tmp_path / "parts" / "model")
    results = finetune(chosen, tmp_path / "parts")["results"]
    assert results == {**whole, "resumed_from_step": steps}
    assert same(weights(tmp_path / "parts"), weights(tmp_path / "whole"))


def test_a_run_begins_again_where_its_only_checkpoint_was_cut_short(place, tmp_path):
    with pytest.raises(Interrupted):
        finetune(settings(place), tmp_path, callbacks=(Press(1),))
    (tmp_path / "checkpoint-2" / "trainer_state.json").unlink()
    results = finetune(settings(place), tmp_path)["results"]
    assert (results["resumed_from_step"], results["steps"]) == (None, 6)


def test_evaluation_comes_when_asked_for_and_after_the_last_step(place, tmp_path):
    record = finetune(settings(place, eval_every=4), tmp_path)
    assert [point["step"] for point in record["results"]["curves"]["eval"]] == [4, 6]


def test_ctrl_c_in_the_last_step_ends_a_run_that_is_finished(place, tmp_path):
    assert finetune(settings(place), tmp_path, callbacks=(Press(5),))["results"]["steps"] == 6


@pytest.mark.parametrize("options", [{}, {"eval_every": 2}], ids=["after epochs", "after steps"])
def test_ctrl_c_in_the_last_evaluation_ends_a_run_that_is_finished(options, place, tmp_path):
    chosen = settings(place, max_steps=5, **options)
    results = finetune(chosen, tmp_path, callbacks=(Press(5, evaluating=True),))["results"]
    assert (results["steps"], results["curves"]["eval"][-1]["step"]) == (5, 5)


def test_a_run_that_continues_measures_and_logs_the_same_steps(place, tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "_LOGS", 3)  # of 12 steps each fourth, and the ends of epochs
    recipe = recipe_for(find_task("cola"), epochs=4, batch_size=8, learning_rate=1e-2)
    chosen = settings(place, recipe=recipe, noise_every=4, noise_layers=("*.0.output.dense",))
    whole = finetune(chosen, tmp_path / "whole")["results"]
    with pytest.raises(Interrupted, match="after step 5 of 12"):
        finetune(chosen, tmp_path / "parts", callbacks=(Press(4),))
    parts = finetune(chosen, tmp_path / "parts")["results"]
    for results in (whole, parts):
        assert [record["step"] for record in results["noise"]["records"]] == [1, 5, 9]
    assert parts["noise"]["records"] == whole["noise"]["records"]
    losses = [{point["step"]: point["loss"] for point in each["curves"]["train"]} for each in (whole, parts)]
    assert list(losses[0]) == [3, 4, 6, 8, 9, 12]
    assert list(losses[1]) == [3, 4, 5, 6, 8, 9, 12]
    assert (losses[1].pop(5) + losses[1].pop(6)) / 2 == pytest.approx(losses[0].pop(6))
    assert losses[1] == losses[0]


def test_tensorboard_forgets_what_came_after_the_checkpoint(place, tmp_path):
    class Break(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 5:
                raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        finetune(settings(place), tmp_path, callbacks=(Break(),))
    finetune(settings(place), tmp_path)
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [point.step for point in board.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("task", ["cola", "sts-b"])
def test_a_run_that_diverges_says_so(task, place, tmp_path):
    recipe = recipe_for(find_task(task), epochs=1, batch_size=8, learning_rate=1e30, warmup=0.0)
    results = finetune(settings(place, task, config=None, recipe=recipe), tmp_path)["results"]
    assert [point["loss"] is None for point in results["curves"]["train"]] == [False, True, True]
    assert results["score"] is results["best_score"] is None
    assert set(results["metrics"].values()) == {None}
    assert "NaN" not in (tmp_path / "log.json").read_text() + (tmp_path / "record.json").read_text()


def test_an_overwriting_run_that_was_stopped_continues_without_overwriting(place, tmp_path):
    with pytest.raises(Interrupted, match="the same command without --overwrite continues"):
        finetune(settings(place), tmp_path, overwrite=True, callbacks=(Press(1),))
    assert finetune(settings(place), tmp_path)["results"]["resumed_from_step"] == 2


def test_a_finished_run_is_not_run_again(place, tmp_path):
    first = finetune(settings(place), tmp_path)
    assert finetune(settings(place), tmp_path) == first
    with pytest.raises(ValueError, match="has a run with another seed"):
        finetune(settings(place, seed=5), tmp_path)
    again = finetune(settings(place, seed=5), tmp_path, overwrite=True)
    assert again["settings"]["seed"] == 5


def test_a_mistake_costs_no_run_and_leaves_no_folder(place, tmp_path):
    record = finetune(settings(place), tmp_path / "out")
    wrong = settings(place, exclude=("colour*",))
    with pytest.raises(ValueError, match="matches no linear layer"):
        finetune(wrong, tmp_path / "out", overwrite=True)
    assert finetune(settings(place), tmp_path / "out") == record
    before = files(tmp_path / "out")
    small = settings(place, budget="0.0001%")  # of which only the first batch can tell
    for mistake in (wrong, small):
        with pytest.raises(ValueError, match=r"matches no linear layer|budget must be at least"):
            finetune(mistake, tmp_path / "new")
        assert not (tmp_path / "new").exists()
    with pytest.raises(ValueError, match="budget must be at least"):
        finetune(small, tmp_path / "out", overwrite=True)
    assert files(tmp_path / "out") == before


def files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["checkpoint-7", "tensorboard", "record.json", "log.json"])
def test_files_of_something_else_are_left_alone(name, place, tmp_path):
    (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match=f"has {name} of something else"):
        finetune(settings(place), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_model_of_something_else_is_not_replaced(place, tmp_path):
    (tmp_path / "model").mkdir()
    for overwrite in (False, True):
        with pytest.raises(ValueError, match="has a model of something else"):
            finetune(settings(place), tmp_path, overwrite=overwrite)


def test_no_two_processes_write_to_one_folder(place, tmp_path):
    class Another(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            with pytest.raises(ValueError, match="is in use by another process"):
                finetune(settings(place), tmp_path)
            control.should_training_stop = True

    (tmp_path / "lock").write_text("of something else")
    finetune(settings(place), tmp_path, callbacks=(Another(),))
    assert (tmp_path / "lock").read_text() == "of something else"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_what_another_process_finished_meanwhile_is_not_run_again(place, tmp_path):
    run = tuning.prepare(settings(place), tmp_path)
    record = finetune(settings(place), tmp_path)
    assert run() == record


class Break(TrainerCallback):
    """Break off before any step, so hard that no event tells of it, or at a step without a checkpoint."""

    def __init__(self, error, step=None):
        self.error, self.step = error, step

    def on_train_begin(self, args, state, control, **kwargs):
        if self.step is None:
            raise self.error

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise self.error


@pytest.mark.parametrize(
    ("error", "step", "remains"),
    [(KeyboardInterrupt, None, False), (RuntimeError, 1, True)],
    ids=["before a step", "before a checkpoint"],
)
def test_an_overwritten_run_is_not_lost_before_there_is_another(error, step, remains, place, tmp_path):
    record = finetune(settings(place), tmp_path)
    before = files(tmp_path)
    with pytest.raises(error):
        finetune(settings(place, seed=5), tmp_path, overwrite=True, callbacks=(Break(error, step),))
    assert (files(tmp_path) != before) == remains  # what was put aside is put back by the next command
    assert finetune(settings(place), tmp_path) == record
    assert files(tmp_path) == before


def test_an_empty_folder_stays_when_nothing_was_run(place, tmp_path):
    with pytest.raises(ValueError, match="budget must be at least"):
        finetune(settings(place, budget="0.0001%"), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_stops_a_run_that_can_tell_no_one(place, tmp_path, monkeypatch):
    closed = (tmp_path / "closed").open("w")
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    with pytest.raises(Interrupted):
        finetune(settings(place), tmp_path / "out", callbacks=(Press(1),))


def test_overwriting_removes_only_what_the_run_wrote(place, tmp_path):
    (tmp_path / "model").mkdir()
    finetune(settings(place, max_steps=1, save_model=False), tmp_path)
    finetune(settings(place, max_steps=2, save_model=False), tmp_path, overwrite=True)
    assert (tmp_path / "model").is_dir()


def test_out_must_be_a_place_to_write_to(place, tmp_path, monkeypatch):
    def full(lock):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tuning, "load", lambda _: pytest.fail("the model was loaded"))
    monkeypatch.setattr(FileLock, "acquire", full)
    with pytest.raises(ValueError, match=r"out must be a directory to write to, got .*run': No space left"):
        finetune(settings(place), tmp_path / "new" / "run")
    assert list(tmp_path.iterdir()) == []


def test_out_must_be_a_directory(place, tmp_path):
    (tmp_path / "file").write_text("")
    for out, overwrite in itertools.product((tmp_path / "file", tmp_path / "file" / "below"), (False, True)):
        with pytest.raises(ValueError, match=r"out must be a directory, got .*file' is a file"):
            finetune(settings(place), out, overwrite=overwrite)


def copied(place, folder):
    """Return a copy of the data and the model, under the same names elsewhere."""
    return shutil.copytree(place, folder / place.name)


def change_weights(model):
    weights = load_file(model / "model.safetensors")
    save_file({name: value + 1 for name, value in weights.items()}, model / "model.safetensors", {"format": "pt"})


def test_a_model_of_one_task_is_trained_on_another(place, tmp_path):
    finetune(settings(place, "sts-b", max_steps=1), tmp_path / "first")
    chosen = replace(settings(place, "mrpc", max_steps=1), model=str(tmp_path / "first" / "model"))
    assert finetune(chosen, tmp_path / "second")["results"]["steps"] == 1


def broken_model(place, folder, break_it):
    model = shutil.copytree(place / "model", folder / "model")
    break_it(model)
    return model


def widened(model):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "intermediate_size": 48, "num_hidden_layers": 1}))


def renamed(model):
    weights = load_file(model / "model.safetensors")
    others = {f"other.{name}": value for name, value in weights.items()}
    save_file(others, model / "model.safetensors", {"format": "pt"})


def without_tokenizer(model):
    for path in (*model.glob("vocab*"), *model.glob("token*")):
        path.unlink()


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (widened, r"has no weights that fit for 3 of its parameters, among them 'bert\.encoder\.layer\.0\.inter"),
        (renamed, r"has no weights that fit for \d+ of its parameters, among them 'bert\.embeddings"),
        (lambda model: (model / "tokenizer.json").write_text("{}"), "could not be loaded"),
        (without_tokenizer, "has no vocabulary: the files of its tokenizer are missing"),
        (lambda model: (model / "model.safetensors").write_bytes(b"half"), "could not be loaded"),
    ],
    ids=["another width", "other names", "an empty tokenizer", "no tokenizer", "half the weights"],
)
def test_a_broken_model_is_refused(break_it, message, place, tmp_path):
    model = broken_model(place, tmp_path, break_it)
    with pytest.raises(ValueError, match=message):
        finetune(replace(settings(place), model=str(model)), tmp_path / "out")


def test_the_end_of_a_text_pads_where_nothing_else_does(place, tmp_path):
    def without_padding(model):
        path = model / "tokenizer_config.json"
        names = {**json.loads(path.read_text()), "pad_token": None, "eos_token": "[SEP]"}
        path.write_text(json.dumps(names))

    model = broken_model(place, tmp_path, without_padding)
    record = finetune(replace(settings(place, max_steps=1), model=str(model)), tmp_path / "out")
    assert record["results"]["steps"] == 1


def test_texts_end_where_the_positions_do():
    texts = Examples([("word " * 40,)], [0])
    kinds = {BertForSequenceClassification: BertConfig, RobertaForSequenceClassification: RobertaConfig}
    sizes = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}

    def tokenizer(column, truncation, max_length):
        return {"input_ids": [[5] * min(len(text.split()), max_length) for text in column]}

    tokenizer.model_max_length = 10**30  # type: ignore[attr-defined]
    for kind, config in kinds.items():
        model = kind(config(**sizes, intermediate_size=8, max_position_embeddings=22))
        (example,) = encode(texts, model, tokenizer, max_length=512)
        model(input_ids=torch.tensor([example["input_ids"]]))
        with pytest.raises((IndexError, RuntimeError)):
            model(input_ids=torch.tensor([[*example["input_ids"], 5]]))


@pytest.mark.parametrize("config", HEADED, ids=lambda config: config.model_type)
def test_by_default_the_heads_are_left_exact(config, place):
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config)
    chosen = settings(place)
    outside = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and not name.startswith(f"{model.base_model_prefix}.")
    ]
    assert outside
    assert all(chosen.excluded(name) for name in outside)


@pytest.mark.parametrize(("task", "special"), [("cola", 2), ("mrpc", 3)])
def test_a_length_without_room_for_a_word_is_refused(task, special, place, tmp_path):
    recipe = recipe_for(find_task(task), max_length=special)
    with pytest.raises(ValueError, match=f"max_length must be above {special}, .*, got {special}"):
        finetune(settings(place, task, recipe=recipe), tmp_path)


def test_more_than_one_device_is_refused(place, tmp_path, monkeypatch):
    with monkeypatch.context() as launched:
        launched.setenv("WORLD_SIZE", "2")
        with pytest.raises(ValueError, match="one process, got WORLD_SIZE=2"):
            finetune(settings(place), tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="one GPU, got 2"):
        finetune(settings(place), tmp_path)


@pytest.mark.parametrize("changed", ["model", "data"])
def test_other_files_of_the_same_name_are_another_run(changed, place, tmp_path):
    other = copied(place, tmp_path)
    same_files = settings(other)
    assert same_files.describe() == settings(place).describe()
    assert same_files.slug() == settings(place).slug()
    finetune(settings(place, max_steps=1), tmp_path / "out")
    if changed == "model":
        change_weights(other / "model")  # its config, its names and the size of its file are the same
    else:
        write_task(other, find_task("cola"), rows=25)
    assert settings(other).slug() != settings(place).slug()
    with pytest.raises(ValueError, match=f"has a run with another {changed};"):
        finetune(settings(other, max_steps=1), tmp_path / "out")


def test_a_name_is_known_wherever_one_stands(place, monkeypatch):
    monkeypatch.chdir(place / "model")
    described = Settings(task="cola", model=".", data=Path("..")).describe()
    assert (described["model"], described["data"]) == ("model", place.name)


def test_layers_can_be_left_out(place, tmp_path):
    chosen = settings(place, exclude=("*.query", "*.layer.1.*", "classifier"))
    layers = finetune(chosen, tmp_path)["results"]["noise"]["layers"]
    assert len(layers) == 6  # five of the first block, and the pooler
    with pytest.raises(ValueError, match=r"exclude: 'colour\*' matches no linear layer"):
        finetune(settings(place, exclude=("colour*",)), tmp_path / "b")
    with pytest.raises(ValueError, match="noise_layers: 'classifier' matches no sketched layer"):
        finetune(settings(place, noise_layers=("classifier",)), tmp_path / "b")
    with pytest.raises(ValueError, match="no linear layer to sketch"):
        finetune(settings(place, exclude=("*",)), tmp_path / "c")


def test_fewer_rows_and_no_noise(place, tmp_path):
    results = finetune(settings(place, train_rows=10, eval_rows=5, noise_every=0), tmp_path)["results"]
    assert results["examples"] == {"train": 10, "eval": 5, "skipped": 0}
    speed = results["throughput"]
    assert speed["samples_per_second"] * speed["step_seconds"] == pytest.approx(5)  # of batches of 8 and 2
    assert (results["steps"], results["noise"]["curve"]) == (4, [])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": "colour"}, "task must be one of"),
        ({"data": Path("nowhere")}, "data must be a directory"),
        ({"model": "./nowhere"}, "model must be a name on the hub or a directory with config.json"),
        ({"max_steps": 0}, "max_steps must be an integer of at least 1, got 0"),
        ({"seed": -1}, "seed must be an integer of at least 0, got -1"),
        ({"config": None, "budget": "10%"}, "budget plans"),
        ({"budget": "much"}, "budget must be a share"),
        ({"budget": "20%", "config": SketchConfig(kind="hash", bits=4)}, "bits must be .* kinds that mix rows"),
        ({"config": None, "noise_layers": ("*",)}, "noise_layers needs"),
        ({"config": None, "noise_every": 3}, "noise_every watches sketches"),
    ],
)
def test_wrong_settings_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        Settings(**{"task": "cola", **change})


def test_with_a_budget_bits_are_fixed_only_by_a_config():
    assert Settings(task="cola", budget="20%").config == SketchConfig()
    assert Settings(task="cola", budget="20%", config=SketchConfig(bits=8)).config.bits == 8


def test_data_is_read_before_a_model_is_loaded(tmp_path):
    with pytest.raises(ValueError, match="no file"):
        finetune(Settings(task="cola", model="no/such-model", data=tmp_path), tmp_path / "out")


@pytest.mark.slow
@pytest.mark.skipif("BACKSKETCH_WEIGHTS" not in os.environ, reason="BACKSKETCH_WEIGHTS names no pretrained model")
@pytest.mark.skipif(not GLUE.is_dir(), reason="no GLUE files in ../shared/glue or where BACKSKETCH_GLUE says")
def test_a_pretrained_model_learns_a_real_task(tmp_path):
    chosen = Settings(
        task="sst-2",
        model=os.environ["BACKSKETCH_WEIGHTS"],
        data=GLUE,
        config=SketchConfig(ratio=0.5, bits=4),
        recipe=recipe_for(find_task("sst-2"), epochs=1, learning_rate=1e-4),
        train_rows=2000,
        eval_rows=300,
    )
    assert finetune(chosen, tmp_path)["results"]["metrics"]["accuracy"] > 0.75


class Masks(TrainerCallback):
    """Note whether rows are left out where the first sketched layer runs."""

    def __init__(self):
        self.seen = set()

    def on_step_begin(self, args, state, control, model, **kwargs):
        layer = next(module for module in model.modules() if isinstance(module, SketchedLinear))
        layer.register_forward_hook(lambda module, args, out: self.seen.add(masked_rows(args[0]) is not None))


@pytest.mark.parametrize("ignored", [False, True])
def test_padded_rows_are_sketched_only_when_asked_for(place, tmp_path, ignored):
    masks = Masks()
    chosen = settings(place, max_steps=1, noise_every=0, save_model=False, ignore_mask=ignored)
    finetune(chosen, tmp_path, callbacks=(masks,))
    assert masks.seen == {not ignored}


def test_memory_is_measured_with_the_mask_or_without_it_as_trained(place, tmp_path):
    def kept(ignored):
        chosen = settings(place, max_steps=1, noise_every=0, save_model=False, ignore_mask=ignored)
        return finetune(chosen, tmp_path / str(ignored))["results"]["memory"]["kept_bytes"]

    assert kept(ignored=True) < kept(ignored=False)  # beside a sketch of some rows, which ones they are


def test_ignoring_the_mask_needs_a_sketch(place):
    with pytest.raises(ValueError, match="ignore_mask"):
        settings(place, config=None, ignore_mask=True)
