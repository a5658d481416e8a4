"""summary: which layers of a model are sketched, which are not, and why."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.nn.parameter import UninitializedParameter

from .autograd import EXACT_IN_CHECKPOINT, RAN_IN_CHECKPOINT
from .conversion import check_model, is_sketched, left_exact_because, sketched_type
from .table import Table


@dataclass(frozen=True, slots=True)
class LayerReport:
    """One linear layer: its name, class, shape, whether it is sketched, and with what or why not."""

    name: str
    type: str
    shape: str
    sketched: bool
    note: str


@dataclass(frozen=True, slots=True)
class Summary:
    """A report of every linear layer of a model; print it, or read ``layers``."""

    layers: tuple[LayerReport, ...]

    @property
    def sketched(self) -> tuple[LayerReport, ...]:
        return tuple(layer for layer in self.layers if layer.sketched)

    @property
    def exact(self) -> tuple[LayerReport, ...]:
        return tuple(layer for layer in self.layers if not layer.sketched)

    def __str__(self) -> str:
        lines = [f"{len(self.sketched)} of {len(self.layers)} linear layers are sketched"]
        for title, layers in (("sketched", self.sketched), ("left exact", self.exact)):
            if layers:
                rows = tuple((layer.name, layer.type, layer.shape, layer.note) for layer in layers)
                lines += ["", str(Table((title, "type", "shape", "how" if layers[0].sketched else "why"), rows))]
        return "\n".join(lines)


def summary(model: nn.Module) -> Summary:
    """List the linear layers of ``model``: how they are sketched, or why they are not."""
    check_model(model)
    checkpointed = _checkpointed_modules(model)
    reports = (_report(name, module, module in checkpointed) for name, module in model.named_modules())
    return Summary(tuple(report for report in reports if report is not None))


def _report(name: str, module: nn.Module, checkpointed: bool) -> LayerReport | None:
    note = _why_exact(module)
    sketched = is_sketched(module)
    if sketched:
        trains = module.weight.requires_grad
        note = (
            f"{module.config}{_in_checkpoints(module, checkpointed)}"
            if trains
            else "frozen: plain F.linear, nothing kept"
        )
    if note is None:
        return None
    return LayerReport(name or "(the model)", type(module).__name__, _shape(module), sketched, note)


def _checkpointed_modules(model: nn.Module) -> set[nn.Module]:
    """Return the modules inside of those for which transformers has switched gradient checkpointing on."""
    switched_on = (module for module in model.modules() if getattr(module, "gradient_checkpointing", False) is True)
    return {inner for module in switched_on for inner in module.modules()}


def _in_checkpoints(module: nn.Module, checkpointed: bool) -> str:
    """Say what becomes of a sketched layer that activation checkpointing has run, or is going to run."""
    if not (checkpointed or module.__dict__.get(RAN_IN_CHECKPOINT)):
        return ""
    if module.__dict__.get(EXACT_IN_CHECKPOINT):
        return "; exact inside activation checkpointing"
    return "; inside activation checkpointing it saves little and adds noise: sketch_(model, checkpointed=False)"


def _why_exact(module: nn.Module) -> str | None:
    """Say why a linear layer is not sketched; None for a module that is not linear at all."""
    kind = type(module)
    if sketched_type(module) is not None:
        return left_exact_because(module) or "not selected"
    if hasattr(module, "base_layer"):
        return None  # an adapter around layers that are listed on their own
    if isinstance(module, nn.MultiheadAttention):
        return "it multiplies its own weights, without linear layers"
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return "nn.MultiheadAttention reads its weight and never calls it"
    if isinstance(getattr(module, "weight", None), UninitializedParameter):
        return "not initialised yet: run one batch, then convert"
    if isinstance(module, nn.Linear):
        return f"{kind.__name__} is a subclass of nn.Linear and may own its forward"
    if ("Linear" in kind.__name__ or "Conv1D" in kind.__name__) and hasattr(module, "weight"):
        return f"{kind.__name__} is not nn.Linear: it computes and stores in its own way"
    return None


def _shape(module: nn.Module) -> str:
    weight = getattr(module, "weight", None)
    if weight is None or isinstance(weight, UninitializedParameter) or weight.dim() != 2:
        return "?"
    sizes = weight.shape if "Conv1D" in type(module).__name__ else weight.shape[::-1]
    return f"{sizes[0]} -> {sizes[1]}"
