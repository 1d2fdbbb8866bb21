"""Version counters: which tensors count as modified, and when backward then raises."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from _support.assertions import assert_gradient, assert_values, gradient
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
