"""Declared tensors, their local blocks, and values drawn from a counter."""

import hashlib
import math
import re
from typing import Any, NamedTuple, TypeAlias

from meshdsl.backends.runtime.lazy_numpy import np

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Way = int | tuple[int, ...]
"""How a dim is split over an axis: into a number of blocks, or into blocks of given sizes."""


NUMPY_DTYPES = {
    "f32": "float32",
    "f64": "float64",
    "bf16": "float32",  # numpy has no bf16: values that bf16 can hold, kept in float32
    "f16": "float16",
    "i32": "int32",
    "i64": "int64",
    "bool": "bool",
}


class Spec(NamedTuple):
    """A tensor: sizes of dims in order, the mesh axes that split them, how values are made up.

    Of several axes the outer one is first. `draw` is `("normal", std)`, `("uniform", a, b)`,
    `("zeros",)`, `("ones",)`, `("below", n)` for integers from 0 to n - 1 (a number after n is that
    of targets that are ignored), `("coin",)` for booleans, `("steps",)` for the number of steps
    that are done, or `("seed",)` for the seed of the run; `key` names another tensor whose values
    it begins with. Along the axes of `parts` every device has a part of a sum. `blocks` says of a
    dim which indices of it lie in each block along
    its outer axis, in their order; a single block is in which order all of it lies, before it is
    split alike. Between steps it lies on the `disk` or `host` that `away` names, if any.
    """

    dtype: str
    dims: dict[str, int]
    split: dict[str, tuple[str, ...]]
    draw: tuple[Any, ...] | None = None
    key: str = ""
    parts: tuple[str, ...] = ()
    blocks: dict[str, list[list[int]]] | None = None
    away: str = ""


Part = tuple[slice | list[int], ...]
"""What a device has of each dim of a tensor: a block, or the indices of what lies in one."""


def spec_of(text: str) -> Spec:
    """The tensor written as `f32[vocab=512@tp, model=256] = normal(0.02)`, perhaps ` as key`.

    Behind the dims may stand the axes along which it is kept in parts: ` over pod data`, behind a
    size what lies where: `layers=4:0.2.1.3@pipe`, or of each block: `layers=4:0-2|3@pipe`. Of a
    tensor that lies elsewhere, ` on disk` or ` on host` stands before how it begins.
    """
    form = r"^(\w+)\[(.*?)\](?: over ([\w. ]+?))?(?: on (\w+))?(?: = (\w+)\((.*?)\))?(?: as (.+))?$"
    dtype, at, parts, away, how, numbers, key = re.findall(form, text)[0]
    at = re.sub(r"(\d+)-(\d+)", lambda m: ".".join(map(str, range(int(m[1]), int(m[2]) + 1))), at)
    entries = re.findall(r"([^ ,=]+)=(\d+):?([\d.|]*)@?([^ ,]*)", at)
    sizes = {dim: int(size) for dim, size, _, _ in entries}
    split = {dim: tuple(axes.split("+")) for dim, _, _, axes in entries if axes}
    lying = ((dim, at.split("|")) for dim, _, at, _ in entries if at)
    blocks = {dim: [[int(n) for n in b.split(".") if n] for b in each] for dim, each in lying}
    draw = (how, *(float(x) for x in numbers.split(", ") if x)) if how else None
    return Spec(dtype, sizes, split, draw, key, tuple(parts.split()), blocks or None, away)


def coordinates(mesh: dict[str, int], rank: int) -> dict[str, int]:
    """Where device `rank` stands on every axis (row-major: the last axis varies fastest)."""
    at = dict(mesh)
    for axis in reversed(mesh):
        rank, at[axis] = divmod(rank, mesh[axis])
    return at


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
    # Axes that split nothing any more change places with those that split something now.
    number = 0
    for axis in (a for a in mesh if a in old and a not in new):
        number = number * mesh[axis] + at[axis]
    for axis in reversed([a for a in mesh if a in new and a not in old]):
        number, came[axis] = divmod(number, mesh[axis])
    for dim, axes in after.items():
        block = 0
        for axis in axes:
            block = block * mesh[axis] + at[axis]
        for axis in reversed(before[dim]):
            block, came[axis] = divmod(block, mesh[axis])
    source = 0
    for axis, size in mesh.items():
        source = source * size + came[axis]
    return source


def group_members(mesh: dict[str, int], axes: tuple[str, ...]) -> list[list[int]]:
    """The ranks of every group of devices that differ only along `axes`, in mesh order.

    An axis may be written with what the group is for: `pipe:forward`. `tp` is all parts of an axis,
    if the mesh has it in parts: `tp.2`, `tp.2.4`.
    """
    varying = {axis.partition(":")[0] for axis in axes}
    within, groups, stride = [0], [0], math.prod(mesh.values())
    for axis, size in mesh.items():
        stride //= size
        if axis in varying or axis.partition(".")[0] in varying:
            within = [rank + n * stride for rank in within for n in range(size)]
        else:
            groups = [rank + n * stride for rank in groups for n in range(size)]
    return [[first + rank for rank in within] for first in groups]


def group_name(mesh: dict[str, int], axes: tuple[str, ...]) -> str:
    """The name of the group along `axes`, in mesh order; all parts of an axis are that axis."""
    names: dict[str, None] = {}
    for axis in axes:
        declared = axis.partition(".")[0]
        parts = (other for other in mesh if other.partition(".")[0] == declared)
        names[declared if all(part in axes for part in parts) else axis] = None
    return "+".join(names)


def block(size: int, ways: tuple[Way, ...], at: tuple[int, ...]) -> tuple[int, int]:
    """First index and size of one block of a dim that is split into `ways`, the outer first.

    Each block is split again: the blocks of a split are of equal size, rounded up, and the last
    ones short or empty. `at` are the numbers of the block in each split; where sizes are given,
    they are those of all blocks of the dim so far, and the number is that among all of these.
    """
    start, extent = 0, size
    for way, number in zip(ways, at, strict=True):
        part = -(-extent // way) if isinstance(way, int) else way[number]
        before = min(number * part, extent) if isinstance(way, int) else sum(way[:number]) - start
        start, extent = start + before, min(part, extent - before)
    return start, extent


def span(
    part: tuple[int, int], size: int, reads: tuple[int, int, int, int, bool]
) -> tuple[int, int]:
    """What a block [o0, o1) of a loop reads of a dim of `size`, as [start, stop).

    `reads` are `mul, div, lo, hi, flip`: inclusive [ceil((mul*o0 + lo)/div),
    floor((mul*(o1-1) + hi)/div)], mirrored with `flip`. It is empty for an empty block, and may
    begin or end outside of the dim.
    """
    (first, end), (mul, div, lo, hi, flip) = part, reads
    start = -(-(mul * first + lo) // div)
    stop = max(start, (mul * (end - 1) + hi) // div + 1) if first < end else start
    return (size - stop, size - start) if flip else (start, stop)


def overlap(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    """What two intervals [start, stop) have in common; if nothing, an empty one in `other`."""
    start = min(max(one[0], other[0]), other[1])
    return start, max(start, min(one[1], other[1]))


def parts_of(
    window: tuple[int, int], block: tuple[int, int], period: int = 0
) -> list[tuple[int, int, int]]:
    """Where a block lies in a window: position in the window, length, position in the block.

    With a `period`, the size of the dim, what is beyond one end of it is the other end.
    """
    parts = []
    for turn in (-period, 0, period) if period else (0,):
        start, stop = overlap((block[0] + turn, block[1] + turn), window)
        if start < stop:
            parts.append((start - window[0], stop - start, start - turn - block[0]))
    return parts


def in_mesh_order(mesh: dict[str, int], axes: tuple[str, ...]) -> tuple[str, ...]:
    """`axes` in the order of the mesh."""
    return tuple(axis for axis in mesh if axis in axes)


def blocks_and_windows(
    mesh: dict[str, int],
    axes: tuple[str, ...],
    ranks: list[int],
    sizes: tuple[int, int],
    reads: tuple[int, int, int, int, bool],
    within: bool,
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """For each rank its block of a dim, and what its block of a loop reads of it (see `span`).

    `sizes` are those of the dim and the loop, both split over `axes`, outer first. `within`:
    windows end at the borders of the dim.
    """
    (size, loop), ways = sizes, tuple(mesh[axis] for axis in axes)
    blocks, read = [], []
    for rank in ranks:
        at = coordinates(mesh, rank)
        (first, count), (start, extent) = (
            block(n, ways, tuple(at[axis] for axis in axes)) for n in (size, loop)
        )
        blocks.append((first, first + count))
        window = span((start, start + extent), size, reads)
        read.append(overlap(window, (0, size)) if within else window)
    return blocks, read


def window_start(
    axes: tuple[str, ...],
    sizes: tuple[int, int],
    reads: tuple[int, int, int, int, bool],
    within: bool,
    rank: int,
    mesh: dict[str, int],
) -> int:
    """The index that the window of a device begins at: below 0 where that is fill."""
    return blocks_and_windows(mesh, axes, [rank], sizes, reads, within)[1][0][0]


def local_part(spec: Spec, mesh: dict[str, int], rank: int) -> Part:
    """What device `rank` holds of each dim."""
    at, parts = coordinates(mesh, rank), list[slice | list[int]]()
    for dim, size in spec.dims.items():
        on, blocks = spec.split.get(dim, ()), (spec.blocks or {}).get(dim, ())
        ways = tuple(tuple(map(len, blocks)) if blocks[1:] and a == on[0] else mesh[a] for a in on)
        start, extent = block(size, ways, tuple(at[a] for a in on))
        selected = slice(start, start + extent)
        lying = [i for each in blocks for i in each][selected]
        parts.append(selected if lying in ([], [*range(start, selected.stop)]) else lying)
    return tuple(parts)


def shape_of(part: Part) -> list[int]:
    """The sizes of a block."""
    return [p.stop - p.start if isinstance(p, slice) else len(p) for p in part]


def first_replicas(spec: Spec, mesh: dict[str, int]) -> list[int]:
    """The devices that have the first replica of a block of a tensor, or of a part of a sum."""
    return group_members(mesh, (*spec.parts, *(a for axes in spec.split.values() for a in axes)))[0]


def has_sum(spec: Spec, mesh: dict[str, int], rank: int) -> bool:
    """Whether a device, of those that keep parts of a sum, is the one that whole values go to."""
    at = coordinates(mesh, rank)
    return all(at[axis] == 0 for axis in spec.parts)


def drawn_part(spec: Spec, name: str, seed: int, part: Part, chunk: int = 1 << 15) -> Array:
    """Made-up values of one block of a tensor: of the seed, the name and the index in all of it.

    So they are the same under every split. Those of bf16 are float32, and not rounded. `chunk`
    elements are drawn at a time: few enough for the cache.
    """
    assert spec.draw is not None, f"{name} cannot be made up"
    kinds = {"f64": "f8", "f16": "f2", "i64": "i8", "i32": "i4", "bool": "?"}  # others are float32
    indices = [np.arange(size)[p] for size, p in zip(spec.dims.values(), part, strict=True)]
    values = np.empty([len(index) for index in indices], kinds.get(spec.dtype, "f4"))
    if spec.draw[0] in ("zeros", "ones", "steps"):
        return np.full_like(values, spec.draw[0] == "ones")
    if spec.draw[0] == "seed":
        seeds = [step_seed(seed, n) if values.shape else seed for n in range(values.size)]
        return np.reshape(seeds, values.shape)
    digest = hashlib.blake2b(f"{seed}\0{spec.key or name}".encode(), digest_size=8).digest()
    key, flat = np.frombuffer(digest, "<u8").astype(np.uint64), values.reshape(-1)
    chunk = min(chunk, 64 * max(1, -(-flat.size // 64)))
    for start in range(0, flat.size, chunk):
        # Always full vectors, so that every element goes through the same loop of numpy.
        at = np.unravel_index(np.arange(start, start + chunk) % flat.size, [1, *values.shape])
        here = (at[0], *(index[a] for index, a in zip(indices, at[1:], strict=True)))
        index = np.ravel_multi_index(here, [1, *spec.dims.values()])
        flat[start : start + chunk] = drawn(spec.draw, key, index)[: flat.size - start]
    return values


def step_seed(seed: int, step: int) -> int:
    """The seed of the random numbers of one step of a run, or of one of its batches."""
    digest = hashlib.blake2b(f"{seed}\0step {step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def drawn(how: tuple[Any, ...], key: Array, index: Array) -> Array:
    """The values at `index` of the stream of random numbers that `key` names."""
    unit = unit_interval(key, 2 * index)
    if how[0] == "uniform":
        unit = how[1] + (how[2] - how[1]) * unit
    elif how[0] == "normal":  # after Box and Muller
        angle = 2 * math.pi * unit_interval(key, 2 * index + 1)
        unit = how[1] * np.sqrt(-2 * np.log(1 - unit)) * np.cos(angle)
    else:  # integers below a number, or truth values
        unit = np.floor(unit * (how[1] if how[0] == "below" else 2))
    return np.asarray(unit)


def unit_interval(key: Array, counter: Array) -> Array:
    """A number in [0, 1) for each counter: 53 random bits."""
    return np.asarray((splitmix64(key, counter) >> np.uint64(11)) * 2.0**-53)


def splitmix64(key: Array, counter: Array) -> Array:
    """64 random bits for each counter (SplitMix64, Steele et al. 2014)."""
    bits = key + counter.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(bits ^ (bits >> np.uint64(31)))


def draw_part(spec: Spec, name: str, seed: int, part: Part, chunk: int = 1 << 15) -> Array:
    """The same values as numpy has them: those of bf16 in float32, rounded."""
    values = drawn_part(spec, name, seed, part, chunk)
    return round_to_bf16(values) if spec.dtype == "bf16" else values


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
        converted = array.astype(target, copy=False)
    if dtype == "bf16":
        converted = round_to_bf16(converted)
    if target.kind == "f" and array.dtype != target and np.isinf(converted).any():
        if np.isinf(converted).sum() != np.isinf(array).sum():
            raise ValueError(f"values up to {np.abs(array).max()} do not fit {dtype}")
    return converted


def round_to_bf16(array: Array) -> Array:
    """float32 values rounded to the nearest that bf16 can hold, ties to even."""
    bits = np.asarray(array).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) & np.uint32(
        0xFFFF0000
    )
    return np.where(np.isnan(array), np.float32(np.nan), rounded.view(np.float32))
