"""Where a number first stops being one: `device` watched while it runs, statement by statement."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from meshdsl.backends.engines.failures import PARSING

if TYPE_CHECKING:
    import torch

    from meshdsl.backends.engines.in_process import Program

INFINITE = re.compile(r"""float\(["']-?inf["']\)|\binf\b""")
"""A statement that makes infinities on purpose, such as a mask."""


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement of `device`: the variables it writes and reads, and whether it writes `inf`."""

    line: int
    writes: tuple[str, ...]
    reads: frozenset[str]
    infinite: bool


@dataclass(frozen=True, slots=True)
class Finding:
    """A statement whose result is `nan` or `inf` though its operands were not.

    `given` says that it reads an input.
    """

    line: int
    name: str
    value: str
    loops: Mapping[str, int]
    given: bool = False


def statements_of(text: str) -> dict[int, Statement]:
    """The statements of `device` by each of their lines."""
    with PARSING:
        tree = ast.parse(text)
    device = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "device")
    return {
        line: Statement(node.lineno, *_names(node), _is_infinite(node))
        for node in _simple(device.body)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def _simple(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements without others inside, those of loops and branches included."""
    for node in body:
        inner = [*getattr(node, "body", []), *getattr(node, "orelse", [])]
        if inner:
            yield from _simple(inner)
        elif isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Expr):
            yield node


def _names(node: ast.stmt) -> tuple[tuple[str, ...], frozenset[str]]:
    names = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
    reads = frozenset(n.id for n in names if isinstance(n.ctx, ast.Load))
    writes = tuple(n.id for n in names if isinstance(n.ctx, ast.Store))
    if isinstance(node, ast.AugAssign):
        reads |= set(writes)
    # A call for its effect writes into what it is given.
    return writes if not isinstance(node, ast.Expr) else tuple(sorted(reads)), reads


def _is_infinite(node: ast.stmt) -> bool:
    return bool(INFINITE.search(ast.unparse(node)))


class Watch:
    """Calls `device` and finds what became infinite or NaN in it.

    `usual` are lines that do so in steps that go well: masks, and what is left out later.
    """

    def __init__(self, program: Program, text: str) -> None:
        self.program, self.statements = program, statements_of(text)
        self.usual: set[int] = set()
        self.findings: list[Finding] = []
        self._kinds: dict[str, str] = {}
        self._last: Statement | None = None

    def device(self, *arguments: Any) -> dict[str, torch.Tensor]:
        """Call `device`; afterwards `findings` holds what was found, in order."""
        self.findings, self._kinds, self._last = [], {}, None
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            outputs: dict[str, torch.Tensor] = self.program.device(*arguments)
        finally:
            sys.settrace(before)
        return outputs

    def went_well(self) -> None:
        """The last call was that of a good step."""
        self.usual.update(finding.line for finding in self.findings)

    def first(self) -> Finding | None:
        """The first finding of the last call that is not usual."""
        return next((f for f in self.findings if f.line not in self.usual), None)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if frame.f_code is self.program.device.__code__ else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if self._last is not None:
            self._look(self._last, frame.f_locals)
        self._last = self.statements.get(frame.f_lineno)
        return self._line

    def _look(self, statement: Statement, variables: Mapping[str, Any]) -> None:
        """Compare what a statement has made with what it was made of."""
        before = {self._kinds.get(name, "") for name in statement.reads}
        for name in statement.writes:
            kind = kind_of_values(variables.get(name))
            self._kinds[name] = kind
            new = kind == "nan" and "nan" not in before
            new = new or (kind == "inf" and before <= {""} and not statement.infinite)
            # What stood in a parameter or a state before this step is not this step's doing.
            if new and not statement.reads & {"params", "states"}:
                loops = {k: v for k, v in variables.items() if type(v) is int}
                given = "inputs" in statement.reads
                self.findings.append(Finding(statement.line, name, kind, loops, given))


def kind_of_values(value: Any) -> str:
    """`nan` or `inf` for a tensor that holds such a value, else nothing."""
    import torch

    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return ""
    if bool(value.isfinite().all().item()):
        return ""
    return "nan" if bool(value.isnan().any().item()) else "inf"
