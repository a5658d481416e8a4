"""Train a transformers model with its Trainer: one callback converts, logs and restores."""

import tempfile

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, PrinterCallback, Trainer, TrainingArguments

import backsketch as bs
from backsketch.integrations.transformers import SketchCallback


class Words(Dataset):
    """Made-up sentences of different lengths; the label is whether the first word is an even one."""

    def __len__(self):
        return 128

    def __getitem__(self, index):
        length = 8 + index % 9
        words = torch.zeros(16, dtype=torch.long)
        words[:length] = torch.arange(1, length + 1) + index % 50
        mask = (torch.arange(16) < length).long()
        return {"input_ids": words, "attention_mask": mask, "labels": int(words[0]) % 2}


torch.manual_seed(0)
model = BertForSequenceClassification(
    BertConfig(vocab_size=100, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256)
)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        max_steps=12,
        logging_steps=4,
        per_device_train_batch_size=16,
        learning_rate=1e-3,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    heads = {"*pooler*": None, "classifier": None}  # they read one row a sentence: few bytes, much noise
    callback = SketchCallback({**heads, "*": bs.SketchConfig.recommended()}, noise_every=4)
    trainer = Trainer(model, arguments, train_dataset=Words())
    trainer.remove_callback(PrinterCallback)
    callback.attach(trainer)
    trainer.train()
for entry in trainer.state.log_history:
    if "loss" in entry:
        kept, noise = entry["backsketch/kept_bytes"], entry["backsketch/noise"]
        print(f"step {entry['step']:2}: kept {kept / 2**20:.2f} MiB, added noise {noise:.3f} x the gradient's own")
