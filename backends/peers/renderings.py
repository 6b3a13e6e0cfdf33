"""The table of renderings: the placed program as other systems write it."""

from __future__ import annotations

from importlib import import_module

from meshdsl.diagnostics import fail
from meshdsl.option_edits import refuse, set_size
from meshdsl.placed.ir import PlacedProgram
from meshdsl.placed.layout import nearest

RENDERINGS: dict[str, str] = {
    "sbp": "sbp_notation._Sbp",
    "scaling-book": "scaling_book._Book",
    "gshard": "gshard._GShard",
    "oneflow": "oneflow.OneFlowText",
    "dtensor": "dtensor.DTensorText",
    "jax": "jax.JaxText",
}
"""The class of each notation, by its name on the command line; imported when needed."""


def render(program: PlacedProgram, notation: str) -> str:
    """The text of a placed program in a notation of `RENDERINGS`. Raises MD0910 or MD0311."""
    _refuse_stages(program, notation)
    if notation == "jax":
        _refuse_uneven(program)
    module, _, name = RENDERINGS[notation].partition(".")
    written = getattr(import_module(f"meshdsl.backends.peers.{module}"), name)(program)
    text: str = written.text()
    return text


def _refuse_stages(program: PlacedProgram, notation: str) -> None:
    """MD0910: a rendering is one program that all devices run, each its part of every operator.

    In a pipeline a device has the iterations of its own stage only, at times that a schedule sets.
    """
    pipe = program.pipe
    if pipe is None or pipe.stages(program.mesh) == 1:
        return
    message = f"a pipeline cannot be written as {notation}: every device there runs every operator"
    help = "render it under a layout without stages; `meshdsl compile` writes a pipeline as torch"
    fail("MD0910", message, pipe.span, help=help)


def _refuse_uneven(program: PlacedProgram) -> None:
    """MD0311: JAX shards arrays into blocks of one size only."""
    for tensor in program.tensors:
        value, p = tensor.value, tensor.placement
        for dim, axes in p.splits:
            size, ways = value.type.size(dim), program.mesh.size(*axes)
            if p.is_uneven(dim, size, program.mesh):
                message = (
                    f"JAX cannot shard `{dim}` of size {size} over {', '.join(axes)} of size {ways}"
                )
                fixes = [set_size(dim, n) for n in nearest(size, ways)]
                refuse("MD0311", message, fixes, span=value.span)
