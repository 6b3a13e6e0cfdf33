"""The texts of `passes/*.txt` are computed, operator by operator in numpy and in f64.

What is expected of `gradient` is the derivative, against finite differences; what a program is
simplified to computes the same.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pytest

from meshdsl.ir.rewrite import Visitor
from meshdsl.ir.types import F64, TensorType
from meshdsl.named.dtype_override import retype
from meshdsl.named.ir import NamedLoop, NamedOp, NamedProgram, Node, Value
from meshdsl.ops.opdef import NumpyCall, lookup
from tests.ir.test_passes import CASES, Case
from tests.ir_text.named import parse_program

Array = Any
STEP = 1e-6

SAME = [c for c in CASES if c.name in ("simplify", "drop_unused", "cse", "hoist_invariants")]
# Nothing flows through `stop_gradient`, and a difference does not see it.
GRADIENTS = [c for c in CASES if c.name == "gradient" and "stop_gradient" not in c.program]


def program_of(text: str) -> NamedProgram:
    """The program of a text, all floats f64."""
    return retype(parse_program(text), F64)


def entries(program: NamedProgram) -> dict[str, Value]:
    """Inputs and parameters by name."""
    values = (*program.inputs, *(p.value for p in program.params))
    return {str(v.name): v for v in values}


def drawn(name: str, type_: TensorType) -> Array:
    """Random numbers from 0.1 to 0.9, small integers, or bools: by name always the same."""
    draws = np.random.default_rng(zlib.crc32(name.encode()))
    if type_.dtype.kind == "float":
        return draws.uniform(0.1, 0.9, type_.shape)
    return draws.integers(0, 2, type_.shape).astype(type_.dtype.numpy)


def results(program: NamedProgram, given: Mapping[str, Array]) -> dict[str, Array]:
    """The outputs by name."""
    known = {value: given[name] for name, value in entries(program).items()}
    Run(known).block(program.body)
    return {output.name: known[output.value] for output in program.outputs}


class Run(Visitor):
    """Computes nodes; `known` has the values."""

    def __init__(self, known: dict[Value, Array]) -> None:
        self.known = known

    def block(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            self.visit(node)

    def op(self, op: NamedOp) -> None:
        types = (tuple(v.type for v in op.ins), tuple(v.type for v in op.outs))
        call = NumpyCall(*types, dict(op.attrs))
        made = lookup(op.name).numpy(call, *(self.known[v] for v in op.ins))
        self.known.update(zip(op.outs, made if isinstance(made, tuple) else (made,), strict=True))

    def loop(self, loop: NamedLoop) -> None:
        known = self.known
        carried = [known[c.init] for c in loop.carries]
        kept: list[list[Array]] = [[] for _ in loop.collected]
        indices = range(loop.dim.size)
        for index in reversed(indices) if loop.reverse else indices:
            known.update(zip((c.inside for c in loop.carries), carried, strict=True))
            for item in loop.stacked:
                axis = item.outer.type.index(loop.dim.name)
                known[item.inside] = np.take(known[item.outer], index, axis)
            self.block(loop.body)
            carried = [known[c.next] for c in loop.carries]
            for made, one in zip(kept, loop.collected, strict=True):
                made.append(known[one.inside])
        known.update(zip((c.result for c in loop.carries), carried, strict=True))
        for made, one in zip(kept, loop.collected, strict=True):
            known[one.outer] = np.stack(made[::-1] if loop.reverse else made)


def difference(program: NamedProgram, given: dict[str, Array], wrt: str) -> Array:
    """The derivative of the outputs, each times its cotangent in `given`, by the entry `wrt`."""
    cotangents = {o.name: given.get(f"d_{o.value.name}", 0.0) for o in program.outputs}

    def at(moved: Array) -> float:
        found = results(program, {**given, wrt: moved})
        return float(sum(np.sum(found[name] * cotangents[name]) for name in found))

    steps = STEP * np.eye(given[wrt].size).reshape(-1, *given[wrt].shape)
    slopes = [(at(given[wrt] + step) - at(given[wrt] - step)) / (2 * STEP) for step in steps]
    return np.reshape(slopes, given[wrt].shape)


@pytest.mark.parametrize("case", GRADIENTS, ids=lambda c: f"{c.file.stem}: {c.title}")
def test_expected_gradient_is_the_derivative(case: Case) -> None:
    program, derived = program_of(case.program), program_of(case.expected)
    given = {name: drawn(name, value.type) for name, value in entries(derived).items()}
    found = results(derived, given)
    wanted = [n for n in case.argument.split() if given[n].dtype == np.float64]
    for name in wanted:
        grad = found.get(f"d_{name}", 0.0)
        np.testing.assert_allclose(grad, difference(program, given, name), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("case", SAME, ids=lambda c: f"{c.file.stem}: {c.title}")
def test_a_simplified_program_computes_the_same(case: Case) -> None:
    before, after = program_of(case.program), program_of(case.expected)
    given = {name: drawn(name, value.type) for name, value in entries(before).items()}
    found, expected = results(after, given), results(before, given)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-12, err_msg=name)
