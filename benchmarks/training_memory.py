"""The peak of the memory of a training step: ours beside those by hand and in JAX, on one device.

`python -m benchmarks.training_memory [--only WORD…] [--onednn]` prints MiB of parameters, states,
inputs and everything else at the worst moment of a step: what `explain` says, what torch allocates
for the emitted text and for the step by hand, and what the compiler of JAX reserves.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.training import with_words
from benchmarks.training_by_hand import ByHand
from benchmarks.training_cases import Case, cases, first_values
from benchmarks.training_jax import WithJax, configure, is_there
from benchmarks.training_worker import emitted, tensors
from meshdsl.backends.engines.in_process import load
from meshdsl.device.memory import memory

MIB = 2**20


def allocated(run: Callable[[], Any], onednn: bool = False) -> int:
    """The most bytes that torch has given out at once in `run`, beside what was there before.

    Without `onednn`: what a kernel of it allocates to work in (f32 sums of a bf16 matmul) depends
    on what the processor can do.
    """
    kernels: Any = torch.backends.mkldnn
    before, kernels.enabled = kernels.enabled, onednn
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
            run()
    finally:
        kernels.enabled = before
    events = found.profiler.kineto_results.events()
    sizes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    now = most = 0
    for _, size in sorted(sizes, key=lambda event: event[0]):
        now += size
        most = max(most, now)
    return most


def kept() -> int:
    """Bytes of all tensors that there are, each storage once."""
    gc.collect()
    found = {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
        for x in gc.get_objects()
        if type(x) in (torch.Tensor, torch.nn.Parameter)
    }
    return sum(found.values())


def peak(make: Callable[[], Callable[[], Any]], onednn: bool = False) -> int:
    """Bytes at the worst moment of the third step of what `make` makes, what it keeps included."""
    before = kept()
    step = make()
    step()
    step()
    held = kept() - before
    return held + allocated(step, onednn)


def row(case: Case, onednn: bool) -> str:
    """The line of the table, in MiB."""
    made = case.compilation()
    program = load(made.text)

    def by_hand() -> Callable[[], Any]:
        params, inputs = (tensors(program, s, 0) for s in (program.PARAMS, program.INPUTS))
        return ByHand(case, params, inputs)

    steps: list[Callable[[], Callable[[], Any]]] = [lambda: emitted(program, 0), by_hand]
    found = [memory(made.device)["peak"], *(peak(make, onednn) for make in steps)]
    if is_there():
        whole = (first_values(s, {"device": 1}, 0) for s in (program.PARAMS, program.INPUTS))
        found.append(WithJax(case, *whole).peak())
    return f"| {case.name:22} | {' | '.join(f'{n / MIB:9.2f}' for n in found)} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--only", nargs="*", default=[], help="cases with all of these words")
    parser.add_argument("--onednn", action="store_true", help="with what oneDNN allocates")
    options = parser.parse_args()
    alone = [case for case in cases(quick=False) if case.devices == 1]
    chosen = with_words(parser, alone, options.only)
    torch.set_num_threads(1)
    configure()
    print("| MiB, one device | explain | emitted | by hand | JAX |\n|---|---|---|---|---|")
    for case in chosen:
        print(row(case, options.onednn), flush=True)


if __name__ == "__main__":
    main()
