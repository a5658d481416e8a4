"""Train a LightningModule: the callback converts before the strategy wraps the model, and restores after the fit."""

import logging
import warnings

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import backsketch as bs
from backsketch.integrations.lightning import SketchCallback


class Regression(lightning.LightningModule):
    """Learn a sine of some inputs."""

    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 1))

    def training_step(self, batch, index):
        inputs, targets = batch
        loss = (self.model(inputs) - targets).square().mean()
        if index % 8 == 0:
            print(f"step {index:2}: loss {loss.item():.4f}, layers {type(self.model[0]).__name__}")
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


warnings.simplefilter("ignore")  # Lightning's advice on workers and loggers
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
torch.manual_seed(0)
inputs = torch.randn(4096, 32)
data = DataLoader(TensorDataset(inputs, inputs[:, :4].sum(1, keepdim=True).sin()), batch_size=128)
module = Regression()
lightning.Trainer(
    max_epochs=1,
    accelerator="cpu",
    callbacks=[SketchCallback(bs.SketchConfig(ratio=0.25))],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
).fit(module, data)
print("after the fit:", type(module.model[0]).__name__)
