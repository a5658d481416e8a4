"""plan(kept=...) and plan(peak=...): the limit holds where the model is, with less noise than uniform settings."""

import json
import math
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from backsketch import (
    PlanError,
    RestConfig,
    SketchConfig,
    fit,
    peak_memory,
    plan,
    saved_memory,
    sketch_,
    summary,
    unsketch_,
)
from backsketch.convert.checkpointed_blocks import present_blocks
from backsketch.convert.conversion import decisions_for
from backsketch.memory.optimizer_states import states_of_all
from backsketch.memory.recording import record_ledger
from backsketch.planning import step_options
from backsketch.planning.family_noise import PRECISE
from backsketch.planning.filling import _with_bits
from backsketch.planning.model_setting import ModelSetting
from backsketch.planning.step_meter import StepMeter
from backsketch.planning.step_options import StepOptions
from backsketch.planning.total_plan import TotalPlan
from backsketch.planning.total_planner import plan_total
from backsketch.rest.packing_modules import rest_of
from backsketch.rest.rest_config import FAMILIES
from cases import needs_shown_saves

pytestmark = needs_shown_saves

WIDTH, ROWS = 64, 512


class Block(nn.Module):
    """A block of a transformer before its norms, or of one like Llama: gated, and normed by the root mean square."""

    def __init__(self, gated):
        super().__init__()
        norm = nn.RMSNorm if gated else nn.LayerNorm
        self.norms = nn.ModuleList([norm(WIDTH), norm(WIDTH)])
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.gate, self.down = (
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH) if gated else None,
            nn.Linear(3 * WIDTH, WIDTH),
        )
        self.dropout = nn.Dropout(0.0 if gated else 0.1)

    def forward(self, x):
        normed = self.norms[0](x)
        query, key, value = (
            layer(normed).unflatten(-1, (4, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        read = F.scaled_dot_product_attention(query, key, value)
        x = x + self.dropout(self.out(read.transpose(1, 2).flatten(-2)))
        normed = self.norms[1](x)
        inner = F.gelu(self.up(normed)) if self.gate is None else F.silu(self.gate(normed)) * self.up(normed)
        return x + self.dropout(self.down(inner))


class Network(nn.Module):
    def __init__(self, gated=False, depth=3):
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(Block(gated) for _ in range(depth))
        self.head = nn.Linear(WIDTH, 50)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def tokens():
    return torch.randint(0, 50, (8, ROWS // 8))


def measured(model, *batch, optimizer=None):
    """Return what is kept, and the peak of a step, with the states of an optimiser that the step before has made."""
    model.train()

    def run():
        return model(**batch[0]).loss if isinstance(batch[0], dict) else model(*batch)

    with saved_memory(model) as saved:
        loss = run()
    kept = saved.activations
    del loss
    model.zero_grad()
    with peak_memory(model, optimizer) as peak:
        run().backward()
    model.zero_grad()
    return kept, peak.total


def options_for(model, *batch, **named):
    """Return what may be chosen for the peak of a model, and the names of its layers."""
    decided = decisions_for(model, SketchConfig(ratio=0.01))
    meter = StepMeter(model, batch, named, None, "peak")
    chosen = {name: decision.config for name, decision in decided.items() if decision.config is not None}
    storages = [(bits, rotate) for bits in (8, 4, 3, 2) for rotate in (False, True)]
    return StepOptions(meter, chosen, SketchConfig(), [(None, False), *storages]), list(decided)


@pytest.fixture(scope="module", params=[False, True], ids=["encoder", "gated"])
def case(request):
    """A model, a batch, and what may be chosen for its peak, measured once."""
    torch.manual_seed(0)
    model, batch = Network(gated=request.param), tokens()
    return model, batch, *options_for(model, batch)


@pytest.mark.parametrize("share", [0.7, 0.55])
def test_the_peak_is_within_two_percent_of_its_limit_and_never_above(case, share):
    model, batch, options, asked = case
    before = measured(model, batch)
    found = plan_total(options, share, asked, 1.0)
    assert (found.before, found.kept_before) == (before[1], before[0])
    assert found.limit == int(share * before[1])
    sketch_(model, found)
    assert measured(model, batch) == (found.kept_after, found.after)
    assert 0.98 * found.limit <= found.after <= found.limit
    assert rest_of(model) == found.rest
    again = TotalPlan.from_json(json.loads(json.dumps(found.to_json())))
    assert str(again) == str(found)
    sketch_(unsketch_(model), again)
    assert measured(model, batch)[1] == found.after
    assert measured(unsketch_(model), batch) == before
    total, kept, noise = str(found).splitlines()[:3]
    assert total.startswith("peak of a step: ")
    free = 1 - found.after / found.limit
    assert total.endswith(f"within the limit of {found.limit / 2**20:.1f} MiB ({free:.1%} of it free)")
    assert kept.startswith("all kept for backward: ")
    assert noise.startswith("expected noise of the gradient: ")
    assert found.cheaper is not None
    assert found.cheaper.after < found.after
    assert found.cheaper.noise >= found.noise or found.cheaper.blocks > len(found.blocks)
    assert found.dearer is not None
    assert found.dearer.after > found.after
    assert found.dearer.noise <= found.noise


UNIFORM = [(0.05, True), (0.1, True), (0.2, 8), (0.4, True), (0.3, None)]


@pytest.mark.parametrize("keep", UNIFORM, ids=str)
def test_it_is_never_noisier_than_a_uniform_setting_of_the_same_peak(case, keep):
    model, batch, options, asked = case
    share, rest = keep
    sketch_(model, SketchConfig.recommended(share), rest=rest)
    limit = measured(model, batch)[1]
    unsketch_(model)
    config = SketchConfig.recommended(share)
    uniform = options.with_blocks(0).noise_of(dict.fromkeys(options.exact_layers, config), RestConfig.of(rest))
    found = plan_total(options, limit, asked, math.inf)
    assert found.after <= limit
    assert not found.blocks
    assert found.noise <= uniform


def test_activation_functions_may_keep_8_bits_as_a_uniform_setting_can():
    torch.manual_seed(0)
    model, x = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)]), torch.randn(512, 64)
    options, asked = options_for(model, x)
    config = SketchConfig.recommended(0.4)
    limit = options.meter(ModelSetting(dict.fromkeys(asked, config), PRECISE))
    uniform = options.with_blocks(0).noise_of(dict.fromkeys(options.exact_layers, config), PRECISE)
    found = plan_total(options, int(limit), asked, math.inf)
    assert found.after <= limit
    assert found.noise <= uniform


class Bag(nn.Module):
    """A gated block on top of a table, whose gradient is the peak once the block keeps little."""

    def __init__(self):
        super().__init__()
        self.table = nn.EmbeddingBag(4000, WIDTH)
        self.gate, self.up, self.down = nn.Linear(WIDTH, 192), nn.Linear(WIDTH, 192), nn.Linear(192, WIDTH)
        self.head = nn.Linear(WIDTH, 50)

    def forward(self, ids):
        x = self.table(ids)
        x = x + self.down(F.silu(self.gate(x)) * self.up(x))
        return F.cross_entropy(self.head(x), ids[:, 0] % 50)


def test_what_is_kept_beside_a_peak_elsewhere_is_free():
    torch.manual_seed(0)
    model, batch = Bag(), torch.randint(0, 4000, (1500, 8))
    options, asked = options_for(model, batch)
    config = SketchConfig.recommended(0.4)
    uniform = options.with_blocks(0).noise_of(dict.fromkeys(options.exact_layers, config), PRECISE)
    for rest in (RestConfig.recommended(), PRECISE):  # the tables of rotation, made once, count in the first step
        limit = options.meter(ModelSetting(dict.fromkeys(asked, config), rest))
    found = plan_total(options, int(limit), asked, math.inf)
    assert found.after <= limit
    assert found.noise < 0.1 * uniform


def test_blocks_are_checkpointed_where_bits_are_not_enough_and_no_more_of_them(case):
    model, batch, options, asked = case
    found = plan_total(options, 0.6, asked, 0.0)
    assert found.noise == 0
    assert found.blocks == tuple(f"blocks.{number}" for number in range(len(found.blocks)))
    assert 0 < len(found.blocks) <= found.all_blocks == 3
    sketch_(model, found)
    assert present_blocks(model) == found.blocks
    assert measured(model, batch)[1] == found.after <= found.limit
    assert f"run twice: {len(found.blocks)} of 3 blocks: blocks.0" in str(found)
    fewer = ModelSetting({}, found.rest, found.blocks[:-1])
    assert options.meter(fewer) > found.limit
    unsketch_(model)


def test_what_cannot_be_is_refused_with_the_least_that_can(case):
    model, _, options, asked = case
    with pytest.raises(PlanError, match=r"\(\d+ bytes, .*% of the .*iB of the exact model\): got 9, which is 9 B"):
        plan_total(options, 9, asked, 1.0)
    least = plan_least(options, asked)
    found = plan_total(options, least, asked, 1.0)
    assert found.after <= least
    assert present_blocks(model) == ()


def test_the_least_is_not_above_what_bits_alone_reach():
    """Running the only block of a model again holds all of it at once, so that checkpointing it saves little."""
    torch.manual_seed(0)
    model, batch = Network(gated=True, depth=1), tokens()
    options, asked = options_for(model, batch)
    vars(options)["blocks"] = ("blocks.0",)  # as transformers tells; blocks_of takes only what is repeated
    bits = options.meter(options.with_blocks(0).with_bytes(0).setting)
    checkpointed = options.meter(options.with_blocks(1).with_bytes(0).setting)
    assert bits < checkpointed
    assert plan_least(options, asked) == bits
    found = plan_total(options, int(bits), asked, 1.0)
    assert found.after <= bits
    assert found.blocks == ()


def test_the_least_is_not_above_what_the_exact_model_takes():
    """Backward of a sketch holds what it is unpacked to, which is more than a model of one layer keeps."""
    torch.manual_seed(0)
    options, asked = options_for(nn.Linear(256, 256), torch.randn(256, 256))
    exact = options.meter(ModelSetting())
    with pytest.raises(PlanError, match=rf"\({int(exact)} bytes, 100\.0% of the "):
        plan_total(options, 9, asked, 1.0)
    assert plan_total(options, int(exact), asked, 1.0).after == exact


def test_a_model_that_keeps_nothing_has_a_plan_that_can_be_printed():
    assert str(plan(nn.Linear(8, 8), torch.randn(0, 8), kept="50%")).startswith("all kept for backward: 0 B")


def test_a_model_that_does_not_fit_is_planned_all_the_same(case, monkeypatch):
    _, _, options, asked = case
    card = int(0.75 * options.meter(ModelSetting()))
    once = StepMeter._once

    def on_a_small_card(self, total, setting, measure):
        size = once(self, total, setting, measure)
        return math.inf if total == "peak" and size > card else size

    monkeypatch.setattr(StepMeter, "_once", on_a_small_card)
    ran = iter([True])

    def too_large(*args):
        if next(ran, False):
            raise torch.OutOfMemoryError
        return record_ledger(*args)

    monkeypatch.setattr(step_options, "record_ledger", too_large)
    own = StepOptions(options.meter, options.convertible, options.base, options.storages)
    vars(own).update(measured_families=options.measured_families, masks_pay=options.masks_pay)
    with pytest.raises(PlanError, match="peak must be given in bytes: the exact model does not fit into memory"):
        plan_total(own, 0.5, asked, 1.0)
    found = plan_total(own, card, asked, 1.0)
    assert 0.98 * card <= found.after <= card
    assert found.before is None
    assert str(found).startswith("peak of a step: does not fit -> ")
    assert next(ran, None) is None  # the ledger was made on the meta device
    assert [part.layers for part in own.parts] == [part.layers for part in options.parts]
    for one, other in zip(own.parts, options.parts, strict=True):
        assert [point.bytes for point in one.points] == [point.bytes for point in other.points]


def test_all_that_is_kept_and_the_states_of_an_optimizer():
    torch.manual_seed(0)
    model, batch = Network(depth=2), tokens()
    kept, peak = measured(model, batch)
    found = plan(model, batch, kept="30%")
    assert found.kept_before == kept
    assert found.after == found.kept_after <= int(0.3 * kept)
    assert measured(sketch_(model, found), batch)[0] == found.after
    assert str(found).startswith("all kept for backward: ")
    unsketch_(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(batch).backward()
    optimizer.step()
    model.zero_grad()
    exact = measured(model, batch, optimizer=optimizer)[1]
    planned = plan(model, batch, peak=exact, optimizer="adamw")
    assert planned.after == exact == peak + states_of_all("adamw", model.parameters())
    assert (planned.noise, planned.rest, planned.blocks) == (0, None, ())
    assert "left exact by the plan" in str(summary(sketch_(model, planned)))


def test_wrong_arguments_are_refused():
    model, batch = Network(depth=1), tokens()
    limits: dict[str, Any]
    for limits in ({}, {"budget": "50%", "peak": "50%"}, {"kept": 100, "peak": 100}):
        with pytest.raises(ValueError, match="give one of budget, kept and peak, got"):
            plan(model, batch, **limits)
    with pytest.raises(ValueError, match="kept must be a share"):
        plan(model, batch, kept="much")
    with pytest.raises(ValueError, match="peak must be a share"):
        plan(model, batch, peak="much")
    with pytest.raises(ValueError, match="optimizer must be one of adamw, adamw8bit, sgd, got 'lion'"):
        plan(model, batch, peak="50%", optimizer="lion")
    with pytest.raises(ValueError, match="noise must be a number that is not negative, got -1"):
        plan(model, batch, peak="50%", noise=-1)
    with pytest.raises(ValueError, match="config must have the kind 'rows' where peak is given, got 'hash'"):
        plan(model, batch, peak="50%", config=SketchConfig(kind="hash"))
    for limit, option in (("budget", "optimizer"), ("kept", "optimizer"), ("budget", "noise")):
        limits = {limit: "50%", option: {"optimizer": "adamw", "noise": 0.5}[option]}
        with pytest.raises(ValueError, match=f"{option} must be None where {limit} is given, .* peak: got"):
            plan(model, batch, **limits)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["roberta", "gpt2", "llama", "vit"])
def test_models_of_transformers(name):
    """The limit holds, and no uniform setting of the same peak is quieter."""
    import small

    torch.manual_seed(0)
    model, batch = getattr(small, name)()
    options, asked = options_for(model, **batch)
    before = measured(model, batch)[1]
    least = plan_least(options, asked)
    for share in (0.25, 0.5, 0.75):
        limit = int(least + share * (before - least))
        found = plan_total(options, limit, asked, 1.0)
        after = measured(sketch_(model, found), batch)[1]
        unsketch_(model)
        print(
            name, share, f"{after / limit:.4f} of the limit, noise {found.noise / found.gradient:.2g}, {found.blocks}"
        )
        assert after == found.after <= limit
        if found.after < 0.98 * limit:  # then a single family of a single block is too large to be kept exactly
            configs = {layer: config for layer, config in found.configs.items() if config is not None}
            for block in options.blocks:
                for family in FAMILIES:
                    own = found.module_rests.get(block, found.rest)
                    if found.rest is not None and getattr(own, family) is not None:
                        rests = _with_bits(block, family, None, found.module_rests, found.rest)
                        kept = options.meter(ModelSetting(configs, found.rest, found.blocks, rests))
                        assert kept > limit, (block, family)
    for keep, rest in UNIFORM:
        config = SketchConfig.recommended(keep)
        limit = measured(sketch_(model, config, rest=rest), batch)[1]
        unsketch_(model)
        uniform = options.with_blocks(0).noise_of(dict.fromkeys(options.exact_layers, config), RestConfig.of(rest))
        found = plan_total(options, limit, asked, math.inf)
        print(name, keep, rest, f"noise {found.noise:.3g} against {uniform:.3g}")
        assert found.after <= limit
        assert found.noise <= uniform


def plan_least(options, asked):
    """Return the least peak that is possible."""
    with pytest.raises(PlanError) as error:
        plan_total(options, 1000, asked, 1.0)
    return int(re.findall(r"\((\d+) bytes", str(error.value))[0])


def test_neither_a_plan_of_totals_nor_fit_moves_the_users_random_numbers():
    model, batch = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.1), nn.Linear(32, 32)), torch.randn(64, 32)
    state = torch.get_rng_state()
    plan(model, batch, kept="80%")
    with pytest.raises(PlanError, match="kept must be at least"):
        plan(model, batch, kept=100)
    fit(model, batch, memory="1MiB")
    assert torch.equal(torch.get_rng_state(), state)
