"""`scatter_add` adds at indices under every layout: sums of segments, counts, their gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import meshdsl as md
from meshdsl.backends.engines.execution import InputSource, run
from meshdsl.backends.runtime.values import Array
from meshdsl.diagnostics import DiagnosticError
from tests.compiling import compile_text, run_text
from tests.programs.harness import Case, explained, run_case

PROGRAM = """
dim batch = 3, edge = 7, node = 5, feat = 3
mesh grid = { p: 2, q: 2 }
layout whole { }
layout nodes { node -> (p, q) }
layout edges { edge -> p, feat -> q }
layout several { batch -> p, node -> q }
program test(x[edge, feat], w[batch, edge], c[batch, node, feat], ids[edge]: i32,
  each[batch, edge]: i32, one[]: i32) {
  BODY
}
"""
LAYOUTS = ("whole", "nodes", "edges", "several")


def inputs() -> dict[str, Array]:
    rng = np.random.default_rng(5)
    shapes = {"x": (7, 3), "w": (3, 7), "c": (3, 5, 3)}
    drawn = {n: rng.normal(size=s).astype(np.float32) for n, s in shapes.items()}
    each = rng.integers(0, 5, (3, 7)).astype(np.int32)
    ids = np.array([4, 0, 4, 2, 2, 4, 1], np.int32)
    return drawn | {"ids": ids, "each": each, "one": np.array(3, np.int32)}


CALLS: dict[str, tuple[str, tuple[Any, str]]] = {
    "scatter_add[node = ids](x)": ("ef,e->nf", ("x", "ids")),
    "scatter_add[node = ids](x -> [feat, node])": ("ef,e->fn", ("x", "ids")),
    "scatter_add[node = each](x -> [batch, node, feat])": ("ef,be->bnf", ("x", "each")),
    "scatter_add[node = each](w)": ("be,be->n", ("w", "each")),
    "scatter_add[node = each](w -> [node, batch])": ("be,be->nb", ("w", "each")),
    "scatter_add[node = one](x)": ("ef,->nef", ("x", "one")),
    "scatter_add[node = ids](1.0)": (",e->n", (1.0, "ids")),
    "scatter_add[node = each](1 -> [batch, node])": (",be->bn", (1, "each")),
    "scatter_add[node = ids](where(ids > 1, 1, 0))": ("e,e->n", ("ids > 1", "ids")),
    "bincount[node](each)": (",be->n", (1, "each")),
}
"""Calls, and each as a contraction with a one-hot of the indices, in letters: `n` is the node."""


def summed(call: str) -> Array:
    """What a call means, in float64."""
    (letters, (what, ids)) = CALLS[call]
    given: dict[Any, Any] = {**inputs()}
    left, result = letters.split("->")
    first, at = left.split(",")
    value = given["ids"] > 1 if what == "ids > 1" else given.get(what, what)
    hot = np.eye(5)[given[ids]]
    summed = np.einsum(f"{first},{at}n->{result}", np.asarray(value, np.float64), hot)
    return np.asarray(summed)


def body(lines: list[str], names: list[str]) -> str:
    return PROGRAM.replace("BODY", "\n  ".join([*lines, f"return {', '.join(names)}"]))


TEXT = body(
    [f"y{i} = {call}" for i, call in enumerate(CALLS)], [f"y{i}" for i in range(len(CALLS))]
)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_added(layout: str) -> None:
    found = run_text(TEXT, inputs(), layout=layout)
    for i, call in enumerate(CALLS):
        y, want = found[f"y{i}"], summed(call)
        assert y.shape == want.shape
        np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-6, err_msg=call)
        counts = isinstance(CALLS[call][1][0], int) or "where" in call
        assert y.dtype == (np.int32 if counts else np.float32), call


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes_and_numbers_are_as_predicted(layout: str) -> None:
    run_case(Case(TEXT, "p:2,q:2", layout, "optimal"))


def test_gradients() -> None:
    """Of every addend: the sum of the cotangents at its indices."""
    lines = [
        "y = scatter_add[node = each](x -> [batch, node, feat])",
        "z = scatter_add[node = each](w)",
        "loss = sum(y * c) + sum(z * z)",
        "dx, dw = grad(loss, x, w)",
    ]
    given = inputs()
    rows = np.take_along_axis(given["c"], given["each"][..., None].astype(int), 1)
    z = summed("scatter_add[node = each](w)")
    for layout in LAYOUTS[1:]:
        found = run_text(body(lines, ["dx", "dw"]), given, layout=layout)
        np.testing.assert_allclose(found["dx"], rows.sum(0), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found["dw"], 2 * z[given["each"]], rtol=1e-5)


def test_partial_sums_are_added_once_behind_it() -> None:
    """Positions that are split give partial sums, which a product passes on."""
    lines = ["y = scatter_add[node = ids](x * 2.0)", "z = einsum(y, c -> [batch])"]
    found = explained(Case(body(lines, ["z"]), "p:3", "edge:p", "optimal"))
    assert [(c["kind"], c["tensor"]) for c in found["collectives"]] == [("all_reduce", "z")]
    doubled = added = 3 * 3  # of 7 rows of 3 elements a device has 3
    assert found["totals"]["flops_per_device"] == doubled + added + 2 * 3 * 5 * 3


def test_an_index_out_of_range_is_an_error(tmp_path) -> None:
    path = tmp_path / "in.npz"
    given: dict[str, Any] = inputs() | {"ids": np.array([0, 1, 2, 5, 0, 0, 0], np.int32)}
    np.savez(path, **given)
    program = compile_text(body(["y = scatter_add[node = ids](x)"], ["y"]), layout="nodes")
    told = set()
    for engine in ("local", "reference"):
        with pytest.raises(DiagnosticError) as error:
            run(program, engine, InputSource(inputs=str(path)))
        (diagnostic,) = error.value.diagnostics
        assert diagnostic.code == "MD0801"
        told.add(diagnostic.message)
    (message,) = told
    assert "5" in message
    assert "test.mdsl:10" in message


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("scatter_add[node = 5](x)", "MD0210"),
        ("scatter_add[node = w](x)", "MD0211"),
        ("scatter_add[edge = ids](x)", "MD0205"),
        ("scatter_add[feat = ids](x)", "MD0205"),
        ("scatter_add[node = ids](ids > 1)", "MD0202"),
        ("scatter_add[node = ids](x -> [feat])", "MD0204"),
        ("scatter_add[node = ids](x -> [batch, node, feat])", "MD0204"),
        ("scatter_add[node = ids](x -> [node])", "MD0204"),
        ("scatter_add[node = ids](x -> [node, feat, feat])", "MD0205"),
        ("scatter_add[node](x)", "MD0251"),
        ("scatter_add(x, 0, ids, w)", "MD0126"),
        ("segment_sum(x, ids)", "MD0126"),
        ("bincount(ids)", "MD0252"),
    ],
)
def test_what_is_refused(call: str, code: str) -> None:
    with pytest.raises(DiagnosticError) as error:
        compile_text(body([f"y = {call}"], ["y"]), layout="edges")
    assert [d.code for d in error.value.diagnostics] == [code]


def test_in_python() -> None:
    edge, node, feat, batch = md.dims(edge=7, node=5, feat=3, batch=3)

    @md.program
    def sums(x: md.Tensor[edge, feat], each: md.i32[batch, edge]):  # type: ignore[type-arg,valid-type]
        y = md.scatter_add[node](x, each, out=[batch, node, feat])
        return y, md.bincount[node](each)

    given: dict[str, Any] = {name: inputs()[name] for name in ("x", "each")}
    y, counted = sums.compile(md.mesh(p=2), md.layout(edge="p"))(**given)
    want = summed("scatter_add[node = each](x -> [batch, node, feat])")
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(counted, summed("bincount[node](each)"))
