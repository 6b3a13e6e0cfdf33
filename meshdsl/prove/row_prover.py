"""Are the legal placements of an operator exactly the true ones? Tried on two simulated ranks.

A row is *applicable* when the local call is one the operator accepts: every split dim is split
wherever it occurs, and the shape rule on local types yields the local types of the outputs. It
*holds* when the local numpy meaning on the parts, recombined, is the numpy meaning of the
recombined parts, in every one of many random draws.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from meshdsl.ir.types import Dim, TensorType
from meshdsl.ops.opdef import NumpyCall, OpDef, OpError, Sample, Signature
from meshdsl.ops.requirements import own_dims
from meshdsl.placed.placements import B, Component, Partial, Split
from meshdsl.placed.sharding_rules import Row, rows
from meshdsl.prove import window_rows
from meshdsl.prove.sample_values import RANKS, draw_parts, join, results, same, signature
from meshdsl.prove.wrong_cases import difference

MOST_ROWS = 20_000
"""Of operands that may be placed in more ways than these, at most two are tried as partial."""


@dataclasses.dataclass(frozen=True)
class RowVerdict:
    """The problems with the rows of one operator on one sample."""

    false: frozenset[str]
    """Declared, but cannot be applied or does not hold."""
    missing: frozenset[str]
    """Holds over S, B, P(sum), but not declared."""
    undeclared: frozenset[str]
    """Every row that holds and is not declared, whatever its partial operation."""


def judge(opdef: OpDef, sample: Sample) -> RowVerdict:
    """Compare the declared rows of `opdef` on `sample` with the true ones."""
    sig = signature(opdef, sample)
    # Rows that read windows hold by other means: there is a slice for what others would send.
    every = rows(opdef.factors(sig), len(sig.ins), len(sig.outs))
    reading = [r for r in every if window_rows.reads_windows(r)]
    plain = {r.ins + r.outs for r in declared_rows(opdef, sig) if r not in reading}
    broken = {
        r.ins + r.outs
        for r in reading
        if not all(window_rows.holds(opdef, sig, sample, r, n) for n in (2, 3, 5))
    }
    declared = plain | {r.ins + r.outs for r in reading}
    true = set(_true_rows(opdef, sig, sample, plain))
    undeclared = {r for r in true - declared if not _has_whole_twin(r, true, len(sig.ins))}
    text = functools.partial(_text, len(sig.ins))
    return RowVerdict(
        frozenset(map(text, plain - true | broken)),
        frozenset(text(r) for r in undeclared if not _has_extreme(r)),
        frozenset(map(text, undeclared)),
    )


def declared_rows(opdef: OpDef, sig: Signature) -> list[Row]:
    """The rows from the factors, as far as two ranks can split the dims and the view is legal."""
    found = rows(opdef.factors(sig), len(sig.ins), len(sig.outs))
    return [r for r in found if _divides(sig, r) and is_legal(opdef, sig, r)]


def is_legal(opdef: OpDef, sig: Signature, row: Row) -> bool:
    """Whether the record's `legal` accepts a row on an axis of two."""
    if opdef.legal is None:
        return True
    ins, outs = (
        {c.dim: RANKS for c in side if isinstance(c, Split)} for side in (row.ins, row.outs)
    )
    return opdef.legal(sig, ins, outs)


def _divides(sig: Signature, row: Row) -> bool:
    types = (*sig.ins, *sig.outs)
    parts = zip(types, (*row.ins, *row.outs), strict=True)
    return all(t.size(c.dim) % RANKS == 0 for t, c in parts if isinstance(c, Split))


def _has_whole_twin(row: tuple[Component, ...], true: set[tuple[Component, ...]], ins: int) -> bool:
    """Another row has the same operands, and `B` where an output is partial: that one, filled."""
    choices = [(c, B) if isinstance(c, Partial) else (c,) for c in row[ins:]]
    twins = itertools.product(*choices)
    return any((*row[:ins], *outs) in true for outs in twins if outs != row[ins:])


def _has_extreme(row: tuple[Component, ...]) -> bool:
    return any(isinstance(c, Partial) and c.op != "sum" for c in row)


def _text(ins: int, row: tuple[Component, ...]) -> str:
    return str(Row(row[:ins], row[ins:]))


def counterexample(opdef: OpDef, sig: Signature, sample: Sample, row: Row) -> str:
    """Why a declared row does not hold: the local call is refused, or a draw with its figures."""
    if window_rows.reads_windows(row):
        return "the results on the windows are not the blocks of the whole result"
    extents = _extents((*sig.ins, *sig.outs), row.ins + row.outs)
    local = tuple(t.resized(dict(extents)) for t in sig.ins)
    if not applicable(opdef, sig, row.ins, extents):
        refused = ", ".join(map(str, local)) or "no operands"
        sizes = ", ".join(f"{dim} = {size}" for dim, size in extents.items())
        return f"the shape rule does not yield the blocks of the result of {refused}, {sizes}"
    rng = np.random.default_rng(7)
    with np.errstate(all="ignore"):
        for _ in range(320):
            expected, parts = _trial(opdef, sig, sample, row.ins, extents, rng)
            for type_, out, wanted, blocks in zip(sig.outs, row.outs, expected, parts, strict=True):
                said = difference(join(blocks, out, type_), wanted, 1e-9, type_.names)
                if said:
                    return f"on {RANKS} devices the results are {said}"
                if not _holds(type_, out, wanted, blocks):
                    return f"on {RANKS} devices the results differ, and should be copies"
    return "no draw shows it again"


# --- every placement -------------------------------------------------------------------------


def _true_rows(
    opdef: OpDef, sig: Signature, sample: Sample, declared: set[tuple[Component, ...]]
) -> Iterator[tuple[Component, ...]]:
    """Every applicable row that holds. The outputs are tried at once, each with all it may be."""
    count = len(sig.ins)
    choices = [_components(t) for t in sig.ins]
    most = count if math.prod(map(len, choices)) <= MOST_ROWS else 2
    candidates = [_components(t) for t in sig.outs]
    tried: dict[tuple[Component, ...], list[list[Component]]] = {
        ins: [[*components] for components in candidates]
        for ins in itertools.product(*choices)
        if sum(isinstance(c, Partial) for c in ins) <= most
    }
    for row in declared:
        outs = tried.setdefault(row[:count], [[] for _ in sig.outs])
        for components, component in zip(outs, row[count:], strict=True):
            components += [] if component in components else [component]
    for ins, outs in tried.items():
        for extents in _all_extents(sig, ins, outs):
            if applicable(opdef, sig, ins, extents):
                fitting = [
                    [c for c in components if _fits(t, c, extents)]
                    for t, components in zip(sig.outs, outs, strict=True)
                ]
                for held_outs in itertools.product(
                    *held(opdef, sig, sample, ins, extents, fitting)
                ):
                    yield (*ins, *held_outs)


def _components(type_: TensorType) -> list[Component]:
    splits = [Split(d.name) for d in type_.dims if d.size % RANKS == 0]
    sums = [] if type_.dtype.kind == "bool" else [Partial("sum")]
    return [B, *splits, *sums, Partial("max"), Partial("min")]


def _all_extents(
    sig: Signature, ins: tuple[Component, ...], outs: list[list[Component]]
) -> Iterator[dict[str, int]]:
    """The local sizes of split dims: those of the operands, and any that only outputs have."""
    extents = _extents(sig.ins, ins)
    if not all(_fits(t, c, extents) for t, c in zip(sig.ins, ins, strict=True)):
        return
    operand_dims = {n for t in sig.ins for n in t.names}
    new = [
        [None, *(c for c in components if isinstance(c, Split) and c.dim not in operand_dims)]
        for components in outs
    ]
    choices = [
        extents | {c.dim: t.size(c.dim) // RANKS for t, c in zip(sig.outs, some, strict=True) if c}
        for some in itertools.product(*new)
    ]
    yield from {tuple(e): e for e in choices}.values()


def _fits(type_: TensorType, component: Component, extents: Mapping[str, int]) -> bool:
    """Whether a tensor placed so has its local size in every dim that is split."""
    split_dim = component.dim if isinstance(component, Split) else None
    return {n for n in type_.names if n in extents} == ({split_dim} if split_dim else set())


def applicable(
    opdef: OpDef, sig: Signature, ins: tuple[Component, ...], extents: Mapping[str, int]
) -> bool:
    """Whether local types make a call that the operator accepts, with local types as results."""
    if opdef.composite and any(d.name in extents for d in own_dims(sig.attrs)):
        return False  # its definition in the prelude replaces it
    local_ins, local_outs = (
        tuple(t.resized(dict(extents)) for t in s) for s in (sig.ins, sig.outs)
    )
    try:
        return opdef.infer(local_ins, localised(sig.attrs, extents)) == local_outs
    except OpError:
        return False


def _extents(types: tuple[TensorType, ...], row: tuple[Component, ...]) -> dict[str, int]:
    parts = zip(types, row, strict=True)
    return {c.dim: t.size(c.dim) // RANKS for t, c in parts if isinstance(c, Split)}


def localised(attrs: Any, extents: Mapping[str, int]) -> Any:
    """`attrs` with every dim in them, and in types, at its local size."""
    if isinstance(attrs, Dim):
        return Dim(attrs.name, extents.get(attrs.name, attrs.size))
    if isinstance(attrs, tuple):
        return tuple(localised(a, extents) for a in attrs)
    if isinstance(attrs, TensorType):
        return attrs.resized(dict(extents))
    if isinstance(attrs, dict):
        return {k: localised(v, extents) for k, v in attrs.items()}
    return attrs


# --- does it hold ----------------------------------------------------------------------------


def held(
    opdef: OpDef,
    sig: Signature,
    sample: Sample,
    ins: tuple[Component, ...],
    extents: Mapping[str, int],
    outs: list[list[Component]],
) -> list[list[Component]]:
    """The candidates in `outs` that each output is in every draw. A crash propagates: a failure."""
    rng = np.random.default_rng(7)
    # A scalar agrees by accident far more often than a tensor, and truth values than numbers.
    draws = max(
        24 if "bool" in sample.values else 12, 320 // max(t.elements for t in (*sig.ins, *sig.outs))
    )
    with np.errstate(all="ignore"):
        for _ in range(draws):
            if not all(outs):
                break
            expected, local = _trial(opdef, sig, sample, ins, extents, rng)
            for i, (type_, result, parts) in enumerate(zip(sig.outs, expected, local, strict=True)):
                outs[i] = [c for c in outs[i] if _holds(type_, c, result, parts)]
                if not outs[i]:
                    break
    return outs


def _trial(
    opdef: OpDef,
    sig: Signature,
    sample: Sample,
    ins: tuple[Component, ...],
    extents: Mapping[str, int],
    rng: np.random.Generator,
) -> tuple[tuple[np.ndarray, ...], list[tuple[np.ndarray, ...]]]:
    """One draw: the results on whole operands, and of each result the parts of all ranks."""
    # Small values are often equal; of large ones, the maxima over many differ.
    largest = (2, 4, 999)[rng.integers(0, 3)]
    drawn = [
        draw_parts(type_, kind, component, rng, largest)
        for type_, kind, component in zip(sig.ins, sample.values, ins, strict=True)
    ]
    wholes = [join(p, c, t) for p, c, t in zip(drawn, ins, sig.ins, strict=True)]
    expected = results(opdef, NumpyCall(sig.ins, sig.outs, sig.attrs), wholes)
    local = []
    for rank in range(RANKS):
        offsets = {d: rank * n for d, n in extents.items()}
        call = NumpyCall(sig.ins, sig.outs, sig.attrs, extents, offsets)
        local.append(results(opdef, call, [parts[rank] for parts in drawn]))
    return expected, list(zip(*local, strict=True))


def _holds(
    type_: TensorType, component: Component, whole: np.ndarray, parts: tuple[np.ndarray, ...]
) -> bool:
    """Whether the parts of all ranks are a placement of the whole; replicas must be equal."""
    if not same(join(parts, component, type_), whole):
        return False
    return component != B or all(same(parts[0], part) for part in parts)
