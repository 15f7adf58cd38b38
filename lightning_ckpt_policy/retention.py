"""What to keep: retention rules, joined by ``|`` (what either keeps) and ``&`` (what both keep).

A rule is a pure function from the records of one run to those that it keeps; `plan` turns it into a list of what may be
deleted. Nothing is remembered between calls, so a restart at any moment leads to the same store.

Grids of steps and of time are anchored absolutely, at step 0 and at 1970-01-01 UTC, not at the first checkpoint that is
left: so what a grid keeps doesn't depend on what was deleted before.

To add a rule, write a frozen dataclass here that subclasses `Retention`, checks its fields in ``__post_init__`` and
defines ``keep`` (and ``monitors`` if it ranks by a metric, ``worth`` to tell a byte budget what goes first). There is
nothing to register.
"""

from __future__ import annotations

import bisect
import contextlib
import enum
import heapq
import math
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import ClassVar, cast

from lightning_ckpt_policy._compose import (
    Group,
    Mode,
    check_metric,
    flattened,
    shown,
    whole_number,
    whole_numbers,
)
from lightning_ckpt_policy._units import HoursMinutesSeconds, byte_size, bytes_in
from lightning_ckpt_policy.record import CheckpointRecord


class Worth(enum.IntEnum):
    """Why a checkpoint is kept, the least valuable reason first; a byte budget deletes in this order."""

    HISTORY = 0
    RECENT = 1
    BEST = 2
    MILESTONE = 3


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

    def worth(self, records: Sequence[CheckpointRecord], now: float) -> Iterable[tuple[Worth, list[int]]]:
        """Why what is kept is kept: each reason with the ``sequence`` of the records it holds for, the best first.

        Together they hold exactly what ``keep`` keeps.
        """
        return [(Worth.HISTORY, sorted(_kept_by(self, records, now), reverse=True))]

    def excess(self, records: Sequence[CheckpointRecord], now: float) -> int:
        """Bytes by which what may never be deleted is above the byte budget; 0 where it isn't, or there is none."""
        return 0

    def __or__(self, other: Retention) -> Retention:
        return _join(AnyOf, self, other)

    def __and__(self, other: Retention) -> Retention:
        return _join(AllOf, self, other)


def _kept_by(rule: Retention, records: Sequence[CheckpointRecord], now: float) -> set[int]:
    """What a rule keeps; one that answers anything else must not lead to deletes.

    Raises:
        TypeError: It does.
    """
    answer = rule.keep(records, now)
    if type(rule).__module__ == __name__:  # one of ours, which needn't be looked at
        return answer
    with contextlib.suppress(TypeError):  # not iterable, or its members can't be in a set
        kept = set(answer)
        numbers = all(isinstance(each, Integral) and not isinstance(each, bool) for each in kept)
        if numbers and not isinstance(answer, bytes) and kept <= {record.sequence for record in records}:
            return kept
    raise TypeError(
        f"{rule!r}.keep returned {reprlib.repr(answer)}: it must return the sequence of each of the given records "
        "that stays, as {record.sequence for record in records if ...}"
    )


def _worth_by(rule: Retention, records: Sequence[CheckpointRecord], now: float) -> list[tuple[Worth, list[int]]]:
    """Why a rule keeps what it keeps.

    Raises:
        TypeError: That is something else than what it keeps.
    """
    reasons = [(worth, list(ranked)) for worth, ranked in rule.worth(records, now)]
    if type(rule).__module__ != __name__:
        told = {sequence for _, ranked in reasons for sequence in ranked}
        if told != _kept_by(rule, records, now):
            raise TypeError(
                f"{rule!r}.worth returned reasons for {reprlib.repr(sorted(told))}: together they must hold exactly "
                "what its keep returns"
            )
    return reasons


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
        return set(self._newest(records))

    def worth(self, records: Sequence[CheckpointRecord], now: float) -> Iterable[tuple[Worth, list[int]]]:
        return [(Worth.RECENT, self._newest(records))]

    def _newest(self, records: Sequence[CheckpointRecord]) -> list[int]:
        # they are nearly in order most of the time, which a sort makes use of and a heap doesn't
        return sorted([record.sequence for record in records], reverse=True)[: self.n]


@dataclass(frozen=True, kw_only=True, repr=False)
class KeepWithin(HoursMinutesSeconds, Retention):
    """Keep what was captured less than this long ago.

    Args:
        hours: Hours, at least 0; may be a fraction.
        minutes: Minutes, added to the hours.
        seconds: Seconds, added to both.

    Raises:
        ValueError: One of them isn't a finite number of at least 0, or all are 0.

    >>> KeepWithin(hours=12)
    KeepWithin(hours=12)
    """

    def keep(self, records: Sequence[CheckpointRecord], now: float) -> set[int]:
        oldest = now - self.total_seconds
        return {record.sequence for record in records if record.created_at > oldest}

    def worth(self, records: Sequence[CheckpointRecord], now: float) -> Iterable[tuple[Worth, list[int]]]:
        return [(Worth.RECENT, sorted(self.keep(records, now), reverse=True))]


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
        example = "KeepBest(1, monitor='val_loss') or more"
        object.__setattr__(self, "n", whole_number("n", self.n, f"write {example}"))
        check_metric(self.monitor, self.mode, example)

    @property
    def monitors(self) -> tuple[tuple[str, Mode], ...]:
        return ((self.monitor, self.mode),)

    def keep(self, records: Sequence[CheckpointRecord], now: float) -> set[int]:
        return {record.sequence for record in self.ranked(records)}

    def worth(self, records: Sequence[CheckpointRecord], now: float) -> Iterable[tuple[Worth, list[int]]]:
        return [(Worth.BEST, [record.sequence for record in self.ranked(records)])]

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

    def worth(self, records: Sequence[CheckpointRecord], now: float) -> Iterable[tuple[Worth, list[int]]]:
        return [(Worth.MILESTONE, sorted(self.keep(records, now), reverse=True))]


@dataclass(frozen=True)
class KeepEveryNSteps(Retention):
    """Keep a coarse history: for each multiple of ``n`` optimizer steps the first checkpoint at or past it.

    Multiples count from step 0, which itself is none of them. A checkpoint that is the first past several multiples
    stands for all of them; of several of one step the newest counts.

    Args:
        n: Steps between the checkpoints that are kept.
        last: Keep only the newest so many of them; by default all.

    Raises:
        ValueError: ``n`` or ``last`` isn't an integer of at least 1.

    >>> KeepLast(2) | KeepEveryNSteps(1_000, last=5) | KeepEveryNSteps(10_000, last=10)
    KeepLast(n=2) | KeepEveryNSteps(n=1000, last=5) | KeepEveryNSteps(n=10000, last=10)
    """

    n: int
    last: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", whole_number("n", self.n, "write KeepEveryNSteps(1000), or KeepAll()"))
        _check_last(self, self.last)

    def keep(self, records: Sequence[CheckpointRecord], now: float) -> set[int]:
        return set(self._newest_first(records))

    def worth(self, records: Sequence[CheckpointRecord], now: float) -> Iterable[tuple[Worth, list[int]]]:
        return [(Worth.HISTORY, self._newest_first(records))]

    def _newest_first(self, records: Sequence[CheckpointRecord]) -> list[int]:
        cells: dict[int, tuple[int, int]] = {}
        for record in records:
            cell, candidate = record.step // self.n, (record.step, -record.sequence)
            if cell and (cell not in cells or candidate < cells[cell]):
                cells[cell] = candidate
        return [-cells[cell][1] for cell in _largest(self.last, cells)]


@dataclass(frozen=True, kw_only=True, repr=False)
class KeepEveryInterval(HoursMinutesSeconds, Retention):
    """Keep a coarse history: for each multiple of this much time the first checkpoint captured at or after it.

    Multiples count from 1970-01-01 UTC, so every 24 hours means the first of each day in UTC. Of several captured at
    one moment the first confirmed counts.

    Args:
        hours: Hours, at least 0; may be a fraction.
        minutes: Minutes, added to the hours.
        seconds: Seconds, added to both.
        last: Keep only the newest so many of them; by default all.

    Raises:
        ValueError: A time isn't a finite number of at least 0, all are 0, or ``last`` isn't an integer of at least 1.

    >>> KeepEveryInterval(hours=24, last=7)
    KeepEveryInterval(hours=24, last=7)
    """

    last: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_last(self, self.last)

    def keep(self, records: Sequence[CheckpointRecord], now: float) -> set[int]:
        return set(self._newest_first(records))

    def worth(self, records: Sequence[CheckpointRecord], now: float) -> Iterable[tuple[Worth, list[int]]]:
        return [(Worth.HISTORY, self._newest_first(records))]

    def _newest_first(self, records: Sequence[CheckpointRecord]) -> list[int]:
        cells: dict[int, tuple[float, int]] = {}
        for record in records:
            cell, candidate = math.floor(record.created_at / self.total_seconds), (record.created_at, record.sequence)
            if cell not in cells or candidate < cells[cell]:
                cells[cell] = candidate
        return [cells[cell][1] for cell in _largest(self.last, cells)]


def _check_last(rule: KeepEveryNSteps | KeepEveryInterval, last: object) -> None:
    if last is not None:
        fix = "write last=5, or leave it out to keep all of them"
        object.__setattr__(rule, "last", whole_number("last", last, fix))


def _largest(last: int | None, cells: Collection[int]) -> list[int]:
    return sorted(cells, reverse=True)[:last]


@dataclass(frozen=True, repr=False)
class KeepUnder(Retention):
    """Keep what another rule keeps, as far as it fits in a number of bytes; the least valuable goes first.

    First goes the history (`KeepEveryNSteps`, `KeepEveryInterval`, `KeepAll`), the oldest of it before the newer; then
    what is only recent (`KeepLast`, `KeepWithin`), the oldest first; then what is among the best (`KeepBest`), the
    worst first. A checkpoint that is kept for several reasons has the worth of the best of them. The newest confirmed
    checkpoint, pinned ones and milestones (`KeepSteps`) never go, but they count; where they alone are above the
    budget, `excess` says by how much. Since nothing goes before its replacement is confirmed, a save that is on its way
    may be above the budget for a while. Damaged checkpoints aren't counted.

    Args:
        budget: The number of bytes, or a text with a unit: ``"500GB"`` (1000 based) or ``"500GiB"`` (1024 based).
        of: The rule, or a list (any of).

    Raises:
        TypeError: ``of`` is something else.
        ValueError: ``budget`` can't be understood, or isn't above 0.

    >>> KeepUnder("2TB", of=KeepLast(2) | KeepEveryNSteps(1_000, last=5) | KeepBest(3, "val_loss"))
    KeepUnder('2TB', of=KeepLast(n=2) | KeepEveryNSteps(n=1000, last=5) | KeepBest(n=3, monitor='val_loss', mode='min'))
    """

    budget: int | float | str
    of: Retention | list[Retention] = KeepAll()

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", byte_size("budget", self.budget, "KeepUnder('500GB', of=KeepLast(3))"))
        object.__setattr__(self, "of", as_retention(self.of))

    @property
    def rule(self) -> Retention:
        """The rule that the budget is over."""
        return cast(Retention, self.of)

    @property
    def budget_bytes(self) -> int:
        """The budget in bytes."""
        return bytes_in(cast(str, self.budget))

    @property
    def monitors(self) -> tuple[tuple[str, Mode], ...]:
        return self.rule.monitors

    def keep(self, records: Sequence[CheckpointRecord], now: float) -> set[int]:
        return self._weigh(records, now)[0]

    def worth(self, records: Sequence[CheckpointRecord], now: float) -> Iterable[tuple[Worth, list[int]]]:
        return _only(self.keep(records, now), _worth_by(self.rule, records, now))

    def excess(self, records: Sequence[CheckpointRecord], now: float) -> int:
        return max(0, -self._weigh(records, now)[1], self.rule.excess(records, now))

    def _weigh(self, records: Sequence[CheckpointRecord], now: float) -> tuple[set[int], int]:
        """What stays, and the bytes that are left beside what never goes."""
        sizes = {record.sequence: record.size for record in records}
        reasons = _worth_by(self.rule, records, now)
        kept = set[int]().union(*(ranked for _, ranked in reasons))
        fixed = {record.sequence for record in records if record.pinned}
        fixed.update([max(sizes)] if sizes else [])
        fixed.update(*(ranked for worth, ranked in reasons if worth is Worth.MILESTONE))
        room = left = self.budget_bytes - sum(sizes[sequence] for sequence in fixed)
        stay = kept & fixed
        for sequence in _by_worth(reasons):
            if sequence in fixed:
                continue
            room -= sizes[sequence]
            if room < 0:
                break
            stay.add(sequence)
        return stay, left

    def __repr__(self) -> str:
        return f"KeepUnder({self.budget!r}, of={self.of!r})"


def _by_worth(reasons: Iterable[tuple[Worth, list[int]]]) -> list[int]:
    """What is kept for ``reasons``, the most valuable first: by reason, then by place among those kept for it.

    Places, not ages or values of a metric: then no two are equal, and what moves up when another goes comes no higher
    than that one was.
    """
    places: dict[int, tuple[Worth, int, int]] = {}
    for index, (worth, ranked) in enumerate(reasons):
        for place, sequence in enumerate(ranked):
            found = (worth, -place, -index)
            if sequence not in places or found > places[sequence]:
                places[sequence] = found
    return sorted(places, key=places.__getitem__, reverse=True)


def _only(kept: set[int], reasons: Iterable[tuple[Worth, list[int]]]) -> list[tuple[Worth, list[int]]]:
    return [(worth, [sequence for sequence in ranked if sequence in kept]) for worth, ranked in reasons]


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

    def worth(self, records: Sequence[CheckpointRecord], now: float) -> Iterable[tuple[Worth, list[int]]]:
        # in an order of their own, since groups that differ in the order of their members are equal
        return [part for rule in sorted(self.members, key=repr) for part in _worth_by(rule, records, now)]

    def excess(self, records: Sequence[CheckpointRecord], now: float) -> int:
        return max(rule.excess(records, now) for rule in self.members)


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
        return set[int]().union(*(_kept_by(rule, records, now) for rule in self.members))


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
        return set[int].intersection(*(_kept_by(rule, records, now) for rule in self.members))

    def worth(self, records: Sequence[CheckpointRecord], now: float) -> Iterable[tuple[Worth, list[int]]]:
        return _only(self.keep(records, now), super().worth(records, now))


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
    don't count as newest, last or best either. Before the first is deleted, the last one's record has to note the
    others as ``doomed``: then a process that is killed between two deletes is followed by one that plans the same, if
    its rule is the same.

    Args:
        retention: The rule.
        records: The confirmed checkpoints of one run, in any order.
        now: Seconds since 1970-01-01 UTC.
        protect: Payload names that stay whatever the rule says.

    Raises:
        TypeError: A rule keeps something else than sequences of the records.

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
    # a rule that was asked before some of these were deleted isn't asked about the others again
    noted = [record for record in whole if record.doomed]
    rule = repr(retention) if noted else ""
    doomed = {each for record in noted if record.doomed_by == rule for each in (*record.doomed, record.sequence)}
    left = [record for record in whole if record.sequence not in doomed] if doomed else whole
    stay = {max(record.sequence for record in whole), *_kept_by(retention, left, now)}
    victims = [r for r in whole if r.sequence not in stay and not r.pinned and r.path not in protect]
    return sorted(victims, key=lambda record: record.sequence)


def excess(retention: Retention, records: Sequence[CheckpointRecord], *, now: float) -> int:
    """Bytes by which the newest, the pinned and the milestones alone are above the byte budget of ``retention``.

    0 where they fit, or where no `KeepUnder` is in it; of several budgets the largest excess.

    Args:
        retention: The rule.
        records: The confirmed checkpoints of one run, in any order; damaged ones don't count.
        now: Seconds since 1970-01-01 UTC.

    >>> record = CheckpointRecord(path="step-1.ckpt", step=1, epoch=0, sequence=1, run_id="a",
    ...                           created_at=0.0, size=1500, checksum="crc32c:00000000")
    >>> excess(KeepUnder("1kB", of=KeepLast(3)), [record], now=0.0)
    500
    """
    return retention.excess([record for record in records if not record.damaged], now)
