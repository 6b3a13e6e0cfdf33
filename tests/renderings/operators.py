"""Calls of operators whose texts elsewhere are no mere function of operands, under every split."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from meshdsl.diagnostics import DiagnosticError, Diagnostics, Source
from meshdsl.pipeline import Compilation, Options, compile_source

_DIMS = """
dim b = 4, t = 4, c = 4, o = 4, g = 4, one = 1, n = 8, h = 8, w = 8, ho = 4, wo = 4, d = 4
dim kh = 3, kw = 3, kd = 2, h5 = 5, k = 4
"""

CALLS = {
    "conv": 'x[b, c, h, w], y[o, c, kh, kw]: conv[h by kh, w by kw](x, y, pad="same")',
    "conv, strided": "x[b, h, w, c], y[kh, kw, c, o]: "
    "conv[h by kh -> ho, w by kw -> wo](x, y, stride=2, pad=1 -> [b, ho, wo, o])",
    "conv, uneven margins": "x[b, c, h, w], y[o, c, kh, kw]: "
    'conv[h by kh -> ho, w by kw -> wo](x, y, stride=2, pad="same")',
    "conv, groups": "x[b, g, c, h], y[g, o, c, kh]: "
    'conv[h by kh](x, y, pad="same" -> [b, h, g, o])',
    "conv, depthwise": 'x[b, c, h], y[c, kh]: conv[h by kh](x, y, pad="same" -> [b, c, h])',
    "conv, two batches": 'x[b, t, h], y[o, kh]: conv[h by kh](x, y, pad="same", dilation=2)',
    "conv, of three dims": "x[d, h, w], y[kd, kh, kw]: "
    'conv[d by kd, h by kh, w by kw](x, y, pad="same")',
    "upconv": "x[b, c, ho, wo], y[c, o, kh, kw]: "
    'upconv[ho by kh -> h, wo by kw -> w](x, y, stride=2, pad="same")',
    "upconv, groups": "x[b, g, c, ho], y[g, c, o, kh]: "
    "upconv[ho by kh -> h](x, y, stride=2, pad=1 -> [b, g, o, h]) ",
    "max_pool": "x[b, c, h, w]: max_pool[h by 2 -> ho, w by 2 -> wo](x)",
    "max_pool, overlapping": "x[h, b, w]: "
    'max_pool[h by 3 -> ho, w by 3 -> wo](x, stride=2, pad="same")',
    "avg_pool": 'x[b, h]: avg_pool[h by 3](x, stride=1, pad="same")',
    "avg_pool of elements": 'x[b, h]: avg_pool[h by 3](x, stride=1, pad="same", pad_counts=0)',
    "window": "x[b, h]: window[h by 3 -> kh](x, before=2)",
    "top_k": "x[b, n]: top_k[n -> k](x)",
    "top_k of equals": "x[b, n]: top_k[n -> k](floor(x))",
    "sort": "x[b, n, t]: sort[n](x)",
    "put": "x[b, n], y[b], i: i32: put[n = i](x, y)",
    "put, an index each": "x[b, n], y[b], i[b]: i32: put[n = i](x, y)",
    "scatter_add": "x[b, t], i[b]: i32: scatter_add[n = i](x)",
    "scatter_add of rows": "x[b, t], i[t, b]: i32: scatter_add[n = i](x -> [t, n])",
    "scatter_add of all": "x[b, t, k], i[b, t]: i32: scatter_add[n = i](x -> [n, k])",
    "grouped_einsum": "x[b, n], y[k, n, c], z[k]: i32: grouped_einsum(x, y, z -> [b, c])",
    "roll": "x[b, n]: roll[n](x, by=3)",
    "reverse": "x[b, n]: reverse[n](x)",
    "cumprod": "x[b, n]: cumprod[n](x)",
    "linear_recurrence": "x[b, n], y[n, t]: linear_recurrence[n](x, y)",
    "linear_recurrence, initial": "x[n], y[b, n, t], z[t]: "
    "linear_recurrence[n](x, y, z, reverse=1)",
    "logaddexp": "x[b, n], y[n]: logaddexp(x, y)",
}
"""The inputs and the call, by a name."""

LAYOUTS = (
    "b -> p",
    "c -> p, o -> q",
    "g -> p",
    "b -> p, g -> q",
    "h -> p, ho -> p",
    "h -> p, ho -> p, w -> q, wo -> q",
    "n -> p, t -> q, b -> q",
    "d -> p",
)
MESHES = {2: ("p:2,q:1",), 4: ("p:2,q:2",)}


def texts() -> Iterator[tuple[str, str, str]]:
    """Name, layout and text of every program."""
    for (name, call), layout in itertools.product(CALLS.items(), LAYOUTS):
        inputs, _, expression = call.partition(": ")
        if expression.startswith("i32"):
            more, _, expression = expression.partition(": ")
            inputs = f"{inputs}: {more}"
        dims = {rule.split(" -> ")[0] for rule in layout.split(", ")}
        if not any(f"{dim}," in call or f"{dim}]" in call for dim in dims):
            continue
        outs = "y1, y2" if name.startswith(("top_k", "sort")) else "y1"
        body = f"  {outs} = {expression}\n  return {outs}\n"
        yield name, layout, f"{_DIMS}layout l {{ {layout} }}\nprogram p({inputs}) {{\n{body}}}\n"


def cases(devices: int, reduce: str, step: int = 1) -> Iterator[tuple[str, Compilation, str]]:
    """Every so many-th of the programs, compiled, with its mesh.

    Layouts that a call refuses are left out.
    """
    every = itertools.product(texts(), MESHES[devices])
    for (name, layout, text), mesh in itertools.islice(every, 0, None, step):
        options = Options(mesh=mesh, layout="l", reduce=reduce, fused=False)
        source = Source(f"{name}.mdsl", text)
        try:
            made = compile_source(source, options, Diagnostics(), "placed")
        except DiagnosticError as error:
            if not all(d.code.startswith("MD03") for d in error.diagnostics):
                raise
            continue
        yield f"{name}, {layout}", made, mesh
