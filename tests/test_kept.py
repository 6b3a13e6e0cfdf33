"""What lies in the cache is believed only where it is what was written: else there is no entry."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshdsl import disk_cache, grammar
from meshdsl.cluster import this_machine as home
from meshdsl.cluster.profile import load as profile_of
from meshdsl.device.printer import print_program
from meshdsl.grammar.parser import END, Parse
from meshdsl.grammar.tables import Tables
from tests.compiling import compile_text
from tests.poison import poisoned

PROGRAM = """
dim m = 64, a = 64, n = 16, k = 8
mesh four = { x: 2, y: 2 }
layout split { a -> x }
program p(u[m, a], v[a, n], w[n, k]) {
  t = einsum(u, v -> [m, n])
  y = exp(einsum(t, w -> [m, k]))
  return y
}
"""
SMALL = 'start: (WORD | _pair)*\n_pair: "(" [WORD] ")"\nWORD: /[a-z]+/\n%ignore " "\n'
"""A grammar that is built at once."""


def sealed(content: Any) -> str:
    """The file of a content, with the right digest."""
    text = json.dumps(content)
    return f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}"


def content_of(path: Path) -> Any:
    return json.loads(path.read_text().partition("\n")[2])


class Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, ("bomb-went-off",)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MESHDSL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


def device() -> str:
    return print_program(compile_text(PROGRAM, mesh="four", layout="split").device)


def parsed() -> str:
    parser = grammar.parser_of(SMALL)
    parse = Parse(parser.tables, [parser.tables.start])
    for word in (*parser.tokens("a (b) ()"), END):
        parse.feed(word)
    return f"{parse.parts[0]}"


def measured() -> str:
    return repr(profile_of("cpu"))


PROFILE = (
    'source = ["measured"]\n[device]\nflops = { f32 = 1e9 }\nmm_eff = 1.0\ngemm_half = [0, 0]\n'
    "hbm = 1e9\nhbm_eff = 1.0\nlaunch = 0.0\nmemory = 1e9\noverlap_slowdown = 2.0\n"
    '[[levels]]\nkind = "switch"\nalpha = 1e-6\nbandwidth = 1e9\nnominal = 1e9\n'
)
FREE = ("spelling: table", "actions.0", "gotos.0")
"""Fields of the tables of a parser in which another grammar may have something else."""


def test_poisoned_plans_are_no_entries(folder: Path) -> None:
    whole, tried = device(), 0
    (path,) = (folder / "plans").iterdir()
    for name, other in poisoned(content_of(path)):
        path.write_text(sealed(other))
        assert device() == whole, name
        tried += 1
    assert tried >= 130


def test_poisoned_tables_are_no_entries(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed()
    (path,) = (folder / "grammar").iterdir()
    content, tried, believed = content_of(path), 0, set[str]()
    monkeypatch.setattr("lark.Lark.__init__", lambda *_, **__: 1 / 0)
    for name, other in poisoned(content):
        path.write_text(sealed(other))
        with contextlib.suppress(ZeroDivisionError):
            grammar.parser_of(SMALL)
            believed.add(name)
        tried += 1
    assert tried >= 130
    odd = (name for name in believed if not name.endswith(": missing"))
    assert [name for name in sorted(odd) if not name.startswith(FREE)] == []


def test_a_measured_profile_that_is_none_counts_as_not_measured(folder: Path) -> None:
    unmeasured = measured()
    disk_cache.write(home.KIND, home._key(), PROFILE)
    assert measured() != unmeasured
    (path,) = (folder / home.KIND).iterdir()
    for other in (1, None, [PROFILE], {"": PROFILE}, "", "[", PROFILE[:60], "[device]\nflops = -1"):
        path.write_text(sealed(other))
        assert measured() == unmeasured, other


def _linked(path: Path) -> None:
    other = path.with_suffix(".other")
    path.rename(other)
    path.symlink_to(other)


def _socket(path: Path) -> None:
    path.unlink()
    with socket.socket(socket.AF_UNIX) as end:
        here = Path.cwd()
        os.chdir(path.parent)  # a long path does not fit
        end.bind(path.name)
        os.chdir(here)


def _replaced(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a pipe": _replaced(os.mkfifo),
    "a folder": _replaced(Path.mkdir),
    "a socket": _socket,
    "a device": _replaced(lambda path: path.symlink_to("/dev/zero")),
    "a link": _linked,
    "a link to nothing": _replaced(lambda path: path.symlink_to("nothing")),
    "a loop": _replaced(lambda path: path.symlink_to(path.name)),
    "nothing in it": lambda path: path.write_text(""),
    "one line": lambda path: path.write_text(path.read_text().partition("\n")[0]),
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "no text": lambda path: path.write_bytes(b"\xff\xfe" + path.read_bytes()),
    "a pickle": lambda path: path.write_bytes(pickle.dumps(Bomb())),
    "a sealed pickle": lambda path: path.write_bytes(
        hashlib.sha256(pickle.dumps(Bomb(), 0)).hexdigest().encode()
        + b"\n"
        + pickle.dumps(Bomb(), 0)
    ),
    "deep": lambda path: path.write_text(_sealed_text("[" * 10**5)),
    "long numbers": lambda path: path.write_text(_sealed_text("9" * 10**5)),
    "no JSON": lambda path: path.write_text(_sealed_text("{'a': 1}")),
    "too large": lambda path: os.truncate(path, 1 << 40),
}


def _sealed_text(text: str) -> str:
    return f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}"


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_no_entry_is_made_anew(damage: str, folder: Path) -> None:
    """And in place of it, wherever that is possible; nothing else stays in the folder."""
    whole = parsed()
    (path,) = (folder / "grammar").iterdir()
    DAMAGES[damage](path)
    assert disk_cache.read("grammar", path.stem, Tables) is None
    assert parsed() == whole
    assert not list(folder.glob("*/*.new"))
    assert not Path("bomb-went-off").exists()
    assert (disk_cache.read("grammar", path.stem, Tables) is None) == (damage == "a folder")


def test_a_full_disk_leaves_nothing_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    disk_cache.write("grammar", "key", [1])
    assert list((folder / "grammar").iterdir()) == []
