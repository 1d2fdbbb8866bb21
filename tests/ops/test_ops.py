"""What the private ops compute, called directly. test_direct_calls.py has calls they reject."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from _support.assertions import (
    assert_gradient,
    assert_identical,
    assert_is_cast,
    assert_values,
)
from _support.cases import FLOATS, SCALARS
from _support.marks import in_turn, quick, readable_id
from _support.norm_cases import PIECEWISE, ROWS, normalized
from _support.op_calls import (
    LAYOUTS,
    OF_EACH_KIND,
    OPS,
    arguments_of,
    name_of,
    names_of,
    planes_of,
    scale_shift_of,
)
from torch import Tensor

from inplace_ops import _ops
from inplace_ops.activations import ACTIVATIONS


def test_every_op_is_listed() -> None:
    listed = torch._C._dispatch_get_all_op_names()
    ours = {*OPS, *(ops.traced for ops in _ops.ALL.values())}
    assert {op.name() for op in ours} == {n for n in listed if n.startswith("inplace_ops::")}


@pytest.mark.parametrize(
    ("op", "layout"),
    quick(
        [
            (op, layout)
            for op in OPS
            for layout in LAYOUTS
            if op in OF_EACH_KIND or layout == "transposed"
        ],
        [(op, "transposed") for op in OF_EACH_KIND if "leaky_relu" not in name_of(op)]
        + [(op, "transposed") for op in OF_EACH_KIND if "mask" in name_of(op)],
    ),
    ids=readable_id,
)
def test_opcheck(op: torch._ops.OpOverload, layout: str, device: torch.device) -> None:
    shape = (2, 3, 5, 3)  # 90 elements do not fill the last byte of a bit plane
    torch.library.opcheck(op, tuple(arguments_of(op, device, torch.bfloat16, layout, shape)))


@pytest.mark.parametrize("activation", _ops.ALL)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_functional_ops_equal_in_place_ops(
    activation: str, layout: str, device: torch.device
) -> None:
    ops = _ops.ALL[activation]
    for save, op in ops.save_out_of_place.items():
        planes = ops.default_bits[save][torch.float32]
        x, _, *rest = arguments_of(op, device, layout=layout)
        before, expected = x.clone(), x.clone()
        expected_packed = ops.save_in_place[save](expected, planes, *rest)
        result, packed = op(x, planes, *rest)
        assert_identical(result, expected)
        assert torch.equal(packed, expected_packed)
        assert_identical(x, before)
        ops.in_place(x, *rest)
        assert_identical(x, expected)


@pytest.mark.parametrize("op", _ops.SAVING_OPS, ids=name_of)
@pytest.mark.parametrize("dtype", FLOATS, ids=readable_id)
def test_unused_bits_are_zero(
    op: torch._ops.OpOverload, dtype: torch.dtype, device: torch.device
) -> None:
    planes = planes_of(op, dtype)
    rest = arguments_of(op, device)[2:]
    for length in (*range(18), 31, 33, 511, 512, 513, 1029):
        x = torch.randn(length, device=device).to(dtype) - 1
        bits = op(x, planes, *rest)
        assert bits.shape == (planes, (length + 7) // 8)
        if length % 8:
            assert not (bits[:, -1] >> (length % 8)).any()


# Whether rstd, mean, weight and bias are given.
GIVEN = ["1111", "1110", "1101", "1100", "1011", "1000", "0011", "0010"]
GROUPS = [(1, 5, 1), (3, 12, 4), (2, 3, 1)]  # samples, channels, channels per group


@pytest.mark.parametrize(
    ("given", "sizes", "dtype"),
    in_turn(GIVEN, GROUPS, (torch.float64, torch.float32)),
    ids=readable_id,
)
def test_norm_affine_matches_float64(
    given: str, sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    samples, channels, channels_per_group = sizes
    groups = samples * channels // channels_per_group
    rstd, mean, weight, bias = (
        torch.randn(count, dtype=dtype, device=device) if is_given == "1" else None
        for count, is_given in zip((groups, groups, channels, channels), given, strict=True)
    )
    shape = [2, samples, channels, 1]
    affine = _ops.NORM_AFFINE(rstd, mean, weight, bias, shape, channels_per_group)
    assert list(affine.shape) == shape

    def spread(part: Tensor | None, otherwise: float) -> Tensor:
        if part is None:
            return torch.full((samples, channels), otherwise, dtype=torch.float64, device=device)
        if part is weight or part is bias:
            return part.double().expand(samples, channels)
        return part.double().repeat_interleave(channels_per_group).view(samples, channels)

    scale = spread(rstd, 1.0) * spread(weight, 1.0)
    product, added = spread(mean, 0.0) * scale, spread(bias, 0.0)
    # The scale, the product and the sum are rounded; this test rounds them in float64 too.
    unit = 1.01 * torch.finfo(dtype).eps
    assert ((affine[0, ..., 0].double() - scale).abs() <= unit * scale.abs()).all()
    error = unit * (2 * product.abs() + (added - product).abs())
    assert ((affine[1, ..., 0].double() - (added - product)).abs() <= error).all()


# By name: the dimensions of x along which the channel affine and the row statistics differ.
DIFFERING: dict[str, tuple[tuple[int, ...], tuple[int, ...] | None]] = {
    "none": ((), None),
    "batch_norm": ((1,), None),
    "group_norm": ((0, 1), None),
    "layer_norm": ((3,), (0, 1, 2)),
    "layer_norm_of_three": ((1, 2, 3), (0,)),
    "layer_norm_without_weight": ((0, 1), None),
    "all": ((0, 1, 2, 3), (0, 1, 2, 3)),
    "odd": ((0, 2), (1, 3)),
}


@pytest.mark.parametrize(
    ("differing", "layout", "dtype"), in_turn(DIFFERING, LAYOUTS, FLOATS), ids=readable_id
)
def test_ops_after_norm_match_reference(
    differing: str, layout: str, dtype: torch.dtype, device: torch.device
) -> None:
    arrange, dim_order = LAYOUTS[layout]
    x, grad = (arrange(3 * torch.randn(3, 5, 12, 13, device=device)).to(dtype) for _ in range(2))
    channel_dims, row_dims = DIFFERING[differing]
    # An affine may be strided.
    channel_affine = scale_shift_of(x, *channel_dims).movedim(0, -1).contiguous().movedim(-1, 0)
    row_statistics = None if row_dims is None else scale_shift_of(x, *row_dims)
    affine = (channel_affine, row_statistics, dim_order)

    z = _ops.NORMALIZE(x, *affine)
    expected, error = normalized(x, channel_affine, row_statistics)
    assert ((z.double() - expected).abs() <= error).all()
    assert z.stride() == _ops.dense_strides(x.shape, dim_order)
    for row in ROWS:
        leaf = z.clone().requires_grad_()
        y = row.reference(leaf)
        (gradient,) = torch.autograd.grad(y, leaf, grad)
        ops = row.entry.ops
        assert_values(row, ops.recompute(x, *affine, *row.scalars), y.detach())
        actual = ops.backward["recompute"](grad, x, *affine, *row.scalars)
        assert_gradient(row, actual, gradient, grad.abs().max(), row.name)


@pytest.mark.parametrize("dtype", FLOATS, ids=readable_id)
@pytest.mark.parametrize("differing", ["batch_norm", "group_norm", "layer_norm", "odd"])
def test_all_kernels_normalize_to_the_same_bits(
    differing: str, dtype: torch.dtype, device: torch.device
) -> None:
    """All kernels normalize an element to the same bits.

    In 16 bits there are enough elements that one of them becomes another number if one kernel
    rounds a sum once and another kernel twice.
    """
    rows = 360 if dtype.itemsize == 2 else 36
    x, grad = (3 * torch.randn(3, 5, rows, 131, device=device).to(dtype) for _ in range(2))
    channel_dims, row_dims = DIFFERING[differing]
    row_statistics = None if row_dims is None else scale_shift_of(x, *row_dims)
    affine = (scale_shift_of(x, *channel_dims), row_statistics, None)
    z = _ops.NORMALIZE(x, *affine)
    one_and_zero = torch.tensor([1.0, 0.0], dtype=_ops.affine_dtype(x.dtype), device=device)
    identity = (one_and_zero.view(2, 1, 1, 1, 1), None, None)
    for row in ROWS:
        ops, scalars = row.entry.ops, row.scalars
        y = ops.recompute(x, *affine, *scalars)
        assert torch.equal(y, ops.recompute(z, *identity, *scalars)), row.name
        gradient = ops.backward["recompute"](grad, x, *affine, *scalars)
        expected = ops.backward["recompute"](grad, z, *identity, *scalars)
        assert torch.equal(gradient, expected), row.name


@pytest.mark.parametrize(
    ("channel_dims", "row_dims", "dtype"),
    in_turn([(), (1,), (0, 1), (2,), (0, 2)], [None, (0,), (0, 1), (0, 2)], FLOATS),
    ids=readable_id,
)
def test_affine_may_change_at_any_element(
    channel_dims: tuple[int, ...],
    row_dims: tuple[int, ...] | None,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Scales and shifts may change at any element of a kernel's vector or tile."""
    leaky_relu = _ops.ALL["leaky_relu"]
    for length in (*range(1, 35), 49, 196, 511, 512, 513):
        x = (3 * torch.randn(1200 // (3 * length) + 2, 3, length, device=device)).to(dtype)
        row_statistics = None if row_dims is None else scale_shift_of(x, *row_dims)
        affine = (scale_shift_of(x, *channel_dims), row_statistics, None)
        z = _ops.NORMALIZE(x, *affine)
        expected, error = normalized(x, *affine[:2])
        assert ((z.double() - expected).abs() <= error).all()
        assert_identical(leaky_relu.recompute(x, *affine, 0.25), torch.where(z > 0, z, z * 0.25))
        gradient = leaky_relu.backward["recompute"](torch.ones_like(x), x, *affine, 0.25)
        assert_identical(gradient, torch.where(z > 0, 1.0, 0.25).to(dtype))


CASTING = [op for op in _ops.RECOMPUTING_OPS if "dtype" in names_of(op)]
RECOMPUTED = {activation.ops.recompute: activation for activation in ACTIVATIONS}


def with_special_values(x: Tensor) -> Tensor:
    """Write NaN, infinities, and values that overflow or are subnormal in 16 bits to x."""
    special = (torch.nan, torch.inf, -torch.inf, 7e4, -3.4e38, 3e-6, 1e-39, -0.0)
    for index, value in enumerate(special):
        x.view(-1)[index :: 97 + 2 * index] = value
    return x


Affine = tuple[Tensor, Tensor | None]
casting_cases = pytest.mark.parametrize(
    ("op", "layout", "dtype"),
    in_turn(CASTING, LAYOUTS, _ops.CAST_DTYPES),
    ids=readable_id,
)


def inputs_and_affines(
    layout: str, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[Tensor, Affine]]:
    """Yield norms' inputs, dense and strided, each with affines per channel and with rows."""
    arrange, _ = LAYOUTS[layout]
    for shape in ((3, 5, 12, 13), (2, 16, 24, 33), (1, 1, 1, 1), (2, 0, 3, 4)):
        x = arrange(with_special_values(3 * torch.randn(shape, device=device)).to(dtype))
        for affine in (
            (scale_shift_of(x, 1), None),
            (scale_shift_of(x, 3), scale_shift_of(x, 0, 1, 2)),
        ):
            for strided in (x, torch.stack([x, x], -1)[..., 1]):
                yield strided, affine


def op_args_of(op: torch._ops.OpOverload, layout: str) -> list[Any]:
    """Return the arguments after the affine: `dim_order` and the activation's scalars."""
    scalars = [SCALARS[a.name] for a in op._schema.arguments[4:] if not a.kwarg_only]
    return [LAYOUTS[layout][1], *scalars]


@casting_cases
def test_op_with_dtype_equals_cast_of_result(
    op: torch._ops.OpOverload, layout: str, dtype: torch.dtype, device: torch.device
) -> None:
    """An op with `dtype` casts its result: both round once."""
    op_args = op_args_of(op, layout)
    for x, affine in inputs_and_affines(layout, torch.float32, device):
        expected = op(x, *affine, *op_args)
        actual = op(x, *affine, *op_args, dtype=dtype)
        if op is _ops.NORMALIZE:
            assert_identical(actual, expected.to(dtype))
        else:
            assert_is_cast(actual, expected, RECOMPUTED[op])
        assert actual.stride() == expected.stride()


@casting_cases
def test_op_in_float32_equals_casts_around_it(
    op: torch._ops.OpOverload, layout: str, dtype: torch.dtype, device: torch.device
) -> None:
    """An op with `in_float32` casts x to float32 before, and its result back."""
    op_args = op_args_of(op, layout)
    for x, affine in inputs_and_affines(layout, dtype, device):
        expected = op(x.float(), *affine, *op_args, dtype=dtype)
        actual = op(x, *affine, *op_args, in_float32=True)
        assert_identical(actual, expected)
        assert actual.stride() == expected.stride()


ADDENDS: dict[str, Callable[[Tensor], Tensor]] = {
    "like x": lambda t: t,
    "contiguous": lambda t: t.contiguous(),
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "transposed": lambda t: t.transpose(0, 3).contiguous().transpose(0, 3),
    "expanded": lambda t: t[:, :, :1].expand_as(t),
    "stepped": lambda t: torch.stack([t, t], -1)[..., 1],
    "misaligned": lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape),
}


@pytest.mark.parametrize(
    ("addend", "layout", "dtype"), in_turn(ADDENDS, LAYOUTS, FLOATS), ids=readable_id
)
def test_sum_ops_equal_pytorch(
    addend: str, layout: str, dtype: torch.dtype, device: torch.device
) -> None:
    """The ops equal PyTorch's sum and ReLU of the norm's output: they round at the same steps."""
    arrange, dim_order = LAYOUTS[layout]
    for shape in ((3, 5, 12, 13), (2, 16, 24, 33), (7, 1, 3, 171), (1, 1, 1, 1), (2, 0, 3, 4)):
        x, other = (
            arrange(with_special_values(3 * torch.randn(shape, device=device)).to(dtype))
            for _ in range(2)
        )
        other = ADDENDS[addend](other.flip(-1) if shape[0] == 3 else other)
        for affine in (
            (scale_shift_of(x, 1), None),
            (scale_shift_of(x, 0, 1), None),
            (scale_shift_of(x, 3), scale_shift_of(x, 0, 1, 2)),
        ):
            total = torch.add(_ops.NORMALIZE(x, *affine, dim_order), other)
            actual = _ops.NORMALIZE_ADD(x, *affine, other, dim_order)
            assert_identical(actual, total)
            assert actual.stride() == _ops.dense_strides(x.shape, dim_order)
            actual = _ops.NORMALIZE_ADD_RELU(x, *affine, other, dim_order)
            assert_values(PIECEWISE, actual, torch.relu(total))


@pytest.mark.parametrize("op", [op for op in OF_EACH_KIND if op in _ops.BACKWARD_OPS], ids=name_of)
@pytest.mark.parametrize("batched", ["gradient", "all"])
@pytest.mark.parametrize("dim", [0, 2])
def test_vmap_of_backward_ops_equals_single_calls(
    op: torch._ops.OpOverload, batched: str, dim: int, device: torch.device
) -> None:
    layout = "contiguous" if batched == "all" else "channels_last"
    sets = [arguments_of(op, device, layout=layout) for _ in range(3)]
    is_batched = [
        isinstance(a, Tensor) and (batched == "all" or index == 0)
        for index, a in enumerate(sets[0])
    ]

    def in_dim(index: int) -> int | None:
        if not is_batched[index]:
            return None
        return min(dim, sets[0][index].dim())

    arguments = [
        torch.stack([s[index] for s in sets], in_dim(index)) if is_batched[index] else a
        for index, a in enumerate(sets[0])
    ]
    tensors = [index for index, a in enumerate(sets[0]) if isinstance(a, Tensor)]

    def run(*given: Tensor) -> Tensor:
        full = list(sets[0])
        for index, tensor in zip(tensors, given, strict=True):
            full[index] = tensor
        return op(*full)

    in_dims = tuple(in_dim(index) for index in tensors)
    actual = torch.func.vmap(run, in_dims=in_dims)(*(arguments[index] for index in tensors))
    expected = torch.stack(
        [
            run(*(sets[i][index] if is_batched[index] else sets[0][index] for index in tensors))
            for i in range(3)
        ]
    )
    assert_identical(actual, expected)
