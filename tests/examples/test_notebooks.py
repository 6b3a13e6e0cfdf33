"""The teaching notebooks: what is committed is what their scripts make, and exercises can be done.

`make notebooks` makes them anew.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import re
import runpy
import tempfile
from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from jupyter_client.provisioning import local_provisioner
from typer.testing import CliRunner

import meshdsl as md
from meshdsl.cli.app import app
from tests.examples.notebook_answers import ANSWERS as MORE
from tests.project import matching
from tests.ranks import Forks, Leader

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "notebooks"
MAKER: dict[str, Any] = runpy.run_path(str(FOLDER / "execute.py"))
SCRIPTS: list[Path] = MAKER["SCRIPTS"]

ASIDE_TAGS = ("used", "hide-input")
"""Tags that do not say what a cell of an exercise is."""

Json = Any


def committed(script: Path) -> Json:
    return MAKER["nbformat"].read(script.with_suffix(".ipynb"), 4)


def tagged(notebook: Json, tag: str) -> list[Json]:
    return [c for c in notebook.cells if tag in c.metadata.get("tags", ())]


def printed(cell: Json) -> str:
    return "".join(o["text"] for o in cell.outputs if o.output_type == "stream")


def without_outputs(notebook: Json) -> list[tuple[str, str, str, Json]]:
    return [(c["id"], c.cell_type, c.source, c.metadata) for c in notebook.cells]


def test_each_notebook_has_its_script_and_its_number() -> None:
    assert matching("examples/notebooks/*.ipynb") == [s.with_suffix(".ipynb") for s in SCRIPTS]
    for script in SCRIPTS:
        title = unexecuted_title(script)
        assert title.startswith(f"# {int(script.stem[:2])}. "), title


def unexecuted_title(script: Path) -> str:
    return str(MAKER["unexecuted"](script).cells[0].source).splitlines()[0]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.stem)
def test_notebook_and_script_are_in_step(script: Path) -> None:
    made, found = MAKER["unexecuted"](script), committed(script)
    assert without_outputs(found) == without_outputs(made)
    assert found.metadata == made.metadata


@pytest.fixture(scope="module")
def kernels() -> Iterator[Forks]:
    """Where kernels are forked from, without an import of torch and of Jupyter for each."""
    made = Forks("ipykernel.kernelapp", "ipykernel.ipkernel", "meshdsl.notebook")
    yield made
    made.close()


@pytest.fixture
def forked_kernel(
    kernels: Forks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """The kernel of a notebook is a fork."""
    with contextlib.ExitStack() as running:

        def launch(command: list[str], cwd: Path, env: dict[str, str], **pipes: Any) -> Leader:
            launcher = find_spec(command[command.index("-m") + 1])
            assert launcher is not None
            arguments = [str(launcher.origin), *command[command.index("-f") :]]
            forked = kernels.ranks(0, arguments, Path(cwd), tmp_path / "log", **env)
            return running.enter_context(forked)

        monkeypatch.setattr(local_provisioner, "launch_kernel", launch)
        yield


@pytest.mark.usefixtures("forked_kernel")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.stem)
def test_executing_it_again_makes_the_same_notebook(script: Path) -> None:
    """And every check is content once the solution has been run."""
    made, again = MAKER["executed"](script)
    for ours, theirs in zip(made.cells, committed(script).cells, strict=True):
        assert ours == theirs, f"{script.stem} needs `make notebooks`: {ours.source}"
    assert len(again) == len(tagged(made, "exercise")) > 0
    for check in again:
        assert "Right!" in printed(check), check.source
        assert "Not yet" not in printed(check), check.source


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.stem)
def test_an_exercise_is_to_change_then_to_check_then_solved(script: Path) -> None:
    notebook = committed(script)
    tags = [t for c in notebook.cells for t in c.metadata.get("tags", ()) if t not in ASIDE_TAGS]
    assert tags == ["exercise", "check", "solution"] * (len(tags) // 3)
    for check in tagged(notebook, "check"):
        assert "Not yet" in printed(check), "an exercise begins unsolved"
    for solution in tagged(notebook, "solution"):
        assert solution.metadata["jupyter"] == {"source_hidden": True}  # folded in JupyterLab
        assert "hide-input" in solution.metadata["tags"]  # folded on the site
        assert "assert" in solution.source


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.stem)
def test_outputs_tell_nothing_of_the_machine(script: Path) -> None:
    """No errors, no warnings, no paths, and pictures that have a text beside them."""
    for cell in committed(script).cells:
        for output in cell.get("outputs", ()):
            assert output.output_type in ("stream", "execute_result"), output
            assert output.get("name") != "stderr", output
            if "data" in output:
                assert "text/plain" in output["data"]
        assert not re.search(r"/(tmp|home|root|work)/|0x[0-9a-f]{6}", str(cell.get("outputs")))


def test_an_edition_for_students_has_no_solutions(tmp_path: Path) -> None:
    folder = tmp_path / "for_students"
    MAKER["exercises"](folder)
    for script in SCRIPTS:
        made = MAKER["nbformat"].read(folder / f"{script.stem}.ipynb", 4)
        assert not tagged(made, "solution")
        assert len(made.cells) == len(committed(script).cells) - len(tagged(made, "check"))
        assert not any(cell.get("outputs") for cell in made.cells)
        solutions = [c.source for c in tagged(MAKER["unexecuted"](script), "solution")]
        assert not any(source in cell.source for source in solutions for cell in made.cells)
    for name in (
        "course.py",
        "figures.py",
        "grade.py",
        "tpu_v4p.toml",
        "programs/large/gpt_3072.mdsl",
    ):
        assert (folder / name).is_file()


def test_pictures_are_written_for_slides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a notebook shows; and no notebook that there is not."""
    monkeypatch.setattr("sys.argv", ["execute.py", "--figures", str(tmp_path), "06", "09"])
    MAKER["main"]()
    written = sorted(tmp_path.iterdir())
    assert {path.name[:2] for path in written} == {"06", "09"}
    assert len(written) >= 15
    for path in written:
        assert ElementTree.parse(path).getroot().tag.endswith("svg")
    monkeypatch.setattr("sys.argv", ["execute.py", "--figures", str(tmp_path), "77"])
    with pytest.raises(SystemExit, match="there is no notebook 77: there are 01, 02"):
        MAKER["main"]()


def test_a_notebook_is_graded_without_its_answers(tmp_path: Path) -> None:
    """What is right, wrong, or stops; a notebook unknown to the course has its own checks."""
    grader = runpy.run_path(str(FOLDER / "grade.py"))
    new = MAKER["nbformat"].v4
    cells = [new.new_markdown_cell("# 0. Sums")]
    for number, answer in enumerate(("4", "5", "undefined"), 1):
        cells.append(new.new_markdown_cell(f"## Exercise {number}: two and two"))
        cells.append(new.new_code_cell(f"four = {answer}", metadata={"tags": ["exercise"]}))
        check = 'print("Right!" if four == 4 else "Not yet.")\ndel four'
        cells.append(new.new_code_cell(check, metadata={"tags": ["check"]}))
    found = grader["grades"](grader["with_answers"](new.new_notebook(cells=cells)), tmp_path)
    said = ["right", "wrong", "wrong: the check stopped with NameError"]
    assert found == [(f"Exercise {n}: two and two", s) for n, s in enumerate(said, 1)]


def test_a_changed_check_grades_nothing() -> None:
    """The checks are those of the course; a notebook with too few exercises is refused."""
    grader = runpy.run_path(str(FOLDER / "grade.py"))
    mine = committed(SCRIPTS[0])
    for cell in tagged(mine, "check"):
        cell.source = 'print("Right!")'
    tagged(mine, "exercise")[0].source = "tall = {}"
    graded = grader["with_answers"](mine)
    assert not any(c.source == 'print("Right!")' for c in graded.cells)
    assert tagged(graded, "exercise")[0].source == "tall = {}"
    assert not tagged(graded, "solution")
    mine.cells.remove(tagged(mine, "exercise")[0])
    with pytest.raises(SystemExit, match="start again from a fresh copy"):
        grader["with_answers"](mine)


# --- answers -------------------------------------------------------------------------------------

SHORT = ["F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3", "F0 F1 I0 F2 W0 I1 F3 W1 I2 W2 I3 W3"]
LAST = "F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3"
BOOK = ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]
GREEDY = "F0 F1 F2 F3 I0 I1 I2 I3 W0 W1 W2 W3"
ASIDE = "F0 I0 W0 F1 I1 F2 I2 W1 F3 I3 W2 W3"

ADAM = "(md.adam(lr=1e-4, compute='bf16'), [])"
HOST = ADAM.replace("[]", "['state: memory = host']")
SPACED = ADAM.replace("[]", "['state:memory=host']")
FASTER = HOST.replace("1e-4", "1e-3")
HALF = ADAM.replace("[]", "['params: memory = host']")
BOTH = ADAM.replace("[]", "['params: memory = host', 'state: memory = host']")
LESS = "(md.adafactor(lr=1e-4, compute='bf16'), [])"
SGD = "(md.sgd(lr=1e-4, compute='bf16'), [])"

ANSWERS: dict[tuple[str, int], tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    ("01", 1): (
        [{"bytes_each": n, "bytes_in_all": 32 * n} for n in (16_384, 16_384.0, 2**14)],
        [
            {"bytes_each": 16_384, "bytes_in_all": 16 * 16_384},
            {"bytes_each": 8 * 2**14, "bytes_in_all": 2**19},
            {"bytes_each": 1, "bytes_in_all": 1},
        ],
    ),
    ("01", 2): ([{"ratio": r} for r in (16, 16.0, 64 / 4)], [{"ratio": r} for r in (1, 4, 64)]),
    ("02", 0): (
        [{"prediction": n} for n in (114_688, 114_688.0, 2 * 7 * 8192)],
        [{"prediction": n} for n in (98_304, 131_072, 57_344)],
    ),
    ("03", 0): (
        [
            {"weight_gradient": f"lambda d_tmp, tmp, x: md.einsum({product})"}
            for product in (
                "x, d_tmp, out=[d, f]",
                "d_tmp, x, out=[d, f]",
                "x, d_tmp, out=[f, d]",
            )
        ],
        [
            {"weight_gradient": f"lambda d_tmp, tmp, x: md.einsum({product})"}
            for product in (
                "d_tmp, tmp, out=[d, f]",
                "x, tmp, out=[d, f]",
                "x, d_tmp, out=[batch]",
            )
        ],
    ),
    ("04", 0): (
        [{"llama_13b": n} for n in (13.0e9, 13_015_449_600, 13.02e9)],
        [{"llama_13b": n} for n in (12.7e9, 13.2e9, 13_015_449_600 // 2)],
    ),
    ("04", 1): (
        [{"flops": n} for n in (524_288, 524_288.0, 2 * 64 * 128 * 256 / 8)],
        [{"flops": n} for n in (2 * 64 * 128 * 256, 64 * 128 * 256 // 8, 2 * 32 * 32)],
    ),
    ("04", 2): (
        [
            {"rules": ["x: D -> tp", *rest]}
            for rest in (["F -> tp"], ["w1: F -> tp", "w2: F -> tp"], ["w2: F -> tp", "F -> tp"])
        ],
        [
            {"rules": rules}
            for rules in (
                ["F -> tp"],
                ["x: D -> tp", "D -> tp", "F -> tp"],
                ["x: D -> tp", "w1: D -> tp", "w2: F -> tp"],
            )
        ],
    ),
    ("04", 4): (
        [{"X": n} for n in (2048, 8192 // 4, 2048.0)],
        [{"X": n} for n in (1024, 1548, 0)],
    ),
    ("06", 0): (
        [
            {"bubble": law}
            for law in (
                lambda D, N: Fraction(D - 1, N + D - 1),
                lambda D, N: (D - 1) / (N + D - 1),
                lambda D, N: 1 - N / (N + D - 1),
            )
        ],
        [
            {"bubble": law}
            for law in (
                lambda D, N: Fraction(D - 1, N),
                lambda D, N: Fraction(D - 1, D),
                lambda D, N: Fraction(D - 1, N - 1),
            )
        ],
    ),
    ("06", 1): (
        [
            {"rows": ["F0 F1 B0 B1", second]}
            for second in ("F0 B0 F1 B1", "F0 F1 B0 B1", "F0 F1 B1 B0")
        ],
        [
            {"rows": rows}
            for rows in (
                ["F0 B0 F1 B1", "F0 F1 B0 B1"],
                ["F0 F1 B0 B1", "F0 B0"],
                ["F0 F1 B0 B1", "F0 X0 F1 B1"],
            )
        ],
    ),
    ("06", 2): (
        [
            {"mine": [*rows, last]}
            for rows, last in ((SHORT, LAST), (BOOK[:2], LAST), (SHORT, ASIDE))
        ],
        [{"mine": rows} for rows in (BOOK, [GREEDY] * 3, ["F0 B0"] * 3)],
    ),
    ("06", 3): (
        [
            dict(forward_reads=one, backward_reads=one, latest_then=more)
            for one, more in ((5, 8), (5.0, 8.0), (Fraction(5), 8))
        ],
        [
            dict(zip(("forward_reads", "backward_reads", "latest_then"), three, strict=True))
            for three in ((8, 8, 8), (5, 8, 8), (4, 4, 7))
        ],
    ),
    ("07", 0): (
        [{"bytes_of_four": n} for n in (629_145_600, 629_145_600.0, 4 * 15 * 2**21 * 5)],
        [{"bytes_of_four": 4 * n} for n in (8192 * 4096 * 2, 20_480 * 8192, 16_384 * 8192)],
    ),
    ("07", 1): (
        [{"factor": f} for f in (1.1875, Fraction(38, 32), 1.17)],
        [{"factor": f} for f in (1.0, 1.25, 1.15)],
    ),
    ("07", 2): (
        [
            {"balance_loss": f"lambda z: {told}"}
            for told in (
                "8 * (np.bincount(z.argmax(-1), minlength=8) / len(z) * softmax(z).mean(0)).sum()",
                "64 * (np.eye(8)[z.argmax(-1)].mean(0) * softmax(z).mean(0)).mean()",
                "8 * sum((z.argmax(-1) == e).mean() * softmax(z)[:, e].mean() for e in range(8))",
            )
        ],
        [
            {"balance_loss": f"lambda z: {told}"}
            for told in (
                "8 * (softmax(z).mean(0) ** 2).sum()",
                "(np.eye(8)[z.argmax(-1)].mean(0) * softmax(z).mean(0)).sum()",
                "8 * (np.eye(8)[z.argmax(-1)].mean(0) ** 2).sum()",
            )
        ],
    ),
    ("07", 3): (
        [{"choice": c} for c in ((4, 1, 4), [4, 1, 4], (2 + 2, 1, 2**2))],
        [{"choice": c} for c in ((8, 1, 2), (1, 1, 16), (4, 4))],
    ),
    ("08", 0): (
        [{"zero_1": n, "zero_2": 5, "zero_3": 4} for n in (13, 13.0, Fraction(13))],
        [{"zero_1": a, "zero_2": b, "zero_3": 4} for a, b in ((12, 5), (13, 8), (13.5, 5))],
    ),
    ("08", 1): (
        [{"length": n} for n in (8, 4, 8.0)],
        [{"length": n} for n in (64, 12, 0)],
    ),
    ("08", 2): (
        [
            {"ways": f"[{HOST}, {one}, {other}]"}
            for one, other in ((BOTH, LESS), (LESS, SGD), (SGD, BOTH))
        ],
        [
            {"ways": f"[{HOST}, {one}, {other}]"}
            for one, other in ((FASTER, LESS), (SPACED, LESS), (SGD, HALF))
        ],
    ),
}
"""Right and wrong answers: what an exercise gives values to; a text is an expression."""


ANSWERS |= MORE
EXPRESSIONS = re.compile(r"lambda |\[|\(?md\.|zero|kept")
"""How an answer begins that is an expression of what the notebook knows."""
READ = {
    "01": ("matmul", "pair =", "PROMISE ="),
    "02": ("parts =", "def chain"),
    "03": ("def mlp_gradients", "zero0 =", "def zero_row"),
    "04": ("def activations", "xxl"),
    "05": ("def mlp", "def summa", "MEANT =", "feed_forward"),
    "06": ("",),
    "07": ("E, K =", "def gate", "def softmax", "staged ="),
    "08": ("def gpt", "split = [", "def segmented"),
}
"""Of notebooks whose exercises use what is before them, the cells with these texts.

Others need their first cell, with the imports, and the cells with the tag `used`.
"""
AFTER = (("01", 2),)
"""Exercises that use what the check before them defines."""


@cache
def namespace(number: str) -> dict[str, Any]:
    """What the exercises of a notebook know, and its cells of code under `cells`."""
    script = next(s for s in SCRIPTS if s.stem.startswith(number))
    cells = [c for c in MAKER["unexecuted"](script).cells if c.cell_type == "code"]
    plain = [c for c in cells if c.metadata.get("tags", ["used"]) == ["used"]]
    known: dict[str, Any] = {"__name__": "notebook", "cells": cells}
    read = READ.get(number, ())
    for cell in plain:
        used = cell is plain[0] or cell.metadata.get("tags")
        if not used and not any(text in cell.source for text in read):
            continue
        if cell.source.startswith("%%mdsl"):
            known |= of_cell(cell)
        else:
            told(known, cell)
    if "check" in known:
        known["check"] = checked
    return known


def of_cell(cell: Json) -> dict[str, Any]:
    """The last program of a cell in the language, by its name."""
    text = cell.source.partition("\n")[2]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "cell.mdsl")
        path.write_text(text, encoding="utf-8")
        return {re.findall(r"^program (\w+)", text, re.M)[-1]: md.load(path)}


def checked(text: str) -> bool:
    """What `check` of `course.py` does, in this process."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "mine.mdsl")
        path.write_text(text, encoding="utf-8")
        done = CliRunner().invoke(app, ["check", "--strict", str(path)])
    print(done.output)
    return done.exit_code == 0


def run(source: str, known: dict[str, Any], name: str) -> None:
    """Execute a text under a name by which its lines are found: parameters are named by them."""
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    exec(compile(source, name, "exec"), known)


def told(known: dict[str, Any], cell: Json) -> str:
    """What a cell prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        run(str(cell.source), known, f"<{cell['id']}>")
    return printed.getvalue()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.stem)
def test_no_text_below_an_exercise_has_its_answer(script: Path) -> None:
    """A solution is folded, and the edition for students has none; a text is always visible."""
    cells = MAKER["unexecuted"](script).cells
    places = [n for n, c in enumerate(cells) if "exercise" in c.metadata.get("tags", ())]
    for exercise, place in enumerate(places):
        answers = ANSWERS[script.stem[:2], exercise][0]
        values = [value for answer in answers for value in answer.values()]
        numbers = {v for v in values if isinstance(v, int | float) and v >= 100}
        below = " ".join(c.source for c in cells[place:] if c.cell_type == "markdown")
        below = re.sub(r"[.,](?!\d)", " ", below)
        words = set(re.split(r"[^\w.,]+", below))
        written = {form for n in numbers for form in (f"{n:g}", f"{n:.0f}", f"{n:,.0f}")}
        assert not written & words, (exercise, written & words)


@pytest.mark.parametrize(("number", "exercise"), ANSWERS)
def test_right_answers_are_right_and_wrong_ones_are_not(
    number: str, exercise: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing that is said of a wrong one is the number that is asked for."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.chdir(FOLDER)
    known = dict(namespace(number))
    notebook = MAKER["nbformat"].from_dict({"cells": known.pop("cells")})
    pairs = list(zip(tagged(notebook, "exercise"), tagged(notebook, "check"), strict=True))
    for before, check in pairs[exercise - 1 : exercise] if (number, exercise) in AFTER else ():
        exec(before.source, known)
        told(known, check)
    check, answers = pairs[exercise][1], ANSWERS[number, exercise]
    assert len(answers[0]) == len(answers[1])
    asked = {str(value) for value in answers[0][0].values()}
    for given, right in [(g, True) for g in answers[0]] + [(g, False) for g in answers[1]]:
        written = EXPRESSIONS.match
        known |= {
            k: eval(v, known) if isinstance(v, str) and written(v) else v for k, v in given.items()
        }
        said = told(known, check)
        assert ("Right!" in said) >= right, (given, said)
        assert ("Not yet" in said) == (not right), (given, said)
        assert right or not asked & set(re.findall(r"[\w.]+", said)), said
