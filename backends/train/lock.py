"""The lock file of a folder of checkpoints: one run at a time trains in it.

The system's lock on the file ends with the process that has it, however that ends. Its text, for
people, also warns a run on another machine, where such locks may not reach.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import NoReturn, TypedDict

from meshdsl.backends.runtime.user_files import regular
from meshdsl.diagnostics import fail
from meshdsl.disk_cache import checked, parsed

NAME = ".lock"


class Owner(TypedDict, total=False):
    """The run that has a folder."""

    pid: int
    host: str
    since: str


@contextlib.contextmanager
def locked(folder: str | None) -> Iterator[None]:
    """Lock a folder, which is made if it is missing; None: there is nothing to lock.

    Raises MD0518 where another run has it, MD0502 where there can be no such folder. The lock file
    is removed at the end, and the folder too if nothing was written.
    """
    if folder is None:
        yield
        return
    path = Path(folder, NAME)
    created: list[Path] = []
    try:
        created = _made(path.parent)
        handle = _locked(path)
    except OSError as error:
        _remove_empty(created)
        why, help = error.strerror, "name another folder; it is made where there is none"
        if path.is_symlink():
            why, help = f"its {NAME} is a link", f"remove {path}, or name another folder"
        fail("MD0502", f"{folder} cannot be used for checkpoints: {why}", help=help)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)
        _remove_empty(created)


def _remove_empty(made: list[Path]) -> None:
    """Remove folders, innermost first, up to one where something was written."""
    with contextlib.suppress(OSError):
        for empty in made:
            empty.rmdir()


def _made(folder: Path) -> list[Path]:
    """Make a folder with its parents; returns those that were missing, innermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return missing


def _locked(path: Path) -> int:
    """The lock file, open and locked. Raises MD0518 and OSError."""
    while True:
        handle = regular(str(path), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        try:
            _lock(handle, path)
            if _is_there(handle, path):
                _own(handle, path)
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # its last owner has just removed it


def _is_there(handle: int, path: Path) -> bool:
    """Whether an open file still has its name."""
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except FileNotFoundError:
        return False


def _lock(handle: int, path: Path) -> None:
    """Lock the open lock file, unless it belongs to a live run."""
    owner = _read(handle)
    here = owner.get("host") in (None, socket.gethostname())
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _refuse(path, owner, here)
    except OSError:  # there are no locks on this file system
        if here and _lives(owner.get("pid")):
            _refuse(path, owner, here)
    if not here:
        _refuse(path, owner, here)


def _lives(pid: int | None) -> bool:
    """Whether there is a process of this number."""
    if pid is None or pid < 1:
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # it is somebody else's
        return True
    return True


def _read(handle: int) -> Owner:
    """The owner in the lock file; empty where it is being written or is no such file."""
    try:
        return checked(parsed(os.pread(handle, 4096, 0)), Owner)
    except (ValueError, RecursionError):
        return {}


def _own(handle: int, path: Path) -> None:
    """Write who has the lock into its file; where that cannot be, the file is removed."""
    try:
        _write(handle)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _write(handle: int) -> None:
    since = datetime.now().astimezone().isoformat(" ", "seconds")
    owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
    os.ftruncate(handle, 0)
    os.pwrite(handle, json.dumps(owner).encode() + b"\n", 0)


def _refuse(path: Path, owner: Owner, here: bool) -> NoReturn:
    who = "another run"
    if owner:
        host = "" if here else f" on {owner.get('host')}"
        who = f"process {owner.get('pid')}{host}, since {owner.get('since')}"
    help = "wait until it ends, or name another folder"
    if not here:
        help += f"; if that run is over, remove {path}"
    fail("MD0518", f"{path.parent} is in use by {who}", help=help)
