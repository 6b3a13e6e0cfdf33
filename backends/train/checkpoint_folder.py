"""A folder of checkpoints: which there are, whether one is whole, and how a new one is added.

    latest           the names of the committed checkpoints, newest first, one per line
    step-20/         one checkpoint: what torch wrote, and manifest.json
    .step-30.partial what is being written; never read, removed by the next save

A checkpoint is whole when its manifest and all files that the manifest names are as they were
written. The manifest is written last, then the folder gets its name, then `latest` is replaced: a
process killed at any moment leaves what was committed before as it was.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from meshdsl.backends.runtime.files import regular

POINTER = "latest"
MANIFEST = "manifest.json"
VERSION = 1
CHUNK = 1 << 20
"""Bytes of a file that are read at a time."""

_NAME = re.compile(r"step-(\d{1,18})")
_SPARE = ".old"
"""What a checkpoint is called while another of the same step takes its name."""


class DiskError(Exception):
    """The system hindered one of the processes that save or load; the message says how."""


class Damaged(Exception):
    """A checkpoint is not as it was written; the message says what of it."""


def name_of(step: int) -> str:
    """The name of the checkpoint of a step."""
    return f"step-{step}"


def step_of(name: str) -> int:
    """The step of a checkpoint's name."""
    found = _NAME.fullmatch(name)
    assert found, f"{name} is no name of a checkpoint"
    return int(found[1])


def names(folder: Path) -> list[str]:
    """The checkpoints in `folder`, newest first: those in `latest`, then others by their step.

    Raises OSError where there is a folder that cannot be read.
    """
    try:
        there = {n.removesuffix(_SPARE) for n in os.listdir(folder)}
    except FileNotFoundError:
        return []
    there = {n for n in there if _NAME.fullmatch(n)}
    committed = [n for n in dict.fromkeys(_listed(folder)) if n in there]
    others = sorted(there - set(committed), key=step_of, reverse=True)
    return committed + others


def _listed(folder: Path) -> list[str]:
    """The names in `latest`, newest first; none where it is missing or no text."""
    try:
        with open(folder / POINTER, encoding="utf-8", opener=regular) as file:
            text = file.read()
    except (OSError, UnicodeDecodeError):
        return []
    return [line for line in text.splitlines() if _NAME.fullmatch(line)]


def place(folder: Path, name: str) -> Path:
    """Where checkpoint `name` lies, also when a process was killed while it was being replaced."""
    path = folder / name
    return path if path.exists() else folder / (name + _SPARE)


def describe(error: OSError) -> str:
    """An error of the system in a few words, with the file where it is known."""
    said = error.strerror or str(error) or type(error).__name__
    return f"{Path(error.filename).name}: {said}" if error.filename else said


def digest(path: Path) -> dict[str, Any]:
    """Size and checksum of a file, as the manifest holds them. Raises OSError."""
    found, size = hashlib.blake2b(digest_size=16), 0
    with open(path, "rb", opener=regular) as file:
        while chunk := file.read(CHUNK):
            found.update(chunk)
            size += len(chunk)
    return {"bytes": size, "blake2b": found.hexdigest()}


def write_manifest(checkpoint: Path, content: Mapping[str, Any]) -> None:
    """Write the manifest, which makes what lies in the folder `checkpoint` whole."""
    sealed = {"version": VERSION, "blake2b": _seal(content), **content}
    write(checkpoint / MANIFEST, json.dumps(sealed, indent=1).encode())
    sync(checkpoint)


def _seal(content: Mapping[str, Any]) -> str:
    """The checksum of the manifest's own content."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """What the manifest says, less its version and checksum. Raises Damaged."""
    try:
        with open(checkpoint / MANIFEST, encoding="utf-8", opener=regular) as file:
            content = json.load(file)
        version, seal = content.pop("version"), content.pop("blake2b")
    except FileNotFoundError:
        raise Damaged(f"it has no {MANIFEST}") from None
    except OSError as error:
        raise Damaged(describe(error)) from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise Damaged(f"{MANIFEST} cannot be read") from None
    if version != VERSION:
        raise Damaged(f"{MANIFEST} is of version {version}, which this meshdsl does not read")
    if seal != _seal(content):
        raise Damaged(f"{MANIFEST} is not as it was written")
    return dict(content)


def check_files(checkpoint: Path, files: Mapping[str, Mapping[str, Any]], sums: bool) -> None:
    """Compare files with what the manifest says: sizes, and with `sums` checksums. Raises Damaged.

    Sizes come first, for they cost nothing.
    """
    for name, known in files.items():
        try:
            size = os.stat(checkpoint / name).st_size
        except FileNotFoundError:
            raise Damaged(f"{name} is missing") from None
        except OSError as error:
            raise Damaged(describe(error)) from None
        if size != known["bytes"]:
            raise Damaged(f"{name} has {size:,} bytes of {known['bytes']:,}")
    for name, known in files.items() if sums else ():
        try:
            found = digest(checkpoint / name)
        except OSError as error:
            raise Damaged(describe(error)) from None
        if found != known:
            raise Damaged(f"{name} holds other bytes than were written")


def begin(folder: Path, step: int) -> Path:
    """Remove what killed processes left behind and make the folder that a save writes into.

    Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".step-"):
            shutil.rmtree(path, ignore_errors=True)
        elif path.name.endswith(_SPARE) and _NAME.fullmatch(path.name.removesuffix(_SPARE)):
            _settle(path)
    partial = partial_of(folder, step)
    partial.mkdir()
    return partial


def partial_of(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is written before it is whole."""
    return folder / f".{name_of(step)}.partial"


def _settle(spare: Path) -> None:
    """End a replacement that was cut short: the old one goes, or is put back."""
    named = spare.with_name(spare.name.removesuffix(_SPARE))
    if named.exists():
        shutil.rmtree(spare, ignore_errors=True)
    else:
        os.rename(spare, named)


def commit(folder: Path, step: int, keep: int) -> None:
    """Give what was written its name, flip `latest`, and keep the newest `keep`. Raises OSError.

    All that needs space on the disk comes first, so that only renames are left to do.
    """
    name = name_of(step)
    order = [name, *(other for other in names(folder) if other != name)]
    flipped = folder / f".{POINTER}.new"
    write(flipped, "".join(f"{n}\n" for n in order[:keep]).encode())
    final, spare = folder / name, folder / (name + _SPARE)
    if final.exists():
        os.rename(final, spare)
    os.rename(partial_of(folder, step), final)
    sync(folder)
    os.replace(flipped, folder / POINTER)
    sync(folder)
    remove(folder, [spare.name, *(n for n in order[keep:] if (folder / n / MANIFEST).exists())])


def remove(folder: Path, doomed: Iterable[str]) -> None:
    """Remove checkpoints. Each loses its name first, so that none is ever half there."""
    for name in doomed:
        gone = folder / f".{name}.gone"
        try:
            os.rename(folder / name, gone)
        except OSError:  # it is not there, or stays there: neither does harm
            continue
        shutil.rmtree(gone, ignore_errors=True)


def discard(folder: Path, step: int) -> None:
    """Remove what a save that failed has written."""
    shutil.rmtree(partial_of(folder, step), ignore_errors=True)
    with contextlib.suppress(OSError):
        (folder / f".{POINTER}.new").unlink()


def write(path: Path, data: bytes) -> None:
    """Write a file and see it onto the disk. Raises OSError."""
    with open(path, "wb", opener=regular) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync(folder: Path) -> None:
    """See the names in a folder onto the disk. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
