"""Every helper of `support/collectives.py` against numpy, on the in-process engine."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from meshdsl.backends.engines.in_process import run_local
from meshdsl.backends.engines.local_dist import FILE, CoalescedOptions, LocalDist
from meshdsl.backends.runtime.communication import as_received, as_sent
from meshdsl.backends.runtime.values import group_members
from tests.covering import covered
from tests.work import calls

MESHES = [
    ({"r": 2}, ("r",)),
    ({"r": 4}, ("r",)),
    ({"r": 8}, ("r",)),
    ({"a": 2, "b": 2}, ("a",)),
    ({"a": 2, "b": 2}, ("a", "b")),
    ({"a": 2, "b": 4}, ("b",)),
    ({"a": 2, "b": 2, "c": 2}, ("a", "c")),
]
SHAPE = (8, 16, 24)
DRAWN = "{{'x': Spec('f32', {}, {}, ('normal', 1.0))}}"
SOURCES = {"plain": "x", "transposed": "x.movedim(2, 0)", "expanded": "x[:1].expand(8, -1, -1)"}
OPS = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}


def run(emit, mesh, axes, call, dtype, shape):
    """The result of `call` on each device's block of an input; and these blocks."""
    every = tuple(mesh)
    devices = math.prod(mesh.values())
    sizes = {f"d{i}": n for i, n in enumerate(SHAPE)}
    out = {f"d{i}": n for i, n in enumerate(shape)}
    split = f"{{'device': {every}}}"
    text = emit(
        f"x = inputs['x'][0]\ngroup = groups[{'+'.join(axes)!r}]\nreturn {{'y': ({call})[None]}}",
        mesh,
        groups=(axes,),
        inputs=f"{{'x': Spec({dtype!r}, { ({'device': devices} | sizes) }, {split})}}",
        outputs=f"{{'y': Spec({dtype!r}, { ({'device': devices} | out) }, {split})}}",
        use=("all_reduce", "all_gather", "reduce_scatter", "all_to_all"),
    )
    draws = np.random.default_rng(7).integers(-2, 3, (devices, *SHAPE))
    x = draws.astype({"f32": "float32", "i64": "int64", "bool": "bool"}[dtype])
    found = run_local(text, {"x": x})
    return found, x


def source(blocks, name):
    """The blocks as the text's `SOURCES` see them."""
    if name == "transposed":
        return np.moveaxis(blocks, 3, 1)
    return np.broadcast_to(blocks[:, :1], blocks.shape) if name == "expanded" else blocks


@covered(where=MESHES, op=OPS, dtype=("f32", "i64", "bool"), name=SOURCES)
def test_all_reduce(emit, where, op, dtype, name):
    mesh, axes = where
    shape = source(np.zeros((1, *SHAPE)), name).shape[1:]
    found, x = run(emit, mesh, axes, f"all_reduce({SOURCES[name]}, group, {op!r})", dtype, shape)
    for members in group_members(mesh, axes):
        expected = functools.reduce(OPS[op], source(x, name)[members])
        for rank in members:
            np.testing.assert_array_equal(found.outputs["y"][rank], expected)
    n, b = len(members), x[0].nbytes
    assert found.wire_bytes(0) == 2 * (n - 1) * b // n


@covered(where=MESHES, dim=(0, 1, 2), dtype=("f32", "bool"))
def test_all_gather(emit, where, dim, dtype):
    mesh, axes = where
    n = math.prod(mesh[a] for a in axes)
    shape = [size * n if i == dim else size for i, size in enumerate(SHAPE)]
    found, x = run(emit, mesh, axes, f"all_gather(x, {dim}, group)", dtype, shape)
    for members in group_members(mesh, axes):
        expected = np.concatenate([x[rank] for rank in members], dim)
        for rank in members:
            np.testing.assert_array_equal(found.outputs["y"][rank], expected)
    assert found.wire_bytes(0) == (n - 1) * x[0].nbytes


@covered(
    where=MESHES,
    dim=(0, 1, 2),
    how=[("sum", "f32"), ("max", "f32"), ("min", "i64"), ("max", "bool")],
)
def test_reduce_scatter(emit, where, dim, how):
    (mesh, axes), (op, dtype) = where, how
    n = math.prod(mesh[a] for a in axes)
    shape = [size // n if i == dim else size for i, size in enumerate(SHAPE)]
    found, x = run(emit, mesh, axes, f"reduce_scatter(x, {dim}, group, {op!r})", dtype, shape)
    for members in group_members(mesh, axes):
        expected = np.split(functools.reduce(OPS[op], x[members]), n, dim)
        for rank, block in zip(members, expected, strict=True):
            np.testing.assert_array_equal(found.outputs["y"][rank], block)
    assert found.wire_bytes(0) == (n - 1) * x[0].nbytes // n


@covered(where=MESHES, ends=itertools.permutations(range(3), 2), dtype=("f32", "bool"))
def test_all_to_all(emit, where, ends, dtype):
    (mesh, axes), (split, concat) = where, ends
    n = math.prod(mesh[a] for a in axes)
    shape = list(SHAPE)
    shape[split] //= n
    shape[concat] *= n
    found, x = run(emit, mesh, axes, f"all_to_all(x, {split}, {concat}, group)", dtype, shape)
    for members in group_members(mesh, axes):
        whole = np.concatenate([x[rank] for rank in members], concat)
        for rank, block in zip(members, np.split(whole, n, split), strict=True):
            np.testing.assert_array_equal(found.outputs["y"][rank], block)
    assert found.wire_bytes(0) == (n - 1) * x[0].nbytes // n


MEMORIES = {
    **SOURCES,
    "sliced": "torch.cat([x, x, x])[1::3]",
    "in the midst": "torch.cat([x, x, x], 2)[:, :, 24:48]",
    "one number": "x[0, 0, 0].expand(8, 16, 24)",
    "permuted, expanded": "x.movedim(2, 0)[:8, :1].expand(-1, 24, -1)",
    "of each device its own": "x.mT.contiguous().mT if rank % 2 else x",
}
TAKING = (
    "all_reduce({}, group, 'sum')",
    "all_gather({}, 1, group)",
    "reduce_scatter({}, 0, group, 'sum')",
    "reduce_scatter({}, 1, group, 'max')",
    "all_to_all({}, 0, 1, group)",
    "all_to_all({}, 1, 0, group)",
    "all_reduce_bucket([{}, x[0].clone()], group, 'sum')[0]",
    "all_gather_bucket([{}, x[0]], [1, 0], group)[0]",
    "reduce_scatter_bucket([{}, x[0]], [0, 0], group, 'sum')[0]",
    "permute({}, rank, MESH, {{'d': ('r', 's')}}, {{'d': ('s', 'r')}}, groups)",
    "embed_block({}, 1, 3, 48)",
    "halo({}.unsqueeze(2), 0, ('r', 's'), (32, 32), (1, 1, -1, 1, False), 0.0, rank, MESH, groups)",
)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("call", TAKING)
def test_collectives_take_any_memory_and_leave_it(emit, call, memory):
    """An all_reduce may overwrite what it is given; what it is not given it leaves."""
    left = "True" if call.startswith("all_reduce") else "torch.equal(v, before)"
    text = emit(
        f"""
        x = inputs["x"][0]
        group = groups["r+s"]
        v = {MEMORIES[memory]}
        plain, before = v.contiguous().clone(), v.clone()
        expected = {call.format("plain")}
        found = {call.format("v")}
        return {{"y": torch.tensor([torch.equal(found, expected) and {left}])}}
        """,
        {"r": 2, "s": 2},
        groups=(("r", "s"),),
        inputs=DRAWN.format({"d": 4, "a": 8, "b": 16, "c": 24}, {"d": ("r", "s")}),
        outputs="{'y': Spec('bool', {'d': 4}, {'d': ('r', 's')})}",
        use=(call.partition("(")[0],),
    )
    assert run_local(text).outputs["y"].all()


BUCKETS: dict[str, dict[str, int | None]] = {
    "all_reduce": {"x": None, "x[0]": None, "x[0, 0, 0]": None},
    "reduce_scatter": {"x": 1, "x[0].mT": 0},
    "all_gather": {"x": 2, "x[0].mT": 1, "x[0, 0]": 0},
}


@pytest.mark.parametrize("kind", BUCKETS)
@pytest.mark.parametrize(("mesh", "axes"), MESHES)
def test_a_bucket_gives_what_one_after_another_does(emit, mesh, axes, kind):
    dims = BUCKETS[kind]
    tail = "group" if kind == "all_gather" else "group, 'sum'"
    taken = [f"{x}.clone()" for x in dims]
    alone = [
        f"{kind}({x}, {'' if dim is None else f'{dim}, '}{tail})"
        for x, dim in zip(taken, dims.values(), strict=True)
    ]
    at = "" if kind == "all_reduce" else f"{list(dims.values())}, "
    devices, every = math.prod(mesh.values()), tuple(mesh)
    text = emit(
        f"""
        x = inputs["x"][0]
        group = groups[{"+".join(axes)!r}]
        alone = [{", ".join(alone)}]
        together = {kind}_bucket([{", ".join(taken)}], {at}{tail})
        same = [torch.equal(a, b) for a, b in zip(alone, together, strict=True)]
        return {{"y": torch.tensor([all(same)])}}
        """,
        mesh,
        groups=(axes,),
        inputs=DRAWN.format(dict(d=devices, a=8, b=16, c=24), {"d": every}),
        outputs=f"{{'y': Spec('bool', {dict(d=devices)}, {dict(d=every)})}}",
        use=(kind, f"{kind}_bucket"),
    )
    found = run_local(text)
    assert found.outputs["y"].all()
    sent = sorted(found.sent[0].items(), key=lambda item: item[0].line)
    *apart, (bucket, _) = sent
    assert bucket.payload == sum(one.payload * count for one, count in apart)


def test_a_bucket_is_reduced_where_it_is(emit):
    """Nothing is copied into a buffer, and nothing out of one."""
    text = emit(
        """
        x = inputs["x"][0].clone()
        given = [x, x[0].clone(), x[0, 0, 0].clone()]
        summed = all_reduce_bucket(given, groups["r"], "sum")
        same = [a.data_ptr() == b.data_ptr() for a, b in zip(given, summed, strict=True)]
        return {"y": torch.tensor([all(same)])}
        """,
        {"r": 2},
        groups=(("r",),),
        inputs=DRAWN.format({"d": 2, "a": 8, "b": 16, "c": 24}, {"d": ("r",)}),
        outputs="{'y': Spec('bool', {'d': 2}, {'d': ('r',)})}",
        use=("all_reduce_bucket",),
    )
    assert run_local(text).outputs["y"].all()


def test_a_sum_is_taken_in_rank_order_and_is_the_same_everywhere(emit):
    text = emit(
        "return {'y': all_reduce(inputs['x'].clone(), groups['r'], 'sum')}",
        {"r": 8},
        groups=(("r",),),
        inputs="{'x': Spec('f32', {'r': 8, 'n': 999}, {'r': ('r',)}, ('normal', 1.0))}",
        outputs="{'y': Spec('f32', {'one': 1, 'n': 999}, {})}",
        use=("all_reduce",),
    )
    runs = [run_local(text, seed=3) for _ in range(3)]
    assert not any(found.disagreements() for found in runs)
    for found in runs[1:]:
        np.testing.assert_array_equal(found.outputs["y"], runs[0].outputs["y"])


def test_a_group_of_one(emit):
    found, x = run(
        emit, {"r": 1}, ("r",), "all_gather(all_reduce(x, group, 'sum'), 1, group)", "f32", SHAPE
    )
    np.testing.assert_array_equal(found.outputs["y"], x)
    assert found.wire_bytes(0) == 0


def every_half(dtype):
    """Every number of two bytes, NaN of all kinds among them."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    return bits.view(dtype)


def widest(dtype):
    """Numbers over the whole range of a dtype, its ends, zeros of both signs and NaN."""
    kind = torch.int64 if dtype == torch.float64 else torch.int32
    ends = torch.iinfo(kind)
    bits = torch.linspace(ends.min / 2, ends.max / 2, 4001, dtype=torch.float64).to(kind) * 2
    inf, nan = float("inf"), float("nan")
    special = torch.tensor([inf, -inf, nan, -nan, 0.0, -0.0, torch.finfo(dtype).tiny], dtype=dtype)
    return torch.cat([bits.view(dtype), special])


FLOATS = {
    "f16": lambda: every_half(torch.float16),
    "bf16": lambda: every_half(torch.bfloat16),
    "f32": lambda: widest(torch.float32),
    "f64": lambda: widest(torch.float64),
}


@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_integers_in_the_order_of_floats_stand_for_them(dtype, op):
    """Backends reduce integers alike; of floats some keep NaN, others forget it."""
    x = FLOATS[dtype]()
    codes = as_sent(x, op)
    assert codes.dtype in (torch.int32, torch.int64)
    torch.testing.assert_close(as_received(codes, x.dtype), x, rtol=0, atol=0, equal_nan=True)
    numbers = torch.isfinite(x) | torch.isinf(x)
    order = torch.argsort(x[numbers].double(), stable=True)
    ordered = x[numbers][order].double()
    rises = codes[numbers][order].diff() > 0
    assert rises[ordered.diff() > 0].all()
    furthest = codes[numbers].max() if op == "max" else codes[numbers].min()
    assert ((codes[~numbers] > furthest) if op == "max" else (codes[~numbers] < furthest)).all()


def test_sums_integers_and_truth_values_are_sent_as_they_are():
    for x, op in [(torch.ones(2), "sum"), (torch.ones(2).int(), "max"), (torch.ones(2) > 0, "max")]:
        assert as_sent(x, op) is x
        assert as_received(x, x.dtype) is x


CALLS = 240
"""The most calls of two steps of three collectives, one of them on ten tensors."""

STEPS = """
def device(dist, group, xs):
    def backward():
        dist.all_reduce(xs[0], group=group)
        group.allreduce_coalesced(xs, SUM).wait()
    for _ in range(2):
        backward()
        dist.all_reduce(xs[1], group=group)
"""


def test_collectives_are_counted_by_their_lines_in_every_step_with_little_work() -> None:
    dist = LocalDist({"r": 1}, (("r",),))
    options = CoalescedOptions()
    options.reduceOp = "sum"
    program: dict[str, Any] = {"SUM": options}
    exec(compile(STEPS, FILE, "exec"), program)
    xs = [torch.ones(n, 2) for n in range(1, 11)]

    def run() -> None:
        program["device"](dist, dist.groups(0)["r"], xs)

    run()
    sent = {(s.line, s.payload): count for s, count in dist.sent[0].items()}
    assert sent == {(4, 8): 2, (5, 8 * sum(range(1, 11))): 2, (8, 16): 2}
    assert calls(run) <= CALLS
