"""A user's files: only regular ones are opened, and each is replaced whole or not at all.

Every file that a user names is written through `replacing`. The new content goes to a file of its
own beside the old one: its name cannot be guessed and it is created exclusively, so nothing that
lies there, such as a link, is written through. It gets the old file's mode and owner, is synced,
and only then takes the old one's name. Whatever ends the writing earlier, a full disk or Ctrl-C,
the old file is as it was and the new one is removed.

A symbolic link is kept: the file that it points to is replaced, in that file's own folder. A hard
link is not: the other names keep the old content.
"""

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from typing import IO

EXCLUSIVE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
"""How a file is created that nobody else has made: through no link, which would exist."""


class Refused(Exception):
    """What the user asked for cannot be done; nothing has run yet. The message says why."""


def regular(path: str, flags: int) -> int:
    """Open a file: the `opener` of `open`. OSError for a folder, a pipe, a socket or a device."""
    handle = os.open(path, flags | os.O_NONBLOCK, 0o666)  # no difference to a file
    try:
        check_regular(path, os.fstat(handle).st_mode)
    except OSError:
        os.close(handle)
        raise
    return handle


def check_regular(path: str, mode: int) -> None:
    """Raise OSError for what only looks like a file."""
    if stat.S_ISDIR(mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is no regular file", path)


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """The content of a regular file. Raises OSError, also for a pipe or a device."""
    with open(path, "rb", opener=regular) as file:
        return file.read()


@contextlib.contextmanager
def new_file(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """A file to write where there is none yet; it is on the disk when the block has ended.

    Raises OSError, also where something has the name: a link there might lead elsewhere.
    """
    with open(os.open(path, EXCLUSIVE, 0o666), "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], sync: bool = True) -> Iterator[IO[bytes]]:
    """A seekable file to write; it takes the place of `path` once the block ends without error.

    `sync` waits until it is on the disk; a file for another process of this run need not be.
    Raises OSError, also where something other than a regular file has the name.
    """
    target = os.path.realpath(path)
    before = os.lstat(target) if os.path.lexists(target) else None
    if before:
        check_regular(target, before.st_mode)
    folder, name = os.path.split(target)
    beside = os.path.join(folder, f".{name[:40]}.{secrets.token_hex(8)}.part")
    # Made here, through no link. One like an old file is closed to others until it is whole.
    handle = os.open(beside, EXCLUSIVE, 0o600 if before else 0o666)
    try:
        with open(handle, "wb") as file:
            yield file
            file.flush()
            if before:
                with contextlib.suppress(PermissionError):
                    os.fchown(handle, before.st_uid, before.st_gid)
                os.fchmod(handle, stat.S_IMODE(before.st_mode))
            if sync:
                os.fsync(handle)
        os.replace(beside, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise


@contextlib.contextmanager
def replacing_for_good(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """As `replacing`; its new name is on the disk, too, when the block has ended."""
    with replacing(path) as file:
        yield file
    sync_folder(os.path.dirname(os.path.realpath(path)))


def write_file(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file whole or not at all, a text as UTF-8 with its own line ends. Raises OSError."""
    data = content.encode("utf-8") if isinstance(content, str) else content
    with replacing_for_good(path) as file:
        file.write(data)


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Sync the names in a folder to the disk, where it can be opened. Raises OSError."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:  # it may be written to, not read
        return
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that has nothing to sync there
            raise
    finally:
        os.close(handle)
