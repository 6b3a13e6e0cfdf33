"""Bayesian optimisation: the next choice to try is the one that a model of costs expects most of.

The model is a tree of Parzen estimators (TPE, Bergstra et al. 2011) over all variables at once, by
the library Optuna (Akiba et al. 2019): one density of the cheap choices tried so far, one of the
others, and the choice with the largest quotient is next. It is made for categories, and sees only
the order of costs.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshdsl.costgraph.black_box import BlackBox, Picks, package

DRAWN = 10
"""Choices drawn at random before the model is asked."""


def bayesian(box: BlackBox, trials: int, starts: Sequence[Picks] = (), seed: int = 0) -> None:
    """Try at most so many choices, `starts` first. Raises MD0667 without Optuna."""
    optuna = package("optuna", "bayesian")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=DRAWN, multivariate=True)
    study = optuna.create_study(sampler=sampler)
    free = [i for i, size in enumerate(box.sizes) if size > 1]
    choices = {
        f"{i}": optuna.distributions.CategoricalDistribution([*range(box.sizes[i])]) for i in free
    }
    for picks in starts:
        study.enqueue_trial({f"{i}": picks[i] for i in free})
    for _ in range(trials):
        if box.tried and (box.is_over() or box.is_whole):
            break
        trial = study.ask(choices)
        picked = [trial.params[f"{i}"] if i in free else 0 for i in range(len(box.sizes))]
        # Only the order of costs counts, and infinity is none of Optuna's numbers.
        study.tell(trial, min(box.of(picked), 1e300))
