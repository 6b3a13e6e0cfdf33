"""Refusals of operators: their codes, and messages that name the problem."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from meshdsl.ir.types import BOOL, DTYPES, F32, F64, I32, Dim, DType, TensorType
from meshdsl.ops.opdef import OpError, lookup

A, B, C, D = Dim("a", 4), Dim("b", 3), Dim("c", 12), Dim("d", 2)
NEW = Dim("new", 4)


def t(*dims: Dim, dtype: DType = F32) -> TensorType:
    return TensorType(dims, dtype)


INTS, BOOLS = t(A, B, dtype=I32), t(A, dtype=BOOL)

REFUSED: list[tuple[str, list[TensorType], dict[str, Any], str, str]] = [
    ("add", [t(A), t(A, dtype=I32)], {}, "MD0201", "`+` needs operands of one dtype, not f32[a]"),
    ("where", [BOOLS, t(A), t(A, dtype=F64)], {}, "MD0201", "f64[a]"),
    ("concat", [t(A), t(B, dtype=I32)], {"target": C, "sources": (A, B)}, "MD0201", "i32[b]"),
    ("einsum", [t(A), t(A, dtype=F64)], {"dims": ()}, "MD0201", "`einsum`"),
    ("exp", [INTS], {}, "MD0202", "`exp` works on floats, not on i32[a, b]"),
    ("add", [BOOLS, BOOLS], {}, "MD0202", "`+` works on numbers, not on bool[a]"),
    ("logical_and", [t(A), t(A)], {}, "MD0202", "`and` works on booleans"),
    ("where", [t(A), t(A), t(A)], {}, "MD0202", "`where` works on booleans, not on f32[a]"),
    ("einsum", [BOOLS], {"dims": ()}, "MD0202", "bool[a]"),
    ("mean", [INTS], {"dims": (A,)}, "MD0202", "`mean` works on floats"),
    ("sum", [BOOLS], {"dims": (A,)}, "MD0202", "`sum` works on numbers"),
    ("any", [t(A)], {"dims": (A,)}, "MD0202", "`any` works on booleans"),
    ("softmax", [INTS], {"dim": A}, "MD0202", "`softmax` works on floats"),
    ("cast", [t(A)], {"dtype": BOOL}, "MD0202", "to bool is not defined"),
    ("pow", [INTS, INTS], {}, "MD0202", "`^` works on floats"),
    ("gelu", [INTS], {"approximate": "none"}, "MD0202", "`gelu`"),
    ("div", [INTS, INTS], {}, "MD0203", "`/` of integers"),
    ("sum", [t(A)], {"dims": (B,)}, "MD0204", "`sum` names the dim `b`, which f32[a] does not"),
    ("sum", [t()], {"dims": (B,)}, "MD0204", "which f32[] does not"),
    ("softmax", [t(A)], {"dim": B}, "MD0204", "`softmax`"),
    ("gather", [t(A), INTS], {"dim": C}, "MD0204", "`gather` names the dim `c`"),
    ("rename", [t(A)], {"pairs": ((B, B),)}, "MD0204", "`rename`"),
    ("sum", [t(A)], {"dims": (A, A)}, "MD0205", "`sum` lists the dim `a` twice"),
    ("einsum", [t(A, B)], {"dims": (A, A)}, "MD0205", "`einsum` has the dim `a` twice"),
    ("zeros", [], {"dims": (A, A), "dtype": F32}, "MD0205", "`zeros` has the dim `a` twice"),
    ("rename", [t(A, NEW)], {"pairs": ((A, NEW),)}, "MD0205", "`rename` has the dim `new` twice"),
    (
        "gather",
        [t(A, C), t(A, dtype=I32)],
        {"dim": A},
        "MD0205",
        "the indices of `a` have",
    ),
    ("one_hot", [t(A, dtype=I32)], {"dim": A, "dtype": F32}, "MD0205", "the indices of `a`"),
    ("add", [t(A), t(Dim("a", 1))], {}, "MD0206", "the dim `a` with two sizes: 4 and 1"),
    ("einsum", [t(A)], {"dims": (B,)}, "MD0207", "should yield the dim `b`, which no operand has"),
    ("rename", [t(A)], {"pairs": ((A, B),)}, "MD0209", "`a` has 4 elements, and the dim `b` is of"),
    ("split", [t(C)], {"dim": C, "into": (A, D)}, "MD0209", "`c` of size 12 cannot become `a` and"),
    (
        "merge",
        [t(A, B)],
        {"dims": (A, B), "into": NEW},
        "MD0209",
        "the merge of `a` and `b`",
    ),
    (
        "slice",
        [t(C)],
        {"dim": C, "start": 0, "stop": 4, "target": B},
        "MD0209",
        "the slice 0:4 has 4 elements, and the dim `b` is of size 3",
    ),
    ("concat", [t(A), t(B)], {"target": C, "sources": (A, B)}, "MD0209", "4 (`a`) + 3 (`b`) = 7"),
    (
        "pad",
        [t(A)],
        {"source": (A,), "target": (C,), "before": 1, "after": 1, "value": 0},
        "MD0209",
        "1 + 4 + 1 = 6",
    ),
    ("pick", [t(A)], {"dim": A, "index": 4}, "MD0210", "index 4 is out of range for dim `a` of"),
    ("pick", [t(A)], {"dim": A, "index": -1}, "MD0210", "index -1"),
    ("slice", [t(A)], {"dim": A, "start": 2, "stop": 9, "target": B}, "MD0210", "the slice 2:9"),
    ("slice", [t(A)], {"dim": A, "start": 2, "stop": 2, "target": B}, "MD0210", "the slice 2:2"),
    ("gather", [t(A), t(B)], {"dim": A}, "MD0211", "integer indices of `a`, not f32[b]"),
    ("one_hot", [t(B)], {"dim": A, "dtype": F32}, "MD0211", "not f32[b]"),
    ("cross_entropy", [t(B, A), t(B)], {"dim": A}, "MD0211", "not f32[b]"),
    ("cast", [t(A)], {"dtype": None}, "MD0213", "`cast` needs a dtype"),
    ("gelu", [t(A)], {"approximate": "fast"}, "MD0213", "no approximation 'fast'"),
    ("one_hot", [t(dtype=I32)], {"dim": A, "dtype": BOOL}, "MD0213", "yields numbers"),
    ("constant", [], {"value": 1.5, "dtype": I32}, "MD0213", "1.5 is not an i32"),
    ("shift", [t(A)], {"dim": A, "by": 1.5}, "MD0213", "`shift` by 1.5"),
    (
        "pad",
        [t(A)],
        {"source": (A,), "target": (B,), "before": -1, "after": 0, "value": 0},
        "MD0213",
        "cannot add -1 elements",
    ),
    (
        "pad",
        [t(A, dtype=I32)],
        {"source": (A,), "target": (Dim("p", 5),), "before": 1, "after": 0, "value": 0.5},
        "MD0213",
        "0.5 cannot fill i32[a]",
    ),
    ("layer_norm", [t(B, A), t(B)], {"dim": A}, "MD0214", "of the dims [a], not f32[b]"),
    ("rms_norm", [t(B, A), t()], {"dim": A}, "MD0214", "not f32[]"),
    (
        "cross_entropy",
        [t(B, A), t(C, dtype=I32)],
        {"dim": A},
        "MD0214",
        "for each position",
    ),
    ("transpose", [t(A, B)], {"dims": (A,)}, "MD0214", "leaves out `b`"),
    ("concat", [t(A, D), t(B)], {"target": C, "sources": (A, B)}, "MD0209", "`concat` makes"),
    (
        "concat",
        [t(A, D), t(B)],
        {"target": Dim("e", 7), "sources": (A, B)},
        "MD0214",
        "they must have the same dims",
    ),
    (
        "concat",
        [t(A), t(B, Dim("e", 7))],
        {"target": Dim("e", 7), "sources": (A, B)},
        "MD0205",
        "`concat` has the dim `e` twice",
    ),
    (
        "pad",
        [t(A)],
        {"source": (A, B), "target": (C,), "before": 0, "after": 0, "value": 0},
        "MD0214",
        "one dim to another",
    ),
]


@pytest.mark.parametrize(("name", "ins", "attrs", "code", "message"), REFUSED)
def test_a_wrong_call_is_refused(
    name: str, ins: list[TensorType], attrs: dict[str, Any], code: str, message: str
) -> None:
    with pytest.raises(OpError) as found:
        lookup(name).infer(tuple(ins), attrs)
    assert found.value.code == code
    assert message in found.value.message


GIVEN: list[tuple[str, list[TensorType], dict[str, Any], TensorType]] = [
    ("add", [t(A, B), t(B)], {}, t(A, B)),
    ("mul", [t(B), t(A, B)], {}, t(B, A)),
    ("lt", [t(A), t(B)], {}, t(A, B, dtype=BOOL)),
    ("where", [BOOLS, t(), t(B)], {}, t(B, A)),
    ("cast", [BOOLS], {"dtype": DTYPES["bf16"]}, t(A, dtype=DTYPES["bf16"])),
    ("einsum", [t(A, B), t(B, C)], {"dims": (C, A)}, t(C, A)),
    ("sum", [t(A, B, C)], {"dims": (C, A)}, t(B)),
    ("argmax", [t(A, B)], {"dims": (A,)}, t(B, dtype=I32)),
    ("argmax", [t(A, B)], {"dims": (B, A)}, t(dtype=I32)),
    ("logsumexp", [t(A, B)], {"dims": (A, B)}, t()),
    ("split", [t(B, C)], {"dim": C, "into": (A, Dim("e", 3))}, t(B, A, Dim("e", 3))),
    ("merge", [t(D, A, B)], {"dims": (B, A), "into": C}, t(D, C)),
    ("merge", [t(A, D, B)], {"dims": (A, B), "into": C}, t(C, D)),
    ("gather", [t(B, A), t(D, dtype=I32)], {"dim": A}, t(B, D)),
    ("gather", [t(B, A), t(D, B, dtype=I32)], {"dim": A}, t(B, D)),
    ("one_hot", [t(B, dtype=I32)], {"dim": A, "dtype": F32}, t(B, A)),
    ("cross_entropy", [t(A, B, C), t(B, A, dtype=I32)], {"dim": C}, t(A, B)),
    ("layer_norm", [t(A, B), t(A)], {"dim": A}, t(A, B)),
]


@pytest.mark.parametrize(("name", "ins", "attrs", "out"), GIVEN)
def test_result_types(
    name: str, ins: list[TensorType], attrs: dict[str, Any], out: TensorType
) -> None:
    assert lookup(name).infer(tuple(ins), attrs) == (out,)


E = Dim("e", 7)
BOUND = [
    ([t(A, D), t(B, D)], E, (A, B)),
    ([t(A), t(B)], E, (A, B)),
    ([t(A), t(A), t(A)], E, (A, A, A)),
    ([t(D, A), t(A, D), t(D, B)], E, (A, A, B)),
]


@pytest.mark.parametrize(("ins", "target", "sources"), BOUND)
def test_concat_finds_what_to_join(
    ins: list[TensorType], target: Dim, sources: tuple[Dim, ...]
) -> None:
    bind = lookup("concat").bind
    assert bind is not None
    assert bind({"dim": target}, tuple(ins)) == {"target": target, "sources": sources}


@pytest.mark.parametrize(
    ("ins", "arrow"),
    [
        ([t(A, B), t(C, D)], "(a, c) -> e"),
        ([t(A, NEW), t(A, NEW)], "(a, a) -> e"),
        ([t(A, B), t(A)], "(b, a) -> e"),
        ([t(D, A), t(D, A)], "(a, a) -> e"),
        ([t(D, A)], "(d) -> e"),
    ],
)
def test_concat_does_not_guess_at_any_size(ins: list[TensorType], arrow: str) -> None:
    bind = lookup("concat").bind
    assert bind is not None
    for size in range(1, 13):
        with pytest.raises(OpError, match="cannot tell which dim") as found:
            bind({"dim": Dim("e", size)}, tuple(ins))
        assert found.value.code == "MD0216"
        if size == 8:
            assert found.value.help == f"name the dim of each: `concat[{arrow}](…)`"


@pytest.mark.parametrize(
    ("source", "sources"), [((A, B), (A, B)), ((A,), (A, A)), ((B, A), (B, A))]
)
def test_an_arrow_says_what_concat_joins(source: tuple[Dim, ...], sources: tuple[Dim, ...]) -> None:
    bind = lookup("concat").bind
    assert bind is not None
    attrs = {"source": source, "target": (E,)}
    found = bind(attrs, (t(A, B), t(A, B)))
    assert found == {"target": E, "sources": sources}


@pytest.mark.parametrize(
    ("source", "target", "said"),
    [((A, B, A), (E,), "names 3 dims for 2 tensors"), ((A, B), (E, C), "joins into one dim")],
)
def test_an_arrow_of_concat_that_does_not_fit(
    source: tuple[Dim, ...], target: tuple[Dim, ...], said: str
) -> None:
    bind = lookup("concat").bind
    assert bind is not None
    with pytest.raises(OpError, match=said):
        bind({"source": source, "target": target}, (t(A, B), t(A, B)))


def test_the_records_do_not_import_torch() -> None:
    code = (
        "import sys; from meshdsl.ops.opdef import load_all; load_all(); "
        "raise SystemExit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
