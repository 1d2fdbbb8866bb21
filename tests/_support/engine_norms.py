"""One norm of each kind, for tests of the recompute engine; an RMS norm that has one node."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from _support.twins import C, recomputed


def norms(c: int = C) -> dict[str, nn.Module]:
    return {
        "batch": nn.BatchNorm2d(c),
        "group": nn.GroupNorm(2, c, eps=1e-3),
        "instance": nn.InstanceNorm2d(c, affine=True),
        "layer": nn.LayerNorm(8, eps=1e-2),
        "rms": nn.RMSNorm(8, eps=1e-2),
    }


each_norm = pytest.mark.parametrize("norm", norms())


# An RMS norm has no bias, and saves its statistics in float32 or float64.
each_norm_except_rms = pytest.mark.parametrize("norm", [name for name in norms() if name != "rms"])


def names_of(model: nn.Module, x: Tensor) -> list[str]:
    return [value.name for value in recomputed(model(x))]


def convolution(m: Any, z: Tensor) -> Tensor:
    return m.conv(z)


@contextmanager
def fused_rms_norm() -> Iterator[None]:
    """Run an RMS norm as one node, as PyTorch does on a GPU, with Python code for the kernels."""

    def forward(x: Tensor, shape: list[int], weight: Tensor | None, eps: float) -> Any:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        dims = tuple(range(-len(shape), 0))
        rstd = (wide.square().mean(dims, keepdim=True) + eps).rsqrt()
        scale = 1 if weight is None else weight.to(wide.dtype)
        return (wide * rstd * scale).to(x.dtype), rstd

    def backward(
        grad: Tensor, x: Tensor, shape: list[int], rstd: Tensor, weight: Tensor | None, mask: Any
    ) -> Any:
        dims = tuple(range(-len(shape), 0))
        normalized, wide = x.to(rstd.dtype) * rstd, grad.to(rstd.dtype)
        scaled = wide if weight is None else wide * weight.to(rstd.dtype)
        mean = (scaled * normalized).mean(dims, keepdim=True)
        grad_weight = (wide * normalized).flatten(0, -len(shape) - 1).sum(0)
        needs_weight = weight is not None and mask[1]
        return (rstd * (scaled - normalized * mean)).to(x.dtype), (
            grad_weight.to(x.dtype) if needs_weight else None
        )

    def rms_norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
        return torch.ops.aten._fused_rms_norm(x, list(shape), weight, eps)[0]

    with (
        pytest.MonkeyPatch.context() as patch,
        torch.library._scoped_library("aten", "IMPL") as library,
    ):
        patch.setattr(F, "rms_norm", rms_norm)
        library.impl("_fused_rms_norm", forward, "CPU")
        library.impl("_fused_rms_norm_backward", backward, "CPU")
        yield
