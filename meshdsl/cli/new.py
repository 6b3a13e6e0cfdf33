"""`meshdsl new`: a folder with a program, its data, a test and commands to try."""

from __future__ import annotations

import itertools
import os
import secrets
import shlex
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshdsl.cli import common
from meshdsl.diagnostics import fail
from meshdsl.option_edits import refuse, replace_argument
from meshdsl.output_files import refuse_writing

if TYPE_CHECKING:
    from meshdsl.project import ProjectFile


def command(
    name: Annotated[
        Path,
        typer.Argument(
            metavar="NAME", help="The folder to create, such as `spiral` or `work/spiral`."
        ),
    ],
) -> None:
    """Create a project: a program, two layouts, data and a test."""
    with common.reporting():
        from meshdsl.project import project

        files = project(name.name)
        _check_free(name)
        _write(name, files)
        for line in _summary(name, files):
            common.say(line)


def _check_free(folder: Path) -> None:
    """Refuse a folder that is there, or that has no place to be in."""
    if os.path.lexists(folder):
        others = (f"{folder}_{number}" for number in itertools.count(2))
        free = next(name for name in others if not os.path.lexists(name))
        fix = replace_argument(str(folder), free, safe=False)
        refuse("MD0621", f"{folder} exists, and nothing is overwritten", fix, "choose another name")
    if not folder.parent.is_dir():
        help = f"make it: mkdir -p {shlex.quote(str(folder.parent))}"
        fail("MD0502", f"there is no folder {folder.parent}", help=help)


def _write(folder: Path, made: Iterable[ProjectFile]) -> None:
    """Make the folder whole or not at all: it has its name once all files are in it."""
    from meshdsl.backends.runtime.user_files import sync_folder, write_file

    beside = folder.with_name(f".{folder.name[:40]}.{secrets.token_hex(8)}.part")
    try:
        beside.mkdir()
        for file in made:
            write_file(beside / file.name, file.text)
        os.rename(beside, folder)
        sync_folder(folder.parent)
    except OSError as error:
        refuse_writing(folder, error)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _summary(folder: Path, made: Iterable[ProjectFile]) -> tuple[str, ...]:
    """The files that were made, and the commands to try."""
    name = folder.name
    width = max(len(file.name) for file in made)
    return (
        f"created {folder}",
        *(f"  {file.name:{width}}  {file.purpose}" for file in made),
        "",
        "try:",
        f"  cd {shlex.quote(str(folder))}",
        f"  meshdsl check {name}.mdsl",
        f"  meshdsl explain {name}.mdsl",
        f"  python data.py && meshdsl train {name}.mdsl --data {name}.npz --steps 300",
        f"  meshdsl play {name}.mdsl",
    )
