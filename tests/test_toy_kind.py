"""A kind of sketch is one file and one line: a toy kind that is only registered passes every law there is."""

import pytest
import torch
from torch import Tensor, nn

from backsketch import SKETCHES, NoiseMonitor, SketchConfig, cost, noise, plan, profile, sketch_, sketched_linear
from backsketch.sketches import Sketch
from backsketch.sketches.law import Law, RowBlocks
from cases import gradients, within_five_standard_errors

ROWS, IN, OUT, DRAWS = 24, 10, 6, 3000


class Replaced(Sketch):
    """Uniform rows *with* replacement, in the order drawn: (B·C − g) / k."""

    __slots__ = ()

    mixes_rows = False

    @property
    def gain(self) -> float:
        return self.rows / self.dim

    @classmethod
    def law(cls, blocks: RowBlocks, dim: int) -> Law:
        return Law(energy=0.0, coincidence=blocks.rows / dim, product=-1 / dim)

    @classmethod
    def noise_growth(cls, rows: int, dim: int) -> float:
        return rows / dim

    def compress(self, x: Tensor) -> Tensor:
        drawn = (self.draws(x.device).keys(self.dim) >> 31) % self.rows
        return x.index_select(0, drawn)

    def flops(self, features: int) -> int:
        return 7 * self.dim * features

    def helper_bytes(self, features: int) -> int:
        return 8 * self.dim


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SKETCHES, "toy", Replaced)


CONFIGS = [{"ratio": 0.25}, {"dim": 7}, {"ratio": 0.25, "center": True}, {"ratio": 0.5, "bits": 4}]


def problem() -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, IN) + 0.5, torch.randn(ROWS, OUT) + 0.3


@pytest.mark.parametrize("fields", CONFIGS, ids=str)
def test_it_is_unbiased_with_the_variance_of_its_law(fields):
    config = SketchConfig(kind="toy", **fields)
    (x, y), weight = problem(), torch.randn(OUT, IN)
    samples = torch.stack(
        [gradients(lambda x, w, b: sketched_linear(x, w, b, config), x, weight, None, y)[2] for _ in range(DRAWS)]
    )
    exact = y.t() @ x
    assert within_five_standard_errors(samples, exact)
    errors = (samples - exact).double().square().sum((1, 2))
    assert within_five_standard_errors(errors, noise.sketch_variance(x, y, config))


def test_it_has_a_cost_of_its_own():
    config = SketchConfig(kind="toy", dim=6)
    exact, found = cost(None, ROWS, IN, OUT), cost(config, ROWS, IN, OUT)
    assert found.forward - exact.forward == 7 * 6 * IN
    assert found.transient == 8 * 6


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(IN, 64), nn.GELU(), nn.Linear(64, OUT))


def test_a_profile_and_a_plan_are_made_with_it_by_its_own_law():
    model, x = network(), torch.randn(64, IN)
    found = profile(model, x, config=SketchConfig(kind="toy", ratio=0.25))
    assert found.pays == ("0", "2")
    planned = plan(
        model, x, budget="50%", config=SketchConfig(kind="toy"), bits=(None,), loss=lambda out: out.square().sum()
    )
    (of_second,) = (part for part in planned.parts if part.layers == ("2",))
    assert of_second.config is not None
    assert of_second.config.kind == "toy"
    hidden = model[1](model[0](x)).detach()
    y = 2 * model[2](hidden).detach()
    expected = float(noise.sketch_variance(hidden, y, of_second.config))
    assert of_second.noise == pytest.approx(expected, rel=1e-5)


def test_it_is_monitored():
    model, x = sketch_(network(), SketchConfig(kind="toy", ratio=0.25)), torch.randn(64, IN)
    with NoiseMonitor(model) as monitor:
        for _ in range(200):
            model(x).sum().backward()
            monitor.step()
    layer = [record for record in monitor.to_records() if record["layer"] == "0"]
    added = torch.tensor([record["sketch_variance"] for record in layer])
    assert len(layer) == 200
    assert (added > 0).all()


def test_a_kind_without_a_law_or_a_cost_cannot_be_drawn():
    class Unfinished(Sketch):
        __slots__ = ()

        def compress(self, x: Tensor) -> Tensor:
            return x

    with pytest.raises(TypeError, match=r"abstract methods? '?flops'?, '?helper_bytes'?, '?law"):
        Unfinished(4, 2, 0)  # type: ignore[abstract]
