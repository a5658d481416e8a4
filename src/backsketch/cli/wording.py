"""A config in few words and in Python, and the noise it adds."""

from __future__ import annotations

from dataclasses import asdict

from ..config import SketchConfig


def words(config: SketchConfig) -> str:
    """Name a config in few words: "rows 71.1%, 4 bits"."""
    size = f"{config.kind} " + (f"{100 * (config.ratio or 0.1):.3g}%" if config.dim is None else str(config.dim))
    block = [f"block {config.block}"] if config.block else []
    bits = [f"{config.bits} bits"] if config.bits else []
    return ", ".join([size, *block, *bits, *["center"] * config.center])


def code(config: SketchConfig) -> str:
    """Write a config as Python, its ratio with three digits."""
    fields = {name: value for name, value in asdict(config).items() if value != getattr(SketchConfig(), name)}
    if config.ratio is not None:
        fields["ratio"] = float(f"{config.ratio:.3g}")
    return f"SketchConfig({', '.join(f'{name}={value!r}' for name, value in fields.items())})"


def noise(config: SketchConfig) -> str | None:
    """Say what leaving rows out costs, where that does not depend on the data: D² / D²_SGD = 1/ρ - 1 for rows."""
    if config.kind != "rows" or config.ratio is None or config.center:
        return None
    sources = [f"{1 / config.ratio - 1:.2g} by leaving rows out"] if config.ratio < 1 else []
    if config.bits is not None:
        sources.append(f"about {_ROUNDING[config.bits] / config.ratio:.1g} by rounding to {config.bits} bits")
    return f"The noise that it adds to weight gradients, in units of the batch's own: {', '.join(sources) or 'none'}."


_ROUNDING = {8: 0.0002, 4: 0.055, 2: 1.1}  # with all rows, mean over the layers in benchmarks/reports/frontier.json
