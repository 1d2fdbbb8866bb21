"""Small networks that save less after conversion."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from inplace_ops.conversion.wiring import conversion_of


def network(width: int = 16) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.SiLU(),
        nn.Conv2d(width, width, 3, padding=1),
        nn.GroupNorm(2, width),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 4, 1),
    )


class RMSNorm(nn.Module):
    """An RMS norm, as transformers computes it. It calls `between` with the normalized input."""

    def __init__(
        self, size: int, between: Callable[[nn.Module, Tensor], object] = lambda module, t: None
    ) -> None:
        super().__init__()
        self.weight, self.between, self.step = nn.Parameter(torch.rand(size)), between, 0

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        dtype, x = x.dtype, x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        self.between(self, x)
        return self.weight * x.to(dtype)


def examples() -> Tensor:
    return torch.randn(2, 3, 32, 32)


def is_converted(model: nn.Module) -> bool:
    return conversion_of(model) is not None


def number_of_hooks(model: nn.Module) -> int:
    modules = list(model.modules())
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in modules)
