"""fit: what it foretells of a step is what a real step then measures."""

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import backsketch as bs
from backsketch import peak_memory, saved_memory
from backsketch.fitting.batches import ResizableBatch
from backsketch.fitting.fit_table import as_text, table_of
from backsketch.fitting.fitter import fit
from backsketch.fitting.growth import Growth, largest
from backsketch.fitting.meta_copy import meta_copy
from backsketch.fitting.rank_share import Around, RankShare
from backsketch.fitting.segment import FORWARD, Segment
from backsketch.fitting.subject import Subject, WaySteps
from backsketch.fitting.timeline import Timeline
from backsketch.fitting.ways import ALL, EXACT, SOME, ways_for
from backsketch.memory.optimizer_states import OPTIMIZERS, states_of, states_of_all
from cases import needs_shown_saves
from small import gpt2, llama, roberta, vit, without_dropout

pytestmark = needs_shown_saves


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


def test_ranks_share_the_model_and_hold_what_they_gather_and_reduce():
    model, batch = without_dropout(llama, num_hidden_layers=6)
    own, blocks = meta_copy(model), bs.blocks_of(model)
    subject = Subject(own, blocks, ResizableBatch.of(((), batch)).sized, None)
    step = WaySteps(subject, EXACT, few=False).at(4, 32, 0)
    one, four = (RankShare.of(own, blocks, "adamw", ranks) for ranks in (1, 4))
    assert four.weights == pytest.approx(one.weights / 4, rel=0.05)
    assert four.gradients * 4 == one.gradients
    assert four.states == pytest.approx(one.states / 4, rel=0.05)
    sizes = [sum(p.nbytes for p in model.get_submodule(name).parameters()) for name in blocks]
    root, block = sum(p.nbytes for p in model.parameters()) - sum(sizes), sizes[0]
    assert four.around("before", None).inside == 2 * root
    assert four.around("forward", 0) == Around(2 * root + block, root + 2 * block, root + 2 * block, root + block)
    assert four.around("backward", 5) == Around(root + 2 * block, *[root + 2 * block] * 3)
    assert four.around("backward", 2) == Around(root + 3 * block, root + 3 * block, root + 2 * block, root + 2 * block)
    assert four.around("backward", 0) == Around(root + 3 * block, root + 2 * block, root + block, root + block)
    assert one.around("backward", 2) == Around(0, 0, 0, 0)
    parts = step.peak(four).parts
    assert root < parts["gathered"] <= root + 3 * block
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
    assert str(tight).endswith("\n  import backsketch as bs\n  " + "; ".join(tight.best.code))
    assert "leave about a tenth of the card" in str(tight)
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


def test_measured_times_are_compared_with_each_other():
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
    found = fit(model, torch.randn(32, 64), memory="1MiB")
    for seconds, best, times in (
        ((3.0, 2.0, 1.0), 2, ("1.00", "0.67", "0.33")),
        ((3.0, None, 4.0), 0, ("1.00", "-", "1.33")),
        ((None, 2.0, 1.0), 2, ("-", "1.00", "0.50")),  # exact training ran out of memory
    ):
        rows = (dataclasses.replace(row, measured_seconds=s) for row, s in zip(found.rows, seconds, strict=True))
        measured = dataclasses.replace(found, rows=tuple(rows))
        assert measured.best is measured.rows[best]
        assert tuple(row[-3] for row in table_of(measured, 120).rows) == times
        whose = "linear sketches" if seconds[0] is None else "exact training"
        assert f"measured on this machine, as a multiple of {whose}" in " ".join(str(measured).split())


def test_no_more_blocks_are_checkpointed_than_it_takes():
    model, batch = without_dropout(roberta, num_hidden_layers=9)
    batch = larger(batch, 64)
    peaks = {row.way: row.peak.total for row in fit(model, **batch, memory="1GiB").rows}
    limit = peaks["sketches and rest"] - 1
    row = fit(model, **batch, memory=limit).rows[-1]
    assert row.checkpointed == (3, 9)
    assert row.peak.total <= limit


def test_channels_are_no_length():
    model = nn.Sequential(nn.Conv1d(8, 16, 3), nn.GELU(), nn.Conv1d(16, 4, 3))
    found = fit(model, torch.randn(4, 8, 32), memory="1MiB")
    assert (found.length, found.rows[0].largest_length) == (None, None)
    assert found.rows[0].largest_batch > 4


def test_a_step_that_needs_values_is_refused_in_words():
    class Reads(nn.Linear):
        def forward(self, x):
            return super().forward(x) * x.max().item()

    with pytest.raises(RuntimeError, match=r"a step of Reads with batch 2 failed on the meta device.* profile and"):
        fit(Reads(4, 4), torch.randn(2, 4), memory="1GiB")


def test_products_of_two_types_are_refused():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"parameters are float32 in 0\.weight and 1 more; bfloat16 in 1\."):
        fit(model, torch.randn(2, 8), memory="1GiB")
    norm = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8, dtype=torch.bfloat16))
    assert fit(norm, torch.randn(2, 8), memory="1GiB").best is not None


class Mixed(nn.Module):
    """A layer that takes what another makes in fp32, as it is or cast to its own type."""

    def __init__(self, last, cast=False):
        super().__init__()
        self.first, self.last, self.cast = nn.Linear(8, 8), last, cast

    def forward(self, x):
        hidden = self.first(x)
        return self.last(hidden.bfloat16() if self.cast else hidden)


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, dtype=torch.bfloat16))

    def forward(self, x):
        return x @ self.weight


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Conv1d(4, 4, 3, dtype=torch.bfloat16),
        lambda: nn.PReLU(dtype=torch.bfloat16),
        Weighted,
        lambda: nn.MultiheadAttention(8, 2, dtype=torch.bfloat16),
    ],
)
def test_other_operations_that_take_no_two_types_are_refused_too(make):
    class Calls(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = make()

        def forward(self, x):
            return self.inner(x, x, x)[0] if isinstance(self.inner, nn.MultiheadAttention) else self.inner(x)

    x = torch.randn(2, 4, 8)
    with pytest.raises(RuntimeError):  # as a real step does
        Mixed(Calls())(x)
    with pytest.raises(ValueError, match=r"model must multiply tensors of one type or cast them.* bfloat16 in last"):
        fit(Mixed(Calls()), x, memory="1GiB")
    assert fit(Mixed(Calls(), cast=True), x, memory="1GiB").best is not None


def test_tensors_of_a_model_that_casts_count_in_their_own_types():
    """Norms in fp32 between layers in bf16, as libraries do for precision."""

    class Precise(nn.LayerNorm):
        def forward(self, x):
            return super().forward(x.float()).to(x.dtype)

    model = nn.Sequential(nn.Linear(64, 64), nn.Identity(), nn.GELU(), nn.Linear(64, 8)).bfloat16()
    model[1] = Precise(64)
    x = torch.randn(32, 64).bfloat16()
    row = fit(model, x, memory="1MiB").rows[0]
    weights = 2 * (64 * 64 + 64 + 64 * 8 + 8) + 4 * 128
    assert (row.weights, row.gradients, row.states) == (weights, weights, 2 * weights + 4 * 6)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(x).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    with peak_memory(model, optimizer) as peak, saved_memory(model) as saved:
        loss = model(x).mean()
        kept = saved.activations
        loss.backward()
        del loss
        optimizer.step()
    assert row.activations == kept
    assert row.peak.total == pytest.approx(peak.total, rel=0.02)


class Attending(nn.Linear):
    """One projection to q, k and v, and what ``attend`` makes of them."""

    def __init__(self, attend, width=96):
        super().__init__(32, width)
        self.attend = attend

    def forward(self, x):
        return self.attend(*super().forward(x).chunk(3, -1))


def in_heads(x, heads=4):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def with_a_boolean_mask(q, k, v):
    mask = torch.ones(len(q[0]), len(q[0]), dtype=torch.bool, device=q.device).tril()
    return F.scaled_dot_product_attention(in_heads(q), in_heads(k), in_heads(v), attn_mask=mask)


def by_name(q, k, v):
    return F.scaled_dot_product_attention(query=in_heads(q), key=in_heads(k), value=in_heads(v))


ATTENTION = {
    "a boolean mask": lambda: Attending(with_a_boolean_mask),
    "by name": lambda: Attending(by_name),
    "without heads": lambda: Attending(F.scaled_dot_product_attention),
    "MultiheadAttention": lambda: nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_keeps_what_is_foretold_however_it_is_called(name):
    model, x = ATTENTION[name](), torch.randn(2, 8, 32)
    row = fit(model, x, memory="1MiB").rows[0]
    with saved_memory(model) as saved:
        loss = model(x).mean()
    assert row.activations == saved.activations
    assert loss.requires_grad


def test_values_may_have_another_width_than_queries():
    def attend(q, k, v):
        return F.scaled_dot_product_attention(in_heads(q), in_heads(k), in_heads(v)[..., :4]).transpose(1, 2).flatten(2)

    model = nn.Sequential(Attending(attend), nn.Linear(4 * 4, 8))
    assert fit(model, torch.randn(2, 8, 32), memory="1MiB").rows[0].largest_batch > 2


def test_dropout_of_multihead_attention_keeps_a_byte_a_value():
    class Weighing(nn.MultiheadAttention):
        def forward(self, x):  # type: ignore[override]
            return super().forward(x, x, x, need_weights=True)[0]

    without, with_mask = (
        fit(Weighing(32, 4, dropout=p, batch_first=True), torch.randn(2, 8, 32), memory="1MiB").rows[0].activations
        for p in (0.0, 0.5)
    )
    probabilities = 2 * 4 * 8 * 8
    assert with_mask - without == probabilities * (1 + 4)  # the mask, and what it leaves, which the product reads


MODELS_WITHOUT_LINEAR_LAYERS = {
    "conv1d": (lambda: nn.Conv1d(4, 8, 3), lambda: torch.randn(2, 4, 32)),
    "conv2d": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), lambda: torch.randn(2, 3, 16, 16)),
    "embedding": (lambda: nn.Embedding(10, 8), lambda: torch.randint(10, (2, 7))),
    "norm": (lambda: nn.LayerNorm(8), lambda: torch.randn(2, 8)),
}


@pytest.mark.parametrize("name", MODELS_WITHOUT_LINEAR_LAYERS)
def test_a_model_without_linear_layers_keeps_what_is_foretold(name):
    make, draw = MODELS_WITHOUT_LINEAR_LAYERS[name]
    model, x = make(), draw()
    row = fit(model, x, memory="1MiB").rows[0]
    with saved_memory(model) as saved:
        loss = model(x).mean()
    assert row.activations == saved.activations
    assert loss.requires_grad
    assert row.largest_batch > 2


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_refused_as_their_libraries_alone_know_what_they_keep(kind):
    with pytest.raises(ValueError, match=f"model must have no nn.RNN.* got {kind.__name__} in 0 and 1 more: peak_mem"):
        fit(nn.Sequential(kind(8, 8), kind(8, 8)), torch.randn(2, 4, 8), memory="1GiB")
    with pytest.raises(ValueError, match=f"got {kind.__name__} in the model itself: peak_memory"):
        fit(kind(8, 8), torch.randn(2, 4, 8), memory="1GiB")


def test_a_batch_without_examples_is_refused():
    with pytest.raises(ValueError, match=r"the batch must hold at least one example, got none in \(0, 8\)"):
        fit(nn.Linear(8, 8), torch.randn(0, 8), memory="1MiB")


def test_adapters_need_linear_layers():
    pytest.importorskip("peft")
    with pytest.raises(ValueError, match="lora must be None for a model without linear layers that peft adapts, got 4"):
        fit(nn.Conv1d(8, 8, 3), torch.randn(2, 8, 9), memory="1GiB", lora=4)


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

            best = largest(measure, limit, sizes=(4, 12), most=2**20, predict=predict, trusted=lambda: False)
            assert best == max((size for size in range(2000) if 10 * size + size // 7 <= limit), default=0)
            assert len(asked) < 40


def test_steps_that_have_the_same_events_foretell_where_the_first_ones_do_not():
    """A step of one example often has other events than those of more."""

    def step(size):
        changes, roles = ([100.0], [3]) if size == 1 else ([10.0 * size, 3.0], [3, 4])
        return Timeline.of([Segment(FORWARD, 0, torch.tensor(changes).double(), torch.tensor(roles), (None,) * 2, 1)])

    growth = Growth((1, 3), step, RankShare.of(nn.Module(), (), "sgd", 1))
    assert (growth.measured(1), growth.measured(3)) == (100, 33)
    assert not growth.foreseeable
    assert growth.measured(10) == 103
    assert growth.foreseeable
    assert growth.peak(7) == 73


def steps_of_fit(monkeypatch, model, batch, **options):
    """Return what fit finds, and the batch and the length of every step that it runs."""
    asked = []
    step = Subject.step

    def noted(self, own, blocks, size, length, kernels=False):
        asked.append((len(blocks), size, length))
        return step(self, own, blocks, size, length, kernels)

    monkeypatch.setattr(Subject, "step", noted)
    return fit(model, **batch, **options), asked


def test_steps_that_decide_nothing_are_not_run(monkeypatch):
    """Steps are what fit takes its time for: 36 for a model of eight billion weights, whose 32 blocks run once."""
    model, batch = without_dropout(llama, num_hidden_layers=9, max_position_embeddings=32)
    found, asked = steps_of_fit(monkeypatch, model, batch, memory="1GiB")
    assert all(row.largest_length == 32 for row in found.rows)
    assert {length for _, _, length in asked} == {32}  # the longest there is fits
    assert [blocks for blocks, _, _ in asked].count(9) == 1
    assert len(asked) <= 30, asked
    one = {name: tensor[:1] for name, tensor in batch.items()}
    found, asked = steps_of_fit(monkeypatch, model, one, memory="1MiB")
    assert all(row.largest_batch == 0 for row in found.rows)
    assert {size for _, size, _ in asked} == {1}  # no larger one is tried


def test_sizes_that_are_cut_off_are_said_to_be():
    model = nn.Sequential(nn.Linear(8, 8))
    found = fit(model, torch.randn(2, 8), memory="900TiB")
    assert "1048576+" in str(found)
    assert "+ and more: larger ones were not tried." in str(found)
    small = fit(model, torch.randn(2, 8), memory=100)
    assert "+" not in str(small).split("What would help")[0].replace("+rest", "")
    assert "take 1.1 KiB on one card" in " ".join(str(small).split())
