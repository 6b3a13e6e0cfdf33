"""Options of commands, each declared once; those that go together are a class.

A command takes an object of the classes whose options it knows, a notebook line as well. `spread`
shows that to typer as single options: those of the class itself, then those of its bases in order.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer import Argument

from meshdsl.diagnostics import did_you_mean, fail
from meshdsl.ir.types import DTYPES
from meshdsl.pipeline import DEFAULT_POLICY, Options
from meshdsl.placed.reshard import MESSAGE_BYTES

File = Annotated[Path, Argument(metavar="FILE", help="A .mdsl file.", show_default=False)]
Files = Annotated[list[Path], Argument(metavar="FILE…", show_default=False)]

SETTING = re.compile(r"[A-Za-z_]\w*=-?\d+")
"""One `dim=size`, as `--set` takes several of them in a row."""

option = dataclass(frozen=True, kw_only=True)
"""A class of options."""


def opt(names: str, metavar: str | None, help: str, default: Any = None, **more: Any) -> Any:
    """One option: its names, spaces between them, and its value if it is not given (`...`: it is).

    `more` goes to typer: the least and the greatest value, for instance.
    """
    info = typer.Option(*names.split(), metavar=metavar, help=help, **more)
    return field(
        default=MISSING if default is ... else default, metadata={"typer": info, "names": names}
    )


def flag(name: str, help: str) -> Any:
    """An option that is given or not."""
    return opt(name, None, help, False)


@option
class Which:
    """Which program on which mesh."""

    program: str | None = opt("--program", "P", "Which program (the only one).")
    mesh: str | None = opt("--mesh", "M", 'A mesh by name, or "data:2,model:4" (the first).')


@option
class Placement:
    """How it is placed."""

    layout: str | None = opt(
        "--layout", "L", 'A layout by name, or "batch:data,hidden:model" (the first).'
    )
    sbp: str | None = opt("--sbp", "S", "An sbp block by name, instead of a layout.")
    reduce: str = opt(
        "--reduce", "R", "Partial values: immediate, mesh-tf, deferred or optimal.", DEFAULT_POLICY
    )


@option
class Search:
    """How a plan is searched for."""

    message_bytes: int = opt(
        "--message-bytes",
        "N",
        "What a collective counts beside its bytes under `optimal`; 0: only bytes count.",
        MESSAGE_BYTES,
        min=0,
    )
    no_cache: bool = flag("--no-cache", "Keep and use no plans of before.")


@option
class Sizes:
    """Other sizes and types than the file has."""

    settings: list[str] | None = opt(
        "--set", "DIM=N …", "Other sizes for dims.", show_default=False
    )
    dtype: str | None = opt("--dtype", "T", "Another type of float.")


@option
class Strict:
    """Whether warnings count."""

    strict: bool = flag("--strict", "Warnings are errors.")


@option
class Force:
    """Whether what is there may go."""

    force: bool = flag("--force", "Overwrite files.")


@option
class Json:
    """Whether the output is data."""

    json: bool = flag("--json", "Print JSON.")


@option
class Placing(Which, Placement, Search, Sizes, Strict):
    """Options of every command that places one program."""


def pipeline_options(given: Any) -> Options:
    """Options of the command line as the pipeline takes them. Raises MD06xx.

    `given` is of the classes of `Placing`, or of those but `Placement`.
    """
    placed = given if isinstance(given, Placement) else Placement()
    dtype = given.dtype
    if dtype is not None and (dtype not in DTYPES or DTYPES[dtype].kind != "float"):
        floats = [n for n, d in DTYPES.items() if d.kind == "float"]
        refuse_unknown("dtype", dtype, floats, "no float type is called so")
    if placed.layout is not None and placed.sbp is not None:
        fail("MD0601", "`--layout` and `--sbp` are both given", help="choose one of them")
    return Options(
        program=given.program,
        mesh=given.mesh,
        layout=placed.layout,
        sbp=placed.sbp,
        reduce=placed.reduce,
        message_bytes=given.message_bytes,
        cache=not given.no_cache,
        set_dims=sizes(given.settings or []),
        dtype=dtype,
        strict=given.strict,
    )


def refuse_unknown(option: str, value: str, known: Iterable[str], why: str) -> None:
    """MD0602 for a value that is none of the `known`."""
    names = list(known)
    if value not in names:
        help = did_you_mean(value, names) or f"there are {', '.join(names)}"
        fail("MD0602", f"`--{option} {value}`: {why}", help=help)


def sizes(settings: Iterable[str]) -> dict[str, int]:
    """`dim=N` texts as sizes."""
    found = {}
    for text in settings:
        name, equals, size = text.partition("=")
        if not equals or not size.strip().isascii() or not size.strip().isdigit():
            help = "for instance `--set batch=64 hidden=2048`"
            fail("MD0601", f"`--set {text[:40]}`: write `--set dim=N`, N a whole number", help=help)
        found[name.strip()] = int(size) if len(size) < 20 else 10**19
    return found


# --- what typer makes of them ----------------------------------------------------------------


def spread(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function as typer reads it: of a parameter that is a class of options, each of these."""
    hints = get_type_hints(function, include_extras=True)
    hints.pop("return", None)
    classes: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}

    def command(**given: Any) -> Any:
        made = {
            name: kind(**{f.name: given.pop(f.name) for f in fields(kind)})
            for name, kind in classes.items()
        }
        return function(**given, **made)

    plain = inspect.signature(function).parameters
    found = {
        parameter.name: parameter
        for name, kind in hints.items()
        for parameter in (
            _options(kind)
            if name in classes
            else [inspect.Parameter(name, _KEYWORD, default=plain[name].default, annotation=kind)]
        )
    }
    command.__doc__ = function.__doc__
    command.__annotations__ = {name: parameter.annotation for name, parameter in found.items()}
    command.__signature__ = inspect.Signature(list(found.values()))  # type: ignore[attr-defined]
    return command


_KEYWORD = inspect.Parameter.KEYWORD_ONLY


def _options(kind: Any) -> Iterator[inspect.Parameter]:
    """The options of a class as parameters; those of a base after its own."""
    hints, known = get_type_hints(kind), {f.name: f for f in fields(kind)}
    for name in (name for owner in kind.__mro__ for name in inspect.get_annotations(owner)):
        default = known[name].default
        yield inspect.Parameter(
            name,
            _KEYWORD,
            default=inspect.Parameter.empty if default is MISSING else default,
            annotation=Annotated[hints[name], known[name].metadata["typer"]],
        )


def spread_settings(arguments: list[str]) -> list[str]:
    """`--set a=1 b=2` as `--set a=1 --set b=2`: an option of the parser takes one value."""
    found: list[str] = []
    setting = False
    for argument in arguments:
        if setting and SETTING.fullmatch(argument) and found[-1] != "--set":
            found.append("--set")
        elif not SETTING.fullmatch(argument):
            setting = argument == "--set"
        found.append(argument)
    return found


def refusal(error: Exception) -> str | None:
    """The sentence of a command line that typer refused; None for any other exception."""
    if not (hasattr(error, "format_message") and hasattr(error, "ctx")):
        return None
    message: str = error.format_message().rstrip(".")
    return message[:1].lower() + message[1:]


def run_words(app: typer.Typer, words: list[str], name: str) -> Any:
    """The result of the command of `app` that the words name. Raises what typer raises."""
    return typer.main.get_command(app)(
        spread_settings(words), prog_name=name, standalone_mode=False
    )
