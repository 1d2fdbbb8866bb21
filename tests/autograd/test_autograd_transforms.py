"""Transforms of torch.func, forward mode and batched gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from _support.assertions import assert_gradient, gradient
from _support.cases import ONE_OF_EACH, ActivationCase, activation_id
from torch import Tensor

one_of_each = pytest.mark.parametrize("activation", ONE_OF_EACH, ids=activation_id)


@one_of_each
def test_functional_transforms_match_pytorch(
    activation: ActivationCase, device: torch.device
) -> None:
    x = torch.randn(6, 5, dtype=torch.float64, device=device)
    tangent = torch.randn_like(x)

    def loss(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda row: (function(row * 1.5) ** 2).sum()

    ours, pytorchs = loss(activation.call), loss(activation.reference)
    transforms: list[Callable[[Callable[[Tensor], Tensor]], Tensor]] = [
        lambda f: torch.func.grad(f)(x),
        lambda f: torch.func.vmap(f)(x),
        lambda f: torch.func.vmap(torch.func.grad(f))(x),
        lambda f: torch.func.vmap(torch.func.grad(f), in_dims=1)(x),
        lambda f: torch.func.jvp(f, (x,), (tangent,))[1],
        lambda f: torch.func.grad(lambda v: torch.func.grad(f)(v).sum())(x),
        lambda f: torch.func.jacrev(f)(x),
    ]
    for transform in transforms:
        torch.testing.assert_close(transform(ours), transform(pytorchs))


@one_of_each
def test_forward_mode_matches_pytorch(activation: ActivationCase, device: torch.device) -> None:
    x = torch.randn(9, dtype=torch.float64, device=device)
    tangent = torch.randn_like(x)
    results = []
    with torch.autograd.forward_ad.dual_level():
        for call in (activation.call, activation.reference):
            dual = torch.autograd.forward_ad.make_dual(x.clone(), tangent.clone())
            results.append(torch.autograd.forward_ad.unpack_dual(call(dual)))
    torch.testing.assert_close(results[0].primal, results[1].primal)
    torch.testing.assert_close(results[0].tangent, results[1].tangent)


@one_of_each
def test_batched_backward_matches_single_backwards(
    activation: ActivationCase, device: torch.device
) -> None:
    leaf = torch.randn(4, 5, dtype=torch.float64, device=device, requires_grad=True)
    incoming = 2 * torch.rand(3, 4, 5, dtype=torch.float64, device=device) - 1
    y = activation.call(leaf.clone())
    (actual,) = torch.autograd.grad(y, leaf, incoming, is_grads_batched=True)
    expected = torch.stack([gradient(activation.reference, leaf, g) for g in incoming])
    assert_gradient(activation, actual, expected, 1.0)
