"""Programs of all operators of the registry, and the values that splits get wrong.

One device is the rule: what it yields for infinities, NaN, ties, zeros of both signs and numbers
that fill a narrow dtype, every layout and every engine yields.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from meshdsl.backends.engines.persistent import PersistentEngine
from meshdsl.backends.engines.reference import applied
from meshdsl.backends.runtime.values import Array, cast
from meshdsl.diagnostics import Diagnostics, Source, Span
from meshdsl.ir.types import DTYPES, F32, LARGEST, Dim, DType, TensorType
from meshdsl.named.ir import NamedOp, NamedProgram, Output, Value
from meshdsl.named.vjp import with_vjp
from meshdsl.ops.opdef import OpDef, OpError, Sample, Signature, load_all, lookup
from meshdsl.pipeline import Compilation, Known, Options, front

NOWHERE = Span(Source("special.mdsl", "x"), 0, 0)
INF, NAN = float("inf"), float("nan")

# --- programs ---------------------------------------------------------------------------------


@dataclass(slots=True)
class Special:
    """A program being built of single calls; `kinds` says how each input is drawn."""

    inputs: list[Value] = field(default_factory=list)
    body: list[NamedOp] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    kinds: dict[str, str] = field(default_factory=dict)
    seeds: dict[str, int] = field(default_factory=dict)
    values: dict[str, dict[str, Array]] = field(default_factory=dict)
    reaches: dict[tuple[str, str], Reach] = field(default_factory=dict)

    def input(self, type_: TensorType, kind: str, of: str) -> Value:
        """A new input. Its values depend on the call `of` which it is, and not on other calls."""
        name = f"x{len(self.inputs)}"
        self.kinds[name] = kind
        self.seeds[name] = zlib.crc32(f"{of} {type_}".encode())
        self.inputs.append(Value(type_, NOWHERE, name, role="input"))
        return self.inputs[-1]

    def apply(self, name: str, ins: tuple[Value, ...], attrs: Mapping[str, Any]) -> Value:
        """The first result of an operator."""
        types = lookup(name).infer(tuple(v.type for v in ins), attrs)
        words = [f"{name}.{len(self.body)}", *(f"{name}.{len(self.body)}.{i}" for i in range(1, 9))]
        made = tuple(Value(t, NOWHERE, w) for t, w in zip(types, words, strict=False))
        self.body.append(NamedOp(name, ins, made, tuple(attrs.items()), NOWHERE))
        return made[0]

    def give(self, value: Value) -> None:
        """Return a value under its name."""
        self.outputs.append(Output(str(value.name), value, NOWHERE))

    def along(self, rules: str) -> Special:
        """The calls that have a dim which `rules` split; of any other, each device does all.

        It has all inputs, so that both programs are given the same.
        """
        split = set(re.findall(r"(\w+) ->", rules))
        body = [op for op in self.body if any(split & {*v.type.names} for v in (*op.ins, *op.outs))]
        made = {value for op in body for value in op.outs}
        assert body, f"no call has a dim of {rules}"
        return replace(self, body=body, outputs=[o for o in self.outputs if o.value in made])

    @property
    def program(self) -> NamedProgram:
        """The program built so far."""
        parts = (tuple(self.inputs), (), tuple(self.body), tuple(self.outputs))
        return NamedProgram("special", *parts, NOWHERE)


LARGEST_INDEX = 8
"""Indices are drawn below this number."""

Renamed = Mapping[Dim, Dim]
"""Dims of samples, and their replacements."""


def samples(dims: Renamed, floats: DType) -> Iterator[tuple[str, Sample, Signature]]:
    """Samples of the operators that compute one result of tensors, and change none of them.

    With `dims`, those that have no others and count no elements. Of what works element by element,
    a few stand for all.
    """
    for name, opdef in sorted(load_all().items()):
        few = slice(None, None, 2 if not opdef.samples[0].attrs else 1)
        for sample in opdef.samples[few] if _is_plain(opdef) else ():
            parts = list(_parts((*(t.dims for t in sample.ins), sample.attrs)))
            own = {x for x in parts if isinstance(x, Dim)}
            small = {d.name for d in dims.values() if d.size < LARGEST_INDEX}
            if any(kind.removeprefix("index:") in small for kind in sample.values):
                continue
            if not dims or (own <= set(dims) and not any(isinstance(x, int) for x in parts)):
                ins, attrs = (_changed(x, dims, floats) for x in (sample.ins, sample.attrs))
                try:
                    outs = opdef.infer(ins, dict(attrs))
                except OpError:  # the sizes of its dims depend on one another
                    continue
                if any(t.dtype.name not in DTYPES for t in (*ins, *outs)):
                    continue  # 8-bit floats, which no program declares
                yield name, Sample(ins, attrs, sample.values), Signature(ins, outs, dict(attrs))


def _is_plain(opdef: OpDef) -> bool:
    return not opdef.overwrites and all(sample.ins for sample in opdef.samples)


def _parts(thing: Any) -> Iterator[Any]:
    """The leaves of nested tuples."""
    if not isinstance(thing, tuple):
        yield thing
        return
    for part in thing:
        yield from _parts(part)


def _changed(thing: Any, dims: Renamed, floats: DType) -> Any:
    """Types and attributes with other dims, and `floats` for f32."""
    if isinstance(thing, TensorType):
        return TensorType(_changed(thing.dims, dims, floats), _changed(thing.dtype, dims, floats))
    if isinstance(thing, tuple):
        return tuple(_changed(x, dims, floats) for x in thing)
    if isinstance(thing, Dim):
        return dims.get(thing, thing)
    return floats if thing == F32 else thing


def every_operator(dims: Renamed, floats: DType, only: Container[str] | None = None) -> Special:
    """A call for each sample of each operator, or of `only` those."""
    made = Special()
    for name, sample, sig in samples(dims, floats):
        if only is not None and name not in only:
            continue
        pairs = enumerate(zip(sig.ins, sample.values, strict=True))
        ins = tuple(made.input(*pair, f"{name} {i}") for i, pair in pairs)
        made.give(made.apply(name, ins, sig.attrs))
    return made


def every_gradient(dims: Renamed) -> Special:
    """The gradients of every operator by its operands, for cotangents that are inputs.

    An output is named for the operator and the operand: `mul.17 by 0`.
    """
    made = Special()
    operands: dict[str, str] = {}
    for name, sample, sig in samples(dims, F32):
        types = (*sig.ins, sig.outs[0])
        if lookup(name).gradient is None or sig.outs[0].dtype.kind != "float":
            continue
        if all(t.dtype.kind != "float" for t in types[:-1]):
            continue
        pairs = enumerate(zip(sig.ins, sample.values, strict=True))
        ins = tuple(made.input(*pair, f"{name} {i}") for i, pair in pairs)
        result = made.apply(name, ins, sig.attrs)
        made.give(result)
        operands |= {f"d_{v.label}": f"{result.name} by {i}" for i, v in enumerate(ins)}
    program = with_vjp(made.program, [], [v.label for v in made.inputs]).program
    outputs = [replace(o, name=operands[o.name]) for o in program.outputs if o.name in operands]
    seeds = {v.label: zlib.crc32(v.label.encode()) for v in program.inputs} | made.seeds
    kinds = {v.label: "" for v in program.inputs} | made.kinds
    body = [node for node in program.body if isinstance(node, NamedOp)]
    return Special([*program.inputs], body, outputs, kinds, seeds)


def every_monotone_operator(floats: DType, over: Dim) -> Special:
    """Every operator that partial extremes pass through, of a maximum and a minimum over `over`."""
    made = Special()
    for name, sample, sig in samples({}, floats):
        for index in lookup(name).factors(sig).monotone:
            is_bool = sig.ins[index].dtype.kind == "bool"
            for extreme in ("any", "all") if is_bool else ("max", "min"):
                pairs = enumerate(zip(sig.ins, sample.values, strict=True))
                ins = [made.input(*pair, f"{name} {i}") for i, pair in pairs]
                wide = TensorType((*sig.ins[index].dims, over), sig.ins[index].dtype)
                parts = made.input(wide, sample.values[index], f"{name} {extreme}")
                ins[index] = made.apply(extreme, (parts,), {"dims": (over,)})
                made.give(made.apply(name, tuple(ins), sig.attrs))
    return made


# --- running ----------------------------------------------------------------------------------


def engine(
    program: NamedProgram, mesh: str = "x:1", rules: str = "", reduce: str = "deferred"
) -> PersistentEngine:
    """The program under a layout of these rules, on devices that are threads."""
    values = [
        *program.inputs,
        *(v for op in program.body if isinstance(op, NamedOp) for v in op.outs),
    ]
    dims = {d for v in values for d in v.type.dims if d.name.isidentifier()}  # not made up
    sizes = {d.name: d.size for d in sorted(dims, key=lambda d: d.name)}
    text = "".join(f"dim {name} = {size}\n" for name, size in sizes.items())
    diagnostics = Diagnostics()
    source = Source("special.mdsl", f"{text}layout chosen {{ {rules} }}\n")
    declarations = front(source, {}, diagnostics)
    diagnostics.raise_errors()
    options = Options(mesh=mesh, layout="chosen", reduce=reduce)
    known = Known(None, declarations, program, program)
    return PersistentEngine(Compilation(source, options, known=known).emitted)


def run(found: PersistentEngine, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """The whole outputs, floats as float64."""
    outputs = found.run(inputs, [{} for _ in range(found.session.programs.devices)])
    return {n: (t.double() if t.is_floating_point() else t).numpy() for n, t in outputs.items()}


# --- values -----------------------------------------------------------------------------------

Fill = Callable[[np.random.Generator, tuple[int, ...]], Array]


def _among(*values: float) -> Fill:
    return lambda rng, shape: rng.choice(values, shape)


def _one(value: float) -> Fill:
    """Numbers of which many multiply to no extreme one, and `value` in their midst."""

    def draw(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        found = np.asarray(rng.choice([-1.0, 1.0], shape) * rng.uniform(0.8, 1.25, shape))
        found[tuple(rng.integers(0, n) for n in shape)] = value
        return found

    return draw


def _quarters(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Plain numbers, which every dtype has."""
    return np.asarray(rng.choice([-1.0, 1.0], shape) * rng.integers(1, 9, shape) / 4)


FILLS: dict[str, Fill] = {
    "one NaN": _one(NAN),
    "one infinity": _one(INF),
    "one -infinity": _one(-INF),
    "all NaN": _among(NAN),
    "all infinite": _among(INF),
    "all -infinite": _among(-INF),
    "both infinities": _among(INF, -INF, 1.0),
    "everything": _among(NAN, INF, -INF, 0.0, -0.0, 1.0, -2.5),
    "ties": _among(2.0),
    "ties of a few": _among(1.0, 2.0),
    "zeros of both signs": _among(0.0, -0.0),
    "negative": lambda rng, shape: -rng.integers(1, 9, shape).astype(float),
    "hundreds": lambda rng, shape: rng.uniform(300.0, 900.0, shape),
}
"""Floats by what is special about them."""

ENDLESS = tuple(name for name in FILLS if "infinit" in name or name == "everything")
"""Those with infinities among them."""

ENDS = (2**31 - 1, -(2**31), 0, 1, -1)
"""Integers: the ends of their range, and ties."""


def drawn(made: Special, fill: str) -> dict[str, Array]:
    """All inputs of a program, its floats as `fill` says (or `quarters`); drawn once."""
    if fill in made.values:
        return made.values[fill]
    found = {}
    for name, value in ((v.label, v) for v in made.inputs):
        rng = np.random.default_rng(made.seeds[name])
        how = _quarters if fill == "quarters" else FILLS[fill]
        found[name] = _drawn(value.type, made.kinds[name], how, rng)
    made.values[fill] = found
    return found


def _drawn(type_: TensorType, kind: str, fill: Fill, rng: np.random.Generator) -> Array:
    if kind.startswith("index:"):
        found = rng.integers(0, LARGEST_INDEX, type_.shape)
    elif type_.dtype.kind == "bool":
        found = rng.random(type_.shape) < rng.choice([0.1, 0.9])
    elif type_.dtype.kind == "int":
        found = rng.choice(ENDS, type_.shape)
        found = np.where((found == 0) & (kind == "nonzero"), 1, found)
    else:
        found = fill(rng, type_.shape)
    found = np.asarray(np.clip(found, -1, 1) if kind == "unit" else found, type_.dtype.numpy)
    return cast(found, type_.dtype.name)


# --- what reaches what ------------------------------------------------------------------------

SPREADING: Mapping[str, tuple[int, ...]] = {
    "attention": (),
    "attention_lse": (),
    "attention_grad": (),
    "conv": (1,),
    "conv_kernel": (),
    "upconv": (1,),
}
"""Operators whose kernels spread what is not finite, as the shapes of blocks have it.

Kernels of attention meet it behind the mask, those of convolutions in padding: an element of these
operands may reach the result along all dims that the operand lacks. What nothing reaches is held to
the comparison.
"""


@dataclass(frozen=True, slots=True)
class Reach:
    """The elements of a result that something not finite reaches: for certain, and perhaps."""

    certain: Array
    perhaps: Array

    def compared(self, array: Array) -> Array:
        """What a result has to be, of those elements that are known."""
        known = np.where(self.certain & ~np.isfinite(array), NAN, array)
        return known[self.certain | ~self.perhaps]


def reach(made: Special, op: NamedOp, fill: str) -> Reach:
    """What changes with those elements of the operands of `op` that are not finite; found once.

    Nothing is hidden meanwhile: a mask, the triangle of attention, or its last position.
    """
    key = fill, str(op.outs[0].name)
    if key not in made.reaches:
        made.reaches[key] = _reach(op, drawn(made, fill))
    return made.reaches[key]


def _reach(op: NamedOp, inputs: Mapping[str, Array]) -> Reach:
    given = [inputs[v.label] for v in op.ins]
    attrs = {n: () if n == "causal" else x for n, x in op.attrs}
    shown = replace(op, attrs=tuple(attrs.items()))
    certain, perhaps = (np.zeros(op.outs[0].type.shape, bool) for _ in range(2))
    for index, value in enumerate(op.ins):
        marked = [_not_finite(x) & (i == index) for i, x in enumerate(given)]
        if not marked[index].any():
            continue
        one, other = (
            applied(shown, tuple(_finite(*pair, seed) for pair in zip(given, marked, strict=True)))
            for seed in (1, 2)
        )
        found = one[0] != other[0]
        certain |= found & (op.name in CONVOLUTIONS)
        if index in SPREADING[op.name]:
            lacks = [not value.type.has(d.name) for d in op.outs[0].type.dims]
            found = found.any(tuple(np.flatnonzero(lacks)), keepdims=True)
        perhaps |= found
    return Reach(certain, perhaps)


CONVOLUTIONS = ("conv", "conv_kernel", "upconv")
"""Operators that hide nothing: a product with what is not finite is not finite."""


def _not_finite(array: Array) -> Array:
    return ~np.isfinite(array) if array.dtype.kind == "f" else np.zeros(array.shape, bool)


def _finite(array: Array, marked: Array, seed: int) -> Array:
    """Numbers around 1 in the place of floats, others for each seed where they are marked."""
    if array.dtype.kind == "b":
        return np.ones(array.shape, bool)
    if array.dtype.kind != "f":  # the last position that attention sees
        return np.full_like(array, LARGEST_INDEX)
    plain, drawn = (np.random.default_rng(s).uniform(0.5, 1.5, array.shape) for s in (0, seed))
    return np.where(marked, drawn, plain)


# --- comparing --------------------------------------------------------------------------------

TOLERANCES = {"f32": 1e-5, "f64": 1e-12, "f16": 2e-2, "bf16": 6e-2}
"""The largest legal distance of two results, relative to the largest number."""


def difference(found: Array, expected: Array, tolerance: float, *, kinds: bool = True) -> str:
    """The difference, or empty. Without `kinds` an infinity may replace a NaN."""
    if found.dtype.kind != "f":
        return "" if np.array_equal(found, expected) else f"{found} where {expected} is expected"
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    ends = ~np.isfinite(expected)
    same = np.array_equal(ends, ~np.isfinite(found))
    same = same and (not kinds or np.array_equal(found[ends], expected[ends], equal_nan=True))
    scale = max(float(np.max(np.abs(expected[~ends]), initial=0.0)), 1.0)
    close = same and np.all(np.abs(found[~ends] - expected[~ends]) <= tolerance * scale)
    return "" if close else f"{found} where {expected} is expected"


def rounded(array: Array, dtype: DType) -> Array:
    """A float64 array with infinities where it is too large for `dtype`."""
    if dtype.kind != "float":
        return array
    return np.where(np.abs(array) > LARGEST[dtype.name], np.copysign(INF, array), array)
