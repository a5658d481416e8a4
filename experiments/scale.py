"""Write docs/scale.md: large models on many cards, on paper. Nothing here was ever run on a card.

    python experiments/scale.py

It computes steps on the meta device with the parts of ``backsketch fit``, writes a record to
experiments/records/scale.json and the page from it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from backsketch.cli.models import build, make_batch
from backsketch.fitting.groups import groups_of
from backsketch.fitting.largest_sizes import largest_batch, largest_length
from backsketch.fitting.rank_share import RankShare
from backsketch.fitting.subject import WaySteps
from backsketch.fitting.ways import ALL, SOME

ROOT = Path(__file__).parent.parent
RECORD, PAGE = ROOT / "experiments/records/scale.json", ROOT / "docs/scale.md"
RANKS, CARDS = (1, 8, 64), (24, 80)  # GB, of which a GB is 10^9 bytes
LENGTHS = (2048, 8192, 32768, 131072)
Size = tuple[int, int]  # batch, length


@dataclass(frozen=True)
class Model:
    """A model by its config, and the steps to compute."""

    title: str
    head: str
    config: Callable[[], Any]
    sizes: Sequence[Size]
    start: Size  # whose length the largest batches have, and whose batch the largest lengths
    most: int | None = None  # the positions, if the length may change


def _llama_8b() -> Any:
    return transformers.LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5,
    )  # fmt: skip


def _llama_70b() -> Any:
    return transformers.LlamaConfig(
        vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5,
    )  # fmt: skip


def _qwen_30b() -> Any:
    return transformers.Qwen3MoeConfig(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=48,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
        norm_topk_prob=True, decoder_sparse_step=1, max_position_embeddings=131072,
    )  # fmt: skip


def _roberta_large() -> Any:
    return transformers.RobertaConfig(
        vocab_size=50265, hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16,
        max_position_embeddings=514, type_vocab_size=1, layer_norm_eps=1e-5,
    )  # fmt: skip


def _vit_huge() -> Any:
    return transformers.ViTConfig(
        hidden_size=1280, intermediate_size=5120, num_hidden_layers=32, num_attention_heads=16, image_size=224,
        patch_size=14, num_labels=1000,
    )  # fmt: skip


LONG = tuple((1, length) for length in LENGTHS)
SHORT = tuple((batch, 512) for batch in (8, 32, 128))
IMAGES = tuple((batch, 257) for batch in (8, 32, 128))  # patches, with the one of the class
MODELS = {
    "llama-3-8b": Model("Llama-3 8B", "causal-lm", _llama_8b, LONG, (1, 8192), LENGTHS[-1]),
    "llama-3-70b": Model("Llama-3 70B", "causal-lm", _llama_70b, LONG, (1, 8192), LENGTHS[-1]),
    "qwen3-30b-a3b": Model("Qwen3-30B-A3B", "causal-lm", _qwen_30b, LONG, (1, 8192), LENGTHS[-1]),
    "roberta-large": Model("RoBERTa-large", "sequence-classification", _roberta_large, SHORT, (32, 512)),
    "vit-h": Model("ViT-H/14", "image-classification", _vit_huge, IMAGES, (32, 257)),
}


def compute(model: Model) -> Iterator[dict[str, Any]]:
    """Yield a row for each way to train, with the peak of each size of a step on every number of ranks."""
    network = build(model.config(), model.head, device="meta", dtype=torch.bfloat16)

    def batches(batch: int, length: int | None) -> Any:
        return (), make_batch(network, model.head, batch=batch, seq=length or 1, device="meta")

    for group in groups_of(network, batches, None, None):
        subject = group.subject
        shares = {ranks: RankShare.of(subject.model, subject.blocks, "adamw", ranks) for ranks in RANKS}
        for way in group.ways:
            steps = WaySteps(subject, way, few=True)
            checkpointed = {ALL: subject.depth, SOME: subject.depth // 2}.get(way.checkpointed, 0)
            made = {size: steps.at(*size, checkpointed) for size in model.sizes}
            yield {
                "group": group.name,
                "way": way.name,
                "checkpointed": [checkpointed, subject.depth],
                "activations": {_name(size): step.kept for size, step in made.items()},
                "ranks": {
                    str(ranks): {
                        "weights": share.weights,
                        "gradients": share.gradients,
                        "states": share.states,
                        "peaks": {_name(size): step.peak(share).total for size, step in made.items()},
                        "largest": {str(card): _largest(model, steps, checkpointed, share, card) for card in CARDS},
                    }
                    for ranks, share in shares.items()
                },
            }


def _largest(model: Model, steps: WaySteps, checkpointed: int, share: RankShare, card: int) -> dict[str, int]:
    """Return the largest batch that fits at a length, and the largest length with a batch, if that may change."""
    (batch, length), memory = model.start, card * 10**9
    found = {"batch": largest_batch(steps, batch, length, checkpointed, share=share, memory=memory)}
    if model.most is not None:
        found["length"] = largest_length(
            steps, batch, length, checkpointed, share=share, memory=memory, most=model.most
        )  # fmt: skip
    return found


def page(records: dict[str, list[dict[str, Any]]], versions: dict[str, str]) -> str:
    """Render the page."""
    parts = [_INTRODUCTION.format(**versions)]
    for key, rows in records.items():
        model = MODELS[key]
        parts.append(f"## {model.title}\n")
        for ranks in map(str, RANKS):
            parts.extend(_section(model, [row | row["ranks"][ranks] for row in rows], ranks))
    return "\n".join(parts).rstrip() + "\n"


def _section(model: Model, rows: list[dict[str, Any]], ranks: str) -> Iterator[str]:
    """Yield what there is to say of a model on a number of ranks: first what fits, then the table."""
    weights, gradients, states = (rows[0][name] / 1e9 for name in ("weights", "gradients", "states"))
    yield f"### {model.title} on {ranks} rank{'' if ranks == '1' else 's'}\n"
    for card in CARDS:
        yield f"- {_verdict(rows, _name(model.start), card)}"
    yield f"- Weights {weights:.2f}, gradients {gradients:.2f}, states {states:.2f} GB per rank.\n"
    sizes = [_name(size) for size in model.sizes]
    yield f"| peak of a step, GB | {' | '.join(sizes)} | {' | '.join(title for title, _, _ in _limits(model))} |"
    yield f"|---|{'---:|' * (len(sizes) + len(_limits(model)))}"
    for row in rows:
        cells = [_cell(row["peaks"][size]) for size in sizes]
        cells += [_size(row["largest"][card][name], model) for _, card, name in _limits(model)]
        yield f"| {_title(row)} | {' | '.join(cells)} |"
    yield ""


def _verdict(rows: list[dict[str, Any]], size: str, card: int) -> str:
    """Say whether a step fits a card and by how much, and if not as it is, in which way."""
    left = [card - row["peaks"][size] / 1e9 for row in rows]
    here = f"{card} GB, {size}:"
    if left[0] >= 0:
        return f"{here} **it fits** as it is, and {left[0]:.1f} GB are left."
    most = max(range(len(rows)), key=lambda index: left[index])
    if left[most] >= 0:
        return (
            f"{here} exact training is {-left[0]:.1f} GB too large. **It fits** with {_title(rows[most])}, and "
            f"{left[most]:.1f} GB are left."
        )
    return f"{here} **it does not fit**: with {_title(rows[most])} it is still {-left[most]:.1f} GB too large."


def _limits(model: Model) -> list[tuple[str, str, str]]:
    """List the columns of largest sizes: title, card, name."""
    batch, length = model.start
    found = [(f"largest batch × {length}, {card} GB", str(card), "batch") for card in CARDS]
    if model.most is not None:
        found += [(f"largest {batch} × length, {card} GB", str(card), "length") for card in CARDS]
    return found


def _size(size: int, model: Model) -> str:
    return "none" if not size else f"{size}*" if size == model.most else str(size)


def _name(size: Size) -> str:
    return f"{size[0]} × {size[1]}"


def _title(row: dict[str, Any]) -> str:
    some, of = row["checkpointed"]
    blocks = f" of {some} of {of} blocks" if 0 < some < of else ""
    return f"{row['way']}{blocks}" + (f", {row['group']}" if row["group"] else "")


def _cell(peak: int) -> str:
    size = peak / 1e9
    text = f"{size:.1f}" if size < 100 else f"{size:.0f}"
    return f"**{text}**" if size <= CARDS[0] else text if size <= CARDS[1] else f"~~{text}~~"


_INTRODUCTION = """# At scale, on paper

How large are the training steps of large models, on how many cards do they fit, and in which way? **Everything on
this page is computed, and nothing of it was ever run on a card.** A few blocks of each model ran on PyTorch's meta
device, which has shapes and no values, and stand for all blocks, which are alike; [fit](fit.md) says how, and which
tests hold it to real steps of small models. For this page no step of all blocks was run.

Before each table stands whether a step fits cards of 24 and 80 GB, by how much, and if exact training does not, with
which way: the one with the lowest peak, where [fit](fit.md) names the fastest that fits. In the table, a **bold** peak
fits a card of 24 GB, a plain one a card of 80 GB, and a ~~struck out~~ one neither. A step of 1 × 2048 has a batch of 1
and a length of 2048; the length of ViT-H/14 is 257, as 256 patches and one of the class make an image. The last
columns have the largest batch at a length and the largest length of a batch, one at a time, that fit a card; * is as
many positions as the model has. A GB is 10^9 bytes; where some blocks are checkpointed, it is half of them. Weights,
gradients and the states of AdamW are in bf16 (no copy of the weights in fp32); the batch is what each rank trains on;
FSDP2 shards over the ranks as [fit](fit.md) describes, with one group a block, which was compared with small models on
two ranks. Tensors are counted, with the buffers of FSDP2: neither the allocator's rounding and fragmentation, nor
CUDA's own memory, nor buffers inside of collectives. Leave a tenth of a card for them.

Made by `python experiments/scale.py` with torch {torch} and transformers {transformers}
([record](../experiments/records/scale.json)).
"""


def main() -> None:
    """Compute what is asked for, and write the record and the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--render", action="store_true", help="Only write the page from the record.")
    options = parser.parse_args()
    recorded = json.loads(RECORD.read_text()) if RECORD.exists() else {"models": {}}
    for key in () if options.render else options.models:
        recorded["models"][key] = list(compute(MODELS[key]))
        recorded["versions"] = {"torch": torch.__version__, "transformers": transformers.__version__}
        RECORD.write_text(json.dumps(recorded, indent=1) + "\n")
        print(f"{key}: {len(recorded['models'][key])} ways")
    ordered = {key: recorded["models"][key] for key in MODELS if key in recorded["models"]}
    PAGE.write_text(page(ordered, recorded["versions"]))


if __name__ == "__main__":
    main()
