"""The libraries that the table of integrations shows: a network of each, and the line to add."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from networks import NETWORKS, Network
from torch import nn

from inplace_ops.conversion.library import load


class Integration(NamedTuple):
    """How a library's training is converted.

    Attributes:
        library: The library, and the part of it that the line is for.
        line: What a user adds to a training.
        script: The script in `examples/`.
    """

    library: str
    line: str
    script: str


def deeplab() -> nn.Module:
    """Return torchvision's DeepLabV3 on a MobileNetV3, without weights to download."""
    arguments = {"weights": None, "weights_backbone": None, "num_classes": 2}
    return load("torchvision:deeplabv3_mobilenet_v3_large", arguments)


# nnU-Net's architecture for volumes, with the widths of its first four stages.
DYNUNET: dict[str, Any] = {"spatial_dims": 3, "in_channels": 1, "out_channels": 2}
DYNUNET |= {"kernel_size": [3] * 4, "strides": [1, 2, 2, 2], "upsample_kernel_size": [2] * 3}
DYNUNET |= {"filters": [32, 64, 128, 256]}

LINE = "inplace_ops.convert(model)"
TRAINER = "inplace_ops.convert(model)  # before Trainer(model)"
INTEGRATIONS = {
    "EfficientNet-B0": Integration("timm", LINE, "training_loop.py"),
    "DeepLabV3, MobileNetV3": Integration("torchvision", LINE, "torchvision_segmentation.py"),
    "YOLOv8n": Integration(
        "Ultralytics",
        "inplace_ops.convert(trainer.model)  # in a callback",
        "ultralytics_callback.py",
    ),
    "DynUNet in 3-D": Integration("MONAI", LINE, "monai_unet3d.py"),
    "conditional U-Net": Integration("diffusers", "inplace_ops.convert(unet)", "diffusers_unet.py"),
    "Llama, 2 layers": Integration("transformers' Trainer", TRAINER, "transformers_trainer.py"),
    "Llama, LoRA": Integration(
        "peft, `--lora`",
        "inplace_ops.convert(get_peft_model(model, config))",
        "transformers_trainer.py",
    ),
    "ResNet-50": Integration(
        "Lightning",
        "inplace_ops.convert(module.model)  # in a callback",
        "lightning_callback.py",
    ),
}
OWN = {
    "DeepLabV3, MobileNetV3": Network(
        deeplab, small=(2, 3, 96, 96), cpu=(4, 3, 224, 224), blocks=("InvertedResidual",)
    ),
    "DynUNet in 3-D": Network(
        partial(load, "monai:DynUNet", DYNUNET),
        small=(1, 1, 32, 32, 32),
        cpu=(1, 1, 64, 64, 64),
        blocks=("UnetBasicBlock",),
    ),
}
INTEGRATED = {name: (NETWORKS | OWN)[name] for name in INTEGRATIONS}
