"""The model to measure: an encoder of the user with labelled text, a language model with text, or the byte model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from backsketch.programs.demo.model import Size

from .activations import Subject
from .byte_model import byte_subject

ENCODER_STEPS, LANGUAGE_MODEL_STEPS, BYTE_STEPS, QUICK_STEPS = 60, 10, 200, 3
QUICK_SIZE = Size(hidden=64, heads=2, layers=1, length=32)


def find_subject(
    model: Path | None = None,
    data: Path | None = None,
    columns: Sequence[str] | None = None,
    *,
    text: Path | None = None,
    steps: int | None = None,
    seed: int = 0,
    quick: bool = False,
) -> Subject:
    """Return what to train.

    Args:
        model: a directory of a pretrained model for transformers; None is the byte model, which needs no data.
        data: a tab-separated file without quoting, as GLUE has.
        columns: of the label and of one or two texts, by name, or by number if the file has no header.
        text: a plain text, for a causal language model instead of an encoder.
        steps: training steps before anything is measured.
        quick: few steps, and a smaller byte model.
    """
    torch.manual_seed(seed)
    if steps is None:
        full = BYTE_STEPS if model is None else ENCODER_STEPS if text is None else LANGUAGE_MODEL_STEPS
        steps = QUICK_STEPS if quick else full
    if steps < 1:
        raise ValueError(f"steps must be a positive integer, got {steps}")
    if model is None:
        if data is not None or columns or text is not None:
            raise ValueError("data, columns and text are for a model of yours: give --model too")
        return byte_subject(steps=steps, seed=seed, size=QUICK_SIZE if quick else None)
    if not (model / "config.json").is_file():
        raise ValueError(f"model must be a directory with config.json, got {str(model)!r}")
    if text is not None:
        if data is not None or columns:
            raise ValueError("give --text for a language model or --data and --columns for an encoder, not both")
        if not text.is_file():
            raise ValueError(f"text must be a file, got {str(text)!r}")
        from .language_model import language_model_subject

        return language_model_subject(model, text, steps=steps, seed=seed)
    if data is None or columns is None or len(columns) not in (2, 3):
        raise ValueError(
            "a model needs its data: give --data FILE and --columns LABEL,TEXT or LABEL,TEXT,TEXT, "
            "or --text FILE for a language model"
        )
    if not data.is_file():
        raise ValueError(f"data must be a file, got {str(data)!r}")
    from .encoder import encoder_subject

    return encoder_subject(model, data, columns, steps=steps, seed=seed)
