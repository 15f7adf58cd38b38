from __future__ import annotations

import copy
import dataclasses
import functools
import math
import pickle
import signal
import timeit
from collections.abc import Iterable
from typing import Any

import jsonargparse
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_ckpt_policy import triggers
from lightning_ckpt_policy.interval import Measured, SaveCost
from lightning_ckpt_policy.triggers import (
    AdaptiveInterval,
    AfterValidation,
    AllOf,
    AnyOf,
    AtSteps,
    EveryInterval,
    EveryNEpochs,
    EveryNTrainSteps,
    OnImprovement,
    OnSignal,
    PhaseSchedule,
    Progress,
    Trigger,
    When,
    as_trigger,
)

STEPS, EPOCHS, HALF_HOUR = EveryNTrainSteps(4), EveryNEpochs(1), EveryInterval(minutes=30)
LOWER, HIGHER = OnImprovement("loss"), OnImprovement("acc", "max", 0.1)
TERM = OnSignal(stop=True)
PHASES = PhaseSchedule([(10, EveryNTrainSteps(4)), (None, EveryNTrainSteps(10))])
COST = Measured(cost=SaveCost(held=2.0), failures=2, uptime=7200.0)
NAN, INF = math.nan, math.inf


def always(now: Progress, since: Progress) -> bool:
    return True


class Never:
    def __call__(self, now: Progress, since: Progress) -> bool:
        return False


unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no failure


def paste(text: str) -> object:
    return eval(text, dict(vars(triggers)))


def saves(trigger: Trigger, points: Iterable[Progress]) -> dict[int, tuple[str, ...]]:
    """The step and the reasons of every save, where each point can be served at once."""
    made: dict[int, tuple[str, ...]] = {}
    since = Progress()
    for now in points:
        if reasons := trigger.due(now, since):
            assert now.step not in made
            made[now.step] = reasons
            since = now.captured(since)
        else:
            since = trigger.follow(now, since)
    return made


def batches(count: int, per_epoch: int, steps_each: int = 1) -> list[Progress]:
    return [Progress(step=b * steps_each, epoch=b // per_epoch, time=float(b)) for b in range(1, count + 1)]


# Each trigger by itself


@pytest.mark.parametrize(
    ("trigger", "since", "now", "due"),
    [
        (STEPS, {}, {"step": 3}, False),
        (STEPS, {}, {"step": 4}, True),
        (STEPS, {"step": 4}, {"step": 4}, False),
        (STEPS, {"step": 4}, {"step": 7}, False),
        (STEPS, {"step": 3}, {"step": 5}, True),
        (STEPS, {"step": 5}, {"step": 8}, True),
        (STEPS, {"step": 1}, {"step": 1000}, True),
        (EveryNEpochs(), {"step": 5}, {"step": 9}, False),
        (EveryNEpochs(), {}, {"epoch": 1}, True),
        (EveryNEpochs(3), {"epoch": 1}, {"epoch": 2}, False),
        (EveryNEpochs(3), {"epoch": 2}, {"epoch": 4}, True),
        (AfterValidation(), {}, {"epoch": 1}, False),
        (AfterValidation(), {"validations": 1}, {"validations": 2}, True),
        (AfterValidation(2), {"validations": 2}, {"validations": 3}, False),
        (AtSteps([5, 9]), {}, {"step": 4}, False),
        (AtSteps([5, 9]), {}, {"step": 5}, True),
        (AtSteps([5, 9]), {"step": 5}, {"step": 8}, False),
        (AtSteps([5, 9]), {"step": 6}, {"step": 20}, True),
        (AtSteps([5, 9]), {"step": 9}, {"step": 900}, False),
        (HALF_HOUR, {"time": 100.0}, {"time": 1899.9}, False),
        (HALF_HOUR, {"time": 100.0}, {"time": 1900.0}, True),
        (EveryInterval(hours=1, minutes=1, seconds=0.5), {}, {"time": 3660.4}, False),
        (EveryInterval(hours=1, minutes=1, seconds=0.5), {}, {"time": 3660.5}, True),
        (LOWER, {}, {"metrics": {"loss": 3.0}}, True),
        (LOWER, {}, {"metrics": {"loss": INF}}, True),
        (LOWER, {}, {"metrics": {"loss": NAN}}, False),
        (LOWER, {"lowest": {"loss": 2.0}}, {"metrics": {"loss": 2.0}}, False),
        (LOWER, {"lowest": {"loss": 2.0}}, {"metrics": {"loss": 1.9}}, True),
        (LOWER, {"lowest": {"loss": -INF}}, {"metrics": {"loss": -INF}}, False),
        (LOWER, {"lowest": {"loss": 2.0}}, {"metrics": {"acc": 1.0}}, False),
        (LOWER, {"lowest": {"loss": 2.0}}, {}, False),
        (HIGHER, {"highest": {"acc": 0.5}}, {"metrics": {"acc": 0.59}}, False),
        (HIGHER, {"highest": {"acc": 0.5}}, {"metrics": {"acc": 0.61}}, True),
        (TERM, {}, {}, False),
        (TERM, {}, {"signals": {"SIGTERM": 1}}, True),
        (TERM, {}, {"signals": {"SIGUSR1": 1}}, False),
        (TERM, {"signals": {"SIGTERM": 1}}, {"signals": {"SIGTERM": 1}}, False),
        (TERM, {"signals": {"SIGTERM": 1}}, {"signals": {"SIGTERM": 3}}, True),
        (AdaptiveInterval(), {}, {"time": 59.0}, False),
        (AdaptiveInterval(), {}, {"time": 60.0}, True),
        (AdaptiveInterval(), {}, {"time": 199.0, "measured": COST}, False),
        (AdaptiveInterval(), {}, {"time": 200.0, "measured": COST}, True),
        (When(always), {}, {}, True),
        (When(Never()), {}, {"step": 1}, False),
    ],
)
def test_due(trigger: Trigger, since: dict[str, Any], now: dict[str, Any], due: bool) -> None:
    assert trigger.due(Progress(**now), Progress(**since)) == ((repr(trigger),) if due else ())


@pytest.mark.parametrize(
    ("trigger", "text"),
    [
        (STEPS, "EveryNTrainSteps(n=4)"),
        (EPOCHS, "EveryNEpochs(n=1)"),
        (AfterValidation(), "AfterValidation(n=1)"),
        (AtSteps(iter([9, 5, 9])), "AtSteps(steps=(5, 9))"),
        (EveryInterval(hours=2.0, seconds=0.5), "EveryInterval(hours=2, seconds=0.5)"),
        (HALF_HOUR, "EveryInterval(minutes=30)"),
        (HIGHER, "OnImprovement(monitor='acc', mode='max', min_delta=0.1)"),
        (OnSignal([signal.SIGUSR1, "SIGTERM", "SIGUSR1"]), "OnSignal(signals=('SIGTERM', 'SIGUSR1'), stop=False)"),
        (OnSignal(signal.SIGTERM, stop=True), "OnSignal(signals=('SIGTERM',), stop=True)"),
        (
            AdaptiveInterval(mtbf=28800, min=90),
            "AdaptiveInterval(mtbf='8h', max_overhead=0.01, min='1m30s', max='6h')",
        ),
        (
            PhaseSchedule([[1000, [STEPS, EPOCHS]], (None, HALF_HOUR)]),  # type: ignore[list-item]
            "PhaseSchedule(phases=((1000, EveryNTrainSteps(n=4) | EveryNEpochs(n=1)), "
            "(None, EveryInterval(minutes=30))), by='step', save_at_end=False)",
        ),
        (
            PhaseSchedule([("120 min", EPOCHS), (86400.0, STEPS), (None, HALF_HOUR)], by="time", save_at_end=True),
            "PhaseSchedule(phases=(('2h', EveryNEpochs(n=1)), ('1d', EveryNTrainSteps(n=4)), "
            "(None, EveryInterval(minutes=30))), by='time', save_at_end=True)",
        ),
        (STEPS | EPOCHS, "EveryNTrainSteps(n=4) | EveryNEpochs(n=1)"),
        (STEPS & EPOCHS | HALF_HOUR, "EveryNTrainSteps(n=4) & EveryNEpochs(n=1) | EveryInterval(minutes=30)"),
        (STEPS & (EPOCHS | HALF_HOUR), "EveryNTrainSteps(n=4) & (EveryNEpochs(n=1) | EveryInterval(minutes=30))"),
        (AnyOf([STEPS]), "AnyOf([EveryNTrainSteps(n=4)])"),
        (AllOf([AnyOf([STEPS])]), "AllOf([AnyOf([EveryNTrainSteps(n=4)])])"),
        (AllOf([AnyOf([STEPS]), EPOCHS]), "AnyOf([EveryNTrainSteps(n=4)]) & EveryNEpochs(n=1)"),
    ],
)
def test_repr_can_be_pasted_back(trigger: Trigger, text: str) -> None:
    assert repr(trigger) == text
    assert paste(text) == trigger
    assert hash(paste(text)) == hash(trigger)
    assert pickle.loads(pickle.dumps(trigger)) == copy.deepcopy(trigger) == trigger


def test_numpy_integers_become_plain_ones() -> None:
    trigger = EveryNTrainSteps(np.int64(4)) | AtSteps(np.arange(10, 40, 10))
    assert repr(trigger) == "EveryNTrainSteps(n=4) | AtSteps(steps=(10, 20, 30))"


@pytest.mark.parametrize(
    "trigger", [STEPS, HALF_HOUR, STEPS | EPOCHS, When(always), LOWER, TERM, PHASES, AdaptiveInterval()]
)
def test_triggers_are_frozen(trigger: Any) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(trigger, dataclasses.fields(trigger)[0].name, 3)


@pytest.mark.parametrize(
    ("trigger", "timed"),
    [
        (STEPS, False),
        (AtSteps([1]), False),
        (HALF_HOUR, True),
        (When(always), True),
        (STEPS | EPOCHS, False),
        (STEPS & (EPOCHS | HALF_HOUR), True),
        (LOWER, True),
        (TERM, True),
        (AdaptiveInterval(), True),
        (PHASES, False),
        (PhaseSchedule([(None, HALF_HOUR)]), True),
        (PhaseSchedule([(60, STEPS), (None, EPOCHS)], by="time"), True),
    ],
)
def test_timed(trigger: Trigger, timed: bool) -> None:
    assert trigger.timed is timed


class Mine(Trigger):
    def due(self, now: Progress, since: Progress) -> tuple[str, ...]:
        return ()


@pytest.mark.parametrize("trigger", [When(always), Mine(), STEPS | always, PhaseSchedule([(5, STEPS), (None, Mine())])])
def test_code_of_the_users_own_is_told_from_this_packages(trigger: Trigger) -> None:
    assert trigger.foreign
    assert (trigger & STEPS).foreign
    assert not (STEPS | PHASES | HALF_HOUR).foreign


def test_monitors_and_signals_of_the_whole_tree() -> None:
    tree = STEPS | LOWER & TERM | PhaseSchedule([(5, HIGHER), (None, OnSignal("SIGUSR1"))])
    assert tree.monitors == (("loss", "min"), ("acc", "max"))
    assert tree.signals == ("SIGTERM", "SIGUSR1")
    assert STEPS.monitors == STEPS.signals == ()


# Improvement


def validations(*losses: float | None) -> list[Progress]:
    return [
        Progress(step=i, validations=i, metrics={} if loss is None else {"loss": loss})
        for i, loss in enumerate(losses, 1)
    ]


@pytest.mark.parametrize(
    ("trigger", "losses", "saved"),
    [
        (LOWER, (3.0, 2.0, 2.0, NAN, 2.5, None, 1.0), [1, 2, 7]),
        (LOWER, (NAN, INF, 5.0, -INF, -INF), [2, 3, 4]),
        (OnImprovement("loss", min_delta=0.5), (3.0, 2.6, 2.4, 2.0, 1.8), [1, 3, 5]),
        (OnImprovement("loss", "max"), (3.0, 2.0, 4.0, INF, INF), [1, 3, 4]),
        # what another trigger captured counts as well, also where it holds no metric
        (LOWER | AtSteps([2]), (3.0, 1.0, 2.0, 0.5), [1, 2, 4]),
        (LOWER | AtSteps([2, 3]), (3.0, None, 4.0, 2.0), [1, 2, 3, 4]),
        # nothing is captured before, so the third value is the first
        (LOWER & EveryNTrainSteps(3), (3.0, 2.0, 2.5, 1.0), [3]),
    ],
)
def test_improvement_over_what_was_captured(trigger: Trigger, losses: tuple[float], saved: list[int]) -> None:
    assert list(saves(trigger, validations(*losses))) == saved


def test_an_improvement_is_only_due_where_it_was_logged() -> None:
    logged, later, again = validations(1.0, None, 1.5)
    since = Progress(lowest={"loss": 2.0})
    assert LOWER.due(logged, since)
    assert not LOWER.due(later, since), "later weights aren't those that the metric was measured on"
    assert LOWER.due(again, since), "compared with what was captured, not with what was missed"


def test_the_best_so_far_outlives_a_resume() -> None:
    since = Progress(step=7, metrics={"loss": 1.0}, elapsed=5.0, time=30.0).captured(Progress(lowest={"loss": 3.0}))
    resumed = Progress(**since.to_state(), time=1000.0)
    assert resumed == dataclasses.replace(since, metrics={}, time=1000.0)
    assert not LOWER.due(Progress(step=8, metrics={"loss": 2.0}), resumed)


# Signals


def test_case_07_a_signal_is_due_once() -> None:
    trigger = OnSignal([signal.SIGUSR2])
    arrived = {"SIGUSR2": 1}
    points = [Progress(step=1), Progress(step=2, signals=arrived), Progress(step=3, signals=arrived)]
    assert saves(trigger | AtSteps([2]), points) == {2: (repr(trigger), "AtSteps(steps=(2,))")}


@pytest.mark.parametrize(
    ("trigger", "arrived", "stops"),
    [
        (TERM, {"SIGTERM": 1}, True),
        (OnSignal(), {"SIGTERM": 1}, False),
        (TERM | OnSignal("SIGUSR1"), {"SIGUSR1": 1}, False),
        (TERM | STEPS, {"SIGTERM": 1}, True),
        (TERM & STEPS, {"SIGTERM": 1}, False),
        (TERM & AtSteps([1]), {"SIGTERM": 1}, True),
        (PhaseSchedule([(None, TERM)]), {"SIGTERM": 1}, True),
        (PhaseSchedule([(1, TERM), (None, STEPS)]), {"SIGTERM": 1}, True),
        (STEPS, {"SIGTERM": 1}, False),
    ],
)
def test_stops(trigger: Trigger, arrived: dict[str, int], stops: bool) -> None:
    assert trigger.stops(Progress(step=1, signals=arrived), Progress()) is stops


# Phases


def points_of(count: int, per_epoch: int, validate_every: int = 10**9) -> list[Progress]:
    return [
        Progress(step=i, epoch=i // per_epoch, validations=i // validate_every, time=10.0 * i, elapsed=10.0 * i)
        for i in range(1, count + 1)
    ]


@pytest.mark.parametrize(
    ("trigger", "saved"),
    [
        (PHASES, [4, 8, 20, 30]),
        (PhaseSchedule([(10, EveryNTrainSteps(5)), (None, EveryNTrainSteps(15))]), [5, 10, 15, 30]),
        (
            PhaseSchedule([(10, EveryNTrainSteps(4)), (None, EveryNTrainSteps(10))], save_at_end=True),
            [4, 8, 10, 20, 30],
        ),
        # the first two epochs, each save counted from the beginning; the point where the second ends is still theirs
        (PhaseSchedule([(2, EveryNEpochs(1)), (None, EveryNEpochs(3))], by="epoch"), [7, 14, 21]),
        (PhaseSchedule([(1, AtSteps([1000])), (None, EveryNTrainSteps(5))], by="epoch"), [10, 15, 20, 25, 30]),
        (
            PhaseSchedule([("1m", EveryNTrainSteps(2)), (120.0, STEPS), (None, EPOCHS)], by="time"),
            [2, 4, 6, 8, 12, 14, 21, 28],
        ),
        # a validation before the phase began doesn't count in it, an interval goes on
        (PhaseSchedule([(10, AtSteps([1])), (None, AfterValidation(1))]), [1, 12, 18, 24, 30]),
        (PhaseSchedule([(10, EveryInterval(seconds=80)), (None, EveryInterval(seconds=110))]), [8, 19, 30]),
        # overdue by the new rule where it begins
        (PhaseSchedule([(10, EveryInterval(seconds=300)), (None, EveryInterval(seconds=20))]), list(range(10, 31, 2))),
        (
            PhaseSchedule(
                [(6, PhaseSchedule([(3, EveryNTrainSteps(1)), (None, AtSteps([5]))])), (None, AtSteps([30]))]
            ),
            [1, 2, 3, 5, 30],
        ),
        (PhaseSchedule([(None, EveryNTrainSteps(10))]), [10, 20, 30]),
    ],
)
def test_phases(trigger: Trigger, saved: list[int]) -> None:
    assert list(saves(trigger, points_of(30, per_epoch=7, validate_every=6))) == saved


def test_a_jump_over_the_end_of_a_phase_and_over_a_whole_one() -> None:
    made = saves(PHASES, batches(12, per_epoch=100, steps_each=3))
    assert list(made) == [6, 9, 12, 21, 30]
    assert made[12] == ("EveryNTrainSteps(n=4)",), "the point that ends a phase belongs to it"
    short = PhaseSchedule([(4, EveryNTrainSteps(2)), (5, EveryNTrainSteps(1)), (None, EveryNTrainSteps(100))])
    assert saves(short, batches(3, per_epoch=100, steps_each=9)) == {9: ("EveryNTrainSteps(n=2)",)}


@pytest.mark.parametrize(
    ("phases", "by", "until"),
    [
        ([(10, EveryNTrainSteps(5)), (None, AtSteps([1000]))], "step", 14),
        ([(2, EveryNEpochs(2)), (None, AtSteps([1000]))], "epoch", 29),
        ([("100s", EveryInterval(seconds=100)), (None, AtSteps([1000]))], "time", 29),
    ],
)
def test_what_was_due_in_a_phase_stays_due_in_the_next(phases: Any, by: Any, until: int) -> None:
    trigger = PhaseSchedule(phases, by)
    since = Progress(step=1) if by == "step" else Progress()
    for now in points_of(until, per_epoch=7):  # a save in flight: nothing can be captured
        since = trigger.follow(now, since)
    reasons = trigger.due(points_of(until + 1, per_epoch=7)[-1], since)
    assert reasons == (repr(phases[0][1]),)


def test_what_is_not_due_where_a_phase_ends_is_not_due_later_either() -> None:
    trigger = PhaseSchedule([(1, EveryNTrainSteps(9)), (None, AtSteps([1000]))], by="epoch")
    assert saves(trigger, points_of(30, per_epoch=7)) == {}
    trigger = PhaseSchedule([(5, OnImprovement("loss")), (None, AtSteps([1000]))])
    since = Progress(step=1)
    for now in [Progress(step=5, metrics={"loss": 1.0}), Progress(step=6)]:
        assert bool(trigger.due(now, since)) is (now.step == 5)
        since = trigger.follow(now, since)


def test_after_a_resume_the_phase_is_that_of_the_checkpoint() -> None:
    since = Progress(**Progress(step=25, elapsed=1.0).to_state(), time=0.0)
    assert not PHASES.due(Progress(step=29), since)
    assert PHASES.due(Progress(step=30), since)


# The adaptive interval


@pytest.mark.parametrize(
    ("trigger", "measured", "seconds", "why"),
    [
        (AdaptiveInterval(), None, 60.0, "every 60 s: min, until a save has been measured"),
        (AdaptiveInterval(min=5), Measured(), 5.0, "every 5 s: min, until a save has been measured"),
        (
            AdaptiveInterval(max_overhead=0.5),
            COST,
            120.0,
            "every 120 s: Young, a save costs 2 s, 1h between failures (2 in 2h)",
        ),
        (
            AdaptiveInterval(),
            COST,
            200.0,
            "every 200 s: Young, a save costs 2 s, 1h between failures (2 in 2h); bound by max_overhead=0.01",
        ),
        (
            AdaptiveInterval(max=100),
            COST,
            200.0,
            "every 200 s: Young, a save costs 2 s, 1h between failures (2 in 2h); bound by max_overhead=0.01",
        ),
        (
            AdaptiveInterval(mtbf="1h", max=100, max_overhead=0.5),
            COST,
            100.0,
            "every 100 s: Young, a save costs 2 s, 1h between failures (given); bound by max=1m40s",
        ),
        (
            AdaptiveInterval(mtbf=20, max_overhead=1),
            Measured(cost=SaveCost(held=1.0, slowdown=1.0)),
            60.0,
            "every 60 s: Daly, a save costs 2 s, 20s between failures (given); bound by min=1m",
        ),
        (
            AdaptiveInterval(),
            Measured(cost=SaveCost(held=0.0, confirm=500.0), uptime=3600.0),
            500.0,
            "every 500 s: Young, a save costs 0 s, 1d between failures (assumed, none in 1h); "
            "bound by the 500 s until a save is confirmed",
        ),
    ],
)
def test_adaptive_interval(trigger: AdaptiveInterval, measured: Measured | None, seconds: float, why: str) -> None:
    assert trigger.interval(measured) == pytest.approx(seconds)
    assert trigger.explain(measured) == why


@unhurried
@given(st.floats(0, 1e5), st.floats(0, 1e5), st.floats(0, 1e5), st.floats(1e-3, 1e8), st.floats(1e-4, 1))
def test_adaptive_interval_never_costs_more_than_allowed(
    held: float, slowdown: float, confirm: float, mtbf: float, max_overhead: float
) -> None:
    cost = SaveCost(held=held, slowdown=slowdown, confirm=confirm)
    trigger = AdaptiveInterval(mtbf=mtbf, max_overhead=max_overhead)
    seconds = trigger.interval(Measured(cost=cost))
    assert seconds >= max(confirm, 60.0)
    assert cost.overhead <= max_overhead * seconds * (1 + 1e-9)
    assert seconds <= max(confirm, cost.overhead / max_overhead, 6 * 3600)


# Composition


def test_any_gives_every_reason_once_and_in_order() -> None:
    both = AllOf([STEPS, EPOCHS])
    now = Progress(step=4, epoch=1)
    assert (EPOCHS | both | AtSteps([9])).due(now, Progress()) == (repr(EPOCHS), repr(STEPS))
    assert both.due(now, Progress()) == (repr(STEPS), repr(EPOCHS))


@pytest.mark.parametrize("group", [AnyOf, AllOf])
def test_every_member_is_asked(group: type[AnyOf | AllOf]) -> None:
    asked = []

    def note(answer: bool, now: Progress, since: Progress) -> bool:
        asked.append(answer)
        return answer

    group([functools.partial(note, answer) for answer in (True, False, True)]).due(Progress(), Progress())
    assert asked == [True, False, True]


def test_flattened_without_repeats() -> None:
    assert (STEPS | (EPOCHS | HALF_HOUR) | STEPS).triggers == (STEPS, EPOCHS, HALF_HOUR)  # type: ignore[attr-defined]
    assert AllOf([STEPS, [EPOCHS, HALF_HOUR]]) == STEPS & (EPOCHS | HALF_HOUR)
    assert AnyOf([STEPS, [EPOCHS, (HALF_HOUR,)]]) == STEPS | EPOCHS | HALF_HOUR
    assert (STEPS | EPOCHS) != (STEPS & EPOCHS)
    assert (STEPS | EPOCHS) != (STEPS | HALF_HOUR)
    assert (STEPS | EPOCHS) != "something else"


def test_plain_functions_on_either_side() -> None:
    assert always | STEPS == STEPS | always == AnyOf([STEPS, When(always)])
    assert always & STEPS == STEPS & always == AllOf([STEPS, always])
    assert (STEPS & always).due(Progress(step=4), Progress()) == (repr(STEPS), f"When({__name__}.always)")


def test_repr_of_a_function_has_no_address_where_it_has_a_name() -> None:
    assert repr(When(always)) == f"When({__name__}.always)"
    assert repr(When({}.get)).startswith("When(<built-in method get")  # type: ignore[arg-type]
    assert "Never object" in repr(When(Never()))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (STEPS, STEPS),
        ([STEPS], STEPS),
        ((STEPS, EPOCHS), STEPS | EPOCHS),
        ([STEPS, [EPOCHS, [HALF_HOUR]]], STEPS | EPOCHS | HALF_HOUR),
        (always, When(always)),
        ([always, STEPS], When(always) | STEPS),
    ],
)
def test_as_trigger(value: object, expected: Trigger) -> None:
    assert as_trigger(value) == expected


# Properties


leaves: st.SearchStrategy[Trigger] = st.one_of(
    st.integers(1, 7).map(EveryNTrainSteps),
    st.integers(1, 3).map(EveryNEpochs),
    st.integers(1, 3).map(AfterValidation),
    st.lists(st.integers(1, 40), min_size=1, max_size=4).map(AtSteps),
    st.floats(0.25, 50).map(lambda seconds: EveryInterval(seconds=seconds)),
    st.sampled_from([["SIGTERM"], ["SIGUSR1"], ["SIGTERM", "SIGUSR1"]]).map(OnSignal),
    st.floats(0.25, 50).map(lambda seconds: AdaptiveInterval(min=seconds)),
)


def phased(inner: st.SearchStrategy[Trigger]) -> st.SearchStrategy[Trigger]:
    ends = st.lists(st.integers(1, 40), max_size=2, unique=True).map(sorted)

    def build(ends: list[int]) -> st.SearchStrategy[Trigger]:
        triggers = st.tuples(*[inner] * (len(ends) + 1))
        phases = triggers.map(lambda made: list(zip([*ends, None], made, strict=True)))
        no_steps = phases.filter(lambda p: not any(isinstance(t, AtSteps) for _, t in p))
        return st.builds(PhaseSchedule, no_steps, st.sampled_from(["step", "epoch", "time"]), st.booleans())

    return ends.flatmap(build)


trees: st.SearchStrategy[Trigger] = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).flatmap(lambda t: st.sampled_from([AnyOf(t), AllOf(t)])), phased(inner)
    ),
)


@st.composite
def moments(draw: st.DrawFn) -> tuple[Progress, Progress]:
    """(now, since): since is never ahead of now."""
    pairs = [sorted((draw(st.integers(0, 40)), draw(st.integers(0, 40)))) for _ in range(6)]
    since, now = (
        Progress(
            step=s, epoch=e, validations=v, time=float(t), elapsed=float(t), signals={"SIGTERM": term, "SIGUSR1": usr1}
        )
        for s, e, v, t, term, usr1 in zip(*pairs, strict=True)
    )
    return now, since


@unhurried
@given(trees, trees, trees, moments())
def test_algebra(a: Trigger, b: Trigger, c: Trigger, moment: tuple[Progress, Progress]) -> None:
    assert a | b == b | a
    assert a & b == b & a
    assert (a | b) | c == a | (b | c)
    assert (a & b) & c == a & (b & c)
    assert hash(a | b) == hash(b | a)
    assert (a | b) | (b | a) == a | b
    for left, right in [(a | a, a), (a & a, a), (a & (b | c), (a & b) | (a & c)), (a | (a & b), a), (a & (a | b), a)]:
        assert bool(left.due(*moment)) == bool(right.due(*moment))
    assert bool((a | b).due(*moment)) == (bool(a.due(*moment)) or bool(b.due(*moment)))
    assert bool((a & b).due(*moment)) == (bool(a.due(*moment)) and bool(b.due(*moment)))
    assert set((a | b).due(*moment)) == {*a.due(*moment), *b.due(*moment)}
    assert len(set((a | b).due(*moment))) == len((a | b).due(*moment))


@unhurried
@given(trees)
def test_repr_of_any_tree_can_be_pasted_back(trigger: Trigger) -> None:
    assert paste(repr(trigger)) == trigger


@unhurried
@given(trees, moments(), st.integers(0, 20))
def test_due_stays_due_until_captured(trigger: Trigger, moment: tuple[Progress, Progress], more: int) -> None:
    now, since = moment
    later = dataclasses.replace(
        now,
        step=now.step + more,
        epoch=now.epoch + more,
        validations=now.validations + more,
        time=now.time + more,
        elapsed=now.elapsed + more,
    )
    if due := trigger.due(now, since):
        assert set(trigger.due(later, trigger.follow(now, since))) >= set(due)
    assert not trigger.due(now, now.captured(since))


@unhurried
@given(trees, st.lists(st.integers(0, 3), min_size=1, max_size=25), st.data())
def test_a_restart_at_any_save_changes_nothing(trigger: Trigger, jumps: list[int], data: st.DataObject) -> None:
    points, step = [], 0
    for i, jump in enumerate(jumps, 1):
        step += jump
        points.append(Progress(step=step, epoch=step // 7, validations=i // 3, time=float(i), elapsed=float(i)))

    def run(restarts: bool) -> list[int]:
        saved, since = [], Progress()
        for i, now in enumerate(points):
            if trigger.due(now, since):
                saved.append(i)
                since = now.captured(since)
                if restarts:
                    since = Progress(**since.to_state(), time=since.time)
            else:
                since = trigger.follow(now, since)
        return saved

    assert run(restarts=True) == run(restarts=False)


# Cases


def test_case_01_steps_or_epochs() -> None:
    made = saves(EveryNTrainSteps(4) | EveryNEpochs(1), batches(20, per_epoch=10))
    assert list(made) == [4, 8, 10, 12, 16, 20]
    assert made[10] == ("EveryNEpochs(n=1)",)
    assert made[20] == ("EveryNTrainSteps(n=4)", "EveryNEpochs(n=1)")


def test_case_02_interval_longer_than_an_epoch() -> None:
    assert list(saves(EveryNTrainSteps(25), batches(30, per_epoch=10))) == [25]


def test_case_03_every_ten_of_thirty() -> None:
    assert list(saves(EveryNTrainSteps(10), batches(30, per_epoch=30))) == [10, 20, 30]


def test_case_04_two_optimizers_jump_over_multiples() -> None:
    assert list(saves(EveryNTrainSteps(5), batches(10, per_epoch=10, steps_each=2))) == [6, 10, 16, 20]
    assert list(saves(AtSteps([5, 10, 15]), batches(10, per_epoch=10, steps_each=2))) == [6, 10, 16]


# Configuration


class Policy:
    def __init__(self, trigger: Trigger | list[Trigger]) -> None:
        self.trigger = as_trigger(trigger)


def of(name: str, **init_args: Any) -> dict[str, Any]:
    return {"class_path": f"lightning_ckpt_policy.triggers.{name}", "init_args": init_args}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # instantiate_classes: the old name works with every version
@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (of("EveryNTrainSteps", n=4), STEPS),
        ({"class_path": "lightning_ckpt_policy.triggers.EveryNEpochs"}, EPOCHS),
        ([of("EveryNTrainSteps", n=4), of("EveryInterval", minutes=30)], STEPS | HALF_HOUR),
        (of("EveryInterval", hours=0.5, seconds=1), EveryInterval(hours=0.5, seconds=1)),
        (
            of("AllOf", triggers=[of("AtSteps", steps=[9, 5]), of("AnyOf", triggers=[of("EveryNEpochs", n=1)])]),
            AllOf([AtSteps([5, 9]), AnyOf([EPOCHS])]),
        ),
        (
            of("AllOf", triggers=[of("AfterValidation", n=2), [of("EveryNEpochs"), of("EveryInterval", minutes=30)]]),
            AfterValidation(2) & (EPOCHS | HALF_HOUR),
        ),
        ([of("AllOf", triggers=[of("EveryNTrainSteps", n=4), of("EveryNEpochs")])], AllOf([STEPS, EPOCHS])),
        (of("OnImprovement", monitor="val/loss", min_delta=0.01), OnImprovement("val/loss", "min", 0.01)),
        (of("OnSignal"), OnSignal()),
        (of("OnSignal", signals="SIGUSR1"), OnSignal("SIGUSR1")),
        (of("OnSignal", signals=["SIGTERM", "SIGUSR1"], stop=True), OnSignal(["SIGTERM", "SIGUSR1"], stop=True)),
        (of("AdaptiveInterval"), AdaptiveInterval()),
        (
            of("AdaptiveInterval", mtbf="8h", min=30, max="2h", max_overhead=0.02),
            AdaptiveInterval("8h", 0.02, 30, "2h"),
        ),
        (
            of("PhaseSchedule", phases=[[10, of("EveryNTrainSteps", n=4)], [None, of("EveryNTrainSteps", n=10)]]),
            PHASES,
        ),
        (
            of(
                "PhaseSchedule",
                phases=[
                    ["2h", [of("EveryNTrainSteps", n=4), of("EveryNEpochs")]],
                    [None, of("EveryInterval", minutes=30)],
                ],
                by="time",
                save_at_end=True,
            ),
            PhaseSchedule([("2h", STEPS | EPOCHS), (None, HALF_HOUR)], by="time", save_at_end=True),
        ),
    ],
)
def test_class_path_and_init_args(config: object, expected: Trigger) -> None:
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Policy, "policy")
    parsed = parser.parse_object({"policy": {"trigger": config}})
    shown = parser.dump(parsed)
    again = parser.parse_string(shown)
    for one in (parsed, again):
        made = parser.instantiate_classes(one).policy.trigger
        assert made == expected
        assert repr(made) == repr(expected)
    # making the objects leaves the configuration as it was: LightningCLI writes it out afterwards
    assert parser.dump(parsed) == parser.dump(again) == shown


# Bad input


@pytest.mark.parametrize("bad", [0, -1, True, 2.0, math.nan, "4", None], ids=repr)
@pytest.mark.parametrize("kind", [EveryNTrainSteps, EveryNEpochs, AfterValidation])
def test_bad_n(kind: Any, bad: object) -> None:
    with pytest.raises(ValueError) as caught:
        kind(bad)
    assert str(caught.value) == (
        f"n={bad!r}: an integer of at least 1 was expected; write {kind.__name__}(1) or more, or leave this trigger out"
    )


@pytest.mark.parametrize(
    ("bad", "parts"),
    [
        ([], ("steps=[]:", "at least one step", "AtSteps([100, 300])")),
        (100, ("steps=100:", "at least one step", "AtSteps([100, 300])")),
        ("100", ("steps='100':", "AtSteps([100, 300])")),
        ([100, 0], ("steps=0:", "at least 1", "AtSteps([100, 300])")),
        ([True], ("steps=True:", "at least 1")),
        ([1e4], ("steps=10000.0:", "an integer")),
    ],
)
def test_bad_steps(bad: Any, parts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as caught:
        AtSteps(bad)
    assert all(part in str(caught.value) for part in parts)


@pytest.mark.parametrize(
    ("bad", "start"),
    [
        ({}, "hours=0.0, minutes=0.0, seconds=0.0: a finite interval above 0 was expected; write EveryInterval("),
        ({"minutes": -1, "hours": 5}, "minutes=-1: a finite number of at least 0 was expected; write EveryInterval("),
        ({"seconds": math.nan}, "seconds=nan: a finite number"),
        ({"seconds": math.inf}, "seconds=inf: a finite number"),
        ({"hours": True}, "hours=True: a finite number"),
        ({"hours": "1h"}, "hours='1h': a finite number"),
        ({"hours": 10**400}, "hours=1000"),
        ({"seconds": 1e-310}, "hours=0.0, minutes=0.0, seconds=1e-310: a finite interval of at least 1e-06 s was exp"),
        ({"hours": 1e308}, "hours=1e+308, minutes=0.0, seconds=0.0: a finite interval"),
    ],
)
def test_bad_interval(bad: dict[str, Any], start: str) -> None:
    with pytest.raises(ValueError) as caught:
        EveryInterval(**bad)
    assert str(caught.value).startswith(start)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("make", "start"),
    [
        (lambda: OnImprovement(""), "monitor='': the name of a logged metric was expected; write OnImprovement("),
        (lambda: OnImprovement("loss", "low"), "mode='low': 'min' or 'max' was expected"),
        (lambda: OnImprovement("loss", min_delta=-1), "min_delta=-1: a finite number of at least 0 was expected"),
        (lambda: OnImprovement("loss", min_delta=NAN), "min_delta=nan: a finite number"),
        (lambda: When(lambda now: True), "function=<function"),
        (lambda: OnSignal([]), "signals=[]: at least one signal was expected; write OnSignal(['SIGTERM'])"),
        (lambda: OnSignal(15), "signals=15: at least one signal was expected"),
        (lambda: OnSignal([15]), "signals=15: the name of a signal was expected"),
        (lambda: OnSignal(["SIGBREAK"]), "signals='SIGBREAK': this platform has no such signal; write OnSignal(["),
        (lambda: OnSignal(["TERM"]), "signals='TERM': this platform has no such signal"),
        (lambda: OnSignal(["SIGTERM", "SIGKILL"]), "signals='SIGKILL': no process can catch it; write OnSignal("),
        (lambda: OnSignal([signal.SIGSTOP]), "signals='SIGSTOP': no process can catch it"),
        (lambda: OnSignal("SIGSEGV"), "signals='SIGSEGV': the process can't go on after it"),
        (
            lambda: OnSignal("SIGCLD"),
            "signals='SIGCHLD': it comes whenever a child ends, such as a loader worker; write",
        ),
        (lambda: OnSignal("SIGPIPE"), "signals='SIGPIPE': it comes with ordinary input and output"),
        (lambda: OnSignal(signal.SIGCONT), "signals='SIGCONT': it comes whenever a stopped process goes on"),
        (lambda: OnSignal("SIGALRM"), "signals='SIGALRM': it belongs to who sets a timer"),
        (lambda: OnSignal(stop=1), "stop=1: True or False was expected"),
        (
            lambda: AdaptiveInterval(mtbf=0),
            "mtbf=0: a length of time above 0 was expected, in seconds (5400), with",
        ),
        (lambda: AdaptiveInterval(min="0"), "min='0': a length of time above 0 was expected"),
        (lambda: AdaptiveInterval(min=-1), "min=-1: a length of time"),
        (lambda: AdaptiveInterval(max="1 fortnight"), "max='1 fortnight': a length of time"),
        (lambda: AdaptiveInterval(max=True), "max=True: a length of time"),
        (lambda: AdaptiveInterval(max=INF), "max=inf: a length of time"),
        (lambda: AdaptiveInterval(mtbf=10**400), "mtbf=1000"),
        (lambda: AdaptiveInterval(min="2h", max="1h"), "min='2h' is above max='1h'; swap them"),
        (
            lambda: AdaptiveInterval(max_overhead=0),
            "max_overhead=0: a share above 0 and at most 1 was expected; write 0.01",
        ),
        (lambda: AdaptiveInterval(max_overhead=5), "max_overhead=5: a share"),
        (lambda: PhaseSchedule([]), "phases=[]: pairs (until, trigger) were expected; PhaseSchedule([("),
        (lambda: PhaseSchedule([STEPS]), "phases=[EveryNTrainSteps(n=4)]: pairs (until, trigger) were expected"),
        (lambda: PhaseSchedule(STEPS), "phases=EveryNTrainSteps(n=4): pairs"),
        (
            lambda: PhaseSchedule([(10, STEPS)]),
            "phases=10: the last phase has no end; write None, as in PhaseSchedule([",
        ),
        (lambda: PhaseSchedule([(None, STEPS), (None, EPOCHS)]), "phases=None: only the last phase has no end; write"),
        (
            lambda: PhaseSchedule([(20, STEPS), (10, EPOCHS), (None, STEPS)]),
            "phases=[20, 10, None]: each phase must end later than the one before it; put them in order",
        ),
        (
            lambda: PhaseSchedule([("2h", STEPS), ("120m", EPOCHS), (None, STEPS)], "time"),
            "phases=['2h', '2h', None]: each",
        ),
        (
            lambda: PhaseSchedule([("2h", STEPS), (None, EPOCHS)]),
            "phases='2h': an integer of at least 1 was expected; the",
        ),
        (
            lambda: PhaseSchedule([(0, STEPS), (None, EPOCHS)]),
            "phases=0: an integer of at least 1 was expected; the end of",
        ),
        (
            lambda: PhaseSchedule([(0, STEPS), (None, EPOCHS)], "time"),
            "phases=0: a length of time above 0 was expected",
        ),
        (
            lambda: PhaseSchedule([(None, STEPS)], "batch"),
            "by='batch': 'step', 'epoch' or 'time' was expected; write by=",
        ),
        (lambda: PhaseSchedule([(None, STEPS)], save_at_end=1), "save_at_end=1: True or False was expected"),
        (
            lambda: PhaseSchedule([(100, AtSteps([500])), (None, STEPS)]),
            "phases=AtSteps(steps=(500,)): never due, since its phase ends at step 100; move it",
        ),
        (
            lambda: OnImprovement("loss") & STEPS & OnImprovement("loss", "max"),
            "triggers=(OnImprovement(monitor='loss', mode='min', min_delta=0.0), EveryNTrainSteps(n=4), OnImprovement(",
        ),
    ],
)
def test_bad_values_of_the_other_triggers(make: Any, start: str) -> None:
    with pytest.raises(ValueError) as caught:
        make()
    assert str(caught.value).startswith(start)
    assert len(str(caught.value)) < 900


def test_a_phase_without_a_trigger() -> None:
    with pytest.raises(TypeError, match=r"^trigger=5: a trigger, a list of triggers"):
        PhaseSchedule([(None, 5)])  # type: ignore[list-item]


@pytest.mark.parametrize("bad", [3, None, EveryNEpochs])
def test_bad_function(bad: Any) -> None:
    with pytest.raises(ValueError) as caught:
        When(bad)
    assert str(caught.value).startswith(f"function={bad!r}: a function of (now, since) was expected; write When(")


@pytest.mark.parametrize("group", [AnyOf, AllOf])
def test_bad_groups(group: Any) -> None:
    with pytest.raises(ValueError) as empty:
        group([])
    assert str(empty.value) == f"triggers=[]: {group.__name__} needs at least one; put one in the list"
    with pytest.raises(TypeError) as alone:
        group(STEPS)
    assert str(alone.value).startswith("triggers=EveryNTrainSteps(n=4): ")
    assert f"write {group.__name__}([a, b])" in str(alone.value)
    with pytest.raises(TypeError, match=r"^trigger=5: "):
        group([STEPS, 5])


@pytest.mark.parametrize("bad", [None, 5, "EveryNEpochs", {"class_path": "x"}, EveryNEpochs, {STEPS}])
def test_bad_trigger(bad: Any) -> None:
    with pytest.raises(TypeError) as caught:
        as_trigger(bad)
    message = str(caught.value)
    assert message.startswith(f"trigger={bad!r}: a trigger, a list of triggers or a function was expected; ")
    assert message.endswith("write for example EveryNTrainSteps(1000)")
    for compose in (lambda: STEPS | bad, lambda: bad | STEPS, lambda: STEPS & bad, lambda: bad & STEPS):
        with pytest.raises(TypeError) as composed:
            compose()
        assert str(composed.value) == message


def test_empty_list_is_no_trigger() -> None:
    with pytest.raises(ValueError, match=r"^triggers=\[\]: AnyOf needs at least one"):
        as_trigger([])


# Speed


def test_due_is_quick_enough_for_every_batch() -> None:
    late = AdaptiveInterval() | OnSignal() | LOWER
    trigger = (EveryNTrainSteps(1000) | EveryInterval(minutes=30) | AtSteps(range(1000, 1_000_000, 1000))) & EPOCHS
    trigger |= PhaseSchedule([(100, STEPS), (None, late)])
    now, since = Progress(step=700, time=10.0, measured=COST), Progress(step=100)
    best = min(timeit.repeat(lambda: trigger.due(now, since), number=1000, repeat=5)) / 1000
    assert best < 50e-6, f"{best * 1e6:.1f} µs"  # about 2 µs on an idle core


def test_a_schedule_within_another_one_loses_no_phase() -> None:
    """The outer one moves ``since`` on past phases of the inner one."""
    tail = [(5, OnSignal("SIGTERM", stop=True)), (None, EveryNTrainSteps(50))]
    inner = PhaseSchedule([(2, EveryNTrainSteps(50)), *tail])
    answers = []
    for schedule in (
        PhaseSchedule([(3, EveryNTrainSteps(50)), (None, inner)]),
        PhaseSchedule([(3, EveryNTrainSteps(50)), *tail]),
    ):
        since, told = Progress(step=1), []
        for step in range(2, 8):
            now = Progress(step=step, signals={"SIGTERM": 1} if step >= 5 else {})
            told.append((schedule.due(now, since), schedule.stops(now, since)))
            since = schedule.follow(now, since)
        answers.append(told)
    assert answers[0] == answers[1]
    assert [stops for _, stops in answers[0]] == [False] * 3 + [True] * 3
