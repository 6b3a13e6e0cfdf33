"""Random steps in pipelines: two in turn, the second from what the first has stored.

Both have the numbers of one device: with micro-batches of a batch or of `accumulate`, sums that
are reduced in each, rules of their own for gradients and parameters, parameters of the samples, of
which each micro-batch has a block, functions whose features are where the samples were, and names
that emitted texts have themselves.

`MESHDSL_CASES=500` runs that many instead of 12, and new ones each time.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import HealthCheck, event, given, seed, settings
from hypothesis import strategies as st

from meshdsl.backends.runtime.values import Array
from meshdsl.diagnostics import DiagnosticError, Source
from meshdsl.pipeline import Compilation, Options
from meshdsl.placed.place import POLICIES
from tests.pipelines.test_programs import hold_to
from tests.programs.expressions import Draw
from tests.training.stepping import on_devices

SHARDS = 2
CASES = int(os.environ.get("MESHDSL_CASES", "12")) // SHARDS

REFUSALS = frozenset(
    """MD0301 MD0302 MD0304 MD0305 MD0330 MD0331 MD0332 MD0333 MD0335 MD0338 MD0339 MD0529 MD0907
    """.split()
)
"""The codes of pipelines that are not built, and of layouts that are none."""

NAMES = """SCHEDULE GROUPS MESH LOSS Line actions main torch dist np kept stage stages inputs
    weights forward backward update states device rank step micro action x_line time chunks
    """.split()
"""Names that texts of pipelines have, too."""

MESHES = {
    "p:2": "",
    "p:4": "",
    "p:2,d:2": "batch -> d",
    "p:2,t:2": "m -> t",
    "p:2,d:2,t:2": "batch -> d, m -> t",
}
RULES = ("grads: layers -> t", "grads: m -> d", "params: m -> d", "state: m -> d", "grads: m -> t")
SCHEDULES = (
    "naive", "gpipe", "one_f_one_b", "eager", "zb_h1", "zb_h2", "interleaved(chunks=2)",
    "breadth_first(chunks=2)", "chimera", "zb_v", "dualpipe_v",
)  # fmt: skip
OPTIMIZERS = ("sgd(lr=0.5", "momentum(lr=0.1", "adamw(lr=0.1, eps=1.0", "sgd(lr=0.5, clip=0.1")


@dataclass(frozen=True, slots=True)
class Case:
    """A program, a mesh, and its layout with a schedule."""

    text: str
    mesh: str
    layout: str
    policy: str

    def compiled(self, mesh: str, layout: str) -> Compilation:
        """The step on a mesh under a layout, in f64."""
        source = Source("p.mdsl", f"{self.text}layout chosen {layout}\n")
        options = Options(mesh=mesh, layout="chosen", reduce=self.policy, dtype="f64")
        return Compilation(source, options).measured


@dataclass(slots=True)
class Writer:
    """Writes a program whose layers are stages, with names of the text in their turn."""

    draw: Draw  # type: ignore[type-arg]
    names: list[str] = field(default_factory=lambda: [*NAMES])
    count: int = 0

    def pick(self, items: tuple[str, ...]) -> str:
        found: str = self.draw(st.sampled_from(items))
        return found

    def often(self, of: int = 2) -> bool:
        """Once in so many times."""
        return int(self.draw(st.integers(0, of - 1))) == 0

    def name(self) -> str:
        """A name of no other: one of a text, or of no meaning."""
        self.count += 1
        if self.often():
            return self.names.pop(int(self.draw(st.integers(0, len(self.names) - 1))))
        return f"v{self.count}"

    def parameter(self) -> tuple[str, str]:
        """The declaration of a parameter, and how it changes a value `x[batch, m]`."""
        name = self.name()
        dims = self.pick(("m", "m", "batch", "batch, m", "", "m, o"))
        if dims == "m, o":
            return f"param {name}[m, o]", f"einsum(VALUE, {name} -> [batch, o])[o -> m]"
        sign = self.pick(("*", "+", "-"))
        return f"param {name}[{dims}]", f"VALUE {sign} {name}"

    def changed(self, value: str, lines: list[str]) -> str:
        """An expression of a value and of parameters that lines declare."""
        for _ in range(int(self.draw(st.integers(0, 2)))):
            declared, used = self.parameter()
            lines.append(declared)
            value = used.replace("VALUE", f"({value})")
        return value

    def program(self, accumulate: int) -> str:
        """The text of the program."""
        x, target = self.name(), self.name()
        before, inside = list[str](), list[str]()
        begun = self.changed(x, before)
        value = self.name()
        made = f"tanh({self.changed(value, inside)})"
        declared, used = self.parameter()
        inside.append(declared)
        made = used.replace("VALUE", made)
        made = f"turned({made})" if self.often(3) else made
        again = self.often(3)
        behind = list[str]()
        result = self.changed(value, behind)
        if self.often(3) and "[batch" in "".join(before):  # of the first stage, and of the last one
            names = [line.split()[1].partition("[")[0] for line in before if "[batch" in line]
            result = f"({result}) * {names[0]}"
        returned = self.pick(("", f", {value}", ", outcome"))
        optimizer = self.pick(OPTIMIZERS)
        every = f", accumulate={accumulate}" if accumulate else ""
        newline = "\n    "
        body = f"{newline.join([*inside, f'{value} = {made}'])}"
        body = f"recompute {{\n    {body}\n    }}" if again else body
        return f"""dim batch = 8, m = 4, layers = 8, o = m
def turned(v[batch, m]) -> [batch, m] {{
  param turn[m, o]
  return sin(einsum(v, turn -> [batch, o])[o -> m])
}}
program net({x}[batch, m], {target}[batch, m]) {{
  {newline.join([*before, f"{value} = {begun}"])}
  repeat layers {{
    {body}
  }}
  {newline.join([*behind, f"outcome = {result}"])}
  loss = mean(square(outcome - {target}))
  return loss{returned}
  minimize loss with {optimizer}{every})
}}
"""


@st.composite
def cases(draw: Draw) -> Case:  # type: ignore[type-arg]
    """A step with stages, under a schedule of micro-batches or of what it accumulates."""
    writer = Writer(draw)
    mesh = writer.pick((*MESHES,))
    micro = int(draw(st.sampled_from((2, 4))))
    accumulates = writer.often()
    text = writer.program(micro if accumulates else 0)
    axes = {part.partition(":")[0] for part in mesh.split(",")}
    chosen = (rule for rule in RULES if rule[-1] in axes and writer.often(3))
    more = {rule.partition("->")[0]: rule for rule in chosen}  # one for each dim
    rules = ", ".join(filter(None, ("layers -> p", MESHES[mesh], *more.values())))
    if "turned((" in text.partition("program")[2] and "d" in axes:
        rules += ", turned: m -> d"  # the samples of a micro-batch are exchanged for features
    name, _, options = writer.pick(SCHEDULES).rstrip(")").partition("(")
    given = ["reduce=each"] if writer.often() else []
    given = [*([options] if options else []), *given]
    if accumulates:
        schedule = f"{name}({', '.join(given)})" if given else name
    else:
        schedule = f"{name}[batch]({', '.join([str(micro), *given])})"
    return Case(text, mesh, f"{{ {rules} }} with {schedule}", writer.pick(POLICIES))


def steps(made: Compilation) -> list[dict[str, Array]]:
    """What two steps return and store; the second goes on from what the first has stored."""
    first = on_devices(made.emitted, {}, {}).run
    second = on_devices(made.emitted, {}, first.updated).run
    return [{**run.outputs, **run.updated} for run in (first, second)]


def refusal(case: Case) -> str:
    """The code with which a layout is refused; empty where it is accepted."""
    try:
        case.compiled(case.mesh, case.layout).checked()
    except DiagnosticError as error:
        return error.diagnostics[0].code
    return ""


def check(case: Case) -> None:
    """The case has the numbers of one device, or its layout is refused with a reason.

    Whether it is refused does not depend on the policy: the next one does the same. Only
    `reduce=each` is refused (MD0335) under some policies and not under others.
    """
    made, code = case.compiled(case.mesh, case.layout), refusal(case)
    other = POLICIES[(POLICIES.index(case.policy) + 1) % len(POLICIES)]
    codes = {code, refusal(replace(case, policy=other))}
    assert len(codes) == 1 or (codes == {"", "MD0335"} and "reduce=each" in case.layout)
    if code:
        assert code in REFUSALS
        event(f"refused: {code}")
        return
    alone = steps(case.compiled("p:1", "{ layers -> p }"))
    for found, expected in zip(steps(made), alone, strict=True):
        # Differences below 1e-12 are rounding, also of a gradient that is 0 but for that.
        hold_to(found, expected, 1e-9, least=1e-3)
    event("ran")


@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_steps_are_those_of_one_device(shard: int) -> None:
    test = settings(max_examples=CASES, suppress_health_check=list(HealthCheck))(
        given(case=cases())(lambda case: check(case))
    )
    if "MESHDSL_CASES" not in os.environ:
        test = seed(shard)(test)
    test()
