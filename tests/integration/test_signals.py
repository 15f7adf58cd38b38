"""Real signals in real processes: what is saved, how the fit ends, and that a resume goes on exactly there.

Run as ``python -m tests.integration.test_signals ROOT`` it is a set of trainings that get signals.
"""

from __future__ import annotations

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

from lightning_ckpt_policy import (
    AfterValidation,
    AtSteps,
    CheckpointPolicy,
    CheckpointStore,
    KeepAll,
    OnSignal,
    callback,
)
from tests.faults import Fault, Schedule, register
from tests.integration.helpers import REPOSITORY, kill
from tests.models import Net, Observer, Rows, differences, fit, loader

register()
pytestmark = pytest.mark.timeout(100)
NEVER = AtSteps([1000])
PREEMPTED = NEVER | OnSignal("SIGTERM", stop=True)


def policy(root: Path, trigger: Any = PREEMPTED, write_seconds: float = 0.0) -> CheckpointPolicy:
    schedule = Schedule(Fault("delay", op="close", path=".tmp", seconds=write_seconds / 3)) if write_seconds else None
    options = {"target_protocol": "file", "schedule": schedule or Schedule()}
    return CheckpointPolicy(f"faulty://{root}/ckpt", trigger, KeepAll(), storage_options=options)


class Send(Net):
    """Sends itself signals inside a training or validation step."""

    def __init__(self, step: int, act: Callable[[], object], where: str = "training") -> None:
        super().__init__()
        self.at, self.act, self.where = step, act, where
        self.after = 0

    def meet(self, where: str) -> None:
        if self.where == where and self.trainer.global_step == self.at and self.act is not None:
            if self.after == 0:
                self.act()
            self.after += 1

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.meet("training")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.meet("validation")
        super().validation_step(batch, batch_idx)


class SendAfter(Send):
    """Sends it after the last save point of a step, before the next one's batch is there."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.meet("after")


class SlowRows(Rows):
    """Of which a worker gives one in a while."""

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.2)
        return super().__getitem__(index)


def send(*names: str) -> Callable[[], None]:
    def act() -> None:
        for name in names:
            os.kill(os.getpid(), signal.Signals[name])

    return act


def to_the_group() -> None:
    """From another process: a worker takes SIGTERM of its parent for a regular end, and no error is raised for it."""
    subprocess.run(["kill", "-TERM", "--", f"-{os.getpgrp()}"], start_new_session=True, check=True)


def to_the_group_in_a_batch() -> None:
    to_the_group()
    time.sleep(0.3)  # the workers end meanwhile


def run(root: Path, sender: partial[Send], used: CheckpointPolicy | None = None, **options: Any) -> Observer:
    return fit(root, used or policy(root), model=sender, validate=True, **options)


def workers(**options: Any) -> Callable[[], Any]:
    return lambda: loader("stateful", num_workers=2, **options)


def with_workers(root: Path) -> None:
    run(root, partial(Send, 5, to_the_group_in_a_batch), train=workers())


def waiting_for_data(root: Path) -> None:
    """The signal comes while the main process waits for its workers."""

    def train() -> Any:
        loaded = loader("stateful", num_workers=2, prefetch_factor=1)
        loaded.dataset.__class__ = SlowRows
        return loaded

    run(root, partial(SendAfter, 6, to_the_group, "after"), train=train)


def unshielded(program: Callable[[Path], object], root: Path) -> None:
    """As with workers that are spawned."""
    callback.shield_workers = lambda names: lambda: None
    program(root)


def twice(root: Path) -> None:
    used = policy(root, write_seconds=1.5)

    def again() -> None:
        while not used._writer.saving:
            time.sleep(0.01)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)

    def act() -> None:
        threading.Thread(target=again, daemon=True).start()
        os.kill(os.getpid(), signal.SIGTERM)

    run(root, partial(Send, 5, act), used)


def go_on(root: Path) -> None:
    """A user's handler is called too, and is there again afterwards."""
    calls: list[int] = []
    signal.signal(signal.SIGUSR1, lambda *_: calls.append(1))
    handler, before = signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGTERM)
    run(root, partial(Send, 5, send("SIGUSR1", "SIGUSR1")), policy(root, NEVER | OnSignal("SIGUSR1")))
    print("CALLS", len(calls), signal.getsignal(signal.SIGUSR1) is handler, signal.getsignal(signal.SIGTERM) is before)


def handler_raises(root: Path, name: str) -> None:
    """A launcher's handler raises an error of its own, in the middle of a batch."""

    def handler(*_: Any) -> None:
        raise RuntimeError("of the launcher")

    signal.signal(signal.Signals[name], handler)
    try:
        run(root, partial(Send, 5, send(name)), policy(root, NEVER | OnSignal(name)))
    finally:
        print("BACK", signal.getsignal(signal.Signals[name]) is handler)


PROGRAMS: dict[str, Callable[[Path], object]] = {
    "train": lambda root: run(root, partial(Send, 5, send("SIGTERM"))),
    "no_stop": lambda root: run(root, partial(Send, 5, send("SIGTERM")), policy(root, NEVER | OnSignal())),
    "usr1_stops": lambda root: run(
        root, partial(Send, 5, send("SIGUSR1")), policy(root, OnSignal("SIGUSR1", stop=True))
    ),
    "sanity_check": lambda root: run(root, partial(Send, 0, send("SIGTERM"), "validation"), num_sanity_val_steps=2),
    "accumulation": lambda root: run(root, partial(Send, 2, send("SIGTERM")), accumulate_grad_batches=3),
    "validation": lambda root: run(root, partial(Send, 20, send("SIGTERM"), "validation")),
    "validation_mid_epoch": lambda root: run(
        root, partial(Send, 15, send("SIGTERM"), "validation"), val_check_interval=5
    ),
    "validation_go_on": lambda root: run(
        root, partial(Send, 20, send("SIGUSR1"), "validation"), policy(root, NEVER | OnSignal("SIGUSR1"))
    ),
    "last_batch": lambda root: run(root, partial(Send, 29, send("SIGTERM"))),
    "workers": with_workers,
    "waiting_for_data": waiting_for_data,
    "unshielded_workers": partial(unshielded, with_workers),
    "unshielded_waiting_for_data": partial(unshielded, waiting_for_data),
    "twice": twice,
    "go_on": go_on,
    "handler_raises_term": lambda root: handler_raises(root, "SIGTERM"),
    "handler_raises_usr1": lambda root: handler_raises(root, "SIGUSR1"),
}


def main(root: Path) -> None:
    """Fork each program in turn, since importing takes a while."""
    for name, program in PROGRAMS.items():
        folder = root / name
        folder.mkdir()
        pid = os.fork()
        if pid == 0:
            os.setsid()
            output = os.open(root / f"{name}.output", os.O_WRONLY | os.O_CREAT)
            os.dup2(output, 1)
            os.dup2(output, 2)
            warnings.simplefilter("default")
            program(folder)
            return  # its end is that of any program
        _, status = os.waitpid(pid, 0)
        (root / "new").write_text(json.dumps(os.waitstatus_to_exitcode(status)))
        (root / "new").rename(root / f"{name}.status")


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("programs")
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.test_signals", str(root)],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    yield root
    kill(process)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As the programs have: sums of several threads may be rounded differently."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def ended(programs: Path, name: str) -> tuple[CheckpointStore, int, str]:
    status = programs / f"{name}.status"
    deadline = time.monotonic() + 90
    while not status.exists():
        assert time.monotonic() < deadline, (programs / f"{name}.output").read_text()
        time.sleep(0.05)
    output = (programs / f"{name}.output").read_text()
    store = CheckpointStore(str(programs / name / "ckpt"))
    for record in store.records():
        store.verify(record)
    return store, json.loads(status.read_text()), output


def goes_on_as_if_nothing_had_been(programs: Path, tmp_path: Path, name: str, **options: Any) -> None:
    """A resume ends as an undisturbed run does, and validates where that does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = fit(tmp_path, policy(tmp_path, NEVER), validate=True, **options)
        resumed = fit(
            programs / name, policy(programs / name, NEVER), ckpt_path="last", seed=2, validate=True, **options
        )
    assert differences(whole.final, resumed.final) == []
    assert whole.batches[len(whole.batches) - len(resumed.batches) :] == resumed.batches
    assert whole.validations[len(whole.validations) - len(resumed.validations) :] == resumed.validations
    logged = [observer.trainer.callback_metrics for observer in (whole, resumed)]  # type: ignore[attr-defined]
    assert differences(*map(dict, logged)) == []


@pytest.mark.parametrize(
    ("name", "step", "reason"),
    [
        ("train", 6, "OnSignal(signals=('SIGTERM',), stop=True)"),
        ("no_stop", 6, "OnSignal(signals=('SIGTERM',), stop=False)"),
        ("usr1_stops", 6, "OnSignal(signals=('SIGUSR1',), stop=True)"),
        ("sanity_check", 1, "OnSignal(signals=('SIGTERM',), stop=True)"),
        ("twice", 6, "OnSignal(signals=('SIGTERM',), stop=True)"),
    ],
)
def test_case_08_saved_at_the_end_of_the_batch_and_stopped(
    programs: Path, tmp_path: Path, name: str, step: int, reason: str
) -> None:
    store, status, output = ended(programs, name)
    assert status == 0, output  # Lightning's SIGTERMException is a SystemExit without a status
    assert [(record.step, record.reason, record.point) for record in store.records()] == [
        (step, (reason,), "batch_end")
    ]
    assert [attempt.status for attempt in store.attempts()] == ["stopped"]
    goes_on_as_if_nothing_had_been(programs, tmp_path, name)


def test_a_signal_in_an_accumulation_window_waits_for_its_end(programs: Path, tmp_path: Path) -> None:
    store, status, output = ended(programs, "accumulation")
    assert status == 0, output
    assert [record.step for record in store.records()] == [3]
    goes_on_as_if_nothing_had_been(programs, tmp_path, "accumulation", accumulate_grad_batches=3)


@pytest.mark.parametrize(
    ("name", "step", "options"), [("validation", 20, {}), ("validation_mid_epoch", 15, {"val_check_interval": 5})]
)
def test_case_10_a_signal_in_a_validation_is_acted_on_after_its_batch(
    programs: Path, tmp_path: Path, name: str, step: int, options: dict[str, Any]
) -> None:
    store, status, output = ended(programs, name)
    assert status == 0, output
    assert [(record.step, record.point) for record in store.records()] == [(step, "validation_batch_end")]
    assert [attempt.status for attempt in store.attempts()] == ["stopped"]
    goes_on_as_if_nothing_had_been(programs, tmp_path, name, **options)


def test_saving_in_a_validation_and_going_on_waits_for_its_metrics(programs: Path) -> None:
    store, status, output = ended(programs, "validation_go_on")
    assert status == 0, output
    first, last = store.records()
    assert (first.step, first.point, sorted(first.metrics)) == (20, "validation_end", ["val/step", "val_loss"])
    assert last.step == 30


def test_a_signal_in_the_last_batch_ends_the_program_too(programs: Path) -> None:
    store, status, output = ended(programs, "last_batch")
    assert status == 0, output
    assert [record.step for record in store.records()] == [30]
    assert [attempt.status for attempt in store.attempts()] == ["stopped"]


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("workers", 6),
        ("waiting_for_data", 7),  # the batch that is waited for still comes
        ("unshielded_workers", 6),
        ("unshielded_waiting_for_data", 6),
    ],
)
def test_case_09_sigterm_to_the_process_group_with_workers(
    programs: Path, tmp_path: Path, name: str, step: int
) -> None:
    store, status, output = ended(programs, name)
    # 1 where torch says that it waits for a worker that has ended
    assert status == 0 or (status == 1 and "unshielded" in name), output
    (record,) = store.records()
    assert record.step == step
    assert [attempt.status for attempt in store.attempts()] == ["stopped"], output
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        goes_on_as_if_nothing_had_been(programs, tmp_path, name, train=workers())


def test_case_07_a_signal_that_saves_and_goes_on(programs: Path, tmp_path: Path) -> None:
    store, status, output = ended(programs, "go_on")
    assert status == 0, output
    assert [record.step for record in store.records()] == [6, 30]
    assert "CALLS 2 True True" in output
    assert [attempt.status for attempt in store.attempts()] == ["finished"]


@pytest.mark.parametrize(("name", "attempt"), [("handler_raises_term", "stopped"), ("handler_raises_usr1", "error")])
def test_what_an_earlier_handler_raises_ends_the_fit_once_the_state_is_saved(
    programs: Path, tmp_path: Path, name: str, attempt: str
) -> None:
    store, status, output = ended(programs, name)
    assert status == 1, output
    assert output.rstrip().endswith("RuntimeError: of the launcher")
    assert [(record.step, record.point) for record in store.records()] == [(6, "batch_end")]
    assert [each.status for each in store.attempts()] == [attempt]
    assert "BACK True" in output
    goes_on_as_if_nothing_had_been(programs, tmp_path, name)


def test_a_fit_that_fails_in_its_sanity_check_or_has_nothing_to_train_brings_handlers_back(tmp_path: Path) -> None:
    def fail() -> None:
        assert signal.getsignal(signal.SIGUSR2) is not signal.SIG_DFL
        raise RuntimeError("of the validation")

    used = policy(tmp_path, OnSignal("SIGUSR2"))
    with pytest.raises(RuntimeError, match="of the validation"):
        run(tmp_path, partial(Send, 0, fail, "validation"), used, num_sanity_val_steps=2)
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
    run(tmp_path, partial(Send, -1, fail), used, num_sanity_val_steps=2, max_epochs=0)
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL


@pytest.mark.parametrize("options", [{"max_epochs": 0}, {"limit_train_batches": 0}])
def test_a_signal_that_no_batch_follows_is_known_afterwards(tmp_path: Path, options: dict[str, int]) -> None:
    """Sent in the sanity check; as in a fit without a policy."""
    ended = run(tmp_path, partial(Send, 0, send("SIGTERM"), "validation"), num_sanity_val_steps=2, **options)
    assert ended.trainer.received_sigterm  # type: ignore[attr-defined]


def test_a_signal_before_an_error_is_known_afterwards(tmp_path: Path) -> None:
    trainers = []

    class Look(Callback):
        def on_exception(self, trainer: Trainer, *args: Any) -> None:
            trainers.append(trainer)

    def fail() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        raise RuntimeError("of the validation")

    with pytest.raises(RuntimeError, match="of the validation"):
        run(tmp_path, partial(Send, 0, fail, "validation"), num_sanity_val_steps=2, callbacks=[Look()])
    (trainer,) = trainers
    assert trainer.received_sigterm


def test_a_fit_in_another_thread_says_that_it_hears_no_signals(tmp_path: Path) -> None:
    told: list[str] = []

    def train() -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(tmp_path, policy(tmp_path, PREEMPTED), max_epochs=1)
        told.extend(str(warning.message) for warning in caught)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join(60)
    assert any("can't be heard" in message for message in told)


@pytest.mark.parametrize("error", [None, RuntimeError("of the training")])
def test_handlers_are_brought_back(tmp_path: Path, error: Exception | None) -> None:
    class Look(Callback):
        def on_train_epoch_end(self, trainer: Trainer, *args: Any) -> None:
            assert signal.getsignal(signal.SIGUSR2) not in (handler, signal.SIG_DFL)
            if error is not None:
                raise error

    def handler(*_: Any) -> None: ...

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD)}
    original = signal.signal(signal.SIGUSR2, handler)
    try:
        used = [
            policy(tmp_path / "a", AfterValidation() | OnSignal(["SIGUSR2", "SIGTERM"])),
            policy(tmp_path / "b", OnSignal("SIGUSR2")),
        ]
        options: dict[str, Any] = {"callbacks": [Look()], "max_epochs": 1}
        if error is None:
            fit(tmp_path, used, **options)
        else:
            with pytest.raises(RuntimeError, match="of the training"):
                fit(tmp_path, used, **options)
        assert signal.getsignal(signal.SIGUSR2) is handler
    finally:
        signal.signal(signal.SIGUSR2, original)
    assert {number: signal.getsignal(number) for number in before} == before


if __name__ == "__main__":
    main(Path(sys.argv[1]))
