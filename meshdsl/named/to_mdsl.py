"""A named program written back as `.mdsl` text that means the same.

Read again, the text yields the same named program (`print_program` is equal but for source lines)
if the program came from a text, or was built as one would be. Operators without a name are nested
into expressions, and inlined calls become `def`s again, so that every path, and with it every
parameter and its initial values, keeps its name. Where a program built by other means has an order
or names that no text has, values get further names: the result is the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple

from meshdsl.ir.types import Dim, TensorType
from meshdsl.named.declarations import Declarations
from meshdsl.named.ir import Loop, Node, Op, Output, Program, Value
from meshdsl.named.optimizers import Schedule
from meshdsl.named.sizes import dims_of
from meshdsl.named.written_blocks import INDENT, Block
from meshdsl.named.written_declarations import size_text, written_declarations
from meshdsl.named.written_expressions import Unwritable, Written, pinned
from meshdsl.named.written_functions import Writer, check_names, labels_of
from meshdsl.named.written_goal import optimizer_text
from meshdsl.named.written_lines import wrapped
from meshdsl.named.written_names import Names
from meshdsl.named.written_uses import AT_THE_END, Lives, phases

__all__ = ["Unwritable", "to_mdsl"]


def to_mdsl(
    program: Program,
    declarations: Declarations | None = None,
    sizes: Mapping[str, int] | None = None,
) -> str:
    """The text of `program`, in canonical form, with the meshes and layouts of `declarations`.

    `sizes` are those of dims that are made of others (`sizes.py`), where not in `declarations`.

    Raises:
        Unwritable: it has gradients, two functions of one name that differ, or a number made of
            sizes by what the language does not have.
    """
    if program.states or program.updates or phases(program) - {"forward"}:
        message = "what `grad` and a training step compute cannot be written as text"
        raise Unwritable(message, "write it without `md.grad`; `md.minimize` can be written")
    writer = Writer(program)
    body = _program(writer, program)
    check_names(writer, program)
    known = declarations.dims if declarations else {}
    parts = [_dims(program, known, declarations.sizes if declarations else sizes or {})]
    parts += written_declarations(declarations) if declarations else ()
    parts += [writer.definition_text(d) for d in writer.definitions.values()]
    parts.append(writer.finished(body))
    return "\n\n".join("\n".join(wrapped(part)) for part in parts if part) + "\n"


def _program(writer: Writer, program: Program) -> str:
    lives = Lives()
    lives.read(program.body)
    kept = [o.value for o in program.outputs] + ([program.goal.loss] if program.goal else [])
    lives.last.update((value, AT_THE_END) for value in kept)
    names = Names((), lives, labels_of(program.body, ()))
    for value in program.inputs:
        names.put(value, value.label)
    block = Block(writer, names, program.body, kept)
    block.write()
    returned = ", ".join(_returned(block, program))
    head = f"program {program.name}({', '.join(map(_input, program.inputs))}) {{"
    end = [f"return {returned}", *_goal(block, program)]
    lines = [INDENT + line for line in (*block.lines(), *end)]
    return "\n".join([head, *lines, "}"])


def _goal(block: Block, program: Program) -> Iterator[str]:
    """What is minimised, if anything is."""
    if program.goal is not None:
        (loss,) = block.operands([program.goal.loss])
        yield f"minimize {loss.text} with {optimizer_text(program.goal.optimizer)}"


def _input(value: Value) -> str:
    dtype = "" if value.type.dtype.name == "f32" else f": {value.type.dtype}"
    return f"{value.label}[{pinned(value, value.type.dims)}]{dtype}"


def _returned(block: Block, program: Program) -> Iterator[str]:
    """What stands after `return`: names, and expressions for outputs called `out0`, `out1`."""
    texts = [w.text for w in _output_texts(block, program)]
    for index, (output, text) in enumerate(zip(program.outputs, texts, strict=True)):
        if text == output.name or output.name != f"out{index}":
            yield output.name
        else:
            yield _unnamed(text, output.value) if text.isidentifier() else text


def _output_texts(block: Block, program: Program) -> list[Written]:
    """The outputs; those that must have a name are assigned to it."""
    outputs, known = program.outputs, block.names.text
    values = [o.value for o in outputs]
    wrong = [o for i, o in enumerate(outputs) if o.name != f"out{i}" and not _is_called(o, known)]
    if not wrong:
        return block.operands(values)
    block.flush()
    texts = block.operands(values)
    copies = [
        t if t.text == o.name else Written(block.copied(t.text))
        for o, t in zip(outputs, texts, strict=True)
    ]
    for output, copy in zip(outputs, copies, strict=True):
        if output in wrong:
            block.say(f"{output.name} = {copy.text}")
    return copies


def _is_called(output: Output, known: Mapping[Value, Written]) -> bool:
    return output.value in known and known[output.value].text == output.name


def _unnamed(name: str, value: Value) -> str:
    """The tensor of this name as an expression that is no name, and that nothing is done for."""
    if value.type.dtype.kind == "float":
        return f"{name} + 0.0"
    if value.type.dims:
        return f"{name}^1"
    return f"any({name})" if value.type.dtype.kind == "bool" else f"sum({name})"


# --- dims, meshes, layouts -------------------------------------------------------------------


def _dims(program: Program, known: Mapping[str, Dim], sizes: Mapping[str, int]) -> str:
    """One `dim` declaration with all dims, those of `known` first; `sizes` are made of others."""
    found: dict[str, Dim] = {}
    waiting = [*known.values(), *_dims_of(program)]
    for dim in waiting:
        if dim.name not in found:
            waiting += dims_of(sizes.get(dim.name))
        found.setdefault(dim.name, dim)
        assert found[dim.name] == dim, f"dim {dim} has two sizes"
    entries = [f"{n} = {size_text(sizes.get(n, dim.size))}" for n, dim in found.items()]
    return f"dim {', '.join(entries)}" if entries else ""


def _dims_of(program: Program) -> Iterator[Dim]:
    for value in (*program.inputs, *(p.value for p in program.params)):
        yield from value.type.dims
    yield from _dims_in(tuple(p.init.args for p in program.params))
    yield from _dims_of_nodes(program.body)
    if program.goal is not None:
        yield from _dims_in(tuple(program.goal.optimizer.options.values()))


def _dims_of_nodes(nodes: Sequence[Node]) -> Iterator[Dim]:
    for node in nodes:
        if isinstance(node, Loop):
            yield node.dim
            yield from _dims_of_nodes(node.body)
        else:
            yield from _dims_of_op(node)


def _dims_of_op(op: Op) -> Iterator[Dim]:
    for value in (*op.ins, *op.outs):
        yield from value.type.dims
    for _, attr in op.attrs:
        yield from _dims_in(attr)


def _dims_in(attr: object) -> Iterator[Dim]:
    if isinstance(attr, Dim):
        yield attr
    elif isinstance(attr, TensorType):
        yield from attr.dims
    elif isinstance(attr, tuple):
        for item in attr:
            yield from _dims_in(item)
    elif isinstance(attr, Schedule):
        yield from _dims_in(astuple(attr))
    else:
        yield from dims_of(attr)
