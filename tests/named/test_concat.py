"""`concat` in whole programs: names say what is joined, sizes never do."""

from __future__ import annotations

from typing import Annotated

import numpy as np
import pytest

import meshdsl as md
from meshdsl.diagnostics import DiagnosticError
from tests.compiling import named, run_text

HEAD = "dim kk = 3, b = 2, k2 = 2 * kk\n"
ARROWS = ("(kk, kk) -> k2", "kk -> k2")


def program(bracket: str) -> str:
    return HEAD + f"program p(x[b, kk], y[b, kk]) {{\n  return concat[{bracket}](x, y)\n}}\n"


@pytest.mark.parametrize("size", range(1, 9))
def test_a_short_form_is_refused_at_every_size(size: int) -> None:
    for dim in ("kk", "b", "k2"):
        with pytest.raises(DiagnosticError) as found:
            named(program("k2"), set_dims={dim: size})
        assert [d.code for d in found.value.diagnostics] == ["MD0216"]


@pytest.mark.parametrize("arrow", ARROWS)
@pytest.mark.parametrize("kk", [1, 2, 4])
def test_the_arrow_joins_at_every_size(arrow: str, kk: int) -> None:
    x, y = np.arange(2.0 * kk).reshape(2, kk), -np.ones((2, kk))
    found = run_text(program(arrow), {"x": x, "y": y}, set_dims={"kk": kk})["out0"]
    assert np.array_equal(found, np.concatenate([x, y], axis=1))


def test_the_sum_has_to_be_the_size_of_the_new_dim() -> None:
    with pytest.raises(DiagnosticError) as found:
        named(program("kk -> k2"), set_dims={"k2": 7})
    (diagnostic,) = found.value.diagnostics
    assert diagnostic.code == "MD0209"
    assert "3 (`kk`) + 3 (`kk`) = 6 elements, and `k2` is of size 7" in diagnostic.message


def test_python_says_it_alike() -> None:
    kk, b, k2 = md.dims(kk=3, b=2, k2=6)

    @md.program
    def p(x: Annotated[md.Tensor, b, kk], y: Annotated[md.Tensor, b, kk]):
        both = md.concat[(kk, kk) >> k2](x, y)
        same = md.concat[kk >> k2](x, y)
        return both, same

    x, y = np.ones((2, 3)), np.zeros((2, 3))
    both, same = p.compile()(x, y)
    assert np.array_equal(both, np.concatenate([x, y], axis=1))
    assert np.array_equal(both, same)

    @md.program
    def q(x: Annotated[md.Tensor, b, kk], y: Annotated[md.Tensor, b, kk]):
        return md.concat[k2](x, y)

    with pytest.raises(md.ProgramError) as found:
        q.named()
    (diagnostic,) = found.value.diagnostics
    assert diagnostic.code == "MD0216"
    assert diagnostic.span is not None
    assert diagnostic.span.text == "md.concat[k2](x, y)"
    assert diagnostic.help == "write `[(kk, kk) >> k2]`; it names the dim of each"
