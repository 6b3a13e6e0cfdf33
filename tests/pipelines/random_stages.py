"""Random pipelines: what is around the loop has its dim, kept and contracted; any schedule."""

from __future__ import annotations

import random
from dataclasses import dataclass

BATCH, LAYERS = 8, 4
SIZES = {"b": BATCH, "l": LAYERS, "m": 4, "k": 2}
SCHEDULES = (
    "naive gpipe one_f_one_b eager zb_h1 zb_h2 interleaved breadth_first zb_v dualpipe_v chimera "
    "dualpipe hanayo"
).split()
MESHES = {"pipe:2": "", "d:2,pipe:2": "b -> d", "pipe:2,tp:2": "m -> tp"}
OPTIMIZERS = ("sgd(lr=0.1", "momentum(lr=0.1", "adamw(lr=0.01", "adamw(lr=0.01, clip=0.3")


@dataclass(frozen=True)
class Pipelined:
    """A program, and a layout of it."""

    text: str
    mesh: str
    rules: str
    use: str


class _Writer:
    """Writes statements on tensors, of which it knows the dims."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.params: list[str] = []
        self.count = 0

    def some(self, names: str, least: int = 1) -> tuple[str, ...]:
        count = self.rng.randint(least, len(names))
        return tuple(self.rng.sample(names, count))

    def param(self, dims: tuple[str, ...]) -> str:
        self.count += 1
        name = f"p{self.count}"
        self.params.append(f"param {name}[{', '.join(dims)}]")
        return name

    def factor(self, dims: tuple[str, ...]) -> str:
        """A tensor with just these dims, of parameters and the input that has no batch."""
        rng, kind = self.rng, self.rng.randrange(8)
        whole = ", ".join(dims)
        more = tuple(d for d in "lmk" if d not in dims)
        if kind < 2 or not dims:
            return self.param(dims)
        if kind == 2 and more:  # contracted away
            other = rng.choice(more)
            return f"einsum({self.param((*dims, other))}, {self.param((other,))} -> [{whole}])"
        if kind == 3 and more:
            other = rng.choice(more)
            return f"mean[{other}]({self.param((other, *dims))} * 0.7)"
        if kind == 4:
            along = rng.choice(dims)
            if along != "l":
                how = rng.choice((f"cumsum[{along}]", f"reverse[{along}]"))
                return f"{how}({self.param(dims)})"
        if kind == 5 and "m" in dims:
            rest = tuple(d for d in dims if d != "m")
            return f"{self.param(dims)} * einsum(y, {self.param(('k', *rest))} -> [{whole}])"
        if kind == 6:
            return f"tanh({self.param(dims)})"
        return f"{self.param(dims)} + {self.param(self.some(''.join(dims)))} * 0.5"

    def program(self, optimizer: str) -> str:
        rng = self.rng
        before, outside = [], []
        for number in range(rng.randint(1, 3)):
            dims = tuple(dict.fromkeys((*(("l",) if rng.random() < 0.6 else ()), *self.some("mk"))))
            before.append(f"a{number} = {self.factor(dims)}")
            outside.append((f"a{number}", tuple(d for d in dims if d != "l")))
        if rng.random() < 0.3:
            before.append(f"x = x * {self.factor(('m',))}")
        inside = ["param w[m]"]
        terms = ["x * w"]
        for name, dims in outside:
            read = name if "k" not in dims else f"sum[k]({name})"
            terms.append(f"{rng.choice((0.3, 0.7))} * {read}")
        inside.append(f"x = tanh({' + '.join(rng.sample(terms, len(terms)))})")
        loss = ["mean(square(x - t))"]
        if rng.random() < 0.4:
            loss.append(f"0.1 * mean(square({rng.choice(outside)[0]}))")
        if rng.random() < 0.3:
            loss.append(f"0.1 * sum(square({self.factor(self.some('lm'))}))")
        if rng.random() < 0.3:
            loss.append("0.01 * sum(square(w))")
        lines = [*self.params, *before, "repeat l {", *(f"  {line}" for line in inside), "}"]
        lines += [f"loss = {' + '.join(loss)}", "return loss", f"minimize loss with {optimizer}"]
        body = "\n".join(f"  {line}" for line in lines)
        sizes = ", ".join(f"{name} = {size}" for name, size in SIZES.items())
        return f"dim {sizes}\nprogram p(x[b, m], t[b, m], y[m, k]) {{\n{body}\n}}\n"


def pipelined(seed: int) -> Pipelined:
    """The program of a seed, under a layout of its own."""
    rng = random.Random(seed)
    accumulates = rng.random() < 0.4
    optimizer = rng.choice(OPTIMIZERS) + (", accumulate=2)" if accumulates else ")")
    text = _Writer(rng).program(optimizer)
    mesh = rng.choice([*MESHES])
    rules = ["l -> pipe", *filter(None, [MESHES[mesh]])]
    if "d:2" in mesh and rng.random() < 0.4:
        rules.append(rng.choice(("params: m -> d", "grads: m -> d", "state: m -> d")))
    name = rng.choice(SCHEDULES)
    options = ["2" if rng.random() < 0.7 else "4"] if not accumulates else []
    options += ["reduce=each"] * (rng.random() < 0.3)
    use = f"with {name}{'' if accumulates else '[b]'}" + (
        f"({', '.join(options)})" if options else ""
    )
    return Pipelined(text, mesh, ", ".join(rng.sample(rules, len(rules))), use)
