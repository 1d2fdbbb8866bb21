"""A module that is called in several places of a forward, put in place in some of these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from .frames import CallSite, call_site


class InPlaceCall(NamedTuple):
    """A call that runs in place: the module that it then is, and the line of code."""

    module: nn.Module
    line: str


class CallByCall:
    """Which calls of a module run in place, told by where in the code they are.

    All others run as the original: those that are not safe, and those that the example did not
    show, as one from elsewhere, or in compiled code.
    """

    def __init__(self, original: nn.Module, in_place: Mapping[CallSite, InPlaceCall]) -> None:
        self.original = original
        self.in_place = dict(in_place)

    def forward(self, input: Tensor) -> Tensor:
        """Run the present call."""
        return self.chosen().forward(input)

    def chosen(self) -> nn.Module:
        """What runs the present call."""
        if is_compiling() or torch._C._get_tracing_state() is not None:
            return self.original
        call = self.in_place.get(call_site())
        return self.original if call is None else call.module

    def __repr__(self) -> str:
        """As it stands in the module's own text."""
        return "in place at " + ", ".join(call.line for call in self.in_place.values())
