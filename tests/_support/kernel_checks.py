"""Checks of the kernels' results: buffers between guards, and comparisons with PyTorch in float64.

`Kernels` runs a kernel: its body on the host (`test_host_kernels.py`), or the code that nvcc made
of it (`test_compiled_kernels.py`). Every buffer is between guards. They have a known pattern, which
reveals writes.

Formulas and accuracies are those of the activations' entries in `inplace_ops.activations`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from inplace_ops.activations import ACTIVATIONS, GELU_TANH, LEAKY_RELU, SILU, Activation

from .assertions import assert_is_cast
from .cases import FLOATS
from .norm_cases import normalized, rounding
from .sanitizers import SANITIZE

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
# Sanitizers check accesses, which depend neither on the activation nor on the 16-bit format.
TESTED, DTYPES = (SOME, FLOATS[:3]) if SANITIZE in os.environ else (ACTIVATIONS, FLOATS)

CASES = [
    Case(entry, save, bits, dtype)
    for entry in TESTED
    for save in entry.save_modes
    for dtype in DTYPES
    for bits in bits_of(entry, save, dtype)
]
SMOOTH_ACTIVATIONS = [case for case in CASES if not case.entry.is_piecewise_linear]
# With fewer bits the recovered x is not exact enough for a second derivative.
DOUBLE_BACKWARD = [
    case
    for case in SMOOTH_ACTIVATIONS
    if case.save == "output" and case.bits >= case.entry.default_bits("output", case.dtype)
]
NORMALIZED = [Case(entry, "recompute", 0, dtype) for entry in TESTED for dtype in DTYPES]


class Kernels(Protocol):
    """Runs kernels on tensors of the host: see `host_kernels.cpp`.

    Attributes:
        tile: By the bytes of an element: the elements of a warp's tile.
    """

    tile: dict[int, int]

    def run(self, *args: object) -> tuple[int, str]:
        """Run a kernel over a virtual grid, and return its path: see `LaunchPath`."""

    def run_batch_norm(self, *args: object) -> int:
        """Run the kernels of a batch norm's backward, and return the elements of an access."""

    def pieces_of(self, layout: Sequence[int], element_bytes: int) -> int:
        """Return the number of partial sums of a channel."""

    def poison(self, address: int, size: int) -> None:
        """Forbid accesses to a guard."""

    def unpoison(self, address: int, size: int) -> None:
        """Allow them again."""


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


@contextmanager
def guarded(kernels: Kernels, buffers: Collection[Buffer]) -> Iterator[None]:
    """Forbid accesses to the guards of buffers in a `with` block, then check the guards."""
    guards = [guard for buffer in buffers for guard in buffer.guards]
    for guard in guards:
        kernels.poison(guard.data_ptr(), guard.numel())
    yield
    for guard in guards:
        kernels.unpoison(guard.data_ptr(), guard.numel())
    for buffer in buffers:
        assert buffer.guards_are_intact()


class LaunchPath(NamedTuple):
    access: int  # elements of an access, except in the rest at the end
    layout: str  # of a norm's affine, for accesses of several elements


def launch(
    kernels: Kernels,
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
    with guarded(kernels, buffers):
        path = kernels.run(
            case.name,
            list(case.scalars.values()),
            functor,
            str(case.dtype).removeprefix("torch."),
            [
                operand.address
                - first_row * operand.tensor.stride(0) * operand.tensor.dtype.itemsize
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
    kernels: Kernels,
    case: Case,
    shape: Sequence[int],
    strides: Sequence[Sequence[int]] = ((1,),) * 3,
    offsets: Sequence[int] = (0, 0, 0, 0),
    first_row: int = 0,
) -> int:
    """Compare forward and backward with PyTorch; return the elements of an access of backward.

    Args:
        kernels: Runs the kernels.
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
    launch(kernels, case, case.forward, [values, values], packed, first_row)
    y = values.tensor.clone()
    saved = [values] if case.save == "output" else []
    operands = [result, incoming, *saved]
    backward = launch(kernels, case, case.backward, operands, packed, first_row)
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
    launch(kernels, case, case.plain, [result, values], first_row=first_row)
    assert torch.equal(result.tensor, y)
    assert torch.equal(values.tensor, x)
    return backward.access


def check_double_backward(kernels: Kernels, case: Case) -> None:
    """Compare the term of the second derivative with PyTorch."""
    dtype, shape = case.dtype, [2 * kernels.tile[case.dtype.itemsize] + 43]
    x = normal(dtype, shape, 3.0)
    _, first, second = derivatives(case, x, 2)
    x = torch.where((second / first).abs() < 2.5, x, 1.0)  # away from f' = 0
    _, first, second = derivatives(case, x, 2)
    ratio = second / first

    values, grad_grad, grad, result = (Operand(dtype, shape, [1]) for _ in range(4))
    packed = Buffer(case.bits * -(-shape[0] // 8))
    values.tensor.copy_(x)
    launch(kernels, case, case.forward, [values, values], packed)
    for operand in (grad_grad, grad):
        operand.tensor.copy_(normal(dtype, shape))
    launch(kernels, case, "DoubleBackward", [result, grad_grad, grad, values], packed)
    scale = grad_grad.tensor.double() * grad.tensor.double()
    # The error of x is at most 3e-6 here, and the ratio's derivative at most 4 + ratio^2.
    error = 2 * ROUNDING[dtype] * ratio.abs() + 3e-6 * (4 + ratio.square())
    distance = (result.tensor.double() - scale * ratio).abs()
    assert (distance <= scale.abs() * error + 1e-7).all()


def derivative_error(case: Case, z: Tensor) -> Tensor:
    """Return a bound of the error of the derivative at z, relative to the gradient."""
    compute = ROUNDING[torch.promote_types(case.dtype, torch.float32)]
    wide = z.double()
    if case.entry.is_piecewise_linear:
        return torch.zeros_like(wide)
    error = torch.full_like(wide, FORMULA[case.dtype] + 2 * compute)
    if case.entry is GELU_TANH:
        # Its derivative has the term z / 2 (1 - tanh(u)^2) u', whose difference has an absolute
        # error, in PyTorch too: 4.9e-15 in float64 at z = -7. After a norm z exceeds 4, unlike x.
        slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * wide**2)
        error += compute * wide.abs() * slope
    return error


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
    kernels: Kernels,
    case: Case,
    shape: Sequence[int],
    channels: Dims,
    rows: Dims | None = None,
    *,
    strides: Sequence[Sequence[int]] | None = None,
    offsets: Sequence[int] = (0,) * 7,
    gap: int = 0,
    first_row: int = 0,
    is_first: bool = True,
) -> LaunchPath:
    """Compare a norm's output, the activation and its gradient with PyTorch.

    Returns the slowest path.

    Args:
        kernels: Runs the kernels.
        case: The activation and dtype.
        shape: The shape of the norm's input.
        channels: The dimensions in which the channels' scale and shift differ.
        rows: The dimensions in which the rows' rstd and mean differ; None without row statistics.
        strides: Those of input, incoming gradient and result; dense by default.
        offsets: Bytes by which input, incoming gradient, result, scale, shift, rstd and mean are
            misaligned.
        gap: Elements between the affines of two samples.
        first_row: The row at which the virtual grid begins.
        is_first: Whether to check the functors that do not depend on the activation too, and a
            piecewise-linear activation of a sum. Compiled is only ReLU's.
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

    def run(
        functor: str, *operands: Operand, result: Operand = result, case: Case = case
    ) -> Tensor:
        result.tensor.fill_(torch.nan)
        paths.append(launch(kernels, case, functor, [result, *operands], None, first_row, affine))
        return result.tensor.clone()

    paths: list[LaunchPath] = []
    z = run("Normalize", inputs)
    y = run("ForwardRecompute", inputs)
    actual = run("BackwardRecompute", incoming, inputs)
    for target in DTYPES[2:] if dtype == torch.float32 else ():
        narrow = Operand(target, shape, result.tensor.stride(), offsets[2])
        suffix = f" to {target}".replace("torch.", "")
        if is_first:
            assert torch.equal(run("Normalize" + suffix, inputs, result=narrow), z.to(target))
        assert_is_cast(run("ForwardRecompute" + suffix, inputs, result=narrow), y, case.entry)
    if dtype in (torch.float16, torch.bfloat16):
        # In float32 between two casts: like a kernel over float32, between PyTorch's casts.
        in_float32 = case._replace(dtype=torch.float32)
        suffix = f" from {dtype}".replace("torch.", "")
        cast, wide = (Operand(torch.float32, shape, dense(shape)) for _ in range(2))
        cast.tensor.copy_(x)
        for functor in ("Normalize", "ForwardRecompute") if is_first else ("ForwardRecompute",):
            launch(kernels, in_float32, functor, [wide, cast], None, first_row, affine)
            narrow = run(functor + suffix, inputs, case=in_float32)
            if functor == "Normalize":
                assert torch.equal(narrow, wide.tensor.to(dtype))
            else:
                assert_is_cast(narrow, wide.tensor, case.entry)
    if is_first:
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
        error = rounding(gradient, dtype) + grad.double().abs() * derivative_error(case, z)
        assert ((actual.double() - gradient).abs() <= error).all()
    return min(paths)


def check_copy(kernels: Kernels, case: Case) -> None:
    """Check the copy of tensors that are not dense in the order of a batch norm's dimensions."""
    tile = kernels.tile[case.dtype.itemsize]
    for shape, strides in (([40, 8], (19, 2)), ([2 * tile + 43], (1,))):
        x = Operand(case.dtype, shape, strides)
        result = Operand(case.dtype, shape, dense(shape))
        x.tensor.copy_(normal(case.dtype, shape))
        launch(kernels, case, "Identity", [result, x])
        assert torch.equal(result.tensor, x.tensor)


class ChannelShape(NamedTuple):
    """The shape of a batch norm's input, in the order of its dimensions in memory.

    Attributes:
        outer: The blocks: samples, or pixels in channels_last.
        channels: The channels of a block.
        inner: The elements of a channel in a block: 1 in channels_last.
        gap: The channels between two blocks of the gradient, a slice of a larger tensor's channels.
    """

    outer: int
    channels: int
    inner: int
    gap: int = 0


def check_batch_norm(
    kernels: Kernels,
    case: Case,
    shape: ChannelShape,
    pieces: int | None = None,
    offsets: Sequence[int] = (0, 0, 0),
    constant: float | None = None,
) -> int:
    """Compare a batch norm's backward with PyTorch's; return the elements of an access.

    Args:
        kernels: Runs the kernels.
        case: The activation and dtype.
        shape: The shape of the norm's input.
        pieces: The number of partial sums of a channel; by default the one that the op has.
        offsets: Bytes by which grad_x, the incoming gradient and x are misaligned.
        constant: The value of all elements of x; by default they are random.
    """
    dtype, compute = case.dtype, torch.promote_types(case.dtype, torch.float32)
    outer, channels, inner, gap = shape
    sizes = [outer, channels, inner]
    grad_strides = [(channels + gap) * inner, inner, 1]
    result, incoming, x = (
        Operand(dtype, sizes, strides, offset)
        for strides, offset in zip((dense(sizes), grad_strides, dense(sizes)), offsets, strict=True)
    )
    x.tensor.copy_(normal(dtype, sizes, 2.0) + normal(dtype, [channels, 1]))
    if constant is not None:
        x.tensor.fill_(constant)
    incoming.tensor.copy_(normal(dtype, sizes) + 0.5)
    weight, bias = (normal(compute, [channels]).double() for _ in range(2))

    leaf = x.tensor.double().requires_grad_()
    parameters = [parameter.requires_grad_() for parameter in (weight, bias)]
    normed = torch.nn.functional.batch_norm(leaf, None, None, *parameters, training=True)
    variance, average = torch.var_mean(leaf.detach(), (0, 2), correction=0)
    inverse = (variance + 1e-5).rsqrt()

    def vector_of(values: Tensor) -> Operand:
        operand = Operand(compute, [1, channels, 1], [0, 1, 1])
        operand.tensor.copy_(values.detach().view(1, channels, 1))
        return operand

    scale, shift = vector_of(inverse * weight), vector_of(bias - average * inverse * weight)
    mean, rstd = vector_of(average), vector_of(inverse)
    slope, offset, grad_weight, grad_bias = (
        vector_of(torch.full([channels], torch.nan)) for _ in range(4)
    )
    result.tensor.fill_(torch.nan)
    layout = outer, channels, inner, grad_strides[0]
    if pieces is None:
        pieces = kernels.pieces_of(layout, dtype.itemsize)
    partial_sums = Operand(compute, [2 * pieces * channels], [1])
    buffers = [result, incoming, x, scale, shift, mean, rstd, slope, offset, grad_weight, grad_bias]
    buffers.append(partial_sums)
    # As the kernels round it: near 0 the rounding decides what a piecewise-linear activation does.
    z = Operand(dtype, sizes, dense(sizes))
    launch(kernels, case, "Normalize", [z, x], affine=[scale, shift])

    inputs = [buffer.data.clone() for buffer in buffers[1:7]]
    with guarded(kernels, buffers):
        access = kernels.run_batch_norm(
            case.name,
            list(case.scalars.values()),
            str(dtype).removeprefix("torch."),
            [buffer.address for buffer in buffers],
            layout,
            pieces,
        )
    for buffer, data in zip(buffers[1:7], inputs, strict=True):
        assert torch.equal(buffer.data, data)

    grad = incoming.tensor.double()
    y = case.entry.torch_function(normed + (z.tensor.double() - normed).detach(), **case.scalars)
    g, grad_x, *sums = torch.autograd.grad(y, [normed, leaf, *parameters], grad)
    sum_of_product, sum_of_gradient = (total.view(1, channels, 1) for total in sums)

    def total(values: Tensor) -> Tensor:
        return values.sum((0, 2), keepdim=True)

    roundoff = ROUNDING[compute]
    error = grad.abs() * derivative_error(case, z.tensor) + 20 * roundoff * g.abs()
    hat = ((leaf - average.view_as(mean.tensor)) * inverse.view_as(mean.tensor)).detach().abs()
    hat_error = roundoff * (hat + (average * inverse).abs().view_as(mean.tensor))
    gradient_error = total(error)
    product_error = total(error * hat + g.abs() * hat_error)
    for actual, expected, bound in (
        (grad_bias, sum_of_gradient, gradient_error),
        (grad_weight, sum_of_product, product_error),
    ):
        assert ((actual.tensor.double() - expected).abs() <= bound + 1e-30).all()
    error = error + (gradient_error + hat * product_error) / (outer * inner)
    terms = sum_of_gradient.abs() + hat * sum_of_product.abs()
    error = error + 4 * (roundoff * terms + hat_error * sum_of_product.abs()) / (outer * inner)
    error = error * scale.tensor.double().abs() + rounding(grad_x, dtype)
    assert ((result.tensor.double() - grad_x).abs() <= error).all()
    return access


def vector(case: Case) -> int:
    """Return the elements of the widest access."""
    return 1 if case.dtype == torch.float64 else 16 // case.dtype.itemsize


def samples_of(kernels: Kernels, case: Case, sample: int) -> int:
    """Return how many samples of `sample` elements are larger than a tile."""
    return kernels.tile[case.dtype.itemsize] // sample + 2
