"""Random training programs, statement by statement, with a mesh, a layout or an `sbp` block."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tests.training import named_torch as nt
from tests.training.independent_expressions import (
    Env,
    Expr,
    Run,
    Step,
    Unfit,
    added,
    inside,
    kind_of,
)
from tests.training.independent_orders import Orders, ranked
from tests.training.named_torch import Dims, Named


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
class Writer(Orders):
    """Writes one program."""

    # --- statements ----------------------------------------------------------------------------

    def param(self, dims: Dims | None = None) -> Expr:
        if dims is None:
            dims = self.small(self.some(self.usable(), 0, 3))
        name = self.fresh("w")
        self.lines.append(f"param {name}[{', '.join(self.pinned(dims))}]")
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
            target = f"{name}[{', '.join(self.pinned(order))}]"
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
        if kind < 0.12 and len(self.loops) < 2:
            self.repeat()
        elif kind < 0.22:
            self.param()
        elif kind < 0.25 and not self.recomputing and not self.loops:
            self.recompute()
        elif kind < 0.33:
            self.attention()
        elif kind < 0.39:
            self.gradient()
        elif kind < 0.42:
            self.function()
        elif kind < 0.45:
            self.ranking()
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

    def ranking(self) -> None:
        """The greatest of a tensor, or all of it in order, and something at their indices."""
        x = self.tamed(self.operand(1, 1))
        dim = self.rng.choice(x.dims)
        largest = self.chance(1.5)
        count = self.rng.randint(1, self.sizes[dim]) if largest else self.sizes[dim]
        to = self.dim(count, x.sample.without(dim)) if largest else dim
        call = f"top_k[{dim} -> {to}]" if largest else f"sort[{dim}]"
        names = self.fresh("t"), self.fresh("i")
        values = self.made(
            f"{call}({x.text})", lambda env: ranked(x.run(env), dim, to, count, largest)[0]
        )
        self.lines.append(f"{', '.join(names)} = {values.text}")

        def step(env: Env) -> None:
            env.update(zip(names, ranked(x.run(env), dim, to, count, largest), strict=True))

        self.do(step)
        self.local.add(names[0])
        self.names.append(names[0])

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
        # What only a further iteration would read has no gradient in torch, and one of 0 in a loop.
        dims = [d for d in self.usable() if 2 <= self.sizes[d] <= 4]
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
            made = sorted(n for n in self.local if dim not in self.env[n].dims)
            stacks = self.some([n for n in made if n not in outer[0]], 0, 2)
        finally:
            self.env, self.lines, self.steps, self.local, self.names = outer
            self.stated = {n: d for n, d in self.stated.items() if n in stated or n in self.params}
            self.stated |= stated
            self.loops.pop()
        for name in self.params.keys() - params:
            self.hide(name)
        size = self.sizes[dim]

        def step(env: Env) -> None:
            state, turns = {n: env[n] for n in names}, []
            for index in range(size):
                turn = inside({**env, **state}, dim, index)
                for act in body:
                    act(turn)
                state = {n: turn[n] for n in names}
                turns.append(turn)
            for name in stacks:
                env[name] = nt.stacked([turn[name] for turn in turns], dim)
            # What a loop yields is a value of its own: in its last turn nothing depended on it.
            env.update({n: Named(v.data.view_as(v.data), v.dims) for n, v in state.items()})

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
        names = [n for n in names if self.env[n].data.requires_grad and n not in self.passed]
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
        # A gradient may be computed from values on the way (that of exp from its result) and from
        # another gradient. The language does not say what its gradient by such a value is.
        self.passed.update(made if len(made) > 1 else ())
        given = [n for n in self.env if n not in self.inputs and n not in self.params]
        self.passed.update(n for n in given if n not in made and self.is_beyond(n, targets))
        return made

    def is_beyond(self, name: str, targets: Dims) -> bool:
        """Whether a tensor depends on one of the targets, and is another one."""
        data = self.env[name].data
        if not data.requires_grad:
            return False
        leaves = [self.env[t].data for t in targets if self.env[t].data is not data]
        if not leaves:
            return False
        found = torch.autograd.grad(data.sum(), leaves, retain_graph=True, allow_unused=True)
        return any(g is not None for g in found)

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
        mesh = self.rng.choice(MESHES)
        sbp, self.uneven = self.chance(2.5), self.chance(2)
        if not sbp and self.chance(3):
            self.pinning = axes_of(mesh)
        self.begin()
        for _ in range(self.rng.randint(3, 12)):
            self.attempt()
        outputs = self.loss()
        optimizer = self.rng.choice(OPTIMIZERS)
        options = dict(optimizer)
        kind = options.pop("kind")
        if "accumulate" in options:
            options["each"] = self.chance(2)  # torch takes each batch separately
        listed = ", ".join(f"{k}={str(v).lower()}" for k, v in options.items())
        body = [*self.lines, f"return {', '.join(outputs)}", f"minimize loss with {kind}({listed})"]
        dims = "".join(f"dim {d} = {n}\n" for d, n in self.sizes.items() if not d.startswith("n"))
        text = dims + self.derived + "".join(self.functions.values())
        text += f"program p({', '.join(self.header)}) {{\n"
        text += "".join("  " + line.replace("\n", "\n  ") + "\n" for line in body) + "}\n"
        used = {n: v for n, v in self.params.items()}
        stated = {n: d for n, d in self.stated.items() if n not in self.reassigned}
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
            for d in self.some([d for d, n in self.sizes.items() if self.fits(n, size)], 1, 5):
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
            fits = [a for a, n in axes.items() if self.fits(size, n)]
            rules[key] = self.rng.choice([*fits, "none"])
        return "{ " + ", ".join(self.rule(s, d, a) for (s, d), a in rules.items()) + " }"

    def rule(self, selector: str, dim: str, axis: str) -> str:
        keep = " keep" if selector == "params" and axis != "none" and self.chance(4) else ""
        return f"{selector}: {dim} -> {axis}{keep}" if selector else f"{dim} -> {axis}"

    def several(self, axes: dict[str, int], rules: dict[tuple[str, str], str]) -> None:
        """Split one dim over several axes, which then split no other."""
        chosen = self.some(list(axes), 2, 3)
        ways = math.prod(axes[a] for a in chosen)
        sizes = [(d, n) for d, n in self.sizes.items() if d not in self.looped]
        wide = [d for d, n in sizes if self.fits(n, ways)]
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
            at = f" at {self.rng.choice(self.names)}" if self.names and self.chance(8) else ""
            entries.append(f"{name}{at}: ({', '.join(found)})")
        return "{ " + ", ".join(entries) + " }"

    def components(self, dims: Dims, axes: dict[str, int], given: bool) -> list[str]:
        left = {i: self.sizes[d] for i, d in enumerate(dims)}
        found = []
        for size in axes.values():
            fits = [i for i, n in left.items() if self.fits(n, size)]
            kind = self.rng.random()
            if fits and kind < 0.6:
                index = self.rng.choice(fits)
                left[index] = -(-left[index] // size)
                found.append(f"S({index})")
            else:
                found.append("P" if kind > 0.85 else "B")
        return found


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
    "x:2,y:2,z:2", "z:2,y:1,x:4", "y:1,x:2,z:2", "x:3", "x:3,y:2",
)  # fmt: skip


def axes_of(mesh: str) -> dict[str, int]:
    return {a: int(n) for a, n in (part.split(":") for part in mesh.split(","))}
