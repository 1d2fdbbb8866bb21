"""What the tests of the recompute engine on a GPU share: dtypes, memory formats, backends."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

HALF, BFLOAT, FLOAT, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
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
