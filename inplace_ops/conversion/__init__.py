"""Conversion of models: `convert`, `analyze`, `revert`, `reverted` and their reports."""

from .convert import analyze, convert, revert, reverted
from .report import Auxiliary, Remaining, Replaced, Report
from .verify import VerificationError

__all__ = [
    "Auxiliary",
    "Remaining",
    "Replaced",
    "Report",
    "VerificationError",
    "analyze",
    "convert",
    "revert",
    "reverted",
]
