"""Every mesh shape of so many devices: which there are, and that the best of all is found."""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
from pathlib import Path

import pytest

import meshdsl as md
from meshdsl.diagnostics import DiagnosticError, Diagnostics, Source
from meshdsl.pipeline import Compilation, Options, compile_source
from meshdsl.placed.placements import Mesh
from meshdsl.search.layout_text import written
from meshdsl.search.methods import METHODS
from meshdsl.search.problem import SearchResult
from meshdsl.search.problems import problems
from meshdsl.search.request import SearchRequest
from meshdsl.search.shapes import shapes, solve
from tests.cli.command import Cli, write
from tests.cli.conftest import cli

from .problems import NET, SQUARE
from .test_command import TEXT

__all__ = ["cli"]

SQUARE_OF_FILE = Mesh("square", SQUARE.axes)


@pytest.mark.parametrize("axes", [0, 1, 2, 3])
def test_every_shape_is_there_once(axes: int) -> None:
    mesh = Mesh("any", tuple((f"a{i}", 1) for i in range(axes)))
    for devices in range(1, 25):
        found = [tuple(n for _, n in m.axes) for m in shapes(mesh, devices)]
        every = itertools.product(range(1, devices + 1), repeat=axes)
        assert found == [sizes for sizes in every if math.prod(sizes) == devices]


@functools.cache
def searched(devices: int, **asked) -> SearchResult:
    """The best of a small training step; `asked` are fields of `SearchRequest`."""
    made = Compilation(Source("net.mdsl", TEXT), Options())
    return solve(problems(SearchRequest(devices=devices, **asked), made), METHODS["layouts"])


@pytest.mark.parametrize("cluster", [None, "h100"])
def test_the_best_is_that_of_the_best_mesh(cluster: str | None) -> None:
    found = searched(4, cluster=cluster)
    every = [found, *found.others]
    assert {f.problem.mesh for f in every} == set(shapes(SQUARE_OF_FILE, 4))
    keys = [f.problem.key(f.plans[0]) for f in every if f.plans]
    assert keys == sorted(keys)
    assert found.proven
    for one in every:
        made = Compilation(Source("net.mdsl", TEXT), Options(mesh=str(one.problem.mesh)))
        (alone,) = problems(SearchRequest(cluster=cluster), made)
        best = METHODS["layouts"].solve(alone).plans[0]
        assert all(alone.key(best) <= alone.key(plan) for plan in one.plans[:1])
        # Other meshes are searched only as far as they could be better.
        if alone.objective == "time":
            assert one.bound <= alone.value(best)
            first = keys[0]
            assert first == alone.key(best) if one is found else first.value <= alone.value(best)


def test_more_devices_are_never_slower() -> None:
    several = (1, 2, 4, 8) if "MESHDSL_CASES" in os.environ else (1, 2, 4)
    times = [f.plans[0].seconds for f in (searched(n, cluster="h100") for n in several)]
    assert times == sorted(times, reverse=True)


def test_meshes_that_a_cluster_cuts_unevenly_are_left_out() -> None:
    found = searched(24, cluster="h100")
    every = set(shapes(SQUARE_OF_FILE, 24))
    even = set(filter(_is_even, every))
    assert {f.problem.mesh for f in (found, *found.others)} == even < every
    with pytest.raises(DiagnosticError, match="MD0323"):
        searched(12, cluster="h100")


def _is_even(mesh: Mesh) -> bool:
    chosen = Options(mesh=str(mesh), cluster="h100")
    try:
        return Compilation(Source("net.mdsl", TEXT), chosen).timing is not None
    except DiagnosticError:
        return False


def test_the_mesh_is_printed_as_it_is_written(cli: Cli) -> None:
    path = write(TEXT)
    told = json.loads(cli("search", path, "--devices", "4", "--json").out)
    text = cli("search", path, "--devices", "4").out
    best = searched(4).plans[0]
    assert told["mesh"] == dict(best.mesh.axes)
    assert [m["mesh"] for m in told["meshes"]] == [
        dict(f.problem.mesh.axes) for f in searched(4).others
    ]
    mesh = written(best.mesh)
    assert mesh in text
    rules = "\n".join(map(str, best.rules))
    whole = f"{NET}\n{mesh}\nlayout found {{\n{rules}\n}}\n"
    chosen = Options(layout="found", reduce=best.policy)
    made = compile_source(Source("net.mdsl", whole), chosen, Diagnostics())
    assert made.report["totals"]["wire_bytes"] == best.sent == told["plans"][0]["wire_bytes"]


REFUSED = {
    "--devices 4 --memory 1KB": "MD0642",
    "--devices 12 --cluster h100": "MD0323",
}


@pytest.mark.parametrize("options", REFUSED)
def test_refused(options: str, cli: Cli) -> None:
    assert cli("search", write(TEXT), *options.split()).codes == [f"error[{REFUSED[options]}]"]


def test_a_program_without_a_mesh_is_refused(cli: Cli) -> None:
    path = write(NET)
    assert cli("search", path, "--devices", "4").codes == ["error[MD0645]"]
    assert cli("search", path, "--devices", "4", "--mesh", "x:1").code == 0


def test_from_python(tmp_path: Path) -> None:
    path = tmp_path / "net.mdsl"
    path.write_text(TEXT, encoding="utf-8")
    found = md.load(path).search(devices=4)
    assert found.json["mesh"] == dict(searched(4).problem.mesh.axes)
    assert "mesh square" in str(found)
    assert found[0].cost().wire_bytes == searched(4).plans[0].sent
