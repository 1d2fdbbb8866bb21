"""Whole networks in training: peak memory, step time, and the largest batch that fits.

The activations are run three ways: PyTorch out of place, PyTorch in place (as the network has it),
and after `inplace_ops.convert`; `--settings` compares several of its settings. All
start from the same weights; before anything is timed loss and gradients are compared with PyTorch
out of place. A way that fails is named and left out, and the exit status is 1. Steps are timed in
turn: forward, backward and the optimizer (SGD with momentum).

peak: what a step allocates at most on top of weights and momentum. Largest batch: within a limit on
all that PyTorch allocates, estimated from the peaks at two batch sizes, and on CUDA in some modes
(`--search`) then found by running into the limit.
"""

from __future__ import annotations

import argparse
import copy
import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measure import (
    MIB,
    RESULTS,
    Clock,
    Failures,
    machine,
    memory_of,
    table,
    time_columns,
    times_in_turn,
    written_to,
)
from torch import Tensor, nn
from verification import exact_convolutions
from whole_models import IN_PLACE, MODES, OUT_OF_PLACE, Mode, with_activations_out_of_place
from yolo_like import YoloLike

import inplace_ops

# What convert is given.
SETTINGS: dict[str, dict[str, Any]] = {
    "inplace_ops": {},
    "inplace_ops, max_ops=1": {"max_ops": 1},
    "inplace_ops, max_ops=8": {"max_ops": 8},
    "inplace_ops, max_ops=16": {"max_ops": 16},
}


def timm_model(name: str) -> nn.Module:
    """A network of timm, untrained."""
    return importlib.import_module("timm").create_model(name)


# The network, and on a GPU the side of its images and how many: with fewer, launching the kernels
# would take longer than they do, 10 to 40 ms of Python a step.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    "EfficientNet-B0": (partial(timm_model, "efficientnet_b0"), 224, 256),
    "EfficientNetV2-S": (partial(timm_model, "efficientnetv2_s"), 224, 160),
    "YOLO-like": (YoloLike, 640, 32),
    "ResNet-50": (partial(timm_model, "resnet50"), 224, 128),
    "Darknet-53": (partial(timm_model, "darknet53"), 224, 64),  # LeakyReLU
}


# How far loss and gradients may be from PyTorch's, relatively, without autocast and with it: in
# bfloat16 a last bit that differs in one layer's output changes all later ones.
TOLERANCES = {False: (1e-4, 1e-2), True: (2e-2, 0.3)}


class Training:
    """A copy of a network in training."""

    def __init__(self, network: nn.Module, way: str, mode: Mode, device: str) -> None:
        self.mode, self.device = mode, device
        out_of_place = way == OUT_OF_PLACE
        self.network = (
            with_activations_out_of_place(network) if out_of_place else copy.deepcopy(network)
        )
        self.network.to(device, memory_format=mode.memory_format).train()
        if way in SETTINGS:
            inplace_ops.convert(self.network, **SETTINGS[way])
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=1e-3, momentum=0.9)

    def images(self, batch: int, side: int) -> Tensor:
        """Random images."""
        images = torch.randn(batch, 3, side, side, device=self.device)
        return images.to(memory_format=self.mode.memory_format)

    def autocast(self) -> torch.autocast:
        """The mode's."""
        return torch.autocast(self.device, torch.bfloat16, enabled=self.mode.autocast)

    def backward(self, images: Tensor) -> Tensor:
        """Forward and backward; returns the loss, of ten classes in turn."""
        with self.autocast():
            output = self.network(images).float()
        classes = torch.arange(output[:, 0].numel(), device=self.device) % 10
        loss = F.cross_entropy(output, classes.view_as(output[:, 0]))
        loss.backward()
        return loss.detach()

    def step(self, images: Tensor) -> None:
        """One step of the optimizer."""
        self.backward(images)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def loss_and_gradient(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The loss and the gradients of all parameters, one after the other."""
        loss = self.backward(images)
        gradients = [p.grad.flatten() for p in self.network.parameters() if p.grad is not None]
        self.optimizer.zero_grad()
        return loss, torch.cat(gradients)

    def fixed_bytes(self) -> int:
        """Weights, buffers and momentum."""
        parameters = sum(p.nbytes for p in self.network.parameters())
        return 2 * parameters + sum(b.nbytes for b in self.network.buffers())


def verify(
    way: str, training: Training, images: Tensor, expected: tuple[Tensor, Tensor], mode: Mode
) -> None:
    """Raise unless the loss and the gradients are the expected ones."""
    loss, gradient = training.loss_and_gradient(images)
    distance = ((gradient - expected[1]).norm() / expected[1].norm()).item()
    print(f"  {way}: loss {loss:.5f}, gradient off by {distance:.1e}", flush=True)
    loss_tolerance, gradient_tolerance = TOLERANCES[mode.autocast]
    torch.testing.assert_close(loss, expected[0], rtol=loss_tolerance, atol=0)
    if not distance <= gradient_tolerance:
        raise AssertionError(f"the gradient is off by {distance:.2g}")


def largest_batch(fits: Callable[[int], bool], estimate: int) -> int:
    """The largest batch that fits, to a 32nd, searched from an estimate."""
    step = max(1, estimate // 32)
    batch = estimate
    if fits(batch):
        while fits(batch + step):
            batch += step
        return batch
    while batch > 0 and not fits(batch):
        batch -= step
    return max(batch, 0)


def fits_memory(training: Training, side: int, batch: int) -> bool:
    """Whether a step runs within the limit that is set on the process."""
    try:
        training.step(training.images(batch, side))
        fits = True
    except RuntimeError as error:
        # cuDNN finds no engine where no workspace fits.
        if "out of memory" not in str(error) and "unable to find an engine" not in str(error):
            raise
        fits = False
    training.optimizer.zero_grad()
    torch.cuda.empty_cache()
    return fits


def estimate_batch(fixed: int, side: int, limit: int, peaks: list[int], batch: int) -> int:
    """The largest batch within `limit` bytes, from the peaks at `batch` and half of it."""
    each = (peaks[0] - peaks[1]) / (batch - batch // 2)
    fixed += int(peaks[0] - each * batch)
    each += 3 * side**2 * torch.float32.itemsize  # the images
    return max(1, int((limit - fixed) / each))


def search_batch(training: Training, side: int, limit: int, estimate: int) -> int:
    """The largest batch with which a step really runs within `limit` bytes, on CUDA."""
    training.step(training.images(2, side))  # the optimizer allocates its momentum
    total = torch.cuda.get_device_properties().total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))
    try:
        return largest_batch(partial(fits_memory, training, side), estimate)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def measure(
    name: str,
    network: nn.Module,
    mode_name: str,
    side: int,
    batch: int,
    arguments: argparse.Namespace,
    failures: Failures,
) -> list[dict[str, Any]]:
    """The rows of a network in one mode, of the ways that pass."""
    device, mode = arguments.device, MODES[mode_name]
    trainings = {OUT_OF_PLACE: Training(network, OUT_OF_PLACE, mode, device)}
    images = trainings[OUT_OF_PLACE].images(batch, side)
    with exact_convolutions():
        expected = trainings[OUT_OF_PLACE].loss_and_gradient(images)
    for way in (IN_PLACE, *arguments.settings):
        with failures.recorded(f"{name}, {mode_name}, {way}"):
            training = Training(network, way, mode, device)
            with exact_convolutions():
                verify(way, training, images, expected, mode)
            trainings[way] = training
    if IN_PLACE not in trainings:
        return []
    del training, expected
    peaks: dict[str, list[int]] = {}
    for way in trainings:
        step = trainings[way].step
        step(images)  # the optimizer allocates its momentum
        parts = (images, images[: batch // 2])
        peaks[way] = [memory_of(partial(step, part), device)[0] for part in parts]
    steps = {way: partial(training.step, images) for way, training in trainings.items()}
    times = times_in_turn(steps, arguments.repetitions, Clock(device))
    fixed = trainings[OUT_OF_PLACE].fixed_bytes()
    del trainings, images, step, steps, parts  # the largest batch has the memory for itself

    rows = []
    limit = int(arguments.memory_limit * 1024 * MIB)
    runs = device == "cuda" and mode_name in arguments.search
    for way in times:
        largest = estimate_batch(fixed, side, limit, peaks[way], batch)
        if runs:
            largest = search_batch(Training(network, way, mode, device), side, limit, largest)
        rows.append(
            {
                "network": name,
                "mode": mode_name,
                "variant": way,
                "batch": batch,
                "image_side": side,
                "peak_mib": f"{peaks[way][0] / MIB:.1f}",
                **time_columns(times[way], times[IN_PLACE]),
                "memory_limit_gib": arguments.memory_limit,
                "largest_batch": largest,
                "largest_batch_by": "running" if runs else "estimate",
                **machine(device),
            }
        )
    return rows


def main() -> None:
    """Verify, measure, print the table, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument(
        "--settings",
        nargs="+",
        choices=list(SETTINGS),
        default=["inplace_ops"],
        help="of convert, to compare",
    )
    parser.add_argument("--batch", type=int, help="of images; 4 on the CPU")
    parser.add_argument("--side", type=int, help="of the images; 64 on the CPU")
    parser.add_argument("--memory-limit", type=float, default=8, help="GiB, for the largest batch")
    parser.add_argument(
        "--search",
        nargs="*",
        choices=list(MODES),
        default=["float32", "bfloat16, channels_last"],
        help="modes in which the largest batch is found by running, on CUDA",
    )
    parser.add_argument("--repetitions", type=int, default=11)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    on_cpu = arguments.device == "cpu"

    failures = Failures()
    with written_to(arguments.out or RESULTS / f"networks_{arguments.device}.csv") as rows:
        for name in arguments.networks:
            build, side, batch = NETWORKS[name]
            side = arguments.side or (64 if on_cpu else side)
            batch = arguments.batch or (4 if on_cpu else batch)
            torch.manual_seed(0)
            with failures.recorded(name):
                try:
                    network = build()
                except ImportError as error:
                    print(f"{name}: skipped: {error}", flush=True)
                    continue
                for mode in arguments.modes:
                    print(f"{name}, {mode}", flush=True)
                    with failures.recorded(f"{name}, {mode}"):
                        rows += measure(name, network, mode, side, batch, arguments, failures)

    columns = ["network", "mode", "variant", "peak_mib", "median_ms", "ratio_to_torch_in_place"]
    columns += ["ratio_first_quartile", "ratio_third_quartile", "largest_batch"]
    print(table([columns, *([str(row[c]) for c in columns] for row in rows)]))
    failures.exit()


if __name__ == "__main__":
    main()
