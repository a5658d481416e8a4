"""Laws of a sketch, over every kind, full-size and blocked."""

from typing import Any

import pytest
import torch

from backsketch.sketches import SKETCHES, BlockKind, make_sketch
from cases import BLOCK, FORMS, RATIOS, within_five_standard_errors

SIZES = [(24, 1.0), (24, 0.5), (24, 0.1), (29, 0.5), (29, 0.1), (19, 0.9)]
TRANSFORMS = ["cosine", "fourier", "hadamard"]


def dense(sketch):
    """Return S itself: (rows, dim)."""
    return sketch.project(torch.eye(sketch.rows, dtype=torch.float64)).t()


def dim_of(rows, ratio):
    return max(1, round(ratio * rows))


@pytest.mark.parametrize(("rows", "ratio"), SIZES)
@pytest.mark.parametrize(("kind", "block"), FORMS)
def test_mean_of_s_s_transposed_is_the_identity(kind, block, rows, ratio):
    matrices = [dense(make_sketch(kind, rows, dim_of(rows, ratio), seed, block)) for seed in range(1500)]
    samples = torch.stack([matrix @ matrix.t() for matrix in matrices])
    assert within_five_standard_errors(samples, torch.eye(rows, dtype=torch.float64))


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize(("kind", "block"), FORMS)
def test_the_seed_is_the_whole_random_state(kind, block, ratio):
    x = torch.randn(60, 5)
    make = lambda seed: make_sketch(kind, 60, dim_of(60, ratio), seed, block)  # noqa: E731
    first = make(7).project(x)
    torch.randn(3)  # other draws do not disturb it, and it disturbs none
    state = torch.get_rng_state()
    assert torch.equal(make(7).project(x), first)
    assert torch.equal(torch.get_rng_state(), state)
    assert ratio == 1.0 or not torch.equal(make(8).project(x), first)


@pytest.mark.parametrize(("kind", "block"), FORMS)
def test_projects_linearly_and_the_same_for_any_width_and_layout(kind, block):
    sketch = make_sketch(kind, 61, 13, 3, block)
    matrix = dense(sketch)
    for features in (1, 2, 7, 300):
        x = torch.randn(features, 61, dtype=torch.float64).t()  # column-major on purpose
        torch.testing.assert_close(sketch.project(x), matrix.t() @ x, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("kind", "block"), FORMS)
def test_is_the_same_matrix_in_every_dtype(kind, block, dtype):
    sketch = make_sketch(kind, 50, 20, 11, block)
    x = torch.randn(50, 6, dtype=torch.float64)
    out = sketch.project(x.to(dtype))
    assert out.dtype == dtype
    tolerance = 50 * torch.finfo(dtype).eps if dtype != torch.float64 else 1e-6
    torch.testing.assert_close(out.double(), sketch.project(x), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kind", SKETCHES)
@pytest.mark.parametrize("block", [None, BLOCK])
def test_all_rows_kept_is_exact(kind, block):
    x = torch.randn(40, 3)
    assert torch.equal(make_sketch(kind, 40, 40, 5, block).project(x), x)


@pytest.mark.parametrize("height", [1, 2, 3, 8, 13, 64])
@pytest.mark.parametrize("kind", TRANSFORMS)
def test_fast_transform_is_the_orthonormal_matrix(kind, height):
    cls: Any = SKETCHES[kind]
    height = cls.block_height(height)
    matrix = cls.matrix(height, torch.device("cpu")).double()
    torch.testing.assert_close(matrix @ matrix.t(), torch.eye(height, dtype=torch.float64), atol=1e-6, rtol=0)
    x = torch.randn(5, height, dtype=torch.float64)
    chosen = torch.randperm(height)
    torch.testing.assert_close(cls.transform(x, chosen), x @ matrix[chosen].t(), atol=1e-6, rtol=0)


def test_transforms_match_scipy():
    fft = pytest.importorskip("scipy.fft")
    x = torch.randn(4, 21, dtype=torch.float64)
    chosen = torch.arange(21)
    expected = torch.from_numpy(fft.dct(x.numpy(), norm="ortho"))
    cosine: Any = SKETCHES["cosine"]
    torch.testing.assert_close(cosine.transform(x, chosen), expected)


@pytest.mark.parametrize(("rows", "dim"), [(130, 13), (129, 64), (40, 3), (41, 40), (1000, 1)])
@pytest.mark.parametrize("kind", [kind for kind, cls in SKETCHES.items() if issubclass(cls, BlockKind)])
def test_blocks_cover_all_rows_and_outputs_once(kind, rows, dim):
    sketch: Any = make_sketch(kind, rows, dim, 1, BLOCK)
    members = sketch.members()
    assert sorted(row for block, _ in members for row in block) == list(range(rows))
    assert sum(outputs for _, outputs in members) == dim
    assert max(len(block) for block, _ in members) - min(len(block) for block, _ in members) <= 1
    matrix, start = dense(sketch), 0
    for block, outputs in members:  # S is block diagonal, outputs in the order of the blocks
        inside = torch.zeros(rows, dtype=torch.bool)
        inside[list(block)] = True
        assert not matrix[~inside, start : start + outputs].any()
        start += outputs


def test_hash_is_balanced():
    matrix = dense(make_sketch("hash", 47, 10, 2))
    assert torch.equal(matrix.abs().sum(1), torch.ones(47, dtype=torch.float64))
    assert set(matrix.abs().sum(0).tolist()) == {4.0, 5.0}


def test_rows_are_distinct_rows_of_the_input():
    x = torch.randn(50, 4)
    kept = make_sketch("rows", 50, 20, 3).compress(x)
    matches = (kept.unsqueeze(1) == x).all(-1)
    assert matches.sum(1).eq(1).all()
    assert matches.sum(0).le(1).all()


@pytest.mark.parametrize(("kind", "block"), [*[(kind, 128) for kind in SKETCHES], *[(kind, None) for kind in SKETCHES]])
def test_many_rows_in_slabs(kind, block):
    """At sizes where the sketch works slab by slab, S must still be S: ‖Sᵀx‖² is ‖x‖² on average."""
    x = torch.randn(5000, 40)
    out = make_sketch(kind, 5000, 500, 9, block).project(x)
    assert out.shape == (500, 40)
    assert (out.square().sum() / x.square().sum()).item() == pytest.approx(1, abs=0.1)
