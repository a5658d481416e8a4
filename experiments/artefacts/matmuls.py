"""Comparison of matmuls on CoLA, score and time: the paper's table 4."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from backsketch import SketchConfig

from .artefact import MISSING, Artefact, Record, select, table, where_from
from .names import CALLED, shown
from .paper import MATMULS
from .scores import cell, score

RATIOS, NINE_TENTHS = ("0.5", "0.2", "0.1"), "gaussian 0.9"  # the paper's table has no such line
KINDS = ("gaussian", "rademacher", "cosine", "fourier")


def render(records: list[Record]) -> tuple[str, Figure | None]:
    """Return score and relative time by kind and ratio."""
    ways = ["exact", *(f"{kind} {ratio}" for kind in KINDS for ratio in RATIOS), "rows 0.1", "recommended 0.1"]
    lines = [[*_named(records, way), _score(records, way), _time(records, way), *_in_the_paper(way)] for way in ways]
    text = (
        "Matthews correlation on CoLA's development file after the last step, times 100; ± is the standard deviation "
        "over seeds, and the small number counts them; a score of one seed may be off by as much. Time of a step "
        "relative to exact training of the same model (batch 32 × 128, interleaved, the best of several). In the "
        "paper, whose model is RoBERTa-base, trained for 10 epochs on a GPU: the best of the evaluations of a run, "
        "and the time of the run beside its exact one:\n\n"
        f"{table(['matmul', 'ρ', 'score', 'time', 'the paper: score', 'time'], lines)}\n\n{where_from(records)}\n"
    )
    return text, None


def _named(records: list[Record], way: str) -> tuple[str, str]:
    kind, _, ratio = way.partition(" ")
    if kind == "recommended" and (found := select(records, "glue", way=way)):
        chosen = SketchConfig(**found[0]["settings"]["config"])  # of that time
        ratio = f"{chosen.ratio:.2f}" + (f", {chosen.bits} bits" if chosen.bits else "")
    return CALLED.get(kind) or shown(way), ratio or "1"


def _in_the_paper(way: str) -> tuple[str, str]:
    if way not in MATMULS:
        return "", ""
    score, minutes = MATMULS[way]
    return f"{score:.1f}", f"{minutes / MATMULS['exact'][1]:.2f}"


def _score(records: list[Record], way: str) -> str:
    kind, _, ratio = way.partition(" ")
    found = select(records, "matmuls", kind=kind, ratio=ratio) + select(records, "glue", way=way)
    return cell([score(record) for record in found])


def _time(records: list[Record], way: str) -> str:
    for record in select(records, "throughput", model="MiniLM"):
        if way in record["results"]:
            return f"{1 / record['results'][way]['relative']:.2f}"
    return MISSING


def _needed(labels: dict[str, Any]) -> bool:
    return labels.get("task", "CoLA") == "CoLA" and labels.get("model") != "MPNet" and labels.get("way") != NINE_TENTHS


ARTEFACT = Artefact(
    "matmuls", "Comparison of matmuls on CoLA (table 4)", ("matmuls", "glue", "throughput"), render, _needed
)
