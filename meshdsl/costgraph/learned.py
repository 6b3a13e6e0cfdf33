"""A learned cost model: a regressor is fitted to costs that are known, and says what to try next.

As AutoTVM (Chen et al. 2018) and TASO's successors search programs: some choices are drawn and
tried, a model of their costs is fitted, many more are rated by it, the best of these are tried, and
so on. Costs that are reported are those of trials, never the model's. The model is an ensemble of
extremely randomised trees (Geurts et al. 2006) of scikit-learn on one feature for each choice.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from meshdsl.backends.runtime.lazy_numpy import np
from meshdsl.costgraph.black_box import BlackBox, Picks, package
from meshdsl.costgraph.graph import Costs

ROUNDS = 6
"""How often the model is fitted."""

TREES = 30
"""The trees of the model."""

RATED = 400
"""Choices that the model rates in a round: half of them near the best, half drawn."""

DRAWN = 0.1
"""The part of a round's trials that is drawn at random, so that the model sees new ground."""


def learned(box: BlackBox, trials: int, starts: Sequence[Picks] = (), seed: int = 0) -> None:
    """Try at most so many choices, `starts` first. Raises MD0667 without scikit-learn."""
    ensemble = package("sklearn.ensemble", "learned")
    draw = random.Random(seed)
    each = max(1, trials // (ROUNDS + 1))
    _try(box, [*starts, *(_drawn(box, draw) for _ in range(each))], trials)
    while len(box.tried) < trials and not (box.is_over() or box.is_whole):
        tried = [*box.tried]
        costs = np.argsort(np.argsort([box.tried[p] for p in tried], kind="stable"), kind="stable")
        model = ensemble.ExtraTreesRegressor(TREES, random_state=seed)
        model.fit(_features(box, tried), costs)
        rated = [p for p in dict.fromkeys(_candidates(box, draw)) if p not in box.tried]
        if not rated:
            break
        order = np.argsort(model.predict(_features(box, rated)), kind="stable").tolist()
        drawn = [_drawn(box, draw) for _ in range(round(DRAWN * each))]
        before = len(box.tried)
        _try(box, [*drawn, *(rated[i] for i in order[:each])], trials)
        if len(box.tried) == before:
            break


def _try(box: BlackBox, choices: Sequence[Picks], trials: int) -> None:
    for picks in choices:
        if box.tried and (len(box.tried) >= trials or box.is_over()):
            return
        box.of(picks)


def _drawn(box: BlackBox, draw: random.Random) -> Picks:
    return tuple(draw.randrange(size) for size in box.sizes)


def _candidates(box: BlackBox, draw: random.Random) -> Iterator[Picks]:
    """Choices near the best ones, by one or two variables, and others that are drawn."""
    best = sorted(box.tried, key=box.tried.__getitem__)[:10]
    for _ in range(RATED // 2):
        near = list(draw.choice(best))
        for _ in range(draw.choice((1, 2))):
            variable = draw.randrange(len(near))
            near[variable] = draw.randrange(box.sizes[variable])
        yield tuple(near)
        yield _drawn(box, draw)


def _features(box: BlackBox, choices: Sequence[Picks]) -> Costs:
    """One feature for each choice of each variable: 1 where it is taken."""
    starts = np.cumsum([0, *box.sizes[:-1]])
    features = np.zeros((len(choices), sum(box.sizes)))
    for row, picks in enumerate(choices):
        features[row, starts + np.array(picks)] = 1.0
    return features
