"""profile with ``rest``: the whole step before and after, by family, to the byte of what is then held."""

import pytest
import torch

from backsketch import RestConfig, profile, saved_memory, sketch_
from backsketch.rest.packing_modules import rest_of
from small import gpt2, llama, roberta


@pytest.mark.parametrize("make", [roberta, gpt2, llama])
def test_the_profile_tells_what_is_then_held(make):
    model, batch = make(hidden_size=128) if make is not gpt2 else make()
    found = profile(model, **batch, rest=True)
    assert rest_of(model) is None  # the model is as it was
    sketch_(model, profile=found, rest=True).train()
    torch.manual_seed(0)
    with saved_memory(model) as saved:
        loss = model(**batch).loss
    assert saved.activations == found.kept_after
    assert found.kept_after < 0.5 * found.kept_before
    assert found.peak_after.total < found.peak_before.total
    del loss
    families = {family.name: family for family in found.families}
    assert {"product", "attention", "norm"} <= families.keys()
    assert all(family.after < family.before for family in found.families if family.before > 2**16)
    assert sum(family.before for family in found.families) <= found.kept_before
    assert "product: " in str(found)


def test_a_rest_that_is_on_is_measured_without_asking():
    model, batch = llama()
    sketch_(model, rest=True)
    found = profile(model, **batch)
    assert found.rest == rest_of(model) is not None
    assert found.families
    assert not profile(sketch_(llama()[0]), **batch).families


def test_on_the_meta_device():
    with torch.device("meta"):
        model, batch = llama(hidden_size=256)
    found = profile(model, **batch, rest=RestConfig(norm=4))
    assert found.kept_after < 0.5 * found.kept_before
    assert {"pointwise", "product", "attention", "norm", "other"} <= {family.name for family in found.families}
