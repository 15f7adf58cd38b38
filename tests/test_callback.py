"""``CheckpointPolicy`` in real fits: when it saves, what its records say, what stays, what is reported."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import shutil
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer, strategies
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_ckpt_policy import (
    AfterValidation,
    AsyncCheckpointIO,
    AtSteps,
    CheckpointPolicy,
    CheckpointRecord,
    CheckpointSaveError,
    CheckpointStore,
    DamagedCheckpointError,
    EveryInterval,
    EveryNEpochs,
    EveryNTrainSteps,
    KeepAll,
    KeepBest,
    KeepLast,
    KeepSteps,
    Retention,
    Trigger,
)
from lightning_ckpt_policy.backends import LocalBackend
from tests.models import Net, differences, fit, loader

pytestmark = pytest.mark.core


def policy(root: Path, trigger: Any, retention: Any = None, **options: Any) -> CheckpointPolicy:
    return CheckpointPolicy(
        root / "ckpt", trigger, KeepAll() if retention is None else retention, **{"save_on_train_end": False, **options}
    )


def records(root: Path) -> list[CheckpointRecord]:
    return CheckpointStore(str(root / "ckpt")).records()


def steps(root: Path) -> list[int]:
    return [record.step for record in records(root)]


class Faults:
    """Lets calls of a backend's method fail, wait or take time, by the number of the call (from 1)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
        self.calls: list[str] = []
        self.act: Callable[[int, str], None] = lambda call, name: None
        original = getattr(LocalBackend, method)

        def wrapped(backend: LocalBackend, name: str, *args: Any, **kwargs: Any) -> Any:
            if not name.endswith(".ckpt"):
                return original(backend, name, *args, **kwargs)
            self.calls.append(name)
            self.act(len(self.calls), name)
            return original(backend, name, *args, **kwargs)

        monkeypatch.setattr(LocalBackend, method, wrapped)


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(monkeypatch, "write_payload")


@pytest.fixture
def deletes(monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(monkeypatch, "delete")


# when


@pytest.mark.parametrize(
    ("case", "trigger", "options", "expected"),
    [
        ("01", EveryNTrainSteps(4) | EveryNEpochs(1), {}, [4, 8, 10, 12, 16, 20, 24, 28, 30]),
        ("02", EveryNTrainSteps(25), {}, [25]),
        ("03", EveryNTrainSteps(10), {}, [10, 20, 30]),
        ("", AtSteps([3, 17, 99]), {}, [3, 17]),
        ("", EveryNEpochs(2), {}, [20]),
        ("", EveryNEpochs(1), {"validate": True}, [10, 20, 30]),
        ("", AfterValidation(), {"validate": True, "val_check_interval": 5}, [5, 10, 15, 20, 25, 30]),
        ("", AfterValidation(2), {"validate": True, "val_check_interval": 5}, [10, 20, 30]),
        (
            "",
            EveryNTrainSteps(4) & AfterValidation(),
            {"validate": True, "val_check_interval": 5},
            [5, 10, 15, 20, 25, 30],
        ),
        ("", EveryInterval(hours=1), {}, []),
        ("", EveryNTrainSteps(3), {"accumulate_grad_batches": 4}, [3, 6, 9]),
        ("", EveryNTrainSteps(4), {"limit_train_batches": 3}, [4, 8]),
    ],
)
def test_case_01_to_03_when_it_saves(
    tmp_path: Path, drained: None, case: str, trigger: Trigger, options: dict[str, Any], expected: list[int]
) -> None:
    fit(tmp_path, policy(tmp_path, trigger), **options)
    assert steps(tmp_path) == expected
    for record in records(tmp_path):
        assert record.path == f"step-{record.step:010d}.ckpt"
        loaded = torch.load(tmp_path / "ckpt" / record.path, weights_only=True)
        assert loaded["global_step"] == record.step


def test_reasons_that_are_due_together_make_one_save(tmp_path: Path, drained: None) -> None:
    fit(tmp_path, policy(tmp_path, EveryNTrainSteps(5) | EveryNEpochs(1)), max_epochs=1)
    assert [record.reason for record in records(tmp_path)] == [
        ("EveryNTrainSteps(n=5)",),
        ("EveryNTrainSteps(n=5)", "EveryNEpochs(n=1)"),
    ]


class TwoOptimizers(Net):
    """Manual optimization, two optimizer steps per batch, as in a GAN."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:  # type: ignore[override]
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.zero_grad()
            self.manual_backward(self.body(batch).pow(2).mean())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        half = list(self.parameters())
        return [torch.optim.Adam(half[:3], lr=0.01), torch.optim.SGD(half[3:], lr=0.01)]


def test_case_04_a_global_step_that_jumps(tmp_path: Path, drained: None) -> None:
    fit(tmp_path, policy(tmp_path, EveryNTrainSteps(5)), model=TwoOptimizers(), max_epochs=1)
    assert steps(tmp_path) == [6, 10, 16, 20]


def test_case_05_the_record_holds_this_validation_or_nothing(tmp_path: Path, drained: None) -> None:
    trigger = EveryNTrainSteps(5) | AfterValidation()
    fit(tmp_path, policy(tmp_path, trigger), validate=True, val_check_interval=5, max_epochs=1)
    assert [(r.step, r.metrics["val/step"]) for r in records(tmp_path)] == [(5, 5.0), (10, 10.0)]
    assert all(len(record.reason) == 2 and record.point == "validation_end" for record in records(tmp_path))


def test_case_05_a_metric_that_never_comes_does_not_stop_the_save(tmp_path: Path, drained: None) -> None:
    keep = KeepLast(1) | KeepBest(1, monitor="val_acc")
    with pytest.warns(UserWarning, match=r"monitor='val_acc'.*not logged.*val_loss") as caught:
        fit(tmp_path, policy(tmp_path, EveryNTrainSteps(5), keep), validate=True, val_check_interval=5)
    assert steps(tmp_path) == [30]
    assert len([warning for warning in caught if "val_acc" in str(warning.message)]) == 1


def test_a_stale_metric_is_absent(tmp_path: Path, drained: None) -> None:
    fit(tmp_path, policy(tmp_path, EveryNTrainSteps(4)), validate=True, val_check_interval=5, max_epochs=1)
    assert [(record.step, dict(record.metrics)) for record in records(tmp_path)] == [(4, {}), (8, {})]


def test_training_metrics_of_the_weights_before_are_not_in_the_record(tmp_path: Path, drained: None) -> None:
    fit(tmp_path, policy(tmp_path, AfterValidation()), validate=True, max_epochs=1)
    assert set(records(tmp_path)[0].metrics) == {"val_loss", "val/step"}


def test_sanity_checks_and_validate_save_nothing(tmp_path: Path, drained: None) -> None:
    fitted = fit(tmp_path, policy(tmp_path, AfterValidation()), validate=True, max_epochs=1, num_sanity_val_steps=2)
    fitted.trainer.validate(Net(), loader("plain"), verbose=False)  # type: ignore[attr-defined]
    assert steps(tmp_path) == [10]


def test_fast_dev_run_saves_nothing(tmp_path: Path) -> None:
    fit(tmp_path, policy(tmp_path, EveryNTrainSteps(1)), fast_dev_run=2)
    assert not (tmp_path / "ckpt").exists()


def test_a_time_trigger_counts_from_the_last_save_also_over_a_restart(
    tmp_path: Path, drained: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "time", lambda: clock[0] + 5000)

    class Tick(Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            clock[0] += 10

    trigger = EveryInterval(seconds=40) | AtSteps([6])
    fit(tmp_path, policy(tmp_path, trigger), callbacks=[Tick()], crash_at=8)
    assert steps(tmp_path) == [4, 6]
    fit(tmp_path, policy(tmp_path, trigger), callbacks=[Tick()], crash_at=13, ckpt_path="last")
    # resumed at step 6 and 20 s later (two batches were lost), so the next is due after two more
    assert steps(tmp_path) == [4, 6, 8, 12]


def test_the_last_state_is_saved_at_the_last_point(tmp_path: Path, drained: None) -> None:
    last = policy(tmp_path, AtSteps([4]), save_on_train_end=True)
    fit(tmp_path, last, max_steps=13)
    assert [(r.step, r.reason) for r in records(tmp_path)] == [(4, ("AtSteps(steps=(4,))",)), (13, ("train_end",))]


@pytest.mark.parametrize("validate", [False, True])
def test_a_stop_asked_for_in_the_middle_of_an_epoch_is_saved(tmp_path: Path, drained: None, validate: bool) -> None:
    class Stop(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            trainer.should_stop = trainer.global_step >= 7

    last = policy(tmp_path, AtSteps([99]), save_on_train_end=True)
    fit(tmp_path, last, callbacks=[Stop()], validate=validate)
    assert steps(tmp_path) == [7]


@pytest.mark.parametrize("validate", [False, True])
def test_what_early_stopping_ends_after_the_last_point_is_saved(tmp_path: Path, drained: None, validate: bool) -> None:
    stop = EarlyStopping("train_loss", patience=2, min_delta=1e9, check_on_train_epoch_end=True)
    last = policy(tmp_path, AtSteps([4]), save_on_train_end=True)
    whole = fit(tmp_path, None, callbacks=[copy.deepcopy(stop)], validate=validate, max_epochs=9)
    observer = fit(tmp_path, last, callbacks=[stop], validate=validate, max_epochs=9)
    assert observer.final["step"] == 30
    assert [(record.step, record.reason) for record in records(tmp_path)][1:] == [(30, ("train_end",))]
    assert differences(whole.final, observer.final) == []
    assert differences(observer.final["weights"], torch.load(last.last_model_path)["state_dict"]) == []
    assert last.history[-1].record == records(tmp_path)[-1]


def test_what_early_stopping_ends_is_saved_although_a_save_is_on_its_way(tmp_path: Path, writes: Faults) -> None:
    writes.act = lambda call, name: time.sleep(0.5)
    stop = EarlyStopping("train_loss", patience=1, min_delta=1e9, check_on_train_epoch_end=True)
    fit(tmp_path, policy(tmp_path, AtSteps([19]), save_on_train_end=True), callbacks=[stop], max_epochs=9)
    assert steps(tmp_path) == [19, 20]


@pytest.mark.parametrize(
    "options", [{"val_check_interval": 4}, {"val_check_interval": 3, "check_val_every_n_epoch": None}]
)
def test_a_run_that_early_stopping_ended_in_an_epoch_stays_ended(
    tmp_path: Path, drained: None, options: dict[str, Any]
) -> None:
    def run(**more: Any) -> Any:
        stop = EarlyStopping("val_loss", patience=2, min_delta=1e9)
        used = policy(tmp_path, AfterValidation(), save_on_train_end=True)
        return fit(tmp_path, used, callbacks=[stop], validate=True, **options, **more)

    whole = run()
    again = run(ckpt_path="last", seed=5)
    assert again.batches == []
    assert differences(whole.final["weights"], again.final.get("weights", whole.final["weights"])) == []


def test_a_byte_lost_on_its_way_damages_nothing(
    tmp_path: Path, two_saved: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = LocalBackend.chunks
    reads: list[str] = []

    def chunks(backend: LocalBackend, name: str, *args: Any) -> Any:
        reads.append(name)
        for chunk in original(backend, name, *args):
            yield bytes([chunk[0] ^ 1]) + chunk[1:] if len(reads) == 1 else chunk

    monkeypatch.setattr(LocalBackend, "chunks", chunks)
    observer = fit(tmp_path, policy(tmp_path, EveryNTrainSteps(4)), ckpt_path="last", max_steps=9)
    assert observer.batches[0][0] == 8
    assert not any(record.damaged for record in records(tmp_path))


def test_a_stop_after_the_last_point_that_nobody_announced_is_warned_about(tmp_path: Path) -> None:
    class Stop(Callback):
        def on_train_epoch_end(self, trainer: Trainer, *args: Any) -> None:
            trainer.should_stop = True

    with pytest.warns(UserWarning, match=r"steps from 5 to 10 are in no checkpoint.*EveryNEpochs"):
        fit(tmp_path, policy(tmp_path, AtSteps([4]), save_on_train_end=True), callbacks=[Stop()])


def test_what_is_due_at_the_last_step_waits_for_the_save_before(tmp_path: Path, writes: Faults) -> None:
    writes.act = lambda call, name: time.sleep(0.5)
    fit(tmp_path, policy(tmp_path, AtSteps([28, 30])))
    assert steps(tmp_path) == [28, 30]


def test_a_trigger_that_is_due_while_a_save_is_on_its_way_stays_due(tmp_path: Path, writes: Faults) -> None:
    gate = threading.Event()
    writes.act = lambda call, name: gate.wait(30) and None if call == 1 else None  # type: ignore[func-returns-value]

    class Open(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
            if trainer.global_step == 13:
                gate.set()
                trainer.checkpoint_callback._writer.drain(30)  # type: ignore[union-attr]

    fit(tmp_path, policy(tmp_path, AtSteps([3, 6, 9])), callbacks=[Open()])
    assert steps(tmp_path) == [3, 13]


# what stays


@pytest.mark.parametrize(
    ("retention", "expected"),
    [
        (KeepLast(2) | KeepSteps([4]), [4, 9, 10]),
        (KeepAll(), list(range(1, 11))),
        (KeepLast(1), [10]),
        ([KeepLast(1), KeepSteps([2, 3])], [2, 3, 10]),
    ],
)
def test_case_26_what_stays(tmp_path: Path, drained: None, retention: Any, expected: list[int]) -> None:
    used = policy(tmp_path, EveryNTrainSteps(1), retention)
    fit(tmp_path, used, max_epochs=1)
    assert steps(tmp_path) == expected
    assert sorted(path.name for path in (tmp_path / "ckpt").glob("*.ckpt")) == [f"step-{s:010d}.ckpt" for s in expected]
    assert [record.step for record in used.deleted] == sorted(set(range(1, 11)) - set(expected))
    used._ledger.prune()  # type: ignore[union-attr]
    assert used._writer.idle


class Scripted(Net):
    """Logs a given value at each validation."""

    def __init__(self, values: list[float]) -> None:
        super().__init__()
        self.values = iter(values)

    def on_validation_epoch_end(self) -> None:
        self.log("score", next(self.values))


def test_case_06_nan_is_never_best_but_may_be_last(tmp_path: Path, drained: None) -> None:
    model = Scripted([float("nan"), 0.5, float("nan"), 0.4])
    used = policy(tmp_path, AfterValidation(), KeepBest(2, "score"))
    fit(tmp_path, used, model=model, validate=True, max_epochs=4)
    assert [(record.step, record.metrics["score"]) for record in records(tmp_path)] == [
        (20, 0.5),
        (40, pytest.approx(0.4)),
    ]
    assert used.best_model_path == str(tmp_path / "ckpt" / "step-0000000040.ckpt")
    assert float(used.best_model_score) == pytest.approx(0.4)  # type: ignore[arg-type]


def test_case_26_best_and_last_together(tmp_path: Path, drained: None) -> None:
    model = Scripted([5, 1, 4, 3, 4, 5, 6, 7, 8, 9])
    keep = KeepLast(2) | KeepBest(1, "score")
    fit(tmp_path, policy(tmp_path, AfterValidation(), keep), model=model, validate=True, max_epochs=10)
    assert steps(tmp_path) == [20, 90, 100]


def test_case_25_nothing_is_deleted_before_its_replacement_is_confirmed(tmp_path: Path, writes: Faults) -> None:
    gate = threading.Event()
    seen: list[list[int]] = []
    writes.act = lambda call, name: gate.wait(30) and None if call == 2 else None  # type: ignore[func-returns-value]

    class Look(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            if trainer.global_step == 4:
                trainer.checkpoint_callback._writer.drain(30)  # type: ignore[union-attr]
            if trainer.global_step == 20:
                seen.append(steps(tmp_path))
                gate.set()

    fit(tmp_path, policy(tmp_path, AtSteps([3, 9]), KeepLast(1)), callbacks=[Look()])
    assert seen == [[3]]
    assert steps(tmp_path) == [9]


@pytest.mark.parametrize("error", [OSError("delete failed"), FileNotFoundError("gone")])
def test_case_28_a_delete_that_fails_is_tried_again_and_counted(
    tmp_path: Path, drained: None, deletes: Faults, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    monkeypatch.setattr("lightning_ckpt_policy.retry.TRIES", 1)
    failing = {f"step-{step:010d}.ckpt" for step in (1, 2)}
    attempts: list[str] = []

    def act(call: int, name: str) -> None:
        if name in failing:
            attempts.append(name)
            if attempts.count(name) <= 8:
                raise error

    deletes.act = act
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(tmp_path, policy(tmp_path, EveryNTrainSteps(1), KeepLast(1)))
    assert steps(tmp_path) == [30]
    assert sorted(path.name for path in (tmp_path / "ckpt").iterdir() if path.is_file()) == [
        "step-0000000030.ckpt",
        "step-0000000030.ckpt.json",
    ]
    if not isinstance(error, FileNotFoundError):
        assert any("could not be deleted" in str(w.message) and "failed so far" in str(w.message) for w in caught)


def test_case_28_a_slow_delete_holds_no_batch(tmp_path: Path, deletes: Faults) -> None:
    gate = threading.Event()
    waiting = threading.Event()

    def act(call: int, name: str) -> None:
        waiting.set()
        gate.wait(30)

    deletes.act = act

    class Open(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            if trainer.global_step in (3, 6, 20):  # the save before may still be on its way
                trainer.checkpoint_callback._writer.drain(30, saves_only=True)  # type: ignore[union-attr]
            if trainer.global_step == 25:
                assert waiting.wait(30)
                gate.set()

    fit(tmp_path, policy(tmp_path, AtSteps([3, 6, 20]), KeepLast(1)), callbacks=[Open()])
    assert steps(tmp_path) == [20]


def test_a_pinned_checkpoint_stays(tmp_path: Path, drained: None) -> None:
    class Pin(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            if trainer.global_step == 3:
                store = CheckpointStore(str(tmp_path / "ckpt"))
                store.pin(store.records()[-1])

    fit(tmp_path, policy(tmp_path, EveryNTrainSteps(2), KeepLast(1)), callbacks=[Pin()], max_epochs=1, crash_at=4)
    fit(tmp_path, policy(tmp_path, EveryNTrainSteps(2), KeepLast(1)), ckpt_path="last", max_epochs=1)
    assert steps(tmp_path) == [2, 10]


# what goes wrong


def test_case_13_a_write_that_fails_costs_that_checkpoint_alone(tmp_path: Path, drained: None, writes: Faults) -> None:
    def act(call: int, name: str) -> None:
        if name == "step-0000000004.ckpt":
            raise PermissionError("no")

    writes.act = act
    used = policy(tmp_path, EveryNTrainSteps(2))
    with pytest.warns(UserWarning, match=r"step 4 could not be saved.*PermissionError: no.*1 of max"):
        fit(tmp_path, used, max_steps=8)
    assert steps(tmp_path) == [2, 6, 8]
    assert [(outcome.step, outcome.record is None) for outcome in used.history] == [
        (2, False),
        (4, True),
        (6, False),
        (8, False),
    ]
    for record in records(tmp_path):
        used.store.verify(record)


@pytest.mark.parametrize("removed", ["payload", "marker", "folder"])
def test_what_someone_removes_while_it_is_written_costs_that_checkpoint_alone(
    tmp_path: Path, drained: None, monkeypatch: pytest.MonkeyPatch, removed: str
) -> None:
    original = LocalBackend.write_payload

    def write_payload(self: LocalBackend, name: str, *args: Any) -> None:
        original(self, name, *args)
        if name == "step-0000000004.ckpt":
            if removed == "folder":
                shutil.rmtree(self.root)
            else:
                os.remove(self.path(name if removed == "payload" else f"{name}.pending"))

    monkeypatch.setattr(LocalBackend, "write_payload", write_payload)
    with pytest.warns(UserWarning, match=r"step 4 could not be saved.*removed by someone else"):
        fit(tmp_path, policy(tmp_path, EveryNTrainSteps(2)), max_steps=8)
    assert steps(tmp_path) == [6, 8] if removed == "folder" else [2, 6, 8]
    for record in records(tmp_path):
        CheckpointStore(tmp_path / "ckpt").verify(record)
    assert not list((tmp_path / "ckpt").glob("*.pending"))


def test_case_14_a_fit_whose_only_save_fails_ends_with_an_error(tmp_path: Path, writes: Faults) -> None:
    def act(call: int, name: str) -> None:
        raise PermissionError("no")

    writes.act = act
    used = policy(tmp_path, AtSteps([30]))
    with pytest.raises(CheckpointSaveError, match=r"last save of this fit.*PermissionError: no.*none"):
        fit(tmp_path, used)
    assert [attempt.status for attempt in used.store.attempts()] == ["error"]
    assert list((tmp_path / "ckpt").glob("*.ckpt*")) == []


def test_so_many_failures_in_a_row_end_the_run(tmp_path: Path, drained: None, writes: Faults) -> None:
    def act(call: int, name: str) -> None:
        if call > 1:
            raise PermissionError("no")

    writes.act = act
    used = policy(tmp_path, EveryNTrainSteps(2), max_consecutive_failures=2)
    with pytest.raises(CheckpointSaveError, match=r"2 saves in a row failed.*step-0000000002.*raise max_consec"):
        fit(tmp_path, used)
    assert used.last_model_path.endswith("step-0000000002.ckpt")
    assert used._writer.idle


def test_case_15_the_last_save_is_durable_when_fit_returns(tmp_path: Path, writes: Faults) -> None:
    writes.act = lambda call, name: time.sleep(0.5)
    used = policy(tmp_path, AtSteps([30]))
    fit(tmp_path, used)
    assert used.last_model_path == str(tmp_path / "ckpt" / "step-0000000030.ckpt")
    used.store.verify(records(tmp_path)[0])
    assert "ckpt-writer" not in [thread.name for thread in threading.enumerate()]


def test_a_training_error_waits_for_the_pending_save_and_is_not_masked(tmp_path: Path, writes: Faults) -> None:
    writes.act = lambda call, name: time.sleep(0.5)
    fit(tmp_path, policy(tmp_path, AtSteps([9])), crash_at=10)
    assert steps(tmp_path) == [9]


def test_a_training_error_is_not_masked_by_a_save_error(tmp_path: Path, writes: Faults) -> None:
    def act(call: int, name: str) -> None:
        time.sleep(0.2)
        raise PermissionError("no")

    writes.act = act
    with pytest.warns(UserWarning, match="step 9 could not be saved"):
        fit(tmp_path, policy(tmp_path, AtSteps([9])), crash_at=10)
    assert steps(tmp_path) == []


def test_case_21_a_folder_that_cannot_be_written_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "ckpt").write_text("a file")
    with pytest.raises(NotADirectoryError, match="dirpath"):
        fit(tmp_path, policy(tmp_path, AtSteps([9])))


def test_case_21_no_attribute_names_a_file_that_is_not_there(tmp_path: Path, drained: None, writes: Faults) -> None:
    def act(call: int, name: str) -> None:
        if call == 2:
            raise PermissionError("read-only")

    writes.act = act
    used = policy(tmp_path, AtSteps([3, 6]))

    class Look(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            assert used.last_model_path == "" or Path(used.last_model_path).is_file()

    with pytest.warns(UserWarning, match="step 6 could not"), pytest.raises(CheckpointSaveError):
        fit(tmp_path, used, callbacks=[Look()])
    assert Path(used.last_model_path).name == "step-0000000003.ckpt"


class FileLogger(DummyLogger):
    """Asserts that what it is told of exists."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []
        self.threads: set[str] = set()

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        path = checkpoint_callback.last_model_path
        assert Path(path).is_file()
        assert Path(path + ".json").is_file()
        self.told.append(Path(path).name)
        self.threads.add(threading.current_thread().name)


def test_case_18_loggers_are_told_of_confirmed_files_alone(tmp_path: Path, drained: None, writes: Faults) -> None:
    def act(call: int, name: str) -> None:
        if call == 2:
            raise PermissionError("no")

    writes.act = act
    logger = FileLogger()
    with pytest.warns(UserWarning, match="step 4 could not"):
        fit(tmp_path, policy(tmp_path, EveryNTrainSteps(2), KeepLast(1)), max_steps=6, logger=logger)
    assert logger.told == ["step-0000000002.ckpt", "step-0000000006.ckpt"]
    assert logger.threads == {"MainThread"}


# which checkpoint a fit starts from


def test_last_with_nothing_saved_starts_afresh(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        observer = fit(tmp_path, policy(tmp_path, EveryNEpochs(1)), ckpt_path="last", max_epochs=1)
    assert observer.batches[0][0] == 0
    assert steps(tmp_path) == [10]
    assert "starts afresh" in caplog.text


def test_case_23_debris_and_foreign_files_are_neither_chosen_nor_touched(tmp_path: Path, drained: None) -> None:
    folder = tmp_path / "ckpt"
    folder.mkdir()
    debris = {"step-0000000099.ckpt": b"", "x.tmp": b"123", "last_backup.ckpt": b"456", "epoch=3.ckpt": b"7"}
    for name, content in debris.items():
        (folder / name).write_bytes(content)
    fit(tmp_path, policy(tmp_path, EveryNTrainSteps(5), KeepLast(1)), ckpt_path="last", max_epochs=1)
    assert steps(tmp_path) == [10]
    assert {name: (folder / name).read_bytes() for name in debris} == debris


@pytest.fixture
def two_saved(tmp_path: Path, drained: None) -> list[Path]:
    fit(tmp_path, policy(tmp_path, EveryNTrainSteps(4)), crash_at=9)
    return [tmp_path / "ckpt" / record.path for record in records(tmp_path)]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [flip, lambda path: path.write_bytes(path.read_bytes()[:-1]), Path.unlink])
def test_a_damaged_newest_falls_back_to_the_one_before(
    tmp_path: Path, two_saved: list[Path], damage: Callable[[Path], None]
) -> None:
    damage(two_saved[1])
    run = records(tmp_path)[0].run_id
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        observer = fit(tmp_path, policy(tmp_path, EveryNTrainSteps(4), KeepLast(2)), ckpt_path="last", max_steps=12)
    assert observer.batches[0][0] == 4
    assert any(two_saved[1].name in str(w.message) and two_saved[0].name in str(w.message) for w in caught)
    kept = records(tmp_path)
    assert {record.run_id for record in kept} == {run}
    assert [record.step for record in kept if not record.damaged] == [8, 12]


def test_only_damaged_ones_are_an_error(tmp_path: Path, two_saved: list[Path]) -> None:
    for path in two_saved:
        flip(path)
    with pytest.raises(DamagedCheckpointError, match=r"No older checkpoint.*start afresh"):
        fit(tmp_path, policy(tmp_path, EveryNTrainSteps(4)), ckpt_path="last")


def test_only_missing_payloads_are_an_error(tmp_path: Path, two_saved: list[Path]) -> None:
    for path in two_saved:
        path.unlink()
    with pytest.raises(DamagedCheckpointError, match='ckpt_path="last": none of the 2'):
        fit(tmp_path, policy(tmp_path, EveryNTrainSteps(4)), ckpt_path="last")


@pytest.mark.parametrize(("lost", "begins_at"), [([8], 4), ([4, 8], 0), ([4], 8)])
def test_a_checkpoint_whose_record_is_lost_is_told_of(
    tmp_path: Path, two_saved: list[Path], lost: list[int], begins_at: int
) -> None:
    for record in records(tmp_path):
        if record.step in lost:
            (tmp_path / "ckpt" / f"{record.path}.json").unlink()
    (tmp_path / "ckpt" / "mine-0000000099.ckpt").write_bytes(b"not named like ours")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen = fit(tmp_path, policy(tmp_path, EveryNTrainSteps(99)), ckpt_path="last")
    assert seen.batches[0][0] == begins_at
    told = [str(w.message) for w in caught if "has no record" in str(w.message)]
    assert len(told) == (8 in lost)
    assert all(two_saved[1].name in text and "mine" not in text for text in told)


def test_an_explicit_damaged_path_is_an_error(tmp_path: Path, two_saved: list[Path]) -> None:
    flip(two_saved[1])
    with pytest.raises(DamagedCheckpointError, match=rf'{two_saved[1].name}.*Pass ckpt_path="last"'):
        fit(tmp_path, policy(tmp_path, EveryNTrainSteps(4)), ckpt_path=str(two_saved[1]))


def test_an_explicit_older_path_starts_a_new_run_and_prunes_nothing(tmp_path: Path, two_saved: list[Path]) -> None:
    old = records(tmp_path)
    fit(tmp_path, policy(tmp_path, EveryNTrainSteps(4), KeepLast(1)), ckpt_path=str(two_saved[0]), max_steps=12)
    new = [record for record in records(tmp_path) if record.run_id != old[0].run_id]
    assert [record.step for record in records(tmp_path) if record.run_id == old[0].run_id] == [4, 8]
    assert [(record.step, record.parent) for record in new] == [(12, old[0].run_id)]
    assert all(path.is_file() for path in two_saved)


def test_the_same_step_again_gets_another_name(tmp_path: Path, two_saved: list[Path]) -> None:
    fit(tmp_path, policy(tmp_path, EveryNTrainSteps(4)), ckpt_path=str(two_saved[0]), max_steps=8)
    assert records(tmp_path)[-1].path == "step-0000000008-v1.ckpt"
    assert [record.sequence for record in records(tmp_path)] == [1, 2, 3]


def test_case_27_another_folder_leaves_the_first_one_alone(tmp_path: Path, two_saved: list[Path]) -> None:
    other = CheckpointPolicy(tmp_path / "other", EveryNTrainSteps(4), KeepLast(1))
    fit(tmp_path, other, ckpt_path=str(two_saved[1]), max_steps=12)
    assert steps(tmp_path) == [4, 8]
    assert [(r.step, r.parent) for r in other.store.records()] == [(12, records(tmp_path)[0].run_id)]


def test_resuming_the_newest_continues_the_run_and_its_retention(tmp_path: Path, two_saved: list[Path]) -> None:
    fit(tmp_path, policy(tmp_path, EveryNTrainSteps(4), KeepLast(2)), ckpt_path="last", max_steps=12)
    assert steps(tmp_path) == [8, 12]
    assert len({record.run_id for record in records(tmp_path)}) == 1
    assert [record.attempt for record in records(tmp_path)] == [1, 2]


def test_best_in_a_fresh_process(tmp_path: Path, drained: None) -> None:
    model = Scripted([3, 1, 2])
    fit(tmp_path, policy(tmp_path, AfterValidation(), KeepAll() | KeepBest(1, "score")), model=model, validate=True)
    fresh = policy(tmp_path, AfterValidation(), KeepBest(1, "score"))
    observer = fit(tmp_path, fresh, ckpt_path="best", model=Scripted([1, 1, 1]), validate=True)
    assert observer.batches[0][0] == 20


@pytest.mark.parametrize(("retention", "message"), [(KeepAll(), "no confirmed"), (KeepBest(1, "a"), "metric 'a'")])
def test_best_without_one_says_what_to_do(tmp_path: Path, retention: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf'ckpt_path="best".*{message}.*ckpt_path="last"'):
        fit(tmp_path, policy(tmp_path, AfterValidation(), retention), ckpt_path="best")


def test_best_without_a_monitor_is_the_newest_as_with_model_checkpoint(tmp_path: Path, drained: None) -> None:
    used = policy(tmp_path, EveryNTrainSteps(4))
    fit(tmp_path, used, max_steps=9)
    assert used.best_model_path == used.last_model_path == str(tmp_path / "ckpt" / "step-0000000008.ckpt")
    assert used.best_model_score is None


def test_last_outside_a_fit_with_nothing_saved_is_warned_about(tmp_path: Path) -> None:
    trainer = fit(tmp_path, policy(tmp_path, AtSteps([99])), max_steps=1).trainer  # type: ignore[attr-defined]
    with pytest.warns(UserWarning, match="present weights are used"):
        trainer.validate(Net(), loader("plain"), ckpt_path="last", verbose=False)


def test_last_of_two_policies_is_the_furthest(tmp_path: Path, drained: None) -> None:
    def both() -> list[CheckpointPolicy]:
        return [CheckpointPolicy(tmp_path / name, EveryNTrainSteps(n)) for name, n in (("a", 10), ("b", 3))]

    fit(tmp_path, both(), crash_at=19)
    assert fit(tmp_path, both(), ckpt_path="last", max_steps=20).batches[0][0] == 18


def test_a_folder_is_fixed_at_construction(tmp_path: Path, drained: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    used = CheckpointPolicy("ckpt", EveryNTrainSteps(4))
    fit(tmp_path, used, max_steps=8)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert used.last_model_path == str(tmp_path / "ckpt" / "step-0000000008.ckpt")
    assert fit(tmp_path, used, ckpt_path="last", max_steps=9).batches[0][0] == 8


@pytest.mark.parametrize("name", ["a::b", "with space", "übung", "a#b", "a%20b", "x=[1]"])
def test_odd_folder_names(tmp_path: Path, drained: None, name: str) -> None:
    used = CheckpointPolicy(tmp_path / name, EveryNTrainSteps(4))
    fit(tmp_path, used, max_steps=4)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert fit(tmp_path, used, ckpt_path="last", max_steps=5).batches[0][0] == 4


def test_validate_takes_last_and_best(tmp_path: Path, drained: None) -> None:
    used = policy(tmp_path, AfterValidation(), KeepAll() | KeepBest(1, "val_loss"))
    trainer = fit(tmp_path, used, validate=True).trainer  # type: ignore[attr-defined]
    model = Net()
    for which, path in (("last", used.last_model_path), ("best", used.best_model_path)):
        trainer.validate(model, loader("plain"), ckpt_path=which, verbose=False)
        assert trainer.ckpt_path == path
        assert differences(model.state_dict(), torch.load(path)["state_dict"]) == []


def test_a_checkpoint_of_stock_lightning_is_resumed_from(tmp_path: Path, drained: None) -> None:
    stock = ModelCheckpoint(tmp_path / "stock", every_n_train_steps=4, save_top_k=-1, filename="{step}")
    fit(tmp_path, None, callbacks=[stock], enable_checkpointing=True, max_steps=8)
    observer = fit(
        tmp_path, policy(tmp_path, EveryNTrainSteps(4)), ckpt_path=str(tmp_path / "stock" / "step=4.ckpt"), max_steps=12
    )
    assert observer.batches[0][0] == 4
    assert steps(tmp_path) == [8, 12]


def test_weights_only_checkpoints_are_not_resumed_from(tmp_path: Path, drained: None) -> None:
    fit(tmp_path, policy(tmp_path, EveryNTrainSteps(4), save_weights_only=True), max_steps=8)
    assert all(record.weights_only for record in records(tmp_path))
    assert "optimizer_states" not in torch.load(tmp_path / "ckpt" / records(tmp_path)[0].path)
    with pytest.raises(ValueError, match="save_weights_only=True"):
        fit(tmp_path, policy(tmp_path, EveryNTrainSteps(4)), ckpt_path="last")


def test_a_run_killed_before_its_first_save_is_gone_on_with(tmp_path: Path) -> None:
    fit(tmp_path, policy(tmp_path, AtSteps([9])), crash_at=3, ckpt_path="last")
    fit(tmp_path, policy(tmp_path, AtSteps([9])), ckpt_path="last")
    assert [(record.step, record.attempt) for record in records(tmp_path)] == [(9, 2)]


def test_fit_again_with_the_same_objects(tmp_path: Path, drained: None) -> None:
    used = policy(tmp_path, EveryNTrainSteps(4), KeepLast(2))
    trainer = fit(tmp_path, used, max_steps=8).trainer  # type: ignore[attr-defined]
    trainer.fit_loop.epoch_loop.max_steps = 12
    trainer.fit(trainer.lightning_module, loader())
    assert steps(tmp_path) == [8, 12]
    assert len({record.run_id for record in records(tmp_path)}) == 1


def test_a_superseded_attempt_neither_writes_nor_prunes(tmp_path: Path, drained: None) -> None:
    class Requeue(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            if trainer.global_step == 5:
                store = CheckpointStore(str(tmp_path / "ckpt"))
                store.start_attempt(store.records()[0].run_id)

    used = policy(tmp_path, EveryNTrainSteps(2), KeepLast(1))
    with pytest.warns(UserWarning, match="superseded"), pytest.raises(CheckpointSaveError, match="superseded"):
        fit(tmp_path, used, callbacks=[Requeue()])
    assert steps(tmp_path) == [4]
    assert [outcome.step for outcome in used.history] == [2, 4, 6]


def test_two_policies_in_one_trainer(tmp_path: Path, drained: None) -> None:
    def both() -> list[CheckpointPolicy]:
        return [
            CheckpointPolicy(tmp_path / "a", EveryNTrainSteps(3), KeepLast(1), save_on_train_end=False),
            CheckpointPolicy(tmp_path / "b", EveryNTrainSteps(4), KeepLast(2), save_on_train_end=False),
        ]

    fit(tmp_path, both(), crash_at=13)
    observer = fit(tmp_path, both(), ckpt_path="last", max_steps=17)
    assert observer.batches[0][0] == 12
    first, second = (policy.store.records() for policy in both())
    assert [record.step for record in first] == [15]
    assert [record.step for record in second] == [12, 16]
    assert len({record.run_id for record in second}) == 1


def test_two_policies_do_not_wait_for_each_other(tmp_path: Path) -> None:
    class Wait(Callback):
        def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
            for callback in trainer.checkpoint_callbacks:
                callback._writer.drain(30)  # type: ignore[attr-defined]

    both = [CheckpointPolicy(tmp_path / name, AfterValidation(), KeepBest(9, "val_loss")) for name in ("a", "b")]
    fit(tmp_path, both, callbacks=[Wait()], validate=True)
    for used in both:
        assert [record.step for record in used.store.records()] == [10, 20, 30]
        assert all("val_loss" in record.metrics for record in used.store.records())


def test_a_validation_whose_save_must_wait_is_warned_about(tmp_path: Path, writes: Faults) -> None:
    gate = threading.Event()
    writes.act = lambda call, name: gate.wait(30) and None if call == 1 else None  # type: ignore[func-returns-value]

    class Open(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            if trainer.global_step == 13:
                gate.set()
                trainer.checkpoint_callback._writer.drain(30)  # type: ignore[union-attr]

    used = policy(tmp_path, AtSteps([9]) | AfterValidation())
    with pytest.warns(UserWarning, match="without that validation's metrics"):
        fit(tmp_path, used, callbacks=[Open()], validate=True, max_epochs=2)
    assert [(record.step, dict(record.metrics) != {}) for record in records(tmp_path)][:2] == [(9, False), (13, False)]


def test_with_a_plain_loader_an_epochs_end_waits_for_the_save_before(tmp_path: Path, writes: Faults) -> None:
    writes.act = lambda call, name: time.sleep(0.5)
    fit(tmp_path, policy(tmp_path, EveryNEpochs(1)), train=lambda: loader("plain"))
    assert steps(tmp_path) == [10, 20, 30]


def test_a_monitor_without_a_validation_is_warned_about(tmp_path: Path) -> None:
    keep = KeepBest(1, monitor="train_loss")
    with pytest.warns(UserWarning, match=r"monitor='train_loss'.*no validation"):
        fit(tmp_path, policy(tmp_path, EveryNEpochs(1), keep))


def test_a_fit_that_saves_nothing_says_so(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"nothing was saved.*AfterValidation\(n=1\) was never due"):
        fit(tmp_path, policy(tmp_path, AfterValidation()))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda used: pickle.loads(pickle.dumps(used))])
def test_a_policy_can_be_copied_and_pickled(tmp_path: Path, drained: None, copied: Any) -> None:
    used = policy(tmp_path, EveryNTrainSteps(4), KeepLast(1))
    again = copied(used)
    assert again.trigger == used.trigger
    fit(tmp_path, again, max_steps=8)
    after = copied(again)
    assert after.last_model_path == again.last_model_path
    assert [record.step for record in after.deleted] == [4]
    fit(tmp_path, after, ckpt_path="last", max_steps=12)
    assert steps(tmp_path) == [12]
    assert [outcome.step for outcome in again.history] == [4, 8]


def test_a_delete_that_hangs_stops_no_save(tmp_path: Path, deletes: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_ckpt_policy.ledger.DELETE_TIMEOUT", 0.1)
    monkeypatch.setattr("lightning_ckpt_policy.callback.DELETE_TIMEOUT", 0.1)
    monkeypatch.setattr("lightning_ckpt_policy.callback.GRACE", 1.0)
    gate = threading.Event()
    deletes.act = lambda call, name: gate.wait(60) and None  # type: ignore[func-returns-value]

    class Wait(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            trainer.checkpoint_callback._writer.drain(30, saves_only=True)  # type: ignore[union-attr]

    used = policy(tmp_path, EveryNTrainSteps(5), KeepLast(1), save_on_train_end=True)
    with pytest.warns(UserWarning, match=r"could not be deleted.*TimeoutError"):
        fit(tmp_path, used, callbacks=[Wait()])
    gate.set()
    assert [outcome.step for outcome in used.history if outcome.record] == [5, 10, 15, 20, 25, 30]
    assert used.last_model_path.endswith("step-0000000030.ckpt")


def test_a_save_that_hangs_at_the_end_is_an_error(
    tmp_path: Path, writes: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    writes.act = lambda call, name: gate.wait(60) and None  # type: ignore[func-returns-value]
    with pytest.raises(CheckpointSaveError, match=r"save_timeout=0\.3"):
        fit(tmp_path, policy(tmp_path, AtSteps([30]), save_timeout=0.3))
    gate.set()


def test_a_process_that_saves_on_while_it_is_requeued(tmp_path: Path, drained: None) -> None:
    """The older process confirms another checkpoint, and deletes the one that was selected, before the newer begins."""
    fit(tmp_path, policy(tmp_path, EveryNTrainSteps(4), KeepLast(1)), crash_at=9)
    run = records(tmp_path)[0].run_id

    class Older(Callback):
        def __init__(self) -> None:
            self.saved = False

        def setup(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
            if not self.saved:
                self.saved = True
                older = policy(tmp_path, EveryNTrainSteps(4), KeepLast(1))
                fit(tmp_path, older, ckpt_path="last", max_steps=13)

    newer = policy(tmp_path, EveryNTrainSteps(4), KeepLast(1))
    observer = fit(tmp_path, newer, callbacks=[Older()], ckpt_path="last", max_steps=17)
    assert observer.batches[0][0] == 12
    assert [(record.run_id, record.step) for record in records(tmp_path)] == [(run, 16)]


def test_a_reason_of_any_length_makes_a_record_that_can_be_read(tmp_path: Path, drained: None) -> None:
    fit(tmp_path, policy(tmp_path, AtSteps(range(1, 400_000, 2))), max_steps=3)
    assert steps(tmp_path) == [1, 3]
    assert records(tmp_path)[0].reason[0].startswith("AtSteps(steps=(1, 3, 5")


def test_metrics_too_large_for_a_record_are_said_before_anything_is_written(tmp_path: Path, drained: None) -> None:
    class Many(Net):
        def on_validation_epoch_end(self) -> None:
            self.log_dict({f"{'x' * 1000}{index}": 0.0 for index in range(1200)})

    with (
        pytest.warns(UserWarning, match=r"could not be saved.*log fewer metrics"),
        pytest.raises(CheckpointSaveError),
    ):
        fit(tmp_path, policy(tmp_path, AfterValidation()), model=Many, validate=True, max_epochs=1)
    assert list((tmp_path / "ckpt").glob("*.ckpt*")) == []


def test_pinning_during_a_fit_is_respected_without_a_word(tmp_path: Path, drained: None) -> None:
    class Pin(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            if trainer.global_step == 3:
                store = CheckpointStore(str(tmp_path / "ckpt"))
                store.pin(store.records()[-1])

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(tmp_path, policy(tmp_path, EveryNTrainSteps(2), KeepLast(1)), callbacks=[Pin()], max_epochs=1)
    assert steps(tmp_path) == [2, 10]
    assert not [warning for warning in caught if "deleted" in str(warning.message)]


def test_a_folder_that_became_read_only_still_gives_its_checkpoints(
    tmp_path: Path, two_saved: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(two_saved[1])

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(LocalBackend, "write", refuse)
    trainer = fit(tmp_path, None, max_steps=1).trainer  # type: ignore[attr-defined]
    trainer.callbacks.append(policy(tmp_path, AtSteps([99])))
    with pytest.warns(UserWarning, match="could not be marked as damaged"):
        trainer.validate(Net(), loader("plain"), ckpt_path="last", verbose=False)


def test_a_loggers_error_does_not_mask_a_training_error(tmp_path: Path, writes: Faults) -> None:
    class Broken(DummyLogger):
        def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
            raise ConnectionError("the logger's")

    writes.act = lambda call, name: time.sleep(0.3)
    with pytest.warns(UserWarning, match="after_save_checkpoint failed: ConnectionError"):
        fit(tmp_path, policy(tmp_path, AtSteps([9])), logger=Broken(), crash_at=10)
    assert steps(tmp_path) == [9]


def test_raw_optimizers_that_lightning_does_not_count_are_warned_about(tmp_path: Path) -> None:
    class Raw(TwoOptimizers):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:  # type: ignore[override]
            for optimizer in self.optimizers(use_pl_optimizer=False):  # type: ignore[union-attr]
                optimizer.zero_grad()
                self.body(batch).pow(2).mean().backward()
                optimizer.step()

    with pytest.warns(UserWarning, match="use_pl_optimizer=False"):
        fit(tmp_path, policy(tmp_path, EveryNTrainSteps(1)), model=Raw, max_epochs=1)


def test_nothing_is_left_in_lightning_and_torch(tmp_path: Path, drained: None) -> None:
    fit(tmp_path, policy(tmp_path, EveryNTrainSteps(4)), max_steps=5, model=TwoOptimizers)
    for options in ({}, {"crash_at": 9}, {"train": lambda: 1 / 0}):
        used = policy(tmp_path, EveryNTrainSteps(4))
        try:
            trainer = fit(tmp_path, used, ckpt_path="last", model=TwoOptimizers, **options).trainer  # type: ignore
        except ZeroDivisionError:
            continue
        assert not {"process_dataloader", "on_train_start"} & set(trainer.strategy.__dict__)
        assert all(not optimizer._optimizer_step_post_hooks for optimizer in trainer.optimizers)


def test_retries_draw_no_random_numbers_of_the_training(tmp_path: Path, writes: Faults) -> None:
    def act(call: int, name: str) -> None:
        if call in (1, 3):
            raise OSError(5, "try again")

    writes.act = act
    without = fit(tmp_path, None)
    used = policy(tmp_path, AtSteps([3, 9, 15]), save_on_train_end=True)

    class Wait(Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            used._writer.drain(30)

    saved = fit(tmp_path, used, callbacks=[Wait()])
    assert len(writes.calls) == 6
    assert differences(without.final, saved.final) == []


def test_a_restart_with_nothing_left_to_train_still_clears_up(tmp_path: Path, drained: None) -> None:
    fit(tmp_path, policy(tmp_path, EveryNTrainSteps(4), KeepAll()), max_steps=8)
    run = records(tmp_path)[0].run_id
    CheckpointStore(str(tmp_path / "ckpt")).begin(8, run, 1)
    used = policy(tmp_path, EveryNTrainSteps(4), KeepLast(1))
    fit(tmp_path, used, ckpt_path="last", max_steps=8)
    assert sorted(path.name for path in (tmp_path / "ckpt").iterdir() if path.is_file()) == [
        "step-0000000008.ckpt",
        "step-0000000008.ckpt.json",
    ]
    assert "ckpt-writer" not in [thread.name for thread in threading.enumerate()]
    assert [attempt.status for attempt in used.store.attempts()] == ["finished", "finished"]


# the same training with and without


@pytest.mark.parametrize("validate", [False, True])
def test_saving_changes_nothing(tmp_path: Path, drained: None, validate: bool) -> None:
    without = fit(tmp_path, None, validate=validate)
    saved = fit(tmp_path, policy(tmp_path, EveryNTrainSteps(1), KeepLast(1)), validate=validate)
    assert len(saved.trainer.checkpoint_callback.history) == 30  # type: ignore[attr-defined]
    assert saved.batches == without.batches
    assert differences(without.final, saved.final) == []


def test_a_save_of_the_user_stays_synchronous_and_equal(tmp_path: Path) -> None:
    class Save(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            if trainer.global_step == 4:
                trainer.save_checkpoint(tmp_path / "mine.ckpt")
                assert (tmp_path / "mine.ckpt").is_file()

    fit(tmp_path, policy(tmp_path, AtSteps([4])), callbacks=[Save()], max_steps=5)
    mine = torch.load(tmp_path / "mine.ckpt", weights_only=True)
    ours = torch.load(tmp_path / "ckpt" / records(tmp_path)[0].path, weights_only=True)
    own = (mine.pop("lightning_ckpt_policy"), ours.pop("lightning_ckpt_policy"))
    assert differences(mine, ours) == []
    assert differences(own[0]["rng"], own[1]["rng"]) == []
    assert not (tmp_path / "mine.ckpt.json").exists()


# bad input


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"trigger": EveryNTrainSteps}, TypeError, "trigger="),
        ({"trigger": 5}, TypeError, "trigger=5"),
        ({"retention": 5}, TypeError, "retention=5"),
        ({"dirpath": 5}, TypeError, "dirpath=5"),
        ({"filename": "last"}, ValueError, "filename='last'.*step"),
        ({"filename": "{val_loss}-{step}"}, ValueError, "filename=.*step alone"),
        ({"filename": "a/{step}"}, ValueError, "filename=.*separators"),
        ({"filename": 3}, TypeError, "filename=3"),
        ({"max_consecutive_failures": 0}, ValueError, "max_consecutive_failures=0"),
        ({"max_consecutive_failures": True}, ValueError, "max_consecutive_failures=True"),
        ({"storage_options": "abc"}, TypeError, "storage_options must be a dict"),
        ({"save_weights_only": "no"}, TypeError, "save_weights_only='no'"),
        ({"save_on_train_end": 1}, TypeError, "save_on_train_end=1"),
        ({"save_timeout": 0}, ValueError, "save_timeout=0"),
        ({"verify": "always"}, ValueError, "verify='always'"),
        ({"save_timeout": float("nan")}, ValueError, "save_timeout=nan"),
    ],
)
def test_bad_arguments_are_refused_at_construction(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        CheckpointPolicy(**{"dirpath": "x", **options})


def test_an_unknown_protocol_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"dirpath.*nosuch"):
        fit(tmp_path, CheckpointPolicy("nosuch://bucket/x", AtSteps([3])))


@pytest.mark.parametrize("other", ["ckpt/", "./ckpt", "link"])
def test_two_policies_on_one_folder_are_refused(tmp_path: Path, other: str) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "ckpt")
    twice = [policy(tmp_path, AtSteps([3])), CheckpointPolicy(f"{tmp_path}/{other}", AtSteps([4]))]
    with pytest.raises(ValueError, match="two CheckpointPolicy callbacks share dirpath"):
        fit(tmp_path, twice)


def test_a_trainer_of_pytorch_lightning_is_refused(tmp_path: Path) -> None:
    pl = pytest.importorskip("pytorch_lightning")

    class Other(pl.LightningModule):  # type: ignore[misc, name-defined]
        def training_step(self, batch: Any, batch_idx: int) -> None:
            return None

        def configure_optimizers(self) -> None:
            return None

    trainer = pl.Trainer(
        callbacks=[policy(tmp_path, AtSteps([3]))],
        max_steps=1,
        logger=False,
        default_root_dir=str(tmp_path),
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with pytest.raises(TypeError, match=r"lightning\.pytorch\.Trainer, not with pytorch_lightning"):
        trainer.fit(Other(), loader("plain"))


def test_a_checkpoint_io_it_cannot_work_with_is_refused(tmp_path: Path) -> None:
    from lightning.pytorch.plugins.io import AsyncCheckpointIO as StockAsyncCheckpointIO

    with pytest.raises(ValueError, match=r"AsyncCheckpointIO.*leave it out"):
        fit(tmp_path, policy(tmp_path, AtSteps([3])), plugins=[StockAsyncCheckpointIO()])


class OwnStrategy(strategies.SingleDeviceStrategy):
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None: ...


@pytest.mark.parametrize(
    "kind",
    [
        OwnStrategy,
        strategies.FSDPStrategy,
        strategies.ModelParallelStrategy,
        strategies.DeepSpeedStrategy,
        strategies.XLAStrategy,
        strategies.SingleDeviceXLAStrategy,
    ],
)
def test_a_strategy_it_cannot_work_with_is_refused(tmp_path: Path, kind: type[strategies.Strategy]) -> None:
    used = policy(tmp_path, AtSteps([3]))
    trainer = Trainer(callbacks=[used], accelerator="cpu", logger=False)
    trainer._accelerator_connector.strategy = object.__new__(kind)  # some can't be made without their package
    with pytest.raises(ValueError, match=f"strategy={kind.__name__} saves checkpoints in its own way.*ddp"):
        used.setup(trainer, Net(), "fit")


def test_a_custom_retention_and_trigger(tmp_path: Path, drained: None) -> None:
    class Odd(Retention):
        def keep(self, records: Any, now: float) -> set[int]:
            return {record.sequence for record in records if record.step % 2}

    fit(tmp_path, policy(tmp_path, lambda now, since: now.step - since.step >= 3, Odd()), max_steps=12)  # type: ignore[arg-type]
    assert steps(tmp_path) == [3, 9, 12]


def test_default_folder_is_found_again(tmp_path: Path, drained: None) -> None:
    fit(tmp_path, CheckpointPolicy(trigger=EveryNTrainSteps(4)), crash_at=6)
    observer = fit(tmp_path, CheckpointPolicy(trigger=EveryNTrainSteps(4)), ckpt_path="last", max_steps=8)
    assert observer.batches[0][0] == 4
    assert (tmp_path / "checkpoints" / "step-0000000008.ckpt").is_file()


def test_limits_are_said_at_the_start(tmp_path: Path) -> None:
    class Moving(Net):
        def on_train_batch_end(self, *args: Any) -> None:
            pass

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(tmp_path, policy(tmp_path, AtSteps([3])), model=Moving(), train=lambda: loader("plain"), max_steps=2)
    text = " ".join(str(warning.message) for warning in caught)
    assert "no state_dict" in text
    assert "Moving.on_train_batch_end" in text


def test_an_interrupt_while_the_last_save_is_waited_for_still_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = CheckpointPolicy._drain
    interrupts: list[int] = []

    def drain(self: CheckpointPolicy, *args: Any, **kwargs: Any) -> bool:
        if self._since.step == 30 and not interrupts:
            interrupts.append(30)
            raise KeyboardInterrupt
        return original(self, *args, **kwargs)

    monkeypatch.setattr(CheckpointPolicy, "_drain", drain)
    used = policy(tmp_path, AtSteps([99]), save_on_train_end=True)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fit(tmp_path, used)
    assert interrupts == [30]
    assert [outcome.record is not None for outcome in used.history] == [True]
    assert steps(tmp_path) == [30]
    assert [attempt.status for attempt in used.store.attempts()] == ["stopped"]
    assert used._staging.size == 0


class OddState(torch.optim.SGD):
    """Keeps a bare tensor for each parameter."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = torch.zeros(3)
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"odd": len(self.state)}


def test_an_optimizer_whose_state_is_no_dict(tmp_path: Path, drained: None) -> None:
    class Odd(Net):
        def configure_optimizers(self) -> Any:
            return OddState(self.parameters(), lr=0.01)

    fit(tmp_path, policy(tmp_path, EveryNTrainSteps(4), KeepAll()), model=Odd, max_steps=8)
    assert steps(tmp_path) == [4, 8]


def test_a_barrier_that_was_never_reached_ends_with_its_fit(
    tmp_path: Path, drained: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when an interrupt comes just there."""
    used = policy(tmp_path, EveryNTrainSteps(4), KeepAll())
    with monkeypatch.context() as patch:
        patch.setattr("lightning_ckpt_policy.barrier.Barrier.reach", lambda *args, **kwargs: None)
        fit(tmp_path, used, max_steps=5, crash_at=4)
    assert used._overlap is not None
    fit(tmp_path, used, max_steps=9)
    assert steps(tmp_path) == [4, 8]


@pytest.mark.timeout(180)
def test_training_in_a_process_that_a_launcher_spawns(tmp_path: Path) -> None:
    used = policy(tmp_path, EveryNTrainSteps(4), KeepAll())
    fit(tmp_path, used, max_steps=8, strategy="ddp_spawn", devices=1, train=partial(loader, "plain"))
    assert steps(tmp_path)[-1] == 8
    assert used.best_model_path == used.last_model_path == str(tmp_path / "ckpt" / "step-0000000008.ckpt")


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (float("inf"), ValueError),
        (float("nan"), ValueError),
        (1e10, ValueError),
        (0, ValueError),
        (-1, ValueError),
        ("5", TypeError),
        (None, TypeError),
        (True, TypeError),
    ],
)
def test_a_time_limit_that_cannot_be_kept_is_refused(tmp_path: Path, value: Any, error: type[Exception]) -> None:
    for make in (partial(policy, tmp_path, AtSteps([4])), AsyncCheckpointIO):
        with pytest.raises(error, match=f"save_timeout={value!r} must be"):
            make(save_timeout=value)


@pytest.mark.parametrize("how", ["the user's own", "its record was lost"])
def test_a_file_without_a_record_in_the_same_folder_is_loaded(tmp_path: Path, drained: None, how: str) -> None:
    first = policy(tmp_path, AtSteps([4]), KeepAll())
    observer = fit(tmp_path, first, max_steps=4)
    path = Path(first.last_model_path)
    if how == "the user's own":
        path = tmp_path / "ckpt" / "mine.ckpt"
        observer.trainer.save_checkpoint(path)  # type: ignore[attr-defined]
    else:
        path.with_name(path.name + ".json").unlink()
    with pytest.warns(UserWarning, match="has no record"):
        fit(tmp_path, policy(tmp_path, AtSteps([8]), KeepAll()), ckpt_path=str(path), max_steps=8)
    assert steps(tmp_path)[-1] == 8


def test_a_path_in_the_folder_that_is_not_there_is_said_to_be_missing(tmp_path: Path, drained: None) -> None:
    fit(tmp_path, policy(tmp_path, AtSteps([4]), KeepAll()), max_steps=4)
    missing = str(tmp_path / "ckpt" / "step-0000000099.ckpt")
    with pytest.warns(UserWarning, match="has no record"), pytest.raises(FileNotFoundError, match="step-0000000099"):
        fit(tmp_path, policy(tmp_path, AtSteps([8])), ckpt_path=missing, max_steps=8)


def test_a_save_due_at_the_step_at_which_early_stopping_ends_the_fit(tmp_path: Path, writes: Faults) -> None:
    """Also while the one before it is still being written."""

    def act(call: int, name: str) -> None:
        time.sleep(0.3)

    writes.act = act
    stop = EarlyStopping("train_loss", patience=0, divergence_threshold=-1.0, check_on_train_epoch_end=True)
    used = policy(tmp_path, AtSteps([9, 10]), KeepAll(), save_on_train_end=True)
    fit(tmp_path, used, callbacks=[stop])
    assert steps(tmp_path) == [9, 10]
