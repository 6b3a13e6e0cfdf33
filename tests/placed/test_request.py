"""The placements that a layout and an `sbp` block request, for the walk and the search alike."""

from __future__ import annotations

import pytest

from meshdsl.diagnostics import Diagnostics, Source, Span
from meshdsl.ir.types import Dim
from meshdsl.named.ir import NamedOp, Value, walk
from meshdsl.pipeline import Options, compile_source
from meshdsl.placed.layout import Binding, Layout, resolve_layout, resolve_mesh
from meshdsl.placed.placements import Placement
from meshdsl.placed.request import BlockRequest, Request
from meshdsl.placed.sbp_block import resolve_sbp
from tests.compiling import compile_text

TEXT = """
dim m = 8, a = 8, n = 8
mesh two = { x: 2, y: 1 }
layout rules { a -> x, t: n -> x, y: n -> none }
sbp block { u: (S(1), B), t: (P, B), t at y: (S(1), B) }
program p(u[m, a], v[a, n]) {
  t = einsum(u, v -> [m, n])
  y = exp(t)
  return y
}
"""
WHOLE = Placement()


def split(dim: str) -> Placement:
    return Placement(((dim, ("x",)),))


def requests() -> tuple[Request, BlockRequest]:
    """The requests of the layout and of the block for the program."""
    made = compile_source(Source("case.mdsl", TEXT), Options(), Diagnostics(), "named")
    mesh = resolve_mesh(made.declarations, "two")
    rules = resolve_layout(made.declarations, "rules", mesh)
    block = resolve_sbp(made.declarations, "block", mesh)
    by_block = BlockRequest(made.named, Layout("block", (), mesh), annotations=block)
    return Request(made.named, rules), by_block


def parts(request: Request) -> tuple[dict[str, Value], dict[str, NamedOp]]:
    ops = {op.out.label: op for op in walk(request.program.body)}
    values = {v.label: v for v in request.program.inputs}
    return values | {name: op.out for name, op in ops.items()}, ops


def test_rules_ask_for_splits_and_say_which_rule_did() -> None:
    request, _ = requests()
    values, ops = parts(request)
    asked = {name: request.ruled(value) for name, value in values.items()}
    assert asked == {"u": split("a"), "v": split("a"), "t": split("n"), "y": WHOLE}
    assert {d: cause.text for d, cause in request.asked(values["t"]).causes.items()} == {
        "n": "t: n -> x"
    }
    assert [(w.kind, w.placement) for w in request.wants(ops["t"])] == [("ruled", split("n"))]
    assert request.pins(ops["y"]) == (None,)
    assert request.output(values["y"]) == WHOLE
    # A rule to `none` leaves no axis free.
    assert (request.may_split(values["t"]), request.may_split(values["y"])) == (("m", "n"), ("m",))


def test_a_block_asks_for_just_what_it_annotates_and_tells_readers_apart() -> None:
    _, request = requests()
    values, ops = parts(request)
    partial = Placement((), ("x",), "sum")
    asked = {name: request.ruled(value) for name, value in values.items()}
    assert asked == {"u": split("a"), "v": WHOLE, "t": partial, "y": WHOLE}
    assert [(w.kind, w.placement) for w in request.wants(ops["t"])] == [("exact", partial)]
    assert [w.kind for w in request.wants(ops["y"])] == ["free"]
    assert request.pins(ops["y"]) == (split("n"),)
    assert not request.alike(ops["t"], ops["t"])


READ_TWICE = """
dim m = 8, n = 8
mesh two = { x: 2 }
sbp block { u: B, u at y: S(0), u at z: S(1) }
program p(u[m, n]) {
  y = exp(u)
  z = tanh(u)
  return y, z
}
"""


def test_an_annotation_for_one_reader_binds_no_other_one() -> None:
    made = compile_text(READ_TWICE, sbp="block", reduce="deferred").placed
    found = {t.value.label: t.placement for t in made.tensors}
    assert (found["y"], found["z"]) == (split("m"), split("n"))


@pytest.mark.parametrize("which", [0, 1])
def test_a_request_is_frozen_and_made_up_dims_give_another_one(which: int) -> None:
    request = requests()[which]
    span = Span(request.program.span.source, 0, 0)
    other = request.also(Dim("a.blocks", 2), ("x",), span)
    assert other.known - request.known == {("a.blocks", "x")}
    assert request.on(request.program).layout is request.layout


def test_outputs_of_a_block_lie_where_a_walk_has_left_them() -> None:
    _, request = requests()
    y = request.program.outputs[0].value
    assert request.output(y) is None
    assert request.on(request.program, {y: split("m")}).output(y) == split("m")


MANY_ALIKE = """
dim m = 8, n = 8
mesh two = { x: 2 }
layout rules { m -> x RULE }
program p(u[m, n]) {
  a = exp(u)
  b = tanh(a)
  c = relu(b)
  return c * a
}
"""


@pytest.mark.parametrize(("rule", "binds"), [("", 2), (", c: n -> none", 5)])
def test_rules_are_applied_once_to_all_values_that_they_cannot_tell_apart(
    rule: str, binds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = compile_source(
        Source("case.mdsl", MANY_ALIKE.replace(" RULE", rule)), Options(), Diagnostics(), "named"
    )
    layout = resolve_layout(made.declarations, "rules", resolve_mesh(made.declarations, "two"))
    bound: list[Value] = []
    bind = Layout.bind

    def noted(self: Layout, value: Value, stored: bool = False) -> Binding:
        bound.append(value)
        return bind(self, value, stored)

    monkeypatch.setattr(Layout, "bind", noted)
    request = Request(made.named, layout)
    values = [*made.named.inputs, *(v for op in walk(made.named.body) for v in op.outs)]
    for _ in range(2):
        assert {request.ruled(v) for v in values} == {split("m")}
        request = request.on(made.named)
    assert len(bound) == binds  # an input is not computed; a rule for a tensor tells all apart
