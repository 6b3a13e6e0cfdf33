"""Numbers made of the sizes of dims: what a text says of them, its `to_mdsl` says at every size."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from meshdsl.api.programs import read
from meshdsl.diagnostics import DiagnosticError, Diagnostics, Source
from meshdsl.ir.types import Dim
from meshdsl.named.ir import walk
from meshdsl.named.printer import print_program
from meshdsl.named.size_formulas import as_float, dims_of, how_of, made, size_of
from meshdsl.pipeline import front
from tests.compiling import named
from tests.report.golden import ALL, SOME, source

DIMS = """\
dim n = 4, batch = 2, heads = 3, seq = 2 * n, mem = seq, key = 2^n, half = key / 2
dim tail = seq - 1, wide = seq + n, part = seq - n, model = heads * key, both = -n + 2 * seq + n
"""

BODIES = {
    "a root": "return x / sqrt(key)",
    "a power": "return x * key^-0.5 + x^heads + key^x",
    "a mean by hand": "return sum[seq](x) / batch + sum(x) / (batch * seq)",
    "what would be dropped where it is 1": "return x * batch + x / heads + (x + n) - seq",
    "what would be a square": "return x^batch + x^heads",
    "named numbers": "s = sqrt(key) + 1.0\n  t = s * s / batch\n  return x * t",
    "every function of numbers": (
        "c = abs(-key) + rsqrt(key) + exp(-n) + log(seq) + floor(key / 3) + square(n) + key^2\n"
        "  d = minimum(n, seq) + maximum(batch, 3) - -n * (batch - n) / (seq / n) - (n - (n - 1))\n"
        "  return x * c + d"
    ),
    "a slice": (
        "return x[seq = 1: -> tail] + 1.0, x[seq = n:seq -> part], x[seq = 0:seq - 1 -> tail]"
    ),
    "an index": "return x[seq = n - 1, key = n]",
    "options": "return pad[seq -> wide](x, n - batch, batch, -heads), shift[seq](x, n)",
    "a default that it happens to be": "return pad[seq -> wide](x, n, 0, n - n)",
    "integers": "return iota[seq] * n + heads - iota[seq]",
    "comparisons": "return where(iota[seq] < n, x, -key)",
    "a function": "return norm[key](x, 1.0) + norm[seq](x, sqrt(batch)) + scaled(x, n)",
    "a loop": (
        "repeat heads {\n    param w[key] = normal(1 / sqrt(key * n))\n    x = x * w / n\n  }\n"
        "  return x"
    ),
    "the library": (
        "return layer_norm[key](x, ones[key](), zeros[key]()) + softmax[seq](x) / batch"
    ),
    "an initialiser": "param w[key] = uniform(-1 / n, 1 / n)\n  return x * w",
    "an optimizer": (
        "param w[key]\n  loss = mean(x * w)\n  return loss\n  minimize loss with "
        "adamw(lr=cosine(model^-0.5, 1000 * batch, warmup=n), accumulate=heads, clip=1 / n)"
    ),
    "one that happens to be the default": (
        "param w[key]\n  loss = mean(x * w)\n  return loss\n  minimize loss with "
        "momentum(lr=linear_warmup(1 / key, n), accumulate=n - 3)"
    ),
}

FUNCTIONS = """\
def norm[d](x[..., d], s) -> [..., d] {
  return x * rsqrt(d) * s / (mean[d](x * x) + 1 / d)
}
def scaled(x[batch, seq, key], factor) -> [batch, seq, key] {
  return x * factor / sqrt(key)
}
"""

SETTINGS: tuple[Mapping[str, int], ...] = (
    {},
    {"batch": 1},
    {"n": 1},
    {"n": 5, "heads": 1},
    {"key": 64},
    {"seq": 12, "tail": 3},
    {"heads": 2, "batch": 7},
)


def text_of(body: str) -> str:
    return f"{DIMS}{FUNCTIONS}program p(x[batch, seq, key]) {{\n  {body}\n}}\n"


def written(text: str, sizes: Mapping[str, int] | None = None) -> str:
    """The `to_mdsl` of a text, at these sizes."""
    return read(Source("test.mdsl", text), None, sizes or {}).to_mdsl()


def at(text: str, sizes: Mapping[str, int]) -> list[str]:
    """The named program at these sizes, without source lines; or why there is none."""
    needed = {n: size for n, size in sizes.items() if f"{n} =" in text}
    try:
        program = named(text, set_dims=needed)
    except DiagnosticError as error:
        return [d.code for d in error.diagnostics]
    lines = print_program(program).splitlines()
    return [line for line in lines if not line.strip().startswith("# ")]


@pytest.mark.parametrize("name", BODIES)
def test_the_written_text_means_the_same_at_every_size(name: str) -> None:
    text = text_of(BODIES[name])
    again = written(text)
    compiled = 0
    for sizes in SETTINGS:
        wanted = at(text, sizes)
        assert at(again, sizes) == wanted, again
        if not wanted[0].startswith("MD"):
            assert at(written(text, sizes), {}) == wanted
            compiled += 1
    assert compiled > 1


@pytest.mark.parametrize("example", SOME)
def test_examples_at_other_sizes(example: str) -> None:
    """Each dim has another size: 1 or twice its own in turn, with `MESHDSL_CASES` both.

    In every second example the first dim is doubled: it is the batch of nearly all.
    """
    text = source(example).text
    again = written(text)
    declared = front(Source("test.mdsl", text), {}, Diagnostics()).dims
    for number, dim in enumerate(declared, SOME.index(example)):
        sizes = (1, 2 * declared[dim].size)
        for size in sizes if ALL else sizes[number % 2 :][:1]:
            assert at(again, {dim: size}) == at(text, {dim: size})


@pytest.mark.parametrize("name", BODIES)
def test_sizes_decide_no_operator(name: str) -> None:
    found = [operators(text_of(BODIES[name]), sizes) for sizes in SETTINGS]
    refused = [f for f in found if isinstance(f, frozenset)]
    assert all(codes <= {"MD0209", "MD0210", "MD0213", "MD0276"} for codes in refused)
    assert len(set(found) - set(refused)) == 1


def operators(text: str, sizes: Mapping[str, int]) -> tuple[str, ...] | frozenset[str]:
    """The operators of the program at these sizes; the codes of what is wrong with it."""
    try:
        program = named(text, set_dims=sizes, evaluate=True)
    except DiagnosticError as error:
        return frozenset(d.code for d in error.diagnostics)
    return tuple(op.name for op in walk(program.body))


# --- what is written ---------------------------------------------------------------------------


def test_dims_are_written_as_they_are_made() -> None:
    found = written(text_of("return x"))
    assert found.splitlines()[0] == "dim n = 4, batch = 2, seq = 2 * n, key = 2^n"
    found = written(text_of("return x"), {"seq": 6, "n": 3})
    assert found.splitlines()[0] == "dim n = 3, batch = 2, seq = 6, key = 2^n"


# --- numbers -----------------------------------------------------------------------------------

KEY = Dim("key", 16)


def test_they_are_numbers() -> None:
    size = size_of(KEY)
    assert (size, repr(size), f"{size:>4}", size + 1) == (16, "16", "  16", 17)
    assert repr(as_float(size)) == "16.0"
    assert how_of(size + 1) is None
    assert [d.name for d in dims_of(as_float(size))] == ["key"]
    assert how_of(made(3, "add", 1, 2)) is None
