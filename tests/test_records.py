"""`records.dataclass` makes what that of the standard library makes, and writes methods later."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
import pickle
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import pytest

import meshdsl.records as records
from tests.project import matching

Item = TypeVar("Item")
OPTIONS = [
    {"frozen": frozen, "slots": slots, "eq": eq, "repr": shown, "kw_only": kw_only}
    for frozen, slots, eq, shown, kw_only in itertools.product([False, True], repeat=5)
]


def classes(dataclass: Callable[..., Any], options: dict[str, bool]) -> dict[str, Any]:
    """Classes with fields of all kinds, made by one of both decorators."""

    @dataclass(**options)
    class Plain:
        """Three fields."""

        a: int
        b: str = "b"
        c: list[int] = dataclasses.field(default_factory=list, hash=False)

    @dataclass(**options)
    class Parts(Generic[Item]):
        """Fields that do not count, or are not given."""

        a: int
        hidden: int = dataclasses.field(default=3, compare=False, repr=False)
        made: dict[str, int] = dataclasses.field(init=False, compare=False, default_factory=dict)
        fixed: int = dataclasses.field(init=False, default=5)
        later: int = dataclasses.field(init=False, compare=False, repr=False)
        by_name: int = dataclasses.field(default=7, kw_only=True)

        def __post_init__(self) -> None:
            object.__setattr__(self, "later", self.a + 1)

    @dataclass(**options)
    class Child(Plain):
        """A base's fields, one of them with another default."""

        b: str = "child"
        d: int = 0

    @dataclass(**options)
    class Own:
        """Methods that are written by hand stay."""

        a: int

        def __eq__(self, other: object) -> bool:
            return isinstance(other, type(self))

        def __hash__(self) -> int:
            return 7

        def __repr__(self) -> str:
            return "own"

    @dataclass(**options)
    class Empty:
        """No field."""

    class Loose(Plain):
        """Of none of the decorators."""

    return {c.__name__: c for c in (Plain, Parts, Child, Own, Empty, Loose)}


CALLS = {
    "Plain": "(a=1)|(a=1, b='x')|(a=2, c=[1])|(a=1, c=[1])|()|(a=1, z=2)",
    "Parts": "(a=1)|(a=1, hidden=4)|(a=1, by_name=8)|(a=2)|(a=1, made={})|(a=1, fixed=2)",
    "Child": "(a=1)|(a=1, d=2)|(a=1, b='x')|()",
    "Own": "(a=1)|(a=2)|()",
    "Empty": "()|(a=1)",
    "Loose": "(a=1)|(a=1, b='x')",
}


def outcome(of: Callable[[], Any]) -> Any:
    """The result of a call, or the class of its exception."""
    try:
        return of()
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        return type(error)


def refused(one: Any, change: Callable[..., None]) -> list[bool]:
    """Whether a field may not be changed; without slots, whether another attribute may not.

    With slots the library takes another class for the frozen one, and refuses what it need not.
    """
    names = ("a",) if hasattr(type(one), "__slots__") else ("a", "new")
    value = [4] if change is setattr else []
    return [
        isinstance(outcome(lambda name=name: change(one, name, *value)), type)  # type: ignore[misc]
        for name in names
    ]


def facts(made: dict[str, Any]) -> list[Any]:
    """What objects of the classes do; all that the decorators promise."""
    told: list[Any] = []
    for name, calls in CALLS.items():
        cls, objects = made[name], []
        for call in calls.split("|"):
            one = outcome(lambda call=call, cls=cls: eval(f"cls{call}", {"cls": cls}))  # type: ignore[misc]
            objects.append(one)
            told.append(one if isinstance(one, type) else "made")
        told.append([(f.name, f.init, f.compare, f.kw_only) for f in dataclasses.fields(cls)])
        told += [cls.__match_args__, cls.__doc__, hasattr(cls, "__slots__")]
        real = [one for one in objects if not isinstance(one, type)]
        told += [one == other for one, other in itertools.product(real, repeat=2)]
        told += [one != "other" for one in real]
        for one in real:
            hashed = outcome(lambda one=one: hash(one))  # type: ignore[misc]
            told.append(hashed if cls.__eq__ is not object.__eq__ else "by identity")
            told.append("object at" if "object at" in repr(one) else repr(one))
            told += [refused(one, change) for change in (setattr, delattr)]
        for one in real[:1]:
            if dataclasses.fields(cls) and hasattr(one, "a"):
                told.append(dataclasses.asdict(one))
                told.append(dataclasses.replace(one, a=9).a)
                told.append(outcome(lambda one=one: copy.copy(one).a))  # type: ignore[misc]
    return told


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: " ".join(k for k, v in o.items() if v))
def test_classes_are_those_of_the_library(options: dict[str, bool]) -> None:
    expected = facts(classes(dataclasses.dataclass, options))
    assert facts(classes(records.dataclass, options)) == expected


@records.dataclass(frozen=True, slots=True)
class Kept:
    """Pickled by its module's name."""

    a: int
    b: tuple[int, ...] = ()


def test_frozen_slots_are_pickled() -> None:
    assert pickle.loads(pickle.dumps(Kept(1, (2,)))) == Kept(1, (2,))


SEEDS = itertools.count()


@records.dataclass(frozen=True, slots=True)
class Hashed:
    """`seed` differs between processes, as the hash of a text does; `read` is filled later."""

    a: int
    seed: int = dataclasses.field(init=False, compare=False)
    read: list[int] = dataclasses.field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", next(SEEDS))


def test_what_is_made_of_other_fields_is_not_pickled() -> None:
    one = Hashed(1)
    one.read.append(2)
    again = pickle.loads(pickle.dumps(one))
    assert again == one
    assert again.seed == one.seed + 1


def test_classes_that_differ_in_names_alone_share_the_code_of_their_methods() -> None:
    @records.dataclass
    class One:
        left: int
        right: int = 2

    @records.dataclass
    class Other:
        up: int
        down: int = 3

    made = records._code.cache_info().currsize
    assert (Other(1), Other(1, down=4).down) == (Other(up=1, down=3), 4)
    grown = records._code.cache_info().currsize
    assert (One(1), One(1, right=4).right) == (One(left=1, right=2), 4)
    assert records._code.cache_info().currsize == grown >= made
    with pytest.raises(TypeError, match="'left'"):
        One()  # type: ignore[call-arg]


def test_a_base_of_the_library_without_slots_keeps_its_fields() -> None:
    @dataclasses.dataclass
    class Base:
        a: int = 1

    @records.dataclass(slots=True)
    class Child(Base):
        b: int = 2

    assert (Child().a, Child(3, 4).b, [f.name for f in dataclasses.fields(Child)]) == (
        1,
        4,
        ["a", "b"],
    )


def test_a_cycle_is_shown() -> None:
    @records.dataclass
    class Link:
        next: Any = None

    link = Link()
    link.next = link
    assert repr(link).endswith("Link(next=...)")


def test_a_method_is_written_when_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    compiled = records._compiled

    def counted(name: str, *rest: Any) -> Any:
        written.append(name)
        return compiled(name, *rest)

    monkeypatch.setattr(records, "_compiled", counted)

    @records.dataclass(frozen=True, slots=True)
    class Point:
        """A point."""

        x: int

    assert written == []
    assert {Point(1), Point(1)} == {Point(1)}
    assert sorted(written) == ["__eq__", "__hash__", "__init__"]
    assert inspect.isfunction(Point.__init__)


OF_THE_LIBRARY = (
    *("meshdsl/diagnostics.py", "meshdsl/records.py", "backends/runtime/"),
    *(f"meshdsl/api/{name}.py" for name in ("dims", "layouts", "schedules", "sizes")),
)
"""Where classes are those of the library: these import nothing of ours, or users ask for their
signatures."""


def test_the_package_has_no_others() -> None:
    for path in matching("meshdsl/**/*.py", "backends/**/*.py"):
        text, name = path.read_text(encoding="utf-8"), str(path)
        if not any(part in name for part in OF_THE_LIBRARY):
            assert "from dataclasses import dataclass" not in text, path
