"""Options of commands, each declared once; related ones form a class.

A command takes an object of its classes of options, and so does a notebook line. `spread` presents
it to typer as single options: those of the class itself, then those of its bases in order. The help
of a command has the options of a class below the `heading` of the class, if it has one.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_type_hints

import typer
from typer import Argument
from typer.core import TyperCommand, TyperGroup

from meshdsl.cli import complete
from meshdsl.cli.corrected import running
from meshdsl.diagnostics import DiagnosticError, Source, Span, fail
from meshdsl.ir.types import DTYPES
from meshdsl.named.declarations import MAX_DIM
from meshdsl.named.size_files import SUFFIX, SetSizes, read_size_file
from meshdsl.option_edits import leave_out, refuse, unknown_value
from meshdsl.pipeline import DEFAULT_POLICY, OBJECTIVES, Options
from meshdsl.placed.reshard import MESSAGE_BYTES
from meshdsl.records import dataclass
from meshdsl.syntax import ast

if TYPE_CHECKING:
    from meshdsl.backends.train.job import DataFiles
    from meshdsl.backends.train.tokenized import Texts

File = Annotated[
    Path,
    Argument(metavar="FILE", help="A .mdsl file; - reads the standard input.", show_default=False),
]
Files = Annotated[
    list[Path],
    Argument(metavar="FILE…", help=".mdsl files; - reads the standard input.", show_default=False),
]

SETTING = re.compile(r"[A-Za-z_]\w*=-?\d+")
"""One `dim=size`; `--set` takes several in a row."""

MOST = (1 << 63) - 1
"""The greatest number that an option takes, and the least one negated."""

MOST_DIGITS = 4000
"""The most digits that Python makes a number of, in a few milliseconds."""

OWN = "Options"
"""The heading of a command's own options in its help."""
PROGRAM = "Program options"
PLACEMENT = "Placement options"
DATA = "Data options"
GENERAL = "General options"

option = dataclass(frozen=True, kw_only=True)
"""The decorator of a class of options."""


def opt(
    names: str,
    metavar: str | None,
    help: str,
    default: Any = None,
    completed: complete.Complete | None = None,
    **more: Any,
) -> Any:
    """One option: its names, separated by spaces, and its default (`...`: required).

    `completed` gives a shell its values; `more` goes to typer: the least and the greatest value,
    for instance.
    """
    info = typer.Option(
        *names.split(), metavar=metavar, help=help, autocompletion=completed, **more
    )
    return field(
        default=MISSING if default is ... else default, metadata={"typer": info, "names": names}
    )


def flag(name: str, help: str) -> Any:
    """A boolean option."""
    return opt(name, None, help, False)


def settings() -> Any:
    """The option of other sizes for dims."""
    help = "Sizes of dims; FILE.mdsl sets all dims that it declares."
    return opt("--set", "DIM=N …", help, completed=complete.sizes, show_default=False)


def which_program(
    help: str = "The program. [default: the only one]", name: str = "--program"
) -> Any:
    """The option that names a program."""
    return opt(name, "P", help, completed=complete.declared(ast.ProgramDecl))


def weights(help: str) -> Any:
    """The option that names a block of weights."""
    return opt("--as", "W", help, completed=complete.declared(ast.WeightsDecl))


@option
class Which:
    """Options of the program and the mesh."""

    heading = PROGRAM

    program: str | None = which_program()
    mesh: str | None = opt(
        "--mesh",
        "M",
        'A mesh of the file, or "data:2,model:4". [default: the first]',
        completed=complete.declared(ast.MeshDecl),
    )


@option
class PlacementOptions:
    """Options of the placement."""

    heading = PLACEMENT

    layout: str | None = opt(
        "--layout",
        "L",
        "A layout of the file, or rules: 'batch -> data'. [default: the first]",
        completed=complete.declared(ast.LayoutDecl),
    )
    sbp: str | None = opt(
        "--sbp",
        "S",
        "An sbp block of the file, in place of a layout.",
        completed=complete.declared(ast.Sbp),
    )
    schedule: str | None = opt(
        "--schedule",
        "S",
        'A pipeline schedule: "gpipe[batch](8)". [default: the layout\'s]',
        completed=complete.schedules_of,
    )
    reduce: str = opt(
        "--reduce",
        "R",
        "When to add partial sums: immediate, mesh-tf, deferred or optimal.",
        DEFAULT_POLICY,
        completed=complete.policies(),
    )


@option
class SearchOptions:
    """Options of the search for a plan."""

    heading = PLACEMENT

    message_bytes: int = opt(
        "--message-bytes",
        "N",
        "Fixed cost per collective under `optimal`, in bytes.",
        MESSAGE_BYTES,
        min=0,
    )
    no_cache: bool = flag("--no-cache", "Do not read or write the plan cache.")


@option
class ClusterOptions:
    """Options of the machine that times are predicted for."""

    heading = "Cluster options"

    cluster: str | None = opt(
        "--cluster",
        "C",
        "The cluster to predict times for: h100, … or a .toml file. [default: the mesh's]",
        completed=complete.clusters,
    )
    objective: str | None = opt(
        "--objective",
        "O",
        "What `optimal` minimises: time or bytes. [default: time with a cluster, else bytes]",
        completed=complete.objectives,
    )


@option
class Sizes:
    """Options of sizes and types that override the file's."""

    heading = PROGRAM

    settings: list[str] | None = settings()
    dtype: str | None = opt(
        "--dtype", "T", "The dtype of floats without a stated one.", completed=complete.floats
    )


@option
class TextOptions:
    """Options of texts that become tokens."""

    heading = DATA

    tokenizer: str | None = opt(
        "--tokenizer", "F", "A tokenizer.json that turns texts into tokens."
    )
    end_token: str | None = opt(
        "--end-token", "T", "The token that ends a document. [default: the tokenizer folder's]"
    )
    text_field: str = opt(
        "--text-field", "K", "The key of the text in each line of .jsonl files.", "text"
    )

    @property
    def texts(self) -> Texts:
        """How texts become tokens."""
        from meshdsl.backends.train.tokenized import Texts

        return Texts(self.tokenizer, self.end_token, self.text_field)


@option
class DataOptions(TextOptions):
    """Options of the samples of a run."""

    heading = DATA

    data: Path = opt("--data", "F", "Samples: .npz, .safetensors, a token file, or a text.", ...)
    batch: str | None = opt(
        "--batch", "DIM", "The dim of samples. [default: the first dim of the first input]"
    )
    tokens: str | None = opt(
        "--tokens", "T", "For a text chars or bytes; for a raw file its dtype. [default: chars]"
    )
    documents: str = opt(
        "--documents", "D", "Concatenate documents (stream), or pad each one (rows).", "stream"
    )
    text_inputs: str | None = opt(
        "--text-inputs", "A,B", "The inputs for tokens and for next tokens."
    )

    def files(self) -> DataFiles:
        """The files of samples."""
        from meshdsl.backends.train.job import DOCUMENTS, DataFiles

        names = tuple(self.text_inputs.split(",")) if self.text_inputs else None
        files = DataFiles(str(self.data), batch=self.batch, tokens=self.tokens)
        refuse_unknown("documents", self.documents, DOCUMENTS, "not one of those there are")
        return dataclasses.replace(files, text_inputs=names, rows=self.documents == "rows")


@option
class Strict:
    """The option that makes warnings errors."""

    heading = GENERAL

    strict: bool = flag("--strict", "Treat warnings as errors.")


@option
class Force:
    """The option to overwrite files."""

    heading = GENERAL

    force: bool = flag("--force", "Overwrite existing files.")


@option
class AsData:
    """The option of output as data."""

    heading = GENERAL

    json: bool = flag("--json", "Print JSON.")


@option
class PlacingOptions(Which, PlacementOptions, SearchOptions, ClusterOptions, Sizes, Strict):
    """Options of every command that places one program."""


def pipeline_options(given: Any) -> Options:
    """The options of the pipeline from those of the command line. Raises MD06xx.

    `given` has the classes of `PlacingOptions`, with or without `PlacementOptions` and
    `ClusterOptions`.
    """
    placed = given if isinstance(given, PlacementOptions) else PlacementOptions()
    dtype = given.dtype
    if dtype is not None and (dtype not in DTYPES or DTYPES[dtype].kind != "float"):
        floats = [n for n, d in DTYPES.items() if d.kind == "float"]
        refuse_unknown("dtype", dtype, floats, "no float type is called so")
    only_one(placed, "layout", "sbp")
    only_one(placed, "sbp", "schedule")
    timed = given if isinstance(given, ClusterOptions) else ClusterOptions()
    if timed.objective is not None:
        refuse_unknown("objective", timed.objective, OBJECTIVES, "a plan is not made for that")
    given_sizes = sizes(given.settings or [])
    return Options(
        program=given.program,
        mesh=given.mesh,
        layout=placed.layout,
        sbp=placed.sbp,
        schedule=placed.schedule,
        reduce=placed.reduce,
        message_bytes=given.message_bytes,
        cache=not given.no_cache,
        set_dims=given_sizes.sizes,
        set_in=given_sizes.places,
        dtype=dtype,
        strict=given.strict,
        cluster=timed.cluster,
        objective=timed.objective,
    )


def only_one(given: Any, *names: str) -> None:
    """Raise MD0601 if several options of these names are given, of which one alone counts."""
    options = chosen(given)
    both = [options[name] for name in names if name in options]
    if len(both) > 1:
        said = " and ".join(f"`{option}`" for option in both)
        fixes = [leave_out(option, safe=False) for option in both]
        refuse("MD0601", f"{said} are both given: only one can count", fixes)


def chosen(given: Any) -> dict[str, str]:
    """The options that have another value than their default, as on the command line, by field."""
    changed = (f for f in fields(given) if getattr(given, f.name) != f.default)
    return {f.name: f.metadata["names"].split()[-1] for f in changed}


def refuse_unknown(option: str, value: str, known: Iterable[str], why: str) -> None:
    """Raise MD0602 for a value that is not among the `known`."""
    names = list(known)
    if value not in names:
        message = f"`--{option} {value}`: {why}"
        raise DiagnosticError(unknown_value("MD0602", message, f"--{option}", value, names))


def sizes(settings: Iterable[str]) -> SetSizes:
    """The sizes by dim of `dim=N` texts and of files; the last one of a dim counts."""
    by_dim: dict[str, int] = {}
    places: dict[str, Span] = {}
    for text in (part for setting in settings for part in _single(setting)):
        if text.endswith(SUFFIX):
            file = read_size_file(text)
            by_dim |= file.sizes
            places |= file.places
            continue
        name, equals, size = text.partition("=")
        if not equals or not size.strip().isascii() or not size.strip().isdigit():
            help = (
                "for instance `--set batch=64 hidden=2048`, or a file of dims: `--set sizes.mdsl`"
            )
            fail("MD0601", f"`--set {text[:40]}`: write `--set dim=N`, N a whole number", help=help)
        if len(size) > MOST_DIGITS:
            place = Span(Source("--set", text), 0, len(text))
            help = f"choose one: `--set {name.strip()}=N`"
            fail("MD0106", f"the size of a dim lies in 1 … {MAX_DIM}", place, help=help)
        by_dim[name.strip()] = int(size)
        places.pop(name.strip(), None)
    return SetSizes(by_dim, places)


def _single(setting: str) -> list[str]:
    """The sizes of `dim batch = 64, d = 4`, as the language and reports write several, singly."""
    sizes = setting.strip().removeprefix("dim ")
    return [setting] if setting.endswith(SUFFIX) else sizes.split(",")


# --- adapters to typer -----------------------------------------------------------------------


def spread(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with its parameter of a class of options spread into single ones, for typer."""
    hints = get_type_hints(function, include_extras=True)
    hints.pop("return", None)
    classes: Mapping[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}

    def command(**given: Any) -> Any:
        grouped = {
            name: kind(**{f.name: given.pop(f.name) for f in fields(kind)})
            for name, kind in classes.items()
        }
        return function(**given, **grouped)

    plain = inspect.signature(function).parameters
    parameters = {
        parameter.name: parameter
        for name, kind in hints.items()
        for parameter in (
            _options(kind)
            if name in classes
            else [inspect.Parameter(name, _KEYWORD, default=plain[name].default, annotation=kind)]
        )
    }
    command.__doc__ = function.__doc__
    command.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
    command.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    return command


_KEYWORD = inspect.Parameter.KEYWORD_ONLY


def _options(kind: Any) -> Iterator[inspect.Parameter]:
    """The options of a class as parameters; those of a base after its own."""
    hints, fields_by_name = get_type_hints(kind), {f.name: f for f in fields(kind)}
    for name, owner in ((n, o) for o in kind.__mro__ for n in inspect.get_annotations(o)):
        default = fields_by_name[name].default
        fields_by_name[name].metadata["typer"].rich_help_panel = vars(owner).get("heading", OWN)
        yield inspect.Parameter(
            name,
            _KEYWORD,
            default=inspect.Parameter.empty if default is MISSING else default,
            annotation=Annotated[hints[name], fields_by_name[name].metadata["typer"]],
        )


def spread_settings(arguments: list[str]) -> list[str]:
    """Rewrite `--set a=1 b=2` as `--set a=1 --set b=2`: the parser's options take one value.

    A file right after `--set` is one of sizes, and so are those after sizes where the command has
    a file already. Any other file is one of the command.
    """
    words: list[str] = []
    setting = has_file = False
    for argument in arguments:
        first = bool(words) and words[-1] == "--set"
        is_file = argument.endswith(SUFFIX)
        if first or (setting and (SETTING.fullmatch(argument) or (is_file and has_file))):
            setting = is_file or bool(SETTING.fullmatch(argument))
            words += [] if first else ["--set"]
        else:
            setting = argument == "--set"
            has_file = has_file or is_file or argument == "-"
        words.append(argument)
    return words


class Command(TyperCommand):
    """A command that refuses what it would otherwise ignore, and numbers that no machine has.

    It would ignore the first of two values.
    """

    def get_params(self, ctx: Any) -> Any:
        """The parameters, with `--help`."""
        return _read_plainly(super().get_params(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words of the usage line: names of arguments stand without braces."""
        arguments = (p for p in self.get_params(ctx) if p.param_type_name == "argument")
        return ["[OPTIONS]", *(p.metavar if p.required else f"[{p.metavar}]" for p in arguments)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """The arguments, the command's own options, then those of each heading."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], OWN: []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            if parameter.param_type_name == "argument":
                sections["Arguments"].append((parameter.metavar, record[1]))
            else:
                heading = parameter.rich_help_panel or GENERAL  # `--help` is in no class
                sections.setdefault(heading, []).append(record)
        sections[GENERAL] = sections.pop(GENERAL, [])
        for heading, records in sections.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The remaining arguments; a single-valued option that is given twice is refused."""
        if not ctx.resilient_parsing:
            _, _, order = self.make_parser(ctx).parse_args(args=list(args))
            for given, times in Counter(order).items():
                many = getattr(given, "multiple", False) or getattr(given, "is_flag", False)
                if times > 1 and not many:
                    name = given.opts[-1]
                    try:
                        ctx.fail(f"option '{name}' is given {times} times, but takes one value")
                    except Exception as error:
                        error.given_twice = name  # type: ignore[attr-defined]
                        raise
        left = super().parse_args(ctx, args)
        for parameter in self.params:
            value = ctx.params.get(parameter.name)
            if isinstance(value, int | float) and not -MOST <= value <= MOST:
                ctx.fail(
                    f"invalid value for '{parameter.opts[-1]}': {value} is not in {-MOST} … {MOST}"
                )
        return left


class Commands(Mapping[str, Any]):
    """Commands by name, each made of the function of its module when it is first asked for."""

    def __init__(self, package: str, names: Sequence[str]) -> None:
        self.package, self.names = package, names
        self.made = dict[str, object]()

    def __getitem__(self, name: str) -> Any:
        if name not in self.names:
            raise KeyError(name)
        if name not in self.made:
            module = importlib.import_module(f"{self.package}.{name}")
            alone = typer.Typer(
                add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
            )
            alone.command(name, cls=Command)(spread(module.command))
            self.made[name] = typer.main.get_command(alone)
        return self.made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


class LazyGroup(TyperGroup):
    """The group of all commands; `of` says where they are."""

    of: ClassVar[Commands]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.commands = self.of  # type: ignore[assignment]

    def get_params(self, ctx: Any) -> Any:
        """The parameters, with `--help`."""
        return _read_plainly(super().get_params(ctx))


def _read_plainly(parameters: Iterable[Any]) -> list[Any]:
    """The parameters, whose plain texts and small numbers are read here.

    For any value typer imports pydantic, if it is a version that reads values so.
    """
    every = list(parameters)
    for parameter in every:
        full = getattr(parameter, "get_runtime_param", None)
        if full is not None and not isinstance(full, _Plain):
            parameter.get_runtime_param = _Plain(full)
    return every


@dataclass(frozen=True, slots=True)
class _Plain:
    """Reads the values of a parameter that need no check; typer reads, and refuses, the others."""

    full: Callable[[], Any]

    def __call__(self) -> _Plain:
        return self

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """The value that the text on the command line stands for."""
        many = param.multiple or param.nargs == -1
        if value is None:
            return () if many else None
        if not many and type(value) is param.type_descriptor.annotation:
            return value
        read = _PLAIN.get(param.type_descriptor.annotation)
        texts = value if many else [value]
        if read is not None and all(isinstance(text, str) for text in texts):
            values = [read(text, param.type_descriptor.parameter_info) for text in texts]
            if None not in values:
                return values if many else values[0]
        return self.full().coerce(value, param=param, ctx=ctx)


def _whole_number(text: str, info: Any) -> int | None:
    """A whole number within the limits of the option."""
    if not re.fullmatch(r"-?[0-9]{1,18}", text):
        return None
    number = int(text)
    low = info.min is not None and number < info.min
    high = info.max is not None and number > info.max
    return None if low or high else number


def _real_number(text: str, info: Any) -> float | None:
    """None: typer reads it, except infinities and NaN, which would be refused by a range."""
    try:
        finite = math.isfinite(float(text))
    except ValueError:
        return None
    if not finite:
        raise typer.BadParameter(f"{text} is no finite number")
    return None


_PLAIN: dict[Any, Callable[[str, Any], Any]] = {
    str: lambda text, info: text,
    list[str]: lambda text, info: text,
    Path: lambda text, info: Path(text),
    list[Path]: lambda text, info: Path(text),
    int: _whole_number,
    float: _real_number,
}
"""How texts are read by the type of a parameter; None where the text is none of it."""


def run_words(app: typer.Typer, words: list[str], name: str) -> Any:
    """Run the command of `app` that the words name; returns its result, raises typer's errors."""
    command, spread_out = _command(app), spread_settings(words)
    with running(name, command, spread_out):
        return command(spread_out, prog_name=name, standalone_mode=False)


@functools.cache
def _command(app: typer.Typer) -> Any:
    """The commands of `app`, which it takes typer a while to make of their functions."""
    return typer.main.get_command(app)
