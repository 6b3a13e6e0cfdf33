"""The sensitivity of a result to rounding: the size of the terms that cancel on the way to it.

A gradient may be 0 because large terms cancel (that of a bias before a normalisation is). Computed
in floats it is as large as the rounding errors of these terms, to which its own size is no guide.
So the reference is recomputed with every result, and every term of a sum, randomly rounded up or
down. The change, divided by the roundoff, is the size that errors are measured against.
(Stochastic arithmetic: Vignes 1993; Parker 1997.) Where nothing cancels it is about the result's
own. Equal operations on equal numbers are rounded alike: ties stay ties.

An update may amplify a small error: the first step of Adam depends on the sign of the gradient.
So it is recomputed with gradients that are off by as much as is allowed.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import field
from typing import Any

import numpy as np
import numpy.typing as npt

from meshdsl.backends.engines.reference import Values, answer_of, applied, evaluated, run_nodes
from meshdsl.backends.runtime.values import Array
from meshdsl.ir.types import DType
from meshdsl.named.expand import expand
from meshdsl.named.ir import NamedOp, NamedProgram, Node, Value, walk
from meshdsl.ops.opdef import Signature, lookup
from meshdsl.records import dataclass

TOLERANCES = {"f64": 1e-12, "f32": 1e-5, "f16": 4e-3, "bf16": 3e-2, "e4m3": 0.125, "e5m2": 0.25}
"""The largest legal ratio of an error to its measure, by the coarsest float dtype computed with.

In 8 bits a number beside a tie becomes either neighbour: an eighth apart, in e5m2 a quarter.
"""

RUNS = 8
"""Random runs: so many that an error is hardly ever small by chance in all of them."""


class Sensitivity:
    """The sizes of what cancels in every element of a result: 0 at first, grown by each run.

    `values` are those of the reference on the given inputs; `tolerance` is that of floats.
    """

    def __init__(
        self,
        program: NamedProgram,
        inputs: Mapping[str, Array],
        params: Mapping[str, Array],
        states: Mapping[str, Array],
        values: Values,
        tolerance: float,
    ) -> None:
        self.program, self.begun = program, (inputs, params, states)
        self.tolerance, self.runs = tolerance, 0
        self.update = Tail.of(program, values)
        outputs, updated = answer_of(program, values)
        self.outputs, self.updated = _Sizes(outputs), _Sizes(updated)
        self.gradients = _Sizes({v: values[v] for v in self.update.gradients})

    def grow(self) -> None:
        """Recompute the result with rounding errors, and the update with wrong gradients."""
        moved = evaluated(self.program, *self.begun, Rounding(self.runs))
        self.runs += 1
        outputs, updated = answer_of(self.program, moved)
        for sizes, arrays in ((self.outputs, outputs), (self.updated, updated)):
            sizes.grow(arrays, roundoff(self.tolerance))
        self.gradients.grow(moved, roundoff(self.tolerance))
        for sign in (1, -1):
            off = {
                v: exact + sign * self.tolerance * self.gradients.measure(v)
                for v, exact in self.gradients.exact.items()
            }
            self.updated.grow(self.update.again(off), self.tolerance / 2)


class _Sizes(dict[Any, Array]):
    """The sizes for some exact arrays."""

    def __init__(self, exact: Mapping[Any, Array]) -> None:
        super().__init__({key: np.zeros(array.shape) for key, array in exact.items()})
        self.exact = exact

    def grow(self, moved: Mapping[Any, Array], unit: float) -> None:
        """Grow by how far floats have moved, in `unit`s; non-finite ones count as unmoved."""
        for key, exact in self.exact.items():
            if exact.dtype.kind == "f":
                with np.errstate(all="ignore"):
                    size = np.nan_to_num(np.abs(moved[key] - exact) / unit, posinf=0.0)
                self[key] = np.maximum(self[key], size)

    def measure(self, key: Any) -> Array:
        """The measure of an array's errors: its maximum, or the size of what cancels."""
        finite = self.exact[key][np.isfinite(self.exact[key])]
        most = np.max(np.abs(finite), initial=0.0)
        return np.asarray(np.maximum(self[key], most))


@dataclass(frozen=True, slots=True)
class Tail:
    """The update at the end of a program and its operands: `gradients` are computed before.

    Among what is read are the states that the program has assigned.
    """

    program: NamedProgram
    nodes: tuple[Node, ...]
    reads: Values
    gradients: tuple[Value, ...]

    @classmethod
    def of(cls, program: NamedProgram, values: Values) -> Tail:
        """The update of a program whose values are known."""
        nodes = tuple(node for node in program.body if node.phase == "update")
        results = {v for node in nodes for v in node.makes}
        begun = {*(p.value for p in program.params), *(s.value for s in program.states)}
        read = dict.fromkeys(v for op in walk(nodes) for v in op.ins if v not in results)
        floats = (v for v in read if v not in begun and v.type.dtype.kind == "float")
        assigned = (u.new for u in program.updates if u.new not in results)
        reads = {v: values[v] for v in (*read, *assigned)}
        return cls(program, nodes, reads, tuple(floats))

    def again(self, changed: Values) -> dict[str, Array]:
        """The updated parameters and states, with some values `changed`."""
        values = self.reads | changed
        with np.errstate(all="ignore"):
            run_nodes(self.nodes, values, applied)
        return {str(u.old.name): values[u.new] for u in self.program.updates}


def roundoff(tolerance: float) -> float:
    """The largest power of 1/2 that is an eighth of a tolerance, or just above."""
    return 2.0 ** -int(math.log2(8 / tolerance))


# --- rounding by chance -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rounding:
    """Applies operators as `applied` does, with random rounding; `run` is part of its seed.

    A composite is computed by its definition, in several steps. An updated parameter is not
    rounded: its size is that of the step.
    """

    run: int
    definitions: dict[NamedOp, tuple[NamedOp, ...]] = field(default_factory=dict)

    def __call__(self, op: NamedOp, ins: tuple[Array, ...]) -> tuple[Array, ...]:
        """The results of an operator."""
        values = dict(zip(op.ins, ins, strict=True))
        for step in self._steps(op):
            results = self._applied(step, tuple(values[v] for v in step.ins))
            values.update(zip(step.outs, results, strict=True))
        return tuple(values[v] for v in op.outs)

    def _steps(self, op: NamedOp) -> tuple[NamedOp, ...]:
        if not lookup(op.name).composite or op.outs[0].type.dtype.kind != "float":
            return (op,)
        if op not in self.definitions:
            expansion = expand(op, {})
            assert expansion is not None, f"{op.name} has no definition"
            self.definitions[op] = expansion.ops
        return self.definitions[op]

    def _applied(self, op: NamedOp, ins: tuple[Array, ...]) -> tuple[Array, ...]:
        salt, opdef = 64 * zlib.crc32(op.name.encode()) + (self.run << 40), lookup(op.name)
        shakes = _adds_up(op)
        if shakes:
            pairs = zip(ins, op.ins, strict=True)
            ins = tuple(_shaken(x, v.type.dtype, salt + i) for i, (x, v) in enumerate(pairs))
        results = applied(op, ins)
        if opdef.view or opdef.overwrites:
            return results
        rounded = (
            _rounded(x, v.type.dtype, salt + 63) for x, v in zip(results, op.outs, strict=True)
        )
        if shakes or not opdef.exact:
            return tuple(rounded)
        return tuple(_handed_on(x, y, ins) for x, y in zip(results, rounded, strict=True))


def _adds_up(op: NamedOp) -> bool:
    """Whether terms may cancel within the operator: it does arithmetic, linear in some operands."""
    opdef = lookup(op.name)
    sig = Signature(tuple(v.type for v in op.ins), tuple(v.type for v in op.outs), dict(op.attrs))
    if opdef.view or opdef.overwrites or any(t.dtype.kind != "float" for t in sig.outs):
        return False
    moves = opdef.flops is not None and opdef.flops(sig) == 0
    return not moves and bool(opdef.factors(sig).linear)


def _handed_on(made: Array, rounded: Array, ins: tuple[Array, ...]) -> Array:
    """`rounded`, but exact where an operator picks an operand's element, such as a maximum."""
    if made.dtype.kind != "f":
        return made
    operands = np.concatenate([np.zeros(0), *(x.ravel() for x in ins if x.dtype.kind == "f")])
    return np.where(np.isin(made, operands), made, rounded)


def _shaken(x: Array, dtype: DType, salt: int) -> Array:
    """`x` with a random error of up to a roundoff in every element."""
    if dtype.kind != "float":
        return x
    error = 2 * roundoff(TOLERANCES[dtype.name]) * _chance(x, salt)
    return np.asarray(x * (1 + error))


def _rounded(x: Array, dtype: DType, salt: int) -> Array:
    """`x` with every element randomly rounded to one of two neighbours, a roundoff apart."""
    if dtype.kind != "float":
        return x
    unit = roundoff(TOLERANCES[dtype.name])
    fraction, exponent = np.frexp(x)
    digits = np.rint(fraction / unit + _chance(x, salt))
    return np.asarray(np.ldexp(digits * unit, exponent))


def _chance(x: Array, salt: int) -> Array:
    """Numbers from -0.5 to 0.5, the same where elements of `x` are (splitmix64 of their bits)."""
    bits = np.ascontiguousarray(x).view(np.uint64).reshape(x.shape)
    with np.errstate(over="ignore"):
        z: npt.NDArray[np.uint64] = bits + np.uint64(salt) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray((z >> np.uint64(11)) * 2.0**-53 - 0.5)
