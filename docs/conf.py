"""The settings of the documentation site, which `make -C docs` builds into docs/_build/html."""

from __future__ import annotations

import sys
from importlib.metadata import version as installed_version
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS), str(DOCS.parent), str(DOCS.parent / "benchmarks")]

project = "attnbalance"
author = "the attnbalance authors"
version = release = installed_version("attnbalance")

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "myst_nb",
    "made_pages",  # docs/made_pages.py: tables from committed JSON, and the notebooks of tutorials/
    "plain_docstrings",  # docs/plain_docstrings.py
]
exclude_patterns = ["_build", "_made"]
nitpicky = True
nitpick_ignore_regex = [("py:.*", ".*")]  # links between pages are checked; types of other libraries have no page here

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
nb_execution_mode = "off"
nb_ipywidgets_js: dict[str, dict[str, str]] = {}  # no script from the network
nb_merge_streams = True


default_role = "code"  # docstrings write `name`
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_attr_annotations = False  # types stand in the signature
maximum_signature_line_length = 88
python_use_unqualified_type_names = True
add_module_names = False

html_theme = "furo"
html_title = "attnbalance"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["sort.js"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
