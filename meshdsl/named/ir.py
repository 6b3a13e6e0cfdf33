"""The named program: SSA operators over tensors with ordered named dims. No device, no layout.

Values are compared by identity. A `def` has been inlined: `Value.path` keeps the calls it came
through. A `repeat` stays a loop (`Repeat`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from meshdsl.diagnostics import Span


@dataclass(frozen=True, slots=True)
class DType:
    """An element type: `kind` is `float`, `int` or `bool`; `bytes` is the size of one element."""

    name: str
    kind: str
    bytes: int
    numpy: str
    torch: str

    def __str__(self) -> str:
        return self.name


DTYPES: dict[str, DType] = {
    d.name: d
    for d in (
        DType("f32", "float", 4, "float32", "torch.float32"),
        DType("f64", "float", 8, "float64", "torch.float64"),
        DType("bf16", "float", 2, "float32", "torch.bfloat16"),
        DType("f16", "float", 2, "float16", "torch.float16"),
        DType("i32", "int", 4, "int32", "torch.int32"),
        DType("i64", "int", 8, "int64", "torch.int64"),
        DType("bool", "bool", 1, "bool", "torch.bool"),
    )
}
LARGEST = {"f32": 3.4028235e38, "f64": 1.7976931348623157e308, "bf16": 3.3895314e38, "f16": 65504.0}
"""The largest finite number of each float type."""

F32, F64, BF16, F16 = (DTYPES[n] for n in ("f32", "f64", "bf16", "f16"))
I32, I64, BOOL = (DTYPES[n] for n in ("i32", "i64", "bool"))


@dataclass(frozen=True, slots=True)
class Dim:
    """A named dimension. One name has one size in a whole file."""

    name: str
    size: int

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class TensorType:
    """Ordered named dims and a dtype. The order is that of the memory (row-major).

    `names` are those of the dims, in order.
    """

    dims: tuple[Dim, ...]
    dtype: DType
    names: tuple[str, ...] = field(init=False, compare=False, repr=False)
    _hash: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        # Both are asked for more often than anything else in the compiler.
        object.__setattr__(self, "names", tuple([d.name for d in self.dims]))
        object.__setattr__(self, "_hash", hash((self.dims, self.dtype.name)))

    def __hash__(self) -> int:
        return self._hash

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the dims, in order."""
        return tuple(d.size for d in self.dims)

    @property
    def elements(self) -> int:
        """How many elements there are."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Size of the whole tensor in bytes."""
        return self.elements * self.dtype.bytes

    def index(self, name: str) -> int:
        """Position of the dim `name`; it must be there."""
        return self.names.index(name)

    def has(self, name: str) -> bool:
        """Whether there is a dim `name`."""
        return name in self.names

    def size(self, name: str) -> int:
        """Size of the dim `name`; it must be there."""
        return self.dims[self.index(name)].size

    def without(self, *names: str) -> TensorType:
        """The same type less the dims `names`."""
        return TensorType(tuple(d for d in self.dims if d.name not in names), self.dtype)

    def resized(self, sizes: dict[str, int]) -> TensorType:
        """The same type with other sizes for the dims in `sizes`."""
        if not sizes:
            return self
        dims = tuple(Dim(d.name, sizes[d.name]) if d.name in sizes else d for d in self.dims)
        return TensorType(dims, self.dtype)

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(self.names)}]"


@dataclass(frozen=True, slots=True)
class Pin:
    """`@` on one dim of one tensor: the axes it is split over (outer first), empty for `@none`."""

    dim: str
    axes: tuple[str, ...]
    span: Span


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """One tensor: what an operator, an input or a parameter yields.

    `name` is the dotted path the user would call it by (`attention_2.q`), or None for a
    subexpression.
    `path` holds the instance names of the calls it was made inside, outermost first; `functions`,
    in parallel, the names of the `def`s.
    `role` is `activation`, `input`, `param`, `grad` (the gradient of a parameter) or `state` (of an
    optimizer, and what its update computes on the way).
    `follows` is the tensor whose rules bind this one too: of a gradient, what it is the gradient
    of; of a state, its parameter.
    `declared` are the names of the dims that the program gives it, where it has others: a loop adds
    its dim, or takes it away.
    """

    type: TensorType
    span: Span
    name: str | None = None
    path: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    pins: tuple[Pin, ...] = ()
    role: str = "activation"
    follows: Value | None = None
    declared: tuple[str, ...] | None = None

    @property
    def positions(self) -> tuple[str, ...]:
        """The names of its dims in the order in which the program speaks of them."""
        source = self.follows or self
        return source.type.names if source.declared is None else source.declared

    @property
    def label(self) -> str:
        """The last part of the name, or `_` for a subexpression."""
        return self.name.rsplit(".", 1)[-1] if self.name else "_"


@dataclass(frozen=True, slots=True)
class Init:
    """How a parameter's values are made up: `zeros ones normal(std) uniform(a, b) glorot he`.

    `args` is empty for `normal` without a standard deviation: 1/sqrt(fan_in) then, `fan_in` being
    the product of the dims that the parameter's first use sums over.
    """

    kind: str
    args: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Param:
    """A parameter of the program and how it is initialised; `fan_in`, `fan_out` count elements."""

    value: Value
    init: Init
    fan_in: int
    fan_out: int


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """One operator of the registry applied to values; `attrs` are known at compile time.

    `phase` is `forward`, `backward` or `update`. `block` numbers the `recompute` it stands in: what
    the backward pass needs of it is computed again there.
    """

    name: str
    ins: tuple[Value, ...]
    outs: tuple[Value, ...]
    attrs: tuple[tuple[str, Any], ...]
    span: Span
    phase: str = "forward"
    block: int | None = None

    @property
    def out(self) -> Value:
        """The only output."""
        assert len(self.outs) == 1, f"{self.name} has {len(self.outs)} outputs"
        return self.outs[0]

    def attr(self, name: str) -> Any:
        """The attribute `name`; it must be there."""
        return dict(self.attrs)[name]


@dataclass(frozen=True, slots=True, eq=False)
class Carry:
    """A name assigned inside a `repeat` that existed before: four values of one type.

    `init` enters the first iteration as `inside`; `next` enters the next one; `result` is the last.
    """

    init: Value
    inside: Value
    next: Value
    result: Value


@dataclass(frozen=True, slots=True, eq=False)
class Stacked:
    """A tensor from outside that has the loop's dim, and its slice at the current index inside."""

    outer: Value
    inside: Value


@dataclass(frozen=True, slots=True, eq=False)
class Collected:
    """A tensor made in every iteration, and all of them in one that has the loop's dim first."""

    inside: Value
    outer: Value


@dataclass(frozen=True, slots=True, eq=False)
class Repeat:
    """`repeat dim { body }`; values from outside without the dim are used inside as they are.

    A loop of the backward pass is `reverse`: its index runs from the last to the first.
    """

    dim: Dim
    carries: tuple[Carry, ...]
    stacked: tuple[Stacked, ...]
    body: tuple[Node, ...]
    span: Span
    collected: tuple[Collected, ...] = ()
    reverse: bool = False
    phase: str = "forward"
    block: int | None = None


Node = Op | Repeat


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """One returned tensor, the name it is returned under, and where."""

    name: str
    value: Value
    span: Span


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """A tensor that an optimizer keeps from step to step.

    It begins with zeros, or `copies` its parameter: the same initial values, in its own dtype.
    """

    value: Value
    copies: Value | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """What a training step makes of a parameter or a state: `old` is `new` in the next step."""

    old: Value
    new: Value


@dataclass(frozen=True, slots=True, eq=False)
class Goal:
    """`minimize loss with optimizer`; `optimizer` is an `Optimizer` of `optimizers.py`."""

    loss: Value
    optimizer: Any
    span: Span

    def without_mixed(self) -> Goal:
        """The same, all in one precision: what `--dtype` asks for."""
        options = {**self.optimizer.options, "compute": None}
        return replace(self, optimizer=replace(self.optimizer, options=options))


@dataclass(frozen=True, slots=True, eq=False)
class Argument:
    """What a call, by its path, was given under the name of a parameter of its `def`."""

    path: tuple[str, ...]
    name: str
    value: Value


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """A whole named program. `inputs`, `params` and `outputs` are in order of declaration.

    One with a `goal` becomes a training step (`training.py`): `states` are the optimizer's,
    `updates` what becomes of them and of the parameters. `arguments` of calls are noted for who
    writes the program down; what has been rewritten since is in none.
    """

    name: str
    inputs: tuple[Value, ...]
    params: tuple[Param, ...]
    body: tuple[Node, ...]
    outputs: tuple[Output, ...]
    span: Span
    states: tuple[State, ...] = ()
    updates: tuple[Update, ...] = ()
    goal: Goal | None = None
    arguments: tuple[Argument, ...] = ()


def results(node: Node) -> tuple[Value, ...]:
    """What a node leaves behind: the results of an operator, what a loop carried and collected."""
    if isinstance(node, Op):
        return node.outs
    return (*(c.result for c in node.carries), *(c.outer for c in node.collected))


def walk(nodes: tuple[Node, ...]) -> Iterator[Op]:
    """Every operator, those inside loops once, in program order."""
    for node in nodes:
        if isinstance(node, Repeat):
            yield from walk(node.body)
        else:
            yield node
