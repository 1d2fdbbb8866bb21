"""Which activations of a model may be put in place, and putting them there."""

from .convert import analyze, convert, revert, reverted
from .report import Report, Site
from .verify import VerificationError

__all__ = ["Report", "Site", "VerificationError", "analyze", "convert", "revert", "reverted"]
