"""Special values × operators × splits × dtypes × engines: what one device yields, all yield."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from meshdsl.backends.engines.in_process import run_local
from meshdsl.backends.engines.persistent import PersistentEngine
from meshdsl.backends.engines.reference import run_reference
from meshdsl.backends.runtime.values import Array, cast
from meshdsl.ir.types import DTYPES, Dim
from meshdsl.named.dtype_override import retype
from meshdsl.named.passes import simplify
from meshdsl.ops.samples import BATCH, HIDDEN, SEQ, VOCAB
from meshdsl.report.explanation import explain
from tests.compiling import compile_text, run_text
from tests.covering import in_turn
from tests.programs.harness import check_bytes
from tests.programs.special import (
    ENDLESS,
    FILLS,
    INF,
    NAN,
    SPREADING,
    TOLERANCES,
    Special,
    difference,
    drawn,
    engine,
    every_gradient,
    every_monotone_operator,
    every_operator,
    reach,
    rounded,
    run,
    samples,
)
from tests.ranks import Forks

FLOATS = ("f32", "f16", "bf16", "f64")

# --- every operator ---------------------------------------------------------------------------

WIDE = {BATCH: Dim("b", 4), SEQ: Dim("s", 4), HIDDEN: Dim("h", 8), VOCAB: Dim("v", 8)}
"""The dims of the samples, of sizes that four devices can split."""

LAYOUTS = [
    ("own", "x:2", "b -> x"),
    ("own", "x:2", "s -> x"),
    ("own", "x:2", "h -> x"),
    ("own", "x:2", "v -> x"),
    ("own", "x:2,y:2", "h -> x, ho -> x, w -> y"),
    ("own", "x:2,y:2", "o -> x, c -> y"),
    ("wide", "x:4", "h -> x"),
    ("wide", "x:2,y:2", "s -> (x, y)"),
    ("wide", "x:2,y:2", "v -> (y, x)"),
    ("wide", "x:2,y:2", "s -> x, h -> y"),
]

ALL = "MESHDSL_CASES" in os.environ
ALWAYS = LAYOUTS if ALL else [LAYOUTS[0], LAYOUTS[4], LAYOUTS[5], LAYOUTS[8]]
"""All dims of the samples are split in some of these; the others with `MESHDSL_CASES`."""

FEW = [("f16", LAYOUTS[1]), *((f, LAYOUTS[9]) for f in (FLOATS[1:] if ALL else FLOATS[2:]))]
"""The layouts for dtypes other than f32."""

INFINITE_COTANGENTS = {
    "layer_norm": "of an infinite scale, what rounding leaves of x - mean(x) decides",
    "layer_norm_grad": "torch's kernel yields NaN or an infinity as it rounds",
    "cross_entropy_grad": "torch subtracts it at the target, parts multiply it",
    "batch_norm_grad": "the kernel that parts use makes x * slope + offset of it",
}
"""Operators in which one non-finite number may replace another, and why."""

COARSE = {"layer_norm_grad": 4}
"""Times the tolerance: torch's kernel has mean and deviation in the narrow dtype."""

SCANNED = {
    "linear_recurrence": "a sum times infinity is not the sum of what infinity makes of parts"
}
MULTIPLIED_LATER = {"einsum": SCANNED["linear_recurrence"], **SCANNED}
"""Operators not compared where there are infinities, and why."""


LONE = {
    "lone s, v": {BATCH: Dim("b", 2), SEQ: Dim("s", 1), HIDDEN: Dim("h", 2), VOCAB: Dim("v", 1)},
    "lone b, h": {BATCH: Dim("b", 1), SEQ: Dim("s", 2), HIDDEN: Dim("h", 1), VOCAB: Dim("v", 2)},
}
"""Dims of a single element: where they are split, one device has all and the others have nothing.
"""

OF_TERMS = {"rms_norm_grad": "of one element nothing is left of terms as large as the cotangents"}
"""Operators whose results are held to the size of their operands, and why."""

ON_ONE = [
    ("lone s, v", "x:3", "v -> x"),
    ("lone s, v", "x:2,y:2", "s -> x, v -> y"),
    ("lone b, h", "x:2,y:2", "b -> y, h -> x"),
]
if ALL:
    ON_ONE += [
        ("lone s, v", "x:2", "s -> x"),
        ("lone b, h", "x:2", "b -> x"),
        ("lone b, h", "x:3", "h -> x"),
    ]


@functools.cache
def operators(dims: str, dtype: str) -> tuple[Special, PersistentEngine]:
    """Every operator in one program, and that on one device."""
    made = every_operator({"own": {}, "wide": WIDE, **LONE}[dims], DTYPES[dtype])
    return made, engine(made.program)


OF_BITS = {"pack_int8": "the bits of a scale that is NaN say which one it is"}
"""Operators whose results are not compared where there is a NaN, and why."""


def fills(turn: int) -> list[str]:
    """A third of the kinds of values, all in three turns; with `MESHDSL_CASES` all."""
    return list(FILLS) if ALL else list(FILLS)[turn % 3 :: 3]


def wrong(
    made: Special, found: Callable[[Mapping[str, Array]], Mapping[str, Array]],
    expected: Callable[[Mapping[str, Array]], Mapping[str, Array]], dtype: str,
    left_out: Mapping[str, str] = MULTIPLIED_LATER, turn: int = 0,
) -> list[tuple[str, str, str]]:  # fmt: skip
    """The differences: the kind of values, the operator, and the text; of the kinds of a turn."""
    bad = []
    makers = {op.outs[0]: op for op in made.body}
    for fill in fills(turn):
        inputs = drawn(made, fill)
        got, wanted = found(inputs), expected(inputs)
        for output in made.outputs:
            name = output.name.partition(".")[0]
            if fill in ENDLESS and name in left_out:
                continue
            if name in OF_BITS and any(np.isnan(array).any() for array in inputs.values()):
                continue
            kinds = name not in INFINITE_COTANGENTS
            coarsest = max(TOLERANCES[dtype], TOLERANCES.get(output.value.type.dtype.name, 0))
            tolerance = COARSE.get(name, 1) * coarsest
            if name in OF_TERMS and fill == "hundreds":
                tolerance *= 1000
            pair = got[output.name], wanted[output.name]
            if name in SPREADING:
                reached = reach(made, makers[output.value], fill)
                pair = reached.compared(pair[0]), reached.compared(pair[1])
            how = difference(*pair, tolerance, kinds=kinds)
            bad += [(fill, output.name, how)] if how else []
    return bad


SPLIT = [*((*where, "f32") for where in ALWAYS), *((*where, dtype) for dtype, where in FEW)]


@pytest.mark.parametrize("turn", range(len(SPLIT)))
def test_every_split_yields_what_one_device_does(turn: int) -> None:
    dims, mesh, rules, dtype = SPLIT[turn]
    every, alone = operators(dims, dtype)
    made = every.along(rules)
    parts = engine(made.program, mesh, rules)
    assert not wrong(made, lambda x: run(parts, x), lambda x: run(alone, x), dtype, turn=turn)


@pytest.mark.parametrize("turn", range(len(ON_ONE)))
def test_devices_that_have_nothing_add_nothing(turn: int) -> None:
    """One device does all; what the others give is neutral, whatever the values are."""
    dims, mesh, rules = ON_ONE[turn]
    every, alone = operators(dims, "f32")
    made = every.along(rules)
    parts = engine(made.program, mesh, rules)
    bad = wrong(made, lambda x: run(parts, x), lambda x: run(alone, x), "f32", {}, turn)
    assert not [b for b in bad if not is_right(made, parts, *b[:2])]


NEVER_LONE = [
    ("x:5", "s -> x"),
    ("x:5", "h -> x"),
    ("x:4", "b -> x, kh -> x"),
    ("x:5", "v -> x, n -> x, t -> x, kd -> x"),
    ("x:5", "w -> x, k -> x, p -> x, m -> x"),
    ("x:3", "c -> x, part -> x"),
    ("x:3", "d -> x, r -> x, g -> x"),
    ("x:5", "o -> x, left -> x"),
    ("x:5", "ho -> x, right -> x"),
]
"""Layouts of the samples whose dims cannot be of one element: on each some devices have nothing."""


@pytest.mark.parametrize("turn", range(len(NEVER_LONE)))
def test_devices_after_the_last_element_add_nothing(turn: int) -> None:
    """As above, of operators with windows, positions or sizes: the first devices do all."""
    every, alone = operators_with_sizes()
    mesh, rules = NEVER_LONE[turn]
    made = every.along(rules)
    parts = engine(made.program, mesh, rules)
    bad = wrong(made, lambda x: run(parts, x), lambda x: run(alone, x), "f32", SCANNED, turn)
    assert not [b for b in bad if not is_right(made, parts, *b[:2])]


@functools.cache
def operators_with_sizes() -> tuple[Special, PersistentEngine]:
    """The operators that no sample of `LONE` has, and that on one device."""
    plain = {name for name, *_ in samples({}, DTYPES["f32"])}
    lone = {name for dims in LONE.values() for name, *_ in samples(dims, DTYPES["f32"])}
    assert 30 < len(plain - lone) < 45
    made = every_operator({}, DTYPES["f32"], plain - lone)
    return made, engine(made.program)


NAN_IS_LOST = ("attention.17", "attention_lse.22")
"""Samples without a mask, for which torch's kernel yields 0 where a query of NaN has one key."""


def is_right(made: Special, parts: PersistentEngine, fill: str, name: str) -> bool:
    """Whether a split operator yields what its meaning says, and one device does not."""
    if name not in NAN_IS_LOST or fill not in ("one NaN", "everything"):
        return False
    inputs = drawn(made, fill)
    expected = run_reference(made.program, inputs, {})[name]
    return not difference(run(parts, inputs)[name], expected, TOLERANCES["f32"])


def test_a_kernel_of_torch_hides_that_a_query_is_nan() -> None:
    """The reason for the exception above: with one key the result is 0, not NaN."""
    query, key = torch.full((1, 1, 1, 2), NAN), torch.ones(1, 1, 1, 2)
    found = torch.nn.functional.scaled_dot_product_attention(query, key, key)
    assert torch.equal(found, torch.zeros(1, 1, 1, 2))


SUMS_OF_NOTHING = """
dim b = 4, d = 1, e = 2
program p(x[b], v[b], y[b, d], t[b, d], m[b, e]) {
  s = sum[d](y)
  both = s * x + sum[d](t) * v
  quotient = s / x
  scaled = (s * 2.0) * x
  negated = -s * x
  product = einsum(s, m -> [e])
  mean = mean[d](y) * x
  chained = (s + sum[d](t)) * x * v
  picked = where(x > 0.0, s, sum[d](t)) * x
  slope = grad(sum(s * x * v), y)
  return both, quotient, scaled, negated, product, mean, chained, picked, slope
}
"""


@pytest.mark.parametrize("policy", ["immediate", "mesh-tf", "deferred", "optimal"])
@pytest.mark.parametrize(("mesh", "layout"), [("a:3", "d:a"), ("a:2,c:2", "d:a,b:c")])
def test_sums_of_nothing_meet_infinities(mesh: str, layout: str, policy: str) -> None:
    """A device that has nothing of a summed dim adds 0 after a product with infinity as well."""
    x, v = np.array([INF, -INF, 0, 2]), np.array([1, INF, -INF, 0])
    inputs = {"x": x, "v": v, "y": np.array([[2], [3], [-1], [0]]), "t": np.ones((4, 1))}
    inputs |= {"m": np.array([[INF, 1], [1, NAN], [0, -INF], [2, 2]])}
    arrays = {n: a.astype(np.float32) for n, a in inputs.items()}
    expected = run_text(SUMS_OF_NOTHING, arrays)
    found = run_text(SUMS_OF_NOTHING, arrays, mesh=mesh, layout=layout, reduce=policy)
    for name, array in expected.items():
        assert not difference(found[name], array, 1e-6), name


@pytest.mark.parametrize(("mesh", "rules"), [("x:2,y:2", "along -> (y, x)")])
def test_extremes_pass_unreduced_only_where_that_changes_nothing(mesh: str, rules: str) -> None:
    made = every_monotone_operator(DTYPES["f32"], Dim("along", 4))
    assert len(made.outputs) > 100
    alone, parts = engine(made.program), engine(made.program, mesh, rules)
    assert not wrong(made, lambda x: run(parts, x), lambda x: run(alone, x), "f32")


NORM = "torch's kernel makes x * slope + offset of it, with NaN in both where something is infinite"
OF_TORCH = {
    "gelu": (ENDLESS, "of infinity, torch's f32 kernel for CPUs makes NaN"),
    "batch_norm_stats": (ENDLESS, NORM),
    "frozen_batch_norm": (ENDLESS, NORM),
    "batch_norm_input_grad": (ENDLESS, NORM),
    "batch_norm_grad": (("hundreds",), "torch sums in f16 if a tensor is strided: too large a sum"),
}
"""Operators in which the reference differs, of which kinds of values, and why."""


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_reference_yields_what_one_device_does(dtype: str) -> None:
    made, alone = operators("own", dtype)
    types = {o.name: o.value.type.dtype for o in made.outputs}
    program = made.program

    def reference(inputs: Mapping[str, Array]) -> dict[str, Array]:
        found = run_reference(program, inputs, {})
        return {name: rounded(array, types[name]) for name, array in found.items()}

    bad = wrong(made, lambda x: run(alone, x), reference, dtype, turn=FLOATS.index(dtype))
    assert not [b for b in bad if b[0] not in OF_TORCH.get(b[1].partition(".")[0], ((), ""))[0]]


# --- dtypes of gradients ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f64"])
def test_gradients_of_every_operator_in_every_dtype(dtype: str) -> None:
    """`--dtype` of a program that has them: they compile, and are those of f32."""
    made, alone = gradients_of_f32()
    inputs = drawn(made, "quarters")
    program = simplify(retype(made.program, DTYPES[dtype]))
    types = {v.label: v.type.dtype for v in program.inputs}
    narrow = {n: cast(np.asarray(a, types[n].numpy), types[n].name) for n, a in inputs.items()}
    found, expected = run(engine(program), narrow), run(alone, inputs)
    tolerance = 4 * max(TOLERANCES[dtype], TOLERANCES["f32"])
    assert len(expected) > 400
    for name, array in expected.items():
        how = difference(found[name], array, tolerance)
        assert not how, f"{name}: {how}"


@functools.cache
def gradients_of_f32() -> tuple[Special, PersistentEngine]:
    """The gradients of every operator, on one device."""
    made = every_gradient({})
    return made, engine(made.program)


@pytest.mark.parametrize("turn", [1, 2])
def test_gradients_of_devices_that_have_nothing_add_nothing(turn: int) -> None:
    """All but those of attention, whose kernel meets what is not finite behind the mask."""
    dims, mesh, rules = ON_ONE[turn]
    made = every_gradient(LONE[dims])
    alone, parts = engine(made.program), engine(made.program, mesh, rules)
    for fill in fills(turn):
        inputs = drawn(made, fill)
        found, expected = run(parts, inputs), run(alone, inputs)
        for name in (n for n in expected if n.partition(".")[0] not in SPREADING):
            how = difference(found[name], expected[name], 1e-4, kinds=False)
            assert not how, f"{fill}, {name}: {how}"


# --- gradients --------------------------------------------------------------------------------

ROWS = 16
CALLS: dict[str, tuple[str, Callable[..., torch.Tensor]]] = {
    "sum": ("sum[d](x)", lambda x, ids, w: x.sum(1)),
    "mean": ("mean[d](x)", lambda x, ids, w: x.mean(1)),
    "max": ("max[d](x)", lambda x, ids, w: x.amax(1)),
    "min": ("min[d](x)", lambda x, ids, w: x.amin(1)),
    "logsumexp": ("logsumexp[d](x)", lambda x, ids, w: x.logsumexp(1)),
    "softmax": ("softmax[d](x)", lambda x, ids, w: x.softmax(1)),
    "log_softmax": ("log_softmax[d](x)", lambda x, ids, w: x.log_softmax(1)),
    "cross_entropy": (
        "cross_entropy[d](x, ids)",
        lambda x, ids, w: torch.nn.functional.cross_entropy(x, ids, reduction="none"),
    ),
    "layer_norm": ("layer_norm[d](x)", lambda x, ids, w: torch.layer_norm(x, x.shape[1:])),
    "rms_norm": (
        "rms_norm[d](x)",
        lambda x, ids, w: torch.nn.functional.rms_norm(x, x.shape[1:], eps=1e-6),
    ),
    "cumsum": ("cumsum[d](x)", lambda x, ids, w: x.cumsum(1)),
    "maximum": ("maximum(x, w)", lambda x, ids, w: torch.maximum(x, w)),
    "minimum": ("minimum(x, w)", lambda x, ids, w: torch.minimum(x, w)),
    "abs": ("abs(x)", lambda x, ids, w: x.abs()),
    "relu": ("relu(x)", lambda x, ids, w: x.relu()),
}
"""Functions of `x[c, d]`, in the language and in torch; `ids[c]` index d, `w` is like x."""


def differentiated(dtype: str) -> str:
    """A program that returns every function and its gradient."""
    lines = "".join(
        f"  y_{n} = {call}\n  dx_{n} = grad(sum(y_{n} * {'w' if keeps(n) else 'v'}), x)\n"
        for n, (call, _) in CALLS.items()
    )
    given = ", ".join(f"{p}_{n}" for n in CALLS for p in ("y", "dx"))
    inputs = f"x[c, d]: {dtype}, w[c, d]: {dtype}, v[c]: {dtype}, ids[c]: i32"
    return f"dim c = {ROWS}, d = 8\nprogram p({inputs}) {{\n{lines}  return {given}\n}}\n"


def keeps(name: str) -> bool:
    """Whether a function of `CALLS` keeps the dim d."""
    of_rows = ("sum", "mean", "max", "min", "logsumexp", "cross_entropy")
    return name not in of_rows


def rows_of_all_fills(floats: str) -> dict[str, Array]:
    """The inputs of `differentiated`: a row of x for each fill, everything else plain numbers."""
    rng = np.random.default_rng(5)
    x = np.array([fill(rng, (8,)) for fill in FILLS.values()])
    plain = {n: rng.normal(size=s) for n, s in (("x", (ROWS, 8)), ("w", (ROWS, 8)), ("v", ROWS))}
    plain["x"][: len(x)] = x
    found = {n: a.astype(DTYPES[floats].numpy) for n, a in plain.items()}
    return {**found, "ids": rng.integers(0, 8, ROWS).astype(np.int32)}


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_gradients_of_one_device_are_those_of_torch(dtype: str) -> None:
    inputs = rows_of_all_fills(dtype)
    found = run_text(differentiated(dtype), inputs)
    x, w, v, ids = (torch.tensor(inputs[n]) for n in ("x", "w", "v", "ids"))
    for name, (_, function) in CALLS.items():
        leaf = x.clone().requires_grad_()
        y = function(leaf, ids.long(), w)
        y.backward(w if keeps(name) else v)
        assert leaf.grad is not None
        for prefix, tensor in (("y", y.detach()), ("dx", leaf.grad)):
            how = difference(found[f"{prefix}_{name}"], tensor.numpy(), TOLERANCES[dtype])
            assert not how, f"{prefix}_{name}: {how}"


SPLITS = [("x:2", "d:x"), ("x:4", "d:x"), ("x:2,y:2", "c:x,d:y")]


@in_turn(dtype=FLOATS, split=SPLITS)
def test_gradients_of_splits_are_those_of_one_device(dtype: str, split: tuple[str, str]) -> None:
    mesh, layout = split
    text, inputs = differentiated(dtype), rows_of_all_fills(dtype)
    options = {"mesh": mesh, "layout": layout, "reduce": "deferred"}
    expected, found = run_text(text, inputs), run_text(text, inputs, **options)
    for name, array in found.items():
        how = difference(array, expected[name], TOLERANCES[dtype])
        assert not how, f"{name}: {how}"


LONG = """
dim c = 2, d = 70_000
program p(x[c, d], k[c, d]) {
  average = mean[d](k)
  all = mean(k)
  rms = rms_norm[d](k)
  layer = layer_norm[d](k)
  soft = softmax[d](x)
  log_soft = log_softmax[d](x)
  lse = logsumexp[d](x)
  loss = cross_entropy[d](x, argmax[d](x))
  slope = grad(mean(rms_norm[d](k) * k), k)
  return average, all, rms, layer, soft, log_soft, lse, loss, slope
}
"""


@in_turn(mesh=("x:1", "x:2", "x:4"), dtype=("f16", "bf16"))
def test_sums_on_the_way_do_not_fill_a_narrow_dtype(mesh: str, dtype: str) -> None:
    """Of means of hundreds, their norms, and 70,000 equal logits: as in f32."""
    k = np.random.default_rng(0).uniform(100, 900, (2, 70_000)).astype(np.float16)
    inputs = {"x": np.zeros_like(k), "k": k}
    wide = {n: a.astype(np.float32) for n, a in inputs.items()}
    found = run_text(LONG, inputs, mesh=mesh, layout="d:x", dtype=dtype)
    for name, expected in run_text(LONG, wide).items():
        how = difference(found[name], expected, TOLERANCES[dtype])
        assert not how, f"{name}: {how}"
        assert np.max(np.abs(found[name])) > 0.5 * np.max(np.abs(expected))


# --- what passes maxima on, and real processes --------------------------------------------------

STATEMENTS = """
top = max[d](x)
low = min[d](x)
where_top = argmax[d](x)
both = max[d, e](z)
parts = max[d](z)
shared[c, e@y] = max[d](z * 2.0)
above = max[d](y) > 0.0
below = max[d](square(y)) <= v
signs = sign(max[d](y * 2.0))
logs = log(max[d](y * 3.0))
roots = sqrt(min[d](y))
kept = maximum(max[d](y * 4.0), v)
some = any[d](x > 0.0)
each = all[d](x == x)
total = sum[d](x)
average = mean[d](x)
product = prod[d](x)
running = cumsum[d](x)
lse = logsumexp[d](x)
lse_both = logsumexp[e, d](z)
where_both = argmax[e, d](z)
soft = softmax[d](x)
log_soft = log_softmax[d](x)
loss = cross_entropy[d](x, ids)
layer = layer_norm[d](x)
rms = rms_norm[d](x)
"""
OF_INTEGERS = """
top = max[d](x)
low = min[d](x)
where_top = argmax[d](x)
total = sum[d](x)
whole = cast(sum[d](y), i64)
after = max[d](y) + 1
narrow = cast(min[d](y), i32)
running = cumsum[d](x)
"""
INPUTS = {"x": "[c, d]", "y": "[c, d]", "z": "[c, d, e]", "v": "[c]", "ids": "[c]: i32"}


def of_each(*dtypes: str) -> tuple[str, dict[str, Array]]:
    """A program of the statements for each dtype, and its inputs: a row for each fill."""
    lines, given, names, arrays = [], [], [], dict[str, Array]()
    for dtype in dtypes:
        own = {n: t if ":" in t else f"{t}: {dtype}" for n, t in INPUTS.items()}
        given += [f"{n}_{dtype}{t}" for n, t in own.items()]
        arrays |= {f"{n}_{dtype}": a for n, a in inputs_of(dtype).items()}
        for line in (OF_INTEGERS if dtype[0] == "i" else STATEMENTS).split("\n"):
            for name in INPUTS:
                line = re.sub(rf"(?<=[( ]){name}\b", f"{name}_{dtype}", line)
            name, equals, call = line.partition(" = ")
            name, bracket, dims = name.partition("[")
            lines += [f"  {name}_{dtype}{bracket}{dims}{equals}{call}"] if call else []
            names += [f"{name}_{dtype}"] if call else []
    head = f"dim c = {ROWS}, d = 8, e = 4\nprogram p({', '.join(given)}) {{\n"
    return head + "\n".join([*lines, f"  return {', '.join(names)}\n}}\n"]), arrays


def inputs_of(dtype: str) -> dict[str, Array]:
    """The inputs of the statements in one dtype."""
    rng = np.random.default_rng(6)
    if dtype[0] == "i":
        own = np.iinfo(dtype.replace("i", "int"))
        ends = [own.max, own.min, 0, 1, -1]
        found = {"x": rng.choice(ends, (ROWS, 8)), "v": rng.choice(ends, ROWS)}
    else:
        found = {n: a for n, a in rows_of_all_fills(dtype).items() if n in ("x", "v")}
    ids = rng.integers(0, 8, ROWS).astype(np.int32)
    found |= {"y": found["x"], "z": np.stack([found["x"]] * 4, 2)}
    return {n: a.astype(DTYPES[dtype].numpy) for n, a in found.items()} | {"ids": ids}


def assert_same(found: Mapping[str, Array], expected: Mapping[str, Array]) -> None:
    for name, array in expected.items():
        tolerance = TOLERANCES.get(name.rpartition("_")[2], 0)
        how = difference(found[name], array, tolerance)
        assert not how, f"{name}: {how}"


@in_turn(dtype=(*FLOATS, "i32", "i64"), policy=("immediate", "deferred", "optimal"))
def test_policies_yield_what_one_device_does(dtype: str, policy: str) -> None:
    """And every device sends the bytes that are predicted: maxima of f16 and bf16 take four."""
    text, inputs = of_each(dtype)
    made = compile_text(text, mesh="x:2,y:2", layout="c:x,d:y", reduce=policy)
    parts = run_local(made.text, inputs)
    assert_same(parts.outputs, run_text(text, inputs))
    check_bytes(explain(made.device), parts)


def test_real_processes_yield_what_one_device_does(forks: Forks, tmp_path: Path) -> None:
    text, inputs = of_each("f32", "f16", "bf16", "i32")
    made = compile_text(text, mesh="x:2,y:2", layout="d:x,d:y", reduce="deferred")
    found = forks.run_gloo(made.text, inputs, tmp_path, world=4)
    assert_same(found, run_text(text, inputs))


PARTIAL = """
dim c = 4
mesh line = { a: 2 }
program p(x[c], y[c]) {
  z = x + y
  return z
}
sbp parts { x: P, y: P, z: P }
"""


def test_parts_of_an_input_that_is_infinite_are_zeros() -> None:
    """One device has the whole of a partial input; the others have zeros, not infinity times 0."""
    made = compile_text(PARTIAL, mesh="line", sbp="parts").emitted
    inputs = {n: np.array([INF, -INF, 1, 0], np.float32) for n in ("x", "y")}
    parts = PersistentEngine(made)
    again = run(parts, inputs)
    expected = 2 * inputs["x"]
    assert np.array_equal(run_local(made.text, inputs).outputs["z"], expected)
    assert np.array_equal(again["z"], expected)
