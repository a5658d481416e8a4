"""The outcome of a race as plain data, and whether it meets what is promised."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from .contenders import EXACT, RECOMMENDED, ROWS, WHOLE
from .training import Lane, Race

MOST_LINEAR, LEAST_SAVED, LEAST_SPEED, MOST_LOSS = 0.15, 0.25, 0.95, 0.01
LEAST_SAVED_BY_WHOLE_STEP, MOST_LOSS_OF_WHOLE_STEP = 0.75, 0.02


def outcome(race: Race) -> dict[str, Any]:
    """Return the results of a race, finished or not."""
    contenders = {lane.contender.key: _entry(race, lane) for lane in race.lanes}
    return {
        "steps": race.steps,
        "finished": race.steps == race.scale.steps,
        "own_share": race.own_share,
        "linear_share": contenders[EXACT]["linear_bytes"] / contenders[EXACT]["kept_bytes"],
        "contenders": contenders,
        "promises": list(_promises(contenders)),
    }


def _entry(race: Race, lane: Lane) -> dict[str, Any]:
    config, noise = lane.contender.config, list(lane.noise.values())
    exact = race.exact.validation
    done = [step for step in lane.validation if step in exact]
    loss = lane.validation[done[-1]] if done else None
    return {
        "name": lane.contender.name,
        "config": None if config is None else asdict(config),
        "rest": lane.contender.rest,
        "linear_bytes": lane.memory.linear,
        "kept_bytes": lane.memory.kept,
        "peak_bytes": lane.memory.peak,
        "step_seconds": statistics.median(lane.seconds) if lane.seconds else None,
        "speed": race.speed(lane),
        "noise": sum(noise) / len(noise) if noise else None,
        "validation_loss": loss,
        "loss_above_exact": None if loss is None else loss / exact[done[-1]] - 1,
        "validation": [[step, lane.validation[step]] for step in done],
        "training": lane.losses[: race.steps],
    }


def _promises(contenders: dict[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield each promise with what was measured; ``met`` is None where nothing was measured yet."""
    exact, ours, rows = (contenders[key] for key in (EXACT, RECOMMENDED, ROWS))
    linear = ours["linear_bytes"] / exact["linear_bytes"]
    name, speed, fast = ours["name"], ours["speed"], rows["speed"]
    if (whole := contenders.get(WHOLE)) is not None:
        yield _saving(whole, exact, LEAST_SAVED_BY_WHOLE_STEP)
        yield _loss(whole, MOST_LOSS_OF_WHOLE_STEP)
    yield _promise(f"{name}: at most {MOST_LINEAR:.0%} of the linear inputs", linear, "{:.1%}", linear <= MOST_LINEAR)
    yield _saving(ours, exact, LEAST_SAVED)
    yield _promise(
        f"{name}: at least {LEAST_SPEED} × the speed of exact", speed, "{:.2f} ×", _least(speed, LEAST_SPEED)
    )
    yield _loss(ours, MOST_LOSS)
    yield _promise(f"{rows['name']}: faster than exact", fast, "{:.2f} ×", _least(fast, 1.0))


def _saving(ours: dict[str, Any], exact: dict[str, Any], least: float) -> dict[str, Any]:
    saved = 1 - ours["kept_bytes"] / exact["kept_bytes"]
    return _promise(f"{ours['name']}: at least {least:.0%} less kept in all", saved, "{:.1%}", saved >= least)


def _loss(ours: dict[str, Any], most: float) -> dict[str, Any]:
    loss = ours["loss_above_exact"]
    text = f"{ours['name']}: a loss within {most:.0%} of exact"
    return _promise(text, loss, "{:+.2%}", loss is not None and loss <= most)


def _promise(text: str, measured: float | None, form: str, met: bool) -> dict[str, Any]:
    if measured is None:
        return {"text": text, "measured": None, "shown": "", "met": None}
    return {"text": text, "measured": measured, "shown": form.format(measured), "met": met}


def _least(value: float | None, least: float) -> bool:
    return value is not None and value >= least
