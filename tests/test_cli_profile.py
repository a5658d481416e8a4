"""``backsketch profile``: its figures are those of a real step, and what it recommends does what it says."""

import json
import re
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("typer")
pytest.importorskip("transformers")

import huggingface_hub
import transformers

import backsketch
from backsketch import RestConfig, SketchConfig, saved_memory, summary
from backsketch.cli import main
from backsketch.cli import profile as profile_command
from backsketch.cli.config_text import as_code
from backsketch.cli.layer_groups import exclusions
from backsketch.cli.models import build, find_head, load_config, make_batch
from backsketch.cli.profile_report import linear_inputs
from backsketch.memory.live_storages import LiveStorage, Peak
from backsketch.memory.optimizer_states import OPTIMIZERS, states_of_all
from backsketch.table import readable
from commands import call, check_mistake

TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 50}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SPEECH = {
    "vocab_size": 50, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_source_positions": 40,
    "max_target_positions": 20, "decoder_start_token_id": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
CONFIGS = {
    "bert": transformers.BertConfig(**{**TINY, "num_hidden_layers": 8}, **STILL, max_position_embeddings=64),
    "roberta": transformers.RobertaConfig(**TINY, max_position_embeddings=66, architectures=["RobertaForMaskedLM"]),
    "llama": transformers.LlamaConfig(**TINY, num_key_value_heads=2, architectures=["LlamaForCausalLM"]),
    "gpt2": transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=50, n_positions=64, bos_token_id=0),
    "bart": transformers.BartConfig(
        vocab_size=50, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64,
    ),
    "t5": transformers.T5Config(vocab_size=50, d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2),
    "vit": transformers.ViTConfig(
        **{**TINY, **STILL}, image_size=16, patch_size=4, architectures=["ViTForImageClassification"]
    ),
    "whisper": transformers.WhisperConfig(**SPEECH, num_mel_bins=8, architectures=["WhisperForConditionalGeneration"]),
    "speech2text": transformers.Speech2TextConfig(**SPEECH, input_feat_per_channel=8, conv_channels=16),
    "wav2vec2": transformers.Wav2Vec2Config(
        **TINY, conv_dim=(16, 16), conv_stride=(5, 2), conv_kernel=(10, 3), num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4, architectures=["Wav2Vec2ForCTC"],
    ),
    "ast": transformers.ASTConfig(
        **TINY, max_length=64, num_mel_bins=16, architectures=["ASTForAudioClassification"]
    ),
}  # fmt: skip
REFUSED = {
    "vits": {"model_type": "vits"},
    "moonshine": {"model_type": "moonshine", "architectures": ["MoonshineForConditionalGeneration"]},
    "double": {**CONFIGS["bert"].to_dict(), "dtype": "float64"},
}
ARCHITECTURES = {
    "bert": "BertForSequenceClassification",
    "roberta": "RobertaForSequenceClassification",
    "llama": "LlamaForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "bart": "BartForConditionalGeneration",
    "t5": "T5ForConditionalGeneration",
    "vit": "ViTForImageClassification",
    "whisper": "WhisperForConditionalGeneration",
    "speech2text": "Speech2TextForConditionalGeneration",
    "wav2vec2": "Wav2Vec2ForSequenceClassification",
    "ast": "ASTForAudioClassification",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profile")
    for name, config in CONFIGS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config.to_dict()))
    (folder / "empty").mkdir()
    (folder / "text").mkdir()
    (folder / "text" / "config.json").write_text("no JSON")
    for name, fields in REFUSED.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(fields))
    return folder


@pytest.fixture(autouse=True)
def _inside(place, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def step(name, batch=8, seq=16):
    """Return a real model of the config, with a batch."""
    config = load_config(name)
    head = find_head(config)
    model = build(config, head, device="cpu", dtype=torch.float32)
    return model, make_batch(model, head, batch=batch, seq=seq, device="cpu")


def kept(model, inputs):
    with saved_memory(model) as saved:
        output = model(**inputs)
    size = saved.activations
    del output
    return size


def run(capsys, *arguments):
    assert main(["profile", *arguments]) == 0
    shown = capsys.readouterr()
    assert not shown.err
    return shown.out


def record(capsys, *arguments):
    return json.loads(run(capsys, "--batch", "8", "--seq", "16", "--json", *arguments))


def test_its_figures_are_those_of_a_real_step(place, monkeypatch):
    monkeypatch.setattr("backsketch.storage.cpu_kernel._LEAST_VALUES", 1)  # fused, as on an accelerator
    process = call("profile", "bert/config.json", "--batch", "8", "--seq", "16", "--json", cwd=place)
    assert (process.returncode, process.stderr) == (0, "")
    told = json.loads(process.stdout)
    model, inputs = step("bert")
    real = backsketch.profile(model, **inputs)
    assert told["kept"] == {"before": real.kept_before, "after": real.kept_after, "if_all": real.kept_if_all}
    assert told["kept"]["before"] == kept(model, inputs)
    tables = 2 * (32 + 64) * 128 * 4  # of the rotation of short groups on a CPU, for each width and direction
    assert abs(real.peak_after.total - told["peak"]["after"]["total"] - tables / 2) <= tables / 2
    assert told["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert SketchConfig(**told["config"]) == SketchConfig(**told["recommended"]) == SketchConfig.recommended()
    assert [layer["name"] for layer in told["layers"]] == [layer.name for layer in real.layers]


def test_what_it_shows_fits_a_terminal_and_what_it_recommends_is_what_it_says(capsys):
    shown = run(capsys, "bert", "--batch", "8", "--seq", "16")
    assert max(map(len, shown.splitlines())) <= 80
    assert "layer.*.attention.self.query, key, value  8" in shown
    assert "no gain in layer.*.attention.output.dense: its input is held anyway by" in shown
    model, inputs = step("bert")
    code = shown.split("Recommended:\n")[1].split("The noise")[0]
    exec("\n".join(line.removeprefix("  ") for line in code.splitlines()), {"model": model})
    told = record(capsys, "bert")["recommended_way"]
    assert kept(model, inputs) == told["kept"]
    assert summary(model).rest == RestConfig()


def test_its_noise_is_said_to_be_computed_and_not_measured(capsys):
    shown = " ".join(run(capsys, "bert", "--batch", "8", "--seq", "16").split())
    assert "computed from the config and not measured on this model: 0.016 by leaving rows out (1/ratio - 1," in shown
    assert "about 0.04 by rounding to 3 bits (a rule of thumb, measured on one encoder)" in shown


def with_peak(found, share):
    """Return the same profile with a peak after conversion of a share of the one before."""
    live = {LiveStorage("activations", None, ()): round(share * found.peak_before.total)}
    return replace(found, peak_after=Peak(found.peak_before.place, live))


def recommended(shares, monkeypatch, capsys, *arguments):
    """Run it with peaks of one's own for the configs in their order, and return its record and what it shows."""
    measured = profile_command._measure
    monkeypatch.setattr(profile_command, "measured_ways", lambda *given: [])

    def run_once(*extra):
        rest = iter(shares)
        monkeypatch.setattr(profile_command, "_measure", lambda *given: with_peak(measured(*given), next(rest)))
        return run(capsys, "llama", "--batch", "8", "--seq", "16", *arguments, *extra)

    return json.loads(run_once("--json")), " ".join(run_once().split())


@pytest.mark.parametrize(
    ("shares", "keep"),
    [((0.9, 0.8, 0.7), 0.1), ((1.1, 0.8, 0.7), 0.27), ((1.0, 0.995, 0.98), 0.05), ((1.1, 1.1, 0.7), 0.05)],
)
def test_what_it_recommends_lowers_the_peak(shares, keep, monkeypatch, capsys):
    told, shown = recommended(shares, monkeypatch, capsys)
    best = SketchConfig.recommended(keep)
    assert SketchConfig(**told["recommended"]) == best
    assert "Recommended: import backsketch as bs bs.sketch_(model, {" in shown
    assert f"bs.{as_code(best)}" in shown


@pytest.mark.parametrize(
    ("shares", "arguments"),
    [((1.1, 1.0, 0.995), ()), ((1.1, 1.0), ("--ratio", "0.5")), ((1.0, 1.0), ("--budget", "20%"))],
)
def test_where_no_config_lowers_the_peak_it_says_what_would(shares, arguments, monkeypatch, capsys):
    told, shown = recommended(shares, monkeypatch, capsys, *arguments)
    assert told["recommended"] is None
    assert "Recommended: no sketch." in shown
    assert re.search(r"lowers? the peak of forward and backward by 1% or more", shown)
    assert "- gradient checkpointing (" in shown
    assert "sketch_(" not in shown


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
def test_experts_have_a_row_of_their_own(dtype, capsys, tmp_path):
    config = transformers.MixtralConfig(
        **TINY, num_key_value_heads=2, num_local_experts=4, architectures=["MixtralForCausalLM"]
    )
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    told = record(capsys, str(tmp_path), "--dtype", dtype)
    families = next(way["families"] for way in told["ways"] if way["families"])
    size = {"float32": 4, "bf16": 2}[dtype]
    layers, experts, rows = 2, 4, 2 * 8 * 16  # each token goes to two experts
    offsets = experts * 4
    assert families["experts"]["before"] == layers * (rows * (32 + 64) * size + offsets)
    assert 0 < families["experts"]["after"] < families["experts"]["before"] / 2


def test_the_total_comes_first_and_its_parts_add_up(capsys):
    shown = run(capsys, "bert", "--batch", "8", "--seq", "16").splitlines()
    assert shown[0].startswith("bert: BertForSequenceClassification")
    total = next(place for place, line in enumerate(shown) if line.startswith("One training step on 8 × 16 tokens"))
    first = next(place for place, line in enumerate(shown) if line.lstrip().startswith("kept for backward"))
    assert total < first
    told = record(capsys, "bert")
    kept, peak = (
        readable(size) for size in (told["kept"]["before"], told["peak"]["before"]["total"] + told["adamw_bytes"])
    )
    titles = ("kept for backward", "what rest keeps", "kept by", "linear inputs")
    tables = [next(place for place, line in enumerate(shown) if line.lstrip().startswith(title)) for title in titles]
    ways, families, layers, choices = (shown[place + 1] for place in tables)
    assert re.fullmatch(rf"exact +{kept} +{peak}", ways.rstrip())
    assert re.match(r"in all +\d", families)
    assert re.fullmatch(rf"all operations +{kept} +100.0%", layers.rstrip())
    assert re.fullmatch(rf"exact +\S+ \S+ +{kept} +{peak}", choices.rstrip())
    ways = {way["name"]: way for way in told["ways"]}
    assert list(ways) == ["exact", "checkpointing", "linear sketches", "sketches and rest"]
    assert ways["exact"]["peak"]["total"] == told["peak"]["before"]["total"]
    assert ways["sketches and rest"]["kept"] < ways["linear sketches"]["kept"] < ways["exact"]["kept"]
    assert ways["checkpointing"]["kept"] < ways["exact"]["kept"]
    families = ways["sketches and rest"]["families"]
    assert {"product", "attention", "norm"} <= families.keys()
    assert all(each["after"] < each["before"] for each in families.values() if each["before"] > 2**16)
    assert told["recommended_way"]["peak"]["total"] <= 0.99 * ways["exact"]["peak"]["total"]
    assert not told["not_measured"]


def test_optimisers_are_counted_by_the_formula_that_fit_and_plan_use(capsys):
    network = build(CONFIGS["llama"], find_head(CONFIGS["llama"]), device="meta", dtype=torch.float32)
    for name in OPTIMIZERS:
        told = record(capsys, "llama", "--optimizer", name, "--ratio", "0.5")
        assert told["optimizer_bytes"] == states_of_all(name, network.parameters())
        assert told["adamw_bytes"] == states_of_all("adamw", network.parameters())
    shown = " ".join(run(capsys, "llama", "--seq", "16", "--optimizer", "adamw8bit").split())
    assert "8-bit AdamW keeps" in shown
    assert "two states of one byte a parameter" in shown


def test_logits_that_make_the_peak_are_named_with_their_remedy(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGS["llama"].to_dict(), "vocab_size": 20_000}))
    told = record(capsys, str(tmp_path))
    logits = 8 * 16 * 20_000 * 4
    assert told["logits_bytes"] > logits
    ways = {way["name"]: way["peak"]["total"] for way in told["ways"]}
    assert ways["exact"] - ways["fused loss"] > logits
    assert told["recommended_way"]["name"].endswith("fused loss")
    shown = run(capsys, str(tmp_path), "--batch", "8", "--seq", "16")
    remedy = "are the logits and their loss: bs.fuse_loss_(model) makes them some rows at a time"
    assert remedy in " ".join(shown.split())
    assert "\n  bs.fuse_loss_(model)\n" in shown


class Blocks(nn.Module):
    """Two layers, of which the second reads what ReLU keeps, so that a sketch of it saves nothing."""

    def __init__(self, first, second):
        super().__init__()
        self.layer = nn.ModuleList([nn.ModuleDict({first: nn.Linear(8, 8), second: nn.Linear(8, 8)})])
        self.first, self.second = first, second

    def forward(self, x):
        block: Any = self.layer[0]
        return block[self.second](block[self.first](x).relu())


@pytest.mark.parametrize(("first", "second", "globs"), [("up", "down", ["layer.*.down"]), ("up_down", "*_down", None)])
def test_a_pattern_leaves_out_only_what_does_not_pay(first, second, globs):
    found = backsketch.profile(Blocks(first, second), torch.randn(64, 8), config=SketchConfig(ratio=0.5))
    assert found.pays == (f"layer.0.{first}",)
    assert exclusions(found) == globs


@pytest.mark.parametrize("name", CONFIGS)
def test_every_architecture_is_followed_with_its_head(name, capsys):
    told = record(capsys, name)
    assert told["architecture"] == ARCHITECTURES[name]
    assert told["kept"]["after"] < told["kept"]["before"]
    assert (told["seq"] is None) == (name in ("vit", "ast"))


SIZES = {
    "bert": "8 × 16 tokens",
    "vit": "8 images of 16 × 16",
    "whisper": "8 clips of 8 × 80 values, with 16 tokens each",
    "speech2text": "8 clips of 40 × 8 values, with 16 tokens each",
    "wav2vec2": "8 clips of 170 samples",
    "ast": "8 clips of 64 × 16 values",
}


@pytest.mark.parametrize("name", SIZES)
def test_it_says_what_a_batch_is(name, capsys):
    assert f"One training step on {SIZES[name]} keeps" in run(capsys, name, "--batch", "8", "--seq", "16")


@pytest.mark.parametrize("name", ["whisper", "ast", "wav2vec2"])
def test_a_real_step_on_audio_keeps_what_was_told_without_one(name, capsys, tmp_path):
    dropout = {each: 0.0 for each in vars(CONFIGS[name]) if each.endswith(("dropout", "dropout_prob"))}
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGS[name].to_dict(), **dropout}))
    told, real = (record(capsys, str(tmp_path), "--device", device) for device in ("meta", "cpu"))
    assert (told["kept"], told["linear_inputs"]) == (real["kept"], real["linear_inputs"])
    assert told["peak"]["before"]["total"] == real["peak"]["before"]["total"]


def test_frames_of_audio_are_those_that_layers_see(capsys):
    first = record(capsys, "wav2vec2")["layers"][0]
    assert (first["name"], first["rows"]) == ("wav2vec2.feature_projection.projection", 8 * 16)


def test_another_head_can_be_asked_for(capsys):
    assert record(capsys, "bert", "--head", "masked-lm")["architecture"] == "BertForMaskedLM"
    told = record(capsys, "gpt2", "--head", "sequence-classification", "--ratio", "0.5")
    assert told["architecture"] == "GPT2ForSequenceClassification"


def test_a_real_step_keeps_what_was_told_without_one(capsys):
    told, real = record(capsys, "bert"), record(capsys, "bert", "--device", "cpu")
    assert (told["kept"], told["linear_inputs"]) == (real["kept"], real["linear_inputs"])


def test_half_the_bytes_in_half_precision(capsys):
    whole, half = (record(capsys, "llama", "--dim", "9", "--dtype", dtype) for dtype in ("float32", "bfloat16"))
    assert half["linear_inputs"]["before"] == whole["linear_inputs"]["before"] / 2
    assert half["parameter_bytes"] == whole["parameter_bytes"] / 2
    assert whole["adamw_bytes"] - half["adamw_bytes"] == whole["parameter_bytes"]  # but for the steps, which both have


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_the_dtype_is_the_one_that_the_config_states(field, capsys, tmp_path):
    plain = {name: value for name, value in CONFIGS["llama"].to_dict().items() if name not in ("dtype", "torch_dtype")}
    (tmp_path / "config.json").write_text(json.dumps({**plain, field: "bfloat16"}))
    stated, asked = (record(capsys, *words) for words in ([str(tmp_path)], ["llama", "--dtype", "bfloat16"]))
    assert (stated["dtype"], stated["dtype_from"]) == ("bfloat16", "config")
    assert (asked["dtype"], asked["dtype_from"]) == ("bfloat16", "--dtype")
    assert stated["kept"] == asked["kept"]
    assert "bfloat16 (as the model's config states)" in " ".join(run(capsys, str(tmp_path), "--seq", "16").split())
    assert record(capsys, str(tmp_path), "--dtype", "float32")["parameter_bytes"] == 2 * stated["parameter_bytes"]


def test_without_a_stated_dtype_it_is_float32(capsys):
    told = record(capsys, "llama")
    assert (told["dtype"], told["dtype_from"]) == ("float32", "default")
    assert "float32 (by default: the model's config states none)" in " ".join(
        run(capsys, "llama", "--seq", "16").split()
    )


def test_a_config_of_ones_own_is_compared_with_the_best_in_as_many_bytes(capsys):
    told = record(capsys, "bert", "--kind", "hadamard", "--ratio", "0.1", "--center")
    assert SketchConfig(**told["config"]) == SketchConfig(kind="hadamard", ratio=0.1, center=True)
    (other,) = told["others"]
    assert other["config"] == told["recommended"]
    assert other["config"]["bits"] is not None
    assert other["linear_inputs"]["after"] == pytest.approx(told["linear_inputs"]["after"], rel=0.1)


BUDGETS = [("10%", ()), ("0.1", ("--kind", "hash")), ("12345", ("--bits", "4")), ("12KiB", ("--bits", "4"))]


@pytest.mark.parametrize(("budget", "options"), BUDGETS)
def test_a_budget_is_met_and_used(budget, options, capsys):
    told = record(capsys, "gpt2", "--budget", budget, *options)
    before, after = told["linear_inputs"]["before"], told["linear_inputs"]["after"]
    limit = {"12345": 12345, "12KiB": 12288}.get(budget, before // 10)
    assert 0.9 * limit <= after <= limit


@pytest.mark.parametrize("given", [{}, {"bits": 8}], ids=str)
@pytest.mark.parametrize("keep", [0.01, 0.1, 0.3])
@pytest.mark.parametrize("budget", [0.05, 0.1, 0.2, 0.3, 0.4, 0.6])
def test_a_budget_counts_the_layers_that_its_config_finds_narrow(budget, keep, given):
    """A layer of 4 features is sketched under a small config and left exact under a large one."""
    model = nn.Sequential(nn.Linear(64, 2), nn.GELU(), nn.Linear(2, 4), nn.GELU(), nn.Linear(4, 64))
    x = torch.randn(4096, 64)
    today = 4096 * (64 + 2 + 4) * 4
    found = backsketch.profile(model, x, config=SketchConfig.recommended(keep))
    config = profile_command._within(budget, model, found, given, SketchConfig.recommended)
    before, after = linear_inputs(backsketch.profile(model, x, config=config))
    assert today - before + after <= budget * today


MISTAKES = [
    ([], "Missing argument"),
    (["nowhere.json"], "model must be a path that exists or a name on the hub, got 'nowhere.json'"),
    (["./nowhere"], "model must be a path that exists or a name on the hub, got './nowhere'"),
    (["text/config.json"], "model must be a directory or a file with a config, got 'text/config.json': "),
    (["no-such/model"], "model must be a path that exists or a name on the hub, got 'no-such/model': "),
    (["empty"], "model must be a directory with config.json, got 'empty'"),
    (["bert", "--batch", "0"], "batch must be a positive integer, got 0"),
    (["bert", "--seq", "-1"], "seq must be a positive integer, got -1"),
    (["bert", "--seq", "65"], "seq must be at most 64, the positions that the model has, got 65"),
    (["roberta", "--seq", "65"], "seq must be at most 64, the positions that the model has, got 65"),
    (["bert", "--optimizer", "lion"], "optimizer must be one of adamw, adamw8bit, sgd, got 'lion'"),
    (["bert", "--head", "colour"], "head must be one of sequence-classification, causal-lm"),
    (["bert", "--head", "seq2seq-lm"], "transformers has no bert model with the head 'seq2seq-lm': --head may be sequ"),
    (["whisper", "--seq", "21"], "seq must be at most 20, the positions that the model has, got 21"),
    (["whisper", "--head", "seq2seq-lm"], "with the head 'seq2seq-lm': --head may be"),
    (["vits"], "transformers has no vits model with a head known here (sequence-classification, causal-lm"),
    (["moonshine"], "the config of a moonshine model does not tell the shape of its audio: backsketch.profile(model"),
    (["double"], "dtype must be one of float32, bfloat16, float16, got 'float64' from the config: give --dtype"),
    (["bert", "--dtype", "int8"], "dtype must be one of fp32, bf16, fp16, float32, bfloat16, float16, got 'int8'"),
    (["bert", "--device", "moon"], "device must be meta, cpu or cuda, got 'moon'"),
    (["bert", "--ratio", "2"], "ratio must be in (0, 1], got 2.0"),
    (["bert", "--budget", "20%", "--ratio", "0.1"], "--budget finds the ratio: it excludes --ratio"),
    (["bert", "--budget", "much"], "budget must be a share"),
    (["bert", "--budget", "100"], "budget must be at least"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=[" ".join(case[0]) for case in MISTAKES])
def test_a_mistake_is_one_line_and_exit_code_2(arguments, message, capsys):
    seq = () if "--seq" in arguments else ("--seq", "16")
    check_mistake(["profile", *arguments, *seq], message, capsys)


def test_without_transformers_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["profile", "bert"]) == 1
    assert capsys.readouterr().err == "backsketch: this needs transformers: pip install 'backsketch[transformers]'\n"
