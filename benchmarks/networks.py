"""Networks for bench_bytes.py and bench_networks.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from llama_blocks import LlamaBlocks
from measure import Failures
from torch import Tensor, nn
from unets import DiffusionUNet, SegmentationUNet
from yolo_like import YoloLike

from inplace_ops.conversion.library import ModelNotFoundError, load

VOCABULARY = 1000
LLAMA: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1792, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": VOCABULARY}


@dataclass(frozen=True)
class Network:
    """A network, and the shapes of its input; a shape of two dimensions is a batch of tokens.

    Attributes:
        build: Makes the network, with random weights.
        small: The input shape for counting bytes, which follow from shapes alone.
        cpu: The input shape for timing steps on a CPU; None if the network is only counted.
        cuda: The input shape for timing steps on a GPU; None if the network is not timed there.
        blocks: Class names of the modules that "checkpoint of each block" checkpoints.
    """

    build: Callable[[], nn.Module]
    small: tuple[int, ...]
    cpu: tuple[int, ...] | None = None
    cuda: tuple[int, ...] | None = None
    blocks: tuple[str, ...] = ()

    def input(self, shape: tuple[int, ...], device: str) -> Tensor:
        """Return a random input."""
        if len(shape) == 2:
            return torch.randint(VOCABULARY, shape, device=device)
        return torch.randn(shape, device=device)


def resnet50() -> nn.Module:
    """Return torchvision's ResNet-50, with the last norm's weight in each block at 0.25.

    With torchvision's initial weights, 1 there, the gradients are noise: those in bfloat16 are
    unrelated to those in float64.
    """
    network = load("torchvision:resnet50")
    for name, module in network.named_modules():
        if name.endswith(".bn3"):
            nn.init.constant_(module.weight, 0.25)
    return network


NETWORKS = {
    "EfficientNet-B0": Network(
        partial(load, "timm:efficientnet_b0"),
        small=(2, 3, 128, 128),
        cpu=(4, 3, 224, 224),
        cuda=(32, 3, 224, 224),
        blocks=("DepthwiseSeparableConv", "InvertedResidual"),
    ),
    "MobileNetV2": Network(partial(load, "torchvision:mobilenet_v2"), small=(2, 3, 128, 128)),
    "ResNet-50": Network(
        resnet50,
        small=(2, 3, 128, 128),
        cpu=(4, 3, 224, 224),
        cuda=(32, 3, 224, 224),
        blocks=("Bottleneck",),
    ),
    "YOLOv8n": Network(
        partial(load, "ultralytics:yolov8n.yaml"),
        small=(2, 3, 160, 160),
        cpu=(4, 3, 448, 448),
        cuda=(32, 3, 640, 640),
        blocks=("Conv", "C2f", "SPPF"),
    ),
    "YOLO-like": Network(  # where Ultralytics is not installed
        YoloLike,
        small=(2, 3, 160, 160),
        cuda=(32, 3, 640, 640),
        blocks=("ConvNormAct", "C2f", "SPPF"),
    ),
    "DenseNet-121": Network(partial(load, "torchvision:densenet121"), small=(2, 3, 128, 128)),
    "diffusion U-Net": Network(
        DiffusionUNet,
        small=(2, 3, 64, 64),
        cpu=(4, 3, 112, 112),
        cuda=(32, 3, 128, 128),
        blocks=("_Residual",),
    ),
    "nnU-Net-like": Network(
        SegmentationUNet,
        small=(2, 3, 96, 96),
        cpu=(4, 3, 112, 112),
        cuda=(32, 3, 256, 256),
        blocks=("_Twice",),
    ),
    "ViT-S/16": Network(
        partial(load, "timm:vit_small_patch16_224"),
        small=(2, 3, 224, 224),
        cpu=(4, 3, 224, 224),
        cuda=(32, 3, 224, 224),
        blocks=("Block",),
    ),
    "ConvNeXt-T": Network(partial(load, "timm:convnext_tiny"), small=(2, 3, 128, 128)),
    "Swin-T": Network(partial(load, "timm:swin_tiny_patch4_window7_224"), small=(2, 3, 224, 224)),
    "SqueezeNet 1.1": Network(partial(load, "torchvision:squeezenet1_1"), small=(2, 3, 128, 128)),
    "Llama, 2 layers": Network(
        partial(load, "transformers:LlamaForCausalLM", LLAMA), small=(4, 256)
    ),
    "Llama blocks": Network(
        LlamaBlocks,
        small=(2, 64, 512),
        cpu=(4, 256, 512),
        cuda=(32, 512, 512),
        blocks=("DecoderLayer",),
    ),
}


def rows_of_networks(
    names: Iterable[str],
    policies: Sequence[str],
    measure: Callable[[str, str], list[dict[str, Any]]],
    failures: Failures,
) -> Iterator[dict[str, Any]]:
    """Yield the rows of each network in each policy; skip networks whose library is missing."""
    for name in names:
        for policy in policies:
            rows: list[dict[str, Any]] = []
            with failures.recorded(f"{name}, {policy}"):
                try:
                    rows = measure(name, policy)
                except ModelNotFoundError as error:
                    print(f"{name}: skipped: {error}", flush=True)
            yield from rows
