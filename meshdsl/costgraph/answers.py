"""The best plan of a graph with costs, and what is proven of it: as data, and as text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Protocol

from meshdsl.costgraph.layer_partition import Links
from meshdsl.costgraph.method_rows import Figures
from meshdsl.diagnostics import counted
from meshdsl.records import dataclass
from meshdsl.report.document import aligned, human

SHOWN = 5
"""Divisions of equal layers that are shown."""


class GraphAnswer(Protocol):
    """The result of a method; its fields are those of the JSON that users read."""

    def lines(self, graph: str, method: str) -> Iterable[str]:
        """The result as text."""

    def figures(self) -> Figures:
        """The cost, and how it was found: what methods are compared by."""


@dataclass(frozen=True, slots=True)
class Solved:
    """A graph, by the path of its file, and the answer of a method."""

    graph: str
    kind: str
    method: str
    answer: GraphAnswer

    def facts(self) -> dict[str, object]:
        """The result as data (version 1)."""
        head = {"version": 1, "graph": self.graph, "kind": self.kind, "method": self.method}
        return {**head, **asdict(self.answer)}  # type: ignore[call-overload]

    def lines(self) -> list[str]:
        """The result as lines of text, whatever signs the names of the graph have."""
        return list(self.answer.lines(self.graph, self.method))


@dataclass(frozen=True, slots=True)
class PlacementAnswer:
    """A choice for each node. `memory` and its limit are in bytes; None where nothing is known."""

    source: str
    choices: dict[str, str]
    cost: float
    memory: float | None
    memory_limit: float | None
    bound: float | None
    proven: bool
    combinations: int
    work: int
    note: str

    def figures(self) -> Figures:
        """What methods are compared by."""
        return Figures(self.cost, self.work, self.proven, self.bound)

    def lines(self, graph: str, method: str) -> Iterable[str]:
        """The cost and what is proven of it, and the choices."""
        proof = "no choice costs less" if self.proven else self._unproven()
        memory = "" if self.memory is None else f", {human(int(self.memory))}"
        yield f"{graph}: cost {self.cost:.6g}{memory}, by {method}: {proof}"
        yield f"{self.combinations:,} combinations, {self.work:,} steps"
        yield from _indented([list(pair) for pair in self.choices.items()])

    def _unproven(self) -> str:
        if self.bound is None:
            return self.note or "nothing is proven"
        return f"within {(self.cost - self.bound) / self.cost:.2%} of the least"


@dataclass(frozen=True, slots=True)
class PartitionStage:
    """Consecutive layers on devices that share the micro-batches."""

    layers: list[str]
    devices: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PartitionAnswer:
    """Layers in stages; `seconds` a micro-batch, `bandwidth` in bytes a second.

    `levels` of the cluster, inside out; where one bandwidth is given, it is that of all devices.
    """

    source: str
    devices: int
    bandwidth: float | None
    cluster: str | None
    levels: list[Links]
    stages: list[PartitionStage]
    replicas: str
    seconds: float
    one_device_seconds: float
    bound: float
    proven: bool
    work: int

    def figures(self) -> Figures:
        """What methods are compared by."""
        return Figures(self.seconds, self.work, self.proven, self.bound)

    def lines(self, graph: str, method: str) -> Iterable[str]:
        """The pace of the pipeline, and its stages."""
        speed = "" if self.bandwidth is None else f" at {self.bandwidth / 1e9:g} GB/s"
        devices = "devices" if self.cluster is None else f"x {self.cluster}"
        yield (
            f"{graph} on {self.devices} {devices}{speed}: "
            f"{self.replicas}, a micro-batch every {self.seconds * 1e3:.4g} ms, "
            f"{_speedup(self.one_device_seconds, self.seconds):.3g} times one device"
            f"{_unproven(self.seconds, self.bound)}"
        )
        rows = [["stage", "devices", "ms", "layers"]]
        for number, stage in enumerate(self.stages):
            ms = f"{stage.seconds * 1e3:.4g}"
            rows.append([str(number), str(stage.devices), ms, _ends(stage.layers)])
        yield from _indented(rows)


@dataclass(frozen=True, slots=True)
class TensorStageAnswer:
    """Consecutive layers on `data` groups of `tensor` devices; `memory` in bytes a device.

    `ways`: how many layers are computed in each of the ways that have a name.
    """

    layers: list[str]
    data: int
    tensor: int
    seconds: float
    memory: float
    ways: dict[str, int]


@dataclass(frozen=True, slots=True)
class TensorCutAnswer:
    """Layers in stages with data and tensor parallelism; `seconds` a micro-batch."""

    source: str
    devices: int
    bandwidth: float
    micro_batches: int
    memory_limit: float | None
    stages: list[TensorStageAnswer]
    seconds: float
    one_device_seconds: float
    bound: float
    proven: bool
    work: int

    def figures(self) -> Figures:
        """What methods are compared by."""
        return Figures(self.seconds, self.work, self.proven, self.bound)

    def lines(self, graph: str, method: str) -> Iterable[str]:
        """The pace of the pipeline, and its stages."""
        used = sum(stage.data * stage.tensor for stage in self.stages)
        devices = f"{used} of {self.devices}" if used < self.devices else str(used)
        yield (
            f"{graph} on {devices} devices at {self.bandwidth / 1e9:g} GB/s: "
            f"a micro-batch every {self.seconds * 1e3:.4g} ms, "
            f"{_speedup(self.one_device_seconds, self.seconds):.3g} times one device"
            f"{_unproven(self.seconds, self.bound)}"
        )
        rows = [["stage", "data", "tensor", "ms", "memory", "layers", "ways"]]
        for number, stage in enumerate(self.stages):
            ms, memory = f"{stage.seconds * 1e3:.4g}", human(int(stage.memory))
            ways = ", ".join(f"{count} {name}" for name, count in stage.ways.items())
            sizes = (str(number), str(stage.data), str(stage.tensor))
            rows.append([*sizes, ms, memory, _ends(stage.layers), ways])
        yield from _indented(rows)


@dataclass(frozen=True, slots=True)
class DividedPlan:
    """A division of a cluster; `memory` in bytes a device, `seconds` a step.

    `expert` data parallel devices share the experts of a layer.
    """

    tensor: int
    pipeline: int
    data: int
    micro: int
    chunks: int
    expert: int
    seconds: float
    memory: float
    bubble: float
    utilisation: float


@dataclass(frozen=True, slots=True)
class GridAnswer:
    """The divisions of a cluster for a transformer that fit, the fastest first.

    `experts` is how many a layer has, 0 for an MLP.
    """

    source: str
    devices: int
    cluster: str
    parameters: int
    experts: int
    plans: list[DividedPlan]
    proven: bool

    def figures(self) -> Figures:
        """What methods are compared by."""
        return Figures(self.plans[0].seconds, len(self.plans), self.proven)

    def lines(self, graph: str, method: str) -> Iterable[str]:
        """The first divisions."""
        yield (
            f"{graph} on {self.devices} x {self.cluster}: "
            f"{self.parameters / 1e9:.4g} billion parameters, {len(self.plans)} divisions fit"
        )
        names = ["tensor", "pipeline", "data", "micro", "chunks"]
        names += ["expert"] if self.experts else []
        rows = [[*names, "step", "memory", "bubble", "of peak"]]
        for plan in self.plans[:SHOWN]:
            sizes = [plan.tensor, plan.pipeline, plan.data, plan.micro, plan.chunks]
            sizes += [plan.expert] if self.experts else []
            figures = (f"{plan.seconds:.4g} s", human(int(plan.memory)))
            shares = (f"{plan.bubble:.2%}", f"{plan.utilisation:.1%}")
            rows.append([*map(str, sizes), *figures, *shares])
        yield from _indented(rows)


@dataclass(frozen=True, slots=True)
class SubmeshStage:
    """Groups of layers, from one to another, exclusive, on a submesh.

    `submesh` has the nodes and the devices in each, `mesh` how the devices share the work.
    """

    groups: list[int]
    devices: int
    submesh: list[int]
    mesh: str
    seconds: float


@dataclass(frozen=True, slots=True)
class InterOpAnswer:
    """Stages of a transformer on submeshes; `seconds` of all micro-batches.

    `program` is how a program has these stages; None where none can, by the `obstacle`.
    """

    source: str
    devices: int
    cluster: str
    parameters: int
    experts: int
    micro_batches: int
    memory_limit: float
    seconds: float
    stages: list[SubmeshStage]
    program: str | None
    obstacle: str | None
    proven: bool
    work: int

    def figures(self) -> Figures:
        """What methods are compared by."""
        return Figures(self.seconds, self.work, self.proven)

    def lines(self, graph: str, method: str) -> Iterable[str]:
        """The time of a step, and the stages."""
        yield (
            f"{graph} on {self.devices} x {self.cluster}: "
            f"{self.parameters / 1e9:.4g} billion parameters, "
            f"{counted(self.micro_batches, 'micro-batch')} in {self.seconds:.4g} s"
        )
        axes = "data, tensor, expert" if self.experts else "data, tensor"
        rows = [["stage", "devices", "submesh", axes, "groups", "ms a micro-batch"]]
        for number, stage in enumerate(self.stages):
            first, end = stage.groups
            groups = f"{first}" if end == first + 1 else f"{first} to {end - 1}"
            ms = f"{stage.seconds * 1e3:.4g}"
            shape = " x ".join(map(str, stage.submesh))
            rows.append([str(number), str(stage.devices), shape, stage.mesh, groups, ms])
        yield from _indented(rows)
        if self.program:
            yield f"in a program: {self.program}"
        else:
            yield f"no program has these stages: {self.obstacle}"


@dataclass(frozen=True, slots=True)
class DevicesAnswer:
    """The device of each group of operators."""

    source: str
    devices: int
    bandwidth: float
    places: dict[str, int]
    seconds: float
    one_device_seconds: float
    proven: bool
    work: int

    def figures(self) -> Figures:
        """What methods are compared by."""
        return Figures(self.seconds, self.work, self.proven)

    def lines(self, graph: str, method: str) -> Iterable[str]:
        """The time of a step, and where each group is."""
        best = "the best of all" if self.proven else "the best of those"
        yield (
            f"{graph} on {self.devices} devices: {self.seconds:.4g} s, "
            f"{_speedup(self.one_device_seconds, self.seconds):.3g} times one device; "
            f"{best} {self.work:,} tried"
        )
        yield from _indented([[g, f"device {place}"] for g, place in self.places.items()])


def _indented(rows: list[list[str]]) -> Iterable[str]:
    return (f"  {line}" for line in aligned(rows))


def _ends(layers: list[str]) -> str:
    """The first and the last layer, and how many there are."""
    return layers[0] if len(layers) == 1 else f"{layers[0]} to {layers[-1]} ({len(layers)})"


def _unproven(seconds: float, bound: float) -> str:
    """What could be saved at most, where it is not proven that nothing is."""
    return f"; at most {(seconds - bound) / seconds:.1%} could be saved" if bound < seconds else ""


def _speedup(one_device: float, seconds: float) -> float:
    """How much faster than on one device; what takes no time is no faster."""
    return one_device / seconds if seconds else 1.0
