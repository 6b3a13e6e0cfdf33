"""Generates the tables of a parser from its grammar, by lark."""

from __future__ import annotations

from typing import Any

from meshdsl.grammar.parser import END, FREE


class _KeepFree:
    always_accept = FREE


def tables(text: str) -> dict[str, Any]:
    """The tables of a grammar with the rule `start`, as JSON can hold them (`Tables`)."""
    import lark
    from lark.lexer import PatternStr

    options: dict[str, Any] = {"parser": "lalr", "lexer": "basic", "postlex": _KeepFree()}
    made: Any = lark.Lark(text, maybe_placeholders=True, **options)
    lexer = made._build_lexer()
    terminals = lexer.scanner.terminals
    rules = made.parser.parser_conf.rules
    table = made.parser.parser._parse_table
    numbers = {rule: ~at for at, rule in enumerate(rules)}
    places = {state: at for at, state in enumerate(table.states)}
    actions: list[dict[str, int]] = []
    gotos: list[dict[str, int]] = []
    names = {rule.origin.name for rule in rules}
    for row in table.states.values():
        does = {
            str(kind): places[to] if to in places else numbers[to] for kind, (_, to) in row.items()
        }
        actions.append({kind: to for kind, to in does.items() if kind not in names})
        gotos.append({name: to for name, to in does.items() if name in names})
    end = places[table.end_states["start"]]
    actions[end][END.type] = end  # the parse ends there, whatever comes next
    return {
        "pattern": "|".join(f"(?P<{t.name}>{t.pattern.to_regexp()})" for t in terminals),
        "ignored": sorted(lexer.ignore_types),
        "keywords": {
            kind: {t.pattern.value: t.name for t in callback.scanner.terminals}
            for kind, callback in lexer.callback.items()
        },
        "spelling": {
            t.name: t.pattern.value for t in made.terminals if isinstance(t.pattern, PatternStr)
        },
        "rules": [_rule(rule) for rule in rules],
        "actions": actions,
        "gotos": gotos,
        "start": places[table.start_states["start"]],
    }


def _rule(rule: Any) -> list[Any]:
    """The rule as `tables.Rule` has it."""
    tree, options = rule.alias or rule.origin.name, rule.options
    empty = options.empty_indices or [False] * len(rule.expansion)
    taken: list[int] = []
    parts = iter(enumerate(rule.expansion))
    for is_empty in empty:
        if is_empty:
            taken.append(-1)
            continue
        at, part = next(parts)
        is_inlined = not part.is_term and part.name.startswith("_")
        if options.keep_all_tokens or not (part.is_term and part.filter_out):
            taken.append(2 * at + is_inlined)
    is_transparent = bool(options.expand1) and not rule.alias
    return [str(rule.origin.name), str(tree), len(rule.expansion), taken, is_transparent]
