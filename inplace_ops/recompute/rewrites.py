"""Lossless rewrites: store the part of a saved tensor that backward reads, in fewer bytes.

- ReLU and LeakyReLU: one bit per element, if nothing else saves the activation's output.
- Pooling and padding: the input's shape, strides and dtype, as backward does not read its values.
- Masks: one bit per element. This is a spec, because the output of a dropout is recomputed from its
  mask.
- Indices of max pooling: in 16 or 32 instead of 64 bits.

The last two are narrow copies: see NOTE [Narrow copies] in `narrow.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from .. import _ops
from ..activations import RELU, Activation
from ..memory import Packed
from .calls import Call, ViewCall
from .narrow import NarrowLeaf
from .specs import Spec


class Bits(Packed):
    """One bit per element instead of the saved tensor of a ReLU or LeakyReLU."""

    __slots__ = ("activation", "bits", "dim_order", "dtype", "shape", "stride")

    how = "1 bit per element"
    # LeakyReLU's slope is -1 here, so that the sign of an unpacked element is the element's bit.
    _SCALARS: ClassVar[dict[str, tuple[float, ...]]] = {"relu_": (), "leaky_relu_": (-1.0,)}

    def __init__(self, saved: Tensor, activation: Activation) -> None:
        self.activation, self.dim_order = activation, _ops.dim_order_of(saved)
        self.shape, self.stride, self.dtype = saved.shape, saved.stride(), saved.dtype
        pack = activation.ops.call_save_out_of_place["mask"]
        scalars = self._SCALARS[activation.function]
        _, self.bits = pack(saved.detach(), 1, self.dim_order, *scalars)

    def compute(self) -> Tensor:
        """Return 1 where the bit is set; elsewhere 0 for ReLU, and -1 for LeakyReLU."""
        ones = torch.ones((), dtype=self.dtype, device=self.bits.device).expand(self.shape)
        unpack = self.activation.ops.call_backward["mask"]
        scalars = self._SCALARS[self.activation.function]
        try:
            signs: Tensor = unpack(ones, self.bits, self.dim_order, *scalars)
        except RuntimeError as error:
            _ops.raise_out_of_memory(error, partial(torch.empty_like, ones))
            raise
        return signs

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


def indices_spec(saved: Tensor, is_short: bool) -> tuple[Spec, NarrowLeaf]:
    """Return a spec that stores indices in 16 or 32 bits, and its leaf."""
    leaf = NarrowLeaf(saved, torch.int16 if is_short else torch.int32)
    leaf.own()
    return Call(Tensor.to, (leaf,), (saved.dtype,)), leaf


def mask_spec(saved: Tensor, leaves: Iterable[NarrowLeaf]) -> tuple[Spec, NarrowLeaf] | None:
    """Return a spec that stores a mask as one bit per element, and its leaf.

    Return None if the tensor is not a mask, or no kernel packs it.

    Args:
        saved: The tensor: booleans, or the noise of a dropout.
        leaves: Other narrow copies. Several nodes may save one mask.
    """
    if saved.requires_grad:
        return None
    if saved.dtype is torch.bool:
        value = 1.0 if _ops.has_kernel(saved.new_empty(0, dtype=torch.bfloat16)) else None
    else:
        # Only a CPU's dropout saves noise: it was written to twice. On a GPU the comparison
        # would synchronize.
        is_noise = saved._version == 2 and saved.device.type == "cpu" and not saved._is_view()
        value = noise_value(saved) if is_noise and _ops.has_kernel(saved) else None
    if value is None:
        return None
    memory = _memory_of(saved)
    leaf = next((leaf for leaf in leaves if leaf.how == Bits.how and leaf.is_of(saved)), None)
    if leaf is None:
        leaf = NarrowLeaf(memory, torch.uint8, Bits.how)
        leaf.own(_bits_of(memory))
    arguments = memory.numel(), saved.dtype, value
    unpacked = Call(_memory_from_bits, (leaf,), arguments, bound=partial(_constant, value))
    layout = saved.shape, saved.stride(), saved.storage_offset()
    return ViewCall(torch.as_strided, (unpacked,), *layout, keeps_strides=True), leaf


def _memory_of(tensor: Tensor) -> Tensor:
    """Return a tensor's whole memory as a detached 1-D tensor."""
    size = tensor.untyped_storage().nbytes() // tensor.itemsize
    return tensor.detach().as_strided((size,), (1,), 0)


def _bits_of(memory: Tensor) -> Tensor:
    """Return one bit per element of a 1-D tensor: whether it is not 0."""
    vector = memory.to(torch.bfloat16) if memory.dtype is torch.bool else memory
    _, bits = RELU.ops.call_save_out_of_place["mask"](vector, 1, None)
    return bits


def _memory_from_bits(stored: Tensor, size: int, dtype: torch.dtype, value: float) -> Tensor:
    """Return a 1-D tensor whose elements are `value` where the bit is set, else 0."""
    if stored.dtype is dtype:  # the original
        return stored
    computed = torch.bfloat16 if dtype is torch.bool else dtype
    values = torch.full((), value, dtype=computed, device=stored.device)
    vector: Tensor = RELU.ops.call_backward["mask"](values.expand(size), stored, None)
    return vector.to(dtype)


def _constant(value: float, magnitudes: list[Tensor]) -> Tensor:
    return torch.full_like(magnitudes[0], value)


def noise_value(saved: Tensor) -> float | None:
    """Return the value of a dropout's noise that is not 0; None if the tensor has other values.

    On a CPU a dropout multiplies by noise whose elements are 0 or 1 / (1 - p). This function
    compares all elements.
    """
    value = float(saved.amax())
    integer = {8: torch.int64, 4: torch.int32, 2: torch.int16}[saved.itemsize]
    zero, other = torch.tensor([0.0, value], dtype=saved.dtype).view(integer)
    patterns = saved.detach().view(integer)
    is_noise = value > 0 and bool(((patterns == zero) | (patterns == other)).all())
    return value if is_noise else None
