"""`optimal` against every plan of small programs: chains and fan-outs of linear operators."""

from __future__ import annotations

import os
import random
import re

import pytest

from meshdsl.diagnostics import DiagnosticError
from meshdsl.report.explanation import explain
from tests.compiling import compile_text
from tests.placed.every_plan import EveryPlan

CASES = int(os.environ.get("MESHDSL_CASES", "20"))
MESHES = ({"x": 2}, {"x": 2, "y": 2})
SIZES = {"a": (4, 8), "b": (4, 16), "c": (4, 32)}


class Drawn:
    """One program, its rules and its mesh, drawn at random."""

    def __init__(self, number: int, differentiated: bool) -> None:
        self.draw = random.Random(number)
        self.differentiated = differentiated
        self.mesh = MESHES[number % 4 == 3]
        self.sizes = {d: self.draw.choice(sizes) for d, sizes in SIZES.items()}
        self.values: dict[str, tuple[str, ...]] = {
            "u": ("a", "b"), "v": ("b", "c"), "w": ("a", "b")
        }  # fmt: skip
        self.lines: list[str] = []
        self.leaves: dict[str, set[str]] = {name: {name} for name in self.values}
        count = self.draw.randint(2, 3 if differentiated else 6)
        while len(self.lines) < count:
            self._statement()
        axes = self.draw.choices([*self.mesh], k=2)
        self.rules = dict(zip(self.draw.sample("abc", self.draw.randint(1, 2)), axes, strict=False))

    def _statement(self) -> None:
        kind = self.draw.choice(("product", "sum", "unary", "unary", "add", "add"))
        names = [*self.values][-4:]
        one = self.draw.choice(names)
        dims = self.values[one]
        name = f"t{len(self.lines)}"
        if kind == "product":
            other = self.draw.choice([*self.values])
            every = [*dict.fromkeys((*dims, *self.values[other]))]
            kept = tuple(d for d in every if self.draw.random() < 0.6) or (every[0],)
            self._line(name, f"einsum({one}, {other} -> [{', '.join(kept)}])", kept)
        elif kind == "sum" and len(dims) > 1:
            gone = self.draw.choice(dims)
            self._line(name, f"sum[{gone}]({one})", tuple(d for d in dims if d != gone))
        elif kind == "add":
            others = [n for n, ds in self.values.items() if set(ds) == set(dims)]
            self._line(name, f"{one} {self.draw.choice('+-')} {self.draw.choice(others)}", dims)
        elif kind == "unary":
            self._line(name, self.draw.choice(("-{0}", "{0} * 2.0", "relu({0})")).format(one), dims)

    def _line(self, name: str, text: str, dims: tuple[str, ...]) -> None:
        self.lines.append(f"{name} = {text}")
        read = (
            leaves for value, leaves in self.leaves.items() if value in re.findall(r"\w+", text)
        )
        self.leaves[name] = set().union(*read)
        self.values[name] = dims

    def text(self) -> str:
        head = "\n".join(f"dim {d} = {n}" for d, n in self.sizes.items())
        rules = ", ".join(f"{d} -> {a}" for d, a in self.rules.items())
        made = [n for n in self.values if n.startswith("t")]
        lines, returned = list(self.lines), made[-1 - len(made) % 2 :]
        if self.differentiated:
            leaves = sorted(self.leaves[made[-1]])
            returned = [f"d{leaf}" for leaf in leaves]
            lines.append(f"loss = sum({made[-1]} * {made[-1]})")
            lines.append(f"{', '.join(returned)} = grad(loss, {', '.join(leaves)})")
        inputs = ", ".join(f"{n}[{', '.join(self.values[n])}]" for n in "uvw")
        body = "\n".join(f"  {line}" for line in (*lines, f"return {', '.join(returned)}"))
        return f"{head}\nlayout l {{ {rules} }}\nprogram p({inputs}) {{\n{body}\n}}\n"


def proven(number: int, differentiated: bool) -> bool | None:
    """Whether the plan of a program is the least; None where its rules contradict each other.

    Where a walk took a row that no plan of the layout has, it may send less than any.
    """
    drawn = Drawn(number, differentiated)
    text, mesh = drawn.text(), ",".join(f"{a}:{n}" for a, n in drawn.mesh.items())
    try:
        made = compile_text(text, mesh=mesh, layout="l", message_bytes=0, cache=False)
        ours = explain(made.device)["totals"]["wire_bytes"]
    except DiagnosticError as error:
        if error.diagnostics[0].code != "MD0302":
            raise
        return None
    least = EveryPlan(made.named, drawn.rules, drawn.mesh, ours).least()
    assert made.placed.plan is not None
    is_least = made.placed.plan.least
    right = least == ours if is_least else least in (None, ours)
    assert right, f"{ours} B where {least} B do, on {mesh}\n{text}"
    return is_least


@pytest.mark.parametrize("differentiated", [False, True])
def test_no_plan_of_a_layout_sends_less(differentiated: bool) -> None:
    found = [proven(number, differentiated) for number in range(CASES)]
    compared = [is_least for is_least in found if is_least is not None]
    assert len(compared) > CASES / 2
    assert sum(compared) > 0.9 * len(compared)
