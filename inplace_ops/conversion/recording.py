"""What became of each storage in one run of a model with its activations out of place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from ..activations import Activation
from .frames import CallSite
from .recognise import Recognised
from .slots import Slot

# The operations that run norms.
NORMS = frozenset(
    {"native_batch_norm", "cudnn_batch_norm", "native_group_norm", "native_layer_norm"}
)


@dataclass(frozen=True)
class Line:
    """A line of code that calls an activation as a function.

    Attributes:
        location: File and line, "models/unet.py:83".
        is_torchs: Whether the line is PyTorch's own.
        activation: Which one.
        scalars: Its scalar arguments, in order.
        inplace: Whether it overwrites its input.
        module: The activation's module that it is called by, one that is none of the slots'.
    """

    location: str
    is_torchs: bool
    activation: Activation
    scalars: tuple[float, ...]
    inplace: bool
    module: nn.Module | None

    @property
    def recognised(self) -> Recognised:
        """The activation as the line computes it."""
        named = dict(zip(self.activation.scalars, self.scalars, strict=True))
        return Recognised(self.activation, self.activation.torch_function, named)


@dataclass(frozen=True)
class Event:
    """An operation, or the call of an activation, that reads a storage or writes to it."""

    time: int
    name: str
    writes: bool
    call: Call | None = None


@dataclass
class SavedTensor:
    """That a tensor of a storage was saved for backward.

    Attributes:
        time: When.
        node: The number of the autograd node that saved it.
        call: The activation's call that it was part of.
        is_held: Whether the graph still holds it when forward has ended.
        reader: The innermost module that was called then; None if the model does not hold it.
    """

    time: int
    node: int
    call: Call | None
    is_held: bool
    reader: nn.Module | None


@dataclass(eq=False)
class Call:
    """One call of an activation, and its input as it was then.

    Attributes:
        place: The slot that holds the module, or the line of code that calls the function.
        name: What reports call it: the slot's name, or that of the calling module and the function.
        time: When.
        input: The input's storage.
        output: The output's storage: another one, but for functions that overwrite their input.
        elements: The input's number of elements.
        shape: The input's.
        dtype: The input's.
        device: The input's.
        needs_grad: Whether a gradient flows through the call.
        detaches: Whether the input requires grad and the output does not, as under `no_grad`.
        is_leaf: Whether the input is a leaf.
        refused_view: What kind of view the input is, if autograd does not let it be modified.
        overlaps: Whether elements of the input may share memory.
        has_kernel: Whether there is one for its device and dtype.
        site: Where in the model's code a module's call is.
        line: The same as file and line, to be shown.
        keeps_layout: Whether the output out of place has the input's strides.
        after_norm: Whether the input follows from a norm's input.
        nodes: The numbers of its autograd nodes.
        is_held: Whether the graph still holds what it saved when forward has ended.
        is_differentiated_twice: Whether forward itself takes a gradient of its gradient.
    """

    place: Slot | Line
    name: str
    time: int
    input: int
    output: int
    elements: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    needs_grad: bool
    detaches: bool
    is_leaf: bool
    refused_view: str
    overlaps: bool
    has_kernel: bool
    site: CallSite = ()
    line: str = ""
    keeps_layout: bool = True
    after_norm: bool = False
    nodes: range = range(0)
    is_held: bool = True
    is_differentiated_twice: bool = False

    @property
    def overwrites(self) -> bool:
        """Whether it did so in the run."""
        return self.input == self.output

    @property
    def storages(self) -> tuple[int, int]:
        """Those of input and output."""
        return self.input, self.output


@dataclass(frozen=True, eq=False)
class NormCall:
    """One call of a norm.

    Attributes:
        name: The path of the module that called it.
        kind: That module's class.
        time: When.
        output: The output's storage.
        maps: The bytes that its scales and shifts take.
    """

    name: str
    kind: str
    time: int
    output: int
    maps: int


@dataclass
class OtherKind:
    """Calls of an activation that there is no in-place form of here.

    Attributes:
        calls: How many.
        nodes: Their autograd nodes.
    """

    calls: int = 0
    nodes: set[int] = field(default_factory=set)


@dataclass
class Recording:
    """What happened in one run. Storages are numbers that no two of them share.

    Attributes:
        calls: Of the activations, in time.
        events: By storage, in time.
        saved: What was saved for backward, by storage, in time.
        owners: The storages that were there before, and what they are.
        nbytes: The size of each storage.
        norms: The calls of norms, in time.
        alive: The inputs of calls that are still there after forward.
        alive_outputs: The outputs of calls and of norms that are.
        handed_out: The storages whose memory was given to something else than PyTorch.
        returned: The storages that the model returns.
        node_names: The operations by the numbers of their autograd nodes.
        other_kinds: Activations of other kinds than those in `calls`, by kind.
        not_followed: The slots and lines whose calls cannot be judged, and why.
    """

    calls: list[Call] = field(default_factory=list)
    events: defaultdict[int, list[Event]] = field(default_factory=lambda: defaultdict(list))
    saved: defaultdict[int, list[SavedTensor]] = field(default_factory=lambda: defaultdict(list))
    norms: list[NormCall] = field(default_factory=list)
    owners: dict[int, str] = field(default_factory=dict)
    nbytes: dict[int, int] = field(default_factory=dict)
    alive: set[int] = field(default_factory=set)
    alive_outputs: set[int] = field(default_factory=set)
    handed_out: set[int] = field(default_factory=set)
    returned: set[int] = field(default_factory=set)
    node_names: dict[int, str] = field(default_factory=dict)
    other_kinds: dict[str, OtherKind] = field(default_factory=dict)
    not_followed: dict[Slot | Line, str] = field(default_factory=dict)

    def saver(self, saved: SavedTensor) -> str:
        """The name of what saved it."""
        if saved.call is not None:
            return saved.call.name
        return self.node_names.get(saved.node, "an autograd Function")

    def bytes_of_call(self, call: Call) -> int:
        """Bytes that this call alone holds for backward."""
        return self._bytes_held_by(lambda saved: saved.call is call)

    def bytes_of_kind(self, kind: OtherKind) -> int:
        """Bytes that these calls alone hold for backward."""
        return self._bytes_held_by(lambda saved: saved.call is None and saved.node in kind.nodes)

    def _bytes_held_by(self, condition: Callable[[SavedTensor], bool]) -> int:
        """Bytes that are held for backward, and only where `condition` is true."""
        total = 0
        for storage, saved in self.saved.items():
            held = [condition(tensor) for tensor in saved if tensor.is_held]
            if held and all(held) and storage not in self.owners:
                total += self.nbytes[storage]
        return total
