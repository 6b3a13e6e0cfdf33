"""Blocks of weights: where the parameters of a program lie in the files of another one.

One record for each parameter serves both directions: reading its values and writing them.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TypeAlias

from meshdsl.diagnostics import (
    Diagnostic,
    DiagnosticError,
    Diagnostics,
    Edit,
    Fix,
    Related,
    Span,
    advice,
    counted,
    did_you_mean,
    fail,
    spelled_right,
)
from meshdsl.ir.types import TensorType
from meshdsl.named.declarations import MAX_DIM, Declarations, unknown
from meshdsl.named.ir import NamedProgram
from meshdsl.records import dataclass
from meshdsl.syntax import ast
from meshdsl.syntax.edits import inserted
from meshdsl.syntax.printer import file_dim
from meshdsl.syntax.symbols import INIT

_NUMBER = re.compile(r"\s*(?:(\d{1,9})\s*\*\s*)?([A-Za-z_]\w*)\s*(?:([+-])\s*(\d{1,9}))?\s*")
"""What stands in the braces of a key: `layers`, `layers + 1`, `2 * layers + 1`."""

MOST_KEYS = 1_000_000
"""The most tensors of a file that one parameter may be cut into."""


@dataclass(frozen=True, slots=True)
class KeyNumber:
    """A number in a key: `factor * i + offset` for the index `i` of a dim of a parameter."""

    dim: str
    size: int
    factor: int
    offset: int


@dataclass(frozen=True, slots=True)
class FileAxis:
    """A dim of a parameter in a tensor of a file: one index further is `step` along dim `at`.

    Its first `size` indices lie there. The file has `room` for as many or for more.
    """

    dim: str
    size: int
    room: int
    at: int
    step: int


@dataclass(frozen=True, slots=True)
class FilePlace:
    """The place of a parameter in the tensors of a file, which have the sizes `shape`.

    A key is the `texts`, with a number between each two of them: each combination of indices has a
    tensor. In it the parameter begins at `starts`, and the `axes` are its other dims. A model has
    the keys of one `prefix` of a group.
    """

    texts: tuple[str, ...]
    numbers: tuple[KeyNumber, ...]
    shape: tuple[int, ...]
    starts: tuple[int, ...]
    axes: tuple[FileAxis, ...]
    prefix: str

    def keys(self) -> Iterator[tuple[tuple[int, ...], str]]:
        """The indices of the numbered dims, and the key of their tensor, in row-major order."""
        for indices in itertools.product(*(range(number.size) for number in self.numbers)):
            parts = [self.texts[0]]
            for number, index, text in zip(self.numbers, indices, self.texts[1:], strict=True):
                parts += [str(number.factor * index + number.offset), text]
            yield indices, "".join(parts)

    @property
    def pattern(self) -> str:
        """The key with the names of dims for their indices."""
        pairs = zip(self.numbers, self.texts[1:], strict=True)
        return self.texts[0] + "".join(f"{{{number.dim}}}{text}" for number, text in pairs)


@dataclass(frozen=True, slots=True)
class StoredParam:
    """The places of a parameter in files, the preferred first; the first one is written to.

    Where a file has none of them, one that is `optional` keeps its initial values. One that is
    `tied` lies in the tensors of another parameter, and is not written itself.
    """

    name: str
    places: tuple[FilePlace, ...]
    optional: bool = False
    tied: str = ""


@dataclass(frozen=True, slots=True)
class WeightMap:
    """A block of weights for one program. Its keys match `ignored` patterns, or name a parameter.

    `unmapped` are the parameters that have no entry. Floats are written as `dtype`, empty for that
    of each parameter.
    """

    name: str
    params: tuple[StoredParam, ...]
    ignored: tuple[str, ...]
    unmapped: tuple[str, ...]
    dtype: str = ""


def weight_map(
    node: ast.WeightsDecl, program: NamedProgram, declarations: Declarations
) -> WeightMap:
    """The block for the parameters of a program; what it says of others is of other programs.

    Raises MD0101, and MD0146 to MD0148 for entries that do not fit.
    """
    reader = _EntryReader(node, program, declarations)
    problems = Diagnostics()
    for entry in reader.prefixes:
        problems.of(partial(reader.read, entry))
    problems.of(reader.check_apart)
    problems.raise_errors()
    assigned = {str(update.old.name) for update in program.updates if update.old.role == "param"}
    learned = {str(value.name) for value in program.learned}
    ignored = tuple(
        re.sub(r"\{[^{}]*\}", "*", prefix) + entry.pattern.value
        for entry, prefixes in _entries(node.entries, ("",))
        if isinstance(entry, ast.IgnoredKeys)
        for prefix in prefixes
    )
    unmapped = (n for n in reader.types if n not in reader.stored)
    needed = tuple(n for n in unmapped if n in learned or n not in assigned)
    return WeightMap(node.name.text, tuple(reader.stored.values()), ignored, needed)


def padding(
    name: str, type_: TensorType, place: FilePlace, lacking: str, further: str
) -> Iterator[Diagnostic]:
    """MD0555: the indices of a parameter that a file lacks, and those that it has further ones of.

    `lacking` and `further` say what happens to them.
    """
    for axis in place.axes:
        size = type_.size(axis.dim)
        if axis.size < size:
            told = f"of `{name}` are not in the model: they {lacking}"
            yield _last(size - axis.size, size, axis.dim, told)
        if axis.size < axis.room:
            told = f"in the model are not in `{name}`: they {further}"
            yield _last(axis.room - axis.size, axis.room, axis.dim, told)


def _last(count: int, of: int, dim: str, told: str) -> Diagnostic:
    message = f"the last {count:,} of {of:,} along `{dim}` {told}"
    return Diagnostic("MD0555", message, severity="note")


_Listed: TypeAlias = ast.WeightsEntry | ast.IgnoredKeys


def _entries(
    entries: Sequence[_Listed | ast.WeightsGroup], prefixes: tuple[str, ...]
) -> Iterator[tuple[_Listed, tuple[str, ...]]]:
    """All entries, also those in groups, and what their keys may begin with."""
    for entry in entries:
        if isinstance(entry, ast.WeightsGroup):
            longer = tuple(p + more.value for p in prefixes for more in entry.prefixes)
            yield from _entries(entry.entries, longer)
        else:
            yield entry, prefixes


def check_weights(
    declarations: Declarations, programs: Sequence[NamedProgram], diagnostics: Diagnostics
) -> None:
    """Report what is wrong with the blocks of a file, in any of its programs.

    Parameters that a block leaves out are a warning (MD0149).
    """
    for node in declarations.weights.values():
        _check_names(node, programs, diagnostics)
        for program in programs:
            found = diagnostics.of(partial(weight_map, node, program, declarations))
            if found is not None and found.params and found.unmapped:
                types = {str(p.value.name): p.value.type for p in program.params}
                diagnostics.add(_unmapped(node, {name: types[name] for name in found.unmapped}))


def _unmapped(node: ast.WeightsDecl, types: Mapping[str, TensorType]) -> Diagnostic:
    names, first = list(types), next(iter(types))
    listed = ", ".join(f"`{name}`" for name in names[:5]) + (", …" if names[5:] else "")
    message = f"`weights {node.name.text}` has no entry for {listed}"
    entry = f'`{first}: "KEY"[{", ".join(types[first].names)}]`'
    text = ", ".join(f"{name}: init" for name in types)
    fixes = (_added_entry(node, text),)
    help = advice(fixes, f"that is for what models lack; others have their key: {entry}")
    return Diagnostic("MD0149", message, node.name.span, "warning", help=help, fixes=fixes)


def _added_entry(node: ast.WeightsDecl, text: str) -> Fix:
    """The fix that adds entries to a block, behind those that it has."""
    within, title = node.span, f"add `{text}`"
    if node.entries:
        return inserted(node.entries[-1].span.end, f", {text}", within, title)
    opened = within.start + within.text.index("{") + 1
    return inserted(opened, f" {text} ", within, title)


def _check_names(
    node: ast.WeightsDecl, programs: Sequence[NamedProgram], diagnostics: Diagnostics
) -> None:
    """MD0145: entries whose parameter is in no program."""
    known = sorted({str(p.value.name) for program in programs for p in program.params})
    for part in ast.walk(node):
        paths: tuple[tuple[ast.Name, ...], ...] = ()
        if isinstance(part, ast.WeightsEntry):
            paths = part.params
        elif isinstance(part, ast.StoredPath) and _dotted(part.path) != INIT:
            paths = (part.path,)
        for path in paths:
            if _dotted(path) not in known and programs:
                diagnostics.add(_no_param(path, known))


def _no_param(path: tuple[ast.Name, ...], known: list[str]) -> Diagnostic:
    name, span = _dotted(path), path[0].span.to(path[-1].span)
    within = [k for k in known if k.rpartition(".")[2] == path[-1].text]
    fixes: tuple[Fix, ...]
    if len(within) == 1:
        fixes = (Fix.write(span, within[0]),)
    else:
        few = tuple(Fix.write(span, path, safe=False) for path in known if len(known) <= 3)
        fixes = spelled_right(span, name, known) or few
    listed = ", ".join(f"`{k}`" for k in known[:5]) + (", …" if known[5:] else "")
    help = advice(fixes) or f"known: {listed or 'none'}"
    return Diagnostic(
        "MD0145", f"no program has a parameter `{name}`", span, help=help, fixes=fixes
    )


def _dotted(path: tuple[ast.Name, ...]) -> str:
    return ".".join(name.text for name in path)


# --- entries -------------------------------------------------------------------------------------

_Factors: TypeAlias = list[tuple[str, int, int]]
"""The dims of a parameter in one dim of a file: name, size in the file, and step along that."""


class _EntryReader:
    """Reads the entries of one block for the parameters of one program."""

    def __init__(
        self, node: ast.WeightsDecl, program: NamedProgram, declarations: Declarations
    ) -> None:
        self.types: Mapping[str, TensorType] = {
            str(p.value.name): p.value.type for p in program.params
        }
        self.prefixes = {
            entry: prefixes
            for entry, prefixes in _entries(node.entries, ("",))
            if isinstance(entry, ast.WeightsEntry)
        }
        self.entries = {
            _dotted(path): (entry, at)
            for entry in reversed(self.prefixes)
            for at, path in enumerate(entry.params)
        }
        self.sizes = {name: dim.size for name, dim in declarations.dims.items()}
        self.stored: dict[str, StoredParam] = {}

    def read(self, entry: ast.WeightsEntry) -> None:
        """Store the places of the parameters that an entry names."""
        for at, path in enumerate(entry.params):
            name = _dotted(path)
            if self.entries[name][0] is not entry or self.entries[name][1] != at:
                first = self.entries[name][0].span
                help = "write one entry for each parameter, with `or` between its places"
                message = f"`{name}` has two entries"
                related = (Related(first, "the other one"),)
                double = Diagnostic("MD0147", message, path[0].span, related=related, help=help)
                raise DiagnosticError(double)
            if name in self.types:
                self.stored[name] = self._param(name, entry, at)

    def _param(self, name: str, entry: ast.WeightsEntry, at: int) -> StoredParam:
        for place in entry.places[:-1]:
            if isinstance(place, ast.StoredPath) and _dotted(place.path) == INIT:
                message = f"the text after `{INIT}` is never read"
                others = [p.span.text for p in entry.places if p is not place]
                span = entry.places[0].span.to(entry.places[-1].span)
                fix = Fix.write(span, " or ".join([*others, INIT]), safe=False)
                fail("MD0147", message, place.span, fixes=(fix,))
        places, optional = self._places(name, entry, at, (name,))
        first = entry.places[0]
        is_tied = isinstance(first, ast.StoredPath) and _dotted(first.path) != INIT
        tied = _dotted(first.path) if is_tied and isinstance(first, ast.StoredPath) else ""
        return StoredParam(name, tuple(places), optional, tied)

    def _places(
        self, name: str, entry: ast.WeightsEntry, at: int, seen: tuple[str, ...]
    ) -> tuple[list[FilePlace], bool]:
        """The places of the parameter at position `at` of an entry, read as those of `name`."""
        places: list[FilePlace] = []
        for place in entry.places:
            if isinstance(place, ast.FileTensor):
                for prefix in self.prefixes[entry]:
                    places.append(self._place(name, place, prefix, len(entry.params), at))
                continue
            other = _dotted(place.path)
            if other == INIT:
                return places, True
            if other in seen or other not in self.entries:
                help = "name a parameter that has an entry with a key of the file"
                fail("MD0147", f"`{other}` has no place in the file", place.span, help=help)
            found, optional = self._places(name, *self.entries[other], (*seen, other))
            places += found
            if optional:
                return places, True
        return places, False

    def _place(
        self, name: str, place: ast.FileTensor, prefix: str, params: int, at: int
    ) -> FilePlace:
        texts, numbers = _key(place, prefix, self.types[name])
        axes: list[FileAxis] = []
        shape, starts = [], []
        joined = 0
        for position, dim in enumerate(place.dims):
            size, start, factors = self._dim(dim, params, at)
            joined += sum(isinstance(n, ast.FileJoined) for n in ast.walk(dim))
            shape.append(size)
            starts.append(start)
            for factor, room, step in factors:
                size = room
                if self.types[name].has(factor):
                    size = min(room, self.types[name].size(factor))
                axes.append(FileAxis(factor, size, room, position, step))
        if (joined != 1) if params > 1 else joined:
            _wrong_parts(place, params)
        _check_dims(
            name, self.types[name], place, [*(n.dim for n in numbers), *(a.dim for a in axes)]
        )
        return FilePlace(texts, numbers, tuple(shape), tuple(starts), tuple(axes), prefix)

    def _dim(self, dim: ast.FileDim, params: int, at: int) -> tuple[int, int, _Factors]:
        """The size of a dim of a file, the start of a parameter, and its dims with their steps."""
        if isinstance(dim, ast.FileUnit):
            return self._unit(dim)
        if isinstance(dim, ast.FileJoined):
            if len(dim.parts) != params:
                message = f"{counted(params, 'parameter')}, but {counted(len(dim.parts), 'part')}"
                help = "name as many parameters as `+` joins parts, in their order"
                fail("MD0147", message, dim.span, help=help)
            parts = [self._dim(part, params, at) for part in dim.parts]
            sizes = [size for size, _, _ in parts]
            return sum(sizes), sum(sizes[:at]) + parts[at][1], parts[at][2]
        size, start = 1, 0
        factors: _Factors = []
        for inner in reversed(dim.dims):
            extent, first, inner_factors = self._dim(inner, params, at)
            factors = [(f, n, step * size) for f, n, step in inner_factors] + factors
            start += first * size
            size *= extent
        return size, start, factors

    def _unit(self, unit: ast.FileUnit) -> tuple[int, int, _Factors]:
        if isinstance(unit.dim, ast.Number):
            if unit.dim.value != 1 or not isinstance(unit.dim.value, int):
                help = "declare a dim of this size; `1` alone is a dim that the parameter lacks"
                fail("MD0147", f"`{unit.span.text}` is no dim", unit.span, help=help)
            return 1, 0, []
        size = self._size(unit.dim if unit.size is None else unit.size)
        return size, 0, [(unit.dim.text, size, 1)]

    def _size(self, size: ast.Name | ast.Number) -> int:
        if isinstance(size, ast.Name):
            if size.text not in self.sizes:
                raise DiagnosticError(unknown("MD0101", "dim", size, list(self.sizes)))
            return self.sizes[size.text]
        if not isinstance(size.value, int) or not 0 < size.value <= MAX_DIM:
            help = "sizes in files are whole numbers: `vocab = 50304`"
            fail("MD0147", f"`{size.span.text}` is no size", size.span, help=help)
        return size.value

    def check_apart(self) -> None:
        """Refuse two parameters in the same elements of a tensor that is written (MD0148)."""
        owners: dict[tuple[str, tuple[int, ...]], str] = {}
        for stored in self.stored.values():
            if stored.tied or not stored.places:
                continue
            first = stored.places[0]
            for _, key in first.keys():
                owner = owners.setdefault((key, first.starts), stored.name)
                if owner != stored.name:
                    entry, _ = self.entries[stored.name]
                    message = f"`{stored.name}` and `{owner}` are both stored in `{key}`"
                    tied = Fix.write(entry.span, f"{stored.name}: {owner}", safe=False)
                    help = advice((tied,), "where they have the same values")
                    fail("MD0148", message, entry.span, help=help, fixes=(tied,))


def _wrong_parts(place: ast.FileTensor, params: int) -> None:
    help = "join the parts along the dim that they share: `[model, (heads, key) + (kv, key)]`"
    message = f"{params} parameters share this tensor, and its dims do not say where each is"
    if params == 1:
        message = "one parameter has no parts to join"
        help = "name all parameters of the tensor: `(wq, wk): …`"
    fail("MD0147", message, place.span, help=help)


def _check_dims(name: str, type_: TensorType, place: ast.FileTensor, dims: list[str]) -> None:
    """Refuse a place whose dims are not those of the parameter, each once (MD0146)."""
    twice = [dim for dim in type_.names if dims.count(dim) > 1]
    missing = [dim for dim in type_.names if dim not in dims]
    surplus = [dim for dim in dict.fromkeys(dims) if dim not in type_.names]
    wrong = [
        *(f"without `{dim}`" for dim in missing),
        *(f"with `{dim}`, which it lacks" for dim in surplus),
        *(f"with `{dim}` twice" for dim in twice),
    ]
    if wrong:
        written = ", ".join(map(file_dim, place.dims))
        message = f"`{name}` is {type_}, and `[{written}]` is {', '.join(wrong)}"
        help = "write each dim of the parameter once, in the order of the file"
        if missing and not surplus:
            help += f"; where each index has a tensor of its own, in the key: `{{{missing[0]}}}`"
        right = ", ".join(type_.names)
        span = Span(place.span.source, place.key.span.end, place.span.end)
        fixes = (Fix(f"write `[{right}]`", (Edit(span, f"[{right}]"),), safe=False),)
        fail("MD0146", message, place.span, help=advice(fixes, help), fixes=fixes)


def _key(
    place: ast.FileTensor, prefix: str, type_: TensorType
) -> tuple[tuple[str, ...], tuple[KeyNumber, ...]]:
    """The texts of a key, and the numbers between them."""
    texts, numbers = [], []
    rest = prefix + place.key.value
    while "{" in rest:
        text, _, rest = rest.partition("{")
        inside, closed, rest = rest.partition("}")
        match = _NUMBER.fullmatch(inside)
        if not closed or match is None:
            help = "braces hold a dim: `{layers}`, `{layers + 1}` or `{2 * layers + 1}`"
            message = f"`{{{inside}{closed}` is not a number in a key"
            fail("MD0147", message, place.key.span, help=help)
        factor, dim, sign, offset = match.groups()
        if not type_.has(dim):
            help = did_you_mean(dim, list(type_.names)) or f"its dims are {', '.join(type_.names)}"
            message = f"the parameter has no dim `{dim}`"
            fail("MD0146", message, place.key.span, help=help)
        shift = int(f"{sign or '+'}{offset or 0}")
        if factor == "0" or shift < 0:
            first = f"begins at {shift}" if shift < 0 else "is one number for all indices"
            help = "keys are numbered from 0 or above, with another number for each index"
            fail("MD0147", f"`{{{inside}}}` {first}", place.key.span, help=help)
        numbers.append(KeyNumber(dim, type_.size(dim), int(factor or 1), shift))
        texts.append(text)
    if math.prod(number.size for number in numbers) > MOST_KEYS:
        help = "the braces of a key hold dims of which each index has a tensor of its own"
        fail("MD0147", f"more than {MOST_KEYS:,} tensors", place.key.span, help=help)
    return (*texts, rest), tuple(numbers)
