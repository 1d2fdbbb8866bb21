"""The ops that compute the backward of a batch norm together with that of its activation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from _support.cases import FLOATS, SCALARS
from _support.layouts import GRADIENTS
from _support.marks import in_turn, readable_id
from torch import Tensor

from inplace_ops import _ops
from inplace_ops.activations import ACTIVATIONS, RELU, SILU, Activation

LAST, LAST_3D = torch.channels_last, torch.channels_last_3d
# Shapes and memory formats. The numbers are odd, or longer than a block of the CPU's loops.
SHAPES: dict[str, tuple[tuple[int, ...], torch.memory_format]] = {
    "planes": ((3, 5, 7, 7), torch.contiguous_format),
    "large planes": ((2, 3, 61, 33), torch.contiguous_format),
    "planes in pieces": ((3, 70, 19, 33), torch.contiguous_format),
    "small planes": ((9, 130, 2, 2), torch.contiguous_format),
    "1 x 1": ((40, 24, 1, 1), torch.contiguous_format),
    "volumes": ((2, 3, 4, 5, 7), torch.contiguous_format),
    "sequences": ((4, 6, 50), torch.contiguous_format),
    "rows": ((67, 13), torch.contiguous_format),
    "channels last": ((3, 24, 9, 5), LAST),
    "many channels last": ((2, 700, 5, 13), LAST),
    "three channels last": ((2, 3, 37, 31), LAST),
    "volumes, channels last": ((2, 8, 3, 4, 5), LAST_3D),
    "one channel": ((3, 1, 20, 30), torch.contiguous_format),
    "one sample": ((1, 6, 11, 13), torch.contiguous_format),
}


class BatchNorm(NamedTuple):
    """A batch norm's input, and the other arguments of the ops, computed in float64."""

    x: Tensor
    channel_affine: Tensor
    mean: Tensor
    rstd: Tensor

    @property
    def dims(self) -> list[int]:
        """The dimensions that the statistics are taken over."""
        return [d for d in range(self.x.dim()) if d != 1]

    def of_channel(self, vector: Tensor) -> Tensor:
        """Return one number for each channel, in float64, in a shape that broadcasts over x."""
        return vector.double().view(-1, *(1 for _ in self.dims[1:]))


def batch_norm(x: Tensor) -> BatchNorm:
    """Return a batch norm of x with random weight and bias."""
    dims = [d for d in range(x.dim()) if d != 1]
    kind, channels = _ops.affine_dtype(x.dtype), x.shape[1]
    weight, bias = torch.randn(2, channels, dtype=torch.float64, device=x.device)
    wide = x.double()
    mean, rstd = wide.mean(dims), (wide.var(dims, unbiased=False) + 1e-5).rsqrt()
    affine = torch.stack([weight * rstd, bias - mean * weight * rstd])
    affine = affine.view(2, 1, channels, *(1 for _ in dims[1:]))
    return BatchNorm(x, affine.to(kind), mean.to(kind), rstd.to(kind))


class Expected(NamedTuple):
    """Gradients in float64, and bounds of the errors of an op.

    Attributes:
        values: The gradients of x, weight and bias.
        errors: A bound for each.
    """

    values: tuple[Tensor, Tensor, Tensor]
    errors: tuple[Tensor, Tensor, Tensor]


def expected(
    norm: BatchNorm, grad: Tensor, activation: Activation, scalars: list[float]
) -> Expected:
    """Return the gradients by the formulas of `csrc/batch_norm.h`, in float64.

    A kernel may round the gradient of z to the dtype, as PyTorch does. It rounds its result, and
    the arithmetic before, which is in the affine's dtype.
    """
    x, channel_affine, mean, rstd = norm
    z = _ops.NORMALIZE(x, channel_affine, None, _ops.dim_order_of(x))
    leaf = z.double().requires_grad_()
    (g,) = torch.autograd.grad(activation.torch_function(leaf, *scalars), leaf, grad.double())
    centered = x.double() - norm.of_channel(mean)
    scale, wide_rstd = channel_affine[0, 0].double(), norm.of_channel(rstd)
    elements = x.numel() / x.shape[1]

    def total(values: Tensor) -> Tensor:
        return norm.of_channel(values.sum(norm.dims))

    grad_bias, grad_weight = total(g), wide_rstd * total(g * centered)
    correction = centered * wide_rstd * grad_weight / elements + grad_bias / elements
    grad_x = scale * (g - correction)

    unit = torch.finfo(x.dtype).eps
    arithmetic = 16 * torch.finfo(mean.dtype).eps
    if x.dtype is torch.float64:
        of_g = arithmetic * (g.abs() + grad.abs())
    else:
        of_g = unit * g.abs() + (activation.arithmetic_error + arithmetic) * grad.double().abs()
    of_bias = total(of_g + arithmetic * g.abs())
    of_weight = wide_rstd * total((of_g + arithmetic * g.abs()) * centered.abs())
    of_correction = (centered.abs() * wide_rstd * of_weight + of_bias) / elements
    of_x = scale.abs() * (of_g + of_correction + arithmetic * (g.abs() + correction.abs()))
    of_x = of_x + unit * grad_x.abs() + torch.finfo(x.dtype).tiny
    errors = of_x, of_weight.flatten(), of_bias.flatten()
    return Expected((grad_x, grad_weight.flatten(), grad_bias.flatten()), errors)


def run(
    norm: BatchNorm, grad: Tensor, activation: Activation
) -> tuple[tuple[Tensor, Tensor, Tensor], list[float]]:
    """Return the op's results, and the activation's scalar arguments."""
    scalars = [SCALARS[name] for name in activation.scalars]
    op = activation.ops.backward_batch_norm
    x, channel_affine, mean, rstd = norm
    results = op(grad, x, channel_affine, mean, rstd, _ops.dim_order_of(x), *scalars)
    return results, scalars


def check(norm: BatchNorm, grad: Tensor, activation: Activation) -> None:
    """Compare an op with the formulas, in float64."""
    actual, scalars = run(norm, grad, activation)
    reference = expected(norm, grad, activation, scalars)
    names = ("x", "weight", "bias")
    for name, value, other, error in zip(names, actual, *reference, strict=True):
        excess = (value.double() - other).abs() - error
        assert not (excess > 0).any(), f"{name}: {float(excess.max()):.3g} above the bound"
    order = _ops.dim_order_of(norm.x)
    assert actual[0].stride() == _ops.dense_strides(norm.x.shape, order)
    assert actual[0].dtype is norm.x.dtype
    assert actual[1].shape == actual[2].shape == norm.mean.shape


def inputs_of(shape: str, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    sizes, memory_format = SHAPES[shape]
    x, grad = (
        torch.randn(sizes, device=device).to(dtype).contiguous(memory_format=memory_format)
        for _ in range(2)
    )
    return x * 1.5 + 0.7, grad


@pytest.mark.parametrize(
    ("activation", "shape", "dtype"), in_turn(ACTIVATIONS, SHAPES, FLOATS), ids=readable_id
)
def test_gradients_are_those_of_the_formulas(
    activation: Activation, shape: str, dtype: torch.dtype, device: torch.device
) -> None:
    x, grad = inputs_of(shape, dtype, device)
    check(batch_norm(x), grad, activation)


def channels_of_more(grad: Tensor) -> Tensor:
    """Return a gradient that is a slice of a larger tensor's channels, as that of torch.cat."""
    return torch.cat([grad, grad, grad], 1)[:, grad.shape[1] : 2 * grad.shape[1]]


ARRANGED: dict[str, Callable[[Tensor], Tensor]] = {
    **{
        name: lambda grad, make=make: make(
            grad.shape, lambda shape: torch.randn(shape, device=grad.device).to(grad.dtype)
        )
        for name, make in GRADIENTS.items()
    },
    "some channels": channels_of_more,
    "every second sample": lambda grad: torch.cat([grad, grad])[::2],
    "part of the plane": lambda grad: torch.cat([grad, grad], -1)[..., 1 : 1 + grad.shape[-1]],
    "other format": lambda grad: grad.transpose(0, 1).contiguous().transpose(0, 1),
}


@pytest.mark.parametrize(
    ("shape", "arranged", "dtype"), in_turn(SHAPES, ARRANGED, FLOATS), ids=readable_id
)
def test_gradient_may_have_any_layout(
    shape: str, arranged: str, dtype: torch.dtype, device: torch.device
) -> None:
    x, grad = inputs_of(shape, dtype, device)
    check(batch_norm(x), ARRANGED[arranged](grad), SILU)


@pytest.mark.parametrize("dtype", FLOATS, ids=readable_id)
@pytest.mark.parametrize("shape", ["planes", "channels last", "rows"])
def test_input_may_have_another_layout(
    shape: str, dtype: torch.dtype, device: torch.device
) -> None:
    """The op iterates in `dim_order`, whatever the input's strides."""
    x, grad = inputs_of(shape, dtype, device)
    (strided,) = (ARRANGED["part of the plane"](x),)
    norm = batch_norm(strided)
    same, _ = run(norm._replace(x=strided.contiguous()), grad.contiguous(), SILU)
    op, rest = SILU.ops.backward_batch_norm, norm[1:]
    for actual, other in zip(op(grad, strided, *rest, None), same, strict=True):
        assert torch.equal(actual, other)


@pytest.mark.parametrize("shape", ["large planes", "planes in pieces", "three channels last"])
def test_large_mean_does_not_cancel(shape: str, device: torch.device) -> None:
    """The sums are of products with x - mean, so a mean of 1000 / rstd costs no accuracy.

    The activation's own input z does lose accuracy. ReLU's gradient does not depend on it, if no z
    is near 0.
    """
    x, grad = inputs_of(shape, torch.float32, device)
    x = x.sign() + 0.01 * x + 1000
    norm = batch_norm(x)
    norm.channel_affine[0] = norm.of_channel(norm.rstd)
    norm.channel_affine[1] = -norm.of_channel(norm.mean * norm.rstd)
    check(norm, grad, RELU)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=readable_id)
def test_results_are_the_same_in_every_run(activation: Activation, device: torch.device) -> None:
    x, grad = inputs_of("planes in pieces", torch.float32, device)
    norm = batch_norm(x)
    for first, second in zip(*(run(norm, grad, activation)[0] for _ in range(2)), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_gradients_that_relu_discards_do_not_count(value: float, device: torch.device) -> None:
    x, grad = inputs_of("planes", torch.float32, device)
    norm = batch_norm(x)
    z = _ops.NORMALIZE(x, norm.channel_affine, None, None)
    discarded, _ = run(norm, grad.masked_fill(z <= 0, value), RELU)
    kept, _ = run(norm, grad.masked_fill(z <= 0, 0.0), RELU)
    for actual, other in zip(discarded, kept, strict=True):
        assert torch.equal(actual, other)
    passed_on = (z > 0).sum(norm.dims) > 0
    for gradient in run(norm, torch.full_like(grad, value), RELU)[0]:
        of_channels = gradient.movedim(1, 0) if gradient.dim() > 1 else gradient
        assert not of_channels[passed_on].isfinite().any()


WRONG: dict[str, tuple[str, Callable[[Any], object]]] = {
    "too few": ("mean", lambda t: t[1:]),
    "too many": ("rstd", lambda t: torch.cat([t, t])),
    "wide": ("mean", lambda t: t.double()),
    "half": ("rstd", lambda t: t.half()),
    "strided": ("mean", lambda t: torch.stack([t, t], 1)[:, 0]),
    "strided affine": ("channel_affine", lambda t: torch.stack([t, t], -1)[..., 0]),
    "affine of rows": ("channel_affine", lambda t: t.transpose(2, 3)),
    "affine of samples": ("channel_affine", lambda t: torch.cat([t] * 3, 1)),
    "no channels": ("x", lambda t: t[:, :0]),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_arguments_are_rejected(wrong: str, device: torch.device) -> None:
    x, grad = (t[..., :5, :] for t in inputs_of("planes", torch.float32, device))
    arguments: dict[str, Any] = {"grad": grad, **batch_norm(x)._asdict(), "dim_order": None}
    RELU.ops.backward_batch_norm(**arguments)
    name, change = WRONG[wrong]
    arguments[name] = change(arguments[name])
    if name == "x":
        arguments["grad"] = arguments["x"]
    with pytest.raises(RuntimeError, match="must have elements, and channels in dimension 1"):
        RELU.ops.backward_batch_norm(**arguments)


def test_one_dimension_is_rejected(device: torch.device) -> None:
    x = torch.randn(5, device=device)
    with pytest.raises(RuntimeError, match="must have elements, and channels in dimension 1"):
        RELU.ops.backward_batch_norm(x, x, torch.ones(2, 5, device=device), x, x, None)
