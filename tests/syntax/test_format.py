"""The canonical form: what it looks like, that it is final, and that it means the same."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshdsl.diagnostics import DiagnosticError, Source
from meshdsl.syntax.format import format_source
from meshdsl.syntax.tokens import lex

from .shape import shown

CASES = {
    "": "",
    "\n\n": "",
    "#a\n": "# a\n",
    "\n\ndim   a=1,b = 2,": "dim a = 1, b = 2\n",
    "dim a=4*(3+-1)^-2-b": "dim a = 4 * (3 + -1)^-2 - b\n",
    "dim a = 1\n\n\n\ndim b = 2\n\n": "dim a = 1\n\ndim b = 2\n",
    "dim a = 1#x\ndim hidden = 1   # y  \n\ndim b = 2 # z": (
        "dim a = 1       # x\ndim hidden = 1  # y\n\ndim b = 2  # z\n"
    ),
    "mesh p={a:2,b:3,}on h100": "mesh p = { a: 2, b: 3 } on h100\n",
    "mesh p={ }": "mesh p = {}\n",
    "mesh p = { a: 2,\n#in\n\n b: 3, # c\n\n}": ("mesh p = {\n  a: 2\n  # in\n\n  b: 3  # c\n}\n"),
    "layout l extends k{params:a->x keep,mlp . w:b->(x,y),c->none}": (
        "layout l extends k { params: a -> x keep, mlp.w: b -> (x, y), c -> none }\n"
    ),
    "sbp s{x:(S(0),B),w:(P(max),)}": "sbp s { x: (S(0), B), w: (P(max)) }\n",
    "layout l{a->x}with  interleaved [ b,c ] ( 8,chunks = 2, )": (
        "layout l { a -> x } with interleaved[b, c](8, chunks=2)\n"
    ),
    "layout l{a->x,\n}with mine": "layout l {\n  a -> x\n} with mine\n",
    "schedule s ( stages = 1,micro=2 ){0 :F0 F1 @ 0  B0 B1}": (
        "schedule s(stages=1, micro=2) { 0: F0 F1@0 B0 B1 }\n"
    ),
    "schedule s(stages=2) { 0: F0 F1@2 B0 # a\n B1  1: F0\n\n\n B0 F1 B1 # b\n }": (
        "schedule s(stages=2) {\n  0: F0 F1@2 B0  # a\n  B1\n  1: F0\n\n  B0 F1 B1  # b\n}\n"
    ),
    "def f[d](x[...,d],# first\nscale[d]=1.0,\n  k = 2\n  )->[...,d]{ return x }": (
        "def f[d](x[..., d],  # first\n  scale[d] = 1.0,\n  k = 2\n) -> [..., d] { return x }\n"
    ),
    "program p(x[a@m,b@(m,n),c@none]:i32){\nrecompute{\nparam w[a]:bf16=normal(0.02)\n}}": (
        "program p(x[a@m, b@(m, n), c@none]: i32) {\n"
        "  recompute {\n"
        "    param w[a]: bf16 = normal(0.02)\n"
        "  }\n"
        "}\n"
    ),
    "program p(){\ny=x[d=0:3->e,f=:4,g=1: ->h][a->(b,c)]\nz=not x and-y>=-z\n}": (
        "program p() {\n"
        "  y = x[d = 0:3 -> e, f = :4, g = 1: -> h][a -> (b, c)]\n"
        "  z = not x and -y >= -z\n"
        "}\n"
    ),
    "program p(){\ny=foo(bar(\na\n-b,#why\nc),stride = 1\n)\n}": (
        "program p() {\n  y = foo(bar(\n    a\n    - b,  # why\n    c), stride=1\n  )\n}\n"
    ),
    "expect l  for p on m{wire_bytes:1}": "expect l for p on m { wire_bytes: 1 }\n",
    "expect l on m with immediate{all_reduce over(a,b):1,h:[batch@data]}": (
        "expect l on m with immediate { all_reduce over (a, b): 1, h: [batch@data] }\n"
    ),
}


def _format(text: str) -> str:
    return format_source(Source("t", text))


@pytest.mark.parametrize(("text", "wanted"), CASES.items())
def test_canonical_form(text: str, wanted: str) -> None:
    assert _format(text) == wanted
    assert _format(wanted) == wanted


def test_errors_are_raised() -> None:
    with pytest.raises(DiagnosticError):
        _format("dim a = ;")


PROGRAM = """
dim batch = 8 , a = 4 * (batch + 1)^2 ,
mesh pod = { data : 2 , model : 4 } on h100
mesh other = {
x : - 2
y : a
}
layout l extends k { a -> x , mlp . w : b -> ( x , y ) , params : c -> none keep }
weights hf { under "h." or "" { ( f . w , g ) : "k" [ a = 4 , ( b , c ) + 1 ] , ignore "*.x" } }
sbp s { x : ( S ( 0 ) , B , ) , w : ( P ( max ) , B ) }
layout pp extends l { a -> x , } with f [ batch ] ( 2 * 4 , layers = "3" , recompute = stage )
layout other { a -> x } with mine
schedule mine ( stages = 2 , micro = 2 , weights = latest , ) {
0 : F0 F1 B0 B1
1 : F0 @ 1 B0 F1
I1 W1 2 : F0 @ 3
}
def f [ d ] ( x [ ... , d ] , s [ d ] = 1.0 ) -> [ ... , d ] {
return x [ d = 0 : 3 -> e , g = : , h -> ( i , j , ) ] - - s
}
program p ( x [ a @ ( x , y ) , b ] : i32 , y [ ] ) {
param w [ a ] : bf16 = normal ( 0.02 )
h [ a @ none ] = einsum ( x , w -> [ a , b ] ) [ a -> b ] + ( y - 1 ) ^ - 2
repeat layers {
x , y = top_k [ e -> s ] ( x , k = 2 , pad = "same" , )
recompute { z = conv [ h by kh -> ho , w by 3 ] ( not x and y <= - 1 or z ) }
}
return loss , y ,
minimize loss with adam ( lr = cosine ( 1e-3 , 10 ) ) {
( w , f.s ) : lr = 1e-3 , eps = - 1 , g : frozen , h : sgd ( lr = 1 )
}
}
expect l on pod with immediate { h : [ a @ data , b ] , all_reduce over ( x , y ) : 1 }
"""


@st.composite
def _noisy(draw: st.DrawFn) -> str:
    """The program with spaces, line ends and comments wherever they are legal."""
    out: list[str] = []
    depth = 0
    for line in PROGRAM.strip().split("\n"):
        for word in line.split(" "):
            depth += (word in "([") - (word in ")]")
            gap = draw(st.sampled_from(["", " ", "  ", "\t"]))
            if depth > 0 and not draw(st.integers(0, 8)):
                gap += draw(st.sampled_from(["\n", " # c\n", "\n\n#c,\n"]))
            out += [word, gap if "\n" in gap or not _is_word(word) else f" {gap}"]
        out.append(draw(st.sampled_from(["\n", "\n\n\n", " #x\n", "\n   # own ( line\n", "#\n"])))
    return "".join(out)


def _is_word(text: str) -> bool:
    return text[-1].isalnum() or text[-1] in "._-"


def _comments(text: str) -> list[str]:
    words = lex(Source("t", text))
    return [str(word).strip("# \t") for word in words if word.type == "COMMENT"]


@functools.cache
def _meant() -> list[str]:
    return shown(PROGRAM)


@given(_noisy())
def test_noise_goes_and_meaning_stays(text: str) -> None:
    formatted = _format(text)
    assert shown(formatted) == shown(text) == _meant()
    assert _comments(formatted) == _comments(text)
    assert _format(formatted) == formatted
    assert "\n\n\n" not in formatted
    assert all(line == line.rstrip() for line in formatted.split("\n"))
