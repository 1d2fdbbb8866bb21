"""Models of other libraries, with random weights and inputs, for bench_models.py.

- timm: the two smallest models of each family, by parameters times pixels, that have at most 200
  million parameters.
- torchvision: the two smallest of each family of classifiers, and the smallest of each family of
  segmentation, detection, video and optical flow, by parameters.
- Ultralytics: the smallest of each family and task, in model_tables.py like the others.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from model_tables import (
    DIFFUSERS,
    MONAI,
    PEFT,
    SEGMENTATION,
    SIDES,
    TRANSFORMERS,
    ULTRALYTICS,
    MakeInputs,
    images,
)
from torch import nn

from inplace_ops.conversion.library import load

MOST_PARAMETERS = 200_000_000  # three copies of a model train at once, in each of two processes


class Entry(NamedTuple):
    """A model, and the arguments of its forward.

    Attributes:
        inputs: Candidates for the arguments; the first that the model accepts is used.
        build: Makes the model.
    """

    inputs: MakeInputs
    build: Callable[[], nn.Module]

    def model(self) -> nn.Module:
        """Return the model in training mode, with the same weights at each call."""
        torch.manual_seed(0)
        return self.build().train()


def _loaded(name: str, inputs: MakeInputs, arguments: Mapping[str, Any] | None = None) -> Entry:
    """Return the entry of a model that `load` builds, with all parameters requiring grad."""
    return Entry(inputs, lambda: load(name, arguments).requires_grad_(True))


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
    arguments = None
    if config.fixed_input_size and own > SIDES[-1]:  # segmentation models, which would take hours
        sides, arguments = [224], {"img_size": 224}
    return _loaded(f"timm:{name}", images(sides, channels=channels), arguments)


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


def _segmentation_entry(name: str) -> Entry:
    architecture, encoder = name.split()
    arguments = {"encoder_name": encoder, "encoder_weights": None, "classes": 2}
    return _loaded(f"segmentation_models_pytorch:{architecture}", images((128, 224)), arguments)


def _peft_entry(name: str) -> Entry:
    """Return the entry of an adapted transformer, whose own weights are frozen."""
    transformer, config, arguments = PEFT[name]
    configuration, inputs = TRANSFORMERS[transformer]

    def build() -> nn.Module:
        peft = importlib.import_module("peft")
        model = load(f"transformers:{transformer}", configuration)
        return peft.get_peft_model(model, getattr(peft, config)(**arguments))

    return Entry(inputs, build)


class Library(NamedTuple):
    """A library: the names of its models to train, and the entry of a name, also of others."""

    names: Callable[[], Iterable[str]]
    entry: Callable[[str], Entry]


def _library_of(name: str, table: Mapping[str, tuple[dict[str, Any], MakeInputs]]) -> Library:
    """Return the library of a table: by model, the arguments that build it, and its inputs."""

    def entry(model: str) -> Entry:
        arguments, inputs = table[model]
        return _loaded(f"{name}:{model}", inputs, arguments)

    return Library(table.keys, entry)


LIBRARIES = {
    "timm": Library(_timm_names, _timm_entry),
    "torchvision": Library(_torchvision_names, _torchvision_entry),
    "ultralytics": _library_of("ultralytics", ULTRALYTICS),
    "segmentation_models_pytorch": Library(lambda: SEGMENTATION, _segmentation_entry),
    "peft": Library(lambda: PEFT, _peft_entry),
    "transformers": _library_of("transformers", TRANSFORMERS),
    "diffusers": _library_of("diffusers", DIFFUSERS),
    "monai": _library_of("monai", MONAI),
}


def entry_of(name: str) -> Entry:
    """Return the entry of LIBRARY:NAME; timm and torchvision models outside the lists work too."""
    library, _, model = name.partition(":")
    return LIBRARIES[library].entry(model)


def names_of(library: str) -> list[str]:
    """Return the names of all models of a library, as LIBRARY:NAME."""
    return [f"{library}:{name}" for name in LIBRARIES[library].names()]
