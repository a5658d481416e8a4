"""Find the choice of least noise whose measured total is within a limit, with few checkpointed blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .model_setting import ModelSetting
from .plan_result import PlanError
from .step_choices import Choice, Found, StepChoices

_NEAR = 0.002  # of the limit: nearer than this, a search ends
_MOST_TRIES = 16


@dataclass(frozen=True, eq=False)
class TotalSearch:
    """A search over measured totals.

    Attributes:
        measure: the total of a setting, in bytes.
        choices: what may be chosen with so many blocks checkpointed, the first ones, and their inputs in so many bits.
        blocks: how many blocks there are; cap: how much noise there may be before blocks are checkpointed.
    """

    measure: Callable[[ModelSetting], float]
    choices: Callable[[int, int | None], StepChoices]
    blocks: int
    cap: float

    def within(self, limit: int, tries: int = _MOST_TRIES) -> Found:
        """Return the choice for ``limit``, or raise PlanError with the least that is possible.

        It measures about ``tries`` settings. First come few bits, then checkpointed blocks, then few bits for their
        inputs, and then more noise than the cap.
        """
        for choices, start in self._starts(limit):
            if self.measure(start.setting) <= limit:
                return self._quietest(choices, start, limit, tries)
        floors = [self.choices(count, bits).with_bytes(0).setting for count, bits in self._ends()]
        raise LimitError(int(min(map(self.measure, [ModelSetting(), *floors]))))

    def beyond(self, found: Found, limit: int, tries: int) -> Found:
        """Return the choice for a higher limit than that of ``found``, with the same blocks."""
        return self._quietest(self.choices_of(found.choice), found.choice, limit, tries)

    def choices_of(self, choice: Choice) -> StepChoices:
        """Return what may be chosen with the same blocks checkpointed as in ``choice``."""
        setting = choice.setting
        return self.choices(len(setting.blocks), None if setting.rest is None else setting.rest.checkpoint)

    def _starts(self, limit: int) -> Iterator[tuple[StepChoices, Choice]]:
        """Yield what a search may start from: the cheapest choice within the cap, and then the cheapest of all."""

        def fits(count: int) -> bool:
            start = self.choices(count, None).with_noise(self.cap)
            return start is not None and self.measure(start.setting) <= limit

        counts = [0] if fits(0) else [self._fewest(fits)] if self.blocks and fits(self.blocks) else []
        tries = [(count, None) for count in counts] if counts else [(self.blocks, 8)] if self.blocks else []
        for count, bits in tries:
            choices = self.choices(count, bits)
            if (start := choices.with_noise(self.cap)) is not None:
                yield choices, start
        for count, bits in self._ends():
            choices = self.choices(count, bits)
            yield choices, choices.with_bytes(0)

    def _ends(self) -> list[tuple[int, int | None]]:
        """List where the least total may be: checkpointing a block can also raise the peak, while it runs again."""
        return [(self.blocks, None), (self.blocks, 8), (0, None)] if self.blocks else [(0, None)]

    def _fewest(self, fits: Callable[[int], bool]) -> int:
        """Return the least number of blocks that fits; none does not, and all do."""
        low, high = 0, self.blocks
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(middle) else (middle, high)
        return high

    def _quietest(self, choices: StepChoices, start: Choice, limit: int, tries: int) -> Found:
        """Spend what ``start`` leaves of the limit on less noise: a byte more kept is about a byte more in total."""
        best = Found(start, self.measure(start.setting))
        low, high, total = start.bytes, choices.most + 1, best.total
        beyond: float | None = None  # the total at high, once it is known
        for attempt in range(tries):
            if high - low <= 1 or limit - total <= _NEAR * limit or not best.choice.noise:
                break
            guess = low + int(limit - total)
            if attempt % 3 == 2:
                guess = (low + high) // 2
            elif beyond is not None and total < beyond < math.inf:
                guess = low + int((high - low) * (limit - total) / (beyond - total))
            guess = max(low + 1, min(guess, high - 1))
            choice = choices.with_bytes(guess)
            measured = self.measure(choice.setting)
            if measured > limit:
                high, beyond = guess, measured
                continue
            low, total = guess, measured
            if choice.noise <= best.choice.noise:
                best = Found(choice, measured)
        return best


class LimitError(PlanError):
    """No choice is within the limit; ``least`` is the least total that is possible."""

    def __init__(self, least: int) -> None:
        super().__init__(f"the least that is possible is {least} bytes")
        self.least = least
