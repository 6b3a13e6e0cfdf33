"""The training loop on small hand-written programs: numbers, log, resuming, stopping, trouble."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshdsl.backends.engines.in_process import Emitted, load
from meshdsl.backends.engines.local_devices import LocalRunError
from meshdsl.backends.runtime.values import draw_part
from meshdsl.backends.train import log as loop_log
from meshdsl.backends.train.batches import Shuffled
from meshdsl.backends.train.devices import train_local
from meshdsl.backends.train.job import DataFiles, Ending, Event, Job
from meshdsl.backends.train.training_run import train, troubled
from meshdsl.diagnostics import DiagnosticError
from tests.backends.training_text import (
    LINE_EVALUATED,
    LINE_TABLES,
    line,
    pairs,
    training_text,
)
from tests.waiting import devices_end


@pytest.fixture
def data(tmp_path: Path) -> str:
    """Points on a line, 40 of them."""
    x = np.random.default_rng(0).standard_normal((40, 3)).astype(np.float32)
    np.savez(tmp_path / "d.npz", x=x, y=x @ np.array([1, -2, 3], np.float32))
    return str(tmp_path / "d.npz")


def run(
    emitted: Emitted,
    data: str,
    steps: int,
    stopping: Callable[[], bool] = lambda: False,
    fraction: float = 0.0,
    **job: Any,
) -> tuple[Ending, list[Event]]:
    events: list[Event] = []
    asked = Job(DataFiles(data, fraction=fraction), steps, **job)
    with devices_end():
        ending = train_local(emitted, asked, events.append, stopping)
    return ending, events


def losses(events: list[Event]) -> list[float]:
    return [event["values"]["loss"] for event in events if event["kind"] == "step"]


def logged(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


# --- numbers -------------------------------------------------------------------------------------


def by_hand(data: str, steps: int, seed: int) -> tuple[np.ndarray[Any, Any], list[float]]:
    """The same training in numpy: the parameter and the losses."""
    with np.load(data) as arrays:
        x, y = arrays["x"], arrays["y"]
    program = load(training_text("return {}", LINE_TABLES).text)
    w = draw_part(program.PARAMS["w"], "w", seed, (slice(0, 3),))
    v, found, order = np.zeros(3), [], Shuffled(seed, len(x), 8)
    for step in range(steps):
        rows = order.rows(step)
        error = x[rows] @ w - y[rows]
        found.append(float((error * error).mean()))
        v = 0.9 * v + 2 * error @ x[rows] / 8
        w = w - 0.05 * v
    return w, found


@pytest.mark.parametrize("seed", [0, 9])
def test_a_run_computes_what_numpy_does(data, seed, tmp_path):
    ending, events = run(line(), data, 17, seed=seed, out=str(tmp_path / "o.npz"))
    w, expected = by_hand(data, 17, seed)
    np.testing.assert_allclose(losses(events), expected, rtol=1e-4)
    with np.load(tmp_path / "o.npz") as out:
        np.testing.assert_allclose(out["w"], w, rtol=1e-4)
    assert (ending.how, ending.start, ending.step, ending.amount) == ("finished", 0, 17, 17 * 8)
    assert ending.values["loss"] == losses(events)[-1]
    assert set(ending.values) == {"loss", "largest"}  # what is no single number is not reported


def test_initial_values_can_be_given(data, tmp_path):
    np.savez(tmp_path / "p.npz", w=np.array([1, -2, 3], np.float32))
    _, events = run(line(), data, 3, params=str(tmp_path / "p.npz"))
    assert max(losses(events)) < 1e-10


def test_a_text_is_learned(tmp_path):
    (tmp_path / "t.txt").write_text("abracadabra " * 30)
    ending, events = run(pairs(), str(tmp_path / "t.txt"), 300)
    assert losses(events)[0] == pytest.approx(np.log(16))
    assert np.mean(losses(events)[-20:]) < 1.0
    assert (ending.unit, ending.amount) == ("tokens", 300 * 24)


def test_evaluation_averages_over_the_held_out_batches(data, tmp_path):
    out = str(tmp_path / "o.npz")
    ending, events = run(
        line(evaluated=True), data, 10, fraction=0.5, eval_every=4, out=out, seed=1
    )
    told = [(event["step"], event["values"]) for event in events if event["kind"] == "eval"]
    assert [step for step, _ in told] == [4, 8, 10]
    with np.load(data) as arrays, np.load(out) as params:
        x, y = arrays["x"][20:36], arrays["y"][20:36]  # two whole batches of the last 20
        expected = float(np.square(x @ params["w"] - y).mean())
    assert ending.evaluated == {"loss": pytest.approx(expected, rel=1e-5)}
    assert told[-1][1] == ending.evaluated


def test_evaluation_may_hold_parameters_in_another_way(data, tmp_path):
    # Storage in the one program is split, the other needs it whole.
    split = LINE_TABLES.replace('{"io": 3}, {}', '{"io": 4}, {"io": ("d",)}')
    split = split.replace('"io": 3', '"io": 4')
    body = """
    x, y = inputs["x"], inputs["y"]
    loss = all_reduce((x * x).sum() + (y * y).sum(), groups["d"], "sum")
    return {"loss": loss, "error": y, "largest": loss}
    """
    whole = split.replace('{"io": ("d",)}', "{}")
    evaluated = """
    return {"loss": (params["w"] * torch.tensor([1.0, 10, 100, 1000])).sum(), "error": inputs["y"]}
    """
    x = np.ones((40, 4), np.float32)
    np.savez(tmp_path / "d.npz", x=x, y=x[:, 0])
    np.savez(tmp_path / "p.npz", w=np.array([1, 2, 3, 4], np.float32))
    whole = whole.replace('    "largest": Spec("f32", {}, {}),\n', "")
    texts = (
        training_text(body, split, groups=[("d",)]),
        training_text(evaluated, whole, states=False),
    )
    ending, _ = run(
        Emitted(*texts),
        str(tmp_path / "d.npz"),
        1,
        fraction=0.5,
        eval_every=1,
        params=str(tmp_path / "p.npz"),
    )
    assert ending.evaluated == {"loss": 4321.0}


# --- the log, checkpoints and resuming -----------------------------------------------------------


def test_the_log_has_an_object_per_step(data, tmp_path):
    log = tmp_path / "log.jsonl"
    _, events = run(line(evaluated=True), data, 5, fraction=0.5, eval_every=2, log=str(log), seed=2)
    found = logged(log)
    assert [record["step"] for record in found] == [1, 2, 3, 4, 5]
    assert [record["loss"] for record in found] == losses(events)
    assert ["eval_loss" in record for record in found] == [False, True, False, True, True]
    assert all(record["seconds"] > 0 and record["samples_per_s"] > 0 for record in found)


def test_a_log_that_cannot_be_written_is_told(data, tmp_path, monkeypatch):
    log = str(tmp_path / "log.jsonl")
    monkeypatch.setattr(loop_log, "regular", lambda path, flags: os.open("/dev/full", os.O_WRONLY))
    with pytest.raises(DiagnosticError) as caught:
        run(line(), data, 5, log=log)
    (told,) = caught.value.diagnostics
    assert told.code == "MD0501"
    assert told.message == f"the log {log} cannot be written: No space left on device"
    assert told.help is not None
    assert told.help.startswith("free some space there")
    assert "--resume" in told.help


def numbers(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    timed = ("seconds", "samples_per_s", "memory")
    return [{k: v for k, v in record.items() if k not in timed} for record in records]


@pytest.mark.parametrize("at", [1, 6, 11])
def test_a_run_that_is_resumed_is_the_run_that_was_not_interrupted(data, at, tmp_path):
    given = {"fraction": 0.4, "eval_every": 3, "checkpoint_every": at, "seed": 5}
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    emitted = line(evaluated=True)
    run(emitted, data, 12, log=str(whole), **given)
    asked: dict[str, Any] = {**given, "checkpoint": str(tmp_path / "ck"), "log": str(parts)}
    run(emitted, data, at, **asked)
    run(emitted, data, at + 1, resume=True, **{**asked, "checkpoint": None})  # killed: no save
    with open(parts, "a") as file:
        file.write('{"step": 12, "lo')
    ending, events = run(emitted, data, 12, resume=True, out=str(tmp_path / "o.npz"), **asked)
    assert ending.start == at
    assert len(losses(events)) == 12 - at
    if at > 1:  # at 1 the second run began anew, so its lines are the first's
        assert numbers(logged(parts)) == numbers(logged(whole))
    again, events = run(emitted, data, 12, resume=True, **asked)
    assert (again.start, again.step, losses(events)) == (12, 12, [])


def test_checkpoints_come_every_k_steps_and_at_the_end(data, tmp_path):
    folder = tmp_path / "ck"
    ending, events = run(line(), data, 7, checkpoint=str(folder), checkpoint_every=3)
    written = [event["step"] for event in events if event["kind"] == "checkpoint"]
    assert written == [3, 6, 7]
    assert ending.checkpoint == f"{folder}/step-7"
    assert (folder / "step-7").is_dir()


def test_a_damaged_checkpoint_is_skipped_with_a_warning(data, tmp_path):
    folder = tmp_path / "ck"
    run(line(), data, 6, checkpoint=str(folder), checkpoint_every=3)
    for path in (folder / "step-6").glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-5])
    ending, events = run(line(), data, 6, checkpoint=str(folder), resume=True)
    assert ending.start == 3
    (note,) = (event for event in events if event["kind"] == "note")
    assert (note["code"], note["severity"]) == ("MD0542", "warning")


def test_a_run_resumed_on_other_data_says_so(data, tmp_path):
    folder = str(tmp_path / "ck")
    run(line(), data, 2, checkpoint=folder)
    _, events = run(line(), data, 3, checkpoint=folder, resume=True, fraction=0.5)
    assert [event["code"] for event in events if event["kind"] == "note"] == ["MD0517"]


# --- stopping ------------------------------------------------------------------------------------


def test_a_run_that_is_asked_to_stop_keeps_what_it_has(data, tmp_path):
    folder, log = str(tmp_path / "ck"), tmp_path / "log.jsonl"

    def asked() -> bool:
        return log.exists() and len(logged(log)) > 10

    ending, _ = run(line(), data, 10**9, asked, checkpoint=folder, log=str(log))
    assert ending.how == "interrupted"
    assert ending.checkpoint == f"{folder}/step-{ending.step}"
    assert len(logged(log)) == ending.step > 10
    more = ending.step + 3
    after, _ = run(line(), data, more, checkpoint=folder, log=str(log), resume=True)
    assert (after.start, after.step) == (ending.step, more)
    assert [r["step"] for r in logged(log)] == list(range(1, more + 1))


def test_a_run_may_be_stopped_before_its_first_step(data, tmp_path):
    ending, _ = run(line(), data, 5, lambda: True, checkpoint=str(tmp_path / "ck"))
    assert (ending.how, ending.step, ending.checkpoint) == ("interrupted", 0, None)


FAILING = """
x, y = inputs["x"], inputs["y"]
v = states["w.v"]
v.add_(1)
if rank == 1 and v[0] == 40:
    raise ValueError("no luck")
loss = all_reduce((x * x).sum() * (y * y).sum(), groups["d"], "sum")
return {"loss": loss, "error": y, "largest": loss}
"""


def test_a_failure_of_one_device_ends_all_at_once(data):
    emitted = Emitted(training_text(FAILING, LINE_TABLES, groups=[("d",)]))
    with pytest.raises(LocalRunError) as caught:
        run(emitted, data, 10**9)
    error = caught.value
    assert (error.code, error.device, error.place) == ("MD0701", 1, "line.mdsl:5")
    assert error.message == "device 1 failed at line.mdsl:5: ValueError: no luck"


# --- numbers that are none -----------------------------------------------------------------------


def trouble(emitted: Emitted, data: str, **job: Any) -> tuple[str, Ending]:
    ending, _ = run(emitted, data, 200, **job)
    assert ending.how == "not finite"
    assert ending.trouble is not None
    return troubled(ending, ending.trouble, emitted.places, None).message, ending


@pytest.mark.parametrize("every", [0, 3, 9])
def test_the_step_and_the_line_where_a_loss_gets_infinite_are_found(every, data, tmp_path):
    folder = str(tmp_path / "ck") if every else None
    message, ending = trouble(line(rate=4), data, checkpoint=folder, checkpoint_every=every)
    step = ending.step
    assert message == (
        f"the loss is inf in step {step}; `loss` became inf first, in step {step} at line.mdsl:5"
        " on device 0"
    )
    last = (step - 1) // every * every if every else None
    assert ending.checkpoint == (f"{folder}/step-{last}" if every else None)


def test_the_checkpoint_before_is_what_is_resumed(data, tmp_path):
    folder = str(tmp_path / "ck")
    _, ending = trouble(line(rate=4), data, checkpoint=folder, checkpoint_every=5)
    after, events = run(line(rate=0.0), data, ending.step, checkpoint=folder, resume=True)
    assert after.start == (ending.step - 1) // 5 * 5
    assert np.isfinite(losses(events)).all()


def test_nan_in_the_data_is_told_as_such(tmp_path):
    x = np.ones((40, 3), np.float32)
    x[20, 1] = np.nan
    np.savez(tmp_path / "d.npz", x=x, y=x[:, 0])
    message, ending = trouble(line(), str(tmp_path / "d.npz"))
    assert message == (
        f"the loss is nan in step {ending.step}; the data of step {ending.step} hold nan in `x`"
    )


MASKED = """
x, y = inputs["x"], inputs["y"]
late = states["w.v"].add_(1)[0]
scores = torch.where(x > 0, x, float("-inf"))
top = torch.cat([scores, y[:, None]], 1)
chances = torch.softmax(top, 1)
left_out = torch.log(torch.zeros(2))
used = torch.where(left_out < -5, torch.zeros(2), left_out)
loss = all_reduce(chances.sum() + used.sum(), groups["d"], "sum")
grown = loss * 1e37
scale = grown * torch.where(late > 6, late, torch.zeros(()))
bad = scale - scale
params["w"].add_(bad)
return {"loss": loss + params["w"].sum(), "error": y, "largest": loss}
"""


def test_masks_and_what_is_left_out_are_not_blamed(data):
    emitted = Emitted(training_text(MASKED, LINE_TABLES, groups=[("d",)]))
    message, _ = trouble(emitted, data)
    assert message == (
        "the loss is nan in step 7; `scale` became inf first, in step 7 at line.mdsl:10 on device 0"
    )


SPOILED = """
x, y = inputs["x"], inputs["y"]
late = states["w.v"].add_(1)[0]
w = params["w"]
w.div_(torch.where(late > 2, 0.0, 1.0) if rank == 1 else torch.ones(3))
loss = all_reduce((x * x).sum() * (y * y).sum(), groups["d"], "sum")
return {"loss": loss, "error": y, "largest": loss}
"""


def test_a_parameter_that_is_no_number_is_never_saved(data, tmp_path):
    emitted = Emitted(training_text(SPOILED, LINE_TABLES, groups=[("d",)]))
    message, ending = trouble(emitted, data, checkpoint=str(tmp_path / "ck"), checkpoint_every=2)
    assert message == (
        "a parameter is not finite in step 4; `w` became inf first, in step 3 at line.mdsl:4"
        " on device 1"
    )
    assert ending.checkpoint == f"{tmp_path}/ck/step-2"
    assert sorted(p.name for p in (tmp_path / "ck").glob("step*")) == ["step-2"]


def test_a_parameter_that_is_no_number_is_no_result(data):
    emitted = Emitted(training_text(SPOILED, LINE_TABLES, groups=[("d",)]))
    message, ending = trouble(emitted, data)
    assert message.startswith(f"a parameter is not finite in step {ending.step}; `w` became inf")
    assert ending.how == "not finite"


def test_trouble_long_before_it_was_seen_is_found(data):
    # The parameter goes bad in step 3, the loss looks at it 40 steps later.
    body = SPOILED.replace('"loss": loss', '"loss": torch.where(late < 43, loss, w.sum())')
    body = body.replace("if rank == 1 else torch.ones(3)", "")
    emitted = Emitted(training_text(body, LINE_TABLES, groups=[("d",)]))
    message, _ = trouble(emitted, data)
    assert "in step 43; `w` became inf first, in step 3 at line.mdsl:4 on device 0" in message


def test_what_does_not_happen_again_is_said_to(data):
    once = "globals()['TRIED'] = 1; y = y * float('nan')"
    body = FAILING.replace('raise ValueError("no luck")', once)
    body = body.replace("rank == 1 and v[0] == 40", "v[0] == 40 and 'TRIED' not in globals()")
    emitted = Emitted(training_text(body, LINE_TABLES, mesh={"d": 1}, groups=[("d",)]))
    message, _ = trouble(emitted, data)
    assert message == (
        "the loss is nan in step 40; it did not happen again when the steps were run again"
    )


def test_it_is_told_as_a_diagnostic(data):
    with pytest.raises(DiagnosticError) as caught:
        train(line(rate=4), "local", Job(DataFiles(data), 200), lambda event: None)
    (found,) = caught.value.diagnostics
    assert found.code == "MD0720"
    assert found.help


def test_the_evaluated_text_is_told_by_its_own_lines(data):
    body = LINE_EVALUATED.replace("loss = all", 'raise ValueError("no luck")\nloss = all')
    tables = LINE_TABLES.replace('    "largest": Spec("f32", {}, {}),\n', "")
    evaluated = training_text(body, tables, groups=[("d",)], states=False)
    with pytest.raises(LocalRunError) as caught:
        run(Emitted(line().program, evaluated), data, 4, fraction=0.5, eval_every=2)
    assert caught.value.place == "line.mdsl:4"
