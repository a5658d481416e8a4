"""plan: the budget is met, and the noise is less than that of one ratio for all."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from backsketch import SketchConfig, plan, saved_memory, sketch_
from backsketch.convert.layer_classes import exact_type
from backsketch.planning.budget import as_budget
from backsketch.planning.layer_noise import added_noise
from backsketch.planning.spending import Point, lower_hull, spend
from small import gpt2, llama, roberta

RATIO_ALONE: dict[str, Any] = {"config": SketchConfig(), "bits": (None,)}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
STILL_GPT2 = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}


def briefly_trained(make, **options):
    model, batch = make(**options)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(10):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, batch


def noise_at(model, batch, names, config):
    """Return the expected noise of one config for all of ``names``."""
    calls = added_noise(model, names, config, lambda: model(**batch).loss)
    model.zero_grad()
    return sum(call.under(config) for name in names for call in calls[name])


def kept(model, batch):
    with saved_memory(model) as saved:
        output = model(**batch)
    size = saved.activations
    del output
    return size


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (gpt2, STILL_GPT2),
        (roberta, STILL),
        (llama, {}),
    ],
)
def test_half_the_bytes_with_less_noise_than_one_ratio(make, options):
    model, batch = briefly_trained(make, **options)
    exact = kept(model, batch)
    planned = plan(model, **batch, budget="50%", **RATIO_ALONE)
    assert planned.kept_before == exact
    assert 0.98 * planned.budget <= planned.bytes_after <= planned.budget == planned.bytes_before // 2

    names = [name for part in planned.parts for name in part.layers]
    uniform = noise_at(model, batch, names, SketchConfig(ratio=0.5))
    assert planned.noise <= 0.8 * uniform

    sketch_(model, planned)
    assert kept(model, batch) == planned.kept_after


@pytest.mark.parametrize(
    ("budget", "options"),
    [
        ("50%", RATIO_ALONE),
        ("50%", {}),
        ("10%", {}),
        ("5%", {"bits": (2,)}),
        ("10%", {"bits": (3,), "rotate": False}),
        ("10%", {"config": SketchConfig(bits=4, center=True)}),
    ],
)
@pytest.mark.parametrize("padded", [False, True])
def test_monte_carlo_confirms_the_expected_noise(budget, options, padded):
    model, batch = briefly_trained(gpt2, **STILL_GPT2)
    if padded:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][:2, 9:] = 0
        batch["labels"] = batch["labels"].masked_fill(batch["attention_mask"] == 0, -100)
    planned = plan(model, **batch, budget=budget, **options)
    assert planned.bytes_after <= planned.budget
    used = {config for config in planned.values() if config is not None}
    assert used
    assert all(config.bits in options.get("bits", (None, 8, 4, 3, 2)) for config in used)

    def gradient():
        model.zero_grad()
        model(**batch).loss.backward()
        return torch.cat([model.get_submodule(name).weight.grad.double().flatten() for name in planned])

    exact = gradient()
    sketch_(model, planned)
    errors = torch.stack([(gradient() - exact).square().sum() for _ in range(100)])
    assert abs(errors.mean() - planned.noise) <= 5 * errors.std() / 10


@pytest.mark.parametrize("block", [None, 16])
@pytest.mark.parametrize("kind", ["gaussian", "rademacher", "hadamard", "hash"])
def test_the_noise_of_other_kinds_is_what_monte_carlo_finds(kind, block):
    torch.manual_seed(1)
    model, x = nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 5)), torch.randn(64, 6) + 0.5
    planned = plan(
        model, x, budget="30%", config=SketchConfig(kind=kind, block=block), loss=lambda out: out.square().mean()
    )

    layers: list[Any] = [model[0], model[2]]

    def gradient():
        model.zero_grad()
        model(x).square().mean().backward()
        return torch.cat([layer.weight.grad.double().flatten() for layer in layers])

    exact = gradient()
    sketch_(model, planned)
    errors = torch.stack([(gradient() - exact).square().sum() for _ in range(400)])
    assert abs(errors.mean() - planned.noise) <= 5 * errors.std() / 20 + 0.02 * planned.noise


def test_few_bits_add_less_noise_than_few_rows():
    model, batch = briefly_trained(gpt2, **STILL_GPT2)
    rows = plan(model, **batch, budget="15%", **RATIO_ALONE)
    stored = plan(model, **batch, budget="15%")
    assert stored.noise < 0.05 * rows.noise
    exact = kept(model, batch)
    assert kept(sketch_(model, stored), batch) == stored.kept_after < exact


@pytest.mark.parametrize("bits", [(), (5,), (None, 16), 4])
def test_wrong_bits_are_refused(bits):
    with pytest.raises(ValueError, match="bits must be some of"):
        plan(nn.Linear(4, 4), torch.randn(10, 4), budget="50%", bits=bits)


def test_bits_are_planned_for_rows_alone():
    with pytest.raises(ValueError, match="for kinds that mix rows"):
        plan(nn.Linear(4, 4), torch.randn(10, 4), budget="50%", config=SketchConfig(kind="hash", bits=4))


def test_layers_that_share_an_input_share_a_config_and_held_inputs_stay_exact():
    model, batch = llama()
    planned = plan(model, **batch, budget="20%", **RATIO_ALONE)
    for index in range(2):
        attention = f"model.layers.{index}.self_attn"
        assert planned[f"{attention}.q_proj"] == planned[f"{attention}.k_proj"] == planned[f"{attention}.v_proj"]
        assert planned[f"{attention}.q_proj"] is not None
        assert planned[f"{attention}.o_proj"] is None
    assert len(planned) == 15
    sketch_(model, planned)
    assert exact_type(model.model.layers[0].self_attn.o_proj) is None


def test_a_budget_is_of_the_layers_that_may_be_sketched():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    x = torch.randn(256, 64)
    only = lambda name, module: name in ("1", "2")  # noqa: E731
    planned = plan(model, x, budget="20%", where=only)
    assert set(planned) == {"1", "2"}
    kept = []
    for _ in range(2):
        with saved_memory(model) as saved:
            out = model(x)
        kept.append(saved.activations)
        del out
        sketch_(model, planned, where=only)
    assert kept[0] - kept[1] >= 0.8 * 2 * x.nbytes


def test_a_budget_in_bytes_and_a_budget_of_all():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), torch.randn(200, 8)
    assert plan(model, x, budget=4000, **RATIO_ALONE).bytes_after in range(3900, 4001)
    everything = plan(model, x, budget="100%", **RATIO_ALONE)
    assert set(everything.values()) == {None}
    assert everything.noise == 0
    assert everything.bytes_after == everything.bytes_before == 2 * 200 * 8 * 4


def test_the_ratio_follows_the_square_root_of_noise_over_bytes():
    quiet, loud = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    model = nn.ModuleList([quiet, loud])
    x, y = torch.randn(1000, 8), torch.randn(1000, 8)
    model.forward = lambda x, y: quiet(x) + 3 * loud(y)
    target = torch.randn(1000, 8)
    planned: Any = plan(model, x, y, budget="20%", **RATIO_ALONE, loss=lambda out: (out * target).sum())
    assert planned["1"].ratio / planned["0"].ratio == pytest.approx(3, rel=0.1)  # the noise is nine times as large


def test_a_budget_that_cannot_be_met_says_how_low_it_can_go():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), torch.randn(100, 8)
    with pytest.raises(ValueError, match=r"at least 80 B \(80 bytes, 1\.2% of the 6\.2 KiB that .*\): got 79, which"):
        plan(model, x, budget=79, **RATIO_ALONE)
    assert plan(model, x, budget=80, **RATIO_ALONE).bytes_after == 80
    with pytest.raises(ValueError, match="nothing to plan"):
        plan(nn.Sequential(nn.Tanh(), nn.Linear(8, 8)), x.clone().requires_grad_(), budget="50%")


UNITS = {
    **{f"1.5{unit}": 1500 * 1000**power for power, unit in enumerate(("kB", "MB", "GB", "TB"))},
    **{f"1.5{unit}": 1536 * 1024**power for power, unit in enumerate(("KiB", "MiB", "GiB", "TiB"))},
    " 300 mib ": 300 * 2**20,
    "500mb": 500 * 10**6,
    "2GIB": 2**31,
    "0.29kb": 290,
    ".5 KB": 500,
    "17 B": 17,
}


@pytest.mark.parametrize(("budget", "size"), UNITS.items())
def test_a_budget_of_bytes_may_have_a_unit(budget, size):
    assert as_budget(budget) == size
    assert isinstance(as_budget(budget), int)


def test_a_plan_takes_a_unit():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), torch.randn(200, 8)
    assert plan(model, x, budget="4kB", **RATIO_ALONE).budget == plan(model, x, budget=4000, **RATIO_ALONE).budget


WRONG = ["50", "0%", "101%", "half", "MB", "0 MB", "-1 MB", "0.5 B", "1 PB", "1 M", "1.2.3 MB", 0, -3, 0.0, 1.5]


@pytest.mark.parametrize("budget", [*WRONG, float("nan"), float("inf")])
def test_a_wrong_budget_is_refused(budget):
    with pytest.raises(ValueError, match=r"budget must be a share .* kB, MB, GB, TB, KiB, MiB, GiB, TiB or B\), got"):
        plan(nn.Linear(4, 4), torch.randn(10, 4), budget=budget)


@pytest.mark.parametrize("budget", [True, [0.5]])
def test_a_budget_of_another_type_is_refused(budget):
    with pytest.raises(TypeError, match="budget must be a share"):
        plan(nn.Linear(4, 4), torch.randn(10, 4), budget=budget)


def test_what_is_not_a_config_is_refused():
    with pytest.raises(TypeError, match="config must be a SketchConfig, got"):
        plan(nn.Linear(4, 4), torch.randn(10, 4), budget="50%", config={"ratio": 0.5})


def test_a_batch_without_finite_gradients_cannot_be_planned_on():
    with pytest.raises(ValueError, match="finite inputs and gradients; those of layer 0 are not finite"):
        plan(nn.Sequential(nn.Linear(4, 4)), torch.full((10, 4), float("nan")), budget="50%")


def test_meta_has_no_noise_to_measure():
    with pytest.raises(ValueError, match="meta"):
        plan(nn.Linear(4, 4, device="meta"), torch.randn(10, 4), budget="50%")


def test_the_model_is_left_as_it_was_and_the_plan_prints():
    model, batch = gpt2()
    random, classes = torch.get_rng_state(), [type(module) for module in model.modules()]
    printed = str(plan(model, **batch, budget="50%", **RATIO_ALONE))
    assert "lm_head" in printed
    assert "within the budget" in printed.splitlines()[0]
    assert torch.equal(torch.get_rng_state(), random)
    assert [type(module) for module in model.modules()] == classes
    assert all(parameter.grad is None for parameter in model.parameters())


# Spending


POINTS = st.lists(
    st.builds(Point, st.none(), st.integers(1, 40), st.floats(0, 10, allow_subnormal=False)), min_size=1, max_size=6
)


@given(st.lists(POINTS, min_size=1, max_size=3), st.integers(1, 150))
def test_spending_never_exceeds_the_budget_and_never_wastes_a_step(items, budget):
    least = sum(min(point.bytes for point in points) for points in items)
    if least > budget:
        with pytest.raises(ValueError, match="budget"):
            spend(items, budget)
        return
    chosen = spend(items, budget)
    left = budget - sum(point.bytes for point in chosen)
    assert left >= 0
    for point, points in zip(chosen, items, strict=True):
        hull = lower_hull(points)
        following = hull[hull.index(point) + 1 :][:1]
        assert all(other.bytes - point.bytes > left for other in following)


@given(POINTS)
def test_no_point_lies_below_the_hull(points):
    hull = lower_hull(points)
    for point in points:
        if point.bytes >= hull[-1].bytes:
            assert point.noise >= hull[-1].noise
        for first, last in pairwise(hull):
            if first.bytes <= point.bytes <= last.bytes:
                share = (point.bytes - first.bytes) / (last.bytes - first.bytes)
                assert point.noise >= first.noise + share * (last.noise - first.noise) - 1e-9
