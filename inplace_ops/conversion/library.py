"""Build models of installed libraries by name, with random weights."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

LOADERS_HELP = (
    "LIBRARY:NAME, for example timm:efficientnet_b0, torchvision:resnet50, "
    "ultralytics:yolov8n.yaml, monai:VNet, transformers:ResNetModel (with its default "
    "configuration, changed by --set), or MODULE:FUNCTION for any function that returns a model"
)

# Models of transformers with more parameters are rejected: their default configurations are larger
# than any model that was tried on one machine.
_MAX_PARAMETERS = 10**9
_LIBRARIES = ("monai", "timm", "torchvision", "transformers", "ultralytics")


class ModelNotFoundError(LookupError):
    """Raised if the library or the model is not found, or if the model cannot be built."""


def load(name: str, arguments: Mapping[str, Any] | None = None) -> nn.Module:
    """Build a model of an installed library.

    Args:
        name: The library and the model, in the form LIBRARY:NAME.
        arguments: Keyword arguments of the function that builds the model; for transformers,
            entries of the configuration.

    Raises:
        ModelNotFoundError: If the library is not installed, does not have the model or rejects the
            arguments, or if a model of transformers has more than 10^9 parameters.
    """
    library, separator, model = name.partition(":")
    if not separator:
        raise ModelNotFoundError(f"expected LIBRARY:NAME or MODULE:FUNCTION, got {name!r}")
    if library.endswith(".py") or os.sep in library:
        raise ModelNotFoundError(
            f"{name}: MODULE is the name that Python imports, here {Path(library).stem}; run the "
            "command in the folder that has it"
        )
    try:
        builder = _builder(library, model)
    except AttributeError as error:
        raise ModelNotFoundError(f"{name}: {error}") from error
    except Exception as error:  # an import may fail in any way
        raise ModelNotFoundError(f"{name}: {_failed_import(library, error)}") from error
    try:
        build = partial(builder, **(arguments or {}))
        if library == "transformers":
            _check_size(name, build)
        return build()
    except ModelNotFoundError:
        raise
    except TypeError as error:
        raise ModelNotFoundError(f"{name}: {error}; --set NAME=VALUE gives arguments") from error
    # The errors that libraries raise for an unknown name or for wrong arguments.
    except (ImportError, AttributeError, RuntimeError, ValueError, OSError) as error:
        raise ModelNotFoundError(f"{name}: {error}") from error


def _failed_import(library: str, error: Exception) -> str:
    """Return why a library could not be imported, with the first cause, and the likely remedy."""
    cause: BaseException = error
    while (earlier := cause.__cause__ or cause.__context__) is not None:
        cause = earlier
    causes = [f"{type(each).__name__}: {each}" for each in dict.fromkeys((error, cause))]
    missing = re.search(r"(\S+\.so\S*): cannot open shared object file", str(cause))
    if isinstance(cause, ModuleNotFoundError) and cause.name:
        remedy = f"pip install {cause.name.partition('.')[0]}"
        if cause.name == library not in _LIBRARIES:
            remedy = f"run this in the folder that has {library}.py, or {remedy}"
    elif missing and missing[1].startswith("libGL"):
        remedy = "pip install --force-reinstall --no-deps opencv-python-headless"
    elif missing:
        remedy = f"install the system's package that has {missing[1]}"
    elif library in _LIBRARIES:
        remedy = f"install a version of {library} that fits torch {torch.__version__}"
    else:
        remedy = f"mend what `import {library}` raises"
    return f"importing {library} failed ({', caused by '.join(causes)}); likely remedy: {remedy}"


def _builder(library: str, model: str) -> Callable[..., nn.Module]:
    if library == "ultralytics":
        ultralytics = importlib.import_module("ultralytics")
        family = ultralytics.RTDETR if "rtdetr" in model else ultralytics.YOLO
        return lambda: family(model).model
    module = importlib.import_module("monai.networks.nets" if library == "monai" else library)
    if library == "timm":
        return partial(module.create_model, model)
    if library == "torchvision":
        return partial(module.models.get_model, model)
    builder = getattr(module, model)
    if library == "transformers":
        return lambda **configuration: builder(builder.config_class(**configuration))
    return builder


def _check_size(name: str, build: Callable[[], nn.Module]) -> None:
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in build().parameters())
    if count > _MAX_PARAMETERS:
        raise ModelNotFoundError(
            f"{name} has {count / 1e9:.1f} billion parameters: make it smaller, for example by "
            "--set num_hidden_layers=2 hidden_size=256 intermediate_size=512"
        )
