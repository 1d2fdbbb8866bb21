"""A diffusion model with diffusers' U-Net, its noise scheduler and mixed precision.

Needs diffusers and scikit-learn, whose handwritten digits the model learns to draw.
"""

import torch
import torch.nn.functional as F
from before_after import DEVICE, HAS_BFLOAT16, Training, before_after
from diffusers import DDPMScheduler, UNet2DModel
from sklearn.datasets import load_digits

import inplace_ops

BATCH, STEPS = 16, 8


def train(is_converted: bool) -> Training:
    """Train a U-Net to predict the noise in digits, enlarged to 32 x 32."""
    torch.manual_seed(0)
    images = torch.tensor(load_digits().images, dtype=torch.float32, device=DEVICE)[:, None]
    images = F.interpolate(images / 8 - 1, size=32)
    model = UNet2DModel(
        sample_size=32,
        in_channels=1,
        out_channels=1,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    ).to(DEVICE)
    training = Training()
    if is_converted:
        example = {"sample": images[:BATCH], "timestep": torch.tensor(0, device=DEVICE)}
        with torch.autocast(DEVICE, torch.bfloat16, enabled=HAS_BFLOAT16):
            training.report = inplace_ops.convert(model, example)

    torch.manual_seed(1)
    scheduler = DDPMScheduler()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for clean in images[: BATCH * STEPS].split(BATCH):
        noise = torch.randn_like(clean)
        times = torch.randint(scheduler.config.num_train_timesteps, (BATCH,), device=DEVICE)
        noisy = scheduler.add_noise(clean, noise, times)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=HAS_BFLOAT16):
            loss = F.mse_loss(model(noisy, times).sample, noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        training.step(loss.item())
    return training


if __name__ == "__main__":
    before_after(train)
