"""torch.compile: no graph break, the same gradients."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from _support.assertions import assert_gradient, assert_values
from _support.cases import (
    ACTIVATIONS,
    GRAD_MODES,
    ONE_OF_EACH,
    SAVE_MODES,
    ActivationCase,
    activation_id,
)
from _support.marks import quick, release, slow
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import inplace_ops

# Dynamo issues these warnings while it traces an autograd.Function and inspects graph inputs.
pytestmark = [
    pytest.mark.compiles,
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]

SOME = [
    row
    for row in ACTIVATIONS
    if row.name in ("relu-mask", "silu-output-default", "silu-derivative-default")
]

LEAKY = next(row for row in SAVE_MODES if row.name == "leaky_relu-0.01-mask")

one_of_each = pytest.mark.parametrize(
    "activation", quick(ONE_OF_EACH, SOME, release), ids=activation_id
)
some_on_a_backend = pytest.mark.parametrize(
    ("activation", "backend"),
    [(SOME[0], "aot_eager"), (SOME[1], "eager"), (SOME[2], "aot_eager")],
    ids=lambda value: value if isinstance(value, str) else value.name,
)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


Call = Callable[[Tensor], Tensor]


def used(call: Call, x: Tensor) -> Tensor:
    h = x * 2
    h = call(h)
    return h + 1


def discarded(call: Call, x: Tensor) -> Tensor:
    h = x * 2
    call(h)
    return h + 1


def in_a_view(call: Call, x: Tensor) -> Tensor:
    h = x * 2
    call(h[1:3])
    return h + 1


def in_a_transpose(call: Call, x: Tensor) -> Tensor:
    h = x * 2
    call(h.t()[1:])
    return h + 1


def in_overlapping_views(call: Call, x: Tensor) -> Tensor:
    h = x * 2
    call(h[:3])
    h = h - 0.3
    call(h[1:])
    return h


def channels_last(call: Call, x: Tensor) -> Tensor:
    h = (x * 2)[None, :, None].expand(2, -1, 3, -1)
    h = h.contiguous(memory_format=torch.channels_last)
    call(h)
    return h.sum(0) / 6


def then_modified(call: Call, x: Tensor) -> Tensor:
    h = call(x * 2)
    h = h * 1
    h += x
    return call(h - 0.3)


def written_after(call: Call, x: Tensor) -> Tensor:
    h = x * 2
    y = call(h)
    y += x
    y[0] = 0
    return y


def written_after_a_product(call: Call, x: Tensor) -> Tensor:
    h = x @ torch.eye(x.size(1), dtype=x.dtype, device=x.device)
    y = call(h)
    y += x
    return y * 2


def read_before(call: Call, x: Tensor) -> Tensor:
    h = x.tanh() * 2
    s = h.sigmoid()
    call(h)
    return s + h


def cloned_before(call: Call, x: Tensor) -> Tensor:
    h = x * 2
    s = h.clone()
    call(h)
    return s + h


def without_grad_inside(call: Call, x: Tensor) -> Tensor:
    h = x * 2
    with torch.no_grad():
        call(h)
    return h + 1


def checkpointed(call: Call, x: Tensor) -> Tensor:
    return checkpoint(lambda z: call(z * 2) * 0.5, x, use_reentrant=False)


def modifies_its_input(call: Call, x: Tensor) -> Tensor:
    return call(x)


def modifies_a_view_of_its_input(call: Call, x: Tensor) -> Tensor:
    call(x[1:3])
    return x * 2


def modifies_its_cloned_input(call: Call, x: Tensor) -> Tensor:
    s = x.clone()
    call(x)
    return s + x


def modifies_its_modified_input(call: Call, x: Tensor) -> Tensor:
    x.mul_(0.5)
    call(x)
    return x * 2


def modifies_a_product_in_its_input(call: Call, x: Tensor) -> Tensor:
    x.addmm_(torch.ones_like(x), torch.eye(x.size(1), dtype=x.dtype, device=x.device))
    call(x)
    return x * 2


def modifies_a_transpose_of_its_input(call: Call, x: Tensor) -> Tensor:
    call(x.t()[:, 1:])
    return x * 2


# By name: programs, and whether they modify a graph input.
PROGRAMS = {
    program.__name__: (program, program.__name__.startswith("modifies"))
    for program in (
        used,
        discarded,
        in_a_view,
        in_a_transpose,
        in_overlapping_views,
        channels_last,
        then_modified,
        written_after,
        written_after_a_product,
        read_before,
        cloned_before,
        without_grad_inside,
        checkpointed,
        modifies_its_input,
        modifies_a_view_of_its_input,
        modifies_its_cloned_input,
        modifies_its_modified_input,
        modifies_a_product_in_its_input,
        modifies_a_transpose_of_its_input,
    )
}


def check(
    activation: ActivationCase,
    name: str,
    compile_: Callable[..., Call],
    shapes: Iterable[tuple[int, ...]],
    device: torch.device,
) -> None:
    """Compare values and gradients of a compiled program, for inputs of each shape."""
    program, modifies_input = PROGRAMS[name]
    compiled = compile_(lambda x: program(activation.call, x), fullgraph=True)
    # Inductor computes tanh and sigmoid with its own vector library. The gradient of expand is a
    # sum, whose order depends on the gradient's strides.
    rounded = replace(activation, is_rounded=program in (read_before, channels_last))
    for shape in shapes:
        leaf = torch.randn(shape, device=device, requires_grad=True)
        x, reference = leaf * 1, leaf * 1
        actual = compiled(x if modifies_input else leaf)
        expected = program(activation.copied, reference if modifies_input else leaf)
        assert_values(rounded, actual, expected)
        assert_values(rounded, x, reference)
        incoming = (torch.rand_like(actual) - 0.5).detach()
        (gradient,) = torch.autograd.grad(actual, leaf, incoming)
        (wanted,) = torch.autograd.grad(expected, leaf, incoming)
        assert_gradient(rounded, gradient, wanted, 3.0)  # for two activations in a row


@pytest.mark.parametrize(
    ("activation", "backend"),
    quick(
        [*((row, "aot_eager") for row in SAVE_MODES), *((row, "eager") for row in SOME)],
        [*((row, "aot_eager") for row in SOME), (SOME[1], "eager")],
        release,
    ),
    ids=lambda value: value if isinstance(value, str) else value.name,
)
@pytest.mark.parametrize("program", PROGRAMS)
def test_full_graph_matches_reference(
    activation: ActivationCase, backend: str, program: str, device: torch.device
) -> None:
    if activation.saves_output and program.startswith("written_after"):
        return  # raises in eager code too
    check(activation, program, partial(torch.compile, backend=backend), [(4, 7)], device)


# Imports of Inductor and Triton issue warnings, and on a GPU Inductor warns that TF32 is off.
ignores_warnings = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def inductor(
    device: torch.device, inductor_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """torch.compile with Inductor."""
    if device.type == "cpu" and shutil.which("g++") is None:
        pytest.skip("Inductor needs g++ on the CPU")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(inductor_cache))
    return partial(torch.compile, backend="inductor")


@pytest.mark.parametrize("backend", quick(["aot_eager", "inductor"], ["aot_eager"], release))
@ignores_warnings
def test_output_after_norm_may_be_modified_by_later_ops(
    backend: str, inductor: Callable[..., Any], device: torch.device
) -> None:
    def block(x: Tensor, norm: nn.Module, relu: nn.Module) -> Tensor:
        y = relu(norm(x))
        y += x
        return y

    norm, x = nn.BatchNorm2d(4).to(device), torch.randn(2, 4, 5, 5, device=device)
    relu = inplace_ops.ReLU()
    compiled = inductor(partial(block, norm=norm, relu=relu), backend=backend, fullgraph=True)
    results = []
    for function in (compiled, lambda leaf: norm(leaf).relu() + leaf):
        leaf = x.clone().requires_grad_()
        y = function(leaf)
        results.append((y, *torch.autograd.grad(y.square().sum(), leaf)))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("activation", quick(SOME, SOME[1:2], release), ids=activation_id)
@pytest.mark.parametrize(
    "program",
    [
        *("in_a_view", "read_before"),
        # In these PyTorch's activations that save their input raise or get wrong gradients.
        *("modifies_its_modified_input", "modifies_a_product_in_its_input"),
    ],
)
@ignores_warnings
def test_inductor_matches_reference(
    activation: ActivationCase, program: str, inductor: Callable[..., Any], device: torch.device
) -> None:
    check(activation, program, inductor, [(33, 65)], device)


class Block(nn.Module):
    def __init__(self, activation: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.last, self.first, self.second = nn.Conv2d(4, 4, 1), activation(), activation()

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(self.norm(self.convolution(x)))
        residual = h[:, :, ::2]
        h = self.last(h)[:, :, ::2]
        h += residual
        return self.second(h).mean((2, 3))


@pytest.mark.parametrize(
    ("activation", "backend"),
    [(SOME[0], "aot_eager"), (SOME[1], "eager"), (SOME[2], "aot_eager"), (LEAKY, "aot_eager")],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_module_gradients_match_eager(
    activation: ActivationCase, backend: str, device: torch.device
) -> None:
    torch.manual_seed(0)
    model = Block(activation.module).to(device)
    images = torch.randn(2, 3, 8, 6, device=device)
    grads = []
    for call in (model, torch.compile(model, backend=backend, fullgraph=True)):
        model.zero_grad()
        call(images).square().sum().backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, rtol=1e-4, atol=1e-4)


# On the CPU layout optimization changes the memory format, and saves copies of inputs and weights.
@torch._inductor.config.patch(layout_optimization=False)
@pytest.mark.parametrize("activation", [pytest.param(nn.ReLU, marks=slow), nn.SiLU])
@ignores_warnings
def test_converted_model_saves_no_more_under_inductor(
    activation: Callable[[], nn.Module], inductor: Callable[..., Any], device: torch.device
) -> None:
    original = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), activation(), nn.Conv2d(8, 8, 3)
    ).to(device)
    model = copy.deepcopy(original)
    images = torch.randn(2, 3, 32, 32, device=device)
    report = inplace_ops.convert(model, images)
    assert report.saved_bytes_after < report.saved_bytes_before
    steps = []
    for module in (original, model):
        compiled = inductor(module, fullgraph=True)
        saved = inplace_ops.saved_bytes(compiled, images)
        compiled(images).square().sum().backward()
        steps.append((saved, [p.grad for p in module.parameters()]))
    (before, expected), (after, actual) = steps
    assert after <= before
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@one_of_each
def test_dynamic_shapes_match_reference(activation: ActivationCase, device: torch.device) -> None:
    for program in ("used", "in_a_transpose"):
        compile_ = partial(torch.compile, backend="aot_eager", dynamic=True)
        check(activation, program, compile_, ((5, 7), (6, 7), (3, 11), (17, 64)), device)


@one_of_each
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_data_dependent_sizes_match_reference(
    activation: ActivationCase, device: torch.device
) -> None:
    def selected(call: Call, x: Tensor) -> Tensor:
        return call(x[x[:, 0] > 0] * 1.5)

    def selected_view(call: Call, x: Tensor) -> Tensor:
        return call((x[x[:, 0] > 0] * 1.5).unsqueeze(0))

    x = torch.randn(9, 5, dtype=torch.float64, device=device, requires_grad=True)
    for function in (selected, selected_view):
        compiled = torch.compile(
            partial(function, activation.call), backend="aot_eager", fullgraph=True
        )
        (actual,) = torch.autograd.grad(compiled(x).sum(), x)
        (expected,) = torch.autograd.grad(function(activation.reference, x).sum(), x)
        assert_gradient(activation, actual, expected, 1.5)


@pytest.mark.parametrize("activation", SOME[1:], ids=activation_id)
@pytest.mark.parametrize("program", ["in_a_transpose", "channels_last"])
def test_ten_shapes_compile_twice(
    activation: ActivationCase, program: str, device: torch.device
) -> None:
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(
        lambda x: PROGRAMS[program][0](activation.call, x), backend=counter, fullgraph=True
    )
    for n in range(10):
        compiled(torch.randn(4 + n, 6 + 3 * n, device=device, requires_grad=True))
    assert counter.frame_count == 2


@one_of_each
def test_ten_modules_compile_as_often_as_nn_relu(
    activation: ActivationCase, device: torch.device
) -> None:
    def compilations(module: Callable[..., nn.Module]) -> int:
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("eager")
        compiled = torch.compile(lambda m, x: m(x * 2), backend=counter, fullgraph=True)
        x = torch.randn(5, 7, device=device, requires_grad=True)
        for _ in range(10):
            compiled(module(inplace=True), x)
        return counter.frame_count

    assert compilations(activation.module) == compilations(nn.ReLU)


@some_on_a_backend
@pytest.mark.parametrize("mode", GRAD_MODES)
@pytest.mark.parametrize("requires_grad", [True, False])
def test_version_and_requires_grad_match_relu_in_grad_modes(
    activation: ActivationCase, backend: str, mode: str, requires_grad: bool, device: torch.device
) -> None:
    values = torch.randn(5, 7, device=device, requires_grad=requires_grad)
    results = []
    ours = activation.call
    for call in (ours, torch.relu_):
        torch._dynamo.reset()
        compiled = torch.compile(call, backend=backend, fullgraph=True)
        x = values * 1
        with GRAD_MODES[mode]():
            y = compiled(x)
        results.append((y is x, x._version, y.requires_grad))
        if call is ours:
            assert_values(activation, x.detach(), activation.reference(values.detach()))
    assert results[0] == results[1]


@pytest.mark.parametrize("name", ["relu_", "relu6_"])
def test_integers_match_clamp(name: str, device: torch.device) -> None:
    compiled = torch.compile(getattr(inplace_ops, name), backend="aot_eager", fullgraph=True)
    x = torch.arange(-5, 10, device=device)
    y = compiled(x)
    assert torch.equal(y, torch.arange(-5, 10, device=device).clamp(0, 6 if "6" in name else 9))


REJECTED: dict[str, Call] = {
    "leaf": lambda x: x,
    "view of a leaf": lambda x: x[1:],
    "split": lambda x: (x * 1).split(2)[1],
    "unbind": lambda x: (x * 1).unbind()[1],
    "single memory location": lambda x: (x * 1)[:1].expand(4, 6),
    "to a single memory location": lambda x: (x * 1).as_strided((2, 4), (3, 1)),
    "unsupported dtype": lambda x: x.to(torch.complex64),
}


@some_on_a_backend
@pytest.mark.parametrize("reason", REJECTED)
def test_rejects_what_eager_code_rejects(
    activation: ActivationCase, backend: str, reason: str, device: torch.device
) -> None:
    compiled = torch.compile(
        lambda x: activation.call(REJECTED[reason](x)), backend=backend, fullgraph=True
    )
    leaf = torch.randn(4, 6, device=device, requires_grad=True)
    before = leaf.detach().clone()
    with pytest.raises(RuntimeError, match=f"(?i){reason}"):
        compiled(leaf)
    assert torch.equal(leaf, before)


@one_of_each
def test_second_derivative_with_backend_eager(
    activation: ActivationCase, device: torch.device
) -> None:
    compiled = torch.compile(lambda x: used(activation.call, x), backend="eager", fullgraph=True)
    x = torch.randn(9, dtype=torch.float64, device=device, requires_grad=True)
    if activation.is_twice_differentiable:
        assert torch.autograd.gradgradcheck(compiled, x)
    else:
        with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
            torch.autograd.grad(compiled(x).sum(), x, create_graph=True)


@one_of_each
def test_compiled_autograd_matches_reference(
    activation: ActivationCase, device: torch.device
) -> None:
    leaf = torch.randn(5, 7, device=device, requires_grad=True)
    (expected,) = torch.autograd.grad(used(activation.reference, leaf).sum(), leaf)
    compiler = torch.compile(backend="aot_eager", fullgraph=True)
    y = used(activation.call, leaf)
    with torch._dynamo.compiled_autograd._enable(compiler):
        y.sum().backward()
    assert_gradient(activation, leaf.grad, expected, 2.0)


def tangent(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.func.jvp(f, (x,), (torch.ones_like(x),))[1]


def jacobian(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.func.jacfwd(f)(x)


def gradients_of_samples(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.func.vmap(torch.func.grad(lambda z: f(z).sum()))(x)


@pytest.mark.parametrize("activation", SOME[:2], ids=activation_id)
@pytest.mark.parametrize("transform", [tangent, jacobian, gradients_of_samples])
def test_compiled_transforms_match_reference(
    activation: ActivationCase, transform: Callable[..., Tensor], device: torch.device
) -> None:
    x = torch.randn(3, 4, device=device)
    compiled = torch.compile(
        lambda z: transform(lambda t: activation.call(t * 1.5), z), backend="aot_eager"
    )
    expected = transform(lambda t: activation.reference(t * 1.5), x)
    torch.testing.assert_close(compiled(x), expected)
