"""Hooks on gradients that record what they see, and change it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Hooks:
    """Hooks on gradients: what they saw, in their order."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Tensor]] = []
        self.retained: list[Tensor] = []

    def on(self, tensor: Tensor, name: str, factor: float = 2.0) -> Any:
        """Register a hook on a tensor that multiplies its gradient."""

        def hook(grad: Tensor) -> Tensor:
            self.seen.append((name, grad.clone()))
            return grad * factor

        return tensor.register_hook(hook)

    def at(self, place: str, module: nn.Module) -> None:
        """Let a module register a hook on its output, or on its input before forward."""
        kind = place.partition(" of ")[0]
        if kind == "input":
            module.register_forward_pre_hook(lambda m, args: void(self.on(args[0], place)))
        elif kind == "removed hook":
            module.register_forward_hook(lambda m, a, y: void(self.on(y, place).remove()))
        elif kind == "retained gradient":
            module.register_forward_hook(lambda m, a, y: void(self.retain(y)))
        else:
            module.register_forward_hook(lambda m, a, y: void(self.on(y, place)))

    def retain(self, tensor: Tensor) -> None:
        tensor.retain_grad()
        self.retained.append(tensor)

    def assert_saw(self, expected: Hooks, tolerance: float = 1e-4) -> None:
        assert [name for name, _ in self.seen] == [name for name, _ in expected.seen]
        pairs = [
            (mine, theirs) for (_, mine), (_, theirs) in zip(self.seen, expected.seen, strict=True)
        ]
        pairs += [
            (mine.grad, theirs.grad)
            for mine, theirs in zip(self.retained, expected.retained, strict=True)
        ]
        for mine, theirs in pairs:
            assert (mine is None) == (theirs is None)
            if mine is not None:
                torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


def void(_: Any) -> None:
    """Return None, as a hook does that changes nothing."""
