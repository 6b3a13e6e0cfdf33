"""An operator on whole tensors whose text in another system is being written.

A text is a template over the operands of a call, or a function of the call where no template
suffices. In a template `{0}` is operand 0 aligned to the dims of the result (a literal as it is), a
word is one of `WORDS` or an attribute of the operator: `jax.lax.cumsum({x}, {at}, reverse=True)`.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any

from meshdsl.ir.types import DType, TensorType
from meshdsl.ops.einsum_text import letters_for
from meshdsl.ops.opdef import Attrs
from meshdsl.ops.torch_expressions import Names, aligned, one_or_tuple, tuple_text
from meshdsl.placed.placements import Placement
from meshdsl.records import dataclass

Text = str | Callable[["PeerCall"], str | None]
"""A template, or a function of the call; a text that is None or "" refuses the call."""


@dataclass(frozen=True, slots=True)
class Library:
    """An array library as texts refer to it.

    `name` is that of the module, `permute` the method that permutes dims; `dim`, `keep` and `place`
    are the keywords of positions, of reductions that keep them, and of placements.
    """

    name: str
    permute: str = "permute"
    dim: str = "dim="
    keep: str = "keepdim=True"
    place: str = ""

    def dtype(self, dtype: DType) -> str:
        """`jnp.float32`, `jnp.bool_`; other libraries name dtypes as torch does."""
        text = dtype.torch.replace("torch", self.name)
        return f"{text}_" if text == "jnp.bool" else text


@dataclass(frozen=True, slots=True)
class PeerCall:
    """An operator on whole tensors whose text is being written.

    args:     a variable per operand, or a Python literal.
    literals: by operand that is a literal, its text as a tensor.
    spec:     the text of the result's placement.
    needs, yields: the placements of the operands and of the result there.
    """

    library: Library
    args: tuple[str, ...]
    literals: Mapping[int, str]
    ins: tuple[TensorType, ...]
    out: TensorType
    attrs: Attrs
    spec: str
    needs: tuple[Placement, ...] = ()
    yields: Placement = field(default_factory=Placement)

    @property
    def at(self) -> int:
        """Position of the dim that the call is about, in its first operand."""
        return self.ins[0].index(self.attrs["dim"].name)

    @property
    def positions(self) -> tuple[int, ...]:
        """Positions of the dims that the call is about, ascending."""
        return tuple(sorted(self.ins[0].index(d.name) for d in self.attrs["dims"]))

    @property
    def count(self) -> int:
        """The number of elements of the dims that the call is about."""
        dims = self.attrs["dims"] if "dims" in self.attrs else (self.attrs["dim"],)
        return math.prod(d.size for d in dims)

    @property
    def dtype(self) -> str:
        """The dtype of the result."""
        return self.library.dtype(self.out.dtype)

    @property
    def where(self) -> str:
        """The placement of the result with its keyword: `out_sharding=P("rows")`."""
        return self.library.place + self.spec

    def tensor(self, index: int) -> str:
        """Operand `index`, aligned; a literal as a tensor."""
        return self.literals.get(index) or self.aligned(index)

    def aligned(self, index: int, dims: Names | None = None, full: bool = False) -> str:
        """Operand `index` so that it broadcasts against `dims`, by default those of the result.

        A literal stays as it is; with `full` others get all of `dims`, of size 1 where missing.
        """
        if index in self.literals:
            return self.args[index]
        target = self.out.names if dims is None else dims
        names = tuple(n for n in target if self.ins[index].has(n))
        return aligned(self.ordered(index, target), names, target, full=full)

    def ordered(self, index: int, dims: Names) -> str:
        """Operand `index` with its dims in the order of `dims`."""
        names = self.ins[index].names
        return self.permuted(self.args[index], names, tuple(n for n in dims if n in names))

    def permuted(self, text: str, old: Names, new: Names) -> str:
        """`text` with its dims permuted from order `old` to `new`."""
        if old == new:
            return text
        return f"{text}.{self.library.permute}({', '.join(str(old.index(n)) for n in new)})"

    def write(self, text: Text | None) -> str | None:
        """The text of the call by a cell of the table."""
        if callable(text):
            return text(self)
        return text and _FILLER.vformat(text, [self], {})


def subscripts(ins: Sequence[TensorType], out: TensorType) -> str:
    """The letters of an einsum, `"bi,ih->bh"`, quotes included."""
    letters = letters_for(tuple(dict.fromkeys(n for t in ins for n in t.names)))
    left = ",".join("".join(letters[n] for n in t.names) for t in ins)
    return f'"{left}->{"".join(letters[n] for n in out.names)}"'


def _flat(call: PeerCall) -> str:
    """Operand 0 with the dims that disappear as one, in the order of the call."""
    reduced = [d.name for d in call.attrs["dims"]]
    if len(reduced) == 1:
        return call.args[0]
    text = call.ordered(0, (*(n for n in call.ins[0].names if n not in reduced), *reduced))
    return f"{text}.reshape({tuple_text([*call.out.shape, call.count])})"


def _flat_dim(call: PeerCall) -> str:
    """The position of that dim."""
    several = len(call.attrs["dims"]) != 1
    at = len(call.out.dims) if several else call.positions[0]
    return f"{call.library.dim}{at}"


def _merged(call: PeerCall) -> str:
    names, old = [d.name for d in call.attrs["dims"]], call.ins[0].names
    first = next(i for i, n in enumerate(old) if n in names)
    others = [n for n in old if n not in names]
    return call.ordered(0, (*others[:first], *names, *others[first:]))


WORDS: Mapping[str, Callable[[PeerCall], object]] = {
    "lib": lambda call: call.library.name,
    "x": lambda call: call.args[0],  # operand 0 as it is
    "y": lambda call: call.args[1],
    "rest": lambda call: "".join(f", {call.aligned(i)}" for i in range(1, len(call.args))),
    "eps": lambda call: f", eps={call.attrs['eps']!r}" if "eps" in call.attrs else "",
    "tensor": lambda call: call.tensor(0),
    "tensors": lambda call: ", ".join(call.tensor(i) for i in range(len(call.args))),
    # The operands as they are, but for literals.
    "operands": lambda call: ", ".join(call.literals.get(i, a) for i, a in enumerate(call.args)),
    "flat": _flat,
    "flat_dim": _flat_dim,
    "merged": _merged,  # operand 0 with the dims of a `merge` side by side
    "at": lambda call: call.at,
    "skip": lambda call: ":, " * call.at,
    "first": lambda call: call.attrs["start"] or "",
    "positions": lambda call: call.positions,
    "dim": lambda call: f"{call.library.dim}{call.at}",  # `axis=1`
    "dims": lambda call: f"{call.library.dim}{call.positions}",  # `axis=(0, 1)`
    "over": lambda call: one_or_tuple(call.positions),
    "kept": lambda call: f"{call.library.dim}{call.at}, {call.library.keep}",
    "count": lambda call: call.count,
    "shape": lambda call: call.out.shape,
    "dtype": lambda call: call.dtype,
    "spec": lambda call: call.spec,
    "where": lambda call: call.where,
    "letters": lambda call: subscripts(call.ins, call.out),
    "tanh": lambda call: call.attrs["approximate"] == "tanh",
}
"""The text of each word of a template; another word is an attribute of the operator."""


class _Filler(string.Formatter):
    """Fills a template with the words of a call."""

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        call: PeerCall = args[0]
        if isinstance(key, int):
            return call.aligned(key)
        return WORDS[key](call) if key in WORDS else call.attrs[key]


_FILLER = _Filler()
