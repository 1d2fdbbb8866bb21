"""The arguments of an example, and the call of a model with them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .._ops import is_out_of_memory
from .._torch_private import tree_leaves, tree_map

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
            hint = (
                ": pass batch[0], without labels, or tuple(batch) if forward takes all of it"
                if isinstance(inputs, list)
                else ""
            )
            raise TypeError(
                "example_inputs must be a tensor, a tuple of arguments or a dict of keyword "
                f"arguments, got {type(inputs).__name__}{hint}"
            )

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
        """Call the model with the arguments; an error also says so, and what may be right."""
        try:
            return model(*self.args, **self.kwargs)
        except Exception as error:
            if not is_out_of_memory(error):
                append(error, self._context(model))
            raise

    def _context(self, model: nn.Module) -> str:
        """Return how the model was called, what its forward takes, and what may be right."""
        devices = ", ".join(dict.fromkeys(str(tensor.device) for tensor in self.tensors()))
        call = f"while running example_inputs: model({describe(self.args, self.kwargs)})"
        call += f" on {devices}" if devices else ""
        try:
            signature = inspect.signature(model.forward)
        except (TypeError, ValueError):  # not a Python function
            return f"{call}. {_AS_IN_TRAINING}."
        advice = self._advice(model, signature) or _AS_IN_TRAINING
        return f"{call}, whose forward takes {signature}. {advice}."

    def _advice(self, model: nn.Module, signature: inspect.Signature) -> str:
        """Return the nearest call that may be right; empty if the arguments do not show it."""
        given = self.tensors()
        if self.args and all(isinstance(value, int) for value in self.args):
            return f"For an input of this shape pass torch.randn{self.args}"
        if not _accepts(signature, self.args, self.kwargs):
            return self._other_arguments(signature)
        own = [*model.parameters(), *model.buffers()]
        devices = {tensor.device for tensor in own}
        if len(devices) == 1 and {tensor.device for tensor in given} - devices:
            return f'The model is on {own[0].device}: pass x.to("{own[0].device}")'
        dtypes = {tensor.dtype for tensor in own if tensor.is_floating_point()}
        takes_ids = any(isinstance(part, nn.Embedding) for part in model.modules())
        if takes_ids and given and all(tensor.is_floating_point() for tensor in given):
            return "The model has an embedding, which takes integers: pass x.long()"
        if not takes_ids and len(dtypes) == 1 and given and not dtypes & {t.dtype for t in given}:
            (dtype,) = dtypes
            return f"The model's parameters are {dtype}: pass x.to({dtype})"
        return ""

    def _other_arguments(self, signature: inspect.Signature) -> str:
        """Return the nearest arguments that forward takes."""
        kept = {n: v for n, v in self.kwargs.items() if n in signature.parameters}
        if self.args:
            for count in range(len(self.args) - 1, 0, -1):
                if _accepts(signature, self.args[:count], {}):
                    part = "example_inputs[0]" if count == 1 else f"example_inputs[:{count}]"
                    return f"Without labels and the like it may be right: pass {part}"
        elif kept and _accepts(signature, (), kept):
            return f"Pass the entries that it takes alone: {', '.join(map(repr, kept))}"
        elif self.kwargs and _accepts(signature, (self.kwargs,), {}):
            return "If its argument is a dict, pass a tuple: (example_inputs,)"
        return ""


_AS_IN_TRAINING = "Pass what the training loop passes to the model, in the same shapes and dtypes"


def _accepts(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def describe(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Return the dtypes and shapes of arguments that are tensors, the types of the others."""

    def one(value: Any) -> str:
        if not isinstance(value, Tensor):
            return type(value).__name__
        return f"{str(value.dtype).removeprefix('torch.')}{[*value.shape]}"

    return ", ".join([*map(one, args), *(f"{name}={one(v)}" for name, v in kwargs.items())])


def append(error: Exception, text: str) -> None:
    """Append a paragraph to the message of an error, which stays the same object."""
    if error.args == (str(error),):
        error.args = (f"{error}\n\n{text}",)
    elif sys.version_info >= (3, 11):  # such as KeyError and OSError, which quote their arguments
        error.add_note(text)
