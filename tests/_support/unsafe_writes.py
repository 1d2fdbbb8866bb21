"""Small models in which one thing makes overwriting a tensor unsafe, each with a safe variant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Pattern:
    """An unsafe forward, a safe variant, and the activations with which PyTorch runs them."""

    name: str
    unsafe: Forward
    safe: Forward
    activations: tuple[type[nn.Module], ...] = (nn.ReLU, nn.LeakyReLU, nn.SiLU)


def _hooked(hook: Callable[[Network], Any], register: str) -> Forward:
    def compute(m: Network, x: Tensor) -> Tensor:
        handle = getattr(m.first, register)(hook(m))
        h = m.first(m.second(x))  # with an input that requires no grad the hook warns
        handle.remove()
        return m.second(m.act(h))

    return compute


def _store_output(m: Network) -> Callable[..., None]:
    return lambda module, inputs, output: m.stored.append(output)


def _store_mean(m: Network) -> Callable[..., None]:
    return lambda module, inputs, output: m.stored.append(output.mean())


def _gradient_hook(m: Network) -> Callable[..., None]:
    return lambda module, grad_inputs, grad_outputs: None


def _attribute(m: Network, x: Tensor) -> Tensor:
    h = m.first(x)
    m.stored.append(h.view(-1))
    return m.second(m.act(h))


def _no_grad(m: Network, x: Tensor, reads: bool) -> Tensor:
    with torch.no_grad():
        h = m.first(x)
        y = m.act(h)
        return m.second(y + h if reads else y + x)


def _no_grad_inside(m: Network, x: Tensor, reads: bool) -> Tensor:
    return m.second(x) + _no_grad(m, x, reads)


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


def _gradient_of(m: Network, x: Tensor, which: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    h = m.first(x)
    y = m.act(h)
    (gradient,) = torch.autograd.grad((y + 1).square().sum(), which(h, y), retain_graph=True)
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


def _second_and_act(m: Network, h: Tensor) -> Tensor:
    return m.second(h) + m.act(h)


PATTERNS: list[Pattern] = [
    Pattern(
        "residual of the input",
        lambda m, x: m.second((h := m.first(x)) * 0 + m.act(h) + h),
        lambda m, x: m.second((h := m.first(x)) * 0 + m.act(h) + x),
    ),
    Pattern(
        "second branch",
        lambda m, x: m.act(h := m.first(x)).sum() + m.second(h),
        lambda m, x: (h := m.first(x)).sum() + m.second(m.act(h)),
    ),
    Pattern(
        "second branch through a view",
        lambda m, x: m.second(m.act(h := m.first(x))) + h.view(-1)[1:].sum(),
        lambda m, x: (h := m.first(x)).view(-1)[1:].sum() + m.second(m.act(h)),
    ),
    Pattern(
        "input written to later",
        _written_later,
        lambda m, x: m.second(m.act(m.first(x))),
        (nn.ReLU,),  # the others save their input, so PyTorch raises
    ),
    Pattern(
        "gradient hook afterwards",
        lambda m, x: _gradient_hooks(m, x, before=False),
        lambda m, x: _gradient_hooks(m, x, before=True),
    ),
    Pattern(
        "values read by Python",
        lambda m, x: m.second(m.act(h := m.first(x.detach()))) * sum(h.detach().view(-1).tolist()),
        lambda m, x: m.second(m.act(h := m.first(x.detach()))) * len(h.shape),
    ),
    Pattern(
        "memory shared by numpy()",
        lambda m, x: _numpy(m, x, lambda h: h.numpy()),
        lambda m, x: _numpy(m, x, lambda h: h.clone().numpy()),
    ),
    Pattern(
        "memory shared by np.asarray",
        lambda m, x: _numpy(m, x, np.asarray),
        lambda m, x: _numpy(m, x, lambda h: np.asarray(h.clone())),
    ),
    Pattern(
        "memory shared by DLPack",
        lambda m, x: _numpy(m, x, np.from_dlpack),
        lambda m, x: _numpy(m, x, lambda h: np.from_dlpack(h.clone())),
    ),
    Pattern(
        "gradient of the input",
        lambda m, x: _gradient_of(m, x, lambda h, y: h),
        lambda m, x: _gradient_of(m, x, lambda h, y: y),
        (nn.ReLU,),  # the backward of the others reads the input
    ),
    Pattern(
        "saved later and not read before",
        lambda m, x: m.second(_SavesUnread.apply(m.act(h := m.first(x)), h)),
        lambda m, x: m.second(_SavesUnread.apply(m.act(m.first(x)), x)),
    ),
    Pattern(
        "saved by exp",
        lambda m, x: m.second(m.act(m.first(x).exp())),
        lambda m, x: m.second(m.act(m.first(x).exp() + 1)),
    ),
    Pattern(
        "saved by a layer",
        lambda m, x: m.second(h := m.first(x)) + m.act(h),
        lambda m, x: m.second(h := m.first(x)) + m.act(h + 0),
    ),
    Pattern(
        "saved by a layer in a checkpoint",
        lambda m, x: checkpoint(
            lambda x: _second_and_act(m, m.first(x)), m.first(x), use_reentrant=False
        ),
        lambda m, x: checkpoint(
            lambda x: m.second(m.act(m.first(x))), m.first(x), use_reentrant=False
        ),
    ),
    Pattern(
        "saved by a layer in a reentrant checkpoint",
        lambda m, x: checkpoint(
            lambda x: _second_and_act(m, m.first(x)), m.first(x), use_reentrant=True
        ),
        lambda m, x: checkpoint(
            lambda x: m.second(m.act(m.first(x))), m.first(x), use_reentrant=True
        ),
    ),
    Pattern(
        "a checkpoint's own input",
        lambda m, x: checkpoint(lambda h: m.second(m.act(h)), m.first(x), use_reentrant=False),
        lambda m, x: checkpoint(lambda x: m.second(m.act(m.first(x))), x, use_reentrant=False),
    ),
    Pattern(
        "chunk",
        lambda m, x: m.second(m.act(m.first(x).chunk(1)[0])),
        lambda m, x: m.second(m.act(m.first(x)[:])),
    ),
    Pattern(
        "view under no_grad",
        lambda m, x: m.second(m.act(_without_grad(lambda h: h.view(h.shape), m.first(x)))),
        lambda m, x: m.second(m.act(m.first(x).view(-1)).view(x.shape)),
    ),
    Pattern(
        "backward hook",
        _hooked(_gradient_hook, "register_full_backward_hook"),
        _hooked(_store_mean, "register_forward_hook"),
    ),
    Pattern(
        "detached by no_grad",
        lambda m, x: m.second(_without_grad(m.act, m.first(x))),
        lambda m, x: m.second(_without_grad(lambda x: m.act(m.first(x)), x)),
    ),
    Pattern(
        "view of a leaf",
        lambda m, x: _force(m, x, lambda position: position.view(-1)),
        lambda m, x: _force(m, x, lambda position: (position * 2).view(-1)),
        (nn.ReLU,),  # the backward of the others reads the input
    ),
    Pattern(
        "leaf",
        lambda m, x: _force(m, x, lambda position: position),
        lambda m, x: _force(m, x, lambda position: position * 2),
        (nn.ReLU,),  # the backward of the others reads the input
    ),
    Pattern(
        "overlapping memory",
        lambda m, x: m.second(m.act(m.first(x)[0].unfold(0, 3, 1)).sum(0).repeat(2)),
        lambda m, x: m.second(m.act(m.first(x)[0].unfold(0, 3, 3)).sum(0).repeat(2)),
    ),
    Pattern(
        "slice",
        lambda m, x: m.second(m.act(m.first(x)[:, :3]).view(-1, WIDTH) + 0),
        lambda m, x: m.second(m.act(m.first(x)[:, :3] + 0).view(-1, WIDTH) + 0),
    ),
    Pattern(
        "argument",
        lambda m, x: m.second(m.act(x)),
        lambda m, x: m.second(m.act(x.clone())),
    ),
    Pattern(
        "parameter",
        lambda m, x: m.first(F.linear(x, m.act(m.frozen))),
        lambda m, x: m.first(F.linear(x, m.act(m.frozen.clone()))),
    ),
    Pattern(
        "view of a buffer",
        lambda m, x: m.first(F.linear(x, m.act(m.scale.t()))),
        lambda m, x: m.first(F.linear(x, m.act(m.scale.t() + 0))),
    ),
    Pattern(
        "returned",
        lambda m, x: (m.second(m.act(h := m.first(x))), h),
        lambda m, x: ((h := m.first(x)).sum(), m.second(m.act(h))),
    ),
    Pattern(
        "stored by a hook",
        _hooked(_store_output, "register_forward_hook"),
        _hooked(_store_mean, "register_forward_hook"),
    ),
    Pattern(
        "view stored in an attribute",
        _attribute,
        lambda m, x: m.second(m.act(m.first(x))),
    ),
    Pattern(
        "everything under no_grad",
        lambda m, x: _no_grad(m, x, reads=True),
        lambda m, x: _no_grad(m, x, reads=False),
    ),
    Pattern(
        "a part under no_grad",
        lambda m, x: _no_grad_inside(m, x, reads=True),
        lambda m, x: _no_grad_inside(m, x, reads=False),
    ),
    Pattern(
        "weights shared by two calls",
        lambda m, x: m.act(h := m.first(x)) + m.first(h),
        lambda m, x: m.first(m.act(m.first(x))),
    ),
    Pattern(
        "complex",
        _complex,
        lambda m, x: m.second(m.act(m.first(x))),
        (nn.SiLU,),
    ),
]


def _without_grad(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with torch.no_grad():
        return function(x)


def pattern_id(pattern: Pattern) -> str:
    return pattern.name.replace(" ", "_")
