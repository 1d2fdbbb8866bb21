"""The private ops, called directly."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from activations import FLOATS
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

# The scalar arguments of each op, and the number of bit planes that it takes: None takes no bits.
SCALARS: dict[str, tuple[object, ...]] = {
    "leaky_relu": (0.2,),
    "leaky_relu_": (0.2,),
    "leaky_relu_with_mask_": (0.2,),
    "leaky_relu_backward_mask": (0.2,),
    "leaky_relu_backward_output": (0.2,),
}
PLANES: dict[str, int | None] = {
    "relu": None,
    "leaky_relu": None,
    "silu": None,
    "silu_derivative": None,
    "relu_": None,
    "leaky_relu_": None,
    "silu_": None,
    "relu_with_mask_": 1,
    "leaky_relu_with_mask_": 1,
    "silu_with_bits_": 6,
    "silu_with_derivative_": 16,
    "relu_backward_mask": 1,
    "leaky_relu_backward_mask": 1,
    "relu_backward_output": None,
    "leaky_relu_backward_output": None,
    "silu_backward_output": 6,
    "silu_double_backward": 6,
    "silu_backward_derivative": 16,
}
FLOATS_BEFORE_BITS = {
    "relu_backward_output": 2,
    "leaky_relu_backward_output": 2,
    "silu_backward_output": 2,
    "silu_double_backward": 3,
}

# The in-place op with the same bits of each functional one, which is told how many.
IN_PLACE = {
    _ops.relu: (_ops.relu_with_mask_, 1),
    _ops.leaky_relu: (_ops.leaky_relu_with_mask_, 1),
    _ops.silu: (_ops.silu_with_bits_, 6),
    _ops.silu_derivative: (_ops.silu_with_derivative_, 16),
}

OPS = (*_ops.FUNCTIONAL_OPS, *_ops.FORWARD_OPS, *_ops.BACKWARD_OPS)
all_ops = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name().split("::")[1])


def name_of(op: torch._ops.OpOverload) -> str:
    return op.name().removeprefix("inplace_ops::")


def arguments_of(
    op: torch._ops.OpOverload,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    layout: str = "contiguous",
) -> list[object]:
    """Arguments as the package itself passes them: floats, bits, order, scalars."""
    arrange, order = LAYOUTS[layout]
    name = name_of(op)
    floats = [
        arrange(torch.randn(SHAPE, device=device).to(dtype))
        for _ in range(FLOATS_BEFORE_BITS.get(name, 1))
    ]
    planes = PLANES[name]
    bits = [] if planes is None else [_ops.empty_bits(floats[0], planes).random_()]
    if planes == 16:
        bits[0][-1] = 255  # no code is 0, which stands for NaN
    number = [IN_PLACE[op][1]] if op in IN_PLACE else []
    return [*floats, *number, *bits, order, *SCALARS.get(name, ())]


keeping_ops = pytest.mark.parametrize(
    "op", [op for op in _ops.FORWARD_OPS if PLANES[name_of(op)] is not None], ids=name_of
)


def test_every_op_is_listed() -> None:
    assert {name_of(op) for op in OPS} == set(PLANES)


@all_ops
@pytest.mark.parametrize("layout", LAYOUTS)
def test_opcheck(op: torch._ops.OpOverload, layout: str, device: torch.device) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        torch.library.opcheck(op, tuple(arguments_of(op, device, dtype, layout)))


@pytest.mark.parametrize("op", _ops.FUNCTIONAL_OPS, ids=name_of)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_functional_ops_equal_the_in_place_ones(
    op: torch._ops.OpOverload, layout: str, device: torch.device
) -> None:
    in_place, planes = IN_PLACE[op]
    x, _, *rest = arguments_of(op, device, layout=layout)
    before = x.clone()
    expected, expected_bits = x.clone(), _ops.empty_bits(x, planes)
    in_place(expected, expected_bits, *rest)
    for bits in (planes, 0):
        result, packed = op(x, bits, *rest)
        assert_identical(result, expected)
        assert torch.equal(packed, expected_bits[:bits])
    assert_identical(x, before)
    for bits in (-1, 33):
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
@pytest.mark.parametrize(
    "op",
    [op for op in OPS if PLANES[name_of(op)] is not None],
    ids=lambda op: op.name().split("::")[1],
)
def test_wrong_bits(op: torch._ops.OpOverload, wrong: str, device: torch.device) -> None:
    arguments = arguments_of(op, device)
    place = next(
        i for i, a in enumerate(arguments) if isinstance(a, Tensor) and a.dtype == torch.uint8
    )
    arguments[place] = WRONG_BITS[wrong](arguments[place])
    assert_refused(op, arguments)


@all_ops
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
@pytest.mark.parametrize(
    "op",
    [op for op in OPS if name_of(op) in FLOATS_BEFORE_BITS],
    ids=lambda op: op.name().split("::")[1],
)
def test_unlike_tensors(op: torch._ops.OpOverload, wrong: str, device: torch.device) -> None:
    for place in range(1, FLOATS_BEFORE_BITS[name_of(op)]):
        arguments = arguments_of(op, device)
        arguments[place] = WRONG_FLOATS[wrong](arguments[place])
        assert_refused(op, arguments)


@pytest.mark.parametrize("planes", [0, 2, 7, 9, 12, 33])
def test_wrong_number_of_planes(planes: int, device: torch.device) -> None:
    x = torch.randn(20, device=device)
    for op, accepted in (
        (_ops.relu_with_mask_, (1,)),
        (_ops.leaky_relu_with_mask_, (1,)),
        (_ops.silu_with_bits_, range(1, 9)),
        (_ops.silu_with_derivative_, (8, 16, 32)),
    ):
        if planes not in accepted:
            assert_refused(op, [x, _ops.empty_bits(x, planes), [], *SCALARS.get(name_of(op), ())])


@keeping_ops
@pytest.mark.parametrize("dtype", FLOATS)
def test_only_the_bits_are_written(
    op: torch._ops.OpOverload, dtype: torch.dtype, device: torch.device
) -> None:
    planes = PLANES[name_of(op)]
    for length in (*range(42), 511, 512, 513, 1029):
        x = torch.randn(length, device=device).to(dtype) - 1
        bytes_a_plane = (length + 7) // 8
        for sentinel in (0x00, 0xFF):
            around = torch.full(
                (planes * bytes_a_plane + 34,), sentinel, dtype=torch.uint8, device=device
            )
            bits = around[17:-17].view(planes, bytes_a_plane)
            op(x.clone(), bits, [], *SCALARS.get(name_of(op), ()))
            assert (around[:17] == sentinel).all()
            assert (around[-17:] == sentinel).all()
            if length % 8:  # the unused bits of the last byte are zero
                assert not (bits[:, -1] >> (length % 8)).any()


def test_relus_mask_is_one_bit_an_element(device: torch.device) -> None:
    x = torch.randn(77, device=device)
    x[3] = torch.nan
    x[4:7] = torch.tensor([0.0, -0.0, torch.inf])
    expected = ~(x <= 0)
    bits = _ops.empty_bits(x, 1)
    _ops.relu_with_mask_(x, bits, [])
    position = torch.arange(8, dtype=torch.uint8, device=device)
    unpacked = (bits[0][:, None] >> position & 1).flatten()[: x.numel()].bool()
    assert torch.equal(unpacked, expected)


@pytest.mark.parametrize("op", _ops.FORWARD_OPS, ids=name_of)
def test_meta_tensors(op: torch._ops.OpOverload) -> None:
    x, *rest = arguments_of(op, torch.device("meta"))
    op(x, *rest)
    assert x.is_meta
    assert x.shape == SHAPE


@pytest.mark.parametrize("op", _ops.BACKWARD_OPS, ids=name_of)
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
