"""How ways are called in tables, and what they are."""

from __future__ import annotations

CALLED = {
    "gaussian": "Gaussian",
    "rademacher": "Rademacher",
    "cosine": "DCT",
    "fourier": "DFT",
    "hadamard": "Hadamard",
    "hash": "CountSketch",
    "rows": "rows",
}


def ordered(ways: list[str]) -> list[str]:
    """Return ways in the order of a page: exact, the paper's from the largest ratio down, then the others."""
    first = ["exact", *sorted((way for way in ways if way.startswith("gaussian")), reverse=True)]
    return [way for way in first if way in ways] + [way for way in ways if way not in first]


def shown(way: str) -> str:
    """Return a way's name for a reader: the paper's, ours, or another kind's; ways are ``kind ratio[, block size]``."""
    kind, _, rest = way.partition(" ")
    ratio, _, block = rest.partition(", block ")
    if kind == "recommended":
        return f"**ours, {float(ratio):.0%} of the bytes**"
    if kind not in CALLED:
        return way
    if block:
        return f"{CALLED[kind]} in blocks of {block}, ρ = {ratio}"
    owner = "the paper's " if kind == "gaussian" else ""
    return f"{owner}{CALLED[kind]}, ρ = {ratio}"
