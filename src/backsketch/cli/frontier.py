"""``backsketch frontier``: bytes kept against noise added, for every setting, on real activations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
from typer import Option

from .options import AsJson, Out, Quick, Seed, Threads, set_threads
from .problems import Problem, need, users_mistakes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def frontier(
    model: Annotated[
        Path | None,
        Option(help="Directory with a pretrained encoder or language model. Default: train a small byte-level model."),
    ] = None,
    data: Annotated[
        Path | None, Option(help="Labelled text to fine-tune on: a tab-separated file without quoting.")
    ] = None,
    columns: Annotated[
        str | None,
        Option(help="Columns of --data, as LABEL,TEXT or LABEL,TEXT,TEXT: names, or numbers if it has no header."),
    ] = None,
    text: Annotated[
        Path | None, Option(help="Plain text to train a causal language model on, instead of --data and --columns.")
    ] = None,
    dtype: Annotated[str, Option(help="Type of the model when it is measured: float32 or bfloat16.")] = "float32",
    steps: Annotated[
        int | None, Option(help="Training steps before measuring. Default: 60; 10 with --text, 200 without --model.")
    ] = None,
    seed: Seed = 0,
    quick: Quick = False,
    threads: Threads = None,
    out: Out = None,
    as_json: AsJson = False,
) -> int:
    """Measure for every setting the bytes it keeps, the noise it adds to the gradient, and its time.

    Example: backsketch frontier --model DIR --data dev.tsv --columns label,text

    Without --model it trains a small byte-level model on the sources of
    Python's standard library; nothing is downloaded. It writes frontier.json
    and a figure to --out; with --text and --dtype bfloat16 the name of both has
    -lm and -bfloat16 in it.
    """
    need("cli", "backsketch_bench", "matplotlib")
    if model is not None:
        need("transformers", "transformers")
    from backsketch_bench.frontier import run, table
    from backsketch_bench.frontier_figure import write_figure
    from backsketch_bench.subjects import find_subject

    set_threads(threads)
    if dtype not in DTYPES:
        raise Problem(f"dtype must be one of {', '.join(DTYPES)}, got {dtype}")
    with users_mistakes():
        names = None if columns is None else columns.split(",")
        subject = find_subject(model, data, names, text=text, steps=steps, seed=seed, quick=quick)
    name = f"frontier{'' if text is None else '-lm'}{'' if dtype == 'float32' else f'-{dtype}'}.json"
    path = (Path("bench", "quick" if quick else "") if out is None else out) / name
    found = run(subject, path, dtype=DTYPES[dtype], quick=quick)
    written = [path, *write_figure([path])]
    if as_json:
        print(path.read_text(), end="")
    else:
        table(found, dtype).show()
        print("\nwrote", ", ".join(map(str, written)))
    return 0
