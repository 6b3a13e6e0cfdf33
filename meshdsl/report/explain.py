"""What a compiled program does, as JSON version 1. Every other view is drawn from this."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from meshdsl.device.ir import Bucket, Collective, Compute, Move, Program, Wait, walk
from meshdsl.device.memory import memory
from meshdsl.diagnostics import Diagnostic
from meshdsl.ir.program import every
from meshdsl.named.ir import Value
from meshdsl.placed import ir as placed
from meshdsl.placed.collectives import COLLECTIVES
from meshdsl.placed.sbp import Mesh, Placement

VERSION = 1


def explain(program: Program, warnings: Iterable[Diagnostic] = ()) -> dict[str, Any]:
    """The report of one program under one layout. Bytes and FLOPs are per device."""
    source = program.placed
    moves = [(n, k) for n, k in walk(program.body) if isinstance(n, Move | Bucket) and n.step.moves]
    hidden = frozenset(n.collective for n in every(program.body) if isinstance(n, Wait))
    collectives = [_collective(n, k, program.mesh, n in hidden) for n, k in moves]
    return {
        "version": VERSION,
        "program": source.named.name,
        "file": source.named.span.file,
        "mesh": dict(source.mesh.axes),
        "devices": source.mesh.devices,
        "layout": source.layout,
        "reduce": source.policy,
        "proven": source.plan.proven if source.plan else None,
        "plan": _plan(source.plan),
        "tensors": _tensors(source),
        "collectives": collectives,
        "totals": _totals(collectives, program),
        "memory": memory(program),
        "warnings": [
            {"code": d.code, "message": d.message, "line": d.span.line if d.span else None}
            for d in warnings
            if d.severity == "warning"
        ],
    }


def _plan(found: placed.Found | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "message_bytes": found.message_bytes,
        "searched": found.searched,
        "least": found.least,
    }


def _tensors(program: placed.Program) -> list[dict[str, Any]]:
    loops = _loop_values(program.body)
    found = [_tensor(t, i, program) for i, t in enumerate(program.tensors)]
    for entry, tensor in zip(found, program.tensors, strict=True):
        entry["loop"] = loops.get(tensor.value)
    return found


def _loop_values(nodes: Iterable[placed.Node]) -> dict[Value, dict[str, Any]]:
    """What a `repeat` makes of values: `carried` in it, a `slice` of a stack, or its `result`.

    What it has `kept` of all trips is there for the backward pass.
    """
    found: dict[Value, dict[str, Any]] = {}
    for node in nodes:
        if not isinstance(node, placed.Loop):
            continue
        where = {"line": node.span.line, "trips": node.dim.size}
        found.update({s.inside.value: {"as": "slice", **where} for s in node.stacked})
        found.update({c.inside.value: {"as": "carried", **where} for c in node.carries})
        found.update({c.result.value: {"as": "result", **where} for c in node.carries})
        kept = [c.outer.value for c in node.collected if c.outer.value.role == "activation"]
        found.update({value: {"as": "kept", **where} for value in kept})
        found.update(_loop_values(node.body))
    return found


def _tensor(tensor: placed.Tensor, number: int, program: placed.Program) -> dict[str, Any]:
    value, p = tensor.value, tensor.placement
    local = tensor.local(program.mesh)
    causes = program.causes.get(value, {})
    return {
        "name": value.name,
        "id": number,
        "file": value.span.file,
        "line": value.span.line,
        "dtype": str(value.type.dtype),
        "dims": list(value.type.names),
        "declared": list(value.positions),
        "shape": list(value.type.shape),
        "local_shape": list(local.shape),
        "placement": {a: str(p.component(a)) for a in program.mesh.names},
        "order": {d: list(axes) for d, axes in p.splits},
        "role": value.role if value.role != "activation" else _role(value, program),
        "rules": {
            dim: {"rule": rule, "file": span.file, "line": span.line}
            for dim, (rule, span) in causes.items()
        },
    }


def _role(value: Value, program: placed.Program) -> str:
    returned = any(o.value is value for o in program.named.outputs)
    return "output" if returned else "activation"


def _collective(node: Collective, count: int, mesh: Mesh, overlapped: bool) -> dict[str, Any]:
    """One executed collective; of a bucket its tensors are told in `parts`."""
    parts = [_part(move, count) for move in node.moves]
    said = {key: _said(parts, key) for key in ("tensor", "from", "to", "why", "remedy")}
    return {
        "kind": node.step.kind,
        "op": node.step.op,
        "axes": list(node.step.axes),
        "group_size": mesh.size(*node.step.axes),
        "tensor": said["tensor"],
        "file": node.span.file,
        "line": node.span.line,
        "phase": node.phase,
        "count": count,
        "overlapped": overlapped,
        "payload_bytes": node.payload,
        "wire_bytes": node.wire * count,
        "cluster_wire_bytes": node.cluster * count,
        "formula": COLLECTIVES[node.step.kind].formula,
        "from": said["from"],
        "to": said["to"],
        "why": said["why"],
        "remedy": said["remedy"],
        "parts": parts if isinstance(node, Bucket) else [],
    }


def _part(node: Move, count: int) -> dict[str, Any]:
    """What is sent of one tensor; on its own it would send `wire_bytes`."""
    return {
        "tensor": node.target.value.name or node.target.name,
        "file": node.span.file,
        "line": node.span.line,
        "phase": node.phase,
        "payload_bytes": node.payload,
        "wire_bytes": node.wire * count,
        "from": show(node.source.placement, node),
        "to": show(node.target.placement, node),
        "why": node.why,
        "remedy": node.remedy,
    }


def _said(parts: list[dict[str, Any]], key: str) -> str:
    """What all parts say, each thing once."""
    return (", " if key == "tensor" else "; ").join(dict.fromkeys(part[key] for part in parts))


def show(p: Placement, node: Move) -> str:
    """A placement in the language's notation."""
    return p.show(node.source.value.type)


def _totals(collectives: list[dict[str, Any]], program: Program) -> dict[str, Any]:
    by_kind: Counter[str] = Counter()
    by_axis: Counter[str] = Counter()
    by_phase: Counter[str] = Counter()
    for c in collectives:
        by_kind[c["kind"]] += c["wire_bytes"]
        by_axis["+".join(c["axes"])] += c["wire_bytes"]
        by_phase[c["phase"]] += c["wire_bytes"]
    counted = [c for c in collectives if c["phase"] != "output"]
    statements = [(n, k) for n, k in walk(program.body) if isinstance(n, Compute)]
    return {
        "wire_bytes": sum(c["wire_bytes"] for c in counted),
        "cluster_wire_bytes": sum(c["cluster_wire_bytes"] for c in counted),
        "collectives": sum(c["count"] for c in counted),
        "by_kind": dict(by_kind),
        "by_axis": dict(by_axis),
        "by_phase": dict(by_phase),
        "flops_per_device": sum(n.flops * k for n, k in statements),
    }
