"""Tensors saved for backward: hooks, the life of the graph, and memory."""

from __future__ import annotations

import contextlib
import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _support.allocations import out_of_memory_error
from _support.assertions import assert_gradient, assert_values, random_values
from _support.cases import ONE_OF_EACH_FUNCTION, ActivationCase, activation_id
from _support.layouts import VIEW_PROGRAMS
from _support.marks import readable_id
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

each_function = pytest.mark.parametrize("activation", ONE_OF_EACH_FUNCTION, ids=activation_id)


def numpy_hooks() -> saved_tensors_hooks:
    return saved_tensors_hooks(
        lambda t: (t.device, t.detach().cpu().numpy().copy()),
        lambda p: torch.tensor(p[1], device=p[0]),
    )


@each_function
@pytest.mark.parametrize("context", [numpy_hooks, save_on_cpu, torch.autograd.detect_anomaly])
@pytest.mark.parametrize("program", VIEW_PROGRAMS)
@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
def test_gradients_under_hooks_and_in_anomaly_mode(
    activation: ActivationCase, context: Callable[[], Any], program: str, device: torch.device
) -> None:
    leaf = torch.randn(4, 3, device=device, requires_grad=True)
    with context():
        y = VIEW_PROGRAMS[program](activation.call, leaf)
        (actual,) = torch.autograd.grad(y.sum(), leaf)
    expected = VIEW_PROGRAMS[program](activation.copied, leaf)
    (wanted,) = torch.autograd.grad(expected.sum(), leaf)
    assert_gradient(activation, actual, wanted, 1.0 + y.numel() * (program == "middle") * 1.5)


def saved_before(call: Callable[[Tensor], Tensor], leaf: Tensor) -> Tensor:
    return call(leaf.tanh())


def saved_before_in_part(call: Callable[[Tensor], Tensor], leaf: Tensor) -> Tensor:
    base = leaf.tanh()
    call(base[1:3])
    return base


def written_after(call: Callable[[Tensor], Tensor], leaf: Tensor) -> Tensor:
    return call(leaf.clone()).mul_(2)


def written_without_grad(call: Callable[[Tensor], Tensor], leaf: Tensor) -> Tensor:
    x = leaf.tanh()
    y = x * 1.5
    with torch.no_grad():
        call(x)
    return y + x


def in_a_row(call: Callable[[Tensor], Tensor], leaf: Tensor) -> Tensor:
    return call(call(leaf.clone()).add_(-0.5)).sigmoid()


MUTATIONS = (saved_before, saved_before_in_part, written_after, written_without_grad, in_a_row)


@each_function
@pytest.mark.parametrize("program", MUTATIONS, ids=lambda program: program.__name__)
def test_gradients_under_allow_mutation_on_saved_tensors(
    activation: ActivationCase, program: Callable[..., Tensor], device: torch.device
) -> None:
    leaf = random_values((4, 30), torch.float32, device).requires_grad_()
    results = []
    for call in (activation.call, activation.torch_inplace):
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            y = program(call, leaf)
            (grad,) = torch.autograd.grad(y, leaf, torch.full_like(y, 0.5))
        results.append((y.detach(), grad))
    (actual, actual_grad), (expected, expected_grad) = results
    assert_values(activation, actual, expected)
    assert_gradient(activation, actual_grad, expected_grad, 1.0)


def wait_until(condition: Callable[[], bool], seconds: float = 1.0) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)


class Token:
    """An object that weak references can refer to."""


class Probe(torch.autograd.Function):
    """An identity before the activation: its node refers to a token while the graph is alive."""

    @staticmethod
    def forward(ctx, x, token):
        ctx.token = token
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


@each_function
@pytest.mark.parametrize("program", VIEW_PROGRAMS)
@pytest.mark.parametrize("backward", ["none", "once", "retain_graph", "create_graph"])
def test_graph_is_freed_without_the_garbage_collector(
    activation: ActivationCase, program: str, backward: str, device: torch.device
) -> None:
    if backward == "create_graph" and not activation.is_twice_differentiable:
        return  # raises, see test_save_derivative_rejects_second_derivative
    leaf = torch.randn(4, 3, device=device, requires_grad=True)

    def run() -> weakref.ref[Token]:
        token = Token()
        y = VIEW_PROGRAMS[program](activation.call, Probe.apply(leaf, token))
        if backward != "none":
            create, retain = backward == "create_graph", backward != "once"
            torch.autograd.grad(y.sum(), leaf, retain_graph=retain, create_graph=create)
        return weakref.ref(token)

    gc.disable()
    try:
        token = run()
        if device.type == "cuda":  # its backward thread frees the graph after grad has returned
            wait_until(lambda: token() is None)
        assert token() is None
    finally:
        gc.enable()


class Recorder(TorchDispatchMode):
    """Records the names of the ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


WITHOUT_GRAD = {
    "no_requires_grad": (contextlib.nullcontext, False),
    "no_grad": (torch.no_grad, True),
    "inference_mode": (torch.inference_mode, True),
}


@each_function
@pytest.mark.parametrize("mode", WITHOUT_GRAD)
def test_forward_without_grad_allocates_nothing(
    activation: ActivationCase, mode: str, device: torch.device
) -> None:
    context, requires_grad = WITHOUT_GRAD[mode]
    x = torch.randn(1000, 100, device=device, requires_grad=requires_grad) * 1
    node = x.grad_fn
    with context(), Recorder() as recorder:
        activation.call(x)
    assert len(recorder.ops) == 1
    assert recorder.ops[0].startswith("inplace_ops.")
    assert x.grad_fn is node
    with context():
        assert allocated_bytes(lambda: activation.call(x), device) == 0


@each_function
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=readable_id)
def test_forward_allocates_only_packed_bits(
    activation: ActivationCase, dtype: torch.dtype, device: torch.device
) -> None:
    x = torch.randn(1003, 100, dtype=dtype, device=device, requires_grad=True) * 1
    groups = (x.numel() + 7) // 8
    packed = activation.packed_bits[dtype] * groups
    assert allocated_bytes(lambda: activation.call(x), device) == packed


def allocated_bytes(function: Callable[[], object], device: torch.device) -> int:
    """Return the bytes requested while function runs: allocators may round requests up."""
    if device.type == "cuda":
        before = torch.cuda.memory_stats()["requested_bytes.all.allocated"]
        function()
        return torch.cuda.memory_stats()["requested_bytes.all.allocated"] - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        function()
    events = profile.profiler.kineto_results.events()
    return sum(max(event.nbytes(), 0) for event in events if event.name() == "[memory]")


def test_allocated_bytes_counts_an_allocation(device: torch.device) -> None:
    assert allocated_bytes(lambda: torch.empty(1003, 100, device=device), device) == 401_200


@each_function
@pytest.mark.parametrize("create_graph", [False, True])
def test_out_of_memory_in_backward_raises_pytorchs_error(
    activation: ActivationCase, create_graph: bool, device: torch.device
) -> None:
    if create_graph and not activation.is_twice_differentiable:
        return
    leaf = torch.ones(2**24, device=device, requires_grad=True)
    incoming = torch.ones((), device=device).expand(2**24)
    y = activation.call(leaf.clone())
    # No other memory may be freed under the limit. A GPU's backward thread frees its last graph
    # only when it runs again, so let it run now.
    small = torch.ones((), device=device, requires_grad=True)
    torch.autograd.grad(small * 1, small)
    gc.collect()
    with out_of_memory_error(device):
        torch.autograd.grad(y, leaf, incoming, create_graph=create_graph)
    torch.autograd.grad(y, leaf, incoming)  # the graph is unchanged
