"""A training loop in plain PyTorch, with a model of timm and mixed precision.

Needs timm and scikit-learn, whose handwritten digits the model learns.
"""

import timm
import torch
import torch.nn.functional as F
from before_after import DEVICE, HAS_BFLOAT16, Training, before_after
from sklearn.datasets import load_digits

import inplace_ops

BATCH, STEPS = 64, 28


def train(is_converted: bool) -> Training:
    """Train a RegNetY on digits, enlarged to 64 x 64."""
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32, device=DEVICE)[:, None] / 16
    images, labels = F.interpolate(images, size=64), torch.tensor(digits.target, device=DEVICE)

    model = timm.create_model("regnety_002", in_chans=1, num_classes=10).to(DEVICE)
    training = Training()
    if is_converted:
        # `convert(model)` is enough. With an example, under the autocast of the training, the
        # gradients are compared and the memory is measured.
        with torch.autocast(DEVICE, torch.bfloat16, enabled=HAS_BFLOAT16):
            training.report = inplace_ops.convert(model, images[:BATCH])

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for chosen in torch.randperm(len(labels))[: BATCH * STEPS].split(BATCH):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=HAS_BFLOAT16):
            loss = F.cross_entropy(model(images[chosen]), labels[chosen])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        training.step(loss.item())
    return training


if __name__ == "__main__":
    before_after(train)
