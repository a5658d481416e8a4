"""fit: what it foretells of a step is what a real step then measures."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

import backsketch as bs
from backsketch import peak_memory, saved_memory
from backsketch.fitting.batches import ResizableBatch
from backsketch.fitting.fit_table import as_text
from backsketch.fitting.fitter import fit
from backsketch.fitting.growth import largest
from backsketch.fitting.meta_copy import meta_copy
from backsketch.fitting.rank_share import RankShare
from backsketch.fitting.subject import Subject, WaySteps
from backsketch.fitting.ways import ALL, EXACT, SOME, ways_for
from backsketch.memory.optimizer_states import OPTIMIZERS, states_of, states_of_all
from cases import needs_shown_saves
from small import gpt2, llama, roberta, vit

pytestmark = needs_shown_saves
UNDROPPED = (
    "attention_probs_dropout_prob",
    "hidden_dropout_prob",
    "attn_pdrop",
    "resid_pdrop",
    "embd_pdrop",
    "summary_first_dropout",
)


def without_dropout(make, **options):
    """Make a model of widths that fill groups of 128 values, as those of real models do."""
    model, batch = make(**options)
    for name in UNDROPPED:
        setattr(model.config, name, 0.0)
    for name, width in (("hidden_size", 128), ("n_embd", 128), ("intermediate_size", 256), ("head_dim", 32)):
        if isinstance(model.config.__dict__.get(name), int):
            setattr(model.config, name, width)
    model.config._attn_implementation, model.config.use_cache = "sdpa", False
    return type(model)(model.config), batch


def one_step(model, optimizer, batch):
    """Run the second step of a training, and return what it keeps for backward, and its peak."""
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with peak_memory(model, optimizer) as peak, saved_memory(model) as saved:
        loss = model(**batch).loss
        kept = saved.activations
        loss.backward()
        del loss
        optimizer.step()
    optimizer.zero_grad()
    return kept, peak.total


def converted(model, row):
    """Run the Python that a row tells to paste."""
    own = copy.deepcopy(model)
    for line in row.code:
        exec(line, {"bs": bs, "model": own})
    return own


def larger(batch, count):
    return {name: tensor[torch.arange(count) % len(tensor)] for name, tensor in batch.items()}


@pytest.mark.parametrize("make", [roberta, gpt2, llama, vit])
def test_a_real_step_measures_what_is_foretold(make, monkeypatch):
    monkeypatch.setattr("backsketch.storage.cpu_kernel._LEAST_VALUES", 1)  # fused, as on meta
    torch.manual_seed(0)
    model, batch = without_dropout(make)
    found = fit(model, **batch, memory="12MiB")
    for row in found.rows:
        if row.way not in ("exact", "checkpointing", "sketches and rest"):
            continue
        own = converted(model, row)
        optimizer = torch.optim.AdamW(own.parameters(), fused=True)
        kept, peak = one_step(own, optimizer, batch)
        assert row.activations == kept, row.way
        assert row.peak.total == pytest.approx(peak, rel=0.02), row.way
        assert one_step(own, optimizer, larger(batch, row.largest_batch))[1] <= found.memory, row.way
        more = larger(batch, -int(-1.15 * row.largest_batch // 1))
        assert one_step(own, optimizer, more)[1] > found.memory, row.way


@pytest.mark.parametrize("make", [roberta, llama])
def test_few_blocks_stand_for_all_to_the_byte(make):
    model, batch = without_dropout(make, num_hidden_layers=9)
    own, blocks = meta_copy(model), bs.blocks_of(model)
    subject = Subject(own, blocks, ResizableBatch.of(((), batch)).sized, None)
    shares = [RankShare.of(own, blocks, "adamw", ranks) for ranks in (1, 4)]
    for way in ways_for(own, True):
        checkpointed = {ALL: len(blocks), SOME: 5}.get(way.checkpointed, 0)
        few, whole = (WaySteps(subject, way, few=each).at(4, 32, checkpointed, kernels=True) for each in (True, False))
        assert few.in_order
        assert few.kept == whole.kept
        assert few.kernels == whole.kernels
        for share in shares:
            assert few.peak(share).parts == whole.peak(share).parts


def test_states_are_those_of_the_optimisers():
    model = nn.Sequential(nn.Linear(100, 70), nn.Linear(70, 3, dtype=torch.bfloat16))
    for name, make in (("adamw", lambda p: torch.optim.AdamW(p, fused=True)), ("sgd", torch.optim.SGD)):
        optimizer = make(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        real = sum(t.nbytes for state in optimizer.state.values() for t in state.values() if t is not None)
        assert states_of_all(name, model.parameters()) == real
    assert states_of("adamw8bit", (4096, 256), torch.bfloat16) == 2 * 4096 * 256 * (1 + 4 / 256)
    assert states_of("adamw8bit", (100,), torch.bfloat16) == 2 * 100 * 4


def test_ranks_share_the_model_and_gather_two_blocks():
    model, batch = without_dropout(llama, num_hidden_layers=6)
    own, blocks = meta_copy(model), bs.blocks_of(model)
    subject = Subject(own, blocks, ResizableBatch.of(((), batch)).sized, None)
    step = WaySteps(subject, EXACT, few=False).at(4, 32, 0)
    one, four = (RankShare.of(own, blocks, "adamw", ranks) for ranks in (1, 4))
    assert four.weights == pytest.approx(one.weights / 4, rel=0.05)
    assert four.gradients * 4 == one.gradients
    assert four.states == pytest.approx(one.states / 4, rel=0.05)
    sizes = [sum(p.nbytes for p in model.get_submodule(name).parameters()) for name in blocks]
    root = sum(p.nbytes for p in model.parameters()) - sum(sizes)
    assert four.gathered("forward", 2) == four.gathered("backward", 2) == root + 2 * sizes[0]
    assert four.gathered("backward", 0) == root + sizes[0]
    parts = step.peak(four).parts
    assert root < parts["gathered"] <= root + 2 * sizes[0]
    assert parts["gradients"] <= one.gradients
    assert step.peak(four).total < step.peak(one).total


def test_the_model_stays_and_the_answer_comes_first_and_the_best_way_last():
    model, batch = without_dropout(llama)
    bs.sketch_(model)
    before = {name: type(module) for name, module in model.named_modules()}
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    wide = fit(model, **batch, memory="1GiB")
    assert before == {name: type(module) for name, module in model.named_modules()}
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert wide.headline.startswith("It fits: ")
    assert wide.best is wide.rows[0]
    peaks = sorted(row.peak.total for row in wide.rows)
    tight = dataclasses.replace(wide, memory=peaks[0])
    assert tight.headline.startswith("It does not fit as it is: ")
    assert tight.best is not None
    assert tight.best.peak.total == peaks[0]
    assert str(tight).endswith("; ".join(tight.best.code))
    none = dataclasses.replace(wide, memory=peaks[0] // 2)
    assert none.best is None
    assert "Nothing here fits" in none.headline
    assert "What would help:" in str(none)
    for found in (wide, tight, none):
        for columns in (80, 120):
            text = as_text(found, columns)
            assert text.startswith(found.headline[:40])
            code = "; ".join(found.best.code) if found.best else ""
            assert not [line for line in text.splitlines() if len(line) > columns and line.strip() != code]


def test_any_model_and_loss():
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
    found = fit(model, torch.randn(32, 64), memory="1MiB", optimizer="sgd", loss=lambda out: out.square().sum())
    assert [row.way for row in found.rows] == ["exact", "linear sketches", "sketches and rest"]
    assert found.length is None
    assert all(row.largest_length is None for row in found.rows)
    size = found.rows[0].largest_batch
    with peak_memory(model) as peak:
        model(torch.randn(size, 64)).square().sum().backward()
    assert peak.total <= 2**20
    model.zero_grad()
    with peak_memory(model) as peak:
        model(torch.randn(size + 1, 64)).square().sum().backward()
    assert peak.total > 2**20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": "big"}, "memory must be a size"),
        ({"memory": 0.5}, "memory must be a size"),
        ({"memory": "50%"}, "memory must be a size"),
        ({"optimizer": "adam"}, f"optimizer must be one of {', '.join(OPTIMIZERS)}, got 'adam'"),
        ({"ranks": 0}, "ranks must be a positive integer, got 0"),
        ({"wish": "luck"}, "wish must be one of"),
    ],
)
def test_mistakes_are_told_in_words(options, message):
    with pytest.raises(ValueError, match=message):
        fit(nn.Linear(2, 2), torch.randn(2, 2), **({"memory": "1GiB"} | options))


def test_a_length_over_the_positions_is_refused():
    model, _ = without_dropout(gpt2)
    with pytest.raises(ValueError, match="length must be at most 32"):
        fit(model, input_ids=torch.zeros(1, 33, dtype=torch.long), memory="1GiB")


def test_the_largest_size_is_found_whatever_is_foretold():
    for limit in (5, 99, 1000, 12345):
        for predict in (None, lambda size: 10 * size, lambda size: 9.5 * size, lambda size: 1.0 * size):
            asked: list[int] = []

            def measure(size, asked=asked):
                asked.append(size)
                return 10 * size + size // 7

            best = largest(measure, limit, start=4, most=2**20, predict=predict, exact=False)
            assert best == max((size for size in range(2000) if 10 * size + size // 7 <= limit), default=0)
            assert len(asked) < 40
