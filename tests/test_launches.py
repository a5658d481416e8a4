"""Launches and bytes are counted by known rules, to the byte, and estimates follow from them."""

import json

import pytest
import torch
import torch.nn.functional as F

from backsketch import SketchConfig
from backsketch.fitting.launch_counter import Kernel, LaunchCounter
from backsketch.fitting.roofline import ACCELERATORS, LAUNCH
from backsketch.storage.packing import without_fused_kernels
from backsketch.storage.sizes import stored_bytes
from backsketch_bench import launches
from backsketch_bench.launch_subjects import SUBJECTS

ROWS, FEATURES, OUTPUTS = 64, 32, 16
FLOAT = 4

pytest.importorskip("transformers")
needs_fused = pytest.mark.skipif(launches.FUSED not in launches.paths(), reason="there is no fused path")


def meta(*shape, **options):
    return torch.empty(*shape, device="meta", **options)


def counted(run):
    with LaunchCounter() as counter:
        run()
    return counter


def test_a_linear_layer_is_three_products_and_a_sum():
    x, weight, bias = (
        meta(*shape, requires_grad=True) for shape in ((ROWS, FEATURES), (OUTPUTS, FEATURES), (OUTPUTS,))
    )
    found = counted(lambda: F.linear(x, weight, bias).backward(meta(ROWS, OUTPUTS)))
    assert found.by_operator() == {"mm": 2, "addmm": 1, "sum": 1}
    x_size, weight_size, y_size = ROWS * FEATURES, OUTPUTS * FEATURES, ROWS * OUTPUTS
    products = 3 * (x_size + weight_size + y_size) + OUTPUTS
    assert found.bytes == FLOAT * (products + y_size + OUTPUTS)
    assert found.flops == 3 * 2 * ROWS * FEATURES * OUTPUTS


CASES = {
    "views": (lambda x: x.view(-1).detach().unsqueeze(0).expand(3, -1)[1:].t(), 0, 0),
    "room": (lambda x: x.new_empty(5), 0, 0),
    "nothing to compute": (lambda x: x[:0].clone(), 0, 0),
    "a step on the host": (lambda x: torch.randint(9, (4,)).add_(1), 0, 0),
    "in place": (lambda x: x.add_(1), 1, 2 * 2048 * FLOAT),
    "out of place": (lambda x: x + 1, 1, 2 * 2048 * FLOAT),
    "an operand twice": (lambda x: x * x, 1, 2 * 2048 * FLOAT),
    "an expanded operand": (lambda x: x + x[:1].expand_as(x), 1, (2 * 2048 + 32) * FLOAT),
    "chosen rows": (lambda x: x.index_select(0, meta(10, dtype=torch.int64)), 1, 2 * 320 * FLOAT + 10 * 8),
    "a copy": (lambda x: x.copy_(meta(64, 32, dtype=torch.bfloat16)), 1, 2048 * (FLOAT + 2)),
    "a fill": (lambda x: x.fill_(1), 1, 2048 * FLOAT),
    "zeros like another": (lambda x: torch.zeros_like(x), 1, 2048 * FLOAT),
    "another type": (lambda x: x.to(torch.bfloat16), 1, 2048 * (FLOAT + 2)),
    "the largest": (lambda x: x.view(-1).topk(10), 1, 2048 * FLOAT + 10 * (FLOAT + 8)),
    "to their places": (lambda x: x[0].scatter_(0, meta(8, dtype=torch.int64), x[1, :8]), 1, 8 * 8 + 2 * 8 * FLOAT),
    "a number to places": (lambda x: x[0].scatter_(0, meta(8, dtype=torch.int64), 1.0), 1, 8 * 8 + 8 * FLOAT),
    "a product onto nothing": (lambda x: meta(64, 64).addmm_(x, x.t(), beta=0), 1, (2 * 2048 + 4096) * FLOAT),
    "a product added": (lambda x: meta(64, 64).addmm_(x, x.t()), 1, (2 * 2048 + 2 * 4096) * FLOAT),
    "rows added": (lambda x: x.index_add_(0, meta(2, dtype=torch.int64), x[:2]), 1, 2 * 8 + 3 * 64 * FLOAT),
}


@pytest.mark.parametrize(("run", "kernels", "size"), CASES.values(), ids=CASES)
def test_an_operator_counts_what_it_moves(run, kernels, size):
    x = meta(64, 32)
    found = counted(lambda: run(x))
    assert (found.launches, found.bytes) == (kernels, size)


def test_a_kernel_takes_the_longest_of_launch_bytes_and_flops():
    device = ACCELERATORS["A100"]
    assert device.seconds([Kernel("add", 8, 0, torch.float32)] * 3) == pytest.approx(3 * LAUNCH)
    assert device.seconds([Kernel("add", 2039 * 10**9, 0, torch.float32)]) == pytest.approx(1)
    products = [Kernel("mm", 8, 312 * 10**12, dtype) for dtype in (torch.bfloat16, torch.float32)]
    assert [device.seconds([product]) for product in products] == pytest.approx([1, 2])


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
@pytest.mark.parametrize("dtype", launches.DTYPES.values(), ids=launches.DTYPES)
def test_rows_launch_more_and_move_less(subject, dtype):
    exact, rows = (launches.count(subject, dtype, config) for config in (None, SketchConfig(ratio=0.1)))
    assert rows.launches > exact.launches
    assert rows.bytes < exact.bytes
    assert rows.flops < exact.flops


def test_each_way_and_path_has_an_entry_relative_to_exact():
    found = list(launches.entries(SUBJECTS[0], "bfloat16"))
    exact, rows, *stored = found
    assert [exact["way"], rows["way"]] == ["exact", "rows at 0.1"]
    assert set(exact["estimated_time"].values()) == {1.0}
    assert len(stored) == 9 * len(launches.paths())
    assert {entry["path"] for entry in stored} == set(launches.paths())


def test_the_record_is_drawn_and_shown(tmp_path):
    pytest.importorskip("matplotlib")
    from backsketch_bench.launches_figure import write_launches_figure
    from backsketch_bench.launches_table import tables

    path = tmp_path / "launches.json"
    found = launches.run(path, SUBJECTS[1:2])
    record = json.loads(path.read_text())
    assert record["results"] == found
    assert record["settings"]["accelerators"]["H100"]["bandwidth"] == 3350e9
    assert [title for title, _ in tables(found)] == ["4096 x 3072 -> 768, float32", "4096 x 3072 -> 768, bfloat16"]
    assert {written.suffix for written in write_launches_figure(path) if written.stat().st_size} == {".svg", ".png"}


@needs_fused
@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("dtype", launches.DTYPES.values(), ids=launches.DTYPES)
def test_fused_kernels_launch_twice_and_move_rows_once(dtype, rotate):
    subject = SUBJECTS[1]
    exact = launches.count(subject, dtype, None)
    fused = launches.count(subject, dtype, SketchConfig(ratio=1.0, bits=4, rotate=rotate))
    added = {name: fused.by_operator().get(name) for name in ("pack_rows", "unpack_rows")}
    assert added == {"pack_rows": 1, "unpack_rows": 1}
    assert fused.launches == exact.launches + 2
    rows, packed = 4096 * 3072 * dtype.itemsize, stored_bytes(4096, 3072, 4, dtype.itemsize)
    assert fused.bytes == exact.bytes + 2 * (rows + packed)


@pytest.mark.parametrize("subject", SUBJECTS[1:3], ids=lambda subject: subject.name)
@pytest.mark.parametrize("dtype", launches.DTYPES.values(), ids=launches.DTYPES)
def test_the_recommended_setting_takes_few_launches_and_little_traffic(subject, dtype):
    config, exact = SketchConfig.recommended(dtype=dtype), launches.count(subject, dtype, None)
    with without_fused_kernels():
        assert launches.count(subject, dtype, config).launches - exact.launches <= 60
    if launches.FUSED in launches.paths():
        fused = launches.count(subject, dtype, config)
        size = {4096: 4096 * 3072, 65536: 65536 * 1024}[int(subject.name.split()[0])] * dtype.itemsize
        assert fused.launches - exact.launches <= 12
        assert fused.bytes - exact.bytes <= 2.5 * size
