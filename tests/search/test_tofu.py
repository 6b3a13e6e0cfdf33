"""Axis by axis as Tofu does, and by chains as FlexFlow does: as good as all layouts here."""

from __future__ import annotations

import os

import pytest

from meshdsl.costgraph.annealing import anneal
from meshdsl.diagnostics import DiagnosticError, Source
from meshdsl.ir.types import F32, Dim, TensorType
from meshdsl.pipeline import Compilation, Options
from meshdsl.placed.placements import WHOLE, Mesh, Partial, Split, placement
from meshdsl.placed.reshard import route
from meshdsl.placed.sharding_rules import Call, legal_rows
from meshdsl.search.candidate import SearchRule
from meshdsl.search.methods import METHODS
from meshdsl.search.problem import Problem
from meshdsl.search.space import LayoutSpace
from meshdsl.search.tables import Tables, table_graph
from tests.covering import some

from .problems import LINE, SQUARE, UNEQUAL, named, problem
from .resnets import wide_resnet

CUBE = Mesh("cube", (("x", 2), ("y", 2), ("z", 2)))
each_mesh = pytest.mark.parametrize("mesh", [LINE, SQUARE, CUBE], ids=lambda mesh: mesh.name)


def least_sum(name: str, mesh: Mesh) -> int:
    """The least that the tables say of all layouts that divide the work."""
    space = LayoutSpace(named(name), mesh)
    tables = Tables(space)
    return min(tables.sent(rules) for _, rules in space.within(space.least() * 1.15))


@each_mesh
@pytest.mark.parametrize("name", ["net", "lm"])
def test_equal_axes_one_at_a_time_are_as_good_as_jointly(name: str, mesh: Mesh) -> None:
    asked = problem(name, mesh)
    found = METHODS["tofu"].solve(asked)
    tables = Tables(LayoutSpace(named(name), mesh))
    assert tables.sent(found.plans[0].rules) == least_sum(name, mesh)
    assert not found.proven


@pytest.mark.parametrize("mesh", some([LINE, SQUARE]), ids=lambda mesh: mesh.name)
def test_chains_come_within_a_hundredth_of_the_least(mesh: Mesh) -> None:
    space = LayoutSpace(named("lm"), mesh)
    found = anneal(table_graph(space, space.least() * 1.15))
    assert found.cost <= 1.01 * least_sum("lm", mesh)


def test_a_product_is_split_in_three_ways() -> None:
    m, n, k = Dim("m", 64), Dim("n", 16), Dim("k", 32)
    a, b, c = (TensorType(dims, F32) for dims in ((m, k), (k, n), (m, n)))
    rows = legal_rows(Call("einsum", (("dims", (k,)),), (a, b), (c,), (0, 1)))
    split = {r.factor.name: r for r in rows if r.factor is not None}
    outs = [r.outs for r in split.values()]
    assert sorted(map(str, (out for (out,) in outs))) == ["P", "S(m)", "S(n)"]
    summed = next(r for r in split.values() if r.outs == (Partial("sum"),))
    assert summed.ins == (Split("k"), Split("k"))
    reduced = route(c, placement(LINE, {}, ("x",), "sum"), WHOLE, LINE)
    assert reduced is not None
    assert reduced.wire_bytes == 64 * 16 * 4


def test_what_is_fixed_stays() -> None:
    kept = (SearchRule("hidden", ("y",)),)
    found = METHODS["tofu"].solve(problem("net", SQUARE, fixed=kept))
    assert kept[0] in found.plans[0].rules


def test_no_step_divides_the_work() -> None:
    asked = problem("net", LINE, fixed=(SearchRule("io", ()),), replicated=-0.5)
    with pytest.raises(DiagnosticError, match="MD0641"):
        METHODS["tofu"].solve(asked)


@pytest.mark.parametrize(
    ("layers", "layouts"),
    [(50, 10**16), *([(152, 10**49)] if "MESHDSL_CASES" in os.environ else [])],
)
def test_wide_residual_networks(layers: int, layouts: int) -> None:
    """Tofu's convolutional networks (Wang, Huang and Li 2019, section 7), on 8 devices.

    The largest has 115 dims: of so many layouts the tables are looked at dim by dim.
    """
    text = wide_resnet(layers)
    asked = Problem(Compilation(Source("wide.mdsl", text), Options()).named, UNEQUAL)
    found = METHODS["tofu"].solve(asked)
    assert found.count.valid > layouts
    (plan,) = found.plans[:1]
    assert str(plan) == "batch -> (x, y)"
    assert plan.flops <= 1.15 * asked.least_work
    # All gradients are reduced: what data parallelism sends, and some numbers of the loss.
    parameters = sum(p.tensor.type.bytes for p in plan.placed.params)
    assert plan.sent == pytest.approx(2 * 7 / 8 * parameters, rel=1e-3)
