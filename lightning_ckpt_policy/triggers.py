"""When to save: triggers, joined by ``|`` (whichever is due) and ``&`` (only when all are due).

A trigger is asked ``due(now, since)`` at every point where state can be captured. It compares the progress now with the
progress when state was last captured. It keeps no state of its own, so:

* What it counts, it counts from the beginning of the run, not from the last save; an interval counts from the last
  capture.
* A trigger that can't be served at once, because a save is in flight or the point isn't one where a resume is exact, is
  still due at the next point (only `OnImprovement` isn't).
* Triggers that are due together make one save, which has every reason in its record.
* After a resume ``since`` is where the checkpoint was captured: no step fires twice, and an interval doesn't start
  afresh.

To add a trigger, write a frozen dataclass here that subclasses `Trigger`, checks its fields in ``__post_init__`` and
defines ``due`` (and ``timed`` if ranks may disagree about it). There is nothing to register.
"""

from __future__ import annotations

import functools
import inspect
import math
import signal
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, TypeAlias, cast

from lightning_ckpt_policy._compose import (
    Group,
    Mode,
    check_metric,
    flattened,
    shown,
    whole_number,
    whole_numbers,
)
from lightning_ckpt_policy._units import HoursMinutesSeconds, duration, seconds_in, shown_seconds
from lightning_ckpt_policy.interval import Measured, best_interval


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far training has come at one moment.

    Attributes:
        step: Optimizer steps done (``trainer.global_step``).
        epoch: Epochs completed.
        validations: Validations completed during the fit.
        time: Seconds on a clock that only goes forward, with the same origin for ``now`` and ``since``.
        metrics: Metrics of the weights as they are now; one that is stale is left out.
        elapsed: Seconds of training up to here since the run began, without the time between its attempts.
        signals: How often each signal has arrived in this process, by name.
        lowest: The lowest value of each metric among the states that were captured up to here.
        highest: The highest one.
        measured: What saves have cost and how often the run has failed; None where nobody measures it.
        ends: In a ``since``: for each schedule, the points at which its phases have ended after it, by their index
            (`Trigger.follow`).

    >>> Progress(step=10, epoch=1).time
    0.0
    """

    step: int = 0
    epoch: int = 0
    validations: int = 0
    time: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    elapsed: float = 0.0
    signals: Mapping[str, int] = field(default_factory=dict)
    lowest: Mapping[str, float] = field(default_factory=dict)
    highest: Mapping[str, float] = field(default_factory=dict)
    measured: Measured | None = None
    ends: Mapping[PhaseSchedule, Mapping[int, Progress]] = field(default_factory=dict)

    def captured(self, since: Progress) -> Progress:
        """This moment as the next ``since``, after its state was captured; ``since`` is the one before.

        >>> since = Progress(step=5, metrics={"loss": 0.5}).captured(Progress(lowest={"loss": 0.4}))
        >>> since.lowest, since.highest
        ({'loss': 0.4}, {'loss': 0.5})
        """
        values = {name: value for name, value in self.metrics.items() if value == value}  # NaN isn't equal to itself
        lowest = {**since.lowest, **{k: min(v, since.lowest.get(k, v)) for k, v in values.items()}}
        highest = {**since.highest, **{k: max(v, since.highest.get(k, v)) for k, v in values.items()}}
        return replace(self, lowest=lowest, highest=highest)

    def to_state(self) -> dict[str, Any]:
        """What a resume has to know, as plain values; ``Progress(**state, time=...)`` brings it back.

        >>> Progress(**Progress(step=10, elapsed=9.5, time=3.0).to_state(), time=100.0).elapsed
        9.5
        """
        return {
            "step": self.step,
            "epoch": self.epoch,
            "validations": self.validations,
            "elapsed": self.elapsed,
            "lowest": dict(self.lowest),
            "highest": dict(self.highest),
        }


class Trigger(ABC):
    """Says when a save is due. Subclasses hold plain values only, compare by value, and touch nothing outside.

    >>> (EveryNTrainSteps(100) | EveryInterval(minutes=30)) & AfterValidation()
    (EveryNTrainSteps(n=100) | EveryInterval(minutes=30)) & AfterValidation(n=1)
    """

    @abstractmethod
    def due(self, now: Progress, since: Progress) -> tuple[str, ...]:
        """The reasons why a save is due at ``now``, each the ``repr`` of a trigger; empty where none is due.

        Called after every batch, so it has to be quick.

        Args:
            now: The progress at this moment.
            since: The progress when state was last captured, or when training began.
        """

    @property
    def timed(self) -> bool:
        """Whether the answer may differ between ranks because it depends on a clock or on something unknown."""
        return False

    @property
    def monitors(self) -> tuple[tuple[str, Mode], ...]:
        """Each ``(monitor, mode)`` that the trigger looks at."""
        return ()

    @property
    def signals(self) -> tuple[str, ...]:
        """The names of the signals that the trigger waits for."""
        return ()

    @property
    def adaptive(self) -> tuple[AdaptiveInterval, ...]:
        """Each `AdaptiveInterval` in it, which can say what it chose and why."""
        return ()

    @property
    def foreign(self) -> bool:
        """Whether code from outside this package answers, which may do so differently on each rank."""
        return type(self).__module__ != __name__

    def stops(self, now: Progress, since: Progress) -> bool:
        """Whether the fit is to end once what is due at ``now`` is saved and confirmed."""
        return False

    @property
    def follows(self) -> bool:
        """Whether ``follow`` has something to remember."""
        return False

    def follow(self, now: Progress, since: Progress) -> Progress:
        """``since`` with what has to be remembered until the next capture.

        To be called at every point, after ``due`` was asked; the answer replaces ``since``. Only a `PhaseSchedule`
        remembers something: where a phase ended.
        """
        return since

    def __or__(self, other: TriggerLike) -> Trigger:
        return _join(AnyOf, self, other)

    def __ror__(self, other: TriggerLike) -> Trigger:
        return _join(AnyOf, other, self)

    def __and__(self, other: TriggerLike) -> Trigger:
        return _join(AllOf, self, other)

    def __rand__(self, other: TriggerLike) -> Trigger:
        return _join(AllOf, other, self)


Condition: TypeAlias = Callable[[Progress, Progress], bool]
TriggerLike: TypeAlias = "Trigger | Condition"


# The triggers


@dataclass(frozen=True)
class EveryNTrainSteps(Trigger):
    """Due when a multiple of ``n`` optimizer steps has been reached or passed since the last capture.

    Multiples count from step 0 of the run, not from the last save. A step count that jumps over a multiple counts as
    reaching it, and a step that is repeated by accumulation is due once. While a save is in flight it stays due, and
    is served by one save however many multiples went by. A resume goes on counting at the checkpoint's step, so no
    multiple is due twice.

    Raises:
        ValueError: ``n`` isn't an integer of at least 1.

    >>> EveryNTrainSteps(5).due(now=Progress(step=6), since=Progress(step=4))
    ('EveryNTrainSteps(n=5)',)
    >>> EveryNTrainSteps(5).due(now=Progress(step=8), since=Progress(step=6))
    ()
    """

    n: int

    def __post_init__(self) -> None:
        _check_n(self, self.n)

    def due(self, now: Progress, since: Progress) -> tuple[str, ...]:
        return (repr(self),) if now.step // self.n > since.step // self.n else ()


@dataclass(frozen=True)
class EveryNEpochs(Trigger):
    """Due when a multiple of ``n`` epochs has been completed since the last capture.

    Multiples count from the first epoch of the run, also after a resume. While a save is in flight it stays due.

    Raises:
        ValueError: ``n`` isn't an integer of at least 1.

    >>> EveryNEpochs(2).due(now=Progress(epoch=2), since=Progress(epoch=1))
    ('EveryNEpochs(n=2)',)
    """

    n: int = 1

    def __post_init__(self) -> None:
        _check_n(self, self.n)

    def due(self, now: Progress, since: Progress) -> tuple[str, ...]:
        return (repr(self),) if now.epoch // self.n > since.epoch // self.n else ()


@dataclass(frozen=True)
class AfterValidation(Trigger):
    """Due when a multiple of ``n`` validations has been completed since the last capture.

    Only validations within a fit count, not the sanity check. Multiples count from the first of them, also after a
    resume. While a save is in flight it stays due; what is then saved is without that validation's metrics.

    Raises:
        ValueError: ``n`` isn't an integer of at least 1.

    >>> AfterValidation().due(now=Progress(validations=1), since=Progress())
    ('AfterValidation(n=1)',)
    """

    n: int = 1

    def __post_init__(self) -> None:
        _check_n(self, self.n)

    def due(self, now: Progress, since: Progress) -> tuple[str, ...]:
        return (repr(self),) if now.validations // self.n > since.validations // self.n else ()


@dataclass(frozen=True)
class AtSteps(Trigger):
    """Due when one of the named optimizer steps has been reached or passed since the last capture.

    Steps count from the beginning of the run. While a save is in flight it stays due. A resume from a checkpoint at or
    past a named step isn't due for it again.

    Args:
        steps: The steps, each at least 1. Any iterable will do; they are stored sorted, each once.

    Raises:
        ValueError: ``steps`` is empty or holds something else than integers of at least 1.

    >>> AtSteps([300, 100]).due(now=Progress(step=101), since=Progress(step=99))
    ('AtSteps(steps=(100, 300))',)
    """

    steps: Sequence[int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", whole_numbers("steps", self.steps, "AtSteps([100, 300])"))

    def due(self, now: Progress, since: Progress) -> tuple[str, ...]:
        return (repr(self),) if bisect_right(self.steps, now.step) > bisect_right(self.steps, since.step) else ()


@dataclass(frozen=True, kw_only=True, repr=False)
class EveryInterval(HoursMinutesSeconds, Trigger):
    """Due when this much time has gone by since the last capture began.

    The time goes on while nothing trains: after a restart it is due at once if the checkpoint is older than that. While
    a save is in flight it stays due, and the next interval counts from the capture that follows.

    Args:
        hours: Hours, at least 0; may be a fraction.
        minutes: Minutes, added to the hours.
        seconds: Seconds, added to both.

    Raises:
        ValueError: One of them isn't a finite number of at least 0, or all are 0.

    >>> EveryInterval(minutes=30).due(now=Progress(time=1800.0), since=Progress(time=0.0))
    ('EveryInterval(minutes=30)',)
    >>> EveryInterval(hours=1, minutes=30).total_seconds
    5400.0
    """

    @property
    def timed(self) -> bool:
        return True

    def due(self, now: Progress, since: Progress) -> tuple[str, ...]:
        return (repr(self),) if now.time - since.time >= self.total_seconds else ()


@dataclass(frozen=True)
class OnImprovement(Trigger):
    """Due where a validation has just logged a ``monitor`` better than that of every state captured so far.

    The first value is an improvement; NaN never is. What counts as the best so far is kept in the checkpoint, so a
    resume doesn't begin afresh. It is only due at that point: later weights would not be those that the metric was
    measured on. An improvement that comes while a save is in flight is therefore not made up for; the next validation
    is again compared with what was captured.

    Args:
        monitor: Name of the metric, as it was logged.
        mode: ``"min"`` where lower is better, ``"max"`` where higher is.
        min_delta: It must be better by more than this, in the metric's unit; at least 0.

    Raises:
        ValueError: ``monitor`` isn't a name, ``mode`` is another word, or ``min_delta`` isn't a finite number of at
            least 0.

    >>> trigger = OnImprovement("val_loss", min_delta=0.1)
    >>> trigger.due(now=Progress(metrics={"val_loss": 0.35}), since=Progress(lowest={"val_loss": 0.5}))
    ("OnImprovement(monitor='val_loss', mode='min', min_delta=0.1)",)
    >>> trigger.due(now=Progress(metrics={"val_loss": 0.45}), since=Progress(lowest={"val_loss": 0.5}))
    ()
    """

    monitor: str
    mode: Mode = "min"
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        check_metric(self.monitor, self.mode, "OnImprovement('val_loss', 'min')")
        delta = self.min_delta
        if isinstance(delta, bool) or not isinstance(delta, (int, float)) or not 0 <= delta < math.inf:
            raise ValueError(
                f"min_delta={shown(delta)}: a finite number of at least 0 was expected; "
                "write 0 where any improvement counts"
            )

    @property
    def timed(self) -> bool:
        return True  # a metric that isn't reduced over the ranks differs among them

    @property
    def monitors(self) -> tuple[tuple[str, Mode], ...]:
        return ((self.monitor, self.mode),)

    def due(self, now: Progress, since: Progress) -> tuple[str, ...]:
        value = now.metrics.get(self.monitor)
        if value is None or value != value:  # NaN isn't equal to itself
            return ()
        if self.mode == "min":
            best = since.lowest.get(self.monitor)
            better = best is None or value < best - self.min_delta
        else:
            best = since.highest.get(self.monitor)
            better = best is None or value > best + self.min_delta
        return (repr(self),) if better else ()


# why a signal is refused, by its name
_REFUSED = {
    name: why
    for why, names in (
        ("no process can catch it", "SIGKILL SIGSTOP"),
        ("the process can't go on after it", "SIGSEGV SIGFPE SIGILL SIGBUS SIGABRT SIGSYS SIGTRAP"),
        ("it comes whenever a child ends, such as a loader worker", "SIGCHLD"),
        ("it comes with ordinary input and output", "SIGPIPE SIGIO SIGURG SIGTTIN SIGTTOU"),
        ("it comes whenever a stopped process goes on or its terminal changes", "SIGCONT SIGWINCH"),
        ("it belongs to who sets a timer: profilers and time limits", "SIGALRM SIGVTALRM SIGPROF"),
    )
    for name in names.split()
}


@dataclass(frozen=True)
class OnSignal(Trigger):
    """Due when one of the signals has arrived since the last capture.

    It is acted on at the end of the batch in which it arrives, or of its accumulation window; while a save is in flight
    it stays due. Several that arrive before one capture make one save. Signals of an earlier attempt don't count after
    a resume. On several ranks it is enough that one of them gets it: all of them then know it within 5 s and 64 steps,
    or one step if a step takes longer.

    With ``stop`` the fit ends once the save is confirmed, for ``save_timeout`` at most: for a scheduler that warns
    before it takes the machine away. It ends as Lightning ends one after SIGTERM, with a ``SIGTERMException``, which is
    a clean exit of the program. Inside a validation it is then acted on at the end of the validation's batch, and a
    resume runs the whole validation; without ``stop`` at the validation's end, since only that has metrics. Lightning
    ends every fit after SIGTERM, also without ``stop``, but not before the state is saved.

    The handler only counts, calls the one that was there before (except Python's own for Ctrl-C), and is gone after the
    fit. What the earlier one raises ends the fit once the state is saved. A signal should go to the training process,
    not to its process group: loader workers that get it end. Their end interrupts no batch and the state is still
    saved, but the fit may then end with torch's error about them.

    Args:
        signals: Names, or members of ``signal.Signals``; one alone needs no list. By default SIGTERM.
        stop: Whether the fit ends after that save. Without it, training goes on, except after SIGTERM.

    Raises:
        ValueError: There is none, this platform lacks one of them, it can't be caught, or it comes in the ordinary
            course of a training (SIGCHLD, SIGALRM and the like).

    >>> OnSignal(["SIGUSR1"]).due(now=Progress(signals={"SIGUSR1": 1}), since=Progress())
    ("OnSignal(signals=('SIGUSR1',), stop=False)",)
    >>> OnSignal("SIGTERM", stop=True).stops(now=Progress(signals={"SIGTERM": 1}), since=Progress())
    True
    """

    # "signals" is also what every trigger says it waits for
    signals: Sequence[str | signal.Signals] | str | signal.Signals = ("SIGTERM",)  # type: ignore[assignment]
    stop: bool = False

    def __post_init__(self) -> None:
        single = isinstance(self.signals, (str, signal.Signals))
        try:
            values = [self.signals] if single else list(cast("Sequence[object]", self.signals))
        except TypeError:
            values = []
        if not values:
            raise ValueError(
                f"signals={shown(self.signals)}: at least one signal was expected; write {_SIGNAL_EXAMPLE}"
            )
        object.__setattr__(self, "signals", tuple(sorted({_signal_name(value) for value in values})))
        if not isinstance(self.stop, bool):
            raise ValueError(f"stop={shown(self.stop)}: True or False was expected; write stop=True to end the fit")

    @property
    def timed(self) -> bool:
        return True

    def due(self, now: Progress, since: Progress) -> tuple[str, ...]:
        if not now.signals:
            return ()
        arrived = any(
            now.signals.get(name, 0) > since.signals.get(name, 0) for name in cast("tuple[str]", self.signals)
        )
        return (repr(self),) if arrived else ()

    def stops(self, now: Progress, since: Progress) -> bool:
        return self.stop and bool(self.due(now, since))


_SIGNAL_EXAMPLE = "OnSignal(['SIGTERM'])"


def _signal_name(value: object) -> str:
    if not isinstance(value, (str, signal.Signals)):
        raise ValueError(f"signals={shown(value)}: the name of a signal was expected; write {_SIGNAL_EXAMPLE}")
    member = signal.Signals.__members__.get(value) if isinstance(value, str) else value
    if member is None:
        raise ValueError(
            f"signals={shown(value)}: this platform has no such signal; write {_SIGNAL_EXAMPLE} or another of "
            f"{', '.join(sorted(other.name for other in signal.Signals if other.name not in _REFUSED))}"
        )
    if member.name in _REFUSED:
        why = _REFUSED[member.name]
        raise ValueError(f"signals={member.name!r}: {why}; write {_SIGNAL_EXAMPLE}, or save before with EveryInterval")
    return member.name


@dataclass(frozen=True)
class AdaptiveInterval(Trigger):
    """Due when the time that wastes least has gone by since the last capture began.

    The interval is Young's sqrt(2*C*M), or Daly's higher-order form where the cost of a save isn't small: see
    `lightning_ckpt_policy.interval`. C is what a save costs the training loop, as measured: the time it is held and
    how much it is slowed down. M is the mean time between failures. Between ``min`` and ``max`` it is kept, but it is
    never so short that saves take more than ``max_overhead`` of the time, nor shorter than a save takes to be
    confirmed. Before the first save is confirmed its cost isn't known, and the interval is ``min``.

    As with `EveryInterval`, the time goes on over a restart.

    Args:
        mtbf: Mean time between failures of the whole job, in seconds or as ``"8h"``. By default it is learned from the
            run's attempts: a crash counts, a clean end or a requested stop doesn't, and before any failure it is a day.
        max_overhead: The largest share of the time that saves may take, above 0 and at most 1.
        min: The shortest interval, in seconds or as ``"1m"``.
        max: The longest interval; only ``max_overhead`` and the time to confirm go beyond it.

    Raises:
        ValueError: A time isn't one above 0, ``max_overhead`` isn't a share, or ``min`` is above ``max``.

    >>> from lightning_ckpt_policy.interval import SaveCost
    >>> trigger = AdaptiveInterval(mtbf="8h", min="1m", max="1h")
    >>> trigger.interval(Measured(cost=SaveCost(held=2.0)))
    339.4112549695428
    >>> trigger.interval(None)
    60.0
    """

    mtbf: float | str | None = None
    max_overhead: float = 0.01
    min: float | str = "1m"
    max: float | str = "6h"

    def __post_init__(self) -> None:
        if self.mtbf is not None:
            object.__setattr__(self, "mtbf", duration("mtbf", self.mtbf, "mtbf='8h', or None to learn it"))
        object.__setattr__(self, "min", duration("min", self.min, "min='1m'"))
        object.__setattr__(self, "max", duration("max", self.max, "max='6h'"))
        share = self.max_overhead
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
            raise ValueError(
                f"max_overhead={shown(share)}: a share above 0 and at most 1 was expected; write 0.01 for 1 %"
            )
        if _seconds(self.min) > _seconds(self.max):
            raise ValueError(f"min={self.min!r} is above max={self.max!r}; swap them")

    @property
    def timed(self) -> bool:
        return True

    def due(self, now: Progress, since: Progress) -> tuple[str, ...]:
        waited = now.time - since.time
        return (repr(self),) if waited >= self._least and waited >= self.interval(now.measured) else ()

    @property
    def adaptive(self) -> tuple[AdaptiveInterval, ...]:
        return (self,)

    def interval(self, measured: Measured | None) -> float:
        """The interval in seconds, given what was measured."""
        return self._choose(measured)[0]

    def explain(self, measured: Measured | None) -> str:
        """The interval, and why it is that one, for a log.

        >>> from lightning_ckpt_policy.interval import SaveCost
        >>> AdaptiveInterval(min="1m").explain(Measured(cost=SaveCost(held=2.0), failures=2, uptime=57600.0))
        'every 339.4 s: Young, a save costs 2 s, 8h between failures (2 in 16h)'
        """
        seconds, formula, bound = self._choose(measured)
        if measured is None or measured.cost is None:
            return f"every {seconds:.4g} s: min, until a save has been measured"
        mtbf = _shown_time(self._mtbf(measured))
        if self.mtbf is not None:
            learned = "given"
        elif measured.failures:
            learned = f"{measured.failures} in {_shown_time(measured.uptime)}"
        else:
            learned = f"assumed, none in {_shown_time(measured.uptime)}"
        text = f"{formula}, a save costs {measured.cost.overhead:.3g} s, {mtbf} between failures ({learned})"
        return f"every {seconds:.4g} s: {text}" + (f"; bound by {bound}" if bound else "")

    def _choose(self, measured: Measured | None) -> tuple[float, str, str]:
        """The interval, the formula and what bound it, if something did."""
        least, most = self._least, self._most
        if measured is None or measured.cost is None:
            return least, "", ""
        cost = measured.cost
        seconds, formula = best_interval(cost.overhead, self._mtbf(measured))
        bound = ""
        if seconds > most:
            seconds, bound = most, f"max={self.max}"
        for limit, name in (
            (least, f"min={self.min}"),
            (cost.overhead / self.max_overhead, f"max_overhead={self.max_overhead:g}"),
            (cost.confirm, f"the {cost.confirm:.3g} s until a save is confirmed"),
        ):
            if seconds < limit:
                seconds, bound = limit, name
        return seconds, formula, bound

    @functools.cached_property
    def _least(self) -> float:
        return _seconds(self.min)

    @functools.cached_property
    def _most(self) -> float:
        return _seconds(self.max)

    def _mtbf(self, measured: Measured) -> float:
        return measured.mtbf if self.mtbf is None else _seconds(self.mtbf)


def _seconds(text: float | str) -> float:
    return seconds_in(cast(str, text))  # __post_init__ has made a text of it


def _shown_time(seconds: float) -> str:
    return shown_seconds(float(round(seconds))) if seconds >= 1 else f"{seconds:.3g}s"


By = Literal["step", "epoch", "time"]
_BY = {"step": "step", "epoch": "epoch", "time": "elapsed"}
_PHASES_EXAMPLE = "PhaseSchedule([(1000, EveryNTrainSteps(100)), (None, EveryNTrainSteps(1000))])"


@dataclass(frozen=True)
class PhaseSchedule(Trigger):
    """Another trigger in each phase of training: saves are frequent while it is unstable, and seldom later on.

    A phase lasts from the end of the one before it to the first point at which its ``until`` is reached. That point
    belongs to it, so with ``until`` 1000 and every 100 steps there is a save at step 1000. What a trigger counts
    (steps, epochs, validations) and what had not come about in its phase doesn't make it due there: the end of a phase
    causes no save by itself. An interval goes on from the last capture. What was due in a phase and could not be served
    stays due in the next. After a resume the phase is that in which the checkpoint was captured.

    Args:
        phases: Pairs of ``until`` and a trigger (or a list, any of); the last ``until`` is None. By step it is a number
            of optimizer steps, by epoch one of completed epochs, by time the training time of the run in seconds or as
            ``"2h"``.
        by: ``"step"``, ``"epoch"`` or ``"time"``.
        save_at_end: Whether the end of a phase is itself due.

    Raises:
        TypeError: A phase holds something else than a trigger.
        ValueError: There is no phase, one isn't a pair, they are out of order, the last has an end or another has none.

    >>> trigger = PhaseSchedule([(1000, EveryNTrainSteps(100)), (None, EveryNTrainSteps(1000))])
    >>> trigger.due(now=Progress(step=200), since=Progress(step=100))
    ('EveryNTrainSteps(n=100)',)
    >>> trigger.due(now=Progress(step=1900), since=Progress(step=1000))
    ()
    """

    # the tuple comes first for LightningCLI, which replaces the members of a nested list by what it makes of them
    phases: Sequence[tuple[int | float | str | None, Trigger | tuple[Trigger, ...] | list[Trigger]]]
    by: By = "step"
    save_at_end: bool = False

    def __post_init__(self) -> None:
        if self.by not in _BY:
            raise ValueError(f"by={shown(self.by)}: 'step', 'epoch' or 'time' was expected; write by='step'")
        if not isinstance(self.save_at_end, bool):
            raise ValueError(f"save_at_end={shown(self.save_at_end)}: True or False was expected")
        pairs = list(self.phases) if isinstance(self.phases, (list, tuple)) else []
        if not pairs or not all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs):
            raise ValueError(f"phases={shown(self.phases)}: pairs (until, trigger) were expected; {_PHASES_EXAMPLE}")
        phases = tuple((self._until(until, i == len(pairs) - 1), as_trigger(t)) for i, (until, t) in enumerate(pairs))
        object.__setattr__(self, "phases", phases)
        for earlier, later in zip(self._untils, self._untils[1:], strict=False):
            if later <= earlier:
                ends = [until for until, _ in phases]
                raise ValueError(f"phases={ends}: each phase must end later than the one before it; put them in order")
        for until, trigger in phases[:-1]:
            if self.by == "step" and isinstance(trigger, AtSteps) and trigger.steps[0] > cast(int, until):
                raise ValueError(f"phases={shown(trigger)}: never due, since its phase ends at step {until}; move it")

    def _until(self, until: object, is_last: bool) -> int | str | None:
        if is_last:
            if until is not None:
                raise ValueError(
                    f"phases={shown(until)}: the last phase has no end; write None, as in {_PHASES_EXAMPLE}"
                )
            return None
        if until is None:
            raise ValueError(f"phases=None: only the last phase has no end; write {_PHASES_EXAMPLE}")
        if self.by == "time":
            return duration("phases", until, "'2h'")
        return whole_number("phases", until, f"the end of a phase is a number of {self.by}s; write {_PHASES_EXAMPLE}")

    @functools.cached_property
    def _untils(self) -> tuple[float, ...]:
        ends = [until for until, _ in self.phases[:-1]]
        return tuple(_seconds(cast(str, until)) if self.by == "time" else cast(int, until) for until in ends)

    @functools.cached_property
    def _triggers(self) -> tuple[Trigger, ...]:
        return tuple(cast(Trigger, trigger) for _, trigger in self.phases)

    @functools.cached_property
    def _following(self) -> tuple[Trigger, ...]:
        return tuple(trigger for trigger in self._triggers if trigger.follows)

    @property
    def timed(self) -> bool:
        return self.by == "time" or any(trigger.timed for trigger in self._triggers)

    @property
    def monitors(self) -> tuple[tuple[str, Mode], ...]:
        return tuple(dict.fromkeys(pair for trigger in self._triggers for pair in trigger.monitors))

    @property
    def signals(self) -> tuple[str, ...]:
        return tuple(sorted({name for trigger in self._triggers for name in trigger.signals}))

    @property
    def adaptive(self) -> tuple[AdaptiveInterval, ...]:
        return tuple(dict.fromkeys(one for trigger in self._triggers for one in trigger.adaptive))

    @property
    def foreign(self) -> bool:
        return any(trigger.foreign for trigger in self._triggers)

    def phase(self, progress: Progress) -> int:
        """The index of the phase that begins with, or holds, this moment."""
        return bisect_right(self._untils, getattr(progress, _BY[self.by]))

    def due(self, now: Progress, since: Progress) -> tuple[str, ...]:
        phase = self.phase(now)
        if phase <= self.phase(since):
            return self._triggers[phase].due(now, since)
        reasons = tuple(reason for trigger, end, begin in self._parts(now, since) for reason in trigger.due(end, begin))
        if self.save_at_end:
            reasons = (repr(self), *reasons)
        return tuple(dict.fromkeys(reasons))

    def stops(self, now: Progress, since: Progress) -> bool:
        return any(trigger.stops(end, begin) for trigger, end, begin in self._parts(now, since))

    @property
    def follows(self) -> bool:
        return True

    def follow(self, now: Progress, since: Progress) -> Progress:
        for trigger in self._following:
            since = trigger.follow(now, since)
        ends = since.ends.get(self, {})
        ended = [phase for phase in range(self.phase(since), self.phase(now)) if phase not in ends]
        if not ended:
            return since
        # a metric is of the weights at that point alone
        end = replace(now, metrics={}, ends={})
        return replace(since, ends={**since.ends, self: {**ends, **dict.fromkeys(ended, end)}})

    def _parts(self, now: Progress, since: Progress) -> list[tuple[Trigger, Progress, Progress]]:
        """The triggers of the phases that were passed, each with the end and the beginning of its part."""
        first, last = self.phase(since), self.phase(now)
        if first >= last:
            return [(self._triggers[last], now, since)]
        # by their index: in a schedule within another one, `since` may have been moved on past some of them
        ends = since.ends.get(self, {})
        parts = []
        for phase in range(first, last + 1):
            trigger, end = self._triggers[phase], ends.get(phase, now) if phase < last else now
            parts.append((trigger, end, since))
            since = replace(
                since,
                step=max(since.step, end.step),
                epoch=max(since.epoch, end.epoch),
                validations=max(since.validations, end.validations),
            )
        return parts


@dataclass(frozen=True, repr=False)
class When(Trigger):
    """Due when a function of one's own, called as ``function(now, since)``, returns something true.

    A plain function beside ``|`` or ``&``, or in a list of triggers, becomes this. With several ranks each of them
    asks, about the same ``now`` and ``since``, and also about moments to come: the answer must depend on these alone.
    Where it doesn't, a rank that waits for the others says so and, shortly before the process group's timeout, fails.

    Raises:
        ValueError: ``function`` can't be called with two arguments, or is a class.

    >>> def loss_is_low(now, since):
    ...     return now.metrics.get("loss", 1.0) < 0.1
    >>> trigger = EveryNTrainSteps(100) & loss_is_low
    >>> len(trigger.due(now=Progress(step=100, metrics={"loss": 0.05}), since=Progress()))
    2
    """

    function: Condition

    def __post_init__(self) -> None:
        if not _is_condition(self.function):
            raise ValueError(
                f"function={shown(self.function)}: a function of (now, since) was expected; "
                "write When(lambda now, since: now.step > 100)"
            )
        try:
            inspect.signature(self.function).bind(Progress(), Progress())
        except TypeError as error:
            raise ValueError(
                f"function={shown(self.function)} can't be called with (now, since): {error}; "
                "write When(lambda now, since: now.step > 100)"
            ) from None
        except ValueError:
            pass  # it has no signature to look at

    @property
    def timed(self) -> bool:
        return True

    @property
    def foreign(self) -> bool:
        return True

    def due(self, now: Progress, since: Progress) -> tuple[str, ...]:
        return (repr(self),) if self.function(now, since) else ()

    def __repr__(self) -> str:
        # the repr goes into records: a name says more than an address, which changes with each process
        module, name = getattr(self.function, "__module__", None), getattr(self.function, "__qualname__", None)
        return f"When({module}.{name})" if module and name else f"When({self.function!r})"


# Composition


@dataclass(frozen=True, eq=False, repr=False)
class _TriggerGroup(Group[Trigger], Trigger):
    triggers: Sequence[Trigger | list[Trigger] | Condition]

    def __post_init__(self) -> None:
        object.__setattr__(self, "triggers", flattened(self, "triggers", self.triggers, as_trigger))

    @property
    def members(self) -> tuple[Trigger, ...]:
        return cast("tuple[Trigger, ...]", self.triggers)

    @property
    def timed(self) -> bool:
        return any(trigger.timed for trigger in self.members)

    @property
    def monitors(self) -> tuple[tuple[str, Mode], ...]:
        return tuple(dict.fromkeys(pair for trigger in self.members for pair in trigger.monitors))

    @property
    def signals(self) -> tuple[str, ...]:
        return tuple(sorted({name for trigger in self.members for name in trigger.signals}))

    @property
    def adaptive(self) -> tuple[AdaptiveInterval, ...]:
        return tuple(dict.fromkeys(one for trigger in self.members for one in trigger.adaptive))

    @property
    def foreign(self) -> bool:
        return any(trigger.foreign for trigger in self.members)

    def stops(self, now: Progress, since: Progress) -> bool:
        return any(trigger.stops(now, since) for trigger in self.members)

    @property
    def follows(self) -> bool:
        return any(trigger.follows for trigger in self.members)

    def follow(self, now: Progress, since: Progress) -> Progress:
        for trigger in self.members:
            since = trigger.follow(now, since)
        return since


class AnyOf(_TriggerGroup):
    """Due when any of ``triggers`` is; the same as ``a | b``. All of them are asked, and all reasons are given.

    Those that are due together make one save, whose record names them all; none is due again for it.

    Args:
        triggers: Triggers, functions, or lists of them (any of). A nested ``AnyOf`` is opened, repeats are dropped.

    Raises:
        TypeError: One of them is something else.
        ValueError: There is none.

    >>> AnyOf([EveryNTrainSteps(4), EveryNEpochs(1)])
    EveryNTrainSteps(n=4) | EveryNEpochs(n=1)
    """

    symbol: ClassVar[str] = "|"

    def due(self, now: Progress, since: Progress) -> tuple[str, ...]:
        reasons: tuple[str, ...] = ()
        for trigger in self.members:
            reasons += trigger.due(now, since)
        return tuple(dict.fromkeys(reasons)) if reasons else ()


class AllOf(_TriggerGroup):
    """Due when every one of ``triggers`` is; the same as ``a & b``. Then all reasons are given.

    Each member looks back to the last capture, so they need not come due at the same moment.

    Args:
        triggers: Triggers, functions, or lists of them (any of). A nested ``AllOf`` is opened, repeats are dropped.

    Raises:
        TypeError: One of them is something else.
        ValueError: There is none, or they can never be due together.

    >>> AllOf([EveryNTrainSteps(4), EveryNEpochs(1)]).due(now=Progress(step=9, epoch=0), since=Progress())
    ()
    >>> AllOf([EveryNTrainSteps(4), EveryNEpochs(1)]).due(now=Progress(step=10, epoch=1), since=Progress())
    ('EveryNTrainSteps(n=4)', 'EveryNEpochs(n=1)')
    """

    symbol: ClassVar[str] = "&"

    def __post_init__(self) -> None:
        super().__post_init__()
        watched = {(t.monitor, t.mode) for t in self.members if isinstance(t, OnImprovement)}
        for monitor, mode in sorted(watched):
            if mode == "max" and (monitor, "min") in watched:
                raise ValueError(
                    f"triggers={shown(self.members)}: {monitor!r} can't get both lower and higher; "
                    "leave one out, or join them with |"
                )

    def stops(self, now: Progress, since: Progress) -> bool:
        return bool(self.due(now, since)) and super().stops(now, since)

    def due(self, now: Progress, since: Progress) -> tuple[str, ...]:
        answers = [trigger.due(now, since) for trigger in self.members]  # all are asked: a function may keep state
        return tuple(dict.fromkeys(reason for answer in answers for reason in answer)) if all(answers) else ()


def as_trigger(value: object) -> Trigger:
    """``value`` as a trigger: a trigger itself, a function of ``(now, since)``, or a list of them (any of).

    Raises:
        TypeError: It is something else.
        ValueError: It is an empty list.

    >>> as_trigger([EveryNTrainSteps(4), [EveryNEpochs(1)]])
    EveryNTrainSteps(n=4) | EveryNEpochs(n=1)
    """
    if isinstance(value, Trigger):
        return value
    if isinstance(value, (list, tuple)):
        return AnyOf(value).simplest()
    if _is_condition(value):
        return When(cast(Condition, value))
    raise TypeError(
        f"trigger={shown(value)}: a trigger, a list of triggers or a function was expected; "
        "write for example EveryNTrainSteps(1000)"
    )


def _join(group: type[AnyOf] | type[AllOf], left: object, right: object) -> Trigger:
    return group([as_trigger(left), as_trigger(right)]).simplest()


def _is_condition(value: object) -> bool:
    # a class can be called too, but EveryNEpochs in place of EveryNEpochs() is a slip
    return callable(value) and not isinstance(value, type)


def _check_n(trigger: Trigger, n: object) -> None:
    fix = f"write {type(trigger).__name__}(1) or more, or leave this trigger out"
    object.__setattr__(trigger, "n", whole_number("n", n, fix))
