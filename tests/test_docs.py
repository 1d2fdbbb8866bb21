"""The examples of the documentation run, and its figures are those of the tests."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

import pytest

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
