"""Every CUDA kernel once, on small tensors, against the CPU's: quick enough for compute-sanitizer.

Little else runs on the device: the inputs are made on the CPU, and the results compared there.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from activations import DERIVATIVE_DEFAULT_BITS, FLOATS, SILU_DEFAULT_BITS
from torch import Tensor

from inplace_ops import _ops

SLOPE = 0.2
# Nothing follows the last element in memory, and its byte of bits is not full.
LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], list[int]]] = {
    "dense": (lambda t: t[:1050].clone().view(3, 50, 7), []),
    "misaligned": (lambda t: t[:1051].clone()[1:].view(3, 50, 7), []),
    "stepped": (lambda t: t[:2100].clone().view(3, 50, 7, 2)[..., 1], []),
    "permuted": (lambda t: t[:1050].clone().view(3, 50, 7).permute(1, 2, 0), [2, 0, 1]),
}
# Both sides may round to different neighbours, on the derivative's grid too.
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 2e-2}


def on(device: torch.device, like: Tensor) -> Tensor:
    """A copy on a device, with the same strides and the same place in 16 bytes."""
    base = like if like._base is None else like._base
    copy = base.to(device, copy=True)
    return copy.as_strided(like.shape, like.stride(), like.storage_offset())


def run_all(x: Tensor, grad: Tensor, order: list[int], device: torch.device) -> list[Tensor]:
    """Every op on copies of x and grad."""
    results = []

    def forward(
        op: Callable[..., None], keeping_op: Callable[..., None], planes: int, *scalars: float
    ) -> tuple[Tensor, Tensor]:
        without_bits, y = on(device, x), on(device, x)
        bits = _ops.empty_bits(y, planes)
        op(without_bits, order, *scalars)
        keeping_op(y, bits, order, *scalars)
        results.extend([without_bits, y])
        return y, bits

    g = on(device, grad)
    y, bits = forward(_ops.relu_, _ops.relu_with_mask_, 1)
    results.append(_ops.relu_backward_mask(g, bits, order))
    results.append(_ops.relu_backward_output(g, y, order))
    y, bits = forward(_ops.leaky_relu_, _ops.leaky_relu_with_mask_, 1, SLOPE)
    results.append(_ops.leaky_relu_backward_mask(g, bits, order, SLOPE))
    results.append(_ops.leaky_relu_backward_output(g, y, order, SLOPE))
    for planes in (1, SILU_DEFAULT_BITS[x.dtype]):
        y, bits = forward(_ops.silu_, _ops.silu_with_bits_, planes)
        results.append(_ops.silu_backward_output(g, y, bits, order))
        results.append(_ops.silu_double_backward(g, g, y, bits, order))
    planes = DERIVATIVE_DEFAULT_BITS[x.dtype]
    _, bits = forward(_ops.silu_, _ops.silu_with_derivative_, planes)
    results.append(_ops.silu_backward_derivative(g, bits, order))
    return results


@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_every_kernel(dtype: torch.dtype, layout: str, device: torch.device) -> None:
    arrange, order = LAYOUTS[layout]
    values = 3 * torch.randn(2100, dtype=torch.float64)
    # silu''/silu', in the second derivative, is steep around silu's minimum.
    values = torch.where((values + 1.28).abs() < 0.5, -2.0, values)
    x = arrange(values.to(dtype))
    grad = arrange(torch.rand(2100, dtype=torch.float64).to(dtype))
    expected = run_all(x, grad, order, torch.device("cpu"))
    actual = run_all(x, grad, order, device)
    tolerance = TOLERANCE[dtype]
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.cpu(), e, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str
)
def test_every_integer_kernel(dtype: torch.dtype, layout: str, device: torch.device) -> None:
    arrange, order = LAYOUTS[layout]
    x = arrange(torch.randint(100, (2100,)).sub_(50).to(dtype))
    y = on(device, x)
    _ops.relu_(y, order)
    assert torch.equal(y.cpu(), x.relu())
