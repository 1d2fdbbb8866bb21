"""Recompute specs: how a tensor is computed again in backward, and from what.

A spec is a small tree. Its leaves are tensors that autograd saves anyway, or small copies; its
inner nodes are cheap operations. It owns its leaves and refers to no node of the graph, so another
backward may free the nodes.

NOTE [Exact specs and roundings]

`rounding` is 0 if the spec repeats PyTorch's own operations on the tensors that they read: its
value then equals the saved tensor bit for bit, and any operation may be given it. A norm is
recomputed by one operation, which PyTorch's kernels may round otherwise. The value then differs by
at most `rounding * magnitude()`, where the magnitude bounds all intermediate results. Such a
value goes only to operations that tolerate a rounding: those with `reads` in `operations.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .. import _ops
from ..activations import Activation
from ..memory import Packed
from .nodes import WeakMemory, has_storage, no_graph
from .norms import NormAffine

# A recomputed norm differs from PyTorch's by at most this many roundings of its terms.
_NORM_ROUNDINGS = 16


@cache
def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


class Spec(ABC):
    """How a tensor is recomputed.

    Attributes:
        cost: The number of operations; views are free.
        rounding: See NOTE [Exact specs and roundings].
        leaf_bytes: The size of the leaves that operations save anyway.
        copied_bytes: The size of those that are copies.
    """

    __slots__ = ("__weakref__", "copied_bytes", "cost", "leaf_bytes", "rounding")
    cost: int
    rounding: float
    leaf_bytes: int
    copied_bytes: int

    @abstractmethod
    def compute(self) -> Tensor:
        """Return the tensor. Call it through `Recomputed`, which sets the modes."""

    @abstractmethod
    def magnitude(self) -> Tensor:
        """Return a bound of all intermediate results, a scalar in float64."""

    @abstractmethod
    def leaves(self) -> Iterator[Leaf]:
        """Return the tensors that the spec owns."""


class WrittenToError(RuntimeError):
    """A leaf was written to since its spec was made: PyTorch's own error, with its text."""


class Leaf(Spec):
    """A tensor that is read as it was when the spec was made.

    Attributes:
        tensor: The tensor, without its graph.
        version: Its version then.
        is_copy: Whether it is a copy, which nothing else refers to.
    """

    __slots__ = ("is_copy", "tensor", "version")

    def __init__(self, tensor: Tensor, is_copy: bool = False) -> None:
        self.tensor = tensor.detach()
        self.version = tensor._version
        self.is_copy = is_copy
        self.cost, self.rounding = 0, 0.0
        size = tensor.nbytes
        self.leaf_bytes, self.copied_bytes = (0, size) if is_copy else (size, 0)

    def compute(self) -> Tensor:
        tensor = self.tensor
        if tensor._version != self.version:
            raise WrittenToError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: [{tensor.type()} {list(tensor.shape)}], from which a saved "
                f"tensor is recomputed, is at version {tensor._version}; expected version "
                f"{self.version} instead. Hint: enable anomaly detection to find the operation "
                "that failed to compute its gradient, with "
                "torch.autograd.set_detect_anomaly(True)."
            )
        if not has_storage(tensor):
            raise RuntimeError(
                f"the memory of a tensor of shape {list(tensor.shape)} was freed between forward "
                "and backward, and a saved tensor is recomputed from it: call "
                "inplace_ops.revert(model) to save everything as PyTorch does"
            )
        return tensor

    def magnitude(self) -> Tensor:
        return _largest(self.tensor)

    def leaves(self) -> Iterator[Leaf]:
        yield self


class DowncastMemory:
    """A tensor's memory in a narrower dtype, which keeps all of its values.

    Something may hold the tensor itself nevertheless, before or after: an operation without a rule,
    or the caller. What is stored here would then come on top of it. So `settle` gives it up if the
    tensor is still there when forward has ended.

    Attributes:
        leaf: The memory, as a vector.
    """

    __slots__ = ("__weakref__", "_wide", "leaf")

    def __init__(self, tensor: Tensor, dtype: torch.dtype) -> None:
        size = tensor.untyped_storage().nbytes() // tensor.itemsize
        self.leaf = Leaf(tensor.detach().as_strided((size,), (1,), 0).to(dtype))
        self._wide = WeakMemory(tensor)

    def settle(self) -> None:
        """Read the tensor itself from now on, if it is held anyway."""
        wide = self._wide()
        if wide is not None:
            self.leaf = Leaf(wide)


class Downcast(Spec):
    """A tensor, or a view of one, whose memory is stored in a narrower dtype."""

    __slots__ = ("dtype", "memory", "offset", "shape", "stride")

    def __init__(self, memory: DowncastMemory, saved: Tensor) -> None:
        self.memory, self.dtype = memory, saved.dtype
        self.shape, self.stride, self.offset = saved.shape, saved.stride(), saved.storage_offset()
        self.cost, self.rounding = 1, 0.0
        self.leaf_bytes, self.copied_bytes = memory.leaf.leaf_bytes, 0

    def compute(self) -> Tensor:
        # An expanded tensor is computed as what it was expanded from.
        own = _without_expansion(self.shape, self.stride)
        narrow = self.memory.leaf.compute().as_strided(own, self.stride, self.offset)
        return narrow.to(self.dtype).expand(self.shape)

    def magnitude(self) -> Tensor:
        return self.memory.leaf.magnitude()

    def leaves(self) -> Iterator[Leaf]:
        yield self.memory.leaf


def _without_expansion(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    """Return the sizes of what a tensor was expanded from."""
    return [1 if step == 0 else size for size, step in zip(shape, stride, strict=True)]


class Affine(Spec):
    """A norm's output, or that of an activation after the norm: one kernel."""

    __slots__ = ("activation", "affine", "dtype", "scalars", "x")

    def __init__(
        self,
        x: Spec,
        affine: NormAffine,
        dtype: torch.dtype,
        activation: Activation | None = None,
        scalars: Sequence[float] = (),
    ) -> None:
        self.x, self.affine, self.activation, self.scalars = x, affine, activation, scalars
        self.dtype = dtype
        self.cost = x.cost + (1 if activation is None else 2)
        self.rounding = max(x.rounding, _NORM_ROUNDINGS * _eps(dtype))
        self.leaf_bytes, self.copied_bytes = x.leaf_bytes, x.copied_bytes + affine.nbytes

    def compute(self) -> Tensor:
        return self.of(self.x.compute())

    def of(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return the output for an input, cast to a dtype."""
        op = _ops.NORMALIZE if self.activation is None else self.activation.ops.recompute
        return op(x, *self.affine, _ops.dim_order_of(x), *self.scalars, dtype=dtype)

    def activated(self, activation: Activation, scalars: Sequence[float]) -> Affine:
        """Return the spec of an activation of a norm's output."""
        return Affine(self.x, self.affine, self.dtype, activation, scalars)

    def magnitude(self) -> Tensor:
        # Mean and bias may cancel in one shift, and the norm adds them in turn: the largest of all.
        x = self.x.compute().abs()
        if self.x.rounding:  # what it is computed from may have cancelled too
            x = x.clamp(min=self.x.magnitude().to(x.dtype))
        affine, rows = self.affine
        if rows is not None:
            rstd, mean = rows
            rows = torch.stack([rstd, -mean.abs()])
        return _largest(_ops.NORMALIZE(x, affine.abs(), rows, _ops.dim_order_of(x)))

    def leaves(self) -> Iterator[Leaf]:
        yield from self.x.leaves()
        for tensor in self.affine:
            if tensor is not None:
                yield Leaf(tensor, is_copy=True)


class Call(Spec):
    """A function of PyTorch's, or a view, of other specs' values and of arguments.

    `bound` tells the magnitude of the result from those of the inputs. `dtype` is the result's, if
    it may be another than the function's: in place an operation computes in the promoted dtype, and
    casts to that of what it overwrites.
    """

    __slots__ = ("arguments", "bound", "dtype", "function", "inputs")

    def __init__(
        self,
        function: Callable[..., Tensor],
        inputs: Sequence[Spec],
        arguments: Sequence[Any] = (),
        cost: int = 1,
        bound: Callable[[list[Tensor]], Tensor] = lambda inputs: largest(inputs),
        dtype: torch.dtype | None = None,
    ) -> None:
        self.function, self.inputs, self.arguments, self.bound = function, inputs, arguments, bound
        self.dtype = dtype
        self.cost = sum(spec.cost for spec in inputs) + cost
        self.rounding = max(spec.rounding for spec in inputs)
        self.leaf_bytes = sum(spec.leaf_bytes for spec in inputs)
        self.copied_bytes = sum(spec.copied_bytes for spec in inputs)
        if dtype is not None and self.rounding:  # a cast rounds once more
            self.rounding = max(self.rounding, 2 * _eps(dtype))

    def compute(self) -> Tensor:
        return self.of(*(spec.compute() for spec in self.inputs))

    def of(self, *inputs: Tensor) -> Tensor:
        """Return the result for values of the inputs."""
        value = self.function(*inputs, *self.arguments)
        return value if self.dtype in (None, value.dtype) else value.to(self.dtype)

    def magnitude(self) -> Tensor:
        return self.bound([spec.magnitude() for spec in self.inputs])

    def leaves(self) -> Iterator[Leaf]:
        for spec in self.inputs:
            yield from spec.leaves()


def _largest(tensor: Tensor) -> Tensor:
    """Return the largest finite magnitude."""
    if tensor.numel() == 0:
        return torch.zeros((), dtype=torch.double, device=tensor.device)
    magnitude = tensor.abs().nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    return magnitude.amax().double()


def largest(magnitudes: list[Tensor]) -> Tensor:
    """The bound of an activation, a view, a concatenation: the largest of the inputs'."""
    return torch.stack(magnitudes).amax()


def largest_or_one(magnitudes: list[Tensor]) -> Tensor:
    """The bound of an activation that is not 0 at 0, as sigmoid."""
    return largest(magnitudes).clamp(min=1.0)


def total(magnitudes: list[Tensor]) -> Tensor:
    """The bound of a sum."""
    return torch.stack(magnitudes).sum()


def product(magnitudes: list[Tensor]) -> Tensor:
    """The bound of a product."""
    return torch.stack(magnitudes).prod()


@contextmanager
def _without_autocast(kind: str) -> Iterator[None]:
    with no_graph(), torch.autocast(kind, enabled=False):
        yield


# A comparison adds little to the peak of the first step, and waits for a GPU few times.
_PARTS, _LEAST_PART = 16, 2**16


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """Return the elements in parts, in the order of the memory where it is dense."""
    if torch.ops.aten.is_non_overlapping_and_dense(tensor):
        tensor = tensor.as_strided((tensor.numel(),), (1,))
    else:
        tensor = tensor.reshape(-1)
    yield from tensor.split(max(_LEAST_PART, -(-tensor.numel() // _PARTS)))


def _largest_of(tensor: Tensor) -> float:
    return max((float(_largest(part)) for part in _parts(tensor)), default=0.0)


def _excess(value: Tensor, saved: Tensor, allowed: float) -> float | None:
    """Return the largest difference that is more than `allowed`, None if there is none.

    Equal infinities are no difference, nor are two NaN.
    """
    found = None
    for mine, other in zip(_parts(value), _parts(saved), strict=True):
        difference = torch.sub(mine, other).abs_()
        wrong = ~(difference <= allowed)
        wrong &= ~((mine == other) | (mine.isnan() & other.isnan()))
        if wrong.any():
            found = max(found or 0.0, float(difference[wrong].max()))
    return found


class Recomputed(Packed):
    """What is saved in place of a tensor: a spec, and the tensor's shape, dtype and strides.

    Attributes:
        producer: The name of the operation whose output it is.
        consumer: The name of the operation that saves it.
    """

    __slots__ = ("consumer", "device", "dtype", "producer", "shape", "spec", "stride")

    def __init__(self, spec: Spec, like: Tensor, producer: str, consumer: str) -> None:
        self.spec, self.producer, self.consumer = spec, producer, consumer
        self.shape, self.dtype, self.device = like.shape, like.dtype, like.device
        self.stride = like.stride()
        if isinstance(spec, Downcast):
            self.how = f"stored as {spec.memory.leaf.tensor.dtype}".replace("torch.", "")

    @property
    def name(self) -> str:
        """What it is, for a message."""
        return f"{self.producer}, saved by {self.consumer}"

    def compute(self) -> Tensor:
        """Compute the spec, in the layout of the tensor that it stands for."""
        with self._as_in_forward():
            value = self.spec.compute()
            if (value.shape, value.dtype, value.device) != (self.shape, self.dtype, self.device):
                raise RuntimeError(
                    f"the output of {self.name} was recomputed as a {value.dtype} tensor of shape "
                    f"{list(value.shape)} on {value.device} instead of a {self.dtype} tensor of "
                    f"shape {list(self.shape)} on {self.device}"
                )
            return self.in_layout(value)

    def difference(self, saved: Tensor) -> str | None:
        """Return by how much the recomputed value differs from the saved tensor; None if equal.

        A rounding is no difference, unless the spec is exact.

        Raises:
            WrittenToError: In another forward pass the value may be right.
        """
        try:
            value = self.compute()
        except WrittenToError:
            raise
        except RuntimeError as error:
            return str(error)
        return self.difference_of(value, saved)

    def difference_of(self, value: Tensor, saved: Tensor) -> str | None:
        """Return the same for a value that was recomputed."""
        with self._as_in_forward():
            saved = saved.detach()
            if torch.equal(value, saved):
                return None
            rounding = self.spec.rounding
            # The magnitude takes memory to compute, and is at least that of the value.
            if rounding and _excess(value, saved, rounding * _largest_of(value)) is None:
                return None
            allowed = rounding * float(self.spec.magnitude()) if rounding else 0.0
            excess = _excess(value, saved, allowed)
            return None if excess is None else f"up to {excess:.3g}"

    def _as_in_forward(self) -> AbstractContextManager[None]:
        """Compute without a graph, at full precision, without the caller's function modes."""
        kind = self.device.type
        if not torch.is_autocast_enabled(kind):
            return no_graph()
        return _without_autocast(kind)

    def in_layout(self, value: Tensor) -> Tensor:
        """Return the value with the strides of the saved tensor, on which kernels may depend."""
        if value.stride() == self.stride:
            return value
        # An expanded tensor is copied as what it was expanded from.
        own = _without_expansion(self.shape, self.stride)
        result = value.new_empty_strided(own, self.stride)
        result.copy_(value[tuple(slice(size) for size in own)])
        return result.expand(self.shape)

    def tensors(self) -> Iterator[Tensor]:
        return (leaf.tensor for leaf in self.spec.leaves())
