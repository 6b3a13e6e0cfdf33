"""Compiling a program for a `torch.nn.Module`: its forward pass alone, or with gradients."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from meshdsl.backends.draws import draws
from meshdsl.backends.module.module_text import emit_module
from meshdsl.backends.module.split import halves, hurried, unreduced
from meshdsl.backends.torch.emitter import ProgramText, emit
from meshdsl.device.from_placed import lower
from meshdsl.device.verify import verify as verify_device
from meshdsl.diagnostics import Diagnostics, fail
from meshdsl.named import ir as named
from meshdsl.named.builder import Builder
from meshdsl.named.emit import emit_at
from meshdsl.named.program_choice import finish_named
from meshdsl.named.random_streams import without_dropout
from meshdsl.named.training_step import with_loss
from meshdsl.named.vjp import with_vjp
from meshdsl.pipeline import Compilation, lower_placed
from meshdsl.placed import ir as placed
from meshdsl.placed.layout import Layout, Rule, resolve_layout
from meshdsl.placed.offload import refuse_module
from meshdsl.placed.place import PlanSearch, check_policy, place
from meshdsl.placed.placements import Mesh
from meshdsl.placed.sub_axes import named_parts
from meshdsl.placed.verify import verify as verify_placed
from meshdsl.records import dataclass


@dataclass(frozen=True, slots=True)
class Compiler:
    """Compiles the program of a module, once for every requested set of gradients.

    `states` are the parameters that the program assigns, by the outputs that are their new values.
    """

    program: named.NamedProgram
    states: Mapping[str, str]
    layout: Layout
    policy: str
    search: PlanSearch

    def forward_only(self) -> ProgramText:
        """The text of the forward pass: its function `device` saves nothing."""
        program = lower_placed(self._placed(self.program))
        return emit(program, draws(self.program))

    def with_gradients(
        self, params: Collection[str], inputs: Collection[str], reduced: bool = True
    ) -> ProgramText:
        """The text of both passes, with the gradients of the named parameters and inputs.

        If not `reduced`, the backward pass leaves the gradients of parameters as partial sums, and
        a function of its own reduces them. Empty where no output depends on any of them.
        """
        extended = with_vjp(self.program, params, inputs)
        if not extended.cotangents:
            return ProgramText("", {})
        program = lower(self._placed(extended.program))
        verify_device(program)
        cut = halves(program, extended.cotangents, extended.params, extended.inputs)
        cut = hurried(program, cut if reduced else unreduced(cut))
        stored = {p.value.name: p for p in program.params}
        for name, grad in cut.reduced or cut.params:
            assert grad.placement == stored[name].placement, f"{name} is stored otherwise"
        outputs = dict(cut.outputs)
        for name, cotangent in cut.cotangents:
            assert cotangent.placement == outputs[name].placement, f"{name} is returned otherwise"
        with_backward = replace(program, body=(*cut.forward, *cut.backward, *cut.reduction))
        return emit_module(with_backward, cut, draws(self.program))

    def evaluating(self) -> Compiler:
        """The same without dropout; itself where there is none."""
        program = without_dropout(self.program)
        return self if program is self.program else replace(self, program=program)

    def _placed(self, program: named.NamedProgram) -> placed.PlacedProgram:
        made = place(program, self.layout, self.policy, self.search)
        verify_placed(made)
        return made


def compiler(made: Compilation, axes: Mapping[str, int]) -> Compiler:
    """A program, and the layout of its compilation resolved for a mesh of these axes.

    Without axes there is one device, and no rule applies. Raises DiagnosticError: an `sbp` block
    (MD0564), a layout with axes that the mesh lacks (MD0560), and whatever makes a layout
    impossible.
    """
    options = made.options
    if options.sbp is not None:
        message = f"a module cannot be placed by the `sbp` block `{options.sbp}`"
        help = "an `sbp` block does not say how gradients are held; choose a layout"
        fail("MD0564", message, help=help)
    check_policy(options.reduce)
    sizes = tuple(axes.items())
    mesh = Mesh("of the module", sizes, parts=named_parts(sizes))
    layout = resolve_layout(made.declarations, options.layout, mesh, options.schedule)
    for rule in layout.rules if axes else ():
        _refuse_missing_axis(rule, layout.mesh)
    if axes and layout.mesh.axes != mesh.axes:
        _refuse_parts(layout.mesh)
    refuse_module(layout)
    # Gradients go to an optimizer of torch, which needs them placed as the parameters.
    rules = tuple(rule for rule in layout.rules if rule.selector != ("grads",))
    # Torch differentiates what it is given as it stands: a batch goes through as one.
    layout = replace(layout, rules=rules, schedule=None)
    written = made.written
    with_outputs = with_loss(written) if written.goal is not None else written
    program = finish_named(replace(with_outputs, goal=None), options.dtype, evaluate=False)
    return Compiler(*_returning_states(program), layout, options.reduce, options.search())


def _returning_states(program: named.NamedProgram) -> tuple[named.NamedProgram, dict[str, str]]:
    """The program with new states as its last outputs, placed as the states are stored.

    Beside it, the names of the states by those of their outputs.
    """
    builder = Builder(Diagnostics())
    builder.adopt(program)
    outputs, names = list(program.outputs), {}
    for number, update in enumerate(program.updates):
        old = update.old
        fields = {**old.as_gradient, "role": "grad", "name": None}
        new = emit_at(builder, old, fields)("stop_gradient", update.new)
        name = f"new state {number}"  # no name of a tensor
        outputs.append(named.Output(name, new, old.span))
        names[name] = str(old.name)
    body = tuple(builder.frames[0].body)
    return replace(program, body=body, outputs=tuple(outputs), updates=()), names


def _refuse_parts(mesh: Mesh) -> None:
    """Raise MD0560: parameters are DTensors on the DeviceMesh, whose dims are split whole."""
    cut = " and ".join(f"`{axis}`" for axis, _ in mesh.parts)
    sizes, names = tuple(size for _, size in mesh.axes), mesh.names
    message = f"the layout uses {cut} in parts, and a DTensor is split over all of a dim"
    help = f"give the DeviceMesh the parts as dims: `init_device_mesh(…, {sizes}, "
    fail("MD0560", message, help=f"{help}mesh_dim_names={names})`")


def _refuse_missing_axis(rule: Rule, mesh: Mesh) -> None:
    for axis in rule.axes:
        if axis not in mesh.names:
            has = ", ".join(f"`{name}`" for name in mesh.names) or "no axes"
            message = f"the layout splits `{rule.dim}` over `{axis}`, and the DeviceMesh has {has}"
            help = "name its dims as the layout does: `init_device_mesh(…, mesh_dim_names=(…))`"
            fail("MD0560", message, rule.span, help=help)
