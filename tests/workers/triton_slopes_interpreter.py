"""Compare the Triton kernels of slopes, in Triton's interpreter, with the reference, and print the findings as JSON.

A process of its own, with TRITON_INTERPRET=1, because that is read when a kernel is defined.
"""

import itertools
import json
import math
import random

import torch

from backsketch.random_words import DITHER_STREAM, line
from backsketch.storage import slope_reference
from backsketch.storage.accelerator_slopes import _NUMBERS
from backsketch.storage.codes import group_bytes, split
from backsketch.storage.groups import GROUP
from backsketch.storage.slope_functions import MISH
from backsketch.storage.triton_slopes_launch import pack_slopes, times_slopes

SEED = -(2**40) - 12345
FACTOR, OFFSET = map(int, line(SEED, DITHER_STREAM))
COUNTS = (1, 5, 127, 128, 129, 300, 32 * GROUP, 32 * GROUP + 77, 2 * 32 * GROUP, 3 * 32 * GROUP - 1)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def codes_of(codes, count, bits):
    """Return the codes themselves: (count,)."""
    full = count // GROUP * group_bytes(GROUP, bits)
    parts = [split(codes[:full].view(-1, group_bytes(GROUP, bits)), bits, GROUP).flatten()]
    if count % GROUP:
        parts.append(split(codes[full:], bits, count % GROUP))
    return torch.cat(parts).int()


def measure(slope, bits, count, dtype, drawn):
    """Return how the kernels differ from the reference for one case."""
    torch.manual_seed(count + bits)
    x = (torch.randn(count) * 2).to(dtype)
    if count > 200:
        x[::50] = (torch.randn(len(x[::50])) * 1e4).to(dtype)
    numbers = (3, 3) if drawn else (FACTOR, OFFSET)  # with a line, they are ignored
    how = (*numbers, torch.tensor([FACTOR, OFFSET]) if drawn else None, bits)
    step = (slope.high - slope.low) / (2**bits - 1)
    values = x if slope in _NUMBERS else slope.at(x.float())
    codes = pack_slopes(values, _NUMBERS.get(slope, 0), slope.low, 1 / step, *how)
    law = slope_reference.write(slope, x, bits, SEED)
    levels = (codes_of(codes, count, bits) - codes_of(law, count, bits)).abs()
    grad = torch.randn(count).to(dtype)
    found = times_slopes(grad, law, step, slope.low + step / 2, *how)
    expected = slope_reference.times(slope, grad, law, bits, SEED)
    unit = expected.float().abs() * torch.finfo(dtype).eps + 1e-12
    return {
        "case": [slope.name, bits, count, str(dtype), drawn],
        "function": slope.name,
        "shapes": codes.shape == law.shape and found.shape == grad.shape and found.dtype == dtype,
        "codes": count,
        "codes differ": int((levels > 0).sum()),
        "levels": int(levels.max()),
        "error": float(((found.float() - expected.float()).abs() / unit).max()),
    }


def not_finite():
    """Tell whether NaN and infinity leave the codes of their neighbours alone."""
    x = torch.randn(300)
    odd = x.clone()
    odd[::7] = torch.tensor([math.nan, math.inf, -math.inf] * 15)[: len(x[::7])]
    kept = torch.arange(300) % 7 > 0
    same = []
    for slope, bits in itertools.product(_NUMBERS, (8, 4, 3, 2)):
        how = (slope.low, (2**bits - 1) / (slope.high - slope.low), FACTOR, OFFSET, None, bits)
        one, other = (pack_slopes(each, _NUMBERS[slope], *how) for each in (odd, x))
        same.append(torch.equal(codes_of(one, 300, bits)[kept], codes_of(other, 300, bits)[kept]))
    return all(same)


def empty():
    codes = pack_slopes(torch.empty(0), 1, 0.0, 1.0, 1, 1, None, 3)
    return [list(codes.shape), list(times_slopes(torch.empty(3, 0), codes, 1.0, 0.0, 1, 1, None, 3).shape)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    choose = random.Random(0)
    cases = [
        measure(choose.choice([*_NUMBERS, MISH]), bits, count, choose.choice(DTYPES), choose.random() < 0.4)
        for bits, count in itertools.product((8, 4, 3, 2), COUNTS)
    ]
    cases += [measure(slope, 8, 20_000, torch.float32, False) for slope in _NUMBERS]
    print(json.dumps({"cases": cases, "not finite": not_finite(), "empty": empty()}))
