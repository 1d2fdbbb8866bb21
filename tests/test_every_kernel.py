"""Every CUDA kernel once, on small tensors, against the CPU's: quick enough for compute-sanitizer.

Little else runs on the device: the inputs are made on the CPU, and the results compared there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from activations import FLOATS, SCALARS
from torch import Tensor

from inplace_ops import _ops
from inplace_ops.activations import ACTIVATIONS

# Whole tiles, enough of them for accesses of 16 bytes, and a rest. Nothing follows the last element
# in memory, and its byte of bits is not full.
LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], list[int] | None]] = {
    "dense": (lambda t: t.clone().view(3, -1, 2), None),
    "rows": (lambda t: torch.cat([t, t])[:131088].view(-1, 48)[:, :24], None),
    "misaligned": (lambda t: t[:1051].clone()[1:].view(3, 50, 7), None),
    "stepped": (lambda t: t[:2100].clone().view(3, 50, 7, 2)[..., 1], None),
    "permuted": (lambda t: t[:1050].clone().view(3, 50, 7).permute(1, 2, 0), [2, 0, 1]),
}
# Both sides may round to different neighbours, on the derivative's grid too.
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 2e-2}


def on(device: torch.device, like: Tensor) -> Tensor:
    """A copy on a device, with the same strides and the same place in 16 bytes."""
    base = like if like._base is None else like._base
    copy = base.to(device, copy=True)
    return copy.as_strided(like.shape, like.stride(), like.storage_offset())


def run_all(
    x: Tensor, grad: Tensor, dim_order: list[int] | None, device: torch.device
) -> list[Tensor]:
    """Every op in place, and every backward, on copies of x and grad."""
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
                    # f''/f', with which backward multiplies f': where f' vanishes, it may be any.
                    second = ops.double_backward(g, g, y, packed, dim_order)
                    results.append(second * differentiate())
    return results


@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_every_kernel(dtype: torch.dtype, layout: str, device: torch.device) -> None:
    arrange, order = LAYOUTS[layout]
    values = 3 * torch.randn(2**16 + 26, dtype=torch.float64)
    # f''/f', in the second derivative, is steep around a smooth's minimum.
    values = torch.where((values + 1.2).abs() < 1, 1.0, values)
    x = arrange(values.to(dtype))
    grad = arrange(torch.rand_like(values).to(dtype))
    expected = run_all(x, grad, order, torch.device("cpu"))
    actual = run_all(x, grad, order, device)
    tolerance = TOLERANCE[dtype]
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.cpu(), e, rtol=tolerance, atol=tolerance)


# Of a norm's input: its shape, and in which dimensions the affine of channels and of rows differ. An
# access of 16 bytes has one channel or two, or one for each element, or there is none.
NORMALIZED: dict[str, tuple[tuple[int, ...], int, int | None]] = {
    "planes": ((70, 16, 64), 1, None),
    "wide": ((500, 3, 49), 1, None),
    "neighbours": ((4100, 16), 1, 0),
    "narrow": ((70, 3, 7), 1, None),
}


def steps(*shape: int, count: int, size: float) -> Tensor:
    """Multiples of a step: so few that their sums and products are exact in every dtype."""
    return size * torch.randint(-count, count + 1, shape).double()


def scale_shift_of(x: Tensor, dim: int) -> Tensor:
    count = x.shape[dim]
    affine = torch.stack([1.5 + steps(count, count=1, size=0.5), steps(count, count=2, size=0.25)])
    shape = [count if d == dim else 1 for d in range(x.dim())]
    return affine.to(_ops.affine_dtype(x.dtype)).view(2, *shape)


def run_normalized(
    x: Tensor, grad: Tensor, channels: Tensor, rows: Tensor | None, device: torch.device
) -> list[Tensor]:
    affine = (channels.to(device), None if rows is None else rows.to(device), None)
    x, grad = x.to(device), grad.to(device)
    strided = torch.cat([grad, grad], 1).narrow(1, 0, grad.size(1))
    casts = (None, *_ops.CAST_DTYPES) if x.dtype == torch.float32 else (None,)
    results = [_ops.NORMALIZE(x, *affine, dtype=cast) for cast in casts]
    for addend in (grad, strided):
        results += [op(x, *affine[:2], addend, None) for op in _ops.SUM_OPS]
    for activation in ACTIVATIONS:
        ops = activation.ops
        scalars = [SCALARS[name] for name in activation.scalars]
        results += [ops.recompute(x, *affine, *scalars, dtype=cast) for cast in casts]
        for gradient in (grad, strided):
            results.append(ops.backward["recompute"](gradient, x, *affine, *scalars))
    return results


@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("kind", NORMALIZED)
@pytest.mark.parametrize("dtype", FLOATS)
def test_every_kernel_after_a_norm(dtype: torch.dtype, kind: str, device: torch.device) -> None:
    shape, channels, rows = NORMALIZED[kind]
    x = steps(*shape, count=8, size=0.25).to(dtype)
    grad = torch.rand(shape).to(dtype)
    affine = scale_shift_of(x, channels), None if rows is None else scale_shift_of(x, rows)
    expected = run_normalized(x, grad, *affine, torch.device("cpu"))
    actual = run_normalized(x, grad, *affine, device)
    for a, e in zip(actual, expected, strict=True):
        tolerance = TOLERANCE[e.dtype]
        torch.testing.assert_close(a.cpu(), e, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_maps_of_a_norm(dtype: torch.dtype, device: torch.device) -> None:
    statistics = [torch.randn(count, dtype=dtype) for count in (100, 100, 300, 300)]
    shape, channels_per_group = [2, 2, 300], 6
    expected = _ops.NORM_AFFINE(*statistics, shape, channels_per_group)
    actual = _ops.NORM_AFFINE(*(part.to(device) for part in statistics), shape, channels_per_group)
    torch.testing.assert_close(actual.cpu(), expected)
