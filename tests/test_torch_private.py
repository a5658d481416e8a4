"""Torch's private corners do what the library takes them for, and are used in one file alone."""

import ast
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import backsketch
from backsketch import torch_private as private
from cases import needs_shown_saves

SOURCE = Path(backsketch.__file__).parent
PRIVATE = re.compile(
    r"torch\._[A-Za-z]|from torch[\w.]*\._|aten\._[a-z]|['\"]_grouped_mm|"
    r"\._(cdata|version|base|backward_cls|is_view|parameters|orig_mod|raw_saved\w*)\b(?!\()"
)


def test_no_other_file_uses_them():
    found = {}
    for path in SOURCE.rglob("*.py"):
        if path.name == "torch_private.py":
            continue
        code = ast.unparse(ast.parse(path.read_text()))  # without comments
        lines = [line for line in code.splitlines() if PRIVATE.search(line) and "self._version" not in line]
        if lines:
            found[path.relative_to(SOURCE).as_posix()] = lines
    assert not found


def test_the_search_finds_them():
    assert PRIVATE.search("torch._C._current_graph_task_id()")
    assert PRIVATE.search("from torch.utils._pytree import tree_leaves")
    assert PRIVATE.search("x._version")
    assert PRIVATE.search("torch.ops.aten._fused_adamw_(x)")
    assert not PRIVATE.search("torch.randn(3)")


def test_backward_is_told_from_forward():
    seen = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: seen.append(private.in_backward()))
    y.sum().backward()
    assert seen == [True]
    assert not private.in_backward()


@needs_shown_saves
def test_checkpoints_are_told_in_both_passes():
    plain, selective = [], []

    def region(x):
        plain.append(private.saves_for_checkpoint())
        selective.append(private.runs_for_selective_checkpoint())
        return x.exp()

    x = torch.ones(2, requires_grad=True)
    checkpoint(region, x, use_reentrant=False).sum().backward()
    assert plain == [True, True]
    assert selective == [False, False]
    context = lambda: create_selective_checkpoint_contexts([torch.ops.aten.mm.default])  # noqa: E731
    checkpoint(region, x, use_reentrant=False, context_fn=context).sum().backward()
    assert selective[2:] == [True, True]
    with torch.autograd.graph.save_on_cpu():
        assert not private.saves_for_checkpoint()


def test_tracers_and_fakes_are_told():
    assert not private.is_tracing()
    assert not private.is_exporting()
    with FakeTensorMode():
        assert private.is_fake(torch.ones(2))
    assert not private.is_fake(torch.ones(2))


def test_memory_is_told_apart():
    x = torch.zeros(4)
    assert private.memory_id(x) == private.memory_id(x[1:].view(-1)) != private.memory_id(torch.zeros(4))
    assert private.memory_id(torch.empty(3, device="meta")) != private.memory_id(torch.empty(3, device="meta"))
    before = private.version_of(x)
    x.add_(1)
    assert private.version_of(x) == before + 1
    plain = private.not_a_view(x.view(2, 2))
    assert not plain._is_view()
    assert plain.data_ptr() == x.data_ptr()


@needs_shown_saves
def test_nodes_show_what_they_saved():
    x = torch.randn(2, 3, 4, requires_grad=True)
    for operation in (torch.relu, torch.tanh, torch.sigmoid, lambda x: x.softmax(-1)):
        out = operation(x * 1)
        assert private.saves_its_output(private.producer_of(out.view(6, 4)))
        assert private.memory_id(out) in {private.memory_id(saved) for saved in private.saved_by(out.grad_fn)}
    heads = x.view(2, 1, 3, 4)
    out = F.scaled_dot_product_attention(heads, heads, heads)
    assert private.saves_its_output(out.grad_fn)
    assert not private.saves_its_output(F.gelu(x).grad_fn)
    assert private.producer_of(x.view(-1)) is None


def test_the_node_of_a_function_is_told():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return 2 * grad

    class Same(Doubled):
        pass

    x = torch.ones(2, requires_grad=True)
    assert private.is_node_of(Doubled.apply(x).grad_fn, Doubled)
    assert not private.is_node_of(Same.apply(x).grad_fn, Doubled)
    assert not private.is_node_of((2 * x).grad_fn, Doubled)
    assert not private.is_node_of(None, Doubled)


@needs_shown_saves
def test_the_innermost_hooks_are_told():
    outer, inner = (lambda x: x, lambda x: x), (lambda x: x.clone(), lambda x: x)
    assert private.innermost_hooks() is None
    with saved_tensors_hooks(*outer):
        with saved_tensors_hooks(*inner):
            assert private.innermost_hooks() == inner
        assert private.innermost_hooks() == outer
    assert private.innermost_hooks() is None


def test_hooks_are_replaced_when_they_are_entered():
    packed: list[str] = []
    original = saved_tensors_hooks.__enter__, saved_tensors_hooks.__exit__

    def hooks(name):
        return lambda x: packed.append(name) or x.detach(), lambda x: x  # type: ignore[func-returns-value]

    replacement = hooks("replacement")
    given: list[Any] = []

    def replace(pair):
        given.append(pair)
        return replacement

    x = torch.ones(2, requires_grad=True)
    own = hooks("own")
    with private.replacing_hooks(replace), private.replacing_hooks(replace):
        with saved_tensors_hooks(*own):
            assert private.innermost_hooks() == replacement
            x.square().sum().backward()
        x.square()
        assert private.innermost_hooks() is None
        checkpoint(torch.square, x, use_reentrant=False)
        with torch.autograd.graph.save_on_cpu():
            x.square()
    assert packed == ["replacement"] * 3, "torch no longer enters hooks by saved_tensors_hooks.__enter__"
    assert given[0] == own
    assert len(given) == 3
    assert (saved_tensors_hooks.__enter__, saved_tensors_hooks.__exit__) == original
    with saved_tensors_hooks(*own):
        x.square()
    assert packed[3:] == ["own"]


def test_transforms_are_told():
    seen = []

    def loss(x):
        seen.append((private.transforms_active(), private.transform_levels(), private.is_wrapped(x)))
        assert not private.is_wrapped(private.unwrapped(x))
        return x.sum()

    torch.func.grad(loss)(torch.ones(2))
    assert seen == [(True, ["grad"], True)]
    assert not private.transforms_active()


def test_modules_show_their_own_parameters_and_what_is_compiled():
    layer = nn.Linear(2, 3)
    assert [id(parameter) for parameter in private.own_parameters(layer)] == [id(layer.weight), id(layer.bias)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch's own, in what it loads to compile
        compiled: Any = torch.compile(layer)
        assert private.inside_compiled(compiled) is layer
    assert private.inside_compiled(layer) is layer


@needs_shown_saves
@pytest.mark.parametrize("reentrant", [False, True])
def test_what_saves_the_inputs_of_a_checkpoint_is_called_by_another_function(reentrant, monkeypatch):
    of_checkpoint: Any = torch.utils.checkpoint
    frame = of_checkpoint._CheckpointFrame
    savers = [(of_checkpoint.CheckpointFunction, "apply")]
    savers.append((frame, "save_inputs") if hasattr(frame, "save_inputs") else (of_checkpoint._NoopSaveInputs, "apply"))
    for owner, name in savers:
        save = getattr(owner, name)
        monkeypatch.setattr(owner, name, getattr(save, "_save", save))  # as in a new process; put back at the end
    called = []

    def call(save, args):
        called.append(save)
        return save(*args)

    for _ in range(2):
        private.call_checkpoint_savers_by(call)
    x = torch.ones(2, requires_grad=True)
    checkpoint(torch.sin, x, use_reentrant=reentrant).sum().backward()
    assert len(called) == 1
    assert x.grad is not None
    assert torch.equal(x.grad, x.detach().cos())
