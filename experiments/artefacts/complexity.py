"""What one linear layer computes and keeps: the paper's table of complexities, counted."""

from __future__ import annotations

from matplotlib.figure import Figure

from .artefact import Artefact, Record, table, where_from
from .names import shown

_FORMULAS = """\
| | kept | forward | backward |
| --- | --- | --- | --- |
| exact | B·N_in | P | 2·P |
| the paper's RMM, dense S | B_proj·N_in | P + B·B_proj·N_in | P + B·B_proj·N_out + B_proj·N_in·N_out |
| blocks of b rows | B_proj·N_in | P + b·B_proj·N_in | P + b·B_proj·N_out + B_proj·N_in·N_out |
| DCT, DFT, Hadamard | B_proj·N_in | P + O(B·log B)·N_in | P + O(B·log B)·N_out + B_proj·N_in·N_out |
| rows, CountSketch | B_proj·N_in | P | P + B_proj·N_in·N_out |
| rows in q bits | B_proj·N_in·q/32 and scales | as rows | as rows |
"""


def render(records: list[Record]) -> tuple[str, Figure | None]:
    """Return formulas, and what was counted relative to the exact layer."""
    settings = records[0]["settings"]
    rows, inputs, outputs = settings["rows"], settings["inputs"], settings["outputs"]
    product, whole = rows * inputs * outputs, rows * inputs * 4
    lines = []
    for record in records:
        found = record["results"]
        done = found["forward_multiply_adds"] + found["backward_multiply_adds"]
        lines.append(
            [
                shown(record["cell"]["way"]),
                str(found["dim"]),
                f"{found['kept_bytes'] / whole:.1%}",
                f"{found['forward_multiply_adds'] / product:.3f}",
                f"{found['backward_multiply_adds'] / product:.3f}",
                f"{done / (3 * product):.3f}",
            ]
        )
    header = ["layer", "B_proj", "kept", "forward", "backward", "step, of exact"]
    text = (
        f"Values kept, and multiply-adds, with P = B·N_in·N_out and B rows:\n\n{_FORMULAS}\n"
        f"Counted while one layer runs, B = {rows}, N_in = {inputs}, N_out = {outputs}; multiply-adds in units of "
        f"B·N_in·N_out, a Fourier transform of n real numbers as 1.25·n·log₂ n:\n\n"
        f"{table(header, lines)}\n\n{where_from(records)}\n"
    )
    return text, None


ARTEFACT = Artefact("complexity", "What a linear layer computes and keeps (table 1)", ("complexity",), render)
