"""Random programs, as text, with random meshes and layouts that may or may not fit them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hypothesis import strategies as st

from tests.programs.expressions import FUNCTIONS, Draw, Expressions, Tensor
from tests.programs.harness import Case

MESHES = (
    "x:2", "x:4", "x:8", "x:1", "x:2,y:2", "x:2,y:4", "x:4,y:2", "y:2,x:1", "x:2,y:2,z:2",
    "z:2,y:1,x:4",
)  # fmt: skip
NAMES = "abcdef"


@dataclass(slots=True)
class Writer(Expressions):
    """Writes one program. `tensors` are those that can be used at its position.

    `sliced` are names that a loop around slices, `stacks` those that a loop left,
    `looped` the dims of all loops.
    """

    header: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    sliced: set[str] = field(default_factory=set)
    stacks: set[str] = field(default_factory=set)
    looped: set[str] = field(default_factory=set)
    count: int = 0

    # --- the program ---------------------------------------------------------------------------

    def program(self) -> str:
        for name in NAMES[: self.upto(6, 2)]:
            self.sizes[name] = self.pick((2, 4, 8, 2, 4, 8, 4, 2, 1, 6, 3, 5, 7))
        self.linear = self.once_in(3)  # partial sums come far then
        self._inputs()
        for _ in range(self.upto(12, 3)):
            self.statement()
        return self._text(self._returned())

    def _inputs(self) -> None:
        for index in range(self.upto(3, 1)):
            dims = self.fitting(self.some(self.dims, 1, 3))
            name = f"x{index}"
            self.seen(dims)
            self.header.append(f"{name}[{self.pinned(dims)}]")
            self.tensors.append(Tensor(name, dims))
        if self.once_in(2):
            dims = self.fitting(self.some(self.dims, 0, 2))
            self.header.append(f"ids[{self.pinned(dims)}]: i32" if dims else "ids: i32")
            self.tensors.append(Tensor("ids", dims, "i", 10, 0, 10))

    def _returned(self) -> str:
        made = [t.text for t in self.tensors if not t.text.startswith(("x", "ids", "w"))]
        every = [t.text for t in self.tensors]
        found = [*self.some(made[-6:] or every, 2, 5), *self.some(every, 0, 1)]
        if self.once_in(4):
            found.append(self.expression().text)
        return ", ".join(dict.fromkeys(found))

    def _text(self, returned: str) -> str:
        dims = "\n".join(f"dim {d} = {n}" for d, n in self.sizes.items())
        head = f"program p({', '.join(self.header)}) {{"
        body = "\n".join(f"  {line}" for line in (*self.lines, f"return {returned}"))
        return "\n\n".join([dims, *self.functions.values(), f"{head}\n{body}\n}}\n"])

    def selectors(self) -> list[str]:
        """The selectors that rules of a layout may have."""
        return ["params", *self.functions, *self.names[-6:]]

    # --- statements ----------------------------------------------------------------------------

    def statement(self) -> None:
        kind = self.upto(15)
        if kind == 0 and len(self.loop) < 2:
            self.repeat()
        elif kind <= 2:
            self.param()
        elif kind == 3:
            self.pair()
        else:
            self.assign(self.expression())

    def assign(self, value: Tensor, name: str | None = None) -> Tensor:
        if name is None:
            name = f"t{self.count}"
            self.count += 1
        self.names.append(name)
        target = name
        if value.dims and self.once_in(3):
            order = self.some(value.dims, len(value.dims))
            value = replace(value, dims=order)
            target = f"{name}[{self.pinned(order, 3)}]"
        self.lines.append(f"{target} = {value.text}")
        made = replace(value, text=name)
        self.tensors = [t for t in self.tensors if t.text != name] + [made]
        return made

    def param(self) -> None:
        dims = self.fitting(self.some(self.dims, 0, 3))
        name = f"w{self.count}"
        self.count += 1
        self.names.append(name)
        self.seen(dims)
        self.lines.append(f"param {name}[{self.pinned(dims)}]" if dims else f"param {name}[]")
        self.tensors.append(Tensor(name, dims))

    def pair(self) -> None:
        x = self.leaf("f", dims=1)
        if x is None:
            return
        self.functions["pair"] = FUNCTIONS["pair"]
        dim = self.pick(x.dims)
        rest = tuple(d for d in x.dims if d != dim)
        names = f"t{self.count}", f"t{self.count + 1}"
        self.count += 2
        self.lines.append(f"{names[0]}, {names[1]} = pair[{dim}]({x.text})")
        many = 2 * x.bound * self.sizes[dim]
        self.tensors.append(Tensor(names[0], rest, bound=many, size=2 * x.size * self.sizes[dim]))
        self.tensors.append(Tensor(names[1], rest, bound=x.bound, size=x.size))

    def repeat(self) -> None:
        """A loop with one or two carried tensors, which stay small."""
        dim = self.dim_of(self.pick((2, 2, 3, 4)), self.loop)
        floats = [t for t in self.tensors if t.kind == "f" and t.text.isidentifier()]
        free = [
            t
            for t in floats
            if dim not in t.dims and t.size <= 64 and t.text not in {*self.sliced, *self.stacks}
        ]
        carried = self.some(free, 1, 2)
        if not carried:
            return
        outer, outer_lines = self.tensors, self.lines
        inside = [replace(t, dims=tuple(d for d in t.dims if d != dim)) for t in outer]
        names = {t.text: t for t in carried}
        self.tensors = [self._entering(t) if t.text in names else t for t in inside]
        self.lines, self.loop = [], (*self.loop, dim)
        self.looped.add(dim)
        outer_sliced = self.sliced
        self.sliced = {t.text for t in outer if dim in t.dims} | outer_sliced
        for _ in range(self.upto(2)):
            self.statement()
        for name, entered in names.items():
            self.assign(self._next(entered), name)
        body, self.lines = self.lines, outer_lines
        known = {t.text for t in outer}
        made = [t for t in self.tensors if t.text not in known and dim not in t.dims]
        stacks = [replace(t, dims=(dim, *t.dims)) for t in self.some(made, 0, 2)]
        self.loop, self.tensors, self.sliced = self.loop[:-1], outer, outer_sliced
        self.stacks.update(t.text for t in stacks)
        self.lines.append("\n".join([f"repeat {dim} {{", *(f"    {b}" for b in body), "  }"]))
        results = [self._entering(t) for t in carried]
        self.tensors = [t for t in outer if t.text not in names] + results + stacks

    def _entering(self, value: Tensor) -> Tensor:
        return replace(value, bound=math.inf, size=max(1e3 if self.linear else 4.0, value.size))

    def _next(self, entered: Tensor) -> Tensor:
        """The next carried value: of the type of `entered`, between -4 and 4."""
        added = self.fitted(self.expression(), entered.dims)
        old = next((t for t in self.tensors if t.text == entered.text), entered)
        if set(old.dims) != set(entered.dims) or old.kind != "f":
            old = replace(entered, text="0.5")
        missing = [d for d in entered.dims if d not in (*added.dims, *old.dims)]
        ones = f" + ones[{', '.join(missing)}]()" if missing else ""
        text = f"{old.atom} + {added.atom}{ones}"
        if not self.linear:
            text = f"minimum(maximum({text}, -4.0), 4.0)"
        dims = self._order(entered.dims, (*old.dims, *added.dims))
        return Tensor(text, dims, "f", math.inf, None, 1e3 if self.linear else 4.0)

    def _order(self, dims: Sequence[str], seen: Sequence[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*(d for d in seen if d in dims), *dims]))

    def fitted(self, value: Tensor, dims: Sequence[str]) -> Tensor:
        """A float tensor whose dims are some of `dims`, made of `value`."""
        if value.kind != "f":
            value = self.as_float(value)
        extra = [d for d in value.dims if d not in dims]
        if not extra:
            return value
        rest = tuple(d for d in value.dims if d in dims)
        text = f"mean[{', '.join(extra)}]({value.text})"
        return Tensor(text, rest, "f", math.inf, None, value.size)


# --- layouts ----------------------------------------------------------------------------------


def layout(writer: Writer) -> str:
    """Rules in braces: general ones, that divide in most cases, and a few narrower ones."""
    rules: dict[tuple[str, str], str] = {}
    uneven = writer.once_in(3)
    for axis, size in writer.mesh.items():
        chosen: list[str] = []
        fitting = [d for d, n in writer.sizes.items() if uneven or n % size == 0]
        for dim in writer.some(fitting, 1, 5):
            apart = not any(frozenset((dim, d)) in writer.together for d in chosen)
            if apart and dim not in writer.looped and ("", dim) not in rules:
                chosen.append(dim)
                rules["", dim] = axis
    if len(writer.mesh) > 1 and writer.once_in(3):
        _several_axes(writer, rules)
    for _ in range(writer.upto(2)):
        key = writer.pick(writer.selectors()), writer.pick(list(writer.sizes))
        rules[key] = writer.pick([*writer.mesh, "none"])
    lines = [f"{s}: {d} -> {a}" if s else f"{d} -> {a}" for (s, d), a in rules.items()]
    return "{ " + ", ".join(lines) + " }"


def _several_axes(writer: Writer, rules: dict[tuple[str, str], str]) -> None:
    """Split one dim over several axes, which then split no other."""
    axes = writer.some(list(writer.mesh), 2, 3)
    ways = math.prod(writer.mesh[a] for a in axes)
    wide = [d for d, n in writer.sizes.items() if writer.once_in(3) or n % ways == 0]
    if not wide:
        return
    for key in [key for key, axis in rules.items() if axis in axes]:
        del rules[key]
    rules["", writer.pick(wide)] = f"({', '.join(axes)})"


@st.composite
def cases(draw: Draw) -> Case:  # type: ignore[type-arg]
    """A program on a mesh under a layout and a policy."""
    mesh: str = draw(st.sampled_from(MESHES))
    sizes = {a: int(n) for a, _, n in (part.partition(":") for part in mesh.split(","))}
    writer = Writer(draw, sizes)
    text = writer.program()
    policy: str = draw(st.sampled_from(("deferred", "immediate")))
    return Case(text, mesh, layout(writer), policy)
