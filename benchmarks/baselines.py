"""The variants of a whole network that are compared: eager, compiled, checkpointed, converted."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple

import torch
import torch._functorch.config
import torch._inductor
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import inplace_ops
from inplace_ops.activations import ACTIVATIONS

# In place: the network as its author wrote it, with in-place activations where it has them.
OUT_OF_PLACE, IN_PLACE = "torch out of place", "torch in place"
MAX_OPS = (1, 4, 8, 16)
MEMORY_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
MODULES = tuple(entry.torch_module for entry in ACTIVATIONS)


class Variant(NamedTuple):
    """A model, and the callable that runs its forward pass."""

    model: nn.Module
    run: Callable[[Tensor], Any]


def with_activations_out_of_place(model: nn.Module) -> nn.Module:
    """Return a copy of the model with all of PyTorch's activations out of place."""
    variant = copy.deepcopy(model)
    for module in variant.modules():
        if isinstance(module, MODULES):
            module.inplace = False
    return variant


def checkpointed(model: nn.Module, blocks: Collection[str]) -> nn.Module:
    """Checkpoint each module whose class has one of these names, and return the model."""
    for child in model.children():
        if type(child).__name__ in blocks:
            child.forward = partial(checkpoint, child.forward, use_reentrant=False)
        else:
            checkpointed(child, blocks)
    return model


def compiled(model: nn.Module, budget: float) -> Callable[..., Any]:
    """Return the model compiled with this `activation_memory_budget`.

    Each call makes a new backend: models of one class with the same backend share compiled code.
    """

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        with torch._functorch.config.patch(activation_memory_budget=budget):
            return torch._inductor.compile(graph, inputs)

    return torch.compile(model, backend=backend)


def converted(model: nn.Module, max_ops: int) -> nn.Module:
    """Return a converted copy of the model."""
    variant = copy.deepcopy(model)
    inplace_ops.convert(variant, max_ops=max_ops)
    return variant


def eager(model: nn.Module) -> Variant:
    """Return a variant that calls the model as it is."""
    return Variant(model, model)


def _compiled(model: nn.Module, blocks: Collection[str], budget: float) -> Variant:
    """Compile the network out of place: the compiler decides what to write in place."""
    variant = with_activations_out_of_place(model)
    return Variant(variant, compiled(variant, budget))


def _converted(model: nn.Module, blocks: Collection[str], max_ops: int) -> Variant:
    return eager(converted(model, max_ops))


# By name: makes a variant from a model in training mode and the class names of its blocks.
VARIANTS: dict[str, Callable[[nn.Module, Collection[str]], Variant]] = {
    OUT_OF_PLACE: lambda model, blocks: eager(with_activations_out_of_place(model)),
    IN_PLACE: lambda model, blocks: eager(copy.deepcopy(model)),
    "torch.compile": partial(_compiled, budget=1.0),
    "torch.compile, memory budget 0.5": partial(_compiled, budget=0.5),
    "checkpoint of each block": lambda model, blocks: eager(
        checkpointed(copy.deepcopy(model), blocks)
    ),
    **{f"convert, max_ops={n}": partial(_converted, max_ops=n) for n in MAX_OPS},
}


def differentiable(outputs: Any) -> list[Tensor]:
    """Return the tensors among a model's outputs that require grad."""
    return [t for t in tree_leaves(outputs) if isinstance(t, Tensor) and t.requires_grad]


def backward(outputs: Any) -> None:
    """Run backward from the mean square of each output, computed in float32 or wider."""
    wide = [t.to(torch.promote_types(t.dtype, torch.float32)) for t in differentiable(outputs)]
    torch.autograd.backward([t.square().mean() for t in wide])


def gradient_of(model: nn.Module) -> Tensor:
    """Return all parameters' gradients as one vector, and set them to None."""
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return found
