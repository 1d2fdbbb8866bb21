"""Dtype policies: what weights and operations of a training step are computed in.

- "float32": all of it.
- "bfloat16": weights and activations.
- "CUDA autocast": float32 weights, forward under `torch.autocast` to bfloat16.
- "CUDA autocast, torch 2.11": the same, but `rms_norm` is not run in float32, as from 2.12 on.

Autocast differs by device: a CPU leaves norms, softmax and powers in bfloat16, CUDA runs them in
float32. So on a CPU CUDA's policy is emulated, by registering CUDA's float32 operations for the
CPU's autocast. Forward runs under `autocast`, and the whole step under `emulation`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Policy(NamedTuple):
    """What runs in which dtype.

    Attributes:
        weights: The dtype of parameters and inputs.
        autocast: Whether forward runs under autocast to bfloat16.
        excluded: Operations that an earlier torch does not run in float32.
    """

    weights: torch.dtype = torch.float32
    autocast: bool = False
    excluded: tuple[str, ...] = ()

    @property
    def is_float32(self) -> bool:
        """Whether nothing runs in 16 bits."""
        return self.weights is torch.float32 and not self.autocast


POLICIES = {
    "float32": Policy(),
    "bfloat16": Policy(weights=torch.bfloat16),
    "CUDA autocast": Policy(autocast=True),
    "CUDA autocast, torch 2.11": Policy(autocast=True, excluded=("rms_norm",)),
}

# ATen/autocast_mode.h, AT_FORALL_FP32: operations whose inputs CUDA's autocast casts to float32.
CAST_INPUTS = (
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p"),
    *("reciprocal", "rsqrt", "sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor"),
    *("pow.Scalar", "softplus", "layer_norm", "native_layer_norm", "rms_norm", "group_norm"),
    *("frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim", "cosine_similarity"),
    *("poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d"),
    *("hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss"),
    *("margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss"),
    *("triplet_margin_loss", "multi_margin_loss", "binary_cross_entropy_with_logits"),
    *("dist", "pdist", "cdist", "renorm", "logsumexp", "upsample_nearest1d"),
    *("_upsample_nearest_exact1d", "upsample_nearest2d", "_upsample_nearest_exact2d"),
    *("upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_linear1d"),
    *("upsample_bilinear2d", "_upsample_bilinear2d_aa", "upsample_trilinear3d"),
    *("upsample_bicubic2d", "_upsample_bicubic2d_aa"),
)
# AT_FORALL_FP32_SET_OPT_DTYPE: those that it gives dtype=float32, if the caller names none.
SET_DTYPE = (
    *("prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum"),
    *("linalg_vector_norm", "linalg_matrix_norm", "linalg_matrix_norm.str_ord"),
    *("sum", "sum.dim_IntList"),
)


@contextlib.contextmanager
def emulation(policy: Policy, device: str) -> Iterator[None]:
    """For a whole step on a CPU: let autocast follow CUDA's policy.

    A checkpoint runs forward again in backward, and is to find the same.
    """
    with torch.library._scoped_library("aten", "IMPL") as library:
        if policy.autocast and device == "cpu":
            for names, kernel in ((CAST_INPUTS, _on_float32), (SET_DTYPE, _with_dtype)):
                for name in names:
                    if name not in policy.excluded and not has_autocast_kernel(name, "CPU"):
                        library.impl(name, kernel(_operation(name)), "AutocastCPU")
        yield


def autocast(policy: Policy, device: str) -> torch.autocast:
    """For a forward pass: autocast, if the policy has it."""
    return torch.autocast(device, torch.bfloat16, enabled=policy.autocast)


def has_autocast_kernel(name: str, device: str) -> bool:
    """Whether autocast on that device does anything about an operation."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", f"Autocast{device}")


def _operation(name: str) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _on_float32(op: Callable[..., Any]) -> Callable[..., Any]:
    def cast(value: Any) -> Any:
        is_cast = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
        return value.float() if is_cast else value

    def run(*args: Any, **kwargs: Any) -> Any:
        with _below_autocast():
            return op(*map(cast, args), **{name: cast(value) for name, value in kwargs.items()})

    return run


def _with_dtype(op: Callable[..., Any]) -> Callable[..., Any]:
    names = [argument.name for argument in op._schema.arguments]  # type: ignore[attr-defined]

    def run(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        if given.get("dtype") is None and args[0].dtype in (torch.bfloat16, torch.float16):
            given["dtype"] = torch.float32
        with _below_autocast():
            return op(**given)

    return run


def _below_autocast() -> Any:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    return torch._C._ExcludeDispatchKeyGuard(keys)


def of_dtype(value: Tensor, policy: Policy) -> Tensor:
    """An input in the dtype of the policy's weights, unless it is of indices."""
    return value.to(policy.weights) if value.is_floating_point() else value
