"""Random programs that are trained: those of `tests/programs`, with a loss and an optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from meshdsl.placed.place import POLICIES
from tests.programs.expressions import Draw, Tensor
from tests.programs.harness import Case
from tests.programs.strategy import MESHES, Writer, layout

# Smooth in the gradients: a rounding error in one that is 0 may not become a step of size 1.
OPTIMIZERS = (
    "sgd(lr=1.0)",
    "sgd(lr=0.5, clip=1.0)",
    "momentum(lr=0.1, nesterov=true, weight_decay=0.1)",
    "adam(lr=0.1, eps=1.0)",
    "adamw(lr=cosine(0.1, 100, warmup=2), eps=1.0, clip=0.5)",
    "adafactor(lr=0.1, eps1=1.0)",
    "sgd(lr=1.0, accumulate=2)",
    "adamw(lr=0.1, eps=1.0, accumulate=3, clip=1.0)",
)


@dataclass(slots=True)
class TrainedWriter(Writer):
    """Writes a program with a loss, gradients of some of its tensors, and `minimize`."""

    inside: bool = False

    def statement(self) -> None:
        if not self.inside and self.once_in(8):
            self.recompute()
        elif not self.inside and not self.loop and self.once_in(10):
            self.gradient()
        else:
            Writer.statement(self)

    def recompute(self) -> None:
        """A block of a few statements, loops among them."""
        outer, self.lines, self.inside = self.lines, [], True
        for _ in range(self.upto(3, 1)):
            Writer.statement(self)
        body, self.lines, self.inside = self.lines, outer, False
        self.lines.append("\n".join(["recompute {", *(f"    {b}" for b in body), "  }"]))

    def gradient(self) -> None:
        """A gradient as a tensor like any other; the loss depends on what it is taken by."""
        variables = [t for t in self.tensors if t.kind == "f" and t.text.isidentifier()]
        variable, value = self.pick(variables), self.pick(variables)
        name = f"t{self.count}"
        self.count += 1
        self.lines.append(
            f"{name} = grad(mean(tanh({value.text})) + sum(sin({variable.text})), {variable.text})"
        )
        self.names.append(name)
        bound = replace(variable, text=name, bound=float("inf"), size=max(64.0, variable.size))
        self.tensors.append(bound)

    def _text(self, returned: str) -> str:
        floats = [t for t in self.tensors if t.kind == "f"]
        inputs = [t for t in floats if t.text.startswith("x")]
        made = [t for t in floats if t.text.startswith("t")] or floats
        terms = [self._term(t) for t in self.some(made[-6:], 1, 3)]
        terms += [f"0.1 * mean({t.text})" for t in inputs]
        self.lines.append("param scale[] = ones()")
        self.lines.append(f"loss = scale * ({' + '.join(terms)})")
        wrt = self.some(inputs, 0, 2)
        if wrt:
            names = [f"d_{t.text}" for t in wrt]
            listed = ", ".join(t.text for t in wrt)
            self.lines.append(f"{', '.join(names)} = grad(loss, {listed})")
            returned = ", ".join([returned, *names])
        optimizer = self.pick(OPTIMIZERS)
        text = Writer._text(self, f"{returned}, loss")
        return f"{text.rstrip().removesuffix('}')}  minimize loss with {optimizer}\n}}\n"

    def _term(self, value: Tensor) -> str:
        """A number made of a tensor, small however large the tensor is."""
        form = self.pick(("mean({0})", "sum(tanh({0}))", "mean({0} * {0})", "0.01 * sum({0})"))
        if value.size > 100:
            form = "mean(tanh({0}))"
        return form.format(value.text)

    def selectors(self) -> list[str]:
        return ["params", "params", "grads", "state", *Writer.selectors(self)]


def kept(rules: str, at: Sequence[bool]) -> str:
    """The rules, with `keep` after some of those for parameters."""
    found = []
    for rule, keep in zip(rules.strip("{ }").split(", "), at, strict=False):
        stored = rule.startswith("params: ") and not rule.endswith("none")
        found.append(f"{rule} keep" if stored and keep else rule)
    return "{ " + ", ".join(found) + " }"


@st.composite
def trained(draw: Draw) -> Case:  # type: ignore[type-arg]
    """A program with `minimize` on a mesh under a layout and a policy."""
    mesh: str = draw(st.sampled_from(MESHES))
    sizes = {a: int(n) for a, _, n in (part.partition(":") for part in mesh.split(","))}
    writer = TrainedWriter(draw, sizes)
    text = writer.program()
    # `optimal` takes most of the time.
    policy: str = draw(st.sampled_from((*POLICIES, *POLICIES[:-1])))
    rules = kept(layout(writer), draw(st.lists(st.booleans(), min_size=16, max_size=16)))
    return Case(text, mesh, rules, policy)
