"""Notes of tensors inside a module, which no module hook sees.

`hidden * rstd` in an RMS norm's own code, followed by a cast, is a temporary tensor: no node saves
it, and no module returns it. Without a note of it, nothing proves that it was unmodified when the
cast read it: see NOTE [Versions are proved] in `values.py`. So while such a module runs, a
`TorchFunctionMode` takes a note of each tensor that a function returns. Each call costs a
microsecond or two, so only modules that gain from it run with the mode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .._torch_private import (
    ADD,
    SUB,
    Node,
    function_modes,
    is_named,
    remove_function_mode,
)
from ..supported import is_pytorchs

_NARROW = (torch.float16, torch.bfloat16)

# Functions that add or subtract two operands. Each makes a new node.
_SUM_FUNCTIONS = {
    *(torch.add, torch.sub, torch.subtract),
    *(Tensor.add, Tensor.add_, Tensor.sub, Tensor.sub_, Tensor.subtract, Tensor.subtract_),
    *(Tensor.__add__, Tensor.__radd__, Tensor.__iadd__, Tensor.__sub__, Tensor.__isub__),
}


def gains_from_notes(module: nn.Module, args: Any) -> bool:
    """Whether notes inside a module without inner modules let the engine save less.

    - PyTorch's modules call a single function: they do not gain.
    - A module without parameters, such as an activation, gains: its temporary tensors need not be
      saved.
    - A module with parameters, such as a norm, saves most of them for the parameters' gradients
      anyway. It gains only if it computes with casts of 16-bit inputs.
    """
    if not torch.is_grad_enabled() or is_pytorchs(module):
        return False
    if is_user_mode_active():  # it may change the arguments that our mode has seen
        return False
    inputs = [arg for arg in args if isinstance(arg, Tensor) and arg.requires_grad]
    if any(arg.dtype in _NARROW for arg in inputs):
        return True
    return bool(inputs) and next(module.parameters(recurse=False), None) is None


def constant_of(function: Callable[..., Any], args: Any, node: Node) -> float | None:
    """Return the number that a function has added or subtracted; None for other functions.

    The function's node does not save it.
    """
    if function not in _SUM_FUNCTIONS or len(args) != 2:
        return None
    if not (is_named(node, ADD) or is_named(node, SUB)):
        return None
    if sum(producer is None for producer, _ in node.next_functions) != 1:
        return None  # the tensor has no gradient either: the node does not tell the two apart
    numbers = [arg for arg in args if type(arg) in (int, float)]
    if len(numbers) != 1 or not any(type(arg) in (Tensor, nn.Parameter) for arg in args):
        return None  # a subclass of Tensor may have changed the number
    # A larger integer may round otherwise as a float64, in which it is recorded.
    is_exact = type(numbers[0]) is float or abs(numbers[0]) <= 2**53
    return numbers[0] if is_exact else None


# Takes a note of a function's result, given also the function and its arguments. Must not raise.
Note = Callable[[Tensor, Callable[..., Any], Any], None]


class NotingMode(TorchFunctionMode):
    """Takes a note of each tensor that a function returns while grad mode is enabled.

    Without grad mode a function makes no node. The tensor that it returns may have one: a tensor
    that it has written to, or a view of a tensor.
    """

    def __init__(self, note: Note) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **kwargs) if kwargs else func(*args)
        if (
            isinstance(result, Tensor)
            and torch.is_grad_enabled()
            and not torch.compiler.is_dynamo_compiling()
        ):
            self._note(result, func, args)
        return result


def is_user_mode_active() -> bool:
    """Whether a function mode of the user is active, which may change what functions compute."""
    modes = function_modes()
    return bool(modes) and any(not isinstance(mode, NotingMode) for mode in modes)


class Noting:
    """The modules that take notes in a forward pass, and their mode.

    A module may call itself, so one mode serves all modules that run. The mode refers to the
    engine, by `note`, so it exists only while they run: a reference cycle would keep alive all that
    the engine refers to.
    """

    def __init__(self) -> None:
        self._mode: NotingMode | None = None
        self._modules: list[nn.Module] = []

    @property
    def is_active(self) -> bool:
        """Whether a module takes notes."""
        return bool(self._modules)

    def begin(self, module: nn.Module, note: Note) -> None:
        """Take notes until this module ends."""
        if self._mode is None:
            self._mode = NotingMode(note)
            self._mode.__enter__()
        self._modules.append(module)

    def end(self, module: nn.Module) -> None:
        """Take no more notes, if this module is the one that began."""
        if self._modules and self._modules[-1] is module:
            self._modules.pop()
            if not self._modules:
                self.end_all()

    def end_all(self) -> None:
        """Take no more notes, also if an exception has left a module."""
        self._modules.clear()
        if self._mode is not None:
            remove_function_mode(self._mode)
            self._mode = None
