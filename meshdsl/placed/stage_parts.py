"""Which nodes of a training step each stage has, where stages update asynchronously.

The step is that of one micro-batch. Each stage has a block of the iterations of one `repeat`. Nodes
before the loop are on the first stage, nodes after it on the last one, and gradients are on the
stage of their tensors. Each parameter has to be read on one stage alone, which then updates it from
what is there; other steps are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from functools import cached_property
from typing import Any, NoReturn

from meshdsl.diagnostics import Fix, Span, advice, fail
from meshdsl.ir.program import block_loops
from meshdsl.ir.rewrite import free, needed, substitute
from meshdsl.ir.types import Dim
from meshdsl.named.ir import NamedLoop, NamedOp, NamedProgram, Node, Update, Value
from meshdsl.placed.pipelined import Piped
from meshdsl.records import dataclass
from meshdsl.schedule.use import synchronous
from meshdsl.syntax.call_edits import without_option
from meshdsl.syntax.enclosing import optimizer_of

HELP = "use a schedule that updates at the end of a step: `one_f_one_b`"


class PassSection(Enum):
    """The nodes outside of the loop, by where they come; before the loop is on the first stage."""

    BEFORE = "before the loop"
    BEHIND = "behind the loop"
    GRADIENT_BEHIND = "gradients of what is behind the loop"
    GRADIENT_BEFORE = "gradients of what is before the loop"

    @property
    def is_first(self) -> bool:
        """Whether its nodes are on the first stage, not on the last one."""
        return self in (PassSection.BEFORE, PassSection.GRADIENT_BEFORE)


@dataclass(frozen=True)
class StageUpdate:
    """The update of one stage, on values of its block.

    `block` maps what the program calls a value to what the nodes call it.
    """

    nodes: tuple[Node, ...]
    updates: tuple[Update, ...]
    block: Mapping[Value, Value]
    gradients: tuple[Value, ...]


class StageParts:
    """The parts of a training step of one micro-batch. Raises MD0330, MD0334, MD0337 and MD0907.

    `stages` is the number of blocks of the loop's iterations.
    """

    def __init__(self, program: NamedProgram, pipe: Piped, stages: int) -> None:
        self.program, self.pipe, self.stages = program, pipe, stages
        self._check_optimizer()
        self.loop, self.gradient_loop = self._loops()
        if not pipe.sizes and self.loop.dim.size % stages:
            message = f"`{pipe.dim}` does not divide over the {stages} stages of the table"
            fail("MD0334", message, pipe.span, help="give all stages the same number of iterations")
        self.blocks = pipe.iterations(self.loop.dim.size, stages)
        self.trained = {u.old for u in program.updates if u.old.role == "param"}
        self.param_of = {s.value: s.of for s in program.states}
        self.sections = self._sections()
        self._check_collected()
        self.stacked = {
            s.outer for s in (*self.loop.stacked, *self.gradient_loop.stacked)
        } & self.trained
        self.owners = {param: self._owner(param) for param in self.trained - self.stacked}

    # --- what is computed where ------------------------------------------------------------------

    def stage_of(self, section: PassSection) -> int:
        """The stage of a section."""
        return 0 if section.is_first else self.stages - 1

    def nodes(self, section: PassSection) -> tuple[Node, ...]:
        """The nodes of a section, in order."""
        return tuple(n for n, found in self.sections.items() if found is section)

    @cached_property
    def of_weights(self) -> Mapping[PassSection, tuple[Node, ...]]:
        """The nodes of the forward pass, by section, that parameters alone determine."""
        is_weight = {v: v in self.trained for v in (p.value for p in self.program.params)}
        determined = set(_of_weights([*self.sections], is_weight))
        return {
            section: tuple(n for n in self.nodes(section) if n in determined)
            for section in (PassSection.BEFORE, PassSection.BEHIND)
        }

    @cached_property
    def loop_of_weights(self) -> NamedLoop:
        """The loop with those nodes alone that the parameters of an iteration determine."""
        is_weight = {s.inside: True for s in self.loop.stacked if s.outer in self.stacked}
        nodes = tuple(_of_weights(self.loop.body, is_weight))
        determined = {*is_weight, *(v for n in nodes for v in n.makes)}
        collected = tuple(c for c in self.loop.collected if c.inside in determined)
        stacked = tuple(s for s in self.loop.stacked if s.inside in is_weight)
        return replace(self.loop, body=nodes, carries=(), stacked=stacked, collected=collected)

    def _loops(self) -> tuple[NamedLoop, NamedLoop]:
        """The loop on the stages, and that of its gradients."""
        cut_loops = [n for n in block_loops(self.program.body, NamedLoop) if self.pipe.cuts(n)]
        forward, backward = (
            [n for n in cut_loops if n.phase == phase] for phase in ("forward", "backward")
        )
        if len(forward) != 1 or len(backward) != 1:
            message = (
                f"a micro-batch must go through the loop over `{self.pipe.dim}` once, and back once"
            )
            help = "write `recompute` inside of the loop, and no `grad` of its results"
            fail("MD0907", message, self.pipe.span, help=help)
        return forward[0], backward[0]

    def _sections(self) -> dict[Node, PassSection]:
        """The section of every node of the forward and backward pass outside of the loop."""
        loops = (self.loop, self.gradient_loop)
        nodes = [n for n in self.program.body if n.phase != "update" and n not in loops]
        behind, ahead = set(self.loop.makes), set(self.gradient_loop.makes)
        section_of: dict[Node, PassSection | None] = {}
        for node in nodes:
            section_of[node] = None
            if node.phase == "backward" and ahead.intersection(free(node)):
                section_of[node] = PassSection.GRADIENT_BEFORE
                ahead.update(node.makes)
            elif behind.intersection(free(node)):
                late = node.phase == "backward"
                section_of[node] = PassSection.GRADIENT_BEHIND if late else PassSection.BEHIND
                behind.update(node.makes)
        readers: dict[Value, list[Node]] = {}
        for node in (*nodes, *loops):
            for value in free(node):
                readers.setdefault(value, []).append(node)
        for node in reversed(nodes):
            read_by = [r for v in node.makes for r in readers.get(v, ())]
            sections = {section_of.get(r) for r in read_by if r not in loops}
            section_of[node] = section_of[node] or self._by_readers(node, read_by, sections)
        return {node: section for node, section in section_of.items() if section is not None}

    def _by_readers(
        self, node: Node, read_by: Sequence[Node], sections: set[PassSection | None]
    ) -> PassSection:
        """The section of a node that depends on no loop: that of its first reader."""
        only_late = sections == {PassSection.GRADIENT_BEFORE} and len(read_by) > 0
        if node.phase == "backward":
            only_late &= self.gradient_loop not in read_by
            return PassSection.GRADIENT_BEFORE if only_late else PassSection.GRADIENT_BEHIND
        early = self.loop in read_by or PassSection.BEFORE in sections
        only_late &= self.gradient_loop not in read_by
        return PassSection.BEFORE if early or only_late else PassSection.BEHIND

    # --- what is updated where -------------------------------------------------------------------

    def update(self, stage: int) -> StageUpdate:
        """The update of a stage: of its block of what the loop stacks, and of what is on it."""
        here = tuple(u for u in self.program.updates if self._is_here(u.old, stage))
        nodes = self._needed([u.new for u in here])
        results = {v for n in nodes for v in n.makes}
        read = dict.fromkeys(v for n in nodes for v in free(n) if v not in results)
        stored = {p.value for p in self.program.params} | {s.value for s in self.program.states}
        gradients = tuple(v for v in read if v not in stored)
        for value in read:
            self._check_here(value, stage, value in stored)
        every = (*read, *(u.old for u in here), *(v for n in nodes for v in n.makes))
        size = len(self.blocks[stage])
        block = {v: self._of_block(v, size) for v in dict.fromkeys(every)}
        renamed = tuple(self._with_block(n, size) for n in substitute(nodes, block))
        updates = tuple(Update(u.old, block[u.new]) for u in here)
        return StageUpdate(renamed, updates, block, gradients)

    def is_block(self, value: Value) -> bool:
        """Whether each stage has a block of a parameter, a state or a gradient."""
        of = value.source
        return of in self.stacked and value.type.has(self.loop.dim.name)

    def _is_here(self, value: Value, stage: int) -> bool:
        """Whether a parameter or a state is on a stage; a state of no parameter is on each."""
        param = self.param_of.get(value, value)
        return param not in self.trained or param in self.stacked or self.owners[param] == stage

    def _needed(self, wanted: Iterable[Value]) -> tuple[Node, ...]:
        """The nodes of the update that make the wanted values."""
        update = [n for n in self.program.body if n.phase == "update"]
        nodes = needed(update, set(wanted))
        for node in reversed(nodes):
            self._check_separate(node)
        return nodes

    def _of_block(self, value: Value, size: int) -> Value:
        """The value as a stage has it: a block of what has the loop's dim."""
        if not value.type.has(self.loop.dim.name):
            return value
        return replace(value, type=self._smaller(value.type, size))

    def _with_block(self, node: Node, size: int) -> Node:
        """An operator whose attributes speak of the block."""
        assert isinstance(node, NamedOp), "an update has no loops"
        return replace(node, attrs=tuple((key, self._smaller(v, size)) for key, v in node.attrs))

    def _smaller(self, said: Any, size: int) -> Any:
        """A type, dims or an attribute, with the size of a block for that of the loop's dim."""
        match said:
            case Dim() if said == self.loop.dim:
                return Dim(said.name, size)
            case tuple():
                return tuple(self._smaller(item, size) for item in said)
        if hasattr(said, "dims"):
            return replace(said, dims=self._smaller(said.dims, size))
        return said

    # --- what is refused -------------------------------------------------------------------------

    def _check_optimizer(self) -> None:
        """Refuse options that speak of all stages at once, and what the program assigns."""
        goal = self.program.goal
        assert goal is not None, "a training step has a goal"
        for option, why in (
            ("clip", "the norm of all gradients"),
            ("compress", "factors of gradients that are made at one time"),
        ):
            if goal.optimizer.options[option] is not None:
                message = f"`{option}` needs {why}, and stages update at different times"
                optimizer = optimizer_of(goal.span)
                self._refuse(
                    message,
                    goal.span,
                    fixes=() if optimizer is None else without_option(optimizer, option),
                )
        params = [p.value for p in self.program.params]
        assigned = [u for u in self.program.updates if u.old in params and _is_assigned(u, self)]
        for update in assigned:
            message = f"`{update.old.label}` is assigned, and passes read it at different times"
            self._refuse(message, update.old.span)

    def _check_collected(self) -> None:
        """Refuse a read, outside of the loops, of what they collect from all stages."""
        collected = {c.outer for c in (*self.loop.collected, *self.gradient_loop.collected)}
        for node in self.sections:
            for value in collected.intersection(free(node)):
                name = f"`{value.label}`" if value.name else "what the loop collects"
                message = (
                    f"{name} is read after the loop: one value per layer, each on the stage of its "
                    "layer"
                )
                help = "pass it through the loop: assign it before the loop, and in each iteration"
                fail("MD0330", message, node.span, help=help)

    def _owner(self, param: Value) -> int:
        """The stage that a parameter is read on, outside of the loop's stacks."""
        loops = (self.loop, self.gradient_loop)
        if any(param in free(n) for n in loops):
            message = f"`{param.label}` is read by every stage, and each would update it separately"
            self._refuse(message, param.span, "declare it inside of the loop")
        stages = {self.stage_of(s) for n, s in self.sections.items() if param in free(n)}
        if len(stages) > 1:
            first, last = min(stages), max(stages)
            message = (
                f"`{param.label}` is read on stages {first} and {last}, and updated separately"
            )
            self._refuse(message, param.span, "give each a parameter of its own")
        return stages.pop() if stages else 0

    def _check_separate(self, node: Node) -> None:
        """Refuse an update that reads all blocks to make something whole."""
        dim = self.loop.dim.name
        if isinstance(node, NamedLoop) or (
            any(v.type.has(dim) for v in free(node))
            and not all(v.type.has(dim) for v in node.makes)
        ):
            message = "an update needs all iterations of the loop, which stages update separately"
            self._refuse(message, node.span)

    def _check_here(self, value: Value, stage: int, kept: bool) -> None:
        """Refuse an update that reads what another stage has."""
        if kept and self._is_here(value, stage):
            return
        collected = any(value is c.outer for c in self.gradient_loop.collected)
        if not kept and (collected or self.gradient_stage(value) == stage):
            return
        message = f"stage {stage} needs `{value.label}` of another stage to update"
        self._refuse(message, value.span)

    def _refuse(
        self, message: str, span: Span, *others: str, fixes: tuple[Fix, ...] = ()
    ) -> NoReturn:
        """Raise MD0337, whose help does `fixes` or updates all stages at once, or does `others`."""
        use = self.pipe.use
        fixes = (*fixes, *(synchronous(use) if use is not None else ()))
        ways = filter(None, [advice(fixes) or HELP, *others])
        fail("MD0337", message, span, help="; or ".join(ways), fixes=fixes)

    def gradient_stage(self, value: Value) -> int | None:
        """The stage that makes a gradient outside of the loop."""
        for node, section in self.sections.items():
            if value in node.makes:
                return self.stage_of(section)
        return 0 if value in self.gradient_loop.makes else None


def _is_assigned(update: Update, parts: StageParts) -> bool:
    """Whether a parameter's new value is made by the program, not by the optimizer."""
    made = {v for n in parts.program.body if n.phase == "update" for v in n.makes}
    return update.new not in made


def _of_weights(nodes: Sequence[Node], known: dict[Value, bool]) -> Iterator[Node]:
    """The nodes that read parameters and constants alone, and at least one parameter.

    `known` says of parameters whether they are trained; constants are added to it.
    """
    for node in nodes:
        read = free(node)
        if node.phase == "forward" and all(v in known for v in read):
            of_weights = any(known[v] for v in read)
            known.update(dict.fromkeys(node.makes, of_weights))
            if of_weights:
                yield node
