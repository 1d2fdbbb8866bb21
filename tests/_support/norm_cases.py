"""The norms that precede an activation, and error bounds of their output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from _support.cases import ONE_OF_EACH

# One row for each activation, with its default save mode.
ROWS = [row for row in ONE_OF_EACH if row.save == row.entry.save_modes[0] and row.bits is None]
PIECEWISE, SMOOTH = (next(row for row in ROWS if row.function == name) for name in ("relu", "silu"))


@dataclass(frozen=True)
class Norm:
    """A norm and its input.

    Attributes:
        make: Returns the module.
        shape: The shape of the input.
        statistic_rows: Reshapes the input so that each row shares one mean and standard deviation.
        affine_numel: The number of elements of the affine that an activation after a norm saves.
        memory_format: The memory format of the input.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    statistic_rows: Callable[[Tensor], Tensor]
    affine_numel: int
    memory_format: torch.memory_format = torch.contiguous_format

    def module(
        self, dtype: torch.dtype, training: bool = True, device: torch.device | str = "cpu"
    ) -> nn.Module:
        """Return the module with random parameters and running statistics, drawn in `dtype`."""
        module = self.make().to(device, dtype).train(training)
        for name, state in module.state_dict().items():
            if state.is_floating_point():
                state.uniform_(0.5 if name in ("weight", "running_var") else -1.5, 1.5)
        return module

    def input(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        x = torch.randn(self.shape, device=device) + 0.4
        return x.to(dtype, memory_format=self.memory_format).requires_grad_()

    def error(self, module: nn.Module, x: Tensor, z: Tensor) -> Tensor:
        """Return a bound of the difference of two outputs of the same input and statistics.

        An output is x * scale + (bias - mean * scale), or bias + (x - mean) * scale in PyTorch.
        Each is rounded at most a dozen times, and then to the dtype.
        """
        rows = self.statistic_rows(x.detach().double())
        mean, variance = rows.mean(-1), rows.var(-1, unbiased=False)
        if not module.training and getattr(module, "running_mean", None) is not None:
            mean, variance = module.running_mean.double(), module.running_var.double()
        largest = {name: state.abs().max().item() for name, state in module.state_dict().items()}
        shift = (mean.abs() * (variance + module.eps).rsqrt()).max() * largest.get("weight", 1.0)
        size = z.detach().double().abs()
        terms = size + 2 * (shift + largest.get("bias", 0.0))
        compute_dtype = torch.float64 if z.dtype == torch.float64 else torch.float32
        error = 12 * torch.finfo(compute_dtype).eps * terms
        return error + 2 * rounding(size + error, z.dtype)


def _batch(x: Tensor) -> Tensor:
    return x.transpose(0, 1).flatten(1)


def _instance(x: Tensor) -> Tensor:
    return x.flatten(2)


CHANNELS_LAST = torch.channels_last
IMAGES = (4, 6, 5, 3)

NORMS: dict[str, Norm] = {
    "batch_1d": Norm(partial(nn.BatchNorm1d, 5), (9, 5), _batch, 10),
    "batch_1d_long": Norm(partial(nn.BatchNorm1d, 5), (4, 5, 7), _batch, 10),
    "batch_2d": Norm(partial(nn.BatchNorm2d, 6), IMAGES, _batch, 12),
    "batch_2d_last": Norm(partial(nn.BatchNorm2d, 6), IMAGES, _batch, 12, CHANNELS_LAST),
    "batch_3d": Norm(partial(nn.BatchNorm3d, 3), (2, 3, 4, 2, 3), _batch, 6),
    "batch_3d_last": Norm(
        partial(nn.BatchNorm3d, 3), (2, 3, 4, 2, 3), _batch, 6, torch.channels_last_3d
    ),
    "batch_no_statistics": Norm(
        partial(nn.BatchNorm2d, 6, track_running_stats=False), IMAGES, _batch, 12
    ),
    "batch_not_affine": Norm(partial(nn.BatchNorm2d, 6, affine=False), IMAGES, _batch, 12),
    "group": Norm(partial(nn.GroupNorm, 2, 6), IMAGES, lambda x: x.reshape(4, 2, -1), 48),
    "group_last": Norm(
        partial(nn.GroupNorm, 3, 6), IMAGES, lambda x: x.reshape(4, 3, -1), 48, CHANNELS_LAST
    ),
    "group_of_all": Norm(partial(nn.GroupNorm, 1, 5), (3, 5, 4), lambda x: x.flatten(1), 30),
    "group_not_affine": Norm(
        partial(nn.GroupNorm, 2, 6, affine=False), IMAGES, lambda x: x.reshape(4, 2, -1), 50
    ),
    "instance_1d": Norm(partial(nn.InstanceNorm1d, 4, affine=True), (3, 4, 9), _instance, 24),
    "instance_2d": Norm(partial(nn.InstanceNorm2d, 6), IMAGES, _instance, 48),
    "instance_2d_last": Norm(
        partial(nn.InstanceNorm2d, 6, affine=True), IMAGES, _instance, 48, CHANNELS_LAST
    ),
    "instance_3d": Norm(partial(nn.InstanceNorm3d, 3, affine=True), (2, 3, 4, 2, 3), _instance, 12),
    "instance_statistics": Norm(
        partial(nn.InstanceNorm2d, 6, affine=True, track_running_stats=True), IMAGES, _instance, 48
    ),
    "layer": Norm(partial(nn.LayerNorm, 12), (5, 3, 12), lambda x: x, 2 * (15 + 12)),
    "layer_2d": Norm(
        partial(nn.LayerNorm, (3, 12)), (5, 3, 12), lambda x: x.flatten(1), 2 * (5 + 36)
    ),
    "layer_no_bias": Norm(
        partial(nn.LayerNorm, 12, bias=False), (5, 3, 12), lambda x: x, 2 * (15 + 12)
    ),
    "layer_not_affine": Norm(
        partial(nn.LayerNorm, 12, elementwise_affine=False),
        (5, 3, 12),
        lambda x: x,
        2 * 15 + 2 * 12,
    ),
}
# One norm for each type of PyTorch's norm nodes, and an instance norm, whose output is a view.
ONE_OF_EACH_NORM = ("batch_2d", "group", "instance_1d", "layer")


def node_of(z: Tensor) -> Any:
    """Return the node of a norm or of the activation after it; an instance norm returns a view."""
    return (z if z._base is None else z._base).grad_fn


def is_recomputed(y: Tensor) -> bool:
    return node_of(y).name() == "RecomputeFunctionBackward"


def normalized(
    x: Tensor, channel_affine: Tensor, row_statistics: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the norm's output in float64, and an error bound for the affine's dtype.

    A kernel rounds each term of the sum three times in the affine's dtype, as this function does in
    float64, and rounds the sum once more, to the dtype of x.
    """
    roundoff = torch.finfo(channel_affine.dtype).eps / 2
    wide = x.double()
    scale, shift = channel_affine.double()
    rstd, mean = (
        (1.0, torch.zeros_like(shift)) if row_statistics is None else row_statistics.double()
    )
    z = (wide - mean) * rstd * scale + shift
    terms = ((wide - mean) * rstd * scale).abs() + shift.abs()
    error = 2 * 3.01 * roundoff * terms
    return z, error + rounding(z.abs() + error, x.dtype)


def rounding(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a bound of the error of rounding a value to a dtype, subnormal values included."""
    finfo = torch.finfo(dtype)
    return 0.501 * finfo.eps * value.abs().clamp(min=finfo.smallest_normal)


both_kinds = pytest.mark.parametrize("activation", [PIECEWISE, SMOOTH], ids=["piecewise", "smooth"])
one_of_each_norm = pytest.mark.parametrize("name", ONE_OF_EACH_NORM)
