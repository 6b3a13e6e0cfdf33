"""Exchanges of devices outside their programs: on threads here, on processes elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from meshdsl.backends.engines.local_devices import DeviceThreads
from meshdsl.backends.engines.local_dist import LocalDist
from meshdsl.backends.engines.ranks import Ranks
from meshdsl.backends.runtime.values import Spec, local_part
from meshdsl.diagnostics import Diagnostic, DiagnosticError

MESH = {"x": 2, "y": 3}


def together(
    work: Callable[[Ranks], Any], axes: tuple[tuple[str, ...], ...] = (("x", "y"),)
) -> list[Any]:
    """The result of `work` on each device, or the error it raises there."""
    dist = LocalDist(MESH, axes)

    def call(rank: int) -> Any:
        try:
            return work(Ranks(MESH, rank, dist, dist.groups(rank)))
        except Exception as error:
            return error

    found = DeviceThreads(math.prod(MESH.values()), dist, call).run()
    assert not found.errors
    return found.outputs


def test_small_exchanges():
    assert together(lambda ranks: ranks.total(ranks.rank)) == [15] * 6
    assert together(lambda ranks: ranks.first(ranks.rank + 7)) == [7] * 6
    brought = [{"rank": rank, "text": "ä" * 5000 * rank} for rank in range(6)]
    assert together(lambda ranks: ranks.everyone(brought[ranks.rank])) == [brought] * 6


def test_one_by_itself():
    ranks = Ranks(MESH)
    assert (ranks.total(3), ranks.first(4), ranks.everyone("a")) == (3, 4, ["a"])
    assert ranks.all_do(lambda: 5) == [5]
    with pytest.raises(ZeroDivisionError):
        ranks.first_does(lambda: 1 // 0)


def test_the_first_does_it_for_all():
    done = iter("once")
    assert together(lambda ranks: ranks.first_does(lambda: next(done))) == ["o"] * 6
    assert next(done) == "n"


class Odd(Exception):
    """Cannot be made anew of its own message."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


ERRORS = {
    "of the system": OSError(28, "No space left on device", "file"),
    "a diagnostic": DiagnosticError(Diagnostic("MD0501", "a message", help="a help")),
    "of another kind": Odd(1, 2),
}


@pytest.mark.parametrize("case", ERRORS)
def test_one_that_is_hindered_stops_all_with_its_message(case):
    error, went_on = ERRORS[case], []

    def work(ranks: Ranks) -> None:
        def hindered() -> None:
            if ranks.rank in (2, 4):
                raise error if ranks.rank == 2 else ValueError("later")

        ranks.all_do(hindered)
        went_on.append(ranks.rank)

    raised = together(work)
    assert not went_on
    assert raised[2] is error
    assert all(str(error) in str(other) for other in raised)
    if isinstance(error, DiagnosticError):
        assert all(other.diagnostics == error.diagnostics for other in raised)
    if isinstance(error, OSError):
        assert all((other.errno, other.filename) == (28, "file") for other in raised)


SPLITS = [{}, {"a": ("x",)}, {"a": ("y",), "b": ("x",)}, {"b": ("y", "x")}]


@pytest.mark.parametrize("axes", [(("x", "y"),), (("x",), ("y",), ("x", "y"))])
@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_blocks_become_the_whole(split, axes, dtype):
    spec = Spec("f32", {"a": 6, "b": 12}, split)
    whole = torch.arange(72).reshape(6, 12).remainder(5).to(dtype)

    def work(ranks: Ranks) -> torch.Tensor:
        assert ranks.part(spec) == local_part(spec, MESH, ranks.rank)
        return ranks.whole(spec, whole[ranks.part(spec)])

    assert all(torch.equal(found, whole) for found in together(work, axes))
