# mypy: disable-error-code="type-arg,valid-type"
"""Plans: what comes in and out, parameters, running again, failing, and what a plan shows."""

from __future__ import annotations

import gc
import json
import threading
from typing import Any

import numpy as np
import pytest
import torch

import meshdsl as md

batch, io, hidden, vocab = md.dims(batch=8, io=4, hidden=8, vocab=6)
line = md.mesh(d=8)


@md.program
def mlp(x: md.Tensor[batch, io]):
    w = md.param([io, hidden])
    v = md.param([hidden, io], init=md.zeros())
    h = md.relu(md.einsum(x, w, out=[batch, hidden]))
    y = x + md.einsum(h, v, out=[batch, io])
    return y, h


@md.program
def look(ids: md.i32[batch], table: md.Tensor[vocab, io]):
    rows = table.gather(vocab, ids)
    return rows


X = np.arange(32, dtype=np.float32).reshape(8, 4)


def test_numpy_comes_back_as_numpy_and_torch_as_torch() -> None:
    plan = mlp.compile(line, {"batch": "d"})
    assert isinstance(plan(X).y, np.ndarray)
    found = plan(torch.from_numpy(X))
    assert isinstance(found.y, torch.Tensor)
    assert np.array_equal(found.y.numpy(), plan(X).y)


@pytest.mark.parametrize(
    "given",
    [
        X.astype(np.float64),
        X.tolist(),
        np.asfortranarray(X),
        X[::-1][::-1],
        torch.from_numpy(X).double(),
    ],
    ids=["float64", "list", "fortran", "strided", "torch double"],
)
def test_inputs_are_brought_into_shape(given: Any) -> None:
    plan = mlp.compile(line, {"hidden": "d"})
    assert np.array_equal(np.asarray(plan(given).y), plan(X).y)


def test_an_input_is_not_changed_and_shares_no_memory_with_an_output() -> None:
    plan = mlp.compile(None, None)
    given = X.copy()
    outputs = plan(given)
    outputs.y[:] = -1
    assert np.array_equal(given, X)
    assert np.array_equal(plan(X).h, outputs.h)


def test_outputs_unpack_and_have_names() -> None:
    outputs = mlp.compile(line)(x=X)
    y, h = outputs
    assert outputs.keys() == ("y", "h")
    assert outputs.y is outputs["y"] is outputs[0] is y
    assert dict(outputs)["h"] is h
    assert len(outputs) == 2
    with pytest.raises(AttributeError, match="no output `z`: y, h"):
        outputs.z  # noqa: B018


# --- parameters --------------------------------------------------------------------------------


def test_parameters_are_made_up_and_can_be_set() -> None:
    one, other = mlp.compile(line, {"hidden": "d"}), mlp.compile(line, {"batch": "d"})
    assert sorted(one.params) == ["v", "w"]
    assert np.array_equal(one.params["w"], other.params["w"])
    v = np.ones((8, 4), np.float32)
    one.params = {"v": v}
    assert np.array_equal(one.params["w"], other.params["w"])
    assert np.allclose(one(X).y, other(X, params={"v": torch.from_numpy(v)}).y, atol=1e-5)
    assert np.array_equal(other(X).y, X)
    one.initialise(seed=1)
    assert not np.array_equal(one.params["w"], other.params["w"])
    assert np.array_equal(one(X).y, X)


@pytest.mark.parametrize("layout", [None, {"batch": "d"}, {"hidden": "d"}], ids=str)
@pytest.mark.parametrize("form", [np.array, torch.tensor], ids=["numpy", "torch"])
def test_parameters_are_copied_in_and_read_only_when_they_come_out(layout: Any, form: Any) -> None:
    plan = mlp.compile(line, layout)
    v = form(np.ones((8, 4), np.float32))
    plan.params = {"v": v}
    before = plan(X).y
    v[...] = 0
    assert np.array_equal(plan(X).y, before)
    with pytest.raises(ValueError, match="read-only"):
        plan.params["v"][...] = 0
    with pytest.raises(TypeError, match="item assignment"):
        plan.params["v"] = v
    assert np.array_equal(plan.params["v"], np.ones((8, 4)))
    assert np.array_equal(plan(X).y, before)
    kept = plan.params["v"]
    plan.params = {"v": np.zeros((8, 4), np.float32)}
    assert np.array_equal(plan(X).y, X)
    assert kept.all()


def test_what_the_reference_returns_shares_no_memory_with_a_plan() -> None:
    @md.program
    def same(x: md.Tensor[batch, io]):
        w = md.param([io])
        return w, x

    plan, given = same.compile(dtype="f64"), X.astype(np.float64)
    w, x = plan.reference(given)
    before = plan.params["w"].copy()
    w[...], x[...] = 0, 0
    assert np.array_equal(plan.params["w"], before)
    assert np.array_equal(given, X)


REFUSED: dict[str, tuple[Any, str]] = {
    "another shape": ({"v": np.ones((4, 8), np.float32)}, "MD0504"),
    "another name": ({"u": np.ones((8, 4), np.float32)}, "MD0820"),
    "integers": ({"v": np.ones((8, 4), int)}, "MD0504"),
    "ragged": ({"v": [[1.0], [1.0, 2.0]]}, "MD0504"),
    "words": ({"v": "ones"}, "MD0504"),
    "no name": (np.ones((8, 4), np.float32), "MD0820"),
}


@pytest.mark.parametrize("how", REFUSED)
def test_parameters_that_do_not_fit_are_refused(how: str) -> None:
    given, code = REFUSED[how]
    plan = mlp.compile(line)
    before = plan(X).y
    with pytest.raises(md.ProgramError, match=code):
        plan.params = given
    with pytest.raises(md.ProgramError, match=code):
        plan(X, params=given)
    assert np.array_equal(plan(X).y, before)


@pytest.mark.parametrize(
    "given", [[[1.0], [1.0, 2.0]], "x", None, object()], ids=["ragged", "word", "None", "object"]
)
def test_inputs_that_are_no_arrays_are_refused(given: Any) -> None:
    plan = mlp.compile(line)
    for call in (plan, plan.reference):
        with pytest.raises(md.ProgramError, match="MD0504"):
            call(given)


# --- again and again ---------------------------------------------------------------------------


def test_a_plan_is_emitted_and_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = mlp.compile(line, {"hidden": "d"})
    plan(X)
    before = set(threading.enumerate())
    monkeypatch.setattr("meshdsl.backends.engines.in_process.load", None)
    monkeypatch.setattr("meshdsl.backends.torch.emitter.emit", None)
    results = [plan(X).y for _ in range(20)]
    assert set(threading.enumerate()) <= before
    assert all(np.array_equal(r, results[0]) for r in results)


def test_the_threads_of_a_plan_end_with_it() -> None:
    gc.collect()
    before = _devices()
    plan = mlp.compile(line, {"hidden": "d"})
    plan(X)
    assert len(_devices() - before) == 8
    mine = _devices() - before
    del plan
    gc.collect()
    for thread in mine:
        thread.join()


def _devices() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("device ")}


def test_calls_from_several_threads_do_not_mix() -> None:
    plan = mlp.compile(line, {"hidden": "d"})
    found: dict[int, Any] = {}

    def call(index: int) -> None:
        found[index] = plan(X + index).h

    threads = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, h in found.items():
        assert np.array_equal(h, plan(X + index).h)


def test_after_a_run_that_failed_the_plan_runs_again() -> None:
    plan = look.compile({"d": 2}, {"batch": "d"})
    table = np.arange(24, dtype=np.float32).reshape(6, 4)
    ids = np.array([0, 1, 2, 3, 4, 5, 0, 1], np.int32)
    wrong = ids.copy()
    wrong[5] = 6
    for _ in range(2):
        with pytest.raises(md.ProgramError, match="MD0801") as caught:
            plan(wrong, table)
        (first,) = caught.value.diagnostics
        assert first.span is not None
        assert first.span.text.startswith("rows = table.gather")
        assert np.array_equal(plan(ids, table).rows, table[ids])


def test_the_reference_tells_of_the_same_index() -> None:
    plan = look.compile({"d": 2}, {"batch": "d"})
    table = np.zeros((6, 4), np.float32)
    with pytest.raises(md.ProgramError, match="MD0801"):
        plan.reference(np.full(8, 9, np.int32), table)


def test_integers_that_do_not_fit_are_refused() -> None:
    plan = look.compile({"d": 2}, {"batch": "d"})
    with pytest.raises(md.ProgramError, match="do not fit i32"):
        plan(np.full(8, 2**40), np.zeros((6, 4), np.float32))


@pytest.mark.parametrize("dtype", ["f64", "bf16", "f16"])
def test_another_float_type(dtype: str) -> None:
    plan = mlp.compile(line, {"hidden": "d"}, dtype=dtype)
    found, expected = plan(X).y, plan.reference(X).y
    tolerance = {"f64": 1e-12, "bf16": 3e-2, "f16": 4e-3}[dtype]
    assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()


# --- what it shows -----------------------------------------------------------------------------


def test_explain_is_text_and_data() -> None:
    plan = mlp.compile(line, {"hidden": "d"}, reduce="deferred")
    explained = plan.explain()
    assert "=> all_reduce sum of" in str(explained)
    assert repr(explained) == str(explained)
    assert all(len(text) <= 60 for text in explained.text(60).split("\n")[:3])
    data = json.loads(json.dumps(explained.json))
    assert (data["version"], data["program"], data["mesh"]) == (1, "mlp", {"d": 8})
    cost = plan.cost()
    assert cost.wire_bytes == data["totals"]["wire_bytes"]
    assert cost.peak_memory == data["memory"]["peak"]
    assert cost.by_axis == {"d": cost.wire_bytes}


def test_compare_shows_columns() -> None:
    plan = mlp.compile(line, {"hidden": "d"})
    titles = [c["title"] for c in plan.compare().json["columns"]]
    assert [t.rpartition("--reduce ")[2] for t in titles] == [
        "optimal",
        "optimal, as positional SBP",
        "immediate",
    ]
    rows = md.layout(batch="d")
    compared = plan.compare(rows, "batch:d,hidden:none", run=True)
    assert [c["layout"] for c in compared.json["columns"]] == [
        "hidden -> d",
        "rows",
        "batch -> d, hidden -> none",
    ]
    assert not compared.same
    assert "layout rows" in str(compared)
    assert compared.json["run"]["executed"] == ["A", "B", "C"]
    assert compared.page().startswith("<!doctype html>")
    assert len(plan.compare(reduce=["immediate", "deferred"]).json["columns"]) == 3


def test_the_code_stands_alone() -> None:
    code = mlp.compile(line, {"hidden": "d"}).code
    assert "def device(rank, groups, inputs, params):" in code
    assert "test_plan.py:" in code
    assert "meshdsl" not in code.split('"""')[2]


def test_sbp_instead_of_a_layout() -> None:
    by_position = mlp.compile(line, sbp={"w": "S(1)", "v": ["S(0)"]})
    by_name = mlp.compile(line, {"hidden": "d"})
    assert by_position.cost().wire_bytes == by_name.cost().wire_bytes
    assert np.array_equal(by_position(X).y, by_name(X).y)
    with pytest.raises(md.ProgramError, match="MD0601"):
        mlp.compile(line, {"hidden": "d"}, sbp={"w": "S(1)"})


@pytest.mark.parametrize("seed", [1 << 63, -(1 << 63), 0.5, "1"])
def test_a_seed_is_a_whole_number_in_a_range(seed: Any) -> None:
    plan = mlp.compile(line, {"batch": "d"})
    plan.sample(-(1 << 63) + 1)
    for take in (plan.sample, plan.initialise, lambda seed: plan.module(seed=seed)):
        with pytest.raises(md.ProgramError, match=r"MD0604.*seed"):
            take(seed)
