"""Check the machine code of the CUDA kernels in their disassembly, without a GPU.

test_compiled_kernels.py checks that these kernels exist, and no others.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from typing import NamedTuple

import pytest
import torch
from _support.cuobjdump import cuobjdump, skip_module_without_it
from _support.marks import readable_id

from inplace_ops import _ops
from inplace_ops.activations import ACTIVATIONS

# Issue slots per byte of an H200 under load. Each of its 132 multiprocessors issues instructions of
# four warps per cycle, that is of 128 lanes, at the base clock. A copy moves 4.3 TB/s, reads and
# writes.
SLOTS_PER_BYTE = 132 * 128 * 1.755e9 / 4.3e12
# Opcodes by the pipe that they need, and the lanes of a multiprocessor that the pipe serves per
# cycle. Sources:
#   - rates: those of compute capability 9.0 in "Throughput of Native Arithmetic Instructions", CUDA
#     C++ Programming Guide (since CUDA 13 in the Best Practices Guide);
#   - 32 load/store units: NVIDIA's H100 whitepaper;
#   - pipes: "Pipelines", Kernel Profiling Guide of Nsight Compute.
# FMA consists of two pipes, of which only the heavy one multiplies integers. HADD2.F32, half to
# float, counts as a conversion, at half rate. FCHK signals its result by a scoreboard, as
# instructions of XU do. CS2R, P2R and R2P are a guess. An instruction with the full rate, or
# without a published rate, only takes an issue slot.
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
# Bytes of loads that a multiprocessor needs in flight (Little's law): half of 4.3 TB/s over 1 us.
BYTES_IN_FLIGHT = 4.3e12 / 2 * 1e-6 / 132
REGISTERS, THREADS, BLOCK = 65536, 2048, 128
ACCESSES = 2  # accesses of 16 bytes that a lane makes to each tensor
DTYPES = {"float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16}
INPUTS = {
    "BackwardMaskOfOutput": 2,
    "BackwardOutput": 2,
    "DoubleBackward": 3,
    "BackwardRecompute": 2,
    "NormalizeAdd": 2,
    "ForwardRecomputeAdd": 2,
}


# The largest cost of a kernel, as a fraction of the issue slots that its bytes leave. A kernel with
# a budget above 1 is bound by arithmetic. Such a budget is a limit a few percent above the present
# cost, so that no change makes the kernel slower unnoticed. So is every budget of NORMALIZED,
# although most are below 1.
BUDGETS = {"gelu": 1.33, "gelu_tanh": 1.22, "hardswish": 1.2, "mish": 1.07}
OTHER_BUDGETS = 0.95
ANY = "any"  # in place of an activation, for kernels that do not depend on it
# Budgets of kernels after a norm, by the layouts of AFFINE_LOADS.
NORMALIZED = {
    "NormalizeAdd": {
        "planes": 0.34,
        "split_planes": 0.43,
        "channels_last": 0.36,
        "layer_norm": 0.42,
    },
    ANY: {"planes": 0.28, "split_planes": 0.43, "channels_last": 0.3, "layer_norm": 0.41},
    "relu": {"planes": 0.41, "split_planes": 0.56, "channels_last": 0.43, "layer_norm": 0.54},
    "leaky_relu": {"planes": 0.41, "split_planes": 0.55, "channels_last": 0.44, "layer_norm": 0.54},
    "relu6": {"planes": 0.48, "split_planes": 0.6, "channels_last": 0.48, "layer_norm": 0.58},
    "silu": {"planes": 0.64, "split_planes": 0.75, "channels_last": 0.66, "layer_norm": 0.73},
    "gelu": {"planes": 0.94, "split_planes": 1.08, "channels_last": 0.97, "layer_norm": 1.07},
    "gelu_tanh": {"planes": 0.71, "split_planes": 0.8, "channels_last": 0.73, "layer_norm": 0.8},
    "hardswish": {"planes": 0.53, "split_planes": 0.68, "channels_last": 0.55, "layer_norm": 0.66},
    "mish": {"planes": 0.68, "split_planes": 0.82, "channels_last": 0.7, "layer_norm": 0.82},
}


class AffineLoads(NamedTuple):
    """The loads that the affine of a norm adds to the path of a whole tile."""

    scalars: int  # loads of one number
    vectors: int = 0  # numbers per element that are loaded 16 bytes at a time


DIVISION = "I2F.U32.RP"  # an opcode of every unsigned integer division
BACKWARD_JUMP = "jump to a lower address"  # counted like an opcode: a loop has one per iteration
# By the layouts of csrc/cuda/affine_layout.h, which need neither a division nor a loop.
AFFINE_LOADS = {
    "planes": AffineLoads(scalars=2 * ACCESSES),
    "split_planes": AffineLoads(scalars=4 * ACCESSES),
    "channels_last": AffineLoads(scalars=0, vectors=2),
    # channels_last, and for each row a mean and an rstd
    "layer_norm": AffineLoads(scalars=2 * ACCESSES, vectors=2),
}


skip_module_without_it()


class Key(NamedTuple):
    """The template arguments that identify a kernel with vector accesses, except its layout."""

    activation: str
    functor: str
    scalar: str
    input: str
    out: str


class Kernel(NamedTuple):
    """A compiled kernel. Several cases may be versions of it, for different numbers of bits."""

    name: str  # its symbol, mangled
    activation: str
    functor: str
    scalar: str
    input: str  # the format of the inputs
    out: str  # the format of the results
    count: int  # elements per access
    registers: int  # per thread
    stack: int  # bytes of local memory per thread

    @property
    def key(self) -> Key:
        return Key(self.activation, self.functor, self.scalar, self.input, self.out)


class Case(NamedTuple):
    """A path through a kernel for a whole tile: with a number of bits, or with a norm's layout."""

    activation: str
    functor: str
    scalar: str
    bits: int  # per element: planes of the packed bits
    layout: str = ""  # after a norm: a key of AFFINE_LOADS
    cast: str = ""  # the format to which the results are cast, if any
    casts_inputs: bool = False  # whether the inputs are cast from this format

    @property
    def name(self) -> str:
        parts = [str(part) for part in self[:-1] if part != ""]
        return "-".join([*parts, "in_float32"] if self.casts_inputs else parts)

    @property
    def key(self) -> Key:
        out = self.cast or self.scalar
        formats = self.scalar, out if self.casts_inputs else self.scalar, out
        return Key(self.activation, self.functor, *formats)

    @property
    def inputs(self) -> int:
        return INPUTS.get(self.functor, 1)

    @property
    def out_size(self) -> int:
        return DTYPES[self.key.out].itemsize

    @property
    def size(self) -> int:  # of an element of the inputs
        return DTYPES[self.key.input].itemsize

    @property
    def elements(self) -> int:  # per lane
        return ACCESSES * 16 // self.size

    @property
    def byte_accesses(self) -> int:
        return self.bits * self.elements // 8

    @property
    def vector_loads(self) -> int:
        affine = AFFINE_LOADS[self.layout].vectors * self.elements * 4 // 16 if self.layout else 0
        return self.inputs * ACCESSES + affine

    @property
    def slots(self) -> float:  # issue slots per element in the time that its bytes take
        return SLOTS_PER_BYTE * (self.size * self.inputs + self.out_size + self.bits / 8)

    @property
    def store(self) -> str:
        return f"STG.E.{128 * self.out_size // self.size}"

    @property
    def byte_access(self) -> str:
        return "STG.E.U8" if self.functor.startswith("Forward") else "LDG.E.U8"

    @property
    def budget(self) -> float:
        if self.layout:
            name = self.functor if self.functor in NORMALIZED else self.activation
            return NORMALIZED[name][self.layout]
        return 1.4 if self.activation == ANY else BUDGETS.get(self.activation, OTHER_BUDGETS)


def cases() -> list[Case]:
    """Return every fast version of the kernels (FastBits in csrc/functors.h)."""
    found = {}
    for scalar, dtype in DTYPES.items():
        found[Case(ANY, "Identity", scalar, 0)] = None
        for entry in ACTIVATIONS:
            name = entry.ops.name
            for layout in AFFINE_LOADS:
                for functor in ("ForwardRecompute", "BackwardRecompute"):
                    found[Case(name, functor, scalar, 0, layout)] = None
                for functor in ("Normalize", "NormalizeAdd"):
                    found[Case(ANY, functor, scalar, 0, layout)] = None
                found[Case("relu", "ForwardRecomputeAdd", scalar, 0, layout)] = None
                casts = ("Half", "BFloat16") if scalar == "float" else ()
                for cast, in_float32 in itertools.product(casts, (False, True)):
                    casting = scalar, 0, layout, cast, in_float32
                    found[Case(name, "ForwardRecompute", *casting)] = None
                    found[Case(ANY, "Normalize", *casting)] = None
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
# The code of both architectures is compiled from one PTX: on sm_80 a few activations suffice.
CASES_OF_SM_80 = [case for case in CASES if case.activation in (ANY, "leaky_relu", "silu")]


@functools.cache
def resource_usage(architecture: str) -> str:
    return cuobjdump("-res-usage", "-arch", architecture)


def activation_of(name: str) -> str:
    """Return the name of an activation's ops from that of its struct."""
    entries = {name.replace("_", ""): name for name in _ops.ALL}
    return entries[name.lower()]


BUILTIN = {"f": "float", "d": "double"}  # from a type's mangled name


@functools.cache
def kernels(architecture: str) -> list[Kernel]:
    usage = resource_usage(architecture)
    # A symbol begins with the scope, and goes on, for instance, with
    # run_warpsILi4ENS_14BackwardOutputINS_4SiLUIfEEfEENS_4RowsEEEv: accesses of 4 elements, the
    # functor BackwardOutput<SiLU<float>, float>, and the layout Rows.
    name = r"NS_\d+([A-Z][A-Za-z0-9]*?)"
    mangled = (
        rf"Function (\S*run_warpsILi(\d)E(NS_(?:4Cast|9InFloat32)I)?{name}I(?:{name}I)?"
        rf"(?:{name}E|([fd])E)\S*):\s+REG:(\d+) STACK:(\d+)"
    )

    def out_format(name: str, scalar: str, is_cast: bool) -> str:
        return re.findall(r"NS_\d+(Half|BFloat16)E", name)[0] if is_cast else scalar

    found = []
    for name, count, cast, functor, activation, named, builtin, *numbers in re.findall(
        mangled, usage
    ):
        op_name = activation_of(activation) if activation else ANY
        # A smooth activation over a 16-bit format computes float32 results that are cast to it.
        scalar = "float" if cast else named or BUILTIN[builtin]
        out = out_format(name, scalar, bool(cast))
        formats = scalar, out if "InFloat32" in cast else scalar, out
        found.append(Kernel(name, op_name, functor, *formats, int(count), *map(int, numbers)))
    if not found:
        pytest.skip(f"not built for {architecture}")
    assert len(found) == usage.count("run_warps")
    return found


def vector_kernels(architecture: str) -> dict[Key, Kernel]:
    """Return the kernels with vector accesses, except those for rows with gaps between them."""
    return {
        kernel.key: kernel
        for kernel in kernels(architecture)
        if kernel.count > 1 and "NS_4RowsE" not in kernel.name
    }


@functools.cache
def disassembly(architecture: str) -> dict[str, str]:
    """Return the disassembly of every kernel, by name.

    One call disassembles all kernels: cuobjdump takes a fifth of a second for each one it is asked
    for.
    """
    functions = cuobjdump("-sass", "-arch", architecture).split("Function : ")[1:]
    return dict(function.split("\n", 1) for function in functions)


class Instruction(NamedTuple):
    address: int
    name: str
    following: tuple[int, ...]  # addresses of the instructions that may follow


@functools.cache
def instructions(kernel: str, architecture: str) -> dict[int, Instruction]:
    """Return the instructions of the kernel of this name by address, beginning with its entry."""
    found = re.findall(
        r"/\*([0-9a-f]{4,6})\*/\s+(@!?U?P\w+\s+)?([^\s;]+)([^;/]*);",
        disassembly(architecture)[kernel],
    )
    addresses = [int(address, 16) for address, *_ in found]
    code = {}
    for address, next_address, (_, predicate, name, operands) in zip(
        addresses, [*addresses[1:], None], found, strict=True
    ):
        following = []
        if name.startswith("BRA"):
            following.append(int(operands.split("0x")[-1], 16))
        if next_address is not None and (predicate or name not in ("BRA", "EXIT", "RET.REL.NODEC")):
            following.append(next_address)
        code[address] = Instruction(address, name, tuple(following))
    return code


@functools.cache
def whole_tile(case: Case, architecture: str) -> Counter[Instruction]:
    """Return the instructions on the shortest path of a warp through the kernel for a whole tile.

    The path passes all wide stores, exactly the case's number of accesses to packed bits, and the
    loads of the affine. After a norm it has neither a division nor a loop. No output is in the
    tail: code for such outputs is not on the shortest path.
    """
    kernel = vector_kernels(architecture)[case.key]
    code = instructions(kernel.name, architecture)
    counts = {
        case.store: ACCESSES,
        case.byte_access: case.byte_accesses,
    }
    if case.layout:
        counts = {case.store: ACCESSES, "LDG.E.128": case.vector_loads}
        counts |= {"LDG.E": AFFINE_LOADS[case.layout].scalars, DIVISION: 0, BACKWARD_JUMP: 0}
    indices, wanted = {name: i for i, name in enumerate(counts)}, tuple(counts.values())

    Seen = tuple[int, ...]  # how often the path has passed each landmark in `counts`
    State = tuple[int, Seen]  # an address, and the landmarks passed before it

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
            address, seen_before = state
            _, name, following = code[address]
            seen = with_one_more(seen_before, name)
            if seen is None:
                continue
            if name == "EXIT" and seen == wanted:
                path: Counter[Instruction] = Counter()
                at: State | None = state
                while at is not None:
                    path[code[at[0]]] += 1
                    at = came_from[at]
                exponentials = sum(k for at, k in path.items() if at.name == "MUFU.EX2")
                assert exponentials == 0 or exponentials >= case.elements, "elements left out"
                return path
            for target in following:
                jumped = with_one_more(seen, BACKWARD_JUMP) if target < address else seen
                successor = (target, jumped)
                if jumped is not None and successor not in came_from:
                    came_from[successor] = state
                    reached.append(successor)
        frontier = reached
    raise AssertionError(f"no path passes {counts}")


def pipe_of(name: str) -> str:
    while name not in PIPE_OF:
        assert "." in name, f"PIPES has no pipe for {name}"
        name = name.rpartition(".")[0]
    return PIPE_OF[name]


def busiest(path: Counter[Instruction], elements: int, slots: float) -> tuple[float, str]:
    """Return the busiest pipe, after the fraction that it needs of the issue slots per element."""
    needed = dict.fromkeys(PIPES, 0.0)
    for instruction, count in path.items():
        pipe = pipe_of(instruction.name)
        needed["issue"] += count / elements
        if pipe != "issue":
            needed[pipe] += count / elements * PIPES["issue"][0] / PIPES[pipe][0]
    return max((needed[pipe] / slots, pipe) for pipe in PIPES)


@on_each_architecture
def test_no_kernel_uses_local_memory(architecture: str) -> None:
    assert [kernel for kernel in kernels(architecture) if kernel.stack] == []
    assert [kernel for kernel in pass_kernels(architecture) if kernel.stack] == []


@on_each_architecture
def test_loads_in_flight_suffice_for_the_bandwidth(architecture: str) -> None:
    """The registers leave room for enough threads on a multiprocessor to saturate the memory.

    Together their loads from the inputs, all in flight at once, have at least BYTES_IN_FLIGHT.
    """
    for kernel in vector_kernels(architecture).values():
        registers = -(-kernel.registers // 8) * 8
        threads = min(REGISTERS // registers, THREADS) // BLOCK * BLOCK
        loads = INPUTS.get(kernel.functor, 1) * ACCESSES * 16
        assert threads * loads >= BYTES_IN_FLIGHT, kernel
    for pass_kernel in pass_kernels(architecture):
        assert REGISTERS // (-(-pass_kernel.registers // 8) * 8) >= RESIDENT, pass_kernel
    assert RESIDENT * 2 * BURST * 16 >= BYTES_IN_FLIGHT


@pytest.mark.parametrize(
    ("architecture", "case"),
    [("sm_90", case) for case in CASES] + [("sm_80", case) for case in CASES_OF_SM_80],
    ids=readable_id,
)
def test_whole_tile_makes_only_expected_accesses(architecture: str, case: Case) -> None:
    """The path for a whole tile has the expected global loads and stores: number and width.

    It has no accesses to local memory, and no calls.
    """
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


# A second derivative may be bound by arithmetic.
WITH_BUDGETS = [case for case in CASES if case.functor != "DoubleBackward"]


@pytest.mark.parametrize("case", WITH_BUDGETS, ids=readable_id)
def test_cost_of_a_warp_is_within_budget(case: Case) -> None:
    """The busiest pipe needs at most the budget's share of the time that the bytes take.

    This is for an H200: its pipes, clock and bandwidth, and code for sm_90.
    """
    share, pipe = busiest(whole_tile(case, "sm_90"), case.elements, case.slots)
    assert share <= case.budget, pipe


# The two passes of a batch norm's backward (csrc/cuda/batch_norm.cuh).

BURST = 4  # accesses of 16 bytes to each tensor, before the arithmetic
RESIDENT = 512  # lanes for which registers are reserved on a multiprocessor
TENSORS = {"sum": 2, "correct": 3, "finish": 0}  # that a kernel reads or writes


class PassKernel(NamedTuple):
    name: str  # its symbol, mangled
    kind: str  # a key of TENSORS
    activation: str
    scalar: str
    count: int  # elements per access
    registers: int
    stack: int

    @property
    def size(self) -> int:  # of an element
        return 8 if self.scalar == "double" else DTYPES[self.scalar].itemsize


@functools.cache
def pass_kernels(architecture: str) -> list[PassKernel]:
    usage = resource_usage(architecture)
    # For instance sum_warpsILi4ENS_17BackwardRecomputeINS_4SiLUIfEEfEEE: accesses of 4 elements.
    name = r"NS_\d+([A-Z][A-Za-z0-9]*?)"
    found = re.findall(
        rf"Function (\S*?\d(sum|correct|finish)_warpsI(?:Li(\d)E{name}I{name}I)?(?:{name}E|([fd])E)"
        r"\S*):\s+REG:(\d+) STACK:(\d+)",
        usage,
    )
    if not found:
        pytest.skip(f"not built for {architecture}")
    return [
        PassKernel(
            symbol,
            kind,
            activation_of(activation) if activation else ANY,
            named or BUILTIN[builtin],
            int(count or 1),
            int(registers),
            int(stack),
        )
        for symbol, kind, count, _, activation, named, builtin, registers, stack in found
    ]


def burst_of(kernel: PassKernel, architecture: str) -> Counter[Instruction]:
    """Return the instructions of an iteration of the loop over bursts, if no branch skips any.

    Branches skip accesses that do not exist, in the last burst.
    """
    code = instructions(kernel.name, architecture)
    loops = []
    for at in code.values():
        for target in at.following:
            if at.name.startswith("BRA") and target < at.address:
                loops.append([code[k] for k in code if target <= k <= at.address])
    with_loads = [loop for loop in loops if any(at.name == "LDG.E.128" for at in loop)]
    assert len(with_loads) == 1, kernel
    return Counter(with_loads[0])


WIDE_PASSES = [
    (kind, entry.ops.name, scalar)
    for kind in ("sum", "correct")
    for entry in ACTIVATIONS
    for scalar in DTYPES
]
# Like BUDGETS, for the loop of each pass. A loop whose budget is above 1 is bound by arithmetic.
PASS_BUDGETS = {
    "relu": {"sum": 0.53, "correct": 0.38},
    "leaky_relu": {"sum": 0.5, "correct": 0.38},
    "relu6": {"sum": 0.59, "correct": 0.43},
    "silu": {"sum": 0.81, "correct": 0.56},
    "gelu": {"sum": 1.1, "correct": 0.76},
    "gelu_tanh": {"sum": 1.06, "correct": 0.73},
    "hardswish": {"sum": 0.69, "correct": 0.51},
    "mish": {"sum": 1.02, "correct": 0.71},
}


@pytest.mark.parametrize(("kind", "activation", "scalar"), WIDE_PASSES)
def test_cost_of_a_pass_is_within_budget(kind: str, activation: str, scalar: str) -> None:
    """The loop has only the expected accesses, and its busiest pipe is within the budget.

    All loads come before the first multiply-add, so that they are in flight at once.
    """
    (kernel,) = (
        kernel
        for kernel in pass_kernels("sm_90")
        if kernel[1:4] == (kind, activation, scalar) and kernel.count > 1
    )
    loop = burst_of(kernel, "sm_90")
    names: Counter[str] = Counter()
    for instruction, count in loop.items():
        names[instruction.name] += count
    accesses = {name: n for name, n in names.items() if re.match("LD(?!C)|ST|SHFL", name)}
    assert accesses == {"LDG.E.128": 2 * BURST} | (
        {"STG.E.128": BURST} if kind == "correct" else {}
    )
    assert not any(name.startswith("CALL") for name in names)
    loads = [at.address for at in loop if at.name == "LDG.E.128"]
    assert max(loads) < min(at.address for at in loop if at.name.startswith("FFMA"))
    available = SLOTS_PER_BYTE * kernel.size * TENSORS[kind]
    share, pipe = busiest(loop, BURST * kernel.count, available)
    assert share <= PASS_BUDGETS[activation][kind], pipe
