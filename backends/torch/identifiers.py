"""Identifiers of the emitted text: the names of the source where they are safe and free."""

from __future__ import annotations

import builtins
import functools
import keyword
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from meshdsl.backends.torch.inliner import bound_names, defined, imported
from meshdsl.backends.torch.preamble import PROVIDED, HeadName
from meshdsl.device.ir import (
    Bucket,
    Compute,
    DeviceLoop,
    DeviceProgram,
    Move,
    Node,
    Start,
    Var,
    Wait,
)
from meshdsl.ir.program import every, loops
from meshdsl.named.ir import Value

FRAME = frozenset("device rank groups inputs params states".split())
"""The function of a device, and its arguments."""


@functools.cache
def reserved() -> frozenset[str]:
    """The names that no variable has: of the module, of the function of a device, of Python."""
    return module_names() | FRAME | {*dir(builtins)}


@functools.cache
def module_names() -> frozenset[str]:
    """The names that a text may define beside its functions: whatever writes one is listed here."""
    return frozenset((*HeadName, *bound_names("\n".join(PROVIDED)), *defined(), *imported()))


class Identifiers:
    """Allocates identifiers: no keyword, no builtin, no name of the module, none twice."""

    def __init__(self, taken: frozenset[str] = frozenset()) -> None:
        self._used = {*taken, *reserved()}
        self._ever = set(self._used)
        self._last: dict[str, int] = {}
        # The number behind each name; 1 where there is none.
        self.number: dict[str, int] = {}

    def fresh(self, hint: str, number: int = 1) -> str:
        """`hint` itself if it is safe and free, otherwise with a number after it.

        With another `number` than 1 first the name with that number is tried.
        """
        base = safe(hint)
        name = base if number == 1 else f"{base}_{number}"
        while name in self._used or name.startswith("__"):
            number = self._last[base] = self._last.get(base, 1) + 1
            name = f"{base}_{number}"
        self._used.add(name)
        self._ever.add(name)
        self.number[name] = number
        return name

    def is_free(self, hint: str) -> bool:
        """Whether `hint` itself is still free."""
        return safe(hint) not in self._used

    def taken(self, hint: str) -> str:
        """`hint` itself, which is taken from now on."""
        self._used.add(safe(hint))
        return safe(hint)

    @property
    def known(self) -> Collection[str]:
        """All names that were ever allocated, or are reserved."""
        return self._ever

    def numbers(self) -> dict[str, int]:
        """The last number behind each name."""
        return dict(self._last)

    def leave(self, names: Iterable[str], numbers: dict[str, int]) -> None:
        """Free the names of a function, behind which numbers go on as before it."""
        self._used.difference_update(names)
        self._last = numbers

    def free(self, name: str, hint: str) -> None:
        """Free `name`, which was made of `hint`."""
        self._used.discard(name)
        self._last.pop(safe(hint), None)


def safe(hint: str) -> str:
    """An identifier like `hint`, no keyword."""
    base = re.sub(r"\W", "_", hint, flags=re.ASCII).strip("_") or "t"
    reserved = base[0].isdigit() or keyword.iskeyword(base) or keyword.issoftkeyword(base)
    return f"t_{base}" if reserved else base


class Variables:
    """The identifiers of a device program's variables, chosen as they are assigned, in order.

    A variable has its name of the source once the previous owner is dead: what the source assigns
    again, the text assigns again. An alias of another has no identifier of its own.
    """

    def __init__(
        self, program: DeviceProgram, taken: frozenset[str], over: Mapping[Var, Var]
    ) -> None:
        self.names = Identifiers(taken)
        self._reads = _LastReads(program)
        names_of = _shared(program)
        # The part of its path that a parameter's identifier has; how many names have an ending.
        self._paths: dict[Value | None, tuple[str, ...]] = {}
        self._ending: Counter[tuple[str, ...]] = Counter()
        known: set[str] = set()
        for var in names_of:
            name = var.value.name or ""
            if "." in name and name not in known:
                known.add(name)
                self._ending.update(_endings(name))
        in_program = tuple(loops(program.body, DeviceLoop))
        again = frozenset(_repeated_names(in_program) if in_program else ())
        until = self._reads.until
        last = {v.name: until.get(v, 0) for v in again}
        # Those that are still to be taken again, and by name the last read of any variable.
        self._again = set(again)
        self._until_of: dict[str, float] = {}
        for v, n in until.items():
            self._until_of[v.name] = max(n, self._until_of.get(v.name, 0))
        self.until = until | {v: max(n, last[v.name]) for v, n in until.items() if v.name in last}
        names = Counter(name for var, name in names_of.items() if var not in again)
        self.shared = frozenset(name for name, count in names.items() if count > 1)
        # By name, those that one after the other have its memory; the last names all of them.
        self._in_turn = _in_turn(program, self.shared, over) if over else {}
        self._reduced_to = _reduced_to(program, self._in_turn) if self._in_turn else {}
        # Before the first statement: what that reads has no identifier to spare yet.
        self.now = self._farthest = -1
        # The identifiers of variables and helpers of the nested function that is written.
        self._local: set[str] = set()
        self.chosen: dict[str, str] = {}
        self._counters: dict[str, str] = {}
        # The last read of an identifier, and the variables that it now names.
        self._busy: dict[str, float] = {}
        self._holders: dict[str, set[str]] = {}
        self._last: dict[str, Var] = {}
        self._numbers: dict[Value, int] = {}
        collected = {c.outer for loop in in_program for c in loop.collected}
        stacked = (s for loop in in_program for s in loop.stacked)
        self._views = {s.inside for s in stacked if s.outer not in collected}

    def of(self, var: Var) -> str:
        """The identifier of a variable, which is taken from here on."""
        if var in self._again:
            self._again.remove(var)
            self._take_again(var)
        if var.name not in self.chosen:
            in_turn = [v for v in self._in_turn.get(var.name, (var,)) if v.name not in self.chosen]
            name = self._chosen(self._reduced_to.get(in_turn[-1].name, in_turn[-1]))
            self.chosen.update((each.name, name) for each in in_turn)
            self._local.add(name)
            # Several may get theirs before the first is assigned: those that one bucket brings.
            self._busy[name], self._last[name] = self.until.get(var, self.now), var
        name = self.chosen[var.name]
        self._numbers.setdefault(var.value, self.names.number.get(name, 1))
        return name

    def _take_again(self, var: Var) -> None:
        """Give a variable its identifier again, unless another that is read later has it."""
        identifier = self.chosen.get(var.name)
        if self._is_in_use(identifier, var.name):
            del self.chosen[var.name]
        elif identifier is not None:
            self._local.add(self.names.taken(identifier))
            self._busy[identifier], self._last[identifier] = self.until.get(var, self.now), var

    def _is_in_use(self, identifier: str | None, name: str) -> bool:
        """Whether others than those of a name have an identifier, and are read later."""
        others = (n for n, chosen in self.chosen.items() if chosen == identifier and n != name)
        return any(self._until_of.get(other, math.inf) > self.now for other in others)

    def hint(self, var: Var) -> str:
        """The word of a variable, or of what comes to be in its memory."""
        return self._in_turn.get(var.name, (var,))[-1].hint

    def word(self, name: str, hint: str = "") -> str:
        """The identifier of a non-tensor: an axis, a collective in flight, a counter."""
        if name not in self.chosen:
            self.chosen[name] = self.names.fresh(hint or name)
        return self.chosen[name]

    def helper(self, hint: str) -> str:
        """The identifier of what a statement needs beside its results."""
        name = self.names.fresh(hint)
        self._local.add(name)
        return name

    @contextmanager
    def function(self) -> Iterator[None]:
        """Meanwhile, write a nested function: others may have its identifiers of dead variables."""
        outside, self._local = self._local, set()
        numbers = self.names.numbers()
        yield
        gone = {n for n in self._local if self._busy.get(n, self._farthest) <= self._farthest}
        self.names.leave(gone, numbers)
        for name in gone:
            self._busy.pop(name, None)
        self._local = outside

    def counter(self, name: str, dim: str, around: set[str]) -> str:
        """The identifier of a loop's counter: that of an earlier loop, if there was one."""
        before = self._counters.get(dim)
        if before is not None and before not in around:
            self.chosen[name] = self.chosen[before]
        self._counters[dim] = name
        return self.word(name, dim)

    def reach(self, node: Node) -> None:
        """Go on to a node."""
        self.now = self._reads.order[node]
        self._farthest = max(self._farthest, self.now)

    def _chosen(self, var: Var) -> str:
        value = var.value
        source = value.source if value.source.role == "param" else None
        of_param = self._paths.get(source, ()) if value.is_gradient else ()
        if not of_param and var.hint == value.label and self._may_follow(safe(var.hint), var):
            return self.names.taken(var.hint)
        # As much of the path as tells it from others; a gradient has as much as its parameter.
        name = value.name or ""
        for ending in _endings(name) if "." in name else ():
            path = ending[:-1]
            is_enough = path == of_param if of_param else not path or self._ending[ending] == 1
            hint = "_".join((*path, var.hint))
            if is_enough and self.names.is_free(hint):
                if source is not None and not value.is_gradient:
                    self._paths[source] = min(path, self._paths.get(source, path), key=len)
                return self.names.fresh(hint)
        # The gradient of `tanh_2` is `d_tanh_2`.
        number = self._numbers.get(value.source, 1) if value.is_gradient else 1
        return self.names.fresh(var.hint, number)

    def _may_follow(self, name: str, var: Var) -> bool:
        """Whether a variable may take over the identifier of another one, which is dead.

        Only in the same block: memory is counted as if what a loop leaves stayed to the end.
        """
        if self._busy.get(name, math.inf) > self.now:
            return False
        last, home = self._last[name], self._reads.home
        return last in self._views or home.get(last, ()) == home.get(var, ())

    def assign(self, var: Var) -> str:
        """The identifier of a variable that is assigned here."""
        name = self.of(var)
        self._busy[name], self._last[name] = self.until.get(var, self.now), var
        self._holders[name] = {var.name}
        return name

    def follow(self, var: Var, before: Var) -> None:
        """Give a variable the identifier of the one it is written over, if that is dead."""
        name = self.of(before)
        if var.name not in self.chosen and self._busy.get(name, math.inf) <= self.now:
            self.chosen[var.name] = name

    def share(self, var: Var, other: str) -> bool:
        """Give a variable the identifier `other` instead of its own; returns whether it can be."""
        if var.name in self.shared or var.name in self.chosen or other not in self._holders:
            return False
        self.chosen[var.name] = other
        self._busy[other] = max(self._busy[other], self.until.get(var, self.now))
        self._holders[other].add(var.name)
        return True

    def together(self, variables: tuple[Var, ...], hint: str) -> str:
        """Give several variables one identifier, which is to hold all of them."""
        name = self.helper(hint)
        self.chosen.update((var.name, name) for var in variables)
        self._busy[name] = max(self.until.get(var, self.now) for var in variables)
        self._last[name], self._holders[name] = variables[0], {var.name for var in variables}
        return name

    def forget(self, var: Var) -> None:
        """Free the identifier of a variable whose statement is removed, if no other has it."""
        name = self.chosen.pop(var.name)
        if name not in self.chosen.values():
            self.names.free(name, var.hint)

    def known_as(self, var: Var, name: str) -> None:
        """Let a variable without a statement of its own be shown by another's identifier."""
        self.chosen[var.name] = name

    def let_go(self, var: Var) -> str | None:
        """The identifier to delete now that a variable is dead, if it names no other."""
        name = self.of(var)
        holders = self._holders.get(name, set())
        if var.name not in holders:
            return None
        holders.remove(var.name)
        return None if holders else name


def _endings(name: str) -> list[tuple[str, ...]]:
    """The last part of a name, the last two, and so on to all of them."""
    endings: list[tuple[str, ...]] = [()]
    for part in reversed(name.split(".")):
        endings.append((part, *endings[-1]))
    return endings[1:]


def _in_turn(
    program: DeviceProgram, shared: frozenset[str], over: Mapping[Var, Var]
) -> dict[str, tuple[Var, ...]]:
    """By a variable's name, those that have its memory in turn, in the order of their words.

    One that shares a name of the source with earlier ones in the program has their identifier.
    """
    nodes = [node for node in every(program.body) if isinstance(node, Compute)]
    makers = {v: node.name for node in nodes for v in node.makes}
    added = {n.out: n.into for n in nodes if n.into is not None and n.adds and n.into in makers}
    in_turn: dict[Var, list[Var]] = {}
    written = {**over, **added}
    for new, old in ((v, written[v]) for v in makers if v in written):
        if old.name not in shared or not old.value.name:
            in_turn[new] = in_turn.setdefault(old, [old])
            in_turn[new].append(new)
    for variables in in_turn.values():
        # The last that the source names goes last, else one that is not known by its operator.
        named = [v for v in variables if v.value.name]
        with_own_hint = [v for v in variables if v.hint.removesuffix("_part") != makers.get(v)]
        last = (named or with_own_hint or variables[:1])[-1]
        variables.sort(key=lambda var: var is last)
    return {var.name: tuple(variables) for var, variables in in_turn.items()}


def _reduced_to(program: DeviceProgram, in_turn: Mapping[str, tuple[Var, ...]]) -> dict[str, Var]:
    """By name, partial values that are reduced, with the words of what is written over the sums.

    Those alone that are known by no more than their operators: so `d_scale_part`, not
    `einsum_part`, is reduced to what is in place made `d_scale`.
    """
    computed = (node for node in every(program.body) if isinstance(node, Compute))
    plain = {v for n in computed for v in n.makes if v.hint.removesuffix("_part") == n.name}
    words: dict[str, Var] = {}
    nodes = (n.collective if isinstance(n, Start) else n for n in every(program.body))
    for move in (move for node in nodes if isinstance(node, Move | Bucket) for move in node.moves):
        source, last = move.source, in_turn.get(move.target.name, (move.target,))[-1]
        is_reduced = source.placement.partial and not move.target.placement.partial
        is_plain = source in plain and source.name not in in_turn
        if is_reduced and is_plain and last.value is not source.value:
            words[source.name] = replace(last, hint=f"{last.hint}_part")
    return words


def _repeated_names(in_program: Iterable[DeviceLoop]) -> Iterator[Var]:
    """The variables of loops that have the name of a variable of an earlier loop.

    They are read from the list in which the earlier loop saved it, or gathered again
    (`device/saved_names.py`).
    """
    names: dict[Var, str] = {}
    gathered: set[str] = set()
    for loop in in_program:
        yield from (s.inside for s in loop.slices if names.get(s.outer) == s.inside.name)
        names.update((c.outer, c.inside.name) for c in loop.collected if c.is_list)
        targets = [v for n in loop.body if isinstance(n, Move | Bucket | Wait) for v in n.makes]
        yield from (v for v in targets if v.name in gathered)
        gathered.update(v.name for v in targets)


class _LastReads:
    """The last read of each variable: twice the number of a node, one more at its loop's end."""

    def __init__(self, program: DeviceProgram) -> None:
        self.order: dict[Node, int] = {n: 2 * i for i, n in enumerate(every(program.body))}
        self.until: dict[Var, float] = {}
        self.home: dict[Var, tuple[DeviceLoop, ...]] = {}
        self._block(program.body, ())
        last = [v for _, v in (*program.outputs, *program.updates)]
        self.until.update(dict.fromkeys(last, math.inf))

    def _block(self, nodes: tuple[Node, ...], loops: tuple[DeviceLoop, ...]) -> None:
        for node in nodes:
            self.home.update(dict.fromkeys(node.makes, loops))
            for var in node.reads:
                self._read(var, loops, self.order[node])
            if isinstance(node, DeviceLoop):
                self._loop(node, (*loops, node))

    def _loop(self, node: DeviceLoop, loops: tuple[DeviceLoop, ...]) -> None:
        slices = node.slices
        self.home.update(dict.fromkeys((*node.enters, *(s.inside for s in slices)), loops))
        self._block(node.body, loops)
        for var in (*node.ends, *(s.outer for s in slices)):
            self._read(var, loops, self._end(node))

    def _read(self, var: Var, loops: tuple[DeviceLoop, ...], at: int) -> None:
        """Record a read; a variable from outside of a loop is read again in its next iteration."""
        inner = loops[len(self.home.get(var, ())) :]
        position = self._end(inner[0]) if inner else at
        self.until[var] = max(self.until.get(var, 0), position)

    def _end(self, loop: DeviceLoop) -> int:
        return max(self.order[node] for node in every((loop,))) + 1


def _shared(program: DeviceProgram) -> dict[Var, str]:
    """The name of every variable of a program."""
    names = {v: v.name for v in (*program.inputs, *program.params, *program.states)}
    for node in every(program.body):
        names.update((v, v.name) for v in (*node.makes, *node.enters))
    return names
