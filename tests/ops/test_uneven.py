"""Blocks of several sizes, and empty ones: every split that an operator declares, tried on them."""

from __future__ import annotations

import itertools
import os

import pytest

from meshdsl.ops.opdef import load_all, lookup
from meshdsl.prove.block_checks import WAYS, loops_of_sizes, on_blocks, uneven_rows
from meshdsl.prove.sample_values import signature
from meshdsl.prove.wrong_cases import found

ALL = "MESHDSL_CASES" in os.environ


@pytest.mark.parametrize("name", sorted(load_all()))
def test_every_split_holds_on_blocks_of_several_sizes(name: str) -> None:
    opdef = lookup(name)
    # CI tries three blocks, of which one is empty, and a nest of two by two on the first sample.
    every = list(itertools.product(opdef.samples, WAYS))
    few = [*itertools.product(opdef.samples, WAYS[:1]), (opdef.samples[0], (2, 2))]
    for sample, ways in every if ALL else few:
        sig = signature(opdef, sample)
        for row in uneven_rows(opdef, sig, ways):
            assert not found(on_blocks(opdef, sample, sig, row, ways))


@pytest.mark.parametrize("name", sorted(load_all()))
def test_every_split_holds_on_loops_of_odd_sizes(name: str) -> None:
    """CI tries each row on the first sample that has it."""
    opdef, tried = lookup(name), 0
    for sample, ways, loop in loops_of_sizes(opdef, ALL):
        sig = signature(opdef, sample)
        for row in uneven_rows(opdef, sig, ways):
            if row.factor is not None and row.factor.name == loop:
                assert not found(on_blocks(opdef, sample, sig, row, ways))
                tried += 1
    loops = (opdef.factors(signature(opdef, sample)).loops for sample in opdef.samples)
    assert tried or not any(loops), "no loop of any sample can have such a size"
