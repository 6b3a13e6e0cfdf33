"""From the placed program to the device program: names, local shapes, one step per statement."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial
from itertools import repeat

from meshdsl.device.ir import (
    Compute,
    DeviceCollected,
    DeviceLoop,
    DeviceProgram,
    Move,
    Node,
    Var,
    known_words,
)
from meshdsl.device.names import Giver, Names
from meshdsl.ir import program as ir
from meshdsl.ir.program import Carry, OpKind, Stacked
from meshdsl.ir.rewrite import reads_of
from meshdsl.ir.types import Dim
from meshdsl.named.ir import Value
from meshdsl.ops.opdef import Signature, lookup
from meshdsl.placed import collectives
from meshdsl.placed import ir as placed
from meshdsl.placed.placements import Placement
from meshdsl.placed.strategies import flops

Pairs = tuple[tuple[placed.PlacedTensor, placed.PlacedTensor], ...]


@lru_cache(maxsize=1)
def lower(program: placed.PlacedProgram, names: Giver | None = None) -> DeviceProgram:
    """The program of each device; a notation of it may have `names` of its own.

    Where placing tries whether a program can be cut, the device stage goes on with what it had.
    """
    return _Lowering(program, names or Names()).program()


class _Lowering:
    def __init__(self, program: placed.PlacedProgram, names: Giver) -> None:
        self.source = program
        self.mesh = program.mesh
        # Where states lie that are in no memory of the device.
        self.states = {state.value: state.away for state in program.named.states}
        self.names = names
        self.results = _results(program)
        self.vars: dict[placed.PlacedTensor, Var] = {}
        # The word of the source for a value, that of its operator where it has none.
        self.words: dict[Value, str] = {}
        self.stacks = _stacks(program.body)
        self.read = _read(program)
        self.taken_over = dict(_taken_over(program))
        self.written_into = dict(_written_into(program))
        self.lists: set[Var] = set()
        # Casts to and from the dtype in which something is sent.
        self.early: set[Node] = set()
        self.late: set[Node] = set()
        # Whether rows are followed by padding, which need not be sent.
        self.has_padding = False

    def program(self) -> DeviceProgram:
        coordinates = {axis: self.names.fresh(axis) for axis in self.mesh.names}
        inputs = tuple(self._new(t) for t in self.source.inputs)
        params = tuple(self._new(p.tensor, away=p.param.away) for p in self.source.params)
        states = tuple(map(self._state, self.source.states))
        body = self._nodes(self.source.body)
        outputs = tuple((name, self.vars[t]) for name, t in self.source.outputs)
        updates = tuple((self.vars[a], self.vars[b]) for a, b in self.source.updates)
        parts = (inputs, params, body, outputs, coordinates, states, updates)
        lowered = DeviceProgram(self.source, self.mesh, *parts, frozenset(self.lists))
        if not self.has_padding or self.source.pipe is not None:
            return lowered
        from meshdsl.device.counted_exchanges import counted_exchanges

        return counted_exchanges(lowered)

    # --- variables ---------------------------------------------------------------------------

    def _new(
        self, tensor: placed.PlacedTensor, op: str = "t", hint: str = "", away: str = ""
    ) -> Var:
        """The variable of a tensor: a subexpression is named after `op`, and known by `hint`.

        One with a name hint is named after that. The gradient of a subexpression is known by the
        word for the subexpression.
        """
        value = tensor.value
        op = value.name_hint or op
        if not value.name and value.is_gradient and (of := self._word_of(value.source)):
            hint = f"d_{of}"
        name, word = self._word(tensor, op), self._word(tensor, hint or op)
        self.words.setdefault(value, value.label if value.name else hint or op)
        self.vars[tensor] = self._var(tensor, tensor.placement, name, word, away)
        return self.vars[tensor]

    def _word_of(self, value: Value) -> str:
        """The word for a value, if it has one by now."""
        return value.label if value.name else self.words.get(value, "")

    def _var(
        self,
        tensor: placed.PlacedTensor,
        placement: Placement,
        name: str,
        hint: str,
        away: str = "",
    ) -> Var:
        local = placement.local(tensor.value.type, self.mesh)
        return Var(self.names.fresh(name), tensor.value, placement, local, hint, away=away)

    def _over(self, tensor: placed.PlacedTensor) -> Var:
        """The variable of a tensor that is written over another, and has its name."""
        self.vars[tensor] = replace(self.vars[self.written_into[tensor]], value=tensor.value)
        return self.vars[tensor]

    def _state(self, tensor: placed.PlacedTensor) -> Var:
        name = (tensor.value.name or "").replace(".", "_")
        away = self.states[tensor.value]
        self.vars[tensor] = self._var(tensor, tensor.placement, name, name, away)
        return self.vars[tensor]

    def _word(self, tensor: placed.PlacedTensor, op: str) -> str:
        tensor = self.taken_over.get(tensor, tensor)
        name = tensor.value.label if tensor.value.name else op
        if tensor in self.stacks:
            return f"{name}_stack"
        return f"{name}_part" if tensor.placement.partial else name

    # --- nodes -------------------------------------------------------------------------------

    def _nodes(self, nodes: tuple[placed.Node, ...]) -> tuple[Node, ...]:
        lowered: list[Node] = []
        for node in nodes:
            match node:
                case placed.Apply(kind=OpKind.LOAD):
                    source = self.vars[node.ins[0]]
                    self.vars[node.outs[0]] = source
                    if source.away:
                        lowered.append(self._loaded(node, source))
                case placed.Apply():
                    lowered.append(self._apply(node))
                case placed.Reshard():
                    lowered.extend(self._reshard(node))
                case placed.PlacedLoop():
                    lowered.append(self._loop(node))
        return _apart(lowered, self.early, self.late)

    def _apply(self, node: placed.Apply) -> Compute:
        ins = tuple(self.vars[t] for t in node.ins)
        results = [t.value.name_hint or self.results.get(t.value, "") for t in node.outs]
        self.has_padding |= lookup(node.name).grouped is not None
        if lookup(node.name).view and _is_relabelled(node):
            results = [results[0] or self._word_of(node.ins[0].value)]
        onto = 0 if node.outs[0] in self.written_into else None
        if onto is None:
            outs = tuple(map(self._new, node.outs, repeat(node.name), results))
        else:
            outs = (self._over(node.outs[0]),)
        local = Signature(
            tuple(v.local for v in ins), tuple(v.local for v in outs), dict(node.attrs)
        )
        cost = flops(lookup(node.name), local)
        about = (node.attrs, node.span, node.phase, node.block)
        return Compute(node.name, ins, outs, *about, kind=node.kind, flops=cost, onto=onto)

    def _loaded(self, node: placed.Apply, source: Var) -> Move:
        """The load of what is stored in another memory."""
        (tensor,) = node.outs
        target = self._var(tensor, tensor.placement, source.hint, source.hint)
        self.vars[tensor] = target
        step = collectives.load(source.placement, source.away)
        words = known_words(f"`{source.value.label}` is stored on the {source.away}")
        move = Move(step, source, target, 0, 0, node.span, words, node.phase)
        return move.counted(self.mesh)

    def _reshard(self, node: placed.Reshard) -> list[Node]:
        if node.dtype is None:
            moves = self._moves(node, node.source.value, self.vars[node.source])
            self.vars[node.target] = moves[-1].target
            return [*moves]
        first, last = self.vars[node.source], node.route.steps[-1]
        sent = replace(first.value, type=replace(first.type, dtype=node.dtype))
        into = self._cast(node, first, placed.PlacedTensor(sent, node.source.placement), first)
        moves = self._moves(node, sent, into.outs[0])
        name, hint = (
            self._version(node.target, last.after, first, w) for w in (first.name, first.hint)
        )
        target = self._var(node.target, node.target.placement, name, hint)
        self.vars[node.target] = target
        back = self._cast(node, moves[-1].target, node.target, target)
        self.early.add(into)
        self.late.add(back)
        return [into, *moves, back]

    def _cast(
        self, node: placed.Reshard, source: Var, tensor: placed.PlacedTensor, named: Var
    ) -> Compute:
        """The cast of a variable to the dtype of a tensor, on its way to or from another device."""
        dtype = tensor.type.dtype
        target = named
        if dtype == node.dtype:
            word = f"{named.name}_{dtype.name}"
            target = self._var(tensor, tensor.placement, word, word)
        about = ((("dtype", dtype),), node.span, node.phase)
        return Compute("cast", (source,), (target,), *about)

    def _moves(self, node: placed.Reshard, value: Value, source: Var) -> list[Move]:
        """The steps of a route, on a version of a value."""
        moves: list[Move] = []
        for step in node.route.steps:
            version = partial(self._version, node.target, step.after, source)
            tensor = placed.PlacedTensor(value, step.after)
            target = self._var(tensor, step.after, version(source.name), version(source.hint))
            move = Move(step, source, target, 0, 0, node.span, node.words, node.phase)
            moves.append(move.counted(self.mesh))
            source = target
        return moves

    def _version(
        self, tensor: placed.PlacedTensor, after: Placement, source: Var, word: str
    ) -> str:
        """The word for another version of a tensor; that of the `source` is `word`."""
        named = self.taken_over.get(tensor, tensor).value
        label = named.label if named.name else word.removesuffix("_part")
        if after.windows:
            return f"{label}_halo"
        if after.partial:
            return f"{label}_part"
        return label if source.placement.partial else f"{label}_{_suffix(source.placement, after)}"

    def _inside(self, carry: Carry[placed.PlacedTensor]) -> Var:
        """The carried variable; it takes over the name of its initial value where that is dead."""
        if carry.init not in self.taken_over:
            return self._new(carry.inside)
        init, tensor = self.vars[carry.init], carry.inside
        inside = Var(init.name, tensor.value, init.placement, init.local, init.hint)
        self.vars[tensor] = inside
        return self.vars[tensor]

    def _loop(self, node: placed.PlacedLoop) -> DeviceLoop:
        index, dim, pipe = self.names.fresh(node.dim.name), node.dim, self.source.pipe
        if pipe and pipe.cuts(node):
            dim = Dim(dim.name, pipe.most(dim.size, self.mesh))
        inits = [self.vars[c.init] for c in node.carries]
        insides = [self._inside(c) for c in node.carries]
        stacked = tuple(map(self._slice, node.stacked))
        body = self._nodes(node.body)
        carries = []
        for carry, init, inside in zip(node.carries, inits, insides, strict=True):
            tensor = carry.result
            result = replace(inside, value=tensor.value)
            self.vars[tensor] = result
            carries.append(Carry(init, inside, self.vars[carry.next], result))
        collected = tuple(map(self._collected, node.collected))
        about = (node.span, collected, node.reverse, node.phase, node.block)
        return DeviceLoop(dim, tuple(carries), stacked, body, *about, index=index)

    def _slice(self, item: Stacked[placed.PlacedTensor]) -> Stacked[Var]:
        outer = self.vars[item.outer]
        word = outer.hint.removesuffix("_stack")
        return Stacked(outer, self._new(item.inside, hint=word, away=outer.away))

    def _collected(self, made: ir.Collected[placed.PlacedTensor]) -> DeviceCollected:
        if made.outer in self.written_into:
            stack = self.vars[self.written_into[made.outer]]
            return DeviceCollected(self.vars[made.inside], self._over(made.outer), stack=stack)
        var = self._new(made.outer, hint=self.vars[made.inside].hint.removesuffix("_part"))
        if made.outer not in self.read:
            self.lists.add(var)
        return DeviceCollected(self.vars[made.inside], var, made.outer not in self.read)


def _apart(nodes: list[Node], early: set[Node], late: set[Node]) -> tuple[Node, ...]:
    """The nodes of a block, casts around collectives as far from these as they may be.

    The `early` right behind what makes their operand, the `late` before the first that reads their
    result: so a collective may be issued as early, and wait as long, as if there were no cast.
    """
    if early.isdisjoint(nodes) and late.isdisjoint(nodes):
        return tuple(nodes)
    sent: dict[Var, list[Node]] = {}
    makes = {v for node in nodes for v in node.makes}
    for node in nodes:
        if node in early and node.reads[0] in makes:
            sent.setdefault(node.reads[0], []).append(node)
    # What comes from a collective may go on to another one: then its cast waits for that.
    source = {
        v: collective for collective, casts in sent.items() for cast in casts for v in cast.makes
    }
    ordered: list[Node] = []
    waiting: dict[Var, Node] = {}

    def put(node: Node) -> None:
        for var in dict.fromkeys(source.get(v, v) for v in reads_of(node)):
            if var in waiting:
                put(waiting.pop(var))
        ordered.append(node)
        ordered.extend(cast for v in node.makes for cast in sent.get(v, ()))

    moved = {node for casts in sent.values() for node in casts}
    for node in nodes:
        if node in late:
            waiting.update((v, node) for v in node.makes)
        elif node not in moved:
            put(node)
    return (*ordered, *waiting.values())


def _is_relabelled(node: placed.Apply) -> bool:
    """Whether the result of a view is all of its operand, under other dims."""
    sizes = {(tensor.type.bytes, tensor.type.dtype) for tensor in (node.ins[0], *node.outs)}
    return len(sizes) == 1


def _results(program: placed.PlacedProgram) -> dict[Value, str]:
    """Subexpressions that are results of a call of a `def`, or new values, with words for them."""
    by_path: dict[tuple[str, ...], set[Value]] = {}
    for node in ir.every(program.body):
        if isinstance(node, placed.Apply) and node.phase == "forward":
            for value in (tensor.value for tensor in node.ins):
                if len(value.path) > len(node.outs[0].value.path) and value.name is None:
                    by_path.setdefault(value.path, set()).add(value)
    assigned = ((old.value.label, new.value) for old, new in program.updates)
    # Simplification may leave several results of one call.
    return {
        value: path[-1] for path, values in by_path.items() if len(values) == 1 for value in values
    } | {value: f"new_{label}" for label, value in assigned if not value.name}


def _suffix(before: Placement, after: Placement) -> str:
    """`full` for a gathered tensor, `local` for a sliced one, `moved` for anything else."""
    b, a = ({d for d, _ in p.splits} for p in (before, after))
    if b > a or not after.splits:
        return "full"
    return "local" if a > b else "moved"


def _read(program: placed.PlacedProgram) -> set[placed.PlacedTensor]:
    """Tensors read as a whole, or along a dim that is not their first: not slice by slice."""
    tensors = {t for _, t in program.outputs} | {new for _, new in program.updates}
    for node in ir.every(program.body):
        slices = {s.outer for s in node.stacked}
        tensors.update(v for v in node.reads if v not in slices)
        tensors.update((*node.ends, *(c.init for c in node.carries)))
    for loop in ir.loops(program.body, placed.PlacedLoop):
        tensors.update(s.outer for s in loop.stacked if s.outer.type.index(loop.dim.name))
    return tensors


def _stacks(nodes: tuple[placed.Node, ...]) -> set[placed.PlacedTensor]:
    """Stacks: tensors of which loops read a slice per iteration; the slice gets the plain name."""
    return {item.outer for node in ir.every(nodes) for item in node.stacked}


def _taken_over(
    program: placed.PlacedProgram,
) -> Iterator[tuple[placed.PlacedTensor, placed.PlacedTensor]]:
    """Pairs of a carry's initial value and the carry, where nothing else reads the former.

    It is made in the block of the loop: a loop around it makes it anew in every iteration.
    """
    reads = ir.uses(program.body)
    reads.update(t for _, t in (*program.outputs, *program.updates))

    def found(
        nodes: tuple[placed.Node, ...],
    ) -> Iterator[tuple[placed.PlacedTensor, placed.PlacedTensor]]:
        here: set[placed.PlacedTensor] = set()
        for node in nodes:
            pairs = ((c.init, c.inside) for c in node.carries)
            yield from ((a, b) for a, b in pairs if a in here and reads[a] == 1)
            yield from found(node.body)
            here.update(_makes(node))

    return found(program.body)


def _written_into(
    program: placed.PlacedProgram,
) -> Iterator[tuple[placed.PlacedTensor, placed.PlacedTensor]]:
    """Pairs of a new value and the parameter or state that it replaces, written in its memory.

    The operator that makes it has to have a text for that, and alone reads the old value.
    """
    reads = ir.uses(program.body)
    reads.update(t for _, t in (*program.outputs, *program.updates))
    makers = {tensor: node for node in ir.every(program.body) for tensor in node.makes}

    def found(old: placed.PlacedTensor, new: placed.PlacedTensor) -> Pairs | None:
        maker = makers.get(new)
        if reads[old] != 1 or old.placement != new.placement:
            return None
        match maker:
            case placed.Apply(ins=(first, *_)) if first is old:
                types = tuple(t.type for t in maker.ins)
                return ((new, old),) if 0 in lookup(maker.name).written_over(types) else None
            case placed.PlacedLoop():
                inside = {c.outer: c.inside for c in maker.collected}.get(new)
                before = {s.outer: s.inside for s in maker.stacked}.get(old)
                if inside is not None and before is not None:
                    inner = found(before, inside)
                    return None if inner is None else (*inner, (new, old))
        return None

    for old, new in program.updates:
        yield from found(old, new) or ()


def _makes(node: placed.Node) -> tuple[placed.PlacedTensor, ...]:
    """The variables of a node: a loaded parameter has one already, a number needs none."""
    if isinstance(node, placed.Apply) and (node.kind is OpKind.LOAD or node.name == "constant"):
        return ()
    return node.makes
