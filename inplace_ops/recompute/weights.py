"""The weights and biases that products read, and whether they are still there in backward.

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
   and backward: see 5 of NOTE [First use] in `verify.py`.
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

import itertools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from .._ops import layout_of
from .._torch_private import ProductFlags, storage_id
from ..memory import written_to_error
from .calls import ViewCall
from .specs import Leaf, Spec, freed_error
from .tensors import has_storage, is_plain

_MAX_KNOWN = 2**16  # parameters


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


def _layout_of(parameter: Tensor) -> object:
    """Return what tells whether a parameter has the same layout; None if its memory is gone."""
    if type(parameter) is nn.Parameter:  # fast
        layout = layout_of(parameter)
        if layout is not None:
            return layout
    if not has_storage(parameter):
        return None
    # Through an alias, as a subclass of Parameter sees what is asked of it.
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
        self.leaf_bytes = self.auxiliary_bytes = 0
        self.keeps_strides = True

    def value(self, turn: int | None = None) -> Tensor:
        parameter = self.parameter
        if not has_storage(parameter):
            raise freed_error(parameter)
        if not self.is_current():
            raise written_to_error(parameter, self.version)
        return parameter.detach()

    def is_current(self) -> bool:
        parameter = self.parameter
        return (
            parameter._version == self.version  # rule 3
            and self._steps.count == self._count  # rule 4
            and storage_id(parameter.untyped_storage()) == self._storage.cdata  # rule 5
            and (layout := _layout_of(parameter)) is not None  # rule 6
            and layout == self._layout
        )

    def leaves(self) -> Iterator[Leaf]:
        yield from ()


class SavedCast(Leaf):
    """Autocast's cast of a weight, which the product's node saves anyway."""

    __slots__ = ()

    def __init__(self, cast: Tensor) -> None:
        super().__init__(cast)
        self.leaf_bytes = 0


def weights_among(factors: Iterable[Spec]) -> list[Weight]:
    """Return the weights that factors are, or are views of: not autocast's casts."""
    weights = []
    for spec in factors:
        while isinstance(spec, ViewCall):
            (spec,) = spec.inputs
        if isinstance(spec, Weight):
            weights.append(spec)
    return weights


def weights_of(spec: Spec) -> list[Weight]:
    """Return the parameters and buffers that the products of a spec read."""
    return [weight for call in spec.products for weight in call.weights]


class ProductFacts(NamedTuple):
    """What a product has read, from its visit until the model's forward has returned.

    Attributes:
        weight: Which operand is the weight.
        weight_shape: The shape of that operand.
        input_shape: The shape of the other operand.
        factors: The specs of the weight, and of the bias if there is one; None for one that is
            unknown. A frozen bias is, until the hook of its module adds it.
        flags: The flags of the device's products.
    """

    weight: int
    weight_shape: torch.Size
    input_shape: torch.Size
    factors: tuple[Spec | None, ...]
    flags: ProductFlags


class _Lasting(NamedTuple):
    """Whether a parameter can be read in backward: rule 6 of NOTE [Weights are proved].

    Attributes:
        storage: Its storage. With a weak reference to it `torch.utils.swap_tensors` would fail.
        lasts: Whether it had its memory when that was looked at; None until then.
    """

    storage: StorageWeakRef
    lasts: bool | None

    @classmethod
    def of(cls, parameter: Tensor, lasts: bool | None) -> _Lasting:
        """Return what is known of a parameter."""
        return cls(StorageWeakRef(parameter.untyped_storage()), lasts)


class KnownWeights:
    """Which parameters can be read in backward: rule 6 of NOTE [Weights are proved].

    All forward passes of a model share this.
    """

    def __init__(self) -> None:
        self._lasting: dict[int, _Lasting] = {}

    def add(self, parameters: Iterable[Tensor]) -> None:
        """Remember that parameters are the model's when `convert` runs."""
        for parameter in filter(is_plain, parameters):
            if self._of(parameter) is None:
                self._lasting[id(parameter)] = _Lasting.of(parameter, None)

    def _of(self, parameter: Tensor) -> _Lasting | None:
        known = self._lasting.get(id(parameter))
        storage = storage_id(parameter.untyped_storage())
        return known if known is not None and known.storage.cdata == storage else None

    def are_models(self, weights: Iterable[Weight]) -> bool:
        """Whether all weights are parameters that are known."""
        return all(self._of(weight.parameter) is not None for weight in weights)

    def all_last(self, weights: Iterable[Weight]) -> bool:
        """Whether all weights are known to be there in backward."""
        known = [self._of(weight.parameter) for weight in weights]
        return all(each is not None and each.lasts for each in known)

    def is_freed(self, weights: Iterable[Weight]) -> bool:
        """Whether one of the weights is known not to be there in backward."""
        known = [self._of(weight.parameter) for weight in weights]
        return any(each is not None and each.lasts is False for each in known)

    def learn(self, weights: Sequence[Weight]) -> bool:
        """Look whether weights can be read, if that is not known. Return whether all can."""
        return all([*map(self._learn, weights)])  # look at all of them

    def _learn(self, weight: Weight) -> bool:
        parameter = weight.parameter
        known = self._of(parameter)
        if known is None or known.lasts is None:
            if len(self._lasting) >= _MAX_KNOWN:
                self._lasting.clear()
            known = _Lasting.of(parameter, weight.is_current())
            self._lasting[id(parameter)] = known
        return bool(known.lasts)


class ModelTensors:
    """A model's parameters and buffers, by the place of their memory."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._tensors: dict[tuple[int, ...], Tensor] | None = None

    def at(self, tensor: Tensor) -> Tensor | None:
        """Return the parameter or buffer of which a tensor is an alias or a transpose."""
        if self._tensors is None:
            tensors = itertools.chain(self._model.parameters(), self._model.buffers())
            self._tensors = {
                _memory_place(t): t
                for t in tensors
                if not t.is_inference() and is_plain(t) and has_storage(t)
            }
        place = _memory_place(tensor)
        found = self._tensors.get(place)
        if found is None or found.dtype is not tensor.dtype:
            return None
        return found if _memory_place(found) == place else None  # it may have got other memory


def _memory_place(tensor: Tensor) -> tuple[int, ...]:
    """Return where the elements of a tensor are, which a transpose does not change."""
    storage = storage_id(tensor.untyped_storage())
    return storage, int(tensor.storage_offset()), tensor.numel()
