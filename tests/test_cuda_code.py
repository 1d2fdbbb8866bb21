"""What the compiler made of the CUDA kernels: checked in the disassembly, without a GPU.

Needs the CUDA extension, and cuobjdump with nvdisasm: those of a CUDA toolkit, of NVIDIA's packages
nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm, or of Triton's.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch

import inplace_ops
from inplace_ops import _ops
from inplace_ops.activations import ACTIVATIONS

# An H200 under load: its 132 multiprocessors issue four warps' instructions a cycle, so 128 lanes'
# at the base clock, and copy 4.3 TB/s, reads and writes.
SLOTS_A_BYTE = 132 * 128 * 1.755e9 / 4.3e12
# Opcodes by the pipe they need, and how many lanes of a multiprocessor it serves a cycle. Rates: of
# compute capability 9.0 in "Throughput of Native Arithmetic Instructions", CUDA C++ Programming
# Guide (Best Practices Guide since CUDA 13); 32 load/store units: NVIDIA's H100 whitepaper. Pipes:
# "Pipelines", Kernel Profiling Guide of Nsight Compute. FMA is two pipes, of which the heavy one
# alone multiplies integers; HADD2.F32, half to float, is taken for a conversion, at half rate. FCHK
# signals its result by a scoreboard as XU's instructions do. CS2R, P2R and R2P are a guess. What
# has the full rate, or none that is published, takes its issue slot alone.
PIPES = {
    "issue": (
        128,
        "FADD FFMA FMUL HADD2 HFMA2 HMUL2 "
        "BRA BSSY BSYNC CALL ENDCOLLECTIVE EXIT NOP RET WARPSYNC LDC S2R ULDC "
        "UIADD3 UIMAD UISETP ULEA ULOP3 UMOV UPRMT USEL USHF",
    ),
    "ALU": (
        64,
        "CS2R F2FP FMNMX FSEL FSETP I2FP IABS IADD3 ISETP LEA LOP3 MOV P2R PLOP3 PRMT R2P SEL SHF "
        "VIADD VIADDMNMX VIMNMX VOTE",
    ),
    "FMA heavy": (64, "HADD2.F32 IMAD"),
    "LSU": (32, "LDG SHFL STG"),
    "XU": (16, "BREV F2F F2I FCHK FLO I2F MUFU POPC"),
}
PIPE_OF = {opcode: pipe for pipe, (_, opcodes) in PIPES.items() for opcode in opcodes.split()}
# Loads under way that a multiprocessor needs (Little's law): half of 4.3 TB/s over 1 us.
BYTES_UNDER_WAY = 4.3e12 / 2 * 1e-6 / 132
REGISTERS, THREADS, BLOCK = 65536, 2048, 128
WARP = 32
ACCESSES = 2  # of 16 bytes to each tensor, by a lane
DTYPES = {"float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16}
INPUTS = {
    "BackwardMaskOfOutput": 2,
    "BackwardOutput": 2,
    "DoubleBackward": 3,
    "BackwardRecompute": 2,
    "NormalizeAdd": 2,
    "ForwardRecomputeAdd": 2,
}
DEVIATIONS = (1.0, 1.3)  # the inputs of a network are about N(0, 1)


class Budget(NamedTuple):
    """What an activation may cost, and by what its code for far outputs is known.

    That code, of BackwardOutput and DoubleBackward, has an instruction that nothing else takes, one
    per element.
    """

    slots: float = 0.95  # of those that the bytes leave
    far: str | None = None


# Above 1 a kernel is bound by arithmetic: a ratchet, a few percent above what it costs.
BUDGETS = {
    "silu": Budget(far="MUFU.LG2"),
    "gelu": Budget(slots=1.38),
    "gelu_tanh": Budget(slots=1.27),
    "hardswish": Budget(slots=1.2),
    "mish": Budget(slots=1.07),
}
MASKS = Budget()
SMOOTH = Budget(slots=1.4)
ANY = "any"  # the activation of what is one for all
# After a norm, by the layouts that AFFINE_LOADS names.
NORMALIZED = {
    "NormalizeAdd": {"planes": 0.37, "split_planes": 0.52, "channels_last": 0.39, "rows": 0.45},
    ANY: {"planes": 0.32, "split_planes": 0.55, "channels_last": 0.35, "rows": 0.45},
    "relu": {"planes": 0.44, "split_planes": 0.72, "channels_last": 0.47, "rows": 0.56},
    "leaky_relu": {"planes": 0.47, "split_planes": 0.75, "channels_last": 0.49, "rows": 0.6},
    "relu6": {"planes": 0.5, "split_planes": 0.78, "channels_last": 0.5, "rows": 0.6},
    "silu": {"planes": 0.72, "split_planes": 0.86, "channels_last": 0.74, "rows": 0.82},
    "gelu": {"planes": 1.07, "split_planes": 1.28, "channels_last": 1.12, "rows": 1.23},
    "gelu_tanh": {"planes": 0.74, "split_planes": 0.9, "channels_last": 0.76, "rows": 0.85},
    "hardswish": {"planes": 0.59, "split_planes": 0.83, "channels_last": 0.63, "rows": 0.73},
    "mish": {"planes": 0.74, "split_planes": 0.93, "channels_last": 0.78, "rows": 0.87},
}

SLOTS_OF_A_CAST = 2  # per element


class AffineLoads(NamedTuple):
    """What finding the affine of normalized elements adds to the way of a whole tile."""

    scalars: int  # loads of one number
    vectors: int = 0  # numbers per element loaded 16 bytes at a time


# By the layouts of csrc/cuda/affine_layout.h, which take neither a division nor a loop.
DIVISION = "I2F.U32.RP"
AFFINE_LOADS = {
    "planes": AffineLoads(scalars=2 * ACCESSES),
    "split_planes": AffineLoads(scalars=4 * ACCESSES),
    "channels_last": AffineLoads(scalars=0, vectors=2),
    "rows": AffineLoads(
        scalars=2 * ACCESSES, vectors=2
    ),  # of a layer norm: channels_last with statistics
}


def find_cuobjdump() -> str | None:
    folders = [os.environ.get("PATH", "")]
    for path in map(Path, sys.path):
        folders += map(str, path.glob("nvidia/*/bin"))
        folders.append(str(path / "triton/backends/nvidia/bin"))
    return shutil.which("cuobjdump", path=os.pathsep.join(folders))


CUOBJDUMP = find_cuobjdump()
LIBRARY = next(Path(inplace_ops.__file__).parent.glob("_C_cuda*.so"), None)
if LIBRARY is None:
    pytest.skip("the CUDA extension is not built", allow_module_level=True)
if CUOBJDUMP is None:
    pytest.skip("cuobjdump is not installed", allow_module_level=True)


def cuobjdump(*arguments: str) -> str:
    command = [str(CUOBJDUMP), *arguments, str(LIBRARY)]
    path = os.path.dirname(str(CUOBJDUMP)) + os.pathsep + os.environ.get("PATH", "")
    return subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "PATH": path}
    ).stdout


class Key(NamedTuple):
    activation: str
    functor: str
    scalar: str
    out: str


class Kernel(NamedTuple):
    name: str
    activation: str
    functor: str
    scalar: str
    out: str  # the format of the results
    count: int  # elements of an access
    registers: int
    stack: int

    @property
    def key(self) -> Key:
        return Key(self.activation, self.functor, self.scalar, self.out)


class Case(NamedTuple):
    activation: str
    functor: str
    scalar: str
    bits: int
    layout: str = ""  # after a norm: which of AFFINE_LOADS
    cast: str = ""  # to which format the results are cast, if they are

    @property
    def name(self) -> str:
        return "-".join(str(part) for part in self if part != "")

    @property
    def key(self) -> Key:
        return Key(self.activation, self.functor, self.scalar, self.cast or self.scalar)

    @property
    def inputs(self) -> int:
        return INPUTS.get(self.functor, 1)

    @property
    def out_size(self) -> int:
        return DTYPES[self.key.out].itemsize

    @property
    def size(self) -> int:
        return DTYPES[self.scalar].itemsize

    @property
    def elements(self) -> int:  # of a lane
        return ACCESSES * 16 // self.size

    @property
    def byte_accesses(self) -> int:
        return self.bits * self.elements // 8

    @property
    def vector_loads(self) -> int:
        affine = AFFINE_LOADS[self.layout].vectors * self.elements * 4 // 16 if self.layout else 0
        return self.inputs * ACCESSES + affine

    @property
    def slots(self) -> float:  # per element: those that the bytes leave
        return self.slots_of(self.out_size)

    def slots_of(self, out_size: int) -> float:
        return SLOTS_A_BYTE * (self.size * self.inputs + out_size + self.bits / 8)

    @property
    def store(self) -> str:
        return f"STG.E.{128 * self.out_size // self.size}"

    @property
    def byte_access(self) -> str:
        return "STG.E.U8" if self.functor.startswith("Forward") else "LDG.E.U8"

    @property
    def budget(self) -> Budget:
        if self.layout:
            of = self.functor if self.functor in NORMALIZED else self.activation
            budget = NORMALIZED[of][self.layout]
            if self.cast:  # the same arithmetic in fewer bytes
                budget = (budget * self.slots_of(self.size) + SLOTS_OF_A_CAST) / self.slots
            return Budget(budget)
        is_smooth = self.activation == ANY or _ops.ALL[self.activation].double_backward is not None
        return BUDGETS.get(self.activation, SMOOTH if is_smooth else MASKS)

    @property
    def far(self) -> str | None:
        return self.budget.far if self.functor in ("BackwardOutput", "DoubleBackward") else None


def cases() -> list[Case]:
    """Each fast version that the kernels have: csrc/functors.h."""
    found = {}
    for scalar, dtype in DTYPES.items():
        for entry in ACTIVATIONS:
            name = entry.ops.name
            for layout in AFFINE_LOADS:
                for functor in ("ForwardRecompute", "BackwardRecompute"):
                    found[Case(name, functor, scalar, 0, layout)] = None
                for functor in ("Normalize", "NormalizeAdd"):
                    found[Case(ANY, functor, scalar, 0, layout)] = None
                found[Case("relu", "ForwardRecomputeAdd", scalar, 0, layout)] = None
                for cast in ("Half", "BFloat16") if scalar == "float" else ():
                    found[Case(name, "ForwardRecompute", scalar, 0, layout, cast)] = None
                    found[Case(ANY, "Normalize", scalar, 0, layout, cast)] = None
            if entry.is_piecewise_linear:
                bits = {"ForwardMask": (0, 1), "BackwardMask": (1,), "BackwardMaskOfOutput": (0,)}
            else:
                few = (1, entry.default_bits("output", dtype))
                derivative = (entry.default_bits("derivative", dtype),)
                bits = {"ForwardOutput": (0, *few), "ForwardDerivative": derivative}
                bits |= {"BackwardOutput": few, "DoubleBackward": few[1:]}
                found[Case(ANY, "BackwardDerivative", scalar, *derivative)] = None
            for functor, choices in bits.items():
                found |= {Case(name, functor, scalar, planes): None for planes in choices}
    return list(found)


CASES = cases()
on_each_architecture = pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@functools.cache
def kernels(architecture: str) -> list[Kernel]:
    usage = cuobjdump("-res-usage", "-arch", architecture)
    name = r"NS_\d+([A-Z][A-Za-z0-9]*?)"
    mangled = (
        rf"Function (\S*run_warpsILi(\d)E(NS_4CastI)?{name}I(?:{name}I)?(?:{name}E|([fd])E)\S*):"
        r"\s+REG:(\d+) STACK:(\d+)"
    )
    entries = {name.replace("_", ""): name for name in _ops.ALL}

    def out_of(name: str, scalar: str, is_cast: bool) -> str:
        return re.findall(r"ENS_\d+(Half|BFloat16)EEE", name)[0] if is_cast else scalar

    found = []
    for name, count, cast, functor, activation, named, builtin, *numbers in re.findall(
        mangled, usage
    ):
        of = entries[activation.lower()] if activation else ANY
        scalar = named or {"f": "float", "d": "double"}[builtin]
        out = out_of(name, scalar, bool(cast))
        found.append(Kernel(name, of, functor, scalar, out, int(count), *map(int, numbers)))
    if not found:
        pytest.skip(f"not built for {architecture}")
    assert len(found) == usage.count("run_warps")
    return found


def vector_kernels(architecture: str, in_rows: bool = False) -> dict[Key, Kernel]:
    """Those with accesses of several elements, to dense tensors or to rows with gaps."""
    return {
        kernel.key: kernel
        for kernel in kernels(architecture)
        if kernel.count > 1 and ("NS_4RowsE" in kernel.name) == in_rows
    }


@functools.cache
def disassembly(architecture: str) -> dict[str, str]:
    """By kernel. All at once: cuobjdump takes a fifth of a second for each one it is asked for."""
    functions = cuobjdump("-sass", "-arch", architecture).split("Function : ")[1:]
    return dict(function.split("\n", 1) for function in functions)


class Instruction(NamedTuple):
    address: int
    name: str
    following: tuple[int, ...]  # addresses


@functools.cache
def instructions(kernel: Kernel, architecture: str) -> dict[int, Instruction]:
    """By address; the first is where the kernel begins."""
    found = re.findall(
        r"/\*([0-9a-f]{4,6})\*/\s+(@!?U?P\w+\s+)?([^\s;]+)([^;/]*);",
        disassembly(architecture)[kernel.name],
    )
    addresses = [int(address, 16) for address, *_ in found]
    code = {}
    for address, after, (_, predicate, name, operands) in zip(
        addresses, [*addresses[1:], None], found, strict=True
    ):
        following = []
        if name.startswith("BRA"):
            following.append(int(operands.split("0x")[-1], 16))
        if after is not None and (predicate or name not in ("BRA", "EXIT", "RET.REL.NODEC")):
            following.append(after)
        code[address] = Instruction(address, name, tuple(following))
    return code


@functools.cache
def whole_tile(case: Case, architecture: str, far: int = 0) -> Counter[Instruction]:
    """The instructions on the shortest way through the kernel for a whole tile.

    It passes all wide stores, exactly as many accesses to packed bits as there are, the code for
    far outputs as often as asked, and what finding affine takes.
    """
    kernel = vector_kernels(architecture)[case.key]
    code = instructions(kernel, architecture)
    counts = {case.store: ACCESSES, case.byte_access: case.byte_accesses, case.far: far}
    if case.layout:
        counts = {case.store: ACCESSES, "LDG.E.128": case.vector_loads}
        counts |= {"LDG.E": AFFINE_LOADS[case.layout].scalars, DIVISION: 0, "backward": 0}
    indices, wanted = {name: i for i, name in enumerate(counts)}, tuple(counts.values())

    Seen = tuple[int, ...]  # the landmarks so far
    State = tuple[int, Seen]  # an address, and those before it

    def with_one_more(seen: Seen, landmark: str) -> Seen | None:
        index = indices.get(landmark)
        if index is None:
            return seen
        if seen[index] == wanted[index]:
            return None
        return (*seen[:index], seen[index] + 1, *seen[index + 1 :])

    start: State = (next(iter(code)), (0,) * len(wanted))
    came_from: dict[State, State | None] = {start: None}
    frontier = [start]
    while frontier:
        reached = []
        for state in frontier:
            address, before = state
            _, name, following = code[address]
            seen = with_one_more(before, name)
            if seen is None:
                continue
            if name == "EXIT" and seen == wanted:
                way: Counter[Instruction] = Counter()
                at: State | None = state
                while at is not None:
                    way[code[at[0]]] += 1
                    at = came_from[at]
                exponentials = sum(k for at, k in way.items() if at.name == "MUFU.EX2")
                assert exponentials == 0 or exponentials >= case.elements, "elements left out"
                return way
            for target in following:
                jumped = with_one_more(seen, "backward") if target < address else seen
                after = (target, jumped)
                if jumped is not None and after not in came_from:
                    came_from[after] = state
                    reached.append(after)
        frontier = reached
    raise AssertionError(f"no way passes {counts}")


def pipe_of(name: str) -> str:
    while name not in PIPE_OF:
        assert "." in name, f"{name} is in no pipe"
        name = name.rpartition(".")[0]
    return PIPE_OF[name]


def slots_needed(way: Counter[Instruction], elements: int) -> dict[str, float]:
    """Issue slots per element, and those in which each pipe is busy."""
    slots = dict.fromkeys(PIPES, 0.0)
    for instruction, count in way.items():
        pipe = pipe_of(instruction.name)
        slots["issue"] += count / elements
        if pipe != "issue":
            slots[pipe] += count / elements * PIPES["issue"][0] / PIPES[pipe][0]
    return slots


def tail_fraction(host_kernels: ModuleType, case: Case, deviation: float) -> float:
    """How often the output of an input from N(0, deviation^2) is far."""
    count = 2**18
    quantiles = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    inputs = deviation * torch.special.ndtri(quantiles)
    dtype = str(DTYPES[case.scalar]).removeprefix("torch.")
    return host_kernels.tail_fraction(case.activation, dtype, case.bits, inputs.tolist())


def slots_of_a_warp(case: Case, share: float) -> dict[str, float]:
    """As slots_needed, on average, with `share` of the outputs far.

    A warp runs the code for a far output where one of its 32 lanes has one. That costs it `each`,
    and an access with any `visit` more. The shortest ways with no, one and all outputs far tell
    these; for its other lanes a warp walks the one with none in any case.
    """
    ways = [none := whole_tile(case, "sm_90")] * 3
    if share > 0:
        ways = [none | whole_tile(case, "sm_90", far) for far in (0, 1, case.elements)]
    no, one, every = (slots_needed(way, case.elements) for way in ways)
    outputs = case.elements * (1 - (1 - share) ** WARP)
    visits = ACCESSES * (1 - (1 - share) ** (WARP * case.elements // ACCESSES))
    slots = {}
    for pipe in PIPES:
        first, rest = one[pipe] - no[pipe], every[pipe] - no[pipe]
        each = (rest - ACCESSES * first) / (case.elements - ACCESSES)
        visit = first - each
        slots[pipe] = no[pipe] + visits * visit + outputs * each
    return slots


@on_each_architecture
def test_every_vector_kernel_is_a_case(architecture: str) -> None:
    assert vector_kernels(architecture).keys() == {case.key for case in CASES}


@on_each_architecture
def test_gradients_in_rows(architecture: str) -> None:
    """With gaps between rows backward takes at most three instructions an element more."""
    dense, in_rows = vector_kernels(architecture), vector_kernels(architecture, in_rows=True)
    assert {kernel.functor for kernel in in_rows.values()} == {
        *("BackwardMask", "BackwardMaskOfOutput", "BackwardOutput", "BackwardDerivative")
    }
    for key, kernel in in_rows.items():
        more = len(instructions(kernel, architecture)) - len(instructions(dense[key], architecture))
        versions = {case.bits for case in CASES if case.key == key}
        elements = ACCESSES * 16 // DTYPES[kernel.scalar].itemsize
        assert more <= 3 * elements * len(versions), kernel


@on_each_architecture
def test_nothing_is_kept_in_local_memory(architecture: str) -> None:
    assert [kernel for kernel in kernels(architecture) if kernel.stack] == []


@on_each_architecture
def test_enough_loads_are_under_way(architecture: str) -> None:
    for kernel in vector_kernels(architecture).values():
        registers = -(-kernel.registers // 8) * 8
        threads = min(REGISTERS // registers, THREADS) // BLOCK * BLOCK
        loads = INPUTS.get(kernel.functor, 1) * ACCESSES * 16
        assert threads * loads >= BYTES_UNDER_WAY, kernel


@on_each_architecture
@each_case
def test_accesses_of_a_whole_tile(case: Case, architecture: str) -> None:
    names: Counter[str] = Counter()
    for instruction, count in whole_tile(case, architecture).items():
        names[instruction.name] += count
    accesses = {name: n for name, n in names.items() if name.startswith(("LDG", "STG"))}
    expected = {"LDG.E.128": case.vector_loads, case.store: ACCESSES}
    if case.bits:
        expected[case.byte_access] = case.byte_accesses
    if case.layout and AFFINE_LOADS[case.layout].scalars:
        expected["LDG.E"] = AFFINE_LOADS[case.layout].scalars
    assert accesses == expected
    assert not any(name.startswith(("LDL", "STL", "CALL")) for name in names)


@each_case
def test_cost_of_a_warp(host_kernels: ModuleType, case: Case) -> None:
    """Of sm_90 alone: the pipes, the clock and the bandwidth are an H200's."""
    shares = {"": 0.0}
    if case.far:
        shares = {f" of N(0, {d}^2)": tail_fraction(host_kernels, case, d) for d in DEVIATIONS}
    registers = vector_kernels("sm_90")[case.key].registers
    most = 0.0
    for inputs, share in shares.items():
        slots = slots_of_a_warp(case, share)
        busy = sorted(((slots[pipe] / case.slots, pipe) for pipe in slots), reverse=True)
        print(
            f"{case.name}{inputs}: {slots['issue']:.1f} instructions per element in "
            f"{case.slots:.1f} slots: "
            + ", ".join(f"{pipe} {part:.0%}" for part, pipe in busy)
            + f"; {registers} registers"
        )
        most = max(most, busy[0][0])
    if case.functor != "DoubleBackward":  # a second derivative may be bound by arithmetic
        assert most <= case.budget.slots
