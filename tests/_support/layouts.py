"""Memory layouts: of inputs, of incoming gradients, and programs that overwrite views."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

# By name: a shape, and a function from a tensor of this shape to one that may be modified in place.
LAYOUTS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "contiguous": ((3, 5, 7, 4), lambda a: a.clone()),
    "channels_last": ((2, 3, 5, 4), lambda a: a.clone(memory_format=torch.channels_last)),
    "channels_last_3d": ((2, 3, 5, 4, 2), lambda a: a.clone(memory_format=torch.channels_last_3d)),
    "permuted": ((6, 7, 5), lambda a: a.permute(2, 0, 1).clone()),
    "permuted_view": ((6, 7, 5), lambda a: a.clone().permute(2, 0, 1)),
    "sliced": ((8, 9), lambda a: a.clone()[1:-1, 2:7]),
    "rows": ((40, 9), lambda a: a.clone()[3:17]),
    "column": ((40, 9), lambda a: a.clone()[:, 4]),
    "stepped": ((9, 16, 5), lambda a: a.clone()[::2, 1::3, ::4]),
    "offset_by_one": ((50,), lambda a: a.clone()[1:]),
    "one_wide": ((5, 1, 6), lambda a: a.clone().transpose(0, 1)),
    "gaps": ((60,), lambda a: a.clone().as_strided((4, 5), (13, 2), 3)),
    "interleaved": ((60,), lambda a: a.clone().as_strided((2, 3), (3, 2), 1)),
    "negated": (
        (20, 2),
        lambda a: torch._neg_view(a.clone()),
    ),
    "0-dim": ((), lambda a: a.clone()),
    "0-dim_view": ((3,), lambda a: a.clone()[1]),
    "empty": ((0,), lambda a: a.clone()),
    "empty_rows": ((3, 0, 2), lambda a: a.clone().transpose(0, 2)),
    "large": ((3, 24000), lambda a: a.clone()),
    "large_stepped": ((3, 12000, 2), lambda a: a.clone()[:, 1:, 0]),
}


def _in_reversed_order(shape: torch.Size, values: Callable[..., Tensor]) -> Tensor:
    return values(tuple(reversed(shape))).permute(tuple(reversed(range(len(shape)))))


# By name: a function that returns an incoming gradient of a shape. Its second argument returns
# random values of a shape.
GRADIENTS: dict[str, Callable[[torch.Size, Callable[..., Tensor]], Tensor]] = {
    "contiguous": lambda shape, values: values(shape),
    "expanded": lambda shape, values: values(()).expand(shape),
    "expanded_rows": lambda shape, values: values((*shape[:-1], *(1 for _ in shape[-1:]))).expand(
        shape
    ),
    "reversed": _in_reversed_order,
    "stepped": lambda shape, values: values((*shape, 2))[..., 1],
    "misaligned": lambda shape, values: values((shape.numel() + 1,))[1:].view(shape),
}


def random_view(base: Tensor, choose: random.Random) -> Tensor:
    """Return a view of a part of base: its dimensions are split, sliced with steps and permuted."""
    view = base.view(4, -1, 3) if base.numel() % 12 == 0 and choose.random() < 0.5 else base
    for d in range(view.dim()):
        first = choose.randrange(view.size(d))
        last = choose.randrange(first, view.size(d) + 1)
        step = choose.choice([1, 1, 2, 3])
        view = view[(slice(None),) * d + (slice(first, last, step),)]
    return view.permute(choose.sample(range(view.dim()), view.dim()))


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


# Programs that apply an in-place activation to a whole tensor or to a view of a part of it.
VIEW_PROGRAMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "whole": lambda call, x: call(x.clone()),
    "transposed": lambda call, x: call(x.clone().t()),
    "slice": in_a_slice,
    "transpose": in_a_transpose,
    "middle": in_the_middle,
}
