"""Modules on a DeviceMesh of real processes over gloo: training, state dicts, what is refused.

The processes of one world go through all of its scenes, one after the other.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from meshdsl.api.errors import ProgramError
from meshdsl.api.module import module
from meshdsl.backends.module.program_module import ProgramModule
from tests.backends.module_cases import (
    BLOCK,
    CASES,
    MLP,
    SCALARS,
    Case,
    Tensors,
    drawn,
    expected,
    mlp,
)
from tests.backends.module_cases import block as block_math
from tests.ranks import Forks

MEANS = """
dim batch = 4, io = 6
layout fsdp { batch -> a, params: io -> a }
layout tp { io -> a }
program means(x[batch, io]) {
  param w[io]
  param run[io] = zeros()
  y = x * w
  run := 0.5 * run + 0.5 * stop_gradient(mean[batch](y))
  loss = mean((y - run)^2)
  return loss
}
"""

ROOT = Path(__file__).resolve().parent.parent.parent
SQUARE = {"a": 2, "b": 2}


def mesh_of(axes: dict[str, int]) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def written(folder: Path, text: str) -> str:
    """The path of a file with the program; every process writes its own."""
    path = folder / f"program-{os.getpid()}.mdsl"
    path.write_text(text)
    return str(path)


def made(folder: Path, case: Case, **options: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """The module of a case in float64, and the whole parameters that it was given."""
    path, mesh = written(folder, case.text), mesh_of(case.axes)
    shown = module(path, mesh, case.layout, reduce=case.reduce, dtype="f64", **options)
    params = shown.whole_state_dict()
    return shown, params


def whole(tensor: torch.Tensor | None) -> torch.Tensor:
    """All of a DTensor; any other tensor as it is."""
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def close(found: torch.Tensor | None, right: torch.Tensor | None) -> None:
    """Whether tensors are equal up to rounding: of a DTensor all of it."""
    torch.testing.assert_close(whole(found), whole(right), rtol=1e-9, atol=1e-10)


def block(shown: ProgramModule, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """This process's block of a whole output or input, as DTensor shards it."""
    return distribute_tensor(tensor, shown.device_mesh, shown.placements(name)).to_local()


# --- scenes -------------------------------------------------------------------------------------


def gradients(folder: Path) -> None:
    """Outputs and gradients by everything, of blocks and of DTensors, kept and added up."""
    world = dist.get_world_size()
    for case in CASES:
        small = case.text is MLP and case.layout in ("fsdp", "hybrid", "swapped")
        small = small or case.text is SCALARS
        large = case.text is BLOCK and case.layout in ("tp", "hybrid")
        if math.prod(case.axes.values()) == world and (small or large):
            agree(folder, case)


def agree(folder: Path, case: Case) -> None:
    shown, params = made(folder, case, seed=3)
    specs = shown._runtime
    inputs, cotangents = drawn(specs.inputs, 1), drawn(specs.outputs, 2)
    right = expected(case, inputs, params, cotangents)
    own = {n: shown.local(n, t).clone().requires_grad_() for n, t in inputs.items()}
    found = shown(**own)._asdict()
    loss = sum((found[n] * block(shown, n, t)).sum() for n, t in cotangents.items())
    assert isinstance(loss, torch.Tensor)
    loss.backward(retain_graph=True)
    for name, tensor in right.outputs.items():
        close(found[name].detach(), block(shown, name, tensor))
    for name, tensor in right.inputs.items():
        close(own[name].grad, block(shown, name, tensor))
    grads = {n: p.grad.clone() for n, p in shown.named_parameters()}
    assert list(grads) == list(params)
    for name, tensor in right.params.items():
        close(grads[name], tensor)
    loss.backward()
    for name, param in shown.named_parameters():
        close(param.grad, 2 * grads[name])
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


TRAINED: dict[int, list[tuple[str, dict[str, int], dict[str, int]]]] = {
    2: [("tp", {"a": 2}, {"io": 7}), ("kept", {"a": 2}, {"batch": 3, "io": 1, "hidden": 3})],
    4: [("both", SQUARE, {}), ("hybrid", SQUARE, {"hidden": 9})],
}
"""Layouts, meshes and sizes that are trained on so many processes."""


def training(folder: Path) -> None:
    """Four steps of Muon and AdamW, and the clipped norm of each, against parameters of torch."""
    for layout, axes, dims in TRAINED[dist.get_world_size()]:
        train(folder, Case(MLP, mlp, layout, axes), dims)


def train(folder: Path, case: Case, dims: dict[str, int]) -> None:
    shown, start = made(folder, case, dims=dims)
    params = {n: torch.nn.Parameter(t.clone()) for n, t in start.items()}
    both = [o for p in (shown.parameters(), params.values()) for o in muon([*p])]
    clip = torch.nn.utils.clip_grad_norm_
    for step in range(4):
        inputs = drawn(shown._runtime.inputs, step)
        own = {n: shown.local(n, t) for n, t in inputs.items()}
        loss, right = shown(**own).loss, mlp(params, inputs)["loss"]
        close(loss.detach(), right.detach())
        for optimizer in both:
            optimizer.zero_grad()
        for value in (loss, right):
            value.backward()
        norm = shown.clip_grad_norm_(0.1) if step % 2 else clip(shown.parameters(), 0.1)
        expected_norm = clip(params.values(), 0.1)
        close(norm, expected_norm)
        assert float(norm) == pytest.approx(float(expected_norm))
        for optimizer in both:
            optimizer.step()
    for name, param in shown.named_parameters():
        assert param.device_mesh == shown.device_mesh
        assert param.placements == param.grad.placements == shown.placements(name)
        close(param.detach(), params[name].detach())


def muon(params: list[torch.nn.Parameter]) -> list[torch.optim.Optimizer]:
    """Muon for matrices, AdamW for all else."""
    matrices = [p for p in params if p.ndim == 2]
    others = [p for p in params if p.ndim != 2]
    return [torch.optim.Muon(matrices, lr=0.05), torch.optim.AdamW(others, lr=0.05)]


Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.05, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.05, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.05),
    "closure": lambda p: torch.optim.Muon([x for x in p if x.ndim == 2], lr=0.05, nesterov=False),
}


def optimizers(folder: Path) -> None:
    """Other optimizers of torch, on a deep copy; one that cannot work is refused."""
    world = dist.get_world_size()
    case = Case(MLP, mlp, "tp", {"a": world})
    first, start = made(folder, case)
    inputs = drawn(first._runtime.inputs, 1)
    own = {n: first.local(n, t) for n, t in inputs.items()}
    for name, make in OPTIMIZERS.items():
        shown = copy.deepcopy(first)
        params = {n: torch.nn.Parameter(t.clone()) for n, t in start.items()}
        optimizer = three_steps(make, [*shown.parameters()], partial(shown, **own))
        three_steps(make, [*params.values()], partial(outputs, params, inputs))
        for key, param in shown.named_parameters():
            close(param.detach(), params[key].detach())
        for param, state in optimizer.state.items():
            assert all(t.shape in ((), param.shape) or name == "adafactor" for t in state.values())
    shown(**own).loss.backward()
    refused("MD0561", lambda: torch.optim.LBFGS(shown.parameters()).step(lambda: 0.0))
    plain = {"w": start["w"]}
    refused("MD0561", lambda: torch.func.functional_call(shown, plain, (), own))


def outputs(params: Tensors, inputs: Tensors) -> Any:
    """The outputs of the MLP, as a module has them."""
    return SimpleNamespace(**mlp(params, inputs))


def three_steps(make: Make, params: list[Any], call: Callable[[], Any]) -> torch.optim.Optimizer:
    """Steps with a closure, as some optimizers of torch need it."""
    optimizer = make(params)

    def closure() -> float:
        optimizer.zero_grad()
        loss = call().loss
        loss.backward()
        return float(loss.detach())

    for _ in range(3):
        optimizer.step(closure)
    return optimizer


def averages(folder: Path) -> None:
    """The averaged weights of torch's utilities."""
    world = dist.get_world_size()
    shown, mean = made(folder, Case(MLP, mlp, "hybrid" if world == 4 else "tp", axes_of(world)))
    ema = torch.optim.swa_utils.AveragedModel(
        shown, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
    )
    for step in range(3):
        with torch.no_grad():
            for param in shown.parameters():
                param.add_(step)
        ema.update_parameters(shown)
        now = shown.whole_state_dict()
        mean = {n: 0.9 * t + 0.1 * now[n] if step else now[n] for n, t in mean.items()}
    for name, param in ema.module.named_parameters():
        close(param.detach(), mean[name])
    inputs = drawn(shown._runtime.inputs, 1)
    loss = ema(**{n: shown.local(n, t) for n, t in inputs.items()}).loss
    close(loss.detach(), mlp(mean, inputs)["loss"])


def running_means(folder: Path) -> None:
    """What the program assigns is stored as a parameter is, and averaged as one."""
    for layout in ("fsdp", "tp"):
        shown, start = made(folder, Case(MEANS, mlp, layout, {"a": dist.get_world_size()}))
        ema = torch.optim.swa_utils.AveragedModel(shown, use_buffers=True)
        mean, seen = start["run"], []
        for step in range(3):
            x = drawn(shown._runtime.inputs, step)["x"]
            shown(x=shown.local("x", x)).loss.backward()
            mean = 0.5 * mean + 0.5 * (x * start["w"]).mean(0)
            seen.append(mean)
            close(shown.run, mean)
            assert shown.run.placements == shown.w.placements == (Shard(0),)
            ema.update_parameters(shown)
        averaged: Any = ema.module
        close(averaged.run, torch.stack(seen).mean(0))


def axes_of(world: int) -> dict[str, int]:
    """A mesh of so many processes."""
    return SQUARE if world == 4 else {"a": world}


def checkpoints(folder: Path) -> None:
    """Module and used saved by torch go on under another layout as if nothing had been."""
    layouts = [("tp", {"a": 4}), ("fsdp", {"a": 4}), ("swapped", SQUARE)]
    first, start = made(folder, Case(MLP, mlp, *layouts[-1]))
    used = muon([*first.parameters()])
    step_all(first, used, 1)
    saved = dict(zip("mo", get_state_dict(first, used), strict=True))
    save(saved, checkpoint_id=folder / "checkpoint")
    step_all(first, used, 2)
    for layout, axes in layouts[:-1]:
        other, _ = made(folder, Case(MLP, mlp, layout, axes), seed=9)
        again = muon([*other.parameters()])
        state: dict[str, Any] = dict(zip("mo", get_state_dict(other, again), strict=True))
        load(state, checkpoint_id=folder / "checkpoint")
        modules, optimizers = state.values()
        set_state_dict(other, again, model_state_dict=modules, optim_state_dict=optimizers)
        step_all(other, again, 2)
        right = first.whole_state_dict()
        for name, tensor in other.whole_state_dict().items():
            close(tensor, right[name])
            assert not torch.equal(tensor, start[name])


def step_all(shown: Any, optimizers: list[torch.optim.Optimizer], seed: int) -> None:
    """A step of each optimizer on a drawn batch."""
    inputs = drawn(shown._runtime.inputs, seed)
    shown(**{n: shown.local(n, t) for n, t in inputs.items()}).loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def data_parallel(folder: Path) -> None:
    """A loss of the local block alone: the gradients are those of the sum over the blocks."""
    world = dist.get_world_size()
    shown, start = made(folder, Case(MLP, mlp, "dp", {"a": world}))
    inputs = drawn(shown._runtime.inputs, 4)
    own = {n: shown.local(n, t) for n, t in inputs.items()}
    loss = ((shown(**own).y - own["target"]) ** 2).mean() / world
    loss.backward()
    params = {n: t.clone().requires_grad_() for n, t in start.items()}
    mlp(params, inputs)["loss"].backward()
    for name, param in shown.named_parameters():
        close(param.grad, params[name].grad)


def accumulation(folder: Path) -> None:
    """Gradients add up over batches; frozen parameters have none; nothing is kept without grad."""
    shown, _ = made(folder, Case(MLP, mlp, "fsdp", {"a": dist.get_world_size()}))
    batches = [drawn(shown._runtime.inputs, seed) for seed in (5, 6)]
    grads = []
    for batch in batches:
        shown.zero_grad()
        shown(**{n: shown.local(n, t) for n, t in batch.items()}).loss.backward()
        grads.append({n: p.grad.clone() for n, p in shown.named_parameters()})
    shown(**{n: shown.local(n, t) for n, t in batches[0].items()}).loss.backward()
    for name, param in shown.named_parameters():
        close(param.grad, grads[0][name] + grads[1][name])
    kept: list[torch.Tensor] = []
    own = {n: shown.local(n, t) for n, t in batches[0].items()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, torch.no_grad():
        assert not shown(**own).loss.requires_grad
    assert not kept
    shown.w.requires_grad_(False)
    shown.zero_grad()
    with hooks:
        shown(**own).loss.backward()
    assert kept
    assert shown.w.grad is None
    close(shown.v.grad, grads[0]["v"])


LOCAL: dict[int, list[Case]] = {
    2: [Case(MLP, mlp, "fsdp", {"a": 2})],
    4: [Case(BLOCK, block_math, "staged", SQUARE)],
}
"""Cases of which several batches are accumulated."""


def local_gradients(folder: Path) -> None:
    """Gradients are partial sums until the last batch; a sum that is forgotten is right, too."""
    for case in LOCAL[dist.get_world_size()]:
        accumulate(folder, case)


def accumulate(folder: Path, case: Case) -> None:
    shown, start = made(folder, case)
    batches = [drawn(shown._runtime.inputs, seed) for seed in range(3)]
    own = [{n: shown.local(n, t) for n, t in batch.items()} for batch in batches]

    def right(*counts: int) -> dict[str, torch.Tensor]:
        """The gradients of so many of each batch."""
        params = {n: t.clone().requires_grad_() for n, t in start.items()}
        for count, batch in zip(counts, batches, strict=True):
            (count * case.math(params, batch)["loss"]).backward()
        return params

    def agree(*counts: int) -> None:
        for name, tensor in right(*counts).items():
            close(shown.get_parameter(name).grad, tensor.grad)

    early = shown(**own[0]).loss
    with shown.no_sync():
        for inputs in own[:2]:
            shown(**inputs).loss.backward()
    grads = [p.grad.placements for p in shown.parameters()]
    assert any(p.is_partial() for each in grads for p in each)
    shown(**own[2]).loss.backward()
    assert all(p.grad.placements == p.placements for p in shown.parameters())
    agree(1, 1, 1)
    with shown.no_sync():
        shown(**own[0]).loss.backward()
    agree(2, 1, 1)
    shown.zero_grad()
    with shown.no_sync():
        shown(**own[1]).loss.backward()
    early.backward()
    agree(1, 1, 0)
    shown.zero_grad()
    with shown.no_sync():
        shown(**own[1]).loss.backward()
    for clip in (
        partial(torch.nn.utils.clip_grad_norm_, shown.parameters()),
        shown.clip_grad_norm_,
    ):
        norms = [whole(p.grad).norm() for p in right(0, 1, 0).values()]
        close(clip(1e3), torch.stack(norms).norm())
    params = right(0, 1, 0)
    for each in (shown.parameters(), params.values()):
        torch.optim.AdamW(each, lr=0.1).step()
    for name, param in shown.named_parameters():
        close(param.detach(), params[name].detach())


def distributed_tensors(folder: Path) -> None:
    """DTensors come in however they lie, and their gradients go back to them."""
    shown, params = made(folder, Case(MLP, mlp, "dp", {"a": dist.get_world_size()}))
    inputs = drawn(shown._runtime.inputs, 7)
    case = Case(MLP, mlp, "dp", {})
    ones = {"loss": torch.ones((), dtype=torch.float64), "y": torch.zeros_like(inputs["target"])}
    right = expected(case, inputs, params, ones)
    for place in (Replicate(), Shard(1)):
        given = {n: distribute_tensor(t, shown.device_mesh, [place]) for n, t in inputs.items()}
        given["x"].requires_grad_()
        shown.zero_grad()
        out = shown(**given)
        assert (out.y.placements, out.loss.placements) == ((Shard(0),), (Replicate(),))
        close(out.y.detach(), right.outputs["y"])
        loss = ((out.y - given["target"]) ** 2).mean()
        close(loss.detach(), right.outputs["loss"])
        (loss / 2 + out.loss / 2).backward()
        close(given["x"].grad, right.inputs["x"])
        for name, param in shown.named_parameters():
            close(param.grad, right.params[name])


def states(folder: Path) -> None:
    """A state dict of one layout is loaded under others; whole tensors too; and by torch's own."""
    world = dist.get_world_size()
    text, last = (BLOCK, "mlp.w1") if world == 2 else (MLP, "v")
    first, params = made(folder, Case(text, mlp, "tp", {"a": world}), seed=8)
    state = first.state_dict()
    assert list(state) == list(params)
    assert all(isinstance(t, DTensor) for t in state.values())
    for name, tensor in state.items():
        assert torch.equal(tensor.full_tensor(), params[name])
    others: list[tuple[str, dict[str, int]]] = [("fsdp", {"b": 1, "a": world})]
    others += [("hybrid", SQUARE)] if world == 4 else []
    for layout, axes in others:
        other, _ = made(folder, Case(text, mlp, layout, axes), seed=9)
        for given in (state, params):
            with torch.no_grad():
                for param in other.parameters():
                    param.zero_()
            other.load_state_dict(given)
            for name, tensor in other.whole_state_dict().items():
                assert torch.equal(tensor, params[name])
        outer = torch.nn.ModuleDict({"inner": other})
        outer.load_state_dict({f"inner.{n}": 2 * t for n, t in params.items()})
        save(outer.state_dict(), checkpoint_id=folder / f"{layout}-{world}")
        loaded = {f"inner.{n}": torch.zeros_like(t) for n, t in params.items()}
        load(loaded, checkpoint_id=folder / f"{layout}-{world}")
        for name, tensor in params.items():
            assert torch.equal(loaded[f"inner.{name}"], 2 * tensor)
    with pytest.raises(RuntimeError, match=rf"Missing key.*{last}"):
        first.load_state_dict({n: t for n, t in state.items() if n != last})
    refused("MD0563", lambda: first.load_state_dict({**params, last: torch.ones(3)}))


def given_values(folder: Path) -> None:
    """The values of a seed do not depend on the layout; others may be given; copies are apart."""
    world = dist.get_world_size()
    wholes = [
        made(folder, Case(MLP, mlp, layout, {"a": world}), seed=5)[1] for layout in ("tp", "fsdp")
    ]
    assert all(torch.equal(wholes[0][n], wholes[1][n]) for n in wholes[0])
    case = Case(MLP, mlp, "tp", {"a": world})
    shown, params = made(folder, case, params={"b": wholes[0]["b"] + 1})
    assert torch.equal(params["b"], wholes[0]["b"] + 1)
    other = copy.deepcopy(shown)
    with torch.no_grad():
        other.w.mul_(2)
    assert torch.equal(shown.whole_state_dict()["w"], params["w"])
    assert torch.equal(other.whole_state_dict()["w"], 2 * params["w"])


def part_of_a_mesh(folder: Path) -> None:
    """Two modules side by side, each on a part of the processes."""
    mesh = mesh_of({"copy": 2, "a": dist.get_world_size() // 2})
    shown: Any = module(
        written(folder, MLP), mesh["a"], "tp", dtype="f64", seed=mesh.get_local_rank(0)
    )
    inputs = drawn(shown._runtime.inputs, 7)
    params = {n: t.requires_grad_() for n, t in shown.whole_state_dict().items()}
    right = mlp(params, inputs)["loss"]
    loss = shown(**inputs).loss
    loss.backward()
    right.backward()
    close(loss.detach(), right.detach())
    close(shown.w.grad, params["w"].grad)


def uneven(folder: Path) -> None:
    """Blocks of several sizes: as DTensor's, whose state dict has the whole again."""
    world = dist.get_world_size()
    sizes = {"batch": world + 1, "io": 2 * world - 1, "hidden": 2 * world + 1}
    for layout in ("dp", "tp", "fsdp", "inner"):
        path, mesh = written(folder, MLP), mesh_of({"a": world})
        shown: Any = module(path, mesh, layout, dtype="f64", dims=sizes)
        inputs = drawn(shown._runtime.inputs, 7)
        params = {n: t.requires_grad_() for n, t in shown.whole_state_dict().items()}
        right = mlp(params, inputs)["loss"]
        loss = shown(**{n: shown.local(n, t) for n, t in inputs.items()}).loss
        loss.backward()
        right.backward()
        close(loss.detach(), right.detach())
        for name, param in params.items():
            close(getattr(shown, name).grad, param.grad)
            close(shown.state_dict()[name], param.detach())
        shown.load_state_dict({n: 2 * t.detach() for n, t in params.items()})
        close(shown.w.detach(), 2 * params["w"].detach())


def refusals(folder: Path) -> None:
    """Inputs that do not fit are refused on every process alike."""
    path, world = written(folder, MLP), dist.get_world_size()
    mesh = mesh_of({"a": world})
    shown = module(path, mesh, "dp")
    inputs = {n: t.float() for n, t in drawn(shown._runtime.inputs, 1).items()}
    own = {n: shown.local(n, t) for n, t in inputs.items()}
    other = mesh_of({"c": world})
    elsewhere = distribute_tensor(inputs["x"], other, [Replicate()])
    refused("MD0560", lambda: module(path, other, "dp"))
    refused("MD0560", lambda: module(path, DeviceMesh("cpu", list(range(world))), "dp"))
    backwards = DeviceMesh("cpu", list(range(world))[::-1], mesh_dim_names=("a",))
    refused("MD0560", lambda: module(path, backwards, "dp"))
    refused("MD0561", lambda: shown(**inputs))
    refused("MD0561", lambda: shown(**{**own, "x": elsewhere}))
    if world == 4:
        refused("MD0562", lambda: module(path, mesh_of(SQUARE), "swapped", dims={"hidden": 15}))


def documented(folder: Path) -> None:
    """The page about modules runs as written."""
    page = (ROOT / "docs" / "module.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 6
    if not dist.get_rank():
        (folder / "examples").symlink_to(ROOT / "examples")
    dist.barrier()
    names: dict[str, Any] = {}
    with contextlib.chdir(folder):  # where it saves
        for text in blocks:
            exec(compile(text, "docs/module.md", "exec"), names)
    assert names["loss"].isfinite()
    right = names["model"].whole_state_dict()
    assert all(torch.equal(t, right[n]) for n, t in names["other"].whole_state_dict().items())


def refused(code: str, call: Callable[[], Any]) -> None:
    with pytest.raises(ProgramError) as caught:
        call()
    (told,) = caught.value.diagnostics
    assert told.code == code, told
    assert told.help


SCENES: dict[int, tuple[Callable[[Path], None], ...]] = {
    2: (
        training,
        optimizers,
        averages,
        running_means,
        local_gradients,
        data_parallel,
        accumulation,
        distributed_tensors,
        states,
        given_values,
        refusals,
    ),
    4: (gradients, training, checkpoints, local_gradients, uneven, part_of_a_mesh, documented),
}
"""The scenes for each number of processes."""

# --- the processes ------------------------------------------------------------------------------


@pytest.mark.parametrize("world", SCENES)
def test_processes(world: int, forks: Forks, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with forks.ranks(world, [__file__, str(tmp_path)], ROOT, log, OMP_NUM_THREADS="1") as leader:
        assert leader.wait() == 0, log.read_text(encoding="utf-8")


def main(folder: Path, rank: int, world: int) -> None:
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
    for scene in SCENES[world]:
        scene(folder)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
