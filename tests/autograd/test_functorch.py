"""torch.func's transforms of the activations, and of networks with them, match PyTorch's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from _support.cases import (
    ONE_OF_EACH_FORWARD,
    ONE_OF_EACH_FUNCTION,
    SAVE_MODES,
    ActivationCase,
    activation_id,
)
from _support.marks import in_turn, readable_id
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

# Transforms see PyTorch's activation, whatever the save mode: see dispatch.py. Hence rows for three
# activations, each with another save mode.
TRANSFORMED = tuple(
    row
    for row in SAVE_MODES
    if row.name in ("relu-mask", "leaky_relu-0.01-output", "silu-derivative-default")
)
transformed = pytest.mark.parametrize("activation", TRANSFORMED, ids=activation_id)
each_function = pytest.mark.parametrize("activation", ONE_OF_EACH_FUNCTION, ids=activation_id)

Map = Callable[[Tensor], Tensor]


def inner(call: Map) -> Map:
    """Return a function that modifies an intermediate tensor."""
    return lambda x: call(x * 1.5) * 2


def in_a_view(call: Map) -> Map:
    """Return a function that modifies a view of a part of an intermediate tensor."""

    def function(x: Tensor) -> Tensor:
        h = x * 1.5
        call(h[..., 1:])
        return h.sin()

    return function


def twice(call: Map) -> Map:
    return lambda x: call(call(x * 1.5) - 0.25)


PROGRAMS = {"inner": inner, "in_a_view": in_a_view, "twice": twice}


def scalar(f: Map) -> Map:
    return lambda x: (f(x) ** 2).sum()


def tangent_of(x: Tensor) -> Tensor:
    return torch.linspace(-1, 1, x.numel(), dtype=x.dtype, device=x.device).view_as(x)


# By name: a transform of a function, evaluated at x of shape (3, 4).
TRANSFORMS: dict[str, Callable[[Map, Tensor], object]] = {
    "grad": lambda f, x: grad(scalar(f))(x),
    "vjp": lambda f, x: vjp(f, x)[1](tangent_of(x)),
    "jvp": lambda f, x: jvp(f, (x,), (tangent_of(x),)),
    "jacrev": lambda f, x: jacrev(f)(x),
    "jacfwd": lambda f, x: jacfwd(f)(x),
    "hessian": lambda f, x: hessian(scalar(f))(x),
    "grad of grad": lambda f, x: grad(lambda z: grad(scalar(f))(z).sin().sum())(x),
    "jvp of grad": lambda f, x: jvp(grad(scalar(f)), (x,), (tangent_of(x),)),
    "vmap": lambda f, x: vmap(f)(x),
    "vmap of grad": lambda f, x: vmap(grad(scalar(f)))(x),
    "grad of vmap": lambda f, x: grad(lambda z: vmap(f)(z).square().sum())(x),
    "vmap over columns": lambda f, x: vmap(f, in_dims=-1, out_dims=1)(x),
    "vmap of vmap": lambda f, x: vmap(vmap(f), in_dims=1)(x[:, None] * x),
}


@pytest.mark.parametrize(
    ("activation", "program"),
    [
        (row, program)
        for row in TRANSFORMED
        for program in PROGRAMS
        if program == "inner" or row.function == "silu"
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_match_pytorch(
    activation: ActivationCase, program: str, transform: str, device: torch.device
) -> None:
    x = torch.randn(3, 4, dtype=torch.float64, device=device)
    before = x.clone()
    actual = TRANSFORMS[transform](PROGRAMS[program](activation.call), x)
    expected = TRANSFORMS[transform](PROGRAMS[program](activation.copied), x)
    torch.testing.assert_close(actual, expected)
    assert torch.equal(x, before)


@transformed
def test_nested_forward_mode_raises_pytorchs_error(
    activation: ActivationCase, device: torch.device
) -> None:
    """PyTorch's in-place ops reject the zeros that the inner level makes; ours raise the same."""
    x = torch.randn(3, device=device)
    with pytest.raises(RuntimeError) as pytorchs:
        jacfwd(jacfwd(inner(activation.torch_inplace)))(x)
    with pytest.raises(RuntimeError) as ours:
        jacfwd(jacfwd(inner(activation.call)))(x)
    assert str(ours.value) == str(pytorchs.value)


@pytest.mark.parametrize("activation", ONE_OF_EACH_FORWARD, ids=activation_id)
def test_hessian_matches_pytorch(activation: ActivationCase, device: torch.device) -> None:
    x = torch.randn(6, dtype=torch.float64, device=device)
    actual = hessian(scalar(inner(activation.call)))(x)
    torch.testing.assert_close(actual, hessian(scalar(inner(activation.reference)))(x))


@pytest.mark.parametrize(
    ("activation", "in_dim", "dtype"),
    in_turn(TRANSFORMED, [0, 1, 2, -1, -2], (torch.float32, torch.bfloat16)),
    ids=readable_id,
)
def test_vmap_modifies_its_argument(
    activation: ActivationCase, in_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    """vmap's argument is modified in place, and its version increases, as with PyTorch's."""
    x, reference = (torch.randn(2, 3, 4, device=device).to(dtype) for _ in range(2))
    reference.copy_(x)
    version = x._version
    out_dim = 0 if in_dim >= 0 else -1
    actual = vmap(activation.call, in_dims=in_dim, out_dims=out_dim)(x)
    expected = vmap(activation.torch_inplace, in_dims=in_dim, out_dims=out_dim)(reference)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(x, reference)
    assert x._version > version


@transformed
def test_captured_tensor_is_modified_once(activation: ActivationCase, device: torch.device) -> None:
    """Once, not once per sample, as by PyTorch's in-place activation."""
    x, y = torch.randn(3, 4, device=device), torch.randn(4, device=device)
    inside, outside = y.clone(), y.clone()
    actual = vmap(lambda a: a + activation.call(inside))(x)
    expected = vmap(lambda a: a + activation.torch_inplace(outside))(x)
    torch.testing.assert_close((actual, inside), (expected, outside))


@each_function
def test_gradients_of_captured_tensors_match_pytorch(
    activation: ActivationCase, device: torch.device
) -> None:
    """A tensor that requires grad, used inside a transform, gets its gradient outside."""
    weight = torch.randn(4, device=device, requires_grad=True)
    x = torch.randn(3, 4, device=device)
    results = []
    for f in (activation.call, activation.copied):
        y = vmap(lambda row, f=f: f(row * weight))(x)
        results.append((y, *torch.autograd.grad(y.square().sum(), weight)))
    torch.testing.assert_close(*results)


def tolerance(activation: ActivationCase) -> float:
    """Return float64's default tolerance, or more if the derivative is inexact."""
    return max(1e-7, 20 * activation.derivative_error.get(torch.float64, 0.0))


@each_function
def test_tensor_that_outlives_its_transform_matches_pytorch(
    activation: ActivationCase, device: torch.device
) -> None:
    """A tensor that outlives its transform is still wrapped, and otherwise an ordinary tensor."""
    x = torch.randn(9, dtype=torch.float64, device=device)
    factor = torch.randn_like(x, requires_grad=True)
    leaked: list[Tensor] = []

    def loss(x: Tensor) -> Tensor:
        leaked.append(x * factor)
        return leaked[0].sum()

    grad(loss)(x)
    y = activation.call(leaked[0])
    assert y is leaked[0]
    expected = activation.reference(x * factor)
    limit = tolerance(activation)
    torch.testing.assert_close(y.detach() + 0, expected.detach(), rtol=limit, atol=limit)
    gradients = [torch.autograd.grad(z.square().sum(), factor) for z in (y, expected)]
    torch.testing.assert_close(*gradients, rtol=limit, atol=limit)
