"""Schedules, improvements, adaptive intervals and byte budgets in real fits, over resumes."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger

from lightning_ckpt_policy import (
    AdaptiveInterval,
    AtSteps,
    CheckpointPolicy,
    CheckpointStore,
    EveryNTrainSteps,
    KeepAll,
    KeepEveryNSteps,
    KeepLast,
    KeepSteps,
    KeepUnder,
    OnImprovement,
    PhaseSchedule,
)
from lightning_ckpt_policy.callback import STATE_KEY
from lightning_ckpt_policy.interval import Measured, SaveCost
from lightning_ckpt_policy.store import _to_json
from tests.models import drain_each_save, fit
from tests.test_callback import policy, records, steps


@pytest.fixture(autouse=True)
def _one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    drain_each_save(monkeypatch)


def state(store: CheckpointStore, step: int) -> dict[str, Any]:
    record = next(record for record in store.records() if record.step == step)
    found: dict[str, Any] = torch.load(store.path_of(record), weights_only=True)[STATE_KEY]
    return found


class Lower(Callback):
    """Logs a metric of each validation."""

    def __init__(self, values: list[float]) -> None:
        self.values = values

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        pl_module.log("loss", self.values.pop(0))


def test_phases_go_on_after_a_resume(tmp_path: Path) -> None:
    schedule = PhaseSchedule([(12, EveryNTrainSteps(4)), (None, EveryNTrainSteps(10))])
    fit(tmp_path, policy(tmp_path, schedule), crash_at=35, max_epochs=6)
    assert steps(tmp_path) == [4, 8, 12, 20, 30]
    fit(tmp_path, policy(tmp_path, schedule), ckpt_path="last", max_epochs=6)
    assert steps(tmp_path) == [4, 8, 12, 20, 30, 40, 50, 60]


def test_phases_by_the_training_time_of_the_run(tmp_path: Path) -> None:
    """A second phase that was reached before a resume isn't begun anew."""
    schedule = PhaseSchedule([(0.05, EveryNTrainSteps(2)), (None, AtSteps([25]))], by="time")
    waited = type("Wait", (Callback,), {"on_train_batch_start": lambda *_: time.sleep(0.01)})()
    used = policy(tmp_path, schedule)
    fit(tmp_path, used, callbacks=[waited], crash_at=26)
    saved = steps(tmp_path)
    assert saved[-1] == 25
    assert len(saved) < 13
    elapsed = state(used.store, 25)["progress"]["elapsed"]
    assert elapsed > 0.2
    fit(tmp_path, policy(tmp_path, schedule | AtSteps([28])), ckpt_path="last")
    assert steps(tmp_path) == [*saved, 28]
    assert elapsed < state(used.store, 28)["progress"]["elapsed"] < elapsed + 60


def test_improvements_are_compared_with_those_before_a_resume(tmp_path: Path) -> None:
    trigger = OnImprovement("loss")
    fit(
        tmp_path,
        policy(tmp_path, trigger),
        validate=True,
        callbacks=[Lower([0.5, 0.7, 0.3, 0.0])],
        crash_at=30,
        max_epochs=4,
    )
    assert [(record.step, record.metrics["loss"]) for record in records(tmp_path)] == [
        (10, 0.5),
        (30, pytest.approx(0.3)),
    ]
    fit(
        tmp_path,
        policy(tmp_path, trigger),
        ckpt_path="last",
        validate=True,
        callbacks=[Lower([0.4, 0.2])],
        max_epochs=5,
    )
    assert steps(tmp_path) == [10, 30, 50]


def test_a_checkpoint_without_the_newer_fields_of_progress_is_resumed(tmp_path: Path) -> None:
    used = policy(tmp_path, AtSteps([4]))
    fit(tmp_path, used, max_epochs=1)
    path = used.store.path_of(used.store.records()[0])
    whole = torch.load(path, weights_only=True)
    whole[STATE_KEY]["progress"] = {"step": 4, "epoch": 0, "validations": 0}
    other = tmp_path / "old.ckpt"
    torch.save(whole, other)
    again = policy(tmp_path / "again", AtSteps([6]))
    fit(tmp_path, again, ckpt_path=str(other), max_epochs=1)
    assert steps(tmp_path / "again") == [6]


def test_a_users_checkpoint_holds_the_progress_too(tmp_path: Path) -> None:
    used = policy(tmp_path, AtSteps([4]))
    observer = fit(tmp_path, used, max_epochs=1)
    observer.trainer.save_checkpoint(tmp_path / "mine.ckpt")  # type: ignore[attr-defined]
    progress = torch.load(tmp_path / "mine.ckpt", weights_only=True)[STATE_KEY]["progress"]
    assert progress["step"] == 10
    assert progress["elapsed"] > 0


def test_adaptive_interval_measures_tells_and_logs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trigger = AdaptiveInterval(mtbf="1s", min=0.001, max=5, max_overhead=1)
    used = policy(tmp_path, trigger)
    waited = type("Wait", (Callback,), {"on_train_batch_start": lambda *_: time.sleep(0.05)})()
    with caplog.at_level(logging.INFO):
        fit(tmp_path, used, callbacks=[waited], logger=CSVLogger(tmp_path), log_every_n_steps=1)
    measured = used._measured
    assert measured is not None
    assert measured.cost is not None
    assert measured.cost.held > 0
    assert measured.cost.confirm >= measured.cost.held
    assert measured.failures == 0
    assert len(records(tmp_path)) > 1
    assert "1s between failures (given)" in caplog.text
    logged = next((tmp_path / "lightning_logs").rglob("metrics.csv")).read_text()
    assert "checkpoint_interval_seconds" in logged.splitlines()[0]


def test_the_slow_down_of_the_loop_is_known_after_a_restart(tmp_path: Path) -> None:
    adaptive = AdaptiveInterval(min="1h") | EveryNTrainSteps(4)
    used = policy(tmp_path, adaptive)
    original = used._note_cost
    used._note_cost = lambda record, slowdown: original(record, 7.0)  # type: ignore[method-assign]
    fit(tmp_path, used, crash_at=10)
    assert [record.slowed_seconds for record in records(tmp_path)] == [None, 7.0]
    begun: list[Any] = []
    again = policy(tmp_path, adaptive)
    look = type("Look", (Callback,), {"on_train_batch_start": lambda *_: begun.append(again._measured)})()
    fit(tmp_path, again, ckpt_path="last", callbacks=[look], max_epochs=2)
    assert begun[0].cost.slowdown == 7.0
    assert [record.slowed_seconds for record in records(tmp_path)][:3] == [None, 7.0, 7.0]
    unmeasured = policy(tmp_path / "b", EveryNTrainSteps(4))
    fit(tmp_path / "b", unmeasured, max_epochs=1)
    assert {record.slowed_seconds for record in unmeasured.store.records()} == {None}


def killed_twice_and_finished_once(store: CheckpointStore) -> str:
    """Three attempts of the store's run, an hour each: two crashes and a clean end."""
    attempt = store.attempts()[0]
    for status, number in (("error", 1), ("running", 2), ("finished", 3)):
        if number > 1:
            attempt = store.start_attempt(attempt.run_id)
        began = 1e9 + 7200 * number
        ended = dataclasses.replace(attempt, created_at=began, ended_at=began + 3600, status=status)
        path = Path(store.url) / "attempts" / f"{ended.name}.json"
        path.write_bytes(_to_json(ended))
    return attempt.run_id


def test_case_11_a_clean_end_is_no_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trigger = AdaptiveInterval(min=1, max="1h", max_overhead=1)
    used = policy(tmp_path, AtSteps([4]))
    fit(tmp_path, used, crash_at=5)
    killed_twice_and_finished_once(used.store)
    again = policy(tmp_path, trigger | AtSteps([12]))
    with caplog.at_level(logging.INFO):
        fit(tmp_path, again, ckpt_path="last", max_epochs=2)
    measured = again._measured
    assert measured is not None
    assert measured.cost is not None
    assert measured.failures == 2
    assert measured.mtbf == pytest.approx(3 * 3600 / 2, rel=0.01)
    assert "(2 in 3h" in caplog.text
    known = Measured(cost=SaveCost(held=2.0), failures=2, uptime=measured.uptime)
    assert trigger.interval(known) == pytest.approx(math.sqrt(2 * 2.0 * 5400), rel=0.01)
    clamped = AdaptiveInterval(min="10m", max="20m")
    assert clamped.interval(known) == 600
    assert clamped.interval(dataclasses.replace(known, cost=SaveCost(held=11.0))) == 1100  # max_overhead


def test_an_attempt_that_was_killed_is_noted_to_have_lived_until_its_newest_checkpoint(tmp_path: Path) -> None:
    used = policy(tmp_path, AtSteps([4]))
    fit(tmp_path, used, crash_at=8)
    (attempt,) = used.store.attempts()
    path = Path(used.store.url) / "attempts" / f"{attempt.name}.json"
    killed = dataclasses.replace(attempt, status="running", ended_at=None)
    path.write_bytes(_to_json(killed))
    fit(tmp_path, policy(tmp_path, AtSteps([12])), ckpt_path="last", crash_at=15)
    first, second = used.store.attempts()
    assert (first.status, first.ended_at) == ("running", records(tmp_path)[0].created_at)
    assert (second.status, second.number) == ("error", 2)


def test_case_26_the_last_and_a_coarse_history(tmp_path: Path) -> None:
    used = policy(tmp_path, AtSteps([1, 2, 3, 4, 5]), KeepLast(1) | KeepEveryNSteps(2))
    fit(tmp_path, used, max_epochs=1)
    assert steps(tmp_path) == [2, 4, 5]


def test_a_budget_that_milestones_exceed_is_warned_about_once(tmp_path: Path) -> None:
    used = policy(tmp_path, EveryNTrainSteps(4), KeepUnder("1kB", of=KeepSteps([4, 12]) | KeepLast(3)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(tmp_path, used)
    assert steps(tmp_path) == [4, 12, 28]
    (told,) = {str(warning.message) for warning in caught if "bytes above the budget" in str(warning.message)}
    assert "KeepUnder('1kB'" in told
    silent = policy(tmp_path / "b", EveryNTrainSteps(4), KeepUnder("1GB", of=KeepSteps([4]) | KeepLast(3)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(tmp_path / "b", silent)
    assert not [warning for warning in caught if "above the budget" in str(warning.message)]


def test_a_metric_of_the_trigger_that_is_never_logged_is_warned_about(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="'no/such' of the trigger is never logged, since this fit has no validation"):
        fit(tmp_path, policy(tmp_path / "a", OnImprovement("no/such")), max_epochs=1)
    with pytest.warns(UserWarning, match="'no/such' of the trigger was not logged by this validation"):
        fit(tmp_path, policy(tmp_path / "b", OnImprovement("no/such")), max_epochs=1, validate=True)


def test_one_object_in_two_fits_counts_the_training_time_of_both(tmp_path: Path) -> None:
    used = CheckpointPolicy(tmp_path / "ckpt", AtSteps([4, 14]), KeepAll(), save_on_train_end=True)
    trainer = fit(tmp_path, used, max_epochs=1).trainer  # type: ignore[attr-defined]
    trainer.fit_loop.max_epochs = 2
    trainer.fit(trainer.lightning_module, trainer.train_dataloader)
    assert steps(tmp_path) == [4, 10, 14, 20]
    times = [state(used.store, step)["progress"]["elapsed"] for step in steps(tmp_path)]
    assert times == sorted(times)
