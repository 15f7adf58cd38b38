"""What every store must do. A store's test class inherits ``StoreConformance`` and says where its folder is."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import fsspec
import pytest

from lightning_ckpt_policy.checksum import checksum_of
from lightning_ckpt_policy.errors import CheckpointError, CheckpointSaveError, DamagedCheckpointError, SupersededError
from lightning_ckpt_policy.record import CheckpointRecord, RecordError
from lightning_ckpt_policy.store import CheckpointStore, Pending

PAYLOAD_BYTES = 10_000


class Bytes:
    """An image of a checkpoint that is any bytes."""

    def __init__(self, data: bytes, chunk: int = 4096) -> None:
        self.data = data
        self.size = len(data)
        self.checksum = checksum_of([data])
        self._chunk = chunk

    def chunks(self) -> Iterator[memoryview]:
        for start in range(0, self.size, self._chunk):
            yield memoryview(self.data)[start : start + self._chunk]


class Folder:
    """The files of a store's folder, behind the store's back."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self.fs, self.root = fsspec.core.url_to_fs(url, skip_instance_cache=True, use_listings_cache=False, **options)

    def files(self) -> dict[str, bytes]:
        """Every file, with its bytes, by its name relative to the folder."""
        found: dict[str, bytes] = {}
        for folder in ("", "/attempts"):
            try:
                listing = self.fs.ls(self.root + folder, detail=True)
            except FileNotFoundError:
                continue
            for info in listing:
                if info["type"] != "directory":
                    found[info["name"].removeprefix(self.root).lstrip("/")] = self.fs.cat_file(info["name"])
        return found

    def names(self) -> set[str]:
        """Every file at the top."""
        return {name for name in self.files() if "/" not in name}

    def put(self, name: str, data: bytes) -> None:
        self.fs.makedirs(self.fs._parent(f"{self.root}/{name}"), exist_ok=True)
        self.fs.pipe_file(f"{self.root}/{name}", data)

    def get(self, name: str) -> bytes:
        data: bytes = self.fs.cat_file(f"{self.root}/{name}")
        return data

    def remove(self, name: str) -> None:
        self.fs.rm_file(f"{self.root}/{name}")


def save(
    store: CheckpointStore, step: int, data: bytes | None = None, run_id: str = "run", attempt: int = 1, **fields: Any
) -> CheckpointRecord:
    """Begin and commit."""
    pending = store.begin(step, run_id, attempt)
    draft = {"step": step, "epoch": 0, "created_at": time.time(), **fields}
    return store.commit(pending, Bytes(os.urandom(PAYLOAD_BYTES) if data is None else data), draft)


def files_of(*records: CheckpointRecord) -> set[str]:
    """The names of what a confirmed checkpoint is made of."""
    return {name for record in records for name in (record.path, record.path + ".json")}


class StoreConformance:
    """Inherit this, and override ``url`` and, where needed, ``options`` and ``folder``."""

    @pytest.fixture
    def url(self) -> str:
        """A folder that no other test uses and that doesn't exist yet."""
        raise NotImplementedError

    @pytest.fixture
    def options(self) -> dict[str, Any]:
        return {}

    @pytest.fixture
    def folder(self, url: str, options: dict[str, Any]) -> Folder:
        return Folder(url, options)

    @pytest.fixture
    def store(self, url: str, options: dict[str, Any]) -> CheckpointStore:
        store = CheckpointStore(url, options)
        store.check()
        return store

    @pytest.fixture
    def other(self, url: str, options: dict[str, Any]) -> CheckpointStore:
        """The same folder as another process sees it."""
        return CheckpointStore(url, options)

    def test_empty(self, store: CheckpointStore, folder: Folder) -> None:
        assert store.records() == []
        assert store.latest() is None
        assert store.best("val_loss") is None
        assert store.attempts() == []
        assert store.sweep("run", 9) == []
        assert folder.names() == set()

    def test_check_is_silent(self, other: CheckpointStore, folder: Folder) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            other.check()
        assert folder.names() == set()

    def test_folder_that_does_not_exist_is_empty(self, other: CheckpointStore) -> None:
        assert other.records() == []
        assert other.attempts("run") == []
        assert other.sweep("run", 2) == []

    @pytest.mark.parametrize("size", [0, 1, 4096, PAYLOAD_BYTES])
    def test_commit(self, store: CheckpointStore, other: CheckpointStore, folder: Folder, size: int) -> None:
        data = os.urandom(size)
        metrics = {"val_loss": float("nan"), "acc": 0.5}
        record = save(store, 10, data, metrics=metrics, reason=("EveryNTrainSteps(n=10)",))
        assert (record.path, record.step, record.sequence, record.size) == ("step-0000000010.ckpt", 10, 1, size)
        assert record.write_seconds is not None
        assert folder.names() == files_of(record)
        assert folder.get(record.path) == data
        assert CheckpointRecord.from_json(folder.get(record.path + ".json")).checksum == checksum_of([data])
        for reader in (store, other):
            assert [r.path for r in reader.records()] == [record.path]
            assert reader.latest() is not None
            assert reader.whole(record)
            reader.verify(record)
            assert reader.open_verified(record).read() == data

    def test_marker_lies_there_while_the_payload_is_written(self, store: CheckpointStore, folder: Folder) -> None:
        pending = store.begin(3, "run", 7)
        assert folder.names() == {pending.name + ".pending"}
        marker = json.loads(folder.get(pending.name + ".pending"))
        assert (marker["run_id"], marker["attempt"], marker["name"], marker["op"]) == ("run", 7, pending.name, "write")
        seen = []

        class Looking(Bytes):
            def chunks(self) -> Iterator[memoryview]:
                seen.append(folder.names())
                return super().chunks()

        store.commit(pending, Looking(b"x" * 100), {"step": 3, "epoch": 0, "created_at": 0.0})
        assert pending.name + ".pending" in seen[0]
        assert pending.name + ".json" not in seen[0]
        assert folder.names() == {pending.name, pending.name + ".json"}

    @pytest.mark.filterwarnings("ignore:the record .* is skipped")
    def test_names_are_never_used_twice(self, store: CheckpointStore, other: CheckpointStore, folder: Folder) -> None:
        folder.put("step-0000000005.ckpt", b"someone else's")
        folder.put("step-0000000005-v1.ckpt.json", b"{}")  # not a record
        folder.put("step-0000000005-v2.ckpt.pending", b"")
        first = save(store, 5)
        assert first.path == "step-0000000005-v3.ckpt"
        second = save(other, 5)
        assert second.path == "step-0000000005-v4.ckpt"
        store.delete(second)
        other.delete(second)
        assert save(other, 5).path == "step-0000000005-v5.ckpt"
        assert folder.get("step-0000000005.ckpt") == b"someone else's"

    @pytest.mark.parametrize(
        ("filename", "name"),
        [("step-{step:010d}", "step-0000000007.ckpt"), ("m{step}=x", "m7=x.ckpt"), ("a", "a.ckpt")],
    )
    def test_filename(self, store: CheckpointStore, filename: str, name: str) -> None:
        assert store.begin(7, "run", 1, filename).name == name

    @pytest.mark.parametrize(
        "filename",
        ["", "../{step}", "a/{step}", ".{step}", "{epoch}", "{", "{step:q}", "{0}", "x" * 250, "{step.a}", "a b"],
    )
    def test_bad_filename(self, store: CheckpointStore, folder: Folder, filename: str) -> None:
        with pytest.raises(ValueError, match="filename="):
            store.begin(7, "run", 1, filename)
        assert folder.names() == set()

    def test_sequence_goes_on_from_the_highest(self, store: CheckpointStore, other: CheckpointStore) -> None:
        assert [save(store, step).sequence for step in (1, 2, 3)] == [1, 2, 3]
        assert save(other, 4).sequence == 4
        assert save(store, 5).sequence == 5
        store.delete(store.records()[1])
        assert [record.sequence for record in other.records()] == [1, 3, 4, 5]
        assert save(other, 6).sequence == 6

    def test_the_folder_is_listed_once_by_a_run_alone_in_it(
        self, store: CheckpointStore, other: CheckpointStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        save(other, 1)
        backend = store.backend
        entries, listed = backend.entries, []

        def count(folder: str = "") -> Any:
            listed.append(folder)
            return entries(folder)

        read_many, read = backend.read_many, list[str]()

        def note(names: Iterable[str]) -> Any:
            wanted = list(names)
            read.extend(wanted)
            return read_many(wanted)

        monkeypatch.setattr(backend, "entries", count)
        monkeypatch.setattr(backend, "read_many", note)
        attempt = store.start_attempt("run")
        store.records()
        store.sweep("run", attempt.number)
        for step in (2, 3, 2):
            save(store, step)
        assert listed.count("") == 1
        theirs = other.start_attempt("other")
        for step, there in ((4, True), (5, True), (6, False), (7, False)):
            if there:
                save(other, step, run_id="other")
            elif step == 6:
                other.finish_attempt(theirs, "finished")
            listed.clear()
            read.clear()
            save(store, step)
            assert listed.count("") == there
            assert (f"attempts/{theirs.name}.json" in read) == (step in (5, 6))  # once it has ended, no more
        names = ["1", "2", "3", "2-v1", "4", "4-v1", "5", "5-v1", "6", "7"]
        assert [record.path for record in other.records()] == [f"step-{int(n[0]):010d}{n[1:]}.ckpt" for n in names]
        assert [record.sequence for record in other.records()] == list(range(1, 11))

    def test_a_save_that_ends_while_the_next_attempt_starts_is_counted(
        self, store: CheckpointStore, other: CheckpointStore
    ) -> None:
        other.start_attempt("run")
        pending = other.begin(1, "run", 1)
        attempt = store.start_attempt("run")
        assert store.records() == []
        late = other.commit(pending, Bytes(b"late"), {"step": 1, "epoch": 0, "created_at": 0.0})
        store.sweep("run", attempt.number)
        assert save(store, 2, attempt=attempt.number).sequence == late.sequence + 1

    def test_latest_stays_in_the_run_of_the_highest_sequence(self, store: CheckpointStore, folder: Folder) -> None:
        a1, b1, a2 = save(store, 1, run_id="a"), save(store, 1, run_id="b"), save(store, 2, run_id="a")
        assert store.latest() == a2
        assert store.latest("b") == b1
        assert store.latest("nobody") is None
        store.mark_damaged(a2)
        assert store.latest() == a1
        folder.put(a1.path, b"short")
        assert store.latest() is None
        assert store.latest("b") == b1

    def test_best(self, store: CheckpointStore) -> None:
        losses = [0.5, float("nan"), 0.3, 0.4]
        records = [save(store, step, metrics={"loss": loss}) for step, loss in enumerate(losses)]
        assert store.best("loss") == records[2]
        assert store.best("loss", "max") == records[0]
        assert store.best("other") is None
        assert store.best("loss", run_id="nobody") is None
        store.mark_damaged(records[2])
        assert store.best("loss") == records[3]
        with pytest.raises(ValueError, match="mode="):
            store.best("loss", "lowest")  # type: ignore[arg-type]

    def test_records_are_read_afresh(self, store: CheckpointStore, other: CheckpointStore) -> None:
        record = save(store, 1)
        assert [r.pinned for r in other.records()] == [False]
        store.pin(record)
        assert [r.pinned for r in other.records()] == [True]
        store.pin(record, pinned=False)
        assert [r.pinned for r in other.records()] == [False]
        store.delete(record)
        assert other.records() == []

    @pytest.mark.parametrize(
        ("what", "data"),
        [
            ("has", b"x"),
            ("has", b"x" * (PAYLOAD_BYTES + 1)),
            ("checksum", b"x" * PAYLOAD_BYTES),
            ("missing", None),
        ],
    )
    def test_damaged_payload(self, store: CheckpointStore, folder: Folder, what: str, data: bytes | None) -> None:
        good, record = save(store, 1), save(store, 2)
        if data is None:
            folder.remove(record.path)
        else:
            folder.put(record.path, data)
        for read in (store.verify, store.open_verified):
            with pytest.raises(DamagedCheckpointError, match=what) as caught:
                read(record)
            assert store.path_of(record) in str(caught.value)
        assert [r.path for r in store.records()] == [good.path, record.path]
        assert store.whole(record) == (what == "checksum")
        marked = store.mark_damaged(record)
        assert marked.damaged
        assert not store.whole(marked)
        assert store.latest() == good

    @pytest.mark.parametrize("place", [0, 1, PAYLOAD_BYTES // 2, PAYLOAD_BYTES - 1])
    def test_any_flipped_byte_is_found(self, store: CheckpointStore, folder: Folder, place: int) -> None:
        record = save(store, 1)
        data = bytearray(folder.get(record.path))
        data[place] ^= 0x10
        folder.put(record.path, bytes(data))
        with pytest.raises(DamagedCheckpointError, match="checksum"):
            store.verify(record)

    def test_unknown_checksum_is_no_damage(self, store: CheckpointStore) -> None:
        record = dataclasses.replace(save(store, 1), checksum="xxh3:00")
        with pytest.raises(CheckpointError, match="upgrade") as caught:
            store.verify(record)
        assert not isinstance(caught.value, DamagedCheckpointError)

    def test_delete(self, store: CheckpointStore, other: CheckpointStore, folder: Folder) -> None:
        first, second = save(store, 1), save(store, 2)
        folder.put("step-0000000001.ckpt.txt", b"foreign")
        store.delete(first)
        assert folder.names() == files_of(second) | {"step-0000000001.ckpt.txt"}
        store.delete(first)
        other.delete(first)
        assert folder.names() == files_of(second) | {"step-0000000001.ckpt.txt"}

    def test_delete_leaves_a_payload_without_record_alone(self, store: CheckpointStore, folder: Folder) -> None:
        record = save(store, 1)
        folder.remove(record.path + ".json")
        store.delete(record)
        assert folder.names() == {record.path}

    def test_delete_leaves_another_checkpoint_of_that_name_alone(
        self, store: CheckpointStore, other: CheckpointStore
    ) -> None:
        old = save(store, 1)
        store.delete(old)
        keep = save(other, 0)
        new = save(CheckpointStore(store.url, other._options), 1)
        assert (new.path, keep.sequence) == (old.path, 1)
        store.delete(old)
        assert new in other.records()

    def test_delete_leaves_a_write_in_progress_alone(
        self, store: CheckpointStore, other: CheckpointStore, folder: Folder
    ) -> None:
        old = save(store, 1)
        store.delete(old)
        pending = other.begin(1, "run", 2)
        folder.put(pending.name, b"half")
        store.delete(old)
        assert folder.names() == {pending.name, pending.name + ".pending"}

    def test_pinned_is_not_deleted(self, store: CheckpointStore, other: CheckpointStore, folder: Folder) -> None:
        record = save(store, 1)
        pinned = other.pin(record)
        assert pinned.pinned
        assert other.pin(record) == pinned
        for stale_or_not in (record, pinned):
            with pytest.raises(ValueError, match="unpin"):
                store.delete(stale_or_not)
        assert folder.names() == files_of(record)
        store.delete(store.pin(pinned, pinned=False))
        assert folder.names() == set()
        for change in (store.pin, store.mark_damaged):
            with pytest.raises(CheckpointError, match="isn't there"):
                change(record)

    def test_changes_to_a_record_do_not_undo_each_other(self, store: CheckpointStore, other: CheckpointStore) -> None:
        record = save(store, 1)
        store.pin(record)
        changed = other.mark_damaged(record)
        assert changed.pinned
        assert changed.damaged
        assert store.records() == [changed]

    @pytest.mark.parametrize("where", ["guard", "chunks", "draft", "size", "checksum"])
    def test_failed_commit_leaves_nothing(self, store: CheckpointStore, folder: Folder, where: str) -> None:
        before = save(store, 1)
        pending = store.begin(2, "run", 1)
        image = Bytes(os.urandom(PAYLOAD_BYTES))
        draft: dict[str, Any] = {"step": 2, "epoch": 0, "created_at": 0.0}
        expected: type[BaseException] = ZeroDivisionError
        guard = (lambda: 1 / 0) if where == "guard" else (lambda: None)
        if where == "chunks":
            image.chunks = lambda: (memoryview(b"x") if n < 3 else 1 / 0 for n in range(9))  # type: ignore[assignment]
        elif where == "draft":
            draft["metrics"] = {"loss": "low"}
            expected = RecordError
        elif where == "size":
            image.size += 1
            expected = OSError
        elif where == "checksum":
            image.checksum = "crc32c:00000000"
            expected = CheckpointSaveError
        with pytest.raises(expected):
            store.commit(pending, image, draft, guard=guard)
        assert folder.names() == files_of(before)
        assert store.latest() == before
        again = save(store, 2)
        assert again.path == ("step-0000000002.ckpt" if store.backend.retry_same_name else "step-0000000002-v1.ckpt")
        store.verify(again)

    def test_a_guard_is_asked_when_the_payload_is_safe(self, store: CheckpointStore, folder: Folder) -> None:
        pending = store.begin(2, "run", 1)
        seen = []
        draft = {"step": 2, "epoch": 0, "created_at": 0.0}
        store.commit(pending, Bytes(b"abc"), draft, guard=lambda: seen.append(folder.names()))
        assert seen == [{pending.name, pending.name + ".pending"}]

    @pytest.mark.parametrize("when", ["before payload", "before record"])
    def test_swept_writer_writes_and_removes_nothing(
        self, store: CheckpointStore, other: CheckpointStore, folder: Folder, when: str
    ) -> None:
        """A zombie whose place was taken must not touch what now has its name."""
        pending = store.begin(2, "run", 1)
        taken: list[CheckpointRecord] = []

        def take_over() -> None:
            assert pending.name + ".pending" in other.sweep("run", 2)
            later = CheckpointStore(other._given, other._options)  # a third process, which doesn't know of the sweep
            taken.append(save(later, 2, b"new" * 100, attempt=3))

        class Late(Bytes):
            def chunks(self) -> Iterator[memoryview]:
                yield from super().chunks()
                if when == "before payload":
                    take_over()

        draft = {"step": 2, "epoch": 0, "created_at": 0.0}
        guard = take_over if when == "before record" else (lambda: None)
        with pytest.raises(SupersededError, match="swept"):
            store.commit(pending, Late(b"old" * 100), draft, guard=guard)
        assert taken[0].path == pending.name
        assert folder.names() == files_of(taken[0])
        other.verify(taken[0])

    def test_sweep(self, store: CheckpointStore, other: CheckpointStore, folder: Folder) -> None:
        kept = save(store, 1)
        half = store.begin(2, "run", 1)
        folder.put(half.name, b"payload without record")
        temporary = store.backend.temporary(half.name, half.token)
        if temporary is not None:
            folder.put(temporary, b"half")
        confirmed = save(store, 3)
        folder.put(confirmed.path + ".pending", folder.get(half.name + ".pending").replace(b"02.ckpt", b"03.ckpt"))
        folder.put(".run-000001.0123abcd.tmp", b"half a record")
        folder.put("attempts/.run-000001.0123abcd.tmp", b"half an attempt")
        untouched = {
            ".run-000002.0123abcd.tmp": b"of this attempt",
            ".run2-000001.0123abcd.tmp": b"of another run",
            ".x.tmp": b"foreign",
            "step-0000000009.ckpt": b"foreign payload",
            "unreadable.ckpt.pending": b"\xff{",
            "evil.ckpt.pending": folder.get(half.name + ".pending").replace(half.name.encode(), b"../step-1.ckpt"),
            "lying.ckpt.pending": folder.get(half.name + ".pending"),
        }
        for name, data in untouched.items():
            folder.put(name, data)
        others = {store.begin(4, "other", 1).name + ".pending", store.begin(5, "run", 2).name + ".pending"}
        swept = other.sweep("run", 2)
        gone = {half.name, half.name + ".pending", confirmed.path + ".pending", ".run-000001.0123abcd.tmp"}
        gone |= {"attempts/.run-000001.0123abcd.tmp"} | ({temporary} if temporary else set())
        assert set(swept) == gone
        assert folder.names() == files_of(kept, confirmed) | set(untouched) | others
        assert {name: folder.get(name) for name in untouched} == untouched
        assert other.sweep("run", 2) == []
        assert [record.path for record in other.records()] == [kept.path, confirmed.path]

    def test_sweep_ends_a_delete(self, store: CheckpointStore, other: CheckpointStore, folder: Folder) -> None:
        record, untouched = save(store, 1), save(store, 2)
        for one in (record, untouched):
            marker = Pending(name=one.path, run_id="run", attempt=1, created_at=0.0, op="delete")
            values = {"schema_version": 1, **dataclasses.asdict(marker)}
            folder.put(one.path + ".pending", json.dumps(values).encode())
        folder.remove(record.path + ".json")
        assert other.sweep("run", 2) == [record.path, record.path + ".pending", untouched.path + ".pending"]
        assert folder.names() == files_of(untouched)

    def test_swept_name_is_not_used_again_by_that_process(self, store: CheckpointStore, other: CheckpointStore) -> None:
        pending = store.begin(2, "run", 1)
        other.sweep("run", 2)
        assert save(other, 2).path != pending.name

    def test_foreign_and_broken_records_are_skipped_with_one_warning(
        self, store: CheckpointStore, folder: Folder
    ) -> None:
        good = save(store, 1)
        text = folder.get(good.path + ".json")
        broken = {
            "a.ckpt.json": b"{not json",
            "b.ckpt.json": text,  # names another payload
            "c.ckpt.json": text.replace(good.path.encode(), b"../c.ckpt"),
            "d.ckpt.json": b"",
            "e.ckpt.json": b" " * ((1 << 20) + 1),
            "f.ckpt.json": text.replace(b'"schema_version": 1', b'"schema_version": 2'),
        }
        silent = {"config.json": b"{}", "hparams.yaml": b"", "last.ckpt": b"", ".hidden.ckpt": b"x"}
        for name, data in (broken | silent).items():
            folder.put(name, data)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a save tells nothing: it runs in the background
            store.delete(save(store, 5))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert store.records() == [good]
            assert store.records() == [good]
            assert store.latest() == good
        messages = [str(warning.message) for warning in caught]
        assert len(messages) == len(broken)
        for name in broken:
            assert any(name in message for message in messages)
        assert folder.names() == files_of(good) | set(broken) | set(silent)

    def test_attempts(self, store: CheckpointStore, other: CheckpointStore, folder: Folder) -> None:
        first = store.start_attempt("run")
        assert (first.number, first.status, first.parent) == (1, "running", None)
        assert not store.superseded(first)
        second = other.start_attempt("run", parent="older")
        assert (second.number, second.parent) == (2, "older")
        assert store.superseded(first)
        assert not other.superseded(second)
        elsewhere = store.start_attempt("run-2")
        assert elsewhere.number == 1
        store.finish_attempt(first, "error")
        found = store.attempts("run")
        assert [(a.number, a.status, a.ended_at is None) for a in found] == [(1, "error", False), (2, "running", True)]
        assert store.attempts() == [*found, elsewhere]
        assert store.attempts("ru") == []
        with pytest.raises(ValueError, match="status="):
            store.finish_attempt(second, "great")
        folder.put("attempts/run-000007.json", b"not json")
        with pytest.warns(UserWarning, match="run-000007"):
            assert len(store.attempts("run")) == 2
        assert store.start_attempt("run").number == 8

    def test_attempts_at_once_get_different_numbers(self, url: str, options: dict[str, Any]) -> None:
        stores = [CheckpointStore(url, options) for _ in range(4)]
        stores[0].check()
        numbers: list[int] = []

        def run(store: CheckpointStore) -> None:
            for _ in range(5):
                numbers.append(store.start_attempt("run").number)

        _in_threads(run, stores)
        assert sorted(numbers) == list(range(1, 21))

    def test_case_22_two_writers_at_once(self, url: str, options: dict[str, Any], folder: Folder) -> None:
        stores = [CheckpointStore(url, options) for _ in range(3)]
        stores[0].check()
        done: list[CheckpointRecord] = []

        def run(store: CheckpointStore) -> None:
            for step in range(5):
                record = save(store, step)
                assert store.whole(record)
                stores[0].verify(record)  # visible to another process's filesystem at once
                done.append(record)

        _in_threads(run, stores)
        assert len({record.path for record in done}) == 15
        assert folder.names() == files_of(*done)
        reader = CheckpointStore(url, options)
        for record in reader.records():
            reader.verify(record)

    def test_case_22_failed_write_then_a_good_one(self, store: CheckpointStore, other: CheckpointStore) -> None:
        pending = store.begin(1, "run", 1)
        with pytest.raises(ZeroDivisionError):
            store.commit(
                pending,
                Bytes(b"x"),
                {"step": 1, "epoch": 0, "created_at": 0.0},
                guard=lambda: 1 / 0,  # type: ignore[arg-type,return-value]
            )
        record = save(store, 1)
        assert other.latest() == record
        other.verify(record)

    def test_case_23_seeded_folder(self, store: CheckpointStore, folder: Folder) -> None:
        seeded = {
            "step-0000000001.ckpt": b"",
            "step-0000000002.ckpt.json": b"",
            "step-0000000003.ckpt.tmp": b"debris",
            ".step-0000000004.ckpt.tmp": b"debris",
            "last.ckpt": b"",
            "last_backup.ckpt": b"someone's",
            "step-0000000005.ckpt": b"a payload without record",
        }
        for name, data in seeded.items():
            folder.put(name, data)
        with pytest.warns(UserWarning, match="step-0000000002"):
            assert store.records() == []
        assert store.latest() is None
        assert store.sweep("run", 9) == []
        records = [save(store, step) for step in range(1, 6)]
        for record in records:
            store.delete(record)
        assert {name: folder.get(name) for name in folder.names()} == seeded

    def test_names_and_paths(self, store: CheckpointStore) -> None:
        record = save(store, 1)
        path = store.path_of(record)
        assert path == f"{store.url}/{record.path}"
        assert store.name_of(path) == record.path
        for elsewhere in (f"{store.url}/sub/a.ckpt", f"{store.url}x/a.ckpt", f"{store.url}/../a.ckpt", "s3://b/a.ckpt"):
            assert store.name_of(elsewhere) is None

    def test_check_again_leaves_nothing(self, store: CheckpointStore, folder: Folder) -> None:
        store.check()
        assert folder.names() == set()

    def test_file_in_place_of_the_folder(self, url: str, options: dict[str, Any], folder: Folder) -> None:
        folder.fs.makedirs(folder.fs._parent(folder.root), exist_ok=True)
        folder.fs.pipe_file(folder.root, b"a file")
        with pytest.raises(NotADirectoryError, match="dirpath="):
            CheckpointStore(url, options).check()
        assert folder.fs.cat_file(folder.root) == b"a file"

    def test_pickle(self, store: CheckpointStore) -> None:
        record = save(store, 1)
        assert pickle.loads(pickle.dumps(store)).records() == [record]

    def test_fork(self, store: CheckpointStore) -> None:
        record = save(store, 1)
        reading, writing = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads
            child = os.fork()
        if child == 0:
            good = False
            try:
                good = store._backend_now is not store.backend and store.records() == [record]
            finally:
                os.write(writing, b"y" if good else b"n")
                os._exit(0)
        os.waitpid(child, 0)
        assert os.read(reading, 1) == b"y"
        os.close(reading)
        os.close(writing)


def _in_threads(run: Any, stores: list[CheckpointStore]) -> None:
    errors: list[BaseException] = []

    def guarded(store: CheckpointStore) -> None:
        try:
            run(store)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors, errors[0]
