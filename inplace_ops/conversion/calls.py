"""A module that is called several times in a forward, put in place in some of these calls."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.jit import is_scripting  # type: ignore[attr-defined]


def producer_of(x: Tensor) -> str:
    """The operation that formed x, by autograd's name, empty where it has none.

    A norm is the same on every device.
    """
    if x.grad_fn is None:
        return ""
    return re.sub("^(Native|Cudnn|Miopen)", "", type(x.grad_fn).__name__)


class InPlaceCall(NamedTuple):
    """A call that runs in place: the module that it then is, and what may have formed its input."""

    module: nn.Module
    producers: frozenset[str]


class CallByCall:
    """Which calls of a module run in place, told by their order in a forward of its caller.

    All others run as the original: those that are not safe, and those that the example did not
    show: one more, one with an input that something else has formed, one outside of such a forward.
    """

    def __init__(self, original: nn.Module, in_place: Mapping[int, InPlaceCall]) -> None:
        self.original = original
        self.in_place = dict(in_place)

    def forward(self, module: nn.Module, input: Tensor) -> Tensor:
        """Run the present call of `module`, which is called so."""
        return self.chosen(module, input).forward(input)

    def chosen(self, module: nn.Module, input: Tensor) -> nn.Module:
        """What runs the present call of `module`; the next is another one."""
        if is_compiling() or torch._C._get_tracing_state() is not None:
            return self.original
        index = _counts().get(module)
        if index is None:
            return self.original
        _counts()[module] = index + 1
        call = self.in_place.get(index)
        if call is None or producer_of(input) not in call.producers:
            return self.original
        return call.module

    def __repr__(self) -> str:
        """As it stands in the module's own text."""
        return "calls in place: " + ", ".join(str(index + 1) for index in sorted(self.in_place))


CALLED = "_inplace_ops_called"  # the attribute of a caller, past nn.Module's own setting


def begin_calls(module: nn.Module, args: tuple[Tensor]) -> None:
    """Count the calls anew that `module` makes: a forward pre-hook.

    Arguments may be anything: torch.jit.script, which leaves the hooks out, wants types.
    """
    if not is_scripting():
        _begin_calls(module)


def _begin_calls(module: nn.Module) -> None:
    if not is_compiling():
        for called in vars(module).get(CALLED, ()):
            _counts()[called] = 0


class _PerThread(threading.local):
    """The calls so far in the present forward of the caller: threads may share a model."""

    def __init__(self) -> None:
        self.counts: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


_PER_THREAD = _PerThread()


def _counts() -> WeakKeyDictionary[Any, int]:
    return _PER_THREAD.counts
