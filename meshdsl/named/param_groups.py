"""Parameter groups: `minimize loss with adamw(lr=3e-4) { norm: weight_decay = 0, base: frozen }`.

What stands before the colon is a selector, as in a layout. Per parameter and option the narrowest
setting wins: that of a parameter before that of a function, and `params`, all of them, comes last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from meshdsl.diagnostics import (
    Diagnostic,
    Diagnostics,
    Related,
    Span,
    did_you_mean,
    fail,
    spelled_right,
)
from meshdsl.named.ir import ParamGroup, Value
from meshdsl.named.optimizers import COMMON, OPTIMIZERS, Evaluate, Optimizer, resolve_option
from meshdsl.named.selectors import GENERAL, selects
from meshdsl.records import dataclass
from meshdsl.syntax import ast
from meshdsl.syntax.printer import group_setting

FROZEN, TRAINED = "frozen", "trained"
WORDS = {FROZEN: True, TRAINED: False}
"""The words that stand for themselves, with whether parameters are frozen then."""

ALL = "params"
"""The selector of all parameters."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupRule:
    """One setting of the parameters that one selector names. Compared by identity.

    `name` is an option of the optimizer, or `frozen`, with whether they are as its `value`.
    """

    selector: tuple[str, ...]
    name: str
    value: Any
    place: Span
    node: ast.GroupSetting

    def level(self, param: Value) -> int | None:
        """How narrowly the rule names a parameter; None if it does not."""
        return GENERAL if self.selector == (ALL,) else selects(self.selector, param)

    def __str__(self) -> str:
        path = tuple(ast.Name(part, self.place) for part in self.selector)
        return group_setting(replace(self.node, selectors=(path,)))


def group_rules(
    node: ast.Minimize, optimizer: Optimizer, evaluate: Evaluate, diagnostics: Diagnostics
) -> tuple[GroupRule, ...]:
    """The settings in the braces of `minimize`, one for each selector; wrong ones are left out.

    Errors (MD0272, MD0273, MD0275, MD0276) go to `diagnostics`.
    """
    rules: dict[tuple[tuple[str, ...], str], GroupRule] = {}
    for setting in node.groups:
        value = diagnostics.of(partial(_value, node.optimizer, optimizer, setting, evaluate))
        if value is None:
            continue
        name = FROZEN if setting.name.text in WORDS else setting.name.text
        for path in setting.selectors:
            selector = tuple(part.text for part in path)
            place = path[0].span.to(path[-1].span)
            rule = GroupRule(selector, name, value, place, setting)
            first = rules.setdefault((selector, name), rule)
            if first is not rule:
                diagnostics.add(_twice(first, rule))
    return tuple(rules.values())


def _value(
    call: ast.CallExpr, optimizer: Optimizer, setting: ast.GroupSetting, evaluate: Evaluate
) -> Any:
    """The value of a setting. Raises MD0272, and what is wrong with the value."""
    name, legal = setting.name.text, [n for n in OPTIMIZERS[optimizer.name] if n not in COMMON]
    if setting.value is None:
        if name in WORDS:
            return WORDS[name]
        example = OPTIMIZERS[optimizer.name][name].shown if name in legal else ""
        help = f"write `{name} = {example}`" if example else did_you_mean(name, [*WORDS])
        help = help or f"it is `{FROZEN}`, `{TRAINED}`, or an option with its value"
        fixes = spelled_right(setting.name.span, name, [*WORDS])
        message = f"`{name}` says nothing of parameters"
        fail("MD0272", message, setting.name.span, help=help, fixes=fixes)
    if name in COMMON:
        help = f"write it as an argument: `{optimizer.name}(…, {name}=…)`"
        message = f"`{name}` is an option of all parameters together"
        fail("MD0272", message, setting.name.span, help=help)
    if name in WORDS:
        help = f"write `{name}` alone; of parameters that a wider setting froze, `{TRAINED}`"
        fail("MD0272", f"`{name}` has no value", setting.name.span, help=help)
    return resolve_option(call, setting.name, setting.value, legal, evaluate)


def _twice(first: GroupRule, rule: GroupRule) -> Diagnostic:
    where = (Related(first.node.span, "the other one"),)
    selector = ".".join(rule.selector)
    message = f"`{rule.name}` of `{selector}` is given twice"
    return Diagnostic("MD0273", message, rule.node.span, related=where, help="keep one of them")


# --- the parameters of each group ----------------------------------------------------------------


def param_groups(
    optimizer: Optimizer,
    rules: Sequence[GroupRule],
    params: Sequence[Value],
    diagnostics: Diagnostics,
) -> tuple[ParamGroup, ...]:
    """The groups of parameters whose updates have other options than `optimizer`, or none.

    `params` are all that can be trained. Reports selectors that name none of them (MD0277), and
    settings of one option that are equally narrow (MD0278).
    """
    for rule in _firsts(rules):
        if rule.selector != (ALL,) and not any(rule.level(p) is not None for p in params):
            diagnostics.add(_selects_nothing(rule, params))
    members: dict[tuple[tuple[str, Any], ...], list[Value]] = {}
    for param in params:
        options = diagnostics.of(partial(_options, param, rules)) or {}
        members.setdefault(tuple(sorted(options.items(), key=_name)), []).append(param)
    return tuple(
        ParamGroup(tuple(group), _with(optimizer, dict(options)))
        for options, group in members.items()
        if any(options_differ(optimizer, name, value) for name, value in options)
    )


def _name(item: tuple[str, Any]) -> str:
    return item[0]


def options_differ(optimizer: Optimizer, name: str, value: Any) -> bool:
    """Whether a setting changes anything of an optimizer."""
    return bool(value) if name == FROZEN else optimizer.option(name) != value


def _with(optimizer: Optimizer, options: Mapping[str, Any]) -> Optimizer | None:
    """The optimizer of a group; None where its parameters are frozen."""
    if options.get(FROZEN):
        return None
    own = {name: value for name, value in options.items() if name != FROZEN}
    return Optimizer(optimizer.name, {**optimizer.options, **own})


def _options(param: Value, rules: Iterable[GroupRule]) -> dict[str, Any]:
    """The options of a parameter that settings give. Raises MD0278."""
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
    return {name: rule.value for name, (_, rule) in chosen.items()}


def _equally_narrow(param: Value, first: GroupRule, second: GroupRule) -> None:
    message = f"two settings for `{param.name}` are equally narrow: `{first}` and `{second}`"
    where = Related(first.node.span, "the other setting")
    help = f"say it of the parameter: `{param.label}: …`"
    fail("MD0278", message, second.node.span, where, help=help)


def _firsts(rules: Iterable[GroupRule]) -> Iterable[GroupRule]:
    """The first rule of each selector."""
    firsts: dict[tuple[str, ...], GroupRule] = {}
    for rule in rules:
        firsts.setdefault(rule.selector, rule)
    return firsts.values()


def _selects_nothing(rule: GroupRule, params: Sequence[Value]) -> Diagnostic:
    """MD0277, with the nearest names that select a parameter."""
    selector = ".".join(rule.selector)
    names = selectable(params, dotted=len(rule.selector) > 1)
    listed = ", ".join(f"`{name}`" for name in names[:MOST_LISTED])
    more = ", …" if len(names) > MOST_LISTED else ""
    help = did_you_mean(selector, names)
    help = help or (f"there are {listed}{more}" if names else "the program has no parameters")
    fixes = spelled_right(rule.place, selector, names)
    message = f"`{selector}` selects no parameter that is trained"
    return Diagnostic("MD0277", message, rule.place, help=help, fixes=fixes)


MOST_LISTED = 8
"""Names that a help lists."""


def selectable(params: Iterable[Value], dotted: bool = False) -> list[str]:
    """The names of parameters and of functions that have some; `dotted`: the full names."""
    if dotted:
        return list(dict.fromkeys(str(p.name) for p in params))
    names = [n for p in params for n in (p.label, *p.functions)]
    return list(dict.fromkeys(names))
