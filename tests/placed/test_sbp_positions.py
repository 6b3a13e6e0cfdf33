"""`sbp` blocks on programs whose tensors gain and lose dims: loops, steps of several batches.

`MESHDSL_CASES=5000` tries that many blocks instead of 16, and new ones each time.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest

from meshdsl.backends.engines.reference import reference_step
from meshdsl.diagnostics import DiagnosticError, Diagnostics, Source
from meshdsl.pipeline import Compilation, Options, compile_source
from meshdsl.placed.place import POLICIES
from tests.programs.harness import check_bytes
from tests.training.stepping import hold_to, on_devices, values

TEXT = """
dim batch = 4, io = 8, mid = 6, layers = 2, out = 4
mesh two = {{ d: 2 }}
mesh grid = {{ d: 2, e: 2 }}
layout rows {{ batch -> d }}
sbp given {{ {sbp} }}

program p(x[batch, io], z[layers, batch], t[batch, out]) {{
  param a[io, out]
  h = x
  k = z * 2.0
  repeat layers {{
    param w[io, mid]
    param u[mid, io]
    {body}
  }}
  y = einsum(h, a -> [batch, out])
  loss = mean((y - t)^2)
  return loss, y, k
  {end}
}}
"""
PLAIN = "h = h + tanh(einsum(einsum(h, w -> [batch, mid]), u -> [batch, io])) + z"
BODIES = (
    PLAIN,
    f"{PLAIN} + k",
    "recompute {\n g = tanh(einsum(einsum(h, w -> [batch, mid]), u -> [batch, io])) + k\n"
    " h = h + g\n }",
)
STEPS = ("minimize loss with sgd(lr=0.1)", "minimize loss with adam(lr=0.1, eps=1.0, accumulate=3)")
ENDS = ("", *STEPS, "minimize loss with sgd(lr=0.1, accumulate=2, clip=1.0)")
NAMES = {"x": 2, "z": 2, "t": 2, "a": 2, "w": 2, "u": 2, "h": 2, "k": 2, "y": 2, "loss": 0, "g": 2}
"""The number of declared dims of each."""

CASES = int(os.environ.get("MESHDSL_CASES", "16"))
SHARDS = 4
REFUSED = ("MD0301", "MD0309")
"""It does not divide, or the operator has no such row."""


def made(text: str, mesh: str = "two", reduce: str = "deferred", **options: str) -> Compilation:
    chosen = Options(mesh=mesh, reduce=reduce, dtype="f64", **options)  # type: ignore[arg-type]
    return compile_source(Source("case.mdsl", text), chosen, Diagnostics())


def hold(text: str, mesh: str, reduce: str) -> None:
    """The program under its block computes, and sends, what it should."""
    found = made(text, mesh, reduce, sbp="given")
    named = found.named
    inputs, params = values(named)
    step = on_devices(found.emitted, inputs, params)
    check_bytes(found.report, step.run)
    hold_to(step, *reference_step(named, inputs, params, {}), 1e-9)


# --- what a position means --------------------------------------------------------------------

BY_NAME = {
    "x: (S(0)), z: (S(1)), t: (S(0))": "x: batch -> d, z: batch -> d, t: batch -> d",
    "x: (S(1)), a: (S(0)), w: (S(0))": "x: io -> d, a: io -> d, w: io -> d",
    "w: (S(1)), u: (S(0)), a: (S(1))": "w: mid -> d, u: mid -> d, a: out -> d",
}


@pytest.mark.parametrize("sbp", BY_NAME)
@pytest.mark.parametrize("end", ["", *STEPS])
def test_a_position_is_that_of_a_dim_as_it_is_declared(sbp: str, end: str) -> None:
    """Neither a loop nor a second batch shifts it: by name the same tensors lie the same."""
    text = TEXT.format(sbp=sbp, body=PLAIN, end=end) + f"layout named {{ {BY_NAME[sbp]} }}\n"
    wanted = made(text, layout="named").device
    found = made(text, sbp="given").device
    for one, other in zip(found.inputs, wanted.inputs, strict=True):
        assert one.local == other.local, one.name
    for one, other in zip(found.params, wanted.params, strict=True):
        assert one.local == other.local, one.name


@pytest.mark.parametrize("end", ENDS)
def test_a_position_is_there_or_not_whatever_is_made_of_the_program(end: str) -> None:
    text = TEXT.format(sbp="x: (S(2))", body=PLAIN, end=end)
    with pytest.raises(DiagnosticError) as caught:
        made(text, sbp="given")
    (found,) = caught.value.diagnostics
    assert (found.code, found.help) == ("MD0308", "write `S(1)`; S(0) is `batch`, S(1) is `io`")
    assert found.related[0].message == "it is f64[batch, io]"


@pytest.mark.parametrize("reduce", POLICIES)
@pytest.mark.parametrize("sbp", ["z: (S(0))", "k: (S(0))", "z: (S(0)), k: (S(0)), h: (S(0))"])
@pytest.mark.parametrize("end", ["", *STEPS])
def test_a_stack_that_is_split_along_its_loop_is_gathered(sbp: str, end: str, reduce: str) -> None:
    text = TEXT.format(sbp=sbp, body=BODIES[1], end=end)
    hold(text, "two", reduce)
    found = made(text, reduce=reduce, sbp="given").placed
    assert found.plan is None or not found.plan.proven, "only one way was considered"


# --- random blocks ----------------------------------------------------------------------------


def blocks(rng: random.Random, axes: int) -> str:
    """A few tensors, each with a component per mesh axis."""
    names = rng.sample(sorted(NAMES), rng.randint(1, 4))
    return ", ".join(f"{name}: ({', '.join(components(rng, NAMES[name], axes))})" for name in names)


def components(rng: random.Random, dims: int, axes: int) -> Iterator[str]:
    splits = [f"S({i})" for i in range(dims)] * 3
    partial = rng.choice(["P", "P(max)"])
    yield from (rng.choice(["B", partial, *splits]) for _ in range(axes))


@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_blocks_compute_the_same_or_are_refused(shard: int) -> None:
    rng = random.Random(None if "MESHDSL_CASES" in os.environ else shard)
    ran = 0
    for _ in range(CASES // SHARDS):
        mesh, axes = rng.choice([("two", 1), ("two", 1), ("grid", 2)])
        text = TEXT.format(sbp=blocks(rng, axes), body=rng.choice(BODIES), end=rng.choice(ENDS))
        reduce = rng.choice(POLICIES)
        if (code := refused(text, mesh, reduce)) is not None:
            assert code in REFUSED, f"{code} --mesh {mesh} --reduce {reduce}\n{text}"
            continue
        try:
            hold(text, mesh, reduce)
        except Exception as error:
            raise AssertionError(f"--mesh {mesh} --reduce {reduce}\n{text}") from error
        ran += 1
    assert ran > CASES // SHARDS // 2


def refused(text: str, mesh: str, reduce: str) -> str | None:
    """The code with which a program is refused."""
    try:
        made(text, mesh, reduce, sbp="given")
    except DiagnosticError as error:
        return error.diagnostics[0].code
    return None
