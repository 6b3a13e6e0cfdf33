"""Layouts of a space that is too large to be listed: from a few on, dim by dim.

Networks of many dims, such as those of convolutions of several sizes, have millions of layouts on
two axes. Here the best few that were seen go on with another choice for one dim, until none of
these is left: a beam search, by a key that tables give. It begins with nothing but fixed rules, and
with what elimination finds (OptCNN, Jia et al. 2018), where the tables are not too wide for that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from meshdsl.costgraph.exact import TooWide, priced_memory
from meshdsl.search.candidate import Rules
from meshdsl.search.space import LayoutSpace
from meshdsl.search.tables import choices_of, picked, table_graph

BEAM = 8
"""The layouts that go on: the best of all that were seen."""

Chosen = tuple[tuple[str, ...], ...]
"""The axes of each dim of a space."""

Key = tuple[Any, ...]


def climbed(
    space: LayoutSpace,
    key: Callable[[Rules], Key],
    in_time: Callable[[Iterable[Rules]], Iterable[Rules]],
    most_work: float = math.inf,
    known: Iterable[Rules] = (),
) -> list[Rules]:
    """The layouts seen while there was time: those it began with, then others, good ones first.

    It begins with those that are `known`, too.
    """
    starts = [_chosen(space, space.fixed), *_by_elimination(space, most_work)]
    starts += [_chosen(space, {rule.dim: rule.axes for rule in rules}) for rules in known]
    seen = {start: (key(space.rules(start)), i) for i, start in enumerate(starts)}
    done: set[Chosen] = set()
    while True:
        best = sorted(seen, key=seen.__getitem__)[:BEAM]
        here = next((chosen for chosen in best if chosen not in done), None)
        if here is None:
            break
        done.add(here)
        candidates = {space.rules(c): c for c in _near(space, here) if c not in seen}
        before = len(seen)
        for rules in in_time(candidates):
            seen[candidates[rules]] = key(rules), len(seen)
        if len(seen) < before + len(candidates):
            break
    others = sorted(set(seen).difference(starts), key=seen.__getitem__)
    return [*dict.fromkeys(map(space.rules, starts)), *varied(map(space.rules, others))]


def _chosen(space: LayoutSpace, axes: Mapping[str, tuple[str, ...]]) -> Chosen:
    return tuple(axes.get(dim.name, ()) for dim in space.dims)


def _by_elimination(space: LayoutSpace, most_work: float) -> Iterator[Chosen]:
    """The layout whose calls send the least in all, where that can be found without a search.

    A browser has no numpy, and tables are summed by it: there the search begins with the others.
    """
    try:
        solution = priced_memory(table_graph(space, most_work))
    except TooWide:
        return
    except ModuleNotFoundError as error:
        if error.name != "numpy":
            raise
        return
    if solution.found and space.allows(chosen := picked(space, solution)):
        yield chosen


def varied(layouts: Iterable[Rules]) -> list[Rules]:
    """The best with each number of rules, then the second best with each, and so on.

    Tables know the bytes of collectives, not what each takes beside these: few rules need few.
    """
    ranks: dict[int, int] = {}
    ranked = []
    for number, rules in enumerate(layouts):
        count = len(rules)
        ranks[count] = ranks.get(count, 0) + 1
        ranked.append((ranks[count], number, rules))
    return [rules for *_, rules in sorted(ranked, key=lambda item: item[:2])]


def _near(space: LayoutSpace, here: Chosen) -> Iterator[Chosen]:
    """The layouts with other axes for one dim, which the dims that it meets leave to it."""
    for number, dim in enumerate(space.dims):
        for axes in choices_of(space, number):
            if axes == here[number]:
                continue
            changed = [
                tuple(a for a in other_axes if not (dim.meets >> i & 1 and a in axes))
                for i, other_axes in enumerate(here)
            ]
            changed[number] = axes
            if space.allows(changed):
                yield tuple(changed)
