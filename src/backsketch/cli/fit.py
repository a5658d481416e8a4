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
from ..fitting.positions import positions
from ..memory.optimizer_states import OPTIMIZERS, check_optimizer
from .options import AsJson
from .problems import Problem, need, users_mistakes
from .profile import DTYPES

SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def fit(
    model: Annotated[str, Argument(help="Name on the hub, directory, or config.json. No weights are read.")],
    memory: Annotated[str, Option(help="Memory of one card: 24GiB, 80GB.")],
    seq: Annotated[int, Option(help="Tokens in an example, or frames of audio.")] = 512,
    batch: Annotated[int, Option(help="Examples in a batch, on each card.")] = 1,
    dtype: Annotated[str | None, Option(help="fp32, bf16 or fp16. Default: what the config states, else fp32.")] = None,
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
    for name, value in (("batch", batch), ("seq", seq), ("ranks", ranks), ("lora", 1 if lora is None else lora)):
        if value < 1:
            raise Problem(f"{name} must be a positive integer, got {value}")
    if dtype is not None and SHORT.get(dtype, dtype) not in DTYPES:
        raise Problem(f"dtype must be one of {', '.join((*SHORT, *DTYPES))}, got {dtype!r}")
    with users_mistakes():
        limit = as_memory(int(memory) if memory.isdecimal() else memory)
        check_optimizer(optimizer)
        if wish not in WISHES:
            raise ValueError(f"wish must be one of {', '.join(WISHES)}, got {wish!r}")
        if plot is not None and not plot.absolute().parent.is_dir():
            raise ValueError(f"plot must be a file in a directory that exists, got {str(plot)!r}")
    need("transformers", "transformers")
    if lora is not None:
        need("peft", "peft")
    from .models import build, find_head, load_config, make_batch, stated_dtype, takes_seq

    with users_mistakes():
        description = load_config(model)
        chosen_head = find_head(description) if head is None else head
        used = SHORT.get(dtype, dtype) if dtype else stated_dtype(description) or "float32"
        if used not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {used!r} from the config: give --dtype")
        network = build(description, chosen_head, device="meta", dtype=DTYPES[used])
        has_seq = takes_seq(description, chosen_head)
        most = positions(network) if has_seq else None
        if most is not None and seq > most:
            raise ValueError(f"seq must be at most {most}, the positions that the model has, got {seq}")

    def batches(count: int, length: int | None) -> Inputs:
        return (), make_batch(network, chosen_head, batch=count, seq=length or seq, device="meta")

    def real_model() -> tuple[nn.Module, Inputs]:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        real = build(description, chosen_head, device=device, dtype=DTYPES[used])
        return real, ((), make_batch(real, chosen_head, batch=batch, seq=seq, device=device))

    with Console(stderr=True).status("computing steps on the meta device"):
        found = _found(
            network, batches, batch, seq if has_seq else None, memory=limit, optimizer=optimizer, ranks=ranks,
            lora=lora, loss=None, wish=wish, real=real_model() if measure else None,
        )  # fmt: skip
    if plot is not None:
        from ..fitting.fit_figure import draw_fit

        with users_mistakes():
            draw_fit(found, plot, Path(model).name or model)
    if as_json:
        whose = {"model": model, "architecture": type(network).__name__, "dtype": used}
        print(json.dumps(whose | found.record(), indent=1))
    else:
        about = f"{model}: {type(network).__name__}, {used}"
        print(as_text(found, shutil.get_terminal_size().columns, about))
    return 0 if found.best is not None else 1


def _found(*args: Any, **options: Any) -> Fit:
    try:
        return fit_model(*args, **options)
    except (RuntimeError, NotImplementedError) as error:
        reason = str(error).split("\n", 1)[0][:200]
        raise Problem(f"a step of this model failed on the meta device: {reason}", code=1) from error
