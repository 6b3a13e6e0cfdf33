# mypy: disable-error-code="type-arg,valid-type,misc,operator,call-overload,index"
"""Sizes in Python: `to_mdsl` writes what they are made of, or refuses where Python lost that."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import meshdsl as md
from meshdsl.named.printer import print_program
from meshdsl.named.size_formulas import LONGEST
from tests.compiling import named

SIZES = {"batch": 2, "seq": 6, "heads": 3, "key": 16}
OTHERS: tuple[dict[str, int], ...] = (
    {},
    {"key": 64},
    {"batch": 1, "heads": 1},
    {"seq": 8, "batch": 3, "key": 2, "heads": 2},
)

Body = Callable[[Any, Any], Any]


def dims_of(sizes: Mapping[str, int]) -> SimpleNamespace:
    """Dims of these sizes, and dims made of them."""
    batch, seq, heads, key = md.dims(**sizes)
    return SimpleNamespace(
        batch=batch,
        seq=seq,
        heads=heads,
        key=key,
        mem=md.dim("mem", like=seq),
        model=md.dim("model", heads * key),
        half=md.dim("half", key // 2),
        tail=md.dim("tail", seq - 1),
        wide=md.dim("wide", 2 * (seq + batch) ** 1),
    )


def program_of(body: Body, d: SimpleNamespace) -> md.Program:
    def p(x: Any) -> Any:
        return body(x, d)

    p.__annotations__ = {"x": md.Tensor[d.batch, d.seq, d.key]}
    return md.program(p)


def lines(program: Any) -> list[str]:
    text = print_program(program).splitlines()
    return [line for line in text if not line.strip().startswith("# ")]


# --- what is kept ------------------------------------------------------------------------------


def weighted(x: Any, d: SimpleNamespace) -> Any:
    w = md.param([d.key], init=md.normal(d.key**-0.5))
    loss = md.mean(x * w)
    md.minimize(loss, md.adamw(lr=md.cosine(d.model**-0.5, 1000 * d.batch), clip=1 / d.heads))
    return {"loss": loss}


def looped(x: Any, d: SimpleNamespace) -> Any:
    def body(x: Any) -> Any:
        w = md.param([d.key])
        x = x * w / (d.heads * 2)
        return x

    return md.repeat(d.heads, body, x) / d.heads


KEPT: dict[str, Body] = {
    "an operator": lambda x, d: x / md.sqrt(d.key) * md.rsqrt(d.model),
    "arithmetic": lambda x, d: x * d.key**-0.5 + (d.seq - 1) * x / (d.batch * d.seq) - -d.heads,
    "both": lambda x, d: x * (2 * md.sqrt(d.key) + 1.0) ** 2,
    "floor and remainder": lambda x, d: x * (d.key // 3) + d.key % 5 + x / (7 // d.heads),
    "what is 1 at some sizes": lambda x, d: x * d.batch / d.heads**d.batch,
    "a power": lambda x, d: x**d.batch + x ** (d.heads / 2) + d.key**x,
    "numpy's numbers": lambda x, d: x * (np.float32(2) * d.key) + np.int64(3) / d.key,
    "a shape": lambda x, d: x * x.shape[-1] ** -0.5 / x.shape[0],
    "dims that are made of others": lambda x, d: (
        md.sum[d.key](x) + md.sum[d.mem](md.cast(md.iota[d.mem], md.f32)) / d.model
    ),
    "views": lambda x, d: (
        x.slice(d.seq, 1, None, d.tail)
        + x.slice(d.seq, 0, d.seq - 1, d.tail)
        + x.pick(d.seq, d.seq - 1)
    ),
    "options": lambda x, d: md.pad[d.seq >> d.wide](x, d.seq, d.batch * 2, value=-d.key),
    "parts": lambda x, d: md.sum[d.half](x[d.key >> (md.dim("two", 2), d.half)]) / d.half,
    "an initialiser and an optimizer": weighted,
    "a loop": looped,
}


@pytest.mark.parametrize("name", KEPT)
def test_the_text_means_the_same_at_every_size(name: str) -> None:
    text = program_of(KEPT[name], dims_of(SIZES)).to_mdsl()
    for sizes in OTHERS:
        wanted = program_of(KEPT[name], dims_of({**SIZES, **sizes})).named(evaluate=False)
        found = named(text, set_dims={n: s for n, s in sizes.items() if f"{n} =" in text})
        assert lines(found) == lines(wanted), text


def test_names_of_dims_and_of_arguments_are_kept() -> None:
    d = dims_of(SIZES)

    def attend(query: Any, scale: Any, twice: bool = False) -> Any:
        s = query * scale / md.sqrt(d.key)
        return md.sum[d.mem](s[d.seq >> d.mem]) + d.model

    inlined = md.function(attend)
    text = program_of(lambda x, d: inlined(x, scale=md.exp(x)), d).to_mdsl()
    assert text.startswith("dim batch = 2, seq = 6, key = 16, mem = seq, ")
    assert "heads = 3" in text
    assert "model" not in text.partition("def")[0] or "model = heads * key" in text
    assert "def attend(query[batch, seq, key], scale[batch, seq, key])" in text
    assert "query * scale / sqrt(key)" in text


# --- what is refused ---------------------------------------------------------------------------


def unrolled(x: Any, d: SimpleNamespace) -> Any:
    for _ in range(d.batch):
        x = x * 2.0
    return x


def unrolled_more(x: Any, d: SimpleNamespace) -> Any:
    for _ in range(d.seq // 2 + 1):
        x = x * 2.0
    return x


REFUSED: dict[str, tuple[str, Body]] = {
    "a root of Python": ("math.sqrt(d.key)", lambda x, d: x / math.sqrt(d.key)),
    "a root of a product": ("math.sqrt(d.key / 2)", lambda x, d: x / math.sqrt(d.key / 2)),
    "a root of numpy": ("np.sqrt(4 * d.key)", lambda x, d: x / np.sqrt(4 * d.key)),
    "the size": ("d.key.size", lambda x, d: x * d.key.size**-0.5),
    "int": ("int(d.key)", lambda x, d: x * int(d.key)),
    "float": ("float(d.heads * d.key)", lambda x, d: x * float(d.heads * d.key)),
    "a condition": ("2 * d.key > 3", lambda x, d: x * 2.0 if 2 * d.key > 3 else x),
    "another": ("d.key % 2 == 0", lambda x, d: x * 2.0 if d.key % 2 == 0 else x),
    "a shape": ("x.shape == (2, 6, 16)", lambda x, d: x if x.shape == (2, 6, 16) else -x),
    "a loop": ("range(d.batch)", unrolled),
    "a longer loop": ("range(d.seq // 2 + 1)", unrolled_more),
    "a list": ("[1.0] * (2 * d.seq)", lambda x, d: x * sum([1.0] * (2 * d.seq))),
    "a dim of it": (
        "math.sqrt(d.key)",
        lambda x, d: md.sum[md.dim("root", int(math.sqrt(d.key)))](
            x * md.ones[md.dim("root", 4)]()
        ),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_python_takes_for_a_plain_number_is_refused(name: str) -> None:
    underlined, body = REFUSED[name]
    program = program_of(body, dims_of(SIZES))
    program.compile()
    with pytest.raises(md.ProgramError) as found:
        program.to_mdsl()
    (diagnostic,) = found.value.diagnostics
    assert diagnostic.code == "MD0821"
    assert diagnostic.span is not None
    assert underlined in diagnostic.span.source.line(diagnostic.span.line)
    assert diagnostic.help is not None
    assert "md.sqrt(key)" in diagnostic.help


def test_numbers_made_before_the_program_are_refused_where_they_are_used() -> None:
    d = dims_of(SIZES)
    before = program_of(lambda x, d: x * RATE, d)
    assert "x * 0.5" in before.to_mdsl()
    scale = 1 / math.sqrt(d.key)
    with pytest.raises(md.ProgramError) as found:
        program_of(lambda x, d: x * scale, d).to_mdsl()
    (diagnostic,) = found.value.diagnostics
    assert diagnostic.code == "MD0821"
    assert diagnostic.span is not None
    assert diagnostic.span.text == "scale"
    (taken,) = diagnostic.related
    assert taken.span.text == "math.sqrt(d.key)"
    assert "x * 0.25 - 1000.0" in program_of(lambda x, d: x * 0.25 - 1_000.0, d).to_mdsl()


def test_a_dim_that_the_text_has_not_may_be_taken() -> None:
    """Nobody can set it: there is no `heads` in the text."""
    d = dims_of(SIZES)

    def body(x: Any, d: SimpleNamespace) -> Any:
        for _ in range(d.heads):
            x = x * 2.0
        return x

    assert "heads" not in program_of(body, d).to_mdsl()
    with pytest.raises(md.ProgramError, match="takes the size of `heads`"):
        program_of(lambda x, d: body(x, d) / d.model, d).to_mdsl()


def test_options_and_dims_made_before_are_refused_too() -> None:
    d = dims_of(SIZES)
    rate = int(d.key) ** -0.5
    wide = md.dim("other", 2 * int(d.seq))

    def trained(x: Any, d: SimpleNamespace) -> Any:
        w = md.param([d.key])
        loss = md.mean(x * w)
        md.minimize(loss, md.sgd(lr=md.cosine(rate, 1000)))
        return {"loss": loss}

    bodies: dict[str, Body] = {
        "rate": trained,
        "2 * int(d.seq)": lambda x, d: x * md.ones[wide](),
    }
    for text, body in bodies.items():
        with pytest.raises(md.ProgramError) as found:
            program_of(body, d).to_mdsl()
        (diagnostic,) = found.value.diagnostics
        assert (diagnostic.code, diagnostic.span and diagnostic.span.text) == ("MD0821", text)


RATE = 0.5


def test_arrays_beside_the_program_do_not_matter() -> None:
    d = dims_of(SIZES)
    program = program_of(lambda x, d: x / md.sqrt(d.key) * 2.0, d)
    array = np.ones((d.batch, d.seq, d.key), np.float32)
    assert np.allclose(program.compile()(array)["out0"], 0.5)
    assert "/ sqrt(key) * 2.0" in program.to_mdsl()


def test_a_size_that_declarations_cannot_say() -> None:
    d = dims_of(SIZES)
    size = d.key
    for _ in range(LONGEST + 1):
        size = size + 1
    odd = md.dim("odd", size)
    with pytest.raises(md.ProgramError, match="a size is made by whole numbers, dims and") as found:
        program_of(lambda x, d: x * md.ones[odd](), d).to_mdsl()
    (diagnostic,) = found.value.diagnostics
    assert diagnostic.help == "make it of the dims by these, or write the number out"


def test_a_number_that_is_too_long_to_be_written() -> None:
    def doubled(x: Any, d: SimpleNamespace) -> Any:
        scale: Any = md.sqrt(d.key)
        for _ in range(40):
            scale = scale + scale
        return x * scale

    assert LONGEST < 2**40
    program = program_of(doubled, dims_of(SIZES))
    program.compile()
    with pytest.raises(md.ProgramError, match="is made by of `key`"):
        program.to_mdsl()


def test_a_dim_defined_anew_is_no_maker() -> None:
    old = md.dim("seq", 3)
    mem = md.dim("mem", like=old)
    seq = md.dim("seq", 5)

    @md.program
    def p(x: md.Tensor[seq, mem]):
        return x * 2.0

    assert p.to_mdsl().startswith("dim seq = 5, mem = 3\n")
    again = md.dim("seq", like=mem)

    @md.program
    def q(x: md.Tensor[again, mem]):
        return x * 2.0

    assert q.to_mdsl().startswith("dim seq = 3, mem = 3\n")


# --- they are numbers --------------------------------------------------------------------------


def test_they_are_numbers_to_python_and_numpy() -> None:
    (io,) = md.dims(io=4)
    assert repr(4 * io) == "16"
    assert f"{1000 * io:,}" == "4,000"
    assert np.zeros((io, 2 * io)).shape == (4, 8)
    assert list(np.arange(2 * io)) == list(range(8))
    assert (2 * io * np.ones(2)).tolist() == [8.0, 8.0]
    assert (np.float64(3) / io, math.ceil(io / 3), round(io / 3, 1)) == (0.75, 2, 1.3)
    assert {4 * io: 1}[16] == 1
    assert [10, 20, 30][io // 2] == 30
    assert max(2 * io, 7) == 8
    assert not io - 4
    with pytest.raises(ZeroDivisionError):
        io / (io - 4)
    with pytest.raises(TypeError):
        [0][io / 2]
