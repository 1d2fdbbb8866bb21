"""Check that no save mode changes training: test accuracy and loss, over several seeds.

A small residual network with ReLU and a small EfficientNet-like network with SiLU learn
scikit-learn's handwritten digits, in float32 and under bfloat16 autocast. All variants of a seed
have the same initial weights and the same batches. All seeds have the same test images: another
split would add to the spread over the seeds, which the differences are compared with. The variant
"torch, weights off by 1e-7" shows how much rounding alone changes.

Such networks learn these images well with wrong gradients too, so the first gradient is compared
before training. The exit status is 1 if the means over the seeds of the final test accuracy or test
loss differ from PyTorch's by more than two standard deviations over PyTorch's seeds, and if a
training has not converged. A single seed has no spread, and is not judged.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

import torch
import torch.nn.functional as F
from common import (
    IN_PLACE,
    RESULTS,
    Row,
    by_seed,
    exact_convolutions,
    parser_of,
    round_weights,
    write_csv,
)
from networks import InvertedResidual, MakeActivation, ResidualBlock, classifier
from sklearn.datasets import load_digits
from torch import Tensor, nn

import inplace_ops

OFF = "torch, weights off by 1e-7"
CONVERT = "convert"
BATCH = 64
TEST_IMAGES = 517  # leaves 20 batches to train on
SETTLED = 0.01  # the largest change of the training loss in the last quarter of the epochs

WIDTHS = [(8, 8, 1), (8, 16, 2), (16, 16, 1)]


class Network(NamedTuple):
    """A network to train.

    Attributes:
        build: Makes it from a function that makes an activation.
        theirs: PyTorch's activation.
        ours: Functions that make this package's, by save mode.
    """

    build: Callable[[MakeActivation], nn.Module]
    theirs: type[nn.Module]
    ours: dict[str, MakeActivation]


NETWORKS = {
    "residual, ReLU": Network(
        partial(classifier, block=ResidualBlock, widths=WIDTHS, channels=1),
        nn.ReLU,
        {"mask": inplace_ops.ReLU},
    ),
    "EfficientNet-like, SiLU": Network(
        partial(classifier, block=InvertedResidual, widths=WIDTHS, channels=1, last=64),
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
        network = NETWORKS[self.network]
        torch.manual_seed(seed)
        in_place = partial(network.theirs, inplace=True)
        model = network.build(network.ours.get(self.variant, in_place)).to(self.device)
        if self.variant == OFF:
            round_weights(model)
        if self.variant == CONVERT:
            inplace_ops.convert(model)
        return model


def digits(device: str) -> tuple[Tensor, ...]:
    """Return images (N, 1, 8, 8) from 0 to 1 and labels (N,), for training and for testing."""
    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(bunch.target, dtype=torch.int64)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    test, training = order[:TEST_IMAGES], order[TEST_IMAGES:]
    chosen = (images[training], labels[training], images[test], labels[test])
    return tuple(tensor.to(device) for tensor in chosen)


def verified(cases: list[Case], images: Tensor, labels: Tensor) -> dict[Case, Row]:
    """Return each case's saved bytes, and its first gradient's relative difference from PyTorch's.

    Raises:
        AssertionError: If ours save as many bytes as PyTorch's, or if a gradient differs too much.
    """
    with exact_convolutions():
        steps = {case: first_step(case, images, labels) for case in cases}
    columns = {}
    for case in cases:
        (saved, gradient), (others, expected) = steps[case], steps[replace(case, variant=IN_PLACE)]
        assert (saved == others) == (case.variant in (IN_PLACE, OFF)), f"{case} saves {saved} bytes"
        off_by = ((gradient - expected).norm() / expected.norm()).item()
        assert off_by <= PRECISIONS[case.precision][1], f"{case}: gradient off by {off_by:.1e}"
        columns[case] = {"saved_bytes": saved, "gradient_off_by": f"{off_by:.1e}"}
    return columns


def first_step(case: Case, images: Tensor, labels: Tensor) -> tuple[int, Tensor]:
    """Return the saved bytes and all gradients of a step."""
    model = case.build(0)
    with case.autocast():
        saved = inplace_ops.saved_bytes(model, images)
        loss = F.cross_entropy(model(images), labels)
    loss.backward()
    return saved, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def train(run: tuple[Case, int, int]) -> Row:
    """Train a case from a seed for some epochs, and return the row of the run."""
    case, seed, epochs = run
    torch.backends.cudnn.deterministic = True
    images, labels, test_images, test_labels = digits(case.device)
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


def is_settled(row: Row) -> bool:
    """Whether the training loss has changed little in the last quarter of the epochs."""
    losses = [float(loss) for loss in row["training_losses"].split()]
    return abs(losses[-1] - losses[3 * len(losses) // 4 - 1]) <= SETTLED


def changed(rows: list[Row]) -> dict[str, list[str]]:
    """Return, by variant, the networks, precisions and columns that leave PyTorch's spread."""
    found: dict[str, list[str]] = {}
    keys = ("network", "precision", "variant")
    for values in dict.fromkeys(tuple(row[key] for key in keys) for row in rows):
        case = dict(zip(keys, values, strict=True))
        for column in ("test_accuracy", "test_loss"):
            ours = by_seed(rows, column, **case)
            theirs = by_seed(rows, column, **{**case, "variant": IN_PLACE})
            if abs(mean(ours) - mean(theirs)) > 2 * stdev(theirs):
                where = f"{case['network']}, {case['precision']}: {column}"
                found.setdefault(case["variant"], []).append(where)
    return found


def main() -> None:
    """Verify, train, write the CSV, and exit with 1 if training changes."""
    parser = parser_of(__doc__)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--processes", type=int, default=2, help="with one CPU thread each")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cases = [
        Case(name, precision, variant, arguments.device)
        for name, network in NETWORKS.items()
        for precision in arguments.precisions
        for variant in (IN_PLACE, OFF, *network.ours, CONVERT)
    ]
    images, labels, *_ = digits(arguments.device)
    columns = verified(cases, images[:BATCH], labels[:BATCH])
    runs = [(case, seed, arguments.epochs) for case in cases for seed in range(arguments.seeds)]
    path = arguments.out or RESULTS / f"training_{arguments.device}.csv"
    context = torch.multiprocessing.get_context("spawn")
    with context.Pool(arguments.processes, torch.set_num_threads, (1,)) as pool:
        trained = zip(runs, pool.imap(train, runs), strict=True)
        rows = write_csv(
            path, (row | columns[case] for (case, *_), row in trained), arguments.device
        )
        pool.close()
        pool.join()
    wrong = [f"{row} has not converged" for row in rows if not is_settled(row)]
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
