"""Remedies: rules that make a program send less, each compiled before it is offered.

Each collective suggests edits of the layout by one rule. An edit is offered if the program compiles
under it, without a new warning, sends fewer bytes, and costs less by what its plan minimises. How
much is tried is bounded by a count of work, never by the clock.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, TypedDict

from meshdsl.carets import fix_facts
from meshdsl.device.alike import computed
from meshdsl.device.ir import Bucket, DeviceProgram, Move, walk
from meshdsl.device.memory import memory
from meshdsl.device.traffic import busiest
from meshdsl.diagnostics import Diagnostic, DiagnosticError, Diagnostics, Fix
from meshdsl.named import ir as named
from meshdsl.named.ir import Value
from meshdsl.placed.layout import declared_layout
from meshdsl.placed.place import WALKS, cost
from meshdsl.placed.placements import Placement
from meshdsl.placed.rule_edits import RuleEdit
from meshdsl.records import dataclass
from meshdsl.report.document import human
from meshdsl.syntax import ast

if TYPE_CHECKING:
    from meshdsl.pipeline import Compilation, Options
    from meshdsl.report.schema import CollectiveFacts, MovedFacts, RemedyFacts, ReportFacts

MOST_WORK = 600
"""The work of all trials for one report: operators placed, each times 2 to the number of axes.

However large a program is, one edit is tried: the first for the dearest collective.
"""

TRIED_BY_A_WALK = 75
"""The work of placing a program above which an edit is tried by a walk before it is planned."""

WALKS_IN_A_PLAN = 4
"""So many walks are about as much work as a plan."""

MOST_TRIED = 48
"""The most edits looked at, those counted that are refused before anything is placed."""

SLIGHT = 0.01
"""A share of memory, or of the FLOPs, that is no price worth naming."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """An edit that was compiled; per device, what it saves and what it costs.

    `fix` is none where the layout is not written as text. `saves` are bytes sent in a step, `holds`
    the bytes that are held more at the worst moment, a share `grows` of the peak before; `computes`
    is the quotient of FLOPs after it and before.
    """

    title: str
    fix: Fix | None
    saves: int
    holds: int
    grows: float
    computes: float

    @property
    def rank(self) -> tuple[bool, int, int]:
        """The best first: those that compute no more, then by what they save, and hold."""
        return self.computes > 1 + SLIGHT, -self.saves, self.holds

    def __str__(self) -> str:
        text = f"{self.title} (saves {human(self.saves)})"
        price = [f"holds {human(self.holds)} more"] if self.grows > SLIGHT else []
        if self.computes > 1 + SLIGHT:
            price.append(f"computes {self.computes:.3g} times as much")
        return f"{text}, which {' and '.join(price)}" if price else text


def with_remedies(report: ReportFacts, made: Compilation) -> ReportFacts:
    """The report of a compilation with the remedies of each collective, and of all of them."""
    layout = declared_layout(made.declarations, made.options.layout, made.options.sbp)
    if layout is None:
        return report
    moves = [
        n
        for n, _ in walk(made.device.body)
        if isinstance(n, Move | Bucket) and n.step.moves and not n.step.tier
    ]
    facts_of = dict(zip(moves, report["collectives"], strict=True))
    dearest = sorted(facts_of, key=lambda node: -facts_of[node]["wire_bytes"])
    node = made.declarations.layouts[layout]
    suggested = {move: suggestions(move, made.device, node) for n in dearest for move in n.moves}
    tried = Trials(made, layout).remedies(_in_turn(list(suggested.values())))

    def of(moves: Iterable[Move]) -> _RemedyTexts:
        remedies = [tried[edit] for move in moves for edit in suggested[move] if edit in tried]
        best = [str(remedy) for remedy in _best_first(remedies)]
        return {"remedy": next(iter(best), ""), "remedies": best}

    def told(node: Move | Bucket, facts: CollectiveFacts) -> CollectiveFacts:
        pairs = zip(facts["parts"], node.moves, strict=True) if facts["parts"] else ()
        parts: list[MovedFacts] = [{**part, **of([move])} for part, move in pairs]
        return {**facts, **of(node.moves), "parts": parts}

    collectives = [told(node, facts) for node, facts in facts_of.items()]
    remedies = [_facts(remedy, layout) for remedy in _best_first(tried.values())]
    return {**report, "collectives": collectives, "remedies": remedies}


class _RemedyTexts(TypedDict):
    """The remedies of a collective, in its report."""

    remedy: str
    remedies: list[str]


def _best_first(remedies: Iterable[Remedy]) -> list[Remedy]:
    return sorted(dict.fromkeys(remedies), key=lambda remedy: remedy.rank)


def _facts(remedy: Remedy, layout: str) -> RemedyFacts:
    return {
        "title": remedy.title,
        "summary": str(remedy),
        "layout": layout,
        "saves_bytes": remedy.saves,
        "holds_bytes": remedy.holds,
        "computes": remedy.computes,
        "fixes": [] if remedy.fix is None else [fix_facts(remedy.fix)],
    }


def _in_turn(each: Sequence[tuple[RuleEdit, ...]]) -> Iterator[RuleEdit]:
    """The first suggestion of each, then the second of each, and so on; none twice."""
    rounds = itertools.zip_longest(*each)
    return iter(dict.fromkeys(edit for edits in rounds for edit in edits if edit is not None))


# --- what is suggested ---------------------------------------------------------------------------


def suggestions(move: Move, program: DeviceProgram, layout: ast.LayoutDecl) -> tuple[RuleEdit, ...]:
    """The edits that might make a collective unnecessary or cheaper, the likeliest first."""
    written = program.mesh.written
    return tuple(replace(e, axes=written(e.axes)) for e in _suggestions(move, program, layout))


def _suggestions(
    move: Move, program: DeviceProgram, layout: ast.LayoutDecl
) -> tuple[RuleEdit, ...]:
    value, step = move.source.value, move.step
    here, axes = move.source.placement, step.axes
    if step.kind in ("all_reduce", "reduce_scatter"):
        return tuple(_split_further(value, here, axes, program))
    if value.role in ("param", "state") and not value.is_loaded:
        return tuple(_stored_as_used(value, here, axes, program, layout))
    dims = (step.dim,) if step.dim else tuple(d for d in value.type.names if here.axes_of(d))
    edits = [
        RuleEdit(selector, dim, _less(here.axes_of(dim), axes))
        for selector in _selectors(value, program)
        for dim in dims
        if value.type.has(dim)
    ]
    for reader in _readers(value, program):
        edits += _split_further(reader, _placement_of(reader, program), axes, program)
    edits += _split_further(value, here.without_dim(step.dim) if step.dim else here, axes, program)
    return tuple(dict.fromkeys(edits))


def _split_further(
    value: Value, here: Placement, axes: tuple[str, ...], program: DeviceProgram
) -> Iterator[RuleEdit]:
    """Rules that split a value over axes along one of its dims."""
    ways = program.mesh.size(*axes)
    for selector, dim in itertools.product(_selectors(value, program), value.type.names):
        split = here.axes_of(dim)
        of_each = value.type.size(dim) // program.mesh.size(*split)
        if set(axes).isdisjoint(split) and of_each % ways == 0:
            yield RuleEdit(selector, dim, (*split, *axes))


def _stored_as_used(
    value: Value,
    here: Placement,
    axes: tuple[str, ...],
    program: DeviceProgram,
    layout: ast.LayoutDecl,
) -> Iterator[RuleEdit]:
    """Edits after which a parameter is stored as it is used."""
    for dim, rule in program.placed.causes.get(value, {}).items():
        if rule.selector not in (("params",), ("state",)):
            continue
        split = here.axes_of(dim)
        edit = RuleEdit(rule.selector, dim, _less(split, axes))
        removal = RuleEdit(rule.selector, dim, program.mesh.written(split), removed=True)
        yield removal if not edit.axes and removal.is_of(layout) else edit


def _less(axes: tuple[str, ...], less: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(axis for axis in axes if axis not in less)


def _selectors(value: Value, program: DeviceProgram) -> Iterator[tuple[str, ...]]:
    """The selectors of a tensor of the user's own text: rules name no other."""
    if value.role == "grad":
        yield ("grads",)
    elif value.is_nameable:
        yield (value.label,)


def _placement_of(value: Value, program: DeviceProgram) -> Placement:
    """The placement that a value settles in."""
    return next(t.placement for t in program.placed.tensors if t.value is value)


def _readers(value: Value, program: DeviceProgram) -> list[Value]:
    """The named results of the operators that read a value, past those without a name, in order."""
    reading = _reading(program)
    pending = list(reading.by_value.get(value, ()))
    seen, readers = set(pending), []
    while pending:
        number = heapq.heappop(pending)
        outs = reading.operators[number].outs
        readers += [v for v in outs if v.name is not None and v in reading.settled]
        for unnamed in (v for v in outs if v.name is None):
            for later in reading.by_value.get(unnamed, ()):
                if later > number and later not in seen:
                    seen.add(later)
                    heapq.heappush(pending, later)
    return readers


class _Reading(NamedTuple):
    """The operators of the forward pass, those that read each value by number, what is placed."""

    operators: list[named.NamedOp]
    by_value: dict[Value, list[int]]
    settled: frozenset[Value]


@functools.lru_cache(maxsize=1)
def _reading(program: DeviceProgram) -> _Reading:
    operators = [op for op in named.walk(program.placed.named.body) if op.phase == "forward"]
    by_value: dict[Value, list[int]] = {}
    for number, op in enumerate(operators):
        for value in dict.fromkeys(op.ins):
            by_value.setdefault(value, []).append(number)
    return _Reading(operators, by_value, frozenset(t.value for t in program.placed.tensors))


# --- what is tried -------------------------------------------------------------------------------


class Trials:
    """Edits of a declared layout of a compilation, tried until the work is used up."""

    def __init__(self, made: Compilation, layout: str) -> None:
        self.made, self.layout = made, layout
        self.node = made.declarations.layouts[layout]
        self.price = made.options.search(made.timing).price
        self.cost = cost(made.placed, self.price)
        self.warned = set(map(_warning, made.diagnostics))
        operators = sum(1 for _ in named.walk(made.named.body))
        self.work = operators << len(made.placed.mesh.axes)
        self.worked = 0

    def remedies(self, edits: Iterable[RuleEdit]) -> dict[RuleEdit, Remedy]:
        """Those of some edits that are remedies."""
        remedies = dict[RuleEdit, Remedy]()
        for edit in itertools.islice(edits, MOST_TRIED):
            if self.worked and self.worked + self._least_work > MOST_WORK:
                break
            after = self._placed(edit)
            remedy = None if after is None else self._remedy(edit, after)
            if remedy is not None:
                remedies[edit] = remedy
        return remedies

    @property
    def _least_work(self) -> int:
        """The work of a trial that comes to nothing: of a large program it ends after a walk."""
        return self.work // WALKS_IN_A_PLAN if self._walks_first else self.work

    @property
    def _walks_first(self) -> bool:
        return self.work > TRIED_BY_A_WALK and self.made.options.reduce == "optimal"

    def _placed(self, edit: RuleEdit) -> Compilation | None:
        """The program after an edit, placed; None where it costs no less, or is refused."""
        options = self.made.options
        if self._walks_first and self._cheaper(edit, replace(options, reduce=WALKS[-1])) is None:
            return None
        return self._cheaper(edit, options)

    def _cheaper(self, edit: RuleEdit, options: Options) -> Compilation | None:
        """The program placed after an edit; None where it costs no less, or is refused.

        Nor may anything be newly warned of.
        """
        after = self.made.under(
            options, Diagnostics(), edit.on(self.made.declarations, self.layout)
        )
        is_walk = options.reduce != self.made.options.reduce
        try:
            placed = after.placed_within(self.cost[0]) if is_walk else after.placed
        except DiagnosticError:
            return None
        self.worked += self.work // WALKS_IN_A_PLAN if is_walk else self.work
        warned = {_warning(d) for d in after.diagnostics if d.severity != "note"}
        falls = placed is not None and cost(placed, self.price) < self.cost
        return after if falls and warned <= self.warned else None

    def _remedy(self, edit: RuleEdit, after: Compilation) -> Remedy | None:
        """What an edit saves, where devices send noticeably fewer bytes."""
        try:
            now, then = self._now, _Figures.of(after.device)
        except DiagnosticError:
            return None
        saves, holds = now.sent - then.sent, then.peak - now.peak
        if saves <= SLIGHT * now.sent:
            return None
        computes = then.flops / max(now.flops, 1)
        fix = edit.fix(self.node)
        return Remedy(edit.title(self.node), fix, saves, holds, holds / max(now.peak, 1), computes)

    @functools.cached_property
    def _now(self) -> _Figures:
        """The figures of the program before an edit."""
        return _Figures.of(self.made.device)


class _Figures(NamedTuple):
    """Per device: the bytes sent in a step, the peak of memory in bytes, and the FLOPs."""

    sent: int
    peak: int
    flops: int

    @classmethod
    def of(cls, program: DeviceProgram) -> _Figures:
        return cls(sent(program), memory(program)["peak"], computed(program))


def _warning(diagnostic: Diagnostic) -> tuple[str, str]:
    """What makes two warnings the same: not their place, which an edit moves."""
    return diagnostic.code, diagnostic.message


def sent(program: DeviceProgram) -> int:
    """The bytes that a device sends in a step: the total of a report."""
    done = busiest(program).done.items()
    return sum(each.bytes for node, each in done if node.phase != "output")
