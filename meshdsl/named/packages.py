"""Operators of a user's own package: found by its entry point, checked, and guarded.

A package names a tuple of records in its `pyproject.toml`, under a name of the language:

    [project.entry-points."meshdsl.operators"]
    kernels = "my_package.operators:OPERATORS"

A file that says `use kernels` may call these operators. Only what is installed is imported: opening
a file in an editor runs no code that lies beside it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial, wraps
from types import ModuleType
from typing import Any, NoReturn

from meshdsl.diagnostics import Diagnostic, DiagnosticError, Span, did_you_mean, fail, spelled_right
from meshdsl.ir.types import TensorType
from meshdsl.named.prelude_files import function_names
from meshdsl.ops.opdef import (
    ADDED,
    Attrs,
    Factors,
    OpDef,
    OpError,
    Sample,
    Surface,
    Types,
    load_all,
)
from meshdsl.records import dataclass
from meshdsl.syntax.tokens import is_name

GROUP = "meshdsl.operators"
"""The group of entry points in which packages name their operators."""

ATTRIBUTE = "OPERATORS"
"""The records of a module that is named without an attribute."""

GUIDE = "docs/howto/own_operators.md has a package of one operator"

PARTS = {
    "infer": "shape rule",
    "factors": "factors",
    "numpy": "numpy meaning",
    "torch": "torch text",
    "gradient": "gradient",
    "bind": "`bind`",
    "flops": "`flops`",
    "legal": "`legal`",
}
"""The functions of a record, and what messages call them."""

OPTIONAL = ("gradient", "bind", "flops", "legal")
"""Those that a record may lack."""


@dataclass(frozen=True, slots=True)
class OperatorPackage:
    """A package of operators: the name that files use it by, where it is, its records by name."""

    name: str
    home: str
    operators: Mapping[str, OpDef]


class PartFailed(DiagnosticError):
    """A function of a record that failed (MD0164): its `field` in the record, and what is wrong."""

    def __init__(self, field: str, wrong: str, diagnostic: Diagnostic) -> None:
        super().__init__(diagnostic)
        self.field, self.wrong = field, wrong


LOADED: dict[str, OperatorPackage] = {}
"""The packages of this process, by name."""


def installed() -> dict[str, importlib.metadata.EntryPoint]:
    """The entry points of all installed packages of operators, by name, sorted."""
    entries = importlib.metadata.entry_points(group=GROUP)
    return {e.name: e for e in sorted(entries, key=lambda e: e.name) if is_name(e.name)}


def names() -> list[str]:
    """The packages that a file can use: those installed, and those loaded from Python."""
    return sorted({*installed(), *LOADED})


def load(name: str, span: Span | None = None) -> OperatorPackage:
    """The package called `name`, imported at its first use.

    `span` is where it is used. Raises MD0160 to MD0163.
    """
    if name in LOADED:
        return LOADED[name]
    entries = installed()
    if name not in entries:
        help = did_you_mean(name, names()) or _how_to_install(name)
        message = f"no installed package has operators called `{name}`"
        fixes = () if span is None else spelled_right(span, name, names())
        raise DiagnosticError(Diagnostic("MD0160", message, span, help=help, fixes=fixes))
    entry = entries[name]
    with _imported(name, entry.value, span):
        records = entry.load()
    return add(name, entry.value, records, span)


def add(name: str, home: str, found: object, span: Span | None = None) -> OperatorPackage:
    """Make the records `found`, or those of a module, the package `name`. Raises MD0162, MD0163."""
    records = getattr(found, ATTRIBUTE, None) if isinstance(found, ModuleType) else found
    if not isinstance(records, Iterable) or isinstance(records, str | Mapping):
        what = "lists no operators" if records is None else f"has {type(records).__name__}, not a"
        what += "" if records is None else " tuple of operators"
        message = f"the package `{name}` ({home}) {what}"
        help = f"write `{ATTRIBUTE} = (kit.OpDef(…), …)` in it; {GUIDE}"
        fail("MD0163", message, span, help=help)
    operators: dict[str, OpDef] = {}
    for record in records:
        checked = _checked(record, name, span)
        _check_name(checked.name, name, {*operators}, span)
        operators[checked.name] = _guarded(checked, name)
    if not operators:
        message = f"the package `{name}` ({home}) has no operators"
        fail("MD0163", message, span, help=f"put a record into its `{ATTRIBUTE}`; {GUIDE}")
    ADDED.update(operators)
    LOADED[name] = OperatorPackage(name, home, operators)
    return LOADED[name]


def operator_called(name: str) -> OpDef | None:
    """The operator of this name in any package that is installed; None where there is none.

    Raises MD0160 to MD0163 for packages that cannot be loaded, where no other has it.
    """
    broken: list[Diagnostic] = []
    for package in names():
        try:
            operators = load(package).operators
        except DiagnosticError as error:
            broken += error.diagnostics
            continue
        if name in operators:
            return operators[name]
    if broken:
        raise DiagnosticError(*broken)
    return None


def of_operator(name: str) -> OperatorPackage | None:
    """The loaded package that an operator is of; None for an operator of the language."""
    return next((p for p in LOADED.values() if name in p.operators), None)


def _how_to_install(name: str) -> str:
    listed = ", ".join(f"`{n}`" for n in names())
    there = f"installed: {listed}; " if listed else ""
    return (
        f"{there}install the package that has it (`pip install -e FOLDER`), with "
        f'`[project.entry-points."{GROUP}"]` and `{name} = "MODULE:{ATTRIBUTE}"`'
    )


@contextlib.contextmanager
def _imported(name: str, home: str, span: Span | None) -> Iterator[None]:
    """Import a package: what it prints is no output of a command, and an error is a diagnostic."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except (Exception, SystemExit) as error:
        module, _, attribute = home.partition(":")
        read = f"{module}; {module}.{attribute}" if attribute else module
        message = f"the package `{name}` cannot be imported from `{home}`: {error_text(error)}"
        help = f'correct it; `python -c "import {read}"` shows where it fails'
        raise DiagnosticError(Diagnostic("MD0161", message, span, help=help)) from error


def error_text(error: BaseException) -> str:
    """An exception on one line, with the name of its class."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


# --- what a record must have -----------------------------------------------------------------


def _checked(record: object, package: str, span: Span | None) -> OpDef:
    """The record, where its parts are what they must be. Raises MD0163."""
    if not isinstance(record, OpDef):
        message = f"the package `{package}` lists {type(record).__name__}, not a record"
        fail("MD0163", message, span, help=f"list what `kit.OpDef(…)` makes; {GUIDE}")
    refuse = partial(_lacks, record, package, span)
    if not isinstance(record.name, str) or not is_name(record.name):
        refuse("a valid name", "letters, digits and `_`, and no reserved word")
    if not isinstance(record.surface, Surface):
        refuse("a `surface`", 'say how it is called: `surface=kit.Surface("none", (1, 1))`')
    for field, words in PARTS.items():
        part = getattr(record, field)
        if not callable(part) and not (part is None and field in OPTIONAL):
            refuse(f"a function for its {words}", f"give `{field}=` a function")
    how = 'add small calls that `prove` makes: `samples=kit.samples("b h", "()")`'
    try:  # the text of a sample is read when it is first asked for
        samples = tuple(record.samples) if isinstance(record.samples, Sequence) else ()
    except Exception as error:
        refuse(f"other samples: {error_text(error)}", how)
    if not samples or not all(
        isinstance(s, Sample) and len(s.values) == len(s.ins) for s in samples
    ):
        refuse("samples", how)
    if record.composite:
        message = f"the record of `{record.name}` (package `{package}`) sets `composite`"
        help = "remove `composite`: only operators of the language can be defined in the language"
        fail("MD0163", message, span, help=help)
    modules = record.imports
    if not isinstance(modules, tuple) or not all(map(_is_module_name, modules)):
        refuse("module names as its `imports`", 'write `imports=("my_package.kernel",)`')
    return record


def _is_module_name(text: object) -> bool:
    """Whether `import` in an emitted program takes it."""
    return (
        isinstance(text, str) and re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", text) is not None
    )


def _lacks(record: OpDef, package: str, span: Span | None, part: str, help: str) -> NoReturn:
    name = f"`{record.name}`" if isinstance(record.name, str) else "an operator"
    message = f"the record of {name} (package `{package}`) needs {part}"
    fail("MD0163", message, span, help=f"{help}; {GUIDE}")


def _check_name(name: str, package: str, before: set[str], span: Span | None) -> None:
    """Refuse the name of an operator that has a meaning already (MD0162)."""
    other = of_operator(name)
    if name in before:
        taken = "by another record of the package"
    elif other is not None:
        taken = f"by the package `{other.name}`"
    elif name in load_all() or name in function_names() or name in ("grad", "not", "param"):
        taken = "by the language"
    else:
        return
    message = f"the operator name `{name}` (package `{package}`) is already used {taken}"
    fail("MD0162", message, span, help=f"rename it, for example to `{package}_{name}`")


# --- guards ----------------------------------------------------------------------------------


def _guarded(record: OpDef, package: str) -> OpDef:
    """The record, with errors in its functions as diagnostics: no command ends with a traceback."""
    parts = {field: getattr(record, field) for field in PARTS}
    guarded: dict[str, Any] = {
        field: _guard(part, record.name, package, field)
        for field, part in parts.items()
        if part is not None
    }
    guarded["infer"] = partial(_infer_with_options, record, guarded["infer"])
    in_place = {i: _guard(f, record.name, package, "torch") for i, f in record.in_place.items()}
    return replace(record, **guarded, in_place=in_place)


def _infer_with_options(
    record: OpDef, infer: Callable[..., Any], ins: Types, attrs: Attrs
) -> Types:
    """The shape rule, after options: one whose default is a number takes numbers alone."""
    for name, default in record.surface.options:
        takes_numbers = isinstance(default, int | float) and not isinstance(default, bool)
        option = attrs.get(name, default)
        if takes_numbers and not isinstance(option, int | float):
            shown = f'"{option}"' if isinstance(option, str) else str(option)
            message = f"`{name}` of `{record.name}` must be a number, not {shown}"
            raise OpError("MD0213", message, f"write a number: `{name}={default}`")
    types: Types = infer(ins, attrs)
    return types


def _guard(part: Callable[..., Any], name: str, package: str, field: str) -> Callable[..., Any]:
    """A function of a record that raises MD0164 for whatever goes wrong in it."""
    check: Callable[[object], str] = _YIELDS.get(field, _anything)

    @wraps(part)  # `prove` shows the line of the function itself
    def guarded(*args: Any) -> Any:
        try:
            result = part(*args)
            wrong = check(result)
        except (OpError, DiagnosticError):
            raise
        except Exception as error:
            result, wrong = None, error_text(error)
        if not wrong:
            return result
        message = f"the {PARTS[field]} of `{name}` (package `{package}`) failed: {wrong}"
        help = f"`meshdsl prove {package}` tries it on its samples"
        if field == "infer":  # it is reported at the call
            raise OpError("MD0164", message, help)
        raise PartFailed(field, wrong, Diagnostic("MD0164", message, help=help))

    return guarded


def _anything(found: object) -> str:
    del found
    return ""


def _wrong_types(found: object) -> str:
    fits = isinstance(found, tuple) and found and all(isinstance(t, TensorType) for t in found)
    return "" if fits else f"it yields {_kind(found)}, not a tuple of `kit.TensorType`"


def _wrong_factors(found: object) -> str:
    return "" if isinstance(found, Factors) else f"they yield {_kind(found)}, not `kit.Factors`"


def _wrong_text(found: object) -> str:
    return "" if isinstance(found, str) else f"it yields {_kind(found)}, not a text"


def _wrong_gradients(found: object) -> str:
    return "" if isinstance(found, Mapping) else f"it yields {_kind(found)}, not a dict by operand"


def _kind(found: object) -> str:
    return "nothing" if found is None else type(found).__name__


_YIELDS: Mapping[str, Callable[[object], str]] = {
    "infer": _wrong_types,
    "factors": _wrong_factors,
    "torch": _wrong_text,
    "gradient": _wrong_gradients,
}
"""What is wrong with the result of a function of a record; empty where nothing is."""
