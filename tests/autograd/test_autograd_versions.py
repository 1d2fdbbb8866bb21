"""Version counters: which tensors count as modified, and when backward then raises."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from _support.assertions import assert_gradient, assert_identical, assert_values, gradient
from _support.cases import ONE_OF_EACH_FUNCTION, ActivationCase, activation_id
from torch import Tensor

each_function = pytest.mark.parametrize("activation", ONE_OF_EACH_FUNCTION, ids=activation_id)

MODES = {
    "grad": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


@each_function
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("requires_grad", [True, False])
def test_version_increases_by_one(
    activation: ActivationCase, mode: str, requires_grad: bool, device: torch.device
) -> None:
    base = torch.randn(4, 6, device=device, requires_grad=requires_grad) * 1
    views = {"whole": base, "slice": base[1:3], "transpose": base.t(), "one": base[2, 3]}
    for name, x in views.items():
        before = base._version
        with MODES[mode]():
            assert activation.call(x) is x
        assert x._version == base._version == before + 1, name
    empty = torch.randn(0, 3, device=device, requires_grad=requires_grad) * 1
    with MODES[mode]():
        activation.call(empty)
    assert empty._version == 1


@each_function
def test_inference_tensor_is_modified_in_inference_mode(
    activation: ActivationCase, device: torch.device
) -> None:
    with torch.inference_mode():
        x = torch.randn(20, device=device)
        expected = activation.reference(x)
        assert activation.call(x) is x
        assert_values(activation, x, expected)


@each_function
@pytest.mark.parametrize("earlier", [torch.exp, torch.sigmoid, torch.tanh])
def test_backward_raises_if_earlier_op_saved_the_input(
    activation: ActivationCase, earlier: Callable[[Tensor], Tensor], device: torch.device
) -> None:
    leaf = torch.randn(9, device=device, requires_grad=True)
    y = activation.call(earlier(leaf))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


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
def test_later_write_through_base_raises_if_output_is_saved(
    activation: ActivationCase, device: torch.device
) -> None:
    leaf = torch.randn(11, device=device, requires_grad=True)
    base = leaf.clone()
    y = activation.call(base[2:])
    base.mul_(2)
    if not activation.allows_later_writes:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            base.sum().backward()
        return
    y.sum().backward()
    expected = 2 * gradient(activation.reference, leaf.detach()[2:])
    assert_gradient(activation, leaf.grad[2:], expected, 2.0)
    assert not leaf.grad[:2].any()


@each_function
def test_detached_tensors_share_storage_and_clones_do_not(
    activation: ActivationCase, device: torch.device
) -> None:
    leaf = torch.randn(11, device=device, requires_grad=True)
    x = leaf.clone()
    old = x.detach().clone()
    detached_before, cloned_before = x.detach(), x.clone()
    y = activation.call(x)
    detached_after, cloned_after = y.detach(), y.clone()
    expected = activation.reference(old)
    for view_or_clone in (detached_before, detached_after, cloned_after):
        assert_values(activation, view_or_clone.detach(), expected)
    assert_identical(cloned_before, old)
    assert detached_before._version == detached_after._version == y._version == 1

    # A clone's gradient flows to the cloned tensor: the activation's input or its output.
    (before,) = torch.autograd.grad(cloned_before.sum(), leaf)
    assert_identical(before, torch.ones_like(leaf))
    (after,) = torch.autograd.grad(cloned_after.sum(), leaf, retain_graph=True)
    assert_gradient(activation, after, gradient(activation.reference, old), 1.0)

    detached_before.mul_(2)  # autograd notices this write only by the version
    if activation.allows_later_writes:
        (actual,) = torch.autograd.grad(y.sum(), leaf)
        assert_gradient(activation, actual, gradient(activation.reference, old), 1.0)
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
