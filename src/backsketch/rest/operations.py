"""The table of operations: how each keeps what it saves for backward. ``register_operation`` adds one.

An operation that is not here keeps what it saves as it is: rounding would ruin one that compares (amax), divides by a
small number (log) or solves equations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..storage import slope_functions as slopes
from ..storage.slopes import Slope
from ..torch_private import GROUPED_PRODUCTS
from . import comparisons
from .attention import Attention, MultiHeadAttention
from .comparisons import Compared
from .dropout import Dropout
from .norms import Norm, NormOverLast, Power
from .pointwise import Pointwise
from .pooling import Pooling
from .probabilities import CrossEntropy, LogSoftmax
from .products import Cast, Multiplied
from .rules import FewBits, InputOfWeight, Masks, Rule
from .shapes import ShapeAlone

OPERATIONS: dict[Callable[..., Any], Rule] = {}


def register_operation(function: Callable[..., Any], rule: Rule) -> None:
    """Let calls of ``function``, as torch hands them to a TorchFunctionMode, run by ``rule``.

    For example ``register_operation(torch.special.i0e, FewBits("other"))``.
    """
    if not callable(function):
        raise TypeError(f"function must be a function of torch, got {function!r}")
    if not isinstance(rule, Rule):
        raise TypeError(f"rule must be a rule such as FewBits('other'), got {rule!r}")
    OPERATIONS[function] = rule


def _register(rule: Rule, *names: str, in_place: Rule | None = None) -> None:
    """Register whatever of torch, Tensor and torch.nn.functional has one of these names.

    What works in place, such as ``sigmoid_``, runs by the rule too, or by one of its own.
    """
    in_place = rule if in_place is None else in_place
    for name in names:
        for space in (torch, Tensor, F, torch.special):
            forms = dict.fromkeys((name, f"__{name}__", f"__r{name}__"), rule)
            forms |= dict.fromkeys((f"{name}_", f"__i{name}__"), in_place)
            for own, its_rule in forms.items():
                function = getattr(space, own, None)
                if function is not None and callable(function):
                    OPERATIONS[function] = its_rule


def _register_pointwise(rule: Pointwise, name: str) -> None:
    """Register an activation function. In place it keeps what it saves: another Function cannot stand for it."""
    _register(rule, name, in_place=FewBits("other"))


def _always(slope: Slope) -> Pointwise:
    """Return the rule of an activation function without options; in place it is not covered."""
    return Pointwise(lambda inplace=False: None if inplace else slope)


def _gelu(approximate: str = "none") -> Slope:
    return slopes.GELU if approximate == "none" else slopes.GELU_TANH


def _softplus(beta: float = 1.0, threshold: float = 20.0) -> Slope | None:
    return slopes.softplus(float(beta), float(threshold)) if beta > 0 else None


def _elu(alpha: float = 1.0, inplace: bool = False) -> Slope | None:
    return None if inplace else slopes.elu(float(alpha))


def _celu(alpha: float = 1.0, inplace: bool = False) -> Slope | None:
    return None if inplace or alpha <= 0 else slopes.celu(float(alpha))


_register_pointwise(Pointwise(_gelu), "gelu")
_register_pointwise(Pointwise(_softplus), "softplus")
_register_pointwise(Pointwise(_elu), "elu")
_register_pointwise(Pointwise(_celu), "celu")
for _name, _slope in {
    "silu": slopes.SILU,
    "mish": slopes.MISH,
    "hardswish": slopes.HARDSWISH,
    "tanh": slopes.TANH,
    "tanhshrink": slopes.TANHSHRINK,
    "sigmoid": slopes.SIGMOID,
    "expit": slopes.SIGMOID,
    "logsigmoid": slopes.LOG_SIGMOID,
    "softsign": slopes.SOFTSIGN,
    "selu": slopes.SELU,
    "erf": slopes.ERF,
    "atan": slopes.ATAN,
    "asinh": slopes.ASINH,
    "sin": slopes.SIN,
    "cos": slopes.COS,
}.items():
    _register_pointwise(_always(_slope), _name)

_register(Multiplied(), "mul", "multiply")
_register(Cast(), "to", "type_as", "float", "half", "bfloat16", "double")
_register(FewBits("product", elementwise=True), "addcmul", "exp")
_register(FewBits("product"), "matmul", "mm", "bmm", "mv", "baddbmm", "einsum", "tensordot", "inner", "outer")
_register(FewBits("product"), "bilinear")
for _grouped in GROUPED_PRODUCTS:  # the input of experts, and their weights
    register_operation(_grouped, FewBits("product", rotated=True))
_register(InputOfWeight(), "linear", "conv1d", "conv2d", "conv3d")
_register(InputOfWeight(), "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
_register(InputOfWeight(position=1, name="mat1"), "addmm")

_register(Attention(), "scaled_dot_product_attention")
_register(MultiHeadAttention(), "multi_head_attention_forward")
_register(FewBits("attention"), "softmax")

_register(NormOverLast(centers=True), "layer_norm")
_register(NormOverLast(centers=False), "rms_norm")
_register(Norm(), "group_norm", "batch_norm", "instance_norm", "native_layer_norm")
_register(Power(), "pow", "square")

_register(LogSoftmax(), "log_softmax")
_register(CrossEntropy(), "cross_entropy")
_register(FewBits("other"), "glu", "reciprocal", "exp2", "sinh", "cosh")
_register(Pooling(1), "max_pool1d")
_register(Pooling(2), "max_pool2d")
_register(Pooling(3), "max_pool3d")
_register(ShapeAlone(), "avg_pool1d", "avg_pool2d", "avg_pool3d")
_register(ShapeAlone(), "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")
_register(ShapeAlone(), "index_add", "index_copy")

_register(Compared(comparisons.of_relu), "relu")
_register(Compared(comparisons.of_leaky_relu), "leaky_relu")
_register(Compared(comparisons.of_relu6), "relu6")
_register(Compared(comparisons.of_hardtanh), "hardtanh")
_register(Compared(comparisons.of_hardsigmoid), "hardsigmoid")
_register(Compared(comparisons.of_clamp), "clamp", "clip")
_register(Dropout(), "dropout", "native_dropout")
_register(Masks(), "where", "masked_fill", "masked_scatter", "masked_select")
