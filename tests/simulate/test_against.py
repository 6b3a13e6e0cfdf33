"""A measured trace beside the simulated one; and files that are no traces of the program."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from meshdsl.diagnostics import DiagnosticError
from meshdsl.simulate.against import against, read_trace, refuse_other
from meshdsl.simulate.engine import simulate
from meshdsl.simulate.trace import simulated_trace
from tests.poison import poisoned
from tests.simulate.flat import flat, layered

Json = Any


@pytest.fixture(scope="module")
def trace() -> Json:
    """A simulated trace."""
    program = layered("both", 9)
    found: Json = json.loads(json.dumps(simulated_trace(simulate(program, flat(program)))))
    return found


def test_a_trace_agrees_with_itself(trace: Json) -> None:
    found = against(trace, trace)
    entries = [found["step"], *found["kinds"], *found["lines"]]
    assert all(e["ratio"] == pytest.approx(1.0) for e in entries)
    for key in ("kinds", "lines"):
        assert sum(e["measured"] for e in found[key]) == pytest.approx(found["step"]["measured"])
        assert [e["measured"] for e in found[key]] == sorted(
            (e["measured"] for e in found[key]), reverse=True
        )


def test_of_several_devices_the_one_that_others_wait_for_counts(trace: Json) -> None:
    """Operators are averaged; of a collective it is the least, without the wait for others."""
    late = copy.deepcopy(trace)
    again = [copy.deepcopy(e) for e in late["traceEvents"] if e["ph"] == "X"]
    for event in again:
        event["pid"] = 1
        event["dur"] *= 3
    late["traceEvents"] += again
    kinds = {e["name"]: e["ratio"] for e in against(trace, late)["kinds"]}
    sent = {e["args"]["op"] for e in again if e["cat"] == "wait"}
    assert sent
    for name, ratio in kinds.items():
        assert ratio == pytest.approx(1.0 if name in sent else 2.0), name


def test_what_one_side_alone_has_is_told(trace: Json) -> None:
    less = copy.deepcopy(trace)
    less["traceEvents"] = [
        e for e in less["traceEvents"] if e.get("args", {}).get("op") != "einsum"
    ]
    kinds = {e["name"]: e for e in against(trace, less)["kinds"]}
    assert kinds["einsum"]["ratio"] == 0
    kinds = {e["name"]: e for e in against(less, trace)["kinds"]}
    assert kinds["einsum"]["ratio"] is None


SLICE = {"ph": "X", "name": "n", "pid": 0, "tid": 0, "ts": 0, "dur": 1, "args": {"line": 1}}
HEAD = {"made by": "meshdsl 0 run", "seconds": 1.0}


def file(*events: Any, **head: Any) -> str:
    """The text of a trace."""
    return json.dumps({"traceEvents": list(events), "otherData": {**HEAD, **head}})


BAD = {
    "an event of no kind": file({"name": "x"}),
    "no number of trips": file({**SLICE, "args": {"op": "add", "line": 3, "trips": None}}),
    "endless trips": file({**SLICE, "args": {"op": "add", "line": 3, "trips": 10**400}}),
    "half a pair of surrogates": file({**SLICE, "args": {"op": "\ud800", "line": 3}}),
    "a mesh that is a list": file(mesh=[2]),
    "a process that is a list": file({"ph": "M", "pid": [0]}),
    "empty": "",
    "no json": "{",
    "deep": "[" * 100_000,
    "a list": "[]",
    "of others": '{"traceEvents": []}',
    "a number for a head": '{"traceEvents": [], "otherData": 3}',
    "no events": json.dumps({"otherData": HEAD}),
    "events by name": json.dumps({"traceEvents": {}, "otherData": HEAD}),
    "no seconds": file(seconds=None),
    "endless": file(seconds=float("inf")),
    "an event that is a number": file(3),
    "no time": file({**SLICE, "ts": None}),
    "a time that is a word": file({**SLICE, "dur": "long"}),
    "a negative time": file({**SLICE, "dur": -1}),
    "not a number": file({**SLICE, "dur": float("nan")}),
    "true": file({**SLICE, "dur": True}),
    "no args": file({**SLICE, "args": None}),
    "no process": file({**SLICE, "pid": "one"}),
    "no line": file({**SLICE, "args": {"op": "add"}}),
    "an operator that is a list": file({**SLICE, "args": {"op": ["add"], "line": 3}}),
    "trips that are a word": file({**SLICE, "args": {"op": "add", "line": 3, "trips": "3"}}),
}


def test_every_field_of_a_trace_is_checked(trace: Json, tmp_path: Path) -> None:
    """What is believed can be compared; all else is refused with the name of the file."""
    path, refused = tmp_path / "trace.json", {}
    kinds = {e["ph"]: e for e in trace["traceEvents"]}
    whole = {**trace, "traceEvents": [*kinds.values()]}
    cases = {name.replace("[0]", ""): other for name, other in poisoned(whole)}
    for number, event in enumerate(whole["traceEvents"]):
        for name, other in poisoned(event):
            events = [*whole["traceEvents"]]
            events[number] = other
            cases[f"{event['ph']} {name}"] = {**whole, "traceEvents": events}
    for name, other in cases.items():
        path.write_text(json.dumps(other), encoding="utf-8")
        try:
            found = read_trace(path)
        except DiagnosticError as error:
            refused[name] = f"{error}"
        else:
            json.dumps(against(trace, found), allow_nan=False)
    assert [m for m in refused.values() if "MD0631" not in m or "trace.json" not in m] == []
    assert len(refused) >= 100


@pytest.mark.parametrize("case", BAD)
def test_files_that_are_no_traces(case: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(BAD[case], encoding="utf-8")
    with pytest.raises(DiagnosticError) as caught:
        read_trace(path)
    (found,) = caught.value.diagnostics
    assert found.code == "MD0631"
    assert "trace.json" in found.message


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "none.json", tmp_path, binary):
        with pytest.raises(DiagnosticError, match="MD0631"):
            read_trace(path)


def test_traces_of_other_programs(trace: Json, tmp_path: Path) -> None:
    program = layered("both", 9)
    refuse_other(tmp_path, trace, program)
    for key, value in (("program", "other"), ("mesh", {"data": 8}), ("layout", None)):
        other: Any = {**trace, "otherData": {**trace["otherData"], key: value}}
        with pytest.raises(DiagnosticError, match="MD0632"):
            refuse_other(tmp_path, other, program)
