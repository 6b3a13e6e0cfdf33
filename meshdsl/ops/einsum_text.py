"""The torch text of an einsum: a product, a sum, a matmul; `torch.einsum` else.

A matmul is written with as few copies as possible: none where operands are `[batch…, rows…, k…]`
or that transposed, since `.mT`, `flatten` and `unflatten` are views of contiguous tensors.
"""

from __future__ import annotations

import itertools
import math
import string
from collections.abc import Iterator, Mapping

from meshdsl.ops import kit
from meshdsl.records import dataclass


@dataclass(frozen=True, slots=True)
class Term:
    """The text of one operand and the names of its dims, in order."""

    text: str
    dims: kit.Names


def einsum_text(call: kit.TorchCall, *, views: bool = False) -> str:
    """The text of `einsum` for any number of operands.

    `views`: a product whose operands have to be permuted is left to `torch.einsum`.
    """
    text = _any_text(call, views)
    empty = _emptied(call)
    if not empty:
        return text
    # A factor that is taken out of a sum over nothing would make NaN of an infinity.
    has_terms = " and ".join(call.extent(n) for n in empty)
    zeros = f"torch.zeros({call.shape(0)}, dtype={call.outs[0].dtype.torch})"
    return f"{text} if {has_terms} else {zeros}"


def _emptied(call: kit.TorchCall) -> list[str]:
    """The summed dims of which some devices have nothing, if factors may be taken out of the sum.

    A product of two operands that is summed over dims of both is zero on these devices by itself.
    """
    names = dict.fromkeys(n for t in call.ins for n in t.names if not call.outs[0].has(n))
    empty = [n for n in names if call.may_be_empty(n)]
    lone = [n for n in empty if sum(t.has(n) for t in call.ins) == 1]
    if len(call.ins) == 1:
        return []
    return lone if len(call.ins) == 2 else empty


def _any_text(call: kit.TorchCall, views: bool) -> str:
    target = call.outs[0].names
    if len(call.ins) == 1:
        term = _without_lone(call, 0, target)
        return kit.permuted(term.text, term.dims, target)
    if len(call.ins) > 2:
        return _spelled(call, [_term(call, i) for i in range(len(call.ins))], target)
    shared = {n for n in call.ins[0].names if call.ins[1].has(n)}
    if shared <= set(target):
        return _product(call, target)
    terms = [_without_lone(call, i, (*target, *shared)) for i in range(2)]
    return (
        _matmul(call, terms, target, views)
        or _product_sum(call, terms, target)
        or _spelled(call, terms, target)
    )


def _term(call: kit.TorchCall, index: int) -> Term:
    return Term(call.tensor(index), call.ins[index].names)


def sum_text(text: str, axes: list[int], rank: int, is_i32: bool) -> str:
    """`text` summed over `axes`; torch would make i64 of an i32 sum."""
    args = [] if len(axes) == rank else [kit.one_or_tuple(axes)]
    args += ["dtype=torch.int32"] if is_i32 else []
    return f"{text}.sum({', '.join(args)})"


def _without_lone(call: kit.TorchCall, index: int, kept: kit.Names) -> Term:
    """Operand `index` summed over the dims that are not `kept`."""
    term = _term(call, index)
    axes = [i for i, n in enumerate(term.dims) if n not in kept]
    if not axes:
        return term
    text = sum_text(term.text, axes, len(term.dims), call.outs[0].dtype == kit.I32)
    return Term(text, tuple(n for n in term.dims if n in kept))


# --- products --------------------------------------------------------------------------------


def _product(call: kit.TorchCall, target: kit.Names) -> str:
    """The elementwise product of the operands' sums, where no dim of both is summed."""
    texts = [_factor(call, i, target) for i in range(2)]
    if call.is_constant(0) and call.is_constant(1):
        texts[0] = call.tensor(0)
    return f"{texts[0]} * {texts[1]}"


def _factor(call: kit.TorchCall, index: int, target: kit.Names) -> str:
    """Operand `index`, lone dims summed, aligned to `target`."""
    if all(n in target for n in call.ins[index].names):
        return call.aligned(index, call.outs[0].dims)
    term = _without_lone(call, index, target)
    return kit.aligned(term.text, term.dims, target)


def _product_sum(call: kit.TorchCall, terms: list[Term], target: kit.Names) -> str | None:
    """`(a * b).sum(…)` where one operand has all dims of the other and they keep some in common.

    A batched product of vectors is up to 60 times slower as `torch.einsum` (which copies, too).
    """
    factors = _vector_factors(terms, target)
    if factors is None:
        return None
    large, small = factors
    axes = [i for i, n in enumerate(large.dims) if n not in target]
    product = f"({large.text} * {kit.aligned(small.text, small.dims, large.dims)})"
    text = sum_text(product, axes, len(large.dims), call.outs[0].dtype == kit.I32)
    return kit.permuted(text, tuple(n for n in large.dims if n in target), target)


def _vector_factors(terms: list[Term], target: kit.Names) -> tuple[Term, Term] | None:
    """The operand that has all dims of the other, and that one, if they keep some in common."""
    large, small = sorted(terms, key=lambda term: -len(term.dims))
    fits = set(small.dims) <= set(large.dims) and set(small.dims) & set(target)
    return (large, small) if fits else None


# --- matmul ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _RoleGroups:
    """The dims of a contraction by role, in the order a matmul has them."""

    batch: kit.Names
    rows: kit.Names
    cols: kit.Names
    k: kit.Names

    @property
    def result(self) -> kit.Names:
        """The dims of the product."""
        return self.batch + self.rows + self.cols


@dataclass(frozen=True, slots=True)
class _Matmul:
    """A matmul for a contraction; `copied` counts operands that have to be permuted."""

    text: str
    copied: int
    is_in_order: bool

    @property
    def effort(self) -> tuple[int, bool, int]:
        """The cost, least first: copies, then strides for the next reader, then length."""
        return self.copied, not self.is_in_order, len(self.text)


def _matmul(call: kit.TorchCall, terms: list[Term], target: kit.Names, views: bool) -> str | None:
    """`a @ b`, of either order; with `views`, only where it is `[batch…, rows…, cols…]` as it is.

    Otherwise operands and result are permuted, as `torch.einsum` does at more expense.
    """
    a, b = terms
    products = [
        written
        for left, right in ((a, b), (b, a))  # a vector may be on either side
        for groups in _groupings(left, right, target)
        if (written := _written(call, left, right, groups, target)) is not None
    ]
    if views:
        products = [m for m in products if not m.copied and m.is_in_order]
    best = min(products, key=lambda m: m.effort, default=None)
    return best.text if best else None


def _groupings(left: Term, right: Term, target: kit.Names) -> Iterator[_RoleGroups]:
    """The roles of the dims, each role in the orders that the result and the operands have."""
    both = set(left.dims) & set(right.dims)
    target_dims = set(target)

    def orders(dims: set[str], *sources: kit.Names) -> tuple[kit.Names, ...]:
        return tuple(dict.fromkeys(tuple(n for n in s if n in dims) for s in sources))

    batches = orders(both & target_dims, target, left.dims, right.dims)
    rows = orders(set(left.dims) - both, target, left.dims)
    cols = orders(set(right.dims) - both, target, right.dims)
    sums = orders(both - target_dims, left.dims, right.dims)
    for parts in itertools.product(batches, rows, cols, sums):
        yield _RoleGroups(*parts)


def _written(
    call: kit.TorchCall, left: Term, right: Term, groups: _RoleGroups, target: kit.Names
) -> _Matmul | None:
    is_matrix = bool(groups.rows and groups.cols)
    if not is_matrix and not _fits_vectors(left, right, groups, target):
        return None
    first = _plain_left(left, groups) or _side(left, groups.batch, groups.rows, groups.k)
    second = _side(right, groups.batch, groups.k, groups.cols)
    copied = sum(_elements(call, t) for t, s in ((left, first), (right, second)) if s is None)
    is_in_order = groups.result == target
    if first is None:
        left = _in_order(left, groups.batch, groups.rows, groups.k)
        first = _plain_left(left, groups) or _side(left, groups.batch, groups.rows, groups.k)
    if second is None:
        right = _in_order(right, groups.batch, groups.k, groups.cols)
        second = _side(right, groups.batch, groups.k, groups.cols)
    rows_are_flat = _plain_left(left, groups) is None
    suffix = _unflattened(call, groups, rows_are_flat) + kit.permuted("", groups.result, target)
    text = f"({first} @ {second}){suffix}" if suffix else f"{first} @ {second}"
    return _Matmul(text, copied, is_in_order)


def _fits_vectors(left: Term, right: Term, groups: _RoleGroups, target: kit.Names) -> bool:
    """Whether torch's matmul takes the operands as they are; with a vector, it takes no batch."""
    if groups.batch or groups.result != target:
        return False
    is_left = _plain_left(left, groups) is not None
    is_left = is_left or _side(left, groups.batch, groups.rows, groups.k) is not None
    return is_left and _side(right, groups.batch, groups.k, groups.cols) is not None


def _elements(call: kit.TorchCall, term: Term) -> int:
    sizes = {d.name: d.size for type_ in call.ins for d in type_.dims}
    return math.prod(sizes[n] for n in term.dims)


def _plain_left(a: Term, groups: _RoleGroups) -> str | None:
    """A matmul with any leading dims of its left operand as they are, or None."""
    if groups.batch or a.dims != groups.rows + groups.k:
        return None
    flat = f".flatten({len(groups.rows) or ''})" if len(groups.k) > 1 else ""
    return a.text + flat


def _in_order(term: Term, batch: kit.Names, first: kit.Names, second: kit.Names) -> Term:
    """The operand permuted for a matmul; dims adjacent in memory stay adjacent if possible."""
    order = batch + first + second
    if term.dims[-1] not in second:
        order = batch + second + first
    return Term(kit.permuted(term.text, term.dims, order), order)


def _side(term: Term, batch: kit.Names, first: kit.Names, second: kit.Names) -> str | None:
    """An operand as a stack of matrices first × second, or None if that takes a permute."""
    if term.dims == batch + first + second:
        return _flattened(term.text, len(batch), first, second)
    if term.dims == batch + second + first:
        return _flattened(term.text, len(batch), second, first) + ".mT"
    return None


def _flattened(text: str, start: int, first: kit.Names, second: kit.Names) -> str:
    """`text` with each group of dims made one; the later first, so that positions stay valid."""
    end = start + len(first)
    if len(second) > 1:
        text += f".flatten({end})" if end else ".flatten()"
    if len(first) > 1:
        text += f".flatten({start}, {end - 1})" if start or second else ".flatten()"
    return text


def _unflattened(call: kit.TorchCall, groups: _RoleGroups, rows_are_flat: bool) -> str:
    """The text that restores the dims of the result where several were made one."""
    suffix = ""
    if len(groups.cols) > 1:
        suffix += f".unflatten(-1, {kit.tuple_text([call.extent(n) for n in groups.cols])})"
    if len(groups.rows) > 1 and rows_are_flat:
        start, rows = len(groups.batch), [call.extent(n) for n in groups.rows]
        suffix += f".unflatten({start}, {kit.tuple_text(rows)})"
    return suffix


def temporary_elements(ins: kit.Types, out: kit.TensorType) -> int:
    """The elements of the temporary tensors of an einsum's text, copies of operands apart.

    Those of `torch.einsum`, which is the text where nothing else fits, are not known.
    """
    if len(ins) != 2:
        return 0
    sizes = {d.name: d.size for t in ins for d in t.dims}
    shared = {*ins[0].names} & {*ins[1].names}
    a, b = (Term("", tuple(n for n in t.names if out.has(n) or n in shared)) for t in ins)
    summed = [term.dims for term, t in zip((a, b), ins, strict=True) if term.dims != t.names]
    if not shared <= {*out.names}:
        is_matmul = any(
            bool(groups.rows and groups.cols) or _fits_vectors(left, right, groups, out.names)
            for left, right in ((a, b), (b, a))
            for groups in _groupings(left, right, out.names)
        )
        if not is_matmul:
            factors = _vector_factors([a, b], out.names)
            summed += [factors[0].dims] if factors else []
    return sum(math.prod(sizes[n] for n in dims) for dims in summed)


# --- products added to a sum -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AddedProduct:
    """A product of matrices, which torch may add to an existing one; operand `left` is the first.

    `copied` counts the elements of operands that have to be permuted.
    """

    left: int
    groups: _RoleGroups
    copied: int

    @property
    def joined(self) -> frozenset[int]:
        """The dims of the sum, by position, that are joined with the ones before them."""
        joined, start = set[int](), 0
        for group in (self.groups.batch, self.groups.rows, self.groups.cols):
            joined.update(range(start + 1, start + len(group)))
            start += len(group)
        return frozenset(joined)


def added_product(ins: kit.Types, out: kit.TensorType) -> AddedProduct | None:
    """How torch adds an einsum to a sum, with the fewest copies; None where it cannot."""
    in_order = [w for w in _ways(ins, out) if w.groups.result == out.names]
    fitting = [w for w in in_order if len(w.groups.batch) < 2]
    return min(fitting, key=lambda way: way.copied, default=None)


def is_contiguous(ins: kit.Types, out: kit.TensorType) -> bool:
    """Whether the text of an einsum is a product of matrices as it is, its dims not permuted.

    Torch makes a contiguous tensor of that.
    """
    ways = _ways(ins, out)
    least = min((way.copied for way in ways), default=0)
    return any(w.copied == least and w.groups.result == out.names for w in ways)


def _ways(ins: kit.Types, out: kit.TensorType) -> list[AddedProduct]:
    """The ways to compute an einsum as a product of matrices; none where it is no such product."""
    if len(ins) != 2:
        return []
    names = [t.names for t in ins]
    both = {*names[0]} & {*names[1]}
    if both <= {*out.names} or not {*names[0], *names[1]} <= {*out.names, *both}:
        return []
    sizes = {d.name: d.size for t in ins for d in t.dims}
    return [
        AddedProduct(left, groups, _copied((names[left], names[1 - left]), groups, sizes))
        for left in (0, 1)
        for groups in _groupings(Term("", names[left]), Term("", names[1 - left]), out.names)
        if groups.rows and groups.cols
    ]


def _copied(
    names: tuple[kit.Names, kit.Names], groups: _RoleGroups, sizes: Mapping[str, int]
) -> int:
    """The elements of the operands that have to be permuted."""
    sides = zip(names, _sides(groups), strict=True)
    permuted = (dims for dims, side in sides if _side(Term("", dims), *side) is None)
    return sum(math.prod(sizes[n] for n in dims) for dims in permuted)


def adding_text(call: kit.TorchCall, total: str) -> str:
    """The text that adds an einsum to `total`, dims of which may have to be joined."""
    over, groups, matrices = _product_onto(call, total)
    return f"{over}.{'baddbmm_' if groups.batch else 'addmm_'}({matrices})"


def filling_text(call: kit.TorchCall, whole: str) -> str:
    """The text that writes an einsum to `whole`, dims of which may have to be joined."""
    over, groups, matrices = _product_onto(call, whole)
    return f"torch.{'bmm' if groups.batch else 'mm'}({matrices}, out={over})"


def _product_onto(call: kit.TorchCall, onto: str) -> tuple[str, _RoleGroups, str]:
    """The text of an existing tensor as a matrix, the dims joined in it, and both matrices."""
    way = added_product(call.ins, call.outs[0])
    assert way is not None, "a product that is not of matrices"
    terms = [_term(call, i) for i in (way.left, 1 - way.left)]
    matrices = [
        _side(term, *side) or _side(_in_order(term, *side), *side)
        for term, side in zip(terms, _sides(way.groups), strict=True)
    ]
    groups = way.groups
    over = _flattened(onto, len(groups.batch), groups.rows, groups.cols)
    return over, groups, ", ".join(filter(None, matrices))


def _sides(groups: _RoleGroups) -> tuple[tuple[kit.Names, kit.Names, kit.Names], ...]:
    """The batch, first and second dims of both matrices."""
    return (groups.batch, groups.rows, groups.k), (groups.batch, groups.k, groups.cols)


# --- torch.einsum ----------------------------------------------------------------------------


def _spelled(call: kit.TorchCall, terms: list[Term], target: kit.Names) -> str:
    """`torch.einsum("bsm,mhk->bhsk", x, w)`; sizes have been checked, since torch would not."""
    letters = letters_for(tuple(dict.fromkeys(n for t in terms for n in t.dims)))
    ins = ",".join("".join(letters[n] for n in t.dims) for t in terms)
    out = "".join(letters[n] for n in target)
    text = f'torch.einsum("{ins}->{out}", {", ".join(t.text for t in terms)})'
    return f"{text}.to(torch.int32)" if call.outs[0].dtype == kit.I32 else text  # it may yield i64


def letters_for(names: kit.Names) -> dict[str, str]:
    """A letter for each dim: one of its own where it is free, else any."""
    letters: dict[str, str] = {}
    for name in names:
        in_name = [c for c in name.lower() if c in string.ascii_lowercase]
        choices = (*in_name, *string.ascii_letters)
        letters[name] = next(c for c in choices if c not in letters.values())
    return letters
