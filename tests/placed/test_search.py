"""The search for the optimum: what it counts, what it considers, and how much work it may do."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshdsl.diagnostics import Diagnostics, Source
from meshdsl.pipeline import Options, compile_source, front
from meshdsl.placed import ilp_candidates, optimal, place, reshard
from meshdsl.placed.ir import EVERY, Reshard, walk
from meshdsl.placed.optimal import PlacementPlan
from meshdsl.placed.placements import Placement
from meshdsl.placed.reshard import Price
from meshdsl.report.explanation import explain
from tests.compiling import compile_text, run_text
from tests.programs.harness import Case, compiled, run_case

FILES = sorted((Path(__file__).parents[2] / "examples").glob("*.mdsl"))


SIZES: dict[str, dict[str, int]] = defaultdict(dict, matmul={"inner": 8})
"""Sizes that divide, where those of an example do not."""


def layouts() -> list[tuple[Path, str]]:
    """The first or the last layout of every example; with `MESHDSL_CASES` all."""
    cases = []
    for number, path in enumerate(FILES):
        source = Source(path.name, path.read_text(encoding="utf-8"))
        names = [*front(source, {}, Diagnostics()).layouts]
        taken = names if "MESHDSL_CASES" in os.environ else names[-(number % 2) :][:1]
        cases += [(path, name) for name in taken]
    return cases


def report(text: str, layout: str, mesh: str, **options: Any) -> Any:
    return explain(compile_text(text, layout=layout, mesh=mesh, **options).device)


def moved(found: Any, *phases: str) -> list[tuple[str, str]]:
    """Kind and tensor of what the collectives of some phases send, buckets taken apart."""
    return sorted(
        (c["kind"], part["tensor"])
        for c in found["collectives"]
        for part in c.get("parts") or [c]
        if c["phase"] in phases
    )


# --- what is counted ------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "layout"), layouts(), ids=lambda x: getattr(x, "stem", x))
def test_a_plan_costs_what_it_predicts(
    path: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source(path.name, path.read_text(encoding="utf-8"))
    options = Options(layout=layout, message_bytes=1000, cache=False, set_dims=SIZES[path.stem])
    hold_to_prediction(source, options, monkeypatch)


RETURNED = """
dim b = 8, m = 16, h = 32
layout zero { b -> x, params: m -> x }
program p(x[b, m]) {
  param w[m, h]
  y = einsum(x, w -> [b, h])
  return y, w
}
"""


def test_so_does_one_that_returns_what_is_stored_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter is returned in the form in which the program uses it: that is a gather."""
    options = Options(mesh="x:4", layout="zero", message_bytes=1000, cache=False)
    hold_to_prediction(Source("returned.mdsl", RETURNED), options, monkeypatch)


def hold_to_prediction(source: Source, options: Options, patch: pytest.MonkeyPatch) -> None:
    """A plan costs what it predicts."""
    found: list[PlacementPlan | None] = []

    def watched(*about: Any) -> PlacementPlan | None:
        found.append(optimal.solve(*about))
        return found[-1]

    patch.setattr(place, "solve", watched)
    placed = compile_source(source, options, Diagnostics(), "placed").placed
    moves = [(n, k) for n, k in walk(placed.body) if isinstance(n, Reshard)]
    cost = sum(Price(1000).of(n.route, n.source.type) * trips for n, trips in moves)
    if placed.pipe is not None:  # what is planned is one stage
        others = placed.mesh.devices // placed.mesh.size(placed.pipe.axis)
        assert len(found) == (others > 1)
        return
    # Nothing is planned where nothing is sent.
    assert [plan and plan.cost for plan in found] == ([cost] if cost else [])


TRANSFORMER = next(path for path in FILES if path.stem == "transformer")


@pytest.mark.parametrize("layout", ["megatron", "hybrid"])
def test_the_loop_of_a_transformer_carries_its_value_whole(layout: str) -> None:
    """A partial carry would save no byte; to scatter a sum of the loss, too little."""
    source = Source(TRANSFORMER.name, TRANSFORMER.read_text(encoding="utf-8"))
    placed = compile_source(source, Options(layout=layout), Diagnostics(), "placed").placed
    steps = [s.kind for n, _ in walk(placed.body) if isinstance(n, Reshard) for s in n.route.steps]
    assert "reduce_scatter" not in steps
    assert steps.count("zero_fill") == 1  # of the logarithm in the loss, beside a partial gather


CARRIED = """
dim n = 4, m = 16, o = m, l = 4
layout parts { w: m -> d }
program p(x[n, m]) {
  repeat l {
    param w[m, o]
    x = einsum(relu(x), w -> [n, o])[o -> m]
  }
  return x
}
"""


def test_a_loop_carries_a_value_split_where_that_sends_least() -> None:
    """No rule says so: each iteration scatters its sum, and only the last result is gathered."""
    found = report(CARRIED, "parts", "d:4", message_bytes=0, cache=False)
    assert [(c["kind"], c["count"]) for c in found["collectives"]] == [
        ("reduce_scatter", 4), ("all_gather", 1)
    ]  # fmt: skip
    assert found["totals"]["wire_bytes"] == (4 + 1) * 3 * 64


def test_a_collective_counts_beside_its_bytes() -> None:
    """One all_reduce is dearer in bytes than two exchanges of parts, and cheaper as messages go."""
    text = """
dim m = 64, n = 64, a = 64
layout split { a -> x }
program p(u[m, a], v[a, n]) {
  t = einsum(u, v -> [m, n])
  y = exp(t)
  s = sum[m](y * 2.0)
  return s
}
"""
    few = report(text, "split", "x:4", message_bytes=1 << 20)
    least = report(text, "split", "x:4", message_bytes=0)
    assert few["totals"]["collectives"] == 1
    assert least["totals"]["collectives"] == 2
    assert few["totals"]["wire_bytes"] > least["totals"]["wire_bytes"]
    claim = "No plan of this layout sends less"
    plan = {"claim": claim, "message_bytes": 1 << 20, "searched": EVERY, "least": True}
    assert few["plan"] == plan


# --- gradients of lookups -------------------------------------------------------------------------

TOWER = """
dim batch = 256, items = 1_000_000, model = 64
layout both { batch -> data, items -> table }
layout data_parallel { batch -> data }
layout dense { batch -> data, d_table: batch -> data }
layout gathered { batch -> data, d_table: batch -> none }
program tower(ids[batch]: i32, user[batch, model]) {
  param table[items, model] = normal(0.02)
  e = table[items = ids]
  loss = mean((sum[model](e * user) - 1.0)^2)
  return loss
  minimize loss with sgd(lr=0.1)
}
"""


@pytest.mark.parametrize(
    ("layout", "mesh"), [("data_parallel", "data:2"), ("both", "data:2,table:2")]
)
def test_a_lookup_gathers_ids_and_cotangents_rather_than_reduce_its_table(layout, mesh) -> None:
    found = report(TOWER, layout, mesh)
    assert moved(found, "backward", "update") == [("all_gather", "d_e"), ("all_gather", "ids")]
    assert found["totals"]["by_phase"]["backward"] == 128 * (64 + 1) * 4
    assert found["plan"]["least"]
    assert report(TOWER, layout, mesh, reduce="deferred")["totals"]["wire_bytes"] > 10**8


EMBEDDING = """
dim batch = 2, seq = 4, vocab = 64, model = 8
layout data_parallel { batch -> data }
program lm(tokens[batch, seq]: i32) {
  param embed[vocab, model]
  x = embed[vocab = tokens]
  loss = mean(x^2)
  return loss
  minimize loss with sgd(lr=1.0)
}
"""


def test_so_does_an_embedding_under_data_parallelism_where_it_is_large() -> None:
    found = report(EMBEDDING, "data_parallel", "data:2", message_bytes=0)
    assert moved(found, "backward") == [("all_gather", "d_x"), ("all_gather", "tokens")]
    # Reducing a table of 6 x 8 floats sends 192 bytes, gathering 144: half of what is put together.
    found = report(
        EMBEDDING.replace("vocab = 64", "vocab = 6"), "data_parallel", "data:2", message_bytes=0
    )
    assert moved(found, "backward") == [("all_gather", "d_x"), ("all_gather", "tokens")]
    small = EMBEDDING.replace("vocab = 64", "vocab = 4")
    found = report(small, "data_parallel", "data:2", message_bytes=0)
    assert ("all_reduce", "d_embed") in moved(found, "backward", "update")
    assert not {kind for kind, _ in moved(found, "backward", "update")} - {"all_reduce"}


@pytest.mark.parametrize("policy", ["immediate", "mesh-tf", "deferred", "optimal"])
def test_a_rule_says_along_what_a_gradient_is_summed(policy: str) -> None:
    gathered = report(TOWER, "gathered", "data:2", reduce=policy)
    assert moved(gathered, "backward", "update") == [("all_gather", "d_e"), ("all_gather", "ids")]
    dense = report(TOWER, "dense", "data:2", reduce=policy)
    assert moved(dense, "backward", "update") == [("all_reduce", "d_table")]


def test_a_rule_for_what_no_operator_sums_is_reported() -> None:
    found = Diagnostics()
    text = (
        TOWER + "layout wrong { d_tabel: batch -> none, d_table: model -> none, e: items -> none }"
    )
    compile_text(text, found, layout="wrong", mesh="data:2")
    assert [(d.code, d.span.text if d.span else "") for d in found] == [
        ("MD0306", "d_tabel: batch -> none")
    ]
    assert "d_table" in str(next(iter(found)).help)


TAKEN_APART = """
dim a = 8, d = 2, c = 4
layout l { t: a -> x }
program p(x[a]) {
  t = x[a -> (d, c)]
  return t
}
"""


@pytest.mark.parametrize("policy", ["immediate", "mesh-tf", "deferred", "optimal"])
def test_a_dim_that_a_view_takes_apart_is_not_summed(policy: str) -> None:
    """`x` splits it as no view of its parts could be; the rule speaks of no tensor."""
    found = Diagnostics()
    made = compile_text(TAKEN_APART, found, layout="l", mesh="x:4", reduce=policy)
    assert explain(made.device)["collectives"] == []
    assert [(d.code, d.help) for d in found] == [("MD0306", "remove the rule")]


PRODUCTS = """
dim b = 4, m = 8
layout l { b -> x, m -> y }
program p(x[b, m], y[m], z[b]) {
  return einsum(x, y, z -> [])
}
"""


def test_orders_of_products_are_not_searched_and_that_is_said() -> None:
    """Another policy may have chosen a better one: all are tried."""
    case = Case(PRODUCTS, "x:2,y:2", "l", "optimal", message_bytes=0)
    plan = compiled(case).placed.plan
    assert plan is not None
    assert plan.least
    assert not plan.proven
    assert "in one order" in plan.searched
    run_case(case)


SLICED = """
dim a = 6, b = 4, c = 2, m = 8, n = 6
layout l { n -> x }
program p(x[a, b]) {
  param w[a, c]
  s = pad[a -> m](x, 2, 0)
  t = einsum(s -> [m])
  z = layer_norm[a](w)
  repeat c { t = t + mean[n](z[a -> n]) }
  return t
}
"""


@pytest.mark.parametrize("message_bytes", [0, 8192])
def test_what_a_loop_slices_may_have_been_split_along_it(message_bytes: int) -> None:
    run_case(Case(SLICED, "x:2", "l", "optimal", message_bytes=message_bytes))


# --- rules of functions, and loops' parameters ----------------------------------------------------

EXPERTS = """
dim group = 8, token = 32, experts = 8, slot = 6, model = 16, hidden = 64
layout gshard { group -> e, expert: experts -> e }
def expert(
  dispatch[group, token, experts, slot], combine[group, token, experts, slot],
  x[group, token, model]
) -> [group, token, model] {
  param wi[experts, model, hidden]
  param wo[experts, hidden, model]
  inside = einsum(dispatch, x -> [experts, group, slot, model])
  h = relu(einsum(inside, wi -> [experts, group, slot, hidden]))
  out = einsum(h, wo -> [experts, group, slot, model])
  return einsum(combine, out -> [group, token, model])
}
program moe(x[group, token, model]) {
  param wg[model, experts]
  param scale[model] = ones()
  z = x * scale
  gates = softmax[experts](einsum(z, wg -> [group, token, experts]))
  chosen = one_hot[experts](argmax[experts](gates))
  place = cumsum[token](chosen) * chosen
  dispatch = where(place == cast(iota[slot], f32) + 1.0, 1.0, 0.0)
  y = expert(dispatch, dispatch * gates, z)
  loss = mean((y - z)^2)
  return loss
  minimize loss with sgd(lr=0.1)
}
expect gshard on four { all_to_all over e: 4 }
mesh four = { e: 4 }
"""


@pytest.mark.parametrize("policy", ["deferred", "optimal"])
def test_a_function_s_rules_do_not_bind_gradients_of_its_arguments(policy: str) -> None:
    """The gradient of `combine` stays where `combine` is: two exchanges less."""
    found = report(EXPERTS, "gshard", "four", reduce=policy)
    assert [kind for kind, _ in moved(found, "forward", "backward")].count("all_to_all") == 4


LAYERS = """
dim layers = 4, batch = 8, model = 8, hidden = 16
mesh four = { data: 4 }
layout plain { batch -> data }
layout params extends plain { params: layers -> data }
layout grads extends plain { grads: layers -> data }
layout state extends plain { state: layers -> data }
layout all extends plain { params: layers -> data, grads: layers -> data, state: layers -> data }
layout both extends plain { params: layers -> data, params: hidden -> y }
program p(x[batch, model]) {
  repeat layers {
    param w[model, hidden]
    param v[hidden, model]
    x = x + einsum(relu(einsum(x, w -> [batch, hidden])), v -> [batch, model])
  }
  loss = mean(x^2)
  return loss
  minimize loss with momentum(lr=0.5)
}
"""


@pytest.mark.parametrize("policy", ["deferred", "optimal"])
@pytest.mark.parametrize("layout", ["params", "grads", "state", "all", "both"])
def test_parameters_of_a_loop_may_be_stored_by_its_dim(layout: str, policy: str) -> None:
    text = LAYERS.replace("data: 4 }", "data: 2, y: 2 }") if layout == "both" else LAYERS
    found: Diagnostics = Diagnostics()
    made = compile_text(text, found, layout=layout, mesh="four", reduce=policy)
    assert not list(found)
    tensors = explain(made.device)["tensors"]
    (stored,) = (t["placement"] for t in tensors if t["name"] == "w" and "layers" in t["dims"])
    split = {"data": "S(layers)"} if layout in ("params", "all") else {}
    split |= {"data": "S(layers)", "y": "S(hidden)"} if layout == "both" else {}
    assert {a: p for a, p in stored.items() if p != "B"} == split
    loss = run_text(text, layout=layout, mesh="four", reduce=policy)["loss"]
    assert np.allclose(loss, run_text(LAYERS, layout="plain", mesh="data:1")["loss"])


def test_each_iteration_gathers_its_own_layer() -> None:
    found = report(LAYERS, "params", "four", message_bytes=0)
    kinds = [(c["kind"], c["count"]) for c in found["collectives"] if c["phase"] == "forward"]
    assert kinds.count(("all_to_all", 1)) == 2
    assert all(count == 4 for kind, count in kinds if kind == "all_gather")


GATHERED = """
dim b = 8, m = 16, n = 32, layers = 3
layout l { x: b -> tp, n -> tp }
program p(x[b, m]) {
  repeat layers {
    param w[m, n]
    param v[n, m]
    x = x + einsum(relu(einsum(x, w -> [b, n])), v -> [b, m])
  }
  loss = mean(x^2)
  return loss
  minimize loss with sgd(lr=0.1)
}
"""


def test_what_is_gathered_is_not_kept_so_for_the_backward_pass() -> None:
    """That would spare a gather, for twice the memory."""
    placed = compile_text(GATHERED, layout="l", mesh="tp:2", message_bytes=0).placed
    collected = (c.inside for node in placed.body for c in node.collected)
    kept = [tensor.placement for tensor in collected if tensor.value.name == "x"]
    assert kept == [Placement((("b", ("tp",)),))]
    found = report(GATHERED, "l", "tp:2", message_bytes=0)
    for phase in ("forward", "backward"):
        assert ("all_gather", "x") in moved(found, phase)


# --- how much work --------------------------------------------------------------------------------

WIDE = """
dim a = 8, b = 8, c = 8, d = 8
layout some { a -> x, b -> y, c -> z }
layout none_of_them { e: a -> x, f: b -> y, g: c -> z }
program p(s[a, b, c, d], t[b, c, d]) {
  e = einsum(s, t -> [a, b, c])
  f = exp(e) + s
  g = einsum(f, e, t -> [b, c, d])
  h = softmax[d](g) * t
  i = sum[b](h) + f
  j = einsum(i, h, s -> [a, d])
  k = tanh(j) + i
  return k
}
"""


@pytest.mark.parametrize("layout", ["some", "none_of_them"])
def test_the_work_of_a_search_is_bounded_building_included(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three free axes: the search space is narrowed until it is small enough, and reported."""
    priced: list[int] = []
    routes = reshard.route

    def counted(*about: Any) -> Any:
        priced.append(1)
        return routes(*about)

    monkeypatch.setattr(ilp_candidates, "route", counted)
    found = report(WIDE, layout, "x:2,y:2,z:2", cache=False)
    # Each route once, over three axes; three spaces at most.
    assert len(priced) <= 3 * ilp_candidates.MOST_ROUTES / 3**2
    assert found["plan"]["searched"].startswith((EVERY, optimal.KNOWN, optimal.NONE))
    assert found["proven"] == (found["plan"]["searched"] == EVERY)


@pytest.mark.parametrize("limit", ["MOST_PAIRS", "MOST_ROUTES"])
def test_what_is_too_large_to_search_is_the_best_of_the_walks(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ilp_candidates, limit, 0)
    found = report(WIDE, "some", "x:2,y:2,z:2", cache=False)
    others = [report(WIDE, "some", "x:2,y:2,z:2", reduce=p) for p in place.WALKS]
    assert found["totals"]["wire_bytes"] in [other["totals"]["wire_bytes"] for other in others]
    assert found["plan"] == {
        "claim": "Unproven: some plan of this layout may send less",
        "message_bytes": 8192,
        "searched": "the other policies",
        "least": False,
    }
