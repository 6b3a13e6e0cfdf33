"""Text to tree: every form of the language, precedence, spans."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshdsl.diagnostics import Source
from meshdsl.syntax import ast
from meshdsl.syntax.parse import parse

from .shape import declaration, expression, show, shown, statement

GRAMMAR = Path(__file__).resolve().parents[2] / "grammar"

EXPRESSIONS = {
    "4_096": "4096",
    "1e-3": "0.001",
    "2.": "2.0",
    ".5": "0.5",
    r'"a\"b\n"': repr('a"b\n'),
    "a or b and not c": "(a or (b and (not c)))",
    "not a == b": "(not (a == b))",
    "a and b or c": "((a and b) or c)",
    "a < b + c": "(a < (b + c))",
    "a + b - c": "((a + b) - c)",
    "a + b * c": "(a + (b * c))",
    "a / b * c": "((a / b) * c)",
    "-a * b": "((- a) * b)",
    "-x^2": "(- (x ^ 2))",
    "a^b^c": "(a ^ (b ^ c))",
    "a^-b": "(a ^ (- b))",
    "a - -b": "(a - (- b))",
    "(a + b)^2": "((a + b) ^ 2)",
    "(a < b) == c": "((a < b) == c)",
    "a != b": "(a != b)",
    "x[a -> b]^2": "(x[a>b] ^ 2)",
    "relu(x)": "relu(x)",
    "f()": "f()",
    "f(a, b,)": "f(a, b)",
    'f(a, stride=1, pad="same",)': "f(a, stride=1, pad='same')",
    "einsum(x, w -> [a, b])": "einsum(x, w > a b)",
    "einsum(x, w, -> [a, b,],)": "einsum(x, w > a b)",
    "einsum(x -> [])": "einsum(x > )",
    "einsum(x -> [..., d])": "einsum(x > ... d)",
    "softmax[mem](s)": "softmax[mem](s)",
    "sum[](x)": "sum[](x)",
    "ones[..., d]()": "ones[..., d]()",
    "iota[seq]": "iota[seq]",
    "k[seq -> mem]": "k[seq>mem]",
    "x[model -> (heads, key)]": "x[model>heads+key]",
    "x[(heads, key) -> model]": "x[heads+key>model]",
    "x[seq = 0]": "x[seq=0]",
    "x[seq = n - 1]": "x[seq=(n - 1)]",
    "x[seq = 0:128 -> prefix]": "x[seq=0:128>prefix]",
    "x[seq = :n / 2]": "x[seq=:(n / 2)]",
    "x[seq = 1:]": "x[seq=1:]",
    "x[seq = : -> s]": "x[seq=:>s]",
    "table[vocab = ids]": "table[vocab=ids]",
    "x[a -> b, c = 0,]": "x[a>b, c=0]",
    "x[a -> b][c -> d]": "x[a>b][c>d]",
    "f(x)[a -> b]": "f(x)[a>b]",
    "(x + y)[a -> b]": "(x + y)[a>b]",
    "einsum(x, wq -> [a, b])[seq -> mem]": "einsum(x, wq > a b)[seq>mem]",
    "concat[all](a, b)": "concat[all](a, b)",
    "pad[h -> hp](x, 1, 1)": "pad[h>hp](x, 1, 1)",
    "top_k[experts -> slots](g)": "top_k[experts>slots](g)",
    "conv[h by kh, w by kw](i, k, stride=1)": "conv[h by kh, w by kw](i, k, stride=1)",
    "conv[h by kh -> ho](i, k -> [b, ho])": "conv[h by kh>ho](i, k > b ho)",
    "max_pool[h by 3 -> ho, w by 2](i)": "max_pool[h by 3>ho, w by 2](i)",
    "adamw(lr=cosine(3e-4, 1000), clip=1.0)": "adamw(lr=cosine(0.0003, 1000), clip=1.0)",
    "f(a,\n  # why\n\n  b\n)": "f(a, b)",
    "(a +\n b)": "(a + b)",
    "x[a\n -> b\n]": "x[a>b]",
}

STATEMENTS = {
    "h = x": "h = x",
    "h[batch, hidden] = x": "h[batch, hidden] = x",
    "h[batch@data, hidden@none] = x": "h[batch@(data), hidden@()] = x",
    "h[batch@(x, y), d] = x": "h[batch@(x, y), d] = x",
    "h[] = x": "h[] = x",
    "values, which[a] = top_k[e -> s](g)": "values, which[a] = top_k[e>s](g)",
    "dx, dw = grad(loss, x, w)": "dx, dw = grad(loss, x, w)",
    "m := 0.9 * m + x": "m := ((0.9 * m) + x)",
    "cache:=x[seq = 1:2]": "cache := x[seq=1:2]",
    "param w[io, hidden]": "param w[io, hidden]",
    "param w[io]: bf16 = normal(0.02)": "param w[io]: bf16 = normal(0.02)",
    "param s = zeros()": "param s = zeros()",
    "repeat layers { x = f(x) }": "repeat layers { x = f(x) }",
    "repeat layers {\n\n x = 1\n y = 2\n\n}": "repeat layers { x = 1; y = 2 }",
    "repeat layers { }": "repeat layers {  }",
    "recompute {\n x = 1\n}": "recompute { x = 1 }",
    "return loss, y,": "return loss, y",
    "return a + b": "return (a + b)",
    "minimize loss with adam(lr=1e-3)": "minimize loss with adam(lr=0.001)",
    "minimize loss with adam() { }": "minimize loss with adam()",
    "minimize loss with adam() { a.b: sgd(2) }": "minimize loss with adam() { (a.b): sgd(2) }",
    "minimize loss with adam() {\n (a, b.c,): frozen,\n d: lr = f(1), eps = 2 }": (
        "minimize loss with adam() { (a, b.c): frozen, (d): lr = f(1), (d): eps = 2 }"
    ),
}

DECLARATIONS = {
    "dim a = 4 * b, c = 2,": "dim a = (4 * b) | dim c = 2",
    "mesh pod = { data: 2, model: 4 }": "mesh pod = data: 2, model: 4 on None",
    "mesh pod = {\n data: 2\n\n model: n, # why\n} on h100": "mesh pod = data: 2, model: n on h100",
    "layout l { a -> x }": "layout l extends None: a -> (x)",
    "layout l { }": "layout l extends None: ",
    "layout l extends k { a -> (x, y), b -> none }": ("layout l extends k: a -> (x, y), b -> ()"),
    "layout l {\n params: a -> x keep\n mlp.w1: b -> y,\n}": (
        "layout l extends None: params: a -> (x) keep, mlp.w1: b -> (y)"
    ),
    "layout l { a -> x } with one_f_one_b[batch, seq](2 * n, chunks=2, recompute=stage)": (
        "layout l extends None: a -> (x) "
        "with one_f_one_b[batch, seq]((2 * n), chunks=2, recompute=stage)"
    ),
    "layout l extends k { } with mine": "layout l extends k:  with mine()",
    "layout l { } with mine[batch]": "layout l extends None:  with mine[batch]()",
    "schedule s(stages=2, micro=1) { 0: F0 B0  1: F0@1 B0@1 }": (
        "schedule s(stages=2, micro=1): 0: F0 B0; 1: F0@1 B0@1"
    ),
    "schedule s() {\n\n 1: F0\n B0 # why\n\n 0:\n}": "schedule s(): 1: F0 B0; 0: ",
    "schedule s(stages=1) { }": "schedule s(stages=1): ",
    "dim schedule = 2\nmesh schedule = { schedule: 1 }\nlayout schedule { schedule -> schedule }": (
        "dim schedule = 2 | mesh schedule = schedule: 1 on None "
        "| layout schedule extends None: schedule -> (schedule)"
    ),
    "program schedule(schedule[a]) {\nschedule = schedule(schedule)\nschedule := schedule\n}": (
        "program schedule(schedule[a]) { schedule = schedule(schedule); schedule := schedule }"
    ),
    "sbp s { x: (S(0), B), w.u: (P, P(max),) }": "sbp s: x: (S(0), B), w.u: (P, P(max))",
    "sbp s { x: B }": "sbp s: x: (B)",
    "def f(x) { return x }": "def f[](x[]) -> None { return x }",
    "def f[d,](x[..., d], s[d] = 1.0,) -> [..., d] { return x }": (
        "def f[d](x[..., d], s[d] = 1.0) -> [..., d] { return x }"
    ),
    "program p(x[batch@data, io], ids[batch]: i32) { return x }": (
        "program p(x[batch@(data), io], ids[batch]: i32) { return x }"
    ),
    "program p() { }": "program p() {  }",
    "expect l on m with immediate { h.y: [a@x, b], all_reduce over (x, y): 1, wire_bytes: 6 }": (
        "expect l on m with immediate: h.y: [a@(x), b], all_reduce over (x, y): 1, wire_bytes: 6"
    ),
    "expect for for for on m { collectives: 0 }": (
        "expect for for for on m with None: collectives: 0"
    ),
    "expect l {\n all_gather over x: 2\n}": ("expect l on None with None: all_gather over (x): 2"),
}


@pytest.mark.parametrize(("text", "wanted"), EXPRESSIONS.items())
def test_expression(text: str, wanted: str) -> None:
    assert show(expression(text)) == wanted


@pytest.mark.parametrize(("text", "wanted"), STATEMENTS.items())
def test_statement(text: str, wanted: str) -> None:
    assert show(statement(text)) == wanted


@pytest.mark.parametrize(("text", "wanted"), DECLARATIONS.items())
def test_declaration(text: str, wanted: str) -> None:
    assert " | ".join(map(show, declaration(text))) == wanted


@pytest.mark.parametrize("end", ["", "\n", "\n\n# bye", "  # bye\n"])
@pytest.mark.parametrize("start", ["", "\n\n", "# hi\n\n", "   "])
def test_ends_of_file(start: str, end: str) -> None:
    assert shown(f"{start}dim a = 3{end}") == ["dim a = 3"]


@pytest.mark.parametrize("text", ["", "\n", "# only a comment", "  \n\t\n"])
def test_empty_file(text: str) -> None:
    assert shown(text) == []


def test_spans_of_an_expression() -> None:
    view = expression("(a + b)[x -> y] * f(c)")
    assert isinstance(view, ast.Binary)
    assert view.span.text == "(a + b)[x -> y] * f(c)"
    assert view.op_span.text == "*"
    assert view.left.span.text == "(a + b)[x -> y]"
    assert isinstance(view.left, ast.ViewExpr)
    assert view.left.tensor.span.text == "a + b"
    assert view.left.items[0].span.text == "x -> y"
    assert view.right.span.text == "f(c)"


def test_spans_of_declarations() -> None:
    text = "dim a = 1, b = 2\nprogram p(x[a@m]) {\n  y = x\n  return y\n}"
    file, _ = parse(Source("t", text))
    assert [d.span.text for d in file.declarations] == ["a = 1", "b = 2", text.split("\n", 1)[1]]
    program = file.declarations[2]
    assert isinstance(program, ast.ProgramDecl)
    assert program.params[0].dims[0].span.text == "a@m"
    assert [s.span.text for s in program.body] == ["y = x", "return y"]
    assert (program.body[0].span.line, program.body[0].span.column) == (3, 3)


def test_readme_examples_parse() -> None:
    """Each block of the reference is a file, or statements where it says so."""
    parts = (GRAMMAR / "README.md").read_text(encoding="utf-8").split("```")[1::2]
    assert len(parts) > 15
    for part in parts:
        kind, _, text = part.partition("\n")
        named = re.fullmatch(r"mdsl \w+[.]mdsl", kind)
        assert named or kind in ("mdsl", "mdsl statements", "console", "text"), kind
        if kind == "mdsl statements":
            text = f"program p() {{\n{text}}}\n"
        if kind.startswith("mdsl"):
            _, errors = parse(Source("README", text))
            assert not errors, (errors[0].message, errors[0].span and errors[0].span.text, text)


def test_import_is_light(tmp_path: Path) -> None:
    code = (
        "import sys, meshdsl.syntax.parse, meshdsl.syntax.format, meshdsl.carets, meshdsl.codes;"
        "heavy = {'lark', 'torch', 'rich', 'numpy'} & set(sys.modules); assert not heavy, heavy"
    )
    root = str(GRAMMAR.parent)
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env={"PYTHONPATH": root})


_WORDS = (
    "schedule F0 B0@1 0: dim mesh layout sbp def program expect on extends over by param repeat "
    "recompute return minimize with and or not a b x 1 2.5 + - * / ^ == < -> ... @ ( ) [ ] { } "
    ", : = . ; é \n \n"
)


@given(st.lists(st.sampled_from(_WORDS.split(" ")), max_size=40).map(" ".join))
def test_any_words_give_a_tree_or_errors(text: str) -> None:
    source = Source("t", text)
    _, errors = parse(source)
    for error in errors:
        assert error.span is not None
        assert 0 <= error.span.start <= error.span.end <= len(text)
        assert error.message


@given(st.text(max_size=60))
def test_any_text_gives_a_tree_or_errors(text: str) -> None:
    parse(Source("t", text))
