"""The examples of the documentation run, and its figures are those of the results."""

from __future__ import annotations

import csv
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

os.environ.setdefault("YOLO_CONFIG_DIR", tempfile.gettempdir())

PROJECT = Path(__file__).parent.parent
PAGES = [PROJECT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")]
PAGES += sorted((PROJECT / "docs").glob("*.md"))
PAGES = [page for page in PAGES if page.exists()]  # not all are beside an installed package's tests


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.mark.filterwarnings("default")  # other libraries' own
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One after the other, as a reader would: a later one may use what an earlier one has made."""
    names: dict[str, object] = {"__name__": "example"}
    for code in blocks(page, "python"):
        if not any(map(is_missing, re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE))):
            exec(compile(code, str(page), "exec"), names)


def is_missing(library: str) -> bool:
    return importlib.util.find_spec(library) is None


def test_the_report_that_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    page = PROJECT / "docs" / "conversion.md"
    exec(blocks(page, "python")[0], {})
    assert capsys.readouterr().out.strip() in page.read_text()


COMMANDS = [
    line.partition("#")[0].strip()
    for page in PAGES
    for block in blocks(page, "sh")
    for line in block.splitlines()
    if line.strip() and not line.startswith("#")
]


@pytest.mark.parametrize("command", dict.fromkeys(COMMANDS))
def test_commands(command: str) -> None:
    """What they name is there; those of the package itself run."""
    words = shlex.split(command)
    while "=" in words[0]:  # a variable of the environment
        words.pop(0)
    if words[0] == "make":
        targets = re.findall(r"^(\w+):", (PROJECT / "Makefile").read_text(), re.MULTILINE)
        assert words[1] in targets
    elif words[:3] == ["python", "-m", "inplace_ops"]:
        libraries = [w.partition(":")[0] for w in words if ":" in w]
        if not any(map(is_missing, libraries)):
            result = subprocess.run([sys.executable, *words[1:]], capture_output=True, text=True)
            assert result.returncode == 0, result.stderr
    else:
        files = [word for word in words if re.search(r"\.(py|sh|md)$", word)]
        assert files or words[0] in {"pip", "git", "pytest", "cp", "tail", "grep", ".ci/run"}
        assert all((PROJECT / file).exists() for file in files)


BYTES = PROJECT / "benchmarks" / "results" / "bytes_cpu.csv"


@pytest.mark.skipif(not BYTES.exists(), reason="no results beside these tests")
@pytest.mark.parametrize("policy", ["float32", "bfloat16", "CUDA autocast"])
def test_the_bytes_that_a_converted_step_moves(policy: str) -> None:
    """What conversion.md says of each policy; the tables are checked by `make lint`."""
    text = " ".join((PROJECT / "docs" / "conversion.md").read_text().split())
    with BYTES.open() as file:
        rows = [row for row in csv.DictReader(file) if row["policy"] == policy]
    ratios = sorted(float(row["moved_ratio"]) for row in rows if row["max_ops"] == "4")
    found = re.search(
        rf"(\d\.\d\d) to (\d\.\d\d) in {policy}", text.replace("'s autocast", " autocast")
    )
    assert found is not None
    assert [float(found[1]), float(found[2])] == [round(ratios[0], 2), round(ratios[-1], 2)]


def test_the_readme_is_short() -> None:
    assert len((PROJECT / "README.md").read_text().splitlines()) <= 120


def test_links() -> None:
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if "://" not in target:
                path, _, section = target.partition("#")
                linked = (page.parent / path).resolve() if path else page
                assert linked.exists(), f"{page.name}: {target}"
                assert not section or section in anchors(linked), f"{page.name}: {target}"


def anchors(page: Path) -> list[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
