"""`minimize loss with adamw(lr=cosine(3e-4, 1000), clip=1.0)`: the optimizer and its options.

`OPTIMIZERS` and `SCHEDULES` are the tables of all of them; `resolve` reads a call by them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol

from meshdsl.diagnostics import (
    Diagnostic,
    DiagnosticError,
    Diagnostics,
    Edit,
    Fix,
    Poisoned,
    Span,
    advice,
    closest,
    spelled_right,
)
from meshdsl.ir.types import BF16, DTYPES, F32, Dim, DType, TensorType
from meshdsl.named.builder import kind_of
from meshdsl.named.ir import NamedProgram, Node, Value
from meshdsl.ops.opdef import load_all
from meshdsl.ops.steps import RATES
from meshdsl.records import dataclass
from meshdsl.syntax import ast
from meshdsl.syntax.edits import inserted, removal

# --- schedules ----------------------------------------------------------------------------------


Shape = Literal["constant", "cosine", "linear"]


@dataclass(frozen=True, slots=True)
class LearningRate:
    """A learning rate for every step: `peak`, times the factors of warmup and decay.

    The first `warmup` steps rise in equal parts, the last of them to `peak`. A `cosine` (Loshchilov
    and Hutter 2017, without restarts) or `linear` one then falls, and is `final` from step `steps`
    on; a `constant` one stays.
    """

    shape: Shape
    peak: float
    steps: int = 0
    warmup: int = 0
    final: float = 0.0

    def at(self, step: int) -> float:
        """The learning rate of the step before which `step` steps were done (0, 1, …)."""
        return RATES[self.shape](step + 1, **self.arguments)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the function that has the learning rate of a step."""
        fall = {} if self.shape == "constant" else {"steps": self.steps}
        end = {} if self.shape == "constant" else {"final": self.final}
        return {"peak": self.peak, **fall, "warmup": self.warmup, **end}


class UpdateEmitter(Protocol):
    """Writes an update at the end of a training step."""

    def emit(
        self,
        name: str,
        *ins: Value,
        of: Value | None,
        role: str = "state",
        name_hint: str = "",
        **attrs: Any,
    ) -> tuple[Value, ...]:
        """Apply operator `name` in phase `update`.

        The results have the `role`, the `name_hint` and the rules of the parameter `of`; None: no
        parameter.
        """

    def state(
        self,
        name: str,
        type: TensorType,
        of: Value | None,
        is_copy: bool = False,
        parts: bool = False,
    ) -> Value:
        """Declare a state of a parameter that is kept from step to step; `of` is None: of no one.

        It is zeros at first, or a copy of the parameter.

        With `parts` only the sum of what devices keep counts (`State.parts`).
        """

    def at(self, span: Span) -> UpdateEmitter:
        """What writes to the same step on behalf of the statement at `span`."""

    def constant(self, number: int | float, dtype: DType) -> Value:
        """A number as a value without dims."""

    def splice(
        self, nodes: Sequence[Node], new: Mapping[Value, Value], of: Value
    ) -> Mapping[Value, Value]:
        """Append nodes of another program, on `new` values in place of those from outside of them.

        Their results follow the parameter `of`. Returns what stands for each value.
        """

    def update(self, old: Value, new: Value) -> None:
        """Record that the parameter or state `old` is `new` in the next step."""


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Operators of one result, on values and numbers; numbers become constants of `dtype`."""

    emitter: UpdateEmitter
    dtype: DType
    of: Value | None = None
    role: str = "state"
    name_hint: str = ""

    def known_as(self, name_hint: str) -> Arithmetic:
        """The same for results with a name hint."""
        return replace(self, name_hint=name_hint)

    def __call__(self, name: str, *operands: Value | float, **attrs: Any) -> Value:
        """The result of operator `name`."""
        (out,) = self.all(name, *operands, **attrs)
        return out

    def all(self, name: str, *operands: Value | float, **attrs: Any) -> tuple[Value, ...]:
        """All results of operator `name`."""
        ins = (x if isinstance(x, Value) else self.number(x) for x in operands)
        about: Mapping[str, Any] = {"of": self.of, "role": self.role, "name_hint": self.name_hint}
        return self.emitter.emit(name, *ins, **about, **attrs)

    def number(self, number: float) -> Value:
        """A constant."""
        return self.emitter.constant(number, self.dtype)


def master_dtype(param: Value) -> DType:
    """The dtype in which a parameter is updated: its own, but at least f32."""
    return param.type.dtype if param.type.dtype.bytes >= F32.bytes else F32


def widened(do: Arithmetic, grad: Value) -> Value:
    """A gradient in the dtype of `do`."""
    return grad if grad.type.dtype == do.dtype else do("cast", grad, dtype=do.dtype)


def emit_rate(schedule: LearningRate, do: Arithmetic, step: Value) -> Value:
    """The learning rate as a scalar in the dtype of `do`; the i32 `step` counts from 1."""
    if schedule.shape == "constant" and not schedule.warmup:
        return do.number(schedule.peak)
    return do("learning_rate", step, shape=schedule.shape, **schedule.arguments, dtype=do.dtype)


# --- compression -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Compression:
    """What is compressed, and how: one of `COMPRESSIONS`, with a value for each argument."""

    name: str
    options: Mapping[str, Any]

    def __str__(self) -> str:
        given = ", ".join(map(str, self.options.values()))
        return f"{self.name}({given})" if given else self.name

    @property
    def warmup(self) -> int:
        """The first steps of a training, in which nothing is compressed."""
        steps: int = self.options.get("warmup", 0)
        return steps

    @property
    def is_of_momentum(self) -> bool:
        """Whether the momentum is compressed, and gradients are not sent."""
        return self.name == "onebit_momentum"


# --- precision ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EightBits:
    """`f8`: products with weights on 8-bit floats (`scaled_products.py`), all else in `rest`.

    A scale is that of a whole tensor, or with `rowwise` of each row of a matrix.
    """

    rowwise: bool
    rest: DType


# --- optimizers ------------------------------------------------------------

Evaluate = Callable[[ast.Expr], Any]
"""The value of an expression: a number, a string, a dtype, or anything illegal for an option."""

# --- tables ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Option:
    """The legal values of an option: `kind`, and the `range` in words that `holds` checks.

    `default` is None where the option is off by default, and `...` where it must be given.
    """

    default: Any
    kind: Literal["number", "integer", "flag", "dtype", "rate", "compression", "precision"]
    range: str = ""
    holds: Callable[[Any], bool] = lambda value: True
    example: str = ""

    @property
    def shown(self) -> str:
        """A legal value, as it is written."""
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


COMMON: Mapping[str, Option] = {
    "clip": _positive(None, "1.0"),
    "accumulate": _count(1, 1),
    "each": Option(False, "flag"),
    "compute": Option(None, "precision", example='"bf16"'),
    "compress": Option(None, "compression", example="powersgd(2)"),
    "seed": _count(0, 0),
}
"""The options of every optimizer that are of all parameters together."""


def _optimizer(lr: float, **own: Option) -> Mapping[str, Option]:
    """The options of an optimizer: the common ones and its own."""
    return {
        "lr": Option(LearningRate("constant", lr), "rate", "above 0", lambda x: x > 0, repr(lr)),
        **own,
        **COMMON,
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


COMPRESSIONS: Mapping[str, Mapping[str, Option]] = {
    "powersgd": {"rank": _count(2, 1)},
    "topk": {"fraction": Option(0.01, "number", "above 0 and at most 1", lambda x: 0 < x <= 1)},
    "onebit": {},
    "int8": {"group": Option(256, "integer", "a multiple of 4", lambda x: x > 0 and x % 4 == 0)},
    "onebit_momentum": {"warmup": _count(..., 1, "100")},
}
"""Every compression of gradients, or of the momentum, with its arguments, in order."""

PRECISIONS: Mapping[str, Mapping[str, Option]] = {
    "f8": {"rowwise": Option(False, "flag"), "rest": Option(BF16, "dtype", example='"f32"')}
}
"""Every value of `compute` beside the float dtypes, with its arguments, in order."""

CALLS: Mapping[str, Mapping[str, Option]] = {**SCHEDULES, **COMPRESSIONS, **PRECISIONS}
"""Every call that an option of an optimizer may be, with its arguments, in order."""


@dataclass(frozen=True, slots=True, eq=False)
class WrittenRule:
    """An optimizer that is a function of the file, with its own options (`written_optimizers.py`).

    `build` makes the named program of a declaration that may call the functions of the file; dims
    that the file does not declare are given beside it.
    """

    function: ast.FunctionDecl
    options: Mapping[str, Option]
    build: Callable[[ast.ProgramDecl, Mapping[str, Dim]], NamedProgram]


Written = Callable[[ast.Name], "WrittenRule | None"]
"""The optimizer that is a function of the file of this name, if there is one."""


def _none_written(name: ast.Name) -> WrittenRule | None:
    return None


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An optimizer with a value for every option that it has."""

    name: str
    options: Mapping[str, Any]
    written: WrittenRule | None = None

    @property
    def own(self) -> Mapping[str, Option]:
        """The options that each parameter may have otherwise."""
        options = self.written.options if self.written else OPTIMIZERS[self.name]
        return {name: option for name, option in options.items() if name not in COMMON}

    def option(self, name: str) -> Any:
        """The value of one option; it must be one of this optimizer."""
        return self.options[name]

    @property
    def lr(self) -> LearningRate:
        """The learning rate of every step."""
        found: LearningRate = self.options["lr"]
        return found

    @property
    def clip(self) -> float | None:
        """The largest norm that all gradients together may have; None for any."""
        found: float | None = self.options["clip"]
        return found

    @property
    def accumulate(self) -> int:
        """The number of batches that a step reads; their gradients are summed."""
        found: int = self.options["accumulate"]
        return found

    @property
    def compute(self) -> DType | None:
        """The dtype of the forward and backward pass; None for that of the program."""
        found: DType | EightBits | None = self.options["compute"]
        return found.rest if isinstance(found, EightBits) else found

    @property
    def eight_bits(self) -> EightBits | None:
        """How products with weights are computed in 8 bits; None where they are not."""
        found: object = self.options["compute"]
        return found if isinstance(found, EightBits) else None

    @property
    def compress(self) -> Compression | None:
        """The compression of gradients; None where they are sent whole."""
        found: Compression | None = self.options["compress"]
        return found

    @property
    def seed(self) -> int:
        """The seed of random draws in training."""
        found: int = self.options["seed"]
        return found


# --- reading a call ----------------------------------------------------------------------------


def literal(node: ast.Expr) -> Any:
    """The value of a literal number or string; any other `node` is returned itself."""
    if isinstance(node, ast.Unary) and node.op == "-" and isinstance(node.operand, ast.Number):
        return -node.operand.value
    return node.value if isinstance(node, ast.Number | ast.String) else node


def resolve(
    call: ast.CallExpr, evaluate: Evaluate = literal, written: Written = _none_written
) -> Optimizer:
    """The optimizer that `minimize … with CALL` names; `evaluate` computes constant expressions.

    A function of the file stands before a built-in optimizer of its name.

    Raises:
        DiagnosticError: all errors of the call (MD0270 to MD0276).
    """
    name = call.function.text
    reader, rule = _OptionReader(evaluate), written(call.function)
    if rule is not None:
        options = reader.options(call, {**rule.options, **COMMON}, positional=1)
        reader.check_compression(call, options)
        reader.raise_failure()
        return Optimizer(name, options, rule)
    if name not in OPTIMIZERS:
        fixes = spelled_right(call.function.span, name, list(OPTIMIZERS))
        help = advice(fixes) or f"there are {_listed(OPTIMIZERS)}"
        reader.report("MD0270", f"unknown optimizer `{name}`", call.function, help, fixes)
        # The options of a misspelt one are read as those of the one that is meant.
        meant = closest(name, list(OPTIMIZERS))
        if meant is None:
            raise DiagnosticError(*reader.found)
        call = replace(call, function=replace(call.function, text=meant))
    options = reader.options(call, OPTIMIZERS[call.function.text], positional=1)
    reader.check_compression(call, options)
    reader.raise_failure()
    return Optimizer(name, options)


def resolve_option(optimizer: Optimizer, name: ast.Name, node: ast.Expr, evaluate: Evaluate) -> Any:
    """The value of one option of an optimizer that each parameter may have otherwise.

    Raises:
        DiagnosticError: there is no such option (MD0272), or its value is wrong (MD0271 to MD0276).
    """
    if name.text not in optimizer.own:
        raise DiagnosticError(no_option(optimizer, name))
    reader = _OptionReader(evaluate)
    value = reader.value(optimizer.name, name.text, optimizer.own[name.text], node)
    reader.raise_failure()
    return value


def no_option(optimizer: Optimizer, name: ast.Name) -> Diagnostic:
    """MD0272 for an option of a parameter that its optimizer does not have."""
    legal = list(optimizer.own)
    fixes = spelled_right(name.span, name.text, legal)
    help = advice(fixes) or f"there are {_listed(optimizer.own)}"
    message = f"`{optimizer.name}` has no option `{name.text}`"
    return Diagnostic("MD0272", message, name.span, help=help, fixes=fixes)


class _OptionReader:
    """Reads the arguments of optimizers and schedules, and collects their errors."""

    def __init__(self, evaluate: Evaluate) -> None:
        self.evaluate = evaluate
        self.found = Diagnostics()
        self.failed = False

    def raise_failure(self) -> None:
        """Raise the errors there are."""
        if self.failed:
            raise DiagnosticError(*self.found) if self.found else Poisoned

    def options(
        self, call: ast.CallExpr, known: Mapping[str, Option], positional: int
    ) -> dict[str, Any]:
        """A value for each of the options `known`; the first `positional` need no name."""
        expressions = self._given(call, known, positional)
        values = {}
        for name, option in known.items():
            if name in expressions:
                values[name] = self.value(call.function.text, name, option, expressions[name])
            elif option.default is ...:
                message = f"`{call.function.text}` needs `{name}`"
                fixes = _with_option(call, name, option)
                help = None if fixes else f"write `{_form(call, known)}`"
                self.report("MD0274", message, call, help, fixes)
            else:
                values[name] = option.default
        return values

    def _given(
        self, call: ast.CallExpr, known: Mapping[str, Option], positional: int
    ) -> dict[str, ast.Expr]:
        """The expression of every option that is given."""
        name, form = call.function.text, f"write `{_form(call, known)}`"
        if call.items is not None or call.out is not None:
            self.report("MD0272", f"`{name}` takes no `[ ]` and no `->`", call, form)
        for extra in call.args[positional:]:
            self.report("MD0272", f"`{name}` takes no further argument here", extra, form)
        expressions = dict(zip(known, call.args[:positional], strict=False))
        for keyword in call.keywords:
            word = keyword.name.text
            if word not in known:
                given_names = {other.name.text for other in call.keywords}
                free = [option for option in known if option not in given_names]
                fixes = spelled_right(keyword.name.span, word, free)
                known_ones = None if fixes else f"there are {_listed(known)}"
                fixes = fixes or (removal(keyword.span, f"leave out `{word}`"),)
                help = advice(fixes, known_ones)
                message = f"`{name}` has no option `{word}`"
                self.report("MD0272", message, keyword.name, help, fixes)
                meant = closest(word, free)
                if meant is not None:
                    expressions[meant] = keyword.value
            elif word in expressions:
                fixes = (removal(keyword.span),)
                self.report("MD0273", f"`{word}` is given twice", keyword, None, fixes)
            else:
                expressions[word] = keyword.value
        return expressions

    def value(self, of: str, name: str, option: Option, node: ast.Expr) -> Any:
        """The value of one option; after an error, which is reported, perhaps of any type."""
        if option.kind == "compression":
            return self._compression(node)
        if option.kind == "precision" and _called(node) in PRECISIONS:
            return self._eight_bits(node)
        if option.kind == "rate" and isinstance(node, ast.CallExpr) and not _is_folded(node):
            return self._schedule(node)
        try:
            value = self._constant(option, node)
        except DiagnosticError as error:
            self.found.add(*error.diagnostics)
            self.failed = True
            return None
        title = f"write `{name}={option.shown}`"
        usual = (Fix(title, (Edit(node.span, option.shown),), safe=False),)
        if not _is_kind(option.kind, value):
            said = f"`{name}` of `{of}` is {_KINDS[option.kind]}"
            word = _called(node)
            meant = [] if word in _MEANT else _WORDS.get(option.kind, [])
            fixes = spelled_right(node.span, word, meant) or usual
            self.report("MD0275", f"{said}, not {_described(value)}", node, None, fixes)
        elif option.kind in ("dtype", "precision"):
            return DTYPES[value] if isinstance(value, str) else value
        elif not option.holds(value):
            said = f"`{name}` of `{of}` is {option.range}, not {value}"
            self.report("MD0276", said, node, None, usual)
        return LearningRate("constant", value) if option.kind == "rate" else value

    def _constant(self, option: Option, node: ast.Expr) -> Any:
        """A number, a string or what a word means; of a word that is none, its node."""
        is_word = option.kind in _WORDS
        if isinstance(node, ast.Ref) and (is_word or node.name.text in _FLAGS):
            return _MEANT.get(node.name.text, node)
        if isinstance(node, ast.CallExpr) and is_word:
            return node
        return self.evaluate(node)

    def _schedule(self, call: ast.CallExpr) -> LearningRate:
        """The schedule that a call such as `cosine(3e-4, 1000)` means."""
        name = call.function.text
        if name not in SCHEDULES:
            fixes = spelled_right(call.function.span, name, list(SCHEDULES))
            help = advice(fixes) or f"there are {_listed(SCHEDULES)}"
            self.report("MD0271", f"unknown schedule `{name}`", call.function, help, fixes)
            return LearningRate("constant", 1.0)
        values = self._values_of(call, SCHEDULES[name], positional=len(SCHEDULES[name]))
        if values is None:
            return LearningRate("constant", 1.0)
        if name == "constant":
            return LearningRate("constant", values["value"])
        if name == "linear_warmup":
            return LearningRate("constant", values["peak"], warmup=values["warmup"])
        self._check_course(call, values)
        return LearningRate("cosine" if name == "cosine" else "linear", **values)

    def _compression(self, node: ast.Expr) -> Compression | None:
        """The compression that a call such as `powersgd(2)` means, or its name alone."""
        name = _called(node)
        if name not in COMPRESSIONS:
            at = node.function if isinstance(node, ast.CallExpr) else node
            fixes = spelled_right(at.span, name, list(COMPRESSIONS))
            help = advice(fixes) or f"there are {_listed(COMPRESSIONS)}"
            said = f"unknown compression `{name}`" if name else "this is no compression"
            self.report("MD0280", said, at, help, fixes)
            return None
        options = COMPRESSIONS[name]
        values = self._values_of(_as_call(node), options, positional=len(options))
        return None if values is None else Compression(name, values)

    def check_compression(self, call: ast.CallExpr, options: Mapping[str, Any]) -> None:
        """Report MD0281 where the momentum is compressed of what has none, or clipped by norms."""
        compress = options["compress"]
        if not isinstance(compress, Compression) or not compress.is_of_momentum:
            return
        places = {keyword.name.text: keyword for keyword in call.keywords}
        fixes: tuple[Fix, ...]
        if not {"beta1", "beta2"} <= options.keys():
            message = f"`{compress}` is for Adam, and this is `{call.function.text}`"
            value, name = places["compress"].value.span, call.function.span
            fixes = (
                Fix("write `compress=onebit`", (Edit(value, "onebit"),), safe=False),
                Fix.write(name, "adam", safe=False),
            )
            self.report("MD0281", message, places["compress"], None, fixes)
        elif options["clip"] is not None:
            message = f"`clip` needs the norm of all gradients, and `{compress}` sends none"
            fixes = (removal(places["clip"].span, "leave `clip` out"),)
            help = advice(fixes, "`compress=onebit` clips what the signs of gradients stand for")
            self.report("MD0281", message, places["clip"], help, fixes)

    def _eight_bits(self, node: ast.Expr) -> EightBits | None:
        """What a call such as `f8(rowwise=true)` means, or its name alone."""
        values = self._values_of(_as_call(node), PRECISIONS[_called(node)], positional=0)
        return None if values is None else EightBits(**values)

    def _values_of(
        self, call: ast.CallExpr, known: Mapping[str, Option], positional: int
    ) -> dict[str, Any] | None:
        """The options of a call in an option; None if one of them is wrong, which is reported."""
        before, self.failed = self.failed, False
        values = self.options(call, known, positional)
        failed, self.failed = self.failed, self.failed or before
        return None if failed else values

    def _check_course(self, call: ast.CallExpr, values: Mapping[str, Any]) -> None:
        """Report a schedule that does not warm up before it ends, or does not fall."""
        name = call.function.text
        if values["warmup"] >= values["steps"]:
            message = f"`{name}` warms up for {values['warmup']} of its {values['steps']} steps"
            self.report("MD0276", message, call, "`warmup` is less than `steps`")
        if values["final"] > values["peak"]:
            message = f"`{name}` ends at {values['final']}, above its peak {values['peak']}"
            self.report("MD0276", message, call, "`final` is at most the peak")

    def report(
        self, code: str, message: str, node: Any, help: str | None, fixes: tuple[Fix, ...] = ()
    ) -> None:
        """Add an error at a node."""
        self.failed = True
        self.found.add(Diagnostic(code, message, node.span, help=help, fixes=fixes))


# --- words -------------------------------------------------------------------------------------

_FLAGS = {"true": True, "false": False}
_FLOATS = [name for name, dtype in DTYPES.items() if dtype.kind == "float"]
_KINDS = {
    "number": "a number",
    "integer": "an integer",
    "flag": "`true` or `false`",
    "dtype": "one of " + ", ".join(f'`"{n}"`' for n in _FLOATS),
    "rate": "a number or a schedule",
}
_KINDS["precision"] = f'{_KINDS["dtype"]}, `"f8"`'

_WORDS = {"flag": list(_FLAGS), "dtype": _FLOATS, "precision": [*_FLOATS, *PRECISIONS]}
"""The words that an option may be, by its kind: they name nothing of the program."""

_MEANT: Mapping[str, Any] = {**_FLAGS, **DTYPES}
"""What words mean, of whatever kind."""


def _is_kind(kind: str, value: Any) -> bool:
    if kind == "flag":
        return isinstance(value, bool)
    if kind in ("dtype", "precision"):
        dtype = DTYPES.get(value) if isinstance(value, str) else value
        return isinstance(dtype, DType) and dtype.kind == "float"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and (kind != "integer" or isinstance(value, int))


def _called(node: ast.Expr) -> str:
    """The name in an option that is a call, a name alone or a string; empty for any other."""
    match node:
        case ast.CallExpr(function=name) | ast.Ref(name=name):
            return name.text
        case ast.String(value=text):
            return text
    return ""


def _as_call(node: ast.Expr) -> ast.CallExpr:
    """A call; a name alone, or a string, is one without arguments."""
    if isinstance(node, ast.CallExpr):
        return node
    name = node.name if isinstance(node, ast.Ref) else ast.Name(_called(node), node.span)
    return ast.CallExpr(name, None, (), (), None, node.span)


def _described(value: Any) -> str:
    match value:
        case bool():
            return f"`{str(value).lower()}`"
        case str():
            return f'"{value}"'
        case ast.Ref(name=name) | ast.CallExpr(function=name):
            return f"`{name.text}`"
    return "this" if isinstance(value, ast.Expr) else kind_of(value)


def _form(call: ast.CallExpr, known: Mapping[str, Option]) -> str:
    """The form of a call of this optimizer, compression or schedule."""
    name = call.function.text
    if "lr" in known:
        needed = (n for n, option in known.items() if n == "lr" or option.default is ...)
        return f"{name}({', '.join(f'{n}={known[n].shown}' for n in needed)})"
    if name in PRECISIONS:
        return f"{name}({', '.join(f'{n}={option.shown}' for n, option in known.items())})"
    is_compression = name in COMPRESSIONS
    shown = (o.shown for o in known.values() if is_compression or o.default is ...)
    return f"{name}({', '.join(shown)})"


def _with_option(call: ast.CallExpr, name: str, option: Option) -> tuple[Fix, ...]:
    """The fix that gives an option which has no default, by a usual value."""
    arguments = (*call.args, *call.keywords)
    if not arguments:
        return ()
    last = max((part.span for part in arguments), key=lambda span: span.end)
    text = f"{name}={option.shown}"
    return (inserted(last.end, f", {text}", last, f"add `{text}`"),)


def _listed(names: Mapping[str, object]) -> str:
    return ", ".join(f"`{n}`" for n in names)


def _is_folded(node: ast.CallExpr) -> bool:
    """Whether a call is of a function of plain numbers, such as `sqrt`."""
    record = load_all().get(node.function.text)
    return record is not None and record.fold is not None
