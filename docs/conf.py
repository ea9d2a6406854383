"""The documentation site (`make docs`): the pages as they are, a page for each command, and the Python API.

Sphinx reads the repository's own folder, so that pages and their links are the same there and on the site. Only the
pages in docs/reference are written, by reference_pages.py.
"""

import logging
import os
import pkgutil
import re
import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.logging import getLogger

from mlsm_plugin.version import __version__

sys.path.insert(0, str(Path(__file__).parent))
from reference_pages import MODULES, plain, reference_pages, texts_of_fields

project, release, html_title = "mlsm_plugin", __version__, f"mlsm_plugin {__version__}"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
root_doc, nitpicky, highlight_language, myst_heading_anchors = "README", True, "none", 4
include_patterns = ["*.md", "docs/**", "examples/*/README.md", "research/README.md"]
exclude_patterns = ["**/.*", "build", "demo", "mlsm_plugin", "scripts", "tests"]  # not searched for pages
autodoc_default_options = {"members": True, "show-inheritance": True, "ignore-module-all": True}
autodoc_member_order, autodoc_typehints_format, add_module_names, napoleon_use_ivar = "bysource", "short", False, True
html_theme, html_static_path, html_css_files, html_copy_source = "furo", ["site.css"], ["site.css"], False
html_use_index = html_domain_indices = False
html_extra_path = [os.path.join("..", os.environ["REPORT"])]  # a report of `mlsm inspect`, from the repository
# where names are that are only imported for type checkers
IMPORTED_FOR_TYPES = ("transformers.", "mlsm_plugin.fairseq_plugin.compat.model_parts.")
COLON = "\ue000"  # in the text of a field, where napoleon would take what is before a colon for a type
warnings = getLogger("conf")


def write_reference(app: Sphinx) -> None:
    """Write the pages of docs/reference, and let the comments behind fields be their docstrings."""
    logging.getLogger().setLevel(logging.WARNING)  # some package has set another one
    folder = Path(app.srcdir, "docs", "reference")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, text in reference_pages():
        (folder / f"{name}.rst").write_text(text, encoding="utf-8")
    for module in (name for names in MODULES.values() for name in names):
        analyzer = ModuleAnalyzer.for_module(module)
        analyzer.analyze()
        for field, text in texts_of_fields(analyzer.code, vars(import_module(module))):
            analyzer.attr_docs.setdefault(field, [plain(text).replace(":", COLON), ""])


def check_docstring(app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: Any) -> None:
    """Warn, which is an error in `make docs`, of a public function, class or method without a docstring."""
    function = getattr(obj, "fget", obj)
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '_')}"
    if skip and callable(function) and name.startswith("mlsm_plugin") and not re.search(r"\.[_<]", name):
        warnings.warning("%s has no docstring", name)


def restore_colons(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Undo the replacement in the texts of fields, after napoleon."""
    lines[:] = [line.replace(COLON, ":") for line in lines]


def add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Add the tables of contents: docs/README.md names the pages, and docs/commands.md the commands."""
    contents: dict[str, list[str]] = {}
    if page == "docs/commands":
        source[0] = re.sub(r"^\| `mlsm (\S+)` \|", r"| [`mlsm \1`](reference/mlsm-\1.rst) |", source[0], flags=re.M)
        contents = {"Commands": ["reference/mlsm-*"]}
    elif page == root_doc:
        index = Path(app.srcdir, "docs/README.md").read_text(encoding="utf-8")
        listed = [f"docs/{name}" for name in re.findall(r"^\| \[[^]]+\]\((\S+)\.md\)", index, flags=re.M)]
        research = [name for name in listed if "/research/" in name]
        contents = {
            "Guides": ["docs/README", *(name for name in listed if name not in research)],
            "Objectives": ["examples/*/README"],
            "Python": ["docs/reference/api-*"],
            "Research": ["research/README", *research],
            "Project": ["docs/reference/report", "CONTRIBUTING", "CHANGELOG"],
        }
    for caption, pages in contents.items():
        source[0] += f"\n```{{toctree}}\n:hidden:\n:glob:\n:caption: {caption}\n" + "\n".join(pages) + "\n```\n"


def find_name(app: Sphinx, env: Any, node: Any, text: Any) -> Any:
    """A name that exists and has no place on the site is plain text; one that does not exist stays a warning."""
    if node.get("refdomain") != "py":
        return None
    module = node.get("py:module")
    starts = ("", f"{module}.", f"{module}.{node.get('py:class')}.", *IMPORTED_FOR_TYPES)
    for start in starts:
        try:
            pkgutil.resolve_name(start + node["reftarget"])
        except (ImportError, AttributeError, ValueError):
            continue
        return text
    return None


def setup(app: Sphinx) -> None:
    """Connect the functions above."""
    app.connect("builder-inited", write_reference)
    app.connect("source-read", add_contents)
    app.connect("autodoc-skip-member", check_docstring)
    app.connect("autodoc-process-docstring", restore_colons, priority=900)
    app.connect("missing-reference", find_name)
