"""The ledger's claims: which operation saved which tensor, and what is kept for it."""

from functools import partial

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from backsketch import SketchConfig, plan, profile, saved_memory, sketch_
from backsketch.memory.claims import LinearClaim
from backsketch.memory.recording import record_ledger
from backsketch.torch_private import SHOWS_WHAT_IS_SAVED
from cases import needs_shown_saves

FLOAT = 4
ROWS, WIDTH = 64, 8
CONFIG = SketchConfig(ratio=0.5)


def encode(x):
    return x.to(torch.int8), torch.ones(1)


def compressing():
    return saved_tensors_hooks(encode, lambda kept: kept[0] * kept[1])


class Block(nn.Module):
    """Two layers with an activation between them, of which the second may run under hooks that compress."""

    def __init__(self, compress=False):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)
        self.compress = compress

    def forward(self, x):
        x = self.act(self.up(x))
        if not self.compress:
            return self.down(x)
        with compressing():
            return self.down(x)


def ledger_of(model, x):
    return record_ledger(model, lambda: model(x).exp().sum())


def test_a_claim_names_operation_tensor_and_what_is_kept():
    model, x = Block(), torch.randn(ROWS, WIDTH)
    ledger = ledger_of(model, x)
    found = [(claim.holder, claim.operation, claim.shape, claim.dtype, claim.replaced) for claim in ledger.claims]
    expected = [
        ("act", "Gelu", (ROWS, WIDTH), torch.float32, False),
        ("the loss", "Exp", (ROWS, WIDTH), torch.float32, False),
        ("up", "Addmm", (ROWS, WIDTH), torch.float32, False),
        ("down", "Addmm", (ROWS, WIDTH), torch.float32, False),
    ]
    if not SHOWS_WHAT_IS_SAVED:
        expected = [(holder, "", *rest) for holder, _, *rest in expected]  # type: ignore[misc]
    assert found == expected
    assert [isinstance(claim, LinearClaim) for claim in ledger.claims] == [False, False, True, True]
    assert all(sum(ledger.sizes[key] for key in claim.storages) == x.nbytes for claim in ledger.claims)


@needs_shown_saves
def test_operations_of_all_branches_are_named():
    model, x = Block(), torch.randn(ROWS, WIDTH)
    ledger = record_ledger(model, lambda: (model(x).exp() + model(x).tanh() * model(x).sigmoid()).sum())
    saved = [claim.operation for claim in ledger.claims if claim.holder == "the loss"]
    assert sorted(saved) == ["Exp", "Mul", "Mul", "Sigmoid", "Tanh"]
    assert all(claim.operation for claim in ledger.claims)


def test_a_storage_is_told_by_the_operation_before_the_exact_layer_that_reads_it():
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)), torch.randn(ROWS, WIDTH)
    ledger = ledger_of(model, x)
    (key,) = next(call for call in ledger.calls if call.layer == "2").storages
    assert ledger.others[key] == ("1",)
    assert sorted(claim.holder for claim, _ in ledger.held_elsewhere(["0"])) == ["1", "the loss"]
    alone = ledger.without_other_layers(["2"])
    assert [call.layer for call in alone.calls] == ["2"]
    assert alone.others == ledger.others  # the activation holds it all the same
    assert alone.released({"2": CONFIG}) == 0


@needs_shown_saves
def test_the_profile_tells_which_operations_saved_the_rest():
    model, x = Block(), torch.randn(ROWS, WIDTH)
    found = profile(model, x, config={"up": CONFIG}, loss=lambda out: out.exp().tanh().sum())
    assert found.operations == (("Addmm", x.nbytes), ("Exp", x.nbytes), ("Gelu", x.nbytes), ("Tanh", x.nbytes))
    assert sum(size for _, size in found.operations) == sum(size for _, size in found.elsewhere)


def test_what_hooks_keep_instead_is_claimed_for_the_tensor_they_were_given():
    model, x = Block(compress=True), torch.randn(ROWS, WIDTH)
    ledger = ledger_of(model, x)
    claims = [claim for claim in ledger.claims if claim.replaced]
    assert {claim.holder for claim in claims} == {"down"}
    sizes = {claim.shape: sum(ledger.sizes[key] for key in claim.storages) for claim in claims}
    assert sizes == {(ROWS, WIDTH): ROWS * WIDTH + FLOAT, (WIDTH, WIDTH): WIDTH * WIDTH + FLOAT}  # its input and weight
    assert [call.layer for call in ledger.calls] == ["up"]
    assert ledger.hooked == {"down"}


def test_a_layer_under_hooks_is_left_alone_and_says_why():
    model, x = Block(compress=True), torch.randn(ROWS, WIDTH)
    found = profile(model, x, config=CONFIG, loss=lambda out: out.sum())
    with saved_memory(model) as saved:
        out = model(x)
    assert found.kept_before == saved.activations
    del out
    layers = {layer.name: layer for layer in found.layers}
    assert layers["up"].pays
    assert (layers["down"].pays, layers["down"].input_bytes) == (False, 0)
    assert layers["down"].note == "hooks on saved tensors keep its input in their own way"
    assert found.elsewhere[0] == ("act", x.nbytes)
    assert found.elsewhere[1] == ("down", ROWS * WIDTH + WIDTH * WIDTH + 2 * FLOAT)
    assert [name for name, config in plan(model, x, budget="90%", loss=torch.sum).configs.items() if config] == ["up"]

    sketch_(model, CONFIG, profile=found)
    with saved_memory(model) as saved:
        out = model(x)
    assert found.kept_after == saved.activations
    del out


def test_a_layer_that_also_runs_without_hooks_keeps_that_input():
    model, x = Block(), torch.randn(ROWS, WIDTH)

    def loss():
        first = model(x)
        with compressing():
            return (first + model(x)).sum()

    ledger = record_ledger(model, loss)
    assert [call.layer for call in ledger.calls] == ["up", "down"]
    assert {claim.holder for claim in ledger.claims if claim.replaced} == {"up", "act", "down"}
    assert ledger.hooked == {"act"}


def test_a_checkpoint_claims_nothing_of_its_layers():
    model, x = Block(), torch.randn(ROWS, WIDTH, requires_grad=True)
    forward = partial(checkpoint, model, x, use_reentrant=False)
    ledger = record_ledger(model, lambda: forward().sum())
    assert {claim.holder for claim in ledger.claims} == {"the loss"}
    assert ledger.kept == x.nbytes
    assert ledger.hooked == frozenset()


@needs_shown_saves
def test_a_profile_inside_hooks_is_of_a_step_under_them():
    model, x = Block(), torch.randn(ROWS, WIDTH)
    with compressing():
        found = profile(model, x, config=CONFIG, loss=lambda out: out.sum())
    assert found.kept_before == 3 * (ROWS * WIDTH + FLOAT) + WIDTH * WIDTH + FLOAT
    assert found.pays == ()
    assert found.kept_after == found.kept_before
