"""A stand-in for packing that takes note of who enters it."""

from contextlib import contextmanager

from backsketch import RestConfig
from backsketch.rest import packing_modules


class Recorder:
    """Counts the blocks that are open, and takes note of those entered while none was, as the others do nothing."""

    def __init__(self):
        self.entered: list[RestConfig] = []
        self.open = 0

    @contextmanager
    def packing(self, config):
        if not self.open:
            self.entered.append(config)
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1

    def during(self, call):
        """Return the configs that were put in force during ``call``."""
        self.entered.clear()
        call()
        return list(self.entered)


def recorded_packing(monkeypatch):
    """Put a recorder in the place of packing, and at the end check that nothing is left open."""
    recorder = Recorder()
    monkeypatch.setattr(packing_modules, "packing", recorder.packing)
    yield recorder
    assert not recorder.open
