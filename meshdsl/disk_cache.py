"""A cache on disk: JSON files in the user's cache folder, made by one command for the next.

`MESHDSL_CACHE` names another folder. A file is there whole or not at all, and is read only where
it is a regular file, its content has the digest it was written with, and all of it is of the type
that the reader names; its meaning is still to be checked by the reader. Where nothing can be read
or written, nothing is cached.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

MOST_FILES = 1000
"""The most files of one kind; beyond it the least recently used are removed, an eighth at once."""

MOST_BYTES = 1 << 26
"""The most bytes of a file that is read."""

Content = TypeVar("Content")


def folder(kind: str) -> Path:
    """The folder of the files of one kind."""
    chosen = os.environ.get("MESHDSL_CACHE")
    if chosen:
        return Path(chosen) / kind
    from platformdirs import user_cache_path

    return user_cache_path("meshdsl") / kind


def read(kind: str, key: str, type_: type[Content]) -> Content | None:
    """The content stored under a key, of type `type_`; None where there is none such.

    `type_` is a schema of msgspec: plain types, or dataclasses and typed dicts of them.
    """
    try:
        digest, _, written = _text(folder(kind) / f"{key}.json").partition("\n")
        if digest != _digest(written):
            return None
        return checked(parsed(written), type_)
    except (OSError, ValueError, RecursionError):
        return None


def parsed(text: str | bytes) -> Any:
    """JSON as a stranger may have written it. Raises ValueError and RecursionError.

    No name occurs twice, all numbers are finite, and every text in it can be written as UTF-8: of
    a pair of surrogates JSON can name one alone, which nothing can show or store.
    """
    written = text if isinstance(text, str) else text.decode("utf-8")
    content = json.loads(written, object_pairs_hook=_unique, parse_constant=_no_number)
    json.dumps(content, ensure_ascii=False).encode("utf-8")
    return content


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("a name occurs twice")
    return content


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number of JSON")


def from_json(text: str, type_: type[Content]) -> Content:
    """What another process of the same run has written, as a `type_`. Raises ValueError.

    Numbers may be infinite there, as a loss is.
    """
    try:
        return checked(json.loads(text), type_)
    except RecursionError as error:
        raise ValueError("objects in objects without an end") from error


def checked(found: Any, type_: type[Content]) -> Content:
    """What JSON held, as a `type_`. Raises ValueError where any part of it is of another type."""
    import msgspec

    return msgspec.convert(found, type_, str_keys=True)


def _text(path: Path) -> str:
    """The text of a file, which counts as used now. Raises OSError and ValueError.

    Nothing that only looks like a file is opened for long: a pipe would never end. A link is none
    of ours.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    with open(handle, "rb") as file:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode) or about.st_size > MOST_BYTES:
            raise ValueError("this is no file of the cache")
        text = file.read().decode("utf-8")
        os.utime(handle)
    return text


def write(kind: str, key: str, content: Any) -> None:
    """Store content that JSON can represent."""
    import tempfile

    written = json.dumps(content)
    with suppress(OSError):
        where = folder(kind)
        where.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=where, suffix=".new", delete=False) as new:
            try:
                new.write(f"{_digest(written)}\n{written}")
                new.flush()
                os.replace(new.name, where / f"{key}.json")
            except OSError:  # a full disk, or a folder has the name
                os.unlink(new.name)
                raise
        _drop_oldest(where)


def _digest(written: str) -> str:
    return hashlib.sha256(written.encode()).hexdigest()


def _drop_oldest(where: Path) -> None:
    """Remove what is too much. Looking at the time of each file takes longer than a write."""
    names = [name for name in os.listdir(where) if name.endswith(".json")]
    if len(names) > MOST_FILES:
        paths = [where / name for name in names]
        paths.sort(key=lambda path: path.lstat().st_mtime, reverse=True)
        for path in paths[MOST_FILES - MOST_FILES // 8 :]:
            path.unlink()
