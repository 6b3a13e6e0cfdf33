"""Carries out what `emit_updates` writes, operator by operator, by the records' numpy or torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from meshdsl.diagnostics import Source, Span
from meshdsl.ir.types import F64, Dim, DType, TensorType
from meshdsl.named.ir import Goal, Node, Value
from meshdsl.named.optimizer_updates import emit_updates
from meshdsl.named.optimizers import Optimizer, resolve
from meshdsl.ops.opdef import NumpyCall, Signature, lookup
from meshdsl.prove.torch_run import TORCH, call, evaluate, several, to_torch
from meshdsl.syntax import ast
from meshdsl.syntax.parse import parse

SPAN = Span(Source("test.mdsl", "x"), 0, 1)


def optimizer(text: str) -> Optimizer:
    """The optimizer that `minimize loss with TEXT` means."""
    return resolve(optimizer_call(text))


def optimizer_call(text: str) -> ast.CallExpr:
    """The call after `with`."""
    return program_optimizer(f"program p(x) {{\n return x\n minimize x with {text}\n}}")


def program_optimizer(text: str) -> ast.CallExpr:
    """The optimizer of the only program of a file."""
    file, errors = parse(Source("test.mdsl", text))
    assert file, errors
    (program,) = (d for d in file.declarations if isinstance(d, ast.ProgramDecl))
    (goal,) = (s for s in program.body if isinstance(s, ast.Minimize))
    return goal.optimizer


def param(name: str, *dims: Dim, dtype: DType = F64) -> Value:
    return Value(TensorType(dims, dtype), SPAN, name, role="param")


class Engine:
    """Carries out each operator as it is emitted, on numpy arrays or, with `in_torch`, tensors.

    `kept` are the states between the steps, `known` all values in this step.
    """

    def __init__(self, in_torch: bool = False) -> None:
        self.in_torch = in_torch
        self.kept: dict[str, Any] = {}
        self.known: dict[Value, Any] = {}
        self.states: dict[str, tuple[Value, bool]] = {}
        self.updates: dict[Value, Value] = {}
        self.emitted: list[tuple[str, tuple[Value, ...], Value | None]] = []

    def give(self, value: Value, array: np.ndarray) -> None:
        """Set what a parameter or a gradient is."""
        self.known[value] = to_torch(array, value.type) if self.in_torch else array.copy()

    def emit(
        self,
        name: str,
        *ins: Value,
        of: Value | None,
        role: str = "state",
        name_hint: str = "",
        **attrs: Any,
    ) -> tuple[Value, ...]:
        types = lookup(name).infer(tuple(v.type for v in ins), attrs)
        outs = tuple(Value(t, SPAN, role=role, rules_from=of, name_hint=name_hint) for t in types)
        sig = Signature(tuple(v.type for v in ins), types, attrs)
        operands = [self.known[v] for v in ins]
        if self.in_torch:
            found = several(evaluate(lookup(name), call(sig), operands))
        else:
            found = several(lookup(name).numpy(NumpyCall(sig.ins, types, attrs), *operands))
        self.known.update(zip(outs, found, strict=True))
        self.emitted.append((name, outs, of))
        return outs

    def state(
        self,
        name: str,
        type: TensorType,
        of: Value | None,
        is_copy: bool = False,
        parts: bool = False,
    ) -> Value:
        value = Value(type, SPAN, name, role="state", rules_from=of)
        if name not in self.kept:
            self.give(value, np.zeros(type.shape, np.float64))
            if is_copy:
                assert of is not None, "a copy is that of a parameter"
                known = self.known[of]
                self.give(value, np.asarray(known.double() if self.in_torch else known))
            self.kept[name] = self.known[value]
        self.known[value] = self.kept[name]
        self.states[name] = value, is_copy
        return value

    def constant(self, number: int | float, dtype: DType) -> Value:
        value = Value(TensorType((), dtype), SPAN)
        given = np.asarray(number, np.float64 if dtype.kind == "float" else dtype.numpy)
        self.known[value] = (
            torch.tensor(number, dtype=TORCH[dtype.name]) if self.in_torch else given
        )
        return value

    def at(self, span: Span) -> Engine:
        return self

    def splice(
        self, nodes: Sequence[Node], new: Mapping[Value, Value], of: Value
    ) -> Mapping[Value, Value]:
        raise NotImplementedError("only optimizers of a file are other programs")

    def update(self, old: Value, new: Value) -> None:
        assert old not in self.updates
        assert old.type == new.type
        self.updates[old] = new

    def step(
        self,
        optimizer: Optimizer,
        params: Sequence[Value],
        grads: Sequence[np.ndarray],
        stacked: dict[Value, tuple[str, ...]] | None = None,
    ) -> None:
        """One step: parameters and states have their new values afterwards."""
        self.updates = {}
        values = [Value(p.type, SPAN, role="grad", rules_from=p) for p in params]
        for value, array in zip(values, grads, strict=True):
            self.give(value, array)
        goal = Goal(values[0], optimizer, SPAN, params=tuple(params))
        emit_updates(self, goal, dict(zip(params, values, strict=True)), stacked)
        new = {old: self.known[made] for old, made in self.updates.items()}
        assert set(new) == {*params, *(state for state, _ in self.states.values())}
        self.known = {p: new[p] for p in params}
        self.kept = {s.name: new[s] for s, _ in self.states.values() if s.name}

    def array(self, value: Value) -> np.ndarray:
        """The current value of a parameter, as a float64 array."""
        found = self.known[value]
        return found.double().numpy() if self.in_torch else np.asarray(found, np.float64)
