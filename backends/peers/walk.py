"""What the renderings share: the walk over a program, and placements by position.

A rendering shows what every device holds of every tensor, one statement a line, under the source
line it comes from. Statements are those of the device program, so that each collective is one line.
Nothing of a `.mdsl` file becomes code: identifiers come from `device/names.py`, strings are written
as literals, and everything else stands in comments with control characters escaped.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from meshdsl.backends.torch.head import inert, type_text
from meshdsl.backends.torch.lines import Lines
from meshdsl.device.from_placed import lower
from meshdsl.device.ir import Collected, Compute, Loop, Move, Node, Program, Var
from meshdsl.diagnostics import Span
from meshdsl.ir.printer import attribute
from meshdsl.ir.program import Carry
from meshdsl.ir.types import Dim, DType, TensorType
from meshdsl.ops.einsum_text import letters_for
from meshdsl.ops.opdef import lookup
from meshdsl.placed import ir as placed
from meshdsl.placed.printer import mesh_text
from meshdsl.placed.sbp import Mesh, Partial, Placement, Split


@dataclass(frozen=True, slots=True)
class Entry:
    """What a tensor is along one mesh axis, the dim by its position.

    `position` for a split, `op` for a partial value, neither for a copy. `rank` counts the axes of
    one dim from the outer on, where that is not the order of the mesh.
    """

    position: int | None = None
    op: str | None = None
    rank: int | None = None


def entries(type_: TensorType, mesh: Mesh, p: Placement) -> tuple[Entry, ...]:
    """One entry per mesh axis, in mesh order."""
    return tuple(_entry(type_, p, axis, mesh) for axis in mesh.names)


def _entry(type_: TensorType, p: Placement, axis: str, mesh: Mesh) -> Entry:
    match p.component(axis):
        case Split(dim):
            axes = p.axes_of(dim)
            rank = None if axes == mesh.sorted(axes) else axes.index(axis) + 1
            return Entry(position=type_.index(dim), rank=rank)
        case Partial(op):
            return Entry(op=op)
    return Entry()


class Walk(ABC):
    """Writes one program in one notation; a subclass says what a statement looks like.

    `taken` are names that mean something in the notation. `constants` holds the literals of
    constants, which are written where they are used.
    """

    taken: frozenset[str] = frozenset()
    system = ""

    def __init__(self, source: placed.Program) -> None:
        self.source = source
        self.mesh = source.mesh
        self.program: Program = lower(source, self.taken)
        self.out = Lines(depth=0)
        self.constants: dict[Var, str] = {}
        self.shown = ("", 0, "")

    def text(self) -> str:
        """The whole rendering."""
        self.top()
        for var in self.program.inputs:
            self.entry(var, "inputs")
        for var in self.program.params:
            self.entry(var, "params")
        for var in self.program.states:
            self.entry(var, "states")
        self.nodes(self.program.body)
        self.out.add()
        self.bottom()
        return "\n".join(line for line, _ in self.out.lines) + "\n"

    # --- what a notation says --------------------------------------------------------------------

    @abstractmethod
    def top(self) -> None:
        """What stands before the first tensor."""

    @abstractmethod
    def entry(self, var: Var, kind: str) -> None:
        """An input, a parameter or a state of an optimizer."""

    @abstractmethod
    def compute(self, node: Compute) -> None:
        """An operator."""

    @abstractmethod
    def move(self, node: Move) -> None:
        """One step of a reshard."""

    @abstractmethod
    def stacked(self, stack: Var, inside: Var, index: str) -> None:
        """The slice of a stack at the index of a loop."""

    @abstractmethod
    def begun(self, made: Collected) -> None:
        """Before a loop, the tensor that it fills with one slice in every trip."""

    def bottom(self) -> None:
        """What is returned, and what a training step stores."""
        for old, new in self.program.updates:
            self.out.add(f"# in the next step {old.name} = {self.ref(new)}")
        self.out.statement(f"return {', '.join(self.ref(v) for _, v in self.program.outputs)}")

    def filled(self, made: Collected, index: str) -> None:
        """At the end of a trip, its slice of what the loop collects."""
        self.out.statement(f"{made.outer.name}[{index}] = {self.ref(made.inside)}")

    def carried(self, target: Var, source: Var) -> None:
        """A carried value before its loop."""
        self.out.statement(f"{target.name} = {self.ref(source)}")

    # --- the walk --------------------------------------------------------------------------------

    def ref(self, var: Var) -> str:
        """The text of a value: its name, or the literal of a constant."""
        return self.constants.get(var, var.name)

    def nodes(self, nodes: tuple[Node, ...]) -> None:
        """The statements of a block."""
        for node in nodes:
            match node:
                case Compute() if node.name == "constant":
                    self.constants[node.outs[0]] = literal(node.attr("value"))
                    continue
                case Compute():
                    self.source_line(node.span, node.phase)
                    self.compute(node)
                case Move():
                    self.source_line(node.span, node.phase)
                    self.move(node)
                case Loop():
                    self.source_line(node.span, node.phase)
                    self.loop(node)

    def loop(self, node: Loop) -> None:
        """A `repeat` as a Python `for`."""
        for carry in node.carries:
            if carry.inside.name != carry.init.name:
                self.carried(carry.inside, carry.init)
        self.trips(node)

    def trips(self, node: Loop) -> None:
        """The `for` with its body, and before it what it collects."""
        for made in node.collected:
            self.begun(made)
        trips = f"range({node.dim.size})"
        self.out.add(f"for {node.index} in {f'reversed({trips})' if node.reverse else trips}:")
        self.out.depth += 1
        for item in node.stacked:
            self.stacked(item.outer, item.inside, node.index)
        self.nodes(node.body)
        for made in node.collected:
            self.filled(made, node.index)
        self._carry(node)
        self.out.depth -= 1
        self.shown = ("", 0, "")

    def _carry(self, node: Loop) -> None:
        """What the next trip begins with; all at once, since one may be another's old value."""
        pairs = [(c.inside.name, self.next_text(c)) for c in node.carries]
        pairs = [(a, b) for a, b in pairs if a != b]
        if pairs:
            names, values = zip(*pairs, strict=True)
            self.out.statement(f"{', '.join(names)} = {', '.join(values)}")
        elif not node.body and not node.stacked and not node.collected:
            self.out.add("pass")

    def next_text(self, carry: Carry[Var]) -> str:
        """What the next trip begins with."""
        return self.ref(carry.next)

    def program_names(self) -> frozenset[str]:
        """Every identifier that lowering has given out."""
        return frozenset(v.name for v in self.variables()) | _indices(self.program.body)

    def variables(self) -> list[Var]:
        """Inputs, parameters, states, and what statements make, in order."""
        given = (*self.program.inputs, *self.program.params, *self.program.states)
        return [*given, *_made(self.program.body)]

    def source_line(self, span: Span, phase: str = "forward") -> None:
        """The source line that the next statements come from, as a comment; and their phase."""
        place = (span.file, span.line, phase)
        if place == self.shown:
            return
        self.shown = place
        if not self.out.lines[-1][0].endswith(":"):
            self.out.add()
        text = f"{span.file}:{span.line}  {span.source.excerpt(span.line).strip()}"
        self.out.add(f"# {inert(text)}" + (f"  [{phase}]" if phase != "forward" else ""))

    # --- pieces ----------------------------------------------------------------------------------

    def about(self) -> None:
        """The comment that every rendering begins with."""
        named = self.source.named
        self.out.comment(f"{named.span.file}, program {named.name}: {self.system}.")
        mesh, layout = mesh_text(self.mesh), self.source.layout
        self.out.comment(
            f"mesh {mesh}, layout {layout}, partial values reduced: {self.source.policy}"
        )

    def typed(self, var: Var) -> str:
        """The type with the placement, in the language's own notation."""
        return type_text(var.value.type, var.placement)

    def sent(self, node: Move) -> str:
        """`all_reduce over cols, 65,536 B sent`."""
        what = f"{node.step.kind} over {', '.join(node.step.axes)}"
        return f"{what}, {node.wire:,} B sent" if node.step.moves else what


def picked(text: str, stack: Var, inside: Var, index: str) -> str:
    """`w[:, layers]`: the slice of a stack, written `text`, at the index of its loop."""
    (dim,) = (d for d in stack.value.type.names if not inside.value.type.has(d))
    return f"{text}[{':, ' * stack.value.type.index(dim)}{index}]"


def _made(nodes: tuple[Node, ...]) -> Iterator[Var]:
    for node in nodes:
        match node:
            case Compute():
                yield from node.outs
            case Move():
                yield node.target
            case Loop():
                yield from (s.inside for s in node.stacked)
                yield from (c.inside for c in node.carries)
                yield from _made(node.body)
                yield from (c.outer for c in node.collected)


def _indices(nodes: tuple[Node, ...]) -> frozenset[str]:
    loops = [node for node in nodes if isinstance(node, Loop)]
    return frozenset(n.index for n in loops).union(*(_indices(n.body) for n in loops))


def literal(value: object) -> str:
    """A number as Python source; infinities have no literal."""
    text = repr(value)
    return f'float("{text}")' if text.lstrip("-") in ("inf", "nan") else text


# --- operators as text -------------------------------------------------------------------------


def results(node: Compute, text: str) -> Iterator[tuple[Var, str]]:
    """The results of an operator written `text`, each with how it is called there."""
    if len(node.outs) == 1:
        yield node.outs[0], text
        return
    yield from ((var, f"{text}[{i}]") for i, var in enumerate(node.outs))


def call_text(node: Compute, args: list[str], dims: Mapping[str, str] | None = None) -> str:
    """An operator as a person would write it: `a + b`, `einsum("bi,ih->bh", x, w)`, `relu(t)`.

    `dims` renames dims, where the notation has names of its own for them.
    """
    sign = lookup(node.name).infix
    if sign is not None:
        return f" {sign} ".join(args)
    if node.name == "einsum":
        return f"einsum({', '.join([subscripts(node), *args])})"
    attrs = [f"{name}={_attribute(value, dims or {})}" for name, value in node.attrs]
    return f"{node.name}({', '.join([*args, *attrs])})"


def subscripts(node: Compute) -> str:
    """The letters of an einsum, `"bi,ih->bh"`, quotes included."""
    names = [v.value.type.names for v in node.ins]
    target = node.outs[0].value.type.names
    letters = letters_for(tuple(dict.fromkeys(n for ns in names for n in ns)))
    ins = ",".join("".join(letters[n] for n in ns) for ns in names)
    return f'"{ins}->{"".join(letters[n] for n in target)}"'


def _attribute(value: object, dims: Mapping[str, str]) -> str:
    """Dims and dtypes by name; strings as literals, others as the printers write them."""
    if isinstance(value, str):
        return repr(value)
    if isinstance(value, Dim):
        return dims.get(value.name, value.name)
    if isinstance(value, DType):
        return value.name
    if isinstance(value, tuple):
        return f"({', '.join(_attribute(v, dims) for v in value)})"
    return attribute(value)
