"""Run every CUDA kernel once, on small tensors, and compare it with the CPU kernel.

Quick enough for compute-sanitizer. Little else runs on the device: inputs are created on the CPU,
and results are compared there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from _support.cases import FLOATS, SCALARS
from _support.marks import readable_id
from torch import Tensor

from inplace_ops import _ops
from inplace_ops.activations import ACTIVATIONS, Activation

# Enough whole tiles for accesses of 16 bytes, and a rest. No memory follows the last element, and
# its byte of packed bits is not full.
LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], list[int] | None]] = {
    "dense": (lambda t: t.clone().view(3, -1, 2), None),
    "rows": (lambda t: torch.cat([t, t])[:131088].view(-1, 48)[:, :24], None),
    "misaligned": (lambda t: t[:1051].clone()[1:].view(3, 50, 7), None),
    "stepped": (lambda t: t[:2100].clone().view(3, 50, 7, 2)[..., 1], None),
    "permuted": (lambda t: t[:1050].clone().view(3, 50, 7).permute(1, 2, 0), [2, 0, 1]),
}
# CPU and GPU may round to different neighbors, also on the grid of the derivative.
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 2e-2}


def on(device: torch.device, like: Tensor) -> Tensor:
    """Return a copy on a device, with the same strides and the same alignment."""
    base = like if like._base is None else like._base
    copy = base.to(device, copy=True)
    return copy.as_strided(like.shape, like.stride(), like.storage_offset())


def run_all(
    x: Tensor, grad: Tensor, dim_order: list[int] | None, device: torch.device
) -> list[Tensor]:
    """Return the results of every in-place op and every backward op, on copies of x and grad."""
    results = []
    g = on(device, grad)
    for activation in ACTIVATIONS:
        ops = activation.ops
        scalars = [SCALARS[name] for name in activation.scalars]
        plain = on(device, x)
        ops.in_place(plain, dim_order, *scalars)
        results.append(plain)
        if activation.is_piecewise_linear:
            results.append(ops.backward["output"](g, plain, dim_order, *scalars))
        for save, op in ops.save_in_place.items():
            default = activation.default_bits(save, x.dtype)
            for planes in {1, default, 8} if save == "output" else {default}:
                y = on(device, x)
                packed = op(y, planes, dim_order, *scalars)
                saved = [y, packed] if save == "output" else [packed]
                differentiate = partial(ops.backward[save], g, *saved, dim_order, *scalars)
                results += [y, differentiate()]
                if save == "output":
                    # The result has the factor f''/f', which backward multiplies by f'. Multiply
                    # here too, as where f' is 0 the factor may have any value.
                    second = ops.double_backward(g, g, y, packed, dim_order)
                    results.append(second * differentiate())
    return results


@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS, ids=readable_id)
def test_every_kernel(dtype: torch.dtype, layout: str, device: torch.device) -> None:
    arrange, order = LAYOUTS[layout]
    values = 3 * torch.randn(2**16 + 26, dtype=torch.float64)
    # f''/f', a factor of double backward, changes fast around an activation's minimum.
    values = torch.where((values + 1.2).abs() < 1, 1.0, values)
    x = arrange(values.to(dtype))
    grad = arrange(torch.rand_like(values).to(dtype))
    expected = run_all(x, grad, order, torch.device("cpu"))
    actual = run_all(x, grad, order, device)
    tolerance = TOLERANCE[dtype]
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.cpu(), e, rtol=tolerance, atol=tolerance)


# The shape of a norm's input, and the dimensions in which the scale and shift of channels and the
# statistics of rows differ. An access of 16 bytes has one channel, two channels or a channel for
# each element. Planes of 7 elements are shorter than an access in 16-bit dtypes, which then make
# accesses of one element.
NORMALIZED: dict[str, tuple[tuple[int, ...], int, int | None]] = {
    "planes": ((70, 16, 64), 1, None),
    "split_planes": ((500, 3, 49), 1, None),
    "pixels": ((4100, 16), 1, None),
    "rows": ((4100, 16), 1, 0),
    "small_planes": ((70, 3, 7), 1, None),
}


def steps(*shape: int, count: int, size: float) -> Tensor:
    """Return multiples of `size`, up to `count`, with exact sums and products in every dtype."""
    return size * torch.randint(-count, count + 1, shape).double()


def scale_shift_of(x: Tensor, dim: int) -> Tensor:
    count = x.shape[dim]
    affine = torch.stack([1.5 + steps(count, count=1, size=0.5), steps(count, count=2, size=0.25)])
    shape = [count if d == dim else 1 for d in range(x.dim())]
    return affine.to(_ops.affine_dtype(x.dtype)).view(2, *shape)


def run_normalized(
    x: Tensor,
    grad: Tensor,
    channel_affine: Tensor,
    row_statistics: Tensor | None,
    device: torch.device,
) -> list[Tensor]:
    """Return the results of every op after a norm, on copies of the tensors."""
    norm = (
        channel_affine.to(device),
        None if row_statistics is None else row_statistics.to(device),
        None,
    )
    x, grad = x.to(device), grad.to(device)
    strided = torch.cat([grad, grad], 1).narrow(1, 0, grad.size(1))
    casts: list[dict[str, Any]] = [{}]
    if x.dtype == torch.float32:
        casts += [{"dtype": dtype} for dtype in _ops.CAST_DTYPES]
    if x.dtype in _ops.CAST_DTYPES:
        casts.append({"in_float32": True})
    results = [_ops.NORMALIZE(x, *norm, **cast) for cast in casts]
    for addend in (grad, strided):
        results += [op(x, *norm[:2], addend, None) for op in _ops.SUM_OPS]
    for activation in ACTIVATIONS:
        ops = activation.ops
        scalars = [SCALARS[name] for name in activation.scalars]
        results += [ops.recompute(x, *norm, *scalars, **cast) for cast in casts]
        for gradient in (grad, strided):
            results.append(ops.backward["recompute"](gradient, x, *norm, *scalars))
            if row_statistics is None:
                results += run_batch_norm(activation, gradient, x, norm[0], scalars)
    return results


def run_batch_norm(
    activation: Activation, grad: Tensor, x: Tensor, affine: Tensor, scalars: list[float]
) -> list[Tensor]:
    """Return the gradients of x, and of weight and bias as means instead of sums.

    The means have the dtype of x: a CPU rounds what it sums to that dtype, and a GPU does not.
    """
    scale, shift = affine.flatten(1)
    gradients = activation.ops.backward_batch_norm(grad, x, affine, shift, scale, None, *scalars)
    means = [total * scale.numel() / x.numel() for total in gradients[1:]]
    return [gradients[0], *(mean.to(x.dtype) for mean in means)]


@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("layout", NORMALIZED)
@pytest.mark.parametrize("dtype", FLOATS, ids=readable_id)
def test_every_kernel_after_a_norm(dtype: torch.dtype, layout: str, device: torch.device) -> None:
    shape, channels, rows = NORMALIZED[layout]
    x = steps(*shape, count=8, size=0.25).to(dtype)
    grad = torch.rand(shape).to(dtype)
    affine = scale_shift_of(x, channels), None if rows is None else scale_shift_of(x, rows)
    expected = run_normalized(x, grad, *affine, torch.device("cpu"))
    actual = run_normalized(x, grad, *affine, device)
    for a, e in zip(actual, expected, strict=True):
        tolerance = TOLERANCE[e.dtype]
        torch.testing.assert_close(a.cpu(), e, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=readable_id)
def test_affine_of_a_norm(dtype: torch.dtype, device: torch.device) -> None:
    statistics = [torch.randn(count, dtype=dtype) for count in (100, 100, 300, 300)]
    shape, channels_per_group = [2, 2, 300], 6
    expected = _ops.NORM_AFFINE(*statistics, shape, channels_per_group)
    actual = _ops.NORM_AFFINE(*(part.to(device) for part in statistics), shape, channels_per_group)
    torch.testing.assert_close(actual.cpu(), expected)
