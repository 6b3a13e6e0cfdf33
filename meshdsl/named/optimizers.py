"""`minimize loss with adamw(lr=cosine(3e-4, 1000), clip=1.0)`: the optimizer and its options.

`OPTIMIZERS` and `SCHEDULES` are the tables of all there are; `resolve` reads a call by them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from meshdsl.diagnostics import Diagnostic, Diagnostics, did_you_mean, fail
from meshdsl.named.builder import kind_of
from meshdsl.named.expressions import FOLD
from meshdsl.named.ir import DTYPES, DType
from meshdsl.named.schedules import Schedule
from meshdsl.syntax import ast

if TYPE_CHECKING:
    from meshdsl.named.builder import Scope
    from meshdsl.named.expressions import Expressions

Evaluate = Callable[[ast.Expr], Any]
"""What an expression comes to: a number, a string, a dtype, or what no option may be."""

# --- what there is -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Option:
    """What an option may be: `kind`, and the `range` in words that `holds` checks.

    `default` is None where the option is off without being given, and `...` where it must be given.
    """

    default: Any
    kind: Literal["number", "integer", "flag", "dtype", "rate"]
    range: str = ""
    holds: Callable[[Any], bool] = lambda value: True
    example: str = ""

    @property
    def shown(self) -> str:
        """A value that is fine, as it is written."""
        if self.example or self.default is None:
            return self.example
        return str(self.default).lower()


def _positive(default: Any, example: str = "") -> Option:
    return Option(default, "number", "above 0", lambda x: x > 0, example)


def _not_negative(default: Any, example: str = "") -> Option:
    return Option(default, "number", "0 or more", lambda x: x >= 0, example)


def _fraction(default: float) -> Option:
    return Option(default, "number", "0 or more and below 1", lambda x: 0 <= x < 1)


def _count(default: Any, least: int, example: str = "") -> Option:
    return Option(default, "integer", f"{least} or more", lambda x: x >= least, example)


def _optimizer(lr: float, **own: Option) -> Mapping[str, Option]:
    """The options of an optimizer: those of all of them, and its own."""
    return {
        "lr": Option(Schedule("constant", lr), "rate", "above 0", lambda x: x > 0, repr(lr)),
        **own,
        "clip": _positive(None, "1.0"),
        "accumulate": _count(1, 1),
        "compute": Option(None, "dtype", example='"bf16"'),
        "seed": _count(0, 0),
    }


_ADAM = {"beta1": _fraction(0.9), "beta2": _fraction(0.999), "eps": _positive(1e-8)}
_OFF = Option(False, "flag")

OPTIMIZERS: Mapping[str, Mapping[str, Option]] = {
    "sgd": _optimizer(0.01, weight_decay=_not_negative(0.0)),
    "momentum": _optimizer(
        0.01, beta=_fraction(0.9), nesterov=_OFF, weight_decay=_not_negative(0.0)
    ),
    "adam": _optimizer(1e-3, **_ADAM, weight_decay=_not_negative(0.0)),
    "adamw": _optimizer(1e-3, **_ADAM, weight_decay=_not_negative(0.01)),
    "adafactor": _optimizer(
        0.01,
        relative=Option(True, "flag"),
        decay=_positive(0.8),
        eps1=_positive(1e-30),
        eps2=_positive(1e-3),
        threshold=_positive(1.0),
        weight_decay=_not_negative(0.0),
    ),
}
"""Every optimizer with its options, `lr` first: that one may be given without its name."""

_STEPS, _WARMUP, _FINAL = _count(..., 1, "1000"), _count(0, 0), _not_negative(0.0)

SCHEDULES: Mapping[str, Mapping[str, Option]] = {
    "constant": {"value": _positive(..., "3e-4")},
    "linear_warmup": {"peak": _positive(..., "3e-4"), "warmup": _count(..., 1, "100")},
    "cosine": {
        "peak": _positive(..., "3e-4"), "steps": _STEPS, "warmup": _WARMUP, "final": _FINAL
    },
    "linear": {
        "peak": _positive(..., "3e-4"), "steps": _STEPS, "warmup": _WARMUP, "final": _FINAL
    },
}  # fmt: skip
"""Every schedule of the learning rate with its arguments, in order."""


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An optimizer with a value for every option that it has in `OPTIMIZERS`."""

    name: str
    options: Mapping[str, Any]

    def option(self, name: str) -> Any:
        """The value of one option; it must be one of this optimizer."""
        return self.options[name]

    @property
    def lr(self) -> Schedule:
        """The learning rate of every step."""
        found: Schedule = self.options["lr"]
        return found

    @property
    def clip(self) -> float | None:
        """The largest norm that all gradients together may have; None for any."""
        found: float | None = self.options["clip"]
        return found

    @property
    def accumulate(self) -> int:
        """How many batches a step reads, whose gradients are added up."""
        found: int = self.options["accumulate"]
        return found

    @property
    def compute(self) -> DType | None:
        """The dtype of the forward and backward pass; None for that of the program."""
        found: DType | None = self.options["compute"]
        return found

    @property
    def seed(self) -> int:
        """The seed of what is drawn in training."""
        found: int = self.options["seed"]
        return found


# --- reading a call ----------------------------------------------------------------------------


def literal(node: ast.Expr) -> Any:
    """The value of a number or a string as it stands; anything else yields `node` itself."""
    if isinstance(node, ast.Unary) and node.op == "-" and isinstance(node.operand, ast.Number):
        return -node.operand.value
    return node.value if isinstance(node, ast.Number | ast.String) else node


def optimizer_of(call: ast.Call, expressions: Expressions, scope: Scope) -> Optimizer:
    """`resolve`, with constants computed as anywhere in the program."""
    return resolve(call, lambda node: expressions.evaluate(node, scope))


def resolve(call: ast.Call, evaluate: Evaluate = literal) -> Optimizer:
    """The optimizer that `minimize … with CALL` names; `evaluate` computes constant expressions.

    Raises:
        DiagnosticError: everything that is wrong with the call (MD0270 to MD0276).
    """
    name = call.function.text
    if name not in OPTIMIZERS:
        help = did_you_mean(name, list(OPTIMIZERS)) or f"there are {_listed(OPTIMIZERS)}"
        fail("MD0270", f"unknown optimizer `{name}`", call.function.span, help=help)
    reader = _Reader(evaluate)
    options = reader.options(call, OPTIMIZERS[name], positional=1)
    reader.found.raise_errors()
    return Optimizer(name, options)


class _Reader:
    """Reads the arguments of optimizers and schedules, and collects what is wrong with them."""

    def __init__(self, evaluate: Evaluate) -> None:
        self.evaluate = evaluate
        self.found = Diagnostics()

    def options(
        self, call: ast.Call, known: Mapping[str, Option], positional: int
    ) -> dict[str, Any]:
        """A value for each of the options `known`; the first `positional` need no name."""
        given = self._given(call, known, positional)
        values = {}
        for name, option in known.items():
            if name in given:
                values[name] = self._value(call, name, option, given[name])
            elif option.default is ...:
                message = f"`{call.function.text}` needs `{name}`"
                self._report("MD0274", message, call, f"write `{_form(call)}`")
            else:
                values[name] = option.default
        return values

    def _given(
        self, call: ast.Call, known: Mapping[str, Option], positional: int
    ) -> dict[str, ast.Expr]:
        """The expression of every option that is given."""
        name, form = call.function.text, f"write `{_form(call)}`"
        if call.items is not None or call.out is not None:
            self._report("MD0272", f"`{name}` takes no `[ ]` and no `->`", call, form)
        for extra in call.args[positional:]:
            self._report("MD0272", f"`{name}` takes no further argument here", extra, form)
        given = dict(zip(known, call.args[:positional], strict=False))
        for keyword in call.keywords:
            word = keyword.name.text
            if word not in known:
                help = did_you_mean(word, list(known)) or f"there are {_listed(known)}"
                self._report("MD0272", f"`{name}` has no option `{word}`", keyword.name, help)
            elif word in given:
                self._report("MD0273", f"`{word}` is given twice", keyword, "remove one of them")
            else:
                given[word] = keyword.value
        return given

    def _value(self, call: ast.Call, name: str, option: Option, node: ast.Expr) -> Any:
        """The value of one option; reported, and perhaps of any type, where it is wrong."""
        if option.kind == "rate" and isinstance(node, ast.Call) and node.function.text not in FOLD:
            return self._schedule(node)
        value = self._constant(option, node)
        help = f"write `{name}={option.shown}`"
        if not _is_kind(option.kind, value):
            said = f"`{name}` of `{call.function.text}` is {_KINDS[option.kind]}"
            self._report("MD0275", f"{said}, not {_described(value)}", node, help)
        elif option.kind == "dtype":
            return DTYPES[value] if isinstance(value, str) else value
        elif not option.holds(value):
            said = f"`{name}` of `{call.function.text}` is {option.range}, not {value}"
            self._report("MD0276", said, node, help)
        return Schedule("constant", value) if option.kind == "rate" else value

    def _constant(self, option: Option, node: ast.Expr) -> Any:
        if option.kind == "flag" and isinstance(node, ast.Ref):
            return _FLAGS.get(node.name.text, node)
        return self.evaluate(node)

    def _schedule(self, call: ast.Call) -> Schedule:
        """The schedule that a call such as `cosine(3e-4, 1000)` means."""
        name = call.function.text
        if name not in SCHEDULES:
            help = did_you_mean(name, list(SCHEDULES)) or f"there are {_listed(SCHEDULES)}"
            self._report("MD0271", f"unknown schedule `{name}`", call.function, help)
            return Schedule("constant", 1.0)
        before = len(self.found)
        values = self.options(call, SCHEDULES[name], positional=len(SCHEDULES[name]))
        if len(self.found) > before:
            return Schedule("constant", 1.0)
        if name == "constant":
            return Schedule("constant", values["value"])
        if name == "linear_warmup":
            return Schedule("constant", values["peak"], warmup=values["warmup"])
        self._check_course(call, values)
        return Schedule("cosine" if name == "cosine" else "linear", **values)

    def _check_course(self, call: ast.Call, values: Mapping[str, Any]) -> None:
        """A schedule warms up before it ends, and falls."""
        name = call.function.text
        if values["warmup"] >= values["steps"]:
            message = f"`{name}` warms up for {values['warmup']} of its {values['steps']} steps"
            self._report("MD0276", message, call, "`warmup` is less than `steps`")
        if values["final"] > values["peak"]:
            message = f"`{name}` ends at {values['final']}, above its peak {values['peak']}"
            self._report("MD0276", message, call, "`final` is at most the peak")

    def _report(self, code: str, message: str, node: Any, help: str) -> None:
        self.found.add(Diagnostic(code, message, node.span, help=help))


# --- words -------------------------------------------------------------------------------------

_FLAGS = {"true": True, "false": False}
_KINDS = {
    "number": "a number",
    "integer": "an integer",
    "flag": "`true` or `false`",
    "dtype": "one of " + ", ".join(f'`"{n}"`' for n, d in DTYPES.items() if d.kind == "float"),
    "rate": "a number or a schedule",
}


def _is_kind(kind: str, value: Any) -> bool:
    if kind == "flag":
        return isinstance(value, bool)
    if kind == "dtype":
        dtype = DTYPES.get(value) if isinstance(value, str) else value
        return isinstance(dtype, DType) and dtype.kind == "float"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and (kind != "integer" or isinstance(value, int))


def _described(value: Any) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    return "this" if isinstance(value, ast.Expr) else kind_of(value)


def _form(call: ast.Call) -> str:
    """How a call of this optimizer or schedule may be written."""
    name = call.function.text
    if name in OPTIMIZERS:
        return f"{name}(lr={OPTIMIZERS[name]['lr'].shown})"
    return f"{name}({', '.join(o.shown for o in SCHEDULES[name].values() if o.default is ...)})"


def _listed(names: Mapping[str, object]) -> str:
    return ", ".join(f"`{n}`" for n in names)
