"""A user's file is replaced whole or not at all, and nothing is left beside it."""

from __future__ import annotations

import ast
import errno
import functools
import os
import resource
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshdsl.backends.runtime.user_files import read_regular, replacing, write_file
from tests.project import ROOT, matching

# --- what is replaced --------------------------------------------------------------------------


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine"
    path.write_text("old")
    path.chmod(0o640)
    return path


def test_it_has_the_new_content_and_the_old_mode(mine: Path) -> None:
    write_file(mine, "é\r\n")
    assert mine.read_bytes() == "é\r\n".encode()
    assert stat.S_IMODE(mine.stat().st_mode) == 0o640
    assert os.listdir(mine.parent) == ["mine"]


def test_a_new_one_has_the_mode_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_file(tmp_path / "new", b"")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640


def test_it_is_closed_to_others_until_it_is_whole(mine: Path) -> None:
    with replacing(mine) as file:
        file.write(b"new")
        assert stat.S_IMODE(os.fstat(file.fileno()).st_mode) == 0o600
        assert mine.read_text() == "old"
    assert mine.read_text() == "new"


def test_a_link_stays_one_and_its_file_is_replaced(mine: Path, tmp_path: Path) -> None:
    (tmp_path / "links").mkdir()
    link = tmp_path / "links" / "link"
    link.symlink_to("../mine")
    write_file(link, "new")
    assert (os.readlink(link), mine.read_text()) == ("../mine", "new")
    assert os.listdir(link.parent) == ["link"]


def test_a_link_to_nothing_makes_its_file(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("target")
    write_file(link, "new")
    assert (tmp_path / "target").read_text() == "new"
    assert link.is_symlink()


def test_nothing_is_written_through_what_lies_beside(
    mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were the name guessed, the link there would still not be followed, nor removed."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    monkeypatch.setattr("secrets.token_hex", lambda n: "0" * 2 * n)
    (tmp_path / f".mine.{'0' * 16}.part").symlink_to(victim)
    with pytest.raises(FileExistsError):
        write_file(mine, "new")
    assert (victim.read_text(), mine.read_text()) == ("precious", "old")
    assert (tmp_path / f".mine.{'0' * 16}.part").is_symlink()


def test_two_at_a_time_are_never_alike(mine: Path) -> None:
    with replacing(mine), replacing(mine):
        beside = set(os.listdir(mine.parent)) - {"mine"}
    assert len(beside) == 2


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["a pipe", "a folder"])
def test_what_is_no_regular_file_is_neither_replaced_nor_read(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    make(tmp_path / "odd")
    for act in (lambda path: write_file(path, "new"), read_regular):
        with pytest.raises(OSError, match=r"regular|directory"):
            act(tmp_path / "odd")
    assert os.listdir(tmp_path) == ["odd"]


# --- failures ----------------------------------------------------------------------------------


def _no_space(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("call", ["fsync", "replace", "fchmod"])
@pytest.mark.parametrize("fails", [_no_space, _interrupted])
def test_whatever_fails_the_old_file_is_whole(
    call: str, fails: Callable[..., None], mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, call, fails)
    with pytest.raises((OSError, KeyboardInterrupt)):
        write_file(mine, "new")
    assert mine.read_text() == "old"
    assert os.listdir(mine.parent) == ["mine"]


def test_the_writer_of_the_content_may_fail(mine: Path) -> None:
    with pytest.raises(TypeError), replacing(mine) as file:
        file.writelines([b"new", "no bytes"])  # type: ignore[list-item]
    assert mine.read_text() == "old"
    assert os.listdir(mine.parent) == ["mine"]


def test_a_disk_that_takes_no_more(mine: Path) -> None:
    """The system's own refusal, by a limit on the size of files (Python ignores SIGXFSZ)."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            write_file(mine, bytes(1 << 17))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert mine.read_text() == "old"
    assert os.listdir(mine.parent) == ["mine"]


def test_it_is_on_the_disk_before_it_has_the_name(
    mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("fsync", "replace"):
        original = getattr(os, name)

        def noted(*given: Any, name: str = name, original: Any = original) -> None:
            calls.append(name)
            original(*given)

        monkeypatch.setattr(os, name, noted)
    write_file(mine, "new")
    assert calls == ["fsync", "replace", "fsync"]


# --- the only writer ---------------------------------------------------------------------------

OTHERS = {
    "backends/engines/stack_sampler.py": "a process's report in the temporary folder of its run",
    "backends/engines/line_profiler.py": "times in the temporary folder of a run",
    "backends/engines/in_process.py": "texts in the temporary folder of a run",
    "backends/engines/torchrun.py": "the job and the log in the temporary folder of a run",
    "backends/weights/params.py": "a table of places in a temporary folder",
    "backends/weights/writing.py": "what torch saves, to a file that the writer has opened",
    "backends/worker.py": "failures, results and what is told, in the temporary folder of a run",
    "backends/train/evaluation.py": "the result in the temporary folder of a run",
    "backends/train/tokenized.py": "tokens in a temporary folder",
    "backends/train/log.py": "the log of a run: replaced at the beginning, then appended to",
    "backends/runtime/array_files.py": "members of an archive that the writer has opened",
    "backends/runtime/main.py": "members of such an archive; a copy of the standard output",
    "backends/runtime/output.py": "a copy of the standard output, and the null device",
    "backends/runtime/user_files.py": "the writer itself",
    "meshdsl/api/training.py": "data of a caller, into the temporary folder of a run",
    "meshdsl/cli/__init__.py": "the null device",
    "meshdsl/disk_cache.py": "entries of the cache, which the cache itself replaces",
    "meshdsl/cli/streams.py": "the null device, and the standard streams by their descriptors",
    "meshdsl/placed/solver.py": "the null device",
    "meshdsl/play/compile_queue.py": "a copy of the standard output",
    "meshdsl/search/speculative.py": "pipes to the second process of a search",
}
"""The files that open something to write, beside the one writer, and what it is."""

ALWAYS = {"write_text", "write_bytes", "savez", "savez_compressed", "savetxt", "tofile", "mkstemp"}
ALWAYS |= {"NamedTemporaryFile", "save_file"}


@functools.cache
def calls() -> dict[str, list[ast.Call]]:
    """The calls in each file of the package."""
    found = {}
    for path in matching("meshdsl/**/*.py", "backends/**/*.py", "grammar/*.py"):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        found[str(path.relative_to(ROOT))] = [n for n in nodes if isinstance(n, ast.Call)]
    return found


def parts(call: ast.Call) -> tuple[str, str]:
    """The name that is called, and that of the module before it."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    module = call.func.value if isinstance(call.func, ast.Attribute) else None
    return module.id if isinstance(module, ast.Name) else "", name


def writes(call: ast.Call) -> bool:
    """Whether a call opens a file to write, or writes one by its path."""
    of, name = parts(call)
    given = [*call.args, *(k.value for k in call.keywords if k.arg in ("mode", "flags"))]
    modes = [a.value for a in given if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    opens = name in ("open", "fdopen") and any(
        m != "" and set(m) <= set("rwxab+t") and set(m) & set("wxa+") for m in modes
    )
    raw = (of, name) == ("os", "open") and any(
        isinstance(n, ast.Attribute) and n.attr in ("O_WRONLY", "O_RDWR", "O_CREAT")
        for a in given
        for n in ast.walk(a)
    )
    arrays = name == "save" and of in ("np", "numpy", "torch")
    return opens or raw or arrays or name in ALWAYS


def test_no_other_place_opens_a_users_file_to_write() -> None:
    found = {path for path, made in calls().items() if any(map(writes, made))}
    assert found <= set(OTHERS), "write it with `replacing` or `write_file`"
    unused = set(OTHERS) - found - {"backends/runtime/user_files.py"}
    assert not unused, "these write nothing any more"


# --- the only reader ---------------------------------------------------------------------------

READERS = {
    "backends/engines/line_profiler.py": "times in the temporary folder of a run",
    "backends/engines/execution.py": "results in the temporary folder of a run",
    "backends/engines/in_process.py": "texts in such a folder",
    "backends/engines/watchdog.py": "reports in such a folder; the state of a process",
    "backends/engines/torchrun.py": "reports, results and the log in such a folder",
    "backends/torch/inliner.py": "modules of the package",
    "backends/train/peak_memory.py": "the memory of this process, as the system tells it",
    "backends/train/evaluation.py": "the result in such a folder",
    "backends/train/devices.py": "the end in the temporary folder of a run",
    "backends/weights/model_files.py": "by torch, a file that was looked at just before",
    "backends/worker.py": "the job in such a folder",
    "meshdsl/api/training.py": "what a training wrote into the temporary folder of a run",
    "meshdsl/cluster/this_machine.py": "the name of the processor, as the system tells it",
    "meshdsl/cluster/profile.py": "profiles of the package",
    "meshdsl/codes.py": "a table of the package",
    "meshdsl/editor/messages.py": "a table of the package",
    "meshdsl/disk_cache.py": "entries of the cache, opened without waiting and looked at there",
    "meshdsl/named/prelude_files.py": "the library of the package",
    "meshdsl/play/page.py": "a page of the package",
    "meshdsl/project/__init__.py": "templates of the package",
    "meshdsl/report/page/__init__.py": "a page of the package",
    "meshdsl/search/speculative.py": "pipes to the second process of a search",
    "meshdsl/syntax/foreign_words.py": "a table of the package",
}
"""The files that open something to read, beside those that see to it that it is a regular file."""

HANDED = {
    "backends/runtime/main.py": "a copy of the standard output; arrays of an opened file",
    "backends/runtime/output.py": "a copy of the standard output",
    "backends/runtime/user_files.py": "the reader itself",
}
"""The files that give a descriptor or an open file to what could take a path."""

OF_PATHS = {"read_text", "read_bytes", "fromfile", "loadtxt", "genfromtxt", "memmap", "open_memmap"}


def reads(call: ast.Call) -> bool:
    """Whether a call reads a file by its path, whatever it is."""
    of, name = parts(call)
    looked_at = any(keyword.arg == "opener" for keyword in call.keywords)
    opens = isinstance(call.func, ast.Name) and name == "open" and not looked_at
    opens |= (of, name) in {("io", "open"), ("codecs", "open")}
    arrays = name == "load" and of in ("np", "numpy", "torch")
    return (opens or arrays or name in OF_PATHS) and not writes(call)


def test_no_other_place_opens_a_users_file_to_read() -> None:
    found = {path for path, made in calls().items() if any(map(reads, made))}
    found -= set(HANDED)
    assert found <= set(READERS), "read it with `read_regular`, or open it with `regular`"
    assert not set(READERS) - found, "these read nothing any more"
