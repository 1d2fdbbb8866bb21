"""Less activation memory in training: in-place activations, and models that recompute.

The in-place activations save a few bits per element for backward. `convert` lets a model recompute
tensors in backward that PyTorch would save.
"""

from importlib import metadata as _metadata

from . import (
    conversion,
    functional,
    modules,
    torch_compile as torch_compile,  # registers the ops' implementations in compiled code
)
from .conversion import *  # noqa: F403
from .functional import *  # noqa: F403
from .modules import *  # noqa: F403
from .saved import saved_bytes

try:
    __version__ = _metadata.version("inplace_ops")
except _metadata.PackageNotFoundError:  # on PYTHONPATH, but not installed
    __version__ = "0+unknown"

__all__ = ["saved_bytes"]
__all__ += conversion.__all__
__all__ += functional.__all__
__all__ += modules.__all__
