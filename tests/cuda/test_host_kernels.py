"""Compare the bodies of the CUDA kernels, run on the host, with PyTorch in float64.

Compiles host_kernels.cpp, which calls the same functions as the `__global__` kernels. Every buffer
is between guards, at every alignment and with every remainder after a warp's tile; under
AddressSanitizer the guards' memory is poisoned, which reveals reads. A new activation is tested
here without further code. (conftest.py imports PyTorch and the package in any case.)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from _support.extension import build
from _support.kernel_checks import (
    CASES,
    DOUBLE_BACKWARD,
    NORMALIZED,
    SMOOTH_ACTIVATIONS,
    SOME,
    Buffer,
    Case,
    ChannelShape,
    Dims,
    LaunchPath,
    Operand,
    case_id,
    check_batch_norm,
    check_copy,
    check_double_backward,
    check_normalized,
    check_round_trip,
    derivatives,
    launch,
    random_scale_shift,
    samples_of,
    vector,
)
from _support.marks import in_turn, slow
from _support.sanitizers import run_tests, sanitizers

from inplace_ops.activations import LEAKY_RELU


def parametrize(cases: Iterable[Case]) -> pytest.MarkDecorator:
    """Parametrize by case; those of activations that are not in SOME are slow."""
    parameters = [case if case.entry in SOME else pytest.param(case, marks=slow) for case in cases]
    return pytest.mark.parametrize("case", parameters, ids=case_id)


all_cases = parametrize(CASES)
some_cases = parametrize(case for case in CASES if case.entry in SOME)


@pytest.fixture(scope="module")
def host_kernels(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> ModuleType:
    """host_kernels.cpp, compiled for SOME activations, or for all if a selected test needs them."""
    # Without optimization, functions that are always inlined take longer to compile and to run.
    flags = ["-DHOST_DEVICE=inline"]
    selected = [item for item in request.session.items if item.path == request.path]
    parameters = [item.callspec.params for item in selected if hasattr(item, "callspec")]
    if all(each["case"].entry in SOME for each in parameters if "case" in each):
        flags.append("-DINPLACE_OPS_SOME_ACTIVATIONS")
    return build("host_kernels.cpp", tmp_path_factory.mktemp("host_kernels"), *flags)


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


@parametrize(DOUBLE_BACKWARD)
def test_double_backward(host_kernels: ModuleType, case: Case) -> None:
    check_double_backward(host_kernels, case)


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


every_normalized = parametrize(NORMALIZED)
some_normalized = parametrize(case for case in NORMALIZED if case.entry in SOME)
OF_EACH_DTYPE = [case for case in NORMALIZED if case.entry is LEAKY_RELU]
each_dtype = parametrize(OF_EACH_DTYPE)


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


@every_normalized
def test_every_activation_in_a_batch_norm(host_kernels: ModuleType, case: Case) -> None:
    count = vector(case)
    assert check_batch_norm(host_kernels, case, ChannelShape(5, 3, 8 * count), 2) == count
    assert check_batch_norm(host_kernels, case, ChannelShape(30, 24, 1), 2) == count
    assert check_batch_norm(host_kernels, case, ChannelShape(5, 3, 49)) == 1


PLANES_OF_BATCH_NORMS = [ChannelShape(3, 3, inner) for inner in (49, 196, 7 * 9, 1024)]
ROWS_OF_BATCH_NORMS = [ChannelShape(37, channels, 1) for channels in (3, 24, 64, 70, 112, 700)]


@each_dtype
@pytest.mark.parametrize("shape", PLANES_OF_BATCH_NORMS + ROWS_OF_BATCH_NORMS, ids=str)
def test_layouts_of_batch_norms(host_kernels: ModuleType, case: Case, shape: ChannelShape) -> None:
    """Sizes of networks, with any number of partial sums, and slices of a gradient's channels."""
    count = vector(case)
    is_whole = (shape.inner if shape.inner > 1 else shape.channels) % count == 0
    for gap, pieces in ((0, None), (count, 3)):
        access = check_batch_norm(host_kernels, case, shape._replace(gap=gap), pieces)
        assert access == (count if is_whole else 1)


@each_dtype
def test_copy_before_a_batch_norm(host_kernels: ModuleType, case: Case) -> None:
    check_copy(host_kernels, case)


@each_dtype
def test_small_batch_norms(host_kernels: ModuleType, case: Case) -> None:
    """Fewer elements than a warp accesses, or one channel; two elements are PyTorch's minimum."""
    for shape in ((2, 1, 1), (1, 1, 2), (1, 2, 3), (2, 3, 1), (2, 3, 8), (1, 1, 800), (800, 1, 1)):
        for pieces in (None, 5):
            check_batch_norm(host_kernels, case, ChannelShape(*shape), pieces)


@some_normalized
def test_constant_input_of_a_batch_norm(host_kernels: ModuleType, case: Case) -> None:
    """Nothing is computed where a burst lacks an access: the shift is infinite in float16."""
    for shape in (ChannelShape(5, 3, 16), ChannelShape(30, 24, 1)):
        check_batch_norm(host_kernels, case, shape, constant=512.0)


@each_dtype
def test_alignment_of_batch_norms(host_kernels: ModuleType, case: Case) -> None:
    """Each tensor, and the gradient's gap, has to allow wide accesses."""
    count = vector(case)
    for shape in (ChannelShape(3, 2, 2 * count), ChannelShape(9, 2 * count, 1)):
        for moved in range(3):
            offsets = [0, 0, 0]
            offsets[moved] = case.dtype.itemsize
            access = check_batch_norm(host_kernels, case, shape, offsets=offsets)
            assert access == 1
        gap = shape._replace(gap=1)
        is_wide = shape.inner > 1 or count == 1
        assert check_batch_norm(host_kernels, case, gap) == (count if is_wide else 1)


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


@pytest.mark.parametrize("count", [1, 4, 8])
def test_each_access_of_a_batch_norm_is_one_lanes(host_kernels: ModuleType, count: int) -> None:
    """The lanes of all warps make every access once."""
    for shape in (
        *(ChannelShape(outer, 3, n * count, 2) for outer in (1, 2, 7) for n in (2, 3, 40)),
        *(ChannelShape(outer, n * count, 1, 3) for outer in (2, 70) for n in (1, 3, 8, 19)),
    ):
        outer, channels, inner, gap = shape
        layout = outer, channels, inner, (channels + gap) * inner
        expected = sorted(
            offsets_of_access(shape, count, channel, access)
            for channel in range(0, channels, count if inner == 1 else 1)
            for access in range(outer * (inner // count if inner > 1 else 1))
        )
        for pieces in (1, 2, 5):
            found, warp, warps = [], 0, 1
            while warp < warps:
                for lane in range(32):
                    offsets, warps = host_kernels.offsets_of_lane(
                        layout, count, pieces, warp, lane, 10**6
                    )
                    found += offsets
                warp += 1
            assert sorted(found) == expected, (shape, pieces)


def test_number_of_partial_sums(host_kernels: ModuleType) -> None:
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
        assert host_kernels.pieces_of(layout, 2) == pieces, shape


@pytest.mark.parametrize("count", [1, 8])
def test_accesses_of_a_large_batch_norm(host_kernels: ModuleType, count: int) -> None:
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
                found, warps = host_kernels.offsets_of_lane(
                    layout, count, pieces, piece * blocks + block, lane, 9
                )
                assert (found, warps) == (expected, pieces * blocks), (shape, pieces)


@slow
def test_under_sanitizers() -> None:
    """Run this file again under ASan and UBSan, with the kernels of two activations."""
    run_tests(__file__, folder=Path(__file__).parent, preloaded=sanitizers())
