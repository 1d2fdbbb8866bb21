"""Train a small residual network on real data in three variants, and compare their memory.

The data are scikit-learn's handwritten digits (1797 images of 8 x 8 pixels). Each residual block
adds its shortcut with `+=` after an activation, as code that has to save memory does. ReLU,
LeakyReLU and SiLU each run in three variants, from the same seed and on the same batches: PyTorch
out of place (the addition too: after nn.ReLU, `+=` fails even if nn.ReLU is out of place), PyTorch
in place, and inplace_ops.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import matplotlib
import torch
import torch.nn.functional as F
from measure import MIB, machine, memory_of, table
from sklearn.datasets import load_digits
from torch import Tensor, nn

import inplace_ops

matplotlib.use("agg")
import matplotlib.pyplot as plt  # the backend is chosen first

ACTIVATIONS = ("ReLU", "LeakyReLU", "SiLU")
LOSS_TOLERANCE = 1e-4  # rounding, amplified over a whole training


class Block(nn.Module):
    """Two convolutions with BatchNorm and activations, and a shortcut added after the second."""

    def __init__(
        self, channels: int, before_conv: nn.Module, before_add: nn.Module, adds_in_place: bool
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.act1 = before_conv
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.act2 = before_add
        self.adds_in_place = adds_in_place

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, channels, height, width) to the same shape."""
        y = self.act1(self.norm1(self.conv1(x)))
        y = self.act2(self.norm2(self.conv2(y)))
        if self.adds_in_place:
            y += x
        else:
            y = y + x
        return y


@dataclass
class Variant:
    """A variant of a block's activations.

    Attributes:
        name: The variant's name.
        before_conv: Makes the activation whose output a convolution reads.
        before_add: Makes the activation whose output the shortcut is added to.
        adds_in_place: Whether the shortcut is added with `+=`.
    """

    name: str
    before_conv: Callable[[], nn.Module]
    before_add: Callable[[], nn.Module]
    adds_in_place: bool = True

    def network(self, channels: int = 32, blocks: int = 3) -> nn.Sequential:
        """Return a network for images (batch, 1, 8, 8) and ten classes."""
        stem = [nn.Conv2d(1, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)]
        residual = [
            Block(channels, self.before_conv(), self.before_add(), self.adds_in_place)
            for _ in range(blocks)
        ]
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)]
        return nn.Sequential(*stem, self.before_conv(), *residual, *head)


def variants_of(torch_module: type[nn.Module], ours: type[nn.Module]) -> list[Variant]:
    """Return the variants: PyTorch out of place, PyTorch in place, inplace_ops."""
    # Before a convolution, saving the output costs nothing: the convolution saves it anyway. Before
    # a write the output must not be saved.
    before_write = "derivative" if ours is inplace_ops.SiLU else "mask"
    return [
        Variant("torch out of place", torch_module, torch_module, adds_in_place=False),
        Variant("torch in place", *2 * [partial(torch_module, inplace=True)]),
        Variant("inplace_ops", partial(ours, save="output"), partial(ours, save=before_write)),
    ]


class Training:
    """A network in training and its measurements; `error` is set if backward fails."""

    def __init__(self, variant: Variant, arguments: argparse.Namespace) -> None:
        torch.manual_seed(arguments.seed)
        self.network = variant.network().to(arguments.device)
        self.optimizer = torch.optim.SGD(
            self.network.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4
        )
        self.annealing = torch.optim.lr_scheduler.CosineAnnealingLR(
            self.optimizer, arguments.epochs
        )
        self.saved = self.peak = 0
        self.error = ""
        self.losses: list[float] = []
        self.step_times: list[float] = []
        self.epoch_loss = 0.0
        self.accuracy = 0.0

    def step(self, images: Tensor, labels: Tensor) -> None:
        """Run one training step."""
        begin = time.perf_counter()
        loss = F.cross_entropy(self.network(images), labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())  # waits for the device
        self.step_times.append(time.perf_counter() - begin)


def measure(
    variant: Variant, images: Tensor, labels: Tensor, arguments: argparse.Namespace
) -> Training:
    """Measure the memory of a step, in a training that ends after it."""
    training = Training(variant, arguments)
    training.saved = inplace_ops.saved_bytes(training.network, images)
    try:
        training.step(images, labels)  # the optimizer allocates its state
        training.peak, _ = memory_of(lambda: training.step(images, labels), arguments.device)
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        training.error = str(error).split(" Hint")[0]
    return training


def train(
    name: str, variants: list[Variant], data: tuple[Tensor, ...], arguments: argparse.Namespace
) -> dict[str, Training]:
    """Train all variants, in turn on each batch, so that a busy machine slows all alike."""
    images, labels, test_images, test_labels = data
    trainings: dict[str, Training] = {}
    for variant in variants:
        batch = images[: arguments.batch_size], labels[: arguments.batch_size]
        measured = measure(variant, *batch, arguments)
        training = trainings[variant.name] = Training(variant, arguments)
        training.saved, training.peak = measured.saved, measured.peak
        training.error = measured.error
        if training.error:
            print(f"{name}, {variant.name}: fails in backward, see below", flush=True)

    running = [training for training in trainings.values() if not training.error]
    shuffle = torch.Generator().manual_seed(arguments.seed)
    for epoch in range(1, arguments.epochs + 1):
        batches = torch.randperm(len(images), generator=shuffle).split(arguments.batch_size)
        for chosen in batches:
            for training in running:
                training.step(images[chosen], labels[chosen])
        for training in running:
            training.annealing.step()
            training.epoch_loss = statistics.mean(training.losses[-len(batches) :])
        losses = ", ".join(
            f"{variant_name} {training.epoch_loss:.4f}"
            for variant_name, training in trainings.items()
            if not training.error
        )
        print(f"{name}, epoch {epoch} of {arguments.epochs}, training loss: {losses}", flush=True)
    for training in running:
        training.network.eval()
        with torch.no_grad():
            predicted = training.network(test_images).argmax(1)
        training.accuracy = (predicted == test_labels).float().mean().item()
    return trainings


def digits(device: str, test_images: int = 360) -> tuple[Tensor, ...]:
    """Return images (n, 1, 8, 8) from 0 to 1 and labels (n,), for training and for testing."""
    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(bunch.target, dtype=torch.int64)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    test, training = order[:test_images], order[test_images:]
    chosen = (images[training], labels[training], images[test], labels[test])
    return tuple(tensor.to(device) for tensor in chosen)


def plot(results: dict[tuple[str, str], Training], out: Path, title: str) -> None:
    """Draw the saved memory as bars, and the training losses as lines."""
    activations = list(dict.fromkeys(activation for activation, _ in results))
    names = list(dict.fromkeys(name for _, name in results))
    figure, axes = plt.subplots(1, 1 + len(activations), figsize=(15, 4), layout="constrained")
    for i, name in enumerate(names):
        saved = [results[a, name].saved / MIB for a in activations]
        positions = [j + 0.27 * (i - 1) for j in range(len(activations))]
        bars = axes[0].bar(positions, saved, width=0.25, label=name)
        failed = ["fails" if results[a, name].error else "" for a in activations]
        axes[0].bar_label(bars, failed, fontsize=8)
    axes[0].set_xticks(range(len(activations)), activations)
    axes[0].set_ylabel("saved for backward, MiB")
    axes[0].set_ylim(top=1.3 * max(result.saved for result in results.values()) / MIB)
    axes[0].legend(fontsize=8)
    for axis, activation in zip(axes[1:], activations, strict=True):
        for name, style in zip(names, ("C0-", "C1--", "C2:"), strict=True):  # colors of the bars
            losses = results[activation, name].losses
            if losses:
                axis.semilogy(losses, style, label=name)
        axis.set_title(activation)
        axis.set_xlabel("step")
        axis.set_ylabel("training loss")
        axis.legend(fontsize=8)
    figure.suptitle(title, fontsize=9)
    figure.savefig(out, dpi=120)
    print(f"plot written to {out}")


def largest_difference(results: dict[tuple[str, str], Training], name: str) -> float:
    """Return the largest loss difference between PyTorch out of place and inplace_ops, or NaN."""
    expected, actual = (
        torch.tensor(results[name, variant].losses)
        for variant in ("torch out of place", "inplace_ops")
    )
    return (expected - actual).abs().max().item()


def main() -> None:
    """Train all, print the table, draw the plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("demo.png"))
    arguments = parser.parse_args()
    torch.backends.cudnn.deterministic = True  # the variants are compared loss by loss

    data = digits(arguments.device)
    batch = data[0][: arguments.batch_size], data[1][: arguments.batch_size]
    without = measure(Variant("none", nn.Identity, nn.Identity), *batch, arguments).saved
    results: dict[tuple[str, str], Training] = {}
    for name in ACTIVATIONS:
        compared = variants_of(getattr(nn, name), getattr(inplace_ops, name))
        for variant_name, training in train(name, compared, data, arguments).items():
            results[name, variant_name] = training

    header = ["", "activations, MiB", "saved, MiB", "peak, MiB", "step, ms", "final loss"]
    rows, failures = [[*header, "accuracy"]], []
    for (name, variant_name), result in results.items():
        row = [f"{name}, {variant_name}", f"{(result.saved - without) / MIB:.2f}"]
        row.append(f"{result.saved / MIB:.2f}")
        if result.error:
            row += ["fails in backward", "-", "-", "-"]
            failures.append(f"{name}, {variant_name} fails in backward: {result.error}")
        else:
            row += [f"{result.peak / MIB:.2f}", f"{statistics.median(result.step_times) * 1e3:.1f}"]
            row += [f"{result.epoch_loss:.4f}", f"{result.accuracy:.1%}"]
        rows.append(row)
    where = machine(arguments.device)
    title = f"digits, batch {arguments.batch_size}; {where['device']}, torch {where['torch']}, "
    title += f"Python {where['python']}, {where['date']}"
    print(f"\n{title}\n\n{table(rows)}\n")
    print("saved: memory that autograd saves for backward, without parameters and input.")
    print("activations: saved, minus what the same network saves without activations.")
    print("peak: most memory allocated during a training step, minus what was allocated before it.")
    print("step: median time of a step. final loss: mean training loss of the last epoch.")
    print("accuracy: on the test images, after training.")
    for failure in failures:
        print(f"\n{failure}")
    print()
    differences = {name: largest_difference(results, name) for name in ACTIVATIONS}
    for name, difference in differences.items():
        print(
            f"{name}: training losses of torch and inplace_ops differ by at most {difference:.2g}"
        )
    plot(results, arguments.out, title)
    disagreeing = [name for name in ACTIVATIONS if not differences[name] <= LOSS_TOLERANCE]
    if disagreeing:
        sys.exit(f"training losses differ by more than {LOSS_TOLERANCE}: {', '.join(disagreeing)}")


if __name__ == "__main__":
    main()
