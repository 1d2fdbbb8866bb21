"""Compare the bodies of the CUDA kernels, run on the host, with PyTorch in float64.

Compiles host_kernels.cpp, which calls the same functions as the `__global__` kernels. Every buffer
is between guards, at every alignment and with every remainder after a warp's tile. The guards have
a known pattern, which reveals writes; under AddressSanitizer their memory is poisoned, which also
reveals reads.

Formulas and accuracies are those of the activations' entries in inplace_ops.activations, so a new
activation is tested here without further code. (conftest.py imports PyTorch and the package in any
case.)
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from _support.cases import FLOATS
from _support.marks import in_turn, slow
from _support.norm_cases import normalized, rounding
from _support.sanitizers import SANITIZE, run_tests, sanitizers
from torch import Tensor

from inplace_ops.activations import ACTIVATIONS, GELU_TANH, LEAKY_RELU, SILU, Activation

GUARD = 64  # bytes before and after each buffer
GUARD_BYTE = 0xA5
# With save="output" the sign of the output must determine the sign of the input.
SCALARS = {"negative_slope": {"mask": -0.25, "output": 0.5, "recompute": -0.25}}
ROUNDING = {
    torch.float64: 4e-16,
    torch.float32: 3e-7,
    torch.float16: 6e-4,
    torch.bfloat16: 4.5e-3,
}
# The error of computing the derivative, which 16-bit formats compute in float.
FORMULA = {torch.float64: 4e-15, torch.float32: 6e-7, torch.float16: 6e-7, torch.bfloat16: 6e-7}


class Case(NamedTuple):
    entry: Activation
    save: str
    bits: int
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """The activation's name in csrc/activations."""
        return self.entry.ops.name

    @property
    def scalars(self) -> dict[str, float]:
        return {name: SCALARS[name][self.save] for name in self.entry.scalars}

    @property
    def plain(self) -> str:
        """The functor of a forward that saves nothing."""
        return "ForwardMask" if self.entry.is_piecewise_linear else "ForwardOutput"

    @property
    def forward(self) -> str:
        return "ForwardDerivative" if self.save == "derivative" else self.plain

    @property
    def backward(self) -> str:
        if self.entry.is_piecewise_linear:
            return "BackwardMask" if self.save == "mask" else "BackwardMaskOfOutput"
        return "BackwardOutput" if self.save == "output" else "BackwardDerivative"

    @property
    def derivative_error(self) -> float:
        if self.entry.is_piecewise_linear:
            return 0.0
        if self.save == "recompute":
            return FORMULA[self.dtype]
        if self.save == "output":
            return self.entry.output_errors[self.dtype][self.bits] + FORMULA[self.dtype]
        return 0.5 / self.entry.ops.derivative_steps[self.bits] + FORMULA[self.dtype]


def case_id(case: Case) -> str:
    return f"{case.name}-{case.save}-{case.bits}-{case.dtype}".replace("torch.", "")


def bits_of(entry: Activation, save: str, dtype: torch.dtype) -> list[int]:
    default = entry.default_bits(save, dtype)
    if entry.is_piecewise_linear:
        return [default]
    return [8, 16, 32] if save == "derivative" else sorted({1, default, 8})


# For tests of alignments and remainders, which do not depend on the activation: one with a scalar
# argument, and a smooth one. For tests of the path that a launch takes one suffices.
SOME = (LEAKY_RELU, SILU)
TESTED = SOME if SANITIZE in os.environ else ACTIVATIONS

CASES = [
    Case(entry, save, bits, dtype)
    for entry in TESTED
    for save in entry.save_modes
    for dtype in FLOATS
    for bits in bits_of(entry, save, dtype)
]
SMOOTH_ACTIVATIONS = [case for case in CASES if not case.entry.is_piecewise_linear]


def parametrize(cases: Iterable[Case]) -> pytest.MarkDecorator:
    """Parametrize by case; those of activations that are not in SOME are slow."""
    parameters = [case if case.entry in SOME else pytest.param(case, marks=slow) for case in cases]
    return pytest.mark.parametrize("case", parameters, ids=case_id)


all_cases = parametrize(CASES)
some_cases = parametrize(case for case in CASES if case.entry in SOME)


@pytest.fixture
def host_kernels(
    request: pytest.FixtureRequest, built_host_kernels: Callable[[str], ModuleType]
) -> ModuleType:
    """host_kernels.cpp, compiled for SOME activations, or for all if the test's case needs them."""
    case = getattr(request.node, "callspec", None) and request.node.callspec.params.get("case")
    return built_host_kernels("some" if case is None or case.entry in SOME else "all")


class Buffer:
    """Bytes between guards, beginning `offset` bytes after a multiple of 64."""

    def __init__(self, size: int, offset: int = 0) -> None:
        self.memory = torch.full((size + offset + 2 * GUARD,), GUARD_BYTE, dtype=torch.uint8)
        assert self.memory.data_ptr() % 64 == 0
        start = GUARD + offset
        self.address = self.memory.data_ptr() + start  # the data_ptr() of an empty tensor is 0
        self.data = self.memory[start : start + size]
        self.guards = [self.memory[:start], self.memory[start + size :]]

    def guards_are_intact(self) -> bool:
        return all((guard == GUARD_BYTE).all() for guard in self.guards)


class Operand(Buffer):
    """A tensor in a buffer. The gaps that its strides leave between elements are guarded too."""

    def __init__(
        self, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], offset: int = 0
    ) -> None:
        last = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        elements = last + 1 if math.prod(shape) else 0
        super().__init__(elements * dtype.itemsize, offset)
        typed = self.data.view(dtype)
        self.tensor = typed.as_strided(shape, strides, typed.storage_offset())
        self.is_gap = torch.ones(elements, dtype=torch.bool)
        self.is_gap.as_strided(shape, strides).fill_(False)

    def guards_are_intact(self) -> bool:
        gaps = self.data.view(-1, self.tensor.dtype.itemsize)[self.is_gap]
        return super().guards_are_intact() and bool((gaps == GUARD_BYTE).all())


class LaunchPath(NamedTuple):
    access: int  # elements of an access, except in the rest at the end
    layout: str  # of a norm's affine, for accesses of several elements


def launch(
    host_kernels: ModuleType,
    case: Case,
    functor: str,
    operands: Sequence[Operand],
    packed: Buffer | None = None,
    first_row: int = 0,
    affine: Sequence[Operand] = (),
) -> LaunchPath:
    """Run a kernel over a virtual grid, and check the guards of all buffers.

    The grid begins at `first_row`: the operands have no memory for earlier rows. Operands of one
    dimension have rows of one element. The affine has size 1 in dimensions in which it does not
    differ.
    """
    bits = case.bits if packed else 0
    packed = packed or Buffer(0)
    rows, *row = operands[0].tensor.shape
    first_element = first_row * math.prod(row)
    affine_strides = [
        [stride if size > 1 else 0 for size, stride in zip(*layout, strict=True)]
        for layout in ((part.tensor.shape, part.tensor.stride()) for part in affine)
    ]
    buffers = {id(buffer): buffer for buffer in (*operands, packed, *affine)}.values()
    guards = [guard for buffer in buffers for guard in buffer.guards]
    for guard in guards:
        host_kernels.poison(guard.data_ptr(), guard.numel())
    path = host_kernels.run(
        case.name,
        list(case.scalars.values()),
        functor,
        str(case.dtype).removeprefix("torch."),
        [
            operand.address - first_row * operand.tensor.stride(0) * operand.tensor.dtype.itemsize
            for operand in operands
        ],
        packed.address - first_element // 8,
        packed.data.numel() // bits if bits else 0,
        bits,
        [first_row + rows, *row],
        [operand.tensor.stride() for operand in operands],
        first_element,
        [
            part.address - first_row * strides[0] * part.tensor.dtype.itemsize
            for part, strides in zip(affine, affine_strides, strict=True)
        ],
        affine_strides[::2],
    )
    for guard in guards:
        host_kernels.unpoison(guard.data_ptr(), guard.numel())
    for buffer in buffers:
        assert buffer.guards_are_intact()
    return LaunchPath(*path)


def derivatives(case: Case, x: Tensor, order: int) -> list[Tensor]:
    """Return PyTorch's activation and its derivatives up to an order, in float64."""
    leaf = x.double().requires_grad_()
    results = [case.entry.torch_function(leaf, **case.scalars)]
    for _ in range(order):
        results += torch.autograd.grad(results[-1].sum(), leaf, create_graph=True)
    return [result.detach() for result in results]


def normal(dtype: torch.dtype, shape: Sequence[int], std: float = 1.0) -> Tensor:
    return (std * torch.randn(shape, dtype=torch.float64)).to(dtype)


def check_round_trip(
    host_kernels: ModuleType,
    case: Case,
    shape: Sequence[int],
    strides: Sequence[Sequence[int]] = ((1,),) * 3,
    offsets: Sequence[int] = (0, 0, 0, 0),
    first_row: int = 0,
) -> int:
    """Compare forward and backward with PyTorch; return the elements of an access of backward.

    Args:
        host_kernels: The compiled host_kernels.cpp.
        case: The activation, save mode, bits and dtype.
        shape: The shape of all tensors.
        strides: Those of values, gradient and incoming gradient.
        offsets: Bytes by which values, gradient, incoming gradient and bits are misaligned.
        first_row: The row at which the virtual grid begins.
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
    operands = [result, incoming, *saved]
    backward = launch(host_kernels, case, case.backward, operands, packed, first_row)
    assert torch.equal(values.tensor, y)
    assert torch.equal(incoming.tensor, grad)
    if packed and count % 8:
        assert not (packed.data.view(case.bits, -1)[:, -1] >> count % 8).any()

    expected, derivative = derivatives(case, x, 1)
    gradient = grad.double() * derivative
    if case.entry.is_piecewise_linear:
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
    return backward.access


@all_cases
def test_every_activation(host_kernels: ModuleType, case: Case) -> None:
    tile = host_kernels.tile[case.dtype.itemsize]
    for count in (0, 1, 43, 2 * tile + 5):
        check_round_trip(host_kernels, case, [count])


@some_cases
def test_every_remainder(host_kernels: ModuleType, case: Case) -> None:
    tile = host_kernels.tile[case.dtype.itemsize]
    for count in [*range(18), *range(tile - 9, tile + 10), 3 * tile, 8 * tile]:
        check_round_trip(host_kernels, case, [count])


@some_cases
@pytest.mark.parametrize("moved", range(4))  # values, gradient, incoming, bits
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
    """Rows with gaps that differ between operands, so that the dimensions do not coalesce."""
    rows, columns = 40, 8
    strides = [(3 * columns, 2), (columns + 5, 1), (2, 2 * rows)]
    for start in (0, 2**31, 2**32, 2**33):
        check_round_trip(host_kernels, case, [rows, columns], strides, first_row=start // columns)


def check_rows_with_gaps(
    host_kernels: ModuleType, case: Case, check: Callable[..., int], start: int = 0
) -> None:
    """Check that rows with gaps take wide accesses if rows and gaps are whole numbers of accesses.

    Past 2^31 elements they take accesses of one element. `check` takes a shape, strides and the
    first row, and returns the elements of an access.
    """
    count = vector(case)
    rows, columns = samples_of(host_kernels, case, 4 * count), 4 * count
    wide = check([rows, columns], [(columns, 1)] * 3, first_row=0)
    first_row = host_kernels.tile[case.dtype.itemsize] * (start // columns)
    for size, gaps, is_whole in (
        (columns, (count, 0, 5 * count), True),
        (columns, (0, 2 * count, 2 * count), True),
        (columns, (count, 1, 0), False),
        (columns, (0, count, 3), False),
        (columns + 1, (count, count, 2 * count), False),
        (columns + 1, (count, count, count - 1), False),
    ):
        strides = [(size + gap, 1) for gap in gaps]
        access = check([rows, size], strides, first_row=first_row)
        fits = (first_row + rows) * size < 2**31
        assert access == (wide if is_whole and fits else 1)


@some_cases
def test_rows_with_gaps(host_kernels: ModuleType, case: Case) -> None:
    for start in (0, 2**22, 2**31, 2**35):
        check_rows_with_gaps(
            host_kernels, case, partial(check_round_trip, host_kernels, case), start
        )


# With fewer bits the recovered x is not exact enough.
@parametrize(
    case
    for case in SMOOTH_ACTIVATIONS
    if case.save == "output" and case.bits >= case.entry.default_bits("output", case.dtype)
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
    # The error of x is at most 3e-6 here, and the ratio's derivative at most 4 + ratio^2.
    error = 2 * ROUNDING[dtype] * ratio.abs() + 3e-6 * (4 + ratio.square())
    distance = (result.tensor.double() - scale * ratio).abs()
    assert (distance <= scale.abs() * error + 1e-7).all()


@parametrize(SMOOTH_ACTIVATIONS)
def test_nonfinite_inputs(host_kernels: ModuleType, case: Case) -> None:
    """NaNs have all bits set, as a GPU writes them: the recovered x must not wrap to a number."""
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
    _, derivative = derivatives(case, x, 1)
    assert derivative[0].isnan()
    assert result.tensor[derivative.isnan()].isnan().all()


NORMALIZED = [Case(entry, "recompute", 0, dtype) for entry in TESTED for dtype in FLOATS]
every_normalized = parametrize(NORMALIZED)
some_normalized = parametrize(case for case in NORMALIZED if case.entry in SOME)
OF_EACH_DTYPE = [case for case in NORMALIZED if case.entry is LEAKY_RELU]
each_dtype = parametrize(OF_EACH_DTYPE)
Dims = tuple[int, ...]


def dense(shape: Sequence[int]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def random_scale_shift(
    case: Case, shape: Sequence[int], dims: Dims, offset: int, gap: int
) -> Operand:
    """Return random numbers that differ in `dims` of the shape, with `gap` between samples."""
    dtype = torch.float64 if case.dtype == torch.float64 else torch.float32
    sizes = [size if d in dims else 1 for d, size in enumerate(shape)]
    sample, *strides = dense(sizes)
    result = Operand(dtype, sizes, [sample + gap, *strides], offset)
    result.tensor.copy_(normal(dtype, sizes))
    return result


def check_normalized(
    host_kernels: ModuleType,
    case: Case,
    shape: Sequence[int],
    channels: Dims,
    rows: Dims | None = None,
    *,
    strides: Sequence[Sequence[int]] | None = None,
    offsets: Sequence[int] = (0,) * 7,
    gap: int = 0,
    first_row: int = 0,
) -> LaunchPath:
    """Compare a norm's output, the activation and its gradient with PyTorch.

    Returns the slowest path.

    Args:
        host_kernels: The compiled host_kernels.cpp.
        case: The activation and dtype.
        shape: The shape of the norm's input.
        channels: The dimensions in which the channels' scale and shift differ.
        rows: The dimensions in which the rows' rstd and mean differ; None without row statistics.
        strides: Those of input, incoming gradient and result; dense by default.
        offsets: Bytes by which input, incoming gradient, result, scale, shift, rstd and mean are
            misaligned.
        gap: Elements between the affines of two samples.
        first_row: The row at which the virtual grid begins.
    """
    dtype = case.dtype
    x, grad = normal(dtype, shape), normal(dtype, shape)
    inputs, incoming, result = (
        Operand(dtype, shape, stride, offset)
        for stride, offset in zip(strides or [dense(shape)] * 3, offsets[:3], strict=True)
    )
    inputs.tensor.copy_(x)
    incoming.tensor.copy_(grad)
    dims_of_parts = [channels] * 2 if rows is None else [channels] * 2 + [rows] * 2
    affine = [
        random_scale_shift(case, shape, dims, offset, gap)
        for dims, offset in zip(dims_of_parts, offsets[3:], strict=False)
    ]
    parts = [part.tensor.clone() for part in affine]

    def run(functor: str, *operands: Operand, result: Operand = result) -> Tensor:
        result.tensor.fill_(torch.nan)
        paths.append(
            launch(host_kernels, case, functor, [result, *operands], None, first_row, affine)
        )
        return result.tensor.clone()

    paths: list[LaunchPath] = []
    z = run("Normalize", inputs)
    y = run("ForwardRecompute", inputs)
    actual = run("BackwardRecompute", incoming, inputs)
    for target in (torch.float16, torch.bfloat16) if dtype == torch.float32 else ():
        narrow = Operand(target, shape, result.tensor.stride(), offsets[2])
        suffix = f" to {target}".replace("torch.", "")
        assert torch.equal(run("Normalize" + suffix, inputs, result=narrow), z.to(target))
        assert torch.equal(run("ForwardRecompute" + suffix, inputs, result=narrow), y.to(target))
    total = torch.add(z, grad)
    assert torch.equal(run("NormalizeAdd", incoming, inputs), total)
    if case.entry.is_piecewise_linear:
        value, _ = derivatives(case, total, 1)
        assert torch.equal(run("ForwardRecomputeAdd", incoming, inputs), value.to(dtype))
    for operand, original in zip([inputs, incoming, *affine], [x, grad, *parts], strict=True):
        assert torch.equal(operand.tensor, original)

    of_rows = None if rows is None else torch.stack(parts[2:])
    expected, error = normalized(x, torch.stack(parts[:2]), of_rows)
    assert ((z.double() - expected).abs() <= error).all()
    value, derivative = derivatives(case, z, 1)
    gradient = grad.double() * derivative
    if case.entry.is_piecewise_linear:
        assert torch.equal(y, value.to(dtype))
        assert torch.equal(actual, gradient.to(dtype))
    else:
        compute = ROUNDING[parts[0].dtype]
        error = rounding(value, dtype) + 8 * compute * value.abs() + FORMULA[dtype]
        assert ((y.double() - value).abs() <= error).all()
        error_of_derivative = FORMULA[dtype] + 2 * compute
        if case.entry is GELU_TANH:
            # Its derivative has the term z / 2 (1 - tanh(u)^2) u', whose difference has an absolute
            # error, in PyTorch too: 4.9e-15 in float64 at z = -7. Here z exceeds 4, unlike x.
            slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * z.double() ** 2)
            error_of_derivative = error_of_derivative + compute * z.double().abs() * slope
        error = rounding(gradient, dtype) + grad.double().abs() * error_of_derivative
        assert ((actual.double() - gradient).abs() <= error).all()
    return min(paths)


def vector(case: Case) -> int:
    """Return the elements of the widest access."""
    return 1 if case.dtype == torch.float64 else 16 // case.dtype.itemsize


def samples_of(host_kernels: ModuleType, case: Case, sample: int) -> int:
    """Return how many samples of `sample` elements are larger than a tile."""
    return host_kernels.tile[case.dtype.itemsize] // sample + 2


@every_normalized
def test_every_activation_after_a_norm(host_kernels: ModuleType, case: Case) -> None:
    samples = samples_of(host_kernels, case, 5 * 49)
    check_normalized(host_kernels, case, [samples, 5, 49], (1,))
    check_normalized(host_kernels, case, [3, 49, 16], (2,))
    check_normalized(host_kernels, case, [49, 16], (1,), (0,))
    check_normalized(host_kernels, case, [1], ())
    check_normalized(host_kernels, case, [0, 3], (1,))


@some_normalized
@pytest.mark.parametrize(
    "channels", [(1,), (0, 1), ()]
)  # a batch norm, a group norm, one scale and shift for all
def test_channels_of_every_size(host_kernels: ModuleType, case: Case, channels: Dims) -> None:
    """Accesses reach into the next channel, and into the next sample, at every index."""
    for size in (*range(1, 3 * vector(case) + 2), 49, 196):
        shape = [samples_of(host_kernels, case, 5 * size), 5, size]
        access, _ = check_normalized(host_kernels, case, shape, channels)
        if size > 1:  # with size 1 channels are innermost
            fits = size >= vector(case) or not channels
            assert access == (vector(case) if fits else 1)


@some_normalized
@pytest.mark.parametrize("channels", [(2,), (0, 2)])  # a batch norm, a group norm
def test_innermost_channels(host_kernels: ModuleType, case: Case, channels: Dims) -> None:
    count = vector(case)
    for size in (*range(2, 2 * count + 1), 49, 64):
        shape = [3, samples_of(host_kernels, case, 3 * size), size]
        access, _ = check_normalized(host_kernels, case, shape, channels)
        assert access == (count if size % count == 0 else 1)
    # The gap aligns or misaligns where the affine of a sample begins.
    for gap in range(1, 9):
        access, _ = check_normalized(host_kernels, case, [3, 99, 16], channels, gap=gap)
        assert access == (1 if 0 in channels and gap % 4 else count)


@some_normalized
@pytest.mark.parametrize("channels", [(1,), (0,), (0, 1), ()])
def test_rows_and_columns(host_kernels: ModuleType, case: Case, channels: Dims) -> None:
    count = vector(case)
    for columns in (*range(2, 2 * count + 2), 49, 64):
        shape = [samples_of(host_kernels, case, columns), columns]
        access, _ = check_normalized(host_kernels, case, shape, channels, (0,))
        suits = 1 in channels and columns % count == 0
        assert access == (count if suits else 1)
    # Row statistics that differ between the elements of a row.
    assert check_normalized(host_kernels, case, [99, 16], channels, (0, 1)).access == 1
    assert check_normalized(host_kernels, case, [1600, 1], channels, (0,)).access == 1


def expected_path(
    host_kernels: ModuleType, case: Case, shape: Sequence[int], layout: str
) -> LaunchPath:
    """Return the path of a launch: wide if the layout allows it and there is a whole tile."""
    count = vector(case)
    is_whole = shape[-1] % count == 0
    if math.prod(shape) < host_kernels.tile[case.dtype.itemsize] or count == 1:
        return LaunchPath(1, "")
    if layout == "planes":
        return LaunchPath(count, "planes" if is_whole else "split planes")
    return LaunchPath(count, layout) if is_whole else LaunchPath(1, "")


PLANES = [28 * 28, 14 * 14, 7 * 7, 7 * 3]
CHANNELS = [64, 256, 3, 10]


@pytest.mark.parametrize(
    ("case", "sizes", "batch"),
    in_turn(OF_EACH_DTYPE, itertools.product(PLANES, CHANNELS), [1, 3]),
    ids=lambda value: case_id(value) if isinstance(value, Case) else str(value),
)
def test_layouts_of_networks(
    host_kernels: ModuleType, case: Case, sizes: tuple[int, int], batch: int
) -> None:
    """Sizes of networks, with one affine for all samples and with one for each sample."""
    size, count = sizes
    if batch * count * size > 2**17:
        return
    shape = [batch, count, size]
    for channels in ((1,), (0, 1)):
        expected = expected_path(host_kernels, case, shape, "planes")
        assert check_normalized(host_kernels, case, shape, channels) == expected
    shape = [batch, size, count]
    for channels in ((2,), (0, 2)):
        layout = "channels last, strided" if 0 in channels and batch > 1 else "channels last"
        expected = expected_path(host_kernels, case, shape, layout)
        assert check_normalized(host_kernels, case, shape, channels) == expected


@each_dtype
@pytest.mark.parametrize("rows", [1, 37, 197])
@pytest.mark.parametrize("columns", [384, 512, 100])
def test_layer_norms(host_kernels: ModuleType, case: Case, rows: int, columns: int) -> None:
    shape = [rows, columns]
    expected = expected_path(host_kernels, case, shape, "channels last")
    assert check_normalized(host_kernels, case, shape, (1,), (0,)) == expected


@each_dtype
def test_affine_of_other_strides(host_kernels: ModuleType, case: Case) -> None:
    if vector(case) == 1:
        return
    for size in (49, 64):
        shape = [5, 7, size, 16]
        for channels in ((0, 2), (0, 1, 2)):
            path = check_normalized(host_kernels, case, shape, channels, gap=4)
            assert path == LaunchPath(vector(case), "split planes, strided")
    path = check_normalized(host_kernels, case, [5, 7, 64], (0, 1), gap=1)
    assert path == LaunchPath(vector(case), "split planes, strided")
    path = check_normalized(
        host_kernels, case, [99, 16], (1,), ()
    )  # the same statistics in all rows
    assert path == LaunchPath(vector(case), "channels last, strided")


def test_division_by_multiplication(host_kernels: ModuleType) -> None:
    top = 2**31 - 1
    near_powers = (2**k + i for k in range(7, 31) for i in (-1, 0, 1))
    for divisor in (*range(2, 100), *near_powers, top):
        multiples = (1, 2, 3, top // divisor)
        ends = [multiple * divisor + i for multiple in multiples for i in (-1, 0, 1)]
        numbers = [n for n in (0, 1, *ends, top - 1, top) if n <= top]
        numbers += [n * (top // 1000) + 7 for n in range(999)]
        quotients, remainders = host_kernels.divide(numbers, divisor)
        assert quotients == [n // divisor for n in numbers], divisor
        assert remainders == [n % divisor for n in numbers], divisor


@some_normalized
@pytest.mark.parametrize("moved", range(7))
def test_every_alignment_after_a_norm(host_kernels: ModuleType, case: Case, moved: int) -> None:
    size = case.dtype.itemsize if moved < 3 else max(case.dtype.itemsize, 4)
    for offset in range(0, 16, size):
        offsets = [0] * 7
        offsets[moved] = offset
        for shape, channels, rows in (([37, 3, 16], (2,), (0,)), ([37, 3, 16], (1,), None)):
            access, _ = check_normalized(host_kernels, case, shape, channels, rows, offsets=offsets)
            matters = moved < 3 or (moved < 5 and channels == (2,))
            assert access == (1 if offset and matters else vector(case))


@some_normalized
@pytest.mark.parametrize("channels", [(1,), (0, 1), (2,), (0, 2)])
def test_affine_past_32_bits(host_kernels: ModuleType, case: Case, channels: Dims) -> None:
    tile = host_kernels.tile[case.dtype.itemsize]
    size = 40 if 2 in channels else 43  # with 43, accesses reach into the next channel
    shape = [samples_of(host_kernels, case, 3 * size), 3, size]
    rows = (0,) if 2 in channels else None
    for start in (2**31, 2**32, 2**35):
        first_row = (start // (3 * size) // tile + 1) * tile  # a tile begins there
        access, _ = check_normalized(host_kernels, case, shape, channels, rows, first_row=first_row)
        assert access == (vector(case) if start < 2**32 else 1)  # AffineLayout has 32-bit indices


@some_normalized
@pytest.mark.parametrize("channels", [(0,), (1,)])  # rows, columns
def test_strided_after_a_norm(host_kernels: ModuleType, case: Case, channels: Dims) -> None:
    rows, columns = 40, 8
    strides = [(3 * columns, 2), (columns + 5, 1), (2, 2 * rows)]
    for start in (0, 2**31, 2**32, 2**33):
        first_row = start // columns
        access, _ = check_normalized(
            host_kernels, case, [rows, columns], channels, (0,), strides=strides, gap=3,
            first_row=first_row,
        )  # fmt: skip
        assert access == 1


@some_normalized
@pytest.mark.parametrize("channels", [(0,), (1,)])  # planes, columns
def test_rows_with_gaps_after_a_norm(host_kernels: ModuleType, case: Case, channels: Dims) -> None:
    def check(shape: Sequence[int], strides: Sequence[Sequence[int]], first_row: int) -> int:
        return check_normalized(
            *(host_kernels, case, shape, channels, (0,) if channels == (1,) else None),
            strides=strides,
            first_row=first_row,
        ).access

    for start in (0, 2**22, 2**31):
        check_rows_with_gaps(host_kernels, case, check, start)


@every_normalized
def test_infinite_gradients_after_a_norm(host_kernels: ModuleType, case: Case) -> None:
    """An infinite gradient is multiplied by a derivative of 0 only where PyTorch does so."""
    x = torch.tensor([-5.0, -3.0, 0.0, 3.0, 6.0, 7.0] * 99, dtype=case.dtype)
    inputs, result, incoming = (Operand(case.dtype, x.shape, [1]) for _ in range(3))
    affine = [random_scale_shift(case, x.shape, (), 0, 0) for _ in range(2)]
    inputs.tensor.copy_(x)
    incoming.tensor.fill_(torch.inf)
    for part, value in zip(affine, (1.0, 0.0), strict=True):
        part.tensor.fill_(value)
    launch(host_kernels, case, "BackwardRecompute", [result, incoming, inputs], affine=affine)
    leaf = x.double().requires_grad_()
    y = case.entry.torch_function(leaf, **case.scalars)
    (expected,) = torch.autograd.grad(y, leaf, torch.full_like(y, torch.inf))
    torch.testing.assert_close(result.tensor.double(), expected, equal_nan=True)


@parametrize(case for case in NORMALIZED if not case.entry.is_piecewise_linear)
def test_nonfinite_inputs_after_a_norm(host_kernels: ModuleType, case: Case) -> None:
    x = torch.tensor([torch.nan, torch.inf, -torch.inf] * 99, dtype=case.dtype)
    inputs, result, incoming = (Operand(case.dtype, x.shape, [1]) for _ in range(3))
    affine = [random_scale_shift(case, x.shape, (), 0, 0) for _ in range(2)]
    inputs.tensor.copy_(x)
    incoming.tensor.fill_(1.0)
    affine[0].tensor.fill_(0.5)
    launch(host_kernels, case, "Normalize", [result, inputs], affine=affine)
    torch.testing.assert_close(result.tensor, x, rtol=0, atol=0, equal_nan=True)
    launch(host_kernels, case, "BackwardRecompute", [result, incoming, inputs], affine=affine)
    _, derivative = derivatives(case, x, 1)
    assert derivative[0].isnan()
    assert result.tensor[derivative.isnan()].isnan().all()


@slow
def test_under_sanitizers() -> None:
    """Run this file again under ASan and UBSan, with the kernels of two activations."""
    run_tests(__file__, folder=Path(__file__).parent, preloaded=sanitizers())
