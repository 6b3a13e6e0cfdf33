"""What passes share (`meshdsl/ir/rewrite.py`), each function on one small program."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from meshdsl.ir import rewrite
from meshdsl.ir.program import Origin, block_loops, counted, every, loops, uses
from meshdsl.named.ir import NamedLoop, NamedOp, NamedProgram, Node, Value
from meshdsl.named.printer import print_program
from tests.ir_text import named as named_parser
from tests.report.golden import Case, made

TEXT = """\
program p
  input %0 x : f32[i 2]
  param %1 ws : f32[k 3, i 2] = normal, fan 2 to 2
  %2 s = exp %0 : f32[i 2]
  repeat k 3
    slice %3 w : f32[i 2] as [k, i] param = %1[k]
    carry %4 h : f32[i 2] = %0
    carry %5 g : f32[i 2] = %2
    %6 m = mul %4 %3 : f32[i 2]
    %7 n = add %5 %2 : f32[i 2]
    next %4 = %6; at the end %8 hs
    next %5 = %7; at the end %9 gs
    collect %10 all : f32[k 3, i 2][k] = %6
  %11 y = sum %8 {dims=(i)} : f32[]
  %12 z = sum %9 {dims=(i)} : f32[]
  return y = %11
  return z = %12
"""


def program() -> tuple[NamedProgram, dict[str, Value]]:
    """The program, and its values by their names."""
    parsed = named_parser.parse_program(TEXT)
    values = [*parsed.inputs, *(p.value for p in parsed.params)]
    values += [v for node in every(parsed.body) for v in rewrite.defined(node)]
    return parsed, {str(v.name): v for v in values}


def names(values: Iterable[Value]) -> str:
    return " ".join(str(v.name) for v in values)


def loop_of(nodes: Iterable[Node]) -> NamedLoop:
    (loop,) = loops(nodes, NamedLoop)
    return loop


def printed(parsed: NamedProgram, body: Iterable[Node]) -> list[str]:
    """The nodes as lines, without the spaces."""
    text = print_program(replace(parsed, body=tuple(body)))
    return [line.strip() for line in text.splitlines()]


def test_an_operator_has_the_parts_of_a_loop_and_they_are_empty() -> None:
    parsed, _ = program()
    op, loop = parsed.body[0], loop_of(parsed.body)
    parts = ("body", "enters", "ends", "carries", "stacked", "collected")
    assert [getattr(op, part) for part in parts] == [()] * len(parts)
    assert all(getattr(loop, part) for part in parts)
    assert (op.repeats, loop.repeats) == (1, 3)


def test_every_node_is_met_once_and_counted_with_its_iterations() -> None:
    parsed, _ = program()
    times = {names(node.makes): times for node, times in counted(parsed.body)}
    assert times == {"s": 1, "hs gs all": 1, "m": 3, "n": 3, "y": 1, "z": 1}
    assert [node for node, _ in counted(parsed.body)] == list(every(parsed.body))


def test_loops_of_a_block_are_not_those_inside_them() -> None:
    parsed, _ = program()
    inner = loop_of(parsed.body)
    outer = replace(inner, body=(inner, *inner.body))
    assert list(loops((parsed.body[0], outer), NamedLoop)) == [outer, inner]
    assert list(block_loops((parsed.body[0], outer), NamedLoop)) == [outer]


def test_uses_count_what_a_loop_carries_and_collects() -> None:
    parsed, value = program()
    used = uses(parsed.body)
    assert [used[value[name]] for name in ("x", "s", "ws", "m", "n", "hs", "all")] == [
        2, 2, 1, 2, 1, 1, 0,
    ]  # fmt: skip


def test_the_values_of_a_node() -> None:
    parsed, _ = program()
    loop = loop_of(parsed.body)
    assert names(rewrite.reads_of(loop)) == "x s ws h w g s m n m"
    assert names(rewrite.makes_of(loop)) == "hs gs all m n"
    assert names(rewrite.defined(loop)) == "hs gs all h g w"
    assert names(rewrite.free(loop)) == "x s ws"
    assert names(rewrite.free(parsed.body[-1])) == "gs"
    empty = replace(loop, body=(), collected=())
    assert names(rewrite.reads_of(empty)) == "x s ws m n"


def test_values_flow_into_results_and_through_a_loop() -> None:
    parsed, _ = program()
    flows = {f"{a.name}>{b.name}" for a, b in rewrite.flows(loop_of(parsed.body))}
    assert flows == {"x>h", "m>hs", "s>g", "n>gs", "ws>w", "m>all"}
    assert [f"{a.name}>{b.name}" for a, b in rewrite.flows(parsed.body[0])] == ["x>s"]


def test_makers_are_the_operators_of_a_block() -> None:
    parsed, value = program()
    assert names(rewrite.makers(parsed.body)) == "s y z"
    assert rewrite.makers(loop_of(parsed.body).body)[value["m"]].name == "mul"


def test_a_slice_of_a_program_has_the_carries_that_it_needs() -> None:
    parsed, value = program()
    assert names(rewrite.feeding(parsed.body, {value["s"]})) in ("s x", "x s")
    wanted = {value["y"]}
    kept = rewrite.needed(parsed.body, wanted)
    loop = loop_of(kept)
    assert names(v for node in kept for v in node.makes) == "hs y"
    assert (names(loop.enters), names(v for n in loop.body for v in n.makes)) == ("h w", "m")
    assert {value["x"], value["ws"]} <= wanted
    assert value["s"] not in wanted


def test_a_slice_that_needs_everything_keeps_the_nodes() -> None:
    parsed, value = program()
    wanted = {value[name] for name in ("y", "z", "all")}
    assert rewrite.needed(parsed.body, wanted) == parsed.body


def test_a_mapped_node_is_another_one_and_its_body_too() -> None:
    parsed, value = program()
    other = replace(value["s"], name="t")
    loop = rewrite.mapped(loop_of(parsed.body), lambda v: other if v is value["s"] else v)
    assert names(rewrite.free(loop)) == "x t ws"
    assert all(node not in every(parsed.body) for node in every((loop,)))


@pytest.mark.parametrize("stage", ["named", "placed", "device"])
def test_every_kind_of_node_is_mapped_whole(stage: str) -> None:
    """No value is left: not in what a loop issues ahead, and not in a bucket."""
    for case in (Case("lm", "megatron_zero3"), Case("lm", "data_parallel")):
        body = getattr(made(case), stage).body
        new = functools.cache(replace)
        for node in body:
            mapped = rewrite.mapped(node, new)
            assert rewrite.reads_of(mapped) == tuple(map(new, rewrite.reads_of(node)))
            assert rewrite.makes_of(mapped) == tuple(map(new, rewrite.makes_of(node)))


def test_substitute_leaves_nodes_that_mention_no_value() -> None:
    parsed, value = program()
    nodes = rewrite.substitute(parsed.body, {value["z"]: replace(value["z"], name="sum")})
    assert nodes[0] is parsed.body[0]
    assert names(nodes[-1].makes) == "sum"
    assert rewrite.substitute(parsed.body, {}) == parsed.body


def test_origins_may_be_substituted_alone() -> None:
    parsed, value = program()
    s, y = value["s"], value["y"]
    grads = rewrite.rewritten(parsed.body, lambda op: [_gradient_of(op, s)])
    own = rewrite.substitute(grads, {}, origins={s: y})
    assert {node.origin.of.name for node in every(own) if node.origin} == {"y"}
    assert own[0].makes == grads[0].makes == (s,)


def _gradient_of(op: NamedOp, value: Value) -> NamedOp:
    return replace(op, phase="backward", origin=Origin(value))


def test_a_rule_replaces_operators_also_those_in_loops() -> None:
    parsed, _ = program()
    lines = printed(parsed, rewrite.rewritten(parsed.body, _negated))
    assert "%10 n = neg %9 : f32[i 2]" in lines
    assert sum(" = neg " in line for line in lines) == 5


def _negated(op: NamedOp) -> tuple[NamedOp, ...]:
    """The negative of an operator, under its name."""
    plain = replace(op.out, name=None)
    return replace(op, outs=(plain,)), replace(op, name="neg", ins=(plain,), attrs=())


def test_blocks_are_rewritten_from_the_inside() -> None:
    parsed, _ = program()
    sizes: list[int] = []

    def rule(block: tuple[Node, ...]) -> tuple[Node, ...]:
        sizes.append(len(block))
        return block[:1]

    assert len(tuple(every(rewrite.in_blocks(parsed.body, rule)))) == 1
    assert sizes[-2:] == [2, 4]
    assert rewrite.in_blocks(parsed.body, lambda block: block) == parsed.body


class _Renamed(rewrite.Rebuild):
    """Every value made anew under another name; a loop ends with an operator more."""

    def op(self, op: NamedOp) -> tuple[NamedOp, ...]:
        self.again(op.outs)
        return (self.on_new(op),)

    def enter(self, loop: NamedLoop) -> None:
        self.again(loop.enters)

    def leave(self, loop: NamedLoop) -> tuple[NamedOp, ...]:
        (carry, _) = loop.carries
        last = replace(carry.next, name="last")
        added = NamedOp("exp", (self.value(carry.next),), (last,), (), loop.span)
        self.new[carry.next] = last
        self.again(loop.makes)
        return (added,)

    def again(self, values: Iterable[Value]) -> None:
        self.new.update((v, replace(v, name=f"{v.name}2")) for v in values)


def test_a_rebuilt_program_is_one_on_other_values() -> None:
    parsed, _ = program()
    body = _Renamed().nodes(parsed.body)
    loop = loop_of(body)
    assert names(v for node in body for v in node.makes) == "s2 hs2 gs2 all2 y2 z2"
    assert names(rewrite.free(loop)) == "x s2 ws"
    assert (names(loop.enters), names(loop.ends)) == ("h2 g2 w2", "last n2 last")
    assert names(v for n in loop.body for v in n.makes) == "m2 n2 last"


def test_a_program_is_rebuilt_as_it_is() -> None:
    parsed, _ = program()
    assert printed(parsed, rewrite.Rebuild().nodes(parsed.body)) == printed(parsed, parsed.body)


def test_a_visitor_treats_loops_apart_also_those_without_a_body() -> None:
    class Kinds(rewrite.Visitor):
        def op(self, op: NamedOp, found: list[str]) -> None:
            found.append(op.name)

        def loop(self, loop: NamedLoop, found: list[str]) -> None:
            found.append(f"repeat {loop.dim.name}")

    parsed, _ = program()
    found: list[Any] = []
    for node in (parsed.body[0], replace(loop_of(parsed.body), body=())):
        Kinds().visit(node, found)
    assert found == ["exp", "repeat k"]
