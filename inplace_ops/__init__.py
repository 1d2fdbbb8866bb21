"""In-place ReLU, LeakyReLU and SiLU that keep a few bits an element for backward."""

from .conversion import Report, Site, VerificationError, analyze, convert, revert
from .functional import leaky_relu_, relu_, silu_
from .memory import saved_bytes
from .modules import LeakyReLU, ReLU, SiLU

__version__ = "0.1.0"
__all__ = [
    "LeakyReLU",
    "ReLU",
    "Report",
    "SiLU",
    "Site",
    "VerificationError",
    "analyze",
    "convert",
    "leaky_relu_",
    "relu_",
    "revert",
    "saved_bytes",
    "silu_",
]
