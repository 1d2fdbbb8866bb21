"""What the compiler made of the CUDA kernels: checked in the disassembly, without a GPU.

Needs the CUDA extension, and cuobjdump with nvdisasm: those of a CUDA toolkit, of NVIDIA's packages
nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm, or of Triton's.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

import inplace_ops

# An H200: instructions and special functions (a lane each) that its 132 multiprocessors issue per
# byte copied: 128 and 16 a cycle at 1.98 GHz, over 4.3 TB/s.
INSTRUCTIONS_A_BYTE = 132 * 128 * 1.98e9 / 4.3e12
SPECIAL_A_BYTE = 132 * 16 * 1.98e9 / 4.3e12
# Loads under way that a multiprocessor needs (Little's law): half of 4.3 TB/s over 1 us.
BYTES_UNDER_WAY = 4.3e12 / 2 * 1e-6 / 132
REGISTERS, THREADS, BLOCK = 65536, 2048, 256
ACCESSES = 2  # of 16 bytes to each tensor, by a lane
SIZE = {"float": 4, "Half": 2, "BFloat16": 2}
USUAL_BITS = {
    "SiLU": {"float": 6, "Half": 7, "BFloat16": 5},
    "SiLUDerivative": {"float": 16, "Half": 8, "BFloat16": 8},
}
INPUTS = {"BackwardFromOutput": 2, "BackwardFromBoth": 2, "DoubleBackward": 3}
BITS = {
    "ForwardKeeping": "STG.E.U8",
    "BackwardFromBits": "LDG.E.U8",
    "BackwardFromBoth": "LDG.E.U8",
    "DoubleBackward": "LDG.E.U8",
}


def find_cuobjdump() -> str | None:
    folders = [os.environ.get("PATH", "")]
    for path in map(Path, sys.path):
        folders += map(str, path.glob("nvidia/*/bin"))
        folders.append(str(path / "triton/backends/nvidia/bin"))
    return shutil.which("cuobjdump", path=os.pathsep.join(folders))


CUOBJDUMP = find_cuobjdump()
LIBRARY = next(Path(inplace_ops.__file__).parent.glob("_C_cuda*.so"), None)
pytestmark = [
    pytest.mark.skipif(LIBRARY is None, reason="the CUDA extension is not built"),
    pytest.mark.skipif(CUOBJDUMP is None, reason="cuobjdump is not installed"),
]
on_each_architecture = pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])


def cuobjdump(*arguments: str) -> str:
    command = [str(CUOBJDUMP), *arguments, str(LIBRARY)]
    path = os.path.dirname(str(CUOBJDUMP)) + os.pathsep + os.environ.get("PATH", "")
    return subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "PATH": path}
    ).stdout


class Kernel(NamedTuple):
    name: str
    functor: str
    activation: str
    scalar: str
    count: int  # elements of an access
    registers: int
    stack: int


@functools.cache
def kernels(architecture: str) -> list[Kernel]:
    usage = cuobjdump("-res-usage", "-arch", architecture)
    mangled = (
        r"Function (\S*run_warpsILi(\d)E\wNS_\d+([A-Z]\w*?)INS_\d+([A-Z]\w*?)I"
        r"(?:NS_\d([A-Z]\w*?)E|(\w))E\S*):\s+REG:(\d+) STACK:(\d+)"
    )
    found = [
        Kernel(name, functor, activation, named or {"f": "float"}.get(builtin, builtin),
               int(count), int(registers), int(stack))
        for name, count, functor, activation, named, builtin, registers, stack
        in re.findall(mangled, usage)
    ]  # fmt: skip
    if not found:
        pytest.skip(f"not built for {architecture}")
    assert len(found) == usage.count("run_warps")
    return found


def vector_kernels(architecture: str) -> list[Kernel]:
    found = [kernel for kernel in kernels(architecture) if kernel.count > 1]
    assert {kernel.scalar for kernel in found} >= set(SIZE)
    return [kernel for kernel in found if kernel.scalar in SIZE]


def bits_of(kernel: Kernel) -> int:
    if kernel.functor not in BITS:
        return 0
    return USUAL_BITS.get(kernel.activation, {}).get(kernel.scalar, 1)


def whole_tile(kernel: Kernel, architecture: str) -> Counter[str]:
    """The instructions, by name, of the shortest way through the kernel for a whole tile.

    It passes all 16-byte stores and as many accesses to packed bits as there are. A branch to the
    tails of SiLU's inverse, which are rare, is longer than the way past it.
    """
    sass = cuobjdump("-sass", "-arch", architecture, "-fun", kernel.name)
    code = {
        int(address, 16): text.strip()
        for address, text in re.findall(r"/\*([0-9a-f]{4,6})\*/\s+([^;/]*);", sass)
    }
    addresses = sorted(code)
    following = dict(itertools.pairwise(addresses))
    bytes_wanted = bits_of(kernel) * kernel.count * ACCESSES // 8
    start = (addresses[0], 0, 0)
    came_from: dict[tuple[int, int, int], tuple[int, int, int] | None] = {start: None}
    frontier = [start]
    while frontier:
        reached = []
        for state in frontier:
            address, stores, bytes_seen = state
            predicate, name, operands = re.match(
                r"(@!?U?P\w+\s+)?(\S+)(.*)", code[address]
            ).groups()  # type: ignore[union-attr]
            stores += name.startswith("STG.E.128")
            bytes_seen = min(bytes_seen + (name == BITS.get(kernel.functor)), bytes_wanted)
            if name == "EXIT" and (stores, bytes_seen) == (ACCESSES, bytes_wanted):
                names: Counter[str] = Counter()
                at: tuple[int, int, int] | None = state
                while at is not None:
                    names[re.sub(r"^@\S+\s+", "", code[at[0]]).split()[0]] += 1
                    at = came_from[at]
                return names
            targets = []
            if name.startswith("BRA"):
                targets.append(int(operands.split("0x")[-1], 16))
            if predicate or name not in ("BRA", "EXIT", "RET.REL.NODEC"):
                targets.append(following.get(address, address))
            for target in targets:
                after = (target, stores, bytes_seen)
                if after not in came_from:
                    came_from[after] = state
                    reached.append(after)
        frontier = reached
    raise AssertionError(f"{kernel}: no way passes {ACCESSES} 16-byte stores and the packed bits")


@on_each_architecture
def test_nothing_is_kept_in_local_memory(architecture: str) -> None:
    assert [kernel for kernel in kernels(architecture) if kernel.stack] == []


@on_each_architecture
def test_enough_loads_are_under_way(architecture: str) -> None:
    for kernel in vector_kernels(architecture):
        registers = -(-kernel.registers // 8) * 8
        threads = min(REGISTERS // registers, THREADS) // BLOCK * BLOCK
        loads = INPUTS.get(kernel.functor, 1) * ACCESSES * 16
        assert threads * loads >= BYTES_UNDER_WAY, kernel


@on_each_architecture
def test_accesses_and_instructions_of_a_whole_tile(architecture: str) -> None:
    for kernel in vector_kernels(architecture):
        names = whole_tile(kernel, architecture)
        inputs, bits = INPUTS.get(kernel.functor, 1), bits_of(kernel)
        elements = kernel.count * ACCESSES
        accesses = {name: n for name, n in names.items() if name.startswith(("LDG", "STG"))}
        expected = {"LDG.E.128": inputs * ACCESSES, "STG.E.128": ACCESSES}
        if bits:
            expected[BITS[kernel.functor]] = bits * elements // 8
        assert accesses == expected, kernel
        assert not any(name.startswith(("LDL", "STL", "CALL")) for name in names), kernel

        moved = SIZE[kernel.scalar] * (inputs + 1) + bits / 8
        instructions = names.total() / elements
        special = sum(n for name, n in names.items() if name.startswith("MUFU")) / elements
        print(
            f"{architecture} {kernel.functor} {kernel.activation} {kernel.scalar}: "
            f"{instructions:.1f} of {INSTRUCTIONS_A_BYTE * moved:.1f} instructions an element, "
            f"{special:.1f} of {SPECIAL_A_BYTE * moved:.1f} special functions, "
            f"{kernel.registers} registers"
        )
        if kernel.functor != "DoubleBackward":  # a second derivative may be bound by arithmetic
            assert instructions <= INSTRUCTIONS_A_BYTE * moved, kernel
            assert special <= SPECIAL_A_BYTE * moved, kernel
