"""Whatever signs a name of a file has, none of them reaches a terminal, a page or a program."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import numpy as np
import pytest

from meshdsl.cli.app import NAMES
from tests.project import matching

from .command import Cli, write
from .test_regular_files import LEARN

EVIL = "a\x1b]0;b\x07\rc\u202ed\u2066e\x9b1mf"
"""A title of a terminal, a bell, a line that is written over, and text that runs backwards."""
SHOWN = "a\\x1b]0;b\\x07\\x0dc\\u202ed\\u2066e\\x9b1mf"

STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

CALLS = {
    "new": ["new EVIL"],
    "check": ["check EVIL.mdsl", "check --fix EVIL.mdsl", "check --fix --diff EVIL.mdsl"],
    "fmt": ["fmt --check EVIL.mdsl", "fmt --diff EVIL.mdsl", "fmt EVIL.mdsl"],
    "explain": [
        "explain EVIL.mdsl",
        *(f"explain EVIL.mdsl --print-after {stage}" for stage in ("named", "placed", "device")),
    ],
    "compile": ["compile EVIL.mdsl", "compile EVIL.mdsl -o EVIL.py"],
    "run": ["run EVIL.mdsl --out EVIL.npz", "run EVIL.mdsl --inputs EVIL.mdsl"],
    "train": [
        "train EVIL.mdsl --data d.npz --steps 1 --log EVIL.jsonl --checkpoint EVIL --out EVIL.npz",
        "train EVIL.mdsl --data EVIL.mdsl --steps 1",
        "train EVIL.mdsl --data d.npz --steps 1 --tensorboard EVIL.mdsl",
    ],
    "evaluate": [
        "evaluate EVIL.mdsl --data EVIL.mdsl --params EVIL.npz",
        "evaluate EVIL.mdsl --data d.npz --params EVIL.bin",
    ],
    "export": [
        "export EVIL.mdsl --params EVIL.npz --out EVIL.safetensors",
        "export EVIL.mdsl --params EVIL.npz --out o.npz --apply EVIL",
    ],
    "tokenize": ["tokenize EVIL.jsonl --tokenizer EVIL --out EVIL.npy"],
    "generate": ["generate EVIL.mdsl --prompt EVIL --params EVIL.npz --steps 1"],
    "weights": ["weights EVIL.mdsl EVIL", "weights EVIL.mdsl EVIL.npz"],
    "compare": ["compare EVIL.mdsl", "compare EVIL.mdsl --html EVIL.html"],
    "cluster": ["cluster show EVIL.toml", "cluster show EVIL"],
    "simulate": [
        "simulate EVIL.mdsl --cluster h100 --trace EVIL.json",
        "simulate EVIL.mdsl --cluster h100 --against EVIL.mdsl",
        "simulate EVIL.mdsl --cluster EVIL.toml",
    ],
    "search": [
        "search EVIL.mdsl",
        "search EVIL.mdsl --write EVIL",
        "search EVIL.mdsl --write l",
        "search EVIL.json --graph",
        "search EVIL.mdsl --compare-methods",
    ],
    "advise": ["advise EVIL.mdsl --cluster h100", "advise EVIL.mdsl --cluster EVIL.toml"],
    "schedule": [
        "schedule gpipe --stages 2 --micro 2 --csv EVIL.csv --svg EVIL.svg",
        "schedule ./EVIL.mdsl",
    ],
    "render": ["render EVIL.mdsl --as jax", "render EVIL.mdsl --as dtensor -o EVIL.py"],
    "rows": ["rows EVIL"],
    "prove": ["prove EVIL"],
    "play": ["play EVIL"],
    "lsp": ["lsp EVIL"],
}
"""For each command, what it is called with: names of files, and of other things, are EVIL."""


def test_every_command_is_called() -> None:
    assert tuple(CALLS) == NAMES


@pytest.mark.parametrize(
    "command", [pytest.param(c, id=c) for each in CALLS.values() for c in each]
)
def test_no_sign_steers_what_shows_it(command: str, cli: Cli) -> None:
    np.savez("d.npz", x=np.ones((8, 2), np.float32))
    name = write(LEARN.replace(" = ", "  =  "), f"{EVIL}.mdsl")
    node = {"name": f"{EVIL}\n", "choices": [EVIL], "cost": [1.0]}
    write(json.dumps({"kind": "placement", "nodes": [node], "edges": []}), f"{EVIL}.json")
    before = Path(name).read_bytes()
    done = cli(*(word.replace("EVIL", EVIL) for word in command.split()))
    printed = done.out + done.err
    assert not STEERING.findall(printed), printed
    assert done.code == 0 or SHOWN in printed or command.startswith("generate")
    assert "MD0799" not in printed
    for path in Path().rglob("*"):
        if path.suffix in (".py", ".html", ".svg"):
            assert not STEERING.findall(path.read_text())
        if path.suffix == ".py":
            ast.parse(path.read_text())
    assert Path(name).read_bytes() == before or command.startswith(("fmt", "check", "search"))


@pytest.mark.parametrize("command", ["compile", "render --as jax"])
def test_a_line_end_in_a_name_is_no_line_of_a_program(command: str, cli: Cli) -> None:
    name = write(LEARN, "a\nimport os\n.mdsl")
    done = cli(*command.split(), name)
    assert done.code == 0
    assert "\nimport os\n.mdsl" not in done.out


def test_a_name_on_several_lines_is_told_on_one(cli: Cli) -> None:
    done = cli("compile", write(LEARN), "-o", "a\nwrote b.py")
    assert done.out.startswith("wrote a\\x0awrote b.py; run it: ")
    assert len(done.out.splitlines()) == 1


# --- the only places that print ------------------------------------------------------------------

ESCAPED = {
    "meshdsl/cli/app.py": "the version",
    "meshdsl/cli/common.py": "what escapes",
    "meshdsl/cli/compare.py": "a document, which is escaped",
    "meshdsl/cli/rows.py": "placements of an operator of the registry",
}
"""The files of commands that print without `say` or `say_text`, and what."""


def test_no_other_place_prints() -> None:
    root = Path(__file__).parents[2]
    found = {
        str(path.relative_to(root))
        for path in matching("meshdsl/cli/*.py")
        if re.search(r"typer\.echo\(|\bprint\(", path.read_text(encoding="utf-8"))
    }
    assert found == set(ESCAPED), "print it with `common.say` or `common.say_text`"
