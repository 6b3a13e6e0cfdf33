"""Settings of layouts: how what a selector names is handled, not where it lies.

`grads: reduce = bf16` is the dtype in which parts of gradients are added up, `state: memory = disk`
`params: memory = host` and `activations: memory = host` where states of an optimizer, parameters
and what the backward pass reads are stored (`offload.py`),
`activations: gather = again` how the backward pass has what the forward pass has gathered
(`gather_again.py`), `activations: attention = ring` how an attention has the keys and values of
other devices (`rings.py`). `SETTINGS` is the table of all
of them. A number of an axis, `conv3: pipe = 1`, is a stage of a pipeline (`stage_rules.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from meshdsl.diagnostics import (
    Diagnostic,
    Diagnostics,
    Edit,
    Fix,
    Related,
    Span,
    advice,
    closest,
    spelled_right,
)
from meshdsl.records import dataclass
from meshdsl.syntax import ast
from meshdsl.syntax.edits import removal
from meshdsl.syntax.symbols import ACTIVATIONS, ROLES

KINDS = (*ROLES, ACTIVATIONS)
"""The selectors of kinds of tensors; all others name single tensors and functions."""

SETTINGS: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("grads", "reduce"): ("bf16", "f32"),
    ("state", "memory"): ("disk", "host"),
    ("params", "memory"): ("host", "disk"),
    (ACTIVATIONS, "memory"): ("host", "disk"),
    (ACTIVATIONS, "gather"): ("again", "once"),
    (ACTIVATIONS, "attention"): ("ring", "zigzag", "gather"),
}
"""The values of every setting, by its selector and name.

What `activations` have, single tensors and functions may have, too: `attend.x: gather = again`.
"""


def settings_for(selector: str) -> dict[str, tuple[str, ...]]:
    """The settings that a selector may have, with their values."""
    selector = selector if selector in ROLES else ACTIVATIONS
    return {name: values for (of, name), values in SETTINGS.items() if of == selector}


NAMES = list(dict.fromkeys(name for _, name in SETTINGS))


@dataclass(frozen=True, slots=True, eq=False)
class Setting:
    """One setting. Compared by identity."""

    selector: str
    name: str
    value: str
    span: Span

    @property
    def is_of_kind(self) -> bool:
        """Whether it is of a kind of tensors, not of single tensors or functions.

        `activations.x` is `x` of a function that is called like the kind.
        """
        return self.selector in KINDS

    @property
    def path(self) -> tuple[str, ...]:
        """The parts of the selector."""
        return tuple(self.selector.split("."))

    def __str__(self) -> str:
        return f"{self.selector}: {self.name} = {self.value}"


@dataclass(frozen=True, slots=True, eq=False)
class StageRule:
    """`conv3: pipe = 1`: from what the selector names on, the program is on that stage of `axis`.

    Compared by identity.
    """

    selector: tuple[str, ...]
    axis: str
    stage: int
    span: Span

    def __str__(self) -> str:
        return f"{'.'.join(self.selector)}: {self.axis} = {self.stage}"


def stage_rules_of(
    nodes: Iterable[ast.LayoutDecl], diagnostics: Diagnostics
) -> tuple[StageRule, ...]:
    """The stages that layouts give, each of which extends the one before; later ones displace."""
    rules: dict[tuple[tuple[str, ...], str], StageRule] = {}
    for node in nodes:
        of_layout: dict[tuple[tuple[str, ...], str], StageRule] = {}
        for written in filter(_is_stage, node.settings):
            assert isinstance(written.value, ast.Number)
            selector = tuple(part.text for part in written.selector)
            rule = StageRule(selector, written.name.text, int(written.value.value), written.span)
            first = of_layout.setdefault((selector, rule.axis), rule)
            if first is not rule:
                diagnostics.add(_twice(first, rule))
        rules.update(of_layout)
    return tuple(rules.values())


def _is_stage(node: ast.SettingDecl) -> bool:
    """Whether a setting is the number of a stage: nothing else is set of a tensor."""
    first, *more = (part.text for part in node.selector)
    of_all = first == ACTIVATIONS and not more and node.name.text in NAMES
    if first in ROLES or of_all:
        return False
    return isinstance(node.value, ast.Number) and isinstance(node.value.value, int)


def settings_of(nodes: Iterable[ast.LayoutDecl], diagnostics: Diagnostics) -> tuple[Setting, ...]:
    """The settings of layouts, each of which extends the one before; later ones displace.

    Wrong ones are left out; errors go to `diagnostics`.
    """
    settings: dict[tuple[str, str], Setting] = {}
    for node in nodes:
        of_layout: dict[tuple[str, str], Setting] = {}
        for written in (n for n in node.settings if not _is_stage(n)):
            setting = _setting(written, diagnostics)
            if setting is None:
                continue
            first = of_layout.setdefault((setting.selector, setting.name), setting)
            if first is not setting:
                diagnostics.add(_twice(first, setting))
        settings.update(of_layout)
    return tuple(settings.values())


def _setting(node: ast.SettingDecl, diagnostics: Diagnostics) -> Setting | None:
    """A setting of the table; None for one that is not in it."""
    selector, name = ".".join(part.text for part in node.selector), node.name.text
    wrong = _wrong_name(node) or _wrong_selector(node, selector) or _wrong_value(node, selector)
    if wrong is not None:
        diagnostics.add(wrong)
        return None
    assert isinstance(node.value, ast.Ref)
    return Setting(selector, name, node.value.name.text, node.span)


def _wrong_name(node: ast.SettingDecl) -> Diagnostic | None:
    name = node.name.text
    if name in NAMES:
        return None
    every = ", ".join(f"`{text}`" for text in _forms())
    of = node.selector[-1].text
    of = "NAME" if of in KINDS else of
    stage = f"`{of}: {name} = 1` is a stage of a pipeline"
    fixes = spelled_right(node.name.span, name, NAMES)
    help = advice(fixes) or f"there are {every}; a dim is split by `->`; {stage}"
    message = f"layouts have no setting `{name}`"
    return Diagnostic("MD0312", message, node.name.span, help=help, fixes=fixes)


def _wrong_selector(node: ast.SettingDecl, selector: str) -> Diagnostic | None:
    name = node.name.text
    first, *more = (part.text for part in node.selector)
    in_role = more and first in ROLES
    if name in settings_for(first) and not in_role:
        return None
    legal = [s for s, n in SETTINGS if n == name]
    span = node.selector[0].span.to(node.selector[-1].span)
    texts = [f"{s}: {name} = {SETTINGS[s, name][0]}" for s in legal]
    fixes = spelled_right(span, selector, legal) or tuple(
        Fix.write(node.span, text, safe=False) for text in texts
    )
    message = f"`{selector}` has no setting `{name}`"
    return Diagnostic("MD0313", message, span, fixes=fixes)


def _wrong_value(node: ast.SettingDecl, selector: str) -> Diagnostic | None:
    name, value = node.name.text, node.value
    legal = settings_for(node.selector[0].text)[name]
    if isinstance(value, ast.Ref) and value.name.text in legal:
        return None
    text = value.name.text if isinstance(value, ast.Ref) else ""
    meant = closest(text, list(legal))
    message = f"`{selector}: {name}` is {' or '.join(f'`{v}`' for v in legal)}"
    values = (meant,) if meant else legal
    fixes = tuple(
        Fix(f"write `{selector}: {name} = {v}`", (Edit(value.span, v),), safe=bool(meant))
        for v in values
    )
    return Diagnostic("MD0314", message, value.span, fixes=fixes)


def _twice(first: Setting | StageRule, setting: Setting | StageRule) -> Diagnostic:
    remove = removal(setting.span, "remove this one")
    message = f"`{str(setting).partition(' = ')[0]}` is given twice"
    where = (Related(first.span, "the other one"),)
    return Diagnostic("MD0315", message, setting.span, related=where, fixes=(remove,))


def _forms() -> Iterable[str]:
    return (f"{s}: {name} = {values[0]}" for (s, name), values in SETTINGS.items())
