"""Every store against the conformance suite, plain and under the fault wrapper, and then against faults and kills."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from lightning_ckpt_policy import backends
from lightning_ckpt_policy.backends import LocalBackend
from lightning_ckpt_policy.checksum import checksum_of
from lightning_ckpt_policy.errors import CheckpointError, DamagedCheckpointError, SupersededError
from lightning_ckpt_policy.record import CheckpointRecord
from lightning_ckpt_policy.store import Attempt, CheckpointStore
from tests.faults import Fault, FaultyOs, Killed, Schedule, register
from tests.store_conformance import Bytes, Folder, StoreConformance, files_of, save

register()
pytestmark = pytest.mark.core
KINDS = ("file", "memory", "objects")
FOREIGN = {"step-0000000001.ckpt.txt": b"foreign", ".step-0000000002.ckpt.tmp": b"foreign", "notes.json": b"{}"}


def fresh_url(protocol: str, tmp_path: Path) -> str:
    return f"{tmp_path}/deep/run" if protocol == "file" else f"{protocol}://{uuid.uuid4().hex}/run"


class TestLocalStore(StoreConformance):
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return fresh_url("file", tmp_path)


class TestMemoryStore(StoreConformance):
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return fresh_url("memory", tmp_path)


class TestObjectStore(StoreConformance):
    """The backend for object stores, over one in memory."""

    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return fresh_url("objects", tmp_path)


class Faulty(StoreConformance):
    """The same under the fault wrapper, with no faults."""

    protocol = "file"

    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return "faulty:///" + fresh_url(self.protocol, tmp_path).split("://")[-1].lstrip("/")

    @pytest.fixture
    def options(self) -> dict[str, Any]:
        return {"target_protocol": self.protocol, "schedule": Schedule()}

    def test_pickle(self, store: CheckpointStore) -> None:
        pytest.skip("a schedule of faults can't be pickled")

    @pytest.fixture(autouse=True)
    def _faulty_os(self, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
        monkeypatch.setattr(backends, "os", FaultyOs(options["schedule"]))


class TestLocalStoreUnderWrapper(Faulty):
    protocol = "file"


class TestMemoryStoreUnderWrapper(Faulty):
    protocol = "memory"

    def test_names_and_paths(self, store: CheckpointStore) -> None:
        pytest.skip("the wrapper's URL isn't the target's")


class TestObjectStoreUnderWrapper(Faulty):
    protocol = "objects"

    def test_names_and_paths(self, store: CheckpointStore) -> None:
        pytest.skip("the wrapper's URL isn't the target's")


# Faults and kills


class Bench:
    """One folder seen through faults and, by ``plain``, without them."""

    def __init__(self, protocol: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.protocol = protocol
        self.monkeypatch = monkeypatch
        # where the bytes happen to lie in memory would decide in how many calls they are written
        monkeypatch.setattr(backends, "_is_aligned", lambda chunk: False)
        self.url = fresh_url(protocol, tmp_path)
        self.folder = Folder(self.url, {})
        self.plain().check()
        for name, data in FOREIGN.items():
            self.folder.put(name, data)

    def plain(self) -> CheckpointStore:
        self.monkeypatch.setattr(backends, "os", os)
        return CheckpointStore(self.url)

    def faulty(self, schedule: Schedule) -> CheckpointStore:
        self.monkeypatch.setattr(backends, "os", FaultyOs(schedule))
        url = "faulty:///" + self.url.split("://")[-1].lstrip("/")
        return CheckpointStore(url, {"target_protocol": self.protocol, "schedule": schedule})

    def again(self, schedule: Schedule, store: CheckpointStore) -> CheckpointStore:
        """The same store as before, through the same filesystem."""
        self.monkeypatch.setattr(backends, "os", FaultyOs(schedule))
        return store

    def empty(self) -> None:
        for name in set(self.folder.files()) - set(FOREIGN):
            self.folder.remove(name)

    def check(self, *, sure: tuple[CheckpointRecord, ...] = (), swept: bool = True) -> list[CheckpointRecord]:
        """The invariants: every record's payload is whole and verifies, nothing is lost, nothing foreign is touched."""
        store = self.plain()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            records = store.records()
        for record in records:
            store.verify(record)
        missing = {record.path for record in sure} - {record.path for record in records}
        assert not missing
        if swept:
            assert self.folder.names() == files_of(*records) | set(FOREIGN)
        assert {name: self.folder.get(name) for name in FOREIGN} == FOREIGN
        return records


@pytest.fixture(params=KINDS)
def bench(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(request.param, tmp_path, monkeypatch)


Action = Callable[[CheckpointStore], object]


def fault_points(bench: Bench, prepare: Callable[[], None], action: Action, *faults: str) -> Iterator[Schedule]:
    """For each call to the filesystem that ``action`` makes, and each fault: a schedule for it, with all prepared."""
    bench.empty()
    prepare()
    schedule = Schedule()
    action(bench.faulty(schedule))
    for k in range(1, len(schedule.log) + 1):
        for fault in faults:
            bench.empty()
            prepare()
            found = Schedule(Fault(fault, kth=k))
            yield found
            assert found.log[k - 1][0] == schedule.log[k - 1][0]


class Two:
    """Two confirmed checkpoints."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench

    def __call__(self) -> None:
        self.first, self.second = save(self.bench.plain(), 1), save(self.bench.plain(), 2)


@pytest.mark.parametrize("fault", ["error", "error_after", "short", "truncate"])
def test_any_single_fault_in_a_commit(bench: Bench, fault: str) -> None:
    two = Two(bench)
    failed = 0
    for schedule in fault_points(bench, two, lambda store: save(store, 3), fault):
        store = bench.faulty(schedule)
        sure = [two.first, two.second]
        try:
            sure.append(save(store, 3))
        except (OSError, CheckpointError):
            failed += 1
        assert bench.check(swept=False) == sure, schedule.log[-1]
        sure.append(save(bench.again(schedule, store), 3))  # the same store tries again
        bench.plain().sweep("run", 2)
        assert bench.check() == sure
    assert failed or fault == "short"


@pytest.mark.parametrize("fault", ["error", "error_after", "truncate"])
def test_any_single_fault_in_a_delete(bench: Bench, fault: str) -> None:
    two = Two(bench)
    for schedule in fault_points(bench, two, lambda store: store.delete(two.first), fault):
        store = bench.faulty(schedule)
        with contextlib.suppress(OSError):
            store.delete(two.first)
            assert bench.check(swept=False) == [two.second]
        bench.check(sure=(two.second,), swept=False)
        bench.again(schedule, store).delete(two.first)
        bench.plain().sweep("run", 2)
        assert bench.check() == [two.second]


@pytest.mark.parametrize("change", ["pin", "mark_damaged"])
def test_any_single_fault_or_kill_in_a_change(bench: Bench, change: str) -> None:
    two = Two(bench)

    def act(store: CheckpointStore) -> None:
        getattr(store, change)(two.first)

    faults = ["error", "error_after", "kill", "kill_after"]
    if bench.protocol == "file":  # elsewhere an object that loses bytes on its way has replaced the old one by then
        faults.append("truncate")
    for schedule in fault_points(bench, two, act, *faults):
        with contextlib.suppress(OSError, Killed):
            act(bench.faulty(schedule))
        bench.plain().sweep("run", 2)
        assert [record.path for record in bench.check()] == [two.first.path, two.second.path]


def test_any_flipped_bit_in_a_commit_is_found(bench: Bench) -> None:
    """What was damaged on its way to the disk doesn't verify; what verifies is what was sent."""
    data = b"payload" * 1000
    caught = 0
    for schedule in fault_points(bench, Two(bench), lambda store: save(store, 3, data), "flip"):
        with contextlib.suppress(CheckpointError):
            save(bench.faulty(schedule), 3, data)
        reader = bench.plain()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            records = reader.records()
        for record in records[2:]:
            try:
                assert reader.open_verified(record).read() == data
            except DamagedCheckpointError:
                caught += 1
    assert caught


def test_kill_at_every_point_of_a_commit(bench: Bench) -> None:
    two = Two(bench)
    lost = confirmed = 0
    for schedule in fault_points(bench, two, lambda store: save(store, 3), "kill", "kill_after"):
        with pytest.raises(Killed):
            save(bench.faulty(schedule), 3)
        before_sweep = bench.check(sure=(two.first, two.second), swept=False)
        bench.plain().sweep("run", 2)
        after = bench.check(sure=(two.first, two.second))
        assert after == before_sweep  # the sweep takes no checkpoint away
        confirmed += len(after) == 3
        lost += len(after) == 2
        assert save(bench.plain(), 3, attempt=2) in bench.check()
    assert lost > confirmed > 0


def test_kill_at_every_point_of_a_delete(bench: Bench) -> None:
    two = Two(bench)
    left = gone = 0
    for schedule in fault_points(bench, two, lambda store: store.delete(two.first), "kill", "kill_after"):
        with pytest.raises(Killed):
            bench.faulty(schedule).delete(two.first)
        bench.check(sure=(two.second,), swept=False)
        bench.plain().sweep("run", 2)
        records = bench.check(sure=(two.second,))
        gone += len(records) == 1
        left += len(records) == 2
        bench.plain().delete(two.first)
        assert bench.check() == [two.second]
    assert left
    assert gone


@pytest.mark.parametrize("interrupted", ["commit", "delete"])
def test_kill_at_every_point_of_a_sweep(bench: Bench, interrupted: str) -> None:
    two = Two(bench)

    def prepare() -> None:
        two()
        with contextlib.suppress(Killed):
            if interrupted == "commit":  # payload there, record not
                save(bench.faulty(Schedule(Fault("kill", op="cat_file", path=".pending", kth=2))), 3)
            else:  # record gone, payload not
                bench.faulty(Schedule(Fault("kill_after", op="rm_file", path=".json"))).delete(two.first)

    for schedule in fault_points(bench, prepare, lambda store: store.sweep("run", 2), "kill", "kill_after"):
        assert len(bench.folder.names()) > 4 + len(FOREIGN) or interrupted == "delete"
        with pytest.raises(Killed):
            bench.faulty(schedule).sweep("run", 2)
        bench.check(sure=(two.second,), swept=False)
        bench.plain().sweep("run", 2)
        assert bench.check() == ([two.first, two.second] if interrupted == "commit" else [two.second])


@pytest.mark.parametrize("which", ["start_attempt", "finish_attempt"])
def test_any_fault_or_kill_in_an_attempts_file(bench: Bench, which: str) -> None:
    first: list[Attempt] = []

    def prepare() -> None:
        first[:] = [bench.plain().start_attempt("run")]

    def act(store: CheckpointStore) -> None:
        if which == "start_attempt":
            store.start_attempt("run")
        else:
            store.finish_attempt(first[0], "finished")

    for schedule in fault_points(bench, prepare, act, "error", "error_after", "kill", "kill_after"):
        with contextlib.suppress(OSError, Killed):
            act(bench.faulty(schedule))
        store = bench.plain()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            numbers = [attempt.number for attempt in store.attempts("run")]
        assert numbers == list(range(1, len(numbers) + 1))
        latest = store.start_attempt("run").number
        assert latest == len(numbers) + 1
        store.sweep("run", latest + 1)
        files = {name for name in bench.folder.files() if name.startswith("attempts/")}
        assert files == {f"attempts/run-{number:06d}.json" for number in range(1, latest + 1)}


@pytest.mark.parametrize("seed", range(4))
def test_random_faults(bench: Bench, seed: int) -> None:
    actions = ("error", "error_after", "short", "truncate", "lag")
    schedule = Schedule(rate=0.03, seed=seed, actions=actions)
    store = bench.faulty(schedule)
    confirmed: dict[str, CheckpointRecord] = {}
    failures = 0
    for step in range(40):
        try:
            record = save(store, step)
            confirmed[record.path] = record
        except (OSError, CheckpointError):
            failures += 1
        if len(confirmed) > 2:
            oldest = next(iter(confirmed.values()))
            with contextlib.suppress(OSError):
                store.delete(oldest)
            del confirmed[oldest.path]
    assert failures
    bench.plain().sweep("run", 2)
    bench.check(sure=tuple(confirmed.values()))


def test_hung_store(bench: Bench) -> None:
    """A save that hangs holds up nobody else; once it is given up, it ends without a trace."""
    before = save(bench.plain(), 1)
    op = "pipe_file" if bench.protocol == "memory" else "write"
    schedule = Schedule(Fault("hang", op=op, kth=3 if bench.protocol == "file" else 2))
    stuck = bench.faulty(schedule)
    outcome: list[BaseException] = []

    def run() -> None:
        try:
            save(stuck, 2)
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert schedule.hanging.wait(20)
    after = save(bench.plain(), 2)
    assert after.path == "step-0000000002-v1.ckpt"  # the marker keeps the name
    bench.check(sure=(before, after), swept=False)
    schedule.release.set()
    thread.join(20)
    assert isinstance(outcome[0], TimeoutError)
    assert bench.check(sure=(before, after)) == [before, after]


def test_delay_only_takes_time(bench: Bench) -> None:
    record = save(bench.faulty(Schedule(Fault("delay", seconds=0.01))), 1)
    assert record.write_seconds is not None
    assert record.write_seconds >= 0.01
    bench.check(sure=(record,))


def test_listing_that_lags(bench: Bench) -> None:
    """Names that a late listing doesn't show aren't overwritten."""
    schedule = Schedule(Fault("lag", op="ls"))
    late = bench.faulty(schedule)
    assert late.records() == []
    other = bench.plain()
    taken = save(other, 1)
    bench.folder.put("step-0000000002.ckpt", b"foreign")
    records = [save(late, step) for step in (1, 2, 3)]
    assert [record.path[5:] for record in records] == ["0000000001-v1.ckpt", "0000000002-v1.ckpt", "0000000003.ckpt"]
    assert bench.folder.get("step-0000000002.ckpt") == b"foreign"
    bench.folder.remove("step-0000000002.ckpt")
    bench.check(sure=(taken, *records))


@pytest.mark.parametrize("op", ["pipe_file", "open", "write", "os.fsync", "os.replace", "os.link", "close", "rm_file"])
def test_case_21_permission_error(bench: Bench, op: str) -> None:
    before = save(bench.plain(), 1)
    schedule = Schedule(Fault("error", op=op, error=lambda: PermissionError(13, "no")))
    store = bench.faulty(schedule)
    with contextlib.suppress(PermissionError):
        save(store, 2)
        assert not schedule.hits or op == "rm_file"
    if schedule.hits:
        store.backend.fs.schedule.faults.clear()
    assert bench.check(swept=False)[0] == before
    reader = bench.plain()
    latest = reader.latest()
    assert latest is not None
    assert latest.path in bench.folder.names()
    schedule.faults.append(Fault("error", error=lambda: PermissionError(13, "no")))
    with pytest.raises(PermissionError, match="can't be written to"):
        bench.faulty(schedule).check()


def test_a_lost_answer_is_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object store's write that succeeded isn't taken for a failure because its answer was lost."""
    bench = Bench("objects", tmp_path, monkeypatch)
    for number in (1, 2):  # the marker, the record
        store = bench.faulty(Schedule(Fault("error_after", op="pipe_file", kth=number)))
        save(store, number)
        attempt = bench.faulty(Schedule(Fault("error_after", op="pipe_file"))).start_attempt("run")
        assert attempt.number == number
    assert len(bench.check()) == 2


def test_secrets_stay_out(bench: Bench, recwarn: pytest.WarningsRecorder, caplog: pytest.LogCaptureFixture) -> None:
    secret = "s3cr3t-value"
    caplog.set_level(logging.DEBUG)
    marker_left = bench.plain().begin(5, "run", 1)
    schedule = Schedule(Fault("error", error=lambda: PermissionError(13, f"denied for key {secret}")))
    store = bench.faulty(schedule)
    store._options["key"] = secret
    texts = [repr(store), store.url]
    with pytest.raises(PermissionError) as caught:
        store.check()
    texts.append(str(caught.value))
    schedule.faults = [Fault("error", op="rm_file", error=lambda: PermissionError(13, f"denied for key {secret}"))]
    assert store.sweep("run", 2) == []
    schedule.faults.clear()
    record = save(store, 1)
    texts += [record.to_json().decode(), str(bench.folder.files()), *(str(w.message) for w in recwarn), caplog.text]
    assert any(marker_left.name in text for text in texts)
    assert not [text for text in texts if secret in text]
    assert caught.value.__cause__ is None


# The local store


@pytest.fixture
def local(tmp_path: Path) -> CheckpointStore:
    store = CheckpointStore(tmp_path / "run")
    store.check()
    return store


def test_relative_and_home_paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert CheckpointStore("a/../b/").url == f"{tmp_path}/b"
    assert CheckpointStore("~/c").url == f"{tmp_path}/home/c"
    assert CheckpointStore(f"file://{tmp_path}/d/").url == f"{tmp_path}/d"
    store = CheckpointStore("b")
    for path in ("b/x.ckpt", f"{tmp_path}/b/x.ckpt", f"file://{tmp_path}/b/x.ckpt", tmp_path / "b" / "x.ckpt"):
        assert store.name_of(path) == "x.ckpt"
    assert store.name_of("x.ckpt") is None
    monkeypatch.chdir("/")
    assert store.url == f"{tmp_path}/b"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "dirpath="),
        ("  ", "dirpath="),
        ("memory://a?token=abc", "query"),
        ("ftp://me:pass@host/a", "password"),
        ("nosuch://a", "nosuch"),
        ("a\0b", "dirpath="),
        ("gs://a/b\n", "character"),
        ("gs:/a/b", "write 'gs://a/b'"),
        (Path("s3://a/b"), "write 's3://a/b'"),
        ("file:/a/b", "write 'file:///a/b'"),
        ("/a/memory:", "write 'memory://'"),
        ("s3://", "names no bucket"),
        ("gs:///", "names no bucket"),
        ("file://", "names no folder"),
        ("simplecache::s3://a/b", "chain"),
        ("zip://a.zip::memory://b", "chain"),
        ("zip://a.zip", "archive"),
        ("https://host/a", "can only be read"),
        ("sftp://host/a", "before all of it is written"),
        ("hdfs://host/a", "before all of it is written"),
        ("hf://datasets/a/b", "commit"),
    ],
)
def test_bad_url(url: str | Path, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        CheckpointStore(url)
    assert "dirpath=" in str(caught.value)
    assert "abc" not in str(caught.value)
    assert "me:pass" not in str(caught.value)


@pytest.mark.parametrize("url", [5, b"gs://a/b", None])
def test_a_url_that_is_no_text(url: Any) -> None:
    with pytest.raises(TypeError, match=re.escape(f"dirpath={url!r}: a local path or an fsspec URL was expected")):
        CheckpointStore(url)


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("s3://bucket/run/", "s3://bucket/run"),
        ("s3://bucket", "s3://bucket"),
        ("gs://bucket//", "gs://bucket"),
        ("memory://", "memory://"),
        ("memory:///a/b/", "memory:///a/b"),
        ("/a/b:/c", "/a/b:/c"),
        ("/a/s3:x", "/a/s3:x"),
    ],
)
def test_good_url(given: str, url: str) -> None:
    assert CheckpointStore(given).url == url


def test_a_folder_under_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    store = CheckpointStore(tmp_path / "file" / "run")
    for use in (store.records, store.check):
        with pytest.raises(NotADirectoryError, match=r"dirpath=.*is a file, or lies under one"):
            use()


def test_attempts_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "attempts").write_bytes(b"mine")
    store = CheckpointStore(tmp_path)
    with pytest.raises(NotADirectoryError, match=r"dirpath=.* or 'attempts' in it is a file"):
        store.start_attempt("run")
    assert (tmp_path / "attempts").read_bytes() == b"mine"


class Folders(LocalFileSystem):
    """Of a protocol that isn't known; makes no folder by itself."""

    protocol = "folders"
    cachable = False


def test_a_filesystem_that_is_not_known_and_has_folders(tmp_path: Path) -> None:
    fsspec.register_implementation("folders", Folders, clobber=True)
    store = CheckpointStore(f"folders://{tmp_path}/new/run")
    store.check()
    store.start_attempt("run")
    record = save(store, 1)
    store.verify(record)
    assert [attempt.number for attempt in store.attempts()] == [1]


@pytest.mark.parametrize("op", ["os.fsync", "close"])
@pytest.mark.parametrize("code", [errno.EIO, errno.EDQUOT, errno.ENOSPC])
def test_error_that_comes_late_in_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, op: str, code: int) -> None:
    """As NFS reports it, wherever in a save: the save fails in plain words, or is whole; the older one stays."""
    older = save(CheckpointStore(tmp_path), 1)
    for kth in itertools.count(1):
        schedule = Schedule(Fault("error_after", op=op, kth=kth, error=lambda: OSError(code, "late")))
        with monkeypatch.context() as patch:
            patch.setattr(backends, "os", FaultyOs(schedule))
            store = CheckpointStore(f"faulty://{tmp_path}", {"target_protocol": "file", "schedule": schedule})
            kept, failed = [older], None
            try:
                kept.append(save(store, kth + 1))
            except OSError as error:
                failed = error
        assert failed is None or failed.errno == code
        assert failed is None or code == errno.EIO or "the disk is full" in str(failed)
        store = CheckpointStore(tmp_path)
        assert store.records() == kept
        for record in kept:
            store.verify(record)
        for record in kept[1:]:
            store.delete(record)
        if not schedule.hits:
            break
    assert kth > 3


def test_case_24_fsync_comes_before_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench("file", tmp_path, monkeypatch)
    schedule = Schedule()
    record = save(bench.faulty(schedule), 1)
    changing = {"open", "write", "os.fsync", "close", "os.replace", "os.link", "os.posix_fallocate", "rm_file"}
    log = [(op, path.rpartition("/")[2]) for op, path in schedule.log if op in changing]
    name, folder = record.path, "run"
    where = {key: log.index(key) for key in (("os.replace", name), ("os.replace", name + ".json"))}
    payload, recorded = where.values()
    started = next(i for i, (op, path) in enumerate(log) if path.startswith(f".{name}.") and op == "open")
    marked = log.index(("os.link", name + ".pending"))
    temporary = log[started][1]
    # the marker is durable before the payload's first byte
    assert ("os.fsync", folder) in log[marked:started]
    # space, bytes, fsync, close; then the rename, then the folder
    assert [op for op, _ in log[started:payload]] == ["open", "os.posix_fallocate", "write", "write", "write",
                                                      "os.fsync", "close"]  # fmt: skip
    assert {path for _, path in log[started:payload]} == {temporary}
    assert log[payload + 1] == ("os.fsync", folder)
    # the record only then, in the same way; the marker goes last
    assert [op for op, _ in log[payload + 2 : recorded]] == ["open", "write", "os.fsync", "close"]
    assert log[recorded + 1] == ("os.fsync", folder)
    assert log[recorded + 2] == ("rm_file", name + ".pending")

    schedule.log.clear()
    store = bench.faulty(schedule)
    store.delete(record)
    log = [(op, path.rpartition("/")[2]) for op, path in schedule.log if op in changing]
    ends = log[log.index(("os.replace", name + ".pending")) :]
    assert ends == [
        ("os.replace", name + ".pending"),
        ("os.fsync", folder),
        ("rm_file", name + ".json"),
        ("os.fsync", folder),
        ("rm_file", name),
        ("os.fsync", folder),
        ("rm_file", name + ".pending"),
        ("os.fsync", folder),
    ]


WATCHER = """
import json, sys
import google_crc32c
for line in sys.stdin:
    path = line.strip()
    record = json.load(open(path + ".json"))
    data = open(path, "rb").read()
    good = len(data) == record["size"] and record["checksum"] == f"crc32c:{google_crc32c.value(data):08x}"
    print("whole" if good else "broken", flush=True)
"""


def test_case_24_another_process_reads_what_was_just_confirmed(local: CheckpointStore) -> None:
    with subprocess.Popen([sys.executable, "-c", WATCHER], stdin=-1, stdout=-1, text=True) as watcher:
        assert watcher.stdin is not None
        assert watcher.stdout is not None
        for step in range(50):
            record = save(local, step, os.urandom(100_000 + step))
            watcher.stdin.write(local.path_of(record) + "\n")
            watcher.stdin.flush()
            assert watcher.stdout.readline().strip() == "whole"
            local.delete(record)
        watcher.stdin.close()


WRITER = """
import sys, time
from tests.store_conformance import Bytes, save
from lightning_ckpt_policy.store import Attempt, CheckpointStore

class Slow(Bytes):
    def chunks(self):
        for n, chunk in enumerate(super().chunks()):
            yield chunk
            if n == 2:
                print("half", flush=True)
                time.sleep(60)

store = CheckpointStore(sys.argv[1])
save(store, 1, b"first" * 10_000)
pending = store.begin(2, "run", 1)
store.commit(pending, Slow(b"second" * 10_000), {"step": 2, "epoch": 0, "created_at": 0.0})
"""


def test_case_19_sigkill_in_the_middle_of_a_write(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    root = str(Path(__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": root}
    store = CheckpointStore(url)
    store.check()
    with subprocess.Popen([sys.executable, "-c", WRITER, url], stdout=-1, text=True, env=environment) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "half\n"
        child.send_signal(signal.SIGKILL)
    folder = Folder(url, {})
    first = store.latest()
    assert first is not None
    assert first.step == 1
    assert store.open_verified(first).read() == b"first" * 10_000
    debris = folder.names() - files_of(first)
    assert len(debris) == 2
    assert "step-0000000002.ckpt" not in folder.names()
    assert set(store.sweep("run", store.start_attempt("run").number + 1)) == debris
    assert folder.names() == files_of(first)


def test_case_20_nothing_is_written_in_tmpdir(
    local: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "isn't there"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    for name in ("mkstemp", "mkdtemp", "NamedTemporaryFile", "TemporaryFile", "SpooledTemporaryFile", "gettempdir"):
        monkeypatch.setattr(tempfile, name, lambda *_, **__: pytest.fail("a temporary file outside the store"))
    attempt = local.start_attempt("run")
    record = local.pin(save(local, 1))
    local.open_verified(record).close()
    local.delete(local.pin(record, pinned=False))
    local.sweep("run", 2)
    local.finish_attempt(attempt, "finished")


@contextlib.contextmanager
def tmpfs(folder: Path, size: str) -> Iterator[Path]:
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        pytest.skip(f"mount can't be run: {error}")
    if done.returncode:
        pytest.skip(f"a tmpfs can't be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_full_disk_is_found_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tmpfs(tmp_path / "disk", "2m") as disk:
        store = CheckpointStore(disk / "run")
        store.check()
        first = save(store, 1, b"x" * 1_000_000)
        image = Bytes(b"y" * 3_000_000)
        image.chunks = lambda: pytest.fail("nothing may be sent")  # type: ignore[method-assign]
        pending = store.begin(2, "run", 1)
        with pytest.raises(OSError, match="the disk is full: 3,000,000 bytes are needed") as caught:
            store.commit(pending, image, {"step": 2, "epoch": 0, "created_at": 0.0})
        assert caught.value.errno == 28
        assert Folder(store.url, {}).names() == files_of(first)
        store.verify(first)
        second = save(store, 2, b"z" * 500_000)
        assert store.records() == [first, second]


def test_full_disk_where_space_cannot_be_reserved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = Schedule(Fault("error", op="os.posix_fallocate", error=lambda: OSError(95, "not supported")))
    monkeypatch.setattr(backends, "os", FaultyOs(refusing))
    with tmpfs(tmp_path / "disk", "2m") as disk:
        store = CheckpointStore(disk / "run")
        store.check()
        first = save(store, 1, b"x" * 1_000_000)
        with pytest.raises(OSError, match="the disk is full: 3,000,000 bytes are needed"):
            save(store, 2, b"y" * 3_000_000)
        assert Folder(store.url, {}).names() == files_of(first)
        assert save(store, 2, b"z" * 500_000).path == "step-0000000002.ckpt"


def test_case_21_read_only_folder(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", "2m") as disk:
        store = CheckpointStore(disk / "run")
        store.check()
        record = save(store, 1)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(PermissionError, match=r"dirpath=.*can't be written to"):
            store.check()
        with pytest.raises(OSError, match="Read-only"):
            save(store, 2)
        with pytest.raises(OSError, match="Read-only"):
            store.delete(record)
        assert store.latest() == record
        store.verify(record)


def test_case_33_symlinks_and_odd_files(local: CheckpointStore, tmp_path: Path) -> None:
    """A record that is a link to elsewhere, a folder or a pipe is never followed into harm."""
    good = save(local, 1)
    secret = tmp_path / "secret"
    secret.write_text("not to be touched")
    os.symlink(secret, f"{local.url}/a.ckpt.json")
    os.symlink("/nowhere", f"{local.url}/b.ckpt.json")
    os.mkdir(f"{local.url}/c.ckpt.json")
    os.mkdir(f"{local.url}/step-0000000002.ckpt")
    os.symlink(secret, f"{local.url}/step-0000000003.ckpt")
    os.mkfifo(f"{local.url}/d.ckpt.json")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert local.records() == [good]
    assert save(local, 2).path == "step-0000000002-v1.ckpt"
    assert save(local, 3).path == "step-0000000003-v1.ckpt"
    assert secret.read_text() == "not to be touched"


def test_many_records_are_read_once(local: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save or a listing among thousands of records reads only what is new."""
    record = save(local, 1)
    folder = Path(local.url)
    for number in range(2, 3002):
        name = f"step-{number:010d}.ckpt"
        another = dataclasses.replace(record, path=name, sequence=number, step=number)
        (folder / name).touch()
        (folder / f"{name}.json").write_bytes(another.to_json())
    assert len(local.records()) == 3001
    reads: list[str] = []
    monkeypatch.setattr(local.backend, "read_many", lambda names: reads.extend(names) or {})
    assert len(local.records()) == 3001
    assert reads == []
    began = time.monotonic()
    assert save(local, 5000).sequence == 3002
    assert time.monotonic() - began < 5


def test_memory_stays_bounded_while_verifying(local: CheckpointStore) -> None:
    import tracemalloc

    data = bytes(64 << 20)
    record = save(local, 1, data)
    assert record.checksum == checksum_of([data])
    tracemalloc.start()
    local.verify(record)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20 << 20


def test_a_pin_that_came_before_the_deletes_marker_is_respected(
    local: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = save(local, 1)
    other = CheckpointStore(local.url)
    original = LocalBackend.write

    def write(backend: LocalBackend, name: str, *args: Any, **options: Any) -> None:
        if name.endswith(".pending"):
            monkeypatch.setattr(LocalBackend, "write", original)
            other.pin(record)
        original(backend, name, *args, **options)

    monkeypatch.setattr(LocalBackend, "write", write)
    with pytest.raises(ValueError, match="pinned"):
        local.delete(record)
    assert [kept.pinned for kept in local.records()] == [True]
    local.verify(record)
    assert not list(Path(local.url).glob("*.pending"))


def test_a_pin_during_a_delete_does_not_bring_a_record_back(
    local: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = save(local, 1)
    other = CheckpointStore(local.url)
    original = CheckpointStore._read_record

    def read(store: CheckpointStore, name: str) -> CheckpointRecord | None:
        found = original(store, name)
        if store is other:
            monkeypatch.setattr(CheckpointStore, "_read_record", original)
            local.delete(record)
        return found

    monkeypatch.setattr(CheckpointStore, "_read_record", read)
    with pytest.raises(CheckpointError, match="being deleted"):
        other.pin(record)
    assert [path.name for path in Path(local.url).iterdir() if path.is_file()] == []


def test_a_record_written_while_its_payload_is_swept_is_not_confirmed(
    local: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    local.start_attempt("run")
    original = LocalBackend.write

    def write(backend: LocalBackend, name: str, *args: Any, **options: Any) -> None:
        if name.endswith(".ckpt.json"):
            monkeypatch.setattr(LocalBackend, "write", original)
            newer = CheckpointStore(local.url)
            newer.sweep("run", newer.start_attempt("run").number)
        original(backend, name, *args, **options)

    monkeypatch.setattr(LocalBackend, "write", write)
    with pytest.raises(SupersededError):
        save(local, 1)
    assert local.records() == []
    assert [path.name for path in Path(local.url).iterdir() if path.is_file()] == []


def test_a_delete_whose_marker_is_swept_leaves_no_payload(
    local: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = save(local, 1)
    local.start_attempt("run")
    original = LocalBackend.delete

    def delete(backend: LocalBackend, name: str) -> None:
        if name.endswith(".ckpt.json"):
            monkeypatch.setattr(LocalBackend, "delete", original)
            newer = CheckpointStore(local.url)
            newer.sweep("run", newer.start_attempt("run").number)
            assert not list(Path(local.url).glob("*.pending"))
        original(backend, name)

    monkeypatch.setattr(LocalBackend, "delete", delete)
    local.delete(record)
    assert [path.name for path in Path(local.url).iterdir() if path.is_file()] == []


def test_hostile_numbers_stop_nothing(local: CheckpointStore) -> None:
    record = save(local, 1)
    values = json.loads(record.to_json()) | {"path": "x.ckpt", "sequence": 2**63 - 1}
    del values["record_checksum"]
    (Path(local.url) / "x.ckpt.json").write_text(json.dumps(values))
    local.start_attempt("run")
    (Path(local.url) / "attempts" / f"run-{2**63 - 1}.json").write_text("{}")
    with pytest.warns(UserWarning, match="is skipped"):
        assert local.records() == [record]
    assert save(local, 2).sequence == 2
    assert local.start_attempt("run").number == 2
