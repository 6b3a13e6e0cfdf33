"""`state: memory = disk` and `host`: the same bits, the bytes predicted, the memory of torch."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.training_memory import allocated
from meshdsl.backends.engines.in_process import (
    Emitted,
    LocalSession,
    call_device,
    local_tensors,
    moved_away,
    run_local,
    whole_arrays,
)
from meshdsl.backends.engines.ranks import Ranks
from meshdsl.backends.runtime.disk import Disk
from meshdsl.backends.runtime.host import Host
from meshdsl.backends.runtime.offloading import Store, chunks
from meshdsl.backends.runtime.values import Array
from meshdsl.device import offloaded_updates
from meshdsl.diagnostics import DiagnosticError, Source
from meshdsl.pipeline import Compilation, Options, lower_placed
from meshdsl.placed.place import POLICIES
from meshdsl.report.explanation import explain
from meshdsl.report.explanation_document import explanation
from meshdsl.report.terminal import text as as_text
from tests.covering import in_turn
from tests.device.alone import first_device
from tests.ir.test_text import read_again, statements
from tests.pipelines.test_cuts import FOUR
from tests.pipelines.test_cuts import PROGRAMS as CUT
from tests.pipelines.test_recompute import WIDE as LAYERS
from tests.ranks import Forks

TEXT = """
dim b = 8, m = 6, o = m, h = 10, l = 4
program p(x[b, m], t[b, m]) {
  param first[m, o]: DTYPE
  param scale[m]: DTYPE = ones()
  x = tanh(einsum(x, cast(first, f32) -> [b, o])[o -> m] * cast(scale, f32))
  repeat l {
    param w[m, h]: DTYPE
    param v[h, o]: DTYPE
    x = x + einsum(tanh(einsum(x, cast(w, f32) -> [b, h])), cast(v, f32) -> [b, o])[o -> m]
  }
  loss = mean(square(x - t))
  return loss
  minimize loss with OPT
}
"""
DISK = "state: memory = disk"
HOST = "state: memory = host"

OPTIMIZERS = (
    "momentum(lr=0.1)",
    "momentum(lr=0.1, nesterov=true, weight_decay=0.1, clip=0.5)",
    "adam(lr=0.1)",
    "adam(lr=0.1, weight_decay=0.1, clip=0.5)",
    "adamw(lr=cosine(0.1, 10, warmup=2), clip=0.5)",
    "adamw(lr=0.1, accumulate=2)",
    'adamw(lr=0.1, accumulate=2, clip=0.5, compute="bf16")',
)
DTYPES = ("f32", "bf16", "f64")

LAYOUTS = {
    "one device": ("d:1", ""),
    "data": ("d:2", "b -> d"),
    "rows of states": ("d:2", "b -> d, state: m -> d"),
    "columns of states": ("d:2", "b -> d, state: h -> d, first: o -> none"),
    "uneven states": ("d:4", "b -> d, state: h -> d"),
    "states on some": ("d:4", "b -> d, state: m -> d"),
    "all split": ("d:2", "b -> d, params: h -> d, grads: h -> d, state: h -> d"),
    "layers of states": ("d:2", "b -> d, params: l -> d, state: l -> d"),
    "tensors": ("d:2,tp:2", "b -> d, h -> tp, state: m -> d"),
    "narrow sums": ("d:2", "b -> d, grads: reduce = bf16"),
    "finer gradients": ("d:2,tp:2", "b -> d, h -> tp, grads: h -> (tp, d)"),
    "gradients by another dim": ("d:2", "b -> d, grads: m -> d"),
}

PIPELINES = {
    "one after the other": ("pipe:2", "l -> pipe", "gpipe[b](4)"),
    "and data": ("d:2,pipe:2", "l -> pipe, b -> d, state: h -> d", "one_f_one_b[b](2)"),
    "interleaved": ("pipe:2", "l -> pipe", "interleaved[b](4)"),
    "in halves": ("pipe:2", "l -> pipe", "zb_v[b](2)"),
    "both ways": ("pipe:2", "l -> pipe", "chimera[b](4)"),
    "uneven": ("pipe:2", "l -> pipe", 'one_f_one_b[b](4, layers="3 1")'),
    "again": ("pipe:4", "l -> pipe", "zb_h1[b](4, recompute=stage)"),
}


def compiled(
    optimizer: str,
    dtype: str,
    mesh: str,
    rules: str,
    schedule: str = "",
    text: str = TEXT,
    policy: str = "deferred",
) -> Compilation:
    """A program under rules and a schedule."""
    text = text.replace("OPT", optimizer).replace("DTYPE", dtype)
    use = f" with {schedule}" if schedule else ""
    text += f"layout chosen {{ {rules} }}{use}\n"
    options = Options(mesh=mesh, layout="chosen", reduce=policy, cache=False)
    return Compilation(Source("disk.mdsl", text), options).checked()


def trained(
    made: Compilation, steps: int = 3, of_steps: list[Store] | None = None
) -> tuple[dict[str, Array], list[Store]]:
    """Parameters and states after some steps, whole, and what each device has elsewhere.

    `of_steps` takes what keeps activations elsewhere: one of each device and step.
    """
    session = LocalSession(Emitted(made.emitted).load())
    if of_steps is not None:
        _recorded(session.programs.program.device.__globals__, of_steps)
    program, mesh = session.programs.program, session.programs.mesh
    ranks = range(session.programs.devices)
    specs = {**program.PARAMS, **program.STATES}
    params, states = (
        local_tensors(mesh, table, {}, 5, ranks) for table in (program.PARAMS, program.STATES)
    )
    stores = moved_away({**program.PARAMS, **program.STATES}, params, states)
    for step in range(steps):
        inputs = local_tensors(mesh, program.INPUTS, {}, step, ranks)
        tables = list(zip(inputs, params, states, strict=True))

        def call(ranks: Ranks, tables: Any = tables) -> Any:
            return call_device(ranks, program, tables[ranks.rank])

        session.run(call)
    counted = [(each.read // steps, each.written // steps) for each in stores]
    held = [{**p, **s} for p, s in zip(params, states, strict=True)]
    arrays = whole_arrays(specs, mesh, held)
    for each, (read, written) in zip(stores, counted, strict=True):
        each.read, each.written = read, written
    return arrays, stores


def _recorded(module: dict[str, Any], made: list[Store]) -> None:
    """Let a program note each store that it makes."""

    def noted(kind: Any) -> Any:
        def make() -> Store:
            made.append(kind())
            return made[-1]

        return make

    module.update({name: noted(module[name]) for name in ("Host", "Disk") if name in module})


def check(
    optimizer: str, dtype: str, mesh: str, rules: str, schedule: str = "", **how: str
) -> None:
    """Compare a program with its states elsewhere and in memory: bits, bytes, texts."""
    kept, _ = trained(compiled(optimizer, dtype, mesh, rules, schedule, **how))
    where = "host" if sum(map(ord, f"{optimizer}{rules}")) % 4 == 0 else "disk"
    setting = f"state: memory = {where}"
    away_too = f"{rules}, {setting}" if rules else setting
    made = compiled(optimizer, dtype, mesh, away_too, schedule, **how)
    found, stores = trained(made)
    for name, array in kept.items():
        np.testing.assert_array_equal(found[name], array, name)
    report = explain(made.device)
    said = report["host"] if where == "host" else report["disk"]
    assert said["bytes"] == max(each.size for each in stores) > 0
    assert said["read"] == max(each.read for each in stores)
    assert said["written"] == max(each.written for each in stores)
    device = read_again("device", made.device)
    assert statements(device) == statements(made.device)
    assert statements(lower_placed(read_again("placed", made.placed))) == statements(made.device)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 16 numbers in f32, the fewest that vectors fill."""
    monkeypatch.setattr(offloaded_updates, "CHUNK", 64)


@pytest.mark.usefixtures("small")
@in_turn(layout=LAYOUTS, optimizer=OPTIMIZERS, dtype=DTYPES)
def test_the_numbers_are_the_same_bits(optimizer: str, dtype: str, layout: str) -> None:
    check(optimizer, dtype, *LAYOUTS[layout])


@pytest.mark.usefixtures("small")
@in_turn(pipeline=PIPELINES, optimizer=OPTIMIZERS, dtype=DTYPES)
def test_pipelines_have_the_same_bits(optimizer: str, dtype: str, pipeline: str) -> None:
    if "accumulate" in optimizer:
        optimizer = re.sub(r", accumulate=\d", "", optimizer)
    check(optimizer, dtype, *PIPELINES[pipeline])


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("optimizer", OPTIMIZERS[1:4:2])
def test_networks_that_are_cut_have_the_same_bits(optimizer: str) -> None:
    rules, schedule = FOUR, "one_f_one_b[b](4)"
    check(optimizer, "f32", "pipe:4", rules, schedule, text=CUT["residual"])


@pytest.mark.usefixtures("small")
@in_turn(policy=POLICIES, dtype=DTYPES)
def test_every_policy_has_the_same_bits(policy: str, dtype: str) -> None:
    check(OPTIMIZERS[4], dtype, *LAYOUTS["columns of states"], policy=policy)


@pytest.mark.usefixtures("small")
def test_masters_of_plain_descent() -> None:
    """Without states of its own, the copies in f32 of narrow parameters lie on disk."""
    check("sgd(lr=0.1, clip=0.5)", "bf16", *LAYOUTS["rows of states"])


# --- large tensors -------------------------------------------------------------------------------

LARGE = """
dim b = 4, m = 301, o = m, h = 523
program p(x[b, m], t[b, m]) {
  param w[m, h]: DTYPE
  param v[h, o]: DTYPE
  param u[h]: DTYPE
  y = tanh(einsum(x, cast(w, f32) -> [b, h]) + cast(u, f32))
  loss = mean(square(einsum(y, cast(v, f32) -> [b, o])[o -> m] - t))
  return loss
  minimize loss with OPT
}
"""
SPLIT = {"one device": LAYOUTS["one device"]}
SPLIT["rows"] = ("d:2", "b -> d, state: h -> d, params: h -> d")
SPLIT["columns"] = ("d:2", "b -> d, w: h -> none, state: h -> d")


@in_turn(optimizer=[OPTIMIZERS[1], *OPTIMIZERS[3:5]], split=SPLIT, dtype=("bf16", "f32"))
def test_large_tensors_have_the_same_bits(
    optimizer: str, dtype: str, split: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the threads of a kernel nor the ends of its vectors round otherwise in a chunk."""
    monkeypatch.setattr(offloaded_updates, "CHUNK", 1 << 16)
    check(optimizer, dtype, *SPLIT[split], text=LARGE)


# --- memory --------------------------------------------------------------------------------------

WIDE = LARGE.replace("301", "512").replace("523", "2048")
CLOSE = 0.05


MEASURED = [
    (OPTIMIZERS[0], "f32", "one device"),
    (OPTIMIZERS[0], "bf16", "rows"),
    (OPTIMIZERS[1], "f32", "columns"),
    (OPTIMIZERS[3], "f32", "rows"),
    (OPTIMIZERS[3], "bf16", "one device"),
    (OPTIMIZERS[4], "bf16", "columns"),
    ("adam(lr=0.1, weight_decay=0.1)", "bf16", "rows"),
]


@in_turn(case=MEASURED, chunk=(1 << 18, 1 << 22))
def test_the_memory_that_is_reported_is_what_torch_allocates(
    case: tuple[str, str, str], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer, dtype, layout = case
    monkeypatch.setattr(offloaded_updates, "CHUNK", chunk)
    mesh, rules = SPLIT[layout]
    made = compiled(optimizer, dtype, mesh, f"{rules}, {DISK}" if rules else DISK, text=WIDE)
    report = explain(made.device)["memory"]
    held, run = first_device(made)
    assert held == report["params"] + report["state"] + report["inputs"]
    assert report["state"] == 4  # the counter of steps
    assert held + allocated(run) == pytest.approx(report["peak"], rel=CLOSE)


STAGES = LAYERS.replace("sgd(lr=0.1)", "OPT")


@pytest.mark.parametrize(
    "schedule", ["gpipe[b](8)", "interleaved[b](8)", 'one_f_one_b[b](8, layers="5 3")']
)
def test_the_memory_of_stages_is_what_torch_allocates(schedule: str) -> None:
    made = compiled(OPTIMIZERS[4], "f32", "pipe:2", f"l -> pipe, {DISK}", schedule, text=STAGES)
    peak, *_ = explain(made.device)["pipeline"]["peak"]
    held, run = first_device(made)
    assert held + allocated(run) == pytest.approx(peak, rel=CLOSE)


def test_memory_falls_by_the_states_and_rises_by_a_chunk_of_each() -> None:
    found = []
    for rules in ("", DISK):
        made = compiled("adam(lr=0.1)", "f32", "d:1", rules, text=WIDE)
        held, run = first_device(made)
        found.append((explain(made.device), held + allocated(run)))
    (kept, before), (less, after) = found
    states = 2 * 4 * (512 * 2048 * 2 + 2048)
    moved = {"bytes": states, "read": states, "written": states, "chunk": 1 << 22}
    assert less["disk"] == {**moved, "params": 0, "activations": 0, "transfers": []}
    assert kept["memory"]["state"] - less["memory"]["state"] == states
    assert states - 2 * (1 << 22) <= before - after <= states


# --- files ---------------------------------------------------------------------------------------


def test_pieces_are_all_elements_in_their_order() -> None:
    """Of whatever lies in memory as it may; what is written to a piece of the first is in it."""
    whole = torch.arange(2 * 3 * 5 * 7.0).view(2, 3, 5, 7)
    views = [whole, whole.permute(3, 1, 0, 2), whole[:, 1:2], whole[..., ::2], whole[:, :, 1:1]]
    views += [torch.ones(3, 1).expand(3, 4), torch.tensor(2.0), torch.tensor([1.0])]
    cases = itertools.product(views, (False, True), (1, 4, 16, 1000), (Disk, Host))
    for view, other, most, kind in cases:
        base = view.contiguous() if other else view
        store = kind()
        state, kept = store.keep(view), base.clone()
        before = [view.clone().reshape(-1), base.clone().reshape(-1)]
        target = base.clone(memory_format=torch.preserve_format)
        for mine, its, own in chunks([target, view], [state], 4 * most):
            assert own.numel() <= most
            assert torch.equal(its, own)
            mine.add_(1)
            own.mul_(2)
        assert torch.equal(target, kept + 1)
        assert torch.equal(state.cpu().reshape(-1), 2 * before[0])


def test_nothing_lies_in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    file = Disk()
    state = file.keep(torch.ones(1000))
    assert file.folder == str(tmp_path)
    assert not list(tmp_path.iterdir())
    assert os.fstat(file.file.fileno()).st_size == 4000
    assert torch.equal(state.cpu(), torch.ones(1000))
    file_descriptor = file.file.fileno()
    del file, state
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file_descriptor)


@in_turn(
    optimizer=[OPTIMIZERS[1], OPTIMIZERS[4]],
    where=[(*LAYOUTS["uneven states"], ""), PIPELINES["and data"]],
)
def test_processes_have_the_same_bits(
    optimizer: str, where: tuple[str, str, str], forks: Forks, tmp_path: Path
) -> None:
    mesh, rules, schedule = where
    kept = compiled(optimizer, "bf16", mesh, rules, schedule)
    made = compiled(optimizer, "bf16", mesh, f"{rules}, {DISK}", schedule)
    (tmp_path / "prog.py").write_text(made.text, encoding="utf-8")
    folder, log = tmp_path / "scratch", tmp_path / "log"
    folder.mkdir()
    command = ["prog.py", "--seed", "2", "--out", "out.npz", "--updated", "updated.npz"]
    scratch = {"TMPDIR": str(folder)}
    with forks.ranks(made.device.mesh.devices, command, tmp_path, log, **scratch) as leader:
        assert leader.wait() == 0, log.read_text(encoding="utf-8")
    assert not list(folder.iterdir())
    (tmp_path / "disk_cache.py").write_text(kept.text, encoding="utf-8")
    command = ["disk_cache.py", "--seed", "2", "--out", "kept_out.npz", "--updated", "kept.npz"]
    with forks.ranks(made.device.mesh.devices, command, tmp_path, log) as leader:
        assert leader.wait() == 0, log.read_text(encoding="utf-8")
    with np.load(tmp_path / "updated.npz") as one, np.load(tmp_path / "kept.npz") as other:
        assert set(one) == set(other)
        for name in one:
            np.testing.assert_array_equal(one[name], other[name], name)


def test_a_program_that_cannot_write_says_so(forks: Forks, tmp_path: Path) -> None:
    made = compiled(OPTIMIZERS[0], "f32", "d:1", DISK)
    (tmp_path / "prog.py").write_text(made.text, encoding="utf-8")
    log = tmp_path / "log"
    with forks.ranks(1, ["prog.py"], tmp_path, log, TMPDIR="/nowhere at all") as leader:
        assert leader.wait() == 2
    said = log.read_text(encoding="utf-8")
    assert "error: [Errno 2] No such file or directory: '/nowhere at all" in said
    assert "Traceback" not in said


# --- what is said --------------------------------------------------------------------------------


def test_the_report_says_what_is_on_disk() -> None:
    made = compiled("adam(lr=0.1)", "f32", "d:2", f"b -> d, {DISK}")
    report = explain(made.device)
    text = as_text(explanation(report, {"disk.mdsl": made.source}))
    assert "On disk per device: 4.08 KiB of states" in text
    assert "disk" not in explain(compiled("adam(lr=0.1)", "f32", "d:2", "b -> d").device)


def test_the_report_says_what_is_on_the_host() -> None:
    kept = explain(compiled("adam(lr=0.1)", "f32", "d:2", f"b -> d, {DISK}").device)
    made = compiled("adam(lr=0.1)", "f32", "d:2", f"b -> d, {HOST}")
    report = explain(made.device)
    text = as_text(explanation(report, {"disk.mdsl": made.source}))
    assert "In host memory per device: 4.08 KiB of states" in text
    assert report["host"] == kept["disk"]
    assert report["memory"] == kept["memory"]


REFUSED = {
    "sgd(lr=0.1)": "the optimizer keeps no state of a parameter",
    "adafactor(lr=0.1)": "the update reads all of `first.row` at once",
    "adam(lr=0.1, compress=powersgd(2))": "the update reads all of `first.error` at once",
}


@pytest.mark.parametrize("optimizer", REFUSED)
def test_what_cannot_be_taken_in_chunks_is_refused(optimizer: str) -> None:
    with pytest.raises(DiagnosticError) as caught:
        compiled(optimizer, "f32", "d:2", f"b -> d, {DISK}")
    (found,) = caught.value.diagnostics
    assert found.code == "MD0317"
    assert REFUSED[optimizer] in found.message


def test_what_is_only_evaluated_has_no_states() -> None:
    made = compiled("sgd(lr=0.1)", "bf16", "d:2", f"b -> d, {DISK}")
    assert not made.forward.device.states
    assert made.forward.text
    assert run_local(made.text).away == ((made.report["disk"]["read"],) * 2,) * 2
