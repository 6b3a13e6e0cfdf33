"""Every fix that a wrong command is offered mends it.

`WRONG` has a command for each code of the sections inputs, command line and running that a change
of the command, or of its file, mends. The fixes of its diagnostic are carried out, each by itself,
and the command is run again: the message is gone, and there is no error of another code.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from .command import Cli
from .tried import after, check_fix, heard

PROGRAM = """\
dim batch = 8, d = 4, layers = 4
mesh m = { pipe: 2 }
mesh two = { data: 2, model: 2 }
layout dp { batch -> pipe }
layout pp { layers -> pipe } with one_f_one_b[batch](4)
sbp s { x: S(0) }
program p(x[batch, d]) {
  param w[layers, d]
  repeat layers { x = x * w }
  return x
  minimize mean(x) with sgd(lr=0.1)
}
"""
FILES = {"f.mdsl": PROGRAM}

WRONG = """
MD0503 compile f.mdsl --output there.txt
MD0601 check f.mdsl --diff
MD0601 explain f.mdsl --layout dp --sbp s
MD0601 search f.mdsl --expect
MD0601 run f.mdsl --as m
MD0602 run f.mdsl --engine locl
MD0602 run f.mdsl --out x.txt
MD0604 chek f.mdsl
MD0604 check f.mdsl --stict
MD0604 check f.mdsl --mesh m --mesh two
MD0604 search f.mdsl --devices 0
MD0604 check f.mdsl --strict=3
MD0604 run f.mdsl --seed
MD0604 run f.mdsl --seed x
MD0630 simulate f.mdsl
MD0633 run f.mdsl --trace t.json
"""

ROWS = [line.split(" ", 1) for line in WRONG.strip().split("\n")]


def _files(folder: Path) -> None:
    for name, text in (*FILES.items(), ("there.txt", "")):
        (folder / name).write_text(text)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: " ".join(row))
def test_every_fix_mends_its_command(
    row: list[str], cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, command = row
    words = shlex.split(command)
    _files(tmp_path)
    first = heard(cli, words, monkeypatch)
    found = [d for d in first.diagnostics if d.code == code]
    assert found, first
    assert any(d.fixes for d in found), f"{code} offers no fix"
    for diagnostic in found:
        for fix in diagnostic.fixes:
            _files(tmp_path)
            fixed = after(words, fix, tmp_path)
            assert fixed is not None, fix
            check_fix(lambda w: heard(cli, w, monkeypatch), fixed, first, diagnostic)
