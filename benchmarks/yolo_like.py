"""A detection network of the YOLO family: Conv-BN-SiLU, C2f and SPPF blocks, and a neck."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ConvNormAct(nn.Sequential):
    """Convolution, BatchNorm and in-place SiLU."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 1, stride: int = 1) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False),
            nn.BatchNorm2d(outputs),
            nn.SiLU(inplace=True),
        )


class Bottleneck(nn.Module):
    """Two 3 x 3 convolutions, in the backbone with a shortcut."""

    def __init__(self, channels: int, shortcut: bool) -> None:
        super().__init__()
        self.convs = nn.Sequential(
            ConvNormAct(channels, channels, 3), ConvNormAct(channels, channels, 3)
        )
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, channels, height, width) to the same shape."""
        return x + self.convs(x) if self.shortcut else self.convs(x)


class C2f(nn.Module):
    """Bottlenecks on half of the channels, with all intermediate results concatenated."""

    def __init__(self, inputs: int, outputs: int, depth: int, shortcut: bool = False) -> None:
        super().__init__()
        half = outputs // 2
        self.first = ConvNormAct(inputs, outputs)
        self.bottlenecks = nn.ModuleList(Bottleneck(half, shortcut) for _ in range(depth))
        self.last = ConvNormAct((2 + depth) * half, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, inputs, height, width) to (batch, outputs, height, width)."""
        parts = [*self.first(x).chunk(2, 1)]
        for bottleneck in self.bottlenecks:
            parts.append(bottleneck(parts[-1]))
        return self.last(torch.cat(parts, 1))


class SPPF(nn.Module):
    """Spatial pyramid pooling: three poolings in a row, concatenated."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = ConvNormAct(channels, channels // 2)
        self.last = ConvNormAct(channels * 2, channels)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, channels, height, width) to the same shape."""
        parts = [self.first(x)]
        for _ in range(3):
            parts.append(F.max_pool2d(parts[-1], 5, 1, 2))
        return self.last(torch.cat(parts, 1))


class YoloLike(nn.Module):
    """Backbone, top-down neck, and a head at strides 8, 16 and 32."""

    def __init__(self, width: int = 32, outputs: int = 84) -> None:
        super().__init__()
        w = [width * 2**i for i in range(5)]
        self.stem = ConvNormAct(3, w[0], 3, 2)
        self.stages = nn.ModuleList(
            nn.Sequential(
                ConvNormAct(w[i], w[i + 1], 3, 2), C2f(w[i + 1], w[i + 1], depth, shortcut=True)
            )
            for i, depth in enumerate((1, 2, 2, 1))
        )
        self.pooling = SPPF(w[4])
        self.neck16 = C2f(w[4] + w[3], w[3], 1)
        self.neck8 = C2f(w[3] + w[2], w[2], 1)
        self.heads = nn.ModuleList(
            nn.Sequential(ConvNormAct(c, c, 3), nn.Conv2d(c, outputs, 1)) for c in w[2:]
        )

    def forward(self, images: Tensor) -> Tensor:
        """Map (batch, 3, height, width) to (batch, outputs, positions of all strides)."""
        x = self.stages[0](self.stem(images))
        x8 = self.stages[1](x)
        x16 = self.stages[2](x8)
        x32 = self.pooling(self.stages[3](x16))
        x16 = self.neck16(torch.cat([F.interpolate(x32, scale_factor=2.0), x16], 1))
        x8 = self.neck8(torch.cat([F.interpolate(x16, scale_factor=2.0), x8], 1))
        maps = [head(x) for head, x in zip(self.heads, (x8, x16, x32), strict=True)]
        return torch.cat([m.flatten(2) for m in maps], 2)
