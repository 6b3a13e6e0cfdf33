"""Changes of a layout by one rule, as an edit of its text: what advice offers, once it was tried.

An edit is carried out on the tree of the layout, so that a layout which was recorded in Python can
be tried too. Where the layout is text, the same change is a `Fix` of that text.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from meshdsl.diagnostics import Edit, Fix, Span
from meshdsl.named.declarations import Declarations
from meshdsl.placed.layout import rule_text
from meshdsl.records import dataclass
from meshdsl.syntax import ast
from meshdsl.syntax.edits import without_entry


@dataclass(frozen=True, slots=True)
class RuleEdit:
    """A rule that is added to a layout, or `removed` from it.

    An added one displaces what the layout itself says of the same selector and dim.
    """

    selector: tuple[str, ...]
    dim: str
    axes: tuple[str, ...]
    removed: bool = False

    @property
    def rule(self) -> str:
        """The rule as the language writes it."""
        return rule_text(self.selector, self.dim, self.axes)

    def title(self, node: ast.LayoutDecl) -> str:
        """What is to be done to a layout, as a menu shows it."""
        if self.removed:
            return f"remove `{self.rule}`"
        same = self._displaced(node)
        return (
            f"add `{self.rule}`" if same is None else f"replace `{_shown(same)}` by `{self.rule}`"
        )

    def on(self, declarations: Declarations, layout: str) -> Declarations:
        """The declarations of a file after the edit of a layout that it declares."""
        node = declarations.layouts[layout]
        others = tuple(rule for rule in node.rules if not self._is_for(rule))
        rules = others if self.removed else (*others, self._declared(node.name.span))
        edited = replace(node, rules=rules)
        return replace(declarations, layouts={**declarations.layouts, layout: edited})

    def is_of(self, node: ast.LayoutDecl) -> bool:
        """Whether a layout itself has just this rule, and extends no other that may have it."""
        same = self._displaced(node)
        return node.base is None and same is not None and _texts(same.axes) == self.axes

    def fix(self, node: ast.LayoutDecl, safe: bool = False) -> Fix | None:
        """The edit of the layout's text; None where it is not written as text."""
        if node.recorded:
            return None
        return Fix(self.title(node), (self._edit(node),), safe)

    def _edit(self, node: ast.LayoutDecl) -> Edit:
        same = self._displaced(node)
        if self.removed:
            assert same is not None, "what is removed is a rule of the layout itself"
            return Edit(without_entry(same.span), "")
        if same is not None:
            return Edit(same.span, self.rule)
        ends = [rule.span.end for rule in node.rules] + [s.span.end for s in node.settings]
        if end := max(ends, default=0):
            return Edit(Span(node.span.source, end, end), f", {self.rule}")
        opened = node.span.start + node.span.text.index("{") + 1
        return Edit(Span(node.span.source, opened, opened), f" {self.rule} ")

    def _displaced(self, node: ast.LayoutDecl) -> ast.RuleDecl | None:
        """The rule of the layout itself for the same selector and dim."""
        return next((rule for rule in node.rules if self._is_for(rule)), None)

    def _is_for(self, rule: ast.RuleDecl) -> bool:
        return (_texts(rule.selector), rule.dim.text) == (self.selector, self.dim)

    def _declared(self, span: Span) -> ast.RuleDecl:
        def names(texts: Iterable[str]) -> tuple[ast.Name, ...]:
            return tuple(ast.Name(text, span) for text in texts)

        return ast.RuleDecl(
            names(self.selector), ast.Name(self.dim, span), names(self.axes), False, span
        )


def _shown(rule: ast.RuleDecl) -> str:
    return rule_text(_texts(rule.selector), rule.dim.text, _texts(rule.axes))


def _texts(names: Iterable[ast.Name]) -> tuple[str, ...]:
    return tuple(name.text for name in names)
