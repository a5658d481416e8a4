"""A tiny random BERT with a tokenizer, saved as a pretrained model is."""

import json

import torch
from transformers import BertConfig, BertForSequenceClassification

from glue_files import WORDS

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def save_tiny_bert(folder):
    """Save the model to the folder and return it as a string."""
    vocabulary = [*SPECIAL, *WORDS, '"', "quoted"]
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    BertForSequenceClassification(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "BertTokenizer", "model_max_length": 64, "do_lower_case": True})
    )
    return str(folder)
