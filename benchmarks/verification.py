"""What a variant must compute before it is timed: PyTorch's values and gradients."""

from __future__ import annotations

import torch
from torch import Tensor
from variants import VARIANTS, Variant

# The tests' limits of the derivative's error, where they are more than torch.testing's default
# tolerances; the rounding of the arithmetic on both sides comes on top.
DERIVATIVE_ERROR = {
    "output, 1 bit": {
        torch.float64: 5e-9,
        torch.float32: 4.5e-5,
        torch.float16: 3.9e-3,
        torch.bfloat16: 1.2e-2,
    },
    "derivative": {
        torch.float64: 1.6e-10,
        torch.float32: 9.2e-6,
        torch.float16: 2.4e-3,
        torch.bfloat16: 2.4e-3,
    },
}


def check(
    activation: str, variant: Variant, x: Tensor, grad: Tensor, value: Tensor, gradient: Tensor
) -> None:
    """Raise unless value and gradient are PyTorch's: equal, or for SiLU within what is documented.

    What is documented holds for a unit gradient: `grad` is 1 or -1 everywhere.
    """
    leaf = x.detach().clone().requires_grad_()
    expected_value = VARIANTS[activation][0].run(leaf)
    (expected_gradient,) = torch.autograd.grad(expected_value, leaf, grad)
    tolerance = {} if activation == "SiLU" else {"rtol": 0.0, "atol": 0.0}
    torch.testing.assert_close(value, expected_value.detach(), **tolerance)
    if variant.name in DERIVATIVE_ERROR:
        arithmetic = torch.finfo(torch.promote_types(x.dtype, torch.float32))
        error = DERIVATIVE_ERROR[variant.name][x.dtype] + 4 * arithmetic.eps
        tolerance = {"rtol": torch.finfo(x.dtype).eps, "atol": error}
    torch.testing.assert_close(gradient, expected_gradient, **tolerance)


def verify(activation: str, variant: Variant, x: Tensor) -> None:
    """Run the variant on x, with autograd, and check what comes out."""
    grad = torch.randn_like(x).sign()
    leaf = x.clone().requires_grad_()
    output = variant.run(leaf.clone())
    (gradient,) = torch.autograd.grad(output, leaf, grad)
    check(activation, variant, x, grad, output.detach(), gradient)
