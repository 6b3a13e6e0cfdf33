"""The site: the project's pages as HTML, `make docs`.

Sources are the pages where they are, from the project's root on, so that their links lead to the
same places on a forge and here. What is generated is in `docs/_ext`.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

project = "meshdsl"
author = "the authors of meshdsl"
copyright = "the authors of meshdsl"
root_doc = "docs/README"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "docs._ext",
]
include_patterns = [
    "*.md",
    "CHANGELOG/*.md",
    "docs/**.md",
    "editors/**.md",
    "examples/notebooks/*.md",
    "examples/notebooks/*.ipynb",
    "grammar/**.md",
    "meshdsl/search/README.md",
]
exclude_patterns = [".*", "**/.*", "build", "**/node_modules", "**.egg-info", "tests"]

# Tests execute the notebooks and hold their saved outputs to what their scripts print.
nb_execution_mode = "off"
# The only code that is folded is that of solutions.
nb_code_prompt_show = "Show the solution"
nb_code_prompt_hide = "Hide the solution"
myst_heading_anchors = 4
highlight_language = "none"

autodoc_typehints_format = "short"
autodoc_default_options = {"exclude-members": "__init__, __new__"}
python_maximum_signature_line_length = 80
default_role = "code"
autodoc_member_order = "bysource"
# What a user never calls: plans, tensors and the like are made by functions.
autodoc_class_signature = "separated"
# Types without an entry: those of other libraries, and of the compiler.
nitpick_ignore_regex = [("py:.*", r"(?!meshdsl\.\w+$).*")]
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = "meshdsl"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_search_scorer = str(ROOT / "docs" / "_static" / "scorer.js")
html_show_copyright = False
html_show_sourcelink = False
html_copy_source = False
copybutton_prompt_text = "$ "
copybutton_copy_empty_lines = False
pygments_style = "default"
pygments_dark_style = "github-dark"
