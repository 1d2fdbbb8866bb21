"""What only a GPU has: graphs, streams, several devices; no synchronization, one launch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from activations import ONE_OF_EACH, Activation, activation_id
from comparison import assert_gradient, assert_values
from torch.profiler import ProfilerActivity, profile

pytestmark = pytest.mark.parametrize("device", ["cuda"], indirect=True)
one_of_each = pytest.mark.parametrize("activation", ONE_OF_EACH, ids=activation_id)


@pytest.fixture
def _no_synchronization(device: torch.device) -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@one_of_each
def test_a_graph_of_forward_and_backward(activation: Activation, device: torch.device) -> None:
    static = torch.randn(3, 1001, device=device, requires_grad=True)
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # warm up: modules load, the allocator's pool fills
        torch.autograd.grad(activation.call(static * 2).sum(), static)
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        y = activation.call(static * 2)
        (gradient,) = torch.autograd.grad(y, static, torch.ones_like(y))
    for _ in range(3):
        x = torch.randn_like(static)
        with torch.no_grad():
            static.copy_(x)
        graph.replay()
        leaf = x.detach().requires_grad_()
        expected = activation.reference(leaf * 2)
        assert_values(activation, y.detach(), expected.detach())
        (wanted,) = torch.autograd.grad(expected.sum(), leaf)
        assert_gradient(activation, gradient, wanted, 2.0)


@one_of_each
def test_the_current_stream(activation: Activation, device: torch.device) -> None:
    x = torch.randn(2**22, device=device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)  # work on another stream would overtake it
        leaf = x.clone().requires_grad_()
        y = activation.call(leaf * 1)
        (gradient,) = torch.autograd.grad(y.sum(), leaf)
    side.synchronize()
    leaf = x.clone().requires_grad_()
    expected = activation.reference(leaf)
    assert_values(activation, y.detach(), expected.detach())
    assert_gradient(activation, gradient, torch.autograd.grad(expected.sum(), leaf)[0], 1.0)


@one_of_each
@pytest.mark.usefixtures("_no_synchronization")
def test_nothing_waits_and_little_is_allocated(
    activation: Activation, device: torch.device
) -> None:
    leaf = torch.randn(2**20, device=device, requires_grad=True)
    y = leaf * 1
    before = torch.cuda.memory_allocated()
    activation.call(y)
    kept = torch.cuda.memory_allocated() - before
    assert kept <= 2**20 * 2  # packed bits, at most 16 an element in float32
    grad = torch.ones_like(y)
    before = torch.cuda.memory_allocated()
    gradient = torch.autograd.grad(y, leaf, grad)
    assert torch.cuda.memory_allocated() - before <= gradient[0].nbytes


@one_of_each
def test_one_launch(activation: Activation, device: torch.device) -> None:
    x = torch.randn(1001, device=device)
    activation.call(x)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        activation.call(x)
        torch.cuda.synchronize()
    kernels = [event.name for event in profiler.events() if "run_warps" in event.name]
    assert len(kernels) == 1
    assert not [event.name for event in profiler.events() if "Memcpy" in event.name]


@one_of_each
def test_a_device_that_is_not_the_current_one(activation: Activation, device: torch.device) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    leaf = torch.randn(1001, device="cuda:1", requires_grad=True)
    assert torch.cuda.current_device() == 0
    y = activation.call(leaf * 1)
    (gradient,) = torch.autograd.grad(y.sum(), leaf)
    assert torch.cuda.current_device() == 0
    expected = activation.reference(leaf)
    assert_values(activation, y.detach(), expected.detach())
    assert_gradient(activation, gradient, torch.autograd.grad(expected.sum(), leaf)[0], 1.0)
