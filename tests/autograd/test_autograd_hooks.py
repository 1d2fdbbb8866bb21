"""Hooks on a view that a function of this package overwrites."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from _support.hooks import Hooks
from torch import Tensor

import inplace_ops

C = 6


def instance_norm(x: Tensor) -> Tensor:
    return F.instance_norm(x)


def alias(x: Tensor) -> Tensor:
    return (x * 2).view(x.shape)


def half(x: Tensor) -> Tensor:
    return (x * 2)[:, : C // 2]


IN_PLACE_FUNCTIONS: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor], Tensor]]] = {
    "relu": (inplace_ops.relu_, torch.relu_),
    "leaky_relu": (
        lambda x: inplace_ops.leaky_relu_(x, 0.1),
        lambda x: F.leaky_relu_(x, 0.1),
    ),
    "silu": (inplace_ops.silu_, lambda x: F.silu(x, inplace=True)),
}


@pytest.mark.parametrize("function", IN_PLACE_FUNCTIONS)
@pytest.mark.parametrize(
    "view_of", [instance_norm, alias, half], ids=["instance norm", "alias", "half"]
)
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
def test_hooks_on_a_view_that_a_function_overwrites(
    function: str,
    view_of: Callable[[Tensor], Tensor],
    grad: bool,
) -> None:
    """A hook on the view sees the gradient that it sees after PyTorch's function.

    Without grad PyTorch's own function leaves the view as it was, and a hook on it crashes, unless
    its `grad_fn` is read before: here the reference reads it.
    """
    ours, theirs = IN_PLACE_FUNCTIONS[function]
    x = torch.randn(2, 3, 8, 8).mul(3).requires_grad_()
    x_of, hooks = [], []
    for run in (ours, theirs):
        view = view_of(torch.cat([x, x], 1))
        hooks.append(Hooks())
        with torch.set_grad_enabled(grad):
            result = run(view)
        assert result is view
        if run is theirs:
            assert result.grad_fn is not None
        hooks[-1].on(result, "first", 3.0)
        hooks[-1].on(result, "second", 0.5)
        if grad:
            hooks[-1].retain(result)
        x_of.append(torch.autograd.grad(result.square().sum(), x)[0])
    hooks[0].assert_saw(hooks[1])
    torch.testing.assert_close(x_of[0], x_of[1], rtol=1e-4, atol=1e-4)
