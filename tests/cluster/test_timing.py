"""Times of collectives and operators: formulas, levels, and meshes that cut them."""

from __future__ import annotations

import itertools
import math

import pytest

from meshdsl.cluster.profile import Cluster, Level, load
from meshdsl.cluster.timing import Timing, interpolated, parts_of
from meshdsl.diagnostics import DiagnosticError
from meshdsl.ir.types import BF16, F32, Dim, TensorType
from meshdsl.ops.opdef import Signature, load_all, lookup
from meshdsl.placed.placements import Mesh

H100 = load("h100")
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute")


def _cluster(*levels: Level) -> Cluster:
    return Cluster("test", H100.device, levels)


def _switch(size: int, alpha: float = 1e-6, rate: float = 1e9, shared_by: int = 1) -> Level:
    return Level(size, "switch", alpha, rate, rate, shared_by)


def _mesh(**axes: int) -> Mesh:
    return Mesh("m", tuple(axes.items()))


def _time(timing: Timing, kind: str, axes: str, payload: int) -> float:
    return timing.collective(kind, tuple(axes), payload).seconds


@pytest.mark.parametrize("n", [2, 4, 8])
def test_formulas_on_a_switch(n: int) -> None:
    timing, b, a, rate = Timing(_cluster(_switch(8)), _mesh(x=n)), 1 << 20, 1e-6, 1e9
    expected = {
        "all_gather": (n - 1) * (a + b / rate),
        "reduce_scatter": (n - 1) * (a + b / n / rate),
        "all_reduce": 2 * (n - 1) * (a + b / n / rate),
        "all_to_all": (n - 1) * (a + b / n / rate),
        "permute": a + b / rate,
    }
    for kind, seconds in expected.items():
        assert _time(timing, kind, "x", b) == pytest.approx(seconds, rel=1e-12)


def test_an_all_to_all_around_a_ring_takes_a_quarter_of_an_all_gather() -> None:
    ring = _cluster(Level(64, "ring", 0.0, 1e9, 1e9))
    for n in (4, 8, 64):
        timing = Timing(ring, _mesh(x=n))
        quarter = _time(timing, "all_gather", "x", 1 << 20) / 4
        assert _time(timing, "all_to_all", "x", 1 << 20) == pytest.approx(quarter)


def test_levels_add_up() -> None:
    """RS inside, AR outside, AG inside; AG outside, then inside; and both mirrored."""
    both = Timing(_cluster(_switch(8, rate=8e9), _switch(4)), _mesh(x=32))
    split = Timing(_cluster(_switch(8, rate=8e9), _switch(4)), _mesh(o=4, i=8))
    b = 1 << 24
    parts = {
        "all_reduce": [
            ("reduce_scatter", "i", b),
            ("all_reduce", "o", b // 8),
            ("all_gather", "i", b // 8),
        ],
        "reduce_scatter": [("reduce_scatter", "i", b), ("reduce_scatter", "o", b // 8)],
        "all_gather": [("all_gather", "o", b), ("all_gather", "i", 4 * b)],
        "all_to_all": [("all_to_all", "o", b), ("all_to_all", "i", b)],
        "permute": [("permute", "o", b)],
    }
    for kind, steps in parts.items():
        total = sum(_time(split, k, axes, size) for k, axes, size in steps)
        assert _time(both, kind, "x", b) == pytest.approx(total)
        assert _time(both, kind, "x", b) == pytest.approx(_time(split, kind, "oi", b))


def test_devices_share_a_link_outside_of_their_node() -> None:
    own, shared = (
        Timing(_cluster(_switch(8), _switch(4, 0.0, shared_by=by)), _mesh(o=4, i=8))
        for by in (1, 8)
    )
    for kind in KINDS:
        assert _time(shared, kind, "o", 1 << 20) == pytest.approx(
            8 * _time(own, kind, "o", 1 << 20)
        )
        assert _time(shared, kind, "i", 1 << 20) == _time(own, kind, "i", 1 << 20)


@pytest.mark.parametrize("name", ["h100", "a100-dgx", "cpu"])
def test_more_takes_longer(name: str) -> None:
    """A collective takes no less time for more bytes, nor for more devices."""
    for kind in KINDS:
        for sizes in ((2, 4, 8), (8, 16, 32)):
            timings = [Timing(load(name), _mesh(x=n)) for n in sizes]
            for one, other in itertools.pairwise(timings):
                if kind == "all_gather":
                    assert _time(one, kind, "x", 1 << 20) <= _time(other, kind, "x", 1 << 20)
        timing = Timing(load(name), _mesh(x=8))
        times = [_time(timing, kind, "x", 1 << k) for k in range(6, 31)]
        assert times == sorted(times)


# --- meshes on levels ------------------------------------------------------------------------


def test_parts_of_axes_are_what_devices_share_groups() -> None:
    """An axis fits where each of its groups has as many members in every machine it touches."""
    for sizes in itertools.product((1, 2, 3, 4, 6), repeat=3):
        _check_parts_of_axes(sizes)


def _check_parts_of_axes(sizes: tuple[int, ...]) -> None:
    cluster = _cluster(_switch(4), _switch(2), _switch(1 << 20))
    parts = parts_of(cluster, list(sizes))
    even = True
    for number, size in enumerate(sizes):
        stride = math.prod(sizes[number + 1 :])
        groups = [
            [start + stride * k for k in range(size)]
            for start in range(math.prod(sizes))
            if start // stride % size == 0
        ]
        for whole in (4, 8):
            counts = {
                len([d for d in group if d // whole == machine])
                for group in groups
                for machine in {d // whole for d in group}
            }
            even = even and len(counts) == 1
            if parts is not None:
                inside = math.prod(parts[number][: 1 if whole == 4 else 2])
                assert counts == {inside}
    assert even == (parts is not None)


@pytest.mark.parametrize(
    ("axes", "nearest"),
    [
        ({"a": 2, "b": 12}, "a:2,b:16"),
        ({"a": 4, "b": 6}, "a:4,b:8"),
        ({"a": 3, "b": 4}, "a:4,b:4"),
    ],
)
def test_an_uneven_axis_is_refused_with_the_nearest_mesh(
    axes: dict[str, int], nearest: str
) -> None:
    with pytest.raises(DiagnosticError, match="MD0323") as raised:
        Timing(H100, _mesh(**axes))
    assert raised.value.diagnostics[0].help == (
        f"write `--mesh '{{ {nearest.replace(':', ': ').replace(',', ', ')} }}'`; the nearest mesh "
        "that fits"
    )


def test_a_mesh_larger_than_the_cluster_is_refused() -> None:
    with pytest.raises(DiagnosticError, match="MD0322: the mesh has 16 devices, but test has 8"):
        Timing(_cluster(_switch(8)), _mesh(x=16))


# --- tables ----------------------------------------------------------------------------------


def test_interpolation_is_a_line_in_logarithms() -> None:
    points = ((100.0, 1e-6), (10000.0, 1e-4))
    assert interpolated(points, 1000) == pytest.approx(1e-5)
    assert interpolated(points, 10) == 1e-6
    assert interpolated(points, 20000) == pytest.approx(2e-4)
    assert [interpolated(points, x) for x, _ in points] == pytest.approx([1e-6, 1e-4])


def test_a_table_is_taken_before_the_formula() -> None:
    table = {("all_reduce", 8, 0): ((1.0, 0.5),)}
    cluster = Cluster("test", H100.device, (_switch(8),), table)
    assert _time(Timing(cluster, _mesh(x=8)), "all_reduce", "x", 1) == 0.5
    assert _time(Timing(cluster, _mesh(x=4)), "all_reduce", "x", 1) < 1e-3


# --- operators -------------------------------------------------------------------------------


def _type(dtype: str = "bf16", **dims: int) -> TensorType:
    return TensorType(tuple(Dim(d, n) for d, n in dims.items()), BF16 if dtype == "bf16" else F32)


def _operator(name: str, *ins: TensorType, out: TensorType, **attrs: object) -> tuple[float, str]:
    signature, opdef = Signature(ins, (out,), attrs), lookup(name)
    flops = out.elements if opdef.flops is None else opdef.flops(signature)
    found = Timing(H100, _mesh(x=2)).operator(opdef, signature, flops)
    return found.seconds, found.bound


def test_what_bounds_an_operator() -> None:
    product = _operator(
        "einsum",
        _type(m=8192, k=8192),
        _type(k=8192, n=8192),
        out=_type(m=8192, n=8192),
        dims=("m", "n"),
    )
    assert product[1] == "compute"
    least = 2 * 8192**3 / 989e12
    reached = H100.device.mm_eff
    assert least / reached < product[0] < least / reached * 1.2
    wide = _type(m=1 << 14, n=1 << 14)
    assert _operator("relu", wide, out=wide)[1] == "memory"
    small = _type(m=4)
    seconds, bound = _operator("relu", small, out=small)
    assert seconds == pytest.approx(7e-6, rel=1e-3)
    assert bound == "launch"


def test_a_view_takes_no_time() -> None:
    views = [opdef for opdef in load_all().values() if opdef.view and opdef.shows is None]
    assert views
    for opdef in views:
        sample = opdef.samples[0]
        outs = opdef.infer(sample.ins, dict(sample.attrs))
        signature = Signature(sample.ins, outs, dict(sample.attrs))
        assert Timing(H100, _mesh(x=2)).operator(opdef, signature, 0).seconds == 0


def test_a_product_does_not_depend_on_the_order_of_its_operands() -> None:
    a, b, out = _type(m=100, k=64), _type(k=64, n=1000), _type(m=100, n=1000)
    one = _operator("einsum", a, b, out=out, dims=("m", "n"))
    assert one == _operator("einsum", b, a, out=out, dims=("m", "n"))


def test_the_gradient_of_a_kernel_is_a_product_with_all_its_windows() -> None:
    """As im2col has it: colors and windows on one side, the channels of the result on the other."""
    h, w = Dim("h", 224), Dim("w", 224)
    image = TensorType((Dim("n", 32), Dim("c", 3), h, w), BF16)
    windows, made = (Dim("kh", 11), Dim("kw", 11)), (Dim("h1", 55), Dim("w1", 55))
    dy = TensorType((Dim("n", 32), Dim("o", 512), *made), BF16)
    kernel = TensorType((Dim("o", 512), Dim("c", 3), *windows), BF16)
    slid = {"source": (h, w), "window": windows, "target": made, "stride": 4, "pad": 2}
    found = _operator("conv_kernel", image, dy, out=kernel, **slid, dilation=1, dims=kernel.dims)
    rows, columns = _type(p=32 * 55 * 55, i=3 * 11 * 11), _type(p=32 * 55 * 55, o=512)
    product = _operator("einsum", rows, columns, out=_type(i=363, o=512), dims=("i", "o"))
    assert found[1] == product[1] == "compute"
    assert found[0] == pytest.approx(product[0], rel=1e-9)


def test_a_sum_of_products_is_bound_by_memory() -> None:
    """A dot product, and the products of a batch, have no sides."""
    a = _type(k=1 << 24)
    assert _operator("einsum", a, a, out=_type(), dims=())[1] == "memory"
    b = _type(m=1 << 12, n=1 << 12)
    assert _operator("einsum", b, b, out=b, dims=("m", "n"))[1] == "memory"


def test_attention_runs_on_the_units_for_products() -> None:
    """A triangle is half of the scores where the kernel knows it; a mask leaves nothing out."""
    timing, seq, mem = Timing(H100, _mesh(x=2)), Dim("seq", 4096), Dim("mem", 4096)
    key, k = Dim("key", 128), _type(kv=8, mem=4096, key=128)
    for causal, group, computed in (((), 1, 1.0), ((seq,), 1, 0.5), ((seq,), 2, 1.0)):
        heads = (Dim("kv", 8), *([Dim("group", group)] if group > 1 else []))
        q = TensorType((*heads, seq, key), k.dtype)
        attrs = {"dims": (key, mem), "out": q.dims, "scale": None, "causal": causal}
        flops = 4 * 8 * group * 4096 * 4096 * 128
        found = timing.operator(lookup("attention"), Signature((q, k, k), (q,), attrs), flops)
        assert found.bound == "compute"
        assert found.seconds == pytest.approx(computed * flops / (989e12 * 0.34) + 7e-6)
