"""``backsketch bench``: how fast a training step is on this machine, compared with the alternatives."""

from __future__ import annotations

import json
import shutil
import textwrap
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from .options import AsJson, Out, Quick, Threads, set_threads
from .problems import Problem, need, users_mistakes


def bench(
    part: Annotated[
        list[str] | None,
        Option(
            metavar="PART",
            help="What to measure: layers, layers-bfloat16, allocators, kinds, overhead, transient, growth, encoder, "
            "encoder-bfloat16 or dropout; repeatable. Default: all.",
        ),
    ] = None,
    quick: Quick = False,
    fresh: Annotated[bool, Option("--fresh", help="Measure again the parts that --out already has.")] = False,
    threads: Threads = None,
    out: Out = None,
    as_json: AsJson = False,
) -> int:
    """Compare the time of a training step with nn.Linear, the paper's method, checkpointing and offloading.

    Example: backsketch bench --part layers

    It takes about 40 minutes on two cores, or a few minutes with --quick. On
    Linux it starts itself again with an allocator that keeps its pages, as those
    of accelerators do. It writes speed.json, speed.png and a dated report to
    --out. To continue a run that was stopped, repeat the command: it measures
    only the missing parts.
    """
    need("cli", "backsketch_bench", "matplotlib")
    from backsketch_bench.speed import PARTS, run
    from backsketch_bench.speed_report import render
    from backsketch_bench.speed_tables import section

    chosen = part or list(PARTS)
    if unknown := [name for name in chosen if name not in PARTS]:
        raise Problem(f"part must be one of {', '.join(PARTS)}, got {', '.join(map(repr, unknown))}")
    if {"encoder", "encoder-bfloat16", "dropout"} & set(chosen):
        need("transformers", "transformers")
    set_threads(threads)

    def show(record: dict[str, Any], name: str) -> None:
        found = section(record, name)
        print(textwrap.fill(f"{found.title}. {found.text}", shutil.get_terminal_size().columns), end="\n\n")
        found.table.show()
        print(flush=True)

    path = (Path("bench", "quick" if quick else "") if out is None else out) / "speed.json"
    with users_mistakes():
        record = run(chosen, path, quick=quick, fresh=fresh, show=None if as_json else show)
    written = render(path)
    if as_json:
        print(json.dumps(record, indent=1))
    else:
        print("wrote", ", ".join(map(str, written)))
    return 0
