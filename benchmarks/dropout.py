"""What dropout costs: ours, the same bits under every layout, beside `torch.nn.functional.dropout`.

`python -m benchmarks.dropout` prints the least processor time of a call on one thread, and its
ratio to torch's. The two take turns. Ours draws an element by its index in the whole tensor; torch
draws by a generator, one after the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from meshdsl.backends.runtime.random_blocks import dropped
from meshdsl.backends.runtime.splitmix import stream_key

SHAPES = ((16, 1024), (64, 1024), (2048, 1024))
RATE = 0.1
ROUNDS = 100
ELEMENTS = 1 << 18
"""How many one turn drops out of, about."""


def microseconds(call: Callable[[], object], calls: int) -> float:
    """Of the processor, for one call on average."""
    started = time.thread_time()
    for _ in range(calls):
        call()
    return 1e6 * (time.thread_time() - started) / calls


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    print("µs of a call, least\n\n| elements | ours | F.dropout | ratio |\n|---|---|---|---|")
    for shape in SHAPES:
        x, key = torch.randn(shape), stream_key(1, 2)
        ours = partial(dropped, x, RATE, key, shape, (0,) * len(shape))
        theirs = partial(torch.nn.functional.dropout, x, RATE)
        calls = max(1, ELEMENTS // x.numel())
        rounds = [(microseconds(ours, calls), microseconds(theirs, calls)) for _ in range(ROUNDS)]
        a, b = (min(column) for column in zip(*rounds, strict=True))
        print(f"| {x.numel():,} | {a:.0f} | {b:.0f} | {a / b:.2f} |")


if __name__ == "__main__":
    main()
