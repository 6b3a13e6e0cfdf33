"""`analyse` finds every mistake of a text at once, and nothing else: one mistake, one message.

The examples are correct. Names are misspelt in them at random, several at a time, and each must be
reported where it stands.
"""

from __future__ import annotations

import os
import random
import re
import string
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import meshdsl as md
from meshdsl.analysis import analyse
from meshdsl.diagnostics import Diagnostic, Source, Span
from meshdsl.ops.opdef import load_all
from meshdsl.pipeline import Options
from meshdsl.syntax import ast
from meshdsl.syntax.parse import parse
from meshdsl.syntax.tokens import RESERVED
from tests.project import matching

EXAMPLES = [*matching("examples/*.mdsl"), *matching("examples/sbp/*.mdsl")]
ROUNDS = 12 if "MESHDSL_CASES" in os.environ else 6


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_misspelt_name_is_reported_once(path: Path) -> None:
    source = Source(path.name, path.read_text(encoding="utf-8"))
    tree, problems = parse(source)
    assert not problems
    usual = {d.code for d in diagnostics(source)}
    assert usual <= {"MD0301"}
    taken = words(tree)
    names = list(used(tree))
    for seed in range(ROUNDS):
        rng = random.Random(f"{path.stem} {seed}")
        chosen = sorted(rng.sample(names, min(len(names), rng.randint(1, 8))), key=place)
        known = set(taken)
        wrong = [misspelt(name.text, known, rng) for name in chosen]
        text, places = replaced(source.text, chosen, wrong)
        found = [d for d in diagnostics(Source(path.name, text)) if d.code not in usual]
        assert unexplained(found, places) == ([], []), f"seed {seed}: {wrong}\n{text}"
        assert len(found) == len(places), f"seed {seed}: {wrong}\n{text}"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_a_program_is_built_as_far_as_it_is_right(path: Path) -> None:
    source = Source(path.name, path.read_text(encoding="utf-8"))
    right = analyse(source, Options())
    assert all(right.named.values())
    text = source.text.replace("return ", "return nowhere, ")
    wrong = analyse(Source(path.name, text), Options())
    assert [d.code for d in wrong.diagnostics if d.severity == "error"] != []
    for name, program in right.written.items():
        assert wrong.named[name] is None
        partly = wrong.written[name]
        assert program is not None
        assert partly is not None
        types = [[str(v.value.type) for v in p.params] for p in (partly, program)]
        assert types[0] == types[1]


def test_a_loaded_file_tells_everything_at_once(tmp_path: Path) -> None:
    path = tmp_path / "seven.mdsl"
    path.write_text(Path("tests/errors/seven_mistakes.mdsl").read_text("utf-8"), encoding="utf-8")
    with pytest.raises(md.ProgramError) as raised:
        md.load(path)
    codes = [d.code for d in raised.value.diagnostics]
    assert codes == ["MD0101", "MD0260", "MD0103", "MD0102", "MD0102", "MD0304", "MD0305"]


def test_the_dims_of_a_def_stand_in_an_einsum_of_it() -> None:
    text = """dim a = 2, b = 3, d = 4, h = 5
def wide(x[..., d]) -> [..., h] {
  param w[d, h]
  return einsum(x, w -> [..., h]) + sum[..., d](x)
}
program p(x[a, b, d], y[d]) { return wide(x), wide(y) }
"""
    found = analyse(Source("p.mdsl", text), Options())
    assert not list(found.diagnostics)
    program = found.written["p"]
    assert program is not None
    assert [str(o.value.type) for o in program.outputs] == ["f32[a, b, h]", "f32[h]"]


def test_the_way_out_of_two_dims_on_one_axis_works_for_a_subexpression() -> None:
    text = Path("tests/errors/two_dims_on_one_axis_unnamed.mdsl").read_text(encoding="utf-8")
    text = "".join(line for line in text.splitlines(keepends=True) if line[0] != "#")
    (found,) = diagnostics(Source("p.mdsl", text))
    assert found.span is not None
    assert found.help is not None
    dim, named, use, rule = re.findall("`(.*?)`", found.help)
    assert f"do not split `{dim}` here" in found.help
    assert named == f"part = {found.span.text}"
    text = text.replace(found.span.text, use).replace("  z =", f"  {named}\n  z =")
    text = text.replace("  seq -> data\n", f"  seq -> data\n  {rule}\n")
    assert not diagnostics(Source("p.mdsl", text))


def unexplained(
    found: list[Diagnostic], places: list[tuple[int, int]]
) -> tuple[list[Diagnostic], list[tuple[int, int]]]:
    """The diagnostics at none of the places, and the places without a diagnostic."""
    spans = [d.span for d in found if d.span is not None]
    noise = [d for d in found if not any(covers(d.span, place) for place in places)]
    return noise, [place for place in places if not any(covers(s, place) for s in spans)]


def covers(span: Span | None, place: tuple[int, int]) -> bool:
    return span is not None and span.start <= place[0] and place[1] <= span.end


def diagnostics(source: Source) -> list[Diagnostic]:
    return list(analyse(source, Options()).diagnostics)


# --- misspelling ---------------------------------------------------------------------------------


def place(name: ast.Name) -> int:
    return name.span.start


def words(tree: ast.SourceFile) -> set[str]:
    """Everything that a name could be mistaken for."""
    own = {node.text for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return own | set(load_all()) | {word.lower() for word in RESERVED}


def misspelt(name: str, taken: set[str], rng: random.Random) -> str:
    """The name with a slip of the pen in it; nothing else has this name."""
    slip = name
    while not slip.isidentifier() or slip in taken:
        at, letter = rng.randrange(len(name)), rng.choice(string.ascii_lowercase)
        slips = (
            name[: at + 1] + letter + name[at + 1 :],
            name[:at] + letter + name[at + 1 :],
            name[:at] + name[at + 1 :],
            name[:at] + name[at + 1 : at + 2] + name[at] + name[at + 2 :],
        )
        slip = rng.choice(slips)
    taken.add(slip)
    return slip


def replaced(
    text: str, names: list[ast.Name], wrong: list[str]
) -> tuple[str, list[tuple[int, int]]]:
    """The text with these names written otherwise, and the places where they then stand."""
    places, moved = [], 0
    for name, slip in zip(names, wrong, strict=True):
        start = name.span.start + moved
        text = text[:start] + slip + text[start + len(name.text) :]
        places.append((start, start + len(slip)))
        moved += len(slip) - len(name.text)
    return text, places


# --- names that refer to something ---------------------------------------------------------------


def used(tree: ast.SourceFile) -> Iterator[ast.Name]:
    """Every name that refers to something, once."""
    for node in ast.walk(tree):
        for name in REFERS.get(type(node), lambda _: ())(node):
            if name is not None and name.text not in ("...", "none", "true", "false"):
                yield name


REFERS: dict[type, Callable[[Any], tuple[ast.Name | None, ...]]] = {
    ast.Ref: lambda n: (n.name,),
    ast.DimRef: lambda n: (n.dim, *(n.axes or ())),
    ast.DimItem: lambda n: (n.dim,),
    ast.PickItem: lambda n: (n.dim,),
    ast.SliceItem: lambda n: (n.dim, n.target),
    ast.ArrowItem: lambda n: (*n.sources, *n.targets),
    ast.CallExpr: lambda n: (n.function, *(n.out or ()), *(k.name for k in n.keywords)),
    ast.ParamDecl: lambda n: (n.dtype,),
    ast.TensorParam: lambda n: (n.dtype,),
    ast.Repeat: lambda n: (n.dim,),
    ast.RuleDecl: lambda n: (*n.selector[:1], n.dim, *n.axes),
    ast.LayoutDecl: lambda n: (n.base,),
    ast.ScheduleDecl: lambda n: tuple(o.name for o in n.options),
    ast.ExpectPlacement: lambda n: n.tensor[:1],
    ast.ExpectCount: lambda n: (n.what, *(n.axes or ())),
    ast.Expect: lambda n: (n.layout, n.mesh, n.policy),
    ast.SbpEntry: lambda n: (*n.tensor[:1], *n.at[:1]),
}
"""The names by which a node refers to something."""
