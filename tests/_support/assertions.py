"""Comparisons of results with a reference, and random inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.testing._comparison import default_tolerances

from _support.cases import ActivationCase
from _support.norm_cases import rounding
from inplace_ops.activations import Activation

PATTERN = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


def random_values(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return normal values, of which about a tenth are replaced by zeros of either sign."""
    values = 3 * torch.randn(shape, dtype=dtype, device=device)
    return torch.where(torch.rand(shape, device=device) < 0.1, values.sign() * 0.0, values)


def patterns(x: Tensor) -> Tensor:
    """Return the bit patterns of x, with a single pattern for all NaNs."""
    pattern = x.resolve_neg().contiguous().view(PATTERN[x.element_size()])
    return torch.where(x.isnan(), -1, pattern) if x.is_floating_point() else pattern


def assert_identical(actual: Tensor, expected: Tensor, message: str = "") -> None:
    """Assert equality bit for bit: -0.0 differs from 0.0, and all NaNs are equal."""
    assert actual.dtype == expected.dtype, message
    assert actual.shape == expected.shape, message
    different = patterns(actual.detach()) != patterns(expected.detach())
    if different.any():
        raise AssertionError(
            f"{message} {int(different.sum())} of {different.numel()} differ: "
            f"{actual[different][:5].tolist()} instead of {expected[different][:5].tolist()}"
        )


def assert_is_cast(actual: Tensor, expected: Tensor, entry: Activation) -> None:
    """Assert that a tensor in 16 bits is a cast of an activation's output in float32.

    A smooth activation computes the output that it casts less exactly: a result next to a tie may
    be rounded to the other side.
    """
    cast = expected.to(actual.dtype)
    if entry.is_piecewise_linear:
        return assert_identical(actual, cast)
    assert torch.equal(actual.isnan(), cast.isnan())
    assert torch.equal(actual[~actual.isnan()].signbit(), cast[~actual.isnan()].signbit())
    is_finite = cast.isfinite()
    assert torch.equal(actual.isfinite(), is_finite)
    exact = expected[is_finite].double()
    error = rounding(exact, actual.dtype) + 5e-6 * (exact.abs() + 1)
    assert ((actual[is_finite].double() - exact).abs() <= error).all()


def assert_values(activation: ActivationCase, actual: Tensor, expected: Tensor) -> None:
    if activation.is_exact:
        if actual.is_cuda and actual.is_floating_point():
            # On CUDA PyTorch's ReLU returns 0.0 for -0.0, up to some version after 2.11.
            actual, expected = unsigned_zeros(actual), unsigned_zeros(expected)
        assert_identical(actual, expected, "value")
    else:
        torch.testing.assert_close(actual, expected, equal_nan=True)


def assert_gradient(
    activation: ActivationCase,
    actual: Tensor,
    expected: Tensor,
    largest_incoming: float | Tensor,
    message: str = "",
) -> None:
    """Compare a gradient with PyTorch's, for incoming gradients of size `largest_incoming`."""
    error = activation.derivative_error.get(actual.dtype)
    if activation.is_exact:
        assert_identical(actual, expected, message)
    elif error is None:
        # The default tolerances hold at unit incoming gradient, and the error scales with it.
        rtol, atol = default_tolerances(actual.dtype)
        atol *= max(1.0, float(torch.as_tensor(largest_incoming).max()))
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, equal_nan=True)
    else:
        finfo = torch.finfo(actual.dtype)
        limit = error * largest_incoming + 1.5 * finfo.eps * expected.double().abs() + finfo.tiny
        excess = (actual.double() - expected.double()).abs() - limit
        assert torch.equal(actual.isnan(), expected.isnan()), message
        assert not (excess > 0).any(), f"{message} {excess.nan_to_num().max()} above the limit"


def unsigned_zeros(x: Tensor) -> Tensor:
    """Return x with 0.0 in place of -0.0.

    A view's backward may add the gradient to zeros, which turns -0.0 into 0.0. Whether it does is
    up to PyTorch.
    """
    return x + 0.0


def gradient(call: Callable[[Tensor], Tensor], x: Tensor, incoming: Tensor | None = None) -> Tensor:
    """Return the gradient of call(x) with respect to x, by default for an incoming one of ones."""
    leaf = x.detach().clone().requires_grad_()
    y = call(leaf.clone())
    return torch.autograd.grad(y, leaf, torch.ones_like(y) if incoming is None else incoming)[0]


def wording(error: BaseException) -> str:
    """Return an error's message without spaces and without the link at its end.

    One of PyTorch's messages lacks spaces between words.
    """
    return str(error).split("See http")[0].replace(" ", "")


class Severed(torch.autograd.Function):
    """A clone whose backward returns no gradient (None), rather than a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


class ViewFunction(torch.autograd.Function):
    """`ViewFunction.apply(x)` returns a view of x, which autograd does not let be modified."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient
