"""``backsketch demo``: train a small GPT exactly and from sketches, side by side, and show what it costs and saves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from typer import Option

from .options import AsJson, Seed, set_threads
from .problems import STOPPED, Problem, need, users_mistakes


def demo(
    quick: Annotated[bool, Option("--quick", help="Train a smaller model; takes half a minute.")] = False,
    out: Annotated[Path, Option(help="Write the picture and the record to this directory.")] = Path("backsketch-demo"),
    seed: Seed = 0,
    threads: Annotated[
        int | None, Option(help="Number of CPU threads for torch. Default: torch decides.", min=1)
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Train a small GPT on Python's standard library, exactly and from sketches, and compare.

    Example: backsketch demo --quick

    It compares six ways to train: exact, the paper's Gaussian at 10%, rows at 10%, the recommended config, the
    whole step (rest=True, with torch 2.8 or newer), and checkpointing. They start from the same weights and take
    turns, one step each on the same batch. Nothing is downloaded. It takes about three minutes on two cores; Ctrl-C
    stops it and shows the result so far.
    """
    need("cli", "rich", "matplotlib")
    from ..programs.demo.run import run
    from ..programs.demo.scale import FULL, QUICK
    from ..programs.demo.table import result_table

    with users_mistakes():
        out.mkdir(parents=True, exist_ok=True)
    set_threads(threads)
    written = run(QUICK if quick else FULL, out=out, seed=seed, quiet=as_json)
    if written is None:
        raise Problem("stopped before the first step was done", code=STOPPED)
    results = written.record["results"]
    if as_json:
        print(json.dumps(written.record, indent=1))
    else:
        print(f"{result_table(results)}\n\npicture: {written.picture_path}\nrecord:  {written.record_path}")
    if not results["finished"]:
        raise Problem(f"stopped after {results['steps']} steps", code=STOPPED)
    return 0
