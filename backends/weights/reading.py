"""The parameters of a program in the tensors of a model: compared, and mapped without reading."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import field, replace

from meshdsl.backends.runtime.array_files import kind_of, show_table, width_of
from meshdsl.backends.runtime.lazy_numpy import np
from meshdsl.backends.runtime.mapped_arrays import FileElements, MappedArray, numpy_dtype
from meshdsl.backends.weights.model_files import ModelTensor
from meshdsl.diagnostics import Diagnostic, Diagnostics, Fix, advice, closest, fail, plural
from meshdsl.ir.types import TensorType
from meshdsl.named.weights import FilePlace, StoredParam, WeightMap, padding
from meshdsl.option_edits import set_sizes
from meshdsl.records import dataclass

Tensors = Mapping[str, ModelTensor]

MOST_ROWS = 20
"""The most rows of a table of what does not fit."""


@dataclass(frozen=True, slots=True)
class Mapped:
    """The parameters found in a model, and notes for the user.

    `initial` are those that the model lacks and the block has `or init` for. The notes `changes`
    tell of other values than the model has, `exact` of other dtypes alone.
    """

    arrays: Mapping[str, MappedArray]
    initial: tuple[str, ...]
    changes: tuple[Diagnostic, ...]
    exact: tuple[Diagnostic, ...]

    @property
    def notes(self) -> tuple[Diagnostic, ...]:
        """All notes."""
        return (*self.exact, *self.changes)


@dataclass(frozen=True, slots=True)
class _Row:
    """Something that does not fit: a key, or a pattern of keys; tensors expected and found."""

    key: str
    param: str
    expected: str
    found: str
    problem: str


def mapped_params(
    weights: WeightMap, types: Mapping[str, TensorType], tensors: Tensors, path: str
) -> Mapped:
    """The parameters in the tensors of the model at `path`; `types` are the program's.

    Raises MD0550 with a table of all keys that are missing, surplus, misshapen or mistyped.
    """
    comparison = _Comparison(weights, types, tensors)
    arrays = comparison.arrays()
    rows = [*comparison.rows, *comparison.surplus()]
    if rows:
        _refuse(rows, weights, path, _OtherSizes.of(weights, tensors))
    initial = tuple(p.name for p in weights.params if p.name not in arrays)
    padded = Diagnostics()
    for name, place in comparison.places.items():
        padded.add(*padding(name, types[name], place, "are 0", "are not read"))
    casts = Counter((array.dtype, str(types[name].dtype)) for name, array in arrays.items())
    exact = {pair: count for pair, count in casts.items() if _is_exact(*pair)}
    changed = cast_notes(casts - Counter(exact), "read")
    return Mapped(arrays, initial, (*changed, *padded), tuple(cast_notes(exact, "read")))


@dataclass(slots=True)
class _Comparison:
    """Compares the tensors of a model with a block of weights."""

    weights: WeightMap
    types: Mapping[str, TensorType]
    tensors: Tensors
    rows: list[_Row] = field(default_factory=list)
    read: set[str] = field(default_factory=set)
    places: dict[str, FilePlace] = field(default_factory=dict)

    def arrays(self) -> dict[str, MappedArray]:
        """The parameters that have a place in the model; what does not fit is in `rows`."""
        found: dict[str, MappedArray] = {}
        present = {param.name: self._present(param) for param in self.weights.params}
        prefixes = Counter(place.prefix for place in present.values() if place is not None)
        for param in self.weights.params:
            place = present[param.name]
            if place is None and param.places and not param.optional:
                place = max(param.places, key=lambda p: prefixes[p.prefix])
            if place is not None:
                self.places[param.name] = place
                tensors = self._tensors(param, place)
                if tensors is not None:
                    found[param.name] = mapped_array(self.types[param.name], place, tensors)
        for name in self.weights.unmapped:
            problem = f"no entry in `weights {self.weights.name}`"
            self.rows.append(_Row("-", name, _described(self.types[name]), "-", problem))
        return found

    def _present(self, param: StoredParam) -> FilePlace | None:
        """The first of the places of a parameter that the model has a tensor of."""
        for place in param.places:
            if any(key in self.tensors for _, key in place.keys()):
                return place
        return None

    def _tensors(self, param: StoredParam, place: FilePlace) -> list[ModelTensor] | None:
        """The tensors of a place in the order of its keys; None where any does not fit."""
        type_, before = self.types[param.name], len(self.rows)
        expected = f"{type_.dtype}{_sizes(place.shape)}"
        for _, key in place.keys():
            self.read.add(key)
            tensor = self.tensors.get(key)
            found = "missing" if tensor is None else f"{tensor.dtype}{_sizes(tensor.shape)}"
            problem = self._problem(key, place, type_)
            if problem:
                self.rows.append(_Row(key, param.name, expected, found, problem))
        if len(self.rows) > before:
            return None
        return [self.tensors[key] for _, key in place.keys()]

    def _problem(self, key: str, place: FilePlace, type_: TensorType) -> str:
        """What is wrong with a tensor, empty for one that fits."""
        tensor = self.tensors.get(key)
        if tensor is None:
            keys = [k for k in self.tensors if k not in self.read]
            near = next((k for k in keys if k.endswith(f".{key}") or key.endswith(f".{k}")), None)
            near = near or closest(key, keys)
            return f"nearest: {near}" if near else "no key like it"
        if tensor.shape != place.shape:
            is_turned = tensor.shape == place.shape[::-1]
            return "transposed?" if is_turned else _if_padded(tensor.shape, place)
        if kind_of(tensor.dtype) != type_.dtype.kind:
            return f"is {kind_of(tensor.dtype)}, not {type_.dtype.kind}"
        return ""

    def surplus(self) -> Iterator[_Row]:
        """Tensors that no entry reads, and no `ignore`."""
        ignored = [_any_text(pattern) for pattern in self.weights.ignored]
        for key, tensor in self.tensors.items():
            if key not in self.read and not any(pattern.fullmatch(key) for pattern in ignored):
                found = f"{tensor.dtype}{_sizes(tensor.shape)}"
                yield _Row(key, "-", "-", found, "no entry reads it")


def _if_padded(shape: tuple[int, ...], place: FilePlace) -> str:
    """What is wrong with other sizes; where one dim alone differs, how the block says so."""
    if len(shape) == len(place.shape):
        other = [at for at, (n, m) in enumerate(zip(shape, place.shape, strict=True)) if n != m]
        axes = [axis for axis in place.axes if axis.at in other]
        if len(axes) == len(other) == 1 and axes[0].room == place.shape[other[0]]:
            return f"other sizes; if padded: `{axes[0].dim} = {shape[other[0]]}`"
    return "other sizes"


def _any_text(pattern: str) -> re.Pattern[str]:
    """The expression of a pattern in which `*` is any text, and all else stands for itself."""
    return re.compile(".*".join(map(re.escape, pattern.split("*"))), re.DOTALL)


def _described(type_: TensorType) -> str:
    return f"{type_.dtype}[{', '.join(f'{d.name}={d.size}' for d in type_.dims)}]"


def _sizes(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def mapped_array(type_: TensorType, place: FilePlace, tensors: list[ModelTensor]) -> MappedArray:
    """A parameter in tensors that fit; they are in the order of the keys of its place."""
    names = [number.dim for number in place.numbers]
    numbered = sorted(type_.index(name) for name in names)
    within = [name for axis, name in enumerate(type_.names) if axis not in numbered]
    axes = {axis.dim: axis for axis in place.axes}
    by_index: dict[tuple[int, ...], FileElements] = {}
    for (indices, _), tensor in zip(place.keys(), tensors, strict=True):
        where = dict(zip(names, indices, strict=True))
        starts = zip(place.starts, tensor.strides, strict=True)
        offset = tensor.offset + sum(start * stride for start, stride in starts)
        strides = tuple(axes[dim].step * tensor.strides[axes[dim].at] for dim in within)
        key = tuple(where[type_.names[axis]] for axis in numbered)
        by_index[key] = FileElements(tensor.path, tensor.dtype, tensor.stored, offset, strides)
    dtype = max((t.dtype for t in tensors), key=lambda d: (width_of(d), d))
    in_order = tuple(by_index[key] for key in sorted(by_index))
    extents = tuple(axes[dim].size for dim in within)
    return MappedArray(dtype, type_.shape, tuple(numbered), extents, in_order)


# --- what is told --------------------------------------------------------------------------------


@dataclass(slots=True)
class _OtherSizes:
    """By dim its sizes in the model and in the program; of those that share a dim, their names."""

    found: dict[str, set[int]] = field(default_factory=dict)
    own: dict[str, int] = field(default_factory=dict)
    shared: dict[str, None] = field(default_factory=dict)

    @classmethod
    def of(cls, weights: WeightMap, tensors: Tensors) -> _OtherSizes:
        """As the tensors say that have as many dims as the block."""
        sizes = cls()
        for place in (place for param in weights.params for place in param.places):
            for _, key in place.keys():
                if key in tensors and len(tensors[key].shape) == len(place.shape):
                    sizes._compare(place, tensors[key].shape)
            if len(place.numbers) == 1:
                sizes._count(place, tensors)
        return sizes

    def _compare(self, place: FilePlace, shape: tuple[int, ...]) -> None:
        for at, size in enumerate(shape):
            dims = [axis.dim for axis in place.axes if axis.at == at]
            if len(dims) == 1 and all(a.size == place.shape[at] for a in place.axes if a.at == at):
                self.own[dims[0]] = place.shape[at]
                self.found.setdefault(dims[0], set()).add(size)
            elif size != place.shape[at]:
                self.shared |= dict.fromkeys(dims)

    def _count(self, place: FilePlace, tensors: Tensors) -> None:
        """The tensors whose keys differ in a number."""
        (number,), pattern = place.numbers, r"(\d+)".join(map(re.escape, place.texts))
        numbers = [int(m[1]) for key in tensors if (m := re.fullmatch(pattern, key))]
        if numbers:
            count = (max(numbers) - number.offset) // number.factor + 1
            self.own[number.dim] = number.size
            self.found.setdefault(number.dim, set()).add(count)

    @property
    def fixes(self) -> tuple[Fix, ...]:
        """The fix that sets the sizes of the model; none where they are those of the program."""
        single = {dim: size for dim, (size, *more) in self.found.items() if not more}
        settings = {dim: size for dim, size in single.items() if size != self.own[dim]}
        return (set_sizes(settings),) if settings else ()

    @property
    def help(self) -> str:
        """What to set; empty where the sizes are those of the program."""
        shared = [dim for dim in self.shared if len(self.found.get(dim, ())) != 1]
        if not self.fixes and not shared:
            return ""
        options = " ".join(f"{dim}=N" for dim in shared)
        help = f"{advice(self.fixes) or f'write `--set {options}`'}: the model has other sizes"
        if shared:
            names = ", ".join(f"`{dim}`" for dim in shared)
            help += f"; of {names}, which share a dim, its configuration has the sizes"
        return f"{help}; `--set sizes.mdsl` reads a file of sizes"


def _refuse(rows: list[_Row], weights: WeightMap, path: str, sizes: _OtherSizes) -> None:
    """Raise MD0550: rows that differ in the numbers of their keys alone are one."""
    alike: dict[tuple[str, ...], list[_Row]] = {}
    for row in rows:
        numberless = (re.sub(r"\d+", "*", text) for text in (row.key, row.problem))
        alike.setdefault((*numberless, row.param, row.expected, row.found), []).append(row)
    table: list[tuple[str, ...]] = [("tensor of the model", "parameter", "expected", "found", "")]
    for (key, problem, *_), group in list(alike.items())[:MOST_ROWS]:
        first = group[0]
        several = group[1:]
        name = f"{key} ({len(group)})" if several else first.key
        cells = (name, first.param, first.expected, first.found)
        table.append((*cells, problem if several else first.problem))
    more = len(alike) - MOST_ROWS
    left = f"\n  … and {more} more {plural(more, 'row')}" if more > 0 else ""
    message = f"the tensors of {path} are not those of `weights {weights.name}`"
    help = _help(rows, weights, sizes)
    fail("MD0550", f"{message}\n{show_table(table)}{left}", help=help, fixes=sizes.fixes)


def _help(rows: list[_Row], weights: WeightMap, sizes: _OtherSizes) -> str:
    if sizes.help:
        return sizes.help
    surplus = next((row.key for row in rows if row.problem == "no entry reads it"), None)
    if surplus is not None and all(row.problem == "no entry reads it" for row in rows):
        pattern = re.sub(r"\d+", "*", surplus)
        return f'write an entry for each, or `ignore "{pattern}"` for tensors that are not needed'
    return (
        f"correct the keys and dims of `weights {weights.name}`, or name the model that it is for; "
        "`or init` is for parameters that a model may lack, `ignore` for tensors that are not read"
    )


def cast_notes(casts: Mapping[tuple[str, str], int], done: str) -> Iterator[Diagnostic]:
    """MD0551: how many parameters are `done` (`read`, `written`) in another dtype, by dtypes."""
    for (stored, dtype), count in casts.items():
        if stored != dtype:
            exact = _is_exact(stored, dtype)
            is_float = kind_of(stored) == "float"
            how = "exactly" if exact else "rounded" if is_float else "if they fit"
            message = f"{count} {plural(count, 'parameter')} of {stored} {done} as {dtype}, {how}"
            told = Diagnostic("MD0551", message, severity="note")
            help = f"`--dtype {stored}` computes in the dtype of the model"
            yield replace(told, help=help) if is_float and not exact and done == "read" else told


def _is_exact(stored: str, dtype: str) -> bool:
    """Whether every value of one dtype is one of the other."""
    if "bf16" in (stored, dtype):
        return stored == dtype or (stored == "bf16" and dtype in ("f32", "f64"))
    return bool(np.can_cast(numpy_dtype(stored), numpy_dtype(dtype)))
