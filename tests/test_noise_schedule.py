"""NoiseSchedule: the noise level of exact training, never above the user's rate, beside any other scheduler."""

import copy
import json
import math
from typing import Any

import noise_quadratic
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LambdaLR, OneCycleLR

import backsketch as bs
from backsketch import NoiseMonitor, NoiseSchedule, SketchConfig

RATE = 0.1


def net(ratio=0.5, width=6):
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Linear(4, width), nn.LayerNorm(width), nn.Linear(width, 3))
    return bs.sketch_(layers, SketchConfig(ratio=ratio))


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), lr=RATE, **options)


def train(model, optimizer, *steppers, steps=12, rows=16):
    """Train, and return the rates with which the optimizer made its steps."""
    used = list[float]()
    for _ in range(steps):
        model(torch.randn(rows, 4)).square().mean().backward()
        before, gradient = model[0].weight.detach().clone(), model[0].weight.grad.clone()
        optimizer.step()
        used.append(float((before - model[0].weight.detach()).norm() / gradient.norm()))
        for stepper in steppers:
            stepper.step()
        optimizer.zero_grad()
    return used


@pytest.mark.parametrize(("kind", "power"), [(torch.optim.SGD, 1.0), (torch.optim.AdamW, 0.5), (torch.optim.Adam, 0.5)])
def test_rows_at_a_half_halve_the_rate_of_sgd(kind, power):
    """Rows at ratio 1/2 add exactly SGD's noise: r = 1."""
    model = net()
    optimizer = kind(model.parameters(), lr=RATE)
    schedule = NoiseSchedule(optimizer, NoiseMonitor(model), warmup=5)
    assert schedule.get_last_lr() == [RATE]
    for _ in range(6):
        model(torch.randn(16, 4)).square().mean().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    assert schedule.ratios[0] == pytest.approx(1)
    assert schedule.factors[0] == pytest.approx(2**-power)
    assert schedule.get_last_lr() == pytest.approx([RATE * 2**-power])
    assert optimizer.param_groups[0]["lr"] == RATE  # the user's own, at all other times
    schedule.stop()


def test_the_scaled_rate_is_what_the_optimizer_uses_and_warms_up():
    model = net()
    optimizer = sgd(model)
    schedule = NoiseSchedule(optimizer, NoiseMonitor(model), warmup=4)
    used = train(model, optimizer, schedule, steps=8)
    expected = [RATE * 2 ** -min(1.0, step / 4) for step in range(8)]
    assert used == pytest.approx(expected, rel=1e-4)


OTHERS = {
    "closed form": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "from its last value": lambda optimizer: ExponentialLR(optimizer, 0.9),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, 10, eta_min=0.01),
    "one cycle, which moves momentum too": lambda optimizer: OneCycleLR(optimizer, RATE, total_steps=20),
}


@pytest.mark.parametrize("first", [True, False], ids=["before the other", "after the other"])
@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_it_scales_what_another_scheduler_says_in_either_order(other, first):
    plain = net()
    optimizer = sgd(plain, momentum=0.5)
    alone = other(optimizer)
    said = []
    for _ in range(12):
        said.append(alone.get_last_lr()[0])
        optimizer.step()
        alone.step()
    model = net()
    optimizer = sgd(model, momentum=0.5)
    schedule = NoiseSchedule(optimizer, NoiseMonitor(model), warmup=1)
    scheduler: Any = other(optimizer)
    found = []
    for _ in range(12):
        found.append((optimizer.param_groups[0]["lr"], schedule.get_last_lr()[0]))
        model(torch.randn(16, 4)).square().mean().backward()
        optimizer.step()
        for each in (schedule, scheduler) if first else (scheduler, schedule):
            each.step()
        optimizer.zero_grad()
    assert [own for own, _ in found] == said
    assert [scaled for _, scaled in found[1:]] == pytest.approx([rate / 2 for rate in said[1:]])


def test_groups_have_their_own_noise_and_those_without_a_sketch_keep_their_rate():
    model = net()
    model[2].config = SketchConfig(ratio=0.25)
    groups = [
        {"params": model[0].parameters(), "lr": 0.1},
        {"params": model[1].parameters(), "lr": 0.2},
        {"params": [model[2].weight], "lr": 0.3},
    ]
    optimizer = torch.optim.SGD(groups)
    schedule = NoiseSchedule(optimizer, NoiseMonitor(model), warmup=1)
    train(model, optimizer, schedule, steps=3)
    assert schedule.factors == pytest.approx((1 / 2, 1, 1 / 4))
    assert schedule.ratios[1] is None
    optimizer.add_param_group({"params": [model[2].bias], "lr": 0.4})
    train(model, optimizer, schedule, steps=1)
    assert schedule.get_last_lr() == pytest.approx([0.05, 0.2, 0.075, 0.4])
    assert "group 1: no noise measured, your own rate" in str(schedule)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["sketch_variance", "sgd_variance"])
def test_what_is_not_finite_never_reaches_the_rate(name, wrong):
    model = net()
    optimizer = sgd(model)
    monitor = NoiseMonitor(model)
    schedule = NoiseSchedule(optimizer, monitor, warmup=1)
    hear = schedule._hear
    broken = iter([True, False, True, True, False])

    def tamper(records):
        if next(broken):
            records = [{**record, name: wrong} for record in records]
        hear(records)

    for handle in schedule._handles[2:]:
        handle.remove()
    monitor.listen(tamper)
    seen = []
    for _ in range(5):
        train(model, optimizer, schedule, steps=1)
        seen.append(schedule.get_last_lr()[0])
    assert seen == pytest.approx([RATE, RATE / 2, RATE / 2, RATE / 2, RATE / 2])


def test_a_real_nan_in_a_gradient_leaves_the_rate_alone():
    model = net()
    optimizer = sgd(model)
    schedule = NoiseSchedule(optimizer, NoiseMonitor(model), warmup=1)
    train(model, optimizer, schedule, steps=2)
    (model(torch.randn(16, 4)).sum() * math.nan).backward()
    optimizer.zero_grad()
    optimizer.step()
    schedule.step()
    assert schedule.get_last_lr() == pytest.approx([RATE / 2])


def test_negative_estimates_are_averaged_as_they_are_and_never_raise_the_rate():
    model = net()
    optimizer = sgd(model)
    schedule = NoiseSchedule(optimizer, NoiseMonitor(model), warmup=1, window=2)

    def measured(added, noise):
        schedule._hear([{"layer": "0", "sketch_variance": added, "sgd_variance": noise, "energy": 1.0}])
        schedule.step()
        return schedule.factors[0]

    assert measured(-1.0, 4.0) == 1  # an average that makes no sense as a variance
    assert measured(5.0, 4.0) == pytest.approx(1 / (1 + (5 / 2 - 1 / 4) / (4 / 2 + 4 / 4)))
    assert measured(1.0, -100.0) == pytest.approx(1 / (1 + (5 / 2 - 1 / 4) / 3))  # the last factor holds
    schedule.stop()


def test_a_starved_monitor_leaves_the_users_own_schedule():
    rates = []
    for scheduled in (False, True):
        model = net()
        optimizer = sgd(model)
        other = ExponentialLR(optimizer, 0.9)
        steppers: list[Any] = [other]
        if scheduled:
            monitor = NoiseMonitor(model)
            steppers.append(NoiseSchedule(optimizer, monitor))
            monitor.stop()
        rates.append(train(model, optimizer, *steppers))
    assert rates[0] == rates[1]


def test_a_schedule_whose_noise_is_no_longer_measured_gives_the_users_own_rate():
    """The monitor is stopped, or layers are unsketched: all, or those of one group."""
    model = net()
    optimizer = torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[2].parameters()}], lr=RATE)
    monitor = NoiseMonitor(model)
    schedule = NoiseSchedule(optimizer, monitor, warmup=1)
    train(model, optimizer, schedule, steps=2)
    assert schedule.factors == pytest.approx((0.5, 0.5))
    bs.unsketch_(model[2:])
    train(model, optimizer, schedule, steps=2)
    assert schedule.factors == pytest.approx((0.5, 1))
    monitor.stop()
    train(model, optimizer, schedule, steps=1)
    assert schedule.factors == (1, 1)


def test_the_loss_scale_does_not_decide_which_steps_count():
    """A scaler of AMP begins at 65,536 and soon falls; squared, a step then would outweigh a thousand later ones."""
    model = net()
    optimizer = sgd(model)
    schedule = NoiseSchedule(optimizer, NoiseMonitor(model), warmup=1, window=4)
    for step in range(24):
        scale = 2.0**12 if step < 4 else 1.0
        model[0].config = model[2].config = SketchConfig(ratio=0.5 if step < 4 else 0.25)
        (scale * model(torch.randn(16, 4)).square().mean()).backward()
        for parameter in model.parameters():
            parameter.grad /= scale
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    assert schedule.ratios[0] == pytest.approx(3, rel=0.05)


def test_the_factor_is_clamped():
    model = net(ratio=0.07)
    optimizer = sgd(model)
    schedule = NoiseSchedule(optimizer, NoiseMonitor(model), warmup=1, least=0.2)
    train(model, optimizer, schedule, steps=2)
    assert (schedule.ratios[0] or 0) > 10
    assert schedule.factors == (0.2,)


@pytest.mark.parametrize("form", [{}, {"kind": "hadamard", "block": 8}], ids=["rows", "random features"])
def test_a_resumed_run_is_the_same_bit_for_bit(form):
    def start():
        torch.manual_seed(1)
        model = bs.sketch_(nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 3)), SketchConfig(ratio=0.5, **form))
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
        return model, optimizer, NoiseSchedule(optimizer, NoiseMonitor(model, every=3), warmup=2)

    def run(parts, steps):
        train(parts[0], parts[1], parts[2], steps=steps)

    straight = start()
    torch.manual_seed(2)
    run(straight, 17)
    first = start()
    torch.manual_seed(2)
    run(first, 8)
    saved = json.loads(json.dumps(first[2].state_dict()))
    states = copy.deepcopy((first[0].state_dict(), first[1].state_dict()))
    random = torch.get_rng_state()
    torch.manual_seed(77)
    second = start()
    second[0].load_state_dict(states[0])
    second[1].load_state_dict(states[1])
    second[2].load_state_dict(saved)
    torch.set_rng_state(random)
    run(second, 9)
    assert second[2].state_dict() == straight[2].state_dict()
    assert straight[2].factors[0] < 1
    for one, other in zip(straight[0].parameters(), second[0].parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_rate_that_is_a_tensor_is_scaled_in_place_and_given_back():
    model = net()
    rate = torch.tensor(RATE)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, foreach=False)
    schedule = NoiseSchedule(optimizer, NoiseMonitor(model), warmup=1)
    used = train(model, optimizer, schedule, steps=3)
    assert used == pytest.approx([RATE, RATE / 2, RATE / 2], rel=1e-4)
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(RATE)


def test_a_rate_that_groups_share_is_scaled_once_and_given_back():
    """An optimizer gives all of its groups one tensor if its ``lr`` is a tensor."""
    model, rate = net(), torch.tensor(RATE)
    groups = [{"params": [each]} for each in model.parameters()]
    optimizer = torch.optim.SGD(groups, lr=rate, foreach=False)
    assert all(group["lr"] is rate for group in optimizer.param_groups)
    schedule = NoiseSchedule(optimizer, NoiseMonitor(model), warmup=1)
    used = train(model, optimizer, schedule, steps=3)
    assert used == pytest.approx([RATE, RATE / 2, RATE / 2], rel=1e-4)
    assert schedule.factors == pytest.approx([0.5] * len(groups), rel=1e-4)
    assert schedule.get_last_lr() == pytest.approx([RATE / 2] * len(groups), rel=1e-4)
    assert float(rate) == pytest.approx(RATE)


def test_a_step_that_raises_leaves_no_scaled_rate():
    model = net()
    optimizer = sgd(model)
    schedule = NoiseSchedule(optimizer, NoiseMonitor(model), warmup=1)
    train(model, optimizer, schedule, steps=2)

    def fail():
        raise KeyError("in the closure")

    with pytest.raises(KeyError):
        optimizer.step(fail)
    assert schedule.get_last_lr() == pytest.approx([RATE / 2])
    assert optimizer.param_groups[0]["lr"] == RATE


def test_bad_input_is_named():
    model = net()
    with pytest.raises(ValueError, match=r"power must be given for LBFGS.*0\.5 if it is divided"):
        NoiseSchedule(torch.optim.LBFGS(model.parameters()), NoiseMonitor(model))
    with pytest.raises(TypeError, match="optimizer must be an Optimizer of torch, got Sequential"):
        NoiseSchedule(model, NoiseMonitor(model))
    with pytest.raises(TypeError, match="monitor must be a NoiseMonitor, got Sequential"):
        NoiseSchedule(sgd(model), model)
    with pytest.raises(ValueError, match=r"least must be in \(0, 1\], got 0"):
        NoiseSchedule(sgd(model), NoiseMonitor(model), least=0)
    two = torch.optim.SGD([{"params": [parameter]} for parameter in model[0].parameters()], lr=RATE)
    state = NoiseSchedule(sgd(model), NoiseMonitor(model)).state_dict()
    with pytest.raises(ValueError, match="an optimizer with 2 parameter groups, got one of 1"):
        NoiseSchedule(two, NoiseMonitor(model)).load_state_dict(state)


def stationary(way, **options):
    sizes = {"rate": 0.02, "ratio": 0.25, "rows": 32, "inputs": 4, "chains": 512, "steps": 1200, "burn_in": 800}
    return noise_quadratic.measure(way=way, optimizer="SGD", seed=0, **{**sizes, **options})


def test_the_stationary_loss_on_a_quadratic_is_what_theory_says():
    """Exact SGD's with the schedule, 1 + r = 4 times that without, each within five standard errors."""
    exact, sketched, scheduled = (stationary(way) for way in noise_quadratic.WAYS)
    for found in (exact, sketched, scheduled):
        assert abs(found["excess"] - found["theory"]) <= 5 * found["standard_error"]
    difference = math.hypot(exact["standard_error"], scheduled["standard_error"])
    assert abs(scheduled["excess"] - exact["excess"]) <= 5 * difference
    error = math.hypot(sketched["standard_error"], 4 * exact["standard_error"])
    assert abs(sketched["excess"] - 4 * exact["excess"]) <= 5 * error
    assert sketched["excess"] - exact["excess"] > 50 * error
