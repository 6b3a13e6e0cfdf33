"""The operator reference: every example in it is executed, and what it derives is true."""

from __future__ import annotations

import numpy as np
import pytest

import meshdsl as md
from docs._ext.operators import PRELUDE, Example, gradient, groups, index, names, page
from meshdsl.backends.engines.reference import run_reference
from meshdsl.diagnostics import Diagnostics, Source
from meshdsl.named.ir import walk
from meshdsl.named.prelude import library, meaning, prelude
from meshdsl.named.printer import print_program
from meshdsl.named.verify import verify
from meshdsl.ops.opdef import NumpyCall, load_all, lookup
from meshdsl.pipeline import Options, compile_source
from meshdsl.prove.sample_values import draw
from tests.ir_text.named import parse_program

WRITTEN = [n for n, o in load_all().items() if Example.of(o).call is not None]
REST = [n for n in load_all() if n not in WRITTEN]


def arrays_of(example: Example) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    kinds = example.sample.values or ("int",) * len(example.names)
    pairs = zip(example.sample.ins, kinds, strict=True)
    return [draw(type_, kind, rng) for type_, kind in pairs]


def meaning_of(example: Example) -> tuple[np.ndarray, ...]:
    """The results of the call by the record's numpy meaning."""
    call = NumpyCall(example.sample.ins, example.outs, example.attrs)
    with np.errstate(all="ignore"):
        found = example.opdef.numpy(call, *arrays_of(example))
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.parametrize("name", WRITTEN)
def test_the_example_is_the_operator(name: str) -> None:
    example = Example.of(lookup(name))
    assert example.program is not None
    made = compile_source(Source("example.mdsl", example.program), Options(), Diagnostics())
    (op,) = walk(made.written.body)
    assert op.name == name
    assert [v.type for v in op.outs] == list(example.outs)
    inputs = dict(zip(example.names, arrays_of(example), strict=True))
    results = run_reference(made.named, inputs, {}).values()
    for found, expected in zip(results, meaning_of(example), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("name", REST)
def test_what_the_compiler_prints_is_read_back_and_computed(name: str) -> None:
    example = Example.of(lookup(name))
    program = parse_program(print_program(example.named()[0]))
    verify(program)
    assert [o.value.type for o in program.outputs] == list(example.outs)
    for type_, found in zip(example.outs, meaning_of(example), strict=True):
        assert found.shape == type_.shape


def test_gradients_are_told() -> None:
    told = {name: gradient(lookup(name), Example.of(lookup(name))) for name in load_all()}
    assert told["where"] == "yes, by `y`, `z`"
    assert told["softmax"] == "yes, by `x`"
    assert told["argmax"].startswith("none")
    assert told["identity"] == "yes, by `x`"
    assert told["stop_gradient"] == "none: it is constant almost everywhere, or stops gradients"
    assert told["einsum"] == "yes, by every operand"


def test_what_the_compiler_derives_a_gradient_of_is_told() -> None:
    """Of every operator that passes gradients on, the example has one."""
    wrong = [
        name
        for name, opdef in load_all().items()
        if opdef.gradient is not None
        and not opdef.overwrites
        and not gradient(opdef, Example.of(opdef)).startswith("yes")
    ]
    assert wrong == []


def test_every_function_of_the_prelude_is_shown() -> None:
    assert set(PRELUDE) == set(prelude().functions)
    assert [n for n, text in PRELUDE.items() if text not in page(n)] == []
    assert [n for n, f in library().items() if not meaning(f).endswith(".")] == []
    assert all(text.rstrip().endswith("}") for text in PRELUDE.values())


def test_every_name_is_in_one_group_and_its_line_is_short() -> None:
    assert sorted(names()) == sorted({*load_all(), *library()})
    assert max(map(len, groups().values())) < 60
    said = [line for line in index().splitlines() if line.startswith("| <a id=")]
    assert len(said) == len(names())
    assert [line for line in said if len(line) > 330] == []


def test_every_operator_says_what_it_computes() -> None:
    assert [n for n, o in load_all().items() if not o.meaning.endswith(".")] == []
    assert "e^x over the sum" in (md.softmax.__doc__ or "")
