"""PowerSGD: gradients as products of thin factors, so that devices send the factors alone.

After Vogels, Karimireddy and Jaggi 2019, algorithms 1 and 2: one step of the power method a step of
training, begun with the factor of the step before, and what the product leaves out is added to the
next gradient. All of it depends on the mean gradient alone, so it is written in operators of the
program, and its numbers are those of one device under any layout. Which part of the error is on
which device does not matter, only the sum: as the gradient before it is reduced, the error stays
partial (`State.parts`), and so nothing of the size of the parameter is sent.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import field

from meshdsl.ir.types import I32, Dim, TensorType
from meshdsl.named.ir import Value
from meshdsl.named.optimizers import Arithmetic, Compression, UpdateEmitter, master_dtype, widened
from meshdsl.records import dataclass

LOST = 1e-10
"""The part of a column's square below which what orthogonalisation leaves of it is rounding."""

LEAST = 1e-30
"""The least square of a column that is divided by."""

PRIME = 30011
"""The modulus of made-up numbers: products of two stay in i32."""


def halves(dims: Sequence[Dim], rank: int) -> tuple[tuple[Dim, ...], tuple[Dim, ...]] | None:
    """The rows and columns of a tensor as a matrix: the cut of its dims with the thinnest factors.

    None where two factors of this rank are no smaller than the tensor.
    """
    cuts = ((tuple(dims[:at]), tuple(dims[at:])) for at in range(1, len(dims)))
    sizes = {cut: sum(math.prod(d.size for d in half) for half in cut) for cut in cuts}
    if not sizes or rank * min(sizes.values()) >= math.prod(d.size for d in dims):
        return None
    return min(sizes, key=lambda cut: sizes[cut])


def approximated(
    emitter: UpdateEmitter,
    compression: Compression,
    done: Value,
    grads: Sequence[tuple[Value, Value, tuple[str, ...]]],
) -> list[Value]:
    """The gradients as products of factors; those that are small as they are.

    `grads` are parameters, their gradients and the dims that are compressed: along others each
    slice is a matrix of its own. `done` counts the steps before this one. All parameters go
    together through the stages of a step, so that their factors go into one bucket.
    """
    matrices, rank = [], compression.options["rank"]
    for param, grad, compressed in grads:
        cut = halves([d for d in param.type.dims if d.name in compressed], rank)
        do = Arithmetic(emitter, master_dtype(param), param)
        if cut is not None:
            matrices.append(_Matrix(emitter, rank, done, param, do, *cut, widened(do, grad)))
    before = [m.factors() for m in matrices]
    for matrix in matrices:
        matrix.with_error()
    lefts = [m.products(m.rows, m.begun(b)) for m, b in zip(matrices, before, strict=True)]
    bases = [m.orthogonal(columns) for m, columns in zip(matrices, lefts, strict=True)]
    rights = [m.products(m.columns, columns) for m, columns in zip(matrices, bases, strict=True)]
    approximations: dict[Value, Value] = {}
    for matrix, factors, left, right in zip(matrices, before, bases, rights, strict=True):
        approximations[matrix.param] = matrix.approximation(factors, left, right)
    return [approximations.get(param, grad) for param, grad, _ in grads]


@dataclass(slots=True)
class _Matrix:
    """The compression of one parameter, whose gradient is `grad`."""

    emitter: UpdateEmitter
    rank: int
    done: Value
    param: Value
    do: Arithmetic
    rows: tuple[Dim, ...]
    columns: tuple[Dim, ...]
    grad: Value
    error: Value = field(init=False)
    whole: Value = field(init=False)

    def __post_init__(self) -> None:
        self.error = self._state("error", self.param.type.dims, parts=True)

    def factors(self) -> list[Value]:
        """The states of the columns of the right factor."""
        gone = set(self.rows)
        dims = tuple(d for d in self.param.type.dims if d not in gone)
        return [self._state(f"factor{i + 1}", dims) for i in range(self.rank)]

    def with_error(self) -> None:
        """Add to the gradient what was left out of those before."""
        self.whole = self.do("add", self.grad, self.error)

    def products(self, kept: tuple[Dim, ...], columns: list[Value]) -> list[Value]:
        """The products of the matrices and columns: with the dims `kept`, and those around."""
        gone = set(self.columns if kept is self.rows else self.rows)
        dims = tuple(d for d in self.param.type.dims if d not in gone)
        return [self.do("einsum", self.whole, column, dims=dims) for column in columns]

    def approximation(self, kept: list[Value], left: list[Value], right: list[Value]) -> Value:
        """The product of the factors; what it leaves out, and the factors, are kept."""
        for i, (old, column) in enumerate(zip(kept, right, strict=True)):
            # A column without anything in it would stay so: it begins anew. This is the first
            # reader that needs it reduced, so what is multiplied below is whole.
            self.emitter.update(old, self._or_start(i, column))
        dims = self.param.type.dims
        terms = [self.do("einsum", p, q, dims=dims) for p, q in zip(left, right, strict=True)]
        product = functools.reduce(lambda one, other: self.do("add", one, other), terms)
        self.emitter.update(self.error, self.do("sub", self.whole, product))
        return product

    def _state(self, name: str, dims: tuple[Dim, ...], parts: bool = False) -> Value:
        type_ = TensorType(dims, self.do.dtype)
        return self.emitter.state(f"{self.param.name}.{name}", type_, self.param, parts=parts)

    def _along(self, one: Value, other: Value) -> Value:
        """The inner products of columns: a number for each matrix."""
        inner = {*self.rows, *self.columns}
        dims = tuple(d for d in one.type.dims if d not in inner)
        return self.do("einsum", one, other, dims=dims)

    def orthogonal(self, columns: list[Value]) -> list[Value]:
        """The columns orthonormal, by Gram and Schmidt; one that depends on others becomes 0."""
        do, orthonormal = self.do, list[Value]()
        for column in columns:
            size, residual = self._along(column, column), column
            for other in orthonormal:
                residual = do("sub", residual, do("mul", other, self._along(other, residual)))
            square = self._along(residual, residual)
            holds = do("cast", do("gt", square, do("mul", size, LOST)), dtype=do.dtype)
            scale = do("mul", do("rsqrt", do("maximum", square, LEAST)), holds)
            orthonormal.append(do("mul", residual, scale))
        return orthonormal

    # --- the first factor -----------------------------------------------------------------------

    def begun(self, factors: list[Value]) -> list[Value]:
        """The factors of the last step, or in the first step columns that are made up."""
        first = Arithmetic(self.emitter, I32)("eq", self.done, 0)
        weight = self.do("cast", first, dtype=self.do.dtype)
        return [self._plus(i, old, weight) for i, old in enumerate(factors)]

    def _or_start(self, index: int, factor: Value) -> Value:
        """The factor; a made-up column where it is 0."""
        empty = self.do("eq", self._along(factor, factor), 0.0)
        return self._plus(index, factor, self.do("cast", empty, dtype=self.do.dtype))

    def _plus(self, index: int, factor: Value, weight: Value) -> Value:
        return self.do("add", factor, self.do("mul", self._made_up(index), weight))

    def _made_up(self, index: int) -> Value:
        """A column of numbers in -1 … 1 without a pattern: quadratic residues, exact anywhere."""
        count = Arithmetic(self.emitter, I32)
        number: Value | None = None
        for place, dim in enumerate(self.columns):
            turned = count("mul", count("mod", count("iota", dim=dim), PRIME), 31 + 6 * place)
            number = turned if number is None else count("add", number, turned)
        assert number is not None, "a matrix has columns"
        number = count("mod", number, PRIME)
        squared = count("mod", count("mul", number, number), PRIME)
        mixed = count("add", count("mul", squared, 3 + index), count("mul", number, 7))
        drawn = self.do("cast", count("mod", mixed, PRIME), dtype=self.do.dtype)
        return self.do("sub", self.do("mul", drawn, 2 / PRIME), 1.0)
