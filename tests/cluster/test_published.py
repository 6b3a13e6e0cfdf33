"""The cost model against published figures: formulas of the Scaling Book, NCCL's measured tables.

`How to Scale Your Model` (Austin et al. 2025) is at jax-ml.github.io/scaling-book. Tables of H100
are those of colls8_8.table of meta-pytorch/autoparallel; that of A100 is sp_time in the tests of
PKU-DAIR/Hetu-Galvatron.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meshdsl.cluster.profile import Cluster, Level, load
from meshdsl.cluster.timing import Timing
from meshdsl.placed.placements import Mesh

MB = 1 << 20
H100, A100, V5P, V100 = (load(name) for name in ("h100", "a100-dgx", "tpu-v5p", "v100-p3"))


def _seconds(cluster: Cluster, kind: str, axes: str, payload: float, **mesh: int) -> float:
    timing = Timing(cluster, Mesh("m", tuple(mesh.items())))
    return timing.collective(kind, tuple(axes), int(payload)).seconds


# --- the Scaling Book ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "axes", "microseconds", "book"),
    [
        ("all_gather", "X", 23.3, 23),
        ("all_gather", "XY", 46.6, 46),
        # The book has 190, the time of the whole array: it leaves the split over X and Y out.
        ("all_reduce", "Z", 11.65, None),
    ],
)
def test_collectives_of_chapter_3_question_2(
    kind: str, axes: str, microseconds: float, book: float | None
) -> None:
    """bf16[1024 over X, 4096 over Y] on 4 x 4 x 4 chips of TPU v4p."""
    v4p = load(str(Path(__file__).with_name("tpu-v4p.toml")))
    local = 2 * (1024 // 4) * (4096 // 4)
    found = 1e6 * _seconds(v4p, kind, axes, local, X=4, Y=4, Z=4)
    assert found == pytest.approx(microseconds, rel=1e-3)
    if book is not None:
        assert found == pytest.approx(book, rel=0.02)


@pytest.mark.parametrize(("axes", "tokens"), [("X", 2550), ("XYZ", 850)])
def test_tokens_at_which_fsdp_is_bound_by_arithmetic(axes: str, tokens: float) -> None:
    """Chapter 5: tokens per chip of v5p at which gathering a weight takes as long as its use.

    C/W for one axis of the torus, a third of that for three.
    """
    level = replace(V5P.levels[0], alpha=0.0)
    cluster = replace(V5P, levels=(level, *V5P.levels[1:]))
    mesh = {"X": 16, "Y": 16, "Z": 16}
    chips = 16 ** len(axes)
    weight = 1 << 32
    gathering = _seconds(cluster, "all_gather", axes, 2 * weight // chips, **mesh)
    per_token = 2 * weight / V5P.device.peak("bf16")
    assert gathering / per_token == pytest.approx(tokens, rel=1e-3)


# --- measured tables ---------------------------------------------------------------------------


def _milliseconds(text: str) -> tuple[float, ...]:
    """Times for a local input of 1, 2, 4, … MB."""
    return tuple(map(float, text.split()))


GATHER = _milliseconds(
    "0.0495 0.0716 0.1138 0.1953 0.3584 0.6846 1.3371 2.642 5.2518 10.4714 20.9105 41.7888"
)
REDUCE = _milliseconds(
    "0.028 0.041 0.0628 0.0849 0.1292 0.2179 0.3822 0.7084 1.3609 2.6658 5.2756 10.4952"
)
SCATTER_OVER_NODES = _milliseconds(
    "0.0866 0.1151 0.1566 0.2397 0.4059 0.7181 1.3297 2.5531 4.9998 9.8931 19.6798 39.2532"
)
GATHER_OVER_NODES = _milliseconds(
    "0.2397 0.4059 0.7181 1.3297 2.5531 4.9998 9.8931 19.6798 39.2532 78.4001 156.694 313.281"
)
REDUCE_A100 = _milliseconds(
    "0.07895 0.1094 0.1333 0.1827 0.2941 0.4157 0.6519 1.2826 2.3584 4.6768 8.1409"
)


def _basis(kind: str, alpha: float, rate: float, payload: int) -> float:
    level = Level(8, "switch", alpha, rate, rate)
    return _seconds(Cluster("fitted", H100.device, (level,)), kind, "x", payload, x=8)


def _fitted(kind: str, measured: tuple[float, ...]) -> tuple[float, float, list[float]]:
    """α in microseconds and B in GB/s of least squares of the relative errors, and these."""
    sizes = [(MB << i, 1e-3 * ms) for i, ms in enumerate(measured)]
    xs = [_basis(kind, 1.0, 1e30, size) / seconds for size, seconds in sizes]
    ys = [_basis(kind, 0.0, 1.0, size) / seconds for size, seconds in sizes]
    xx, yy = sum(x * x for x in xs), sum(y * y for y in ys)
    xy = sum(x * y for x, y in zip(xs, ys, strict=True))
    whole = xx * yy - xy * xy
    alpha, beta = (
        (sum(xs) * yy - sum(ys) * xy) / whole,
        (sum(ys) * xx - sum(xs) * xy) / whole,
    )
    errors = [alpha * x + beta * y - 1 for x, y in zip(xs, ys, strict=True)]
    return 1e6 * alpha, 1e-9 / beta, errors


@pytest.mark.parametrize(
    ("kind", "measured", "alpha", "rate", "least", "most"),
    [
        ("all_gather", GATHER, 4.3, 359, -2, 2),
        ("all_reduce", REDUCE, 2.0, 337, -20, 20),
        ("reduce_scatter", SCATTER_OVER_NODES, 10.4, 47, -7, 7),
        ("all_gather", GATHER_OVER_NODES, 12.9, 48, -2, 2),
        ("all_reduce", REDUCE_A100, 6.2, 201, -21, 21),
    ],
)
def test_fits_to_published_tables(
    kind: str, measured: tuple[float, ...], alpha: float, rate: float, least: int, most: int
) -> None:
    """Errors in percent. Those of an all_reduce are no noise: profiles have tables of it."""
    found_alpha, found_rate, errors = _fitted(kind, measured)
    assert found_alpha == pytest.approx(alpha, abs=0.06)
    assert found_rate == pytest.approx(rate, abs=0.6)
    assert least <= round(100 * min(errors)) <= round(100 * max(errors)) <= most


@pytest.mark.parametrize(
    ("cluster", "kind", "measured", "mesh", "tolerance"),
    [
        (H100, "all_gather", GATHER, {"x": 8}, 0.022),
        (H100, "all_reduce", REDUCE, {"x": 8}, 1e-9),
        (H100, "all_gather", GATHER_OVER_NODES, {"x": 8, "y": 8}, 0.025),
        (H100, "reduce_scatter", SCATTER_OVER_NODES, {"x": 8, "y": 8}, 1e-9),
        (A100, "all_reduce", REDUCE_A100, {"x": 8}, 1e-9),
    ],
)
def test_profiles_against_published_tables(
    cluster: Cluster,
    kind: str,
    measured: tuple[float, ...],
    mesh: dict[str, int],
    tolerance: float,
) -> None:
    """A profile has tables where the fit is off, and figures rounded to two or three digits."""
    for i, milliseconds in enumerate(measured):
        found = _seconds(cluster, kind, "x", MB << i, **mesh)
        assert found == pytest.approx(1e-3 * milliseconds, rel=tolerance), MB << i


# --- measured kernels --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cluster", "sizes", "measured", "tolerance"),
    [
        (H100, (2048, 2048, 2048), 515, 0.03),
        (H100, (2048, 4096, 4096), 614, 0.09),
        (H100, (2048, 8192, 8192), 722, 0.02),
        (A100, (3456, 4096, 8192), 235, 0.02),
        (V100, (1024, 1024, 1024), 57.3, 0.03),
        (V100, (2048, 2048, 2048), 78.23, 0.07),
        (V100, (4096, 4096, 4096), 95.73, 0.03),
        (V100, (8192, 8192, 8192), 97.36, 0.02),
    ],
)
def test_products_of_cublas(
    cluster: Cluster, sizes: tuple[int, int, int], measured: float, tolerance: float
) -> None:
    """TFLOP/s of three sources.

    triton-lang/triton, issue 2339 (H100); NVIDIA/cutlass, issue 956 (A100);
    zzc0721/torch-performance-test-data, issue 140 (V100 SXM2 of 16 GB).
    """
    rows, columns, summed = sizes
    flops = 2 * rows * columns * summed
    seconds = Timing(cluster, Mesh("m", (("x", 2),))).product("f16", flops, (rows, columns))
    found = flops / (seconds + cluster.device.launch) / 1e12
    assert found == pytest.approx(measured, rel=tolerance)
