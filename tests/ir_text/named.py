"""Parser of the text of a named program, as `printer.py` writes it: for tests of passes."""

from __future__ import annotations

import re
from collections.abc import Callable

from meshdsl.diagnostics import Source, Span
from meshdsl.ir import program as generic
from meshdsl.named.ir import (
    Init,
    NamedLoop,
    NamedOp,
    NamedProgram,
    Output,
    Param,
    Pin,
    State,
    Update,
    Value,
)
from meshdsl.ops.opdef import lookup
from tests.ir_text import generic as ir
from tests.ir_text.generic import Fields, IRLine, Scanner


def parse_program(text: str) -> NamedProgram:
    """The program of a text. Raises IRSyntaxError."""
    return _NamedParser(text).program()


_HEAD = re.compile(r"program (\w+)")


class _NamedParser(ir.Parser[Value]):
    LOOP = NamedLoop

    def __init__(self, text: str) -> None:
        super().__init__(text)
        # The value whose rules bind another may be inside a loop that has ended.
        self.known: dict[str, Value] = {}

    def begin(self, head: str) -> None:
        found = _HEAD.fullmatch(head)
        assert found, "no head of a named program"
        self.title = found[1]

    def program(self) -> NamedProgram:
        parts = ir.parts(self.top.inner, ("input", "param", "state", "return", "update"))
        inputs = tuple(self.entered(line, "input") for line in parts["input"])
        params = tuple(map(self._param, parts["param"]))
        states = tuple(map(self._state, parts["state"]))
        body = self.nodes(parts[""])
        outputs = tuple(Output(*self.output(line), line.span) for line in parts["return"])
        updates = tuple(Update(*self.pair(line)) for line in parts["update"])
        parts_ = (inputs, params, body, outputs, self.top.span)
        return NamedProgram(self.title, *parts_, states=states, updates=updates)

    def _param(self, line: IRLine) -> Param:
        with self.reading(line) as scan:
            value = self.entry(scan, line, "param")
            scan.expect("=")
            kind = scan.next()
            args = scan.listed(lambda: float(scan.next()), ")") if scan.accept("(") else []
            scan.expect(",", "fan")
            fan_in = int(scan.next())
            scan.expect("to")
            fan_out = int(scan.next())
            return Param(value, Init(kind, tuple(args)), fan_in, fan_out, scan.accept(",", "typed"))

    def _state(self, line: IRLine) -> State:
        with self.reading(line) as scan:
            value = self.entry(scan, line, "state")
            scan.expect("=")
            if scan.accept("zeros"):
                return State(value, value.rules_from, parts=scan.accept("in", "parts"))
            scan.expect("a", "copy", "of")
            assert self.scope[scan.next()] is value.rules_from, "it copies another parameter"
            return State(value, value.rules_from, is_copy=True)

    # --- values and nodes ---------------------------------------------------------------------

    def value(self, scan: Scanner, line: IRLine) -> Callable[[Fields], Value]:
        number = scan.next()
        name = scan.next() if scan.peek() not in (":", "=", ",", "") else None

        def make(fields: Fields) -> Value:
            assert number not in self.scope, f"{number} is made twice"
            path = tuple(name.split(".")[:-1]) if name else ()
            functions = tuple(re.sub(r"_\d+$", "", part) for part in path)
            result = Value(span=line.span, name=name, path=path, functions=functions, **fields)
            self.scope[number] = self.known[number] = result
            return result

        return make

    def type(self, scan: Scanner) -> Fields:
        fields: Fields = {"type": self.tensor_type(scan)[0]}
        pins = []
        while scan.accept("@"):
            dim = scan.next()
            scan.expect(":")
            axes = scan.next()
            pins.append(Pin(dim, () if axes == "none" else tuple(axes.split("+")), _nowhere(scan)))
        fields["pins"] = tuple(pins)
        if scan.accept("as", "["):
            fields["declared"] = tuple(scan.listed(scan.next, "]"))
        if scan.peek() in ("grad", "state", "param"):
            fields["role"] = scan.next()
        if scan.accept("of"):
            fields["rules_from"] = self.known[scan.next()]
        if scan.accept("called"):
            fields["name_hint"] = scan.next()
        return fields

    def type_of(self, value: Value) -> Fields:
        return {"type": value.type}

    def make_op(self, op: generic.Op[Value]) -> NamedOp:
        lookup(op.name)
        tags = op.phase, op.block, op.origin, op.kind
        return NamedOp(op.name, op.ins, op.outs, op.attrs, op.span, *tags)

    def origin(self, name: str) -> Value:
        return self.known[name]


def _nowhere(scan: Scanner) -> Span:
    return Span(Source("program", scan.text), 0, 0)
