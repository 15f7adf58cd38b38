"""One attempt's bookkeeping: what is deleted, also by a process that goes on after a kill between two deletes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lightning_ckpt_policy.errors import CheckpointError
from lightning_ckpt_policy.ledger import Ledger
from lightning_ckpt_policy.retention import KeepBest, KeepLast
from lightning_ckpt_policy.store import CheckpointStore
from lightning_ckpt_policy.writer import BackgroundWriter
from tests.store_conformance import save

# with one of the two that go away, the other is among the last two, or the best two
RULE = KeepLast(2) & KeepBest(2, "loss")
LOSSES = {1: 1.0, 2: 3.0, 3: 2.0}


def prune(store: CheckpointStore) -> None:
    """What the next process of the run does at its start."""
    attempt = store.start_attempt("run")
    store.sweep("run", attempt.number)
    writer = BackgroundWriter()
    ledger = Ledger(store, attempt, RULE, store.records(), frozenset(), writer, "step-{step:010d}")
    ledger.prune()
    assert writer.drain(30)


@pytest.mark.parametrize("deletes", [0, 1, 2])
def test_a_process_killed_between_two_deletes_is_followed_by_one_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deletes: int
) -> None:
    store = CheckpointStore(tmp_path)
    for step, loss in LOSSES.items():
        save(store, step, metrics={"loss": loss})
    left = deletes
    original = CheckpointStore.delete

    def delete(self: CheckpointStore, record: object) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError("killed")
        original(self, record)  # type: ignore[arg-type]

    monkeypatch.setattr(CheckpointStore, "delete", delete)
    prune(store)
    assert len(store.records()) == len(LOSSES) - deletes
    monkeypatch.undo()
    prune(CheckpointStore(tmp_path))
    assert [record.step for record in store.records()] == [3]


def test_a_rule_that_fails_deletes_nothing_and_is_told_of(tmp_path: Path) -> None:
    class Broken(KeepLast):
        def keep(self, *args: object, **options: object) -> object:  # type: ignore[override]
            raise ZeroDivisionError("of the rule")

    store = CheckpointStore(tmp_path)
    records = [save(store, step) for step in (1, 2, 3)]
    writer = BackgroundWriter()
    ledger = Ledger(store, store.start_attempt("run"), Broken(1), records, frozenset(), writer, "step-{step:010d}")
    ledger.prune()
    assert writer.drain(30)
    assert [str(event.error) for event in ledger.events] == ["of the rule"]
    assert store.records() == records


def test_a_note_that_comes_too_late_brings_no_record_back(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    first, second = (save(store, step) for step in (1, 2))
    os.remove(store.path_of(second))
    with pytest.raises(CheckpointError, match="is being deleted"):
        store.note_doomed(second, [first], "KeepLast(n=1)")
    assert store.records() == [first]
