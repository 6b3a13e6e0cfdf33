"""The comparison of a run with the reference, tensor by tensor: outputs and updated tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from meshdsl.backends.engines.asynchronous_reference import Replay
from meshdsl.backends.engines.reference import Values, answer_of, begun, evaluated
from meshdsl.backends.engines.sensitivity import RUNS, TOLERANCES, Sensitivity
from meshdsl.backends.runtime.values import Array
from meshdsl.diagnostics import Diagnostic
from meshdsl.named.ir import NamedProgram, Value, walk
from meshdsl.records import dataclass

EPSILONS = {"f64": 2.0**-52, "f32": 2.0**-23, "f16": 2.0**-10, "bf16": 2.0**-7}
"""The distance of two numbers next to 1."""

STORED = 2
"""Roundings, in epsilons, of an update's stored result: after its decay, and after its step."""

Arrays = Mapping[str, Array]
NOTHING: Arrays = {}


@dataclass(frozen=True, slots=True)
class TensorComparison:
    """One tensor: `error` is max|Δ|, `relative` the largest Δ / measure; both 0 where equal.

    The measure of an output is max|ref|; of a parameter or state (`role`) its largest change,
    max|ref - before|, after its own rounding is taken off Δ; and where larger terms than that
    cancel in an element, their size. NaN and infinities must be at the same places with the same
    signs, or `error` is infinite.
    """

    name: str
    error: float
    relative: float
    tolerance: float
    role: str = "output"
    measure: str = "the maximum"

    @property
    def ok(self) -> bool:
        """Whether the error is within the tolerance."""
        return self.relative <= self.tolerance

    @property
    def said(self) -> str:
        """The tensor's name, for a message."""
        return f"`{self.name}`" if self.role == "output" else f"`{self.name}` after the step"


def problems(checked: Iterable[TensorComparison], whose: str = "") -> Iterator[Diagnostic]:
    """MD0708 for every tensor beyond its tolerance; `whose` follows its name."""
    for item in checked:
        if not item.ok:
            message = f"{item.said}{whose} differs by {item.relative:.1e} of {item.measure}"
            yield Diagnostic("MD0708", message, help=f"allowed is {item.tolerance:.0e}")


class Reference:
    """The reference's results on given values, and the comparison of others with them.

    States that are not in `states` begin as in the first step. `reduced` are dtypes that the
    program does not have, in which a layout adds up gradients: what is made of these may differ
    by as much as they round. Where stages update on the way, the results are those of the `replay`
    of their table.
    """

    def __init__(
        self,
        program: NamedProgram,
        inputs: Arrays,
        params: Arrays,
        states: Arrays = NOTHING,
        reduced: frozenset[str] = frozenset(),
        replay: Replay | None = None,
    ) -> None:
        self.program, self.inputs, self.params, self.states = program, inputs, params, states
        self.replay = replay
        self.tolerances = tolerances_of(program, reduced)
        self.tolerance = _tolerance(program, reduced)

    def allowing(self, reduced: frozenset[str]) -> Reference:
        """The same reference for a layout that adds up gradients in other dtypes."""
        arrays = (self.inputs, self.params, self.states)
        reference = Reference(self.program, *arrays, reduced, self.replay)
        reference.__dict__.update(answer=self.answer)
        if self.replay is None:
            reference.__dict__.update(values=self.values)
        return reference

    @functools.cached_property
    def values(self) -> Values:
        """All values of the program outside of its loops."""
        return evaluated(self.program, self.inputs, self.params, self.states)

    @functools.cached_property
    def answer(self) -> tuple[dict[str, Array], dict[str, Array]]:
        """The outputs, and parameters and states after the step."""
        if self.replay is not None:
            replayed = self.replay.step(self.inputs, self.params, self.states)
            return replayed.outputs, replayed.updated
        return answer_of(self.program, self.values)

    @functools.cached_property
    def sizes(self) -> Sensitivity:
        """The sizes of the terms that cancel on the way to the results."""
        given = (self.inputs, self.params, self.states)
        return Sensitivity(self.program, *given, self.values, self.tolerance)

    @functools.cached_property
    def before(self) -> dict[str, Array]:
        """Parameters and states before the step."""
        old = begun(self.program, self.params, self.states)
        return {str(update.old.name): old[update.old] for update in self.program.updates}

    def compare(
        self, outputs: Arrays, updated: Arrays, other: tuple[Arrays, Arrays] | None = None
    ) -> tuple[TensorComparison, ...]:
        """Compare outputs and updated tensors with the reference or with `other`.

        Updates are not compared where `updated` is empty.
        """
        expected, updated_values = (
            other or self.answer,
            [update.old for update in self.program.updates],
        )
        compared_outputs = [self._output(n, outputs[n], expected[0][n]) for n in self.answer[0]]
        return (
            *compared_outputs,
            *(self._kept(v, updated, expected[1]) for v in updated_values if updated),
        )

    def _output(self, name: str, found: Array, expected: Array) -> TensorComparison:
        def compared(measure: str, sizes: Array | None) -> TensorComparison:
            far = errors(found, expected, sizes=sizes)
            return TensorComparison(name, *far, self.tolerances[name], measure=measure)

        return self._by_what_cancels(compared, "the maximum", lambda: self.sizes.outputs[name])

    def _kept(self, value: Value, found: Arrays, expected: Arrays) -> TensorComparison:
        """The comparison of a parameter or a state, measured by its step."""
        name, dtype = str(value.name), value.type.dtype.name
        pair, old = (found[name], expected[name]), self.before[name]
        tolerance = self.tolerance if dtype in EPSILONS else 0.0
        slack = STORED * EPSILONS.get(dtype, 0.0)

        def compared(measure: str, sizes: Array | None) -> TensorComparison:
            far = errors(*pair, old, slack, sizes)
            return TensorComparison(name, *far, tolerance, value.role, measure)

        yardstick = "the largest change"
        return self._by_what_cancels(compared, yardstick, lambda: self.sizes.updated[name])

    def _by_what_cancels(
        self,
        compared: Callable[[str, Array | None], TensorComparison],
        own: str,
        sizes: Callable[[], Array],
    ) -> TensorComparison:
        """The comparison by `own` size or, if that fails, by what cancels, in few runs.

        What cancels in the course of a table is not followed.
        """
        comparison = compared(own, None)
        if self.replay is not None:
            return comparison
        if comparison.ok or not np.isfinite(comparison.error) or not comparison.tolerance:
            return comparison
        comparison = compared("what cancels there", sizes())
        while not comparison.ok and self.sizes.runs < RUNS:
            self.sizes.grow()
            comparison = compared("what cancels there", sizes())
        return comparison


def tolerances_of(program: NamedProgram, reduced: frozenset[str] = frozenset()) -> dict[str, float]:
    """The tolerance of every output: 0 for integers and booleans.

    That of gradients, and of what is made of them, is that of the dtypes they are `reduced` in too.
    """
    plain, wide = _tolerance(program), _tolerance(program, reduced)
    tolerances = {}
    for output in program.outputs:
        of_gradients = output.value.role in ("grad", "state")
        tolerance = wide if of_gradients else plain
        tolerances[output.name] = tolerance if output.value.type.dtype.kind == "float" else 0.0
    return tolerances


def _tolerance(program: NamedProgram, reduced: frozenset[str] = frozenset()) -> float:
    """The tolerance of floats: of those in the program, and those that are `reduced` in."""
    floats = {v.type.dtype.name for v in _values(program) if v.type.dtype.kind in ("float", "f8")}
    return max((TOLERANCES[name] for name in floats | reduced), default=0.0)


def errors(
    found: Array,
    expected: Array,
    before: Array | None = None,
    slack: float = 0.0,
    sizes: Array | None = None,
) -> tuple[float, float]:
    """max|Δ|, and the largest (Δ less `slack` of |expected|) / measure; in float64.

    The measure is max|expected|, or max|expected - before|; in an element that of `sizes`, where it
    is larger.
    """
    if found.shape != expected.shape:
        return float("inf"), float("inf")
    if found.dtype.kind in "ib":
        return _ratio(_widest(found, expected), expected)
    finite = np.isfinite(expected)
    others = np.array_equal(found[~finite], expected[~finite].astype(found.dtype), equal_nan=True)
    if not others or not np.isfinite(found[finite]).all():
        return float("inf"), float("inf")
    wanted = expected[finite].astype(np.float64)
    difference = np.abs(found[finite].astype(np.float64) - wanted)
    changed = wanted if before is None else wanted - before[finite]
    measure = np.full(wanted.shape, np.max(np.abs(changed), initial=0.0))
    if sizes is not None:
        measure = np.maximum(measure, sizes[finite])
    return float(np.max(difference, initial=0.0)), _most(
        difference - slack * np.abs(wanted), measure
    )


def _most(difference: Array, measure: Array) -> float:
    """The largest quotient of a positive difference and its measure; infinite where that is 0."""
    over = difference > 0
    with np.errstate(divide="ignore"):
        return float(np.max(difference[over] / measure[over], initial=0.0))


def _widest(found: Array, expected: Array) -> float:
    """The greatest difference of integers or booleans; never 0 where any differ."""
    differs = found != expected
    apart = found[differs].astype(np.float64) - expected[differs].astype(np.float64)
    return float(np.max(np.abs(apart), initial=float(differs.any())))


def _ratio(error: float, expected: Array) -> tuple[float, float]:
    scale = float(np.max(np.abs(expected.astype(np.float64)), initial=0.0))
    if error == 0.0:
        return 0.0, 0.0
    return error, error / scale if scale else float("inf")


def _values(program: NamedProgram) -> Iterator[Value]:
    yield from program.inputs
    yield from (param.value for param in program.params)
    yield from (value for op in walk(program.body) for value in op.outs)
