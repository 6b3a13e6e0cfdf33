"""Which exercises of a notebook are right: `python grade.py MINE.ipynb` says it, not the answers.

The checks are those of the course where its scripts are beside this file, so that a changed check
changes nothing; else those of the notebook itself. Needs `pip install 'meshdsl[notebook]'`; nothing
is sent anywhere.
"""

import re
import sys
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellTimeoutError

HERE = Path(__file__).resolve().parent
SECONDS = 120
"""How long a cell may take."""

Json = Any


def tagged(notebook: Json, tag: str) -> list[Json]:
    """The cells with a tag."""
    return [cell for cell in notebook.cells if tag in cell.metadata.get("tags", ())]


def course_notebook(mine: Json) -> Json:
    """The notebook of the course with the same title; where there is none, this one itself."""
    title = mine.cells[0].source.splitlines()[:1] if mine.cells else []
    for script in sorted(HERE.glob("[0-9]*.py")):
        official = jupytext.read(script)
        if official.cells[0].source.splitlines()[:1] == title:
            return official
    return mine


def with_answers(mine: Json) -> Json:
    """The cells of the course, without solutions, with the exercises of this notebook.

    Raises:
        SystemExit: the notebook has other exercises than the course, or none.
    """
    official = course_notebook(mine)
    answers, asked = tagged(mine, "exercise"), tagged(official, "exercise")
    if not asked:
        sys.exit("this is no notebook of the course: it has no cells with the tag `exercise`")
    if len(answers) != len(asked):
        counts = f"{len(answers)} cells with the tag `exercise`, and the course {len(asked)}"
        sys.exit(f"the notebook has {counts}: start again from a fresh copy")
    sources = [answer.source for answer in answers]
    for cell, source in zip(asked, sources, strict=True):
        cell.source = source
    official.cells = [c for c in official.cells if "solution" not in c.metadata.get("tags", ())]
    return official


def grades(notebook: Json, folder: Path) -> list[tuple[str, str]]:
    """The title of each exercise, and `right`, `wrong` or why it did not run."""
    client = NotebookClient(
        notebook,
        timeout=SECONDS,
        allow_errors=True,
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": folder}},
    )
    found, title = [], ""
    with client.setup_kernel():
        for index, cell in enumerate(notebook.cells):
            if cell.cell_type == "markdown":
                title = (re.findall(r"^## (Exercise .*)", cell.source, re.M) or [title])[-1]
                continue
            tags = cell.metadata.get("tags", ())
            try:
                client.execute_cell(cell, index)
            except CellTimeoutError:
                found.append((title, f"wrong: it runs for more than {SECONDS} seconds"))
                break
            if "check" in tags:
                found.append((title, grade(cell)))
    return found


def grade(check: Json) -> str:
    """What the outputs of a check say."""
    for output in check.outputs:
        if output.output_type == "error":
            return f"wrong: the check stopped with {output.ename}"
    said = "".join(o.get("text", "") for o in check.outputs)
    return "right" if "Right!" in said and "Not yet" not in said else "wrong"


def main() -> None:
    """Grade the notebooks that are named; the exit status is 1 if an exercise is not right."""
    if not sys.argv[1:]:
        sys.exit("write the notebook: python grade.py MINE.ipynb")
    wrong = 0
    for name in sys.argv[1:]:
        try:
            mine = nbformat.read(name, 4)
        except (OSError, ValueError) as error:
            sys.exit(f"{name} cannot be read as a notebook: {error}")
        results = grades(with_answers(mine), HERE)
        right = sum(said == "right" for _, said in results)
        wrong += len(results) - right
        print(f"{name}: {right} of {len(results)} right")
        for title, said in results:
            print(f"  {title}: {said}")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
