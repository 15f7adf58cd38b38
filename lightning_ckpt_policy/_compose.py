"""What triggers and retention rules share: groups joined by ``|`` and ``&``, and checks of fields."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Generic, Literal, TypeVar

Mode = Literal["min", "max"]
T = TypeVar("T")
G = TypeVar("G", bound="Group[Any]")


class Group(ABC, Generic[T]):
    """Base of ``AnyOf`` and ``AllOf``: equal whatever the order of the members, shown with its operator."""

    symbol: ClassVar[str]

    @property
    @abstractmethod
    def members(self) -> tuple[T, ...]:
        """The members: at least one, none twice, none a group of the same class."""

    def simplest(self: G) -> G | T:
        """The only member of a group of one, else the group."""
        return self.members[0] if len(self.members) == 1 else self

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Group) or type(other) is not type(self):
            return NotImplemented
        return len(self.members) == len(other.members) and all(m in other.members for m in self.members)

    def __hash__(self) -> int:
        return hash((type(self), frozenset(self.members)))

    def __repr__(self) -> str:
        if len(self.members) == 1:
            return f"{type(self).__name__}([{self.members[0]!r}])"
        return f" {self.symbol} ".join(f"({m!r})" if _is_looser(m) else repr(m) for m in self.members)


def _is_looser(member: object) -> bool:
    # a group is never in one of its own class, so one with "|" stands in one with "&"
    return isinstance(member, Group) and member.symbol == "|" and len(member.members) > 1


def flattened(group: Group[T], field: str, values: Iterable[object], convert: Callable[[Any], T]) -> tuple[T, ...]:
    """The members for ``group``: each of ``values`` converted, groups of its class opened, repeats dropped.

    Raises:
        TypeError: ``values`` isn't a list, or ``convert`` refuses one of them.
        ValueError: ``values`` is empty.
    """
    name = type(group).__name__
    try:
        items = list(values)
    except TypeError:
        raise TypeError(f"{field}={shown(values)}: {name} takes one list; write {name}([a, b])") from None
    members: list[T] = []
    for item in items:
        member = convert(item)
        for one in member.members if isinstance(member, Group) and type(member) is type(group) else (member,):
            if one not in members:
                members.append(one)
    if not members:
        raise ValueError(f"{field}={shown(values)}: {name} needs at least one; put one in the list")
    return tuple(members)


def shown(value: object) -> str:
    """``repr(value)``, cut to a length that fits in an error message."""
    text = repr(value)
    return text if len(text) <= 200 else text[:197] + "..."


def whole_number(field: str, value: object, fix: str) -> int:
    """``value`` as an ``int`` of at least 1; numpy's integers are welcome, ``bool`` isn't.

    Raises:
        ValueError: It is something else. The message names ``field``, the value and ``fix``.

    >>> whole_number("n", 3, "give n=1 or more")
    3
    >>> whole_number("n", True, "give n=1 or more")
    Traceback (most recent call last):
    ValueError: n=True: an integer of at least 1 was expected; give n=1 or more
    """
    try:
        number = 0 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = 0
    if number < 1:
        raise ValueError(f"{field}={shown(value)}: an integer of at least 1 was expected; {fix}")
    return number


def whole_numbers(field: str, values: Iterable[object], example: str) -> tuple[int, ...]:
    """``values`` as whole numbers of at least 1, sorted, none twice.

    Raises:
        ValueError: ``values`` isn't a list of them, or is empty. The message names ``field``, the value and a fix.

    >>> whole_numbers("steps", [300, 100, 300], "AtSteps([100, 300])")
    (100, 300)
    """
    try:
        items = () if isinstance(values, (str, bytes)) else tuple(values)
    except TypeError:
        items = ()
    if not items:
        raise ValueError(f"{field}={shown(values)}: a list with at least one step was expected; write {example}")
    return tuple(sorted({whole_number(field, item, f"every step is 1 or more; write {example}") for item in items}))


def check_metric(monitor: object, mode: object, example: str) -> None:
    """Check the name of a metric and which way is better.

    Raises:
        ValueError: ``monitor`` isn't a name, or ``mode`` is neither ``"min"`` nor ``"max"``.

    >>> check_metric("loss", "low", "KeepBest(1, monitor='val_loss')")
    Traceback (most recent call last):
    ValueError: mode='low': 'min' or 'max' was expected; use 'min' where lower is better, else 'max'
    """
    if not isinstance(monitor, str) or not monitor:
        raise ValueError(f"monitor={shown(monitor)}: the name of a logged metric was expected; write {example}")
    if mode not in ("min", "max"):
        raise ValueError(
            f"mode={shown(mode)}: 'min' or 'max' was expected; use 'min' where lower is better, else 'max'"
        )
