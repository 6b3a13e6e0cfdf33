"""Parser of the text of a placed program, as `printer.py` writes it: for tests of passes.

Costs are those of the steps. The text has neither the rules behind the splits nor the causes of
reshards.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from meshdsl.ir import program as generic
from meshdsl.ir.types import ELEMENT_TYPES, TensorType
from meshdsl.named import ir as named
from meshdsl.ops.opdef import Reads, lookup
from meshdsl.placed import collectives as c
from meshdsl.placed.ir import Apply, Parameter, PlacedLoop, PlacedProgram, PlacedTensor, Reshard
from meshdsl.placed.pipelined import Microbatching, Piped
from meshdsl.placed.placements import Mesh, Placement, Window, placement
from meshdsl.placed.reshard import Route
from meshdsl.schedule.use import ScheduleUse
from meshdsl.schedule.verification import printed
from tests.ir_text import generic as ir
from tests.ir_text.generic import Fields, IRLine, Scanner

_HEAD = re.compile(r"program (\w+), mesh (.*[})]), layout (.*), reduce ([\w-]+)")
_MESH = re.compile(r"(?:(\S+) )?\{ ([^}]*) \}(?: \((.*)\))?")
_GIVEN = re.compile(r"(\S+) over (.*?)((?: \d+)+)")


def parse_program(text: str) -> PlacedProgram:
    """The program of a text. Raises IRSyntaxError."""
    return _PlacedParser(text).program()


def parse_mesh(text: str) -> Mesh:
    """`square { rows: 2, cols: 2 }`; `line { pipe: 4; micro: 8 } (layers over pipe 3 5)`."""
    match_ = _MESH.fullmatch(text)
    assert match_, f"no mesh: {text}"
    pairs = ([axis.split(": ") for axis in part.split(", ")] for part in match_[2].split("; "))
    axes, *times = (tuple((name, int(size)) for name, size in part) for part in pairs)
    texts = (_GIVEN.fullmatch(item) for item in match_[3].split(", ")) if match_[3] else ()
    blocks = ((m[1], tuple(m[2].split(" ")), tuple(map(int, m[3].split()))) for m in texts if m)
    return Mesh(match_[1] or "--mesh", axes, times[0] if times else (), tuple(blocks))


def parse_placed_type(
    parser: ir.Parser[Any], scan: Scanner, mesh: Mesh
) -> tuple[TensorType, Placement]:
    """`f32[batch@rows 64, io 512] partial sum over cols`."""
    type_, splits = parser.tensor_type(scan)
    windows = []
    while scan.accept("window"):
        windows.append(_window(scan))
    placed = placement(mesh, splits)
    if scan.accept("partial"):
        op: Any = scan.next()
        placed = placement(mesh, splits, _over(scan), op)
    return type_, replace(placed, windows=tuple(windows))


def _window(scan: Scanner) -> Window:
    """`(h 32, mul 2, lo -1, hi 1, loop 16)`."""
    scan.expect("(")
    (dim, size), *said = scan.listed(lambda: (scan.next(), scan.next()), ")")
    numbers: dict[str, Any] = {name: _number(text) for name, text in said}
    loop = numbers.pop("loop")
    return Window(dim, int(size), Reads(**numbers), loop)


def _numbers(scan: Scanner, word: str) -> tuple[int, ...]:
    """The numbers behind a word; none without it."""
    numbers = list[int]()
    if scan.accept(word):
        while (text := scan.peek()) and text.isdigit():
            numbers.append(int(scan.next()))
    return tuple(numbers)


def _number(text: str) -> Any:
    """An integer, a float, a truth value or None."""
    named = {"True": True, "None": None, "wrap": "wrap"}
    return named[text] if text in named else float(text) if {*".ien"} & {*text} else int(text)


def parse_step(scan: Scanner, mesh: Mesh, before: Placement) -> c.Step:
    """`all_to_all heads to seq over tp`, of a tensor placed as `before`."""
    kind, words = scan.next(), list[Any]()
    if kind in ("halo", "window"):
        window, axes = _window(scan), _over(scan)
        narrower = c.cut(mesh, before, replace(before, windows=(window,)))
        if kind == "window" and narrower is not None:
            return narrower
        return c.halo(mesh, before, axes, window)
    while scan.peek() != "over":
        words.append(_split(scan) if kind == "permute" else scan.next())
    axes = _over(scan)
    makers: dict[str, Callable[[], c.Step]] = {
        "all_gather": lambda: c.all_gather(mesh, before, words[0], axes),
        "all_reduce": lambda: c.all_reduce(mesh, before, axes),
        "reduce_scatter": lambda: c.reduce_scatter(mesh, before, words[1], axes),
        "all_to_all": lambda: c.all_to_all(mesh, before, words[0], words[2], axes),
        "permute": lambda: c.permute(mesh, before, dict(words[1:])),
        "send": lambda: c.send(before, axes[0]),
        "exchange": lambda: c.exchange(before, axes[0], tuple(map(int, words[1:]))),
        "slice": lambda: c.slice_(mesh, before, words[0], axes),
        "zero_fill": lambda: c.zero_fill(mesh, before, axes[0], words[0], (*words[1:], None)[0]),
    }
    if kind not in makers:
        raise ValueError(f"`{kind}` is no step")
    step = makers[kind]()
    return replace(step, at=int(scan.next())) if scan.accept("at") else step


def _over(scan: Scanner) -> tuple[str, ...]:
    scan.expect("over")
    axes = [scan.next()]
    # In a list of types a comma also separates the next one; `, tp[layers]` ends a collected value.
    while scan.peek() == "," and not (scan.peek(1) in ELEMENT_TYPES and scan.peek(2) == "["):
        scan.next()
        axes.append(scan.next())
    return tuple(axes)


def _split(scan: Scanner) -> Any:
    dim = scan.next()
    if not scan.accept("@"):
        return dim
    return dim, tuple(scan.listed(scan.next, ")")) if scan.accept("(") else (scan.next(),)


class _PlacedParser(ir.Parser[PlacedTensor]):
    LOOP = PlacedLoop

    def begin(self, head: str) -> None:
        match_ = _HEAD.fullmatch(head)
        assert match_, "no head of a placed program"
        self.title, self.layout, self.policy = match_[1], match_[3], match_[4]
        self.mesh = parse_mesh(match_[2])
        self.made: list[PlacedTensor] = []
        self.numbered: dict[str, PlacedTensor] = {}
        self.away: dict[PlacedTensor, str] = {}

    def program(self) -> PlacedProgram:
        pipe, on_stages = self._pipeline(), self._on_stages()
        inputs, params, states, body, outputs, updates = self.sections()
        zeros = named.Init("zeros")
        learned = tuple(
            named.Param(t.value, zeros, 1, 1, away=self.away.get(t, "")) for t in params
        )
        before = named.NamedProgram(
            self.title,
            tuple(t.value for t in inputs),
            learned,
            (),
            tuple(named.Output(name, t.value, self.top.span) for name, t in outputs),
            self.top.span,
            tuple(named.State(t.value, away=self.away.get(t, "")) for t in states),
            tuple(named.Update(old.value, new.value) for old, new in updates),
        )
        placed = PlacedProgram(
            before, self.mesh, self.layout, self.policy, inputs,
            tuple(map(Parameter, learned, params)), body, outputs, tuple(self.made), {},
            states, updates, pipe=pipe and replace(pipe, stage_of=self._stages(on_stages)),
        )  # fmt: skip
        return replace(placed, named=placed.rewritten)

    def _pipeline(self) -> Piped | None:
        """`pipeline layers over pipe, micro`, whose line is consumed; or None."""
        lines = self.top.inner
        if not lines or not lines[0].text.startswith("pipeline "):
            return None
        line = lines.pop(0)
        with self.reading(line) as scan:
            scan.expect("pipeline")
            dim, count = scan.next(), 0
            if dim == "in":
                dim, count = "", int(scan.next())
                scan.expect("stages")
            axis, micro = _over(scan)
            words = ("stages", "sizes", "others")
            order, sizes, others = (_numbers(scan, word) for word in words)
        use = self._use(line.inner[0]) if line.inner else None
        cut = (
            Microbatching(use.dims, use.micro, micro, use.name, use.span, use.unequal)
            if use and use.micro
            else None
        )
        return Piped(dim, axis, micro, line.span, use, cut, order, sizes, others, count)

    def _on_stages(self) -> list[tuple[int, list[str]]]:
        """The lines `on stage 1: %5 %6`, which are consumed."""
        lines = [line for line in self.top.inner if line.text.startswith("on stage ")]
        self.top.inner[:] = [line for line in self.top.inner if line not in lines]
        each = (line.text.removeprefix("on stage ").split(": ") for line in lines)
        return [(int(stage), numbers.split(" ")) for stage, numbers in each]

    def _stages(self, found: list[tuple[int, list[str]]]) -> dict[named.Value, int]:
        return {self.numbered[n].value: stage for stage, numbers in found for n in numbers}

    def _use(self, line: IRLine) -> ScheduleUse:
        """`with one_f_one_b of batch in 8 {chunks=2}`, and below it a row for each stage.

        `forward` stands before it where there are no other passes.
        """
        dims, micro = [], None
        with self.reading(line) as scan:
            forward = scan.accept("forward")
            scan.expect("with")
            name = scan.next()
            if scan.accept("of"):
                while not scan.accept("in"):
                    dims.append(scan.next())
                micro = int(scan.next())
            options = dict(self.attributes(scan))
        rows = "\n".join(row.text for row in line.inner)
        table = printed(rows) if rows else None
        return ScheduleUse(name, tuple(dims), micro, line.span, options, table, forward=forward)

    def entry(self, scan: Scanner, line: IRLine, role: str) -> PlacedTensor:
        """`state  %3 w.m : f32[a 2] on disk`."""
        tensor = super().entry(scan, line, role)
        if scan.accept("on"):
            self.away[tensor] = scan.next()
        return tensor

    # --- values and nodes ---------------------------------------------------------------------

    def value(self, scan: Scanner, line: IRLine) -> Callable[[Fields], PlacedTensor]:
        number = scan.next()
        name = scan.next() if scan.peek() not in (":", "=", ",", "") else None

        def make(fields: Fields) -> PlacedTensor:
            assert number not in self.scope, f"{number} is made twice"
            path = tuple(name.split(".")[:-1]) if name else ()
            about = (fields["type"], line.span, name, path, path, ())
            role, hint = fields.get("role", "activation"), fields.get("name_hint", "")
            value = named.Value(*about, role=role, name_hint=hint)
            if fields.get("loaded"):
                value = replace(value, role="param", rules_from=value)
            self.made.append(PlacedTensor(fields.get("value", value), fields["placement"]))
            self.scope[number] = self.numbered[number] = self.made[-1]
            return self.made[-1]

        return make

    def type(self, scan: Scanner) -> Fields:
        type_, where = parse_placed_type(self, scan, self.mesh)
        fields: Fields = {"type": type_, "placement": where, "loaded": scan.accept("param")}
        return fields | ({"name_hint": scan.next()} if scan.accept("called") else {})

    def type_of(self, value: PlacedTensor) -> Fields:
        return {"type": value.type, "placement": value.placement}

    def make_op(self, op: generic.Op[PlacedTensor]) -> Apply:
        lookup(op.name)
        tags = op.phase, op.block, op.origin, op.kind
        return Apply(op.name, op.ins, op.outs, op.attrs, op.span, *tags)

    def origin(self, name: str) -> named.Value:
        return self.numbered[name].value

    def leaf(self, line: IRLine) -> Reshard | None:
        if " = reshard " not in line.text:
            return None
        with self.reading(line) as scan:
            make = self.value(scan, line)
            scan.expect("=", "reshard")
            source = self.scope[scan.next()]
            dtype = ELEMENT_TYPES[scan.next()] if scan.accept("in") else None
            phase, *_ = self.phase(scan)
            scan.expect(":")
            target = make({**self.type(scan), "value": source.value})
        route = self._route(line.inner, source)
        return Reshard(source, target, route, line.span, lambda: ("",), phase, dtype)

    def _route(self, lines: list[IRLine], source: PlacedTensor) -> Route:
        here, steps = source.placement, list[c.Step]()
        for line in lines:
            with self.reading(line) as scan:
                steps.append(parse_step(scan, self.mesh, here))
            here = steps[-1].after
        return Route.of(tuple(steps), source.type, self.mesh)
