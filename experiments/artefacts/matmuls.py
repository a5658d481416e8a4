"""Comparison of matmuls on CoLA, score and time: the paper's table 4."""

from __future__ import annotations

from statistics import mean
from typing import Any

from matplotlib.figure import Figure

from .artefact import MISSING, Artefact, Record, select, table, where_from
from .names import shown

KINDS = ("gaussian", "rademacher", "cosine", "fourier")
RATIOS = ("0.5", "0.2", "0.1")
_CALLED = {"gaussian": "Gaussian", "rademacher": "Rademacher", "cosine": "DCT", "fourier": "DFT"}


def render(records: list[Record]) -> tuple[str, Figure | None]:
    """Return score and relative time by kind and ratio."""
    lines = [["exact", "1", _score(records, "exact", ""), _time(records, "exact")]]
    for kind in KINDS:
        for ratio in RATIOS:
            lines.append([_CALLED[kind], ratio, _score(records, kind, ratio), _time(records, f"{kind} {ratio}")])
    for kind in ("rows", "recommended"):
        lines.append([shown(f"{kind} 0.1"), "0.1", _score(records, kind, "0.1"), _time(records, f"{kind} 0.1")])
    text = (
        "Matthews correlation on CoLA's development file, times 100, seed 0; relative time of a step beside exact "
        "training of the same model (batch 32 × 128, interleaved, the best of several):\n\n"
        f"{table(['matmul', 'ρ', 'score', 'time'], lines)}\n\n{where_from(records)}\n"
    )
    return text, None


def _score(records: list[Record], kind: str, ratio: str) -> str:
    way = f"{kind} {ratio}".strip()
    found = select(records, "matmuls", kind=kind, ratio=ratio)
    found += select(records, "glue", way=way)
    return f"{mean(100 * record['results']['score'] for record in found):.1f}" if found else MISSING


def _time(records: list[Record], way: str) -> str:
    for record in select(records, "throughput", model="MiniLM"):
        if way in record["results"]:
            return f"{1 / record['results'][way]['relative']:.2f}"
    return MISSING


def _needed(labels: dict[str, Any]) -> bool:
    return labels.get("task", "CoLA") == "CoLA" and labels.get("seed", 0) == 0 and labels.get("model") != "MPNet"


ARTEFACT = Artefact(
    "matmuls", "Comparison of matmuls on CoLA (table 4)", ("matmuls", "glue", "throughput"), render, _needed
)
