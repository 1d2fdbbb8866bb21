"""What networks save for backward in training, as they are and converted, by precision.

saved: what autograd holds when forward has returned, by `inplace_ops.saved_bytes`, without
parameters, buffers and the input. peak: the most bytes that a step of forward and backward
allocates at one time, gradients included, in float32 alone. A network is measured only if the
gradients of both agree.

"CUDA autocast" has the weights of convolutions and linear layers in bfloat16 already, so that no
copies of them are counted. On the CPU it is emulated: autocast there leaves norms in bfloat16,
on CUDA it runs those of `FLOAT32_ON_CUDA` in float32.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from measure import RESULTS, Failures, machine, memory_of, table, written_to
from torch import Tensor, nn
from whole_models import backward

import inplace_ops
from inplace_ops.conversion.library import load

MAX_OPS = 4
FLOAT32_ON_CUDA = ("layer_norm", "group_norm", "rms_norm")
# The norm of the gradients' difference that is allowed, over the norm of the gradients.
POLICIES = {"float32": 1e-5, "bfloat16": 5e-2, "CUDA autocast": 5e-2}


class Network(NamedTuple):
    """A model's name, what its builder takes, and the shape of its input."""

    name: str
    shape: tuple[int, ...]
    arguments: dict[str, Any] = {}  # noqa: RUF012


LLAMA = {"hidden_size": 512, "intermediate_size": 1792, "num_hidden_layers": 2, "vocab_size": 1000}
LLAMA |= {"num_attention_heads": 8, "num_key_value_heads": 2}
NETWORKS = {
    "EfficientNet-B0": Network("timm:efficientnet_b0", (2, 3, 128, 128)),
    "MobileNetV2": Network("torchvision:mobilenet_v2", (2, 3, 128, 128)),
    "ResNet-50": Network("torchvision:resnet50", (2, 3, 128, 128)),
    "YOLOv8n": Network("ultralytics:yolov8n.yaml", (2, 3, 160, 160)),
    "DenseNet-121": Network("torchvision:densenet121", (2, 3, 128, 128)),
    "diffusion U-Net": Network("unets:DiffusionUNet", (2, 3, 64, 64)),
    "nnU-Net-like": Network("unets:SegmentationUNet", (2, 3, 96, 96)),
    "ViT-S/16, 4 blocks": Network("timm:vit_small_patch16_224", (4, 3, 224, 224), {"depth": 4}),
    "ConvNeXt-T": Network("timm:convnext_tiny", (2, 3, 128, 128)),
    "Swin-T": Network("timm:swin_tiny_patch4_window7_224", (2, 3, 224, 224)),
    "SqueezeNet 1.1": Network("torchvision:squeezenet1_1", (2, 3, 128, 128)),
    "Llama, 2 layers": Network("transformers:LlamaForCausalLM", (4, 256), LLAMA),
}


def in_float32(op: Callable[..., Any]) -> Callable[..., Any]:
    """The operation as CUDA's autocast runs it: on float32 copies of the tensors."""

    def cast(value: Any) -> Any:
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        return value.float() if is_float else value

    def run(*args: Any, **kwargs: Any) -> Any:
        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return op(*map(cast, args), **{name: cast(value) for name, value in kwargs.items()})

    return run


@contextlib.contextmanager
def cuda_autocast(device: str) -> Iterator[None]:
    """Autocast to bfloat16, on the CPU with CUDA's norms."""
    with (
        torch.library._scoped_library("aten", "IMPL") as library,
        torch.autocast(device, torch.bfloat16),
    ):
        if device == "cpu":
            for name in FLOAT32_ON_CUDA:
                library.impl(name, in_float32(getattr(torch.ops.aten, name)), "AutocastCPU")
        yield


def with_policy(model: nn.Module, x: Tensor, policy: str) -> tuple[nn.Module, Tensor]:
    """The model and its input in a policy's dtypes."""
    if policy == "bfloat16":
        return model.to(torch.bfloat16), x.to(torch.bfloat16) if x.is_floating_point() else x
    if policy == "CUDA autocast":
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
                module.to(torch.bfloat16)
    return model, x


def precision(policy: str, device: str) -> contextlib.AbstractContextManager[None]:
    """What forward runs in, with the same random numbers each time."""
    torch.manual_seed(0)
    return cuda_autocast(device) if policy == "CUDA autocast" else contextlib.nullcontext()


def step(model: nn.Module, x: Tensor, policy: str) -> None:
    """Forward and backward."""
    with precision(policy, x.device.type):
        outputs = model(x)
    backward(outputs)


def saved(model: nn.Module, x: Tensor, policy: str) -> int:
    """Bytes that are saved for backward."""
    with precision(policy, x.device.type):
        return inplace_ops.saved_bytes(model, x)


def gradient(model: nn.Module, x: Tensor, policy: str) -> Tensor:
    """All parameters' gradients of a step, one after the other."""
    step(model, x, policy)
    found = [p.grad.flatten().double() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return torch.cat(found)


def measured(name: str, policy: str, device: str) -> dict[str, Any]:
    """The row of a network in one policy."""
    network = NETWORKS[name]
    torch.manual_seed(0)
    model = load(network.name, network.arguments).to(device).train()
    if len(network.shape) == 2:
        x = torch.randint(LLAMA["vocab_size"], network.shape, device=device)
    else:
        x = torch.randn(network.shape, device=device)
    model, x = with_policy(model, x, policy)
    converted = copy.deepcopy(model)
    inplace_ops.convert(converted, max_ops=MAX_OPS)

    expected, actual = (gradient(m, x, policy) for m in (model, converted))
    difference = ((actual - expected).norm() / expected.norm()).item()
    if not difference <= POLICIES[policy]:
        raise AssertionError(f"the gradients differ by {difference:.1e}")
    before, after = (saved(m, x, policy) for m in (model, converted))
    peaks: list[int | str] = ["", ""]
    if policy == "float32":
        peaks = [memory_of(partial(step, m, x, policy), device)[0] for m in (model, converted)]
    return {
        "network": name,
        "policy": policy,
        "max_ops": MAX_OPS,
        "input": " x ".join(map(str, network.shape)),
        "saved before": before,
        "saved after": after,
        "ratio": f"{after / before:.3f}",
        "gradient difference": f"{difference:.1e}",
        "peak before": peaks[0],
        "peak after": peaks[1],
        **machine(device),
    }


def main() -> None:
    """Measure, print the table, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    failures = Failures()
    with written_to(arguments.out or RESULTS / f"saved_{arguments.device}.csv") as rows:
        for name in arguments.networks:
            for policy in POLICIES:
                with failures.recorded(f"{name}, {policy}"):
                    rows.append(measured(name, policy, arguments.device))
                    print(*list(rows[-1].values())[:10], sep=", ", flush=True)
    if rows:
        columns = list(rows[0])[:10]
        print(table([columns, *([str(row[c]) for c in columns] for row in rows)]))
    failures.exit()


if __name__ == "__main__":
    main()
