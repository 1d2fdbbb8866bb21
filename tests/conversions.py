"""What the tests of convert share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import inplace_ops

ACTIVATIONS = (nn.ReLU, nn.LeakyReLU, nn.SiLU)
activations = pytest.mark.parametrize("activation", ACTIVATIONS)


class Convolutions(nn.Module):
    """Every kind of neighbour: convolution, addition, pooling, linear; one activation for all."""

    def __init__(
        self,
        activation: Callable[[], nn.Module],
        norm: Callable[[int], nn.Module] = nn.BatchNorm2d,
    ) -> None:
        super().__init__()
        shared = activation()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), norm(8), shared)
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), norm(8), shared)
        self.norm = norm(8)
        self.preactivation = shared
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(8 * 16, 10), activation())
        self.last = nn.Linear(10, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.block(x)
        h = self.norm(x)
        h = h + self.preactivation(h)
        return self.last(self.head(F.avg_pool2d(h, 2)))


def images() -> Tensor:
    return torch.randn(2, 3, 8, 8)


def site(report: inplace_ops.Report, name: str) -> inplace_ops.Site:
    return next(site for site in report.sites if site.name == name)


def assert_reverted(model: nn.Module, modules: list[nn.Module]) -> None:
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
