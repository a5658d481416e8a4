"""Mixed precision, gradient accumulation, checkpointing, and no waiting for the device."""

import itertools

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from backsketch import SketchConfig, noise, sketch_, sketched_linear, unsketch_, valid_rows
from backsketch.linear import algorithm
from backsketch.storage import ranges
from cases import FORMS, within_five_standard_errors

ROWS, FEATURES, OUTPUTS = 32, 12, 5
DTYPES = [torch.bfloat16, torch.float16]


def make_model(config=None):
    layers = nn.Sequential(nn.Linear(FEATURES, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, OUTPUTS))
    return sketch_(layers, config or SketchConfig(ratio=0.3))


def gradient_of(model, loss_of, scaler=None):
    model.zero_grad()
    loss = loss_of(model)
    (loss if scaler is None else scaler.scale(loss)).backward()
    scale = 1.0 if scaler is None else scaler.get_scale()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()]) / scale


@pytest.mark.parametrize("config", [SketchConfig(ratio=0.3), SketchConfig(kind="hadamard", ratio=0.3, bits=4)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_scaled_gradients_under_autocast_are_unbiased(dtype, config):
    model = make_model(config)
    model[2].p = 0.0
    x, y = torch.randn(ROWS, FEATURES), torch.randn(ROWS, OUTPUTS)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if dtype == torch.float16 else None

    def loss_of(model):
        with torch.autocast("cpu", dtype=dtype):
            return nn.functional.mse_loss(model(x).float(), y)

    samples = torch.stack([gradient_of(model, loss_of, scaler) for _ in range(400)])
    exact = gradient_of(unsketch_(model), loss_of)
    assert within_five_standard_errors(samples, exact.double(), 8 * torch.finfo(dtype).eps * exact.abs().max())


def test_the_scaler_trains_in_fp16_and_skips_a_step_that_overflows():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=1000)
    x, y = torch.randn(ROWS, FEATURES), torch.randn(ROWS, OUTPUTS)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    losses: list[float] = []
    skipped = 0
    for _ in range(60):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.mse_loss(model(x), y.half())
        scaler.scale(loss).backward()
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < scale and not losses:
            skipped += 1
            assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        else:
            losses.append(loss.item())
    assert skipped
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_accumulated_gradients_are_unbiased_and_their_noise_adds_up():
    config = SketchConfig(ratio=0.25)
    x, y = torch.randn(4, ROWS, FEATURES), torch.randn(4, ROWS, OUTPUTS)
    weight = torch.randn(OUTPUTS, FEATURES, requires_grad=True)

    def accumulated():
        weight.grad = None
        for part in range(4):
            sketched_linear(x[part], weight, None, config).backward(y[part])
        return weight.grad

    exact = y.flatten(0, 1).t() @ x.flatten(0, 1)
    samples = torch.stack([accumulated() for _ in range(1500)])
    assert within_five_standard_errors(samples, exact.double(), 1e-4)
    errors = (samples - exact).square().sum((1, 2))
    alone = [noise.sketch_variance(x[part], y[part], config) for part in range(4)]
    assert within_five_standard_errors(errors, sum(alone))


@pytest.mark.parametrize("dtype", [None, *DTYPES])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_gives_the_same_gradient_bit_for_bit(reentrant, dtype):
    model = make_model()
    x = torch.randn(ROWS, FEATURES, requires_grad=True)

    def loss_of(run):
        torch.manual_seed(7)
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            return run(x).float().square().sum()

    plain = gradient_of(model, lambda _: loss_of(model))
    ours = gradient_of(model, lambda _: loss_of(lambda x: checkpoint(model, x, use_reentrant=reentrant)))
    assert torch.equal(ours, plain)


class NoWaiting(TorchDispatchMode):
    """Refuse what makes the host wait for the device: to read a value, or to learn a size that depends on values.

    The seed alone is read: 8 bytes that never leave the CPU. So nothing in either pass waits for an accelerator.
    """

    waiting = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero", "repeat_interleave")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__.lstrip("_")
        if name in {waiting.lstrip("_") for waiting in self.waiting}:
            is_seed = args[0].shape == () and args[0].dtype == torch.int64 and args[0].device.type == "cpu"
            assert is_seed, f"{function} reads a tensor of shape {tuple(args[0].shape)}"
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        SketchConfig(kind=kind, block=block, ratio=0.3, bits=bits, center=center)
        for (kind, block), (bits, center) in itertools.product(FORMS, [(None, False), (4, True)])
    ],
    ids=str,
)
def test_no_value_is_read_from_the_device(config, masked, monkeypatch):
    monkeypatch.setattr(algorithm, "check_promise", lambda valid, y: None)  # it asks a CPU only
    monkeypatch.setattr(ranges, "any_flag", lambda flags: True)  # so does it
    x, weight = torch.randn(ROWS, FEATURES), torch.randn(OUTPUTS, FEATURES, requires_grad=True)
    mask = torch.arange(ROWS) < (20 if masked else ROWS)
    with NoWaiting(), valid_rows(mask):
        sketched_linear(x, weight, None, config).sum().backward()
    assert weight.grad.any()


def test_the_guard_sees_a_value_being_read():
    for read in (lambda: float(torch.ones(())), lambda: torch.ones(3).nonzero(), lambda: bool(torch.ones(1) > 0)):
        with pytest.raises(AssertionError, match="reads a tensor"), NoWaiting():
            read()
