"""Pickled programs and plans: the same program, the same plan, the same numbers."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest

import meshdsl as md

ROOT = Path(__file__).parents[2]
batch, io = md.dims(batch=4, io=6)
hidden = md.dim("hidden", 4 * io)


@md.program
def traced(x: Annotated[md.Tensor, batch, io]) -> Any:
    w = md.param([io, hidden])
    h = md.relu(md.einsum(x, w, out=[batch, hidden]))
    y = h + 1.0
    return {"y": y, "total": md.sum(y)}


@md.program
def differentiated(x: Annotated[md.Tensor, batch, io]) -> Any:
    dx = md.grad(md.mean(x * x), x)
    return dx


def mlp() -> md.Program:
    return md.load(ROOT / "examples/mlp.mdsl", dims={"batch": 4, "io": 8})


def same_values(plan: md.Plan, again: md.Plan) -> None:
    inputs = plan.sample(1)
    wanted, found = dict(plan(**inputs)), dict(again(**inputs))
    assert list(found) == list(wanted)
    for name in wanted:
        assert np.array_equal(found[name], wanted[name])


LOADED: dict[str, dict[str, Any]] = {
    "by name": {"mesh": "square", "layout": "hybrid"},
    "from Python": {"mesh": {"rows": 2}, "layout": {"batch": "rows"}},
    "sbp": {"mesh": md.mesh(a=2), "sbp": {"x": "S(0)"}, "reduce": "deferred"},
    "another dtype": {"dtype": "f64"},
}


@pytest.mark.parametrize("how", LOADED)
def test_a_plan_of_a_file(how: str) -> None:
    plan = mlp().compile(**LOADED[how])
    again = pickle.loads(pickle.dumps(plan))
    assert repr(again) == repr(plan)
    assert str(again.code) == str(plan.code)
    same_values(plan, again)


def test_a_plan_of_a_traced_program() -> None:
    plan = traced.compile(md.mesh(rows=2), md.layout(hidden="rows"))
    plan.params = {"w": np.arange(144.0, dtype=np.float32).reshape(6, 24)}
    for again in (pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan)):
        assert repr(again) == repr(plan)
        assert again.cost() == plan.cost()
        assert np.array_equal(again.params["w"], plan.params["w"])
        same_values(plan, again)


def test_a_pickle_of_a_pickle() -> None:
    plan = traced.compile({"rows": 2}, "hidden:rows")
    once = pickle.loads(pickle.dumps(plan))
    same_values(plan, pickle.loads(pickle.dumps(once)))


def test_a_program() -> None:
    for program in (mlp(), traced, differentiated):
        again = pickle.loads(pickle.dumps(program))
        assert repr(again) == repr(program)
        assert again.params == program.params
        assert again.to_mdsl() == program.to_mdsl()


def test_what_cannot_be_written_cannot_be_written_from_a_pickle() -> None:
    _, io = md.dims(batch=4, io=6)  # equal to those of the file, which `typing` has kept

    @md.program
    def p(x: Annotated[md.Tensor, batch, io]) -> Any:
        return x / int(io)

    plan = p.compile()
    again = pickle.loads(pickle.dumps(plan))
    same_values(plan, again)
    for program in (p, again.program):
        with pytest.raises(md.ProgramError, match="MD0821"):
            program.to_mdsl()


def test_another_process_reads_it(tmp_path: Path) -> None:
    plan = traced.compile({"rows": 2}, {"hidden": "rows"})
    path = tmp_path / "plan.pickle"
    path.write_bytes(pickle.dumps(plan))
    read = f"plan = pickle.load(open({str(path)!r}, 'rb'))"
    code = f"import pickle; {read}; print(plan.cost())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{plan.cost()}\n"
