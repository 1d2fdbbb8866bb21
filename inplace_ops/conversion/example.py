"""Running a model on an example and leaving it as it was."""

from __future__ import annotations

import copy
import inspect
import random
import sys
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .._torch_private import elements_share_memory, tree_leaves, tree_map

Inputs = Tensor | tuple[Any, ...] | Mapping[str, Any]


class Example:
    """The arguments of one call of a model."""

    def __init__(self, inputs: Inputs) -> None:
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        if isinstance(inputs, Tensor):
            self.args = (inputs,)
        elif type(inputs) is tuple:  # a named one, as PackedSequence, is an argument
            self.args = inputs
        elif isinstance(inputs, Mapping):
            self.kwargs = dict(inputs)
        else:
            raise TypeError(
                "example_inputs must be a tensor, a tuple of arguments or a dict of keyword "
                f"arguments, got {type(inputs).__name__}"
            )

    def explain(self, error: TypeError, model: nn.Module) -> None:
        """Raise a better error where a dict was meant as the model's one argument."""
        signature = inspect.signature(model.forward)
        try:
            signature.bind(*self.args, **self.kwargs)
        except TypeError:
            if self.kwargs and not self.args:
                raise TypeError(
                    "example_inputs: the dict's entries are passed as keyword arguments, and the "
                    f"model's forward{signature} does not take these ({error}): for a model whose "
                    "one argument is a dict pass a tuple, (batch,)"
                ) from error

    def tensors(self) -> list[Tensor]:
        """Return all tensors among the arguments."""
        return [t for t in tree_leaves((self.args, self.kwargs)) if isinstance(t, Tensor)]

    def copy(self) -> Example:
        """Return the same arguments in memory of their own, as the model may write to them."""
        copies: dict[Tensor, Tensor] = {}

        def clone(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if value not in copies:
                copies[value] = value.detach().clone().requires_grad_(value.requires_grad)
            return copies[value]

        example = Example(())
        example.args, example.kwargs = tree_map(clone, (self.args, self.kwargs))
        return example

    def call(self, model: nn.Module) -> Any:
        """Call the model with the arguments."""
        try:
            return model(*self.args, **self.kwargs)
        except TypeError as error:
            self.explain(error, model)
            raise


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Return the tensors in containers, nested ones too, and in objects' attributes."""
    seen: set[int] = set()
    pending = [value]
    while pending:
        for leaf in tree_leaves(pending.pop(0)):
            if isinstance(leaf, Tensor):
                yield leaf
            elif id(leaf) not in seen and not (callable(leaf) or isinstance(leaf, ModuleType)):
                seen.add(id(leaf))
                pending.extend(getattr(leaf, "__dict__", {}).values())
                names = (getattr(cls, "__slots__", ()) for cls in type(leaf).__mro__)
                pending.extend(getattr(leaf, name, None) for name in chain.from_iterable(names))


@contextmanager
def preserved(model: nn.Module, example: Example) -> Iterator[None]:
    """Put everything back at the end that a run may change, but for the values of parameters.

    These are the attributes of modules, parameters and buffers, also those in lists, dicts and the
    like; the values of buffers and other tensors; generators; gradients and `requires_grad`; the
    random state of PyTorch, NumPy and Python.
    """
    modules = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
    owners = [*modules, *model.parameters(), *model.buffers()]
    attributes = [vars(owner) for owner in owners if hasattr(owner, "__dict__")]
    restores = list(_restores([*attributes, *model.buffers()], set()))
    gradients = [(p, p.grad, p.requires_grad) for p in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None  # a backward inside forward would add to it
    devices = {t.device for t in (*model.parameters(), *example.tensors())}
    python_state = random.getstate()
    numpy_random = getattr(sys.modules.get("numpy"), "random", None)
    numpy_state = numpy_random.get_state() if numpy_random else None
    with torch.random.fork_rng([device for device in devices if device.type == "cuda"]):
        try:
            yield
        finally:
            for restore in restores:
                restore()
            for parameter, gradient, requires_grad in gradients:
                parameter.grad = gradient
                parameter.requires_grad = requires_grad
            random.setstate(python_state)
            if numpy_random:
                numpy_random.set_state(numpy_state)
            torch.clear_autocast_cache()  # casts that belong to the run's graph


@contextmanager
def warning_of_written_parameters(model: nn.Module) -> Iterator[None]:
    """Warn at the end if forward wrote to a parameter, which is not put back."""
    versions = {name: parameter._version for name, parameter in model.named_parameters()}
    yield
    written = [
        f"`{name}`"
        for name, parameter in model.named_parameters()
        if versions.get(name, parameter._version) != parameter._version
    ]
    if written:
        warnings.warn(
            f"the model's forward writes to its parameters {', '.join(written)}: the example has "
            "changed them",
            stacklevel=2,
        )


_CONTAINERS = (list, dict, OrderedDict, defaultdict, Counter, set, deque)


def _restores(values: Iterable[Any], seen: set[int]) -> Iterator[Callable[[], Any]]:
    """Return functions that put containers, tensors and generators back, nested ones too."""
    for value in values:
        if id(value) in seen:
            continue
        seen.add(id(value))
        if type(value) in _CONTAINERS:
            yield partial(_restore_container, value, copy.copy(value))
            yield from _restores(value.values() if isinstance(value, dict) else value, seen)
        elif isinstance(value, torch.Generator):
            yield partial(value.set_state, value.get_state())
        elif isinstance(value, Tensor) and _may_be_written_to(value):
            yield partial(_restore_tensor, value, value.detach().clone())


def _restore_container(container: Any, before: Any) -> None:
    container.clear()
    if isinstance(container, (dict, set)):
        container.update(before)
    else:
        container.extend(before)


def _restore_tensor(tensor: Tensor, before: Tensor) -> None:
    with torch.no_grad():
        if not torch.equal(tensor, before):
            tensor.resize_(before.shape).copy_(before)  # an observer resizes its own


def _may_be_written_to(tensor: Tensor) -> bool:
    """Whether it is no parameter, strided, has values, and is not expanded from fewer."""
    if isinstance(tensor, nn.Parameter):
        return False
    is_plain = tensor.layout == torch.strided and not tensor.is_meta
    return is_plain and not is_lazy(tensor) and not elements_share_memory(tensor)
