"""Profiles of clusters: what one device computes, and the levels of links between devices.

A profile is a TOML file, one of `profiles/` or the user's own. `docs/simulate.md` has its fields.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast

from meshdsl.backends.runtime.user_files import read_regular
from meshdsl.cluster.this_machine import kept
from meshdsl.diagnostics import (
    Diagnostic,
    DiagnosticError,
    Diagnostics,
    Source,
    Span,
    did_you_mean,
    fail,
    spelled_right,
)
from meshdsl.ir.types import DTYPES, EIGHT_BIT
from meshdsl.option_edits import give, refuse
from meshdsl.records import dataclass
from meshdsl.syntax.edits import word_in

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

Kind = Literal["switch", "ring", "torus"]
KINDS = ("switch", "ring", "torus")
TIMED = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "permute")
"""The collectives that a table may time."""
KERNELS = ("product", "pointwise")
"""What a table may time on one device: matrix products by FLOPs, one pass by bytes."""
F8 = "f8"
"""The rate of products of any two 8-bit floats, beside those of dtypes."""
MEASURED = "cpu"
"""The cluster of this machine's processes: as measured, where it was."""
UNBOUNDED = 1 << 30
"""The size of an outermost level that may be as large as one likes."""

Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Level:
    """Links between `size` units: devices in the innermost level, groups of the level before.

    alpha: seconds per hop. bandwidth: bytes/s that a device sends, as measured; nominal: what the
    maker says. On a `ring` or `torus` both are of one link in one direction. `shared_by` devices
    share one link. `axes`: the dimensions of a torus, of which each mesh axis takes one.
    """

    size: int
    kind: Kind
    alpha: float
    bandwidth: float
    nominal: float
    shared_by: int = 1
    axes: int = 1


@dataclass(frozen=True, slots=True)
class Device:
    """One device. `flops`: FLOP/s by dtype, at best; `mm_eff`: the part that large products reach.

    gemm_half: rows (of the shorter side) and columns of a product that reaches half of that.
    hbm: bytes/s of memory, of which `hbm_eff` is reached. launch: seconds to start a kernel.
    memory: bytes. overlap_slowdown: how much longer computing takes beside a collective.
    attention_eff: the part of `flops` that a kernel of attention reaches; as products where None.
    host, disk: bytes/s from or to the memory of the host, and a disk, in one direction; None: not
    known.
    """

    flops: Mapping[str, float] = field(hash=False)
    mm_eff: float
    gemm_half: tuple[float, float]
    hbm: float
    hbm_eff: float
    launch: float
    memory: float
    overlap_slowdown: float
    attention_eff: float | None = None
    host: float | None = None
    disk: float | None = None

    def peak(self, dtype: str) -> float:
        """FLOP/s at best; what the device has no unit for runs as f32 does."""
        rate = F8 if dtype in EIGHT_BIT else dtype
        return self.flops.get(rate, self.flops["f32"])

    @property
    def half(self) -> str:
        """The dtype of 16 bits that it multiplies in."""
        return "bf16" if "bf16" in self.flops else "f16"


@dataclass(frozen=True, slots=True)
class Cluster:
    """A machine. `levels` are inside out.

    `tables` hold measured times by collective, number of devices and level, as pairs of local
    bytes and seconds. Those of `KERNELS`, at level 0, are of one device while as many work.
    """

    name: str
    device: Device
    levels: tuple[Level, ...]
    tables: Mapping[tuple[str, int, int], Points] = field(hash=False, default_factory=dict)
    source: tuple[str, ...] = ()


def _built_in() -> Traversable:
    """The folder of the profiles that are built in."""
    from importlib.resources import files

    return files("meshdsl.cluster") / "profiles"


def names() -> tuple[str, ...]:
    """The profiles that are built in."""
    found = _built_in().iterdir()
    return tuple(sorted(p.name.removesuffix(".toml") for p in found if p.name.endswith(".toml")))


def refuse_unnamed(code: str, message: str) -> NoReturn:
    """Raise the error of what needs a cluster where none is named."""
    first, *others = names()
    refuse(
        code,
        message,
        give("--cluster", first, safe=False),
        f"another of {', '.join(others)}",
        "name it in the file: `mesh … on NAME`",
    )


def load(name: str, span: Span | None = None) -> Cluster:
    """The built-in profile of this name, or that of a TOML file.

    In a program, where names have no hyphen, `a100_dgx` is `a100-dgx`. `span` is where the name was
    written. Raises MD0320 for an unknown one, MD0321 for a wrong file.
    """
    if name.endswith(".toml"):
        return _parsed(Path(name).stem, _read(name, span), name)
    name = name.replace("_", "-")
    if name not in names():
        place = span or Span(Source("--cluster", name), 0, len(name))
        built_in = list(names())
        help = (
            did_you_mean(name, built_in) or f"there are {', '.join(built_in)}; or name a .toml file"
        )
        message = f"there is no cluster `{name}`"
        fail("MD0320", message, place, help=help, fixes=spelled_right(place, name, built_in))
    measured_text = kept() if name == MEASURED else None
    if measured_text is not None:
        with contextlib.suppress(DiagnosticError):  # damaged: as if it had not been measured
            return _parsed(name, measured_text, f"{name}.toml")
    text = (_built_in() / f"{name}.toml").read_text(encoding="utf-8")
    return _parsed(name, text, f"{name}.toml")


def _read(path: str, span: Span | None) -> str:
    try:
        return read_regular(path).decode("utf-8")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        place = span or Span(Source("--cluster", path), 0, len(path))
        fail("MD0320", f"the profile {path} cannot be read: {why}", place)


# --- the schema --------------------------------------------------------------------------------

Check = Callable[[Any], Any]
"""The value of a field from that in the file; raises ValueError with what it should be."""


MOST, LEAST = 1e30, 1e-30
"""The greatest number of a profile, and the least above 0: what a machine could have."""


def _number(least: float = 0.0, most: float = MOST) -> Check:
    def check(value: Any) -> float:
        between = f"a number from {least:g} to {most:g}"
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(between)
        if not least <= value <= most or 0 < value < LEAST:
            raise ValueError(between if value >= 0 or least else "not negative")
        return float(value)

    return check


def _positive(value: Any) -> float:
    number = cast("float", _number()(value))
    if not number:
        raise ValueError("more than 0")
    return number


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= UNBOUNDED:
        raise ValueError("a whole number from 1")
    return value


def _word(*known: str) -> Check:
    def check(value: Any) -> str:
        if value not in known:
            raise ValueError(f"one of {', '.join(known)}")
        return cast("str", value)

    return check


def _flops(value: Any) -> dict[str, float]:
    if not isinstance(value, dict) or "f32" not in value or not set(value) <= {*DTYPES, F8}:
        raise ValueError(f"FLOP/s by dtype, of {', '.join([*DTYPES, F8])}, and of f32 at least")
    return {dtype: _positive(rate) for dtype, rate in value.items()}


def _halves(value: Any) -> tuple[float, float]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("two numbers")
    return _number()(value[0]), _number()(value[1])


def _points(value: Any) -> Points:
    pairs = value if isinstance(value, list) else []
    if not pairs or any(not isinstance(p, list) or len(p) != 2 for p in pairs):
        raise ValueError("pairs of bytes and seconds")
    points = tuple((_positive(size), _positive(seconds)) for size, seconds in pairs)
    if any(one[0] >= other[0] for one, other in itertools.pairwise(points)):
        raise ValueError("in the order of bytes")
    return points


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise ValueError("a list of texts")
    return tuple(value)


@dataclass(frozen=True, slots=True)
class _MeasuredTable:
    """One measured table."""

    collective: str
    points: Points
    devices: int = 1
    level: int = 0


CHECKS: dict[type, dict[str, Check]] = {
    Level: {
        "size": _count,
        "kind": _word(*KINDS),
        "alpha": _number(),
        "bandwidth": _positive,
        "nominal": _positive,
        "shared_by": _count,
        "axes": _count,
    },
    Device: {
        "flops": _flops,
        "mm_eff": _number(0.01, 1),
        "gemm_half": _halves,
        "hbm": _positive,
        "hbm_eff": _number(0.01, 1),
        "launch": _number(),
        "memory": _positive,
        "overlap_slowdown": _number(1, 100),
        "attention_eff": _number(0.01, 1),
        "host": _positive,
        "disk": _positive,
    },
    _MeasuredTable: {
        "collective": _word(*TIMED, *KERNELS),
        "points": _points,
        "devices": _count,
        "level": _number(),
    },
}
"""The fields of each table of a profile; those that the class has a default for may be left out."""


@functools.lru_cache(maxsize=64)
def _parsed(name: str, text: str, file: str) -> Cluster:
    """The profile that a text is. Raises MD0321, once for everything that is wrong with it."""
    return _ProfileReader(Source(file, text)).cluster(name)


class _ProfileReader:
    """Reads the tables of one file, and collects what is wrong."""

    def __init__(self, source: Source) -> None:
        self.source, self.found = source, Diagnostics()

    def cluster(self, name: str) -> Cluster:
        """The profile. Raises MD0321."""
        import tomllib

        try:
            content = tomllib.loads(self.source.text)
        except (ValueError, RecursionError) as error:  # also a number of thousands of digits
            why = "it nests without end" if isinstance(error, RecursionError) else error
            fail("MD0321", f"this is no TOML: {why}", self._place(""))
        for key in content.keys() - {"source", "device", "levels", "tables"}:
            self._wrong(f"a profile has no `{key}`", key, "", known=["device", "levels", "tables"])
        source = self._value(_texts, content.get("source", []), "source", "")
        if "device" not in content:
            self._wrong("the table `[device]` is missing", "", "")
        device = self._made(Device, content.get("device", {}), "[device]")
        listed = self._listed(content, "levels")
        levels = [self._made(Level, level, "[[levels]]", n) for n, level in enumerate(listed)]
        if not levels:
            self._wrong("the table `[[levels]]` is missing: a profile has at least one", "", "")
        every = enumerate(self._listed(content, "tables"))
        tables = [self._made(_MeasuredTable, table, "[[tables]]", n) for n, table in every]
        self.found.raise_errors()
        measured_points = {(t.collective, t.devices, int(t.level)): t.points for t in tables}
        return Cluster(name, device, tuple(levels), measured_points, source)

    def _listed(self, given: Mapping[str, Any], key: str) -> list[Any]:
        listed = given.get(key, [])
        if not isinstance(listed, list):
            self._wrong(f"`{key}` is a list of tables: write `[[{key}]]`", key, "")
            return []
        if key == "levels" and listed and isinstance(listed[-1], dict):
            listed = [*listed[:-1], {"size": UNBOUNDED, **listed[-1]}]
        return listed

    def _made(self, made: Any, given: Any, table: str, number: int = 0) -> Any:
        """An object of the class `made` from a table; None where something is wrong."""
        checks = CHECKS[made]
        if not isinstance(given, dict):
            self._wrong(f"`{table.strip('[]')}` is a table", table.strip("[]"), "")
            return None
        which = f"`{table}`" if table == "[device]" else f"`{table}` number {number + 1}"
        optional = {f.name for f in fields(made) if f.default is not MISSING}
        for name in given.keys() - checks.keys():
            self._wrong(f"{which} has no field `{name}`", name, table, number, list(checks))
        for name in [n for n in checks if n not in given and n not in optional]:
            message = f"{which}: the field `{name}` is missing"
            help = f"write `{name} = …`, {_takes(checks[name])}"
            self._wrong(message, "", table, number, help=help)
        values = {
            name: self._value(check, given[name], name, table, number, which)
            for name, check in checks.items()
            if name in given
        }
        return None if self.found.errors else made(**values)

    def _value(
        self, check: Check, value: Any, name: str, table: str, number: int = 0, which: str = ""
    ) -> Any:
        try:
            return check(value)
        except ValueError as error:
            where = f"{which}: " if which else ""
            self._wrong(f"{where}`{name}` should be {error}", name, table, number)
            return None

    def _wrong(
        self,
        message: str,
        name: str,
        table: str,
        number: int = 0,
        known: list[str] | None = None,
        help: str | None = None,
    ) -> None:
        span = self._place(name, table, number)
        word = word_in(span, name)
        fixes = spelled_right(word, name, known) if known and word is not None else ()
        self.found.add(Diagnostic("MD0321", message, span, help=help, fixes=fixes))

    def _place(self, name: str, table: str = "", number: int = 0) -> Span:
        """Where a field stands, or the header of its table, or the beginning of the file."""
        text = self.source.text
        headers = [*re.finditer(rf"^{re.escape(table)}", text, re.M)] if table else []
        start, stop = 0, 0
        if number < len(headers):
            start, stop = headers[number].span()
        fields_of = re.compile(rf"^[ \t]*{re.escape(name)}\b.*$", re.M)
        place = next(_lines_of(fields_of, text, stop), None) if name else None
        return Span(self.source, *(place or (start, max(stop, start))))


def _takes(check: Check) -> str:
    """What a field may be, in the words of the error for one that is not."""
    try:
        check(None)
    except ValueError as error:
        return str(error)
    raise AssertionError("no field may be null")


def _lines_of(pattern: re.Pattern[str], text: str, start: int) -> Iterator[tuple[int, int]]:
    """Where the pattern is found from `start` to the next header."""
    after = re.compile(r"^\[", re.M).search(text, start)
    for match in pattern.finditer(text, start, after.start() if after else len(text)):
        yield match.span()
