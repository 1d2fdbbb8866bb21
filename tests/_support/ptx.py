"""Executes PTX, the code that nvcc makes of a CUDA kernel, without a GPU.

All lanes of a launch run together: a register is an array with an element for each lane. Lanes that
branch apart run in the order of their positions in the code, so that they meet again at the first
position that all of them reach. An instruction that exchanges values in a warp requires that they
have met.

The memory is that of this process. A launch may access the regions that it is given, and every
access is checked: for bounds and alignment, for reads of what the launch has written, for two
writes to one byte, and for writes to what another warp reads.

Supported are the forms of instructions that the kernels of this package consist of (`_FORMS`).
Their names, operands and results are those of NVIDIA's PTX ISA 9.0. Machine code may round
otherwise:

- Approximations (`ex2.approx`, ...) return the exact value, rounded, while
  `tests/cuda/emulated_hardware.h` emulates their errors.
- ptxas may fuse a `mul` and an `add` without a rounding modifier. Here both round.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

WARP = 32
Array = NDArray[Any]
Fma = Callable[[Array, Array, Array, bool], Array]  # rounded to nearest, or down


class ExecutionError(Exception):
    """The kernel did what a kernel must not do, such as an access outside of its tensors."""


class Instruction(NamedTuple):
    """An instruction: `@predicate name.modifiers operands`.

    Attributes:
        predicate: The register that decides in which lanes the instruction runs; "" if all.
        is_negated: Whether it runs where the predicate is false.
        name: The name without modifiers, such as "add".
        modifiers: The modifiers, such as ("rn", "f32").
        operands: The operands: a register, a number, an address, or several registers in braces.
    """

    predicate: str
    is_negated: bool
    name: str
    modifiers: tuple[str, ...]
    operands: tuple[str, ...]

    @property
    def code(self) -> str:
        """The name and the modifiers, such as "add.rn.f32"."""
        return ".".join([self.name, *self.modifiers])


class Parameter(NamedTuple):
    """A kernel's parameter, with its bytes in the memory of all parameters."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True)
class Kernel:
    """A kernel's code.

    Attributes:
        name: The symbol, mangled.
        parameters: The parameters.
        code: The instructions.
        labels: By label: the index of the instruction after it.
        registers: By prefix, such as "%rd": the dtype.
    """

    name: str
    parameters: tuple[Parameter, ...]
    code: tuple[Instruction, ...]
    labels: dict[str, int]
    registers: dict[str, np.dtype[Any]]


_REGISTERS = {"pred": "?", "b16": "u2", "b32": "u4", "b64": "u8", "f32": "f4", "f64": "f8"}
_KINDS = {"u": "u", "s": "i", "b": "u", "f": "f"}
_ENTRY = re.compile(r"\.entry (\w+)\((.*?)\)(.*?)(?=\.entry |\Z)", re.DOTALL)
_PARAMETER = re.compile(r"\.param (?:\.align (\d+) )?\.\w?(\d+) (\w+)(?:\[(\d+)\])?")
_REGISTER = re.compile(r"\.reg \.(\w+)\s+(%[a-z]+)")
_INSTRUCTION = re.compile(r"(?:@(!?)(%\w+)\s+)?([a-z]\w*)((?:\.\w+)*)\s*(.*)")
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")


# By instruction: the forms that are supported, as a pattern of all modifiers.
_INTEGER = r"[su](16|32|64)"
_FORMS: dict[str, str] = {
    **dict.fromkeys(("add", "sub"), rf"{_INTEGER}|(rn\.)?f(32|64)"),
    **dict.fromkeys(("and", "or", "xor", "not"), r"pred|b(16|32|64)"),
    **dict.fromkeys(("min", "max"), rf"{_INTEGER}|f(32|64)"),
    **dict.fromkeys(("neg", "abs"), r"s(32|64)|f(32|64)"),
    "mul": rf"(lo|wide)\.{_INTEGER}|(rn\.)?f(32|64)",
    "mad": rf"lo\.{_INTEGER}",
    "fma": r"r[nm]\.f(32|64)",
    "div": rf"{_INTEGER}|rn\.f(32|64)",
    "rem": _INTEGER,
    "ex2": r"approx\.ftz\.f32",
    "lg2": r"approx\.ftz\.f32",
    "rcp": r"approx\.ftz\.f(32|64)|rn\.f(32|64)",
    "sqrt": r"approx\.ftz\.f32|rn\.f(32|64)",
    "shl": r"b(16|32|64)",
    "shr": rf"b(16|32|64)|{_INTEGER}",
    "setp": rf"(eq|ne|lt|le|gt|ge)\.({_INTEGER}|b(16|32|64))|((eq|ne|lt|le|gt|ge)u?|nan)\.f(32|64)",
    "selp": rf"{_INTEGER}|[bf](16|32|64)",
    "mov": rf"pred|{_INTEGER}|[bf](16|32|64)",
    "cvta": r"to\.global\.u64",
    "cvt": rf"{_INTEGER}\.{_INTEGER}|rn\.b?f16\.f32|rn\.b?f16x2\.f32|f32\.f16|f64\.f32|rn\.f32\.f64"
    r"|rn\.f(32|64)\.[su](32|64)|rzi\.u32\.f(32|64)|sat\.f32\.f32",
    "bfi": "b32",
    "prmt": "b32",
    "ld": r"(param|global)(\.v[24])?\.[bsuf](8|16|32|64)",
    "st": r"global(\.v[24])?\.[bsuf](8|16|32|64)",
    "vote": r"sync\.ballot\.b32",
    "shfl": r"sync\.bfly\.b32",
    "bra": r"(uni)?",
    "ret": "",
}


def parse(text: str) -> dict[str, Kernel]:
    """Return the kernels in a PTX file, by name."""
    return {found[1]: _kernel(*found.groups()) for found in _ENTRY.finditer(text)}


def _kernel(name: str, parameters: str, body: str) -> Kernel:
    offset, placed = 0, []
    for align, bits, parameter, count in _PARAMETER.findall(parameters):
        size = int(bits) // 8
        alignment = int(align or size)
        offset = -(-offset // alignment) * alignment
        placed.append(Parameter(parameter, offset, size * int(count or 1)))
        offset += placed[-1].size
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    registers: dict[str, np.dtype[Any]] = {}
    for line in body.splitlines():
        statement = line.partition("//")[0].strip()
        if declared := _REGISTER.match(statement):
            registers[declared[2]] = np.dtype(_REGISTERS[declared[1]])
        elif statement.endswith(":"):
            labels[statement[:-1]] = len(code)
        elif statement.removesuffix("}").rstrip().endswith(";") and not statement.startswith("."):
            # Inline assembly may be in braces.
            instruction, _, rest = statement.removeprefix("{").partition(";")
            if rest.strip() not in ("", "}"):
                raise ValueError(f"several instructions: {statement}")
            code.append(_instruction(instruction.strip()))
    return Kernel(name, tuple(placed), tuple(code), labels, registers)


def _instruction(statement: str) -> Instruction:
    found = _INSTRUCTION.fullmatch(statement)
    if found is None:
        raise ValueError(f"not an instruction: {statement}")
    negation, predicate, name, modifiers, operands = found.groups()
    if name not in _FORMS or not re.fullmatch(_FORMS[name], modifiers[1:]):
        raise NotImplementedError(statement)
    return Instruction(
        predicate or "",
        bool(negation),
        name,
        tuple(modifiers.split(".")[1:]),
        tuple(operand.strip() for operand in _OPERAND.findall(operands)),
    )


@dataclass
class Region:
    """Memory that a launch may access.

    Attributes:
        start: The address.
        size: The number of bytes.
        is_read: Whether the launch may read it.
        is_written: Whether the launch may write it.
    """

    start: int
    size: int
    is_read: bool
    is_written: bool
    bytes: Array = field(init=False)
    stored: Array = field(init=False)  # which bytes the launch has written
    read_by: Array = field(init=False)  # the warp that has read each byte, or _NO_WARP

    def __post_init__(self) -> None:
        pointer = (ctypes.c_uint8 * self.size).from_address(self.start)
        self.bytes = np.ctypeslib.as_array(pointer)
        self.stored = np.zeros(self.size, dtype=bool)
        self.read_by = np.full(self.size, _NO_WARP, dtype=np.int64)


_NO_WARP = -1


class Memory:
    """The regions of a launch."""

    def __init__(self, regions: Iterable[Region]) -> None:
        self.regions = [region for region in regions if region.size]

    def load(self, addresses: Array, dtype: np.dtype[Any], count: int, warps: Array) -> Array:
        """Return `count` neighboring numbers at each address, which the lane of a warp reads."""
        region, offsets = self._find(addresses, dtype.itemsize * count)
        if not region.is_read:
            raise ExecutionError("reads memory that was not initialized")
        if region.stored[offsets].any():
            raise ExecutionError("reads memory that was overwritten")
        if region.is_written:
            found = region.read_by[offsets]
            if ((found != _NO_WARP) & (found != warps[:, None])).any():
                raise ExecutionError("two warps read memory that the launch overwrites")
            region.read_by[offsets] = warps[:, None]
        return np.ascontiguousarray(region.bytes[offsets]).view(dtype)

    def store(self, addresses: Array, values: Array, warps: Array) -> None:
        """Write the numbers of each row of `values` to the row's address."""
        data = np.ascontiguousarray(values).view(np.uint8)
        region, offsets = self._find(addresses, data.shape[1])
        if not region.is_written:
            raise ExecutionError("writes to an input")
        if region.stored[offsets].any() or len(np.unique(offsets)) != offsets.size:
            raise ExecutionError("writes twice to one address")
        found = region.read_by[offsets]
        if ((found != _NO_WARP) & (found != warps[:, None])).any():
            raise ExecutionError("overwrites what another warp reads")
        region.stored[offsets] = True
        region.bytes[offsets] = data

    def _find(self, addresses: Array, size: int) -> tuple[Region, Array]:
        """Return the region of accesses of `size` bytes, and the offsets of all bytes in it."""
        if (addresses % np.uint64(size)).any():
            raise ExecutionError(f"an access of {size} bytes is not aligned")
        first = int(addresses[0])
        for region in self.regions:
            if region.start <= first < region.start + region.size:
                offsets = addresses.astype(np.int64) - region.start
                if offsets.min() >= 0 and offsets.max() + size <= region.size:
                    return region, offsets[:, None] + np.arange(size)
        raise ExecutionError("an access is out of bounds")


class Grid(NamedTuple):
    """The warps of a launch that run: numbers from `first` up to `last`, in blocks of `warps`."""

    first: int
    last: int
    warps: int


_PARAMETER_SPACE = 1 << 56  # the address of the parameters


class Launch:
    """A launch of a kernel: the state of all its lanes."""

    def __init__(
        self, kernel: Kernel, parameters: Sequence[bytes], grid: Grid, memory: Memory, fma: Fma
    ) -> None:
        self.kernel, self.memory, self.fma = kernel, memory, fma
        warps = np.arange(grid.first, grid.last, dtype=np.uint64).repeat(WARP)
        lanes = np.tile(np.arange(WARP, dtype=np.uint64), grid.last - grid.first)
        self.count, self.warps = len(lanes), warps.astype(np.int64)
        blocks = warps // np.uint64(grid.warps)
        threads = warps % np.uint64(grid.warps) * np.uint64(WARP) + lanes
        self.special = {"%ctaid.x": blocks.astype("u4"), "%tid.x": threads.astype("u4")}
        self.symbols = {p.name: np.uint64(_PARAMETER_SPACE + p.offset) for p in kernel.parameters}
        last = kernel.parameters[-1]
        self.parameters = np.zeros(last.offset + last.size, dtype=np.uint8)
        for (name, offset, size), data in zip(kernel.parameters, parameters, strict=True):
            if len(data) != size:
                raise ValueError(f"{name} has {size} bytes, not {len(data)}")
            self.parameters[offset : offset + size] = np.frombuffer(data, np.uint8)
        self.values: dict[str, Array] = {}
        self.active: Any = slice(None)  # the lanes that run: an index of the arrays

    def run(self) -> None:
        """Run all lanes to the end."""
        code, end = self.kernel.code, len(self.kernel.code)
        position = np.zeros(self.count, dtype=np.int64)
        with np.errstate(all="ignore"):
            while (at := int(position.min())) < end:
                here = position == at
                following = np.unique(position)  # sorted
                limit = int(following[1]) if len(following) > 1 else end
                # Until other lanes are met or a branch is taken, the same lanes run.
                while at < limit:
                    instruction = code[at]
                    running = here
                    if instruction.predicate:
                        condition = self._register(instruction.predicate) != instruction.is_negated
                        running = here & condition
                    self.active = slice(None) if running.all() else np.flatnonzero(running)
                    at += 1
                    if instruction.name in ("bra", "ret"):
                        position[here] = at
                        target = end
                        if instruction.name == "bra":
                            target = self.kernel.labels[instruction.operands[0]]
                        position[self.active] = target
                        break
                    if running.any():
                        self._execute(instruction)
                else:
                    position[here] = at

    def _execute(self, instruction: Instruction) -> None:
        try:
            EXECUTED[instruction.name](self, instruction)
        except ExecutionError as error:
            text = f"{instruction.code} {', '.join(instruction.operands)}"
            raise ExecutionError(f"{text}: {error}") from None

    # Operands.

    def read(self, operand: str, kind: str) -> Array:
        """Return the operand's values in the active lanes, as the type `kind`, such as "s32"."""
        dtype = _dtype(kind)
        if operand in self.special:
            return self.special[operand][self.active]
        if operand in self.symbols:
            return self._broadcast(self.symbols[operand])
        if not operand.startswith("%"):
            return self._broadcast(_number(operand, dtype))
        values = self._register(operand)[self.active]
        if dtype.itemsize == values.dtype.itemsize:
            return values.view(dtype)
        return values.view(f"u{values.dtype.itemsize}").astype(dtype)  # the lowest bits

    def inputs(self, instruction: Instruction) -> list[Array]:
        """Return the values of all operands after the first, as the instruction's type."""
        return [
            self.read(operand, instruction.modifiers[-1]) for operand in instruction.operands[1:]
        ]

    def write(self, operand: str, values: Array) -> None:
        """Set a register in the active lanes."""
        dtype = self._dtype_of(operand)
        if values.dtype.itemsize != dtype.itemsize:
            kind = values.dtype.kind if values.dtype.kind != "b" else "u"
            values = values.astype(f"{kind}{dtype.itemsize}")
        values = values.view(dtype)
        if isinstance(self.active, slice):
            self.values[operand] = values
        else:
            # Another register may share the array.
            old = self.values.get(operand)
            new = self._unwritten(operand) if old is None else old.copy()
            new[self.active] = values
            self.values[operand] = new

    def _register(self, name: str) -> Array:
        """Return a register in all lanes. Where it was not written it has a pattern of its own.

        A kernel may read such a register, and not use the value: `selp` reads both of its inputs.
        """
        if name not in self.values and self._dtype_of(name).kind == "b":
            raise ExecutionError(f"{name} was not written")
        return self.values[name] if name in self.values else self._unwritten(name)

    def _unwritten(self, name: str) -> Array:
        dtype = self._dtype_of(name)
        if dtype.kind == "b":
            return np.zeros(self.count, dtype=dtype)
        return np.full(self.count * dtype.itemsize, 0xA5, dtype=np.uint8).view(dtype)

    def _dtype_of(self, register: str) -> np.dtype[Any]:
        return self.kernel.registers[register.rstrip("0123456789")]

    def _broadcast(self, number: Any) -> Array:
        lanes = self.count if isinstance(self.active, slice) else len(self.active)
        return np.full(lanes, number)

    def addresses(self, operand: str) -> Array:
        """Return the addresses that an operand such as `[%rd1+8]` denotes."""
        base, _, offset = operand.strip("[]").partition("+")
        return self.read(base, "u64") + np.uint64(int(offset or 0) % 2**64)

    def check_convergence(self, members: str) -> None:
        """Raise unless whole warps run, and all of their lanes are members."""
        if (self.read(members, "u32") != 2**WARP - 1).any():
            raise ExecutionError("not all lanes of a warp are members")
        if not isinstance(self.active, slice):
            _, counts = np.unique(self.active // WARP, return_counts=True)
            if (counts != WARP).any():
                raise ExecutionError("not all lanes of a warp take part")


def _dtype(kind: str) -> np.dtype[Any]:
    return np.dtype("?") if kind == "pred" else np.dtype(f"{_KINDS[kind[0]]}{int(kind[1:]) // 8}")


def _number(text: str, dtype: np.dtype[Any]) -> Any:
    """Return a number of the code: 0f and 0d begin the pattern of a float."""
    if text[:2] in ("0f", "0d"):
        size = 4 if text[1] == "f" else 8
        return np.array(int(text[2:], 16), dtype=f"u{size}").view(dtype)
    bits = 8 * dtype.itemsize
    return np.array(int(text, 0) % 2**bits, dtype=f"u{dtype.itemsize}").view(dtype)


def _registers(operand: str) -> list[str]:
    """Return the registers of an operand: one, or several in braces."""
    return [register.strip() for register in operand.strip("{}").split(",")]


# Instructions.

Execute = Callable[[Launch, Instruction], None]
EXECUTED: dict[str, Execute] = {}


def _executes(*names: str) -> Callable[[Execute], Execute]:
    def register(function: Execute) -> Execute:
        EXECUTED.update(dict.fromkeys(names, function))
        return function

    return register


def _flushed(values: Array) -> Array:
    """Return the values with 0 in place of subnormal numbers."""
    is_small = np.abs(values) < np.finfo(values.dtype).tiny
    return np.where(is_small, np.copysign(values.dtype.type(0), values), values)


def _shift(values: Array, amounts: Array, is_left: bool) -> Array:
    """Shift by up to the number of bits, and more: all bits are then shifted out."""
    bits = 8 * values.dtype.itemsize
    amount = np.minimum(amounts, bits - 1).astype(values.dtype)
    shifted = values << amount if is_left else values >> amount
    if values.dtype.kind == "i" and not is_left:
        return shifted
    return np.where(amounts >= bits, values.dtype.type(0), shifted)


def _least(x: Array, y: Array) -> Array:
    """Return the minimum: a number rather than NaN, and -0 rather than 0."""
    if x.dtype.kind != "f":
        return np.minimum(x, y)
    return np.where(x == y, np.where(np.signbit(x), x, y), np.fmin(x, y))


def _truncated_division(x: Array, y: Array) -> tuple[Array, Array]:
    """Return quotient and remainder of integers, rounded to 0."""
    if (y == 0).any():
        raise ExecutionError("divides by zero")
    if x.dtype.kind == "u":
        return x // y, x % y
    quotient = np.abs(x) // np.abs(y) * (np.sign(x) * np.sign(y))
    return quotient, x - quotient * y


_BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "and": lambda x, y: x & y,
    "or": lambda x, y: x | y,
    "xor": lambda x, y: x ^ y,
    "min": _least,
    "max": lambda x, y: -_least(-x, -y) if x.dtype.kind == "f" else np.maximum(x, y),
    "div": lambda x, y: x / y if x.dtype.kind == "f" else _truncated_division(x, y)[0],
    "rem": lambda x, y: _truncated_division(x, y)[1],
}


@_executes(*_BINARY)
def _binary(launch: Launch, instruction: Instruction) -> None:
    result = _BINARY[instruction.name](*launch.inputs(instruction))
    launch.write(instruction.operands[0], result)


@_executes("mul")
def _multiply(launch: Launch, instruction: Instruction) -> None:
    x, y = launch.inputs(instruction)
    if "wide" in instruction.modifiers:
        wide = f"{x.dtype.kind}{2 * x.dtype.itemsize}"
        x, y = x.astype(wide), y.astype(wide)
    launch.write(instruction.operands[0], x * y)


@_executes("mad", "fma")
def _multiply_add(launch: Launch, instruction: Instruction) -> None:
    x, y, z = launch.inputs(instruction)
    is_fused = instruction.name == "fma"
    result = launch.fma(x, y, z, "rm" in instruction.modifiers) if is_fused else x * y + z
    launch.write(instruction.operands[0], result)


_APPROXIMATED: dict[str, Callable[[Array], Array]] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": np.reciprocal,
    "sqrt": np.sqrt,
}


@_executes(*_APPROXIMATED)
def _function(launch: Launch, instruction: Instruction) -> None:
    (target, _), (x,) = instruction.operands, launch.inputs(instruction)
    function = _APPROXIMATED[instruction.name]
    if "approx" not in instruction.modifiers:
        return launch.write(target, function(x))
    if x.dtype.itemsize == 4:
        return launch.write(target, _flushed(function(_flushed(x).astype("f8")).astype("f4")))
    result = np.ascontiguousarray(_flushed(function(_flushed(x))))
    is_finite = np.isfinite(result)  # the lower half of a number is 0
    patterns = result.view("u8")
    launch.write(target, np.where(is_finite, patterns >> 32 << 32, patterns).view("f8"))


@_executes("neg", "abs", "not")
def _unary(launch: Launch, instruction: Instruction) -> None:
    (target, _), (x,) = instruction.operands, launch.inputs(instruction)
    function = {"neg": np.negative, "abs": np.abs, "not": np.invert}[instruction.name]
    launch.write(target, function(x))


@_executes("shl", "shr")
def _shifts(launch: Launch, instruction: Instruction) -> None:
    target, operand, amount = instruction.operands
    x = launch.read(operand, instruction.modifiers[-1])
    launch.write(target, _shift(x, launch.read(amount, "u32"), instruction.name == "shl"))


_COMPARISONS: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


@_executes("setp")
def _compare(launch: Launch, instruction: Instruction) -> None:
    comparison, target = instruction.modifiers[0], instruction.operands[0]
    x, y = launch.inputs(instruction)
    is_nan = np.isnan(x) | np.isnan(y) if x.dtype.kind == "f" else np.zeros(len(x), dtype=bool)
    if comparison == "nan":
        return launch.write(target, is_nan)
    result = _COMPARISONS[comparison[:2]](x, y)
    # With "u" a comparison holds for NaN; without it "ne" does not.
    launch.write(target, result | is_nan if comparison.endswith("u") else result & ~is_nan)


@_executes("selp")
def _select(launch: Launch, instruction: Instruction) -> None:
    target, x, y, condition = instruction.operands
    kind = instruction.modifiers[0]
    chosen = launch.read(condition, "pred")
    launch.write(target, np.where(chosen, launch.read(x, kind), launch.read(y, kind)))


@_executes("mov")
def _move(launch: Launch, instruction: Instruction) -> None:
    target, source = instruction.operands
    kind = instruction.modifiers[0]
    if target.startswith("{"):  # the first has the lowest bits
        registers = _registers(target)
        parts = np.ascontiguousarray(launch.read(source, kind))
        parts = parts.view(f"u{parts.dtype.itemsize // len(registers)}").reshape(len(parts), -1)
        for register, part in zip(registers, parts.T, strict=True):
            launch.write(register, np.ascontiguousarray(part))
    elif source.startswith("{"):
        registers = _registers(source)
        part = f"b{int(kind[1:]) // len(registers)}"
        columns = np.stack([launch.read(register, part) for register in registers], 1)
        launch.write(target, np.ascontiguousarray(columns).view(_dtype(kind))[:, 0])
    else:
        launch.write(target, launch.read(source, kind))


@_executes("cvta")
def _convert_address(launch: Launch, instruction: Instruction) -> None:
    target, source = instruction.operands
    launch.write(target, launch.read(source, "u64"))


@_executes("cvt")
def _convert(launch: Launch, instruction: Instruction) -> None:
    *modifiers, to, source = instruction.modifiers
    target, *inputs = instruction.operands
    values = [launch.read(operand, source.replace("f16", "b16")) for operand in inputs]
    if to.endswith("x2"):  # the first has the upper bits
        convert = {"f16x2": _half, "bf16x2": _bfloat16}[to]
        upper, lower = (convert(value).astype("u4") for value in values)
        return launch.write(target, upper << 16 | lower)
    (x,) = values
    if source == "f16":
        x = x.view("f2")
    if to == "bf16":
        result = _bfloat16(x)
    elif to == "f16":
        result = _half(x)
    elif "sat" in modifiers:
        result = np.where(x > 0, np.minimum(x, x.dtype.type(1)), x.dtype.type(0))
    elif x.dtype.kind == "f" and to.startswith("u"):
        top = 2.0 ** int(to[1:]) - 1
        finite = np.where(np.isnan(x), 0, np.clip(np.trunc(x.astype("f8")), 0, top))
        result = finite.astype(_dtype(to))
    else:
        result = x.astype(_dtype(to))
    launch.write(target, result)


def _half(x: Array) -> Array:
    """Return the patterns of floats that are rounded to float16."""
    return np.where(np.isnan(x), np.uint16(0x7FFF), x.astype("f2").view("u2"))


def _bfloat16(x: Array) -> Array:
    """Return the patterns of floats that are rounded to bfloat16, to nearest even."""
    patterns = np.ascontiguousarray(x).view("u4")
    rounded = patterns + np.uint32(0x7FFF) + (patterns >> 16 & np.uint32(1)) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FFF), rounded).astype("u2")


@_executes("bfi")
def _insert_bits(launch: Launch, instruction: Instruction) -> None:
    target, *inputs = instruction.operands
    source, base, *numbers = (launch.read(operand, "u32") for operand in inputs)
    position, length = (number.astype("u8") & np.uint64(255) for number in numbers)
    ones = _shift(np.ones_like(length), length, is_left=True) - np.uint64(1)
    mask = _shift(ones, position, is_left=True)
    inserted = _shift(source.astype("u8"), position, is_left=True)
    launch.write(target, (base & ~mask | inserted & mask).astype("u4"))


@_executes("prmt")
def _permute_bytes(launch: Launch, instruction: Instruction) -> None:
    target, *inputs = instruction.operands
    low, high, selector = (launch.read(operand, "u32") for operand in inputs)
    both = low.astype("u8") | high.astype("u8") << 32
    result = np.zeros_like(low)
    for i in range(4):
        choice = selector >> np.uint32(4 * i) & np.uint32(15)
        byte = (both >> (choice & np.uint32(7)).astype("u8") * 8 & 255).astype("u4")
        sign = np.where(byte & np.uint32(128), np.uint32(255), np.uint32(0))
        result |= np.where(choice & np.uint32(8), sign, byte) << np.uint32(8 * i)
    launch.write(target, result)


@_executes("ld")
def _load(launch: Launch, instruction: Instruction) -> None:
    space, *vector, kind = instruction.modifiers
    target, address = instruction.operands
    dtype, count = _dtype(kind), int(vector[0][1:]) if vector else 1
    addresses = launch.addresses(address)
    if space == "param":
        offsets = (addresses - np.uint64(_PARAMETER_SPACE)).astype(np.int64)
        data = launch.parameters[offsets[:, None] + np.arange(dtype.itemsize * count)]
        loaded = np.ascontiguousarray(data).view(dtype)
    else:
        loaded = launch.memory.load(addresses, dtype, count, launch.warps[launch.active])
    registers = _registers(target)
    for register, column in zip(registers, loaded.T, strict=True):
        launch.write(register, np.ascontiguousarray(column))


@_executes("st")
def _store(launch: Launch, instruction: Instruction) -> None:
    address, source = instruction.operands
    registers = _registers(source)
    columns = [launch.read(register, instruction.modifiers[-1]) for register in registers]
    warps = launch.warps[launch.active]
    launch.memory.store(launch.addresses(address), np.stack(columns, 1), warps)


@_executes("vote")
def _vote(launch: Launch, instruction: Instruction) -> None:
    target, condition, members = instruction.operands
    launch.check_convergence(members)
    votes = launch.read(condition, "pred").reshape(-1, WARP).astype("u4")
    ballot = (votes << np.arange(WARP, dtype="u4")).sum(1, dtype="u4")
    launch.write(target, ballot.repeat(WARP))


@_executes("shfl")
def _shuffle(launch: Launch, instruction: Instruction) -> None:
    targets, source, distance, clamp, members = instruction.operands
    launch.check_convergence(members)
    distances = launch.read(distance, "u32")
    if (launch.read(clamp, "u32") != WARP - 1).any() or (distances != distances[0]).any():
        raise ExecutionError("the lanes do not exchange values within the whole warp")
    values = launch.read(source, "b32").reshape(-1, WARP)
    partners = np.arange(WARP) ^ int(distances[0])
    target, _, is_valid = targets.partition("|")
    launch.write(target, np.ascontiguousarray(values[:, partners]).reshape(-1))
    launch.write(is_valid, np.ones(values.size, dtype=bool))
