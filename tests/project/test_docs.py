"""Test that the documentation's examples and links work, and that its figures match the results."""

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

PROJECT = Path(__file__).parents[2]
PAGES = [PROJECT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")]
PAGES.append(PROJECT / "benchmarks" / "results" / "README.md")
PAGES += sorted((PROJECT / "docs").glob("*.md"))
PAGES = [
    page for page in PAGES if page.exists()
]  # tests of an installed package have only some of them


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.mark.filterwarnings("default")  # examples may call libraries that warn
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_examples_run(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run each of a page's examples alone, as someone who copies it does."""
    for code in blocks(page, "python"):
        names: dict[str, object] = {"__name__": "example"}
        if not any(map(is_missing, re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE))):
            exec(compile(code, str(page), "exec"), names)


def is_missing(library: str) -> bool:
    return importlib.util.find_spec(library) is None


def test_shown_report_is_what_example_prints(capsys: pytest.CaptureFixture[str]) -> None:
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
INLINE = r"`((?:python )?benchmarks/\w+\.(?:py|sh)[^`]*)`"
COMMANDS += [command for page in PAGES for command in re.findall(INLINE, page.read_text())]


@pytest.mark.parametrize("command", dict.fromkeys(COMMANDS))
def test_shell_commands_are_valid(command: str) -> None:
    """Commands name existing make targets and files. Commands of the package itself also run."""
    words = shlex.split(command)
    while "=" in words[0]:  # an environment variable
        words.pop(0)
    if words[0] == "make":
        targets = re.findall(r"^(\w+):", (PROJECT / "Makefile").read_text(), re.MULTILINE)
        assert words[1] in targets
    elif words[0] == "inplace-ops":
        libraries = [w.partition(":")[0] for w in words if ":" in w]
        if not any(map(is_missing, libraries)):
            command = [sys.executable, "-m", "inplace_ops", *words[1:]]
            result = subprocess.run(command, capture_output=True, text=True)
            assert result.returncode == 0, result.stderr
    else:
        files = [word for word in words if re.search(r"\.(py|sh|md)$", word)]
        assert files or words[0] in {
            *("pip", "python3", "git", "pytest", "cp", "tail", "grep", ".ci/run")
        }
        assert all((PROJECT / file).exists() for file in files)
        if files and files[0].startswith("benchmarks/"):  # its commands, parts and options exist
            text = "".join((PROJECT / f).read_text() for f in (files[0], "benchmarks/common.py"))
            given = words[words.index(files[0]) + 1 :]
            known = set(re.findall(r"[\w-]+", text))
            assert {word for word in given if re.fullmatch("[a-z-]+", word)} <= known


BYTES = PROJECT / "benchmarks" / "results" / "bytes_cpu.csv"


@pytest.mark.skipif(not BYTES.exists(), reason="no results in benchmarks/")
@pytest.mark.parametrize("policy", ["float32", "bfloat16", "CUDA autocast"])
def test_documented_bytes_of_a_step_match_results(policy: str) -> None:
    """Check the range that conversion.md gives for each policy. `make lint` checks the tables."""
    text = " ".join((PROJECT / "docs" / "conversion.md").read_text().split())
    with BYTES.open() as file:
        rows = [row for row in csv.DictReader(file) if row["policy"] == policy]
    ratios = sorted(float(row["moved_ratio"]) for row in rows if row["max_ops"] == "4")
    found = re.search(
        rf"(\d\.\d\d) to (\d\.\d\d) in {policy}", text.replace("'s autocast", " autocast")
    )
    assert found is not None
    assert [float(found[1]), float(found[2])] == [round(ratios[0], 2), round(ratios[-1], 2)]


FILLED, BATCHES = (BYTES.with_name(f"{kind}_cuda.csv") for kind in ("filled", "batches"))


@pytest.mark.skipif(not FILLED.exists(), reason="no results in benchmarks/")
def test_figures_under_the_readmes_picture_match_results() -> None:
    with FILLED.open() as file:
        rows = [row for row in csv.DictReader(file) if row["variant"] == "convert, max_ops=4"]
    with BATCHES.open() as file:
        largest = {
            (r["network"], r["variant"]): int(r["largest_batch"]) for r in csv.DictReader(file)
        }
    shown = {
        "of the peak": [float(row["peak_over_torch_in_place"]) for row in rows],
        "of the time": [float(row["ratio_to_torch_in_place"]) for row in rows],
        "times as large": [
            largest[row["network"], row["variant"]] / largest[row["network"], "torch in place"]
            for row in rows
            if (row["network"], row["variant"]) in largest
        ],
    }
    text = " ".join((PROJECT / "README.md").read_text().split())
    for what, figures in shown.items():
        assert f"{min(figures):.2f} to {max(figures):.2f} {what}" in text


def test_readme_is_short() -> None:
    assert len((PROJECT / "README.md").read_text().splitlines()) <= 120


def test_links_have_targets() -> None:
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if "://" not in target:
                path, _, section = target.partition("#")
                linked = (page.parent / path).resolve() if path else page
                assert linked.exists(), f"{page.name}: {target}"
                assert not section or section in anchors(linked), f"{page.name}: {target}"


ARCHITECTURE = PROJECT / "docs" / "architecture.md"
SOURCES = [p for folder in ("inplace_ops", "csrc") for p in (PROJECT / folder).rglob("*.*")]
SOURCES = [p for p in SOURCES if p.suffix in {".py", ".pyi", ".h", ".cpp", ".cu", ".cuh"}]


@pytest.mark.skipif(not ARCHITECTURE.exists(), reason="no documentation next to these tests")
def test_architecture_lists_every_source_file() -> None:
    """Each file is in the map, and each file in the map exists."""
    _, the_map = ARCHITECTURE.read_text().split("## The map\n")
    the_map, _ = the_map.split("### Elsewhere\n")
    listed = set()
    for section in the_map.split("### ")[1:]:
        folder = section.partition("\n")[0].strip("`")
        for cell in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE):
            names = re.findall(r"`([^`]+)`", cell)
            parent = names[0].rpartition("/")[0]
            listed |= {f"{folder}{n if '/' in n or not parent else f'{parent}/{n}'}" for n in names}
    assert listed == {str(p.relative_to(PROJECT)) for p in SOURCES} - {
        "inplace_ops/recompute/__init__.py",
        "inplace_ops/conversion/__init__.py",
    }


@pytest.mark.skipif(not ARCHITECTURE.exists(), reason="no documentation next to these tests")
def test_architecture_lists_every_note() -> None:
    titles = set()
    for path in SOURCES:
        titles |= set(re.findall(r"^(?:// | *)NOTE \[(.*)\]$", path.read_text(), re.MULTILINE))
    table = ARCHITECTURE.read_text().split("## Protocols\n")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| ([A-Z][^|]*?) \| `", table, re.MULTILINE)) == titles


def anchors(page: Path) -> list[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
