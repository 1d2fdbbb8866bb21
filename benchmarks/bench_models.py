"""What models hold for backward, with PyTorch's activations and with convert's, and their time.

The models come from timm, torchvision, Ultralytics and transformers, and are two U-Nets, with
random weights. "torch in place" is the model as its library builds it. held: what is allocated
when forward has returned, by the allocator's own events, the outputs with it. peak: the most
allocated at one time in a step of forward and backward. Steps are timed in turn, and each is
compared with that of "torch in place" next to it. `convert` compares gradients on two of the
images, and the gradients of a step are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import copy
import importlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import (
    MIB,
    RESULTS,
    Clock,
    machine,
    memory_of,
    quartiles,
    ratio_quartiles,
    table,
    times_in_turn,
    written_to,
)
from torch import Tensor, nn
from whole_models import IN_PLACE, OUT_OF_PLACE, backward, with_activations_out_of_place

import inplace_ops
from inplace_ops.conversion.library import load

MODELS = (
    "timm:efficientnet_b0",
    "torchvision:efficientnet_v2_s",
    "torchvision:mobilenet_v2",
    "torchvision:mobilenet_v3_large",
    "torchvision:densenet121",
    "torchvision:resnet50",
    "torchvision:vgg16_bn",
    "timm:regnety_016",
    "timm:cspdarknet53",
    "timm:ghostnet_100",
    "timm:mobilevit_xxs",
    "timm:nfnet_l0",
    "torchvision:inception_v3",
    "torchvision:shufflenet_v2_x1_0",
    "torchvision:squeezenet1_1",
    "ultralytics:yolov8n.yaml",
    "ultralytics:yolo11n.yaml",
    "unets:SegmentationUNet",
    "unets:DiffusionUNet",
    "timm:vit_small_patch16_224",
    "timm:convnext_tiny",
    "transformers:LlamaForCausalLM",
)
SIDES = {"ultralytics": 2, "timm:vit": 1.75}  # of the images, times --size, by the name's beginning

# Smaller than by default.
CONFIGURATIONS = {
    "EfficientNetModel": {"width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280},
    "LlamaForCausalLM": {
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "vocab_size": 1000,
    },
}


def build(name: str) -> nn.Module:
    """The model in training mode."""
    library, _, model = name.partition(":")
    if model in CONFIGURATIONS:
        cls = getattr(importlib.import_module(library), model)
        return cls(cls.config_class(**CONFIGURATIONS[model])).train()
    return load(name).train()


VARIANTS: dict[str, dict[str, Any]] = {
    "convert": {},
    "convert, max_ops=8": {"max_ops": 8},
}


def variants(model: nn.Module, x: Tensor, labels: Sequence[str]) -> dict[str, nn.Module]:
    """The model with each of the activations that are compared."""
    converted = {label: copy.deepcopy(model) for label in labels}
    for label, variant in converted.items():
        inplace_ops.convert(variant, x, **VARIANTS[label])
    return {
        OUT_OF_PLACE: with_activations_out_of_place(model),
        IN_PLACE: copy.deepcopy(model),
        **converted,
    }


def gradient(model: nn.Module, run: Callable[[], Any]) -> Tensor:
    """All parameters' gradients of a step, one after the other."""
    torch.manual_seed(0)
    model.zero_grad()
    run()
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return found


def step(model: nn.Module, x: Tensor) -> None:
    """Forward and backward."""
    backward(model(x))


def measured(
    name: str, batch: int, size: int, arguments: argparse.Namespace, clock: Clock
) -> list[dict[str, Any]]:
    """The rows of one model with one input."""
    device = arguments.device
    torch.manual_seed(0)
    model = build(name).to(device)
    factor = next((f for start, f in SIDES.items() if name.startswith(start)), 1)
    side = int(size * factor)
    x = torch.randn(batch, 3, side, side, device=device)
    if "Llama" in name:
        x = torch.randint(0, 1000, (batch, size), device=device)
    compared = variants(model, x[:2], arguments.variants)
    steps = {variant: partial(step, module, x) for variant, module in compared.items()}
    expected = gradient(compared[OUT_OF_PLACE], steps[OUT_OF_PLACE])
    times = times_in_turn(
        steps, arguments.repeats, clock, after=lambda variant: compared[variant].zero_grad()
    )
    memory = {
        variant: (memory_of(partial(module, x), device)[1], memory_of(steps[variant], device)[0])
        for variant, module in compared.items()
    }
    rows = []
    for variant, module in compared.items():
        held, peak = memory[variant]
        distance = (gradient(module, steps[variant]) - expected).norm() / expected.norm()
        first_quartile, median, third_quartile = ratio_quartiles(times[variant], times[IN_PLACE])
        row = {
            "model": name,
            "variant": variant,
            "input": " x ".join(map(str, x.shape)),
            "MiB held": f"{held / MIB:.2f}",
            "held over torch out of place": f"{held / memory[OUT_OF_PLACE][0]:.3f}",
            "MiB peak": f"{peak / MIB:.2f}",
            "peak over torch in place": f"{peak / memory[IN_PLACE][1]:.3f}",
            "gradient off by": f"{distance:.1e}",
            "ms, median": f"{quartiles(times[variant])[1]:.1f}",
            "time over torch in place": f"{median:.3f}",
            "quartiles": f"{first_quartile:.3f} to {third_quartile:.3f}",
        }
        rows.append(row | machine(device))
    print(table([list(row)] + [[r[c] for c in row] for r in rows]), flush=True)
    return rows


def main() -> None:
    """Measure, print the table, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("models", nargs="*", default=MODELS, metavar="LIBRARY:NAME")
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default)
    parser.add_argument("--batch", type=int, nargs="+", default=[2], help="one for each size")
    parser.add_argument(
        "--size", type=int, nargs="+", default=[128], help="the images' height and width"
    )
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    clock = Clock(arguments.device)
    with written_to(arguments.out or RESULTS / f"models_{arguments.device}.csv") as rows:
        for batch, size in zip(arguments.batch, arguments.size, strict=True):
            for name in arguments.models:
                rows += measured(name, batch, size, arguments, clock)


if __name__ == "__main__":
    main()
