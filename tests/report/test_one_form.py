"""What is printed of a mesh, a layout or a schedule is read again wherever one is asked for.

Each way to print a mesh is tried in `--mesh`, `md.mesh(…)`, `mesh="…"` of a plan and the line of a
cell; likewise layouts and schedules. What is read is compared with the object that was printed.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

import meshdsl as md
from meshdsl.cli.options import pipeline_options
from meshdsl.diagnostics import Diagnostics, Source
from meshdsl.notebook.magic_lines import read_cell, read_line
from meshdsl.pipeline import Compilation, Options, compile_source
from meshdsl.placed.layout import Layout, resolve_layout, resolve_mesh
from meshdsl.report.document import mesh_text
from meshdsl.report.explanation_document import sentence
from meshdsl.report.running import headline
from meshdsl.report.search_result import shown as search_shown
from meshdsl.report.terminal import text
from meshdsl.search.methods import best_plans
from meshdsl.search.request import SearchRequest

TEXT = """\
dim batch = 8, d = 4, layers = 4
mesh square = { rows: 2, cols: 2 }
layout hybrid { batch -> rows, params: d -> rows, state: d -> none }
layout staged { layers -> rows, batch -> cols } with one_f_one_b[batch](4)
program p(x[batch, d]) {
  param w[layers, d]
  repeat layers { x = x * w }
  return x
  minimize mean(x) with sgd(lr=0.1)
}
"""
AXES = {"rows": 2, "cols": 2}


@pytest.fixture(scope="module")
def made() -> Compilation:
    return compile_source(
        Source("p.mdsl", TEXT), Options(layout="hybrid", cluster="h100"), Diagnostics(), "device"
    )


# --- meshes ----------------------------------------------------------------------------------

_BRACES = re.compile(r"(?:mesh )?(?:(?!mesh\b|on\b)\w+ )?(?:= )?\{[^{}]*\d \}")


def printed_meshes(made: Compilation) -> Iterator[tuple[str, str]]:
    """Every way a mesh is printed, with what prints it."""
    from meshdsl.placed.printer import mesh_text as of_ir

    yield "reports, hovers", mesh_text(dict(made.device.mesh.declared))
    yield "messages", str(made.device.mesh)
    yield "stages", of_ir(made.device.mesh)
    yield "explain", sentence(made.report)
    yield "run", headline(made, "local")
    yield "emitted program", made.text.split("layout")[0]
    yield "Python", repr(md.mesh(rows=2, cols=2))
    yield "older", "rows:2,cols:2"
    found = best_plans(SearchRequest(objective="bytes"), made)
    yield "search", text(search_shown(found)[:1], 100)


def accepted(asked: str) -> Iterator[tuple[str, tuple[tuple[str, int], ...]]]:
    """The axes that every place which takes a mesh reads."""
    shop = shlex.quote(asked)
    yield "md.mesh", md.mesh(asked).axes
    yield "%%mdsl", _resolved(pipeline_options(read_cell(f"--mesh {shop}")[0]).mesh)
    yield "%mdsl", _resolved(read_line(f"explain --mesh {shop}").given.mesh)


def _resolved(asked: str | None) -> tuple[tuple[str, int], ...]:
    options = Options(mesh=asked, layout="")
    found = compile_source(Source("p.mdsl", TEXT), options, Diagnostics(), "named")
    assert asked is not None
    return resolve_mesh(found.declarations, asked).axes


def test_a_mesh_is_read_as_it_is_printed(made: Compilation) -> None:
    for where, printed in printed_meshes(made):
        form = _BRACES.search(printed)
        asked = printed if where == "older" else form[0] if form else ""
        assert asked, (where, printed)
        for door, axes in accepted(asked):
            assert dict(axes) == AXES, (where, asked, door)


# --- layouts and schedules -------------------------------------------------------------------

LAYOUTS = ("hybrid", "staged")


def printed_layouts(name: str) -> Iterator[tuple[str, str]]:
    """Every way a layout is printed, whole."""
    made = compile_source(Source("p.mdsl", TEXT), Options(layout=name), Diagnostics(), "named")
    layout = resolve_layout(made.declarations, name, resolve_mesh(made.declarations, None))
    rules = ", ".join(map(str, layout.rules))
    used = f" with {layout.schedule}" if layout.schedule else ""
    yield "reports", f"{rules}{used}"
    yield "braces", f"{{ {rules} }}{used}"
    line = next(line for line in TEXT.split("\n") if line.startswith(f"layout {name}"))
    yield "a file", line
    yield "Python", repr(md.layout(line))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_read_as_it_is_printed(name: str) -> None:
    made = compile_source(Source("p.mdsl", TEXT), Options(), Diagnostics(), "named")
    mesh = resolve_mesh(made.declarations, None)
    of_file = resolve_layout(made.declarations, name, mesh)
    for where, printed in printed_layouts(name):
        shop = shlex.quote(printed)
        in_cell = pipeline_options(read_cell(f"--layout {shop}")[0]).layout
        in_line = read_line(f"explain --layout {shop}").given.layout
        for asked in (printed, in_cell, in_line):
            found = resolve_layout(made.declarations, asked, mesh)
            assert _content(found) == _content(of_file), (where, asked)
        assert repr(md.layout(repr(md.layout(printed)))) == repr(md.layout(printed)), where


def _content(layout: Layout) -> tuple[object, ...]:
    return (tuple(map(str, layout.rules)), str(layout.schedule))


def test_a_schedule_is_read_as_it_is_printed() -> None:
    made = compile_source(Source("p.mdsl", TEXT), Options(), Diagnostics(), "named")
    mesh = resolve_mesh(made.declarations, None)
    of_file = resolve_layout(made.declarations, "staged", mesh).schedule
    for printed in (str(of_file), f"with {of_file}"):
        rules = "layers -> rows, batch -> cols"
        assert str(resolve_layout(made.declarations, rules, mesh, printed).schedule) == str(of_file)
        assert f"{{ {rules} }} with {of_file}" in repr(md.layout(rules, schedule=printed))


# --- advice ----------------------------------------------------------------------------------


def test_commands_of_advice_are_about_the_same_program(tmp_path: Path) -> None:
    """Those of `prog.advise` name the program, the dtype and the sizes, as they were given."""
    path = tmp_path / "p.mdsl"
    path.write_text(f"{TEXT}program q(x[batch, d]) {{ return x * 2 }}\n")
    given = md.load(path, program="q", dims={"batch": 16})
    explain, write = given.advise(mesh="{ rows: 2 }", cluster="h100", dtype="bf16").json["commands"]
    for command in (explain, write):
        assert "--program q --dtype bf16 --set batch=16" in command
    words = shlex.split(explain)
    declared = given.compilation(given.declarations, Options()).declarations
    for option in ("--mesh", "--layout"):
        assert option in words
    asked = words[words.index("--mesh") + 1]
    assert resolve_mesh(declared, asked).axes == (("rows", 2),)
    resolve_layout(declared, words[words.index("--layout") + 1], resolve_mesh(declared, asked))
