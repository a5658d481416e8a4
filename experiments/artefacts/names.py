"""How ways are called in tables, and what they are."""

from __future__ import annotations


def ordered(ways: list[str]) -> list[str]:
    """Return ways in the order of a page: exact, the paper's from the largest ratio down, then the others."""
    first = ["exact", *sorted((way for way in ways if way.startswith("gaussian")), reverse=True)]
    return [way for way in first if way in ways] + [way for way in ways if way not in first]


def shown(way: str) -> str:
    """Return a way's name for a reader: the paper's, or ours."""
    if way.startswith("gaussian") and "block" not in way:
        return f"the paper's Gaussian, ρ = {way.split()[1]}"
    if way.startswith("recommended"):
        return f"**ours, {float(way.split()[1]):.0%} of the bytes**"
    if way.startswith("rows"):
        return f"rows, ρ = {way.split()[1]}"
    return way
