"""The files of the project: those that git tracks, so that what else lies about changes no test."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@functools.cache
def tracked(root: Path = ROOT) -> tuple[Path, ...]:
    """The project's files, from `root`, sorted. Without git: all but what `.gitignore` names."""
    if not (root / ".git").exists() or shutil.which("git") is None:
        return tuple(sorted(_unpacked(root)))
    command = ["git", "ls-files", "-z"]
    listing = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    names = filter(None, listing.split("\0"))
    return tuple(sorted(Path(name) for name in names if os.path.lexists(root / name)))


def copy_tree(target: Path) -> Path:
    """A copy of the project's files in a folder, links as they are; the folder."""
    for path in tracked():
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, target / path, follow_symlinks=False)
    return target


def guide_file(path: str) -> str:
    """The file that CONTRIBUTING.md shows as `path`: the first block of Python after its name."""
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    _, named, shown = guide.partition(f"`{path}`")
    assert named, f"the guide shows no `{path}`"
    return shown.split("```python\n", 1)[1].split("```\n", 1)[0]


def _unpacked(root: Path) -> Iterator[Path]:
    """The files of an archive that was unpacked and worked in."""
    patterns = (root / ".gitignore").read_text(encoding="utf-8").splitlines()
    for folder, inner, names in os.walk(root):
        here = Path(folder).relative_to(root)
        kept = [name for name in inner if not _ignored(here / name, patterns)]
        inner[:] = [name for name in kept if not (root / here / name).is_symlink()]
        files = {*names, *kept} - {*inner}
        yield from (here / name for name in files if not _ignored(here / name, patterns))


def _ignored(path: Path, patterns: list[str]) -> bool:
    """Whether one of the patterns of `.gitignore` means this path from the root."""
    return any(
        fnmatch(path.as_posix() if pattern.startswith("/") else path.name, pattern.strip("/"))
        for pattern in patterns
    )


def examples() -> list[Path]:
    """The examples that have a program, and need no package.

    Files of sizes have dims alone; the tests of `examples/own_operator` install its package.
    """
    paths = matching("examples/**/*.mdsl")
    return [path for path in paths if path.parent.name not in ("sizes", "own_operator")]


def matching(*patterns: str) -> list[Path]:
    """The project's files that match one of the patterns from its root, as whole paths, sorted."""
    known = {ROOT / path for path in tracked()}
    return sorted({path for pattern in patterns for path in ROOT.glob(pattern)} & known)
