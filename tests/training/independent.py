"""Random training programs that are built twice: as text, and as functions on torch tensors.

Nothing of the compiler is asked what a program means: `named_torch` says it, torch.autograd takes
the gradients, torch.optim the steps.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Sequence
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
    """What was drawn does not fit; something else is drawn."""


@dataclass(frozen=True)
class Expr:
    """An expression: its text, what it computes, and what that is for the sample."""

    text: str
    run: Run
    sample: Named

    @property
    def dims(self) -> Dims:
        return self.sample.dims

    @property
    def atom(self) -> str:
        simple = self.text.isidentifier() or (self.text.endswith((")", "]")) and self._one_call())
        return self.text if simple else f"({self.text})"

    def _one_call(self) -> bool:
        """Whether no operator stands outside of all brackets."""
        depth = 0
        for letter in self.text:
            depth += (letter in "([") - (letter in ")]")
            if not depth and letter in " +-*/^<>=":
                return False
        return True


@dataclass
class Program:
    """One random program: text and meaning, and how it is to be run."""

    text: str
    steps: list[Step]
    inputs: dict[str, Named]
    params: dict[str, Named]
    outputs: list[str]
    stated: dict[str, Dims]
    optimizer: dict[str, object]
    mesh: str
    rules: str
    sbp: bool
    policy: str
    message_bytes: int | None

    @property
    def accumulate(self) -> int:
        return int(str(self.optimizer.get("accumulate", 1)))


@dataclass
class Writer:
    """Writes one program, statement by statement."""

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
    hidden: set[str] = field(default_factory=set)
    computed: set[str] = field(default_factory=set)

    # --- choosing ------------------------------------------------------------------------------

    def chance(self, one_in: float) -> bool:
        return self.rng.random() * one_in < 1

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
            kind = self.rng.choices(list(KINDS), list(KINDS.values()))[0]
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

    # --- statements ----------------------------------------------------------------------------

    def declare(self, name: str, data: Named, dtype: str = "") -> None:
        """An input; its first dim counts batches."""
        self.inputs[name] = data
        dims = data.without("accumulate")
        self.stated[name] = dims
        self.header.append(f"{name}[{', '.join(dims)}]{dtype}" if dims else f"{name}{dtype}")
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

    def param(self, dims: Dims | None = None) -> Expr:
        if dims is None:
            dims = self.small(self.some(self.usable(), 0, 3))
        name = self.fresh("w")
        self.lines.append(f"param {name}[{', '.join(dims)}]")
        every = (*self.loops, *dims)
        data = self.normal([self.sizes[d] for d in every]).requires_grad_()
        self.params[name] = Named(data, every)
        self.stated[name] = dims
        self.together.add(frozenset(every))
        self.env[name] = Named(data[(0,) * len(self.loops)], dims)
        return self.name(name)

    def bind(self, value: Expr, name: str = "", order: Dims | None = None) -> str:
        """`name = value`, its dims stated if an order is given."""
        if not name:
            name = self.fresh("t")
            self.local.add(name)
        target = name
        value = self.tamed(value)
        if order is not None:
            target = f"{name}[{', '.join(order)}]"
            self.stated[name] = order
        else:
            self.stated.pop(name, None)
        self.lines.append(f"{target} = {value.text}")

        def step(env: Env) -> None:
            made = value.run(env)
            env[name] = made if order is None else nt.ordered(made, order)

        self.do(step)
        self.names.append(name)
        return name

    def do(self, step: Step) -> None:
        self.steps.append(step)
        step(self.env)

    def statement(self) -> None:
        kind = self.rng.random()
        if kind < 0.09 and len(self.loops) < 2:
            self.repeat()
        elif kind < 0.2:
            self.param()
        elif kind < 0.25 and not self.recomputing and not self.loops:
            self.recompute()
        elif kind < 0.33:
            self.attention()
        elif kind < 0.39:
            self.gradient()
        elif kind < 0.42:
            self.function()
        else:
            self.assignment()

    def assignment(self) -> None:
        value = self.expression()
        if kind_of(value.sample) != "f":
            return
        name = ""
        if not self.loops and self.local and self.chance(25):
            name = self.rng.choice(sorted(self.local))
            self.reassigned.add(name)
        self.bind(value, name, self.shuffled(value.dims) if self.chance(2) else None)

    def function(self) -> None:
        """A call of a function with a parameter of its own."""
        if self.loops or self.recomputing or "blk" in self.functions:
            return
        x = self.leaf("f", 1)
        dims = self.shuffled(x.dims)
        listed = ", ".join(dims)
        self.functions["blk"] = (
            f"def blk(x[{listed}]) -> [{listed}] {{\n  param w[{dims[0]}]\n"
            "  h = tanh(x * w)\n  return h + x\n}\n"
        )
        name = "blk.w"
        data = self.normal([self.sizes[dims[0]]]).requires_grad_()
        self.params[name] = Named(data, (dims[0],))
        self.env[name] = self.params[name]

        def run(env: Env) -> Named:
            found = nt.pointwise(lambda a, w: torch.tanh(a * w) + a, x.run(env), env[name])
            return nt.ordered(found, dims)

        value = self.made(f"blk({x.text})", run)
        self.hidden.add(name)
        self.bind(value)

    def block(self, lines: list[str], head: str) -> None:
        self.lines.append(
            "\n".join([f"{head} {{", *(f"  {b}".replace("\n", "\n  ") for b in lines), "}"])
        )

    def recompute(self) -> None:
        outer, self.lines, self.recomputing = self.lines, [], True
        for _ in range(self.rng.randint(1, 3)):
            self.attempt()
        body, self.lines, self.recomputing = self.lines, outer, False
        if body:
            self.block(body, "recompute")

    def attempt(self) -> None:
        """A statement, if what is drawn fits; inputs that it declared stay."""
        lines, steps, names = len(self.lines), len(self.steps), len(self.names)
        env, params, functions = dict(self.env), dict(self.params), dict(self.functions)
        stated, local = dict(self.stated), set(self.local)
        try:
            self.statement()
        except Unfit:
            del self.lines[lines:], self.steps[steps:], self.names[names:]
            given = {n: v for n, v in self.env.items() if n in self.inputs and n not in env}
            self.env, self.params, self.functions = env | given, params, functions
            self.stated = stated | {n: v.dims for n, v in given.items()}
            self.local = local

    def repeat(self) -> None:
        dims = [d for d in self.usable() if self.sizes[d] <= 4]
        if not dims:
            raise Unfit
        dim = self.rng.choice(dims)
        carried = [
            n
            for n in self.env
            if n in self.local and dim not in self.env[n].dims and kind_of(self.env[n]) == "f"
        ]
        if not carried:
            raise Unfit
        names = self.some(carried, 1, 2)
        outer = self.env, self.lines, self.steps, self.local, self.names
        stated, params = dict(self.stated), set(self.params)
        self.env = inside(self.env, dim, 0)
        self.lines, self.steps, self.local, self.names = [], [], set(), list(self.names)
        self.loops.append(dim)
        self.looped.add(dim)
        try:
            for _ in range(self.rng.randint(0, 3)):
                self.attempt()
            for name in names:
                self.carry(name, outer[0][name].dims)
            body_lines, body = self.lines, self.steps
        finally:
            self.env, self.lines, self.steps, self.local, self.names = outer
            self.stated = {n: d for n, d in self.stated.items() if n in stated or n in self.params}
            self.stated |= stated
            self.loops.pop()
        for name in self.params.keys() - params:
            self.hide(name)
        size = self.sizes[dim]

        def step(env: Env) -> None:
            state = {n: env[n] for n in names}
            for index in range(size):
                turn = inside({**env, **state}, dim, index)
                for act in body:
                    act(turn)
                state = {n: turn[n] for n in names}
            env.update(state)

        self.block(body_lines, f"repeat {dim}")
        self.do_or_not(step)
        self.reassigned.update(names)

    def hide(self, name: str) -> None:
        """A parameter of a loop or a function: there, and not to be named here."""
        whole = self.params[name]
        for dim in self.loops:
            whole = nt.picked(whole, dim, 0)
        self.env[name] = whole
        self.hidden.add(name)

    def do_or_not(self, step: Step) -> None:
        try:
            self.do(step)
        except nt.Corner:
            raise Unfit from None

    def carry(self, name: str, dims: Dims) -> None:
        """`name = …` of the same dims, not much larger than it was."""
        old = self.name(name)
        value = self.fitted(self.tamed(self.expression()), dims)
        form = self.rng.choice(["0.5 * ({} + {})", "tanh({} + {})", "tanh({1} * 0.5) + {0} * 0.5"])
        text = form.format(old.text, value.atom)
        parts: dict[str, Callable[..., torch.Tensor]] = {
            "0.5": lambda a, b: 0.5 * (a + b),
            "tan": lambda a, b: (a + b).tanh(),
        }
        f = parts[form[:3]] if "{1}" not in form else lambda a, b: (b * 0.5).tanh() + a * 0.5
        run: Run = lambda env: nt.ordered(  # noqa: E731
            nt.pointwise(f, old.run(env), value.run(env)), dims
        )
        made = self.made(text, run)
        self.bind(made, name, dims)

    def attention(self) -> None:
        """Queries, keys, values and the way back, in random orders of dims."""
        if self.recomputing and self.loops:
            raise Unfit
        x = self.leaf("f", 2)
        model, seq = self.some(x.dims, 2, 2)
        if self.sizes[seq] > 8 or self.sizes[model] > 8:
            raise Unfit
        rest = x.sample.without(model, seq)
        mem = self.dim(self.sizes[seq], x.dims, seq)
        free = [d for d in self.usable() if d not in (*x.dims, mem) and self.sizes[d] <= 4]
        if len(free) < 2:
            raise Unfit
        heads, key = self.some(free, 2, 2)
        q, k, v = (self.projected(x, (model, heads, key), (*rest, heads, seq, key)) for _ in "qkv")
        k, v = (self.name(self.bind(self.renamed_to(y, seq, mem))) for y in (k, v))
        score = self.shuffled((*rest, heads, seq, mem))
        root = math.sqrt(self.sizes[key])
        s = self.made(
            f"einsum({q.text}, {k.text} -> [{', '.join(score)}]) / sqrt({key})",
            lambda env: nt.pointwise(
                lambda t: t / root, nt.einsum([q.run(env), k.run(env)], score)
            ),
        )
        s = self.name(self.bind(s))
        if self.chance(1.5):
            s = self.masked(s, seq, mem)
        a = self.made(
            f"softmax[{mem}]({s.text})", lambda env: nt.along(torch.softmax, s.run(env), mem)
        )
        if self.chance(2):
            a = self.name(self.bind(a, "", self.shuffled(a.dims) if self.chance(2) else None))
        out = self.shuffled((*rest, heads, seq, key))
        o = self.made(
            f"einsum({a.text}, {v.text} -> [{', '.join(out)}])",
            lambda env: nt.einsum([a.run(env), v.run(env)], out),
        )
        o = self.name(self.bind(o, "", out))
        y = self.projected(o, (heads, key, model), (*rest, seq, model))
        if self.chance(2):
            self.bind(
                self.made(
                    f"{x.text} + {y.text}",
                    lambda env: nt.pointwise(torch.add, x.run(env), y.run(env)),
                )
            )

    def renamed_to(self, x: Expr, dim: str, to: str) -> Expr:
        return self.made(f"{x.atom}[{dim} -> {to}]", lambda env: nt.renamed(x.run(env), dim, to))

    def projected(self, x: Expr, dims: Dims, out: Dims) -> Expr:
        w, out = self.param(self.shuffled(dims)), self.shuffled(out)
        made = self.made(
            f"einsum({x.text}, {w.text} -> [{', '.join(out)}])",
            lambda env: nt.einsum([x.run(env), w.run(env)], out),
        )
        return self.name(self.bind(made, "", out if self.chance(2) else None))

    def masked(self, s: Expr, seq: str, mem: str) -> Expr:
        n = self.sizes[seq]

        def run(env: Env) -> Named:
            mask = nt.compared(torch.ge, nt.iota(seq, n), nt.iota(mem, n))
            return nt.where(mask, s.run(env), nt.number(-1e9))

        return self.made(f"where(iota[{seq}] >= iota[{mem}], {s.text}, -1e9)", run)

    # --- gradients -----------------------------------------------------------------------------

    def floats(self) -> list[str]:
        """Names that a gradient may be taken by."""
        known = [n for n, v in self.visible() if kind_of(v) == "f"]
        return [n for n in known if n in self.local] if self.loops else known

    def gradient(self) -> None:
        """Gradients of a number as tensors like any other."""
        about = self.made_number()
        targets = self.targets(about, 1, 3)
        self.take(about, targets)

    def made_number(self) -> Expr:
        x = self.rng.choice([self.name(n) for n in self.floats()] or [self.leaf()])
        y = self.leaf()
        value = self.made(
            f"mean(tanh({x.text} * {y.text}))",
            lambda env: self.all_of(
                "mean",
                nt.pointwise(lambda a, b: torch.tanh(a * b), x.run(env), y.run(env)),
            ),
        )
        return value

    def targets(self, about: Expr, least: int, most: int) -> Dims:
        """Tensors that `about` depends on. Raises Unfit if there are none."""
        names = self.floats()
        if not names or not about.sample.data.requires_grad:
            raise Unfit
        names = [n for n in names if self.env[n].data.requires_grad and n not in self.computed]
        tensors = [self.env[n].data for n in names]
        if not tensors:
            raise Unfit
        found = torch.autograd.grad(
            about.sample.data, tensors, retain_graph=True, allow_unused=True
        )
        reached = [n for n, g in zip(names, found, strict=True) if g is not None]
        if not reached:
            raise Unfit
        chosen = self.some(reached, least, most)
        if self.chance(8):
            chosen = (*chosen, chosen[0])
        return chosen

    def take(self, about: Expr, targets: Dims) -> list[str]:
        made = [self.fresh("d") for _ in targets]
        self.lines.append(f"{', '.join(made)} = grad({about.text}, {', '.join(targets)})")

        def step(env: Env) -> None:
            found = torch.autograd.grad(
                about.run(env).data, [env[n].data for n in targets], create_graph=True
            )
            for name, target, data in zip(made, targets, found, strict=True):
                # One gradient is no function of another, whatever torch computes it from.
                env[name] = Named(data.view_as(data), env[target].dims)

        self.do(step)
        self.names.extend(made)
        self.local.update(made)
        # Of gradients taken together one may be computed from another: not what a gradient is by.
        self.computed.update(made if len(made) > 1 else ())
        return made

    # --- the whole -----------------------------------------------------------------------------

    def begin(self) -> None:
        for name in "abcdef"[: self.rng.randint(3, 6)]:
            self.sizes[name] = self.rng.choice((1, 2, 2, 2, 3, 4, 4, 4, 6, 8))
        for _ in range(self.rng.randint(1, 3)):
            self.input(self.small(self.some(list(self.sizes), 1, 3)))
        if self.chance(2):
            self.input(())
        self.param()

    def loss(self) -> list[str]:
        """The loss and some gradients of it; the names to return."""
        floats = [n for n, v in self.visible() if kind_of(v) == "f"]
        made = [n for n in floats if n in self.names] or floats
        terms = [self.term(n) for n in self.some(made[-6:], 1, 3)]
        terms += [
            self.term(n) for n in self.some([n for n in self.params if n not in self.hidden], 1, 2)
        ]
        value = self.made(
            " + ".join(t.text for t in terms),
            lambda env: nt.pointwise(added, *(t.run(env) for t in terms)),
        )
        self.lines.append(f"loss = {value.text}")

        def step(env: Env) -> None:
            env["loss"] = value.run(env)

        self.do(step)
        outputs = ["loss", *self.some(made, 0, 3)]
        self.local = set(self.env)
        try:
            outputs += self.take(self.name("loss"), self.targets(self.name("loss"), 1, 4))
        except Unfit:
            pass
        return list(dict.fromkeys(outputs))

    def term(self, name: str) -> Expr:
        forms: list[tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = [
            ("mean({0})", lambda t: t.mean()),
            ("sum(tanh({0}))", lambda t: t.tanh().sum()),
            ("mean({0} * {0})", lambda t: (t * t).mean()),
            ("0.01 * sum({0})", lambda t: 0.01 * t.sum()),
            ("mean(tanh({0})^2)", lambda t: (t.tanh() ** 2).mean()),
        ]
        form, f = self.rng.choice(forms)
        return self.made(form.format(name), lambda env: Named(f(env[name].data), ()))

    def program(self) -> Program:
        self.begin()
        for _ in range(self.rng.randint(3, 10)):
            self.attempt()
        outputs = self.loss()
        optimizer = self.rng.choice(OPTIMIZERS)
        options = dict(optimizer)
        kind = options.pop("kind")
        listed = ", ".join(f"{k}={str(v).lower()}" for k, v in options.items())
        body = [*self.lines, f"return {', '.join(outputs)}", f"minimize loss with {kind}({listed})"]
        dims = "".join(f"dim {d} = {n}\n" for d, n in self.sizes.items() if not d.startswith("n"))
        text = dims + self.derived + "".join(self.functions.values())
        text += f"program p({', '.join(self.header)}) {{\n"
        text += "".join("  " + line.replace("\n", "\n  ") + "\n" for line in body) + "}\n"
        used = {n: v for n, v in self.params.items()}
        stated = {n: d for n, d in self.stated.items() if n not in self.reassigned}
        mesh = self.rng.choice(MESHES)
        sbp = self.chance(2.5)
        rules = self.annotations(mesh, stated) if sbp else self.layout(mesh)
        policy = self.rng.choice(("optimal", "deferred", "immediate", "mesh-tf", "deferred"))
        message = self.rng.choice((None, None, 0))
        return Program(
            text, self.steps, self.inputs, used, outputs, stated, optimizer, mesh, rules, sbp,
            policy, message,
        )  # fmt: skip

    # --- placements ----------------------------------------------------------------------------

    def layout(self, mesh: str) -> str:
        axes = axes_of(mesh)
        rules: dict[tuple[str, str], str] = {}
        for axis, size in axes.items():
            chosen: list[str] = []
            for d in self.some([d for d, n in self.sizes.items() if n % size == 0], 1, 5):
                meets = any({d, c} <= t for c in chosen for t in self.together)
                if not meets and d not in self.looped and ("", d) not in rules:
                    chosen.append(d)
                    rules["", d] = axis
        if len(axes) > 1 and self.chance(3):
            self.several(axes, rules)
        selectors = [
            "params",
            "params",
            "grads",
            "state",
            *self.functions,
            *self.names,
            *self.params,
        ]
        selectors += [f"d_{n}" for n in (*self.params, *self.names[-3:])]
        for _ in range(self.rng.randint(0, 3)):
            key = self.rng.choice(selectors), self.rng.choice(list(self.sizes))
            size = self.sizes[key[1]]
            fits = [a for a, n in axes.items() if size % n == 0]
            rules[key] = self.rng.choice([*fits, "none"])
        return "{ " + ", ".join(self.rule(s, d, a) for (s, d), a in rules.items()) + " }"

    def rule(self, selector: str, dim: str, axis: str) -> str:
        keep = " keep" if selector == "params" and axis != "none" and self.chance(4) else ""
        return f"{selector}: {dim} -> {axis}{keep}" if selector else f"{dim} -> {axis}"

    def several(self, axes: dict[str, int], rules: dict[tuple[str, str], str]) -> None:
        """Split one dim over several axes, which then split no other."""
        chosen = self.some(list(axes), 2, 3)
        ways = math.prod(axes[a] for a in chosen)
        wide = [d for d, n in self.sizes.items() if n % ways == 0 and d not in self.looped]
        if wide:
            for key in [key for key, axis in rules.items() if axis in chosen]:
                del rules[key]
            rules["", self.rng.choice(wide)] = f"({', '.join(chosen)})"

    def annotations(self, mesh: str, stated: dict[str, Dims]) -> str:
        """The entries of an `sbp` block."""
        axes = axes_of(mesh)
        names = [n for n in stated if n in self.params or n in self.inputs or n in self.names]
        entries = []
        for name in self.some(names, 1, 5):
            found = self.components(stated[name], axes, name in self.inputs or name in self.params)
            entries.append(f"{name}: ({', '.join(found)})")
        return "{ " + ", ".join(entries) + " }"

    def components(self, dims: Dims, axes: dict[str, int], given: bool) -> list[str]:
        left = {i: self.sizes[d] for i, d in enumerate(dims)}
        found = []
        for size in axes.values():
            fits = [i for i, n in left.items() if n % size == 0]
            kind = self.rng.random()
            if fits and kind < 0.6:
                index = self.rng.choice(fits)
                left[index] //= size
                found.append(f"S({index})")
            else:
                found.append("P" if kind > 0.85 else "B")
        return found


KINDS = {
    "unary": 5, "safe": 5, "binary": 8, "larger": 1, "chosen": 3, "stopped": 1, "reduction": 4,
    "normalised": 4, "norm": 3, "shift": 1.5, "einsum": 8, "view": 8, "concatenated": 3,
    "padded": 1, "broadcast": 2, "lookup": 4, "best": 1, "encoded": 1, "cross_entropy": 1,
    "scaled_by_integer": 0.5,
}  # fmt: skip

OPTIMIZERS: tuple[dict[str, object], ...] = (
    {"kind": "sgd", "lr": 1.0},
    {"kind": "sgd", "lr": 1.0},
    {"kind": "sgd", "lr": 1.0, "accumulate": 2},
    {"kind": "sgd", "lr": 0.5, "clip": 0.3, "weight_decay": 0.1},
    {"kind": "sgd", "lr": 1.0, "clip": 1.0, "accumulate": 3},
    {"kind": "momentum", "lr": 0.5, "weight_decay": 0.1, "nesterov": True},
    {"kind": "momentum", "lr": 1.0, "beta": 0.5, "accumulate": 2, "clip": 0.5},
    {"kind": "momentum", "lr": 0.2},
    {"kind": "adam", "lr": 0.1, "eps": 1.0, "weight_decay": 0.1},
    {"kind": "adamw", "lr": 0.1, "eps": 1.0, "clip": 0.5, "accumulate": 2},
)

MESHES = (
    "x:2", "x:2", "x:4", "x:1", "x:2,y:2", "x:2,y:2", "x:2,y:4", "x:4,y:2", "y:2,x:1", "x:1,y:4",
    "x:2,y:2,z:2", "z:2,y:1,x:4", "y:1,x:2,z:2",
)  # fmt: skip


def added(*tensors: torch.Tensor) -> torch.Tensor:
    return functools.reduce(torch.add, tensors)


def axes_of(mesh: str) -> dict[str, int]:
    return {a: int(n) for a, n in (part.split(":") for part in mesh.split(","))}


def kind_of(x: Named) -> str:
    if x.data.is_floating_point():
        return "f"
    return "b" if x.data.dtype == torch.bool else "i"


def inside(env: Env, dim: str, index: int) -> Env:
    """What a turn of a loop sees: slices of what has its dim."""
    return {n: nt.picked(v, dim, index) if dim in v.dims else v for n, v in env.items()}


def random_program(seed: int) -> Program:
    """The program of a seed; seeds of which none comes stand for the next one."""
    for attempt in range(100):
        try:
            return Writer(random.Random(seed * 1000 + attempt)).program()
        except (Unfit, nt.Corner):
            continue
    raise AssertionError(seed)


# --- what one device would find --------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """Outputs and gradients of one step, by name."""

    outputs: Env
    updated: Env
    states: Env


def answer(program: Program, noise: float = 0.0) -> Answer:
    """The step of `program`, by torch. Raises Corner where rounding would decide."""
    generator = torch.Generator().manual_seed(0)

    def moved(data: torch.Tensor) -> torch.Tensor:
        if not data.is_floating_point() or not noise:
            return data.detach().clone()
        drawn = torch.randn(data.shape, generator=generator, dtype=data.dtype)
        return data.detach() * (1 + noise * drawn)

    params = {n: Named(moved(v.data).requires_grad_(), v.dims) for n, v in program.params.items()}
    leaves = [v.data for v in params.values()]
    total: list[torch.Tensor | None] = [None] * len(leaves)
    batches = []
    for batch in range(program.accumulate):
        env = dict(params)
        for name, v in program.inputs.items():
            one = moved(v.data[batch])
            one.requires_grad_(one.is_floating_point())
            env[name] = Named(one, v.without("accumulate"))
        for step in program.steps:
            step(env)
        found = torch.autograd.grad(env["loss"].data, leaves, allow_unused=True, retain_graph=True)
        for i, g in enumerate(found):
            if g is not None:
                old = total[i]
                total[i] = g.detach() if old is None else old + g.detach()
        batches.append(
            {n: Named(env[n].data.detach().clone(), env[n].dims) for n in program.outputs}
        )
    outputs = batches[0]
    if program.accumulate > 1:
        outputs = {n: gathered_up([b[n] for b in batches]) for n in program.outputs}
    for leaf, summed in zip(leaves, total, strict=True):
        leaf.grad = None if summed is None else summed / program.accumulate
    return Answer(outputs, *stepped(params, program.optimizer))


def gathered_up(of: list[Named]) -> Named:
    """What a step of several batches returns: the mean of numbers, tensors one after the other."""
    data = torch.stack([v.data for v in of])
    return Named(data, ("accumulate", *of[0].dims)) if of[0].dims else Named(data.mean(0), ())


def stepped(params: Env, optimizer: dict[str, object]) -> tuple[Env, Env]:
    """Parameters and states after torch's own step with the gradients that they have."""
    options = {k: v for k, v in optimizer.items() if k not in ("kind", "accumulate")}
    trained = {n: v for n, v in params.items() if v.data.grad is not None}
    leaves = [v.data for v in trained.values()]
    if clip := options.pop("clip", None):
        torch.nn.utils.clip_grad_norm_(leaves, float(str(clip)))
    kind = optimizer["kind"]
    made: torch.optim.Optimizer
    if kind in ("sgd", "momentum"):
        if kind == "momentum":
            options["momentum"] = options.pop("beta", 0.9)
        made = torch.optim.SGD(leaves, **options)  # type: ignore[arg-type]
    else:
        made = (torch.optim.Adam if kind == "adam" else torch.optim.AdamW)(leaves, **options)  # type: ignore[arg-type]
    made.step()
    keys = {"momentum": {"momentum_buffer": "v"}, "sgd": {}}.get(
        str(kind), {"exp_avg": "m", "exp_avg_sq": "v"}
    )
    states = {
        f"{n}.{to}": Named(made.state[v.data][key], v.dims)
        for n, v in trained.items()
        for key, to in keys.items()
    }
    return {n: Named(v.data.detach(), v.dims) for n, v in params.items()}, states
