"""The methods of search by name."""

from __future__ import annotations

from collections.abc import Mapping

from meshdsl.search.layouts import Layouts
from meshdsl.search.problem import Method
from meshdsl.search.summed import ELIMINATION, ILP, MCMC
from meshdsl.search.tofu import Tofu

METHODS: Mapping[str, Method] = {
    "layouts": Layouts(),
    "exhaustive": Layouts(bounds=False),
    "elimination": ELIMINATION,
    "ilp": ILP,
    "mcmc": MCMC,
    "tofu": Tofu(),
}
"""What `--method` takes."""
