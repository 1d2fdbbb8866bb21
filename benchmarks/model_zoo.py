"""Models of other libraries, with random weights and inputs, for bench_models.py.

- timm: the two smallest models of each family, by parameters times pixels, that have at most 200
  million parameters.
- torchvision: the two smallest of each family of classifiers, and the smallest of each family of
  segmentation, detection, video and optical flow, by parameters.
- Ultralytics: the smallest of each family and task.
- transformers, diffusers, MONAI, segmentation_models_pytorch and peft: model_tables.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from model_tables import (
    DIFFUSERS,
    MONAI,
    PEFT,
    SEGMENTATION,
    SIDES,
    TRANSFORMERS,
    MakeInputs,
    images,
)
from torch import nn

from inplace_ops.conversion.library import load

MOST_PARAMETERS = 200_000_000  # three copies of a model train at once, in each of two processes


@dataclass(frozen=True)
class Entry:
    """A model, and the arguments of its forward.

    Attributes:
        name: LIBRARY:NAME.
        inputs: Candidates for the arguments; the first that the model accepts is used.
        build: Makes the model.
    """

    name: str
    inputs: MakeInputs
    build: Callable[[], nn.Module]

    def model(self) -> nn.Module:
        """Return the model in training mode, with the same weights at each call."""
        torch.manual_seed(0)
        return self.build().train()


def _loaded(name: str, inputs: MakeInputs, arguments: Mapping[str, Any] | None = None) -> Entry:
    """Return the entry of a model that `load` builds, with all parameters requiring grad."""
    return Entry(name, inputs, lambda: load(name, arguments).requires_grad_(True))


def _smallest(size: Callable[[str], int], names: Iterable[str], count: int) -> list[str]:
    """Return the smallest models; models of the same size are ordered by name."""
    return sorted(sorted(names), key=size)[:count]


def _timm_names() -> Iterator[str]:
    """Yield the names of timm's models; takes minutes, since it builds all of them on meta."""
    library = importlib.import_module("timm")

    @cache
    def parameters(name: str) -> int:
        with torch.device("meta"):
            return sum(p.numel() for p in library.create_model(name).parameters())

    def size(name: str) -> int:
        _, height, width = library.get_pretrained_cfg(name).input_size
        return height * width * parameters(name)

    for family in library.list_modules():
        for name in _smallest(size, library.list_models(module=family), 2):
            if parameters(name) <= MOST_PARAMETERS:
                yield name


def _timm_entry(name: str) -> Entry:
    """Return the entry of a model at its fixed image size, or at the sizes to try."""
    config = importlib.import_module("timm").get_pretrained_cfg(name)
    channels, _, own = config.input_size
    sides = [own] if config.fixed_input_size else SIDES
    if config.fixed_input_size and own > SIDES[-1]:  # segmentation models, which would take hours
        return _loaded(f"timm:{name}", images([224], channels=channels), {"img_size": 224})
    return _loaded(f"timm:{name}", images(sides, channels=channels))


def _flow_inputs() -> Iterator[dict[str, Any]]:
    yield {f"image{i}": torch.randn(2, 3, 128, 128) for i in (1, 2)}


def _clips() -> Iterator[dict[str, Any]]:
    for frames, side in ((8, 64), (8, 224), (16, 224)):
        yield {"": torch.randn(2, 3, frames, side, side)}


def _detection_inputs() -> Iterator[dict[str, Any]]:
    target = {
        "boxes": torch.tensor([[10.0, 20.0, 60.0, 70.0], [30.0, 10.0, 90.0, 50.0]]),
        "labels": torch.tensor([1, 1]),
        "masks": torch.ones(2, 96, 96, dtype=torch.uint8),
        "keypoints": torch.full((2, 17, 3), 40.0),
    }
    yield {"images": [torch.rand(3, 96, 96) for _ in range(2)], "targets": [target, dict(target)]}


# By package: the number of models of each family, and their inputs. `quantization` is left out: its
# models are for inference.
TORCHVISION: dict[str, tuple[int, MakeInputs]] = {
    "torchvision.models": (2, images()),
    "torchvision.models.segmentation": (1, images()),
    "torchvision.models.detection": (1, _detection_inputs),
    "torchvision.models.video": (1, _clips),
    "torchvision.models.optical_flow": (1, _flow_inputs),
}


def _torchvision_names() -> Iterator[str]:
    models = importlib.import_module("torchvision.models")

    def count_parameters(name: str) -> int:
        return min(weights.meta["num_params"] for weights in models.get_model_weights(name))

    for package, (count, _) in TORCHVISION.items():
        families: dict[str, list[str]] = {}
        for name in models.list_models(importlib.import_module(package)):
            families.setdefault(_torchvision_module(name), []).append(name)
        for names in families.values():
            yield from _smallest(count_parameters, names, count)


def _torchvision_entry(name: str) -> Entry:
    package = _torchvision_module(name).rpartition(".")[0]
    _, inputs = TORCHVISION[package]
    arguments: dict[str, Any] = {"weights": None}
    if package.endswith((".segmentation", ".detection")):
        arguments["weights_backbone"] = None
    if package.endswith(".detection") and "ssd" not in name:
        arguments |= {"min_size": 96, "max_size": 96}  # the size to which the model resizes images
    if name in ("googlenet", "inception_v3"):
        arguments["init_weights"] = True
    return _loaded(f"torchvision:{name}", inputs, arguments)


def _torchvision_module(name: str) -> str:
    return importlib.import_module("torchvision.models").get_model_builder(name).__module__


ULTRALYTICS = tuple(
    f"{name}.yaml"
    for name in (
        *("yolov3-tiny", "yolov5n", "yolov6n", "yolov8n", "yolov8n-ghost"),
        *("yolov8n-rtdetr", "yolov8n-cls", "yolov8n-seg", "yolov8n-pose", "yolov8n-obb"),
        *("yolov9t", "yolov10n", "yolo11n", "yolo11n-cls", "yolo11n-seg"),
        *("yolo11n-pose", "yolo11n-obb", "yolo12n", "yolo26n", "yolo26n-seg"),
        *("rtdetr-resnet50",),
    )
)


def _ultralytics_entry(name: str) -> Entry:
    return _loaded(f"ultralytics:{name}", images((128, 640)))


def _segmentation_entry(name: str) -> Entry:
    architecture, encoder = name.split()
    library = importlib.import_module("segmentation_models_pytorch")
    arguments = {"encoder_name": encoder, "encoder_weights": None, "classes": 2}
    return Entry(
        f"segmentation_models_pytorch:{name}",
        images((128, 224)),
        partial(getattr(library, architecture), **arguments),
    )


def _peft_entry(name: str) -> Entry:
    """Return the entry of an adapted transformer, whose own weights are frozen."""
    transformer, config, arguments = PEFT[name]
    configuration, inputs = TRANSFORMERS[transformer]

    def build() -> nn.Module:
        peft = importlib.import_module("peft")
        model = load(f"transformers:{transformer}", configuration)
        return peft.get_peft_model(model, getattr(peft, config)(**arguments))

    return Entry(f"peft:{name}", inputs, build)


TABLES = {"transformers": TRANSFORMERS, "diffusers": DIFFUSERS, "monai": MONAI}
# The names of each library's models to train.
LIBRARIES: dict[str, Callable[[], Iterable[str]]] = {
    "timm": _timm_names,
    "torchvision": _torchvision_names,
    "ultralytics": lambda: ULTRALYTICS,
    "segmentation_models_pytorch": lambda: [
        f"{name} {encoder}" for name, encoders in SEGMENTATION.items() for encoder in encoders
    ],
    "peft": lambda: PEFT,
    **{library: table.keys for library, table in TABLES.items()},
}
ENTRIES = {
    "timm": _timm_entry,
    "torchvision": _torchvision_entry,
    "ultralytics": _ultralytics_entry,
    "segmentation_models_pytorch": _segmentation_entry,
    "peft": _peft_entry,
}


def entry_of(name: str) -> Entry:
    """Return the entry of LIBRARY:NAME; timm and torchvision models outside the lists work too."""
    library, _, model = name.partition(":")
    if library in TABLES:
        arguments, inputs = TABLES[library][model]
        return _loaded(name, inputs, arguments)
    return ENTRIES[library](model)


def names_of(library: str) -> list[str]:
    """Return the names of all models of a library, as LIBRARY:NAME."""
    return [f"{library}:{name}" for name in LIBRARIES[library]()]
