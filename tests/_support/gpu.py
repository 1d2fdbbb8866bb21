"""What tests on a GPU share: dtypes, memory formats, backends, memory, synchronization."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

HALF, BFLOAT, FLOAT, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
Result = TypeVar("Result")
CONTIGUOUS, CHANNELS_LAST = torch.contiguous_format, torch.channels_last

on_a_gpu = [
    pytest.mark.parametrize("device", ["cuda"], indirect=True),
    pytest.mark.usefixtures("_deterministic_cudnn"),
    # A parameter is used on two streams in turn; PyTorch then waits, and is right.
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning"),
    # A 16-bit RMS norm has weights in float32, as under autocast before torch 2.12.
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning"),
]


def in_both_formats(shapes: dict[str, tuple[int, ...]]) -> pytest.MarkDecorator:
    """Parametrize by name and memory format: channels_last only for images."""
    found = [pytest.param(name, CONTIGUOUS, id=name) for name in shapes]
    images = [name for name, shape in shapes.items() if len(shape) == 4]
    found += [pytest.param(name, CHANNELS_LAST, id=f"{name}-channels_last") for name in images]
    return pytest.mark.parametrize(("name", "memory_format"), found)


BACKENDS = {
    SDPBackend.FLASH_ATTENTION: "ScaledDotProductFlashAttentionBackward0",
    SDPBackend.EFFICIENT_ATTENTION: "ScaledDotProductEfficientAttentionBackward0",
    SDPBackend.CUDNN_ATTENTION: "ScaledDotProductCudnnAttentionBackward0",
}
each_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)


@contextmanager
def only(backend: SDPBackend) -> Iterator[None]:
    """Let attention use this backend alone; skip the test if it is not available."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns for each backend that it does not use
        try:
            with sdpa_kernel(backend):
                yield
        except RuntimeError as error:
            if "No available kernel" in str(error) or "No viable backend" in str(error):
                pytest.skip(f"{backend.name}: {error}")
            raise


@contextmanager
def fast_products(tf32: bool, benchmark: bool) -> Iterator[None]:
    """Let products run as in training.

    Args:
        tf32: Whether float32 products round their operands to TF32's 10 bits of mantissa.
        benchmark: Whether cuDNN measures its algorithms, and takes the fastest.
    """
    kept = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        with torch.backends.cudnn.flags(
            enabled=True, benchmark=benchmark, deterministic=False, allow_tf32=tf32
        ):
            yield
    finally:
        torch.set_float32_matmul_precision(kept)


@contextmanager
def no_synchronization() -> Iterator[None]:
    """Let operations that wait for the GPU raise, as far as PyTorch detects them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that it does not detect every synchronization
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def captured(
    run: Callable[[], Result], warm_up: Callable[[], object]
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Return a CUDA graph of `run`, and the tensors that its replays write.

    The warm-up loads the kernels that are captured.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        warm_up()
    torch.cuda.current_stream().wait_stream(side)
    gc.collect()  # freeing another test's graph during the capture would end it
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return graph, result


def requested_bytes() -> int:
    """Return the bytes that are now allocated, as requested, without the allocator's rounding."""
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def free_earlier_tensors(device: torch.device) -> None:
    """Free what earlier tests have left, before two readings of the allocated memory.

    Otherwise it may be freed between the readings:

    - garbage, by the garbage collector;
    - the graph of the last backward, by autograd's thread for the device: that thread may keep it
      until it runs again, and frees it after backward has returned;
    - memory that was used on another stream, by the allocator's next call after that stream has
      finished.
    """
    gc.collect()
    small = torch.ones((), device=device, requires_grad=True)
    torch.autograd.grad(small * 1, small)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # the allocator frees what was used on other streams
    before = None
    while before != requested_bytes():  # until autograd's thread is idle
        before = requested_bytes()
        time.sleep(0.02)
