"""The tables and figures, the paper's and others, one file each, rendered from records alone."""

from . import batches, complexity, curves, glue, limit, matmuls, peaks, quadratic, schedule, throughput, variance
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
        quadratic.ARTEFACT,
        schedule.ARTEFACT,
        limit.ARTEFACT,
    )
}
