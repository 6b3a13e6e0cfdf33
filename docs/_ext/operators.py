"""The operator reference: an entry for every record of the registry, all of it from the record."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from docs._ext.markdown import code, fenced, table
from meshdsl.api.signatures import brackets_of, operands_of, signature_of
from meshdsl.backends.peers.jax import JaxText
from meshdsl.backends.peers.oneflow import OneFlowText
from meshdsl.backends.peers.operator_tables import spelling
from meshdsl.backends.peers.peer_call import PeerCall
from meshdsl.backends.torch.op_context import TorchText
from meshdsl.diagnostics import Diagnostics, Source, Span
from meshdsl.ir.types import DTYPES, EIGHT_BIT, TensorType
from meshdsl.named.autodiff import pulled_back
from meshdsl.named.builder import Builder
from meshdsl.named.ir import NamedOp, NamedProgram, Output, Value
from meshdsl.named.prelude import form, library, meaning
from meshdsl.named.printer import print_program
from meshdsl.ops.opdef import OpDef, OpError, Sample, load_all
from meshdsl.report.rule_tables import TELLING, describe, rows_text
from meshdsl.syntax import ast

VIEWS = {
    "rename": "x[{pairs}]",
    "split": "x[{dim} -> ({into})]",
    "merge": "x[({dims}) -> {into}]",
    "pick": "x[{dim} = {index}]",
    "slice": "x[{dim} = {start}:{stop} -> {target}]",
    "gather": "x[{dim} = y]",
}
"""Operators that brackets behind a tensor write, as templates over the attributes of a call."""

SIGNS = {"neg": "-{0}", "logical_not": "not {0}"}
"""Operators that a sign before their operand writes."""

_NOWHERE = Span(Source("example", ""), 0, 0)


# --- the pages -----------------------------------------------------------------------------------


GROUPS: Mapping[str, str] = {
    "Arithmetic": "add sub mul div floordiv mod pow neg abs sign square sqrt rsqrt exp log sin cos"
    " erf floor maximum minimum logaddexp cast",
    "Comparisons and choice": "eq ne lt le gt ge logical_and logical_or logical_not where",
    "Products": "einsum grouped_einsum mask_padding",
    "Reductions, scans, order": "sum mean max min prod any all mean_square squared_norm logsumexp"
    " argmax cumsum cumprod linear_recurrence sort top_k",
    "Activations": "relu gelu silu tanh sigmoid softplus elu leaky_relu hard_swish",
    "Softmax, norms, losses, attention": "softmax log_softmax layer_norm rms_norm batch_norm"
    " group_norm cross_entropy attention",
    "Names and shapes of dims": "rename split merge broadcast concat pad shift roll reverse window",
    "Indices": "gather pick slice one_hot put scatter_add bincount",
    "Images": "conv upconv max_pool avg_pool",
    "Constants and random numbers": "zeros ones iota uniform normal dropout sample",
    "Experts": "top_k_gating top2_gating top_k_routing sorted_routing",
    "Gradients and copies": "stop_gradient identity",
}
"""The groups of the index. What a program can call and none of them names is in `OTHERS`."""

OTHERS = "More"
COMPILED = "Inserted by the compiler: gradients, updates, broadcasts"


def groups() -> dict[str, list[str]]:
    """The names of all operators and library functions, by the title of their group."""
    by_title = {title: names.split() for title, names in GROUPS.items()}
    listed = {name for names in by_title.values() for name in names}
    known = load_all()
    rest = sorted({*known, *library()} - listed)
    written = [n for n in rest if n not in known or known[n].surface.items != "view"]
    by_title[OTHERS] = written
    by_title[COMPILED] = [n for n in rest if n not in written]
    return {title: names for title, names in by_title.items() if names}


def names() -> list[str]:
    """Every operator and library function, group by group."""
    return [name for of_group in groups().values() for name in of_group]


def index() -> str:
    """The groups: a line for each operator, which leads to its page."""
    parts = []
    for title, of_group in groups().items():
        rows = [
            (f'<a id="{name.replace("_", "-")}"></a>[{code(name)}](operators/{name}.md)', said)
            for name, said in ((name, first_sentence(meaning_of(name))) for name in of_group)
        ]
        parts.append(f"## {title}\n\n{table(('', ''), rows)}")
    return "\n\n".join(parts)


def page(name: str) -> str:
    """The page of one operator or library function."""
    title, beside = next((t, ns) for t, ns in groups().items() if name in ns)
    of_library = library().get(name)
    entry_of = _function(of_library) if of_library else entry(load_all()[name])
    others = ", ".join(f"[{code(other)}]({other}.md)" for other in beside if other != name)
    below = [f"## {title}\n\n{others}"] if others else []
    head = f"[Operators](../operators.md): {title}"
    return "\n\n".join([f"# {code(name)}", head, *entry_of, *below])


def meaning_of(name: str) -> str:
    """What an operator or library function computes."""
    of_library = library().get(name)
    return meaning(of_library) if of_library else load_all()[name].meaning


def first_sentence(text: str) -> str:
    """The first sentence of a text, which may have abbreviations in brackets."""
    joined = " ".join(text.split())
    ends = (m.end() for m in re.finditer(r"[.:](?= [A-Z`]|$)", joined))
    whole = (e for e in ends if joined[:e].count("(") <= joined[:e].count(")"))
    return joined[: next(whole, len(joined))].removesuffix(":")


def _function(function: ast.FunctionDecl) -> Iterator[str]:
    """The entry of a function of the library: how it is called, and its definition."""
    name = function.name.text
    yield fenced(f"{{py:function}} meshdsl.{name}{signature_of(name)}\n:no-typesetting:", "")
    yield meaning(function)
    yield table(
        ("", ""), [("called as", code(form(function))), ("in Python", code(f"md.{form(function)}"))]
    )
    yield "This function of the library is inlined where it is called. Its definition:"
    yield fenced("mdsl", PRELUDE[name])


def entry(opdef: OpDef) -> Iterator[str]:
    """The entry of one operator, paragraph by paragraph."""
    example = Example.of(opdef)
    if opdef.surface.items != "view":
        yield fenced(
            f"{{py:function}} meshdsl.{opdef.name}{signature_of(opdef.name)}\n:no-typesetting:", ""
        )
    yield opdef.meaning
    yield table(("", ""), list(_facts(opdef, example)))
    yield from _example(example)
    yield "Placements along one axis of the mesh ([how to read them](../operators.md)):"
    yield fenced("text", rows_text(describe(opdef)))
    definition = PRELUDE.get(opdef.name)
    if definition:
        yield "Where its own dim is split, this definition of the prelude takes its place:"
        yield fenced("mdsl", definition)


def _facts(opdef: OpDef, example: Example) -> Iterator[tuple[str, str]]:
    if opdef.surface.items != "view":
        form = f"md.{opdef.name}{brackets_of(opdef)}{signature_of(opdef.name)}"
        yield "in Python", code(form)
    yield from dtypes(opdef, example)
    yield "gradient", gradient(opdef, example)
    yield "numbers", _EXACT if opdef.exact else "rounds, as floats do"
    if opdef.precision == "f32":
        yield "in mixed precision", "computed in f32 at least"
    if opdef.precision == "compute":
        yield "in mixed precision", "computed in the narrow dtype"
    yield "torch", torch_text(opdef, example)
    for system, peer in _LIBRARIES.items():
        yield peer[0], peer_text(opdef, example, system)


_EXACT = "exact on whole numbers (below 2^24 in f32)"
_LIBRARIES = {
    "jax": ("JAX", JaxText.library, "P()"),
    "oneflow": ("OneFlow", OneFlowText.library, "sbp"),
}

# --- an example ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Example:
    """One call: its types, the names of its operands, and its text if the language writes it."""

    opdef: OpDef
    sample: Sample
    names: tuple[str, ...]
    outs: tuple[TensorType, ...]

    @classmethod
    def of(cls, opdef: OpDef) -> Example:
        """The call of an operator that shows most of its rows, of floats if it has a gradient."""
        of_floats = (s for s in opdef.samples if _result(opdef, s)[0].dtype.kind == "float")
        sample = TELLING.get(opdef.name) or next(of_floats, opdef.samples[0])
        names = tuple(operands_of(opdef)) or ("x", "y", "z", "u")
        if opdef.surface.seeded:
            names = (*operands_of(opdef), "seed")
        outs = _result(opdef, sample)
        letters = ("x", "y", "z", "u", "v", "w", "t")
        names = names if len(names) >= len(sample.ins) else letters
        return cls(opdef, sample, names[: len(sample.ins)], outs)

    @property
    def attrs(self) -> dict[str, Any]:
        """The attributes of the call."""
        return dict(self.sample.attrs)

    @property
    def call(self) -> str | None:
        """The call in the language, if it can be written there."""
        name, surface = self.opdef.name, self.opdef.surface
        if name in VIEWS:
            return VIEWS[name].format(**{k: _word(v) for k, v in self.attrs.items()})
        if name in SIGNS:
            return SIGNS[name].format(*self.names)
        if surface.items == "view":
            return None
        if self.opdef.infix:
            return f" {self.opdef.infix} ".join(self.names)
        tensors = ", ".join(self.names)
        if surface.items == "out":
            return f"{name}({tensors}{self._result})"
        options = [(n, self.attrs.get(n, d), d) for n, d in surface.options]
        given = [f"{n}={_option(value)}" for n, value, default in options if value != default]
        if surface.indexed:
            dim, (*names, index) = self.attrs["dim"].name, self.names
            inside = ", ".join([*names, *given])
            return f"{name}[{dim} = {index}]({inside}{self._result})"
        inside = ", ".join([*self.names, *given]) + self._result
        return f"{name}{self._brackets()}" + (f"({inside})" if self._has_parentheses else "")

    @property
    def _result(self) -> str:
        """The dims of the result, where a call may state them."""
        stated = self.opdef.surface.states_result
        return f" -> [{_word(self.attrs['dims'])}]" if stated else ""

    @property
    def _has_parentheses(self) -> bool:
        return self.opdef.surface.arity[1] != 0 or bool(self.opdef.surface.options)

    def _brackets(self) -> str:
        attrs = self.attrs
        match self.opdef.surface.items:
            case "dim":
                return f"[{attrs['dim'].name}]"
            case "dims" | "dims?" | "maker":
                return f"[{_word(attrs['dims'])}]"
            case "filter" | "slide":
                windows = attrs.get("window") or attrs["size"]
                parts = zip(attrs["source"], windows, attrs["target"], strict=True)
                shown = (f"{s} by {w}" + (f" -> {t}" if s != t else "") for s, w, t in parts)
                return f"[{', '.join(shown)}]"
            case "join":
                return f"[({_word(attrs['sources'])}) -> {attrs['target'].name}]"
            case "arrow":
                return f"[{_word(attrs['source'])} -> {_word(attrs['target'])}]"
        return ""

    @property
    def program(self) -> str | None:
        """A whole program of the language around the call."""
        if self.call is None:
            return None
        sizes = {d.name: d.size for t in (*self.sample.ins, *self.outs) for d in t.dims}
        dims = ", ".join(f"{name} = {size}" for name, size in sizes.items())
        inputs = ", ".join(_declared(n, t) for n, t in self._typed)
        head = f"dim {dims}\n\n" if dims else ""
        names = ", ".join(_results_of(len(self.outs)))
        return f"{head}program example({inputs}) {{\n  {names} = {self.call}\n  return {names}\n}}"

    @property
    def _typed(self) -> list[tuple[str, TensorType]]:
        return list(zip(self.names, self.sample.ins, strict=True))

    def named(self) -> tuple[NamedProgram, NamedOp]:
        """The call as a named program, which `--print-after named` prints, and its operator."""
        ins = tuple(Value(t, _NOWHERE, name=n, role="input") for n, t in self._typed)
        names = _results_of(len(self.outs))
        outs = tuple(Value(t, _NOWHERE, name=n) for n, t in zip(names, self.outs, strict=True))
        op = NamedOp(self.opdef.name, ins, outs, self.sample.attrs, _NOWHERE)
        returned = tuple(Output(n, v, _NOWHERE) for n, v in zip(names, outs, strict=True))
        return NamedProgram("example", ins, (), (op,), returned, _NOWHERE), op


def _results_of(count: int) -> tuple[str, ...]:
    return ("r",) if count == 1 else tuple(f"r{i}" for i in range(count))


def _word(value: Any) -> str:
    """An attribute as the language writes it."""
    if isinstance(value, tuple):
        pairs = value and isinstance(value[0], tuple)
        return ", ".join(" -> ".join(d.name for d in v) if pairs else v.name for v in value)
    return str(getattr(value, "name", value)) if not isinstance(value, float) else repr(value)


def _option(value: Any) -> str:
    """An option as the language writes it."""
    return f'"{value}"' if isinstance(value, str) else _word(value)


def _declared(name: str, type_: TensorType) -> str:
    dtype = "" if str(type_.dtype) == "f32" else f": {type_.dtype}"
    return f"{name}[{', '.join(type_.names)}]{dtype}"


def _example(example: Example) -> Iterator[str]:
    program = example.program
    if program is not None:
        yield fenced("mdsl", program)
        return
    yield "The language has no call for it. As the compiler prints it (`--print-after named`):"
    yield fenced("text", print_program(example.named()[0]))


# --- what is derived -----------------------------------------------------------------------------


def _result(opdef: OpDef, sample: Sample) -> tuple[TensorType, ...]:
    return opdef.infer(sample.ins, dict(sample.attrs))


def dtypes(opdef: OpDef, example: Example) -> Iterator[tuple[str, str]]:
    """What the operator takes, found by asking its shape rule, and what it gives then."""
    ins = example.sample.ins
    if not ins:
        yield (
            "gives",
            code(str(example.outs[0].dtype))
            + (", or the option `dtype`" if dict(opdef.surface.options).get("dtype") else ""),
        )
        return
    main = ins[-1].dtype if opdef.name == "where" else ins[0].dtype
    if main.name not in DTYPES:
        yield "takes", code(" ".join(EIGHT_BIT))
        yield "gives", code(str(example.outs[0].dtype)) + ", or the option `dtype`"
        return
    taken = {}
    asked = {n: d for n, d in DTYPES.items() if d.kind == "float" or not opdef.overwrites}
    for name, dtype in asked.items():
        given = tuple(TensorType(t.dims, dtype) if t.dtype == main else t for t in ins)
        try:
            taken[name] = str(opdef.infer(given, example.attrs)[0].dtype)
        except OpError:
            continue
    yield "takes", code(" ".join(taken))
    results = set(taken.values())
    same = all(name == result for name, result in taken.items())
    option = ", or the option `dtype`" if "dtype" in dict(opdef.surface.options) else ""
    yield "gives", "the same dtype" if same else code(" ".join(sorted(results))) + option


def gradient(opdef: OpDef, example: Example) -> str:
    """Whether there is one, and by which operands."""
    if opdef.overwrites:
        return "none: it ends a training step"
    program, op = example.named()
    if op.outs[0].type.dtype.kind != "float":
        return "none: the result is not of floats, or has steps"
    builder = Builder(Diagnostics())
    seed = Value(op.outs[0].type, _NOWHERE, name="d_r", role="input")
    builder.adopt(
        NamedProgram(
            "example", (*program.inputs, seed), (), program.body, program.outputs, _NOWHERE
        )
    )
    floats = [v for v in program.inputs if v.type.dtype.kind == "float"]
    found = pulled_back(builder, [(op.outs[0], seed)], floats)
    by = [str(v.name) for v, part in zip(floats, found, strict=True) if part is not None]
    if not by:
        return "none: it is constant almost everywhere, or stops gradients"
    if opdef.surface.arity[1] is None:
        return "yes, by every operand"
    return "yes, by " + ", ".join(code(name) for name in by)


def torch_text(opdef: OpDef, example: Example) -> str:
    """The torch text of the example on one device."""
    ins, outs = example.sample.ins, example.outs
    call = TorchText(
        args=example.names,
        constants=(False,) * len(ins),
        ins=ins,
        outs=outs,
        global_ins=ins,
        global_outs=outs,
        attrs=example.attrs,
        fresh=lambda hint: hint,
    )
    text = opdef.torch(call)
    return "; ".join(code(line) for line in (*call.lines, text))


def peer_text(opdef: OpDef, example: Example, system: str) -> str:
    """The text of the example in another system, or that `render` refuses it."""
    _, library, spec = _LIBRARIES[system]
    ins, out = example.sample.ins, example.outs[0]
    call = PeerCall(library, example.names, {}, ins, out, example.attrs, spec)
    text = call.write(spelling(opdef.name, system).text)
    return code(text) if text else "not spelled: `render` refuses it (`MD0910`)"


# --- the prelude ---------------------------------------------------------------------------------

_DEFINITION = re.compile(r"^(?:#.*\n)*def (\w+).*\n(?: .*\n)*\}", re.MULTILINE)


def _prelude() -> dict[str, str]:
    """The text of every function of the prelude with the comment above it, by name."""
    folder = files("meshdsl") / "prelude"
    texts = [f.read_text(encoding="utf-8") for f in folder.iterdir() if f.name.endswith(".mdsl")]
    return {m[1]: m[0] for text in texts for m in _DEFINITION.finditer(text)}


PRELUDE = _prelude()
