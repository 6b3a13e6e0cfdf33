"""Overlap: early issue, the computation meanwhile, and the memory for it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from meshdsl.device import buckets, liveness
from meshdsl.device.from_placed import lower
from meshdsl.device.ir import Compute, DeviceLoop, DeviceProgram, Move, Node, Start, Wait
from meshdsl.device.memory import memory
from meshdsl.ir.program import block_loops, loops
from meshdsl.report.explanation import explain
from tests.device.steps import CASES, TEXT, passed, placed, plain, run, with_overlap

FORWARD = TEXT.replace("  minimize loss with adamw(lr=1e-3)\n", "")


def overlapped(layout: str, policy: str = "optimal", text: str = TEXT) -> DeviceProgram:
    """The program as the pipeline makes it."""
    return passed(plain(layout, policy, text), with_overlap)


def blocks(program: DeviceProgram) -> Iterator[tuple[Node, ...]]:
    """The nodes of every block."""
    yield program.body
    yield from (loop.body for loop in loops(program.body, DeviceLoop))


def computes(nodes: tuple[Node, ...]) -> bool:
    """Whether there is work among the nodes."""
    return has_loop(nodes) or any(isinstance(n, Compute) and n.flops > 0 for n in nodes)


def has_loop(nodes: tuple[Node, ...]) -> bool:
    """Whether a loop is among the nodes."""
    return any(block_loops(nodes, DeviceLoop))


def under_way(program: DeviceProgram) -> Iterator[tuple[Start, tuple[Node, ...]]]:
    """Every start and the nodes from there to its wait, where both are in one iteration."""
    for nodes in blocks(program):
        for at, node in enumerate(nodes):
            if isinstance(node, Start) and not (node.ahead or node.late):
                rest = nodes[at + 1 :]
                end = next(
                    i for i, n in enumerate(rest) if isinstance(n, Wait) and n.work == node.work
                )
                yield node, rest[:end]


@pytest.mark.parametrize("small", [buckets.SMALL, 0], ids=["buckets", "alone"])
@pytest.mark.parametrize("case", CASES)
def test_devices_compute_while_they_wait(
    case: tuple[str, str], small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "SMALL", small)
    for _, meanwhile in under_way(overlapped(*case)):
        assert computes(meanwhile)


@pytest.mark.parametrize("small", [buckets.SMALL, 0], ids=["buckets", "alone"])
@pytest.mark.parametrize("case", CASES)
def test_what_takes_memory_is_under_way_one_at_a_time(
    case: tuple[str, str], small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "SMALL", small)
    for start, meanwhile in under_way(overlapped(*case)):
        step, phase = start.collective.step, start.collective.phase
        starts = (n for n in meanwhile if isinstance(n, Start) and not (n.ahead or n.late))
        others = [n.collective.step.kind for n in starts]
        if step.kind == "reduce_scatter":
            assert "reduce_scatter" not in others
        if step.kind == "all_gather" and phase != "update":
            assert not has_loop(meanwhile)
            assert "all_gather" not in others


def test_gradients_are_sent_as_soon_as_they_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "SMALL", 0)
    program = overlapped("data_parallel")
    reductions = {s.collective.moves[0].target.name: rest for s, rest in under_way(program)}
    # There before the backward loop, and needed behind it.
    assert has_loop(reductions["loss"])
    assert {"d_up", "d_bias", "d_down", "d_gain", "d_last"} <= reductions.keys()


@pytest.mark.parametrize("text", [TEXT, FORWARD], ids=["step", "forward"])
def test_the_next_trips_parameters_are_gathered_ahead(text: str) -> None:
    program = overlapped("zero3", text=text)
    layers = [*block_loops(program.body, DeviceLoop)]
    assert len(layers) == (2 if text is TEXT else 1)
    for loop in layers:
        gathered = {m.source for ahead in loop.ahead for m in ahead.collective.moves}
        assert {v.name.rstrip("_2") for v in gathered} == {"up", "down", "gain"}
        # Nobody else reads the slices.
        assert gathered.isdisjoint(s.inside for s in loop.stacked)
        for ahead in loop.ahead:
            at = next(
                i for i, n in enumerate(loop.body) if isinstance(n, Wait) and n.work == ahead.work
            )
            assert isinstance(loop.body[at + 1], Start)
            assert computes(loop.body[at:])


@pytest.mark.parametrize("small", [buckets.SMALL, 0], ids=["buckets", "alone"])
def test_gradients_of_a_loop_arrive_during_the_next_trip(
    small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "SMALL", small)
    compiled = placed("zero3")
    before = lower(compiled.placed)
    program = passed(before, with_overlap)
    *_, backward = block_loops(program.body, DeviceLoop)
    (wait,) = backward.late
    starts = [n for n in backward.body if isinstance(n, Start)]
    scatters = [n for n in starts if n.collective.step.kind == "reduce_scatter"]
    last, first = (backward.body.index(scatters[i]) for i in (-1, 0))
    at = backward.body.index(wait)
    # It is waited for before anything is scattered again, and neither at once.
    assert scatters[-1].collective is wait.collective
    assert at < first <= last
    assert computes(backward.body[:at])
    done, expected = (run(compiled.named, each) for each in (program, before))
    for name, array in (expected.outputs | expected.updated).items():
        np.testing.assert_array_equal((done.outputs | done.updated)[name], array)


def test_the_text_of_a_loop_whose_gradients_arrive_late() -> None:
    """In a loop from the last slice to the first, the one before is that above."""
    text = placed("zero3").text
    backward = text.partition("for layers in reversed(range(3)):")
    assert "bucket_3 = None" in backward[0]
    assert "if bucket_3:\n            d_gain[layers + 1], d_down[layers + 1]," in backward[2]
    assert "\n    d_gain[0], d_down[0], d_up[0] = bucket_3.wait()\n" in backward[2]


def test_the_text_of_a_loop_that_gathers_ahead() -> None:
    text = placed("zero3").text
    forward, backward = text.split("for layers in range(3):")[0:2]
    assert "[up_stack[0], down_stack[0], gain_stack[0]], [0, 1, 0]" in forward
    assert "if layers < 2:" in backward
    assert "up_stack[layers + 1]" in backward
    assert "if layers > 0:" in backward
    assert "up_stack[layers - 1]" in backward
    assert "up_stack[2]" in backward


def test_a_loop_of_one_trip_gathers_nothing_ahead() -> None:
    text = TEXT.replace("layers = 3", "layers = 1")
    program = overlapped("zero3", text=text)
    assert not any(loop.ahead for loop in loops(program.body, DeviceLoop))


def test_memory_counts_the_next_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "SMALL", 0)
    # Without overlap they are then live one after the other.
    monkeypatch.setattr(liveness, "LARGE", 0)
    before = plain("zero3", text=FORWARD)
    after = passed(before, with_overlap)
    (loop,) = block_loops(after.body, DeviceLoop)
    ahead = sum(m.target.local.bytes for a in loop.ahead for m in a.collective.moves)
    # up, down and gain, whole.
    assert ahead == (8 * 16 + 16 * 8 + 8) * 4
    assert memory(after)["gathered"] >= memory(before)["gathered"] + ahead


def test_reports_tell_what_is_overlapped() -> None:
    shown = explain(overlapped("zero3"))["collectives"]
    assert all(c["overlapped"] for c in shown if c["count"] == 3 and c["kind"] == "all_gather")
    plain_ = explain(plain("zero3"))["collectives"]
    assert not any(c["overlapped"] for c in plain_)


IN_TWO_STEPS = {
    "batch -> (data, pod), grads: model -> data": "data:2,pod:2",
    "hidden -> tp, state: model -> (pod, data), params: hidden -> (pod, data)": (
        "data:2,pod:2,tp:2"
    ),
}
"""Gradients are reduced over one axis in parts, and these over the other one; by the second layout
a bucket gathers something that a collective makes together with something that none does."""


@pytest.mark.parametrize("small", [buckets.SMALL, 0], ids=["buckets", "alone"])
@pytest.mark.parametrize("policy", ["optimal", "immediate"])
@pytest.mark.parametrize("rules", IN_TWO_STEPS)
def test_a_collective_waits_for_the_one_that_makes_its_source(
    rules: str, policy: str, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "SMALL", small)
    text = f"{TEXT}layout parts {{ {rules} }}\n"
    compiled = placed("parts", policy, text, IN_TWO_STEPS[rules])
    program = lower(compiled.placed)
    made: dict[str, str] = {}
    for node in (n for n in program.body if isinstance(n, Move) and n.step.moves):
        made[node.target.name] = f"{made.get(node.source.name, '')} {node.step.kind}".strip()
    assert any(" " in kinds for kinds in made.values()), "no collective has another's result"
    done = run(compiled.named, passed(program, with_overlap))  # each pass is verified
    expected = run(compiled.named, program)
    for name, array in (expected.outputs | expected.updated).items():
        np.testing.assert_array_equal((done.outputs | done.updated)[name], array)
