"""Rules for the package's own sources that no linter checks."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Set
from pathlib import Path

import pytest

import inplace_ops

PACKAGE = Path(inplace_ops.__file__).parent
_LAZY = {"enumerate", "filter", "iter", "map", "reversed", "zip"}


def generators(source: str) -> Iterator[str]:
    """Yield the names of the functions that are annotated to return an iterator."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            returned = "" if node.returns is None else ast.unparse(node.returns)
            if returned.startswith(("Iterator", "Iterable")):
                yield node.name


def tuples_built_in_place(source: str, lazy: Set[str] = frozenset()) -> Iterator[int]:
    """Yield the lines of `tuple(iterator)` and `f(*iterator)`.

    `lazy` has the names of functions that return an iterator.

    CPython builds such a tuple in place and resizes it. If code in another thread has called
    `gc.get_objects()` meanwhile, it refers to the tuple too, and the resize raises SystemError.
    """
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        values = [each.value for each in node.args if isinstance(each, ast.Starred)]
        if isinstance(node.func, ast.Name) and node.func.id == "tuple":
            values += node.args
        for value in values:
            function = value.func if isinstance(value, ast.Call) else None
            name = getattr(function, "id", getattr(function, "attr", ""))
            if isinstance(value, ast.GeneratorExp) or name in _LAZY | lazy:
                yield node.lineno


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("f(*(x for x in y))", [1]),
        ("tuple(x for x in y)", [1]),
        ("\ntuple(map(f, y))", [2]),
        ("f(*x.leaves())", [1]),
        ("f(*[x for x in y], *z)\ntuple([x for x in y])\ntuple(z)", []),
    ],
)
def test_search_finds_tuples_built_in_place(source: str, lines: list[int]) -> None:
    assert list(tuples_built_in_place(source, {"leaves"})) == lines


def test_package_builds_no_tuple_from_an_iterator() -> None:
    sources = {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    lazy = {name for source in sources.values() for name in generators(source)}
    found = {
        str(path.relative_to(PACKAGE)): lines
        for path, source in sources.items()
        if (lines := list(tuples_built_in_place(source, lazy)))
    }
    assert not found
