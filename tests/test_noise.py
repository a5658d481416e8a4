"""The closed forms against Monte Carlo, against the dense transform, and against the paper."""

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from backsketch import SKETCHES, SketchConfig, noise
from backsketch.linear.keeping import keep
from backsketch.linear.weight_gradient import weight_gradient
from backsketch.sketches import Blocked, BlockKind, make_sketch

ROWS = 26  # no power of two, divisible neither by the block nor by the number of blocks
BLOCK = 8
STANDARD_ERRORS = 5
BLOCKED = [kind for kind, cls in SKETCHES.items() if issubclass(cls, BlockKind)]
FORMS = [(kind, None) for kind in SKETCHES] + [(kind, BLOCK) for kind in BLOCKED]
RATIOS = [0.1, 0.25, 0.5]


def independent(rows, generator):
    return torch.randn(rows, 4, generator=generator), torch.randn(rows, 3, generator=generator)


def common_mean(rows, generator):
    x, y = independent(rows, generator)
    return x + 2, y - 1.5


def heavy_tailed(rows, generator):
    x, y = independent(rows, generator)
    weight = torch.rand(rows, 1, generator=generator).add(0.05).pow(-1)
    return x * weight, y * weight.flip(0).roll(3, 0) + x[:, :3]


REGIMES = [independent, common_mean, heavy_tailed]


def data(regime, rows=ROWS) -> tuple[Tensor, Tensor]:
    x, y = regime(rows, torch.Generator().manual_seed(3))
    return x.double(), y.double()


@cache
def matrices(config, rows, draws):
    """Draw S S^T many times, through the sketch's own code: (draws, rows, rows)."""
    identity = torch.eye(rows, dtype=torch.float64)
    dim = config.dim_for(rows)
    s = torch.stack(
        [make_sketch(config.kind, rows, dim, seed, config.block).project(identity) for seed in range(draws)]
    )
    return s.mT @ s


def monte_carlo(x, y, config, draws):
    """Return the mean of ‖Ĝ − XᵀY‖² over draws and its standard error."""
    errors = (x.T @ matrices(config, len(x), draws) @ y - x.T @ y).square().sum((1, 2))
    return errors.mean(), errors.std() / draws**0.5


def assert_matches(x, y, config, draws):
    mean, error = monte_carlo(x, y, config, draws)
    exact = noise.sketch_variance(x, y, config)
    assert abs(mean - exact) <= STANDARD_ERRORS * error, f"{config}: {mean:.5g} ± {error:.2g}, closed form {exact:.5g}"


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize(("kind", "block"), FORMS)
def test_closed_form_is_the_variance(kind, block, ratio):
    for regime in REGIMES:
        assert_matches(*data(regime), SketchConfig(kind=kind, ratio=ratio, block=block), draws=1000)


@pytest.mark.slow
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize(("kind", "block"), FORMS)
def test_closed_form_is_the_variance_over_many_draws(kind, block, ratio):
    for regime in REGIMES:
        assert_matches(*data(regime, 33), SketchConfig(kind=kind, ratio=ratio, block=block), draws=20_000)
    matrices.cache_clear()


def test_lemma_2_as_printed_fails_the_same_test():
    x, y = data(common_mean)
    config = SketchConfig(kind="gaussian", ratio=0.25)
    mean, error = monte_carlo(x, y, config, 1000)
    printed = noise.paper_variance(x, y, config.dim_for(ROWS))
    assert abs(mean - printed) > STANDARD_ERRORS * error
    assert abs(mean - noise.sketch_variance(x, y, config)) <= STANDARD_ERRORS * error


def dense_variance(x, y, config):
    """Evaluate D² of an orthonormal kind from the matrix H itself, block by block, without using its symmetries."""
    rows, dim = len(x), config.dim_for(len(x))
    cls: Any = SKETCHES[config.kind]
    sketch = make_sketch(config.kind, rows, dim, 0, config.block)
    members = sketch.members() if isinstance(sketch, Blocked) else [(range(rows), dim)]
    height = sketch.height if isinstance(sketch, Blocked) else cls.block_height(rows)
    total = torch.zeros((), dtype=torch.float64)
    for member, k in members:
        a, b = x[list(member)], y[list(member)]
        squares = cls.matrix(height, x.device).double().square()[:, : len(member)]
        m = squares.T @ squares
        gram = (a @ a.T) * (b @ b.T)
        share = k / height
        both = k * (k - 1) / (height * (height - 1)) if height > 1 else 0.0
        off = (share - both) * m * (1 - torch.eye(len(member), dtype=torch.float64))
        total += (off * (torch.outer(a.square().sum(1), b.square().sum(1)) + gram)).sum() / share**2
        total += (((share - both) * m + both - share**2) * gram).sum() / share**2
    return total


@pytest.mark.parametrize("kind", ["cosine", "fourier", "hadamard"])
def test_transform_forms_equal_the_dense_sum(kind):
    for rows in (2, 3, 4, 5, 8, 9, 12, 31):
        x, y = data(common_mean, rows)
        for dim in range(1, rows):
            for block in (None, 1, 2, 3, 4, 7):
                config = SketchConfig(kind=kind, dim=dim, block=block)
                expected = dense_variance(x, y, config)
                scale = x.square().sum() * y.square().sum()
                # the dense matrix is fp32
                assert abs(noise.sketch_variance(x, y, config) - expected) <= 1e-6 * scale, (rows, config)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(2, 40),
    features=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    share=st.floats(0.01, 0.99),
    shift=st.floats(-100, 100),
    seed=st.integers(0, 2**31),
)
def test_rows_add_the_noise_of_the_batch_times_one_over_ratio_minus_one(rows, features, share, shift, seed):
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(rows, n, generator=generator, dtype=torch.float64) for n in features)
    x = x + shift
    config = SketchConfig(kind="rows", dim=max(1, int(share * rows)))
    ratio = config.dim / rows
    expected = (1 / ratio - 1) * noise.sgd_variance(x, y)
    torch.testing.assert_close(noise.sketch_variance(x, y, config), expected, rtol=1e-6, atol=0)


def test_sgd_variance_is_the_spread_of_the_rows_gradients():
    x, y = data(heavy_tailed)
    per_row = x.unsqueeze(2) * y.unsqueeze(1)
    # The gradient is the sum over the batch, so its variance is that of one row's times the number of rows.
    expected = ROWS * per_row.var(0, correction=1).sum()
    torch.testing.assert_close(noise.sgd_variance(x, y), expected)


@pytest.mark.parametrize("kind", SKETCHES)
@pytest.mark.parametrize("block", [None, BLOCK])
def test_whole_batch_adds_nothing(kind, block):
    assert noise.sketch_variance(*data(independent), SketchConfig(kind=kind, ratio=1.0, block=block)) == 0


@pytest.mark.parametrize("epsilon", [1.0, 0.1, 1e-3])
def test_papers_example_has_no_bound_on_the_ratio(epsilon):
    x = torch.tensor([[1.0, 0.0], [-epsilon, 0.0]], dtype=torch.float64)
    y = torch.tensor([[1.0, 0.0], [1 / epsilon, 0.0]], dtype=torch.float64)
    expected = (1 + epsilon**2) * (1 + epsilon**-2) / 4
    assert noise.alignment(x, y) == pytest.approx(0, abs=1e-12)
    assert noise.paper_ratio(x, y, 1) == pytest.approx(expected, rel=1e-6)
    assert noise.sketch_variance(x, y, SketchConfig(kind="rows", dim=1)) == pytest.approx(4)  # no bad case for rows


def test_counterexample_to_theorem_1():
    x, y = torch.tensor([[1.0], [2.0]]).double(), torch.tensor([[1.0], [0.6]]).double()
    assert noise.paper_ratio(x, y, 1) == pytest.approx(49)
    assert noise.paper_bound(x, y) == pytest.approx(2.4, abs=0.01)
    assert noise.paper_ratio(x, y, 1) > noise.paper_bound(x, y)


def test_alignment_is_between_orthogonal_and_proportional():
    assert noise.alignment(torch.eye(2), torch.eye(2).flip(0)) == pytest.approx(0.5)
    assert noise.alignment(torch.ones(5, 2), torch.ones(5, 3)) == pytest.approx(1)
    assert noise.alignment(torch.tensor([[1.0], [1.0]]), torch.tensor([[1.0], [-1.0]])) == 0


def test_leading_dimensions_and_low_precision_are_taken_as_rows_in_fp64():
    x, y = torch.randn(2, 3, 4, 5, dtype=torch.bfloat16), torch.randn(2, 3, 4, 6)
    config = SketchConfig(kind="cosine", ratio=0.25, block=7)
    flat = noise.sketch_variance(x.reshape(-1, 5).double(), y.reshape(-1, 6), config)
    assert flat.dtype == torch.float64
    assert noise.sketch_variance(x, y, config) == flat
    assert noise.sgd_variance(x, y) == noise.sgd_variance(x.reshape(-1, 5).double(), y.reshape(-1, 6))


def test_full_size_transforms_need_no_matrix_of_all_pairs():
    rows, ratio = 1 << 17, 0.1  # a rows x rows matrix would be 128 GiB
    x, y = torch.randn(rows, 2), torch.randn(rows, 2)
    for kind in ("cosine", "fourier", "hadamard"):
        variance = noise.sketch_variance(x, y, SketchConfig(kind=kind, ratio=ratio))
        leading = x.square().sum() * y.square().sum() / (ratio * rows) * (1 - ratio)
        assert variance == pytest.approx(float(leading), rel=0.01)


def test_empty_batch_has_no_added_variance():
    assert noise.sketch_variance(torch.randn(0, 3), torch.randn(0, 2), SketchConfig()) == 0


def test_bad_input_is_named():
    x, y = torch.randn(4, 3), torch.randn(5, 2)
    with pytest.raises(ValueError, match="same number of rows, got 4 and 5"):
        noise.sgd_variance(x, y)
    with pytest.raises(ValueError, match="at least 2 rows"):
        noise.sgd_variance(x[:1], y[:1])


STORED = [
    SketchConfig(kind=kind, block=block, ratio=ratio, bits=bits, center=center)
    for (kind, block), ratio in [*[(form, 0.3) for form in FORMS], (("rows", None), 1.0)]
    for bits, center in [(None, True), (8, False), (4, True), (2, False)]
]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("config", STORED, ids=str)
def test_variance_covers_bits_centring_and_padding(config, padded):
    """Against the library's own passes; rounding of mixed rows is itself a mean over sketches, with 5% to spare."""
    x, y = data(common_mean)
    valid = torch.arange(ROWS) % 3 != 0 if padded else None
    y = y if valid is None else y * valid.unsqueeze(1)
    exact = y.T @ x
    draws = [weight_gradient(keep(x, config, torch.tensor(seed), valid), y, config, 4, valid) for seed in range(600)]
    errors = (torch.stack(draws) - exact).square().sum((1, 2))
    closed = noise.sketch_variance(x, y, config, valid)
    spare = 0.05 * closed if config.bits and config.kind != "rows" else 1e-9
    assert abs(errors.mean() - closed) <= STANDARD_ERRORS * errors.std() / len(errors) ** 0.5 + spare


def test_centring_takes_the_mean_out_of_the_noise():
    x, y = data(common_mean)
    config = SketchConfig(kind="gaussian", ratio=0.25)
    centred = noise.sketch_variance(x, y, SketchConfig(kind="gaussian", ratio=0.25, center=True))
    torch.testing.assert_close(centred, noise.sketch_variance(x - x.mean(0), y, config))
    assert centred < 0.5 * noise.sketch_variance(x, y, config)


def test_a_mask_of_integers_is_a_mask_and_not_indices():
    x, y = data(common_mean)
    valid = torch.arange(ROWS) % 3 != 0
    config = SketchConfig(ratio=0.25)
    assert noise.sketch_variance(x, y, config, valid.long()) == noise.sketch_variance(x, y, config, valid)
    with pytest.raises(ValueError, match="valid must have one value for each of the 26 rows"):
        noise.sketch_variance(x, y, config, valid[1:])
