"""Which checkpoint of a store a resume goes on with."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import BinaryIO

from lightning.pytorch.utilities import rank_zero_warn

from lightning_ckpt_policy.errors import CheckpointError, DamagedCheckpointError, describe
from lightning_ckpt_policy.record import CheckpointRecord
from lightning_ckpt_policy.store import CheckpointStore


def lineage(records: Collection[CheckpointRecord]) -> list[CheckpointRecord]:
    """The records of the run that holds the highest sequence, newest first.

    >>> first, second = (CheckpointRecord(path=f"{run}.ckpt", step=1, epoch=0, sequence=sequence, run_id=run,
    ...                                   created_at=0.0, size=1, checksum="crc32c:00000000")
    ...                  for sequence, run in ((1, "a"), (2, "b")))
    >>> [record.run_id for record in lineage([first, second])]
    ['b']
    """
    newest_first = sorted(records, key=lambda record: (record.sequence, record.created_at, record.path), reverse=True)
    return [record for record in newest_first if record.run_id == newest_first[0].run_id]


def select(store: CheckpointStore, filename: str, fitting: bool) -> CheckpointRecord | None:
    """The checkpoint that ``ckpt_path="last"`` stands for, or ``None`` if nothing was saved yet.

    Args:
        store: Where to look.
        filename: Template of the payload names, without the suffix.
        fitting: Whether it is to be trained on.

    Raises:
        ValueError: It is, and the checkpoints hold weights alone.
        DamagedCheckpointError: None of the newest run's is whole.
    """
    records, names = store.listed()
    _tell_of_lost_records(store, records, names, filename)
    if not records:
        return None
    candidates = lineage(records)
    if fitting and all(record.weights_only for record in candidates):
        raise ValueError(
            f'ckpt_path="last": the checkpoints in {store.url!r} were saved with save_weights_only=True and '
            "can't be resumed from. Pass a path to trainer.validate or load_from_checkpoint, or use another dirpath"
        )
    skipped: list[str] = []
    for record in candidates:
        if store.whole(record):
            if skipped:
                rank_zero_warn(
                    f"Damaged or missing in {store.url!r}: {', '.join(skipped)}. The checkpoint before, "
                    f"{record.path!r}, is loaded instead"
                )
            return record
        skipped.append(record.path)
    raise DamagedCheckpointError(
        f'ckpt_path="last": none of the {len(candidates)} checkpoints of the newest run in {store.url!r} is whole '
        f"(newest: {candidates[0].path!r}). Pass an older checkpoint's path, or move the damaged ones away to "
        "start afresh"
    )


def _tell_of_lost_records(
    store: CheckpointStore, records: list[CheckpointRecord], names: set[str], filename: str
) -> None:
    """Warn of files named like checkpoints, past the newest one, that nothing vouches for."""
    newest = max((record.step for record in records), default=-1)
    lost = sorted(
        name for name in names if not names & {f"{name}.json", f"{name}.pending"} and _step_in(name, filename) > newest
    )
    if lost:
        rank_zero_warn(
            f"CheckpointPolicy: {', '.join(lost)} in {store.url!r} has no record, which was lost or never written, "
            'and is passed over by ckpt_path="last". If it is yours and whole, pass its path as ckpt_path'
        )


def _step_in(name: str, filename: str) -> int:
    """The step in a checkpoint's name, -1 if it isn't one of this template."""
    steps = [int(digits) for digits in re.findall(r"\d+", name)]
    return next((step for step in steps if f"{filename.format(step=step)}.ckpt" == name), -1)


def open_record(
    store: CheckpointStore, name: str, last: bool, *, verify: bool
) -> tuple[CheckpointRecord, BinaryIO] | None:
    """Open a checkpoint, or one before it in place of a damaged one; ``None`` if there is no record of it.

    Args:
        store: Where it is.
        name: Its payload's name.
        last: Whether ``ckpt_path="last"`` stood for it, so that another of its run will do as well.
        verify: Whether its checksum is compared while it is read.

    Raises:
        DamagedCheckpointError: It isn't whole, and nor is any other that will do.
    """
    records = store.records()
    if last:  # another process may have saved, or deleted what was selected, since then
        candidates = [record for record in lineage(records) if not record.damaged]
    else:
        candidates = [record for record in records if record.path == name]
    for candidate, following in zip(candidates, [*candidates[1:], None], strict=False):
        try:
            return candidate, _read_twice(store.open_verified if verify else store.open, candidate)
        except (DamagedCheckpointError, FileNotFoundError) as error:
            if following is None:
                raise DamagedCheckpointError(
                    f"{error}. "
                    + (
                        "No older checkpoint of this run is left: move the damaged ones away to start afresh"
                        if last
                        else 'Pass ckpt_path="last", which falls back to a whole one, or another path'
                    )
                ) from error
            rank_zero_warn(f"{error}. The checkpoint before it, {following.path!r}, is loaded instead")
            _mark_damaged(store, candidate)
    return None


def _read_twice(read: Callable[[CheckpointRecord], BinaryIO], record: CheckpointRecord) -> BinaryIO:
    """What ``read`` gives; once more if it is damaged, since a byte may have been lost on its way alone."""
    try:
        return read(record)
    except DamagedCheckpointError:
        return read(record)


def marked(store: CheckpointStore, records: list[CheckpointRecord]) -> list[CheckpointRecord]:
    """The records, those after their run's newest whole one marked as damaged: retention mustn't count them."""
    for record in lineage(records):
        if store.whole(record):
            break
        _mark_damaged(store, record)
        records = [replace(other, damaged=True) if other is record else other for other in records]
    return records


def _mark_damaged(store: CheckpointStore, record: CheckpointRecord) -> None:
    """Note it in the store, if that can be written to."""
    if not record.damaged:
        try:
            store.mark_damaged(record)
        except (OSError, CheckpointError) as error:
            rank_zero_warn(f"{record.path!r} could not be marked as damaged in {store.url!r}: {describe(error)}")
