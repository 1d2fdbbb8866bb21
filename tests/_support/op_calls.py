"""Arguments for direct calls of the private ops."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from _support.cases import SCALARS
from inplace_ops import _ops

SHAPE = (2, 3, 5, 4)
LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], list[int] | None]] = {
    "contiguous": (lambda t: t, None),
    "channels_last": (lambda t: t.contiguous(memory_format=torch.channels_last), [0, 2, 3, 1]),
    "transposed": (lambda t: t.transpose(0, 3), [3, 1, 2, 0]),
    "logical_order": (lambda t: t.transpose(1, 2), None),
}

OPS = (
    *_ops.PLAIN_OPS,
    *_ops.SAVING_OPS,
    *_ops.FUNCTIONAL_OPS,
    _ops.NORM_AFFINE,
    *_ops.RECOMPUTING_OPS,
    *_ops.SUM_OPS,
    *_ops.BATCH_NORM_OPS,
    *_ops.BACKWARD_OPS,
)


def name_of(op: torch._ops.OpOverload) -> str:
    return op.name().removeprefix("inplace_ops::")


def names_of(op: torch._ops.OpOverload) -> list[str]:
    """Return the names of the op's parameters."""
    return [parameter.name for parameter in op._schema.arguments]


def activation_and_save_of(op: torch._ops.OpOverload) -> tuple[str | None, str | None]:
    """Return the name of the op's activation, and the save mode of what it writes or reads."""
    if op in (_ops.NORM_AFFINE, _ops.NORMALIZE, *_ops.SUM_OPS):
        return None, None
    for activation, ops in _ops.ALL.items():
        for by_save in (ops.save_in_place, ops.save_out_of_place, ops.backward):
            for save, other in by_save.items():
                if other is op:
                    return activation, save
        if ops.double_backward is op:
            return activation, "output"
        if op in (ops.in_place, ops.recompute, ops.backward_batch_norm):
            return activation, None
    raise AssertionError(op)


def planes_of(op: torch._ops.OpOverload, dtype: torch.dtype = torch.float32) -> int:
    """Return the default number of bit planes that the op writes or reads, or 0 without bits."""
    activation, save = activation_and_save_of(op)
    return _ops.ALL[activation].default_bits[save][dtype] if save not in (None, "recompute") else 0


# The ops of leaky_relu with its scalar, and of silu: ops.h has one template for all activations.
OF_EACH_KIND = [op for op in OPS if activation_and_save_of(op)[0] in (None, "leaky_relu", "silu")]
NORMALIZING = [op for op in OF_EACH_KIND if "row_statistics" in names_of(op)]


FLOATING = ("x", "grad", "grad_grad", "output", "addend")  # tensors of one shape and dtype

# Their sizes for two samples with six channels in two groups. A batch norm's have one number for
# each channel.
STATISTICS = {"rstd": 4, "mean": 4, "weight": 6, "bias": 6}


def scale_shift_of(x: Tensor, *dims: int) -> Tensor:
    """Return a random affine (or row statistics) whose values differ along `dims` of x."""
    shape = [size if d in dims else 1 for d, size in enumerate(x.shape)]
    return torch.randn(2, *shape, dtype=_ops.affine_dtype(x.dtype), device=x.device)


def arguments_of(
    op: torch._ops.OpOverload,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    layout: str = "contiguous",
    shape: tuple[int, ...] = SHAPE,
) -> list[object]:
    """Return arguments as the package itself passes them, by the names in the op's schema."""
    arrange, dim_order = LAYOUTS[layout]
    planes = planes_of(op, dtype)
    arguments: list[object] = []
    for parameter in op._schema.arguments:
        if parameter.name in FLOATING:
            arguments.append(arrange(torch.randn(shape, device=device).to(dtype)))
        elif parameter.name == "packed":
            packed = _ops.empty_bits(arguments[0], planes).random_()
            if activation_and_save_of(op)[1] == "derivative":
                packed[-1] = 255  # no code is 0, the code of NaN
            arguments.append(packed)
        elif parameter.name == "bits":
            arguments.append(planes)
        elif parameter.name == "channel_affine":
            arguments.append(scale_shift_of(arguments[0], 1))
        elif parameter.name in STATISTICS:
            like = arguments[0] if op in _ops.BATCH_NORM_OPS else None
            size = STATISTICS[parameter.name] if like is None else like.shape[1]
            kind = None if like is None else _ops.affine_dtype(like.dtype)
            arguments.append(torch.randn(size, dtype=kind, device=device))
        elif parameter.name in ("shape", "channels_per_group"):
            arguments.append([2, 2, 6] if parameter.name == "shape" else 3)
        elif parameter.name == "row_statistics":  # only layer norms have them
            arguments.append(None if layout == "channels_last" else scale_shift_of(arguments[0], 0))
        elif parameter.name == "dim_order":
            arguments.append(dim_order)
        elif not parameter.kwarg_only:
            arguments.append(SCALARS[parameter.name])
    names = names_of(op)
    if {"output", "packed"} <= set(names) and device.type != "meta":
        # Not every pair of an output and a code belongs to an input: let forward write them.
        output, packed = (arguments[names.index(name)] for name in ("output", "packed"))
        saving = _ops.ALL[activation_and_save_of(op)[0]].save_in_place["output"]
        arguments[names.index("packed")] = saving(output, planes, dim_order)
    return arguments
