"""A network without a loop in stages: `conv3: pipe = 1` is on stage 1, and so is what comes of it.

An operator is on the stage that a rule gives it, else on the latest of its operands; what is made
of inputs and parameters begins on stage 0, what is made of inputs alone is where it is read. So no
stage reads what a later one makes. An operator of the backward pass is on the stage of the operator
that it is for: its origin.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NoReturn

from meshdsl.diagnostics import Related, advice, counted, fail
from meshdsl.ir.program import OpKind, block_loops, every, kind_of
from meshdsl.ir.rewrite import makes_of, reads_of
from meshdsl.named.ir import NamedLoop, NamedProgram, Node, Value
from meshdsl.named.selectors import FUNCTION, TENSOR, selects
from meshdsl.placed.layout import Layout
from meshdsl.placed.layout_edits import ended, on_stage
from meshdsl.placed.pipelined import (
    Piped,
    check_axis,
    cut_of,
    ending_with_micro_batches,
    forward_only,
    piped,
)
from meshdsl.placed.settings import StageRule
from meshdsl.syntax.edits import removal


def active_cuts(layout: Layout) -> tuple[StageRule, ...]:
    """The stages that rules of a layout give on axes with several devices."""
    return tuple(r for r in layout.cuts if layout.mesh.size_or_one(r.axis) > 1)


def pipeline_of(program: NamedProgram, layout: Layout) -> tuple[Layout, Piped | None]:
    """The pipeline of a program under a layout, if it has one, and the layout that it follows.

    That of a program without an update has forward passes alone. Raises as `piped` and `cut_apart`.
    """
    if all(node.phase != "update" for node in program.body):
        layout = forward_only(program, layout)
    looped = piped(program, layout)
    pipe = cut_apart(program, layout, looped) or looped
    if pipe is not None and program.goal is not None and program.goal.others:
        message = "the stages of a pipeline run the passes of one loss"
        where = Related(program.goal.others[0].span, "another one")
        help = "add the losses up, or give the loop no rule"
        fail("MD0907", message, pipe.span, where, help=help)
    return layout, pipe


def cut_apart(program: NamedProgram, layout: Layout, looped: Piped | None) -> Piped | None:
    """The pipeline of a program that rules cut into stages, if they do.

    `looped` is that of a loop. Raises MD0339 and MD0340 for stages that there are not, or that
    would run backwards, MD0907 for what cannot be a pipeline.
    """
    rules, use = active_cuts(layout), layout.schedule
    trains = any(node.phase == "backward" for node in every(program.body))
    if not rules or not (trains or (use and use.forward)):
        return None
    first = rules[0]
    if looped is not None:
        message = f"`{first}`: the stages are those of the loop over `{looped.dim}`"
        fixes = (removal(first.span, "leave this rule out"),)
        help = advice(fixes, f"or `{looped.dim} -> {looped.axis}`")
        where = Related(looped.span, "by this rule")
        fail("MD0339", message, first.span, where, help=help, fixes=fixes)
    other = next((r for r in rules if r.axis != first.axis), None)
    if other is not None:
        message = f"stages have one axis, and these rules name `{first.axis}` and `{other.axis}`"
        help = f"write `{first.axis}` in all of them; or give one of the axes one device"
        fail("MD0339", message, other.span, Related(first.span, "another axis"), help=help)
    pipe = _pipe(program, layout, first, rules)
    check_axis(program, layout, pipe)
    _Stages(program, pipe, layout).check()
    return pipe


def with_stages(program: NamedProgram, pipe: Piped) -> Piped:
    """The pipeline with the stages of all values of its passes, where rules cut the network."""
    if not pipe.count:
        return pipe
    return replace(pipe, stage_of=_Stages(program, pipe).of_all())


def _pipe(
    program: NamedProgram, layout: Layout, first: StageRule, rules: tuple[StageRule, ...]
) -> Piped:
    """The pipeline, with as many stages as the table of its schedule has."""
    use, goal = layout.schedule, program.goal
    accumulated = goal.optimizer.accumulate if goal else 1
    cut = cut_of(use, "", layout)
    if cut is None and accumulated == 1:
        message = f"`{first}` needs micro-batches"
        schedule = ending_with_micro_batches(program, layout)
        ended_so = ended(first.span, schedule) if schedule and use is None else ()
        fixes = ended_so or (removal(first.span, "leave the rule out"),)
        fail("MD0907", message, first.span, fixes=fixes)
    if cut is not None and accumulated > 1:
        message = "a step is either cut into micro-batches or accumulates batches"
        help = f"write `with {cut.name}` alone, or leave `accumulate` out"
        fail("MD0907", message, cut.span, help=help)
    loop = None if cut else _batches(program)
    micro = cut.axis if cut else loop.dim.name if loop else ""
    count = layout.mesh.size(first.axis)
    if use is not None:
        count = use.verified(count, cut.micro if cut else accumulated).schedule.stages
    return Piped("", first.axis, micro, first.span, use, cut, count=count, rules=rules)


def _batches(program: NamedProgram) -> NamedLoop | None:
    """The loop over the batches that the optimizer accumulates."""
    loops = block_loops(program.body, NamedLoop)
    return next((n for n in loops if any(m.phase == "backward" for m in n.body)), None)


class _Stages:
    """The stages of the values of a training step; one that any stage can make has none."""

    def __init__(self, program: NamedProgram, pipe: Piped, layout: Layout | None = None) -> None:
        self.program, self.pipe, self.layout = program, pipe, layout
        loop = None if pipe.cut else _batches(program)
        nodes: tuple[Node, ...] = loop.body if loop else program.body
        passes = (n for n in nodes if n.phase != "update")
        self.nodes = [n for n in passes if kind_of(n) is not OpKind.STAGE_OUTPUT]
        self.forward = [n for n in self.nodes if n.phase == "forward"]
        self.makers = {v: n for n in self.forward for v in makes_of(n)}
        slices = {s.outer: s.inside for s in loop.stacked} if loop else {}
        self.batch = {slices.get(v, v) for v in program.inputs}
        # What depends on parameters; a batch and parameters make what begins on stage 0.
        self.learned = {p.value for p in program.params}
        self.stages: dict[Value, int] = {}
        self.causes: dict[Value, StageRule] = {}
        self.ruled = self._ruled()

    def of_all(self) -> Mapping[Value, int]:
        """The stage of each value that is on one."""
        for node in self.forward:
            self._forward(node)
        self._backward([n for n in self.nodes if n.phase == "backward"])
        return self.stages

    def check(self) -> None:
        """Raise MD0339 for a stage without operators, and one that there is not."""
        for rule in self.pipe.rules:
            if rule.stage >= self.pipe.count:
                message = f"`{rule}`: the stages of `{rule.axis}` are 0 to {self.pipe.count - 1}"
                fixes = on_stage(rule.span, rule.axis, self.pipe.count - 1)
                help = advice(fixes, "or take more devices")
                fail("MD0339", message, rule.span, help=help, fixes=fixes)
            if all(selected is not rule for selected in self.ruled.values()):
                self._selects_none(rule)
        for node in self.forward:
            self._forward(node)
        there = set(self.stages.values())
        for stage in range(self.pipe.count):
            if stage not in there:
                self._empty(stage)

    def _selects_none(self, rule: StageRule) -> NoReturn:
        name = ".".join(rule.selector)
        entering = [*self.program.inputs, *(p.value for p in self.program.params)]
        selected = next((v for v in entering if selects(rule.selector, v) == TENSOR), None)
        message = f"`{name}` names nothing that a micro-batch makes"
        help = "name a result of an operator, or a function"
        if selected is not None:
            kind = "a parameter" if selected.role == "param" else "an input"
            message = f"`{name}` is {kind}, which is read wherever it is needed"
            help = "name what is made of it"
        fail("MD0339", message, rule.span, help=help)

    def _empty(self, stage: int) -> NoReturn:
        axis, count = self.pipe.axis, counted(self.pipe.count, "stage")
        message = f"stage {stage} of `{axis}` has no operator of its own"
        rule = next((r for r in self.pipe.rules if r.stage == stage), self.pipe.rules[0])
        others = [r for r in self.pipe.rules if r is not rule]
        related = tuple(Related(r.span, "another stage begins here") for r in others)
        help = f"a rule says where it begins: `NAME: {axis} = {stage}`; there are {count}"
        if rule.stage == stage:
            name = ".".join(rule.selector)
            help = f"`{name}` is made before the first micro-batch: name what depends on the batch"
        if stage == 0:
            help = "name a tensor after the first operators, so that these stay on stage 0"
            name = ".".join(rule.selector)
            nodes = (node for node, selecting in self.ruled.items() if selecting is rule)
            places = [v for node in nodes for v in node.makes if v.name == name]
            if len(places) > 1:
                help = f"`{name}` is assigned {len(places)} times, each of which the rule names: "
                help += "give the one that begins a stage a name of its own"
        fail("MD0339", message, rule.span, *related, help=help)

    # --- rules -----------------------------------------------------------------------------------

    def _ruled(self) -> dict[Node, StageRule]:
        """The rule of each node of the forward pass that one selects; the narrowest."""
        ruled: dict[Node, tuple[int, StageRule]] = {}
        for rule in self.pipe.rules:
            for node, level in self._selected(rule).items():
                old = ruled.get(node)
                # What two statements have in common is where it is read first.
                common = old is not None and level == old[0] == TENSOR
                earlier = common and old is not None and rule.stage < old[1].stage
                if old is None or level > old[0] or earlier:
                    ruled[node] = level, rule
                elif common:
                    continue
                elif level == old[0] and old[1].stage != rule.stage:
                    message = f"two stages for one operator: `{old[1]}` and `{rule}`"
                    other = Related(old[1].span, "the other rule")
                    fail("MD0303", message, rule.span, other, help="keep one of them")
        return {node: rule for node, (_, rule) in ruled.items()}

    def _selected(self, rule: StageRule) -> dict[Node, int]:
        """The nodes that a rule selects: those of a function, or of the statement of a tensor."""
        levels: dict[Node, int] = {}
        direct: set[Node] = set()
        for node in self.forward:
            for value in makes_of(node):
                level = selects(rule.selector, value)
                if level == FUNCTION:
                    levels.setdefault(node, FUNCTION)
                elif level == TENSOR and not _belongs_to_call(node, value):
                    levels.update(dict.fromkeys(self._statement(node, value), TENSOR))
                    direct.add(node)
        return levels | dict.fromkeys(direct, TENSOR + 1)

    def _statement(self, node: Node, target: Value) -> set[Node]:
        """What a statement consists of that assigns to `target`, with the calls in it."""
        scope = tuple((target.name or "").split(".")[:-1])
        first, statement_nodes, left = node, {node}, [node]
        if len(target.path) > len(scope):
            left += self._call(target, scope)
        while left:
            node = left.pop()
            statement_nodes.add(node)
            for value in reads_of(node):
                maker = self.makers.get(value)
                if maker is None or maker in statement_nodes or value.path[: len(scope)] != scope:
                    continue
                if value.name is not None and tuple(value.name.split(".")[:-1]) == scope:
                    continue  # a statement before
                left.append(maker)
                if len(value.path) > len(scope):
                    left += [n for n in self._call(value, scope) if n not in statement_nodes]
        return self._alone(first, statement_nodes)

    def _alone(self, first: Node, statement: set[Node]) -> set[Node]:
        """A statement without what others read as well: equal operators have become one."""
        outside = [n for n in self.forward if n not in statement]
        read = {v for n in outside for v in reads_of(n)}
        alone = set(statement)
        for node in [n for n in reversed(self.forward) if n in statement]:
            if node is not first and not read.isdisjoint(node.makes):
                alone.discard(node)
                read.update(reads_of(node))
        return alone

    def _call(self, value: Value, scope: tuple[str, ...]) -> list[Node]:
        """The nodes of the call inside of a scope that has made a value."""
        call = value.path[: len(scope) + 1]
        return [n for n in self.forward if any(v.path[: len(call)] == call for v in n.makes)]

    # --- the forward pass ------------------------------------------------------------------------

    def _forward(self, node: Node) -> None:
        reads = list(reads_of(node))
        makes = list(makes_of(node))
        if not self.learned.isdisjoint(reads):
            self.learned.update(makes)
        if self.batch.isdisjoint(reads):
            return
        self.batch.update(makes)
        before = [v for v in reads if v in self.stages]
        latest = max(before, key=self.stages.__getitem__, default=None)
        rule = self.ruled.get(node)
        if rule is not None:
            if latest is not None and self.stages[latest] > rule.stage:
                self._refuse_order(node, rule, latest)
            stage, cause = rule.stage, rule
        elif latest is not None:
            stage, latest_cause = self.stages[latest], self.causes.get(latest)
            self._put(node, stage, latest_cause)
            return
        elif not self.learned.isdisjoint(reads):
            stage, cause = 0, None
        else:
            return
        self._put(node, stage, cause)

    def _put(self, node: Node, stage: int, cause: StageRule | None) -> None:
        for value in makes_of(node):
            self.stages[value] = stage
            if cause is not None:
                self.causes[value] = cause

    def _refuse_order(self, node: Node, rule: StageRule, operand: Value) -> NoReturn:
        name = f"`{operand.label}`" if operand.name else "an operand"
        stage = self.stages[operand]
        message = f"`{rule}`: it reads {name}, which is on the later stage {stage}"
        cause = self.causes.get(operand)
        related = () if cause is None else (Related(cause.span, f"stage {stage} begins here"),)
        fixes = on_stage(rule.span, self.pipe.axis, stage)
        help = advice(fixes, "or a later stage: a micro-batch never returns to an earlier one")
        where = (*related, Related(node.span, "it is read here"))
        fail("MD0340", message, rule.span, *where, help=help, fixes=fixes)

    # --- the backward pass -----------------------------------------------------------------------

    def _backward(self, nodes: list[Node]) -> None:
        """Note the stages of the backward pass, which goes from later stages to earlier ones.

        A copy of what is on no stage is on the latest stage that reads it.
        """
        made: set[Value] = set()
        for node in nodes:
            reads = list(reads_of(node))
            makes = list(makes_of(node))
            if not self.batch.isdisjoint(reads):
                self.batch.update(makes)
                before = [self.stages[v] for v in reads if v in made and v in self.stages]
                stage = self._backward_stage(node, before)
                if node.body and stage is not None:
                    self._check_return(node, stage, [v for v in reads if v in made])
                self.stages.update({} if stage is None else dict.fromkeys(makes, stage))
            made.update(makes)
        late: dict[Value, int] = {}
        for node in reversed(nodes):
            stages = [late[v] for v in node.makes if v in late]
            stages += [self.stages[v] for v in node.makes if v in self.stages]
            if not stages:
                continue
            self.stages.update(dict.fromkeys(makes_of(node), max(stages)))
            for value in made.intersection(reads_of(node)):
                late[value] = max(late.get(value, 0), max(stages))

    def _check_return(self, loop: Node, stage: int, gradients: list[Value]) -> None:
        """Refuse a loop whose backward pass goes on with the gradient of an earlier stage.

        What the loop has kept for it is on its own stage. Raises MD0330.
        """
        assert loop.origin is not None, "a loop of the backward pass has an origin"
        own = self.stages.get(loop.origin.of)
        if own is None or own <= stage:
            return
        first = next(v for v in gradients if self.stages.get(v) == stage)
        name = f"`{first.source.label}`" if first.source.name else "a value"
        message = f"{name} is used on stage {stage} behind the loop that reads it on stage {own}"
        help = f"use {name} before the loop: gradients are added up from the last use to the first"
        where = Related(first.span, f"its gradient begins here, on stage {stage}")
        fail("MD0330", message, loop.span, where, help=help)

    def _backward_stage(self, node: Node, before: list[int]) -> int | None:
        """The stage of the operator that a node is for, which reads nothing of earlier stages.

        A gradient of what is on no stage, as of a parameter, is added up on the earliest one.
        """
        assert node.origin is not None, "an operator of the backward pass has an origin"
        earliest = min(before, default=self.pipe.count - 1)
        own = self.stages.get(node.origin.of)
        if own is not None:
            return min(own, earliest)
        return None if node.origin.is_copy else earliest


def _belongs_to_call(node: Node, value: Value) -> bool:
    """Whether a value is what a loop in a function carries, named as the argument of the call."""
    return isinstance(node, NamedLoop) and any(
        len(v.path) > len(value.path) for v in makes_of(node)
    )
