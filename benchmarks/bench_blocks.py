"""Memory that a block of convolution, norm and activation saves for backward, and its time.

A chain of such blocks runs with PyTorch's activation out of place and in place, converted, with
each block in a checkpoint, and compiled, without and with a budget of half the memory.

tensors saved: bytes that are allocated when forward has returned, as the allocator reports them.
The bytes of a shorter chain are subtracted from those of a longer chain, and the difference is
divided by the number of blocks between them and by the size of a block's output.

A step of forward and backward of the longer chain is timed in turn with the other variants, and
compared with "torch in place" of the same repetition. Before that, all gradients are compared with
those of "torch out of place".
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from baselines import IN_PLACE, OUT_OF_PLACE, checkpointed, compiled, gradient_of
from measure import (
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
from verification import exact_convolutions

import inplace_ops

SHORT, LONG = 2, 6
ACTIVATIONS: dict[str, Callable[..., nn.Module]] = {"ReLU": nn.ReLU, "SiLU": nn.SiLU}

Run = Callable[[Tensor], Tensor]


def chain(activation: Callable[..., nn.Module], blocks: int, channels: int) -> nn.Sequential:
    """Return a chain of convolution, norm and activation blocks that ends in a convolution."""

    def convolution() -> nn.Module:
        return nn.Conv2d(channels, channels, 3, padding=1, bias=False)

    torch.manual_seed(0)
    return nn.Sequential(
        *(
            nn.Sequential(convolution(), nn.BatchNorm2d(channels), activation())
            for _ in range(blocks)
        ),
        convolution(),
    )


def in_place(model: nn.Sequential, x: Tensor) -> Run:
    """Set PyTorch's activations in place, and return the model."""
    for module in model.modules():
        if hasattr(module, "inplace"):
            module.inplace = True
    return model


def converted(model: nn.Sequential, x: Tensor) -> Run:
    """Convert the model, and return it."""
    inplace_ops.convert(model)
    return model


VARIANTS: dict[str, Callable[[nn.Sequential, Tensor], Run]] = {
    OUT_OF_PLACE: lambda model, x: model,
    IN_PLACE: in_place,
    "inplace_ops.convert": converted,
    "checkpoint of each block": lambda model, x: checkpointed(model, ["Sequential"]),
    "torch.compile": lambda model, x: compiled(model, budget=1.0),
    "torch.compile, memory budget 0.5": lambda model, x: compiled(model, budget=0.5),
}


def step(run: Run, x: Tensor) -> None:
    """Run forward and backward."""
    run(x).square().mean().backward()


def gradient(model: nn.Module, run: Run, x: Tensor) -> Tensor:
    """Return all parameters' gradients of a step as one vector."""
    model.zero_grad()
    step(run, x)
    return gradient_of(model)


def main() -> None:
    """Measure, print the table, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--size", type=int, default=56, help="the images' height and width")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device, clock = arguments.device, Clock(arguments.device)
    shape = (arguments.batch, arguments.channels, arguments.size, arguments.size)
    x = torch.randn(shape, device=device)

    with written_to(arguments.out or RESULTS / f"blocks_{device}.csv") as rows:
        for name, activation in ACTIVATIONS.items():
            torch._dynamo.reset()  # Dynamo stops compiling at a limit of recompilations
            short, long = (
                chain(activation, n, arguments.channels).to(device) for n in (SHORT, LONG)
            )
            models, runs, saved = {}, {}, {}
            for variant, make in VARIANTS.items():
                allocated = []
                for model in (copy.deepcopy(short), copy.deepcopy(long)):
                    run = make(model, x)
                    run(x)  # compiles, and allocates what only a first call needs
                    allocated.append(memory_of(partial(run, x), device)[1])
                models[variant], runs[variant] = model, run
                saved[variant] = (allocated[1] - allocated[0]) / (LONG - SHORT) / x.nbytes
            with exact_convolutions():
                expected = gradient(long, long, x)
                distances = {
                    variant: (gradient(models[variant], run, x) - expected).norm() / expected.norm()
                    for variant, run in runs.items()
                }
            assert all(distance < 1e-3 for distance in distances.values()), distances
            times = times_in_turn(
                {variant: partial(step, run, x) for variant, run in runs.items()},
                arguments.repeats,
                clock,
                after=lambda variant, models=models: models[variant].zero_grad(),
            )
            for variant in VARIANTS:
                first_quartile, median, third_quartile = ratio_quartiles(
                    times[variant], times[IN_PLACE]
                )
                row: dict[str, Any] = {
                    "activation": name,
                    "variant": variant,
                    "input": " x ".join(map(str, shape)),
                    "tensors saved": f"{saved[variant]:.2f}",
                    "ms a block": f"{quartiles(times[variant])[1] / LONG:.2f}",
                    "time over torch in place": f"{median:.2f}",
                    "quartiles": f"{first_quartile:.2f} to {third_quartile:.2f}",
                    "gradient off by": f"{distances[variant]:.0e}",
                }
                rows.append(row | machine(device))
    print(table([list(row)] + [[r[c] for c in row] for r in rows]))


if __name__ == "__main__":
    main()
