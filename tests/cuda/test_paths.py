"""Which path a launch of a CUDA kernel takes, and the indices of its warps.

recorder.cpp chooses the paths with the code that launches the kernels. test_compiled_kernels.py
executes the kernels on each path.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest
from _support.extension import build
from _support.kernel_checks import (
    CASES,
    CONTIGUOUS,
    NORMALIZED,
    SOME,
    Buffer,
    Case,
    ChannelShape,
    Dims,
    LaunchPath,
    Strides,
    case_id,
    launch,
    operands_after_norm,
    operands_of,
    samples_of,
    vector,
)
from _support.marks import in_turn

from inplace_ops.activations import LEAKY_RELU

# The default numbers of bits, for which there are kernels with wide accesses.
default_bits = pytest.mark.parametrize(
    "case",
    [c for c in CASES if c.entry in SOME and c.bits == c.entry.default_bits(c.save, c.dtype)],
    ids=case_id,
)
OF_EACH_DTYPE = [case for case in NORMALIZED if case.entry is LEAKY_RELU]
each_dtype = pytest.mark.parametrize("case", OF_EACH_DTYPE, ids=case_id)


class Paths:
    """Tells the paths of launches: `Kernels` in `_support/kernel_checks.py`."""

    def __init__(self, recorder: ModuleType) -> None:
        self.tile: dict[int, int] = recorder.tile
        self.recorder = recorder

    def run(self, buffers: Sequence[Buffer], *arguments: Any) -> tuple[int, str]:
        self.recorder.recorded()  # forgets earlier launches
        return self.recorder.run(*arguments)

    def backward(
        self,
        case: Case,
        shape: Sequence[int],
        strides: Strides = CONTIGUOUS,
        offsets: Sequence[int] = (0, 0, 0, 0),
        first_row: int = 0,
    ) -> int:
        """Return the elements of an access of backward."""
        values, result, incoming, packed = operands_of(case, shape, strides, offsets)
        operands = [result, incoming, *([values] if case.save == "output" else [])]
        return launch(self, case, case.backward, operands, packed, first_row).access

    def after_norm(
        self,
        case: Case,
        shape: Sequence[int],
        channels: Dims,
        rows: Dims | None = None,
        first_row: int = 0,
        **layout: Any,
    ) -> LaunchPath:
        (x, incoming, result), affine = operands_after_norm(case, shape, channels, rows, **layout)
        operands = [result, incoming, x]
        return launch(self, case, "BackwardRecompute", operands, None, first_row, affine)

    def of_batch_norm(
        self, case: Case, shape: ChannelShape, offsets: Sequence[int] = (0, 0, 0)
    ) -> int:
        """Return the elements of an access, if grad_x, the gradient and x have these offsets."""
        outer, channels, inner, gap = shape
        layout = outer, channels, inner, (channels + gap) * inner
        addresses = [2**20 + offset for offset in (*offsets, *[0] * 9)]  # no memory is accessed
        dtype, scalars = str(case.dtype).removeprefix("torch."), [*case.scalars.values()]
        self.recorder.recorded()
        access: int = self.recorder.run_batch_norm(case.name, scalars, dtype, addresses, layout, 1)
        return access


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Paths:
    flags = ["-DHOST_DEVICE=inline", "-DINPLACE_OPS_SOME_ACTIVATIONS"]
    folder = tmp_path_factory.mktemp("paths")
    return Paths(build("recorder.cpp", folder, *flags, name="recorder_of_some"))


@default_bits
@pytest.mark.parametrize("moved", range(4))  # values, gradient, incoming, bits
def test_misaligned_tensors_take_accesses_of_one_element(
    paths: Paths, case: Case, moved: int
) -> None:
    size, shape = case.dtype.itemsize, [paths.tile[case.dtype.itemsize] + 37]
    is_read = moved > 0 if case.save != "output" else True
    for offset in range(0, 16, 1 if moved == 3 else size):
        offsets = [0, 0, 0, 0]
        offsets[moved] = offset
        fits = moved == 3 or offset == 0 or not is_read
        assert paths.backward(case, shape, offsets=offsets) == (vector(case) if fits else 1)


def check_rows_with_gaps(paths: Paths, case: Case, path: Callable[..., int], start: int) -> None:
    """Check that rows with gaps take wide accesses if rows and gaps are whole numbers of accesses.

    Past 2^31 elements they take accesses of one element. `path` takes a shape, strides and the
    first row, and returns the elements of an access.
    """
    count = vector(case)
    rows, columns = samples_of(paths, case, 4 * count), 4 * count
    first_row = paths.tile[case.dtype.itemsize] * (start // columns)
    for size, gaps, is_whole in (
        (columns, (count, 0, 5 * count), True),
        (columns, (0, 2 * count, 2 * count), True),
        (columns, (count, 1, 0), False),
        (columns, (0, count, 3), False),
        (columns + 1, (count, count, 2 * count), False),
        (columns + 1, (count, count, count - 1), False),
    ):
        strides = [(size + gap, 1) for gap in gaps]
        fits = (first_row + rows) * size < 2**31
        access = path([rows, size], strides, first_row=first_row)
        assert access == (count if is_whole and fits else 1)


@default_bits
def test_rows_with_gaps(paths: Paths, case: Case) -> None:
    for start in (0, 2**22, 2**31, 2**35):
        check_rows_with_gaps(
            paths, case, lambda *args, **kwargs: paths.backward(case, *args, **kwargs), start
        )


@each_dtype
@pytest.mark.parametrize("channels", [(0,), (1,)])  # planes, columns
def test_rows_with_gaps_after_a_norm(paths: Paths, case: Case, channels: Dims) -> None:
    def path(shape: Sequence[int], strides: Strides, first_row: int) -> int:
        rows = (0,) if channels == (1,) else None
        return paths.after_norm(case, shape, channels, rows, first_row, strides=strides).access

    for start in (0, 2**22, 2**31):
        check_rows_with_gaps(paths, case, path, start)


@each_dtype
@pytest.mark.parametrize(
    "channels", [(1,), (0, 1), ()]
)  # a batch norm, a group norm, one scale and shift for all
def test_channels_of_every_size(paths: Paths, case: Case, channels: Dims) -> None:
    """Accesses reach into the next channel, and into the next sample, at every index."""
    for size in (*range(2, 3 * vector(case) + 2), 49, 196):  # with size 1 channels are innermost
        shape = [samples_of(paths, case, 5 * size), 5, size]
        fits = size >= vector(case) or not channels
        access = paths.after_norm(case, shape, channels).access
        assert access == (vector(case) if fits else 1)


@each_dtype
@pytest.mark.parametrize("channels", [(2,), (0, 2)])  # a batch norm, a group norm
def test_innermost_channels(paths: Paths, case: Case, channels: Dims) -> None:
    count = vector(case)
    for size in (*range(2, 2 * count + 1), 49, 64):
        shape = [3, samples_of(paths, case, 3 * size), size]
        access = paths.after_norm(case, shape, channels).access
        assert access == (count if size % count == 0 else 1)
    # The gap aligns or misaligns where the affine of a sample begins.
    for gap in range(1, 9):
        access = paths.after_norm(case, [3, 99, 16], channels, gap=gap).access
        assert access == (1 if 0 in channels and gap % 4 else count)


@each_dtype
@pytest.mark.parametrize("channels", [(1,), (0,), (0, 1), ()])
def test_rows_and_columns(paths: Paths, case: Case, channels: Dims) -> None:
    count = vector(case)
    for columns in (*range(2, 2 * count + 2), 49, 64):
        shape = [samples_of(paths, case, columns), columns]
        suits = 1 in channels and columns % count == 0
        access = paths.after_norm(case, shape, channels, (0,)).access
        assert access == (count if suits else 1)
    # Row statistics that differ between the elements of a row.
    assert paths.after_norm(case, [99, 16], channels, (0, 1)).access == 1
    assert paths.after_norm(case, [1600, 1], channels, (0,)).access == 1


def expected_path(paths: Paths, case: Case, shape: Sequence[int], layout: str) -> LaunchPath:
    """Return the path of a launch: wide if the layout allows it and there is a whole tile."""
    count = vector(case)
    is_whole = shape[-1] % count == 0
    if math.prod(shape) < paths.tile[case.dtype.itemsize] or count == 1:
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
def test_layouts_of_networks(paths: Paths, case: Case, sizes: tuple[int, int], batch: int) -> None:
    """Sizes of networks, with one affine for all samples and with one for each sample."""
    size, count = sizes
    shape = [batch, count, size]
    for channels in ((1,), (0, 1)):
        expected = expected_path(paths, case, shape, "planes")
        assert paths.after_norm(case, shape, channels) == expected
    shape = [batch, size, count]
    for channels in ((2,), (0, 2)):
        layout = "channels last, strided" if 0 in channels and batch > 1 else "channels last"
        expected = expected_path(paths, case, shape, layout)
        assert paths.after_norm(case, shape, channels) == expected


@each_dtype
def test_affine_of_other_strides(paths: Paths, case: Case) -> None:
    if vector(case) == 1:
        return
    for shape, channels, rows, gap, layout in (
        ([5, 7, 49, 16], (0, 2), None, 4, "split planes, strided"),
        ([5, 7, 64, 16], (0, 1, 2), None, 4, "split planes, strided"),
        ([5, 7, 64], (0, 1), None, 1, "split planes, strided"),
        ([99, 16], (1,), (), 0, "channels last, strided"),  # the same statistics in all rows
    ):
        path = paths.after_norm(case, shape, channels, rows, gap=gap)
        assert path == LaunchPath(vector(case), layout)


@each_dtype
@pytest.mark.parametrize("moved", range(7))
def test_every_alignment_after_a_norm(paths: Paths, case: Case, moved: int) -> None:
    size = case.dtype.itemsize if moved < 3 else max(case.dtype.itemsize, 4)
    for offset in range(0, 16, size):
        offsets = [0] * 7
        offsets[moved] = offset
        for channels, rows in (((2,), (0,)), ((1,), None)):
            access = paths.after_norm(case, [37, 3, 16], channels, rows, offsets=offsets).access
            matters = moved < 3 or (moved < 5 and channels == (2,))
            assert access == (1 if offset and matters else vector(case))


@each_dtype
@pytest.mark.parametrize("channels", [(1,), (0, 1), (2,), (0, 2)])
def test_affine_past_32_bits(paths: Paths, case: Case, channels: Dims) -> None:
    tile = paths.tile[case.dtype.itemsize]
    size = 40 if 2 in channels else 43  # with 43, accesses reach into the next channel
    shape = [samples_of(paths, case, 3 * size), 3, size]
    rows = (0,) if 2 in channels else None
    for start in (2**31, 2**32, 2**35):
        first_row = (start // (3 * size) // tile + 1) * tile  # a tile begins there
        access = paths.after_norm(case, shape, channels, rows, first_row).access
        assert access == (vector(case) if start < 2**32 else 1)  # AffineLayout has 32-bit indices


PLANES_OF_BATCH_NORMS = [ChannelShape(3, 3, inner) for inner in (49, 196, 7 * 9, 1024)]
ROWS_OF_BATCH_NORMS = [ChannelShape(37, channels, 1) for channels in (3, 24, 64, 70, 112, 700)]


@each_dtype
def test_accesses_of_batch_norms(paths: Paths, case: Case) -> None:
    """Sizes of networks. Each tensor, and the gradient's gap, has to allow wide accesses."""
    count = vector(case)
    for shape in PLANES_OF_BATCH_NORMS + ROWS_OF_BATCH_NORMS:
        is_whole = (shape.inner if shape.inner > 1 else shape.channels) % count == 0
        for gap in (0, count):
            access = paths.of_batch_norm(case, shape._replace(gap=gap))
            assert access == (count if is_whole else 1)
    for shape in (ChannelShape(3, 2, 2 * count), ChannelShape(9, 2 * count, 1)):
        for moved in range(3):
            offsets = [0, 0, 0]
            offsets[moved] = case.dtype.itemsize
            assert paths.of_batch_norm(case, shape, offsets) == 1
        is_wide = shape.inner > 1 or count == 1
        assert paths.of_batch_norm(case, shape._replace(gap=1)) == (count if is_wide else 1)


def test_division_by_multiplication(paths: Paths) -> None:
    top = 2**31 - 1
    near_powers = (2**k + i for k in range(7, 31) for i in (-1, 0, 1))
    for divisor in (*range(2, 100), *near_powers, top):
        multiples = (1, 2, 3, top // divisor)
        ends = [multiple * divisor + i for multiple in multiples for i in (-1, 0, 1)]
        numbers = [n for n in (0, 1, *ends, top - 1, top) if n <= top]
        numbers += [n * (top // 1000) + 7 for n in range(999)]
        quotients, remainders = paths.recorder.divide(numbers, divisor)
        assert quotients == [n // divisor for n in numbers], divisor
        assert remainders == [n % divisor for n in numbers], divisor


def offsets_of_access(
    shape: ChannelShape, count: int, channel: int, access: int
) -> tuple[int, int]:
    """Return the offsets in x and in the gradient of an access to a channel."""
    _, channels, inner, gap = shape
    block, position = divmod(access * count, inner) if inner > 1 else (access, 0)
    dense, grad = (
        (block * size + channel) * inner + position for size in (channels, channels + gap)
    )
    return dense, grad


def test_number_of_partial_sums(paths: Paths) -> None:
    """The warps that are resident on an H200, or fewer, whose lanes make at least 8 accesses."""
    for shape, pieces in (
        (ChannelShape(256, 64, 112 * 112), 32),  # 2048 warps
        (ChannelShape(256 * 112 * 112, 64, 1), 2048),
        (ChannelShape(256 * 49, 2048, 1), 61),  # 52 accesses of a lane: whole bursts
        (ChannelShape(64 * 49, 2048, 1), 49),
        (ChannelShape(256, 1500, 56 * 56), 1),  # two pieces would be too many
        (ChannelShape(8, 4, 32 * 64), 8),  # eight accesses of a lane
        (ChannelShape(8, 3, 7), 1),
        (ChannelShape(2, 2**20, 1), 1),
    ):
        outer, channels, inner, _ = shape
        layout = outer, channels, inner, channels * inner
        assert paths.recorder.pieces_of(layout, 2) == pieces, shape


@pytest.mark.parametrize("count", [1, 8])
def test_accesses_of_a_large_batch_norm(paths: Paths, count: int) -> None:
    """Offsets, numbers of accesses and numbers of warps past 2^31 and 2^32."""
    for shape in (
        ChannelShape(3, 2, 2**33 + 8, 8),  # planes past 2^32
        ChannelShape(2**30, 3, 16, 8),
        ChannelShape(2**34, 16, 1, 8),  # rows
        ChannelShape(2, 2**35, 1),  # channels
        ChannelShape(2, 2**32, 8),
    ):
        outer, channels, inner, gap = shape
        layout = outer, channels, inner, (channels + gap) * inner
        of_access = count if inner == 1 else 1
        width = min(8 if count > 1 else 32, channels // of_access) if inner == 1 else 1
        blocks = -(-channels // of_access // width)
        accesses = outer * (inner // count if inner > 1 else 1)
        for pieces in (1, 2, 2**12 + 1, accesses * width // 32):
            if pieces == 0:
                continue
            step = pieces * 32 // width
            for block, piece, lane in itertools.product(
                (0, blocks - 1), (0, pieces // 2, pieces - 1), (0, 19, 31)
            ):
                channel = (block * width + lane % width) * of_access
                first = piece * 32 // width + lane // width
                expected = [
                    offsets_of_access(shape, count, channel, access)
                    for access in range(first, accesses, step)[:9]
                ]
                found, warps = paths.recorder.offsets_of_lane(
                    layout, count, pieces, piece * blocks + block, lane, 9
                )
                assert (found, warps) == (expected, pieces * blocks), (shape, pieces)
