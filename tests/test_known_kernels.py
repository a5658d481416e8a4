"""run_known: what operators return from memory is what their kernels return."""

import pytest
import torch

from backsketch.fitting.known_kernels import run_known
from backsketch.torch_private import TorchDispatchMode


class FromMemory(TorchDispatchMode):
    """Run operators from memory."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return run_known(func, args, kwargs or {})


def described(out):
    outs = out if isinstance(out, tuple) else (out,)
    return [(each.shape, each.stride(), each.dtype, each.untyped_storage().nbytes(), each.is_meta) for each in outs]


def meta(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, device="meta")


WIDE, COLUMN, HALF = meta(6, 4), meta(6, 1), meta(6, 4, dtype=torch.bfloat16)
CALLS = {
    "broadcast": lambda: WIDE * COLUMN,
    "types": lambda: WIDE * HALF,
    "scalar": lambda: HALF * 2.0,
    "whole scalar": lambda: HALF + 1,
    "transposed": lambda: WIDE.T + WIDE.T,
    "mixed strides": lambda: WIDE.T + meta(4, 6),
    "expanded": lambda: COLUMN.expand(6, 4).exp(),
    "compared": lambda: WIDE >= 0,
    "sliced": lambda: WIDE[1:3, ::2].neg(),
    "reduced": lambda: HALF.sum(1, keepdim=True, dtype=torch.float32),
    "largest": lambda: WIDE.amax(0),
    "joined": lambda: torch.cat([WIDE, HALF], 1),
    "loss": lambda: torch.ops.aten.nll_loss_forward(WIDE, meta(6, dtype=torch.long), None, 1, -100),
    "on the cpu": lambda: WIDE * torch.tensor(2.0),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_operator_returns_the_same_from_memory(name):
    expected = described(CALLS[name]())
    with FromMemory():
        assert described(CALLS[name]()) == expected
        assert described(CALLS[name]()) == expected


def test_in_place_operators_return_what_they_change():
    total = meta(6, 6)
    with FromMemory():
        for _ in range(2):
            before = total._version
            assert total.addmm_(WIDE, WIDE.T) is total
            assert total.clamp_(0, 1) is total
            assert total._version == before + 2


def test_a_view_stays_a_view_and_a_new_tensor_is_new():
    with FromMemory():
        for _ in range(2):
            assert WIDE.view(24).untyped_storage()._cdata == WIDE.untyped_storage()._cdata
            made = WIDE * COLUMN
            assert made.untyped_storage()._cdata not in (WIDE.untyped_storage()._cdata, (WIDE * COLUMN)._cdata)


def test_mistakes_are_still_told():
    with FromMemory():
        for _ in range(2):
            with pytest.raises(RuntimeError):
                WIDE * meta(5, 4)
