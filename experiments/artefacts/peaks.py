"""Peak memory by task, batch and ratio: the paper's table 3."""

from __future__ import annotations

from matplotlib.figure import Figure

from . import paper
from .artefact import MISSING, Artefact, Record, select, table, ways, where_from
from .names import shown


def render(records: list[Record]) -> tuple[str, Figure | None]:
    """Return two tables: the peaks, and what is saved of them."""
    places = sorted({(record["cell"]["task"], record["cell"]["batch_size"]) for record in records})
    names = ["exact", *(way for way in ways(records) if way != "exact")]
    header = ["task, batch × tokens", *map(shown, names)]
    peaks, saved = [], []
    for task, batch in places:
        cells = [_cell(records, task, batch, way) for way in names]
        exact = cells[0]
        length = next(cell["results"]["batch_shape"][1] for cell in cells if cell is not None)
        place = f"{task}, {batch} × {length}"
        peaks.append([place, *(MISSING if cell is None else f"{_peak(cell) / 2**20:,.0f} MiB" for cell in cells)])
        saved.append(
            [
                place,
                *(
                    MISSING if cell is None or exact is None else f"{1 - _peak(cell) / _peak(exact):.1%}"
                    for cell in cells[1:]
                ),
            ]
        )
    theirs = ", ".join(f"{task} {share:.1%}" for task, share in paper.PEAK_SAVED.items())
    text = (
        f"The peak of one step of {records[0]['settings']['model']} with AdamW's states in place, parameters and "
        "gradients included, by tensors. Each batch is the longest examples of a task's training file (of QNLI's, "
        "which is not at hand, the development file), cut off at "
        f"{records[0]['settings']['recipe']['max_length']} tokens:\n\n"
        f"{table(header, peaks)}\n\nSaved of the peak:\n\n{table([header[0], *header[2:]], saved)}\n\n"
        "The paper's own at ρ = 0.1 (RoBERTa-base on a GPU, with batches of its own; what is saved depends on the "
        f"batch): {theirs}.\n\n{where_from(records)}\n"
    )
    return text, None


def _cell(records: list[Record], task: str, batch: int, way: str) -> Record | None:
    found = select(records, "memory", task=task, batch_size=batch, way=way)
    return found[0] if found else None


def _peak(record: Record) -> int:
    return int(record["results"]["peak_bytes"])


ARTEFACT = Artefact("peaks", "Peak memory by task, batch and ratio (table 3)", ("memory",), render)
