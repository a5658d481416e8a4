"""Compare the Triton kernels, in Triton's interpreter, with the reference, and print what was measured as JSON.

A process of its own, with TRITON_INTERPRET=1, because that is read when a kernel is defined.
"""

import itertools
import json
import random

import torch

from backsketch.random_words import DITHER_STREAM, line
from backsketch.storage import reference
from backsketch.storage.codes import group_bytes, split
from backsketch.storage.dither import column_dither, dither, row_dither
from backsketch.storage.groups import GROUP, group_count, parts_of
from backsketch.storage.sizes import packed_bytes
from backsketch.storage.stored_rows import StoredRows
from backsketch.storage.triton_launch import pack, unpack

FEATURES = (128, 384, 300, 576, 100, 5, 1)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
OPTIONS = {
    "dtype": tuple(DTYPES),
    "rows": (1, 7, 33),
    "content": ("normal", "relu", "constant", "not finite", "huge", "tiny"),
    "layout": ("plain", "row stride", "transposed"),
    "chosen": (False, True),
    "mean": (False, True),
    "first": (0, 256),
    "line": (False, True),
    "places": (False, True),
    "scale": (1.0, 0.5),
    "turn": (True, False),
}
UNTOUCHED = 0xA5


def cases():
    """Return all of bits × rotated × features, with options in which as many pairs as possible occur."""
    seen: set = set()
    found = []
    choose = random.Random(0)
    for base in itertools.product((8, 4, 3, 2), (False, True), FEATURES):
        fixed = dict(zip(("bits", "rotated", "features"), base, strict=True))
        drawn = [fixed | {name: choose.choice(values) for name, values in OPTIONS.items()} for _ in range(50)]
        best = max(drawn, key=lambda case: len(pairs(case) - seen))
        seen |= pairs(best)
        found.append(best)
    return found


def pairs(case):
    return set(itertools.combinations(case.items(), 2))


def values(case, rows):
    """Return x of the asked content, type and layout: (rows, features)."""
    features, content = case["features"], case["content"]
    x = torch.randn(rows, features)
    if content == "relu":
        x = (x - torch.rand(rows, 1)).relu()
    elif content == "constant":
        x = x[:, :1].repeat(1, features)
    elif content == "not finite":
        x[::2, 0] = torch.tensor(float("nan"))
        x[1::4, -1] = float("inf")
        x[3::4, features // 2] = -float("inf")
    elif content == "huge":
        x *= 2e4 if case["dtype"] == "fp16" else 1e37
        if case["dtype"] != "fp16":
            x[::3] = x[::3].sign() * 3e38  # further apart than fp32 goes
    elif content == "tiny":
        x *= {"fp16": 1e-6, "bf16": 1e-35, "fp32": 1e-39}[case["dtype"]]  # Triton's interpreter takes no subnormal bf16
    x = x.to(DTYPES[case["dtype"]])
    if case["layout"] == "row stride":
        return torch.cat((x, x), 1)[:, :features]
    return x.t().contiguous().t() if case["layout"] == "transposed" else x


def room(case, rows):
    """Return rows that are wider than what is written to them, in a tensor that is wider still."""
    features = case["first"] + case["features"]
    codes = torch.full((rows, packed_bytes(features, case["bits"]) + 3), UNTOUCHED, dtype=torch.uint8)
    ranges = torch.full((rows, group_count(features), 2), 7.0, dtype=torch.bfloat16)
    return StoredRows(codes[:, :-3], ranges, case["bits"], case["rotated"], features, 1000 + case["features"]), codes


def measure(case):
    torch.manual_seed(case["features"] + case["bits"])
    rows = case["rows"]
    x = values(case, rows + 5 if case["chosen"] else rows)
    chosen = torch.randperm(rows + 5)[:rows] if case["chosen"] else None
    mean = torch.randn(case["features"]).to(x.dtype) if case["mean"] else None
    (expected, _), (stored, codes) = room(case, rows), room(case, rows)
    slope, offset = map(int, line(stored.seed, DITHER_STREAM))
    drawn = torch.tensor([slope, offset]) if case["line"] else None
    if case["line"]:
        slope = offset = 3  # which are ignored
    reference.write(expected, x.contiguous(), chosen, mean, case["first"])
    bits, rotated = case["bits"], case["rotated"]
    pack(x, chosen, mean, stored.codes, stored.ranges, case["first"], slope, offset, drawn, bits, rotated)

    places = torch.tensor([0, -1, *range(rows), 0, -1]) if case["places"] else None
    start, count = (1, rows + 3) if case["places"] else (rows // 2, rows - rows // 2)
    scale, turn, dtype = case["scale"], case["turn"], x.dtype
    how = (slope, offset, drawn, bits, rotated, turn, scale, dtype)
    back = unpack(expected.codes, expected.ranges, places, start, count, expected.features, *how)
    same = reference.read(expected, slice(start, start + count), dtype, scale, turn, places)
    return {
        "case": case,
        "untouched": bool((codes[:, -3:] == UNTOUCHED).all()),
        **compare_stored(stored, expected),
        **compare_values(back, same),
    }


def compare_stored(stored, expected):
    """Count ranges that differ, and codes that differ in groups of equal ranges."""
    counts = {"ranges": 0, "ranges differ": 0, "range steps": 0, "codes": 0, "codes differ": 0, "levels": 0}
    for columns, groups in parts_of(stored.features):
        one, other = stored.ranges[:, groups], expected.ranges[:, groups]
        steps = (one.view(torch.int16).int() - other.view(torch.int16).int()).abs()
        lost = one.isnan().any(-1) & other.isnan().any(-1)
        steps[lost] = 0
        counts["ranges"] += steps.numel()
        counts["ranges differ"] += int((steps > 0).sum())
        counts["range steps"] = max(counts["range steps"], int(steps.max()))
        comparable = (steps == 0).all(-1) & ~lost
        levels = (codes_of(stored, columns, groups) - codes_of(expected, columns, groups)).abs()[comparable]
        counts["codes"] += levels.numel()
        counts["codes differ"] += int((levels > 0).sum())
        counts["levels"] = max(counts["levels"], int(levels.max()) if levels.numel() else 0)
    return counts


def codes_of(stored, columns, groups):
    """Return the codes of some groups: (rows, groups, size)."""
    count = groups.stop - groups.start
    size = (columns.stop - columns.start) // count
    start, width = groups.start * group_bytes(GROUP, stored.bits), group_bytes(size, stored.bits)
    joined = stored.codes[:, start : start + count * width].reshape(stored.rows, count, width)
    return split(joined, stored.bits, size).int()


def compare_values(back, expected):
    """Return the largest error in units of rounding to the type, of the largest value of the same group."""
    finite = expected.isfinite()
    error = 0.0
    for columns, _ in parts_of(expected.shape[1]):
        one, other = (each[:, columns].float().where(finite[:, columns], 0) for each in (back, expected))
        count = group_count(other.shape[1])
        one, other = (each.reshape(len(each), count, -1).double() for each in (one, other))
        unit = other.abs().amax(-1, keepdim=True) * torch.finfo(expected.dtype).eps
        least = torch.finfo(expected.dtype).smallest_normal * torch.finfo(expected.dtype).eps
        error = max(error, float(((one - other).abs() / unit.clamp(min=least)).max()))
    return {
        "shape": list(back.shape) == list(expected.shape) and back.dtype == expected.dtype,
        "finite": bool((back.isfinite() == finite).all()),
        "not finite": int((~finite).sum()),
        "error": error,
    }


def dither_differences():
    """Count numbers u that are not those of the reference, bit for bit, in rows far apart."""
    rows, features, seed = 70_000, 300, -(2**40) - 12345
    codes, ranges = torch.zeros(1, packed_bytes(features, 2), dtype=torch.uint8), torch.tensor([[0.0, 1.0]] * 3)
    codes, ranges = (
        codes.expand(rows, -1),
        ranges.to(torch.bfloat16).expand(rows, -1, -1),
    )  # a step of 1, and codes of 0
    places = torch.cat((torch.arange(20), torch.tensor([32767, 32768, 65535, 65536, 69_999])))
    slope, offset = map(int, line(seed, DITHER_STREAM))
    how = (slope, offset, None, 2, True, False, 1.0, torch.float32)
    found = 0.5 - unpack(codes, ranges, places, 0, len(places), features, *how)
    own = column_dither(0, features, codes.device, torch.float32)
    expected = dither(row_dither(seed, rows, codes.device)[places], own)
    return {"numbers": found.numel(), "differ": int((found != expected).sum()), "different": len(found.unique())}


def empty():
    """Pack and read no rows, and rows of no features."""
    shapes = []
    for rows, features in ((0, 128), (3, 0)):
        stored = StoredRows.empty(torch.empty(0), rows, features, 4, True, 0)
        pack(torch.empty(rows, features), None, None, stored.codes, stored.ranges, 0, 1, 1, None, 4, True)
        back = unpack(
            stored.codes, stored.ranges, None, 0, rows, features, 1, 1, None, 4, True, True, 1.0, torch.float32
        )
        shapes.append(list(back.shape))
    return shapes


if __name__ == "__main__":
    torch.set_num_threads(1)
    measured = [measure(case) for case in cases()]
    print(json.dumps({"cases": measured, "dither": dither_differences(), "empty": empty()}))
