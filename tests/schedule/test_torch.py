"""Our orders beside those of torch.distributed.pipelining, and its CSV in both directions."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as theirs

from meshdsl.diagnostics import DiagnosticError
from meshdsl.schedule.csv_files import read, written_for_torch
from meshdsl.schedule.registry import generate, schedules
from meshdsl.schedule.table import ScheduleTable, parse_action
from meshdsl.schedule.verification import verify
from meshdsl.syntax.parse import read_source

MULTI: dict[str, tuple[Any, int]] = {
    "interleaved": (theirs.ScheduleInterleaved1F1B, 2),
    "zb_h1": (theirs.ScheduleInterleavedZeroBubble, 1),
    "breadth_first": (theirs.ScheduleLoopedBFS, 2),
    "zb_v": (theirs.ScheduleZBVZeroBubble, 2),
    "dualpipe_v": (theirs.ScheduleDualPipeV, 2),
}
"""The classes of torch with the order of each schedule, and the stages of a device."""

SINGLE = {"gpipe": theirs.ScheduleGPipe}
"""The table of torch's 1F1B is for display, and begins the last stage with micro-batch 1."""

SIZES = [(d, n) for d in (1, 2, 3, 4, 8) for n in (1, 3, 4, 6, 8, 9, 16, 24)]


def order_of_torch(name: str, devices: int, micro: int) -> list[list[Any]]:
    """The actions of every device, without those of no action."""
    if name in SINGLE:
        about = SimpleNamespace(_num_stages=devices, _n_microbatches=micro)
        found = SINGLE[name]._get_pipeline_order(about)  # type: ignore[arg-type]
        assert found is not None
        return [[a for a in found[rank] if a is not None] for rank in range(devices)]
    made, chunks = MULTI[name]
    rounds = max(1, micro // devices)
    about = SimpleNamespace(
        pp_group_size=devices,
        n_local_stages=chunks,
        num_stages=chunks * devices,
        number_of_rounds=rounds,
        microbatches_per_round=micro // rounds,
        _n_microbatches=micro,
        _stages=[None] * chunks,
    )
    rows = [made._calculate_single_rank_operations(about, rank) for rank in range(devices)]
    return [[a for a in row if a is not None] for row in rows]


def words_of(row: list[Any]) -> list[str]:
    """The actions of a row as text; what torch overlaps one by one, without reductions."""
    single = (part for action in row for part in (action.sub_actions or (action,)))
    return [str(part) for part in single if "REDUCE" not in str(part)]


def ours(table: ScheduleTable) -> list[list[str]]:
    return [[f"{a.stage}{a.kind}{a.micro}" for a in row] for row in table.rows]


@pytest.mark.parametrize("name", [*MULTI, *SINGLE])
def test_orders_are_those_of_torch(name: str) -> None:
    made = 0
    for devices, micro in SIZES:
        try:
            table = generate(name, devices, micro)
        except DiagnosticError:
            continue
        made += 1
        wanted = [words_of(row) for row in order_of_torch(name, devices, micro)]
        if name == "breadth_first":  # torch's goes back from the last micro-batch
            wanted = [[_turned(word, micro) for word in row] for row in wanted]
        assert ours(table) == wanted, (devices, micro)
    assert made >= 10


def _turned(word: str, micro: int) -> str:
    stage, kind, number = word.partition("B")
    return f"{stage}B{micro - 1 - int(number)}" if kind else word


@pytest.mark.parametrize("name", [*MULTI, *SINGLE])
def test_what_torch_writes_is_read(name: str, tmp_path: Path) -> None:
    order = order_of_torch(name, 4, 8)
    path = tmp_path / "torch.csv"
    about: Any = SimpleNamespace(pipeline_order=dict(enumerate(order)))
    theirs.PipelineScheduleMulti._dump_csv(about, str(path))
    found = read(read_source(path))
    assert ours(found.schedule) == [words_of(row) for row in order]


@pytest.mark.parametrize("name", schedules())
def test_torch_reads_accepts_and_lowers_what_is_written_for_it(name: str, tmp_path: Path) -> None:
    table = generate(name, 4, 8)
    if table.updates or name in ("chimera", "dualpipe"):
        with pytest.raises(DiagnosticError, match="MD0531"):
            written_for_torch(table)
        return
    path = tmp_path / "ours.csv"
    path.write_text(written_for_torch(table))
    about: Any = SimpleNamespace(
        pipeline_order={}, _validate_and_set_stage_mapping=lambda order: None
    )
    theirs.PipelineScheduleMulti._load_csv(about, str(path))
    order = about.pipeline_order
    homes = theirs._validate_schedule(order, 4, table.stages, 8)
    found = verify(table)
    assert homes == {s: d for d, held in enumerate(found.held) for s in held}
    lowered = theirs._add_send_recv(order, homes.__getitem__, table.stages)
    sends = [a for row in lowered.values() for a in row if "SEND" in str(a)]
    assert len(sends) == found.sends
    theirs._simulate_comms_compute(lowered, homes.__getitem__, table.stages)
    path.write_text("".join(",".join(map(str, lowered[d])) + "\n" for d in range(4)))
    assert read(read_source(path)).schedule.rows == table.rows


def test_a_deadlock_is_found_that_torch_validates() -> None:
    rows = ("F0 B0 F1 B1", "F0 F1 B0 B1")
    actions = [[parse_action(word, d) for word in row.split()] for d, row in enumerate(rows)]
    order = {
        d: [theirs._Action.from_str(f"{a.stage}{a.kind}{a.micro}") for a in row]
        for d, row in enumerate(actions)
    }
    theirs._validate_schedule(order, 2, 2, 2)
    with pytest.raises(DiagnosticError, match="device 0 waits at B0@0 for B0@1, device 1"):
        verify(ScheduleTable(2, 2, tuple(map(tuple, actions))))
