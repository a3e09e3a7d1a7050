"""The configuration of the documentation site: `make docs`."""

from __future__ import annotations

import sys
from pathlib import Path

from sphinx.application import Sphinx

HERE = Path(__file__).parent
# The generator beside this file, and the package of this checkout.
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

import generate
import seedbed

project = "Seedbed"
author = copyright = "the authors of Seedbed"
release = seedbed.__version__

extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
html_theme = "furo"
html_title = "Seedbed"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = html_show_sourcelink = False
html_show_copyright = False
# Two hyphens are those of an option.
smartquotes = False
pygments_style, pygments_dark_style = "friendly", "monokai"

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

# Types that the signatures of the reference name, but that are documented elsewhere.
nitpick_ignore_regex = [("py:class", r"(?!seedbed\.)[\w.\[\], |]+")]
# LLVM IR in docs/simd.md is shortened, so that Pygments marks parts of it as errors.
suppress_warnings = ["misc.highlighting_failure"]


def setup(app: Sphinx) -> None:
    """Connects the generator: a line `<!-- generated: NAME -->` of a page becomes what the code says."""

    def fill(app: Sphinx, name: str, source: list[str]) -> None:
        source[0] = generate.filled(source[0])

    app.connect("source-read", fill)
