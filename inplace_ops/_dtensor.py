"""DTensors: each process works on its own part of one and keeps plain packed bits of that part.

Imported with the first DTensor, as importing torch.distributed.tensor takes longer than the rest.
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
    """The memory of this process's part of x.

    Raises:
        RuntimeError: For partial sums: their activation is not the sum of the parts' activations.
    """
    if any(placement.is_partial() for placement in x.placements):
        raise RuntimeError(
            f"{op}: in-place operations that require placement changes are not supported, and the "
            f"input has placements {x.placements}. Redistribute it to Shard or Replicate first."
        )
    with torch.no_grad():
        return x.to_local()


class _LocalContext:
    """A Function's context, with the local parts of what was saved."""

    def __init__(self, ctx: Any) -> None:
        vars(self)["_ctx"] = ctx

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._ctx, name, value)

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        return tuple(t.to_local() if isinstance(t, DTensor) else t for t in self._ctx.saved_tensors)


@cache
def on_local_parts(function: Any) -> type[Function]:
    """The Function that applies `function`, one of an in-place activation, to a DTensor's parts.

    In backward a gradient with other placements than the input's is redistributed to them first.
    """

    class OnLocalParts(Function):
        @staticmethod
        def forward(ctx: Any, x: DTensor, bits: int, op_args: OpArgs) -> DTensor:
            packed, ops = None, function.activation.ops
            if bits:
                save_in_place = ops.save_in_place[function.save_modes[0]]
                packed = save_in_place(x.to_local(), bits, op_args.dim_order, *op_args.scalars)
            else:
                ops.in_place(x.to_local(), op_args.dim_order, *op_args.scalars)
            ctx.mark_dirty(x)
            function.save_for_backward(ctx, x, packed, op_args)
            ctx.placements = x.placements
            ctx.set_materialize_grads(False)  # the zeros would be no DTensor
            return x

        @staticmethod
        def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
            if grad is None:
                return (None,) * len(ctx.needs_input_grad)
            if not isinstance(grad, DTensor):
                raise RuntimeError(
                    "the gradient of a DTensor must be a DTensor, got a plain tensor"
                )
            # Every step is differentiable, for a second derivative.
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
