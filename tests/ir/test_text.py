"""Every printed stage is read back to the same program."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from hypothesis import event, given, seed, settings

from meshdsl.device import parser as device_parser
from meshdsl.device import printer as device_printer
from meshdsl.device.verify import verify as verify_device
from meshdsl.diagnostics import DiagnosticError
from meshdsl.ir.parser import IRSyntaxError
from meshdsl.named import parser as named_parser
from meshdsl.named import printer as named_printer
from meshdsl.named.verify import verify as verify_named
from meshdsl.pipeline import lower_placed
from meshdsl.placed import parser as placed_parser
from meshdsl.placed import printer as placed_printer
from meshdsl.placed.verify import verify as verify_placed
from tests.programs.harness import compiled
from tests.programs.strategy import cases
from tests.report.golden import CASES, Case, made

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


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("stage", STAGES)
def test_examples(stage: str, case: Case) -> None:
    read_again(stage, getattr(made(case), stage))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_lowered_alike(case: Case) -> None:
    """What is read of a placed program becomes the same device program."""
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


@pytest.mark.parametrize(
    "line",
    [
        "%1 = relu %0",
        "%1 relu %0 : f32[a 4]",
        "%1 = relu %0 {dims=(a} : f32[a 4]",
        "%1 = relu %0 : f32[a 4",
        "%1 = relu %0 : f32[a 4] ?",
        "repeat a",
    ],
)
def test_what_is_no_line_is_refused(line):
    with pytest.raises(IRSyntaxError, match=r"%|repeat"):
        named_parser.parse_program(f"program p\n  input %0 x : f32[a 4]\n  {line}\n")
