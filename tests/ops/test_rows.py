"""The placements that every operator declares are the true ones: no wrong row, no missing one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from meshdsl.ir.types import DTYPES, TensorType
from meshdsl.ops.opdef import Factor, Factors, OpDef, ReduceOp, Sample, load_all, lookup
from meshdsl.prove.row_prover import judge
from meshdsl.prove.sample_values import signature

OPS = sorted(load_all())


@pytest.mark.parametrize("name", OPS)
def test_declared_rows_are_exactly_the_true_ones(name: str) -> None:
    opdef = lookup(name)
    undeclared: set[str] = set()
    for sample in opdef.samples:
        verdict = judge(opdef, sample)
        assert not verdict.false, f"{sample}: declared, but do not hold"
        assert not verdict.missing - set(opdef.true_rows), f"{sample}: hold, but are not declared"
        undeclared |= verdict.undeclared
    assert undeclared == set(opdef.true_rows), "`true_rows` lists what holds and is not declared"


def test_every_operator_has_samples() -> None:
    for name in OPS:
        samples = lookup(name).samples
        assert samples, name
        assert all(len(s.values) == len(s.ins) for s in samples), name
        assert all(signature(lookup(name), s).outs for s in samples), name


# --- the prover itself: it finds what is planted -----------------------------------------------

Change = Callable[[Factors], Factors]


def _linear_in(*operands: int) -> Change:
    group = frozenset(operands)
    return lambda f: dataclasses.replace(f, linear=(*f.linear, group))


def _not_linear(factors: Factors) -> Factors:
    return dataclasses.replace(factors, linear=factors.linear[1:])


def _monotone(factors: Factors) -> Factors:
    return dataclasses.replace(factors, monotone=(0,))


def _loop(*loops: Factor) -> Change:
    return lambda f: dataclasses.replace(f, loops=(*f.loops, *loops))


def _without_loop(index: int) -> Change:
    return lambda f: dataclasses.replace(
        f, loops=tuple(x for i, x in enumerate(f.loops) if i != index % len(f.loops))
    )


def _reduced_as(op: ReduceOp) -> Change:
    def change(factors: Factors) -> Factors:
        own = [dataclasses.replace(x, reduce=op) if x.reduce else x for x in factors.loops]
        return dataclasses.replace(factors, loops=tuple(own))

    return change


WRONG: list[tuple[str, int, Change]] = [
    ("relu", 0, _linear_in(0)),
    ("floor", 0, _linear_in(0)),
    ("mul", 0, _linear_in(0, 1)),
    ("add", 0, _linear_in(0)),
    ("div", 0, _linear_in(1)),
    ("square", 0, _monotone),
    ("gelu", 0, _monotone),
    ("neg", 0, _monotone),
    ("sum", 0, _reduced_as("max")),
    ("max", 0, _reduced_as("sum")),
    ("any", 0, _reduced_as("min")),
    ("mean", 0, _monotone),
    ("einsum", 0, _linear_in(0, 1)),
    ("einsum", 0, _reduced_as("prod")),
    ("cumsum", 0, _loop(Factor("s", ("s",), ("s",)))),
    ("softmax", 0, _loop(Factor("s", ("s",), ("s",)))),
    ("argmax", 2, _loop(Factor("h", ("h",), (None,), "max"))),
    ("shift", 0, _loop(Factor("s", ("s",), ("s",)))),
    ("pick", 0, _loop(Factor("s", ("s",), (None,), "sum"))),
    ("concat", 0, _linear_in(0)),
    ("gather", 0, _linear_in(1)),
    ("gather", 0, _reduced_as("max")),
    ("pad", 1, _linear_in(0)),
    ("where", 0, _linear_in(0)),
    ("layer_norm", 2, _linear_in(2)),
]

MISSING: list[tuple[str, int, Change]] = [
    ("neg", 0, _not_linear),
    ("add", 0, _not_linear),
    ("mul", 0, _not_linear),
    ("add", 0, _without_loop(0)),
    ("relu", 2, _without_loop(1)),
    ("where", 0, _not_linear),
    ("einsum", 0, _not_linear),
    ("einsum", 0, _without_loop(0)),
    ("einsum", 0, _without_loop(1)),
    ("einsum", 0, _without_loop(2)),
    ("sum", 0, _without_loop(-1)),
    ("max", 0, _without_loop(-1)),
    ("gather", 0, _without_loop(-1)),
    ("gather", 0, _not_linear),
    ("one_hot", 0, _without_loop(-1)),
    ("iota", 0, _without_loop(0)),
    ("zeros", 0, _without_loop(1)),
    ("rename", 0, _without_loop(1)),
    ("rename", 0, _not_linear),
    ("split", 0, _without_loop(0)),
    ("split", 3, _without_loop(-1)),
    ("merge", 0, _without_loop(0)),
    ("cast", 0, _not_linear),
    ("pad", 0, _not_linear),
    ("layer_norm", 1, _not_linear),
    ("cross_entropy", 1, _without_loop(0)),
]


def _changed(name: str, change: Change) -> OpDef:
    opdef = lookup(name)
    return dataclasses.replace(opdef, factors=lambda sig: change(opdef.factors(sig)))


@pytest.mark.parametrize(("name", "sample", "change"), WRONG)
def test_a_planted_wrong_row_is_caught(name: str, sample: int, change: Change) -> None:
    assert judge(_changed(name, change), lookup(name).samples[sample]).false


@pytest.mark.parametrize(("name", "sample", "change"), MISSING)
def test_a_removed_row_is_caught(name: str, sample: int, change: Change) -> None:
    opdef = lookup(name)
    verdict = judge(_changed(name, change), opdef.samples[sample])
    assert verdict.missing or verdict.undeclared - set(opdef.true_rows)


@pytest.mark.parametrize(
    ("old", "new", "linear"),
    [
        ("f32", "f64", True),
        ("f32", "f32", True),
        ("bf16", "f32", True),
        ("f64", "f32", False),
        ("f32", "bf16", False),
        ("f16", "bf16", False),
        ("bf16", "f16", False),
        ("i32", "i64", False),
        ("i64", "i32", False),
        ("i64", "i64", True),
        ("i32", "f64", False),
        ("i32", "f32", False),
        ("f64", "i32", False),
        ("bool", "i32", False),
    ],
)
def test_only_a_widening_cast_passes_partial_sums(old: str, new: str, linear: bool) -> None:
    """Arrays of small numbers cannot show what rounds or wraps, so this is a table."""
    opdef, type_ = lookup("cast"), TensorType((), DTYPES[old])
    sig = signature(opdef, Sample((type_,), (("dtype", DTYPES[new]),)))
    assert bool(opdef.factors(sig).linear) == linear
