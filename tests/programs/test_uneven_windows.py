"""Operators that read beyond a block, on blocks of several sizes and on devices with nothing.

Random chains of them with gradients, as on one device; bytes predicted are bytes counted.
`MESHDSL_CASES=1000` runs so many.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field

import pytest

from meshdsl.placed.place import POLICIES
from tests.programs.harness import Case, run_case

WAYS = (("a:2", "a"), ("a:3", "a"), ("a:4", "a"), ("a:2,b:2", "(a, b)"), ("a:2,b:3", "(b, a)"))


@dataclass
class Chain:
    """A program in the making: its dims, its statements, and tensors with their dim and size."""

    rng: random.Random
    sizes: dict[str, int]
    lines: list[str] = field(default_factory=list)
    tensors: list[tuple[str, str]] = field(default_factory=lambda: [("u", "n")])

    def dim(self, size: int) -> str:
        """A new dim; none is made of a size that no dim has."""
        name = f"d{len(self.sizes)}"
        self.sizes[name] = size
        return name

    def statement(self) -> None:
        """One more tensor, unless the operator drawn has no room."""
        (x, d), rng = self.rng.choice(self.tensors), self.rng
        n, made, number = self.sizes[d], d, len(self.lines)
        kind = rng.choice(("moved", "pad", "slice", "concat", "conv", "pool", "window", "cumsum"))
        size, stride, before = rng.randint(1, 4), rng.randint(1, 3), rng.randint(0, 3)
        if kind == "moved":
            by = rng.randint(-n, n)
            moves = (f"shift[{d}]({x}, {by})", f"roll[{d}]({x}, {by})", f"reverse[{d}]({x})")
            text = rng.choice(moves)
        elif kind == "pad":
            made = self.dim(n + before + size)
            text = f"pad[{d} -> {made}]({x}, {before}, {size}, 0.5)"
        elif kind == "slice" and n > 1:
            start = rng.randint(0, n - 2)
            made = self.dim(n - 1 - start)
            text = f"{x}[{d} = {start}:{n - 1} -> {made}]"
        elif kind == "concat":
            y, other = rng.choice(self.tensors)
            made = self.dim(n + self.sizes[other])
            text = f"concat[({d}, {other}) -> {made}]({x}, {y})"
        elif kind == "conv" and n + 2 * before > 2 * size - 2:
            made, taps = self.dim((n + 2 * before - 2 * size + 1) // stride + 1), f"k{number}"
            self.sizes[taps] = size
            self.lines.append(f"param p{number}[{taps}]")
            options = f"stride={stride}, pad={before}, dilation=2"
            text = f"conv[{d} by {taps} -> {made}]({x}, p{number}, {options})"
        elif kind == "pool" and n >= size:
            made = self.dim((n - size + size // 2 * 2) // stride + 1)
            pool = rng.choice(("max_pool", "avg_pool"))
            options = f"stride={stride}, pad={size // 2}"
            options += rng.choice(("", ", pad_counts=0")) if pool == "avg_pool" else ""
            text = f"{pool}[{d} by {size} -> {made}]({x}, {options})"
        elif kind == "window":
            taps, before = f"k{number}", min(before, size - 1)
            self.sizes[taps] = size
            seen = f"window[{d} by {size} -> {taps}]({x}, before={before})"
            text = f"sum[{taps}](square({seen}))"
        else:
            text = f"cumsum[{d}]({x})"
        self.lines.append(f"v{number} = {text}")
        self.tensors.append((f"v{number}", made))


def chain(number: int) -> Case:
    """One to four statements, with ties among what is drawn, and a layout of all their dims."""
    rng = random.Random(number)
    made = Chain(rng, {"n": rng.choice((1, 2, 3, 5, 7, 8)), "m": rng.choice((1, 2, 3))})
    for _ in range(rng.randint(1, 4)):
        made.statement()
    names = [name for name, _ in made.tensors[1:]]
    loss = " + ".join(f"sum({name} * {name})" for name in names[-2:])
    last = ["", f"loss = {loss}", "dw, dx = grad(loss, w, x)"]
    last.append(f"return loss, {', '.join(names)}, dw, dx")
    dims = "".join(f"dim {d} = {n}\n" for d, n in made.sizes.items())
    body = "\n  ".join(["param w[n, m]", "u = x * w", *made.lines, *last])
    mesh, axes = rng.choice(WAYS)
    split = [d for d in dict.fromkeys(d for _, d in made.tensors) if rng.random() < 0.85]
    rules = ", ".join(f"{d} -> {axes}" for d in split)
    text = f"{dims}\nprogram p(x[n, m]) {{\n  {body}\n}}\n"
    return Case(text, mesh, f"{{ {rules or 'n -> none'} }}", rng.choice(POLICIES))


@pytest.mark.parametrize("number", range(int(os.environ.get("MESHDSL_CASES", "8"))))
def test_a_chain_of_windows_of_uneven_blocks(number: int) -> None:
    run_case(chain(number))
