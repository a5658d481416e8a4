"""The tables and figures of the paper, one file each, rendered from records alone."""

from . import batches, complexity, curves, glue, matmuls, peaks, throughput, variance
from .artefact import Artefact

ARTEFACTS: dict[str, Artefact] = {
    artefact.name: artefact
    for artefact in (
        complexity.ARTEFACT,
        glue.ARTEFACT,
        peaks.ARTEFACT,
        matmuls.ARTEFACT,
        batches.ARTEFACT,
        variance.ARTEFACT,
        curves.ARTEFACT,
        throughput.ARTEFACT,
    )
}
