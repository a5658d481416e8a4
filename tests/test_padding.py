"""Rows that cannot carry gradient are left out."""

import copy
import gc
import pickle
import threading
import warnings
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from backsketch import (
    SketchConfig,
    SketchedLinear,
    ignore_attention_mask,
    sketch_,
    sketched_linear,
    unsketch_,
    valid_rows,
)
from backsketch.masks import promise
from backsketch.masks.scopes import in_force, masked_rows
from cases import KINDS, within_five_standard_errors

BATCH, LENGTH, FEATURES = 4, 8, 6
CONFIG = SketchConfig(ratio=0.5)


@pytest.fixture
def mask():
    return torch.arange(LENGTH).expand(BATCH, LENGTH) < torch.tensor([8, 5, 2, 1]).unsqueeze(1)


def masked_problem(mask):
    x = torch.randn(BATCH, LENGTH, FEATURES)
    y = torch.randn(BATCH, LENGTH, 3) * mask.unsqueeze(-1)
    return x, y, torch.randn(3, FEATURES, requires_grad=True)


def gradient(x, y, weight, config):
    (grad,) = torch.autograd.grad(sketched_linear(x, weight, None, config), weight, y)
    return grad


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("as_type", [torch.bool, torch.int64, torch.float32])
def test_gradient_is_unbiased_and_the_output_exact(mask, kind, as_type):
    x, y, weight = masked_problem(mask)
    config = SketchConfig(kind=kind, ratio=0.25)
    with valid_rows(mask.to(as_type)):
        torch.testing.assert_close(sketched_linear(x, weight, None, config), x @ weight.t())
        samples = torch.stack([gradient(x, y, weight, config) for _ in range(400)])
    exact = y.flatten(0, 1).t() @ x.flatten(0, 1)
    assert within_five_standard_errors(samples, exact.double(), 1e-5)


def test_all_valid_rows_fit_and_the_gradient_is_exact(mask):
    x, y, weight = masked_problem(mask)
    with valid_rows(mask):  # 16 of 32 rows are valid, and half are kept
        ours = gradient(x, y, weight, CONFIG)
    torch.testing.assert_close(ours, y.flatten(0, 1).t() @ x.flatten(0, 1))


def test_noise_falls_with_the_padding(mask):
    """With half the rows padded, a ratio of 0.25 keeps half of the valid rows."""
    x, y, weight = masked_problem(mask)
    config = SketchConfig(ratio=0.25)
    exact = y.flatten(0, 1).t() @ x.flatten(0, 1)

    def noise():
        return torch.stack([(gradient(x, y, weight, config) - exact).square().sum() for _ in range(500)]).mean()

    plain = noise()
    with valid_rows(mask):
        masked = noise()
    assert masked < 0.5 * plain


def test_thirty_percent_padding_leaves_at_most_two_thirds_of_the_noise():
    """The exact share is (V C - g)(V - k)(B - 1) / ((B C - g)(B - k)(V - 1)) for V valid rows of B."""
    rows, count, dim = 200, 140, 20
    mask = torch.arange(rows) < count
    x, weight = torch.randn(rows, FEATURES) + 1, torch.randn(3, FEATURES, requires_grad=True)
    y = (torch.randn(rows, 3) + 0.5) * mask.unsqueeze(1)
    exact = y.t() @ x

    def error():
        return (gradient(x, y, weight, SketchConfig(dim=dim)) - exact).square().sum()

    plain = torch.stack([error() for _ in range(3000)])
    with valid_rows(mask):
        masked = torch.stack([error() for _ in range(3000)])
    c, g = (x.square().sum(1) * y.square().sum(1)).sum(), exact.square().sum()
    assert within_five_standard_errors(plain, ((rows * c - g) / dim * (rows - dim) / (rows - 1)).item())
    assert within_five_standard_errors(masked, ((count * c - g) / dim * (count - dim) / (count - 1)).item())
    assert masked.mean() <= 0.65 * plain.mean()


def test_kept_rows_are_as_many_with_and_without_a_mask(mask):
    x, _, weight = masked_problem(mask)
    plain = sketched_linear(x, weight, None, CONFIG)
    with valid_rows(mask):
        masked = sketched_linear(x, weight, None, CONFIG)
    assert masked.grad_fn.saved_tensors[-1].shape == plain.grad_fn.saved_tensors[-1].shape


def test_a_mask_that_fits_nothing_is_an_error(mask):
    x, _, weight = masked_problem(mask)
    with pytest.raises(ValueError, match=r"got \(4, 9\); the inputs had \(4, 8\)"), valid_rows(torch.ones(4, 9)):
        sketched_linear(x, weight, None, CONFIG)
    with pytest.raises(TypeError, match="mask must be a tensor"), valid_rows([1, 0]):  # type: ignore[arg-type]
        pass


def test_inputs_of_another_shape_are_sketched_whole(mask):
    x, y, weight = masked_problem(mask)
    config = SketchConfig(ratio=1.0)
    with valid_rows(mask):
        gradient(x, y, weight, config)
        pooled = x[:, 0]
        grad = gradient(pooled, torch.ones(BATCH, 3), weight, config)
    torch.testing.assert_close(grad, pooled.sum(0).expand(3, FEATURES))


def test_an_error_inside_is_not_hidden(mask):
    with pytest.raises(RuntimeError, match="mat1 and mat2"), valid_rows(torch.ones(7, 7)):
        sketched_linear(torch.randn(4, 4), torch.randn(3, 5, requires_grad=True))


class Encoder(nn.Module):
    """A model that is called with an attention mask, as those of transformers are."""

    def __init__(self, checkpointed=False):
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 3)
        self.checkpointed = checkpointed

    def forward(self, x, attention_mask=None):
        if self.checkpointed:
            return checkpoint(self._layers, x, use_reentrant=False)
        return self._layers(x)

    def _layers(self, x):
        return self.second(nn.functional.gelu(self.first(x)))


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("positional", [False, True])
def test_a_model_called_with_an_attention_mask_uses_it(mask, positional, checkpointed):
    """All 16 valid rows of 32 are kept at ratio 0.5: exact, where without the mask it could not be."""
    model = Encoder(checkpointed)
    exact = copy.deepcopy(model)
    sketch_(model, CONFIG)
    x, y, _ = masked_problem(mask)
    outputs = [m(x, mask.long()) if positional else m(x, attention_mask=mask.long()) for m in (model, exact)]
    for out in outputs:
        out.backward(y)
    for one, other in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    model.zero_grad()
    model(x).backward(y)
    unmasked, expected = (each.second.weight.grad.clone() for each in (model, exact))
    assert not torch.allclose(unmasked, expected, rtol=1e-3)


def test_an_error_in_forward_lifts_the_mask(mask):
    model = sketch_(Encoder(), CONFIG)
    with pytest.raises(RuntimeError):
        model(torch.randn(2, 3), attention_mask=mask.long())
    x, y, weight = masked_problem(mask)
    exact = y.flatten(0, 1).t() @ x.flatten(0, 1)
    assert not torch.allclose(gradient(x, y, weight, CONFIG), exact, rtol=1e-3)


class Interrupted(Encoder):
    """A model whose user presses Ctrl-C while it runs."""

    def _layers(self, x):
        raise KeyboardInterrupt


def test_an_interrupt_in_forward_lifts_the_mask(mask):
    model = sketch_(Interrupted(), CONFIG)
    x, y, weight = masked_problem(mask)
    for around in (nullcontext(), valid_rows(mask)):
        with pytest.raises(KeyboardInterrupt), around:
            model(x, attention_mask=mask.long())
        assert masked_rows(x) is None
        assert in_force.innermost is None
    exact = y.flatten(0, 1).t() @ x.flatten(0, 1)
    assert not torch.allclose(gradient(x, y, weight, CONFIG), exact, rtol=1e-3)


class Seen(nn.Module):
    """A module that notes which rows count where it is called."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(FEATURES, FEATURES)  # so that there is something to sketch
        self.rows = []

    def forward(self, x, attention_mask=None):
        self.rows.append(masked_rows(x))
        return self.layer(x)


class Kept(Seen):
    """The same, for a module that takes no mask."""

    def forward(self, x):  # type: ignore[override]
        return super().forward(x)


class Reading(nn.Module):
    """A model that notes which rows count, and may then fail."""

    error: type[BaseException] | None = None

    def __init__(self):
        super().__init__()
        self.encoder = Kept()

    def forward(self, x, attention_mask=None):
        out = self.encoder(x)
        if self.error is not None:
            raise self.error
        return out


class Nested(nn.Module):
    """A model that calls itself, with a mask of its own, between two calls of its encoder."""

    def __init__(self):
        super().__init__()
        self.encoder = Kept()

    def forward(self, x, attention_mask, inner=None):
        if inner is None:
            return self.encoder(x)
        return self.encoder(self(self.encoder(x), inner))


def test_an_interrupted_call_leaves_no_mask_to_the_next_one_even_while_its_traceback_is_kept(mask):
    model, x = sketch_(Reading(), CONFIG), torch.randn(BATCH, LENGTH, FEATURES)
    model.error = KeyboardInterrupt
    kept = []
    for _ in range(2):
        try:
            model(x, mask.long())
        except KeyboardInterrupt as error:
            kept.append(error)
    model.error = None
    model(x)
    model(x, mask.flip(0).long())
    assert model.encoder.rows[-2] is None
    assert torch.equal(model.encoder.rows[-1], mask.flip(0).flatten())
    kept.clear()
    assert in_force.innermost is None
    assert not in_force._scopes


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit])
def test_a_forward_that_fails_pins_no_activation(mask, error):
    model = sketch_(Reading(), CONFIG)
    model.error = error
    died = []

    def fail():
        x = torch.randn(BATCH, LENGTH, FEATURES, requires_grad=True)
        hidden = model.encoder.register_forward_hook(lambda module, args, out: died.append(weakref.ref(out)))
        died.append(weakref.ref(x))
        with pytest.raises(error):
            model(x * 2, attention_mask=mask.long())
        hidden.remove()

    fail()
    model.encoder.rows.clear()
    gc.collect()
    assert len(died) == 2
    assert [each() for each in died] == [None, None]
    assert in_force.innermost is None


def test_a_module_that_calls_itself_is_under_the_mask_of_each_call(mask):
    model, x = sketch_(Nested(), CONFIG), torch.randn(BATCH, LENGTH, FEATURES)
    model(x, mask.long(), inner=mask.flip(0).long())
    before, inside, after = model.encoder.rows
    assert torch.equal(before, mask.flatten())
    assert torch.equal(inside, mask.flip(0).flatten())
    assert after is before
    assert not in_force._scopes


def test_a_mask_is_of_its_thread(mask):
    model, x = sketch_(Reading(), CONFIG), torch.randn(BATCH, LENGTH, FEATURES)
    found: list[Tensor | None] = []

    def look_elsewhere(module, args):
        thread = threading.Thread(target=lambda: found.append(masked_rows(x)))
        thread.start()
        thread.join()

    model.encoder.register_forward_pre_hook(look_elsewhere)
    model(x, mask.long())
    assert found == [None]
    assert torch.equal(model.encoder.rows[0], mask.flatten())


def test_a_hook_that_replaces_the_arguments_of_a_call_leaves_it_whole(mask):
    """Its rows are then all sketched, and nothing of it is left in force."""
    model, x = sketch_(Reading(), CONFIG), torch.randn(BATCH, LENGTH, FEATURES)
    model.register_forward_pre_hook(lambda module, args, kwargs: (args, dict(kwargs)), with_kwargs=True)
    model(x, attention_mask=mask.long())
    assert model.encoder.rows == [None]
    assert in_force.innermost is None


class Pair(nn.Module):
    """Two inputs of one shape, each with a mask of its own, through one encoder."""

    def __init__(self):
        super().__init__()
        self.encoder = Seen()

    def forward(self, x, attention_mask, other, other_attention_mask):
        return self.encoder(x, attention_mask=attention_mask) + self.encoder(other, other_attention_mask)


def test_the_innermost_mask_holds(mask):
    model = sketch_(Pair(), CONFIG)
    x, other = torch.randn(2, BATCH, LENGTH, FEATURES)
    model(x, mask.long(), other, mask.flip(0).long())
    first, second = model.encoder.rows
    assert torch.equal(first, mask.flatten())
    assert torch.equal(second, mask.flip(0).flatten())
    model(x, mask.long(), other, torch.ones_like(mask).long())  # nothing of the other is padded
    assert model.encoder.rows[-1] is None
    assert in_force.innermost is None


def test_modules_inside_are_under_the_mask_around_them(mask):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.plain = Seen(), Kept()

        def forward(self, x, attention_mask):
            lengthened = attention_mask[:, None, None].float()
            return self.plain(self.inner(x, attention_mask=lengthened))

    model = sketch_(Outer(), CONFIG)
    model(torch.randn(BATCH, LENGTH, FEATURES), mask.long())
    seen = (*model.inner.rows, *model.plain.rows)
    assert len(seen) == 2
    assert all(torch.equal(rows, mask.flatten()) for rows in seen)


def test_a_model_is_found_inside_whatever_calls_it(mask):
    """A LightningModule's training_step calls the model, never the module's own forward."""

    class Training(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = Seen()

        def training_step(self, x, mask):
            return self.model(x, attention_mask=mask)

    training = sketch_(Training(), CONFIG)
    training.training_step(torch.randn(BATCH, LENGTH, FEATURES), mask.long())
    assert torch.equal(training.model.rows[0], mask.flatten())


class Reader(nn.Module):
    """A module with one part that is called with a mask and one that is not."""

    def __init__(self):
        super().__init__()
        self.own, self.plain = Seen(), Kept()

    def run(self, x, mask):
        return self.own(self.plain(x), mask)


READERS = {
    "decoder_input_ids": lambda self, x, attention_mask, decoder_input_ids=None: self.run(x, attention_mask),
    "pixel_values": lambda self, x, attention_mask, pixel_values=None: self.run(x, attention_mask),
    "encoder_hidden_states": lambda self, x, attention_mask, encoder_hidden_states=None: self.run(x, attention_mask),
}


@pytest.mark.parametrize("argument", READERS)
def test_a_module_that_reads_other_tokens_too_is_under_no_mask(mask, argument):
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = type("Both", (Reader,), {"forward": READERS[argument]})()

        def forward(self, x, attention_mask):
            return self.inner(x, attention_mask, **{argument: x})

    model = sketch_(Wrapper(), CONFIG)
    model(torch.randn(BATCH, LENGTH, FEATURES), mask.long())
    assert model.inner.plain.rows == [None]
    assert torch.equal(model.inner.own.rows[0], mask.flatten())  # which is called with a mask of its own


def test_a_model_can_ignore_its_masks_for_good(mask):
    model = Pair()
    ignore_attention_mask(model)
    x = torch.randn(BATCH, LENGTH, FEATURES)
    for _ in range(2):
        sketch_(model, CONFIG)
        model(x, mask.long(), x, mask.long())
    unsketch_(model)
    ignore_attention_mask(sketch_(model, CONFIG).encoder)
    ignore_attention_mask(model, False)
    model(x, mask.long(), x, mask.long())
    assert model.encoder.rows == [None] * 6
    ignore_attention_mask(model.encoder, ignore=False)
    model(x, mask.long(), x, mask.long())
    assert torch.equal(model.encoder.rows[-1], mask.flatten())


def test_what_a_model_ignores_its_parts_do_too_however_they_are_converted(mask):
    model = Pair()
    ignore_attention_mask(model)
    sketch_(model.encoder, CONFIG)
    x = torch.randn(BATCH, LENGTH, FEATURES)
    model(x, mask.long(), x, mask.long())
    assert set(model.encoder.rows) == {None}


class Causal(nn.Module):
    """One block of a causal model with eager attention, and its loss: the next token, none for padded ones."""

    def __init__(self):
        super().__init__()
        self.read = nn.Linear(FEATURES, 3 * FEATURES)
        self.write = nn.Linear(FEATURES, FEATURES)
        self.head = nn.Linear(FEATURES, 5)

    def forward(self, x, labels, attention_mask):
        query, key, value = self.read(x).chunk(3, -1)
        allowed = torch.ones(LENGTH, LENGTH).tril().bool() & attention_mask.unsqueeze(1)
        scores = (query @ key.mT).masked_fill(~allowed, torch.finfo(x.dtype).min)
        logits = self.head(x + self.write(scores.softmax(-1) @ value))
        labels = labels.masked_fill(~attention_mask, -100)
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@pytest.mark.parametrize("side", ["right", "left", "both"])
def test_padding_that_a_causal_model_reads_is_not_left_out(mask, side):
    mask = {"right": mask, "left": mask.flip(1), "both": mask.roll(2, 1)}[side]
    model, x, labels = Causal(), torch.randn(BATCH, LENGTH, FEATURES), torch.randint(5, (BATCH, LENGTH))

    def gradients():
        model.zero_grad()
        model(x, labels, attention_mask=mask).backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    exact = gradients()
    sketch_(model, SketchConfig(ratio=1.0, min_dim=10**6, bits=4))
    sampled = torch.stack([torch.cat([g.flatten() for g in gradients()]) for _ in range(200)])
    assert within_five_standard_errors(sampled, torch.cat([g.flatten() for g in exact]))


def test_hooks_go_with_unsketch_and_survive_copies(mask):
    model = sketch_(sketch_(Encoder(), CONFIG), CONFIG)
    assert len(model._forward_pre_hooks) == len(model._forward_hooks) == 1
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        x, y, _ = masked_problem(mask)
        other(x, attention_mask=mask.long()).backward(y)
        unsketch_(other)
        assert not other._forward_pre_hooks
        assert not other._forward_hooks
    assert isinstance(model.first, SketchedLinear)


def test_a_model_that_takes_no_mask_gets_no_hooks():
    model = sketch_(nn.Sequential(nn.Linear(FEATURES, 3)), CONFIG)
    assert not model._forward_pre_hooks


def test_a_single_layer_follows_the_context(mask):
    layer = SketchedLinear(FEATURES, 3, config=CONFIG)
    x, y, _ = masked_problem(mask)
    with valid_rows(mask):
        layer(x).backward(y)
    torch.testing.assert_close(layer.weight.grad, y.flatten(0, 1).t() @ x.flatten(0, 1))


def test_restoring_the_random_state_does_not_bring_a_mask_back(mask):
    model = sketch_(Encoder(), CONFIG)
    x, _, _ = masked_problem(mask)
    state = torch.get_rng_state()
    first = model(x, attention_mask=mask.long())
    torch.set_rng_state(state)
    second = model(x)
    second.backward(torch.ones_like(second))
    exact = copy.deepcopy(model)
    unsketch_(exact).zero_grad()
    exact(x).sum().backward()
    assert first.grad_fn is not None
    grad, expected = (each.second.weight.grad.clone() for each in (model, exact))
    assert (grad * expected).sum() / expected.square().sum() > 0.6  # the mask would leave half of the rows out
    assert not torch.allclose(grad, expected)


def test_two_masks_under_one_seed_are_not_mistaken_for_each_other(mask):
    model = sketch_(Encoder(checkpointed=True), CONFIG)
    x, y, _ = masked_problem(mask)
    state = torch.get_rng_state()
    first = model(x, attention_mask=mask.long())
    torch.set_rng_state(state)
    second = model(x, attention_mask=mask.flip(0).long())
    with pytest.raises(RuntimeError, match="cannot tell which mask"):
        first.backward(y)
    del first, second


def test_a_seed_that_is_drawn_again_compares_no_masks_without_values_or_of_two_devices(mask):
    x, _, weight = masked_problem(mask)
    outs = []
    for device in ("cpu", "meta", "meta"):
        torch.manual_seed(1)
        with valid_rows(mask.to(device)):
            own = weight.detach().to(device).requires_grad_()
            outs.append(sketched_linear(x.detach().to(device), own, None, CONFIG))
    assert [out.device.type for out in outs] == ["cpu", "meta", "meta"]


def test_a_mask_in_force_in_backward_is_not_the_one_of_forward(mask):
    model = sketch_(Encoder(checkpointed=True), CONFIG)
    exact = unsketch_(copy.deepcopy(model))
    x, y, _ = masked_problem(mask)
    out = model(x, attention_mask=mask.long())
    with valid_rows(~mask):
        out.backward(y)
    exact(x).backward(y)
    torch.testing.assert_close(model.second.weight.grad, exact.second.weight.grad)


def test_a_broken_promise_is_told(mask):
    x, _, weight = masked_problem(mask)
    with valid_rows(mask), pytest.warns(RuntimeWarning, match="rows that the mask leaves out get a gradient"):
        gradient(x, torch.ones(BATCH, LENGTH, 3), weight, CONFIG)


def test_a_promise_broken_in_any_layer_is_told(mask):
    """The last layer's gradient is zero where it should be; the first one's is not."""
    model = sketch_(Encoder(), CONFIG)
    x, y, _ = masked_problem(mask)
    hidden = []
    model.first.register_forward_hook(lambda module, args, out: hidden.append(out))
    out = model(x, attention_mask=mask.long())
    with pytest.warns(RuntimeWarning, match="rows that the mask leaves out get a gradient"):
        ((out * y).sum() + hidden[0].sum()).backward()


def test_the_mask_of_an_encoder_does_not_touch_the_decoder():
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=50,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
        dropout_rate=0.0,
    )
    model = transformers.T5ForConditionalGeneration(config).train()
    ids, mask = torch.randint(1, 50, (4, 10)), torch.ones(4, 10, dtype=torch.long)
    mask[:, 4:] = 0
    model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
    names = {"encoder": "encoder.block.0.layer.0.SelfAttention.q", "decoder": "decoder.block.0.layer.0.SelfAttention.q"}
    exact = {side: model.get_submodule(name).weight.grad.clone() for side, name in names.items()}
    sketch_(model, SketchConfig(ratio=0.5))
    found: dict[str, list[Tensor]] = {side: [] for side in names}
    for _ in range(60):
        model.zero_grad()
        model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
        for side, name in names.items():
            found[side].append(model.get_submodule(name).weight.grad)
    for grad in found["encoder"]:  # all 16 valid rows of 40 are among the 20 kept
        torch.testing.assert_close(grad, exact["encoder"])
    shares = [(grad * exact["decoder"]).sum() / exact["decoder"].square().sum() for grad in found["decoder"]]
    assert within_five_standard_errors(torch.stack(shares), 1.0)
    assert torch.stack(shares).std() > 0.01  # sketched, after all


# An accelerator is not waited for: it leaves a flag


class Arrival:
    """Stands for a device's event: what was sent has arrived once ``ready``."""

    ready = False

    def query(self):
        return self.ready


@pytest.fixture
def accelerator(monkeypatch):
    """Take CPU tensors for tensors of a device whose answers come late, and return when they come."""
    arrival = Arrival()
    monkeypatch.setattr(promise, "_answers_at_once", lambda y: False)
    monkeypatch.setattr(promise._Flag, "of", lambda value: promise._Flag(value, arrival))  # type: ignore[arg-type]
    monkeypatch.setattr(promise, "_flags", promise._Flags())
    return arrival


@pytest.mark.parametrize("kept", [True, False])
def test_an_accelerator_tells_a_step_later_that_a_mask_broke_its_promise(mask, accelerator, kept):
    x, y, weight = masked_problem(mask)
    if not kept:
        y = y + 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with valid_rows(mask):
            out = sketched_linear(x, weight, None, CONFIG)
        out.backward(y)
    accelerator.ready = True
    with (
        pytest.warns(RuntimeWarning, match="rows that the mask leaves out get a gradient")
        if not kept
        else nullcontext()
    ):
        with valid_rows(mask):
            out = sketched_linear(x, weight, None, CONFIG)
        out.backward(y * mask.unsqueeze(-1))


def test_a_slow_accelerator_is_asked_a_bounded_number_of_times(mask, accelerator):
    x, y, weight = masked_problem(mask)
    for _ in range(3 * promise._MOST_WAITING):
        with valid_rows(mask):
            sketched_linear(x, weight, None, CONFIG).backward(y)
    assert len(promise._flags._waiting) == promise._MOST_WAITING
    promise._flags._waiting.clear()
    promise._flags._calls = promise._ALL_UNTIL + 1
    asked = [promise._flags.wants_another() for _ in range(promise._THEN_EVERY)]
    assert sum(asked) == 1


@pytest.mark.parametrize("rows", [5, 200])
def test_whether_masked_rows_have_a_gradient_is_found_without_reading_a_value(rows):
    valid = torch.arange(rows) % 3 > 0
    y = torch.randn(rows, 4) * valid.unsqueeze(1)
    assert not promise.any_masked_gradient(valid, y)
    assert promise.any_masked_gradient(valid, y + 1)
    assert not promise.any_masked_gradient(torch.ones(rows, dtype=torch.bool), y)
    assert promise.any_masked_gradient(valid.to("meta"), y.to("meta")).is_meta
