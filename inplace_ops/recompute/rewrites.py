"""Lossless rewrites: saved tensors that backward needs only in part, stored smaller, exactly.

- ReLU and LeakyReLU: one bit per element, where nothing else saves their output.
- Pooling and padding: the shape of the input, whose values backward does not read.

Two more are specs, `Downcast` in `specs.py`: indices of max pooling, 32 bits instead of 64, and a
tensor that is a cast of a narrower one.
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
    """One bit per element of the tensor that a ReLU or LeakyReLU has saved."""

    __slots__ = ("activation", "bits", "dim_order", "dtype", "shape", "stride")

    how = "1 bit per element"
    # LeakyReLU's slope for what is unpacked, so that its sign tells the bit.
    _SCALARS: ClassVar[dict[str, tuple[float, ...]]] = {"relu_": (), "leaky_relu_": (-1.0,)}

    def __init__(self, saved: Tensor, activation: Activation) -> None:
        self.activation, self.dim_order = activation, _ops.dim_order_of(saved)
        self.shape, self.stride, self.dtype = saved.shape, saved.stride(), saved.dtype
        pack = activation.ops.save_out_of_place["mask"]
        scalars = self._SCALARS[activation.function]
        _, self.bits = pack(saved.detach(), 1, self.dim_order, *scalars)

    def compute(self) -> Tensor:
        """Return 1 where the bit is set; elsewhere 0, or of LeakyReLU -1."""
        ones = torch.ones((), dtype=self.dtype, device=self.bits.device).expand(self.shape)
        unpack = self.activation.ops.backward["mask"]
        return unpack(ones, self.bits, self.dim_order, *self._SCALARS[self.activation.function])

    def tensors(self) -> Iterator[Tensor]:
        yield self.bits


class Shape(Packed):
    """A tensor of which backward reads the shape, the strides and the dtype."""

    __slots__ = ("device", "dtype", "shape", "stride")

    how = "only its shape"

    def __init__(self, saved: Tensor) -> None:
        self.shape, self.stride = saved.shape, saved.stride()
        self.dtype, self.device = saved.dtype, saved.device

    def compute(self) -> Tensor:
        """Return uninitialized memory."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)

    def tensors(self) -> Iterator[Tensor]:
        yield from ()
