# mypy: disable-error-code="type-arg,valid-type,arg-type,list-item"
"""Schedules of pipelines in Python: the same declarations as in a file."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

import meshdsl as md
from meshdsl.diagnostics import Diagnostics, Source
from meshdsl.named.declarations import declare
from meshdsl.placed.layout import resolve_layout
from meshdsl.placed.placements import Mesh
from meshdsl.syntax.parse import parse
from meshdsl.syntax.printer import print_file
from tests.syntax.shape import show

batch, d, layers = md.dims(batch=8, d=4, layers=4)


@md.program
def chain(x: md.Tensor[batch, d]):
    def layer(x):
        w = md.param([d])
        return x * w

    x = md.repeat(layers, layer, x)
    loss = md.mean(x)
    md.minimize(loss, md.sgd(lr=0.1))
    return loss


mine = md.scheduled(["F0 F1 B0 B1", "F0 B0 F1 B1"], batch)
pp = md.layout(layers="pipe", schedule=md.scheduled("one_f_one_b", batch, micro=4))

SCHEDULES: dict[str, Any] = {
    "gpipe[batch](4)": md.scheduled("gpipe", "batch", micro=layers),
    "eager": md.scheduled("eager"),
    'interleaved[batch, d](2, chunks=3, layers="3 1", recompute=stage, reduce=each)': md.scheduled(
        "interleaved", batch, d, micro=2, chunks=3, layers=[3, 1], recompute="stage", reduce="each"
    ),
    'gpipe[batch](2, layers="1 3")': md.scheduled("gpipe", batch, micro=2, layers="1 3"),
}


@pytest.mark.parametrize("text", SCHEDULES)
def test_a_schedule_is_that_of_the_language(text: str) -> None:
    assert repr(SCHEDULES[text]) == text
    assert repr(md.layout(layers="pipe", schedule=text)).endswith(f" with {text}")
    found = md.layout(layers="pipe", schedule=SCHEDULES[text])
    (node,) = found.syntax()
    (parsed,) = parse(Source("l", f"layout found {{ layers -> pipe }} with {text}"))[0].declarations
    assert show(node) == show(parsed)


def test_a_layout_with_a_table_is_written_as_text_and_read_again() -> None:
    found = md.layout(layers="pipe", schedule=mine)
    more = md.layout(batch="data", extends=found)
    declared = (*more.tables(), *more.syntax())
    file = parse(Source("none", "dim batch = 8\n"))[0]
    text = print_file(type(file)((*file.declarations, *declared), file.span))
    tree, errors = parse(Source("more", text))
    assert not errors
    assert text.startswith(
        "dim batch = 8\n\nschedule mine(stages=2, micro=2) {\n  0: F0 F1 B0 B1\n"
    )
    read = declare(tree, Diagnostics())
    use = resolve_layout(read, "more", Mesh("m", (("pipe", 2),))).schedule
    assert use is not None
    assert use.verified(2).schedule.text == "F0 F1 B0 B1\nF0 B0 F1 B1"


def test_a_plan_finds_the_schedule_of_its_layout() -> None:
    plan = chain.compile({"data": 2}, md.layout({"batch": "data", "layers": None}, extends=pp))
    made = plan._made
    use = resolve_layout(made.declarations, made.options.layout, made.placed.mesh).schedule
    assert use is not None
    assert (use.name, use.dims, use.micro) == ("one_f_one_b", ("batch",), 4)


def test_a_plan_with_a_table_is_pickled() -> None:
    layout = md.layout({"batch": "data", "layers": None}, schedule=mine)
    again = pickle.loads(pickle.dumps(chain.compile({"data": 2}, layout)))
    assert set(again._made.declarations.schedules) == {"mine"}


WRONG: dict[str, tuple[Any, str]] = {
    "no name": (lambda: md.scheduled("gpip", batch, micro=2), "MD0528"),
    "no dim": (lambda: md.scheduled("gpipe", 3, micro=2), "MD0533"),
    "no name of a dim": (lambda: md.scheduled("gpipe", "a b", micro=2), "MD0817"),
    "no number": (lambda: md.scheduled("gpipe", batch, micro=2.5), "MD0533"),
    "a bool": (lambda: md.scheduled("gpipe", batch, micro=True), "MD0533"),
    "a value of another kind": (
        lambda: md.scheduled("gpipe", batch, micro=2, reduce=1.5),
        "MD0533",
    ),
    "no action": (lambda: md.scheduled(["F0 b0"]), "MD0520"),
    "no row": (lambda: md.scheduled([["F0", "B0"]]), "MD0533"),
    "no schedule": (lambda: md.layout(layers="pipe", schedule=8), "MD0533"),
    "no text of one": (lambda: md.layout(layers="pipe", schedule="gpipe[batch"), "MD0003"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_no_schedule_is_refused_where_it_is_written(what: str) -> None:
    make, code = WRONG[what]
    with pytest.raises(md.ProgramError) as caught:
        make()
    (found,) = caught.value.diagnostics
    assert found.code == code
    assert found.span is not None
    assert found.span.file.endswith("test_schedules.py")


COMPILED: dict[str, tuple[Any, str]] = {
    "unknown dim": (md.scheduled("gpipe", "bath", micro=2), "MD0101"),
    "unknown option": (md.scheduled("gpipe", batch, micro=2, chunks=2), "MD0533"),
    "does not divide": (md.scheduled("gpipe", batch, micro=3), "MD0534"),
    "no number": (md.scheduled("gpipe", batch), "MD0535"),
    "missing": (md.scheduled(["F0 F1 B0", "F0 B0 F1 B1"], batch), "MD0522"),
    "deadlock": (md.scheduled(["F0 B0 F1 B1", "F0 F1 B0 B1"], batch), "MD0525"),
    "devices": (md.scheduled(["F0 B0"], batch), "MD0536"),
}


@pytest.mark.parametrize("what", COMPILED)
def test_what_does_not_fit_is_refused_by_compile(what: str) -> None:
    used, code = COMPILED[what]
    with pytest.raises(md.ProgramError) as caught:
        chain.compile({"pipe": 2}, md.layout(layers="pipe", schedule=used))
    assert [d.code for d in caught.value.diagnostics] == [code]
