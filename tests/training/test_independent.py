"""Random programs under random layouts and `sbp` blocks: the numbers that torch finds without them.

`MESHDSL_CASES=5000` runs that many instead of 24, and new ones each time.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from meshdsl.backends.draws import draws
from meshdsl.backends.engines.reference import whole_specs
from meshdsl.backends.runtime.values import Spec
from meshdsl.diagnostics import DiagnosticError, Diagnostics, Source
from meshdsl.pipeline import Options, compile_source
from meshdsl.placed.reshard import MESSAGE_BYTES
from tests.programs.harness import REFUSALS
from tests.training.independent import answer, random_program
from tests.training.independent_writer import Program
from tests.training.named_torch import Corner, Named, aligned
from tests.training.stepping import Arrays, Compiled

SHARDS = 4
CASES = int(os.environ.get("MESHDSL_CASES", "24")) // SHARDS
FIRST = time.time_ns() % 10**9 if "MESHDSL_CASES" in os.environ else 0
STEPS = 2
MOST = 1e-9
"""max|Δ| / max|ref| in f64."""
LEAST = 1e-12
"""Differences below this are rounding, also where the answer is 0."""

EACH = {is_each: f"each={str(is_each).lower()}" for is_each in (False, True)}
"""The option of an optimizer by which the batches of a step are separate."""


def made(program: Program) -> Compiled:
    """The program under its layout, policy and mesh."""
    block = f"{'sbp' if program.sbp else 'layout'} chosen {program.rules}\n"
    bytes_ = MESSAGE_BYTES if program.message_bytes is None else program.message_bytes
    options = Options(
        mesh=program.mesh,
        layout=None if program.sbp else "chosen",
        sbp="chosen" if program.sbp else None,
        reduce=program.policy,
        message_bytes=bytes_,
        cache=False,
        dtype="f64",
    )
    source = Source("case.mdsl", program.text + block)
    found = compile_source(source, options, Diagnostics())
    return Compiled(found.named, found.emitted, found.report)


def array(x: Named, spec: Spec, batches: int) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    """`x` as the compiled program wants it: as many batches as it reads, dims in its order."""
    if "accumulate" in x.dims and batches:
        at = x.at("accumulate")
        if "accumulate" in spec.dims:
            x = Named(x.data.narrow(at, 0, batches), x.dims)
        else:
            x = Named(x.data.select(at, 0), x.without("accumulate"))
    assert x.sizes == dict(spec.dims), f"{x.sizes} where {dict(spec.dims)} was compiled"
    return aligned(x, tuple(spec.dims)).detach().numpy()


def wrong(found: Arrays, expected: dict[str, Named], specs: dict[str, Spec]) -> dict[str, float]:
    """The tensors that differ, and by how much of their largest number."""
    off = {}
    for name, x in expected.items():
        right = array(x, specs[name], 0)
        error = float(np.max(np.abs(found[name] - right), initial=0.0))
        largest = float(np.max(np.abs(right), initial=0.0))
        if not error <= MOST * largest + LEAST:
            off[name] = error / max(largest, LEAST)
    return off


def differences(program: Program, compiled: Compiled) -> dict[str, float]:
    """The differences of a step on every device from torch."""
    expected = answer(program, steps=STEPS)
    inputs, params = whole_specs(compiled.named, draws(compiled.named))
    given = {n: array(program.inputs[n], s, program.accumulate) for n, s in inputs.items()}
    kept = {n: array(program.params[n], s, 0) for n, s in params.items()}
    for _ in range(STEPS):
        step = compiled.step(given, kept)
        kept = step.run.updated
    for name in program.outputs:
        if name in program.stated:
            dims = tuple(d for d in step.run.specs[name].dims if d != "accumulate")
            assert dims == program.stated[name], f"{name} is stated as {program.stated[name]}"
    off = wrong(step.run.outputs, expected.outputs, step.run.specs)
    off |= wrong(step.run.updated, expected.updated | expected.states, step.specs)
    return off


def jumps(program: Program) -> bool:
    """Whether torch's own answer changes much when the numbers change a little."""
    before, after = (answer(program, noise, STEPS) for noise in (0.0, 1e-13))
    for a, b in ((before.outputs, after.outputs), (before.updated, after.updated)):
        for name, x in a.items():
            largest = float(x.data.abs().max())
            if float((x.data - b[name].data).abs().max()) > MOST / 10 * largest + LEAST / 10:
                return True
    return False


def separate(program: Program) -> Program:
    """The program whose batches are separate, as those of torch's loop are."""
    return replace(program, text=program.text.replace(EACH[False], EACH[True]))


def check(program: Program) -> str:
    """The outcome: `ran`, or why not. Raises AssertionError where numbers are wrong."""
    try:
        answer(program, steps=STEPS)
    except Corner:
        return "corner"
    try:
        compiled = made(program)
    except DiagnosticError as error:
        code = error.diagnostics[0].code
        if code == "MD0297" and EACH[False] in program.text:
            return check(separate(program))
        if code not in (*REFUSALS, "MD0309"):
            raise
        return code
    off = differences(program, compiled)
    if off and jumps(program):
        return "jumps"
    if off and EACH[False] in program.text:
        # Numbers of the whole step, which torch's loop over batches has not: `each=true` has none.
        each = separate(program)
        off, outcome = differences(each, made(each)), "of the step"
    else:
        outcome = "ran"
    assert not off, off
    return outcome


def shown(program: Program) -> str:
    kind = "sbp" if program.sbp else "layout"
    return (
        f"{program.text}{kind} chosen {program.rules}\n# mesh: {program.mesh}\n"
        f"# reduce: {program.policy}, message bytes: {program.message_bytes}\n"
    )


@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_steps_are_those_of_torch(shard: int) -> None:
    torch.set_num_threads(1)
    found: Counter[str] = Counter()
    for index in range(CASES):
        seed = FIRST + shard * CASES + index
        program = random_program(seed)
        try:
            found[check(program)] += 1
        except Exception as error:
            error.add_note(f"seed {seed}\n{shown(program)}")
            raise
    assert found["ran"] > CASES // 2, found
