from typing import TypedDict

class _Numbers(TypedDict):
    default_bits: dict[str, dict[str, int]]
    derivative_steps: dict[int, float]

activations: dict[str, _Numbers]
built_with_torch: str
