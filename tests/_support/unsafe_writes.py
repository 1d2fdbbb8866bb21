"""Small models in which one thing makes overwriting a tensor unsafe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 6

Forward = Callable[[Any, Tensor], Any]


class Network(nn.Module):
    """Two linear layers and an activation, which `compute(self, x)` calls."""

    def __init__(self, compute: Forward, activation: Callable[[], nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.second = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.act = activation()
        self.frozen = nn.Parameter(torch.randn(WIDTH, WIDTH).double(), requires_grad=False)
        self.register_buffer("scale", torch.randn(WIDTH, WIDTH).double())
        self.compute = compute
        self.stored: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        return self.compute(self, x)


def _hooked(hook: Callable[[Network], Any], register: str) -> Forward:
    def compute(m: Network, x: Tensor) -> Tensor:
        handle = getattr(m.first, register)(hook(m))
        h = m.first(m.second(x))  # with an input that requires no grad the hook warns
        handle.remove()
        return m.second(m.act(h))

    return compute


def _store_output(m: Network) -> Callable[..., None]:
    return lambda module, inputs, output: m.stored.append(output)


def _gradient_hook(m: Network) -> Callable[..., None]:
    return lambda module, grad_inputs, grad_outputs: None


def _attribute(m: Network, x: Tensor) -> Tensor:
    h = m.first(x)
    m.stored.append(h.view(-1))
    return m.second(m.act(h))


def _no_grad(m: Network, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = m.first(x)
        return m.second(m.act(h) + h)


def _written_later(m: Network, x: Tensor) -> Tensor:
    h = m.first(x)
    y = m.act(h)
    h.zero_()
    return m.second(y)


def _force(m: Network, x: Tensor, prepare: Callable[[Tensor], Tensor]) -> Tensor:
    """Differentiate an energy in forward, as force-field models do, which frees the graph."""
    position = m.first(x).detach().requires_grad_()
    m.act(prepare(position)).square().sum().backward()
    assert position.grad is not None
    return m.second(position.grad)


def _gradient_hooks(m: Network, x: Tensor, before: bool) -> Tensor:
    h = m.first(x)
    if before:
        h.register_hook(lambda gradient: gradient + 1)
    y = m.act(h)
    if not before:
        h.register_hook(lambda gradient: gradient + 1)
    return m.second(y)


def _numpy(m: Network, x: Tensor, share: Callable[[Tensor], Any]) -> Tensor:
    h = m.first(x)
    array = share(h.detach())
    y = m.act(h)
    return m.second(y) * float(array.sum())


def _gradient_of_the_input(m: Network, x: Tensor) -> Tensor:
    h = m.first(x)
    y = m.act(h)
    (gradient,) = torch.autograd.grad((y + 1).square().sum(), h, retain_graph=True)
    return m.second(y) * gradient


def _complex(m: Network, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = m.act(torch.complex(m.first(x), m.first(x)))
    return m.second(y.real + y.imag)


class _SavesUnread(torch.autograd.Function):
    """Save h for backward; no operation reads h before."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, h: Tensor) -> Tensor:
        ctx.save_for_backward(h)
        return y * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (h,) = ctx.saved_tensors
        return grad * h.sum(), None


def _saved_in_a_checkpoint(m: Network, x: Tensor, use_reentrant: bool) -> Tensor:
    def saved(x: Tensor) -> Tensor:
        h = m.first(x)
        return m.second(h) + m.act(h)

    return checkpoint(saved, m.first(x), use_reentrant=use_reentrant)


def _without_grad(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with torch.no_grad():
        return function(x)


PATTERNS: dict[str, Forward] = {
    "residual_of_the_input": lambda m, x: m.second((h := m.first(x)) * 0 + m.act(h) + h),
    "second_branch": lambda m, x: m.act(h := m.first(x)).sum() + m.second(h),
    "second_branch_through_a_view": lambda m, x: (
        m.second(m.act(h := m.first(x))) + h.view(-1)[1:].sum()
    ),
    "input_written_to_later": _written_later,
    "gradient_hook_before": lambda m, x: _gradient_hooks(m, x, before=True),
    "gradient_hook_afterwards": lambda m, x: _gradient_hooks(m, x, before=False),
    "values_read_by_python": lambda m, x: (
        m.second(m.act(h := m.first(x.detach()))) * sum(h.detach().view(-1).tolist())
    ),
    "memory_shared_by_numpy()": lambda m, x: _numpy(m, x, lambda h: h.numpy()),
    "memory_shared_by_np.asarray": lambda m, x: _numpy(m, x, np.asarray),
    "memory_shared_by_dlpack": lambda m, x: _numpy(m, x, np.from_dlpack),
    "gradient_of_the_input": _gradient_of_the_input,
    "saved_later_and_not_read_before": lambda m, x: m.second(
        _SavesUnread.apply(m.act(h := m.first(x)), h)
    ),
    "saved_by_exp": lambda m, x: m.second(m.act(m.first(x).exp())),
    "saved_by_a_layer": lambda m, x: m.second(h := m.first(x)) + m.act(h),
    "saved_in_a_checkpoint": lambda m, x: _saved_in_a_checkpoint(m, x, False),
    "saved_in_a_reentrant_checkpoint": lambda m, x: _saved_in_a_checkpoint(m, x, True),
    "input_of_a_checkpoint": lambda m, x: checkpoint(
        lambda h: m.second(m.act(h)), m.first(x), use_reentrant=False
    ),
    "chunk": lambda m, x: m.second(m.act(m.first(x).chunk(1)[0])),
    "view_under_no_grad": lambda m, x: m.second(
        m.act(_without_grad(lambda h: h.view(h.shape), m.first(x)))
    ),
    "backward_hook": _hooked(_gradient_hook, "register_full_backward_hook"),
    "detached_by_no_grad": lambda m, x: m.second(_without_grad(m.act, m.first(x))),
    "view_of_a_leaf": lambda m, x: _force(m, x, lambda position: position.view(-1)),
    "leaf": lambda m, x: _force(m, x, lambda position: position),
    "overlapping_memory": lambda m, x: m.second(
        m.act(m.first(x)[0].unfold(0, 3, 1)).sum(0).repeat(2)
    ),
    "slice": lambda m, x: m.second(m.act(m.first(x)[:, :3]).view(-1, WIDTH) + 0),
    "argument": lambda m, x: m.second(m.act(x)),
    "parameter": lambda m, x: m.first(F.linear(x, m.act(m.frozen))),
    "view_of_a_buffer": lambda m, x: m.first(F.linear(x, m.act(m.scale.t()))),
    "returned": lambda m, x: (m.second(m.act(h := m.first(x))), h),
    "stored_by_a_hook": _hooked(_store_output, "register_forward_hook"),
    "view_stored_in_an_attribute": _attribute,
    "everything_under_no_grad": _no_grad,
    "a_part_under_no_grad": lambda m, x: m.second(x) + _no_grad(m, x),
    "weights_shared_by_two_calls": lambda m, x: m.act(h := m.first(x)) + m.first(h),
    "complex": _complex,
}
ACTIVATIONS = (nn.ReLU, nn.LeakyReLU, nn.SiLU)
# The patterns that PyTorch runs with some activations only. It raises if the backward of others
# reads a tensor that is modified or freed, and ReLU is not defined for complex numbers.
ACTIVATIONS_OF = {
    **dict.fromkeys(
        ("input_written_to_later", "gradient_of_the_input", "view_of_a_leaf", "leaf"), (nn.ReLU,)
    ),
    "complex": (nn.SiLU,),
}
