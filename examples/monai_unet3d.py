"""Segmentation of volumes with a U-Net like nnU-Net's, from MONAI, and mixed precision.

Needs monai. The script makes the volumes: balls in noise.
"""

import torch
from before_after import DEVICE, HAS_BFLOAT16, Training, before_after
from monai.losses import DiceCELoss
from monai.networks.nets import DynUNet

import inplace_ops

BATCH, SIDE, STEPS = 2, 32, 6


def balls() -> tuple[torch.Tensor, torch.Tensor]:
    """Return volumes and masks, both (N, 1, D, H, W), with one bright ball each."""
    axis = torch.arange(SIDE) - SIDE / 2
    z, y, x = (torch.meshgrid(axis, axis, axis, indexing="ij")[i] for i in range(3))
    centers = torch.randint(-SIDE // 4, SIDE // 4, (BATCH, 3, 1, 1, 1))
    squares = [(a - centers[:, i]) ** 2 for i, a in enumerate((z, y, x))]
    masks = (sum(squares) < (SIDE // 5) ** 2).float()[:, None]
    return (torch.randn(masks.shape) + 2 * masks).to(DEVICE), masks.to(DEVICE)


def train(is_converted: bool) -> Training:
    """Train nnU-Net's architecture: 3-D convolutions, InstanceNorm and LeakyReLU."""
    torch.manual_seed(0)
    model = DynUNet(
        spatial_dims=3,
        in_channels=1,
        out_channels=2,
        kernel_size=[3, 3, 3],
        strides=[1, 2, 2],
        upsample_kernel_size=[2, 2],
        filters=[16, 32, 64],
    ).to(DEVICE)
    training = Training()
    if is_converted:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=HAS_BFLOAT16):
            training.report = inplace_ops.convert(model, balls()[0])

    torch.manual_seed(1)
    criterion = DiceCELoss(to_onehot_y=True, softmax=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.99, nesterov=True)
    for _ in range(STEPS):
        volumes, masks = balls()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=HAS_BFLOAT16):
            loss = criterion(model(volumes), masks)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        training.step(loss.item())
    return training


if __name__ == "__main__":
    before_after(train)
