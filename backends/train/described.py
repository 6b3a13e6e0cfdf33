"""The description of a model beside its checkpoints: its configuration and its tokenizer.

It is in the folder `model` of that of the checkpoints, copied when the run begins from the model
that it begins with, and from the tokenizer of its texts.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from meshdsl.backends.data.tokenizer import CONFIG, FILE
from meshdsl.backends.runtime.user_files import read_regular, write_file
from meshdsl.backends.train.checkpoint import POINTER
from meshdsl.backends.weights.writing import copy_description
from meshdsl.diagnostics import fail

FOLDER = "model"


def sources_of(params: str | None, tokenizer: str | None) -> tuple[str, ...]:
    """What describes the model of a run that begins with `params`, on texts by a `tokenizer`."""
    sources = []
    if tokenizer is not None:
        sources.append(os.path.join(tokenizer, FILE) if os.path.isdir(tokenizer) else tokenizer)
    if params is not None and os.path.isdir(params):
        sources.append(description(params))
    return tuple(sources)


def describe(folder: str, sources: Sequence[str], is_begun: bool) -> None:
    """Copy what describes a model from some `sources`, the first one first.

    They are folders, or the file of a tokenizer. What is there already stays if the run `is_begun`
    already, else nothing of it. Raises MD0501.
    """
    target = Path(folder, FOLDER)
    if is_begun and target.is_dir():
        return
    try:
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        for source in sources:
            target.mkdir(parents=True, exist_ok=True)
            if os.path.isdir(source):
                copy_description(source, str(target), None)
            else:
                _copy_tokenizer(Path(source), target)
    except OSError as error:
        help = "check its space and permissions"
        fail("MD0501", f"{target} cannot be written: {error.strerror or error}", help=help)


def _copy_tokenizer(file: Path, target: Path) -> None:
    for source, name in ((file, FILE), (file.with_name(CONFIG), CONFIG)):
        if source.is_file():
            write_file(str(target / name), read_regular(source).decode("utf-8"))


def description(path: str) -> str:
    """The folder with the description of the model that a path has: its own, or that of its run."""
    for folder in (path, str(Path(path).parent)):
        there = os.path.join(folder, FOLDER)
        if os.path.isfile(os.path.join(folder, POINTER)) and os.path.isdir(there):
            return there
    return path
