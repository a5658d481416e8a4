"""RestConfig: its fields, what ``rest=`` may be, and what is refused."""

import dataclasses
import pickle

import numpy
import pytest

from backsketch import RestConfig
from backsketch.rest.rest_config import FAMILIES


def test_defaults_are_the_recommended_setting():
    assert dataclasses.asdict(RestConfig()) == {
        "pointwise": 3,
        "product": 4,
        "attention": 8,
        "norm": 8,
        "other": 8,
        "checkpoint": None,
        "min_elements": 4096,
    }
    assert RestConfig.recommended() == RestConfig()


def test_is_keyword_only_frozen_hashable_and_picklable():
    with pytest.raises(TypeError):
        RestConfig(3)  # type: ignore[call-arg]
    config = RestConfig(norm=None, checkpoint=8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.norm = 8  # type: ignore[misc]
    assert hash(config) == hash(RestConfig(norm=None, checkpoint=8))
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize("name", [*FAMILIES, "checkpoint"])
@pytest.mark.parametrize("bits", [8, 4, 3, 2, None])
def test_every_number_of_bits_can_be_given(name, bits):
    assert getattr(RestConfig(**{name: bits}), name) == bits


@pytest.mark.parametrize("name", [*FAMILIES, "checkpoint"])
@pytest.mark.parametrize("bits", [0, 1, 5, 16, -8, True, False, 8.0, "8"])
def test_other_bits_are_refused_by_name(name, bits):
    with pytest.raises(ValueError, match="must be None or one of") as caught:
        RestConfig(**{name: bits})
    assert str(caught.value) == f"{name} must be None or one of (8, 4, 3, 2), got {bits!r}"


@pytest.mark.parametrize(
    ("value", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), (None, TypeError), (True, TypeError)]
)
def test_min_elements_is_a_positive_integer(value, error):
    with pytest.raises(error, match=f"min_elements must be a positive integer, got {value!r}"):
        RestConfig(min_elements=value)


def test_integers_of_other_types_become_plain_ones():
    config = RestConfig(norm=numpy.int64(4), min_elements=numpy.int64(7))
    assert (type(config.norm), type(config.min_elements)) == (int, int)
    assert RestConfig.of(numpy.int64(8)) == RestConfig.of(8)


def test_what_rest_may_be():
    config = RestConfig(attention=4)
    assert RestConfig.of(None) is None
    assert RestConfig.of(True) == RestConfig.recommended()
    assert RestConfig.of(config) is config


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_a_number_of_bits_is_that_of_every_family(bits):
    assert RestConfig.of(bits) == RestConfig(pointwise=bits, product=bits, attention=bits, norm=bits, other=bits)


@pytest.mark.parametrize("rest", ["8", 8.0, [8], RestConfig])
def test_what_rest_may_not_be(rest):
    with pytest.raises(TypeError, match="rest must be None, True, a number of bits or a RestConfig, got"):
        RestConfig.of(rest)


def test_false_is_refused_with_what_to_do_instead():
    with pytest.raises(TypeError, match="got False; None leaves everything else as it is now, and unsketch_ switches"):
        RestConfig.of(False)


@pytest.mark.parametrize("rest", [0, 1, 5, 16, -4])
def test_a_number_of_bits_that_cannot_be_stored_is_refused(rest):
    with pytest.raises(ValueError, match=rf"rest as a number of bits must be one of \(8, 4, 3, 2\), got {rest}"):
        RestConfig.of(rest)


def test_as_text_it_names_what_differs():
    assert str(RestConfig()) == "recommended"
    assert RestConfig().in_words() == "pointwise 3 bits, product 4, attention 8, norm 8, other 8"
    partly = RestConfig(pointwise=None, norm=None, checkpoint=8)
    assert partly.in_words() == "pointwise as it is, product 4 bits, attention 8, norm as it is, other 8, checkpoint 8"
    assert str(RestConfig(norm=4, attention=None, min_elements=1)) == "attention=None, norm=4, min_elements=1"
