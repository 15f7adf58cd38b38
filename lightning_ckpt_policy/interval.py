"""How often to save: the interval that wastes least, from what a save costs and how often machines fail.

Saving too often wastes what the saves cost, saving too seldom wastes what is done again after a failure. With a cost of
C seconds per save and a mean time between failures of M seconds, saving every P seconds wastes about C/P + P/(2M) of
the time, which is least at P = sqrt(2*C*M).

Everything here is a pure function of small immutable values, so that it can be checked by hand and simulated.

References:
    J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974.
    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3), 2006.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Protocol

from lightning_ckpt_policy.record import CheckpointRecord

# seconds; what is assumed where nothing has failed yet
DEFAULT_MTBF = 86400.0
# where a save costs less of the time between failures than this, Young's formula is as good as Daly's
SMALL_COST = 1e-3
# of so many of the newest saves the typical cost is taken
RECENT = 5
# over so many of the newest batches their pace is averaged
_PACE_STEPS = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveCost:
    """What one save cost, in seconds.

    Attributes:
        held: How long the training loop was held.
        slowdown: How much later training was in the end because steps took longer while the save was written.
        confirm: From the capture to the confirmation. Within this time no other save can begin.

    Raises:
        ValueError: One of them isn't a finite number of at least 0.

    >>> SaveCost(held=2.0, slowdown=0.5, confirm=30.0).overhead
    2.5
    """

    held: float = 0.0
    slowdown: float = 0.0
    confirm: float = 0.0

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if not 0 <= value < math.inf:
                raise ValueError(f"{f.name}={value!r}: seconds of at least 0 were expected; give what was measured")

    @property
    def overhead(self) -> float:
        """Seconds of training that the save cost."""
        return self.held + self.slowdown


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What a run has measured so far of its saves and its failures.

    Attributes:
        cost: What a save typically costs; None before the first is confirmed.
        failures: How many attempts of the run have failed.
        uptime: Seconds for which the run's attempts have been up, together.

    >>> Measured(failures=2, uptime=7200.0).mtbf
    3600.0
    """

    cost: SaveCost | None = None
    failures: int = 0
    uptime: float = 0.0

    @property
    def mtbf(self) -> float:
        """Mean seconds between failures; before the first one a day, or the time the run has been up if that's more."""
        if self.failures:
            return self.uptime / self.failures
        return max(DEFAULT_MTBF, self.uptime)


def typical_cost(costs: Sequence[SaveCost]) -> SaveCost | None:
    """The median of the newest few of ``costs``, part by part, so that one slow save doesn't change the interval.

    Args:
        costs: What each save cost, in order; empty gives None.

    >>> typical_cost([SaveCost(held=1.0), SaveCost(held=90.0), SaveCost(held=2.0)]).held
    2.0
    """
    if not costs:
        return None
    recent = costs[-RECENT:]
    return SaveCost(**{f.name: statistics.median(getattr(cost, f.name) for cost in recent) for f in fields(SaveCost)})


def costs_of(records: Sequence[CheckpointRecord]) -> list[SaveCost]:
    """What the saves of ``records`` cost, in order of confirmation, as far as the records tell.

    The slow-down is that of the saves before; where none was measured, it is taken to be the usual one.

    >>> costs_of([])
    []
    """
    ordered = sorted(records, key=lambda record: record.sequence)
    slowed = [record.slowed_seconds for record in ordered if record.slowed_seconds is not None]
    usual = statistics.median(slowed[-RECENT:]) if slowed else 0.0
    return [
        SaveCost(
            held=record.held_seconds,
            slowdown=usual if record.slowed_seconds is None else record.slowed_seconds,
            confirm=record.held_seconds + (record.write_seconds or 0.0),
        )
        for record in ordered
        if record.held_seconds is not None
    ]


class Pace:
    """How much slower training is while saves are written, from the times at which batches end.

    >>> pace = Pace()
    >>> for clock, writing in [(0.0, False), (1.0, False), (2.0, True), (3.5, True), (5.0, False)]:
    ...     pace.batch_ended(clock, writing)
    >>> pace.slowdown(held=0.25)
    0.75
    """

    def __init__(self) -> None:
        self._last: float | None = None
        self._was_writing = False
        self._idle_step = 0.0
        self._idle_steps = 0
        self._busy_seconds = 0.0
        self._busy_steps = 0

    def batch_ended(self, clock: float, writing: bool) -> None:
        """Note a batch's end.

        Args:
            clock: Seconds on a clock that only goes forward.
            writing: Whether a save is being written now.
        """
        if self._last is not None:
            seconds = clock - self._last
            if self._was_writing:
                self._busy_seconds += seconds
                self._busy_steps += 1
            elif not writing:
                self._idle_steps += 1
                # the mean, with more weight on the last hundred, since the pace changes in the course of a training
                self._idle_step += (seconds - self._idle_step) / min(self._idle_steps, _PACE_STEPS)
        self._last, self._was_writing = clock, writing

    def save_began(self) -> None:
        """Note that a save has begun since the last batch's end."""
        self._was_writing = True

    def interrupted(self) -> None:
        """Leave out the time up to the next batch's end: something else than a batch comes in between."""
        self._last = None

    def slowdown(self, held: float) -> float:
        """Seconds by which the batches since the last call took longer than others, apart from what is known as held.

        Args:
            held: Seconds for which the loop was held, which those batches include.
        """
        slower = self._busy_seconds - self._busy_steps * self._idle_step - held if self._idle_steps else 0.0
        self._busy_seconds, self._busy_steps = 0.0, 0
        return max(0.0, slower)


class AttemptLike(Protocol):
    """What is needed of an attempt record: `lightning_ckpt_policy.store.Attempt` has it."""

    @property
    def number(self) -> int: ...
    @property
    def created_at(self) -> float: ...
    @property
    def status(self) -> str: ...
    @property
    def ended_at(self) -> float | None: ...


def failures_of(attempts: Sequence[AttemptLike], records: Sequence[CheckpointRecord] = ()) -> tuple[int, float]:
    """How many attempts of a run failed, and for how many seconds all of them were up together.

    An attempt that ended with an error failed, and so did one that was killed: its record still says that it runs. One
    that finished, or was stopped on request, did not. Nobody noted when a killed one ended: it was up until its newest
    checkpoint, or, where none is left, until the next attempt began.

    Args:
        attempts: Those of one run that are over: the caller's own isn't among them.
        records: The run's checkpoints.

    >>> from lightning_ckpt_policy.store import Attempt
    >>> failures_of([
    ...     Attempt(run_id="a", number=1, created_at=0.0, status="error", ended_at=100.0),
    ...     Attempt(run_id="a", number=2, created_at=200.0, status="finished", ended_at=500.0)])
    (1, 400.0)
    """
    ordered = sorted(attempts, key=lambda attempt: attempt.number)
    signs_of_life: dict[int, float] = {}
    for record in records:
        signs_of_life[record.attempt] = max(record.created_at, signs_of_life.get(record.attempt, record.created_at))
    uptime = 0.0
    for attempt, following in zip(ordered, [*ordered[1:], None], strict=False):
        end = attempt.ended_at
        if end is None:
            next_start = attempt.created_at if following is None else following.created_at
            end = signs_of_life.get(attempt.number, next_start)
        uptime += max(0.0, end - attempt.created_at)
    return sum(attempt.status in ("running", "error") for attempt in ordered), uptime


def young(cost: float, mtbf: float) -> float:
    """Young's interval, sqrt(2*C*M): seconds from the start of one save to the start of the next.

    Good where a save costs little of the time between failures.

    Args:
        cost: Seconds of training that a save costs.
        mtbf: Mean seconds between failures.

    >>> young(2.0, 3600.0)
    120.0
    """
    return math.sqrt(2 * cost * mtbf)


def daly(cost: float, mtbf: float) -> float:
    """Daly's higher-order interval: seconds from the start of one save to the start of the next.

    His formula, sqrt(2CM) * (1 + sqrt(C/2M)/3 + (C/2M)/9) - C where C < 2M and else M, is for the time between the end
    of one save and the start of the next; here the cost C is added to it.

    Args:
        cost: Seconds of training that a save costs.
        mtbf: Mean seconds between failures.

    >>> round(daly(2.0, 3600.0), 2), round(daly(600.0, 3600.0), 1)
    (120.67, 2297.7)
    """
    if cost >= 2 * mtbf:
        return mtbf + cost
    share = cost / (2 * mtbf)
    return young(cost, mtbf) * (1 + math.sqrt(share) / 3 + share / 9)


def best_interval(cost: float, mtbf: float) -> tuple[float, str]:
    """The interval that wastes least, and whose formula gave it: Young's where the cost is small, else Daly's.

    >>> best_interval(2.0, 3600.0)
    (120.0, 'Young')
    >>> best_interval(600.0, 3600.0)[1]
    'Daly'
    """
    if cost <= SMALL_COST * mtbf:
        return young(cost, mtbf), "Young"
    return daly(cost, mtbf), "Daly"
