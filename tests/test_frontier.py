"""The frontier benchmark: points obey the laws of noise, and on real activations few bits reach what they should."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from backsketch import SketchConfig, noise

pytest.importorskip("matplotlib")
pytest.importorskip("rich")

from backsketch.programs.demo.model import Size
from backsketch.programs.result_files import write_record
from backsketch_bench import frontier
from backsketch_bench.activations import collect, token_layers, train
from backsketch_bench.byte_model import byte_subject
from backsketch_bench.frontier_choices import Choice, grid, row_share, within
from backsketch_bench.frontier_figure import draw, write_figure
from backsketch_bench.frontier_points import kept_share, main_layer, measure, step_times
from backsketch_bench.frontier_report import budget_table, settings_table
from backsketch_bench.subjects import find_subject

ROOT = Path(__file__).parent.parent
REPORT = ROOT / "benchmarks" / "reports" / "frontier.json"
MRPC = ROOT.parent / "shared" / "glue" / "MRPC" / "train.tsv"


@pytest.fixture(scope="module")
def layers():
    torch.manual_seed(0)
    subject = byte_subject(steps=2, seed=0, size=Size(hidden=64, heads=2, layers=1, length=64))
    assert train(subject) > 0
    return token_layers(collect(subject, draws=3))


def test_every_linear_layer_is_met_and_padding_has_no_gradient(layers):
    names = [layer.name for layer in layers]
    assert names == [*(f"blocks.0.{part}" for part in ("query", "key", "value", "out", "up", "down")), "head"]
    for layer in layers:
        assert layer.x.shape[:-1] == layer.y.shape[:-1] == layer.valid.shape
        assert 0 < layer.valid.double().mean() < 1
        assert not layer.y[~layer.valid].any()
        assert layer.y[layer.valid].any()


def test_the_gradient_that_is_met_is_the_one_of_the_weight():
    subject = byte_subject(steps=0, seed=0, size=Size(hidden=64, heads=2, layers=1, length=64))
    batch = subject.draw()
    model: Any = subject.model
    subject.loss(model, batch).backward()
    expected = model.head.weight.grad.clone()
    fixed = type(subject)(subject.model, lambda: batch, subject.loss, {}, 0, 0.0)
    head = collect(fixed, draws=1)[-1]
    torch.testing.assert_close(head.y.flatten(0, 1).t() @ head.x.flatten(0, 1), expected)
    assert model.head.weight.grad is None


def test_points_obey_the_laws_of_noise(layers):
    gaussian, rows = SketchConfig(kind="gaussian", ratio=0.1), SketchConfig(ratio=0.2)
    found = measure(layers, [Choice("paper", gaussian), Choice("rows", rows), Choice("rows mask", rows, masked=True)])
    count = layers[0].valid.numel()
    assert found[1].noise == pytest.approx(count / rows.dim_for(count) - 1)
    assert found[1].least == pytest.approx(found[1].most)
    assert found[2].noise < found[1].noise
    first = layers[0]
    ratio = noise.sketch_variance(first.x, first.y, gaussian) / noise.sgd_variance(first.x, first.y)
    assert found[0].least <= ratio <= found[0].most
    assert found[1].bytes == pytest.approx(0.2, abs=0.01)


def test_settings_within_a_budget_keep_about_that_much(layers):
    wide = [layer for layer in layers if layer.x.shape[-1] % 128 == 0]
    assert wide
    for budget in (0.2, 0.05):
        for choice in within(budget):
            assert choice.config.bits is not None
            expected = min(budget, row_share(choice.config.bits))
            assert kept_share(wide, choice) == pytest.approx(expected, abs=2e-3), choice


def test_times_are_taken_of_the_largest_layer(layers):
    assert main_layer(layers).name == "blocks.0.up"
    choices = [grid()[0], Choice("rows mask", SketchConfig(ratio=0.5), masked=True)]
    assert all(time > 0 for time in step_times(layers, choices, rounds=1).values())


def test_every_setting_has_its_own_name():
    assert len({str(choice) for choice in grid()}) == len(grid())


def test_record_table_and_figure_are_made(layers, tmp_path):
    choices = [choice for choice in grid() if choice.config.ratio in (0.1, 0.2, 0.7)]
    points, budgets = frontier.frontier(layers, choices, [0.1], rounds=1)
    assert len(frontier.table(points).rows) == len(choices)
    subject = byte_subject(steps=0, seed=0)
    settings = frontier.settings(subject, layers, loss=1.0, rounds=1)
    path = write_record(tmp_path / "frontier.json", settings=settings, results=frontier.results(points, budgets))
    written = json.loads(path.read_text())
    assert len(written["results"]["points"]) == len(choices)
    assert all(point["time"] > 0 for point in written["results"]["points"])
    svg, png = write_figure(path)
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "<svg" in svg.read_text()


def test_labels_of_the_figure_do_not_overlap():
    figure = draw(json.loads(REPORT.read_text()))
    figure.canvas.draw()
    texts = [text for text in (*figure.texts, *figure.axes[0].texts) if text.get_text()]
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts]
    assert len(boxes) >= 8
    for place, (name, box) in enumerate(boxes):
        assert box.x0 >= 0
        assert box.x1 <= figure.bbox.x1, name
        for other, another in boxes[:place]:
            assert not box.overlaps(another), (name, other)


def test_the_guide_has_the_tables_of_the_record():
    guide, record = (ROOT / "docs" / "choosing.md").read_text(), json.loads(REPORT.read_text())
    assert settings_table(record) in guide
    assert budget_table(record) in guide


def test_the_record_tells_no_path():
    assert str(Path.home()) not in REPORT.read_text()
    assert str(ROOT) not in REPORT.read_text()
    assert Path(json.loads(REPORT.read_text())["settings"]["model"]).is_absolute() is False


@pytest.fixture(scope="module")
def encoder_layers():
    pytest.importorskip("transformers")
    weights = os.environ.get("BACKSKETCH_WEIGHTS")
    if weights is None or not (Path(weights) / "minilm-l6").is_dir():
        pytest.skip("BACKSKETCH_WEIGHTS must name a folder with minilm-l6 in it")
    if not MRPC.exists():
        pytest.skip("the GLUE files are not there")
    columns = ["Quality", "#1 String", "#2 String"]
    subject = find_subject(Path(weights) / "minilm-l6", MRPC, columns)
    train(subject)
    return token_layers(collect(subject))


@pytest.mark.slow
def test_few_bits_reach_an_eighth_of_the_bytes_with_little_noise(encoder_layers):
    assert len(encoder_layers) == 36
    eighth = Choice("4 bits mask", SketchConfig(ratio=0.85, bits=4), masked=True)
    twelfth = Choice("4 bits mask", SketchConfig(ratio=0.55, bits=4), masked=True)
    paper = Choice("paper", SketchConfig(kind="gaussian", ratio=0.1))
    first, second, line_to_beat = measure(encoder_layers, [eighth, twelfth, paper])
    assert first.bytes <= 0.125
    assert first.noise <= 0.15
    assert second.bytes <= 0.08
    assert second.noise <= 0.7
    assert line_to_beat.noise >= 8


@pytest.mark.slow
def test_leaving_padding_out_pays(encoder_layers):
    rows = SketchConfig(ratio=0.1)
    padding = 1 - float(encoder_layers[0].valid.double().mean())
    assert 0.25 < padding < 0.4
    whole, masked = measure(encoder_layers, [Choice("rows", rows), Choice("rows mask", rows, masked=True)])
    assert masked.noise <= 0.65 * whole.noise
    assert masked.noise == pytest.approx((1 - padding) / 0.1 - 1, rel=0.02)
