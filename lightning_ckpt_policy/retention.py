"""What to keep: retention rules, joined by ``|`` (what either keeps) and ``&`` (what both keep).

A rule is a pure function from the records of one run to those that it keeps; `plan` turns it into a list of what may be
deleted. Nothing is remembered between calls, so a restart at any moment leads to the same store.

To add a rule, write a frozen dataclass here that subclasses `Retention`, checks its fields in ``__post_init__`` and
defines ``keep`` (and ``monitors`` if it ranks by a metric). There is nothing to register.
"""

from __future__ import annotations

import bisect
import heapq
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, cast

from lightning_ckpt_policy._compose import Group, flattened, shown, whole_number, whole_numbers
from lightning_ckpt_policy.record import CheckpointRecord

Mode = Literal["min", "max"]


class Retention(ABC):
    """Says which checkpoints stay. Subclasses hold plain values only, compare by value, and touch nothing outside.

    >>> KeepLast(3) | KeepBest(2, monitor="val_loss") | KeepSteps([10_000, 50_000])
    KeepLast(n=3) | KeepBest(n=2, monitor='val_loss', mode='min') | KeepSteps(steps=(10000, 50000))
    """

    @abstractmethod
    def keep(self, records: Sequence[CheckpointRecord], now: float) -> set[int]:
        """The ``sequence`` of each record that stays.

        A record that is kept must still be kept when others are taken away, or planning again would delete more.

        Args:
            records: Those of one run, in any order, none of them damaged.
            now: Seconds since 1970-01-01 UTC.
        """

    @property
    def monitors(self) -> tuple[tuple[str, Mode], ...]:
        """Each ``(monitor, mode)`` that the rule ranks by."""
        return ()

    def __or__(self, other: Retention) -> Retention:
        return _join(AnyOf, self, other)

    def __and__(self, other: Retention) -> Retention:
        return _join(AllOf, self, other)


# The rules


@dataclass(frozen=True)
class KeepAll(Retention):
    """Keep everything.

    >>> KeepAll() == KeepAll()
    True
    """

    def keep(self, records: Sequence[CheckpointRecord], now: float) -> set[int]:
        return {record.sequence for record in records}


@dataclass(frozen=True)
class KeepLast(Retention):
    """Keep the newest ``n``, in order of confirmation.

    Raises:
        ValueError: ``n`` isn't an integer of at least 1.

    >>> KeepLast(2)
    KeepLast(n=2)
    """

    n: int = 1

    def __post_init__(self) -> None:
        fix = "write KeepLast(1) or more, or KeepAll() to keep everything"
        object.__setattr__(self, "n", whole_number("n", self.n, fix))

    def keep(self, records: Sequence[CheckpointRecord], now: float) -> set[int]:
        return set(heapq.nlargest(self.n, (record.sequence for record in records)))


@dataclass(frozen=True)
class KeepBest(Retention):
    """Keep the best ``n`` by a metric of those weights; of equal ones the older.

    A record without the metric, or with NaN, isn't kept by this rule. Infinities are ordered like other numbers.

    Args:
        n: How many.
        monitor: Name of the metric, as it was logged. Needed.
        mode: ``"min"`` where lower is better, ``"max"`` where higher is.

    Raises:
        ValueError: ``n`` isn't an integer of at least 1, ``monitor`` isn't a name, or ``mode`` is another word.

    >>> KeepBest(2, "val_loss").monitors
    (('val_loss', 'min'),)
    """

    n: int = 1
    monitor: str = ""
    mode: Mode = "min"

    def __post_init__(self) -> None:
        fix = "write KeepBest(1, monitor='val_loss') or more"
        object.__setattr__(self, "n", whole_number("n", self.n, fix))
        if not isinstance(self.monitor, str) or not self.monitor:
            raise ValueError(f"monitor={shown(self.monitor)}: the name of a logged metric was expected; {fix}")
        if self.mode not in ("min", "max"):
            raise ValueError(
                f"mode={shown(self.mode)}: 'min' or 'max' was expected; use 'min' where lower is better, else 'max'"
            )

    @property
    def monitors(self) -> tuple[tuple[str, Mode], ...]:
        return ((self.monitor, self.mode),)

    def keep(self, records: Sequence[CheckpointRecord], now: float) -> set[int]:
        return {record.sequence for record in self.ranked(records)}

    def ranked(self, records: Sequence[CheckpointRecord]) -> list[CheckpointRecord]:
        """The best ``n`` of ``records``, best first."""
        sign = 1 if self.mode == "min" else -1
        candidates: list[tuple[float, int, int]] = []
        for index, record in enumerate(records):
            value = record.metrics.get(self.monitor)
            if value is not None and value == value:  # NaN isn't equal to itself
                candidates.append((sign * value, record.sequence, index))
        return [records[index] for _, _, index in heapq.nsmallest(self.n, candidates)]


@dataclass(frozen=True)
class KeepSteps(Retention):
    """Keep, for each of these optimizer steps, the first checkpoint at or past it; of several of one step the newest.

    A global step may jump over a milestone (a GAN steps twice per batch), and a save may have had to wait a batch.

    Args:
        steps: The steps, each at least 1. Any iterable will do; they are stored sorted, each once.

    Raises:
        ValueError: ``steps`` is empty or holds something else than integers of at least 1.

    >>> KeepSteps([50_000, 10_000])
    KeepSteps(steps=(10000, 50000))
    """

    steps: Sequence[int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", whole_numbers("steps", self.steps, "KeepSteps([10_000, 50_000])"))

    def keep(self, records: Sequence[CheckpointRecord], now: float) -> set[int]:
        ordered = sorted((record.step, -record.sequence) for record in records)
        kept = set()
        for step in self.steps:
            index = bisect.bisect_left(ordered, (step,))
            if index < len(ordered):
                kept.add(-ordered[index][1])
        return kept


# Composition


@dataclass(frozen=True, eq=False, repr=False)
class _RetentionGroup(Group[Retention], Retention):
    rules: Sequence[Retention | list[Retention]]

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", flattened(self, "rules", self.rules, as_retention))

    @property
    def members(self) -> tuple[Retention, ...]:
        return cast("tuple[Retention, ...]", self.rules)

    @property
    def monitors(self) -> tuple[tuple[str, Mode], ...]:
        return tuple(dict.fromkeys(pair for rule in self.members for pair in rule.monitors))


class AnyOf(_RetentionGroup):
    """Keep what any of ``rules`` keeps; the same as ``a | b``.

    Args:
        rules: Rules, or lists of them (any of). A nested ``AnyOf`` is opened, repeats are dropped.

    Raises:
        TypeError: One of them is something else.
        ValueError: There is none.

    >>> AnyOf([KeepLast(2), KeepSteps([100])])
    KeepLast(n=2) | KeepSteps(steps=(100,))
    """

    symbol: ClassVar[str] = "|"

    def keep(self, records: Sequence[CheckpointRecord], now: float) -> set[int]:
        return set[int]().union(*(rule.keep(records, now) for rule in self.members))


class AllOf(_RetentionGroup):
    """Keep only what every one of ``rules`` keeps; the same as ``a & b``.

    Args:
        rules: Rules, or lists of them (any of). A nested ``AllOf`` is opened, repeats are dropped.

    Raises:
        TypeError: One of them is something else.
        ValueError: There is none.

    >>> AllOf([KeepLast(2), KeepSteps([100])])
    KeepLast(n=2) & KeepSteps(steps=(100,))
    """

    symbol: ClassVar[str] = "&"

    def keep(self, records: Sequence[CheckpointRecord], now: float) -> set[int]:
        return set[int].intersection(*(rule.keep(records, now) for rule in self.members))


def as_retention(value: object) -> Retention:
    """``value`` as a retention rule: a rule itself, or a list of them (any of).

    Raises:
        TypeError: It is something else.
        ValueError: It is an empty list.

    >>> as_retention([KeepLast(2), [KeepSteps([100])]])
    KeepLast(n=2) | KeepSteps(steps=(100,))
    """
    if isinstance(value, Retention):
        return value
    if isinstance(value, (list, tuple)):
        return AnyOf(value).simplest()
    raise TypeError(
        f"retention={shown(value)}: a retention rule or a list of rules was expected; write for example KeepLast(3)"
    )


def _join(group: type[AnyOf] | type[AllOf], left: object, right: object) -> Retention:
    return group([as_retention(left), as_retention(right)]).simplest()


# Planning


def best(records: Sequence[CheckpointRecord], monitor: str, mode: Mode = "min") -> CheckpointRecord | None:
    """The undamaged record with the best ``monitor``, the oldest of equal ones; None where none has it.

    Raises:
        ValueError: ``monitor`` isn't a name, or ``mode`` is neither ``"min"`` nor ``"max"``.

    >>> best([], "val_loss") is None
    True
    """
    ranked = KeepBest(1, monitor, mode).ranked([record for record in records if not record.damaged])
    return ranked[0] if ranked else None


def plan(
    retention: Retention,
    records: Sequence[CheckpointRecord],
    *,
    now: float,
    protect: Collection[str] = frozenset(),
) -> list[CheckpointRecord]:
    """What may be deleted of one run's records, oldest first; planning again after the deletes gives nothing more.

    Never among them: the newest, pinned ones, damaged ones, and those whose ``path`` is in ``protect``. Damaged ones
    don't count as newest, last or best either.

    Args:
        retention: The rule.
        records: The confirmed checkpoints of one run, in any order.
        now: Seconds since 1970-01-01 UTC.
        protect: Payload names that stay whatever the rule says.

    >>> history = [
    ...     CheckpointRecord(path=f"step-{step}.ckpt", step=step, epoch=0, sequence=step, run_id="a",
    ...                      created_at=0.0, size=1, checksum="crc32c:00000000")
    ...     for step in (1, 2, 3, 4)]
    >>> [record.path for record in plan(KeepLast(2) | KeepSteps([1]), history, now=0.0)]
    ['step-2.ckpt']
    """
    whole = [record for record in records if not record.damaged]
    if not whole:
        return []
    stay = {max(record.sequence for record in whole), *retention.keep(whole, now)}
    victims = [r for r in whole if r.sequence not in stay and not r.pinned and r.path not in protect]
    return sorted(victims, key=lambda record: record.sequence)
