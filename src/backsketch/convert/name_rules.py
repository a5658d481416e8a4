"""NameRules: which config a layer gets by its name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TypeAlias

import torch

from ..config import SketchConfig, check_config

Pattern: TypeAlias = str | re.Pattern[str]


class NameRules:
    """Name patterns with their configs, in order, and which of them were never used.

    None in place of patterns recommends a config by the type of a layer's weight. A mapping with an attribute
    ``leaves_exact``, as a plan has, says with it why it leaves layers exact.
    """

    def __init__(self, configs: object | None) -> None:
        self._recommends = configs is None
        if one_for_all := configs is None or isinstance(configs, SketchConfig):
            configs = {"*": configs}
        if not isinstance(configs, Mapping):
            hint = "; give a profile as profile=" if hasattr(configs, "unpaid") else ""
            given = repr(configs) if isinstance(configs, (str, int, float)) else type(configs).__name__
            raise TypeError(f"config must be a SketchConfig or a mapping from pattern to config, got {given}{hint}")
        if not configs and not hasattr(configs, "blocks"):  # the plan of a model without linear layers may be empty
            raise ValueError("config must have at least one pattern, got an empty mapping")
        for pattern, config in configs.items():
            if not isinstance(pattern, (str, re.Pattern)):
                raise TypeError(f"a pattern must be a string or a compiled regular expression, got {pattern!r}")
            if config is not None:
                check_config(config)
        self.one_for_all = one_for_all
        self._exact_by_the_mapping: str | None = getattr(configs, "leaves_exact", None)
        self._configs = dict(configs)
        self.unused = list(configs) if len(configs) > 1 else []

    def match(self, name: str, dtype: torch.dtype) -> tuple[SketchConfig | None, str | None]:
        """Return the layer's config, or else why it stays exact; both are None if no pattern matches."""
        if self._recommends:
            return SketchConfig.recommended(dtype=dtype if dtype.is_floating_point else torch.float32), None
        for pattern, config in self._configs.items():
            if _matches(pattern, name):
                if pattern in self.unused:
                    self.unused.remove(pattern)
                return config, None if config else self._exact_by_the_mapping or f"left exact by {_text(pattern)!r}"
        return None, None


def _matches(pattern: Pattern, name: str) -> bool:
    if isinstance(pattern, str):
        return name == pattern or fnmatchcase(name, pattern)
    return pattern.fullmatch(name) is not None


def _text(pattern: Pattern) -> str:
    return pattern if isinstance(pattern, str) else pattern.pattern
