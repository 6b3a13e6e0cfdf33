"""The reference engine: the unsharded result, floats in float64, integers and booleans exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from meshdsl.backends.engines.failures import Failure, RunError, as_error
from meshdsl.backends.runtime.indices import DividedByZero, IndexOutOfRange, TooManyRows
from meshdsl.backends.runtime.values import Array, Part, Spec, cast, draw_part, local_part
from meshdsl.ir.types import TensorType
from meshdsl.named.ir import NamedLoop, NamedOp, NamedProgram, Node, State, Value
from meshdsl.ops.opdef import NumpyCall, lookup

Values = dict[Value, Array]
Apply = Callable[[NamedOp, tuple[Array, ...]], tuple[Array, ...]]
"""A function that applies an operator to the values of its operands."""
Slices = dict[Value, dict[int, Array]]
"""What a loop collects, by the index of the iteration."""


def run_reference(
    program: NamedProgram, inputs: Mapping[str, Array], params: Mapping[str, Array]
) -> dict[str, Array]:
    """The outputs of a named program on one device; `inputs` and `params` are complete.

    Raises RunError on an index out of range.
    """
    return reference_step(program, inputs, params, {})[0]


def reference_step(
    program: NamedProgram,
    inputs: Mapping[str, Array],
    params: Mapping[str, Array],
    states: Mapping[str, Array],
) -> tuple[dict[str, Array], dict[str, Array]]:
    """The outputs, and the parameters and states after a training step, by their names.

    A state that is not in `states` begins as in the first step.
    """
    return answer_of(program, evaluated(program, inputs, params, states))


def answer_of(program: NamedProgram, values: Values) -> tuple[dict[str, Array], dict[str, Array]]:
    """The outputs, and the updated parameters and states, by their names."""
    updated = {str(u.old.name): values[u.new] for u in program.updates}
    return {output.name: values[output.value] for output in program.outputs}, updated


def evaluated(
    program: NamedProgram,
    inputs: Mapping[str, Array],
    params: Mapping[str, Array],
    states: Mapping[str, Array],
    apply: Apply | None = None,
) -> Values:
    """All values outside of loops; `apply` replaces `applied`, which is exact."""
    values: Values = {v: widened(inputs[v.label], v.type) for v in program.inputs}
    values |= begun(program, params, states)
    with computing():
        run_nodes(program.body, values, apply or applied)
    return values


@contextmanager
def computing() -> Iterator[None]:
    """As torch computes: infinities and NaN without a warning. Raises RunError."""
    try:
        with np.errstate(all="ignore"):
            yield
    except (IndexOutOfRange, DividedByZero, TooManyRows) as error:
        code, message, details = as_error(Failure(0, type(error).__name__, str(error)), None)
        details |= {"place": error.place, "device": None}
        raise RunError(code, message, **details) from error


def begun(
    program: NamedProgram, params: Mapping[str, Array], states: Mapping[str, Array]
) -> Values:
    """Parameters and states before a step."""
    values: Values = {}
    for param in program.params:
        assert param.value.name, "a parameter has a name"
        values[param.value] = widened(params[param.value.name], param.value.type)
    for state in program.states:
        values[state.value] = _begun(state, states, values)
    return values


def _begun(state: State, states: Mapping[str, Array], values: Values) -> Array:
    """A state as given, or as before the first step."""
    name = str(state.value.name)
    if name in states:
        return widened(states[name], state.value.type)
    if state.is_copy:
        assert state.of is not None, "what is copied is a parameter"
        return values[state.of]
    return widened(np.zeros(state.value.type.shape), state.value.type)


def whole_specs(
    program: NamedProgram, draws: Mapping[Value, tuple[Any, ...]]
) -> tuple[dict[str, Spec], dict[str, Spec]]:
    """The inputs and the parameters by name, unsplit; `draws` is how each is drawn."""

    def spec(value: Value) -> Spec:
        dims = {dim.name: dim.size for dim in value.type.dims}
        return Spec(value.type.dtype.name, dims, {}, draws.get(value))

    inputs = {value.label: spec(value) for value in program.inputs}
    return inputs, {str(p.value.name): spec(p.value) for p in program.params}


def copy_specs(program: NamedProgram, draws: Mapping[Value, tuple[Any, ...]]) -> dict[str, Spec]:
    """The states that begin as copies of parameters, in a dtype of their own."""
    specs = {}
    for state in program.states:
        if state.is_copy and state.of is not None:
            dims = {dim.name: dim.size for dim in state.value.type.dims}
            key, dtype = str(state.of.name), state.value.type.dtype.name
            specs[str(state.value.name)] = Spec(dtype, dims, {}, draws.get(state.of), key)
    return specs


def made_up(
    specs: Mapping[str, Spec], arrays: Mapping[str, Any] | None = None, seed: int = 0
) -> dict[str, Array]:
    """Whole arrays for `specs`, in their dtypes: those of `arrays`, and drawn ones for the rest.

    The values are bit for bit those of the other engines.
    """
    return {
        name: block_values(name, spec, arrays or {}, seed, local_part(spec, {}, 0))
        for name, spec in specs.items()
    }


def block_values(name: str, spec: Spec, arrays: Mapping[str, Any], seed: int, part: Part) -> Array:
    """One block of a tensor: of the given array, or drawn. Raises RunError."""
    key = spec.key or name
    if key not in arrays:
        return draw_part(spec, name, seed, part)
    try:
        values = np.asarray(arrays[key][part])
        # Arrays of files have dtypes of the language; numpy's are no text (its "f16" has 16 bytes).
        is_same = isinstance(dtype := arrays[key].dtype, str) and dtype == spec.dtype
        return values if is_same else cast(values, spec.dtype)
    except ValueError as error:
        raise RunError("MD0501", f"{name}: {error}") from None


def widened(array: Array, type_: TensorType) -> Array:
    """`array` in the dtype the reference computes in; its shape must be that of `type_`."""
    assert array.shape == type_.shape, f"{array.shape} where {type_} has {type_.shape}"
    dtype = np.float64 if type_.dtype.kind == "float" else type_.dtype.numpy
    return np.asarray(array, dtype)


def run_nodes(nodes: tuple[Node, ...], values: Values, apply: Apply) -> None:
    """Add the results of the nodes to `values`."""
    for node in nodes:
        if isinstance(node, NamedLoop):
            _repeat(node, values, apply)
        else:
            results = apply(node, tuple(values[v] for v in node.ins))
            values.update(zip(node.outs, results, strict=True))


def applied(op: NamedOp, ins: tuple[Array, ...]) -> tuple[Array, ...]:
    """The results of an operator, by its numpy meaning."""
    call = NumpyCall(
        tuple(v.type for v in op.ins),
        tuple(v.type for v in op.outs),
        dict(op.attrs),
        place=f"{op.span.file}:{op.span.line}",
    )
    result = lookup(op.name).numpy(call, *ins)
    results = result if isinstance(result, tuple) else (result,)
    pairs = zip(op.outs, results, strict=True)
    return tuple(widened(np.asarray(array), value.type) for value, array in pairs)


def _repeat(loop: NamedLoop, values: Values, apply: Apply) -> None:
    def slice_of(outer: Value, index: int) -> Array:
        part: Array = values[outer].take(index, outer.type.index(loop.dim.name))
        return part

    enter(loop, values)
    slices: Slices = {}
    iterate(loop, range(loop.dim.size), values, apply, slice_of, slices)
    leave(loop, values)
    for item in loop.collected:
        values[item.outer] = np.stack([slices[item.outer][i] for i in range(loop.dim.size)])


def enter(loop: NamedLoop, values: Values) -> None:
    """Set what a loop carries to its first values."""
    values.update((carry.inside, values[carry.init]) for carry in loop.carries)


def iterate(
    loop: NamedLoop,
    indices: range,
    values: Values,
    apply: Apply,
    slice_of: Callable[[Value, int], Array],
    made: Slices,
) -> None:
    """Run the iterations with these indices, from the last one of a loop that is reversed.

    `slice_of` is the slice of a stack at an index; what the loop collects goes to `made`.
    """
    for index in reversed(indices) if loop.reverse else indices:
        for stack in loop.stacked:
            values[stack.inside] = slice_of(stack.outer, index)
        run_nodes(loop.body, values, apply)
        for item in loop.collected:
            made.setdefault(item.outer, {})[index] = values[item.inside]
        # All at once: a carried value may be the old value of another.
        carried = [values[carry.next] for carry in loop.carries]
        values.update(zip((c.inside for c in loop.carries), carried, strict=True))


def leave(loop: NamedLoop, values: Values) -> None:
    """Set the results of what a loop has carried through all of its iterations."""
    values.update((carry.result, values[carry.inside]) for carry in loop.carries)
