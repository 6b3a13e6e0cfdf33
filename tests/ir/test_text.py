"""Every printed stage is read back to the same program."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from hypothesis import event, given, seed, settings

from meshdsl.device import printer as device_printer
from meshdsl.device.verify import verify as verify_device
from meshdsl.diagnostics import DiagnosticError
from meshdsl.named import printer as named_printer
from meshdsl.named.verify import verify as verify_named
from meshdsl.pipeline import lower_placed
from meshdsl.placed import printer as placed_printer
from meshdsl.placed.verify import verify as verify_placed
from tests.ir_text import device as device_parser
from tests.ir_text import named as named_parser
from tests.ir_text import placed as placed_parser
from tests.ir_text.generic import IRSyntaxError
from tests.programs.harness import compiled
from tests.programs.strategy import cases
from tests.report.golden import WHOLE, Case, made

STAGES: dict[str, tuple[ModuleType, ModuleType]] = {
    "named": (named_printer, named_parser),
    "placed": (placed_printer, placed_parser),
    "device": (device_printer, device_parser),
}
VERIFY: dict[str, Callable[[Any], None]] = {
    "named": verify_named,
    "placed": verify_placed,
    "device": verify_device,
}


def read_again(stage: str, program: Any) -> Any:
    """The program read from its text, whose text must be the same."""
    printer, parser = STAGES[stage]
    text = printer.print_program(program)
    again = parser.parse_program(text)
    assert printer.print_program(again) == text
    VERIFY[stage](again)
    return again


@pytest.mark.parametrize("case", WHOLE, ids=lambda case: case.name)
def test_examples(case: Case) -> None:
    """A placed program that is read back is lowered to the same device program."""
    for stage in ("named", "device"):
        read_again(stage, getattr(made(case), stage))
    again = read_again("placed", made(case).placed)
    # A reshard is read with the source line of the operator before it.
    assert statements(lower_placed(again)) == statements(made(case).device)


def statements(program: Any) -> list[str]:
    """The lines of a device program less those of its source."""
    lines = device_printer.print_program(program).splitlines()
    return [line for line in lines if not line.strip().startswith("#")]


@seed(0)
@settings(max_examples=int(os.environ.get("MESHDSL_CASES", "40")))
@given(case=cases())
def test_random_programs(case):
    try:
        stages = compiled(case)
    except DiagnosticError:
        event("refused")
        return
    for stage in STAGES:
        read_again(stage, getattr(stages, stage))


INPUT = "  input %0 x : f32[a 4]\n"
LOOP = "  repeat k 3\n    carry %1 h : f32[a 4] = %0\n"
PLACED_HEAD = "program p, mesh m { data: 2 }, layout l, reduce deferred\n"
DEVICE_HEAD = "program p on each of 2 devices, mesh m { data: 2 }\n"

REFUSED = [
    ("named", "", "a program has one first line"),
    ("named", "program p\nprogram q\n", "a program has one first line"),
    ("named", "prog p\n", "line 1: no head of a named program: prog p"),
    ("named", "program p\n  input %0 x : f33[a 4]\n", "line 2: `f33` is not known"),
    ("named", "program p\n  input %0 x : f32[a 4\n", "line 2: `,` is missing at the end"),
    ("named", "program p\n  input %0 x : f32[a 4] ?\n", "line 2: it has a sign that means nothing"),
    ("named", "program p\n  input %0 x : f32[a 4] of\n", "line 2: it ends too early"),
    ("named", f"program p\n{INPUT}  input %1 u : f32[a 5]\n", "dim a is of two sizes: 4 and 5"),
    ("named", f"program p\n{INPUT}\n  %1 = relu %0\n", "line 4: it ends too early"),
    ("named", f"program p\n{INPUT}  %1 relu %0 : f32[a 4]\n", "line 3: `,` is missing before `%0`"),
    ("named", f"program p\n{INPUT}  %1 = rely %0 : f32[a 4]\n", "line 3: `rely` is not known"),
    ("named", f"program p\n{INPUT}  %1 = relu %2 : f32[a 4]\n", "line 3: `%2` is not known"),
    ("named", f"program p\n{INPUT}  %0 = relu %0 : f32[a 4]\n", "line 3: %0 is made twice"),
    ("named", f"program p\n{INPUT}  %1 = relu %0 : f32[a 4] [backward]\n", "`[` is one too many"),
    ("named", f"program p\n{INPUT}  return %0\n", "line 3: `=` is missing at the end: return %0"),
    ("named", f"program p\n{INPUT}  repeat k\n", "line 3: it ends too early: repeat k"),
    ("named", f"program p\n{INPUT}{LOOP}", "line 3: no `next` of %1: repeat k 3"),
    ("named", f"program p\n{INPUT}{LOOP}    next %2 = %1; at the end %3\n", "line 5: `%2` is not"),
    (
        "named",
        f"program p\n{INPUT}  repeat k 3\n    slice %1 : f32[] = %0[a]\n",
        "`[ k ]` is missing",
    ),
    ("placed", "program p\n", "line 1: no head of a placed program"),
    ("placed", f"{PLACED_HEAD}  input %0 x : f32[a@rows 4]\n", "line 2: `rows` is not known"),
    (
        "placed",
        f"{PLACED_HEAD}{INPUT}  %1 = reshard %0 : f32[a@data 4]\n    slide a over data\n",
        "line 4: `slide` is no step: slide a over data",
    ),
    ("device", "program p\n", "line 1: no head of a device program"),
    ("device", f"{DEVICE_HEAD}  y = wait q\n", "line 2: `q` is not known"),
    (
        "device",
        f"{DEVICE_HEAD}  input x : f32[] = x\n  bucket of 2, all_gather\n    y = relu x : f32[]\n",
        "line 4: no collective: y = relu x",
    ),
]


@pytest.mark.parametrize(("stage", "text", "message"), REFUSED)
def test_what_is_no_line_is_refused_with_its_number(stage: str, text: str, message: str) -> None:
    with pytest.raises(IRSyntaxError, match=re.escape(message)):
        STAGES[stage][1].parse_program(text)


def test_comments_are_skipped() -> None:
    text = f"program p\n{INPUT}  # what follows is never negative\n  %1 y = relu %0 : f32[a 4]\n"
    again = named_printer.print_program(named_parser.parse_program(text))
    assert again == "program p\n  input  %0 x : f32[a 4]\n  %1 y = relu %0 : f32[a 4]\n"
