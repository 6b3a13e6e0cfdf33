"""What other libraries write is refused with the line to write; that line compiles and means it."""

from __future__ import annotations

import re

import numpy as np
import pytest

from meshdsl.backends.engines.reference import run_reference
from meshdsl.diagnostics import Diagnostic, DiagnosticError, Diagnostics, Fix, Source
from meshdsl.named.foreign import RENAMED, RULES, ForeignRow, rows
from meshdsl.named.prelude import library
from meshdsl.ops.opdef import load_all
from meshdsl.pipeline import Compilation, Options, compile_source
from meshdsl.syntax.foreign_words import statements
from meshdsl.syntax.parse import parse_expression
from tests.named.foreign import (
    POSITIONS,
    ROWS,
    SHAPES,
    SIZES,
    arrays,
    check_meaning,
    nested,
)

DIMS = "dim " + ", ".join(f"{name} = {size}" for name, size in SIZES.items())
PROGRAM = (
    f"{DIMS}\nprogram p(x[batch, io], z[batch, io], w[io, hidden], v[hidden], s[batch, seq, io], "
    "ids[batch]: i32) {{\n  {line}\n  return y\n}}\n"
)
WRITE = re.compile(r"write `([^`]+)`(?:, and `([^`]+)` above the program)?")


def compiled(text: str) -> Compilation:
    return compile_source(Source("t.mdsl", text), Options(), Diagnostics(), until="named")


def errors(text: str) -> tuple[Diagnostic, ...]:
    with pytest.raises(DiagnosticError) as raised:
        compiled(text)
    return raised.value.diagnostics


def mended(text: str, fix: Fix) -> str:
    for edit in sorted(fix.edits, key=lambda e: -e.span.start):
        text = text[: edit.span.start] + edit.text + text[edit.span.end :]
    return text


def pasted(text: str, line: str, help: str | None) -> str:
    """The program with the line of the help in place of `line`, and what it declares on top."""
    found = WRITE.match(help or "")
    assert found is not None, help
    above = f"{found[2]}\n" if found[2] else ""
    return above + text.replace(line, found[1])


# --- the table --------------------------------------------------------------------------------


def test_the_table_is_whole() -> None:
    assert len(ROWS) >= 30
    words = [word for row in rows() for word in row.words]
    assert len(words) == len(set(words))
    assert {row.rule for row in rows() if row.rule} == set(RULES)
    ways = ([row.write, row.rule, row.help] for row in rows())
    assert all(sum(way is not None for way in each) == 1 for each in ways)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.mdsl)
def test_the_line_in_the_help_compiles_and_means_the_same(row: ForeignRow) -> None:
    text = PROGRAM.format(line=row.mdsl)
    (error,) = errors(text)
    assert error.code == row.code or row.words[0] == "einsum"
    (fix,) = error.fixes
    check_meaning(row, compiled(mended(text, fix)).named)
    assert compiled(pasted(text, row.mdsl, error.help)).text == compiled(mended(text, fix)).text


NAMED = ["x.relu()", "np.tanh(x)", "torch.exp(x)", "F.gelu(x)", "np.add(x, z)", "x.mul(z)"]


@pytest.mark.parametrize("call", NAMED)
def test_methods_and_modules_of_every_operator(call: str) -> None:
    text = PROGRAM.format(line=f"y = {call}")
    (error,) = errors(text)
    assert error.code == "MD0125"
    assert compiled(mended(text, error.fixes[0])).named.outputs


# --- statements -------------------------------------------------------------------------------

STATEMENTS = {
    "let y = relu(x)": "y = relu(x)",
    "y = x\n  y += z": "y = y + z",
    "y = x\n  y *= z + 1": "y = y * (z + 1)",
    "y = x\n  y //= z": "y = y // z",
    "y = x\n  for i in range(two) { y = y + z }": "repeat two { … }",
    "y = x\n  for i in two:\n    y = y + z\n    y = y * 2": "repeat two { … }",
    "if x > 0 { y = x } else { y = z }": "y = where(x > 0, x, z)",
    "if x > 0:\n    y = x\n  else:\n    y = z": "y = where(x > 0, x, z)",
    "y = np.mod(x, z)": "y = x % z",
    "y = relu(x @ w).sum(-1)": "y = sum[hidden](relu(einsum(x, w -> [batch, hidden])))",
    "y = x @ w + torch.exp(x) @ w": (
        "y = einsum(x, w -> [batch, hidden]) + einsum(exp(x), w -> [batch, hidden])"
    ),
    "y = x @ x.T": "y = einsum(x, x[batch -> batch_other] -> [batch, batch_other])",
    "y = w[ids]": "y = w[io = ids]",
    "y = max(x, axis=1, keepdims=True)": "y = max[io](x)",
    "y = s.reshape(batch, -1)": "y = s[(seq, io) -> part30]",
    "y = np.where(x > 0, x, z)": "y = where(x > 0, x, z)",
}


@pytest.mark.parametrize(("line", "written"), STATEMENTS.items())
def test_statements(line: str, written: str) -> None:
    text = PROGRAM.format(line=line)
    found = errors(text)
    assert all(f"write `{written}`" in (e.help or "") for e in found), found
    for _ in found:
        text = mended(text, errors(text)[0].fixes[0])
    assert compiled(text).named.outputs


@pytest.mark.parametrize("word", statements())
def test_statements_that_are_not_read(word: str) -> None:
    found = errors(PROGRAM.format(line=f"{word} a = 3\n  y = x"))
    assert [e.code for e in found] == ["MD0018"] or word == "with"


def test_sizes() -> None:
    text = "dim io = 6\ndim n = io ** 2\nprogram p(x[n]) { return x }\n"
    (error,) = errors(text)
    assert mended(text, error.fixes[0]) == text.replace("**", "^")


# --- positions ----------------------------------------------------------------------------------


def test_positions_are_counted_as_numpy_counts_them() -> None:
    head = "dim " + ", ".join(f"{n} = {s}" for n, s in POSITIONS.items())
    inputs = ", ".join(f"{n}[{', '.join(dims)}]" for n, dims in SHAPES.items())
    compared = 0
    for seed in range(250):
        line = nested(seed)
        try:
            with np.errstate(invalid="ignore"):  # BLAS may raise the flag beside small matrices
                wanted = eval(line, {"np": np, **arrays()})
        except (ValueError, IndexError):
            continue  # numpy has no such value
        text = f"{head}\nprogram p({inputs}) {{\n  y = {line}\n  return y\n}}\n"
        for _ in range(10):
            try:
                found = compiled(text).named
            except DiagnosticError as error:
                fixes = [fix for d in error.diagnostics for fix in d.fixes]
                if not fixes:
                    break
                text = mended(text, fixes[0])
                continue
            (value,) = run_reference(found, arrays(), {}).values()
            np.testing.assert_allclose(value, wanted, rtol=1e-4, atol=1e-5, err_msg=line + text)
            compared += 1
            break
    assert compared > 90


@pytest.mark.parametrize(
    "line",
    ["x.max(1)[0]", "x.unsqueeze(0)[:, 1]", "x.mean(0, keepdim=True)[0]", "x.chunk(3, 1)[0]"],
)
def test_what_positions_count_in_other_libraries_alone_is_left_open(line: str) -> None:
    (error,) = errors(PROGRAM.format(line=f"y = {line}"))
    assert not error.fixes


# --- what stays open --------------------------------------------------------------------------

OPEN = {
    "y = x.qqq()": ("MD0125", "grammar/README.md"),
    "y = x.reluu()": ("MD0125", "did you mean `relu`?"),
    "y = reshape(x, [7, 7])": ("MD0126", "split by"),
    "y = x.shape": ("MD0126", "the name of a dim is its size"),
    "y = topk(x, 2)": ("MD0126", "top_k[io -> k](x)"),
    "y = torch.zeros(3, 6) + x": ("MD0125", "grammar/README.md"),
    "y = matmul(x)": ("MD0018", "einsum(x, w -> [batch, hidden])"),
    "y = x[0, 0, 0]": ("MD0126", "x[seq = 0]"),
    "y = x[batch = 0, 1]": ("MD0015", "name every dim"),
    "y = sum[0](x)": ("MD0126", "holds the names of dims"),
    "y = relu([x, z])": ("MD0126", "write dims in `[ ]`"),
    "y = x @ unknown": ("MD0102", "known"),
    "y = v @ sum[batch](x)": ("MD0018", "einsum(x, w -> [batch, hidden])"),
    'y = einsum("bi,io->bz", x, w)': ("MD0125", "einsum(x, w -> [batch, hidden])"),
    'y = rearrange(x, "b (h -> ((", h=0)': ("MD0126", "split by"),
}


IN_WORDS = [(word, row) for row in rows() if row.help for word in row.words]


@pytest.mark.parametrize(("word", "row"), IN_WORDS)
def test_what_no_expression_means_is_said_in_words(word: str, row: ForeignRow) -> None:
    assert row.help is not None
    for form in ("x.{}(z)", "nn.{}(2)", "nn.{}(2)(x)" if word[0].isupper() else "F.{}(x)"):
        (error,) = errors(PROGRAM.format(line=f"y = {form.format(word)}"))
        assert error.help == row.help
        assert not error.fixes


@pytest.mark.parametrize("row", [row for row in rows() if row.help], ids=lambda row: row.words[0])
def test_forms_in_words_are_of_the_language(row: ForeignRow) -> None:
    known = {*load_all(), *library(), "param"}
    for form in re.findall(r"`([^`]+)`", row.help or ""):
        called = re.match(r"(\w+)[\[(].*\)$", form)
        assert called is None or called[1] in known, form
        if called:
            assert parse_expression(form) is not None, form


@pytest.mark.parametrize(("line", "wanted"), OPEN.items())
def test_what_stays_open_has_a_form_to_follow(line: str, wanted: tuple[str, str]) -> None:
    (error,) = errors(PROGRAM.format(line=line))
    assert error.code == wanted[0]
    assert wanted[1] in (error.help or "")
    assert not error.fixes


def test_errors_behind_a_foreign_line_are_found_too() -> None:
    found = errors(PROGRAM.format(line="h = x @ w\n  y = h + rleu(h)\n  k = sum[batchh](h)"))
    assert [e.code for e in found] == ["MD0018", "MD0103", "MD0101"]


WORDS = sorted({word for row in rows() for word in row.words} | set(RENAMED) | set(load_all()))


@pytest.mark.parametrize("form", ["x.{}()", "np.{}(x, z)", "x.{}(0, axis=[1, io])", "x.{}"])
def test_no_word_and_no_operands_break_it(form: str) -> None:
    lines = [f"y{i} = {form.format(w)}" for i, w in enumerate(WORDS) if w.isidentifier()]
    for start in range(0, len(lines), 15):
        found = errors(PROGRAM.format(line="\n  ".join(["y = x", *lines[start : start + 15]])))
        assert all(error.help for error in found)
