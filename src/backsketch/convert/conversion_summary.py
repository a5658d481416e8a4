"""summary: which layers of a model are sketched, which are not, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from ..argument_checks import check_model
from ..linear.algorithm import EXACT_IN_CHECKPOINT, INPUT_IS_HELD, RAN_IN_CHECKPOINT
from ..losses.fused_models import fused_losses, is_deferring_head
from ..rest.packing_modules import rest_of
from ..rest.rest_config import RestConfig
from ..table import Table, together
from .checkpointed_blocks import present_blocks
from .layer_classes import is_sketched
from .left_exact import FROZEN
from .reach import Unreached, reach
from .summary_reasons import weight_trains, why_exact

_WHOLE_MODEL = "(the model)"


@dataclass(frozen=True, slots=True)
class LayerReport:
    """One linear layer: its name, class, shape, whether it is sketched, with what or why not, and if it is frozen."""

    name: str
    type: str
    shape: str
    sketched: bool
    note: str
    frozen: bool = False


@dataclass(frozen=True, slots=True)
class Summary:
    """A report of what of a model is sketched; print it, or read its fields.

    Attributes:
        layers: every linear layer.
        trained: how many weights train, tied ones counted once.
        reached, embeddings: the shares of them in sketched layers, and in embeddings, which keep only indices.
        unreached: the weights of two or more dimensions in no sketched layer, the largest first.
        rest: in how many bits everything else is kept that backward needs; None if it is kept as it is.
        blocks: the blocks that ``checkpoint_`` lets run under activation checkpointing.
        fused_losses: the modules whose loss ``fuse_loss_`` has fused, by name.
    """

    layers: tuple[LayerReport, ...]
    trained: int
    reached: float
    embeddings: float
    unreached: tuple[Unreached, ...]
    rest: RestConfig | None = None
    blocks: tuple[str, ...] = ()
    fused_losses: tuple[str, ...] = ()

    @property
    def sketched(self) -> tuple[LayerReport, ...]:
        return tuple(layer for layer in self.layers if layer.sketched)

    @property
    def exact(self) -> tuple[LayerReport, ...]:
        return tuple(layer for layer in self.layers if not layer.sketched)

    def __str__(self) -> str:
        lines = list(self._totals())
        if self.unreached:
            rows = tuple(
                (
                    each.name,
                    str(len(each.modules)),
                    each.type,
                    " × ".join(map(str, each.shape)),
                    f"{each.share:.1%}",
                    each.reason,
                )
                for each in self.unreached
            )
            titles = ("trained, not sketched", "×", "type", "shape", "share", "why")
            lines += ["", str(Table(titles, rows, numeric=frozenset({1, 4})))]
        for (title, explains), layers in self._listed().items():
            if layers:
                listed = tuple((layer.name, layer.type, layer.shape, layer.note) for layer in layers)
                lines += ["", str(Table((title, "type", "shape", explains), listed))]
        return "\n".join(lines)

    def _listed(self) -> dict[tuple[str, str], list[LayerReport]]:
        """Return the layers by the table that lists them; the table of trained weights has those of its own."""
        above = {name or _WHOLE_MODEL for each in self.unreached for name in each.modules}
        rest = [layer for layer in self.layers if layer.name not in above]
        trained = [layer for layer in rest if not layer.frozen]
        return {
            ("sketched", "how"): [layer for layer in trained if layer.sketched],
            ("left exact", "why"): [layer for layer in trained if not layer.sketched],
            ("frozen", "why"): [layer for layer in rest if layer.frozen],
        }

    def _totals(self) -> Iterator[str]:
        share = f"{self.reached:.1%} of the {self.trained:,} trained weights are in sketched layers"
        frozen = sum(layer.frozen for layer in self.sketched)
        yield (
            f"{share if self.trained else 'no weight trains'}; "
            f"{len(self.sketched)} of {len(self.layers)} linear layers are sketched"
            + (f", {frozen} of them frozen" if frozen else "")
        )
        if self.embeddings:
            yield f"embeddings hold {self.embeddings:.1%} of them, and keep only indices"
        if self.rest is not None:
            yield f"everything else that backward keeps: {self.rest.in_words()}"
        elif self.trained:
            yield "everything else that backward keeps is kept as it is; sketch_(model, rest=True) keeps it in few bits"
        if self.blocks:
            yield f"under activation checkpointing: {together(self.blocks)}"
        if self.fused_losses:
            whose = ", ".join(name or "the model" for name in self.fused_losses)
            yield f"the loss of {whose} is fused: no logits are kept, and its output has none while it trains"


def summary(model: nn.Module) -> Summary:
    """Tell which share of the trained weights of ``model`` is sketched, and of all others why they are not."""
    check_model(model)
    checkpointed = _checkpointed_modules(model)
    reports = (_report(name, module, module in checkpointed) for name, module in model.named_modules())
    rest = rest_of(model)
    found = reach(model, packed=rest is not None)
    layers = tuple(report for report in reports if report is not None)
    shares = found.trained, found.reached, found.embeddings
    ways = rest, present_blocks(model), tuple(fused_losses(model))
    return Summary(layers, *shares, found.unreached, *ways)


def _report(name: str, module: nn.Module, checkpointed: bool) -> LayerReport | None:
    sketched = is_sketched(module)
    note = why_exact(module)
    if sketched:
        note = f"{module.config}{_as_it_ran(module, checkpointed)}" if weight_trains(module) else FROZEN
    if note is None:
        return None
    frozen = hasattr(module, "weight") and not weight_trains(module)
    return LayerReport(name or _WHOLE_MODEL, type(module).__name__, _shape(module), sketched, note, frozen)


def _checkpointed_modules(model: nn.Module) -> set[nn.Module]:
    """Return the modules inside of those that transformers checkpoints or that ``checkpoint_`` has changed."""
    by_transformers = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False) is True]
    blocks = [model.get_submodule(name) for name in present_blocks(model)]
    return {inner for module in (*by_transformers, *blocks) for inner in module.modules()}


def _as_it_ran(module: nn.Module, checkpointed: bool) -> str:
    """Say what became of a sketched layer when it ran."""
    if is_deferring_head(module):
        return "; exact while the loss is fused"
    held = "; exact where it ran, since its input is held anyway" if module.__dict__.get(INPUT_IS_HELD) else ""
    return held + _in_checkpoints(module, checkpointed)


def _in_checkpoints(module: nn.Module, checkpointed: bool) -> str:
    """Say what becomes of a sketched layer that activation checkpointing has run, or is going to run."""
    if not (checkpointed or module.__dict__.get(RAN_IN_CHECKPOINT)):
        return ""
    if module.__dict__.get(EXACT_IN_CHECKPOINT):
        return "; exact inside activation checkpointing"
    return "; inside activation checkpointing it saves little and adds noise: sketch_(model, checkpointed=False)"


def _shape(module: nn.Module) -> str:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or isinstance(weight, UninitializedParameter) or weight.dim() != 2:
        return "?"
    sizes = weight.shape if "Conv1D" in type(module).__name__ else weight.shape[::-1]
    return f"{sizes[0]} -> {sizes[1]}"
