"""The behavior of a model that a conversion must not change."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

Behavior = dict[str, Tensor]


def behavior(model: nn.Module, x: Tensor, seed: int = 0) -> Behavior:
    """Run forward and backward; return outputs, gradients, argument, stored tensors and state."""
    x = x.clone()
    torch.manual_seed(seed)
    model.zero_grad()
    stored = getattr(model, "stored", [])
    stored.clear()
    outputs = [leaf for leaf in tree_leaves(model(x)) if isinstance(leaf, Tensor)]
    found = {f"output {i}": output.detach().clone() for i, output in enumerate(outputs)}
    found |= {f"stored {i}": tensor.detach().clone() for i, tensor in enumerate(stored)}
    found["argument"] = x
    differentiable = [output for output in outputs if output.requires_grad]
    if differentiable:
        loss = sum(output.double().square().sum() for output in differentiable)
        loss.backward()  # type: ignore[union-attr]
    found |= {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    found |= {f"state {name}": value.clone() for name, value in model.state_dict().items()}
    return found


def assert_same_behavior(
    actual: Behavior, expected: Behavior, rtol: float = 1e-6, atol: float = 1e-6
) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name], value, rtol=rtol, atol=atol, msg=lambda m, name=name: f"{name}: {m}"
        )
