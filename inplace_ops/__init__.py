"""Less activation memory in training: in-place activations, and models that recompute.

The in-place activations save a few bits per element for backward. `convert` lets a model recompute
tensors in backward that PyTorch would save.
"""

from importlib import metadata as _metadata

from . import torch_compile as torch_compile  # registers the ops' implementations in compiled code
from .conversion import (
    Remaining,
    Replaced,
    Report,
    VerificationError,
    analyze,
    convert,
    revert,
    reverted,
)
from .functional import gelu_, hardswish_, leaky_relu_, mish_, relu6_, relu_, silu_
from .memory import saved_bytes
from .modules import GELU, Hardswish, LeakyReLU, Mish, ReLU, ReLU6, SiLU

try:
    __version__ = _metadata.version("inplace_ops")
except _metadata.PackageNotFoundError:  # on PYTHONPATH, but not installed
    __version__ = "0+unknown"

__all__ = [
    "GELU",
    "Hardswish",
    "LeakyReLU",
    "Mish",
    "ReLU",
    "ReLU6",
    "Remaining",
    "Replaced",
    "Report",
    "SiLU",
    "VerificationError",
    "analyze",
    "convert",
    "gelu_",
    "hardswish_",
    "leaky_relu_",
    "mish_",
    "relu6_",
    "relu_",
    "revert",
    "reverted",
    "saved_bytes",
    "silu_",
]
