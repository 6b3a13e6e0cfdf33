"""Dataclasses whose fields and methods are made when they are first asked for.

`dataclass` is that of the standard library to a reader and to a type checker, and `fields`,
`replace` and `asdict` take its classes. The library reads the fields of each class, and writes and
compiles six methods for it, while a module is imported: 0.5 ms a class. A command uses a third of
its classes, and few compare or print them. Here a class gets its slots, and stand-ins for the rest,
each of which is replaced when it is first called or read. Neither `InitVar` nor `order` is known
here.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import reprlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CodeType, FunctionType, MemberDescriptorType
from typing import TYPE_CHECKING, Any, ClassVar, get_origin

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
            space = dict(cls.__dict__)
            kinds = space.get("__annotations__", {})
            names = [name for name, kind in kinds.items() if not _is_class_wide(kind)]
            defaults = {name: space[name] for name in names if name in space}
            added = _methods(space, frozen, slots, eq, repr)
            added["__dataclass_own__"] = _Own(
                {n: kinds[n] for n in names}, defaults, kw_only, frozen
            )
            return _with_slots(cls, space, names, added) if slots else _with(cls, defaults, added)

        return decorated if cls is None else decorated(cls)


__all__ = ["dataclass"]

Namespace = dict[str, Any]
"""What stands in a class, or is known to the text of a function, by name."""


class _Own:
    """What stands in one class: the kinds and the defaults of its fields, and its options."""

    __slots__ = ("defaults", "frozen", "kinds", "kw_only")

    def __init__(self, kinds: Namespace, defaults: Namespace, kw_only: bool, frozen: bool) -> None:
        self.kinds, self.defaults, self.kw_only, self.frozen = kinds, defaults, kw_only, frozen


def _is_class_wide(kind: Any) -> bool:
    """Whether an annotation is that of a variable of the class, and of no field."""
    if isinstance(kind, str):
        return "ClassVar" in kind and kind.partition("[")[0].rpartition(".")[2] == "ClassVar"
    return kind is ClassVar or get_origin(kind) is ClassVar


def _methods(space: Namespace, frozen: bool, slots: bool, eq: bool, repr: bool) -> Namespace:
    """The methods that `dataclasses` would add to a class, without those that it defines.

    Those that depend on its fields are stand-ins, which are replaced when they are first used.
    """
    wanted = ["__dataclass_fields__", "__match_args__", "__init__"]
    wanted += ["__eq__"] if eq else []
    added: Namespace = {name: _LATER[name] for name in wanted if name not in space}
    if repr and "__repr__" not in space:
        added["__repr__"] = _shown
    if eq and space.get("__hash__") is None:
        added["__hash__"] = _LATER["__hash__"] if frozen else None
    if frozen:
        added |= {name: _LATER[name] for name in ("__setattr__", "__delattr__")}
    if frozen and slots and "__getstate__" not in space:
        added |= {"__getstate__": _state, "__setstate__": _set_state}
    return added


def _with(cls: type, defaults: Namespace, added: Namespace) -> type:
    """The class with what is added; its variables are the defaults of its fields."""
    for name, default in defaults.items():
        if isinstance(default, dataclasses.Field):
            if default.default is dataclasses.MISSING:
                delattr(cls, name)
            else:
                setattr(cls, name, default.default)
    for name, value in added.items():
        setattr(cls, name, value)
    return cls


def _with_slots(cls: type, space: Namespace, names: list[str], added: Namespace) -> type:
    """A class like another one, with slots for its fields and with what is added."""
    taken = {slot for base in cls.__mro__[1:-1] for slot in _slots(base)}
    slots = dict.fromkeys((*_without_slots(cls), *names))
    for name in (*slots, "__dict__", "__weakref__"):
        space.pop(name, None)
    space["__slots__"] = tuple(name for name in slots if name not in taken)
    slotted = type(cls)(cls.__name__, cls.__bases__, space | added)
    slotted.__qualname__ = cls.__qualname__
    return slotted


def _slots(cls: type) -> Iterable[str]:
    slots: Iterable[str] = cls.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else slots


def _without_slots(cls: Any) -> Iterator[str]:
    """The fields of those bases that have no slots."""
    for base in cls.__mro__[-1:0:-1]:
        if "__dataclass_fields__" in base.__dict__ and "__slots__" not in base.__dict__:
            yield from base.__dataclass_fields__


class _Later:
    """A stand-in for an attribute of classes, which a class has made when it is first read."""

    def __init__(self, name: str, make: Callable[[Any], Any]) -> None:
        self.name, self.make = name, make

    def __get__(self, instance: object, owner: type) -> Any:
        for cls in owner.__mro__:  # where another thread was faster, none has it
            if cls.__dict__.get(self.name) is self:
                value = self.make(cls)
                if isinstance(value, FunctionType):
                    value.__name__ = self.name
                    value.__qualname__ = f"{cls.__qualname__}.{self.name}"
                setattr(cls, self.name, value)
        return getattr(owner if instance is None else instance, self.name)


# --- the fields ----------------------------------------------------------------------------------


def _fields(cls: Any) -> dict[str, dataclasses.Field[Any]]:
    """The fields of the bases, then those that stand in the class itself."""
    bases = (getattr(base, "__dataclass_fields__", {}) for base in cls.__mro__[-1:0:-1])
    own: _Own = cls.__dict__["__dataclass_own__"]
    fields = {name: _field(name, kind, own) for name, kind in own.kinds.items()}
    return functools.reduce(operator.or_, bases, {}) | fields


def _field(name: str, kind: Any, own: _Own) -> dataclasses.Field[Any]:
    default = own.defaults.get(name, dataclasses.MISSING)
    field: Any = default
    if not isinstance(default, dataclasses.Field):
        field = dataclasses.field(default=default)
    field.name, field.type = name, kind
    field._field_type = dataclasses._FIELD  # type: ignore[attr-defined]
    if field.kw_only is dataclasses.MISSING:
        field.kw_only = own.kw_only
    return field  # type: ignore[no-any-return]


def _match_args(cls: Any) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(cls) if f.init and not f.kw_only)


# --- the methods ---------------------------------------------------------------------------------

_UNSET = object()
"""The default of a parameter whose value a factory makes."""


def _init(cls: Any) -> Callable[..., Any]:
    """`__init__`: the fields in order, those by keyword alone behind the others."""
    every, frozen = dataclasses.fields(cls), cls.__dict__["__dataclass_own__"].frozen
    names: Namespace = {"_set": object.__setattr__, "_unset": _UNSET}
    parameters, by_keyword, lines = ["self"], list[str](), list[str]()
    for number, f in enumerate(every):
        names |= {f"_default{number}": f.default, f"_make{number}": f.default_factory}
        if f.init:
            (by_keyword if f.kw_only else parameters).append(_parameter(f, number))
        value = _value(f, number)
        slot = _slot(cls, f.name) if frozen else None
        if slot is not None:
            names[f"_set{number}"] = slot.__set__
        if value is not None:
            lines.append(_assignment(number, value, frozen, slot is not None))
    parameters += ["*", *by_keyword] if by_keyword else []
    if hasattr(cls, "__post_init__"):
        lines.append("self.__post_init__()")
    body = "\n    ".join(lines or ["pass"])
    return _compiled("__init__", f"({', '.join(parameters)})", body, names, every)


def _parameter(f: dataclasses.Field[Any], number: int) -> str:
    if f.default is not dataclasses.MISSING:
        return f"_{number}=_default{number}"
    return f"_{number}" if f.default_factory is dataclasses.MISSING else f"_{number}=_unset"


def _slot(cls: type, name: str) -> MemberDescriptorType | None:
    """The slot of a field, through which it is set without a look-up of its name."""
    slot = getattr(cls, name, None)
    return slot if isinstance(slot, MemberDescriptorType) else None


def _value(f: dataclasses.Field[Any], number: int) -> str | None:
    """The expression whose value a field gets, or None where `__post_init__` sets it."""
    if f.default_factory is not dataclasses.MISSING:
        call = f"_make{number}()"
        return f"{call} if _{number} is _unset else _{number}" if f.init else call
    if f.init:
        return f"_{number}"
    return None if f.default is dataclasses.MISSING else f"_default{number}"


def _assignment(number: int, value: str, frozen: bool, slotted: bool) -> str:
    if not frozen:
        return f"self._{number} = {value}"
    return f"_set{number}(self, {value})" if slotted else f"_set(self, _name{number}, {value})"


def _eq(cls: Any) -> Callable[..., Any]:
    """`__eq__`: of the same class, with equal fields."""
    compared = [f for f in dataclasses.fields(cls) if f.compare]
    one, other = (_tuple(of, len(compared)) for of in ("self", "other"))
    body = f"return {one} == {other} if other.__class__ is self.__class__ else NotImplemented"
    return _compiled("__eq__", "(self, other)", body, {}, compared)


def _hash(cls: Any) -> Callable[..., Any]:
    """`__hash__`: of all fields that count."""
    every = dataclasses.fields(cls)
    counted = [f for f in every if (f.compare if f.hash is None else f.hash)]
    body = f"return hash({_tuple('self', len(counted))})"
    return _compiled("__hash__", "(self)", body, {}, counted)


def _tuple(of: str, count: int) -> str:
    return f"({''.join(f'{of}._{number}, ' for number in range(count))})"


def _compiled(
    name: str,
    parameters: str,
    body: str,
    names: Namespace,
    of: Sequence[dataclasses.Field[Any]],
) -> Callable[..., Any]:
    """A method that calls the field `number` of some fields `_number`.

    Many classes have methods that differ in the names of fields alone; one is compiled for them.
    """
    names |= {f"_name{number}": f.name for number, f in enumerate(of)}
    exec(_code(f"def {name}{parameters}:\n    {body}"), names)
    method: FunctionType = names[name]
    called = {f"_{number}": f.name for number, f in enumerate(of)}
    code = method.__code__
    method.__code__ = code.replace(
        co_varnames=tuple(called.get(n, n) for n in code.co_varnames),
        co_names=tuple(called.get(n, n) for n in code.co_names),
    )
    if method.__kwdefaults__:
        method.__kwdefaults__ = {called[n]: value for n, value in method.__kwdefaults__.items()}
    return method


@functools.cache
def _code(text: str) -> CodeType:
    return compile(text, "<record>", "exec")


@reprlib.recursive_repr()
def _shown(self: Any) -> str:
    """`__repr__`: the class with its fields."""
    shown = (f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self) if f.repr)
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _refused(name: str, what: str, cls: Any) -> Callable[..., None]:
    """`__setattr__` or `__delattr__` of a frozen class; subclasses may have other attributes."""
    names = frozenset(f.name for f in dataclasses.fields(cls))

    def refuse(self: Any, attribute: str, *value: Any) -> None:
        if type(self) is cls or attribute in names:
            raise dataclasses.FrozenInstanceError(f"cannot {what} field {attribute!r}")
        getattr(super(cls, self), name)(attribute, *value)

    return refuse


def _stated(self: Any) -> list[dataclasses.Field[Any]]:
    """The fields that `__post_init__` does not set."""
    return [f for f in dataclasses.fields(self) if _value(f, 0) is not None]


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


_MAKERS: dict[str, Callable[[Any], Any]] = {
    "__dataclass_fields__": _fields,
    "__match_args__": _match_args,
    "__init__": _init,
    "__eq__": _eq,
    "__hash__": _hash,
    "__setattr__": functools.partial(_refused, "__setattr__", "assign to"),
    "__delattr__": functools.partial(_refused, "__delattr__", "delete"),
}
_LATER = {name: _Later(name, make) for name, make in _MAKERS.items()}
"""What a class has in place of each attribute until that is first read."""
