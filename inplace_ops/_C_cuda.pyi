from collections.abc import Callable
from typing import Any

calls: dict[str, Callable[..., Any]]
cuda_version: int
cuda_architectures: str
