from collections.abc import Callable
from typing import Any, Literal, TypedDict

class _Numbers(TypedDict):
    default_bits: dict[Literal["mask", "output", "derivative"], dict[str, int]]
    derivative_steps: dict[int, float]

activations: dict[str, _Numbers]
built_with_torch: str
calls: dict[str, Callable[..., Any]]
layout: Callable[[Any], bytes | None] | None
