"""MKL's vector functions are called on one thread before several threads call them."""

import threading

import pytest
import torch

from meshdsl.backends.engines import in_process
from meshdsl.backends.runtime import main
from meshdsl.backends.runtime.vector_math import VECTOR_FUNCTIONS, choose_vector_kernels

EVERY_KERNEL = {(name, dtype) for name in VECTOR_FUNCTIONS for dtype in ("float32", "float64")}


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The vector functions that this thread calls, each with the dtype of its operand."""
    calls: list[tuple[str, str]] = []
    here = threading.get_ident()

    def recorded(name: str) -> None:
        function = getattr(torch, name)

        def call(x: torch.Tensor) -> torch.Tensor:
            if threading.get_ident() == here:
                calls.append((name, str(x.dtype).removeprefix("torch.")))
            return function(x)  # type: ignore[no-any-return]

        monkeypatch.setattr(torch, name, call)

    for name in VECTOR_FUNCTIONS:
        recorded(name)
    return calls


def test_every_function_is_called_in_both_dtypes(called: list[tuple[str, str]]) -> None:
    choose_vector_kernels()
    assert set(called) == EVERY_KERNEL


def test_a_loaded_program_has_its_kernels_before_its_devices_start(
    called: list[tuple[str, str]],
) -> None:
    in_process.load("def device(rank, groups, inputs, params):\n    return {}\n")
    assert set(called) == EVERY_KERNEL


def test_a_process_has_its_kernels_before_it_joins_the_others(
    called: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    joined: list[set[tuple[str, str]]] = []
    monkeypatch.setattr(
        torch.distributed, "init_process_group", lambda **_: joined.append(set(called))
    )
    main.start(0, 1)
    assert joined == [EVERY_KERNEL]
