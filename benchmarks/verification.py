"""Verify before timing that a variant computes PyTorch's values and gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from variants import ENTRIES, VARIANTS, Variant


@contextmanager
def exact_convolutions() -> Iterator[None]:
    """Stop cuDNN from rounding the inputs of float32 convolutions to TF32.

    TF32 has 10 bits of mantissa. With it, a difference in the last bit before a convolution is a
    thousand times as large after it. Steps are timed with TF32, PyTorch's default.
    """
    allowed = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = allowed


def _derivative_error(variant: Variant, dtype: torch.dtype) -> float | None:
    """Return the documented error if torch.testing's default tolerances do not cover it."""
    kernels = variant.kernels
    if kernels is None:
        return None
    return kernels.entry.derivative_error(kernels.save, dtype, kernels.bits_of(dtype))


def check(
    activation: str, variant: Variant, x: Tensor, grad: Tensor, value: Tensor, gradient: Tensor
) -> None:
    """Raise unless value and gradient are PyTorch's.

    They must be equal for a piecewise-linear activation, and within the documented errors for a
    smooth one. These errors are for a unit gradient: `grad` is 1 or -1 everywhere.
    """
    leaf = x.detach().clone().requires_grad_()
    expected_value = VARIANTS[activation][0].run(leaf)
    (expected_gradient,) = torch.autograd.grad(expected_value, leaf, grad)
    tolerance = {"rtol": 0.0, "atol": 0.0} if ENTRIES[activation].is_piecewise_linear else {}
    torch.testing.assert_close(value, expected_value.detach(), **tolerance)
    error = _derivative_error(variant, x.dtype)
    if error is not None:
        # Both sides add the rounding of their arithmetic.
        arithmetic = torch.finfo(torch.promote_types(x.dtype, torch.float32))
        tolerance = {"rtol": torch.finfo(x.dtype).eps, "atol": error + 4 * arithmetic.eps}
    torch.testing.assert_close(gradient, expected_gradient, **tolerance)


def verify(activation: str, variant: Variant, x: Tensor) -> None:
    """Run the variant on x, forward and backward, and check value and gradient."""
    grad = torch.randn_like(x).sign()
    leaf = x.clone().requires_grad_()
    output = variant.run(leaf.clone())
    (gradient,) = torch.autograd.grad(output, leaf, grad)
    check(activation, variant, x, grad, output.detach(), gradient)
