"""Where a result is 0 whatever the numbers are: in empty slots of experts, in a one-hot.

A fact says how many positions may be other than 0. Operators that begin one, or pass one on, have a
rule (`OpDef.zeros`); what has none is taken to be full. So a fact is an upper bound, never a guess.
Numbers are finite: 0 times an infinity is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from meshdsl.ir.types import TensorType
from meshdsl.ops.opdef import Filled, Operand, Signature, ZeroRule


def share(fact: Filled | None, types: Iterable[TensorType]) -> float:
    """The part of all positions that may be other than 0; the sizes are those of `types`."""
    if fact is None:
        return 1.0
    sizes = {d.name: d.size for t in types for d in t.dims}
    return fact.count / math.prod(sizes[n] for n in fact.dims)


def passes(*operands: int) -> ZeroRule:
    """The result is 0 wherever one of these operands is."""

    def rule(sig: Signature, ins: Sequence[Operand]) -> Filled | None:
        return of_product(sig, [ins[i].filled for i in operands])

    return rule


def of_product(sig: Signature, facts: Iterable[Filled | None]) -> Filled | None:
    """The fact of a product: those of two factors hold at once unless they count the same dims."""
    types = (*sig.ins, *sig.outs)
    product: Filled | None = None
    for fact in sorted((f for f in facts if f is not None), key=lambda f: share(f, types)):
        if product is None:
            product = fact
        elif not fact.dims & (product.dims | product.over):
            over = (product.over | fact.over) - product.dims
            product = Filled(product.dims | fact.dims, product.count * fact.count, over)
    return product


def of_sum(sig: Signature, fact: Filled | None) -> Filled | None:
    """The fact of a sum over the dims that the result lacks: its terms may lie apart."""
    out = sig.outs[0]
    if fact is None or not all(map(out.has, fact.dims)):
        return None
    sizes = {d.name: d.size for t in sig.ins for d in t.dims}
    apart = math.prod(sizes[n] for n in fact.over if not out.has(n))
    over = frozenset(filter(out.has, fact.over))
    return _bounded(Filled(fact.dims, fact.count * apart, over), [out])


def summed_product(sig: Signature, ins: Sequence[Operand]) -> Filled | None:
    """The rule of a product of all operands that is summed over the dims that the result lacks."""
    return of_sum(sig, of_product(sig, (operand.filled for operand in ins)))


def union(sig: Signature, ins: Sequence[Operand]) -> Filled | None:
    """The rule of what is 0 where both operands are: each has a fact along the same dims."""
    one, other = (operand.filled for operand in ins)
    if one is None or other is None or one.dims != other.dims:
        return None
    return _bounded(Filled(one.dims, one.count + other.count, one.over | other.over), sig.outs)


def equality(sig: Signature, ins: Sequence[Operand]) -> Filled | None:
    """The rule of `a == iota[d]`: true at most once along d, where `a` is the same along it."""
    for one, other in ((0, 1), (1, 0)):
        dims = frozenset(sig.ins[one].names)
        if ins[one].maker == "iota" and not dims & set(sig.ins[other].names):
            return Filled(dims, 1, frozenset(sig.ins[other].names))
    return None


def above(sig: Signature, ins: Sequence[Operand]) -> Filled | None:
    """The rule of `x > c`: false where x is 0, if c is a number that is not negative."""
    number = ins[1].number
    return ins[0].filled if number is not None and number >= 0 else None


def choice(sig: Signature, ins: Sequence[Operand]) -> Filled | None:
    """The rule of `where(c, x, y)`: 0 wherever `c` is false, if y is 0, or wherever both are."""
    condition, chosen, other = ins
    if other.number == 0:
        return of_product(sig, (condition.filled, chosen.filled))
    return other.filled if chosen.number == 0 else union(sig, (chosen, other))


def one_along(sig: Signature, ins: Sequence[Operand]) -> Filled | None:
    """The rule of what is 1 at one position of its attribute `dim`."""
    return Filled(frozenset({sig.attrs["dim"].name}), 1, frozenset(sig.ins[0].names))


def written(sig: Signature, ins: Sequence[Operand]) -> Filled | None:
    """The rule of what is written at indices of a dim of zeros."""
    if ins[0].maker != "zeros":
        return None
    out, indices = sig.outs[0], sig.ins[2].dims
    at_once = math.prod(d.size for d in indices if not out.has(d.name))
    over = frozenset(d.name for d in indices if out.has(d.name))
    return _bounded(Filled(frozenset({sig.attrs["dim"].name}), at_once, over), [out])


def renamed(pairs: Callable[[Signature], dict[str, str]]) -> ZeroRule:
    """The rule of what gives dims other names, and may leave positions of them out."""

    def rule(sig: Signature, ins: Sequence[Operand]) -> Filled | None:
        fact = ins[0].filled
        if fact is None:
            return None
        names = pairs(sig)
        dims, over = (frozenset(names.get(n, n) for n in ns) for ns in (fact.dims, fact.over))
        return _bounded(Filled(dims, fact.count, over), sig.outs)

    return rule


def split(sig: Signature, ins: Sequence[Operand]) -> Filled | None:
    """The rule of a dim that becomes several."""
    fact, dim = ins[0].filled, sig.attrs["dim"].name
    if fact is None:
        return None
    into = frozenset(d.name for d in sig.attrs["into"])
    dims, over = (ns - {dim} | into if dim in ns else ns for ns in (fact.dims, fact.over))
    return Filled(dims, fact.count, over)


def merged(sig: Signature, ins: Sequence[Operand]) -> Filled | None:
    """The rule of dims that become one: along the others of them it may be anywhere."""
    fact = ins[0].filled
    if fact is None:
        return None
    parts, into = {d.name: d.size for d in sig.attrs["dims"]}, sig.attrs["into"].name
    counted, varying = fact.dims & parts.keys(), fact.over & parts.keys()
    if not counted:
        over = fact.over - varying | ({into} if varying else set())
        return Filled(fact.dims, fact.count, over)
    others = math.prod(size for name, size in parts.items() if name not in counted)
    dims = fact.dims - counted | {into}
    return _bounded(Filled(dims, fact.count * others, fact.over - varying), sig.outs)


def gathered(sig: Signature, ins: Sequence[Operand]) -> Filled | None:
    """The rule of elements of a table: along other dims than the indexed one it is as before."""
    fact, dim, indices = ins[0].filled, sig.attrs["dim"].name, frozenset(sig.ins[1].names)
    if fact is None or fact.dims & (indices | {dim}):
        return None
    over = fact.over - {dim} | indices if dim in fact.over else fact.over
    return Filled(fact.dims, fact.count, over)


def _bounded(fact: Filled, types: Sequence[TensorType]) -> Filled | None:
    """The fact, unless it says nothing."""
    return fact if share(fact, types) < 1 else None
