"""Text about a config: a short name, Python code, and a sentence on the noise it adds."""

from __future__ import annotations

from dataclasses import asdict

from ..config import ROUNDING_NOISE, SketchConfig
from ..sketches import SKETCHES


def in_words(config: SketchConfig) -> str:
    """Name a config in few words: "rows 98.5%, 3 bits, rotated"."""
    size = f"{config.kind} " + (f"{100 * (config.ratio or 0.1):.3g}%" if config.dim is None else str(config.dim))
    block = [f"block {config.block}"] if config.block else []
    bits = [f"{config.bits} bits"] if config.bits else []
    return ", ".join([size, *block, *bits, *["rotated"] * config.rotate, *["center"] * config.center])


def as_code(config: SketchConfig) -> str:
    """Write a config as Python code, with a ratio of three digits."""
    fields = {name: value for name, value in asdict(config).items() if value != getattr(SketchConfig(), name)}
    if config.ratio is not None:
        fields["ratio"] = float(f"{config.ratio:.3g}")
    return f"SketchConfig({', '.join(f'{name}={value!r}' for name, value in fields.items())})"


def noise_in_words(config: SketchConfig) -> str | None:
    """Say how much noise a config adds and how that is known; None if only a measurement can tell."""
    if config.ratio is None or config.center:
        return None
    multiple = SKETCHES[config.kind].multiple_of_sgd(config.ratio)
    if multiple is None:
        return None
    if config.ratio == 1 and config.bits is None:
        return "It adds no noise to weight gradients."
    sources = []
    if config.ratio < 1:
        formula = "1/ratio - 1, for every model and all data; less with padding"
        sources.append(f"{multiple:.2g} by leaving rows out ({formula})")
    if config.bits is not None:
        size = f"{ROUNDING_NOISE[config.bits, config.rotate] / config.ratio:.1g}"
        sources.append(f"about {size} by rounding to {config.bits} bits (a rule of thumb, measured on one encoder)")
    return (
        "The noise it adds to weight gradients, in units of the batch's own, computed from the config and not measured "
        f"on this model: {'; '.join(sources)}. NoiseMonitor measures it in training."
    )
