"""Steps of networks that are bound by the host: the Python cost of each activation and consumer.

The networks are a ResNet-18 at batch 1 for images of 32 x 32 (He et al., "Deep Residual Learning
for Image Recognition", 2016, with the changes of its section 4.2: a first convolution of 3 x 3 and
no pooling), and 40 blocks of convolution, batch norm and activation on tensors of 256 elements.

PyTorch's in-place activations are compared with this package's modules by default, with
save="recompute", and with `convert`, after which the layers that consume an activation need not
save it either. Each repetition runs the variants in random order, and compares forward and backward
each with PyTorch's of the same repetition. Before that, the gradients of a step are compared in
float64.
"""

from __future__ import annotations

import argparse
import copy
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import RESULTS, Failures, machine, quartiles, table, written_to
from torch import Tensor, nn

import inplace_ops

IN_PLACE = "torch in place"
MakeActivation = Callable[[], nn.Module]


class ResidualBlock(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, activation: MakeActivation) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            activation(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Sequential()
        if stride > 1:
            convolution = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(outputs))
        self.activation = activation()

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        return self.activation(self.residual(x) + self.shortcut(x))


def resnet18(activation: MakeActivation) -> nn.Module:
    """Return a ResNet-18 for ten classes and images of 32 x 32."""
    stem = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), activation()]
    widths = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
    blocks = [
        ResidualBlock(*arguments, activation)
        for inputs, outputs, stride in widths
        for arguments in ((inputs, outputs, stride), (outputs, outputs, 1))
    ]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)]
    return nn.Sequential(*stem, *blocks, *head)


def chain(activation: MakeActivation) -> nn.Module:
    """Return 40 blocks of convolution, batch norm and activation."""
    layers: list[nn.Module] = []
    for _ in range(40):
        layers += [nn.Conv2d(8, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), activation()]
    return nn.Sequential(*layers)


# By name: a function that makes the network, its number of activations, its input's shape, and the
# name of its activation.
NETWORKS: dict[str, tuple[Callable[[MakeActivation], nn.Module], int, tuple[int, ...], str]] = {
    "ResNet-18": (resnet18, 17, (1, 3, 32, 32), "ReLU"),
    "40 blocks, ReLU": (chain, 40, (2, 8, 4, 4), "ReLU"),
    "40 blocks, SiLU": (chain, 40, (2, 8, 4, 4), "SiLU"),
}


def variants_of(network: str, device: str) -> tuple[dict[str, nn.Module], Tensor]:
    """Return a network's variants, with the same weights, and an input."""
    make, _, shape, name = NETWORKS[network]
    theirs, ours = getattr(nn, name), getattr(inplace_ops, name)
    makers = {
        IN_PLACE: partial(theirs, inplace=True),
        "modules": ours,
        "modules, recompute": partial(ours, save="recompute"),
        "convert": theirs,
    }
    models = {variant: make(activation).to(device) for variant, activation in makers.items()}
    for model in models.values():
        model.load_state_dict(models[IN_PLACE].state_dict())
    x = torch.randn(shape, device=device)
    inplace_ops.convert(models["convert"])
    return models, x


def step(model: nn.Module, x: Tensor) -> tuple[float, float]:
    """Return the seconds of forward and of backward, which allocates new gradients."""
    model.zero_grad()
    if x.is_cuda:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    loss = model(x).square().mean()
    middle = time.perf_counter()
    loss.backward()
    return middle - begin, time.perf_counter() - middle


def verify(models: dict[str, nn.Module], x: Tensor) -> None:
    """Compare the gradients of a step with those of PyTorch's activations, in float64."""
    gradients = {}
    for name, model in models.items():
        double = copy.deepcopy(model).double()
        step(double, x.double())
        gradients[name] = [p.grad for p in double.parameters()]
    for name, actual in gradients.items():
        torch.testing.assert_close(
            actual, gradients[IN_PLACE], rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


def measure(network: str, device: str, repetitions: int) -> list[dict[str, Any]]:
    """Return the rows of a network."""
    models, x = variants_of(network, device)
    verify(models, x)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    for repetition in range(repetitions + 3):
        for name in random.sample(list(models), len(models)):
            time_of_step = step(models[name], x)
            if repetition >= 3:
                times[name].append(time_of_step)
    rows = []
    for name, pairs in times.items():
        in_turn = list(zip(pairs, times[IN_PLACE], strict=True))
        count = NETWORKS[network][1]
        ratios = quartiles([sum(ours) / sum(theirs) for ours, theirs in in_turn])
        over = [
            quartiles([(ours[i] - theirs[i]) / count * 1e6 for ours, theirs in in_turn])[1]
            for i in range(2)
        ]
        rows.append(
            {
                "network": network,
                "variant": name,
                "step_ms": f"{quartiles([sum(pair) * 1e3 for pair in pairs])[1]:.2f}",
                "ratio_to_torch_in_place": f"{ratios[1]:.3f}",
                "ratio_first_quartile": f"{ratios[0]:.3f}",
                "ratio_third_quartile": f"{ratios[2]:.3f}",
                "forward_us_per_activation": f"{over[0]:.1f}",
                "backward_us_per_activation": f"{over[1]:.1f}",
                **machine(device),
            }
        )
    return rows


def main() -> None:
    """Measure, print the table, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--repetitions", type=int, default=61)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    failures = Failures()
    device = arguments.device
    with written_to(arguments.out or RESULTS / f"steps_{device}.csv") as rows:
        for network in NETWORKS:
            with failures.recorded(network):
                rows += measure(network, device, arguments.repetitions)
    if rows:
        columns = list(rows[0])[:8]
        print(table([columns, *([row[c] for c in columns] for row in rows)]))
    failures.exit()


if __name__ == "__main__":
    main()
