"""What saving costs a training on this machine and store, side by side with the alternatives.

    python benchmarks/save_overhead.py --size 768MiB
    python benchmarks/save_overhead.py --url s3://bucket/folder --storage-options '{"anon": false}' --device cuda
    python benchmarks/save_overhead.py --sweep --max-size 1GiB
    python benchmarks/save_overhead.py --devices 2
    python benchmarks/save_overhead.py --servers --size 256MiB --every 4 --batch-size 8

The same training (MLP blocks, AdamW, one device or several with DDP) runs without saving and with each way of saving,
each run in a fresh process, in turns over several rounds. Ratios are taken within a round. The variants:

    none         no saving
    stock        ModelCheckpoint
    stock_async  ModelCheckpoint with Lightning's AsyncCheckpointIO
    dcp          torch.distributed.checkpoint.async_save
    dcp_reused   the same with a stager that is kept, so that its memory is reused
    eager        CheckpointPolicy(snapshot="eager")
    overlapped   CheckpointPolicy(snapshot="overlapped")

With ``--servers`` stock and overlapped save to servers on 127.0.0.1 that speak the protocols of S3, GCS and Azure (see
tests/servers.py), each run to a fresh one. Training takes one core there, and waits in each batch after one at which a
save is due until that is written, so that both ways of saving have the machine for themselves.

All keep every checkpoint. The package and DCP see to it that what they report as saved is on the disk, stock doesn't.
On a GPU every batch ends with a synchronization, in each variant.
What is measured, from outside and in the same way for each variant:

    held      per save, what the main thread spends in callback hooks (Lightning's profiler times them), the barrier
              before the next optimizer step included, the package's audits apart; "own count" is its own figure
    batches   per save, by how much the batches from its trigger to the end of its write are longer than the median
              batch of that run while nothing is written: held time and competition for cores
    loop      from the first batch to the end of the last one, without waiting for writes; "total" with that
    idle      what all hooks take in a batch at which nothing is due, in a training of a tiny model; with several
              devices the mean, where saves are due after some time: stock broadcasts in each batch whether that is so
    GIL       (--gil) for how long at most a spinning thread got no GIL while a save is written and the main thread
              sleeps, less the time for which the system had no core for it; "none" is what the machine itself does
    CPU       processor seconds per GiB saved over those of the run without saving; "saving only" is the main thread in
              hooks and Python's background threads: less noise, but without the helper threads of torch's operations
    memory    highest resident memory over that of the run without saving, as a multiple of the state
    write     the state's bytes by the duration of the call that writes it, serialization included
    saved     from the end of the batch at which a save is due until it is written
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import itertools
import json
import math
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

import fsspec
import torch
import torch.distributed.checkpoint as dcp
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.profilers import PassThroughProfiler
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_saver
from torch.utils.data import DataLoader

from lightning_ckpt_policy import CheckpointPolicy, CheckpointStore, EveryInterval, EveryNTrainSteps, KeepAll
from lightning_ckpt_policy.snapshot import Staging, take_snapshot

OURS = ("eager", "overlapped")
VARIANTS = ("none", "stock", "stock_async", "dcp", "dcp_reused", *OURS)
BYTES_PER_PARAMETER = 12  # float32, with AdamW's two moments
MIB, GIB = 1 << 20, 1 << 30
CHUNK = 8 * MIB
MAX_ACTIVATIONS = GIB
CHILD = "_run"
JOB = "SAVE_OVERHEAD_JOB"  # how the processes that Lightning starts on further devices learn what to do
CHILD_TIMEOUT = 3600.0  # seconds after which a run counts as failed
# a run that is never due, with a model so small that its step leaves the caches alone
IDLE = {"size": 1 << 16, "tensors": 4, "batch_size": 8, "device": "cpu", "every": 10**9, "saves": 0, "steps": 500}
IDLERS = ("stock", *OURS)
# heading and factor of each figure
FELT = {
    "held": ("held, ms", 1e3),
    "held_first": ("first save, ms", 1e3),
    "own_held": ("own count, ms", 1e3),
    "batches": ("batches, s/save", 1.0),
    "loop": ("loop, × none", 1.0),
    "slow_down": ("slow-down, s/save", 1.0),
    "total": ("total, × none", 1.0),
    "idle": ("idle, µs/batch", 1e6),
    "gil": ("GIL, ms", 1e3),
}
COSTS = {
    "cpu": ("CPU, s/GiB", 1.0),
    "saving_cpu": ("saving only, s/GiB", 1.0),
    "memory": ("memory, × state", 1.0),
    "write": ("write, MiB/s", 1 / MIB),
    "saved": ("saved, s", 1.0),
    "held_to_overlapped": ("held ÷ overlapped's", 1.0),
    "held_to_copy": ("held ÷ bare copy", 1.0),
    "slow_down_to_stock_async": ("slow-down ÷ stock_async's", 1.0),
    "saving_cpu_to_stock": ("saving CPU ÷ stock's", 1.0),
    "write_to_plain": ("write ÷ plain write", 1.0),
    "saved_to_stock": ("saved ÷ stock's", 1.0),
}
SERVED = ("saved", "saved_to_stock", "write", "memory", "saving_cpu", "held")
CLIENTS = ("s3fs", "gcsfs", "adlfs")
AXES = {"size": "bytes of state", "tensors": "parameter tensors", "records": "records in the store"}
SWEPT = {"held": ("held, ms", 1e3), "idle": ("idle, µs/batch", 1e6), "start": ("start of a fit, ms", 1e3)}


# one run, in a process of its own


class Blocks(LightningModule):
    """Residual blocks whose parameters, with AdamW's state, have so many bytes in so many parameter tensors."""

    def __init__(self, size: int, tensors: int) -> None:
        super().__init__()
        self.width = max(1, round(math.sqrt(size / BYTES_PER_PARAMETER / tensors)))
        self.layers = nn.ModuleList(nn.Linear(self.width, self.width, bias=False) for _ in range(tensors))
        self.state_bytes = BYTES_PER_PARAMETER * self.width**2 * tensors

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch
        for layer in self.layers:
            x = torch.add(x, torch.relu(layer(x)), alpha=1 / len(self.layers))
        return (x - 1).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class HookTimer(PassThroughProfiler):
    """Wall and CPU seconds that the main thread spends in the hooks of all callbacks but the meter."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = self.cpu_seconds = 0.0
        self._inside = False

    @contextlib.contextmanager
    def profile(self, action_name: str) -> Iterator[None]:
        if self._inside or not action_name.startswith("[Callback]") or action_name.startswith("[Callback]Meter"):
            yield
            return
        self._inside = True
        cpu, began = time.thread_time(), time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - began
            self.cpu_seconds += time.thread_time() - cpu
            self._inside = False


class Meter(Callback):
    """Notes when each batch began, and the time in hooks since the one before."""

    def __init__(self, timer: HookTimer, pause: Callable[[int, bool], None]) -> None:
        self.timer = timer
        self.pause = pause
        self.starts: list[float] = []
        self.ends: list[float] = []
        self.hooks: list[float] = []

    def mark(self) -> None:
        self.starts.append(time.perf_counter())
        self.hooks.append(self.timer.seconds)
        self.timer.seconds = 0.0

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        self.pause(trainer.global_step, False)
        if not self.starts:
            self.first_step = trainer.global_step
            self.cpu_began, self.hook_cpu_began = cpu_seconds(), self.timer.cpu_seconds
        self.mark()

    def on_before_optimizer_step(self, trainer: Trainer, *args: Any) -> None:
        self.pause(trainer.global_step, True)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if pl_module.device.type == "cuda":  # else a hook that waits for the device seems to have held it
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())  # whatever saves comes after this

    def on_train_end(self, *args: Any) -> None:
        self.mark()


class DcpSave(Callback):
    """Saves with ``dcp.async_save``, one save at a time."""

    def __init__(self, url: str, every: int, options: dict[str, Any], reused: bool, device: str) -> None:
        self.url = url
        self.every = every
        self.options = options
        self.stager: Any = None
        if reused:
            from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions  # not in older torch

            self.stager = DefaultStager(StagingOptions() if device == "cuda" else StagingOptions(*[False] * 4))
        self.staged: Any = None
        self.written: Any = None

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if trainer.global_step % self.every:
            return
        self.finish()
        target = f"{self.url}/step-{trainer.global_step}"
        where: dict[str, Any] = {"checkpoint_id": target}
        if "://" in target:
            from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

            where = {"storage_writer": FsspecWriter(target, **self.options)}
        if self.stager is not None:
            where["async_stager"] = self.stager
        state = {"model": pl_module.state_dict(), "optimizer": trainer.optimizers[0].state_dict()}
        answer: Any = dcp.async_save(state, **where)
        self.staged = getattr(answer, "staging_completion", None)
        self.written = getattr(answer, "upload_completion", answer)

    def on_before_optimizer_step(self, *args: Any) -> None:
        if self.staged is not None:
            self.staged.result()
            self.staged = None

    def finish(self) -> None:
        if self.written is not None:
            self.written.result()
            self.written = None

    def on_train_end(self, *args: Any) -> None:
        self.finish()
        if self.stager is not None:
            self.stager.close()


class GilWatch(threading.Thread):
    """Spins, and notes the longest time for which it did not run while ``watching``."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        sys.setswitchinterval(1e-4)  # whoever holds the GIL longer than that is where it can't let go of it
        self.watching = False
        self.gap = self.hold = 0.0

    def run(self) -> None:
        descriptor = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        last = looked = time.perf_counter()
        waited = 0.0
        while True:
            now = time.perf_counter()
            if now - looked > 1e-3:
                total = int(os.pread(descriptor, 64, 0).split()[1]) / 1e9  # seconds for which it waited for a core
                if self.watching:
                    self.gap = max(self.gap, now - last)
                    self.hold = max(self.hold, now - last - (total - waited))
                waited = total
                looked = now = time.perf_counter()
            last = now


def cpu_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def watch_threads() -> Callable[[], float]:
    """From now on, the CPU seconds of Python's threads other than the main one, also of those that have ended."""
    ended: list[float] = []
    run = threading.Thread.run

    def timed(thread: threading.Thread) -> None:
        try:
            run(thread)
        finally:
            ended.append(time.thread_time())

    def seconds() -> float:
        alive = [thread.ident for thread in threading.enumerate() if thread is not threading.main_thread()]
        return sum(ended) + sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in alive if ident)

    threading.Thread.run = timed  # type: ignore[method-assign]
    return seconds


def time_calls(owner: Any, name: str) -> list[tuple[float, float]]:
    """When each call of ``owner.name`` from now on began and ended."""
    spans: list[tuple[float, float]] = []
    call = getattr(owner, name)

    @functools.wraps(call)
    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            spans.append((began, time.perf_counter()))

    setattr(owner, name, timed)
    return spans


def fit(job: dict[str, Any], pause: Callable[[int, bool], None], ckpt_path: str | None = None) -> tuple[Meter, Any]:
    """Train; the meter and the callback that saved."""
    variant, url, every, options = job["variant"], job["url"], job["every"], job["storage_options"]
    saver: Any = None
    if variant in OURS:
        save = {"snapshot": variant, "save_on_train_end": False, "storage_options": options or None}
        saver = CheckpointPolicy(
            url, EveryInterval(hours=1000) if job["timed"] else EveryNTrainSteps(every), KeepAll(), **save
        )
    elif variant.startswith("stock"):
        when: dict[str, Any] = {"every_n_train_steps": every}
        if job["timed"]:
            when = {"train_time_interval": timedelta(hours=1000)}
        saver = ModelCheckpoint(url, "{step}", save_top_k=-1, **when)
    elif variant.startswith("dcp"):
        saver = DcpSave(url, every, options, variant == "dcp_reused", job["device"])
    timer = HookTimer()
    meter = Meter(timer, pause)
    trainer = Trainer(
        accelerator="gpu" if job["device"] == "cuda" else "cpu",
        devices=job["devices"],
        strategy="ddp" if job["devices"] > 1 else "auto",
        use_distributed_sampler=False,
        max_epochs=-1,
        max_steps=job["steps"],
        callbacks=[meter] if saver is None else [meter, saver],
        plugins=[AsyncCheckpointIO()] if variant == "stock_async" else None,
        profiler=timer,
        enable_checkpointing=isinstance(saver, (ModelCheckpoint, CheckpointPolicy)),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.manual_seed(1)
    if job["drained"]:
        torch.set_num_threads(1)  # those of a step spin for a while after it
    model = Blocks(job["size"], job["tensors"])
    batches = [torch.randn(job["batch_size"], model.width)] * (job["steps"] + 1)
    trainer.fit(model, DataLoader(batches, batch_size=None), ckpt_path=ckpt_path)
    return meter, saver


def add_records(folder: Path, count: int) -> None:
    """Records of the same run, all older than the one in the folder, until there are so many."""
    (newest,) = CheckpointStore(folder).records()
    for sequence in range(1, count):
        old = dataclasses.replace(newest, path=f"old-{sequence:06d}.ckpt", sequence=sequence, size=1)
        (folder / old.path).write_bytes(b"x")
        (folder / f"{old.path}.json").write_bytes(old.to_json())
    (folder / f"{newest.path}.json").write_bytes(dataclasses.replace(newest, sequence=count).to_json())


def training(job: dict[str, Any]) -> dict[str, Any]:
    """One training of one variant, measured; seconds and bytes."""
    variant, every = job["variant"], job["every"]
    gaps: list[tuple[float, float]] = []
    watch = GilWatch()

    def pause(step: int, after_barrier: bool) -> None:
        until = time.perf_counter() + CHILD_TIMEOUT
        wanted = step // every if job["drained"] and after_barrier and variant != "none" else 0
        while len(writes) < wanted and time.perf_counter() < until:
            time.sleep(0.002)
        if job["gil"] and step and step % every == 0:
            watch.watching = True
            # what a save does in the background before the barrier, and after it
            until = time.perf_counter() + (300.0 if after_barrier and variant != "none" else 1.0)
            while (not after_barrier or len(writes) < step // every) and time.perf_counter() < until:
                time.sleep(0.05)
            watch.watching = False
            if after_barrier:
                gaps.append((watch.gap, watch.hold))
                watch.gap = watch.hold = 0.0

    ckpt_path = None
    if job["records"]:  # a run that has saved as often already
        fit({**job, "every": 1, "steps": 1}, lambda *_: None)
        add_records(Path(job["url"]), job["records"])
        ckpt_path = "last"
    writers = {"stock": (TorchCheckpointIO, "save_checkpoint"), "dcp": (state_dict_saver, "save")}
    writes = time_calls(*writers.get(variant.split("_")[0], (CheckpointStore, "commit")))
    if job["gil"]:
        watch.start()
    thread_seconds = watch_threads()
    meter, saver = fit(job, pause, ckpt_path)
    returned, cpu = time.perf_counter(), cpu_seconds() - meter.cpu_began

    steps = [every * (index + 1) for index in range(job["saves"] if variant != "none" else 0)]
    own, audits = [], [0.0] * len(steps)
    if variant in OURS:
        for outcome in saver.history:
            if outcome.error is not None:
                raise outcome.error
        steps = [outcome.step for outcome in saver.history]
        own = [outcome.held_seconds for outcome in saver.history]
        audits = [outcome.audit_seconds for outcome in saver.history]
    if len(writes) != len(steps):
        raise RuntimeError(f"{len(writes)} writes for {len(steps)} saves")
    starts, hooks = meter.starts, meter.hooks[1:]  # the first is of the fit's start
    wall = [after - before for before, after in itertools.pairwise(starts)]
    due = [step - 1 - meter.first_step for step in steps]  # the batches at whose end a save is due
    flights = [
        [index for index in range(first, len(wall)) if starts[index] < end]
        for first, (_, end) in zip(due, writes, strict=True)
    ]
    busy = {index for flight in flights for index in (*flight, flight[-1] + 1)}  # that one reports how it ended
    idle = [index for index in range(2, len(wall)) if index not in busy]
    usual = statistics.median(wall[index] for index in idle) if idle else None
    middle = statistics.fmean if job["timed"] else statistics.median  # what few of the batches bear counts too
    usual_hooks = middle(hooks[index] for index in idle) if idle else None
    return {
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if job["device"] == "cuda" else None,
        "saves": len(steps),
        "step_seconds": usual or statistics.median(wall),
        "start_seconds": meter.hooks[0],
        "held_seconds": [
            sum(hook - (usual_hooks or 0.0) for hook in hooks[first:after]) - audit
            for first, after, audit in zip(due, [*due[1:], None], audits, strict=False)
        ],
        "own_held_seconds": own,
        "audit_seconds": audits,
        "batches_seconds": [
            sum(wall[index] - usual for index in flight) - audit
            for flight, audit in zip(flights if usual is not None else [], audits, strict=False)
        ],
        "idle_seconds": usual_hooks,
        "loop_seconds": starts[-1] - starts[0],
        "total_seconds": returned - starts[0],
        "write_seconds": [end - began for began, end in writes],
        "saved_seconds": [end - meter.ends[first] for first, (_, end) in zip(due, writes, strict=True)],
        "cpu_seconds": cpu,
        "saving_cpu_seconds": meter.timer.cpu_seconds - meter.hook_cpu_began + thread_seconds(),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "gap_seconds": [gap for gap, _ in gaps],
        "gil_seconds": statistics.median(hold for _, hold in gaps) if gaps else None,
    }


def calibrate(job: dict[str, Any]) -> dict[str, Any]:
    """The batch size with which a step takes about as long as wanted."""
    model = Blocks(job["size"], job["tensors"]).to(job["device"])
    optimizer: Any = model.configure_optimizers()

    def step_ms(batch_size: int) -> float:
        batch = torch.randn(batch_size, model.width, device=job["device"])
        seconds = []
        for _ in range(3):
            began = time.perf_counter()
            optimizer.zero_grad()
            model.training_step(batch, 0).backward()
            optimizer.step()
            if job["device"] == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        return 1e3 * min(seconds)

    most = max(8, MAX_ACTIVATIONS // (8 * model.width * job["tensors"]))
    smaller, size, before, now = 0, 8, 0.0, step_ms(8)
    while now < job["step_ms"] and size < most:
        smaller, size, before = size, min(2 * size, most), now
        now = step_ms(size)
    if smaller and now > job["step_ms"] > before:
        size = smaller + round((size - smaller) * (job["step_ms"] - before) / (now - before))
    return {"batch_size": size}


class Nowhere:
    """A file object that forgets what is written to it."""

    def write(self, data: memoryview) -> int:
        return data.nbytes

    def flush(self) -> None:
        pass


def reference(job: dict[str, Any]) -> dict[str, Any]:
    """A bare copy of the state into warm memory, in turns with a snapshot of it; and a plain write of it with fsync.

    And what ``torch.save`` takes for its structure alone, its bytes going nowhere.
    """
    model = Blocks(job["size"], job["tensors"])
    cuda = job["device"] == "cuda"
    tensors = [p.detach().to(job["device"]).clone() for p in model.parameters() for _ in range(3)]
    warm = [torch.ones(tensor.shape, pin_memory=cuda) for tensor in tensors]
    names = [name for name, _ in model.named_parameters()]
    moments = [
        {"step": torch.tensor(1.0), "exp_avg": tensors[n + 1], "exp_avg_sq": tensors[n + 2]}
        for n in range(0, len(tensors), 3)
    ]
    state = {
        "state_dict": dict(zip(names, tensors[::3], strict=True)),
        "optimizer_states": [{"state": dict(enumerate(moments))}],
    }
    staging = Staging(pinned=cuda)
    take_snapshot(state, staging).release()  # its memory is warm from now on, too
    torch.serialization.set_crc32_options(False)  # as the package saves
    copies, snapshots, structures, writes = [], [], [], []
    for _ in range(7):
        if not cuda:  # torch.save would copy from the device
            began = time.perf_counter()
            torch.save(state, Nowhere())
            structures.append(time.perf_counter() - began)
        began = time.perf_counter()
        take_snapshot(state, staging).release()
        snapshots.append(time.perf_counter() - began)
        began = time.perf_counter()
        for target, source in zip(warm, tensors, strict=True):
            target.copy_(source, non_blocking=cuda)
        if cuda:
            torch.cuda.synchronize()
        copies.append(time.perf_counter() - began)
    fs, path = fsspec.core.url_to_fs(job["url"], **job["storage_options"])
    if isinstance(fs, LocalFileSystem):
        os.makedirs(path)
        views = [memoryview(tensor.flatten().numpy()).cast("B") for tensor in warm]
        for number in range(3):
            began = time.perf_counter()
            with open(os.path.join(path, str(number)), "wb", buffering=CHUNK) as file:
                for view in views:
                    for start in range(0, len(view), CHUNK):
                        file.write(view[start : start + CHUNK])
                file.flush()
                os.fsync(file.fileno())
            writes.append(time.perf_counter() - began)
    return {
        "state_bytes": model.state_bytes,
        "copy_seconds": copies,
        "snapshot_seconds": snapshots,
        "structure_seconds": structures,
        "plain_write_seconds": writes,
    }


def child() -> None:
    """Do the job that stands on stdin, and answer on stdout."""
    rank = int(os.environ.get("LOCAL_RANK", 0))
    job = json.loads(os.environ[JOB]) if rank else json.load(sys.stdin)
    if job["devices"] > 1:
        os.environ[JOB] = json.dumps(job)
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed
    warnings.simplefilter("ignore")
    protocol = job["url"].partition("://")[0] if "://" in job["url"] else "file"
    fsspec.config.conf.setdefault(protocol, {}).update(job["storage_options"])  # stock has no option for it
    try:
        if rank:
            fit(job, lambda *_: None)
            os._exit(0)
        result = {"training": training, "calibrate": calibrate, "reference": reference}[job["kind"]](job)
    except BaseException as error:
        last = str(error).strip().splitlines()[-1:]  # DCP's begin with a traceback
        result = {"error": ": ".join([type(error).__name__, *last]).replace(job["url"], "<url>")[:300]}
    with answer:
        json.dump(result, answer)
    os._exit(0)  # all is measured and drained: threads that hang must not hold this process


# all runs, from the parent


def plan(args: argparse.Namespace, number: int, local: bool) -> list[dict[str, Any]]:
    """The runs of a round, in order: how the job of each differs from the usual one."""
    if args.servers is not None:
        order = ["stock", "overlapped"][:: -1 if number % 2 else 1]
        served = [{"server": name, "variant": variant, "drained": True} for name in args.servers for variant in order]
        return [{"group": "main", **changes} for changes in ({"variant": "none", "drained": True}, *served)]
    if args.sweep is not None:
        ranges = {
            "size": (args.min_size, args.max_size, 4),
            "tensors": (10, args.max_tensors, 10),
            "records": (10, args.max_records if local else 0, 10),  # made as files
        }
        runs = []
        for axis in args.sweep:
            value, last, factor = ranges[axis]
            while value <= last:
                runs += [{"group": axis, axis: value, "variant": one} for one in OURS if one in args.variants]
                value *= factor
        return runs
    turn = number % len(args.variants)
    order = args.variants[turn:] + args.variants[:turn]
    return [
        {"group": "reference", "variant": "copy and write", "kind": "reference"},
        *({"group": "main", "variant": variant} for variant in order),
        # what the others do in an idle batch is nothing at all
        *({"group": "idle", "variant": one, **IDLE, "timed": args.devices > 1} for one in order if one in IDLERS),
        *({"group": "gil", "variant": variant, "gil": True} for variant in order if args.gil and variant != "stock"),
    ]


def run(job: dict[str, Any], base: str, local: bool) -> dict[str, Any]:
    """What a job measured in a fresh process and a folder of its own, or its error."""
    url = f"{base}/{uuid.uuid4().hex[:8]}"
    try:
        done = subprocess.run(
            [sys.executable, os.path.abspath(__file__), CHILD],
            input=json.dumps({**job, "url": url}),  # not as an argument: others can see those
            capture_output=True,
            text=True,
            timeout=CHILD_TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"it took longer than {CHILD_TIMEOUT:g} s"}
    finally:
        clear(url, local, job["storage_options"])
    if done.returncode != 0 or not done.stdout:
        reason = "killed, perhaps for want of memory" if done.returncode == -9 else done.stderr.strip()[-200:]
        return {"error": f"its process ended with {done.returncode}: {reason}"}
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def run_served(job: dict[str, Any], name: str) -> dict[str, Any]:
    """As `run`, with the tests' server of that name, started for it."""
    with tests_servers().SERVERS[name]() as server:
        return run({**job, "storage_options": server.options()}, server.bucket, local=False)


def tests_servers() -> Any:
    """The tests' module of servers."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    try:
        return importlib.import_module("tests.servers")
    finally:
        sys.path.pop(0)


def clear(url: str, local: bool, options: dict[str, Any]) -> None:
    """Remove what a run saved, and let the disk come to rest."""
    if local:
        shutil.rmtree(url, ignore_errors=True)
        os.sync()
        return
    with contextlib.suppress(OSError):  # nothing is there; or the store is down, and the runs have said so
        fs, path = fsspec.core.url_to_fs(url, skip_instance_cache=True, use_listings_cache=False, **options)
        fs.rm(path, recursive=True)


def figures(runs: dict[tuple[str, str], dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The figures of one round: of each variant, and of the reference."""
    plain = runs.get(("reference", "copy and write"), {})
    copy = statistics.median(plain.get("copy_seconds") or [math.nan])
    snapshot = statistics.median(plain.get("snapshot_seconds") or [math.nan])
    write = statistics.median(plain.get("plain_write_seconds") or [math.nan])
    state = plain.get("state_bytes", math.nan)
    found: dict[str, dict[str, float]] = {
        "reference": {
            "copy": copy,
            "copy_rate": state / copy,
            "snapshot_to_copy": snapshot / copy,
            "structure": statistics.median(plain.get("structure_seconds") or [math.nan]),
            "write": state / write,
        }
    }
    none = runs.get(("main", "none"))
    for variant in VARIANTS:
        mine = found[variant] = {
            group: runs[group, variant][f"{group}_seconds"] for group in ("idle", "gil") if (group, variant) in runs
        }
        one = runs.get(("main", variant))
        if one is None:
            continue
        saves, gib = one["saves"], state * one["saves"] / GIB
        mine["step"] = one["step_seconds"]
        for name in ("held", "own_held", "batches"):
            if one[f"{name}_seconds"]:
                mine[name] = statistics.median(one[f"{name}_seconds"])
        if saves:
            mine["held_first"] = one["held_seconds"][0]
            mine["held_to_copy"] = mine["held"] / copy
            mine["saving_cpu"] = one["saving_cpu_seconds"] / gib
            mine["write"] = state / statistics.median(one["write_seconds"])
            mine["saved"] = statistics.median(one["saved_seconds"])
            mine["write_to_plain"] = mine["write"] * write / state
        if none is not None:
            mine["loop"] = one["loop_seconds"] / none["loop_seconds"]
            mine["total"] = one["total_seconds"] / none["total_seconds"]
            mine["memory"] = (one["peak_bytes"] - none["peak_bytes"]) / state
        if none is not None and saves:
            mine["slow_down"] = (one["loop_seconds"] - none["loop_seconds"]) / saves
            mine["cpu"] = (one["cpu_seconds"] - none["cpu_seconds"]) / gib
    for name, of in (("held", "overlapped"), ("slow_down", "stock_async"), ("saving_cpu", "stock"), ("saved", "stock")):
        for mine in found.values():
            if name in mine and found[of].get(name, 0.0) > 0:
                mine[f"{name}_to_{of}"] = mine[name] / found[of][name]
    return {who: {name: v for name, v in mine.items() if math.isfinite(v)} for who, mine in found.items()}


def summarize(each: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Median, least and greatest of each figure over the rounds."""
    names = dict.fromkeys(name for one in each for name in one)
    values = {name: [one[name] for one in each if name in one] for name in names}
    return {name: {"median": statistics.median(v), "min": min(v), "max": max(v)} for name, v in values.items()}


def summary(args: argparse.Namespace, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each variant, or for each point of a sweep."""
    good = [one for one in runs if "error" not in one["result"]]
    if args.servers is not None:
        with torch.device("meta"):
            state = {"state_bytes": Blocks(args.size, args.tensors).state_bytes}
        rows = []
        for name in args.servers:
            each = []
            for number in range(args.rounds):
                mine = [one for one in good if one["round"] == number and one.get("server", name) == name]
                found = {("main", one["variant"]): one["result"] for one in mine}
                each.append(figures({("reference", "copy and write"): state, **found}))
            rows += [
                {"server": name, "variant": variant, "figures": summarize([one[variant] for one in each])}
                for variant in ("stock", "overlapped")
            ]
        return rows
    if args.sweep is None:
        rounds = [
            figures({(one["group"], one["variant"]): one["result"] for one in good if one["round"] == number})
            for number in range(args.rounds)
        ]
        return [
            {"variant": variant, "figures": summarize([one[variant] for one in rounds])}
            for variant in ("reference", *args.variants)
        ]
    points: dict[tuple[str, int, str], list[dict[str, float]]] = {}
    for one in good:
        result = one["result"]
        found = {"start": result["start_seconds"], "idle": result["idle_seconds"]}
        found["held"] = statistics.median(result["held_seconds"]) if result["held_seconds"] else None
        key = (one["group"], one[one["group"]], one["variant"])
        points.setdefault(key, []).append({name: value for name, value in found.items() if value is not None})
    return [
        {"axis": axis, "value": value, "variant": variant, "figures": summarize(each)}
        for (axis, value, variant), each in points.items()
    ]


def machine(args: argparse.Namespace, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """What it ran on, without names of hosts and folders."""
    trained = next((one["result"] for one in runs if "threads" in one["result"]), {})
    cpu = platform.processor()
    with contextlib.suppress(OSError):
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].partition(":")[2].strip() if names else cpu
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "torch_threads": trained.get("threads"),
        "gpu": trained.get("gpu"),
        "python": platform.python_version(),
        **{
            name: metadata.version(name)
            for name in ("lightning-ckpt-policy", "torch", "lightning", "fsspec", *(CLIENTS if args.servers else ()))
        },
    }


# what it shows


def show(args: argparse.Namespace, result: dict[str, Any]) -> None:
    from rich.box import MARKDOWN
    from rich.console import Console
    from rich.table import Table

    console = Console()
    rows = result["summary"]
    titles = {"What training feels": FELT, "What it costs, and ratios": COSTS}
    if args.servers is not None:
        titles = {"Saves to servers": {name: {**FELT, **COSTS}[name] for name in SERVED}}
    elif args.sweep is not None:
        titles = {"How costs grow": SWEPT}
    else:
        plain, none = (rows[index]["figures"] for index in (0, 1))
        console.print(
            f"A state of {args.size / MIB:,.4g} MiB in {args.tensors} parameter tensors, {args.saves} saves "
            f"{args.every} batches apart, {args.rounds} rounds: median (least–greatest). A step takes "
            f"{cell(none.get('step'), 1e3)} ms. A bare copy into warm memory takes {cell(plain.get('copy'), 1e3)} ms, "
            f"{cell(plain.get('copy_rate'), 1 / MIB)} MiB/s, a snapshot of it in turns with that "
            f"{cell(plain.get('snapshot_to_copy'), 1.0)} times as long, of which torch.save of the structure alone "
            f"takes {cell(plain.get('structure'), 1e3)} ms; a plain write with fsync does "
            f"{cell(plain.get('write'), 1 / MIB)} MiB/s.",
            highlight=False,
        )
        rows = rows[1:]
    for title, columns in titles.items():
        table = Table(title=title, **({} if args.servers is None else {"box": MARKDOWN}))
        for name in ("axis", "value", "server", "variant"):
            if name in rows[0]:
                table.add_column(name)
        used = [name for name in columns if any(name in row["figures"] for row in rows)]
        for name in used:
            table.add_column(columns[name][0], justify="right")
        for row in rows:
            labels = [f"{row[name]:,}" if name == "value" else row[name] for name in row if name != "figures"]
            table.add_row(*labels, *(cell(row["figures"].get(name), columns[name][1]) for name in used))
        console.print(table)
    for what, reason in result["failed"].items():
        console.print(f"{what} failed: {reason}", highlight=False, markup=False)


def cell(figure: dict[str, float] | None, factor: float) -> str:
    if figure is None:
        return "–"
    middle, least, greatest = (
        f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
        for value in (figure[name] * factor for name in ("median", "min", "max"))
    )
    return middle if least == greatest else f"{middle} ({least}–{greatest})"


def plot(args: argparse.Namespace, result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    rows = result["summary"]
    if args.sweep is None:
        figure, panels = pyplot.subplots(1, 3, figsize=(13, 4), layout="constrained")
        for panel, name in zip(panels, ("held", "loop", "memory"), strict=True):
            heading, factor = {**FELT, **COSTS}[name]
            found = {row["variant"]: row["figures"][name] for row in rows if name in row["figures"]}
            found.pop("none", None)
            middle, least, most = ([one[end] * factor for one in found.values()] for end in ("median", "min", "max"))
            spread = [[m - x for m, x in zip(middle, least)], [x - m for m, x in zip(middle, most)]]  # noqa: B905
            colours = ["C2" if variant in OURS else "C7" for variant in found]
            bars = panel.barh(list(found), middle, xerr=spread, capsize=3, color=colours)
            panel.bar_label(bars, fmt="%.3g", padding=4)
            panel.margins(x=0.2)
            panel.invert_yaxis()
            panel.set_title(heading)
            if name == "held" and middle and min(least) > 0:
                panel.set(xscale="log", xlim=(10 ** math.floor(math.log10(0.5 * min(least))), 4 * max(most)))
        panels[0].xaxis.set_minor_formatter(ticker.NullFormatter())
        panels[1].axvline(1.0, color="black", linewidth=1)
    else:
        shape = {"nrows": len(SWEPT), "ncols": len(args.sweep), "squeeze": False}
        figure, grid = pyplot.subplots(**shape, figsize=(4.5 * len(args.sweep), 9), sharey="row", layout="constrained")
        for index, (name, (heading, factor)) in enumerate(SWEPT.items()):
            for panel, axis in zip(grid[index], args.sweep, strict=True):
                drawn = False
                for variant in OURS:
                    mine = [row for row in rows if (row["axis"], row["variant"]) == (axis, variant)]
                    line = {row["value"]: row["figures"][name] for row in mine if name in row["figures"]}
                    ends = {end: [one[end] * factor for one in line.values()] for end in ("median", "min", "max")}
                    drawn = drawn or bool(line)
                    panel.plot(list(line), ends["median"], marker="o", label=variant)
                    panel.fill_between(list(line), ends["min"], ends["max"], alpha=0.2)
                panel.set(xscale="log" if drawn else "linear", xlabel=AXES[axis], ylabel=heading)
                panel.legend()
            seen = [one[end] * factor for row in rows if (one := row["figures"].get(name)) for end in ("min", "max")]
            if seen and min(seen) > 0:  # whole decades
                lowest, highest = math.log10(0.99 * min(seen)), math.log10(1.01 * max(seen))
                for panel in grid[index]:
                    panel.set(yscale="log", ylim=(10 ** math.floor(lowest), 10 ** math.ceil(highest)))
    known = result["machine"]
    figure.suptitle(f"{args.size / MIB:,.4g} MiB of state, {known['gpu'] or known['cpu']}, {known['cores']} cores")
    figure.savefig(path, dpi=120)


def as_bytes(text: str) -> int:
    """Bytes of a size such as ``256MiB``, ``4GiB`` or ``65536``."""
    number = text.rstrip("KMGiB")
    with contextlib.suppress(ValueError, KeyError):
        value = float(number) * {"": 1, "B": 1, "KiB": 1 << 10, "MiB": MIB, "GiB": GIB}[text[len(number) :]]
        if 1 <= value < math.inf:
            return int(value)
    raise argparse.ArgumentTypeError(f"{text!r} is no size: write 256MiB, 4GiB or a number of bytes")


def as_options(text: str) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        options = json.loads(text)
        if isinstance(options, dict):
            return options
    raise argparse.ArgumentTypeError("it must be a JSON object, such as '{\"anon\": true}'")  # it may hold credentials


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--size", type=as_bytes, default="256MiB", help="bytes of parameters and optimizer state (default 256MiB)")
    add("--tensors", type=int, default=64, help="parameter tensors (default 64)")
    add("--saves", type=int, default=3, help="saves per run (default 3)")
    add("--every", type=int, default=10, help="batches between two saves (default 10)")
    add("--rounds", type=int, default=3, help="how often each variant runs (default 3)")
    add("--url", help="folder or any fsspec URL (default: a temporary folder in the current one)")
    add("--storage-options", type=as_options, default={}, metavar="JSON", help="what fsspec.open takes besides")
    add("--devices", type=int, default=1, help="processes that train together with DDP (default 1)")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--step-ms", type=float, default=300.0, help="choose the batch size so that a step takes so long (default 300)")
    add("--batch-size", type=int, help="instead of --step-ms")
    add("--variants", nargs="+", choices=VARIANTS, default=VARIANTS, help="default: all; none is always among them")
    add("--gil", action="store_true", help="also measure the longest hold of the GIL, in runs of their own")
    add("--out", type=Path, default=Path(), help="folder, or beginning of the names, of the JSON file and the PNG")
    add("--servers", nargs="*", help="instead save to these servers of tests/servers.py (default: all)")
    add("--sweep", nargs="*", choices=list(AXES), help="instead of comparing, show how the costs of this package grow")
    add("--min-size", type=as_bytes, default="64MiB", help="where --sweep size begins (default 64MiB)")
    add("--max-size", type=as_bytes, default="4GiB", help="where it ends (default 4GiB)")
    add("--max-tensors", type=int, default=10_000, help="where --sweep tensors ends (default 10000)")
    add("--max-records", type=int, default=100_000, help="where --sweep records ends (default 100000)")
    args = parser.parse_args()
    for name, least in {"tensors": 1, "saves": 1, "every": 4, "rounds": 1, "batch_size": 1, "devices": 1}.items():
        value = getattr(args, name)
        if value is not None and value < least:
            parser.error(f"--{name.replace('_', '-')} {value} must be at least {least}")
    if args.devices > 1:
        if args.gil or args.sweep is not None:
            parser.error(f"--devices {args.devices} goes with neither --gil nor --sweep: leave those out")
        args.variants = [variant for variant in args.variants if not variant.startswith("dcp")]  # it would save shards
    args.variants = [variant for variant in VARIANTS if variant in args.variants or variant == "none"]
    if args.servers is not None:
        if args.gil or args.sweep is not None or args.devices > 1 or args.url is not None:
            parser.error("--servers goes with none of --gil, --sweep, --devices and --url: leave those out")
        args.servers = args.servers or list(tests_servers().SERVERS)
        if unknown := set(args.servers).difference(tests_servers().SERVERS):
            parser.error(f"--servers {' '.join(unknown)}: give some of {', '.join(tests_servers().SERVERS)}")
    args.sweep = list(AXES) if args.sweep == [] else args.sweep
    return args


def main() -> int:
    args = parse()
    for module in ("matplotlib", "rich"):
        if importlib.util.find_spec(module) is None:
            sys.exit(f"{module} is missing: pip install 'lightning-ckpt-policy[bench]'")
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    try:
        fs, path = fsspec.core.url_to_fs(args.url or ".", **args.storage_options)
    except (ImportError, OSError, TypeError, ValueError) as error:
        sys.exit(f"--url {args.url}: {error}")
    local = isinstance(fs, LocalFileSystem)
    if args.url is None:
        base = os.path.abspath(tempfile.mkdtemp(prefix="save-overhead-", dir="."))
    else:
        base = f"{(path if local else args.url).rstrip('/')}/save-overhead-{uuid.uuid4().hex[:8]}"
    usual = {name: getattr(args, name) for name in ("size", "tensors", "saves", "every", "storage_options")}
    usual |= {"device": args.device, "devices": args.devices, "timed": False, "drained": False}
    usual |= {"kind": "training", "steps": args.every * (args.saves + 1) - 1, "records": 0, "gil": False}
    usual |= {"batch_size": args.batch_size, "step_ms": args.step_ms}
    todo = [(number, changes) for number in range(args.rounds) for changes in plan(args, number, local)]
    runs: list[dict[str, Any]] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns) as progress:
            task = progress.add_task("choosing the batch size", total=len(todo))
            if args.batch_size is None:
                chosen = run({**usual, "kind": "calibrate"}, base, local)
                if "error" in chosen:
                    sys.exit(f"The model can't be trained here: {chosen['error']}")
                usual |= chosen
            for number, changes in todo:
                group, variant = changes["group"], changes["variant"]
                what = f"{group} {changes[group]:,} {variant}" if group in AXES else f"{group} {variant}"
                what = f"{changes['server']} {variant}" if "server" in changes else what
                progress.update(task, description=f"round {number + 1} of {args.rounds}: {what}")
                job = {**usual, **changes}
                done = run_served(job, changes["server"]) if "server" in changes else run(job, base, local)
                runs.append({"round": number, "what": what, **changes, "result": done})
                progress.advance(task)
    finally:
        clear(base, local, args.storage_options)
    hidden = ("url", "storage_options", "out")
    result = {
        "machine": machine(args, runs),
        "settings": {name: value for name, value in {**vars(args), **usual}.items() if name not in hidden},
        "store": "file" if local else args.url.partition("://")[0],
        "summary": summary(args, runs),
        "failed": {one["what"]: one["result"]["error"] for one in runs if "error" in one["result"]},
        "runs": runs,
    }
    name = "save_overhead" if args.sweep is None else "save_overhead_sweep"
    name += "_stores" if args.servers is not None else ""
    name += f"_{args.devices}_devices" if args.devices > 1 else ""
    out = args.out / name if args.out.is_dir() else args.out
    out.parent.mkdir(parents=True, exist_ok=True)
    Path(f"{out}.json").write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    show(args, result)
    if args.servers is None:
        plot(args, result, Path(f"{out}.png"))
    return 1 if result["failed"] else 0


if __name__ == "__main__":
    if sys.argv[1:] == [CHILD]:
        child()
    sys.exit(main())
