"""Make the notebooks of this folder from their percent scripts, with outputs: `make notebooks`.

The script (`01_….py`) is the source and the notebook (`01_….ipynb`) is made from it. Nothing in a
notebook depends on the machine or the time, so that making it twice gives the same file.
`execute.py --exercises FOLDER` writes the notebooks for students, without solutions and outputs.
"""

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent
SCRIPTS = sorted(FOLDER.glob("[0-9]*.py"))
HELPERS = [FOLDER / name for name in ("course.py", "figures.py", "tpu_v4p.toml")]
"""What notebooks import and read beside programs."""
PROGRAM = re.compile(r'example\("([^"]+)"\)')
"""How a notebook names a file of `examples`."""
SECONDS = 120
"""How long a cell may take."""

Json = Any


def unexecuted(script: Path) -> Json:
    """The notebook of a script, without outputs."""
    notebook = jupytext.read(script)
    notebook.metadata["language_info"] = {"name": "python"}
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"{script.stem[:2]}-{number:02}"
    return notebook


def executed(script: Path) -> tuple[Json, list[Json]]:
    """The notebook of a script with outputs; and each check cell, run once more after a solution.

    Raises:
        CellExecutionError: a cell raises.
    """
    notebook, again, check = unexecuted(script), [], None
    client = NotebookClient(
        notebook,
        timeout=SECONDS,
        coalesce_streams=True,
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": FOLDER}},
    )
    with client.setup_kernel():
        for index, cell in enumerate(notebook.cells):
            if cell.cell_type != "code":
                continue
            client.execute_cell(cell, index)
            tags = cell.metadata.get("tags", ())
            check = cell if "check" in tags else check
            if "solution" in tags:
                assert check is not None, "a solution stands behind its check"
                again.append(nbformat.v4.new_code_cell(check.source))
                client.execute_cell(again[-1], index, store_history=False)
                notebook.cells[index] = cell
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
    notebook.metadata["language_info"] = {"name": "python"}
    return notebook, again


def text(notebook: Json) -> str:
    """A notebook as its file has it."""
    return nbformat.writes(notebook).rstrip("\n") + "\n"


def exercises(folder: Path) -> None:
    """Write all notebooks without solutions and outputs, and all files that they use.

    A solution is a cell of its own, so the rest is the notebook as its script has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for script in SCRIPTS:
        notebook = unexecuted(script)
        notebook.cells = [c for c in notebook.cells if "solution" not in c.metadata.get("tags", ())]
        path = folder / f"{script.stem}.ipynb"
        path.write_text(text(notebook), encoding="utf-8", newline="\n")
    for helper in HELPERS:
        shutil.copy(helper, folder)
    for name in {n for script in SCRIPTS for n in PROGRAM.findall(script.read_text("utf-8"))}:
        copy = folder / "programs" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(FOLDER.parent / name, copy)


def main() -> None:
    """Make all notebooks, or those whose numbers are given; or an edition for students."""
    if sys.argv[1:2] == ["--exercises"]:
        if len(sys.argv) != 3:
            sys.exit("write the folder: execute.py --exercises FOLDER")
        exercises(Path(sys.argv[2]))
        return
    for script in SCRIPTS:
        if sys.argv[1:] and script.stem[:2] not in sys.argv[1:]:
            continue
        print(script.stem)
        made = text(executed(script)[0])
        script.with_suffix(".ipynb").write_text(made, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
