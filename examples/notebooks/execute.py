"""Make the notebooks of this folder from their percent scripts, with outputs: `make notebooks`.

The script (`01_….py`) is the source and the notebook (`01_….ipynb`) is made from it. Nothing in a
notebook depends on the machine or the time, so that making it twice gives the same file.
`execute.py --exercises FOLDER` writes the notebooks for students, without solutions and outputs.
`execute.py --figures FOLDER` writes every picture of the notebooks as SVG, for slides.
"""

import base64
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent
SCRIPTS = sorted(FOLDER.glob("[0-9]*.py"))
HELPERS = [FOLDER / name for name in ("course.py", "figures.py", "grade.py", "tpu_v4p.toml")]
"""What notebooks import and read beside programs."""
PROGRAM = re.compile(r'example\(f?"([^"]+)"\)')
"""How a notebook names a file of `examples`; what is in braces is any text."""
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
    examples = FOLDER.parent
    for name in {n for script in SCRIPTS for n in PROGRAM.findall(script.read_text("utf-8"))}:
        for program in examples.glob(re.sub(r"\{.*?\}", "*", name)):
            copy = folder / "programs" / program.relative_to(examples)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(program, copy)


PICTURE = re.compile(r"data:image/svg\+xml;base64,([A-Za-z0-9+/=]+)")
"""A picture inside of what a notebook shows as HTML."""


def pictures(notebook: Json) -> Iterator[tuple[str, str]]:
    """The pictures that the outputs of a notebook show: the cell and its number, and the SVG."""
    for cell in notebook.cells:
        data = [output.get("data", {}) for output in cell.get("outputs", ())]
        svg = [d["image/svg+xml"] for d in data if "image/svg+xml" in d]
        inside = (PICTURE.findall(d.get("text/html", "")) for d in data)
        svg += [base64.b64decode(each).decode() for found in inside for each in found]
        for number, picture in enumerate(svg, 1):
            yield f"{cell['id']}-{number}", picture


def figures(folder: Path, numbers: list[str]) -> None:
    """Write the pictures of saved notebooks: `06-03-1.svg` is the first of notebook 6, cell 3."""
    folder.mkdir(parents=True, exist_ok=True)
    for script in chosen(numbers):
        for name, picture in pictures(nbformat.read(script.with_suffix(".ipynb"), 4)):
            (folder / f"{name}.svg").write_text(picture, encoding="utf-8", newline="\n")


def chosen(numbers: list[str]) -> list[Path]:
    """The scripts of some notebooks, by number; all of them where none is given."""
    known = [script.stem[:2] for script in SCRIPTS]
    for number in numbers:
        if number not in known:
            sys.exit(f"there is no notebook {number}: there are {', '.join(known)}")
    return [s for s in SCRIPTS if not numbers or s.stem[:2] in numbers]


def main() -> None:
    """Make all notebooks, or those whose numbers are given; or an edition, or figures."""
    option, *rest = sys.argv[1:] or [""]
    if option in ("--exercises", "--figures") and not rest:
        sys.exit(f"write the folder: execute.py {option} FOLDER")
    if option == "--exercises":
        if rest[1:]:
            sys.exit("an edition has all notebooks: write execute.py --exercises FOLDER")
        exercises(Path(rest[0]))
        return
    if option == "--figures":
        figures(Path(rest[0]), rest[1:])
        return
    for script in chosen(sys.argv[1:]):
        print(script.stem)
        made = text(executed(script)[0])
        script.with_suffix(".ipynb").write_text(made, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
