"""Settings of Sphinx for the site: `make site`. The root of its sources is the project's root."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from sphinx.application import Sphinx

project = "inplace_ops"
author = "the inplace_ops authors"
try:
    version = release = metadata.version("inplace_ops")
except metadata.PackageNotFoundError:  # on PYTHONPATH, but not installed
    version = release = ""

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
root_doc = "README"
include_patterns = [
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md"),
    *("benchmarks/README.md", "benchmarks/results/README.md"),
]
exclude_patterns = [".*", "build"]  # folders that are not searched
html_theme = "furo"
html_title = "inplace_ops"
html_additional_pages = {"index": "redirect.html"}
templates_path = ["site"]
html_static_path = ["site/static"]
html_css_files = ["site.css"]
html_copy_source = False
highlight_language = "none"

myst_heading_anchors = 3
suppress_warnings = ["myst.header"]  # a file may start with a comment
napoleon_use_ivar = True  # attributes as a list
default_role = "code"  # docstrings quote code in single backticks
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 80

# On a page of its own the README has no list of all pages, so it is added here.
NAVIGATION = (Path(__file__).parent / "site" / "navigation.md").read_text()


def add_navigation(app: Sphinx, name: str, source: list[str]) -> None:
    """Add the list of all pages to the start page."""
    if name == root_doc:
        source[0] += NAVIGATION


def setup(app: Sphinx) -> None:
    """Connect to Sphinx."""
    app.connect("source-read", add_navigation)
