"""What `convert` is compared with on whole networks: PyTorch as it is, compiled, checkpointed."""

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

# In place: where the network's author has it so.
OUT_OF_PLACE, IN_PLACE = "torch out of place", "torch in place"
MAX_OPS = (1, 4, 8, 16)
MEMORY_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
MODULES = tuple(entry.torch_module for entry in ACTIVATIONS)


class Variant(NamedTuple):
    """A model, and how its forward is called."""

    model: nn.Module
    run: Callable[[Tensor], Any]


def with_activations_out_of_place(model: nn.Module) -> nn.Module:
    """A copy of the model with all of PyTorch's activations out of place."""
    variant = copy.deepcopy(model)
    for module in variant.modules():
        if isinstance(module, MODULES):
            module.inplace = False
    return variant


def checkpointed(model: nn.Module, blocks: Collection[str]) -> nn.Module:
    """The model, in which modules of these classes save their inputs and run again in backward."""
    for child in model.children():
        if type(child).__name__ in blocks:
            child.forward = partial(checkpoint, child.forward, use_reentrant=False)
        else:
            checkpointed(child, blocks)
    return model


def compiled(model: nn.Module, budget: float) -> Callable[..., Any]:
    """The model compiled, with a budget of PyTorch's memory for what is saved.

    With a backend of its own: compiled code is shared by models of one class that have one backend.
    """

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        with torch._functorch.config.patch(activation_memory_budget=budget):
            return torch._inductor.compile(graph, inputs)

    return torch.compile(model, backend=backend)


def converted(model: nn.Module, max_ops: int) -> nn.Module:
    """A converted copy of the model."""
    variant = copy.deepcopy(model)
    inplace_ops.convert(variant, max_ops=max_ops)
    return variant


def eager(model: nn.Module) -> Variant:
    """A model that is called as it is."""
    return Variant(model, model)


def _compiled(model: nn.Module, blocks: Collection[str], budget: float) -> Variant:
    """From the network out of place: the compiler decides what is written where."""
    variant = with_activations_out_of_place(model)
    return Variant(variant, compiled(variant, budget))


def _converted(model: nn.Module, blocks: Collection[str], max_ops: int) -> Variant:
    return eager(converted(model, max_ops))


# By name: made from a model in training mode, and the names of the classes of its blocks.
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
    """The tensors among a model's outputs that a loss can be of."""
    return [t for t in tree_leaves(outputs) if isinstance(t, Tensor) and t.requires_grad]


def backward(outputs: Any) -> None:
    """The gradients of a loss: the mean square of each output, in float32 at least."""
    wide = [t.to(torch.promote_types(t.dtype, torch.float32)) for t in differentiable(outputs)]
    torch.autograd.backward([t.square().mean() for t in wide])


def gradient_of(model: nn.Module) -> Tensor:
    """All parameters' gradients, one after the other, which are then None."""
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return found
