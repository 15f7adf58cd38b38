"""The files underneath: whole or absent, durable, and the odd answers that shares and object stores give."""

from __future__ import annotations

import errno
import gc
import io
import json
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from lightning_ckpt_policy import backends
from lightning_ckpt_policy.backends import (
    Backend,
    FolderBackend,
    LocalBackend,
    MemoryBackend,
    make_backend,
    make_filesystem,
    redact,
)
from lightning_ckpt_policy.snapshot import CHUNK_BYTES, take_snapshot
from tests.faults import Fault, FaultyOs, ObjectFileSystem, Schedule, register

register()
pytestmark = pytest.mark.core


@pytest.fixture(params=["file", "memory", "objects"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    backend = make_backend(str(tmp_path) if request.param == "file" else f"{request.param}://{uuid.uuid4().hex}")
    backend.makedirs()
    return backend


@pytest.fixture
def local(tmp_path: Path) -> LocalBackend:
    backend = make_backend(str(tmp_path))
    assert isinstance(backend, LocalBackend)
    return backend


def faulty(monkeypatch: pytest.MonkeyPatch, url: str, protocol: str, *faults: Fault) -> tuple[Backend, Schedule]:
    schedule = Schedule(*faults)
    monkeypatch.setattr(backends, "os", FaultyOs(schedule))
    options = {"target_protocol": protocol, "schedule": schedule}
    return make_backend("faulty:///" + url.split("://")[-1].lstrip("/"), options), schedule


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("/a/b", LocalBackend),
        ("file:///a/b", LocalBackend),
        ("local:///a", LocalBackend),
        ("memory://a/b", MemoryBackend),
        ("objects://a/b", FolderBackend),
    ],
)
def test_kind_by_protocol(url: str, kind: type[Backend]) -> None:
    assert type(make_backend(url)) is kind


@pytest.mark.parametrize("protocol", ["gs", "gcs", "az", "abfs"])
def test_cloud_protocols_use_the_object_store_backend(protocol: str) -> None:
    cls = fsspec.get_filesystem_class(protocol)
    protocols = (cls.protocol,) if isinstance(cls.protocol, str) else cls.protocol
    assert all(backends._BACKENDS.get(one, Backend) is Backend for one in protocols)


@pytest.mark.parametrize("exclusive", [False, True])
def test_write_and_read(backend: Backend, exclusive: bool) -> None:
    backend.write("a.json", b"abc", owner="run-000001", exclusive=exclusive)
    assert backend.read("a.json") == b"abc"
    assert backend.size("a.json") == 3
    assert backend.list() == {"a.json": 3}
    assert backend.open("a.json").read() == b"abc"
    assert backend.url("a.json").endswith("a.json")
    backend.delete("a.json")
    backend.delete("a.json")
    assert backend.size("a.json") is None
    assert backend.list() == {}
    with pytest.raises(FileNotFoundError):
        backend.read("a.json")


def test_exclusive_write_of_a_name_that_is_taken(backend: Backend) -> None:
    backend.write("a", b"first", owner="x", exclusive=True)
    with pytest.raises(FileExistsError):
        backend.write("a", b"second", owner="x", exclusive=True)
    assert backend.read("a") == b"first"
    assert backend.list() == {"a": 5}
    backend.write("a", b"third", owner="x")
    assert backend.read("a") == b"third"


def test_exclusive_write_has_one_winner(backend: Backend) -> None:
    outcomes: list[int] = []
    gate = threading.Barrier(8)

    def run(number: int) -> None:
        gate.wait()
        try:
            backend.write("a", str(number).encode(), owner="x", exclusive=True)
            outcomes.append(number)
        except FileExistsError:
            pass

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 1
    assert backend.read("a") == str(outcomes[0]).encode()
    assert backend.list() == {"a": 1}


def test_folder_below(backend: Backend) -> None:
    backend.write("attempts/a.json", b"abc", owner="x", exclusive=True)
    backend.write("attempts/a.json", b"abcd", owner="x")
    assert backend.list("attempts") == {"a.json": 4}
    assert backend.list() == {}
    assert backend.entries() == {"attempts": None}
    assert backend.list("elsewhere") == {}
    assert backend.size("attempts") is None


def test_version_changes_with_every_write(backend: Backend) -> None:
    versions = set()
    for _ in range(5):
        backend.write("a", b"same", owner="x")
        entry = backend.entries()["a"]
        assert entry is not None
        assert entry.version is not None
        versions.add(entry)
    assert len(versions) > 1  # as fine as the clock of the disk
    assert backend.entries() == backend.entries()


def test_read_many(backend: Backend) -> None:
    for name in ("a", "b"):
        backend.write(name, name.encode(), owner="x")
    found = backend.read_many(["a", "missing", "b"])
    assert (found["a"], found["b"]) == (b"a", b"b")
    assert isinstance(found["missing"], FileNotFoundError)
    assert backend.read_many([]) == {}


def test_read_many_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An asynchronous filesystem is asked for all files in one call, also where the folder looks like a pattern."""
    from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper

    make_backend("memory://many[1]").write("a", b"1", owner="x")
    backend = Backend(AsyncFileSystemWrapper(fsspec.filesystem("memory"), asynchronous=False), "/many[1]")
    found = backend.read_many(["a", "missing"])
    assert found["a"] == b"1"
    assert isinstance(found["missing"], FileNotFoundError)


@pytest.mark.parametrize("size", [0, 1, 10_000, 100_000])
def test_payload(backend: Backend, size: int) -> None:
    data = os.urandom(size)
    pieces = [memoryview(data)[start : start + 7000] for start in range(0, size, 7000)]
    backend.write_payload("a.ckpt", pieces, size)
    assert backend.read("a.ckpt") == data
    assert b"".join(backend.chunks("a.ckpt", 4096)) == data
    assert all(len(chunk) <= 4096 for chunk in backend.chunks("a.ckpt", 4096))
    assert backend.list() == {"a.ckpt": size}
    with pytest.raises(FileNotFoundError):
        list(backend.chunks("missing"))


def test_payload_of_odd_buffers(backend: Backend) -> None:
    import array

    numbers = array.array("d", range(1000))
    backend.write_payload("a.ckpt", [memoryview(numbers), b"", bytearray(b"end")], 8003)
    assert backend.read("a.ckpt") == numbers.tobytes() + b"end"


@pytest.mark.parametrize("existing", [None, b"older"])
@pytest.mark.parametrize("how", ["raise at first", "raise later", "short", "long", "refused"])
def test_failed_payload(backend: Backend, how: str, existing: bytes | None) -> None:
    """Nothing appears, and what had the name stays, also after the file object is dropped."""
    if existing is not None:
        backend.write("a.ckpt", existing, owner="x")

    def chunks() -> Iterator[bytes]:
        if how == "raise at first":
            raise ZeroDivisionError
        yield b"x" * 6000
        if how == "raise later":
            raise ZeroDivisionError
        yield b"x" * (6000 if how != "short" else 5999)
        if how == "long":
            yield b"x"

    def confirm() -> None:
        if how == "refused":
            raise ZeroDivisionError

    with pytest.raises(OSError if how in ("short", "long") else ZeroDivisionError):
        backend.write_payload("a.ckpt", chunks(), 12_000, confirm)
    gc.collect()
    assert backend.list() == ({} if existing is None else {"a.ckpt": len(existing)})
    backend.write_payload("a.ckpt", [b"x" * 12_000], 12_000)
    assert backend.size("a.ckpt") == 12_000


def test_confirm_comes_before_anything_appears(backend: Backend) -> None:
    seen = []
    backend.write_payload("a.ckpt", [b"abc"], 3, lambda: seen.append(backend.size("a.ckpt")))
    assert seen == [None]


def test_short_writes_are_completed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    data = os.urandom(50_000)
    for protocol, url in (("file", str(tmp_path)), ("objects", f"objects://{uuid.uuid4().hex}")):
        backend, _ = faulty(monkeypatch, url, protocol, Fault("short", op="write"))
        backend.write_payload("a.ckpt", [data], len(data))
        assert backend.read("a.ckpt") == data


def test_private_instance() -> None:
    first, _ = make_filesystem("memory://a")
    second, _ = make_filesystem("memory://a")
    assert first is not second
    assert first is not fsspec.filesystem("memory")


@pytest.mark.parametrize(
    ("url", "options", "error", "words"),
    [
        ("nosuch://a/b", {}, ValueError, r"dirpath='nosuch://a/b'.*'nosuch'.*gs"),
        ("memory://a", {"nonsense": 3, "protocol": "zzz"}, ValueError, "dirpath='memory://a'"),
    ],
)
def test_bad_url(url: str, options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make_backend(url, options)


def test_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(protocol: str) -> type:
        raise ImportError(f"Install {protocol}fs")

    monkeypatch.setattr(backends.fsspec, "get_filesystem_class", not_installed)
    with pytest.raises(ImportError, match=r"pip install 'lightning-ckpt-policy\[s3\]'"):
        make_backend("s3://bucket/run")
    with pytest.raises(ImportError, match=r"dirpath='sftp://host/run'.*Install sftpfs"):
        make_backend("sftp://host/run")


def test_no_secret_in_the_error_of_a_refused_option(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(url: str, **options: Any) -> None:
        raise ValueError(f"bad connection string {options['connection_string']}")

    monkeypatch.setattr(backends.fsspec.core, "url_to_fs", refuse)
    with pytest.raises(ValueError, match="dirpath=") as caught:
        make_backend("memory://a", {"connection_string": "AccountKey=abcdef"})
    assert "abcdef" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_redact() -> None:
    options = {"a": "abcd", "b": {"c": [b"abcdefg"]}, "d": 7, "e": "xy"}
    assert redact("abcd abcdefg 7 xy", options) == "*** *** 7 xy"
    assert redact("text", None) == "text"


# Local files


def test_bare_folder_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for url in (".", "run", "./run"):
        backend = make_backend(url)
        backend.makedirs()
        backend.write("a", b"1", owner="x")
        assert backend.list()["a"] == 1
    assert (tmp_path / "run" / "a").exists()
    assert (tmp_path / "a").exists()


def test_folders_are_made_durably(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, schedule = faulty(monkeypatch, f"{tmp_path}/a/b/c", "file")
    backend.makedirs()
    backend.makedirs()
    synced = [path for op, path in schedule.log if op == "os.fsync"]
    assert synced == [f"{tmp_path}/a/b", f"{tmp_path}/a", str(tmp_path)]


def test_temporary_of_a_kill_is_replaced(local: LocalBackend, tmp_path: Path) -> None:
    """Without markers, as under stock ModelCheckpoint, the next write of the name takes the debris away."""
    assert local.temporary("a.ckpt") == ".a.ckpt.tmp"
    (tmp_path / ".a.ckpt.tmp").write_bytes(b"left by a kill, and longer than what comes")
    local.write_payload("a.ckpt", [b"abc"], 3)
    assert local.list() == {"a.ckpt": 3}


def test_rename_that_was_repeated(local: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS may answer ENOENT to a rename that it repeated after it had succeeded."""
    replace = os.replace

    def twice(source: str, target: str) -> None:
        replace(source, target)
        raise FileNotFoundError(errno.ENOENT, "answer to the second")

    monkeypatch.setattr(os, "replace", twice)
    local.write_payload("a.ckpt", [b"abc"], 3)
    local.write("a.json", b"{}", owner="x")
    assert local.list() == {"a.ckpt": 3, "a.json": 2}

    def never(source: str, target: str) -> None:
        os.remove(source)
        raise FileNotFoundError(errno.ENOENT, "someone swept it")

    monkeypatch.setattr(os, "replace", never)
    for write in (
        lambda: local.write_payload("b.ckpt", [b"abc"], 3),
        lambda: local.write("b.json", b"{}", owner="x"),
        lambda: local.write("a.json", b"[]", owner="x"),
    ):
        with pytest.raises(FileNotFoundError):
            write()
    assert local.list() == {"a.ckpt": 3, "a.json": 2}
    assert local.read("a.json") == b"{}"


def test_link_that_was_repeated(local: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def twice(source: str, target: str) -> None:
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", twice)
    local.write("a", b"1", owner="x", exclusive=True)
    with pytest.raises(FileExistsError):
        local.write("a", b"2", owner="x", exclusive=True)
    assert local.list() == {"a": 1}


def test_no_hard_links(local: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: str, target: str) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    local.write("a", b"1", owner="x", exclusive=True)
    with pytest.raises(FileExistsError):
        local.write("a", b"2", owner="x", exclusive=True)
    assert local.read("a") == b"1"
    assert local.list() == {"a": 1}


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL])
def test_space_that_cannot_be_reserved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int) -> None:
    fault = Fault("error", op="os.posix_fallocate", error=lambda: OSError(code, "not here"))
    backend, schedule = faulty(monkeypatch, str(tmp_path), "file", fault)
    backend.write_payload("a.ckpt", [b"abc"], 3)
    assert schedule.hits == 1
    assert backend.read("a.ckpt") == b"abc"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_disk_that_is_full(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int) -> None:
    fault = Fault("error", op="os.posix_fallocate", error=lambda: OSError(code, "full"))
    backend, schedule = faulty(monkeypatch, str(tmp_path), "file", fault)
    with pytest.raises(OSError, match="the disk is full: 3 bytes are needed") as caught:
        backend.write_payload("a.ckpt", [b"abc"], 3)
    assert caught.value.errno == code
    assert "write" not in [op for op, _ in schedule.log]
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("op", ["os.fsync", "close"])
def test_error_that_comes_late(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, op: str) -> None:
    """NFS may report a failed write only at fsync or close."""
    backend, _ = faulty(monkeypatch, str(tmp_path), "file", Fault("error_after", op=op, kth=1))
    with pytest.raises(OSError, match="injected"):
        backend.write_payload("a.ckpt", [b"abc"], 3)
    assert os.listdir(tmp_path) == []
    backend, _ = faulty(monkeypatch, str(tmp_path), "file", Fault("error_after", op=op, kth=1))
    with pytest.raises(OSError, match="injected"):
        backend.write("a.json", b"abc", owner="x", exclusive=True)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("existing", [False, True])
def test_folder_that_cannot_be_synced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, existing: bool) -> None:
    """A new file goes again, since a power cut could take it; what replaced another stays, being whole."""
    if existing:
        (tmp_path / "a.ckpt").write_bytes(b"old")
    backend, _ = faulty(monkeypatch, str(tmp_path), "file", Fault("error", op="os.fsync", path=tmp_path.name, kth=1))
    with pytest.raises(OSError, match="injected"):
        backend.write_payload("a.ckpt", [b"new!"], 4)
    assert backend.list() == ({"a.ckpt": 4} if existing else {})
    unsupported = Fault("error", op="os.fsync", path=tmp_path.name, error=lambda: OSError(errno.EINVAL, "not here"))
    backend, _ = faulty(monkeypatch, str(tmp_path), "file", unsupported)
    backend.write_payload("b.ckpt", [b"new!"], 4)
    assert backend.size("b.ckpt") == 4


def test_large_payload_is_synced_on_the_way(
    local: LocalBackend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    backend, schedule = faulty(monkeypatch, str(tmp_path), "file")
    chunk = bytes(8 << 20)
    backend.write_payload("a.ckpt", (chunk for _ in range(9)), 9 * len(chunk))
    operations = [op for op, path in schedule.log if op in ("write", "os.fsync", "os.replace")]
    assert operations == ["write"] * 4 + ["os.fsync"] + ["write"] * 4 + ["os.fsync", "write", "os.fsync"] + [
        "os.replace",
        "os.fsync",
    ]


@pytest.mark.parametrize(
    ("path", "kind"), [("/home/me/run/x", True), ("/home/mean/x", False), ("/mnt/a b/x", True), ("/etc/x", False)]
)
def test_nfs_is_recognised(path: str, kind: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """There the C library would reserve space by writing to every block over the network."""
    mounts = (
        "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
        "30 22 0:40 / /home/me rw shared:2 - nfs server:/home rw,vers=3\n"
        "31 22 0:41 / /mnt/a\\040b rw - nfs4 server:/b rw\n"
    )
    monkeypatch.setattr("builtins.open", lambda *_, **__: io.StringIO(mounts))
    monkeypatch.setattr(os.path, "realpath", lambda path: path)
    assert backends._is_nfs(path) is kind


# Object stores


@pytest.mark.parametrize("error", [FileExistsError("there"), OSError(errno.EINVAL, "Invalid"), ConnectionResetError()])
@pytest.mark.parametrize("exclusive", [False, True])
def test_lost_acknowledgement(monkeypatch: pytest.MonkeyPatch, error: Exception, exclusive: bool) -> None:
    url = f"objects://{uuid.uuid4().hex}"
    fault = Fault("error_after", op="pipe_file", error=lambda: error)
    backend, _ = faulty(monkeypatch, url, "objects", fault)
    backend.write("a", b"mine", owner="x", exclusive=exclusive)
    assert backend.read("a") == b"mine"


@pytest.mark.parametrize("error", [OSError(errno.EINVAL, "Invalid"), ConnectionResetError()])
def test_name_taken_by_another(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    url = f"objects://{uuid.uuid4().hex}"
    make_backend(url).write("a", b"theirs", owner="x")
    backend, _ = faulty(monkeypatch, url, "objects", Fault("error", op="pipe_file", error=lambda: error))
    with pytest.raises(FileExistsError):
        backend.write("a", b"mine", owner="x", exclusive=True)
    assert backend.read("a") == b"theirs"


def test_upload_that_loses_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"objects://{uuid.uuid4().hex}"
    backend, _ = faulty(monkeypatch, url, "objects", Fault("truncate", op="write", kth=1))
    with pytest.raises(OSError, match="arrived instead of"):
        backend.write_payload("a.ckpt", [b"x" * 10_000], 10_000)
    assert backend.list() == {}


@pytest.mark.parametrize("dropped", ["after discard fails", "after all"])
def test_dropped_upload_is_not_finished(monkeypatch: pytest.MonkeyPatch, dropped: str) -> None:
    calls: list[str] = []
    original: Callable[..., None] = ObjectFileSystem.pipe_file

    def counted(self: ObjectFileSystem, path: str, *args: Any, **kwargs: Any) -> None:
        calls.append(path)
        original(self, path, *args, **kwargs)

    monkeypatch.setattr(ObjectFileSystem, "pipe_file", counted)
    url = f"objects://{uuid.uuid4().hex}"
    faults = [Fault("error", op="write", kth=2)]
    if dropped == "after discard fails":
        faults.append(Fault("error", op="discard"))
    backend, _ = faulty(monkeypatch, url, "objects", *faults)
    with pytest.raises(OSError, match="injected"):
        backend.write_payload("a.ckpt", [b"x" * 5000] * 3, 15_000)
    gc.collect()
    assert calls == []


def test_redact_knows_how_values_are_quoted() -> None:
    key = "-----BEGIN KEY-----\nMIIEvQIBADANBg\nkqhkiG9w0BAQEF\n-----END KEY-----"
    options = {"token": {"private_key": key}, "sig": "abc/def+ghi=="}
    for text in (repr(options), json.dumps(options), "?sig=abc%2Fdef%2Bghi%3D%3D&x", "?sig=abc/def%2Bghi%3D%3D", key):
        assert not any(part in redact(text, options) for part in ("MIIEvQ", "kqhkiG9", "abc/def", "abc%2Fdef"))


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="this system always uses its page cache")
@pytest.mark.parametrize(
    ("refuses", "direct"),
    [
        (None, [True, True, True, False]),
        ("set", [False, False, False, False]),
        (0, [True, False, False, False, False]),
        (1, [True, True, False, False, False]),
    ],
)
def test_aligned_chunks_pass_the_page_cache_by(
    local: LocalBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: str | int | None, direct: list[bool]
) -> None:
    """What isn't aligned, and what the filesystem doesn't take in this way, goes through it."""
    write_all, setfl = backends._write_all, backends.fcntl.F_SETFL
    seen: list[bool] = []

    def write(file: Any, data: Any) -> int:
        seen.append(bool(real(file.fileno(), backends.fcntl.F_GETFL) & os.O_DIRECT))
        if len(seen) - 1 == refuses:
            write_all(file, data[:4096])
            raise OSError(errno.EINVAL, "not in this way")
        return write_all(file, data)

    def control(descriptor: int, command: int, *args: Any) -> int:
        if refuses == "set" and command == setfl:
            raise OSError(errno.EINVAL, "not here")
        return real(descriptor, command, *args)

    real = backends.fcntl.fcntl
    monkeypatch.setattr(backends, "_write_all", write)
    monkeypatch.setattr(backends.fcntl, "fcntl", control)
    chunks = list(take_snapshot({"a": torch.randn(7 * CHUNK_BYTES // 8)}).chunks())
    size = sum(chunk.nbytes for chunk in chunks)
    local.write_payload("a.ckpt", chunks, size)
    assert (tmp_path / "a.ckpt").read_bytes() == b"".join(chunks)
    if refuses is None and not any(seen):
        pytest.skip("the temporary folder's filesystem has no O_DIRECT")
    assert seen == direct
