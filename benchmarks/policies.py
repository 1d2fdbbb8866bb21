"""Dtype policies: the dtypes of weights and operations in a training step.

- "float32": weights and activations in float32.
- "bfloat16": weights and activations in bfloat16.
- "CUDA autocast": float32 weights, forward under `torch.autocast` to bfloat16.
- "CUDA autocast, torch 2.11": the same, except that `rms_norm` does not run in float32. It does
  from torch 2.12 on.

Autocast differs by device: on a CPU norms, softmax and powers stay in bfloat16, on CUDA they run in
float32. To emulate CUDA's policy on a CPU, CUDA's list of float32 operations is registered for the
CPU's autocast. Forward runs under `autocast`, and the whole step under `emulation`. There products
also cost what they cost on CUDA.

A CPU without 16-bit instructions takes a hundred times longer for a product in bfloat16. So the
emulation computes these in float32 and rounds the result, as tensor cores do. What that
allocates in float32 is not measured: it happens in a thread that the profiler does not see.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from inplace_ops.recompute.costs import FLOPS_PER_BYTE


class Policy(NamedTuple):
    """A dtype policy.

    Attributes:
        weights: The dtype of parameters and inputs.
        autocast: Whether forward runs under autocast to bfloat16.
        excluded: Operations that an earlier torch does not cast to float32.
    """

    weights: torch.dtype = torch.float32
    autocast: bool = False
    excluded: tuple[str, ...] = ()

    @property
    def is_float32(self) -> bool:
        """Whether all operations run in float32."""
        return self.weights is torch.float32 and not self.autocast


POLICIES = {
    "float32": Policy(),
    "bfloat16": Policy(weights=torch.bfloat16),
    "CUDA autocast": Policy(autocast=True),
    "CUDA autocast, torch 2.11": Policy(autocast=True, excluded=("rms_norm",)),
}

# AT_FORALL_FP32 in ATen/autocast_mode.h: operations whose inputs CUDA's autocast casts to float32.
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
# AT_FORALL_FP32_SET_OPT_DTYPE: operations that it calls with dtype=float32, if none is given.
SET_DTYPE = (
    *("prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum"),
    *("linalg_vector_norm", "linalg_matrix_norm", "linalg_matrix_norm.str_ord"),
    *("sum", "sum.dim_IntList"),
)
# Convolutions and matrix products, as eager mode and as Inductor calls them.
PRODUCTS = ("convolution", "convolution_backward")
PRODUCTS += tuple(
    f"{name}{out}" for name in ("mm", "addmm", "bmm", "baddbmm") for out in ("", ".out")
)


@contextlib.contextmanager
def emulation(policy: Policy, device: str) -> Iterator[None]:
    """Make autocast on a CPU follow CUDA's policy, and `convert` count CUDA's costs of products.

    Enter it for a whole step: a checkpoint repeats forward in backward, under the same policy.
    """
    costs_of_cuda = {"cpu": FLOPS_PER_BYTE["cuda"]} if device == "cpu" else {}
    with (
        mock.patch.dict(FLOPS_PER_BYTE, costs_of_cuda),
        torch.library._scoped_library("aten", "IMPL") as library,
    ):
        if policy.autocast and device == "cpu":
            for names, kernel in ((CAST_INPUTS, _on_float32), (SET_DTYPE, _with_dtype)):
                for name in names:
                    if name not in policy.excluded and not has_autocast_kernel(name, "CPU"):
                        library.impl(name, kernel(_operation(name)), "AutocastCPU")
        if not policy.is_float32 and device == "cpu":
            with ThreadPoolExecutor(1) as worker:
                _round_products(library, worker)
                yield
        else:
            yield


def autocast(policy: Policy, device: str) -> torch.autocast:
    """Return the autocast context of a forward pass, disabled if the policy has none."""
    return torch.autocast(device, torch.bfloat16, enabled=policy.autocast)


def has_autocast_kernel(name: str, device: str) -> bool:
    """Whether autocast on a device has a kernel for an operation, such as a cast of its inputs."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", f"Autocast{device}")


def _operation(name: str) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _has_16_bits(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def _cast(value: Any) -> Any:
    return value.float() if _has_16_bits(value) else value


def _on_float32(op: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with _below_autocast():
            return op(*map(_cast, args), **{name: _cast(value) for name, value in kwargs.items()})

    return run


def _round_products(library: torch.library.Library, worker: ThreadPoolExecutor) -> None:
    kernels = {name: torch.library.get_kernel(f"aten::{name}", "CPU") for name in PRODUCTS}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.13 warns of a kernel that is replaced
        for name, kernel in kernels.items():
            product = _rounded(kernel, kernels[name.removesuffix(".out")], worker)
            library.impl(name, product, "CPU", with_keyset=True, allow_override=True)


def _rounded(
    kernel: Callable[..., Any], without_out: Callable[..., Any], worker: ThreadPoolExecutor
) -> Callable[..., Any]:
    """Return a kernel that computes a product in float32, in the worker, if it has 16 bits."""

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        narrow = [value.dtype for value in args if _has_16_bits(value)]
        if not narrow:
            return kernel.call_boxed(keys, *args, **kwargs)
        out, threads = kwargs.pop("out", None), torch.get_num_threads()
        results: list[Tensor | None] = []

        def compute() -> list[tuple[Any, Any] | None]:
            torch.set_num_threads(threads)
            with torch.no_grad():
                found = without_out.call_boxed(keys, *map(_cast, args), **kwargs)
            results.extend(found if isinstance(found, tuple) else (found,))
            return [None if r is None else (r.shape, r.stride()) for r in results]

        def store(rounded: list[Tensor | None]) -> None:
            for each, result in zip(rounded, results, strict=True):
                if each is not None:
                    each.data.copy_(result)  # no write that autograd would count
            results.clear()  # here, as this thread has allocated them

        sizes = worker.submit(compute).result()
        rounded = [size and torch.empty_strided(*size, dtype=narrow[0]) for size in sizes]
        if out is not None:
            rounded = [out]
        worker.submit(store, rounded).result()
        return rounded[0] if len(rounded) == 1 else tuple(rounded)

    return run


def _with_dtype(op: Callable[..., Any]) -> Callable[..., Any]:
    names = [argument.name for argument in op._schema.arguments]  # type: ignore[attr-defined]

    def run(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        if given.get("dtype") is None and _has_16_bits(args[0]):
            given["dtype"] = torch.float32
        with _below_autocast():
            return op(**given)

    return run


def _below_autocast() -> Any:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    return torch._C._ExcludeDispatchKeyGuard(keys)


def of_dtype(value: Tensor, policy: Policy) -> Tensor:
    """Return an input in the dtype of the policy's weights; indices keep their dtype."""
    return value.to(policy.weights) if value.is_floating_point() else value
