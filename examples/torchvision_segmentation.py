"""Segmentation with torchvision's DeepLabV3 and mixed precision.

Needs torchvision. The script draws the images: squares on noise.
"""

import torch
import torch.nn.functional as F
from before_after import DEVICE, HAS_BFLOAT16, Training, before_after
from torchvision.models.segmentation import deeplabv3_mobilenet_v3_large

import inplace_ops

BATCH, SIDE, STEPS = 4, 96, 8


def squares() -> tuple[torch.Tensor, torch.Tensor]:
    """Return images (N, 3, H, W) with one bright square each, and masks (N, H, W)."""
    masks = torch.zeros(BATCH, SIDE, SIDE, dtype=torch.long)
    for mask in masks:
        top, left = torch.randint(SIDE // 2, (2,)).tolist()
        mask[top : top + SIDE // 2, left : left + SIDE // 2] = 1
    images = torch.randn(BATCH, 3, SIDE, SIDE) + masks[:, None]
    return images.to(DEVICE), masks.to(DEVICE)


def train(is_converted: bool) -> Training:
    """Train on new squares in every step."""
    torch.manual_seed(0)
    model = deeplabv3_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=2)
    model.to(DEVICE).train()
    training = Training()
    if is_converted:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=HAS_BFLOAT16):
            training.report = inplace_ops.convert(model, squares()[0])

    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        images, masks = squares()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=HAS_BFLOAT16):
            loss = F.cross_entropy(model(images)["out"], masks)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        training.step(loss.item())
    return training


if __name__ == "__main__":
    before_after(train)
