"""Test what only a GPU has: CUDA graphs, streams, several devices, synchronization, launches."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from _support.assertions import assert_gradient, assert_values
from _support.cases import ActivationCase, one_of_each
from _support.gpu import captured, free_earlier_tensors, no_synchronization, requested_bytes
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import inplace_ops
from inplace_ops.recompute.reasons import OTHER_STREAM

pytestmark = pytest.mark.parametrize("device", ["cuda"], indirect=True)


@one_of_each
def test_cuda_graph_of_forward_and_backward(
    activation: ActivationCase, device: torch.device
) -> None:
    static = torch.randn(3, 1001, device=device, requires_grad=True)

    def run() -> tuple[Tensor, Tensor]:
        y = activation.call(static * 2)
        return y, torch.autograd.grad(y, static, torch.ones_like(y))[0]

    graph, (y, gradient) = captured(run, warm_up=run)
    for _ in range(3):
        x = torch.randn_like(static)
        with torch.no_grad():
            static.copy_(x)
        graph.replay()
        leaf = x.detach().requires_grad_()
        expected = activation.reference(leaf * 2)
        assert_values(activation, y.detach(), expected.detach())
        (expected_gradient,) = torch.autograd.grad(expected.sum(), leaf)
        assert_gradient(activation, gradient, expected_gradient, 2.0)


@one_of_each
def test_kernels_run_on_the_current_stream(
    activation: ActivationCase, device: torch.device
) -> None:
    x = torch.randn(2**22, device=device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)  # kernels on another stream would run before x is copied
        leaf = x.clone().requires_grad_()
        y = activation.call(leaf * 1)
        (gradient,) = torch.autograd.grad(y.sum(), leaf)
    side.synchronize()
    leaf = x.clone().requires_grad_()
    expected = activation.reference(leaf)
    assert_values(activation, y.detach(), expected.detach())
    assert_gradient(activation, gradient, torch.autograd.grad(expected.sum(), leaf)[0], 1.0)


@one_of_each
def test_no_synchronization_and_few_allocations(
    activation: ActivationCase, device: torch.device
) -> None:
    leaf = torch.randn(2**20, device=device, requires_grad=True)
    y = leaf * 1
    grad = torch.ones_like(y)
    free_earlier_tensors(device)
    before = requested_bytes()
    with no_synchronization():
        activation.call(y)
    assert requested_bytes() - before == activation.packed_bits[torch.float32] * 2**20 // 8
    before = requested_bytes()
    with no_synchronization():
        gradient = torch.autograd.grad(y, leaf, grad)
    assert requested_bytes() - before <= gradient[0].nbytes


@one_of_each
@pytest.mark.parametrize(("elements", "launches"), [(1001, 1), (2**20, 1), (2**20 + 1, 2)])
def test_number_of_launches(
    activation: ActivationCase, elements: int, launches: int, device: torch.device
) -> None:
    x = torch.randn(elements, device=device)
    activation.call(x)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        activation.call(x)
        torch.cuda.synchronize()
    kernels = [event.name for event in profiler.events() if "run_warps" in event.name]
    assert len(kernels) == launches
    assert not [event.name for event in profiler.events() if "Memcpy" in event.name]


def network(activation: Callable[[], nn.Module]) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), activation(), nn.Conv2d(8, 8, 3)
    )


def test_cuda_graph_of_first_forward_saves_as_pytorch(device: torch.device) -> None:
    """The comparison at first use would synchronize: during capture PyTorch's tensors are saved."""
    original = network(nn.SiLU).to(device, torch.float64)
    static = torch.randn(2, 3, 32, 32, device=device, dtype=torch.float64)
    model = copy.deepcopy(original)
    inplace_ops.convert(model)

    def gradients_of(module: nn.Module) -> tuple[Tensor, ...]:
        return torch.autograd.grad(module(static).square().sum(), [*module.parameters()])

    graph, gradients = captured(lambda: gradients_of(model), warm_up=lambda: gradients_of(original))
    for _ in range(3):
        static.copy_(torch.randn_like(static))
        graph.replay()
        torch.testing.assert_close(gradients, gradients_of(original))


def test_consumers_on_several_streams(device: torch.device) -> None:
    """A tensor that is read on another stream than its producer's is saved as PyTorch saves it."""
    side = torch.cuda.Stream()
    used_on_side: list[Tensor] = []

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)
            self.late, self.early = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
            self.is_late = False

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            z = self.norm(self.first(x))
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                if self.is_late:
                    torch.cuda._sleep(50_000_000)
                    used_on_side.append(z)
                late = self.late(z)
            if not self.is_late:
                torch.cuda.current_stream().wait_stream(side)
            return late, self.early(z)

    original = Branches().to(device, torch.float64)
    x = torch.randn(2, 8, 16, 16, device=device, dtype=torch.float64)
    model = copy.deepcopy(original)
    report = inplace_ops.convert(model, x)
    assert ("late", OTHER_STREAM) in {(row.module, row.reason) for row in report.remaining}
    assert not report.replaced  # `early` reads the same memory
    weight = torch.rand_like(original.norm.weight)  # freed memory has results of the old weight
    gradients = []
    for module in (original, model):
        torch.cuda.synchronize()
        with torch.no_grad():
            module.norm.weight.copy_(weight)
        module.is_late = True
        late, early = module(x)
        early_gradient = torch.autograd.grad(early.square().sum(), module.early.weight)
        torch.cuda.synchronize()
        late_gradient = torch.autograd.grad(late.square().sum(), module.late.weight)
        gradients.append((early_gradient, late_gradient))
    torch.testing.assert_close(gradients[1], gradients[0])


@one_of_each
def test_kernels_run_on_the_device_of_the_tensor(
    activation: ActivationCase, device: torch.device
) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("fewer than two GPUs")
    leaf = torch.randn(1001, device="cuda:1", requires_grad=True)
    assert torch.cuda.current_device() == 0
    y = activation.call(leaf * 1)
    (gradient,) = torch.autograd.grad(y.sum(), leaf)
    assert torch.cuda.current_device() == 0
    expected = activation.reference(leaf)
    assert_values(activation, y.detach(), expected.detach())
    assert_gradient(activation, gradient, torch.autograd.grad(expected.sum(), leaf)[0], 1.0)
