"""Parameter groups: `minimize loss with adamw(lr=3e-4) { norm: weight_decay = 0, base: frozen }`.

What stands before the colon is a selector, as in a layout. Per parameter and option the narrowest
setting wins: that of a parameter before that of a function, and `params`, all of them, comes last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

from meshdsl.diagnostics import (
    Diagnostic,
    DiagnosticError,
    Diagnostics,
    Fix,
    Related,
    Span,
    advice,
    fail,
    spelled_right,
)
from meshdsl.named.ir import ParamGroup, Value
from meshdsl.named.optimizers import (
    COMMON,
    Evaluate,
    Optimizer,
    Written,
    no_option,
    resolve,
    resolve_option,
)
from meshdsl.named.selectors import GENERAL, selects
from meshdsl.records import dataclass
from meshdsl.syntax import ast
from meshdsl.syntax.edits import removal
from meshdsl.syntax.printer import group_setting

FROZEN, TRAINED = "frozen", "trained"
WORDS = {FROZEN: True, TRAINED: False}
"""The words that stand for themselves, with whether parameters are frozen then."""

OPTIMIZER = "optimizer"
"""The name of a setting that is another optimizer."""

ALL = "params"
"""The selector of all parameters."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupRule:
    """One setting of the parameters that one selector names. Compared by identity.

    `name` is an option of the optimizer, `frozen`, with whether they are as its `value`, or
    `optimizer`, with another one.
    """

    selector: tuple[str, ...]
    name: str
    value: Any
    place: Span
    node: ast.GroupSetting | ast.GroupOptimizer

    def level(self, param: Value) -> int | None:
        """How narrowly the rule names a parameter; None if it does not."""
        return GENERAL if self.selector == (ALL,) else selects(self.selector, param)

    def __str__(self) -> str:
        path = tuple(ast.Name(part, self.place) for part in self.selector)
        return group_setting(replace(self.node, selectors=(path,)))


def group_rules(
    node: ast.Minimize,
    optimizer: Optimizer,
    evaluate: Evaluate,
    written: Written,
    diagnostics: Diagnostics,
) -> tuple[GroupRule, ...]:
    """The settings in the braces of `minimize`, one for each selector; wrong ones are left out.

    Errors (MD0272, MD0273, MD0275, MD0276) go to `diagnostics`.
    """
    rules: dict[tuple[tuple[str, ...], str], GroupRule] = {}
    others = {
        setting: diagnostics.of(partial(_other_optimizer, setting.optimizer, evaluate, written))
        for setting in node.groups
        if isinstance(setting, ast.GroupOptimizer)
    }
    optimizers = [optimizer, *filter(None, others.values())]
    for setting in node.groups:
        if isinstance(setting, ast.GroupOptimizer):
            name, value = OPTIMIZER, others[setting]
        else:
            value = diagnostics.of(partial(_value, optimizers, setting, evaluate))
            name = FROZEN if setting.name.text in WORDS else setting.name.text
        if value is None:
            continue
        for path in setting.selectors:
            selector = tuple(part.text for part in path)
            place = path[0].span.to(path[-1].span)
            rule = GroupRule(selector, name, value, place, setting)
            first = rules.setdefault((selector, name), rule)
            if first is not rule:
                diagnostics.add(_twice(first, rule))
    return tuple(rules.values())


def _other_optimizer(call: ast.CallExpr, evaluate: Evaluate, written: Written) -> Optimizer:
    """The optimizer of a group. Raises MD0272 for options of all parameters together."""
    for keyword in call.keywords:
        if keyword.name.text in COMMON:
            _of_all(keyword.name, "the optimizer of all parameters")
    return resolve(call, evaluate, written)


def _of_all(name: ast.Name, optimizer: str) -> NoReturn:
    help = f"write `{name.text}=…` as an argument of {optimizer}"
    message = f"`{name.text}` is an option of all parameters together"
    fail("MD0272", message, name.span, help=help)


def _value(optimizers: Sequence[Optimizer], setting: ast.GroupSetting, evaluate: Evaluate) -> Any:
    """The value of a setting for one of the optimizers. Raises MD0272, and what is wrong."""
    name, usual = setting.name.text, optimizers[0]
    optimizer = next((each for each in optimizers if name in each.own), usual)
    if setting.value is None:
        return _word(optimizer, setting.name)
    if name in COMMON:
        _of_all(setting.name, f"`{usual.name}(…)`")
    if name in WORDS:
        help = f"write `{name}` alone; of parameters that a wider setting froze, `{TRAINED}`"
        fail("MD0272", f"`{name}` has no value", setting.name.span, help=help)
    return resolve_option(optimizer, setting.name, setting.value, evaluate)


def _word(optimizer: Optimizer, name: ast.Name) -> bool:
    """Whether a word freezes parameters. Raises MD0272 for any other word."""
    if name.text in WORDS:
        return WORDS[name.text]
    example = optimizer.own[name.text].shown if name.text in optimizer.own else ""
    fixes = spelled_right(name.span, name.text, [*WORDS])
    if example:
        fixes = (Fix.write(name.span, f"{name.text} = {example}", safe=False),)
    help = advice(fixes) or f"it is `{FROZEN}`, `{TRAINED}`, or an option with its value"
    fail("MD0272", f"`{name.text}` says nothing of parameters", name.span, help=help, fixes=fixes)


def _twice(first: GroupRule, rule: GroupRule) -> Diagnostic:
    where = (Related(first.node.span, "the other one"),)
    selector = ".".join(rule.selector)
    message = f"`{rule.name}` of `{selector}` is given twice"
    fixes = (removal(rule.node.span, "remove this setting"),)
    return Diagnostic("MD0273", message, rule.node.span, related=where, fixes=fixes)


# --- the parameters of each group ----------------------------------------------------------------


def param_groups(
    optimizer: Optimizer,
    rules: Sequence[GroupRule],
    params: Sequence[Value],
    unreached: Sequence[Value],
    diagnostics: Diagnostics,
) -> tuple[ParamGroup, ...]:
    """The groups of parameters whose updates have other options than `optimizer`, or none.

    `params` are all that the loss depends on, and `unreached` all others. Reports selectors that
    name none of `params` (MD0277), and settings of one option that are equally narrow (MD0278).
    """
    for rule in _firsts(rules):
        if rule.selector != (ALL,) and not any(rule.level(p) is not None for p in params):
            diagnostics.add(_selects_nothing(rule, params, unreached))
    members: list[tuple[Optimizer | None, list[Value]]] = []
    for param in params:
        chosen = diagnostics.of(partial(_chosen, param, rules)) or {}
        changed = diagnostics.of(partial(_optimizer, optimizer, chosen))
        alike = next((group for other, group in members if other == changed), None)
        if alike is not None:
            alike.append(param)
        elif changed != optimizer:
            members.append((changed, [param]))
    return tuple(ParamGroup(tuple(group), changed) for changed, group in members)


def _optimizer(usual: Optimizer, chosen: Mapping[str, tuple[int, GroupRule]]) -> Optimizer | None:
    """The optimizer of a parameter; None where it is frozen.

    Settings that are wider than the one that names another optimizer are not for that. Raises
    MD0272 for an option that its optimizer does not have.
    """
    if FROZEN in chosen and chosen[FROZEN][1].value:
        return None
    least, rule = chosen.get(OPTIMIZER, (GENERAL, None))
    optimizer: Optimizer = usual if rule is None else rule.value
    options = dict(optimizer.options)
    for name, (level, setting) in chosen.items():
        if name in (FROZEN, OPTIMIZER) or level < least:
            continue
        if name not in optimizer.own:
            assert isinstance(setting.node, ast.GroupSetting), "it is no optimizer"
            raise DiagnosticError(no_option(optimizer, setting.node.name))
        options[name] = setting.value
    return replace(optimizer, options=options)


def _chosen(param: Value, rules: Iterable[GroupRule]) -> dict[str, tuple[int, GroupRule]]:
    """The settings of a parameter, with how narrow they are. Raises MD0278."""
    chosen: dict[str, tuple[int, GroupRule]] = {}
    for rule in rules:
        level = rule.level(param)
        if level is None:
            continue
        old = chosen.get(rule.name)
        if old is None or level > old[0]:
            chosen[rule.name] = level, rule
        elif level == old[0] and old[1].value != rule.value:
            _equally_narrow(param, old[1], rule)
    return chosen


def _equally_narrow(param: Value, first: GroupRule, second: GroupRule) -> None:
    message = f"two settings for `{param.name}` are equally narrow: `{first}` and `{second}`"
    where = Related(first.node.span, "the other setting")
    fixes = (removal(second.node.span, "remove this setting"),)
    help = advice(fixes, f"or say it of the parameter: `{param.label}: …`")
    fail("MD0278", message, second.node.span, where, help=help, fixes=fixes)


def _firsts(rules: Iterable[GroupRule]) -> Iterable[GroupRule]:
    """The first rule of each selector."""
    firsts: dict[tuple[str, ...], GroupRule] = {}
    for rule in rules:
        firsts.setdefault(rule.selector, rule)
    return firsts.values()


def _selects_nothing(
    rule: GroupRule, params: Sequence[Value], unreached: Sequence[Value]
) -> Diagnostic:
    """MD0277, with the nearest names that select a parameter."""
    selector = ".".join(rule.selector)
    message = f"`{selector}` selects no parameter that is trained"
    if any(rule.level(p) is not None for p in unreached):
        leave = "the loss does not depend on what it selects: leave it out"
        return Diagnostic("MD0277", message, rule.place, help=leave)
    names = selectable(params, dotted=len(rule.selector) > 1)
    listed = ", ".join(f"`{name}`" for name in names[:MOST_LISTED])
    more = ", …" if len(names) > MOST_LISTED else ""
    fixes = spelled_right(rule.place, selector, [*names, ALL])
    groups = f"there are {listed}{more}" if names else "the loss depends on no parameter"
    help = advice(fixes) or groups
    return Diagnostic("MD0277", message, rule.place, help=help, fixes=fixes)


MOST_LISTED = 8
"""Names that a help lists."""


def selectable(params: Iterable[Value], dotted: bool = False) -> list[str]:
    """The names of parameters and of functions that have some; `dotted`: the full names."""
    if dotted:
        return list(dict.fromkeys(str(p.name) for p in params))
    names = [n for p in params for n in (p.label, *p.functions)]
    return list(dict.fromkeys(names))
