"""Random well-typed expressions of the language, as text.

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

from tests.programs.harness import LARGEST

X = TypeVar("X")
Draw = Callable[[st.SearchStrategy[X]], X]

MOST_ELEMENTS = 2048
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

    `kind` is `f`, `i` or `b`. `bound` is the most that a sum of absolute values on the way to it
    can be, infinite where something rounds. `below`: it has indices below this; 0 for an input,
    which gets values below whatever it indexes. `size`: about how large its elements can be.
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
class Expressions:
    """Writes expressions of `tensors`; `sizes` are the dims there are, `loop` those looped over.

    `linear` asks for what partial sums pass through; `together` are pairs of dims of one tensor.
    """

    draw: Draw  # type: ignore[type-arg]
    mesh: dict[str, int]
    sizes: dict[str, int] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)
    functions: dict[str, str] = field(default_factory=dict)
    loop: tuple[str, ...] = ()
    linear: bool = False
    together: set[frozenset[str]] = field(default_factory=set)

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

    def fitting(self, dims: Sequence[str]) -> tuple[str, ...]:
        """The first of `dims`, as many as keep a tensor small."""
        dims = tuple(dims)
        while self.elements(dims) > MOST_ELEMENTS:
            dims = dims[:-1]
        return dims

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
        """Record which dims are in one tensor: rules to one axis would conflict there."""
        self.together |= {frozenset(p) for p in itertools.combinations(dims, 2)}

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
            found: Tensor | None = getattr(self, self.pick(makers))(depth)
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
        text = f"cast({value.text}, f32)"
        return Tensor(text, value.dims, "f", max(1.0, value.bound), None, size)

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
        dims = (*x.dims[:at], *new, *x.dims[at + 1 :])
        text = f"{x.atom}[{dim} = {ids.text}]"
        return replace(x, text=text, dims=dims, below=x.below or None)

    def _indexes(self, ids: Tensor, dim: str) -> bool:
        return ids.below is not None and ids.below <= self.sizes[dim]

    # --- makers and joins ----------------------------------------------------------------------

    def make(self, depth: int) -> Tensor | None:
        if not self.dims:  # loops go over all of them
            return None
        dim = self.pick(self.dims)
        n = self.sizes[dim]
        if self.once_in(3):
            dims = self.fitting(self.some(self.dims, 0, 2))
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
        if self.once_in(2):
            before, after = self.upto(2), self.upto(2)
            new = self.dim_of(self.sizes[dim] + before + after, x.dims)
            value = self.pick(("", ", 1.0", ", -2.0"))
            text = f"pad[{dim} -> {new}]({x.text}, {before}, {after}{value})"
        else:
            others = [t for t in self.tensors if t.kind == "f" and set(t.dims) == set(x.dims)]
            y = self.pick(others) if others else x
            x = replace(x, bound=max(x.bound, y.bound), size=max(x.size, y.size))
            new = self.dim_of(2 * self.sizes[dim], x.dims)
            joined = self.pick((f"({dim}, {dim}) -> {new}", f"{dim} -> {new}"))
            text = f"concat[{joined}]({x.text}, {y.text})"
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


MAKERS = """
    einsum einsum einsum unary unary binary binary compare logic where cast reduce reduce
    sum_of_product normalise normalise scan argmax cross_entropy rename split merge
    pick_or_slice gather make join call
""".split()
"""Methods that write an expression, the more common ones several times."""

LINEAR = """
    einsum einsum einsum plain plain plain where reduce sum_of_product scan rename split merge
    pick_or_slice gather join call compare
""".split()
"""Mostly what partial sums pass through."""
