"""The frontier benchmark: points obey the laws of noise, and on real activations few bits reach what they should."""

import json
import os
import re
from dataclasses import replace
from itertools import combinations, pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch

from backsketch import SketchConfig, noise
from backsketch.config import ROUNDING_NOISE

pytest.importorskip("matplotlib")
pytest.importorskip("rich")

from matplotlib import rc_context

from backsketch.noise.rounding import rounding_variance
from backsketch.programs.demo.model import Size
from backsketch.programs.result_files import write_record
from backsketch.storage.sizes import row_share
from backsketch_bench import frontier
from backsketch_bench.activations import collect, token_layers, train
from backsketch_bench.byte_model import byte_subject
from backsketch_bench.frontier_choices import BUDGETS, Choice, grid, within
from backsketch_bench.frontier_curves import curves
from backsketch_bench.frontier_figure import STYLE, draw, write_figure
from backsketch_bench.frontier_points import best_curve, kept_share, main_layer, measure, step_times
from backsketch_bench.frontier_report import budget_table, settings_table, worst_layers_table
from backsketch_bench.layer_noise import LayerNoise
from backsketch_bench.layers_figure import draw_layers
from backsketch_bench.subjects import find_subject

ROOT = Path(__file__).parent.parent
REPORTS = ROOT / "benchmarks" / "reports"
RECORDS = ("frontier", "frontier-bfloat16", "frontier-lm", "frontier-lm-bfloat16")
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


def test_the_noise_of_a_layer_is_that_of_the_library(layers):
    """What is computed once for many settings gives the same numbers as each setting by itself."""
    choices = [*grid(padded=True), *within(0.1, 4, padded=True)]
    assert {choice.config.kind for choice in choices} == {"rows", "hash", "gaussian", "hadamard"}
    for layer in (layers[0], layers[-2]):
        found = LayerNoise.of(layer)
        assert found.sgd == pytest.approx(float(noise.sgd_variance(layer.x, layer.y)), rel=1e-9)
        for choice in choices:
            valid = layer.valid if choice.masked else None
            expected = float(noise.sketch_variance(layer.x, layer.y, choice.config, valid)) / found.sgd
            assert found.relative(choice) == pytest.approx(expected, rel=1e-6, abs=1e-9), choice


def test_the_worst_layer_is_named(layers):
    (point,) = measure(layers, [Choice("3 bits", SketchConfig(ratio=1.0, bits=3))])
    noises = {layer.name: LayerNoise.of(layer).relative(point.choice) for layer in layers}
    assert noises[point.worst] == max(noises.values()) == pytest.approx(point.most)
    assert point.as_record()["worst"] == point.worst


def test_settings_within_a_budget_keep_about_that_much(layers):
    wide = [layer for layer in layers if layer.x.shape[-1] % 128 == 0]
    assert wide
    half = [replace(layer, x=layer.x.bfloat16()) for layer in wide]
    for (itemsize, own), budget in product(((4, wide), (2, half)), (0.2, 0.05)):
        for choice in within(budget, itemsize, padded=True):
            assert choice.config.bits is not None
            expected = min(budget, row_share(choice.config.bits, itemsize))
            assert kept_share(own, choice) == pytest.approx(expected, abs=2e-3), choice


def test_settings_without_padding_have_no_mask():
    assert any(choice.masked for choice in (*grid(padded=True), *within(0.1, 4, padded=True)))
    assert not any(choice.masked for choice in (*grid(padded=False), *within(0.1, 4, padded=False)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recommended_is_the_best_within_a_budget(dtype):
    """The rule of the library picks one of the settings that the record compares."""
    for budget in BUDGETS:
        assert SketchConfig.recommended(budget, dtype) in [
            c.config for c in within(budget, dtype.itemsize, padded=False)
        ]


def test_activations_are_those_of_the_model_in_its_type(layers):
    subject = byte_subject(steps=0, seed=0, size=Size(hidden=64, heads=2, layers=1, length=64))
    found = collect(subject, draws=1, dtype=torch.bfloat16)
    assert {(layer.x.dtype, layer.y.dtype) for layer in found} == {(torch.bfloat16, torch.bfloat16)}
    assert {layer.x.dtype for layer in layers} == {torch.float32}


def test_a_layer_can_be_left_out():
    subject = byte_subject(steps=0, seed=0, size=Size(hidden=64, heads=2, layers=1, length=64))
    names = [layer.name for layer in collect(replace(subject, left_out=("head",)), draws=1)]
    assert names[-1] == "blocks.0.down"


def test_times_are_taken_of_the_largest_layer(layers):
    assert main_layer(layers).name == "blocks.0.up"
    choices = [grid(padded=True)[0], Choice("rows mask", SketchConfig(ratio=0.5), masked=True)]
    assert all(time > 0 for time in step_times(layers, choices, rounds=1).values())


def test_every_setting_has_its_own_name():
    choices = grid(padded=True)
    assert len({str(choice) for choice in choices}) == len({choice.short for choice in choices}) == len(choices)


def test_record_table_and_figure_are_made(layers, tmp_path):
    choices = [choice for choice in grid(padded=True) if choice.config.ratio in (0.1, 0.2, 0.7)]
    found = frontier.frontier(layers, choices, [0.1], rounds=1)
    assert len(frontier.table(found, "float32").rows) == len(choices)
    subject = byte_subject(steps=0, seed=0)
    settings = frontier.settings(subject, layers, loss=1.0, rounds=1)
    path = write_record(tmp_path / "frontier.json", settings=settings, results=found.as_record())
    written = json.loads(path.read_text())
    assert written["settings"]["dtype"] == "float32"
    assert len(written["results"]["points"]) == len(choices)
    assert all(point["time"] > 0 for point in written["results"]["points"])
    assert list(written["results"]["layers"]) == [layer.name for layer in layers]
    svg, png = write_figure([path])
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "<svg" in svg.read_text()


def test_the_best_curve_falls_where_more_is_kept(layers):
    best = best_curve(layers, [LayerNoise.of(layer) for layer in layers])
    for masked in (False, True):
        own = [point for point in best if point.choice.masked is masked]
        assert len(own) > 20
        assert all(more.noise <= less.noise for less, more in pairwise(own))


@pytest.fixture(scope="module")
def records():
    return {name: json.loads((REPORTS / f"{name}.json").read_text()) for name in RECORDS}


def overlaps(figure):
    """Return the pairs of texts of a figure that overlap, and the texts that leave it."""
    figure.draw_without_rendering()  # so that labels of axes have their place
    texts = [*figure.texts]
    for axes in figure.axes:
        texts += [*axes.texts, axes.xaxis.label, axes.yaxis.label, axes._left_title, *axes.get_xticklabels()]
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts if text.get_text()]
    assert len(boxes) >= 6
    outside = [name for name, box in boxes if min(box.x0, box.y0) < 0 or box.x1 > figure.bbox.x1]
    return [*outside, *((a, b) for (a, one), (b, other) in combinations(boxes, 2) if one.overlaps(other))]


@pytest.fixture
def style():
    with rc_context(STYLE):
        yield


@pytest.mark.usefixtures("style")
@pytest.mark.parametrize("names", [RECORDS[:2], RECORDS[2:], RECORDS[:1], RECORDS[3:]], ids=" and ".join)
def test_labels_of_the_figure_do_not_overlap(names, records):
    before = json.loads((REPORTS / "frontier-first-generation.json").read_text()) if names == RECORDS[:2] else None
    assert overlaps(draw([records[name] for name in names], before)) == []


@pytest.mark.usefixtures("style")
def test_labels_of_the_layers_do_not_overlap(records):
    assert overlaps(draw_layers(records["frontier-lm"])) == []


def test_overlapping_labels_are_found(records):
    figure = draw([records["frontier"]])
    first = figure.texts[0]
    figure.text(*first.get_position(), "another")
    assert overlaps(figure) == [(first.get_text(), "another")]


def test_the_figure_says_what_a_tenth_of_the_memory_costs(records):
    tenth = min(p["noise"] for p in records["frontier"]["results"]["budgets"]["0.1"] if not p["masked"])
    message = draw([records["frontier"]]).texts[0].get_text()
    assert message == f"A tenth of the memory for linear inputs: {float(f'{100 * tenth:.2g}'):g}% more gradient noise"


@pytest.mark.parametrize("name", RECORDS)
def test_no_curve_promises_more_than_was_measured(name, records):
    """Between 4 and 8 bits there is nothing, so the curve is level until all rows in 8 bits fit."""
    best = max(curves(records[name]), key=lambda curve: curve.width)
    eight = next(p for p in records[name]["results"]["points"] if p["family"] == "8 bits rotated")
    four = next(p for p in records[name]["results"]["points"] if p["family"] == "4 bits rotated")
    below = [noise for share, noise in best.points if share < 0.99 * eight["bytes"]]
    assert min(below) == pytest.approx(four["noise"])
    assert (eight["bytes"], four["noise"]) in best.points


def test_the_guide_has_the_tables_of_the_records(records):
    guide = (ROOT / "docs" / "choosing.md").read_text()
    assert settings_table(records["frontier"]) in guide
    for name, record in records.items():
        for masked in (False, True) if record["settings"]["padding"] else (False,):
            assert budget_table(record, masked=masked) in guide, (name, masked)
    for by in ("3 bits", "3 bits rotated"):
        assert worst_layers_table(records["frontier-lm"], by) in guide, by


def test_the_guide_tells_what_rotation_costs_after_relu():
    x = torch.randn(2000, 768, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).relu()
    plain, rotated = (float(rounding_variance(x, 3, rotate).sum() / x.square().sum()) for rotate in (False, True))
    guide = " ".join((ROOT / "docs" / "choosing.md").read_text().split())
    told = (
        f"the error of 3 bits has {plain:.3f} of the values' sum of squares without rotation and {rotated:.3f} with it"
    )
    assert told in guide


def test_the_worst_layers_are_named_with_the_worst_first(records):
    layers = records["frontier-lm"]["results"]["layers"]
    lines = worst_layers_table(records["frontier-lm"], "3 bits").splitlines()
    assert len(lines) == 7
    assert lines[2].startswith(f"| `{max(layers, key=lambda name: layers[name]['3 bits'])}` |")


@pytest.mark.parametrize("name", [*RECORDS, "frontier-first-generation"])
def test_a_record_tells_no_path(name):
    text = (REPORTS / f"{name}.json").read_text()
    assert not re.search(r'"/|/tmp|/home|/work|/root', text)


def test_the_records_are_what_their_names_say(records):
    kinds = {name: (record["settings"]["layers"], record["settings"]["dtype"]) for name, record in records.items()}
    assert kinds == {
        "frontier": (36, "float32"),
        "frontier-bfloat16": (36, "bfloat16"),
        "frontier-lm": (210, "float32"),
        "frontier-lm-bfloat16": (210, "bfloat16"),
    }
    for record in records.values():
        names = set(record["results"]["layers"])
        assert all(point["worst"] in names for point in record["results"]["points"])


def test_the_noise_that_recommended_goes_by_is_that_of_the_record(records):
    points = records["frontier"]["results"]["points"]
    found = {
        (p["config"]["bits"], p["config"]["rotate"]): p["noise"]
        for p in points
        if "bits" in p["config"] and p["config"]["ratio"] == 1 and not p["config"]["center"] and not p["masked"]
    }
    assert set(found) == set(ROUNDING_NOISE)
    for way, noise_of_record in found.items():
        assert ROUNDING_NOISE[way] == pytest.approx(noise_of_record, rel=0.1), way


@pytest.mark.parametrize("name", RECORDS)
def test_recommended_is_the_least_noise_of_the_record(name, records):
    """The rule chooses by an encoder's mean in fp32; on the other records it must be as good."""
    dtype = getattr(torch, records[name]["settings"]["dtype"])
    for budget, points in records[name]["results"]["budgets"].items():
        noises = {(p["config"]["bits"], p["config"]["rotate"]): p["noise"] for p in points if not p["masked"]}
        best = SketchConfig.recommended(float(budget), dtype)
        assert noises[best.bits, best.rotate] == pytest.approx(min(noises.values()), rel=0.01), budget


@pytest.fixture(scope="module")
def encoder():
    """Return MiniLM, trained on MRPC; its activations are collected in the type that a test asks for."""
    pytest.importorskip("transformers")
    weights = os.environ.get("BACKSKETCH_WEIGHTS")
    if weights is None or not (Path(weights) / "minilm-l6").is_dir():
        pytest.skip("BACKSKETCH_WEIGHTS must name a folder with minilm-l6 in it")
    if not MRPC.exists():
        pytest.skip("the GLUE files are not there")
    columns = ["Quality", "#1 String", "#2 String"]
    subject = find_subject(Path(weights) / "minilm-l6", MRPC, columns)
    train(subject)
    return subject


@pytest.fixture(scope="module")
def encoder_layers(encoder):
    return token_layers(collect(encoder))


@pytest.fixture(scope="module")
def encoder_layers_bfloat16(encoder, encoder_layers):  # after those in fp32, since the model stays in bf16
    return token_layers(collect(encoder, dtype=torch.bfloat16))


def best_within(keep, layers, *, masked):
    """Return the point of the rotated setting with the least noise within a budget, and check its worst layer."""
    choices = [choice for choice in within(keep, layers[0].x.element_size(), padded=True) if choice.config.rotate]
    best = min(measure(layers, [choice for choice in choices if choice.masked is masked]), key=lambda p: p.noise)
    assert best.bytes <= keep * 1.005
    assert best.most <= 3 * best.noise, best.worst
    return best


@pytest.mark.slow
@pytest.mark.parametrize(("keep", "masked", "most"), [(0.1, False, 0.055), (0.1, True, 0.01), (0.05, True, 0.25)])
def test_few_bits_reach_their_targets_in_fp32(keep, masked, most, encoder_layers):
    assert len(encoder_layers) == 36
    assert best_within(keep, encoder_layers, masked=masked).noise <= most


@pytest.mark.slow
@pytest.mark.parametrize(("keep", "most"), [(0.2, 0.06), (0.1, 0.8)])
def test_few_bits_reach_their_targets_in_bf16(keep, most, encoder_layers_bfloat16):
    assert {layer.x.dtype for layer in encoder_layers_bfloat16} == {torch.bfloat16}
    assert best_within(keep, encoder_layers_bfloat16, masked=False).noise <= most


@pytest.mark.slow
def test_the_paper_adds_two_hundred_times_as_much(encoder_layers):
    (paper,) = measure(encoder_layers, [Choice("paper", SketchConfig(kind="gaussian", ratio=0.1))])
    assert paper.noise >= 8
    assert paper.noise >= 200 * best_within(0.1, encoder_layers, masked=False).noise


@pytest.mark.slow
def test_leaving_padding_out_pays(encoder_layers):
    rows = SketchConfig(ratio=0.1)
    padding = 1 - float(encoder_layers[0].valid.double().mean())
    assert 0.25 < padding < 0.4
    whole, masked = measure(encoder_layers, [Choice("rows", rows), Choice("rows mask", rows, masked=True)])
    assert masked.noise <= 0.65 * whole.noise
    assert masked.noise == pytest.approx((1 - padding) / 0.1 - 1, rel=0.02)
