"""The passes over the named program, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from meshdsl.named.attention_fusion import Spoken, fuse_attention
from meshdsl.named.batch_norm_fusion import fuse_batch_norms
from meshdsl.named.identities import fold_identities
from meshdsl.named.ir import NamedProgram
from meshdsl.named.origins import with_kept_origins
from meshdsl.named.simplify import (
    contract_products,
    contract_squares,
    eliminate_dead_code,
    hoist_invariants,
    name_transposes,
    stack_picks,
)
from meshdsl.named.sums_after_loops import sum_after_loops

Pass = Callable[[NamedProgram], NamedProgram]
"""A pure function from program to program. Origins may name values that it removes."""


def passes(spoken: Spoken | None, is_step: bool) -> tuple[Pass, ...]:
    """The passes that simplify a program, or a training step (`is_step`).

    An attention or a batch norm becomes one operator where nothing that it leaves out is `spoken`
    of by a layout, and so are zeros left out of a sum. With None, neither is done to what has a
    name.
    """
    fuse: tuple[Pass, ...] = ()
    contract = partial(contract_products, is_step=is_step)
    if spoken is not None:
        fuse = (partial(fuse_attention, spoken=spoken), partial(fuse_batch_norms, spoken=spoken))
    return (
        partial(fold_identities, spoken=spoken, is_step=is_step),
        contract,
        contract_squares,
        *fuse,
        name_transposes,
        stack_picks,
        hoist_invariants,
        contract,  # a sum that has moved out of a loop may have met its product there
        sum_after_loops,
        eliminate_dead_code,
    )


def simplify(
    program: NamedProgram, spoken: Spoken | None = (), is_step: bool = False
) -> NamedProgram:
    """The program after all `passes`; each origin names a value that is left."""
    simplified = program
    for each in passes(spoken, is_step):
        simplified = each(simplified)
    return with_kept_origins(program, simplified)
