"""Train one network in three variants, and compare memory, time, gradients and losses.

1. PyTorch: activations are `nn.SiLU(inplace=True)`. PyTorch saves each activation's input.
2. modules: activations are `inplace_ops.SiLU()`, a drop-in that saves its output, which the next
   layer saves anyway, and 6 bits per element.
3. convert: PyTorch's network after `inplace_ops.convert(model)`. Whatever follows cheaply from
   other saved tensors is recomputed in backward: here outputs of norms and of activations.

The network is a small residual network, and learns scikit-learn's handwritten digits (1797 images
of 8 x 8 pixels). All variants have the same weights and see the same batches.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import matplotlib
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import inplace_ops

matplotlib.use("agg")
import matplotlib.pyplot as plt  # the backend is chosen first

MIB = 2**20
CHANNELS, BLOCKS, BATCH = 32, 4, 256
TEST_IMAGES = 360
# Gradients may differ by roundings, which a whole training amplifies.
GRADIENT_TOLERANCE, LOSS_TOLERANCE = 1e-5, 1e-4


class Block(nn.Module):
    """Convolution, batch norm and activation, twice, and a shortcut."""

    def __init__(self, activation: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)
        self.norm1, self.act1 = nn.BatchNorm2d(CHANNELS), activation()
        self.conv2 = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)
        self.norm2, self.act2 = nn.BatchNorm2d(CHANNELS), activation()

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, channels, height, width) to the same shape."""
        y = self.act1(self.norm1(self.conv1(x)))
        return x + self.act2(self.norm2(self.conv2(y)))


def network(activation: Callable[[], nn.Module]) -> nn.Sequential:
    """Return a network for images (N, 1, 8, 8) and ten classes, always with the same weights."""
    torch.manual_seed(0)
    stem = [nn.Conv2d(1, CHANNELS, 3, padding=1, bias=False), nn.BatchNorm2d(CHANNELS)]
    blocks = [Block(activation) for _ in range(BLOCKS)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CHANNELS, 10)]
    return nn.Sequential(*stem, activation(), *blocks, *head)


class Variant:
    """A network in training, and what was measured."""

    def __init__(self, model: nn.Module, saved: int, peak: int, epochs: int) -> None:
        self.model, self.saved, self.peak = model, saved, peak
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.annealing = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, epochs)
        self.losses: list[float] = []
        self.milliseconds: list[float] = []

    def gradients(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the gradients of all parameters as one vector."""
        loss = F.cross_entropy(self.model(images), labels)
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, self.model.parameters())])

    def step(self, images: Tensor, labels: Tensor) -> None:
        """Run and time one training step."""
        begin = time.perf_counter()
        loss = F.cross_entropy(self.model(images), labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())  # waits for the device
        self.milliseconds.append(1e3 * (time.perf_counter() - begin))

    def accuracy(self, images: Tensor, labels: Tensor) -> float:
        """Return the share of the images that the network classifies right."""
        self.model.eval()
        with torch.no_grad():
            return (self.model(images).argmax(1) == labels).float().mean().item()


def variants(example: Tensor, epochs: int) -> dict[str, Variant]:
    """Return the three variants. `analyze` and `convert` measure the memory of a step."""
    pytorch = network(partial(nn.SiLU, inplace=True)).to(example.device)
    before = inplace_ops.analyze(pytorch, example)

    modules = network(inplace_ops.SiLU).to(example.device)
    drop_in = inplace_ops.analyze(modules, example)

    converted = network(partial(nn.SiLU, inplace=True)).to(example.device)
    after = inplace_ops.convert(converted, example)

    return {
        "PyTorch": Variant(pytorch, before.saved_bytes_before, before.peak_bytes_before, epochs),
        "modules": Variant(modules, drop_in.saved_bytes_before, drop_in.peak_bytes_before, epochs),
        "convert": Variant(converted, after.saved_bytes_after, after.peak_bytes_after, epochs),
    }


def digits(device: str) -> tuple[Tensor, Tensor]:
    """Return images (n, 1, 8, 8) from 0 to 1 and labels (n,), in random order."""
    bunch = load_digits()
    order = torch.randperm(len(bunch.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(bunch.images, dtype=torch.float32)[order, None] / 16
    return images.to(device), torch.tensor(bunch.target)[order].to(device)


def check(name: str, what: str, difference: float, tolerance: float) -> None:
    """Print a difference from PyTorch, and exit if it is larger than the tolerance."""
    print(f"  {name}: {what} differ from PyTorch's by at most {difference:.1e}", flush=True)
    if not difference <= tolerance:
        sys.exit(f"{name}: {what} differ by more than {tolerance}")


def plot(compared: dict[str, Variant], title: str, out: Path) -> None:
    """Draw memory and time as bars, and the losses as lines."""
    figure, axes = plt.subplots(1, 4, figsize=(14, 3.4), layout="constrained")
    bars = {
        "saved for backward, MiB": [v.saved / MIB for v in compared.values()],
        "peak of a step, MiB": [v.peak / MIB for v in compared.values()],
        "time of a step, ms": [statistics.median(v.milliseconds) for v in compared.values()],
    }
    colors = ["C0", "C1", "C2"]
    for axis, (label, heights) in zip(axes, bars.items(), strict=False):
        axis.bar_label(axis.bar(list(compared), heights, color=colors), fmt="%.1f")
        axis.set_title(label, fontsize=10)
        axis.margins(y=0.15)
    # Each line is thinner than the one below it, so that equal lines stay visible.
    for width, color, (name, variant) in zip((6, 3.5, 1), colors, compared.items(), strict=True):
        axes[3].semilogy(variant.losses, color, linewidth=width, label=name)
    axes[3].set_title("training loss, by step", fontsize=10)
    axes[3].legend()
    figure.suptitle(title, fontsize=9)
    figure.savefig(out, dpi=120)
    print(f"\nThe picture is in {out}.")


def main() -> None:
    """Verify, train, print the table, draw the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("demo.png"))
    arguments = parser.parse_args()
    torch.backends.cudnn.deterministic = True  # the variants are compared loss by loss
    torch.backends.cudnn.allow_tf32 = False

    is_cuda = arguments.device == "cuda"
    device = torch.cuda.get_device_name() if is_cuda else f"CPU, {torch.get_num_threads()} threads"
    title = f"residual network on 8 x 8 digits, batch {BATCH}; {device}, torch {torch.__version__}"
    print(f"{__doc__}\n{title}\n")

    images, labels = digits(arguments.device)
    test, (images, labels) = (
        (images[:TEST_IMAGES], labels[:TEST_IMAGES]),
        (images[TEST_IMAGES:], labels[TEST_IMAGES:]),
    )
    compared = variants(images[:BATCH], arguments.epochs)

    print("Before training, the same gradients? Relative to the norm of all gradients:")
    expected = compared["PyTorch"].gradients(images[:BATCH], labels[:BATCH])
    for name in ("modules", "convert"):
        actual = compared[name].gradients(images[:BATCH], labels[:BATCH])
        off = ((actual - expected).norm() / expected.norm()).item()
        check(name, "gradients", off, GRADIENT_TOLERANCE)

    print("\nTraining, a step of each variant in turn, so that a busy machine slows all alike:")
    shuffle = torch.Generator().manual_seed(0)
    for epoch in range(1, arguments.epochs + 1):
        for chosen in torch.randperm(len(images), generator=shuffle).split(BATCH):
            for variant in compared.values():
                variant.step(images[chosen], labels[chosen])
        for variant in compared.values():
            variant.annealing.step()
        losses = ", ".join(f"{name} {v.losses[-1]:.4f}" for name, v in compared.items())
        print(f"  epoch {epoch} of {arguments.epochs}, loss: {losses}", flush=True)
    losses = {name: torch.tensor(variant.losses) for name, variant in compared.items()}
    for name in ("modules", "convert"):
        largest = (losses[name] - losses["PyTorch"]).abs().max().item()
        check(name, "losses", largest, LOSS_TOLERANCE)

    print(f"\n{'':10}{'saved, MiB':>12}{'peak, MiB':>12}{'step, ms':>12}{'test accuracy':>16}")
    for name, variant in compared.items():
        cells = f"{variant.saved / MIB:12.1f}{variant.peak / MIB:12.1f}"
        cells += f"{statistics.median(variant.milliseconds):12.1f}{variant.accuracy(*test):16.1%}"
        print(f"{name:10}{cells}")
    print("\nsaved: what autograd saves for backward, without parameters and input.")
    print("peak: the most memory that forward and backward allocate at one time.")
    print("step: the median time of a training step.")
    print("docs/benchmarks.md has larger networks and GPUs, and says where inplace_ops is slower.")
    plot(compared, title, arguments.out)


if __name__ == "__main__":
    main()
