"""Activations that the forward pass gathers: the backward pass stores their parts instead.

A value that is split where it settles may be gathered for the operators that read it. The plan has
that gathered version serve the backward pass, too: nothing is sent twice, and all of it is kept
from the one pass to the other. Under `activations: gather = again` the part is kept, and gathered
again where the backward pass reads it. (What Korthikanti et al. 2023 do with the operands of linear
layers under sequence parallelism; of parameters, `storage.py`.)

The plan is made before, as if there were no setting: a plan that knew of the second gather would
rather compute on gathered values, which stores them all the same.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import replace

from meshdsl.diagnostics import Diagnostic, Span
from meshdsl.ir.program import Collected, Leaf, Stacked, every, uses
from meshdsl.ir.rewrite import Visitor, free, in_blocks
from meshdsl.ir.types import LARGE
from meshdsl.named.selectors import selected
from meshdsl.placed import why
from meshdsl.placed.ir import Apply, Node, PlacedLoop, PlacedProgram, PlacedTensor, Reshard
from meshdsl.placed.layout import Layout
from meshdsl.placed.placements import placement
from meshdsl.placed.reshard import Price, Route, route
from meshdsl.placed.settings import Setting
from meshdsl.records import dataclass
from meshdsl.syntax.edits import removal
from meshdsl.syntax.symbols import ACTIVATIONS

NAME, AGAIN = "gather", "again"
"""The setting, and its value under which the backward pass gathers again."""


def with_gathers_again(program: PlacedProgram, layout: Layout, price: Price) -> PlacedProgram:
    """The program whose backward pass gathers again what the layout says."""
    if not may_gather_again(layout):
        return program
    rewrite = _GatherAgain(program, layout, price)
    body = tuple(rewrite.block(program.body, {}))
    if not rewrite.carried_out:
        return program
    after = {t for _, t in (*program.outputs, *program.updates)}
    body = _without_unread(body, after)
    tensors = tuple(rewrite.parts.get(t, t) for t in program.tensors)
    # The plan is the least of what was searched, and something is sent beside it.
    plan = program.plan and replace(program.plan, least=False)
    done = tuple(rewrite.carried_out)
    return replace(program, body=body, tensors=tensors, plan=plan, gathered_again=done)


def without_effect(program: PlacedProgram, layout: Layout) -> Iterator[Diagnostic]:
    """A note for each setting under which nothing of a training step is gathered again."""
    if program.mesh.devices == 1 or not any(n.phase == "backward" for n in every(program.body)):
        return
    names = {v for t in program.tensors for v in (t.value, t.value.source)}
    for setting in (s for s in layout.settings if _says_again(s)):
        of_all = setting.selector == ACTIVATIONS
        is_known = of_all or any(selected(setting.path, v) is not None for v in names)
        if setting in program.gathered_again or not is_known:
            continue
        which = "an activation" if of_all else f"`{setting.selector}`"
        message = f"`{setting}` changes nothing: nothing gathered of {which} is kept for"
        message += " the backward pass"
        fixes = (removal(setting.span, "remove the setting"),)
        yield Diagnostic("MD0306", message, setting.span, "note", fixes=fixes)


def may_gather_again(layout: Layout) -> bool:
    """Whether a layout asks for gathers in the backward pass: then a plan is not sent as it is."""
    return any(_says_again(setting) for setting in layout.settings)


def _says_again(setting: Setting) -> bool:
    return setting.name == NAME and setting.value == AGAIN


@dataclass(frozen=True, slots=True)
class _Part:
    """The part that is stored in the place of a gathered version.

    `kept` are the bytes of one device that it takes, `whole` those of the gathered version, of all
    iterations. A small gathered version `lives_on` until its block ends: nothing is saved then.
    """

    tensor: PlacedTensor
    setting: Setting
    kept: int
    whole: int
    lives_on: bool = False


Parts = dict[PlacedTensor, _Part]
"""The gathered versions of a block, and the parts that stand for them in the backward pass."""


class _GatherAgain(Visitor):
    """Rewrites a program block by block.

    parts: the tensors that are replaced by others, in all blocks: stacks and slices of them.
    again: the versions that the backward pass has gathered again so far.
    carried_out: the settings that had an effect, in order.
    """

    def __init__(self, program: PlacedProgram, layout: Layout, price: Price) -> None:
        self.mesh, self.layout, self.price = program.mesh, layout, price
        self.kept_anyway, self.in_stages = _kept_anyway(program), program.pipe is not None
        self.parts: dict[PlacedTensor, PlacedTensor] = {}
        self.again: dict[PlacedTensor, PlacedTensor] = {}
        self.carried_out: dict[Setting, None] = {}

    def block(self, nodes: Iterable[Node], here: Parts) -> list[Node]:
        """The nodes of a block; `here` are the gathered versions with which it begins."""
        new_nodes: list[Node] = []
        for node in nodes:
            if node.phase == "backward" and not isinstance(node, Reshard):
                new_nodes += self._gathered(
                    free(node), here, node.span, self._as_slices(node, here)
                )
            new_nodes += self.visit(node, here)
        return new_nodes

    def op(self, node: Apply | Reshard, here: Parts) -> tuple[Node, ...]:
        """An operator on what the backward pass has gathered again; a gather is noted.

        Where the backward pass takes the stored part of a gathered version, nothing is left to do.
        """
        if isinstance(node, Reshard) and node.phase == "forward":
            self._note(node, here)
        if node.phase != "backward":
            return (node,)
        if isinstance(node, Reshard) and self._is_stored(node.source, here):
            part = here[node.source]
            self.carried_out[part.setting] = None
            if part.tensor.placement == node.target.placement:
                self.again[node.target] = part.tensor
                return ()
            route = self._route(part.tensor, node.target)
            return (replace(node, source=part.tensor, route=route),)
        return (node.with_values(lambda tensor: self.again.get(tensor, tensor)),)

    def _is_stored(self, tensor: PlacedTensor, here: Parts) -> bool:
        """Whether only a part of a version is there, as long as it has not been gathered again."""
        return tensor in here and not here[tensor].lives_on and tensor not in self.again

    def _note(self, node: Reshard, here: Parts) -> None:
        """Note a version that is larger than the one that it is gathered of."""
        source, target = node.source, node.target
        setting = self.layout.setting_for(source.value, NAME)
        if setting is None or setting.value != AGAIN or target in self.kept_anyway:
            return
        if source.placement.partial or target.placement.windows or source.value.role == "param":
            return
        part = here[source].tensor if source in here else source
        part_bytes, full_bytes = (t.local(self.mesh).bytes for t in (part, target))
        if part_bytes < full_bytes:
            lives_on = full_bytes < LARGE and not self.in_stages
            here[target] = _Part(part, setting, part_bytes, full_bytes, lives_on)

    def _gathered(
        self, read: Iterable[PlacedTensor], here: Parts, span: Span, sliced: set[PlacedTensor]
    ) -> Iterator[Reshard]:
        """The gathers, once more, of what is read and has not been gathered again here."""
        for tensor in read:
            if self._is_stored(tensor, here) and tensor not in sliced:
                part = here[tensor]
                self.carried_out[part.setting] = None
                self.again[tensor] = PlacedTensor(tensor.value, tensor.placement)
                yield self._reshard(part, self.again[tensor], span)

    def _reshard(self, part: _Part, target: PlacedTensor, span: Span) -> Reshard:
        words = functools.partial(why.gathered_again, part.setting, part.kept, part.whole)
        way = self._route(part.tensor, target)
        return Reshard(part.tensor, target, way, span, functools.cache(words), "backward")

    def _route(self, source: PlacedTensor, target: PlacedTensor) -> Route:
        ends = source.placement, target.placement
        way = route(target.type, *ends, self.mesh, self.price)
        assert way is not None, f"{ends[0]} was gathered on the way to {ends[1]} before"
        return way

    # --- loops -------------------------------------------------------------------------------

    def _as_slices(self, node: Node, here: Parts) -> set[PlacedTensor]:
        """The stacks of whose parts a loop of the backward pass takes slices.

        It gathers each of them again. A stack whose part is split by the loop's dim is gathered
        before the loop.
        """
        if not isinstance(node, PlacedLoop):
            return set()
        inside = {v for inner in node.body for v in free(inner)}
        outer = (s.outer for s in node.stacked if s.outer not in inside)
        slices = (t for t in outer if t in here and not here[t].lives_on)
        same = node.dim.name
        return {
            t for t in slices if here[t].tensor.placement.axes_of(same) == t.placement.axes_of(same)
        }

    def loop(self, loop: PlacedLoop, here: Parts) -> tuple[PlacedLoop]:
        """A loop: of the forward pass, it collects parts; of the backward pass, it slices them."""
        inside: Parts = {}
        sliced = self._as_slices(loop, here) if loop.phase == "backward" else set()
        stacked = tuple(
            self._slice_of_part(s, loop, here[s.outer], inside) if s.outer in sliced else s
            for s in loop.stacked
        )
        body = self.block(loop.body, inside)
        if loop.phase == "backward":
            body += self._gathered(loop.ends, inside, loop.span, set())
        collected = tuple(self._collected(c, loop, inside, here) for c in loop.collected)
        parts = replace(loop, stacked=stacked, body=tuple(body), collected=collected)
        if loop.phase != "backward":
            return (parts,)
        # What the body reads, it has in the new version already.
        return (parts.with_values(lambda tensor: self.again.get(tensor, tensor)),)

    def _slice_of_part(
        self, item: Stacked[PlacedTensor], loop: PlacedLoop, part: _Part, inside: Parts
    ) -> Stacked[PlacedTensor]:
        """A slice of a stack of parts, in the place of one of the gathered stack."""
        of_part = part.tensor.placement.without_dim(loop.dim.name)
        piece = self.parts[item.inside] = PlacedTensor(item.inside.value, of_part)
        inside[item.inside] = replace(part, tensor=piece, lives_on=False)
        return Stacked(part.tensor, piece)

    def _collected(
        self, item: Collected[PlacedTensor], loop: PlacedLoop, inside: Parts, here: Parts
    ) -> Collected[PlacedTensor]:
        """All iterations of a part, where only the backward pass reads what is collected."""
        part, outer = inside.get(item.inside), item.outer
        if part is None or outer in self.kept_anyway or loop.phase == "backward":
            return item
        splits = dict(part.tensor.placement.splits)
        splits[loop.dim.name] = outer.placement.axes_of(loop.dim.name)
        placed = placement(self.mesh, {d: axes for d, axes in splits.items() if axes})
        stack = self.parts[outer] = PlacedTensor(outer.value, placed)
        part_bytes, full_bytes = (t.local(self.mesh).bytes for t in (stack, outer))
        here[outer] = _Part(stack, part.setting, part_bytes, full_bytes)
        return Collected(part.tensor, stack)


def _without_unread(body: tuple[Node, ...], after: set[PlacedTensor]) -> tuple[Node, ...]:
    """A program without the reshards into versions that nothing reads any more."""
    read = after.union(uses(body))
    unread = {n for n in every(body) if isinstance(n, Reshard) and n.target not in read}
    if not unread:
        return body
    remaining = in_blocks(body, lambda nodes: [n for n in nodes if n not in unread])
    return _without_unread(remaining, after)


def _kept_anyway(program: PlacedProgram) -> set[PlacedTensor]:
    """The tensors that are read after the backward pass, and stacks that the forward pass reads.

    Whatever the backward pass reads of them is there.
    """
    present = {t for _, t in program.outputs} | {new for _, new in program.updates}
    collected: list[Collected[PlacedTensor]] = []
    for node in every(program.body):
        if node.phase == "backward":
            continue
        present.update(s.outer for s in node.stacked)
        collected += node.collected
        if node.phase == "update":
            present.update(node.reads)
    stacks = {c.outer for c in collected}
    for node in every(program.body):
        if node.phase == "forward" and isinstance(node, Leaf):
            present.update(stacks.intersection(node.reads))
        if node.phase != "backward":
            present.update(stacks.intersection(c.init for c in node.carries))
            present.update(stacks.intersection(c.next for c in node.carries))
    for item in collected:  # those of a loop around another one before its own
        if item.outer in present and item.inside in stacks:
            present.add(item.inside)
    return present
