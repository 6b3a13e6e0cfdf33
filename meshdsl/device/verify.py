"""What is legal in a device program. A violation is our mistake, hence an assert with a message."""

from __future__ import annotations

from meshdsl.device.ir import (
    Bucket,
    Collective,
    Compute,
    Loop,
    Move,
    Node,
    Program,
    Start,
    Var,
    Wait,
)

Works = dict[str, Collective]
"""The collectives under way, by the variables that stand for them."""


def verify(program: Program) -> None:
    """Variables are assigned once, before they are read, with the shape their placement says.

    A variable may take over the name of another, which nobody reads from there on.
    """
    names: set[str] = set(program.coordinates.values())
    known: set[Var] = set()
    for var in (*program.inputs, *program.params, *program.states):
        _define(var, known, names, program)
    _verify_block(program.body, known, names, program, {})
    for name, var in program.outputs:
        assert var in known, f"output {name} is not assigned"
    for old, new in program.updates:
        assert new in known, f"the update of {old.name} is not assigned"
        assert new.local == old.local, f"{old.name} changes its shape"


def _define(
    var: Var, known: set[Var], names: set[str], program: Program, before: Var | None = None
) -> None:
    """`var` is known from here on; where it has the name of `before`, that one no longer is."""
    if before is not None and before.name == var.name:
        known.discard(before)
    else:
        assert var.name not in names, f"{var.name} is assigned twice"
    assert var.name.isidentifier(), f"{var.name!r} is no identifier"
    assert var.local == var.placement.local(var.value.type, program.mesh), f"shape of {var.name}"
    names.add(var.name)
    known.add(var)


def _verify_block(
    nodes: tuple[Node, ...],
    known: set[Var],
    names: set[str],
    program: Program,
    works: Works,
) -> None:
    """Check the nodes of a block. `works` are under way when it begins, and when it ends."""
    before = dict(works)
    for node in nodes:
        match node:
            case Compute():
                assert known.issuperset(node.ins), f"{node.name} reads what is not assigned"
                over = None if node.onto is None else node.ins[node.onto]
                for var in node.outs:
                    _define(var, known, names, program, over)
            case Move() | Bucket():
                _verify_sources(node, known)
                _define_targets(node, known, names, program)
            case Start():
                _verify_start(node, known, names, works)
            case Wait():
                assert works.pop(node.work, None) is node.collective, f"nothing is in {node.work}"
                _define_targets(node.collective, known, names, program)
            case Loop():
                _verify_loop(node, known, names, program)
    assert works == before, f"nobody waits for {', '.join(works.keys() - before.keys())}"


def _verify_sources(node: Collective, known: set[Var]) -> None:
    for move in node.moves:
        assert move.source in known, f"{move.source.name} is not assigned"
    if isinstance(node, Bucket):
        flat = {(m.step.kind, m.step.axes, m.step.op, m.source.local.dtype) for m in node.moves}
        assert len(flat) == 1, f"one bucket for {flat}"


def _define_targets(node: Collective, known: set[Var], names: set[str], program: Program) -> None:
    for move in node.moves:
        _define(move.target, known, names, program)


def _verify_start(node: Start, known: set[Var], names: set[str], works: Works) -> None:
    assert node.work not in works, f"{node.work} is already under way"
    if not node.ahead:
        _verify_sources(node.collective, known)
        assert node.work not in names, f"{node.work} is assigned twice"
        assert node.work.isidentifier(), f"{node.work!r} is no identifier"
        names.add(node.work)
    works[node.work] = node.collective


def _verify_loop(node: Loop, known: set[Var], names: set[str], program: Program) -> None:
    for carry in node.carries:
        assert carry.init in known, f"{carry.init.name} is not assigned"
    known.difference_update(c.init for c in node.carries if c.init.name == c.inside.name)
    inner = set(known)
    for carry in node.carries:
        assert carry.init in known or carry.init.name == carry.inside.name, "an init is gone"
        _define(carry.inside, inner, names, program, carry.init)
    for item in node.stacked:
        assert item.outer in known, f"{item.outer.name} is not assigned"
        _define(item.inside, inner, names, program)
    works = _verify_ahead(node, known, inner, names, program)
    _verify_block(node.body, inner, names, program, works)
    for carry in node.carries:
        assert carry.next in inner, f"{carry.next.name} is not assigned"
        assert carry.result.name == carry.inside.name, "a carry changes its name"
        known.add(carry.result)
    for made in node.collected:
        assert made.inside in inner, f"{made.inside.name} is not assigned"
        _define(made.outer, known, names, program, made.stack)


def _verify_ahead(
    node: Loop, known: set[Var], inner: set[Var], names: set[str], program: Program
) -> Works:
    """What is under way when a trip begins."""
    works: Works = {}
    for ahead in node.ahead:
        sources = tuple(m.source for m in ahead.collective.moves)
        assert sources == tuple(s.inside for s in ahead.slices), "issued ahead of a slice"
        for item in ahead.slices:
            assert item.outer in known, f"{item.outer.name} is not assigned"
            if item.inside not in inner:
                _define(item.inside, inner, names, program)
        _verify_start(Start(ahead.collective, ahead.work), inner, names, works)
    return works
