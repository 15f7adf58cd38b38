"""When to save: triggers, joined by ``|`` (whichever is due) and ``&`` (only when all are due).

A trigger is asked ``due(now, since)`` at every point where state can be captured. It compares the progress now with the
progress when state was last captured. It keeps no state of its own. So a trigger that can't be served at once, because
a save is in flight or the point isn't one where a resume is exact, is still due at the next point. Triggers that
are due together make one save, which has every reason in its record. After a resume ``since`` is where the checkpoint
was captured: no step fires twice, and an interval doesn't start afresh.

To add a trigger, write a frozen dataclass here that subclasses `Trigger`, checks its fields in ``__post_init__`` and
defines ``due`` (and ``timed`` if it asks the clock). There is nothing to register.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import ClassVar, TypeAlias, cast

from lightning_ckpt_policy._compose import Group, flattened, shown, whole_number, whole_numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far training has come at one moment.

    Attributes:
        step: Optimizer steps done (``trainer.global_step``).
        epoch: Epochs completed.
        validations: Validations completed during the fit.
        time: Seconds on a clock that only goes forward, with the same origin for ``now`` and ``since``.
        metrics: Metrics of the weights as they are now; one that is stale is left out.

    >>> Progress(step=10, epoch=1).time
    0.0
    """

    step: int = 0
    epoch: int = 0
    validations: int = 0
    time: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)


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
    reaching it, and a step that is repeated by accumulation is due once.

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

    Multiples count from the first epoch of the run.

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

    Only validations within a fit count, not the sanity check. Multiples count from the first of them.

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
class EveryInterval(Trigger):
    """Due when this much time has gone by since the last capture began.

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

    hours: float = 0
    minutes: float = 0
    seconds: float = 0

    def __post_init__(self) -> None:
        for f in fields(self):
            object.__setattr__(self, f.name, _duration(f.name, getattr(self, f.name)))
        if not 0 < self.total_seconds < math.inf:
            values = ", ".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self))
            raise ValueError(f"{values}: a finite interval above 0 was expected; write EveryInterval(minutes=30)")

    @property
    def total_seconds(self) -> float:
        """The length of the interval in seconds."""
        return self.hours * 3600 + self.minutes * 60 + self.seconds

    @property
    def timed(self) -> bool:
        return True

    def due(self, now: Progress, since: Progress) -> tuple[str, ...]:
        return (repr(self),) if now.time - since.time >= self.total_seconds else ()

    def __repr__(self) -> str:
        given = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name)]
        return f"EveryInterval({', '.join(f'{k}={int(v) if v.is_integer() else v}' for k, v in given)})"


@dataclass(frozen=True, repr=False)
class When(Trigger):
    """Due when a function of one's own, called as ``function(now, since)``, returns something true.

    A plain function beside ``|`` or ``&``, or in a list of triggers, becomes this. It may answer differently on each
    rank, so rank 0 is asked.

    Raises:
        ValueError: ``function`` can't be called, or is a class.

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

    @property
    def timed(self) -> bool:
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


class AnyOf(_TriggerGroup):
    """Due when any of ``triggers`` is; the same as ``a | b``. All of them are asked, and all reasons are given.

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
        ValueError: There is none.

    >>> AllOf([EveryNTrainSteps(4), EveryNEpochs(1)]).due(now=Progress(step=9, epoch=0), since=Progress())
    ()
    >>> AllOf([EveryNTrainSteps(4), EveryNEpochs(1)]).due(now=Progress(step=10, epoch=1), since=Progress())
    ('EveryNTrainSteps(n=4)', 'EveryNEpochs(n=1)')
    """

    symbol: ClassVar[str] = "&"

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


def _duration(name: str, value: object) -> float:
    try:
        number = float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
    except OverflowError:
        number = math.inf
    if not 0 <= number < math.inf:
        raise ValueError(
            f"{name}={shown(value)}: a finite number of at least 0 was expected; write EveryInterval({name}=30)"
        )
    return number
