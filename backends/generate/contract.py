"""The one-step program of a language model: which program of a file it is, and what it is given.

It takes a token, for each of a batch perhaps, and its position (a number), both integers, and first
returns the logits of the next token: floats with the dims of the token and one more, the
vocabulary. What it has to know of earlier tokens is state (`:=`).
"""

from __future__ import annotations

from dataclasses import replace

from meshdsl.backends.draws import index_bounds
from meshdsl.diagnostics import Diagnostics, fail
from meshdsl.named.ir import NamedProgram
from meshdsl.named.program_choice import is_trained
from meshdsl.pipeline import Compilation
from meshdsl.records import dataclass

FORM = (
    "write one of a token, as in examples/lm.mdsl: `program lm_step(token[batch]: i32, pos[]: i32)`"
    " that keeps what came before with `:=` and returns the logits"
)


@dataclass(frozen=True, slots=True)
class Contract:
    """The names of the inputs and of the logits; `words` is the dim of these.

    `room` is the number of positions, if the program uses the position as an index, and `counted`
    the number of tokens. `states` are the parameters that begin anew.
    """

    token: str
    position: str
    logits: str
    words: str
    counted: int
    room: int | None
    states: tuple[str, ...]


def contract_of(program: NamedProgram) -> Contract | str:
    """The contract of a program, or what it lacks."""
    if program.goal is not None:
        return "it trains"
    are_integers = [v.type.dtype.kind == "int" for v in program.inputs]
    if are_integers != [True, True]:
        return "its inputs are not two tensors of integers, a token and its position"
    token, position = program.inputs
    if position.type.dims:
        return f"its second input, the position, is {position.type}, not one number"
    if not program.outputs:
        return "it returns nothing"
    logits = program.outputs[0]
    dims = logits.value.type.dims
    words = [d for d in dims if d not in token.type.dims]
    if len(words) != 1 or len(dims) != len(token.type.dims) + 1:
        return f"`{logits.name}` is {logits.value.type}, not the token's dims and the vocabulary"
    if logits.value.type.dtype.kind != "float":
        return f"`{logits.name}` is {logits.value.type}: logits are floats"
    if not program.updates:
        return "it keeps nothing of earlier tokens with `:=`"
    states = tuple(str(u.old.name) for u in program.updates)
    room = index_bounds(program).get(position)
    return Contract(
        token.label, position.label, logits.name, words[0].name, words[0].size, room, states
    )


def chosen(made: Compilation) -> tuple[Compilation, Contract]:
    """The one-step program of a file: the one asked for, or the only one that is of that form.

    Raises MD0624 where there is none, or more than one.
    """
    programs = made.declarations.programs
    asked = made.options.program
    tried = {n: p for n, p in programs.items() if asked in (None, n)} or programs
    candidates: list[tuple[Compilation, Contract]] = []
    reasons: list[str] = []
    for name, node in tried.items():
        contract: Contract | str = "it trains"
        if not is_trained(node):
            one = _of(made, name)
            contract = contract_of(one.named)
        if isinstance(contract, Contract):
            candidates.append((one, contract))
        else:
            reasons.append(f"`{name}`: {contract}")
    if len(candidates) == 1:
        return candidates[0]
    names = ", ".join(one.named.name for one, _ in candidates)
    if candidates:
        message = f"several programs give the next token: {names}"
        fail("MD0624", message, help="choose one with `--program`")
    message = "no program of this file gives the next token of a text"
    fail("MD0624", "\n".join([message, *reasons]), help=FORM)


def _of(made: Compilation, name: str) -> Compilation:
    """The compilation of another program of the same file."""
    options = replace(made.options, program=name)
    known_stages = replace(made.known, tree=made.tree, declarations=made.declarations)
    return Compilation(made.source, options, Diagnostics(), known_stages)
