"""Layouts that practitioners begin with, for spaces that are too large to be listed.

Each mesh axis splits one thing: the batch, the sequence, the experts, or what tensor parallelism
splits (the dims of parameters that one product makes and the next one contracts: heads, hidden
units, vocabulary). What is which follows from what operators do with a dim, not from its name.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping

from meshdsl.named import ir as named
from meshdsl.named.ir import Value
from meshdsl.named.one_batch import sample_dims
from meshdsl.ops.opdef import lookup
from meshdsl.placed.sharding_rules import call_of, whole_dims
from meshdsl.records import dataclass
from meshdsl.search.candidate import Rules
from meshdsl.search.space import LayoutSpace

MOST = 512
"""The combinations that are looked at; meshes of more than four axes have more."""

Group = tuple[str, ...]
"""Dims that are split together: no two of them meet in a tensor."""


@dataclass(frozen=True, slots=True)
class DimRoles:
    """What the dims of a program are.

    `batch`: of samples (`sample_dims`), mixed by no operator of the forward pass; `sequence`: other
    dims of inputs that no product has a parameter for; `experts`: those of parameters that a
    product keeps apart, in its operands and its result; `learned`: all other dims of parameters.
    """

    batch: Group
    sequence: Group
    experts: Group
    learned: Group


def roles(program: named.NamedProgram) -> DimRoles:
    """The roles of the dims of a program."""
    forward = [op for op in named.walk(program.body) if op.phase == "forward"]
    products = [*_products(forward)]
    weighed = {name for _, weights in products for v in weights for name in v.type.names}
    inputs = dict.fromkeys(name for v in program.inputs for name in v.type.names)
    learned = dict.fromkeys(n for p in program.params for n in p.value.type.names)
    # A parameter that is only added to samples, such as their positions, is none to be split.
    positions = {name: None for name in inputs if name not in weighed}
    learned = {name: None for name in learned if name not in positions}
    mixed = {d for op in forward for d in _mixed(op, positions)}
    samples = [dim.name for dim in sample_dims(program)]
    batch = tuple(d for d in samples if d in positions and d not in mixed)
    apart = {d for op, _ in products for d in _common(op) if d in learned}
    return DimRoles(
        batch=batch,
        sequence=tuple(d for d in positions if d not in batch),
        experts=tuple(d for d in learned if d in apart),
        learned=tuple(d for d in learned if d not in apart),
    )


def _mixed(op: named.NamedOp, positions: Mapping[str, None]) -> Iterator[str]:
    """Of some dims of inputs those that an operator sums over, renames or needs whole.

    A sum over all of them, as the loss is one, mixes none.
    """
    result_dims = {name for v in op.outs for name in v.type.names}
    for dim in {name for v in op.ins for name in v.type.names if name in positions}:
        if any(dim in dims for dims in whole_dims(call_of(op))):
            yield dim
        elif dim not in result_dims and any(name in positions for name in result_dims):
            yield dim


def _products(forward: Iterable[named.NamedOp]) -> Iterator[tuple[named.NamedOp, list[Value]]]:
    """The products of something with parameters, and these, which may be cast before."""
    learned = set[Value]()
    for op in forward:
        weights = [v for v in op.ins if v.role == "param" or v in learned]
        if weights and len(weights) == len(op.ins):
            learned |= {*op.outs}
        elif weights and lookup(op.name).flops is not None and _contracts(op, weights):
            yield op, weights


def _contracts(op: named.NamedOp, weights: list[Value]) -> bool:
    made = {name for v in op.outs for name in v.type.names}
    return any(name not in made for v in weights for name in v.type.names)


def _common(op: named.NamedOp) -> set[str]:
    """The dims that operands and results have in common."""
    return set.intersection(*({*v.type.names} for v in (*op.ins, *op.outs)))


def practised(space: LayoutSpace) -> Iterator[Rules]:
    """Layouts in which each axis splits one thing; those that split the batch come first."""
    role, weight = roles(space.program), _weights(space.program)
    groups = [_Groups(space, axis, role, weight).every() for axis in space.axes]
    yielded: set[Rules] = set()
    for chosen in itertools.islice(itertools.product(*groups), MOST):
        rules = _rules(space, chosen)
        if rules is not None and rules not in yielded:
            yielded.add(rules)
            yield rules


def _weights(program: named.NamedProgram) -> dict[str, int]:
    """The bytes of parameters that have a dim."""
    weights: dict[str, int] = {}
    for param in program.params:
        for name in param.value.type.names:
            weights[name] = weights.get(name, 0) + param.value.type.bytes
    return weights


@dataclass(frozen=True, slots=True)
class _Groups:
    """What one axis may split."""

    space: LayoutSpace
    axis: str
    role: DimRoles
    weight: Mapping[str, int]

    def every(self) -> list[Group]:
        """The batch, tensor parallelism, experts, the sequence, and what all parameters have."""
        stream = self._apart(self.role.learned)
        others = self._apart(d for d in self.role.learned if d not in stream[:1])
        groups = [self._apart(self.role.batch), others, self._apart(self.role.experts)]
        groups += [self._apart(self.role.sequence), stream, ()]
        return [*dict.fromkeys(groups)]

    def _apart(self, dims: Iterable[str]) -> Group:
        """Of dims that the axis divides, those of most parameters first, that do not meet."""
        named = set(dims)
        numbers = [
            i
            for i, dim in enumerate(self.space.dims)
            if dim.name in named and self.axis in dim.axes
        ]
        order = {name: i for i, name in enumerate(self.weight)}
        heavy = sorted(
            numbers,
            key=lambda i: (
                -self.weight.get(self.space.dims[i].name, 0),
                order.get(self.space.dims[i].name, 0),
            ),
        )
        taken: list[int] = []
        for number in heavy:
            if not any(self.space.dims[t].meets >> number & 1 for t in taken):
                taken.append(number)
        return tuple(self.space.dims[i].name for i in taken)


def _rules(space: LayoutSpace, groups: tuple[Group, ...]) -> Rules | None:
    """The rules of a group for each axis; None where they are none of the space's layouts."""
    axes: dict[str, tuple[str, ...]] = dict(space.fixed)
    for axis, group in zip(space.axes, groups, strict=True):
        for name in group:
            if name not in space.fixed:
                axes[name] = (*axes.get(name, ()), axis)
    sizes = {dim.name: dim for dim in space.dims}
    for name in [n for n in axes if n in sizes and n not in space.fixed]:
        while axes[name] and not space.divides(sizes[name], axes[name]):
            axes[name] = axes[name][:-1]
    chosen = [axes.get(dim.name, ()) for dim in space.dims]
    return space.rules(chosen) if space.allows(chosen) else None
