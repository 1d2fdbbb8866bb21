"""What real models keep for backward, with PyTorch's activations and with convert's.

The models come from timm, torchvision, Ultralytics and transformers, with random weights. "torch in
place" sets inplace=True where convert finds it safe. saved: held for backward when forward has
returned, beyond parameters, buffers and the input. peak: the most allocated at one time in a step
of forward and backward. convert verifies each model before it is timed.
"""

from __future__ import annotations

import argparse
import copy
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import MIB, RESULTS, Clock, machine, memory_of, quartiles, table, write_csv
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import inplace_ops
from inplace_ops.activations import ACTIVATIONS
from inplace_ops.conversion.library import load

MODULES = tuple(entry.torch_module for entry in ACTIVATIONS)
MODELS = (
    "timm:resnet50",
    "timm:efficientnet_b0",
    "timm:tf_efficientnetv2_b0",
    "timm:mobilenetv3_small_100",
    "timm:regnety_002",
    "timm:densenet121",
    "timm:ghostnet_100",
    "timm:mobilevit_xxs",
    "timm:cspdarknet53",
    "timm:darknet53",
    "timm:nfnet_l0",
    "torchvision:resnet50",
    "torchvision:shufflenet_v2_x1_0",
    "torchvision:regnet_y_400mf",
    "torchvision:vgg11_bn",
    "torchvision:squeezenet1_1",
    "ultralytics:yolov8n.yaml",
    "ultralytics:yolo11n.yaml",
    "transformers:ResNetModel",
    "transformers:EfficientNetModel",
    "transformers:MobileViTModel",
    "transformers:LlamaForCausalLM",
)

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


def variants(model: nn.Module, x: Tensor) -> dict[str, nn.Module]:
    """The model with each of the activations that are compared."""
    converted = {
        f"convert, {label}": copy.deepcopy(model) for label in ("1 bit", "default bits", "8 bits")
    }
    for bits, variant in zip((1, None, 8), converted.values(), strict=True):
        report = inplace_ops.convert(variant, x, bits=bits)
    safe = {site.name for site in report.sites if site.converted}
    in_place, out_of_place = copy.deepcopy(model), copy.deepcopy(model)
    for variant in (in_place, out_of_place):
        for path, parent in variant.named_modules():
            for key, child in list(parent._modules.items()):
                if isinstance(child, MODULES):
                    own = copy.copy(child)  # one module may be held in safe and unsafe places
                    own.inplace = variant is in_place and f"{path}.{key}".lstrip(".") in safe
                    parent._modules[key] = own
    return {"torch out of place": out_of_place, "torch in place": in_place, **converted}


def step(model: nn.Module, x: Tensor) -> Callable[[], Any]:
    """Forward and backward."""

    def run() -> None:
        outputs = [t for t in tree_leaves(model(x)) if isinstance(t, Tensor) and t.requires_grad]
        torch.autograd.backward([t.float().square().mean() for t in outputs])

    return run


def main() -> None:
    """Measure, print the table, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("models", nargs="*", default=MODELS, metavar="LIBRARY:NAME")
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--size", type=int, default=128, help="the images' height and width")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = arguments.device
    clock = Clock(device)

    rows = []
    for name in arguments.models:
        torch.manual_seed(0)
        model = build(name).to(device)
        x = torch.randn(arguments.batch, 3, arguments.size, arguments.size, device=device)
        if "Llama" in name:
            x = torch.randint(0, 1000, (arguments.batch, arguments.size), device=device)
        compared = variants(model, x)
        steps = {variant: step(module, x) for variant, module in compared.items()}
        times: dict[str, list[float]] = {variant: [] for variant in compared}
        for repeat in range(arguments.repeats + 1):
            for variant, run in steps.items():
                time, _ = clock.time(run)
                if repeat:  # the first allocates the gradients
                    times[variant].append(time / 1e3)
        baseline = inplace_ops.saved_bytes(compared["torch in place"], x)
        for variant, module in compared.items():
            saved = inplace_ops.saved_bytes(module, x)
            peak, _ = memory_of(steps[variant], device)
            first, median, third = quartiles(times[variant])
            row = {
                "model": name,
                "variant": variant,
                "input": " x ".join(map(str, x.shape)),
                "MiB saved": f"{saved / MIB:.2f}",
                "over torch in place": f"{saved / baseline:.4f}",
                "MiB peak": f"{peak / MIB:.2f}",
                "ms, median": f"{median:.1f}",
                "ms, quartiles": f"{first:.1f} to {third:.1f}",
            }
            rows.append(row | machine(device))
        print(
            table([list(row)] + [[r[c] for c in row] for r in rows[-len(compared) :]]), flush=True
        )
    write_csv(arguments.out or RESULTS / f"models_{device}.csv", rows)


if __name__ == "__main__":
    main()
