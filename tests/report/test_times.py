"""Predicted times in a report: sums that agree, and nothing without a cluster."""

from __future__ import annotations

import re

import pytest

from meshdsl.cluster.profile import load
from meshdsl.cluster.timing import Timing
from meshdsl.device.ir import Bucket, Move, on_device, walk
from meshdsl.report.document import duration
from meshdsl.report.explanation import explain
from meshdsl.report.explanation_document import explanation, summary
from meshdsl.report.html import html
from meshdsl.report.terminal import text
from tests.report.golden import PIPELINE, WHOLE, Case, made


@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_times_agree_with_each_other(case: Case) -> None:
    stages = made(case)
    timing = Timing(load("a100-dgx"), stages.device.mesh)
    plain, report = explain(stages.device), explain(stages.device, (), timing)
    time = report.pop("time")
    sent = [c.pop("seconds") for c in report["collectives"]]
    assert report == plain
    if "stage" in time:  # what its devices send, of what all stages do
        own = {id(node) for node, _ in walk(on_device(stages.device, time["stage"]))}
        moves = (n for n, _ in walk(stages.device.body) if isinstance(n, Move | Bucket))
        every = [node for node in moves if node.step.moves]
        sent = [s for node, s in zip(every, sent, strict=True) if id(node) in own]
    assert time["seconds"] == pytest.approx(time["compute"] + time["waiting"] + time.get("idle", 0))
    assert sum(time["sending"].values()) == pytest.approx(sum(sent), abs=1e-9)
    assert sum(time["exposed"].values()) == pytest.approx(time["waiting"])
    if "stage" not in time:  # others wait for what is sent alone
        assert time["waiting"] <= sum(sent) * (1 + 1e-9)
    lines = time["lines"]
    assert sum(t["communication"] for t in lines) == pytest.approx(sum(sent))
    whole = sum(t["compute"] + t["communication"] for t in lines)
    assert whole == pytest.approx(sum(time["by_bound"].values()))


def test_every_view_has_the_times() -> None:
    stages = made(WHOLE[0])
    timing = Timing(load("h100"), stages.device.mesh)
    document = explanation(explain(stages.device, (), timing), {stages.source.name: stages.source})
    for view in (text(document), html(document)):
        assert "Predicted on h100" in view
        assert "computing" in view


def test_a_pipeline_has_one_idle_share() -> None:
    """With a cluster that of the predicted step, without one that of equal passes."""
    stages = made(PIPELINE)
    timing = Timing(load("h100"), stages.device.mesh)
    shares = []
    for report in (explain(stages.device), explain(stages.device, (), timing)):
        head = [line for line in text(tuple(summary(report))).splitlines() if "idle" in line]
        shares += [
            re.findall(r"([\d.]+) ?%\)? (?:of the devices' time is|of it) idle", " ".join(head))
        ]
    assert shares[0] == ["25"]
    time = explain(stages.device, (), timing)["time"]
    assert shares[1] == [f"{100 * time['idle'] / time['seconds']:.0f}"]


SAID = {
    0.0: "0 s",
    1.5e-9: "1.5 ns",
    9.999e-7: "1 µs",
    1.234e-5: "12.3 µs",
    0.412: "412 ms",
    0.9999: "1 s",
    72.04: "72 s",
}


@pytest.mark.parametrize("seconds", SAID)
def test_durations(seconds: float) -> None:
    assert duration(seconds) == SAID[seconds]
