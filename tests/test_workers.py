"""Loader workers and signals that are meant for their parent."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_ckpt_policy.signals import SignalCounter
from lightning_ckpt_policy.workers import shield_workers

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(not hasattr(signal, "sigwaitinfo"), reason="this system has no sigwaitinfo"),
]
GUARDED = ("SIGTERM", "SIGUSR1")
fork = multiprocessing.get_context("fork")


class Numbers(Dataset[int]):
    """Of which a worker may start another program first."""

    def __init__(self, command: list[str] | None = None, seconds: float = 0.0) -> None:
        self.command = command
        self.seconds = seconds

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        time.sleep(self.seconds)
        if self.command is None:
            return index
        with subprocess.Popen(self.command) as program:
            program.terminate()
            return program.wait(20)


def from_another_process(name: str, children: list[Any]) -> None:
    subprocess.run(["kill", f"-{name.removeprefix('SIG')}", *(str(child.pid) for child in children)], check=True)


def batches_and_workers(loader: DataLoader[int]) -> tuple[Iterator[torch.Tensor], list[Any]]:
    others = multiprocessing.active_children()
    batches = iter(loader)
    return batches, [child for child in multiprocessing.active_children() if child not in others]


@pytest.fixture
def shielded() -> Iterator[None]:
    release = shield_workers(GUARDED)
    yield
    release()


def mask() -> set[int]:
    return set(signal.pthread_sigmask(signal.SIG_BLOCK, []))


@pytest.mark.parametrize("name", GUARDED)
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_workers_outlive_a_signal_that_their_parent_didn_t_send(shielded: None, kind: Any, name: str) -> None:
    loader = kind(Numbers(), batch_size=8, num_workers=2, multiprocessing_context="fork")
    batches, workers = batches_and_workers(loader)
    assert len(workers) == 2
    for _ in range(3):  # the first may come before the workers have begun
        from_another_process(name, workers)
        time.sleep(0.05)
    assert torch.cat(list(batches)).tolist() == list(range(64))


def test_their_parent_can_still_end_them(shielded: None) -> None:
    loader = DataLoader(Numbers(seconds=30), batch_size=8, num_workers=2, multiprocessing_context="fork")
    batches, workers = batches_and_workers(loader)
    time.sleep(0.2)
    for child in workers:
        child.terminate()
        child.join(20)
        assert child.exitcode == 0  # as torch lets them end
    del batches


def test_they_take_signals_once_their_parent_is_gone(shielded: None) -> None:
    reader, writer = os.pipe()
    parent = os.fork()
    if parent == 0:
        release = shield_workers(GUARDED)
        loader = DataLoader(Numbers(seconds=30), batch_size=8, num_workers=1, multiprocessing_context="fork")
        _, workers = batches_and_workers(loader)
        os.write(writer, str(workers[0].pid).encode())
        time.sleep(30)
        release()
        os._exit(1)
    worker = int(os.read(reader, 100))
    time.sleep(0.5)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    deadline = time.monotonic() + 20
    while is_alive(worker) and time.monotonic() < deadline:
        os.kill(worker, signal.SIGTERM)
        time.sleep(0.1)
    assert not is_alive(worker)


def is_alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        os.kill(pid, 0)
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


class Produced(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        child = fork.Process(target=sleep, daemon=True)
        child.start()
        child.terminate()
        child.join(20)
        yield child.exitcode or 0


def test_what_a_dataset_starts_in_the_main_process_is_no_worker(shielded: None) -> None:
    assert [int(code) for code in DataLoader(Produced(), batch_size=1)] == [-signal.SIGTERM]


def test_a_program_that_a_worker_starts_can_be_ended(shielded: None) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(20)"]
    loader = DataLoader(Numbers(command), batch_size=32, num_workers=1, multiprocessing_context="fork")
    assert set(next(iter(loader)).tolist()) == {-signal.SIGTERM}


def sleep() -> None:
    time.sleep(20)


def raw_fork() -> int:
    pid = os.fork()
    if pid == 0:
        try:
            time.sleep(20)
        finally:
            os._exit(1)
    return pid


def process() -> int:
    child = fork.Process(target=sleep, daemon=True)
    child.start()
    assert child.pid is not None
    return child.pid


@pytest.mark.parametrize("start", [raw_fork, process])
@pytest.mark.parametrize("policies", [0, 1, 2])
def test_other_children_take_signals_as_they_would_without(
    shielded: None, start: Callable[[], int], policies: int
) -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    counters = [SignalCounter() for _ in range(policies)]
    for counter in counters:
        counter.install(["SIGTERM"])
    try:
        pid = start()
        assert mask().isdisjoint({signal.SIGTERM, signal.SIGUSR1})
        os.kill(pid, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
        assert not any(counter.counts for counter in counters)
    finally:
        for counter in reversed(counters):
            counter.restore()
        signal.signal(signal.SIGTERM, before)


def test_a_child_calls_the_handler_that_was_there_before(shielded: None) -> None:
    counter = SignalCounter()
    before = signal.signal(signal.SIGUSR1, lambda *_: os._exit(7))
    try:
        counter.install(["SIGUSR1"])
        pid = raw_fork()
        os.kill(pid, signal.SIGUSR1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    finally:
        counter.restore()
        signal.signal(signal.SIGUSR1, before)


def test_nothing_is_shielded_once_it_is_released() -> None:
    release = shield_workers(GUARDED)
    other = shield_workers(["SIGTERM"])
    release()
    other()
    loader = DataLoader(Numbers(seconds=0.2), batch_size=8, num_workers=1, multiprocessing_context="fork")
    batches, workers = batches_and_workers(loader)
    next(batches)
    from_another_process("SIGTERM", workers)
    with pytest.raises(RuntimeError, match=r"exited unexpectedly|killed by signal"):
        list(batches)


@pytest.mark.parametrize(
    "told", ["", "DataLoader worker (pid 1) is killed by signal: Terminated. ", "of the user's own"]
)
def test_ends_of_children_are_still_told_of_after_a_signal_but_for_workers(told: str) -> None:
    ends = []

    def on_end(number: int, frame: Any) -> None:
        ends.append(number)
        if told:
            raise RuntimeError(told)

    before = signal.signal(signal.SIGCHLD, on_end)
    counter = SignalCounter()
    counter.install(["SIGUSR1"])
    try:
        signal.raise_signal(signal.SIGUSR1)
        with pytest.raises(RuntimeError, match=told) if told == "of the user's own" else contextlib.nullcontext():
            signal.raise_signal(signal.SIGCHLD)
        assert ends == [signal.SIGCHLD]
        counter.restore()
        assert signal.getsignal(signal.SIGCHLD) is on_end
    finally:
        counter.restore()
        signal.signal(signal.SIGCHLD, before)
