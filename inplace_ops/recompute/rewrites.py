"""Lossless rewrites: store the part of a saved tensor that backward reads, in fewer bytes.

- ReLU and LeakyReLU: one bit per element, if nothing else saves the activation's output.
- Pooling and padding: the input's shape, strides and dtype, as backward does not read its values.

`Downcast` in `specs.py` is a spec for two more: the indices of max pooling, in 32 instead of 64
bits, and a tensor that was cast from a smaller dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from .. import _ops
from ..activations import Activation
from ..memory import Packed


class Mask(Packed):
    """One bit per element instead of the saved tensor of a ReLU or LeakyReLU."""

    __slots__ = ("activation", "bits", "dim_order", "dtype", "shape", "stride")

    how = "1 bit per element"
    # LeakyReLU's slope is -1 here, so that the sign of an unpacked element is the element's bit.
    _SCALARS: ClassVar[dict[str, tuple[float, ...]]] = {"relu_": (), "leaky_relu_": (-1.0,)}

    def __init__(self, saved: Tensor, activation: Activation) -> None:
        self.activation, self.dim_order = activation, _ops.dim_order_of(saved)
        self.shape, self.stride, self.dtype = saved.shape, saved.stride(), saved.dtype
        pack = activation.ops.save_out_of_place["mask"]
        scalars = self._SCALARS[activation.function]
        _, self.bits = pack(saved.detach(), 1, self.dim_order, *scalars)

    def compute(self) -> Tensor:
        """Return 1 where the bit is set; elsewhere 0 for ReLU, and -1 for LeakyReLU."""
        ones = torch.ones((), dtype=self.dtype, device=self.bits.device).expand(self.shape)
        unpack = self.activation.ops.backward["mask"]
        return unpack(ones, self.bits, self.dim_order, *self._SCALARS[self.activation.function])

    def tensors(self) -> Iterator[Tensor]:
        yield self.bits


class Shape(Packed):
    """The shape, strides, dtype and device of a saved tensor, if backward reads no values."""

    __slots__ = ("device", "dtype", "shape", "stride")

    how = "only its shape"

    def __init__(self, saved: Tensor) -> None:
        self.shape, self.stride = saved.shape, saved.stride()
        self.dtype, self.device = saved.dtype, saved.device

    def compute(self) -> Tensor:
        """Return an uninitialized tensor."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)

    def tensors(self) -> Iterator[Tensor]:
        yield from ()
