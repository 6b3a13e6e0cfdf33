"""Micro-batches as batches of their own: what a stage that updates on the way goes by.

The program of one is that of the step, with the dim that is cut as small as its part: with one
stage, a table is the ordinary training of as many steps. What devices run is the program that
accumulates as many of these batches; each stage makes its updates in the course of them.
"""

from __future__ import annotations

from meshdsl.diagnostics import fail
from meshdsl.named.ir import NamedProgram, Value
from meshdsl.placed.pipelined import Microbatching, Piped
from meshdsl.placed.stage_parts import StageParts
from meshdsl.schedule.verification import Verified


def count_of(program: NamedProgram, pipe: Piped) -> int:
    """The number of micro-batches of a step."""
    if pipe.cut is not None:
        return pipe.cut.micro
    goal = program.goal
    assert goal is not None, "a pipeline without a cut accumulates batches"
    accumulate: int = goal.optimizer.accumulate
    return accumulate


def part_of(program: NamedProgram, cut: Microbatching) -> int:
    """The size of the dim that is cut in a micro-batch. Raises MD0331 and MD0337."""
    if len(cut.dims) > 1:
        message = "updates on the way cut one dim, and the schedule names several"
        fail("MD0337", message, cut.span, help=f"write `{cut.name}[{cut.dims[0]}](…)`")
    (dim,) = cut.dims
    size = next((v.type.size(dim) for v in program.inputs if v.type.has(dim)), None)
    if size is None:
        message = f"no input has the dim `{dim}` that the schedule cuts"
        fail("MD0337", message, cut.span, help="cut a dim of the inputs")
    if size % cut.micro:
        message = f"`{dim}` of size {size} does not divide into {cut.micro} parts"
        help = f"give it a multiple of {cut.micro}, or take fewer micro-batches"
        fail("MD0331", message, cut.span, help=help)
    return size // cut.micro


def check_sizes(whole: NamedProgram, part: NamedProgram, cut: Microbatching | None) -> None:
    """Refuse parameters and inputs whose sizes follow the dim that is cut (MD0337)."""
    if cut is None:
        return
    parameters = [(p.value, q.value) for p, q in zip(whole.params, part.params, strict=True)]
    for one, other in (*parameters, *zip(whole.inputs, part.inputs, strict=True)):
        _check_size(one, other, cut.dims[0])


def _check_size(whole: Value, part: Value, dim: str) -> None:
    stored = whole.role == "param" and whole.type.has(dim)
    if stored or whole.type.without(dim) != part.type.without(dim):
        message = f"the size of `{whole.label}` follows from `{dim}`, which is cut"
        fail("MD0337", message, whole.span, help="give it a dim of its own size")


def check_built(pipe: Piped, away: str) -> None:
    """Refuse updates on the way in a network that rules cut, or of states elsewhere (MD0335)."""
    assert pipe.use is not None, "updates on the way are those of a schedule"
    if away:
        message = (
            f"`{pipe.use.name}` updates states several times in a step, and they lie on {away}"
        )
        help = f"leave out the rule `state: memory = {away}`, or take a schedule like `one_f_one_b`"
        fail("MD0335", message, pipe.use.span, help=help)
    if pipe.count:
        message = f"`{pipe.use.name}` updates stages on the way, and rules cut this network"
        help = "updates on the way need the stages of a loop, `layers -> pipe`; or take one_f_one_b"
        fail("MD0335", message, pipe.use.span, help=help)


def check_devices(part: NamedProgram, pipe: Piped, table: Verified) -> None:
    """Refuse what no device does of updates on the way (MD0335); `part` is of a micro-batch."""
    use = pipe.use
    assert use is not None, "updates on the way are those of a schedule"
    reference = "`meshdsl train --engine reference` trains by this table"
    if table.schedule.micro == 1:
        message = f"`{use.name}` of one micro-batch updates once, behind all of it"
        fail("MD0335", message, use.span, help="take `one_f_one_b`, or more micro-batches")
    if any(len(held) > 1 for held in table.held):
        message = f"`{use.name}` updates several stages of a device, which is not built yet"
        fail("MD0335", message, use.span, help=f"take a stage on each; or {reference}")
    if use.recompute and table.changes:
        message = f"passes of `{use.name}` read several versions, and keep nothing of any"
        help = "leave `recompute=stage` out; `recompute { … }` blocks are of one version"
        fail("MD0335", message, use.span, help=help)
    if table.schedule.weights == "corrected" and any(s.is_copy for s in part.states):
        message = "steps of parameters that have a copy in f32 are not corrected yet"
        fail("MD0335", message, use.span, help=f"leave `compute=` out; or {reference}")
    for output in part.outputs:
        if output.value.type.dims:
            message = f"`{output.name}` is returned of each micro-batch, and no device joins them"
            help = f"take a number: its mean, for example; or {reference}"
            fail("MD0335", message, output.span, help=help)
    if any(v.role == "seed" for v in part.inputs) and pipe.cut is not None:
        message = "random numbers differ from batch to batch, and no device cuts their seed yet"
        help = f"let the optimizer accumulate the batches; or {reference}"
        fail("MD0335", message, use.span, help=help)


def check_table(pipe: Piped, table: Verified) -> None:
    """Refuse tables in which stages do not update equally often, as they count one step."""
    rows = [a for row in table.schedule.rows for a in row if a.kind == "U"]
    counts = {sum(a.stage == s for a in rows) for s in range(table.schedule.stages)}
    if len(counts) > 1:
        message = "stages update unequally often, and the optimizer counts one number of steps"
        span = pipe.use.span if pipe.use else pipe.span
        fail("MD0337", message, span, help="give each stage as many updates")


def check_apart(part: NamedProgram, pipe: Piped, table: Verified) -> None:
    """Refuse what stages cannot update apart; `part` is the program of a micro-batch.

    Raises MD0330, MD0334, MD0335, MD0337 and MD0907.
    """
    check_table(pipe, table)
    check_devices(part, pipe, table)
    parts = StageParts(part, pipe, table.schedule.stages)
    for stage in range(table.schedule.stages):
        parts.update(stage)


def taken(pipe: Piped, table: Verified) -> int:
    """How many micro-batches an update takes: as many each time (MD0335)."""
    assert pipe.use is not None, "updates on the way are those of a schedule"
    counts: set[int] = set()
    for row in table.schedule.rows:
        waiting = 0
        for action in row:
            waiting += action.kind in "BW"
            if action.kind == "U":
                counts.add(waiting)
                waiting = 0
    if len(counts) > 1:
        message = f"updates of `{pipe.use.name}` take the gradients of unequally many micro-batches"
        help = "take as many each time; `meshdsl train --engine reference` trains by this table"
        fail("MD0335", message, pipe.use.span, help=help)
    return counts.pop()
