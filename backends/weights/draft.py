"""A first block of weights for a program and a model: by sizes, then by names; to be corrected."""

from __future__ import annotations

import itertools
import math
import re
import textwrap
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from difflib import SequenceMatcher

from meshdsl.backends.runtime.array_files import kind_of
from meshdsl.backends.weights.model_files import ModelTensor
from meshdsl.backends.weights.patterns import KeyPattern, patterns_of
from meshdsl.diagnostics import Source
from meshdsl.ir.types import TensorType
from meshdsl.records import dataclass
from meshdsl.syntax.format import format_source

Places = tuple[tuple[str, ...], ...]
"""The dims of a parameter in each dim of a tensor of a model, outer first."""

MOST_DIMS = 6
"""Of a parameter with more dims in one tensor no places are looked for."""

_ALIKE = (
    {"q", "wq", "bq", "query"}, {"k", "wk", "bk", "key"}, {"v", "wv", "bv", "value"},
    {"o", "wo", "bo", "out", "dense"}, {"attn", "attention", "att"}, {"mlp", "ffn", "feed", "ff"},
    {"fc1", "up", "w1", "fc"}, {"fc2", "down", "w2"}, {"gate", "w1"}, {"up", "w3"},
    {"embed", "embedding", "embeddings", "emb", "wte", "tok"}, {"pos", "position", "wpe"},
    {"norm", "ln", "layernorm", "g", "gamma"}, {"shift", "bias", "b", "beta"}, {"router", "gate"},
    {"head", "lm", "final"}, {"f", "final"}, {"1", "input"}, {"2", "post"},
)  # fmt: skip
"""Words for one thing in the names of parameters."""


@dataclass(frozen=True, slots=True)
class _DraftedEntry:
    """An entry of the block, with a remark for the reader."""

    params: tuple[str, ...]
    key: str
    dims: str
    comment: str

    @property
    def prefix(self) -> str:
        """The key up to the part behind its first number, empty without one."""
        before, brace, behind = self.key.partition("}.")
        return before + brace if behind else ""


@dataclass(frozen=True, slots=True)
class _Fit:
    """A parameter that has the sizes of a pattern's tensors, and where its dims may lie in them."""

    param: str
    pattern: KeyPattern
    numbered: tuple[str, ...]
    places: tuple[Places, ...]

    @property
    def is_certain(self) -> bool:
        """Whether only one order of dims has the sizes."""
        return len(self.places) == 1


def draft(name: str, types: Mapping[str, TensorType], tensors: Mapping[str, ModelTensor]) -> str:
    """The text of a block of weights for the parameters `types` in the tensors of a model.

    Comments say what is a guess, and what has no counterpart.
    """
    patterns = [p for p in patterns_of(tensors) if not re.search(r'["\\{}\n]', "".join(p.texts))]
    fits = [fit for pattern in patterns for param in types for fit in _fits(param, types, pattern)]
    turned = _are_turned(_by_name(fits, list(types), patterns), types)
    of_several = [p for p in patterns if p not in {fit.pattern for fit in fits}]
    entries = _joined(of_several, list(types), types, turned)
    joined = {param for entry in entries.values() for param in entry.params}
    likeliest = _by_name([f for f in fits if f.param not in joined], list(types), patterns)
    entries |= {fit.pattern: _entry(fit, types, turned) for fit in likeliest}
    left = [pattern for pattern in patterns if pattern not in entries]
    entries |= _joined(left, _without(types, entries), types, turned)
    text = [f"weights {name} {{"]
    alike = Counter(fit.pattern for fit in fits)
    guessed = {fit.param for fit in likeliest if alike[fit.pattern] > 1}
    if guessed:
        listed = ", ".join(param for param in types if param in guessed)
        told = f"By their names, since others have the same sizes: {listed}."
        text += textwrap.wrap(told, 98, initial_indent="  # ", subsequent_indent="  # ")
    order = list(types)
    text += _grouped(sorted(entries.values(), key=lambda entry: order.index(entry.params[0])))
    for param in _without(types, entries):
        sizes = ", ".join(f"{dim.name}={dim.size}" for dim in types[param].dims)
        text.append(f"  # no tensor of the sizes of {param}: [{sizes}]")
    unread = (pattern for pattern in patterns_of(tensors) if pattern not in entries)
    text += (f"  # no parameter of these sizes: {pattern.described}" for pattern in unread)
    return format_source(Source("draft", "\n".join([*text, "}", ""])))


def offered(
    param: str, types: Mapping[str, TensorType], patterns: Sequence[KeyPattern]
) -> Iterator[tuple[KeyPattern, str, str]]:
    """Patterns with their key and the dims that a parameter has in their tensors.

    There are no dims where the sizes do not fit, or no parameter is called so.
    """
    sizes = {dim.size: dim.name for type_ in types.values() for dim in type_.dims}
    for pattern in patterns:
        fit = next(_fits(param, types, pattern), None) if param in types else None
        if fit is not None:
            entry = _entry(fit, types, turned=True)
            yield pattern, entry.key, entry.dims
        elif all(len(number) in sizes for number in pattern.numbers):
            yield pattern, pattern.text([sizes[len(n)] for n in pattern.numbers]), ""


def _without(types: Collection[str], entries: Mapping[KeyPattern, _DraftedEntry]) -> list[str]:
    """The parameters that have no entry."""
    having = {param for entry in entries.values() for param in entry.params}
    return [param for param in types if param not in having]


def _grouped(entries: Sequence[_DraftedEntry]) -> Iterator[str]:
    """The lines of entries; those whose keys begin with the same number are a group."""
    groups: dict[str, list[_DraftedEntry]] = {}
    for entry in entries:
        groups.setdefault(entry.prefix or entry.key, []).append(entry)
    for same in groups.values():
        prefix = same[0].prefix
        if prefix:
            yield f'  under "{prefix}" {{'
        for entry in same:
            if entry.comment:
                yield f"  # {entry.comment}"
            params = ", ".join(entry.params)
            params = f"({params})" if len(entry.params) > 1 else params
            yield f'  {params}: "{entry.key.removeprefix(prefix)}"[{entry.dims}]'
        if prefix:
            yield "  }"


# --- sizes ---------------------------------------------------------------------------------------


def _fits(param: str, types: Mapping[str, TensorType], pattern: KeyPattern) -> Iterator[_Fit]:
    """How a parameter may lie in the tensors of a pattern: at most one choice of numbered dims."""
    if kind_of(pattern.dtype) != types[param].dtype.kind:
        return
    for numbered, shape in _numbered(types[param], pattern):
        places = tuple(_places(shape, pattern.shape))
        if places:
            yield _Fit(param, pattern, numbered, places)
            return


def _numbered(
    type_: TensorType, pattern: KeyPattern
) -> Iterator[tuple[tuple[str, ...], dict[str, int]]]:
    """The dims that the numbers of a key may be, and the sizes of the other ones."""
    sizes = {dim.name: dim.size for dim in type_.dims}
    if len(sizes) - len(pattern.numbers) > MOST_DIMS:
        return
    for dims in itertools.permutations(sizes, len(pattern.numbers)):
        if all(sizes[dim] == len(n) for dim, n in zip(dims, pattern.numbers, strict=True)):
            yield dims, {dim: size for dim, size in sizes.items() if dim not in dims}


def _places(sizes: Mapping[str, int], shape: tuple[int, ...], free: int = -1) -> Iterator[Places]:
    """The ways to make a shape of dims, in each of its dims in their order.

    The dim `free` of the shape may have any size.
    """
    if free < 0 and math.prod(sizes.values()) != math.prod(shape):
        return
    for at in itertools.product(range(len(shape)), repeat=len(sizes)):
        groups = [
            tuple(dim for dim, where in zip(sizes, at, strict=True) if where == position)
            for position in range(len(shape))
        ]
        products = [math.prod(sizes[dim] for dim in group) for group in groups]
        if all(p == n or i == free for i, (p, n) in enumerate(zip(products, shape, strict=True))):
            yield tuple(groups)


# --- names ---------------------------------------------------------------------------------------


def _by_name(
    fits: Sequence[_Fit], params: Sequence[str], patterns: Sequence[KeyPattern]
) -> list[_Fit]:
    """Of the fits the likeliest by names and order, each parameter and each pattern once."""
    order = {
        fit: _likeness(fit.param, fit.pattern) - _distance(fit, params, patterns) for fit in fits
    }
    taken: set[str | KeyPattern] = set()
    likeliest = []
    for fit in sorted(fits, key=lambda fit: -order[fit]):
        if not {fit.param, fit.pattern} & taken:
            taken |= {fit.param, fit.pattern}
            likeliest.append(fit)
    return likeliest


def _distance(fit: _Fit, params: Sequence[str], patterns: Sequence[KeyPattern]) -> float:
    """How far apart parameter and tensor stand in the orders of program and file: 0 to 0.5."""
    here, there = params.index(fit.param), patterns.index(fit.pattern)
    return 0.5 * abs(here / len(params) - there / len(patterns))


def _likeness(param: str, pattern: KeyPattern) -> float:
    """How alike the names of a parameter and of a key are: the mean of the parameter's words."""
    key = _words("".join(pattern.texts))
    words = _words(param)
    alike = [max((_word_likeness(word, other) for other in key), default=0.0) for word in words]
    is_bias = "bias" in key
    fits_bias = is_bias == bool(words[-1:] and words[-1].startswith("b"))
    return sum(alike) / max(len(alike), 1) + 0.3 * fits_bias


def _words(name: str) -> list[str]:
    """The words of a name, with the letters and the number of one like `w1` or `g2` apart."""
    words = [word.lower() for word in re.split(r"[._\W]+", name) if word]
    parts = [part for word in words for part in re.findall(r"[a-z]+|\d+", word)]
    return list(dict.fromkeys([*words, *parts]))


def _word_likeness(word: str, other: str) -> float:
    if word == other or any({word, other} <= alike for alike in _ALIKE):
        return 1.0
    return SequenceMatcher(None, word, other).ratio() ** 2


# --- lines ---------------------------------------------------------------------------------------


def _are_turned(fits: Collection[_Fit], types: Mapping[str, TensorType]) -> bool:
    """Whether most matrices of layers have their dims in another order than their parameters."""
    layers = (f for f in fits if f.numbered and f.is_certain and len(f.pattern.shape) > 1)
    turned = [_is_turned(fit.places[0], types[fit.param]) for fit in layers]
    return 2 * sum(turned) >= len(turned)


def _is_turned(places: Places, type_: TensorType) -> bool:
    dims = [dim for group in places for dim in group]
    return dims != [dim for dim in type_.names if dim in dims]


def _entry(fit: _Fit, types: Mapping[str, TensorType], turned: bool) -> _DraftedEntry:
    turned = turned and bool(fit.numbered)  # embeddings are tables of rows everywhere
    best = min(fit.places, key=lambda places: _is_turned(places, types[fit.param]) != turned)
    others = [f"[{_dims(other)}]" for other in fit.places if other != best]
    comment = f"or {', '.join(others[:2])}" if others else ""
    return _DraftedEntry((fit.param,), fit.pattern.text(fit.numbered), _dims(best), comment)


def _dims(places: Places) -> str:
    return ", ".join(_dim(group) for group in places)


def _dim(group: tuple[str, ...]) -> str:
    return f"({', '.join(group)})" if len(group) > 1 else group[0] if group else "1"


def _joined(
    patterns: Sequence[KeyPattern],
    params: Sequence[str],
    types: Mapping[str, TensorType],
    turned: bool,
) -> dict[KeyPattern, _DraftedEntry]:
    """Entries of neighbouring parameters that fill the tensors of a pattern together."""
    entries: dict[KeyPattern, _DraftedEntry] = {}
    for pattern in patterns:
        free = _without(params, entries)
        runs = [tuple(free[at : at + n]) for n in (2, 3, 4) for at in range(len(free) - n + 1)]
        runs = [run for run in runs if len({param.rpartition(".")[0] for param in run}) == 1]
        runs.sort(key=lambda run: -sum(_likeness(p, pattern) for p in run) / len(run))
        fitting = (
            _joined_entry(pattern, run, types, at, turned)
            for run in runs
            for at in range(len(pattern.shape))
        )
        entry = next((entry for entry in fitting if entry is not None), None)
        if entry is not None:
            entries[pattern] = entry
    return entries


def _joined_entry(
    pattern: KeyPattern,
    run: tuple[str, ...],
    types: Mapping[str, TensorType],
    at: int,
    turned: bool,
) -> _DraftedEntry | None:
    """The entry of parameters that lie one behind the other along dim `at`; None where none fit."""
    numbered = next((dims for dims, _ in _numbered(types[run[0]], pattern)), None)
    if numbered is None or not all(types[p].has(dim) for p in run for dim in numbered):
        return None
    by_others = [_by_others(types[param], numbered, pattern.shape, at) for param in run]
    first, *more = by_others
    shared = [others for others in first if all(others in places for places in more)]
    for others in sorted(shared, key=lambda o: _is_turned(first[o], types[run[0]]) != turned):
        parts = [places[others][at] for places in by_others]
        lengths = (
            math.prod(types[param].size(dim) for dim in part)
            for param, part in zip(run, parts, strict=True)
        )
        if sum(lengths) == pattern.shape[at]:
            dims = [_dim(group) for group in first[others]]
            dims[at] = " + ".join(map(_dim, parts))
            return _DraftedEntry(
                run, pattern.text(numbered), ", ".join(dims), "in this order, along this dim?"
            )
    return None


def _by_others(
    type_: TensorType, numbered: Collection[str], shape: tuple[int, ...], at: int
) -> dict[Places, Places]:
    """The ways to lie in a part of a tensor along `at`, by the dims along the others."""
    sizes = {dim.name: dim.size for dim in type_.dims if dim.name not in numbered}
    ways = _places(sizes, shape, free=at) if len(sizes) <= MOST_DIMS else ()
    return {(*places[:at], *places[at + 1 :]): places for places in ways}
