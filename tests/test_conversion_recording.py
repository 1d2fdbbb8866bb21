"""The run that convert decides by."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from behaviour import assert_same_behaviour, behaviour, twin
from conversions import site
from memory import largest_allocation
from patterns import WIDTH, Network
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import inplace_ops
from inplace_ops._torch import next_node_number


def test_an_address_used_again_is_not_taken_for_the_old_tensor() -> None:
    addresses = []

    def compute(m: Network, x: Tensor) -> Tensor:
        with torch.no_grad():
            for _ in range(20):
                h = m.first(x)
                addresses.append(h.data_ptr())
                x = m.second(m.act(h))
                del h
        return m.second(x)

    model = Network(compute)
    assert inplace_ops.analyze(model, torch.randn(4, WIDTH, dtype=torch.float64)).sites[0].converted
    assert len(set(addresses)) < len(addresses)


def test_an_input_kept_by_the_activations_own_hook() -> None:
    model = Network(lambda m, x: m.second(m.act(m.first(x))))

    def keep(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        module.saved = inputs[0]

    model.act.register_forward_hook(keep)
    (decision,) = inplace_ops.analyze(model, torch.randn(4, WIDTH, dtype=torch.float64)).sites
    assert decision.reason == "input is kept after forward, by a hook or an attribute"


def test_a_nested_tensor_that_shares_the_input() -> None:
    def compute(m: Network, x: Tensor, reads: bool) -> Tensor:
        h = m.first(x)
        rows = torch.nested.nested_tensor_from_jagged(h.detach(), torch.tensor([0, 1, 4]))
        if not reads:
            rows = rows * 1
        y = m.act(h)
        return m.second(y) + (rows * 1).values()

    x = torch.randn(4, WIDTH, dtype=torch.float64)
    for reads in (False, True):
        model = Network(lambda m, x, reads=reads: compute(m, x, reads))
        (decision,) = inplace_ops.convert(model, x).sites
        assert decision.converted is not reads, decision.reason


def test_garbage_does_not_keep_an_input_alive() -> None:
    def compute(m: Network, x: Tensor) -> Tensor:
        h = m.first(x)
        cycle: list[Any] = [h]
        cycle.append(cycle)
        return m.second(m.act(h))

    gc.collect()
    model = Network(compute)
    assert inplace_ops.analyze(model, torch.randn(4, WIDTH, dtype=torch.float64)).sites[0].converted


def test_memory_of_the_analysis() -> None:
    layers = [nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU(inplace=True)]
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *(copy.deepcopy(layers) * 8))
    x = torch.randn(2, 3, 64, 64)
    model(x).sum().backward()
    with largest_allocation() as step:
        model(x).sum().backward()
    with largest_allocation() as analysis:
        inplace_ops.analyze(model, x)
    assert analysis[0] <= 2 * step[0]


# Gradients inside of forward, as of an energy by positions or a penalty.


@pytest.mark.parametrize("activation", [nn.ReLU, nn.LeakyReLU, nn.SiLU, nn.GELU])
@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
def test_a_gradient_inside_of_forward(activation: type[nn.Module], twice: bool) -> None:
    def compute(m: Network, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        energy = m.second(m.act(m.first(x)))
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=twice, retain_graph=True)
        return energy + force

    model = Network(compute, activation)
    original, x = twin(model), torch.randn(4, WIDTH, dtype=torch.float64)
    (decision,) = inplace_ops.convert(model, x).sites
    assert decision.converted, decision.reason
    if twice:
        assert decision.save != "derivative"
    assert_same_behaviour(behaviour(model, x), behaviour(original, x), rtol=1e-5, atol=1e-6)


def test_a_second_derivative_that_cannot_be_kept() -> None:
    def compute(m: Network, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        y = m.act(m.first(x))
        y += 1
        (force,) = torch.autograd.grad(m.second(y).sum(), x, create_graph=True)
        return force

    model = Network(compute, nn.SiLU)
    original, x = twin(model), torch.randn(4, WIDTH, dtype=torch.float64)
    (decision,) = inplace_ops.convert(model, x).sites
    assert decision.reason == "output is written to by `add_`, and its gradient is differentiated"
    assert_same_behaviour(behaviour(model, x), behaviour(original, x))


def test_a_gradient_inside_of_forward_that_reads_the_input() -> None:
    """Another's backward, not the activation's own."""

    def compute(m: Network, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        h = m.first(x)
        squared = h.square().sum()
        y = m.act(h + 0) if m.safe else m.act(h)
        (force,) = torch.autograd.grad(squared, x, create_graph=True)
        return m.second(y) + force

    for safe in (True, False):
        model = Network(compute, nn.SiLU)
        model.safe = safe
        (decision,) = inplace_ops.convert(model, torch.randn(4, WIDTH).double()).sites
        assert decision.converted is safe


def test_a_hook_that_reads_the_input_inside_of_forward() -> None:
    """It runs before the activation's own backward, as part of the same node."""

    def compute(m: Network, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        h = m.first(x)
        y = m.act(h)
        values = h.detach()
        y.register_hook(lambda gradient: gradient * values)
        return m.second(torch.autograd.grad(m.second(y).sum(), x)[0])

    model = Network(compute, nn.SiLU)
    (decision,) = inplace_ops.convert(model, torch.randn(4, WIDTH).double()).sites
    assert decision.reason == "input is read again by `mul`"


def make_nodes(number: int) -> None:
    """Autograd nodes, until the next one of this thread has the number."""
    x = torch.ones(1, requires_grad=True)
    while next_node_number() < number:
        x * 1


def grad_elsewhere(gap: int) -> Callable[..., Any]:
    """`torch.autograd.grad` by another thread with the same modes, as PyTorch does on a GPU.

    It numbers its nodes from where the model's are, and `gap`.
    """
    grad = torch.autograd.grad

    def run_elsewhere(*args: Any, **kwargs: Any) -> Any:
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        modes = (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack())
        first = next_node_number() + gap

        def run() -> Any:
            make_nodes(first)
            with contextlib.ExitStack() as stack:
                for mode in modes:
                    stack.enter_context(mode)
                if hooks is not None:
                    stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*hooks))
                return grad(*args, **kwargs)

        with ThreadPoolExecutor(1) as other:
            return other.submit(run).result()

    return run_elsewhere


@pytest.mark.parametrize("saves_input", [False, True], ids=["", "input_saved"])
def test_a_gradient_by_another_thread(saves_input: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def compute(m: Network, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        h = m.first(x)
        before = h * h if saves_input else h + 1
        y = m.second(m.act(h))
        (force,) = torch.autograd.grad(y.sum(), x, create_graph=True, retain_graph=True)
        return y + force + before

    model, x = Network(compute, nn.SiLU), torch.randn(4, WIDTH, dtype=torch.float64)
    expected = inplace_ops.analyze(model, x)
    assert expected.sites[0].converted is not saves_input

    def report() -> str:
        make_nodes(30)
        return str(inplace_ops.analyze(model, x))

    for gap in range(-10, 3):
        # A new thread's numbers begin at 0: this one's may be large.
        with monkeypatch.context() as patch, ThreadPoolExecutor(1) as new:
            patch.setattr(torch.autograd, "grad", grad_elsewhere(gap))
            assert new.submit(report).result() == str(expected), gap


# What cannot be followed.


def test_called_otherwise() -> None:
    model = Network(lambda m, x: m.second(m.act(input=m.first(x))))
    report = inplace_ops.convert(model, torch.randn(4, WIDTH, dtype=torch.float64))
    assert site(report, "act").reason == "called otherwise than with one tensor"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors(layout: torch.layout) -> None:
    def compute(m: Network, x: Tensor) -> Tensor:
        rows = torch.nested.nested_tensor([x[:2], x[:3]], layout=layout)
        return torch.cat([y.sum(0) for y in m.second(m.act(m.first(rows))).unbind()])

    model = Network(compute)
    (decision,) = inplace_ops.convert(model, torch.randn(4, WIDTH, dtype=torch.float64)).sites
    assert "nested tensor" in decision.reason


def test_inside_vmap() -> None:
    model = Network(lambda m, x: m.second(torch.func.vmap(lambda h: m.act(h * 1))(m.first(x))))
    (decision,) = inplace_ops.convert(model, torch.randn(4, WIDTH, dtype=torch.float64)).sites
    assert decision.reason == "called inside a transform of torch.func"


def test_models_that_cannot_be_followed() -> None:
    def energy(m: Network, h: Tensor) -> Tensor:
        return m.second(m.act(h * 1)).sum()

    x = torch.randn(4, WIDTH, dtype=torch.float64)
    model = Network(lambda m, x: torch.func.grad(lambda h: energy(m, h))(m.first(x)))
    with pytest.raises(RuntimeError, match=r"calls a gradient transform of torch\.func"):
        inplace_ops.convert(model, x)
    model = Network(
        lambda m, x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (m.second(m.act(m.first(x))),))
    )
    with pytest.raises(RuntimeError, match="calls a higher-order operator"):
        inplace_ops.convert(model, x)
