"""NoiseLimit: the limit holds while noise drifts, for fewer bytes than a fixed config, and says what it does."""

import copy
import itertools
import json
import math
from statistics import mean
from typing import Any

import pytest
import torch
from artefacts import limit as page
from artefacts.artefact import RECORDS
from torch import nn

import backsketch as bs
from backsketch import NoiseLimit, NoiseMonitor, SketchConfig, SketchedLinear, noise
from backsketch.control.layer_averages import LayerAverages, levels
from backsketch.control.limit_choice import GroupChoice
from backsketch.control.valid_shares import ValidShares
from backsketch.integrations.transformers import SketchCallback
from backsketch.linear.keeping import kept_bytes
from backsketch.monitor.noise_records import add_up
from backsketch.planning.spending import Point, reach

ROWS, WIDTH = 96, 128
START = SketchConfig(ratio=1.0, bits=4)


class Attention(nn.Module):
    """Three layers that read one input, and one that reads another."""

    def __init__(self):
        super().__init__()
        self.norm, self.query, self.key, self.value = nn.LayerNorm(WIDTH), *(nn.Linear(WIDTH, 32) for _ in range(3))
        self.mixed, self.out = nn.LayerNorm(32), nn.Linear(32, 16)
        self.skips_value = False

    def forward(self, x):
        x = self.norm(x)
        product = self.query(x) * self.key(x).tanh()
        return self.out(self.mixed(product if self.skips_value else product + self.value(x)))


def make(config=START):
    torch.manual_seed(1)
    model = bs.sketch_(Attention(), config)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def batch(outlier=0.0):
    x = torch.randn(ROWS, WIDTH)
    x[:, 0] += outlier
    return x


def train(model, optimizer, steps, outlier=lambda step: 0.0):
    for step in range(steps):
        model(batch(outlier(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("limit", [0.1, 0.5])
def test_the_limit_holds_while_noise_drifts_for_fewer_bytes_than_a_fixed_config(limit):
    """An outlier that grows and fades multiplies the noise of rounding by about ten on its way."""
    model, optimizer = make()
    monitor = NoiseMonitor(model, every=2).start()
    points = list[dict[str, Any]]()
    fixed = {str(c): c for c in (SketchConfig(ratio=r / 50, bits=b) for b in (8, 4, 3, 2) for r in range(25, 51))}

    def note(records):
        averages = {name: LayerAverages() for name in controller.configs}
        for record in records:
            of_layer = averages[str(record["layer"])]
            of_layer.update(record, controller.configs[str(record["layer"])], 1)
            of_layer.shares.add(int(record["valid_rows"]) / int(record["rows"]))
        choices = [GroupChoice(group, monitor.layers, averages) for group in (("query", "key", "value"), ("out",))]
        sgd, totals = sum(choice.sgd for choice in choices), add_up(records)
        under = {name: [choice.point(config) for choice in choices] for name, config in fixed.items()}
        points.append(
            {
                "noise": totals["sketch_variance"] / totals["sgd_variance"],
                "bytes": sum(choice.point(choice.config).bytes for choice in choices),
                "exact_bytes": sum(choice.exact_bytes for choice in choices),
                "fixed": {
                    name: (sum(point.noise for point in own) / sgd, sum(point.bytes for point in own))
                    for name, own in under.items()
                },
            }
        )

    monitor.listen(note)
    controller = NoiseLimit(model, limit, 6, budget=1.0, monitor=monitor, window=3)
    train(model, optimizer, 240, lambda step: 12 * math.sin(math.pi * step / 240))
    settled = points[6:]
    average = sum(point["noise"] for point in settled) / len(settled)
    assert 0.9 * limit <= average <= 1.1 * limit
    assert len(controller.changes) > 2
    worst = max(point["noise"] for point in settled)
    cheapest = page.cheapest_fixed(settled, max, worst)
    assert cheapest is not None
    assert sum(point["bytes"] / point["exact_bytes"] for point in settled) / len(settled) <= cheapest[1]


def test_the_committed_runs_hold_their_limits_for_the_bytes_of_the_best_fixed_config():
    """Real fine-tunings: the records behind experiments/rendered/limit.md.

    The time average is within a tenth of the limit, for at most the bytes of the fixed configs that would have been
    best in hindsight, for the same mean and for the same worst noise. One run misses that, as the page says.
    """
    records = [record for record in page.ARTEFACT.records(RECORDS) if record["settings"]["limit"] is not None]
    assert len(records) > 1
    for record in records:
        settings, points = record["settings"], page.settled(record["results"])
        average, worst = mean(point["noise"] for point in points), max(point["noise"] for point in points)
        assert 0.9 * settings["limit"] <= average <= 1.1 * settings["limit"]
        kept = mean(point["bytes"] / point["exact_bytes"] for point in points)
        most = 1.05 if (settings["task"], settings["limit"]) == ("CoLA", 0.03) else 1.0
        for summary, noise_of_run in ((mean, average), (max, worst)):
            cheapest = page.cheapest_fixed(points, summary, noise_of_run)
            assert cheapest is not None
            assert kept <= most * cheapest[1]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("rotate", [False, True])
def test_the_noise_of_another_config_is_known_from_that_of_the_present_one(rotate, padded):
    present = SketchConfig(ratio=0.8, bits=3, rotate=rotate)
    layer = SketchedLinear(160, 8, config=present)
    x, y = torch.randn(64, 160) + 0.5, torch.randn(64, 8)
    valid = torch.arange(64) < 48 if padded else torch.ones(64, dtype=torch.bool)
    y = y * valid.unsqueeze(1)
    averages = LayerAverages()
    with NoiseMonitor(layer, exact=True) as monitor, bs.valid_rows(valid):
        layer(x).backward(y)
    averages.update(monitor.to_records()[0], present, 10)
    averages.shares.add(48 / 64 if padded else 1.0)
    for bits, ratio in itertools.product((8, 4, 3, 2), (1.0, 0.6, 0.1)):
        config = SketchConfig(ratio=ratio, bits=bits, rotate=rotate)
        exact = float(noise.sketch_variance(x, y, config, valid))
        assert averages.added(config) == pytest.approx(exact, rel=0.03), config


def test_layers_that_read_one_input_keep_one_sketch_of_it_and_bytes_are_those_held():
    model, optimizer = make()
    with NoiseLimit(model, 0.3, 4, monitor=NoiseMonitor(model).start()) as controller:
        train(model, optimizer, 8)
        held = controller.kept_bytes
    configs = controller.configs
    assert configs["query"] == configs["key"] == configs["value"] != START
    x = batch().requires_grad_()
    with bs.saved_memory(model) as sketched:
        kept = model(x)
    exact = bs.unsketch_(model)
    with bs.saved_memory(exact) as whole:
        plain = exact(x)
    inputs = 4 * ROWS * (WIDTH + 32)
    assert whole.activations - sketched.activations == inputs - held
    del kept, plain


def test_a_budget_is_kept_and_a_limit_that_it_does_not_allow_is_reported():
    model, optimizer = make(SketchConfig(ratio=1.0, bits=2))
    seen = list[bs.LimitChange]()
    controller = NoiseLimit(model, 0.001, 4, monitor=NoiseMonitor(model).start(), callback=seen.append)
    train(model, optimizer, 12)
    assert controller.kept_bytes <= ROWS * (WIDTH + 32) // 4 + ROWS * 8 + 16  # codes, ranges and seeds of 2 bits
    assert "the budget does not allow the limit" in str(controller)
    assert seen == controller.changes
    assert all("which the budget does not allow" in change.reason for change in seen)
    controller.stop()
    wide, optimizer = make(SketchConfig(ratio=1.0, bits=2))
    roomy = NoiseLimit(wide, 0.001, 4, budget="50%", monitor=NoiseMonitor(wide).start())
    train(wide, optimizer, 12)
    assert roomy.noise is not None
    assert roomy.noise <= 0.001
    assert "above the limit" in str(roomy.changes[0])
    roomy.stop()


def test_it_changes_at_most_every_so_often_and_not_without_need():
    model, optimizer = make()
    with NoiseLimit(model, 0.1, 10, monitor=NoiseMonitor(model).start()) as controller:
        train(model, optimizer, 60, lambda step: 12 * (step % 2))
    steps = [change.step for change in controller.changes]
    assert all(later - earlier >= 10 for earlier, later in itertools.pairwise(steps))
    model, optimizer = make()
    with NoiseLimit(model, 0.1, 5, monitor=NoiseMonitor(model).start()) as controller:
        train(model, optimizer, 60)
    assert len(controller.changes) == 1  # the noise does not drift


def test_what_is_not_finite_is_left_out():
    model, optimizer = make()
    with NoiseLimit(model, 0.1, 2, monitor=NoiseMonitor(model).start()) as controller:
        train(model, optimizer, 3)
        before = controller.noise
        (model(batch()).sum() * math.nan).backward()
        optimizer.zero_grad()
        optimizer.step()
        assert controller.noise == before
        train(model, optimizer, 4)
    assert controller.noise is not None
    assert controller.noise <= 0.1


def test_an_integer_budget_is_of_one_backward_however_many_a_step_has():
    """Micro-batches of gradient accumulation are not held at one time; calls of one forward are."""
    budget = ROWS * 8 * 8
    model, optimizer = make()
    with NoiseLimit(model, 1e-4, 4, budget=budget, monitor=NoiseMonitor(model).start()) as controller:
        for _ in range(6):
            for _ in range(2):
                model(batch()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert 0.8 * budget < controller.kept_bytes <= budget
        accumulated = controller.kept_bytes
    x = batch().requires_grad_()
    with bs.saved_memory(model) as sketched:
        kept = model(x)
    with bs.saved_memory(exact := bs.unsketch_(model)) as whole:
        plain = exact(x)
    assert whole.activations - sketched.activations == 4 * ROWS * (WIDTH + 32) - accumulated
    del kept, plain

    layer = bs.sketch_(nn.Sequential(nn.Linear(WIDTH, WIDTH)), START)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    with NoiseLimit(layer, 1e-4, 4, budget=budget, monitor=NoiseMonitor(layer).start()) as controller:
        for _ in range(6):
            layer(layer(batch()).relu()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert controller.monitor.to_records()[0]["held_calls"] == 2
        once = controller.configs["0"]
        assert controller.kept_bytes == pytest.approx(2 * kept_bytes(once, ROWS, WIDTH, 4), abs=1)
        assert controller.kept_bytes <= budget


def test_layers_that_are_unsketched_are_left_alone():
    model, optimizer = make()
    with NoiseLimit(model, 0.3, 2, monitor=NoiseMonitor(model).start()) as controller:
        train(model, optimizer, 3)
        bs.unsketch_(model.key)
        bs.unsketch_(model.out)
        outside, controller.limit = controller.kept_bytes, 0.03
        train(model, optimizer, 6)
        assert set(controller.configs) == {"query", "value"}
        assert controller.changes[-1].step > 3
        assert type(model.out) is nn.Linear
        assert "config" not in model.out.__dict__
        assert "query" in controller.changes[-1].configs
        assert outside > 0
        saved = json.loads(json.dumps(controller.state_dict()))
        again, _ = make()
        bs.unsketch_(again.key)
        bs.unsketch_(again.out)
        resumed = NoiseLimit(again, 0.03, 2, monitor=NoiseMonitor(again))
        resumed.load_state_dict(saved)
        assert resumed.configs == controller.configs
        assert resumed.groups == controller.groups == [("query", "value")]
        assert resumed.state_dict() == saved
        resumed.stop()
        bs.sketch_(model.query, SketchConfig(kind="gaussian"))
        with pytest.raises(ValueError, match="got query with"):
            train(model, optimizer, 6)


def test_layers_that_keep_their_input_as_it_is_are_left_alone():
    """Plans choose that where they have room for it."""
    model, optimizer = make()
    bs.sketch_(model.out, SketchConfig(ratio=1.0))
    with NoiseLimit(model, 0.3, 2, monitor=NoiseMonitor(model).start()) as controller:
        train(model, optimizer, 6)
        assert set(controller.configs) == {"query", "key", "value"}
        assert controller.changes
        assert model.out.config == SketchConfig(ratio=1.0)
    model, optimizer = make(SketchConfig(ratio=1.0))
    with NoiseLimit(model, 0.3, 2, monitor=NoiseMonitor(model).start()) as controller:
        train(model, optimizer, 6)
        assert (controller.changes, controller.noise, controller.kept_bytes) == ([], None, 0)


def test_layers_that_first_run_later_keep_one_sketch_with_their_siblings():
    model, optimizer = make()
    model.skips_value = True
    with NoiseLimit(model, 0.3, 3, monitor=NoiseMonitor(model, every=1).start()) as controller:
        train(model, optimizer, 6)
        assert controller.configs["query"] != controller.configs["value"] == START
        model.skips_value = False
        train(model, optimizer, 6)
        assert set(controller.groups) == {("query", "key", "value"), ("out",)}
        assert len({controller.configs[name] for name in ("query", "key", "value")}) == 1
        resumed = NoiseLimit(model, 0.3, 3, monitor=NoiseMonitor(model, every=1))
        resumed.load_state_dict(controller.state_dict())
        assert resumed.groups == controller.groups
        resumed.stop()


def test_batches_that_are_not_measured_tell_how_much_padding_there_is():
    """Each tenth step is measured, and those have half of their rows padded; others have none."""
    model, optimizer = make()
    with NoiseLimit(model, 0.3, 10, budget=1.0) as controller:
        for step in range(41):
            valid = torch.arange(ROWS) < (ROWS if step % 10 else ROWS // 2)
            with bs.valid_rows(valid):
                model(batch())[valid].square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        state = controller.state_dict()["averages"]["query"]
    averages = LayerAverages.of(state)
    assert averages.shares.known == [(0.5, 5.0), (1.0, 36.0)]
    assert averages.growths(ROWS) == (1.0, 1.0)
    mean_growth, most_growth = averages.growths(ROWS // 2)
    assert mean_growth == pytest.approx(1 * 5 / 41 + 2 * 36 / 41)
    assert most_growth == 2.0
    config = controller.configs["query"]
    grown, most = averages.growths(config.dim_for(ROWS))
    assert averages.added(config, 2.0) == pytest.approx(
        (grown + 2 * most - 3) * averages.sgd + (grown + 2 * most) * averages.unit / levels(config) ** 2
    )


def test_shares_of_valid_rows_have_one_size_and_are_forgotten():
    shares = ValidShares()
    assert shares.high == 1.0
    for share in (0.2, 0.4, 0.4, 0.6):
        shares.add(share)
    assert shares.high == pytest.approx(0.4 + 2.5 * math.sqrt(0.02))
    assert ValidShares.of(shares.as_list()) == shares
    size = len(shares.as_list())
    for _ in range(3000):
        shares.add(0.9)
    assert len(shares.as_list()) == size
    ((only, _),) = shares.known
    assert only == pytest.approx(0.9)
    assert shares.high == pytest.approx(0.9)
    assert sum(shares.counts) <= 1024


def test_a_resumed_run_is_the_same_bit_for_bit():
    def start():
        model, optimizer = make()
        return model, optimizer, NoiseLimit(model, 0.1, 5, monitor=NoiseMonitor(model, every=2))

    def growing(begin):
        return lambda step: (begin + step) / 4

    straight = start()
    torch.manual_seed(2)
    train(straight[0], straight[1], 41, growing(0))
    first = start()
    torch.manual_seed(2)
    train(first[0], first[1], 17, growing(0))
    saved = json.loads(json.dumps(first[2].state_dict()))
    states, random = copy.deepcopy((first[0].state_dict(), first[1].state_dict())), torch.get_rng_state()
    second = start()
    second[0].load_state_dict(states[0])
    second[1].load_state_dict(states[1])
    second[2].load_state_dict(saved)
    torch.set_rng_state(random)
    train(second[0], second[1], 24, growing(17))
    assert second[2].state_dict() == straight[2].state_dict()
    assert second[2].changes == straight[2].changes
    assert any(change.step > 17 for change in straight[2].changes)
    for one, other in zip(straight[0].parameters(), second[0].parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore")  # those of the compiler itself
def test_compiled_layers_are_named_as_not_observed():
    model, optimizer = make()
    compiled: Any = torch.compile(model, backend="aot_eager")
    with NoiseMonitor(model) as monitor:
        compiled(batch()).square().mean().backward()
        optimizer.step()
    assert set(monitor.unseen) == {"query", "key", "value", "out"}
    assert "without layers inside torch.compile or torch.func, which it cannot observe" in str(monitor)
    controller = NoiseLimit(model, 0.1)
    compiled(batch()).square().mean().backward()
    with pytest.raises(RuntimeError, match=r"cannot observe layers inside torch\.compile or torch\.func, as query"):
        optimizer.step()
    controller.stop()


def test_bad_input_is_named():
    model, _ = make()
    for wrong in (0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=r"^limit must be a positive number"):
            NoiseLimit(model, wrong)
        with pytest.raises(ValueError, match=r"^noise_limit must be a positive number"):
            SketchCallback(noise_limit=wrong)
    with pytest.raises(TypeError, match=r"^noise_limit must be a positive number"):
        SketchCallback(noise_limit=True)
    with pytest.raises(ValueError, match="worst must be a number of at least 1, got 0"):
        NoiseLimit(model, 0.1, worst=0)
    for config in (SketchConfig(ratio=0.5), SketchConfig(kind="gaussian", bits=4), SketchConfig(bits=4, center=True)):
        with pytest.raises(ValueError, match=r"kind='rows' with bits and ratio, got query with \("):
            NoiseLimit(make(config)[0])
    other = bs.sketch_(nn.Linear(WIDTH, 8), START)
    state = NoiseLimit(other, 0.1).state_dict()
    with pytest.raises(ValueError, match="the same sketched layers, but differs in"):
        NoiseLimit(model, 0.1).load_state_dict(state)


def test_the_least_bytes_for_a_noise_are_nearly_those_of_an_exhaustive_search():
    torch.manual_seed(3)
    for _ in range(30):
        sizes, noises = torch.randint(1, 50, (3, 5)).tolist(), torch.rand(3, 5).tolist()
        items = [
            [Point(index, size, value) for index, (size, value) in enumerate(zip(*row, strict=True))]
            for row in zip(sizes, noises, strict=True)
        ]
        target = sum(min(row) for row in noises) * 1.5
        chosen = reach(items, target)
        every = [each for each in itertools.product(*items) if sum(point.noise for point in each) <= target]
        least = min(sum(point.bytes for point in each) for each in every)
        assert sum(point.noise for point in chosen) <= target
        assert least <= sum(point.bytes for point in chosen) <= least + 50
    quietest = reach(items, 0.0)
    assert [point.noise for point in quietest] == [min(row) for row in noises]
