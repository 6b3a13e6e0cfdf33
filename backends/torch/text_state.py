"""`TextState`: the text that is being written, and what is known of its variables so far."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from meshdsl.backends.torch.identifiers import Variables
from meshdsl.backends.torch.preamble import type_text
from meshdsl.backends.torch.text_lines import TextLines
from meshdsl.device.ir import Compute, DeviceProgram, Node, Var
from meshdsl.device.liveness import last_readers, read_before, uses
from meshdsl.device.memory import MemoryReuse
from meshdsl.ir.program import every
from meshdsl.ops.opdef import ADDED, lookup
from meshdsl.ops.torch_expressions import scalar
from meshdsl.placed.placements import Mesh


class LastAssignment(NamedTuple):
    """The last assignment: the first and last of its lines, the variable, the text.

    Where that is a tensor on one device and zeros on the others, `alone` has the text of the tensor
    and that of the condition.
    """

    start: int
    end: int
    var: Var
    text: str
    alone: tuple[str, str] | None = None


class PrefetchedSlice(NamedTuple):
    """A slice that is not written by name: its stack, and the text that picks it."""

    stack: Var
    at: str


class TextState:
    """What the writers of statements share.

    out, constants: the lines, and the literals that are written where a constant is used.
    over:       the results that are written over a dead operand, with that, as memory is counted.
    variables:  the identifiers.
    used:       the support functions that are called.
    imports:    the modules of packages whose functions are called.
    uses:       how often each variable is read.
    last_readers, read_before: what an operator may write over, though others have read it.
    fresh:      variables whose memory no other one shares.
    views:      variables that may be views of another, perhaps with elements that share a location.
    prefetched: slices that are not written by name.
    places:     by variable that is written directly to a slice of a stack, the stack and index.
    totals:     the identifiers of the sums that passes add to: they belong to the function around.
    last:       the last assignment, where a renaming may still take it back.
    renamed:    variables whose assignment was taken back so.
    dying:      the variables that are dead after the statement that is written.
    helpers:    the helper variables of the last statement, if they may be large.
    device_alone: the device along the axis of the stages that alone does what is written, if one
                does.
    """

    def __init__(
        self,
        program: DeviceProgram,
        out: TextLines,
        constants: dict[Var, str],
        taken: frozenset[str],
    ) -> None:
        self.program, self.mesh = program, program.mesh
        self.out, self.constants = out, constants
        self.over = dict(MemoryReuse(program).found())
        if ADDED:  # no variable hides a module that the text imports
            computed = (node for node in every(program.body) if isinstance(node, Compute))
            modules = {name for node in computed for name in lookup(node.name).imports}
            taken = taken.union(name.partition(".")[0] for name in modules)
        self.uses = uses(program)
        self.last_readers = last_readers(program, self.uses) if program.updates else {}
        readers, in_turn = self.last_readers, self.over
        self.read_before = read_before(program, readers) if readers else frozenset()
        if readers:
            in_turn = {new: old for new, old in in_turn.items() if old not in self.read_before}
        self.variables = Variables(program, taken, in_turn)
        self.used: set[str] = set()
        self.imports: set[str] = set()
        self.fresh: set[Var] = set()
        self.views: set[Var] = set()
        self.prefetched: dict[Var, PrefetchedSlice] = {}
        self.places: dict[Var, PrefetchedSlice] = {}
        self.totals: frozenset[str] = frozenset()
        self.last: LastAssignment | None = None
        self.renamed: set[Var] = set()
        self.dying: tuple[Var, ...] = ()
        self.helpers: list[str] = []
        self.device_alone: int | None = None

    def identifier(self, var: Var) -> str:
        """The identifier of a variable, to be compared; `name` is for what is written."""
        return self.variables.of(var)

    def name(self, var: Var) -> str:
        """The identifier of a variable, or the text of a prefetched slice."""
        stack, at = self.prefetched.get(var, PrefetchedSlice(var, ""))
        return self.out.mention(self.variables.of(stack)) + at

    def ref(self, var: Var) -> str:
        """The text of a value: its identifier, or the literal of a constant."""
        return self.constants[var] if var in self.constants else self.name(var)

    def tensor(self, var: Var) -> str:
        """The text of a variable; of a constant that of a tensor."""
        if var not in self.constants:
            return self.name(var)
        return scalar(self.constants[var], var.local.dtype)

    def call(self, function: str) -> str:
        """Request a support function; returns the name to call it by."""
        self.used.add(function)
        return function

    def let(self, var: Var, text: str) -> None:
        """Write `x = text`, with the type of `x` as its note."""
        self.out.assign((self.variables.assign(var),), text, typed(var, self.mesh))

    def notes(self, names: list[str], variables: Iterable[Var]) -> None:
        """Write the types of several variables, which one statement assigns, as comments."""
        alike: dict[str, list[str]] = {}
        for name, var in zip(names, variables, strict=True):
            alike.setdefault(typed(var, self.mesh), []).append(name)
        for type_, those in alike.items() if len(names) > 1 else ():
            self.out.comment(f"{', '.join(those)}: {type_}")

    def added_at_once(self, node: Compute, over: int = 0) -> LastAssignment | None:
        """The last assignment, where its variable is added to operand `over`, and is dead then."""
        last = self.last
        if last is None or last.end != len(self.out.lines) or node.name != "add" or node.onto:
            return None
        is_dead = last.var in self.dying or (last.alone is not None and self.uses[last.var] == 1)
        return last if last.var is node.ins[1 - over] and is_dead else None

    def may_overwrite(self, var: Var, node: Node | None = None) -> bool:
        """Whether a variable has memory of its own and is read once, or by `node` last."""
        is_last = node is not None and self.last_readers.get(var) is node
        return var in self.fresh and (is_last or self.uses[var] == 1)


def typed(var: Var, mesh: Mesh | None = None) -> str:
    """The note of a statement: the type with its local shape."""
    return type_text(var.value.type, var.placement, mesh)


def literal(value: object) -> str:
    """A number as Python source, `-1e9` where that is much shorter than its digits."""
    text = repr(value)
    if text.lstrip("-") in ("inf", "nan"):
        return f'float("{text}")'
    if not isinstance(value, float):
        return text
    mantissa, _, exponent = f"{value:.16e}".partition("e")
    short = f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    shorter = "e" in text or len(short) + 5 < len(text)
    return short if shorter and float(short) == value and len(short) <= len(text) else text
