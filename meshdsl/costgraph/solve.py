"""`search --graph`: the methods for each kind of graph with costs, and why there is no plan."""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import NoReturn

from meshdsl.cluster.profile import Cluster, load
from meshdsl.costgraph.annealing import anneal
from meshdsl.costgraph.answers import (
    DevicesAnswer,
    DividedPlan,
    GraphAnswer,
    GridAnswer,
    InterOpAnswer,
    PartitionAnswer,
    PartitionStage,
    PlacementAnswer,
    Solved,
    SubmeshStage,
    TensorCutAnswer,
    TensorStageAnswer,
)
from meshdsl.costgraph.bayesian import bayesian
from meshdsl.costgraph.critical_path import critical_path
from meshdsl.costgraph.device_placement import Devices, GraphOperator, exhaustive, reinforce
from meshdsl.costgraph.exact import (
    TooWide,
    branch_and_bound,
    eliminate,
    integer_program,
    priced_memory,
)
from meshdsl.costgraph.graph import CostGraph, Solution, least_memory
from meshdsl.costgraph.graph_file import (
    GraphObject,
    costs_of,
    expert_of,
    layers_of,
    operators_of,
    read_graph,
    transformer_of,
)
from meshdsl.costgraph.greedy import greedy
from meshdsl.costgraph.grid import GridPlan, Uncut, near_stages, ranked
from meshdsl.costgraph.inter_op import (
    InterOpPlan,
    best_pipeline,
    divides,
    submesh_shape,
    transformer_ways,
)
from meshdsl.costgraph.layer_graph import GraphTooLarge, LayerGraph, members
from meshdsl.costgraph.layer_partition import Levels, cut, flat, levels_of
from meshdsl.costgraph.learned import learned
from meshdsl.costgraph.partitioning import Placer, given, partitioned, single
from meshdsl.costgraph.sampled_graphs import sampled_costs, sampled_devices
from meshdsl.costgraph.tensor_stages import cut_with_tensors
from meshdsl.costgraph.transformer import Transformer
from meshdsl.diagnostics import DiagnosticError, Source, Span, fail
from meshdsl.option_edits import give, leave_out, one_of, refuse, unknown_value
from meshdsl.report.document import human
from meshdsl.search.request import SearchRequest

MOST_PLACEMENTS = 100_000
"""Placements of groups on devices that are all tried."""

MOST_STEPS = 5_000_000
"""Stages, on submeshes, at places of a pipeline that are tried for one pace."""

Solve = Callable[[GraphObject, SearchRequest], GraphAnswer]
"""A method: from what is written in the file, and what is asked."""

NEEDED = "as in `--devices 4 --bandwidth 1.25GB/s`, `--devices 3072 --cluster a100-dgx`"


def solved(path: Path, request: SearchRequest) -> Solved:
    """The best plan of the graph in a file. Raises MD066x."""
    top = read_graph(path)
    kind = top.field("kind").value
    methods = METHODS[kind]
    name = request.method or next(iter(methods))
    if name not in methods:
        span = Span(Source("--method", name), 0, len(name))
        message = f"no method `{name}` for a graph of kind {kind}"
        raise DiagnosticError(unknown_value("MD0665", message, "--method", name, methods, span))
    if request.stages is not None and name != "grid":
        span = Span(Source("--stages", str(request.stages)), 0, len(str(request.stages)))
        fixes = [leave_out("--stages", safe=False)]
        if kind == "transformer":
            fixes.insert(0, give("--method", "grid", safe=False))
        message = f"`{name}` finds how many stages there are by itself"
        refuse("MD0665", message, fixes, span=span)
    return Solved(str(path), kind, name, methods[name](top, request))


def _refuse_unread(what: str, **options: object) -> None:
    """Raise MD0665 for an option that would change nothing."""
    for name, value in options.items():
        if value is not None:
            refuse("MD0665", f"{what}: `--{name}` means nothing there", leave_out(f"--{name}"))


# --- placements ----------------------------------------------------------------------------------


def _elimination(graph: CostGraph) -> Solution:
    return priced_memory(graph) if math.isfinite(graph.limit) else eliminate(graph)


def _placement(solve: Callable[[CostGraph], Solution]) -> Solve:
    """The plan of a graph of placements by an exact method or a sample."""

    def answer(top: GraphObject, request: SearchRequest) -> GraphAnswer:
        graph = costs_of(top)
        _refuse_unread(
            "a graph of placements",
            devices=request.devices,
            bandwidth=request.bandwidth,
            cluster=request.cluster,
        )
        if request.memory is not None:
            if not graph.memory:
                other = 'write `"memory": […]` in the nodes'
                message = "no node says how much memory its choices take"
                refuse("MD0665", message, leave_out("--memory", safe=False), other)
            graph = replace(graph, limit=request.memory)
        try:
            best = solve(graph)
        except TooWide as error:
            help = "take another `--method`, such as `mcmc` for a sample"
            top.refuse(str(error), "MD0663", help)
        if not best.found:
            _refuse_infeasible(top, graph, best)
        held = graph.bytes(best.picks) if graph.memory else None
        return PlacementAnswer(
            source=graph.source,
            choices=graph.names(best.picks),
            cost=best.cost,
            memory=held,
            memory_limit=graph.limit if math.isfinite(graph.limit) else None,
            bound=best.bound if math.isfinite(best.bound) else None,
            proven=best.proven,
            combinations=math.prod(graph.sizes),
            work=best.work,
            note=best.note,
        )

    return answer


def _refuse_infeasible(top: GraphObject, graph: CostGraph, best: Solution) -> NoReturn:
    """Say why there is no plan: edges that forbid all, the limit, or a method that missed it."""
    exact = "take `--method elimination`, or a smaller graph"
    try:
        least = integer_program(least_memory(graph))
    except TooWide:
        if best.proven:
            top.refuse("every plan is forbidden, or exceeds the limit of memory", "MD0664")
        message = f"{best.method} found no plan, and the graph is too large to know if there is one"
        top.refuse(message, "MD0663", exact)
    if not least.found:
        top.field("nodes").refuse("every combination of choices is forbidden", "MD0664")
    if not best.proven and graph.bytes(least.picks) <= graph.limit:
        top.refuse(f"{best.method} found no plan, but there is one", "MD0663", exact)
    message = f"no plan fits in {human(int(graph.limit))}: the least is {human(int(least.cost))}"
    named = ", ".join(f"{n} {choice}" for n, choice in graph.names(least.picks).items())
    fix = give("--memory", f"{math.ceil(least.cost)}B", safe=False)
    top.refuse(message, "MD0664", f"{fix.title}: {named}", (fix,))


# --- stages --------------------------------------------------------------------------------------


def _stages(single: bool) -> Solve:
    """The plan of a graph of layers: stages on several devices, or on one each."""

    def answer(top: GraphObject, request: SearchRequest) -> GraphAnswer:
        graph = layers_of(top)
        levels = _levels(request, single)
        limit = _limit(graph, request, "" if single else "pipedream")
        try:
            best = cut(graph, levels, single, limit)
        except GraphTooLarge as error:
            help = "merge layers, those that run side by side first, or take fewer devices"
            top.field("layers").refuse(str(error), "MD0663", help)
        if best is None:
            _refuse_stages(top, graph, request, math.prod(level.units for level in levels))
        alone = math.fsum(layer.seconds for layer in graph.layers)
        stages = [
            PartitionStage([graph.layers[i].name for i in s.layers], s.devices, s.seconds)
            for s in best.stages
        ]
        return PartitionAnswer(
            source=graph.source,
            devices=math.prod(level.units for level in levels),
            bandwidth=request.bandwidth,
            cluster=request.cluster,
            levels=list(levels),
            stages=stages,
            replicas=best.replicas,
            seconds=best.seconds,
            one_device_seconds=alone,
            bound=best.bound,
            proven=best.bound == best.seconds,
            work=best.work,
        )

    return answer


def _tensor_stages(top: GraphObject, request: SearchRequest) -> GraphAnswer:
    """The plan of a graph of layers that several devices may compute together."""
    graph = layers_of(top)
    _refuse_unread("stages with tensor parallelism", cluster=request.cluster)
    micros = top.field("micro_batches").count()
    devices, bandwidth, limit = request.devices, request.bandwidth, _limit(graph, request, "piper")
    if devices is None or bandwidth is None:
        message = "a graph of layers needs `--devices` and `--bandwidth`"
        fail("MD0665", message, help=NEEDED)
    try:
        best = cut_with_tensors(graph, devices, bandwidth, micros, limit)
    except GraphTooLarge as error:
        help = "merge layers, or take fewer devices"
        top.field("layers").refuse(str(error), "MD0663", help)
    if best is None:
        message = f"no stages on {devices} devices fit in {human(int(limit))} a device"
        help = "take more `--devices`, a greater `--memory`, or ways that hold less"
        if math.isinf(limit):
            message = f"the layers have no ways that {devices} devices can compute"
            help = 'write a way with `"tensor": 1`, or the same `tensor` in all layers'
        top.field("layers").refuse(message, "MD0664", help)
    stages = [
        TensorStageAnswer(
            [graph.layers[i].name for i in stage.layers],
            stage.data,
            stage.tensor,
            stage.seconds,
            stage.memory,
            dict(Counter(way.name for way in stage.ways if way.name)),
        )
        for stage in best.stages
    ]
    alone = (min(way.seconds * way.tensor for way in layer.all_ways) for layer in graph.layers)
    return TensorCutAnswer(
        source=graph.source,
        devices=devices,
        bandwidth=bandwidth,
        micro_batches=micros,
        memory_limit=None if math.isinf(limit) else limit,
        stages=stages,
        seconds=best.seconds,
        one_device_seconds=math.fsum(alone),
        bound=best.bound,
        proven=best.bound == best.seconds,
        work=best.work,
    )


def _limit(graph: LayerGraph, request: SearchRequest, both_passes: str) -> float:
    """The most bytes that a device may hold. Raises MD0665 where nothing says what layers take.

    So it does of layers of a backward pass where a method, `both_passes`, has none.
    """
    if both_passes and any(layer.is_backward for layer in graph.layers):
        message = f"`{both_passes}` has both passes in one layer, with `forward` and `backward`"
        refuse("MD0665", message, give("--method", "throughput"))
    if request.memory is None:
        return math.inf
    if not any(w.memory or w.in_flight for layer in graph.layers for w in layer.all_ways):
        other = 'write `"memory": …` in the layers'
        message = "no layer says how much memory it takes"
        refuse("MD0665", message, leave_out("--memory", safe=False), other)
    return request.memory


def _refuse_stages(
    top: GraphObject, graph: LayerGraph, request: SearchRequest, devices: int
) -> NoReturn:
    """Say what stages hold at least: the largest block, or an even share of all."""
    assert request.memory is not None
    most = max(math.fsum(graph.layers[i].memory for i in members(mask)) for mask, _ in graph.blocks)
    share = math.fsum(layer.memory for layer in graph.layers) / devices
    message = f"no stages on {devices} devices fit in {human(request.memory)} a device"
    help = (
        f"the largest layer or group holds {human(int(most))}, an even share of all "
        f"{human(int(share))}: take a greater `--memory`"
    )
    top.field("layers").refuse(message, "MD0664", help)


def _levels(request: SearchRequest, single: bool) -> Levels:
    """The devices that layers are cut over, and their links. Raises MD0665, MD0666."""
    if single:
        _refuse_unread("stages on one device each", cluster=request.cluster)
    if request.cluster is not None:
        _refuse_unread(f"the links of {request.cluster} are known", bandwidth=request.bandwidth)
    links = request.cluster or request.bandwidth
    if request.devices is None or links is None:
        either = "`--bandwidth`" if single else "`--bandwidth` or `--cluster`"
        fail("MD0665", f"a graph of layers needs `--devices` and {either}", help=NEEDED)
    if not isinstance(links, str):
        return flat(request.devices, links)
    cluster = load(links)
    levels = levels_of(cluster, request.devices)
    if levels is None:
        sizes = list(itertools.accumulate((k.size for k in cluster.levels), operator.mul))
        unit = next(n for n in reversed([1, *sizes]) if n <= request.devices)
        near = [str(unit * (request.devices // unit + more)) for more in (0, 1)]
        message = f"{request.devices} devices leave a unit of {cluster.name} in part"
        refuse("MD0666", message, one_of("--devices", near), "give `--bandwidth` for one level")
    return levels


# --- equal layers --------------------------------------------------------------------------------


def _machines(request: SearchRequest) -> tuple[int, Cluster]:
    """The devices that a transformer is divided over, and their cluster. Raises MD0665."""
    if request.devices is None or request.cluster is None:
        fail("MD0665", "a transformer needs `--devices` and `--cluster`", help=NEEDED)
    _refuse_unread("a transformer", bandwidth=request.bandwidth)
    return request.devices, load(request.cluster)


def _grid(top: GraphObject, request: SearchRequest) -> GridAnswer:
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
    return GridAnswer(
        source=top.field("source", "").value,
        devices=devices,
        cluster=cluster.name,
        parameters=model.parameters,
        experts=model.experts.count if model.experts else 0,
        plans=[*map(_divided, plans)],
        proven=True,
    )


def _refuse_division(
    top: GraphObject, model: Transformer, cluster: Cluster, request: SearchRequest
) -> NoReturn:
    """Say why no division is left: none divides the sizes, or none fits in memory."""
    assert request.devices is not None
    every = ranked(model, cluster, request.devices, True, math.inf, request.stages)
    if not every:
        _refuse_undivided(top, model, request.devices, cluster)
    limit = cluster.device.memory if request.memory is None else request.memory
    least = min(every, key=lambda plan: plan.bytes)
    message = (
        f"nothing fits in {human(int(limit))} a device: the least is {human(int(least.bytes))}"
    )
    way = least.division
    sizes = f"tensor {way.tensor}, pipeline {way.pipeline}, data {way.data}"
    fix = give("--memory", f"{math.ceil(least.bytes)}B", safe=False)
    top.refuse(message, "MD0664", f"{fix.title}: {sizes} takes that", (fix,))


def _refuse_undivided(
    top: GraphObject, model: Transformer, devices: int, cluster: Cluster
) -> NoReturn:
    groups = ", with whole groups of tokens on each device" if model.experts else ""
    message = f"no division of {devices} devices divides the heads, layers and batch{groups}"
    top.refuse(message, "MD0666", f"{cluster.name}: try another number of devices")


def _divided(plan: GridPlan) -> DividedPlan:
    return DividedPlan(
        **asdict(plan.division),
        seconds=plan.seconds,
        memory=plan.bytes,
        bubble=plan.bubble,
        utilisation=plan.utilisation,
    )


def _alpa(top: GraphObject, request: SearchRequest) -> InterOpAnswer:
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
    steps = len(ways(0, groups)) * groups * (groups + 1) // 2 * min(groups, devices)
    if steps > MOST_STEPS:
        message = f"{groups} groups on {devices} devices are too many to try all cuts"
        help = "write fewer `groups`, or take `--method grid`"
        top.field("groups", groups).refuse(message, "MD0663", help)
    best = best_pipeline(groups, devices, micros, limit, ways)
    if best is None and not divides(groups, devices, ways):
        _refuse_undivided(top, model, devices, cluster)
    if best is None:
        help = "use more devices or more micro-batches"
        message = f"no pipeline on {devices} devices fits in {human(int(limit))} a device"
        top.refuse(message, "MD0664", help)
    ends = (*best.starts[1:], groups)
    program, obstacle = as_program(model, best, micros, groups)
    stages = [
        SubmeshStage(
            [a, b], way.devices, [*submesh_shape(cluster, way.devices)], way.name, way.seconds
        )
        for a, b, way in zip(best.starts, ends, best.ways, strict=True)
    ]
    return InterOpAnswer(
        source=top.field("source", "").value,
        devices=devices,
        cluster=cluster.name,
        parameters=model.parameters,
        experts=model.experts.count if model.experts else 0,
        micro_batches=micros,
        memory_limit=limit,
        seconds=best.seconds,
        stages=stages,
        program=program,
        obstacle=obstacle,
        proven=True,
        work=best.work,
    )


def as_program(
    model: Transformer, plan: InterOpPlan, micros: int, groups: int
) -> tuple[str | None, str | None]:
    """A mesh and a rule for these stages, or what is in the way.

    All stages of a program have one mesh and whole iterations of a loop over layers: each with as
    many layers as there are until the next with experts.
    """
    meshes = {way.mesh[:2] for way in plan.ways}
    each = model.experts.every if model.experts else 1
    ends = (*plan.starts[1:], groups)
    layers = [(b - a) * model.layers // groups for a, b in zip(plan.starts, ends, strict=True)]
    if len(meshes) > 1:
        return None, "their meshes differ"
    if any(count % each for count in layers):
        return None, f"one of every {each} layers has experts, and stages have other numbers"
    data, tensor = meshes.pop()
    sizes = " ".join(str(count // each) for count in layers)
    uneven = f', layers="{sizes}"' if len({*layers}) > 1 else ""
    schedule = f"one_f_one_b[batch]({micros}{uneven})"
    mesh = f"mesh {{ pipe: {len(layers)}, data: {data}, tensor: {tensor} }}"
    return (f"{mesh}, layers -> pipe with {schedule}" if len(layers) > 1 else mesh), None


# --- operators on devices ------------------------------------------------------------------------


def _devices(place: Placer, proven: bool = False) -> Solve:
    """The device of each group, by a method that tries every placement or some."""

    def answer(top: GraphObject, request: SearchRequest) -> GraphAnswer:
        groups, operators = operators_of(top)
        count = _device_count(request)
        if proven and count ** len(groups) > MOST_PLACEMENTS:
            message = f"{len(groups)} groups on {count} devices are too many to try"
            top.field("operators").refuse(message, "MD0663", "take `--method rl`, or fewer groups")
        return _placed(top, request, groups, operators, place, proven)

    return answer


def _expert(top: GraphObject, request: SearchRequest) -> DevicesAnswer:
    """The placement that the graph itself has for so many devices."""
    groups, operators = operators_of(top)
    place = given(expert_of(top, groups, _device_count(request)))
    return _placed(top, request, groups, operators, place)


def _device_count(request: SearchRequest) -> int:
    if request.devices is None or request.bandwidth is None:
        fail("MD0665", "operators on devices need `--devices` and `--bandwidth`", help=NEEDED)
    _refuse_unread("operators on devices", memory=request.memory, cluster=request.cluster)
    return request.devices


def _placed(
    top: GraphObject,
    request: SearchRequest,
    groups: Sequence[str],
    operators: Sequence[GraphOperator],
    place: Placer,
    proven: bool = False,
) -> DevicesAnswer:
    assert request.devices is not None
    assert request.bandwidth is not None
    transfer = top.field("transfer", 0).cost()
    best = place(operators, Devices(request.devices, transfer, request.bandwidth))
    return DevicesAnswer(
        source=top.field("source", "").value,
        devices=request.devices,
        bandwidth=request.bandwidth,
        places=dict(zip(groups, best.devices, strict=True)),
        seconds=best.seconds,
        one_device_seconds=math.fsum(o.seconds for o in operators),
        proven=proven,
        work=best.tried,
    )


METHODS: dict[str, dict[str, Solve]] = {
    "placement": {
        "elimination": _placement(_elimination),
        "ilp": _placement(integer_program),
        "branch": _placement(branch_and_bound),
        "exhaustive": _placement(lambda graph: branch_and_bound(graph, bounded=False)),
        "mcmc": _placement(anneal),
        "greedy": _placement(greedy),
        "bayesian": _placement(sampled_costs("bayesian", bayesian)),
        "learned": _placement(sampled_costs("learned", learned)),
    },
    "stages": {
        "pipedream": _stages(single=False),
        "throughput": _stages(single=True),
        "piper": _tensor_stages,
    },
    "transformer": {"grid": _grid, "alpa": _alpa},
    "devices": {
        "exhaustive": _devices(exhaustive, proven=True),
        "rl": _devices(reinforce),
        "single": _devices(single),
        "scotch": _devices(partitioned("scotch", recursive=True)),
        "mincut": _devices(partitioned("mincut", recursive=False)),
        "expert": _expert,
        "critical-path": _devices(critical_path),
        "bayesian": _devices(sampled_devices(bayesian)),
        "learned": _devices(sampled_devices(learned)),
    },
}
"""The methods for each kind of graph; the first is taken unless another is named."""
