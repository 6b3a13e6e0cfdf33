"""Every operator of the registry from Python: made, documented, typed, and the same operator."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

import pytest

import meshdsl as md
from meshdsl.api import dims as api
from meshdsl.api.signatures import names, signature_of, stub_text
from meshdsl.api.tracer import Form
from meshdsl.ir import types
from meshdsl.named import ir
from meshdsl.named.from_syntax import INITS
from meshdsl.ops.opdef import OpDef, Sample, load_all
from tests.together import together

STUB = Path(api.__file__).with_name("operators.pyi")
CALLED = [n for n in names() if n in load_all()]


def test_the_stub_is_what_the_registry_says() -> None:
    if os.environ.get("MESHDSL_UPDATE_GOLDEN"):
        STUB.write_text(stub_text(), encoding="utf-8")
    written = STUB.read_text(encoding="utf-8")
    assert written == stub_text(), "MESHDSL_UPDATE_GOLDEN=1 pytest tests/api writes it anew"


@together(name=CALLED)
def test_it_has_a_name_a_signature_and_a_docstring(name: str) -> None:
    operator = getattr(md, name)
    assert operator.__name__ == name
    assert f"`{name}" in operator.__doc__
    assert name in repr(operator)
    if name not in INITS:
        assert inspect.signature(operator) == signature_of(name)
    assert name in dir(md)


# --- the operator that a call makes ------------------------------------------------------------


def _python_dims(sample: Sample) -> dict[str, api.Dim]:
    """Dims of Python for those of a sample."""
    found = [d for t in sample.ins for d in t.dims]
    for _, value in sample.attrs:
        listed = value if isinstance(value, tuple) else (value,)
        found += [d for d in listed if isinstance(d, types.Dim)]
    return {d.name: md.dim(d.name, d.size) for d in found}


def _brackets(opdef: OpDef, attrs: dict[str, Any], dims: dict[str, api.Dim]) -> Any:
    """The content of the brackets of a call with these attributes; None for no brackets."""
    match opdef.surface.items:
        case "dim" | "rows":
            return dims[attrs["dim"].name]
        case "dims" | "dims?" | "maker":
            return tuple(dims[d.name] for d in attrs["dims"])
        case "join":
            sources = tuple(dims[d.name] for d in attrs["sources"])
            return md_arrow(sources, (dims[attrs["target"].name],))
        case "filter" | "slide":
            windows = [dims[d.name] for d in attrs.get("window", ())] or attrs["size"]
            parts = zip(attrs["source"], windows, attrs["target"], strict=True)
            return tuple(api.By(dims[s.name], w, dims[t.name]) for s, w, t in parts)
        case "arrow" if "source" in attrs:
            sources = tuple(dims[d.name] for d in attrs["source"])
            targets = tuple(dims[d.name] for d in attrs["target"])
            return md_arrow(sources, targets)
    return None


def md_arrow(sources: tuple[api.Dim, ...], targets: tuple[api.Dim, ...]) -> api.Arrow:
    return api.Arrow(sources, targets)


def _apply(opdef: OpDef, sample: Sample, tensors: list[Any], dims: dict[str, api.Dim]) -> Any:
    attrs = dict(sample.attrs)
    options = {n: _option(attrs[n]) for n, _ in opdef.surface.options if n in attrs}
    operator = getattr(md, opdef.name)
    if opdef.surface.seeded:  # the indices of loops follow its seed
        tensors = tensors[: opdef.surface.arity[1]]
    if opdef.surface.items == "out":
        return operator(*tensors, **options, out=[dims[d.name] for d in attrs["dims"]])
    items = _brackets(opdef, attrs, dims)
    if items is None:
        return operator(*tensors, **options)
    if opdef.surface.items in ("filter", "rows"):
        options["out"] = [dims[d.name] for d in attrs["dims"]]
    applied = operator[items]
    return applied if isinstance(applied, md.Tensor) else applied(*tensors, **options)


def _option(value: Any) -> Any:
    return api.DType(value.name) if isinstance(value, types.DType) else value


SKIPPED = {"pad", "attention", "top_k"}
"""Their attributes are bound from the call, so that a sample does not say what stood there."""


@pytest.mark.parametrize("name", [n for n in CALLED if n not in SKIPPED])
def test_a_call_makes_the_operator(name: str) -> None:
    opdef = load_all()[name]
    for sample in opdef.samples:
        dims = _python_dims(sample)
        types = {
            f"x{i}": api.TensorType(tuple(dims[d.name] for d in t.dims), t.dtype.name)
            for i, t in enumerate(sample.ins)
        }
        found: list[Any] = []

        def call(*tensors: Any) -> Any:
            result = _apply(opdef, sample, list(tensors), dims)  # noqa: B023
            found.append(result)  # noqa: B023
            return result

        call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(n, inspect.Parameter.POSITIONAL_ONLY) for n in types]
        )
        call.__annotations__ = dict(types)
        program = md.program(call).named()
        outs = opdef.infer(sample.ins, dict(sample.attrs))
        results = found[0] if isinstance(found[0], tuple) else (found[0],)
        assert [r._value.type for r in results] == list(outs)
        made = [n for n in program.body if isinstance(n, ir.NamedOp) and n.name == name]
        assert made or len(program.body) <= 1
        assert all(n.attrs == tuple(sample.attrs) for n in made if set(n.attrs) & set(sample.attrs))


# --- forms -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", INITS)
def test_without_brackets_an_initialiser_is_written_down(name: str) -> None:
    form = getattr(md, name)(*[0.5] * INITS[name])
    assert isinstance(form, Form)
    call = form.syntax()
    assert (call.function.text, len(call.args)) == (name, INITS[name])


def test_forms_nest() -> None:
    form = md.adamw(lr=md.cosine(3e-4, 1000), clip=1.0)
    assert repr(form) == "adamw(lr=cosine(0.0003, 1000), clip=1.0)"
    (lr, clip) = form.syntax().keywords
    assert lr.name.text == "lr"
    assert clip.name.text == "clip"
