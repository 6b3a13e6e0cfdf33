"""Loops inside of each other: what is held is that of walking each iteration, in work for few."""

from __future__ import annotations

import pytest

from meshdsl.device.memory import MemoryWalk, memory
from tests.compiling import compile_text
from tests.work import calls


class Every(MemoryWalk):
    """A walk that does no loop from memory."""

    repeats = False


BODIES = {
    "carries": "x = tanh(x)",
    "two carries, crossed": "t = tanh(x) + y\n y = x * 2.0\n x = t",
    "a sum over devices": "t = einsum(x, y -> [])\n x = t + y",
    "parameters of each iteration": "param w[a, b]\n x = x + sum[b](w * y)",
    "parameters, products": "param w[a, c]\n h = einsum(x, w -> [c])\n x = einsum(h, w -> [a])",
}


def text(levels: int, size: int, body: str, *, wide: int = 4, trained: bool = False) -> str:
    """A program of loops inside of each other, with a statement before and after each."""
    dims = "".join(f"dim r{i} = {size}\n" for i in range(levels))
    opened = "".join(f"repeat r{i} {{\n x = x + 1.0\n" for i in range(levels))
    closed = "y = y + x\n}\n" * levels
    end = "minimize loss with sgd()\n" if trained else ""
    return (
        f"dim a = {wide}, b = 2, c = 6\n{dims}mesh m = {{ p: 2 }}\nlayout l {{ a -> p }}\n"
        f"program deep(u[a], v[a]) {{\nx = u\ny = v\n{opened}{body}\n{closed}"
        f"loss = sum(x) + sum(y)\nreturn loss\n{end}}}\n"
    )


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("body", BODIES)
def test_what_is_held_is_that_of_walking_each_iteration(body: str, size: int) -> None:
    # The emitted text deletes wide ones, each after its last use.
    trained, wide = "param" in body, 1 << 20 if size % 2 else 4
    made = text(4, size, BODIES[body], wide=wide, trained=trained)
    program = compile_text(made, layout="l", reduce="deferred", cache=False).device
    found, every = (walk(program).walked() for walk in (MemoryWalk, Every))
    assert (found.most, found.line, found.now) == (every.most, every.line, every.now)
    sizes = [{name: block.bytes for name, block in held.names.items()} for held in (found, every)]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("body", BODIES)
def test_the_walk_does_not_grow_with_the_combinations_of_iterations(body: str, size: int) -> None:
    few, many = (
        compile_text(text(levels, size, BODIES[body]), layout="l", reduce="deferred").device
        for levels in (4, 8)
    )
    assert calls(lambda: memory(many)) < 8 * calls(lambda: memory(few))
