"""Running a model on an example and leaving it as it was."""

from __future__ import annotations

import inspect
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from .._torch import running_node, tree_map
from .tensors import may_be_written_to, tensors_in


class Example:
    """The arguments of one call of a model."""

    def __init__(self, inputs: Tensor | tuple[Any, ...] | Mapping[str, Any]) -> None:
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
        """All tensors among the arguments, see `tensors_in`."""
        return list(tensors_in((self.args, self.kwargs)))

    def copy(self) -> Example:
        """The same arguments in memory of their own, as the model may write to them."""
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
        return model(*self.args, **self.kwargs)


@contextmanager
def preserved(model: nn.Module, example: Example) -> Iterator[None]:
    """Put back what modules hold, buffers, gradients and the random state at the end."""
    # The modules' attributes, and the entries of what holds parameters, submodules, hooks, ...
    dicts = {name for name, value in vars(nn.Module()).items() if isinstance(value, dict)}
    held = [
        entries
        for module in model.modules()
        if not isinstance(module, torch.jit.ScriptModule)
        for entries in (vars(module), *(vars(module)[name] for name in dicts & vars(module).keys()))
    ]
    before = [dict(entries) for entries in held]
    training = [(module, module.training) for module in model.modules()]
    values = {
        buffer: buffer.detach().clone() for buffer in model.buffers() if may_be_written_to(buffer)
    }
    versions = {name: parameter._version for name, parameter in model.named_parameters()}
    gradients = [(p, p.grad, p.requires_grad) for p in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None  # a backward inside forward would add to it
    devices = {t.device for t in (*model.parameters(), *example.tensors())}
    python_state = random.getstate()
    numpy_random = getattr(sys.modules.get("numpy"), "random", None)
    numpy_state = numpy_random.get_state() if numpy_random else None
    with (
        torch.random.fork_rng([device for device in devices if device.type == "cuda"]),
        # Compiled code would run what it was compiled from, not what is put in.
        torch.compiler.set_stance("force_eager"),
    ):
        try:
            yield
        finally:
            for entries, present in zip(held, before, strict=True):
                entries.clear()
                entries.update(present)
            for module, mode in training:
                module.training = mode
            with torch.no_grad():
                for buffer, value in values.items():
                    if not torch.equal(buffer, value):
                        buffer.resize_(value.shape).copy_(value)  # an observer resizes its own
            for parameter, gradient, requires_grad in gradients:
                parameter.grad = gradient
                parameter.requires_grad = requires_grad
            random.setstate(python_state)
            if numpy_random:
                numpy_random.set_state(numpy_state)
            torch.clear_autocast_cache()  # casts that belong to the run's graph
            for name, parameter in model.named_parameters():
                if versions.get(name, parameter._version) != parameter._version:
                    warnings.warn(
                        f"the model's forward wrote to its parameter `{name}`, which convert does "
                        "not put back",
                        stacklevel=2,
                    )


@contextmanager
def reentrant_checkpoints_as_the_others() -> Iterator[None]:
    """Run reentrant checkpoints as the other kind.

    Theirs is a forward without a graph, in which nothing is seen to be saved, and a backward that
    `torch.autograd.grad` cannot run.
    """
    thread, reentrant = threading.get_ident(), CheckpointFunction.apply

    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        # On a GPU autograd runs again what a checkpoint has not kept on a thread of its own.
        if threading.get_ident() != thread and running_node() is None:
            return reentrant(function, preserve_rng_state, *args)
        return checkpoint(
            function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state
        )

    with patched(CheckpointFunction, "apply", staticmethod(apply)):
        yield


@contextmanager
def patched(owner: type, name: str, value: Any) -> Iterator[None]:
    """Let the class attribute be `value`, and put back at the end what was there, or nothing."""
    own = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
