"""Whole models in training, as PyTorch runs them: what the benchmarks of them share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch._functorch.config
import torch._inductor
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from inplace_ops.activations import ACTIVATIONS

# What is compared with. In place: where the network's author has it so.
OUT_OF_PLACE, IN_PLACE = "torch out of place", "torch in place"
MODULES = tuple(entry.torch_module for entry in ACTIVATIONS)


@dataclass(frozen=True)
class Mode:
    """How a network is trained.

    float32 is as PyTorch's defaults have it: convolutions in TF32 on a GPU.
    """

    autocast: bool
    memory_format: torch.memory_format


MODES = {
    "float32": Mode(False, torch.contiguous_format),
    "bfloat16": Mode(True, torch.contiguous_format),
    "bfloat16, channels_last": Mode(True, torch.channels_last),
}


def with_activations_out_of_place(model: nn.Module) -> nn.Module:
    """A copy of the model with all of PyTorch's activations out of place."""
    variant = copy.deepcopy(model)
    for module in variant.modules():
        if isinstance(module, MODULES):
            module.inplace = False
    return variant


def checkpointed(model: nn.Module, blocks: Collection[str]) -> nn.Module:
    """The model, in which modules of these classes keep their inputs and run again in backward."""
    for child in model.children():
        if type(child).__name__ in blocks:
            child.forward = partial(checkpoint, child.forward, use_reentrant=False)
        else:
            checkpointed(child, blocks)
    return model


def compiled(model: nn.Module, budget: float) -> Callable[..., Any]:
    """The model compiled, with a budget of PyTorch's memory for what is kept.

    With a backend of its own: compiled code is shared by models of one class that have one backend.
    """

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        with torch._functorch.config.patch(activation_memory_budget=budget):
            return torch._inductor.compile(graph, inputs)

    return torch.compile(model, backend=backend)


def differentiable(outputs: Any) -> list[Tensor]:
    """The tensors among a model's outputs that a loss can be of."""
    return [t for t in tree_leaves(outputs) if isinstance(t, Tensor) and t.requires_grad]


def backward(outputs: Any) -> None:
    """The gradients of a loss: the mean square of each output, in float32 at least."""
    wide = [t.to(torch.promote_types(t.dtype, torch.float32)) for t in differentiable(outputs)]
    torch.autograd.backward([t.square().mean() for t in wide])
