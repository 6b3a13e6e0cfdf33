"""`%%mdsl` cells: what they define, what they show, and what they say of mistakes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import meshdsl as md
from tests.notebook.conftest import BASE, MLP, Notebook

pytestmark = pytest.mark.filterwarnings("ignore::meshdsl.ProgramWarning")

# --- cells -----------------------------------------------------------------------------------


def test_definitions_are_seen_by_later_cells(defined: Notebook) -> None:
    program = defined.shell.user_ns["mlp"]
    assert isinstance(program, md.Program)
    assert program.inputs == {"x": "f32[batch, io]"}
    assert program.compile("square", "hybrid").tensor("h").local_shape == (4, 32)


def test_a_program_is_the_same_as_one_of_a_file(defined: Notebook, tmp_path: Path) -> None:
    from meshdsl.named.printer import print_program

    (tmp_path / "mlp.mdsl").write_text(BASE + MLP)
    loaded = md.load(tmp_path / "mlp.mdsl")
    both = [print_program(p.named()) for p in (loaded, defined.shell.user_ns["mlp"])]
    without_places = [re.sub(r"# \d+ \|", "# |", text) for text in both]
    assert without_places[0] == without_places[1]


def test_layouts_of_later_cells_are_known_to_earlier_programs(defined: Notebook) -> None:
    program = defined.shell.user_ns["mlp"]
    defined.cell("layout mine { batch -> cols }")
    assert program.compile("square", "mine").tensor("x").placement == {
        "rows": "B",
        "cols": "S(batch)",
    }


def test_what_is_defined_anew_is_replaced(defined: Notebook) -> None:
    old = defined.shell.user_ns["mlp"]
    defined.cell("dim batch = 32")
    assert old.compile("square", "hybrid").tensor("x").shape == (32, 16)
    defined.cell("program mlp(x[batch]) {\n  y = x + 1\n  return y\n}")
    new = defined.shell.user_ns["mlp"]
    assert list(new.inputs.values()) == ["f32[batch]"]
    assert list(old.inputs.values()) == ["f32[batch, io]"]
    defined.cell("mesh square = { rows: 4 }")
    assert new.compile("square", "hybrid").devices == 4


def test_functions_of_other_cells_are_called_and_shown(notebook: Notebook) -> None:
    notebook.cell(BASE)
    notebook.cell("def twice(x[batch, io]) -> [batch, io] {\n  two = x * 2\n  return two\n}")
    program = notebook.cell("program p(x[batch, io]) {\n  y = twice(x)\n  return y\n}")
    plan = program.compile("square", "hybrid")
    assert "two = x * 2" in plan.explain().html()
    assert plan.tensor("twice.two").local_shape == (4, 16)


def test_a_layout_on_the_line_shows_what_explain_says(defined: Notebook) -> None:
    found = defined.cell("# nothing new", "--layout hybrid")
    assert isinstance(found, md.Explanation)
    assert found.json["layout"] == "hybrid"
    assert "param w[io, hidden]" in found.text()
    assert found.json == defined.line("explain mlp --layout hybrid").json


def test_another_name_and_silence(notebook: Notebook) -> None:
    notebook.cell(BASE)
    assert notebook.cell(MLP, "--as net --quiet") is None
    assert notebook.shell.user_ns["net"] is notebook.shell.user_ns["mlp"]


def test_lines_are_those_of_the_cell(defined: Notebook) -> None:
    """The line of the magic is the first one, and the cell has the number IPython gives it."""
    report = defined.line("explain --layout hybrid").json
    tensors = {t["name"]: t for t in report["tensors"]}
    assert tensors["h"]["line"] == 5
    assert tensors["h"]["file"] == "In[2]"
    assert tensors["h"]["rules"]["batch"]["file"] == "In[1]"


# --- mistakes --------------------------------------------------------------------------------

THREE = """
dim rest = 7
mesh none_of_it = { a: 0 }
program broken(x[batch, nope]) {
  y = foo(x)
  return y
}
"""


def test_a_cell_with_three_errors_shows_three_and_defines_nothing(defined: Notebook) -> None:
    assert defined.codes(THREE) == ["MD0105", "MD0101", "MD0103"]
    assert "broken" not in defined.shell.user_ns
    assert set(defined.shell.magics_manager.registry["MdslMagics"].session) == {
        ("dim", "batch"), ("dim", "io"), ("dim", "hidden"), ("mesh", "square"),
        ("layout", "hybrid"), ("program", "mlp"),
    }  # fmt: skip
    assert defined.codes("dim x = rest") == ["MD0101"]


def test_errors_are_shown_with_carets_and_no_traceback(
    defined: Notebook, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(defined.codes(THREE)) == 3
    said = capsys.readouterr().out
    assert said.count("^") >= 3
    assert "Traceback" not in said
    assert "In[3]" in said
    assert ":4:25" in said
    assert "site-packages" not in said


def test_a_cell_tells_everything_at_once(defined: Notebook) -> None:
    codes = defined.codes(Path("tests/errors/seven_mistakes.mdsl").read_text(encoding="utf-8"))
    assert codes == ["MD0101", "MD0260", "MD0103", "MD0102", "MD0102", "MD0304", "MD0305"]


def test_names_of_the_part_of_a_cell_that_cannot_be_read_are_not_missed(defined: Notebook) -> None:
    codes = defined.codes("dim a = \nprogram p(x[a, b]) {\n  y = \n  return y\n}")
    assert codes == ["MD0001", "MD0001", "MD0101"]  # `b` is nowhere


def test_a_name_twice_in_one_cell_is_told(notebook: Notebook) -> None:
    assert notebook.codes("dim a = 1\ndim a = 2") == ["MD0104"]


def test_a_function_that_nothing_calls_is_looked_through(defined: Notebook) -> None:
    assert defined.codes("def f(x[batch]) -> [batch] {\n  return relu(z)\n}") == ["MD0102"]


def test_what_breaks_an_earlier_program_is_told_when_it_is_used(defined: Notebook) -> None:
    program = defined.cell("program s(x[batch, io]) {\n  y = x[batch = 7]\n  return y\n}")
    defined.cell("dim batch = 4")
    with pytest.raises(md.ProgramError):
        program.compile("square", "hybrid")
    defined.cell("dim batch = 8")
    program.compile("square", "hybrid")


# --- expectations ----------------------------------------------------------------------------


def test_expectations_are_checked_where_they_stand(defined: Notebook) -> None:
    defined.cell("expect hybrid on square { h: [batch@rows, hidden@cols] }")
    assert defined.codes("expect hybrid on square { h: [batch, hidden] }") == ["MD0401"]


def test_an_expectation_names_a_program_of_another_cell(defined: Notebook) -> None:
    defined.cell("program other(x[batch]) {\n  return x\n}")
    defined.cell("expect hybrid for mlp on square { h: [batch@rows, hidden@cols] }")
    assert defined.codes("expect hybrid for mlp on square { h: [batch, hidden] }") == ["MD0401"]
    assert defined.codes("expect hybrid for mpl on square { h: [batch, hidden] }") == ["MD0108"]


def test_what_is_defined_beside_a_failed_expectation_stays(defined: Notebook) -> None:
    cell = "layout mine { batch -> rows }\nexpect mine on square { h: [batch, hidden] }"
    assert defined.codes(cell) == ["MD0401"]
    assert defined.line("explain --layout mine").json["layout"] == "mine"
