"""torch.func: functional_call, grad and vjp work; what cannot is refused in words."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from backsketch import SketchConfig, sketch_, unsketch_
from cases import within_five_standard_errors

# torch's own forward mode still loads its decompositions by the deprecated torch.jit.script.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")

ROWS, FEATURES = 20, 6


@pytest.fixture
def model():
    layers = nn.Sequential(nn.Linear(FEATURES, 5), nn.GELU(), nn.Linear(5, 3))
    return sketch_(layers, SketchConfig(kind="hash", ratio=0.3, bits=8))


@pytest.fixture
def x():
    return torch.randn(ROWS, FEATURES)


def loss_of(model):
    return lambda parameters, x: functional_call(model, parameters, (x,)).square().sum()


def detached(model):
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("parameters", [detached, lambda model: dict(model.named_parameters())])
def test_grad_and_vjp_are_backward_bit_for_bit(model, x, parameters):
    loss = loss_of(model)
    torch.manual_seed(1)
    loss(dict(model.named_parameters()), x).backward()
    torch.manual_seed(1)
    by_grad = grad(loss)(parameters(model), x)
    torch.manual_seed(1)
    by_vjp = vjp(lambda p: loss(p, x), parameters(model))[1](torch.ones(()))[0]
    for name, parameter in model.named_parameters():
        assert torch.equal(by_grad[name], parameter.grad)
        assert torch.equal(by_vjp[name], parameter.grad)


def test_grad_is_unbiased(model, x):
    parameters = detached(model)
    samples = torch.stack([grad(loss_of(model))(parameters, x)["2.weight"] for _ in range(400)])
    exact = grad(loss_of(model.eval()))(parameters, x)["2.weight"]
    assert within_five_standard_errors(samples, exact.double(), 1e-4)


UNSUPPORTED = {
    "vmap of grad": lambda loss, p, x: vmap(grad(loss), in_dims=(None, 0))(p, x.view(4, 5, -1)),
    "vmap of the input": lambda loss, p, x: vmap(loss, in_dims=(None, 0))(p, x.view(4, 5, -1)),
    "vmap of the parameters": lambda loss, p, x: vmap(loss, (0, None))(
        {k: torch.stack([v, v]) for k, v in p.items()}, x
    ),
    "jvp": lambda loss, p, x: jvp(lambda a: loss(p, a), (x,), (x,)),
    "hessian": lambda loss, p, x: hessian(loss)(p, x),
    "jacfwd": lambda loss, p, x: jacfwd(loss)(p, x),
    "jacrev": lambda loss, p, x: jacrev(loss)(p, x),
    "grad of grad": lambda loss, p, x: grad(lambda q: grad(loss)(q, x)["0.weight"].sum())(p),
}


@pytest.mark.parametrize("call", UNSUPPORTED.values(), ids=list(UNSUPPORTED))
def test_what_cannot_work_says_so(model, x, call):
    """Without the check grad of grad is silently zero, and vmap over the parameters silently keeps the whole input."""
    with pytest.raises(NotImplementedError, match=r"one level of torch.func.grad or vjp, got .*unsketch_"):
        call(loss_of(model), dict(model.named_parameters()), x)


def test_forward_mode_says_so(model, x):
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward mode AD"):  # torch's own words
        model(forward_ad.make_dual(x, x))


@pytest.mark.parametrize("call", UNSUPPORTED.values(), ids=list(UNSUPPORTED))
def test_eval_supports_what_linear_supports(model, x, call):
    exact = unsketch_(copy.deepcopy(model))
    ours, expected = (call(loss_of(each), dict(each.named_parameters()), x) for each in (model.eval(), exact))
    torch.testing.assert_close(ours, expected)


def test_frozen_weights_support_what_linear_supports(model, x):
    frozen = detached(model.requires_grad_(False))
    out = vmap(lambda a: functional_call(model, frozen, (a,)))(x.view(4, 5, -1))
    torch.testing.assert_close(out.flatten(0, 1), model(x))
    jvp(lambda a: functional_call(model, frozen, (a,)), (x,), (x,))


@pytest.mark.parametrize("features", [32, 576])
def test_grad_of_a_layer_whose_rows_are_rotated(features):
    layer = sketch_(nn.Linear(features, 20), SketchConfig(bits=8, ratio=1.0, rotate=True))
    x, y = torch.randn(64, features), torch.randn(64, 20)

    def loss(parameters):
        return (torch.func.functional_call(layer, parameters, (x,)) * y).sum()

    found, exact = torch.func.grad(loss)(dict(layer.named_parameters()))["weight"], y.t() @ x
    assert (found - exact).norm() < 0.02 * exact.norm()
