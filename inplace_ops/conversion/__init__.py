"""Conversion of models: `convert`, `analyze`, `revert`, `reverted` and their reports."""

from .convert import analyze, convert, revert, reverted
from .report import Auxiliary, Candidate, Remaining, Replaced, Report
from .verify import VerificationError

__all__ = [
    "Auxiliary",
    "Candidate",
    "Remaining",
    "Replaced",
    "Report",
    "VerificationError",
    "analyze",
    "convert",
    "revert",
    "reverted",
]
