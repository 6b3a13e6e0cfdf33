"""The base of all renderings: a line per tensor under its source line, placements by position.

Statements are those of the device program, so that each collective is one line.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping

from meshdsl.backends.peers.peer_call import subscripts
from meshdsl.backends.torch.identifiers import Identifiers
from meshdsl.backends.torch.preamble import type_text
from meshdsl.backends.walk import NotationWriter
from meshdsl.device.from_placed import lower
from meshdsl.device.ir import Compute, Move, Var
from meshdsl.ir.printer import attribute
from meshdsl.ir.program import every
from meshdsl.ir.types import Dim, TensorType
from meshdsl.ops.opdef import lookup
from meshdsl.placed import ir as placed
from meshdsl.placed.placements import Mesh, Partial, Placement, Split
from meshdsl.placed.printer import mesh_text
from meshdsl.records import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """The placement of a tensor along one mesh axis, the dim by its position.

    `position` for a split, `op` for a partial value, neither for a replica. `rank` counts the axes
    of one dim from the outer on, where that is not the order of the mesh.
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


class Notation(NotationWriter):
    """Writes a placed program; a subclass has the text of each statement.

    `taken` are names with a meaning in the notation, `system` is whose it is, for readers,
    and `uneven` what that makes of a dim that does not divide.
    """

    taken: frozenset[str] = frozenset()
    system = ""
    uneven = ""
    phases = True

    def __init__(self, source: placed.PlacedProgram) -> None:
        self.names = Identifiers(self.taken)
        super().__init__(lower(source, self.names))
        self.source = source

    def text(self) -> str:
        """The whole rendering."""
        self.about()
        self.top()
        self.entries()
        self.nodes(self.program.body)
        self.out.add()
        self.bottom()
        return "\n".join(line.text for line in self.out.lines) + "\n"

    @abstractmethod
    def top(self) -> None:
        """The lines between the first comment and the first tensor."""

    def bottom(self) -> None:
        """The outputs, and the new values that a training step stores."""
        for old, new in self.program.updates:
            self.out.add(f"# in the next step {old.name} = {self.ref(new)}")
        self.out.statement(f"return {', '.join(self.ref(v) for _, v in self.program.outputs)}")

    def about(self) -> None:
        """The comment that every rendering begins with."""
        named = self.source.named
        self.out.comment(f"{named.span.file}, program {named.name}: {self.system}.")
        mesh, layout = mesh_text(self.mesh), self.source.layout
        self.out.comment(
            f"mesh {mesh}, layout {layout}, partial values reduced: {self.source.policy}"
        )
        dims = self._uneven_dims()
        if dims and self.uneven:
            self.out.comment(
                f"of {', '.join(dims)} devices have blocks of several sizes here: ceil"
            )
            self.out.comment(f"of the quotient, the last ones short; {self.uneven}")

    def _uneven_dims(self) -> list[str]:
        """The dims whose blocks differ in size."""
        uneven_dims: dict[str, None] = {}
        for tensor in self.source.tensors:
            type_, p = tensor.value.type, tensor.placement
            dims = (d.name for d in type_.dims if p.is_uneven(d.name, d.size, self.mesh))
            uneven_dims.update(dict.fromkeys(dims))
        return list(uneven_dims)

    def variables(self) -> list[Var]:
        """Inputs, parameters, states, and variables of statements and iterations, in order."""
        variables = [*self.program.inputs, *self.program.params, *self.program.states]
        for node in every(self.program.body):
            variables += [*node.enters, *node.makes]
        return variables


def typed(var: Var) -> str:
    """The type with the placement, in the language's own notation."""
    return type_text(var.type, var.placement)


def sent(node: Move) -> str:
    """`all_reduce over cols, 65,536 B sent`."""
    text = f"{node.step.kind} over {', '.join(node.step.axes)}"
    return f"{text}, {node.wire:,} B sent" if node.step.moves else text


def stack_dim(stack: Var, inside: Var) -> str:
    """The dim of a stack that its slices lack."""
    (dim,) = (d for d in stack.type.names if not inside.type.has(d))
    return dim


def picked(text: str, stack: Var, inside: Var, index: str) -> str:
    """`w[:, layers]`: the slice of a stack, written `text`, at the index of its loop."""
    return f"{text}[{':, ' * stack.type.index(stack_dim(stack, inside))}{index}]"


# --- operators as text -------------------------------------------------------------------------


def results(node: Compute, text: str) -> Iterator[tuple[Var, str]]:
    """The results of an operator written `text`, each with the text that refers to it."""
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
        letters = subscripts([v.type for v in node.ins], node.outs[0].type)
        return f"einsum({', '.join([letters, *args])})"
    attrs = [f"{name}={_attribute(value, dims or {})}" for name, value in node.attrs]
    return f"{node.name}({', '.join([*args, *attrs])})"


def _attribute(value: object, dims: Mapping[str, str]) -> str:
    """Dims and dtypes by name; strings as literals, others as the printers write them."""
    if isinstance(value, str):
        return repr(value)
    if isinstance(value, Dim):
        return dims.get(value.name, value.name)
    if isinstance(value, tuple):
        return f"({', '.join(_attribute(v, dims) for v in value)})"
    return attribute(value)
