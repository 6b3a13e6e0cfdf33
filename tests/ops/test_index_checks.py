"""An index out of range is one message, whoever finds it."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from meshdsl.backends.engines.local_devices import LocalRunError
from meshdsl.backends.runtime.indices import DividedByZero, IndexOutOfRange, check_index
from meshdsl.ir.types import F32, I32, Dim, TensorType
from meshdsl.ops.opdef import NumpyCall, OpDef, Sample, Signature, lookup
from meshdsl.prove.sample_values import signature
from meshdsl.prove.torch_run import call, evaluate, to_torch
from tests.compiling import compile_text, run_text

VOCAB, BATCH, SEQ = Dim("vocab", 8), Dim("batch", 2), Dim("seq", 4)
TABLE, IDS = TensorType((VOCAB,), F32), TensorType((BATCH, SEQ), I32)
USES = {
    "gather": Sample((TABLE, IDS), (("dim", VOCAB),)),
    "one_hot": Sample((IDS,), (("dim", VOCAB), ("dtype", F32))),
    "cross_entropy": Sample((TensorType((BATCH, SEQ, VOCAB), F32), IDS), (("dim", VOCAB),)),
}
BAD = [(8, 1, 2), (-1, 0, 0), (600, 1, 3)]


def _operands(opdef: OpDef, sig: Signature, ids: np.ndarray) -> list[np.ndarray]:
    return [ids if t == IDS else np.zeros(t.shape) for t in sig.ins]


@pytest.mark.parametrize("name", sorted(USES))
@pytest.mark.parametrize(("value", "batch", "seq"), BAD)
def test_numpy_and_torch_say_the_same(name: str, value: int, batch: int, seq: int) -> None:
    opdef = lookup(name)
    sig = signature(opdef, USES[name])
    ids = np.zeros(IDS.shape, np.int32)
    ids[batch, seq] = value
    ids[1, 3] = value  # a later one
    arrays = _operands(opdef, sig, ids)
    message = (
        f"MD0801 test.mdsl:1: index {value} at [batch={batch}, seq={seq}] is out of range "
        "for dim `vocab` of size 8"
    )
    with pytest.raises(IndexOutOfRange, match=re.escape(message)) as numpy:
        opdef.numpy(NumpyCall(sig.ins, sig.outs, sig.attrs, place="test.mdsl:1"), *arrays)
    operands = [to_torch(a, t) for a, t in zip(arrays, sig.ins, strict=True)]
    with pytest.raises(IndexOutOfRange, match=re.escape(message)):
        evaluate(opdef, call(sig), operands)
    assert numpy.value.position == {"batch": batch, "seq": seq}
    assert numpy.value.place == "test.mdsl:1"


def test_positions_are_global() -> None:
    opdef = lookup("gather")
    sig = signature(opdef, USES["gather"])
    ids = np.zeros((2, 2), np.int32)
    ids[1, 0] = 9
    text = call(sig, extents={"seq": 2}, offsets={"seq": 2})
    with pytest.raises(IndexOutOfRange, match=r"index 9 at \[batch=1, seq=2\]"):
        evaluate(opdef, text, [torch.zeros(8), torch.tensor(ids)], rank=1)
    local = NumpyCall(sig.ins, sig.outs, sig.attrs, {"seq": 2}, {"seq": 2}, "test.mdsl:1")
    with pytest.raises(IndexOutOfRange, match=r"index 9 at \[batch=1, seq=2\]"):
        opdef.numpy(local, np.zeros(8), ids)


def test_a_split_table_still_checks_against_the_whole() -> None:
    opdef = lookup("gather")
    sig = signature(opdef, USES["gather"])
    text = call(sig, extents={"vocab": 4}, offsets={"vocab": 4})
    ids = torch.full((2, 4), 7, dtype=torch.int32)
    assert evaluate(opdef, text, [torch.ones(4), ids], rank=1).tolist() == [[1.0] * 4] * 2
    with pytest.raises(IndexOutOfRange, match="index 8"):
        evaluate(opdef, text, [torch.ones(4), ids + 1], rank=1)


@pytest.mark.parametrize("name", ["floordiv", "mod"])
def test_an_integer_divided_by_zero_is_one_message(name: str) -> None:
    opdef = lookup(name)
    sig = signature(opdef, Sample((IDS, IDS)))
    ids, zero = np.full(IDS.shape, 7, np.int32), np.full(IDS.shape, 2, np.int32)
    zero[1, 3] = 0
    message = r"^MD0802 test\.mdsl:1: an integer is divided by zero$"
    with pytest.raises(DividedByZero, match=message):
        opdef.numpy(NumpyCall(sig.ins, sig.outs, sig.attrs, place="test.mdsl:1"), ids, zero)
    with pytest.raises(DividedByZero, match=message):
        evaluate(opdef, call(sig), [torch.tensor(ids), torch.tensor(zero)])


def test_scalars_and_empty_tensors() -> None:
    assert check_index(torch.zeros((0, 2)), "d", 4, "p", ("a", "b"), (0, 0)).numel() == 0
    with pytest.raises(IndexOutOfRange, match=r"^MD0801 p: index 4 is out of range for dim `d`"):
        check_index(np.array(4), "d", 4, "p", (), ())


@pytest.mark.parametrize("ids", [[3], [-1], [4], [0, 3], [2, -1], [4, 1]])
def test_one_index_is_checked_as_several_are(ids: list[int]) -> None:
    wrong = [i for i in ids if not 0 <= i < 4]
    for index in (torch.tensor(ids, dtype=torch.int32), np.array(ids)):
        if not wrong:
            assert check_index(index, "d", 4, "p", ("a",), (0,)) is index
            continue
        with pytest.raises(IndexOutOfRange, match=f"index {wrong[0]} at "):
            check_index(index, "d", 4, "p", ("a",), (0,))


CUT = """
dim batch = 8, vocab = 8, key = 2, n = 2
mesh line = { pipe: 2 }
layout staged { n -> pipe } with one_f_one_b[batch](4)
program p(ids[batch]: i32, targets[batch]: i32) {
  param embed[vocab, key]
  param w[n, key]
  x = embed[vocab = ids]
  repeat n { x = x * w }
  loss = mean(cross_entropy[key](x, targets))
  return loss
  minimize loss with sgd(0.1)
}
"""
ACCUMULATED = CUT.replace(" with one_f_one_b[batch](4)", "").replace("0.1", "0.1, accumulate=4")


@pytest.mark.parametrize("text", [CUT, ACCUMULATED])
def test_what_micro_batches_read_is_checked_once_before_them(text: str) -> None:
    """All of it: a bad index of the last one stops the step before any has begun."""
    compiled = compile_text(text)
    lines = compiled.text.partition("def device")[2].partition("# ---")[0].splitlines()
    checks = [at for at, line in enumerate(lines) if "check_index(" in line]
    begins = next(n for n, line in enumerate(lines) if re.search("def forward|for micro", line))
    assert len(checks) == 2
    assert max(checks) < begins
    shape = compiled.named.inputs[0].type.shape
    ids = np.zeros(shape, np.int32)
    ids[(*(-1 for _ in shape),)] = 8
    message = r"index 8 at \[.*batch=7\] is out of range for dim `vocab`"
    with pytest.raises(LocalRunError, match=message):
        run_text(text, {"ids": ids, "targets": np.zeros(shape, np.int32)})


def test_what_every_iteration_reads_is_checked_and_converted_once() -> None:
    text = """
dim n = 3, size = 4, other = 5
mesh one = { d: 1 }
layout l { n -> d }
program p(pos: i32) {
  param w[n, size]
  param kept[n, other] = zeros()
  y = zeros[size]()
  repeat n {
    kept := put[other = pos](kept, w[size = pos])
    y = y + put[size = pos](w, sum(kept))
  }
  return y
}
"""
    device = compile_text(text).text.partition("def device")[2].partition("return")[0]
    before, _, inside = device.partition("for n in")
    assert before.count("check_index(") == 2
    assert before.count("int(") == 1
    assert "check_index(" not in inside
    assert "int(pos)" not in inside
    assert ".long()" not in inside
    assert ".long()" not in inside
