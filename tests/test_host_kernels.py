"""The CUDA kernels' bodies on the host, against NumPy in float64.

Compiles host_kernels.cpp, which calls the very functions that the `__global__` kernels call. Every
buffer lies between guards, at every alignment and with every tail length around a warp's tile:
guard bytes, which show a write, and under AddressSanitizer poisoned memory, which shows a read too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from sanitizers import run_tests, sanitizers

GUARD = 64  # bytes before and after each buffer
GUARD_BYTE = 0xA5
DTYPES = ["float64", "float32", "float16", "bfloat16"]
SIZE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
SLOPE = -0.25


class Buffer:
    """Bytes between guards, starting `offset` bytes past a multiple of 64."""

    def __init__(self, size: int, offset: int = 0) -> None:
        self.memory = np.full(size + offset + 2 * GUARD + 64, GUARD_BYTE, np.uint8)
        self.start = GUARD + -self.memory.ctypes.data % 64 + offset
        self.size = size

    @property
    def data(self) -> np.ndarray:
        return self.memory[self.start : self.start + self.size]

    @property
    def address(self) -> int:
        return self.memory.ctypes.data + self.start

    @property
    def guards(self) -> list[np.ndarray]:
        return [self.memory[: self.start], self.memory[self.start + self.size :]]

    def guards_are_intact(self) -> bool:
        return all((guard == GUARD_BYTE).all() for guard in self.guards)


def launch(
    host_kernels: ModuleType,
    name: str,
    kind: str,
    dtype: str,
    operands: Sequence[Buffer],
    packed: Buffer,
    bits: int,
    sizes: Sequence[int],
    strides: Sequence[Sequence[int]],
    slope: float = SLOPE,
    first_element: int = 0,
    first_offset: int = 0,
) -> None:
    """Run a kernel over a virtual grid that begins at `first_element`.

    It is the first of the buffers' elements: `first_offset` elements of memory come before it.
    """
    buffers = list({id(b): b for b in (*operands, packed)}.values())
    for guard in [guard for buffer in buffers for guard in buffer.guards]:
        host_kernels.poison(guard.ctypes.data, guard.size)
    host_kernels.run(
        name,
        kind,
        dtype,
        slope,
        [operand.address - first_offset * SIZE[dtype] for operand in operands],
        packed.address - first_element // 8,
        packed.size // bits if bits else 0,
        bits,
        sizes,
        strides,
        first_element,
    )
    for guard in [guard for buffer in buffers for guard in buffer.guards]:
        host_kernels.unpoison(guard.ctypes.data, guard.size)
    for buffer in buffers:
        assert buffer.guards_are_intact()


def encode(values: np.ndarray, dtype: str) -> np.ndarray:
    """float64 values as the bytes of a dtype (bfloat16 truncated: any bfloat16 value will do)."""
    if dtype == "bfloat16":
        pattern = values.astype(np.float32).view(np.uint32) >> 16
        return pattern.astype(np.uint16).view(np.uint8)
    return values.astype(dtype).view(np.uint8)


def decode(data: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        pattern = np.ascontiguousarray(data).view(np.uint16).astype(np.uint32) << 16
        return pattern.view(np.float32).astype(np.float64)
    return np.ascontiguousarray(data).view(dtype).astype(np.float64)


def silu_derivative(x: np.ndarray) -> np.ndarray:
    s = 1 / (1 + np.exp(-x))
    return s * (1 + x * (1 - s))


VALUE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "relu": lambda x: np.maximum(x, 0),
    "leaky_relu": lambda x: np.where(x > 0, x, SLOPE * x),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "silu_derivative": lambda x: x / (1 + np.exp(-x)),
}
DERIVATIVE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "relu": lambda x: (x > 0).astype(np.float64),
    "leaky_relu": lambda x: np.where(x > 0, 1.0, SLOPE),
    "silu": silu_derivative,
    "silu_derivative": silu_derivative,
}
ROUNDING = {"float64": 4e-16, "float32": 3e-7, "float16": 6e-4, "bfloat16": 4.5e-3}
# Of silu' itself: sigmoid(x) (1 + x sigmoid(-x)), in float.
FORMULA = {"float64": 4e-15, "float32": 6e-7, "float16": 6e-7, "bfloat16": 6e-7}
# The README's table, by 1 to 8 bits, and the error of codes of 8, 16 and 32 bits.
SILU_ERROR = {
    "float64": [5e-9, 3.5e-9, 1.7e-9, 9e-10, 5e-10, 2.1e-10, 1.1e-10, 6e-11],
    "float32": [4.5e-5, 5.6e-5, 2.8e-5, 1.4e-5, 7e-6, 3.5e-6, 2.5e-6, 1.9e-6],
    "float16": [3.9e-3, 4.1e-3, 4.1e-3, 3.6e-3, 3.8e-3, 7.2e-3, 0, 0],
    "bfloat16": [1.2e-2, 1.5e-2, 1.5e-2, 1.6e-2, 0, 0, 0, 0],
}
GRID_ERROR = {8: 0.5 / 212, 16: 0.5 / 54610, 32: 0.5 / 3221225472}
USUAL_BITS = {"float64": 1, "float32": 6, "float16": 7, "bfloat16": 5}
CASES = [
    ("relu", 1),
    ("leaky_relu", 1),
    *(("silu", bits) for bits in range(1, 9)),
    *(("silu_derivative", bits) for bits in GRID_ERROR),
]
TILE = {"float64": 64, "float32": 256, "float16": 512, "bfloat16": 512}  # elements of a warp
all_dtypes = pytest.mark.parametrize("dtype", DTYPES)
all_cases = pytest.mark.parametrize("case", CASES, ids=str)


def check_round_trip(
    host_kernels: ModuleType,
    case: tuple[str, int],
    dtype: str,
    count: int,
    offsets: Sequence[int] = (0, 0, 0, 0),
    first_element: int = 0,
) -> None:
    """Forward and backward of `count` elements against NumPy.

    Values, gradient, incoming gradient and bits lie `offsets` bytes off the alignment.
    """
    name, bits = case
    size = SIZE[dtype]
    generator = np.random.default_rng()
    x_bytes = encode(generator.standard_normal(count) * 3, dtype)
    x = decode(x_bytes, dtype)
    grad_bytes = encode(generator.standard_normal(count), dtype)
    grad = decode(grad_bytes, dtype)

    plane = -(-count // 8)
    values, result, incoming = (Buffer(count * size, offset) for offset in offsets[:3])
    packed = Buffer(bits * plane, offsets[3])
    values.data[:] = x_bytes
    incoming.data[:] = grad_bytes

    def run(kind: str, *operands: Buffer) -> None:
        sizes, strides = [first_element + count], [[1]] * len(operands)
        launch(
            host_kernels, name, kind, dtype, operands, packed, bits, sizes, strides,
            first_element=first_element, first_offset=first_element,
        )  # fmt: skip

    run("forward_keeping", values, values)
    y = decode(values.data, dtype)
    rounding = ROUNDING[dtype]
    np.testing.assert_allclose(y, VALUE[name](x), rtol=8 * rounding, atol=1e-7)
    if name == "silu":
        run("backward_from_both", result, incoming, values)
        error = SILU_ERROR[dtype][bits - 1] + FORMULA[dtype]
    else:
        run("backward_from_bits", result, incoming)
        error = GRID_ERROR[bits] + FORMULA[dtype] if name == "silu_derivative" else 0.0
    expected = grad * DERIVATIVE[name](x)
    tolerance = np.abs(grad) * (error + 2 * rounding) + 1e-7
    assert (np.abs(decode(result.data, dtype) - expected) <= tolerance).all()
    if count % 8:
        assert (packed.data.reshape(bits, plane)[:, -1] >> count % 8 == 0).all()
    np.testing.assert_array_equal(incoming.data, grad_bytes)

    values.data[:] = x_bytes
    run("forward", values, values)
    np.testing.assert_array_equal(decode(values.data, dtype), y)


@all_dtypes
@all_cases
def test_every_tail_length(host_kernels: ModuleType, case: tuple[str, int], dtype: str) -> None:
    tile = TILE[dtype]
    for count in [*range(18), *range(tile - 9, tile + 10), 3 * tile, 8 * tile, 9 * tile + 5]:
        check_round_trip(host_kernels, case, dtype, count)


@all_dtypes
@all_cases
@pytest.mark.parametrize("moved", range(4), ids=["values", "gradient", "incoming", "bits"])
def test_every_alignment(
    host_kernels: ModuleType, case: tuple[str, int], dtype: str, moved: int
) -> None:
    count = TILE[dtype] + 37
    for offset in range(0, 16, 1 if moved == 3 else SIZE[dtype]):
        offsets = [0, 0, 0, 0]
        offsets[moved] = offset
        check_round_trip(host_kernels, case, dtype, count, offsets)


@all_dtypes
@all_cases
def test_indices_past_32_bits(host_kernels: ModuleType, case: tuple[str, int], dtype: str) -> None:
    for start in (2**31, 2**32, 2**35):
        check_round_trip(host_kernels, case, dtype, 2 * TILE[dtype] + 101, first_element=start)


@pytest.mark.parametrize("start", [0, 2**31, 2**33], ids=["small", "past 2^31", "past 2^33"])
@all_dtypes
def test_strided(host_kernels: ModuleType, dtype: str, start: int) -> None:
    # Every other element of rows with a gap, so that the dimensions do not merge.
    rows, columns = 40, 8
    x_bytes = encode(np.random.default_rng().standard_normal(rows * 3 * columns), dtype)
    values, packed = Buffer(x_bytes.size), Buffer(rows)
    values.data[:] = x_bytes
    sizes, strides = [start // columns + rows, columns], [[3 * columns, 2]] * 2
    launch(
        host_kernels, "relu", "forward_keeping", dtype, [values, values], packed, 1, sizes, strides,
        first_element=start, first_offset=3 * start,
    )  # fmt: skip
    before = decode(x_bytes, dtype).reshape(rows, 3 * columns)
    walked = np.s_[:, 0 : 2 * columns : 2]
    expected = before.copy()
    expected[walked] = np.maximum(before[walked], 0)
    np.testing.assert_array_equal(decode(values.data, dtype).reshape(rows, -1), expected)
    mask = np.unpackbits(packed.data, bitorder="little")
    np.testing.assert_array_equal(mask, (before[walked] > 0).ravel())


@all_dtypes
@pytest.mark.parametrize("name", ["relu", "leaky_relu"])
def test_backward_from_output(host_kernels: ModuleType, name: str, dtype: str) -> None:
    for count in (0, 43, TILE[dtype] + 43):
        output, grad, result = (Buffer(count * SIZE[dtype]) for _ in range(3))
        generator = np.random.default_rng()
        output.data[:] = encode(generator.standard_normal(count), dtype)
        grad.data[:] = encode(generator.standard_normal(count), dtype)
        launch(
            host_kernels, name, "backward_from_output", dtype, [result, grad, output], Buffer(0), 0,
            [count], [[1]] * 3, slope=0.5,
        )  # fmt: skip
        slope = 0.5 if name == "leaky_relu" else 0.0
        expected = decode(grad.data, dtype) * np.where(decode(output.data, dtype) > 0, 1.0, slope)
        expected = decode(encode(expected, dtype), dtype)  # half of a tiny float16 is rounded
        np.testing.assert_array_equal(decode(result.data, dtype), expected)


@all_dtypes
@pytest.mark.parametrize("bits", [None, 8], ids=["usual", "8"])
def test_double_backward(host_kernels: ModuleType, dtype: str, bits: int | None) -> None:
    bits = bits or USUAL_BITS[dtype]
    count = 2 * TILE[dtype] + 43
    generator = np.random.default_rng()
    x_bytes = encode(generator.standard_normal(count) * 3, dtype)
    x = decode(x_bytes, dtype)
    x_bytes = encode(np.where(np.abs(x + 1.2785) < 0.5, 1.0, x), dtype)  # away from silu' = 0
    x = decode(x_bytes, dtype)
    values, packed = Buffer(x_bytes.size), Buffer(bits * -(-count // 8))
    grad_grad, grad, result = (Buffer(x_bytes.size) for _ in range(3))
    values.data[:] = x_bytes
    grad_grad.data[:] = encode(generator.standard_normal(count), dtype)
    grad.data[:] = encode(generator.standard_normal(count), dtype)
    silu = (host_kernels, "silu")
    launch(*silu, "forward_keeping", dtype, [values, values], packed, bits, [count], [[1]] * 2)
    operands = [result, grad_grad, grad, values]
    launch(*silu, "double_backward", dtype, operands, packed, bits, [count], [[1]] * 4)
    s = 1 / (1 + np.exp(-x))
    ratio = s * (1 - s) * (2 + x * (1 - 2 * s)) / silu_derivative(x)
    scale = np.abs(decode(grad_grad.data, dtype) * decode(grad.data, dtype))
    expected = decode(grad_grad.data, dtype) * decode(grad.data, dtype) * ratio
    # x is good to 3e-6 here, and the ratio's slope is at most 10.
    tolerance = scale * (2 * ROUNDING[dtype] * np.abs(ratio) + 3e-5) + 1e-7
    assert (np.abs(decode(result.data, dtype) - expected) <= tolerance).all()


@all_dtypes
def test_not_finite(host_kernels: ModuleType, dtype: str) -> None:
    """NaN as a GPU writes it, all bits set: the recovered x must not wrap around to a number."""
    x = np.array([np.nan, np.inf, -np.inf] * 8)
    size = SIZE[dtype]
    for bits in range(1, 9):
        values, packed = Buffer(x.size * size), Buffer(bits * 3)
        grad, result = Buffer(x.size * size), Buffer(x.size * size)
        values.data[:] = encode(x, dtype)
        grad.data[:] = encode(np.ones(x.size), dtype)
        silu = (host_kernels, "silu")
        launch(*silu, "forward_keeping", dtype, [values, values], packed, bits, [x.size], [[1]] * 2)
        elements = values.data.reshape(-1, size)
        elements[np.isnan(decode(values.data, dtype))] = 0xFF
        elements[:, -1] &= 0x7F
        operands = [result, grad, values]
        launch(*silu, "backward_from_both", dtype, operands, packed, bits, [x.size], [[1]] * 3)
        assert np.isnan(decode(result.data, dtype)).all()


def test_under_sanitizers() -> None:
    """All of this file once more, with the kernels under ASan and UBSan."""
    run_tests(__file__, folder=Path(__file__).parent, preloaded=sanitizers())
