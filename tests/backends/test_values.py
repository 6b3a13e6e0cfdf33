"""Made-up values: the same whatever the mesh, the slicing and the engine."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from meshdsl.backends.runtime import values
from meshdsl.backends.runtime.values import Spec, cast, draw_part, local_part

DRAWS = [
    ("f32", ("normal", 0.02)),
    ("f64", ("normal", 1.0)),
    ("bf16", ("normal", 1.0)),
    ("f16", ("uniform", -2.0, 3.0)),
    ("i32", ("below", 7)),
    ("i64", ("below", 2**31 - 1)),
    ("bool", ("coin",)),
    ("f32", ("ones",)),
    ("i32", ("zeros",)),
]


FROZEN = [0.29052658696724026, -0.816154926549182, -1.0163637412711912]


def whole(spec, name="w", seed=0):
    return draw_part(spec, name, seed, tuple(slice(0, n) for n in spec.dims.values()))


@pytest.mark.parametrize(("dtype", "how"), DRAWS)
def test_any_slice_has_the_values_of_the_whole(dtype, how):
    spec = Spec(dtype, {"a": 5, "b": 7, "c": 11}, {}, how)
    full = whole(spec)
    assert full.dtype == values.NUMPY_DTYPES[dtype]
    for a, b, c in itertools.product([(0, 5), (1, 4), (4, 5)], [(0, 7), (3, 4)], [(0, 11), (2, 9)]):
        part = (slice(*a), slice(*b), slice(*c))
        np.testing.assert_array_equal(draw_part(spec, "w", 0, part, chunk=64), full[part])


@pytest.mark.parametrize(
    ("mesh", "split"),
    [
        ({"x": 2, "y": 3}, {"a": ("x",), "b": ("y",)}),
        ({"x": 2, "y": 3}, {"a": ("x", "y")}),
        ({"x": 2, "y": 3}, {"a": ("y", "x")}),
        ({"x": 2, "y": 3, "z": 2}, {"b": ("z", "x"), "a": ("y",)}),
    ],
)
@pytest.mark.parametrize(
    "blocks",
    [
        None,
        {"a": [[8, 9, 10, 11, *range(8)]]},
        {"b": [[0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]]},
        {"a": [[3, 4, 5, 0, 1], [2, *range(6, 12)]]},
        {"b": [[0], [*range(1, 9)], [9, 10, 11]]},
    ],
)
def test_shards_over_meshes_tile_the_whole(mesh, split, blocks):
    plain = Spec("f32", {"a": 12, "b": 12}, {}, ("normal", 1.0))
    for dim, each in (blocks or {}).items():
        if [mesh[axis] for axis in split.get(dim, ())][:1] != [len(each)]:
            blocks = {dim: [[*itertools.chain(*each)]]}  # in this order, split alike
    spec = plain._replace(split=split, blocks=blocks)
    full, ranks = whole(plain), range(int(np.prod(list(mesh.values()))))
    covered = np.zeros(full.shape, bool)
    for rank in ranks:
        part = local_part(spec, mesh, rank)
        np.testing.assert_array_equal(draw_part(spec, "w", 0, part, chunk=64), full[part])
        covered[part] = True
    assert covered.all()


def test_the_first_axis_of_a_split_is_the_outer_one():
    mesh = {"x": 2, "y": 3}
    parts = [
        local_part(Spec("f32", {"a": 6}, {"a": axes}), mesh, 1) for axes in (("x", "y"), ("y", "x"))
    ]
    assert parts == [(slice(1, 2),), (slice(2, 3),)]  # rank 1 is x=0, y=1


def test_values_are_frozen():
    # Written down once: a change would change the numbers of every program that gives none.
    found = whole(Spec("f64", {"n": 3}, {}, ("normal", 1.0)), "x", 1)
    np.testing.assert_allclose(found, FROZEN, rtol=1e-12)


def test_distributions():
    spec = Spec("f64", {"n": 100_000}, {}, ("normal", 2.0))
    normal = whole(spec)
    assert abs(normal.mean()) < 0.03
    assert abs(normal.std() - 2) < 0.02
    assert 0.0 < np.abs(normal).max() < 12.0
    uniform = whole(spec._replace(draw=("uniform", 3.0, 5.0)))
    assert 3 <= uniform.min() < uniform.max() < 5
    assert abs(uniform.mean() - 4) < 0.01
    below = whole(Spec("i32", {"n": 100_000}, {}, ("below", 10)))
    assert (np.abs(np.bincount(below, minlength=10) - 10_000) < 500).all()
    coins = whole(Spec("bool", {"n": 100_000}, {}, ("coin",)))
    assert abs(coins.mean() - 0.5) < 0.01


def test_names_and_seeds_give_independent_values():
    spec = Spec("f64", {"n": 10_000}, {}, ("normal", 1.0))
    streams = [whole(spec, name, seed) for name, seed in [("a", 0), ("b", 0), ("a", 1), ("a", -1)]]
    correlations = np.corrcoef(streams) - np.eye(4)
    assert np.abs(correlations).max() < 0.05


def test_a_scalar_can_be_drawn():
    assert whole(Spec("f32", {}, {}, ("normal", 1.0))).shape == ()


def test_bf16_rounds_as_torch_does():
    import torch

    x = np.concatenate(
        [np.random.default_rng(0).standard_normal(9999), [np.inf, -np.inf, np.nan, 0]]
    )
    x = x.astype(np.float32)
    expected = torch.from_numpy(x).bfloat16().float().numpy()
    np.testing.assert_array_equal(cast(x, "bf16"), expected)


@pytest.mark.parametrize(
    ("array", "dtype", "message"),
    [
        (np.array([2**40]), "i32", "do not fit i32"),
        (np.array([2**63], np.uint64), "i64", "do not fit i64"),
        (np.array([1e300]), "f32", "do not fit f32"),
        (np.array([1e5], np.float32), "f16", "do not fit f16"),
    ],
)
def test_numbers_that_get_out_of_range_are_refused(array, dtype, message):
    with pytest.raises(ValueError, match=message):
        cast(array, dtype)
    if array.dtype != np.uint64:  # torch refuses to compare those
        with pytest.raises(ValueError, match=message):
            alone(array, dtype)


def alone(array, dtype):
    """The value that a program by itself makes of an array in a file."""
    from meshdsl.backends.runtime.main import local_value

    return local_value("w", Spec(dtype, {"a": 1}, {}), {"w": array}, 0, {"x": 1}, 0).numpy()


def test_infinities_and_nan_are_kept():
    np.testing.assert_array_equal(cast(np.array([np.inf, np.nan]), "f32"), [np.inf, np.nan])
    for number in (np.inf, -np.inf, np.nan):
        np.testing.assert_array_equal(alone(np.array([number]), "f16"), [number])
