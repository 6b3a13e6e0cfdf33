"""The schedules of layouts: which one a layout has, what it says, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from meshdsl.diagnostics import DiagnosticError, Diagnostics, Source
from meshdsl.named.declarations import declare
from meshdsl.pipeline import Options, compile_source
from meshdsl.placed.layout import resolve_layout
from meshdsl.placed.lint import divisors, lint
from meshdsl.placed.placements import Mesh
from meshdsl.schedule.registry import generate, schedules
from meshdsl.schedule.use import ScheduleUse
from meshdsl.syntax.parse import parse

FILE = """
dim batch = 48, seq = 6, d = 4, layers = 8, parts = batch / 6
mesh m = { pipe: 2, data: 2 }
layout plain { batch -> data }
layout pp extends plain { layers -> pipe } with one_f_one_b[batch](8)
layout more extends pp { d -> none }
layout own extends more { } with interleaved[batch, seq](parts / 4, chunks=3, recompute=stage)
layout table extends own { } with mine[batch]
layout counted extends own { } with mine[batch](2)
layout accumulated extends own { } with eager(reduce=each, layers="3 5")
schedule mine(stages=4, micro=2) {
  1: F0@2 F1@2 F0@3 B0@3 F1@3 B1@3 B0@2 B1@2
  0: F0 F1 F0@1 F1@1 B0@1 B1@1
     B0 B1
}
program p(x[batch, seq, d]) {
  param w[layers, d]
  repeat layers { x = x * w }
  loss = mean(x)
  return loss
  minimize loss with sgd(lr=0.1, accumulate=4)
}
"""


def use(layout: str | None, schedule: str | None = None, text: str = FILE) -> ScheduleUse | None:
    """The schedule of a layout of the file."""
    diagnostics = Diagnostics()
    tree, errors = parse(Source("f.mdsl", text))
    diagnostics.add(*errors)
    declarations = declare(tree, diagnostics)
    diagnostics.raise_errors()
    mesh = Mesh("m", (("pipe", 2), ("data", 2)))
    return resolve_layout(declarations, layout, mesh, schedule).schedule


USES: dict[str, tuple[Any, ...] | None] = {
    "plain": None,
    "pp": ("one_f_one_b", ("batch",), 8, {}),
    "more": ("one_f_one_b", ("batch",), 8, {}),
    "own": ("interleaved", ("batch", "seq"), 2, {"chunks": 3, "recompute": "stage"}),
    "table": ("mine", ("batch",), 2, {}),
    "counted": ("mine", ("batch",), 2, {}),
    "accumulated": ("eager", (), None, {"reduce": "each", "layers": (3, 5)}),
}


@pytest.mark.parametrize("layout", USES)
def test_a_layout_has_its_own_schedule_or_that_of_its_base(layout: str) -> None:
    found = use(layout)
    assert (found and (found.name, found.dims, found.micro, found.options)) == USES[layout]


def test_the_table_of_a_declared_schedule() -> None:
    found = use("table")
    assert found is not None
    made = found.verified(2)
    assert made.held == ((0, 1), (2, 3))
    assert made.schedule.text.startswith("F0 F1 F0@1 F1@1 B0@1 B1@1 B0 B1\n")


@pytest.mark.parametrize("name", schedules())
def test_every_schedule_can_be_named(name: str) -> None:
    options = "".join(f", {key}={value or 4}" for key, value in schedules()[name].options.items())
    found = use(None, f"{name}[batch](8{options})")
    assert found is not None
    values = {key: value or 4 for key, value in schedules()[name].options.items()}
    assert found.options == values
    assert found.verified(4).schedule == generate(name, 4, 8, values)


@pytest.mark.parametrize("layout", [None, "", "own", "layers:pipe"])
def test_a_schedule_in_place_of_that_of_the_layout(layout: str | None) -> None:
    found = use(layout, "gpipe[batch](4)")
    assert found is not None
    assert (found.name, found.micro, found.span.file) == ("gpipe", 4, "--schedule")


WRONG = {
    "": ("MD0001", ""),
    "gpipe[batch](4": ("MD0003", "("),
    "gpipe[batch](4) gpipe": ("MD0001", "gpipe"),
    "gpipe[batch](4)\nlayout x { }": ("MD0001", "layout"),
    "§": ("MD0002", "§"),
    "gpip[batch](4)": ("MD0528", "gpip"),
    "gpipe[bath](4)": ("MD0101", "bath"),
    "gpipe[batch](bath)": ("MD0101", "bath"),
    "gpipe[batch, batch](4)": ("MD0533", "batch"),
    "gpipe[batch = 0](4)": ("MD0533", "batch = 0"),
    "gpipe[...](4)": ("MD0533", "..."),
    "gpipe[batch](4, 5)": ("MD0533", "5"),
    "gpipe[batch](0)": ("MD0105", "0"),
    "gpipe[batch](1 << 2)": ("MD0001", "<"),
    "gpipe[batch](1.5)": ("MD0105", "1.5"),
    'gpipe[batch]("4")': ("MD0105", '"4"'),
    "gpipe[batch](batch^5)": ("MD0106", "batch^5"),
    "gpipe(4)": ("MD0535", "4"),
    "gpipe[](4)": ("MD0535", "4"),
    "gpipe[batch]": ("MD0535", "gpipe[batch]"),
    "gpipe[batch](chunks=2)": ("MD0535", "gpipe[batch](chunks=2)"),
    "gpipe[batch](4, chunks=2)": ("MD0533", "chunks"),
    "interleaved[batch](4, chunks=0)": ("MD0533", "0"),
    "interleaved[batch](4, chunks=batch)": ("MD0533", "batch"),
    "mine[batch](2, chunks=2)": ("MD0533", "chunks"),
    "gpipe[batch](4, recompute=layer)": ("MD0533", "layer"),
    'gpipe[batch](4, recompute="stage")': ("MD0533", '"stage"'),
    "gpipe[batch](4, layers=3)": ("MD0533", "3"),
    'gpipe[batch](4, layers="3,5")': ("MD0533", '"3,5"'),
    "gpipe[batch](4 -> [d])": ("MD0533", "gpipe[batch](4 -> [d])"),
}


@pytest.mark.parametrize("text", WRONG)
def test_what_is_wrong_with_a_schedule_by_itself(text: str) -> None:
    with pytest.raises(DiagnosticError) as caught:
        use(None, text)
    found = caught.value.diagnostics[0]
    assert found.span is not None
    assert (found.code, found.span.text) == WRONG[text]
    assert found.help


# --- against a program and a mesh ----------------------------------------------------------------

AGAINST = {
    ("pp", "pipe:2"): [],
    ("pp", "pipe:1"): [],
    ("more", "pipe:4,data:2"): [],
    ("table", "pipe:2"): ["MD0536"],  # it accumulates 4 times 2
    ("accumulated", "pipe:2"): [],
    ("accumulated", "pipe:4"): ["MD0538"],
    ("gpipe[batch](5)", "pipe:2"): ["MD0534"],
    ("gpipe[parts](1)", "pipe:2"): ["MD0537"],
    ("gpipe[batch](16)", "data:2"): [],
    ("chimera[batch](8)", "pipe:3"): ["MD0529"],
    ('gpipe[batch](8, layers="4 4")', "pipe:2"): [],
    ('gpipe[batch](8, layers="8 0")', "pipe:2"): ["MD0538"],
    ('gpipe[batch](8, layers="4 5")', "pipe:2"): ["MD0538"],
    ('gpipe[batch](8, layers="4 2 2")', "pipe:2"): ["MD0538"],
    ('interleaved[batch](8, layers="3 2 2 1")', "pipe:2"): [],
}


@pytest.mark.parametrize(("asked", "mesh"), AGAINST)
def test_a_schedule_fits_the_program_and_the_mesh(asked: str, mesh: str) -> None:
    named = compile_source(Source("f.mdsl", FILE), Options(), Diagnostics(), "named")
    axes = tuple((axis, int(size)) for axis, size in (a.split(":") for a in mesh.split(",")))
    layout = asked if asked in USES else "pp"
    schedule = None if asked in USES else asked
    resolved = resolve_layout(named.declarations, layout, Mesh("m", axes), schedule)
    found = lint(named.named, resolved, named.declarations)
    assert [d.code for d in found if d.code.startswith("MD05")] == AGAINST[asked, mesh]


@pytest.mark.parametrize(
    ("rules", "codes"),
    [
        ("batch -> data", ["MD0537"]),
        ("params: layers -> pipe", ["MD0537"]),
        ("layers -> none", []),
        ("layers -> pipe", []),
    ],
)
def test_a_schedule_without_a_pipeline_does_nothing(rules: str, codes: list[str]) -> None:
    text = f"{FILE}layout it {{ {rules} }} with gpipe[batch](8)\n"
    named = compile_source(Source("f.mdsl", text), Options(), Diagnostics(), "named")
    mesh = Mesh("m", (("pipe", 2), ("data", 2)))
    layout = resolve_layout(named.declarations, "it", mesh)
    found = lint(named.named, layout, named.declarations)
    assert [d.code for d in found] == codes


def test_nothing_is_accumulated() -> None:
    text = FILE.replace(", accumulate=4", "")
    named = compile_source(Source("f.mdsl", text), Options(), Diagnostics(), "named")
    mesh = Mesh("m", (("pipe", 2),))
    layout = resolve_layout(named.declarations, "accumulated", mesh)
    found = lint(named.named, layout, named.declarations)
    assert [d.code for d in found if d.severity == "error"] == ["MD0535"]


@pytest.mark.parametrize("size", [1, 2, 48, 49, 97, 3072])
def test_divisors(size: int) -> None:
    assert divisors(size) == [n for n in range(1, size + 1) if size % n == 0]
