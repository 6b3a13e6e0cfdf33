"""Training steps on one GPU: ours beside the same model by hand, as they are and compiled.

`python -m benchmarks.gpu [--only NAME…] [--minutes N]` needs one CUDA device and less than eight
minutes; `--device cpu --small` tries the whole of it without one. Of a language model, of Llama at
the sizes of 1 B, of a residual network and of a mixture of experts, in f32, with bf16 products and
with products in 8 bits (beside bf16 by hand), it prints

- milliseconds of a step, the median of rounds in turns: the emitted text, the model by hand (with
  torch's fused attention and AdamW), and both under `torch.compile`, with ratios (above 1: ours
  takes less);
- the peak of the memory beside what `explain` says, and the time beside what `simulate` says;
- whether the step waits for the GPU anywhere (torch's sync debug mode), and whether a CUDA graph
  can capture it.

Before, the losses of the first steps are compared, and masks of dropout, convolutions and attention
with those of the CPU.
"""

from __future__ import annotations

import gc
import math
import re
import statistics
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.hand_models import HAND_MODELS, HandModel, Tensors
from benchmarks.training_by_hand import parallel_models
from benchmarks.training_cases import ADAMW, BETAS, CLIP, EXAMPLES, Case
from benchmarks.training_memory import allocated
from meshdsl.backends.engines.in_process import LoadedProgram, load, local_tensors, torch_dtype
from meshdsl.backends.runtime.attention_kernels import attention_grad, attention_lse
from meshdsl.backends.runtime.main import is_counter
from meshdsl.backends.runtime.values import Spec
from meshdsl.device.memory import memory
from meshdsl.diagnostics import Diagnostics, Source
from meshdsl.named.optimizers import LearningRate
from meshdsl.pipeline import Compilation, Options, compile_source
from meshdsl.simulate.engine import simulate

RATE = LearningRate("cosine", 3e-4, 1000, 50, 3e-5)
SCHEDULE = "adamw(lr=cosine(3e-4, 1000, warmup=50, final=3e-5), clip=1.0{compute})"
TYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f8": torch.bfloat16}
"""How products are computed, and the dtype of the model by hand: it has none in 8 bits."""
CHECKED = 3
"""Steps of which the losses are compared."""
TOLERANCE = {"f32": 1e-4, "bf16": 2e-2, "f8": 5e-2}
"""How far two losses may lie apart, relatively."""
ROUNDS, TURN = 7, 0.3
"""Turns of each variant, and about how many seconds each takes."""


@dataclass(frozen=True, slots=True)
class Model:
    """A program of `path`, its dim of samples, and sizes: on a GPU, and where it is only tried."""

    name: str
    path: Path
    program: str
    samples: str
    sizes: Mapping[str, int]
    small: Mapping[str, int]

    @property
    def by_hand(self) -> HandModel:
        """The same in torch."""
        return HAND_MODELS.get(self.name) or parallel_models(Case(self.name, "one", ""))[self.name]

    def compiled(self, dtype: str, small: bool, cluster: str) -> Compilation:
        """The training step on one device, with products in `dtype`, one of `TYPES`."""
        text = self.path.read_text(encoding="utf-8")
        compute = "" if dtype == "f32" else f', compute="{dtype}"'
        with_update = SCHEDULE.format(compute=compute)
        text = re.sub("(minimize loss with) .*", lambda m: f"{m[1]} {with_update}", text)
        options = Options(
            program=self.program,
            mesh="device:1",
            layout=f"{self.samples}:device",
            set_dims=self.small if small else self.sizes,
            cluster=cluster,
        )
        return compile_source(Source(self.path.name, text), options, Diagnostics())


def _sizes(text: str) -> dict[str, int]:
    """`model=64 heads=2`, as on the command line."""
    return {name: int(size) for name, size in (entry.split("=") for entry in text.split())}


MODELS = (
    Model(
        "lm",
        EXAMPLES / "lm.mdsl",
        "lm",
        "batch",
        _sizes("batch=16 seq=512 model=1024 heads=32 hidden=4096 layers=12"),
        _sizes("batch=2 seq=16 model=64 heads=2 hidden=128 layers=2"),
    ),
    Model(
        "llama",
        Path(__file__).parent / "models" / "llama.mdsl",
        "kept",
        "batch",
        _sizes("batch=2 seq=2048 model=2048 kv=8 group=2 hidden=8192 layers=16"),
        _sizes("batch=2 seq=16 model=256 kv=1 group=2 hidden=256 layers=2 vocab=64"),
    ),
    Model(
        "resnet",
        EXAMPLES / "resnet.mdsl",
        "resnet",
        "batch",
        _sizes("batch=256 h=56 w=56 h2=28 w2=28 c=64 c2=128"),
        _sizes("batch=4"),
    ),
    Model(
        "moe",
        EXAMPLES / "moe.mdsl",
        "moe",
        "group",
        _sizes("group=16 token=256 model=1024 hidden=4096 experts=8 slot=64 inner=4096 layers=4"),
        _sizes("group=2 token=16"),
    ),
)


# --- the steps -----------------------------------------------------------------------------------


def made_up(specs: Mapping[str, Spec], begun: Tensors, where: torch.device) -> Tensors:
    """Tensors of `specs` there, by torch's own generator; one that has a key begins as `begun`."""
    made = {}
    for name, spec in specs.items():
        kind, *numbers = spec.draw or ("zeros",)
        x = torch.zeros(tuple(spec.dims.values()), dtype=torch_dtype(spec.dtype), device=where)
        if spec.key:
            x.copy_(begun[spec.key])
        elif kind == "below":
            x.random_(0, int(numbers[0]))
        elif kind in ("normal", "uniform"):
            x.uniform_(*numbers) if kind == "uniform" else x.normal_(0, *numbers)
        elif kind == "ones":
            x.fill_(1)
        made[name] = x.cpu() if is_counter(spec) and where.type != "meta" else x
    return made


class Ours:
    """The emitted step; call it."""

    def __init__(self, program: LoadedProgram, where: torch.device) -> None:
        self.program = program
        begun: Tensors = {}
        self.tables: list[Tensors] = []
        for specs in (program.INPUTS, program.PARAMS, program.STATES):
            self.tables.append(begun := made_up(specs, begun, where))
        self.groups = program.make_groups(program.MESH, program.GROUPS, 0)
        self.device = program.device

    def __call__(self) -> torch.Tensor:
        """One step; the loss."""
        with torch.inference_mode():
            loss: torch.Tensor = self.device(0, self.groups, *self.tables)[self.program.LOSS]
        return loss


class ByHand:
    """The step by hand: parameters in f32 and, for products in bf16, a copy of them in it."""

    def __init__(self, model: HandModel, given: Tensors, inputs: Tensors, dtype: str) -> None:
        self.loss: Callable[..., torch.Tensor] = model.loss
        self.masters = [p.detach().float() for p in model.params(given)]
        self.used = [p.to(TYPES[dtype]).requires_grad_() for p in self.masters]
        self.inputs = {
            n: x.to(TYPES[dtype]) if x.is_floating_point() else x for n, x in inputs.items()
        }
        self.optimizer = torch.optim.AdamW(self.masters, fused=True, betas=BETAS, **ADAMW)
        self.steps = 0

    def __call__(self) -> torch.Tensor:
        """One step; the loss."""
        loss = self.loss(self.used, self.inputs)
        grads = [g.float() for g in torch.autograd.grad(loss, self.used)]
        norm = torch.stack(torch._foreach_norm(grads)).square().sum().sqrt()
        torch._foreach_mul_(grads, torch.clamp(CLIP / (norm + 1e-6), max=1.0))
        for p, grad in zip(self.masters, grads, strict=True):
            p.grad = grad
        self.optimizer.param_groups[0]["lr"] = RATE.at(self.steps)
        self.steps += 1
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.used[0] is not self.masters[0]:
            with torch.no_grad():
                torch._foreach_copy_(self.used, self.masters)
        return loss.detach()


# --- what is measured ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gpu:
    """Where the steps run; a CPU has nothing to wait for and no graphs."""

    where: torch.device

    @property
    def is_cuda(self) -> bool:
        """Whether it is one."""
        return self.where.type == "cuda"

    def wait(self) -> None:
        """Until all that was started is done."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def seconds(self, step: Callable[[], Any], count: int) -> float:
        """Of one step, on average over `count`."""
        self.wait()
        started = time.perf_counter()
        for _ in range(count):
            step()
        self.wait()
        return (time.perf_counter() - started) / count

    def peak(self, step: Ours) -> int:
        """The most bytes of tensors at once, those that stay included."""
        step()
        self.wait()
        if not self.is_cuda:
            kept = (x.untyped_storage().nbytes() for t in step.tables for x in t.values())
            return sum(kept) + allocated(step)
        torch.cuda.reset_peak_memory_stats()
        step()
        self.wait()
        return torch.cuda.max_memory_allocated()

    def waits(self, step: Callable[[], Any]) -> str:
        """Where the step waits for the GPU: nowhere, or torch's words."""
        if not self.is_cuda:
            return "not tried"
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        except RuntimeError as error:
            return f"waits: {str(error).splitlines()[0]}"
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return "nowhere"

    def graph(self, step: Callable[[], Any]) -> str:
        """Milliseconds as a CUDA graph, with a fixed learning rate, or why there is none."""
        if not self.is_cuda:
            return "not tried"
        try:
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                step()
        except RuntimeError as error:
            return f"none: {str(error).splitlines()[0]}"
        return f"{1e3 * self.seconds(captured.replay, 20):.3f} ms"


def turns(gpu: Gpu, steps: Mapping[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Seconds of a step of each variant in every round."""
    counts = {n: max(2, min(200, int(TURN / gpu.seconds(s, 2)))) for n, s in steps.items()}
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            found[name].append(gpu.seconds(step, counts[name]))
    return found


def check(ours: Callable[[], Any], theirs: Callable[[], Any], dtype: str) -> None:
    """Refuse steps that do not compute the same."""
    pairs = [(float(ours()), float(theirs())) for _ in range(CHECKED)]
    for a, b in pairs:
        assert math.isclose(a, b, rel_tol=TOLERANCE[dtype]), f"the losses differ: {pairs}"


def cell(found: Mapping[str, list[float]], ours: str, theirs: str) -> str:
    """Milliseconds of both, and how many times ours theirs takes."""
    pairs = zip(found[ours], found[theirs], strict=True)
    ratio = statistics.median(b / a for a, b in pairs)
    a, b = (1e3 * statistics.median(found[name]) for name in (ours, theirs))
    return f"{a:.3f} | {b:.3f} | {ratio:.2f}"


def pair(
    model: Model, dtype: str, gpu: Gpu, options: Namespace
) -> tuple[Compilation, Ours, ByHand]:
    """The program, its step and that by hand from the same values; refused if losses differ."""
    made = model.compiled(dtype, options.small, options.cluster)
    ours = Ours(load(made.text), gpu.where)
    params, inputs = ({n: x.clone() for n, x in ours.tables[i].items()} for i in (1, 0))
    theirs = ByHand(model.by_hand, params, inputs, dtype)
    check(ours, theirs, dtype)
    return made, ours, theirs


def row(model: Model, dtype: str, gpu: Gpu, options: Namespace) -> str:
    """The line of the first table."""
    made, ours, theirs = pair(model, dtype, gpu, options)
    found = turns(gpu, {"ours": ours, "hand": theirs})
    del theirs
    gc.collect()
    assert made.timing is not None, "a cluster is named"
    said, took = memory(made.device)["peak"], simulate(made.device, made.timing).seconds
    peak = gpu.peak(ours)
    step = statistics.median(found["ours"])
    return " | ".join(
        (
            f"| {model.name} {dtype}",
            cell(found, "ours", "hand"),
            f"{peak / 2**20:.1f} | {said / 2**20:.1f} | {peak / said:.3f}",
            f"{1e3 * took:.3f} | {step / took:.2f}",
            gpu.waits(ours),
            f"{gpu.graph(ours)} |",
        )
    )


def compiled_row(model: Model, dtype: str, gpu: Gpu, options: Namespace) -> str:
    """The line of the second table: both under `torch.compile`."""
    torch.compiler.reset()  # programs share code objects, so what was compiled is of another
    torch._dynamo.disallow_in_graph(torch._fused_adamw_)  # torch 2.13 cannot functionalise it
    _, ours, theirs = pair(model, dtype, gpu, options)
    ours.device = torch.compile(ours.device)
    theirs.loss = torch.compile(theirs.loss)
    found = turns(gpu, {"ours": ours, "hand": theirs})
    return f"| {model.name} {dtype} | {cell(found, 'ours', 'hand')} |"


HEAD = (
    *("step", "ours, ms", "by hand", "ratio", "peak, MiB", "said", "ratio"),
    *("simulated, ms", "ratio", "waits", "as a CUDA graph"),
)
COMPILED_HEAD = ("step", "ours compiled, ms", "by hand compiled", "ratio")


# --- the same as on a CPU ------------------------------------------------------------------------

ALIKE = {
    "dropout": """
        dim n = 64, m = 48
        program p(x[n, m], key[]: i32) {
          y = dropout(x, key, rate=0.3)
          return y
        }""",
    "convolution": """
        dim n = 2, c = 3, o = 4, h = 9, w = 8, kh = 3, kw = 3
        program p(x[n, c, h, w]) {
          param k[o, c, kh, kw]
          y = conv[h by kh, w by kw](x, k, pad="same")
          return y
        }""",
}


def differences(gpu: Gpu) -> Iterator[str]:
    """How far each program of `ALIKE`, and attention, on the GPU is from the CPU."""
    for name, text in ALIKE.items():
        options = Options(mesh="device:1", layout="n:device")
        program = load(compile_source(Source(f"{name}.mdsl", text), options, Diagnostics()).text)
        specs = {**program.INPUTS, **program.PARAMS}
        found = []
        for where in (torch.device("cpu"), gpu.where):
            torch.set_default_device(where)
            (drawn,) = local_tensors(program.MESH, specs, {}, 0, range(1))
            there = {n: x.to(where) for n, x in drawn.items()}
            with torch.inference_mode():
                found.append(program.device(0, {}, there, there)["y"].cpu())
        if name == "dropout":
            assert torch.equal(found[0] == 0, found[1] == 0), "the masks of dropout differ"
        yield f"{name}: {furthest(*found)}"
    for dtype in ("f32", "bf16"):
        generator = torch.Generator("cpu").manual_seed(0)
        given = [torch.randn(2, 4, 72, 32, generator=generator, device="cpu") for _ in range(4)]
        held = [x.to(TYPES[dtype]) for x in given]  # both begin from the same, rounded numbers
        wide = attention_and_grads([x.double() for x in held])
        near = attention_and_grads([x.to(gpu.where) for x in held])
        far = max(zip(wide, near, strict=True), key=lambda pair: distance(*pair))
        yield f"attention {dtype}: {furthest(*far)}"


def attention_and_grads(operands: list[torch.Tensor]) -> list[torch.Tensor]:
    """Causal attention of q, k and v, its sums, and gradients from the fourth."""
    q, k, v, do = operands
    with torch.inference_mode():
        o, lse = attention_lse(q, k, v, causal=True)
        return [o, lse, *attention_grad(do, q, k, v, o, lse, causal=True)]


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference, over the largest value of `a`."""
    a, b = a.cpu().double(), b.cpu().double()
    return float((a - b).abs().max() / a.abs().max())


def furthest(a: torch.Tensor, b: torch.Tensor) -> str:
    """The same in words."""
    return f"at most {distance(a, b):.1e} of the largest value from the CPU"


def main() -> None:
    """Print the tables."""
    parser = ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--only", nargs="*", default=[], help="names of models, f32, bf16, f8")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try it")
    parser.add_argument("--small", action="store_true", help="sizes that only try it")
    parser.add_argument(
        "--no-compile", dest="compile", action="store_false", help="do not try torch.compile"
    )
    parser.add_argument("--cluster", default="h100", help="the machine that is simulated")
    parser.add_argument("--minutes", type=float, default=7.0, help="no row is begun after these")
    options = parser.parse_args()
    ends = time.monotonic() + 60 * options.minutes
    gpu = Gpu(torch.device(options.device))
    torch.set_default_device(gpu.where)
    torch.backends.cudnn.allow_tf32 = False  # f32 has 24 bits, as the emitted programs have it
    card = torch.cuda.get_device_name() if gpu.is_cuda else "CPU"
    print(f"{card}, torch {torch.__version__}\n")
    print(*differences(gpu), "", sep="\n")
    torch.set_default_device(gpu.where)
    names, only = {m.name for m in MODELS}, set(options.only)
    wanted = [
        (model, dtype)
        for model in MODELS
        for dtype in TYPES
        if model.name in (only & names or names) and dtype in (only & set(TYPES) or TYPES)
    ]
    tables = ((HEAD, row), (COMPILED_HEAD, compiled_row))
    for head, line in tables if options.compile else tables[:1]:
        print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}", flush=True)
        for model, dtype in wanted:
            if time.monotonic() < ends:
                print(line(model, dtype, gpu, options), flush=True)
                gc.collect()


if __name__ == "__main__":
    main()
