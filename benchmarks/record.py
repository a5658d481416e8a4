"""Results of benchmarks have the library's own form."""

from __future__ import annotations

from backsketch.results import write_record

__all__ = ["write_record"]
