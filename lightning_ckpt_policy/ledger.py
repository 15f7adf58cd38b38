"""One attempt of a run, seen from the background: commit, remember what is confirmed, delete what is superfluous."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_ckpt_policy import retention as retention_rules
from lightning_ckpt_policy.errors import CheckpointSaveError, PinnedError, SupersededError
from lightning_ckpt_policy.record import CheckpointRecord
from lightning_ckpt_policy.retention import Retention
from lightning_ckpt_policy.retry import forget_frames, retrying
from lightning_ckpt_policy.snapshot import Image
from lightning_ckpt_policy.store import Attempt, CheckpointStore
from lightning_ckpt_policy.writer import BackgroundWriter, run_together

# seconds; a store that hangs in a delete must not keep the saves behind it waiting
DELETE_TIMEOUT = 60.0
# of more deletes at once the record of the last would become large
MOST_NOTED = 10_000


@dataclass(frozen=True)
class SaveOutcome:
    """How one save ended.

    Attributes:
        step: Optimizer steps done when the state was captured.
        record: The confirmed checkpoint, or ``None`` if it failed.
        error: Why it failed, or ``None``.
        held_seconds: How long the training loop was held, seconds.
        audit_seconds: How long it was held for checking the copy (the first and some later saves), seconds.
    """

    step: int
    record: CheckpointRecord | None
    error: BaseException | None
    held_seconds: float
    audit_seconds: float = 0.0


@dataclass(frozen=True)
class DeleteFailure:
    """A checkpoint that retention gave up but couldn't delete; it is tried again after the next confirmed save."""

    record: CheckpointRecord
    error: Exception


@dataclass(frozen=True)
class RuleFailure:
    """What the retention rule raised instead of deciding; nothing is deleted."""

    error: Exception


class SaveInFlight:
    """One save on its way; lets a store that hangs be left behind without confirming anything later."""

    def __init__(self) -> None:
        self.given_up = threading.Event()
        self._settled = threading.Lock()

    def settle(self) -> bool:
        """Whether the caller is the one who may say how this save ended: the first who asks."""
        return self._settled.acquire(blocking=False)

    def guard(self) -> None:
        if self.given_up.is_set():
            raise CheckpointSaveError("this save was given up since it took too long")


class Ledger:
    """The confirmed checkpoints of one attempt of a run, and what is done to them in the background.

    Args:
        store: Where the run's checkpoints are.
        attempt: This attempt; once a newer one of the run exists, nothing more is written or deleted.
        retention: What to keep.
        records: The run's confirmed records so far.
        protect: File names that are never deleted until something newer is confirmed (what the run resumed from).
        writer: Runs what is done here.
        filename: Template of payload names, without the suffix.
    """

    def __init__(
        self,
        store: CheckpointStore,
        attempt: Attempt,
        retention: Retention,
        records: list[CheckpointRecord],
        protect: frozenset[str],
        writer: BackgroundWriter,
        filename: str,
    ) -> None:
        self.store = store
        self.attempt = attempt
        self.retention = retention
        self.writer = writer
        self.filename = filename
        self.events: deque[SaveOutcome | DeleteFailure | RuleFailure] = deque()
        self.deleted: list[CheckpointRecord] = []
        self.excess = 0  # bytes above the byte budget that no delete can win back
        self._records = sorted(records, key=lambda record: record.sequence)
        self._protect = protect
        self._deleting: set[str] = set()
        self._doomed: set[str] = set()  # of these a delete was begun at least
        self._held: tuple[Image, Mapping[str, Any]] | None = None
        self._lock = threading.Lock()

    @property
    def records(self) -> list[CheckpointRecord]:
        """The run's confirmed checkpoints that weren't deleted, by sequence."""
        with self._lock:
            return list(self._records)

    @property
    def kept(self) -> list[CheckpointRecord]:
        """Those of `records` that no delete was begun of: their files are there."""
        with self._lock:
            return [record for record in self._records if record.path not in self._doomed]

    def submit(self, image: Image, draft: Mapping[str, Any], timeout: float | None) -> None:
        """Queue a save.

        Args:
            image: The captured state, complete; its memory is let go of once the save has ended.
            draft: The record's fields, without those that only the store knows.
            timeout: Seconds after which the save has failed, whatever the store does.
        """
        save = SaveInFlight()

        def ended(record: CheckpointRecord | None, error: BaseException | None) -> None:
            self.events.append(SaveOutcome(draft["step"], record, error, image.held_seconds, image.audit_seconds))

        def run() -> None:
            try:
                record = self._commit(save, image, draft, timeout)
            except BaseException as error:
                if save.settle():
                    forget_frames(error)
                    ended(None, error)
                    self.prune()  # what couldn't be deleted before may be what fills the disk
            else:
                if not save.settle():
                    self._take_back(record)
                    return
                with self._lock:
                    self._records.append(record)
                    self._protect = frozenset()
                ended(record, None)
                self.prune()
            finally:
                image.release()

        def give_up() -> None:
            if not save.settle():
                return  # it ended at this very moment
            save.given_up.set()
            image.release(in_use=True)
            error = CheckpointSaveError(
                f"the store didn't finish within save_timeout={timeout:g} s; "
                "raise save_timeout if the store is slow rather than stuck"
            )
            ended(None, error)

        self.writer.submit(run, timeout=timeout, on_timeout=give_up)

    def _take_back(self, record: CheckpointRecord) -> None:
        """Delete what a hung store took at last, after its save had been reported as failed."""
        with contextlib.suppress(Exception):  # if it stays, it is whole, and the next start finds it
            if not self.store.superseded(self.attempt):
                self.store.delete(record)

    def hold(self, image: Image, draft: Mapping[str, Any]) -> None:
        """Keep a captured state back, until it is known whether it is the last one of a fit."""
        self._held = (image, draft)

    def submit_held(self, timeout: float | None) -> None:
        """Save what was kept back."""
        if self._held is not None:
            (image, draft), self._held = self._held, None
            self.submit(image, draft, timeout)

    def release_held(self) -> None:
        """Forget what was kept back."""
        if self._held is not None:
            self._held[0].release()
            self._held = None

    def prune(self) -> None:
        """Queue the deletes that retention allows now."""
        with self._lock:
            staying = [record for record in self._records if record.path not in self._deleting]
            try:
                doomed = retention_rules.plan(self.retention, staying, now=time.time(), protect=self._protect)
                self.excess = retention_rules.excess(self.retention, self._records, now=time.time())
            except Exception as error:  # a rule of the user's own, maybe: it is reported
                forget_frames(error)
                self.events.append(RuleFailure(error))
                return
            self._deleting.update(record.path for record in doomed)
            self._doomed.update(record.path for record in doomed)
        if 1 < len(doomed) <= MOST_NOTED:
            self.writer.submit_cleanup(functools.partial(self._note_doomed, doomed), timeout=DELETE_TIMEOUT)
        at_once = self.store.backend.deletes_at_once
        others = doomed[:-1]
        batches = [others[start : start + at_once] for start in range(0, len(others), at_once)]
        for batch in [*batches, doomed[-1:]] if doomed else []:  # the last one by itself, since it has the note
            self.writer.submit_cleanup(
                functools.partial(run_together, [functools.partial(self._delete, record) for record in batch]),
                timeout=DELETE_TIMEOUT,
                on_timeout=functools.partial(self._give_up_deleting, batch),
            )

    def _note_doomed(self, doomed: list[CheckpointRecord]) -> None:
        """Make a restart between two of these deletes go on with the others."""
        with contextlib.suppress(Exception):  # a full disk has no room for it, and the deletes are what makes room
            if not self.store.superseded(self.attempt):
                noted = self.store.note_doomed(doomed[-1], doomed[:-1], repr(self.retention))
                with self._lock:
                    self._records = [noted if record.path == noted.path else record for record in self._records]

    def _commit(
        self, save: SaveInFlight, image: Image, draft: Mapping[str, Any], timeout: float | None
    ) -> CheckpointRecord:
        def guard() -> None:
            save.guard()
            if self.store.superseded(self.attempt):
                raise SupersededError(
                    f"attempt {self.attempt.number} of run {self.attempt.run_id} was superseded by a newer one: "
                    "it writes and deletes nothing more. Stop this process, or give it a dirpath of its own"
                )

        def once() -> CheckpointRecord:
            guard()
            pending = self.store.begin(draft["step"], self.attempt.run_id, self.attempt.number, self.filename)
            try:
                return self.store.commit(pending, image, draft, guard=guard, timeout=timeout)
            except SupersededError as error:
                if self.store.superseded(self.attempt):
                    raise
                raise CheckpointSaveError(
                    f"{pending.name!r}, or the marker beside it, was removed by someone else while it was written"
                ) from error

        return retrying(save.given_up)(once)

    def _delete(self, record: CheckpointRecord) -> None:
        def once() -> bool:
            if self.store.superseded(self.attempt):
                return False
            self.store.delete(record)
            return True

        try:
            if not retrying()(once):
                return
        except PinnedError:
            with self._lock:
                self._deleting.discard(record.path)
                self._doomed.discard(record.path)
                self._records = [
                    dataclasses.replace(other, pinned=True) if other.path == record.path else other
                    for other in self._records
                ]
        except Exception as error:  # nothing that goes wrong here may reach training; it is reported and tried again
            self._not_deleted(record, error)
        else:
            with self._lock:
                self._deleting.discard(record.path)
                self._records = [other for other in self._records if other.path != record.path]
                self.deleted.append(record)

    def _give_up_deleting(self, batch: list[CheckpointRecord]) -> None:
        for record in batch:
            if record.path in self._deleting:  # else it is deleted, or was reported
                self._not_deleted(record, TimeoutError(f"the store didn't delete it within {DELETE_TIMEOUT:g} s"))

    def _not_deleted(self, record: CheckpointRecord, error: Exception) -> None:
        forget_frames(error)
        with self._lock:
            self._deleting.discard(record.path)
        self.events.append(DeleteFailure(record, error))
