"""Nothing is read that another statement has overwritten: emitted steps watched line by line.

A variable whose values change without an assignment to it was written to in place, itself or what
shows its memory. That is fine as long as no statement reads it any more.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

from meshdsl.backends import torch_text
from meshdsl.backends.draws import draws
from meshdsl.backends.in_process import load, local_tensors
from meshdsl.backends.local_dist import FILE
from meshdsl.backends.torch_text import ProgramText, emit
from meshdsl.ops.opdef import REGISTRY, lookup
from tests.device.test_aliases import COPIED, OPTIMIZERS
from tests.device.test_aliases import text_of as alias_text
from tests.training.programs import PROGRAMS
from tests.training.registry import Built, placed_on, programs_of, trained_operators
from tests.training.stepping import whole


def tensors(value: object) -> list[torch.Tensor]:
    """A tensor, or those of a list."""
    items = value if isinstance(value, list) else [value]
    return [x for x in items if isinstance(x, torch.Tensor)]


@dataclass
class Watch:
    """Watches `device` while it runs; `found` are the lines that read what was overwritten.

    `seen` has, by name, the value and copies of its tensors before the last statement.
    """

    text: str
    found: list[str] = field(default_factory=list)
    stale: set[str] = field(default_factory=set)
    seen: dict[str, tuple[object, list[torch.Tensor]]] = field(default_factory=dict)
    last: ast.stmt | None = None

    def __post_init__(self) -> None:
        tree = ast.parse(self.text)
        (device,) = (n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "device")
        self.statements: dict[int, ast.stmt] = {}
        for node in ast.walk(device):
            if isinstance(node, ast.Assign | ast.Expr | ast.Return | ast.Delete):
                lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
                self.statements.update(dict.fromkeys(lines, node))

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        code = frame.f_code
        if code.co_name != "device" or code.co_filename != FILE:
            return None
        statement = self.statements.get(frame.f_lineno)
        if event == "line" and statement is not self.last:
            self._about_to(statement, frame.f_locals)
        return self

    def _about_to(self, statement: ast.stmt | None, variables: dict[str, Any]) -> None:
        """Note what the last statement has changed, and look at what the next one reads."""
        meant = {n.id for n in stored(self.last)} if self.last else set()
        for name, value in variables.items():
            before, copies = self.seen.get(name, (None, []))
            now = tensors(value)
            if value is not before or name in meant:
                self.stale.discard(name)
            elif any(not same(x, y) for x, y in zip(now, copies, strict=False)):
                self.stale.add(name)
        self.seen = {n: (v, [x.clone() for x in tensors(v)]) for n, v in variables.items()}
        self.last = statement
        if statement is not None:
            read = {n.id for n in ast.walk(statement) if isinstance(n, ast.Name)}
            read -= {n.id for n in stored(statement)}
            if read & self.stale:
                self.found.append(f"{ast.unparse(statement)} reads {sorted(read & self.stale)}")


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())


def stored(statement: ast.stmt) -> Iterator[ast.Name]:
    """Names that a statement binds, lets go, or fills: `x`, or `x[0]`."""
    for node in ast.walk(statement):
        if isinstance(getattr(node, "ctx", None), ast.Store | ast.Del):
            name = node.value if isinstance(node, ast.Subscript) else node
            yield from [name] if isinstance(name, ast.Name) else []


def watched(emitted: ProgramText, arrays: dict[str, Any] | None = None) -> list[str]:
    """The statements of a step on one device that read what was overwritten."""
    program, watch = load(emitted.text), Watch(emitted.text)
    specs = (program.INPUTS, program.PARAMS, program.STATES)
    values = [local_tensors(program.MESH, s, arrays or {}, 0, range(1))[0] for s in specs]
    sys.settrace(watch)
    try:
        with torch.inference_mode():
            program.device(0, {}, *values)
    finally:
        sys.settrace(None)
    return watch.found


def step_of(text: str) -> ProgramText:
    made = whole(text)
    return emit(made["device"], draws(made["named"]))


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_read_nothing_overwritten(name: str) -> None:
    assert watched(step_of(PROGRAMS[name].text)) == []


@pytest.mark.parametrize("name", COPIED)
def test_parameters_that_share_memory_are_read_before(name: str) -> None:
    for optimizer in OPTIMIZERS:
        assert watched(step_of(alias_text(COPIED[name][0], optimizer))) == []


@pytest.mark.parametrize("name", trained_operators())
def test_operators_read_nothing_overwritten(name: str) -> None:
    for built in programs_of(name, most=1):
        assert watched(text_of(built), built.arrays) == []


def text_of(built: Built) -> ProgramText:
    assert built.program is not None
    return emit(placed_on(built.program, "d:1", "", "deferred"), {})


def test_a_row_that_is_taken_for_a_copy_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REGISTRY, "gather", replace(lookup("gather"), shows=None))
    found = [watched(text_of(b), b.arrays) for b in programs_of("gather", most=1)]
    assert any("reads ['t" in line for lines in found for line in lines)


Copied = Callable[[object], frozenset[object]]


@pytest.mark.parametrize("name", [n for n, (_, names) in COPIED.items() if names])
def test_an_update_without_a_copy_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing: Copied = lambda program: frozenset()  # noqa: E731
    monkeypatch.setattr(torch_text, "copied_first", nothing)
    assert watched(step_of(alias_text(COPIED[name][0], "sgd(lr=1.0)")))


def test_what_is_watched_is_what_happens() -> None:
    """By hand: a write through a view is seen, and reading what has been assigned anew is fine."""
    body = "y = x[0]\n    y.add_(1)\n    x = x * 2\n    z = y + x\n    return {'z': z}"
    text = f"import torch\ndef device(x):\n    {body}\n"
    names: dict[str, Any] = {}
    exec(compile(text, FILE, "exec"), names)
    watch = Watch(text)
    sys.settrace(watch)
    try:
        names["device"](torch.tensor(np.ones((2, 2))))
    finally:
        sys.settrace(None)
    assert watch.found == ["x = x * 2 reads ['x']"]
