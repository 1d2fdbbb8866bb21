"""Models of installed libraries, by name and with random weights."""

from __future__ import annotations

import importlib

from torch import nn

LOADERS_HELP = (
    "LIBRARY:NAME, for example timm:efficientnet_b0, torchvision:resnet50, "
    "ultralytics:yolov8n.yaml, transformers:ResNetModel (with its default configuration), or "
    "MODULE:FUNCTION for any function that returns a model"
)


class ModelNotFoundError(LookupError):
    """There is no such library, or no such model in it."""


def load(name: str) -> nn.Module:
    """Build the model that `name`, in the form LIBRARY:NAME, stands for.

    Raises:
        ModelNotFoundError: If the library is not installed or does not have it.
    """
    library, separator, model = name.partition(":")
    if not separator:
        raise ModelNotFoundError(f"expected LIBRARY:NAME, got {name!r}")
    try:
        if library == "ultralytics":
            return importlib.import_module("ultralytics.nn.tasks").DetectionModel(
                model, verbose=False
            )
        module = importlib.import_module(library)
        if library == "timm":
            return module.create_model(model)
        if library == "torchvision":
            return module.models.get_model(model)
        builder = getattr(module, model)
    except (ImportError, AttributeError) as error:
        raise ModelNotFoundError(f"{name}: {error}") from error
    if library == "transformers":
        return builder(builder.config_class())
    return builder()
