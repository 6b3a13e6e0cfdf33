"""How a good engineer writes an einsum in torch: a product, a sum, a matmul; `torch.einsum` else.

A matmul is written where each operand is `[batch…, rows…, k…]` or that transposed, so that nothing
but `.mT`, `flatten` and `unflatten` (views of what is contiguous) is needed.
"""

from __future__ import annotations

import string
from dataclasses import dataclass

from meshdsl.named.ir import I32
from meshdsl.ops.opdef import TorchCall
from meshdsl.ops.text import Names, aligned, one_or_tuple, permuted, tuple_text


@dataclass(frozen=True, slots=True)
class Term:
    """The text of one operand and the names of its dims, in order."""

    text: str
    dims: Names


def einsum_text(call: TorchCall) -> str:
    """The text of `einsum` for any number of operands."""
    target = call.outs[0].names
    if len(call.ins) == 1:
        term = _without_lone(call, 0, target)
        return permuted(term.text, term.dims, target)
    if len(call.ins) > 2:
        return _spelled(call, [_term(call, i) for i in range(len(call.ins))], target)
    shared = {n for n in call.ins[0].names if call.ins[1].has(n)}
    if shared <= set(target):
        return _product(call, target)
    terms = [_without_lone(call, i, (*target, *shared)) for i in range(2)]
    return (
        _matmul(call, terms, target)
        or _product_sum(call, terms, target)
        or _spelled(call, terms, target)
    )


def _term(call: TorchCall, index: int) -> Term:
    return Term(call.tensor(index), call.ins[index].names)


def sum_text(text: str, axes: list[int], rank: int, is_i32: bool) -> str:
    """`text` summed over `axes`; torch would make i64 of an i32 sum."""
    args = [] if len(axes) == rank else [one_or_tuple(axes)]
    args += ["dtype=torch.int32"] if is_i32 else []
    return f"{text}.sum({', '.join(args)})"


def _without_lone(call: TorchCall, index: int, kept: Names) -> Term:
    """Operand `index` summed over the dims that are not `kept`."""
    term = _term(call, index)
    axes = [i for i, n in enumerate(term.dims) if n not in kept]
    if not axes:
        return term
    text = sum_text(term.text, axes, len(term.dims), call.outs[0].dtype == I32)
    return Term(text, tuple(n for n in term.dims if n in kept))


# --- products --------------------------------------------------------------------------------


def _product(call: TorchCall, target: Names) -> str:
    """Nothing is summed over both operands: an elementwise product of what remains of each."""
    texts = [_factor(call, i, target) for i in range(2)]
    if call.is_constant(0) and call.is_constant(1):
        texts[0] = call.tensor(0)
    return f"{texts[0]} * {texts[1]}"


def _factor(call: TorchCall, index: int, target: Names) -> str:
    """Operand `index`, lone dims summed, aligned to `target`."""
    if all(n in target for n in call.ins[index].names):
        return call.aligned(index, call.outs[0].dims)
    term = _without_lone(call, index, target)
    return aligned(term.text, term.dims, target)


def _product_sum(call: TorchCall, terms: list[Term], target: Names) -> str | None:
    """`(a * b).sum(…)` where one operand has all dims of the other and they keep some in common.

    A batched product of vectors is up to 60 times slower as `torch.einsum` (which copies, too).
    """
    large, small = sorted(terms, key=lambda term: -len(term.dims))
    if not set(small.dims) <= set(large.dims) or not set(small.dims) & set(target):
        return None
    axes = [i for i, n in enumerate(large.dims) if n not in target]
    product = f"({large.text} * {aligned(small.text, small.dims, large.dims)})"
    text = sum_text(product, axes, len(large.dims), call.outs[0].dtype == I32)
    return permuted(text, tuple(n for n in large.dims if n in target), target)


# --- matmul ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Groups:
    """The dims of a contraction by role; `rows` and `cols` in the order of the result."""

    batch: Names
    rows: Names
    cols: Names
    k: Names


def _matmul(call: TorchCall, terms: list[Term], target: Names) -> str | None:
    """`a @ b` if the result is `[batch…, rows…, cols…]`, of either order, else None."""
    a, b = terms
    texts = [_product_of(call, a, b, target), _product_of(call, b, a, target)]
    # A vector may stand on either side.
    return min((t for t in texts if t), key=len, default=None)


def _product_of(call: TorchCall, a: Term, b: Term, target: Names) -> str | None:
    groups = _Groups(
        tuple(n for n in target if n in a.dims and n in b.dims),
        tuple(n for n in target if n in a.dims and n not in b.dims),
        tuple(n for n in target if n in b.dims and n not in a.dims),
        tuple(n for n in a.dims if n in b.dims and n not in target),
    )
    if target != groups.batch + groups.rows + groups.cols:
        return None
    if groups.batch and not (groups.rows and groups.cols):
        return None  # a matmul wants a row and a column when it has a batch
    return _written(call, a, b, groups)


def _written(call: TorchCall, a: Term, b: Term, groups: _Groups) -> str | None:
    orders = {groups.k, tuple(n for n in b.dims if n in groups.k)}
    for k in sorted(orders, key=lambda order: order != groups.k):
        right = _side(b, groups.batch, k, groups.cols)
        # A matmul takes any leading dims of its left operand as they are.
        plain = _plain_left(a, groups, k)
        left = plain or _side(a, groups.batch, groups.rows, k)
        if left and right:
            return _unflattened(call, f"{left} @ {right}", groups, rows_are_flat=not plain)
    return None


def _plain_left(a: Term, groups: _Groups, k: Names) -> str | None:
    if groups.batch or len(k) > 1 or a.dims != groups.rows + k:
        return None
    return a.text


def _side(term: Term, batch: Names, first: Names, second: Names) -> str | None:
    """An operand as a stack of matrices first × second, or None if that takes a permute."""
    if term.dims == batch + first + second:
        return _flattened(term.text, len(batch), first, second)
    if term.dims == batch + second + first:
        return _flattened(term.text, len(batch), second, first) + ".mT"
    return None


def _flattened(text: str, start: int, first: Names, second: Names) -> str:
    """`text` with each group of dims made one; the later group first, so that positions hold."""
    end = start + len(first)
    if len(second) > 1:
        text += f".flatten({end})" if end else ".flatten()"
    if len(first) > 1:
        text += f".flatten({start}, {end - 1})" if start or second else ".flatten()"
    return text


def _unflattened(call: TorchCall, product: str, groups: _Groups, rows_are_flat: bool) -> str:
    """`product` with the dims of the result given back where several were made one."""
    sizes = dict(zip(call.outs[0].names, call.outs[0].shape, strict=True))
    suffix = ""
    if len(groups.cols) > 1:
        suffix += f".unflatten(-1, {tuple_text([sizes[n] for n in groups.cols])})"
    if len(groups.rows) > 1 and rows_are_flat:
        start, rows = len(groups.batch), [sizes[n] for n in groups.rows]
        suffix += f".unflatten({start}, {tuple_text(rows)})"
    return f"({product}){suffix}" if suffix else product


# --- torch.einsum ----------------------------------------------------------------------------


def _spelled(call: TorchCall, terms: list[Term], target: Names) -> str:
    """`torch.einsum("bsm,mhk->bhsk", x, w)`; the sizes have been checked, it would not."""
    letters = letters_for(tuple(dict.fromkeys(n for t in terms for n in t.dims)))
    ins = ",".join("".join(letters[n] for n in t.dims) for t in terms)
    out = "".join(letters[n] for n in target)
    text = f'torch.einsum("{ins}->{out}", {", ".join(t.text for t in terms)})'
    return f"{text}.to(torch.int32)" if call.outs[0].dtype == I32 else text  # it may yield i64


def letters_for(names: Names) -> dict[str, str]:
    """A letter for each dim: one of its own where it is free, else any."""
    found: dict[str, str] = {}
    for name in names:
        own = [c for c in name.lower() if c in string.ascii_lowercase]
        choices = (*own, *string.ascii_letters)
        found[name] = next(c for c in choices if c not in found.values())
    return found
