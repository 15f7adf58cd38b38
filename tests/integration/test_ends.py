"""Threads, forks and ends: however a training ends, nothing hangs, nothing is lost without a word, nothing is left.

Run as ``python -m tests.integration.test_ends ROOT`` it is a set of programs that are ended in one of these ways.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader

from lightning_ckpt_policy import (
    AsyncCheckpointIO,
    AtSteps,
    CheckpointPolicy,
    CheckpointSaveError,
    CheckpointStore,
    EveryNEpochs,
    EveryNTrainSteps,
    KeepAll,
    KeepLast,
)
from lightning_ckpt_policy.writer import BackgroundWriter
from tests.faults import Fault, Schedule, register
from tests.integration.helpers import REPOSITORY, finish, kill, start
from tests.models import Net, Rows, differences, fit, loader

register()
pytestmark = pytest.mark.timeout(60)
SLOW = 0.5  # seconds that a write takes here


def slow(seconds: float = SLOW) -> Schedule:
    """Each file takes so long to write: of a save, the marker, the payload and the record."""
    return Schedule(Fault("delay", op="close", path=".tmp", seconds=seconds / 3))


def policy(root: Path, trigger: Any, schedule: Schedule | None = None, **options: Any) -> CheckpointPolicy:
    return CheckpointPolicy(
        f"faulty://{root}/ckpt",
        trigger,
        options.pop("retention", KeepAll()),
        storage_options={"target_protocol": "file", "schedule": schedule or Schedule()},
        **{"save_on_train_end": False, **options},
    )


def steps(root: Path) -> list[int]:
    """Of the checkpoints that are there; each is verified and loaded."""
    store = CheckpointStore(f"{root}/ckpt")
    records = store.records()
    for record in records:
        store.verify(record)
        assert torch.load(store.path_of(record), weights_only=True)["global_step"] == record.step
    return [record.step for record in records]


def statuses(root: Path) -> list[str]:
    return [attempt.status for attempt in CheckpointStore(f"{root}/ckpt").attempts()]


def debris(root: Path) -> list[str]:
    return sorted(path.name for path in root.rglob("*") if path.name.endswith((".tmp", ".pending")))


def ours() -> list[str]:
    """The threads of this package."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("ckpt-")]


def wait_for(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it didn't come about in time"
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path) -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = [thread.name for thread in threading.enumerate() if thread not in before and thread.name.startswith("ckpt-")]
    assert left == []
    assert debris(tmp_path) == []


class Arm(Callback):
    """Calls a function before the first batch at which so many steps are done."""

    def __init__(self, step: int, act: Callable[[], object]) -> None:
        self.step, self.act = step, act

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            self.act()


def refused() -> Exception:
    return PermissionError(13, "injected refusal")


def no_payloads() -> Fault:
    return Fault("error", op="open", path=".tmp", error=refused)


# forks


@pytest.mark.parametrize("kind", ["stateful", "plain"])
def test_loader_workers_forked_while_a_write_runs(tmp_path: Path, kind: str) -> None:
    used = policy(tmp_path, EveryNEpochs(1), slow(1.5))
    writing: list[bool] = []

    class Look(Callback):
        def on_train_epoch_start(self, *args: Any) -> None:
            writing.append(used._writer.saving)

    def train() -> Any:
        return loader(kind, num_workers=2)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        without = fit(tmp_path, None, train=train)
        saved = fit(tmp_path, used, train=train, callbacks=[Look()])
    assert writing == [False, True, True]
    assert differences(without.final, saved.final) == []
    assert steps(tmp_path)[0] == 10


class Looking(Rows):
    """Looks into a store in the worker, while the parent writes to it."""

    def __init__(self, store: CheckpointStore) -> None:
        super().__init__(40)
        self.store = store

    def __getitem__(self, index: int) -> torch.Tensor:
        for record in self.store.records():
            assert self.store.whole(record)
        return super().__getitem__(index)


def test_a_store_that_is_used_in_loader_workers(tmp_path: Path) -> None:
    used = policy(tmp_path, EveryNTrainSteps(2))

    def train() -> Any:
        return DataLoader(Looking(used.store), batch_size=4, num_workers=2)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(tmp_path, used, train=train, max_epochs=2)
    assert steps(tmp_path)


# one object, several fits; several trainers


@pytest.mark.parametrize("same_trainer", [True, False])
def test_fit_validate_fit_with_one_object_also_after_a_failed_write(tmp_path: Path, same_trainer: bool) -> None:
    schedule = slow(0.2)
    used = policy(tmp_path, AtSteps([4, 8, 12, 16]), schedule, retention=KeepLast(2))
    trainer = fit(tmp_path, used, max_steps=5, max_epochs=-1).trainer  # type: ignore[attr-defined]
    trainer.validate(trainer.lightning_module, loader("plain"), verbose=False)
    assert steps(tmp_path) == [4]
    assert ours() == []

    def again(max_steps: int) -> None:
        if same_trainer:
            trainer.fit_loop.epoch_loop.max_steps = max_steps
            trainer.fit(trainer.lightning_module, loader())
        else:
            fit(tmp_path, used, max_steps=max_steps, max_epochs=-1, ckpt_path="last")

    schedule.faults.append(Fault("error", op="cat_file", path="08.ckpt.pending", error=refused))
    with (
        pytest.warns(UserWarning, match="step 8 could not be saved"),
        pytest.raises(CheckpointSaveError, match="injected refusal"),
    ):
        again(9)
    assert steps(tmp_path) == [4]
    assert used.last_model_path.endswith("step-0000000004.ckpt")
    assert ours() == []
    trainer.validate(Net(), loader("plain"), verbose=False)
    schedule.faults.clear()
    used.trigger = AtSteps([13, 16])
    again(14)  # neither this fit nor its end hears of the old failure
    assert steps(tmp_path) == [4, 13]
    again(17)
    assert steps(tmp_path) == [13, 16]
    assert used.last_model_path.endswith("step-0000000016.ckpt")
    runs = {record.run_id for record in used.store.records()}
    assert len(runs) == 1


def test_trainers_one_after_the_other_with_one_object(tmp_path: Path) -> None:
    """Two trainings that don't go on from each other share a folder; neither deletes the other's."""
    used = policy(tmp_path, AtSteps([4]), retention=KeepLast(1), save_on_train_end=True)
    fit(tmp_path, used, max_steps=9)
    first = used.store.records()
    fit(tmp_path, used, max_steps=9, seed=2)
    records = used.store.records()
    assert [record.step for record in records] == [9, 9]
    assert records[0] == first[0]
    assert len({record.run_id for record in records}) == 2
    assert used.last_model_path == used.store.path_of(records[1])


def test_several_trainers_at_once_in_one_process(tmp_path: Path) -> None:
    """One training runs, with saves of its own, in a hook of another that has a save on its way."""
    inner = policy(tmp_path / "inner", EveryNTrainSteps(3), slow(0.1), retention=KeepLast(1), save_on_train_end=True)
    outer = policy(tmp_path / "outer", AtSteps([4, 20, 30]), slow(), retention=KeepLast(2), save_on_train_end=True)
    other = policy(tmp_path / "other", AtSteps([30]))
    unused = Trainer(callbacks=[policy(tmp_path / "unused", AtSteps([1]))], logger=False, default_root_dir=tmp_path)

    class Nest(Callback):
        def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
            if trainer.global_step == 4:
                assert outer._overlap is not None
                random_state = torch.get_rng_state()
                fit(tmp_path / "inner", inner, max_steps=10)
                torch.set_rng_state(random_state)

    fit(tmp_path / "outer", outer, callbacks=[Nest()])
    fit(tmp_path / "other", other)
    assert steps(tmp_path / "inner") == [10]
    assert steps(tmp_path / "outer")[-1] == 30
    assert steps(tmp_path / "other") == [30]
    assert unused.checkpoint_callback._writer is not outer._writer  # type: ignore[union-attr]
    assert ours() == []


# the end of a fit


def test_case_15_the_last_save_is_durable_when_fit_returns(tmp_path: Path) -> None:
    used = policy(tmp_path, AtSteps([30]), slow(2.0))
    began = time.monotonic()
    fit(tmp_path, used)
    assert time.monotonic() - began > 2.0
    assert steps(tmp_path) == [30]
    assert used.last_model_path == f"{tmp_path}/ckpt/step-0000000030.ckpt"
    assert statuses(tmp_path) == ["finished"]


@pytest.mark.parametrize(
    ("error", "hook"),
    [
        (RuntimeError("of the training"), "on_train_batch_start"),
        (SystemExit(3), "on_validation_start"),
        (SystemExit(0), "on_train_epoch_end"),
    ],
)
@pytest.mark.parametrize("write_fails", [False, True])
def test_an_exception_or_sys_exit_in_a_hook(tmp_path: Path, error: BaseException, hook: str, write_fails: bool) -> None:
    """The pending save is waited for, and its failure is told but masks nothing."""
    schedule = slow()
    used = policy(tmp_path, AtSteps([4, 9]), schedule)
    fault = Fault("error", op="cat_file", path="09.ckpt.pending", error=refused)

    def raise_it(self: Callback, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step >= 9:
            # the save begins once its copy is complete, which is before the next optimizer step
            copying = hook == "on_train_batch_start"
            assert (used._overlap is not None, used._writer.saving) == (copying, not copying)
            if write_fails:
                schedule.faults.append(fault)
            raise error

    ending = type("Ending", (Callback,), {hook: raise_it})()
    callbacks = [Arm(8, lambda: used._writer.drain(20)), ending]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(type(error)) as raised:
            fit(tmp_path, used, callbacks=callbacks, validate=True, max_epochs=1)
    assert raised.value is error
    told = [str(warning.message) for warning in caught if "step 9 could not be saved" in str(warning.message)]
    assert len(told) == write_fails
    assert steps(tmp_path) == ([4] if write_fails else [4, 9])
    assert statuses(tmp_path) == ["error"]
    assert ours() == []
    # the next fit is not told of it again
    schedule.faults.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(tmp_path, used, ckpt_path="last", max_epochs=1)
    assert not [warning for warning in caught if "could not be saved" in str(warning.message)]


def test_an_error_in_teardown_does_not_lose_the_save(tmp_path: Path) -> None:
    class Fails(Callback):
        def teardown(self, *args: Any, **kwargs: Any) -> None:
            raise RuntimeError("in teardown")

    used = policy(tmp_path, AtSteps([30]), slow())
    try:
        with pytest.raises(RuntimeError, match="in teardown"):
            fit(tmp_path, used, callbacks=[Fails()])
        assert steps(tmp_path) == [30]
    finally:
        used._io.teardown()


def test_a_writer_that_was_closed_over_a_hung_job_does_nothing_more() -> None:
    """Whoever closed it was told that this is lost; it mustn't come about later, beside what is done then."""
    writer, gate, begun, ran = BackgroundWriter(), threading.Event(), threading.Event(), []

    def hang() -> None:
        begun.set()
        gate.wait(20)

    writer.submit_cleanup(hang)
    assert begun.wait(20)
    writer.submit(lambda: ran.append("late"))
    assert not writer.close(0.1)
    gate.set()
    wait_for(lambda: not ours())
    assert ran == []


def test_a_writer_that_was_closed_over_a_hung_job_and_used_again() -> None:
    """The old thread's end isn't taken for the new save's."""
    writer, first, second = BackgroundWriter(), threading.Event(), threading.Event()
    begun, ran = threading.Event(), []
    writer.submit_cleanup(lambda: first.wait(20) and None)  # type: ignore[func-returns-value]
    assert not writer.close(0.1)

    def job() -> None:
        begun.set()
        second.wait(20)
        ran.append("saved")

    writer.submit(job)
    assert begun.wait(20)
    first.set()
    wait_for(lambda: len(ours()) == 1)
    try:
        assert writer.saving
        assert not writer.drain(0.1)
        assert ran == []
    finally:
        second.set()
        assert writer.close(20)
    assert ran == ["saved"]


# processes that end


class Signalled(Callback):
    """Tells when a save is on its way, and waits there for the signal."""

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        writer = trainer.checkpoint_callback._writer  # type: ignore[union-attr]
        if trainer.global_step == 8:
            writer.drain(20)
        elif trainer.global_step == 9:
            print("SAVING", writer.saving, flush=True)
            wait_for(lambda: trainer.received_sigterm, 900)  # the tests before may take their time


class Crash(Callback):
    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == 9:
            writer = trainer.checkpoint_callback._writer  # type: ignore[union-attr]
            print("SAVING", writer.saving, flush=True)
            raise RuntimeError("the script's own error")


class Fails(Callback):
    def on_exception(self, *args: Any) -> None:
        raise RuntimeError("in on_exception")


def interrupted(root: Path) -> None:
    used = policy(root, AtSteps([4, 9]), slow(1.5), retention=KeepLast(1))
    try:
        fit(root, used, callbacks=[Signalled()])
    finally:
        print("THREADS", ours(), flush=True)


def io_alone(root: Path) -> None:
    io = AsyncCheckpointIO({"target_protocol": "file", "schedule": slow(1.0)})
    for index in (1, 2):
        io.save_checkpoint({"a": index}, f"faulty://{root}/{index}.ckpt")
    io.remove_checkpoint(f"faulty://{root}/1.ckpt")
    print("SAVING", io.writer.saving, flush=True)


def half_torn_down(root: Path) -> None:
    fit(root, policy(root, AtSteps([9]), slow(1.0)), callbacks=[Fails(), Crash()])


def training_in_a_thread(root: Path) -> None:
    """The interpreter ends while it runs."""
    used = policy(root, AtSteps([9]), slow(1.0))
    began = threading.Event()
    arm = Arm(9, lambda: (began.set(), time.sleep(30)))
    threading.Thread(target=fit, args=(root, used), kwargs={"callbacks": [arm]}, daemon=True).start()
    assert began.wait(20)
    print("SAVING", used._writer.saving, flush=True)


def remote(hangs: bool) -> dict[str, Any]:
    """Options of an object store that is slow, or hangs, where an upload is finished; at the exit it is looked into."""
    fault = Fault("hang" if hangs else "delay", op="close", path=".ckpt", seconds=1.0)
    BackgroundWriter.exit_timeout = 1.0 if hangs else 60.0

    def look() -> None:
        store = CheckpointStore("objects://bucket/run")
        print("THERE", sorted(store.backend.list()), flush=True)
        print("VERIFIED", [store.verify(record) for record in store.records()], flush=True)

    atexit.register(look)
    return {"target_protocol": "objects", "schedule": Schedule(fault)}


def remote_fit(root: Path, hangs: bool) -> None:
    options = remote(hangs)
    used = CheckpointPolicy("faulty:///bucket/run", AtSteps([9]), storage_options=options, save_timeout=2.0)
    fit(root, used, callbacks=[Crash()])


def remote_io(root: Path, hangs: bool) -> None:
    io = AsyncCheckpointIO(remote(hangs))
    io.save_checkpoint({"a": 1}, "faulty:///bucket/run/a.ckpt")
    print("SAVING", io.writer.saving, flush=True)
    raise RuntimeError("the script's own error")


SCENARIOS: dict[str, Callable[[Path], None]] = {
    "sigint": interrupted,
    "sigterm": interrupted,
    "io_alone": io_alone,
    "half_torn_down": half_torn_down,
    "training_in_a_thread": training_in_a_thread,
    "remote_fit": partial(remote_fit, hangs=False),
    "remote_fit_lost": partial(remote_fit, hangs=True),
    "remote_io": partial(remote_io, hangs=False),
    "remote_io_lost": partial(remote_io, hangs=True),
}


def main(root: Path) -> None:
    """Run each scenario in a process of its own, forked before any training, so that only this one had to import."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    children = {}
    for name, scenario in SCENARIOS.items():
        folder = root / name
        folder.mkdir()
        pid = os.fork()
        if pid == 0:
            output = os.open(root / f"{name}.output", os.O_WRONLY | os.O_CREAT)
            os.dup2(output, 1)
            os.dup2(output, 2)
            scenario(folder)
            return  # its end is that of any program
        children[pid] = name
    (root / "pids").write_text(json.dumps({name: pid for pid, name in children.items()}))
    while children:
        pid, status = os.wait()
        name = children.pop(pid)
        (root / "new").write_text(str(os.waitstatus_to_exitcode(status)))
        (root / "new").rename(root / f"{name}.status")


@pytest.fixture(scope="module", autouse=True)
def launched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Started with the first test of this file, since importing takes a while."""
    root = tmp_path_factory.mktemp("programs")
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.test_ends", str(root)],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    yield root
    kill(process)


@pytest.fixture
def programs(launched: Path) -> Path:
    wait_for((launched / "pids").exists, 50)
    return launched


def ended(programs: Path, name: str, send: signal.Signals | None = None) -> tuple[Path, int, str]:
    """A program's folder, exit status and output, after a signal where there is one to send."""
    output, status = programs / f"{name}.output", programs / f"{name}.status"
    wait_for(lambda: output.exists() and "SAVING" in output.read_text())
    if send is not None:
        os.kill(json.loads((programs / "pids").read_text())[name], send)
    wait_for(status.exists)
    text = output.read_text()
    assert "SAVING True" in text, text
    assert "cannot schedule new futures" not in text
    assert debris(programs / name) == []
    return programs / name, int(status.read_text()), text


def test_keyboard_interrupt(programs: Path) -> None:
    root, status, output = ended(programs, "sigint", signal.SIGINT)
    assert status == 1, output
    assert steps(root) == [9] or steps(root) == [4, 9]  # pruned now or at the next start
    assert statuses(root) == ["stopped"]
    assert "THREADS []" in output, output


def test_sigterm(programs: Path) -> None:
    root, status, output = ended(programs, "sigterm", signal.SIGTERM)
    assert status == 0, output  # Lightning's SIGTERMException is a SystemExit without a status
    assert steps(root)[-1] == 9
    assert statuses(root) == ["stopped"]
    assert "THREADS []" in output, output


def test_interpreter_exit_with_a_write_pending_without_a_trainer(programs: Path) -> None:
    root, status, output = ended(programs, "io_alone")
    assert status == 0, output
    assert sorted(path.name for path in root.iterdir()) == ["2.ckpt"], output
    assert torch.load(root / "2.ckpt", weights_only=True) == {"a": 2}


def test_interpreter_exit_with_a_trainer_torn_down_half_way(programs: Path) -> None:
    root, status, output = ended(programs, "half_torn_down")
    assert status == 1, output
    assert "RuntimeError: in on_exception" in output
    assert steps(root) == [9], output


def test_interpreter_exit_with_a_training_in_a_thread(programs: Path) -> None:
    root, status, output = ended(programs, "training_in_a_thread")
    assert status == 0, output
    assert steps(root) == [9], output


@pytest.mark.parametrize("how", ["fit", "io"])
def test_case_16_a_script_raises_with_a_remote_write_pending(programs: Path, how: str) -> None:
    name = "a.ckpt" if how == "io" else "step-0000000009.ckpt"
    _, status, output = ended(programs, f"remote_{how}")
    assert status == 1, output
    assert "RuntimeError: the script's own error" in output
    assert f"'{name}'" in output.partition("THERE")[2], output
    assert ("VERIFIED [None]" in output) == (how == "fit"), output
    _, status, output = ended(programs, f"remote_{how}_lost")
    assert status == 1, output
    assert "RuntimeError: the script's own error" in output
    assert f"'{name}'" not in output.partition("THERE")[2], output
    assert "VERIFIED []" in output, output
    assert ("it is lost" if how == "io" else "could not be saved") in output, output


# requeue overlap

LATER = """
import runpy, sys, time
from pathlib import Path
import tests.integration.job
from lightning_ckpt_policy import CheckpointStore
folder = Path(sys.argv[sys.argv.index("--root") + 1]) / "ckpt"
while not list(folder.glob("*.ckpt.json")):
    time.sleep(0.01)
tests.integration.job.main()
"""


def test_requeue_overlap(tmp_path: Path) -> None:
    """A run is started again while its first process still lives: the first writes and deletes nothing more."""
    tmp_path.joinpath("first").mkdir()
    folder = tmp_path / "run" / "ckpt"
    store = CheckpointStore(str(folder))
    folder.parent.mkdir()
    later = subprocess.Popen(
        [sys.executable, "-c", LATER, "--root", str(folder.parent), "--retention", "KeepAll()", "--epochs", "2"],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    every_second = ("--trigger", "EveryNTrainSteps(2)", "--retention", "KeepLast(1)", "--step-seconds", "0.12")
    first = start(folder.parent, *every_second, "--epochs", "3")
    try:
        wait_for(lambda: len(list((folder / "attempts").glob("*-000002.json"))) == 1, 50)
        time.sleep(0.5)  # for a save that was confirmed at that very moment
        theirs = {record.path for record in store.records() if record.attempt == 1}
        assert first.poll() is None, "the first ended too early for this test"
        assert theirs
        status, output = finish(later, 40)
        assert status == 0, output
        assert first.poll() is None, "the first ended too early for this test"
        before = {path: path.stat().st_mtime_ns for path in folder.iterdir() if path.is_file()}
        status, output = finish(first, 40)
    finally:
        kill(first)
        kill(later)
    assert status == 1, output
    assert "CheckpointSaveError" in output
    assert "SupersededError" in output
    assert "Stop this process" in output or "Stop the older process" in output
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir() if path.is_file()} == before
    assert {record.path for record in store.records() if record.attempt == 1} == theirs
    assert [record.step for record in store.records() if record.attempt == 2][-1] == 20
    assert steps(folder.parent)
    assert [attempt.status for attempt in store.attempts()] == ["running", "finished"]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
