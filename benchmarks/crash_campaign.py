"""Kill a training at each step of a save, a delete or a sweep and at random moments; restart it; check what is there.

    python benchmarks/crash_campaign.py --kills 200

Each training is started with the same command again and again, and killed with SIGKILL each time until its plan is used
up; then it runs to its end. The moments are: before, during and after each file operation of the commit protocol (for a
write, during means half of it), and random ones. Some trainings overlap instead: an attempt is stopped, a second one
starts, and the first one wakes up. After each kill and at each end the folder is checked; an undisturbed training is
what the end is compared with. Exits with 1 if anything was lost, left or touched that shouldn't be: then the folder is
kept, and how to repeat it is printed. Which moments a training is killed at follows from the seed and its number alone.

Works on any fsspec URL that outlives the process. For a store that isn't a local disk, during means at some moment
while the request is on its way. With ``--server`` it starts one of the servers that the tests use, and some trainings
go on while that server is killed and started again, if it keeps what it has on disk.

With ``--devices 2`` each training runs on two ranks (DDP with gloo, on the CPU). Rank 0, another one or all of them are
killed, at the same moments of what rank 0 does and at random ones. Ranks that are left have a while to end by
themselves and are then ended, as a launcher does it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import io
import itertools
import json
import multiprocessing
import multiprocessing.connection
import os
import pickle
import platform
import random
import re
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Checkpoint
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_ckpt_policy import (
    CheckpointPolicy,
    CheckpointStore,
    EveryNTrainSteps,
    KeepBest,
    KeepLast,
    KeepSteps,
    object_stores,
    snapshot,
)
from lightning_ckpt_policy import backends as backends_module
from lightning_ckpt_policy.checksum import Checksum
from lightning_ckpt_policy.errors import SupersededError
from lightning_ckpt_policy.ledger import Ledger
from lightning_ckpt_policy.record import CheckpointRecord
from lightning_ckpt_policy.retention import AnyOf, Retention
from lightning_ckpt_policy.rng import collect_rng_state

EPOCHS, BATCHES, VALIDATE_EVERY = 3, 8, 4
ENDS: dict[bool, dict[str, int]] = {False: {"max_epochs": EPOCHS}, True: {"max_steps": EPOCHS * BATCHES - 3}}
STEPS = {False: EPOCHS * BATCHES, True: EPOCHS * BATCHES - 3}  # a training ends with an epoch, or in the middle of one
PHASES = ("before", "during", "after")
POINTS_EACH, MOMENTS_EACH = 7, 2  # kills of one training
OVERLAPS = 4  # one in so many trainings is an overlap
OUTAGES = 4  # and one goes on while its server is killed, where that is asked for
OUTAGE_SECONDS = 0.5  # at most, until the server is started again
OUTAGE_STARTS, OUTAGES_EACH = 3, 6
HANGS = 90.0  # seconds an attempt may take
LINGERS = 3.0  # seconds that the other ranks of one that has failed have to end by themselves
TOLD = {signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD}  # what the process that starts ranks listens for
FOREIGN_RUN = "another-run"
DIED, SUPERSEDED, FAILED = "died", 3, 4
PART = re.compile(r"\.(.+\.ckpt)\.[0-9a-f]{8}\.part-[-0-9]+$")  # of an upload to Google Cloud Storage
SERVERS_OWN = re.compile(r"(^|/)\.tmp\.[0-9a-f]{32}$")  # what nanio leaves of a write in which it is killed
T = TypeVar("T")


# The training


class Rows(Dataset[torch.Tensor]):
    """``length`` fixed rows of 4 numbers."""

    def __init__(self, length: int) -> None:
        self.rows = torch.randn(length, 4, generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


class Net(LightningModule):
    """BatchNorm, dropout, Adam, a scheduler per step; draws from all three generators in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 1))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        noise = random.random() + float(np.random.rand())
        return (self.body(batch + 0.1 * noise) - 1).pow(2).mean()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", (self.body(batch) - 1).pow(2).mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Observer(Callback):
    """Notes each captured step, and keeps the state at the end."""

    def __init__(self, notes: Notes | None, pause: float) -> None:
        self.notes, self.pause = notes, pause
        self.batches: list[tuple[int, float]] = []
        self.final: dict[str, Any] = {}

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.batches.append((trainer.global_step, float(batch.sum())))
        time.sleep(self.pause)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self.notes is not None:
            self.notes.add("captured", step=trainer.global_step)
            self.notes.captured = trainer.global_step

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.final = {
            "weights": {name: tensor.clone() for name, tensor in pl_module.state_dict().items()},
            "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
            "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
            "rng": collect_rng_state(),
            "step": trainer.global_step,
            "batches": self.batches,
        }


class Drain(Checkpoint):
    """Waits after each batch and validation until the policy's background work is done.

    It is a ``Checkpoint`` so that Lightning leaves it behind the policy.
    """

    def __init__(self, policy: CheckpointPolicy) -> None:
        self.policy = policy

    def _wait(self, *_: Any) -> None:
        self.policy._writer.drain()

    on_train_batch_end = _wait  # type: ignore[assignment]
    on_validation_end = _wait


@dataclass(frozen=True)
class Rule:
    """What a training keeps, told twice: to the policy, and in plain words to the checks."""

    last: int = 0
    best: bool = False
    steps: tuple[int, ...] = ()

    @property
    def retention(self) -> Retention:
        rules: list[Retention] = []
        if self.last:
            rules.append(KeepLast(self.last))
        if self.best:
            rules.append(KeepBest(1, monitor="val_loss"))
        if self.steps:
            rules.append(KeepSteps(list(self.steps)))
        return AnyOf(rules).simplest()

    def kept(self, history: Iterable[CheckpointRecord]) -> set[str]:
        """The names that must be there when these were confirmed, in order of their sequence."""
        ordered = sorted(history, key=lambda record: record.sequence)
        stay = {record.path for record in ordered[-max(1, self.last) :]}
        for step in self.steps:
            stay |= {record.path for record in [record for record in ordered if record.step >= step][:1]}
        scored = [record for record in ordered if "val_loss" in record.metrics]
        if self.best and scored:
            stay.add(min(scored, key=lambda record: record.metrics["val_loss"]).path)
        return stay


RULES = (
    Rule(last=2),
    Rule(best=True),
    Rule(last=1, best=True),
    Rule(last=2, steps=(6, 12)),
    Rule(last=1, best=True, steps=(4,)),
)


# What the killed process does to itself


@dataclass(frozen=True)
class Cut:
    """The moment at which an attempt is killed, or stopped.

    Attributes:
        where: ``"activity/role/operation"``; empty for a random moment.
        phase: Before, during or after that operation.
        nth: At which time it is met in this attempt.
        moment: For a random one: when, as a share of an undisturbed attempt's time.
        last: Count only once the training's last step was captured.
        ranks: Who is killed then; a named moment is rank 0's, whoever that is.
    """

    where: str = ""
    phase: str = ""
    nth: int = 1
    moment: float = 0.0
    last: bool = False
    ranks: tuple[int, ...] = (0,)

    def __str__(self) -> str:
        when = f"{self.phase} {self.where} #{self.nth}" if self.where else f"random moment {self.moment:.3f}"
        when += ", of the last step" if self.last else ""
        return when if self.ranks == (0,) else f"{when}, ranks {self.ranks}"


class Notes:
    """A side file, one JSON object a line, that outlives the process that writes it.

    The processes that it forks write with its id.
    """

    def __init__(self, path: Path) -> None:
        self.pid = os.getpid()
        self.captured = 0
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def add(self, what: str, **values: Any) -> None:
        os.write(self._file, (json.dumps({"pid": self.pid, "what": what, **values}) + "\n").encode())

    @staticmethod
    def read(path: Path, offset: int = 0) -> list[dict[str, Any]]:
        with path.open("rb") as file:
            file.seek(offset)
            return [json.loads(line) for line in file]


class Tripwire:
    """Kills or stops its own process at one file operation, told by activity, role, operation, phase and count.

    Wraps the package's own methods to know the activity and the role, and the lowest calls that Python has
    (``open``, ``write``, ``fsync``, ``rename``, ``link``, ``unlink``; for other stores the filesystem's requests) to
    know the moment. For a process that was forked to be killed: nothing is ever put back. On rank 0 it can kill other
    ranks instead, or too.
    """

    def __init__(
        self, notes: Notes, end: int, cut: Cut | None, how: signal.Signals, trace: bool, others: dict[int, int]
    ) -> None:
        self.notes, self.end, self.cut, self.how = notes, end, cut, how
        self.others = others  # ranks and their processes
        self.met: Counter[str] = Counter()
        self.trace = trace
        self._lock = threading.Lock()
        self._here = threading.local()

    def install(self) -> None:
        for name, activity in {
            "check": "check",
            "begin": "save",
            "commit": "save",
            "delete": "delete",
            "sweep": "sweep",
            "start_attempt": "start",
            "finish_attempt": "end",
        }.items():
            self._wrap_activity(CheckpointStore, name, activity)
        delete, notes = Ledger._delete, self.notes

        def asking(ledger: Ledger, record: CheckpointRecord) -> None:
            notes.add("asking", path=record.path)
            delete(ledger, record)

        Ledger._delete = asking  # type: ignore[method-assign]
        for cls in {backends_module.Backend, *backends_module._BACKENDS.values()}:
            for name in ("write", "write_payload", "delete", "probe"):
                if name in vars(cls):
                    self._wrap_role(cls, name)
        wire, original = self, backends_module.Backend.__init__

        def init(backend: Any, fs: Any, *args: Any) -> None:
            original(backend, fs, *args)
            wire._wrap_filesystem(fs, isinstance(backend, backends_module.LocalBackend))

        backends_module.Backend.__init__ = init  # type: ignore[method-assign]
        self._wrap_requests()
        self._wrap_os("replace", "rename")
        self._wrap_os("link", "link")
        self._wrap_os("fsync", "fsync")
        if hasattr(os, "posix_fallocate"):
            self._wrap_os("posix_fallocate", "reserve")

    def _wrap_activity(self, cls: type, name: str, activity: str) -> None:
        original, here, notes = getattr(cls, name), self._here, self.notes

        def wrapped(store: CheckpointStore, *args: Any, **kwargs: Any) -> Any:
            outer = getattr(here, "activity", None)
            here.activity = activity
            try:
                if name == "delete":
                    notes.add("deleting", path=args[0].path)
                result = original(store, *args, **kwargs)
                if name == "commit":
                    notes.add("confirmed", record=result.to_json().decode())
                elif name == "start_attempt":
                    notes.add("attempt", run=result.run_id, number=result.number)
                return result
            finally:
                here.activity = outer

        setattr(cls, name, wrapped)

    def _wrap_role(self, cls: type, method: str) -> None:
        original, here = getattr(cls, method), self._here

        def wrapped(backend: Any, *args: Any, **kwargs: Any) -> Any:
            outer = getattr(here, "role", None)
            name = args[0] if args else "probe"
            if outer is None or method == "delete":
                here.role = (role_of(name), method)
            try:
                return original(backend, *args, **kwargs)
            finally:
                here.role = outer

        setattr(cls, method, wrapped)

    def _wrap_requests(self) -> None:
        """What an object store is asked for; a payload's requests are sent from a thread of their own."""
        wire, call = self, object_stores.ObjectStoreBackend._call

        def call_(backend: Any, doing: str, method: str, *args: Any, **kwargs: Any) -> Any:
            operation = {"pipe_file": "upload", "rm_file": "unlink"}.get(method)
            if operation is None:
                return call(backend, doing, method, *args, **kwargs)
            return wire.around(operation, lambda: call(backend, doing, method, *args, **kwargs))

        object_stores.ObjectStoreBackend._call = call_  # type: ignore[method-assign]
        for cls in set(object_stores.OBJECT_STORES.values()):
            for name in ("_begin", "_send", "_complete", "_clean_up"):
                self._wrap_coroutine(cls, name)

    def _wrap_coroutine(self, cls: type, name: str) -> None:
        original, wire = getattr(cls, name), self

        async def wrapped(*args: Any, **kwargs: Any) -> Any:
            phase = wire.meet(f"save/payload/{name.strip('_')}")
            if phase == "before":
                wire._die()
            elif phase == "during":
                asyncio.get_running_loop().call_later(random.Random().uniform(0, 0.01), wire._die)
            result = await original(*args, **kwargs)
            if phase == "after":
                wire._die()
            return result

        setattr(cls, name, wrapped)

    def _wrap_os(self, name: str, operation: str) -> None:
        original = getattr(os, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            called = operation
            if name == "fsync" and os.path.isdir(f"/proc/self/fd/{args[0]}"):
                called = "folder fsync"
            return self.around(called, lambda: original(*args, **kwargs))

        setattr(os, name, wrapped)

    def _wrap_filesystem(self, fs: Any, local: bool) -> None:
        opened, remove, makedirs = fs.open, fs.rm_file, fs.makedirs

        def open_(path: str, mode: str = "rb", *args: Any, **kwargs: Any) -> Any:
            if mode == "rb":
                return opened(path, mode, *args, **kwargs)
            file = self.around("create", lambda: opened(path, mode, *args, **kwargs))
            write, close = file.write, file.close

            def write_(data: Any) -> Any:
                view = memoryview(data).cast("B")

                def half() -> Any:
                    taken = write(view[: len(view) // 2])
                    if local:
                        file.flush()
                    return taken

                return self.around("write", lambda: write(view), half)

            file.write = write_
            if not local:
                file.close = lambda: self.around("close", close)
            return file

        fs.open = open_
        fs.rm_file = lambda path: self.around("unlink", lambda: remove(path))
        if local:
            fs.makedirs = lambda *args, **kwargs: self.around("mkdir", lambda: makedirs(*args, **kwargs))
        else:
            pipe = fs.pipe_file
            fs.pipe_file = lambda *args, **kwargs: self.around("upload", lambda: pipe(*args, **kwargs))

    def around(self, operation: str, call: Callable[[], T], half: Callable[[], T] | None = None) -> T:
        """Do ``call``; die in the chosen phase of it if it is the chosen operation."""
        here = self._here
        activity = getattr(here, "activity", None)
        if activity is None or getattr(here, "busy", False):
            return call()
        role, method = getattr(here, "role", None) or ("folder", "")
        if method == "delete":
            operation = {"folder fsync": "folder fsync after unlink"}.get(operation, operation)
        elif operation == "unlink":
            operation = "unlink temporary"
        phase = self.meet(f"{activity}/{role}/{operation}")
        here.busy = True
        try:
            if phase == "before":
                self._die()
            elif phase == "during" and half is not None and self._dies:
                result = half()
                self._die()
                return result
            elif phase == "during":
                killer = threading.Thread(target=self._die, daemon=True)
                killer.start()
                result = call()
                killer.join()
                return result
            result = call()
            if phase == "after":
                self._die()
            return result
        finally:
            here.busy = False

    def meet(self, where: str) -> str | None:
        """Count an operation; the phase of it to die in, None if it isn't the chosen one."""
        cut = self.cut
        with self._lock:
            if cut is None or not cut.last or self.notes.captured == self.end:
                self.met[where] += 1
            if self.trace and self.met[where] == 1:
                self.notes.add("met", where=where)
            return cut.phase if cut is not None and cut.where == where and cut.nth == self.met[where] else None

    @property
    def _dies(self) -> bool:
        return self.cut is not None and 0 in self.cut.ranks

    def _die(self) -> None:
        if self.how == signal.SIGKILL:
            for rank, pid in self.others.items():
                if self.cut is not None and rank in self.cut.ranks:
                    os.kill(pid, self.how)
            if self._dies:
                os.kill(os.getpid(), self.how)
                time.sleep(HANGS)  # nothing more happens in this thread
        else:
            signal.pthread_kill(threading.get_ident(), self.how)  # else this thread runs on until another one has it


def role_of(name: str) -> str:
    """What a file of a store is, by its name."""
    if name.startswith("attempts/"):
        return "attempt" if name.endswith(".json") else "temporary"
    if PART.match(name):
        return "part"
    for suffix, role in ((".pending", "marker"), (".json", "record"), (".tmp", "temporary"), ("probe", "probe")):
        if name.endswith(suffix):
            return "probe" if name == ".write-test.tmp" else role
    return "payload"


# A job and its attempts


@dataclass(frozen=True)
class Job:
    """A training: the same command at each start.

    Attributes:
        url: Folder of its checkpoints.
        work: Local folder of its notes, logs and final states.
        every: ``EveryNTrainSteps`` of so many.
        rule: What it keeps.
        drained: Whether each save and delete is waited for.
        pause: Seconds before each batch.
        inside: Whether it ends in the middle of an epoch, by ``max_steps``.
        options: The filesystem's.
        devices: How many ranks train.
    """

    url: str
    work: Path
    every: int = 1
    rule: Rule = RULES[0]
    drained: bool = True
    pause: float = 0.0
    inside: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    devices: int = 1

    @property
    def notes(self) -> Path:
        return self.work / "notes.jsonl"

    def final(self, pid: int, rank: int) -> Path:
        """What a rank of an attempt ended with."""
        return self.work / f"final-{pid}-{rank}.pt"


def train(job: Job, rank: int, observer: Observer, policy: CheckpointPolicy | None) -> None:
    """One fit."""
    torch.set_num_threads(1)
    # so that this small state is copied in the background too, and written in several pieces past the page cache
    snapshot.DEFER_BYTES, snapshot.CHUNK_BYTES = 1, 4096
    if not job.url.startswith("s3"):  # which takes no parts as small as that
        object_stores.PART_BYTES = 4096
    seed_everything(1 + rank, verbose=False)  # DDP lets all ranks begin with rank 0's weights
    callbacks: list[Callback] = [observer]
    if policy is not None:
        callbacks.append(policy)
        if job.drained:
            callbacks.append(Drain(policy))
    trainer = Trainer(
        callbacks=callbacks,
        **ENDS[job.inside],  # type: ignore[arg-type]
        val_check_interval=VALIDATE_EVERY,
        accelerator="cpu",
        devices=job.devices,
        strategy="ddp" if job.devices > 1 else "auto",
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=policy is not None,
        num_sanity_val_steps=0,
        default_root_dir=str(job.work),
    )
    rows = Rows(BATCHES * 4 * job.devices)
    sampler = DistributedSampler(rows, job.devices, rank, seed=3) if job.devices > 1 else None
    loader = StatefulDataLoader(rows, batch_size=4, shuffle=sampler is None, sampler=sampler)
    trainer.fit(Net(), loader, DataLoader(Rows(8), batch_size=4), ckpt_path=None if policy is None else "last")


def attempt(
    job: Job, cut: Cut | None, how: signal.Signals = signal.SIGKILL, trace: bool = False, saves: bool = True
) -> int:
    """Fork a process that trains, or that starts the ranks that do; its id."""
    sys.stdout.flush()
    sys.stderr.flush()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, TOLD)
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return pid
    status = FAILED
    try:
        log = os.open(job.work / f"attempt-{os.getpid()}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        notes = Notes(job.notes)

        def run(rank: int, others: dict[int, int]) -> int:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            if rank == 0:
                Tripwire(notes, STEPS[job.inside], cut, how, trace, others).install()
            return run_rank(job, rank, notes, saves)

        status = run(0, {}) if job.devices == 1 else launch(job.devices, cut, run)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def run_rank(job: Job, rank: int, notes: Notes, saves: bool) -> int:
    """Train; the exit status."""
    status = FAILED
    observer = Observer(notes if rank == 0 else None, job.pause)
    policy = CheckpointPolicy(
        job.url, EveryNTrainSteps(job.every), job.rule.retention, storage_options=job.options or None
    )
    try:
        train(job, rank, observer, policy if saves else None)
        status = 0
    except Exception as error:
        traceback.print_exc()
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, SupersededError):
                status = SUPERSEDED
            cause = cause.__cause__
    if observer.final:
        torch.save(observer.final, job.final(notes.pid, rank))
    return status


def launch(devices: int, cut: Cut | None, run: Callable[[int, dict[int, int]], int]) -> int:
    """Start the ranks, wait for their end, and end the others of one that has failed; the exit status.

    SIGTERM kills those ranks that the cut names, SIGUSR1 stops all. Once rank 0 is stopped, so is this process. It dies
    as a rank that was killed.
    """
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(unused.getsockname()[1]))
    pids: dict[int, int] = {}
    for rank in reversed(range(devices)):
        pid = os.fork()
        if pid == 0:
            os.environ["LOCAL_RANK"] = str(rank)
            os._exit(run(rank, pids))
        pids[rank] = pid

    def send(number: signal.Signals, ranks: Iterable[int]) -> None:
        for rank in ranks:
            if rank in pids:  # not waited for yet
                os.kill(pids[rank], number)

    named = cut.ranks if cut is not None and not cut.where else tuple(range(devices))
    ended: dict[int, int | str] = {}
    deadline = float("inf")
    while pids:
        told = signal.sigtimedwait(TOLD, 0.05)
        if told is not None and told.si_signo == signal.SIGTERM:
            send(signal.SIGKILL, named)
        elif told is not None and told.si_signo == signal.SIGUSR1:
            send(signal.SIGSTOP, pids)
        for rank, pid in list(pids.items()):
            how = wait_for(pid, 0, stopped=True)
            if how == "stopped" and rank == 0:
                os.kill(os.getpid(), signal.SIGSTOP)
                if signal.SIGTERM not in signal.sigpending():
                    send(signal.SIGCONT, pids)
            elif how not in (None, "stopped"):
                del pids[rank]
                if time.monotonic() < deadline:  # else it was ended here
                    ended[rank] = how
        if any(ended.values()) and deadline == float("inf"):
            deadline = time.monotonic() + LINGERS
        if time.monotonic() >= deadline:
            send(signal.SIGKILL, pids)
    if DIED in ended.values():
        os.kill(os.getpid(), signal.SIGKILL)
    return int(ended.get(0, 0) or max(ended.values()))


def in_child(function: Callable[..., T], *args: Any) -> T:
    """Call it in a forked process, so that this one stays without threads and open filesystems; its result.

    Raises:
        RuntimeError: It raised there; with its traceback.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            try:
                answer: tuple[bool, Any] = (True, function(*args))
            except BaseException:
                answer = (False, traceback.format_exc())
            with os.fdopen(writer, "wb") as file:
                pickle.dump(answer, file)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        data = file.read()
    os.waitpid(pid, 0)
    if not data:
        raise RuntimeError(f"{function.__name__} died")
    good, result = pickle.loads(data)
    if not good:
        raise RuntimeError(result)
    return result  # type: ignore[no-any-return]


def wait_for(pid: int, seconds: float, stopped: bool = False) -> int | str | None:
    """How a process ended within so many seconds: its exit status, ``"died"`` if it was killed, ``"stopped"``;
    None if it goes on."""
    deadline = time.monotonic() + seconds
    while True:
        found, status = os.waitpid(pid, os.WNOHANG | (os.WUNTRACED if stopped else 0))
        if found:
            if os.WIFSTOPPED(status):
                return "stopped"
            return DIED if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        left = deadline - time.monotonic()
        if left <= 0:
            return None
        select.select([], [], [], min(left, 0.004))


def kill(pid: int, devices: int = 1) -> None:
    """SIGKILL, to one process or to ranks by way of the process that started them, and wait for its end."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL if devices == 1 else signal.SIGTERM)
        os.kill(pid, signal.SIGCONT)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


# What must be true


@dataclass
class Survey:
    """What lies in a folder, and what is wrong with it in itself."""

    records: list[CheckpointRecord] = field(default_factory=list)  # the run's own
    attempts: list[tuple[str, int]] = field(default_factory=list)
    names: set[str] = field(default_factory=set)  # of all files but foreign ones
    problems: list[str] = field(default_factory=list)
    loaded: int = 0


def foreign_files() -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Files that aren't the run's: those there from the start, and another run's, which come once ours has a record."""
    draw = random.Random(7)
    payload = draw.randbytes(3000)
    record = CheckpointRecord(
        path="other-0000000003.ckpt",
        step=3,
        epoch=0,
        sequence=1,
        run_id=FOREIGN_RUN,
        created_at=1.0,
        size=len(payload),
        checksum=_crc(payload),
    )
    marker = {
        "schema_version": 1,
        "name": "other-0000000004.ckpt",
        "run_id": FOREIGN_RUN,
        "attempt": 1,
        "created_at": 1.0,
        "op": "write",
        "token": "0123abcd",
    }
    started = {"schema_version": 1, "run_id": FOREIGN_RUN, "number": 1, "created_at": 1.0}
    early = {
        "unrelated.ckpt": draw.randbytes(500),
        "step-0000000002.ckpt": draw.randbytes(700),  # a name of ours that we didn't write
        "upload.tmp": draw.randbytes(50),
        ".hidden.ckpt.tmp": draw.randbytes(60),
        "notes.txt": b"learning rate: try 0.02\n",
    }
    late = {
        "other-0000000003.ckpt": payload,
        "other-0000000003.ckpt.json": record.to_json(),
        "other-0000000004.ckpt": draw.randbytes(900),
        "other-0000000004.ckpt.pending": json.dumps(marker).encode(),
        f".{FOREIGN_RUN}-000001.89abcdef.tmp": draw.randbytes(40),
        f"attempts/{FOREIGN_RUN}-000001.json": json.dumps(started).encode(),
    }
    return early, late


def _crc(data: bytes) -> str:
    checksum = Checksum()
    checksum.update(data)
    return str(checksum)


def put(job: Job, files: dict[str, bytes]) -> None:
    """Write files as a user would."""
    fs, root = backends_module.make_filesystem(job.url, job.options)
    for name, data in files.items():
        with contextlib.suppress(Exception):
            fs.makedirs(os.path.dirname(f"{root}/{name}"), exist_ok=True)
        fs.pipe_file(f"{root}/{name}", data)


def survey(job: Job, foreign: dict[str, bytes]) -> Survey:
    """Look at everything in the folder: records whole, verified and loadable, final names whole, foreign untouched."""
    found = Survey()
    problems = found.problems
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        store = CheckpointStore(job.url, job.options or None)
        records = store.records()
        attempts = store.attempts()
        backend = store.backend
        listing = {**backend.list(), **{f"attempts/{name}": size for name, size in backend.list("attempts").items()}}
        listing = {name: size for name, size in listing.items() if not SERVERS_OWN.search(name)}
    problems += [f"warned about: {warning.message}" for warning in caught]
    if missing := foreign.keys() - listing.keys():
        time.sleep(1)
        again = backend.list().keys()
        problems.append(
            f"the folder lists {len(listing)} names, and a second later {len(again)}, {len(missing - again)} of the "
            "missing ones still not among them"
        )
    for name, data in foreign.items():
        if name not in listing:
            problems.append(f"the foreign file {name!r} is gone")
        elif backend.read(name) != data:
            problems.append(f"the foreign file {name!r} was changed")
    found.names = set(listing) - set(foreign)
    found.records = [record for record in records if record.run_id != FOREIGN_RUN]
    found.attempts = [(a.run_id, a.number) for a in attempts if a.run_id != FOREIGN_RUN]
    if len({record.run_id for record in found.records}) > 1:
        problems.append(f"records of several runs: {[(record.path, record.run_id) for record in found.records]}")
    for earlier, later in zip(found.records, found.records[1:], strict=False):
        if earlier.sequence >= later.sequence or earlier.step >= later.step:
            problems.append(f"{later.path!r} is confirmed after {earlier.path!r} with sequence {later.sequence}")
    for record in found.records:
        try:
            if record.damaged:
                problems.append(f"{record.path!r} is marked as damaged")
            store.verify(record)
            with store.open_verified(record) as file:
                step = torch.load(file, weights_only=True)["global_step"]
            found.loaded += 1
            if step != record.step:
                problems.append(f"{record.path!r} holds step {step} and its record says {record.step}")
        except Exception as error:
            problems.append(f"the record of {record.path!r} has no whole payload: {type(error).__name__}: {error}")
    confirmed = {record.path for record in found.records}
    for name in sorted(found.names):
        try:
            role = role_of(name)
            if role == "payload" and name not in confirmed:
                torch.load(io.BytesIO(backend.read(name)), weights_only=True)
                found.loaded += 1
                if name + ".pending" not in found.names:
                    problems.append(f"{name!r} has neither record nor marker: nobody will ever sweep it")
            elif role == "part" and PART.sub(r"\1.pending", name) not in found.names:
                problems.append(f"{name!r} is a part of an upload without a marker: nobody will ever sweep it")
            elif role == "marker" and json.loads(backend.read(name))["name"] + ".pending" != name:
                problems.append(f"the marker {name!r} names another file")
        except Exception as error:
            problems.append(f"{name!r} isn't whole under its final name: {type(error).__name__}: {error}")
    return found


def differences(a: Any, b: Any, where: str = "") -> Iterator[str]:
    """Where two trees of tensors and plain values differ, bit for bit."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape or a.numpy().tobytes() != b.numpy().tobytes():
            yield where
    elif isinstance(a, dict) and isinstance(b, dict):
        if a.keys() != b.keys():
            yield f"{where}: keys {sorted(map(str, a.keys() ^ b.keys()))}"
        for key in a.keys() & b.keys():
            yield from differences(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        if len(a) != len(b):
            yield f"{where}: {len(a)} and {len(b)} items"
        for index, pair in enumerate(zip(a, b, strict=False)):
            yield from differences(*pair, f"{where}[{index}]")
    elif type(a) is not type(b) or a != b:
        yield f"{where}: {a!r} and {b!r}"


def last_checkpoint(job: Job) -> dict[str, Any]:
    """What of the newest checkpoint of the run must not depend on kills."""
    store = CheckpointStore(job.url, job.options or None)
    record = store.latest()
    if record is None:
        return {}
    with store.open_verified(record) as file:
        checkpoint = torch.load(file, weights_only=True)
    parts = ("state_dict", "optimizer_states", "lr_schedulers", "loops", "global_step", "epoch")
    return {**{part: checkpoint[part] for part in parts}, "rng": checkpoint["lightning_ckpt_policy"]["rng"]}


def compare_end(job: Job, pids: list[int], reference: Path) -> list[str]:
    """Whether attempts that reached the end, and the last checkpoint, are as in the undisturbed training."""
    problems = []
    whole = torch.load(reference, weights_only=False)
    for pid, (rank, undisturbed) in itertools.product(pids, enumerate(whole["finals"])):
        path = job.final(pid, rank)
        if path.exists():
            final = torch.load(path, weights_only=False)
            seen, expected = final.pop("batches"), undisturbed["batches"]
            if seen != expected[len(expected) - len(seen) :]:
                problems.append(f"the batches that rank {rank} saw to the end differ from the undisturbed training's")
            expected_final = {key: value for key, value in undisturbed.items() if key != "batches"}
            problems += [f"the final state differs on rank {rank}: {d}" for d in differences(expected_final, final)]
    problems += [f"the last checkpoint differs: {d}" for d in differences(whole["checkpoint"], last_checkpoint(job))]
    return problems


class Broken(Exception):
    """Something was lost, left or touched."""


class Watch:
    """What is known of one training from its notes and from looking at its folder, and what follows from it."""

    def __init__(self, job: Job, reference: Path) -> None:
        self.job, self.reference = job, reference
        self.early, self.late = foreign_files()
        self.foreign: dict[str, bytes] = {}
        self.history: dict[str, CheckpointRecord] = {}  # all that were ever confirmed
        self.deleting: dict[str, set[int]] = {}  # what was begun to be deleted, and by which processes
        self.asking: set[tuple[int, str]] = set()  # processes that are about to ask whether they still may delete what
        self.numbers: set[int] = set()
        self.starts = 0
        self.base = 0  # newest step before the attempt
        self.offset = 0
        self.loaded = 0
        self.kinds: Counter[str] = Counter()

    def begin(self) -> None:
        """Put foreign files there. It makes the folder, so a kill while that is made must come before."""
        if not self.foreign:
            self._add_foreign(self.early)

    def _add_foreign(self, files: dict[str, bytes]) -> None:
        in_child(put, self.job, files)
        self.foreign.update(files)

    def _replay(self) -> list[dict[str, Any]]:
        """The notes since the last time; deletes are judged in their order."""
        if not self.job.notes.exists():
            return []
        fresh = Notes.read(self.job.notes, self.offset)
        self.offset = self.job.notes.stat().st_size
        for note in fresh:
            if note["what"] == "confirmed":
                record = CheckpointRecord.from_json(note["record"].encode())
                self.history[record.path] = record
            elif note["what"] == "attempt":
                self.numbers.add(note["number"])
            elif note["what"] == "asking":
                self.asking.add((note["pid"], note["path"]))
            elif note["what"] == "deleting":
                if note["path"] in self.job.rule.kept(self.history.values()):
                    raise Broken(f"{note['path']!r} is being deleted, which the rule keeps: {self._told()}")
                self.deleting.setdefault(note["path"], set()).add(note["pid"])
        return fresh

    def deleting_by(self, pid: int) -> set[str]:
        """What a process has begun to delete."""
        return {path for path, pids in self.deleting.items() if pid in pids}

    def _told(self) -> str:
        records = sorted(self.history.values(), key=lambda record: record.sequence)
        return ", ".join(f"{record.path} (sequence {record.sequence})" for record in records)

    def look(self) -> tuple[Survey, list[dict[str, Any]]]:
        """Check the folder while nothing runs.

        Raises:
            Broken: A promise was.
        """
        fresh = self._replay()
        found = in_child(survey, self.job, self.foreign)
        self.loaded += found.loaded
        if found.problems:
            raise Broken("; ".join(found.problems))
        for record in found.records:
            known = self.history.setdefault(record.path, record)
            if known != replace(record, doomed=known.doomed, doomed_by=known.doomed_by):  # noted before it is deleted
                raise Broken(f"the record of {record.path!r} changed since it was confirmed")
        there = {record.path for record in found.records}
        missing = self.history.keys() - there
        for path in sorted(missing):
            if path not in self.deleting or path in self.job.rule.kept(self.history.values()):
                raise Broken(f"{path!r} was confirmed and is gone; confirmed were {self._told()}")
        newest = found.records[-1].step if found.records else 0
        if newest < self.base:
            raise Broken(f"the newest checkpoint is of step {newest}, and step {self.base} had been confirmed")
        # not before: a start would take another run's only checkpoint for what it goes on with
        if found.records and found.records[-1].sequence > 1 and len(self.foreign) == len(self.early):
            self._add_foreign(self.late)
        return found, fresh

    def after_kill(self) -> Survey:
        """Check the folder after one attempt was killed."""
        found, fresh = self.look()
        captured = [note["step"] for note in fresh if note["what"] == "captured"]
        newest = found.records[-1].step if found.records else 0
        if len(captured) > 1 and newest < captured[-2]:
            raise Broken(f"the newest checkpoint is of step {newest}, and the steps {captured} had been captured")
        self.base = newest
        self.begin()
        for name in found.names:
            self.kinds[role_of(name)] += name not in {r.path + s for r in found.records for s in ("", ".json")}
        return found

    def at_end(self, pids: list[int]) -> None:
        """Check the folder after an attempt has finished."""
        found, _ = self.look()
        expected = self.job.rule.kept(self.history.values())
        there = {record.path for record in found.records}
        if there != expected:
            raise Broken(f"the rule keeps {sorted(expected)}, there are {sorted(there)}; confirmed were {self._told()}")
        names = {name for record in found.records for name in (record.path, record.path + ".json")}
        names |= {f"attempts/{run}-{number:06d}.json" for run, number in found.attempts}
        if found.names != names:
            raise Broken(f"left behind: {sorted(found.names - names)}; missing: {sorted(names - found.names)}")
        runs = {run for run, _ in found.attempts}
        numbers = sorted(number for _, number in found.attempts)
        if len(runs) != 1 or numbers != list(range(1, len(numbers) + 1)):
            raise Broken(f"the attempts are {found.attempts}")
        if not self.numbers <= set(numbers) or len(numbers) > self.starts:
            raise Broken(f"{self.starts} starts, attempts {sorted(self.numbers)} began, and {numbers} are noted")
        if problems := in_child(compare_end, self.job, pids, self.reference):
            raise Broken("; ".join(problems[:5]))


# The plan


@dataclass(frozen=True)
class Plan:
    """What happens to training ``number``; follows from the seed alone."""

    number: int
    overlap: bool
    outage: bool
    every: int
    rule: Rule
    drained: bool
    pause: float
    inside: bool
    cuts: tuple[Cut, ...]


def make_plan(seed: int, number: int, catalogue: list[str], outages: bool = False, devices: int = 1) -> Plan:
    """The plan of training ``number``. The points come from a shuffled deck that goes on from training to training."""
    draw = random.Random(f"{seed}/{number}")
    overlap = number % OVERLAPS == OVERLAPS - 1
    kinds = [where for where in catalogue if where.startswith(("save/", "delete/")) or not overlap]
    deck = [(where, phase) for where in kinds for phase in PHASES]
    turn = number // OVERLAPS if overlap else number - number // OVERLAPS
    points = [dealt(deck, f"{seed}/{overlap}", turn * POINTS_EACH + offset) for offset in range(POINTS_EACH)]
    cuts = []
    for where, phase in points:
        often = where.startswith(("save/", "delete/"))
        last = often and not overlap and draw.random() < 0.15
        cut = Cut(where, phase, draw.choice((1, 1, 1, 2)) if often and not last else 1, last=last)
        if where.startswith("sweep/"):
            cuts.append((Cut(*draw.choice([left for left in LEFT_BEHIND if left[0] in catalogue])), cut))
        else:
            cuts.append((cut,))
    for _ in range(MOMENTS_EACH):
        cuts.append((Cut(moment=draw.random()),))
    draw.shuffle(cuts)

    def order(group: tuple[Cut, ...]) -> int:  # some are met only at the first start, some only at the end
        where = group[-1].where
        if where.startswith("check/folder/") or where.endswith("/mkdir"):
            return -2 if where.startswith("check/") else -1
        return 2 if where.startswith("end/") else int(group[-1].last)

    cuts.sort(key=order)
    drained = draw.random() < 0.6
    outage = outages and number % OUTAGES == 0
    plan = Plan(
        number,
        overlap,
        outage,
        draw.choice((1, 1, 2, 3)),
        draw.choice(RULES),
        drained,
        0.0 if drained else draw.choice((0.0, 0.004, 0.012)),
        draw.random() < 0.5,
        tuple(cut for group in cuts for cut in group),
    )
    if devices == 1:
        return plan
    everyone = tuple(range(devices))
    return replace(
        plan,
        cuts=tuple(
            # what is to be swept is left by rank 0
            replace(cut, ranks=draw.choice([(0,), everyone, *([(rank,) for rank in everyone[1:]] if not left else [])]))
            for cut, following in itertools.zip_longest(plan.cuts, plan.cuts[1:])
            for left in [following is not None and following.where.startswith("sweep/")]
        ),
    )


# kills that leave something for the next start's sweep
LEFT_BEHIND = (
    ("save/payload/write", "during"),
    ("save/payload/fsync", "after"),
    ("save/payload/rename", "after"),
    ("save/payload/create", "after"),
    ("save/payload/close", "before"),
    ("save/payload/send", "after"),
    ("save/payload/complete", "after"),
    ("save/marker/fsync", "after"),
    ("save/marker/upload", "after"),
    ("save/record/write", "during"),
    ("delete/record/unlink", "after"),
)


def dealt(deck: list[T], seed: str, index: int) -> T:
    """Card ``index`` of an endless row of decks, each shuffled for itself."""
    turn, position = divmod(index, len(deck))
    shuffled = list(deck)
    random.Random(f"{seed}/{turn}").shuffle(shuffled)
    return shuffled[position]


# A training, killed until its plan is used up


@dataclass
class Result:
    """What happened to one training."""

    number: int
    kills: list[tuple[str, str]] = field(default_factory=list)  # (where, phase); ("", "") for a random moment
    stops: list[tuple[str, str]] = field(default_factory=list)  # of attempts that were overlapped
    killed: Counter[tuple[int, ...]] = field(default_factory=Counter)  # which ranks, how often
    outages: int = 0  # kills of the server
    unmet: int = 0
    starts: int = 0
    saves: int = 0
    deletes: int = 0
    looks: int = 0
    loaded: int = 0
    left: dict[str, int] = field(default_factory=dict)
    violation: str = ""
    log: list[str] = field(default_factory=list)


class Run:
    """One training with its plan."""

    def __init__(
        self,
        plan: Plan,
        url: str,
        work: Path,
        references: dict[bool, Path],
        seconds: float,
        options: dict[str, Any],
        devices: int = 1,
        server: Any = None,
    ) -> None:
        work.mkdir(parents=True)
        self.plan, self.seconds, self.server = plan, seconds, server
        self.job = Job(url, work, plan.every, plan.rule, plan.drained, plan.pause, plan.inside, options, devices)
        self.watch = Watch(self.job, references[plan.inside])
        self.result = Result(plan.number)
        self.alive: set[int] = set()

    def go(self, report: Callable[[], object]) -> Result:
        """Run it all; ``report`` is called after each kill."""
        result = self.result
        if not self.plan.cuts[0].where.startswith("check/folder/"):
            self.watch.begin()
        try:
            if self.plan.outage:
                self._outage()
            else:
                (self._overlap if self.plan.overlap else self._kill)(report)
        except (Broken, RuntimeError) as error:
            result.violation = str(error)
        finally:
            for pid in self.alive:
                kill(pid, self.job.devices)
        result.starts = self.watch.starts
        result.saves, result.deletes = len(self.watch.history), len(self.watch.deleting)
        result.loaded, result.left = self.watch.loaded, dict(self.watch.kinds)
        return result

    def _start(self, cut: Cut | None, how: signal.Signals = signal.SIGKILL) -> int:
        self.watch.starts += 1
        pid = attempt(self.job, cut, how)
        self.alive.add(pid)
        self.result.log.append(f"start {self.watch.starts}: process {pid}, {cut or 'undisturbed'} ({how.name})")
        return pid

    def _end(self, pid: int, seconds: float = HANGS, stopped: bool = False) -> int | str | None:
        ended = wait_for(pid, seconds, stopped)
        if ended is None and seconds == HANGS:
            raise Broken(f"an attempt hangs; see attempt-{pid}.log")
        if ended not in (None, "stopped"):
            self.alive.discard(pid)
        if ended is not None:
            self.result.log.append(f"    process {pid}: {ended}")
        return ended

    def _moment(self, cut: Cut) -> float:
        """Seconds until a random moment in what is left to train."""
        return cut.moment * self.seconds * (1.2 - self.watch.base / STEPS[self.plan.inside])

    def _finished(self, pids: list[int], ended: int | str | None, allowed: tuple[int, ...] = (0,)) -> None:
        if ended not in allowed:
            log = (self.job.work / f"attempt-{pids[-1]}.log").read_text(errors="replace")
            raise Broken(f"an attempt ended with {ended}: {log[-1500:]}")

    def _kill(self, report: Callable[[], object]) -> None:
        for cut in (*self.plan.cuts, None):
            pid = self._start(cut)
            if cut is not None and not cut.where:
                ended = self._end(pid, self._moment(cut))
                if ended is None:
                    kill(pid, self.job.devices)
                    self.alive.discard(pid)
                    ended = DIED
            else:
                ended = self._end(pid)
            if ended == DIED and cut is not None:
                self.result.kills.append((cut.where, cut.phase))
                self.result.killed[cut.ranks] += 1
                self.result.looks += 1
                self.watch.after_kill()
                report()
                continue
            self._finished([pid], ended)
            self.result.unmet += cut is not None
            break
        self.result.looks += 1
        self.watch.at_end([pid])

    def _outage(self) -> None:
        """Kill the server at random moments, and start it again; nothing that was confirmed may be gone.

        A training that has given up is started again, and one that has ended once more, which clears up what a server
        that was away has left.
        """
        draw = random.Random(self.plan.number)
        pids: list[int] = []
        ended: int | str | None = FAILED
        while ended == FAILED and len(pids) < OUTAGE_STARTS:
            pids.append(self._start(None))
            for _ in range(OUTAGES_EACH):
                ended = self._end(pids[-1], draw.uniform(0.02, 0.15) * self.seconds)
                if ended is not None:
                    break
                self.server.kill()
                time.sleep(draw.uniform(0, OUTAGE_SECONDS))
                self.server.start()
                self.result.outages += 1
                self.result.log.append("    the server was killed and started again")
            else:
                ended = self._end(pids[-1])
            found, _ = self.watch.look()
            self.watch.base = found.records[-1].step if found.records else 0
            self.result.looks += 1
        self._finished(pids, ended, (0, FAILED))
        pids.append(self._start(None))
        self._finished(pids, self._end(pids[-1]))
        self.result.looks += 1
        self.watch.at_end(pids)

    def _overlap(self, report: Callable[[], object]) -> None:
        """An attempt is stopped, a second one starts and is stopped or ends; the first wakes up and goes to its end."""
        cuts = list(self.plan.cuts)
        points = [cut for cut in cuts if cut.where]
        pids: list[int] = []
        for turn, cut in enumerate(cuts):
            first = self._start(cut, signal.SIGSTOP)
            pids.append(first)
            ended = self._stop(first, cut)
            if ended != "stopped":
                self._finished([first], ended)
                self.result.unmet += 1
                break
            self.result.stops.append((cut.where, cut.phase))
            self.watch.after_kill()  # nothing runs, so it is as after a kill
            after = points[(turn + 1) % len(points)] if turn + 1 < len(cuts) else None
            second = self._start(after, signal.SIGSTOP)
            pids.append(second)
            ended = self._end(second, stopped=True)
            if ended != "stopped":
                self._finished([second], ended)
            before, fresh = self.watch.look()
            # a second one that finds nothing left to train may begin no attempt
            superseded = any(note["pid"] == second and note["what"] == "attempt" for note in fresh)
            # an object store's deletes go several at a time: one may have been told that it may, and not have begun
            asked = {path for pid, path in self.watch.asking if pid == first}
            os.kill(first, signal.SIGCONT)
            self._finished([first], self._end(first), (0, SUPERSEDED))
            now, fresh = self.watch.look()
            self.result.looks += 2
            begun = {note["path"] for note in fresh if note["pid"] == first and note["what"] == "deleting"} - asked
            if begun and superseded:
                raise Broken(f"a superseded attempt (process {first}) began to delete {sorted(begun)}")
            # the delete that it was in the middle of may be finished
            gone = {r.path for r in before.records} - {r.path for r in now.records} - self.watch.deleting_by(first)
            if superseded and (gone or not now.names <= before.names):
                raise Broken(
                    f"a superseded attempt (process {first}) went on: deleted {sorted(gone)}, "
                    f"wrote {sorted(now.names - before.names)}"
                )
            if ended == "stopped":
                kill(second, self.job.devices)
                self.alive.discard(second)
                self.result.log.append(f"    process {second}: killed where it was stopped")
                assert after is not None
                self.result.kills.append((after.where, after.phase))
                self.result.killed[tuple(range(self.job.devices))] += 1
                self.result.looks += 1
                self.watch.after_kill()
                report()
                continue
            break
        self.result.looks += 1
        self.watch.at_end(pids)

    def _stop(self, pid: int, cut: Cut) -> int | str | None:
        """Wait until an attempt has stopped itself, or stop it at a random moment once it has begun."""
        if cut.where:
            return self._end(pid, stopped=True)
        offset = self.watch.offset
        deadline = time.monotonic() + HANGS
        while time.monotonic() < deadline:
            notes = Notes.read(self.job.notes, offset) if self.job.notes.exists() else []
            if any(note["pid"] == pid and note["what"] == "attempt" for note in notes):
                break
            ended = self._end(pid, 0.005)
            if ended is not None:
                return ended
        ended = self._end(pid, self._moment(cut))
        if ended is not None:
            return ended
        os.kill(pid, signal.SIGSTOP if self.job.devices == 1 else signal.SIGUSR1)
        return self._end(pid, stopped=True)


# Before all: the undisturbed training, and what a protocol is made of


def scout(url: str, work: Path, options: dict[str, Any], devices: int = 1) -> tuple[dict[bool, Path], list[str], float]:
    """Run undisturbed trainings: the states to compare with, all moments there are, and the seconds that one takes."""
    work.mkdir(parents=True)
    references = {inside: work / f"undisturbed-{inside}.pt" for inside in (False, True)}
    met: set[str] = set()
    seconds = 0.0
    turns: list[tuple[bool, Cut | None]] = [(False, None), (True, None)]
    for turn in range(6):
        if turn == len(turns):
            known = [Cut(*left) for left in LEFT_BEHIND if left[0] in met]
            turns += [(False, left) for left in (*known[:3], known[-1])]
        inside, left = turns[turn]
        job = Job(f"{url}/scout-{turn}", work / str(turn), rule=Rule(last=1), inside=inside, options=options)
        job = replace(job, devices=devices)
        job.work.mkdir()
        for cut in (left, None) if left is not None else (None,):
            began = time.monotonic()
            pid = attempt(job, cut, trace=True)
            ended = wait_for(pid, HANGS)
            if cut is None and ended != 0:
                give_up(job, pid, ended)
            seconds = seconds or time.monotonic() - began
        met |= {note["where"] for note in Notes.read(job.notes) if note["what"] == "met"}
        if left is None:
            plain = attempt(job, None, saves=False)
            if (ended := wait_for(plain, HANGS)) != 0:
                give_up(job, plain, ended)
            in_child(write_reference, job, plain, pid, references[inside])
    return references, sorted(met), seconds


def give_up(job: Job, pid: int, ended: int | str | None) -> NoReturn:
    kill(pid, job.devices)
    log = (job.work / f"attempt-{pid}.log").read_text(errors="replace")
    raise RuntimeError(f"the training doesn't work undisturbed ({ended}):\n{log[-3000:]}")


def write_reference(job: Job, plain: int, saving: int, reference: Path) -> None:
    """Keep what an undisturbed training ended with, after comparing it with one that saved nothing."""
    finals = [torch.load(job.final(saving, rank), weights_only=False) for rank in range(job.devices)]
    expected = [torch.load(job.final(plain, rank), weights_only=False) for rank in range(job.devices)]
    if found := list(differences(expected, finals)):
        raise RuntimeError(f"saving changes the training: {found[:5]}")
    torch.save({"finals": finals, "checkpoint": last_checkpoint(job)}, reference)


# The campaign


@dataclass(frozen=True)
class Settings:
    """What each lane needs."""

    url: str
    folder: Path
    seed: int
    options: dict[str, Any]
    references: dict[bool, Path]
    catalogue: list[str]
    seconds: float
    devices: int
    server: str | None


def lane(connection: multiprocessing.connection.Connection, settings: Settings) -> None:
    """A process without threads that runs the trainings it is told, one after another."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with store(settings.url, settings.options, settings.server) as (url, options, server):
        while (number := connection.recv()) is not None:
            outages = server is not None and server.lasting
            plan = make_plan(settings.seed, number, settings.catalogue, outages, settings.devices)
            folder = settings.folder / f"training-{number}"
            known = settings.references, settings.seconds
            run = Run(plan, f"{url}/training-{number}", folder, *known, options, settings.devices, server)
            result = run.go(lambda: connection.send(None))
            connection.send(result)
            if not result.violation:
                if server is None:  # its folder goes with it
                    in_child(discard, run.job)
                shutil.rmtree(run.job.work)


@contextlib.contextmanager
def store(url: str, options: dict[str, Any], name: str | None) -> Iterator[tuple[str, dict[str, Any], Any]]:
    """Where to work: the URL given, or a bucket of a server of this process's own."""
    if name is None:
        yield url, options, None
        return
    with servers().SERVERS[name]() as server:
        yield f"{in_child(lambda: server.bucket)}/campaign", server.options(), server


def servers() -> Any:
    """The tests' module of servers."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    try:
        return importlib.import_module("tests.servers")
    finally:
        sys.path.pop(0)


def discard(job: Job) -> None:
    fs, root = backends_module.make_filesystem(job.url, job.options)
    fs.rm(root, recursive=True)


@dataclass
class Tally:
    """What all trainings together gave."""

    results: list[Result] = field(default_factory=list)

    @property
    def kills(self) -> int:
        return sum(len(result.kills) for result in self.results)

    def total(self, name: str) -> int:
        return sum(getattr(result, name) for result in self.results)

    def coverage(self, what: str, catalogue: list[str]) -> dict[str, dict[str, int]]:
        """Hits of each moment: operation, then phase."""
        counted = Counter(point for result in self.results for point in getattr(result, what))
        return {where: {phase: counted[where, phase] for phase in PHASES} for where in catalogue}

    def as_json(self, arguments: argparse.Namespace, catalogue: list[str], seconds: float) -> dict[str, Any]:
        """The results file."""
        moments = sum(point == ("", "") for result in self.results for point in result.kills)
        left: Counter[str] = Counter()
        killed: Counter[tuple[int, ...]] = Counter()
        for result in self.results:
            left.update(result.left)
            killed.update(result.killed)
        protocol = "local path" if arguments.url is None else arguments.url.split("://", 1)[0]
        if "://" not in (arguments.url or ""):
            protocol = arguments.server or "local path"
        return {
            "command": f"python benchmarks/crash_campaign.py --kills {arguments.kills} --seed {arguments.seed}"
            + (f" --server {arguments.server}" if arguments.server else "")
            + (f" --devices {arguments.devices}" if arguments.devices > 1 else ""),
            "store": protocol,
            "ranks": arguments.devices,
            "seed": arguments.seed,
            "versions": {
                "python": platform.python_version(),
                "system": platform.system(),
                **{
                    name: metadata.version(name)
                    for name in ("lightning-ckpt-policy", "lightning", "torch", "torchdata", "fsspec")
                },
            },
            "kills": self.kills,
            "kills_at_a_step_of_the_protocol": self.kills - moments,
            "kills_at_a_random_moment": moments,
            "kills_of_ranks": {" and ".join(map(str, ranks)): count for ranks, count in sorted(killed.items())},
            "kills_of_the_server": self.total("outages"),
            "trainings": len(self.results),
            "starts": self.total("starts"),
            "overlaps": sum(len(result.stops) for result in self.results),
            "planned_moments_that_never_came": self.total("unmet"),
            "saves_confirmed": self.total("saves"),
            "deletes": self.total("deletes"),
            "folders_checked": self.total("looks"),
            "payloads_verified_and_loaded": self.total("loaded"),
            "files_left_by_kills_and_swept": dict(sorted(left.items())),
            "violations": [
                {"training": result.number, "what": result.violation} for result in self.results if result.violation
            ],
            "seconds": round(seconds, 1),
            "kills_by_moment": self.coverage("kills", catalogue),
            "overlaps_by_moment": self.coverage(
                "stops", [where for where in catalogue if where.startswith(("save/", "delete/"))]
            ),
        }


def drive(settings: Settings, arguments: argparse.Namespace, console: Console) -> Tally:
    """Keep the lanes at work until there were enough kills, or something broke."""
    fork = multiprocessing.get_context("fork")
    tally = Tally()
    lanes: dict[multiprocessing.connection.Connection, Any] = {}
    for _ in range(1 if arguments.only is not None else arguments.parallel):
        ours, theirs = fork.Pipe()
        process = fork.Process(target=lane, args=(theirs, settings), daemon=False)
        process.start()
        theirs.close()
        lanes[ours] = process
    numbers = iter([arguments.only] if arguments.only is not None else range(10**9))
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    done = 0
    broken = False
    # threads only from here on: the lanes are forked
    with Progress(*columns, console=console, disable=arguments.quiet) as progress:
        task = progress.add_task("kills", total=arguments.kills if arguments.only is None else None)

        def next_number() -> int | None:
            return None if broken or (done >= arguments.kills and arguments.only is None) else next(numbers, None)

        for connection in lanes:
            connection.send(next_number())
        open_ones = set(lanes)
        while open_ones:
            for connection in multiprocessing.connection.wait(list(open_ones)):
                assert isinstance(connection, multiprocessing.connection.Connection)
                try:
                    message = connection.recv()
                except EOFError:
                    open_ones.discard(connection)
                    continue
                if message is None:
                    done += 1
                    progress.update(task, completed=done)
                    continue
                tally.results.append(message)
                broken = broken or (bool(message.violation) and not arguments.keep_going)
                trainings = len(tally.results)
                progress.update(task, description=f"kills ({trainings} trainings, {tally.total('saves')} saves)")
                connection.send(next_number())
    for process in lanes.values():
        process.join()
        if process.exitcode:
            raise RuntimeError(f"a lane of the campaign ended with status {process.exitcode}")
    tally.results.sort(key=lambda result: result.number)
    return tally


def show(tally: Tally, catalogue: list[str], console: Console) -> None:
    """The coverage, by activity and file."""
    table = Table(title="Kills at each step of the protocol")
    for name in ("activity", "file", "operation", *PHASES):
        table.add_column(name, justify="right" if name in PHASES else "left")
    for where, hits in tally.coverage("kills", catalogue).items():
        table.add_row(*where.split("/"), *(str(hits[phase]) for phase in PHASES))
    console.print(table)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="folder to work in, any fsspec URL (default: a temporary local folder)")
    parser.add_argument("--storage-options", type=json.loads, default={}, help="the filesystem's options, as JSON")
    parser.add_argument("--server", help="instead of --url: start this server of tests/servers.py, such as moto")
    parser.add_argument("--devices", type=int, default=1, help="ranks that train together (default: 1)")
    parser.add_argument("--kills", type=int, default=200, help="stop after so many (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all plans (default: 0)")
    parser.add_argument("--parallel", type=int, default=2, help="trainings at a time (default: 2)")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="repeat this training alone")
    parser.add_argument("--out", type=Path, help="write the results there, as JSON")
    parser.add_argument("--keep-going", action="store_true", help="don't stop at the first broken promise")
    parser.add_argument("--quiet", action="store_true", help="no progress, no table")
    arguments = parser.parse_args(argv)
    for name in ("devices", "kills", "parallel"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} {getattr(arguments, name)}: give at least 1")
    if arguments.server is not None and (arguments.url or arguments.server not in servers().SERVERS):
        parser.error(f"--server {arguments.server}: give one of {', '.join(servers().SERVERS)}, and no --url")
    if (arguments.url or "").startswith("memory:"):
        parser.error("--url memory://...: it dies with the process that is killed; give a store that doesn't")
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    console = Console()
    torch.set_num_threads(1)  # a fork mustn't inherit a pool
    if (arguments.url or "").startswith("file://"):
        arguments.url = arguments.url[len("file://") :]
    folder = Path(tempfile.mkdtemp(prefix="crash-campaign-"))
    url = str(folder / "store") if arguments.url is None else f"{arguments.url.rstrip('/')}/{folder.name}"
    began = time.monotonic()
    with store(url, arguments.storage_options, arguments.server) as (where, options, _):
        references, catalogue, seconds = scout(where, folder / "scout", options, arguments.devices)
    settings = Settings(
        url,
        folder,
        arguments.seed,
        arguments.storage_options,
        references,
        catalogue,
        seconds,
        arguments.devices,
        arguments.server,
    )
    tally = drive(settings, arguments, console)
    took = time.monotonic() - began
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(tally.as_json(arguments, catalogue, took), indent=1) + "\n")
    if not arguments.quiet:
        show(tally, catalogue, console)
    console.print(
        f"{tally.kills} kills in {len(tally.results)} trainings, {tally.total('saves')} saves confirmed, "
        f"{tally.total('deletes')} deletes, {tally.total('looks')} folders checked, "
        f"{sum(bool(result.violation) for result in tally.results)} broken promises ({took:.0f} s).",
        highlight=False,
    )
    bad = [result for result in tally.results if result.violation]
    if not bad:
        shutil.rmtree(folder)
        return 0
    for result in bad:
        where = f"--url {arguments.url} " if arguments.url else ""
        where += f"--server {arguments.server} " if arguments.server else ""
        where += f"--devices {arguments.devices} " if arguments.devices > 1 else ""
        text = [
            f"Training {result.number}, after kill {len(result.kills)}: {result.violation}",
            *result.log,
            f"Kept: {folder / f'training-{result.number}'} (notes, logs)"
            + ("" if arguments.server else f" and {url}/training-{result.number}"),
            f"Repeat: python benchmarks/crash_campaign.py {where}--seed {arguments.seed} --only {result.number}",
        ]
        console.print("\n".join(text), style="red", markup=False, highlight=False)
    return 1


if __name__ == "__main__":
    for text in (".*does not have many workers.*", ".*set_vital.*", ".*LeafSpec.*"):
        warnings.filterwarnings("ignore", text)
    sys.exit(main())
