"""Buckets: what goes into one, what does not, and that nothing else changes."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from meshdsl.device import buckets
from meshdsl.device.buckets import in_buckets
from meshdsl.device.ir import Bucket, DeviceProgram, Move, walk
from meshdsl.report.explanation import explain
from tests.covering import in_turn
from tests.device.steps import CASES, passed, placed, plain, run, with_overlap
from tests.programs.harness import check_bytes

STEP = """
dim batch = 8, model = 8, out = 4
layout dp {{ batch -> data }}
layout two {{ batch -> data, model -> tp }}
program p(x[batch, model]) {{
  param w[model, out]
  param b[out] = zeros()
  {inner}
  loss = mean(y^2)
  return loss
  minimize loss with sgd(lr=0.1)
}}
"""
LINEAR = "y = einsum(x, w -> [batch, out]) + b"


def found(program: DeviceProgram) -> list[Bucket]:
    """The buckets of a program, in order."""
    return [node for node, _ in walk(program.body) if isinstance(node, Bucket)]


def names(bucket: Bucket) -> set[str]:
    """The tensors in a bucket."""
    return {m.target.name for m in bucket.moves}


def moves(program: DeviceProgram) -> Counter[tuple[str, str, int]]:
    """Every step of a reshard, alone or in a bucket, and how often it takes place."""
    steps = [(m, n) for node, n in walk(program.body) for m in getattr(node, "moves", ())]
    return Counter((m.step.kind, m.target.name, n) for m, n in steps)


def test_gradients_and_the_loss_are_reduced_together() -> None:
    program = plain("dp", text=STEP.format(inner=LINEAR), mesh="data:4")
    (only,) = found(in_buckets(program))
    assert names(only) == {"d_w", "d_b", "loss"}
    assert only.payload == (32 + 4 + 1) * 4
    (shown,) = explain(in_buckets(program))["collectives"]
    assert shown["tensor"] == "loss, d_b, d_w"
    assert [p["payload_bytes"] for p in shown["parts"]] == [4, 16, 128]


@pytest.mark.parametrize("case", CASES)
def test_all_that_was_sent_still_is(case: tuple[str, str]) -> None:
    program = plain(*case)
    after = in_buckets(program)
    assert moves(after) == moves(program)
    before, now = explain(program)["totals"], explain(after)["totals"]
    rounded = sum(len(b.moves) - 1 for b in found(after)) * 3
    assert before["wire_bytes"] - rounded <= now["wire_bytes"] <= before["wire_bytes"]
    assert now["collectives"] < before["collectives"]


@in_turn(case=CASES, small=(buckets.SMALL, 0))
def test_the_same_numbers_to_the_bit(
    case: tuple[str, str], small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "SMALL", small)
    before = plain(*case)
    program = passed(before, with_overlap)
    named = placed(*case).named
    first, after = run(named, before), run(named, program)
    check_bytes(explain(program), after)
    assert after.disagreements() == []
    kept = first.outputs | first.updated
    for name, values in (after.outputs | after.updated).items():
        np.testing.assert_array_equal(values, kept[name], err_msg=name)


def test_a_bucket_holds_one_kind_over_the_same_axes() -> None:
    for case in CASES:
        for bucket in found(in_buckets(plain(*case))):
            steps = {(m.step.kind, m.step.axes, m.step.op) for m in bucket.moves}
            assert len(steps) == len({m.source.local.dtype for m in bucket.moves}) == 1


def test_large_tensors_stay_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    program = plain("dp", text=STEP.format(inner=LINEAR), mesh="data:4")
    monkeypatch.setattr(buckets, "SMALL", 128)
    (only,) = found(in_buckets(program))
    assert names(only) == {"d_b", "loss"}


def test_a_full_bucket_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    program = plain("data_parallel")
    (whole,) = found(in_buckets(program))
    monkeypatch.setattr(buckets, "FULL", whole.payload // 2)
    halves = found(in_buckets(program))
    assert len(halves) > 1
    assert all(b.payload <= whole.payload // 2 for b in halves)


NEEDED_BETWEEN = """
dim batch = 8, model = 8
layout dp { batch -> data }
program p(x[batch, model]) {
  param w[model]
  param v[model]
  s = sum[batch](x * w)
  loss = sum(s * s) + sum(sum[batch](x * v * s) ^ 2)
  return loss
  minimize loss with sgd(lr=0.1)
}
"""


def test_what_is_needed_in_between_is_not_put_off() -> None:
    # `s` and `einsum_2` are read on the way to `d_w`, which is reduced the same way.
    program = plain("dp", text=NEEDED_BETWEEN, mesh="data:4", policy="immediate")
    assert sum(isinstance(node, Move) for node in program.body) == 3
    assert in_buckets(program).body == program.body


def test_a_forward_program_stays_as_it_is() -> None:
    text = STEP.replace("  minimize loss with sgd(lr=0.1)\n", "").format(inner=LINEAR)
    program = plain("dp", text=text, mesh="data:4")
    assert in_buckets(program).body == program.body
