"""What Python costs: tracing a program, and calling a plan again.

    python -m benchmarks.python_api

Tracing is timed on the 4-layer transformer, once as a user meets it and then again and again. A
call is timed on a small program on 8 devices, beside the same threads running nothing but the
emitted text on blocks that lie ready.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import meshdsl as md
from tests.api.twins import program_of

CALLS = 300


def timed(call: Callable[[], object], times: int) -> list[float]:
    """Milliseconds of each of several calls."""
    found = []
    for _ in range(times):
        started = time.perf_counter()
        call()
        found.append((time.perf_counter() - started) * 1e3)
    return found


def tracing() -> None:
    """Time tracing."""
    _show("first trace, the registry loaded with it", timed(program_of("transformer").retrace, 1))
    _show("trace the 4-layer transformer", timed(program_of("transformer").retrace, 30))


def calling() -> None:
    """Time calls of a plan."""
    batch, io, hidden = md.dims(batch=64, io=64, hidden=64)

    @md.program
    def mlp(x: md.Tensor[batch, io]):  # type: ignore[no-untyped-def]
        w = md.param([io, hidden])
        v = md.param([hidden, io])
        h = md.relu(md.einsum(x, w, out=[batch, hidden]))
        y = md.einsum(h, v, out=[batch, io])
        return y

    for layout in ({"batch": "data"}, {"hidden": "data"}):
        plan = mlp.compile({"data": 8}, layout)
        x = plan.sample()["x"]
        plan(x)
        whole = timed(lambda plan=plan, x=x: plan(x), CALLS)
        text = timed(_text_only(plan, x), CALLS)
        _show(f"call on 8 devices, {layout}", whole)
        _show("  the text in the same threads", text)
        over = statistics.median(whole) - statistics.median(text)
        print(f"{'  beyond it':50}{over:8.2f} ms")


def _text_only(plan: md.Plan, x: object) -> Callable[[], object]:
    """The devices of a plan running its text on blocks that lie ready."""
    engine = plan._ready()
    assert plan._blocks is not None
    blocks = engine._blocks(engine.program.INPUTS, engine._inputs, {"x": x})
    return lambda: engine._turns(blocks, plan._blocks or []).run()


def _show(what: str, times: list[float]) -> None:
    figures = f"{statistics.median(times):8.2f} ms, least {min(times):.2f}, most {max(times):.2f}"
    print(f"{what:50}{figures}")


if __name__ == "__main__":
    tracing()
    calling()
