"""Fused calls: one kernel equals the composition of its operations.

They are equal bit for bit, except for smooth activations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from _support.twins import (
    OpCounter,
    Parts,
    Step,
    assert_same_step,
    converted_twin,
    recomputed,
    step_of,
)
from torch import Tensor, nn

from inplace_ops.recompute import kernels
from inplace_ops.recompute.calls import Call
from inplace_ops.recompute.specs import Spec

pytestmark = pytest.mark.usefixtures("_small_tensors_too")

HIDDEN = 24


class LlamaBlock(nn.Module):
    """The feed-forward half of a block, in float32 except for its matrix products.

    On a CPU the norm is a layer norm, as PyTorch has no RMS norm kernel for it.
    """

    def __init__(self, norm: Callable[[int], nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(HIDDEN, HIDDEN), norm(HIDDEN)
        self.gate, self.up = nn.Linear(HIDDEN, 40, bias=False), nn.Linear(HIDDEN, 40, bias=False)
        self.down = nn.Linear(40, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with torch.autocast(x.device.type, torch.bfloat16):
            z = self.norm(x)
            return x + self.down(F.silu(self.gate(z)) * self.up(z))


class UNetBlock(nn.Module):
    """A float32 group norm and an activation, then a convolution under autocast.

    `shortcut` is a view of the norm's input if another convolution has saved the 16-bit tensor.
    """

    def __init__(
        self,
        act: nn.Module,
        dtype: torch.dtype = torch.bfloat16,
        upcasts: bool = False,
        shortcut: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.first, self.norm, self.act = nn.Conv2d(3, 8, 1), nn.GroupNorm(2, 8), act
        self.conv, self.other = nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3)
        self.dtype, self.upcasts, self.shortcut = dtype, upcasts, shortcut

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor | float = 0.0
        with torch.autocast("cpu", self.dtype, enabled=self.upcasts):
            x = self.first(x)
            if self.shortcut is not None:
                y = self.other(x).mean()
        x = x.float() if self.shortcut is None else self.shortcut(x.float())
        z = self.act(self.norm(x))
        with torch.autocast("cpu", self.dtype):
            return self.conv(z) + y


class ResidualBlock(nn.Module):
    """Convolutions and norms, whose output `join` combines with the input before a convolution."""

    def __init__(
        self,
        join: Callable[[Any, Tensor, Tensor], Tensor],
        has_downsample: bool = False,
        norm: Callable[[int], nn.Module] = nn.BatchNorm2d,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3)
        self.conv1, self.norm1 = nn.Conv2d(8, 8, 3, padding=1, bias=False), norm(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), norm(8)
        self.relu, self.last = nn.ReLU(inplace=True), nn.Conv2d(8, 4, 3)
        self.downsample = nn.Sequential()
        if has_downsample:
            self.downsample = nn.Sequential(nn.Conv2d(8, 8, 1, bias=False), norm(8))
        self.join, self.dtype = join, dtype

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", self.dtype, enabled=self.dtype != torch.float32):
            x = self.relu(self.first(x))
            z = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
            return self.last(self.join(self, z, self.downsample(x)))


def torchvision_join(m: Any, z: Tensor, identity: Tensor) -> Tensor:
    z += identity
    return m.relu(z)


def tokens(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, 9, HIDDEN, dtype=dtype)


def images(channels: int = 3) -> Tensor:
    return torch.randn(2, channels, 7, 5)


Case = tuple[Callable[[], nn.Module], Callable[[], Tensor], dict[str, int]]

# A model, its input, and by op how many more run in backward than with composed calls.
CASTS: dict[str, Case] = {
    "llama": (  # the gate and the up projection each cast the norm's output, and share one value
        LlamaBlock,
        tokens,
        {"inplace_ops::normalize": -1, "aten::_to_copy": -1, "inplace_ops::normalize and cast": 1},
    ),
    **{
        f"group norm, {act}, {dtype}".replace("torch.", ""): (
            lambda act=act, dtype=dtype: UNetBlock(getattr(nn, act)(), dtype),
            images,
            {
                f"inplace_ops::{name}_recompute": -1,
                "aten::_to_copy": -1,
                f"inplace_ops::{name}_recompute and cast": 1,
            },
        )
        for act, name, dtype in (
            ("SiLU", "silu", torch.bfloat16),
            ("ReLU", "relu", torch.float16),
            ("GELU", "gelu", torch.bfloat16),
        )
    },
}


# How a residual block combines a norm's output and its input.
SUM, RELU_OF_SUM = "inplace_ops::normalize_add", "inplace_ops::normalize_add_relu"
FUSED_SUM = {SUM: 1, "inplace_ops::normalize": -1, "aten::add": -1}
FUSED_RELU_OF_SUM = {
    RELU_OF_SUM: 1,
    "inplace_ops::normalize": -1,
    "aten::add": -1,
    "aten::relu": -1,
}

JOINS: dict[str, tuple[Callable[[Any, Tensor, Tensor], Tensor], dict[str, int]]] = {
    "torchvision's": (torchvision_join, FUSED_RELU_OF_SUM),
    "relu": (lambda m, z, x: m.relu(z + x), FUSED_RELU_OF_SUM),
    "relu, swapped": (lambda m, z, x: m.relu(x + z), FUSED_RELU_OF_SUM),
    "sum": (lambda m, z, x: z + x, FUSED_SUM),
    "sum, swapped": (lambda m, z, x: x + z, FUSED_SUM),
    "other activation": (lambda m, z, x: F.leaky_relu(z + x, 0.3), FUSED_SUM),
    "view": (lambda m, z, x: F.silu((z + x).transpose(2, 3)), FUSED_SUM),
    "alpha": (lambda m, z, x: m.relu(torch.add(x, z, alpha=0.5)), {}),
    "view of the norm": (lambda m, z, x: m.relu(z.transpose(2, 3) + x.transpose(2, 3)), {}),
    "difference": (lambda m, z, x: m.relu(x - z), {}),
}

NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch": nn.BatchNorm2d,
    "group": lambda channels: nn.GroupNorm(2, channels),
    "instance": lambda channels: nn.InstanceNorm2d(channels, affine=True),
}


def calls_of(spec: Spec) -> Iterator[Call]:
    """Return all calls in a spec."""
    if isinstance(spec, Call):
        yield spec
        for part in spec.inputs:
            yield from calls_of(part)


def composed(function: Any, inputs: Any, arguments: Any) -> type[Call]:
    return kernels.Multiplication if function is torch.mul else Call


def assert_fused(
    case: Case,
    monkeypatch: pytest.MonkeyPatch,
    channels_last: bool = False,
    tolerance: float = 0,
) -> None:
    """Assert that fused calls give the step of composed calls, with other ops in backward."""
    make, example, difference = case
    model, x = make(), example()
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
        x = x.contiguous(memory_format=torch.channels_last)
    steps: list[Step] = []
    ops: list[Counter[str]] = []
    for is_fused in (True, False):
        if not is_fused:
            monkeypatch.setattr(kernels, "_call_class_of", composed)
            monkeypatch.setattr(kernels, "_ACTIVATIONS", {})
        twin = converted_twin(model, max_ops=4)
        twin(x).sum().backward()  # the first use compares values
        specs = [spec for value in recomputed(twin(x)) for spec in calls_of(value.spec)]
        are_fused = any(type(spec).compute is not Call.compute for spec in specs)
        assert are_fused == (is_fused and bool(difference))
        output = twin(x)
        with OpCounter() as counted:
            output.sum().backward()
        ops.append(counted.ops)
        steps.append(step_of(twin, x))
    assert_same_step(*steps, tolerance)
    more = {op: ops[0][op] - ops[1][op] for op in {*ops[0], *ops[1]}}
    assert {op: count for op, count in more.items() if count} == difference


@pytest.mark.usefixtures("without_products")
@pytest.mark.parametrize("case", CASTS)
def test_cast_of_a_norm_is_after_norm(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    is_exact = not any(smooth in case for smooth in ("SiLU", "GELU"))
    assert_fused(CASTS[case], monkeypatch, tolerance=0 if is_exact else 1e-3)


@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_cast_of_an_rms_norm_on_a_gpu_is_after_norm(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = LlamaBlock(nn.RMSNorm).to(device), tokens().to(device)
    steps = []
    for is_fused in (True, False):
        if not is_fused:
            monkeypatch.setattr(kernels, "_call_class_of", composed)
        twin = converted_twin(model, max_ops=4)
        twin(x).sum().backward()
        specs = [spec for value in recomputed(twin(x)) for spec in calls_of(value.spec)]
        assert any(isinstance(spec, kernels.CastOfAffine) for spec in specs) == is_fused
        steps.append(step_of(twin, x))
    assert_same_step(*steps, tolerance=1e-6)


@pytest.mark.usefixtures("without_products")
@pytest.mark.parametrize(
    ("dtype", "channels_last"),
    [
        *((torch.float32, False), (torch.float32, True)),
        *((torch.bfloat16, False), (torch.float16, True)),
    ],
)
@pytest.mark.parametrize("join", JOINS)
def test_residual_sums_equal_their_composition(
    join: str,
    dtype: torch.dtype,
    channels_last: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    function, difference = JOINS[join]
    case = (lambda: ResidualBlock(function, dtype=dtype), images, difference)
    assert_fused(case, monkeypatch, channels_last)


@pytest.mark.usefixtures("without_products")
@pytest.mark.parametrize("has_downsample", [False, True], ids=["identity", "downsample"])
@pytest.mark.parametrize("norm", NORMS)
def test_residual_sum_is_fused_with_one_norm(
    norm: str, has_downsample: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum is fused with its norm; with a downsampling branch, with one of its two norms."""
    difference = {} if norm == "instance" else FUSED_RELU_OF_SUM  # it returns a view
    case = (
        lambda: ResidualBlock(torchvision_join, has_downsample, NORMS[norm]),
        images,
        difference,
    )
    assert_fused(case, monkeypatch)


ADDENDS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "broadcast": lambda m, x: x[:, :1],
    "broadcast in all": lambda m, x: x.mean(),
    "larger": lambda m, x: torch.stack([x, x]),
    "promoted": lambda m, x: x.double(),
    "parameter": lambda m, x: m.conv1.weight[:, 0, :1, :1],
}


@pytest.mark.parametrize("addend", ADDENDS)
def test_sums_that_are_not_fused_are_exact(addend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum that broadcasts or promotes is composed of PyTorch's operations, and exact."""

    def join(m: Any, z: Tensor, x: Tensor) -> Tensor:
        y = m.relu(z + ADDENDS[addend](m, x)).float()
        return y.flatten(0, -4)

    steps = []
    model, x = ResidualBlock(join), images()
    for is_fused in (True, False):
        if not is_fused:
            monkeypatch.setattr(kernels, "_call_class_of", composed)
        steps.append(step_of(converted_twin(model), x))
    assert_same_step(*steps, tolerance=0)


# Modules after a norm whose input is cast from 16 bits, so that their forward is not fused: by the
# name of the op, the module and whether the op gives PyTorch's values.
ACTIVATIONS: dict[str, tuple[nn.Module, bool]] = {
    "relu": (nn.ReLU(), True),
    "leaky_relu": (nn.LeakyReLU(0.3), True),
    "silu": (nn.SiLU(), False),
    "hardswish": (nn.Hardswish(), False),
    "mish": (nn.Mish(), False),
}
SHORTCUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "the tensor": lambda x: x,
    "a view": lambda x: x[:1],
}


@pytest.mark.usefixtures("without_products")
@pytest.mark.parametrize(
    ("name", "shortcut"),
    [*((name, None) for name in ACTIVATIONS), *(("silu", s) for s in SHORTCUTS)],
)
def test_activation_and_cast_of_an_upcast_norm_are_fused(
    name: str, shortcut: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One op computes the cast to float32, the norm, the activation and the cast back."""
    act, is_exact = ACTIVATIONS[name]
    recompute = f"inplace_ops::{name}_recompute"
    difference = {recompute: -1, "aten::_to_copy": -2, f"{recompute} in float32": 1}
    view = None if shortcut is None else SHORTCUTS[shortcut]
    case = (lambda: UNetBlock(act, upcasts=True, shortcut=view), images, difference)
    assert_fused(case, monkeypatch, tolerance=0 if is_exact else 1e-3)


# The products of a tensor with one factor for each channel.


def squeezed(m: Any, x: Tensor) -> Tensor:
    """Scale a norm's output channel by channel."""
    y = m.act(m.norm(m.first(x)))
    return m.last(torch.sigmoid(m.factors(y.mean((2, 3), keepdim=True))) * y)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_scaled_channels_run_one_kernel(
    memory_format: torch.memory_format, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where PyTorch's broadcasted product is slow, a kernel of norms computes it."""
    sizes = {"first": (3, 16, 3), "factors": (16, 16, 1), "last": (16, 4, 1)}
    layers: dict[str, nn.Module] = {name: nn.Conv2d(*each) for name, each in sizes.items()}
    model = Parts(squeezed, **layers, norm=nn.BatchNorm2d(16), act=nn.SiLU())
    model, x = model.to(memory_format=memory_format), images().to(memory_format=memory_format)
    twins, found = [converted_twin(model) for _ in range(2)], []
    for twin in twins:
        twin(x)  # checks the recomputed values
    for twin, is_slow in zip(twins, (False, True), strict=True):
        monkeypatch.setattr(kernels, "_is_scaled_slowly", lambda x, is_slow=is_slow: is_slow)
        with OpCounter() as counter:
            step = step_of(twin, x)
        found.append((step, counter.ops["inplace_ops::normalize"], counter.ops["aten::mul"]))
    (expected, kernels_before, products_before), (step, kernels_after, products_after) = found
    assert_same_step(step, expected, tolerance=0)
    assert (kernels_after, products_after) == (kernels_before + 1, products_before - 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 16, 7, 5), (1, 5, 4, 8), (2, 3, 11), (2, 3, 4, 2, 3)])
def test_scaled_channels_equal_the_product(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values, signs of zero, NaN and strides are those of `torch.mul`, in both orders."""
    monkeypatch.setattr(kernels, "_is_scaled_slowly", lambda x: True)
    special = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, torch.finfo(dtype).max]
    special += [torch.finfo(dtype).tiny, torch.finfo(dtype).smallest_normal * 2.0**-5]
    values = torch.tensor(special, dtype=dtype)
    x, factors = torch.randn(shape).to(dtype), torch.randn(*shape[:2], *(1 for _ in shape[2:]))
    factors = factors.to(dtype)
    for tensor in (x, factors):
        picked = torch.rand(tensor.shape) < 0.3
        tensor[picked] = values[torch.randint(len(values), (int(picked.sum()),))]
    formats = [x, x.to(memory_format=torch.channels_last)] if x.dim() == 4 else [x]
    for tensor in formats:
        for inputs in ((tensor, factors), (factors, tensor)):
            with OpCounter() as counter:
                value = kernels.multiply(*inputs)
            assert counter.ops["inplace_ops::normalize"] == 1
            expected = torch.mul(*inputs)
            assert value.stride() == expected.stride()
            torch.testing.assert_close(value, expected, rtol=0, atol=0, equal_nan=True)
            is_number = ~expected.isnan()
            assert torch.equal(value.signbit()[is_number], expected.signbit()[is_number])


@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("size", [7, 56])
def test_large_scaled_channels_on_a_gpu_equal_the_product(
    size: int, memory_format: torch.memory_format, dtype: torch.dtype, device: torch.device
) -> None:
    batch = kernels._LEAST_SCALED_BYTES // (96 * size * size * dtype.itemsize) + 1
    x = torch.randn(batch, 96, size, size, device=device).to(dtype, memory_format=memory_format)
    factors = torch.rand(batch, 96, 1, 1, device=device).to(dtype)
    with OpCounter() as counter:
        value = kernels.multiply(x, factors)
    assert counter.ops["inplace_ops::normalize"] == 1
    assert value.stride() == x.stride()
    assert torch.equal(value, torch.mul(x, factors))


def test_other_products_are_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other shapes, dtypes and strides, for which the kernel's result could differ."""
    monkeypatch.setattr(kernels, "_is_scaled_slowly", lambda x: True)
    x, factors = torch.randn(4, 4, 6, 6), torch.randn(4, 4, 1, 1)
    others = [
        (x, factors.double()),
        (x, factors[:1]),
        (x, factors[:, :1]),
        (x, factors.transpose(0, 1)),
        (x.transpose(0, 1), factors),
        (x[..., ::2], factors),
        (x, x),
        (x[:, :, 0, 0], factors[:, :, 0, 0]),
        (x.to(torch.int32), factors.to(torch.int32)),
    ]
    for inputs in others:
        with OpCounter() as counter:
            value = kernels.multiply(*inputs)
        expected = torch.mul(*inputs)
        assert counter.ops["inplace_ops::normalize"] == 0
        assert (value.dtype, value.stride()) == (expected.dtype, expected.stride())
        assert torch.equal(value, expected)
