"""`Recomputed`: a spec that a node saves instead of a tensor.

`rewrites.py` has the other things that a node saves instead: packed bits, and shapes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _ops
from .._torch_private import len_torch_function_stack
from ..memory import Packed
from .calls import ViewCall
from .nodes import no_graph, unpacking
from .specs import Leaf, Spec, keeping
from .tensors import same_strides


@contextmanager
def _without_autocast(device_type: str) -> Iterator[None]:
    with no_graph(), torch.autocast(device_type, enabled=False):
        yield


def _without_expansion(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    """Return the sizes of the tensor that a tensor with these strides was expanded from."""
    return [1 if step == 0 else size for size, step in zip(shape, stride, strict=True)]


class Original(NamedTuple):
    """A tensor that stays saved until it is known whether its spec can be computed in backward.

    Attributes:
        leaf: The tensor.
        learn: Looks whether the spec can be computed now. Called in backward.
    """

    leaf: Leaf
    learn: Callable[[], object]


_new = object.__new__  # without `__init__`


class Recomputed(Packed):
    """A spec that is saved instead of a tensor, with the tensor's dtype, device and layout.

    Attributes:
        producer: The name of the operation whose output the tensor is.
        consumer: The name of the operation that saves the tensor.
        layout: What `layout_of` returns for the tensor.
        turn: The consumer's turn: see NOTE [Shared values] in `specs.py`. None if it has none.
        original: The tensor itself, if it stays saved: see 6 of NOTE [Weights are proved] in
            `weights.py`. Else None.
    """

    __slots__ = (
        *("consumer", "device", "dtype", "layout", "original", "producer", "shape"),
        *("spec", "stride", "turn"),
    )

    def __init__(
        self, spec: Spec, like: Tensor, producer: str, consumer: str, turn: int | None = None
    ) -> None:
        self.spec, self.producer, self.consumer, self.turn = spec, producer, consumer, turn
        self.shape, self.dtype, self.device = like.shape, like.dtype, like.device
        self.stride, self.layout = like.stride(), _ops.layout_of(like)
        self.original: Original | None = None

    @property
    def how(self) -> str:  # type: ignore[override]
        return self.spec.how

    @property
    def name(self) -> str:
        """The names of the producer and the consumer, for a message."""
        return f"{self.producer}, saved by {self.consumer}"

    @property
    def as_input(self) -> Spec:
        """The spec of the saved tensor, as an input of another spec."""
        # A norm's own kernels round anyway, and fuse better with the spec itself.
        is_free = self.spec.keeps_strides or self.spec.rounding
        return self.spec if is_free else self.in_forwards_strides()

    def in_forwards_strides(self) -> Spec:
        """Return the spec, with the strides that the tensor had in forward.

        See 2 of NOTE [Exact specs and roundings] in `specs.py`.
        """
        return ViewCall(self.in_layout, (self.spec,), keeps_strides=True)

    def for_consumer(self, consumer: str, turn: int) -> Recomputed:
        """Return the same for another operation that saves the tensor, with its turn."""
        other = copy.copy(self)
        other.consumer, other.turn = consumer, turn
        other.spec.add_consumer(turn)
        return other

    def again(self, spec: Spec, turn: int) -> Recomputed:
        """Return the same for the spec of another forward pass, with the turn of its consumer."""
        other: Recomputed = _new(Recomputed)
        other.spec, other.turn, other.original = spec, turn, None
        other.producer, other.consumer = self.producer, self.consumer
        other.shape, other.dtype, other.device = self.shape, self.dtype, self.device
        other.stride, other.layout = self.stride, self.layout
        return other

    def without_spec(self) -> Recomputed:
        """Return the same without the spec, which owns tensors, for later forward passes."""
        return self.again(None, 0)  # type: ignore[arg-type]

    def unpack(self) -> Tensor:
        if unpacking.skips_values:
            return torch.empty((), dtype=self.dtype, device=self.device).expand(self.shape)
        return self.compute() if self.stream is None else super().unpack()

    def compute(self) -> Tensor:
        """Compute the spec. The result has the strides of the tensor that the spec replaces."""
        if self.original is not None:
            self.original.learn()
            return self.original.leaf.value()
        if self.turn is not None and keeping.specs:
            keeping.drop_passed(self.turn)
        device = self.device
        try:
            if (
                torch.is_grad_enabled()
                or len_torch_function_stack()
                or torch.is_autocast_enabled(device.type)
            ):
                with self.without_modes():
                    value = self.spec.value(self.turn)
            else:  # entering the context takes long
                value = self.spec.value(self.turn)
        except RuntimeError as error:
            _ops.raise_out_of_memory(error, self._allocate)
            raise
        if self.layout is not None and _ops.layout_of(value) == self.layout:  # the usual case
            return value
        if value.shape != self.shape or value.dtype is not self.dtype or value.device != device:
            raise RuntimeError(
                f"the output of {self.name} was recomputed as a {value.dtype} tensor of shape "
                f"{list(value.shape)} on {value.device} instead of a {self.dtype} tensor of "
                f"shape {list(self.shape)} on {device}"
            )
        if value.stride() == self.stride:
            return value
        with self.without_modes():
            return self.in_layout(value)

    def _allocate(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)

    def without_modes(self) -> AbstractContextManager[None]:
        """Disable grad mode, autocast and the caller's function modes in a `with` block.

        Autocast may have been enabled in forward. The spec contains the casts that it inserted, so
        under autocast the operations would be cast once more.
        """
        device_type = self.device.type
        if not torch.is_autocast_enabled(device_type):
            return no_graph()
        return _without_autocast(device_type)

    def in_layout(self, value: Tensor) -> Tensor:
        """Return the value with the strides of the saved tensor, on which kernels may depend."""
        if value.stride() == self.stride:
            return value
        if same_strides(self.shape, value.stride(), self.stride):
            return value.as_strided(self.shape, self.stride)
        # Copy the tensor that the saved one was expanded from, and expand the result.
        unexpanded = _without_expansion(self.shape, self.stride)
        result = value.new_empty_strided(unexpanded, self.stride)
        result.copy_(value[tuple([slice(size) for size in unexpanded])])
        return result.expand(self.shape)

    def tensors(self) -> Iterator[Tensor]:
        leaves = self.spec.leaves() if self.original is None else [self.original.leaf]
        return (leaf.tensor for leaf in leaves)
