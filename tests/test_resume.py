"""Which checkpoint a resume goes on with. In fits: ``test_callback.py``, ``test_exact_resume.py`` and others."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_ckpt_policy.errors import DamagedCheckpointError
from lightning_ckpt_policy.record import CheckpointRecord
from lightning_ckpt_policy.resume import lineage, marked, open_record, select
from lightning_ckpt_policy.store import CheckpointStore
from tests.store_conformance import save

FILENAME = "step-{step:010d}"


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path)


def three(store: CheckpointStore) -> list[CheckpointRecord]:
    return [save(store, step) for step in (1, 2, 3)]


def spoil(store: CheckpointStore, record: CheckpointRecord, size: int | None = None) -> None:
    path = Path(store.path_of(record))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content[:size])


def test_the_run_that_saved_last_counts_however_far_another_got(store: CheckpointStore) -> None:
    save(store, 9, run_id="one")
    first, second = save(store, 2, run_id="other"), save(store, 3, run_id="other")
    assert lineage(store.records()) == [second, first]
    assert select(store, FILENAME, fitting=True) == second


def test_nothing_is_selected_where_nothing_is(store: CheckpointStore) -> None:
    assert select(store, FILENAME, fitting=True) is None
    assert lineage([]) == []


def test_one_of_another_size_is_passed_over_and_marked(store: CheckpointStore) -> None:
    first, second, third = three(store)
    spoil(store, third, 5)
    with pytest.warns(UserWarning, match=rf"{third.path}.*The checkpoint before, '{second.path}'"):
        assert select(store, FILENAME, fitting=True) == second
    assert [record.damaged for record in marked(store, store.records())] == [False, False, True]
    assert [record.damaged for record in store.records()] == [False, False, True]
    assert store.records()[:2] == [first, second]


def test_where_none_is_whole_nothing_is_started_afresh(store: CheckpointStore) -> None:
    for record in three(store):
        spoil(store, record, 5)
    with pytest.raises(DamagedCheckpointError, match="none of the 3 checkpoints of the newest run"):
        select(store, FILENAME, fitting=True)


@pytest.mark.parametrize("last", [True, False])
def test_another_is_opened_in_place_of_a_damaged_one_if_last_was_asked_for(store: CheckpointStore, last: bool) -> None:
    _, second, third = three(store)
    spoil(store, third)
    if not last:
        with pytest.raises(DamagedCheckpointError, match='Pass ckpt_path="last", which falls back to a whole one'):
            open_record(store, third.path, last, verify=True)
        return
    with pytest.warns(UserWarning, match=rf"The checkpoint before it, '{second.path}', is loaded instead"):
        found = open_record(store, third.path, last, verify=True)
    assert found is not None
    assert found[0] == second
    found[1].close()
    assert [record.damaged for record in store.records()] == [False, False, True]


def test_what_has_no_record_is_not_opened(store: CheckpointStore) -> None:
    three(store)
    assert open_record(store, "mine.ckpt", False, verify=True) is None


def test_without_verification_only_the_size_counts(store: CheckpointStore) -> None:
    _, _, third = three(store)
    spoil(store, third)
    found = open_record(store, third.path, True, verify=False)
    assert found is not None
    assert found[0] == third
    found[1].close()


@pytest.mark.parametrize("size", [5, None])
def test_without_verification_too_one_of_another_size_is_passed_over(store: CheckpointStore, size: int | None) -> None:
    _, second, third = three(store)
    if size is None:
        Path(store.path_of(third)).unlink()
    else:
        spoil(store, third, size)
    with pytest.warns(UserWarning, match=rf"The checkpoint before it, '{second.path}', is loaded instead"):
        found = open_record(store, third.path, True, verify=False)
    assert found is not None
    assert found[0] == second
    found[1].close()
    with pytest.raises((DamagedCheckpointError, FileNotFoundError)):
        store.open(third)


def test_a_payload_whose_record_was_lost_is_told_of(store: CheckpointStore) -> None:
    _, second, third = three(store)
    Path(f"{store.path_of(third)}.json").unlink()
    with pytest.warns(UserWarning, match=f"{third.path} in .* has no record"):
        assert select(store, FILENAME, fitting=True) == second
