"""What `search --graph` says: the best plan of a graph with costs, and what is proven of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

from meshdsl.cluster.profile import Cluster, load
from meshdsl.costgraph.annealing import anneal
from meshdsl.costgraph.device_placement import Devices, exhaustive, reinforce
from meshdsl.costgraph.exact import (
    TooWide,
    branch_and_bound,
    eliminate,
    integer_program,
    priced_memory,
)
from meshdsl.costgraph.graph import CostGraph, Solution, least_memory
from meshdsl.costgraph.graph_file import (
    Written,
    costs_of,
    layers_of,
    operators_of,
    read_graph,
    transformer_of,
)
from meshdsl.costgraph.grid import Division, Plan, Uncut, near_stages, ranked
from meshdsl.costgraph.inter_op import best_pipeline, transformer_ways
from meshdsl.costgraph.layer_partition import TooLarge, cut
from meshdsl.costgraph.transformer import Transformer
from meshdsl.diagnostics import Source, Span, counted, did_you_mean, fail
from meshdsl.report.document import aligned, human
from meshdsl.search.request import Request

Json = dict[str, Any]

MOST_PLACEMENTS = 100_000
"""Placements of groups on devices that are all tried."""

SHOWN = 5
"""Divisions of equal layers that are shown."""

NEEDED = "as in `--devices 4 --bandwidth 1.25GB/s`, `--devices 3072 --cluster a100-dgx`"


def solved(path: Path, request: Request) -> Json:
    """The best plan of the graph in a file. Raises MD066x."""
    top = read_graph(path)
    kind = top.field("kind").value
    methods = METHODS[kind]
    name = request.method or next(iter(methods))
    if name not in methods:
        span = Span(Source("--method", name), 0, len(name))
        help = did_you_mean(name, list(methods)) or f"there are {', '.join(methods)}"
        fail("MD0665", f"no method `{name}` for a graph of kind {kind}", span, help=help)
    if request.stages is not None and name != "grid":
        span = Span(Source("--stages", str(request.stages)), 0, len(str(request.stages)))
        help = "leave it out" if kind != "transformer" else "take `--method grid`, or leave it out"
        fail("MD0665", f"`{name}` finds how many stages there are by itself", span, help=help)
    found = methods[name](top, request)
    return {"version": 1, "graph": str(path), "kind": kind, "method": name, **found}


def _refuse_unread(what: str, **options: object) -> None:
    """Raise MD0665 for an option that would change nothing."""
    for name, value in options.items():
        if value is not None:
            fail("MD0665", f"{what}: `--{name}` means nothing there", help=f"leave `--{name}` out")


# --- placements ----------------------------------------------------------------------------------


def _elimination(graph: CostGraph) -> Solution:
    return priced_memory(graph) if math.isfinite(graph.limit) else eliminate(graph)


def _placement(solve: Callable[[CostGraph], Solution]) -> Callable[[Written, Request], Json]:
    """The plan of a graph of placements by an exact method or a sample."""

    def found(top: Written, request: Request) -> Json:
        graph = costs_of(top)
        _refuse_unread(
            "a graph of placements",
            devices=request.devices,
            bandwidth=request.bandwidth,
            cluster=request.cluster,
        )
        if request.memory is not None:
            graph = replace(graph, limit=request.memory)
        try:
            best = solve(graph)
            if not best.found:
                _refuse_infeasible(top, graph, best)
        except TooWide as error:
            help = "take another `--method`, such as `mcmc` for a sample"
            top.refuse(str(error), "MD0663", help)
        held = graph.bytes(best.picks) if graph.memory else None
        return {
            "source": graph.source,
            "choices": graph.names(best.picks),
            "cost": best.cost,
            "memory": held,
            "memory_limit": graph.limit if math.isfinite(graph.limit) else None,
            "bound": best.bound if math.isfinite(best.bound) else None,
            "proven": best.proven,
            "combinations": math.prod(graph.sizes),
            "work": best.work,
            "note": best.note,
        }

    return found


def _refuse_infeasible(top: Written, graph: CostGraph, best: Solution) -> NoReturn:
    """Say why there is no plan: a method that gave up, edges that forbid all, or the limit."""
    if not best.proven and integer_program(replace(graph, limit=math.inf)).found:
        help = "take `--method elimination`, or a smaller graph"
        top.refuse(f"{best.method} found no plan within its limits", "MD0663", help)
    least = integer_program(least_memory(graph))
    if not least.found:
        top.field("edges").refuse("every combination of choices is forbidden", "MD0664")
    message = f"no plan fits in {human(int(graph.limit))}: the least is {human(int(least.cost))}"
    named = ", ".join(f"{n} {choice}" for n, choice in graph.names(least.picks).items())
    top.refuse(message, "MD0664", f"{math.ceil(least.cost):,} bytes would do: {named}")


# --- stages --------------------------------------------------------------------------------------


def _stages(single: bool) -> Callable[[Written, Request], Json]:
    """The plan of a graph of layers: stages on several devices, or on one each."""

    def found(top: Written, request: Request) -> Json:
        graph = layers_of(top)
        if request.devices is None or request.bandwidth is None:
            fail("MD0665", "a graph of layers needs `--devices` and `--bandwidth`", help=NEEDED)
        _refuse_unread("a graph of layers", memory=request.memory, cluster=request.cluster)
        try:
            best = cut(graph, request.devices, request.bandwidth, single)
        except TooLarge as error:
            help = "merge layers, those that run side by side first, or take fewer devices"
            top.field("layers").refuse(str(error), "MD0663", help)
        alone = math.fsum(layer.seconds for layer in graph.layers)
        stages = [
            {
                "layers": [graph.layers[i].name for i in stage.layers],
                "devices": stage.devices,
                "seconds": stage.seconds,
            }
            for stage in best.stages
        ]
        return {
            "source": graph.source,
            "devices": request.devices,
            "bandwidth": request.bandwidth,
            "stages": stages,
            "replicas": best.replicas,
            "seconds": best.seconds,
            "one_device_seconds": alone,
            "proven": True,
            "work": best.work,
        }

    return found


# --- equal layers --------------------------------------------------------------------------------


def _machines(request: Request) -> tuple[int, Cluster]:
    """The devices that a transformer is divided over, and their cluster. Raises MD0665."""
    if request.devices is None or request.cluster is None:
        fail("MD0665", "a transformer needs `--devices` and `--cluster`", help=NEEDED)
    _refuse_unread("a transformer", bandwidth=request.bandwidth)
    return request.devices, load(request.cluster)


def _grid(top: Written, request: Request) -> Json:
    """The divisions of a cluster for a transformer, the fastest first."""
    model = transformer_of(top)
    devices, cluster = _machines(request)
    try:
        plans = ranked(model, cluster, devices, True, request.memory, request.stages)
    except Uncut:
        near = " and ".join(map(str, near_stages(model, request.stages or 1)))
        message = f"{model.layers} layers do not cut into {request.stages} stages"
        top.field("layers").refuse(message, "MD0666", f"the nearest numbers of stages are {near}")
    if not plans:
        _refuse_division(top, model, cluster, request)
    return {
        "source": top.field("source", "").value,
        "devices": devices,
        "cluster": cluster.name,
        "parameters": model.parameters,
        "plans": [_division(plan) for plan in plans],
        "proven": True,
    }


def _refuse_division(
    top: Written, model: Transformer, cluster: Cluster, request: Request
) -> NoReturn:
    """Say why no division is left: none divides the sizes, or none fits in memory."""
    assert request.devices is not None
    every = ranked(model, cluster, request.devices, True, math.inf, request.stages)
    if not every:
        message = f"no division of {request.devices} devices divides the heads, layers and batch"
        top.refuse(message, "MD0666", f"{cluster.name}: try another number of devices")
    limit = cluster.device.memory if request.memory is None else request.memory
    least = min(every, key=lambda plan: plan.bytes)
    message = (
        f"nothing fits in {human(int(limit))} a device: the least is {human(int(least.bytes))}"
    )
    top.refuse(message, "MD0664", f"{_said(least.division)} takes that")


def _division(plan: Plan) -> Json:
    return {
        **asdict(plan.division),
        "seconds": plan.seconds,
        "memory": plan.bytes,
        "bubble": plan.bubble,
        "utilisation": plan.utilisation,
    }


def _said(division: Division) -> str:
    return f"tensor {division.tensor}, pipeline {division.pipeline}, data {division.data}"


def _alpa(top: Written, request: Request) -> Json:
    """Stages of a transformer on submeshes of a cluster."""
    model = transformer_of(top)
    devices, cluster = _machines(request)
    micros = top.field("micro_batches").count()
    groups = top.field("groups", model.layers).count()
    for name, whole, parts in (
        ("micro_batches", model.batch, micros),
        ("groups", model.layers, groups),
    ):
        if whole % parts:
            top.field(name).refuse(f"{parts} does not divide {whole}", "MD0666")
    limit = cluster.device.memory if request.memory is None else request.memory
    ways = transformer_ways(model, cluster, groups, model.batch // micros, devices)
    best = best_pipeline(groups, devices, micros, limit, ways)
    if best is None:
        help = "use more devices or more micro-batches"
        message = f"no pipeline on {devices} devices fits in {human(int(limit))} a device"
        top.refuse(message, "MD0664", help)
    ends = (*best.starts[1:], groups)
    stages = [
        {"groups": [a, b], "devices": way.devices, "mesh": way.name, "seconds": way.seconds}
        for a, b, way in zip(best.starts, ends, best.ways, strict=True)
    ]
    return {
        "source": top.field("source", "").value,
        "devices": devices,
        "cluster": cluster.name,
        "parameters": model.parameters,
        "micro_batches": micros,
        "memory_limit": limit,
        "seconds": best.seconds,
        "stages": stages,
        "proven": True,
        "work": best.work,
    }


# --- operators on devices ------------------------------------------------------------------------


def _devices(learned: bool) -> Callable[[Written, Request], Json]:
    """The device of each group: the best of all, or one that is learned."""

    def found(top: Written, request: Request) -> Json:
        groups, operators = operators_of(top)
        if request.devices is None or request.bandwidth is None:
            fail("MD0665", "operators on devices need `--devices` and `--bandwidth`", help=NEEDED)
        _refuse_unread("operators on devices", memory=request.memory, cluster=request.cluster)
        transfer = top.field("transfer", 0).cost()
        devices = Devices(request.devices, transfer, request.bandwidth)
        if not learned and request.devices ** len(groups) > MOST_PLACEMENTS:
            message = f"{len(groups)} groups on {request.devices} devices are too many to try"
            top.field("operators").refuse(message, "MD0663", "take `--method rl`, or fewer groups")
        best = reinforce(operators, devices) if learned else exhaustive(operators, devices)
        return {
            "source": top.field("source", "").value,
            "devices": request.devices,
            "bandwidth": request.bandwidth,
            "places": dict(zip(groups, best.devices, strict=True)),
            "seconds": best.seconds,
            "one_device_seconds": math.fsum(o.seconds for o in operators),
            "proven": not learned,
            "work": best.tried,
        }

    return found


METHODS: dict[str, dict[str, Callable[[Written, Request], Json]]] = {
    "placement": {
        "elimination": _placement(_elimination),
        "ilp": _placement(integer_program),
        "branch": _placement(branch_and_bound),
        "exhaustive": _placement(lambda graph: branch_and_bound(graph, bounded=False)),
        "mcmc": _placement(anneal),
    },
    "stages": {"pipedream": _stages(single=False), "throughput": _stages(single=True)},
    "transformer": {"grid": _grid, "alpa": _alpa},
    "devices": {"exhaustive": _devices(learned=False), "rl": _devices(learned=True)},
}
"""The methods for each kind of graph; the first is taken unless another is named."""


# --- for people ----------------------------------------------------------------------------------


def text(found: Json) -> str:
    """The result of `solved` as text."""
    lines = {
        "placement": _placement_text,
        "stages": _stages_text,
        "transformer": _grid_text,
        "devices": _devices_text,
    }
    write = _alpa_text if found["method"] == "alpa" else lines[found["kind"]]
    return "\n".join(write(found)) + "\n"


def _placement_text(found: Json) -> list[str]:
    known = "no choice costs less" if found["proven"] else _unproven(found)
    held = "" if found["memory"] is None else f", {human(int(found['memory']))}"
    head = f"{found['graph']}: cost {found['cost']:.6g}{held}, by {found['method']}: {known}"
    counts = f"{found['combinations']:,} combinations, {found['work']:,} steps"
    rows = [list(pair) for pair in found["choices"].items()]
    return [head, counts, *(f"  {line}" for line in aligned(rows))]


def _unproven(found: Json) -> str:
    if found["bound"] is None:
        return found["note"] or "nothing is proven"
    above = (found["cost"] - found["bound"]) / found["cost"]
    return f"within {above:.2%} of the least"


def _times(found: Json) -> float:
    """How much faster than on one device; what takes no time is no faster."""
    return float(found["one_device_seconds"] / found["seconds"]) if found["seconds"] else 1.0


def _stages_text(found: Json) -> list[str]:
    head = (
        f"{found['graph']} on {found['devices']} devices at {found['bandwidth'] / 1e9:g} GB/s: "
        f"{found['replicas']}, a micro-batch every {found['seconds'] * 1e3:.4g} ms, "
        f"{_times(found):.3g} times one device"
    )
    rows = [["stage", "devices", "ms", "layers"]]
    for number, stage in enumerate(found["stages"]):
        layers = stage["layers"]
        ends = layers[0] if len(layers) == 1 else f"{layers[0]} to {layers[-1]} ({len(layers)})"
        ms = f"{stage['seconds'] * 1e3:.4g}"
        rows.append([str(number), str(stage["devices"]), ms, ends])
    return [head, *(f"  {line}" for line in aligned(rows))]


def _devices_text(found: Json) -> list[str]:
    known = "the best of all" if found["proven"] else "the best of those"
    head = (
        f"{found['graph']} on {found['devices']} devices: {found['seconds']:.4g} s, "
        f"{_times(found):.3g} times one device; {known} {found['work']:,} tried"
    )
    rows = [[group, f"device {place}"] for group, place in found["places"].items()]
    return [head, *(f"  {line}" for line in aligned(rows))]


def _grid_text(found: Json) -> list[str]:
    head = (
        f"{found['graph']} on {found['devices']} x {found['cluster']}: "
        f"{found['parameters'] / 1e9:.4g} billion parameters, {len(found['plans'])} divisions fit"
    )
    names = ("tensor", "pipeline", "data", "micro", "chunks")
    rows = [[*names, "step", "memory", "bubble", "of peak"]]
    for plan in found["plans"][:SHOWN]:
        figures = (f"{plan['seconds']:.4g} s", human(int(plan["memory"])))
        shares = (f"{plan['bubble']:.2%}", f"{plan['utilisation']:.1%}")
        rows.append([*(str(plan[n]) for n in names), *figures, *shares])
    return [head, *(f"  {line}" for line in aligned(rows))]


def _alpa_text(found: Json) -> list[str]:
    head = (
        f"{found['graph']} on {found['devices']} x {found['cluster']}: "
        f"{found['parameters'] / 1e9:.4g} billion parameters, "
        f"{counted(found['micro_batches'], 'micro-batch')} in {found['seconds']:.4g} s"
    )
    rows = [["stage", "devices", "data, tensor", "groups", "ms a micro-batch"]]
    for number, stage in enumerate(found["stages"]):
        first, end = stage["groups"]
        groups = f"{first}" if end == first + 1 else f"{first} to {end - 1}"
        ms = f"{stage['seconds'] * 1e3:.4g}"
        rows.append([str(number), str(stage["devices"]), stage["mesh"], groups, ms])
    return [head, *(f"  {line}" for line in aligned(rows))]
