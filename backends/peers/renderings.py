"""The table of renderings: the placed program as other systems write it."""

from __future__ import annotations

from importlib import import_module

from meshdsl.diagnostics import fail
from meshdsl.placed.ir import Program
from meshdsl.placed.layout import nearest

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
    """The text of a placed program in a notation of `RENDERINGS`. Raises MD0910 or MD0311."""
    if notation == "jax":
        _refuse_uneven(program)
    module, _, name = RENDERINGS[notation].partition(".")
    written = getattr(import_module(f"meshdsl.backends.peers.{module}"), name)(program)
    text: str = written.text()
    return text


def _refuse_uneven(program: Program) -> None:
    """MD0311: JAX shards arrays into blocks of one size only."""
    for tensor in program.tensors:
        value, p = tensor.value, tensor.placement
        for dim, axes in p.splits:
            size, ways = value.type.size(dim), program.mesh.size(*axes)
            if p.is_uneven(dim, size, program.mesh):
                message = (
                    f"JAX cannot shard `{dim}` of size {size} over {', '.join(axes)} of size {ways}"
                )
                near = " or ".join(f"`--set {dim}={n}`" for n in nearest(size, ways))
                help = f"pad the dim to a size that divides: {near}"
                fail("MD0311", message, value.span, help=help)
