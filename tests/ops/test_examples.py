"""The save modes by example: small inputs, what is saved for backward, and the gradient.

Read this file from the top to learn what each save mode saves. Every expected number follows from
the comments next to it. Each example calls

- an op of `inplace_ops._ops`, which overwrites its argument and returns the packed bits;
- the public function, whose autograd node saves those bits, and whose gradient is PyTorch's.

tests/recompute/test_engine_examples.py shows what a converted model saves.

Packed bits (csrc/bit_planes.h): k bits per element of a tensor, in k bit planes, as a uint8 tensor
of shape (k, ceil(elements / 8)). Byte g of plane i has bit i of the elements 8g to 8g + 7. A binary
literal reads from right to left: its last digit belongs to element 8g. Unused bits are 0.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from inplace_ops import _ops, relu_, silu_

RELU, SILU = _ops.ALL["relu"], _ops.ALL["silu"]
INCOMING = 10.0  # the gradient of the output, for every element


def bit_planes(*planes: list[int]) -> Tensor:
    """Return packed bits: a list of bytes for each plane, from the lowest bit up."""
    return torch.tensor(planes, dtype=torch.uint8)


def saved_by(y: Tensor) -> tuple[Tensor | None, ...]:
    """Return what the autograd node of an activation's output saves for backward."""
    return y.grad_fn.saved_tensors


def gradient_of(x: Tensor, y: Tensor) -> Tensor:
    return torch.autograd.grad(y, x, torch.full_like(y, INCOMING))[0]


# ---- save="mask": one bit per element. The output may be overwritten afterwards. ----


def test_mask_of_relu() -> None:
    """The bit is 1 where the gradient passes: ReLU's derivative is 1 where x > 0, otherwise 0."""
    x = torch.tensor([-1.0, 2.0, 0.0, 3.0, 0.5, -4.0, -0.5, 6.0, 7.0, -8.0])
    expected = torch.tensor([0.0, 2.0, 0.0, 3.0, 0.5, 0.0, 0.0, 6.0, 7.0, 0.0])
    # x > 0 at the elements 1, 3, 4 and 7 of the first byte, and at element 8, the lowest bit of the
    # second byte. Two of the second byte's bits are used.
    expected_bits = bit_planes([0b10011010, 0b00000001])

    y = x.clone()
    bits = RELU.save_in_place["mask"](y, 1, None)  # 1: the number of bits per element
    assert torch.equal(y, expected)
    assert torch.equal(bits, expected_bits)

    leaf = x.requires_grad_()
    y = relu_(leaf * 1, save="mask")  # a leaf that requires grad cannot be overwritten
    (saved,) = saved_by(y)
    assert torch.equal(saved, expected_bits)
    y.detach().zero_()  # backward does not read the output
    assert gradient_of(leaf, y).tolist() == [0, 10, 0, 10, 10, 0, 0, 10, 10, 0]


# ---- save="output": the output itself, which the next layer often saves anyway. ----


# A smooth activation needs bits of x in addition to its output y. SiLU, x * sigmoid(x), falls up to
# its minimum at x = -1.27846 and then rises, so two x have one y; and y is rounded, so neighboring
# x have one y. csrc/inverse.h: a code of k bits has the branch as its highest bit, 1 left of the
# minimum, and below it k - 1 bits of x's bit pattern.


def test_output_and_bits_of_silu_in_bfloat16() -> None:
    """5 bits: the branch, and the lowest four bits of the pattern. x is recovered exactly.

    A bfloat16 has a sign, 8 bits of exponent and 7 bits of mantissa, the last four of which are
    saved:

        x            sign exponent mantissa   branch   code
        -1.28125        1 01111111 010 0100   left    10100
        -1.2734375      1 01111111 010 0011   right   00011
         1.0            0 01111111 000 0000   right   00000
         1.0625         0 01111111 000 1000   right   01000
        -2.125          1 10000000 000 1000   left    11000
    """
    x = torch.tensor([-1.28125, -1.2734375, 1.0, 1.0625, -2.125], dtype=torch.bfloat16)
    # x / (1 + exp(-x)) is -0.278464, -0.278462, 0.731059, 0.789616, -0.226718. In bfloat16 numbers
    # have distances of 2^-9 from 0.25 to 0.5, so that the first two inputs have one output.
    expected = [-143 / 512, -143 / 512, 187 / 256, 202 / 256, -116 / 512]
    expected_bits = bit_planes(
        [0b00010],  # lowest bit of the pattern: element 1
        [0b00010],  # element 1
        [0b00001],  # element 0
        [0b11000],  # elements 3 and 4
        [0b10001],  # left of the minimum: elements 0 and 4
    )

    y = x.clone()
    bits = SILU.save_in_place["output"](y, 5, None)
    assert y.tolist() == expected
    assert torch.equal(bits, expected_bits)

    leaf = x.requires_grad_()
    y = silu_(leaf * 1, save="output")  # 5 bits are the default in bfloat16
    saved_output, saved_bits = saved_by(y)
    assert saved_output.data_ptr() == y.data_ptr()
    assert torch.equal(saved_bits, expected_bits)
    # s (1 + x (1 - s)) with s = sigmoid(x), times 10. The first two inputs, which have one output,
    # have gradients of different sign.
    gradient = [-0.006055678, 0.010986571, 9.276705119, 9.459666607, -0.958382922]
    expected_gradient = torch.tensor(gradient, dtype=torch.bfloat16)
    torch.testing.assert_close(gradient_of(leaf, y), expected_gradient)


# ---- save="derivative": the derivative, on a grid. The output may be overwritten afterwards. ----

# csrc/derivative_grid.h: code c represents the derivative (c - zero) / steps, and code 0 NaN. The
# grid covers the range of the derivative, for SiLU -0.09984 to 1.09984, and contains 0 and 1. It
# has steps = 212 and zero = 22 with 8 bits, and steps = 54625 and zero = 5455 with 16.


def test_derivative_of_silu_in_8_bits() -> None:
    """8 bits per element, the default in float16 and bfloat16.

    x     silu'(x)    212 silu'(x) + 22   code, rounded    (code - 22) / 212
      0    0.5                   128      128  10000000      0.5
      1    0.9276705             218.67   219  11011011    197 / 212
     -1    0.0723295              37.33    37  00100101     15 / 212
     20    1.00000004            234       234  11101010      1
    -20   -0.00000004             22        22  00010110      0
     -2   -0.0907842               2.75      3  00000011    -19 / 212
    """
    x = torch.tensor([0.0, 1.0, -1.0, 20.0, -20.0, -2.0], dtype=torch.bfloat16)
    expected_bits = bit_planes(
        [0b100110],  # odd codes: 219, 37 and 3, the elements 1, 2 and 5
        [0b111010],
        [0b010100],
        [0b001010],
        [0b010010],
        [0b001100],
        [0b001010],
        [0b001011],  # codes from 128 on: 128, 219 and 234, the elements 0, 1 and 3
    )

    y = x.clone()
    bits = SILU.save_in_place["derivative"](y, 8, None)
    torch.testing.assert_close(y, nn.functional.silu(x))
    assert torch.equal(bits, expected_bits)

    leaf = x.requires_grad_()
    y = silu_(leaf * 1, save="derivative")
    (saved,) = saved_by(y)
    assert torch.equal(saved, expected_bits)
    y.detach().zero_()  # backward does not read the output
    expected_gradient = INCOMING * torch.tensor([106, 197, 15, 212, 0, -19]) / 212
    assert torch.equal(gradient_of(leaf, y), expected_gradient.bfloat16())
