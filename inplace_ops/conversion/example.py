"""Run a model on an example, and restore the model's state."""

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
    """The arguments of one call of a model.

    Raises:
        TypeError: If `inputs` is not a tensor, a tuple or a mapping.
    """

    def __init__(self, inputs: Inputs) -> None:
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        if isinstance(inputs, Tensor):
            self.args = (inputs,)
        elif type(inputs) is tuple:  # a named tuple, such as PackedSequence, is one argument
            self.args = inputs
        elif isinstance(inputs, Mapping):
            self.kwargs = dict(inputs)
        else:
            raise TypeError(
                "example_inputs must be a tensor, a tuple of arguments or a dict of keyword "
                f"arguments, got {type(inputs).__name__}"
            )

    def explain(self, error: TypeError, model: nn.Module) -> None:
        """Raise a clearer error if the dict was meant to be the model's only argument."""
        signature = inspect.signature(model.forward)
        try:
            signature.bind(*self.args, **self.kwargs)
        except TypeError:
            if self.kwargs and not self.args:
                raise TypeError(
                    "example_inputs: the entries of a dict are passed as keyword arguments, which "
                    f"the model's forward{signature} does not take ({error}): if the model's only "
                    "argument is a dict, pass a tuple, (batch,)"
                ) from error

    def tensors(self) -> list[Tensor]:
        """Return all tensors among the arguments."""
        return [t for t in tree_leaves((self.args, self.kwargs)) if isinstance(t, Tensor)]

    def copy(self) -> Example:
        """Return a copy with cloned tensors, as the model may write to its arguments."""
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
    """Yield the tensors in nested containers and in the attributes of objects."""
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
    """Restore at exit everything that a run may change, except the values of parameters.

    - The attributes of modules, parameters and buffers, including lists, dicts and other containers
      in them.
    - The values of buffers and of other tensors in attributes, and the states of generators.
    - The gradients of parameters, and their `requires_grad`.
    - The random states of PyTorch, NumPy and Python.
    """
    modules = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
    owners = [*modules, *model.parameters(), *model.buffers()]
    attributes = [vars(owner) for owner in owners if hasattr(owner, "__dict__")]
    restore_functions = list(_restore_functions([*attributes, *model.buffers()], set()))
    gradients = [(p, p.grad, p.requires_grad) for p in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None  # a backward pass inside forward would accumulate into it
    devices = {t.device for t in (*model.parameters(), *example.tensors())}
    python_state = random.getstate()
    numpy_random = getattr(sys.modules.get("numpy"), "random", None)
    numpy_state = numpy_random.get_state() if numpy_random else None
    with torch.random.fork_rng([device for device in devices if device.type == "cuda"]):
        try:
            yield
        finally:
            for restore in restore_functions:
                restore()
            for parameter, gradient, requires_grad in gradients:
                parameter.grad = gradient
                parameter.requires_grad = requires_grad
            random.setstate(python_state)
            if numpy_random:
                numpy_random.set_state(numpy_state)
            torch.clear_autocast_cache()  # its casts belong to the graph of the run


@contextmanager
def warn_of_written_parameters(model: nn.Module) -> Iterator[None]:
    """Warn at exit if forward wrote to a parameter, as its value is not restored."""
    versions = {name: parameter._version for name, parameter in model.named_parameters()}
    yield
    written = [
        f"`{name}`"
        for name, parameter in model.named_parameters()
        if versions.get(name, parameter._version) != parameter._version
    ]
    if written:
        warnings.warn(
            f"the model's forward writes to its parameters {', '.join(written)}: running the "
            "example has changed them",
            stacklevel=2,
        )


_CONTAINERS = (list, dict, OrderedDict, defaultdict, Counter, set, deque)


def _restore_functions(values: Iterable[Any], seen: set[int]) -> Iterator[Callable[[], Any]]:
    """Yield functions that restore containers, tensors and generators, also inside containers."""
    for value in values:
        if id(value) in seen:
            continue
        seen.add(id(value))
        if type(value) in _CONTAINERS:
            yield partial(_restore_container, value, copy.copy(value))
            yield from _restore_functions(
                value.values() if isinstance(value, dict) else value, seen
            )
        elif isinstance(value, torch.Generator):
            yield partial(value.set_state, value.get_state())
        elif isinstance(value, Tensor) and _is_writable(value):
            yield partial(_restore_tensor, value, value.detach().clone())


def _restore_container(container: Any, copied: Any) -> None:
    container.clear()
    if isinstance(container, (dict, set)):
        container.update(copied)
    else:
        container.extend(copied)


def _restore_tensor(tensor: Tensor, copied: Tensor) -> None:
    with torch.no_grad():
        if not torch.equal(tensor, copied):
            # Observers of torch.ao.quantization resize their buffers.
            tensor.resize_(copied.shape).copy_(copied)


def _is_writable(tensor: Tensor) -> bool:
    """Whether forward may write to the tensor.

    It may if the tensor is strided, has values, and is neither a parameter nor expanded.
    """
    if isinstance(tensor, nn.Parameter):
        return False
    is_plain = tensor.layout == torch.strided and not tensor.is_meta
    return is_plain and not is_lazy(tensor) and not elements_share_memory(tensor)
