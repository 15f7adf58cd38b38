"""A small training as a program of its own, to be killed, restarted and run on several ranks.

Run as ``python -m tests.integration.job --root DIR``. Writes each rank's final state to ``DIR/final-<rank>.pt``.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import json
import os
import resource
import signal
import subprocess
import threading
import time
import traceback
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import lightning_ckpt_policy
from lightning_ckpt_policy import CheckpointPolicy, callback, snapshot
from lightning_ckpt_policy.backends import LocalBackend
from tests.models import Rows, drain_each_save, fit, loader

RULES = {name: getattr(lightning_ckpt_policy, name) for name in lightning_ckpt_policy.__all__}


class Disturb(Callback):
    """Slows each batch down, and raises, kills the process, sends it a signal or fills its disk in the batch after a
    step."""

    def __init__(self, seconds: float, crash_at: int | None, crash_rank: int | None, how: str, where: str) -> None:
        self.seconds, self.crash_at, self.crash_rank, self.how = seconds, crash_at, crash_rank, how
        self.where = where

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        time.sleep(self.seconds)
        self.meet(trainer, "training")

    def on_validation_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.meet(trainer, "validation")

    def meet(self, trainer: Trainer, where: str) -> None:
        if where != self.where or self.crash_at is None or trainer.global_step < self.crash_at:
            return
        if self.crash_rank in (None, trainer.global_rank):
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how in ("sigterm", "handler"):
                self.crash_at = None
                os.kill(os.getpid(), signal.SIGTERM if self.how == "sigterm" else signal.SIGUSR1)
                return
            if self.how == "sigterm to all":  # of the process group, as from elsewhere
                self.crash_at = None
                subprocess.run(["kill", "-TERM", "--", f"-{os.getpgrp()}"], start_new_session=True, check=True)
                return
            if self.how == "full":
                self.crash_at = None
                limit_files(0)
                return
            raise RuntimeError(f"rank {trainer.global_rank} at step {trainer.global_step}")


class Total(Callback):
    """Adds up what its rank has seen."""

    def __init__(self) -> None:
        self.seen = 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.seen += float(batch.sum())

    def rank_state_dict(self) -> dict[str, float]:
        return {"seen": self.seen}

    def load_rank_state_dict(self, state: dict[str, float]) -> None:
        self.seen = state["seen"]


class Meddle(Callback):
    """Changes the weights after a save point, where nothing should."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            with torch.no_grad():
                for parameter in pl_module.parameters():
                    parameter.add_(0.001)


class Clock:
    """In place of the module ``time``: one that runs slow and jumps ahead once a second."""

    def __init__(self) -> None:
        self.began = time.monotonic()

    def monotonic(self) -> float:
        passed = time.monotonic() - self.began
        return 5e5 + 0.3 * passed + 1000.0 * int(passed)

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


class Collectives:
    """Notes each collective of the policy, and any outside the main thread: at which step, in which hook and thread."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, str, str, bool]] = []
        self.trainer: Trainer | None = None
        for name in ("all_reduce", "all_gather_object", "broadcast_object_list", "barrier", "broadcast"):
            setattr(torch.distributed, name, self.noting(name, getattr(torch.distributed, name)))

    def noting(self, name: str, original: Any) -> Any:
        @functools.wraps(original)
        def noted(*args: Any, **kwargs: Any) -> Any:
            frames = [frame.f_code for frame, _ in traceback.walk_stack(None)]
            ours = [code.co_name for code in frames if code.co_filename == callback.__file__]
            main = threading.current_thread() is threading.main_thread()
            if self.trainer is not None and (ours or not main):
                self.calls.append((self.trainer.global_step, name, ours[-1] if ours else "", main))
            return original(*args, **kwargs)

        return noted


class Follow(Callback):
    """Lets `Collectives` know the Trainer."""

    def __init__(self, collectives: Collectives) -> None:
        self.collectives = collectives

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        self.collectives.trainer = trainer


def slow_writes_down(seconds: float) -> None:
    original = LocalBackend.write_payload

    def write_payload(backend: LocalBackend, name: str, *rest: Any) -> None:
        time.sleep(seconds)
        original(backend, name, *rest)

    LocalBackend.write_payload = write_payload  # type: ignore[method-assign, assignment]


def limit_files(size: int) -> None:
    """Let every write of this process past ``size`` bytes of a file fail, as on a full disk; -1 lets none fail."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def raise_error(*_: object) -> None:
    raise RuntimeError("the launcher's handler")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--url", help="dirpath of the checkpoints; by default ROOT/ckpt")
    parser.add_argument("--trigger", default="EveryNTrainSteps(4)")
    parser.add_argument("--retention", default="KeepLast(2)")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--loader", default="stateful", choices=["stateful", "plain"])
    parser.add_argument("--workers", type=int, default=0, help="of the loader")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--step-seconds", type=float, default=0.0)
    parser.add_argument("--crash-at", type=int)
    parser.add_argument("--crash-rank", type=int)
    parser.add_argument(
        "--crash-how", default="raise", choices=["raise", "kill", "sigterm", "sigterm to all", "handler", "full"]
    )
    parser.add_argument("--crash-where", default="training", choices=["training", "validation"])
    parser.add_argument("--sanity-check", action="store_true")
    parser.add_argument("--lying-clock", type=int, help="rank whose clock runs slow and jumps")
    parser.add_argument("--no-policy", action="store_true")
    parser.add_argument("--policy-rank", type=int, help="the only rank that has a policy; by default all have one")
    parser.add_argument("--write-seconds", type=float, default=0.0, help="slows each payload's write down")
    parser.add_argument("--group-timeout", type=float, default=1800.0, help="of the process group, seconds")
    parser.add_argument("--drain", action="store_true", help="confirms each save before training goes on")
    parser.add_argument("--meddle-at", type=int, default=-1, help="changes weights before the batch after this step")
    args = parser.parse_args()
    snapshot.DEFER_BYTES = 1  # let this small state be copied in the background too
    if args.drain:
        drain_each_save(pytest.MonkeyPatch())
    slow_writes_down(args.write_seconds)
    rank = int(os.environ.get("LOCAL_RANK", 0))
    if rank == args.lying_clock:
        callback.time = Clock()  # type: ignore[attr-defined]
    handler = signal.getsignal(signal.SIGTERM)
    if args.crash_how == "handler":
        signal.signal(signal.SIGUSR1, raise_error)

    policy = CheckpointPolicy(
        args.url or args.root / "ckpt",
        eval(args.trigger, {**RULES, "rank": rank}),
        eval(args.retention, dict(RULES)),
    )
    no_policy = args.no_policy or args.policy_rank not in (None, rank)
    distributed: dict[str, Any] = {}
    train = partial(loader, args.loader, batches=10 * args.devices, num_workers=args.workers)
    if args.devices > 1:
        distributed = {
            "strategy": DDPStrategy(timeout=timedelta(seconds=args.group_timeout)),
            "use_distributed_sampler": args.loader == "plain",
        }
        if args.loader == "stateful":
            sampler = DistributedSampler(Rows(40 * args.devices), args.devices, rank, seed=3)
            train = partial(
                StatefulDataLoader, sampler.dataset, batch_size=4, sampler=sampler, num_workers=args.workers
            )
    collectives, total = Collectives(), Total()
    atexit.register(lambda: print(f"HANDLER {rank} {signal.getsignal(signal.SIGTERM) == handler}", flush=True))
    observer = fit(
        args.root,
        None if no_policy else policy,
        seed=args.seed,
        ckpt_path=None if no_policy else "last",
        train=train,
        validate=True,
        num_sanity_val_steps=2 * args.sanity_check,
        callbacks=[
            Disturb(args.step_seconds, args.crash_at, args.crash_rank, args.crash_how, args.crash_where),
            Meddle(args.meddle_at),
            total,
            Follow(collectives),
        ],
        max_epochs=args.epochs,
        devices=args.devices,
        **distributed,
    )
    limit_files(-1)
    trainer: Trainer = observer.trainer  # type: ignore[attr-defined]
    (args.root / f"collectives-{rank}.json").write_text(json.dumps(collectives.calls))
    ended = {**observer.final, "batches": observer.batches, "total": total.seen}
    torch.save(ended, args.root / f"final-{trainer.global_rank}.pt")


if __name__ == "__main__":
    main()
