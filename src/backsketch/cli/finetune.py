"""``backsketch finetune``: fine-tune a pretrained model on a GLUE task, sketched or exact, and write a record."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from ..config import SketchConfig
from ..planning.plan_result import PlanError
from .options import SKETCH, Bits, Block, Center, Dim, Kind, Ratio, Rotate, check_budget, given_fields, parse_budget
from .problems import STOPPED, Problem, need, users_mistakes

RECIPE, RUN = "Recipe (defaults: the paper's values for the task)", "The run"


def finetune(
    task: Annotated[
        str,
        Option(
            help="CoLA, MNLI, MRPC, QNLI, QQP, RTE, SST-2, STS-B or WNLI. MNLI evaluates on both development files, "
            "MNLI-matched and MNLI-mismatched on one."
        ),
    ],
    model: Annotated[str, Option(help="Name on the hub, or directory.")] = "roberta-base",
    data: Annotated[
        Path | None, Option(help="Directory with GLUE's files (DIR/CoLA/train.tsv, ...). Default: read from the hub.")
    ] = None,
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
            help="Choose a setting for each layer so that all inputs fit this share (20%) or size (500MB).",
            rich_help_panel=SKETCH,
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        Option(help="Leave layers that match this glob exact; repeatable. Default: the heads.", rich_help_panel=SKETCH),
    ] = None,
    ignore_mask: Annotated[
        bool, Option("--ignore-mask", help="Sketch padded rows too, as the paper does.", rich_help_panel=SKETCH)
    ] = False,
    rest: Annotated[
        bool,
        Option("--rest", help="Keep all else that backward needs in few bits too.", rich_help_panel=SKETCH),
    ] = False,
    exact: Annotated[bool, Option("--exact", help="Train without sketches.", rich_help_panel=SKETCH)] = False,
    epochs: Annotated[int | None, Option(help="Passes over the training data: 10.", rich_help_panel=RECIPE)] = None,
    batch_size: Annotated[int | None, Option(help="Examples in a step: 16 or 32.", rich_help_panel=RECIPE)] = None,
    learning_rate: Annotated[
        float | None, Option(help="Largest learning rate: 1e-5 or 2e-5.", rich_help_panel=RECIPE)
    ] = None,
    warmup: Annotated[
        float | None, Option(help="Share of the steps in which the rate rises: 0.06.", rich_help_panel=RECIPE)
    ] = None,
    power: Annotated[
        float | None, Option(help="Exponent of the decay: 1, which is linear.", rich_help_panel=RECIPE)
    ] = None,
    beta1: Annotated[float | None, Option(help="AdamW's first beta: 0.9.", rich_help_panel=RECIPE)] = None,
    beta2: Annotated[float | None, Option(help="AdamW's second beta: 0.98.", rich_help_panel=RECIPE)] = None,
    epsilon: Annotated[float | None, Option(help="AdamW's epsilon: 1e-6.", rich_help_panel=RECIPE)] = None,
    weight_decay: Annotated[float | None, Option(help="AdamW's weight decay: 0.1.", rich_help_panel=RECIPE)] = None,
    clip: Annotated[
        float | None, Option(help="Clip gradients at this norm: 0, which is never.", rich_help_panel=RECIPE)
    ] = None,
    max_length: Annotated[
        int | None, Option(help="Cut examples off at this many tokens: 512.", rich_help_panel=RECIPE)
    ] = None,
    max_steps: Annotated[int | None, Option(help="Number of steps, instead of --epochs.", rich_help_panel=RUN)] = None,
    train_rows: Annotated[
        int | None, Option(help="Train on so many examples, always the same.", rich_help_panel=RUN)
    ] = None,
    eval_rows: Annotated[int | None, Option(help="Evaluate on so many, always the same.", rich_help_panel=RUN)] = None,
    eval_every: Annotated[
        int | None,
        Option(help="Evaluate every so many steps. Default: after each epoch.", rich_help_panel=RUN),
    ] = None,
    noise_every: Annotated[
        int | None,
        Option(
            help="Measure the added noise every so many steps; 0 is off. Default: about 50 times a run.",
            rich_help_panel=RUN,
        ),
    ] = None,
    noise_layer: Annotated[
        list[str] | None,
        Option(
            help="Record all figures of the noise for layers that match this glob; repeatable.", rich_help_panel=RUN
        ),
    ] = None,
    seed: Annotated[int, Option(help="Seed of all random numbers.", rich_help_panel=RUN)] = 0,
    threads: Annotated[
        int | None, Option(help="Number of CPU threads for torch. Default: torch decides.", rich_help_panel=RUN)
    ] = None,
    out: Annotated[
        Path | None, Option(help="Directory of the run. Default: one in runs/.", rich_help_panel=RUN)
    ] = None,
    overwrite: Annotated[
        bool, Option("--overwrite", help="Discard an earlier run in --out and start again.", rich_help_panel=RUN)
    ] = False,
    save_model: Annotated[
        bool, Option("--save-model", help="Save the trained model in --out.", rich_help_panel=RUN)
    ] = False,
    as_json: Annotated[
        bool, Option("--json", help="Print the record as JSON, and nothing else.", rich_help_panel=RUN)
    ] = False,
) -> int:
    """Fine-tune a pretrained model on a GLUE task, sketched or exact, and write a record.

    Example: backsketch finetune --task cola

    Example: backsketch finetune --task rte --ratio 1 --bits 8

    To continue a run that was stopped, repeat the command without --overwrite. For a finished run this shows the
    result.
    """
    given = given_fields(kind, ratio, dim, bits, block, center, rotate)
    others: dict[str, object] = {
        "budget": budget, "exclude": exclude, "ignore-mask": ignore_mask, "noise-every": noise_every,
        "noise-layer": noise_layer, "rest": rest,
    }  # fmt: skip
    if exact and (clash := [f"--{name}" for name in (*given, *(name for name, value in others.items() if value))]):
        raise Problem(f"--exact keeps everything: it excludes {', '.join(clash)}")
    if noise_layer and noise_every == 0:
        raise Problem("--noise-layer records what --noise-every 0 turns off: give one of them")
    check_budget(budget, given)
    from ..programs.glue.recipe import recipe_for
    from ..programs.glue.settings import Settings
    from ..programs.glue.tasks import find_task

    with users_mistakes():
        config = SketchConfig(**given) if given else SketchConfig.recommended()
        changes = {
            "epochs": epochs, "batch_size": batch_size, "learning_rate": learning_rate, "warmup": warmup,
            "power": power, "beta1": beta1, "beta2": beta2, "epsilon": epsilon, "weight_decay": weight_decay,
            "clip": clip, "max_length": max_length,
        }  # fmt: skip
        settings = Settings(
            task=task,
            model=model,
            data=data,
            config=None if exact else config,
            budget=parse_budget(budget),
            exclude=None if exclude is None else tuple(glob for glob in exclude if glob),
            ignore_mask=ignore_mask,
            rest=True if rest else None,
            recipe=recipe_for(find_task(task), **changes),
            max_steps=max_steps,
            train_rows=train_rows,
            eval_rows=eval_rows,
            eval_every=eval_every,
            noise_every=noise_every,
            noise_layers=tuple(noise_layer or ()),
            seed=seed,
            threads=threads,
            save_model=save_model,
        )
    folder = Path("runs") / settings.slug() if out is None else out
    need("transformers", "transformers", "accelerate", "filelock", "numpy", "sklearn", "scipy")
    from ..programs.glue.finetune import Interrupted, prepare

    with users_mistakes():
        run = prepare(settings, folder, overwrite=overwrite)
    try:
        record = run(progress=not as_json)
    except Interrupted as stopped:
        raise Problem(str(stopped), code=STOPPED) from stopped
    except PlanError as error:  # known only after the first batch
        raise Problem(str(error)) from error
    print(json.dumps(record, indent=1) if as_json else _summary(record, folder))
    sys.stdout.flush()
    return 0


def _summary(record: dict[str, Any], folder: Path) -> str:
    settings, results = record["settings"], record["results"]
    memory, speed = results["memory"], results["throughput"]["samples_per_second"]
    noise = [point["ratio"] for point in results["noise"]["curve"] if point["ratio"] is not None]
    diverged = next((point["step"] for point in results["curves"]["train"] if point["loss"] is None), None)
    config = settings["config"]
    lines = [
        ("task", f"{settings['task']}, {settings['model']}, seed {settings['seed']}, {results['steps']} steps"),
        ("sketch", "none (exact)" if config is None else _sketch(config, settings["budget"])),
        ("all else", "in few bits" if settings.get("rest") else "as it is"),
        ("score", ", ".join(f"{name} {_number(value)}" for name, value in results["metrics"].items())),
        ("kept for backward", f"{memory['kept_bytes'] / 2**20:.1f} MiB at batch {_shape(memory['batch_shape'])}"),
        ("peak", f"{memory['peak_bytes'] / 2**20:.1f} MiB at {memory['peak_place']}"),
        ("added noise", f"{sum(noise) / len(noise):.2f} × the gradient's own" if noise else "none measured"),
        ("speed", "not measured" if speed is None else f"{speed:.1f} samples/s"),
        ("record", str(folder / "record.json")),
    ]
    if diverged is not None:
        lines.insert(3, ("diverged", f"the loss is not finite from step {diverged} on: try a smaller --learning-rate"))
    return "\n".join(f"{name:18} {text}" for name, text in lines)


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def _sketch(config: dict[str, Any], budget: str | int | None) -> str:
    return str(SketchConfig(**config)) if budget is None else f"{config['kind']}, planned for {budget}"


def _shape(shape: list[int]) -> str:
    return " × ".join(map(str, shape))
