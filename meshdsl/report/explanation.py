"""`explain`: each tensor's layout, the bytes sent, the reasons, and the remedies.

The facts are JSON version 1; every view is made of them, as the document for people in
`explanation_document`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING

from meshdsl.cluster.timing import Timing
from meshdsl.device.alike import computed
from meshdsl.device.ir import (
    Bucket,
    Collective,
    DeviceProgram,
    Move,
    Wait,
    only_on,
    walk,
)
from meshdsl.device.memory import memory, walks
from meshdsl.device.offloaded_updates import tiers, traffic, transfers
from meshdsl.device.traffic import Done, Sender, senders
from meshdsl.diagnostics import Diagnostic
from meshdsl.ir.program import every, loops
from meshdsl.named.ir import Goal, NamedOp, Value
from meshdsl.placed import ir as placed
from meshdsl.placed.collectives import COLLECTIVES
from meshdsl.placed.place import SOME_ROUTES
from meshdsl.placed.placements import Mesh, numbers_over
from meshdsl.placed.worker_parts import workers
from meshdsl.report.pipeline_facts import (
    piped,
)
from meshdsl.report.predicted_times import times

if TYPE_CHECKING:
    from meshdsl.report.schema import (
        BoundedFacts,
        CollectiveFacts,
        CompressionFacts,
        LoopFacts,
        MovedFacts,
        OffloadedFacts,
        OffloadFacts,
        PlanFacts,
        ReportFacts,
        StageLocal,
        TensorFacts,
        TimedFacts,
        TotalsFacts,
        TrainedFacts,
        TransferFacts,
    )

VERSION = 1


def explain(
    program: DeviceProgram,
    warnings: Iterable[Diagnostic] = (),
    timing: Timing | None = None,
    identifiers: Callable[[], Mapping[str, str]] = dict,
    warmup: Callable[[], DeviceProgram | None] = lambda: None,
) -> ReportFacts:
    """The report of one program under one layout. Bytes and FLOPs are per device.

    Remedies are left out: they are found by compiling (`remedies.py`).
    With a `timing` it has predicted times, too. `identifiers` maps names in the device program to
    variables of the emitted text. It is called only if a subexpression is sent, since that has no
    name in the source; without it, subexpressions are shown by their hints. `warmup` makes the
    program of the first steps of a training, which compress nothing, where there are some.
    """
    source, goal = program.placed, program.placed.named.goal
    moves = [
        n
        for n, _ in walk(program.body)
        if isinstance(n, Move | Bucket) and n.step.moves and not n.step.tier
    ]
    hidden = frozenset(n.collective for n in every(program.body) if isinstance(n, Wait))
    unnamed = any(m.target.value.name is None for n in moves for m in n.moves)
    names = identifiers() if unnamed else {}
    every_device = senders(program)
    collectives = [_collective(n, every_device, program, n in hidden, names) for n in moves]
    if timing is not None:
        for entry, node in zip(collectives, moves, strict=True):
            entry["seconds"] = timing.node(node).seconds * entry["count"]
    timed: TimedFacts = {} if timing is None else {"time": times(program, timing)}
    is_bounded = bool(source.bounded and not source.plan)
    bounded: BoundedFacts = {"bounded": SOME_ROUTES} if is_bounded else {}
    frozen: TrainedFacts = {} if goal is None else _frozen(program, goal)
    return {
        "version": VERSION,
        "program": source.named.name,
        "file": source.named.span.file,
        "mesh": dict(source.mesh.declared),
        "devices": source.mesh.devices,
        "layout": source.layout,
        "reduce": source.policy,
        "proven": source.plan.proven if source.plan else None,
        "plan": _plan(source.plan),
        **bounded,
        **_compressed(source, warmup),
        "tensors": _tensors(source, _alone(program)),
        "collectives": collectives,
        "totals": _totals(dict(zip(moves, collectives, strict=True)), every_device, program),
        "memory": {**memory(program)},
        **frozen,
        **_away(program),
        **piped(program),
        **timed,
        "warnings": [
            {"code": d.code, "message": d.message, "line": d.span.line if d.span else None}
            for d in warnings
            if d.severity == "warning"
        ],
        "remedies": [],
    }


def _compressed(
    program: placed.PlacedProgram, warmup: Callable[[], DeviceProgram | None]
) -> CompressionFacts:
    """The compression, as it is written; nothing without one.

    Where each worker compresses what it has, also their number. And what the first steps send.
    """
    goal = program.named.goal
    found = None if goal is None or not program.updates else goal.optimizer.compress
    if found is None:
        return {}
    compression: CompressionFacts = {"compress": str(found)}
    if several := workers(program):
        compression["workers"] = several
    uncompressed = warmup()
    if uncompressed is not None:
        totals = explain(uncompressed)["totals"]
        compression["warmup"] = {
            "steps": found.warmup,
            "collectives": totals["collectives"],
            "wire_bytes": totals["wire_bytes"],
            "peak": memory(uncompressed)["peak"],
        }
    return compression


def _frozen(program: DeviceProgram, goal: Goal) -> TrainedFacts:
    """The parameters of a training step that have no gradient and no state, if there are some."""
    if not goal.untrained:
        return {}
    variables = [v for v in program.params if v.value in goal.untrained]
    most = max(walk.bytes(variables) for walk in walks(program))
    return {"frozen": {"params": [str(v.value.name) for v in variables], "bytes": most}}


def _away(program: DeviceProgram) -> OffloadFacts:
    """What lies on disk or on the host, of the device that has most there; else nothing."""
    facts: OffloadFacts = {}
    for tier in tiers(program) if program.away or program.placed.kept else ():
        each = (traffic(walk.bytes, program, tier) for walk in walks(program))
        most = max(each, key=lambda found: found["bytes"])
        moves = [each for each in transfers(program) if each[0].step.tier == tier]
        stored: OffloadedFacts = {
            "bytes": most["bytes"],
            "params": most["params"],
            "activations": most["activations"],
            "read": most["read"],
            "written": most["written"],
            "chunk": most["chunk"],
            "transfers": [_transfer(*each, program) for each in moves],
        }
        facts["disk" if tier == "disk" else "host"] = stored
    return facts


def _hint(move: Move) -> str:
    """The word for what is stored or loaded, as it is in the memory of the device."""
    return (move.source if move.step.kind == "store" else move.target).hint


def _transfer(move: Move, count: int, program: DeviceProgram) -> TransferFacts:
    """What a line moves between the memory of a device and another: most of a device."""
    hidden = any(isinstance(n, Wait) and move in n.collective.moves for n in every(program.body))
    return {
        "kind": move.step.kind,
        "tensor": move.source.value.label if move.source.value.name else _hint(move),
        "file": move.span.file,
        "line": move.span.line,
        "phase": move.phase,
        "count": count,
        "bytes": move.payload,
        "overlapped": hidden,
    }


def _plan(found: placed.PlanProvenance | None) -> PlanFacts | None:
    if found is None:
        return None
    plan: PlanFacts = {
        "claim": found.claim,
        "message_bytes": found.message_bytes,
        "searched": found.searched,
        "least": found.least,
    }
    if found.timed:
        plan["objective"] = "time"
    return plan


def _alone(program: DeviceProgram) -> dict[Value, StageLocal]:
    """What is said otherwise of tensors that one device along the axis of the stages has alone."""
    pipe = program.placed.pipe
    every_var = (*program.params, *program.states, *(v for n in program.body for v in n.makes))
    alone: dict[Value, StageLocal] = {}
    for var in every_var:
        if var.on is not None and pipe is not None:
            mesh, devices = program.mesh, range(program.mesh.devices)
            placed = {a: str(c) for a, c in var.placement.components(mesh).items()}
            at, blocks = {pipe.axis: var.on}, var.placement.shapes(var.type, mesh, devices)
            there = numbers_over(mesh, mesh.names, (pipe.axis,))
            shapes = [
                b if n == var.on else [0] * len(b) for b, n in zip(blocks, there, strict=True)
            ]
            placed[pipe.axis] = f"A({var.on})"
            facts: StageLocal = {"local_shapes": shapes, "placement": placed, "on": at}
            alone.setdefault(var.value, facts)
    return alone


def _tensors(program: placed.PlacedProgram, alone: Mapping[Value, StageLocal]) -> list[TensorFacts]:
    loops, between = _loop_values(program), _between(program)
    entries = []
    for number, tensor in enumerate(program.tensors):
        value, loop = tensor.value, loops.get(tensor.value)
        if loop is not None and loop["as"] == "stacked":
            loop["bytes"] = tensor.local(program.mesh).bytes
        own = alone.get(value)
        entries.append(_tensor(tensor, number, program, own, loop, value in between))
    return entries


def _between(program: placed.PlacedProgram) -> set[Value]:
    """Unnamed values that a rule for all tensors splits otherwise than a named one beside them.

    A rule that names a tensor does not reach what is computed on the way to it, where a general
    one still binds.
    """
    settled = {tensor.value: tensor.placement for tensor in program.tensors}
    between = set()
    for op in every(program.named.body):
        if not isinstance(op, NamedOp) or op.phase != "forward":
            continue
        for one, other in product(op.outs, op.ins):
            for inner, named in ((one, other), (other, one)):
                if inner.name or not named.name or named.role == "param":
                    continue
                if not {inner, named} <= settled.keys():
                    continue  # nothing reads it: of an operator in parts it is not computed
                rules = program.causes.get(inner, {}).items()
                dims = [d for d, rule in rules if not rule.selector and named.type.has(d)]
                if any(settled[inner].axes_of(d) != settled[named].axes_of(d) for d in dims):
                    between.add(inner)
    return between


def _loop_values(program: placed.PlacedProgram) -> dict[Value, LoopFacts]:
    """The role of values in a `repeat`: `carried` in it, a `slice` of a stack, or its `result`.

    Values of all iterations are `stacked` where the program reads them after the loop, and else
    `kept` for the backward pass.
    """
    facts: dict[Value, LoopFacts] = {}
    read = {tensor.value for node in every(program.body) for tensor in _reads(node)}
    read.update(o.value for o in program.named.outputs)
    for node in loops(program.body, placed.PlacedLoop):
        collected = [c.outer.value for c in node.collected if c.outer.value.role == "activation"]
        stacked = {v for v in collected if v in read and node.phase == "forward"}
        words = {s.inside.value: "slice" for s in node.stacked}
        words |= {c.inside.value: "carried" for c in node.carries}
        words |= {c.result.value: "result" for c in node.carries}
        words |= {v: "stacked" if v in stacked else "kept" for v in collected}
        for value, word in words.items():
            facts[value] = {"as": word, "line": node.span.line, "trips": node.dim.size}
    return facts


def _reads(node: placed.Node) -> tuple[placed.PlacedTensor, ...]:
    """What a node reads; what a loop of the backward pass takes slices of was kept for it."""
    later = isinstance(node, placed.PlacedLoop) and node.phase == "backward"
    return () if later else node.reads


def _tensor(
    tensor: placed.PlacedTensor,
    number: int,
    program: placed.PlacedProgram,
    own: StageLocal | None,
    loop: LoopFacts | None,
    between: bool,
) -> TensorFacts:
    value, p = tensor.value, tensor.placement
    facts: TensorFacts = {
        "name": value.name,
        "id": number,
        "file": value.span.file,
        "line": value.span.line,
        "dtype": str(value.type.dtype),
        "dims": list(value.type.names),
        "declared": list(value.positions),
        "shape": list(value.type.shape),
        "local_shape": list(tensor.local(program.mesh).shape),
        "placement": {a: str(c) for a, c in p.components(program.mesh).items()},
        "order": {d: list(program.mesh.written(axes)) for d, axes in p.splits},
        "role": value.role if value.role != "activation" else _role(value, program),
        "rules": {
            dim: {"rule": rule.text, "file": rule.span.file, "line": rule.span.line}
            for dim, rule in program.causes.get(value, {}).items()
        },
        "loop": loop,
        "between": between,
    }
    if p.splits_unevenly(value.type, program.mesh):
        ranks = range(program.mesh.devices)
        facts["local_shapes"] = p.shapes(value.type, program.mesh, ranks)
    if lying := program.blocks(value.type, p):
        facts["blocks"] = lying
    if own is not None:
        facts["local_shapes"], facts["placement"] = own["local_shapes"], own["placement"]
        facts["on"] = own["on"]
    return facts


def _role(value: Value, program: placed.PlacedProgram) -> str:
    returned = any(o.value is value for o in program.named.outputs)
    return "output" if returned else "activation"


def _collective(
    node: Collective,
    every_device: Sequence[Sender],
    program: DeviceProgram,
    overlapped: bool,
    names: Mapping[str, str],
) -> CollectiveFacts:
    """One executed collective; the tensors of a bucket are in `parts`.

    `count` and `wire_bytes` are those of the device that sends most in it, `trip_bytes` the most
    that it sends at once.
    """
    done = [(sender.done.get(node, Done()), sender.alike) for sender in every_device]
    most = max((each for each, _ in done), key=lambda each: (each.bytes, each.count))
    count = most.count
    mesh, pipe, device = program.mesh, program.placed.pipe, only_on(node)
    parts = [_part(move, count, names, mesh) for move in node.moves]
    facts: CollectiveFacts = {
        "kind": node.step.kind,
        "op": node.step.op,
        "axes": list(mesh.written(node.step.axes)),
        "group_size": mesh.size(*node.step.axes),
        "tensor": _said((part["tensor"] for part in parts), ", "),
        "file": node.span.file,
        "line": node.span.line,
        "phase": node.phase,
        "count": count,
        "overlapped": overlapped,
        "payload_bytes": node.payload,
        "trip_bytes": node.wire,
        "wire_bytes": most.bytes,
        "cluster_wire_bytes": sum(each.bytes * alike for each, alike in done),
        "formula": COLLECTIVES[node.step.kind].formula,
        "from": _said(part["from"] for part in parts),
        "to": _said(part["to"] for part in parts),
        "cause": _said(part["cause"] for part in parts),
        "why": _said(part["why"] for part in parts),
        "remedy": "",
        "remedies": [],
        "parts": parts if isinstance(node, Bucket) else [],
    }
    if any(m.step.is_uneven(m.source.type, mesh) for m in node.moves):
        facts["uneven"] = True
    if isinstance(node, Move) and node.rows is not None:
        facts["balanced_bytes"] = node.rows.balanced * count
    if pipe and device is None:
        device = _doing_alone(node, every_device)
    if pipe and device is not None:
        facts["on"] = {pipe.axis: device}
    return facts


def _doing_alone(node: Collective, every_device: Sequence[Sender]) -> int | None:
    """The device along the stages that alone sends in a collective of the passes, if one does."""
    doing = {on for sender in every_device if sender.does(node) for on in sender.along}
    idle = {on for sender in every_device for on in sender.along} - doing
    return next(iter(doing)) if idle and len(doing) == 1 else None


def _part(node: Move, count: int, names: Mapping[str, str], mesh: Mesh) -> MovedFacts:
    """The part of one tensor in a collective; alone it would send `wire_bytes`.

    A subexpression has its name in the emitted text, by `names`, or else its hint.
    """
    return {
        # What is sent to another stage has no name there: it is what it was here.
        "tensor": node.target.value.name
        or names.get(node.target.name, names.get(node.source.name, node.target.hint)),
        "file": node.span.file,
        "line": node.span.line,
        "phase": node.phase,
        "payload_bytes": node.payload,
        "wire_bytes": node.wire * count,
        "from": node.source.placement.show(node.source.value.type, mesh),
        "to": node.target.placement.show(node.source.value.type, mesh),
        "cause": node.cause,
        "why": node.why,
        "remedy": "",
        "remedies": [],
    }


def _said(texts: Iterable[str], between: str = "; ") -> str:
    """The distinct texts, joined."""
    return between.join(dict.fromkeys(texts))


def _totals(
    entries: Mapping[Collective, CollectiveFacts],
    every_device: Sequence[Sender],
    program: DeviceProgram,
) -> TotalsFacts:
    """Sums of one device: of that which sends most; `flops_per_device` of the busiest stage."""
    cluster = sum(c["cluster_wire_bytes"] for c in entries.values() if c["phase"] != "output")
    most = max(every_device, key=lambda sender: sender.bytes)
    # Another device may do one of them more often, or of a larger block.
    collectives = []
    for node, done in most.done.items():
        if node in entries:
            entry = entries[node].copy()
            entry["count"], entry["wire_bytes"] = done.count, done.bytes
            collectives.append(entry)
    by_kind: Counter[str] = Counter()
    by_axis: Counter[str] = Counter()
    by_phase: Counter[str] = Counter()
    for c in collectives:
        by_kind[c["kind"]] += c["wire_bytes"]
        by_axis["+".join(c["axes"])] += c["wire_bytes"]
        by_phase[c["phase"]] += c["wire_bytes"]
    counted = [c for c in collectives if c["phase"] != "output"]
    return {
        "wire_bytes": sum(c["wire_bytes"] for c in counted),
        "cluster_wire_bytes": cluster,
        "collectives": sum(c["count"] for c in counted),
        "by_kind": dict(by_kind),
        "by_axis": dict(by_axis),
        "by_phase": dict(by_phase),
        "flops_per_device": computed(program),
    }
