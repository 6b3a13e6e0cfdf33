"""The table of renderings: the placed program as other systems write it.

Each is a file with a function `render(program) -> str`, imported when it is asked for.
"""

from __future__ import annotations

from importlib import import_module

from meshdsl.placed.ir import Program

RENDERINGS: dict[str, str] = {
    "sbp": "sbp",
    "scaling-book": "scaling_book",
    "gshard": "gshard",
    "oneflow": "oneflow",
    "dtensor": "dtensor",
    "jax": "jax",
}
"""The module of each notation, by the name it has on the command line."""


def render(program: Program, notation: str) -> str:
    """The text of a placed program in a notation of `RENDERINGS`. Raises MD0910."""
    module = import_module(f"meshdsl.backends.peers.{RENDERINGS[notation]}")
    text: str = module.render(program)
    return text
