"""The work of placing on meshes of many axes, of chains of layouts: bounded, and said where cut."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshdsl.backends.runtime.values import source_rank
from meshdsl.cli.app import app
from meshdsl.diagnostics import Diagnostics, Source
from meshdsl.ir.types import F32, Dim, TensorType
from meshdsl.pipeline import Options, compile_source
from meshdsl.placed.collectives import Step
from meshdsl.placed.placements import Mesh, Placement, placement
from meshdsl.placed.reshard import BYTES, Price, _Search, _space, route
from meshdsl.report.checks import check_source
from meshdsl.report.explanation_document import summary
from tests.work import calls

TENSOR = TensorType((Dim("a", 4096), Dim("b", 4096)), F32)


def mesh(axes: int) -> Mesh:
    return Mesh("m", tuple((f"m{i}", 2) for i in range(axes)))


def halves(axes: int) -> str:
    """An einsum whose dims are each split over half of the axes of a mesh."""
    names = [f"m{i}" for i in range(axes)]
    one, other = ", ".join(names[: axes // 2]), ", ".join(names[axes // 2 :])
    return f"""
dim a = 4096, b = 4096
mesh m = {{ {", ".join(f"{name}: 2" for name in names)} }}
layout l {{ a -> ({one}), b -> ({other}) }}
program p(x[a, b], w[b]) {{
  y = einsum(x, w -> [a])
  return y
}}
"""


def checked(text: str) -> int:
    """The work of checking a file."""
    source = Source("chain.mdsl", text)
    return calls(lambda: check_source(source, Options(), Diagnostics()))


def test_explaining_on_many_axes_is_bounded_and_says_so() -> None:
    found: list[Any] = []
    source = Source("many.mdsl", halves(12))
    work = calls(lambda: found.append(compile_source(source, Options(), Diagnostics()).report))
    assert work < 10_000_000
    plan = found[0]["plan"]
    assert isinstance(plan, dict)
    assert not plan["least"]
    assert "not every combination and route" in plan["searched"]


def test_the_sum_over_many_axes_is_one_all_reduce() -> None:
    wide = mesh(12)
    a, b = wide.names[:6], wide.names[6:]
    source = placement(wide, {"a": a}, b, "sum")
    way = route(TENSOR, source, source.reduced, wide)
    assert way is not None
    assert [(step.kind, step.axes) for step in way.steps] == [("all_reduce", b)]
    assert not way.is_cut  # nothing sends less than an all_reduce


def ends(square: Mesh) -> list[tuple[Placement, Placement]]:
    w, x, y, z = square.names
    return [
        (placement(square, {"a": (w, x)}, (y, z), "sum"), placement(square, {"b": (w, x)})),
        (placement(square, {"a": (w, x), "b": (y, z)}), placement(square, {"b": (x, w, z)})),
        (placement(square, {"a": (w,)}), placement(square, {"b": (z,)}, (w, y), "sum")),
        (placement(square, {}, square.names, "sum"), placement(square, {"a": (y, x), "b": (z,)})),
    ]


@pytest.mark.parametrize("pair", range(4))
@pytest.mark.parametrize("price", [BYTES, Price(8192), Price(8192, scatter=False)])
def test_the_bound_changes_no_route(pair: int, price: Price) -> None:
    square = mesh(4)
    source, target = ends(square)[pair]
    whole = _Search(
        _space(TENSOR, source, target, square, price.scatter), TENSOR, source, target, price
    )
    assert whole.run(most=None)
    found = route(TENSOR, source, target, square, price)
    assert found == whole.route()
    assert found is not None
    steps: tuple[Step, ...] = found.steps
    assert steps[0].before == source
    assert steps[-1].after == target


def test_layouts_that_extend_one_another_are_compared_by_name() -> None:
    def text(count: int) -> str:
        chain = "".join(f"layout l{i} extends l{i + 1} {{ }}\n" for i in range(count))
        head = f"dim a = 4\nmesh m = {{ x: 2 }}\n{chain}layout l{count} {{ a -> x }}\n"
        return head + "program p(x[a]) {\n y = x + x\n return y\n}\n"

    few, many = (checked(text(n)) for n in (40, 80))
    assert many < 3 * few


def torn(axes: int) -> str:
    """An einsum that every axis may do along the dim of an operand or that of its result."""
    names = ", ".join(f"m{i}" for i in range(axes))
    return f"""
dim a = 4, b = 4096, c = 4096
mesh m = {{ {names.replace(",", ": 2,")}: 2 }}
layout l {{ b -> ({names}), c -> ({names}) }}
program p(x[a, b], w[c]) {{
  y = einsum(x, w -> [a, c])
  return y
}}
"""


def explained(axes: int, reduce: str) -> tuple[Any, str]:
    """The report under a policy, and what is said of what is sent."""
    source = Source("many.mdsl", torn(axes))
    report = compile_source(source, Options(reduce=reduce), Diagnostics()).report
    return report, " ".join(str(c["why"]) for c in report["collectives"])


@pytest.mark.parametrize("axes", [6, 12])
def test_a_search_that_is_too_large_ends_before_its_first_route(axes: int) -> None:
    assert calls(lambda: explained(axes, "optimal")) < 5_000_000


def test_so_does_the_best_of_the_policies_where_no_plan_can_be_searched() -> None:
    report, _ = explained(6, "optimal")
    assert report["plan"]["searched"].startswith("the other policies, on so many axes not every")
    assert not report["plan"]["least"]


@pytest.mark.parametrize("reduce", ["immediate", "deferred"])
def test_a_policy_says_on_many_axes_that_it_looked_at_some_ways(reduce: str) -> None:
    report, why = explained(6, reduce)
    assert "not every combination and route" in report["bounded"]
    assert any("not every combination" in str(part) for part in summary(report))
    assert "the cheapest alternative sends" not in why


@pytest.mark.parametrize("reduce", ["deferred", "optimal"])
def test_on_few_axes_nothing_is_said_of_it(reduce: str) -> None:
    report, why = explained(3, reduce)
    assert "bounded" not in report
    assert "alternative tried" not in why


UNLIKE = {
    "a: 2, b: 3, c: 3, z: 2": "x: m -> a, x: n -> b, y: m -> z, y: n -> c",
    "a: 2, b: 2, z: 4, q: 2": "x: m -> (a, b), x: n -> q, y: m -> z",
    "a: 4, b: 2, c: 2, d: 2": "x: m -> a, x: n -> b, y: m -> (c, d)",
}
"""Axes that change places with others of other sizes."""


@pytest.mark.parametrize(("m", "n"), [(12, 12), (8, 4), (5, 12)])
@pytest.mark.parametrize("axes", UNLIKE)
def test_axes_of_other_sizes_change_places(axes: str, m: int, n: int, tmp_path: Path) -> None:
    """Blocks that are moved are the right ones, also where sizes do not divide."""
    path = tmp_path / "moved.mdsl"
    path.write_text(
        f"dim m = {m}, n = {n}\nmesh big = {{ {axes} }}\nlayout l {{ {UNLIKE[axes]} }}\n"
        "program p(x[m, n]) {\n  y = x * 2.0\n  return y\n}\n"
    )
    ran = CliRunner().invoke(app, ["run", str(path), "--verify"])
    assert ran.exit_code == 0, ran.output
    assert "verified" in ran.output


@pytest.mark.parametrize("sizes", [(2, 3, 3, 2), (2, 2, 4, 2), (4, 2, 2, 3)])
def test_a_permute_moves_each_block_once(sizes: tuple[int, ...]) -> None:
    """Of any two ways to split two dims equally often, every device has one source."""
    mesh = dict(zip("abcd", sizes, strict=True))
    ways: dict[tuple[int, int], list[dict[str, tuple[str, ...]]]] = {}
    for count in range(5):
        for axes in itertools.permutations(mesh, count):
            for cut in range(count + 1):
                splits = {"m": axes[:cut], "n": axes[cut:]}
                parts = (math.prod(mesh[a] for a in over) for over in splits.values())
                ways.setdefault((next(parts), next(parts)), []).append(splits)
    ranks = range(math.prod(sizes))
    for before, after in (pair for each in ways.values() for pair in itertools.pairwise(each)):
        assert sorted(source_rank(mesh, rank, before, after) for rank in ranks) == [*ranks]
