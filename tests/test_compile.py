"""torch.compile: no graph break, the same gradients."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator

import pytest
import torch
from activations import ACTIVATIONS, ONE_OF_EACH, Activation, activation_id
from comparison import assert_gradient, assert_values
from torch import Tensor

# Dynamo's own, while it traces an autograd.Function and looks at a graph's inputs.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]

one_of_each = pytest.mark.parametrize("activation", ONE_OF_EACH, ids=activation_id)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def used(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    h = x * 2
    h = call(h)
    return h + 1


def discarded(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    h = x * 2
    call(h)
    return h + 1


def in_a_view(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    h = x * 2
    call(h[1:3])
    return h + 1


PROGRAMS = {"used": used, "discarded": discarded, "view": in_a_view}


def check(
    activation: Activation,
    program: Callable[..., Tensor],
    compiled: Callable[[Tensor], Tensor],
    shape: tuple[int, ...],
    device: torch.device,
) -> None:
    leaf = torch.randn(shape, device=device, requires_grad=True)
    actual = compiled(leaf)
    expected = program(lambda h: h.copy_(activation.reference(h.clone())), leaf)
    assert_values(activation, actual, expected)
    incoming = torch.rand_like(leaf) - 0.5
    (gradient,) = torch.autograd.grad(actual, leaf, incoming)
    (wanted,) = torch.autograd.grad(expected, leaf, incoming)
    assert_gradient(activation, gradient, wanted, 1.0)


@one_of_each
@pytest.mark.parametrize("program", PROGRAMS)
def test_full_graph(activation: Activation, program: str, device: torch.device) -> None:
    function = PROGRAMS[program]
    compiled = torch.compile(
        lambda x: function(activation.call, x), backend="aot_eager", fullgraph=True
    )
    check(activation, function, compiled, (5, 7), device)


@one_of_each
def test_dynamic_shapes(activation: Activation, device: torch.device) -> None:
    compiled = torch.compile(
        lambda x: used(activation.call, x), backend="aot_eager", fullgraph=True, dynamic=True
    )
    for shape in ((5, 7), (6, 7), (3, 11), (17, 64)):
        check(activation, used, compiled, shape, device)


@one_of_each
def test_without_grad(activation: Activation, device: torch.device) -> None:
    compiled = torch.compile(activation.call, backend="aot_eager", fullgraph=True)
    leaf = torch.randn(5, 7, device=device, requires_grad=True)
    for context in (torch.no_grad, torch.inference_mode):
        x = leaf.detach().clone()
        with context():
            compiled(x)
            assert_values(activation, x, activation.reference(leaf))


@one_of_each
def test_a_graph_input_is_modified(activation: Activation, device: torch.device) -> None:
    compiled = torch.compile(activation.call, backend="aot_eager", fullgraph=True)
    leaf = torch.randn(5, 7, device=device, requires_grad=True)
    x = leaf * 1
    y = compiled(x)
    expected = activation.reference(leaf)
    assert_values(activation, x, expected)
    incoming = torch.rand_like(leaf) - 0.5
    (actual,) = torch.autograd.grad(y, leaf, incoming)
    (wanted,) = torch.autograd.grad(expected, leaf, incoming)
    assert_gradient(activation, actual, wanted, 1.0)


@pytest.mark.parametrize(
    "activation",
    [row for row in ACTIVATIONS if row.name in ("relu-mask", "silu-output-default")],
    ids=activation_id,
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")  # Inductor's own imports
def test_inductor(activation: Activation, device: torch.device) -> None:
    if device.type == "cpu" and shutil.which("g++") is None:
        pytest.skip("Inductor needs g++ on the CPU")
    compiled = torch.compile(lambda x: used(activation.call, x), fullgraph=True)
    check(activation, used, compiled, (33, 65), device)


@one_of_each
def test_export(activation: Activation, device: torch.device) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return used(activation.call, x)

    x = torch.randn(5, 7, device=device)
    exported = torch.export.export(Model(), (x,)).module()
    expected = used(activation.reference, x)
    assert_values(activation, exported(x), expected)


def tangent(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.func.jvp(f, (x,), (torch.ones_like(x),))[1]


def jacobian(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.func.jacfwd(f)(x)


def gradients_of_samples(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.func.vmap(torch.func.grad(lambda z: f(z).sum()))(x)


@one_of_each
@pytest.mark.parametrize("transform", [tangent, jacobian, gradients_of_samples])
def test_transforms_inside(
    activation: Activation, transform: Callable[..., Tensor], device: torch.device
) -> None:
    x = torch.randn(3, 4, device=device)
    compiled = torch.compile(
        lambda z: transform(lambda t: activation.call(t * 1.5), z), backend="aot_eager"
    )
    expected = transform(lambda t: activation.reference(t * 1.5), x)
    torch.testing.assert_close(compiled(x), expected)
