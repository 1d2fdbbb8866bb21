"""The private ops reject invalid arguments, and access no memory out of bounds.

The package itself never passes these arguments. test_under_sanitizers runs this file, and others
that access memory, under AddressSanitizer and UndefinedBehaviorSanitizer.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from _support.assertions import assert_identical
from _support.cases import FLOATS
from _support.extension import PROJECT, build_cpu_extension, copy_package
from _support.marks import quick, readable_id, slow
from _support.op_calls import (
    FLOATING,
    NORMALIZING,
    OF_EACH_KIND,
    OPS,
    SHAPE,
    arguments_of,
    name_of,
    names_of,
    planes_of,
    scale_shift_of,
)
from _support.sanitizers import FLAGS, SANITIZE, run_tests, sanitizers
from torch import Tensor

import inplace_ops
from inplace_ops import _ops

backward_ops = pytest.mark.parametrize(
    "op", [op for op in OF_EACH_KIND if op in _ops.BACKWARD_OPS], ids=name_of
)


def is_bits(argument: object) -> bool:
    return isinstance(argument, Tensor) and argument.dtype == torch.uint8


def is_affine(argument: object) -> bool:
    """Whether an argument is an affine (scale, shift), which has one dimension more than x."""
    return isinstance(argument, Tensor) and argument.dim() == len(SHAPE) + 1


def is_float(argument: object) -> bool:
    return isinstance(argument, Tensor) and not is_bits(argument) and not is_affine(argument)


def with_bits(arguments: list[object], change: Callable[[Tensor], object]) -> list[object]:
    return [change(a) if is_bits(a) else a for a in arguments]


def with_floats(arguments: list[object], change: Callable[[Tensor], Tensor]) -> list[object]:
    return [change(a) if is_float(a) else a for a in arguments]


def with_affine(arguments: list[object], change: Callable[[Tensor], Tensor]) -> list[object]:
    return [change(a) if is_affine(a) else a for a in arguments]


def assert_rejected(op: torch._ops.OpOverload, arguments: list[object], message: str) -> None:
    tensors = [
        a
        for a in arguments
        if isinstance(a, Tensor) and a.layout == torch.strided and not a.is_meta
    ]
    # Compare storages: a copy of an expanded tensor would be as large as its shape.
    before = [bytes(a.untyped_storage().cpu()) for a in tensors]
    with pytest.raises(RuntimeError, match=message):
        op(*arguments)
    assert [bytes(a.untyped_storage().cpu()) for a in tensors] == before


Change = Callable[[Any], object]

# A message of several devices: one argument is on the meta device.
SHAPE_OR_DEVICE = "shape, dtype and device|several devices"
UNSUPPORTED = "unsupported dtype|shape, dtype and device"
AFFINE = "channel_affine and row_statistics|several devices"
STATISTICS = "rstd, mean, weight and bias must be contiguous|several devices"
WRONG_AFFINES: dict[str, tuple[Change, str]] = {
    "one": (lambda affine: affine[:1], AFFINE),
    "three": (lambda affine: torch.cat([affine, affine[:1]]), AFFINE),
    "dimensions": (lambda affine: affine.flatten(1), AFFINE),
    "too_few": (lambda affine: torch.cat([affine] * 3, 3)[:, :, :2], AFFINE),
    "too_many": (lambda affine: torch.cat([affine] * 7, 2), AFFINE),
    "elsewhere": (lambda affine: torch.cat([affine] * 2, 4), AFFINE),
    "wide": (lambda affine: affine.double(), AFFINE),
    "narrow": (lambda affine: affine.half(), AFFINE),
    "integers": (lambda affine: affine.int(), AFFINE),
    "meta": (lambda affine: affine.to("meta"), AFFINE),
}
# By an argument's name and what is wrong: a change of the argument, and the error's message.
WRONG: dict[str, dict[str, tuple[Change, str]]] = {
    "packed": {
        "too_short": (lambda bits: bits[:, :-1].contiguous(), "must have shape"),
        "too_long": (lambda bits: torch.cat([bits, bits], 1), "must have shape"),
        "one_dimension": (lambda bits: bits.flatten(), "must have shape"),
        "three_dimensions": (lambda bits: bits[None], "must have shape"),
        "no_planes": (lambda bits: bits[:0], "cannot save 0 bits per element"),
        "many_planes": (lambda bits: bits[:1].repeat(33, 1), "cannot save 33 bits per element"),
        "strided": (lambda bits: torch.cat([bits, bits], 1)[:, ::2], "must be contiguous"),
        "int8": (lambda bits: bits.view(torch.int8), "must be uint8"),
        "int32": (lambda bits: bits.int(), "must be uint8"),
        "sparse": (lambda bits: bits.to_sparse(), "inplace_ops::.*Sparse"),
        "meta": (lambda bits: bits.to("meta"), "several devices"),
    },
    "dim_order": {
        str(order[:5]): (
            lambda _, order=order: order,
            "dim_order must be a permutation of the 4 dimensions",
        )
        for order in (
            *([0, 1, 2], list(range(4)) * 1000, [0, 1, 2, 2], [0, 1, 2, -1]),
            [2**63 - 1, 0, 1, 2],
        )
    },
    "bits": {
        str(count): (lambda _, count=count: count, f"cannot save {count} bits per element")
        for count in (-(2**62), -1, 0, 2, 7, 9, 12, 33, 2**62)
    },
    # The first argument, in ops that have packed bits; they determine its size.
    "first": {
        "too_large": (lambda t: torch.cat([t, t]), "must have"),
        "too_small": (lambda t: t[:1], "must have"),
        "huge": (
            lambda t: t[:1, :1, :1, :1].expand(2**30, 2**15, 2**10, 2**7),
            "must have|more than",
        ),
        "complex": (lambda t: t.to(torch.complex64), UNSUPPORTED),
        "float8": (lambda t: t.to(torch.float8_e4m3fn), UNSUPPORTED),
        "sparse": (lambda t: t.to_sparse(), "inplace_ops::.*Sparse"),
        "meta": (lambda t: t.to("meta"), "several devices"),
    },
    # Each further tensor that has the shape and dtype of the first.
    "other": {
        "shape": (lambda t: t[1:], SHAPE_OR_DEVICE),
        "dimensions": (lambda t: t.flatten(), SHAPE_OR_DEVICE),
        "dtype": (lambda t: t.double(), SHAPE_OR_DEVICE),
        "meta": (lambda t: t.to("meta"), SHAPE_OR_DEVICE),
    },
    "channel_affine": WRONG_AFFINES,
    "row_statistics": WRONG_AFFINES,
    "rstd": {"too_few": (lambda t: t[1:], STATISTICS)},
    "mean": {
        "too_many": (lambda t: torch.cat([t, t]), STATISTICS),
        "strided": (lambda t: torch.cat([t, t])[::2], STATISTICS),
    },
    "weight": {
        "too_few": (lambda t: t[:5], STATISTICS),
        "wide": (lambda t: t.double(), STATISTICS),
    },
    "bias": {
        "none": (lambda t: t[:0], STATISTICS),
        "half": (lambda t: t.half(), STATISTICS),
        "meta": (lambda t: t.to("meta"), STATISTICS),
    },
    "channels_per_group": {
        str(count): (lambda _, count=count: count, STATISTICS) for count in (0, -3, 5)
    },
    "shape": {
        str(shape): (lambda _, shape=shape: shape, STATISTICS)
        for shape in ([2, 2, 7], [1, 2, 6], [3, 2, 6], [])
    },
}


def places_of(op: torch._ops.OpOverload, name: str) -> list[int]:
    """Return the positions of the arguments that a name in WRONG refers to."""
    names = names_of(op)
    alike = [index for index, other in enumerate(names) if other in FLOATING]
    if name == "first":
        return [0] if "packed" in names else []
    if op in _ops.BATCH_NORM_OPS and name in ("channel_affine", "mean", "rstd"):
        return []  # test_batch_norm_ops.py has these
    return alike[1:] if name == "other" else [i for i, other in enumerate(names) if other == name]


@pytest.mark.parametrize(
    ("op", "name"),
    [(op, name) for op in OF_EACH_KIND for name in WRONG if places_of(op, name)],
    ids=readable_id,
)
def test_wrong_argument_is_rejected(
    op: torch._ops.OpOverload, name: str, device: torch.device
) -> None:
    for change, message in WRONG[name].values():
        for place in places_of(op, name):
            arguments = arguments_of(op, device)
            arguments[place] = change(arguments[place])
            assert_rejected(op, arguments, message)


@backward_ops
def test_backward_rejects_unsupported_dtypes(
    op: torch._ops.OpOverload, device: torch.device
) -> None:
    for dtype in (torch.int64, torch.int32, torch.complex64, torch.bool):
        arguments = with_floats(arguments_of(op, device), lambda t, dtype=dtype: t.to(dtype))
        assert_rejected(op, arguments, "unsupported dtype")


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8], ids=readable_id)
def test_relu_ops_reject_integers(dtype: torch.dtype, device: torch.device) -> None:
    relu, x = _ops.ALL["relu"], torch.ones(9, dtype=dtype, device=device)
    assert_rejected(relu.save_in_place["mask"], [x, 1, None], "unsupported dtype")
    assert_rejected(relu.in_place, [x, None], "unsupported dtype")


@pytest.mark.parametrize(
    "op", [_ops.ALL[name].backward["output"] for name in ("relu", "leaky_relu")], ids=name_of
)
def test_more_elements_than_memory_raise_out_of_memory(
    op: torch._ops.OpOverload, device: torch.device
) -> None:
    for size in (2**60, 2**63 - 1):
        huge = torch.ones((), device=device).expand(size)
        arguments = [huge if is_float(a) else a for a in arguments_of(op, device)]
        assert_rejected(op, arguments, "out of memory")


@pytest.mark.parametrize("op", _ops.SUM_OPS, ids=name_of)
def test_sum_ops_reject_other_shapes_on_meta(op: torch._ops.OpOverload) -> None:
    place = names_of(op).index("addend")
    for change in (lambda t: t[1:], lambda t: t.flatten(), lambda t: t.double()):
        arguments = arguments_of(op, torch.device("meta"))
        arguments[place] = change(arguments[place])
        assert_rejected(op, arguments, "must have one shape and dtype")


@pytest.mark.parametrize("op", NORMALIZING, ids=name_of)
def test_float32_affine_of_float64_is_rejected(
    op: torch._ops.OpOverload, device: torch.device
) -> None:
    arguments = arguments_of(op, device, torch.float64)
    op(*arguments)
    index = names_of(op).index("channel_affine")
    arguments[index] = arguments[index].float()
    assert_rejected(op, arguments, AFFINE)


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
            assert_rejected(op, arguments, AFFINE)


def test_half_statistics_are_rejected(device: torch.device) -> None:
    halves = [
        argument.half() if isinstance(argument, Tensor) else argument
        for argument in arguments_of(_ops.NORM_AFFINE, device)
    ]
    assert_rejected(_ops.NORM_AFFINE, halves, "must be float32 or float64")
    assert_rejected(_ops.NORM_AFFINE, [None] * 4 + halves[4:], ".")


each_recomputing_kind = pytest.mark.parametrize(
    "op", [op for op in _ops.RECOMPUTING_OPS if op in OF_EACH_KIND], ids=name_of
)


@each_recomputing_kind
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


@each_recomputing_kind
def test_in_float32_is_rejected_without_16_bits(
    op: torch._ops.OpOverload, device: torch.device
) -> None:
    for dtype in FLOATS:
        arguments = arguments_of(op, device, dtype)
        on_meta = [a.to("meta") if isinstance(a, Tensor) else a for a in arguments]
        for given in (arguments, on_meta):
            if dtype in _ops.CAST_DTYPES:
                assert op(*given, in_float32=True).dtype == dtype
                with pytest.raises(RuntimeError, match="dtype must be the dtype of x"):
                    op(*given, dtype=torch.float32, in_float32=True)
            else:
                with pytest.raises(RuntimeError, match="in_float32 requires float16 or bfloat16"):
                    op(*given, in_float32=True)


STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t.clone(),
    "transposed": lambda t: t.transpose(0, 3).contiguous().transpose(0, 3),
    "stepped": lambda t: torch.stack([t, -t], -1)[..., 0],
    "offset": lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape),
}


# Ops of tensors of one shape and their affine: a batch norm's also have numbers for each channel.
OF_ONE_SHAPE = [op for op in OPS if "dim_order" in names_of(op) and op not in _ops.BATCH_NORM_OPS]


@pytest.mark.parametrize("op", [op for op in OF_ONE_SHAPE if op in OF_EACH_KIND], ids=name_of)
def test_bits_are_in_dim_order_for_all_strides(
    op: torch._ops.OpOverload, device: torch.device
) -> None:
    """Packed bits are in the order of `dim_order`, whatever the tensors' strides."""
    arguments = arguments_of(op, device, torch.float64)
    bits = next((a for a in arguments if is_bits(a)), None)
    orders = list(itertools.permutations(range(4)))

    def run(order: tuple[int, ...], stride: str) -> tuple[Tensor, Tensor | None]:
        """Return the values and the packed bits, both in logical order."""
        permuted = [SHAPE[d] for d in order]
        back = [order.index(d) for d in range(4)]

        def reorder(packed: Tensor, sizes: list[int] | tuple[int, ...], to: list[int]) -> Tensor:
            position = torch.arange(8, device=device, dtype=torch.uint8)
            single = (packed[..., None] >> position & 1).flatten(1).view(-1, *sizes)
            single = single.permute(0, *(1 + d for d in to)).reshape(len(packed), -1, 8)
            return (single << position).sum(-1, dtype=torch.uint8)

        given = with_floats(arguments, STRIDES[stride])
        given = with_bits(given, lambda b: reorder(b, SHAPE, list(order)))
        given[names_of(op).index("dim_order")] = list(order)
        result = op(*given)
        if op in _ops.SAVING_OPS:
            result = given[0], result
        elif op in _ops.PLAIN_OPS:
            result = given[0], None
        elif isinstance(result, Tensor):
            return result, None
        values, written = result
        return values, None if written is None else reorder(written, permuted, back)

    expected, expected_bits = run(orders[0], "contiguous")
    assert bits is None or expected_bits is None or not torch.equal(bits, expected_bits)
    for order in orders:
        for stride in STRIDES:
            actual, actual_bits = run(order, stride)
            if "channel_affine" in names_of(op):  # a product and a sum may be rounded once or twice
                torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-13)
            else:
                assert_identical(actual, expected, f"{order}, {stride}:")
            if expected_bits is not None:
                assert torch.equal(actual_bits, expected_bits), (order, stride)


@pytest.mark.parametrize(
    ("op", "dtype"),
    quick(
        itertools.product(OF_ONE_SHAPE, FLOATS),
        [(op, FLOATS[i % len(FLOATS)]) for i, op in enumerate(OF_ONE_SHAPE)],
    ),
    ids=readable_id,
)
def test_any_bytes_are_safe(
    op: torch._ops.OpOverload, dtype: torch.dtype, device: torch.device
) -> None:
    """Bytes that no forward writes cause no undefined behavior and no access out of bounds."""
    for length in (1, 2, 7, 8, 9, 15, 16, 17, 33, 127, 511, 512, 513, 1500):

        def random_bytes(like: Tensor, length: int = length) -> Tensor:
            count = length * dtype.itemsize
            return torch.randint(256, (count,), dtype=torch.uint8, device=device).view(dtype)

        def random_bits(like: Tensor, length: int = length) -> Tensor:
            shape = (planes_of(op, dtype), (length + 7) // 8)
            return torch.randint(256, shape, dtype=torch.uint8, device=device)

        def random_affine(like: Tensor, length: int = length) -> Tensor:
            affine_dtype = _ops.affine_dtype(dtype)
            count = 2 * length * affine_dtype.itemsize
            values = torch.randint(256, (count,), dtype=torch.uint8, device=device)
            return values.view(affine_dtype).view(2, length)

        arguments = with_bits(arguments_of(op, device), random_bits)
        arguments = [planes_of(op, dtype) if type(a) is int else a for a in arguments]
        result = op(*with_affine(with_floats(arguments, random_bytes), random_affine))
        values = result[0] if isinstance(result, tuple) else result
        shape = (planes_of(op, dtype), (length + 7) // 8) if op in _ops.SAVING_OPS else (length,)
        assert values is None or values.shape == shape


def test_each_mask_bit_gives_one_gradient(device: torch.device) -> None:
    """Backward reads each element's own bit: one bit set gives one gradient."""
    for length in (1, 7, 8, 9, 511, 513):
        grad = torch.randn(length, device=device)
        for index in {0, length // 2, length - 1}:
            bits = torch.zeros(1, (length + 7) // 8, dtype=torch.uint8, device=device)
            bits[0, index // 8] = 1 << index % 8
            result = _ops.ALL["relu"].backward["mask"](grad, bits, None)
            assert result[index] == grad[index]
            assert result.count_nonzero() == 1


# This file, the ops of batch norms, and every layout for one kernel of each kind; random views.
SANITIZED = """
    test_direct_calls or test_batch_norm_ops or test_random_views
    or test_values_and_gradients and (
        float32-relu-mask or float64-leaky_relu-0.01-output or bfloat16-silu-output-default
        or float16-silu-derivative-default
    )
"""


@slow
def test_under_sanitizers(tmp_path: Path) -> None:
    """Run tests in a copy of the package, whose CPU extension is compiled with ASan and UBSan."""
    if SANITIZE in os.environ:
        assert Path(inplace_ops.__file__).parent == Path.cwd() / "inplace_ops"
    preloaded = sanitizers()
    source = PROJECT / "csrc"
    if not source.exists():
        pytest.skip("needs the sources")
    package = copy_package(Path(inplace_ops.__file__).parent, tmp_path)
    build_cpu_extension(source, package, *FLAGS)

    names = ("test_direct_calls.py", "test_batch_norm_ops.py", "test_values.py")
    files = [str(Path(__file__).with_name(name)) for name in names]
    run_tests(
        *("-k", SANITIZED.replace("\n", " ")),
        *files,
        folder=tmp_path,
        preloaded=preloaded,
        PYTHONPATH=str(tmp_path),
        CUDA_VISIBLE_DEVICES="",
    )
