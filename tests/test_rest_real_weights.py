"""Few bits for everything on pretrained weights, whose outliers random weights do not have."""

import os
from pathlib import Path

import pytest
import torch

from backsketch import RestConfig, sketch_, unsketch_
from cases import needs_shown_saves, within_five_standard_errors

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.slow, needs_shown_saves]

MODELS = {
    "minilm-l6": transformers.AutoModelForSequenceClassification,
    "smollm2-135m": transformers.AutoModelForCausalLM,
}
SHARED = Path(__file__).parent.parent.parent / "shared"
LENGTH = 128


def sentences(count):
    """Return sentences of MRPC, or skip where they are not at hand."""
    path = SHARED / "glue" / "MRPC" / "dev.tsv"
    if not path.is_file():
        pytest.skip("needs the sentences of MRPC beside the project")
    lines = path.read_text(encoding="utf-8").splitlines()[1 : count + 1]
    return [line.split("\t")[-1] for line in lines], torch.tensor([int(line[0]) for line in lines])


def windows(tokens, count):
    """Return consecutive windows of a text, or skip where it is not at hand."""
    path = SHARED / "text" / "wikitext2-valid.txt"
    if not path.is_file():
        pytest.skip("needs a text beside the project")
    words = tokens(path.read_text(encoding="utf-8")[: 40 * count * LENGTH])["input_ids"][: count * LENGTH]
    return torch.tensor(words).view(count, LENGTH)


def trained(name):
    """Return a pretrained model and the function that computes its gradient on a few texts, as one vector."""
    folder = Path(os.environ.get("BACKSKETCH_WEIGHTS", ""), name)
    if "BACKSKETCH_WEIGHTS" not in os.environ or not folder.is_dir():
        pytest.skip(f"BACKSKETCH_WEIGHTS must name a folder with {name} in it")
    tokens = transformers.AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)  # the classifier is new
    model = MODELS[name].from_pretrained(folder, dtype=torch.float32).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    if name == "minilm-l6":
        texts, labels = sentences(16)
        batch = {**tokens(texts, padding=True, return_tensors="pt"), "labels": labels}
    else:
        ids = windows(tokens, 4)
        batch = {"input_ids": ids, "labels": ids, "use_cache": False}

    def gradient():
        model.zero_grad()
        model(**batch).loss.backward()
        return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])

    return model, gradient


@pytest.mark.parametrize("name", MODELS)
def test_eight_bits_change_the_gradient_by_less_than_a_thousandth_of_its_square(name):
    model, gradient = trained(name)
    exact = gradient()
    sketch_(model, {"*": None}, rest=8)
    error = (gradient() - exact).square().sum() / exact.square().sum()
    print(f"{name}: {error:.2e}")
    assert 0 < error < 1e-3


@pytest.mark.parametrize("name", MODELS)
def test_unbiased_families_are_unbiased(name):
    model, gradient = trained(name)
    exact = gradient()
    sketch_(model, {"*": None}, rest=RestConfig(attention=None, norm=None, other=None))
    draws = [gradient() for _ in range(12)]
    along = torch.stack([(drawn * exact).sum() / exact.square().sum() for drawn in draws])
    print(f"{name}: {along.mean():.4f} ± {along.std() / 12**0.5:.4f}")
    assert within_five_standard_errors(along, 1)
    unsketch_(model)
    assert torch.equal(gradient(), exact)
