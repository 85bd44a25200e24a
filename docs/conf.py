"""Settings of the site that `make docs` builds: the pages of docs/ and the docstrings of pagetile.

Docstrings are read from the sources, so nothing has to be compiled or imported.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
VERSION = re.search(
    r"project\(\s*pagetile\s+VERSION\s+([\d.]+)", (ROOT / "CMakeLists.txt").read_text()
)

project = "pagetile"
version = release = VERSION[1] if VERSION else ""
project_copyright = "the authors of pagetile; Apache-2.0"

extensions = ["myst_parser", "sphinx.ext.napoleon", "autoapi.extension"]
suppress_warnings = ["autoapi.python_import_resolution"]  # pagetile._C is compiled

# Pages
smartquotes = False  # two hyphens begin an option
myst_heading_anchors = 3

# Docstrings
default_role = "py:obj"
autoapi_dirs = [str(ROOT / "python" / "pagetile")]
autoapi_generate_api_docs = False  # docs/api/ says what is shown where
autoapi_add_toctree_entry = False
autoapi_member_order = "bysource"
autoapi_options = ["members", "undoc-members", "show-inheritance", "imported-members"]
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88

# Looks
html_theme = "furo"
html_title = f"pagetile {version}"
html_copy_source = False
html_show_sphinx = False


def offer_files(app: Any, name: str, source: list[str]) -> None:
    """Markdown outside docs/ becomes a file to download, as other files are by themselves."""

    def changed(link: re.Match[str]) -> str:
        target = (DOCS / name).parent / link[1]
        return link[0] if target.resolve().is_relative_to(DOCS) else f"](path:{link[1]})"

    source[0] = re.sub(r"\]\(((?:\.\./)+[^)\s:#]+\.md)\)", changed, source[0])


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", offer_files)
