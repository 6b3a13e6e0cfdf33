"""`meshdsl cluster`: what it prints of profiles, and how this machine's is measured and kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshdsl.cluster import this_machine
from meshdsl.cluster.profile import load, names
from meshdsl.cluster.timing import Timing
from meshdsl.diagnostics import DiagnosticError
from meshdsl.placed.placements import Mesh
from meshdsl.report.clusters import as_json, listed, shown
from meshdsl.report.document import Grid
from meshdsl.report.terminal import text

SENT = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "permute")
BYTES = (1 << 12, 1 << 16, 1 << 20, 1 << 24)
TIMES: this_machine.Times = {
    **{("product", n): [(1e4, 1e-6), (1e8, 2e-3 * n)] for n in (1, 2, 4)},
    **{("pointwise", n): [(1e4, 2e-6), (1e7, 1e-3 * n)] for n in (1, 2, 4)},
    **{(kind, n): [(b, 1e-4 + b * n / 1e9) for b in BYTES] for kind in SENT for n in (2, 4)},
}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MESHDSL_CACHE", str(tmp_path))
    return tmp_path


def test_a_measured_profile_takes_the_place_of_typical_figures(cache: Path) -> None:
    before = load("cpu")
    assert "typical" in before.source[0]
    assert "`meshdsl cluster measure`" in text(listed([before]))
    this_machine.keep(TIMES)
    found = load("cpu")
    assert found.source == (f"measured on this machine: {this_machine.machine()}",)
    assert {(kind, n) for kind, n, _ in found.tables} == set(TIMES)
    assert "cluster measure" not in text(listed([found]))
    assert list(cache.glob("clusters/*.json"))


def test_times_of_a_device_are_those_of_as_many_at_work(cache: Path) -> None:
    this_machine.keep(TIMES)
    seconds = [
        Timing(load("cpu"), Mesh("m", (("x", n),)))._kernel(0.0, int(1e7)).seconds
        for n in (1, 2, 3, 4, 8)
    ]
    assert seconds == pytest.approx([1e-3, 2e-3, 2e-3, 4e-3, 4e-3])


def test_a_time_measured_amiss_is_lowered_to_that_of_more_bytes(cache: Path) -> None:
    points = [(4096.0, 3e-4), (65536.0, 1e-4), (1e6, 5e-4), (1e7, 6e-4)]
    this_machine.keep({**TIMES, ("all_reduce", 4): points})
    assert [s for _, s in load("cpu").tables["all_reduce", 4, 0]] == [1e-4, 1e-4, 5e-4, 6e-4]


def test_measuring_times_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    from meshdsl.backends.engines import link_times

    monkeypatch.setattr(link_times, "SIDES", (16,))
    monkeypatch.setattr(link_times, "BYTES", (1 << 12,))
    monkeypatch.setattr(link_times, "WORLDS", (1, 2))
    found = link_times.measure()
    assert set(found) == {key for key in TIMES if key[1] < 4}
    assert all(seconds > 0 for points in found.values() for _, seconds in points)


def test_a_process_that_fails_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    from meshdsl.backends.engines import link_times

    def broken(*about: object) -> None:
        raise SystemExit(3)

    monkeypatch.setattr(link_times, "WORLDS", (1,))
    monkeypatch.setattr(link_times, "_process", broken)
    with pytest.raises(DiagnosticError, match="MD0325"):
        link_times.measure()


# --- what is printed ---------------------------------------------------------------------------


def test_the_list_has_a_line_for_each() -> None:
    (grid, *_) = listed([load(name) for name in names()])
    assert isinstance(grid, Grid)
    assert [line[0] for line in grid.lines] == list(names())
    v100 = next(line for line in grid.lines if line[0] == "v100-p3")
    assert v100[3] == "8 switch 120/150, switch 3/3.125 for 8"


@pytest.mark.parametrize("name", names())
def test_a_profile_is_shown_with_both_rates(name: str) -> None:
    cluster = load(name)
    said = " ".join(text(shown(cluster)).split())
    for level in cluster.levels:
        assert f"{level.bandwidth / 1e9:,.4g} {level.nominal / 1e9:,.4g}" in said
    facts: Any = as_json(cluster)
    assert json.loads(json.dumps(facts)) == facts
    assert len(facts["tables"]) == len(cluster.tables)
