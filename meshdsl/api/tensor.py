"""A tensor of a program being traced: the values of Python functions in the embedded language."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from meshdsl.api.dims import Arrow, Dim, TensorType, as_tuple
from meshdsl.api.errors import ProgramError, told
from meshdsl.api.refusals import (
    MEMBERS,
    ForeignMethod,
    Handle,
    chosen,
    first_dim,
    is_foreign,
    refuse,
)
from meshdsl.api.source_location import Site, here
from meshdsl.diagnostics import fail

if TYPE_CHECKING:
    from meshdsl.api.tracer import Tracer

Operand = Any
"""An operand: a tensor, a number, or a dim (its size)."""


class Tensor(Handle):
    """A tensor with named dims. It has a type and no values: those exist when a plan is called.

    Operators broadcast by name; the result's dims are in order of first appearance. `&`, `|` and
    `~` are `and`, `or` and `not`. A view is written in brackets or as a method:

    ========================  ===================================  ==========================
    rename                    `x[seq >> mem]`                      `x.rename(seq, mem)`
    split                     `x[model >> (heads, key)]`           `x.split(model, (heads, key))`
    merge                     `x[(heads, key) >> model]`           `x.merge((heads, key), model)`
    pick one index                                                 `x.pick(seq, 0)`
    slice                                                          `x.slice(seq, 0, 128, prefix)`
    gather by integers                                             `table.gather(vocab, ids)`
    ========================  ===================================  ==========================

    In annotations `md.Tensor[batch, io]` is a tensor with these dims.
    """

    __slots__ = ()

    def __class_getitem__(cls, dims: Any) -> TensorType:
        return TensorType(as_tuple(dims))

    # --- type and name -----------------------------------------------------------------------

    @property
    def name(self) -> str | None:
        """The dotted name used by layouts and reports; None for a subexpression."""
        return self._value.name

    @property
    def dims(self) -> tuple[str, ...]:
        """The names of the dims, in order."""
        return self._value.type.names

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the dims, in order."""
        known = self._tracer.dims
        return tuple(+known[d.name] for d in self._value.type.dims)

    @property
    def dtype(self) -> str:
        """The element type, such as `f32` or `i32`."""
        return str(self._value.type.dtype)

    def __repr__(self) -> str:
        return f"<tensor {self.name or '_'}: {self._value.type}>"

    __hash__ = object.__hash__

    # --- operators ---------------------------------------------------------------------------

    def __add__(self, other: Operand) -> Tensor:
        return _binary("+", self, other)

    def __radd__(self, other: Operand) -> Tensor:
        return _binary("+", other, self)

    def __sub__(self, other: Operand) -> Tensor:
        return _binary("-", self, other)

    def __rsub__(self, other: Operand) -> Tensor:
        return _binary("-", other, self)

    def __mul__(self, other: Operand) -> Tensor:
        return _binary("*", self, other)

    def __rmul__(self, other: Operand) -> Tensor:
        return _binary("*", other, self)

    def __truediv__(self, other: Operand) -> Tensor:
        return _binary("/", self, other)

    def __rtruediv__(self, other: Operand) -> Tensor:
        return _binary("/", other, self)

    def __pow__(self, other: Operand) -> Tensor:
        return _binary("^", self, other)

    def __rpow__(self, other: Operand) -> Tensor:
        return _binary("^", other, self)

    def __eq__(self, other: Operand) -> Tensor:  # type: ignore[override]
        return _binary("==", self, other)

    def __ne__(self, other: Operand) -> Tensor:  # type: ignore[override]
        return _binary("!=", self, other)

    def __lt__(self, other: Operand) -> Tensor:
        return _binary("<", self, other)

    def __le__(self, other: Operand) -> Tensor:
        return _binary("<=", self, other)

    def __gt__(self, other: Operand) -> Tensor:
        return _binary(">", self, other)

    def __ge__(self, other: Operand) -> Tensor:
        return _binary(">=", self, other)

    def __and__(self, other: Operand) -> Tensor:
        return _binary("and", self, other)

    def __rand__(self, other: Operand) -> Tensor:
        return _binary("and", other, self)

    def __or__(self, other: Operand) -> Tensor:
        return _binary("or", self, other)

    def __ror__(self, other: Operand) -> Tensor:
        return _binary("or", other, self)

    def __matmul__(self, other: Operand) -> NoReturn:
        refuse("sign", "@", (self, other), {})

    def __rmatmul__(self, other: Operand) -> NoReturn:
        refuse("sign", "@", (other, self), {})

    def __floordiv__(self, other: Operand) -> Tensor:
        return _binary("//", self, other)

    def __rfloordiv__(self, other: Operand) -> Tensor:
        return _binary("//", other, self)

    def __mod__(self, other: Operand) -> Tensor:
        return _binary("%", self, other)

    def __rmod__(self, other: Operand) -> Tensor:
        return _binary("%", other, self)

    def __round__(self, digits: int | None = None) -> NoReturn:
        refuse("function", "round", (self,), {})

    def __neg__(self) -> Tensor:
        return _unary("-", self)

    def __pos__(self) -> Tensor:
        return self

    def __invert__(self) -> Tensor:
        return _unary("not", self)

    def __abs__(self) -> Tensor:
        return _absolute(self)

    # --- views -------------------------------------------------------------------------------

    @told
    def __getitem__(self, arrows: Any) -> Tensor:
        """`x[seq >> mem, model >> (heads, key)]`: renames, splits and merges, one after another.

        Adjacent renames happen at once, so that two dims may swap their names.
        """
        items = as_tuple(arrows)
        if not items or not all(isinstance(a, Arrow) for a in items):
            _no_arrows(self, items)
        return _view(self, [("arrow", a) for a in items])

    def __getattr__(self, name: str) -> Any:
        """Methods and members of other libraries' tensors, which refuse."""
        if name in MEMBERS:
            _no_member(self, name)
        if name.startswith("_") or not is_foreign(name):
            raise AttributeError(f"a tensor has no `{name}`: operators are called as `md.relu(x)`")
        return ForeignMethod(self, name)

    @told
    def rename(self, old: Dim, new: Dim) -> Tensor:
        """The same values with the dim `old` called `new`, which has the same size."""
        return _view(self, [("arrow", old >> new)])

    @told
    def split(self, dim: Dim, into: tuple[Dim, ...] = ()) -> Tensor:
        """`dim` as several dims, outer first; their sizes multiply to its size."""
        if not isinstance(dim, Dim):
            refuse("method", "split", (self, dim, *([into] if into else [])), {})
        return _view(self, [("arrow", dim >> tuple(into))])

    @told
    def merge(self, dims: tuple[Dim, ...], into: Dim) -> Tensor:
        """Several dims, outer first, as one of the product of their sizes.

        The new dim takes the place of the first of them in the tensor.
        """
        return _view(self, [("arrow", tuple(dims) >> into)])

    @told
    def pick(self, dim: Dim, index: int) -> Tensor:
        """The part at one index of `dim`, which disappears."""
        return _view(self, [("pick", dim, index)])

    @told
    def gather(self, dim: Dim, index: Tensor) -> Tensor:
        """The parts of `dim` at integer indices: the dims of `index` take its place."""
        return _view(self, [("pick", dim, index)])

    @told
    def slice(
        self, dim: Dim, start: int | Dim | None, stop: int | Dim | None, target: Dim
    ) -> Tensor:
        """Indices `start` to `stop` (exclusive) of `dim`, under the name `target`."""
        return _view(self, [("slice", dim, start, stop, target)])

    # --- operations that need values -----------------------------------------------------------

    def __bool__(self) -> bool:
        _no_condition(self)

    def __len__(self) -> int:
        line = first_dim(here(), self.dims)
        help = f"write `{line}`: a dim is its size" if line else "a scalar has no dims"
        _no_value(self, "`len`", help)

    def __iter__(self) -> Any:
        help = "operators work on whole dims; `x.pick(batch, 0)` is one index, `md.repeat` a loop"
        _no_value(self, "iteration", help)

    def __contains__(self, item: object) -> bool:
        _no_value(self, "`in`", "compare: `md.any(x == value)` is a tensor")

    def __float__(self) -> float:
        _no_value(self, "`float`", "return the tensor, and read the number that the plan yields")

    def __int__(self) -> int:
        _no_value(self, "`int`", "`md.cast(x, md.i32)` makes integers of it")

    def __index__(self) -> int:
        _no_value(self, "an index", "`x.gather(dim, ids)` indexes by a tensor")

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        _no_value(self, "numpy", "use the operators of `md`: `md.exp(x)`, `md.sum[batch](x)`")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """`numpy_number * tensor`; refused for any other numpy function."""
        op = _UFUNCS.get(ufunc.__name__)
        if op is None or method != "__call__" or kwargs:
            refuse("library", ufunc.__name__, inputs, kwargs)
        return _binary(op, *inputs)

    def __array_function__(self, function: Any, types: Any, args: Any, named: Any) -> Any:
        """`np.sum(x)` and the like, refused."""
        refuse("library", function.__name__, args, named)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """`torch.relu(x)` and the like, refused."""
        if any(not issubclass(t, Tensor) for t in types):
            _no_torch()
        refuse("library", function.__name__, args, kwargs or {})


_UFUNCS = {
    "add": "+",
    "subtract": "-",
    "multiply": "*",
    "divide": "/",
    "floor_divide": "//",
    "remainder": "%",
    "power": "^",
    "equal": "==",
    "not_equal": "!=",
    "less": "<",
    "less_equal": "<=",
    "greater": ">",
    "greater_equal": ">=",
}
"""The operators by the numpy functions that Python calls where the left operand is numpy's."""


@told
def _binary(op: str, left: Operand, right: Operand) -> Tensor:
    site = here()
    return tracing(site).binary(op, left, right, site)


@told
def _unary(op: str, operand: Tensor) -> Tensor:
    site = here()
    return tracing(site).unary(op, operand, site)


@told
def _absolute(operand: Tensor) -> Tensor:
    site = here()
    found: Tensor = tracing(site).call("abs", None, (operand,), {}, site)
    return found


def _view(tensor: Tensor, items: list[tuple[Any, ...]]) -> Tensor:
    site = here()
    return tracing(site).view(tensor, items, site)


@told
def _no_arrows(tensor: Tensor, items: tuple[Any, ...]) -> NoReturn:
    """Refuse brackets with positions, or with anything else that is no view."""
    if any(isinstance(item, Dim) for item in items):
        help = "rename `x[a >> b]`, split `x[a >> (b, c)]`; `x.pick(a, 0)` picks"
        fail("MD0252", "this is not a view", here().span, help=help)
    refuse("positions", "[:]", (tensor, *items), {})


class NoMember(ProgramError, AttributeError):
    """A member of other libraries' tensors: for `hasattr` it is not there."""


def _no_member(tensor: Tensor, name: str) -> NoReturn:
    try:
        refuse("member", name, (tensor,), {})
    except ProgramError as error:
        raise NoMember(*error.diagnostics) from None


@told
def _no_condition(tensor: Tensor) -> NoReturn:
    site = here()
    message = f"Python cannot decide on {tensor._value.type}: it has no values while it is traced"
    line = chosen(site)
    help = "choose per element: `md.where(condition, a, b)`; `and or not` are `& | ~` here"
    fail("MD0812", message, site.span, help=f"write `{line}`" if line else help)


@told
def _no_value(tensor: Tensor, what: str, help: str) -> NoReturn:
    message = f"{what} asks for the values of {tensor._value.type}, which it has only in a run"
    fail("MD0814", message, here().span, help=help)


@told
def _no_torch() -> NoReturn:
    help = "use the operators of `md`, and give values of torch to the program as inputs"
    fail(
        "MD0814",
        "torch cannot compute with a tensor that has no values yet",
        here().span,
        help=help,
    )


# --- the program being traced -------------------------------------------------------------------


class _Stack(threading.local):
    def __init__(self) -> None:
        self.tracers: list[Tracer] = []


_STACK = _Stack()


@contextmanager
def tracing_in(tracer: Tracer) -> Iterator[None]:
    """Trace operators with `tracer`."""
    _STACK.tracers.append(tracer)
    try:
        yield
    finally:
        _STACK.tracers.pop()


def tracing(site: Site) -> Tracer:
    """The tracer of the program being traced in this thread."""
    if not _STACK.tracers:
        message = "no program is being traced here"
        help = "operators stand in functions under `@md.program`, and in what these call"
        fail("MD0813", message, site.span, help=help)
    return _STACK.tracers[-1]
