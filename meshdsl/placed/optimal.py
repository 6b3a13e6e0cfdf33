"""When to reduce, decided for the whole program at once: the fewest bytes, by integer programming.

Every operator picks one combination of its rows, every value the placement it settles in, and every
version that somebody reads is either that one or made from it; from a version that is there,
whatever costs nothing (a slice, a zero-fill) may be made too. The sum of the bytes of all reshards,
counted with the trips of loops, is minimised by HiGHS; among the least, collectives, then FLOPs.
Values keep the splits that rules demand. On axes no rule speaks of they may be whole, partial, or
split.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator

from meshdsl.named import ir as named
from meshdsl.named.ir import Op, Value
from meshdsl.ops.opdef import ReduceOp
from meshdsl.placed.choose import Chooser, Want, call_of, legal_rows
from meshdsl.placed.layout import Layout
from meshdsl.placed.optimal_targets import Targets
from meshdsl.placed.optimal_versions import Versions
from meshdsl.placed.plan import Combination, Decision, Plan
from meshdsl.placed.reshard import route
from meshdsl.placed.sbp import Component, Mesh, Partial, Placement, Split
from meshdsl.placed.signatures import Row
from meshdsl.placed.storage import is_load
from meshdsl.placed.zero_one import TooManyVariables, ZeroOne

WIDE_VARIABLES = 8_000
"""Beyond this many, splits on free axes are only those that some rule knows."""

MOST_VARIABLES = 60_000
"""Beyond this many the search is not tried at all."""

MOST_OPERATORS = 400
"""Beyond this many operators it is not tried either."""

SECONDS = 6.0
"""How long the search for the optimum may take."""


def solve(program: named.Program, layout: Layout) -> Plan | None:
    """The plan that sends the fewest bytes; None where the search is too large or too slow.

    `program` is rewritten: it has no composite whose own dim a rule splits, and no n-ary einsum.
    Where splits along every dim are too many, only those that rules know are considered, and the
    plan is not proven least.
    """
    plan = Model(program, layout).plan()
    return plan or Model(program, layout, narrow=True).plan()


class Model:
    """The program as variables and constraints; what rules demand is `_ruled`."""

    most_combinations = MOST_VARIABLES

    def __init__(self, program: named.Program, layout: Layout, narrow: bool = False) -> None:
        self.program, self.narrow = program, narrow
        self.layout = layout
        self.mesh: Mesh = layout.mesh
        self.returned_values = {o.value for o in program.outputs}
        # Where no rule splits anything nothing is partial either: such axes are left alone.
        ruled = self._ruled_axes()
        self.axes = tuple(a for a, n in self.mesh.axes if n > 1 and a in ruled)
        self.ops = self._arising()
        self.lp = ZeroOne(MOST_VARIABLES if narrow else WIDE_VARIABLES)
        self.trips: dict[Value, int] = {}
        self.fixed: dict[Value, Placement] = {}
        self.combinations: dict[Op, list[Combination]] = {}
        self.chosen: dict[Op, list[int]] = {}
        self.settled: dict[Value, dict[Placement, int]] = {}
        self.versions = Versions(self.lp, self.mesh, self.settled, self.trips)
        self.readers: dict[Value, set[Placement]] = {}
        self.carries: list[named.Carry] = []
        self.sliced: dict[Value, set[str]] = {}
        self.targets = Targets(layout, self.axes, self.ops, narrow, self.sliced)
        self.shared: list[tuple[Value, Value, str]] = []
        self.collected: list[named.Collected] = []
        self.complete = (
            not narrow
        )  # not either where a stack that lies split along its loop is read

    def plan(self) -> Plan | None:
        """The least plan; None where the search is too large or too slow."""
        if sum(1 for _ in named.walk(self.program.body)) > MOST_OPERATORS:
            return None
        try:
            return self.solve() if self.build() else None
        except TooManyVariables:
            return None

    def _arising(self) -> set[ReduceOp]:
        """Operations of the partial values that can come about: sums, and what reduces here."""
        calls = {call_of(op) for op in named.walk(self.program.body)}
        made = [r for c in calls for r in legal_rows(c) if not _partial_ops(r.ins)]
        sums: set[ReduceOp] = {"sum"}
        return sums.union(*(_partial_ops(row.outs) for row in made))

    # --- what there is to choose -------------------------------------------------------------

    def build(self) -> bool:
        """Set up the program; False when it would be too large."""
        for value in _given(self.program):
            self._fix(value, self._ruled(value), 1)
        self._collect(self.program.body, 1)
        # What an inner loop slices further lies, outside of the outer one, as it does inside.
        for inside, outer, _ in reversed(self.shared):
            self.sliced.setdefault(outer, set()).update(self.sliced.get(inside, ()))
        size = sum(len(c) for c in self.combinations.values())
        if size > self.most_combinations:
            return False
        self._settle_all()
        self._read_all()
        return True

    def _ruled_axes(self) -> set[str]:
        values = _given(self.program)
        values += (v for op in named.walk(self.program.body) for v in op.outs)
        return {a for v in values for _, axes in self._ruled(v).splits for a in axes}

    def _ruled(self, value: Value) -> Placement:
        return self.layout.demand(value, value in self.returned_values).placement(self.mesh)

    def _stored(self, value: Value) -> Placement:
        return self.fixed[value]

    def _fix(self, value: Value, p: Placement, trips: int) -> None:
        self.fixed[value], self.trips[value] = p, trips
        self.readers[value] = {p}

    def _collect(self, nodes: tuple[named.Node, ...], trips: int) -> None:
        """Combinations of every operator, and which versions of values somebody may read."""
        for node in nodes:
            if isinstance(node, named.Repeat):
                self._collect_loop(node, trips)
                continue
            for value in node.outs:
                self.trips[value] = trips
                self.readers.setdefault(value, set())
            self.combinations[node] = list(self._of(node))
            for combination in self.combinations[node]:
                for value, need in zip(node.ins, combination.needs, strict=True):
                    self.readers[value].add(need)

    def _collect_loop(self, node: named.Repeat, trips: int) -> None:
        inner = trips * node.dim.size
        for item in node.stacked:
            # A stack is read slice by slice as it settled.
            if item.outer in self.fixed:
                self.complete &= not self.fixed[item.outer].axes_of(node.dim.name)
                self._fix(item.inside, self.fixed[item.outer].without_dim(node.dim.name), inner)
                continue
            self.sliced.setdefault(item.outer, set()).add(node.dim.name)
            self.shared.append((item.inside, item.outer, node.dim.name))
            self.trips[item.inside] = inner
            self.readers.setdefault(item.inside, set())
        for made in node.collected:
            self.sliced.setdefault(made.outer, set()).add(node.dim.name)
            self.trips[made.outer] = trips
            self.readers.setdefault(made.outer, set())
            self.collected.append(made)
        for carry in node.carries:
            self.trips[carry.inside] = inner
            self.trips[carry.result] = trips
            self.readers.setdefault(carry.inside, set())
            self.readers.setdefault(carry.result, set())
            self.carries.append(carry)
        self._collect(node.body, inner)

    def _reads(self, op: Op) -> tuple[Placement, ...]:
        """What is demanded of the operands of an operator."""
        return tuple(self._ruled(v) for v in op.ins)

    def _of(self, op: Op) -> Iterator[Combination]:
        """The legal combinations of rows over the axes."""
        wants = tuple(self._ruled(v) for v in op.outs)
        ruled = self._reads(op)
        versions = tuple((p,) for p in ruled)
        ruled_outs = tuple(Want(w) for w in wants)
        chooser = Chooser(call_of(op), versions, ruled_outs, self.mesh, "deferred")
        options = [self._rows(op, axis, ruled, wants) for axis in self.axes]
        for rows in itertools.product(*options):
            made = chooser.placements(dict(zip(self.axes, rows, strict=True)))
            if made is not None and (made[0] == ruled or not is_load(op)):
                yield Combination(made[0], made[1], chooser.flops(*made))

    def _rows(
        self, op: Op, axis: str, ruled: tuple[Placement, ...], wants: tuple[Placement, ...]
    ) -> list[Row]:
        """Rows along one axis that suit what rules say of the result, or stand on what they split.

        Where a row does both, no other is considered.
        """
        legal = legal_rows(call_of(op))
        every = [row for row in legal if _partial_ops((*row.ins, *row.outs)) <= self.ops]
        ruled_here = any(isinstance(p.component(axis), Split) for p in ruled)
        standing = [row for row in every if ruled_here and _stands(row, axis, ruled)]
        suiting = [row for row in every if self._agrees(row, axis, wants)]
        both = [row for row in standing if row in suiting and self._known(op, axis)]
        return both or [r for r in every if r in standing or r in suiting] or every

    def _known(self, op: Op, axis: str) -> bool:
        """Whether it is settled beforehand along which dims the operands are split."""
        return True

    def _agrees(self, row: Row, axis: str, wants: tuple[Placement, ...]) -> bool:
        for component, want in zip(row.outs, wants, strict=True):
            wanted = want.component(axis)
            if isinstance(component, Split) and isinstance(wanted, Split) and component != wanted:
                return False
        return True

    # --- where values settle -----------------------------------------------------------------

    def _settle_all(self) -> None:
        for value, p in self.fixed.items():
            one = self.lp.variable()
            self.lp.constrain([(one, 1)], 1, 1)
            self.settled[value] = {p: one}
        for carry in self.carries:
            self._settle_carry(carry)
        returned = self.returned_values
        for op, combinations in self.combinations.items():
            total = sum(c.flops * self.trips[op.outs[0]] for c in combinations) or 1
            picks = [
                self.lp.variable(tie=c.flops * self.trips[op.outs[0]] / total / 1e3)
                for c in combinations
            ]
            self.lp.constrain([(v, 1) for v in picks], 1, 1)
            self.chosen[op] = picks
            for index, value in enumerate(op.outs):
                if value not in self.fixed:
                    self._settle(op, index, value, value in returned)
                else:
                    self._settle_fixed(op, index, value)
        for made in self.collected:
            self._settle_collected(made)
        for inside, outer, loop in self.shared:
            self.settled[inside] = {p.without_dim(loop): v for p, v in self.settled[outer].items()}
            self.complete &= not any(p.axes_of(loop) for p in self.settled[outer])

    def _settle_collected(self, made: named.Collected) -> None:
        """What a loop collects settles as each part of it."""
        if self._waits(made.outer) and made.inside.role == "grad":
            self.settled[made.outer] = self.settled[made.inside]
            self.readers[made.inside].update(self.settled[made.inside])
            return
        targets = self._targets(made.outer, [], made.outer in self.returned_values)
        self.settled[made.outer] = {p: self.lp.variable() for p in targets}
        self.lp.constrain([(v, 1) for v in self.settled[made.outer].values()], 1, 1)
        self.readers[made.inside].update(targets)

    def _settle(self, op: Op, index: int, value: Value, returned: bool) -> None:
        """A result settles in one placement; getting there from what was yielded has its price."""
        yields = Counter(c.yields[index] for c in self.combinations[op])
        targets = self._targets(value, list(yields), returned)
        self.settled[value] = {p: self.lp.variable() for p in targets}
        self._move_yield(op, index, value, list(yields), targets)
        self.lp.constrain([(v, 1) for v in self.settled[value].values()], 1, 1)

    def _settle_fixed(self, op: Op, index: int, value: Value) -> None:
        yields = list(Counter(c.yields[index] for c in self.combinations[op]))
        self._move_yield(op, index, value, yields, [self.fixed[value]])

    def _move_yield(
        self, op: Op, index: int, value: Value, yields: list[Placement], targets: list[Placement]
    ) -> None:
        """An edge from each yielded placement to each settled one; exactly one is taken."""
        into: dict[Placement, list[int]] = {p: [] for p in targets}
        for source in yields:
            picks = [
                (pick, -1.0)
                for pick, c in zip(self.chosen[op], self.combinations[op], strict=True)
                if c.yields[index] == source
            ]
            out = []
            for target in targets:
                made = route(value.type, source, target, self.mesh)
                if made is not None:
                    edge = self.versions.edge(made, self.trips[value])
                    into[target].append(edge)
                    out.append((edge, 1.0))
            self.lp.constrain([*out, *picks], 0, 0)
        for target, edges in into.items():
            self.lp.constrain(
                [*((e, 1.0) for e in edges), (self.settled[value][target], -1.0)], 0, 0
            )

    def _settle_carry(self, carry: named.Carry) -> None:
        """One placement for the value inside a loop and for what the loop leaves."""
        loops = self.sliced.get(carry.result, ())
        found = self._targets(carry.inside, [], False)
        targets = [p for p in found if not any(p.axes_of(d) for d in loops)]
        self.settled[carry.inside] = {p: self.lp.variable() for p in targets}
        self.settled[carry.result] = self.settled[carry.inside]
        self.lp.constrain([(v, 1) for v in self.settled[carry.inside].values()], 1, 1)
        self.readers[carry.init].update(targets)
        self.readers[carry.next].update(targets)

    def _targets(self, value: Value, yields: list[Placement], returned: bool) -> list[Placement]:
        """Where a value may settle."""
        base = self._ruled(value)
        if returned or value.role == "param":
            return [base]
        found = self.targets.of(value, base, yields)
        if self._waits(value):
            # A gradient stays as it came about until the update asks for it.
            return [p for p in found if p in yields] or found
        return found

    def _waits(self, value: Value) -> bool:
        """Whether a value is a gradient that is neither stored nor returned."""
        returned = value in self.returned_values
        return value.role == "grad" and not self.layout.is_stored(value, returned)

    # --- who reads what ----------------------------------------------------------------------

    def _read_all(self) -> None:
        for output in self.program.outputs:
            needed = [need for need, _ in self._returned(output.value)]
            self.readers[output.value].update(needed)
        for update in self.program.updates:
            self.readers[update.new].add(self._stored(update.old))
        for value, needs in self.readers.items():
            self.versions.offer(value, needs)
        for op, combinations in self.combinations.items():
            self._read_by(op, combinations)
        for carry in self.carries:
            self._read_as(carry.init, carry.inside)
            self._read_as(carry.next, carry.inside)
        for made in self.collected:
            if self.settled[made.outer] is not self.settled[made.inside]:
                self._read_as(made.inside, made.outer)
        for output in self.program.outputs:
            self.versions.consume(output.value, {p: [v] for p, v in self._returned(output.value)})
        for update in self.program.updates:
            one = self.lp.variable()
            self.lp.constrain([(one, 1)], 1, 1)
            self.versions.consume(update.new, {self._stored(update.old): [one]})

    def _read_by(self, op: Op, combinations: list[Combination]) -> None:
        """What an operator reads depends on the combination it picks."""
        for index, value in enumerate(op.ins):
            wanted: dict[Placement, list[int]] = {}
            for pick, c in zip(self.chosen[op], combinations, strict=True):
                wanted.setdefault(c.needs[index], []).append(pick)
            self.versions.consume(value, wanted)

    def _read_as(self, value: Value, other: Value) -> None:
        """A value is read in the placement that another one settles in."""
        self.versions.consume(value, {p: [one] for p, one in self.settled[other].items()})

    def _returned(self, value: Value) -> Iterator[tuple[Placement, int]]:
        """What a returned value must be had as, and under which variable."""
        one = self.lp.variable()
        self.lp.constrain([(one, 1)], 1, 1)
        yield self._ruled(value), one

    # --- the answer --------------------------------------------------------------------------

    def solve(self) -> Plan | None:
        """Minimise, and read the plan off; None unless it is proven least."""
        found = self.lp.minimise(SECONDS)
        if found is None or not found[1]:
            return None
        values, _ = found
        decisions = {op: self._decision(op, values) for op in self.combinations}
        carries = {c.inside: self._settled_in(c.inside, values) for c in self.carries}
        carries |= {c.outer: self._settled_in(c.outer, values) for c in self.collected}
        total = sum(c * v for c, v in zip(self.lp.costs, values, strict=True))
        return Plan(decisions, carries, round(total), self.complete)

    def _decision(self, op: Op, values: list[float]) -> Decision:
        index = next(i for i, v in enumerate(self.chosen[op]) if values[v])
        combination = self.combinations[op][index]
        targets = tuple(self._settled_in(v, values) for v in op.outs)
        return Decision(combination.needs, combination.yields, targets)

    def _settled_in(self, value: Value, values: list[float]) -> Placement:
        return next(p for p, one in self.settled[value].items() if values[one])


def _given(program: named.Program) -> list[Value]:
    """Inputs, parameters and states."""
    return [*program.inputs, *(p.value for p in program.params), *(s.value for s in program.states)]


def _partial_ops(components: Iterable[Component]) -> set[ReduceOp]:
    return {c.op for c in components if isinstance(c, Partial)}


def _stands(row: Row, axis: str, ruled: tuple[Placement, ...]) -> bool:
    """Whether the row takes every operand that rules split along the axis as it is."""
    return all(
        not isinstance(p.component(axis), Split) or p.component(axis) == component
        for component, p in zip(row.ins, ruled, strict=True)
    )
