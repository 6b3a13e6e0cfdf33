"""Random well-typed programs, as text, with random meshes and layouts that may or may not fit them.

What jumps (a comparison, `argmax`, `floor`) is only applied to tensors that are exact: elsewhere a
rounding error could become any error at all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from hypothesis import strategies as st

from tests.programs.harness import LARGEST, Case

X = TypeVar("X")
Draw = Callable[[st.SearchStrategy[X]], X]

MESHES = (
    "x:2", "x:4", "x:8", "x:1", "x:2,y:2", "x:2,y:4", "x:4,y:2", "y:2,x:1", "x:2,y:2,z:2", "z:2,y:1,x:4",
)  # fmt: skip
MOST_ELEMENTS = 2048
NAMES = "abcdef"
FUNCTIONS = {
    "lin": """def lin[d, o](x[..., d]) -> [..., o] {
  param w[d, o]
  return sum[d](x * w)
}""",
    "norm": """def norm[d](x[..., d], g[d] = 1.0) -> [..., d] {
  z = x - mean[d](x)
  return z * rsqrt(mean[d](square(z)) + 1e-1) * g
}""",
    "gate": """def gate(x[...], y[...]) -> [...] {
  h = tanh(x)
  return h * y + x
}""",
    "pair": """def pair[d](x[..., d]) {
  top = max[d](x)
  return sum[d](x - top), top
}""",
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """An expression and what is known of it.

    `kind` is `f`, `i` or `b`. `bound` is the most that a sum of absolute values on the way to it can
    be, infinite where something rounds. `below`: it holds indices below this; 0 for an input, which
    gets values below whatever it indexes.
    """

    text: str
    dims: tuple[str, ...]
    kind: str = "f"
    bound: float = 2.0
    below: int | None = None
    size: float = 2.0

    @property
    def exact(self) -> bool:
        return self.bound < LARGEST

    @property
    def atom(self) -> str:
        return self.text if self.text.isidentifier() else f"({self.text})"


@dataclass(slots=True)
class Writer:
    """Writes one program. `tensors` are those that can be used where it stands."""

    draw: Draw  # type: ignore[type-arg]
    mesh: dict[str, int]
    sizes: dict[str, int] = field(default_factory=dict)
    header: list[str] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    functions: dict[str, str] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    loop: tuple[str, ...] = ()
    sliced: set[str] = field(default_factory=set)
    linear: bool = False
    looped: set[str] = field(default_factory=set)
    together: set[frozenset[str]] = field(default_factory=set)
    count: int = 0

    # --- drawing -------------------------------------------------------------------------------

    def pick(self, options: Sequence[X]) -> X:
        return self.draw(st.sampled_from(options))  # type: ignore[no-any-return]

    def upto(self, most: int, least: int = 0) -> int:
        return self.draw(st.integers(least, most))  # type: ignore[no-any-return]

    def once_in(self, n: int) -> bool:
        return self.upto(n - 1) == n - 1

    def some(self, options: Sequence[X], least: int = 0, most: int = 9) -> tuple[X, ...]:
        """Some of the options in any order."""
        order = self.draw(st.permutations(options))
        count = self.upto(min(most, len(options)), min(least, len(options)))
        return tuple(order[:count])

    # --- dims ----------------------------------------------------------------------------------

    def elements(self, dims: Sequence[str]) -> int:
        return math.prod(self.sizes[d] for d in dims)

    def dim_of(self, size: int, avoid: Sequence[str]) -> str:
        """A dim of this size that is not one of `avoid`."""
        found = [d for d, n in self.sizes.items() if n == size and d not in (*avoid, *self.loop)]
        if found and not self.once_in(3):
            return self.pick(found)
        name = f"g{len(self.sizes)}"
        self.sizes[name] = size
        return name

    @property
    def dims(self) -> list[str]:
        return [d for d in self.sizes if d not in self.loop]

    def pinned(self, dims: Sequence[str], often: int = 8) -> str:
        """Dims in brackets, one in so many times with `@`."""
        parts = list(dims)
        if dims and self.once_in(often):
            at = self.upto(len(dims) - 1)
            fitting = [a for a, n in self.mesh.items() if self.sizes[dims[at]] % n == 0]
            parts[at] = f"{parts[at]}@{self.pick((*fitting, *fitting, 'none'))}"
        return ", ".join(parts)

    def seen(self, dims: Sequence[str]) -> None:
        """Remember which dims stand in one tensor: rules to one axis would conflict there."""
        self.together |= {frozenset(p) for p in itertools.combinations(dims, 2)}

    # --- the program ---------------------------------------------------------------------------

    def program(self) -> str:
        for name in NAMES[: self.upto(6, 2)]:
            self.sizes[name] = self.pick((2, 4, 8, 2, 4, 8, 4, 2, 1, 6, 3))
        self.linear = self.once_in(3)  # partial sums come far then
        self._inputs()
        for _ in range(self.upto(12, 3)):
            self.statement()
        return self._text(self._returned())

    def _inputs(self) -> None:
        for index in range(self.upto(3, 1)):
            dims = self._fitting(self.some(self.dims, 1, 3))
            name = f"x{index}"
            self.seen(dims)
            self.header.append(f"{name}[{self.pinned(dims)}]")
            self.tensors.append(Tensor(name, dims))
        if self.once_in(2):
            dims = self._fitting(self.some(self.dims, 0, 2))
            self.header.append(f"ids[{self.pinned(dims)}]: i32" if dims else "ids: i32")
            self.tensors.append(Tensor("ids", dims, "i", 10, 0, 10))

    def _fitting(self, dims: Sequence[str]) -> tuple[str, ...]:
        dims = tuple(dims)
        while self.elements(dims) > MOST_ELEMENTS:
            dims = dims[:-1]
        return dims

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
        dims = self._fitting(self.some(self.dims, 0, 3))
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
            t for t in floats if dim not in t.dims and t.size <= 64 and t.text not in self.sliced
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
        outer_sliced, self.sliced = self.sliced, {t.text for t in outer if dim in t.dims} | self.sliced
        for _ in range(self.upto(2)):
            self.statement()
        for name, entered in names.items():
            self.assign(self._next(entered), name)
        body, self.lines = self.lines, outer_lines
        self.loop, self.tensors, self.sliced = self.loop[:-1], outer, outer_sliced
        self.lines.append("\n".join([f"repeat {dim} {{", *(f"    {b}" for b in body), "  }"]))
        results = [self._entering(t) for t in carried]
        self.tensors = [t for t in outer if t.text not in names] + results

    def _entering(self, value: Tensor) -> Tensor:
        return replace(value, bound=math.inf, size=max(1e3 if self.linear else 4.0, value.size))

    def _next(self, entered: Tensor) -> Tensor:
        """What is carried on: of the type that came in, between -4 and 4."""
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
        return Tensor(f"mean[{', '.join(extra)}]({value.text})", rest, "f", math.inf, None, value.size)

    # --- expressions ---------------------------------------------------------------------------

    def leaf(self, kind: str = "f", dims: int = 0, depth: int = 1) -> Tensor | None:
        """A tensor of some kind with at least so many dims; at times an expression."""
        if depth and kind == "f" and self.once_in(5):
            found = self.expression(depth - 1)
            if found.kind == kind and len(found.dims) >= dims:
                return found
        fitting = [t for t in self.tensors if t.kind == kind and len(t.dims) >= dims]
        if not fitting:
            return None
        # The latest more often: programs are deep rather than wide.
        return self.pick(fitting[-3:]) if self.once_in(2) else self.pick(fitting)

    def exact(self, kind: str = "f", dims: int = 0) -> Tensor | None:
        fitting = [t for t in self.tensors if t.kind == kind and len(t.dims) >= dims and t.exact]
        return self.pick(fitting) if fitting else None

    def expression(self, depth: int = 1) -> Tensor:
        for _ in range(4):
            makers = LINEAR if self.linear and not self.once_in(8) else MAKERS
            found = self.pick(makers)(self, depth)
            if found is not None and self.elements(found.dims) <= MOST_ELEMENTS:
                self.seen(found.dims)
                return self.tame(found)
        return self.pick(self.tensors)

    def tame(self, value: Tensor) -> Tensor:
        """`value`, brought back to small numbers when they would grow too large."""
        if value.kind == "b" or value.size <= 1e4:
            return value
        if value.kind == "i":
            return replace(value, text=f"minimum(maximum({value.text}, -3), 3)", size=3.0)
        return replace(value, text=f"minimum(maximum({value.text}, -3.0), 3.0)", size=3.0)

    def as_float(self, value: Tensor) -> Tensor:
        if value.kind == "f":
            return value
        size = 1.0 if value.kind == "b" else value.size
        return Tensor(f"cast({value.text}, f32)", value.dims, "f", max(1.0, value.bound), None, size)

    # --- arithmetic ----------------------------------------------------------------------------

    def unary(self, depth: int) -> Tensor | None:
        x = self.leaf(depth=depth)
        if x is None:
            return None
        name = self.pick(("relu", "abs", "neg", "square", "stop_gradient", "round", "jump"))
        if name == "round":
            return self._rounding(x)
        if name == "jump":
            x = self.exact() or x
            name = self.pick(("sign", "floor")) if x.exact else "abs"
        bound = x.bound**2 if name == "square" else x.bound
        size = x.size**2 if name == "square" else x.size
        text = f"-{x.atom}" if name == "neg" else f"{name}({x.text})"
        return Tensor(text, x.dims, "f", bound, None, size)

    def _rounding(self, x: Tensor) -> Tensor:
        form = self.pick(
            (
                "gelu({0})", "silu({0})", "tanh({0})", "sigmoid({0})", "sin({0})", "cos({0})",
                "erf({0})", "softplus({0})", "exp(minimum({0}, 1.0))", "log(abs({0}) + 1.0)",
                "sqrt(square({0}) + 0.5)", "rsqrt(square({0}) + 1.0)", "(abs({0}) + 1.0)^0.3",
            )
        )  # fmt: skip
        return Tensor(form.format(x.text), x.dims, "f", math.inf, None, max(3.0, x.size))

    def plain(self, depth: int) -> Tensor | None:
        """A function that partial sums pass through."""
        x, y = self.leaf(depth=depth), self.leaf(depth=depth)
        if x is None or y is None:
            return None
        form = self.pick(("-{0}", "{0} + {1}", "{0} - {1}", "2.0 * {0}", "{0}", "{0} - 1.0"))
        dims = tuple(dict.fromkeys(x.dims + (y.dims if "{1}" in form else ())))
        bound, size = 2 * (x.bound + y.bound + 1), 2 * (x.size + y.size + 1)
        return Tensor(form.format(x.atom, y.atom), dims, "f", bound, None, size)

    def binary(self, depth: int) -> Tensor | None:
        kind = self.pick(("f", "f", "f", "i"))
        x, y = self.leaf(kind, depth=depth), self.leaf(kind, depth=depth)
        if x is None or y is None:
            return None
        if self.once_in(5):
            y = Tensor(self.pick(("2.0", "-3.0", "0.5") if kind == "f" else ("2", "-1")), (), kind)
            y = replace(y, bound=math.inf if y.text == "0.5" else 3.0, size=3.0)
        form = self.pick(("{0} + {1}", "{0} - {1}", "{0} * {1}", "minimum({0}, {1})", "div"))
        bound, size = x.bound + y.bound, x.size + y.size
        if "*" in form:
            bound, size = x.bound * y.bound, x.size * y.size
        if form == "div":
            form = "{0} / (abs({1}) + 1.0)" if kind == "f" else "maximum({0}, {1})"
            bound = math.inf if kind == "f" else bound
        text = form.format(x.atom, y.atom)
        return Tensor(text, tuple(dict.fromkeys(x.dims + y.dims)), kind, bound, None, size)

    def compare(self, depth: int) -> Tensor | None:
        kind = self.pick(("f", "i"))
        x, y = self.exact(kind), self.exact(kind)
        if x is None or y is None:
            return None
        sign = self.pick(("<", "<=", ">", ">=", "==", "!="))
        right = y.atom if self.once_in(2) else ("1.0" if kind == "f" else "1")
        dims = x.dims + (y.dims if right == y.atom else ())
        return Tensor(f"{x.atom} {sign} {right}", tuple(dict.fromkeys(dims)), "b", 1.0, None, 1.0)

    def logic(self, depth: int) -> Tensor | None:
        x, y = self.leaf("b"), self.leaf("b")
        if x is None or y is None:
            return None
        if self.once_in(3):
            return replace(x, text=f"not {x.atom}")
        word = self.pick(("and", "or"))
        dims = tuple(dict.fromkeys(x.dims + y.dims))
        return replace(x, text=f"{x.atom} {word} {y.atom}", dims=dims)

    def where(self, depth: int) -> Tensor | None:
        test = self.leaf("b") or self.compare(depth)
        x, y = self.leaf(depth=depth), self.leaf(depth=depth)
        if test is None or x is None or y is None:
            return None
        if self.once_in(3):
            y = Tensor(self.pick(("0.0", "-1.0")), ())
        dims = tuple(dict.fromkeys(test.dims + x.dims + y.dims))
        bound, size = max(x.bound, y.bound), max(x.size, y.size)
        return Tensor(f"where({test.text}, {x.text}, {y.text})", dims, "f", bound, None, size)

    def cast(self, depth: int) -> Tensor | None:
        x = self.leaf(self.pick(("b", "i")))
        return self.as_float(x) if x is not None else None

    # --- sums ----------------------------------------------------------------------------------

    def einsum(self, depth: int) -> Tensor | None:
        kind = self.pick(("f", "f", "f", "f", "i"))
        operands = [self.leaf(kind, depth=depth) for _ in range(self.pick((1, 2, 2, 2, 3)))]
        found = [x for x in operands if x is not None]
        if not found:
            return None
        every = tuple(dict.fromkeys(d for x in found for d in x.dims))
        if self.elements(every) > 1 << 15:
            return None
        out = self.some(every)
        count = self.elements(every) / self.elements(out)
        bound = math.prod(x.bound for x in found) * count
        size = math.prod(x.size for x in found) * count
        text = f"einsum({', '.join(x.text for x in found)} -> [{', '.join(out)}])"
        return Tensor(text, out, kind, bound, None, size)

    def reduce(self, depth: int) -> Tensor | None:
        kind = self.pick(("f", "f", "f", "i", "b"))
        x = self.leaf(kind, 1, depth)
        if x is None:
            return None
        gone = self.some(x.dims, 1)
        count = self.elements(gone)
        names = {"b": ("any", "all"), "i": ("sum", "max", "min")}.get(
            kind, ("sum", "sum", "mean", "max", "min", "product")
        )
        name = self.pick(names)
        if name == "product":
            text = f"prod[{', '.join(gone)}](tanh({x.text}))"
            return Tensor(text, self._less(x, gone), "f", math.inf, None, 1.0)
        bound = x.bound * count if name == "sum" else x.bound
        items = "" if len(gone) == len(x.dims) and self.once_in(3) else f"[{', '.join(gone)}]"
        size = x.size * count if name == "sum" else x.size
        rest = self._less(x, gone)
        bound = math.inf if name == "mean" else bound
        return Tensor(f"{name}{items}({x.text})", rest, kind, bound, None, size)

    def _less(self, x: Tensor, gone: Sequence[str]) -> tuple[str, ...]:
        return tuple(d for d in x.dims if d not in gone)

    def sum_of_product(self, depth: int) -> Tensor | None:
        """Becomes a contraction; with a number in it too."""
        x, y = self.leaf(), self.leaf()
        if x is None or y is None:
            return None
        every = tuple(dict.fromkeys(x.dims + y.dims))
        gone = self.some(every, 1)
        if not gone or self.elements(every) > 1 << 14:
            return None
        factor = self.pick(("", " * 2.0"))
        times = 2 * self.elements(gone)
        rest = tuple(d for d in every if d not in gone)
        text = f"sum[{', '.join(gone)}]({x.atom} * {y.atom}{factor})"
        bound, size = x.bound * y.bound * times, x.size * y.size * times
        return Tensor(text, rest, "f", bound, None, size)

    # --- along a dim ---------------------------------------------------------------------------

    def normalise(self, depth: int) -> Tensor | None:
        x = self.leaf("f", 1, depth)
        if x is None:
            return None
        name = self.pick(("softmax", "log_softmax", "logsumexp", "layer_norm", "rms_norm", "norm"))
        dim = self.pick(x.dims)
        if name == "norm":
            self.functions[name] = FUNCTIONS[name]
        rest = self._less(x, (dim,)) if name == "logsumexp" else x.dims
        scales = ""
        if name in ("layer_norm", "rms_norm", "norm") and self.once_in(2):
            scales = self._scales(dim, 2 if name == "layer_norm" else 1)
        size = 64.0 if "norm" in name else x.size + 3
        return Tensor(f"{name}[{dim}]({x.text}{scales})", rest, "f", math.inf, None, size)

    def _scales(self, dim: str, most: int) -> str:
        fitting = [t.text for t in self.tensors if t.dims == (dim,) and t.kind == "f"]
        found = [self.pick(fitting) for _ in range(self.upto(most, 1))] if fitting else []
        return "".join(f", {name}" for name in found)

    def scan(self, depth: int) -> Tensor | None:
        kind = self.pick(("f", "f", "i"))
        x = self.leaf(kind, 1, depth)
        if x is None:
            return None
        dim = self.pick(x.dims)
        if self.once_in(2):
            times = self.sizes[dim]
            return Tensor(
                f"cumsum[{dim}]({x.text})", x.dims, kind, x.bound * times, None, x.size * times
            )
        by = self.pick((1, -1, 2, -3))
        return Tensor(f"shift[{dim}]({x.text}, {by})", x.dims, kind, x.bound, None, x.size)

    def argmax(self, depth: int) -> Tensor | None:
        x = self.exact(self.pick(("f", "i")), 1)
        if x is None:
            return None
        dim = self.pick(x.dims)
        n = self.sizes[dim]
        return Tensor(f"argmax[{dim}]({x.text})", self._less(x, (dim,)), "i", n, n, n)

    def cross_entropy(self, depth: int) -> Tensor | None:
        x = self.leaf("f", 1, depth)
        if x is None:
            return None
        dim = self.pick(x.dims)
        rest = self._less(x, (dim,))
        for ids in self.tensors:
            if ids.kind == "i" and set(ids.dims) == set(rest) and self._indexes(ids, dim):
                text = f"cross_entropy[{dim}]({x.text}, {ids.text})"
                return Tensor(text, rest, "f", math.inf, None, 2 * x.size + 3)
        return None

    # --- views ---------------------------------------------------------------------------------

    def rename(self, depth: int) -> Tensor | None:
        x = self.leaf(self.pick(("f", "f", "i")), 1, depth)
        if x is None:
            return None
        old = self.pick(x.dims)
        new = self.dim_of(self.sizes[old], x.dims)
        dims = tuple(new if d == old else d for d in x.dims)
        return replace(x, text=f"{x.atom}[{old} -> {new}]", dims=dims)

    def split(self, depth: int) -> Tensor | None:
        x = self.leaf(self.pick(("f", "f", "i")), 1, depth)
        if x is None:
            return None
        old = self.pick(x.dims)
        outer = self.pick([n for n in (1, 2, 4, 8) if self.sizes[old] % n == 0])
        first = self.dim_of(outer, x.dims)
        second = self.dim_of(self.sizes[old] // outer, (*x.dims, first))
        dims = tuple(n for d in x.dims for n in ((first, second) if d == old else (d,)))
        return replace(x, text=f"{x.atom}[{old} -> ({first}, {second})]", dims=dims)

    def merge(self, depth: int) -> Tensor | None:
        x = self.leaf(self.pick(("f", "f", "i")), 2, depth)
        if x is None:
            return None
        olds = self.some(x.dims, 2, 3)
        if self.elements(olds) > 64:
            return None
        new = self.dim_of(self.elements(olds), x.dims)
        dims = tuple(new if d == olds[0] else d for d in x.dims if d == olds[0] or d not in olds)
        return replace(x, text=f"{x.atom}[({', '.join(olds)}) -> {new}]", dims=dims)

    def pick_or_slice(self, depth: int) -> Tensor | None:
        x = self.leaf(self.pick(("f", "f", "i", "b")), 1, depth)
        if x is None:
            return None
        dim = self.pick(x.dims)
        n = self.sizes[dim]
        below = x.below or None
        if self.once_in(2):
            text = f"{x.atom}[{dim} = {self.upto(n - 1)}]"
            return replace(x, text=text, dims=self._less(x, (dim,)), below=below)
        start = self.upto(n - 1)
        stop = self.upto(n, start + 1)
        new = self.dim_of(stop - start, x.dims)
        dims = tuple(new if d == dim else d for d in x.dims)
        return replace(x, text=f"{x.atom}[{dim} = {start}:{stop} -> {new}]", dims=dims, below=below)

    def gather(self, depth: int) -> Tensor | None:
        x = self.leaf(self.pick(("f", "f", "i", "b")), 1, depth)
        if x is None:
            return None
        dim = self.pick(x.dims)
        fitting = [
            t for t in self.tensors if t.kind == "i" and self._indexes(t, dim) and dim not in t.dims
        ]
        if not fitting:
            return None
        ids = self.pick(fitting)
        at = x.dims.index(dim)
        new = tuple(d for d in ids.dims if d not in x.dims)
        return replace(x, text=f"{x.atom}[{dim} = {ids.text}]",
                       dims=(*x.dims[:at], *new, *x.dims[at + 1 :]), below=x.below or None)  # fmt: skip

    def _indexes(self, ids: Tensor, dim: str) -> bool:
        return ids.below is not None and ids.below <= self.sizes[dim]

    # --- makers and joins ----------------------------------------------------------------------

    def make(self, depth: int) -> Tensor | None:
        dim = self.pick(self.dims)
        n = self.sizes[dim]
        if self.once_in(3):
            dims = self._fitting(self.some(self.dims, 0, 2))
            return Tensor(f"{self.pick(('ones', 'zeros'))}[{', '.join(dims)}]()", dims)
        ids = [
            t for t in self.tensors if t.kind == "i" and self._indexes(t, dim) and dim not in t.dims
        ]
        if ids and self.once_in(2):
            chosen = self.pick(ids)
            return Tensor(f"one_hot[{dim}]({chosen.text})", (*chosen.dims, dim))
        return Tensor(f"iota[{dim}]", (dim,), "i", n, n, n)

    def join(self, depth: int) -> Tensor | None:
        x = self.leaf("f", 1, depth)
        if x is None:
            return None
        dim = self.pick(x.dims)
        alone = [d for d in x.dims if self.sizes[d] == self.sizes[dim]] == [dim]
        if self.once_in(2) or not alone:
            before, after = self.upto(2), self.upto(2)
            new = self.dim_of(self.sizes[dim] + before + after, x.dims)
            value = self.pick(("", ", 1.0", ", -2.0"))
            text = f"pad[{dim} -> {new}]({x.text}, {before}, {after}{value})"
        else:
            others = [t for t in self.tensors if t.kind == "f" and set(t.dims) == set(x.dims)]
            y = self.pick(others) if others else x
            x = replace(x, bound=max(x.bound, y.bound), size=max(x.size, y.size))
            new = self.dim_of(2 * self.sizes[dim], x.dims)
            text = f"concat[{new}]({x.text}, {y.text})"
        dims = tuple(new if d == dim else d for d in x.dims)
        return replace(x, text=text, dims=dims, bound=max(2.0, x.bound), size=max(2.0, x.size))

    def call(self, depth: int) -> Tensor | None:
        x = self.leaf("f", 1, depth)
        if x is None:
            return None
        if self.once_in(2):
            self.functions["lin"] = FUNCTIONS["lin"]
            dim = self.pick(x.dims)
            new = [d for d in self.dims if d not in x.dims]
            if not new or self.elements((*x.dims, new[0])) > 1 << 14:
                return None
            out = self.pick(new)
            text = f"lin[{dim}, {out}]({x.text})"
            times = 2 * self.sizes[dim]
            rest = (*self._less(x, (dim,)), out)
            return Tensor(text, rest, "f", x.bound * times, None, x.size * times)
        self.functions["gate"] = FUNCTIONS["gate"]
        y = self.leaf()
        assert y is not None
        dims = tuple(dict.fromkeys(x.dims + y.dims))
        return Tensor(f"gate({x.text}, {y.text})", dims, "f", math.inf, None, x.size + y.size)


MAKERS: tuple[Callable[[Writer, int], Tensor | None], ...] = (
    Writer.einsum, Writer.einsum, Writer.einsum, Writer.unary, Writer.unary, Writer.binary,
    Writer.binary, Writer.compare, Writer.logic, Writer.where, Writer.cast, Writer.reduce,
    Writer.reduce, Writer.sum_of_product, Writer.normalise, Writer.normalise, Writer.scan,
    Writer.argmax, Writer.cross_entropy, Writer.rename, Writer.split, Writer.merge,
    Writer.pick_or_slice, Writer.gather, Writer.make, Writer.join, Writer.call,
)  # fmt: skip

LINEAR = (
    Writer.einsum, Writer.einsum, Writer.einsum, Writer.plain, Writer.plain, Writer.plain,
    Writer.where, Writer.reduce, Writer.sum_of_product, Writer.scan, Writer.rename, Writer.split,
    Writer.merge, Writer.pick_or_slice, Writer.gather, Writer.join, Writer.call, Writer.compare,
)  # fmt: skip
"""Mostly what partial sums pass through."""


# --- layouts ----------------------------------------------------------------------------------


def layout(writer: Writer) -> str:
    """Rules in braces: general ones that mostly fit, and a few narrower ones."""
    rules: dict[tuple[str, str], str] = {}
    for axis, size in writer.mesh.items():
        chosen: list[str] = []
        for dim in writer.some([d for d, n in writer.sizes.items() if n % size == 0], 1, 5):
            apart = not any(frozenset((dim, d)) in writer.together for d in chosen)
            if apart and dim not in writer.looped and ("", dim) not in rules:
                chosen.append(dim)
                rules["", dim] = axis
    if len(writer.mesh) > 1 and writer.once_in(3):
        _several_axes(writer, rules)
    for _ in range(writer.upto(2)):
        selectors = ["params", *writer.functions, *writer.names[-6:]]
        key = writer.pick(selectors), writer.pick(list(writer.sizes))
        rules[key] = writer.pick([*writer.mesh, "none"])
    lines = [f"{s}: {d} -> {a}" if s else f"{d} -> {a}" for (s, d), a in rules.items()]
    return "{ " + ", ".join(lines) + " }"


def _several_axes(writer: Writer, rules: dict[tuple[str, str], str]) -> None:
    """Split one dim over several axes, which then split no other."""
    axes = writer.some(list(writer.mesh), 2, 3)
    ways = math.prod(writer.mesh[a] for a in axes)
    wide = [d for d, n in writer.sizes.items() if n % ways == 0]
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
