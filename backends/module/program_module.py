"""A compiled program as a `torch.nn.Module` on a DeviceMesh, for the user's own training loop.

Every process of the mesh makes the module and calls it alike. Its parameters are the local blocks
of the program's; its backward pass is compiled like the forward one, collectives included.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from meshdsl.api.errors import told
from meshdsl.backends.engines.in_process import torch_dtype
from meshdsl.backends.module.blocks import (
    block,
    drawn,
    local_input,
    local_of,
    refuse_names,
    stored_param,
    sum_gradient,
)
from meshdsl.backends.module.compiler import Compiler, compiler
from meshdsl.backends.module.mesh import MeshRanks, check_same
from meshdsl.backends.module.step import CompiledStep
from meshdsl.backends.module.whole_updates import WITH_DTENSORS
from meshdsl.backends.runtime.values import Spec, shape_of, step_seed
from meshdsl.diagnostics import fail
from meshdsl.report.document import mesh_text

if TYPE_CHECKING:
    from meshdsl.pipeline import Compilation


Wanted = tuple[frozenset[str], frozenset[str], bool]
"""The parameters and the inputs whose gradients are computed; whether in the backward pass the
gradients of parameters are reduced."""


class ProgramModule(torch.nn.Module):
    """A program on the devices of a mesh. Made by `module` and `module_of`.

    Parameters have the program's names, dots included, and are this device's blocks; those that the
    program assigns (`:=`) are buffers. Calling it takes this device's blocks of the inputs (or
    DTensors) by name, and returns this device's blocks of the outputs as a named tuple.
    """

    def __init__(
        self,
        compiled: Compiler,
        ranks: MeshRanks,
        seed: int = 0,
        params: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._runtime = _Runtime(compiled, ranks)
        self._still: _Runtime | None = None
        self._seed, self._calls = seed, 0
        self._sync = self._always_sync = True
        specs = self._runtime.params
        refuse_names(params or {}, specs, "parameter", "MD0563")
        for name, spec in specs.items():
            value = (params or {}).get(name)
            with torch.no_grad():
                local = (
                    drawn(ranks, name, spec, seed)
                    if value is None
                    else block(ranks, name, spec, value).clone()
                )
                tensor = ranks.as_dtensor(name, spec, local)
            if name in self._runtime.states.values():
                self._put(name, tensor)
                continue
            learns = spec.dtype not in ("i32", "i64", "bool")
            self._put(name, torch.nn.Parameter(tensor, requires_grad=learns))
        self.register_load_state_dict_pre_hook(_as_dtensors)  # type: ignore[no-untyped-call]
        WITH_DTENSORS.add(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the state of another module."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        WITH_DTENSORS.add(self)

    def _put(self, name: str, tensor: torch.Tensor) -> None:
        """Register a parameter or buffer by its dotted name, even if modules have the attribute."""
        *path, last = name.split(".")
        owner: torch.nn.Module = self
        for part in path:
            owner = owner._modules.setdefault(part, torch.nn.Module())  # type: ignore[assignment]
        if isinstance(tensor, torch.nn.Parameter):
            owner._parameters[last] = tensor
        else:
            owner._buffers[last] = tensor

    # --- running -------------------------------------------------------------------------------

    @told
    def forward(self, /, *args: Any, **inputs: Any) -> Any:
        """The outputs of this device, of inputs in order or by name.

        While the module is in training mode, what the program assigns by `:=` is updated. After
        `eval()` nothing is dropped. Random numbers depend on the input `seed`; one that is not
        given is made of the module's seed and the number of this call, so every process has to make
        the same calls.

        A plain tensor is this device's block of the input; a DTensor is resharded to it. Where an
        input is a DTensor, all outputs are.

        Raises:
            ProgramError: an input is missing, unknown, of another shape or dtype (MD0561); an index
                is out of range (MD0801).
        """
        runtime = self._runtime if self.training else self._evaluating()
        local_inputs = runtime.given(args, inputs, (self._seed, self._calls))
        self._calls += 1
        params = runtime.stored(dict(self._own_parameters()))
        wanted = _requiring(params), _requiring(local_inputs)
        step = None
        if torch.is_grad_enabled() and any(wanted):
            step = runtime.step(*wanted, self._always_sync)
        if step is None:
            step = runtime.forward_only
            local = {name: local_of(param) for name, param in params.items()}
            results = step.evaluate(local_inputs, local)
        elif self._sync:
            results = step.differentiable(local_inputs, params)
        else:
            results = step.unsynchronized(local_inputs, params)
        count = len(runtime.outputs)
        for state, new in zip(runtime.states.values(), results[count:], strict=True):
            if self.training:
                # Anew: the backward pass may read the old one.
                spec = runtime.params[state]
                self._put(state, runtime.ranks.as_dtensor(state, spec, new.detach()))
        outputs = dict(zip(runtime.outputs, results, strict=False))
        if any(isinstance(argument, DTensor) for argument in (*args, *inputs.values())):
            as_dtensor, specs = runtime.ranks.as_dtensor, step.program.OUTPUTS
            outputs = {name: as_dtensor(name, specs[name], t) for name, t in outputs.items()}
        return runtime.outputs_type(*outputs.values())

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context for all batches of a step but the last: their gradients are not reduced.

        Each process keeps the sum of its own as the gradients of parameters: DTensors with partial
        sums. The backward pass of the first call behind the context reduces all of them.
        """
        before, self._sync, self._always_sync = self._sync, False, False
        try:
            yield
        finally:
            self._sync = before

    def _evaluating(self) -> _Runtime:
        """The runtime of the program without dropout."""
        if self._still is None:
            runtime, compiled = self._runtime, self._runtime.compiled.evaluating()
            self._still = (
                runtime if compiled is runtime.compiled else _Runtime(compiled, runtime.ranks)
            )
        return self._still

    def _own_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, self._param(name)) for name in self._runtime.params)

    def _param(self, name: str) -> torch.Tensor:
        *path, last = name.split(".")
        owner: torch.nn.Module | None = self
        for part in path:
            assert owner is not None
            owner = owner._modules[part]
        assert owner is not None
        tensor = owner._parameters.get(last, owner._buffers.get(last))
        assert tensor is not None, f"the parameter {name} was removed"
        return tensor

    # --- placements ----------------------------------------------------------------------------

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """The DeviceMesh that the module was made on."""
        return self._runtime.ranks.device_mesh

    @property
    def code(self) -> str:
        """The text of both passes, with gradients of all parameters and of no input."""
        return self._runtime.text

    @told
    def placements(self, name: str) -> tuple[Placement, ...]:
        """The placement of an input, an output or a parameter on the mesh, in DTensor's terms."""
        return self._runtime.ranks.placements(name, self._runtime.spec(name))

    @told
    def local(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The block of this device of a whole input."""
        runtime = self._runtime
        refuse_names({name: tensor}, runtime.inputs, "input", "MD0561")
        return block(runtime.ranks, name, runtime.inputs[name], tensor, "MD0561")

    @told
    def whole_state_dict(self) -> dict[str, torch.Tensor]:
        """All parameters, whole, on every device. All processes have to call it."""
        ranks, specs = self._runtime.ranks, self._runtime.params
        stored = self._runtime.stored(dict(self._own_parameters()))
        return {n: ranks.whole(spec, local_of(stored[n].detach())) for n, spec in specs.items()}

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients down to a norm over all devices; returns the norm before.

        As `torch.nn.utils.clip_grad_norm_`, with one all_reduce in place of one for each parameter.
        """
        ranks, specs = self._runtime.ranks, self._runtime.params
        squares: dict[tuple[str, ...], torch.Tensor] = {}
        grads = []
        for name, param in self._own_parameters():
            sum_gradient(param)
            if param.grad is not None:
                grads.append((specs[name], local_of(param.grad)))
        for spec, grad in grads:
            axes = tuple(a for a in ranks.mesh if any(a in s for s in spec.split.values()))
            wide = torch.promote_types(grad.dtype, torch.float32)
            square = torch.linalg.vector_norm(grad, dtype=wide).square()
            squares[axes] = squares[axes] + square if axes in squares else square
        for axes, square in squares.items():
            if axes:
                dist.all_reduce(square, group=ranks.group(axes))
        total = sum(squares.values(), torch.zeros((), device=ranks.where)).sqrt()
        scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for _, grad in grads:
            grad.mul_(scale.to(grad.dtype))
        return total

    def extra_repr(self) -> str:
        """The program and its mesh."""
        mesh = mesh_text(dict(self._runtime.ranks.mesh)) or "one device"
        compiled = self._runtime.compiled
        return f"{compiled.program.name} on {mesh}, layout {compiled.layout.name}"


class _Runtime:
    """State shared by copies of a module: the compiler, the processes, the compiled texts."""

    def __init__(self, compiled: Compiler, ranks: MeshRanks) -> None:
        self.compiled, self.ranks = compiled, ranks
        program = compiled.program
        self.steps: dict[Wanted | None, CompiledStep | None] = {}
        self.states = compiled.states
        learned = frozenset(str(v.name) for v in program.learned) - {*self.states.values()}
        first = self.step(learned, frozenset(), True) or self.forward_only
        self.text = first.text
        self.inputs: dict[str, Spec] = first.program.INPUTS
        self.shapes = {
            name: tuple(shape_of(ranks.part(spec))) for name, spec in self.inputs.items()
        }
        self.params: dict[str, Spec] = first.program.PARAMS
        self.outputs: dict[str, Spec] = {
            n: spec for n, spec in first.program.OUTPUTS.items() if n not in self.states
        }
        self.dtypes = {name: torch_dtype(spec.dtype) for name, spec in self.params.items()}
        self.placements = {n: ranks.placements(n, spec) for n, spec in self.params.items()}
        self.outputs_type = namedtuple("Outputs", list(self.outputs), rename=True)  # type: ignore[misc]

    def __deepcopy__(self, memo: dict[int, Any]) -> _Runtime:
        """Itself: nothing here changes with the values of parameters."""
        return self

    @property
    def forward_only(self) -> CompiledStep:
        """The forward pass alone."""
        step = self._made(None)
        assert step is not None, "a forward pass needs no gradients"
        return step

    def step(
        self, params: frozenset[str], inputs: frozenset[str], reduced: bool
    ) -> CompiledStep | None:
        """Both passes, with the named gradients; None where no output depends on those.

        If not `reduced`, gradients of parameters can be left as partial sums.
        """
        return self._made((params, inputs, reduced))

    def _made(self, wanted: Wanted | None) -> CompiledStep | None:
        if wanted not in self.steps:
            self._compile(wanted)
        return self.steps[wanted]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _compile(self, wanted: Wanted | None) -> None:
        """Compile the text for these gradients; nothing that `torch.compile` should trace."""
        compiled = self.compiled
        text = self.ranks.first_does(
            lambda: (compiled.with_gradients(*wanted) if wanted else compiled.forward_only()).text
        )
        self.steps[wanted] = CompiledStep(text, self.ranks) if text else None

    def spec(self, name: str) -> Spec:
        """The table entry of an input, an output or a parameter."""
        specs = {**self.params, **self.outputs, **self.inputs}
        refuse_names({name: None}, specs, "input, output or parameter", "MD0561")
        return specs[name]

    def given(
        self, args: Sequence[Any], inputs: Mapping[str, Any], call: tuple[int, int]
    ) -> dict[str, torch.Tensor]:
        """This device's block of every input, by name.

        A seed that is not given is that of `call`: the module's, and the number of the call.
        """
        names = list(self.inputs)
        form = f"call `module({', '.join(f'{n}=…' for n in names)})`"
        refuse_names(inputs, self.inputs, "input", "MD0561")
        if len(args) > len(names) or any(name in inputs for name in names[: len(args)]):
            message = f"{len(args)} inputs are given in order, and {len(inputs)} by name"
            fail("MD0561", f"the program has {len(names)} inputs; {message}", help=form)
        seeds = [name for name, spec in self.inputs.items() if spec.draw == ("seed",)]
        arguments = {
            name: torch.tensor(step_seed(*call), device=self.ranks.where) for name in seeds
        }
        arguments |= {**dict(zip(names, args, strict=False)), **inputs}
        missing = [name for name in names if name not in arguments]
        if missing:
            listed = ", ".join(f"`{name}`" for name in missing)
            fail("MD0561", f"the module is called without {listed}", help=form)
        return {
            name: local_input(self.ranks, name, spec, self.shapes[name], arguments[name])
            for name, spec in self.inputs.items()
        }

    def stored(self, params: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The parameters as the program stores them.

        Refuses those that have been cast to another dtype, or replaced by plain tensors.
        """
        for name, param in params.items():
            if param.dtype != self.dtypes[name]:
                message = f"the parameter `{name}` was made {param.dtype}: the program has another"
                help = 'compile the program for that type: `dtype="f64"`, or `"bf16"`'
                fail("MD0561", message, help=help)
        return {
            name: stored_param(self.ranks, name, placements, params[name])
            for name, placements in self.placements.items()
        }


def _requiring(tensors: Mapping[str, torch.Tensor]) -> frozenset[str]:
    """The names of the tensors that require gradients."""
    return frozenset(name for name, tensor in tensors.items() if tensor.requires_grad)


# --- state dicts -------------------------------------------------------------------------------


@told
def _as_dtensors(module: torch.nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
    """Make whole tensors and DTensors in a state dict those of the module's placements."""
    assert isinstance(module, ProgramModule)
    runtime = module._runtime
    with torch.no_grad():
        for name, spec in runtime.params.items():
            if prefix + name in state:
                local = block(runtime.ranks, name, spec, state[prefix + name])
                state[prefix + name] = runtime.ranks.as_dtensor(name, spec, local)


# --- making one --------------------------------------------------------------------------------


@told
def module_of(
    made: Compilation,
    device_mesh: DeviceMesh | None = None,
    *,
    seed: int = 0,
    params: Mapping[str, Any] | None = None,
) -> ProgramModule:
    """A compilation as a module, without what `minimize` adds: the optimizer is the user's own.

    Raises:
        ProgramError: the DeviceMesh is not the mesh of the plan (MD0560), and as `module`.
    """
    ranks = MeshRanks(device_mesh)
    check_same(ranks, dict(made.device.mesh.axes))
    return ProgramModule(compiler(made, ranks.mesh), ranks, seed, params)


__all__ = ["ProgramModule", "module_of"]
