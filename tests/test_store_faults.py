"""Object stores whose requests fail in every way, by a proxy before a real server."""

from __future__ import annotations

import dataclasses
import os
import pickle
import re
import socket
import threading
import time
import tracemalloc
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from lightning_ckpt_policy import retry
from lightning_ckpt_policy.errors import BucketNotFoundError
from lightning_ckpt_policy.ledger import DeleteFailure, Ledger
from lightning_ckpt_policy.object_stores import ObjectStoreBackend
from lightning_ckpt_policy.record import CheckpointRecord
from lightning_ckpt_policy.retention import KeepLast
from lightning_ckpt_policy.store import CheckpointStore
from lightning_ckpt_policy.writer import BackgroundWriter
from tests.fault_proxy import Fault, FaultProxy
from tests.servers import Server
from tests.store_conformance import Bytes, Folder, files_of, save

PART = 5 << 20
SIZE = 2 * PART + 1000
FOREVER = float("inf")


@dataclass(frozen=True)
class Operations:
    """How the requests of one store look, as (method, pattern)."""

    server: str
    part: tuple[str, str]
    complete: tuple[str, str]
    record: tuple[str, str]
    listing: tuple[str, str]
    denied: bytes
    expired: tuple[int, bytes]
    permission: str


OPERATIONS = {
    operations.server: operations
    for operations in (
        Operations(
            "moto",
            part=("PUT", "partNumber="),
            complete=("POST", "uploadId="),
            record=("PUT", r"\.ckpt\.json"),
            listing=("GET", "list-type=2"),
            denied=b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>",
            expired=(400, b"<Error><Code>ExpiredToken</Code><Message>The token has expired.</Message></Error>"),
            permission="s3:PutObject",
        ),
        Operations(
            "fake-gcs",
            part=("POST", "uploadType=media"),
            complete=("POST", "/compose$"),
            record=("POST", "uploadType=multipart$"),
            listing=("GET", r"/o\?delimiter"),
            denied=b'{"error": {"code": 403, "message": "no access"}}',
            expired=(401, b'{"error": {"code": 401, "message": "Invalid Credentials"}}'),
            permission="storage.objects.create",
        ),
        Operations(
            "azurite",
            part=("PUT", "comp=block&"),
            complete=("PUT", "comp=blocklist"),
            record=("PUT", r"\.ckpt\.json"),
            listing=("GET", "comp=list"),
            denied=b"<Error><Code>AuthorizationFailure</Code><Message>no</Message></Error>",
            expired=(401, b"<Error><Code>InvalidAuthenticationInfo</Code><Message>old</Message></Error>"),
            permission="Storage Blob Data Contributor",
        ),
    )
}


class Bench:
    """A folder on a real server, behind a proxy."""

    def __init__(self, server: Server, proxy: FaultProxy, operations: Operations) -> None:
        self.server, self.proxy, self.operations = server, proxy, operations
        self.url = f"{server.bucket}/{uuid.uuid4().hex}/run"
        self.options = server.options(proxy.port)
        self.store = self.open(self.url)
        self.folder = Folder(self.url, server.options())
        self.store.check()
        self.data = os.urandom(SIZE)

    def open(self, url: str, connections: int | None = None) -> CheckpointStore:
        return CheckpointStore(url, self.options, part_bytes=PART, connections=connections)

    def fault(self, kind: Any, operation: str, **more: Any) -> Fault:
        method, target = getattr(self.operations, operation)
        fault = Fault(kind, method, target, **more)
        self.proxy.faults.append(fault)
        return fault

    def save(self, step: int = 1, timeout: float | None = None) -> CheckpointRecord:
        pending = self.store.begin(step, "run", 1)
        draft = {"step": step, "epoch": 0, "created_at": time.time()}
        return self.store.commit(pending, Bytes(self.data, 1 << 20), draft, timeout=timeout)

    def met(self) -> int:
        return sum(request.fault is not None for request in self.proxy.log)

    def check(self, *records: CheckpointRecord) -> None:
        """Just these are there, whole, and nothing else."""
        self.proxy.faults.clear()
        found = CheckpointStore(self.url, self.server.options())
        assert found.records() == list(records)
        for record in records:
            assert found.open_verified(record).read() == self.data
        assert self.folder.names() == files_of(*records)
        assert self.unfinished() == []

    def unfinished(self) -> list[str]:
        """Uploads that S3 still holds parts of."""
        if self.server.protocol != "s3":
            return []
        bucket, prefix = self.folder.root.split("/", 1)
        listed = self.folder.fs.call_s3("list_multipart_uploads", Bucket=bucket)
        return [upload["Key"] for upload in listed.get("Uploads", []) if upload["Key"].startswith(prefix)]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "_wait", lambda _: 0.01)
    monkeypatch.setattr("azure.storage.blob._shared.policies_async.ExponentialRetry.get_backoff_time", lambda *_: 0.01)


@pytest.fixture(params=OPERATIONS)
def bench(request: pytest.FixtureRequest, server_of: Callable[[str], Server]) -> Iterator[Bench]:
    server = server_of(request.param)
    with FaultProxy(server.port) as proxy:
        yield Bench(server, proxy, OPERATIONS[request.param])


@pytest.mark.parametrize("operation", ["part", "complete", "record"])
@pytest.mark.parametrize("kind", ["lost", "reset", "status 500", "status 503", "status 429", "status 408"])
def test_a_request_that_fails_once_does_no_harm(bench: Bench, kind: str, operation: str) -> None:
    name, _, code = kind.partition(" ")
    bench.fault(name, operation, code=int(code or 0))
    record = bench.save()
    assert bench.met() == 1
    bench.check(record)


@pytest.mark.parametrize("operation", ["part", "record"])
def test_a_bit_that_flips_on_its_way_is_found_before_the_checkpoint_is_confirmed(bench: Bench, operation: str) -> None:
    fault = bench.fault("flip", operation, times=FOREVER)
    with pytest.raises(OSError, match=r"damaged on its way|[Mm][Dd]5|[Cc]hecksum") as caught:
        bench.save()
    assert fault.met
    assert "step-0000000001.ckpt" in str(caught.value)
    bench.check()
    again = bench.save(2)
    bench.check(again)


def test_a_bit_that_flips_once_costs_one_part(bench: Bench) -> None:
    bench.fault("flip", "part")
    record = bench.save()
    method, target = bench.operations.part
    sent = [r for r in bench.proxy.log if r.method == method and re.search(target, r.target) and r.length > 900]
    assert len(sent) == 4
    bench.check(record)


def test_a_flipped_bit_in_a_marker_is_found(bench: Bench) -> None:
    bench.proxy.faults.append(Fault("flip", "PUT|POST", r"\.pending|ifGenerationMatch"))
    with pytest.raises(OSError, match=r"damaged|checksum"):
        bench.store.begin(1, "run", 1)
    assert bench.folder.names() == set()


@pytest.mark.parametrize("operation", ["part", "complete"])
@pytest.mark.parametrize("kind", ["reset", "status"])
def test_a_failure_for_ever_leaves_nothing(bench: Bench, kind: str, operation: str) -> None:
    bench.fault(kind, operation, times=FOREVER, code=400, body=b"<Error><Code>Odd</Code></Error>")
    with pytest.raises(OSError, match=r"step-0000000001\.ckpt"):
        bench.save(timeout=4)
    bench.check()


@pytest.mark.parametrize("code", [401, 403])
def test_case_30_a_missing_permission_is_told_at_once(bench: Bench, code: int) -> None:
    bench.fault("status", "part", times=FOREVER, code=code, body=bench.operations.denied)
    with pytest.raises(PermissionError) as caught:
        bench.save()
    text = str(caught.value)
    bucket = bench.folder.root.split("/")[0]
    for word in ("not allowed to write", bucket, bench.operations.permission, "step-0000000001.ckpt"):
        assert word in text
    assert not retry.is_transient(caught.value)
    assert bench.met() <= (6 if code == 401 else 3)  # for each part on its way; expired credentials are read again
    bench.check()


@pytest.mark.parametrize("operation", ["part", "complete", "record", "listing"])
def test_credentials_that_expired_are_read_again(bench: Bench, operation: str) -> None:
    code, body = bench.operations.expired
    before = bench.store.backend.fs
    bench.fault("status", operation, code=code, body=body)
    record = bench.save()
    bench.store.records()
    assert bench.met() == 1
    assert bench.store.backend.fs is not before
    bench.check(record)


def test_credentials_that_stay_expired_are_told_at_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    code, body = bench.operations.expired
    backend = bench.store.backend
    made, make = [], backend.fresh
    monkeypatch.setattr(backend, "fresh", lambda: made.append(make()) or made[-1])
    bench.fault("status", "part", times=FOREVER, code=code, body=body)
    began = time.monotonic()
    with pytest.raises(PermissionError, match="credentials that haven't expired"):
        bench.save()
    assert time.monotonic() - began < 20
    assert len(made) == 1
    assert bench.met() <= 6  # two for each part that was on its way
    bench.check()


def test_deletes_go_at_once_each_record_before_its_payload_and_a_failure_stops_only_its_own(bench: Bench) -> None:
    bench.data = b"some bytes"
    records = [bench.save(step) for step in range(1, 6)]
    writer = BackgroundWriter()
    ledger = Ledger(
        bench.store, bench.store.start_attempt("run"), KeepLast(1), records, frozenset(), writer, "step-{step:010d}"
    )
    denied = Fault("status", "DELETE", r"2\.ckpt\.json", times=FOREVER, code=403, body=bench.operations.denied)
    bench.proxy.faults.append(denied)
    bench.proxy.log.clear()
    bench.proxy.latency, bench.proxy.most_busy = 0.05, 0
    ledger.prune()
    assert writer.drain(30)
    assert bench.proxy.most_busy > 1
    (event,) = ledger.events
    assert isinstance(event, DeleteFailure)
    assert event.record == records[1]
    assert isinstance(event.error, PermissionError)
    gone = [
        found[0]
        for request in bench.proxy.log
        if request.method == "DELETE" and (found := re.search(r"\d\.ckpt(\.json)?(?=$|\?)", request.target))
    ]
    assert [name for name in gone if name[0] == "2"] == ["2.ckpt.json"]
    for step in "134":
        assert [name for name in gone if name[0] == step] == [f"{step}.ckpt.json", f"{step}.ckpt"]
    assert bench.folder.names() == files_of(records[1], records[4]) | {records[1].path + ".pending"}
    bench.proxy.faults.clear()
    ledger.prune()
    assert writer.close(30)
    bench.check(records[4])


def test_rotated_credentials_are_taken_up(server_of: Callable[[str], Server], monkeypatch: pytest.MonkeyPatch) -> None:
    server = server_of("moto")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "old-key")
    with FaultProxy(server.port) as proxy:
        options = {key: value for key, value in server.options(proxy.port).items() if key not in ("key", "secret")}
        store = CheckpointStore(f"{server.bucket}/{uuid.uuid4().hex}", options)
        store.check()
        proxy.log.clear()
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "new-key")
        code, body = OPERATIONS["moto"].expired
        proxy.faults.append(Fault("status", code=code, body=body))
        save(store, 1)
    keys = [re.search("(old|new)-key", request.header("authorization")) for request in proxy.log]
    assert [key and key[1] for key in keys] == ["old"] + ["new"] * (len(keys) - 1)


def test_case_30_a_missing_permission_is_found_at_setup(bench: Bench) -> None:
    bench.proxy.faults.append(Fault("status", "PUT|POST", times=FOREVER, code=403, body=bench.operations.denied))
    with pytest.raises(PermissionError, match="can't be written to") as caught:
        bench.store.check()
    assert bench.operations.permission in str(caught.value)
    assert bench.met() == 1


def test_a_listing_that_is_not_allowed_is_told(bench: Bench) -> None:
    bench.fault("status", "listing", times=FOREVER, code=403, body=bench.operations.denied)
    with pytest.raises(PermissionError, match="not allowed to list"):
        bench.store.records()


def test_a_bucket_that_does_not_exist_is_told_at_once(bench: Bench) -> None:
    store = bench.open(f"{bench.server.protocol}://no-such-bucket-of-ours/run")
    with pytest.raises(BucketNotFoundError, match=r"no-such-bucket-of-ours.*make it, or correct the URL") as caught:
        store.check()
    assert not retry.is_transient(caught.value)


@pytest.mark.parametrize("kind", ["black_hole", "stop_reading"])
@pytest.mark.parametrize("operation", ["part", "record"])
def test_a_server_that_stops_answering_is_given_up(bench: Bench, kind: str, operation: str) -> None:
    bench.fault(kind, operation, times=FOREVER, after=100 if operation == "part" else 0)
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"within|time limit"):
        bench.save(timeout=2)
    assert time.monotonic() - began < 20
    assert bench.met()
    bench.proxy.release()
    assert bench.proxy.until(lambda proxy: proxy.held == 0)  # the requests really ended
    bench.check()


def test_uploads_of_a_killed_attempt_are_swept_and_no_one_elses(bench: Bench) -> None:
    backend = bench.store.backend
    assert isinstance(backend, ObjectStoreBackend)
    pending = bench.store.begin(1, "run", 1)
    foreign = bench.store.begin(1, "other", 1)
    for one in (pending, foreign):
        path = backend.path(one.name)
        upload = backend._run("write", path, lambda path=path, tag=one.token: backend._begin(path, tag))
        backend._run("write", path, lambda upload=upload: backend._send(upload, 0, bytes(PART)))
    before = bench.folder.names(), bench.unfinished()
    bench.open(bench.url).sweep("run", 2)
    after = bench.folder.names(), bench.unfinished()
    for names, left in zip(before, after, strict=True):
        assert set(left) == {name for name in names if foreign.name in name}
    if bench.server.protocol != "az":  # Azure keeps what was never committed to itself
        assert before != ({pending.name + ".pending", foreign.name + ".pending"}, [])


def test_a_read_that_is_cut_is_done_again(bench: Bench) -> None:
    record = bench.save()
    bench.proxy.faults.append(Fault("reset_reading", "GET", r"\.ckpt(\?|$)", after=1000))
    bench.store.verify(record)
    assert bench.met() == 1
    bench.check(record)


def test_a_read_that_hangs_ends(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    record = bench.save()
    monkeypatch.setattr("lightning_ckpt_policy.object_stores.REQUEST_SECONDS", 2.0)
    monkeypatch.setattr("lightning_ckpt_policy.object_stores.FLOOR_BYTES_PER_SECOND", 1e9)
    bench.proxy.faults.append(Fault("black_hole", "GET", r"\.ckpt(\?|$)", times=FOREVER))
    with pytest.raises(TimeoutError, match=r"read it within 2 s"):
        bench.store.verify(record)
    assert bench.proxy.until(lambda proxy: proxy.held == 0)


def test_secrets_stay_out_of_errors(bench: Bench) -> None:
    secrets = [value for key, value in _flat(bench.options) if key in ("secret", "connection_string")]
    bench.fault("status", "part", times=FOREVER, code=403, body=f"<Error>{secrets}</Error>".encode())
    with pytest.raises(OSError) as caught:
        bench.save()
    shown = f"{caught.value} {caught.value!r} {caught.value.__cause__!r}"
    assert not [secret for secret in secrets if secret in shown]


def _flat(options: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in options.items():
        if isinstance(value, dict):
            yield from _flat(value)
        else:
            yield key, value


def test_saves_in_a_row_under_faults_keep_all(bench: Bench) -> None:
    """Each save meets another failing request."""
    kinds = ("lost", "reset", "status")
    kept = []
    for step, kind in enumerate(kinds, start=1):
        bench.proxy.faults[:] = [Fault(kind, "PUT|POST|DELETE", skip=step)]
        kept.append(save(bench.store, step, bench.data))
    bench.check(*kept)


@pytest.mark.parametrize("connections", [1, 3])
def test_parts_go_at_once_in_bounded_memory(bench: Bench, connections: int) -> None:
    store = pickle.loads(pickle.dumps(bench.open(bench.url, connections)))
    bench.data = bytes(12 * PART)
    bench.proxy.counted_from, bench.proxy.most_busy = 1000, 0
    bench.fault("delay", "part", times=FOREVER, least=PART, seconds=0.1)
    pending = store.begin(1, "run", 1)
    draft = {"step": 1, "epoch": 0, "created_at": time.time()}
    tracemalloc.start()
    try:
        record = store.commit(pending, Bytes(bench.data, 1 << 20), draft)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert bench.proxy.most_busy == connections
    # the proxy, in the same process, holds a few pieces of each
    assert peak < 2 * connections * PART + (4 << 20)
    bench.check(record)


@pytest.mark.parametrize(
    ("read", "connections", "at_once", "ranges"),
    [("open_verified", 1, 1, 2), ("open_verified", 3, 3, 3), ("open_verified", None, 6, 6), ("open", None, 6, 6)],
)
def test_ranges_are_read_at_once(bench: Bench, read: str, connections: int | None, at_once: int, ranges: int) -> None:
    record = bench.save()
    store = bench.open(bench.url, connections)
    assert store.records() == [record]
    bench.proxy.latency, bench.proxy.most_busy = 0.2, 0
    bench.proxy.log.clear()
    assert getattr(store, read)(record).read() == bench.data
    assert at_once <= bench.proxy.most_busy <= at_once + 2  # gcsfs asks for a size in several ways at once
    assert sum(bool(request.header("range") or request.header("x-ms-range")) for request in bench.proxy.log) == ranges


def test_a_folder_of_many_records_is_read_in_few_requests_time(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records are read at once, not one after the other, and by the next start all in one."""
    monkeypatch.setattr("lightning_ckpt_policy.store._CATALOGUED_FROM", 50)
    record = bench.save()
    others = [
        dataclasses.replace(record, path=f"step-{step:010d}.ckpt", step=step, sequence=step, size=0)
        for step in range(2, 62)
    ]
    bench.folder.fs.pipe({f"{bench.folder.root}/{one.path}.json": one.to_json() for one in others})

    def start() -> tuple[list[CheckpointRecord], int]:
        bench.proxy.log.clear()
        store = bench.open(bench.url)
        records = store.records()
        read = sum(request.method == "GET" and ".ckpt.json" in request.target for request in bench.proxy.log)
        store.start_attempt("run")
        return records, read

    bench.proxy.latency, bench.proxy.most_busy = 0.05, 0
    found, read = start()
    assert found == [record, *others]
    assert 61 <= read < 61 + 10  # some are asked again
    assert bench.proxy.most_busy >= 32
    bench.proxy.latency = 0
    assert start() == (found, 0)
    found[0] = bench.store.pin(found[0])
    bench.folder.remove(found.pop(3).path + ".json")
    assert start() == (found, 1)
    good = bench.folder.get("attempts/records.catalogue")
    for spoiled in (good[:-9] + b" " + good[-8:], good[:40], b"crc32c:00000000\n", b"crc32c:764dbd76\n[]", b"\xff"):
        bench.folder.put("attempts/records.catalogue", spoiled)
        again, read = start()
        assert again == found
        assert read >= 60


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
    return port


def elsewhere(options: Any, change: tuple[str, str]) -> Any:
    """Options with other endpoints."""
    if isinstance(options, dict):
        return {key: elsewhere(value, change) for key, value in options.items()}
    return options.replace(*change) if isinstance(options, str) else options


@pytest.mark.parametrize(
    "change", [("", ""), ("127.0.0.1", "no-such-host.invalid"), ("http://", "https://")], ids=["port", "host", "https"]
)
def test_a_server_that_is_not_there_is_told(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, change: tuple[str, str]
) -> None:
    monkeypatch.setattr("lightning_ckpt_policy.object_stores.REQUEST_SECONDS", 2.0)
    monkeypatch.setattr(retry, "REACHED_WITHIN", 0.2)
    port = bench.proxy.port if change[0] == "http://" else free_port()
    store = CheckpointStore(bench.url, elsewhere(bench.server.options(port), change))
    with pytest.raises(ConnectionError, match="the endpoint or account in storage_options") as caught:
        store.check()
    assert repr(bench.url) in str(caught.value)


@pytest.mark.parametrize(
    ("code", "kind", "told"), [(503, ConnectionError, "doesn't answer"), (400, OSError, "can't be used")]
)
def test_a_server_that_refuses_everything_is_told(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[OSError], told: str
) -> None:
    monkeypatch.setattr("lightning_ckpt_policy.object_stores.REQUEST_SECONDS", 2.0)
    monkeypatch.setattr(retry, "REACHED_WITHIN", 0.2)
    bench.proxy.faults.append(Fault("status", times=FOREVER, code=code))
    with pytest.raises(kind, match=f"dirpath='{bench.url}' {told}"):
        bench.store.check()


def test_a_server_that_is_reached_a_little_later_is_waited_for(bench: Bench) -> None:
    proxy = FaultProxy(bench.server.port, port=free_port())
    coming_up = threading.Timer(3.0, proxy.__enter__)
    coming_up.start()
    try:
        CheckpointStore(bench.url, bench.server.options(proxy.port)).check()
    finally:
        coming_up.join()
        proxy.__exit__()
    assert proxy.log
