"""Products that widen: convolutions and matrix products whose output is larger than their input.

NOTE [Narrow points]

A block of a network often widens what it gets, and makes it narrow again: a transformer's first
linear layer, a convolution that expands the channels. Autograd saves the wide tensors. The engine
saves what is narrow, and computes the wide tensors from it again.

1. A product has a spec only if its output has more bytes than its input. If products of equal width
   had one, the engine would also replace the narrow tensors, and each would be recomputed from the
   one before it.
2. What a product takes is counted in passes over its output: see `costs.py`.
3. A product runs at most once more in a backward pass, and costs nothing for later consumers. Its
   spec keeps the value from the first read to the last: several views of one value (queries, keys
   and values), the norm and the activation that read it. A consumer that is farther away than
   `_NEAR` from the others would keep the value for long, or compute it again. It saves its tensor
   as PyTorch does: a U-Net's skip.
4. A product inside a spec keeps its value while those after it run, for its other consumers. So a
   spec has a few products at most (`_MOST_PRODUCTS`): more would save more, and raise the peak.
5. A norm between two products is not run again, as its statistics are saved. So running statistics
   do not change, and nothing random is drawn.

NOTE [Weights are proved]

A product reads a weight and maybe a bias. A spec refers to them and neither copies them nor keeps
their memory alive: a parameter that gets other data, or whose storage is resized to 0, frees its
memory as in PyTorch. In return the spec must know that they are what forward has read.

1. The weight is an autograd leaf, to which an edge of the node leads, through views; or a frozen
   parameter or buffer of the model, whose memory the node saves; or autocast's cast of a leaf, if
   the node saves the cast. Another weight is computed (a weight norm's): there is no spec.
2. The bias is an autograd leaf, or a cast of one, which is copied. `_saved_bias_sym_sizes_opt`
   tells whether a convolution has one. A frozen bias has no edge, and is not saved: it is known
   only if the forward hook of its module has run right after the product. An unknown bias means no
   spec. A comparison of values proves nothing: a frozen bias of zeros may be loaded later.
3. Their versions when the product ran are compared when the spec is made and when it is computed.
4. A fused optimizer raises no version. A hook that PyTorch calls after each optimizer's step counts
   the steps of each storage in the optimizer's groups, and a spec compares the counts too. Other
   writes without a version, such as `weight.data.clamp_`, are not seen if they come between forward
   and backward: see 5 of NOTE [First use] in `engine.py`.
5. The storage and the layout are compared as well. They differ if `.data` was replaced, or the
   parameter moved or was cast.
6. Whoever owns a parameter may free its memory when forward has returned: FSDP2, ZeRO, an offload
   to the host. FSDP wraps after `convert`, so nothing tells beforehand. So in the first step that
   uses a parameter, the tensor that the spec replaces stays saved. If the parameter was the model's
   when `convert` ran, this ends when the model's forward has returned: by then an offload has freed
   the memory. Another parameter belongs to FSDP: it must be there when backward asks for the
   tensor. If the memory is gone, the tensor stays saved, and there is no spec from then on.
7. A product runs under the flags that it had in forward, such as TF32.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from .._torch_private import (
    NO_PASS,
    ProductFlags,
    call_after_pass,
    product_flags,
    running_pass,
    storage_id,
    under_product_flags,
)
from .nodes import has_storage, is_plain
from .specs import Call, Leaf, Spec, ViewCall, freed_error, keeping, written_to_error


class _Steps:
    """Counts the steps that optimizers have taken on one storage."""

    __slots__ = ("__weakref__", "count")

    def __init__(self) -> None:
        self.count = 0


# By the id of the storage, which a spec with a weak reference to the storage keeps unique.
_steps: weakref.WeakValueDictionary[int, _Steps] = weakref.WeakValueDictionary()


def _count_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Count a step of an optimizer's parameters: see 4 of NOTE [Weights are proved]."""
    if torch.compiler.is_compiling() or not _steps:  # compiled code raises the versions
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if is_plain(parameter):  # also an alias of a parameter, or all parameters in one tensor
                steps = _steps.get(storage_id(parameter.untyped_storage()))
                if steps is not None:
                    steps.count += 1


register_optimizer_step_post_hook(_count_step)


class _Layout(NamedTuple):
    """The memory layout of a parameter, and its dtype and device."""

    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def _layout_of(parameter: Tensor) -> _Layout:
    data = parameter.detach()
    offset = int(data.storage_offset())
    return _Layout(offset, data.shape, data.stride(), data.dtype, data.device)


class Weight(Spec):
    """A parameter or buffer that a product reads: see NOTE [Weights are proved].

    Attributes:
        parameter: The parameter.
        version: Its version when the product ran.
    """

    __slots__ = ("_count", "_layout", "_steps", "_storage", "parameter", "version")

    def __init__(self, parameter: Tensor, version: int) -> None:
        self.parameter, self.version = parameter, version
        self._layout = _layout_of(parameter)
        self._storage = StorageWeakRef(parameter.untyped_storage())
        steps = _steps.get(self._storage.cdata)
        if steps is None:
            steps = _steps[self._storage.cdata] = _Steps()
        self._steps, self._count = steps, steps.count
        self.cost = self.rounding = self.tolerance = 0.0
        self.leaf_bytes = self.copied_bytes = 0
        self.keeps_strides = True

    def value(self, consumer: int | None = None) -> Tensor:
        parameter = self.parameter
        if not has_storage(parameter):
            raise freed_error(parameter)
        if not self.is_current():
            raise written_to_error(parameter, self.version)
        return parameter.detach()

    def is_current(self) -> bool:
        parameter = self.parameter
        return (
            parameter._version == self.version
            and self._steps.count == self._count
            and storage_id(parameter.untyped_storage()) == self._storage.cdata
            and _layout_of(parameter) == self._layout
        )

    def leaves(self) -> Iterator[Leaf]:
        yield from ()

    @property
    def can_be_read(self) -> bool:
        """Whether the parameter has the memory and the values that the product has read."""
        return has_storage(self.parameter) and self.is_current()


class SavedCast(Leaf):
    """Autocast's cast of a weight, which the product's node saves anyway."""

    __slots__ = ()

    def __init__(self, cast: Tensor) -> None:
        super().__init__(cast)
        self.leaf_bytes = 0


def weight_inside(spec: Spec) -> Weight | None:
    """Return the weight of which a spec is a view; None if it is another tensor."""
    while isinstance(spec, ViewCall):
        (spec,) = spec.inputs
    return spec if isinstance(spec, Weight) else None


def weights_of(spec: Spec) -> list[Weight]:
    """Return the parameters and buffers that the products of a spec read."""
    return [weight for call in spec.products() for weight in call.weights]


def memory_place(tensor: Tensor) -> tuple[int, ...]:
    """Return where the elements of a tensor are, which a transpose does not change."""
    storage = storage_id(tensor.untyped_storage())
    return storage, int(tensor.storage_offset()), tensor.numel()


# PyTorch's modules of one product, and what determines which weight and bias the product reads.
MODULES = (
    nn.Linear,
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
_DECIDING = ("forward", "_conv_forward", "_output_padding", "__getattr__", "__getattribute__")


def _methods_of(cls: type) -> tuple[Any, ...]:
    return tuple([getattr(cls, name, None) for name in _DECIDING])


def _functions() -> tuple[Any, ...]:
    of_convolutions = F.conv1d, F.conv2d, F.conv3d
    return (
        F.linear,
        *of_convolutions,
        F.conv_transpose1d,
        F.conv_transpose2d,
        F.conv_transpose3d,
    )


_METHODS, _FUNCTIONS = {cls: _methods_of(cls) for cls in MODULES}, _functions()


def runs_pytorchs_forward(module: nn.Module) -> bool:
    """Whether a module of one product runs PyTorch's forward on its registered parameters."""
    cls = type(module)
    return (
        cls in _METHODS
        and _methods_of(cls) == _METHODS[cls]
        and _functions() == _FUNCTIONS
        and not {"weight", "bias", *_DECIDING} & vars(module).keys()
    )


# A consumer is near if its number is at most so much larger than that of the one before it: see 3
# of NOTE [Narrow points].
_NEAR = 24

# The norm of the error of a product over that of its value, in units of eps times the root of the
# number of terms in an element.
_PRODUCT_ROUNDINGS = 16
_LARGEST_TOLERANCE = 4e-3  # a factor of 1.01 is never within it


class _Kept(NamedTuple):
    """A product's value that is kept in a backward pass.

    Attributes:
        value: The value.
        running_pass: The backward pass that has computed it.
        reads_left: How often it will still be read, if all consumers run.
    """

    value: Tensor
    running_pass: int
    reads_left: int


class Product(NamedTuple):
    """A product, for its spec.

    Attributes:
        cost: The passes over its output.
        narrowing: The size of its input over that of its output.
        flops: The floating point operations.
        terms: The number of terms in an element of the output.
        flags: The flags of the device's products in forward.
        weights: The parameters and buffers that it reads, except by autocast's casts.
        dtype: The dtype of its output.
    """

    cost: float
    narrowing: float
    flops: int
    terms: int
    flags: ProductFlags
    weights: Sequence[Weight]
    dtype: torch.dtype


class ProductCall(Call):
    """A product, which runs at most once in a backward pass: see 3 of NOTE [Narrow points].

    Attributes:
        flags: The flags of the device's products in forward.
        flops: The floating point operations.
        weights: The parameters and buffers that it reads, except by autocast's casts.
    """

    keeps_cheap = True

    __slots__ = (*("_kept_value", "_last", "_reads", "flags", "flops", "narrowing", "weights"),)

    def __init__(
        self,
        function: Callable[..., Tensor],
        inputs: Sequence[Spec | None],
        arguments: Sequence[Any],
        product: Product,
    ) -> None:
        given = [spec for spec in inputs if spec is not None]
        if len(given) < len(inputs):
            arguments = [None, *arguments]
        super().__init__(function, given, arguments, dtype=product.dtype)
        # The inputs are smaller, so a pass over them costs less.
        self.cost = product.cost + product.narrowing * sum(spec.cost for spec in given)
        eps = torch.finfo(product.dtype).eps
        own = min(_PRODUCT_ROUNDINGS * math.sqrt(product.terms) * eps, _LARGEST_TOLERANCE)
        self.tolerance = max(own, self.tolerance)
        self.rounding = max(eps, self.rounding)
        self.flags, self.flops, self.weights = product.flags, product.flops, product.weights
        self.narrowing = product.narrowing
        self._kept_value: _Kept | None = None
        self._last = self._reads = 0

    def is_near(self, consumer: int) -> bool:
        """Whether a new consumer is near those that were added."""
        return not self._reads or consumer - self._last <= _NEAR

    def products(self) -> Iterator[ProductCall]:
        yield self
        yield from super().products()

    def added_cost(self) -> float:
        if self._reads:
            return 0.0
        inside = sum(spec.cost - spec.added_cost() for spec in self.inner())
        return self.cost - self.narrowing * inside

    def value(self, consumer: int | None = None) -> Tensor:
        this_pass = running_pass()
        if this_pass == NO_PASS:
            return self.compute(consumer)
        kept = self._kept_value
        if kept is None or kept.running_pass != this_pass:
            kept = _Kept(self.compute(consumer), this_pass, self._reads)
            if kept.reads_left > 1:
                keeping.specs.append(weakref.ref(self))  # in case an error ends the pass
                call_after_pass(partial(_drop, weakref.ref(self), this_pass))
        left = kept.reads_left - 1
        self._kept_value = _Kept(kept.value, this_pass, left) if left > 0 else None
        return kept.value

    def compute(self, consumer: int | None) -> Tensor:
        inputs = [spec.value(consumer) for spec in self.inputs]
        device_type = inputs[0].device.type
        if product_flags(device_type) == self.flags:
            return self.of(*inputs)
        with under_product_flags(device_type, self.flags):
            return self.of(*inputs)

    def magnitude(self) -> Tensor:
        return Leaf(self.value()).magnitude()

    def add_consumer(self, consumer: int, distance: int | None = None) -> None:
        self._reads += 1
        if self._reads == 1:
            self._last = consumer
            self._add_inside(consumer, distance)
        else:
            self._read_last_by(consumer)

    def move_consumer(self, old: int, new: int) -> None:
        self._read_last_by(new)

    def read_again(self) -> None:
        self._reads += 1

    def drops(self, consumer: int) -> bool:
        kept = self._kept_value
        if kept is not None and kept.running_pass != running_pass():
            self._kept_value = kept = None
        return kept is None

    def _read_last_by(self, consumer: int) -> None:
        """Let the inputs be read by the consumer that backward reaches first."""
        if consumer > self._last:
            last, self._last = self._last, consumer
            self._move_inside(last, consumer)


def _drop(product: weakref.ref[ProductCall], this_pass: int) -> None:
    """Drop a value that was kept in a pass, which has ended."""
    spec = product()
    if spec is not None:
        kept = spec._kept_value
        if kept is not None and kept.running_pass == this_pass:
            spec._kept_value = None
