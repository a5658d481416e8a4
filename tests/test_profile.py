"""profile: its prediction is what is then measured, and a sketch goes only where it pays."""

import copy
import dataclasses
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from backsketch import SketchConfig, peak_memory, plan, profile, saved_memory, sketch_, summary, unsketch_, valid_rows
from backsketch.memory.live_storages import LiveStorage, Peak
from backsketch.memory.recording import record_ledger
from small import BATCH, HIDDEN, LENGTH, MIDDLE, MODELS, ROWS, gpt2, llama, mixtral, roberta, text, transformers, vit

FLOAT, SEED = 4, 8


def kept(model, batch):
    """Return the bytes that autograd holds after a forward pass in training."""
    model.train()
    with saved_memory(model) as saved:
        output = model(**batch)
    size = saved.activations
    del output
    return size


def measured_peak(model, batch):
    model.train()
    model.zero_grad()
    with peak_memory(model) as peak:
        model(**batch).loss.backward()
    return peak.total


# The prediction


@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("make", MODELS)
def test_the_prediction_is_what_is_measured(make, ratio):
    model, batch = make()
    config = SketchConfig(ratio=ratio)
    found = profile(model, **batch, config=config)
    assert found.kept_before == kept(model, batch)
    assert found.peak_before.total == measured_peak(model, batch)

    sketch_(model, config, profile=found)
    assert found.kept_after == kept(model, batch)
    assert measured_peak(model, batch) == pytest.approx(found.peak_after.total, rel=0.02)

    sketch_(model, config)
    assert found.kept_if_all == kept(model, batch)


@pytest.mark.parametrize("kind", ["gaussian", "hadamard", "hash"])
def test_the_prediction_holds_for_other_kinds_and_mappings(kind):
    model, batch = gpt2()
    configs = {"*.c_attn": SketchConfig(kind=kind, ratio=0.3), "*.mlp.*": SketchConfig(kind=kind, dim=7)}
    found = profile(model, **batch, config=configs)
    assert {layer.name for layer in found.layers if layer.config is None} == {
        "transformer.h.0.attn.c_proj", "transformer.h.1.attn.c_proj", "lm_head"
    }  # fmt: skip
    sketch_(model, configs, profile=found)
    assert found.kept_after == kept(model, batch)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_the_prediction_holds_for_stored_bits_and_kept_means(bits):
    model, batch = roberta()
    config = SketchConfig(ratio=0.5, bits=bits, center=True)
    found = profile(model, **batch, config=config)
    sketch_(model, config, profile=found)
    assert found.kept_after == kept(model, batch)


def test_the_prediction_counts_the_mask_of_padded_rows_once():
    model, batch = roberta()
    batch["attention_mask"] = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    unpadded = profile(model, **batch, config=SketchConfig(ratio=0.5))
    batch["attention_mask"][0, 5:] = 0
    found = profile(model, **batch, config=SketchConfig(ratio=0.5))
    assert found.kept_after - found.kept_before == unpadded.kept_after - unpadded.kept_before + ROWS
    sketch_(model, SketchConfig(ratio=0.5), profile=found)
    assert found.kept_after == kept(model, batch)


class Odd(nn.Module):
    """Layers used in every way that could be miscounted."""

    def __init__(self):
        super().__init__()
        self.twice, self.turned, self.frozen, self.left, self.right, self.queries = (
            nn.Linear(16, 16) for _ in range(6)
        )
        self.frozen.requires_grad_(False)
        self.norm = nn.BatchNorm1d(16)
        self.register_buffer("table", torch.randn(24, 16))

    def forward(self, x):
        x = self.twice(self.twice(self.norm(x)))
        x = self.frozen(self.turned(x.view(4, 6, 16).transpose(0, 1)).reshape(24, 16)).sigmoid() * 2
        half = x[:12]
        y = self.left(half) + self.right(half) * self.queries(self.table)[:12]
        return y + checkpoint(self.twice, y, use_reentrant=False)


@pytest.mark.parametrize("ratio", [0.1, 0.5])
def test_the_prediction_holds_for_odd_uses(ratio):
    model, batch = Odd(), dict[str, Any](x=torch.randn(24, 16))
    found = profile(model, **batch, config=SketchConfig(ratio=ratio))
    layers = {layer.name: layer for layer in found.layers}
    assert layers["twice"].calls == 2  # the third is in a checkpoint, which holds nothing of it
    assert layers["frozen"].note == "frozen: keeps nothing"
    assert "parameters" in layers["queries"].note
    assert found.kept_before == kept(model, batch)
    sketch_(model, SketchConfig(ratio=ratio), profile=found)
    assert found.kept_after == kept(model, batch)
    sketch_(model, SketchConfig(ratio=ratio))
    assert found.kept_if_all == kept(model, batch)


class Changing(nn.Module):
    """Two layers read one tensor, which changes in between; each keeps a contiguous copy, so that it can train."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        x = (x * 2).transpose(0, 1)
        return self.left(x) + self.right(x.add_(1))


def test_a_tensor_that_changed_is_another_tensor():
    model, batch = Changing(), dict[str, Any](x=torch.randn(4, 6, 16))
    found = profile(model, **batch, config=SketchConfig(ratio=0.5))
    assert found.groups == ()
    sketch_(model, SketchConfig(ratio=0.5), profile=found)
    assert found.kept_after == kept(model, batch)


def test_the_prediction_holds_under_autocast():
    model, batch = roberta()
    config = SketchConfig(ratio=0.25)
    with torch.autocast("cpu", torch.bfloat16):
        found = profile(model, **batch, config=config)
        assert found.kept_before == kept(model, batch)
        sketch_(model, config, profile=found)
        assert found.kept_after == kept(model, batch)


def test_a_batch_kept_whole_costs_what_it_does_today():
    model, batch = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), dict[str, Any](input=torch.randn(4, 8))
    config = SketchConfig(min_dim=10)
    found = profile(model, **batch, config=config)
    assert found.pays == ()
    assert found.kept_after == found.kept_before
    sketch_(model, config)
    assert found.kept_if_all == kept(model, batch) == found.kept_before


# What is saved, by hand


def block_bytes(*inputs, ratio):
    """Return the bytes that sketches of inputs with so many features save, with their seeds."""
    dim = round(ratio * ROWS)
    return sum(FLOAT * features * (ROWS - dim) - SEED for features in inputs)


def test_sharing_saves_eight_percent_of_a_llama_block_where_layers_apart_save_under_four():
    model = transformers.LlamaModel(
        transformers.LlamaConfig(
            vocab_size=100, hidden_size=256, intermediate_size=688, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=4, attn_implementation="sdpa",
        )
    )  # fmt: skip
    batch = {"input_ids": text()["input_ids"]}
    exact, config = kept(model, batch), SketchConfig(ratio=0.5)
    found = profile(model, **batch, config=config)

    shared = kept(sketch_(model, config), batch)
    assert exact - shared == 2 * block_bytes(256, 256, 688, ratio=0.5)  # o_proj keeps what SDPA keeps anyway
    assert 1 - shared / exact >= 0.08

    sketches = {(FLOAT * 256 * round(0.5 * ROWS) + SEED)}
    apart = shared + 2 * 3 * sketches.pop()  # two more for q, k, v and one more for gate, up, in both layers
    assert 1 - apart / exact < 0.04

    unsketch_(model)
    driven = kept(sketch_(model, config, profile=found), batch)
    assert exact - driven == 2 * block_bytes(256, 256, 688, ratio=0.5)


def test_a_tenth_of_the_rows_saves_a_quarter_of_a_roberta_block():
    config = transformers.RobertaConfig(
        vocab_size=100, hidden_size=256, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=LENGTH + 4, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.RobertaModel(config, add_pooling_layer=False)
    batch = {"input_ids": text()["input_ids"]}
    exact = kept(model, batch)
    sketched = kept(sketch_(model, SketchConfig(ratio=0.1)), batch)
    assert exact - sketched == 2 * block_bytes(256, 256, 256, 1024, ratio=0.1)  # qkv, output, intermediate, output
    assert 1 - sketched / exact >= 0.26


# Where it cannot pay


@pytest.mark.parametrize("make", [llama, vit])
def test_under_sdpa_no_ratio_keeps_more_with_a_profile_or_without(make):
    model, batch = make()
    for ratio in (0.1, 0.3, 0.5, 0.7, 0.8, 0.9):
        found = profile(model, **batch, config=SketchConfig(ratio=ratio))
        exact = kept(model, batch)
        driven = kept(sketch_(model, SketchConfig(ratio=ratio), profile=found), batch)
        assert driven < exact
        assert kept(sketch_(model, SketchConfig(ratio=ratio)), batch) == driven
        unsketch_(model)


def test_it_names_who_holds_the_input():
    model, batch = llama()
    found = profile(model, **batch, config=SketchConfig(ratio=0.1))
    layers = {layer.name: layer for layer in found.layers}
    output = layers["model.layers.0.self_attn.o_proj"]
    assert output.held_by == ("model.layers.0.self_attn",)
    assert not output.pays
    assert layers["model.layers.0.mlp.down_proj"].held_by == ()
    assert "model.layers.0.mlp.down_proj" in found.pays
    assert (
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.self_attn.k_proj",
        "model.layers.0.self_attn.v_proj",
    ) in (found.groups)
    assert layers["model.layers.1.mlp.up_proj"].shares_with == ("model.layers.1.mlp.gate_proj",)

    sketch_(model, SketchConfig(ratio=0.1), profile=found)
    left = {layer.name: layer.note for layer in summary(model).exact}
    assert left["model.layers.0.self_attn.o_proj"] == "its input is held anyway by model.layers.0.self_attn"
    assert len(left) == 2


@pytest.mark.parametrize(("activation", "pays"), [(nn.ReLU, False), (nn.Tanh, False), (nn.GELU, True), (nn.SiLU, True)])
def test_an_activation_that_keeps_its_output_leaves_nothing_to_save(activation, pays):
    model = nn.Sequential(nn.Linear(8, 16), activation(), nn.Linear(16, 8))
    found = profile(model, torch.randn(20, 8), config=SketchConfig(ratio=0.1))
    assert found.layers[1].held_by == (() if pays else ("1",))
    assert ("2" in found.pays) == pays


def test_another_layer_left_exact_holds_the_input():
    model, batch = roberta()
    name = "roberta.encoder.layer.0.attention.self."
    found = profile(model, **batch, config={f"{name}key": SketchConfig(ratio=0.1)})
    layers = {layer.name: layer for layer in found.layers}
    assert set(layers[f"{name}key"].held_by) == {f"{name}query", f"{name}value"}
    assert found.pays == ()
    with pytest.warns(UserWarning, match="converted no layer"):
        sketch_(model, {f"{name}key": SketchConfig(ratio=0.1)}, profile=found)


def test_a_layer_that_was_sketched_is_restored_where_it_does_not_pay():
    model, batch = llama()
    config = SketchConfig(ratio=0.5)
    sketch_(model, config)
    sketch_(model, config, profile=profile(model, **batch))
    assert type(model.model.layers[0].self_attn.o_proj) is nn.Linear


def test_a_split_group_is_warned_of():
    model, batch = llama()
    found = profile(model, **batch)
    small, large = SketchConfig(ratio=0.1), SketchConfig(ratio=0.2)
    with pytest.warns(UserWarning, match=r"layers.0.mlp.gate_proj, .*up_proj read the same input"):
        sketch_(model, {"*.0.mlp.gate_proj": small, "*.0.mlp.up_proj": large}, profile=found)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sketch_(model, {"*.1.mlp.*": small}, profile=found)


# What it reaches


@pytest.mark.parametrize("make", MODELS)
def test_every_byte_is_claimed_and_claims_hold_no_more(make):
    model, batch = make()
    model.train()
    with saved_memory(model) as saved:
        output = model(**batch)
    ledger = record_ledger(model, lambda: model(**batch).loss)
    assert ledger.kept == saved.activations
    claimed = {key for claim in ledger.claims for key in claim.storages}
    own = {key for claim in ledger.claims if claim.holder == "the model's own parameters" for key in claim.storages}
    assert claimed - own == ledger.sizes.keys()
    del output


def test_the_profile_tells_which_share_is_reached_and_who_holds_the_rest():
    model, batch = mixtral()
    found = profile(model, **batch, config=SketchConfig(ratio=0.5))
    inputs = {key for call in found.ledger.calls for key in call.storages if not found.ledger.others.get(key)}
    sizes = found.ledger.sizes
    assert found.reached == pytest.approx(sum(sizes[key] for key in inputs) / found.kept_before)
    assert 0 < found.reached < 0.5
    names, rest = zip(*found.elsewhere, strict=True)
    assert "model.layers.*.mlp.experts" in names
    assert list(rest) == sorted(rest, reverse=True)
    assert sum(rest) == found.kept_before - round(found.reached * found.kept_before)
    assert f"\n  of it inputs of the selected layers alone: {found.reached:.1%}\n" in str(found)
    line = next(line for line in str(found).splitlines() if line.startswith("  most of the rest is held by"))
    assert f"{names[0]} ({rest[0] / found.kept_before:.1%})" in line
    assert line.count("%") == 3


def test_an_input_that_an_exact_layer_holds_is_held_by_it():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), torch.randn(64, 8)
    found = profile(model, x, config={"0": SketchConfig(ratio=0.5)}, loss=lambda out: out.sum())
    assert found.elsewhere == (("1", x.nbytes), ("2", x.nbytes))
    assert found.reached == pytest.approx(1 / 3)
    everything = profile(nn.Linear(8, 8), x, config=SketchConfig(ratio=0.5), loss=lambda out: out.sum())
    assert (everything.reached, everything.elsewhere) == (1.0, ())
    assert "alone: 100.0%\n" in str(everything)
    assert "most of the rest" not in str(everything)


def test_a_step_that_keeps_nothing_reaches_nothing():
    model = nn.Sequential(nn.Linear(8, 8))
    model[0].weight.requires_grad_(False)
    found = profile(model, torch.randn(BATCH, 8), config=SketchConfig(ratio=0.5), loss=lambda out: out.sum())
    assert (found.kept_before, found.reached) == (0, 0.0)


# Leaving no trace


def test_the_model_is_left_as_it_was():
    model, batch = roberta()
    model = nn.ModuleDict({"inner": model, "norm": nn.BatchNorm1d(3)})
    model.forward = lambda **batch: model["norm"](model["inner"](**batch).logits)
    sketch_(model["inner"], {"*.query": SketchConfig(ratio=0.3)})
    model.eval()
    model["norm"].train()
    model["norm"].weight.grad = marked = torch.ones(3)
    state, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    classes = [(type(module), module.training, dict(module.__dict__)) for module in model.modules()]
    hooks = [(dict(module._forward_pre_hooks), dict(module._forward_hooks)) for module in model.modules()]
    assert any(before for before, _ in hooks)

    found = profile(model, **batch, config=SketchConfig(ratio=0.1))

    assert found.peak_after.total < found.peak_before.total
    assert torch.equal(torch.get_rng_state(), random)
    assert [(type(module), module.training, dict(module.__dict__)) for module in model.modules()] == classes
    assert [(module._forward_pre_hooks, module._forward_hooks) for module in model.modules()] == hooks
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert model["norm"].weight.grad is marked
    assert torch.equal(marked, torch.ones(3))
    assert all(parameter.grad is None for parameter in model["inner"].parameters())


def test_a_failing_model_is_left_as_it_was():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).eval()
    with pytest.raises(ZeroDivisionError):
        profile(model, torch.randn(3, 4), loss=lambda output: 1 / 0)  # type: ignore[arg-type, return-value]
    assert not model.training
    assert not model[0]._forward_hooks
    assert not model[0]._forward_pre_hooks


def test_a_converted_model_is_profiled_with_its_own_configs():
    model, batch = gpt2()
    config = SketchConfig(ratio=0.3)
    sketch_(model, {"*.c_fc": config})
    found = profile(model, **batch)
    assert dict(found.chosen) == {f"transformer.h.{index}.mlp.c_fc": config for index in range(2)}
    assert found.kept_after == kept(model, batch)


# Meta, loss, output


def undropped(make):
    """Make a model without dropout, which on a CPU has no fused kernels, with SDPA."""
    model, batch = make()
    for name in ("attention_probs_dropout_prob", "hidden_dropout_prob", "attn_pdrop", "resid_pdrop", "embd_pdrop"):
        setattr(model.config, name, 0.0)
    model.config._attn_implementation = "sdpa"
    return type(model)(model.config), batch


def on_meta(model):
    with torch.device("meta"):
        return type(model)(model.config)


CONFIGS = [
    SketchConfig(ratio=0.1),
    SketchConfig(ratio=0.7, bits=4),
    SketchConfig(kind="gaussian", ratio=0.2),
    SketchConfig(kind="hadamard", ratio=0.3, block=16, center=True),
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("make", MODELS)
def test_on_meta_it_tells_what_a_real_step_would(make, config, monkeypatch):
    monkeypatch.setattr("backsketch.storage.cpu_kernel._LEAST_VALUES", 1)  # fused on both
    model, batch = undropped(make)
    real, found = profile(model, **batch, config=config), profile(on_meta(model), **batch, config=config)
    assert found.layers == real.layers
    assert (found.kept_before, found.kept_after, found.kept_if_all) == (
        real.kept_before,
        real.kept_after,
        real.kept_if_all,
    )
    for one, other in ((found.peak_before, real.peak_before), (found.peak_after, real.peak_after)):
        assert one.total == pytest.approx(other.total, rel=2e-3)


def test_on_meta_attention_and_dropout_are_those_of_an_accelerator():
    model, batch = undropped(roberta)
    without = profile(on_meta(model), **batch)
    model.config.hidden_dropout_prob, model.config.attention_probs_dropout_prob = 0.1, 0.1
    found = profile(on_meta(model), **batch)
    # A byte a value: after the embeddings, twice in each of two blocks, and twice in the head. Beside these, the head
    # keeps what dropout returned in place of the tensor that its input was a view of. Attention keeps no more.
    masks = ROWS * HIDDEN * (1 + 2 * 2) + 2 * BATCH * HIDDEN
    head = 2 * BATCH * HIDDEN * FLOAT - ROWS * HIDDEN * FLOAT
    assert found.kept_before - without.kept_before == masks + head


def test_on_meta_a_checkpoint_runs_again_by_the_same_kernels():
    model, batch = undropped(llama)
    model.config.num_key_value_heads = 2  # without fused kernels attention repeats them, and saves more tensors
    model = type(model)(model.config)
    found = []
    for each in (model, on_meta(model)):
        each.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        one = profile(each, **batch)
        found.append((one.kept_before, one.kept_after))
    assert found[0] == found[1]


@pytest.mark.parametrize("config", [SketchConfig(ratio=0.5), SketchConfig(kind="hash", ratio=0.5, center=True)])
def test_on_meta_a_mask_is_counted_too(config):
    x, mask = torch.randn(8, 6, requires_grad=True), torch.arange(8) % 3 != 0
    found = []
    for device in ("cpu", "meta"):
        model = nn.Sequential(nn.Linear(6, 6, device=device), nn.GELU(), nn.Linear(6, 6, device=device))
        with valid_rows(mask):
            one = profile(model, x, config=config, loss=lambda out: out.mul(mask.to(out.device).unsqueeze(1)).sum())
        found.append((one.kept_before, one.kept_after, one.kept_if_all))
    assert found[0] == found[1]
    assert found[0][2] < found[0][0]


def test_loss_is_the_callers_the_models_or_a_mean():
    model, x = nn.Linear(4, 4), torch.randn(3, 4)
    one = profile(model, x)
    other = profile(model, x, loss=lambda output: output.exp().sum())
    assert other.kept_before == one.kept_before + FLOAT * 12
    with pytest.raises(ValueError, match="scalar"):
        profile(model, x, loss=lambda output: output)
    with pytest.raises(ValueError, match="give loss="):
        profile(nn.Linear(4, 4).requires_grad_(False), x)


@dataclasses.dataclass(slots=True)
class Output:
    ids: torch.Tensor
    logits: torch.Tensor


def test_the_outputs_of_a_dataclass_are_found():
    model = nn.Linear(4, 4)
    wrapped = nn.ModuleDict({"inner": model})
    wrapped.forward = lambda x: Output(torch.arange(3), model(x))
    x = torch.randn(3, 4)
    assert profile(wrapped, x).kept_before == profile(model, x).kept_before


def test_the_peak_at_the_logits_is_said_to_be_there():
    found = profile(*[llama(vocabulary=8000)[0]], **text(8000), config=SketchConfig(ratio=0.1))
    assert found.advice.startswith("at the loss")
    assert found.advice.endswith("backsketch.fuse_loss_(model)")
    assert "a fused loss would help more" in str(found)
    assert found.loss_bytes > BATCH * LENGTH * 8000 * FLOAT
    narrow, batch = roberta()
    assert profile(narrow, **batch, config=SketchConfig(ratio=0.1)).advice is None


def lowered_by(found, share):
    """Return the same profile with another peak after conversion."""
    live = {LiveStorage("parameters", None, ()): round(found.peak_before.total * (1 - share))}
    return dataclasses.replace(found, peak_after=Peak(found.peak_before.place, live))


@pytest.mark.parametrize(("share", "lowers"), [(0.5, True), (0.02, True), (0.005, False), (0, False), (-0.1, False)])
def test_a_sketch_that_does_not_lower_the_peak_is_said_not_to(share, lowers):
    found = profile(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)), torch.randn(512, 64))
    changed = lowered_by(found, share)
    assert changed.lowers_peak is lowers
    assert ("this sketch does not lower the peak; what would: " in str(changed)) is not lowers


@pytest.mark.parametrize(
    ("rows", "features", "outputs", "first"),
    [(4, 512, 8, "LoRA or quantised weights"), (8192, 8, 8, "gradient check"), (256, 8, 4096, "a fused loss")],
)
def test_what_would_lower_the_peak_is_told_by_its_largest_part(rows, features, outputs, first):
    model = nn.Sequential(nn.Linear(features, features), nn.GELU(), nn.Linear(features, outputs))
    labels = torch.randint(outputs, (rows,))
    loss = lambda logits: nn.functional.cross_entropy(logits, labels)  # noqa: E731
    found = profile(model, torch.randn(rows, features), config=SketchConfig(ratio=1.0), loss=loss)
    assert found.remedies[0].startswith(first)
    assert not found.lowers_peak
    assert first in str(found.advice)
    assert "fuse_loss_" not in str(found)  # which would refuse the model


def test_the_input_gradient_of_the_last_layer_is_no_part_of_the_logits():
    found = profile(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10)), torch.randn(512, 64))
    assert found.loss_bytes <= 512 * 10 * FLOAT * 2  # the logits and their gradient
    assert "logits" not in str(found.advice)


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("measure", [profile, partial(plan, budget="50%")])
def test_without_gradients_there_is_no_step_to_measure(measure, off):
    with off(), pytest.raises(ValueError, match="needs gradients: do not call this inside no_grad or inference_mode"):
        measure(nn.Linear(4, 4), torch.randn(8, 4))


def test_records_and_tables():
    model, batch = llama()
    found = profile(model, **batch, config=SketchConfig(ratio=0.5))
    records = found.to_records()
    assert len(records) == len(found.layers) == 15
    down = next(record for record in records if record["name"] == "model.layers.0.mlp.down_proj")
    assert down["rows"] == ROWS
    assert down["input_bytes"] == FLOAT * ROWS * MIDDLE
    assert down["sketch_bytes"] == FLOAT * ROWS // 2 * MIDDLE + SEED
    assert all(layer.in_features in (HIDDEN, MIDDLE) for layer in found.layers)
    text_table = str(found)
    assert "model.layers.0.self_attn.q_proj" in text_table
    assert "kept for backward:" in text_table


def test_the_table_needs_no_rich(capsys, monkeypatch):
    found = profile(nn.Linear(4, 4), torch.randn(30, 4))
    found.print_table()
    assert "pays" in capsys.readouterr().out
    monkeypatch.setitem(__import__("sys").modules, "rich", None)
    found.print_table()
    assert capsys.readouterr().out.strip() == str(found).strip()
