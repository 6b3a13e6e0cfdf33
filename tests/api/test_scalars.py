"""Tensors without dims, through every door: calls, files, modules, training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import meshdsl as md
from meshdsl.api.module import module
from meshdsl.api.programs import Program
from meshdsl.backends.engines.execution import InputSource, run, verify
from tests.compiling import compile_text

PROGRAM = """\
dim n = 8, k = 4
program p(
  x[n, k], target[n, k], s[], i[]: i32, l[]: i64, flag[]: bool, h[]: f16, b[]: bf16, d[]: f64
) {
  param w[k]
  param g[] = ones()
  halves = cast(h, f32) + cast(b, f32) + cast(d, f32)
  y = where(flag, x * s, x) * w + g + cast(i, f32) * cast(l, f32) + halves
  loss = mean((y - target)^2)
  return loss, y, i, b
  minimize loss with momentum(lr=0.05)
}
"""
LAYOUTS = [(None, None), ("x:2", "n:x"), ("x:2,y:2", "n:x,k:y")]
X = np.random.default_rng(2).normal(size=(8, 4)).astype(np.float32)
TARGET = 2 * X
SCALARS: dict[str, Any] = {"s": 1.5, "i": 2, "l": 3, "flag": True, "h": 0.5, "b": 2.25, "d": 0.125}
PARAMS = {"w": np.array([1, 2, 3, 4], np.float32), "g": np.array(0.25, np.float32)}
Y = X * 1.5 * PARAMS["w"] + 0.25 + 6 + 0.5 + 2.25 + 0.125

DTYPES = {"s": "f4", "i": "i4", "l": "i8", "flag": "?", "h": "f2", "b": "f4", "d": "f8"}
TORCH: dict[str, torch.dtype] = {
    **{"s": torch.float32, "i": torch.int32, "l": torch.int64, "flag": torch.bool},
    **{"h": torch.float16, "b": torch.bfloat16, "d": torch.float64},
}
FORMS: dict[str, Mapping[str, Any]] = {
    "Python": SCALARS,
    "arrays": {n: np.array(v, DTYPES[n]) for n, v in SCALARS.items()},
    "scalars of numpy": {n: np.dtype(DTYPES[n]).type(v) for n, v in SCALARS.items()},
    "torch": {n: torch.tensor(v, dtype=TORCH[n]) for n, v in SCALARS.items()},
    "read-only": {n: np.broadcast_to(np.array(v, DTYPES[n]), ()) for n, v in SCALARS.items()},
}


@pytest.fixture
def program(tmp_path: Path) -> Program:
    (tmp_path / "p.mdsl").write_text(PROGRAM)
    return md.load(tmp_path / "p.mdsl")


def right(outputs: Any) -> None:
    """Outputs of `PROGRAM` on `SCALARS` and `PARAMS` are what numpy makes of them."""
    found = {
        n: np.asarray(x.detach().float() if torch.is_tensor(x) else x)
        for n, x in dict(outputs).items()
    }
    assert found["y"].shape == X.shape
    np.testing.assert_allclose(found["y"], Y, rtol=1e-6)
    np.testing.assert_allclose(found["loss"], np.square(Y - TARGET).mean(), rtol=1e-5)
    assert [found[n].shape for n in ("loss", "i", "b")] == [()] * 3
    assert found["i"] == 2
    assert found["b"] == 2.25


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("mesh", "layout"), LAYOUTS)
def test_calls(mesh: str | None, layout: str | None, form: str, program: Program) -> None:
    sizes = dict(axis.split(":") for axis in mesh.split(",")) if mesh else {}
    plan = program.compile({a: int(n) for a, n in sizes.items()} or None, layout)
    given = {"x": X, "target": TARGET, **FORMS[form]}
    right(plan(**given, params=PARAMS))
    right(plan.reference(**given, params=PARAMS))
    plan.params = {"w": PARAMS["w"].tolist(), "g": 0.25}
    assert plan.params["g"].shape == ()
    right(plan(*given.values()))


def test_a_scalar_is_not_stretched(program: Program) -> None:
    plan = program.compile()
    with pytest.raises(md.ProgramError, match="has 1 dims, not 0"):
        plan(X, TARGET, **{**SCALARS, "i": np.array([2], np.int32)})
    with pytest.raises(md.ProgramError, match="has 0 dims, not 2"):
        plan(np.float32(1), TARGET, **SCALARS)


def stored(path: Path, arrays: Mapping[str, Any]) -> str:
    """A file of the arrays, of the kind that its name says."""
    if path.suffix == ".safetensors":
        tensors = {n: torch.tensor(a, dtype=TORCH.get(n)) for n, a in arrays.items()}
        safetensors.torch.save_file(tensors, path)
    elif path.stem.endswith("packed"):
        np.savez_compressed(path, **arrays)
    else:
        np.savez(path, **arrays)
    return str(path)


@pytest.mark.parametrize("name", ["in.npz", "packed.npz", "in.safetensors"])
@pytest.mark.parametrize("engine", ["local", "reference"])
@pytest.mark.parametrize(("mesh", "layout"), LAYOUTS)
def test_files(
    mesh: str | None, layout: str | None, engine: str, name: str, tmp_path: Path
) -> None:
    made = compile_text(PROGRAM, mesh=mesh, layout=layout, evaluate=True)
    arrays = {"x": X, "target": TARGET, **FORMS["arrays"]}
    params = stored(tmp_path / f"params_{name}", PARAMS)
    given = InputSource(stored(tmp_path / name, arrays), params)
    outputs = run(made, engine, given).outputs
    right(outputs)
    assert all(c.ok for c in verify(made, given, outputs))


@pytest.mark.usefixtures("forked_ranks")
def test_files_for_processes(tmp_path: Path) -> None:
    made = compile_text(PROGRAM, mesh="x:2", layout="n:x", evaluate=True)
    arrays = {"x": X, "target": TARGET, **FORMS["arrays"]}
    params = stored(tmp_path / "params.safetensors", PARAMS)
    right(run(made, "torchrun", InputSource(stored(tmp_path / "in.npz", arrays), params)).outputs)


def test_modules(tmp_path: Path) -> None:
    (tmp_path / "p.mdsl").write_text(PROGRAM)
    made = module(tmp_path / "p.mdsl", params=PARAMS)
    inputs = {"x": torch.tensor(X), "target": torch.tensor(TARGET), **FORMS["torch"]}
    outputs = made(**inputs)
    right(outputs._asdict())
    outputs.loss.backward()
    grads = {name: param.grad for name, param in made.named_parameters()}
    slope = torch.tensor(2 * (Y - TARGET) / Y.size)
    torch.testing.assert_close(grads["g"], slope.sum().float())
    torch.testing.assert_close(grads["w"], (slope * torch.tensor(X) * 1.5).sum(0).float())


@pytest.mark.parametrize(("mesh", "layout"), LAYOUTS)
def test_training(mesh: str | None, layout: str | None, program: Program, tmp_path: Path) -> None:
    sizes = dict(axis.split(":") for axis in mesh.split(",")) if mesh else {}
    plan = program.compile({a: int(n) for a, n in sizes.items()} or None, layout)
    plan.params = PARAMS
    many = {"x": np.tile(X, (4, 1)), "target": np.tile(TARGET, (4, 1)), **FORMS["arrays"]}
    folder = str(tmp_path / "run")
    first = plan.train(many, 3, checkpoint=folder)
    slope = np.square(Y - TARGET).mean()
    np.testing.assert_allclose(first.losses[0], slope, rtol=0.3)
    more = plan.train(many, 5, checkpoint=folder, resume=True)
    assert plan.params["g"].shape == ()
    assert more.losses[-1] < first.losses[0]
    assert plan.params["g"] != PARAMS["g"]
