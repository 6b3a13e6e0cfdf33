"""The torch text of every operator evaluates to its numpy meaning."""

from __future__ import annotations

import numpy as np
import pytest

from meshdsl.ir.types import BOOL, DTYPES, F32, I32, Dim, DType, TensorType
from meshdsl.ops.einsum_text import einsum_text
from meshdsl.ops.opdef import NumpyCall, Sample, Signature, lookup
from meshdsl.placed.sharding_rules import Row
from meshdsl.prove.row_prover import declared_rows
from meshdsl.prove.sample_values import RANKS, draw, results, signature
from meshdsl.prove.text_checks import (
    literals,
    on_parts,
    on_wholes,
    on_windows,
    windows,
    with_literals,
)
from meshdsl.prove.torch_run import (
    assert_same,
    call,
    evaluate,
    to_torch,
)
from meshdsl.prove.window_rows import reads_windows
from meshdsl.prove.wrong_cases import found
from tests.ops.cases import IN_EVERY_FLOAT, SAMPLES, of_each_operator


@of_each_operator(IN_EVERY_FLOAT)
def test_text_is_the_numpy_meaning(name: str, sample: Sample) -> None:
    if name == "constant":  # a literal
        sig = signature(lookup(name), sample)
        (expected,) = results(lookup(name), NumpyCall(sig.ins, sig.outs, sig.attrs), [])
        assert evaluate(lookup(name), call(sig), []) == expected
        return
    assert not found(on_wholes(lookup(name), sample))


@of_each_operator(IN_EVERY_FLOAT)
def test_text_on_parts_is_the_numpy_meaning_of_the_whole(name: str, sample: Sample) -> None:
    opdef, sig = lookup(name), signature(lookup(name), sample)
    for row in declared_rows(opdef, sig):
        if row.factor is not None and not reads_windows(row):
            assert not found(on_parts(opdef, sample, row))


READING = {
    f"{label}-{row}-{ranks}": (name, sample, row, ranks)
    for label, (name, sample) in IN_EVERY_FLOAT.items()
    for row, ranks in windows(lookup(name), sample)
}


@of_each_operator(READING)
def test_text_on_windows_is_the_numpy_meaning_of_the_whole(
    name: str, sample: Sample, row: Row, ranks: int
) -> None:
    assert not found(on_windows(lookup(name), sample, row, ranks))


# --- literals as operands --------------------------------------------------------------------

LITERAL = {
    f"{label}-{sorted(literal)}": (name, sample, literal)
    for label, (name, sample) in SAMPLES.items()
    for literal in literals(lookup(name), sample)
}


@of_each_operator(LITERAL)
def test_literals_stand_for_scalars(name: str, sample: Sample, literal: frozenset[int]) -> None:
    assert not found(with_literals(lookup(name), sample, literal))


# --- the text itself -------------------------------------------------------------------------

A, B_, C, D, K = Dim("a", 4), Dim("b", 3), Dim("c", 5), Dim("d", 2), Dim("k", 6)


def _type(dims: tuple[Dim, ...], dtype: DType = F32) -> TensorType:
    return TensorType(dims, dtype)


EINSUMS = [
    ([(A, K), (K, B_)], (A, B_), "x0 @ x1"),
    ([(A, K), (B_, K)], (A, B_), "x0 @ x1.mT"),
    ([(K, A), (K, B_)], (A, B_), "x0.mT @ x1"),
    ([(A, K), (K, B_)], (B_, A), "x1.mT @ x0.mT"),
    ([(D, A, K), (K, B_)], (D, A, B_), "x0 @ x1"),
    ([(D, A, C, K), (B_, K)], (D, A, C, B_), "x0 @ x1.mT"),
    ([(D, A, K), (D, B_, K)], (D, A, B_), "x0 @ x1.mT"),
    ([(D, C, A, B_), (D, C, B_, K)], (D, C, A, K), "x0 @ x1"),
    ([(A, K), (K, B_, C)], (A, B_, C), "(x0 @ x1.flatten(1)).unflatten(-1, (3, 5))"),
    ([(A, K, C), (K, C, B_)], (A, B_), "x0.flatten(1) @ x1.flatten(0, 1)"),
    ([(A, K, C), (B_, K, C)], (A, B_), "x0.flatten(1) @ x1.flatten(1).mT"),
    ([(K, A, B_), (K, C)], (A, B_, C), "(x0.flatten(1).mT @ x1).unflatten(0, (4, 3))"),
    ([(A, B_, K), (A, B_, C)], (K, C), "x0.flatten(0, 1).mT @ x1.flatten(0, 1)"),
    ([(A, K), (K,)], (A,), "x0 @ x1"),
    ([(K,), (K, A)], (A,), "x0 @ x1"),
    ([(K,), (A, K)], (A,), "x1 @ x0"),
    ([(K,), (K,)], (), "x0 @ x1"),
    ([(A, K), (A, K)], (), "x0.flatten() @ x1.flatten()"),
    ([(A, K), (A, K)], (A,), "(x0 * x1).sum(1)"),
    ([(A, B_, K), (A, B_, K)], (K,), "(x0 * x1).sum((0, 1))"),
    ([(A, B_, K), (K, A)], (A, B_), "(x0 * x1.mT[:, None]).sum(2)"),
    ([(A, K), (A, B_, K)], (B_, A), "(x1 * x0[:, None]).sum(2).mT"),
    (
        [(D, A, K), (K, B_, C)],
        (D, B_, A, C),
        "(x0 @ x1.flatten(1)).unflatten(-1, (3, 5)).permute(0, 2, 1, 3)",
    ),
    ([(D, A, K), (K, B_)], (B_, D, A), "(x1.mT @ x0.flatten(0, 1).mT).unflatten(-1, (2, 4))"),
    ([(D, A, K), (D, B_, K)], (A, B_, D), "(x0 @ x1.mT).permute(1, 2, 0)"),
    (
        [(D, A, B_, K), (A, K, C)],
        (D, B_, C),
        "x0.permute(0, 2, 1, 3).flatten(2) @ x1.flatten(0, 1)",
    ),
    (
        [(D, A, B_, K), (D, B_, C)],
        (C, A, K),
        "(x1.flatten(0, 1).mT @ x0.permute(0, 2, 1, 3).flatten(2).flatten(0, 1))"
        ".unflatten(-1, (4, 6))",
    ),
    ([(D, A, K), (K,), (A, B_)], (D, B_), 'torch.einsum("dak,k,ab->db", x0, x1, x2)'),
    ([(A,), (B_,)], (A, B_), "x0[:, None] * x1"),
    ([(A, B_), (B_,)], (A, B_), "x0 * x1"),
    ([(A, B_), (B_,)], (A,), "x0 @ x1"),
    ([(A, B_), (A,)], (A,), "x0.sum(1) * x1"),
    ([(A, B_), (A, C)], (A, C), "x0.sum(1)[:, None] * x1"),
    ([(A, B_, C)], (C, A), "x0.sum(1).mT"),
    ([(A, B_, C)], (B_,), "x0.sum((0, 2))"),
    ([(A, B_)], (B_, A), "x0.mT"),
    ([(A, B_, C)], (B_, C, A), "x0.permute(1, 2, 0)"),
    ([(A, B_)], (), "x0.sum()"),
    ([(A,)], (A,), "x0"),
]


@pytest.mark.parametrize(("ins", "out", "text"), EINSUMS)
def test_einsum_is_written_as_by_hand(
    ins: list[tuple[Dim, ...]], out: tuple[Dim, ...], text: str
) -> None:
    opdef = lookup("einsum")
    sig = signature(opdef, Sample(tuple(map(_type, ins)), (("dims", out),)))
    assert opdef.torch(call(sig)) == text
    if len(ins) > 1 and ".permute(" in text:
        assert "torch.einsum(" in einsum_text(call(sig), views=True)
    rng = np.random.default_rng(5)
    arrays = [draw(t, "int", rng) for t in sig.ins]
    operands = [to_torch(a, t) for a, t in zip(arrays, sig.ins, strict=True)]
    expected = results(opdef, NumpyCall(sig.ins, sig.outs, sig.attrs), arrays)[0]
    assert_same(evaluate(opdef, call(sig), operands), expected, sig.outs[0])


ONE = Dim("one", 1)


@pytest.mark.parametrize("dtype", ["i32", "i64"])
@pytest.mark.parametrize(
    ("ins", "out"),
    [
        ([(A, ONE), (ONE, B_)], (A, B_)),
        ([(A, ONE), (A, ONE)], (A,)),
        ([(ONE, K), (K, ONE)], (ONE,)),
        ([(D, A, ONE), (ONE, B_, C)], (D, B_, A, C)),
        ([(A, K), (A, K), (K,)], ()),
    ],
)
def test_integer_einsums_keep_their_dtype(
    ins: list[tuple[Dim, ...]], out: tuple[Dim, ...], dtype: str
) -> None:
    """`torch.einsum` makes i64 of some i32 contractions, and sizes of 1 take other paths in it."""
    opdef = lookup("einsum")
    types = tuple(_type(d, DTYPES[dtype]) for d in ins)
    sig = signature(opdef, Sample(types, (("dims", out),)))
    arrays = [draw(t, "int", np.random.default_rng(5)) for t in sig.ins]
    operands = [to_torch(a, t) for a, t in zip(arrays, sig.ins, strict=True)]
    expected = results(opdef, NumpyCall(sig.ins, sig.outs, sig.attrs), arrays)[0]
    assert expected.dtype == DTYPES[dtype].numpy
    assert_same(evaluate(opdef, call(sig), operands), expected, sig.outs[0])


IDS = _type((D, A), I32)
PLACE = "'test.mdsl:1'"
TEXTS = [
    ("add", [_type((A, B_)), _type((B_,))], {}, "x0 + x1"),
    ("add", [_type((A, B_)), _type((A,))], {}, "x0 + x1[:, None]"),
    ("add", [_type((A, B_, C)), _type((A, B_))], {}, "x0 + x1[..., None]"),
    ("add", [_type((A, B_, C)), _type((A, C))], {}, "x0 + x1[:, None]"),
    ("add", [_type((A, B_)), _type((B_, A))], {}, "x0 + x1.mT"),
    ("add", [_type((A, B_, C)), _type((C, A))], {}, "x0 + x1.mT[:, None]"),
    ("add", [_type((A, B_, C)), _type(())], {}, "x0 + x1"),
    ("mean", [_type((A, B_))], {"dims": (B_,)}, "x0.mean(1)"),
    ("sum", [_type((A, B_), I32)], {"dims": (A,)}, "x0.sum(0, dtype=torch.int32)"),
    ("max", [_type((A, B_))], {"dims": (A, B_)}, "x0.max()"),
    ("softmax", [_type((A, B_))], {"dim": B_}, "torch.softmax(x0, 1)"),
    ("rename", [_type((A, B_))], {"pairs": ((A, Dim("z", 4)),)}, "x0"),
    ("split", [_type((B_, A))], {"dim": A, "into": (D, Dim("e", 2))}, "x0.unflatten(1, (2, 2))"),
    ("merge", [_type((A, D, B_))], {"dims": (A, D), "into": Dim("m", 8)}, "x0.flatten(0, 1)"),
    ("pick", [_type((A, B_))], {"dim": B_, "index": 2}, "x0[:, 2]"),
    ("zeros", [], {"dims": (A, B_), "dtype": F32}, "torch.zeros((4, 3), dtype=torch.float32)"),
    ("iota", [], {"dim": A}, "torch.arange(4, dtype=torch.int32)"),
    ("gather", [_type((C, B_)), IDS], {"dim": C}, "x0[x1_index_0]"),
    ("gather", [_type((B_, C)), IDS], {"dim": C}, "x0[:, x1_index_0]"),
    (
        "gather",
        [_type((D, A, C)), IDS],
        {"dim": C},
        "torch.take_along_dim(x0, x1_index_0[..., None], 2).squeeze(2)",
    ),
    (
        "layer_norm",
        [_type((A, B_)), _type((B_,)), _type((B_,))],
        {"dim": B_},
        "torch.nn.functional.layer_norm(x0, (3,), x1, x2, eps=1e-05)",
    ),
    (
        "cross_entropy",
        [_type((D, A, C)), IDS],
        {"dim": C},
        "torch.nn.functional.cross_entropy(x0.flatten(0, -2), x1_index_0.flatten(), "
        'reduction="none").unflatten(0, (2, 4))',
    ),
]


@pytest.mark.parametrize(("name", "ins", "attrs", "text"), TEXTS)
def test_the_text_is_short(
    name: str, ins: list[TensorType], attrs: dict[str, object], text: str
) -> None:
    opdef = lookup(name)
    sig = signature(opdef, Sample(tuple(ins), tuple(attrs.items())))
    assert opdef.torch(call(sig)) == text


def test_a_split_gather_replaces_the_rows_of_others() -> None:
    """NaN in a row that an index does not mean must not come through."""
    opdef = lookup("gather")
    sig = signature(opdef, Sample((_type((A,)), _type((D,), I32)), (("dim", A),)))
    table = [np.array([np.nan, 1.0]), np.array([np.nan, 3.0])]
    ids = to_torch(np.array([1, 3]), sig.ins[1])
    found = []
    for rank in range(RANKS):
        text = call(sig, extents={"a": 2}, offsets={"a": 2})
        found.append(evaluate(opdef, text, [to_torch(table[rank], sig.ins[0]), ids], rank))
        local = NumpyCall(sig.ins, sig.outs, sig.attrs, {"a": 2}, {"a": 2 * rank})
        np.testing.assert_array_equal(opdef.numpy(local, table[rank], np.array([1, 3])), found[-1])
    assert sum(found).tolist() == [1.0, 3.0]


def test_shifts_past_the_end_leave_zeros() -> None:
    for by in (4, -4, 9, -9):
        opdef = lookup("shift")
        sig = signature(opdef, Sample((_type((B_, A)),), (("dim", A), ("by", by))))
        x = draw(sig.ins[0], "int", np.random.default_rng(1))
        assert not opdef.numpy(NumpyCall(sig.ins, sig.outs, sig.attrs), x).any()
        assert not evaluate(opdef, call(sig), [to_torch(x, sig.ins[0])]).any()


def test_booleans_are_literals_too() -> None:
    sig = Signature((), (TensorType((), BOOL),), {"value": True, "dtype": BOOL})
    assert lookup("constant").torch(call(sig)) == "True"
