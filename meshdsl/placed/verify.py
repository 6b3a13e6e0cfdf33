"""What is legal in a placed program. A violation is our mistake, hence an assert with a message."""

from __future__ import annotations

from meshdsl.placed.choose import is_legal
from meshdsl.placed.ir import Apply, Loop, Node, Program, Reshard, Tensor
from meshdsl.placed.sbp import Mesh, Placement, placement


def verify(program: Program) -> None:
    """Placements fit their tensors; operators stand on legal rows; routes lead where they say."""
    known = {*program.inputs, *(p.tensor for p in program.params), *program.states}
    for tensor in known:
        check_tensor(tensor, program.mesh)
    _verify_nodes(program.body, known, program.mesh)
    for name, tensor in program.outputs:
        assert tensor in known, f"output {name} is not defined"
        assert not tensor.placement.partial, f"output {name} is partial"
    for old, new in program.updates:
        assert new in known, f"the update of {old.value.label} is not made"
        assert new.placement == old.placement, f"{old.value.label} changes its placement"


def check_tensor(tensor: Tensor, mesh: Mesh) -> None:
    """Blocks are equal, dims exist, no axis serves twice, partial axes share one op."""
    p = tensor.placement
    assert p == placement(mesh, dict(p.splits), p.partial, p.op), f"not canonical: {p}"
    p.local(tensor.value.type, mesh)


def _verify_nodes(nodes: tuple[Node, ...], known: set[Tensor], mesh: Mesh) -> None:
    for node in nodes:
        match node:
            case Apply():
                _verify_apply(node, known, mesh)
            case Reshard():
                _verify_reshard(node, known)
            case Loop():
                _verify_loop(node, known, mesh)


def _verify_apply(node: Apply, known: set[Tensor], mesh: Mesh) -> None:
    for tensor in node.ins:
        assert tensor in known, f"{node.name} reads a version of {tensor.value.label} not made"
    for tensor in node.outs:
        check_tensor(tensor, mesh)
        known.add(tensor)
    ins = tuple(t.placement for t in node.ins)
    outs = tuple(t.placement for t in node.outs)
    found = is_legal(node.named, ins, outs, mesh)
    assert found, f"{node.name}: {ins} -> {outs} is no legal row on every axis"


def _verify_reshard(node: Reshard, known: set[Tensor]) -> None:
    assert node.source in known, f"a version of {node.source.value.label} is resharded before made"
    here: Placement = node.source.placement
    for step in node.route.steps:
        assert step.before == here, "the route is broken"
        here = step.after
    assert here == node.target.placement, "the route ends elsewhere"
    known.add(node.target)


def _verify_loop(node: Loop, known: set[Tensor], mesh: Mesh) -> None:
    inner = set(known)
    for item in node.stacked:
        assert item.outer in known, f"the stack {item.outer.value.label} is not made"
        assert not item.outer.placement.axes_of(node.dim.name), "the loop's dim is split"
        inner.add(item.inside)
    for carry in node.carries:
        assert carry.init in known, f"the carry {carry.init.value.label} is not made"
        versions = (carry.init, carry.inside, carry.next, carry.result)
        assert len({t.placement for t in versions}) == 1, "a carry changes its placement"
        inner.add(carry.inside)
    _verify_nodes(node.body, inner, mesh)
    for carry in node.carries:
        assert carry.next in inner, f"{carry.next.value.label} is not made at the loop's end"
        known.add(carry.result)
    for made in node.collected:
        part, whole = made.inside, made.outer
        assert part in inner, f"{part.value.label} is not made in the loop"
        assert part.placement == whole.placement, f"{part.value.label} changes when collected"
        known.add(whole)
