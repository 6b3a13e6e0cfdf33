"""The text of operators: in place where no other variable shares the memory, or in chunks."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from meshdsl.backends.torch.block_text import BlockText
from meshdsl.backends.torch.line_breaks import INDENT, WIDTH, quoted
from meshdsl.backends.torch.move_text import window_text
from meshdsl.backends.torch.op_context import TorchText
from meshdsl.backends.torch.text_state import LastAssignment, TextState, typed
from meshdsl.backends.torch.update_text import UpdateText, operands
from meshdsl.device import offloaded_updates
from meshdsl.device.aliases import copied_first
from meshdsl.device.ir import Compute, DeviceLoop, Move, Var
from meshdsl.device.liveness import numbers, overwrites, relabels, shows_operand
from meshdsl.device.offloaded_updates import OffloadedUpdate, streamed
from meshdsl.ir.program import every
from meshdsl.ir.types import I64, LARGE, TensorType
from meshdsl.named.ir import Value
from meshdsl.ops.indexing import check_text, checked_as, checked_number, checked_text
from meshdsl.ops.opdef import Intervals, Signature, lookup
from meshdsl.placed.placements import Placement, Window


class OperatorText:
    """Writes operators."""

    def __init__(self, state: TextState, blocks: BlockText) -> None:
        self.state, self.blocks, self.out = state, blocks, state.out
        self.away = state.program.away
        self.copied_first = copied_first(state.program)
        self.streamed = streamed(state.program)
        self.numbers = numbers(state.program) if state.program.updates else frozenset()
        self.rounded = {update.cast for update in self.streamed.values()}
        # What is known to be indices: a value as it is placed, of dims of a size (or of a dim or an
        # ignored number), on one device or on all.
        self.checked: set[tuple[Value, Placement, int | str, int | None]] = set()
        # By variable, the one that has it as i64, and the block that assigns that.
        self.long: dict[Var, tuple[str, int]] = {}
        # The same of one integer, as an int of Python.
        self.ints: dict[Var, tuple[str, int]] = {}
        self.left_long: set[Var] = set()
        # Indices counted from a block's first element, and whether they are inside: by their text.
        self.unpacked: dict[Var, dict[str, tuple[tuple[str, ...], int]]] = {}
        # The numbers that indices are below, by their makers.
        self.below: dict[Value, int] = {}

    @cached_property
    def updates(self) -> UpdateText:
        """The writer of updates."""
        return UpdateText(self.state, self.blocks)

    def write(self, node: Compute) -> None:
        """Write an operator, in place where no other variable shares the memory."""
        if self._is_written(node):
            return
        opdef = lookup(node.name)
        self.state.imports.update(opdef.imports)
        if opdef.below is not None:
            ins, outs = (tuple(v.type for v in vs) for vs in (node.ins, node.outs))
            self.below[node.outs[0].value] = opdef.below(Signature(ins, outs, dict(node.attrs)))
        if opdef.leaves_long and self._is_only_indices(node.outs[0]):
            self.left_long.add(node.outs[0])
        call = self._call(node)
        if opdef.adds_up and len(node.ins) > 1:
            call = replace(call, lists=(self.updates.summed(node),))
        over = self._overwritten(node, call)
        if over is not None and self._is_added_alone(node, call, over):
            self._has_memory(node)
            return
        text = opdef.torch(call) if over is None else opdef.in_place[over](call)
        for line in call.lines:
            self.out.statement(line)
        if over is not None and self._goes_on_as(node, over):
            if text != self.state.identifier(node.ins[over]):
                self._in_place(node, node.ins[over], text)
            self.state.variables.assign(node.outs[0])
        else:
            self._assign(node, text)
        if call.helpers:
            self._note_helpers(node, call)
        self._has_memory(node)

    def _note_helpers(self, node: Compute, call: TorchText) -> None:
        """Note which helper variables of the statement are to be deleted: large ones."""
        converted = self._kept_long(node, call) if call.long or call.numbers else set()
        converted |= self._kept_unpacked(node, call) if call.unpacked else set()
        # They may be twice as wide as their operands.
        if any(2 * v.local.bytes >= LARGE for v in (*node.ins, *node.outs)):
            self.state.helpers = [name for name in call.helpers if name not in converted]

    def _in_place(self, node: Compute, over: Var, text: str) -> None:
        """Write an in-place operator: chained to the assignment right above, if both fit a line."""
        last, name = self.state.last, self.state.identifier(over)
        is_last = last is not None and last.var is over and last.end == len(self.out.lines)
        chained = chain(name, last.text, text) if last is not None and is_last else None
        if last is None or chained is None or last.alone is not None:
            self.out.statement(text)
            return
        line = f"{INDENT * self.out.depth}{name} = {chained}"
        if len(line) > WIDTH:
            self.out.statement(text)
            return
        self.out.take_back(last.start)
        start, target = len(self.out.lines), node.outs[0]
        self.out.assign((name,), chained, typed(target, self.state.mesh))
        self.state.last = LastAssignment(start, len(self.out.lines), target, chained)

    def _is_written(self, node: Compute) -> bool:
        """Write an operator that writes over an operand, or makes a number, if it is one."""
        if node.into is not None and node.adds:
            self._add_to(node, self.state.name(node.into))
            self._has_memory(node)
        elif node.into is not None:
            into = self.state.name(node.into)
            self.state.let(node.outs[0], f"{into}.copy_({self.state.tensor(node.ins[0])})")
        elif node.onto is not None:
            self._write_onto(node, node.onto)
            self.state.fresh.update(node.outs if node.ins[node.onto] in self.state.fresh else ())
        elif node.outs[0] in self.state.places:
            self._fill(node)
        elif node in self.streamed or node in self.rounded:
            if node in self.streamed:
                self._in_chunks(self.streamed[node])
            self._has_memory(node)
        elif node.outs[0] in self.numbers:
            self._number(node)
        elif lookup(node.name).each:
            self._update(node)
        else:
            return False
        return True

    def _number(self, node: Compute) -> None:
        """Write an assignment of a number of Python, which is read as one."""
        write, var = lookup(node.name).number, node.outs[0]
        assert write is not None, f"{node.name} is no number"
        name = self.state.variables.assign(var)
        self.out.assign((name,), write(self._call(node)))
        self.state.constants[var] = name

    def _update(self, node: Compute) -> None:
        """Write an update, of one or of several parameters, in whose memory the results are."""
        over = overwrites(node)
        written = dict(zip(over, node.outs, strict=True))
        ins = list(node.ins)
        for index, new in written.items():
            if node.ins[index] in self.copied_first:
                self.state.let(new, f"{self.state.name(node.ins[index])}.clone()")
                ins[index] = new
        if node not in self.updates.joined:
            self._written_update(node, ins)
        for index, new in written.items():
            old = ins[index]
            if old is not new and old not in self.updates.by_name:
                self._goes_on(old, new)

    def _written_update(self, node: Compute, ins: list[Var]) -> None:
        """Write the call of an update with other operands."""
        record = lookup(node.name)
        self.state.imports.update(record.imports)
        rows = operands(replace(node, ins=tuple(ins))) if record.each > 1 else [tuple(ins)]
        lists = self.updates.texts(node, rows) if len(rows) > 1 else ()
        of_first = (*rows[0], *node.ins[record.each * len(rows) :])
        first = replace(node, ins=of_first, outs=node.outs[: len(record.overwrites)])
        self.out.statement(record.torch(replace(self._call(first), lists=lists)))

    def _goes_on(self, old: Var, new: Var) -> None:
        """Let a variable that is written over go on as another, under the same name if it can."""
        self.state.variables.follow(new, old)
        before, after = self.state.name(old), self.state.variables.assign(new)
        if before != after:
            self.state.let(new, before)

    def _write_onto(self, node: Compute, onto: int) -> None:
        """Write an operator in the memory of its operand."""
        call, addend = self._call(node), self.state.added_at_once(node)
        if self._is_added_alone(node, call, onto):
            return
        if addend is not None:
            self._take_back(addend)
            call = replace(call, args=(call.args[0], addend.text))
        self._write_over(node, node.ins[onto], call, lookup(node.name).in_place[onto](call))

    def _is_added_alone(self, node: Compute, call: TorchText, over: int) -> bool:
        """Let one device alone add what is zeros on the others, if that is what is added."""
        addend, total = self.state.added_at_once(node, over), node.ins[over]
        if addend is None or addend.alone is None:
            return False
        if total not in self.state.prefetched and not self._has_name_of(node.outs[0], total):
            return False
        self._take_back(addend)
        tensor, condition = addend.alone
        with self.out.under(f"if {condition}:"):
            args = list(call.args)
            args[1 - over] = self.out.mention(tensor)
            call = replace(call, args=tuple(args))
            self._write_over(node, total, call, lookup("add").in_place[over](call))
        return True

    def _take_back(self, last: LastAssignment) -> None:
        """Take an assignment back, whose variable is read once."""
        self.out.take_back(last.start)
        self.state.renamed.add(last.var)
        self.state.variables.forget(last.var)

    def _fill(self, node: Compute) -> None:
        """Write an operator whose result is written to its slice of a stack.

        The slice is given a name if other operators read it, too.
        """
        call, fills, target = self._call(node), lookup(node.name).fills, node.outs[0]
        assert fills is not None, f"{node.name} has no text that fills"
        stack, at = self.state.places[target]
        place = f"{self.state.name(stack)}{at}"
        for line in call.lines:
            self.out.statement(line)
        self.out.statement(fills(call, place))
        # The statement yields joined dims; a name given before it could be an operand's.
        if self.state.uses[target] > 1:
            self.state.let(target, place)
        else:
            self.state.renamed.add(target)

    def _add_to(self, node: Compute, total: str) -> None:
        """Write an operator that adds its result to an existing tensor."""
        call, adds = self._call(node), lookup(node.name).adds
        assert adds is not None, f"{node.name} has no text that adds"
        assert node.into is not None
        self._write_over(node, node.into, call, adds(call, total))

    def _write_over(self, node: Compute, over: Var, call: TorchText, text: str) -> None:
        """Write what changes a variable; the result has no name of its own."""
        for line in call.lines:
            self.out.statement(line)
        if call.helpers:
            self._note_helpers(node, call)
        if over in self.state.prefetched:
            self.out.statement(text)
        elif self._has_name_of(node.outs[0], over):
            if text != self.state.identifier(over):
                self.out.statement(text)
            self.state.variables.assign(node.outs[0])
        else:
            self.state.let(node.outs[0], text)

    def _in_chunks(self, found: OffloadedUpdate) -> None:
        """Write an update of what is stored elsewhere as a loop over chunks of it."""
        node, call = found.update, self._call(found.update)
        dims = call.ins[0].dims
        gradient = call.tensor(1) if call.is_constant(1) else call.aligned(1, dims)
        hint = "gradient" if call.is_constant(1) else call.args[1]
        if found.is_away:
            first, tensors, hints = "", [gradient], [hint]
            if call.is_constant(1):
                tensors = [f"torch.empty(()).expand({stored(node.ins[0])}.shape)"]
        else:
            first = self._updated(found)
            tensors, hints = [first, gradient], [first, hint]
        for var, index in zip(found.new, found.states, strict=True):
            self.state.variables.follow(var, node.ins[index])
        states = dict(zip(found.states, map(self.state.variables.assign, found.new), strict=True))
        given = ", ".join(stored(node.ins[i]) for i in found.states)
        pieces = [self.state.variables.helper(f"{hint}_chunk") for hint in hints]
        self.state.helpers = [*pieces, *states.values()]
        self.state.call(store(self.away))
        of = f"[{', '.join(tensors)}], [{given}], {offloaded_updates.CHUNK:_}"
        target = pieces[0]
        if found.written is not None:
            target = self.state.variables.helper(f"{found.written.hint}_chunk")
            self.state.helpers.append(target)
            of += f", [{stored(found.written)}]"
        chunks = self.state.call("chunks")
        self.out.statement(f"for {', '.join(self.state.helpers)} in {chunks}({of}):")
        self.out.depth += 1
        texts = (pieces[0], pieces[-1], *call.args[2:])
        args = tuple(states.get(i, text) for i, text in enumerate(texts))
        chunk = replace(
            call,
            args=args,
            constants=(False, False, *call.constants[2:]),
            ins=(call.ins[0], TensorType(dims, call.ins[1].dtype), *call.ins[2:]),
            whole="" if 0 in states else first,
        )
        opdef = lookup(node.name)
        self.out.statement(opdef.torch(chunk))
        if found.cast is not None:
            self.out.statement(f"{target}.copy_({states[0]})")
        self.out.depth -= 1

    def _updated(self, found: OffloadedUpdate) -> str:
        """The identifier of the parameter that an update writes, made anew where it is a cast's."""
        node, cast = found.update, found.cast
        if cast is not None:
            dtype = cast.outs[0].local.dtype.torch
            self.state.let(cast.outs[0], f"torch.empty({stored(node.ins[0])}.shape, dtype={dtype})")
            return self.state.name(cast.outs[0])
        self.state.variables.follow(node.outs[0], node.ins[0])
        argument = self.state.name(node.ins[0])
        argument += ".clone()" if node.ins[0] in self.copied_first else ""
        if argument != self.state.variables.assign(node.outs[0]):
            self.state.let(node.outs[0], argument)
        return self.state.name(node.outs[0])

    def _has_memory(self, node: Compute) -> None:
        """Note whether the results of a statement have memory of their own or are views."""
        if not shows_operand(node):
            has_memory = not lookup(node.name).overwrites
            self.state.fresh.update(node.outs if has_memory else ())
            return
        self.state.views.update(() if relabels(node, self.state.views) else node.outs)
        # A view is fresh, too, if its operand is and is not read later.
        if self.state.may_overwrite(node.ins[0], node):
            self.state.fresh.update(node.outs)

    def _overwritten(self, node: Compute, call: TorchText) -> int | None:
        """The operand that the result is written over: it is dead and shares no memory.

        The one that memory is counted with, if there are several. Only in a training step: torch's
        autograd may differentiate a forward pass.
        """
        if not self.state.program.updates:
            return None
        numbers = frozenset(i for i, var in enumerate(node.ins) if var in self.state.constants)
        counted = self.state.over.get(node.outs[0])
        indices = lookup(node.name).written_over(call.ins, numbers)
        for index in sorted(indices, key=lambda i: node.ins[i] is not counted):
            var = node.ins[index]
            may_overwrite = self.state.may_overwrite(var, node) and var not in self.state.views
            if may_overwrite and var.local == node.outs[0].local:
                return index
        return None

    def _goes_on_as(self, node: Compute, over: int) -> bool:
        """Whether the result has the name of what it is written over, which no other one read."""
        is_alone = node.ins[over] not in self.state.read_before
        return is_alone and self._has_name_of(node.outs[0], node.ins[over])

    def _has_name_of(self, result: Var, over: Var) -> bool:
        """Whether a result has the identifier of what it is written over, which it gets if free."""
        self.state.variables.follow(result, over)
        return self.state.identifier(result) == self.state.identifier(over)

    def _assign(self, node: Compute, text: str) -> None:
        """Write `name = text`; where that only renames the last result, that one gets the name."""
        target, renamed = node.outs[0], self._renamed(node, text)
        if renamed is not None:
            text = renamed.text
        elif len(node.outs) == 1 and self.state.variables.share(target, text):
            return
        start = len(self.out.lines)
        names = [self.state.variables.assign(var) for var in node.outs]
        if renamed is not None:
            self.state.variables.known_as(renamed.var, names[0])
        self.state.notes(names, node.outs)
        note = (
            self._long_type(target) if target in self.left_long else typed(target, self.state.mesh)
        )
        self.out.assign(names, text, note if len(names) == 1 else "")
        end = len(self.out.lines)
        self.state.last = LastAssignment(start, end, target, text) if len(names) == 1 else None

    def check_ahead(self, loop: DeviceLoop) -> None:
        """Check the indices that iterations read, index or in slices, once before all of them."""
        inner = (loop, *every(loop.body))
        sources = {s.inside: s.outer for n in inner for s in n.stacked}
        moves = (n for n in inner if isinstance(n, Move) and n.step.kind == "slice")
        sources |= {move.target: move.source for move in moves}
        of_iterations = {c.inside for n in inner for c in n.carries}
        of_iterations.update(v for n in inner[1:] for v in n.makes)
        for node in inner[1:]:
            at = lookup(node.name).indices if isinstance(node, Compute) else None
            if at is None:
                continue
            assert isinstance(node, Compute)
            index = node.ins[at]
            while index in sources:
                index = sources[index]
            is_there = index not in of_iterations and index not in self.state.program.lists
            if is_there and index not in self.state.constants and index.on is None:
                self._check_ahead(node, at, index)

    def _check_ahead(self, node: Compute, at: int, whole: Var) -> None:
        """Check what an operator reads of `whole` as indices; convert it if it reads it whole."""
        reader = replace(node, ins=(*node.ins[:at], whole, *node.ins[at + 1 :]))
        splits = frozenset(dim for dim, _ in whole.placement.splits)
        self.out.place = f"{node.span.file}:{node.span.line}"
        call = self._call_of(
            reader,
            args=tuple(self.state.name(v) if v is whole else "" for v in reader.ins),
            offsets={d: partial(self.blocks.offset, d, whole) for d in splits},
            splits=splits,
            long=self._long(reader),
            numbers=self._ints(reader),
        )
        dim, inside = call.attrs["dim"].name, node.ins[at]
        if inside is whole and not whole.type.dims:
            checked_number(call, at, dim)
        elif inside is whole and whole.local.elements * I64.bytes < LARGE:
            checked_text(call, at, dim)
        elif not call.seen(at, checked_as(dim, call.attrs)):
            call.lines.append(check_text(call, at, dim))
        for line in call.lines:
            self.out.statement(line)
        self._kept_long(reader, call)
        size = _sizes(node).get(said := checked_as(dim, call.attrs), said)
        self.checked.add((inside.value, inside.placement, size, self.state.device_alone))

    def _is_only_indices(self, var: Var) -> bool:
        """Whether a variable is read, and as indices alone."""
        nodes = [n for n in every(self.state.program.body) if isinstance(n, Compute)]
        indices = ((node, lookup(node.name).indices) for node in nodes)
        count = sum(at is not None and node.ins[at] is var for node, at in indices)
        return 0 < count == self.state.uses[var]

    def _long_type(self, var: Var) -> str:
        """The note of a variable that is left in i64."""
        long = replace(var, value=replace(var.value, type=replace(var.type, dtype=I64)))
        return typed(long, self.state.mesh)

    def _long(self, node: Compute) -> dict[int, str]:
        """By operand, the variable that has it as i64, if one that can be read here does."""
        entries = ((i, self.long[v]) for i, v in enumerate(node.ins) if v in self.long)
        converted = {i: name for i, (name, block) in entries if block in self.out.blocks}
        left = {i: self.state.name(v) for i, v in enumerate(node.ins) if v in self.left_long}
        return converted | left

    def _kept_long(self, node: Compute, call: TorchText) -> set[str]:
        """The variables that have operands as i64, kept for others that read these: small ones.

        Those that have one as an int are kept, too.
        """
        sizes = {i: node.ins[i].local.elements * I64.bytes for i in call.long}
        small = {i: name for i, name in call.long.items() if sizes[i] < LARGE}
        block = self.out.blocks[-1]
        self.long.update((node.ins[i], (name, block)) for i, name in small.items())
        self.ints.update((node.ins[i], (name, block)) for i, name in call.numbers.items())
        return {*small.values(), *call.numbers.values()}

    def _kept_unpacked(self, node: Compute, call: TorchText) -> set[str]:
        """The variables made of indices by `let_all`, kept for others that read these: small ones.

        Only of an operator that reads indices.
        """
        index = lookup(node.name).indices
        if index is None or node.ins[index].local.elements * I64.bytes >= LARGE:
            return set()
        by_text = self.unpacked.setdefault(node.ins[index], {})
        block = self.out.blocks[-1]
        new = ((t, names) for t, names in call.unpacked.items() if t not in by_text)
        by_text.update((text, (names, block)) for text, names in new)
        return {name for names in call.unpacked.values() for name in names}

    def _unpacked(self, node: Compute) -> dict[str, tuple[str, ...]]:
        """By text, the variables made of an operator's indices that can be read here."""
        by_index = (self.unpacked.get(v, {}) for v in node.ins)
        entries = (entry for each in by_index for entry in each.items())
        return {text: names for text, (names, block) in entries if block in self.out.blocks}

    def _ints(self, node: Compute) -> dict[int, str]:
        """By operand, the variable that has it as an int, if one that can be read here does."""
        entries = ((i, self.ints[v]) for i, v in enumerate(node.ins) if v in self.ints)
        return {i: name for i, (name, block) in entries if block in self.out.blocks}

    def _renamed(self, node: Compute, text: str) -> LastAssignment | None:
        """Take the last assignment back, where `text` is no more than its variable."""
        last, state = self.state.last, self.state
        if last is None or not node.ins or last.var is not node.ins[0] or state.uses[last.var] != 1:
            return None
        if text != state.identifier(last.var) or last.end != len(self.out.lines):
            return None
        self._take_back(last)
        return last

    def _call(self, node: Compute) -> TorchText:
        splits = {d: v for v in (*node.ins, *node.outs) for d, _ in v.placement.splits}
        blocks = [d for d, v in splits.items() if self.blocks.block_of(v, d)]
        starts = self._starts(node)
        empty = (d for d in blocks if self.blocks.may_be_empty(splits[d], d))
        none_read = ((i, d) for i, d in starts if self.blocks.may_read_nothing(node.ins[i], d))
        return self._call_of(
            node,
            args=tuple(map(self.state.ref, node.ins)),
            offsets={d: partial(self.blocks.offset, d, v) for d, v in splits.items()},
            starts=starts,
            parts=partial(self._parts, node),
            splits=frozenset(splits),
            extents={d: partial(self.blocks.extent, splits[d], d) for d in blocks},
            empty=frozenset((*empty, *none_read)),
            long=self._long(node) if self.long or self.left_long else {},
            numbers=self._ints(node) if self.ints else {},
            unpacked=self._unpacked(node) if self.unpacked else {},
            leaves_long=node.outs[0] in self.left_long,
        )

    def _call_of(self, node: Compute, **about: Any) -> TorchText:
        """A call with the types of an operator, of which `about` says the rest."""
        return TorchText(
            constants=tuple(v in self.state.constants for v in node.ins),
            ins=tuple(v.local for v in node.ins),
            outs=tuple(v.local for v in node.outs),
            global_ins=tuple(v.value.type for v in node.ins),
            global_outs=tuple(v.value.type for v in node.outs),
            attrs=dict(node.attrs),
            fresh=self.state.variables.helper,
            checked=lambda index, dim: self._seen(node, index, dim),
            place=repr(self.out.place),
            used=self.state.used,
            **about,
        )

    def _seen(self, node: Compute, index: int, dim: str) -> bool:
        """Whether an operand is known to be indices of a dim; from now on, it is.

        What one device checks alone is known there alone.
        """
        var = node.ins[index]
        sizes = _sizes(node)
        if self.below.get(var.value, math.inf) <= sizes.get(dim, 0):
            return True
        about = (var.value, var.placement, sizes.get(dim, dim))
        here = (*about, self.state.device_alone)
        is_checked = not self.checked.isdisjoint(((*about, None), here))
        self.checked.add(here)
        return is_checked

    def _starts(self, node: Compute) -> dict[tuple[int, str], Callable[[], str]]:
        """What writes the index that each window begins at, by operand and dim.

        Also of one that is no more than the block, and so has not been made.
        """
        ins, outs = (tuple(v.type for v in vs) for vs in (node.ins, node.outs))
        loops = lookup(node.name).factors(Signature(ins, outs, dict(node.attrs))).loops
        starts: dict[tuple[int, str], Callable[[], str]] = {}
        for index, dim in ((i, f.ins[i]) for f in loops for i, r in enumerate(f.reads) if r):
            placed = node.ins[index].placement
            if dim is None or not (axes := placed.axes_of(dim)):
                continue
            window = next((w for w in placed.windows if w.dim == dim), None)
            starts[index, dim] = (
                partial(self.blocks.offset, dim, node.ins[index])
                if window is None
                else partial(self._start, window, axes)
            )
        return starts

    def _parts(self, node: Compute, of_output: str, of_operand: str) -> tuple[Intervals, ...]:
        """What each block has of a dim of the result, and of one of the first operand."""
        both = ((node.outs[0], of_output), (node.ins[0], of_operand))
        if len({var.placement.axes_of(dim) for var, dim in both}) > 1:
            return ()
        held = (v.placement.held(dim, v.type.size(dim), self.state.mesh) for v, dim in both)
        return tuple(zip(*held, strict=True))

    def _start(self, window: Window, axes: tuple[str, ...]) -> str:
        """Text of the index that a window begins at: below 0 where that is fill."""
        reads, ways = window.reads, self.state.mesh.size(*axes)
        if reads.flip or reads.fill is None or window.loop % ways:
            text = window_text(window, axes)
            return f"{self.state.call('window_start')}({text}, {reads.fill is None}, rank, MESH)"
        first = self.blocks.times(axes, window.loop // ways * reads.mul)
        sign = "-" if reads.lo < 0 else "+"
        text = f"{first} {sign} {abs(reads.lo)}" if reads.lo else first
        return text if reads.div == 1 else f"-(-({text}) // {reads.div})"


def chain(name: str, made: str, text: str) -> str | None:
    """One expression for `name = made` followed by `text`; None if there is none.

    `text` calls a method of the variable, or a function of it alone, such as `torch.tanh_(x)`.
    """
    if len(re.findall(rf"\b{re.escape(name)}\b", text)) > 1:
        return None
    if text.startswith(f"{name}."):
        is_primary = isinstance(ast.parse(made, mode="eval").body, ast.Call | ast.Subscript)
        return f"{made if is_primary else f'({made})'}{text.removeprefix(name)}"
    called = re.fullmatch(r"(torch\.\w+_)\((\w+)\)", text)
    return f"{called[1]}({made})" if called is not None and called[2] == name else None


def _sizes(node: Compute) -> dict[str, int]:
    """The sizes of the dims of an operator's values."""
    return {d.name: d.size for v in (*node.ins, *node.outs) for d in v.type.dims}


def store(away: Mapping[Var, str]) -> str:
    """The class of the runtime that keeps the states that lie elsewhere."""
    return next(iter(away.values())).title()


def stored(var: Var) -> str:
    """Text of a parameter or state as it is given."""
    table = "params" if var.value.role == "param" else "states"
    return f"{table}[{quoted(var.value.name or '')}]"
