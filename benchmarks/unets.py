"""Two small U-Nets: for segmentation, with InstanceNorm and LeakyReLU, and for diffusion."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _Twice(nn.Sequential):
    """Two convolutions, each followed by InstanceNorm and LeakyReLU."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        layers: list[nn.Module] = []
        for channels, step in ((inputs, stride), (outputs, 1)):
            layers.append(nn.Conv2d(channels, outputs, 3, step, padding=1, bias=False))
            layers.append(nn.InstanceNorm2d(outputs, affine=True))
            layers.append(nn.LeakyReLU(0.01, inplace=True))
        super().__init__(*layers)


class _Residual(nn.Module):
    """GroupNorm, SiLU and convolution, twice, with a time embedding between, and a shortcut."""

    def __init__(self, inputs: int, outputs: int, embedding: int = 64) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, inputs), nn.GroupNorm(8, outputs)
        self.act1, self.act2, self.act3 = nn.SiLU(), nn.SiLU(), nn.SiLU()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time = nn.Linear(embedding, outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Map (N, inputs, H, W) and (N, embedding) to (N, outputs, H, W)."""
        h = self.conv1(self.act1(self.norm1(x)))
        h = h + self.time(self.act2(time))[:, :, None, None]
        return self.conv2(self.act3(self.norm2(h))) + self.shortcut(x)


class _TwoResiduals(nn.Module):
    """Two residual blocks."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first, self.second = _Residual(inputs, outputs), _Residual(outputs, outputs)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Map (N, inputs, H, W) and (N, embedding) to (N, outputs, H, W)."""
        return self.second(self.first(x, time), time)


class SegmentationUNet(nn.Module):
    """Convolution, InstanceNorm, LeakyReLU; strided convolutions down, transposed ones up."""

    def __init__(self, width: int = 32, levels: int = 4) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels)]
        strides = [1] + [2] * (levels - 1)
        self.down = nn.ModuleList(map(_Twice, [3, *widths], widths, strides))
        pairs = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, 2, bias=False) for a, b in pairs)
        self.join = nn.ModuleList(_Twice(2 * b, b, 1) for _, b in pairs)
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, 3, H, W) to the same shape; H and W are multiples of 2^(levels - 1)."""
        skips: list[Tensor] = []
        for down in self.down:
            x = down(x)
            skips.append(x)
        skips.pop()
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([up(x), skips.pop()], 1))
        return self.head(x)


class DiffusionUNet(nn.Module):
    """Residual blocks of GroupNorm and SiLU, as in diffusion models."""

    def __init__(self, width: int = 32, levels: int = 3) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels)]
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.embed = nn.Sequential(nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 64))
        self.down = nn.ModuleList(map(_TwoResiduals, [width, *widths], widths))
        self.smaller = nn.ModuleList(nn.Conv2d(c, c, 3, 2, padding=1) for c in widths[:-1])
        self.middle = _TwoResiduals(widths[-1], widths[-1])
        pairs = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.larger = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairs)
        self.up = nn.ModuleList(_TwoResiduals(2 * b, b) for _, b in pairs)
        self.norm, self.act = nn.GroupNorm(8, width), nn.SiLU()
        self.head = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, 3, H, W) to the same shape, at one time; H, W are multiples of 2^(levels - 1)."""
        time = self.embed(x.new_ones(len(x), 16))
        x = self.stem(x)
        skips: list[Tensor] = []
        for i, block in enumerate(self.down):
            x = block(x, time)
            if i < len(self.smaller):
                skips.append(x)
                x = self.smaller[i](x)
        x = self.middle(x, time)
        for larger, block in zip(self.larger, self.up, strict=True):
            x = larger(F.interpolate(x, scale_factor=2.0))
            x = block(torch.cat([x, skips.pop()], 1), time)
        return self.head(self.act(self.norm(x)))
