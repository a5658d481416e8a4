"""The callback for transformers' Trainer: converts, logs, restores, resumes."""

import json
import math
import re
import subprocess
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import IterableDataset
from transformers import (
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from backsketch import PlanError, RestConfig, SketchConfig, saved_memory, sketch_, summary
from backsketch.convert.checkpointed_blocks import present_blocks
from backsketch.convert.converted_state import ConvertedState
from backsketch.integrations.session import Session
from backsketch.integrations.transformers import SketchCallback
from backsketch.planning.total_plan import TotalPlan
from backsketch.rest import packing_modules
from backsketch.rest.packing_modules import rest_of
from training import STEPS, Sentences, make_model, make_trainer, train

CONFIG = SketchConfig(ratio=0.25)
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning"),
]


class Watch(TrainerCallback):
    """Count sketched layers while training, and stop or break off after a number of steps."""

    def __init__(self, stop=None, fail=None):
        self.stop, self.fail, self.sketched = stop, fail, set()

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.sketched.add(len(summary(model).sketched))
        if state.global_step == self.fail:
            raise RuntimeError("broken off")
        if state.global_step == self.stop:
            control.should_training_stop = True


def weights_of(model):
    return dict(model.state_dict())


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def test_it_converts_for_the_run_and_changes_nothing_else(tmp_path):
    watch = Watch()
    trainer = train(tmp_path, others=[watch])
    assert watch.sketched == {14}
    assert not summary(trainer.model).sketched
    assert not trainer.model._forward_pre_hooks
    assert weights_of(trainer.model).keys() == weights_of(make_model()).keys()
    saved = BertForSequenceClassification.from_pretrained(tmp_path / f"checkpoint-{STEPS}")
    assert same(weights_of(saved), weights_of(trainer.model))


def test_the_run_is_that_of_a_model_converted_by_hand(tmp_path):
    by_callback = train(tmp_path / "callback", SketchCallback(CONFIG))
    by_hand = make_trainer(tmp_path / "hand", TrainerCallback())
    sketch_(by_hand.model, CONFIG)
    by_hand.train()
    exact = train(tmp_path / "exact", TrainerCallback())
    assert same(weights_of(by_callback.model), weights_of(by_hand.model))
    assert not same(weights_of(by_callback.model), weights_of(exact.model))


def test_layers_converted_before_are_so_again_after(tmp_path):
    trainer = make_trainer(tmp_path, SketchCallback(CONFIG))
    earlier = SketchConfig(ratio=0.5)
    sketch_(trainer.model, {"classifier": earlier})
    trainer.train()
    assert [layer.name for layer in summary(trainer.model).sketched] == ["classifier"]
    assert trainer.model.classifier.config == earlier


class WatchRest(TrainerCallback):
    """Take note of the rest that is on while training."""

    def __init__(self):
        self.rests = set()

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.rests.add(rest_of(model))


@pytest.mark.parametrize("attached", [False, True])
def test_rest_is_on_for_the_run_and_off_or_as_before_after_it(tmp_path, attached):
    watch, callback = WatchRest(), SketchCallback(CONFIG, rest=4)
    trainer = make_trainer(tmp_path, callback, others=[watch], max_steps=2)
    own = [type(module) for module in trainer.model.modules()]
    if attached:
        callback.attach(trainer)
    trainer.train()
    assert watch.rests == {RestConfig.of(4)}
    assert [type(module) for module in trainer.model.modules()] == own
    sketch_(trainer.model, {"classifier": CONFIG}, rest=True)
    earlier = ConvertedState.of(trainer.model)
    trainer.train()
    assert ConvertedState.of(trainer.model) == earlier
    assert watch.rests == {RestConfig.of(4)}


def test_rest_runs_each_step_of_the_trainer_inside_packing_and_keeps_its_columns(tmp_path, monkeypatch):
    """The Trainer reads the signature of forward to tell which columns of the data the model takes."""
    entered = []

    @contextmanager
    def packing(config):
        entered.append(config)
        yield

    monkeypatch.setattr(packing_modules, "packing", packing)
    train(tmp_path, SketchCallback(CONFIG, rest=True), max_steps=1, remove_unused_columns=True, bf16=True)
    assert set(entered) == {RestConfig()}


def test_a_run_with_rest_that_broke_off_is_cleared_away_by_the_next(tmp_path):
    trainer = make_trainer(tmp_path, SketchCallback(CONFIG, rest=True), others=[Watch(fail=1)])
    with pytest.raises(RuntimeError, match="broken off"):
        trainer.train()
    assert rest_of(trainer.model) == RestConfig()
    trainer.remove_callback(Watch)
    trainer.train()
    assert rest_of(trainer.model) is None
    assert type(trainer.model) is BertForSequenceClassification


def test_a_mapping_and_where_choose_the_layers(tmp_path):
    watch = Watch()
    train(tmp_path, SketchCallback({"*query": CONFIG, "*key": CONFIG}), others=[watch])
    train(tmp_path, SketchCallback(CONFIG, where=lambda name, layer: name.endswith("value")), others=[watch])
    assert watch.sketched == {4, 2}


def test_tensorboard_shows_kept_bytes_and_noise(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "logs"))
    callback = SketchCallback(CONFIG, noise_every=1, noise_by_layer=True)
    trainer = make_trainer(tmp_path, callback, report_to=["tensorboard"])
    callback.attach(trainer)
    trainer.train()
    events = EventAccumulator(str(tmp_path / "logs"))
    events.Reload()
    layer = "bert.encoder.layer.0.attention.self.query"
    for name in ("kept_bytes", "noise", "noise_worst", f"noise/{layer}"):
        shown = [event.value for event in events.Scalars(f"train/backsketch/{name}")]
        assert shown == pytest.approx(logged(trainer, f"backsketch/{name}"))
        assert len(shown) == STEPS // 2
        assert all(value > 0 for value in shown)


def test_a_log_has_the_noise_of_all_and_of_the_worst_layer_and_by_layer_only_on_request(tmp_path):
    short, long = (
        train(tmp_path / str(each), SketchCallback(CONFIG, noise_every=1, noise_by_layer=each)).state.log_history
        for each in (False, True)
    )
    assert len(short) == len(long)
    for one, other in zip(short, long, strict=True):
        layers = {name: value for name, value in other.items() if name.startswith("backsketch/noise/")}
        own = {name: value for name, value in one.items() if name.startswith("backsketch/")}
        assert own == {name: other[name] for name in other if name.startswith("backsketch/") and name not in layers}
        if own:
            assert set(own) == {"backsketch/kept_bytes", "backsketch/noise", "backsketch/noise_worst"}
            assert len(layers) == 14
            assert own["backsketch/noise_worst"] == max(layers.values()) >= own["backsketch/noise"]


def test_the_worst_layer_is_found_among_those_whose_noise_is_known():
    session = Session(nn.Linear(2, 2), 1)
    known = {"squared_gradient": 1.0, "energy": 1.0, "scaled_variance": 1.0}
    session._records = [
        {"layer": "single row", **known, "sgd_variance": math.nan, "sketch_variance": 9.0},
        {"layer": "low", **known, "sgd_variance": 2.0, "sketch_variance": 1.0},
        {"layer": "high", **known, "sgd_variance": 1.0, "sketch_variance": 3.0},
    ]
    assert session.report()["backsketch/noise_worst"] == 3.0


def test_watching_the_noise_does_not_change_the_run(tmp_path):
    plain, watched = (train(tmp_path / str(every), SketchCallback(CONFIG, noise_every=every)) for every in (None, 2))
    assert same(weights_of(plain.model), weights_of(watched.model))
    assert not logged(plain, "backsketch/noise")


def test_kept_bytes_fall_with_the_ratio(tmp_path):
    exact, tenth = (
        logged(train(tmp_path, SketchCallback(SketchConfig(ratio=ratio))), "backsketch/kept_bytes")
        for ratio in (1.0, 0.1)
    )
    assert len(exact) == STEPS // 2
    assert all(one < 0.9 * other for one, other in zip(tenth, exact, strict=True))


def test_the_peak_kept_is_what_is_held_when_forward_ends():
    model = sketch_(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)), CONFIG)
    x = torch.randn(40, 8)
    with saved_memory(model) as saved:
        out = model(x)
    expected = saved.activations
    with saved_memory(model) as peak:
        for _ in range(3):
            model(x).sum().backward()
    assert peak.most_activations == expected == saved.most_activations
    assert peak.activations == 0
    del out


def controlled():
    return SketchCallback(noise_every=1, noise_schedule=True, noise_limit=0.3)


@pytest.mark.parametrize("callback", [lambda: SketchCallback(CONFIG), lambda: SketchCallback(budget="40%"), controlled])
def test_a_resumed_run_ends_with_the_weights_of_one_that_was_not_interrupted(tmp_path, callback):
    whole = train(tmp_path / "whole", callback())
    train(tmp_path / "parts", callback(), others=[Watch(stop=STEPS // 2)])
    resumed = train(tmp_path / "parts", callback(), resume=True)
    assert resumed.state.global_step == STEPS
    assert same(weights_of(whole.model), weights_of(resumed.model))


def test_the_noise_controls_the_rate_and_what_layers_keep(tmp_path):
    trainer = train(tmp_path, controlled())
    factors, kept = logged(trainer, "backsketch/rate_factor"), logged(trainer, "backsketch/limit_bytes")
    assert 0 < factors[-1] < 1
    assert kept[-1] < kept[0]
    assert logged(trainer, "backsketch/limit_changes")[-1] == 1
    assert trainer.optimizer.param_groups[0]["lr"] == trainer.lr_scheduler.get_last_lr()[0]
    assert not summary(trainer.model).sketched


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("control", [{"noise_schedule": True}, {"noise_limit": 0.1}])
def test_controls_need_layers_that_can_be_monitored(tmp_path, control):
    with pytest.raises(ValueError, match="noise_schedule and noise_limit cannot be used with torch_compile=True"):
        train(tmp_path, SketchCallback(**control), torch_compile=True, torch_compile_backend="aot_eager")


def test_a_run_that_cannot_begin_gives_the_model_back(tmp_path):
    refused = {
        "NoiseLimit moves the ratio and bits": (SketchCallback(CONFIG, noise_limit=0.1), {}),
        "power must be given for Adafactor": (SketchCallback(noise_schedule=True), {"optim": "adafactor"}),
    }
    for words, (callback, options) in refused.items():
        trainer = make_trainer(tmp_path, callback, **options)
        with pytest.raises(ValueError, match=words):
            trainer.train()
        assert not summary(trainer.model).sketched
        assert not any(module._forward_hooks for module in trainer.model.modules())


def test_a_budget_is_planned_once_and_saved_with_the_checkpoint(tmp_path):
    callback = SketchCallback(budget="40%")
    trainer = train(tmp_path, callback)
    state = json.loads((tmp_path / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    assert state["stateful_callbacks"]["backsketch/plan"] == callback.planned
    chosen = {(fields["ratio"], fields["bits"]) for fields in callback.planned.values() if fields is not None}
    assert len(chosen) > 1
    exact = logged(train(tmp_path, SketchCallback(SketchConfig(ratio=1.0))), "backsketch/kept_bytes")
    assert logged(trainer, "backsketch/kept_bytes")[0] < exact[0]


def test_a_resumed_run_takes_the_plan_of_its_checkpoint(tmp_path):
    train(tmp_path, SketchCallback(budget="40%"), others=[Watch(stop=STEPS // 2)])
    path = tmp_path / f"checkpoint-{STEPS // 2}" / "trainer_state.json"
    state = json.loads(path.read_text())
    planned = state["stateful_callbacks"]["backsketch/plan"]
    next(fields for fields in planned.values() if fields is not None)["ratio"] = 0.07
    path.write_text(json.dumps(state))
    resumed = SketchCallback(budget="40%")
    train(tmp_path, resumed, resume=True)
    assert resumed.planned == planned


class Blocks(TrainerCallback):
    """Take note of the blocks that are checkpointed while training."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.seen = present_blocks(model)


def test_a_peak_is_planned_with_the_optimizer_saved_and_resumed(tmp_path):
    trainer = train(tmp_path, SketchCallback(peak="97%"), others=[Watch(stop=STEPS // 2)])
    path = tmp_path / f"checkpoint-{STEPS // 2}" / "trainer_state.json"
    state = json.loads(path.read_text())
    written = state["stateful_callbacks"]["backsketch/total_plan"]
    planned = TotalPlan.from_json(written)
    assert planned.before is not None
    assert planned.after <= planned.limit < planned.before
    assert planned.before > 4 * sum(each.nbytes for each in trainer.model.parameters())  # with gradients and two means
    written["blocks"] = ["bert.encoder.layer.1"]
    path.write_text(json.dumps(state))
    resumed, blocks = SketchCallback(peak="97%"), Blocks()
    trainer = train(tmp_path, resumed, others=[blocks], resume=True)
    assert resumed.planned == written
    assert blocks.seen == ("bert.encoder.layer.1",)
    assert present_blocks(trainer.model) == ()


@pytest.mark.parametrize("controls", [{"noise_every": 1}, {"noise_limit": 0.1}, {"noise_schedule": True}], ids=str)
def test_a_peak_with_room_for_all_leaves_no_noise_to_measure(tmp_path, controls):
    callback = SketchCallback(peak="1TiB", **controls)
    trainer = train(tmp_path, callback)
    assert trainer.state.global_step == STEPS
    assert "backsketch/kept_bytes" in trainer.state.log_history[0]
    assert "backsketch/noise" not in trainer.state.log_history[0]


def test_arguments_of_a_peak(tmp_path):
    for wrong, message in (
        ({"peak": "50%", "budget": "40%"}, "give budget or peak, not both: got budget='40%' and peak='50%'"),
        ({"peak": "50%", "rest": True}, "rest must be None where peak is given"),
        ({"peak": "much"}, "peak must be a share"),
        ({"peak": "50%", "optimizer": "lion"}, "optimizer must be one of adamw, adamw8bit, sgd, got 'lion'"),
        ({"peak": "50%", "config": {"*": CONFIG}}, "one SketchConfig where peak plans"),
    ):
        with pytest.raises(ValueError, match=message):
            SketchCallback(**wrong)
    with pytest.raises(ValueError, match="the states of Adafactor are not known"):
        train(tmp_path, SketchCallback(peak="97%"), optim="adafactor")


def test_a_trainer_that_restores_callbacks_keeps_the_one_it_was_given(tmp_path):
    arguments = {"restore_callback_states_from_checkpoint": True}
    train(tmp_path, SketchCallback(budget="40%"), others=[Watch(stop=STEPS // 2)], **arguments)
    callback = SketchCallback(CONFIG, budget="40%", noise_every=2)
    trainer = train(tmp_path, callback, resume=True, **arguments)
    assert [each for each in trainer.callback_handler.callbacks if isinstance(each, SketchCallback)] == [callback]
    assert logged(trainer, "backsketch/noise")


def test_a_budget_is_spent_on_the_layers_that_are_sketched(tmp_path):
    callback = SketchCallback(budget="40%", where=lambda name, module: "output" not in name)
    train(tmp_path, callback)
    assert callback.planned
    assert not any("output" in name for name in callback.planned)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_run(tmp_path, reentrant):
    plain = train(tmp_path / "plain", padded=not reentrant)  # reentrant recomputation does not see the mask
    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    checkpointed = train(tmp_path / "checkpointed", padded=not reentrant, **options)
    assert same(weights_of(plain.model), weights_of(checkpointed.model))
    assert max(logged(checkpointed, "backsketch/kept_bytes")) < min(logged(plain, "backsketch/kept_bytes"))


def test_mixed_precision_and_accumulation(tmp_path):
    full = train(tmp_path, gradient_accumulation_steps=2)
    half = train(tmp_path, gradient_accumulation_steps=2, bf16=True)
    assert logged(half, "backsketch/kept_bytes")[0] < 0.85 * logged(full, "backsketch/kept_bytes")[0]
    assert logged(half, "loss") == pytest.approx(logged(full, "loss"), rel=0.02)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_torch_compile_keeps_sketches_too(tmp_path):
    torch._dynamo.reset()
    compiled = {"torch_compile": True, "torch_compile_backend": "aot_eager", "max_steps": 2}
    watch = Watch()
    tenth = train(tmp_path, SketchCallback(SketchConfig(ratio=0.1)), others=[watch], **compiled)
    torch._dynamo.reset()
    exact = train(tmp_path, SketchCallback(SketchConfig(ratio=1.0)), **compiled)
    assert watch.sketched == {14}
    assert not summary(tenth.model).sketched
    assert logged(tenth, "backsketch/kept_bytes")[0] < 0.9 * logged(exact, "backsketch/kept_bytes")[0]
    with pytest.raises(ValueError, match="noise_every must be None with torch_compile"):
        train(tmp_path, SketchCallback(noise_every=1), **compiled)
    with pytest.raises(UserWarning, match="rest has no effect on what torch_compile=True compiles"):
        train(tmp_path, SketchCallback(CONFIG, rest=True), **compiled)


def test_a_run_that_broke_off_can_be_started_again(tmp_path):
    callback = SketchCallback(CONFIG)
    trainer = make_trainer(tmp_path, callback, others=[Watch(fail=1)])
    with pytest.raises(RuntimeError, match="broken off"):
        trainer.train()
    trainer.callback_handler.callbacks[-1].fail = None
    trainer.remove_callback(Watch)
    trainer.train()
    assert not summary(trainer.model).sketched
    assert type(trainer.model.classifier) is nn.Linear


def test_what_another_run_left_behind_is_cleared_away(tmp_path):
    broken = make_trainer(tmp_path, SketchCallback(CONFIG, noise_every=1), others=[Watch(fail=1)])
    with pytest.raises(RuntimeError, match="broken off"):
        broken.train()
    watch = Watch()
    other = make_trainer(tmp_path, SketchCallback({"classifier": CONFIG}), others=[watch])
    other.model = other.model_wrapped = broken.model
    other.train()
    assert watch.sketched == {1}
    assert not summary(broken.model).sketched
    assert not any(module._forward_hooks for module in broken.model.modules())


def test_what_a_step_keeps_is_the_most_of_its_passes():
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    reports = []
    for passes in ([40], [10, 40, 20]):
        session = Session(model, None)
        session.begin(SketchConfig(ratio=0.5))
        session.step_begin()
        for rows in passes:
            with session.measuring():
                model(torch.randn(rows, 8)).sum().backward()
        session.step_begin()
        with session.measuring():  # known since the last report
            model(torch.randn(80, 8)).sum().backward()
        reports.append(session.report())
        session.end()
    assert reports[0]["backsketch/kept_bytes"] > 0
    assert reports[0] == reports[1]


def test_a_trainer_takes_one_callback(tmp_path):
    trainer = make_trainer(tmp_path, SketchCallback(CONFIG), others=[SketchCallback(CONFIG)])
    with pytest.raises(ValueError, match="a Trainer takes one SketchCallback"):
        trainer.train()
    assert not summary(trainer.model).sketched


class Bad(Sentences):
    """Data with a token that no embedding knows."""

    def __getitem__(self, index):
        example = super().__getitem__(index)
        return {**example, "input_ids": example["input_ids"] + 10**6}


def breaking(folder, callback, error):
    """Return a Trainer whose first forward pass raises ``error``."""
    trainer = make_trainer(folder, callback)
    if error is IndexError:
        trainer.train_dataset = Bad()
    else:
        trainer.model.classifier.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(error))
    return trainer


def saving_hooks():
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


@pytest.mark.parametrize("error", [IndexError, KeyboardInterrupt])
def test_a_step_that_breaks_off_leaves_nothing_behind(tmp_path, error):
    callback = SketchCallback(CONFIG, noise_every=1)
    trainer = breaking(tmp_path, callback, error)
    assert callback.attach(trainer) is callback
    with pytest.raises(error):
        trainer.train()
    assert saving_hooks() is None
    assert not summary(trainer.model).sketched
    assert not any(module._forward_hooks for module in trainer.model.modules())


def test_whatever_breaks_off_an_attached_run_the_model_is_given_back(tmp_path):
    callback = SketchCallback(CONFIG, noise_every=1)
    trainer = make_trainer(tmp_path, callback, others=[Watch(fail=1)])
    callback.attach(trainer)
    with pytest.raises(RuntimeError, match="broken off"):
        trainer.train()
    assert not summary(trainer.model).sketched
    assert not any(module._forward_hooks for module in trainer.model.modules())


@pytest.mark.parametrize("again", ["the same callback", "another"])
def test_what_a_callback_that_is_not_attached_leaves_is_cleared_away_by_the_next_run(tmp_path, again):
    callback = SketchCallback(CONFIG, noise_every=1)
    trainer = breaking(tmp_path, callback, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert len(summary(trainer.model).sketched) == 14
    (hook,) = trainer.model.classifier._forward_pre_hooks
    del trainer.model.classifier._forward_pre_hooks[hook]
    if again == "another":
        callback = SketchCallback(CONFIG)
        trainer, broken = make_trainer(tmp_path, callback), trainer
        trainer.model = trainer.model_wrapped = broken.model
    trainer.train()
    assert len(logged(trainer, "backsketch/kept_bytes")) == STEPS // 2
    assert saving_hooks() is None
    assert not summary(trainer.model).sketched


def test_attaching_adds_the_callback_once_and_before_all_others(tmp_path):
    callback = SketchCallback(CONFIG)
    trainer = make_trainer(tmp_path, TrainerCallback())
    for _ in range(2):
        callback.attach(trainer)
    train = trainer.train
    callback.attach(trainer)
    assert trainer.train is train
    assert [each for each in trainer.callback_handler.callbacks if isinstance(each, SketchCallback)] == [callback]
    assert trainer.callback_handler.callbacks[0] is callback
    with pytest.raises(ValueError, match="a Trainer takes one SketchCallback"):
        SketchCallback(CONFIG).attach(trainer)
    trainer.train()
    assert len(logged(trainer, "backsketch/kept_bytes")) == STEPS // 2


def test_a_training_step_of_ones_own_is_kept(tmp_path):
    trainer = make_trainer(tmp_path, SketchCallback(CONFIG))
    steps = []
    own = trainer.training_step
    trainer.training_step = lambda *args: steps.append(1) or own(*args)  # type: ignore[func-returns-value]
    mine = trainer.training_step
    trainer.train()
    assert len(steps) == STEPS
    assert trainer.training_step is mine
    assert logged(trainer, "backsketch/kept_bytes")


def test_a_plan_asks_a_dataset_only_for_what_it_has(tmp_path):
    class Few(Sentences):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            if index >= 4:
                raise KeyError(index)
            return super().__getitem__(index)

    callback = SketchCallback(budget="50%")
    trainer = make_trainer(tmp_path, callback)
    trainer.train_dataset = Few()
    trainer.train()
    assert callback.planned


def test_a_plan_takes_data_that_are_a_stream_of_known_length(tmp_path):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([Sentences()[index] for index in range(len(self))])

        def __len__(self):
            return len(Sentences())

    trainer = make_trainer(tmp_path, SketchCallback(budget="50%"))
    trainer.train_dataset = Stream()
    trainer.train()
    assert logged(trainer, "backsketch/kept_bytes")


def test_arguments_are_checked_before_training():
    with pytest.raises(ValueError, match="noise_every must be a positive integer or None, got 0"):
        SketchCallback(noise_every=0)
    with pytest.raises(TypeError, match="noise_by_layer must be True or False, got 2"):
        SketchCallback(noise_every=1, noise_by_layer=2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="noise_by_layer=True reports what noise_every measures: give noise_every too"):
        SketchCallback(noise_by_layer=True)
    with pytest.raises(TypeError, match="rest must be None, True, a number of bits or a RestConfig, got False"):
        SketchCallback(rest=False)
    with pytest.raises(TypeError, match="config must be a SketchConfig or a mapping"):
        SketchCallback(0.1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="where must be a function"):
        SketchCallback(where="encoder")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="config must be None or one SketchConfig where budget plans, got"):
        SketchCallback({"*": CONFIG}, budget="50%")
    with pytest.raises(ValueError, match=r"budget must be a share .* got 'much'"):
        SketchCallback(budget="much")
    assert SketchCallback(budget="500 MB").settings.budget == "500 MB"


def test_the_data_are_padded_or_masks_would_not_be_tested():
    assert 0 < Sentences()[0]["attention_mask"].float().mean() < 1


def test_accelerate_launch(tmp_path):
    # --multi_gpu is accelerate's name for "one process a device, by torchrun"; the script itself asks for the CPU.
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    worker = Path(__file__).parent / "workers" / "trainer.py"
    command = [*launcher, "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", str(worker)]
    run = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert first["world"] == 2
    assert same(first["weights"], second["weights"])
    assert any("backsketch/kept_bytes" in entry for entry in first["log"])


class WatchLogits(TrainerCallback):
    """Note whether the loss is fused while training."""

    def __init__(self):
        self.fused = set()

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.fused.add(summary(model).fused_losses)


def language_trainer(folder, callback, others=(), **options):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=60, tie_word_embeddings=True, use_cache=False, **sizes))
    ids = torch.randint(60, (8, 12))
    rows = [{"input_ids": each, "labels": each} for each in ids]
    settings: dict[str, Any] = {"max_steps": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    settings |= {"use_cpu": True, "report_to": [], "save_strategy": "no", "logging_steps": 1} | options
    arguments = TrainingArguments(output_dir=str(folder), **settings)
    return Trainer(model, arguments, train_dataset=rows, eval_dataset=rows, callbacks=[callback, *others])


@pytest.mark.parametrize("bf16", [False, True])
def test_a_fused_loss_is_on_for_the_run_and_trains_as_the_plain_one(tmp_path, bf16):
    """With bf16 accelerate has put a forward on the model before the callback comes."""
    watch = WatchLogits()
    fused = language_trainer(tmp_path, SketchCallback({"*": None}, fused_loss=True), [watch], bf16=bf16)
    plain = language_trainer(tmp_path, TrainerCallback(), bf16=bf16)
    for trainer in (fused, plain):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "sketch_ converted no layer")
            trainer.train()
    assert watch.fused == {("",)}
    assert summary(fused.model).fused_losses == ()
    assert "_forward_without_fused_loss" not in fused.model.__dict__
    losses = [logged(each, "loss") for each in (fused, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3 if bf16 else 1e-5)
    assert fused.predict(fused.eval_dataset).predictions.shape == (8, 12, 60)
    kept = [entry["backsketch/kept_bytes"] for entry in fused.state.log_history if "backsketch/kept_bytes" in entry]
    assert kept


def test_a_peak_is_planned_for_the_fused_loss_that_will_run(tmp_path):
    least = []
    for fused in (False, True):
        trainer = language_trainer(tmp_path, SketchCallback(peak=1, fused_loss=fused))
        with pytest.raises(PlanError, match=r"peak must be at least .* bytes") as refusal:
            trainer.train()
        least.append(int(re.findall(r"(\d+) bytes", str(refusal.value))[0]))
        assert summary(trainer.model).fused_losses == ()
    assert least[1] < least[0]


def test_a_fused_loss_with_other_options_of_the_trainer_is_refused_in_words_or_warned_of(tmp_path):
    with pytest.raises(TypeError, match="fused_loss must be True or False, got 1"):
        SketchCallback(fused_loss=1)  # type: ignore[arg-type]
    compiled = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    trainer = language_trainer(tmp_path, SketchCallback(fused_loss=True), **compiled)
    with pytest.raises(ValueError, match="fused_loss must be False with torch_compile=True"):
        trainer.train()
    with pytest.warns(UserWarning, match="fused_loss has no effect with label_smoothing_factor"):
        language_trainer(tmp_path, SketchCallback(fused_loss=True), label_smoothing_factor=0.1).train()
