"""Declared tensors, the part of them that one device holds, and values made up from a counter."""

import hashlib
import math
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

NUMPY_DTYPES = {
    "f32": "float32",
    "f64": "float64",
    "bf16": "float32",  # numpy has no bf16: values that bf16 can hold, kept in float32
    "f16": "float16",
    "i32": "int32",
    "i64": "int64",
    "bool": "bool",
}

CHUNK = 1 << 15
"""Elements that are drawn at a time: small enough for the cache, however large the tensor."""


class Spec(NamedTuple):
    """A tensor of the program.

    `dims` maps each dim, in order, to its size. `split` maps a split dim to the mesh axes it is
    split over, outer first. `draw` says how to make up values: `("normal", std)`,
    `("uniform", a, b)`, `("zeros",)`, `("ones",)`, `("below", n)` for integers from 0 to n - 1,
    `("coin",)` for booleans; `key` names another tensor whose values it begins with.
    """

    dtype: str
    dims: dict[str, int]
    split: dict[str, tuple[str, ...]]
    draw: tuple[Any, ...] | None = None
    key: str = ""


def coordinates(mesh: dict[str, int], rank: int) -> dict[str, int]:
    """Where device `rank` stands on every axis (row-major: the last axis varies fastest)."""
    found = {}
    for axis, size in reversed(mesh.items()):
        rank, found[axis] = divmod(rank, size)
    return found


def source_rank(
    mesh: dict[str, int],
    rank: int,
    before: dict[str, tuple[str, ...]],
    after: dict[str, tuple[str, ...]],
) -> int:
    """The device whose block under the splits `before` is the one of `rank` under `after`.

    Both map the same dims to mesh axes, outer first, that split them equally often.
    """
    at = coordinates(mesh, rank)
    came = dict(at)
    old, new = ([axis for axes in s.values() for axis in axes] for s in (before, after))
    # An axis that splits nothing any more changes places with one that splits something now.
    for entered, left in zip(sorted(set(new) - set(old)), sorted(set(old) - set(new)), strict=True):
        came[entered] = at[left]
    for dim, axes in after.items():
        block = 0
        for axis in axes:
            block = block * mesh[axis] + at[axis]
        for axis in reversed(before[dim]):
            block, came[axis] = divmod(block, mesh[axis])
    found = 0
    for axis, size in mesh.items():
        found = found * size + came[axis]
    return found


def group_members(mesh: dict[str, int], axes: tuple[str, ...]) -> list[list[int]]:
    """The ranks of every group of devices that differ only along `axes`, in mesh order."""
    ranks = np.arange(math.prod(mesh.values())).reshape(tuple(mesh.values()))
    varying = [position for position, axis in enumerate(mesh) if axis in axes]
    last = range(ranks.ndim - len(varying), ranks.ndim)
    size = math.prod(mesh[axis] for axis in axes)
    groups: list[list[int]] = np.moveaxis(ranks, varying, last).reshape(-1, size).tolist()
    return groups


def local_part(spec: Spec, mesh: dict[str, int], rank: int) -> tuple[slice, ...]:
    """The slice of each dim that device `rank` holds."""
    at = coordinates(mesh, rank)
    parts = []
    for dim, size in spec.dims.items():
        block, blocks = 0, 1
        for axis in spec.split.get(dim, ()):
            block = block * mesh[axis] + at[axis]
            blocks *= mesh[axis]
        extent, rest = divmod(size, blocks)
        if rest:
            raise ValueError(f"dim {dim} of size {size} does not divide into {blocks} blocks")
        parts.append(slice(block * extent, (block + 1) * extent))
    return tuple(parts)


def draw(spec: Spec, name: str, seed: int, mesh: dict[str, int], rank: int) -> Array:
    """Made-up values of what device `rank` holds of tensor `name`."""
    return draw_part(spec, name, seed, local_part(spec, mesh, rank))


def draw_part(spec: Spec, name: str, seed: int, part: tuple[slice, ...]) -> Array:
    """Made-up values of one block of tensor `name`.

    A value depends only on the seed, the name and the row-major index in the whole tensor, so it is
    the same however the tensor is split.
    """
    assert spec.draw is not None, f"{name} cannot be made up"
    shape = tuple(p.stop - p.start for p in part)
    if spec.draw[0] in ("zeros", "ones"):
        return np.full(shape, spec.draw[0] == "ones", NUMPY_DTYPES[spec.dtype])
    digest = hashlib.blake2b(f"{seed}\0{spec.key or name}".encode(), digest_size=8).digest()
    key = np.frombuffer(digest, "<u8").astype(np.uint64)
    values = np.empty(math.prod(shape), NUMPY_DTYPES[spec.dtype])
    for start in range(0, values.size, CHUNK):
        # Always a full chunk, so that every element goes through the same loop of numpy.
        index = global_index(np.arange(start, start + CHUNK, dtype=np.int64), part, spec)
        chunk = values[start : start + CHUNK]
        chunk[:] = cast(drawn(spec.draw, key, index)[: chunk.size], spec.dtype)
    return values.reshape(shape)


def global_index(local: Array, part: tuple[slice, ...], spec: Spec) -> Array:
    """Row-major indices in the whole tensor for row-major indices in the block `part`."""
    index, stride = np.zeros_like(local), 1
    for block, size in zip(reversed(part), reversed(spec.dims.values()), strict=True):
        extent = block.stop - block.start
        index += (local % extent + block.start) * stride
        local, stride = local // extent, stride * size
    return index


def drawn(how: tuple[Any, ...], key: Array, index: Array) -> Array:
    """The values at `index` of the stream of random numbers that `key` names."""
    unit: Array = unit_interval(key, 2 * index)
    if how[0] == "uniform":
        unit = how[1] + (how[2] - how[1]) * unit
    elif how[0] == "normal":  # after Box and Muller
        angle = 2 * math.pi * unit_interval(key, 2 * index + 1)
        unit = how[1] * np.sqrt(-2 * np.log(1 - unit)) * np.cos(angle)
    elif how[0] == "below":
        unit = np.floor(unit * how[1])
    else:
        assert how[0] == "coin", f"unknown way to draw: {how[0]}"
        unit = np.floor(2 * unit)
    return unit


def unit_interval(key: Array, counter: Array) -> Array:
    """A number in [0, 1) for each counter: 53 random bits of splitmix64 (Steele et al. 2014)."""
    bits: Array = key + counter.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    bits = bits ^ (bits >> np.uint64(31))
    unit: Array = (bits >> np.uint64(11)) * 2.0**-53
    return unit


def cast(array: Array, dtype: str) -> Array:
    """`array` in the numpy dtype of `dtype`; ValueError where a number gets out of range.

    A scalar becomes an array without dims.
    """
    array, target = np.asarray(array), np.dtype(NUMPY_DTYPES[dtype])
    if target.kind == "i" and array.size and array.dtype != target:
        low, high, range_ = array.min(), array.max(), np.iinfo(target)
        if low < range_.min or high > range_.max:
            raise ValueError(f"values from {low} to {high} do not fit {dtype}")
    with np.errstate(over="ignore"):
        found = array.astype(target, copy=False)
    if dtype == "bf16":
        found = round_to_bf16(found)
    if target.kind == "f" and array.dtype != target and np.isinf(found).any():
        if np.isinf(found).sum() != np.isinf(array).sum():
            raise ValueError(f"values up to {np.abs(array).max()} do not fit {dtype}")
    return found


def round_to_bf16(array: Array) -> Array:
    """float32 values rounded to the nearest that bf16 can hold, ties to even."""
    bits = np.asarray(array).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) & np.uint32(
        0xFFFF0000
    )
    return np.where(np.isnan(array), np.float32(np.nan), rounded.view(np.float32))
