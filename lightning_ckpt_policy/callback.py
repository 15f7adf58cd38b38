"""``CheckpointPolicy``: the one place that knows the Trainer."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import os
import re
import signal
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    Checkpoint,
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    OnExceptionCheckpoint,
)
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_ckpt_policy import _lightning, _torch
from lightning_ckpt_policy.agreement import Agreement, Report
from lightning_ckpt_policy.backends import check_transfer
from lightning_ckpt_policy.barrier import (
    Barrier,
    can_be_put_up,
    may_change_weights_early,
    may_validate_other_weights,
)
from lightning_ckpt_policy.errors import (
    CheckpointError,
    CheckpointSaveError,
    SnapshotChangedError,
    SupersededError,
    describe,
)
from lightning_ckpt_policy.interval import Measured, Pace, SaveCost, costs_of, failures_of, typical_cost
from lightning_ckpt_policy.io import DEFAULT_SAVE_TIMEOUT, GRACE, AsyncCheckpointIO, SaveRequest
from lightning_ckpt_policy.ledger import DELETE_TIMEOUT, Ledger, RuleFailure, SaveOutcome
from lightning_ckpt_policy.meeting import Meeting, shown
from lightning_ckpt_policy.rank_state import collect_rank_state, declaring, restore_rank_state
from lightning_ckpt_policy.record import CheckpointRecord, is_safe_name
from lightning_ckpt_policy.resume import lineage, marked, open_record, select
from lightning_ckpt_policy.retention import KeepAll, KeepLast, Retention, as_retention, best
from lightning_ckpt_policy.rng import collect_rng_state, restore_rng_state
from lightning_ckpt_policy.signals import RAISED, SignalCounter
from lightning_ckpt_policy.snapshot import CHUNK_BYTES, Image, Staging, still_storages
from lightning_ckpt_policy.store import Attempt, CheckpointStore
from lightning_ckpt_policy.triggers import AdaptiveInterval, EveryNEpochs, Progress, Trigger, as_trigger
from lightning_ckpt_policy.workers import shield_workers
from lightning_ckpt_policy.writer import BackgroundWriter, run_within

STATE_KEY = "lightning_ckpt_policy"
STATE_VERSION = 1
BATCH_END: Literal["batch_end"] = "batch_end"
VALIDATION_END: Literal["validation_end"] = "validation_end"
EPOCH_END: Literal["epoch_end"] = "epoch_end"
VALIDATION_BATCH_END: Literal["validation_batch_end"] = "validation_batch_end"
TRAIN_END = "train_end"
# seconds for which ranks wait in one collective while rank 0 waits for the background
_SLICE = 5.0
# seconds after which a shared folder shows a new file on every machine
_SHARED_WITHIN = 5.0
_SHARE = "a resume reads on every rank. Use a folder that all machines share (NFS, Lustre) or the URL of a store"
_SAME_ON_ALL_RANKS = (
    "trigger",
    "retention",
    "filename",
    "save_weights_only",
    "save_on_train_end",
    "max_consecutive_failures",
    "save_timeout",
    "verify",
    "snapshot",
)
_REASON_CHARACTERS = 300
# the first overlapped copy of a fit and one in so many after it are compared with the state at the save point
AUDIT_EVERY = 20
# an adaptive interval is told anew in the log once it has changed by more than this share
_NOTICEABLE = 0.1
INTERVAL_METRIC = "checkpoint_interval_seconds"
SIGTERM = signal.SIGTERM.name
NO_METRICS: Mapping[str, float] = {}
T = TypeVar("T")
# numbers the fits (and validations, tests) of this process, so that ranks meet anew in each
_setups = itertools.count()


class CheckpointPolicy(Checkpoint):
    """Decides when to save and what to keep; saves in the background and deletes only what is superseded.

    State is captured where a resume is exact: after a batch that ends an optimizer step and isn't followed by a
    validation, at the end of a validation, or at the end of an epoch without one. A trigger that is due elsewhere, or
    while a save is on its way, stays due until the next such point. A signal that ends the fit is acted on inside a
    validation too; a resume then runs that validation from its start.

    A checkpoint holds the random state of every rank. A callback that has a state of its own on each rank gives it in
    ``rank_state_dict()``, and gets that of its rank back in ``load_rank_state_dict(state)`` when a fit is resumed,
    before its ``load_state_dict``.

    Args:
        dirpath: Folder of the checkpoints, a local path or any fsspec URL; by default ``checkpoints`` in the Trainer's
            ``default_root_dir``.
        trigger: When to save; a list means any of. By default ``EveryNEpochs(1)``.
        retention: What to keep; a list means what any of them keeps. By default ``KeepLast(2)``.
        filename: Template of the file names, of ``step`` alone and without a suffix.
        save_weights_only: Leave out optimizer, scheduler and loop state; such a checkpoint can't be resumed from.
        save_on_train_end: Also save at the last possible point of a fit.
        storage_options: Credentials and endpoints, as ``fsspec.open`` takes them; never written anywhere.
        max_consecutive_failures: So many failed saves in a row end the fit with an error.
        save_timeout: Seconds a save may take in the background before it counts as failed.
        connections: How many parts of a checkpoint go to (or come from) an object store at once; see `CheckpointStore`.
        part_bytes: Bytes of a part. A save takes up to twice ``connections * part_bytes`` of memory.
        verify: ``"on_resume"`` compares a checkpoint's checksum while it is loaded, ``"never"`` its size alone.
        snapshot: ``"overlapped"`` copies parameters and optimizer state while the next forward and backward passes
            run, everything else at once; ``"eager"`` copies everything before training goes on. Where it isn't known
            that nothing changes parameters before the next optimizer step, the copy is eager anyway.

    Raises:
        TypeError, ValueError: At construction, naming the argument, its value and what to write instead.

    >>> from lightning.pytorch import Trainer
    >>> from lightning_ckpt_policy import CheckpointPolicy, EveryInterval, EveryNTrainSteps, KeepBest, KeepLast
    >>> policy = CheckpointPolicy(
    ...     "checkpoints",
    ...     trigger=EveryNTrainSteps(1000) | EveryInterval(minutes=30),
    ...     retention=KeepLast(3) | KeepBest(2, monitor="val_loss"),
    ... )
    >>> trainer = Trainer(callbacks=[policy], logger=False, enable_progress_bar=False)
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        trigger: Trigger | list[Trigger] | None = None,
        retention: Retention | list[Retention] | None = None,
        *,
        filename: str = "step-{step:010d}",
        save_weights_only: bool = False,
        save_on_train_end: bool = True,
        storage_options: dict[str, Any] | None = None,
        max_consecutive_failures: int = 3,
        save_timeout: float = DEFAULT_SAVE_TIMEOUT,
        connections: int | None = None,
        part_bytes: int | None = None,
        verify: Literal["on_resume", "never"] = "on_resume",
        snapshot: Literal["overlapped", "eager"] = "overlapped",
    ) -> None:
        super().__init__()
        if snapshot not in ("overlapped", "eager"):
            raise ValueError(f"snapshot={snapshot!r} must be 'overlapped' or 'eager'")
        if verify not in ("on_resume", "never"):
            raise ValueError(f"verify={verify!r} must be 'on_resume' or 'never'")
        _check_filename(filename)
        check_transfer(connections, part_bytes)
        if isinstance(max_consecutive_failures, bool) or not (
            isinstance(max_consecutive_failures, int) and max_consecutive_failures >= 1
        ):
            raise ValueError(
                f"max_consecutive_failures={max_consecutive_failures!r} must be a whole number of at least 1; a large "
                "one lets training go on however many saves fail"
            )
        for name, value in (("save_weights_only", save_weights_only), ("save_on_train_end", save_on_train_end)):
            if not isinstance(value, bool):
                raise TypeError(f"{name}={value!r} must be True or False")
        if dirpath is not None and not isinstance(dirpath, (str, os.PathLike)):
            raise TypeError(f"dirpath={dirpath!r} must be a path or an fsspec URL, not {type(dirpath).__name__}")
        if isinstance(dirpath, os.PathLike) or (isinstance(dirpath, str) and dirpath and "://" not in dirpath):
            dirpath = os.path.abspath(os.path.expanduser(dirpath))  # a later chdir must not move it
        self.dirpath = dirpath
        self.trigger = EveryNEpochs(1) if trigger is None else as_trigger(trigger)
        self.retention = KeepLast(2) if retention is None else as_retention(retention)
        self.filename = filename
        self.save_weights_only = save_weights_only
        self.save_on_train_end = save_on_train_end
        self.max_consecutive_failures = max_consecutive_failures
        self.save_timeout = save_timeout
        self.verify = verify
        self.snapshot = snapshot
        self.history: list[SaveOutcome] = []
        self._storage_options = storage_options
        self.connections = connections
        self.part_bytes = part_bytes
        self._own_io = AsyncCheckpointIO(storage_options, save_timeout=save_timeout)

        self._writer = BackgroundWriter()
        self._staging = Staging()
        self._store: CheckpointStore | None = None
        self._trainer: Callable[[], Trainer | None] = _nothing
        self._io = self._own_io
        # which checkpoint this fit starts from
        self._selected: str | None = None
        self._asked_for_last = False
        self._to_load: str | None = None  # what Lightning is about to load, on every rank
        self._loaded: dict[str, Any] | None = None
        self._resumed: CheckpointRecord | None = None
        self._began = False
        self._release_loaders: Callable[[], None] = _nothing
        self._release_workers: Callable[[], None] = _nothing
        self._release_rng: Callable[[], None] = _nothing
        # manual optimization: the optimizers that stepped in this batch
        self._steppers: set[int] = set()
        self._hooks: list[Any] = []
        # the copy of a state that goes on in the background
        self._overlaps = False
        self._overlapped = 0
        self._overlap: tuple[Barrier, Image | None] | None = None
        self._reserved = False
        # the run that is on its way
        self._active = False
        self._ledger: Ledger | None = None
        self._attempt: Attempt | None = None
        self._deleted_before: list[CheckpointRecord] = []
        self._since = Progress()
        self._elapsed_before = 0.0  # seconds of training of this run before this fit
        self._fit_began = 0.0
        self._follows = False
        self._agreement: Agreement | None = None  # of several ranks
        self._meeting: Meeting | None = None  # where they meet, should the user's code have a say in when
        # signals: what arrived in this process, and what all ranks agree on
        self._listens = False
        self._arrivals = SignalCounter()
        self._signals: Mapping[str, int] = {}
        self._exchanges_in_validation = False
        self._rng_before_validation: dict[str, Any] = {}
        self._release_validation: Callable[[], None] = _nothing
        self._validated_step = -1
        self._validations = 0
        self._last_step = 0
        self._stepped = True
        self._logged: Mapping[str, Any] = {}
        self._capturing: tuple[Progress, str] | None = None
        self._held: Progress | None = None
        self._may_stop_late = False
        self._loaders_stateful = False
        # what saves cost and how often the run fails; rank 0 knows
        self._measured: Measured | None = None
        self._costs: list[SaveCost] = []
        self._costs_are_old = True
        self._failures_before, self._uptime_before = 0, 0.0
        self._pace = Pace()
        self._paced = False
        self._chosen: dict[AdaptiveInterval, float] = {}
        # what went wrong so far
        self._failures = 0
        self._last_error: BaseException | None = None
        self._superseded = False
        self._delete_failures = 0
        self._warned: set[str] = set()
        _lightning.intercept_ckpt_path(_answer_ckpt_path)

    def __getstate__(self) -> dict[str, Any]:
        # a copy, also in another process (a spawning launcher), has no fit on its way
        return {
            **self.__dict__,
            "_trainer": _nothing,
            "_release_loaders": _nothing,
            "_release_workers": _nothing,
            "_release_rng": _nothing,
            "_release_validation": _nothing,
            "_hooks": [],
            "_arrivals": SignalCounter(),
            "_overlap": None,
            "_agreement": None,
            "_meeting": None,
            "_ledger": None,
            "_deleted_before": self.deleted,
            "_active": False,
            "history": [replace(outcome, error=None) for outcome in self.history],
            "_last_error": None,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _lightning.intercept_ckpt_path(_answer_ckpt_path)

    # what users and loggers read

    @property
    def store(self) -> CheckpointStore:
        """The store of this policy's folder.

        Raises:
            RuntimeError: ``dirpath`` wasn't given and no Trainer has used this policy yet.
        """
        if self._store is None:
            if self.dirpath is None:
                raise RuntimeError("dirpath=None is resolved when a Trainer first uses this policy; give a dirpath")
            self._store = self._open_store(self.dirpath)
        return self._store

    @property
    def last_model_path(self) -> str:
        """Path or URL of the newest confirmed checkpoint, ``""`` if there is none."""
        record = self._newest()
        return "" if record is None else self.store.path_of(record)

    @property
    def best_model_path(self) -> str:
        """Path or URL of the best confirmed checkpoint by the first ``KeepBest``, ``""`` if there is none.

        Without a ``KeepBest`` it is the newest, as with ``ModelCheckpoint``.
        """
        record = self._best()
        return "" if record is None else self.store.path_of(record)

    @best_model_path.setter
    def best_model_path(self, path: str) -> None:
        # a launcher hands on what the process that trained says; the store says the same
        pass

    @property
    def best_model_score(self) -> torch.Tensor | None:
        """The metric of the best confirmed checkpoint."""
        return self._score(self._best())

    @property
    def current_score(self) -> torch.Tensor | None:
        """The metric of the newest confirmed checkpoint."""
        return self._score(self._newest())

    @property
    def save_top_k(self) -> int:
        """-1 if everything is kept, as loggers ask it of ``ModelCheckpoint``."""
        return -1 if isinstance(self.retention, KeepAll) else 1

    @property
    def deleted(self) -> list[CheckpointRecord]:
        """The checkpoints that retention has deleted in this process, in order."""
        return self._deleted_before + ([] if self._ledger is None else list(self._ledger.deleted))

    def _newest(self) -> CheckpointRecord | None:
        if self._ledger is not None:
            return next((record for record in reversed(self._ledger.records) if not record.damaged), None)
        return self.store.latest() if self._store is not None or self.dirpath is not None else None

    def _best(self) -> CheckpointRecord | None:
        if not self.retention.monitors:
            return self._newest()
        monitor, mode = self.retention.monitors[0]
        if self._ledger is not None:
            return best(self._ledger.kept, monitor, mode)
        return self.store.best(monitor, mode) if self._store is not None or self.dirpath is not None else None

    def _score(self, record: CheckpointRecord | None) -> torch.Tensor | None:
        if record is None or not self.retention.monitors or self.retention.monitors[0][0] not in record.metrics:
            return None
        return torch.tensor(record.metrics[self.retention.monitors[0][0]])

    # before the fit: which checkpoint, is the store usable

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that this policy can work with the Trainer, and install its ``CheckpointIO``."""
        if not isinstance(trainer, Trainer):
            raise TypeError(
                f"CheckpointPolicy works with lightning.pytorch.Trainer, not with {type(trainer).__module__}."
                f"{type(trainer).__name__}: import Trainer and LightningModule from lightning.pytorch "
                "(the package pytorch_lightning is a separate copy that ignores this callback)"
            )
        declaring(_lightning.callbacks(trainer))
        store = self._bind(trainer)
        self._install_io(trainer)
        policies = [callback for callback in _lightning.callbacks(trainer) if isinstance(callback, CheckpointPolicy)]
        if trainer.world_size > 1 and policies[0] is self:
            _meeting_of(trainer, f"setup {next(_setups)}").wait(
                "to compare its CheckpointPolicy with that of the others",
                "at setup",
                "Either that is slower, or it has no CheckpointPolicy: give each rank the same callbacks",
            )
            _check_that_ranks_agree(trainer, policies)
        others = [policy for policy in policies if policy is not self]
        if any(_same_folder(other._bind(trainer).url, store.url) for other in others):
            raise ValueError(
                f"two CheckpointPolicy callbacks share dirpath={store.url!r}: give each its own dirpath, "
                "or join them in one with trigger=a | b and retention=a | b"
            )
        self._trainer = weakref.ref(trainer)
        self._listens = False
        self._loaded = None
        self._resumed = None
        self._began = False
        if stage == TrainerFn.FITTING and not _lightning.fast_dev_run(trainer):
            _on_rank_zero(trainer, store.check)
            if trainer.world_size > 1 and "://" not in store.url:
                self._check_that_ranks_share(trainer, store.url)
        nothing = _gather(trainer, self._selected is None)
        if any(nothing) and not all(nothing):
            raise CheckpointError(
                f'ckpt_path="last": {shown([rank for rank, is_so in enumerate(nothing) if is_so])} of '
                f"{trainer.world_size} can't see the checkpoints in {store.url!r}: {_SHARE}"
            )

    def _check_that_ranks_share(self, trainer: Trainer, folder: str) -> None:
        """See whether all ranks have the same folder at this path."""
        probe = Path(folder, f".shared-{trainer.strategy.broadcast(_new_run_id())}")
        _on_rank_zero(trainer, probe.touch)
        deadline = time.monotonic() + _SHARED_WITHIN
        while not (found := probe.exists()) and time.monotonic() < deadline:
            time.sleep(0.1)
        blind = [rank for rank, sees in enumerate(_gather(trainer, found)) if not sees]
        if trainer.is_global_zero:
            probe.unlink(missing_ok=True)
        if not blind:
            return
        message = f"dirpath={folder!r}: {shown(blind)} can't see what rank 0 writes there"
        asked = self._to_load
        if asked is not None and (asked in ("last", "best") or self.store.name_of(asked) is not None):
            raise CheckpointError(f"{message}: {_SHARE}")
        self._warn_once(f"{message}, so this can't be resumed with ckpt_path='last': {_SHARE}")

    def _arguments(self) -> dict[str, str]:
        """What must be the same on every rank, as text; never a value of ``storage_options``."""
        values = {name: getattr(self, name) for name in _SAME_ON_ALL_RANKS}
        values["dirpath"] = self.store.url
        values["storage_options"] = sorted(map(str, self._storage_options or ()))
        # an object without a repr of its own has another one in each process
        return {name: re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value)) for name, value in values.items()}

    def _bind(self, trainer: Trainer) -> CheckpointStore:
        """The store, with ``dirpath=None`` resolved."""
        url = os.path.join(trainer.default_root_dir, "checkpoints") if self.dirpath is None else self.dirpath
        store = self._open_store(url)
        if self._store is None or self._store.url != store.url:
            self._store = store
            self._ledger = None
            self._attempt = None
        return self._store

    def _open_store(self, url: str | os.PathLike[str]) -> CheckpointStore:
        transfer = {"connections": self.connections, "part_bytes": self.part_bytes}
        return CheckpointStore(url, self._storage_options, **transfer)

    def _install_io(self, trainer: Trainer) -> None:
        strategy = trainer.strategy
        for name in ("save_checkpoint", "checkpoint_io"):
            if getattr(type(strategy), name) is not getattr(Strategy, name):
                raise ValueError(
                    f"strategy={type(strategy).__name__} saves checkpoints in its own way, which CheckpointPolicy "
                    'can\'t take over: use a single device or strategy="ddp"'
                )
        current = strategy.checkpoint_io
        if type(current) is TorchCheckpointIO:
            current = strategy.checkpoint_io = self._own_io
        if not isinstance(current, AsyncCheckpointIO):
            raise ValueError(
                f"plugins=[{type(current).__name__}] writes checkpoints in its own way: leave it out, "
                "CheckpointPolicy brings its own CheckpointIO"
            )
        current.managed = True
        if self._writer not in current.writers:
            current.openers.append(self._open)
            current.writers.append(self._writer)
        self._io = current

    def _open(self, path: str) -> BinaryIO | None:
        """Open a checkpoint of this store, verified while it is read; ``None`` if ``path`` isn't one."""
        trainer = self._trainer()
        store = self._store
        together, self._to_load = self._to_load is not None, None
        if trainer is None or store is None:
            return None
        name = store.name_of(path)
        if name is None:
            return None
        opened: list[BinaryIO] = []

        def choose() -> CheckpointRecord | None:
            found = open_record(store, name, self._selected == path, verify=self.verify == "on_resume")
            if found is None:
                # not one of ours, or its record was lost: Lightning loads it, or says that it isn't there
                rank_zero_warn(f"{path!r} has no record in {store.url!r}: it is loaded without being verified")
                return None
            opened.append(found[1])
            return found[0]

        if not together:  # a load of the user's own, perhaps on one rank alone
            choose()
            return opened[0] if opened else None
        record = _on_rank_zero(trainer, choose)
        if record is None:
            return None
        self._resumed = record
        if opened:
            return opened[0]
        return store.open_verified(record) if self.verify == "on_resume" else store.open(record)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep what this package stored in the checkpoint."""
        state = checkpoint.get(STATE_KEY, {})
        if not isinstance(state, dict) or (state and "schema_version" not in state):
            rank_zero_warn(
                f"checkpoint[{STATE_KEY!r}] isn't this package's, so this resume can't be exact: store what is yours "
                "under another key"
            )
            state = {}
        if state and state["schema_version"] > STATE_VERSION:
            raise CheckpointError(
                f"the checkpoint was saved by a newer lightning-ckpt-policy (state version {state['schema_version']}, "
                f"this one reads up to {STATE_VERSION}): upgrade it"
            )
        self._loaded = state
        if state and state["point"] == EPOCH_END and not state["batch_completed"]:
            _lightning.mark_batch_completed(checkpoint)
        if state and state["epoch_ended"]:
            _lightning.unfinish_loaders(checkpoint)
        if trainer.state.fn == TrainerFn.FITTING:
            self._restore_rank_state(trainer, state.get("rank_states", []))

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let samplers of a resumed fit begin with the epoch it goes on with, and signals pass loader workers by."""
        if self.trigger.signals and not _lightning.fast_dev_run(trainer):
            self._release_workers = shield_workers(self.trigger.signals)
        if self._loaded and not _lightning.reloads_dataloaders(trainer):
            # Lightning makes the first iterator of a resumed fit before it tells the sampler which epoch it is
            self._release_loaders = _lightning.start_samplers_at(trainer, self._loaded["progress"]["epoch"])

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to hear signals: one that arrives from here on is acted on after the first batch."""
        if not _lightning.fast_dev_run(trainer):
            self._listen(trainer)

    # the fit

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin an attempt of a run, sweep what a killed one left, and restore the random state."""
        self._release_loaders()
        self._to_load = None  # another policy's was loaded
        if _lightning.fast_dev_run(trainer):
            return
        now, wall_clock = trainer.strategy.broadcast((time.monotonic(), time.time()))
        same_process = (
            self._loaded is None and self._attempt is not None and 0 < self._since.step <= trainer.global_step
        )
        if self._loaded and "progress" in self._loaded:
            elapsed = max(0.0, wall_clock - self._loaded["created_at"])
            self._since = Progress(**self._loaded["progress"], time=now - elapsed)
            self._elapsed_before = self._since.elapsed
        elif same_process:
            self._since = replace(self._since, signals={})
        else:
            self._since = Progress(step=trainer.global_step, epoch=trainer.current_epoch, time=now)
            self._elapsed_before = 0.0
        self._fit_began = now
        self._follows, self._paced = self.trigger.follows, bool(self.trigger.adaptive)
        self._validations = self._since.validations
        self._last_step = trainer.global_step
        self._stepped = True
        self._failures = 0
        self._last_error = None
        self._superseded = False
        self._held = None
        self._may_stop_late = any(isinstance(callback, EarlyStopping) for callback in _lightning.callbacks(trainer))
        self._began = True
        self._attempt = _on_rank_zero(trainer, lambda: self._begin(same_process))
        self._active = True
        self._signals = {}
        self._validated_step = -1
        if not self._listens:
            self._listen(trainer)
        if self._overlap is not None:  # an earlier fit was interrupted at its barrier
            interrupted, self._overlap = self._overlap[1], None
            if interrupted is not None:
                interrupted.release()
        self._overlaps = self._may_overlap(trainer, pl_module)
        pinned = trainer.strategy.root_device.type == "cuda"
        if self._staging.pinned != pinned:
            self._staging = Staging(pinned)
        self._writer.before_wait = self._reach_barrier  # a save that isn't complete isn't written
        self._overlapped = 0
        self._reserved = False
        self._agree(trainer)
        self._warn_about_limits(trainer, pl_module)
        self._watch_optimizers(trainer, pl_module)
        if not self._loaded:
            return
        if "callback_metrics" in self._loaded:
            _lightning.restore_metrics_for_callbacks(trainer, self._loaded["callback_metrics"])
        if any(isinstance(callback, GradientAccumulationScheduler) for callback in _lightning.callbacks(trainer)):
            # it sets this where an epoch begins, which a resume in the middle of one doesn't repeat
            trainer.accumulate_grad_batches = self._loaded["accumulate_grad_batches"]
        if self._loaded["early_stopped"] and _early_stopping_is_over(trainer):
            trainer.should_stop = True  # Lightning forgets it, and would train on until the next check
        if self._loaded["point"] == EPOCH_END:
            _lightning.end_current_epoch(trainer)
        if self._loaded["point"] == VALIDATION_BATCH_END:
            _lightning.forget_interrupted_batch(trainer)
        self._release_rng = _lightning.after_train_start(trainer, lambda: self._restore_rng(trainer))

    def _begin(self, same_process: bool) -> Attempt:
        """Begin an attempt, and clear up after those before it."""
        store = self.store
        self._deleted_before = self.deleted
        self._ledger = None
        attempt = self._begin_attempt(store, same_process)
        # from now on an older process of this run confirms nothing more
        records = marked(store, store.records())
        swept = store.sweep(attempt.run_id, attempt.number)
        if swept:
            rank_zero_info(f"Removed what an interrupted save left in {store.url!r}: {', '.join(swept)}")
        self._ledger = Ledger(
            store,
            attempt,
            self.retention,
            [record for record in records if record.run_id == attempt.run_id],
            frozenset() if self._resumed is None else frozenset({self._resumed.path}),
            self._writer,
            self.filename,
        )
        earlier = store.note_ends(attempt, self._ledger.records)
        self._failures_before, self._uptime_before = failures_of(earlier, self._ledger.records)
        self._costs, self._costs_are_old = costs_of(self._ledger.records), True
        self._pace = Pace()
        self._chosen.clear()
        self._measure()
        return attempt

    def _measure(self) -> None:
        up = self._uptime_before + time.monotonic() - self._fit_began
        self._measured = Measured(cost=typical_cost(self._costs), failures=self._failures_before, uptime=up)

    def _begin_attempt(self, store: CheckpointStore, same_process: bool) -> Attempt:
        records = store.records()
        newest = next((record for record in lineage(records) if not record.damaged), None)
        if self._resumed is not None:
            # a requeued job goes on with the run, even if the process before it has saved since "last" was looked up
            last = self._asked_for_last and newest is not None and newest.run_id == self._resumed.run_id
            if newest is not None and (last or newest.path == self._resumed.path):
                return store.start_attempt(newest.run_id, newest.parent)
            return store.start_attempt(_new_run_id(), self._resumed.run_id)
        if self._loaded is not None:
            runs = self._loaded.get("runs", [])
            if newest is not None and newest.run_id in runs and newest.step <= self._loaded["progress"]["step"]:
                # another policy's checkpoint of the same training: this folder's run goes on too
                return store.start_attempt(newest.run_id, newest.parent)
            return store.start_attempt(_new_run_id(), runs[0] if runs else None)
        if same_process and self._attempt is not None:
            return store.start_attempt(self._attempt.run_id, self._attempt.parent)
        if self._asked_for_last and not records:
            # a run that was killed before its first save: go on with it, so that its remains are swept
            attempts = store.attempts()
            if attempts:
                latest = max(attempts, key=lambda attempt: attempt.created_at)
                return store.start_attempt(latest.run_id, latest.parent)
            return store.start_attempt(store.interrupted_start() or _new_run_id(), None)
        return store.start_attempt(_new_run_id(), None)

    def _listen(self, trainer: Trainer) -> None:
        self._listens = bool(self.trigger.signals)
        if self._listens:
            self._release_validation = _lightning.before_validation(trainer, self._note_rng)
        if self._listens and not self._arrivals.install(
            self.trigger.signals, functools.partial(_lightning.without_sigterm_notifier, trainer)
        ):
            self._warn_once(f"signals={self.trigger.signals} can't be heard: this fit isn't in the main thread")

    def _note_rng(self) -> None:
        self._rng_before_validation = collect_rng_state()

    def _watch_optimizers(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """In manual optimization, note which optimizers step in a batch."""
        self._steppers.clear()
        if not pl_module.automatic_optimization:
            for optimizer in trainer.optimizers:
                with contextlib.suppress(AttributeError):  # a wrapper that isn't quite an optimizer has no hooks
                    self._hooks.append(
                        optimizer.register_step_post_hook(lambda stepped, *_: self._steppers.add(id(stepped)))
                    )

    def _reach_barrier(self) -> None:
        trainer = self._trainer()
        if self._overlap is not None and trainer is not None:
            self._overlap[0].reach(going_on=trainer.world_size == 1)  # it isn't known that all ranks come here

    def _may_overlap(self, trainer: Trainer, pl_module: LightningModule) -> bool:
        if self.snapshot == "eager":
            return False
        hook = may_change_weights_early(pl_module)
        if hook is not None:
            rank_zero_info(
                f"CheckpointPolicy: {type(pl_module).__name__}.{hook} may change weights before the next optimizer "
                'step, so all state is copied before training goes on (snapshot="eager")'
            )
        return hook is None and can_be_put_up(trainer, pl_module)

    def _release(self) -> None:
        """Take back everything that was put into Lightning and torch for the length of a fit."""
        self._release_loaders()
        self._release_workers()
        self._release_rng()
        self._release_validation()
        while self._hooks:
            self._hooks.pop().remove()
        self._release_held()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin to note which optimizers step in this batch."""
        self._steppers.clear()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save if a trigger is due and this is a point from which a resume is exact."""
        if not self._active:
            return
        step = trainer.global_step
        self._stepped = step != self._last_step
        self._last_step = step
        if self._overlap is not None and trainer.world_size == 1:
            barrier, image = self._overlap
            if image is not None and image.copied:  # an accumulation window may be long
                barrier.reach()
        if self._stepped and not self._reserved:
            self._reserve(trainer, pl_module)
        if self._steppers and not self._stepped:
            self._warn_once(
                f"{type(pl_module).__name__} steps its optimizers with self.optimizers(use_pl_optimizer=False): "
                "Lightning doesn't count such steps, so this policy can't tell one state from another and saves "
                "nothing. Use self.optimizers()"
            )
        clock = time.monotonic()
        if self._paced:
            self._pace.batch_ended(clock, self._writer.saving)
        if self._ledger is not None and self._ledger.events:
            self._report(trainer)
        if self._agreement is not None:
            if self._stepped and self._agreement.tick(clock):
                self._exchange(trainer)
            clock = self._agreement.time
        elif self._listens:
            self._signals = self._arrivals.counts
        epoch_ends = _lightning.is_last_batch(trainer)
        now = self._progress(trainer, step, epoch_ends, clock)
        reasons = self._due(now)
        ending = _is_ending(trainer, now, epoch_ends)
        if not (
            reasons or self._signals or (ending and self.save_on_train_end) or (epoch_ends and self._may_stop_late)
        ):
            return
        if self._gradients_pending(trainer, pl_module) or _lightning.validation_is_due(trainer):
            return
        self._consider(trainer, now, EPOCH_END if epoch_ends else BATCH_END, reasons, ending, epoch_ends)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remember which metrics are older than this validation."""
        if self._overlap is not None:
            self._overlap[0].reach()
        if self._active:
            self._pace.interrupted()
            self._logged = dict(trainer.callback_metrics)
            if self._listens:
                self._exchanges_in_validation = not may_validate_other_weights(trainer, pl_module) and (
                    trainer.world_size == 1 or _same_on_all_ranks(trainer, trainer.num_val_batches)
                )
                if self._agreement is not None:
                    self._agreement.begin("validation", time.monotonic())

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, *args: Any
    ) -> None:
        """Save if a signal asks for the end of the fit; a resume runs the whole validation."""
        if not (self._active and self._listens and self._exchanges_in_validation):
            return
        if self._agreement is None:
            self._signals = self._arrivals.counts
        elif self._agreement.tick(time.monotonic()):
            self._exchange(trainer)
        if not self._signals or _lightning.validation_ends(trainer) or self._gradients_pending(trainer, pl_module):
            return
        epoch_ends = _lightning.is_last_batch(trainer)
        now = self._progress(trainer, trainer.global_step, epoch_ends, self._clock())
        if self._stops(now):
            self._consider(trainer, now, VALIDATION_BATCH_END, self._due(now), True, epoch_ends)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save if a trigger is due, with the metrics that this validation logged."""
        if not self._active or trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING:
            return
        if self._ledger is not None and self._ledger.events:
            self._report(trainer)
        self._validations += 1
        self._validated_step = trainer.global_step
        if self._agreement is not None:
            self._agreement.begin("training", time.monotonic())
            if self.trigger.timed:
                self._exchange(trainer)
        elif self._listens:
            self._signals = self._arrivals.counts
        metrics = {
            name: float(value)
            for name, value in trainer.callback_metrics.items()
            if self._logged.get(name) is not value and torch.as_tensor(value).numel() == 1
        }
        self._logged = {}
        for rule, monitors in (("retention", self.retention.monitors), ("trigger", self.trigger.monitors)):
            for monitor in dict.fromkeys(monitor for monitor, _ in monitors if monitor not in metrics):
                useless = "checkpoints are saved without it and can't be kept by it"
                self._warn_once(
                    f"monitor={monitor!r} of the {rule} was not logged by this validation "
                    f"(logged: {', '.join(sorted(metrics)) or 'nothing'}): "
                    f"{useless if rule == 'retention' else 'it makes no save due'}. "
                    f"Log it in validation_step or on_validation_epoch_end: self.log({monitor!r}, ...)"
                )
        if self._agreement is not None and self.trigger.timed:
            metrics = trainer.strategy.broadcast(metrics)  # one that isn't reduced over the ranks differs among them
        epoch_ends = _lightning.is_last_batch(trainer)
        now = self._progress(trainer, trainer.global_step, epoch_ends, self._clock(), metrics)
        if self._gradients_pending(trainer, pl_module):
            return
        reasons = self._due(now)
        ending = _is_ending(trainer, now, epoch_ends)
        self._consider(trainer, now, VALIDATION_END, reasons, ending, epoch_ends)

    def _progress(
        self, trainer: Trainer, step: int, epoch_ends: bool, clock: float, metrics: Mapping[str, float] = NO_METRICS
    ) -> Progress:
        return Progress(
            step=step,
            epoch=trainer.current_epoch + epoch_ends,
            validations=self._validations,
            time=clock,
            metrics=metrics,
            elapsed=self._elapsed_before + clock - self._fit_began,
            signals=self._signals,
            measured=self._measured if self._agreement is None else self._agreement.measured,
        )

    def _due(self, now: Progress) -> tuple[str, ...]:
        reasons = self.trigger.due(now, self._since)
        if self._follows:
            self._since = self.trigger.follow(now, self._since)
        return reasons

    def _agree(self, trainer: Trainer) -> None:
        """Begin to share a clock with the other ranks."""
        self._agreement = self._meeting = None
        if trainer.world_size > 1:
            if self.trigger.foreign:
                assert self._attempt is not None
                self._meeting = _meeting_of(trainer, f"{self._attempt.run_id}/{self._attempt.number}")
            self._agreement = Agreement(
                functools.partial(_greatest, trainer.strategy.root_device),
                leads=trainer.is_global_zero,
                watches=self.trigger.timed,
                signals=(*self.trigger.signals, RAISED) if self.trigger.signals else (),
            )
            if self.trigger.timed:
                self._exchange(trainer)

    def _exchange(self, trainer: Trainer) -> None:
        """Let all ranks know the time, the signals and how saving goes; end them together if too many saves failed."""
        assert self._agreement is not None
        self._meet(trainer, "agree when to save")
        busy = self._writer.saving or self._overlap is not None
        if self._ledger is not None and self._ledger.events:
            self._report(trainer)  # of a save that isn't on its way any more all is known
        report = Report(
            clock=time.monotonic(),
            busy=busy,
            superseded=self._superseded,
            failing=self._failures >= self.max_consecutive_failures,
            measured=self._measured or Measured(),
            signals=self._arrivals.counts,
        )
        self._agreement.exchange(report, functools.partial(self._due_in, trainer))
        self._signals = self._agreement.signals
        if self._agreement.failing:
            _on_rank_zero(trainer, self._raise_after_failures)

    def _meet(self, trainer: Trainer, aim: str) -> None:
        """Before a collective, make sure that all ranks come to it, where code of the user's own had a say in that."""
        if self._meeting is not None:
            self._meeting.wait(
                f"to {aim} at step {trainer.global_step}",
                f"by trigger={self.trigger!r}",
                "Either that is slower, or a function of yours answers differently there: it must depend on now and "
                "since alone",
            )

    def _due_in(self, trainer: Trainer, steps: int, seconds: float) -> bool:
        now = self._progress(trainer, trainer.global_step + steps, False, self._clock() + seconds)
        return bool(self.trigger.due(now, self._since))

    def _clock(self) -> float:
        """Seconds on a clock that only goes forward, the same on every rank."""
        return time.monotonic() if self._agreement is None else self._agreement.time

    def _stops(self, now: Progress) -> bool:
        """Whether a signal ends the fit at this save point. After SIGTERM Lightning ends every fit."""
        return bool(now.signals) and (
            SIGTERM in now.signals or RAISED in now.signals or self.trigger.stops(now, self._since)
        )

    def _gradients_pending(self, trainer: Trainer, pl_module: LightningModule) -> bool:
        # in manual optimization nobody but the module knows its windows: the end of one is a batch that stepped
        return _lightning.gradients_pending(trainer) if pl_module.automatic_optimization else not self._stepped

    def _consider(
        self, trainer: Trainer, now: Progress, point: str, reasons: tuple[str, ...], ending: bool, epoch_ends: bool
    ) -> None:
        """Save, unless this step's state was captured already or another save is on its way."""
        started = time.perf_counter()
        hold = waited = False
        stops = self._stops(now)
        ending = ending or stops
        if now.step == self._since.step:
            reasons = ()
        elif self.save_on_train_end and not reasons:
            if ending:
                reasons = (TRAIN_END,)
            elif epoch_ends and self._may_stop_late:
                # EarlyStopping decides after the last save point: only then it is known whether this state is the last
                reasons, hold = (TRAIN_END,), True
        late = self._may_stop_late and self.save_on_train_end
        if reasons and (ending or hold or (epoch_ends and (late or not self._loaders_stateful))):
            # the last chance of the fit, as far as is known before EarlyStopping decides; or of the epoch, since within
            # one a plain loader can't be resumed exactly
            self._meet(trainer, "wait for the save before")
            self._drain(trainer, self._patience, saves_only=True)
            waited = True
        if reasons and self._can_save(trainer, now.metrics, waited):
            self._meet(trainer, "save")
            self._save(trainer, now, point, reasons, started, last=ending or hold, hold=hold)
            if self._agreement is not None:
                self._agreement.saved(functools.partial(self._due_in, trainer))
        if stops:
            self._drain(trainer, self._patience, saves_only=True)
            rank_zero_info(
                f"CheckpointPolicy: {' and '.join(sorted(now.signals))} ends this fit at step {now.step}; the newest "
                f"confirmed checkpoint is {self.last_model_path or 'none'}"
            )
            self._arrivals.raise_held()
            _lightning.stop_as_after_sigterm(trainer)

    def _can_save(self, trainer: Trainer, metrics: Mapping[str, float], waited: bool = False) -> bool:
        """Whether a save that is due can begin, the same on every rank; ``waited`` after waiting for the one before."""
        if self._agreement is None:
            superseded, busy = self._superseded, self._writer.saving or self._overlap is not None
        else:
            if waited or self._agreement.asks():
                self._exchange(trainer)
            superseded, busy = self._agreement.superseded, not self._agreement.free
        if superseded:
            return False
        if busy:
            if metrics:
                self._warn_once(
                    "a save that was due at the end of a validation waits for the one before it, which is still being "
                    "written: its checkpoint will be of a later step, without that validation's metrics. Saves are due "
                    "faster than the store takes them: let triggers fire less often"
                )
            return False
        if self._agreement is None:
            self._raise_after_failures()
        return True

    @property
    def _patience(self) -> float:
        # a delete may be on its way when a save is queued, and the save's own time begins after it
        return self.save_timeout + DELETE_TIMEOUT + GRACE

    def _drain(self, trainer: Trainer, timeout: float, *, saves_only: bool) -> bool:
        """Wait for the background, on every rank; none stays in one collective for longer than a slice."""
        if self._overlap is not None:
            self._overlap[0].reach()
        deadline = time.monotonic() + timeout

        def wait() -> tuple[bool, bool]:
            done = self._writer.drain(min(_SLICE, timeout), saves_only=saves_only)
            return done, time.monotonic() >= deadline

        while True:
            done, late = _on_rank_zero(trainer, wait)
            if done or late:
                return done

    def _reserve(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the memory for the first copy be touched in the background, now that the optimizers have their state."""
        self._reserved = True
        if self._ledger is None:
            return
        tensors = list(pl_module.state_dict().values())
        if not self.save_weights_only:
            tensors += [tensor for _, tensor in _optimized(trainer, pl_module)]
        sizes = {}
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
                storage = tensor.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
        size = sum(sizes.values()) // CHUNK_BYTES * CHUNK_BYTES  # the last chunk isn't filled
        self._staging.reserve(size)

    def _save(
        self,
        trainer: Trainer,
        now: Progress,
        point: str,
        reasons: tuple[str, ...],
        started: float,
        *,
        last: bool,
        hold: bool,
    ) -> None:
        if any(
            id(optimizer) not in self._steppers and _has_gradients(optimizer)
            for optimizer in (trainer.optimizers if self._hooks else ())
        ):
            self._warn_once(
                "a checkpoint is taken after a batch in which an optimizer that has gradients didn't step: if it "
                "accumulates over several batches, those gradients are not in the checkpoint"
            )
        attempt = self._attempt
        assert attempt is not None
        module = trainer.lightning_module
        overlapped = self._overlaps and not last
        request: SaveRequest | None = None
        draft: dict[str, Any] = {}
        if self._ledger is not None:
            cost = typical_cost(self._costs)
            draft = {
                "step": now.step,
                "epoch": now.epoch,
                "run_id": attempt.run_id,
                "attempt": attempt.number,
                "parent": attempt.parent,
                "created_at": time.time(),
                "reason": tuple(_shortened(reason) for reason in reasons),
                "metrics": dict(now.metrics),
                "point": point,
                "world_size": trainer.world_size,
                "weights_only": self.save_weights_only,
                # of the saves before, since how much this one slows training is only known after it
                "slowed_seconds": cost.slowdown if self._paced and cost is not None else None,
            }
            request = SaveRequest(self._staging, still_storages(_optimized(trainer, module)) if overlapped else {})
        self._capturing = (now, point)
        try:
            trainer.save_checkpoint(self.store.url, self.save_weights_only, storage_options=request)
        except BaseException:
            if request is not None and request.image is not None:
                request.image.release()
            raise
        finally:
            self._capturing = None
        self._pace.save_began()
        image = None if request is None else request.image
        if image is not None:
            image.held_seconds = time.perf_counter() - started
        captured = now.captured(self._since)
        # every rank comes to the barrier, where they agree whether the copy is good
        if overlapped and (trainer.world_size > 1 or (image is not None and image.deferred)):
            self._complete_later(trainer, module, image, draft, captured)
        elif image is not None:
            self._submit(image, draft, hold)
        if hold:
            self._held = captured
        else:
            self._since = captured

    def _submit(self, image: Image, draft: dict[str, Any], hold: bool = False) -> None:
        assert self._ledger is not None
        draft["held_seconds"] = image.held_seconds
        if hold:
            self._ledger.hold(image, draft)
        else:
            self._ledger.submit(image, draft, self.save_timeout)

    def _complete_later(
        self, trainer: Trainer, module: LightningModule, image: Image | None, draft: dict[str, Any], now: Progress
    ) -> None:
        """Let an image be completed in the background, and wait for that before anything can change the state."""
        fingerprints: list[str] | None = None
        if image is not None:
            if self._overlapped % AUDIT_EVERY == 0:
                began = time.perf_counter()
                fingerprints = image.fingerprints()
                image.audit_seconds = time.perf_counter() - began
            image.start()
        self._overlapped += 1
        complete = functools.partial(self._complete, trainer, image, draft, now, self._since, fingerprints)
        self._overlap = Barrier(trainer, module, complete), image

    def _complete(
        self,
        trainer: Trainer,
        image: Image | None,
        draft: dict[str, Any],
        now: Progress,
        before: Progress,
        fingerprints: list[str] | None,
        going_on: bool,
    ) -> None:
        """Complete an image and let it be written; if something has changed the state too early, discard it."""
        self._overlap = None
        changed: str | None = None
        try:
            if image is not None:
                began = time.perf_counter()
                image.complete()
                changed = image.changed
                completed = time.perf_counter()
                image.held_seconds += completed - began
                if fingerprints is not None:
                    changed = changed or image.differs(fingerprints)
                    image.audit_seconds += time.perf_counter() - completed
            agreed = trainer.world_size == 1
            if going_on and not agreed:
                changed = trainer.strategy.broadcast(changed)
                agreed = True
        except BaseException:
            if image is not None:
                image.release()
            raise
        if changed is None:
            if image is not None:
                self._submit(image, draft)
            return
        self._overlaps = False
        if self._since.step == now.step and agreed:
            self._since = before  # still due
        error = SnapshotChangedError(
            f"{changed!r} was changed between the save point of step {now.step} and the next optimizer step, while it "
            "was being copied. That copy is discarded; from now on all state is copied before training goes on, as "
            'with snapshot="eager"'
        )
        rank_zero_warn(f"CheckpointPolicy: {error}")
        if image is not None:
            image.release()
            self.history.append(SaveOutcome(now.step, None, error, image.held_seconds, image.audit_seconds))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Reach the barrier, should someone have taken it out of the Trainer's callbacks."""
        if self._overlap is not None:
            self._overlap[0].reach()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """As `on_before_optimizer_step`."""
        if self._overlap is not None:
            self._overlap[0].reach()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget a state that was kept back in case the fit ended with the last epoch."""
        self._pace.interrupted()
        if self._agreement is not None:
            self._agreement.interrupted()
        self._release_held()

    def _release_held(self) -> None:
        self._held = None
        if self._ledger is not None:
            self._ledger.release_held()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add each rank's random state, its callbacks' and the progress to a checkpoint, also to one of the user's."""
        if self._capturing is None and STATE_KEY in checkpoint:
            return
        now, point = self._capturing or (
            self._progress(trainer, trainer.global_step, False, self._clock()),
            "user",
        )
        epoch_ended = self._capturing is not None and _lightning.is_last_batch(trainer)
        # an epoch's last batch is marked as completed here where stock Lightning then resumes well, else by a resume
        completed = point == EPOCH_END and self._loaders_stateful and _lightning.loaders_are_exhausted(trainer)
        if completed:
            _lightning.mark_batch_completed(checkpoint)
        state = checkpoint.setdefault(STATE_KEY, {})
        state["schema_version"] = STATE_VERSION
        state["progress"] = now.captured(self._since).to_state()
        state["point"] = point
        state["batch_completed"] = completed
        state["epoch_ended"] = epoch_ended
        if point == VALIDATION_BATCH_END:
            _lightning.restart_validation(checkpoint)
        if point == BATCH_END and self._validated_step == now.step:
            _lightning.unstep_logger(checkpoint)
        state["created_at"] = time.time()
        state["early_stopped"] = trainer.should_stop and _early_stopping_is_over(trainer)
        state["accumulate_grad_batches"] = trainer.accumulate_grad_batches
        state["callback_metrics"] = _lightning.metrics_for_callbacks(trainer, epoch_ended)
        policies = [callback for callback in _lightning.callbacks(trainer) if isinstance(callback, CheckpointPolicy)]
        attempts = [self._attempt, *(policy._attempt for policy in policies if policy is not self)]
        state["runs"] = [attempt.run_id for attempt in attempts if attempt is not None]
        # only a save of ours is known to run on every rank
        own = self._rng_before_validation if point == VALIDATION_BATCH_END else collect_rng_state()

        def of_this_rank() -> tuple[dict[str, Any], dict[str, Any]]:
            return own, collect_rank_state(_lightning.callbacks(trainer))

        ranks = [of_this_rank()] if self._capturing is None else _on_each_rank(trainer, of_this_rank)
        state["rng"], state["rank_states"] = [list(states) for states in zip(*ranks, strict=True)]

    # the end

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wait until the last save is confirmed.

        Raises:
            CheckpointSaveError: It wasn't, after all retries.
        """
        if not self._active:
            return
        if self._held is not None and self._held.step == trainer.global_step:
            self._since = self._held
            if self._ledger is not None:
                self._ledger.submit_held(self.save_timeout)
        if self.save_on_train_end and self._since.step < trainer.global_step:
            self._warn_once(
                f"the fit was stopped after its last save point: the steps from {self._since.step + 1} to "
                f"{trainer.global_step} are in no checkpoint. Add EveryNEpochs(1) or AfterValidation() to the trigger"
            )
        interrupted = False
        try:
            confirmed = self._drain(trainer, self._patience, saves_only=True)
            if self._ledger is not None:
                self._ledger.prune()
            pruned = self._drain(trainer, DELETE_TIMEOUT + GRACE, saves_only=False)
            status = "stopped" if trainer.should_stop else "finished"
            _on_rank_zero(trainer, lambda: self._finish(trainer, confirmed, pruned, status))
            if self._agreement is not None and self._listens:
                self._exchange(trainer)
        except KeyboardInterrupt:
            interrupted = True  # `on_exception` waits for what is left
            raise
        finally:
            if not interrupted:
                self._end_fit(trainer)

    def _end_fit(self, trainer: Trainer) -> None:
        try:
            if self._listens and self._stops(
                self._progress(trainer, trainer.global_step, False, self._clock())
            ):  # it came after the last save point: for who asks trainer.received_sigterm
                _lightning.stop_as_after_sigterm(trainer)
        finally:
            self._active = False
            self._elapsed_before += self._clock() - self._fit_began
            self._release()
            self._arrivals.restore()
            self._staging.clear()
        self._arrivals.raise_held()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Where nothing was left to train, still clear up after a save or delete that was interrupted."""
        if self._began or self._resumed is None or not trainer.is_global_zero or _lightning.fast_dev_run(trainer):
            return
        try:
            self._attempt = self._begin(same_process=False)
            assert self._ledger is not None
            self._ledger.prune()
            self._writer.close(DELETE_TIMEOUT + GRACE)
            self._end_attempt("finished")
        except (OSError, CheckpointError) as error:  # the training is complete and saved
            rank_zero_warn(
                f"What an earlier attempt left in {self.store.url!r} could not be removed: {describe(error)}"
            )

    def _finish(self, trainer: Trainer, confirmed: bool, pruned: bool, status: str) -> None:
        self._report(trainer, final=True)
        if not self.history and not self._newest():
            stood = trainer.global_step == 0 and self._validations == 0
            self._warn_once(
                f"nothing was saved in this fit: trigger={self.trigger!r} was never due"
                + (", since trainer.global_step stayed 0: no optimizer of the Trainer's stepped" if stood else "")
            )
        if not pruned:
            rank_zero_warn(
                f"Some superfluous checkpoints are left in {self.store.url!r}, since deleting them takes long: they "
                "are deleted after the next confirmed save"
            )
        error = self._last_error
        if error is None and not confirmed and self._writer.saving:
            error = TimeoutError(f"the store didn't answer within save_timeout={self.save_timeout:g} s")
        if error is not None:
            self._end_attempt("error")
            raise CheckpointSaveError(
                f"the last save of this fit could not be confirmed in {self.store.url!r}: {describe(error)}. "
                f"The newest confirmed checkpoint is {self.last_model_path or 'none'}"
            ) from error
        self._end_attempt(status)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Wait, for ``save_timeout`` at most, until the pending save is confirmed.

        New state is captured only if a signal asked for it and no batch was on its way, so that a signal which ended
        dataloader workers too has still led to a save.
        """
        try:
            self._end_with(trainer, pl_module, exception)
        finally:
            self._arrivals.restore()
            self._note_sigterm(trainer)

    def _note_sigterm(self, trainer: Trainer) -> None:
        """Let who asks ``trainer.received_sigterm`` know of one that no save point followed."""
        if self._listens and SIGTERM in self._arrivals.counts:
            _lightning.stop_as_after_sigterm(trainer)

    def _end_with(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        asked = self._active and self._listens and bool(self._arrivals.counts)
        self._release()
        if not self._active:
            return
        if self._overlap is not None:
            self._overlap[0].reach(going_on=False)
        self._capturing = None
        stopped = isinstance(exception, (KeyboardInterrupt, SIGTERMException))
        if asked and trainer.world_size == 1:
            stopped = self._save_what_a_signal_asked_for(trainer, pl_module) or stopped
        self._active = False
        if self._ledger is None:
            return
        if not self._writer.drain(self._patience, saves_only=True):
            rank_zero_warn(
                f"The pending checkpoint is lost: {self.store.url!r} didn't answer within save_timeout="
                f"{self.save_timeout:g} s. The newest confirmed one is {self.last_model_path or 'none'}"
            )
        self._staging.clear()
        self._report(trainer, final=True, exception=exception)
        self._end_attempt("stopped" if stopped else "error")

    def _save_what_a_signal_asked_for(self, trainer: Trainer, pl_module: LightningModule) -> bool:
        """Save, where an error came before the end of the next batch, and say whether the fit was to be ended."""
        self._signals = self._arrivals.counts
        now = self._progress(trainer, trainer.global_step, _lightning.is_last_batch(trainer), time.monotonic())
        stops, reasons = self._stops(now), self._due(now)
        point = VALIDATION_BATCH_END if trainer.validating else BATCH_END
        exact = not self._gradients_pending(trainer, pl_module) and (
            not may_validate_other_weights(trainer, pl_module)
            if trainer.validating
            else _lightning.is_between_batches(trainer)
        )
        if reasons and exact and now.step != self._since.step:
            try:
                self._writer.drain(self._patience, saves_only=True)
                if self._can_save(trainer, {}):
                    self._save(trainer, now, point, reasons, time.perf_counter(), last=True, hold=False)
            except Exception as error:  # it must not mask the one that is on its way
                rank_zero_warn(f"What a signal asked for could not be saved: {describe(error)}")
        return stops

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take back what a fit that had nothing left to train was prepared with."""
        self._release()
        self._arrivals.restore()
        self._to_load = None
        if not self._began:
            self._note_sigterm(trainer)
            self._arrivals.raise_held()

    def _end_attempt(self, status: str) -> None:
        assert self._ledger is not None
        if self._superseded:
            return
        attempt, errors = self._ledger.attempt, []

        def note() -> None:
            try:
                self.store.finish_attempt(attempt, status)
            except Exception as error:  # only a note of how it ended; it must mask nothing
                errors.append(error)

        if not run_within(note, min(GRACE, self.save_timeout)):
            errors.append(TimeoutError("the store didn't answer in time"))
        for error in errors:
            rank_zero_warn(f"The end of this attempt could not be noted in {self.store.url!r}: {describe(error)}")

    def _tell_loggers(self, trainer: Trainer, exception: BaseException | None) -> None:
        intervals: dict[str, float] = {}
        for trigger in self.trigger.adaptive:
            seconds = intervals[INTERVAL_METRIC] = trigger.interval(self._measured)
            if abs(seconds - self._chosen.get(trigger, 0.0)) > _NOTICEABLE * seconds:
                self._chosen[trigger] = seconds
                rank_zero_info(f"CheckpointPolicy: {trigger!r} saves {trigger.explain(self._measured)}")
        step = _lightning.logged_step(trainer)
        for logger in trainer.loggers:
            try:
                logger.after_save_checkpoint(self)  # type: ignore[arg-type]
                if intervals:
                    logger.log_metrics(intervals, step=step)
            except Exception as error:
                if exception is None:
                    raise
                rank_zero_warn(f"{type(logger).__name__}.after_save_checkpoint failed: {describe(error)}")

    def _report(self, trainer: Trainer, final: bool = False, exception: BaseException | None = None) -> None:
        """Tell loggers and the user, on the main thread, what happened in the background."""
        ledger = self._ledger
        assert ledger is not None
        while ledger.events:
            event = ledger.events.popleft()
            if isinstance(event, RuleFailure):
                self._warn_once(
                    f"retention={self.retention!r} can't decide what stays: {describe(event.error)}. Nothing is "
                    "deleted while that lasts",
                    about="rule",
                )
                continue
            if not isinstance(event, SaveOutcome):
                self._delete_failures += 1
                rank_zero_warn(
                    f"{event.record.path!r} could not be deleted from {self.store.url!r}: {describe(event.error)}. "
                    f"It is tried again after the next save ({self._delete_failures} failed so far)"
                )
                continue
            self.history.append(event)
            self._last_error = event.error
            slowdown = self._pace.slowdown(event.held_seconds + event.audit_seconds)
            if event.record is not None:
                self._failures = 0
                self._note_cost(event.record, slowdown)
                self._tell_loggers(trainer, exception)
            elif isinstance(event.error, SupersededError):
                self._superseded = True
                rank_zero_warn(str(event.error))
            else:
                self._failures += 1
                rank_zero_warn(
                    f"The checkpoint of step {event.step} could not be saved in {self.store.url!r}: "
                    f"{describe(event.error)}. Training goes on, older checkpoints are kept "
                    f"({self._failures} of max_consecutive_failures={self.max_consecutive_failures})"
                )
        if ledger.excess:
            self._warn_once(
                f"what may never be deleted (the newest checkpoint, pinned ones and milestones) is "
                f"{ledger.excess} bytes above the budget of retention={self.retention!r}: raise the budget, name fewer "
                "milestones or unpin some",
                about="budget",
            )
        if not final and trainer.world_size == 1:
            self._raise_after_failures()

    def _note_cost(self, record: CheckpointRecord, slowdown: float) -> None:
        if self._costs_are_old:  # those of earlier attempts served until this one had a save of its own
            self._costs, self._costs_are_old = [], False
        self._costs += [replace(cost, slowdown=slowdown) for cost in costs_of([record])]
        self._measure()

    def _raise_after_failures(self) -> None:
        if self._failures >= self.max_consecutive_failures:
            raise CheckpointSaveError(
                f"{self._failures} saves in a row failed in {self.store.url!r}, the last one with "
                f"{describe(self._last_error)}. Mend the store and start again from "
                f"{self.last_model_path or 'the beginning'}, or raise max_consecutive_failures"
            ) from self._last_error

    def _restore_rng(self, trainer: Trainer) -> None:
        assert self._loaded is not None
        states = self._loaded["rng"]
        if len(states) != trainer.world_size:
            self._warn_once(
                f"the checkpoint holds the random state of {len(states)} rank(s), this fit has {trainer.world_size}: "
                "random numbers go on differently"
            )
        if trainer.global_rank < len(states):
            restore_rng_state(states[trainer.global_rank])

    def _restore_rank_state(self, trainer: Trainer, states: list[dict[str, Any]]) -> None:
        callbacks = _lightning.callbacks(trainer)
        names = [
            type(callback).__name__ for key, callback in declaring(callbacks).items() if any(key in s for s in states)
        ]
        if names and len(states) != trainer.world_size:
            self._warn_once(
                f"the checkpoint holds the state of {', '.join(names)} on {len(states)} rank(s), this fit has "
                f"{trainer.world_size}: a rank that it holds none of begins without, and what is left over is dropped"
            )
        if trainer.global_rank < len(states):
            restore_rank_state(callbacks, states[trainer.global_rank])

    def _warn_about_limits(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say once what Lightning can't resume exactly in this training."""
        loaders = _lightning.train_loaders(trainer)
        self._loaders_stateful = all(_is_stateful(loader) for loader in loaders)
        for rule, monitors, useless in (
            ("retention", self.retention.monitors, "KeepBest keeps nothing"),
            ("trigger", self.trigger.monitors, "OnImprovement is never due"),
        ):
            for monitor in dict.fromkeys(monitor for monitor, _ in monitors if not trainer.enable_validation):
                self._warn_once(
                    f"monitor={monitor!r} of the {rule} is never logged, since this fit has no validation: only "
                    f"what a validation logs is a metric of the saved weights, so {useless}. Add one"
                )
        if any(isinstance(getattr(loader, "sampler", None), DistributedSamplerWrapper) for loader in loaders):
            self._warn_once(
                "Lightning wrapped the train dataloader's sampler for several ranks, and its random order can't be "
                "resumed. Give the dataloader a torch.utils.data.DistributedSampler (or torchdata's "
                "StatefulDistributedSampler) and set Trainer(use_distributed_sampler=False)"
            )
        if not self._loaders_stateful:
            self._warn_once(
                "the train dataloader has no state_dict: a resume from the middle of an epoch sees other data. "
                "Use torchdata.stateful_dataloader.StatefulDataLoader, or save with EveryNEpochs only"
            )
        if _lightning.reloads_dataloaders(trainer):
            self._warn_once(
                "reload_dataloaders_every_n_epochs counts from where a fit begins: a resume reloads in other epochs"
            )
        if trainer.num_training_batches == float("inf"):
            self._warn_once(
                "the train dataloader has no length: Lightning fetches one batch ahead, and a resume loses that batch"
            )
        for hook, moment in (("on_train_batch_end", "batch"), ("on_validation_end", "validation")):
            if is_overridden(hook, pl_module):
                self._warn_once(
                    f"{type(pl_module).__name__}.{hook} runs after the callbacks: what it changes, and the random "
                    f"numbers it draws, are not in a checkpoint of that {moment}. Move it into a callback"
                )
        if any(config.reduce_on_plateau for config in trainer.lr_scheduler_configs):
            self._warn_once(
                "ReduceLROnPlateau steps after the batch's or the validation's end: a resume from a checkpoint taken "
                "there skips that step"
            )

    def _warn_once(self, message: str, about: str = "") -> None:
        about = about or message
        if about not in self._warned:
            self._warned.add(about)
            rank_zero_warn(f"CheckpointPolicy: {message}")


def _answer_ckpt_path(trainer: Trainer, state_fn: TrainerFn, ckpt_path: Any) -> tuple[bool, str | None]:
    """What ``ckpt_path`` means for a Trainer that has a ``CheckpointPolicy``: whether there is an answer, and which."""
    policies = [callback for callback in _lightning.callbacks(trainer) if isinstance(callback, CheckpointPolicy)]
    for policy in policies:
        policy._selected = None
        policy._asked_for_last = ckpt_path == "last"
        policy._to_load = None if ckpt_path is None else str(ckpt_path)
    if not policies or ckpt_path not in ("last", "best"):
        return False, None
    if ckpt_path == "best":
        for policy in policies:
            policy._bind(trainer)
        first = trainer.checkpoint_callback
        if isinstance(first, CheckpointPolicy) and not first.best_model_path:
            monitors = first.retention.monitors
            holds = f" that holds the metric {monitors[0][0]!r} of KeepBest" if monitors else ""
            raise ValueError(
                f'ckpt_path="best": there is no confirmed checkpoint in {first.store.url!r}{holds}. '
                'Pass ckpt_path="last" or a path'
            )
        return False, None
    fitting = state_fn == TrainerFn.FITTING
    found: list[tuple[int, CheckpointPolicy, CheckpointRecord]] = []
    errors: list[Exception] = []
    for policy in policies:
        try:
            record = select(policy._bind(trainer), policy.filename, fitting)
        except (CheckpointError, ValueError) as error:
            errors.append(error)
        else:
            found += [] if record is None else [(record.step, policy, record)]
    if found:
        _, policy, record = max(found, key=lambda candidate: candidate[0])
        policy._selected = policy.store.path_of(record)
        return True, policy._selected
    if errors:
        raise errors[0]
    if any(
        isinstance(callback, (ModelCheckpoint, OnExceptionCheckpoint)) for callback in _lightning.callbacks(trainer)
    ):
        return False, None
    nothing = f'ckpt_path="last": nothing is saved yet in {policies[0].store.url!r}'
    if fitting:
        rank_zero_info(f"{nothing}, training starts afresh")
    else:
        rank_zero_warn(f"{nothing}: the model's present weights are used")
    return True, None


def _is_ending(trainer: Trainer, now: Progress, epoch_ends: bool) -> bool:
    """Whether the fit ends with the current batch, as far as can be known now."""
    if 0 <= trainer.max_steps <= now.step:
        return True
    if epoch_ends and trainer.max_epochs is not None and 0 <= trainer.max_epochs <= now.epoch:
        return True
    return trainer.should_stop and _lightning.may_stop(trainer, epoch_ends)


def _on_rank_zero(trainer: Trainer, function: Callable[[], T]) -> T:
    """Run ``function`` on rank 0 and give every rank its result, or raise its error on every rank."""
    result: Any = None
    error: Exception | None = None
    if trainer.is_global_zero:
        try:
            result = function()
        except Exception as caught:
            error = caught
    if trainer.world_size > 1:
        text = None if error is None else describe(error)
        # a program that catches one of this package's errors must do so on every rank
        kind = type(error) if isinstance(error, CheckpointError) else CheckpointError
        result, text, kind = trainer.strategy.broadcast((result, text, kind))
        if text is not None and error is None:
            raise kind(f"rank 0: {text}")
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


def _on_each_rank(trainer: Trainer, function: Callable[[], T]) -> list[T]:
    """What ``function`` returns on each rank, on every rank; an error of one is raised on every rank."""
    if trainer.world_size == 1:
        return [function()]
    result: T | None = None
    error: Exception | None = None
    try:
        result = function()
    except Exception as caught:
        error = caught
    ranks = _gather(trainer, (result, None if error is None else describe(error)))
    if error is not None:
        raise error
    for rank, (_, text) in enumerate(ranks):
        if text is not None:
            raise CheckpointError(f"rank {rank}: {text}")
    return [there for there, _ in ranks]  # type: ignore[misc]


def _gather(trainer: Trainer, state: T) -> list[T]:
    """The state of every rank, on every rank."""
    if trainer.world_size == 1:
        return [state]
    states: list[Any] = [None] * trainer.world_size
    torch.distributed.all_gather_object(states, state)
    return states


def _greatest(device: torch.device, values: Sequence[float]) -> list[float]:
    """The greatest of each value over all ranks, on every rank."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MAX)
    return tensor.tolist()


def _meeting_of(trainer: Trainer, name: str) -> Meeting:
    return Meeting(f"{STATE_KEY}/{name}", trainer.global_rank, trainer.world_size, _lightning.group_timeout(trainer))


def _check_that_ranks_agree(trainer: Trainer, policies: list[CheckpointPolicy]) -> None:
    """Compare the policies of all ranks.

    Raises:
        ValueError: On every rank, where one was given other arguments than rank 0.
    """
    for policy in policies:
        policy._bind(trainer)
    own = [policy._arguments() for policy in policies]
    digests = _gather(trainer, hashlib.sha256(repr(own).encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    everyone = _gather(trainer, own)
    others = [rank for rank, policies_there in enumerate(everyone) if policies_there != everyone[0]]
    first, there = everyone[0], everyone[others[0]]
    if len(first) != len(there):
        name, values = "the number of CheckpointPolicy callbacks", [str(len(first)), str(len(there))]
    else:
        name, values = next(
            (name, [value, arguments[name]])
            for policy, arguments in zip(first, there, strict=True)
            for name, value in policy.items()
            if value != arguments[name]
        )
    raise ValueError(
        f"{name} differs between the ranks: {_shortened(values[0])} on rank 0, {_shortened(values[1])} on "
        f"{shown(others)}. Ranks must decide alike: give each of them the same arguments"
    )


def _same_on_all_ranks(trainer: Trainer, value: Any) -> bool:
    return all(other == value for other in _gather(trainer, value))


def _is_stateful(loader: Any) -> bool:
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))


def _early_stopping_is_over(trainer: Trainer) -> bool:
    stops = [callback for callback in _lightning.callbacks(trainer) if isinstance(callback, EarlyStopping)]
    return any(stop.wait_count >= stop.patience for stop in stops)


def _same_folder(one: str, other: str) -> bool:
    return one == other or ("://" not in one + other and os.path.realpath(one) == os.path.realpath(other))


def _nothing() -> None:
    pass


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])


def _optimized(trainer: Trainer, module: LightningModule) -> Iterator[tuple[str, torch.Tensor]]:
    """What only the Trainer's optimizers change, each with a name: their parameters and state."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if _torch.changes_in_backward(parameter):
                    continue
                name = names.get(id(parameter), "a parameter")
                yield name, parameter
                state = optimizer.state.get(parameter)
                for key, value in state.items() if isinstance(state, Mapping) else ():
                    if isinstance(value, torch.Tensor):
                        yield f"{name} ({key})", value


def _shortened(reason: str) -> str:
    return reason if len(reason) <= _REASON_CHARACTERS else reason[: _REASON_CHARACTERS - 1] + "…"


def _new_run_id() -> str:
    return uuid.uuid4().hex


def _check_filename(filename: object) -> None:
    """Accept a template of ``step`` that gives another safe name for another step."""
    advice = "write something like 'step-{step:010d}'"
    if not isinstance(filename, str):
        raise TypeError(f"filename={filename!r} must be a string: {advice}")
    try:
        names = {filename.format(step=step) for step in (0, 1, 10)}
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(f"filename={filename!r} may use the field step alone: {advice}") from error
    if len(names) != 3 or not all(is_safe_name(name + ".ckpt") for name in names):
        raise ValueError(
            f"filename={filename!r} must contain the step, and neither separators nor special characters: {advice}"
        )
