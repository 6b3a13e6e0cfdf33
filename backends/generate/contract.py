"""The programs that generate: one that reads a token, and one that reads whole prompts, if any.

The first takes a token, for each of a batch perhaps, and its position (one number, or one for each
token), both integers, and first returns the logits of the next token: floats with the dims of the
token and one more, the vocabulary. What it has to know of earlier tokens is state (`:=`).

The second has the same state. It takes the tokens of prompts, with one more dim for their
positions, and how many each prompt has, and returns the logits after the last one of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from meshdsl.backends.draws import index_bounds
from meshdsl.diagnostics import Diagnostics, advice, all_closest, fail
from meshdsl.ir.types import TensorType
from meshdsl.named.ir import NamedProgram, Output
from meshdsl.named.program_choice import is_trained
from meshdsl.option_edits import one_of, refuse
from meshdsl.pipeline import Compilation, Known
from meshdsl.records import dataclass

FORM = (
    "write one of a token, as in examples/lm.mdsl: `program lm_step(token[batch]: i32, pos[]: i32)`"
    " that keeps what came before with `:=` and returns the logits"
)
PREFILL_FORM = (
    "write one as in examples/lm.mdsl: `program lm_prompt(tokens[batch, seq]: i32, "
    "count[batch]: i32)` that assigns the same states and returns the logits after each prompt"
)
NO_PREFILL = "none"
"""What is written in place of a program's name, to read prompts token by token."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """The inputs and logits of a program that reads prompts of up to `width` tokens at once."""

    tokens: str
    count: str
    logits: str
    width: int


@dataclass(frozen=True, slots=True)
class Contract:
    """The names of the inputs and of the logits; `words` is the dim of these.

    `room` is the number of positions, if the program uses the position as an index, and `counted`
    the number of tokens. `states` are the parameters that begin anew. `row` is the dim of the
    tokens of a step, if they have one, and `rows` its size. Every row has a position of its own if
    `own_positions`.
    """

    token: str
    position: str
    logits: str
    words: str
    counted: int
    room: int | None
    states: tuple[str, ...]
    row: str | None = None
    rows: int = 1
    own_positions: bool = False
    prefill: Prefill | None = None


def contract_of(program: NamedProgram) -> Contract | str:
    """The contract of a program of one token, or what it lacks."""
    if lack := _common_lack(program):
        return lack
    token, position = program.inputs
    if len(token.type.dims) > 1:
        return f"its first input, the token, is {token.type}: there is one, or one for each row"
    if position.type.dims not in ((), token.type.dims):
        return f"its second input, the position, is {position.type}, not one number"
    logits = program.outputs[0]
    words = _vocabulary(logits, token.type)
    if isinstance(words, str):
        return words
    states = tuple(str(u.old.name) for u in program.updates)
    room = index_bounds(program).get(position)
    row = token.type.dims[0] if token.type.dims else None
    return Contract(
        *(token.label, position.label, logits.name, words[0], words[1], room, states),
        row=None if row is None else row.name,
        rows=1 if row is None else row.size,
        own_positions=bool(position.type.dims),
    )


def prefill_of(program: NamedProgram, step: NamedProgram) -> Prefill | str:
    """The contract of a program that reads prompts for the program of one token, or its lack."""
    if lack := _common_lack(program):
        return lack
    token = step.inputs[0].type
    tokens, count = program.inputs
    positions = [d for d in tokens.type.dims if d not in token.dims]
    if len(positions) != 1 or len(tokens.type.dims) != len(token.dims) + 1:
        return f"its first input, the tokens, is {tokens.type}: they have the dims of the token"
    if count.type.dims != token.dims:
        return f"its second input, how many tokens each prompt has, is {count.type}"
    logits = program.outputs[0]
    words = _vocabulary(logits, token)
    if isinstance(words, str):
        return words
    if words != _vocabulary(step.outputs[0], token):
        return f"`{logits.name}` is over another vocabulary than that of `{step.name}`"
    states = [{str(u.old.name): u.old.type for u in p.updates} for p in (program, step)]
    if states[0] != states[1]:
        return f"it assigns other states than `{step.name}`"
    return Prefill(tokens.label, count.label, logits.name, positions[0].size)


def _common_lack(program: NamedProgram) -> str:
    """What both forms have, and a program lacks; empty if it has it."""
    if program.goal is not None:
        return "it trains"
    if [v.type.dtype.kind == "int" for v in program.inputs] != [True, True]:
        return "its inputs are not two tensors of integers, a token and its position"
    if not program.outputs:
        return "it returns nothing"
    return "" if program.updates else "it keeps nothing of earlier tokens with `:=`"


def _vocabulary(logits: Output, token: TensorType) -> tuple[str, int] | str:
    """The name and size of the dim that logits have beside those of the token, or what is wrong."""
    type_ = logits.value.type
    words = [d for d in type_.dims if d not in token.dims]
    if len(words) != 1 or len(type_.dims) != len(token.dims) + 1:
        return f"`{logits.name}` is {type_}, not the token's dims and the vocabulary"
    if type_.dtype.kind != "float":
        return f"`{logits.name}` is {type_}: logits are floats"
    return words[0].name, words[0].size


@dataclass(frozen=True, slots=True)
class Chosen:
    """The programs that generate, and their contract."""

    step: Compilation
    prefill: Compilation | None
    contract: Contract


def chosen(made: Compilation, prefill: str | None = None) -> Chosen:
    """The programs of a file that generate.

    That of one token is the one asked for by the options, or the only one of that form. The one
    that reads prompts is `prefill`, or the only one of its form; none for `NO_PREFILL`. Raises
    MD0624 where there is none, or more than one.
    """
    programs = made.declarations.programs
    asked = made.options.program
    tried = {n: p for n, p in programs.items() if asked in (None, n)} or programs
    candidates: list[tuple[Compilation, Contract]] = []
    reasons: list[str] = []
    others: dict[str, Compilation] = {}
    for name, node in tried.items():
        contract: Contract | str = "it trains"
        if not is_trained(node):
            others[name] = one = _of(made, name)
            contract = contract_of(one.named)
        if isinstance(contract, Contract):
            candidates.append((one, contract))
        else:
            reasons.append(f"`{name}`: {contract}")
    if not candidates:
        message = "no program of this file gives the next token of a text"
        fail("MD0624", "\n".join([message, *reasons]), help=FORM)
    if len(candidates) > 1:
        names = ", ".join(one.named.name for one, _ in candidates)
        message = f"several programs give the next token: {names}"
        names_of = [one.named.name for one, _ in candidates]
        refuse("MD0624", message, one_of("--program", names_of))
    return with_prefill(Chosen(candidates[0][0], None, candidates[0][1]), prefill, others)


def of_one_token(step: Compilation) -> Chosen:
    """A program of one token, without one that reads prompts. Raises MD0624."""
    contract = contract_of(step.named)
    if isinstance(contract, str):
        message = f"`{step.named.name}` does not give the next token of a text: {contract}"
        fail("MD0624", message, step.named.span, help=FORM)
    return Chosen(step, None, contract)


def with_prefill(
    chosen: Chosen, asked: str | None, known: Mapping[str, Compilation] = MappingProxyType({})
) -> Chosen:
    """With the program that reads prompts; see `chosen`. `known` are programs that are compiled.

    Raises MD0624.
    """
    reader = None if asked == NO_PREFILL else _reader(chosen.step, asked, known)
    if reader is None:
        return chosen
    prefill = prefill_of(reader.named, chosen.step.named)
    assert isinstance(prefill, Prefill), f"{reader.named.name}: {prefill}"
    return Chosen(chosen.step, reader, replace(chosen.contract, prefill=prefill))


def _reader(
    step: Compilation, asked: str | None, known: Mapping[str, Compilation]
) -> Compilation | None:
    """The program that reads prompts, if any. Raises MD0624."""
    programs = {n for n, p in step.declarations.programs.items() if not is_trained(p)} | {*known}
    if asked == step.named.name:
        fail("MD0624", f"`{asked}` is the program of one token", help=PREFILL_FORM)
    if asked is not None and asked not in programs:
        fixes = one_of("--prefill", all_closest(asked, sorted(programs)))
        help = advice(fixes) if fixes else PREFILL_FORM
        fail("MD0624", f"no program `{asked}` reads prompts", help=help, fixes=fixes)
    names = sorted(n for n in programs if n != step.named.name and asked in (None, n))
    readers = {n: known.get(n) or _of(step, n) for n in names}
    contracts = {n: prefill_of(one.named, step.named) for n, one in readers.items()}
    fitting = [n for n, contract in contracts.items() if isinstance(contract, Prefill)]
    if asked is not None and not fitting:
        fail("MD0624", f"`{asked}` reads no prompts: {contracts.get(asked)}", help=PREFILL_FORM)
    if len(fitting) > 1:
        message = f"several programs read prompts: {', '.join(fitting)}"
        refuse("MD0624", message, one_of("--prefill", [*fitting, NO_PREFILL]))
    return readers[fitting[0]] if fitting else None


def _of(made: Compilation, name: str) -> Compilation:
    """The compilation of another program of the same file."""
    options = replace(made.options, program=name)
    known_stages = Known(tree=made.tree, declarations=made.declarations)
    return Compilation(made.source, options, Diagnostics(), known_stages)
