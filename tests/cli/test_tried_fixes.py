"""Every fix that a wrong command is offered mends it.

`WRONG` has a command for each code of the sections inputs, command line and running that a change
of the command, or of its file, mends. The fixes of its diagnostic are carried out, each by itself,
and the command is run again: the message is gone, and there is no error of another code.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshdsl.codes import CODES
from tests.clusters import SMALL

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
weights hf { w: "w"[layers, d] }
"""
GRAPH = """{"kind": "placement", "edges": [],
 "nodes": [{"name": "a", "choices": ["r", "s"], "cost": [1, 2]}]}"""
TWO = """\
dim batch = 8
program one(x[batch]) { return x }
program two(x[batch]) { return x }
"""
CLIP = PROGRAM.replace("sgd(lr=0.1)", "sgd(lr=0.1, clip=1.0)").replace("one_f_one_b", "pipedream")
SPEAKS = """\
dim vocab = 8, room = 4
program step(token: i32, pos: i32) {
  param e[vocab]
  param seen[room] = zeros()
  now = put[room = pos](seen, e[vocab = token])
  seen := now
  return e * sum(now)
}
program more(token: i32, pos: i32) {
  param e[vocab]
  param seen[room] = zeros()
  now = put[room = pos](seen, e[vocab = token])
  seen := now
  return e
}
"""
TOKENS = """\
dim batch = 8, seq = 4, vocab = 300
program p(tokens[batch, seq]: i32, targets[batch, seq]: i32) {
  param e[vocab]
  return mean(e[vocab = tokens] * e[vocab = targets])
}
"""
LIMITED = """{"kind": "placement", "edges": [],
 "nodes": [{"name": "a", "choices": ["r", "s"], "cost": [1, 2], "memory": [8, 4]}]}"""
TRACE = """{"traceEvents": [], "otherData":
 {"made by": "meshdsl 0 run", "seconds": 1.0, "program": "p", "mesh": {"pipe": 2},
 "layout": "pp"}}"""
FILES: dict[str, str | bytes] = {
    "two.mdsl": TWO,
    "clip.mdsl": CLIP,
    "tokens.mdsl": TOKENS,
    "speaks.mdsl": SPEAKS,
    "small.toml": SMALL,
    "wrong.toml": SMALL.replace("hbm_eff", "hbm_ef"),
    "limited.json": LIMITED,
    "trace.json": TRACE,
    "texts.jsonl": '{"body": "a text of which the tokens are bytes, more than forty of them"}\n',
    "raw.bin": bytes(400),
    "f.mdsl": PROGRAM,
    "g.mdsl": "dim batch = 8\nprogram p(x[batch]) { return x }\n",
    "graph.json": GRAPH,
    "there.txt": "",
}

ZEROS = np.zeros((4, 4), np.float32)
ARRAYS: dict[str, dict[str, Any]] = {
    "p.npz": {"w": ZEROS},
    "wide.npz": {"w": np.full((4, 4), 0.1)},
    "tall.npz": {"w": np.zeros((6, 4), np.float32)},
    "e.npz": {"e": np.zeros(8, np.float32)},
    "e300.npz": {"e": np.zeros(300, np.float32)},
}
"""Arrays that commands read."""

WITHOUT = {"MD0508": "tensorboardX.event_file_writer", "MD0667": "optuna"}
"""Modules that are not there while a code is tried."""

WRONG = """
MD0010 check fl.mdsl
MD0111 explain two.mdsl
MD0115 check f.mdsl --set bach=16
MD0311 render f.mdsl --as jax --set batch=7 --layout dp
MD0321 explain f.mdsl --cluster wrong.toml
MD0322 explain f.mdsl --layout dp --mesh pipe:8 --cluster small.toml
MD0323 explain f.mdsl --mesh t:2,pipe:12 --layout dp --cluster a100-dgx
MD0324 search f.mdsl --objective time
MD0336 simulate f.mdsl --layout pp --cluster h100 --stage 5
MD0337 train clip.mdsl --data d.npz --steps 1 --engine reference --layout pp
MD0504 export f.mdsl --params tall.npz --out o.npz
MD0505 export f.mdsl --params pp.npz --out o.npz
MD0506 export f.mdsl --params wide.npz --out o.npz --force
MD0508 train f.mdsl --data d.npz --steps 1 --tensorboard logs
MD0552 export f.mdsl --params p.npz --out o.safetensors --as hff
MD0581 evaluate tokens.mdsl --data raw.bin --params e300.npz
MD0582 evaluate tokens.mdsl --data texts.jsonl --params e300.npz
MD0624 generate speaks.mdsl --params e.npz --prompt '1 2' --tokens numbers
MD0625 generate speaks.mdsl --program step --params e.npz --prompt '1 2' --tokens numbers --steps 9
MD0627 generate speaks.mdsl --program step --params e.npz --prompt '1' --tokens numbers --top-p 2
MD0627 generate speaks.mdsl --program step --params e.npz --prompt 1 --tokens numbers --beams 2 \
--temperature 1
MD0632 simulate f.mdsl --layout dp --mesh m --cluster h100 --against trace.json
MD0664 search --graph limited.json --memory 1B
MD0667 search f.mdsl --method bayesian
MD0910 render f.mdsl --as jax --step --layout dp
MD0502 compile f.mdsl --output empty
MD0503 compile f.mdsl --output there.txt
MD0514 train f.mdsl --data d.npz --steps 1 --checkpoint empty --resume
MD0516 train f.mdsl --data d.npz --steps 1 --resume
MD0528 schedule gpip --stages 2 --micro 4
MD0529 schedule gpipe --stages 2 --micro 4 --chunks 2
MD0530 schedule gpipe --stages 2 --micro 4 --times F=1,WW=2
MD0530 schedule gpipe --stages 2 --micro 4 --times F=1,F=2
MD0531 schedule pipedream --stages 2 --micro 4 --torch-csv t.csv
MD0532 schedule gpipe --micro 4
MD0532 schedule gpipe --stages 2 --micro 4 --unit 2
MD0532 schedule terapipe --stages 2 --micro 1 --tokens 4 --times F=1
MD0532 schedule gpipe --stages 2 --micro 4 --weights latest
MD0532 schedule gpipe --list
MD0533 check f.mdsl --layout pp --schedule interleaved[batch](4,chunk=2)
MD0534 check f.mdsl --layout pp --schedule one_f_one_b[batch](3)
MD0537 check f.mdsl --layout dp --schedule one_f_one_b[batch](4)
MD0601 check f.mdsl --diff
MD0601 explain f.mdsl --layout dp --sbp s
MD0601 search f.mdsl --expect
MD0601 search f.mdsl --memory x
MD0601 search f.mdsl --bandwidth 1GB/s
MD0601 search f.mdsl --write 3x
MD0601 run f.mdsl --as m
MD0601 compare f.mdsl --layouts dp,,pp
MD0602 run f.mdsl --engine locl
MD0602 run f.mdsl --out x.txt
MD0602 search f.mdsl --objective byte
MD0603 explain MD0699
MD0604 chek f.mdsl
MD0604 check f.mdsl --stict
MD0604 check f.mdsl --mesh m --mesh two
MD0604 check f.mdsl --strict=3
MD0604 explain f.mdsl more
MD0604 run f.mdsl --seed
MD0604 run f.mdsl --seed x
MD0604 search f.mdsl --devices 0
MD0604 schedule
MD0605 rows maxx
MD0601 rows --all
MD0606 compare f.mdsl --layouts dp,dp
MD0607 explain f.mdsl --line 99
MD0607 explain f.mdsl --tensor ww
MD0620 new my-model
MD0621 new empty
MD0628 export f.mdsl --params p.npz --out o.npz --apply noo
MD0630 simulate f.mdsl
MD0631 simulate f.mdsl --cluster h100 --against there.txt
MD0633 run f.mdsl --trace t.json
MD0642 search f.mdsl --memory 1B
MD0643 search f.mdsl --write dp
MD0645 search g.mdsl --devices 2
MD0646 search f.mdsl --certificate --objective memory
MD0647 search f.mdsl --pipeline pip
MD0647 search g.mdsl --mesh pipe:2 --pipeline pipe
MD0665 search --graph graph.json --method elimnation
MD0665 search --graph graph.json --devices 2
MD0704 train f.mdsl --data d.npz --steps 1 --mesh pipe:1025 --layout dp
"""

OTHER_WAYS = {
    "a file or a folder is to be made, repaired or fetched": """
        MD0501 MD0513 MD0540 MD0541 MD0543 MD0544 MD0545 MD0550 MD0553 MD0554
        MD0580 MD0583 MD0660 MD0661 MD0662""",
    "a note of something that has happened": """
        MD0507 MD0517 MD0519 MD0542 MD0551 MD0555 MD0649 MD0722 MD0723 MD0724""",
    "the program, or a table in it, is to be written otherwise": """
        MD0510 MD0512 MD0520 MD0521 MD0522 MD0523 MD0524 MD0525 MD0526 MD0535 MD0536 MD0538""",
    "a call of Python": "MD0560 MD0561 MD0562 MD0563 MD0564 MD0565",
    "the machine, a package or another process": """
        MD0518 MD0623 MD0701 MD0702 MD0703 MD0705 MD0707 MD0708 MD0720 MD0721 MD0725
        MD0797 MD0798 MD0799""",
    "more data, or a shorter text": "MD0511 MD0626",
    "an edit that is not tried here: its command has to run long, or needs a package": """
        MD0515 MD0622 MD0641 MD0663 MD0666 MD0709""",
}
"""Codes of these sections that no row of `WRONG` mends, by what would."""

ROWS = [line.split(" ", 1) for line in WRONG.strip().split("\n")]


def _files(folder: Path) -> None:
    (folder / "empty").mkdir(exist_ok=True)
    for name, arrays in ARRAYS.items():
        np.savez(folder / name, **arrays)
    for name, text in FILES.items():
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: " ".join(row))
def test_every_fix_mends_its_command(
    row: list[str], cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, command = row
    words = shlex.split(command)
    if code in WITHOUT:
        monkeypatch.setitem(sys.modules, WITHOUT[code], None)
    _files(tmp_path)
    first = heard(cli, words, monkeypatch)
    found = [d for d in first.diagnostics if d.code == code]
    assert found, first
    assert any(d.fixes for d in found), f"{code} offers no fix"
    for diagnostic in found:
        assert len(diagnostic.fixes) == 1 or not any(f.safe for f in diagnostic.fixes), "a choice"
        for fix in diagnostic.fixes:
            _files(tmp_path)
            fixed = after(words, fix, tmp_path)
            assert fixed is not None, fix
            check_fix(lambda w: heard(cli, w, monkeypatch), fixed, first, diagnostic)


def test_every_code_of_these_sections_is_mended_or_said_to_need_something_else() -> None:
    mended = {code for code, _ in ROWS}
    others = [code for codes in OTHER_WAYS.values() for code in codes.split()]
    assert len(others) == len(set(others))
    assert not mended & set(others)
    sections = {code for code in CODES if code[:4] in ("MD05", "MD06", "MD07")}
    assert mended & sections | set(others) == sections
