"""Dataclasses whose methods are written when they are first called.

`dataclass` is that of the standard library to a reader and to a type checker, and `fields`,
`replace` and `asdict` take its classes. The library writes and compiles six methods for each class
while a module is imported, 0.4 ms a class; a command uses a third of its classes, and few compare
or print them. Here a class gets stand-ins, each of which is replaced by the method at its first
call. Neither `InitVar` nor `order` is known here.
"""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Callable
from types import MemberDescriptorType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(
        cls: type | None = None,
        /,
        *,
        frozen: bool = False,
        slots: bool = False,
        eq: bool = True,
        repr: bool = True,
        kw_only: bool = False,
    ) -> Any:
        """As `dataclasses.dataclass`."""

        def decorated(cls: type) -> type:
            record = dataclasses.dataclass(
                init=False, repr=False, eq=False, slots=slots, kw_only=kw_only
            )(cls)
            _add_methods(record, frozen, slots, eq, repr)
            return record

        return decorated if cls is None else decorated(cls)


__all__ = ["dataclass"]


def _add_methods(cls: type, frozen: bool, slots: bool, eq: bool, repr: bool) -> None:
    methods = dict(cls.__dict__)
    has_hash = methods.get("__hash__") is not None
    if "__init__" not in methods:
        _add_later(cls, "__init__", lambda: _init(cls, frozen))
    if repr and "__repr__" not in methods:
        _add(cls, "__repr__", reprlib.recursive_repr()(_shown))
    if eq and "__eq__" not in methods:
        _add_later(cls, "__eq__", lambda: _eq(cls))
    if eq and not has_hash:
        if frozen:
            _add_later(cls, "__hash__", lambda: _hash(cls))
        else:
            cls.__hash__ = None  # type: ignore[assignment]
    if frozen:
        _add(cls, "__setattr__", _refused(cls, "__setattr__", "assign to"))
        _add(cls, "__delattr__", _refused(cls, "__delattr__", "delete"))
    if frozen and slots and "__getstate__" not in methods:
        _add(cls, "__getstate__", _state)
        _add(cls, "__setstate__", _set_state)


def _add(cls: type, name: str, method: Callable[..., Any]) -> None:
    method.__name__, method.__qualname__ = name, f"{cls.__qualname__}.{name}"
    setattr(cls, name, method)


def _add_later(cls: type, name: str, write: Callable[[], Callable[..., Any]]) -> None:
    """Add a stand-in for a method that is written at its first call."""

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        method = write()
        _add(cls, name, method)
        return method(*args, **kwargs)

    _add(cls, name, stand_in)


# --- the methods ---------------------------------------------------------------------------------

_UNSET = object()
"""The default of a parameter whose value a factory makes."""


def _init(cls: type, frozen: bool) -> Callable[..., Any]:
    """`__init__`: the fields in order, those by keyword alone behind the others."""
    every = dataclasses.fields(cls)
    taken = [f for f in every if f.init]
    names = {"_set": object.__setattr__, "_unset": _UNSET}
    names |= {f"_default_{f.name}": f.default for f in every}
    names |= {f"_make_{f.name}": f.default_factory for f in every}
    slots = {f.name: slot for f in every if (slot := _slot(cls, f.name))} if frozen else {}
    names |= {f"_set_{name}": slot.__set__ for name, slot in slots.items()}
    by_keyword = [_parameter(f) for f in taken if f.kw_only]
    parameters = ["self", *(_parameter(f) for f in taken if not f.kw_only)]
    parameters += ["*", *by_keyword] if by_keyword else []
    lines = [
        _assignment(f.name, value, frozen, f.name in slots)
        for f in every
        if (value := _value(f)) is not None
    ]
    if hasattr(cls, "__post_init__"):
        lines.append("self.__post_init__()")
    body = "\n    ".join(lines or ["pass"])
    return _compiled("__init__", f"({', '.join(parameters)})", body, names)


def _parameter(f: dataclasses.Field[Any]) -> str:
    if f.default is not dataclasses.MISSING:
        return f"{f.name}=_default_{f.name}"
    return f.name if f.default_factory is dataclasses.MISSING else f"{f.name}=_unset"


def _slot(cls: type, name: str) -> MemberDescriptorType | None:
    """The slot of a field, through which it is set without a look-up of its name."""
    slot = getattr(cls, name, None)
    return slot if isinstance(slot, MemberDescriptorType) else None


def _value(f: dataclasses.Field[Any]) -> str | None:
    """The expression whose value a field gets, or None where `__post_init__` sets it."""
    if f.default_factory is not dataclasses.MISSING:
        from_factory = f"_make_{f.name}()"
        return f"{from_factory} if {f.name} is _unset else {f.name}" if f.init else from_factory
    if f.init:
        return f.name
    return None if f.default is dataclasses.MISSING else f"_default_{f.name}"


def _assignment(name: str, value: str, frozen: bool, slotted: bool) -> str:
    if not frozen:
        return f"self.{name} = {value}"
    return f"_set_{name}(self, {value})" if slotted else f'_set(self, "{name}", {value})'


def _eq(cls: type) -> Callable[..., Any]:
    """`__eq__`: of the same class, with equal fields."""
    names = [f.name for f in dataclasses.fields(cls) if f.compare]
    one, other = (_tuple(of, names) for of in ("self", "other"))
    body = f"return {one} == {other} if other.__class__ is self.__class__ else NotImplemented"
    return _compiled("__eq__", "(self, other)", body, {})


def _hash(cls: type) -> Callable[..., Any]:
    """`__hash__`: of all fields that count."""
    every = dataclasses.fields(cls)
    counted = [f.name for f in every if (f.compare if f.hash is None else f.hash)]
    return _compiled("__hash__", "(self)", f"return hash({_tuple('self', counted)})", {})


def _tuple(of: str, names: list[str]) -> str:
    return f"({''.join(f'{of}.{name}, ' for name in names)})"


def _compiled(name: str, parameters: str, body: str, names: dict[str, Any]) -> Callable[..., Any]:
    space = dict(names)
    exec(f"def {name}{parameters}:\n    {body}", space)
    method: Callable[..., Any] = space[name]
    return method


def _shown(self: Any) -> str:
    """`__repr__`: the class with its fields."""
    shown = (f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self) if f.repr)
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _refused(cls: type, name: str, what: str) -> Callable[..., None]:
    """`__setattr__` or `__delattr__` of a frozen class; subclasses may have other attributes."""
    names = frozenset(f.name for f in dataclasses.fields(cls))

    def refuse(self: Any, attribute: str, *value: Any) -> None:
        if type(self) is cls or attribute in names:
            raise dataclasses.FrozenInstanceError(f"cannot {what} field {attribute!r}")
        getattr(super(cls, self), name)(attribute, *value)

    return refuse


def _stated(self: Any) -> list[dataclasses.Field[Any]]:
    """The fields that `__post_init__` does not set."""
    return [f for f in dataclasses.fields(self) if _value(f) is not None]


def _state(self: Any) -> list[Any]:
    """`__getstate__`: to be pickled, of a class with slots."""
    return [getattr(self, f.name) for f in _stated(self)]


def _set_state(self: Any, state: list[Any]) -> None:
    """`__setstate__`: fields that are frozen are set all the same.

    Those of `__post_init__` are made anew: the hash of a text is another one in another process.
    """
    for f, value in zip(_stated(self), state, strict=True):
        object.__setattr__(self, f.name, value)
    if hasattr(self, "__post_init__"):
        self.__post_init__()
