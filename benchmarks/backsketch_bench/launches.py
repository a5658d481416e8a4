"""Kernels launched and bytes moved by a training step on an accelerator, and the time estimated from them.

Counted without an accelerator, on the meta device, in fp32 and bf16: for each subject the exact step and the sketched
ones. Rows in few bits are stored on two paths: ``reference`` is plain torch, ``fused`` packs and unpacks rows in one
Triton kernel each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from backsketch import SketchConfig, sketch_
from backsketch.config import STORED_BITS
from backsketch.fitting.launch_counter import LaunchCounter
from backsketch.fitting.roofline import ACCELERATORS, LAUNCH
from backsketch.programs.result_files import write_record
from backsketch.storage import packing
from backsketch.storage.accelerator_kernel import triton_is_here

from .launch_subjects import SUBJECTS, Subject, step_of
from .progress import track

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ANY, REFERENCE, FUSED = "any", "reference", "fused"

Inside = Callable[[], AbstractContextManager[object]]


def ways(dtype: torch.dtype) -> dict[str, SketchConfig | None]:
    """Return name -> config of every way to train; None is exact."""
    stored = {
        f"{bits} bits{', rotated' if rotate else ''}": SketchConfig(ratio=1.0, bits=bits, rotate=rotate)
        for bits in STORED_BITS
        for rotate in (False, True)
    }
    return {
        "exact": None,
        "rows at 0.1": SketchConfig(ratio=0.1),
        "recommended": SketchConfig.recommended(dtype=dtype),
    } | stored


def paths() -> dict[str, Inside]:
    """Return the paths by which rows are stored on an accelerator: without Triton that of plain torch alone."""
    if not triton_is_here():
        return {REFERENCE: nullcontext}
    return {REFERENCE: packing.without_fused_kernels, FUSED: nullcontext}


def count(
    subject: Subject, dtype: torch.dtype, config: SketchConfig | None, path: Inside = nullcontext
) -> LaunchCounter:
    """Count one step, the second: the first also makes what is kept for later steps."""
    module, x, run = subject.make(dtype)
    if config is not None:
        sketch_(module, config)
    step = step_of(module, x, run)
    counter = LaunchCounter()
    with path():
        step()
        with counter:
            step()
    return counter


def entries(subject: Subject, dtype: str) -> Iterator[dict[str, Any]]:
    """Yield what each way launches and moves, with the estimated times, also relative to the exact step."""
    exact: dict[str, Any] | None = None
    for name, config in ways(DTYPES[dtype]).items():
        packs = config is not None and config.bits is not None
        for path, inside in (paths() if packs else {ANY: nullcontext}).items():
            counter = count(subject, DTYPES[dtype], config, inside)
            seconds = {device: limits.seconds(counter.kernels) for device, limits in ACCELERATORS.items()}
            entry: dict[str, Any] = {
                "subject": subject.name,
                "dtype": dtype,
                "way": name,
                "config": None if config is None else str(config),
                "path": path,
                "launches": counter.launches,
                "bytes": counter.bytes,
                "flops": counter.flops,
                "estimated_seconds": seconds,
                "by_operator": counter.by_operator(),
            }
            exact = exact or entry
            base = exact["estimated_seconds"]
            entry["estimated_time"] = {device: each / base[device] for device, each in seconds.items()}
            yield entry


def run(path: Path, subjects: Sequence[Subject] = SUBJECTS) -> list[dict[str, Any]]:
    """Count all subjects in both types, write the record and return the entries."""
    cases = [(subject, dtype) for subject in subjects for dtype in DTYPES]
    found = [entry for case in track(cases, "launches", len(cases)) for entry in entries(*case)]
    settings = {
        "device": "meta: nothing was run, times are estimates",
        "paths": list(paths()),
        "seconds_a_launch": LAUNCH,
        "matrix_products_of_fp32": "TF32",
        "accelerators": {name: asdict(limits) for name, limits in ACCELERATORS.items()},
    }
    write_record(path, settings=settings, results=found, packages=["transformers"])
    return found
