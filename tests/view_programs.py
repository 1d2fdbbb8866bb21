"""Programs that apply an in-place activation to a whole tensor or to a view of a part of it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def in_a_slice(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    base = x.clone()
    call(base[1:3])
    return base


def in_a_transpose(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    base = x.clone()
    call(base.t()[1:])
    return base


def in_the_middle(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    base = x * 1.5
    y = call(base[:, 1])
    return base.sin() + y.sum()


VIEW_PROGRAMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "whole": lambda call, x: call(x.clone()),
    "transposed": lambda call, x: call(x.clone().t()),
    "slice": in_a_slice,
    "transpose": in_a_transpose,
    "middle": in_the_middle,
}
