"""A program with its vector-Jacobian product, for a loss that is computed elsewhere.

The cotangents of the outputs are more inputs, the gradients of parameters and inputs are more
outputs. (The names are JAX's; Griewank and Walther 2008 call it the reverse mode.)
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from meshdsl.diagnostics import Diagnostics
from meshdsl.ir.program import Origin
from meshdsl.named.activity import active
from meshdsl.named.autodiff import pulled_back
from meshdsl.named.builder import Builder
from meshdsl.named.emit import Emit, emit_at
from meshdsl.named.ir import NamedProgram, Output, Value
from meshdsl.named.passes import simplify
from meshdsl.named.verify import verify
from meshdsl.records import dataclass


@dataclass(frozen=True, slots=True)
class Vjp:
    """A program with its vector-Jacobian product.

    The last inputs of `program` are the cotangents of the outputs `cotangents`, by name; its last
    outputs are the gradients of `params`, and then those of `inputs`.
    """

    program: NamedProgram
    cotangents: tuple[str, ...]
    params: tuple[str, ...]
    inputs: tuple[str, ...]


def with_vjp(program: NamedProgram, params: Collection[str], inputs: Collection[str]) -> Vjp:
    """The program with the gradients of the float parameters and inputs that are named.

    Those that no output depends on have none; outputs that depend on none of them have none either.
    """
    assert not program.updates, "a training step is not differentiated again"
    builder = Builder(Diagnostics())
    builder.adopt(program)
    learned = [p.value for p in program.params if _is_wanted(p.value, p.value.name, params)]
    wanted_inputs = [v for v in program.inputs if _is_wanted(v, v.label, inputs)]
    reached = active(program.body, {*learned, *wanted_inputs})
    outputs = tuple(_computed(builder, o) if o.value in reached else o for o in program.outputs)
    reached = active(builder.frames[0].body, {*learned, *wanted_inputs})
    seeds = [(o, _cotangent(builder, o.value)) for o in outputs if o.value in reached]
    grads = pulled_back(builder, [(o.value, seed) for o, seed in seeds], [*learned, *wanted_inputs])
    names = [v.name or "" for v in learned] + [v.label for v in wanted_inputs]
    results = []
    taken: set[Value] = set()
    for name, value, grad in zip(names, [*learned, *wanted_inputs], grads, strict=True):
        if grad is not None:
            own_grad = grad if value.role == "param" else _own(builder, grad, value, taken)
            results.append((name, value, own_grad))
            taken.add(grad)
    extended = replace(
        program,
        inputs=(*program.inputs, *(seed for _, seed in seeds)),
        body=tuple(builder.frames[0].body),
        outputs=(*outputs, *(Output(f"d_{name}", grad, v.span) for name, v, grad in results)),
    )
    verify(extended)
    extended = simplify(extended)
    verify(extended)
    by_param, by_input = (
        tuple(name for name, v, _ in results if (v.role == "param") is is_param)
        for is_param in (True, False)
    )
    return Vjp(extended, tuple(o.name for o, _ in seeds), by_param, by_input)


def _is_wanted(value: Value, name: str | None, names: Collection[str]) -> bool:
    return value.type.dtype.kind == "float" and name in names


def _computed(builder: Builder, output: Output) -> Output:
    """The output; for a returned gradient, a value of its own.

    A stored gradient and a computed one differ in placement, and a cotangent has its output's.
    """
    value = output.value
    if value.role != "grad":
        return output
    fields = {"rules_from": value.rules_from, "name": value.name}
    return replace(output, value=emit_at(builder, value, fields)("identity", value))


def _cotangent(builder: Builder, value: Value) -> Value:
    """The cotangent of an output as an input: it has the placement of the output."""
    named = value.source.as_gradient
    fields = {**named, "name": named["name"] or "d_out", "role": "input"}
    cotangent = Value(value.type, value.span, **fields)
    builder.place(cotangent, 0)
    return cotangent


def _own(builder: Builder, grad: Value, value: Value, taken: set[Value]) -> Value:
    """The gradient of an input, made a value of its own with the placement of the input."""
    if grad.rules_from is value and grad.role == "activation" and grad not in taken:
        return grad
    about = value.as_gradient, Origin(value), "backward"
    return Emit(builder, grad.span, value, *about)("identity", grad)
