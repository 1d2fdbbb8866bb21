"""Check that no save mode changes training: test accuracy and loss, over several seeds.

A small residual network with ReLU and a small EfficientNet-like network with SiLU (depthwise
convolutions, squeeze and excitation) learn scikit-learn's handwritten digits, in float32 and under
bfloat16 autocast. All variants of a seed have the same initial weights and the same batches, and
are compared with PyTorch's activations in place. All seeds have the same test images: another split
would add to the spread over the seeds, which the differences are compared with.

Two runs of the same mathematics diverge where they round differently. The variant "torch, weights
off by 1e-7" shows how much rounding alone changes: it has PyTorch's activations, and initial
weights multiplied by 1 + 1e-7 times normal noise.

Before training, three properties are verified: every activation works in place, ours save other
bytes than PyTorch's, and the first gradient is PyTorch's. The last one is necessary because such
networks learn these images well with wrong gradients too.

A save mode passes if the means over the seeds of the final test accuracy and of the final test loss
differ from PyTorch's by at most two standard deviations over PyTorch's seeds, for each network and
precision. The exit status is 1 otherwise, and if a training has not converged. A single seed has no
spread, and is not judged.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from demo import digits
from measure import RESULTS, machine, table, written_to
from paired import BASELINE, CASE, cases, lines, paired
from torch import Tensor, nn
from verification import exact_convolutions

import inplace_ops

OFF = "torch, weights off by 1e-7"
CONVERT = "convert"
BATCH = 64
TEST_IMAGES = 517  # leaves 20 batches to train on
SETTLED = 0.01  # the largest change of the training loss in the last quarter of the epochs

MakeActivation = Callable[[], nn.Module]


class Residual(nn.Module):
    """Two convolutions and a shortcut, added in place (He et al., 2016)."""

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
        if inputs != outputs:
            convolution = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(outputs))
        self.activation = activation()

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        y = self.residual(x)
        y += self.shortcut(x)
        return self.activation(y)


class SqueezeExcitation(nn.Module):
    """Scales each channel by a factor that a small network computes from all channels' means."""

    def __init__(self, channels: int, squeezed: int, activation: MakeActivation) -> None:
        super().__init__()
        self.scale = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(channels, squeezed, 1),
            activation(),
            nn.Conv2d(squeezed, channels, 1),
            nn.Sigmoid(),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        return x * self.scale(x)


class InvertedResidual(nn.Module):
    """EfficientNet's block: expansion, depthwise convolution, projection (Tan, Le, 2019)."""

    def __init__(self, inputs: int, outputs: int, stride: int, activation: MakeActivation) -> None:
        super().__init__()
        wide = 4 * inputs
        self.residual = nn.Sequential(
            nn.Conv2d(inputs, wide, 1, bias=False),
            nn.BatchNorm2d(wide),
            activation(),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False),
            nn.BatchNorm2d(wide),
            activation(),
            SqueezeExcitation(wide, inputs // 4, activation),
            nn.Conv2d(wide, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.has_shortcut = inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        y = self.residual(x)
        if self.has_shortcut:
            y += x
        return y


def network(block: Callable[..., nn.Module], last: int, activation: MakeActivation) -> nn.Module:
    """Return a network for images (batch, 1, 8, 8) and ten classes; `last` is its last width."""
    stem = [nn.Conv2d(1, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), activation()]
    widths = [(8, 8, 1), (8, 16, 2), (16, 16, 1)]
    blocks = [block(*arguments, activation) for arguments in widths]
    end = []
    if last != 16:
        end = [nn.Conv2d(16, last, 1, bias=False), nn.BatchNorm2d(last), activation()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(last, 10)]
    return nn.Sequential(*stem, *blocks, *end, *head)


# By name: the function that builds the network, PyTorch's activation, and ours by save mode.
NETWORKS: dict[str, tuple[Callable[..., nn.Module], type[nn.Module], dict[str, MakeActivation]]] = {
    "residual, ReLU": (partial(network, Residual, 16), nn.ReLU, {"mask": inplace_ops.ReLU}),
    "EfficientNet-like, SiLU": (
        partial(network, InvertedResidual, 64),
        nn.SiLU,
        {
            "output": inplace_ops.SiLU,
            "output, 1 bit": partial(inplace_ops.SiLU, bits=1),
            "derivative": partial(inplace_ops.SiLU, save="derivative"),
        },
    ),
}
# By name: the dtype of autocast, and the largest relative difference of the first gradient from
# PyTorch's. With weights off by 1e-7 the difference is about 1e-6 and 1e-2.
PRECISIONS = {"float32": (torch.float32, 1e-4), "bfloat16": (torch.bfloat16, 0.05)}


@dataclass(frozen=True)
class Case:
    """A network, the precision that it is trained in, and the variant of its activations."""

    network: str
    precision: str
    variant: str
    device: str

    def autocast(self) -> torch.autocast:
        """Return the precision's autocast context."""
        dtype, _ = PRECISIONS[self.precision]
        return torch.autocast(self.device, dtype, enabled=dtype != torch.float32)

    def build(self, seed: int) -> nn.Module:
        """Return the network with its initial weights."""
        make, theirs, ours = NETWORKS[self.network]
        torch.manual_seed(seed)
        model = make(ours.get(self.variant, partial(theirs, inplace=True))).to(self.device)
        if self.variant == OFF:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1 + 1e-7 * torch.randn_like(parameter))
        if self.variant == CONVERT:
            inplace_ops.convert(model)
        return model


def all_cases(precisions: list[str], device: str) -> list[Case]:
    """Return all cases that are compared."""
    return [
        Case(network, precision, variant, device)
        for network, (*_, ours) in NETWORKS.items()
        for precision in precisions
        for variant in (BASELINE, OFF, *ours, CONVERT)
    ]


def first_step(case: Case, images: Tensor, labels: Tensor) -> tuple[int, Tensor]:
    """Return saved bytes and all gradients of a step; raise if an activation is out of place."""
    model = case.build(0)

    def check(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        assert output is inputs[0], f"{case}: {module} does not work in place"

    hooks = [
        module.register_forward_hook(check)
        for module in model.modules()
        if hasattr(module, "inplace")
    ]
    assert len(hooks) > 1, f"{case}: found no activations"
    with case.autocast():
        saved = inplace_ops.saved_bytes(model, images)
        loss = F.cross_entropy(model(images), labels)
    loss.backward()
    return saved, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def verify(compared: list[Case], images: Tensor, labels: Tensor) -> dict[Case, dict[str, Any]]:
    """Return each case's saved bytes, and its first gradient's relative difference from PyTorch's.

    Raises:
        AssertionError: If ours save as many bytes as PyTorch's, or if a gradient differs too much.
    """
    with exact_convolutions():
        steps = {case: first_step(case, images, labels) for case in compared}
    columns = {}
    for case in compared:
        saved, gradient = steps[case]
        pytorchs_saved, pytorchs_gradient = steps[replace(case, variant=BASELINE)]
        is_pytorchs = case.variant in (BASELINE, OFF)
        assert (saved == pytorchs_saved) == is_pytorchs, f"{case} saves {saved} bytes"
        off_by = ((gradient - pytorchs_gradient).norm() / pytorchs_gradient.norm()).item()
        assert off_by <= PRECISIONS[case.precision][1], f"{case}: gradient off by {off_by:.1e}"
        columns[case] = {"saved_bytes": saved, "gradient_off_by": f"{off_by:.1e}"}
    return columns


def train(run: tuple[Case, int, int]) -> dict[str, Any]:
    """Train a case from a seed for some epochs, and return the row of the run."""
    case, seed, epochs = run
    torch.backends.cudnn.deterministic = True
    images, labels, test_images, test_labels = digits(case.device, TEST_IMAGES)
    model = case.build(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    steps = epochs * len(images) // BATCH
    annealing = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    shuffle = torch.Generator().manual_seed(seed)
    losses: list[float] = []
    test_losses: list[float] = []
    for _ in range(epochs):
        batches = torch.randperm(len(images), generator=shuffle).split(BATCH)
        total = 0.0
        for chosen in batches:
            with case.autocast():
                loss = F.cross_entropy(model(images[chosen]), labels[chosen])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            annealing.step()
            total += loss.item()
        losses.append(total / len(batches))
        model.eval()
        with torch.no_grad(), case.autocast():
            scores = model(test_images)
            test_losses.append(F.cross_entropy(scores, test_labels).item())
        model.train()
    return {
        "network": case.network,
        "precision": case.precision,
        "variant": case.variant,
        "seed": seed,
        "epochs": epochs,
        "test_accuracy": f"{(scores.argmax(1) == test_labels).float().mean().item():.6f}",
        "test_loss": f"{test_losses[-1]:.9g}",
        "training_losses": " ".join(f"{loss:.5f}" for loss in losses),
        "test_losses": " ".join(f"{loss:.5f}" for loss in test_losses),
    }


def is_settled(row: dict[str, Any]) -> bool:
    """Whether the training loss has changed little in the last quarter of the epochs."""
    losses = [float(loss) for loss in row["training_losses"].split()]
    return abs(losses[-1] - losses[3 * len(losses) // 4 - 1]) <= SETTLED


def changed(rows: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Return, by variant, the networks, precisions and columns that leave PyTorch's spread."""
    found: dict[str, list[str]] = {}
    for case in cases(rows):
        for column in ("test_accuracy", "test_loss"):
            if not paired(rows, column, case).is_unchanged:
                where = f"{case['network']}, {case['precision']}: {column}"
                found.setdefault(case["variant"], []).append(where)
    return found


def main() -> None:
    """Verify, train, print the table, write the CSV, and exit with 1 if training changes."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--processes", type=int, default=2, help="with one CPU thread each")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    begin = time.monotonic()
    torch.set_num_threads(1)
    compared = all_cases(arguments.precisions, arguments.device)
    images, labels, *_ = digits(arguments.device, TEST_IMAGES)
    verified = verify(compared, images[:BATCH], labels[:BATCH])

    runs = [(case, seed, arguments.epochs) for case in compared for seed in range(arguments.seeds)]
    out = arguments.out or RESULTS / f"training_{arguments.device}.csv"
    pool = torch.multiprocessing.get_context("spawn").Pool(
        arguments.processes, torch.set_num_threads, (1,)
    )
    with written_to(out) as rows, pool:
        for (case, *_), row in zip(runs, pool.imap(train, runs), strict=True):
            rows.append(row | verified[case] | machine(arguments.device))
            print(f"{len(rows)} of {len(runs)}:", *list(row.values())[:7], flush=True)
        pool.close()
        pool.join()

    print(f"\n{table(lines(rows))}\n\n{(time.monotonic() - begin) / 60:.1f} minutes")
    wrong = [
        ", ".join(str(row[key]) for key in (*CASE, "seed")) + ": has not converged"
        for row in rows
        if not is_settled(row)
    ]
    if arguments.seeds > 1:
        for variant, where in changed(rows).items():
            if variant == OFF:
                print(f"rounding alone exceeds PyTorch's spread: {'; '.join(where)}")
            else:
                wrong.append(f"{variant} changes training: {'; '.join(where)}")
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
