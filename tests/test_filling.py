"""What whole families leave of a limit is spent on single blocks and layers; the measured total decides."""

from typing import Any

import pytest

from backsketch import RestConfig, SketchConfig
from backsketch.planning.filling import Filling, _with_bits
from backsketch.planning.model_setting import ModelSetting
from backsketch.planning.spending import Point
from backsketch.planning.step_choices import Choice, Family, Found, LinearPart, StepChoices

BLOCKS = ("a", "b", "c", "d")
OWN = {
    "a": 40,
    "b": 10,
    "c": 20,
    "d": 20,
}  # bytes that exact norms add to each block; 10 are outside
WIDE = 15  # bytes that the layer adds exact
ROUGH, EXACT = SketchConfig(ratio=0.5), None
REST = RestConfig(product=None)


class Meter:
    """Knows what each setting keeps: 1000 bytes, and what is added; c takes even more at its peak."""

    def __init__(self, total="kept"):
        self.asked = []
        self.total = total

    def kept(self, setting):
        exact = sum(OWN[name] for name, rest in setting.module_rests.items() if rest.norm is None)
        return 1000 + exact + (0 if "layer" in setting.configs else WIDE)

    def __call__(self, setting):
        self.asked.append(setting)
        return self.kept(setting) + (30 if "c" in setting.module_rests else 0)


def start(blocks=()):
    part = LinearPart(("layer",), [Point(EXACT, 115, 0.0), Point(ROUGH, 100, 0.3)], {})
    norms = Family("norm", {None: 200, 8: 100}, {None: 0.0, 8: 4.0})
    choice = Choice(
        ModelSetting({"layer": ROUGH}, REST, blocks), 0, ((part, part.points[1]),), {"norm": norms.noise[8]}
    )
    return Found(choice, 1000), StepChoices((part,), (norms,), False, blocks)


def test_steps_that_fit_are_taken_by_noise_for_each_byte_and_those_that_do_not_are_left():
    meter: Any = Meter()
    found, choices = start()
    full = Filling(choices, BLOCKS, meter, 1037).filled(found)
    setting = full.choice.setting
    assert setting.module_rests == dict.fromkeys(["b", "d"], RestConfig(product=None, norm=None))
    assert setting.configs == {"layer": ROUGH}  # which removes less noise per byte
    assert full.total == 1030
    assert full.choice.noise == pytest.approx(4.0 * 0.7 + 0.3)  # 30 of the 100 bytes of the family
    assert [list(each.module_rests) for each in meter.asked] == [["b"], ["b", "c"], ["b", "d"]]


def test_a_layer_takes_what_no_module_can():
    meter: Any = Meter()
    found, choices = start()
    full = Filling(choices, (), meter, 1015).filled(found)
    assert full.choice.setting.configs == {}
    assert full.total == 1015
    assert full.choice.noise == pytest.approx(4.0)


@pytest.mark.parametrize("limit", [1009, 1000])
def test_what_is_near_enough_stays_and_nothing_is_measured(limit):
    meter: Any = Meter()
    found, choices = start()
    assert Filling(choices, BLOCKS, meter, limit).filled(found) is found
    assert not meter.asked


class PeakElsewhere(Meter):
    """The peak is where nothing counts of what is kept, but for a: without its packed copy less is there."""

    def __call__(self, setting):
        self.asked.append(setting)
        return 900 if set(setting.module_rests) >= set(BLOCKS) else 1000


def test_steps_that_are_free_at_the_peak_are_taken_but_not_far_below_the_limit():
    meter: Any = PeakElsewhere("peak")
    found, choices = start()
    full = Filling(choices, BLOCKS, meter, 1000).filled(found)
    assert full.total == 1000  # all four blocks would lower it to 900
    assert len(full.choice.setting.module_rests) == 3
    assert full.choice.noise < found.choice.noise
    alone: Any = PeakElsewhere("kept")
    assert Filling(choices, BLOCKS, alone, 1000).filled(found) is found


def test_a_module_around_others_leaves_them_what_they_have():
    inner = _with_bits("a.part", "norm", None, {}, REST)
    both = _with_bits("a", "attention", None, inner, REST)
    assert list(both) == ["a", "a.part"]
    assert both["a"] == RestConfig(product=None, attention=None)
    assert both["a.part"] == RestConfig(product=None, attention=None, norm=None)
    assert _with_bits("a.part.own", "norm", 8, both, REST)["a.part.own"] == RestConfig(product=None, attention=None)
    assert _with_bits("a", "norm", None, {"ab": REST}, REST)["ab"] == REST
