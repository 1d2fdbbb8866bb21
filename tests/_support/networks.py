"""A small network that saves less after conversion."""

from __future__ import annotations

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


def examples() -> Tensor:
    return torch.randn(2, 3, 32, 32)


def is_converted(model: nn.Module) -> bool:
    return conversion_of(model) is not None


def number_of_hooks(model: nn.Module) -> int:
    modules = list(model.modules())
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in modules)
