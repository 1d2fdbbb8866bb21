"""First and second derivatives."""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from _support.assertions import Severed, assert_gradient, gradient, random_values
from _support.cases import (
    ACTIVATIONS,
    ONE_OF_EACH,
    ONE_OF_EACH_FUNCTION,
    SAVE_MODES,
    ActivationCase,
    activation_id,
    one_of_each,
)
from _support.layouts import VIEW_PROGRAMS
from _support.marks import quick, readable_id
from torch import Tensor
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import inplace_ops
from inplace_ops import _ops

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
        function, x, atol=max(1e-5, 4 * error), check_batched_grad=True, check_forward_ad=True
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


@pytest.mark.parametrize(
    "activation", [row for row in ACTIVATIONS if row.is_twice_differentiable], ids=activation_id
)
def test_second_derivative_matches_pytorch(
    activation: ActivationCase, device: torch.device
) -> None:
    leaf = random_values((500,), torch.float64, device).requires_grad_()
    g = torch.randn(500, dtype=torch.float64, device=device, requires_grad=True)
    results = []
    for call in (activation.call, activation.reference):
        y = call(leaf.clone())
        (first,) = torch.autograd.grad(y, leaf, g, create_graph=True)
        results.append(
            torch.autograd.grad((first * first.detach().sin()).sum(), (leaf, g), allow_unused=True)
        )
    for actual, expected in zip(*results, strict=True):
        if expected is None:  # PyTorch's gradient of ReLU does not depend on the leaf
            assert actual is None or not actual.any()
        else:
            actual = torch.zeros_like(expected) if actual is None else actual
            torch.testing.assert_close(actual, expected)


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
