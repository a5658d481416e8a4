"""Settings: everything a fine-tuning run depends on, checked before anything is loaded."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from hashlib import sha256
from numbers import Integral
from pathlib import Path
from typing import Any

from ...argument_checks import check_flag
from ...config import SketchConfig
from ...planning.budget import as_budget
from ...planning.layer_points import planned_bits
from ...rest.packing_modules import check_rest
from ...rest.rest_config import Rest
from .identity import data_digest, model_digest
from .recipe import Recipe, recipe_for
from .tasks import Task, find_task

HEADS = (
    *("classifier*", "*pooler*", "pre_classifier", "score"),  # of BERT and its kin, and of decoders
    *("head.*", "classification_head.*", "sequence_summary.*", "logits_proj"),  # of ModernBERT, BART and XLNet
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """One run.

    Attributes:
        task: a name that ``find_task`` knows.
        model: a name on the hub, or a directory.
        data: a directory in GLUE's layout; None reads from the hub.
        config: what the layers keep; None trains exactly.
        budget: as ``plan`` takes it; each layer's ratio, and its bits unless ``config`` names some, are planned for it.
        rest: as ``sketch_`` takes it: in how many bits all else is kept that backward needs.
        exclude: globs over the names of layers left exact. By default the heads, which read one row a sentence:
            they keep next to nothing, and a sketch of so few rows is very noisy.
        ignore_mask: sketch padded rows like all others, as the paper does; by default they are left out.
        recipe: by default the paper's for the task.
        max_steps: the number of steps, instead of epochs; the schedule of the learning rate is as long.
        train_rows, eval_rows: use so many examples of the training and of each development file, always the same.
        eval_every: evaluate every so many steps, and after the last; None evaluates after each epoch.
        noise_every: monitor the noise every so many steps; None does about fifty times a run, 0 never.
        noise_layers: globs over the names of layers whose noise is logged in all its components.
        noise_schedule: let the added noise lower the learning rate.
        threads: the number of torch's threads; None does not change it.
        save_model: keep the trained model in ``out/model``.
    """

    task: str
    model: str = "roberta-base"
    data: Path | None = None
    config: SketchConfig | None = field(default_factory=SketchConfig.recommended)
    budget: str | float | int | None = None
    rest: Rest = None
    exclude: tuple[str, ...] | None = None
    ignore_mask: bool = False
    recipe: Recipe | None = None
    max_steps: int | None = None
    train_rows: int | None = None
    eval_rows: int | None = None
    eval_every: int | None = None
    noise_every: int | None = None
    noise_layers: tuple[str, ...] = ()
    noise_schedule: bool = False
    seed: int = 0
    threads: int | None = None
    save_model: bool = False

    def __post_init__(self) -> None:
        task = find_task(self.task)
        object.__setattr__(self, "task", task.name)
        if self.recipe is None:
            object.__setattr__(self, "recipe", recipe_for(task))
        if self.budget is not None:
            if self.config is None:
                raise ValueError("budget plans what layers keep, and config=None keeps everything: give one of them")
            as_budget(self.budget)
            planned_bits(None, self.config)
            if self.config == SketchConfig.recommended():  # the default: the user did not ask for its bits
                object.__setattr__(self, "config", SketchConfig())
        if check_rest(self.rest) is not None and self.config is None:
            raise ValueError("rest keeps few bits, and config=None trains exactly: give one of them")
        if self.noise_layers and (self.config is None or self.noise_every == 0):
            raise ValueError("noise_layers needs sketched layers and their monitor: no config=None, no noise_every=0")
        if self.noise_every and self.config is None:
            raise ValueError("noise_every watches sketches, and config=None has none: give one of them")
        check_flag("noise_schedule", self.noise_schedule)
        if self.noise_schedule and (self.config is None or self.noise_every == 0):
            raise ValueError("noise_schedule needs sketched layers and their monitor: no config=None, no noise_every=0")
        if self.ignore_mask and self.config is None:
            raise ValueError("ignore_mask says what sketches read, and config=None has none: give one of them")
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, Integral) or value < least):
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
        if self.data is not None and not Path(self.data).is_dir():
            raise ValueError(f"data must be a directory, got {str(self.data)!r}")
        folder = Path(self.model)
        looks_local = folder.is_absolute() or self.model.startswith((".", "~")) or folder.is_dir()
        if looks_local and not (folder / "config.json").is_file():
            raise ValueError(f"model must be a name on the hub or a directory with config.json, got {self.model!r}")

    @property
    def the_task(self) -> Task:
        """Return the task itself."""
        return find_task(self.task)

    @property
    def the_recipe(self) -> Recipe:
        """Return the recipe, the paper's unless another was given."""
        return self.recipe or recipe_for(self.the_task)

    def excluded(self, name: str) -> bool:
        """Tell whether a layer is left exact."""
        return any(fnmatchcase(name, glob) for glob in (HEADS if self.exclude is None else self.exclude))

    def describe(self) -> dict[str, Any]:
        """Return the settings as plain values; of a directory its name and a digest of its files, not where it is."""
        model = Path(self.model)
        given = asdict(self)
        for name in ("rest", "noise_schedule"):
            if not given[name]:  # as in records of runs before it was a setting
                del given[name]
        return {
            **given,
            "model": _name(model) if model.is_dir() else self.model,
            "model_digest": model_digest(model) if model.is_dir() else None,
            "data": "hub" if self.data is None else _name(self.data),
            "data_digest": None if self.data is None else data_digest(self.the_task, Path(self.data)),
            "noise_layers": list(self.noise_layers),
            "exclude": list(HEADS if self.exclude is None else self.exclude),
        }

    def slug(self) -> str:
        """Return a name for the directory of the run: what it is, and a digest of all settings."""
        what = "exact" if self.config is None else str(self.config)
        if self.budget is not None and self.config is not None:
            what = f"{self.config.kind} budget {self.budget}"
        if self.rest is not None:
            what += " whole step"
        if self.noise_schedule:
            what += " scheduled"
        digest = sha256(json.dumps(self.describe(), sort_keys=True).encode()).hexdigest()[:8]
        words = f"{self.task} {_name(Path(self.model))} {what} seed {self.seed} {digest}".lower()
        return re.sub("[^a-z0-9.]+", "-", words)


def _name(path: Path) -> str:
    """Return the last part of a path, also of one like ``.``."""
    return os.path.basename(os.path.abspath(path))


_LEAST = {"max_steps": 1, "train_rows": 1, "eval_rows": 1, "eval_every": 1, "noise_every": 0, "seed": 0, "threads": 1}
