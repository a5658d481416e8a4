"""``backsketch fit``: whether a training step fits into a card, how large a batch does, and what each way costs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Annotated, Any

import torch
from rich.console import Console
from torch import nn
from typer import Argument, Option

from ..fitting.batches import Inputs
from ..fitting.fit_result import WISHES, Fit
from ..fitting.fit_table import as_text
from ..fitting.fitter import as_memory, fit_model
from ..garbage import without_collector
from ..memory.optimizer_states import OPTIMIZERS, check_optimizer
from .options import DTYPES, AsJson, check_sizes, full_dtype
from .problems import Problem, need, users_mistakes

DTYPE = (
    "fp32, bf16 or fp16, of weights, gradients and states alike; the Trainer's bf16=True is something else: fp32 "
    "weights under autocast. Default: what the config states, else fp32."
)


def fit(
    model: Annotated[str, Argument(help="Name on the hub, directory, or config.json. No weights are read.")],
    memory: Annotated[str, Option(help="Memory of one card: 24GiB, 80GB.")],
    seq: Annotated[int, Option(help="Tokens in an example, or frames of audio.")] = 512,
    batch: Annotated[int, Option(help="Examples in a batch, on each card.")] = 1,
    dtype: Annotated[str | None, Option(help=DTYPE)] = None,
    optimizer: Annotated[str, Option(help=f"{', '.join(OPTIMIZERS)}.")] = "adamw",
    lora: Annotated[int | None, Option(help="Also compare adapters of this rank on all linear layers.")] = None,
    ranks: Annotated[int, Option(help="Cards over which FSDP2 shards weights, gradients and states.")] = 1,
    wish: Annotated[str, Option(help=f"What the best way has: {', '.join(WISHES)}.")] = "time",
    head: Annotated[str | None, Option(help="As in backsketch profile. Default: what the config names.")] = None,
    measure: Annotated[
        bool, Option("--measure", help="Time real steps with random weights on this machine: on CUDA, or else its CPU.")
    ] = False,
    plot: Annotated[Path | None, Option(help="Write a picture of all peaks to this file.")] = None,
    as_json: AsJson = False,
) -> int:
    """Tell whether a training step of a model fits into a card, and how large a batch or length does.

    Example: backsketch fit roberta-base --memory 24GiB --seq 512 --batch 32

    It reads only the config and computes on PyTorch's meta device, so it needs
    neither weights nor a card. It exits with 1 if nothing fits.
    """
    check_sizes(batch=batch, seq=seq, ranks=ranks, lora=lora)
    full = full_dtype(dtype)
    with users_mistakes():
        limit = as_memory(memory)
        check_optimizer(optimizer)
        if wish not in WISHES:
            raise ValueError(f"wish must be one of {', '.join(WISHES)}, got {wish!r}")
        if plot is not None:
            _check_plot(plot)
    need("transformers", "transformers")
    if lora is not None:
        need("peft", "peft")
    with users_mistakes(), without_collector():  # imports make many objects and hardly any garbage
        from .models import build, make_batch
        from .named_model import NamedModel

        named = NamedModel.of(model, head=head, dtype=full, seq=seq, device="meta")

    def batches(count: int, length: int | None) -> Inputs:
        return (), make_batch(named.network, named.head, batch=count, seq=length or seq, device="meta")

    def real_model() -> tuple[nn.Module, Inputs]:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        real = build(named.config, named.head, device=device, dtype=DTYPES[named.dtype])
        return real, ((), make_batch(real, named.head, batch=batch, seq=seq, device=device))

    with Console(stderr=True).status("computing steps on the meta device"):
        found = _found(
            named.network, batches, batch, seq if named.has_seq else None, memory=limit, optimizer=optimizer,
            ranks=ranks, lora=lora, loss=None, wish=wish, real=real_model() if measure else None,
        )  # fmt: skip
    if plot is not None:
        from ..fitting.fit_figure import draw_fit

        with users_mistakes():
            draw_fit(found, plot, Path(model).name or model)
    if as_json:
        whose = {"model": model, "architecture": type(named.network).__name__, "dtype": named.dtype}
        print(json.dumps(whose | found.record(), indent=1))
    else:
        about = f"{model}: {type(named.network).__name__}, {named.dtype}"
        print(as_text(found, shutil.get_terminal_size().columns, about, as_flag))
    return 0 if found.best is not None else 1


def as_flag(name: str, value: object) -> str:
    """Write an option as a flag of the command."""
    return f"--{name} {value}"


def _check_plot(plot: Path) -> None:
    """Refuse a picture that could not be written, before anything is computed."""
    need("cli", "matplotlib")
    from matplotlib.backend_bases import FigureCanvasBase

    if not plot.absolute().parent.is_dir():
        raise ValueError(f"plot must be a file in a directory that exists, got {str(plot)!r}")
    endings = sorted(FigureCanvasBase.get_supported_filetypes())
    if plot.suffix.removeprefix(".").lower() not in endings:
        raise ValueError(f"plot must end in one of {', '.join(endings)}, got {str(plot)!r}")


def _found(*args: Any, **options: Any) -> Fit:
    try:
        return fit_model(*args, **options)
    except (RuntimeError, ValueError) as error:
        raise Problem(str(error), code=1) from error
