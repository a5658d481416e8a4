"""Read a cell of a grid: its sketch, and the settings of its fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from backsketch import SketchConfig
from backsketch.programs.glue.recipe import Recipe, recipe_for
from backsketch.programs.glue.settings import Settings
from backsketch.programs.glue.tasks import find_task

_CONFIG = tuple(field.name for field in fields(SketchConfig))
SKETCH = {*_CONFIG, "exact", "recommended"}  # what config_of reads
_RECIPE = tuple(field.name for field in fields(Recipe))
_SETTINGS = tuple(field.name for field in fields(Settings))


def config_of(values: Mapping[str, Any]) -> SketchConfig | None:
    """Return the sketch: None for ``exact``, ours for ``recommended = <share>``, or the one whose fields are given.

    The records are of release 0.1, and so is what it recommended.
    """
    given = {name: values[name] for name in _CONFIG if name in values}
    chosen = [name for name in ("exact", "recommended") if values.get(name)] + (["kind"] if given else [])
    if len(chosen) != 1:
        raise ValueError(f"a cell must have one of exact, recommended or a sketch's fields, got {chosen or 'none'}")
    if values.get("exact"):
        return None
    return _recommended_in_first_release(values["recommended"]) if values.get("recommended") else SketchConfig(**given)


def _recommended_in_first_release(share: float) -> SketchConfig:
    """Return what ``SketchConfig.recommended`` was in release 0.1: all rows in 8 bits if they fit, else rows in 4."""
    bits = 8 if share >= 8.5 / 32 else 4
    return SketchConfig(ratio=min(1.0, share / ((bits + 0.5) / 32)), bits=bits)


def said(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a cell of a fine-tuning fixes, in the form in which a record has them."""
    config = config_of(values)
    return {
        **{name: values[name] for name in _SETTINGS if name in values},
        "config": None if config is None else asdict(config),
        "recipe": {name: values[name] for name in _RECIPE if name in values},
    }


def settings_of(values: Mapping[str, Any], weights: Path, data: Path) -> Settings:
    """Return the settings of a fine-tuning; ``model`` is a directory below ``weights``."""
    known = {*SKETCH, *_RECIPE, *_SETTINGS}
    if unknown := sorted(values.keys() - known):
        raise ValueError(f"a cell of a fine-tuning cannot have {', '.join(unknown)}")
    if missing := [name for name in ("task", "model") if name not in values]:
        raise ValueError(f"a cell of a fine-tuning must have {' and '.join(missing)}")
    recipe = {name: values[name] for name in _RECIPE if name in values}
    rest = {name: values[name] for name in _SETTINGS if name in values and name not in ("model", "task")}
    if "noise_layers" in rest:
        rest["noise_layers"] = tuple(rest["noise_layers"])
    return Settings(
        task=values["task"],
        model=str(weights / values["model"]),
        data=data,
        config=config_of(values),
        recipe=recipe_for(find_task(values["task"]), **recipe),
        **rest,
    )
