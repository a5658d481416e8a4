"""The text the demo trains on: the sources of the user's own Python standard library, as bytes."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

HELD_OUT = 10  # every tenth file is for validation


@dataclass(frozen=True, slots=True)
class Text:
    """Bytes to train on, and bytes of other files to validate on, each (count,)."""

    training: Tensor
    validation: Tensor

    def batches(self, batch: int, length: int, seed: int) -> Iterator[Tensor]:
        """Yield batches of random windows without end, the same for the same seed: (batch, length + 1)."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            starts = torch.randint(len(self.training) - length, (batch,), generator=generator)
            yield _windows(self.training, starts, length)

    def validation_batches(self, count: int, batch: int, length: int) -> list[Tensor]:
        """Return ``count`` batches of windows that are spread evenly over the validation files."""
        starts = torch.linspace(0, len(self.validation) - length - 1, count * batch, dtype=torch.float64).long()
        return [_windows(self.validation, part, length) for part in starts.view(count, batch)]


def read_library(folder: Path | None = None) -> Text:
    """Return the modules of the standard library, or of ``folder``, in the order of their names."""
    folder = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    sources = [path.read_bytes() for path in sorted(folder.glob("*.py"))]
    held_out = b"".join(sources[::HELD_OUT])
    training = b"".join(source for index, source in enumerate(sources) if index % HELD_OUT)
    if min(len(training), len(held_out)) < 10_000:
        raise ValueError(f"the demo trains on the sources of the standard library, but {folder} has too few of them")
    return Text(*(torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in (training, held_out)))


def _windows(text: Tensor, starts: Tensor, length: int) -> Tensor:
    return text[starts.unsqueeze(1) + torch.arange(length + 1)].long()
