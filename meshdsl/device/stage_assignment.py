"""A network in stages by rules: the stage of each statement of a micro-batch, and the messages.

Values of the program know their stages (`placed/stage_rules.py`); what else there is, moves and
sums, is where its operands are. What any stage can make is made on each that reads it. A value that
another stage reads is sent there, also over stages in between: they have been passed by then. The
backward pass of a stage first makes what others wait for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from meshdsl.device.ir import (
    Compute,
    DeviceLoop,
    Move,
    Node,
    StagePhase,
    Stages,
    Var,
    known_words,
    renamed,
)
from meshdsl.device.liveness import is_constant, totals
from meshdsl.device.names import Names
from meshdsl.ir.program import every
from meshdsl.ir.rewrite import defined, mapped, reads_of
from meshdsl.placed.collectives import send
from meshdsl.placed.pipelined import Piped
from meshdsl.placed.placements import Mesh

Placed = tuple[Node, StagePhase, Stages]

Message = tuple[Move, int, Stages]
"""What is sent, the position at which it is, and the two stages."""

FREE = -1
"""In place of a position: any stage can do it."""


class Positions:
    """How far a micro-batch is where a statement is done: forward over the stages, and back.

    That is s on stage s in the forward pass, 2D - 1 - s in the backward pass; `made` has that of
    each value, None of those which are everywhere.
    """

    def __init__(self, loop: DeviceLoop, pipe: Piped) -> None:
        self.loop, self.pipe, self.last = loop, pipe, pipe.count - 1
        self.totals = totals(loop)
        self.made: dict[Var, int | None] = dict.fromkeys(loop.enters)
        self.positions: dict[Node, int] = {}
        self.alone = pipe.use is not None and pipe.use.forward

    def joint_with(self, others: Iterable[int]) -> int:
        """Where what is the same on all stages is added to a sum, with the places of its addends.

        On their stage, or on the last one.
        """
        stages = {self.stage(other) for other in others}
        stage = stages.pop() if len(stages) == 1 else self.last
        return stage if self.alone else self.backward(stage)

    def of_all(self) -> dict[Node, int]:
        """The position of each statement; FREE of those that any stage can do."""
        for node in self.loop.body:
            self.follow(node)
        return self.positions

    def follow(self, node: Node) -> None:
        """Note the position of a statement."""
        at = self.positions[node] = self._of(node)
        position = None if at == FREE else at
        self.made.update((v, None if v.name in self.totals else position) for v in node.makes)

    def stage(self, position: int) -> int:
        """The stage of a position."""
        return min(position, 2 * self.last + 1 - position)

    def backward(self, stage: int) -> int:
        """The position of a stage in the backward pass."""
        return 2 * self.last + 1 - stage

    def _of(self, node: Node) -> int:
        if is_constant(node):
            return FREE
        before = [p for v in reads_of(node) if (p := self.made.get(v)) is not None]
        stage_of = self.pipe.stage_of
        # Of a sum of the step each stage has its own.
        results = [v for v in node.makes if v.name not in self.totals]
        stages = [stage_of[v.value] for v in results if v.value in stage_of]
        earliest = max(before, default=FREE)
        if node.phase != "backward":
            return max(stages[0] if stages else FREE, earliest)
        if stages:
            return max(self.backward(stages[0]), earliest)
        if earliest == FREE or earliest > self.last:
            return earliest
        return self.backward(self.stage(earliest))


class Cuts:
    """The statements of an iteration stage by stage, with what the stages send."""

    def __init__(
        self,
        loop: DeviceLoop,
        pipe: Piped,
        mesh: Mesh,
        names: Names,
        lists: set[Var],
    ) -> None:
        self.loop, self.pipe, self.mesh, self.lists = loop, pipe, mesh, lists
        self.names = names
        self.found = Positions(loop, pipe)
        self.at = self.found.of_all()
        self.totals = self.found.totals

    def placed(self) -> list[Placed]:
        """All statements, in an order in which each has its operands."""
        nodes = self._copied()
        self._nearer(nodes)
        receiving, sends = self._sent(nodes)
        self.again: set[Node] = set()
        if self.pipe.use is not None and self.pipe.use.recompute:
            receiving, sends = self._computed_again(receiving, sends)
        return self._in_order(receiving, sends)

    # --- what any stage can do -------------------------------------------------------------------

    def _copied(self) -> list[Node]:
        """The statements, with one on each stage that reads it of what any stage can do."""
        read: dict[Var, set[int]] = {}
        copied: list[Node] = []
        new: dict[tuple[Var, int], Var] = {}
        for node in reversed(self.loop.body):
            at = self.at[node]
            if at != FREE or is_constant(node):
                self._read_at(node, read, at)
                copied.append(node)
                continue
            stages = {self.found.stage(p) for v in node.makes for p in read.get(v, ())}
            stages = stages or {self.found.last}
            # In the forward pass where that reads it: the backward pass keeps it.
            first = {
                s: min(
                    (p for v in node.makes for p in read.get(v, ()) if self.found.stage(p) == s),
                    default=self.found.backward(s) if node.phase == "backward" else s,
                )
                for s in stages
            }
            if isinstance(node, Compute) and (name := node.outs[0].name) in self.totals:
                adders = (n for n in self.loop.body if any(v.name == name for v in n.makes))
                joint = self.found.joint_with(self.at[n] for n in adders if self.at[n] != FREE)
                first = {self.found.stage(joint): joint}
            for stage, position in sorted(first.items()):
                copy = node if len(first) == 1 else self._copy(node, stage, new)
                self.at[copy] = position
                self._read_at(copy, read, position)
                copied.append(copy)
        stages_of = {n: self.found.stage(self.at[n]) for n in copied if self.at[n] != FREE}
        return [self._with(n, stages_of.get(n), new) for n in reversed(copied)]

    def _read_at(self, node: Node, read: dict[Var, set[int]], position: int) -> None:
        for var in () if position == FREE else reads_of(node):
            read.setdefault(var, set()).add(position)

    def _copy(self, node: Node, stage: int, new: dict[tuple[Var, int], Var]) -> Node:
        mapping: dict[Var, Var] = {}
        names: dict[str, str] = {}
        for var in (v for n in every((node,)) for v in defined(n)):
            names.setdefault(var.name, self.names.fresh(var.name))
            mapping[var] = replace(var, name=names[var.name])
        new.update(((v, stage), mapping[v]) for v in node.makes)
        self.lists |= {mapping[v] for v in self.lists if v in mapping}
        copy = renamed(node, mapping)
        return (
            replace(copy, index=self.names.fresh(copy.index))
            if isinstance(copy, DeviceLoop)
            else copy
        )

    def _with(
        self,
        node: Node,
        stage: int | None,
        new: Mapping[tuple[Var, int], Var],
        at: int | None = None,
    ) -> Node:
        """A statement that reads the copies of its stage; it is where it was, or `at`."""
        if stage is None or all((v, stage) not in new for v in reads_of(node)):
            return node
        copy = mapped(node, lambda v: new.get((v, stage), v))
        self.at[copy] = self.at[node] if at is None else at
        return copy

    # --- messages --------------------------------------------------------------------------------

    def _nearer(self, nodes: list[Node]) -> None:
        """Let collectives be done where their result is read, where less is sent to there then."""
        readers: dict[Var, set[int]] = {}
        for node in reversed(nodes):
            if isinstance(node, Move) and node.step.moves:
                there = readers.get(node.target, set())
                if node.source.local.bytes < node.target.local.bytes and len(there) == 1:
                    self.at[node] = max(self.at[node], *there)
            for var in reads_of(node):
                readers.setdefault(var, set()).add(self.at[node])

    def _sent(self, nodes: list[Node]) -> tuple[list[Node], list[Message]]:
        """The statements that read what has been sent to them, and the messages.

        Those have the position at which they are sent.
        """
        position_of = {v: self.at[n] for n in nodes if self.at[n] != FREE for v in n.makes}
        position_of = {v: at for v, at in position_of.items() if v.name not in self.totals}
        sends: dict[tuple[Var, int], Message] = {}
        receiving: list[Node] = []
        over: dict[Var, Var] = {}
        for node in nodes:
            at = self.at[node]
            if not over.keys().isdisjoint(reads_of(node)):
                # A loop that goes on in the memory of an earlier one has its new name, too.
                carried = _carried_over(node, over, None)
                moved = carried.keys() & position_of.keys()
                position_of.update((carried[v], position_of[v]) for v in moved)
                over |= carried
                node = renamed(node, over)
            here = self.found.stage(at) if at != FREE else None
            away = [
                v for v in dict.fromkeys(reads_of(node)) if self._is_away(position_of.get(v), here)
            ]
            for var in away:
                assert here is not None
                key = var, here
                position, late = position_of[var], at > self.found.last
                early = position <= self.found.last
                if early and late and here < self.found.stage(position):
                    position = self.found.backward(self.found.stage(position))
                if key not in sends:
                    sends[key] = self._message(
                        var, self.found.stage(position_of[var]), here, position
                    )
            if not away:
                receiving.append(node)
                continue
            new = {v: sends[v, here][0].target for v in away if here is not None}
            if isinstance(node, DeviceLoop):
                # What has arrived stays as it is where the backward pass begins with it again.
                again = self.pipe.use is not None and self.pipe.use.recompute
                carried = _carried_over(node, new, self.names if again else None)
                position_of.update(
                    (carried[v], position_of[v]) for v in carried.keys() & position_of.keys()
                )
                over |= carried
                new |= carried
            receiving.append(renamed(node, new))
        self.at.update(zip(receiving, [self.at[n] for n in nodes], strict=True))
        return receiving, list(sends.values())

    def _is_away(self, made: int | None, here: int | None) -> bool:
        return made is not None and here is not None and self.found.stage(made) != here

    def _message(self, var: Var, source: int, target: int, position: int) -> Message:
        name = f"`{var.value.label}`" if var.value.name else f"the result of `{var.hint}`"
        arrived = replace(var, name=self.names.fresh(f"{var.name}_in"))
        step = send(var.placement, self.pipe.axis)
        held, sent = step.payload(var.type, self.mesh), step.wire(var.type, self.mesh)
        why = f"stage {target} goes on with {name} of a micro-batch"
        phase = "forward" if position <= self.found.last else "backward"
        span = var.value.span
        move = Move(step, var, arrived, held, sent, span, known_words(why), phase)
        return move, position, (source, target)

    # --- once more -------------------------------------------------------------------------------

    def _computed_again(
        self, nodes: list[Node], sends: list[Message]
    ) -> tuple[list[Node], list[Message]]:
        """The statements, with those of the forward pass once more that a backward pass reads.

        A stage then keeps what it received (GPipe, Huang et al. 2019).
        """
        last, copies, others = self.found.last, list[Node](), list[Node]()
        new: dict[tuple[Var, int], Var] = {}
        for stage in range(last + 1):
            late = [n for n in nodes if self.at[n] == self.found.backward(stage)]
            wanted = {v for n in late for v in reads_of(n)}
            wanted |= {m.source for m, at, ends in sends if at > last and ends[0] == stage}
            on_stage = [n for n in nodes if self.at[n] == stage]
            needed: list[Node] = []
            for node in reversed(on_stage):
                if self._is_made_again(node) and not wanted.isdisjoint(node.makes):
                    wanted.update(reads_of(node))
                    needed.append(node)
            copies += [self._again(node, stage, new) for node in reversed(needed)]
        for node in nodes:
            at = self.at[node]
            others.append(self._with(node, self.found.stage(at), new) if at > last else node)
        sent = []
        for move, at, ends in sends:
            source = new.get((move.source, ends[0]), move.source) if at > last else move.source
            sent.append((replace(move, source=source), at, ends))
        first, behind = (
            [n for n in others if (self.at[n] > last) is late] for late in (False, True)
        )
        return [*first, *copies, *behind], sent

    def _is_made_again(self, node: Node) -> bool:
        return all(v.name not in self.totals for v in node.makes)

    def _again(self, node: Node, stage: int, new: dict[tuple[Var, int], Var]) -> Node:
        copy = self._with(self._copy(node, stage, new), stage, new, at=self.found.backward(stage))
        assert isinstance(copy, Compute | Move | DeviceLoop), f"{copy} of a pass"
        copy = replace(copy, phase="backward")
        self.at[copy] = self.found.backward(stage)
        self.again.add(copy)
        return copy

    # --- order -----------------------------------------------------------------------------------

    def _in_order(self, nodes: list[Node], sends: list[Message]) -> list[Placed]:
        """Forward passes, first halves of backward passes, second halves; each stage by stage."""
        wanted = {move.source for move, *_ in sends}
        for node in reversed(nodes):
            if not wanted.isdisjoint(node.makes):
                wanted.update(reads_of(node))
        keyed: list[tuple[tuple[int, int, int], Placed]] = []
        for node in nodes:
            at = self.at[node]
            if at == FREE:
                keyed.append(((0, 0, 0), (node, StagePhase.EVERY, ())))
            elif at <= self.found.last:
                keyed.append(((1, at, 0), (node, StagePhase.LOOP, (at,))))
            else:
                again = node in self.again
                early = again or not wanted.isdisjoint(node.makes)
                part = StagePhase.LOOP_BACKWARD if early else StagePhase.WEIGHTS
                part = StagePhase.LOOP_AGAIN if again else part
                keyed.append(((3 - early, at, -again), (node, part, (self.found.stage(at),))))
        for move, at, ends in sends:
            forward = at <= self.found.last
            part = StagePhase.SENT if forward else StagePhase.SENT_BACKWARD
            keyed.append(((1 if forward else 2, at, 1), (move, part, ends)))
        return [placed for _, placed in sorted(keyed, key=lambda item: item[0])]


def _carried_over(loop: Node, new: Mapping[Var, Var], fresh: Names | None) -> dict[Var, Var]:
    """What a loop carries under the name of its initial value, under that of what has arrived.

    Or under a `fresh` one.
    """
    names = {
        c.init.name: fresh.fresh(c.init.name) if fresh else new[c.init].name
        for c in loop.carries
        if c.init in new and c.inside.name == c.init.name
    }
    inner = (v for n in every((loop,)) for v in defined(n))
    return {v: replace(v, name=names[v.name]) for v in inner if v.name in names}
