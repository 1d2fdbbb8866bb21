"""A callback of Lightning that converts a part of a module, with mixed precision.

Needs lightning and scikit-learn, whose handwritten digits the model compresses.
"""

import lightning
import torch
import torch.nn.functional as F
from before_after import DEVICE, HAS_BFLOAT16, Training, before_after
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader

import inplace_ops

BATCH, STEPS, WIDTH = 128, 12, 32
OPTIONS = {"max_steps": STEPS, "devices": 1, "logger": False, "enable_checkpointing": False}


class Convert(lightning.Callback):
    """Converts a module's `model` before a strategy such as DDP wraps the module."""

    def setup(self, trainer, module, stage):
        """Convert; nothing runs."""
        inplace_ops.convert(module.model)


class Autoencoder(lightning.LightningModule):
    """Convolutions that halve an image's sides, and one that doubles them."""

    def __init__(self, training: Training) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, stride in ((1, 1), (WIDTH, 2), (WIDTH, 1), (WIDTH, 1)):
            convolution = nn.Conv2d(inputs, WIDTH, 3, stride, padding=1)
            layers += [convolution, nn.BatchNorm2d(WIDTH), nn.GELU()]
        self.model = nn.Sequential(*layers, nn.ConvTranspose2d(WIDTH, 1, 2, 2))
        self.training_record = training

    def training_step(self, images: Tensor, index: int) -> Tensor:
        """Return the loss of a batch of images (N, 1, H, W)."""
        loss = F.mse_loss(self.model(images), images)
        self.training_record.step(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(is_converted: bool) -> Training:
    """Train on digits, enlarged to 32 x 32."""
    torch.manual_seed(0)
    images = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 16
    images = F.interpolate(images, size=32)
    training = Training()
    module, callbacks = Autoencoder(training), [Convert()] if is_converted else []
    precision = "bf16-mixed" if HAS_BFLOAT16 else "32-true"
    trainer = lightning.Trainer(precision=precision, callbacks=callbacks, **OPTIONS)
    trainer.fit(module, DataLoader(images, BATCH))
    if is_converted:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=HAS_BFLOAT16):
            example = images[:BATCH].to(DEVICE)
            training.report = inplace_ops.analyze(module.model.to(DEVICE), example)
    return training


if __name__ == "__main__":
    before_after(train)
