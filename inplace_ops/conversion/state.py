"""Everything that a run of a model on an example may change, and how it is restored."""

from __future__ import annotations

import copy
import random
import sys
import threading
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .._torch_private import (
    NO_PASS,
    DisableTorchFunction,
    accumulation_hooks,
    coo_tensors,
    gradient_hooks,
    is_traceable_wrapper_subclass,
    running_pass,
    storage_id,
)

_CONTAINERS = (list, dict, OrderedDict, defaultdict, Counter, set, deque)
_CHUNK = 64 * 2**20  # bytes that are compared at one time

Restore = Callable[[], Any]


class State:
    """The state of a model, from which each run on an example starts, and which it leaves behind.

    - The attributes of modules, parameters and buffers, including lists, dicts and other containers
      in them, and gradient hooks.
    - Parameters, buffers, gradients and other tensors in attributes: their values, and the memory,
      shape and strides that they have.
    - Optimizers that are stepped during a run, as some are in gradient hooks, with the parameters
      in their groups.
    - The states of generators, and the random states of PyTorch, NumPy and Python.

    Tensors are copied once, to the host. A context manager: at its exit it warns of tensors that
    were changed and could not be restored.
    """

    def __init__(self, model: nn.Module, devices: Iterable[torch.device]) -> None:
        self._model = model
        self._tensors = _Tensors()
        names = [*model.named_parameters(), *model.named_buffers()]
        for name, tensor in names:
            self._tensors.add(tensor, f"`{name}`")
        devices = {*devices, *(tensor.device for _, tensor in names)}
        self._gpus = [device for device in devices if device.type == "cuda"]

    def __enter__(self) -> State:
        return self

    def __exit__(self, *error: object) -> None:
        if self._tensors.lost:
            warnings.warn(
                f"running the example has changed {', '.join(self._tensors.lost)}, which cannot be "
                "restored",
                stacklevel=4,
            )

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Restore the state at the end of a `with` block."""
        model, tensors = self._model, self._tensors
        modules = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
        owners = [*modules, *model.parameters(), *model.buffers()]
        attributes = [vars(owner) for owner in owners if hasattr(owner, "__dict__")]
        restores = [*_restores(attributes, tensors, "a tensor in an attribute")]
        for parameter in model.parameters():
            restores += [*_hook_restores(parameter)]
            parameter.grad = None  # a backward pass inside forward would accumulate into it
        python_state = random.getstate()
        numpy_random = getattr(sys.modules.get("numpy"), "random", None)
        numpy_state = numpy_random.get_state() if numpy_random else None
        with torch.random.fork_rng(self._gpus), self._preserved_optimizers():
            try:
                yield
            finally:
                for restore in restores:
                    restore()
                tensors.restore()
                random.setstate(python_state)
                if numpy_random:
                    numpy_random.set_state(numpy_state)
                torch.clear_autocast_cache()  # its casts belong to the graph of the run

    @contextmanager
    def _preserved_optimizers(self) -> Iterator[None]:
        """Restore, at the end of a `with` block, the optimizers that are stepped within it."""
        measuring, own = threading.get_ident(), {*self._model.parameters()}
        restores: dict[Optimizer, list[Restore]] = {}

        def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            # A GPU's backward runs in a thread of its own. Other threads may train other models.
            is_of_run = threading.get_ident() == measuring or (
                running_pass() != NO_PASS and not own.isdisjoint(parameters)
            )
            if is_of_run and optimizer not in restores:
                name = f"a tensor of an optimizer ({type(optimizer).__name__})"
                for parameter in parameters:
                    self._tensors.add(parameter, name)
                attributes = [vars(optimizer)]
                restores[optimizer] = [
                    *_restores(attributes, self._tensors, name, into_objects=True)
                ]

        handle = register_optimizer_step_pre_hook(before_step)
        try:
            yield
        finally:
            handle.remove()
            for each in restores.values():
                for restore in each:
                    restore()


def contained(
    values: Iterable[Any], into_objects: bool = False, seen: set[int] | None = None
) -> Iterator[Any]:
    """Yield the containers, generators and tensors among values, also inside containers.

    Args:
        values: The containers, generators and other objects.
        into_objects: Whether to look into the attributes of other objects too.
        seen: The ids of the objects that have been looked at.
    """
    seen = set() if seen is None else seen
    for value in values:
        if id(value) in seen:
            continue
        seen.add(id(value))
        if type(value) in _CONTAINERS or isinstance(value, (tuple, frozenset)):
            yield value
            inner = value.values() if isinstance(value, dict) else value
            yield from contained(inner, into_objects, seen)
        elif isinstance(value, (torch.Generator, Tensor)):
            yield value
        elif into_objects and hasattr(value, "__dict__") and not callable(value):
            yield from contained([vars(value)], into_objects, seen)


def _restores(
    values: Iterable[Any], tensors: _Tensors, name: str, into_objects: bool = False
) -> Iterator[Restore]:
    """Yield functions that restore containers and generators. Add tensors to `tensors`.

    Args:
        values: See `contained`.
        tensors: Gets the tensors.
        name: What to call these tensors in a warning.
        into_objects: See `contained`.
    """
    for value in contained(values, into_objects):
        if isinstance(value, Tensor):
            tensors.add(value, name)
        elif isinstance(value, torch.Generator):
            yield partial(value.set_state, value.get_state())
        elif type(value) in _CONTAINERS:
            yield partial(_restore_container, value, copy.copy(value))


def _restore_container(container: Any, copied: Any) -> None:
    container.clear()
    if isinstance(container, (dict, set)):
        container.update(copied)
    else:
        container.extend(copied)


def _hook_restores(parameter: Tensor) -> Iterator[Restore]:
    """Yield functions that restore a parameter's hooks, as forward may register one."""
    for hooks_of in (gradient_hooks, accumulation_hooks):
        hooks = hooks_of(parameter)
        yield partial(_restore_hooks, parameter, hooks_of, {} if hooks is None else {**hooks})


def _restore_hooks(parameter: Tensor, hooks_of: Callable[[Tensor], Any], copied: Any) -> None:
    hooks = hooks_of(parameter)
    if hooks is not None:
        _restore_container(hooks, copied)


class _Plain(NamedTuple):
    """What tells a plain tensor's place in memory."""

    storage: int
    offset: Any
    shape: torch.Size
    stride: tuple[Any, ...]
    dtype: torch.dtype


class _TensorState(NamedTuple):
    """A tensor as it was.

    Attributes:
        tensor: The tensor.
        name: What to call it in a warning.
        alias: A tensor with the same memory, shape and strides; None if it cannot be restored.
        places: The place of each plain tensor that it consists of.
        requires_grad: Whether it required a gradient.
        grad: Its gradient, if it is an autograd leaf.
        version: Its version.
    """

    tensor: Tensor
    name: str
    alias: Tensor | None
    places: list[_Plain]
    requires_grad: bool
    grad: Tensor | None
    version: int


class _StorageState(NamedTuple):
    """A storage, and a copy of its bytes."""

    storage: torch.UntypedStorage
    copied: Tensor
    name: str


class _Tensors:
    """Tensors, and a copy of the memory of each, made when it is added.

    Storages are copied and compared as bytes, whatever the dtype and however tensors overlap. Only
    what differs is written, through a tensor of its own: no version is raised.

    Attributes:
        lost: The names of tensors that were changed and could not be restored.
    """

    def __init__(self) -> None:
        self.lost: list[str] = []
        self._tensors: dict[int, _TensorState] = {}  # by id, which a reference keeps unique
        self._storages: dict[int, _StorageState] = {}
        self._parts: list[tuple[Tensor, str, Any]] = []  # of wrapper subclasses, such as DTensor

    def add(self, tensor: Tensor, name: str) -> None:
        """Copy a tensor, unless it was added before."""
        if id(tensor) in self._tensors or is_lazy(tensor):
            return
        alias, places, version = None, [], 0 if tensor.is_inference() else tensor._version
        with DisableTorchFunction(), torch.no_grad():
            if is_traceable_wrapper_subclass(tensor):
                for attribute in tensor.__tensor_flatten__()[0]:
                    part = getattr(tensor, attribute)
                    self._parts.append((tensor, attribute, part))
                    self.add(part, name)
            elif (plain := _plain_parts(tensor)) is not None:
                alias, places = tensor.data, _places(tensor)
                for part in plain:
                    self._add_storage(part, name)
        grad = tensor.grad if tensor.is_leaf else None
        self._tensors[id(tensor)] = _TensorState(
            tensor, name, alias, places, tensor.requires_grad, grad, version
        )
        if grad is not None:
            self.add(grad, "a gradient")

    def _add_storage(self, tensor: Tensor, name: str) -> None:
        storage = tensor.untyped_storage()
        # A fake tensor's memory is meta too.
        if storage.device.type != "meta" and storage_id(storage) not in self._storages:
            copied = _bytes_of(storage).to("cpu", copy=True)
            self._storages[storage_id(storage)] = _StorageState(storage, copied, name)

    def restore(self) -> None:
        """Restore all tensors that have changed."""
        with DisableTorchFunction(), torch.no_grad():
            for tensor, attribute, part in self._parts:
                if getattr(tensor, attribute) is not part:
                    setattr(tensor, attribute, part)
            for state in self._tensors.values():
                self._contained(_restore_tensor, state)
            for storage in self._storages.values():
                self._contained(_restore_storage, storage)

    def _contained(self, restore: Callable[[Any], bool], state: Any) -> None:
        """Restore, and remember the names of what could not be restored."""
        try:
            is_restored = restore(state)
        except RuntimeError:
            is_restored = False
        if not is_restored and state.name not in self.lost:
            self.lost.append(state.name)


def _plain_parts(tensor: Tensor) -> list[Tensor] | None:
    """Return the strided tensors that a tensor's memory consists of; None if they are not known."""
    if tensor.layout is torch.sparse_coo:
        return [*coo_tensors(tensor)]
    return [tensor] if tensor.layout is torch.strided and not tensor.is_nested else None


def _places(tensor: Tensor) -> list[_Plain]:
    return [
        _Plain(
            storage_id(part.untyped_storage()),
            part.storage_offset(),
            part.shape,
            part.stride(),
            part.dtype,
        )
        for part in _plain_parts(tensor) or ()
    ]


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """Return the whole storage as a tensor of bytes, with a version of its own."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _restore_tensor(state: _TensorState) -> bool:
    """Restore a tensor's place in memory. Return whether that is possible."""
    tensor = state.tensor
    if state.alias is not None:
        if _places(tensor) != state.places:
            tensor.data = state.alias.data
    elif not tensor.is_inference() and tensor._version != state.version:
        return is_traceable_wrapper_subclass(tensor)  # its parts are restored
    if tensor.requires_grad != state.requires_grad:
        tensor.requires_grad_(state.requires_grad)
    if tensor.is_leaf and tensor.grad is not state.grad:
        tensor.grad = state.grad
    return True


def _restore_storage(state: _StorageState) -> bool:
    """Restore a storage's bytes, where they differ."""
    storage, copied = state.storage, state.copied
    if storage.nbytes() != copied.numel():
        storage.resize_(copied.numel())
    current = _bytes_of(storage)
    for start in range(0, copied.numel(), _CHUNK):
        old, new = current[start : start + _CHUNK], copied[start : start + _CHUNK]
        if not torch.equal(old.cpu(), new):
            old.copy_(new)
    return True
