"""`meshdsl rows`: derived for every operator, and the matmul table of the paper on SBP."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from meshdsl.cli.app import app
from meshdsl.named.prelude import form, library
from meshdsl.ops.opdef import Signature, load_all
from meshdsl.placed.sharding_rules import rows
from meshdsl.report.rule_tables import describe, find, rows_text
from tests.together import together


def run(*arguments: str, code: int = 0) -> str:
    """The output of the command."""
    done = CliRunner().invoke(app, ["rows", *arguments])
    assert done.exit_code == code, done.output
    return done.output


def test_the_matmul_table() -> None:
    (call,) = describe(find("einsum"))["calls"]
    found = {(*row["ins"], *row["outs"]) for row in call["rows"]}
    assert found == {
        ("B", "B", "B"),
        ("S(m)", "B", "S(m)"),
        ("B", "S(n)", "S(n)"),
        ("S(k)", "S(k)", "P"),
        ("P", "B", "P"),
        ("B", "P", "P"),
    }
    assert len(call["rows"]) == 6


@together(name=load_all())
def test_rows_are_those_of_the_compiler(name: str) -> None:
    opdef = load_all()[name]
    found = describe(opdef, every_call=True)
    shown = [{f"{', '.join(r['ins'])} -> {', '.join(r['outs'])}" for r in call["rows"]}
             for call in found["calls"]]  # fmt: skip
    for sample in opdef.samples:
        attrs = dict(sample.attrs)
        sig = Signature(sample.ins, opdef.infer(sample.ins, attrs), attrs)
        expected = rows(opdef.factors(sig), len(sig.ins), len(sig.outs))
        assert {str(row) for row in expected} in shown
    assert found["hold_but_are_not_used"] == dict(opdef.true_rows)
    text = rows_text(found)
    assert text.startswith(f"{name}: ")
    assert all(line == line.rstrip() for line in text.split("\n"))


def test_without_an_operator_all_are_listed() -> None:
    lines = run().splitlines()
    assert [line.split()[0] for line in lines] == sorted(load_all())
    assert all(load_all()[line.split()[0]].meaning in line for line in lines)


def test_signs_are_names_too() -> None:
    assert run("+") == run("add")
    assert run("and").startswith("logical_and: ")


@pytest.mark.parametrize("name", library())
def test_functions_of_the_library_are_told_apart(name: str) -> None:
    told = run(name, code=2)
    assert f"`{name}` is a function of the library" in told
    assert form(library()[name]) in told


def test_dims_that_must_be_whole_are_told() -> None:
    assert "where `h` or `v` is split" in run("attention")
    assert "prelude's `softmax`" in run("softmax")
    assert "`s` must be whole" in run("cumprod", "--all")
    assert "`s` is split; a block reads an interval of `s`" in run("shift")


def test_as_json() -> None:
    found = json.loads(run("add", "--json"))
    assert found["version"] == 1
    assert found["operator"] == "add"
    assert {
        "ins": ["P", "P"],
        "outs": ["P"],
        "because": "it is linear in operands 1 and 2 together",
    } in (found["calls"][0]["rows"])


def test_an_unknown_operator() -> None:
    printed = run("sofmax", code=2)
    assert "MD0605" in printed
    assert "write `softmax`" in printed
    assert json.loads(run("sofmax", "--json", code=2))["diagnostics"][0]["code"] == "MD0605"
