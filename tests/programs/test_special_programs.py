"""Random programs on devices of which some have nothing: special values are those of one device.

Every axis that splits a dim leaves a device an empty block of it. What that device adds is neutral:
no infinity of another tensor may make a NaN of it. Where one device has all of a dim, values are of
every kind. Where several have some, they are positive: infinity times parts of both signs is not
infinity times their sum (docs/decisions.md). `MESHDSL_CASES=1000` runs that many programs.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from meshdsl.backends.runtime.values import Array
from tests.compiling import run_text
from tests.programs.special import INF, NAN, difference

CASES = int(os.environ.get("MESHDSL_CASES", "12"))
POLICIES = ("immediate", "mesh-tf", "deferred", "optimal")
DIMS = "bcde"
SHARES = {"x0": 0.0, "x1": 0.05, "x2": 0.2, "x3": 0.4}
"""The inputs, and how much of each is not finite: sums that are finite have to meet infinities."""

Dims = frozenset[str]
Term = tuple[str, Dims]
"""The text of an expression, and its dims."""


@dataclass
class Writer:
    """Writes one program of exact operators: whole numbers, infinities and NaN."""

    rng: random.Random
    split: tuple[str, ...]
    positive: bool
    sizes: dict[str, int] = field(default_factory=dict)
    inputs: dict[str, list[str]] = field(default_factory=dict)
    terms: list[Term] = field(default_factory=list)

    def text(self) -> str:
        """A program; `split` dims are of one element, or of two where values are positive."""
        wide = {d: self.rng.choice((1, 2, 4)) for d in DIMS}
        self.sizes = wide | dict.fromkeys(self.split, 2 if self.positive else 1)
        for name in SHARES:
            self.inputs[name] = self.rng.sample(DIMS, self.rng.randint(1, 3))
            self.terms.append((name, frozenset(self.inputs[name])))
        lines = [self.statement(index) for index in range(self.rng.randint(3, 7))]
        made = [term for term, _ in self.terms if term.startswith("t")]
        lines.append(f"g = {'x0' if self.positive else f'grad(sum({made[-1]} * sum(x0)), x0)'}")
        made = sorted(
            {*self.rng.sample(made, 2), made[-1]}
        )  # what is not returned may stay partial
        head = "\n".join(f"dim {d} = {n}" for d, n in self.sizes.items())
        given = ", ".join(f"{name}[{', '.join(dims)}]" for name, dims in self.inputs.items())
        body = "\n".join(f"  {line}" for line in (*lines, f"return {', '.join(made)}, g"))
        return f"{head}\nprogram p({given}) {{\n{body}\n}}\n"

    def statement(self, index: int) -> str:
        text, dims = self.expression(depth=2)
        self.terms.append((f"t{index}", dims))
        return f"t{index} = {text}"

    def expression(self, depth: int) -> Term:
        if depth == 0 or self.rng.random() < 0.15:
            return self.rng.choice(self.terms[-5:] if self.rng.random() < 0.5 else self.terms)
        left = self.expression(depth - 1)
        if self.rng.random() < 0.4:
            return self.binary(self.reduced(left, depth), depth)
        return self.rng.choice((self.reduced, self.binary, self.unary))(left, depth)

    def reduced(self, of: Term, depth: int) -> Term:
        """A sum, mean or extreme over some dims, or a contraction with another term."""
        text, dims = of
        if not dims:
            return self.binary(of, depth)
        gone = frozenset(self.rng.sample(sorted(dims), self.rng.randint(1, len(dims))))
        if self.rng.random() < 0.7:
            gone |= dims.intersection(self.split)
        other, others = self.expression(depth - 1)
        if self.rng.random() < 0.3 and gone <= others:
            left = (dims | others) - gone
            return f"einsum({text}, {other} -> [{', '.join(sorted(left))}])", left
        kind = self.rng.choice(("sum", "sum", "sum", "mean", "max", "min"))
        return f"{kind}[{', '.join(sorted(gone))}]({text})", dims - gone

    def binary(self, of: Term, depth: int) -> Term:
        text, dims = of
        other, others = self.expression(depth - 1)
        forms = ["({0} + {1})", *["({0} * {1})"] * 4, "maximum({0}, {1})"]
        signed = ["({0} - {1})", "where({0} > 0.0, {0}, {1})", "where({1} > 0.0, {0}, {1})"]
        form = self.rng.choice(forms if self.positive else forms + signed)
        return form.format(text, other), dims | others

    def unary(self, of: Term, depth: int) -> Term:
        del depth
        forms = ["relu({0})", "abs({0})", "({0} * 2.0)", "({0} / 2.0)", "{0}^2"]
        form = self.rng.choice(forms if self.positive else [*forms, "(-{0})"])
        return form.format(of[0]), of[1]


def values(rng: np.random.Generator, shape: tuple[int, ...], share: float, positive: bool) -> Array:
    """Whole numbers from -2 to 2, or 1 and 2, of which about a share is not finite."""
    numbers = rng.integers(1 if positive else -2, 3, shape).astype(np.float32)
    ends = np.array([INF, INF if positive else -INF, NAN], np.float32)
    special = rng.choice(ends, shape, p=[0.45, 0.45, 0.1])
    return np.where(rng.random(shape) < share, special, numbers)


@pytest.mark.parametrize("number", range(CASES))
def test_what_has_nothing_changes_no_special_value(number: int) -> None:
    rng, drawn = random.Random(number), np.random.default_rng(number)
    positive = number % 3 == 0
    axes = rng.choice(({"x": 3}, {"x": 3, "y": 3}) if positive else ({"x": 2}, {"x": 3, "y": 2}))
    split = tuple(rng.sample(DIMS, len(axes)))
    writer = Writer(rng, split, positive)
    text = writer.text()
    rules = ",".join(f"{d}:{a}" for d, a in zip(split, axes, strict=True))
    mesh = ",".join(f"{a}:{n}" for a, n in axes.items())
    inputs = {
        name: values(drawn, tuple(writer.sizes[d] for d in dims), SHARES[name], positive)
        for name, dims in writer.inputs.items()
    }
    expected = run_text(text, inputs)
    for reduce in {"deferred", rng.choice(POLICIES)}:
        found = run_text(text, inputs, mesh=mesh, layout=rules, reduce=reduce)
        for name, array in expected.items():
            how = difference(found[name], array, 1e-6)
            assert not how, f"{name} under {rules} on {mesh}, {reduce}: {how}\n{text}"
