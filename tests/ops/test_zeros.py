"""Rules of zeros: on random operands of every sample, no more is filled than they say."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

import numpy as np
import pytest

from meshdsl.ir.types import TensorType
from meshdsl.ops.opdef import Filled, NumpyCall, OpDef, Operand, Signature, load_all
from meshdsl.prove.sample_values import draw, results, signature

RULES = {name: op for name, op in load_all().items() if op.zeros is not None}
TRIALS = 8


def _facts(type_: TensorType, rng: random.Random) -> Iterator[Filled | None]:
    """No fact, and one along each set of dims, with some count of positions."""
    yield None
    for n in range(1, len(type_.dims) + 1):
        for dims in itertools.combinations(type_.dims, n):
            most = math.prod(d.size for d in dims)
            over = frozenset(d.name for d in type_.dims if d not in dims and rng.random() < 0.5)
            yield Filled(frozenset(d.name for d in dims), rng.randrange(1, most + 1), over)


def _blocks(type_: TensorType, array: np.ndarray, fact: Filled) -> Iterator[np.ndarray]:
    """What lies along the counted dims and those that do not matter, at each position of others.

    The counted ones come last.
    """
    parts: list[list[int]] = [[], [], []]
    for i, name in enumerate(type_.names):
        parts[2 if name in fact.dims else 0 if name in fact.over else 1].append(i)
    turned = array.transpose([*parts[0], *parts[1], *parts[2]])
    for place in np.ndindex(turned.shape[: len(parts[0])]):
        yield turned[(*place, ...)]


def _clear(type_: TensorType, array: np.ndarray, fact: Filled, rng: random.Random) -> None:
    """Write zeros into an array, so that the fact holds."""
    for block in _blocks(type_, array, fact):
        places = list(np.ndindex(block.shape[block.ndim - len(fact.dims) :]))
        for place in rng.sample(places, max(0, len(places) - fact.count)):
            block[(..., *place)] = 0


def _most_filled(type_: TensorType, array: np.ndarray, fact: Filled) -> int:
    """The most positions along the counted dims that hold something at once."""
    most = 0
    for block in _blocks(type_, array, fact):
        free = tuple(range(block.ndim - len(fact.dims)))
        most = max(most, int(np.count_nonzero((block != 0).any(axis=free))))
    return most


def _operand(
    type_: TensorType, fact: Filled | None, array: np.ndarray, rng: random.Random
) -> tuple[Operand, np.ndarray]:
    """An operand of which the fact holds; without dims it may be a constant 0."""
    array = np.array(array)
    if not type_.dims and rng.random() < 0.5:
        return Operand(None, "constant", 0.0), np.zeros_like(array)
    if len(type_.dims) == 1 and type_.dtype.kind == "int" and rng.random() < 0.3:
        return Operand(None, "iota"), np.arange(type_.dims[0].size, dtype=array.dtype)
    if fact is None and rng.random() < 0.3:
        return Operand(None, "zeros"), np.zeros_like(array)
    if fact is not None:
        _clear(type_, array, fact, rng)
    return Operand(fact), array


def _cases(opdef: OpDef) -> Iterator[tuple[Signature, list[tuple[Operand, np.ndarray]]]]:
    rng, numbers = random.Random(opdef.name), np.random.default_rng(7)
    for sample in opdef.samples:
        sig = signature(opdef, sample)
        choices = [list(_facts(t, rng)) for t in sig.ins]
        for _ in range(TRIALS * (1 + sum(map(len, choices)))):
            facts = [rng.choice(each) for each in choices]
            kinds = sample.values or ("int",) * len(sig.ins)
            drawn = [draw(t, k, numbers) for t, k in zip(sig.ins, kinds, strict=True)]
            yield (
                sig,
                [_operand(t, f, a, rng) for t, f, a in zip(sig.ins, facts, drawn, strict=True)],
            )


@pytest.mark.parametrize("name", RULES)
def test_no_more_is_filled_than_the_rule_says(name: str) -> None:
    opdef, said = RULES[name], 0
    assert opdef.zeros is not None
    for sig, operands in _cases(opdef):
        fact = opdef.zeros(sig, [operand for operand, _ in operands])
        if fact is None:
            continue
        said += 1
        call = NumpyCall(sig.ins, sig.outs, dict(sig.attrs))
        with np.errstate(all="ignore"):
            result = results(opdef, call, [array for _, array in operands])[0]
        most = _most_filled(sig.outs[0], np.nan_to_num(result), fact)
        assert most <= fact.count, (fact, sig, operands)
    assert said, "the rule never says anything on the samples"


FUNCTIONS = {
    name: op
    for name, op in load_all().items()
    if (op.surface.items, op.surface.arity) == ("none", (1, 1))
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_keeps_zeros_where_its_record_says_so(name: str) -> None:
    opdef = FUNCTIONS[name]
    sig = signature(opdef, opdef.samples[0])
    zero = np.zeros(sig.ins[0].shape, bool if sig.ins[0].dtype.kind == "bool" else np.float64)
    with np.errstate(all="ignore"):
        (result,) = results(opdef, NumpyCall(sig.ins, sig.outs, dict(sig.attrs)), [zero])
    assert (opdef.zeros is not None) == (not result.any())
