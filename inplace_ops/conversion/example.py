"""The arguments of an example, and the call of a model with them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

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
