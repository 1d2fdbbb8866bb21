"""DTensors: each process works on its local part, and saves plain packed bits of that part.

This module is imported with the first DTensor, because importing torch.distributed.tensor takes
longer than importing the rest of this package.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed.tensor import DTensor

from . import _ops
from ._ops import OpArgs


def local_part(op: str, x: DTensor) -> Tensor:
    """Return this process's part of x, which shares x's memory.

    Raises:
        RuntimeError: If x is a partial sum, whose activation is not the sum of the parts'
            activations.
    """
    if any(placement.is_partial() for placement in x.placements):
        raise RuntimeError(
            f"{op}: in-place operations that require placement changes are not supported, and the "
            f"input has placements {x.placements}. Redistribute it to Shard or Replicate first."
        )
    with torch.no_grad():
        return x.to_local()


class _LocalContext:
    """A Function's ctx whose saved tensors are the local parts of the saved DTensors."""

    def __init__(self, ctx: Any) -> None:
        vars(self)["_ctx"] = ctx

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._ctx, name, value)

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        return tuple(
            [t.to_local() if isinstance(t, DTensor) else t for t in self._ctx.saved_tensors]
        )


@cache
def on_local_parts(function: Any) -> type[Function]:
    """Return a Function that applies an in-place Function to the local part of a DTensor.

    Its backward redistributes the gradient to the input's placements first.
    """

    class OnLocalParts(Function):
        @staticmethod
        def forward(ctx: Any, x: DTensor, saved: tuple[int, OpArgs]) -> DTensor:
            (bits, op_args), packed, ops = saved, None, function.activation.ops
            if bits:
                save_in_place = ops.save_in_place[function.save_modes[0]]
                packed = save_in_place(x.to_local(), bits, op_args.dim_order, *op_args.scalars)
            else:
                ops.in_place(x.to_local(), op_args.dim_order, *op_args.scalars)
            ctx.mark_dirty(x)
            function.save_tensors(ctx, x, packed, op_args)
            ctx.placements = x.placements
            ctx.set_materialize_grads(False)  # zeros would not be a DTensor
            return x

        @staticmethod
        def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
            if grad is None:
                return (None,) * len(ctx.needs_input_grad)
            if not isinstance(grad, DTensor):
                raise RuntimeError(
                    "the gradient of a DTensor must be a DTensor, got a plain tensor"
                )
            # Every step can be differentiated, for a second derivative.
            grad = grad.redistribute(placements=ctx.placements)
            part, *others = function.backward(_LocalContext(ctx), grad.to_local())
            gradient = DTensor.from_local(
                part,
                grad.device_mesh,
                grad.placements,
                run_check=False,
                shape=grad.shape,
                stride=_ops.dense_strides(grad.shape, ctx.op_args.dim_order),
            )
            return gradient, *others

    return OnLocalParts
