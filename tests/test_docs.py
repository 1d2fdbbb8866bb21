"""The examples of the documentation run, and its figures are those of the tests."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

import pytest

from inplace_ops.activations import SILU

os.environ.setdefault("YOLO_CONFIG_DIR", tempfile.gettempdir())

PAGE = Path(__file__).parent.parent / "docs" / "conversion.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.filterwarnings("default")  # other libraries' own
@pytest.mark.parametrize("code", EXAMPLES, ids=range(len(EXAMPLES)))
def test_example(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    for library in ("torchvision", "ultralytics"):
        if library in code:
            pytest.importorskip(library)
    exec(compile(code, str(PAGE), "exec"), {"__name__": "example"})


def test_the_report_that_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    exec(EXAMPLES[0], {})
    assert capsys.readouterr().out.strip() in PAGE.read_text()


def test_the_table_of_errors() -> None:
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    for dtype, errors in SILU.output_errors.items():
        row = re.search(rf"^  \| {str(dtype)[6:]} \|(.*)\|[^|]*\|$", readme, re.MULTILINE)
        assert row
        shown = [float(e.split()[0]) for e in row[1].replace("exact", "0").split("|")]
        default = SILU.default_bits("output", dtype)
        assert shown == [errors[bits] for bits in (1, default, 8)]
