"""summary: which trained weights sketched layers hold, which they do not, and reasons that are true and useful."""

import pytest
import torch
from torch import nn

from backsketch import RestConfig, SketchConfig, plan, sketch_, summary, unsketch_
from backsketch.table import starred, starred_names
from cases import needs_shown_saves
from small import HIDDEN, LENGTH, gpt2, llama, mixtral

CONFIG = SketchConfig(ratio=0.5)
WITHOUT_REST = "no linear layer; rest=True packs its input"


def trained(model):
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def note(model, name):
    return next(layer.note for layer in summary(model).layers if layer.name == name)


# Weights that are no layers


def test_experts_that_are_bare_parameters_are_named_first_with_their_share():
    model = sketch_(mixtral()[0], CONFIG)
    report, total = summary(model), trained(model)
    assert len(report.sketched) == len(report.layers) == 9
    linear = sum(p.numel() for m in model.modules() if isinstance(m, nn.Linear) for p in m.parameters())
    assert report.trained == total
    assert report.reached == pytest.approx(linear / total)
    assert report.embeddings == pytest.approx(100 * 32 / total)
    gate_up, down = report.unreached[:2]
    assert (gate_up.type, gate_up.parameter, gate_up.shape) == ("MixtralExperts", "gate_up_proj", (8, 96, 32))
    assert gate_up.modules == tuple(f"model.layers.{index}.mlp.experts" for index in range(2))
    assert gate_up.name == "model.layers.*.mlp.experts.gate_up_proj"
    assert gate_up.share == pytest.approx(2 * 8 * 96 * 32 / total)
    assert gate_up.reason == f"a 3-D parameter of MixtralExperts: {WITHOUT_REST}"
    assert down.shape == (8, 32, 48)
    assert {each.name: each.reason for each in report.unreached[2:]} == {
        "model.embed_tokens.weight": "embedding: keeps only indices",
        "model.layers.*.mlp.gate.weight": f"a 2-D parameter of MixtralTopKRouter: {WITHOUT_REST}",
    }
    lines = str(report).splitlines()
    assert lines[0] == (
        f"{linear / total:.1%} of the {total:,} trained weights are in sketched layers; "
        "9 of 9 linear layers are sketched"
    )
    assert lines[1] == f"embeddings hold {report.embeddings:.1%} of them, and keep only indices"
    assert lines[2].startswith("everything else that backward keeps is kept as it is; sketch_(model, rest=True) keeps")
    assert next(line for line in lines if "gate_up_proj" in line).split()[:6] == [
        "model.layers.*.mlp.experts.gate_up_proj", "2", "MixtralExperts", "8", "×", "96"
    ]  # fmt: skip


def test_a_model_of_linear_layers_is_reached_whole():
    report = summary(sketch_(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2)), CONFIG))
    assert (report.reached, report.embeddings, report.unreached) == (1.0, 0.0, ())
    assert str(report).startswith("100.0% of the 90 trained weights are in sketched layers; 2 of 2 linear layers are")


def test_a_tied_weight_counts_once_and_for_the_layer_that_is_sketched():
    model, _ = gpt2()
    tied = model.transformer.wte.weight
    assert tied is model.lm_head.weight
    report = summary(sketch_(model, CONFIG))
    assert report.trained == trained(model)
    assert [each.name for each in report.unreached] == ["transformer.wpe.weight"]
    assert report.embeddings == pytest.approx(LENGTH * HIDDEN / report.trained)
    sketch_(model, {"lm_head": None, "*": CONFIG})
    (head,) = (each for each in summary(model).unreached if each.elements == tied.numel())
    assert (head.name, head.reason) == ("lm_head.weight", "left exact by 'lm_head'")


def test_parameters_that_view_one_storage_count_each_for_itself_and_equal_views_once():
    flat = torch.randn(2, 8, 8)
    model = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))
    for layer, index in zip(model, (0, 1, 1), strict=True):
        layer.weight = nn.Parameter(flat[index])
    report = summary(sketch_(model, {"0": CONFIG}))
    assert (report.trained, report.reached) == (128, 0.5)


def test_what_no_sketch_reaches_is_named_by_its_kind():
    model = nn.ModuleDict(
        {
            "embedding": nn.Embedding(100, 8),
            "convolution": nn.Conv2d(3, 8, 3),
            "attention": nn.MultiheadAttention(8, 2),
            "recurrent": nn.LSTM(8, 4),
            "parametrized": nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
            "norm": nn.LayerNorm(8),
            "frozen": nn.Linear(8, 8).requires_grad_(False),
            "plain": nn.Linear(8, 8),
        }
    )
    report = summary(sketch_(model, CONFIG))
    reasons = {each.name: each.reason for each in report.unreached}
    assert reasons == {
        "embedding.weight": "embedding: keeps only indices",
        "convolution.weight": "convolution: no linear layer",
        "attention.in_proj_weight": "it multiplies its own weights, without linear layers",
        "attention.out_proj.weight": "nn.MultiheadAttention reads its weight and never calls it",
        "recurrent.weight_ih_l0": "it multiplies its own weights, without linear layers",
        "recurrent.weight_hh_l0": "it multiplies its own weights, without linear layers",
        "parametrized.parametrizations.weight.original0": "parametrized: sketch it first, then parametrize it",
        "parametrized.parametrizations.weight.original1": "parametrized: sketch it first, then parametrize it",
    }
    sizes = [each.elements for each in report.unreached]
    assert sizes == sorted(sizes, reverse=True)
    assert report.reached == pytest.approx(72 / trained(model))


def test_a_layer_parametrized_after_it_was_sketched_is_reached():
    model = sketch_(nn.Sequential(nn.Linear(8, 8)), CONFIG)
    nn.utils.parametrizations.weight_norm(model[0])
    assert (summary(model).reached, summary(model).unreached) == (1.0, ())


def test_without_anything_to_train_or_to_convert_it_says_so():
    assert str(summary(nn.Linear(4, 4).requires_grad_(False))).startswith("no weight trains; 0 of 1 linear layers are")
    assert str(summary(nn.LazyLinear(4))).startswith("no weight trains; 0 of 1 linear layers are sketched")
    assert str(summary(nn.GELU())) == "no weight trains; 0 of 0 linear layers are sketched"


@needs_shown_saves
@pytest.mark.parametrize(
    ("rest", "told"),
    [
        (True, "pointwise 3 bits, product 4, attention 8, norm 8, other 8"),
        (4, "pointwise 4 bits, product 4, attention 4, norm 4, other 4"),
        (RestConfig(norm=None, checkpoint=8), "pointwise 3 bits, product 4, attention 8, norm as it is, other 8, che"),
    ],
)
def test_the_bits_of_everything_else_are_told_below_the_totals(rest, told):
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    sketch_(model, CONFIG, rest=rest)
    report = summary(model)
    assert report.rest == RestConfig.of(rest)
    assert str(report).splitlines()[1].startswith(f"everything else that backward keeps: {told}")
    assert summary(unsketch_(model)).rest is None
    assert "kept as it is; sketch_(model, rest=True)" in str(summary(model)).splitlines()[1]


def test_without_anything_to_train_nothing_is_said_of_the_rest():
    assert "everything else" not in str(summary(nn.Linear(4, 4).requires_grad_(False)))


def tables(model):
    """Return title -> the names in the first column, for every table of the printed summary."""
    blocks = [block.splitlines() for block in str(summary(model)).split("\n\n")[1:]]
    return {lines[0].split("  ")[0]: [line.split()[0] for line in lines[1:] if line.strip(" -─━")] for lines in blocks}


def test_a_layer_is_listed_once_and_under_what_is_true_of_it():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)), OwnForward(8, 8))
    for index in (3, 4):
        model[index].requires_grad_(False)
    model[5].weight = model[0].weight  # tied: it counts for the layer that is sketched
    model[6].requires_grad_(False)
    sketch_(model, {"0": CONFIG, "1": CONFIG, "3": CONFIG, "*": None})
    listed = tables(model)
    assert listed == {
        "trained, not sketched": ["2.weight"],
        "sketched": ["0", "1"],
        "left exact": ["5"],
        "frozen": ["3", "4", "6"],
    }
    assert [layer.name for layer in summary(model).sketched] == ["0", "1", "3"]


def test_a_model_that_is_one_exact_layer_is_listed_once():
    assert tables(nn.Linear(8, 8)) == {"trained, not sketched": ["weight"]}


def test_a_layer_that_a_plan_leaves_exact_says_so():
    model, x = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), torch.randn(4096, 64)
    model[2].forward = model[2].forward
    planned = plan(model, x, budget="50%")
    del model[2].forward
    assert planned["2"] is None
    assert note(sketch_(model, planned), "2") == "left exact by the plan"


@pytest.mark.parametrize(
    ("name", "stars"),
    [
        ("model.layers.7.mlp.experts.12.up", "model.layers.*.mlp.experts.*.up"),
        ("model.layers.7", "model.layers.*"),
        ("h2.c_fc", "h2.c_fc"),
        ("3", "3"),
        ("3.1", "*.1"),
        ("3.up", "*.up"),
        ("", ""),
    ],
)
def test_only_the_numbers_of_blocks_become_stars(name, stars):
    assert starred(name) == stars


def test_of_a_sentence_only_names_get_stars():
    sentence = "held by layers.3.mlp, h.11: of 4 features it would keep 0.5 or 89%"
    assert starred_names(sentence) == "held by layers.*.mlp, h.*: of 4 features it would keep 0.5 or 89%"


# Reasons


def test_a_frozen_layer_is_told_whatever_else_is_true_of_it():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))
    for layer in list(model)[:4]:
        layer.requires_grad_(False)
    sketch_(model, {"0": CONFIG, "1": None, "4": CONFIG, "3": CONFIG}, where=lambda name, module: name != "3")
    for name in "0123":
        assert note(model, name) == "frozen: keeps nothing"
    assert note(model, "4") == str(CONFIG)
    assert str(summary(model)).startswith(
        "100.0% of the 72 trained weights are in sketched layers; 2 of 5 linear layers are sketched, 1 of them frozen"
    )
    model[1].requires_grad_(True)
    assert note(model, "1") == "left exact by '1'"


def test_the_frozen_base_of_lora_is_frozen_and_not_without_a_pattern():
    peft = pytest.importorskip("peft")
    model, _ = llama()
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    report = summary(sketch_(adapted, {"*lora_A*": CONFIG}))
    notes = {layer.name: layer.note for layer in report.exact}
    base = {note for name, note in notes.items() if "lora_B" not in name}
    assert base == {"frozen: keeps nothing"}
    assert {note for name, note in notes.items() if "lora_B" in name} == {"no pattern matches its name"}


class OwnForward(nn.Linear):
    def forward(self, input):
        return super().forward(input) * 2


def test_a_frozen_layer_of_another_class_is_said_to_be_frozen_too():
    model = nn.Sequential(OwnForward(8, 8), OwnForward(8, 8).requires_grad_(False))
    assert note(model, "0") == "OwnForward is a subclass of nn.Linear and may own its forward"
    assert note(model, "1") == "OwnForward is a subclass of nn.Linear and may own its forward; frozen"


def test_a_quantised_layer_whose_weight_is_a_method_is_listed():
    class Quantised(nn.Linear):
        """As the layers of torch.ao.quantization are."""

        def __init__(self):
            super().__init__(8, 8)
            packed = self._parameters.pop("weight").detach()
            self.__dict__["weight"] = lambda: packed

        def forward(self, input):
            return input @ self.weight().T  # type: ignore[operator]

    assert note(nn.Sequential(Quantised()), "0").startswith("Quantised is a subclass of nn.Linear")
    assert "0" in str(summary(nn.Sequential(Quantised(), nn.Linear(8, 8))))


def test_a_layer_that_no_sketch_has_met_is_not_said_to_be_chosen_against():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    sketch_(model, {"0": CONFIG, "1": None})
    assert note(unsketch_(model), "1") == note(nn.Linear(8, 8), "(the model)") == "no sketch_ in force"
