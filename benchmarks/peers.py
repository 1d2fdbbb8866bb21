"""What bench_peers.py compares: networks and what runs them, and what others have published."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from llama_blocks import LlamaBlocks
from torch import Tensor, nn
from unets import DiffusionUNet, SegmentationUNet
from whole_models import (
    IN_PLACE,
    OUT_OF_PLACE,
    checkpointed,
    compiled,
    with_activations_out_of_place,
)

import inplace_ops
from inplace_ops.conversion.library import load


def resnet50() -> nn.Module:
    """torchvision's, with shortcuts that count for more, as in trained networks.

    With random weights alone its gradients are noise: in bfloat16 they have nothing in common with
    those in float64.
    """
    network = load("torchvision:resnet50")
    for name, module in network.named_modules():
        if name.endswith(".bn3"):
            nn.init.constant_(module.weight, 0.25)
    return network


class Network(NamedTuple):
    """A network, the classes of the blocks that a checkpoint takes, and the shape of one input."""

    build: Callable[[], nn.Module]
    blocks: tuple[str, ...]
    shapes: dict[str, tuple[int, ...]]


def images(cpu: int, cuda: int, quick: int = 64) -> dict[str, tuple[int, ...]]:
    """Images of these sides."""
    return {"cpu": (3, cpu, cpu), "cuda": (3, cuda, cuda), "quick": (3, quick, quick)}


NETWORKS = {
    "EfficientNet-B0": Network(
        partial(load, "timm:efficientnet_b0"),
        ("DepthwiseSeparableConv", "InvertedResidual"),
        images(224, 224),
    ),
    "ResNet-50": Network(resnet50, ("Bottleneck",), images(224, 224)),
    "YOLOv8n": Network(
        partial(load, "ultralytics:yolov8n.yaml"), ("Conv", "C2f", "SPPF"), images(448, 640)
    ),
    "ViT-S/16": Network(
        partial(load, "timm:vit_small_patch16_224"), ("Block",), images(224, 224, 224)
    ),
    "Llama blocks": Network(
        LlamaBlocks, ("DecoderLayer",), {"cpu": (256, 512), "cuda": (512, 512), "quick": (64, 512)}
    ),
    "diffusion U-Net": Network(DiffusionUNet, ("_Residual",), images(112, 128)),
    "nnU-Net-like": Network(SegmentationUNet, ("_Twice",), images(112, 256)),
}
BATCH = {"cpu": 4, "cuda": 32, "quick": 2}


class Case(NamedTuple):
    """A network in training mode, its input, and what variants of it are made from."""

    network: nn.Module
    x: Tensor
    blocks: tuple[str, ...]


class Variant(NamedTuple):
    """A model, and how its forward is called."""

    model: nn.Module
    run: Callable[[Tensor], Any]


def eager(model: nn.Module) -> Variant:
    """The model as it is."""
    return Variant(model, model)


def out_of_place(case: Case) -> nn.Module:
    """PyTorch's activations."""
    return with_activations_out_of_place(case.network)


def in_place(case: Case) -> nn.Module:
    """PyTorch's activations, in place where the network's author has them so."""
    return copy.deepcopy(case.network)


def with_torch_compile(case: Case, budget: float) -> Variant:
    """Compiled, from the network out of place: the compiler decides what is written where."""
    model = out_of_place(case)
    return Variant(model, compiled(model, budget))


def converted(case: Case, max_ops: int) -> Variant:
    """The network after convert."""
    model = copy.deepcopy(case.network)
    inplace_ops.convert(model, max_ops=max_ops)
    return eager(model)


VARIANTS: dict[str, Callable[[Case], Variant]] = {
    OUT_OF_PLACE: lambda case: eager(out_of_place(case)),
    IN_PLACE: lambda case: eager(in_place(case)),
    "torch.compile": partial(with_torch_compile, budget=1.0),
    "torch.compile, memory budget 0.5": partial(with_torch_compile, budget=0.5),
    "checkpoint of each block": lambda case: eager(checkpointed(in_place(case), case.blocks)),
    "convert": partial(converted, max_ops=4),
    "convert, max_ops=8": partial(converted, max_ops=8),
}

# Rota Bulò, Porzi, Kontschieder, CVPR 2018, arXiv 1712.02616: the abstract, and its figure of a
# residual block with identity mapping, over a standard BatchNorm and an activation in place.
PUBLISHED = [
    {
        "network": "a residual block: 3 buffers instead of 6",
        "variant": "inplace_abn",
        "held_over_torch_in_place": "0.5",
    },
    {
        "network": "the paper's networks, at best",
        "variant": "inplace_abn",
        "held_over_torch_in_place": "0.5",
        "ratio_to_torch_in_place": "1.008 to 1.02",
    },
]
SOURCE = "published in 2018: research.mapillary.com/publication/cvpr18a"
