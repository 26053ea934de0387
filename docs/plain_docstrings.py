"""Sphinx extension: shows docstrings and shapes as they are written in the source.

Docstrings here list arguments and fields as lines "name: meaning." without a heading, which reStructuredText would run
together; they become lists. Outside code, "*" and "|" are just themselves. Annotations are shown as written,
`Float[Tensor, "prompt layer head"]`, and not as what they evaluate to.
"""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING

from sphinx.domains.python import PyObject  # pyright: ignore[reportPrivateImportUsage]

if TYPE_CHECKING:
    from sphinx.application import Sphinx

NAMED = re.compile(r"^\*{0,2}[a-z_][a-z_0-9]*(?:, [a-z_][a-z_0-9]*)*: \S")
"""The first line of an argument or field: "name: meaning." """


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the two changes; the docstring's comes before napoleon's. "Variables" of a class are called fields."""
    app.connect("autodoc-process-docstring", name_arguments, priority=400)
    for field in PyObject.doc_field_types:
        if field.name == "variable":
            field.label = "Fields"
    app.connect("autodoc-process-signature", written_signature)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def name_arguments(_app: Sphinx, what: str, _name: str, _obj: object, _options: object, lines: list[str]) -> None:
    """Put the heading "Args:" or "Attributes:" over each paragraph whose unindented lines all name something."""
    heading = "Attributes:" if what == "class" else "Args:"
    made: list[str] = []
    for paragraph in paragraphs(lines):
        named = [line for line in paragraph if line and not line.startswith(" ")]
        if named and paragraph[0] and not paragraph[0].startswith(" ") and all(NAMED.match(line) for line in named):
            made += [heading, *(f"    {line}" if line else line for line in paragraph)]
        else:
            made += paragraph
    lines[:] = [line if line.lstrip().startswith(">>>") else literal_marks(line) for line in made]


def literal_marks(line: str) -> str:
    """The line with "*" and "|" outside backticks escaped, which reStructuredText would read as markup."""
    pieces = re.split(r"(`+[^`]*`+)", line)
    return "".join(piece if i % 2 else re.sub(r"([*|])", r"\\\1", piece) for i, piece in enumerate(pieces))


def paragraphs(lines: list[str]) -> list[list[str]]:
    """The lines in pieces; each ends with its blank lines."""
    pieces: list[list[str]] = [[]]
    for line in lines:
        if line and pieces[-1] and not pieces[-1][-1]:
            pieces.append([])
        pieces[-1].append(line)
    return pieces


def written_signature(
    _app: Sphinx, what: str, _name: str, obj: object, _options: object, signature: str | None, _returns: str | None
) -> tuple[str, str] | None:
    """The signature with the annotations of the source, which `from __future__ import annotations` keeps as text."""
    if signature is None or not callable(obj):
        return None
    try:
        found = inspect.signature(obj)
    except (TypeError, ValueError):
        return None
    parameters = list(found.parameters.values())
    if what == "method" and parameters and parameters[0].name in ("self", "cls"):
        parameters = parameters[1:]
    if what == "class":
        found = found.replace(return_annotation=inspect.Signature.empty)
    shown = [parameter.replace(annotation=as_written(parameter.annotation)) for parameter in parameters]
    text = str(found.replace(parameters=shown, return_annotation=inspect.Signature.empty))
    returned = as_written(found.return_annotation)
    return text, "" if returned is inspect.Signature.empty else str(returned)


class Written(str):
    """Text that is shown without quotation marks."""

    __slots__ = ()

    def __repr__(self) -> str:
        """The text itself."""
        return str(self)


def as_written(annotation: object) -> object:
    """An annotation as its source text; what is no text stays as it is."""
    return Written(annotation) if isinstance(annotation, str) else annotation
