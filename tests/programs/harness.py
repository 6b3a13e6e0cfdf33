"""One program under one layout: run on every device, checked with reference and `explain`."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from meshdsl.backends.draws import draws
from meshdsl.backends.engines.against_reference import errors
from meshdsl.backends.engines.in_process import LocalRun, run_local
from meshdsl.backends.engines.reference import made_up, run_reference, whole_specs
from meshdsl.backends.runtime.values import Array, Spec
from meshdsl.backends.torch.emitter import ProgramText
from meshdsl.diagnostics import DiagnosticError, Diagnostics, Source
from meshdsl.named.ir import NamedLoop, NamedOp, NamedProgram, Node, Value
from meshdsl.ops.opdef import lookup
from meshdsl.ops.requirements import own_dims
from meshdsl.pipeline import Compilation, Options, compile_source
from meshdsl.placed.placements import Mesh
from meshdsl.placed.reshard import MESSAGE_BYTES
from meshdsl.report.explanation import explain

TOLERANCE = 1e-5
"""max|Δ| / max|ref| of outputs that round, in f32."""

ROUNDING = 1e-9
"""The same in f64 (and max|Δ|), for programs whose own rounding is larger than `TOLERANCE`."""

LARGEST = 2.0**24
"""Sums of absolute values below this are exact in f32."""

REFUSALS = ("MD0301", "MD0302", "MD0303", "MD0318", "MD0341", "MD0907")
"""Codes of a layout that does not fit: it does not divide, conflicts, splits a loop.

Parts of an axis and blocks of a ring do not divide either.
"""


@dataclass(frozen=True, slots=True)
class Case:
    """A program and where it runs.

    `layout` is a declared name, the string form `dim:axis,…`, or rules in braces, which become a
    layout of their own. Values are whole numbers, unless they are `made_up` as the engines do it.
    """

    text: str
    mesh: str
    layout: str
    reduce: str = "deferred"
    dims: Mapping[str, int] = field(default_factory=dict, hash=False)
    name: str = "case.mdsl"
    message_bytes: int = MESSAGE_BYTES
    made_up: bool = False

    @property
    def source_text(self) -> str:
        """The text, with a layout that is given in braces declared at its end."""
        if not self.layout.startswith("{"):
            return self.text
        return f"{self.text.rstrip()}\n\nlayout chosen {self.layout}\n"

    @property
    def options(self) -> Options:
        """The options as a user would give them."""
        layout = "chosen" if self.layout.startswith("{") else self.layout
        return Options(
            mesh=self.mesh,
            layout=layout,
            reduce=self.reduce,
            message_bytes=self.message_bytes,
            set_dims=self.dims,
        )


@dataclass(frozen=True, slots=True)
class Checked:
    """A case that ran and passed: the named program, its report, the run, and its exact outputs."""

    named: NamedProgram
    report: Any
    run: LocalRun
    exact: frozenset[str]


def run_case(case: Case) -> Checked:
    """Compile and run `case`, and check everything that must be true of it.

    Raises DiagnosticError if it is refused, AssertionError if it is wrong.
    """
    made = compiled(case)
    program = made.named
    values, reference = values_of(case)
    run = _run(_Run(emitted := made.emitted, values))
    report = explain(made.device)
    assert run.disagreements() == []
    check_bytes(report, run)
    whole = () if case.made_up else exact_outputs(program, (values[0], values[1]))
    exact = frozenset(whole)
    wrong = [w for o in program.outputs if (w := _wrong(o.name, exact, run.outputs, reference))]
    if wrong and exact.isdisjoint(name for name, _ in wrong):
        # Some programs cancel all but the rounding: what f64 does not show is no mistake.
        wrong = _wrong_in_f64(case, values)
    assert not wrong, f"{wrong}\n{emitted.text[emitted.text.index('def device(') :]}"
    return Checked(program, report, run, exact)


class _Run:
    """A run of an emitted text; two are the same whose texts differ in comments alone."""

    def __init__(self, emitted: ProgramText, values: Values) -> None:
        self.emitted, self.values = emitted, values
        kept = ("" if s.lstrip().startswith("#") else s for s in emitted.text.split("\n"))
        arrays = [(name, a.tobytes()) for side in values for name, a in sorted(side.items())]
        self.key = "\n".join(kept), tuple(arrays)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Run) and self.key == other.key


@functools.lru_cache(maxsize=256)
def _run(asked: _Run) -> LocalRun:
    """Layouts and policies often come to one program: it is run once."""
    return run_local(asked.emitted.text, *asked.values, lines=asked.emitted.places)


def refusal(case: Case) -> str | None:
    """The code with which the compiler refuses `case` for its layout, or None."""
    try:
        compiled(case)
    except DiagnosticError as error:
        code = error.diagnostics[0].code
        if code in REFUSALS:
            return code
        raise
    return None


@functools.lru_cache(maxsize=8)
def compiled(case: Case, dtype: str | None = None) -> Compilation:
    """A case compiled, the last few once; its program is built once for all layouts."""
    options = replace(case.options, dtype=dtype)
    built = _built(case.source_text, tuple(case.dims.items()), dtype)
    return built.under(options, Diagnostics()).checked()


def explained(case: Case) -> Any:
    """The `explain --json` of a case."""
    return explain(compiled(case).device)


# --- compiling once per text ------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def _built(text: str, dims: tuple[tuple[str, int], ...], dtype: str | None) -> Compilation:
    options = Options(set_dims=dict(dims), dtype=dtype)
    return compile_source(Source("case.mdsl", text), options, Diagnostics(), until="named")


# --- values -----------------------------------------------------------------------------------

Values = tuple[dict[str, Array], dict[str, Array]]


def values_of(case: Case) -> tuple[Values, dict[str, Array]]:
    """Inputs and parameters of a case, and the reference's answer to them."""
    return _values_once(case.source_text, tuple(case.dims.items()), case.made_up)


@functools.lru_cache(maxsize=64)
def _values_once(
    text: str, dims: tuple[tuple[str, int], ...], as_engines: bool
) -> tuple[Values, dict[str, Array]]:
    program = _built(text, dims, None).named
    inputs, params = (
        made_up(specs) if as_engines else {name: _whole(name, s) for name, s in specs.items()}
        for specs in whole_specs(program, draws(program))
    )
    return (inputs, params), run_reference(program, inputs, params)


def _whole(name: str, spec: Spec) -> Array:
    """Floats from -2 to 2, all whole; integers and truth values as the engines make them up."""
    if spec.dtype not in ("f32", "f64", "f16", "bf16"):
        return made_up({name: spec})[name]
    drawn = made_up({name: spec._replace(draw=("below", 5))})[name]
    return np.asarray(drawn - 2, drawn.dtype)


# --- outputs ----------------------------------------------------------------------------------


def _wrong(
    name: str, exact: frozenset[str], found: Mapping[str, Array], reference: Mapping[str, Array]
) -> tuple[str, str] | None:
    """The name and problem of an output, or None."""
    if name in exact:
        same = np.array_equal(found[name], reference[name].astype(found[name].dtype))
        return None if same else (name, f"differs in bits: {found[name]} {reference[name]}")
    _, relative = errors(found[name], reference[name])
    return None if relative <= TOLERANCE else (name, f"is off by {relative}")


def _wrong_in_f64(case: Case, values: Values) -> list[tuple[str, str]]:
    """The outputs that are still wrong where rounding is 2^-53: those that no rounding explains.

    A program may make much of a rounding error; then one device does so too.
    """
    found = _errors_in_f64(case, values)
    if max(found.values()) > ROUNDING:
        alone = _errors_in_f64(replace(case, mesh="alone:1"), values)
        found = {name: error for name, error in found.items() if error > 100 * alone[name]}
    return [(n, f"is off by {error} in f64") for n, error in found.items() if error > ROUNDING]


def _errors_in_f64(case: Case, values: Values) -> dict[str, float]:
    """Per output max|Δ|, or that over max|ref| where it is smaller (the answer may well be 0)."""
    made = compiled(case, "f64")
    inputs, params = ({n: _wide(a) for n, a in arrays.items()} for arrays in values)
    run = run_local(made.text, inputs, params)
    reference = run_reference(made.named, inputs, params)
    return {name: min(errors(run.outputs[name], array)) for name, array in reference.items()}


def _wide(array: Array) -> Array:
    return array.astype(np.float64) if array.dtype.kind == "f" else array


# --- which outputs are exact ------------------------------------------------------------------


def exact_outputs(program: NamedProgram, values: Values) -> Iterator[str]:
    """Outputs reached only through exact operators, all sums of absolute values below 2^24."""
    bounds: dict[Value, float] = {}
    for value in program.inputs:
        bounds[value] = _largest(values[0][value.label])
    for param in program.params:
        bounds[param.value] = _largest(values[1][str(param.value.name)])
    bounds.update({state.value: math.inf for state in program.states})
    _bound_nodes(program.body, bounds)
    for output in program.outputs:
        if bounds[output.value] < LARGEST:
            yield output.name


def _largest(array: Array) -> float:
    return float(np.max(np.abs(array.astype(np.float64)), initial=0.0))


def _bound_nodes(nodes: tuple[Node, ...], bounds: dict[Value, float]) -> None:
    for node in nodes:
        if isinstance(node, NamedOp):
            bound = _bound(node, [bounds[v] for v in node.ins])
            bounds.update(dict.fromkeys(node.outs, bound))
            continue
        _bound_loop(node, bounds)


def _bound_loop(loop: NamedLoop, bounds: dict[Value, float]) -> None:
    bounds.update({s.inside: bounds[s.outer] for s in loop.stacked})
    bounds.update({c.inside: bounds[c.init] for c in loop.carries})
    for _ in range(loop.dim.size):
        _bound_nodes(loop.body, bounds)
        bounds.update({c.inside: bounds[c.next] for c in loop.carries})
    bounds.update({c.result: bounds[c.inside] for c in loop.carries})
    bounds.update({c.outer: bounds[c.inside] for c in loop.collected})


def _bound(op: NamedOp, ins: list[float]) -> float:
    """The most that a sum of absolute values on the way to `op` can be; infinite if it rounds."""
    largest = max(ins, default=0.0)
    if not lookup(op.name).exact or largest >= LARGEST:
        return math.inf
    if op.outs[0].type.dtype.kind == "bool":
        return 1.0
    match op.name:
        case "einsum" | "sum":
            return math.prod(ins) * _summed(op)
        case "cumsum":
            return largest * float(op.attr("dim").size)
        case "add" | "sub":
            return sum(ins)
        case "mul":
            return math.prod(ins)
        case "square":
            return largest * largest
        case "constant" | "pad":
            number = abs(float(op.attr("value")))
            return math.inf if number % 1 else max(largest, number)
        case "iota" | "argmax":
            return float(math.prod(d.size for d in own_dims(dict(op.attrs))))
    return max(largest, 1.0)


def _summed(op: NamedOp) -> float:
    sizes = {d.name: d.size for v in op.ins for d in v.type.dims}
    return float(math.prod(n for name, n in sizes.items() if not op.outs[0].type.has(name)))


# --- bytes ------------------------------------------------------------------------------------


def _groups(counted: Counter[Any]) -> Counter[object]:
    """How many collectives of each kind there were over each set of axes."""
    found: Counter[object] = Counter()
    for (kind, _, axes, size, _), count in counted.items():
        found[kind, axes, size] += count
    return found


UNEVEN = ("permute", "halo")
"""Collectives in which devices send different amounts."""


def check_bytes(report: Any, run: LocalRun) -> None:
    """Every device did just the collectives, and sent just the bytes, that `explain` predicted.

    Of one permute or halo the prediction is the most that a device sends: some send less. What a
    stage sends, or does alone, is its own. Of all of them, and of the device that sends most, it
    is exact. Of rows that are sent by number it is the most.
    """
    mesh = Mesh("mesh", tuple(report["mesh"].items()))
    wire = sum(c["wire_bytes"] for c in report["collectives"])
    own = (c for c in report["collectives"] if c["kind"] in (*UNEVEN, "send") or "on" in c)
    uneven = sum(c["wire_bytes"] for c in own)
    for rank, sent in enumerate(run.sent):
        predicted = _predicted(report, mesh.coordinates(rank))
        counted: Counter[object] = Counter()
        for s, count in ((s, count) for s, count in sent.items() if s.kind != "send"):
            payload = None if s.kind in UNEVEN else s.payload
            counted[s.kind, s.op, s.axes, s.size, payload] += count
        if any("uneven" in c or "balanced_bytes" in c for c in report["collectives"]):
            assert _groups(counted) == _groups(predicted), f"device {rank}: {counted}, {predicted}"
            assert run.wire_bytes(rank) <= wire
            continue
        assert counted == predicted, f"device {rank}: {counted} where {predicted} were predicted"
        assert wire - uneven <= run.wire_bytes(rank) <= wire
    if any("balanced_bytes" in c for c in report["collectives"]):
        return
    cluster = sum(c["cluster_wire_bytes"] for c in report["collectives"])
    assert cluster == sum(run.wire_bytes(rank) for rank in range(len(run.sent)))
    by_phase = report["totals"]["by_phase"]
    most = max(run.wire_bytes(rank) for rank in range(len(run.sent)))
    assert sum(by_phase.values()) == most
    assert report["totals"]["wire_bytes"] == most - by_phase.get("output", 0)


def _predicted(report: Any, at: Mapping[str, int]) -> Counter[object]:
    """The collectives of the device at some coordinates, but for messages."""
    found: Counter[object] = Counter()
    for c in (c for c in report["collectives"] if c["kind"] != "send"):
        payload = None if c["kind"] in UNEVEN else c["payload_bytes"]
        key = (c["kind"], c["op"] or "", tuple(c["axes"]), c["group_size"], payload)
        if c.get("on", {}).items() <= at.items():
            found[key] += c["count"]
    return found


def counts(report: Any) -> Counter[str]:
    """The number of collectives of each kind, iterations of loops counted."""
    found: Counter[str] = Counter()
    for c in report["collectives"]:
        found[c["kind"]] += c["count"]
    return found
