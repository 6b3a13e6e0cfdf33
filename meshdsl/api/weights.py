"""`plan.load_weights` and `plan.save_weights`: the parameters of a plan as another's model."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from meshdsl.api.argument_types import kind_of
from meshdsl.api.errors import warn
from meshdsl.diagnostics import Diagnostic, DiagnosticError, Diagnostics, Source, Span, fail
from meshdsl.syntax import ast

if TYPE_CHECKING:
    from meshdsl.api.source_location import Site
    from meshdsl.backends.runtime.values import Spec
    from meshdsl.pipeline import Compilation

Weights = Mapping[str, str] | str | None
"""A block of weights: its name, its entries as text, or a dict of these; None: the only one."""


def loaded(made: Compilation, path: Any, weights: Weights, site: Site) -> dict[str, Any]:
    """The parameters in a model, whole, by name; those that it lacks are left out.

    Warns of values that are rounded, and of those that one side lacks.
    """
    from meshdsl.backends.weights.params import mapped_model

    made, block = _with_weights(made, weights, site.span)
    mapped = mapped_model(_path(path, "MD0553", site.span), made, block)
    _warn(mapped.changes, site)
    return {name: array[()] for name, array in mapped.arrays.items()}


def save(
    made: Compilation,
    params: Mapping[str, Any],
    specs: Mapping[str, Spec],
    path: Any,
    weights: Weights,
    dtype: str | None,
    force: bool,
    site: Site,
) -> None:
    """Write parameters as a model: a folder, or a file by its suffix."""
    import torch

    from meshdsl.backends.engines.in_process import torch_dtype
    from meshdsl.backends.train.exported_params import export_params
    from meshdsl.backends.weights.params import chosen_weights, in_dtype
    from meshdsl.backends.weights.writing import check_model, check_writable

    made, block = _with_weights(made, weights, site.span)
    target = _path(path, "MD0554", site.span)
    check_model(target, force)
    chosen = in_dtype(chosen_weights(made, block), dtype)
    notes = check_writable(chosen, made.named)
    _warn((note for note in notes if note.code == "MD0555"), site)
    blocks = {n: torch.from_numpy(params[n]).to(torch_dtype(s.dtype)) for n, s in specs.items()}
    export_params({0: blocks}, target, specs, {}, chosen)


def _path(path: Any, code: str, span: Span) -> str:
    """The path of a model. Raises the diagnostic `code` for a value that is none."""
    if not isinstance(path, str | os.PathLike):
        help = "name a folder, a .safetensors file or a state dict of torch"
        fail(code, f"{kind_of(path)} is no path of a model", span, help=help)
    return os.fspath(path)


def _warn(notes: Iterable[Diagnostic], site: Site) -> None:
    frame = site.frame
    assert frame is not None, "a call comes from somewhere"
    told = [replace(note, severity="warning") for note in notes]
    warn(told, frame.f_code.co_filename, frame.f_lineno)


def _with_weights(
    made: Compilation, weights: Weights, span: Span
) -> tuple[Compilation, str | None]:
    """The compilation with a block of weights in any form among its declarations, and its name."""
    from meshdsl.syntax.parse import parse

    if weights is None or (isinstance(weights, str) and ":" not in weights):
        return made, weights
    if not isinstance(weights, str | Mapping):
        help = 'write `{"w": \'"layer.weight"[hidden, io]\'}`'
        fail("MD0818", f"{kind_of(weights)} is no block of weights", span, help=help)
    entries = weights
    if isinstance(weights, Mapping):
        entries = "\n".join(f"{name}: {places}" for name, places in weights.items())
    tree, problems = parse(Source("weights", f"weights written {{\n{entries}\n}}\n"))
    if problems:
        raise DiagnosticError(*problems)
    (node,) = (n for n in tree.declarations if isinstance(n, ast.WeightsDecl))
    declarations = replace(
        made.declarations, weights={**made.declarations.weights, "written": node}
    )
    return made.under(made.options, Diagnostics(), declarations), "written"
