"""The private ops, called directly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from _support.assertions import assert_gradient, assert_identical, assert_values
from _support.cases import FLOATS, SCALARS
from _support.marks import quick
from _support.norm_cases import PIECEWISE, ROWS, normalized
from torch import Tensor

from inplace_ops import _ops

SHAPE = (2, 3, 5, 4)
LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], list[int] | None]] = {
    "contiguous": (lambda t: t, None),
    "channels_last": (lambda t: t.contiguous(memory_format=torch.channels_last), [0, 2, 3, 1]),
    "transposed": (lambda t: t.transpose(0, 3), [3, 1, 2, 0]),
    "logical_order": (lambda t: t.transpose(1, 2), None),
}

OPS = (
    *_ops.PLAIN_OPS,
    *_ops.SAVING_OPS,
    *_ops.FUNCTIONAL_OPS,
    _ops.NORM_AFFINE,
    *_ops.RECOMPUTING_OPS,
    *_ops.SUM_OPS,
    *_ops.BACKWARD_OPS,
)


def name_of(op: torch._ops.OpOverload) -> str:
    return op.name().removeprefix("inplace_ops::")


def names_of(op: torch._ops.OpOverload) -> list[str]:
    """Return the names of the op's parameters."""
    return [parameter.name for parameter in op._schema.arguments]


def activation_and_save_of(op: torch._ops.OpOverload) -> tuple[str | None, str | None]:
    """Return the name of the op's activation, and the save mode of what it writes or reads."""
    if op in (_ops.NORM_AFFINE, _ops.NORMALIZE, *_ops.SUM_OPS):
        return None, None
    for activation, ops in _ops.ALL.items():
        for by_save in (ops.save_in_place, ops.save_out_of_place, ops.backward):
            for save, other in by_save.items():
                if other is op:
                    return activation, save
        if ops.double_backward is op:
            return activation, "output"
        if op in (ops.in_place, ops.recompute):
            return activation, None
    raise AssertionError(op)


def planes_of(op: torch._ops.OpOverload, dtype: torch.dtype = torch.float32) -> int:
    """Return the default number of bit planes that the op writes or reads, or 0 without bits."""
    activation, save = activation_and_save_of(op)
    return _ops.ALL[activation].default_bits[save][dtype] if save not in (None, "recompute") else 0


# The ops of relu, of leaky_relu with its scalar, and of silu: ops.h has one template for all.
OF_EACH_KIND = [
    op for op in OPS if activation_and_save_of(op)[0] in (None, "relu", "leaky_relu", "silu")
]
NORMALIZING = [op for op in OF_EACH_KIND if "channel_affine" in names_of(op)]

all_ops = pytest.mark.parametrize("op", OPS, ids=name_of)
of_each_kind = pytest.mark.parametrize(
    "op", [op for op in OF_EACH_KIND if "dim_order" in names_of(op)], ids=name_of
)


FLOATING = ("x", "grad", "grad_grad", "output", "addend")  # tensors of one shape and dtype

# Their sizes for two samples with six channels in two groups.
STATISTICS = {"rstd": 4, "mean": 4, "weight": 6, "bias": 6}


def scale_shift_of(x: Tensor, *dims: int) -> Tensor:
    """Return a random affine (or row statistics) whose values differ along `dims` of x."""
    shape = [size if d in dims else 1 for d, size in enumerate(x.shape)]
    return torch.randn(2, *shape, dtype=_ops.affine_dtype(x.dtype), device=x.device)


def arguments_of(
    op: torch._ops.OpOverload,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    layout: str = "contiguous",
) -> list[object]:
    """Return arguments as the package itself passes them, by the names in the op's schema."""
    arrange, dim_order = LAYOUTS[layout]
    planes = planes_of(op, dtype)
    arguments: list[object] = []
    for parameter in op._schema.arguments:
        if parameter.name in FLOATING:
            arguments.append(arrange(torch.randn(SHAPE, device=device).to(dtype)))
        elif parameter.name == "packed":
            packed = _ops.empty_bits(arguments[0], planes).random_()
            if activation_and_save_of(op)[1] == "derivative":
                packed[-1] = 255  # no code is 0, the code of NaN
            arguments.append(packed)
        elif parameter.name == "bits":
            arguments.append(planes)
        elif parameter.name == "channel_affine":
            arguments.append(scale_shift_of(arguments[0], 1))
        elif parameter.name in STATISTICS:
            arguments.append(torch.randn(STATISTICS[parameter.name], device=device))
        elif parameter.name in ("shape", "channels_per_group"):
            arguments.append([2, 2, 6] if parameter.name == "shape" else 3)
        elif parameter.name == "row_statistics":  # only layer norms have them
            arguments.append(None if layout == "channels_last" else scale_shift_of(arguments[0], 0))
        elif parameter.name == "dim_order":
            arguments.append(dim_order)
        elif not parameter.kwarg_only:
            arguments.append(SCALARS[parameter.name])
    names = names_of(op)
    if {"output", "packed"} <= set(names) and device.type != "meta":
        # Not every pair of an output and a code belongs to an input: let forward write them.
        output, packed = (arguments[names.index(name)] for name in ("output", "packed"))
        saving = _ops.ALL[activation_and_save_of(op)[0]].save_in_place["output"]
        arguments[names.index("packed")] = saving(output, planes, dim_order)
    return arguments


def floats_of(op: torch._ops.OpOverload) -> int:
    """Return the number of tensor arguments that share a shape and a dtype."""
    return sum(name in FLOATING for name in names_of(op))


def has_packed(op: torch._ops.OpOverload) -> bool:
    return "packed" in names_of(op)


saving_ops = pytest.mark.parametrize("op", [*_ops.SAVING_OPS, *_ops.FUNCTIONAL_OPS], ids=name_of)


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
        [(op, "transposed") for op in OF_EACH_KIND],
    ),
    ids=lambda value: value if isinstance(value, str) else name_of(value),
)
def test_opcheck(op: torch._ops.OpOverload, layout: str, device: torch.device) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        torch.library.opcheck(op, tuple(arguments_of(op, device, dtype, layout)))


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


WRONG_BITS: dict[str, Callable[[Tensor], Tensor]] = {
    "too_short": lambda bits: bits[:, :-1].contiguous(),
    "too_long": lambda bits: torch.cat([bits, bits], 1),
    "one_dimension": lambda bits: bits.flatten(),
    "int32": lambda bits: bits.int(),
    "bool": lambda bits: bits.bool(),
    "strided": lambda bits: torch.cat([bits, bits], 1)[:, ::2],
    "no_planes": lambda bits: bits[:0],
    "33_planes": lambda bits: bits[:1].repeat(33, 1),
    "meta": lambda bits: bits.to("meta"),
}


def assert_rejected(op: torch._ops.OpOverload, arguments: list[object]) -> None:
    tensors = [a for a in arguments if isinstance(a, Tensor) and not a.is_meta]
    before = [t.clone() for t in tensors]
    with pytest.raises(RuntimeError):
        op(*arguments)
    for tensor, old in zip(tensors, before, strict=True):
        assert_identical(tensor, old, "modified although rejected:")


@pytest.mark.parametrize("wrong", WRONG_BITS)
@pytest.mark.parametrize("op", list(filter(has_packed, OF_EACH_KIND)), ids=name_of)
def test_wrong_bits_are_rejected(
    op: torch._ops.OpOverload, wrong: str, device: torch.device
) -> None:
    arguments = arguments_of(op, device)
    index = next(
        i for i, a in enumerate(arguments) if isinstance(a, Tensor) and a.dtype == torch.uint8
    )
    arguments[index] = WRONG_BITS[wrong](arguments[index])
    assert_rejected(op, arguments)


@of_each_kind
@pytest.mark.parametrize(
    "order", [[0], [0, 1, 2], [0, 1, 2, 3, 4], [0, 1, 2, 2], [1, 2, 3, 4], [0, 1, 2, -1]]
)
def test_wrong_dim_order_is_rejected(
    op: torch._ops.OpOverload, order: list[int], device: torch.device
) -> None:
    arguments = arguments_of(op, device)
    arguments[names_of(op).index("dim_order")] = order
    assert_rejected(op, arguments)


WRONG_FLOATS: dict[str, Callable[[Tensor], Tensor]] = {
    "shape": lambda t: t[1:],
    "dimensions": lambda t: t.flatten(),
    "dtype": lambda t: t.double(),
    "meta": lambda t: t.to("meta"),
}


@pytest.mark.parametrize("wrong", WRONG_FLOATS)
@pytest.mark.parametrize("op", [op for op in OF_EACH_KIND if floats_of(op) > 1], ids=name_of)
def test_tensors_of_other_shape_or_dtype_are_rejected(
    op: torch._ops.OpOverload, wrong: str, device: torch.device
) -> None:
    indices = [index for index, name in enumerate(names_of(op)) if name in FLOATING]
    for index in indices[1:]:
        arguments = arguments_of(op, device)
        arguments[index] = WRONG_FLOATS[wrong](arguments[index])
        assert_rejected(op, arguments)


WRONG_AFFINES: dict[str, Callable[[Tensor], Tensor]] = {
    "one": lambda affine: affine[:1],
    "three": lambda affine: torch.cat([affine, affine[:1]]),
    "dimensions": lambda affine: affine.flatten(1),
    "too_few": lambda affine: torch.cat([affine] * 3, 3)[:, :, :2],
    "too_many": lambda affine: torch.cat([affine] * 7, 2),
    "elsewhere": lambda affine: torch.cat([affine] * 2, 4),
    "wide": lambda affine: affine.double(),
    "narrow": lambda affine: affine.half(),
    "integers": lambda affine: affine.int(),
    "meta": lambda affine: affine.to("meta"),
}


@pytest.mark.parametrize("wrong", WRONG_AFFINES)
@pytest.mark.parametrize("op", NORMALIZING, ids=name_of)
def test_wrong_affine_is_rejected(
    op: torch._ops.OpOverload, wrong: str, device: torch.device
) -> None:
    for name in ("channel_affine", "row_statistics"):
        arguments = arguments_of(op, device)
        index = names_of(op).index(name)
        arguments[index] = WRONG_AFFINES[wrong](arguments[index])
        assert_rejected(op, arguments)


@pytest.mark.parametrize("op", NORMALIZING, ids=name_of)
def test_float32_affine_of_float64_is_rejected(
    op: torch._ops.OpOverload, device: torch.device
) -> None:
    arguments = arguments_of(op, device, torch.float64)
    op(*arguments)
    index = names_of(op).index("channel_affine")
    arguments[index] = arguments[index].float()
    assert_rejected(op, arguments)


@pytest.mark.parametrize("op", NORMALIZING, ids=name_of)
def test_affine_that_differs_in_many_dimensions_is_rejected(
    op: torch._ops.OpOverload, device: torch.device
) -> None:
    names = names_of(op)
    for dims, is_supported in (((0, 2), True), ((0, 2, 4), False)):
        x = torch.randn(2, 3, 2, 3, 2, device=device)
        arguments = arguments_of(op, device)
        for index, name in enumerate(names):
            if name in ("x", "grad", "addend"):
                arguments[index] = x
        arguments[names.index("channel_affine")] = scale_shift_of(x, *dims)
        arguments[names.index("row_statistics")] = None
        if is_supported:
            assert op(*arguments).shape == x.shape
        else:
            assert_rejected(op, arguments)


@saving_ops
@pytest.mark.parametrize("planes", [-1, 0, 1, 2, 7, 9, 12, 33])
def test_wrong_number_of_planes_is_rejected(
    op: torch._ops.OpOverload, planes: int, device: torch.device
) -> None:
    activation, save = activation_and_save_of(op)
    default = _ops.ALL[activation].default_bits["output"][torch.float32]
    accepted = {"mask": (1,), "output": (1, default, 8), "derivative": (8, 16, 32)}
    if planes not in accepted[save]:
        x, _, *rest = arguments_of(op, device)
        assert_rejected(op, [x, planes, *rest])


@saving_ops
@pytest.mark.parametrize("dtype", FLOATS)
def test_unused_bits_are_zero(
    op: torch._ops.OpOverload, dtype: torch.dtype, device: torch.device
) -> None:
    planes = planes_of(op, dtype)
    rest = arguments_of(op, device)[2:]
    for length in (*range(42), 511, 512, 513, 1029):
        x = torch.randn(length, device=device).to(dtype) - 1
        result = op(x.clone(), planes, *rest)
        bits = result[1] if isinstance(result, tuple) else result
        assert bits.shape == (planes, (length + 7) // 8)
        if length % 8:
            assert not (bits[:, -1] >> (length % 8)).any()


def test_relu_mask_is_one_bit_per_element(device: torch.device) -> None:
    x = torch.randn(77, device=device)
    x[3] = torch.nan
    x[4:7] = torch.tensor([0.0, -0.0, torch.inf])
    expected = ~(x <= 0)
    bits = _ops.ALL["relu"].save_in_place["mask"](x, 1, None)
    position = torch.arange(8, dtype=torch.uint8, device=device)
    unpacked = (bits[0][:, None] >> position & 1).flatten()[: x.numel()].bool()
    assert torch.equal(unpacked, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("given", ["1111", "1110", "1101", "1100", "1011", "1000", "0011", "0010"])
@pytest.mark.parametrize(
    ("samples", "channels", "channels_per_group"), [(1, 5, 1), (3, 12, 4), (2, 3, 1)]
)
def test_norm_affine_matches_float64(
    samples: int,
    channels: int,
    channels_per_group: int,
    given: str,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
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


WRONG_STATISTICS: dict[str, tuple[str, Callable[[Any], object]]] = {
    "too_few": ("rstd", lambda t: t[1:]),
    "too_many": ("mean", lambda t: torch.cat([t, t])),
    "weights": ("weight", lambda t: t[:5]),
    "biases": ("bias", lambda t: t[:0]),
    "dtype": ("weight", lambda t: t.double()),
    "half": ("bias", lambda t: t.half()),
    "strided": ("mean", lambda t: torch.cat([t, t])[::2]),
    "meta": ("bias", lambda t: t.to("meta")),
    "none": ("channels_per_group", lambda _: 0),
    "negative": ("channels_per_group", lambda _: -3),
    "unequal": ("channels_per_group", lambda _: 5),
    "shape": ("shape", lambda _: [2, 2, 7]),
    "one_part": ("shape", lambda _: [1, 2, 6]),
    "three_parts": ("shape", lambda _: [3, 2, 6]),
    "no_shape": ("shape", lambda _: []),
}


@pytest.mark.parametrize("wrong", WRONG_STATISTICS)
def test_wrong_statistics_are_rejected(wrong: str, device: torch.device) -> None:
    name, change = WRONG_STATISTICS[wrong]
    arguments = arguments_of(_ops.NORM_AFFINE, device)
    index = names_of(_ops.NORM_AFFINE).index(name)
    arguments[index] = change(arguments[index])
    assert_rejected(_ops.NORM_AFFINE, arguments)


def test_half_statistics_are_rejected(device: torch.device) -> None:
    halves = [
        argument.half() if isinstance(argument, Tensor) else argument
        for argument in arguments_of(_ops.NORM_AFFINE, device)
    ]
    assert_rejected(_ops.NORM_AFFINE, halves)
    assert_rejected(_ops.NORM_AFFINE, [None] * 4 + halves[4:])


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


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("differing", DIFFERING)
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


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("differing", DIFFERING)
def test_all_kernels_normalize_to_the_same_bits(
    differing: str, dtype: torch.dtype, device: torch.device
) -> None:
    """All kernels normalize an element to the same bits.

    There are enough elements that one of them becomes another 16-bit number if one kernel rounds a
    sum once and another kernel twice.
    """
    x, grad = (3 * torch.randn(3, 5, 360, 131, device=device).to(dtype) for _ in range(2))
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


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("channel_dims", [(), (1,), (0, 1), (2,), (0, 2)], ids=str)
@pytest.mark.parametrize("row_dims", [None, (0,), (0, 1), (0, 2)], ids=str)
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


def with_special_values(x: Tensor) -> Tensor:
    """Write NaN, infinities, and values that overflow or are subnormal in 16 bits to x."""
    special = (torch.nan, torch.inf, -torch.inf, 7e4, -3.4e38, 3e-6, 1e-39, -0.0)
    for index, value in enumerate(special):
        x.view(-1)[index :: 97 + 2 * index] = value
    return x


@pytest.mark.parametrize("dtype", _ops.CAST_DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", CASTING, ids=name_of)
def test_op_with_dtype_equals_cast_of_result(
    op: torch._ops.OpOverload, layout: str, dtype: torch.dtype, device: torch.device
) -> None:
    """An op with `dtype` equals a cast of its result: both round once."""
    arrange, dim_order = LAYOUTS[layout]
    scalars = [SCALARS[a.name] for a in op._schema.arguments[4:] if not a.kwarg_only]
    for shape in ((3, 5, 12, 13), (2, 16, 24, 33), (1, 1, 1, 1), (2, 0, 3, 4)):
        x = arrange(with_special_values(3 * torch.randn(shape, device=device)))
        for affine in (
            (scale_shift_of(x, 1), None),
            (scale_shift_of(x, 3), scale_shift_of(x, 0, 1, 2)),
        ):
            for strided in (x, torch.stack([x, x], -1)[..., 1]):
                arguments = (strided, *affine, dim_order, *scalars)
                expected = op(*arguments)
                actual = op(*arguments, dtype=dtype)
                assert_identical(actual, expected.to(dtype))
                assert actual.stride() == expected.stride()


@pytest.mark.parametrize("op", CASTING, ids=name_of)
def test_unsupported_casts_are_rejected(op: torch._ops.OpOverload, device: torch.device) -> None:
    for dtype in FLOATS:
        arguments = arguments_of(op, device, dtype)
        on_meta = [a.to("meta") if isinstance(a, Tensor) else a for a in arguments]
        for target in (*FLOATS, torch.int32, torch.complex64):
            is_cast = dtype == torch.float32 and target in _ops.CAST_DTYPES
            if is_cast or target == dtype:
                assert op(*arguments, dtype=target).dtype == target
                assert op(*on_meta, dtype=target).dtype == target
                continue
            for given in (arguments, on_meta):
                with pytest.raises(RuntimeError, match="float16 or bfloat16"):
                    op(*given, dtype=target)


ADDENDS: dict[str, Callable[[Tensor], Tensor]] = {
    "like x": lambda t: t,
    "contiguous": lambda t: t.contiguous(),
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "transposed": lambda t: t.transpose(0, 3).contiguous().transpose(0, 3),
    "expanded": lambda t: t[:, :, :1].expand_as(t),
    "stepped": lambda t: torch.stack([t, t], -1)[..., 1],
    "misaligned": lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape),
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("addend", ADDENDS)
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


@pytest.mark.parametrize("op", [*_ops.PLAIN_OPS, *_ops.SAVING_OPS], ids=name_of)
def test_in_place_ops_take_meta_tensors(op: torch._ops.OpOverload) -> None:
    x, *rest = arguments_of(op, torch.device("meta"))
    op(x, *rest)
    assert x.is_meta
    assert x.shape == SHAPE


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
