"""LoRA saves gradients and optimiser states, not activations. Sketch the inputs of its adapters as well."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertForSequenceClassification

import backsketch as bs

torch.manual_seed(0)
base = BertForSequenceClassification(
    BertConfig(vocab_size=100, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512)
)
targets = ["query", "key", "value", "intermediate.dense", "output.dense"]
model = get_peft_model(base, LoraConfig(r=4, target_modules=targets))
batch = {"input_ids": torch.randint(100, (16, 64)), "labels": torch.randint(2, (16,))}


def kept():
    with bs.saved_memory(model) as saved:
        graph = model(**batch).loss  # alive, and with it what backward needs
        return saved.activations if graph.requires_grad else 0


before = kept()
bs.sketch_(model)  # lora_B, which reads few features, stays exact
print(f"kept for backward: {before / 2**20:.1f} MiB -> {kept() / 2**20:.1f} MiB")

optimizer = torch.optim.AdamW((each for each in model.parameters() if each.requires_grad), lr=1e-3)
for step in range(4):
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")

bs.unsketch_(model)
merged = model.merge_and_unload()
print("merged:", type(merged.get_submodule("bert.encoder.layer.0.attention.self.query")).__name__)
