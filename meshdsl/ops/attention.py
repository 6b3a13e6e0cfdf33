"""Attention: softmax(scale * q·k)·v along the dim `mem`, one kernel that never stores the softmax.

Scores are contracted over `key`; a position that the mask hides scores -1e9, so that a row that
sees nothing is uniform. In place of a mask of bools there may be one number, the last position
that every row sees: what is behind it is not read. `attention_lse` also yields the logarithm of
the sum of the exponentials, from which the gradient computes the softmax anew (Dao et al. 2022).
Where `key` or `mem` is split, the primitives of `named/attention_fusion.py` are used instead.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TypeVar

from meshdsl.backends.runtime.lazy_numpy import np
from meshdsl.ops import kit
from meshdsl.records import dataclass

MASKED = -1e9
"""The score of a position that the mask hides."""

# --- dims by their part ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Parts:
    """The dims of a call, by name.

    `rows` are those of the result that the scores have: those of `batch`, which keys or values have
    as well, and those of `query`. `feature` are of the values alone.
    """

    key: str
    mem: str
    rows: kit.Names
    batch: kit.Names
    query: kit.Names
    feature: kit.Names


T = TypeVar("T")


def operands(ins: Sequence[T], name: str = "attention_grad") -> tuple[T, ...]:
    """Of q, k, v and the mask, if there is one, what there is among that of all operands."""
    return (*ins[1:4], *ins[6:]) if name == "attention_grad" else tuple(ins)


def parts(ins: Sequence[kit.TensorType], attrs: kit.Attrs) -> Parts:
    """The parts of the dims of q, k, v and the mask, if there is one."""
    key, mem = (d.name for d in attrs["dims"])
    scored = {n for t in (*ins[:2], *ins[3:]) for n in t.names} - {key, mem}
    out = tuple(d.name for d in attrs["out"])
    rows = tuple(n for n in out if n in scored)
    batch = tuple(n for n in rows if ins[1].has(n) or ins[2].has(n))
    query = tuple(n for n in rows if n not in batch)
    return Parts(key, mem, rows, batch, query, tuple(n for n in out if n not in scored))


def result_dims(ins: Sequence[kit.TensorType], key: kit.Dim, mem: kit.Dim) -> tuple[kit.Dim, ...]:
    """The dims of a result in the order of q: those that q lacks first, features for `key`."""
    scored = [d for t in (*ins[:2], *ins[3:]) for d in t.dims if d not in (key, mem)]
    feature = [d for d in ins[2].dims if d != mem and d not in scored]
    query_dims = [d for d in ins[0].dims if d not in (key, mem)]
    first = [d for d in dict.fromkeys(scored) if d not in query_dims]
    at = ins[0].index(key.name)
    return (*first, *query_dims[:at], *feature, *query_dims[at:])


# --- shape rules -------------------------------------------------------------------------------


def _bind(attrs: kit.Attrs, ins: kit.Types) -> kit.Attrs:
    """The attributes of a call: the result's dims, and the scale, by default 1 / sqrt(key)."""
    need = "write `attention[key, mem](q, k, v)`: first the dim that is contracted"
    if len(attrs["dims"]) != 2:
        raise kit.OpError("MD0252", "`attention` takes two dims in `[ ]`", need)
    key, mem = attrs["dims"]
    _need(ins, key, mem)
    scale = attrs["scale"]
    scale = 1.0 / math.sqrt(key.size) if scale is None else float(scale)
    bound = {"dims": (key, mem), "out": result_dims(ins, key, mem), "scale": scale}
    return {**bound, "causal": ()}


def is_last(type_: kit.TensorType) -> bool:
    """Whether a mask is one number: the last position that every row sees."""
    return type_.dtype.kind == "int" and not type_.dims


def _need(ins: kit.Types, key: kit.Dim, mem: kit.Dim) -> None:
    """Raise an error unless q, k, v and the mask have the dims that they need, and no others."""
    q, k, v, *mask = ins
    said = "attention"
    kit.need_kind(said, "float", q, k, v)
    kit.need_one_dtype(said, q, k, v)
    kit.need_dims(said, q, (key,))
    kit.need_dims(said, k, (key, mem))
    kit.need_dims(said, v, (mem,))
    if q.has(mem.name):
        raise kit.OpError(
            "MD0242",
            f"`attention` looks along `{mem}`, which the queries {q} have themselves",
            f"rename it in keys and values: `k[{mem} -> other]`",
            kit.RenameDim((1, 2), mem.name),
        )
    for type_ in mask:
        if is_last(type_):
            continue
        if type_.dtype != kit.BOOL or type_.has(key.name):
            raise kit.OpError(
                "MD0243",
                f"the mask of `attention` says by bools who may look where, and this is {type_}",
                f"compare, `iota[seq] >= iota[{mem}]`; a bias is added to the scores by hand: "
                f"`softmax[{mem}](scores + bias)`",
                *([] if type_.has(key.name) else [kit.NonZero(type_)]),
                also=f"or add a bias to the scores by hand: `softmax[{mem}](scores + bias)`",
            )
    kit.merged_dims(said, *ins)


def _infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
    _need(ins, *attrs["dims"])
    return (kit.TensorType(attrs["out"], ins[0].dtype),)


def _lse_infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
    (out,) = _infer(ins, attrs)
    rows = parts(ins, attrs).rows
    wide = max(out.dtype, kit.F32, key=lambda d: d.bytes)
    return out, kit.TensorType(tuple(d for d in attrs["out"] if d.name in rows), wide)


def _grad_infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
    """The types of q, k and v; only generated, so that an error is our mistake."""
    do, q, k, v, o, lse, *mask = ins
    out, sums = _lse_infer((q, k, v, *mask), attrs)
    assert do.dims == o.dims, f"attention_grad of {ins}"
    assert set(o.dims) == set(out.dims), f"attention_grad of {ins}"
    assert set(lse.dims) == set(sums.dims), f"attention_grad of {ins}"
    return q, k, v


# --- factors -----------------------------------------------------------------------------------


def _factors(
    linear: Sequence[int] = (), *, gradient: bool = False
) -> Callable[[kit.Signature], kit.Factors]:
    """All dims but `key` and `mem` are loops; each operand of `linear` alone may be a partial sum.

    A result of the `gradient` is summed over the dims that it lacks.
    """

    def factors(sig: kit.Signature) -> kit.Factors:
        undivided = {d.name for d in sig.attrs["dims"]}
        names = dict.fromkeys(n for t in sig.ins for n in t.names if n not in undivided)
        summed = {n for n in names if gradient and not all(t.has(n) for t in sig.outs)}
        loops = tuple(kit.loop(sig, n, "sum" if n in summed else None) for n in names)
        return kit.Factors(loops, tuple(frozenset({i}) for i in linear))

    return factors


# --- numpy -------------------------------------------------------------------------------------


def _scores(call: kit.NumpyCall, qkv: kit.Types, arrays: tuple[kit.Array, ...]) -> kit.Array:
    """The scores over `rows` and `mem`."""
    q, k, _, *mask = arrays
    dims = parts(qkv, call.attrs)
    target = (*dims.rows, dims.mem)
    shared = tuple(n for n in target if qkv[0].has(n) or qkv[1].has(n))
    product = kit.einsum_by_name((q, qkv[0].names), (k, qkv[1].names), to=shared)
    scores = kit.fitted(product * call.attrs["scale"], shared, target)
    for seen, type_ in zip(mask, qkv[3:], strict=True):
        names = type_.names
        if is_last(type_):
            seen, names = np.arange(call.size(dims.mem)) <= seen, (dims.mem,)
        scores = np.where(kit.fitted(seen, names, target), scores, MASKED)
    for dim in call.attrs["causal"]:
        index = np.arange(call.extent(dim.name)) + call.offset(dim.name)
        allowed = index[:, None] >= np.arange(call.size(dims.mem))
        scores = np.where(kit.fitted(allowed, (dim.name, dims.mem), target), scores, MASKED)
    return scores


def _lse_numpy(call: kit.NumpyCall, *arrays: kit.Array) -> tuple[kit.Array, kit.Array]:
    dims = parts(call.ins, call.attrs)
    scores = _scores(call, call.ins, arrays)
    top = scores.max(-1, keepdims=True)
    e = np.exp(scores - top)
    total = e.sum(-1, keepdims=True)
    shares, v = (e / total, (*dims.rows, dims.mem)), (arrays[2], call.ins[2].names)
    o = kit.einsum_by_name(shares, v, to=call.outs[0].names)
    return o, np.asarray((top + np.log(total))[..., 0])


def _grad_numpy(call: kit.NumpyCall, *arrays: kit.Array) -> tuple[kit.Array, ...]:
    do, q, k, v, o, lse, *mask = arrays
    types = operands(call.ins)
    dims = parts(types, call.attrs)
    out, all_ = call.ins[0].names, (*dims.rows, dims.mem)
    scores = _scores(call, types, (q, k, v, *mask))
    hidden = scores == MASKED
    sees = lse[..., None] > MASKED / 2
    p = np.where(sees, np.exp(scores - lse[..., None]), 1 / call.size(dims.mem))
    dp = kit.einsum_by_name((do, out), (v, types[2].names), to=all_)
    along = kit.einsum_by_name((do, out), (o, out), to=dims.rows)[..., None]
    ds = np.where(hidden, 0.0, p * (dp - along)) * call.attrs["scale"]
    return (
        kit.einsum_by_name((ds, all_), (k, types[1].names), to=types[0].names),
        kit.einsum_by_name((ds, all_), (q, types[0].names), to=types[1].names),
        kit.einsum_by_name((p, all_), (do, out), to=types[2].names),
    )


# --- torch -------------------------------------------------------------------------------------


class _AttentionText:
    """The operands of a call as torch's kernels want them: [batch, batch, query, key].

    Dims of `batch` that an operand lacks are expanded; several dims in one place are flattened.
    """

    def __init__(self, call: kit.TorchCall, first: int = 0) -> None:
        self.call = call
        self.types = operands(call.ins) if first else call.ins
        self.made = parts(self.types, call.attrs)
        self.first = first
        batch = self.made.batch
        self.batches = (batch[:-1], batch[-1:])

    def q(self) -> str:
        groups = (*self.batches, self.made.query, (self.made.key,))
        return self._grouped(self.first, groups)

    def k(self) -> str:
        return self._grouped(self.first + 1, (*self.batches, (self.made.mem,), (self.made.key,)))

    def v(self) -> str:
        groups = (*self.batches, (self.made.mem,), self.made.feature)
        return self._grouped(self.first + 2, groups)

    def o(self, index: int) -> str:
        return self._grouped(index, (*self.batches, self.made.query, self.made.feature))

    def lse(self, index: int) -> str:
        return self._grouped(index, (*self.batches, self.made.query))

    @property
    def is_block(self) -> bool:
        """Whether it is of one of several blocks of memory, whose results are merged."""
        return "block" in self.call.attrs

    @cached_property
    def end(self) -> str:
        """Where the last row of a slice of the sequence ends: nothing behind is read; or empty."""
        if "slices" not in self.call.attrs:
            return ""
        (dim,) = self.call.attrs["causal"]
        first, count = kit.atom(self.call.offset(dim.name)), self.call.extent(dim.name)
        return self.call.let("end", f"{first} + {count}")

    @property
    def is_causal(self) -> bool:
        """Whether the mask is the triangle of a whole sequence and a memory as long."""
        causal, mem = self.call.attrs["causal"], self.call.attrs["dims"][1]
        alone = tuple(d.name for d in causal) == self.made.query
        spans_memory = all(d.size == mem.size and not self.call.is_split(d.name) for d in causal)
        return bool(causal) and alone and spans_memory

    def masks(self) -> str:
        """The mask as bools, [batch, batch, query, mem], its leading dims perhaps of size 1."""
        if self.call.attrs["causal"] and not self.is_causal:
            return self._triangle()
        if len(self.types) < 4:
            return "None"
        if is_last(self.types[3]):
            positions = f"torch.arange({self.call.extent(self.made.mem)})"
            return self._mask(f"({positions} <= {self.call.tensor(-1)})", (self.made.mem,))
        return self._mask(self.call.args[-1], self.types[3].names)

    def _triangle(self) -> str:
        dim, mem = self.call.attrs["causal"][0].name, self.made.mem
        rows = f"torch.arange({self.call.extent(dim)})"
        if self.call.is_split(dim):
            rows = f"({rows} + {kit.atom(self.call.offset(dim))})"
        seen = f"{rows}[:, None] >= torch.arange({self.end or self.call.extent(mem)})"
        return self._mask(self.call.let("seen", seen), (dim, mem))

    def _mask(self, text: str, names: kit.Names) -> str:
        """A mask of dims `names`; where several dims are flattened it has all of them."""
        groups = (*self.batches, self.made.query, (self.made.mem,))
        fitted = _widened(text, names, tuple(n for g in groups for n in g))
        return self._flattened(fitted, groups, whole=False, names=names)

    def _grouped(self, index: int, groups: Sequence[kit.Names]) -> str:
        names, text = self.call.ins[index].names, self.call.tensor(index)
        if self.end and self.made.mem in names:
            text = f"{text}.narrow({names.index(self.made.mem)}, 0, {self.end})"
        fitted = _widened(text, names, tuple(n for g in groups for n in g))
        return self._flattened(fitted, groups, whole=True, names=names)

    def _flattened(
        self, text: str, groups: Sequence[kit.Names], *, whole: bool, names: kit.Names
    ) -> str:
        """`text` of one dim a group; dims not in `names` are expanded, if the whole is wanted."""
        every = [n for g in groups for n in g]
        needed = [whole or len(g) > 1 for g in groups for n in g]
        missing = [n not in names and need for n, need in zip(every, needed, strict=True)]
        if any(missing):
            pairs = zip(every, missing, strict=True)
            sizes = [self.call.extent(n) if m else -1 for n, m in pairs]
            text = f"{text}.expand({kit.tuple_text(sizes)})"
        for at, group in enumerate(groups):
            text = kit.joined(text, at, len(group))
        return text

    def result(self, text: str, groups: Sequence[kit.Names], index: int) -> str:
        """A result of a kernel with the dims of output `index`, in their order."""
        names = tuple(n for g in groups for n in g)
        text = kit.ungrouped(self.call, text, groups, names)
        out = self.call.outs[index].names
        extra = tuple(n for n in names if n not in out)
        if extra:
            text = f"{text}.sum({kit.tuple_text([names.index(n) for n in extra])})"
            names = tuple(n for n in names if n in out)
        return kit.permuted(text, names, out)

    def whole(self, text: str, index: int) -> str:
        """A gradient along all of the memory, with zeros behind the end of a slice."""
        names = self.call.outs[index].names
        if not self.end or self.made.mem not in names:
            return text
        inner = len(names) - 1 - names.index(self.made.mem)
        missing = f"{self.call.extent(self.made.mem)} - {self.end}"
        padding = kit.tuple_text([*[0] * (2 * inner + 1), missing])
        return f"torch.nn.functional.pad({text}, {padding})"

    def options(self, causal: str) -> str:
        """The keywords of the scale, where it is not torch's own, and of the triangle."""
        scale, key = self.call.attrs["scale"], self.call.attrs["dims"][0].size
        keywords = [f"{causal}=True"] if self.is_causal else []
        usual = math.isclose(scale, 1 / math.sqrt(key), rel_tol=1e-12)
        return "".join(f", {o}" for o in [*keywords, *([] if usual else [f"scale={scale!r}"])])


def _widened(text: str, names: kit.Names, target: kit.Names) -> str:
    """`text` permuted to the order of `target`, with dims of size 1 where it lacks some."""
    text = kit.permuted(text, names, tuple(n for n in target if n in names))
    if all(n in names for n in target):
        return text
    return f"{text}[{', '.join(':' if n in names else 'None' for n in target)}]"


def _torch(call: kit.TorchCall) -> str:
    """Torch's own function where no mask is made; a row that sees nothing is not uniform there."""
    text = _AttentionText(call)
    groups = (*text.batches, text.made.query, text.made.feature)
    if len(call.ins) == 4 and is_last(call.ins[3]):
        last = call.numbers.get(3) or call.let_number(3, f"int({call.tensor(3)})")
        args = f"{text.q()}, {text.k()}, {text.v()}, {last}{text.options('is_causal')}"
        return text.result(f"{call.use('attention_up_to')}({args})", groups, 0)
    mask = text.masks()
    if mask == "None":
        function = "torch.nn.functional.scaled_dot_product_attention"
        kernel = f"{function}({text.q()}, {text.k()}, {text.v()}{text.options('is_causal')})"
    else:
        args = f"{text.q()}, {text.k()}, {text.v()}, {mask}{text.options('causal')}"
        kernel = f"{call.use('attention_of_mask')}({args})"
    return text.result(kernel, groups, 0)


def _lse_torch(call: kit.TorchCall) -> str:
    text = _AttentionText(call)
    mask = text.masks()
    shown = "" if mask == "None" else f", {mask}"
    args = f"{text.q()}, {text.k()}, {text.v()}{shown}{text.options('causal')}"
    rows = (*text.batches, text.made.query)
    function = call.use("attention_block" if text.is_block else "attention_lse")
    return _several(text, f"{function}({args})", ((*rows, text.made.feature), rows))


def _grad_torch(call: kit.TorchCall) -> str:
    text = _AttentionText(call, 1)
    mask = text.masks()
    shown = "" if mask == "None" else f", {mask}"
    args = [text.o(0), text.q(), text.k(), text.v(), text.o(4), text.lse(5)]
    function = call.use("attention_block_grad" if text.is_block else "attention_grad")
    kernel = f"{function}({', '.join(args)}{shown}{text.options('causal')})"
    query, mem, key = text.made.query, (text.made.mem,), (text.made.key,)
    ends = ((query, key), (mem, key), (mem, text.made.feature))
    return _several(text, kernel, tuple((*text.batches, *end) for end in ends))


def _several(text: _AttentionText, kernel: str, results: Sequence[Sequence[kit.Names]]) -> str:
    """The tuple of the results of a kernel, each with its dims; the call itself if it has them."""
    as_made = [text.whole(text.result("", groups, i), i) for i, groups in enumerate(results)]
    if not any(as_made):
        return kernel
    name = text.call.let("made", kernel)
    outputs = (
        text.whole(text.result(f"{name}[{i}]", groups, i), i) for i, groups in enumerate(results)
    )
    return f"({', '.join(outputs)})"


# --- records -----------------------------------------------------------------------------------


def _flops(sig: kit.Signature, *, gradient: bool = False) -> int:
    """Two products forward; five backward, one of them the scores once more. 5 for a softmax."""
    types = operands(sig.ins) if gradient else sig.ins
    key_dim = sig.attrs["dims"][0].name
    scored = {d.name: d.size for t in (*types[:2], *types[3:]) for d in t.dims}
    key, count = scored[key_dim], math.prod(n for d, n in scored.items() if d != key_dim)
    feature = math.prod(d.size for d in types[2].dims if d.name not in scored or d.name == key_dim)
    if gradient:
        return count * (6 * key + 4 * feature + 8)
    return count * (2 * key + 2 * feature + 5)


def _attended(sig: kit.Signature, *, gradient: bool = False) -> float:
    """Blocks of scores that a causal mask hides as a whole are left out: nearly half of them.

    Of `slices` of a sequence, what is behind each of them: that is the mean of all.
    Where the rows are a part of the sequence, or have other dims of the queries as well, as groups
    of heads that share keys are, the kernel gets a mask, and everything is computed.
    """
    types = operands(sig.ins) if gradient else sig.ins
    mem = sig.attrs["dims"][1].name
    if slices := sig.attrs.get("slices"):
        ends = itertools.accumulate(slices)
        computed = sum(n * end for n, end in zip(slices, ends, strict=True))
        return float(computed / sum(slices) ** 2)
    sizes = {d.name: d.size for t in types for d in t.dims}
    causal = tuple(d.name for d in sig.attrs["causal"])
    alone = causal and causal == parts(types, sig.attrs).query
    return 0.5 if alone and all(sizes[n] == sizes[mem] for n in causal) else 1.0


def _scratch(types: kit.Types, attrs: kit.Attrs, *, gradient: bool = False) -> int:
    """The bytes of a mask in floats, and of operands that are put in the order of the kernel."""
    masks = sum(3 * m.elements * kit.F32.bytes for m in types[3:] if not is_last(m))
    if _fits_kernel(types, attrs) and not (masks and gradient):
        return masks + (types[0].bytes if masks else 0)
    return masks + 2 * sum(t.bytes for t in types[:3])


def _fits_kernel(types: kit.Types, attrs: kit.Attrs) -> bool:
    """Whether the kernel reads q, k and v as they lie in memory, and no mask is made."""
    roles = parts(types, attrs)
    if len(roles.feature) != 1 or max(len(roles.batch) - 1, len(roles.query)) > 1:
        return False
    q, k, v = types[:3]
    trailing = ((*roles.query, roles.key), (roles.mem, roles.key), (roles.mem, *roles.feature))
    alike = (
        {*t.names} == {*roles.batch, *ends} for t, ends in zip((q, k, v), trailing, strict=True)
    )
    last = (t.names[-1] == ends[-1] for t, ends in zip((q, k, v), trailing, strict=True))
    widths = k.dims[-1].size == v.dims[-1].size
    triangle = (q.size(d.name) == k.size(roles.mem) for d in attrs["causal"])
    return all((*alike, *last, widths, *triangle))


def _earlier(types: kit.Types, attrs: kit.Attrs) -> dict[str, str]:
    """The memory of a triangle, of a sequence and a memory as long."""
    mem = attrs["dims"][1]
    return {m.name: dim.name for dim in attrs["causal"] for m in (mem,) if dim.size == mem.size}


def _gradient(call: kit.Backward) -> kit.Grads:
    """The gradients by q, k and v together, from o and the logarithm of the sums."""
    grad = kit.full_grad(call)
    qkv = [call.operand(i) for i in range(3)]
    masks = [call.operand(i) for i in range(3, len(call.ins))]
    saved = [*qkv, call.result(), call.result(1), *masks]
    return dict(enumerate(call.emit_all("attention_grad", grad, *saved, **call.attrs)))


_SMALL = (
    "s h; v h; v w=2 | dims=(h v) out=(s w) scale=0.5 causal=(s)",
    "h; b h v; v b | dims=(h v) out=(b) scale=0.5 causal=()",
    "h s; v h; v; s v: bool | dims=(h v) out=(s) scale=0.5 causal=()",
    "h s; v h; v; (): i32 index:v | dims=(h v) out=(s) scale=0.5 causal=()",
)
"""Fewer dims, since a gradient has so many operands that may be placed in so many ways."""
_SAMPLES = kit.samples(
    f"b s h; b v h; b v h | dims=(h v) out=(b s h) scale={1 / math.sqrt(6)} causal=()",
    "b s h; b v h; b v w=2 | dims=(h v) out=(b s w) scale=0.5 causal=(s)",
    "s h w=2; h v; h v b; w v: bool | dims=(h v) out=(h w s b) scale=0.5 causal=()",
    *_SMALL,
    values="unit unit int bool",
)
"""Operands q, k, v and perhaps a mask: values with `key`, with a dim of their own, with both.

The first is written in the language, which has no sign for the triangle: an example of it.
"""


def _grad_sample(text: str) -> kit.Sample:
    sample = kit.sample(text)
    q, k, v, *mask = sample.ins
    o, lse = _lse_infer(sample.ins, dict(sample.attrs))
    kinds = ("int", "unit", "unit", "int", "int", "positive", *sample.values[3:])
    return kit.Sample((o, q, k, v, o, lse, *mask), sample.attrs, kinds)


kit.operator(
    "attention",
    kit.Surface("dims", (3, 4), (("scale", None),)),
    _infer,
    _factors([2]),
    lambda call, *arrays: _lse_numpy(call, *arrays)[0],
    _torch,
    _SAMPLES,
    exact=False,
    composite=True,
    flops=_flops,
    attended=_attended,
    bind=_bind,
    gradient=_gradient,
    saving="attention_lse",
    scratch=lambda sig, numbers: _scratch(sig.ins, sig.attrs),
    precision="compute",
    ordered="causal",
    earlier=_earlier,
    meaning=(
        "softmax(scale * q·k)·v: contracted over the first dim, weighted along the second. "
        "The mask, of bools, says who may look where, or one integer up to which position all may; "
        "`scale` is 1 / sqrt(key) by default. The "
        "result has the dims of q in their order, with those that only v has in the place of "
        "`key`; those that q lacks come first."
    ),
)
kit.operator(
    "attention_lse",
    kit.Surface("view", (3, 4)),
    _lse_infer,
    _factors(),
    _lse_numpy,
    _lse_torch,
    _SAMPLES,
    exact=False,
    composite=True,
    flops=_flops,
    attended=_attended,
    gradient=_gradient,
    saved=("lse",),
    true_rows={
        "B, B, P -> P, B": "a partial result comes with partial ones alone",
        "B, B, P, B -> P, B": "a partial result comes with partial ones alone",
    },
    scratch=lambda sig, numbers: _scratch(sig.ins, sig.attrs),
    precision="compute",
    ordered="causal",
    earlier=_earlier,
    words="`attention`",
    meaning="`attention`, and the logarithm of the sum of the exponentials, for its gradient.",
)
kit.operator(
    "attention_grad",
    kit.Surface("view", (6, 7)),
    _grad_infer,
    _factors([0], gradient=True),
    _grad_numpy,
    _grad_torch,
    kit.SampleList(lambda: map(_grad_sample, _SMALL)),
    exact=False,
    composite=True,
    flops=lambda sig: _flops(sig, gradient=True),
    attended=lambda sig: _attended(sig, gradient=True),
    true_rows={
        "B, B, B, P, P, B -> P, P, B": "a partial result comes with partial ones alone",
        "B, B, B, P, P, B, B -> P, P, B": "a partial result comes with partial ones alone",
    },
    scratch=lambda sig, numbers: max(
        sig.ins[0].bytes,  # the kernel puts the gradient of its result in the order of a sequence
        _scratch(operands(sig.ins), sig.attrs, gradient=True),
    ),
    precision="compute",
    ordered="causal",
    earlier=_earlier,
    words="the gradient of `attention`",
    meaning="The gradients of `attention` by q, k and v; the softmax is computed anew.",
)
