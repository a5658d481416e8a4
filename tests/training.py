"""A tiny BERT, its data and a Trainer with the callback: what the tests of trainers share."""

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from backsketch import SketchConfig
from backsketch.integrations.transformers import SketchCallback

BATCH, LENGTH, STEPS = 8, 12, 6


class Sentences(Dataset):
    """Sentences of random words, padded unless told otherwise."""

    def __init__(self, padded=True):
        self.padded = padded

    def __len__(self):
        return 64

    def __getitem__(self, index):
        words = torch.randint(1, 50, (LENGTH,), generator=torch.Generator().manual_seed(index))
        mask = torch.arange(LENGTH) < (5 + index % 8 if self.padded else LENGTH)
        return {"input_ids": words * mask, "attention_mask": mask.long(), "labels": index % 2}


def make_model():
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=50, num_labels=2
    )
    return BertForSequenceClassification(config)


def make_trainer(folder, callback=None, others=(), padded=True, **options):
    callback = SketchCallback(SketchConfig(ratio=0.25)) if callback is None else callback
    settings = {
        "max_steps": STEPS,
        "per_device_train_batch_size": BATCH,
        "learning_rate": 1e-3,
        "logging_steps": 2,
        "save_steps": STEPS // 2,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "log_level": "error",
        "seed": 3,
        **options,
    }
    arguments = TrainingArguments(str(folder), **settings)
    return Trainer(make_model(), arguments, train_dataset=Sentences(padded), callbacks=[callback, *others])


def train(folder, callback=None, others=(), resume=None, **options):
    trainer = make_trainer(folder, callback, others, **options)
    trainer.train(resume_from_checkpoint=resume)
    return trainer
