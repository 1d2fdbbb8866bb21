"""`convert` and what belongs to it."""

from .convert import analyze, convert, revert, reverted
from .report import Remaining, Replaced, Report
from .verify import VerificationError

__all__ = [
    "Remaining",
    "Replaced",
    "Report",
    "VerificationError",
    "analyze",
    "convert",
    "revert",
    "reverted",
]
