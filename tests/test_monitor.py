"""The monitor: unbiased from the sketch alone, right under every way of calling a layer, and gone when it is off."""

import gc
import math
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import backsketch
from backsketch import SKETCHES, NoiseMonitor, SketchConfig, SketchedLinear, noise
from backsketch.integrations.session import _ratio
from backsketch.monitor.estimates import Trace
from backsketch.sketches import BlockKind

ROWS, IN, OUT = 26, 5, 4
STANDARD_ERRORS = 5
FORMS = [{"kind": kind, "ratio": 0.25} for kind in SKETCHES]
FORMS += [{"kind": kind, "ratio": 0.25, "block": 8} for kind, cls in SKETCHES.items() if issubclass(cls, BlockKind)]
FORMS += [{"kind": "rows", "dim": 1}, {"kind": "fourier", "dim": 5, "block": 4}, {"kind": "hash", "ratio": 1.0}]
FORMS += [{"kind": "rows", "ratio": 0.25, "bits": 2}, {"kind": "rows", "ratio": 1.0, "bits": 2, "center": True}]
FORMS += [
    {"kind": "hadamard", "ratio": 0.25, "block": 8, "center": True},
    {"kind": "hash", "ratio": 0.25, "center": True},
]
FORMS += [{"kind": "gaussian", "ratio": 0.25, "bits": 4, "center": True}]


def sides(rows=ROWS):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(rows, IN, generator=generator) + 0.7
    return x, torch.randn(rows, OUT, generator=generator) - 0.4 + x[:, :OUT] / 3


def model(config=None):
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Linear(IN, 8), nn.GELU(), nn.Linear(8, OUT))
    return backsketch.sketch_(layers, config or SketchConfig(kind="gaussian", ratio=0.5))


def exact_values(x, y, config):
    return {
        "squared_gradient": (x.double().T @ y.double()).square().sum(),
        "sgd_variance": noise.sgd_variance(x, y),
        "sketch_variance": noise.sketch_variance(x, y, config),
    }


def assert_unbiased(form, draws):
    x, y = sides()
    layer = SketchedLinear(IN, OUT, config=SketchConfig(**form))
    with NoiseMonitor(layer) as monitor:
        for _ in range(draws):
            layer(x).backward(y)
            monitor.step()
    records = monitor.to_records()
    assert [record["step"] for record in records] == list(range(draws))
    for name, expected in exact_values(x, y, layer.config).items():
        found = torch.tensor([record[name] for record in records], dtype=torch.float64)
        allowed = STANDARD_ERRORS * found.std() / draws**0.5 + 1e-5 * abs(expected)
        assert abs(found.mean() - expected) <= allowed, (
            f"{name}: {found.mean():.5g}, exact {expected:.5g} ± {allowed:.2g}"
        )


@pytest.mark.parametrize("form", FORMS, ids=lambda form: str(SketchConfig(**form)))
def test_estimates_are_unbiased(form):
    assert_unbiased(form, draws=400)


@pytest.mark.parametrize("form", [FORMS[0], {"kind": "rows", "ratio": 0.25, "bits": 4, "center": True}], ids=str)
def test_padded_rows_are_left_out_of_the_estimates(form):
    x, y = sides()
    valid = torch.arange(ROWS) % 3 != 0
    y = y * valid.unsqueeze(1)
    layer = SketchedLinear(IN, OUT, config=SketchConfig(**form))
    with NoiseMonitor(layer) as monitor, backsketch.valid_rows(valid):
        for _ in range(400):
            layer(x).backward(y)
            monitor.step()
    expected = {**exact_values(x, y, layer.config), "sketch_variance": noise.sketch_variance(x, y, layer.config, valid)}
    for name, value in expected.items():
        found = torch.tensor([record[name] for record in monitor.to_records()], dtype=torch.float64)
        assert abs(found.mean() - value) <= STANDARD_ERRORS * found.std() / 400**0.5 + 1e-5 * abs(value), name


def test_alignment_is_that_of_the_whole_input_with_a_mean_kept_apart():
    x, y = sides()
    layer = SketchedLinear(IN, OUT, config=SketchConfig(ratio=0.5, center=True))
    with NoiseMonitor(layer) as monitor:
        for _ in range(300):
            layer(x + 3).backward(y)
            monitor.step()
    records: list[Any] = monitor.to_records()
    assert records[0]["energy"] == pytest.approx(((x + 3).square().sum() * y.square().sum()).item(), rel=1e-4)
    mean = sum(record["alignment"] for record in records) / len(records)
    assert mean == pytest.approx(noise.alignment(x + 3, y).item(), rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS, ids=lambda form: str(SketchConfig(**form)))
def test_estimates_are_unbiased_over_many_draws(form):
    assert_unbiased(form, draws=8000)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: str(SketchConfig(**form)))
def test_exact_mode_records_the_closed_forms(form):
    x, y = sides()
    layer = SketchedLinear(IN, OUT, config=SketchConfig(**form))
    with NoiseMonitor(layer, exact=True) as monitor:
        layer(x).backward(y)
    record: Any = monitor.to_records()[0]
    for name, expected in exact_values(x, y, layer.config).items():
        assert record[name] == pytest.approx(float(expected), rel=1e-6, abs=1e-6), name
    assert record["alignment"] == pytest.approx(float(noise.alignment(x, y)))
    assert record["bound"] == pytest.approx(float(noise.paper_bound(x, y)))
    assert record["ratio"] == pytest.approx(record["sketch_variance"] / record["sgd_variance"])
    assert record["scaled_ratio"] == pytest.approx(record["ratio"] * record["dim"] / (record["rows"] - 1))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: str(SketchConfig(**form)))
def test_nothing_of_the_inputs_size_is_kept(form):
    x = torch.randn(400, 64)
    trace = Trace.of(x, SketchConfig(**form), torch.Generator())
    kept = [tensor for tensor in (trace.norms, trace.feature) if tensor is not None]
    assert sum(tensor.untyped_storage().nbytes() for tensor in kept) <= 400 * (4 + 8)


def test_monitoring_changes_neither_gradients_nor_random_numbers():
    x, _ = sides()

    def train(monitored):
        net = model(SketchConfig(kind="cosine", ratio=0.25, block=8))
        monitor = NoiseMonitor(net)
        if monitored:
            monitor.start()
        torch.manual_seed(2)
        net(x).square().sum().backward()
        monitor.stop()
        return [parameter.grad for parameter in net.parameters()], torch.get_rng_state()

    (watched, watched_state), (plain, plain_state) = train(True), train(False)
    assert all(torch.equal(a, b) for a, b in zip(watched, plain, strict=True))
    assert torch.equal(watched_state, plain_state)


def test_nothing_is_left_when_it_is_off():
    from torch.optim import optimizer

    net = model()
    hooks = len(optimizer._global_optimizer_post_hooks)
    with NoiseMonitor(net):
        assert all(len(layer._forward_hooks) == 1 for layer in (net[0], net[2]))
    assert not any(module._forward_hooks for module in net.modules())
    assert len(optimizer._global_optimizer_post_hooks) == hooks


def saved_bytes(net, x):
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        net(x).sum().backward()
    return sum(storages.values())


def test_bytes_kept_are_the_same_before_and_after():
    net, x = model(), sides()[0]
    before = saved_bytes(net, x)
    with NoiseMonitor(net):
        assert saved_bytes(net, x) == before
    assert saved_bytes(net, x) == before


def test_backward_after_stop_is_not_recorded():
    net, x = model(), sides()[0]
    monitor = NoiseMonitor(net).start()
    loss = net(x).sum()
    monitor.stop()
    loss.backward()
    assert monitor.to_records() == []
    assert str(monitor) == "no backward pass through a sketched layer was seen"


def test_optimizer_ends_the_step_and_accumulation_sums_calls():
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    stranger = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.0)
    batches = [torch.randn(ROWS, IN) for _ in range(3)]
    with NoiseMonitor(net, exact=True) as monitor:
        for batch in batches[:2]:
            net(batch).square().sum().backward()
            stranger.step()
        optimizer.step()
        optimizer.step()  # no layer ran in between, so it ends no step
        net(batches[2]).square().sum().backward()
        optimizer.step()
    records = monitor.to_records()
    assert [(r["step"], r["layer"], r["calls"], r["rows"]) for r in records] == [
        (0, "0", 2, 2 * ROWS),
        (0, "2", 2, 2 * ROWS),
        (1, "0", 1, ROWS),
        (1, "2", 1, ROWS),
    ]

    def alone(batch):
        with NoiseMonitor(net, exact=True) as single:
            net(batch).square().sum().backward()
        return single.to_records()[0]

    parts = [alone(batch) for batch in batches[:2]]
    for name in ("squared_gradient", "energy", "sgd_variance", "sketch_variance"):
        assert records[0][name] == pytest.approx(sum(part[name] for part in parts)), name
    ratio = sum(part["sketch_variance"] for part in parts) / sum(part["sgd_variance"] for part in parts)
    assert records[0]["ratio"] == pytest.approx(ratio)


def test_records_read_in_the_middle_of_a_step_are_not_lost_nor_counted_twice():
    net, x = model(), sides()[0]
    with NoiseMonitor(net, exact=True) as monitor:
        net(x).sum().backward()
        first = monitor.to_records()[0]
        assert monitor.to_records()[0] == first
        net(x).sum().backward()
    total = monitor.to_records()[0]
    assert total["calls"] == 2
    assert total["energy"] == pytest.approx(2 * first["energy"])


def test_shared_module_called_twice_gives_two_calls():
    layer = SketchedLinear(IN, IN, config=SketchConfig(ratio=0.5))
    with NoiseMonitor(layer) as monitor:
        layer(torch.tanh(layer(sides()[0]))).sum().backward()
    assert [record["calls"] for record in monitor.to_records()] == [2]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("form", [{"kind": "rows"}, {"kind": "gaussian", "block": 8}, {"kind": "fourier"}], ids=str)
def test_checkpointing_gives_no_duplicates(form, reentrant):
    net = model(SketchConfig(**form))
    x = sides()[0].requires_grad_()
    with NoiseMonitor(net, exact=True) as plain:
        net(x).square().sum().backward()
    with NoiseMonitor(net, exact=True) as exact, NoiseMonitor(net) as monitor:
        checkpoint(net, x, use_reentrant=reentrant).square().sum().backward()
    assert [record["calls"] for record in monitor.to_records()] == [1, 1]
    for found, expected in zip(exact.to_records(), plain.to_records(), strict=True):
        assert found.pop("layer") == expected.pop("layer")
        assert found == pytest.approx(expected, rel=1e-5)


def test_a_hook_that_changes_the_output_hides_nothing():
    net = model()
    for layer in (net[0], net[2]):
        layer.register_forward_hook(lambda module, args, output: output * 2)
    with NoiseMonitor(net) as monitor:
        net(sides()[0]).sum().backward()
    assert [record["layer"] for record in monitor.to_records()] == ["0", "2"]


def test_exact_mode_keeps_the_input_as_the_layer_saw_it():
    x, y = sides()
    layer, before = SketchedLinear(IN, OUT, config=SketchConfig(ratio=0.5)), x.clone()
    with NoiseMonitor(layer, exact=True) as monitor:
        out = layer(x)
        x.zero_()
        out.backward(y)
    assert monitor.to_records()[0]["sgd_variance"] == pytest.approx(noise.sgd_variance(before, y).item())


@pytest.mark.parametrize("kind", SKETCHES)
def test_a_batch_of_padding_alone_adds_nothing(kind):
    layer = SketchedLinear(IN, OUT, config=SketchConfig(kind=kind, ratio=0.5))
    with NoiseMonitor(layer) as monitor, backsketch.valid_rows(torch.zeros(ROWS)):
        layer(sides()[0]).backward(torch.zeros(ROWS, OUT))
    (record,) = monitor.to_records()
    assert record["squared_gradient"] == record["sgd_variance"] == record["sketch_variance"] == 0


def test_every_skips_steps_and_where_skips_layers():
    net = model()
    with NoiseMonitor(net, where=lambda name, module: name == "2", every=3) as monitor:
        for _ in range(7):
            net(sides()[0]).sum().backward()
            monitor.step()
    assert [(record["step"], record["layer"]) for record in monitor.to_records()] == [(0, "2"), (3, "2"), (6, "2")]


def test_a_single_row_among_the_steps_leaves_the_ratios_known():
    net = model(SketchConfig(kind="rows", ratio=0.5))
    with NoiseMonitor(net) as monitor:
        for rows in (sides()[0], sides()[0], sides()[0][:1]):
            net(rows).sum().backward()
            monitor.step()
    assert all(line.split()[-1] == "1" for line in monitor.table().splitlines()[4:])
    assert _ratio(monitor.to_records()) == pytest.approx(1)


def test_ended_steps_can_be_forgotten():
    net = model()
    with NoiseMonitor(net) as monitor:
        for _ in range(3):
            net(sides()[0]).sum().backward()
            monitor.step()
        net(sides()[0]).sum().backward()
        monitor.forget()
    assert {record["step"] for record in monitor.to_records()} == {3}


def test_a_training_that_goes_back_to_a_step_records_it_anew():
    net = model()
    monitor = NoiseMonitor(net)
    for start, count in ((None, 3), (1, 1), (None, 1)):
        monitor.start(start)
        for _ in range(count):
            net(sides()[0]).sum().backward()
            monitor.step()
        monitor.stop()
    steps = [record["step"] for record in monitor.to_records() if record["layer"] == "0"]
    assert steps == [0, 1, 2]
    with monitor, pytest.raises(RuntimeError, match="the monitor is running"):
        monitor.start(0)


def test_callback_gets_each_record_once():
    net, seen = model(), list[dict[str, Any]]()
    with NoiseMonitor(net, callback=seen.append) as monitor:
        for _ in range(3):
            net(sides()[0]).sum().backward()
            monitor.step()
        net(sides()[0]).sum().backward()
    assert seen == monitor.to_records()
    assert len(seen) == 8


def test_table_has_a_line_a_layer():
    net = model(SketchConfig(kind="rows", ratio=0.5))
    with NoiseMonitor(net) as monitor:
        for _ in range(2):
            net(sides()[0]).sum().backward()
            monitor.step()
    total, _, title, _, *lines = monitor.table().splitlines()
    assert total == str(monitor)
    assert total[:-1] == "added noise / SGD's noise 1 (2 layers, 2 steps); most 1 in "  # both have most
    assert title.split() == ["layer", "steps", "calls", "alignment", "D²", "SGD", "D²", "sketch", "ratio"]
    assert [line.split()[:3] for line in lines] == [["0", "2", "2"], ["2", "2", "2"]]
    assert all(line.split()[-1] == "1" for line in lines)  # rows at ratio 1/2 add exactly the noise of the batch


def test_conv1d_bf16_autocast_and_keyword_input_are_monitored():
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D(OUT, IN)
    net = backsketch.sketch_(conv1d, SketchConfig(kind="hadamard", ratio=0.5, block=8))
    x, y = sides()
    with NoiseMonitor(net, exact=True) as exact, NoiseMonitor(net) as monitor:
        with torch.autocast("cpu", torch.bfloat16):
            out = net(x=x.view(2, 13, IN))
        out.backward(y.view(2, 13, OUT).bfloat16())
    (found,), (expected,) = monitor.to_records(), exact.to_records()
    assert found["energy"] == pytest.approx(expected["energy"], rel=1e-2)
    assert expected["sketch_variance"] == pytest.approx(float(noise.sketch_variance(x, y, net.config)), rel=2e-2)


def test_plain_runs_of_a_layer_are_not_recorded():
    net, x = model(), sides()[0].requires_grad_()
    with NoiseMonitor(net) as monitor:
        net.eval()
        net(x).sum().backward()
        net.train()
        with torch.no_grad():
            net(x)
        net(x[:0]).sum().backward()
    assert monitor.to_records() == []


def test_single_row_has_no_sgd_variance():
    net = model()
    with NoiseMonitor(net) as monitor:
        net(sides()[0][:1]).sum().backward()
    record: Any = monitor.to_records()[0]
    assert math.isnan(record["sgd_variance"])
    assert record["sketch_variance"] == 0
    assert str(monitor).startswith("added noise / SGD's noise unknown (")
    assert "nan" not in monitor.table()


@pytest.mark.filterwarnings("ignore")  # those of the compiler itself
def test_compiled_model_trains_on_under_a_monitor():
    net, x = model(SketchConfig(ratio=1.0)), sides()[0]
    compiled: Any = torch.compile(net, backend="aot_eager")
    with NoiseMonitor(compiled):
        compiled(x).sum().backward()
    found = [parameter.grad for parameter in net.parameters()]
    net.zero_grad()
    net(x).sum().backward()
    torch.testing.assert_close(found, [parameter.grad for parameter in net.parameters()])


class NoFloatIsRead(TorchDispatchMode):
    """Fail when a floating-point number is fetched from its device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        fetches = func is torch.ops.aten._local_scalar_dense.default and args[0].is_floating_point()
        assert not fetches, "a hook waits for its device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: str(SketchConfig(**form)))
def test_hooks_never_wait_for_the_device(form):
    net = model(SketchConfig(**form))
    with NoiseMonitor(net) as monitor, NoFloatIsRead():
        net(sides()[0]).sum().backward()
        monitor.step()
    with pytest.raises(AssertionError, match="waits"), NoFloatIsRead():
        torch.ones(()).item()


def test_graphs_are_freed():
    net, x = model(), sides()[0]
    with NoiseMonitor(net) as monitor:
        net(x).sum().backward()
        del monitor
        gc.collect()
        held = [o for o in gc.get_objects() if type(o) is Trace]
    assert held == []


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="every must be a positive integer, got 0"):
        NoiseMonitor(model(), every=0)
    with pytest.raises(ValueError, match="model must have a sketched layer to monitor"):
        NoiseMonitor(nn.Linear(2, 2)).start()


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        heads = self.qkv(self.first(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(x.shape)
        x = x + self.out(mixed)
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


def best_times(config, rounds=80):
    """Return the best step time with the monitor off, on, and off again, interleaved so that all see one machine."""
    net = backsketch.sketch_(nn.Sequential(Block(256), Block(256)), config)
    x = torch.randn(8, 128, 256)
    monitor = NoiseMonitor(net)
    best = [math.inf] * 3
    for _ in range(rounds):
        for case in range(3):
            if case == 1:
                monitor.start()
            start = time.thread_time()
            net(x).square().mean().backward()
            net.zero_grad()
            monitor.step()
            best[case] = min(best[case], time.thread_time() - start)
            monitor.stop()
    assert len(monitor.to_records()) == 8 * rounds
    return best


@pytest.mark.slow
@pytest.mark.parametrize("form", [{"kind": "rows"}, {"kind": "gaussian", "block": 128}], ids=str)
def test_monitoring_every_layer_every_step_costs_less_than_15_percent(form):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        off, on, off_again = best_times(SketchConfig(ratio=0.1, **form))
    finally:
        torch.set_num_threads(threads)
    print(f"{form}: off {off * 1e3:.1f} ms, on {on / off - 1:+.1%}, off again {off_again / off - 1:+.1%}")
    assert on / off < 1.15
    assert off_again / off < 1.05


@pytest.mark.slow
def test_monitoring_every_tenth_step_costs_less_than_3_percent():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        off, on, off_again = best_times(SketchConfig.recommended())
    finally:
        torch.set_num_threads(threads)
    print(f"off {off * 1e3:.1f} ms, a measured step {on / off - 1:+.1%}, off again {off_again / off - 1:+.1%}")
    assert 0.1 * (on / off - 1) < 0.03
