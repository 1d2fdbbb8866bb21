"""The private ops, called directly."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from activations import FLOATS, SCALARS
from comparison import assert_identical
from torch import Tensor

from inplace_ops import _ops

SHAPE = (2, 3, 5, 4)
LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], list[int]]] = {
    "contiguous": (lambda t: t, []),
    "channels_last": (lambda t: t.contiguous(memory_format=torch.channels_last), [0, 2, 3, 1]),
    "transposed": (lambda t: t.transpose(0, 3), [3, 1, 2, 0]),
    "logical_order": (lambda t: t.transpose(1, 2), []),
}

OPS = (
    *_ops.FUNCTIONAL_OPS,
    *_ops.FUNCTIONAL_SAVING_OPS,
    *_ops.FORWARD_OPS,
    *_ops.BACKWARD_OPS,
)


def name_of(op: torch._ops.OpOverload) -> str:
    return op.name().removeprefix("inplace_ops::")


def numbers_of(op: torch._ops.OpOverload) -> tuple[str, str | None]:
    """The activation's name among the ops, and what the op saves or reads."""
    for activation, ops in _ops.ALL.items():
        for by_save in (ops.save_in_place, ops.save_out_of_place, ops.backward):
            for save, other in by_save.items():
                if other is op:
                    return activation, save
        if ops.double_backward is op:
            return activation, "output"
        if op in (ops.in_place, ops.out_of_place):
            return activation, None
    raise AssertionError(op)


def planes_of(op: torch._ops.OpOverload, dtype: torch.dtype = torch.float32) -> int:
    """The default number of bit planes of what it writes or reads, 0 where it has none."""
    activation, save = numbers_of(op)
    return _ops.ALL[activation].default_bits[save][dtype] if save else 0


# The template of ops.h is the same for all: of those of a kind one, and the one with a scalar.
OF_EACH_KIND = [op for op in OPS if numbers_of(op)[0] in ("relu", "leaky_relu", "silu")]

all_ops = pytest.mark.parametrize("op", OPS, ids=name_of)
of_each_kind = pytest.mark.parametrize("op", OF_EACH_KIND, ids=name_of)


def arguments_of(
    op: torch._ops.OpOverload,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    layout: str = "contiguous",
) -> list[object]:
    """Arguments as the package itself passes them, of the schema's names."""
    arrange, dim_order = LAYOUTS[layout]
    planes = planes_of(op, dtype)
    arguments: list[object] = []
    for parameter in op._schema.arguments:
        if parameter.name in ("x", "grad", "grad_grad", "output"):
            arguments.append(arrange(torch.randn(SHAPE, device=device).to(dtype)))
        elif parameter.name == "packed":
            packed = _ops.empty_bits(arguments[0], planes).random_()
            if numbers_of(op)[1] == "derivative":
                packed[-1] = 255  # no code is 0, which stands for NaN
            arguments.append(packed)
        elif parameter.name == "bits":
            arguments.append(planes)
        elif parameter.name == "dim_order":
            arguments.append(dim_order)
        else:
            arguments.append(SCALARS[parameter.name])
    names = [parameter.name for parameter in op._schema.arguments]
    if {"output", "packed"} <= set(names) and device.type != "meta":
        # Not every output, with every code, is one of an input.
        output, packed = (arguments[names.index(name)] for name in ("output", "packed"))
        _ops.ALL[numbers_of(op)[0]].save_in_place["output"](output, packed, dim_order)
    return arguments


def floats_of(op: torch._ops.OpOverload) -> int:
    """How many tensors that are no packed bits it takes."""
    return sum(p.name in ("x", "grad", "grad_grad", "output") for p in op._schema.arguments)


def has_packed(op: torch._ops.OpOverload) -> bool:
    return any(parameter.name == "packed" for parameter in op._schema.arguments)


saving_ops = pytest.mark.parametrize(
    "op", [op for op in _ops.FORWARD_OPS if has_packed(op)], ids=name_of
)


def test_every_op_is_listed() -> None:
    listed = torch._C._dispatch_get_all_op_names()
    assert {op.name() for op in OPS} == {n for n in listed if n.startswith("inplace_ops::")}


@pytest.mark.parametrize(
    ("op", "layout"),
    [
        (op, layout)
        for op in OPS
        for layout in LAYOUTS
        if op in OF_EACH_KIND or layout == "transposed"
    ],
    ids=lambda value: value if isinstance(value, str) else name_of(value),
)
def test_opcheck(op: torch._ops.OpOverload, layout: str, device: torch.device) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        torch.library.opcheck(op, tuple(arguments_of(op, device, dtype, layout)))


@pytest.mark.parametrize("activation", _ops.ALL)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_functional_ops_equal_the_in_place_ones(
    activation: str, layout: str, device: torch.device
) -> None:
    ops = _ops.ALL[activation]
    for save, op in ops.save_out_of_place.items():
        planes = ops.default_bits[save][torch.float32]
        x, _, *rest = arguments_of(op, device, layout=layout)
        before = x.clone()
        expected, expected_packed = x.clone(), _ops.empty_bits(x, planes)
        ops.save_in_place[save](expected, expected_packed, *rest)
        result, packed = op(x, planes, *rest)
        assert_identical(result, expected)
        assert torch.equal(packed, expected_packed)
        assert_identical(ops.out_of_place(x, *rest), expected)
        assert_identical(x, before)
        ops.in_place(x, *rest)
        assert_identical(x, expected)
        for bits in (-1, 0, 33):
            with pytest.raises(RuntimeError):
                op(x, bits, *rest)


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


def assert_refused(op: torch._ops.OpOverload, arguments: list[object]) -> None:
    tensors = [a for a in arguments if isinstance(a, Tensor) and not a.is_meta]
    before = [t.clone() for t in tensors]
    with pytest.raises(RuntimeError):
        op(*arguments)
    for tensor, old in zip(tensors, before, strict=True):
        assert_identical(tensor, old, "modified although refused:")


@pytest.mark.parametrize("wrong", WRONG_BITS)
@pytest.mark.parametrize("op", list(filter(has_packed, OF_EACH_KIND)), ids=name_of)
def test_wrong_bits(op: torch._ops.OpOverload, wrong: str, device: torch.device) -> None:
    arguments = arguments_of(op, device)
    place = next(
        i for i, a in enumerate(arguments) if isinstance(a, Tensor) and a.dtype == torch.uint8
    )
    arguments[place] = WRONG_BITS[wrong](arguments[place])
    assert_refused(op, arguments)


@of_each_kind
@pytest.mark.parametrize(
    "order", [[0], [0, 1, 2], [0, 1, 2, 3, 4], [0, 1, 2, 2], [1, 2, 3, 4], [0, 1, 2, -1]], ids=str
)
def test_wrong_order(op: torch._ops.OpOverload, order: list[int], device: torch.device) -> None:
    arguments = [order if isinstance(a, list) else a for a in arguments_of(op, device)]
    assert_refused(op, arguments)


WRONG_FLOATS: dict[str, Callable[[Tensor], Tensor]] = {
    "shape": lambda t: t[1:],
    "dimensions": lambda t: t.flatten(),
    "dtype": lambda t: t.double(),
    "meta": lambda t: t.to("meta"),
}


@pytest.mark.parametrize("wrong", WRONG_FLOATS)
@pytest.mark.parametrize("op", [op for op in OF_EACH_KIND if floats_of(op) > 1], ids=name_of)
def test_unlike_tensors(op: torch._ops.OpOverload, wrong: str, device: torch.device) -> None:
    for place in range(1, floats_of(op)):
        arguments = arguments_of(op, device)
        arguments[place] = WRONG_FLOATS[wrong](arguments[place])
        assert_refused(op, arguments)


@saving_ops
@pytest.mark.parametrize("planes", [0, 1, 2, 7, 9, 12, 33])
def test_wrong_number_of_planes(
    op: torch._ops.OpOverload, planes: int, device: torch.device
) -> None:
    activation, save = numbers_of(op)
    default = _ops.ALL[activation].default_bits["output"][torch.float32]
    accepted = {"mask": (1,), "output": (1, default, 8), "derivative": (8, 16, 32)}
    if planes not in accepted[save]:
        x, _, *rest = arguments_of(op, device)
        assert_refused(op, [x, _ops.empty_bits(x, planes), *rest])


@saving_ops
@pytest.mark.parametrize("dtype", FLOATS)
def test_only_the_bits_are_written(
    op: torch._ops.OpOverload, dtype: torch.dtype, device: torch.device
) -> None:
    planes = planes_of(op, dtype)
    rest = arguments_of(op, device)[2:]
    for length in (*range(42), 511, 512, 513, 1029):
        x = torch.randn(length, device=device).to(dtype) - 1
        bytes_a_plane = (length + 7) // 8
        for sentinel in (0x00, 0xFF):
            around = torch.full(
                (planes * bytes_a_plane + 34,), sentinel, dtype=torch.uint8, device=device
            )
            bits = around[17:-17].view(planes, bytes_a_plane)
            op(x.clone(), bits, *rest)
            assert (around[:17] == sentinel).all()
            assert (around[-17:] == sentinel).all()
            if length % 8:  # the unused bits of the last byte are zero
                assert not (bits[:, -1] >> (length % 8)).any()


def test_relus_mask_is_one_bit_per_element(device: torch.device) -> None:
    x = torch.randn(77, device=device)
    x[3] = torch.nan
    x[4:7] = torch.tensor([0.0, -0.0, torch.inf])
    expected = ~(x <= 0)
    bits = _ops.empty_bits(x, 1)
    _ops.ALL["relu"].save_in_place["mask"](x, bits, [])
    position = torch.arange(8, dtype=torch.uint8, device=device)
    unpacked = (bits[0][:, None] >> position & 1).flatten()[: x.numel()].bool()
    assert torch.equal(unpacked, expected)


@pytest.mark.parametrize("op", _ops.FORWARD_OPS, ids=name_of)
def test_meta_tensors(op: torch._ops.OpOverload) -> None:
    x, *rest = arguments_of(op, torch.device("meta"))
    op(x, *rest)
    assert x.is_meta
    assert x.shape == SHAPE


@pytest.mark.parametrize("op", [op for op in OF_EACH_KIND if op in _ops.BACKWARD_OPS], ids=name_of)
@pytest.mark.parametrize("batched", ["gradient", "all"])
@pytest.mark.parametrize("dim", [0, 2])
def test_vmap(op: torch._ops.OpOverload, batched: str, dim: int, device: torch.device) -> None:
    sets = [arguments_of(op, device) for _ in range(3)]
    is_batched = [
        isinstance(a, Tensor) and (batched == "all" or place == 0)
        for place, a in enumerate(sets[0])
    ]

    def in_dim(place: int) -> int | None:
        if not is_batched[place]:
            return None
        return min(dim, sets[0][place].dim())

    arguments = [
        torch.stack([s[place] for s in sets], in_dim(place)) if is_batched[place] else a
        for place, a in enumerate(sets[0])
    ]
    tensors = [place for place, a in enumerate(sets[0]) if isinstance(a, Tensor)]

    def run(*given: Tensor) -> Tensor:
        full = list(sets[0])
        for place, tensor in zip(tensors, given, strict=True):
            full[place] = tensor
        return op(*full)

    in_dims = tuple(in_dim(place) for place in tensors)
    actual = torch.func.vmap(run, in_dims=in_dims)(*(arguments[place] for place in tensors))
    expected = torch.stack(
        [
            run(*(sets[i][place] if is_batched[place] else sets[0][place] for place in tensors))
            for i in range(3)
        ]
    )
    assert_identical(actual, expected)
