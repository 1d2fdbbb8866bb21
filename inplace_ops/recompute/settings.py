"""What all forward passes of a converted model share, and what observes them."""

from __future__ import annotations

import math
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..memory import Packed
from .nodes import Node
from .weights import KnownWeights

if TYPE_CHECKING:
    from .plan import Plan

MAX_OPS = 4
MAX_KEYS = 2**16  # of specs: see 4 of NOTE [First use] in `verify.py`

SpecKey = tuple[Any, ...]  # what tells a spec from all others of a model


class Settings:
    """State that all forward passes of a converted model share.

    Attributes:
        MIN_BYTES: Smaller tensors are saved as PyTorch saves them.
        max_ops: The most passes over memory that a spec may take: see `costs.py`.
        rejected: The limits from which specs that took more would have been made, rounded up.
        verified: For each spec key, whether the spec reproduced the saved tensor at its first use.
        plan: What the rules have decided, to repeat it: see NOTE [Plans] in `plan.py`.
        weights: Which weights of products can be read in backward.
        warned: The subjects of the warnings that were issued.
    """

    MIN_BYTES = 4096

    def __init__(self, max_ops: int = MAX_OPS) -> None:
        self.max_ops = max_ops
        self.rejected: set[int] = set()
        self.verified: dict[SpecKey, bool] = {}
        self.plan: Plan | None = None
        self.weights = KnownWeights()
        self.warned: set[str] = set()

    def rejects(self, cost: float) -> bool:
        """Whether this cost is above the limit. If so, remember it."""
        if cost <= self.max_ops:
            return False
        self.rejected.add(math.ceil(cost))
        return True

    def warn(self, subject: str, text: str) -> None:
        """Warn once per model and subject. Never raise, even if warnings are errors."""
        if subject not in self.warned:
            self.warned.add(subject)
            with suppress(Warning):
                warnings.warn(f"inplace_ops: {text}", stacklevel=2)


class Observer:
    """Base class for code that observes what the engine does, for example to fill in a report."""

    def created(self, node: Node) -> None:
        """Observe that a node was created."""

    def replaced(self, node: Node, field: str, saved: Tensor, packed: Packed) -> None:
        """Observe that `packed` is saved instead of the tensor `saved`."""

    def activated(self, producer: Node, node: Node, saved: Tensor) -> None:
        """Observe that an activation runs together with the norm before it.

        Args:
            producer: The node of the operation whose output PyTorch's activation would save.
            node: The activation's node.
            saved: A tensor like the one that PyTorch's activation would save.
        """

    def unchanged(self, node: Node, field: str, reason: str) -> None:
        """Observe that a saved tensor stays saved as PyTorch saves it, and why."""
