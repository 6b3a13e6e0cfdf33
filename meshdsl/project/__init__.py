"""The files of a new project, as `meshdsl new` makes it.

Each is a template beside this file; `{{name}}` in it is the name of the project.
"""

from __future__ import annotations

import re
from importlib.resources import files

from meshdsl.diagnostics import advice, fail
from meshdsl.option_edits import replace_argument
from meshdsl.records import dataclass
from meshdsl.syntax.tokens import is_name, is_reserved


@dataclass(frozen=True, slots=True)
class ProjectFile:
    """A file of a project: its name, its purpose in a few words, and its text."""

    name: str
    purpose: str
    text: str


_FILES = (
    ("{{name}}.mdsl", "the program, a mesh, two layouts", "program.mdsl.template"),
    ("data.py", "writes the training data", "data.py.template"),
    ("test_{{name}}.py", "for pytest: both layouts give the same results", "test.py.template"),
    ("README.md", "commands to try", "README.md.template"),
    (".gitignore", "generated files", "gitignore.template"),
)
"""Name, purpose and template of each file, in the order in which a reader wants them."""


def project(name: str) -> tuple[ProjectFile, ...]:
    """The files of a project. Raises MD0620 for a name that a program cannot have."""
    _check_name(name)
    return tuple(
        ProjectFile(_named(file, name), purpose, _named(_read(template), name))
        for file, purpose, template in _FILES
    )


def _check_name(name: str) -> None:
    """Refuse what is no name of the language: the program is called like the project."""
    if is_name(name):
        return
    why = "it is a word of the language" if is_reserved(name) else "it is no name of the language"
    help = "a name is made of letters a to z, digits and `_`, and does not begin with a digit"
    close = _legal(name)
    fixes = (replace_argument(name, close, safe=False),) if close else ()
    message = f"`{name}` cannot be the name of a project: {why}"
    fail("MD0620", message, help=f"{advice(fixes)}: {help}" if fixes else help, fixes=fixes)


def _legal(name: str) -> str:
    """The nearest legal name: `my_model` for `my-model`; empty where there is none."""
    close = re.sub(r"[^A-Za-z0-9_]+", "_", name).strip("_")
    if is_reserved(close):
        close = f"my_{close}"
    if close[:1].isdigit():
        close = f"n_{close}"
    return close if is_name(close) else ""


def _named(text: str, name: str) -> str:
    return text.replace("{{name}}", name)


def _read(template: str) -> str:
    return (files(__name__) / template).read_text(encoding="utf-8")
