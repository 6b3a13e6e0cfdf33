"""From the named program and a layout to the placed program.

One walk in program order. Rules bind what they name; operators get the placement whose reshards
send the fewest bytes (`choose.py`); on axes no rule speaks of, a value is whole, or partial for as
long as the policy allows. Once a consumer has forced a reduction, later ones read the result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from meshdsl.diagnostics import Span
from meshdsl.ir import program as ir
from meshdsl.ir.program import Carry, Collected, Stacked
from meshdsl.named import ir as named
from meshdsl.named.expand import expand
from meshdsl.named.ir import Value
from meshdsl.ops.opdef import Signature, lookup
from meshdsl.placed import why
from meshdsl.placed.choose import Choice, Chooser, Want, call_of, cheapest
from meshdsl.placed.contraction import pairwise
from meshdsl.placed.ir import Apply, Loop, Node, Parameter, Program, Reshard, Tensor, walk
from meshdsl.placed.layout import Layout
from meshdsl.placed.reshard import Price, route
from meshdsl.placed.sbp import Mesh, Placement, placement
from meshdsl.placed.storage import is_load, is_loaded


@dataclass(slots=True)
class _State:
    """What a trial can take back: versions per value, node lists per loop depth, known causes."""

    versions: dict[Value, list[Tensor]] = field(default_factory=dict)
    depth: dict[Value, int] = field(default_factory=dict)
    blocks: list[list[Node]] = field(default_factory=lambda: [[]])
    partial_why: dict[Value, tuple[str, ...]] = field(default_factory=dict)
    settled: dict[Value, Tensor] = field(default_factory=dict)

    def copy(self) -> _State:
        return _State(
            {v: list(ts) for v, ts in self.versions.items()},
            dict(self.depth),
            [list(b) for b in self.blocks],
            dict(self.partial_why),
            dict(self.settled),
        )


class Placer:
    """One walk over a program. `policy` is one of `place.WALKS`, or `optimal` with a plan.

    Where it `reduces_once`, what has been reduced for one reader is read so by all later ones.
    """

    reduces_once = True

    def __init__(self, program: named.Program, layout: Layout, policy: str) -> None:
        self.source = program
        self.layout = layout
        self.mesh: Mesh = layout.mesh
        self.deferred = policy in ("deferred", "mesh-tf")
        self.price = Price(scatter=policy != "mesh-tf")
        self.policy = policy
        self.state = _State()
        self.returned = {o.value for o in program.outputs}
        self.phase = "forward"
        self.causes: dict[Value, dict[str, tuple[str, Span]]] = {}

    def program(self) -> Program:
        """The placed program."""
        inputs = tuple(self._entering(v) for v in self.source.inputs)
        params = tuple(Parameter(p, self._stored(p.value)) for p in self.source.params)
        states = tuple(self._stored(s.value) for s in self.source.states)
        stored = {t.value: t for t in (*(p.tensor for p in params), *states)}
        for node in self.source.body:
            self._node(node)
        outputs = tuple((o.name, self._output(o)) for o in self.source.outputs)
        updates = tuple(self._update(u, stored[u.old]) for u in self.source.updates)
        body = tuple(self.state.blocks[0])
        name = self.layout.name
        tensors = tuple(t for v, t in self.state.settled.items() if not is_loaded(v))
        made = (inputs, params, body, outputs, tensors, self.causes, states, updates)
        return Program(self.source, self.mesh, name, self.policy, *made)

    def alike(self, first: named.Op, second: named.Op) -> bool:
        """Whether the results of two operators are asked for in one placement."""
        pairs = zip(first.outs, second.outs, strict=True)
        return all(self._demanded(a) == self._demanded(b) for a, b in pairs)

    def _demanded(self, value: Value) -> Placement:
        return self.layout.demand(value).placement(self.mesh)

    # --- versions ----------------------------------------------------------------------------

    def _wanted(self, value: Value) -> Placement:
        """What rules demand of a value, with the causes noted."""
        binding = self.layout.demand(value, value in self.returned)
        causes = {d: (str(r), r.span) for d, r in binding.causes.items() if binding.splits.get(d)}
        self.causes[value] = causes
        return binding.placement(self.mesh)

    def _entering(self, value: Value) -> Tensor:
        """An input as the devices are given it."""
        return self._enter(value, self._wanted(value), 0)

    def _stored(self, value: Value) -> Tensor:
        """A parameter or a state as it is stored."""
        return self._enter(value, self._wanted(value), 0)

    def _enter(self, value: Value, placed: Placement, depth: int) -> Tensor:
        tensor = Tensor(value, placed)
        self.state.versions[value] = [tensor]
        self.state.depth[value] = depth
        self.state.settled[value] = tensor
        return tensor

    def _latest(self, value: Value) -> Tensor:
        return self.state.versions[value][-1]

    def _placements(self, value: Value) -> tuple[Placement, ...]:
        return tuple(t.placement for t in self.state.versions[value])

    def _emit(self, node: Node, depth: int = -1) -> None:
        self.state.blocks[depth].append(node)

    def _version(self, value: Value, need: Placement, ask: why.Ask) -> Tensor:
        """The version of `value` placed as `need`, made by the cheapest reshard if there is none.

        It is made where the value lives: a tensor from outside a loop is resharded before the loop.
        """
        versions = self.state.versions[value]
        for tensor in versions:
            if tensor.placement == need:
                return tensor
        best = cheapest(value.type, self._placements(value), need, self.mesh, self.price)
        assert best is not None, f"no route to {need}"
        source = next(
            t
            for t in versions
            if route(value.type, t.placement, need, self.mesh, self.price) == best
        )
        target = Tensor(value, need)
        reasons = self.state.partial_why.get(value, ())
        facts = why.Facts(self.causes.get(value, {}), reasons)
        words = functools.partial(why.explain, value, best, ask, facts)
        node = Reshard(source, target, best, ask.span, words, ask.phase)
        self._emit(node, self.state.depth[value])
        if best.reduces and self.reduces_once:
            versions[:] = [t for t in versions if not t.placement.partial]
            self.state.partial_why.pop(value, None)
        versions.append(target)
        return target

    def _computed(self, value: Value) -> Placement:
        return self.layout.bind(value).placement(self.mesh)

    # --- nodes -------------------------------------------------------------------------------

    def _node(self, node: named.Node) -> None:
        if isinstance(node, named.Loop):
            self._repeat(node)
            return
        self.phase = node.phase
        if is_load(node):
            self._load(node)
            return
        for op in self._rewritten(node):
            self._apply(op)

    def _load(self, op: named.Op) -> None:
        """What is stored, brought to what the computation uses; the stored version stays alone."""
        stored, want = self._latest(op.ins[0]), self._wanted(op.out)
        made = self._enter(op.out, stored.placement, len(self.state.blocks) - 1)
        self._emit(Apply.of(op, (stored,), (made,)))
        used, self.causes[op.out] = self.causes[op.out], self.causes[op.ins[0]]
        ask = why.Ask("storage", "the computation uses it so", op.span, phase=op.phase)
        self._settle(op.out, want, ask)
        self.causes[op.out] = used

    def _rewritten(self, op: named.Op) -> tuple[named.Op, ...]:
        """The operator; an n-ary einsum in pairs; a composite whose own dim is split, expanded."""
        if op.name == "einsum" and len(op.ins) > 2:
            placed = tuple(self._latest(v).placement for v in op.ins)
            return pairwise(op, placed, self.mesh)
        own = self._split_own_dims(op)
        if not own:
            return (op,)
        sizes = {d: tuple((a, self.mesh.size(a)) for a in axes) for d, axes in own.items()}
        expanded = expand(op, sizes)
        if expanded is None:
            return (op,)
        for dim, axes in expanded.rules:
            self.layout.also(dim, axes, op.span)
        return expanded.ops

    def _split_own_dims(self, op: named.Op) -> dict[str, tuple[str, ...]]:
        """Dims that the operator needs whole and that an operand has split, with their axes."""
        opdef = lookup(op.name)
        ins, outs = (tuple(v.type for v in vs) for vs in (op.ins, op.outs))
        loops = opdef.factors(Signature(ins, outs, dict(op.attrs))).loops
        found: dict[str, tuple[str, ...]] = {}
        for index, value in enumerate(op.ins):
            free = {f.ins[index] for f in loops}
            for dim, axes in self._latest(value).placement.splits:
                if dim not in free:
                    found[dim] = axes
        return found

    def _apply(self, op: named.Op) -> None:
        wants = (replace(self._want(v), summed=self.layout.summed(v, op)) for v in op.outs)
        chooser = self._chooser(op, tuple(wants))
        best = self._choose(op, chooser)
        instead = functools.partial(chooser.next_best, best)
        ask = why.Ask("operand", why.operator(op), op.span, instead, op.phase)
        needs = zip(op.ins, best.needs, strict=True)
        ins = tuple(self._version(v, need, ask) for v, need in needs)
        self._note_partial(op, best)
        depth = len(self.state.blocks) - 1
        outs = tuple(self._enter(v, p, depth) for v, p in zip(op.outs, best.yields, strict=True))
        self._emit(Apply.of(op, ins, outs))
        for value, target in zip(op.outs, best.targets, strict=True):
            self._settle(value, target, self._ask_result(value, op, instead))

    def _want(self, value: Value) -> Want:
        """What is demanded of a result."""
        return Want(self._wanted(value))

    def _chooser(self, op: named.Op, wants: tuple[Want, ...]) -> Chooser:
        """Everything that `op` may do."""
        versions = tuple(self._placements(v) for v in op.ins)
        # Outputs force: what is returned is reduced as it appears, and everyone reads the result.
        forced = not self.returned.isdisjoint(op.outs)
        return Chooser(call_of(op), versions, wants, self.mesh, self.policy, self.price, forced)

    def _choose(self, op: named.Op, chooser: Chooser) -> Choice:
        """What `op` does."""
        return chooser.candidates()[0]

    def _ask_result(self, value: Value, op: named.Op, instead: Callable[[], int | None]) -> why.Ask:
        if value in self.returned:
            who = f"`{value.label}` is returned"
            return why.Ask("output", who, op.span, instead, op.phase)
        kind = {"immediate": "policy", "optimal": "plan"}.get(self.policy, "rule")
        return why.Ask(kind, "", op.span, instead, op.phase)

    def _settle(self, value: Value, target: Placement, ask: why.Ask) -> None:
        """Bring a result to where it settles; what it came about as is gone."""
        Placer._version(self, value, target, ask)
        self._keep_only(value, target)

    def _keep_only(self, value: Value, target: Placement) -> None:
        kept = [t for t in self.state.versions[value] if t.placement == target]
        self.state.versions[value] = kept
        self.state.settled[value] = kept[0]

    def _note_partial(self, op: named.Op, choice: Choice) -> None:
        """Remember why a result is partial, for whoever has to reduce it."""
        if not any(p.partial for p in choice.yields):
            return
        pairs = zip(op.ins, choice.needs, strict=True)
        inherited = [self.state.partial_why.get(v, ()) for v, p in pairs if p.partial]
        causes = {d: c for v in op.ins for d, c in self.causes.get(v, {}).items()}
        reasons = (*(r for rs in inherited for r in rs), *why.summed(op, choice, causes))
        for value in op.outs:
            self.state.partial_why[value] = tuple(dict.fromkeys(reasons))

    # --- loops -------------------------------------------------------------------------------

    def _repeat(self, node: named.Loop) -> None:
        """The loop with its carries whole, or partial where that sends fewer bytes in all."""
        before = self.state.copy()
        plain, natural = self._loop(node, {})
        if not self.deferred or not any(p.partial for p in natural.values()):
            return
        wait = {v: p for v, p in natural.items() if p.partial}
        first, self.state = self.state, before
        partial, _ = self._loop(node, wait)
        if plain <= partial:
            self.state = first

    def _loop(
        self, node: named.Loop, partial: dict[Value, Placement]
    ) -> tuple[int, dict[Value, Placement]]:
        """Place one loop with the carries in `partial` held so; its bytes, and what came out."""
        entry = len(self.state.blocks[-1])
        wants = {c.inside: partial.get(c.inside, self._carried(c)) for c in node.carries}
        inits = [self._carry_in(c, wants[c.inside], node) for c in node.carries]
        self.phase = node.phase
        self.state.blocks.append([])
        depth = len(self.state.blocks) - 1
        stacked = tuple(self._stack(s, node, depth) for s in node.stacked)
        insides = [self._enter(c.inside, wants[c.inside], depth) for c in node.carries]
        for carry, want in wants.items():
            if want.partial:
                self.state.partial_why[carry] = why.CARRIED
        for inner in node.body:
            self._node(inner)
        natural = {c.inside: self._placements(c.next)[0] for c in node.carries}
        nexts = [self._carry_out(c, wants[c.inside], node) for c in node.carries]
        kept = [self._kept(c, node) for c in node.collected]
        body = self.state.blocks.pop()
        results = [self._carry_result(c, wants[c.inside]) for c in node.carries]
        versions = zip(inits, insides, nexts, results, strict=True)
        carries = tuple(Carry(*v) for v in versions)
        pairs = zip(kept, node.collected, strict=True)
        collected = tuple(Collected(inside, self._collect(inside, item)) for inside, item in pairs)
        about = (node.span, collected, node.reverse, node.phase, node.block)
        self._emit(Loop(node.dim, carries, stacked, tuple(body), *about))
        for item in node.collected:
            self._settle_collected(item.outer, node)
        return self._bytes(entry, results), natural

    def _kept(self, item: ir.Collected[Value], node: named.Loop) -> Tensor:
        """The version that a loop collects."""
        return self.state.versions[item.inside][0]

    def _collect(self, inside: Tensor, item: ir.Collected[Value]) -> Tensor:
        """What a loop collects is placed as each part of it."""
        self.causes[item.outer] = self.causes.get(item.inside, {})
        if inside.placement.partial:
            reasons = self.state.partial_why.get(item.inside, why.CARRIED)
            self.state.partial_why[item.outer] = reasons
        return self._enter(item.outer, inside.placement, len(self.state.blocks) - 1)

    def _settle_collected(self, value: Value, node: named.Loop) -> None:
        """Bring what was collected to what rules demand of the whole."""
        want = self._wanted(value)
        here = self._latest(value).placement
        if all(here.axes_of(d) == axes for d, axes in want.splits):
            return
        self._version(value, want, why.Ask("rule", "", node.span, phase=node.phase))
        self._keep_only(value, want)

    def _carried(self, carry: ir.Carry[Value]) -> Placement:
        """How a carried value is held when nothing speaks for holding it partial."""
        return self._wanted(carry.inside)

    def _carry_in(self, carry: ir.Carry[Value], want: Placement, node: named.Loop) -> Tensor:
        who = f"`{carry.inside.label}` enters `repeat {node.dim}` so"
        ask = why.Ask("carry", who, node.span, phase=node.phase)
        return self._version(carry.init, want, ask)

    def _carry_out(self, carry: ir.Carry[Value], want: Placement, node: named.Loop) -> Tensor:
        who = f"`{carry.next.label}` goes round `repeat {node.dim}` so"
        ask = why.Ask("carry", who, node.span, phase=node.phase)
        return self._version(carry.next, want, ask)

    def _carry_result(self, carry: ir.Carry[Value], want: Placement) -> Tensor:
        self.causes[carry.result] = self.causes.get(carry.inside, {})
        if want.partial:
            reasons = self.state.partial_why.get(carry.next, why.CARRIED)
            self.state.partial_why[carry.result] = reasons
        return self._enter(carry.result, want, len(self.state.blocks) - 1)

    def _stack(self, item: ir.Stacked[Value], node: named.Loop, depth: int) -> Stacked[Tensor]:
        """A stack that is whole along the dim of its loop, and a slice of it."""
        loop = node.dim.name
        # Some operator may have wanted a version of it that is split along the loop.
        versions = _settled_first(self.state.versions[item.outer])
        whole = [t for t in versions if not t.placement.axes_of(loop)]
        ask = why.Ask("operand", f"`repeat {loop}`", node.span, phase=node.phase)
        need = versions[0].placement.without_dim(loop)
        outer = whole[0] if whole else self._version(item.outer, need, ask)
        inside = self._enter(item.inside, outer.placement.without_dim(loop), depth)
        self.causes[item.inside] = self.causes.get(item.outer, {})
        return Stacked(outer, inside)

    def _bytes(self, entry: int, results: list[Tensor]) -> int:
        """Bytes of what was placed since `entry`, and of reducing what the loop leaves partial."""
        nodes = tuple(self.state.blocks[-1][entry:])
        total = sum(n.route.wire_bytes * k for n, k in walk(nodes) if isinstance(n, Reshard))
        for tensor in results:
            whole = placement(self.mesh, dict(tensor.placement.splits))
            reduced = route(tensor.value.type, tensor.placement, whole, self.mesh)
            assert reduced is not None
            total += reduced.wire_bytes
        return total

    # --- outputs -----------------------------------------------------------------------------

    def _output(self, output: named.Output) -> Tensor:
        value = output.value
        want = self._computed(value) if value.role == "param" else self._wanted(value)
        ask = why.Ask("output", f"`{output.name}` is returned", output.span)
        return self._version(value, want, ask)

    def _update(self, update: named.Update, old: Tensor) -> tuple[Tensor, Tensor]:
        """What is stored and what it becomes, brought to where it is stored."""
        who = f"the new `{update.old.label}` is stored so"
        ask = why.Ask("update", who, update.new.span, phase="update")
        return old, self._version(update.new, old.placement, ask)


def _settled_first(versions: list[Tensor]) -> list[Tensor]:
    """The version that a value settled in, then the latest ones."""
    return [versions[0], *reversed(versions)]
