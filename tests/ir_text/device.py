"""Parser of the text of a device program, as `printer.py` writes it: for tests of passes.

FLOPs and bytes are counted anew. The text does not have the causes of collectives.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from meshdsl.device.buckets import bucket
from meshdsl.device.counted_rows import CountedRows
from meshdsl.device.ir import (
    Ahead,
    Collective,
    Compute,
    DeviceCollected,
    DeviceLoop,
    DeviceProgram,
    Move,
    Node,
    Pipeline,
    StagePhase,
    StageRows,
    Start,
    Var,
    Wait,
    known_words,
)
from meshdsl.ir import program as generic
from meshdsl.ir.types import Dim
from meshdsl.named import ir as named
from meshdsl.ops.opdef import Signature, lookup
from meshdsl.placed import collectives
from meshdsl.placed import ir as placed
from meshdsl.placed.collectives import Step
from meshdsl.placed.placements import Placement, placement
from meshdsl.placed.strategies import flops
from meshdsl.schedule.table import WEIGHTS, Weights
from meshdsl.schedule.verification import printed
from tests.ir_text import generic as ir
from tests.ir_text.generic import Fields, IRLine, Scanner
from tests.ir_text.placed import parse_mesh, parse_placed_type, parse_step

_HEAD = re.compile(r"program (\w+) on each of \d+ devices, mesh (.*)")
_ROWS = re.compile(r" \{rows=(\S+) (\S+) (\S+) (\d+) (\d+)\}")
_COUNTS = re.compile(r"  [\d,]+ (FLOP|B moved|B held, [\d,]+ B sent)$")
_STAGE = re.compile(r"stage \d+: (.*)")
_PART = re.compile(r"part ([A-Z_]+)(?: of (\d+(?: to \d+)?))?")
_MOVE = re.compile(r"(\w+) = (\w+ (?:.* )?over [\w., ]+|load from \w+): (.*)")


def parse_program(text: str) -> DeviceProgram:
    """The program of a text. Raises IRSyntaxError."""
    lines = (_COUNTS.sub("", line) for line in text.splitlines())
    return _DeviceParser("\n".join(lines)).program()


class _DeviceParser(ir.Parser[Var]):
    LOOP = DeviceLoop

    def begin(self, head: str) -> None:
        match_ = _HEAD.fullmatch(head)
        assert match_, "no head of a device program"
        self.title, self.mesh = match_[1], parse_mesh(match_[2])
        self.lists: set[Var] = set()
        self.rows: list[StageRows] = []
        self.works: dict[str, Collective] = {}
        # What had a name before it was given to another variable.
        self.before: dict[str, Var] = {}
        self.coordinates = {axis: axis for axis in self.mesh.names}

    def whole(self, size: int, axes: tuple[str, ...]) -> int:
        return size * self.mesh.size(*axes)

    def program(self) -> DeviceProgram:
        inputs, params, states, body, outputs, updates = self.sections()
        source = named.NamedProgram(self.title, (), (), (), (), self.top.span)
        before = placed.PlacedProgram(source, self.mesh, "", "", (), (), (), (), (), {})
        parts = (inputs, params, body, outputs, self.coordinates, states, updates)
        return DeviceProgram(before, self.mesh, *parts, frozenset(self.lists))

    def entered(self, line: IRLine, role: str) -> Var:
        with self.reading(line) as scan:
            var = self.entry(scan, line, role)
            scan.expect("=")
            entry = replace(var, value=replace(var.value, name=scan.next()))
            if scan.accept("on"):
                entry = replace(entry, away=scan.next())
            return self._known(entry)

    def _known(self, var: Var) -> Var:
        if (before := self.scope.get(var.name)) is not None:
            self.before[var.name] = before
        self.scope[var.name] = var
        return var

    # --- variables and nodes ------------------------------------------------------------------

    def value(self, scan: Scanner, line: IRLine) -> Callable[[Fields], Var]:
        name = scan.next()

        def make(fields: Fields) -> Var:
            plain = named.Value(
                fields["type"], line.span, name, role=fields.get("role", "activation")
            )
            value, where = fields.get("value", plain), fields["placement"]
            local = where.local(value.type, self.mesh)
            return self._known(Var(name, value, where, local, name, fields.get("on")))

        return make

    def type(self, scan: Scanner) -> Fields:
        local, where = parse_placed_type(self, scan, self.mesh)
        sizes = {d: self.dims[d] for d, _ in where.splits}
        fields: Fields = {"type": local.resized(sizes), "placement": where}
        if scan.accept("only", "on"):
            fields["on"] = int(scan.next())
        return fields

    def type_of(self, value: Var) -> Fields:
        return {"type": value.type, "placement": value.placement, "on": value.on}

    def make_op(self, op: generic.Op[Var]) -> Compute:
        ins, outs = (tuple(v.local for v in vs) for vs in (op.ins, op.outs))
        cost = flops(lookup(op.name), Signature(ins, outs, dict(op.attrs)))
        names = [v.name for v in op.ins]
        onto = names.index(op.outs[0].name) if op.outs[0].name in names else None
        about = (op.attrs, op.span, op.phase, op.block)
        into = self.before.get(op.outs[0].name) if onto is None else None
        kind = op.kind
        return Compute(
            op.name, op.ins, op.outs, *about, kind=kind, flops=cost, onto=onto, into=into
        )

    def leaf(self, line: IRLine) -> Node | None:
        words = line.text.split(" ")
        if words[-2:-1] == ["wait"]:
            collective = self.works[words[-1]]
            self.scope.update({m.target.name: m.target for m in collective.moves})
            return Wait(collective, words[-1])
        if words[0] == "wait":
            return Wait(cast(Collective, None), words[1], late=True)
        if words[1:3] == ["=", "start"]:
            ahead = words[3:] == ["for", "the", "next", "trip"]
            late = words[3:4] == ["late"]
            line_ = replace(line, text=line.text.split(" ", 4 if late else 3)[-1])
            started = self.works[words[0]] if ahead else self._collective(line_)
            assert started is not None, "nothing is started"
            self.works[words[0]] = started
            return Start(started, words[0], ahead, late)
        return self._collective(line)

    def _collective(self, line: IRLine) -> Collective | None:
        if line.text.startswith("bucket of "):
            return bucket(tuple(map(self._moved, line.inner)), self.mesh)
        return self._move(line)

    def _move(self, line: IRLine) -> Move | None:
        match_ = _MOVE.fullmatch(line.text)
        if match_ is None:
            return None
        by_number = _ROWS.search(match_[3])
        with self.reading(replace(line, text=_ROWS.sub("", match_[3]))) as scan:
            source = self.scope[scan.next()]
            phase, *_ = self.phase(scan)
            scan.expect(":")
            fields = {**self.type(scan), "value": source.value}
        with self.reading(replace(line, text=match_[2])) as scan:
            step = self._step(scan, source.placement, fields["placement"])
        target = self.value(Scanner(match_[1]), line)(fields)
        into = self.before.get(target.name)
        rows = None
        if by_number is not None:
            row, leaving, arriving, most, balanced = by_number.groups()
            sizes = (self.scope[leaving], self.scope[arriving])
            rows = CountedRows(*sizes, row, int(most), int(balanced))
        move = Move(step, source, target, 0, 0, line.span, known_words(), phase, into, rows)
        return move.counted(self.mesh)

    def _step(self, scan: Scanner, before: Placement, after: Placement) -> Step:
        """A step; what blocks go from device to device is in the same micro-batch before and after.

        Where a block of another device comes in between is said by the types alone.
        """
        in_time = {axis for axis, _ in self.mesh.moments}
        if scan.accept("load", "from"):
            return collectives.load(before, scan.next())
        if scan.peek() not in ("all_gather", "all_to_all", "reduce_scatter"):
            return parse_step(scan, self.mesh, before)
        splits = {d: tuple(a for a in axes if a not in in_time) for d, axes in before.splits}
        bare = placement(self.mesh, splits, before.partial, before.op)
        bare = replace(bare, windows=before.windows)
        return replace(parse_step(scan, self.mesh, bare), before=before, after=after)

    def _moved(self, line: IRLine) -> Move:
        with self.errors(line):
            move = self._move(line)
            assert move is not None, "no collective"
            return move

    def slice(self, line: IRLine, outside: dict[str, Var], dim: Dim) -> generic.Stacked[Var]:
        """A row of what is stored in another memory is there, too."""
        item = super().slice(line, outside, dim)
        if not item.outer.away:
            return item
        inside = self.scope[item.inside.name] = replace(item.inside, away=item.outer.away)
        return generic.Stacked(item.outer, inside)

    # --- loops --------------------------------------------------------------------------------

    def first(self, lines: list[IRLine], outside: dict[str, Var], dim: Dim) -> tuple[Ahead, ...]:
        return tuple(self._ahead(line, outside, dim) for line in lines)

    def _ahead(self, line: IRLine, outside: dict[str, Var], dim: Dim) -> Ahead:
        with self.errors(line):
            parts = ir.parts(line.inner, ("slice",))
            slices = tuple(self.slice(part, outside, dim) for part in parts["slice"])
            (issued,) = parts[""]
            collective = self._collective(issued)
            assert collective is not None, "nothing is issued ahead"
            work = line.text.split(" ")[1]
            self.works[work] = collective
            return Ahead(collective, work, slices)

    def collected(
        self, scan: Scanner, line: IRLine, inside: dict[str, Var], dim: Dim
    ) -> DeviceCollected:
        plain = super().collected(scan, line, inside, dim)
        is_list = scan.accept("as", "list")
        if is_list:
            self.lists.add(plain.outer)
        into_slice = not is_list and scan.accept("into", "slice")
        stack = inside[scan.next()] if scan.accept("onto") else None
        return DeviceCollected(plain.inside, plain.outer, is_list, stack, into_slice)

    def block(self, lines: list[IRLine]) -> tuple[Node, ...]:
        """The nodes of a loop; those of a pipeline are below the lines of their parts."""
        parts = [line for line in lines if _PART.fullmatch(line.text)]
        if not parts:
            return tuple(map(self._known_later, super().block(lines)))
        self.rows = [self._rows(line) for line in lines if line.text.startswith("rows ")]
        return self.nodes(statement for part in parts for statement in part.inner)

    def _known_later(self, node: Node) -> Node:
        """A wait for the collective of the trip before, which is issued behind it."""
        if isinstance(node, Wait) and node.late:
            return replace(node, collective=self.works[node.work])
        return node

    def _rows(self, line: IRLine) -> StageRows:
        """`rows w_rows : f32[layers@(pipe, chunk) 1] = w_stack`."""
        with self.reading(line) as scan:
            scan.expect("rows")
            inside = self.typed(scan, line)
            scan.expect("=")
            outer = self.scope[scan.next()]
            other = self.scope[scan.next()] if scan.accept("or") else None
            return StageRows(outer, inside, other)

    def make_loop(
        self, loop: generic.Loop[Var, Any], scan: Scanner, begun: Any, line: IRLine
    ) -> DeviceLoop:
        scan.expect("as")
        index = scan.next()
        axis = scan.next() if scan.accept("over") else None
        loop_: DeviceLoop = super().make_loop(loop, scan, begun, line)
        loop_ = replace(loop_, index=index, ahead=begun)
        if loop.dim.name in self.mesh.every:
            self.coordinates[loop.dim.name] = index
        if axis is None:
            return loop_
        return _pipeline(replace(loop_, stacked=(*loop_.stacked, *self.rows)), axis, line)


def _pipeline(loop: DeviceLoop, axis: str, line: IRLine) -> Pipeline:
    """The loop as a pipeline, with the rows and the parts that are written below its line."""
    rows = (_STAGE.fullmatch(below.text) for below in line.inner)
    said = [below.text.split(" ") for below in line.inner]
    written = (rule for rule in WEIGHTS if ["weights", rule] in said)
    weights: Weights = next(written, "latest")
    table = printed("\n".join(row[1] for row in rows if row), weights)
    parts_ = ((_PART.fullmatch(below.text), len(below.inner)) for below in line.inner)
    each = [part for part, size in parts_ if part for _ in range(size)]
    parts = tuple(StagePhase[part[1]] for part in each)
    stages = tuple(tuple(map(int, part[2].split(" to "))) if part[2] else () for part in each)
    sizes = next((tuple(map(int, words[1:])) for words in said if words[0] == "iterations"), ())
    about = {name: getattr(loop, name) for name in DeviceLoop.__dataclass_fields__}
    about |= {"axis": axis, "parts": parts, "table": table, "sizes": sizes}
    return Pipeline(**about, node_stages=stages if any(stages) else ())
