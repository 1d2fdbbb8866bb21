"""Recompute specs: the operations and tensors that recompute a saved tensor in backward.

A spec is a small tree. Its leaves are tensors that autograd saves anyway, smaller forms of these
(`rewrites.py`), or small copies. Its inner nodes are cheap operations. A spec owns its leaves and
refers to no node of the autograd graph. So it still computes its tensor after another backward has
freed what those nodes saved, and it never keeps the graph alive.

NOTE [Exact specs and roundings]

1. If a spec repeats PyTorch's own operations on the tensors that they read, its `rounding` is 0.
   Its value equals the saved tensor bit for bit, and any operation may read it. PyTorch's kernels
   of exp, SiLU and the like round differently for other strides. Where an input of such an
   operation may have other strides than in forward (`keeps_strides`), they are restored. If they
   are not known, the result stays saved.
2. This package's kernel recomputes a norm's output, and may round differently from PyTorch's
   kernels. The value then differs from the saved tensor by at most `rounding * magnitude()`. The
   magnitude is the scale of the error: for a sum, it adds the magnitudes of the terms, because
   their rounding errors remain when the terms cancel. Only operations that tolerate such a
   difference may read the value: those with `reads` in `operations.py`.
3. If a spec contains several norms, their errors add, but its `rounding` is that of the largest
   alone. `_NORM_ROUNDINGS` leaves a margin for this.
4. A product counts as inexact, because a library may choose another algorithm. A bound on its error
   by magnitudes would be too wide to detect a write. So if a product is inside a spec, the
   comparison at its first use is one of norms: that of the difference is at most `tolerance` times
   that of the tensor.

NOTE [Shared values]

Several consumers may read one recomputed value, for example the projections to queries, keys and
values. Backward often runs them one after another, and need not compute the value for each.

1. Each consumer of a spec has a number. The numbers grow with time, also from one forward pass to
   the next, and backward runs the consumers in the reverse order. Before torch 2.14 this holds only
   approximately, because the engine visits nodes late: fewer values are then shared.
2. When a spec is saved for a consumer, `add_consumer` tells the spec, and the specs whose values it
   reads. A spec keeps its value if the number of the next consumer is at most `_SHARING_DISTANCE`
   away: a value that is kept for long would add to the peak memory. The next consumer then does not
   read the specs inside (`move_consumer`).
3. A spec inside another keeps its value only if it takes at least two operations, because this
   value is alive while the consumer runs, in addition to the one that the consumer reads. A norm's
   input and a product's factors may take one operation (`keeps_cheap`). They are kept for the very
   next consumer alone.
4. A view keeps nothing, but the spec that it is a view of does.
5. A product has its own rule: 3 of NOTE [Narrow points] in `products.py`.
6. A value is kept for one consumer. It is dropped when that consumer has read it, when backward
   reaches a consumer with a smaller number, or with the graph. No other backward pass uses it.
"""

from __future__ import annotations

import copy
import math
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import _ops
from .._torch_private import NO_PASS, running_pass
from ..activations import Activation
from ..memory import Packed
from .nodes import has_storage, no_graph, same_strides, unpacking
from .norms import NormAffine

if TYPE_CHECKING:
    from .products import ProductCall

# A recomputed norm's output may differ from PyTorch's by this many eps times its magnitude. The
# number is chosen with a margin, not proved: on a CPU a single norm, with or without an activation,
# differs by about one eps. The rest covers the other operations of a spec, whose number `max_ops`
# limits. If the margin is too small for a spec, the comparison at its first use fails, and the
# tensor stays saved as PyTorch saves it: see NOTE [First use] in `engine.py`.
_NORM_ROUNDINGS = 16

_SHARING_DISTANCE, _MIN_COST_INSIDE = 4, 2  # see NOTE [Shared values]


@cache
def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


class Spec:
    """A recompute spec: computes a saved tensor from its leaves.

    Attributes:
        how: What is done instead of saving the tensor, for the report.
        cost: The passes over memory: see `costs.py`. Views cost nothing.
        rounding: The error of the value over `magnitude()`: see NOTE [Exact specs and roundings].
        leaf_bytes: The total size of the leaves that are not small copies. A leaf counts once for
            each use. The engine only compares the total with a multiple of the saved tensor's
            size, for which this estimate is close enough.
        copied_bytes: The total size of the leaves that are small copies, such as a norm's affine.
        keeps_strides: Whether the value certainly has the strides that the tensor had in forward.
        tolerance: The norm of the value's error over that of the value, if a product is inside; 0
            if none is: see NOTE [Exact specs and roundings].
    """

    __slots__ = (
        "__weakref__",
        "copied_bytes",
        "cost",
        "keeps_strides",
        "leaf_bytes",
        "rounding",
        "tolerance",
    )
    cost: float
    rounding: float
    tolerance: float
    leaf_bytes: int
    copied_bytes: int
    keeps_strides: bool

    @property
    def how(self) -> str:
        return Packed.how

    def value(self, consumer: int | None = None) -> Tensor:
        """Return the tensor.

        Call this through `Recomputed`, which disables grad mode, autocast and function modes.

        Args:
            consumer: The number of the consumer whose backward needs the value: see NOTE [Shared
                values]. None if there is none.
        """
        raise NotImplementedError

    def add_consumer(self, consumer: int, distance: int | None = None) -> None:
        """Record that a consumer saves this spec, or one that computes it.

        Args:
            consumer: The consumer's number.
            distance: How near the next consumer must be, at most `_SHARING_DISTANCE`, the default.
        """

    def move_consumer(self, old: int, new: int) -> None:
        """Record that consumer `new` reads this spec instead of `old`, which gets a kept value.

        Args:
            old: A consumer that was added.
            new: A consumer with a larger number than all that were added.
        """

    def read_again(self) -> None:
        """Record that a consumer reads this spec once more than the products inside know."""

    def magnitude(self) -> Tensor:
        """Return the scale of the value's error, a scalar in float64.

        The value differs from the saved tensor by at most `rounding * magnitude()`. Intermediate
        results may be larger, for example the first factor of 1000 * 1e-3: the product scales the
        factor's error as it scales the factor.
        """
        raise NotImplementedError

    def leaves(self) -> Iterator[Leaf]:
        """Return the leaves of the spec."""
        raise NotImplementedError

    def added_cost(self) -> float:
        """Return the cost without the products that run for other consumers anyway."""
        return self.cost

    def is_current(self) -> bool:
        """Whether no leaf was modified."""
        raise NotImplementedError

    def products(self) -> Iterator[ProductCall]:
        """Return the products that compute this spec."""
        yield from ()


class WrittenToError(RuntimeError):
    """A leaf was modified after its spec was built.

    The text is PyTorch's own for a modified saved tensor, except that it says "from which a saved
    tensor is recomputed" where PyTorch names the operation that returned the tensor.
    """


def written_to_error(tensor: Tensor, version: int) -> WrittenToError:
    """Return the error of a tensor that was at this version when a spec was built from it."""
    return WrittenToError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: [{tensor.type()} {list(tensor.shape)}], from which a saved tensor is "
        f"recomputed, is at version {tensor._version}; expected version {version} instead. Hint: "
        "enable anomaly detection to find the operation that failed to compute its gradient, with "
        "torch.autograd.set_detect_anomaly(True)."
    )


def freed_error(tensor: Tensor) -> RuntimeError:
    """Return the error of a tensor whose memory is gone."""
    return RuntimeError(
        f"the memory of a tensor of shape {list(tensor.shape)} was freed between forward and "
        "backward, and a saved tensor is recomputed from it: call inplace_ops.revert(model) to "
        "save everything as PyTorch does"
    )


class Leaf(Spec):
    """A tensor that a spec starts from, and that must not have been modified since.

    Attributes:
        tensor: The detached tensor.
        version: The tensor's version when the leaf was created. `value` raises if it has changed.
            An `Affine` reads its copies without such a check: only specs and records refer to them,
            and neither writes to them.
        is_copy: Whether the tensor is a copy that only specs and records refer to.
    """

    __slots__ = ("is_copy", "tensor", "version")

    def __init__(self, tensor: Tensor, is_copy: bool = False) -> None:
        self.tensor = tensor.detach()
        self.version = tensor._version
        self.is_copy = is_copy
        self.cost, self.rounding, self.tolerance, self.keeps_strides = 0.0, 0.0, 0.0, True
        size = tensor.nbytes
        self.leaf_bytes, self.copied_bytes = (0, size) if is_copy else (size, 0)

    def value(self, consumer: int | None = None) -> Tensor:
        tensor = self.tensor
        if not self.is_current():
            raise written_to_error(tensor, self.version)
        if not has_storage(tensor):
            raise freed_error(tensor)
        return tensor

    def is_current(self) -> bool:
        return self.tensor._version == self.version

    def magnitude(self) -> Tensor:
        return _largest(self.tensor)

    def leaves(self) -> Iterator[Leaf]:
        yield self


class _Kept(NamedTuple):
    """A value that a spec keeps.

    Attributes:
        value: The value.
        running_pass: The backward pass that has computed it.
        consumer: The consumer that it is kept for.
    """

    value: Tensor
    running_pass: int
    consumer: int


class Computed(Spec):
    """A spec that computes its tensor, and may keep it: see NOTE [Shared values].

    Attributes:
        keeps_cheap: Whether a spec inside that takes one operation may keep its value.
    """

    keeps_cheap = False

    __slots__ = ("_derived", "_kept", "_last_consumer", "_next_consumer")

    def __init__(self) -> None:
        self._kept: _Kept | None = None
        self._last_consumer: int | None = None
        self._next_consumer: dict[int, int] = {}  # by consumer: the one after it, if it is near
        self._derived: dict[Hashable, weakref.ref[Computed]] = {}

    def derived(self, key: Hashable, make: Callable[[], Computed]) -> Computed:
        """Return the spec with this key that is computed from this one alone; make it if needed."""
        reference = self._derived.get(key)
        spec = reference() if reference is not None else None
        if spec is None:
            spec = make()
            self._derived[key] = weakref.ref(spec)
        return spec

    def value(self, consumer: int | None = None) -> Tensor:
        kept, self._kept = self._kept, None
        following = None if consumer is None else self._next_consumer.get(consumer)
        if kept is not None and kept.running_pass == running_pass():
            value = kept.value
        else:
            value = self.compute(consumer)
        if following is not None and running_pass() != NO_PASS:
            self._kept = _Kept(value, running_pass(), following)
            keeping.specs.append(weakref.ref(self))
        return value

    def add_consumer(self, consumer: int, distance: int | None = None) -> None:
        last, self._last_consumer = self._last_consumer, consumer
        farthest = _SHARING_DISTANCE if distance is None else min(distance, _SHARING_DISTANCE)
        if last is not None and 0 < consumer - last <= farthest:
            self._next_consumer[consumer] = last
            self._move_inside(last, consumer)  # the last one then reads what this one has computed
        else:
            self._add_inside(consumer, distance)

    def move_consumer(self, old: int, new: int) -> None:
        following, last = self._next_consumer.pop(old, None), self._last_consumer
        before = following if last == old else last
        if before is not None and 0 < new - before <= _SHARING_DISTANCE:
            self._next_consumer[new] = before
        if following is not None and self._next_consumer.get(new) != following:
            self._read_inside_again()  # no value is kept for it any more
        self._last_consumer = new
        self._move_inside(old, new)

    def read_again(self) -> None:
        self._read_inside_again()

    def _read_inside_again(self) -> None:
        for spec in self.inner():
            if spec.tolerance:
                spec.read_again()

    def _add_inside(self, consumer: int, distance: int | None) -> None:
        for spec in self.inner():
            if spec.cost >= _MIN_COST_INSIDE or spec.tolerance:
                spec.add_consumer(consumer, distance)
            elif self.keeps_cheap and spec.cost:
                spec.add_consumer(consumer, distance=1)

    def _move_inside(self, old: int, new: int) -> None:
        for spec in self.inner():
            if spec.cost >= _MIN_COST_INSIDE or spec.tolerance or (self.keeps_cheap and spec.cost):
                spec.move_consumer(old, new)

    def drops(self, consumer: int) -> bool:
        """Drop the kept value if backward has passed its consumer. Return whether none is kept."""
        kept = self._kept
        if kept is not None and (kept.running_pass != running_pass() or kept.consumer > consumer):
            self._kept = kept = None
        return kept is None

    def is_current(self) -> bool:
        return all(spec.is_current() for spec in self.inner())

    def products(self) -> Iterator[ProductCall]:
        for spec in self.inner():
            if spec.tolerance:
                yield from spec.products()

    def added_cost(self) -> float:
        inside = (spec for spec in self.inner() if spec.tolerance)
        return self.cost - sum(spec.cost - spec.added_cost() for spec in inside)

    def compute(self, consumer: int | None) -> Tensor:
        """Compute the tensor for `value`."""
        raise NotImplementedError

    def inner(self) -> Iterable[Spec]:
        """Return the specs whose values `compute` reads."""
        raise NotImplementedError


class Keeping(threading.local):
    """The specs that keep a value for a consumer of a backward pass in this thread."""

    def __init__(self) -> None:
        self.specs: list[weakref.ref[Computed]] = []

    def drop_passed(self, consumer: int) -> None:
        """Drop the values that no consumer from this one on needs."""
        if self.specs:
            found = ((reference, reference()) for reference in self.specs)
            self.specs = [
                reference
                for reference, spec in found
                if spec is not None and not spec.drops(consumer)
            ]


keeping = Keeping()


def _without_expansion(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    """Return the sizes of the tensor that a tensor with these strides was expanded from."""
    return [1 if step == 0 else size for size, step in zip(shape, stride, strict=True)]


class Affine(Computed):
    """The output of a norm, or of an activation after a norm, recomputed by one kernel.

    Attributes:
        x: The spec of the norm's input.
        affine: The norm's output as a function of its input. Its tensors are small copies.
        dtype: The dtype of the norm's output, for `rounding` and for the choice of fused kernels.
            `compute` does not read it: its result has the dtype of x, which is the same.
        activation: The activation after the norm; None if there is none.
        scalars: The activation's arguments after its input, for example LeakyReLU's negative slope.
    """

    keeps_cheap = True

    __slots__ = ("activation", "affine", "dtype", "scalars", "x")

    def __init__(
        self,
        x: Spec,
        affine: NormAffine,
        dtype: torch.dtype,
        activation: Activation | None = None,
        scalars: Sequence[float] = (),
    ) -> None:
        super().__init__()
        self.x, self.affine, self.activation, self.scalars = x, affine, activation, scalars
        self.dtype = dtype
        self.cost = x.cost + (1 if activation is None else 2)
        self.rounding = max(x.rounding, _NORM_ROUNDINGS * _eps(dtype))
        self.tolerance = x.tolerance
        self.keeps_strides = x.keeps_strides
        self.leaf_bytes, self.copied_bytes = x.leaf_bytes, x.copied_bytes + affine.nbytes

    def compute(self, consumer: int | None) -> Tensor:
        return self.of(self.x.value(consumer))

    def inner(self) -> Iterable[Spec]:
        return (self.x,)

    def is_current(self) -> bool:
        return self.x.is_current()

    def of(self, x: Tensor, **casts: Any) -> Tensor:
        """Return the output for the norm's input x. `casts` are keyword arguments of the op."""
        activation = self.activation
        arguments: Any = (x, *self.affine, _ops.dim_order_of(x), *self.scalars)
        if casts:
            op = _ops.NORMALIZE if activation is None else activation.ops.recompute
            return op(*arguments, **casts)
        call = _ops.CALL_NORMALIZE if activation is None else activation.ops.call_recompute
        value: Tensor = call(*arguments)
        return value

    def activated(self, activation: Activation, scalars: Sequence[float]) -> Affine:
        """Return the spec of an activation's output, where this spec is the activation's input."""
        return Affine(self.x, self.affine, self.dtype, activation, scalars)

    def magnitude(self) -> Tensor:
        # Add the absolute values of all terms: their rounding errors remain when the terms cancel.
        # shift = bias - mean * scale may be small although its terms are large. So one bound holds
        # for all elements: the largest |x| covers the mean.
        x = self.x.value().abs()
        if self.x.rounding:  # terms that x is computed from may have cancelled too
            x = x.clamp(min=self.x.magnitude().to(x.dtype))
        affine, rows = self.affine
        if rows is not None:
            rstd, mean = rows
            rows = torch.stack([rstd, -mean.abs()])  # x - mean then is |x| + |mean|
        return _largest(_ops.NORMALIZE(x, affine.abs(), rows, _ops.dim_order_of(x)))

    def leaves(self) -> Iterator[Leaf]:
        yield from self.x.leaves()
        for tensor in self.affine:
            if tensor is not None:
                yield Leaf(tensor, is_copy=True)


class Call(Computed):
    """The result of a PyTorch operation or view, applied to other specs' values and to arguments.

    Attributes:
        function: The operation: `function(*inputs, *arguments)`.
        inputs: The specs of the inputs.
        arguments: The arguments after the inputs.
        bound: Returns a bound on the magnitude of the result, given the magnitudes of the inputs.
        dtype: The dtype of the result; None if it is the dtype that `function` returns. The two may
            differ because an in-place operation computes in the promoted dtype, and casts to the
            dtype of the tensor that it overwrites.
    """

    __slots__ = ("arguments", "bound", "dtype", "function", "inputs")

    def __init__(
        self,
        function: Callable[..., Tensor],
        inputs: Sequence[Spec],
        arguments: Sequence[Any] = (),
        cost: float = 1,
        bound: Callable[[list[Tensor]], Tensor] = lambda inputs: largest(inputs),
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.function, self.inputs, self.arguments, self.bound = function, inputs, arguments, bound
        self.dtype = dtype
        self.cost = sum(spec.cost for spec in inputs) + cost
        self.rounding = max(spec.rounding for spec in inputs)
        self.tolerance = max(spec.tolerance for spec in inputs)
        self.keeps_strides = all(spec.keeps_strides for spec in inputs)
        self.leaf_bytes = sum(spec.leaf_bytes for spec in inputs)
        self.copied_bytes = sum(spec.copied_bytes for spec in inputs)
        if dtype is not None and self.rounding:  # a cast rounds once more
            self.rounding = max(self.rounding, 2 * _eps(dtype))

    @property
    def how(self) -> str:
        first, *others = self.inputs
        return Packed.how if others or not isinstance(first, Leaf) else first.how

    def compute(self, consumer: int | None) -> Tensor:
        return self.of(*[spec.value(consumer) for spec in self.inputs])

    def inner(self) -> Iterable[Spec]:
        return self.inputs

    def of(self, *inputs: Tensor) -> Tensor:
        """Return the result for given values of the inputs."""
        value = self.function(*inputs, *self.arguments)
        return value if self.dtype in (None, value.dtype) else value.to(self.dtype)

    def magnitude(self) -> Tensor:
        return self.bound([spec.magnitude() for spec in self.inputs])

    def leaves(self) -> Iterator[Leaf]:
        for spec in self.inputs:
            yield from spec.leaves()


class ViewCall(Call):
    """A view of another spec's value, or another call that costs nothing."""

    __slots__ = ()

    @property
    def how(self) -> str:
        return self.inputs[0].how

    def __init__(
        self, function: Callable[..., Tensor], inputs: Sequence[Spec], *arguments: Any
    ) -> None:
        super().__init__(function, inputs, arguments, cost=0)

    def value(self, consumer: int | None = None) -> Tensor:
        return self.compute(consumer)

    def add_consumer(self, consumer: int, distance: int | None = None) -> None:
        (spec,) = self.inputs
        spec.add_consumer(consumer, distance)

    def move_consumer(self, old: int, new: int) -> None:
        (spec,) = self.inputs
        spec.move_consumer(old, new)


class Restrided(ViewCall):
    """Another spec's value with the strides that the tensor had in forward."""

    __slots__ = ()

    def __init__(self, saved: Recomputed) -> None:
        super().__init__(saved.in_layout, (saved.spec,))
        self.keeps_strides = True


class CopyOf(ViewCall):
    """Another spec's value, of which forward made a copy, maybe with other strides."""

    __slots__ = ()

    def __init__(self, function: Callable[..., Tensor], spec: Spec) -> None:
        super().__init__(function, (spec,))
        self.keeps_strides = False


def _largest(tensor: Tensor) -> Tensor:
    """Return the largest finite magnitude in a tensor, a scalar in float64."""
    if tensor.numel() == 0:
        return torch.zeros((), dtype=torch.double, device=tensor.device)
    magnitude = tensor.abs().nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    return magnitude.amax().double()


def largest(magnitudes: list[Tensor]) -> Tensor:
    """Bound an activation, a view or a concatenation: return the largest input magnitude."""
    return torch.stack(magnitudes).amax()


def largest_or_one(magnitudes: list[Tensor]) -> Tensor:
    """Bound an activation that is not 0 at 0, such as sigmoid: return at least 1."""
    return largest(magnitudes).clamp(min=1.0)


def total(magnitudes: list[Tensor]) -> Tensor:
    """Bound a sum: return the sum of the input magnitudes."""
    return torch.stack(magnitudes).sum()


def product(magnitudes: list[Tensor]) -> Tensor:
    """Bound a product: return the product of the input magnitudes."""
    return torch.stack(magnitudes).prod()


@contextmanager
def _without_autocast(device_type: str) -> Iterator[None]:
    with no_graph(), torch.autocast(device_type, enabled=False):
        yield


# Compare a tensor in at most this many chunks, of at least this many elements: so a comparison adds
# little to the peak memory of the first step, and synchronizes with a GPU only a few times.
_MAX_CHUNKS, _MIN_CHUNK_SIZE = 16, 2**16


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Return the elements of tensors of one shape in 1-D chunks, of the same elements at a time.

    In memory order if all tensors are dense and have the same strides.
    """
    first = tensors[0]
    strides = {tensor.stride() for tensor in tensors}
    if len(strides) == 1 and torch.ops.aten.is_non_overlapping_and_dense(first):
        flat = [tensor.as_strided((first.numel(),), (1,)) for tensor in tensors]
    else:
        flat = [tensor.reshape(-1) for tensor in tensors]
    size = max(_MIN_CHUNK_SIZE, -(-first.numel() // _MAX_CHUNKS))
    yield from zip(*[tensor.split(size) for tensor in flat], strict=True)


def _largest_of_chunks(tensor: Tensor) -> float:
    return max((float(_largest(chunk)) for (chunk,) in _chunks(tensor)), default=0.0)


def _excess(value: Tensor, saved: Tensor, allowed: float) -> float | None:
    """Return the largest difference that is more than `allowed`; None if there is none.

    Equal infinities count as equal, and so do two NaNs.
    """
    excess = None
    for mine, other in _chunks(value, saved):
        difference = torch.sub(mine, other).abs()
        wrong = ~(difference <= allowed)
        wrong &= ~((mine == other) | (mine.isnan() & other.isnan()))
        if wrong.any():
            excess = max(excess or 0.0, float(difference[wrong].max()))
    return excess


def _distance(value: Tensor, saved: Tensor) -> float:
    """Return the norm of the difference over the norm of `saved`.

    It is infinite if an element is NaN or infinite in one of the two alone.
    """
    total = difference = 0.0
    if saved.is_complex():
        value, saved = torch.view_as_real(value), torch.view_as_real(saved)
    dtype = torch.promote_types(saved.dtype, torch.float32)
    norm = partial(torch.linalg.vector_norm, dtype=dtype)
    for mine, other in _chunks(value, saved):
        finite = other.isfinite()
        if not torch.equal(finite, mine.isfinite()):
            return math.inf
        total += float(norm(other.where(finite, 0.0))) ** 2
        difference += float(norm(torch.sub(mine, other).where(finite, 0.0))) ** 2
    return math.sqrt(difference / total) if total else math.sqrt(difference)


class Original(NamedTuple):
    """A tensor that stays saved until it is known whether its spec can be computed in backward.

    Attributes:
        leaf: The tensor.
        learn: Looks whether the spec can be computed now. Called in backward.
    """

    leaf: Leaf
    learn: Callable[[], object]


class Recomputed(Packed):
    """A spec that is saved instead of a tensor, with the tensor's shape, dtype, device and strides.

    Attributes:
        producer: The name of the operation whose output the tensor is.
        consumer: The name of the operation that saves the tensor.
        number: The consumer's number: see NOTE [Shared values]. None if it has none.
        original: The tensor itself, if it stays saved: see 6 of NOTE [Weights are proved] in
            `products.py`. Else None.
    """

    __slots__ = (
        *("consumer", "device", "dtype", "number", "original", "producer", "shape"),
        *("spec", "stride"),
    )

    def __init__(
        self, spec: Spec, like: Tensor, producer: str, consumer: str, number: int | None = None
    ) -> None:
        self.spec, self.producer, self.consumer, self.number = spec, producer, consumer, number
        self.shape, self.dtype, self.device = like.shape, like.dtype, like.device
        self.stride = like.stride()
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
        return self.spec if is_free else Restrided(self)

    def for_consumer(self, consumer: str, number: int) -> Recomputed:
        """Return the same for another operation that saves the tensor, with its number."""
        other = copy.copy(self)
        other.consumer, other.number = consumer, number
        other.spec.add_consumer(number)
        return other

    def unpack(self) -> Tensor:
        if unpacking.skips_values:
            return torch.empty((), dtype=self.dtype, device=self.device).expand(self.shape)
        return super().unpack()

    def compute(self) -> Tensor:
        """Compute the spec. The result has the strides of the tensor that the spec replaces."""
        if self.original is not None:
            self.original.learn()
            return self.original.leaf.value()
        if self.number is not None:
            keeping.drop_passed(self.number)
        with self._without_modes():
            try:
                value = self.spec.value(self.number)
            except RuntimeError as error:
                like = partial(torch.empty, self.shape, dtype=self.dtype, device=self.device)
                _ops.raise_out_of_memory(error, like)
                raise
            if (value.shape, value.dtype, value.device) != (self.shape, self.dtype, self.device):
                raise RuntimeError(
                    f"the output of {self.name} was recomputed as a {value.dtype} tensor of shape "
                    f"{list(value.shape)} on {value.device} instead of a {self.dtype} tensor of "
                    f"shape {list(self.shape)} on {self.device}"
                )
            return self.in_layout(value)

    def difference(self, saved: Tensor) -> str | None:
        """Return by how much the recomputed value differs from the saved tensor; None if equal.

        Unless the spec is exact, values within its rounding count as equal. If the value cannot be
        recomputed, return the error's text.

        Raises:
            WrittenToError: A leaf was modified.
            RuntimeError: Memory ran out.
                Neither says anything about other forward passes, in which the value may be right.
        """
        try:
            value = self.compute()
        except WrittenToError:
            raise
        except RuntimeError as error:
            if _ops.is_out_of_memory(error):
                raise
            return str(error)
        return self.difference_of(value, saved)

    def difference_of(self, value: Tensor, saved: Tensor) -> str | None:
        """Return by how much a given recomputed value differs from the saved tensor.

        See `difference`.
        """
        with self._without_modes():
            saved = saved.detach()
            if torch.equal(value, saved):
                return None
            if saved.dtype is torch.bool:
                return "in some elements"
            if self.spec.tolerance:
                distance = _distance(value, saved)
                return None if distance <= self.spec.tolerance else f"{distance:.3g} of its norm"
            rounding = self.spec.rounding
            # `magnitude` takes memory to compute. The value's own magnitude is a lower bound of it.
            if rounding and _excess(value, saved, rounding * _largest_of_chunks(value)) is None:
                return None
            allowed = rounding * float(self.spec.magnitude()) if rounding else 0.0
            excess = _excess(value, saved, allowed)
            return None if excess is None else f"up to {excess:.3g}"

    def _without_modes(self) -> AbstractContextManager[None]:
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
