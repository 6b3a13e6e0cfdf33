"""A compiled program: run it, view it, compare it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from meshdsl.api.dims import check_seed
from meshdsl.api.errors import told, warn
from meshdsl.api.layouts import ArgumentPlace, with_layout, with_mesh, with_sbp
from meshdsl.api.source_location import Site, here
from meshdsl.diagnostics import Diagnostic, DiagnosticError, Diagnostics, Source, did_you_mean, fail
from meshdsl.ir import types
from meshdsl.named import ir
from meshdsl.named.ir import walk
from meshdsl.pipeline import OBJECTIVES, Compilation, Options
from meshdsl.report.document import mesh_text
from meshdsl.report.focus import Focus
from meshdsl.report.schema import ReportFacts
from meshdsl.report.views.results import Comparison, Cost, Explanation, Outputs, Simulation

if TYPE_CHECKING:
    from meshdsl.api.plan_generation import Generation, OnText, Prompt
    from meshdsl.api.programs import Program
    from meshdsl.api.training import Training
    from meshdsl.api.weights import Weights
    from meshdsl.backends.engines.persistent import Blocks, PersistentEngine
    from meshdsl.backends.module.program_module import ProgramModule
    from meshdsl.backends.runtime.values import Spec
    from meshdsl.backends.train.evaluation import Evaluation
    from meshdsl.named.declarations import Declarations
    from meshdsl.pipeline import Compilation
    from meshdsl.report.views.parts import Code, Collectives, Memory, Placements, TensorView


# --- views of a plan ----------------------------------------------------------------------------


class Looks:
    """The views of a plan; `_made` is its compilation."""

    program: Program
    _made: Compilation

    @property
    def _report(self) -> ReportFacts:
        return self._made.report

    @property
    def _sources(self) -> dict[str, Source]:
        """The user's texts that lines of a report refer to, that of the program first."""
        first: Source = self._made.source
        sources = {first.name: first}
        for op in walk(self._made.named.body):
            sources.setdefault(op.span.file, op.span.source)
        return sources

    @property
    def placements(self) -> Placements:
        """The placement of every named tensor, by name."""
        from meshdsl.report.views.parts import placements

        return placements(self._report)

    @told
    def tensor(self, name: str) -> TensorView:
        """The shards of a tensor and their devices, as a picture and as text; see `TensorView`.

        Raises:
            ProgramError: the program has no tensor of this name (MD0102).
        """
        views = self.placements
        if name not in views:
            help = did_you_mean(name, list(views)) or f"there are {', '.join(views)}"
            message = f"`{self.program.name}` has no tensor `{name}`"
            fail("MD0102", message, here().argument("name", 0), help=help)
        return views[name]

    @property
    def collectives(self) -> Collectives:
        """The collectives in order, each with its tensor before and after, and its groups."""
        from meshdsl.report.views.parts import collectives

        return collectives(self._made.device, self._report)

    @property
    def memory(self) -> Memory:
        """Bytes of memory per device, by kind: parameters, gradients, activations and others."""
        from meshdsl.report.views.parts import Memory

        return Memory({self._made.placed.layout: self._report["memory"]})


# --- plans --------------------------------------------------------------------------------------


Array = Any
"""A numpy array, a torch tensor, or what `numpy.asarray` takes."""


class Plan(Looks):
    """A program on a mesh under a layout. Calling it runs every device in this process.

    `plan.named`, `plan.warnings` and `plan.mesh` describe its origin; parameters are initialised
    from a seed when they are first needed, the same under every layout, and stay until they are
    set. Of a program with `md.minimize`, `explain`, `cost`, `compare` and `code` are about the
    whole training step, while a call computes the outputs alone; `train` takes the steps.
    """

    def __init__(self, program: Program, made: Compilation) -> None:
        self.program, self._made = program, made
        self.warnings = tuple(made.diagnostics)
        self._engine: PersistentEngine | None = None
        self._arrays: dict[str, Array] | None = None
        self._blocks: Blocks | None = None
        self._lock = threading.RLock()

    # --- properties --------------------------------------------------------------------------

    @property
    def named(self) -> ir.NamedProgram:
        """The named program that a call computes."""
        return self._made.forward.named

    @property
    def options(self) -> Options:
        """The options of the compilation."""
        return self._made.options

    @property
    def loss(self) -> str:
        """The name of the output that is minimised."""
        from meshdsl.named.training_step import loss_name

        return loss_name(self._made.named)

    @property
    def mesh(self) -> dict[str, int]:
        """The axes of the mesh with their sizes."""
        return dict(self._made.placed.mesh.declared)

    @property
    def devices(self) -> int:
        """The number of devices of the mesh."""
        return self._made.placed.mesh.devices

    @property
    def code(self) -> Code:
        """The standalone torch program that every device runs, one text for all of them."""
        from meshdsl.report.views.parts import Code

        return Code(self._made.text)

    def __repr__(self) -> str:
        placed = self._made.placed
        mesh = mesh_text(self.mesh) or "one device"
        how = "no layout" if placed.layout == "none" else f"layout {placed.layout}"
        return f"<plan of {self.program.name} on {mesh}, {how}, reduced {placed.policy}>"

    @told
    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """The plan in a line; as HTML the report that `explain` gives without options."""
        return {"text/plain": repr(self), "text/html": self.explain().html()}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a plan as its program, the options, and its parameters if they are set."""
        return again, (self.program, *chosen_of(self), self._arrays)

    # --- running -----------------------------------------------------------------------------

    @told
    def __call__(
        self, /, *args: Array, params: Mapping[str, Array] | None = None, **inputs: Array
    ) -> Outputs:
        """Run it: inputs in order or by name, whole arrays of numpy or torch; whole outputs.

        Outputs are tensors of torch if an input is one, else arrays of numpy. `params` overrides
        the plan's own parameters for this call.

        Raises:
            ProgramError: an input is missing or unknown (MD0820), has another shape or kind of
                number (MD0504); a run fails (MD07xx), or an index is out of range (MD0801).
        """
        from meshdsl.backends.engines.persistent import as_numpy, is_torch

        bound = self._inputs(args, inputs)
        engine = self._ready()
        try:
            blocks = self._blocks if params is None else engine.parameters(self._merged(params))
            assert blocks is not None, "an engine that is ready has parameters"
            outputs = engine.run(bound, blocks)
        except Exception as error:
            self._tell(error)
            raise
        as_torch = any(is_torch(x) for x in bound.values())
        return Outputs({n: t if as_torch else as_numpy(t, n) for n, t in outputs.items()})

    @told
    def reference(
        self, /, *args: Array, params: Mapping[str, Array] | None = None, **inputs: Array
    ) -> Outputs:
        """The outputs of the unsharded program in float64, on the same inputs and parameters."""
        from meshdsl.backends.engines.reference import made_up, run_reference

        bound = self._inputs(args, inputs)
        try:
            learned = self._merged({} if params is None else params)
            sides = zip(self._specs(), (bound, learned), ("inputs", "parameters"), strict=True)
            arrays = [made_up(specs, _fitting(a, specs, what)) for specs, a, what in sides]
            return Outputs(run_reference(self.named, *arrays))
        except Exception as error:
            self._tell(error)
            raise

    @told
    def sample(self, seed: int = 0) -> dict[str, Array]:
        """Made-up inputs, for trying the plan: `plan(**plan.sample())`."""
        from meshdsl.backends.engines.reference import made_up

        return dict(made_up(self._specs()[0], None, check_seed(seed)))

    @property
    def params(self) -> Mapping[str, Any]:
        """The parameters, whole, by name, to be read and not written to.

        Assigning a mapping sets those that it names, to copies of its arrays, and leaves the others
        as they are.
        """
        return MappingProxyType({n: _read_only(a) for n, a in self._parameters().items()})

    @params.setter
    def params(self, arrays: Mapping[str, Array]) -> None:
        self._set_params(arrays, 0)

    @told
    def initialise(self, seed: int = 0) -> None:
        """Make all parameters up anew from a seed."""
        seed = check_seed(seed)
        self._arrays = self._blocks = None
        self._set_params({}, seed)

    @told
    def load_weights(self, path: Any, weights: Weights = None) -> None:
        """Set the parameters to those of a model: a Hugging Face folder, or a file of tensors.

        `weights` says which tensors they are: the name of a block of the file, entries as text, or
        a dict: `{"w": '"layer.weight"[hidden, io]'}`. See docs/weights.md. Values that are rounded
        or padded are a `ProgramWarning`.

        Raises:
            ProgramError: the model has other tensors (MD0550) or cannot be read (MD0553), or the
                block does not fit the program (MD0145 to MD0148, MD0552).
        """
        from meshdsl.api.weights import loaded

        self._set_params(loaded(self._made.forward, path, weights, here()), 0)

    @told
    def save_weights(
        self, path: Any, weights: Weights = None, *, dtype: str | None = None, force: bool = False
    ) -> None:
        """Write the parameters as a model: a folder, a .safetensors file or a .bin file of torch.

        Floats are written as `dtype` (f64, f32, bf16), or as they are.

        Raises:
            ProgramError: there is a model already and no `force`, or the parameters do not fill its
                tensors (MD0554).
        """
        from meshdsl.api.weights import save

        made, specs = self._made.forward, self._specs()[1]
        save(made, self._parameters(), specs, path, weights, dtype, force, here())

    @told
    def _set_params(self, arrays: Mapping[str, Array], seed: int) -> None:
        from meshdsl.backends.engines.reference import made_up

        specs = self._specs()[1]
        self._refuse_unknown(arrays, specs, "parameter")
        before = self._arrays or {}
        try:
            chosen = {**before, **_fitting(arrays, specs, "parameters")}
            self._arrays = dict(made_up(specs, chosen, seed))
        except Exception as error:
            self._tell(error)
            raise
        self._blocks = None if self._engine is None else self._engine.parameters(self._arrays)

    def _parameters(self) -> dict[str, Array]:
        if self._arrays is None:
            self._set_params({}, 0)
        assert self._arrays is not None, "parameters were set"
        return self._arrays

    def _merged(self, params: Mapping[str, Array]) -> dict[str, Array]:
        self._refuse_unknown(params, self._specs()[1], "parameter")
        return {**self._parameters(), **params}

    def _ready(self) -> PersistentEngine:
        with self._lock:
            if self._engine is None:
                from meshdsl.backends.engines.execution import refuse_too_large
                from meshdsl.backends.engines.persistent import PersistentEngine

                refuse_too_large(self._made.forward, "local", None)
                self._engine = PersistentEngine(self._made.forward.emitted)
            if self._blocks is None:
                self._blocks = self._engine.parameters(self._parameters())
            return self._engine

    def _specs(self) -> tuple[dict[str, Spec], dict[str, Spec]]:
        from meshdsl.backends.draws import draws
        from meshdsl.backends.engines.reference import whole_specs

        return whole_specs(self.named, draws(self.named))

    def _inputs(self, args: Sequence[Array], inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Every input by name; refuse missing and unknown ones."""
        names = [v.label for v in self.named.inputs]
        seeds = [v.label for v in self.named.inputs if v.role == "seed"]
        inputs = {**{n: 0 for n in seeds if n not in names[: len(args)]}, **inputs}
        by_name = {**dict(zip(names, args, strict=False)), **inputs}
        if len(args) <= len(names) and len(by_name) == len(args) + len(inputs):
            if by_name.keys() == set(names):
                return by_name
        self._refuse_inputs(args, inputs, names)
        return by_name

    def _refuse_inputs(
        self, args: Sequence[Array], inputs: Mapping[str, Array], names: list[str]
    ) -> None:
        site = here()
        form = f"`plan({', '.join(f'{n}=…' for n in names)})`"
        if len(args) > len(names):
            message = f"`{self.program.name}` has {len(names)} inputs, and {len(args)} are given"
            fail("MD0820", message, site.span, help=f"call {form}")
        self._refuse_unknown(inputs, names, "input")
        twice = [n for n in names[: len(args)] if n in inputs]
        if twice:
            message = f"the input `{twice[0]}` is given twice"
            fail("MD0820", message, site.argument(twice[0]), help=f"call {form}")
        missing = [n for n in names[len(args) :] if n not in inputs]
        listed = ", ".join(f"`{n}`" for n in missing)
        help = f"call {form}; `plan.sample()` makes inputs up"
        fail("MD0820", f"`{self.program.name}` is called without {listed}", site.span, help=help)

    def _refuse_unknown(self, arrays: Mapping[str, Any], known: Any, what: str) -> None:
        if not isinstance(arrays, Mapping):
            message = f"the {what}s are given as a {type(arrays).__name__}, without names"
            fail("MD0820", message, here().span, help=f'give them by name: `{{"{what}": array}}`')
        for name in arrays:
            if name not in known:
                close = did_you_mean(name, list(known)) or f"there are {', '.join(known) or 'none'}"
                message = f"`{self.program.name}` has no {what} `{name}`"
                fail("MD0820", message, here().argument(name), help=close)

    def _tell(self, error: Exception) -> None:
        """Raise an error of a run as a diagnostic; return if it has none."""
        from meshdsl.backends.engines.execution import line_of
        from meshdsl.backends.engines.failures import RunError
        from meshdsl.backends.runtime.array_files import ArraysRefused

        if isinstance(error, ArraysRefused):
            help = "give whole arrays with these shapes and kinds of number"
            fail("MD0504", str(error), here().span, help=help)
        if isinstance(error, RunError):
            place = line_of(error.place, self._made.source) or here().span
            raise DiagnosticError(replace(error.diagnostic, span=place)) from error

    # --- training ----------------------------------------------------------------------------

    @told
    def train(
        self,
        data: str | Mapping[str, Array] | Array,
        steps: int,
        *,
        seed: int | None = None,
        engine: str = "local",
        batch: str | None = None,
        tokens: str | None = None,
        tokenizer: str | None = None,
        end_token: str | None = None,
        text_field: str = "text",
        documents: str = "stream",
        order: str | None = None,
        eval_every: int = 0,
        eval_data: str | Mapping[str, Array] | Array | None = None,
        eval_fraction: float = 0.1,
        tensorboard: str | None = None,
        checkpoint: str | None = None,
        checkpoint_every: int = 0,
        resume: bool = False,
        force: bool = False,
        progress: bool = True,
    ) -> Training:
        """Take `steps` steps from the plan's parameters, and set them to the trained ones.

        `data` is a file or a folder (.npz, tokens, texts), arrays by the names of inputs, with N
        samples each, or an array of tokens in one dim; the batches of a run depend on `seed` and
        the step alone. The other arguments are those of `meshdsl train`; with `progress`, the
        standard error shows how far the run is.

        Raises:
            ProgramError: the program minimises nothing (MD0510), data of another shape or kind
                (MD0511 and on), a loss that is no number (MD0720).
        """
        from meshdsl.api import training

        asked = {
            "steps": steps, "seed": seed, "engine": engine, "batch": batch, "tokens": tokens,
            "tokenizer": tokenizer, "end_token": end_token, "text_field": text_field,
            "documents": documents, "order": order, "eval_every": eval_every,
            "eval_data": eval_data, "eval_fraction": eval_fraction,
            "tensorboard": tensorboard, "checkpoint": checkpoint,
            "checkpoint_every": checkpoint_every, "resume": resume, "force": force,
            "progress": progress,
        }  # fmt: skip
        return training.train(self, self._made.measured, data, asked)

    @told
    def evaluate(
        self,
        data: str | Mapping[str, Array] | Array,
        *,
        engine: str = "local",
        batch: str | None = None,
        tokens: str | None = None,
        tokenizer: str | None = None,
        end_token: str | None = None,
        text_field: str = "text",
        documents: str = "stream",
        characters: str | None = None,
        batches: int | None = None,
        seed: int = 0,
    ) -> Evaluation:
        """The averages of the outputs that are single numbers, over all samples of `data`.

        A last batch that is short weighs as many samples as it has. `data` is as of `train`, the
        parameters are the plan's, and `batches` is the most that are taken. `characters` are those
        of a text of characters, in the order of their numbers: sorted, as training has them.

        Raises:
            ProgramError: data of another shape or kind (MD0511 and on).
        """
        from meshdsl.api import training

        asked = {
            "engine": engine, "batch": batch, "tokens": tokens, "tokenizer": tokenizer,
            "end_token": end_token, "text_field": text_field,
            "documents": documents, "characters": characters, "batches": batches,
            "seed": check_seed(seed),
        }  # fmt: skip
        return training.evaluate(self, self._made, data, asked)

    @told
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | Array,
        steps: int | None = None,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        seed: int = 0,
        end_token: int | str | None = None,
        stop: str | Sequence[str] = (),
        beams: int = 1,
        length_penalty: float = 1.0,
        tokens: str | None = None,
        tokenizer: str | None = None,
        prefill: str | Plan | None = None,
        engine: str = "local",
        on_text: OnText = None,
    ) -> Generation:
        """Continue prompts, each a text or its tokens, with a program of one token.

        Text is read by a `tokenizer.json`, or by `tokens`: "bytes", "numbers" with spaces between
        them, or the characters in the order of their numbers. `prefill` is the program that reads
        prompts at once: its name, a plan of it, or "none". The other arguments are those of
        `meshdsl generate`; see docs/howto/generate.md.

        Raises:
            ProgramError: the program does not give the next token (MD0624), a prompt that it has
                no room for (MD0625) or cannot read (MD0626), an option out of range (MD0627).
        """
        from meshdsl.api.plan_generation import codec_of, generate, programs_of, task_of

        asked = {
            "steps": steps, "temperature": temperature, "top_k": top_k, "top_p": top_p,
            "seed": seed, "end_token": end_token, "stop": stop,
            "beams": beams, "length_penalty": length_penalty,
        }  # fmt: skip
        codec = codec_of(tokens, tokenizer)
        reader = prefill._made.forward if isinstance(prefill, Plan) else prefill
        programs = programs_of(self._made.forward, reader)
        task = task_of(programs.contract, prompts, codec, asked, here().span)
        return generate(programs, task, self.params, engine, on_text, here().span)

    @told
    def module(self, device_mesh: Any = None, *, seed: int = 0) -> ProgramModule:
        """The program as a `torch.nn.Module` on a `DeviceMesh`, for a training loop of one's own.

        Parameters are local shards, made up from `seed` unless the plan's have been set; the
        backward pass is compiled too. Every process of the mesh calls it. See docs/module.md.
        """
        from meshdsl.backends.module.program_module import module_of

        return module_of(self._made, device_mesh, seed=check_seed(seed), params=self._arrays)

    # --- reports -----------------------------------------------------------------------------

    @told
    def explain(
        self,
        *,
        all: bool = False,
        top: int | None = None,
        line: int | None = None,
        tensor: str | None = None,
    ) -> Explanation:
        """The report: local tensors, bytes sent, reasons, costs; `.json` has all of it as data.

        Of a long one the largest collectives and the memory, unless `all` lines are asked for, the
        `top` largest collectives, what happens on a `line`, or to a `tensor`.
        """
        focus = Focus(all, top, line, tensor)
        return Explanation(self._made.advised, self._made.source, self._sources, focus)

    @told
    def cost(self) -> Cost:
        """The costs per device, in bytes sent, FLOPs and memory."""
        return Cost.of(self._report)

    @told
    def simulate(
        self, cluster: str | None = None, *, unroll: bool = False, stage: int | None = None
    ) -> Simulation:
        """The step in time on a cluster: by name, a `.toml` file, or else that of the mesh.

        With `unroll`, all iterations of a loop are simulated, not only those that differ. Of a
        pipeline it is the step of the devices of a `stage`, or of the one that ends last.

        Raises:
            ProgramError: no cluster is named (MD0630), the mesh does not fit it (MD032x), or there
                is no such stage (MD0336).
        """
        from meshdsl.pipeline import timing_of
        from meshdsl.simulate.engine import needed, simulate

        compilation = self._made
        options = replace(compilation.options, cluster=cluster or compilation.options.cluster)
        try:
            timing = needed(timing_of(compilation.declarations, options, compilation.placed.mesh))
            timeline = simulate(compilation.device, timing, unroll, stage)
        except DiagnosticError as error:
            raise DiagnosticError(*(in_python(d, here()) for d in error.diagnostics)) from None
        return Simulation(timeline, compilation.source)

    @told
    def compare(
        self,
        *layouts: Any,
        reduce: str | Sequence[str] | None = None,
        run: bool = False,
        seed: int = 0,
    ) -> Comparison:
        """This plan beside the same program under other layouts or policies, line by line.

        Without any: beside its own positional SBP, and beside itself reduced immediately. With
        `run`, every column is run on the same made-up values and compared with the reference.
        """
        from meshdsl.backends.engines.compare_run import measure
        from meshdsl.columns import compile_columns, raise_if_none_works
        from meshdsl.report.comparison import NOT_RUN, compare

        site = here()
        declarations, wishes = self._made.declarations, self._wishes(reduce)
        now = wishes[0]
        for layout in layouts:
            declarations, name = with_layout(declarations, layout, ArgumentPlace(site, "", 0))
            wishes += [replace(w, kind="layout", name=name, positional=False) for w in [now]]
        if not layouts and reduce is None:
            positional = [replace(now, positional=True)] if now.kind == "layout" else []
            wishes += [*positional, replace(now, reduce="immediate")]
        compilation = self._made.under(self.options, Diagnostics(), declarations)
        columns = compile_columns(compilation, wishes)
        for column in columns:
            if column.wish.kind == "layout":
                _refuse_idle_rules(column.diagnostics, column.wish.name, self.program)
        raise_if_none_works(columns)
        ran = measure(columns, check_seed(seed)) if run else NOT_RUN
        return Comparison({**compare(columns, compilation.source), "run": ran}, compilation.source)

    def _wishes(self, reduce: str | Sequence[str] | None) -> list[Any]:
        from meshdsl.columns import Wish

        options = self.options
        name = options.layout if options.sbp is None else options.sbp
        now = Wish("layout" if options.sbp is None else "sbp", name, options.reduce)
        policies = [reduce] if isinstance(reduce, str) else list(reduce or ())
        return [now, *(replace(now, reduce=p) for p in policies)]


def _fitting(arrays: Mapping[str, Array], specs: Mapping[str, Spec], what: str) -> dict[str, Array]:
    """The arrays copied to numpy. Raises ArraysRefused where one does not fit its spec."""
    from meshdsl.backends.engines.persistent import as_numpy
    from meshdsl.backends.runtime.array_files import check_arrays

    copies = {name: as_numpy(array, name).copy() for name, array in arrays.items()}
    check_arrays(copies, {n: spec for n, spec in specs.items() if n in copies}, what)
    return copies


def _read_only(array: Any) -> Any:
    view = array.view()
    view.flags.writeable = False
    return view


# --- from a program and its options to a plan ---------------------------------------------------


DOES_NOTHING = ("MD0304", "MD0305")
"""Rules with an axis or a dim that there is not."""


def planned(program: Program, chosen: Mapping[str, Any], strict: bool, site: Site) -> Plan:
    """The plan of a program for the options `chosen`; `site` is the call."""
    compilation = program.compilation(*asked_of(program, chosen, site))
    try:
        _checked(compilation)
    except DiagnosticError as error:
        raise DiagnosticError(*(in_python(d, site) for d in error.diagnostics)) from None
    _refuse_idle_rules(compilation.diagnostics, compilation.options.layout, program)
    if strict:
        compilation.diagnostics.promote_warnings()
        compilation.diagnostics.raise_errors()
    frame = site.frame
    assert frame is not None, "a call comes from somewhere"
    warn(compilation.diagnostics, frame.f_code.co_filename, frame.f_lineno)
    return Plan(program, compilation)


def _checked(made: Compilation) -> Compilation:
    """The compilation; of stages that update on the way placements, as an engine may do without."""
    made.checked("placed")
    return made if made.asynchronous else made.checked()


def asked_of(
    program: Program, chosen: Mapping[str, Any], site: Site
) -> tuple[Declarations, Options]:
    """The pipeline's arguments: the declarations with the given layouts added, and the options."""
    declarations = program.declarations
    dtype = chosen["dtype"] and str(chosen["dtype"])
    if dtype is not None and (dtype not in types.DTYPES or types.DTYPES[dtype].kind != "float"):
        help = "there are f32, f64, bf16 and f16"
        fail("MD0602", f"`{dtype}` is no float type", site.argument("dtype"), help=help)
    if chosen["objective"] not in (None, *OBJECTIVES):
        message = f"a plan is not made for `{chosen['objective']}`"
        help = f"there are {' and '.join(OBJECTIVES)}"
        fail("MD0602", message, site.argument("objective"), help=help)
    if chosen["layout"] is not None and chosen["sbp"] is not None:
        fail("MD0601", "a layout and `sbp` are both given", site.span, help="choose one of them")
    declarations, mesh = with_mesh(declarations, chosen["mesh"], ArgumentPlace(site, "mesh", 0))
    place = ArgumentPlace(site, "layout", 1)
    declarations, layout = with_layout(declarations, chosen["layout"], place)
    declarations, sbp = with_sbp(declarations, chosen["sbp"], site.argument("sbp"))
    options = Options(
        program=program.name,
        mesh=mesh,
        layout=layout,
        sbp=sbp,
        reduce=chosen["reduce"],
        message_bytes=chosen["message_bytes"],
        cache=chosen["cache"],
        dtype=dtype,
        cluster=chosen["cluster"],
        objective=chosen["objective"],
    )
    return declarations, options


# --- pickles ---------------------------------------------------------------------------------

TABLES = ("meshes", "layouts", "sbps", "schedules")


def chosen_of(plan: Plan) -> tuple[Options, dict[str, dict[str, Any]]]:
    """The options of a plan, and the declarations that its program's text lacks."""
    declared, in_text = plan._made.declarations, plan.program.declarations
    is_text = plan.program._read_from is not None
    added = {
        table: {
            name: node
            for name, node in getattr(declared, table).items()
            if not is_text or getattr(in_text, table).get(name) is not node
        }
        for table in TABLES
    }
    return replace(plan.options, strict=False), added


def again(
    program: Program,
    options: Options,
    added: Mapping[str, Mapping[str, Any]],
    params: Mapping[str, Any] | None,
) -> Plan:
    """The plan that was pickled, compiled anew without repeating its warnings."""
    declarations = program.declarations
    tables: dict[str, Any] = {t: {**getattr(declarations, t), **added[t]} for t in TABLES}
    plan = Plan(program, _checked(program.compilation(replace(declarations, **tables), options)))
    if params is not None:
        plan.params = params
    return plan


def in_python(diagnostic: Diagnostic, site: Site) -> Diagnostic:
    """A diagnostic about an option, at the argument that gives it."""
    positions = {"mesh": 0, "layout": 1, "cluster": 0}
    span = diagnostic.span
    if span is None or not span.is_in_option:
        return diagnostic
    name = span.file.removeprefix("--")
    return replace(diagnostic, span=site.argument(name, positions.get(name)))


def _refuse_idle_rules(found: Iterable[Diagnostic], layout: str | None, program: Program) -> None:
    """Refuse a layout written in Python that names an axis or a dim that there is not."""
    if layout is None or layout in program.declarations.layouts:
        return
    idle = [replace(d, severity="error") for d in found if d.code in DOES_NOTHING]
    if idle:
        raise DiagnosticError(*idle)
