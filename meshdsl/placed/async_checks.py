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
        message = "an asynchronous schedule divides one dim, and this one names several"
        fail("MD0337", message, cut.span, help=f"write `{cut.name}[{cut.dims[0]}](…)`")
    (dim,) = cut.dims
    size = next((v.type.size(dim) for v in program.inputs if v.type.has(dim)), None)
    if size is None:
        message = f"no input has the dim `{dim}` that the schedule cuts"
        fail("MD0337", message, cut.span, help="cut a dim of the inputs")
    if size % cut.micro:
        message = f"`{dim}` of size {size} does not divide into {cut.micro} micro-batches"
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
        message = f"the size of `{whole.label}` follows from `{dim}`, which is divided"
        fail("MD0337", message, whole.span, help="give it a dim of its own size")


def check_built(pipe: Piped, away: str) -> None:
    """Refuse updates on the way in a network that rules cut, or of states elsewhere (MD0335)."""
    assert pipe.use is not None, "updates on the way are those of a schedule"
    if away:
        message = (
            f"`{pipe.use.name}` updates states during a step, and they are stored on the {away}"
        )
        help = f"leave out the rule `state: memory = {away}`, or take a schedule like `one_f_one_b`"
        fail("MD0335", message, pipe.use.span, help=help)
    if pipe.count:
        message = f"`{pipe.use.name}` is asynchronous, and needs the stages of a loop, not of rules"
        help = "split the dim of a loop, `layers -> pipe`; or use `one_f_one_b`"
        fail("MD0335", message, pipe.use.span, help=help)


def check_devices(part: NamedProgram, pipe: Piped, table: Verified) -> None:
    """Refuse what no device does of updates on the way (MD0335); `part` is of a micro-batch."""
    use = pipe.use
    assert use is not None, "updates on the way are those of a schedule"
    reference = "`meshdsl train --engine reference` trains by this table"
    if table.schedule.micro == 1:
        message = f"`{use.name}` with one micro-batch updates once: it is not asynchronous"
        fail("MD0335", message, use.span, help="use `one_f_one_b`, or more micro-batches")
    if any(len(held) > 1 for held in table.held):
        message = (
            f"devices cannot yet run `{use.name}`, asynchronous with several stages on a device"
        )
        fail("MD0335", message, use.span, help=f"put one stage on each device; or {reference}")
    if use.recompute and table.changes:
        message = f"recomputed passes of `{use.name}` would read parameters already updated"
        help = "leave out `recompute=stage`; `recompute { … }` blocks in the loop are allowed"
        fail("MD0335", message, use.span, help=help)
    if table.schedule.weights == "corrected" and any(s.is_copy for s in part.states):
        message = f"`{use.name}` cannot correct steps of parameters that have a copy in f32 yet"
        fail("MD0335", message, use.span, help=f"leave `compute=` out; or {reference}")
    for output in part.outputs:
        if output.value.type.dims:
            message = (
                f"`{output.name}` is returned by each micro-batch, which devices cannot join yet"
            )
            help = f"return a number, such as its mean; or {reference}"
            fail("MD0335", message, output.span, help=help)
    if any(v.role == "seed" for v in part.inputs) and pipe.cut is not None:
        message = "asynchronous schedules cannot draw random numbers for each micro-batch yet"
        help = f"let the optimizer accumulate the batches; or {reference}"
        fail("MD0335", message, use.span, help=help)


def check_table(pipe: Piped, table: Verified) -> None:
    """Refuse tables in which stages do not update equally often, as they count one step."""
    rows = [a for row in table.schedule.rows for a in row if a.kind == "U"]
    counts = {sum(a.stage == s for a in rows) for s in range(table.schedule.stages)}
    if len(counts) > 1:
        message = "stages have different numbers of updates, but the optimizer has one counter"
        span = pipe.use.span if pipe.use else pipe.span
        fail("MD0337", message, span, help="give all stages the same number of updates")


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
        message = f"updates of `{pipe.use.name}` take different numbers of micro-batches"
        help = "make them equal; or `meshdsl train --engine reference` trains by this table"
        fail("MD0335", message, pipe.use.span, help=help)
    return counts.pop()
