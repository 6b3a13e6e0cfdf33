"""How long operators and collectives take on a cluster, seen through a mesh.

An operator takes the longer of its arithmetic and its memory traffic (the roofline of Williams,
Waterman and Patterson 2009), and the time to start a kernel. A collective takes α + bytes/B for
each of its steps (Hockney 1994; the algorithms are those of Thakur, Rabenseifner and Gropp 2005),
or what was measured, where the profile has a table of it. Seconds are floats, by the same
arithmetic in the same order everywhere.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import field
from types import MappingProxyType
from typing import Literal

from meshdsl.cluster.profile import UNBOUNDED, Cluster, Level, Points
from meshdsl.device.ir import Bucket, Compute, Move
from meshdsl.device.liveness import is_constant
from meshdsl.diagnostics import Edit, Fix, Span, advice, fail
from meshdsl.ir.types import TensorType
from meshdsl.ops.opdef import OpDef, Signature, lookup
from meshdsl.option_edits import give
from meshdsl.placed.collectives import Step
from meshdsl.placed.placements import Mesh
from meshdsl.records import dataclass
from meshdsl.report.document import mesh_text

Bound = Literal["compute", "memory", "launch", "network", "none"]


POINT_TO_POINT = ("halo", "send", "exchange")
"""Steps whose bytes each go to one other device."""


@dataclass(frozen=True, slots=True)
class Time:
    """Seconds, what bounds them, and the mesh axes that are sent over."""

    seconds: float
    bound: Bound
    axes: tuple[str, ...] = ()


NOTHING = Time(0.0, "none")


@dataclass(frozen=True, slots=True)
class LevelPart:
    """The part of a group of devices that lies in one level: `sizes` along each mesh axis."""

    number: int
    level: Level
    sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of units that take part."""
        return math.prod(self.sizes)

    @property
    def hops(self) -> int:
        """The steps of an all_gather: to all others in turn, or both ways around each ring."""
        if self.level.kind == "switch":
            return self.size - 1
        return sum(n // 2 for n in self.sizes)

    @property
    def rate(self) -> float:
        """Bytes/s that a device sends; over several axes of a torus, over all of them at once."""
        ways = 1 if self.level.kind == "switch" else min(len(self.sizes), self.level.axes)
        return self.level.bandwidth * ways / self.level.shared_by

    def all_gather(self, payload: float) -> float:
        """Seconds for a local input of `payload` bytes."""
        rounds = self.size - 1 if self.level.kind == "switch" else self.size // 2
        return self.hops * self.level.alpha + rounds * payload / self.rate

    def reduce_scatter(self, payload: float) -> float:
        """Seconds for a local input of `payload` bytes: an all_gather in reverse."""
        return self.all_gather(payload / self.size)

    def all_reduce(self, payload: float) -> float:
        """Seconds for a local input of `payload` bytes."""
        return self.reduce_scatter(payload) + self.all_gather(payload / self.size)

    def all_to_all(self, payload: float) -> float:
        """Seconds for a local input of `payload` bytes.

        Around a ring a block goes a quarter of the way on average, half of that in each direction.
        """
        if self.level.kind == "switch":
            return self.reduce_scatter(payload)
        sent = (self.size // 2) * payload / self.rate
        return self.hops * self.level.alpha + sent / 4

    def permute(self, payload: float) -> float:
        """Seconds to send `payload` bytes to one other device."""
        return self.level.alpha + payload / self.rate


@dataclass(frozen=True, slots=True)
class Timing:
    """The cluster seen through a mesh, whose axes are row-major: the last has the nearest devices.

    `key` is the same text for timings that tell the same times on one mesh.

    Raises MD0322 for a mesh that is larger than the cluster, MD0323 for an axis that cuts a level
    unevenly.
    """

    cluster: Cluster
    mesh: Mesh
    _parts: dict[str, tuple[int, ...]] = field(init=False, compare=False, repr=False)
    key: str = field(init=False, compare=False, repr=False)
    _hash: int = field(init=False, compare=False, repr=False)
    _known: dict[object, Time] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        refuse_uneven(self.cluster, self.mesh)
        sizes = [size for _, size in self.mesh.axes]
        parts = dict(zip(self.mesh.names, parts_of(self.cluster, sizes) or (), strict=True))
        object.__setattr__(self, "_parts", parts)
        facts = (self.cluster.device, self.cluster.levels, sorted(self.cluster.tables.items()))
        object.__setattr__(self, "key", repr(facts))
        object.__setattr__(self, "_hash", hash((self.cluster, self.mesh)))
        # Programs under many layouts have the same statements.
        object.__setattr__(self, "_known", {})

    def __hash__(self) -> int:
        return self._hash

    @property
    def slowest(self) -> Level:
        """The links of the least bandwidth."""
        return min(self.cluster.levels, key=lambda level: level.bandwidth)

    def flops(self, dtype: str) -> float:
        """FLOP/s of a device at best."""
        return self.cluster.device.peak(dtype)

    # --- operators ---------------------------------------------------------------------------

    def operator(self, opdef: OpDef, signature: Signature, flops: int) -> Time:
        """The time of an operator on local tensors; a view takes none."""
        if opdef.shows_operand(signature.ins, signature.attrs):
            return NOTHING
        moved = sum(t.bytes for t in (*signature.ins, *signature.outs))
        computing = self._computing(opdef, signature, flops)
        return self._kernel(computing, moved)

    def _kernel(self, computing: float, moved: int, starts: int = 1) -> Time:
        """The time of `starts` kernels that compute so long, and move so many bytes in all."""
        moving = self.passing(moved)
        longest, launch = max(computing, moving), self.cluster.device.launch * starts
        bound: Bound = "compute" if computing > moving else "memory"
        return Time(launch + longest, "launch" if launch > longest else bound)

    def passing(self, moved: float) -> float:
        """Seconds to read and write so many bytes of memory in all, beside starting a kernel."""
        table, device = self._own_table("pointwise"), self.cluster.device
        return interpolated(table, moved) if table else moved / (device.hbm * device.hbm_eff)

    def product(self, dtype: str, flops: float, sides: tuple[int, int] | None) -> float:
        """Seconds of the arithmetic of a product by its sides, the shorter first, if it has any."""
        table = self._own_table("product")
        if table:
            return interpolated(table, flops)
        rate = self.flops(dtype) * self.cluster.device.mm_eff
        return flops / (rate * self._filled(sides))

    def _computing(self, opdef: OpDef, signature: Signature, flops: int) -> float:
        """Seconds of arithmetic: of products at the rate of their sides, of the rest as vectors."""
        sides = _sides(opdef, signature)
        elements = sum(t.elements for t in (*signature.ins, *signature.outs))
        if sides is None and flops <= DENSE * elements:
            return flops / self.flops("f32")
        floats = [t.dtype.name for t in signature.ins if t.dtype.kind in ("float", "f8")]
        dtype = floats[0] if floats else "f32"
        if opdef.attended is not None:
            return self._attention(dtype, flops * opdef.attended(signature))
        return self.product(dtype, flops, sides)

    def _attention(self, dtype: str, flops: float) -> float:
        """Seconds of the arithmetic of an attention kernel."""
        reached = self.cluster.device.attention_eff
        if reached is None:
            return self.product(dtype, flops, None)
        return flops / (self.flops(dtype) * reached)

    def _filled(self, sides: tuple[int, int] | None) -> float:
        """The part of the units of a device that a product keeps busy, by its sides."""
        if sides is None:
            return 1.0
        (short, wide), (half_short, half_wide) = sides, self.cluster.device.gemm_half
        filled = short / (short + half_short) * wide / (wide + half_wide)
        # What has no rows is spread over the units by its batch or its sum.
        return max(filled, 1 / (1 + half_short))

    def _own_table(self, what: str) -> Points | None:
        """Measured times of one device: with as many at work as the mesh has, or next below."""
        worlds = sorted(n for name, n, _ in self.cluster.tables if name == what)
        if not worlds:
            return None
        world = max((n for n in worlds if n <= self.mesh.devices), default=worlds[0])
        return self.cluster.tables[what, world, 0]

    # --- collectives -------------------------------------------------------------------------

    def step(self, step: Step, type_: TensorType) -> Time:
        """The time of one step of a reshard."""
        if step.kind in POINT_TO_POINT:
            return self.collective("permute", step.axes, step.wire(type_, self.mesh))
        if step.moves:
            return self.collective(step.kind, step.axes, step.payload(type_, self.mesh))
        ends = (p.local(type_, self.mesh).bytes for p in (step.before, step.after))
        return self._kernel(0.0, 2 * min(ends), step.kernels)

    def collective(self, kind: str, axes: tuple[str, ...], payload: int) -> Time:
        """The time of a collective over `axes` for a local input of `payload` bytes.

        One that spans several levels is done level by level: the blocks of a level are reduced or
        gathered there, and the level outside has that much less to send, or does so before. None
        takes less than starting a kernel.
        """
        key = kind, axes, payload
        if key not in self._known:
            self._known[key] = self._collective(*key)
        return self._known[key]

    def _collective(self, kind: str, axes: tuple[str, ...], payload: int) -> Time:
        parts = tuple(self.parts(axes))
        if not parts:
            return NOTHING
        seconds = max(self.cluster.device.launch, self._staged(kind, parts, payload))
        return Time(seconds, "network", axes)

    def transfer(self, tier: str, payload: int) -> Time:
        """The time to move bytes between the memory of a device and a tier.

        Raises MD0321 for a profile that does not say how fast that is.
        """
        device = self.cluster.device
        rate = {"host": device.host, "disk": device.disk}[tier]
        if rate is None:
            message = f"the profile `{self.cluster.name}` does not say how fast its {tier} is"
            help = f"add `{tier} = …`, in bytes a second, to `[device]` of a profile of your own"
            fail("MD0321", message, help=help)
        return Time(max(device.launch, payload / rate), "network")

    def parts(self, axes: tuple[str, ...]) -> Iterator[LevelPart]:
        """The levels that a group over `axes` spans, inside out."""
        for number, level in enumerate(self.cluster.levels):
            sizes = tuple(n for a in axes if (n := self._parts[a][number]) > 1)
            if sizes:
                yield LevelPart(number, level, sizes)

    def _staged(self, kind: str, parts: tuple[LevelPart, ...], payload: float) -> float:
        inner, outside = parts[0], parts[1:]
        if kind == "permute":
            return self._in_level(kind, parts[-1], payload)
        if not outside:
            return self._in_level(kind, inner, payload)
        if kind == "all_gather":
            beyond = math.prod(p.size for p in outside)
            return self._staged(kind, outside, payload) + self._in_level(
                kind, inner, payload * beyond
            )
        if kind == "all_to_all":
            return self._staged(kind, outside, payload) + self._in_level(kind, inner, payload)
        part = payload / inner.size
        seconds = self._in_level("reduce_scatter", inner, payload)
        seconds += self._staged(kind, outside, part)
        if kind == "all_reduce":
            seconds += self._in_level("all_gather", inner, part)
        return seconds

    def _in_level(self, kind: str, part: LevelPart, payload: float) -> float:
        table = self.cluster.tables.get((kind, part.size, part.number))
        if table:
            return interpolated(table, payload)
        formula = {
            "all_gather": part.all_gather,
            "all_reduce": part.all_reduce,
            "reduce_scatter": part.reduce_scatter,
            "all_to_all": part.all_to_all,
            "permute": part.permute,
        }
        return formula[kind](payload)

    # --- the device program --------------------------------------------------------------------

    def node(self, node: Compute | Move | Bucket) -> Time:
        """The time of a statement of the device program, once."""
        if isinstance(node, Bucket):
            return self.collective(node.step.kind, node.step.axes, node.payload)
        if isinstance(node, Move):
            return self._move(node)
        if is_constant(node):
            return NOTHING
        ins, outs = (tuple([v.local for v in vs]) for vs in (node.ins, node.outs))
        key = node.name, node.attrs, ins, outs
        if key not in self._known:
            self._known[key] = self.operator(lookup(node.name), node.local, node.flops)
        return self._known[key]

    def _move(self, node: Move) -> Time:
        step = node.step
        if step.tier:
            return self.transfer(step.tier, node.payload)
        if step.kind in POINT_TO_POINT:
            return self.collective("permute", step.axes, node.wire)
        if step.moves:
            return self.collective(step.kind, step.axes, node.payload)
        block = min(node.source.local.bytes, node.target.local.bytes)
        return self._kernel(0.0, 2 * block, step.kernels)


DENSE = 16
"""FLOPs per element read or written beyond which an operator has products inside, as attention."""


def _sides(opdef: OpDef, signature: Signature) -> tuple[int, int] | None:
    """The smaller and the larger side of a product of two operands; None for what is none.

    A side is the product of the loops that one operand has and the other lacks; the loops that
    both have and the result lacks are summed. What the result has in no loop, the windows of a
    kernel's gradient, belongs to the operand that is read through windows (im2col).
    """
    if opdef.flops is None or len(signature.ins) != 2:
        return None
    out, loops = signature.outs[0], opdef.factors(signature).loops
    sides, summed = [1, 1], False
    for factor in loops:
        first, second = factor.ins
        summed = summed or factor.reduce == "sum"
        if (first is None) != (second is None) and factor.outs[0] is not None:
            sides[int(first is None)] *= out.size(factor.outs[0])
    slid = next((i for f in loops for i, read in enumerate(f.reads) if read is not None), None)
    if slid is not None:
        looped = {factor.outs[0] for factor in loops}
        sides[slid] *= math.prod(d.size for d in out.dims if d.name not in looped)
    return (min(sides), max(sides)) if summed else None


def interpolated(points: Points, size: float) -> float:
    """Seconds for `size` bytes, on a line between points in logarithms of both.

    Below the first point it takes as long as there; beyond the last, at the rate of there.
    """
    if size <= points[0][0]:
        return points[0][1]
    for (low, before), (high, after) in itertools.pairwise(points):
        if size <= high:
            share = math.log(size / low) / math.log(high / low)
            return before * math.exp(share * math.log(after / before))
    return points[-1][1] * size / points[-1][0]


# --- meshes on levels ----------------------------------------------------------------------------


def parts_of(cluster: Cluster, sizes: list[int]) -> tuple[tuple[int, ...], ...] | None:
    """By mesh axis, its part in each level, inside out; None where an axis cuts one unevenly.

    An axis of stride s and size n covers the devices [s, s·n).
    """
    parts_by_axis: list[tuple[int, ...]] = []
    stride = 1
    for size in reversed(sizes):
        stop, inside, parts = stride * size, 1, []
        for level in cluster.levels:
            outside = inside * level.size
            start, end = max(stride, inside), min(stop, outside)
            if start < end and end % start:
                return None
            parts.append(end // start if start < end else 1)
            inside = outside
        if math.prod(parts) != size:
            return None
        parts_by_axis.append(tuple(parts))
        stride = stop
    return tuple(reversed(parts_by_axis))


def refuse_uneven(
    cluster: Cluster,
    mesh: Mesh,
    span: Span | None = None,
    declared: Mapping[str, Span] = MappingProxyType({}),
) -> None:
    """Raise MD0322 for too many devices, MD0323 for an axis that cuts a level unevenly.

    `span` is where the cluster was named, `declared` has the places of the sizes of the mesh, if it
    is one of the file.
    """
    sizes = [size for _, size in mesh.axes]
    there = math.prod(level.size for level in cluster.levels)
    if mesh.devices > there:
        message = f"the mesh has {mesh.devices} devices, but {cluster.name} has {there}"
        fixes = _resized(mesh, _nearest(cluster, sizes, there), declared)
        help = advice(fixes, "or take another cluster")
        fail("MD0322", message, span, help=help, fixes=fixes)
    if parts_of(cluster, sizes) is not None:
        return
    last = max(n for n in range(len(sizes)) if parts_of(cluster, sizes[n:]) is None)
    stride, axis = math.prod(sizes[last + 1 :]), mesh.names[last]
    groups = itertools.accumulate((level.size for level in cluster.levels), operator.mul)
    cut = next(
        n for n in groups if stride < n < stride * sizes[last] and not _fits(n, stride, sizes[last])
    )
    message = (
        f"the {sizes[last]} devices of axis `{axis}` are spread unevenly over the groups of {cut} "
        f"devices of {cluster.name}"
    )
    fixes = _resized(mesh, _nearest(cluster, sizes), declared)
    fail("MD0323", message, span, help=advice(fixes, "the nearest mesh that fits"), fixes=fixes)


def _resized(mesh: Mesh, sizes: list[int] | None, declared: Mapping[str, Span]) -> tuple[Fix, ...]:
    """The fix that gives the axes of a mesh other sizes, where it is declared or as an option."""
    if sizes is None:
        return ()
    text = mesh_text(dict(zip(mesh.names, sizes, strict=True)))
    if not declared:
        return (give("--mesh", text, safe=False),)
    changed = [
        Edit(declared[axis], str(new))
        for (axis, old), new in zip(mesh.axes, sizes, strict=True)
        if new != old
    ]
    return (Fix(f"write `{text}`", tuple(changed), safe=False),)


def _fits(group: int, stride: int, size: int) -> bool:
    """Whether an axis goes over whole groups of devices, each in equal steps."""
    return group % stride == 0 and stride * size % group == 0


def _nearest(cluster: Cluster, sizes: list[int], most: int = UNBOUNDED) -> list[int] | None:
    """The mesh with one other size that cuts no level unevenly, and whose size is nearest.

    It has at most so many devices.
    """
    devices = math.prod(level.size for level in cluster.levels if level.size < UNBOUNDED)
    candidates = []
    for number, size in enumerate(sizes):
        for other in range(1, max(2 * size, devices) + 1):
            changed = [*sizes[:number], other, *sizes[number + 1 :]]
            if math.prod(changed) <= most and parts_of(cluster, changed) is not None:
                candidates.append((abs(math.log(other / size)), -number, -other, changed))
    return min(candidates)[-1] if candidates else None
