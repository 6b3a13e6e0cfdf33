"""A cache on disk: JSON files in the user's cache folder, made by one command for the next.

`MESHDSL_CACHE` names another folder. A file is there whole or not at all, and is read only where
its content has the digest it was written with; its meaning is still to be checked by the
reader. Where nothing can be read or written, nothing is cached.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

MOST_FILES = 1000
"""The most files of one kind; beyond it the least recently used are removed."""


def folder(kind: str) -> Path:
    """The folder of the files of one kind."""
    chosen = os.environ.get("MESHDSL_CACHE")
    if chosen:
        return Path(chosen) / kind
    from platformdirs import user_cache_path

    return user_cache_path("meshdsl") / kind


def read(kind: str, key: str) -> Any:
    """The content stored under a key; None where there is none, or none whole."""
    path = folder(kind) / f"{key}.json"
    try:
        digest, written = path.read_text(encoding="utf-8").split("\n", 1)
        if digest != _digest(written):
            return None
        content = json.loads(written)
        os.utime(path)
    except (OSError, ValueError):
        return None
    return content


def write(kind: str, key: str, content: Any) -> None:
    """Store content that JSON can represent."""
    written = json.dumps(content)
    with suppress(OSError):
        where = folder(kind)
        where.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=where, suffix=".new", delete=False) as new:
            new.write(f"{_digest(written)}\n{written}")
        os.replace(new.name, where / f"{key}.json")
        _drop_oldest(where)


def _digest(written: str) -> str:
    return hashlib.sha256(written.encode()).hexdigest()


def _drop_oldest(where: Path) -> None:
    kept = sorted(where.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in kept[MOST_FILES:]:
        path.unlink()
