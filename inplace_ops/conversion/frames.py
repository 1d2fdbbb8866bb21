"""Where in Python's code the present call comes from."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType

import torch

from .. import _ops

_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_PACKAGE = f"{Path(_ops.__file__).parent}{os.sep}"


def _first_outside(files: tuple[str, ...], frame: FrameType) -> FrameType:
    """The first frame from this one on whose file begins otherwise, or else the outermost."""
    while frame.f_back is not None and frame.f_code.co_filename.startswith(files):
        frame = frame.f_back
    return frame


CallSite = tuple[tuple[str, int, int], ...]


def call_site() -> CallSite:
    """Where in the model's code the present call of a module is.

    Of each function from the one that calls it to the forward of the module around, or to what else
    PyTorch calls, as a checkpoint: the name, the first line and the instruction.
    """
    frame: FrameType | None = _first_outside((_PACKAGE, _TORCH), sys._getframe(1))
    found = []
    while frame is not None and not frame.f_code.co_filename.startswith(_TORCH):
        found.append((frame.f_code.co_name, frame.f_code.co_firstlineno, frame.f_lasti))
        frame = frame.f_back
    return tuple(found)


# Where torch.nn is no more than on the way to whoever calls an activation.
_MODULES = f"{_TORCH}nn{os.sep}modules{os.sep}"
_ON_THE_WAY = frozenset(f"{_MODULES}{name}.py" for name in ("activation", "container", "module"))


def line_that_calls() -> tuple[str, bool]:
    """File and line of the innermost caller that is no layer around PyTorch's functions.

    With whether it is PyTorch's own: a module of torch.nn that calls them, as a transformer's.
    """
    frame = sys._getframe(1)
    while _is_passed_over(frame.f_code.co_filename) and frame.f_back is not None:
        frame = frame.f_back
    file = frame.f_code.co_filename
    return f"{_shown(file)}:{frame.f_lineno}", file.startswith(_TORCH)


# What PyTorch puts around `__torch_dispatch__`.
_AROUND_DISPATCH = (_PACKAGE, f"{_TORCH}_compile.py", f"{_TORCH}_dynamo{os.sep}eval_frame.py")


def is_called_by_autograd() -> bool:
    """Whether backward itself runs the present operation, and no hook of somebody's in it."""
    frame = _first_outside(_AROUND_DISPATCH, sys._getframe(1))
    # In a thread of autograd's own there is nothing below.
    return frame.f_code.co_filename.startswith((*_AROUND_DISPATCH, f"{_TORCH}autograd"))


def is_in_a_transform() -> bool:
    """Whether the present operation is inside of a torch.func transform, unseen by itself."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if frame.f_code.co_filename.startswith(f"{_TORCH}_functorch{os.sep}"):
            return True
        frame = frame.f_back
    return False


def _is_passed_over(file: str) -> bool:
    if file.startswith(_MODULES):
        return file in _ON_THE_WAY
    return file.startswith((_TORCH, _PACKAGE))


def _shown(file: str) -> str:
    """The file as seen from where Python found it, as "timm/models/mobilevit.py"."""
    folders = [os.path.abspath(folder) for folder in sys.path]
    parents = [folder for folder in folders if file.startswith(f"{folder}{os.sep}")]
    if not parents:
        return os.path.join(*Path(file).parts[-2:])
    return os.path.relpath(file, max(parents, key=len))
