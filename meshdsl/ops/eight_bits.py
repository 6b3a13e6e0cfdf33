"""Products of 8-bit floats with scales: `named/scaled_products.py` writes matrix products in these.

Of a tensor x the scale is s = max|x| / largest, with the largest number of the 8-bit type, and the
8-bit tensor is q = round(x / s). The product of two is that of the matrices of q, times both
scales. e4m3 has more digits, e5m2 more range (Micikevicius et al. 2022, FP8 Formats for Deep
Learning). The language has no calls of them.
"""

from __future__ import annotations

from meshdsl.backends.runtime.lazy_numpy import np
from meshdsl.ops import einsum, kit
from meshdsl.ops.einsum_text import letters_for
from meshdsl.records import dataclass

LEAST_EXTREME = 1e-12
"""The least greatest magnitude of a tensor, as torchao has it: zeros have a scale, too."""


@dataclass(frozen=True, slots=True)
class Format:
    """An 8-bit float: its largest number, the least exponent of a normal one, the bits after it."""

    largest: float
    least: int
    bits: int


FORMATS = {"e4m3": Format(448.0, -6, 3), "e5m2": Format(57344.0, -14, 2)}


def rounded(x: kit.Array, dtype: kit.DType) -> kit.Array:
    """The numbers of an 8-bit type that are nearest, ties to even; beyond the largest, that."""
    form = FORMATS[dtype.name]
    _, exponent = np.frexp(np.where(np.isfinite(x), x, 1.0))
    step = np.exp2(np.maximum(exponent - 1, form.least) - form.bits)
    return np.asarray(np.clip(np.rint(x / step) * step, -form.largest, form.largest))


# --- the scale ---------------------------------------------------------------------------------


def _scale_infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
    kit.need_kind("f8_scale", "float", ins[0])
    gone = {d.name for d in attrs["dims"]}
    return (kit.TensorType(tuple(d for d in ins[0].dims if d.name not in gone), kit.F32),)


def _scale_factors(sig: kit.Signature) -> kit.Factors:
    reduced = tuple(kit.loop(sig, d.name, "max") for d in sig.attrs["dims"])
    return kit.Factors((*kit.loops(sig), *reduced))


def _scale_numpy(call: kit.NumpyCall, x: kit.Array) -> kit.Array:
    extreme = np.abs(x).max(axis=kit.axes(call.ins[0], call.attrs["dims"]), initial=0.0)
    largest = FORMATS[call.attrs["dtype"].name].largest
    return np.asarray(np.maximum(extreme, LEAST_EXTREME) / largest, dtype=x.dtype)


def _scale_text(call: kit.TorchCall) -> str:
    dims = kit.tuple_text(kit.axes(call.ins[0], call.attrs["dims"]))
    return f"{call.use('f8_scale')}({call.tensor(0)}, {dims}, {call.attrs['dtype'].torch})"


kit.operator(
    "f8_scale",
    kit.Surface("view", (1, 1)),
    _scale_infer,
    _scale_factors,
    _scale_numpy,
    _scale_text,
    kit.samples(
        "s h | dims=(s h) dtype=e4m3",
        "b s h | dims=(h) dtype=e5m2",
        "s h: bf16 | dims=(s) dtype=e4m3",
    ),
    exact=False,
    narrows=True,
    flops=lambda sig: sig.ins[0].elements,
    words="the scale of an operand in 8 bits",
    meaning="What 1 stands for in 8 bits, in f32: the greatest magnitude over some dims, or 1e-12 "
    "if that is more, over the largest number of the 8-bit type.",
)

# --- to 8 bits ---------------------------------------------------------------------------------


def _to_infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
    kit.need_kind("to_f8", "float", ins[0])
    return (kit.TensorType(ins[0].dims, attrs["dtype"]),)


def _to_numpy(call: kit.NumpyCall, x: kit.Array, scale: kit.Array) -> kit.Array:
    aligned = kit.align(scale, call.ins[1], call.ins[0].dims)
    return rounded(x / aligned, call.attrs["dtype"])


def _to_text(call: kit.TorchCall) -> str:
    scale = call.aligned(1, call.ins[0].dims)
    return f"{call.use('to_f8')}({call.tensor(0)}, {scale}, {call.attrs['dtype'].torch})"


kit.operator(
    "to_f8",
    kit.Surface("view", (2, 2)),
    _to_infer,
    kit.plain(),
    _to_numpy,
    _to_text,
    kit.samples(
        "s h; () | dtype=e4m3", "b s h; b s | dtype=e5m2", "s h: bf16; s | dtype=e4m3",
        values="int positive",
    ),
    exact=False,
    narrows=True,
    flops=lambda sig: sig.ins[0].elements,
    scratch=lambda sig, numbers: 4 * sig.ins[0].elements,  # the multiples in f32
    true_rows=kit.rows_with_reason(
        "scales are positive, but 8 bits are never reduced", "P(max), B -> P(max)",
        "P(min), B -> P(min)",
    ),
    words="the conversion to 8 bits",
    meaning="Multiples of a scale as 8-bit floats, the nearest; what is beyond them, the largest.",
)  # fmt: skip

# --- the product -------------------------------------------------------------------------------


def _einsum_infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
    assert {t.dtype.kind for t in ins[:2]} == {"f8"}, f"f8_einsum of {ins[0]} and {ins[1]}"
    return (kit.TensorType(attrs["dims"], attrs["dtype"]),)


def _einsum_factors(sig: kit.Signature) -> kit.Factors:
    dims = kit.merged_dims("f8_einsum", *sig.ins)
    loops = (kit.loop(sig, d.name, None if sig.outs[0].has(d.name) else "sum") for d in dims)
    return kit.Factors(tuple(loops), tuple(frozenset({i}) for i in range(4)))


def _einsum_numpy(call: kit.NumpyCall, *arrays: kit.Array) -> kit.Array:
    operands = [(a.astype(np.float64), t.names) for a, t in zip(arrays, call.ins, strict=True)]
    product = kit.einsum_by_name(*operands[:2], to=call.outs[0].names, optimize=True)
    for scale, type_ in zip(arrays[2:], call.ins[2:], strict=True):
        product = product * kit.align(scale, type_, call.outs[0].dims)
    return product


def _einsum_text(call: kit.TorchCall) -> str:
    names = [t.names for t in (*call.ins[:2], call.outs[0])]
    letters = letters_for(tuple(dict.fromkeys(n for dims in names for n in dims)))
    left, right, result = ("".join(letters[n] for n in dims) for dims in names)
    operands = ", ".join(call.tensor(i) for i in range(4))
    form, dtype = f'"{left},{right}->{result}"', call.attrs["dtype"].torch
    return f"{call.use('f8_einsum')}({form}, {operands}, {dtype})"


kit.operator(
    "f8_einsum",
    kit.Surface("view", (4, 4)),
    _einsum_infer,
    _einsum_factors,
    _einsum_numpy,
    _einsum_text,
    kit.samples(
        "s h: e4m3; h v: e4m3; (); () | dims=(s v) dtype=f32",
        "b s h: e5m2; v h: e4m3; b s; v | dims=(b s v) dtype=f32",
        "b s h: e4m3; b s v: e5m2; (); () | dims=(v h) dtype=f32",
        values="int int positive positive",
    ),
    exact=False,
    flops=lambda sig: einsum.product_flops(kit.Signature(sig.ins[:2], sig.outs, sig.attrs)),
    scratch=lambda sig, numbers: sum(t.elements for t in sig.ins[:2]),  # in the order of matrices
    words="the product in 8 bits",
    meaning="The product of two 8-bit tensors as matrices, added up in f32, times both scales.",
)
