"""The CUDA kernels' bodies on the host, against NumPy in float64.

Compiles host_kernels.cpp, which calls the very functions that the `__global__` kernels call. Every
buffer lies between guard bytes, at every alignment and with every tail length around a vector.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pybind11
import pytest

HERE = Path(__file__).parent
GUARD = 64  # bytes before and after each buffer
GUARD_BYTE = 0xA5
DTYPES = ["float64", "float32", "float16", "bfloat16"]
SIZE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
SLOPE = -0.25


@pytest.fixture(scope="session")
def host_kernels(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    library = tmp_path_factory.mktemp("host_kernels") / "host_kernels.so"
    command = [os.environ.get("CXX", "g++"), "-std=c++17", "-O0", "-shared", "-fPIC"]
    command += ["-Wall", "-Wextra", "-Werror", f"-I{pybind11.get_include()}"]
    command += [f"-I{sysconfig.get_path('include')}", str(HERE / "host_kernels.cpp")]
    subprocess.run([*command, "-o", str(library)], check=True)
    spec = importlib.util.spec_from_file_location("host_kernels", library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
        return self.data.ctypes.data if self.size else self.memory.ctypes.data + self.start

    def guards_are_intact(self) -> bool:
        before, after = self.memory[: self.start], self.memory[self.start + self.size :]
        return bool((before == GUARD_BYTE).all() and (after == GUARD_BYTE).all())


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
# s (1 + x (1 - s)) in float: 1 - s has lost digits where x is large (1.0e-6 at x = 17).
FORMULA = {"float64": 4e-15, "float32": 1.2e-6, "float16": 1.2e-6, "bfloat16": 1.2e-6}
# The largest error of silu' for the default bits, and for codes of 8, 16 and 32 bits.
SILU_BITS = {"float64": 1, "float32": 6, "float16": 7, "bfloat16": 5}
SILU_ERROR = {"float64": 5e-9, "float32": 7e-6, "float16": 5e-4, "bfloat16": 4e-3}
GRID_ERROR = {8: 0.5 / 212, 16: 0.5 / 54610, 32: 0.5 / 3221225472}
CASES = [("relu", 1), ("leaky_relu", 1), ("silu", 0), *(("silu_derivative", b) for b in GRID_ERROR)]


def check_round_trip(
    host_kernels: ModuleType,
    case: tuple[str, int],
    dtype: str,
    count: int,
    offset: int = 0,
    base_group: int = 0,
) -> None:
    """Forward and backward of `count` elements, `offset` bytes off the alignment, against NumPy."""
    name, bits = case
    bits = bits or SILU_BITS[dtype]
    size = SIZE[dtype]
    generator = np.random.default_rng()
    x_bytes = encode(generator.standard_normal(count) * 3, dtype)
    x = decode(x_bytes, dtype)
    grad_bytes = encode(generator.standard_normal(count), dtype)
    grad = decode(grad_bytes, dtype)

    plane = -(-count // 8)
    values, result = Buffer(count * size, offset), Buffer(count * size, offset)
    incoming, packed = Buffer(count * size, offset), Buffer(bits * plane)
    values.data[:] = x_bytes
    incoming.data[:] = grad_bytes

    def run(kind: str, *operands: Buffer) -> None:
        base = base_group * 8
        host_kernels.run(
            name,
            kind,
            dtype,
            SLOPE,
            [operand.address - base * size for operand in operands],
            packed.address - base_group,
            plane,
            bits,
            [count],
            [[1]] * len(operands),
            base + count,
            base_group,
            bool(base_group) or count % 2 == 0,
        )

    run("forward_keeping", values, values)
    y = decode(values.data, dtype)
    rounding = ROUNDING[dtype]
    np.testing.assert_allclose(y, VALUE[name](x), rtol=8 * rounding, atol=1e-7)
    if name == "silu":
        run("backward_from_both", result, incoming, values)
        error = SILU_ERROR[dtype]
    else:
        run("backward_from_bits", result, incoming)
        error = GRID_ERROR[bits] + FORMULA[dtype] if name == "silu_derivative" else 0.0
    expected = grad * DERIVATIVE[name](x)
    tolerance = np.abs(grad) * (error + 2 * rounding) + 1e-7
    assert (np.abs(decode(result.data, dtype) - expected) <= tolerance).all()
    if count % 8:
        assert (packed.data.reshape(bits, plane)[:, -1] >> count % 8 == 0).all()
    for buffer in (values, result, incoming, packed):
        assert buffer.guards_are_intact()
    np.testing.assert_array_equal(incoming.data, grad_bytes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_tail_length(host_kernels: ModuleType, case: tuple[str, int], dtype: str) -> None:
    for count in [*range(41), 1000, 1003]:
        check_round_trip(host_kernels, case, dtype, count)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_alignment(host_kernels: ModuleType, case: tuple[str, int], dtype: str) -> None:
    for offset in range(0, 64, SIZE[dtype]):
        check_round_trip(host_kernels, case, dtype, 37, offset)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_indices_past_32_bits(host_kernels: ModuleType, case: tuple[str, int], dtype: str) -> None:
    check_round_trip(host_kernels, case, dtype, 101, base_group=2**29 + 3)


@pytest.mark.parametrize("wide_index", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_strided(host_kernels: ModuleType, dtype: str, wide_index: bool) -> None:
    size, sizes = SIZE[dtype], [3, 5, 7]
    count = 105
    x_bytes = encode(np.random.default_rng().standard_normal(2 * count), dtype)
    values, packed = Buffer(2 * count * size), Buffer(14)
    values.data[:] = x_bytes
    strides = [2, 42, 6]  # every other element, walked in another order than they lie in
    arguments = (packed.address, 14, 1, sizes, [strides, strides], count, 0, wide_index)
    addresses = [values.address, values.address]
    host_kernels.run("relu", "forward_keeping", dtype, 0.0, addresses, *arguments)

    before = decode(x_bytes, dtype).reshape(5, 7, 3, 2)
    after = decode(values.data, dtype).reshape(5, 7, 3, 2)
    np.testing.assert_array_equal(after[..., 0], np.maximum(before[..., 0], 0))
    np.testing.assert_array_equal(after[..., 1], before[..., 1])
    mask = np.unpackbits(packed.data, bitorder="little")[:count]
    np.testing.assert_array_equal(mask, (before[..., 0] > 0).transpose(2, 0, 1).ravel())
    assert values.guards_are_intact()
    assert packed.guards_are_intact()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["relu", "leaky_relu"])
def test_backward_from_output(host_kernels: ModuleType, name: str, dtype: str) -> None:
    count, size = 43, SIZE[dtype]
    generator = np.random.default_rng()
    output, grad, result = (Buffer(count * size) for _ in range(3))
    output.data[:] = encode(generator.standard_normal(count), dtype)
    grad.data[:] = encode(generator.standard_normal(count), dtype)
    addresses = [result.address, grad.address, output.address]
    arguments = (0, 0, 1, [count], [[1]] * 3, count, 0, True)
    host_kernels.run(name, "backward_from_output", dtype, 0.5, addresses, *arguments)
    slope = 0.5 if name == "leaky_relu" else 0.0
    expected = decode(grad.data, dtype) * np.where(decode(output.data, dtype) > 0, 1.0, slope)
    np.testing.assert_array_equal(decode(result.data, dtype), expected)
    assert result.guards_are_intact()
