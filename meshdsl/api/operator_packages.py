"""`md.use`: the operators of a user's own package, as `use kernels` in a file."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from meshdsl.api.argument_types import kind_of
from meshdsl.api.errors import told
from meshdsl.api.signatures import brackets_of
from meshdsl.api.source_location import here
from meshdsl.api.tensor import tracing
from meshdsl.diagnostics import Span, did_you_mean, fail
from meshdsl.named.packages import LOADED, OperatorPackage, add, installed, load
from meshdsl.ops.opdef import OpDef
from meshdsl.syntax.tokens import is_name


class PackageOperator:
    """An operator of a package. Brackets take its dims, parentheses its tensors and options."""

    def __init__(self, record: OpDef, package: str, items: tuple[Any, ...] | None = None) -> None:
        self.__name__ = self.__qualname__ = record.name
        self.__module__ = package
        call = f"{record.name}{brackets_of(record)}"
        self.__doc__ = f"`{call}(…)`: an operator of the package `{package}`.\n\n{record.meaning}"
        self._record, self._items = record, items

    def __repr__(self) -> str:
        return f"<operator {self.__name__} of {self.__module__}>"

    @told
    def __call__(self, *tensors: Any, **options: Any) -> Any:
        """Apply it to tensors and numbers; a tuple where it yields several tensors."""
        site = here()
        takes_dims = self._record.surface.items in ("out", "filter")
        out = options.pop("out", None) if takes_dims else None
        return tracing(site).call(self.__name__, self._items, tensors, options, site, out)

    @told
    def __getitem__(self, items: Any) -> PackageOperator:
        listed = items if isinstance(items, tuple) else (items,)
        return PackageOperator(self._record, self.__module__, listed)


class Operators:
    """The operators of a package as attributes: `kernels.swiglu(gate, up)`."""

    def __init__(self, package: OperatorPackage) -> None:
        self._package = package

    def __repr__(self) -> str:
        return f"<operators of {self._package.name}: {', '.join(dir(self))}>"

    def __dir__(self) -> list[str]:
        every = self._package.operators.items()
        return sorted(name for name, record in every if record.surface.items != "view")

    def __getattr__(self, name: str) -> PackageOperator:
        if name.startswith("_") or name not in dir(self):
            close = did_you_mean(name, dir(self))
            hint = close or f"there are {', '.join(dir(self))}"
            raise AttributeError(f"the package {self._package.name} has no `{name}`; {hint}")
        return PackageOperator(self._package.operators[name], self._package.name)


@told
def use(package: str | ModuleType) -> Operators:
    """The operators of a package of your own: `kernels = md.use("kernels")`.

    Args:
        package: the name of its entry point in the group `meshdsl.operators`, or its module, whose
            `OPERATORS` are the records. Files and other processes find installed packages alone.

    Raises:
        ProgramError: there is no such package, or it is wrong (MD0160 to MD0163).
    """
    span = here().span
    if isinstance(package, str):
        return Operators(load(package, span))
    if not isinstance(package, ModuleType):
        help = 'give a name, `md.use("kernels")`, or an imported module'
        fail("MD0815", f"{kind_of(package)} is not a package of operators", span, help=help)
    return Operators(_of_module(package, span))


def _of_module(module: ModuleType, span: Span) -> OperatorPackage:
    """The package of a module: under the name of its entry point, or its own."""
    homes = {entry.value.partition(":")[0]: name for name, entry in installed().items()}
    if module.__name__ in homes:
        return load(homes[module.__name__], span)
    name = module.__name__.rpartition(".")[2]
    if not is_name(name):
        message = f"`use {name}` cannot be written: `{name}` is not a valid name"
        fail(
            "MD0163",
            message,
            span,
            help="rename the module: letters, digits and `_`, and no reserved word",
        )
    return LOADED.get(name) or add(name, module.__name__, module, span)
