"""Random training programs that are built twice: as text, and as functions on torch tensors.

Nothing of the compiler is asked what a program means: `named_torch` says it, torch.autograd takes
the gradients, torch.optim the steps.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch

from tests.training import named_torch as nt
from tests.training.independent_expressions import Env, Unfit
from tests.training.independent_writer import Program, Writer
from tests.training.named_torch import Named


def random_program(seed: int) -> Program:
    """The program of a seed; seeds without one yield that of the next."""
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


def answer(program: Program, noise: float = 0.0, steps: int = 1) -> Answer:
    """The results of the last step, by torch. Raises Corner where rounding would decide."""
    generator = torch.Generator().manual_seed(0)

    def moved(data: torch.Tensor) -> torch.Tensor:
        if not data.is_floating_point() or not noise:
            return data.detach().clone()
        drawn = torch.randn(data.shape, generator=generator, dtype=data.dtype)
        return data.detach() * (1 + noise * drawn)

    params = {n: Named(moved(v.data).requires_grad_(), v.dims) for n, v in program.params.items()}
    inputs = {n: Named(moved(v.data), v.dims) for n, v in program.inputs.items()}
    optimizer = None
    for _ in range(steps):
        outputs = one_batch_after_another(program, inputs, params)
        optimizer = optimizer or Optimizer(params, program.optimizer)
        optimizer.step()
    assert optimizer is not None
    updated = {n: Named(v.data.detach(), v.dims) for n, v in params.items()}
    return Answer(outputs, updated, optimizer.states())


def one_batch_after_another(program: Program, inputs: Env, params: Env) -> Env:
    """The outputs; every parameter that the loss depends on has its mean gradient then."""
    for v in params.values():
        v.data.grad = None
    batches = []
    for batch in range(program.accumulate):
        env = dict(params)
        for name, v in inputs.items():
            one = v.data[batch].clone()
            one.requires_grad_(one.is_floating_point())
            env[name] = Named(one, v.without("accumulate"))
        for step in program.steps:
            step(env)
        leaves = [v.data for v in params.values()]
        loss = env["loss"].data / program.accumulate
        found = torch.autograd.grad(loss, leaves, allow_unused=True, retain_graph=True)
        for leaf, g in zip(leaves, found, strict=True):
            if g is not None:
                leaf.grad = g.detach().clone() if leaf.grad is None else leaf.grad + g.detach()
        batches.append(
            {n: Named(env[n].data.detach().clone(), env[n].dims) for n in program.outputs}
        )
    if program.accumulate == 1:
        return batches[0]
    return {n: gathered_up([b[n] for b in batches]) for n in program.outputs}


def gathered_up(of: list[Named]) -> Named:
    """The output of a step of several batches: the mean of numbers, tensors stacked."""
    data = torch.stack([v.data for v in of])
    return Named(data, ("accumulate", *of[0].dims)) if of[0].dims else Named(data.mean(0), ())


class Optimizer:
    """Torch's own, of the parameters that have gradients."""

    def __init__(self, params: Env, options: dict[str, object]) -> None:
        given = dict(options)
        self.kind = str(given.pop("kind"))
        self.clip = given.pop("clip", None)
        given.pop("accumulate", None)
        self.trained = {n: v for n, v in params.items() if v.data.grad is not None}
        if self.kind == "momentum":
            given["momentum"] = given.pop("beta", 0.9)
        makers: dict[str, Any] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
        maker = makers.get(self.kind, torch.optim.SGD)
        self.made = maker([v.data for v in self.trained.values()], **given)

    def step(self) -> None:
        if self.clip:
            leaves = [v.data for v in self.trained.values()]
            torch.nn.utils.clip_grad_norm_(leaves, float(str(self.clip)))
        self.made.step()

    def states(self) -> Env:
        """By the names they have in the language."""
        adam = {"exp_avg": "m", "exp_avg_sq": "v"}
        keys = {"momentum": {"momentum_buffer": "v"}, "sgd": {}}.get(self.kind, adam)
        return {
            f"{n}.{to}": Named(self.made.state[v.data][key], v.dims)
            for n, v in self.trained.items()
            for key, to in keys.items()
        }
