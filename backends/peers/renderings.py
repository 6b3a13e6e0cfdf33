"""The table of renderings: the placed program as other systems write it."""

from __future__ import annotations

from importlib import import_module

from meshdsl.placed.ir import Program

RENDERINGS: dict[str, str] = {
    "sbp": "sbp._Sbp",
    "scaling-book": "scaling_book._Book",
    "gshard": "gshard._GShard",
    "oneflow": "oneflow.OneFlowText",
    "dtensor": "dtensor.DTensorText",
    "jax": "jax.JaxText",
}
"""The class of each notation, by its name on the command line; imported when needed."""


def render(program: Program, notation: str) -> str:
    """The text of a placed program in a notation of `RENDERINGS`. Raises MD0910."""
    module, _, name = RENDERINGS[notation].partition(".")
    written = getattr(import_module(f"meshdsl.backends.peers.{module}"), name)(program)
    text: str = written.text()
    return text
