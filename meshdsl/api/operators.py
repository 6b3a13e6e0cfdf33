"""Every operator of the language as a Python object of the same name, made from the registry.

`[ ]` holds dims and `( )` holds tensors, as in the language: `md.softmax[mem](s)`, `md.iota[seq]`,
`md.zeros[m, k]()`, `md.top_k[experts >> slots](g)`. Names of initialisers without brackets make an
initialiser (`md.zeros()`, `md.normal(0.02)`), and those of optimizers and schedules do likewise.

Type checkers read `operators.pyi`, which is generated from the registry too (`signatures.py`).
"""

from __future__ import annotations

import inspect
from typing import Any

from meshdsl.api.errors import told
from meshdsl.api.refusals import ForeignMethod, is_foreign_call, refuse
from meshdsl.api.signatures import RATES, describe, names, signature_of
from meshdsl.api.sizes import computed
from meshdsl.api.source_location import here
from meshdsl.api.tensor import tracing
from meshdsl.api.tracer import Form
from meshdsl.diagnostics import did_you_mean, fail
from meshdsl.named.foreign import RENAMED, row_of
from meshdsl.named.from_syntax import INITS
from meshdsl.ops.opdef import load_all


class Operator:
    """An operator of the language. Brackets take its dims, parentheses its tensors and options."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name
        self.__module__ = "meshdsl"
        self.__doc__ = describe(name)

    @property
    def __signature__(self) -> inspect.Signature:
        return signature_of(self.__name__)

    def __repr__(self) -> str:
        return f"<operator {self.__name__}>"

    @told
    def __call__(self, *tensors: Any, **options: Any) -> Any:
        """Apply it to tensors and numbers; a tuple where it yields several tensors."""
        if is_foreign_call(self.__name__, tensors, options):
            refuse("operator", self.__name__, tensors, options)
        site = here()
        opdef = load_all().get(self.__name__)
        if opdef is not None and opdef.surface.items == "out":
            return _to_dims(self.__name__, tensors, options, site)
        return tracing(site).call(self.__name__, None, tensors, options, site)

    @told
    def __getitem__(self, items: Any) -> Any:
        listed = items if isinstance(items, tuple) else (items,)
        opdef = load_all().get(self.__name__)
        if opdef and opdef.surface.arity[1] == 0 and not opdef.surface.options:
            site = here()
            return tracing(site).call(self.__name__, listed, None, {}, site)
        return Applied(self.__name__, listed)


class Applied:
    """An operator with its dims: `md.softmax[mem]`, still to be given tensors."""

    def __init__(self, name: str, items: tuple[Any, ...]) -> None:
        self._name, self._items = name, items

    def __repr__(self) -> str:
        return f"<operator {self._name}[{', '.join(map(repr, self._items))}]>"

    @told
    def __call__(self, *tensors: Any, **options: Any) -> Any:
        """Apply it to tensors and numbers; a tuple where it yields several tensors."""
        site = here()
        opdef = load_all().get(self._name)
        states_result = opdef is not None and opdef.surface.states_result
        out = options.pop("out", None) if states_result else None
        return tracing(site).call(self._name, self._items, tensors, options, site, out)


class Maker:
    """An initialiser, an optimizer or a schedule; in brackets, the operator of the same name."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name
        self.__module__ = "meshdsl"
        self.__doc__ = describe(name)

    def __repr__(self) -> str:
        return f"<{'initialiser' if self.__name__ in INITS else 'optimizer'} {self.__name__}>"

    @told
    def __call__(self, *args: Any, **options: Any) -> Form:
        """The call with these arguments, as syntax."""
        site = here()
        notes = [computed(a, site.operand(i)) for i, a in enumerate(args)]
        notes += [computed(a, site.argument(name)) for name, a in options.items()]
        computed_notes = tuple(note for note in notes if note is not None)
        return Form(self.__name__, args, tuple(options.items()), site.span, computed_notes)

    def __getitem__(self, items: Any) -> Any:
        return Operator(self.__name__)[items]


def _to_dims(name: str, tensors: tuple[Any, ...], options: dict[str, Any], site: Any) -> Any:
    """The tensor `md.einsum(a, b, out=[dims])`, or that of another operator of given dims."""
    out = options.pop("out", None)
    if not isinstance(out, tuple | list):
        help = f"write `md.{name}(…, out=[batch, hidden])`: dims that are missing there are summed"
        fail("MD0252", f"`{name}` needs its result dims", site.span, help=help)
    return tracing(site).call(name, None, tensors, options, site, out)


def find(name: str) -> Operator | Maker | ForeignMethod:
    """The operator, initialiser or optimizer of this name; AttributeError for any other."""
    if name in INITS or name in RATES:
        return Maker(name)
    if name in names():
        return Operator(name)
    if row_of(name) is not None or name in RENAMED:
        return ForeignMethod(None, name)
    candidates = [*names(), *INITS, *RATES]
    close = did_you_mean(name, candidates)
    raise AttributeError(f"meshdsl has no `{name}`{'; ' + close if close else ''}")


def __getattr__(name: str) -> Operator | Maker | ForeignMethod:
    if name.startswith("__"):
        raise AttributeError(name)
    operator = globals()[name] = find(name)
    return operator
