"""How results are compared with a reference, and the inputs they are computed from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from activations import Activation
from torch import Tensor
from torch.testing._comparison import default_tolerances

PATTERN = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


def random_values(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Normal values, every ninth or so a zero of either sign."""
    values = 3 * torch.randn(shape, dtype=dtype, device=device)
    return torch.where(torch.rand(shape, device=device) < 0.1, values.sign() * 0.0, values)


def patterns(x: Tensor) -> Tensor:
    """The bit patterns of x, those of all NaNs made one."""
    pattern = x.contiguous().view(PATTERN[x.element_size()])
    return torch.where(x.isnan(), -1, pattern) if x.is_floating_point() else pattern


def assert_identical(actual: Tensor, expected: Tensor, message: str = "") -> None:
    """Equal to the bit, -0.0 and 0.0 told apart, any NaN equal to any other."""
    assert actual.dtype == expected.dtype, message
    assert actual.shape == expected.shape, message
    different = patterns(actual.detach()) != patterns(expected.detach())
    if different.any():
        raise AssertionError(
            f"{message} {int(different.sum())} of {different.numel()} differ: "
            f"{actual[different][:5].tolist()} instead of {expected[different][:5].tolist()}"
        )


def assert_values(activation: Activation, actual: Tensor, expected: Tensor) -> None:
    if activation.is_exact:
        if actual.is_cuda and actual.is_floating_point():
            # There PyTorch's ReLU makes 0.0 of -0.0, up to some version after 2.11.
            actual, expected = unsigned_zeros(actual), unsigned_zeros(expected)
        assert_identical(actual, expected, "value")
    else:
        torch.testing.assert_close(actual, expected, equal_nan=True)


def assert_gradient(
    activation: Activation,
    actual: Tensor,
    expected: Tensor,
    largest_incoming: float | Tensor,
    message: str = "",
) -> None:
    """Compare a gradient with PyTorch's, both from incoming gradients up to `largest_incoming`."""
    error = activation.derivative_error.get(actual.dtype)
    if activation.is_exact:
        assert_identical(actual, expected, message)
    elif error is None:
        # The defaults at unit incoming gradient: the error scales with it.
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
    """x without -0.0: a view's backward adds to zeros, and whether it does is PyTorch's choice."""
    return x + 0.0


def gradient(call: Callable[[Tensor], Tensor], x: Tensor, incoming: Tensor | None = None) -> Tensor:
    """The gradient of call(x) in x, the incoming one all ones by default."""
    leaf = x.detach().clone().requires_grad_()
    y = call(leaf.clone())
    return torch.autograd.grad(y, leaf, torch.ones_like(y) if incoming is None else incoming)[0]


def wording(error: BaseException) -> str:
    """The message, without the spaces that PyTorch forgets in one and the link at its end."""
    return str(error).split("See http")[0].replace(" ", "")


class Severed(torch.autograd.Function):
    """`Severed.apply(y)`: y, to which backward returns no gradient, which is not one of zeros."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None
