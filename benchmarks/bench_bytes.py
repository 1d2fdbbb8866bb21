"""Saved, peak and moved bytes of a training step, for networks as they are and converted.

saved: the bytes that autograd saves for backward, counted by `inplace_ops.saved_bytes`, without
parameters, buffers and the input. peak: the most bytes that a step of forward and backward
allocates at one time, gradients included. moved: the bytes that all operations of a step read and
write, where each operation counts each of its tensors once. All three are counts that follow from
the shapes, with one exception: the peak includes memory that PyTorch's kernels allocate, on a CPU
for each thread.

Each network runs in every dtype policy and with several `max_ops`. It is counted only if the
gradients before and after conversion agree. Under autocast the weights of convolutions and linear
layers are in bfloat16 from the start, so that activations are counted and copies of weights are
not.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from baselines import MAX_OPS, backward, converted, gradient_of
from measure import RESULTS, Failures, machine, memory_of, table, written_to
from networks import NETWORKS, rows_of_networks
from policies import POLICIES, Policy, autocast, emulation, of_dtype
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import inplace_ops

DEFAULT_POLICIES = ("float32", "bfloat16", "CUDA autocast")
# By whether the policy is float32: the allowed norm of the gradients' difference over their norm.
TOLERANCES = {True: 1e-5, False: 5e-2}


class MovedBytes(TorchDispatchMode):
    """Counts the bytes that operations read and write.

    An operation reads each of its inputs and writes each of its outputs. An in-place operation
    reads and writes the tensor that it modifies; `copy_`, `fill_` and `zero_` only write it. Views
    and operations that only allocate count nothing. An expanded tensor counts as much as its
    memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs, outputs = (
            [t for t in tree_leaves(values) if isinstance(t, Tensor)]
            for values in ((args, kwargs), result)
        )
        written = _written(func, args)
        known = {t.untyped_storage().data_ptr() for t in inputs}
        new = [t for t in outputs if t.untyped_storage().data_ptr() not in known]
        name = func.overloadpacket.__name__
        if not (new or written) or name.startswith(("empty", "new_empty", "resize_")):
            return result
        if name.startswith("new_") or name.endswith("_like"):  # reads its input's shape alone
            inputs = []
        elif name in ("copy_", "fill_", "zero_"):
            inputs = [t for t in inputs if all(t is not w for w in written)]
        self.count += sum(map(_own_bytes, [*inputs, *new, *written]))
        return result


def _written(func: Any, args: tuple[Any, ...]) -> list[Tensor]:
    """Return the arguments that an operation writes to."""
    found = []
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += [t for t in tree_leaves(value) if isinstance(t, Tensor)]
    return found


def _own_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements, where an expanded dimension counts once."""
    count = tensor.itemsize
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride or not size else 1
    return count


class Bytes(NamedTuple):
    """The bytes that a step saves, allocates at most, and reads and writes."""

    saved: int
    peak: int
    moved: int


class Step:
    """A training step of a model in a dtype policy."""

    def __init__(self, model: nn.Module, x: Tensor, policy: Policy) -> None:
        self.model, self.x, self.policy = model, x, policy

    def forward(self) -> Any:
        """Return the outputs, with the same random numbers at each call."""
        torch.manual_seed(0)
        with autocast(self.policy, self.x.device.type):
            return self.model(self.x)

    def run(self) -> None:
        """Run forward and backward."""
        backward(self.forward())

    def gradient(self) -> Tensor:
        """Return all parameters' gradients of a step as one vector in float64."""
        self.run()
        return gradient_of(self.model).double()

    def bytes(self) -> Bytes:
        """Return the bytes that a step saves, allocates at most, and moves."""
        torch.manual_seed(0)
        with autocast(self.policy, self.x.device.type):
            saved = inplace_ops.saved_bytes(self.model, self.x)
        peak = memory_of(self.run, self.x.device.type)[0]
        self.model.zero_grad()
        with MovedBytes() as moved:
            self.run()
        self.model.zero_grad()
        return Bytes(saved, peak, moved.count)


def measured(
    name: str, policy_name: str, numbers: Sequence[int], device: str
) -> list[dict[str, Any]]:
    """Return the rows of a network in one policy, one for each `max_ops`."""
    network, policy = NETWORKS[name], POLICIES[policy_name]
    torch.manual_seed(0)
    model = network.build().to(device).train().to(policy.weights)
    x = of_dtype(network.input(network.small, device), policy)
    if policy.autocast:
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
                module.to(torch.bfloat16)
    rows = []
    with emulation(policy, device):
        original = Step(copy.deepcopy(model), x, policy)
        expected, before = original.gradient(), original.bytes()
        for max_ops in numbers:
            step = Step(converted(model, max_ops), x, policy)
            difference = ((step.gradient() - expected).norm() / expected.norm()).item()
            if not difference <= TOLERANCES[policy.is_float32]:
                raise AssertionError(f"max_ops={max_ops}: gradients differ by {difference:.1e}")
            after = step.bytes()
            rows.append(
                {
                    "network": name,
                    "policy": policy_name,
                    "max_ops": max_ops,
                    "input": " x ".join(map(str, x.shape)),
                    **_columns("saved", before.saved, after.saved),
                    **_columns("peak", before.peak, after.peak),
                    **_columns("moved", before.moved, after.moved),
                    "gradients_differ_by": f"{difference:.1e}",
                    **machine(device),
                }
            )
    return rows


def _columns(kind: str, before: int, after: int) -> dict[str, int | str]:
    return {f"{kind}_torch": before, kind: after, f"{kind}_ratio": f"{after / before:.3f}"}


def main() -> None:
    """Count, print the table, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=DEFAULT_POLICIES)
    parser.add_argument("--max-ops", nargs="+", type=int, default=MAX_OPS)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    failures = Failures()
    with written_to(arguments.out or RESULTS / f"bytes_{arguments.device}.csv") as rows:
        measure = partial(measured, numbers=arguments.max_ops, device=arguments.device)
        rows.extend(rows_of_networks(arguments.networks, arguments.policies, measure, failures))
    columns = ["network", "policy", "max_ops", "saved_ratio", "peak_ratio", "moved_ratio"]
    print(table([columns, *([str(row[c]) for c in columns] for row in rows)]))
    failures.exit()


if __name__ == "__main__":
    main()
