"""The benchmarks' tools: the emulation of autocast, moved bytes, gradients, mechanisms."""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import inplace_ops
from inplace_ops.recompute.nodes import USE_CREATION_HOOK

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _benchmarks_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)


def test_emulated_operations_have_cuda_autocast_kernels() -> None:
    """CUDA's autocast has a kernel for each emulated operation, and from 2.12 for excluded ones."""
    from policies import CAST_INPUTS, POLICIES, SET_DTYPE, has_autocast_kernel

    excluded = POLICIES["CUDA autocast, torch 2.11"].excluded
    listed = {*CAST_INPUTS, *SET_DTYPE} - set(excluded)
    assert [name for name in sorted(listed) if not has_autocast_kernel(name, "CUDA")] == []
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    assert {has_autocast_kernel(name, "CUDA") for name in excluded} == {version >= (2, 12)}


def layer_norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, (8,))


def rms_norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (8,))


def softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)


@pytest.mark.parametrize(
    ("compute", "policy", "dtype"),
    [
        (layer_norm, "CUDA autocast", torch.float32),
        (rms_norm, "CUDA autocast", torch.float32),
        (rms_norm, "CUDA autocast, torch 2.11", torch.bfloat16),
        (softmax, "CUDA autocast", torch.float32),
        (torch.rsqrt, "CUDA autocast", torch.float32),
        (F.gelu, "CUDA autocast", torch.bfloat16),
        (layer_norm, "bfloat16", torch.bfloat16),
    ],
)
def test_emulation_gives_cuda_autocast_dtypes(
    compute: Callable[[Tensor], Tensor], policy: str, dtype: torch.dtype
) -> None:
    """An operation's output has the dtype that CUDA's autocast gives it, and the right values."""
    from policies import POLICIES, autocast, emulation, has_autocast_kernel

    x = torch.rand(4, 8, dtype=torch.bfloat16) + 0.5
    with emulation(POLICIES[policy], "cpu"), autocast(POLICIES[policy], "cpu"):
        y = compute(x)
    assert y.dtype is dtype
    torch.testing.assert_close(y.double(), compute(x.double()), rtol=1e-2, atol=1e-2)
    assert not has_autocast_kernel("layer_norm", "CPU")  # the emulation has ended


def products(x: Tensor, w: Tensor) -> list[Tensor]:
    """Return the results of each product that the emulation rounds, of matrices of 16 x 16."""
    image, kernel = x.view(1, 4, 8, 8), w[:4, :4].reshape(4, 4, 1, 1)
    places, masks = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1), [True, True, False]
    gradients = torch.ops.aten.convolution_backward(image, image, kernel, None, *places, masks)
    results = [torch.conv2d(image, kernel), *gradients[:2]]
    calls: list[tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = [
        (torch.mm, (x, w)),
        (partial(torch.addmm, beta=0.5), (w, x, w)),
        (torch.bmm, (x[None], w[None])),
        (torch.baddbmm, (w[None], x[None], w[None])),
    ]
    for product, args in calls:
        result = product(*args)
        results += [result, product(*args, out=torch.empty_like(result))]
    return results


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_emulated_products_round_once(dtype: torch.dtype) -> None:
    """A product of 16-bit tensors is the exact one, rounded, and allocates its result alone."""
    from common import memory_of
    from policies import POLICIES, PRODUCTS, emulation

    x, w = (torch.randn(16, 16).to(dtype) for _ in range(2))
    with emulation(POLICIES["bfloat16"], "cpu"):
        actual = products(x, w)
        assert (x @ w)._version == 0
        assert memory_of(lambda: x @ w, "cpu") == (2 * x.numel(), 2 * x.numel())
        torch.testing.assert_close(x.float() @ w.float(), (x.double() @ w.double()).float())
    exact = products(x.double(), w.double())
    assert len(actual) == len(PRODUCTS) + 1  # two gradients
    for found, expected in zip(actual, exact, strict=True):
        eps = torch.finfo(dtype).eps
        assert found.dtype is dtype
        torch.testing.assert_close(found.double(), expected, rtol=eps, atol=1e-5)


KIB = 1024


@pytest.mark.parametrize(
    ("compute", "expected"),
    [
        (lambda x: x + x, 12),  # reads both, writes one
        (lambda x: x.add_(1.0), 8),
        (lambda x: x.copy_(x.clone()), 16),  # two copies, each reads one and writes one
        (lambda x: x.view(-1).t(), 0),
        (lambda x: x.new_empty(256), 0),
        (lambda x: x.new_zeros(1024).expand(8, 1024) + 1.0, 4 + 4 + 32),
        (lambda x: x[:256].relu(), 2),
    ],
)
def test_moved_bytes_of_operations(compute: Callable[[Tensor], Tensor], expected: int) -> None:
    """Operations on a tensor of 4 KiB move `expected` KiB."""
    from common import MovedBytes

    x = torch.randn(1024)
    with MovedBytes() as moved:
        compute(x)
    assert moved.count == expected * KIB


def test_moved_bytes_of_backward() -> None:
    """A linear layer's backward reads input and gradient, and writes the weight's gradient."""
    from common import MovedBytes

    x, layer = torch.randn(64, 32), nn.Linear(32, 16, bias=False)
    y = layer(x)
    with MovedBytes() as moved:
        torch.autograd.grad(y, layer.weight, torch.ones_like(y))
    assert moved.count == 4 * (64 * 16 + 64 * 32 + 32 * 16 + 64 * 16)  # the last: ones_like


def small_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.SiLU(), nn.Conv2d(16, 8, 3), nn.BatchNorm2d(8)
    )


def scale_gradient(factor: float) -> Callable[[nn.Module], None]:
    """Return a function that scales the gradient of the first norm's bias alone."""

    def tamper(model: nn.Module) -> None:
        model.get_parameter("1.bias").register_hook(lambda g: factor * g)

    return tamper


def freeze_weight(model: nn.Module) -> None:
    model.get_parameter("4.weight").requires_grad_(False)


def shift_buffer(model: nn.Module) -> None:
    model.get_buffer("1.running_mean").add_(0.1)


def break_forward(model: nn.Module) -> None:
    model[2].register_forward_hook(lambda *_: torch.zeros(3))


@pytest.mark.parametrize(
    ("policy", "tamper", "message"),
    [
        ("float32", lambda model: None, None),
        ("CUDA autocast", lambda model: None, None),
        ("float32", scale_gradient(1.001), "off by"),
        ("CUDA autocast", scale_gradient(1.2), "off by"),
        ("float32", freeze_weight, "only one side has"),
        ("float32", shift_buffer, "buffers differ"),
        ("float32", break_forward, "fails only when converted"),
    ],
)
def test_wrong_training_of_converted_model_is_reported(
    policy: str,
    tamper: Callable[[nn.Module], None],
    message: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from bench_models import Case, trained
    from gradients import WrongGradientError

    inputs = {"": torch.randn(8, 3, 16, 16)}
    convert = inplace_ops.convert

    def tampered(model: nn.Module, **arguments: int) -> inplace_ops.Report:
        report = convert(model, **arguments)
        tamper(model)
        return report

    monkeypatch.setattr(inplace_ops, "convert", tampered)
    case = Case(policy, "contiguous")
    if message is None:
        outcome = trained(small_network(), inputs, case)
        assert outcome.report.saved_bytes_after < outcome.report.saved_bytes_before
        assert outcome.peak_over_torch < 1.0
    else:
        with pytest.raises(WrongGradientError, match=message):
            trained(small_network(), inputs, case)


class Unsteady(nn.Module):
    """Multiplies by another factor in each call."""

    calls = itertools.count(1)

    def forward(self, x: Tensor) -> Tensor:
        return x * next(self.calls)


def test_original_that_differs_from_itself_is_reported_as_noise() -> None:
    from bench_models import Case, trained
    from gradients import NoiseError

    model = nn.Sequential(nn.Linear(4, 4), Unsteady())
    with pytest.raises(NoiseError, match=r"runs of the original differ in 0\.bias"):
        trained(model, {"": torch.randn(8, 4)}, Case("float32", "contiguous"))


def test_gradients_that_rounding_alone_determines_are_reported_as_noise() -> None:
    from gradients import NoiseError, Reference, WrongGradientError

    model = nn.Linear(1, 1, bias=False)

    def run(model: nn.Module) -> None:
        model.weight.grad = torch.ones(1, 1)

    expected = {"weight": torch.ones(1, 1)}
    for rounding, error in ((0.9, WrongGradientError), (1.1, NoiseError)):
        in_float32 = {"weight": torch.full((1, 1), 1.0 + rounding)}
        reference = Reference(model, run, expected, in_float32)
        with pytest.raises(error, match=r"off by 1\.0e-01"):
            reference.verify({"weight": torch.full((1, 1), 1.1)})


@pytest.mark.parametrize(("scale", "is_noise"), [(1.0, False), (1e9, True)])
def test_gradients_that_a_rounding_of_the_weights_changes_are_noise(
    scale: float, is_noise: bool
) -> None:
    from gradients import NoiseError, Reference, WrongGradientError, gradients_of

    x = torch.randn(256, 32)

    def run(model: nn.Module) -> None:
        torch.sin(scale * model(x)).sum().backward()

    model = nn.Linear(32, 32)
    run(model)
    expected = gradients_of(model)
    wrong = {name: 1.1 * g for name, g in expected.items()}
    with pytest.raises(NoiseError if is_noise else WrongGradientError):
        Reference(model, run, expected).verify(wrong)


@pytest.mark.parametrize(
    ("change", "from_float64", "slack", "limit"),
    [
        *[(0.0, 0.0, (), None), (1e-4, 0.0, (), None), (1e-3, 0.0, (), 1e-4)],
        *[(2e-4, 0.0, (4.0,), 8e-5), (0.0, 1e-3, (4.0,), None)],
        *[(1e-5, 1e-5, (4.0, True), None), (1e-4, 0.0, (4.0, True), 4e-4)],
        (0.0, 1e-4, (4.0, True), 4e-4),
    ],
)
def test_gradients_in_float32_may_differ_by_what_rounding_allows(
    change: float, from_float64: float, slack: tuple[Any, ...], limit: float | None
) -> None:
    from gradients import Reference, Slack, WrongGradientError

    model = nn.Linear(3, 3)

    def run(own: nn.Module) -> None:
        is_rounded = not torch.equal(own.weight, model.weight)
        for parameter in own.parameters():
            parameter.grad = torch.full_like(parameter, 1 + change * is_rounded)

    expected = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    in_float64 = {name: (1 + from_float64) * g.double() for name, g in expected.items()}
    reference = Reference(model, run, expected, None, lambda: in_float64, Slack(*slack))
    with pytest.raises(WrongGradientError) if limit is None else nullcontext():
        difference, allowed = reference.verify({n: (1 + 5e-5) * g for n, g in expected.items()})
        assert difference == pytest.approx(5e-5, rel=1e-2)
        assert allowed == pytest.approx(limit, rel=1e-2)


class FloatNorm(nn.Module):
    """An RMS norm that computes in float32 with a number added."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * (wide * scale).to(x.dtype)


class Gate(nn.Module):
    """Has no parameters, and temporary tensors inside."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, 1)
        return F.silu(first) * torch.tanh(second)


class Everything(nn.Module):
    """Something for each mechanism of the engine."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.wide = nn.Sequential(nn.Conv2d(16, 64, 1), nn.GroupNorm(4, 64), nn.SiLU())
        self.narrow = nn.Sequential(nn.Conv2d(64, 32, 3, padding=1))
        self.joined, self.again = nn.Conv2d(96, 32, 1), nn.Conv2d(128, 32, 1)
        self.gate = nn.Sequential(nn.Dropout(), Gate())
        self.tokens = nn.Sequential(nn.Linear(16, 64), FloatNorm(64), nn.LayerNorm(64))
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.wide(self.stem(x))
        parts = [wide, self.narrow(wide)]
        parts.append(F.relu(self.joined(torch.cat(parts, 1))))
        x = F.silu(self.again(torch.cat(parts, 1))).clamp(max=6)
        x = F.interpolate(self.gate(x), scale_factor=2.0)
        x = self.head(F.gelu(self.tokens(x.flatten(2).transpose(1, 2))))
        return x.mean(1) + F.adaptive_avg_pool2d(wide, 1).flatten(1)[:, :10]


@functools.cache
def costs_without(mechanism: str, policy_name: str) -> tuple[int, int, int]:
    """Return saved bytes, moved bytes and calls of a small network without a mechanism."""
    from ablation import without
    from policies import POLICIES
    from variants import CONVERT, step_of

    policy = POLICIES[policy_name]
    torch.manual_seed(0)
    model, x = Everything().to(policy.weights), torch.randn(2, 3, 32, 32, dtype=policy.weights)
    with without(mechanism):
        step = step_of(CONVERT, model, x, policy)
        step.run_seeded()  # the first step compares what it recomputes
        step.reset()
        return step.memory().saved, step.moved(), step.calls()


def mechanisms() -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        return list(importlib.import_module("ablation").MECHANISMS)


@pytest.mark.skipif(not USE_CREATION_HOOK, reason="some mechanisms need the node creation hook")
@pytest.mark.filterwarnings("error")  # the engine contains errors, and warns
@pytest.mark.parametrize("mechanism", mechanisms())
def test_every_mechanism_is_used(mechanism: str) -> None:
    """Without it, a network in float32 or bfloat16 saves, moves or calls something else."""
    policies = ("float32", "bfloat16")
    assert [costs_without(mechanism, policy) for policy in policies] != [
        costs_without("", policy) for policy in policies
    ]


@pytest.mark.plans_alone
def test_calls_of_a_forward_are_counted_alike_each_time() -> None:
    """Also where products are emulated in another thread."""
    from policies import POLICIES, emulation
    from variants import CONVERT, step_of

    policy = POLICIES["bfloat16"]
    x = torch.randn(8, 3, 16, 16, dtype=torch.bfloat16)
    with emulation(policy, "cpu"):
        step = step_of(CONVERT, small_network().to(torch.bfloat16), x, policy)
        for _ in range(3):  # until a plan has all decisions
            step.run_seeded()
        step.reset()
        assert len({step.calls() for _ in range(5)}) == 1


def test_rows_without_a_column_keep_the_others_in_place(tmp_path: Path) -> None:
    from common import read_csv, write_csv

    path = tmp_path / "x_cpu.csv"
    rows = [{"network": "a", "moved": "1", "ms": "2"}, {"network": "b", "ms": "3"}]
    write_csv(path, rows, "cpu")
    assert [(r["network"], r["moved"], r["ms"]) for r in read_csv(path)] == [
        ("a", "1", "2"),
        ("b", "", "3"),
    ]
    with pytest.raises(ValueError, match="peak"):
        write_csv(path, [*rows, {"network": "c", "peak": "4"}], "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_compared_before_they_are_timed(dtype: torch.dtype) -> None:
    from bench_products import PRODUCTS

    for name in ("YOLOv8n, 16 to 32 channels, 3 x 3", "ConvNeXt-T, 384 to 1536"):
        product = PRODUCTS[name]
        x, weight = product.tensors(2**17, dtype, "cpu")
        output, eps = product.run(x, weight), torch.finfo(dtype).eps
        product.check(x, weight, output, eps)
        with pytest.raises(AssertionError, match="off by"):
            product.check(x, weight, output * (1 + 64 * eps), eps)
        with pytest.raises(AssertionError, match="off by"):
            product.check(x, weight, torch.full_like(output, torch.nan), eps)
