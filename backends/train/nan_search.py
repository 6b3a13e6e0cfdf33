"""The origin of NaN and infinity: `device` is watched while it runs, statement by statement."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from types import FrameType
from typing import TYPE_CHECKING, Any

from meshdsl.backends.engines.failures import Failure, first_failure
from meshdsl.backends.engines.line_profiler import followed
from meshdsl.backends.runtime.array_files import PARSING
from meshdsl.backends.train.job import Trouble
from meshdsl.records import dataclass

if TYPE_CHECKING:
    import torch

    from meshdsl.backends.engines.in_process import LoadedProgram
    from meshdsl.backends.train.trainer import Trainer


INFINITE = re.compile(r"""float\(["']-?inf["']\)|\binf\b""")
"""A statement that makes infinities on purpose, such as a mask."""


@dataclass(frozen=True, slots=True)
class WatchedStatement:
    """One statement of `device`: the variables it writes and reads, and whether it writes `inf`.

    `received`: another device has made what it writes.
    """

    line: int
    writes: tuple[str, ...]
    reads: frozenset[str]
    infinite: bool
    received: bool = False


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


def statements_of(text: str) -> dict[int, WatchedStatement]:
    """The statements of `device` by each of their lines."""
    with PARSING:
        tree = ast.parse(text)
    device = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "device")
    return {
        line: _watched(node)
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


def _watched(node: ast.stmt) -> WatchedStatement:
    text = ast.unparse(node)
    is_infinite, is_received = bool(INFINITE.search(text)), ".receive(" in text
    return WatchedStatement(node.lineno, *_names(node), is_infinite, is_received)


class NonFiniteWatch:
    """Calls `device` and finds the statements with infinite or NaN results.

    `usual` are lines that have them in good steps: masks, and values that are not used later.
    """

    def __init__(self, program: LoadedProgram, text: str) -> None:
        self.program, self.statements = program, statements_of(text)
        self.usual: set[int] = set()
        self.findings: list[Finding] = []
        self._kinds: dict[str, str] = {}
        self._last: tuple[WatchedStatement | None, FrameType | None] = (None, None)

    def device(self, *arguments: Any) -> dict[str, torch.Tensor]:
        """Call `device`; afterwards `findings` are those of this call, in order."""
        # Parameters and states that have it before this step are not this step's doing.
        stored = dict(zip(("params", "states"), arguments[-2:], strict=True))
        self._kinds = {name: kind_of_values(values)[0] for name, values in stored.items()}
        self.findings, self._last = [], (None, None)
        return followed(self.program.device, self._line)(*arguments)

    def went_well(self) -> None:
        """Record that the last call was that of a good step."""
        self.usual.update(finding.line for finding in self.findings)

    def first(self) -> Finding | None:
        """The first finding of the last call that is not usual."""
        return next((f for f in self.findings if f.line not in self.usual), None)

    def _line(self, frame: FrameType, over: bool) -> None:
        last, where = self._last
        if last is not None and where is frame:
            self._look(last, frame.f_locals)
        self._last = (None, None) if over else (self.statements.get(frame.f_lineno), frame)

    def _look(self, statement: WatchedStatement, variables: Mapping[str, Any]) -> None:
        """Compare the results of a statement with its operands."""
        before = {self._kinds.get(name, "") for name in statement.reads}
        for name in statement.writes:
            kind, part = kind_of_values(variables.get(name))
            self._kinds[name] = kind
            new = kind == "nan" and "nan" not in before
            new = new or (kind == "inf" and before <= {""} and not statement.infinite)
            # Nor is what another device sent.
            new = new and not statement.received
            if new:
                loops = {k: v for k, v in variables.items() if type(v) is int}
                reads_inputs = "inputs" in statement.reads
                self.findings.append(
                    Finding(statement.line, part or name, kind, loops, reads_inputs)
                )


def kind_of_values(value: Any) -> tuple[str, str]:
    """`nan` or `inf` for a tensor that contains such a value, else empty; of a dict, and whose."""
    import torch

    if isinstance(value, dict):
        kinds = ((kind_of_values(each)[0], name) for name, each in value.items())
        return max(kinds, key=lambda pair: ("", "inf", "nan").index(pair[0]), default=("", ""))
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return "", ""
    if bool(value.isfinite().all().item()):
        return "", ""
    return "nan" if bool(value.isnan().any().item()) else "inf", ""


# --- the search among the last steps ------------------------------------------------------------


WATCHED = 20
"""Steps before the failed one that are watched statement by statement, which takes longer."""


def search(trainer: Trainer, loss: str) -> Trouble:
    """Rerun from the last checkpoint, or from the beginning, and find the origin.

    All devices take part. `loss` is the kind that was seen, empty where the loss was finite and a
    parameter was not.
    """
    seen = trainer.step
    step, finding = _again(trainer, seen, max(0, seen - WATCHED))
    if step is not None and step < seen - WATCHED:
        step, finding = _again(trainer, seen, step - 1)
    if step is None or finding is None:
        stopped = _is_stopped(trainer)
        return Trouble(seen, loss, None if step is None else step + 1, stopped=stopped)
    facts = {key: finding[key] for key in ("line", "name", "value", "given")}
    return Trouble(seen, loss, step + 1, device=finding["at"], **facts)


def _again(trainer: Trainer, seen: int, watched_from: int) -> tuple[int | None, Any]:
    """The first step (from 0) that went wrong, and the first statement in it, if it was watched."""
    ranks, held = trainer.ranks, trainer.held
    held.begin()
    if ranks.rank == 0:
        event = {"kind": "watch", "first": held.step + 1, "last": seen}
        trainer.control.tell(event)
    watches = dict[str, NonFiniteWatch]()
    for step in range(held.step, seen):
        trainer.control.begun()
        watched, (field, program) = step >= watched_from, trainer.at(step)
        text = trainer.programs.emitted.text_of(field)
        watch = watches.setdefault(field, NonFiniteWatch(program, text))
        outputs = trainer.forward(watch.device if watched else program.device, step)
        loss = outputs[trainer.program.LOSS].item()
        sound = math.isfinite(loss) and held.is_finite()
        if ranks.total(not sound):
            return step, _earliest(trainer, watch.first() if watched else None, text)
        watch.went_well()
        if _is_stopped(trainer):
            break
    return None, None


def _is_stopped(trainer: Trainer) -> bool:
    """Whether device 0 is to stop."""
    ranks = trainer.ranks
    return bool(ranks.first(int(trainer.control.stopping()) if ranks.rank == 0 else 0))


def _earliest(trainer: Trainer, mine: Finding | None, text: str) -> dict[str, Any] | None:
    """The first of all devices' findings in the order of the program of this text."""
    told = trainer.ranks.everyone(asdict(mine) if mine else None)
    findings = [{**finding, "at": rank} for rank, finding in enumerate(told) if finding]
    if not findings:
        return None
    failures = [Failure(f["at"], "", "", f["line"], f["loops"]) for f in findings]
    first = first_failure(text, failures)
    return next(finding for finding in findings if finding["at"] == first.device)
