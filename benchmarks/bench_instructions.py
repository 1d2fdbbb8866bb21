"""Count the instructions of a training step that is bound by the host, for each of its blocks.

Small tensors, of 9 KiB, leave the kernels little to do: what counts is how much the host does for
each block, in PyTorch and in the recompute engine. Valgrind's callgrind counts the instructions of
forward and of backward. Counts vary by 1% from run to run, whatever else the machine does; times of
such steps vary by a tenth.

--check writes no file. It fails if what `convert` adds to a block is over 2% of the block's
instructions more than the committed counts say.

Needs valgrind and a C compiler.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from common import IN_PLACE, RESULTS, Row, parser_of, read_csv, write_csv
from networks import ResidualBlock, TransformerBlock, chain, linear_chain
from torch import nn
from variants import CONVERT, Step, expected_of, verify_step

import inplace_ops

BLOCKS = 10
STEPS = 2  # that are counted
ALLOWED = 0.02  # of a block's instructions


class Chain(NamedTuple):
    """A network of equal blocks.

    Attributes:
        build: Returns the network.
        shape: The shape of its input.
    """

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]


_IMAGES = 2, 8, 12, 12
CHAINS = {
    "convolution, batch norm, SiLU": Chain(
        lambda: chain(partial(nn.SiLU, inplace=True), BLOCKS, channels=8, kernel=1), _IMAGES
    ),
    "convolution, batch norm, ReLU": Chain(
        lambda: chain(partial(nn.ReLU, inplace=True), BLOCKS, channels=8, kernel=1), _IMAGES
    ),
    "linear layer, layer norm, GELU": Chain(
        lambda: linear_chain(nn.GELU, BLOCKS, features=64), (36, 64)
    ),
    "residual block": Chain(
        lambda: nn.Sequential(
            *(ResidualBlock(8, 8, 1, partial(nn.ReLU, inplace=True)) for _ in range(BLOCKS))
        ),
        _IMAGES,
    ),
    "transformer block": Chain(
        lambda: nn.Sequential(*(TransformerBlock(32, heads=2) for _ in range(BLOCKS))), (2, 36, 32)
    ),
}
PHASES = "forward", "backward"
_SEPARATOR = " / "


def count(library: Path) -> None:
    """Run all steps, with a dump for each network, variant and phase: in valgrind."""
    requests = ctypes.PyDLL(str(library))
    torch.set_num_threads(1)
    gc.disable()  # a collection would count for the phase in which it happens to run
    for name, network in CHAINS.items():
        torch.manual_seed(0)
        model, converted = network.build(), network.build()
        converted.load_state_dict(model.state_dict())
        inplace_ops.convert(converted)
        x = torch.randn(network.shape)
        expected = expected_of(Step(model, model, x))
        for variant, each in ((IN_PLACE, model), (CONVERT, converted)):
            step = Step(each, each, x)
            verify_step(step, expected)
            _count_step(requests, step, _SEPARATOR.join((name, variant)))


def _count_step(requests: ctypes.PyDLL, step: Step, label: str) -> None:
    gradient = torch.ones_like(step.forward())
    for _ in range(4):
        step.forward().backward(gradient)  # until all decisions are made; gradients stay allocated
    requests.begin()
    outputs = [step.forward() for _ in range(STEPS)]
    requests.end(_SEPARATOR.join((label, PHASES[0])).encode())
    requests.begin()
    for output in outputs:
        output.backward(gradient)
    requests.end(_SEPARATOR.join((label, PHASES[1])).encode())


def counted() -> dict[tuple[str, str, str], float]:
    """Return the instructions of a block, in thousands, by network, variant and phase."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "callgrind.so")
        source = Path(__file__).with_name("callgrind.c")
        compile_command = [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-O2"]
        subprocess.run([*compile_command, "-o", library, source], check=True)
        command = ["valgrind", "--quiet", "--tool=callgrind", "--instr-atstart=no"]
        command += [f"--callgrind-out-file={folder}/dump", sys.executable, __file__]
        seeded = {**os.environ, "PYTHONHASHSEED": "0"}
        subprocess.run([*command, "--in-valgrind", str(library)], check=True, env=seeded)
        counts = {}
        for dump in Path(folder).glob("dump.*"):
            text = dump.read_text()
            label = re.search(r"^desc: Trigger: Client Request: (.*)$", text, re.M)
            total = re.search(r"^summary: (\d+)$", text, re.M)
            if label and total:
                network, variant, phase = label[1].split(_SEPARATOR)
                counts[network, variant, phase] = int(total[1]) / (1000 * STEPS * BLOCKS)
        return counts


def rows_of(counts: dict[tuple[str, str, str], float]) -> Iterator[Row]:
    """Yield a row for each network: thousands of instructions of a block, and their ratio."""
    for name in CHAINS:
        by_variant = {
            variant: [counts[name, variant, phase] for phase in PHASES]
            for variant in (IN_PLACE, CONVERT)
        }
        torch_sum, convert_sum = map(sum, by_variant.values())
        yield {
            "block": name,
            **{
                f"{prefix}_{phase}": f"{value:.1f}"
                for prefix, variant in (("torch", IN_PLACE), ("convert", CONVERT))
                for phase, value in zip(PHASES, by_variant[variant], strict=True)
            },
            "added": f"{convert_sum - torch_sum:.1f}",
            "over_torch": f"{convert_sum / torch_sum:.3f}",
        }


def check(path: Path) -> None:
    """Raise if `convert` adds more instructions to a block than the committed file says.

    PyTorch is counted again too: some processes take 3% more for both, for example if another
    network did not run before.
    """
    allowed = {
        row["block"]: float(row["added"])
        + ALLOWED * sum(float(row[f"convert_{phase}"]) for phase in PHASES)
        for row in read_csv(path)
    }
    exceeded = []
    for row in rows_of(counted()):
        name, added = str(row["block"]), float(row["added"])
        print(f"{name}: {added:.1f} thousand instructions, at most {allowed[name]:.1f}")
        if added > allowed[name]:
            exceeded.append(name)
    if exceeded:
        raise SystemExit(f"convert takes more instructions than before: {', '.join(exceeded)}")


def main() -> None:
    """Run the command."""
    parser = parser_of(__doc__)
    parser.add_argument("--check", action="store_true", help="compare with the committed counts")
    parser.add_argument("--out", type=Path, default=RESULTS / "instructions_cpu.csv")
    parser.add_argument("--in-valgrind", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.in_valgrind:
        return count(arguments.in_valgrind)
    if arguments.check:
        return check(arguments.out)
    torch.set_num_threads(1)
    write_csv(arguments.out, rows_of(counted()), "cpu")
    return None


if __name__ == "__main__":
    main()
