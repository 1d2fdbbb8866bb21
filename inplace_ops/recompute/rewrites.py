"""Lossless rewrites: store the part of a saved tensor that backward reads, in fewer bytes.

- ReLU and LeakyReLU: one bit per element, if nothing else saves the activation's output.
- Pooling and padding: the input's shape, strides and dtype, as backward does not read its values.
- Masks: one bit per element. `Bits` is a spec, because the output of a dropout is recomputed from
  its mask.

`Downcast` in `specs.py` is a spec for two more: the indices of max pooling, in 16 or 32 instead of
64 bits, and a tensor that was cast from a smaller dtype.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from .. import _ops
from ..activations import RELU, Activation
from ..memory import Packed
from .specs import Computed, DowncastMemory, Leaf, Spec, StoredMemory, memory_of


class Mask(Packed):
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


class BitMemory(StoredMemory):
    """The memory of a tensor of two values, 0 and another, stored as one bit per element.

    Attributes:
        dtype: The dtype of the tensor.
        size: The number of elements.
        value: The other value: 1 for booleans.
    """

    __slots__ = ("dtype", "size", "value")

    def __init__(self, tensor: Tensor, value: float = 1.0) -> None:
        vector = memory_of(tensor)
        self.dtype, self.value, self.size = tensor.dtype, value, vector.numel()
        if tensor.dtype is torch.bool:
            vector = vector.to(torch.bfloat16)
        _, bits = RELU.ops.call_save_out_of_place["mask"](vector, 1, None)
        super().__init__(tensor, bits)

    def is_of(self, tensor: Tensor) -> bool:
        """Whether this is the memory of the tensor, which was not modified since."""
        return self._original.is_of(tensor)

    def vector(self) -> Tensor:
        """Return the whole memory as a 1-D tensor."""
        stored = self.leaf.value()
        if stored.dtype is self.dtype:  # the original
            return stored
        dtype = torch.bfloat16 if self.dtype is torch.bool else self.dtype
        values = torch.full((), self.value, dtype=dtype, device=stored.device)
        vector: Tensor = RELU.ops.call_backward["mask"](values.expand(self.size), stored, None)
        return vector.to(self.dtype)


class Bits(Computed):
    """A mask, or a view of one, whose memory is stored as one bit per element."""

    __slots__ = ("memory", "offset", "shape", "stride")

    def __init__(self, memory: BitMemory, saved: Tensor) -> None:
        super().__init__()
        self.memory = memory
        self.shape, self.stride, self.offset = saved.shape, saved.stride(), saved.storage_offset()
        self.cost, self.rounding, self.tolerance, self.keeps_strides = 1, 0.0, 0.0, True
        self.leaf_bytes, self.copied_bytes = memory.leaf.leaf_bytes, 0

    @property
    def how(self) -> str:
        return Mask.how

    def compute(self, consumer: int | None) -> Tensor:
        return self.memory.vector().as_strided(self.shape, self.stride, self.offset)

    def inner(self) -> Iterable[Spec]:
        return (self.memory.leaf,)

    def magnitude(self) -> Tensor:
        device = self.memory.leaf.tensor.device
        return torch.tensor(self.memory.value, dtype=torch.double, device=device)

    def leaves(self) -> Iterator[Leaf]:
        yield self.memory.leaf


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


class Memories:
    """The memory of saved tensors that one forward pass stores in fewer bytes."""

    def __init__(self) -> None:
        self._references: list[weakref.ref[StoredMemory]] = []

    def downcast(self, saved: Tensor, dtype: torch.dtype) -> DowncastMemory:
        """Return a copy of a tensor's memory in a smaller dtype."""
        memory = DowncastMemory(saved, dtype)
        self._references.append(weakref.ref(memory))
        return memory

    def bits(self, saved: Tensor) -> BitMemory | None:
        """Return the bits of a mask's memory, which several nodes may save.

        Return None if the tensor is not a mask, or no kernel packs it.
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
        for memory in self._alive():
            if isinstance(memory, BitMemory) and memory.is_of(saved):
                return memory
        memory = BitMemory(saved, value)
        self._references.append(weakref.ref(memory))
        return memory

    def settle(self) -> None:
        """Use the original memory where it is still alive. Called after the model's forward."""
        for memory in self._alive():
            memory.settle()

    def _alive(self) -> Iterator[StoredMemory]:
        return (m for reference in self._references if (m := reference()) is not None)
