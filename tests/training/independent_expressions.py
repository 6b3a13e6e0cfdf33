"""Random expressions, each as text and as a function on torch tensors."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from tests.training import named_torch as nt
from tests.training.named_torch import Dims, Named

Env = dict[str, Named]
Run = Callable[[Env], Named]
Step = Callable[[Env], None]

LARGEST = 1200
"""Elements of a tensor."""

UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "tanh": torch.tanh,
    "gelu": torch.nn.functional.gelu,
    "sigmoid": torch.sigmoid,
    "silu": torch.nn.functional.silu,
    "softplus": torch.nn.functional.softplus,
    "sin": torch.sin,
    "cos": torch.cos,
    "erf": torch.erf,
    "square": torch.square,
}
CORNERED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"relu": torch.relu, "abs": torch.abs}
ARITHMETIC: dict[str, Callable[..., torch.Tensor]] = {
    "+": torch.add,
    "-": torch.sub,
    "*": torch.mul,
}
COMPARED: dict[str, Callable[..., torch.Tensor]] = {
    ">": torch.gt,
    "<=": torch.le,
    ">=": torch.ge,
    "<": torch.lt,
}


class Unfit(Exception):
    """Raised when a drawn expression does not fit; another one is drawn."""


@dataclass(frozen=True)
class Expr:
    """An expression: its text, what it computes, and what that is for the sample."""

    text: str
    run: Run
    sample: Named

    @property
    def dims(self) -> Dims:
        return self.sample.dims

    def size(self, dim: str) -> int:
        return self.sample.sizes[dim]

    @property
    def atom(self) -> str:
        simple = self.text.isidentifier() or (self.text.endswith((")", "]")) and self._one_call())
        return self.text if simple else f"({self.text})"

    def _one_call(self) -> bool:
        """Whether no operator is outside of all brackets."""
        depth = 0
        for letter in self.text:
            depth += (letter in "([") - (letter in ")]")
            if not depth and letter in " +-*/^<>=":
                return False
        return True


@dataclass
class Expressions:
    """Draws expressions from what there is so far."""

    rng: random.Random
    sizes: dict[str, int] = field(default_factory=dict)
    env: Env = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    inputs: dict[str, Named] = field(default_factory=dict)
    header: list[str] = field(default_factory=list)
    params: dict[str, Named] = field(default_factory=dict)
    functions: dict[str, str] = field(default_factory=dict)
    stated: dict[str, Dims] = field(default_factory=dict)
    together: set[frozenset[str]] = field(default_factory=set)
    loops: list[str] = field(default_factory=list)
    looped: set[str] = field(default_factory=set)
    names: list[str] = field(default_factory=list)
    reassigned: set[str] = field(default_factory=set)
    local: set[str] = field(default_factory=set)
    derived: str = ""
    count: int = 0
    recomputing: bool = False
    uneven: bool = False
    pinning: dict[str, int] = field(default_factory=dict)
    hidden: set[str] = field(default_factory=set)
    passed: set[str] = field(default_factory=set)

    @property
    def kinds(self) -> Mapping[str, float]:
        """The methods that draw an expression, and how often each is asked."""
        return KINDS

    # --- choosing ------------------------------------------------------------------------------

    def chance(self, one_in: float) -> bool:
        return self.rng.random() * one_in < 1

    def fits(self, size: int, ways: int) -> bool:
        """Whether a dim may be split so many ways: in blocks of one size, or if they may differ."""
        return size % ways == 0 or self.uneven

    def some(self, of: Sequence[str], least: int, most: int) -> Dims:
        """Some of these in a random order."""
        count = min(len(of), self.rng.randint(least, max(least, most)))
        return tuple(self.rng.sample(list(of), count))

    def shuffled(self, dims: Sequence[str]) -> Dims:
        return tuple(self.rng.sample(list(dims), len(dims)))

    def fresh(self, prefix: str) -> str:
        self.count += 1
        return f"{prefix}{self.count}"

    def dim(self, size: int, without: Sequence[str] = (), new: str = "") -> str:
        """A dim of this size that is none of `without`; a new one where there is none."""
        fits = [d for d in self.usable() if self.sizes[d] == size and d not in without]
        if fits and not self.chance(3):
            return self.rng.choice(fits)
        name = self.fresh("n")
        self.derived += f"dim {name} = {new or size}\n"
        self.sizes[name] = size
        return name

    def usable(self) -> list[str]:
        return [d for d in self.sizes if d not in self.loops]

    def small(self, dims: Sequence[str]) -> Dims:
        """As many of the dims as fit in a tensor."""
        kept: list[str] = []
        for d in dims:
            if math.prod(self.sizes[k] for k in kept) * self.sizes[d] <= LARGEST // 8:
                kept.append(d)
        return tuple(kept)

    # --- expressions ---------------------------------------------------------------------------

    def made(self, text: str, run: Run) -> Expr:
        """An expression, tried out on the sample. Raises Unfit if one cannot go on with it."""
        try:
            sample = run(self.env)
        except nt.Corner:
            raise Unfit from None
        if sample.data.numel() > LARGEST or not bool(torch.isfinite(sample.data.double()).all()):
            raise Unfit
        self.together.add(frozenset(sample.dims))
        return Expr(text, run, sample)

    def name(self, name: str) -> Expr:
        return Expr(name, lambda env: env[name], self.env[name])

    def pinned(self, dims: Dims) -> Dims:
        """The dims, now and then one of them with the axis that it is to lie on."""
        fits = [
            (d, a)
            for d in dims
            for a, n in self.pinning.items()
            if d not in self.looped and self.fits(self.sizes[d], n)
        ]
        if not fits or not self.chance(4):
            return dims
        dim, axis = self.rng.choice(fits)
        axis = "none" if self.chance(5) else axis
        return tuple(f"{d}@{axis}" if d == dim else d for d in dims)

    def visible(self) -> list[tuple[str, Named]]:
        return [(n, v) for n, v in self.env.items() if n not in self.hidden]

    def leaf(self, kind: str = "f", dims: int = 0) -> Expr:
        """A tensor that has a name: the later ones more often."""
        fits = [
            n
            for n, v in self.visible()
            if kind_of(v) == kind and len(v.dims) >= dims and v.data.numel() <= LARGEST
        ]
        if not fits:
            raise Unfit
        late = fits[-4:] if self.chance(2) else fits
        return self.name(self.rng.choice(late))

    def operand(self, depth: int, dims: int = 0) -> Expr:
        if depth > 0 and self.chance(3):
            found = self.tamed(self.expression(depth - 1))
            if kind_of(found.sample) == "f" and len(found.dims) >= dims:
                return found
        return self.leaf("f", dims)

    def tamed(self, x: Expr) -> Expr:
        """`x`, or something smaller made of it."""
        if kind_of(x.sample) != "f" or float(x.sample.data.detach().abs().max()) < 6:
            return x
        if self.chance(2):
            return self.made(f"tanh({x.text})", lambda env: nt.pointwise(torch.tanh, x.run(env)))
        return self.made(
            f"0.05 * {x.atom}", lambda env: nt.pointwise(lambda t: 0.05 * t, x.run(env))
        )

    def expression(self, depth: int = 1) -> Expr:
        for _ in range(30):
            kind = self.rng.choices(list(self.kinds), list(self.kinds.values()))[0]
            try:
                found: Expr = getattr(self, kind)(depth)
            except Unfit:
                continue
            return found
        raise Unfit

    # pointwise

    def unary(self, depth: int) -> Expr:
        x = self.operand(depth)
        f = self.rng.choice([*UNARY, *CORNERED])
        if f in UNARY:
            return self.made(f"{f}({x.text})", lambda env: nt.pointwise(UNARY[f], x.run(env)))
        return self.made(f"{f}({x.text})", lambda env: nt.cornered(CORNERED[f], x.run(env)))

    def safe(self, depth: int) -> Expr:
        """Functions that want a positive operand."""
        x = self.operand(depth)
        forms: list[tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = [
            (f"log(square({x.text}) + 1)", lambda t: (t * t + 1).log()),
            (f"sqrt({x.atom}^2 + 1.0)", lambda t: (t * t + 1).sqrt()),
            (f"rsqrt(0.5 + {x.atom} * {x.atom})", lambda t: (t * t + 0.5).rsqrt()),
            (f"({x.atom}^2 + 2)^0.5", lambda t: (t * t + 2).sqrt()),
            (f"1.0 / ({x.atom}^2 + 1)", lambda t: 1 / (t * t + 1)),
            (f"exp(-{x.atom}^2)", lambda t: (-t * t).exp()),
            (f"{x.atom}^3 / 4", lambda t: t**3 / 4),
            (f"-{x.atom}", lambda t: -t),
            (f"{x.atom} + 1.0", lambda t: t + 1),
            (f"1.5 - {x.atom}", lambda t: 1.5 - t),
            (f"0.5 * {x.atom}", lambda t: 0.5 * t),
            (f"{x.atom} * 1.0", lambda t: t * 1.0),
        ]
        text, f = self.rng.choice(forms)
        return self.made(text, lambda env: nt.pointwise(f, x.run(env)))

    def binary(self, depth: int) -> Expr:
        x, y = self.operand(depth), self.operand(depth)
        sign = self.rng.choice(list(ARITHMETIC))
        f = ARITHMETIC[sign]
        return self.made(
            f"{x.atom} {sign} {y.atom}", lambda env: nt.pointwise(f, x.run(env), y.run(env))
        )

    def larger(self, depth: int) -> Expr:
        x, y = self.operand(depth), self.operand(depth)
        f = self.rng.choice(["maximum", "minimum"])
        made = getattr(torch, f)
        return self.made(
            f"{f}({x.text}, {y.text})", lambda env: nt.extremes(made, x.run(env), y.run(env))
        )

    def chosen(self, depth: int) -> Expr:
        x, c = self.operand(depth), self.condition(depth)
        if self.chance(3):
            return self.made(
                f"where({c.text}, {x.text}, -0.5)",
                lambda env: nt.where(c.run(env), x.run(env), nt.number(-0.5)),
            )
        y = self.operand(depth)
        return self.made(
            f"where({c.text}, {x.text}, {y.text})",
            lambda env: nt.where(c.run(env), x.run(env), y.run(env)),
        )

    def condition(self, depth: int) -> Expr:
        sign = self.rng.choice(list(COMPARED))
        dims = self.usable()
        if len(dims) > 1 and self.chance(2):
            a, b = self.rng.sample(dims, 2)
            n, m = self.sizes[a], self.sizes[b]
            return self.made(
                f"iota[{a}] {sign} iota[{b}]",
                lambda env: nt.compared(COMPARED[sign], nt.iota(a, n), nt.iota(b, m)),
            )
        x, y = self.operand(depth), self.operand(depth)
        return self.made(
            f"{x.atom} {sign} {y.atom}",
            lambda env: nt.compared(COMPARED[sign], x.run(env), y.run(env)),
        )

    def stopped(self, depth: int) -> Expr:
        x, y = self.operand(depth), self.operand(depth)
        return self.made(
            f"{x.atom} * stop_gradient({y.text})",
            lambda env: nt.pointwise(lambda a, b: a * b.detach(), x.run(env), y.run(env)),
        )

    # reductions and what runs along a dim

    def reduction(self, depth: int) -> Expr:
        x = self.operand(depth, 1)
        kind = self.rng.choice(["sum", "sum", "mean", "mean", "max", "min", "prod"])
        if self.chance(6):
            return self.made(f"{kind}({x.text})", lambda env: self.all_of(kind, x.run(env)))
        dims = self.some(x.dims, 1, 2)
        return self.made(
            f"{kind}[{', '.join(dims)}]({x.text})", lambda env: nt.reduced(kind, x.run(env), dims)
        )

    @staticmethod
    def all_of(kind: str, x: Named) -> Named:
        return nt.reduced(kind, x, x.dims)

    def normalised(self, depth: int) -> Expr:
        x = self.operand(depth, 1)
        dim = self.rng.choice(x.dims)
        f = self.rng.choice(["softmax", "log_softmax", "cumsum", "logsumexp"])
        if f == "logsumexp":
            return self.made(
                f"logsumexp[{dim}]({x.text})", lambda env: nt.reduced(f, x.run(env), [dim])
            )
        made = getattr(torch, f)
        return self.made(f"{f}[{dim}]({x.text})", lambda env: nt.along(made, x.run(env), dim))

    def norm(self, depth: int) -> Expr:
        x = self.operand(depth, 1)
        dim = self.rng.choice([d for d in x.dims])
        f = self.rng.choice(["rms_norm", "layer_norm"])
        of = nt.rms_norm if f == "rms_norm" else nt.layer_norm
        gains = [self.name(n) for n, v in self.visible() if v.dims == (dim,) and kind_of(v) == "f"]
        if gains and self.chance(1.5):
            g = self.rng.choice(gains)
            if f == "layer_norm" and self.chance(2):
                b = self.rng.choice(gains)
                return self.made(
                    f"{f}[{dim}]({x.text}, {g.text}, {b.text})",
                    lambda env: nt.pointwise(
                        lambda t, s, o: t * s + o, of(x.run(env), dim), g.run(env), b.run(env)
                    ),
                )
            return self.made(
                f"{f}[{dim}]({x.text}, {g.text})",
                lambda env: nt.pointwise(torch.mul, of(x.run(env), dim), g.run(env)),
            )
        return self.made(f"{f}[{dim}]({x.text})", lambda env: of(x.run(env), dim))

    def shift(self, depth: int) -> Expr:
        x = self.operand(depth, 1)
        dim = self.rng.choice(x.dims)
        by = self.rng.choice([-2, -1, 1, 1, 2, 5])
        return self.made(
            f"shift[{dim}]({x.text}, by={by})", lambda env: nt.shifted(x.run(env), dim, by)
        )

    # einsum

    def einsum(self, depth: int) -> Expr:
        xs = [self.operand(depth) for _ in range(self.rng.choice([1, 2, 2, 2, 2, 3]))]
        every = nt.union(*(x.sample for x in xs))
        if math.prod(self.sizes[d] for d in every) > 20 * LARGEST:
            raise Unfit
        out = self.small(self.some(every, 0, 4))
        self.together.add(frozenset(every))
        return self.made(
            f"einsum({', '.join(x.text for x in xs)} -> [{', '.join(out)}])",
            lambda env: nt.einsum([x.run(env) for x in xs], out),
        )

    # views

    def view(self, depth: int) -> Expr:
        makers = [self.renaming, self.merging, self.splitting, self.slicing, self.picking]
        return self.rng.choice(makers)(self.operand(depth, 1))

    def renaming(self, x: Expr) -> Expr:
        dim = self.rng.choice(x.dims)
        to = self.dim(self.sizes[dim], x.dims, dim)
        return self.made(f"{x.atom}[{dim} -> {to}]", lambda env: nt.renamed(x.run(env), dim, to))

    def merging(self, x: Expr) -> Expr:
        if len(x.dims) < 2:
            raise Unfit
        dims = self.some(x.dims, 2, 3)
        size = math.prod(self.sizes[d] for d in dims)
        to = self.dim(size, x.dims, " * ".join(dims))
        return self.made(
            f"{x.atom}[({', '.join(dims)}) -> {to}]", lambda env: nt.merged(x.run(env), dims, to)
        )

    def splitting(self, x: Expr) -> Expr:
        dim = self.rng.choice(x.dims)
        size = self.sizes[dim]
        outer = self.rng.choice([n for n in range(1, size + 1) if size % n == 0])
        a = self.dim(outer, x.dims)
        b = self.dim(size // outer, (*x.dims, a))
        parts = {a: outer, b: size // outer}
        return self.made(
            f"{x.atom}[{dim} -> ({a}, {b})]", lambda env: nt.split(x.run(env), dim, parts)
        )

    def slicing(self, x: Expr) -> Expr:
        dim = self.rng.choice(x.dims)
        start = self.rng.randint(0, self.sizes[dim] - 1)
        stop = self.rng.randint(start + 1, self.sizes[dim])
        to = self.dim(stop - start, x.dims)
        return self.made(
            f"{x.atom}[{dim} = {start}:{stop} -> {to}]",
            lambda env: nt.sliced(x.run(env), dim, start, stop, to),
        )

    def picking(self, x: Expr) -> Expr:
        dim = self.rng.choice(x.dims)
        index = self.rng.randrange(self.sizes[dim])
        return self.made(
            f"{x.atom}[{dim} = {index}]", lambda env: nt.picked(x.run(env), dim, index)
        )

    def concatenated(self, depth: int) -> Expr:
        x = self.operand(depth, 1)
        dim = self.rng.choice(x.dims)
        other = self.rng.choice([d for d in self.usable() if d not in x.dims or d == dim])
        wanted = self.shuffled([other if d == dim else d for d in x.dims])
        y = self.fitted(self.operand(depth), wanted)
        dims = dim, other
        sizes = [self.sizes[d] for d in dims]
        to = self.dim(sum(sizes), (*x.dims, *y.dims), " + ".join(dims))
        return self.made(
            f"concat[({dim}, {other}) -> {to}]({x.text}, {y.text})",
            lambda env: nt.joined(x.run(env), y.run(env), dims, to),
        )

    def padded(self, depth: int) -> Expr:
        x = self.operand(depth, 1)
        dim = self.rng.choice(x.dims)
        before, after = self.rng.choice([(1, 0), (0, 1), (1, 1), (2, 0), (0, 2)])
        value = self.rng.choice([0.0, 0.0, 1.5])
        to = self.dim(self.sizes[dim] + before + after, x.dims, f"{dim} + {before + after}")
        return self.made(
            f"pad[{dim} -> {to}]({x.text}, {before}, {after}{f', {value}' if value else ''})",
            lambda env: nt.padded(x.run(env), dim, to, before, after, value),
        )

    def broadcast(self, depth: int) -> Expr:
        x = self.operand(depth)
        more = self.small(self.some([d for d in self.usable() if d not in x.dims], 1, 2))
        if not more:
            raise Unfit
        return self.spread(x, more)

    def spread(self, x: Expr, more: Dims) -> Expr:
        sizes = [self.sizes[d] for d in more]
        sign, maker = self.rng.choice([("+", "zeros"), ("*", "ones")])
        made = torch.zeros(sizes) if maker == "zeros" else torch.ones(sizes)
        filler = Named(made.double(), more)
        f = torch.add if sign == "+" else torch.mul
        return self.made(
            f"{x.atom} {sign} {maker}[{', '.join(more)}]()",
            lambda env: nt.pointwise(f, x.run(env), filler),
        )

    def fitted(self, x: Expr, dims: Sequence[str]) -> Expr:
        """Something made of `x` that has just these dims, in any order."""
        extra = tuple(d for d in x.dims if d not in dims)
        if extra:
            x, was = self.reduced_by(x, extra), x
            assert set(was.dims) - set(extra) == set(x.dims)
        missing = tuple(d for d in dims if d not in x.dims)
        return self.spread(x, missing) if missing else x

    def reduced_by(self, x: Expr, extra: Dims) -> Expr:
        return self.made(
            f"mean[{', '.join(extra)}]({x.text})", lambda env: nt.reduced("mean", x.run(env), extra)
        )

    # integers

    def indices(self, most: int) -> Expr:
        """Integers below `most`."""
        fits = [
            n
            for n, v in self.env.items()
            if n in self.inputs and kind_of(v) == "i" and int(self.inputs[n].data.max()) < most
        ]
        if fits and self.chance(1.5):
            return self.name(self.rng.choice(fits))
        if self.loops:
            raise Unfit
        dims = self.small(self.some(self.usable(), 0, 2))
        bound = self.rng.randint(1, most)
        name = self.fresh("ids")
        generator = torch.Generator().manual_seed(self.rng.randrange(2**31))
        # Several batches' worth: more than one where the step accumulates.
        data = torch.randint(0, bound, [4, *(self.sizes[d] for d in dims)], generator=generator)
        self.declare(name, Named(data, ("accumulate", *dims)), ": i32")
        return self.name(name)

    def lookup(self, depth: int) -> Expr:
        table = self.operand(depth, 1)
        dim = self.rng.choice(table.dims)
        ids = self.indices(self.sizes[dim])
        if dim in ids.dims:
            raise Unfit
        return self.made(
            f"{table.atom}[{dim} = {ids.text}]",
            lambda env: nt.gathered(table.run(env), dim, ids.run(env)),
        )

    def best(self, depth: int) -> Expr:
        """A lookup at the largest of something."""
        x = self.operand(depth, 1)
        dim = self.rng.choice(x.dims)
        table = self.leaf("f", 1)
        if dim not in table.dims:
            size = self.sizes[dim]
            return self.made(
                f"one_hot[{dim}](argmax[{dim}]({x.text})) * {table.text}",
                lambda env: nt.pointwise(
                    torch.mul,
                    nt.one_hot(nt.reduced("argmax", x.run(env), [dim]), dim, size),
                    table.run(env),
                ),
            )
        return self.made(
            f"{table.text}[{dim} = argmax[{dim}]({x.text})]",
            lambda env: nt.gathered(table.run(env), dim, nt.reduced("argmax", x.run(env), [dim])),
        )

    def encoded(self, depth: int) -> Expr:
        x = self.operand(depth)
        dims = self.usable()
        dim = self.rng.choice(dims)
        size = self.sizes[dim]
        ids = self.indices(size)
        if dim in ids.dims:
            raise Unfit
        return self.made(
            f"{x.atom} * one_hot[{dim}]({ids.text})",
            lambda env: nt.pointwise(torch.mul, x.run(env), nt.one_hot(ids.run(env), dim, size)),
        )

    def cross_entropy(self, depth: int) -> Expr:
        x = self.operand(depth, 1)
        dim = self.rng.choice(x.dims)
        ids = self.indices(self.sizes[dim])
        if not set(ids.dims) <= set(x.sample.without(dim)):
            raise Unfit

        def run(env: Env) -> Named:
            logs = nt.along(torch.log_softmax, x.run(env), dim)
            return nt.pointwise(torch.neg, nt.gathered(logs, dim, ids.run(env)))

        if set(ids.dims) != set(x.sample.without(dim)):
            raise Unfit
        return self.made(f"cross_entropy[{dim}]({x.text}, {ids.text})", run)

    def scaled_by_integer(self, depth: int) -> Expr:
        x, k = self.operand(depth), self.leaf("i")
        return self.made(
            f"{x.atom} * cast({k.text}, f32)",
            lambda env: nt.pointwise(lambda a, b: a * b.double(), x.run(env), k.run(env)),
        )

    # inputs

    def declare(self, name: str, data: Named, dtype: str = "") -> None:
        """An input; its first dim counts batches."""
        self.inputs[name] = data
        dims = data.without("accumulate")
        self.stated[name] = dims
        listed = ", ".join(self.pinned(dims))
        self.header.append(f"{name}[{listed}]{dtype}" if dims else f"{name}{dtype}")
        one = data.data[0]
        if one.is_floating_point():
            one = one.clone().requires_grad_()
        self.env[name] = Named(one, dims)
        self.together.add(frozenset(dims))

    def input(self, dims: Dims) -> None:
        name = self.fresh("x")
        data = self.normal([4, *(self.sizes[d] for d in dims)])
        self.declare(name, Named(data, ("accumulate", *dims)))

    def normal(self, shape: Sequence[int]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.rng.randrange(2**31))
        return torch.randn(list(shape), generator=generator, dtype=torch.float64)


KINDS: dict[str, float] = {
    "unary": 5, "safe": 5, "binary": 8, "larger": 1, "chosen": 3, "stopped": 1, "reduction": 4,
    "normalised": 4, "norm": 3, "shift": 1.5, "einsum": 8, "view": 8, "concatenated": 3,
    "padded": 1, "broadcast": 2, "lookup": 4, "best": 1, "encoded": 1, "cross_entropy": 1,
    "scaled_by_integer": 0.5,
}  # fmt: skip


def added(*tensors: torch.Tensor) -> torch.Tensor:
    return functools.reduce(torch.add, tensors)


def kind_of(x: Named) -> str:
    if x.data.is_floating_point():
        return "f"
    return "b" if x.data.dtype == torch.bool else "i"


def inside(env: Env, dim: str, index: int) -> Env:
    """The environment of an iteration: slices of the tensors with the loop's dim."""
    return {n: nt.picked(v, dim, index) if dim in v.dims else v for n, v in env.items()}
