"""The interval that wastes least, and what it is worked out from."""

from __future__ import annotations

import math
from typing import Any

import pytest

from lightning_ckpt_policy.interval import (
    Measured,
    SaveCost,
    best_interval,
    costs_of,
    daly,
    failures_of,
    typical_cost,
    young,
)
from lightning_ckpt_policy.record import CheckpointRecord
from lightning_ckpt_policy.store import Attempt
from lightning_ckpt_policy.triggers import AdaptiveInterval

HOUR = 3600.0


def attempt(number: int, begin: float, status: str = "running", end: float | None = None) -> Attempt:
    return Attempt(
        run_id="a", number=number, created_at=begin * HOUR, status=status, ended_at=None if end is None else end * HOUR
    )


def record(sequence: int, attempt: int, at: float, **values: Any) -> CheckpointRecord:
    return CheckpointRecord(
        path=f"{sequence}.ckpt",
        step=sequence,
        epoch=0,
        sequence=sequence,
        run_id="a",
        created_at=at * HOUR,
        size=1,
        checksum="crc32c:00000000",
        attempt=attempt,
        **values,
    )


@pytest.mark.parametrize(
    ("attempts", "records", "failures", "hours"),
    [
        ([], [], 0, 0.0),
        ([attempt(1, 0, "finished", 5)], [], 0, 5.0),
        ([attempt(1, 0, "stopped", 5)], [], 0, 5.0),
        ([attempt(1, 0, "error", 5)], [], 1, 5.0),
        # killed: up until its newest checkpoint, or else until the next attempt began
        ([attempt(1, 0), attempt(2, 9, "finished", 10)], [record(1, 1, 3), record(2, 1, 4)], 1, 5.0),
        ([attempt(1, 0), attempt(2, 9, "finished", 10)], [record(1, 2, 9.5)], 1, 10.0),
        ([attempt(1, 0)], [], 1, 0.0),
        # a clock that was set back counts for nothing
        ([attempt(1, 5, "error", 4)], [], 1, 0.0),
        # a later attempt noted when the killed one was last seen
        ([attempt(1, 0, "running", 2), attempt(2, 9, "finished", 10)], [], 1, 3.0),
        ([attempt(2, 9, "finished", 10), attempt(1, 0, "error", 2)], [], 1, 3.0),
    ],
)
def test_failures(attempts: list[Attempt], records: list[CheckpointRecord], failures: int, hours: float) -> None:
    assert failures_of(attempts, records) == (failures, pytest.approx(hours * HOUR))


def test_case_11_two_crashes_and_a_clean_finish() -> None:
    attempts = [attempt(1, 0), attempt(2, 10, "error", 20), attempt(3, 20, "finished", 40)]
    failures, uptime = failures_of(attempts)
    measured = Measured(cost=SaveCost(held=2.0), failures=failures, uptime=uptime)
    assert (failures, measured.mtbf) == (2, 20 * HOUR)
    best = math.sqrt(2 * 2.0 * 20 * HOUR)
    assert AdaptiveInterval(min=1).interval(measured) == pytest.approx(best, rel=0.01)
    assert AdaptiveInterval(max=100, max_overhead=0.5).interval(measured) == 100
    assert AdaptiveInterval(min=1000).interval(measured) == 1000


@pytest.mark.parametrize(
    ("measured", "hours"),
    [
        (Measured(), 24.0),
        (Measured(uptime=5 * HOUR), 24.0),
        (Measured(uptime=100 * HOUR), 100.0),
        (Measured(uptime=100 * HOUR, failures=1), 100.0),
        (Measured(uptime=HOUR, failures=4), 0.25),
    ],
)
def test_mean_time_between_failures(measured: Measured, hours: float) -> None:
    assert measured.mtbf == pytest.approx(hours * HOUR)


@pytest.mark.parametrize("ratio", [1e5, 1e4, 1e3, 1e2, 10, 3])
def test_daly_is_the_better_formula_where_a_save_costs_much(ratio: float) -> None:
    cost, mtbf = 1.0, ratio

    def wasted(period: float) -> float:  # exact for failures at any moment, also during a save
        return mtbf * math.expm1(period / mtbf) / (period - cost)

    best = min(wasted(cost + step * young(cost, mtbf) / 200) for step in range(1, 1000))
    assert wasted(daly(cost, mtbf)) / best < 1.001
    assert wasted(best_interval(cost, mtbf)[0]) / best < 1.001
    assert daly(cost, mtbf) > young(cost, mtbf)
    assert wasted(daly(cost, mtbf)) < wasted(young(cost, mtbf)) * 1.000001


def test_formulas_at_the_edges() -> None:
    assert young(0.0, 5.0) == daly(0.0, 5.0) == 0.0
    assert daly(20.0, 5.0) == 25.0, "more than twice the time between failures: save once in that time"
    assert best_interval(1.0, 1001.0)[1] == "Young"
    assert best_interval(1.0, 999.0)[1] == "Daly"


def test_typical_cost_is_a_median_of_the_newest() -> None:
    costs = [SaveCost(held=99.0)] * 9 + [
        SaveCost(held=h, confirm=c) for h, c in ((1, 9), (2, 8), (50, 7), (3, 6), (2, 5))
    ]
    assert typical_cost(costs) == SaveCost(held=2, confirm=7)
    assert typical_cost([]) is None


def test_costs_from_records() -> None:
    records = [
        record(2, 1, 0, held_seconds=0.5),
        record(1, 1, 0, held_seconds=0.25, write_seconds=3.0),
        record(3, 1, 0, write_seconds=9.0),
    ]
    assert costs_of(records) == [SaveCost(held=0.25, confirm=3.25), SaveCost(held=0.5, confirm=0.5)]
    slowed = [record(4 + i, 1, 0, held_seconds=0.5, slowed_seconds=s) for i, s in enumerate((None, 2.0, None, 4.0))]
    assert [cost.slowdown for cost in costs_of(records + slowed)] == [3.0, 3.0, 3.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_bad_cost(bad: float) -> None:
    with pytest.raises(ValueError, match=r"^slowdown=.*: seconds of at least 0 were expected"):
        SaveCost(slowdown=bad)
