"""Parser of the text of a program, of any stage, as `printer.py` writes it.

For tests of passes, which are ten lines of text and the ten lines expected of them. A comment
`# 17 | …` is the source line of what follows it; any other comment is for the reader of the text.
Text that cannot be read raises IRSyntaxError.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from meshdsl.diagnostics import Source, Span
from meshdsl.ir.program import Carry, Collected, Loop, Op, OpKind, Origin, Stacked
from meshdsl.ir.types import ELEMENT_TYPES, Dim, TensorType

V = TypeVar("V")
T = TypeVar("T")

Fields = dict[str, Any]
"""The fields of a value that are known, by name."""

_TOKEN = re.compile(r'\s*("(?:[^"\\]|\\.)*"|[%\w.+-]+|[][(){}=,:;@|])')
_COMMENT = re.compile(r"# (\d+) \| (.*)")
_TYPE = re.compile(rf"\b(?:{'|'.join(ELEMENT_TYPES)})\[([^]]*)\]")
_DIM = re.compile(r"([\w.]+)(@\([^)]*\)|@[\w.]+)? (\d+)(?: of (\d+))?(?=,|$)")
_NUMBER = re.compile(r"-?(\d|inf\b|nan\b)")


class IRSyntaxError(ValueError):
    """A line that is not legal in a program: its number, the error, and its text."""


@dataclass(slots=True)
class IRLine:
    """One line with its number, the lines indented below it, and the source line it comes from."""

    text: str
    number: int
    span: Span
    inner: list[IRLine] = field(default_factory=list)


class Scanner:
    """The tokens of one line, from the first to the last."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = _TOKEN.findall(text)
        if "".join(self.tokens) != re.sub(r"\s+(?=(?:[^\"]*\"[^\"]*\")*[^\"]*$)", "", text):
            raise ValueError("it has a sign that means nothing")
        self.at = 0

    def peek(self, ahead: int = 0) -> str:
        """The next token, or nothing at the end."""
        at = self.at + ahead
        return self.tokens[at] if at < len(self.tokens) else ""

    def next(self) -> str:
        """Consume the next token and return it."""
        token = self.peek()
        if not token:
            raise ValueError("it ends too early")
        self.at += 1
        return token

    def accept(self, *tokens: str) -> bool:
        """Consume `tokens` if they are next; whether they were."""
        if any(self.peek(i) != token for i, token in enumerate(tokens)):
            return False
        self.at += len(tokens)
        return True

    def expect(self, *tokens: str) -> None:
        """Consume `tokens`, which must be next."""
        if not self.accept(*tokens):
            before = f"before `{self.peek()}`" if self.peek() else "at the end"
            raise ValueError(f"`{' '.join(tokens)}` is missing {before}")

    def end(self) -> None:
        """Raise ValueError unless all tokens were consumed."""
        if self.peek():
            raise ValueError(f"`{self.peek()}` is one too many")

    def listed(self, item: Callable[[], T], end: str) -> list[T]:
        """Items separated by commas, up to and including `end`."""
        items: list[T] = []
        while not self.accept(end):
            if items:
                self.expect(",")
            items.append(item())
        return items


class Parser(Generic[V]):
    """Parser of blocks; a stage defines how its values are made, and reads nodes that only it has.

    `scope` has the values by the names that refer to them.
    """

    LOOP: type[Loop[Any, Any]]
    """The loops of the stage."""

    def __init__(self, text: str) -> None:
        self.top = _tree(text)
        self.scope: dict[str, V] = {}
        with self.errors(self.top):
            self.begin(self.top.text)
        self.dims: dict[str, int] = {}
        for name, axes, size, of in (
            dim for type_ in _TYPE.findall(text) for dim in _DIM.findall(type_)
        ):
            full_size = int(of or self.whole(int(size), tuple(re.findall(r"[\w.]+", axes))))
            if self.dims.setdefault(name, full_size) != full_size:
                raise IRSyntaxError(
                    f"dim {name} is of two sizes: {self.dims[name]} and {full_size}"
                )

    # --- hooks of a stage ---------------------------------------------------------------------

    def begin(self, head: str) -> None:
        """Read the first line, before anything else."""

    def whole(self, size: int, axes: tuple[str, ...]) -> int:
        """The size of a dim that is written with `size` and split over `axes`."""
        return size

    def value(self, scan: Scanner, line: IRLine) -> Callable[[Fields], V]:
        """Read the name of a value at its definition; the result makes the value from its type."""
        raise NotImplementedError

    def type(self, scan: Scanner) -> Fields:
        """Read the type of a value, and the other fields that a stage gives it."""
        raise NotImplementedError

    def origin(self, name: str) -> Any:
        """The value of the named program that an origin names."""
        raise NotImplementedError

    def make_op(self, op: Op[V]) -> Any:
        """The operator of the stage."""
        raise NotImplementedError

    def make_loop(self, loop: Loop[V, Any], scan: Scanner, begun: Any, line: IRLine) -> Any:
        """The loop of the stage, on `line`; `scan` is behind the dim, `begun` is from `first`."""
        reverse = scan.accept("from", "the", "last")
        parts = (loop.carries, loop.stacked, loop.body, loop.span, loop.collected)
        return self.LOOP(loop.dim, *parts, reverse, *self.phase(scan))

    def entered(self, line: IRLine, role: str) -> V:
        """An input, parameter or state."""
        with self.reading(line) as scan:
            return self.entry(scan, line, role)

    def type_of(self, value: V) -> Fields:
        """The fields that `type` reads, of an existing value."""
        raise NotImplementedError

    def first(self, lines: list[IRLine], outside: dict[str, V], dim: Dim) -> Any:
        """Read the stage's own lines at the beginning of a loop."""
        return None

    def block(self, lines: list[IRLine]) -> tuple[Any, ...]:
        """The nodes of a loop."""
        return self.nodes(lines)

    def leaf(self, line: IRLine) -> Any:
        """Read a node that only this stage has, or return None."""
        return None

    def collected(
        self, scan: Scanner, line: IRLine, inside: dict[str, V], dim: Dim
    ) -> Collected[V]:
        """A collected value of a loop."""
        scan.expect("collect")
        outer = self.typed(scan, line)
        scan.expect("[", dim.name, "]", "=")
        return Collected(inside[scan.next()], outer)

    # --- common to all stages -----------------------------------------------------------------

    @contextmanager
    def errors(self, line: IRLine) -> Iterator[None]:
        """Give errors the number of their line; in a loop it is the innermost one."""
        try:
            yield
        except IRSyntaxError:
            raise
        except KeyError as error:
            message = f"line {line.number}: `{error.args[0]}` is not known: {line.text}"
            raise IRSyntaxError(message) from None
        except (ValueError, IndexError, AssertionError) as error:
            raise IRSyntaxError(f"line {line.number}: {error}: {line.text}") from error

    @contextmanager
    def reading(self, line: IRLine) -> Iterator[Scanner]:
        """The tokens of a line, all of which must be consumed."""
        with self.errors(line):
            scan = Scanner(line.text)
            yield scan
            scan.end()

    def typed(self, scan: Scanner, line: IRLine) -> V:
        """The value at its definition, with its type."""
        make = self.value(scan, line)
        scan.expect(":")
        return make(self.type(scan))

    def tensor_type(self, scan: Scanner) -> tuple[TensorType, dict[str, tuple[str, ...]]]:
        """`f32[batch@rows 64, io 512]`: the type, and the axes that split its dims."""
        dtype, splits = ELEMENT_TYPES[scan.next()], {}
        scan.expect("[")

        def dim() -> Dim:
            name = scan.next()
            if scan.accept("@"):
                splits[name] = tuple(self.axes(scan))
            dim_ = Dim(name, int(scan.next()))
            if scan.accept("of"):  # of a dim whose blocks differ in size
                scan.next()
            return dim_

        return TensorType(tuple(scan.listed(dim, "]")), dtype), splits

    def axes(self, scan: Scanner) -> list[str]:
        """`rows`, or `(x, y)`."""
        return scan.listed(scan.next, ")") if scan.accept("(") else [scan.next()]

    def sections(self) -> tuple[tuple[Any, ...], ...]:
        """The inputs, parameters, states, nodes, outputs and updates of the program, in order."""
        by_word = parts(self.top.inner, ("input", "param", "state", "return", "update"))
        begun = (
            tuple(self.entered(line, role) for line in by_word[role])
            for role in ("input", "param", "state")
        )
        return (
            *begun,
            self.nodes(by_word[""]),
            tuple(self.output(line) for line in by_word["return"]),
            tuple(self.pair(line) for line in by_word["update"]),
        )

    def nodes(self, lines: Iterable[IRLine]) -> tuple[Any, ...]:
        """The nodes of a block."""
        return tuple(self.node(line) for line in lines)

    def node(self, line: IRLine) -> Any:
        """One node of a block."""
        with self.errors(line):
            if line.text.startswith("repeat "):
                return self.loop(line)
            node_ = self.leaf(line)
            return self.op(line) if node_ is None else node_

    def op(self, line: IRLine) -> Any:
        """`%5 h = relu %4 {…} [backward] : f32[batch 64]`."""
        with self.reading(line) as scan:
            makers = scan.listed(lambda: self.value(scan, line), "=")
            name, ins = scan.next(), []
            while scan.peek() not in ("{", "[", ":"):
                ins.append(self.scope[scan.next()])
            attrs = self.attributes(scan)
            tags = self.phase(scan)
            scan.expect(":")
            outs: list[V] = []
            for make in makers:
                if outs:
                    scan.expect(",")
                outs.append(make(self.type(scan)))
            kind = OpKind(name) if name in [*OpKind] else None
            name = kind.operator if kind else name
            op_ = Op(name, tuple(ins), tuple(outs), attrs, line.span, *tags, kind=kind)
            return self.make_op(op_)

    def phase(self, scan: Scanner) -> tuple[str, int | None, Origin | None]:
        """`[backward of %5]`, `[recompute 1]`, `[update]` or nothing."""
        phase, block, origin = "forward", None, None
        if scan.accept("["):
            if scan.peek() != "recompute":
                phase = scan.next()
                is_copy = scan.accept("copy")
                origin = Origin(self.origin(scan.next()), is_copy) if scan.accept("of") else None
                scan.accept(",")
            if scan.accept("recompute"):
                block = int(scan.next())
            scan.expect("]")
        return phase, block, origin

    def attributes(self, scan: Scanner) -> tuple[tuple[str, Any], ...]:
        """`{dims=(batch hidden)}` or nothing."""

        def pair() -> tuple[str, Any]:
            name = scan.next()
            scan.expect("=")
            return name, self.constant(scan)

        return tuple(scan.listed(pair, "}")) if scan.accept("{") else ()

    def constant(self, scan: Scanner) -> Any:
        """One constant of an operator."""
        if scan.accept("("):
            items = []
            while not scan.accept(")"):
                items.append(self.constant(scan))
            return tuple(items)
        if scan.peek(1) == "[" and scan.peek() in ELEMENT_TYPES:
            return self.tensor_type(scan)[0]
        word = scan.next()
        if word.startswith('"'):
            return json.loads(word)
        if _NUMBER.match(word):
            return int(word) if re.fullmatch(r"-?\d+", word) else float(word)
        if word in ("True", "False", "None"):
            return {"True": True, "False": False, "None": None}[word]
        return ELEMENT_TYPES[word] if word in ELEMENT_TYPES else Dim(word, self.dims[word])

    def entry(self, scan: Scanner, line: IRLine, role: str) -> V:
        """`input  %0 x : f32[batch 4]`; a stage may read more behind the type."""
        scan.expect(role)
        make = self.value(scan, line)
        scan.expect(":")
        return make({**self.type(scan), "role": role})

    def output(self, line: IRLine) -> tuple[str, V]:
        """`return loss = %11`."""
        with self.reading(line) as scan:
            scan.expect("return")
            name = scan.next()
            scan.expect("=")
            return name, self.scope[scan.next()]

    def pair(self, line: IRLine) -> tuple[V, V]:
        """The two values of `update %2 = %9`."""
        with self.reading(line) as scan:
            scan.expect("update")
            one = self.scope[scan.next()]
            scan.expect("=")
            return one, self.scope[scan.next()]

    def loop(self, line: IRLine) -> Any:
        """`repeat layers 4`, and the lines below it."""
        head = Scanner(line.text)
        head.expect("repeat")
        dim, outside = Dim(head.next(), int(head.next())), dict(self.scope)
        by_word = parts(line.inner, ("slice", "carry", "next", "collect", "ahead"))
        stacked = tuple(self.slice(part, outside, dim) for part in by_word["slice"])
        carried = dict(self._carry(part, outside) for part in by_word["carry"])
        begun = self.first(by_word["ahead"], outside, dim)
        body = self.block(by_word[""])
        inside, self.scope = self.scope, outside
        carries = tuple(self._next(carried, part, inside) for part in by_word["next"])
        if carried:
            raise ValueError(f"no `next` of {', '.join(carried)}")
        collected = tuple(self._collected(part, inside, dim) for part in by_word["collect"])
        plain = Loop(dim, carries, stacked, body, line.span, collected)
        loop_ = self.make_loop(plain, head, begun, line)
        head.end()
        return loop_

    def slice(self, line: IRLine, outside: dict[str, V], dim: Dim) -> Stacked[V]:
        """`slice %6 u : f32[hidden 8] = %3[layers]`."""
        with self.reading(line) as scan:
            scan.expect("slice")
            inside = self.typed(scan, line)
            scan.expect("=")
            outer = outside[scan.next()]
            scan.expect("[", dim.name, "]")
            return Stacked(outer, inside)

    def _carry(self, line: IRLine, outside: dict[str, V]) -> tuple[str, tuple[V, V]]:
        """The name, initial value and inside value of `carry %7 h : f32[batch 4] = %5`.

        The name is the key of the matching `next` line.
        """
        with self.reading(line) as scan:
            scan.expect("carry")
            name = scan.peek()
            inside = self.typed(scan, line)
            scan.expect("=")
            return name, (outside[scan.next()], inside)

    def _next(self, carried: dict[str, tuple[V, V]], line: IRLine, known: dict[str, V]) -> Carry[V]:
        """`next  %7 = %8; at the end %9`, of one of the `carried`, which is taken out."""
        with self.reading(line) as scan:
            scan.expect("next")
            init, inside = carried.pop(scan.next())
            scan.expect("=")
            next_ = known[scan.next()]
            scan.expect(";", "at", "the", "end")
            return Carry(init, inside, next_, self.value(scan, line)(self.type_of(inside)))

    def _collected(self, line: IRLine, inside: dict[str, V], dim: Dim) -> Collected[V]:
        with self.reading(line) as scan:
            return self.collected(scan, line, inside, dim)


def parts(lines: Iterable[IRLine], words: Iterable[str]) -> dict[str, list[IRLine]]:
    """Lines by their first word; all others under the empty word."""
    by_word: dict[str, list[IRLine]] = {word: [] for word in ("", *words)}
    for line in lines:
        word = line.text.split(" ", 1)[0]
        by_word[word if word in by_word else ""].append(line)
    return by_word


def _tree(text: str) -> IRLine:
    """The first line, and below it all others by their indentation.

    A comment gives the source line of the line that follows it.
    """
    rows = [(n, row) for n, row in enumerate(text.splitlines(), 1) if row.strip()]
    comments = {n: _COMMENT.match(row.strip()) for n, row in rows}
    numbered = {int(match_[1]): match_[2] for match_ in comments.values() if match_}
    source = Source(
        "program", "\n".join(numbered.get(n + 1, "") for n in range(max(numbered, default=0)))
    )
    here, top = Span(source, len(source.text), len(source.text)), IRLine("", 0, Span(source, 0, 0))
    levels = [(-1, top)]
    for number, row in rows:
        if comment := comments[number]:
            start, end = source.bounds(int(comment[1]))
            here = Span(source, start, end)
        if row.lstrip().startswith("#"):
            continue
        depth = len(row) - len(row.lstrip())
        while levels[-1][0] >= depth:
            levels.pop()
        line = IRLine(row.strip(), number, here)
        levels[-1][1].inner.append(line)
        levels.append((depth, line))
    if len(top.inner) != 1:
        raise IRSyntaxError("a program has one first line, and all others indented below it")
    return top.inner[0]
