"""What every emitted program holds to, so that people read it as one of their own."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, takewhile
from typing import Any

import pytest

from meshdsl.backends.torch.emitter import WrittenFunctions, write
from meshdsl.backends.torch.state_table import StateRow, state_table
from meshdsl.backends.torch.text_lines import TextLine
from meshdsl.backends.torch.text_state import typed
from meshdsl.device.ir import Bucket, Compute, DeviceLoop, Node, Var
from meshdsl.device.liveness import shows_operand
from meshdsl.ir.program import every, loops
from meshdsl.named.identities import OF_STEPS
from meshdsl.named.ir import Value
from meshdsl.ops.opdef import lookup
from tests.report.golden import CASES, Case, made


def written(case: Case) -> WrittenFunctions:
    """The function `device` of a case."""
    return write(made(case).device)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_programs_read_as_written_by_hand(case: Case) -> None:
    functions = written(case)
    assert not list(orphans(functions.lines))
    assert not list(two_names(functions.lines))
    assert not list(unnamed(functions))
    assert not list(types_again(functions.lines))
    assert not list(needless(functions))
    assert not list(untyped(functions))
    assert not list(interruptions(functions.lines))
    assert not list(works(functions.lines))
    assert not list(zeros_of_others(functions.lines))
    assert not list(gradients_of_others(functions.lines))
    assert not list(numbers_of_others(functions))


def test_states_are_those_of_all_parameters_but_some() -> None:
    """Whichever is shorter to read: the parameters with states, or those without."""
    params = {name: f"f32[{name}=2] = ones()" for name in "abcdef"}
    for names in ("abcdef", "abcef", "fedcba"):
        rows = [StateRow(f"{n}.{k}", f"f32[{n}=2] = zeros()", n) for n in names for k in "mv"]
        specs = {name: f"f32[{name}=2] = zeros()" for name in params}
        text = "\n".join(state_table(rows, specs, dict_lines))
        scope: dict[str, Any] = {"PARAMS": params}
        exec(text, scope)
        assert [*scope["STATES"].items()] == [(row.name, row.spec) for row in rows]
        assert ('"d"' in text) == (names == "abcef" or names == "fedcba")
        assert ('"a"' in text) == (names == "fedcba")


def dict_lines(items: Sequence[tuple[str, str]]) -> list[str]:
    """The lines of a dict of texts."""
    return ["STATES = {", *(f'    "{name}": "{spec}",' for name, spec in items), "}"]


def untyped(functions: WrittenFunctions) -> Iterator[str]:
    """Results of operators that have several, without a comment that gives them their type."""
    notes: dict[Node, str] = {}
    mesh = functions.program.mesh
    for line in functions.lines:
        if line.node is not None and not line.is_statement:
            notes[line.node] = notes.get(line.node, "") + line.text.strip().removeprefix("#")
    for node in computed(every(functions.program.body)):
        if len(node.outs) > 1 and not lookup(node.name).overwrites:
            for var in node.outs:  # a type ends with its comment, or where another one begins
                type_ = re.escape(f": {typed(var, mesh)}")
                if not re.search(rf"{type_}($| \w+(, \w+)*: )", notes[node]):
                    yield var.name
    assert not list(zeros_added_once(functions.lines))


def orphans(lines: tuple[TextLine, ...]) -> Iterator[str]:
    """Comments with a source line that no statement of that line follows.

    Before it there may be collectives that it overlaps, of other lines.
    """
    heads = [at for at, line in enumerate(lines) if is_head(line)]
    for at, end in pairwise([*heads, len(lines)]):
        head, below = lines[at], [line for line in lines[at + 1 : end] if line.is_statement]
        if not any(line.place == head.place for line in as_deep(below, depth(head))):
            yield head.text


def interruptions(lines: tuple[TextLine, ...]) -> Iterator[str]:
    """Comments with the source line of a bucket alone, in the midst of statements of another."""
    heads = [at for at, line in enumerate(lines) if is_head(line)]
    for before, at, after in zip(heads, heads[1:], heads[2:], strict=False):
        if lines[before].text.strip() == lines[after].text.strip():
            nodes = {line.node for line in lines[at:after] if line.is_statement}
            if all(isinstance(node, Bucket) for node in nodes):
                yield lines[at].text


def works(lines: tuple[TextLine, ...]) -> Iterator[str]:
    """Collectives in flight that are not called after what they yield."""
    for line in lines:
        if match := re.match(r" *(\w+) = (\w+)_work\.wait\(\)", line.text):
            if stem(match[1]) != stem(match[2]):
                yield line.text


def stem(name: str) -> str:
    """An identifier without the number that tells it from others."""
    return re.sub(r"_\d+$", "", name)


def as_deep(lines: list[TextLine], least: int) -> Iterator[TextLine]:
    """The lines before the first with less than so many spaces before it."""
    return takewhile(lambda line: depth(line) >= least, lines)


def is_head(line: TextLine) -> bool:
    """Whether a line is a comment with the source line of what follows."""
    return bool(line.place) and line.text.lstrip().startswith(f"# {line.place}  ")


def depth(line: TextLine) -> int:
    """The spaces before a line."""
    return len(line.text) - len(line.text.lstrip())


def two_names(lines: tuple[TextLine, ...]) -> Iterator[str]:
    """Assignments of what a call writes over, under another name than it has.

    A variable that the same statement of the program has assigned for itself is no name of a value.
    Where other statements have read a value under its name, what is written over it has another.
    """
    own = {(line.node, name): line for line in lines for name in line.binds if line.node}
    tree = ast.parse("\n".join(line.text for line in lines))
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id=target)], value=ast.Call() as call):
                over = written_over(call)
                line = lines[node.lineno - 1]
                helper = (
                    over is not None and (line.node, over) not in own and is_helper(over, lines)
                )
                if over in (None, target) or helper:
                    continue
                if not is_read_between(str(over), lines[: node.lineno - 1]):
                    yield line.text


def is_read_between(name: str, lines: tuple[TextLine, ...]) -> bool:
    """Whether the last of some lines read a variable: behind its assignment, or another pass."""
    behind = takewhile(lambda n: name not in n.binds or ".pop(" in n.text, reversed(lines))
    return any(re.search(rf"\b{name}\b", line.text) for line in behind if line.is_statement)


def written_over(call: ast.Call) -> str | None:
    """The variable that a call of an operator in place writes over."""
    match call:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name), args=[first, *_]):
            changed: ast.expr = first
        case ast.Call(func=ast.Attribute(value=changed, attr=name)):
            while isinstance(changed, ast.Call) and isinstance(changed.func, ast.Attribute):
                name, changed = changed.func.attr, changed.func.value
        case ast.Call(func=ast.Name(id=name), args=[first, *_]):
            changed = first
        case _:
            return None
    in_place = name.endswith("_") and isinstance(changed, ast.Name)
    return changed.id if in_place and isinstance(changed, ast.Name) else None


def is_helper(name: str, lines: tuple[TextLine, ...]) -> bool:
    """Whether a variable is of the text of one operator alone: no value of the program has it."""
    return all(name not in line.binds for line in lines)


def unnamed(functions: WrittenFunctions) -> Iterator[str]:
    """Identifiers of tensors that the source has a name for, which have nothing of it.

    Tensors that one after the other have one memory have one identifier, of one of them; a view of
    all of a tensor may have that of the tensor, a window that of what reads it and moves nothing.
    """
    named: dict[str, list[str]] = {}
    passed = {
        functions.identifiers.get(var.name)
        for node in every(functions.program.body)
        if isinstance(node, Compute) and lookup(node.name).passes and shows_operand(node)
        for var in node.makes
    }
    for node in every(functions.program.body):
        if isinstance(node, Compute) and shows_operand(node):
            continue
        for var in (v for v in node.makes if v not in functions.program.lists):
            identifier = functions.identifiers.get(var.name)
            if identifier is None or identifier in passed:
                continue
            if word := word_of(var):
                named.setdefault(identifier, []).append(word)
    for identifier, words in named.items():
        if not any(word in identifier for word in words):
            yield f"{identifier}: {words}"


def word_of(var: Var) -> str:
    """What the source calls a variable; the gradient of a subexpression is one at least."""
    if var.value.name:
        return var.value.label.lstrip("_")
    return "d_" if var.value.is_gradient and var.value.source.name else ""


def computed(nodes: Iterable[Node]) -> Iterator[Compute]:
    """The operators among statements."""
    return (node for node in nodes if isinstance(node, Compute))


def types_again(lines: tuple[TextLine, ...]) -> Iterator[str]:
    """Comments that give the tensors below a type that the comment above might have said."""
    for one, other in pairwise(lines):
        both = [TYPED.fullmatch(line.text.strip()) for line in (one, other)]
        if all(both) and len({match[1] for match in both if match}) == 1:
            yield other.text


TYPED = re.compile(r"# [\w, ]+: (\w+\[[^:]*)")
"""A comment with the type of one or several tensors."""


def zeros_added_once(lines: tuple[TextLine, ...]) -> Iterator[str]:
    """Additions of a tensor of zeros and rows, to a sum that the rows could be added to at once."""
    texts = [line.text.strip().partition("  #")[0] for line in lines]
    for at, text in enumerate(texts):
        if made := re.fullmatch(r"(\w+) = \w+\.new_zeros\(.*\)\.index_add_\(\w.*\)", text):
            below = [t for t in texts[at + 1 :] if re.search(rf"\b{made[1]}\b", t)]
            total = below[0].removesuffix(f".add_({made[1]})") if len(below) == 1 else ""
            between = texts[at : texts.index(below[0])] if total.isidentifier() else []
            if between and not any(re.search(rf"\b{total}\b", t) for t in between):
                yield below[0]


def zeros_of_others(lines: tuple[TextLine, ...]) -> Iterator[str]:
    """Sums to which all devices add what is zeros but on one."""
    texts = [line.text.strip() for line in lines if line.is_statement]
    for one, other in pairwise(texts):
        made = re.match(r"(\w+) = \w+ if \w+ == \d+ else torch\.zeros", one)
        if made and re.fullmatch(rf"\w+\.add_\({made[1]}\)", other):
            yield other


def gradients_of_others(lines: tuple[TextLine, ...]) -> Iterator[str]:
    """Gradients that are named after another parameter than their own."""
    text = "\n".join(line.text for line in lines)
    loaded = dict(re.findall(r'^ *(\w+) = params\["([\w.]+)"\]', text, re.MULTILINE))
    for param, named_after in re.findall(r'^ *"([\w.]+)": d_(\w+),', text, re.MULTILINE):
        if loaded.get(named_after, param) != param:
            yield f"d_{named_after} of {param}"


def numbers_of_others(functions: WrittenFunctions) -> Iterator[str]:
    """Gradients of `tanh_2` that are named `d_tanh_3`, where nothing else is named `d_tanh_2`."""
    named: dict[Value, str] = {}
    makes = [v for node in every(functions.program.body) for v in node.makes]
    for var in makes:
        if var.name in functions.identifiers:
            named.setdefault(var.value, functions.identifiers[var.name])
    names_of_others = {name for value, name in named.items() if not value.is_gradient}
    for value, name in named.items():
        if not value.is_gradient or value.name or value.source not in named:
            continue
        own = f"d_{named[value.source]}"
        of_others = {n for v, n in named.items() if v.source != value.source} | names_of_others
        if base(name) == base(own) and name != own and own not in of_others:
            yield f"{name} of {named[value.source]}"


def base(name: str) -> str:
    return re.sub(r"(_\d+)?$", "", name)


def needless(functions: WrittenFunctions) -> Iterator[str]:
    """Operators that a step may leave out, values that are kept twice, 1.0 or 0.0 by a condition.

    And differences that are the same on all devices, of where elements and their windows begin.

    A forward pass may be differentiated by autograd: what a cast says there is not known.
    """
    for loop in loops(functions.program.body, DeviceLoop):
        copies = {n.out: n.ins[0] for n in computed(loop.body) if n.name == "identity"}
        kept = [copies.get(c.inside, c.inside) for c in loop.collected if c.is_list]
        yield from (var.name for var, count in Counter(kept).items() if count > 1)
    for node in computed(every(functions.program.body)) if functions.program.updates else ():
        if node.name in OF_STEPS and node.ins[0].local.dtype == node.out.local.dtype:
            yield node.out.name
    tree = ast.parse("\n".join(line.text for line in functions.lines))
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        match call:
            case ast.Call(func=ast.Attribute(attr="where"), args=[_, one, ast.Constant(value=0.0)]):
                if ast.unparse(one).startswith("torch.full((), 1.0,"):
                    yield ast.unparse(call)
            case ast.Call(func=ast.Name(id="cut_out"), args=[_, starts, _]):
                if names_in(starts):  # no golden program has blocks of several sizes there
                    yield ast.unparse(call)


def names_in(tree: ast.expr) -> list[str]:
    """The variables that an expression reads."""
    return [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
