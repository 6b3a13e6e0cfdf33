# mypy: disable-error-code="type-arg,valid-type"
"""Every example, parsed and traced from its twin in Python, is the same program."""

from __future__ import annotations

import functools
import os
import runpy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import meshdsl as md
from meshdsl.diagnostics import Diagnostics
from meshdsl.ir.rewrite import Rebuild
from meshdsl.named import ir
from meshdsl.named.printer import print_program
from meshdsl.pipeline import Options, compile_source
from meshdsl.syntax.parse import read_source
from tests.api.twins import EXAMPLES, program_of, twin_of
from tests.project import examples, matching

FILES = examples()
NAMES = [path.relative_to(EXAMPLES).with_suffix("").as_posix() for path in FILES]
SCRIPTS = ("mlp", "matmul", "transformer")
SOME = NAMES if "MESHDSL_CASES" in os.environ else ["dlrm", "mlp", "moe", "nmt", "sbp/megatron"]
"""For what is of no example alone: that a twin is its example is proved of all."""


def printed(program: ir.NamedProgram) -> str:
    """The text of a program without its source lines."""
    ordered = replace(program, body=_InOrder().nodes(program.body))
    lines = print_program(ordered).split("\n")
    return "\n".join(line for line in lines if not line.lstrip().startswith("#"))


class _InOrder(Rebuild):
    """Loops whose slices are sorted: they have no order of their own, and are all cut at once."""

    def op(self, op: ir.NamedOp) -> tuple[ir.NamedOp]:
        return (op,)

    def loop(self, loop: ir.NamedLoop) -> tuple[ir.NamedLoop]:
        stacked = tuple(sorted(loop.stacked, key=lambda s: (str(s.outer.name), s.outer.span.start)))
        return (replace(loop, stacked=stacked, body=self.nodes(loop.body)),)


@functools.cache
def traced_text(name: str) -> str:
    """The text of the twin of an example."""
    return printed(program_of(name).named())


def test_every_example_has_a_twin() -> None:
    twins = {twin_of(EXAMPLES / f"{name}.mdsl") for name in NAMES}
    assert all(path.exists() for path in twins)
    own = {p for p in matching("tests/api/twins/*.py") if p.name != "__init__.py"}
    assert own <= twins, "a twin without an example"


@pytest.mark.parametrize("name", NAMES)
def test_traced_is_parsed(name: str) -> None:
    parsed = md.load(EXAMPLES / f"{name}.mdsl")
    traced = program_of(name)
    assert traced.name == parsed.name
    assert traced_text(name) == printed(parsed.named())
    assert (traced.inputs, traced.params) == (parsed.inputs, parsed.params)


@pytest.mark.parametrize("name", NAMES)
def test_written_back_it_means_the_same(name: str, tmp_path: Path) -> None:
    file = tmp_path / "written.mdsl"
    file.write_text(program_of(name).to_mdsl())
    assert printed(md.load(file).named()) == traced_text(name)


@pytest.mark.parametrize("name", SOME)
def test_a_loaded_program_is_what_the_command_line_compiles(name: str) -> None:
    path = EXAMPLES / f"{name}.mdsl"
    for evaluate in (True, False):
        options = Options(evaluate=evaluate)
        made = compile_source(read_source(path), options, Diagnostics(), "named")
        found = md.load(path).named(evaluate=evaluate)
        assert print_program(found) == print_program(made.named)


@pytest.mark.parametrize("name", SOME)
def test_a_plan_computes_the_reference(name: str) -> None:
    program = program_of(name)
    if name in LARGE:
        program = md.load(EXAMPLES / f"{name}.mdsl", dims=LARGE[name])
    plan = program.compile({"devices": 2}, _a_layout(program))
    inputs = plan.sample()
    outputs, expected = plan(**inputs), plan.reference(**inputs)
    assert outputs.keys() == expected.keys() == program.outputs
    for found, wanted in zip(outputs, expected, strict=True):
        assert found.shape == wanted.shape
        assert np.abs(found - wanted).max() <= 1e-5 * max(1, np.abs(wanted).max())


GOALS = """
dim batch = 8, io = 4, wide = io, hidden = 8, layers = 3
program goals(x[batch, io], target[batch, wide]) {
  param out[io, wide]: f32 = he()
  param seen[]: i32 = zeros()
  repeat layers {
    param w[io, hidden] = uniform(-1, 1)
    param v[hidden, io] = glorot()
    recompute {
      h = gelu(einsum(x, w -> [batch, hidden]))
    }
    x = x + einsum(h, v -> [batch, io])
    param level[io] = zeros()
    level := 0.9 * level + 0.1 * mean[batch](x)
  }
  seen := seen + batch
  y = einsum(x, out -> [batch, wide])
  loss = mean((y - target)^2)
  dy, dout = grad(loss, y, out)
  size = sum(abs(dy))
  return loss, size, dout
  minimize loss with adamw(lr=cosine(3e-4, 1000), clip=1.0) {
    params: weight_decay = 0.1
    w: lr = linear(1e-3, 10), eps = 1e-6
    (v, out): frozen
  }
  minimize mean(y) with sgd(lr=0.1) {
    (w, v): frozen
    out: momentum(0.2, beta=0.5)
  }
}
"""


def goals() -> md.Program:
    """The same in Python."""
    batch, io, hidden, layers = md.dims(batch=8, io=4, hidden=8, layers=3)
    wide = md.dim("wide", like=io)

    @md.program
    def goals(x: md.Tensor[batch, io], target: md.Tensor[batch, wide]):
        out = md.param([io, wide], init=md.he(), dtype=md.f32)
        seen = md.param([], init=md.zeros(), dtype=md.i32)

        def layer(x):
            w = md.param([io, hidden], init=md.uniform(-1, 1))
            v = md.param([hidden, io], init=md.glorot())
            with md.recompute():
                h = md.gelu(md.einsum(x, w, out=[batch, hidden]))
            x = x + md.einsum(h, v, out=[batch, io])
            level = md.param([io], init=md.zeros())
            md.update(level, 0.9 * level + 0.1 * md.mean[batch](x))
            return x

        x = md.repeat(layers, layer, x)
        md.update(seen, seen + batch)
        y = md.einsum(x, out, out=[batch, wide])
        loss = md.mean((y - target) ** 2)
        dy, dout = md.grad(loss, y, out)
        size = md.sum(abs(dy))
        groups = {
            "params": {"weight_decay": 0.1},
            "w": {"lr": md.linear(1e-3, 10), "eps": 1e-6},
            ("v", "out"): "frozen",
        }
        md.minimize(loss, md.adamw(lr=md.cosine(3e-4, 1000), clip=1.0), groups)
        others = {("w", "v"): "frozen", "out": md.momentum(0.2, beta=0.5)}
        md.minimize(md.mean(y), md.sgd(lr=0.1), groups=others)
        return loss, size, dout

    return goals


@pytest.mark.parametrize("evaluate", [True, False], ids=["forward", "training step"])
def test_gradients_blocks_and_goals_are_the_same(evaluate: bool, tmp_path: Path) -> None:
    file = tmp_path / "goals.mdsl"
    file.write_text(GOALS)
    parsed, traced = md.load(file), goals()
    assert printed(traced.named(evaluate=evaluate)) == printed(parsed.named(evaluate=evaluate))


SMALL = {"batch": 4, "seq": 8, "model": 16, "heads": 4, "key": 4, "hidden": 16, "vocab": 16}
KV = {"kv": 4, "group": 2}
LARGE = {
    "transformer": SMALL,
    "search/gpt3": SMALL,
    "large/gpt_3072": SMALL,
    "search/llama3": {**{d: n for d, n in SMALL.items() if d != "heads"}, **KV},
}


def _a_layout(program: md.Program) -> dict[str, str]:
    """The first dim that can be split in two."""
    for value in program.named().inputs:
        for dim in value.type.dims:
            if dim.size % 2 == 0 and dim.name not in ("panels", "steps"):
                return {dim.name: "devices"}
    raise AssertionError(program)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert capsys.readouterr().out.strip()


def test_a_loaded_program_is_compiled_by_the_names_of_its_file() -> None:
    plan = md.load(EXAMPLES / "mlp.mdsl").compile("line", "megatron")
    assert plan.mesh == {"model": 4}
    assert plan.cost().by_kind == {"all_reduce": 196608.0}
    assert Path(plan.explain().json["file"]).name == "mlp.mdsl"
