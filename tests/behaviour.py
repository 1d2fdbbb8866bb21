"""What a model does that a conversion must not change."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

Behaviour = dict[str, Tensor]


def behaviour(model: nn.Module, x: Tensor, seed: int = 0) -> Behaviour:
    """Outputs, gradients, the argument and what the model keeps, after forward and backward."""
    x = x.clone()
    torch.manual_seed(seed)
    model.zero_grad()
    kept = getattr(model, "kept", [])
    kept.clear()
    outputs = [leaf for leaf in tree_leaves(model(x)) if isinstance(leaf, Tensor)]
    found = {f"output {i}": output.detach().clone() for i, output in enumerate(outputs)}
    found |= {f"kept {i}": tensor.detach().clone() for i, tensor in enumerate(kept)}
    found["argument"] = x
    differentiable = [output for output in outputs if output.requires_grad]
    if differentiable:
        loss = sum(output.double().square().sum() for output in differentiable)
        loss.backward()  # type: ignore[union-attr]
    found |= {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    found |= {f"state {name}": value.clone() for name, value in model.state_dict().items()}
    return found


def assert_same_behaviour(
    actual: Behaviour, expected: Behaviour, rtol: float = 1e-6, atol: float = 1e-6
) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name], value, rtol=rtol, atol=atol, msg=lambda m, name=name: f"{name}: {m}"
        )
