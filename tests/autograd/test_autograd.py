"""Activations under autograd: derivatives, saved tensors, versions, hooks, rejected calls."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import re
import sys
import time
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from _support.allocations import out_of_memory_error
from _support.assertions import (
    Severed,
    ViewFunction,
    assert_gradient,
    assert_identical,
    assert_values,
    gradient,
    random_values,
    wording,
)
from _support.cases import (
    ACTIVATIONS,
    GRAD_MODES,
    ONE_OF_EACH,
    ONE_OF_EACH_FUNCTION,
    SAVE_MODES,
    ActivationCase,
    activation_id,
    call_id,
    one_of_each,
)
from _support.hooks import Hooks
from _support.layouts import VIEW_PROGRAMS
from _support.marks import quick, readable_id
from _support.twins import OpCounter
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import inplace_ops
from inplace_ops import _ops

# Derivatives.


each_function = pytest.mark.parametrize("activation", ONE_OF_EACH_FUNCTION, ids=activation_id)


def away_from_zero(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return float64 values away from the kink at 0, where finite differences are wrong."""
    sign = torch.where(torch.rand(shape, device=device) < 0.5, -1.0, 1.0)
    return ((0.1 + 3 * torch.rand(shape, device=device)) * sign).double().requires_grad_()


@each_function
def test_backward_passes_on_forward_mode_tangents(
    activation: ActivationCase, device: torch.device
) -> None:
    """Backward is linear: its tangent is backward of the incoming gradient's tangent."""
    leaf = torch.randn(9, dtype=torch.float64, device=device, requires_grad=True)
    incoming, tangent = (torch.rand(9, dtype=torch.float64, device=device) for _ in range(2))
    y = activation.call(leaf.clone())
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(incoming, tangent)
        (actual,) = map(forward_ad.unpack_dual, torch.autograd.grad(y, leaf, dual))
        assert_gradient(
            activation, actual.primal, gradient(activation.reference, leaf, incoming), 1.0
        )
        assert_gradient(
            activation, actual.tangent, gradient(activation.reference, leaf, tangent), 1.0
        )


@pytest.mark.parametrize(
    ("activation", "program"),
    quick(
        itertools.product(ONE_OF_EACH, VIEW_PROGRAMS),
        [*((row, "whole") for row in ONE_OF_EACH), *itertools.product(SAVE_MODES, VIEW_PROGRAMS)],
    ),
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_gradcheck(activation: ActivationCase, program: str, device: torch.device) -> None:
    x = away_from_zero((4, 3), device)

    def function(value: Tensor) -> Tensor:
        return VIEW_PROGRAMS[program](activation.call, value)

    error = activation.derivative_error.get(torch.float64, 0.0)
    assert torch.autograd.gradcheck(
        function,
        x,
        atol=max(1e-5, 4 * error),
        check_batched_grad=True,
        check_forward_ad=True,
        check_batched_forward_grad=True,
    )
    if activation.is_twice_differentiable:
        assert torch.autograd.gradgradcheck(function, x, check_batched_grad=True)


@one_of_each
def test_batched_gradients_raise_with_create_graph(
    activation: ActivationCase, device: torch.device
) -> None:
    """Batched gradients are right; with create_graph=True the call raises.

    PyTorch's batched tensors lose the graph of a Function's backward, and with it the second
    derivative.
    """
    leaf = away_from_zero((3,), device)
    y = activation.call(leaf * 1)
    rows = torch.eye(3, dtype=y.dtype, device=device)
    (jacobian,) = torch.autograd.grad(y, leaf, rows, is_grads_batched=True, retain_graph=True)
    x = leaf.detach().requires_grad_()
    expected = torch.autograd.functional.jacobian(activation.reference, x)
    error = max(activation.derivative_error.get(torch.float64, 0.0), 1e-7)
    torch.testing.assert_close(jacobian, expected, rtol=error, atol=error)
    message = r"is_grads_batched=True .* loses the second derivative|cannot be differentiated twice"
    with pytest.raises(RuntimeError, match=message):
        torch.autograd.grad(y, leaf, rows, is_grads_batched=True, create_graph=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=readable_id)
def test_second_derivative_at_hardswish_minimum(dtype: torch.dtype, device: torch.device) -> None:
    x = torch.full((9,), -1.5, dtype=dtype, device=device, requires_grad=True)
    (first,) = torch.autograd.grad(inplace_ops.hardswish_(x * 1).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, torch.full_like(x, 1 / 3))


@pytest.mark.parametrize("save", ["output", "derivative"])
def test_hardswish_backward_propagates_nan(save: str, device: torch.device) -> None:
    x = torch.linspace(-2.99, 4, 10_001, device=device, requires_grad=True)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        y = inplace_ops.hardswish_(x.to(dtype) * 1, save=save)
        (gradient,) = torch.autograd.grad(y, x, torch.full_like(y, torch.nan))
        assert gradient[x > -2.98].isnan().all()


@pytest.mark.parametrize("program", VIEW_PROGRAMS)
@pytest.mark.parametrize("bits", [1, 8])
def test_gradgradcheck_at_silu_minimum(program: str, bits: int, device: torch.device) -> None:
    x = -1.2784645427610738 + torch.randn(4, 3, dtype=torch.float64, device=device) * 1e-2

    def function(value: Tensor) -> Tensor:
        return VIEW_PROGRAMS[program](lambda v: inplace_ops.silu_(v, bits=bits), value)

    assert torch.autograd.gradgradcheck(function, x.requires_grad_())


def in_another_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as other:
        return other.submit(function).result()


def second_derivative_in_another_thread(
    call: Callable[[Tensor], Tensor], x: Tensor, meanwhile: Callable[[Tensor], None]
) -> Tensor:
    """Differentiate a slice twice from another thread, as PyTorch does on a GPU.

    The nodes that the other thread creates have smaller sequence numbers than the nodes of forward,
    so that autograd runs them in another order.
    """
    for _ in range(100):
        x * 1  # increases the sequence numbers of this thread's later nodes
    base = x * 1.5
    y = call(base[:, 1])
    value = base.sin().sum() + y.sum()
    (first,) = in_another_thread(lambda: torch.autograd.grad(value, x, create_graph=True))
    meanwhile(y)
    return in_another_thread(lambda: torch.autograd.grad(first.square().sum(), x))[0]


TWICE_DIFFERENTIABLE = [row for row in ONE_OF_EACH_FUNCTION if row.is_twice_differentiable]


SAVING_OUTPUTS = [row for row in ONE_OF_EACH_FUNCTION if row.saves_output]


@pytest.mark.parametrize("activation", TWICE_DIFFERENTIABLE, ids=activation_id)
def test_second_derivative_of_slice_in_another_thread(
    activation: ActivationCase, device: torch.device
) -> None:
    x = random_values((7, 3), torch.float64, device).requires_grad_()
    results = [
        second_derivative_in_another_thread(call, x, lambda y: None)
        for call in (activation.call, activation.copied)
    ]
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("is_other_thread", [False, True], ids=["same_thread", "other_thread"])
@pytest.mark.parametrize("activation", SAVING_OUTPUTS, ids=activation_id)
def test_slice_is_freed_after_second_derivative(
    activation: ActivationCase, is_other_thread: bool, device: torch.device
) -> None:
    """The slice's storage is freed while the loss is alive, as a logged gradient penalty is."""
    x = random_values((7, 3), torch.float64, device).requires_grad_()
    for _ in range(100):
        x * 1  # increases the sequence numbers of this thread's later nodes
    base = x * 1.5
    storage = StorageWeakRef(base.untyped_storage())
    y = activation.call(base[:, 1])
    value = base.sin().sum() + y.sum()
    del base, y
    run = in_another_thread if is_other_thread else lambda function: function()
    loss = value + run(lambda: torch.autograd.grad(value, x, create_graph=True))[0].square().sum()
    run(loss.backward)
    gc.collect()  # objects of the other thread
    assert storage.expired()


@pytest.mark.parametrize("activation", SAVING_OUTPUTS, ids=activation_id)
def test_write_to_slice_before_second_derivative_raises(
    activation: ActivationCase, device: torch.device
) -> None:
    x = random_values((7, 3), torch.float64, device).requires_grad_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second_derivative_in_another_thread(activation.call, x, lambda y: y.detach().zero_())


@pytest.mark.parametrize(
    "activation", [row for row in ACTIVATIONS if not row.is_twice_differentiable], ids=activation_id
)
def test_save_derivative_rejects_second_derivative(
    activation: ActivationCase, device: torch.device
) -> None:
    leaf = torch.randn(50, dtype=torch.float64, device=device, requires_grad=True)
    y = activation.call(leaf.clone())
    for loss in (y.square().sum(), y.sum()):  # with and without a graph of the incoming gradient
        with pytest.raises(RuntimeError, match=r'save="derivative".*save="output"'):
            torch.autograd.grad(loss, leaf, create_graph=True)
        torch.autograd.grad(loss, leaf, retain_graph=True)


@pytest.mark.parametrize(
    "call", [inplace_ops.relu_, inplace_ops.leaky_relu_], ids=lambda call: call.__name__
)
def test_second_derivative_is_zero_or_none(
    call: Callable[..., Tensor], device: torch.device
) -> None:
    leaf = torch.randn(50, device=device, requires_grad=True)
    weight = torch.randn(50, device=device, requires_grad=True)

    def second_derivative(save: str) -> Tensor | None:
        first = torch.autograd.grad(
            (call(leaf * 1, save=save) * weight).sum(), leaf, create_graph=True
        )
        return torch.autograd.grad(first[0].sum(), leaf, allow_unused=True)[0]

    assert torch.equal(second_derivative("output"), torch.zeros_like(leaf))
    assert second_derivative("mask") is None


@pytest.mark.parametrize(
    "loss_of", [torch.sum, lambda y: y.square().sum()], ids=["linear", "square"]
)
def test_third_derivative_of_silu_raises(
    loss_of: Callable[[Tensor], Tensor], device: torch.device
) -> None:
    leaf = torch.randn(50, dtype=torch.float64, device=device, requires_grad=True)
    first, second = [], []
    for silu in (inplace_ops.silu_, F.silu):
        (gradient,) = torch.autograd.grad(loss_of(silu(leaf * 1.5)), leaf, create_graph=True)
        first.append(gradient)
        second += torch.autograd.grad(gradient.sum(), leaf, create_graph=True)
    torch.testing.assert_close(first[0], first[1], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(second[0], second[1], rtol=1e-6, atol=1e-6)
    with pytest.raises(RuntimeError, match="not a third time"):
        torch.autograd.grad(second[0].sum(), leaf)


@each_function
def test_undefined_gradient_stays_none(activation: ActivationCase, device: torch.device) -> None:
    """The leaf's gradient is None: an optimizer skips None, but applies weight decay to zeros."""
    leaf = torch.randn(4, 3, device=device, requires_grad=True)
    Severed.apply(activation.call(leaf.clone())).sum().backward()
    assert leaf.grad is None


@pytest.mark.parametrize("program", ["whole", "rows"])
def test_work_is_linear_in_depth(program: str, device: torch.device) -> None:
    """Count executed lines of Python, as seconds depend on the load of the machine."""

    def lines(depth: int) -> int:
        count = 0

        def trace(frame: object, event: str, argument: object) -> Callable[..., object]:
            nonlocal count
            count += event == "line"
            return trace

        x = torch.randn(64, 8, device=device, requires_grad=True) * 1
        previous = sys.gettrace()
        sys.settrace(trace)
        try:
            for i in range(depth):
                inplace_ops.relu_(x if program == "whole" else x[i % 64])
            x.sum().backward()
        finally:
            sys.settrace(previous)
        return count

    lines(1)  # one-time work
    assert lines(1) < lines(400) < 4.1 * lines(100)  # 16 if quadratic in depth


class Strides(TorchDispatchMode):
    """Records the strides of the incoming gradients that this package's backward ops receive."""

    def __init__(self) -> None:
        super().__init__()
        self.of_gradients: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ops.BACKWARD_OPS:
            self.of_gradients.append(args[0].stride())
        return func(*args, **(kwargs or {}))


@each_function
def test_gradient_of_other_memory_format_is_copied(
    activation: ActivationCase, device: torch.device
) -> None:
    """Backward copies a channels_last gradient of a contiguous input to the input's strides.

    A gradient of the input's dimension order is not copied, even if it is strided.
    """
    x = torch.randn(2, 3, 5, 4, device=device, dtype=torch.float64, requires_grad=True)
    grad = torch.randn_like(x).to(memory_format=torch.channels_last)
    sliced = torch.randn(2, 6, 5, 4, device=device, dtype=torch.float64)[:, ::2]
    for gradient_of_output, expected in ((grad, x.stride()), (sliced, sliced.stride())):
        y = activation.call(x.clone())
        with torch.autograd.set_multithreading_enabled(False), Strides() as strides:
            (actual,) = torch.autograd.grad(y, x, gradient_of_output)
        assert strides.of_gradients == [expected]
        (wanted,) = torch.autograd.grad(activation.reference(x), x, gradient_of_output)
        assert_gradient(activation, actual, wanted, gradient_of_output.abs())
    grads = torch.randn(3, 2, 5, 4, 3, device=device, dtype=torch.float64)
    batched, expected = [
        torch.autograd.grad(f(x.clone()).permute(0, 2, 3, 1), x, grads, is_grads_batched=True)[0]
        for f in (activation.call, activation.reference)
    ]
    assert_gradient(activation, batched, expected, grads.permute(0, 1, 4, 2, 3).abs())


# Saved tensors.


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
    with context(), OpCounter() as counter:
        activation.call(x)
    ((name, calls),) = counter.ops.items()
    assert name.startswith("inplace_ops::")
    assert calls == 1
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


# Versions.


@each_function
@pytest.mark.parametrize("mode", GRAD_MODES)
@pytest.mark.parametrize("requires_grad", [True, False])
def test_version_increases_by_one(
    activation: ActivationCase, mode: str, requires_grad: bool, device: torch.device
) -> None:
    base = torch.randn(4, 6, device=device, requires_grad=requires_grad) * 1
    views = {"whole": base, "slice": base[1:3], "transpose": base.t(), "one": base[2, 3]}
    for name, x in views.items():
        before = base._version
        with GRAD_MODES[mode]():
            assert activation.call(x) is x
        assert x._version == base._version == before + 1, name
    empty = torch.randn(0, 3, device=device, requires_grad=requires_grad) * 1
    with GRAD_MODES[mode]():
        activation.call(empty)
    assert empty._version == 1


WRITES: dict[str, Callable[[Tensor], object]] = {
    "add": lambda y: y.add_(torch.arange(y.numel(), dtype=y.dtype, device=y.device)),
    "mul": lambda y: y.mul_(3),
    "zero": lambda y: y.zero_(),
    "slice": lambda y: y[2:5].mul_(2),
    "relu": lambda y: torch.relu_(y),
}


@each_function
@pytest.mark.parametrize("write", WRITES)
def test_later_write_raises_if_output_is_saved(
    activation: ActivationCase, write: str, device: torch.device
) -> None:
    leaf = torch.randn(11, device=device, requires_grad=True)
    y = activation.call(leaf.clone())
    WRITES[write](y)
    if not activation.allows_later_writes:
        hint = 'save="derivative"' if not activation.entry.is_piecewise_linear else ""
        with pytest.raises(RuntimeError, match=f"modified by an inplace operation.*{hint}"):
            y.sum().backward()
        return
    y.sum().backward()
    reference = leaf.detach().clone().requires_grad_()
    expected = activation.reference(reference).clone()
    WRITES[write](expected)
    expected.sum().backward()
    assert_values(activation, y, expected)
    assert_gradient(activation, leaf.grad, reference.grad, 3.0)


@each_function
def test_writes_through_other_tensors_raise_if_output_is_saved(
    activation: ActivationCase, device: torch.device
) -> None:
    """A view's base and a detached tensor share the memory; a clone from before does not."""
    leaf = torch.randn(11, device=device, requires_grad=True)
    base = leaf.clone()
    y = activation.call(base[2:])
    cloned, detached = y.clone(), y.detach()
    assert detached._version == y._version == 1
    assert_values(activation, detached, activation.reference(leaf.detach()[2:]))
    expected = gradient(activation.reference, leaf.detach()[2:])
    (of_clone,) = torch.autograd.grad(cloned.sum(), leaf, retain_graph=True)
    assert_gradient(activation, of_clone[2:], expected, 1.0)
    for write in (detached.mul_, base.mul_):
        write(2)
        factor = 1.0 if write == detached.mul_ else 2.0  # autograd does not see the first one
        if activation.allows_later_writes:
            (actual,) = torch.autograd.grad(y.sum(), leaf, retain_graph=True)
            assert_gradient(activation, actual[2:], factor * expected, factor)
            assert not actual[:2].any()
        else:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.grad(y.sum(), leaf, retain_graph=True)


# Hooks.


C = 6


def instance_norm(x: Tensor) -> Tensor:
    return F.instance_norm(x)


def alias(x: Tensor) -> Tensor:
    return (x * 2).view(x.shape)


def half(x: Tensor) -> Tensor:
    return (x * 2)[:, : C // 2]


IN_PLACE_FUNCTIONS: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor], Tensor]]] = {
    "relu": (inplace_ops.relu_, torch.relu_),
    "leaky_relu": (
        lambda x: inplace_ops.leaky_relu_(x, 0.1),
        lambda x: F.leaky_relu_(x, 0.1),
    ),
    "silu": (inplace_ops.silu_, lambda x: F.silu(x, inplace=True)),
}


@pytest.mark.parametrize("function", IN_PLACE_FUNCTIONS)
@pytest.mark.parametrize(
    "view_of", [instance_norm, alias, half], ids=["instance norm", "alias", "half"]
)
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
def test_hooks_on_a_view_that_a_function_overwrites(
    function: str,
    view_of: Callable[[Tensor], Tensor],
    grad: bool,
) -> None:
    """A hook on the view sees the gradient that it sees after PyTorch's function.

    Without grad PyTorch's own function leaves the view as it was, and a hook on it crashes, unless
    its `grad_fn` is read before: here the reference reads it.
    """
    ours, theirs = IN_PLACE_FUNCTIONS[function]
    x = torch.randn(2, 3, 8, 8).mul(3).requires_grad_()
    x_of, hooks = [], []
    for run in (ours, theirs):
        view = view_of(torch.cat([x, x], 1))
        hooks.append(Hooks())
        with torch.set_grad_enabled(grad):
            result = run(view)
        assert result is view
        if run is theirs:
            assert result.grad_fn is not None
        hooks[-1].on(result, "first", 3.0)
        hooks[-1].on(result, "second", 0.5)
        if grad:
            hooks[-1].retain(result)
        x_of.append(torch.autograd.grad(result.square().sum(), x)[0])
    hooks[0].assert_saw(hooks[1])
    torch.testing.assert_close(x_of[0], x_of[1], rtol=1e-4, atol=1e-4)


# Rejected calls.


def hooked_module_output(x: Tensor) -> Tensor:
    module = nn.Identity()
    module.register_full_backward_hook(lambda module, inputs, outputs: None)
    return module(x)


def view_made_without_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x[1:]


def inference_tensor(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.detach().clone()


# By name: a function from a leaf that requires grad to a tensor that PyTorch's in-place
# operations reject.
REJECTED: dict[str, Callable[[Tensor], Tensor]] = {
    "leaf": lambda leaf: leaf,
    "view_of_leaf": lambda leaf: leaf[1:],
    "transpose_of_leaf": lambda leaf: leaf.t(),
    "no_grad_view": lambda leaf: view_made_without_grad(leaf * 1),
    "split": lambda leaf: (leaf * 1).split(2)[1],
    "chunk": lambda leaf: (leaf * 1).chunk(2)[0],
    "unbind": lambda leaf: (leaf * 1).unbind()[2],
    "view_of_split": lambda leaf: (leaf * 1).split(2)[1][:, 1:],
    "function_view": lambda leaf: ViewFunction.apply(leaf * 1),
    "hooked_module": lambda leaf: hooked_module_output(leaf * 1),
    "expanded": lambda leaf: (leaf * 1)[:1].expand(5, 3),
    "expanded_without_grad": lambda leaf: leaf.detach().clone()[:, :1].expand(4, 7),
    "inference_tensor": inference_tensor,
}


@each_function
@pytest.mark.parametrize("case", REJECTED)
def test_rejects_what_pytorch_rejects(
    activation: ActivationCase, case: str, device: torch.device
) -> None:
    leaf = torch.randn(4, 3, device=device, requires_grad=True)
    with pytest.raises(RuntimeError) as pytorchs:
        # relu_'s error: leaky_relu_ with a negative slope and silu_ raise the same messages.
        torch.relu_(REJECTED[case](leaf.detach().clone().requires_grad_()))

    x = REJECTED[case](leaf)
    before = x.detach().clone()
    version = None if x.is_inference() else x._version
    with pytest.raises(RuntimeError) as ours:
        activation.call(x)

    assert type(ours.value) is type(pytorchs.value)
    assert wording(pytorchs.value) in wording(ours.value)
    assert_identical(x, before, "modified although rejected:")
    assert x.is_inference() or x._version == version


@each_function
def test_rejects_exactly_the_layouts_that_overlap(
    activation: ActivationCase, device: torch.device
) -> None:
    """Some layouts interleave dimensions without overlap, as sizes (3, 2) with strides (2, 3)."""
    # The message begins with the function, not with a file of this package.
    message = (
        rf"^{activation.function}_: unsupported operation: more than one element of the written"
    )
    leaf = torch.arange(-20.0, 20.0, device=device).requires_grad_()
    interleaved = 0
    for dims in (2, 3):
        for size in itertools.product((2, 3), repeat=dims):
            for stride in itertools.product(range(7), repeat=dims):
                base = leaf.clone()
                x = base.as_strided(size, stride)
                if leaf.detach().as_strided(size, stride).unique().numel() < x.numel():
                    with pytest.raises(RuntimeError, match=message):
                        activation.call(x)
                    assert_identical(base, leaf)
                    assert base._version == 0
                    continue
                expected = activation.reference(leaf.detach().as_strided(size, stride))
                assert_values(activation, activation.call(x).detach(), expected)
                ordered = sorted(zip(stride, size, strict=True))
                reach = itertools.accumulate(s * (n - 1) for s, n in ordered)
                interleaved += any(s <= r for (s, _), r in zip(ordered[1:], reach, strict=False))
    assert interleaved > 0


def quantized(leaf: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, but not removed yet
        return torch.quantize_per_tensor(leaf.detach(), 0.1, 0, torch.qint8)


# By name: a function from a leaf that requires grad, and what the error names.
UNSUPPORTED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "complex64": (lambda leaf: leaf.to(torch.complex64), "complex64|ComplexFloat"),
    "complex128": (lambda leaf: leaf.detach().to(torch.complex128), "complex128|ComplexDouble"),
    "bool": (lambda leaf: leaf > 0.5, "bool"),
    "float8_e4m3fn": (lambda leaf: leaf.to(torch.float8_e4m3fn), "float8_e4m3fn"),
    "qint8": (quantized, "neither nested nor quantized"),
    "nested": (
        lambda leaf: torch.nested.as_nested_tensor([leaf.detach()[0], leaf.detach()[0, 1:]]),
        "neither nested nor quantized",
    ),
    "sparse_coo": (lambda leaf: leaf.detach().to_sparse(), "sparse"),
}


@each_function
@pytest.mark.parametrize("case", UNSUPPORTED)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_unsupported_tensors_raise_unmodified(
    activation: ActivationCase, case: str, device: torch.device
) -> None:
    make, named = UNSUPPORTED[case]
    x = make(torch.randn(4, 3, device=device, requires_grad=True))

    def bytes_of(t: Tensor) -> bytes:
        values = t.coalesce().values() if t.layout == torch.sparse_coo else t
        return bytes(values.detach().cpu().untyped_storage())

    before, version = bytes_of(x), x._version
    op = activation.entry.function
    with pytest.raises((RuntimeError, TypeError), match=rf"\b{op}.*support") as error:
        activation.call(x)
    assert re.search(named, str(error.value), re.IGNORECASE)
    assert bytes_of(x) == before
    assert x._version == version


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=readable_id
)
def test_smooth_activations_and_leaky_relu_reject_integers(
    dtype: torch.dtype, device: torch.device
) -> None:
    x = torch.arange(6, dtype=dtype, device=device)
    calls = [a.call for a in ONE_OF_EACH if not a.entry.takes_integers]
    assert len(calls) > 5
    for call in calls:
        with pytest.raises(RuntimeError, match=f"unsupported dtype {dtype}; ") as raised:
            call(x)
        assert str(raised.value).endswith("float64, float32, float16, bfloat16")
        assert "csrc" not in str(raised.value)
    assert torch.equal(x, torch.arange(6, dtype=dtype, device=device))
    assert x._version == 0


@pytest.mark.parametrize("wrong", [None, 1.5, [1.0], np.zeros(3)], ids=repr)
@each_function
def test_non_tensor_raises_type_error(activation: ActivationCase, wrong: object) -> None:
    with pytest.raises(TypeError, match=r"torch\.Tensor"):
        activation.call(wrong)


WRONG_ARGUMENTS: list[tuple[Callable[..., Tensor], dict[str, object], str]] = [
    (inplace_ops.relu_, {"save": "input"}, "save must be"),
    (inplace_ops.relu_, {"save": None}, "save must be"),
    (inplace_ops.leaky_relu_, {"save": "derivative"}, "save must be"),
    (inplace_ops.leaky_relu_, {"negative_slope": -0.1, "save": "output"}, "negative_slope >= 0"),
    (
        inplace_ops.leaky_relu_,
        {"negative_slope": math.nan, "save": "output"},
        "negative_slope >= 0",
    ),
    *(
        (inplace_ops.leaky_relu_, {"negative_slope": slope}, "negative_slope must be a real number")
        for slope in ("0.1", None, 1j)
    ),
    (inplace_ops.gelu_, {"approximate": "erf"}, 'approximate must be "none" or "tanh"'),
    (inplace_ops.silu_, {"save": "mask"}, "save must be"),
    *(
        (inplace_ops.silu_, {"bits": bits}, "bits must be")
        for bits in (0, 2, 5, 7, 9, -1, True, 2.5, "5")
    ),
    *(
        (inplace_ops.silu_, {"save": "derivative", "bits": bits}, "bits must be")
        for bits in (0, 1, 7, 64)
    ),
]


@pytest.mark.parametrize(
    ("call", "arguments", "message"),
    WRONG_ARGUMENTS,
    ids=[call_id(call, arguments) for call, arguments, _ in WRONG_ARGUMENTS],
)
def test_wrong_arguments_raise(
    call: Callable[..., Tensor], arguments: dict[str, object], message: str, device: torch.device
) -> None:
    x = torch.randn(5, device=device)
    before = x.clone()
    with pytest.raises((TypeError, ValueError), match=message):
        call(x, **arguments)
    assert_identical(x, before)
    assert x._version == 0
