"""The CUDA kernels' bodies on the host, against PyTorch in float64.

Compiles host_kernels.cpp, which calls the very functions that the `__global__` kernels call. Every
buffer lies between guards, at every alignment and with every tail length around a warp's tile:
guard bytes, which show a write, and under AddressSanitizer poisoned memory, which shows a read too.

What an activation is, and how exact, comes from its entry in inplace_ops.activations, so that a new
one is tested here without a word: conftest.py imports PyTorch and the package in any case.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from activations import FLOATS
from sanitizers import run_tests, sanitizers
from torch import Tensor

from inplace_ops.activations import ACTIVATIONS, LEAKY_RELU, SILU, Activation

GUARD = 64  # bytes before and after each buffer
GUARD_BYTE = 0xA5
# With save="output" the sign of the output must tell that of the input.
SCALARS = {"negative_slope": {"mask": -0.25, "output": 0.5}}
ROUNDING = {
    torch.float64: 4e-16,
    torch.float32: 3e-7,
    torch.float16: 6e-4,
    torch.bfloat16: 4.5e-3,
}
# Of the derivative itself, which is computed in float.
FORMULA = {torch.float64: 4e-15, torch.float32: 6e-7, torch.float16: 6e-7, torch.bfloat16: 6e-7}


class Case(NamedTuple):
    entry: Activation
    save: str
    bits: int
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """The activation's, in csrc/activations."""
        return self.entry.ops.name

    @property
    def scalars(self) -> dict[str, float]:
        return {name: SCALARS[name][self.save] for name in self.entry.scalars}

    @property
    def plain(self) -> str:
        """The functor that keeps nothing."""
        return "ForwardMask" if self.entry.has_mask else "ForwardOutput"

    @property
    def forward(self) -> str:
        return "ForwardDerivative" if self.save == "derivative" else self.plain

    @property
    def backward(self) -> str:
        if self.entry.has_mask:
            return "BackwardMask" if self.save == "mask" else "BackwardMaskOfOutput"
        return "BackwardOutput" if self.save == "output" else "BackwardDerivative"

    @property
    def derivative_error(self) -> float:
        if self.entry.has_mask:
            return 0.0
        if self.save == "output":
            return self.entry.output_errors[self.dtype][self.bits] + FORMULA[self.dtype]
        return 0.5 / self.entry.ops.derivative_steps[self.bits] + FORMULA[self.dtype]


def case_id(case: Case) -> str:
    return f"{case.name}-{case.save}-{case.bits}-{case.dtype}".replace("torch.", "")


def bits_of(entry: Activation, save: str, dtype: torch.dtype) -> list[int]:
    default = entry.default_bits(save, dtype)
    if entry.has_mask:
        return [default]
    return [8, 16, 32] if save == "derivative" else sorted({1, default, 8})


CASES = [
    Case(entry, save, bits, dtype)
    for entry in ACTIVATIONS
    for save in entry.saves
    for dtype in FLOATS
    for bits in bits_of(entry, save, dtype)
]
CURVES = [case for case in CASES if not case.entry.has_mask]
all_cases = pytest.mark.parametrize("case", CASES, ids=case_id)
# Where the elements lie is not the activation's business: one with a scalar, and one with a curve.
some_cases = pytest.mark.parametrize(
    "case", [case for case in CASES if case.entry in (LEAKY_RELU, SILU)], ids=case_id
)


class Buffer:
    """Bytes between guards, starting `offset` bytes past a multiple of 64."""

    def __init__(self, size: int, offset: int = 0) -> None:
        self.memory = torch.full((size + offset + 2 * GUARD,), GUARD_BYTE, dtype=torch.uint8)
        assert self.memory.data_ptr() % 64 == 0
        start = GUARD + offset
        self.address = self.memory.data_ptr() + start  # which an empty tensor does not tell
        self.data = self.memory[start : start + size]
        self.guards = [self.memory[:start], self.memory[start + size :]]

    def guards_are_intact(self) -> bool:
        return all((guard == GUARD_BYTE).all() for guard in self.guards)


class Operand(Buffer):
    """A tensor in a buffer. What its strides leave between the elements is guarded too."""

    def __init__(
        self, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], offset: int = 0
    ) -> None:
        last = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        elements = last + 1 if math.prod(shape) else 0
        super().__init__(elements * dtype.itemsize, offset)
        typed = self.data.view(dtype)
        self.tensor = typed.as_strided(shape, strides, typed.storage_offset())
        self.between = torch.ones(elements, dtype=torch.bool)
        self.between.as_strided(shape, strides).fill_(False)

    def guards_are_intact(self) -> bool:
        between = self.data.view(-1, self.tensor.dtype.itemsize)[self.between]
        return super().guards_are_intact() and bool((between == GUARD_BYTE).all())


def launch(
    host_kernels: ModuleType,
    case: Case,
    functor: str,
    operands: Sequence[Operand],
    packed: Buffer | None = None,
    first_row: int = 0,
) -> None:
    """Run a kernel over a virtual grid that begins at `first_row`, the first there is memory of.

    Operands of one dimension have rows of one element.
    """
    bits = case.bits if packed else 0
    packed = packed or Buffer(0)
    rows, *row = operands[0].tensor.shape
    first_element = first_row * math.prod(row)
    buffers = {id(buffer): buffer for buffer in (*operands, packed)}.values()
    guards = [guard for buffer in buffers for guard in buffer.guards]
    for guard in guards:
        host_kernels.poison(guard.data_ptr(), guard.numel())
    host_kernels.run(
        case.name,
        list(case.scalars.values()),
        functor,
        str(case.dtype).removeprefix("torch."),
        [
            operand.address - first_row * operand.tensor.stride(0) * case.dtype.itemsize
            for operand in operands
        ],
        packed.address - first_element // 8,
        packed.data.numel() // bits if bits else 0,
        bits,
        [first_row + rows, *row],
        [operand.tensor.stride() for operand in operands],
        first_element,
    )
    for guard in guards:
        host_kernels.unpoison(guard.data_ptr(), guard.numel())
    for buffer in buffers:
        assert buffer.guards_are_intact()


def derivatives(case: Case, x: Tensor, order: int) -> list[Tensor]:
    """PyTorch's value of the activation and its derivatives, in float64."""
    leaf = x.double().requires_grad_()
    results = [case.entry.torch_function(leaf, **case.scalars)]
    for _ in range(order):
        results += torch.autograd.grad(results[-1].sum(), leaf, create_graph=True)
    return [result.detach() for result in results]


def normal(dtype: torch.dtype, shape: Sequence[int], deviation: float = 1.0) -> Tensor:
    return (deviation * torch.randn(shape, dtype=torch.float64)).to(dtype)


def check_round_trip(
    host_kernels: ModuleType,
    case: Case,
    shape: Sequence[int],
    strides: Sequence[Sequence[int]] = ((1,),) * 3,
    offsets: Sequence[int] = (0, 0, 0, 0),
    first_row: int = 0,
) -> None:
    """Forward and backward against PyTorch.

    Values, gradient, incoming gradient and bits lie `offsets` bytes off the alignment.
    """
    dtype, count = case.dtype, math.prod(shape)
    x, grad = normal(dtype, shape, 3.0), normal(dtype, shape)
    values, result, incoming = (
        Operand(dtype, shape, stride, offset)
        for stride, offset in zip(strides, offsets[:3], strict=True)
    )
    packed = Buffer(case.bits * -(-count // 8), offsets[3]) if case.bits else None

    values.tensor.copy_(x)
    incoming.tensor.copy_(grad)
    launch(host_kernels, case, case.forward, [values, values], packed, first_row)
    y = values.tensor.clone()
    saved = [values] if case.save == "output" else []
    launch(host_kernels, case, case.backward, [result, incoming, *saved], packed, first_row)
    assert torch.equal(values.tensor, y)
    assert torch.equal(incoming.tensor, grad)
    if packed and count % 8:
        assert not (packed.data.view(case.bits, -1)[:, -1] >> count % 8).any()

    expected, slope = derivatives(case, x, 1)
    gradient = grad.double() * slope
    if case.entry.has_mask:
        assert torch.equal(y, expected.to(dtype))
        assert torch.equal(result.tensor, gradient.to(dtype))
    else:
        rounding = ROUNDING[dtype]
        torch.testing.assert_close(y.double(), expected, rtol=8 * rounding, atol=1e-7)
        tolerance = grad.double().abs() * (case.derivative_error + 2 * rounding) + 1e-7
        assert ((result.tensor.double() - gradient).abs() <= tolerance).all()

    values.tensor.copy_(x)
    launch(host_kernels, case, case.plain, [result, values], first_row=first_row)
    assert torch.equal(result.tensor, y)
    assert torch.equal(values.tensor, x)


@all_cases
def test_every_activation(host_kernels: ModuleType, case: Case) -> None:
    tile = host_kernels.tile[case.dtype.itemsize]
    for count in (0, 1, 43, tile, 9 * tile + 5):
        check_round_trip(host_kernels, case, [count])


@some_cases
def test_every_tail_length(host_kernels: ModuleType, case: Case) -> None:
    tile = host_kernels.tile[case.dtype.itemsize]
    for count in [*range(18), *range(tile - 9, tile + 10), 3 * tile, 8 * tile]:
        check_round_trip(host_kernels, case, [count])


@some_cases
@pytest.mark.parametrize("moved", range(4), ids=["values", "gradient", "incoming", "bits"])
def test_every_alignment(host_kernels: ModuleType, case: Case, moved: int) -> None:
    size = case.dtype.itemsize
    for offset in range(0, 16, 1 if moved == 3 else size):
        offsets = [0, 0, 0, 0]
        offsets[moved] = offset
        check_round_trip(host_kernels, case, [host_kernels.tile[size] + 37], offsets=offsets)


@some_cases
def test_indices_past_32_bits(host_kernels: ModuleType, case: Case) -> None:
    count = 2 * host_kernels.tile[case.dtype.itemsize] + 101
    for start in (2**31, 2**32, 2**35):
        check_round_trip(host_kernels, case, [count], first_row=start)


@some_cases
def test_strided(host_kernels: ModuleType, case: Case) -> None:
    """Rows with gaps, other ones in each operand, so that the dimensions do not merge."""
    rows, columns = 40, 8
    strides = [(3 * columns, 2), (columns + 5, 1), (2, 2 * rows)]
    for start in (0, 2**31, 2**32, 2**33):
        check_round_trip(host_kernels, case, [rows, columns], strides, first_row=start // columns)


# With fewer bits x is not near enough.
@pytest.mark.parametrize(
    "case",
    [
        case
        for case in CURVES
        if case.save == "output" and case.bits >= case.entry.default_bits("output", case.dtype)
    ],
    ids=case_id,
)
def test_double_backward(host_kernels: ModuleType, case: Case) -> None:
    dtype, shape = case.dtype, [2 * host_kernels.tile[case.dtype.itemsize] + 43]
    x = normal(dtype, shape, 3.0)
    _, first, second = derivatives(case, x, 2)
    x = torch.where((second / first).abs() < 2.5, x, 1.0)  # away from f' = 0
    _, first, second = derivatives(case, x, 2)
    ratio = second / first

    values, grad_grad, grad, result = (Operand(dtype, shape, [1]) for _ in range(4))
    packed = Buffer(case.bits * -(-shape[0] // 8))
    values.tensor.copy_(x)
    launch(host_kernels, case, case.forward, [values, values], packed)
    for operand in (grad_grad, grad):
        operand.tensor.copy_(normal(dtype, shape))
    launch(host_kernels, case, "DoubleBackward", [result, grad_grad, grad, values], packed)
    scale = grad_grad.tensor.double() * grad.tensor.double()
    # x is good to 3e-6 here, and the ratio's slope is at most 4 + ratio^2.
    error = 2 * ROUNDING[dtype] * ratio.abs() + 3e-6 * (4 + ratio.square())
    distance = (result.tensor.double() - scale * ratio).abs()
    assert (distance <= scale.abs() * error + 1e-7).all()


@pytest.mark.parametrize("case", CURVES, ids=case_id)
def test_not_finite(host_kernels: ModuleType, case: Case) -> None:
    """NaN as a GPU writes it, all bits set: the recovered x must not wrap around to a number."""
    x = torch.tensor([torch.nan, torch.inf, -torch.inf] * 8, dtype=case.dtype)
    values, result, incoming = (Operand(case.dtype, x.shape, [1]) for _ in range(3))
    packed = Buffer(case.bits * 3)
    values.tensor.copy_(x)
    incoming.tensor.fill_(1.0)
    launch(host_kernels, case, case.forward, [values, values], packed)
    elements = values.data.view(-1, case.dtype.itemsize)
    elements[values.tensor.isnan()] = 0xFF
    elements[:, -1] &= 0x7F
    saved = [values] if case.save == "output" else []
    launch(host_kernels, case, case.backward, [result, incoming, *saved], packed)
    _, slope = derivatives(case, x, 1)
    assert slope[0].isnan()
    assert result.tensor[slope.isnan()].isnan().all()


def test_under_sanitizers() -> None:
    """All of this file once more, with the kernels under ASan and UBSan."""
    run_tests(__file__, folder=Path(__file__).parent, preloaded=sanitizers())
