"""`plan.load_weights` and `plan.save_weights`: the parameters of a plan as another's model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from meshdsl.api.dims import kind_of
from meshdsl.diagnostics import DiagnosticError, Diagnostics, Source, Span, fail
from meshdsl.syntax import ast

if TYPE_CHECKING:
    from meshdsl.backends.runtime.values import Spec
    from meshdsl.pipeline import Compilation

Weights = Mapping[str, str] | str | None
"""A block of weights: its name, its entries as text, or a dict of these; None: the only one."""


def loaded(made: Compilation, path: Any, weights: Weights, span: Span) -> dict[str, Any]:
    """The parameters in a model, whole, by name; those that it lacks are left out."""
    from meshdsl.backends.weights.params import mapped_model

    made, block = _with_weights(made, weights, span)
    mapped = mapped_model(os.fspath(path), made, block)
    return {name: array[()] for name, array in mapped.arrays.items()}


def save(
    made: Compilation,
    params: Mapping[str, Any],
    specs: Mapping[str, Spec],
    path: Any,
    weights: Weights,
    dtype: str | None,
    force: bool,
    span: Span,
) -> None:
    """Write parameters as a model: a folder, or a file by its suffix."""
    import torch

    from meshdsl.backends.engines.in_process import torch_dtype
    from meshdsl.backends.train.export import export_params
    from meshdsl.backends.weights.params import chosen_weights, in_dtype
    from meshdsl.backends.weights.writing import check_model

    made, block = _with_weights(made, weights, span)
    target = os.fspath(path)
    check_model(target, force)
    chosen = in_dtype(chosen_weights(made, block), dtype)
    if chosen.unmapped:
        help = "write an entry for it, or `init` to leave it out of models"
        fail("MD0554", f"there is no entry for `{chosen.unmapped[0]}`", span, help=help)
    blocks = {n: torch.from_numpy(params[n]).to(torch_dtype(s.dtype)) for n, s in specs.items()}
    export_params({0: blocks}, target, specs, {}, chosen)


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
