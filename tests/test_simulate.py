"""The simulator against hand-made figures, against one that goes step by step, and the adaptive interval within it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ckpt_policy.interval import Measured
from lightning_ckpt_policy.retention import KeepAll, KeepBest, KeepLast, KeepUnder, plan
from lightning_ckpt_policy.simulate import DAY, Job, Outcome, price, simulate, wasted_shares
from lightning_ckpt_policy.triggers import (
    AdaptiveInterval,
    AfterValidation,
    EveryInterval,
    EveryNEpochs,
    EveryNTrainSteps,
    OnImprovement,
    PhaseSchedule,
    Progress,
    Trigger,
)
from tests.test_retention import unions
from tests.test_triggers import trees, unhurried

JOB = Job(step_seconds=1.0, checkpoint_bytes=100, held_seconds=2.0, confirm_seconds=5.0)


def some(job: Job, count: int, seed: int = 0) -> list[float]:
    return list(itertools.islice(job.uptimes(seed), count))


def steps(outcome: Outcome) -> list[int]:
    return [record.step for record in outcome.records]


# By hand


def test_without_failures() -> None:
    outcome = simulate(JOB, EveryNTrainSteps(10), KeepAll(), duration=46.0)
    # 10 steps, 2 s, 10 steps, 2 s, 10 steps, 2 s, 10 steps at 46 s: the fourth save begins as the time is over
    assert outcome == Outcome(
        wall_seconds=46.0,
        kept_seconds=40.0,
        held_seconds=6.0,
        lost_seconds=0.0,
        restart_seconds=0.0,
        failures=0,
        steps=40,
        saves=3,
        peak_bytes=400,
        mean_bytes=(100 * 12 + 200 * 12 + 300 * 12) / 46,
        records=outcome.records,
    )
    assert steps(outcome) == [10, 20, 30]
    assert [record.created_at for record in outcome.records] == [10.0, 22.0, 34.0]
    assert outcome.saves_per_day == 3 * DAY / 46
    assert outcome.wasted_share == pytest.approx(6 / 46)
    assert outcome.lost_per_failure == 0.0


def test_with_failures() -> None:
    job = replace(JOB, restart_seconds=7.0)
    outcome = simulate(job, EveryNTrainSteps(10), KeepLast(1), uptimes=[26.5, 14.5, 6.0])
    # 1: saves at 10 and 22 s (step 20), which is confirmed at 27 s: too late for the failure at 26.5 s, 22 steps done
    # 2: 10 steps on from step 10 again, saved at 43.5 s, confirmed at 48.5 s, just after the failure at 48 s
    # 3: 6 steps from step 10
    assert outcome.failures == 3
    assert outcome.steps == 10
    assert outcome.saves == 1
    assert outcome.held_seconds == 2 + 2 + 2
    assert outcome.lost_seconds == pytest.approx((10 + 2.5) + (10 + 2.5) + 6)
    assert outcome.restart_seconds == 21.0
    assert outcome.wall_seconds == 26.5 + 14.5 + 6 + 21
    assert outcome.kept_seconds == pytest.approx(10.0)
    assert outcome.lost_per_failure == pytest.approx(31 / 3)
    assert outcome.peak_bytes == 200


def test_a_save_waits_for_the_one_before() -> None:
    job = replace(JOB, confirm_seconds=25.0)
    outcome = simulate(job, EveryNTrainSteps(10), KeepAll(), duration=100.0)
    assert steps(outcome) == [10, 33, 56], "the first point after the one before is confirmed"


def test_an_interval_goes_on_over_a_restart() -> None:
    job = replace(JOB, restart_seconds=100.0)
    outcome = simulate(job, EveryInterval(seconds=50), KeepAll(), uptimes=[60.0, 30.0])
    assert steps(outcome) == [50, 51], "at once, since the checkpoint is older than the interval"


def test_validations_epochs_and_metrics() -> None:
    job = replace(JOB, held_seconds=0.0, confirm_seconds=0.0, epoch_steps=6, validation_steps=4)
    trigger = OnImprovement("loss") | EveryNEpochs(2)
    losses = {4: 3.0, 8: 2.0, 12: 5.0, 16: 2.5, 20: 1.0}
    outcome = simulate(job, trigger, KeepBest(2, "loss"), duration=22.0, metrics=lambda step: {"loss": losses[step]})
    assert [(record.step, dict(record.metrics)) for record in outcome.records] == [
        (8, {"loss": 2.0}),
        (20, {"loss": 1.0}),
    ]
    assert outcome.saves == 4
    assert steps(simulate(job, AfterValidation(2) & EveryNEpochs(2), KeepAll(), duration=50.0)) == [12, 24, 36, 48]


def test_what_a_save_measured_is_known_to_the_next() -> None:
    outcome = simulate(JOB, AdaptiveInterval(mtbf=400, min=10, max_overhead=1), KeepAll(), duration=130.0)
    # the first after min, then every sqrt(2 * 2 * 400) = 40 s, as Daly has it 40.7 s
    assert [record.created_at for record in outcome.records] == [10.0, 51.0, 92.0]


def test_a_year_is_simulated_in_seconds() -> None:
    job = replace(JOB, mtbf_seconds=5 * DAY, restart_seconds=600.0)
    outcome = simulate(job, EveryInterval(hours=1), KeepLast(2), duration=365 * DAY)
    assert outcome.saves_per_day == pytest.approx(24, rel=0.02)
    assert outcome.failures == pytest.approx(73, abs=20)
    assert outcome.lost_per_failure == pytest.approx(1800, rel=0.2)


def test_price() -> None:
    outcome = simulate(JOB, EveryNTrainSteps(10), KeepLast(1), duration=3600.0)
    cost = price(outcome, per_compute_hour=30.0, per_gb_month=0.02)
    assert cost.wasted == pytest.approx(30.0 * outcome.wasted_share)
    assert cost.storage == pytest.approx(outcome.mean_bytes / 1e9 * 0.02 / 730)
    assert cost.total == cost.wasted + cost.storage


# Against a simulation that goes step by step


def step_by_step(
    job: Job, trigger: Trigger, uptimes: Sequence[float], metrics: Callable[[int], dict[str, float]]
) -> list[tuple[int, float]]:
    """The step and the moment of each confirmed save."""
    made: list[tuple[int, float]] = []
    wall = uptime_before = 0.0
    confirmed: Progress | None = None
    since = now = Progress()
    measured = Measured()
    for failures, uptime in enumerate(uptimes):
        began, stop, writing = wall, wall + uptime, None
        measured = replace(measured, failures=failures, uptime=uptime_before)
        while True:
            going_on = wall + job.step_seconds <= stop + 1e-9
            until = wall + job.step_seconds if going_on else stop
            if writing is not None and writing.time + job.cost.confirm <= until + 1e-9:
                confirmed, at = writing, writing.time + job.cost.confirm
                made.append((confirmed.step, confirmed.time))
                measured = Measured(cost=job.cost, failures=failures, uptime=uptime_before + at - began)
                writing = None
            if not going_on:
                break
            wall = until
            step = now.step + 1
            validated = job.validation_steps is not None and step % job.validation_steps == 0
            now = Progress(
                step=step,
                epoch=now.epoch + (job.epoch_steps is not None and step % job.epoch_steps == 0),
                validations=now.validations + validated,
                time=wall,
                elapsed=now.elapsed + job.step_seconds,
                metrics=metrics(step) if validated else {},
                measured=measured,
            )
            if writing is None and trigger.due(now, since):
                since = writing = now.captured(since)
                cost = min(job.cost.overhead, stop - wall)
                wall += cost
                now = replace(now, elapsed=now.elapsed + cost)
            else:
                since = trigger.follow(now, since)
        uptime_before += uptime
        wall = stop + job.restart_seconds
        begin = confirmed or Progress()
        now = since = Progress(**begin.to_state(), time=wall if confirmed is None else begin.time)
    return made


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    small = st.sampled_from([0.0, 0.5, 1.0, 2.5, 7.0])
    every = st.none() | st.integers(1, 9)
    return Job(
        step_seconds=draw(st.sampled_from([0.5, 1.0, 3.0])),
        checkpoint_bytes=1,
        held_seconds=draw(small),
        slowdown_seconds=draw(small),
        confirm_seconds=draw(small),
        restart_seconds=draw(small),
        epoch_steps=draw(every),
        validation_steps=draw(every),
    )


@unhurried
@given(jobs(), trees | st.just(OnImprovement("loss")), st.lists(st.integers(1, 120).map(lambda n: n / 2), max_size=4))
def test_the_same_as_step_by_step(job: Job, trigger: Trigger, uptimes: list[float]) -> None:
    def metrics(step: int) -> dict[str, float]:
        return {"loss": float(step * 7 % 11)}

    outcome = simulate(job, trigger, KeepAll(), uptimes=uptimes, metrics=metrics)
    expected = step_by_step(job, trigger, uptimes, metrics)
    assert [(record.step, record.created_at) for record in outcome.records] == expected
    assert outcome.kept_seconds == pytest.approx(outcome.steps * job.step_seconds, abs=1e-6)
    assert outcome.wall_seconds == pytest.approx(sum(uptimes) + len(uptimes) * job.restart_seconds)


@unhurried
@given(jobs(), unions, st.lists(st.integers(1, 120), max_size=4))
def test_a_replay_of_the_records_of_a_run_leads_to_the_same_store(job: Job, rule: Any, uptimes: list[float]) -> None:
    trigger = EveryNTrainSteps(3) | EveryInterval(seconds=5)
    everything = simulate(job, trigger, KeepAll(), uptimes=uptimes)
    online = simulate(job, trigger, rule, uptimes=uptimes)
    assert online.saves == everything.saves
    if everything.records:
        now = everything.records[-1].created_at + job.cost.confirm  # the last confirmation
        gone = plan(rule, everything.records, now=now)
        assert online.records == tuple(record for record in everything.records if record not in gone)
    assert online.peak_bytes <= everything.peak_bytes


def test_a_budget_bounds_the_store() -> None:
    outcome = simulate(JOB, EveryNTrainSteps(10), KeepUnder(350, of=KeepAll()), duration=1000.0)
    assert outcome.peak_bytes == 400, "one above it at times, until the new one is confirmed"
    assert len(outcome.records) == 3


# Fixed intervals, and the adaptive one


def test_wasted_shares_by_hand() -> None:
    # 100 s up: saves at 30, 60 and 90 s, of which the last is lost with what came after 60 s; 2 of those 60 s held it
    job = Job(step_seconds=1.0, checkpoint_bytes=1, held_seconds=2.0, confirm_seconds=20.0)
    assert wasted_shares(job, [30.0, 200.0], [100.0]) == [pytest.approx(1 - 58 / 100), 1.0]


@pytest.mark.parametrize("interval", [20.0, 75.0, 400.0])
def test_wasted_shares_agree_with_the_simulation(interval: float) -> None:
    job = Job(
        step_seconds=0.01,
        checkpoint_bytes=1,
        held_seconds=2.0,
        slowdown_seconds=1.0,
        confirm_seconds=15.0,
        mtbf_seconds=1000.0,
        restart_seconds=60.0,
    )
    uptimes = some(job, 300)
    outcome = simulate(job, EveryInterval(seconds=interval), KeepLast(1), uptimes=uptimes)
    assert wasted_shares(job, [interval], uptimes) == [pytest.approx(outcome.wasted_share, rel=2e-3)]


def job_of(ratio: float, **values: float) -> Job:
    return Job(
        **{"step_seconds": 0.2, "checkpoint_bytes": 1, "held_seconds": 10.0, "mtbf_seconds": 10.0 * ratio, **values}
    )


def best_share(job: Job, uptimes: list[float], around: float) -> float:
    """The least wasted share that any fixed interval has, by search."""
    return min(wasted_shares(job, list(np.geomspace(around / 30, around * 30, 1001)), uptimes))


@pytest.mark.parametrize("ratio", [10, 30, 100, 300, 1_000, 3_000, 10_000])
@pytest.mark.parametrize("confirm", [0.0, 12.0])
def test_the_adaptive_interval_wastes_hardly_more_than_the_best_fixed_one(ratio: float, confirm: float) -> None:
    job = job_of(ratio, slowdown_seconds=confirm / 6, confirm_seconds=confirm)
    uptimes = some(job, 10_000)
    trigger = AdaptiveInterval(mtbf=job.mtbf_seconds, max_overhead=1.0, min=0.1, max=1e9)
    interval = trigger.interval(Measured(cost=job.cost))
    adaptive, half, twice = wasted_shares(job, [interval, interval / 2, interval * 2], uptimes)
    assert adaptive <= 1.05 * best_share(job, uptimes, interval)
    assert adaptive < min(half, twice), "a wrong interval would be seen"


@pytest.mark.parametrize("given", [True, False], ids=["given", "learned"])
@pytest.mark.parametrize(("ratio", "failures"), [(10, 10_000), (1_000, 500)])
def test_the_adaptive_interval_within_the_simulation(ratio: float, failures: int, given: bool) -> None:
    job = job_of(ratio)
    uptimes = some(job, failures)
    trigger = AdaptiveInterval(mtbf=job.mtbf_seconds if given else None, max_overhead=1.0, min=0.1, max=1e9)
    outcome = simulate(job, trigger, KeepLast(1), uptimes=uptimes)
    assert outcome.failures == failures
    assert outcome.wasted_share <= 1.05 * best_share(job, uptimes, trigger.interval(Measured(cost=job.cost)))


# Bad input


@pytest.mark.parametrize(
    ("values", "start"),
    [
        ({"step_seconds": 0}, "step_seconds=0: a number above 0 was expected"),
        ({"checkpoint_bytes": -1}, "checkpoint_bytes=-1: a number above 0 was expected"),
        ({"held_seconds": math.nan}, "held_seconds=nan: a number of at least 0 was expected"),
        ({"confirm_seconds": "2s"}, "confirm_seconds='2s': a number of at least 0"),
        ({"restart_seconds": math.inf}, "restart_seconds=inf: a number of at least 0"),
        ({"mtbf_seconds": 0}, "mtbf_seconds=0: a number above 0"),
        ({"epoch_steps": 0}, "epoch_steps=0: an integer of at least 1 was expected; leave it out"),
    ],
)
def test_bad_job(values: dict[str, Any], start: str) -> None:
    with pytest.raises(ValueError) as caught:
        replace(JOB, **values)
    assert str(caught.value).startswith(start)


def test_a_simulation_without_an_end() -> None:
    with pytest.raises(ValueError, match=r"^duration=inf: without uptimes a finite number"):
        simulate(JOB, EveryNTrainSteps(1), KeepAll())
    for duration in (0, -1, float("nan"), "x"):
        with pytest.raises(ValueError, match=r"^duration=.*: a number of seconds above 0 was expected"):
            simulate(JOB, EveryNTrainSteps(1), KeepAll(), duration=duration)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^duration=inf: an attempt that never fails"):
        simulate(JOB, EveryNTrainSteps(1), KeepAll(), uptimes=[math.inf])


def test_bad_intervals_and_prices() -> None:
    with pytest.raises(ValueError, match=r"^intervals=0: seconds above 0"):
        wasted_shares(JOB, [0], [1.0])
    outcome = simulate(JOB, EveryNTrainSteps(1), KeepAll(), duration=10.0)
    with pytest.raises(ValueError, match=r"^per_gb_month=-1: a price"):
        price(outcome, per_compute_hour=1, per_gb_month=-1)


def test_phases_end_where_they_should() -> None:
    job = replace(JOB, held_seconds=0.0, confirm_seconds=0.0, epoch_steps=7)
    trigger = PhaseSchedule([(1, EveryNTrainSteps(3)), (None, EveryNTrainSteps(10))], by="epoch")
    assert steps(simulate(job, trigger, KeepAll(), duration=40.0)) == [3, 6, 10, 20, 30, 40]
