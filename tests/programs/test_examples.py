"""Every example under many layouts, meshes and policies: one answer, and the bytes predicted.

Under each mesh at least eight layouts must really run, with `MESHDSL_CASES` twelve. What does not
divide or conflicts is left out by asking the compiler, and nothing else is.
"""

from __future__ import annotations

import itertools
import os
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from meshdsl.diagnostics import DiagnosticError, Diagnostics, Source
from meshdsl.named.declarations import Declarations
from meshdsl.named.ir import walk
from meshdsl.pipeline import Compilation, Options, build_named, front
from meshdsl.placed.place import POLICIES, WALKS
from tests.covering import in_turn
from tests.programs.harness import REFUSALS, Case, run_case
from tests.project import matching

TRAINED = ("alexnet", "digits_async", "dlrm", "encdec", "lm", "nmt", "resnet", "unet", "vgg", "vit")
"""Large training steps: `tests/training` and `tests/examples` run them."""

EVERY = matching("examples/*.mdsl")
EXAMPLES = [path for path in EVERY if path.stem not in TRAINED]

SMALL: Mapping[str, Mapping[str, int]] = {
    "matmul": {"rows": 8, "inner": 16, "cols": 8},
    "mlp": {"batch": 16, "io": 8, "hidden": 16},
    "transformer": {
        "batch": 8, "seq": 8, "model": 8, "heads": 8, "key": 2, "hidden": 16, "vocab": 16,
        "layers": 2,
    },
    "digits": {"batch": 16, "pixels": 16, "hidden": 8, "classes": 8},
    "moe": {
        "group": 8, "token": 8, "model": 8, "hidden": 8, "experts": 8, "slot": 2, "inner": 8,
        "layers": 1,
    },
}  # fmt: skip
"""Sizes that divide over eight devices and run in milliseconds."""

SHAPES = ((1,), (2,), (1, 2), (4,), (2, 2), (8,), (2, 4), (2, 2, 2))
"""Meshes of 1, 2, 4 and 8 devices, with one, two and three axes."""

PAIRS = (*itertools.combinations(POLICIES, 2),)

ALL = "MESHDSL_CASES" in os.environ
LEAST = 12 if ALL else 8


def declared(path: Path) -> Declarations:
    return front(Source(path.name, path.read_text()), SMALL.get(path.stem, {}), Diagnostics())


def mesh_axes(declarations: Declarations) -> list[str]:
    """The axes that the example's own layouts speak of, and more to make three."""
    own = [axis.name.text for mesh in declarations.meshes.values() for axis in mesh.axes]
    return list(dict.fromkeys([*own, "one", "two", "three"]))


def layouts(declarations: Declarations, axes: list[str], seed: str) -> Iterator[str]:
    """Those declared, then generated ones: strings, several axes, storage, selectors."""
    yield from declarations.layouts
    chosen = random.Random(seed)
    dims = [d.name for d in declarations.dims.values() if d.size > 1]
    for dim in chosen.sample(dims, min(4 if ALL else 2, len(dims))):
        yield f"{dim}:{chosen.choice(axes)}"
    for _ in range(3 if ALL else 2):
        one, other = chosen.sample(dims, 2)
        yield f"{one}:{chosen.choice(axes)},{other}:{chosen.choice(axes)}"
        yield f"{{ {one} -> {chosen.choice(axes)}, params: {other} -> {chosen.choice(axes)} }}"
        yield f"{{ {one} -> ({', '.join(chosen.sample(axes, min(2, len(axes))))}) }}"
        axis = chosen.choice(axes)
        yield f"{{ {one} -> {axis}, params: {one} -> none, params: {other} -> {axis} }}"
    tensors = named_tensors(declarations)
    for name, dim in chosen.sample(tensors, min(2, len(tensors))):
        axis = chosen.choice(axes)
        yield f"{{ {name}: {dim} -> {axis} }}"
        yield f"{{ {dim} -> {axis}, {name}: {dim} -> none }}"
    yield "{ }"


def named_tensors(declarations: Declarations) -> list[tuple[str, str]]:
    """Tensors that rules may select, each with one of its dims."""
    program = build_named(declarations, None, None, Diagnostics())
    values = [v for op in walk(program.body) for v in op.outs if v.name]
    return [(str(v.name), d) for v in values for d in v.type.names if v.type.size(d) > 1]


def pinned(text: str, axes: list[str]) -> str:
    """The program with its first input's first dim placed by `@`."""
    return re.sub(r"(program \w+\(\w+\[\w+)", rf"\1@{axes[0]}", text)


def cases(path: Path, shape: tuple[int, ...]) -> Iterator[Case]:
    declarations = declared(path)
    names = mesh_axes(declarations)
    # Take turns, so that a mesh of one axis is not always along the same one.
    turn = len(shape) % 2 if len(names) > 1 else 0
    axes = (names[turn:] + names[:turn])[: len(shape)]
    mesh = ",".join(f"{a}:{n}" for a, n in zip(axes, shape, strict=True))
    dims = SMALL.get(path.stem, {})
    every = list(dict.fromkeys(layouts(declarations, axes, f"{path.stem}{shape}")))
    text, names = with_layouts(path.read_text(), every)
    for name in names:
        yield Case(text, mesh, name, dims=dims)
    for name in names[-3:]:
        yield Case(pinned(text, axes), mesh, name, dims=dims)


def with_layouts(text: str, every: list[str]) -> tuple[str, list[str]]:
    """The program with rules in braces declared, so that it is read once; all layouts by name."""
    rules = [rule for rule in every if rule.startswith("{")]
    names = {rule: f"chosen_{number}" for number, rule in enumerate(rules)}
    declared = "".join(f"layout {name} {rule}\n" for rule, name in names.items())
    return f"{text.rstrip()}\n\n{declared}", [names.get(rule, rule) for rule in every]


@in_turn(path=EXAMPLES, shape=SHAPES)
def test_every_layout_gives_the_answer_of_one_device(path: Path, shape: tuple[int, ...]) -> None:
    """Layouts that the example declares under pairs of policies, which agree; others in turns."""
    ran: Counter[str] = Counter()
    found, own = list(cases(path, shape)), declared(path).layouts
    for number, case in enumerate(found):
        policies = PAIRS[number % 6] if case.layout in own else [POLICIES[number % 4]]
        fits = {runs(replace(case, reduce=policy)) for policy in policies}
        assert len(fits) == 1, case.layout
        ran.update([case.layout] if fits == {True} else [])
    assert len(ran) >= LEAST, f"only {len(ran)} of {len(found)} layouts fit"


def of_trained() -> Iterator[tuple[Path, str, str]]:
    """The last layout of each large training step, under a policy that is not the default one.

    With `MESHDSL_CASES` all layouts; policies take turns.
    """
    number = 0
    for path in EVERY:
        names = list(declared(path).layouts) if path.stem in TRAINED else []
        for name in names if ALL else names[-1:]:
            yield path, name, WALKS[number % len(WALKS)]
            number += 1


@pytest.mark.parametrize(
    ("path", "layout", "policy"),
    [*of_trained()],
    ids=lambda v: v.stem if isinstance(v, Path) else v,
)
def test_a_layout_is_accepted_under_every_policy(path: Path, layout: str, policy: str) -> None:
    """As under the default one, which golden files are of."""
    options = Options(layout=layout, reduce=policy)
    Compilation(Source(path.name, path.read_text()), options).checked()


def runs(case: Case) -> bool:
    """Whether a layout fits; then it has run and passed."""
    try:
        run_case(case)
    except DiagnosticError as error:
        if error.diagnostics[0].code not in REFUSALS:
            raise
        return False
    return True


def test_all_meshes_are_there() -> None:
    devices = {n for shape in SHAPES for n in itertools.accumulate(shape, int.__mul__)}
    assert devices >= {1, 2, 4, 8}
    assert {len(shape) for shape in SHAPES} == {1, 2, 3}
