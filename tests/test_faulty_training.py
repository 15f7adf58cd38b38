"""Real fits over a store that goes wrong: training is the same, what is there is whole, what is lost is said."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import random
import subprocess
import threading
import time
import tracemalloc
import uuid
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_ckpt_policy import (
    AfterValidation,
    AtSteps,
    CheckpointPolicy,
    CheckpointRecord,
    CheckpointSaveError,
    CheckpointStore,
    DamagedCheckpointError,
    EveryNTrainSteps,
    KeepAll,
    KeepBest,
    KeepLast,
    backends,
    callback,
    io,
    ledger,
    retry,
)
from lightning_ckpt_policy.snapshot import Image
from tests.faults import Fault, FaultyOs, Schedule, register
from tests.models import Net, Observer, differences, fit
from tests.store_conformance import Folder

register()
pytestmark = pytest.mark.timeout(60)
KINDS = ("file", "memory", "objects")
TIMEOUT = 0.4  # seconds a save may take where the store hangs
BOUND = 8.0  # seconds after which a wait counts as endless, and the hang is ended


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waits between tries, and a short one at the end."""
    monkeypatch.setattr(retry, "_wait", lambda _: 0.0)
    monkeypatch.setattr(callback, "GRACE", 0.5)
    monkeypatch.setattr(io, "GRACE", 0.5)
    monkeypatch.setattr(callback, "DELETE_TIMEOUT", TIMEOUT)
    monkeypatch.setattr(ledger, "DELETE_TIMEOUT", TIMEOUT)


class Bench:
    """A folder, a policy that sees it through faults, and a store that sees it without."""

    def __init__(self, kind: str, root: Path, schedule: Schedule) -> None:
        self.schedule = schedule
        self.root = root
        self.path = f"{root}/ckpt" if kind == "file" else f"/{uuid.uuid4().hex}/ckpt"
        self.kind = kind
        self.plain = CheckpointStore(self.path if kind == "file" else f"{kind}:/{self.path}")
        self.folder = Folder(self.path if kind == "file" else f"{kind}:/{self.path}", {})

    def policy(self, trigger: Any, retention: Any = None, **options: Any) -> CheckpointPolicy:
        return CheckpointPolicy(
            f"faulty://{self.path}",
            trigger,
            KeepAll() if retention is None else retention,
            storage_options={"target_protocol": self.kind, "schedule": self.schedule},
            **{"save_on_train_end": False, **options},
        )

    def records(self) -> list[CheckpointRecord]:
        """All of them, each verified."""
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            records = self.plain.records()
        for record in records:
            self.plain.verify(record)
        return records

    def steps(self) -> list[int]:
        return [record.step for record in self.records()]

    def debris(self) -> set[str]:
        """What is there besides checkpoints and notes of attempts."""
        expected = {name for record in self.records() for name in (record.path, record.path + ".json")}
        return {name for name in self.folder.files() if not name.startswith("attempts/")} - expected


@pytest.fixture
def schedule(monkeypatch: pytest.MonkeyPatch) -> Iterator[Schedule]:
    used = Schedule()
    monkeypatch.setattr(backends, "os", FaultyOs(used))
    yield used
    used.faults.clear()
    used.rate = 0
    used.release.set()
    for thread in threading.enumerate():
        if thread.name == "ckpt-save":
            thread.join(5)


@pytest.fixture
def bench(tmp_path: Path, schedule: Schedule) -> Bench:
    return Bench("file", tmp_path, schedule)


def ours() -> list[str]:
    """The threads of this package."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("ckpt-")]


def wait_for(condition: Callable[[], bool], seconds: float = 15) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it didn't come about in time"
        time.sleep(0.01)


class At(Callback):
    """Calls functions before the first batch at which so many steps are done, with no save on its way."""

    def __init__(self, used: CheckpointPolicy, **acts: Callable[[], object]) -> None:
        self.used = used
        self.acts = {int(name.removeprefix("step_")): act for name, act in acts.items()}
        self.stuck = False
        self.patience = used.save_timeout + 2 if used.save_timeout < 60 else 20.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.stuck = self.stuck or not self.used._writer.drain(self.patience, saves_only=True)
        for step in [step for step in self.acts if step <= trainer.global_step]:
            self.acts.pop(step)()


def messages(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(warning.message) for warning in caught]


# random faults


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return fit(tmp_path_factory.mktemp("plain"), None, validate=True, val_check_interval=5).final


class Watch(Callback):
    """Lets faults begin once training has begun; asserts before each batch that what is named is whole."""

    def __init__(self, bench: Bench, used: CheckpointPolicy, whole: Callable[[str], None]) -> None:
        self.bench, self.used, self.whole = bench, used, whole
        self.rate = bench.schedule.rate
        bench.schedule.rate = 0.0

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        self.used._writer.drain(30)
        self.bench.schedule.rate = 0.0
        self.look()
        self.bench.schedule.rate = self.rate

    def look(self) -> None:
        for path in (self.used.last_model_path, self.used.best_model_path):
            if path:
                self.whole(path)
        there = {record.path for record in self.used._ledger.records}  # type: ignore[union-attr]
        confirmed = [outcome.record for outcome in self.used.history if outcome.record is not None]
        if confirmed:
            assert confirmed[-1].path in there
            assert confirmed[-1].path in {record.path for record in self.bench.plain.records()}


class WholeLogger(DummyLogger):
    """Asserts that what it is told of is whole."""

    def __init__(self, whole: Callable[[str], None]) -> None:
        super().__init__()
        self.whole = whole
        self.told: list[str] = []

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        self.whole(checkpoint_callback.last_model_path)
        self.told.append(checkpoint_callback.last_model_path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_random_faults_of_every_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: dict[str, Any], kind: str, seed: int
) -> None:
    draw = random.Random(seed)
    actions = ("error", "error_after", "short", "truncate", "delay", "lag")
    schedule = Schedule(rate=draw.uniform(0.02, 0.15), seed=seed, actions=actions)
    monkeypatch.setattr(backends, "os", FaultyOs(schedule))
    bench = Bench(kind, tmp_path, schedule)

    def whole(path: str) -> None:
        name = path.rpartition("/")[2]
        rate, schedule.rate = schedule.rate, 0.0
        bench.plain.verify(next(record for record in bench.plain.records() if record.path == name))
        schedule.rate = rate

    used = bench.policy(
        EveryNTrainSteps(1), KeepLast(2) | KeepBest(1, "val_loss"), max_consecutive_failures=99, save_on_train_end=True
    )
    watch, logger, observer = Watch(bench, used, whole), WholeLogger(whole), Observer()
    ended = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            fit(tmp_path, used, validate=True, val_check_interval=5, callbacks=[watch, observer], logger=logger)
        except CheckpointSaveError:
            ended = False
    schedule.rate = 0.0
    assert schedule.hits > 20
    assert differences(undisturbed, observer.final) == []
    assert [outcome.step for outcome in used.history] == list(range(1, 31))
    assert ended == (used.history[-1].record is not None)
    assert len(logger.told) == sum(outcome.record is not None for outcome in used.history) > 0
    records = bench.records()
    confirmed = [outcome.record.path for outcome in used.history if outcome.record is not None]
    assert confirmed[-1] in [record.path for record in records]
    # a fit without faults goes on from there, and clears up
    after = bench.policy(EveryNTrainSteps(1), KeepLast(1), save_on_train_end=True)
    resumed = fit(tmp_path, after, ckpt_path="last", max_epochs=4, validate=True)
    assert resumed.batches == [] or resumed.batches[0][0] == records[-1].step
    assert bench.steps() == [40]
    assert bench.debris() == set()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0, 1])
def test_flipped_bits_are_found_and_cost_one_checkpoint_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: dict[str, Any], kind: str, seed: int
) -> None:
    schedule = Schedule(rate=0.1, seed=seed, actions=["flip"])
    monkeypatch.setattr(backends, "os", FaultyOs(schedule))
    bench = Bench(kind, tmp_path, schedule)
    used = bench.policy(EveryNTrainSteps(1), KeepLast(3), max_consecutive_failures=99)
    observer = Observer()
    watch = Watch(bench, used, lambda path: None)
    monkeypatch.setattr(watch, "look", lambda: None)  # a record that was damaged on its way can't be read

    class Stop(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            if trainer.global_step >= 25:
                watch.rate = 0.0

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(tmp_path, used, validate=True, val_check_interval=5, callbacks=[watch, Stop(), observer])
        records = bench.plain.records()
    assert differences(undisturbed, observer.final) == []
    assert [record.step for record in records][-3:] == [28, 29, 30]
    whole = 0
    for record in records:
        with contextlib.suppress(DamagedCheckpointError):
            held = torch.load(bench.plain.open_verified(record), weights_only=True)
            assert held["global_step"] == record.step
            whole += 1
    assert whole >= 3


@pytest.mark.parametrize("kind", ["memory", "objects"])
def test_a_marker_that_was_damaged_is_no_other_process(
    tmp_path: Path, schedule: Schedule, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def first_byte(data: Any, found: set[str]) -> bytes:
        return b"[" + bytes(data)[1:] if "flip" in found else bytes(data)

    monkeypatch.setattr("tests.faults._mangled", first_byte)
    bench = Bench(kind, tmp_path, schedule)
    used = bench.policy(AtSteps([5, 10, 15]), max_consecutive_failures=9)
    schedule.faults.append(Fault("flip", op="pipe_file", kth=1, path="10.ckpt.pending"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(tmp_path, used, callbacks=[At(used)])
    assert [text for text in messages(caught) if "Stop the older process" in text] == []
    assert [outcome.step for outcome in used.history] == [5, 10, 15]
    assert bench.steps()[-1] == 15


@pytest.mark.parametrize("slow", [False, True])
def test_no_attribute_names_a_checkpoint_that_is_being_deleted(bench: Bench, slow: bool) -> None:
    """The best one isn't kept where the rule asks for the best and the last in one."""
    gone: list[str] = []
    used = bench.policy(AfterValidation(), KeepBest(1, "score") & KeepLast(1), max_consecutive_failures=99)

    class Scripted(Net):
        def on_validation_epoch_end(self) -> None:
            self.log("score", float(self.global_step))

    class Look(Callback):
        def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
            used._writer.drain(20, saves_only=True)
            if not slow:
                used._writer.drain(20)
            elif trainer.global_step == 11:
                wait_for(lambda: not (bench.root / "ckpt" / "step-0000000005.ckpt").exists())
            path = used.best_model_path
            if path and not Path(path).is_file():
                gone.append(path)

    # the payload is deleted, and then its marker can't be, or not at once
    fault = Fault("delay", seconds=0.5) if slow else Fault("error", error=refused)
    fault.op, fault.path = "rm_file", "05.ckpt.pending"

    class Arm(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            if trainer.global_step == 8:
                bench.schedule.faults.append(fault)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(bench.root, used, model=Scripted(), validate=True, val_check_interval=5, callbacks=[Look(), Arm()])
    assert fault.seen
    assert gone == []


def refused() -> Exception:
    return PermissionError(errno.EACCES, "injected refusal")


# a store that hangs


@pytest.mark.parametrize(
    ("kind", "op", "path"),
    [
        ("file", "open", ".tmp"),
        ("file", "write", ".tmp"),
        ("file", "os.fsync", ".tmp"),
        ("file", "os.replace", ".ckpt"),
        ("file", "os.replace", ".ckpt.json"),
        ("file", "cat_file", ""),
        ("file", "ls", ""),
        ("memory", "pipe_file", ".ckpt"),
        ("objects", "close", ".ckpt"),
    ],
)
def test_a_hung_save_is_given_up_and_later_ones_succeed(
    tmp_path: Path, schedule: Schedule, kind: str, op: str, path: str
) -> None:
    bench = Bench(kind, tmp_path, schedule)
    used = bench.policy(AtSteps([5, 10, 15, 20]), save_timeout=TIMEOUT, max_consecutive_failures=9)

    def hang() -> None:
        schedule.faults.append(Fault("hang", op=op, path=path))

    def end() -> None:
        assert schedule.hanging.is_set()
        schedule.faults.clear()
        schedule.release.set()
        wait_for(lambda: "ckpt-save" not in ours())

    observer = Observer()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(tmp_path, used, callbacks=[At(used, step_6=hang, step_16=end), observer])
    failed = [text for text in messages(caught) if "could not be saved" in text]
    assert [f"step {step} could not" in text for step, text in zip((10, 15), failed, strict=True)] == [True, True]
    assert all(f"save_timeout={TIMEOUT:g}" in text and "Training goes on" in text for text in failed)
    assert [(o.step, o.record is not None) for o in used.history] == [(5, True), (10, False), (15, False), (20, True)]
    assert bench.steps() == [5, 20]
    assert observer.final["step"] == 30
    assert ours() == []
    # what the abandoned threads could not clear away is swept at the next start
    fit(tmp_path, bench.policy(AtSteps([31])), ckpt_path="last", max_steps=31)
    assert bench.debris() == set()


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_nothing_is_confirmed_late(tmp_path: Path, schedule: Schedule, kind: str) -> None:
    """The store takes the record at last, long after the save was given up."""
    bench = Bench(kind, tmp_path, schedule)
    used = bench.policy(AtSteps([5, 10, 20]), save_timeout=TIMEOUT, max_consecutive_failures=9)
    op = "os.replace" if kind == "file" else "pipe_file"

    def slow() -> None:
        schedule.faults.append(Fault("delay", op=op, kth=1, path="10.ckpt.json", seconds=3 * TIMEOUT))

    def wait() -> None:
        wait_for(lambda: "ckpt-save" not in ours())

    with pytest.warns(UserWarning, match="step 10 could not be saved"):
        fit(tmp_path, used, callbacks=[At(used, step_6=slow, step_12=wait)])
    assert [(outcome.step, outcome.record is not None) for outcome in used.history] == [
        (5, True),
        (10, False),
        (20, True),
    ]
    assert bench.steps() == [5, 20]


def big(megabytes: int) -> Callable[[], Net]:
    """A module whose state is so large."""

    def make() -> Net:
        module = Net()
        module.register_buffer("ballast", torch.ones(megabytes << 18))
        return module

    return make


class Snapshots:
    """Keeps an eye on the memory of each image that is taken."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.images: list[Image] = []
        self.chunks: list[weakref.ref[Any]] = []
        original = io.take_snapshot

        def take(*args: Any) -> Image:
            image = original(*args)
            self.images.append(image)
            self.chunks += [weakref.ref(chunk) for chunk in image._chunks or ()]
            return image

        monkeypatch.setattr(io, "take_snapshot", take)

    def held(self) -> list[bool]:
        return [image._chunks is not None for image in self.images]

    def alive(self) -> int:
        """How many chunks of memory there still are."""
        gc.collect()
        return sum(chunk() is not None for chunk in self.chunks)


@pytest.mark.parametrize("kind", ["file", "objects"])
def test_the_memory_of_a_hung_save_is_free_while_it_hangs(
    tmp_path: Path, schedule: Schedule, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """But for the one chunk (8 MiB) that the store's call holds."""
    bench, images = Bench(kind, tmp_path, schedule), Snapshots(monkeypatch)
    used = bench.policy(AtSteps([3]), save_timeout=2.0)
    counts: list[int] = []

    def begin() -> None:
        # of the files' writes the first is the marker's
        hang = Fault("hang", op="write", kth=4, path=".tmp") if kind == "file" else Fault("hang", op="close")
        schedule.faults.append(hang)

    def look() -> None:
        assert schedule.hanging.is_set()
        assert images.held() == [False]
        counts.append(images.alive())

    with warnings.catch_warnings(), contextlib.suppress(CheckpointSaveError):
        warnings.simplefilter("ignore")
        fit(tmp_path, used, model=big(48), callbacks=[At(used, step_2=begin, step_5=look)], max_steps=6)
    assert len(images.chunks) >= 7
    assert counts[0] <= 1


@pytest.mark.parametrize("kind", KINDS)
def test_saves_that_failed_hold_no_memory(tmp_path: Path, schedule: Schedule, kind: str) -> None:
    bench = Bench(kind, tmp_path, schedule)
    used = bench.policy(EveryNTrainSteps(1), max_consecutive_failures=99)
    traced: list[int] = []

    def look() -> None:
        gc.collect()
        traced.append(tracemalloc.get_traced_memory()[0] + used._staging.size)

    op = {"file": "os.replace", "memory": "pipe_file", "objects": "close"}[kind]
    schedule.faults.append(Fault("error", op=op, path=".ckpt", error=refused))
    tracemalloc.start()
    try:
        with warnings.catch_warnings(), contextlib.suppress(CheckpointSaveError):
            warnings.simplefilter("ignore")
            fit(tmp_path, used, model=big(4), callbacks=[At(used, step_3=look, step_12=look)], max_steps=13)
    finally:
        tracemalloc.stop()
    assert all(outcome.record is None for outcome in used.history)
    assert len(used.history) == 13
    assert traced[1] - traced[0] < 4 << 20


def test_a_hung_delete_costs_no_later_save(bench: Bench) -> None:
    used = bench.policy(AtSteps([5, 10, 15, 30]), KeepLast(1), save_timeout=TIMEOUT, max_consecutive_failures=9)

    def hang() -> None:
        bench.schedule.faults.append(Fault("hang", op="rm_file", path="05.ckpt.json"))

    ended = threading.Timer(BOUND, bench.schedule.release.set)
    ended.start()
    began = time.monotonic()
    error: Exception | None = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            fit(bench.root, used, callbacks=[At(used, step_6=hang)])
        except CheckpointSaveError as raised:
            error = raised
    took = time.monotonic() - began
    ended.cancel()
    assert bench.schedule.hanging.is_set()
    # nothing may be lost without a word
    assert 30 in bench.steps() or error is not None, messages(caught)
    assert bench.steps() == [5, 30]
    assert [(o.step, o.record is not None) for o in used.history] == [(5, True), (10, True), (15, True), (30, True)]
    assert any("05.ckpt' could not be deleted" in text for text in messages(caught))
    assert took < BOUND


@pytest.mark.parametrize("how", ["end", "end_after_a_confirmed_save", "exception"])
def test_the_wait_at_the_end_is_bounded_and_says_what_was_lost(bench: Bench, how: str) -> None:
    last = {"end": 30, "end_after_a_confirmed_save": 20, "exception": 10}[how]
    used = bench.policy(AtSteps([5, last]), save_timeout=TIMEOUT)
    watchdog = threading.Timer(BOUND, bench.schedule.release.set)

    def hang() -> None:
        bench.schedule.faults.append(Fault("hang"))
        watchdog.start()

    began = time.monotonic()
    error: CheckpointSaveError | None = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            if how == "exception":
                fit(bench.root, used, callbacks=[At(used, step_9=hang)], crash_at=10)
            else:
                fit(bench.root, used, callbacks=[At(used, step_26=hang)])
        except CheckpointSaveError as raised:
            error = raised
    took = time.monotonic() - began
    watchdog.cancel()
    bench.schedule.faults.clear()
    text = " ".join([*messages(caught), str(error)])
    assert took < BOUND
    if how == "end":
        assert error is not None
        assert "step 30" in text
    else:
        assert error is None
        assert how != "exception" or "step 10" in text
    if how != "end_after_a_confirmed_save":
        assert f"save_timeout={TIMEOUT:g}" in text
        assert how == "exception" or "step-0000000005.ckpt" in text
    assert bench.steps() == ([5, 20] if how == "end_after_a_confirmed_save" else [5])
    bench.schedule.release.set()
    wait_for(lambda: not ours())
    assert bench.steps() == ([5, 20] if how == "end_after_a_confirmed_save" else [5])


# a full disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """8 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    try:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], capture_output=True, text=True, timeout=20
        )
    except FileNotFoundError:
        pytest.skip("no mount command: a small tmpfs can't be made")
    if done.returncode:
        pytest.skip(f"a small tmpfs can't be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=20)


def fill(folder: Path, left: int) -> None:
    """Take all space but ``left`` bytes."""
    disk = os.statvfs(folder)
    with open(folder / "filler", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, disk.f_bavail * disk.f_frsize - left)


@pytest.mark.parametrize("left", [512 << 10, 16 << 10, 0])
def test_a_full_disk(small_disk: Path, schedule: Schedule, left: int) -> None:
    bench = Bench("file", small_disk, schedule)
    used = bench.policy(AtSteps([5, 10, 15, 20, 25]), max_consecutive_failures=9)
    seen: list[Any] = []

    def full() -> None:
        schedule.log.clear()
        fill(small_disk, left)

    def look() -> None:
        seen.extend([bench.steps(), bench.debris()])
        seen.append([op for op, path in schedule.log if op == "write" and ".ckpt." in path])
        (small_disk / "filler").unlink()

    observer = Observer()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(small_disk.parent, used, model=big(1), callbacks=[At(used, step_6=full, step_16=look), observer])
    assert seen == [[5], set(), []]  # kept, nothing half-written, and not a byte of a payload was tried
    failed = [text for text in messages(caught) if "could not be saved" in text]
    assert len(failed) == 2
    for text in failed:
        assert "older checkpoints are kept" in text
        assert "the disk is full" in text if left > 64 << 10 else "disk is full" in text or "No space left" in text
    assert bench.steps() == [5, 20, 25]
    assert bench.debris() == set()
    assert observer.final["step"] == 30


def test_a_disk_with_room_for_one_more_than_is_kept(small_disk: Path, schedule: Schedule) -> None:
    bench = Bench("file", small_disk, schedule)
    fill(small_disk, 3 << 20)
    used = bench.policy(EveryNTrainSteps(1), KeepLast(1))

    class Wait(Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            used._writer.drain(20)

    fit(small_disk.parent, used, model=big(1), callbacks=[Wait()])
    assert [outcome.record is not None for outcome in used.history] == [True] * 30
    assert bench.steps() == [30]
