"""Parameters in another form: as a model of others, after a program has assigned some of them.

A program without inputs says what they become by `:=`: adapters that are merged into the matrices
that they change, an average that takes the place of the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from meshdsl.backends.engines.execution import errors_at, refuse_too_large
from meshdsl.backends.engines.in_process import run_local, torch_dtype
from meshdsl.backends.runtime.lazy_numpy import np
from meshdsl.backends.runtime.values import Array, Spec
from meshdsl.diagnostics import Diagnostics, all_closest, fail
from meshdsl.named.program_choice import is_trained
from meshdsl.option_edits import leave_out, one_of, refuse
from meshdsl.pipeline import Compilation, Known
from meshdsl.records import dataclass

if TYPE_CHECKING:
    import torch

FORM = "write one as in examples/models/llama_lora.mdsl: `program merged() { … wq := wq + … }`"


def on_one_device(made: Compilation, program: str | None = None) -> Compilation:
    """The outputs of the program, or of another one of the same file, without a layout."""
    one = replace(made.options, mesh="one:1", layout="", sbp=None, schedule=None, evaluate=True)
    parsed = Known(tree=made.tree, declarations=made.declarations)
    options = replace(one, program=program or made.options.program)
    return Compilation(made.source, options, Diagnostics(), parsed)


def assigning(made: Compilation, name: str) -> Compilation:
    """The program of a name that assigns parameters of `made`, on one device. Raises MD0628."""
    programs = made.declarations.programs
    if name not in programs:
        others = [n for n, p in programs.items() if not is_trained(p)]
        fixes = one_of("--apply", all_closest(name, others)) or (leave_out("--apply", safe=False),)
        refuse("MD0628", f"no program `{name}` is declared", fixes, FORM)
    compilation = on_one_device(made, name)
    program = compilation.named
    if is_trained(programs[name]):
        fail(
            "MD0628",
            f"`{name}` trains, and `--apply` only assigns parameters",
            program.span,
            help=FORM,
        )
    if program.inputs:
        message = f"`{name}` has inputs, and `--apply` has no values for them"
        fail("MD0628", message, program.span, help=FORM)
    types = {str(p.value.name): p.value.type for p in made.named.params}
    if not program.updates:
        fail("MD0628", f"`{name}` assigns no parameter with `:=`", program.span, help=FORM)
    for param, type_ in ((str(p.value.name), p.value.type) for p in program.params):
        if types.get(param) != type_:
            here = f"is {types[param]}" if param in types else "is no parameter"
            message = f"`{name}` has `{param}`, {type_}, which {here} in `{made.named.name}`"
            help = f"declare it as `{made.named.name}` does, or leave it out"
            fail("MD0628", message, program.span, help=help)
    return compilation


def assigned(program: Compilation, params: Mapping[str, Any]) -> dict[str, Array]:
    """The new values of the parameters that a program without inputs assigns."""
    refuse_too_large(program, "local", None)
    names = [str(p.value.name) for p in program.named.params]
    read = {name: params[name] for name in names if name in params}
    with errors_at(program.source):
        emitted = program.emitted
        done = run_local(emitted.text, {}, read, seed=0, lines=emitted.places)
    return dict(done.updated)


@dataclass(frozen=True, slots=True)
class ExportedTensors(Mapping[str, "torch.Tensor"]):
    """Arrays by name as torch tensors of the dtypes of `specs`, each made when it is asked for."""

    specs: Mapping[str, Spec]
    arrays: Mapping[str, Any]

    def check_complete(self, path: str) -> None:
        """Refuse values of `path` that are not those of all parameters. Raises MD0628."""
        missing = [name for name in self.specs if name not in self.arrays]
        if missing:
            listed = ", ".join(f"`{name}`" for name in missing)
            help = "name a checkpoint, which has them, or write a model with `--as NAME`"
            fail("MD0628", f"{path} has no values for {listed}", help=help)

    def __getitem__(self, name: str) -> torch.Tensor:
        import torch

        array: Array = np.ascontiguousarray(self.arrays[name][()])
        array = array if array.flags.writeable else array.copy()
        return torch.from_numpy(array).to(torch_dtype(self.specs[name].dtype))

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)
