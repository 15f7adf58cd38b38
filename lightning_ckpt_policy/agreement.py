"""How ranks agree when to save without a message per step: a clock that they share, and seldom set.

A trigger is a pure function of the progress. Ranks with the same progress therefore come to the same answer, whatever
rules are joined, without a word. What differs between them is the time, the signals that arrived, what saves have cost
and whether the writer is free. In one exchange, a single collective of a few numbers, all ranks learn these from rank 0
(signals from every rank). Until the next one each rank reckons the time as ``time of the exchange + steps since then *
seconds per step``, so that it is the same everywhere. No rank's own clock matters but rank 0's, and that one only at
exchanges. Each exchange also fixes the step of the next one, from nothing but what was agreed.

While nothing is due there is at most one exchange per `STEPS_PER_EXCHANGE` steps on average. A long wait earns what an
exact end of it spends: far from the deadline the next exchange comes after half of what is left, near it shortly before
the step that is expected to be due. Where signals are listened for, one comes at least every `LISTEN_SECONDS`, or every
step if a step takes longer. Saves that follow each other sooner have an exchange each, the first one of a fit two.
While a save is due and the one before it is on its way for longer than usual, one comes each time its time has doubled
at the latest.

This module knows neither the Trainer nor ``torch``; an `Exchange` does the collective.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from lightning_ckpt_policy.interval import Measured, SaveCost

# while nothing is due
STEPS_PER_EXCHANGE = 32
# between two exchanges; where signals are listened for, at most so many steps, and seconds
LONGEST = 256
LISTEN_STEPS = 64
LISTEN_SECONDS = 5.0
# in exchanges: what is there at first, how much can be earned, how far saves may overdraw
_FIRST_CREDIT, _MOST_CREDIT, _LEAST_CREDIT = 4.0, 8.0, -2.0
# of so many of the newest steps the seconds per step are taken
_PACE_STEPS = 64

Work = Literal["training", "validation"]


class Exchange(Protocol):
    """The collective, called by all ranks at the same step."""

    def __call__(self, values: Sequence[float]) -> Sequence[float]:
        """The greatest of each value over all ranks, bit for bit the same on each of them."""


def alone(values: Sequence[float]) -> Sequence[float]:
    """The `Exchange` of a single process.

    >>> alone([1.0, 2.0])
    [1.0, 2.0]
    """
    return values


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What a rank brings to an exchange. Only the signals of ranks other than 0 count.

    Attributes:
        clock: Seconds on this rank's clock.
        busy: Whether no save can begin now.
        superseded: Whether a newer attempt has taken over, so that nothing is saved any more.
        failing: Whether too many saves in a row have failed.
        measured: What saves have cost and how often the run has failed.
        signals: How often each signal has arrived.
    """

    clock: float
    busy: bool = False
    superseded: bool = False
    failing: bool = False
    measured: Measured = field(default_factory=Measured)
    signals: Mapping[str, int] = field(default_factory=dict)


class Agreement:
    """What all ranks agree on. Every rank makes the same calls in the same order.

    Args:
        exchange: The collective.
        leads: Whether this is rank 0.
        watches: Whether the trigger looks at more than the steps, which all ranks count alike.
        signals: The names of the signals that are listened for.

    >>> agreement = Agreement(alone, leads=True, watches=True)
    >>> for second in range(4):
    ...     if second == 0 or agreement.tick(second * 10.0):
    ...         agreement.exchange(Report(clock=second * 10.0), lambda steps, seconds: agreement.time + seconds >= 50)
    >>> agreement.time
    30.0
    """

    def __init__(self, exchange: Exchange, *, leads: bool, watches: bool, signals: Sequence[str] = ()) -> None:
        #: What was agreed last
        self.signals: Mapping[str, int] = {}
        self.measured = Measured()
        self.free = False
        self.superseded = False
        self.failing = False
        self._watches = watches
        self._exchange = exchange
        self._leads = leads
        self._names = tuple(signals)
        # steps are counted from the beginning of the fit
        self._tick = 0
        self._next: float = math.inf
        self._exchanged_at = 0
        self._saved_at = 0
        self._ask_at = 0
        self._aimed = False
        self._credit = _FIRST_CREDIT
        # the time as it is reckoned: never less than `_least_time`
        self._least_time = -math.inf
        self._time = 0.0
        self._timed_at = 0
        self._seconds = 0.0
        self._spread = 0.0
        # the pace of each kind of work: as measured here, and as agreed with the number of steps it is known from
        self._work: Work = "training"
        self._clock: float | None = None
        self._steps: dict[Work, deque[float]] = {}
        self._paces: dict[Work, tuple[float, int]] = {}

    @property
    def time(self) -> float:
        """Seconds on the shared clock, which never goes back."""
        return max(self._least_time, self._time + (self._tick - self._timed_at) * self._seconds)

    def tick(self, clock: float) -> bool:
        """Count a step of what is worked at.

        Args:
            clock: Seconds on this rank's clock.

        Returns:
            Whether it is time for an `exchange`.
        """
        self._tick += 1
        if self._clock is not None:
            steps = self._steps.get(self._work)
            if steps is None:
                steps = self._steps[self._work] = deque(maxlen=_PACE_STEPS)
            steps.append(clock - self._clock)
        self._clock = clock
        return self._tick >= self._next

    def begin(self, work: Work, clock: float) -> None:
        """Count steps of another kind from now on, which take another time.

        Args:
            work: What kind.
            clock: Seconds on this rank's clock.
        """
        self._set_time(self.time, self._paces.get(work, (0.0, 0))[0])
        self._work, self._clock = work, clock
        if self._names:
            self._next = self._tick + self._listen_steps()

    def interrupted(self) -> None:
        """Note that something else has come between two steps, whose time isn't known to all."""
        if self._watches:
            self._next = min(self._next, self._tick + self._affordable())

    def saved(self, due: Callable[[int, float], bool]) -> None:
        """Note that a save has begun at this step; ``due`` as in `exchange`, after that save."""
        self.free = self._aimed = False
        self._saved_at = self._tick
        self._clock = None  # the next step takes longer
        cost = self.measured.cost
        steps = 1.0
        if cost is not None:
            self._time += cost.held
            steps = 1.1 * cost.confirm / self._seconds if self._seconds > 0 else 1.0
        self._ask_at = self._tick + max(1, math.ceil(min(steps, LONGEST)))
        if self._watches:
            # how long the first save holds isn't known
            self._next = self._tick + (1 if cost is None else self._gap(self._remaining(due)))

    def asks(self) -> bool:
        """Whether to `exchange` where a save is due, since it isn't known whether the writer is free."""
        return not self.free and self._tick >= self._ask_at

    def exchange(self, report: Report, due: Callable[[int, float], bool]) -> None:
        """Agree, and on when to do so again.

        Args:
            report: What this rank knows.
            due: Whether a save is due in so many steps and seconds, from what is agreed. It is asked about moments
                that may never come.
        """
        counts = [float(report.signals.get(name, 0)) for name in self._names]
        facts = self._facts(report) if self._leads else [-math.inf] * _FACTS
        agreed = self._exchange([*facts, *counts])
        clock, seconds, spread, known, busy, superseded, failing, *costs = agreed[:_FACTS]
        has_cost, held, slowdown, confirm, failures, uptime = costs
        self.signals = {name: int(count) for name, count in zip(self._names, agreed[_FACTS:], strict=True) if count > 0}
        self.free, self.superseded, self.failing = not busy, bool(superseded), bool(failing)
        cost = SaveCost(held=held, slowdown=slowdown, confirm=confirm) if has_cost else None
        self.measured = Measured(cost=cost, failures=int(failures), uptime=uptime)
        self._paces[self._work] = seconds, int(known)
        self._spread = spread
        self._set_time(clock, seconds)
        self._clock = report.clock  # the next step begins here
        earned = (self._tick - self._exchanged_at) / STEPS_PER_EXCHANGE
        self._credit = max(_LEAST_CREDIT, min(_MOST_CREDIT, self._credit + earned) - 1)
        self._exchanged_at = self._tick
        if self._tick >= self._ask_at:  # it takes longer than others did
            waited = self._tick - self._saved_at
            again = waited if cost is None else min(waited, max(waited // 4, self._affordable()))
            self._ask_at = self._tick + max(1, again)
        if self._watches:
            self._next = self._tick + self._gap(self._remaining(due))

    def _facts(self, report: Report) -> list[float]:
        steps = sorted(self._steps.get(self._work, ()))
        usual = steps[: len(steps) - max(1, len(steps) // 16)] if len(steps) > 3 else steps  # some were held up
        seconds = max(0.0, sum(usual) / len(usual)) if usual else 0.0
        cost, measured = report.measured.cost or SaveCost(), report.measured
        return [
            report.clock,
            seconds,
            statistics.pstdev(steps) / seconds if seconds else 0.0,
            len(steps),
            report.busy,
            report.superseded,
            report.failing,
            measured.cost is not None,
            cost.held,
            cost.slowdown,
            cost.confirm,
            measured.failures,
            measured.uptime,
        ]

    def _set_time(self, clock: float, seconds: float) -> None:
        self._least_time = self.time if self._least_time > -math.inf else clock
        self._time, self._timed_at, self._seconds = clock, self._tick, seconds

    def _remaining(self, due: Callable[[int, float], bool]) -> int | None:
        """After how many steps a save is expected to be due; None if it isn't for long."""
        not_due, steps = 0, 1
        while not due(steps, steps * self._seconds):
            if steps >= 2 * LONGEST:
                return None
            not_due, steps = steps, 2 * steps
        while steps - not_due > 1:
            middle = (not_due + steps) // 2
            if due(middle, middle * self._seconds):
                steps = middle
            else:
                not_due = middle
        return steps

    def _gap(self, remaining: int | None) -> int:
        """How many steps to go until the next exchange."""
        most = self._listen_steps() if self._names else LONGEST
        wait = self._ask_at - self._tick
        if not self.free and remaining is not None and remaining <= wait:
            return min(most, wait)
        wanted = min(most, max(1, 2 * self._paces[self._work][1]))
        if remaining is None or remaining == 1:
            return min(most, max(wanted, self._affordable()))
        # the steps up to there may differ from what is expected by twice their spread
        aim = remaining - min(max(1, remaining // 8, math.ceil(2 * self._spread * remaining**0.5)), remaining // 2)
        wanted = min(wanted, remaining // 2 if remaining >= 2 * STEPS_PER_EXCHANGE else aim)
        gap = min(most, max(wanted, self._affordable()))
        if gap >= aim and not self._aimed:
            self._aimed, gap = True, aim
        return gap

    def _affordable(self) -> int:
        return max(1, math.ceil(STEPS_PER_EXCHANGE * (1 - self._credit)))

    def _listen_steps(self) -> int:
        seconds, known = self._paces.get(self._work, (0.0, 0))
        if not known:
            return 1
        return max(1, min(LISTEN_STEPS, int(LISTEN_SECONDS / seconds))) if seconds > 0 else LISTEN_STEPS


# how many numbers rank 0 alone has to tell
_FACTS = 13
