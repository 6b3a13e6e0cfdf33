"""Pipelines with any two options together: the step of one device, and the bytes that are told."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from meshdsl.placed.place import POLICIES
from tests.covering import Case, covering
from tests.pipelines.kinds import KINDS, is_made, scheduled, stages_in
from tests.pipelines.test_programs import BY_ROWS, compiled, hold_in_turn
from tests.pipelines.test_programs import PROGRAMS as SEVERAL
from tests.pipelines.test_storage import KEPT, OTHERS, TEXT
from tests.pipelines.test_storage import RULES as STORED
from tests.pipelines.test_uneven import STACKS

PROGRAMS = {**SEVERAL, "stored": TEXT, "other orders": OTHERS, **STACKS}
MESHES = {
    "pipe:2": "l -> pipe",
    "pipe:4": "l -> pipe",
    "d:2,pipe:2": "l -> pipe, b -> d",
    "pipe:2,tp:2": "l -> pipe, m -> tp",
    "d:2,pipe:2,tp:2": "l -> pipe, b -> d, m -> tp",
}
STORAGES = {"where it is read": "", **STORED, **KEPT}
LAYERS = {
    2: ("2 2", "3 5", "7 1"),
    4: ("1 1 1 1", "1 3 2 2", "1 1 1 2"),
    8: ("1 1 1 1 1 1 1 1", "1 2 1 1 3 1 1 2", "2 1 1 1 1 1 1 1"),
}
"""Iterations of as many stages: equal ones first."""

FACTORS: dict[str, tuple[Any, ...]] = {
    "storage": tuple(STORAGES),
    "program": tuple(PROGRAMS),
    "kind": tuple(KINDS),
    "mesh": tuple(MESHES),
    "optimizer": ("sgd(lr=0.1", "momentum(lr=0.1", "adamw(lr=0.01, clip=0.3", "adafactor(lr=0.01"),
    "policy": POLICIES,
    "micro": (1, 2, 4, 8),
    "accumulate": (False, True),
    "layers": (0, 1, 2),
    "reduce": ("last", "each"),
    "recompute": (False, True),
}


DECLARED = {
    name: set(re.findall(r"(\w+) =", text.strip().partition("\n")[0]))
    for name, text in PROGRAMS.items()
}
"""The dims of each program."""
SPOKEN_OF = {name: set(re.findall(r"(\w+) ->", rules)) for name, rules in STORAGES.items()}
"""The dims that each storage has rules for."""
IN_BLOCKS = {name for name, rules in STORAGES.items() if "grads: l -> (pipe" in rules}
OVER_DATA = {name for name, rules in STORAGES.items() if re.search(r"\bd\b", rules)}


def has_dims(case: Case) -> bool:
    """The dims that the storage speaks of are those of the program."""
    return SPOKEN_OF[case["storage"]] <= DECLARED[case["program"]]


def has_axes(case: Case) -> bool:
    return case["storage"] not in OVER_DATA or "d:" in case["mesh"]


def has_blocks(case: Case) -> bool:
    """Gradients cannot lie in blocks that stages do not have, behind each pass (MD0335)."""
    several = case["kind"].startswith("4 stages")
    return not (several and case["reduce"] == "each" and case["storage"] in IN_BLOCKS)


RULES: dict[tuple[str, ...], Callable[[Case], bool]] = {
    ("storage", "program"): has_dims,
    ("storage", "mesh"): has_axes,
    ("program", "mesh"): lambda case: case["mesh"] not in BY_ROWS.get(case["program"], ()),
    ("program", "accumulate"): lambda case: (
        not case["accumulate"] or case["program"] != "other orders"
    ),
    ("accumulate", "micro"): lambda case: not case["accumulate"] or case["micro"] > 1,
    ("kind", "micro", "mesh"): is_made,
    ("storage", "kind", "reduce"): has_blocks,
}
"""What is refused is no case here: that it is, is tested where it is refused."""


def layout_of(case: Case) -> str:
    """The rules of a mesh, and of a storage; one that splits all tensors takes the batch's axis."""
    rules, stored = MESHES[case["mesh"]], STORAGES[case["storage"]]
    if re.search(r"(^|, )\w+ -> d\b", stored):
        rules = rules.replace(", b -> d", "")
    return f"{rules}, {stored}" if stored else rules


def program_of(case: Case) -> tuple[str, str]:
    """The text of a case, with the layers of its stages, and its schedule."""
    layers = LAYERS[stages_in(case)][case["layers"]]
    options = [f'layers="{layers}"', f"reduce={case['reduce']}"]
    options += ["recompute=stage"] if case["recompute"] else []
    options = options if case["layers"] else options[1:]
    more = f", accumulate={case['micro']})" if case["accumulate"] else ")"
    text = PROGRAMS[case["program"]].replace("OPT", case["optimizer"] + more).replace("H,", "5,")
    text = text.replace("l = 4", f"l = {sum(map(int, layers.split()))}")
    text = re.sub(r"\bb = \d+", "b = 16", text)
    if case["accumulate"]:
        return text, f"with {case['schedule']}({', '.join(options)})"
    return text, f"with {case['schedule']}[b]({case['micro']}, {', '.join(options)})"


CASES = scheduled(covering(FACTORS, RULES, apart=("storage", "program")))
"""Any two options but a storage and a program, which `test_storage.py` and others draw together."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_a_step_is_that_of_one_device(case: Case) -> None:
    """Every eighth device program is printed, read back and lowered alike, and has a report."""
    text, use = program_of(case)
    made = compiled(text, case["mesh"], layout_of(case), use, case["policy"])
    hold_in_turn(CASES.index(case), made, text)
