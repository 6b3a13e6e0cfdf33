"""The DTensor and the JAX rendering, executed: the reference's values, and our local shapes.

All cases of one peer run in one start, since a start takes seconds. Every example runs under every
layout and `sbp` block it declares, and some random programs besides.
"""

from __future__ import annotations

import itertools
import math
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from meshdsl.backends.engines.against_reference import errors
from meshdsl.backends.peers.dtensor import REDUCE_OPS, DTensorText
from meshdsl.backends.peers.jax import JaxText
from meshdsl.backends.peers.notation import entries
from meshdsl.backends.peers.operator_tables import spelling
from meshdsl.backends.peers.peer import Peer
from meshdsl.backends.peers.renderings import render
from meshdsl.device.ir import Move, walk
from meshdsl.diagnostics import DiagnosticError
from meshdsl.ir.types import TensorType
from meshdsl.placed.placements import Placement
from tests.programs.harness import Case as RandomCase
from tests.programs.harness import compiled, values_of
from tests.programs.strategy import cases as random_cases
from tests.ranks import Forks
from tests.renderings import gradients, operators
from tests.renderings.examples import accepted, cases, values

HERE = Path(__file__).parent
RANKS = HERE / "dtensor_ranks.py"
TOLERANCE = 1e-5
ALL = "MESHDSL_CASES" in os.environ
RANDOM = 120 if ALL else 30
"""The number of random programs drawn; those on as many devices as a test has are run."""

LONG = 6_000
"""Characters of a rendering that takes a peer seconds: every sixth of these is run, or all."""


@dataclass(frozen=True, slots=True)
class Job:
    """One program as a rendering, with the values it is to give."""

    name: str
    peer: Peer
    text: str
    mesh: str
    inputs: dict[str, Any]
    params: dict[str, Any]
    reference: dict[str, Any]

    @property
    def message(self) -> dict[str, Any]:
        """The message to the process that runs it."""
        keys = ("text", "mesh", "inputs", "params")
        return {key: getattr(self, key) for key in keys}


def jobs(kind: type[Peer], devices: int, reduce: str, step: int = 1) -> list[Job]:
    """Every example, or every so many-th, and random programs."""
    found = [*example_jobs(kind, devices, reduce, step)]
    for number, case_ in enumerate(drawn(devices, max(1, step // 4))):
        peer = kind(compiled(case_).placed)
        if is_refused(peer):
            continue
        (inputs, params), reference = values_of(case_)
        text = peer.text()
        name = f"random program {number}\n{case_.source_text}"
        found.append(Job(name, peer, text, case_.mesh, inputs, params, reference))
    found += gradient_jobs(kind, devices, reduce, step)
    found.append(operators_of_long(kind, devices, reduce))
    return found + list(operator_jobs(kind, devices, reduce, step))


def example_jobs(kind: type[Peer], devices: int, reduce: str, step: int) -> Iterator[Job]:
    """Examples; of those with a long rendering JAX runs others than DTensor."""
    long = itertools.count(2 if kind is JaxText else 0)
    for case, made in accepted(list(cases(devices, reduce))[::step]):
        peer = kind(made.placed)
        if is_refused(peer):
            continue
        text = peer.text()
        if ALL or len(text) < LONG or next(long) % 6 == 0:
            yield Job(case.name, peer, text, case.mesh, *values(made.named))


def is_refused(peer: Peer) -> bool:
    """Whether `render` refuses a program: a pipeline, and as JAX a dim that does not divide."""
    try:
        render(peer.source, peer.notation)
    except DiagnosticError as error:
        (found,) = error.diagnostics
        assert peer.source.pipe or (peer.notation, found.code) == ("jax", "MD0311"), found
        return True
    return False


def gradient_jobs(kind: type[Peer], devices: int, reduce: str, step: int) -> Iterator[Job]:
    """Programs that take gradients; those aside that the peer says it cannot write."""
    mesh = gradients.MESHES[devices]
    every = itertools.product(gradients.texts(), gradients.LAYOUTS)
    for (name, text), layout in itertools.islice(every, 0, None, step):
        made = gradients.compiled(text, layout, mesh, reduce)
        if kind is JaxText and name != "loop" and not spelling(name, "jax").text:
            continue
        peer = kind(made.placed)
        rendered = peer.text()
        yield Job(f"{name}, {layout}", peer, rendered, mesh, *values(made.named))


OF_LONG = """
dim a = 4, d = 8, two = 2 * d, half = d / 2
layout rows { a -> p }
program test(x[a, d], y[a, d], z[a, d], ids[a]: i32) {
  angles = sin(x) + cos(-y)
  powers = square(x)^1.5 + rsqrt(mean[d](square(y)) + 0.1)
  bounds = minimum(maximum(x, y), z) + silu(z)
  chosen = where(x > y and x != z, x, cumsum[d](y))
  joined = concat[(d, d) -> two](x, y)
  part = z[d = :half -> half]
  losses = cross_entropy[d](x, ids)
  return angles, powers, bounds, chosen, joined, part, losses
}
"""
"""The operators that of all examples only some with a long rendering have."""


def operators_of_long(kind: type[Peer], devices: int, reduce: str) -> Job:
    """A short program of them."""
    mesh = f"p:2,q:{devices // 2}"
    made = gradients.compiled(OF_LONG, "rows", mesh, reduce)
    peer = kind(made.placed)
    return Job("operators of long renderings", peer, peer.text(), mesh, *values(made.named))


def operator_jobs(kind: type[Peer], devices: int, reduce: str, step: int) -> Iterator[Job]:
    """Calls that no example has; which of them a system refuses is tested in `test_texts.py`."""
    for name, made, mesh in operators.cases(devices, reduce, step):
        peer = kind(made.placed)
        with suppress(DiagnosticError):
            text = peer.text()
            yield Job(name, peer, text, mesh, *values(made.named))


def drawn(devices: int, step: int) -> list[RandomCase]:
    """Every so many-th of the random programs on so many devices, where it is accepted."""
    every: list[RandomCase] = []
    draw = given(case=random_cases())(lambda case: every.append(case))
    phases, checks = [Phase.generate], list(HealthCheck)
    draw = settings(max_examples=RANDOM, phases=phases, suppress_health_check=checks)(draw)
    seed(devices)(draw)()
    fitting = [case for case in every if _devices(case.mesh) == devices]
    return [case for case in fitting[::step] if _is_accepted(case)]


def _devices(mesh: str) -> int:
    return math.prod(int(part.partition(":")[2]) for part in mesh.split(","))


def _is_accepted(case: RandomCase) -> bool:
    try:
        compiled(case)
    except DiagnosticError:
        return False
    return True


def written(found: list[Job], folder: Path) -> Path:
    """The file of all jobs, for the process that runs them in one start."""
    path = folder / "cases"
    path.write_bytes(pickle.dumps([job.message for job in found]))
    return path


def read(results_path: Path, found: list[Job]) -> list[dict[str, Any]]:
    """The results of all jobs, from the file that the process has written."""
    results: list[dict[str, Any]] = pickle.loads(results_path.read_bytes())
    assert len(results) == len(found)
    return results


def run_jax(found: list[Job], folder: Path) -> list[dict[str, Any]]:
    """The results of all jobs on four devices of JAX."""
    path, results_path = written(found, folder), folder / "results"
    env = os.environ | {"OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    env["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    command = [sys.executable, str(HERE / "jax_devices.py"), str(path), str(results_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return read(results_path, found)


def problems(job: Job, result: dict[str, Any]) -> Iterator[str]:
    """The problems with the result of one job."""
    if "error" in result:
        yield result["error"]
        return
    for name, expected in job.reference.items():
        error = errors(result["outputs"][name], expected)
        if min(error) > TOLERANCE:
            yield f"{name} is off by {error}"
    missing = set(job.peer.held_by_name) - set(result["held"])
    if missing:
        yield f"not seen: {missing}"
    for name, (shown, shape) in result["held"].items():
        if name in job.peer.held_by_name:
            yield from held_problems(job, name, shown, shape)


def held_problems(job: Job, name: str, shown: str, shape: tuple[int, ...]) -> Iterator[str]:
    """A variable has the rendering's placement, which is ours unless its line is marked."""
    type_, held, _ = job.peer.held_by_name[name]
    if held.local(type_, job.peer.mesh).shape != shape:
        yield f"{name} is {shape} on a device, not {held.show(type_)}"
    said = PRINTED[type(job.peer)](type_, held, job.peer)
    if said != shown:
        yield f"{name} is {shown}, not {said}"


def dtensor_prints(type_: TensorType, p: Placement, peer: Peer) -> str:
    """`[Shard(dim=0), Partial(sum)]`."""
    words = []
    for entry in entries(type_, peer.mesh, p):
        if entry.position is not None:
            words.append(f"Shard(dim={entry.position})")
        else:
            words.append(f"Partial({REDUCE_OPS[entry.op]})" if entry.op else "Replicate()")
    return f"[{', '.join(words)}]"


def jax_prints(type_: TensorType, p: Placement, peer: Peer) -> str:
    """`float32[8@rows,4]{U:cols}`."""
    dims = ",".join(f"{d.size}{_axes('@', p.axes_of(d.name))}" for d in type_.dims)
    unreduced = f"{{{_axes('U:', p.partial)}}}" if p.partial else ""
    return f"{type_.dtype.torch.removeprefix('torch.')}[{dims}]{unreduced}"


def _axes(sign: str, axes: tuple[str, ...]) -> str:
    if not axes:
        return ""
    return sign + (axes[0] if len(axes) == 1 else f"({','.join(axes)})")


PRINTED = {DTensorText: dtensor_prints, JaxText: jax_prints}
"""The system's own text of the placement of a tensor."""


def check(found: list[Job], results: list[dict[str, Any]]) -> None:
    """Check everything of every job."""
    wrong = [
        f"{job.name}\n{problem}\n{job.text}"
        for job, result in zip(found, results, strict=True)
        for problem in problems(job, result)
    ]
    assert not wrong, f"{len(wrong)} problems\n" + "\n\n".join(wrong[:3])


def marked(job: Job) -> list[str]:
    """The variables whose placement differs from ours."""
    return [n for n, (_, held, ours) in job.peer.held_by_name.items() if held != ours]


def reshards(job: Job) -> int:
    """The number of collectives of a rendering, one per axis, all iterations counted."""
    steps = ((n.step, k) for n, k in walk(job.peer.program.body) if isinstance(n, Move))
    return sum(k * len(step.axes) for step, k in steps if step.moves)


SOME = [(2, "immediate", 17), (4, "deferred", 29)]
"""Devices, a policy, and every how many-th program is run: with MESHDSL_CASES all are."""


@pytest.mark.parametrize(("ranks", "reduce", "step"), SOME)
def test_dtensor_on_gloo_ranks(
    ranks: int, reduce: str, step: int, tmp_path: Path, forks: Forks
) -> None:
    found = jobs(DTensorText, ranks, reduce, 1 if ALL else step)
    sent, results_path = written(found, tmp_path), tmp_path / "results"
    forks.run_script(str(RANKS), ranks, sent, results_path, log=tmp_path / "log")
    results = read(results_path, found)
    check(found, results)
    as_ours = [(j, r) for j, r in zip(found, results, strict=True) if not marked(j)]
    assert len(as_ours) > len(found) / 2
    silent = [j.name for j, r in as_ours if r["collectives"] > reshards(j)]
    assert not silent, f"DTensor communicates where the rendering does not say so: {silent}"


def test_jax_on_four_devices(tmp_path: Path) -> None:
    found = jobs(JaxText, 4, "deferred", 1 if ALL else 29)
    check(found, run_jax(found, tmp_path))
    assert sum(not marked(job) for job in found) > len(found) / 2
