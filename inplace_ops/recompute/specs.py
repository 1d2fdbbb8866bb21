"""Recompute specs: the operations and tensors that recompute a saved tensor in backward.

A spec is a small tree. Its leaves are tensors that autograd saves anyway, narrow copies of these
(`narrow.py`), or small auxiliary tensors. Its inner specs are cheap operations (`calls.py`) and
products (`products.py`). A spec owns its leaves and refers to no node of the autograd graph. So it
still computes its tensor after another backward has freed what those nodes saved, and it never
keeps the graph alive.

NOTE [Exact specs and roundings]

1. If a spec repeats PyTorch's own operations on the tensors that they read, its `rounding` is 0.
   Its value equals the saved tensor bit for bit.
2. PyTorch's kernels of exp, SiLU and the like round differently for other strides. Where an input
   of such an operation may have other strides than in forward (`keeps_strides`), they are restored.
   If they are not known, the result stays saved.
3. This package's kernel recomputes a norm's output, and may round differently from PyTorch's
   kernels. The value then differs from the saved tensor by at most `rounding * magnitude()`. The
   magnitude is the scale of the error: for a sum, it adds the magnitudes of the terms, because
   their rounding errors remain when the terms cancel. The consumers in `operations.py` tolerate
   such a difference.
4. If a spec contains several norms, their errors add, but its `rounding` is that of the largest
   alone. `_NORM_ROUNDINGS` leaves a margin for this.
5. A product counts as inexact, because a library may choose another algorithm. A bound on its error
   by magnitudes would be too wide to detect a write. So if a product is inside a spec, the
   comparison at its first use is one of norms: that of the difference is at most `tolerance` times
   that of the tensor.

NOTE [Shared values]

Several consumers may read one recomputed value, for example the projections to queries, keys and
values. Backward often runs them one after another, and need not compute the value for each.

1. Each consumer has a turn: its ordinal among all visited nodes of the table, plus an offset of the
   forward pass. Turns grow with time, also from one forward pass to the next, and backward runs the
   consumers in the reverse order. Before torch 2.14 this holds only approximately, because the
   engine visits nodes late: fewer values are then shared.
2. When a spec is saved for a consumer, `add_consumer` tells the spec, and the specs whose values it
   reads. A spec keeps its value if the turn of the next consumer is at most `REACH` away: a value
   that is kept for long would add to the peak memory. The next consumer then does not read the
   specs inside (`move_consumer`).
3. A spec inside another reaches as far only if it takes at least two operations, because its value
   is alive while the consumer runs, in addition to the one that the consumer reads. One that takes
   a single operation reaches no consumer; inside a norm or a product it reaches the very next
   (`reach_of_cheap`).
4. A view keeps nothing, but the spec that it is a view of does.
5. A product has its own rule: 3 of NOTE [Narrow points] in `products.py`.
6. A value is kept for one consumer. It is dropped when that consumer has read it, when backward
   reaches a consumer with a smaller turn, or with the graph. No other backward pass uses it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .._torch_private import NO_PASS, running_pass
from ..memory import Packed, written_to_error
from .tensors import has_storage

REACH = 4  # turns: see 2 of NOTE [Shared values]
_MIN_COST_INSIDE = 2  # see 3 of NOTE [Shared values]


class ProductInside(Protocol):
    """What a product inside a spec tells: see `ProductCall` in `products.py`.

    Attributes:
        flops: The floating point operations.
        weights: The parameters and buffers that it reads, except by autocast's casts.
        lasts: Whether all of these are known to be there in backward.
    """

    flops: int
    weights: list[Any]
    lasts: bool

    def is_read_near(self, turn: int) -> bool:
        """Whether a consumer is near the others of the product."""


class Spec:
    """A recompute spec: computes a saved tensor from its leaves.

    Attributes:
        how: What is done instead of saving the tensor, for the report.
        cost: The passes over memory: see `costs.py`. Views cost nothing.
        rounding: The error of the value over `magnitude()`: see NOTE [Exact specs and roundings].
        leaf_bytes: The total size of the leaves that are not auxiliary. A leaf counts once for each
            use. The engine only compares the total with a multiple of the saved tensor's size, for
            which this estimate is close enough.
        auxiliary_bytes: The total size of the auxiliary leaves, such as a norm's affine.
        keeps_strides: Whether the value certainly has the strides that the tensor had in forward.
        products: The products that compute this spec.
        tolerance: The norm of the value's error over that of the value, if a product is inside; 0
            if none is: see NOTE [Exact specs and roundings].
    """

    __slots__ = (
        "__weakref__",
        "auxiliary_bytes",
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
    auxiliary_bytes: int
    keeps_strides: bool
    products: tuple[ProductInside, ...] = ()

    @property
    def how(self) -> str:
        return Packed.how

    def value(self, turn: int | None = None) -> Tensor:
        """Return the tensor.

        Call this through `Recomputed`, which disables grad mode, autocast and function modes.

        Args:
            turn: That of the consumer whose backward needs the value: see NOTE [Shared values].
                None if there is none.
        """
        raise NotImplementedError

    def add_consumer(self, turn: int, reach: int = REACH) -> None:
        """Record that a consumer saves this spec, or one that computes it.

        Args:
            turn: The consumer's turn.
            reach: How far away the next consumer may be, for this spec to keep its value.
        """

    def move_consumer(self, old: int, new: int) -> None:
        """Record that the consumer of turn `new` reads this spec, and `old` gets a kept value.

        Args:
            old: The turn of a consumer that was added.
            new: A turn after all that were added.
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

    def is_near(self, turn: int) -> bool:
        """Whether a consumer is near the others of all products inside.

        See 3 of NOTE [Narrow points] in `products.py`.
        """
        products = self.products  # usually none
        return not products or all(product.is_read_near(turn) for product in products)


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
            An `Affine` reads its tensors without such a check: only specs and values refer to them,
            and neither writes to them.
        is_auxiliary: Whether only specs and values refer to the tensor.
    """

    __slots__ = ("is_auxiliary", "tensor", "version")

    def __init__(self, tensor: Tensor, is_auxiliary: bool = False) -> None:
        self.tensor = tensor.detach()
        self.version = tensor._version
        self.is_auxiliary = is_auxiliary
        self.cost, self.rounding, self.tolerance, self.keeps_strides = 0.0, 0.0, 0.0, True
        size = tensor.nbytes
        self.leaf_bytes, self.auxiliary_bytes = (0, size) if is_auxiliary else (size, 0)

    def value(self, turn: int | None = None) -> Tensor:
        tensor = self.tensor
        if tensor._version != self.version:  # rule 5 of NOTE [Leaves] in `derive.py`
            raise written_to_error(tensor, self.version)
        if not has_storage(tensor):
            raise freed_error(tensor)
        return tensor

    def is_current(self) -> bool:
        return self.tensor._version == self.version

    def magnitude(self) -> Tensor:
        return largest_of(self.tensor)

    def leaves(self) -> Iterator[Leaf]:
        yield self


class _Kept(NamedTuple):
    """A value that a spec keeps.

    Attributes:
        value: The value.
        running_pass: The backward pass that has computed it.
        turn: That of the consumer that it is kept for.
    """

    value: Tensor
    running_pass: int
    turn: int


class Computed(Spec):
    """A spec that computes its tensor, and may keep it: see NOTE [Shared values].

    Attributes:
        reach_of_cheap: How far a spec inside reaches that takes one operation.
    """

    reach_of_cheap = 0

    __slots__ = ("_derived", "_following", "_kept", "_newest", "products")

    def __init__(self) -> None:
        self._kept: _Kept | None = None
        self._newest: int | None = None  # the turn of the last consumer that was added
        # By turn: that of the consumer that backward runs after it, if that is in reach.
        self._following: dict[int, int] = {}
        self._derived: dict[Hashable, weakref.ref[Computed]] = {}

    def derived(self, key: Hashable, make: Callable[[], Computed]) -> Computed:
        """Return the spec with this key that is computed from this one alone; make it if needed."""
        reference = self._derived.get(key)
        spec = reference() if reference is not None else None
        if spec is None:
            spec = make()
            self._derived[key] = weakref.ref(spec)
        return spec

    def value(self, turn: int | None = None) -> Tensor:
        kept, following = self._kept, None if turn is None else self._following.get(turn)
        if kept is None and following is None:  # the usual case
            return self.compute(turn)
        self._kept = None
        if kept is not None and kept.running_pass == running_pass():
            value = kept.value
        else:
            value = self.compute(turn)
        if following is not None and running_pass() != NO_PASS:
            self._kept = _Kept(value, running_pass(), following)
            keeping.specs.append(weakref.ref(self))
        return value

    def add_consumer(self, turn: int, reach: int = REACH) -> None:
        last, self._newest = self._newest, turn
        if last is not None and 0 < turn - last <= min(reach, REACH):
            self._following[turn] = last  # rule 2
            self._move_inside(last, turn)  # the last one then reads what this one has computed
        else:
            self._add_inside(turn, reach)

    def move_consumer(self, old: int, new: int) -> None:
        following, last = self._following.pop(old, None), self._newest
        before = following if last == old else last
        if before is not None and 0 < new - before <= REACH:
            self._following[new] = before
        if following is not None and self._following.get(new) != following:
            self._read_inside_again()  # no value is kept for it any more
        self._newest = new
        self._move_inside(old, new)

    def read_again(self) -> None:
        self._read_inside_again()

    def _read_inside_again(self) -> None:
        for spec in self.inner():
            if spec.tolerance:
                spec.read_again()

    def _reach_into(self, spec: Spec) -> int:
        """Return how far a spec inside reaches: see 3 of NOTE [Shared values]."""
        if spec.cost >= _MIN_COST_INSIDE or spec.tolerance:
            return REACH
        return self.reach_of_cheap if spec.cost else 0

    def _add_inside(self, turn: int, reach: int) -> None:
        for spec in self.inner():
            if inside := self._reach_into(spec):
                spec.add_consumer(turn, min(reach, inside))

    def _move_inside(self, old: int, new: int) -> None:
        for spec in self.inner():
            if self._reach_into(spec):
                spec.move_consumer(old, new)

    def drops(self, turn: int) -> bool:
        """Drop the kept value if backward has passed its consumer. Return whether none is kept."""
        kept = self._kept
        if kept is not None and (kept.running_pass != running_pass() or kept.turn > turn):  # rule 6
            self._kept = kept = None
        return kept is None

    def is_current(self) -> bool:
        return all(spec.is_current() for spec in self.inner())

    def added_cost(self) -> float:
        inside = (spec for spec in self.inner() if spec.tolerance)
        return self.cost - sum(spec.cost - spec.added_cost() for spec in inside)

    def compute(self, turn: int | None) -> Tensor:
        """Compute the tensor for `value`."""
        raise NotImplementedError

    def inner(self) -> Iterable[Spec]:
        """Return the specs whose values `compute` reads."""
        raise NotImplementedError


class Keeping(threading.local):
    """The specs that keep a value for a consumer of a backward pass in this thread."""

    def __init__(self) -> None:
        self.specs: list[weakref.ref[Computed]] = []

    def drop_passed(self, turn: int) -> None:
        """Drop the values that no consumer from this one on needs."""
        if self.specs:
            found = ((reference, reference()) for reference in self.specs)
            self.specs = [
                reference for reference, spec in found if spec is not None and not spec.drops(turn)
            ]


keeping = Keeping()


def largest_of(tensor: Tensor) -> Tensor:
    """Return the largest finite magnitude in a tensor, a scalar in float64."""
    if tensor.numel() == 0:
        return torch.zeros((), dtype=torch.double, device=tensor.device)
    magnitude = tensor.abs().nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    return magnitude.amax().double()
