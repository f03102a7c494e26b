"""Sphinx configuration: MyST pages, docstrings by Napoleon, the furo theme."""

import re
from pathlib import Path
from typing import Any

from docutils import nodes  # type: ignore[import-untyped]
from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]

project = "lifecycle"
author = "The lifecycle authors"
copyright = "2026, the lifecycle authors"  # noqa: A001 - Sphinx wants this name

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
pygments_dark_style = "github-dark"  # the theme's own underlines modules like links
html_title = "lifecycle"
html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_logo = html_favicon = "logo.svg"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

# In docstrings single backticks are names of ours, as `Lease.release`.
default_role = "py:obj"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Cancellation", "returns_style")]
smartquotes_action = "qe"  # an option keeps its two hyphens
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_preserve_defaults = False
python_maximum_signature_line_length = 88

# The build has no network access, so names of other projects are not resolved. Single
# backticks may hold any code, and annotations may name types that have no page.
nitpick_ignore_regex = [
    (r"py:.*", r"(anyio|asyncio|collections|contextlib|typing|np|numpy)(\..*)?"),
    (r"py:(obj|class)", r".*"),
]
suppress_warnings = ["ref.python"]  # fields named `bytes` are not the type
exclude_patterns = ["_build"]


def find_by_last_part(app: Sphinx, env: Any, node: Any, contnode: Any) -> Any:
    """Resolve a name that a docstring mentions without its module."""
    domain = env.get_domain("py")
    target = node.get("reftarget", "")
    if node.get("refdomain") == "py":
        found = [name for name in domain.objects if name.endswith(f".{target}")]
        if len(found) == 1:
            return domain.resolve_xref(
                env, node["refdoc"], app.builder, "obj", found[0], node, contnode
            )
    return None


def skip_inner(*about: Any) -> bool | None:
    """Leave out methods whose docstring says that only our other modules call them.

    Also the fields of named tuples, which the docstrings of their classes describe.
    """
    _app, _what, _name, member, *_ = about
    inner = (member.__doc__ or "").startswith(("Called by ", "Alias for field number"))
    return True if inner else None


def show_defaults(*about: Any) -> tuple[str, str] | None:
    """Show functions and classes that are defaults by their names.

    A limit that is not named is none for a new gate, and otherwise stays as it is. The
    argument that catches a gate or decorator without its parentheses is left out.
    """
    _app, what, *_, arguments, returned = about
    if not arguments:
        return None
    arguments = arguments.replace("_bare=None, /, ", "")
    unnamed = "None" if what == "class" else "..."
    arguments = arguments.replace("<unchanged>", unnamed)
    named = re.sub(r"<(?:built-in )?function (\w+)>", r"\1", arguments)
    named = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", named)
    return named.replace("<factory>", "..."), returned


def mend_text(_app: Sphinx, doctree: nodes.document) -> None:
    """Name files in diffs from the root of the checkout, and draw dashes in fields."""
    for text in list(doctree.findall(nodes.Text)):
        if text == " -- ":  # Sphinx writes it between a parameter and its meaning
            text.parent.replace(text, nodes.Text(" \N{EN DASH} "))
    for block in doctree.findall(nodes.literal_block):
        if block.get("language") in ("diff", "udiff"):
            block.rawsource = block.astext().replace(f"{ROOT}/", "")
            block.children = [nodes.Text(block.rawsource)]


def setup(app: Sphinx) -> None:
    """Connect the hooks."""
    app.connect("autodoc-process-signature", show_defaults)
    app.connect("doctree-read", mend_text)
    app.connect("missing-reference", find_by_last_part)
    app.connect("autodoc-skip-member", skip_inner)
