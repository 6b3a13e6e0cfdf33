"""Random training programs that are built twice: as text, and as functions on torch tensors.

Nothing of the compiler is asked what a program means: `named_torch` says it, torch.autograd takes
the gradients, torch.optim the steps.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from tests.training import named_torch as nt
from tests.training.independent_expressions import Env, Unfit
from tests.training.independent_writer import Program, Writer
from tests.training.named_torch import Named


def random_program(seed: int) -> Program:
    """The program of a seed; seeds of which none comes stand for the next one."""
    for attempt in range(100):
        try:
            return Writer(random.Random(seed * 1000 + attempt)).program()
        except (Unfit, nt.Corner):
            continue
    raise AssertionError(seed)


# --- what one device would find --------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """Outputs and gradients of one step, by name."""

    outputs: Env
    updated: Env
    states: Env


def answer(program: Program, noise: float = 0.0) -> Answer:
    """The step of `program`, by torch. Raises Corner where rounding would decide."""
    generator = torch.Generator().manual_seed(0)

    def moved(data: torch.Tensor) -> torch.Tensor:
        if not data.is_floating_point() or not noise:
            return data.detach().clone()
        drawn = torch.randn(data.shape, generator=generator, dtype=data.dtype)
        return data.detach() * (1 + noise * drawn)

    params = {n: Named(moved(v.data).requires_grad_(), v.dims) for n, v in program.params.items()}
    leaves = [v.data for v in params.values()]
    total: list[torch.Tensor | None] = [None] * len(leaves)
    batches = []
    for batch in range(program.accumulate):
        env = dict(params)
        for name, v in program.inputs.items():
            one = moved(v.data[batch])
            one.requires_grad_(one.is_floating_point())
            env[name] = Named(one, v.without("accumulate"))
        for step in program.steps:
            step(env)
        found = torch.autograd.grad(env["loss"].data, leaves, allow_unused=True, retain_graph=True)
        for i, g in enumerate(found):
            if g is not None:
                old = total[i]
                total[i] = g.detach() if old is None else old + g.detach()
        batches.append(
            {n: Named(env[n].data.detach().clone(), env[n].dims) for n in program.outputs}
        )
    outputs = batches[0]
    if program.accumulate > 1:
        outputs = {n: gathered_up([b[n] for b in batches]) for n in program.outputs}
    for leaf, summed in zip(leaves, total, strict=True):
        leaf.grad = None if summed is None else summed / program.accumulate
    return Answer(outputs, *stepped(params, program.optimizer))


def gathered_up(of: list[Named]) -> Named:
    """What a step of several batches returns: the mean of numbers, tensors one after the other."""
    data = torch.stack([v.data for v in of])
    return Named(data, ("accumulate", *of[0].dims)) if of[0].dims else Named(data.mean(0), ())


def stepped(params: Env, optimizer: dict[str, object]) -> tuple[Env, Env]:
    """Parameters and states after torch's own step with the gradients that they have."""
    options = {k: v for k, v in optimizer.items() if k not in ("kind", "accumulate")}
    trained = {n: v for n, v in params.items() if v.data.grad is not None}
    leaves = [v.data for v in trained.values()]
    if clip := options.pop("clip", None):
        torch.nn.utils.clip_grad_norm_(leaves, float(str(clip)))
    kind = optimizer["kind"]
    made: torch.optim.Optimizer
    if kind in ("sgd", "momentum"):
        if kind == "momentum":
            options["momentum"] = options.pop("beta", 0.9)
        made = torch.optim.SGD(leaves, **options)  # type: ignore[arg-type]
    else:
        made = (torch.optim.Adam if kind == "adam" else torch.optim.AdamW)(leaves, **options)  # type: ignore[arg-type]
    made.step()
    keys = {"momentum": {"momentum_buffer": "v"}, "sgd": {}}.get(
        str(kind), {"exp_avg": "m", "exp_avg_sq": "v"}
    )
    states = {
        f"{n}.{to}": Named(made.state[v.data][key], v.dims)
        for n, v in trained.items()
        for key, to in keys.items()
    }
    return {n: Named(v.data.detach(), v.dims) for n, v in params.items()}, states
