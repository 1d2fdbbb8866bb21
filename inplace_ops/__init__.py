"""In-place activations that keep a few bits per element for backward."""

from .conversion import Report, Site, VerificationError, analyze, convert, revert
from .functional import leaky_relu_, relu6_, relu_, silu_
from .memory import saved_bytes
from .modules import LeakyReLU, ReLU, ReLU6, SiLU

__version__ = "0.1.0"
__all__ = [
    "LeakyReLU",
    "ReLU",
    "ReLU6",
    "Report",
    "SiLU",
    "Site",
    "VerificationError",
    "analyze",
    "convert",
    "leaky_relu_",
    "relu6_",
    "relu_",
    "revert",
    "saved_bytes",
    "silu_",
]
