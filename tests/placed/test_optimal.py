"""`optimal` against brute force: every way to annotate the intermediates of small programs."""

from __future__ import annotations

import itertools

import pytest

from meshdsl.diagnostics import DiagnosticError, Diagnostics, Source
from meshdsl.named.ir import Value, walk
from meshdsl.pipeline import Compilation, Options, compile_source
from meshdsl.report.explanation import explain
from meshdsl.report.remedies import sent
from tests.compiling import compile_text, named
from tests.covering import in_turn

HEAD = "dim m = 8, a = 8, n = {n}, k = {k}\n"
PROGRAMS = {
    "a chain": """program p(u[m, a], v[a, n], w[n, k]) {{
  t = einsum(u, v -> [m, n])
  y = einsum(t, w -> [m, k])
  return y
}}""",
    "a residual": """program p(u[m, a], v[a, n], r[m, n]) {{
  t = einsum(u, v -> [m, n])
  s = t + r
  y = sum[n](s)
  return y
}}""",
    "a nonlinearity": """program p(u[m, a], v[a, n], w[n, k]) {{
  t = einsum(u, v -> [m, n])
  h = relu(t)
  y = einsum(h, w -> [m, k])
  return y
}}""",
    "two readers": """program p(u[m, a], v[a, n]) {{
  t = einsum(u, v -> [m, n])
  s = -t
  y = sum[n](s) + sum[n](relu(t))
  return y
}}""",
}
SIZES = [{"n": 4, "k": 16}, {"n": 16, "k": 4}, {"n": 8, "k": 8}]
MESHES = {"x:4": 1, "x:2,z:2": 2}
LAYOUTS = {"x:4": "a:x", "x:2,z:2": "a:x,a:z"}


def entry(value: Value, components: tuple[str, ...]) -> str:
    """One line of an `sbp` block."""
    return f"{value.name}: ({', '.join(components)},)"


def least(text: str, mesh: str) -> int:
    """The fewest bytes of all annotations of the named intermediates; inputs as the layout says."""
    axes = MESHES[mesh]
    program = named(text)
    fixed = [
        entry(v, (f"S({v.type.index('a')})" if v.type.has("a") else "B",) * axes)
        for v in program.inputs
    ]
    inner = [v for op in walk(program.body) for v in op.outs if v.name and v.name != "y"]
    options = [
        list(
            itertools.product(
                ["B", "P", *(f"S({i})" for i in range(len(v.type.dims)))], repeat=axes
            )
        )
        for v in inner
    ]
    ways = []
    for picked in itertools.product(*options):
        lines = [*fixed, *(entry(v, c) for v, c in zip(inner, picked, strict=True))]
        lines.append(entry(program.outputs[0].value, ("B",) * axes))
        ways.append("\n".join(lines))
    blocks = "".join(f"\nsbp way{n} {{\n{way}\n}}" for n, way in enumerate(ways))
    source = Source("test.mdsl", f"{text}{blocks}\n")
    built = compile_source(source, Options(), Diagnostics(), until="named")
    found = (sent_under(built, mesh, f"way{n}") for n in range(len(ways)))
    return min(n for n in found if n is not None)


def sent_under(built: Compilation, mesh: str, way: str) -> int | None:
    """The bytes of a program under an `sbp` block, or None where the block is not legal."""
    try:
        made = built.under(Options(mesh=mesh, sbp=way, reduce="deferred"), Diagnostics()).checked()
    except DiagnosticError as error:
        if error.diagnostics[0].code in ("MD0301", "MD0309"):
            return None
        raise
    return sent(made.device)  # all that is compared of the hundreds of ways


@in_turn(name=PROGRAMS, mesh=MESHES)
def test_no_annotation_sends_less(name: str, mesh: str) -> None:
    for sizes in SIZES if mesh == "x:4" else SIZES[:1]:
        text = (HEAD + PROGRAMS[name]).format(**sizes)
        made = compile_text(text, mesh=mesh, layout=LAYOUTS[mesh], message_bytes=0)
        plan = made.placed.plan
        assert plan is not None
        assert plan.proven
        said = explain(made.device)["totals"]["wire_bytes"]
        assert said == sent(made.device)
        assert said <= least(text, mesh), sizes


SLICED = """
dim b = 8, m = 4, o = m, l = 4
program p(x[b, m]) {
  param w[l, m, o]
  v = w * 2.0
  repeat l { x = tanh(einsum(x, v -> [b, o])[o -> m]) }
  return x
}
"""


@pytest.mark.parametrize(("layout", "proven"), [("b -> x", True), ("w: l -> x, b -> y", False)])
def test_nothing_is_proven_where_the_loop_reads_a_stack_that_is_split_along_it(
    layout: str, proven: bool
) -> None:
    """Other placements that such a stack might have before the loop are not searched."""
    text = f"{SLICED}layout chosen {{ {layout} }}\n"
    made = compile_text(text, mesh="x:2,y:2", layout="chosen")
    assert made.placed.plan is not None
    assert made.placed.plan.proven is proven
