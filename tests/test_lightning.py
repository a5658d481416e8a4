"""The callback for Lightning: converts, logs, restores."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning.pytorch as lightning
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from backsketch import RestConfig, SketchConfig, TotalPlan, sketch_, summary
from backsketch.convert.converted_state import present_configs
from backsketch.integrations.lightning import SketchCallback
from backsketch.rest.packing_modules import rest_of
from recorded_packing import recorded_packing

CONFIG = SketchConfig(ratio=0.25)
ROWS, FEATURES, STEPS = 32, 8, 6

pytestmark = [  # Lightning warns of what this small a run has not
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval.*"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec.*"),
    pytest.mark.filterwarnings("ignore:.*exists and is not empty.*"),
    pytest.mark.filterwarnings("ignore:.*resuming from a checkpoint that ended before the epoch ended.*"),
    pytest.mark.filterwarnings("ignore:.*GPU available but not used.*"),
    pytest.mark.filterwarnings("ignore:.*The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


class Regression(lightning.LightningModule):
    def __init__(self, compiled=False):
        super().__init__()
        torch.manual_seed(0)
        self.net: Any = nn.Sequential(nn.Linear(FEATURES, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 1))
        if compiled:
            self.net = torch.compile(self.net, backend="aot_eager")
        self.sketched = set()
        self.rests = set()
        self.fail = False

    def training_step(self, batch, index):
        if self.fail:
            raise RuntimeError("broken off")
        self.sketched.add(len(summary(self).sketched))
        self.rests.add(summary(self).rest)
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Validated(Regression):
    def validation_step(self, batch, index):
        return self.training_step(batch, index)


def data():
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(ROWS * STEPS, FEATURES, generator=generator), torch.randn(ROWS * STEPS, 1, generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=ROWS)


def fit(folder, module, callback, logger=None, **options):
    settings = {"accelerator": "cpu", "max_epochs": 1, "log_every_n_steps": 2, "enable_progress_bar": False, **options}
    callbacks = [] if callback is None else [callback]
    trainer = lightning.Trainer(
        default_root_dir=folder, logger=logger or False, callbacks=callbacks, enable_model_summary=False, **settings
    )
    torch.manual_seed(5)
    trainer.fit(module, data())
    return trainer


def weights_of(module):
    return [parameter.detach().clone() for parameter in module.parameters()]


def same(first, second):
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_it_converts_for_the_fit_and_changes_nothing_else(tmp_path):
    module, by_hand, exact = Regression(), Regression(), Regression()
    trainer = fit(tmp_path, module, SketchCallback(CONFIG))
    assert module.sketched == {2}
    assert not summary(module).sketched
    sketch_(by_hand, CONFIG)
    fit(tmp_path, by_hand, None)
    fit(tmp_path, exact, None)
    assert same(weights_of(module), weights_of(by_hand))
    assert not same(weights_of(module), weights_of(exact))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    loaded = Regression.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    assert same(weights_of(module), weights_of(loaded))


@pytest.mark.parametrize("by_layer", [False, True])
def test_loggers_get_kept_bytes_and_noise(tmp_path, by_layer):
    csv, board = CSVLogger(tmp_path), TensorBoardLogger(tmp_path)
    fit(tmp_path, Regression(), SketchCallback(CONFIG, noise_every=1, noise_by_layer=by_layer), [csv, board])
    csv.save()
    board.finalize("success")
    events = EventAccumulator(board.log_dir)
    events.Reload()
    names = ["kept_bytes", "noise", "noise_worst", *["noise/net.0", "noise/net.3"] * by_layer]
    tags = [tag for tag in events.Tags()["scalars"] if tag.startswith("backsketch/")]
    assert sorted(tags) == sorted(f"backsketch/{name}" for name in names)
    for name in names:
        shown = events.Scalars(f"backsketch/{name}")
        assert [event.step for event in shown] == [2, 4, 6]
        assert all(event.value > 0 for event in shown)
        assert f"backsketch/{name}" in csv.experiment.metrics_keys


def test_kept_bytes_fall_with_the_ratio_and_micro_batches_report_once(tmp_path):
    kept = []
    for ratio in (1.0, 0.1):
        logger = TensorBoardLogger(tmp_path / str(ratio))
        callback = SketchCallback(SketchConfig(ratio=ratio))
        fit(tmp_path, Regression(), callback, [logger], accumulate_grad_batches=2, log_every_n_steps=1)
        logger.finalize("success")
        events = EventAccumulator(logger.log_dir)
        events.Reload()
        kept.append([event.value for event in events.Scalars("backsketch/kept_bytes")])
    assert len(kept[0]) == STEPS // 2
    assert all(one < 0.9 * other for one, other in zip(kept[1], kept[0], strict=True))


def test_a_compiled_net_and_mixed_precision(tmp_path):
    torch._dynamo.reset()
    module = Regression(compiled=True)
    fit(tmp_path, module, SketchCallback(CONFIG))
    assert module.sketched == {2}
    assert not summary(module).sketched
    fit(tmp_path, Regression(), SketchCallback(CONFIG), precision="bf16-mixed")


def test_a_fit_that_breaks_off_leaves_the_module_as_it_was(tmp_path):
    module = Regression()
    module.fail = True
    with pytest.raises(RuntimeError, match="broken off"):
        fit(tmp_path, module, SketchCallback(CONFIG))
    assert not summary(module).sketched
    with pytest.raises(ValueError, match="noise_every must be a positive integer or None, got True"):
        SketchCallback(noise_every=True)


def test_rest_is_on_for_the_fit_in_the_net_that_a_training_step_calls(tmp_path, monkeypatch):
    recording = recorded_packing(monkeypatch)
    recorder = next(recording)
    module = Regression()
    own = [type(each) for each in module.modules()]
    fit(tmp_path, module, SketchCallback(CONFIG, rest=True))
    assert module.rests == {RestConfig()}
    assert recorder.entered == [RestConfig()] * STEPS
    assert [type(each) for each in module.modules()] == own
    module.fail = True
    with pytest.raises(RuntimeError, match="broken off"):
        fit(tmp_path, module, SketchCallback(CONFIG, rest=4))
    assert [type(each) for each in module.modules()] == own
    with pytest.raises(ValueError, match="rest as a number of bits must be one of"):
        SketchCallback(rest=5)


class LanguageModel(Regression):
    def __init__(self):
        super().__init__()
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        self.net = LlamaForCausalLM(LlamaConfig(vocab_size=60, use_cache=False, **sizes))
        self.fused = set()

    def training_step(self, batch, index):
        ids = torch.randint(60, (2, 8))
        output = self.net(ids, labels=ids)
        self.fused.add((output.logits is None, summary(self).fused_losses))
        return output.loss


def test_a_fused_loss_is_on_for_the_fit(tmp_path):
    module = LanguageModel()
    own = [type(each) for each in module.modules()]
    fit(tmp_path, module, SketchCallback(CONFIG, fused_loss=True))
    assert module.fused == {(True, ("net",))}
    assert [type(each) for each in module.modules()] == own
    with pytest.raises(ValueError, match="fuse_loss_ found no language model in Regression"):
        fit(tmp_path, Regression(), SketchCallback(CONFIG, fused_loss=True))


def test_the_noise_controls_the_rate_and_what_layers_keep_also_after_a_checkpoint(tmp_path):
    def callback():
        return SketchCallback(SketchConfig(ratio=1.0, bits=4), noise_every=1, noise_schedule=True, noise_limit=1.0)

    def fit(steps, callback, path=None):
        trainer = lightning.Trainer(
            max_steps=steps, accelerator="cpu", callbacks=[callback], logger=False, default_root_dir=tmp_path,
            enable_checkpointing=True, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(Regression(), data(), ckpt_path=path)
        return torch.load(trainer.checkpoint_callback.best_model_path, weights_only=False)["callbacks"]

    def state_of(callbacks):
        (found,) = [each for name, each in callbacks.items() if "SketchCallback" in name]
        return found

    first = state_of(fit(4, callback()))
    assert first["limit"]["changes"][0]["reason"] == "saves bytes below the limit"
    assert first["schedules"][0]["monitor"]["step"] == 4
    assert 0 < first["schedules"][0]["factors"][0] < 1
    (path,) = tmp_path.rglob("*step=4*.ckpt")
    second = state_of(fit(6, callback(), str(path)))
    other = callback()
    trainer = lightning.Trainer(
        max_steps=2, accelerator="cpu", callbacks=[other], logger=False, default_root_dir=tmp_path,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.validate(Validated(), data(), ckpt_path=str(path), verbose=False)
    trainer.fit(Regression(), data())
    assert other.state_dict()["schedules"][0]["noise"][0][2] == 2  # neither of the validated run nor lost with the fit
    assert second["limit"]["changes"] == first["limit"]["changes"]
    assert second["limit"]["configs"] == first["limit"]["configs"]
    assert second["schedules"][0]["noise"][0][2] == 6


class Wide(Regression):
    """Keeps far more than its weights, and logs in its step what may be logged only while training."""

    def __init__(self, by_hand=False):
        super().__init__()
        layers = [layer for _ in range(4) for layer in (nn.Linear(128, 128), nn.Tanh())]
        self.net = nn.Sequential(nn.Linear(FEATURES, 128), nn.Tanh(), *layers, nn.Linear(128, 1))
        self.automatic_optimization = not by_hand

    def training_step(self, batch, index):
        x, y = (part.repeat(64, 1) for part in batch)
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("own", loss, on_step=True)
        return loss


class Watch(lightning.Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.configs, self.rest = present_configs(pl_module), rest_of(pl_module)


def test_a_peak_is_planned_on_the_first_batch_saved_and_resumed(tmp_path, monkeypatch):
    def fit(callback, steps, path=None, module=None):
        watch = Watch()
        trainer = lightning.Trainer(
            max_steps=steps, accelerator="cpu", callbacks=[callback, watch], logger=False, default_root_dir=tmp_path,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        module = Wide() if module is None else module
        trainer.fit(module, data(), ckpt_path=path)
        assert not summary(module).sketched
        assert rest_of(module) is None
        return watch

    callback = SketchCallback(peak="80%")
    watch = fit(callback, 3)
    assert callback.planned is not None
    planned = TotalPlan.from_json(callback.planned)
    assert planned.before is not None
    assert planned.after <= planned.limit < planned.before
    assert planned.configs.keys() == {f"net.{number}" for number in range(0, 12, 2)}
    assert watch.configs == {name: config for name, config in planned.configs.items() if config is not None}
    assert watch.rest == planned.rest
    (path,) = tmp_path.rglob("*.ckpt")
    with monkeypatch.context() as patch:
        patch.setattr("backsketch.integrations.lightning.plan_fit", None)
        resumed = SketchCallback(peak="80%")
        assert fit(resumed, 5, str(path)).configs == watch.configs
    assert resumed.planned == callback.planned
    budgeted = SketchCallback(budget="40%", where=lambda name, module: name != "net.2")
    assert "net.2" not in fit(budgeted, 1).configs
    with pytest.raises(ValueError, match="peak must be None for a module that optimizes by hand"):
        fit(SketchCallback(peak="80%"), 1, module=Wide(by_hand=True))
    with pytest.raises(ValueError, match="rest must be None where peak is given"):
        SketchCallback(peak="80%", rest=True)
