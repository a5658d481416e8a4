"""``backsketch profile``: what a training step of a model keeps for backward, and what sketches would save."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, TypeAlias

import torch
from rich.console import Console
from torch import nn
from typer import Argument, Option

from ..config import SketchConfig
from ..convert.conversion import configs_for
from ..memory.optimizer_states import OPTIMIZERS, check_optimizer, states_of_all
from ..memory.profile_result import Profile
from ..memory.profiling import profile as profile_step
from ..planning.budget import as_budget, too_small
from ..planning.layer_points import RATIOS
from .options import (
    DTYPES,
    SKETCH,
    AsJson,
    Bits,
    Block,
    Center,
    Dim,
    Kind,
    Ratio,
    Rotate,
    check_budget,
    check_sizes,
    full_dtype,
    given_fields,
    parse_budget,
)
from .problems import Problem, need, users_mistakes
from .profile_report import ModelReport, linear_inputs
from .step_ways import StepWay, measured_ways

KEEPS = (0.27, 0.1, 0.05)

Recommended: TypeAlias = Callable[..., SketchConfig]  # SketchConfig.recommended, for the type of the model


def profile(
    model: Annotated[str, Argument(help="Name on the hub, directory, or config.json. No weights are read.")],
    batch: Annotated[int, Option(help="Examples in a batch.")] = 32,
    seq: Annotated[int, Option(help="Tokens in an example, or frames of audio.")] = 128,
    head: Annotated[
        str | None,
        Option(
            help="sequence-classification, causal-lm, masked-lm, seq2seq-lm, image-classification, speech-seq2seq or "
            "audio-classification. Default: what the config names; for encoders a classifier."
        ),
    ] = None,
    dtype: Annotated[str | None, Option(help="fp32, bf16 or fp16. Default: what the config states, else fp32.")] = None,
    device: Annotated[
        str, Option(help="cpu or cuda runs a real step there; meta computes sizes only, without memory.")
    ] = "meta",
    kind: Kind = None,
    ratio: Ratio = None,
    dim: Dim = None,
    bits: Bits = None,
    block: Block = None,
    center: Center = False,
    rotate: Rotate = False,
    budget: Annotated[
        str | None,
        Option(
            help="Choose the ratio so that linear inputs fit this share (20%) or size (500MB, 2GiB).",
            rich_help_panel=SKETCH,
        ),
    ] = None,
    optimizer: Annotated[
        str, Option(help="adamw, adamw8bit or sgd: every peak includes its states, by formula.")
    ] = "adamw",
    as_json: AsJson = False,
) -> int:
    """Show what one training step of a model needs at its peak, what that is made of, and what lowers it.

    Example: backsketch profile roberta-base --batch 32 --seq 128

    It reads only the config and computes sizes on PyTorch's meta device, so a
    model of any size takes seconds and no memory. For attention and dropout it
    counts what the fused kernels of a GPU keep.
    """
    given = given_fields(kind, ratio, dim, bits, block, center, rotate)
    check_sizes(batch=batch, seq=seq)
    full = full_dtype(dtype)
    check_budget(budget, given)
    with users_mistakes():
        check_optimizer(optimizer)
        asked = SketchConfig(**given) if given else None
        if (limit := parse_budget(budget)) is not None:
            as_budget(limit)  # which raises before anything is computed
        _check_device(device)
    need("transformers", "transformers")
    from .models import batch_in_words, make_batch
    from .named_model import NamedModel

    with users_mistakes():
        named = NamedModel.of(model, head=head, dtype=full, seq=seq, device=device)
        network = named.network
        inputs = make_batch(network, named.head, batch=batch, seq=seq, device=device)

    recommended = partial(SketchConfig.recommended, dtype=DTYPES[named.dtype])
    config = recommended() if asked is None else asked

    def measure(one: SketchConfig) -> Profile:
        with Console(stderr=True).status(f"computing a step under {one}"):
            return _measure(network, inputs, one, device)

    if limit is not None:
        with users_mistakes():
            config = _within(limit, network, measure(config), given, recommended)
    profiles = {config: measure(config)}
    preferred = _best(network, profiles[config], recommended) if given else config
    for other in [preferred] if given else [] if budget else map(recommended, KEEPS):
        if other not in profiles:
            profiles[other] = measure(other)
    about = {
        "model": model,
        "architecture": type(network).__name__,
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "parameter_bytes": sum(parameter.nbytes for parameter in network.parameters()),
        "batch": batch,
        "seq": seq if named.has_seq else None,
        "examples": batch_in_words(inputs),
        "dtype": named.dtype,
        "dtype_from": named.dtype_from,
        "device": device,
    }
    states = {name: states_of_all(name, network.parameters()) for name in OPTIMIZERS}
    report = ModelReport(about, profiles, preferred, states, optimizer)
    with Console(stderr=True).status("computing a step in other ways"):
        found = list(measured_ways(network, inputs, profiles[report.best or preferred]))
    ways = tuple(each for each in found if isinstance(each, StepWay))
    report = replace(report, ways=ways, failed=tuple(each for each in found if isinstance(each, str)))
    if as_json:
        print(json.dumps(report.record(), indent=1))
    else:
        report.show()
    return 0


def _check_device(name: str) -> None:
    try:
        kind = torch.device(name).type
    except RuntimeError as error:
        raise ValueError(f"device must be meta, cpu or cuda, got {name!r}") from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("device must be meta or cpu where there is no CUDA, got 'cuda'")


def _measure(network: nn.Module, inputs: dict[str, Any], config: SketchConfig, device: str) -> Profile:
    try:
        return profile_step(network, config=config, **inputs)
    except (RuntimeError, NotImplementedError) as error:
        reason = str(error).split("\n", 1)[0][:200]
        hint = "; --device cpu runs a real step instead" if device == "meta" else ""
        raise Problem(f"a step of this model failed on {device}: {reason}{hint}", code=1) from error


def _within(
    asked: str | float | int, network: nn.Module, found: Profile, given: dict[str, Any], recommended: Recommended
) -> SketchConfig:
    """Return the config with the most rows under which linear inputs keep no more than the budget that is asked for."""
    limit = as_budget(asked)
    ours = [recommended(step / 500) for step in range(1, 501)]
    candidates = [SketchConfig(**{**given, "ratio": share}) for share in RATIOS] if given else ours
    inputs = _LinearInputs(network, found)
    most = limit if isinstance(limit, int) else int(limit * inputs.today)
    place = bisect_right(candidates, most, key=inputs.under)
    if place == 0:
        least = inputs.under(candidates[0])
        raise ValueError(too_small("budget", asked, most, least, inputs.today, "that linear inputs keep today"))
    return candidates[place - 1]


def _best(network: nn.Module, found: Profile, recommended: Recommended) -> SketchConfig:
    """Return the recommended config that keeps at most as many bytes of the linear inputs."""
    before, after = linear_inputs(found)
    try:
        return _within(_LinearInputs(network, found).today - before + after, network, found, {}, recommended)
    except ValueError:  # no recommended config is as small
        return recommended()


class _LinearInputs:
    """What the inputs of linear layers keep: today, and under a config, which decides what layers are too narrow."""

    def __init__(self, network: nn.Module, found: Profile) -> None:
        self._network = network
        self._ledger = found.ledger
        # The smallest config finds the fewest layers narrow: those that any other would convert are among its own.
        smallest = SketchConfig.recommended(1 / 500)
        self.today = self._ledger.released(dict.fromkeys([*configs_for(network, smallest), *found.chosen], smallest))

    def under(self, config: SketchConfig) -> int:
        chosen = configs_for(self._network, config)
        unpaid = self._ledger.unpaid(chosen)
        paying = {name: own for name, own in chosen.items() if name not in unpaid}
        return self.today - self._ledger.released(paying) + self._ledger.sketches(paying)
