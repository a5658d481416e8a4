"""The figures: what is drawn is what the records say."""

import builtins
import math
import subprocess
import sys

import pytest
import torch
from torch import nn

import backsketch
from backsketch import NoiseMonitor, SketchConfig
from backsketch.monitor.noise_records import ratios

pytest.importorskip("matplotlib")

from backsketch.plots import noise_figure


def record(step, layer, gradient, sgd, sketch, scaled=None):
    totals = {"squared_gradient": gradient, "energy": 10.0, "sgd_variance": sgd, "sketch_variance": sketch}
    totals["scaled_variance"] = sketch if scaled is None else scaled
    return {"step": step, "layer": layer, "calls": 1, "rows": 8, "dim": 2, **ratios(totals)}


def lines(axes):
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()}


def test_one_layer_is_drawn_as_recorded():
    records = [record(step, "a", 2.0, 1.0 + step, 4.0) for step in range(3)] + [record(0, "b", 1.0, 1.0, 1.0)]
    ratio, variances, alignment = noise_figure(records, layer="a").axes
    assert lines(variances)["batch: $D^2_{SGD}$"] == ([0, 1, 2], [1.0, 2.0, 3.0])
    assert lines(variances)["sketch: $D^2$"] == ([0, 1, 2], [4.0, 4.0, 4.0])
    assert list(lines(alignment).values()) == [([0, 1, 2], [0.2, 0.2, 0.2])]
    assert lines(ratio)[r"bound $(\alpha+1)/\alpha$"][1] == pytest.approx([6.0, 6.0, 6.0])
    assert "above the bound" not in lines(ratio)


def test_further_runs_are_drawn_beside():
    records = [record(step, "a", 2.0, 1.0, 4.0) for step in range(3)]
    beside = {f"run {number}": [record(step, "a", 2.0, 1.0, number) for step in range(4)] for number in range(1, 6)}
    ratio, variances, alignment = noise_figure(records, layer="a", others=beside).axes
    for number in range(1, 6):
        assert lines(ratio)[f"run {number}"] == ([0, 1, 2, 3], [number] * 4)
        assert lines(variances)[f"run {number}: $D^2$"] == ([0, 1, 2, 3], [number] * 4)
    assert len(lines(alignment)) == 1


def test_steps_above_the_bound_are_marked():
    records = [record(0, "a", 2.0, 1.0, 4.0), record(1, "a", 2.0, 1.0, 7.0)]
    assert lines(noise_figure(records).axes[0])["above the bound"] == ([1], [7.0])


def test_layers_are_added_up_and_windows_taken_before_ratios():
    records = [record(step, layer, 2.0, sgd, 4.0) for step, sgd in ((0, 1.0), (5, 3.0)) for layer in "ab"]
    ratio = lines(noise_figure(records, window=2).axes[0])[r"$\frac{B_{proj}}{B-1}\,D^2 / D^2_{SGD}$"]
    assert ratio == ([5], [pytest.approx(16 / 8)])


def test_estimates_that_are_not_positive_leave_a_gap():
    records = [record(0, "a", -2.0, 1.0, 4.0), record(1, "a", 2.0, -1.0, 4.0)]
    ratio, variances, alignment = noise_figure(records).axes
    assert list(lines(alignment).values()) == [([0, 1], [-0.2, 0.2])]
    assert math.isnan(lines(ratio)[r"bound $(\alpha+1)/\alpha$"][1][0])
    assert math.isnan(lines(variances)["batch: $D^2_{SGD}$"][1][1])
    assert "above the bound" not in lines(ratio)


def test_records_of_a_run_make_a_png(tmp_path):
    net = backsketch.sketch_(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), SketchConfig(ratio=0.5))
    with NoiseMonitor(net) as monitor:
        for _ in range(4):
            net(torch.randn(16, 4)).square().sum().backward()
            monitor.step()
    noise_figure(monitor.to_records()).savefig(tmp_path / "noise.png")
    assert (tmp_path / "noise.png").read_bytes().startswith(b"\x89PNG")


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="layer must be one of a, got 'b'"):
        noise_figure([record(0, "a", 1.0, 1.0, 1.0)], layer="b")
    with pytest.raises(ValueError, match="records must not be empty"):
        noise_figure([])
    with pytest.raises(ValueError, match="window must be a positive integer, got 0"):
        noise_figure([record(0, "a", 1.0, 1.0, 1.0)], window=0)


def test_missing_matplotlib_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.delitem(sys.modules, "backsketch.plots")
    with pytest.raises(ImportError, match=r"pip install 'backsketch\[cli\]'"):
        import backsketch.plots  # noqa: F401


@pytest.mark.parametrize(("statement", "light"), [("import backsketch", True), ("import backsketch.plots", False)])
def test_importing_the_library_is_light(statement, light):
    code = f"{statement}; import sys; print('matplotlib' in sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert loaded == str(not light)
