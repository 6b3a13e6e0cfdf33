"""The teaching notebooks: what is committed is what their scripts make, and exercises can be done.

`make notebooks` makes them anew.
"""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.project import matching

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "notebooks"
MAKER: dict[str, Any] = runpy.run_path(str(FOLDER / "execute.py"))
SCRIPTS: list[Path] = MAKER["SCRIPTS"]

Json = Any


def committed(script: Path) -> Json:
    return MAKER["nbformat"].read(script.with_suffix(".ipynb"), 4)


def tagged(notebook: Json, tag: str) -> list[Json]:
    return [c for c in notebook.cells if tag in c.metadata.get("tags", ())]


def printed(cell: Json) -> str:
    return "".join(o["text"] for o in cell.outputs if o.output_type == "stream")


def without_outputs(notebook: Json) -> list[tuple[str, str, str, Json]]:
    return [(c["id"], c.cell_type, c.source, c.metadata) for c in notebook.cells]


def test_there_are_five_and_each_has_its_script() -> None:
    assert [s.stem[:2] for s in SCRIPTS] == ["01", "02", "03", "04", "05"]
    assert matching("examples/notebooks/*.ipynb") == [s.with_suffix(".ipynb") for s in SCRIPTS]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.stem)
def test_notebook_and_script_are_in_step(script: Path) -> None:
    made, found = MAKER["unexecuted"](script), committed(script)
    assert without_outputs(found) == without_outputs(made)
    assert found.metadata == made.metadata


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
    tags = [t for c in notebook.cells for t in c.metadata.get("tags", ())]
    assert tags == ["exercise", "check", "solution"] * (len(tags) // 3)
    for check in tagged(notebook, "check"):
        assert "Not yet" in printed(check), "an exercise begins unsolved"
    for solution in tagged(notebook, "solution"):
        assert solution.metadata["jupyter"] == {"source_hidden": True}
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
