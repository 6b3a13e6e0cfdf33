"""Several stages on a device: iterations are stored in the order of the stages that have them.

A device has one block of the loop's dim, as of any dim: the iterations of its stages, one stage
after the other (Narayanan et al. 2021: interleaved stages). In every tensor of the program that
has the dim, its elements lie so; `Spec.blocks` tells whoever reads or writes whole arrays. To an
operator for which no element's index counts this is all the same, others are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NoReturn

from meshdsl.diagnostics import Related, Span, fail
from meshdsl.named.ir import NamedLoop, NamedOp, NamedProgram, Node
from meshdsl.ops.opdef import lookup
from meshdsl.placed.pipelined import Piped
from meshdsl.placed.sharding_rules import call_of


def in_stage_order(program: NamedProgram, pipe: Piped) -> NamedProgram:
    """The program whose tensors have the dim of the loop in the order of the stages.

    Raises MD0338 for an operator outside of the loop that needs it in its own order.
    """
    if not pipe.order:
        return program
    return replace(program, body=tuple(_in_order(program.body, pipe)))


def _in_order(nodes: tuple[Node, ...], pipe: Piped) -> Iterator[Node]:
    for node in nodes:
        if isinstance(node, NamedLoop):
            if node.dim.name == pipe.dim and node.phase == "update" and node.carries:
                value = node.carries[0].result
                _refuse(f"what makes `{value.label}`", node.span, pipe)
            yield replace(node, body=tuple(_in_order(node.body, pipe)))
        elif node.name == "iota" and node.attr("dim").name == pipe.dim:
            attrs = [("dim", node.attr("dim")), ("order", pipe.order)]
            if pipe.sizes:
                attrs.append(("sizes", tuple(pipe.sizes[stage] for stage in pipe.order)))
            yield replace(node, name="stage_index", attrs=tuple(attrs))
        else:
            _check(node, pipe)
            yield node


def _check(op: NamedOp, pipe: Piped) -> None:
    """Refuse an operator that would see another element at an index of the loop's dim."""
    having = [v for v in (*op.ins, *op.outs) if v.type.has(pipe.dim)]
    if not having:
        return
    if lookup(op.name).is_alike_along(pipe.dim, call_of(op).signature):
        return
    named = next((v for v in (*op.outs, *having) if v.name), None)
    what = lookup(op.name).words + (f" (for `{named.label}`)" if named is not None else "")
    _refuse(what, op.span, pipe)


def _refuse(what: str, span: Span, pipe: Piped) -> NoReturn:
    schedule = f"`{pipe.use.name}`" if pipe.use is not None else "this schedule"
    fail(
        "MD0338",
        f"{what} needs `{pipe.dim}` in its order, and under {schedule} a device has iterations "
        "that are not neighbours",
        span,
        Related(pipe.span, "they are on the stages by this rule"),
        help="do it inside of the loop, iteration by iteration",
    )
