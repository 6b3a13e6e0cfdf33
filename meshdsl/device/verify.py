"""What is legal in a device program. A violation is our mistake, hence an assert with a message."""

from __future__ import annotations

from meshdsl.device.ir import Compute, Loop, Move, Node, Program, Var


def verify(program: Program) -> None:
    """Variables are assigned once, before they are read, with the shape their placement says."""
    names: set[str] = set(program.coordinates.values())
    known: set[Var] = set()
    for var in (*program.inputs, *program.params, *program.states):
        _define(var, known, names, program)
    _verify_nodes(program.body, known, names, program)
    for name, var in program.outputs:
        assert var in known, f"output {name} is not assigned"
    for old, new in program.updates:
        assert new in known, f"the update of {old.name} is not assigned"
        assert new.local == old.local, f"{old.name} changes its shape"


def _define(var: Var, known: set[Var], names: set[str], program: Program) -> None:
    assert var.name not in names, f"{var.name} is assigned twice"
    assert var.name.isidentifier(), f"{var.name!r} is no identifier"
    assert var.local == var.placement.local(var.value.type, program.mesh), f"shape of {var.name}"
    names.add(var.name)
    known.add(var)


def _verify_nodes(
    nodes: tuple[Node, ...], known: set[Var], names: set[str], program: Program
) -> None:
    for node in nodes:
        match node:
            case Compute():
                assert known.issuperset(node.ins), f"{node.op.name} reads what is not assigned"
                for var in node.outs:
                    _define(var, known, names, program)
            case Move():
                assert node.source in known, f"{node.source.name} is not assigned"
                _define(node.target, known, names, program)
            case Loop():
                _verify_loop(node, known, names, program)


def _verify_loop(node: Loop, known: set[Var], names: set[str], program: Program) -> None:
    inner = set(known)
    for carry in node.carries:
        assert carry.init in known, f"{carry.init.name} is not assigned"
        _define(carry.inside, inner, names, program)
    for stack, inside in node.stacked:
        assert stack in known, f"{stack.name} is not assigned"
        _define(inside, inner, names, program)
    _verify_nodes(node.body, inner, names, program)
    for carry in node.carries:
        assert carry.next in inner, f"{carry.next.name} is not assigned"
        assert carry.result.name == carry.inside.name, "a carry changes its name"
        known.add(carry.result)
    for made in node.collected:
        assert made.inside in inner, f"{made.inside.name} is not assigned"
        _define(made.outer, known, names, program)
