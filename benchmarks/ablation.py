"""The engine's mechanisms, each of which the benchmark `ablation` switches off in turn.

A mechanism stays in the package only if a row of `results/ablation_cpu.csv` shows what it earns, or
if it is a guard: then a test fails without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

from inplace_ops.memory import Packed
from inplace_ops.recompute import (
    activation_modules,
    bypass,
    derive,
    kernels,
    narrow,
    nodes,
    replace,
    run,
    specs,
)
from inplace_ops.recompute.affine import NormFacts
from inplace_ops.recompute.calls import Call
from inplace_ops.recompute.operations import OPERATIONS
from inplace_ops.recompute.replace import Replacer
from inplace_ops.recompute.rewrites import Shape
from inplace_ops.recompute.values import Value


class Off(NamedTuple):
    """What replaces a function, another attribute or an item of a dict while a mechanism is off."""

    owner: Any
    name: str
    replacement: Any


def _returns(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _no_shapes(save: Callable[..., None]) -> Callable[..., None]:
    """Return `Replacer._save` without the rewrite that saves a shape alone."""

    def save_others(self: Replacer, node: Any, name: str, field: Any, value: Packed) -> None:
        if not isinstance(value, Shape):
            save(self, node, name, field, value)

    return save_others


def _composed(function: Any, inputs: Any, arguments: Any) -> type[Call]:
    """Return the class of a call that runs PyTorch's own kernels."""
    return Call


MECHANISMS: Mapping[str, Sequence[Off]] = {
    "creation hook (walk instead)": [Off(nodes, "USE_CREATION_HOOK", False)],
    "notes by module hooks": [Off(run.Engine, "note", _returns(None))],
    "notes inside modules": [Off(run, "gains_from_notes", _returns(False))],
    "numbers of sums": [Off(run, "constant_of", _returns(None))],
    "late proofs": [Off(derive, "prove_late", lambda node, value: not value.unproved)],
    "leaves of other consumers": [
        Off(derive, "saved_output_of", _returns(None)),
        Off(replace, "saved_output_of", _returns(None)),
    ],
    "small constants": [Off(replace, "constants_of", _returns(Value.constants))],
    "products": [Off(replace, "facts_of", _returns(None))],
    "inputs read exactly": [
        Off(vars(entry), "reads_exact", ()) for entry in OPERATIONS.values() if entry.reads_exact
    ],
    "narrow copies": [Off(Replacer, "_narrow_spec", _returns(""))],
    "shared parts of concatenations": [Off(narrow.NarrowSpec, "_part", _returns(None))],
    "bits of ReLU": [Off(Replacer, "_reduce_to_bits", _returns(None))],
    "bits of masks": [Off(Replacer, "_narrow_mask", _returns(None))],
    "narrow indices": [Off(Replacer, "_narrow_indices", _returns(None))],
    "shapes": [Off(Replacer, "_save", _no_shapes(Replacer._save))],
    "activations after norms": [Off(activation_modules, "_after_norm", _returns(None))],
    "bypass of batch norms": [Off(bypass, "bypass_of_batch_norm", _returns(None))],
    "reruns of norms": [Off(NormFacts, "rerun", _returns(None))],
    "shared values": [Off(specs, "REACH", 0)],
    "fused kernels": [Off(kernels, "_call_class_of", _composed)],
}


@contextmanager
def without(mechanism: str) -> Iterator[None]:
    """Switch a mechanism off within a `with` block; none for the empty text."""
    offs = MECHANISMS[mechanism] if mechanism else ()
    with ExitStack() as stack:
        for owner, name, replacement in offs:
            if isinstance(owner, dict):
                stack.enter_context(mock.patch.dict(owner, {name: replacement}))
            else:
                stack.enter_context(mock.patch.object(owner, name, replacement))
        yield
