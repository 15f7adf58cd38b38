"""Try a policy before it is used: months of training with saves and failures, simulated in a moment.

`simulate` asks the very triggers and retention rules that a ``CheckpointPolicy`` asks, with a clock of its own. It
touches no file and no Trainer. `wasted_shares` answers the narrower question how much each of many fixed intervals
wastes, and `price` turns a result into money.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from lightning_ckpt_policy._compose import shown, whole_number
from lightning_ckpt_policy.interval import Measured, SaveCost
from lightning_ckpt_policy.record import CheckpointRecord
from lightning_ckpt_policy.retention import Retention, as_retention, plan
from lightning_ckpt_policy.triggers import Progress, Trigger, as_trigger

DAY = 86400.0
# hours in a month, as stores bill them
MONTH_HOURS = 730.0
Metrics = Callable[[int], Mapping[str, float]]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained, what a save of it costs, and how often it fails.

    Attributes:
        step_seconds: Seconds per optimizer step.
        checkpoint_bytes: Bytes of one checkpoint.
        held_seconds: How long a save holds the training loop.
        slowdown_seconds: How much later training is in the end because steps take longer while a save is written.
        confirm_seconds: From the capture to the confirmation; within it no other save begins.
        mtbf_seconds: Mean time between failures of the whole job; infinite if it never fails.
        restart_seconds: From a failure until training goes on.
        epoch_steps: Optimizer steps per epoch; None for an epoch that doesn't end.
        validation_steps: Optimizer steps from one validation to the next; None for no validation.

    Raises:
        ValueError: One of them isn't a number of the kind that is needed.

    >>> Job(step_seconds=0.5, checkpoint_bytes=10**9, held_seconds=1.0, confirm_seconds=20.0).cost.overhead
    1.0
    """

    step_seconds: float
    checkpoint_bytes: int
    held_seconds: float
    slowdown_seconds: float = 0.0
    confirm_seconds: float = 0.0
    mtbf_seconds: float = math.inf
    restart_seconds: float = 0.0
    epoch_steps: int | None = None
    validation_steps: int | None = None

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name in ("epoch_steps", "validation_steps"):
                if value is not None:
                    whole_number(f.name, value, "leave it out if there is none")
                continue
            least = "above 0" if f.name in ("step_seconds", "mtbf_seconds", "checkpoint_bytes") else "of at least 0"
            number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
            finite = number < math.inf or f.name == "mtbf_seconds"
            if not (finite and (number > 0 or (number == 0 and least != "above 0"))):
                raise ValueError(f"{f.name}={shown(value)}: a number {least} was expected; give it in seconds or bytes")

    @property
    def cost(self) -> SaveCost:
        """What a save costs, as a run would measure it."""
        return SaveCost(
            held=self.held_seconds,
            slowdown=self.slowdown_seconds,
            confirm=max(self.confirm_seconds, self.held_seconds),
        )

    def uptimes(self, seed: int = 0) -> Iterator[float]:
        """How long each attempt runs before it fails, in seconds: random, the same for the same ``seed``."""
        source = random.Random(seed)
        while True:
            yield source.expovariate(1 / self.mtbf_seconds) if self.mtbf_seconds < math.inf else math.inf


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a simulated training.

    Attributes:
        wall_seconds: How long it took, with the time between attempts.
        kept_seconds: Training that was not done again, nor lost in the end.
        held_seconds: How long saves held the training loop or slowed it down.
        lost_seconds: Training that was lost in failures.
        restart_seconds: Time between attempts.
        failures: How often it failed.
        steps: Optimizer steps done in the end.
        saves: Confirmed saves.
        peak_bytes: The most that the store held at any moment, with a save on its way.
        mean_bytes: What it held on average over time.
        records: The checkpoints that are there in the end, by sequence.
    """

    wall_seconds: float
    kept_seconds: float
    held_seconds: float
    lost_seconds: float
    restart_seconds: float
    failures: int
    steps: int
    saves: int
    peak_bytes: int
    mean_bytes: float
    records: tuple[CheckpointRecord, ...]

    @property
    def saves_per_day(self) -> float:
        """Confirmed saves in 24 hours."""
        return self.saves * DAY / self.wall_seconds

    @property
    def lost_per_failure(self) -> float:
        """Seconds of training that a failure loses on average; 0 if there was none."""
        return self.lost_seconds / self.failures if self.failures else 0.0

    @property
    def wasted_share(self) -> float:
        """The share of the time that was no training that lasted."""
        return 1 - self.kept_seconds / self.wall_seconds


def simulate(
    job: Job,
    trigger: Trigger | list[Trigger],
    retention: Retention | list[Retention],
    *,
    duration: float = math.inf,
    uptimes: Iterable[float] | None = None,
    seed: int = 0,
    metrics: Metrics | None = None,
) -> Outcome:
    """Train for ``duration`` seconds with these triggers and rules, saves that cost what they cost, and failures.

    A failure loses what came after the newest confirmed checkpoint; training then goes on from it as a resume does. A
    save is written for ``confirm_seconds``; its bytes count from the capture on, and it is lost if the job fails before
    the end. Deletes take no time.

    Args:
        job: What is trained.
        trigger: When to save; a list means any of.
        retention: What to keep; a list means what any of them keeps.
        duration: Seconds of wall time after which it ends.
        uptimes: How long each attempt runs before it fails, in seconds; by default random ones of ``job``. It ends with
            the last of them.
        seed: Chooses the random ones.
        metrics: What a validation after so many steps logs.

    Raises:
        ValueError: ``duration`` isn't above 0, or it would never end: neither ``duration`` nor ``uptimes`` is finite.

    >>> from lightning_ckpt_policy import EveryInterval, KeepLast
    >>> job = Job(step_seconds=1.0, checkpoint_bytes=10**9, held_seconds=2.0, confirm_seconds=60.0, mtbf_seconds=DAY)
    >>> outcome = simulate(job, EveryInterval(minutes=10), KeepLast(2), duration=30 * DAY)
    >>> round(outcome.saves_per_day), outcome.peak_bytes, 0.006 < outcome.wasted_share < 0.009
    (144, 3000000000, True)
    """
    if not isinstance(duration, (int, float)) or not duration > 0:
        raise ValueError(f"duration={duration!r}: a number of seconds above 0 was expected")
    if uptimes is None and not duration < math.inf:
        raise ValueError(f"duration={duration!r}: without uptimes a finite number of seconds was expected")
    run = _Run(job, as_trigger(trigger), as_retention(retention), metrics)
    for uptime in job.uptimes(seed) if uptimes is None else uptimes:
        stop = min(run.wall + uptime, duration)
        if not stop < math.inf:
            raise ValueError(f"duration={duration!r}: an attempt that never fails needs a finite number of seconds")
        run.attempt(stop)
        if stop < duration:
            run.fail(min(job.restart_seconds, duration - stop))
        if run.wall >= duration:
            break
    return run.outcome()


class _Run:
    """The state of a simulated training. All times are seconds since its beginning."""

    def __init__(self, job: Job, trigger: Trigger, retention: Retention, metrics: Metrics | None) -> None:
        self.job = job
        self.trigger = trigger
        self.retention = retention
        self.metrics = metrics
        self.wall = 0.0
        self.began = 0.0  # this attempt
        self.uptime = 0.0  # of the attempts before
        self.partial = 0.0  # of the step that the end of the attempt cut off
        self.now = Progress()
        self.since = Progress()
        self.confirmed: Progress | None = None  # where the newest confirmed checkpoint was captured
        self.in_flight: Progress | None = None
        self.measured = Measured()
        self.records: list[CheckpointRecord] = []
        self.gap = 1  # steps between the last two saves: the next is likely to come after as many
        self.saves = self.failures = 0
        self.held = self.lost = self.restarting = 0.0
        self.bytes = self.peak = 0
        self.byte_seconds = self.bytes_since = 0.0

    def attempt(self, stop: float) -> None:
        """Train until ``stop``."""
        job = self.job
        self.began = self.wall
        self.measured = replace(self.measured, failures=self.failures, uptime=self.uptime)
        while (left := _whole(stop - self.wall, job.step_seconds)) >= 1:
            boundary = min(
                (every - self.now.step % every for every in (job.epoch_steps, job.validation_steps) if every),
                default=left + 1,
            )
            free = left + 1  # the first step at which a save on its way is confirmed
            if self.in_flight is not None:
                until_confirmed = self.in_flight.time + job.cost.confirm - self.wall
                free = max(1, math.ceil(until_confirmed / job.step_seconds - 1e-9))
            steps = min(left, boundary, free)
            found = _first(self._happens, steps, self.since.step + self.gap - self.now.step)
            count = steps if found is None else found
            self._confirm(self.wall + count * job.step_seconds)
            self.now = self._after(count, ends=count == boundary)
            self.wall = self.now.time
            if self.in_flight is None and self.trigger.due(self.now, self.since):
                self._capture(stop)
            else:
                self.since = self.trigger.follow(self.now, self.since)
        self._confirm(stop)
        self.partial = stop - self.wall
        self.wall = stop
        self.uptime += stop - self.began

    def _happens(self, count: int) -> bool:
        at = self._after(count)
        if self.trigger.follow(at, self.since) is not self.since:
            return True  # a phase ends
        return self.in_flight is None and bool(self.trigger.due(at, self.since))

    def _after(self, count: int, *, ends: bool = False) -> Progress:
        """The progress after ``count`` more steps; ``ends`` where an epoch or a validation may end with them."""
        job, now = self.job, self.now
        step, seconds = now.step + count, count * job.step_seconds
        validated = ends and job.validation_steps is not None and step % job.validation_steps == 0
        epoch_ended = ends and job.epoch_steps is not None and step % job.epoch_steps == 0
        return Progress(
            step=step,
            epoch=now.epoch + epoch_ended,
            validations=now.validations + validated,
            time=self.wall + seconds,
            elapsed=now.elapsed + seconds,
            metrics=self.metrics(step) if validated and self.metrics is not None else {},
            measured=self.measured,
        )

    def _capture(self, stop: float) -> None:
        cost = min(self.job.cost.overhead, stop - self.wall)
        self.gap = self.now.step - self.since.step
        self.since = self.in_flight = self.now.captured(self.since)
        self._store(self.wall, self.job.checkpoint_bytes)
        self.held += cost
        self.wall += cost
        self.now = replace(self.now, elapsed=self.now.elapsed + cost)

    def _confirm(self, until: float) -> None:
        """Confirm the save on its way, if it is written by ``until``, and delete what isn't kept any more."""
        captured = self.in_flight
        if captured is None or captured.time + self.job.cost.confirm > until + 1e-9:
            return
        at = captured.time + self.job.cost.confirm
        self.in_flight = None
        self.confirmed = captured
        self.saves += 1
        record = CheckpointRecord(
            path=f"{self.saves}.ckpt",
            step=captured.step,
            epoch=captured.epoch,
            sequence=self.saves,
            run_id="simulated",
            created_at=captured.time,
            size=self.job.checkpoint_bytes,
            checksum="crc32c:00000000",
            metrics=captured.metrics,
            attempt=self.failures + 1,
        )
        self.records.append(record)
        gone = {victim.sequence for victim in plan(self.retention, self.records, now=at)}
        self.records = [one for one in self.records if one.sequence not in gone]
        self._store(at, -len(gone) * self.job.checkpoint_bytes)
        self.measured = Measured(cost=self.job.cost, failures=self.failures, uptime=self.uptime + at - self.began)

    def fail(self, restart: float) -> None:
        """Lose what isn't confirmed, and begin again from there after ``restart`` seconds."""
        begin = Progress() if self.confirmed is None else self.confirmed
        self.failures += 1
        self.lost += (self.now.step - begin.step) * self.job.step_seconds + self.partial
        if self.in_flight is not None:
            self.in_flight = None
            self._store(self.wall, -self.job.checkpoint_bytes)
        self.wall += restart
        self.restarting += restart
        resumed_at = self.wall if self.confirmed is None else begin.time
        self.now = self.since = Progress(**begin.to_state(), time=resumed_at)

    def _store(self, at: float, change: int) -> None:
        self.byte_seconds += self.bytes * (at - self.bytes_since)
        self.bytes_since = at
        self.bytes += change
        self.peak = max(self.peak, self.bytes)

    def outcome(self) -> Outcome:
        """What came of it so far."""
        self._store(self.wall, 0)
        return Outcome(
            wall_seconds=self.wall,
            kept_seconds=self.wall - self.held - self.lost - self.restarting,
            held_seconds=self.held,
            lost_seconds=self.lost,
            restart_seconds=self.restarting,
            failures=self.failures,
            steps=self.now.step,
            saves=self.saves,
            peak_bytes=self.peak,
            mean_bytes=self.byte_seconds / self.wall if self.wall else 0.0,
            records=tuple(self.records),
        )


def _whole(seconds: float, step_seconds: float) -> int:
    """Whole steps in so many seconds."""
    return math.floor(seconds / step_seconds + 1e-9)


def _first(happens: Callable[[int], bool], most: int, guess: int) -> int | None:
    """The first of 1 to ``most`` at which it happens, None if at none; once it happens it goes on to.

    A good ``guess`` needs two questions.
    """
    if most < 1:
        return None
    guess = min(max(guess, 1), most)
    no, yes = 0, most + 1  # it doesn't happen at the one, it may at the other
    stride = 1
    if happens(guess):
        yes = guess
        while yes - no > 1:
            at = max(yes - stride, no + 1)
            if happens(at):
                yes, stride = at, stride * 2
            else:
                no = at
                break
    else:
        no = guess
        while no < most:
            at = min(no + stride, most)
            if happens(at):
                yes = at
                break
            no, stride = at, stride * 2
        else:
            return None
    while yes - no > 1:
        at = (no + yes) // 2
        no, yes = (no, at) if happens(at) else (at, yes)
    return yes


def wasted_shares(job: Job, intervals: Sequence[float], uptimes: Iterable[float]) -> list[float]:
    """The share of the time that saving every so many seconds wastes, for each of ``intervals``.

    The same as ``simulate`` with ``EveryInterval``, without steps and all intervals at once. Wasted is the time that
    saves hold or slow down training, what failures lose, and the time between attempts.

    Args:
        job: What is trained.
        intervals: Seconds from one save's start to the next one's.
        uptimes: How long each attempt runs before it fails, in seconds.

    Raises:
        ValueError: An interval isn't a finite number above 0.

    >>> job = Job(step_seconds=1.0, checkpoint_bytes=1, held_seconds=10.0)
    >>> [round(share, 3) for share in wasted_shares(job, [100.0, 450.0, 2000.0], [10_000.0] * 100)]
    [0.109, 0.046, 0.204]
    """
    for interval in intervals:
        if not 0 < interval < math.inf:
            raise ValueError(f"intervals={interval!r}: seconds above 0 were expected")
    cost = job.cost
    # a save can't begin before the one before it is confirmed, nor while that one holds the loop
    period = np.maximum(np.asarray(intervals, dtype=float), max(cost.confirm, cost.overhead))
    kept = np.zeros_like(period)
    age = np.zeros_like(period)  # of the newest confirmed capture, where an attempt begins
    saved = np.zeros(period.shape, dtype=bool)
    wall = 0.0
    for uptime in uptimes:
        first = np.where(saved, np.maximum(period - age, 0.0), period)
        confirmed = np.floor((uptime - first - cost.confirm) / period)
        there = confirmed >= 0
        newest = first + confirmed * period
        kept += np.where(there, newest - confirmed * cost.overhead, 0.0)
        age = np.where(there, uptime - newest, age + uptime) + job.restart_seconds
        saved |= there
        wall += uptime + job.restart_seconds
    return [float(share) for share in 1 - kept / wall]


@dataclass(frozen=True, kw_only=True)
class Price:
    """What a simulated training cost beyond the training itself, in the currency of the prices.

    Attributes:
        wasted: Compute hours that were no training that lasted.
        storage: The store.
    """

    wasted: float
    storage: float

    @property
    def total(self) -> float:
        """Both together."""
        return self.wasted + self.storage


def price(outcome: Outcome, *, per_compute_hour: float, per_gb_month: float) -> Price:
    """What ``outcome`` cost, given the prices of the whole job's hour and of keeping a GB (10^9 bytes) for a month.

    Args:
        outcome: What a simulation came to.
        per_compute_hour: Price of an hour of all machines of the job.
        per_gb_month: Price of 10^9 bytes in the store for a month of 730 hours.

    Raises:
        ValueError: A price isn't a finite number of at least 0.

    >>> job = Job(step_seconds=1.0, checkpoint_bytes=10**9, held_seconds=36.0)
    >>> from lightning_ckpt_policy import EveryInterval, KeepLast
    >>> outcome = simulate(job, EveryInterval(hours=1), KeepLast(1), duration=730 * 3600.0)
    >>> cost = price(outcome, per_compute_hour=100.0, per_gb_month=0.02)
    >>> round(cost.wasted), round(cost.storage, 2)
    (729, 0.02)
    """
    for name, value in (("per_compute_hour", per_compute_hour), ("per_gb_month", per_gb_month)):
        if isinstance(value, bool) or not 0 <= value < math.inf:
            raise ValueError(f"{name}={shown(value)}: a price of at least 0 was expected")
    hours = outcome.wall_seconds / 3600
    return Price(
        wasted=outcome.wasted_share * hours * per_compute_hour,
        storage=outcome.mean_bytes / 1e9 * hours / MONTH_HOURS * per_gb_month,
    )
