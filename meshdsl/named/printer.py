"""The named program as text: values numbered in order of definition, one operator per line.

```
program mlp
  input  %0 x : f32[batch 64, io 512]
  param  %2 w : f32[io 512, hidden 2048] = normal, fan 512 to 2048
  # 17 | h = relu(einsum(x, w -> [batch, hidden]) + b)
  %5 = einsum %0 %2 : f32[batch 64, hidden 2048]
  %9 = einsum %0 %7 [backward] : f32[io 512, hidden 2048] grad of %2
  return loss = %11
```
"""

from __future__ import annotations

from collections.abc import Iterator

from meshdsl.ir.printer import INDENT, Numbers, Printer, type_text
from meshdsl.named.ir import NamedProgram, Param, Value


def print_program(program: NamedProgram) -> str:
    """The text of a named program."""
    return "\n".join(_NamedPrinter().program(program)) + "\n"


def label(value: Value) -> str:
    """The name of a value with a space before it; empty for a subexpression."""
    return f" {value.name}" if value.name else ""


def called(value: Value) -> str:
    """The name hint of a subexpression that has one; empty for any other value."""
    return f" called {value.name_hint}" if value.name_hint and not value.name else ""


class _NamedPrinter(Printer[Value]):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = Numbers()
        self.entered: set[Value] = set()

    def program(self, program: NamedProgram) -> Iterator[str]:
        self.entered.update(p.value for p in program.params)
        self.entered.update(s.value for s in program.states)
        yield f"program {program.name}"
        for value in program.inputs:
            yield f"{INDENT}input  {self.typed(value)}"
        for param in program.params:
            yield f"{INDENT}param  {self._param(param)}"
        for state in program.states:
            begins = f"a copy of {self.numbers[state.of]}" if state.is_copy else "zeros"
            begins += " in parts" if state.parts else ""
            yield f"{INDENT}state  {self.typed(state.value)} = {begins}"
        yield from self.nodes(program.body, 1)
        for output in program.outputs:
            yield f"{INDENT}return {output.name} = {self.numbers[output.value]}"
        for update in program.updates:
            yield f"{INDENT}update {self.numbers[update.old]} = {self.numbers[update.new]}"

    def _param(self, param: Param) -> str:
        args = f"({', '.join(f'{x:g}' for x in param.init.args)})" if param.init.args else ""
        typed = ", typed" if param.typed else ""
        init = f"{param.init.kind}{args}, fan {param.fan_in} to {param.fan_out}{typed}"
        return f"{self.typed(param.value)} = {init}"

    def name(self, value: Value) -> str:
        return self.numbers[value]

    def origin(self, of: Value) -> str:
        return self.numbers[of]

    def defined(self, value: Value) -> str:
        return f"{self.numbers[value]}{label(value)}"

    def type(self, value: Value) -> str:
        """The type, pins, the dims by which rules know it, its role, whose rules, its name hint."""
        pins = "".join(f" @{p.dim}:{'+'.join(p.axes) or 'none'}" for p in value.pins)
        dims = value.declared
        known_by = "" if dims in (None, value.type.names) else f" as [{', '.join(dims or ())}]"
        plain = value in self.entered or value.role in ("activation", "input", "seed")
        role = "" if plain else f" {value.role}"
        source = value.rules_from
        whose = f" of {self.numbers[source]}" if source in self.numbers else ""
        return f"{type_text(value.type)}{pins}{known_by}{role}{whose}{called(value)}"
