"""Execute the compiled CUDA kernels without a GPU, and compare their results with PyTorch.

The PTX that nvcc has made of each kernel runs in an interpreter (`_support/ptx.py`), which also
checks every access to memory. The host's part is real: `host_kernels.cpp` chooses the path, and
records kernel and parameters of each launch. Needs a CUDA extension that is built with PTX.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from _support.cuobjdump import cuobjdump, skip_module_without_it
from _support.extension import build
from _support.kernel_checks import (
    CASES,
    DOUBLE_BACKWARD,
    NORMALIZED,
    ROUNDING,
    SOME,
    Buffer,
    Case,
    ChannelShape,
    Operand,
    case_id,
    check_batch_norm,
    check_copy,
    check_double_backward,
    check_normalized,
    check_round_trip,
    dense,
    launch,
    normal,
    random_scale_shift,
    samples_of,
    vector,
)
from _support.ptx import ExecutionError, Grid, Instruction, Launch, Memory, Region, parse
from _support.sanitizers import SANITIZE
from torch import Tensor

from inplace_ops.activations import LEAKY_RELU, RELU

skip_module_without_it()
PTX = parse(cuobjdump("-ptx"))
if not PTX:
    pytest.skip("the CUDA extension is built without PTX", allow_module_level=True)

SOME_CASES = [case for case in CASES if case.entry in SOME]
SOME_NORMALIZED = [case for case in NORMALIZED if case.entry in SOME]


# The order of the buffers in check_batch_norm(); and what each kernel reads and writes.
BATCH_NORM_BUFFERS = [
    *("grad_x", "grad", "x", "scale", "shift", "mean", "rstd", "slope", "offset"),
    *("grad_weight", "grad_bias", "partial_sums"),
]
BATCH_NORM_ACCESSES = {
    "sum_warps": ("grad x scale shift mean", "partial_sums"),
    "finish_warps": ("rstd partial_sums", "slope offset grad_weight grad_bias"),
    "correct_warps": ("grad x scale shift mean slope offset", "grad_x"),
}


class CompiledKernels:
    """Executes the compiled kernels: `Kernels` in `_support/kernel_checks.py`.

    Attributes:
        tile: By the bytes of an element: the elements of a warp's tile.
        kernels: The kernels, by their name with its template arguments.
        executed: The names of the kernels that have run.
        checked: The cases all of whose kernels have run, except those of batch norms.
        checked_batch_norms: The cases whose kernels of batch norms have run.
    """

    def __init__(self, recorder: ModuleType) -> None:
        self.tile: dict[int, int] = recorder.tile
        self.kernels = {
            recorder.kernel_name(name): kernel for name, kernel in PTX.items() if "_warps" in name
        }
        self.executed: set[str] = set()
        self.checked: set[Case] = set()
        self.checked_batch_norms: set[Case] = set()
        self._recorder = recorder
        self._guards: list[tuple[int, int]] = []

    def poison(self, address: int, size: int) -> None:
        """Remember a guard: those before and after a buffer follow each other."""
        self._guards.append((address, size))

    def unpoison(self, address: int, size: int) -> None:
        """Forget all guards."""
        self._guards.clear()

    def run(self, *arguments: Any) -> tuple[int, str]:
        """Run a kernel, and return its path."""
        _, _, functor, dtype, addresses, _, _, planes, sizes, _, first_element, *_ = arguments
        path = self._recorder.run(*arguments)
        regions = list(self._regions(functor, addresses, planes))
        self._guards.clear()
        memory = Memory(regions)
        for recorded in self._recorder.recorded():
            self._execute(recorded, memory)
        output, *others = regions
        *_, of_result = re.split(" to | from ", functor)
        of_output: torch.dtype = getattr(torch, dtype if of_result == functor else of_result)
        assert output.stored.sum() == (math.prod(sizes) - first_element) * of_output.itemsize
        assert all(region.stored.all() for region in others if region.is_written)
        return path

    def run_batch_norm(self, *arguments: Any) -> int:
        """Run the kernels of a batch norm's backward, and return the elements of an access.

        Each kernel may only read what is its input, and has to write all of its results once.
        """
        access: int = self._recorder.run_batch_norm(*arguments)
        guards, names = self._guards, BATCH_NORM_BUFFERS
        buffers = {
            name: (before + size, after - before - size)
            for name, (before, size), (after, _) in zip(
                names, guards[::2], guards[1::2], strict=True
            )
        }
        self._guards = []
        for recorded in self._recorder.recorded():
            read, written = BATCH_NORM_ACCESSES[recorded.kernel.partition("<")[0]]
            results = [Region(*buffers[name], False, True) for name in written.split()]
            inputs = [Region(*buffers[name], True, False) for name in read.split()]
            self._execute(recorded, Memory([*inputs, *results]))
            assert all(region.stored.all() for region in results)
        return access

    def pieces_of(self, layout: Sequence[int], element_bytes: int) -> int:
        """Return the number of partial sums of a channel."""
        pieces: int = self._recorder.pieces_of(layout, element_bytes)
        return pieces

    def _execute(self, recorded: Any, memory: Memory) -> None:
        self.executed.add(recorded.kernel)
        grid = Grid(recorded.first_warp, recorded.last_warp, recorded.warps_of_a_block)
        kernel = self.kernels[recorded.kernel]
        Launch(kernel, recorded.parameters, grid, memory, self._fma).run()

    def _regions(self, functor: str, addresses: list[int], planes: int) -> Iterator[Region]:
        """Return the memory of the operands, the packed bits and the affine, in this order."""
        operands = len(set(addresses))  # in place the first input is the output
        pairs = zip(self._guards[::2], self._guards[1::2], strict=True)
        for i, ((before, size), (after, _)) in enumerate(pairs):
            is_read, is_written = True, False
            if i == 0:
                is_read, is_written = addresses[0] in addresses[1:], True
            elif i == operands and planes:
                is_written = functor.startswith("Forward")
                is_read = not is_written
            yield Region(before + size, after - before - size, is_read, is_written)

    def _fma(self, x: Any, y: Any, z: Any, rounds_down: bool) -> Any:
        inputs = [np.ascontiguousarray(array) for array in (x, y, z)]
        result = np.empty_like(inputs[0])
        is_float = result.dtype.itemsize == 4
        fma = self._recorder.fma_float if is_float else self._recorder.fma_double
        fma(*(array.ctypes.data for array in (*inputs, result)), len(result), rounds_down)
        return result


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """host_kernels.cpp, compiled to record the launches of all kernels instead of running them."""
    flags = ["-DHOST_DEVICE=inline", "-DINPLACE_OPS_RECORD"]
    return build("host_kernels.cpp", tmp_path_factory.mktemp("recorder"), *flags, name="recorder")


@pytest.fixture(scope="module")
def shared_kernels(recorder: ModuleType) -> CompiledKernels:
    return CompiledKernels(recorder)


@pytest.fixture
def kernels(shared_kernels: CompiledKernels) -> Iterator[CompiledKernels]:
    yield shared_kernels
    shared_kernels.unpoison(0, 0)  # a test that failed leaves guards


def rows_with_gaps(kernels: CompiledKernels, case: Case) -> dict[str, Any]:
    """Return a shape and strides for which backward has accesses of several elements."""
    count = vector(case)
    columns = 4 * count
    strides = [(columns + gap * count, 1) for gap in (1, 0, 5)]
    return {"shape": [samples_of(kernels, case, columns), columns], "strides": strides}


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_every_kernel(kernels: CompiledKernels, case: Case) -> None:
    """Whole tiles, and the rest at the end; dense, and rows with gaps."""
    check_round_trip(kernels, case, [2 * kernels.tile[case.dtype.itemsize] + 43])
    check_round_trip(kernels, case, **rows_with_gaps(kernels, case))
    if case in DOUBLE_BACKWARD:
        check_double_backward(kernels, case)
    kernels.checked.add(case)


@pytest.mark.parametrize("case", NORMALIZED, ids=case_id)
def test_every_kernel_after_a_norm(kernels: CompiledKernels, case: Case) -> None:
    """Planes, planes that end inside accesses, channels_last, and rows."""
    is_first = case.entry is RELU
    for shape, channels, rows in (
        ([samples_of(kernels, case, 5 * 64), 5, 64], (1,), None),
        ([samples_of(kernels, case, 5 * 49), 5, 49], (1,), None),
        ([3, 49, 16], (2,), None),
        ([3, 49, 16], (0, 2), None),
        ([49, 16], (1,), (0,)),
        ([1], (), None),
    ):
        check_normalized(kernels, case, shape, channels, rows, is_first=is_first)
    kernels.checked.add(case)


@pytest.mark.parametrize("case", NORMALIZED, ids=case_id)
def test_every_kernel_of_a_batch_norm(kernels: CompiledKernels, case: Case) -> None:
    """Planes and rows, with accesses of several elements and of one, and parts of bursts."""
    count = vector(case)
    for shape, pieces in (
        (ChannelShape(5, 3, 8 * count, gap=2), 2),
        (ChannelShape(5, 3, 7), None),
        (ChannelShape(40, 11 * count, 1), 3),
        (ChannelShape(40, 11, 1), None),
    ):
        check_batch_norm(kernels, case, shape, pieces)
    check_copy(kernels, case)
    kernels.checked_batch_norms.add(case)


def test_every_compiled_kernel_was_executed(kernels: CompiledKernels) -> None:
    """The tests above have executed all kernels of the extension."""
    is_complete = kernels.checked == {*CASES, *NORMALIZED}
    is_complete = is_complete and kernels.checked_batch_norms == {*NORMALIZED}
    if not is_complete or SANITIZE in os.environ:
        pytest.skip("only some of the tests above ran in this process, or for some activations")
    assert kernels.executed == kernels.kernels.keys()


def special(dtype: torch.dtype, shape: Sequence[int], *numbers: float) -> Tensor:
    """Return random numbers, half of which are zeros, NaN and the given numbers."""
    values = torch.tensor([0.0, -0.0, torch.nan, *numbers], dtype=dtype)
    chosen = values[torch.randint(len(values), tuple(shape))]
    return torch.where(torch.rand(tuple(shape)) < 0.5, chosen, normal(dtype, shape, 3.0))


def special_inputs(dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    info = torch.finfo(dtype)
    return special(dtype, shape, torch.inf, -torch.inf, info.max, info.min)


def assert_same_zeros(actual: Tensor, expected: Tensor) -> None:
    """Assert that zeros have the same signs, in an activation's output."""
    is_zero = (actual == 0) & (expected == 0)
    assert torch.equal(actual[is_zero].signbit(), expected[is_zero].signbit())


def assert_alike(actual: Tensor, expected: Tensor) -> None:
    """Assert that NaN and infinities are in the same places, and other numbers nearly equal."""
    assert torch.equal(actual.isnan(), expected.isnan())
    error = 16 * ROUNDING[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=error, atol=10 * error, equal_nan=True)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_special_values(kernels: CompiledKernels, case: Case) -> None:
    """Infinities, NaN and zeros give what the ops give on a CPU."""
    dtype, shape = case.dtype, [2 * kernels.tile[case.dtype.itemsize] + 43]
    ops, scalars = case.entry.ops, case.scalars.values()
    values, incoming, result = (Operand(dtype, shape, [1]) for _ in range(3))
    packed = Buffer(case.bits * -(-shape[0] // 8)) if case.bits else None
    values.tensor.copy_(special_inputs(dtype, shape))
    expected = values.tensor.clone()
    ops.in_place(expected, None, *scalars)
    launch(kernels, case, case.forward, [values, values], packed)
    assert_alike(values.tensor, expected)
    assert_same_zeros(values.tensor, expected)
    incoming.tensor.copy_(special(dtype, shape))
    saved = [values] if case.save == "output" else []
    tensors = [operand.tensor for operand in saved]
    if packed is not None:
        tensors.append(packed.data.view(case.bits, -1).clone())
    expected = ops.backward[case.save](incoming.tensor, *tensors, None, *scalars)
    launch(kernels, case, case.backward, [result, incoming, *saved], packed)
    assert_alike(result.tensor, expected)


@pytest.mark.parametrize("case", NORMALIZED, ids=case_id)
def test_special_values_after_a_norm(kernels: CompiledKernels, case: Case) -> None:
    dtype, shape = case.dtype, [samples_of(kernels, case, 5 * 49), 5, 49]
    ops, scalars = case.entry.ops, case.scalars.values()
    x, incoming, result = (Operand(dtype, shape, dense(shape)) for _ in range(3))
    x.tensor.copy_(special_inputs(dtype, shape))
    incoming.tensor.copy_(special(dtype, shape))
    affine = [random_scale_shift(case, shape, (1,), 0, 0) for _ in range(2)]
    channels = torch.stack([part.tensor for part in affine])
    launch(kernels, case, "ForwardRecompute", [result, x], None, 0, affine)
    expected = ops.recompute(x.tensor, channels, None, None, *scalars)
    assert_alike(result.tensor, expected)
    assert_same_zeros(result.tensor, expected)
    launch(kernels, case, "BackwardRecompute", [result, incoming, x], None, 0, affine)
    saved = (x.tensor, channels, None, None)
    expected = ops.backward["recompute"](incoming.tensor, *saved, *scalars)
    assert_alike(result.tensor, expected)


@pytest.mark.parametrize("case", SOME_CASES, ids=case_id)
def test_alignments_strides_and_large_indices(kernels: CompiledKernels, case: Case) -> None:
    size, tile = case.dtype.itemsize, kernels.tile[case.dtype.itemsize]
    for moved in range(4):  # values, gradient, incoming gradient, bits
        offsets = [0, 0, 0, 0]
        offsets[moved] = 1 if moved == 3 else size
        check_round_trip(kernels, case, [tile + 37], offsets=offsets)
    for start in (0, 2**31, 2**32):
        check_round_trip(kernels, case, [2 * tile + 101], first_row=start)
        strides = [(24, 2), (13, 1), (2, 80)]
        check_round_trip(kernels, case, [40, 8], strides, first_row=start // 8)
    for count in (1, 9, tile - 1, tile, 8 * tile):
        check_round_trip(kernels, case, [count])


@pytest.mark.parametrize("case", SOME_NORMALIZED, ids=case_id)
def test_large_indices_after_a_norm(kernels: CompiledKernels, case: Case) -> None:
    tile = kernels.tile[case.dtype.itemsize]
    for channels, size in (((1,), 43), ((0, 1), 43), ((2,), 40), ((0, 2), 40)):
        shape = [samples_of(kernels, case, 3 * size), 3, size]
        rows = (0,) if 2 in channels else None
        for start in (2**31, 2**32):
            first_row = (start // (3 * size) // tile + 1) * tile  # a tile begins there
            check_normalized(
                kernels, case, shape, channels, rows, first_row=first_row, is_first=False
            )
    strides = [dense([40, 16])] * 2 + [(17, 1)]
    check_normalized(kernels, case, [40, 16], (1,), (0,), strides=strides, is_first=False)


# A change of one instruction: returns the changed one, or None of other instructions.
Mutation = Callable[[Instruction], Instruction | None]


def operand(code: str, index: int, change: Callable[[str], str]) -> Mutation:
    """Change an operand of an instruction whose name and modifiers begin with `code`."""

    def mutation(instruction: Instruction) -> Instruction | None:
        if not instruction.code.startswith(code):
            return None
        operands = list(instruction.operands)
        operands[index] = change(operands[index])
        return instruction._replace(operands=tuple(operands))

    return mutation


def modifiers(code: str, *changed: str) -> Mutation:
    """Change the modifiers of an instruction whose name and modifiers begin with `code`."""

    def mutation(instruction: Instruction) -> Instruction | None:
        return (
            instruction._replace(modifiers=changed) if instruction.code.startswith(code) else None
        )

    return mutation


def swapped(instruction: Instruction) -> Instruction | None:
    """Exchange what a selection selects."""
    if not instruction.code.startswith("selp.f32"):
        return None
    target, x, y, condition = instruction.operands
    return instruction._replace(operands=(target, y, x, condition))


def farther(size: int) -> Callable[[str], str]:
    """Return what adds a number of bytes to an address."""

    def change(address: str) -> str:
        base, _, offset = address.strip("[]").partition("+")
        return f"[{base}+{int(offset or 0) + size}]"

    return change


FORWARD = "run_warps<4, inplace_ops::ForwardMask"
SUMS = "sum_warps<4, inplace_ops::BackwardRecompute<inplace_ops::LeakyReLU"
CORRECTION = "correct_warps<4, inplace_ops::BackwardRecompute<inplace_ops::LeakyReLU"
# By name: the beginning of a kernel's name, a change of the kernel, and what the check of the
# kernel says about it; None if it finds wrong values.
MUTATIONS: dict[str, tuple[str, Mutation, str | None]] = {
    "a load 16 bytes farther": (FORWARD, operand("ld.global.v4", 1, farther(16)), None),
    "a load a tile farther": (FORWARD, operand("ld.global.v4", 1, farther(1024)), "bounds"),
    "a store 4 bytes farther": (FORWARD, operand("st.global.v4", 0, farther(4)), "not aligned"),
    "a store 16 bytes farther": (FORWARD, operand("st.global.v4", 0, farther(16)), "twice"),
    "a byte of a bit plane": (FORWARD, operand("st.global.u8", 0, farther(1)), "twice|bounds"),
    "tiles up to the end": (FORWARD, modifiers("setp.ge.s64", "gt", "s64"), "bounds"),
    "two warps for a tile": (FORWARD, operand("shr.u32", 2, lambda shift: "6"), "twice"),
    "another neighbor's codes": (FORWARD, operand("shfl.sync", 2, lambda distance: "2"), None),
    "the other value": (FORWARD, swapped, None),
    "a lane's sums twice": (SUMS, operand("shfl.sync", 2, lambda distance: "1"), None),
    "another channel's sums": (SUMS, operand("st.global.f32", 0, farther(4)), "twice"),
    "a channel past the last": (SUMS, modifiers("setp.ge.s64", "gt", "s64"), "bounds"),
    "another piece": (SUMS, operand("shr.u32", 2, lambda shift: "6"), "twice"),
    "a gradient 16 bytes farther": (CORRECTION, operand("ld.global.v4", 1, farther(16)), None),
    "a result 16 bytes farther": (CORRECTION, operand("st.global.v4", 0, farther(16)), "twice"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_changed_code_is_detected(recorder: ModuleType, name: str) -> None:
    """The checks find a change of one instruction of a kernel."""
    beginning, mutation, error = MUTATIONS[name]
    kernels = CompiledKernels(recorder)

    def check() -> None:
        if beginning == FORWARD:
            case = Case(LEAKY_RELU, "mask", 1, torch.float32)
            check_round_trip(kernels, case, [2 * kernels.tile[4] + 43])
        else:
            case = Case(LEAKY_RELU, "recompute", 0, torch.float32)
            check_batch_norm(kernels, case, ChannelShape(100, 20, 1, gap=4), pieces=2)

    check()
    arguments = next(name for name in kernels.executed if name.startswith(beginning))
    kernel = kernels.kernels[arguments]
    code = [mutation(instruction) for instruction in kernel.code]
    index = next(i for i, instruction in enumerate(code) if instruction is not None)
    changed = (*kernel.code[:index], code[index], *kernel.code[index + 1 :])
    kernels.kernels[arguments] = dataclasses.replace(kernel, code=changed)
    with pytest.raises(ExecutionError if error else AssertionError, match=error):
        check()
