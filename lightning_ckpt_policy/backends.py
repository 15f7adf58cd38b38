"""Files of one folder on an fsspec filesystem: whole or absent under their names, and durable once written.

There is one class per kind of filesystem, because what makes a file durable differs: a local file needs a temporary,
fsync and a rename; an object appears only once its upload is finished and is never renamed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import os
import re
import threading
import uuid
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO
from urllib.parse import quote, quote_plus

import fsspec
import fsspec.core
import numpy as np

CHUNK_BYTES = 8 << 20
_SYNC_BYTES = 32 << 20
_BLOCK_BYTES = 4096
PROBE = ".write-test.tmp"
_VERSION_KEYS = ("mtime", "ino", "created", "etag", "ETag", "generation", "updated", "LastModified", "last_modified")
_COMMON_PROTOCOLS = ("a local path", "file", "gs", "gcs", "az", "abfs", "s3", "memory")
MOST_CONNECTIONS = 128
_EXTRAS = {"s3": "s3", "s3a": "s3"}
_NOT_RESERVABLE = (errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS, errno.ENODEV)
_NO_LINKS = (errno.EOPNOTSUPP, errno.ENOTSUP, errno.EPERM, errno.ENOSYS, errno.EMLINK)


def check_transfer(connections: object, part_bytes: object) -> None:
    """See that ``connections`` and ``part_bytes`` are None or within what the stores take.

    Raises:
        ValueError: One isn't; it is named.

    >>> check_transfer(8, 16 << 20)
    """
    limits = (("connections", connections, 1, MOST_CONNECTIONS), ("part_bytes", part_bytes, 5 << 20, 4000 << 20))
    for name, value, least, most in limits:
        good = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
        if value is not None and not good:
            raise ValueError(
                f"{name}={value!r}: an integer from {least:,} to {most:,} was expected, or None to choose it"
            )


@dataclass(frozen=True)
class Entry:
    """A file as a listing shows it: its size in bytes, and whatever tells one version of it from the next."""

    size: int
    version: Hashable | None


class Backend:
    """One folder of an object store (GCS, Azure, S3 and others).

    Names are plain file names or ``"attempts/<name>"``; whoever calls has checked them. Nothing is ever renamed.

    Args:
        fs: An fsspec filesystem that nobody else uses.
        root: The folder's path on it.

    Attributes:
        retry_same_name: Whether a failed write may be tried again under its name. An unfinished upload can stay behind
            unseen in an object store and spoil the next one of that name.
        slow_reads: Whether a read takes long: a catalogue spares many of them, and a payload's ranges are read at once.
        deletes_at_once: Checkpoints that are deleted at a time, where there are several.
        fresh: Makes another filesystem like ``fs``.
        connections: Requests for the parts of one payload at once, where it goes in parts; None chooses from its size.
        part_bytes: Bytes of a part, where there are parts; None chooses from the payload's size.
    """

    retry_same_name = False
    slow_reads = False
    deletes_at_once = 1
    fresh: Callable[[], Any]
    connections: int | None = None
    part_bytes: int | None = None

    def __init__(self, fs: Any, root: str, storage_options: Mapping[str, Any] | None = None) -> None:
        self.fs = fs
        self.root = root.rstrip("/")
        self._options = storage_options

    def _call(self, doing: str, method: str, path: str, *args: Any, **options: Any) -> Any:
        """Call a method of the filesystem; ``doing`` says what for: to "write", "read", "list" or "delete"."""
        return getattr(self.fs, method)(path, *args, **options)

    @contextlib.contextmanager
    def time_limit(self, seconds: float | None) -> Iterator[None]:
        """End this thread's requests once ``seconds`` have passed since now, where the filesystem can."""
        yield

    def path(self, name: str) -> str:
        """The path of ``name`` as the filesystem wants it."""
        return f"{self.root}/{name}" if name else self.root

    def url(self, name: str) -> str:
        """The path or URL a user can open."""
        return str(self.fs.unstrip_protocol(self.path(name)))

    def temporary(self, name: str, tag: str = "") -> str | None:
        """The name of the temporary that a kill can leave of the payload ``name``; None if there is none."""
        return None

    def makedirs(self) -> None:
        """Make the folder. Object stores have none; it appears with its first object."""

    def is_file(self) -> bool:
        """Whether a file lies where the folder should be."""
        try:
            return bool(self._call("read", "info", self.root or "/")["type"] == "file")
        except (ConnectionError, TimeoutError):  # a write would have to wait in vain for as long again
            raise
        except Exception:  # not there, or not for us to ask about; whether it can be written to is what counts
            return False

    def probe(self) -> bool:
        """Write and delete a small file; any error means that the folder isn't writable.

        Returns:
            Whether an exclusive write left the file that was there alone.
        """
        self._call("write", "pipe_file", self.path(PROBE), b"write test")
        try:
            # twice, since another process may delete the file in between
            return not all(self._overwrites(f"again {number}".encode()) for number in (1, 2))
        finally:
            self.delete(PROBE)

    def _overwrites(self, data: bytes) -> bool:
        try:
            self.write(PROBE, data, owner="", exclusive=True)
        except FileExistsError:
            return False
        return True

    def entries(self, folder: str = "") -> dict[str, Entry | None]:
        """Everything in the folder by name: an ``Entry`` for a file, else None. A missing folder is empty."""
        prefix = self.path(folder).rstrip("/") + "/"
        try:
            listing = self._call("list", "ls", self.path(folder) or "/", detail=True)
        except FileNotFoundError:
            return {}
        found: dict[str, Entry | None] = {}
        for info in listing:
            path = str(info["name"]).rstrip("/")
            name = path[len(prefix) :]
            if not path.startswith(prefix) or not name or "/" in name:
                continue  # an object store may list the folder's own placeholder
            if info.get("islink"):
                with contextlib.suppress(FileNotFoundError):
                    info = self._call("read", "info", path)  # what it points to
            if info["type"] == "file":
                version = tuple(info.get(key) for key in _VERSION_KEYS)
                known = any(part is not None for part in version)
                found[name] = Entry(int(info.get("size") or 0), version if known else None)
            else:
                found[name] = None
        return found

    def names(self) -> set[str]:
        """The names of everything in the folder; cheaper than `entries` where there are many."""
        try:
            listing = self._call("list", "ls", self.root or "/", detail=False)
        except FileNotFoundError:
            return set()
        return {str(path).rstrip("/").rpartition("/")[2] for path in listing}

    def list(self, folder: str = "") -> dict[str, int]:
        """The files in the folder and their sizes in bytes. A missing folder is empty."""
        return {name: entry.size for name, entry in self.entries(folder).items() if entry is not None}

    def size(self, name: str) -> int | None:
        """Bytes of a file, None if there is none."""
        try:
            info = self._call("read", "info", self.path(name))
        except FileNotFoundError:
            return None
        return int(info["size"]) if info["type"] == "file" else None

    def read(self, name: str) -> bytes:
        """A small file whole.

        Raises:
            FileNotFoundError: There is no such file.
        """
        return bytes(self._call("read", "cat_file", self.path(name)))

    def read_many(self, names: Iterable[str]) -> dict[str, bytes | Exception]:
        """Small files whole, each with its bytes or the error that reading it gave; at once where the store can."""
        wanted = tuple(names)
        if not wanted:
            return {}
        if not getattr(self.fs, "async_impl", False):
            return {name: self._read_or_error(name) for name in wanted}
        results = self.fs.cat_ranges([self.path(name) for name in wanted], None, None, on_error="return")
        return dict(zip(wanted, results, strict=True))

    def open(self, name: str) -> BinaryIO:
        """A file to read from, at any position.

        Raises:
            FileNotFoundError: There is no such file.
        """
        file: BinaryIO = self.fs.open(self.path(name), "rb")
        return file

    def _read_or_error(self, name: str) -> bytes | Exception:
        try:
            return self.read(name)
        except Exception as error:
            return error

    def chunks(self, name: str, chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
        """A file's bytes, ``chunk_bytes`` at a time.

        Raises:
            FileNotFoundError: There is no such file.
        """
        path = self.path(name)
        size = int(self.fs.info(path)["size"])
        for start in range(0, size, chunk_bytes):
            yield bytes(self.fs.cat_file(path, start=start, end=min(start + chunk_bytes, size)))

    def write(self, name: str, data: bytes, *, owner: str, exclusive: bool = False) -> None:
        """Write a small file: durable on return, at every moment whole or absent (or its older self) under its name.

        Args:
            name: Its name.
            data: Its bytes. For an exclusive write they must be unlike anyone else's.
            owner: Whose write it is; a temporary that a kill leaves is called ``.<owner>.<8 hex digits>.tmp``.
            exclusive: Whether the file must not exist yet.

        Raises:
            FileExistsError: ``exclusive``, and there is such a file.
        """
        path = self.path(name)
        try:
            if exclusive:
                self._call("write", "pipe_file", path, data, mode="create")
            else:
                self._call("write", "pipe_file", path, data)
        except Exception as error:
            # the answer to a write that succeeded may have been lost, so what lies there decides
            there = self._read_or_error(name)
            if there == data:
                return
            if exclusive and isinstance(there, bytes):
                raise FileExistsError(errno.EEXIST, "there is such a file already", path) from error
            raise
        try:
            self._compare_small(name, data)
        except OSError:
            if exclusive:
                self._discard(name)
            raise

    def _compare_small(self, name: str, data: bytes) -> None:
        """Raise an ``OSError`` if a small file isn't what was written."""
        arrived = self.size(name)
        if arrived != len(data):
            raise size_error(self.path(name), arrived, len(data))

    def write_payload(
        self,
        name: str,
        chunks: Iterable[bytes | memoryview],
        size: int,
        confirm: Callable[[], None] = lambda: None,
        tag: str = "",
    ) -> None:
        """Write a large file: on return it is durable and whole under ``name``; on an error nothing new is there.

        Args:
            name: Its name. A file that has it already stays whole until this one takes its place.
            chunks: Its bytes.
            size: How many they are.
            confirm: Called after the last byte was handed over and before the file appears under its name. If it
                raises, nothing appears.
            tag: Goes into the name of the temporary, so that two writers never share one.
        """
        path = self.path(name)
        new = self.size(name) is None
        file = self.fs.open(path, "wb")
        closing = False
        try:
            written = sum(_write_all(file, chunk) for chunk in chunks)
            if written != size:
                raise size_error(path, written, size)
            confirm()
            closing = True
            file.close()
            arrived = self.size(name)
            if arrived != size:
                raise size_error(path, arrived, size)
        except BaseException:
            # closing an fsspec file finishes its upload, and so does dropping it, whatever became of the bytes
            _abandon(file)
            if closing and new:
                self._discard(name)
            raise

    def delete(self, name: str) -> None:
        """Delete a file; a missing one is fine."""
        with contextlib.suppress(FileNotFoundError):
            self._call("delete", "rm_file", self.path(name))

    def drop_unfinished(self, name: str, tag: str) -> Sequence[str]:
        """Remove what a killed `write_payload` of that name and tag left. Returns the names of deleted files."""
        temporary = self.temporary(name, tag)
        if temporary is None or self.size(temporary) is None:
            return []
        self.delete(temporary)
        return [temporary]

    def _discard(self, name: str) -> None:
        with contextlib.suppress(Exception):
            self.delete(name)


class FolderBackend(Backend):
    """One folder of a filesystem that isn't known, and may be one with folders that have to be made first."""

    def makedirs(self) -> None:
        self._makedirs(self.root)

    def _makedirs(self, path: str) -> None:
        with contextlib.suppress(Exception):  # whether it can be written to is what counts
            self.fs.makedirs(path, exist_ok=True)

    def write(self, name: str, data: bytes, *, owner: str, exclusive: bool = False) -> None:
        """As ``Backend.write``."""
        if "/" in name:
            self._makedirs(self.path(name).rpartition("/")[0])
        super().write(name, data, owner=owner, exclusive=exclusive)


class MemoryBackend(Backend):
    """One folder of fsspec's in-memory filesystem, for tests. Lives and dies with the process."""

    retry_same_name = True
    _lock = threading.Lock()

    def open(self, name: str) -> BinaryIO:
        return io.BytesIO(self.read(name))  # fsspec hands out the stored file itself, with one position for all readers

    def write(self, name: str, data: bytes, *, owner: str, exclusive: bool = False) -> None:
        """As ``Backend.write``; fsspec's own exclusive write isn't atomic between threads."""
        with self._lock:
            if exclusive and self.size(name) is not None:
                raise FileExistsError(errno.EEXIST, "there is such a file already", self.path(name))
            try:
                super().write(name, data, owner=owner)
            except BaseException:
                if exclusive:
                    self._discard(name)
                raise

    def write_payload(
        self,
        name: str,
        chunks: Iterable[bytes | memoryview],
        size: int,
        confirm: Callable[[], None] = lambda: None,
        tag: str = "",
    ) -> None:
        """As ``Backend.write_payload``, in one piece: a file opened in memory is visible before it is filled."""
        data = b"".join(chunks)
        if len(data) != size:
            raise size_error(self.path(name), len(data), size)
        confirm()
        new = self.size(name) is None
        try:
            super().write(name, data, owner="")
        except BaseException:
            if new:
                self._discard(name)
            raise


class LocalBackend(Backend):
    """One folder on a disk or a shared POSIX filesystem.

    A file is written to a temporary beside its target, synced, renamed, and its folder synced: in that order, so that
    neither a kill nor a power cut shows half a file under a final name. ``$TMPDIR`` is never used.
    """

    retry_same_name = True

    def url(self, name: str) -> str:
        return self.path(name) or "/"

    def temporary(self, name: str, tag: str = "") -> str | None:
        return f".{name}.{tag}.tmp" if tag else f".{name}.tmp"

    def makedirs(self) -> None:
        """Make the folder and every missing one above it, durably."""
        self._makedirs(self.root or "/")

    def _makedirs(self, folder: str) -> None:
        missing = []
        while folder not in ("", "/") and not os.path.isdir(folder):
            missing.append(folder)
            folder = os.path.dirname(folder)
        if missing:
            self.fs.makedirs(missing[0], exist_ok=True)
        for made in missing:
            _sync_folder(os.path.dirname(made) or "/")

    def chunks(self, name: str, chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
        with self.fs.open(self.path(name), "rb") as file:
            while chunk := file.read(chunk_bytes):
                yield chunk

    def write(self, name: str, data: bytes, *, owner: str, exclusive: bool = False) -> None:
        path = self.path(name)
        size = len(data)
        with _telling_of_a_full_disk(path, size):
            folder = os.path.dirname(path)
            temporary = f"{folder}/.{owner}.{uuid.uuid4().hex[:8]}.tmp"
            try:
                file = self.fs.open(temporary, "xb")
            except FileNotFoundError:
                self._makedirs(folder)
                file = self.fs.open(temporary, "xb")
            placed = False
            try:
                _write_all(file, data)
                self._finish(file, temporary, len(data))
                if not exclusive:
                    self._rename(temporary, path, lambda: self.read(name) == data)
                elif not self._link(temporary, path):
                    self._create(path, data)
                placed = True
                if exclusive:
                    self._remove(temporary)
                _sync_folder(folder)
            except BaseException:
                self._close_and_remove(file, temporary)
                if exclusive and placed:
                    self._discard(name)
                raise

    def write_payload(
        self,
        name: str,
        chunks: Iterable[bytes | memoryview],
        size: int,
        confirm: Callable[[], None] = lambda: None,
        tag: str = "",
    ) -> None:
        path = self.path(name)
        with _telling_of_a_full_disk(path, size):
            temporary = self.path(self.temporary(name, tag) or "")
            new = not os.path.lexists(path)
            file = self.fs.open(temporary, "wb")
            renamed = False
            try:
                _reserve(file, path, size)
                unsynced = 0
                direct = not _is_nfs(path) and _set_direct(file, True)
                for chunk in chunks:
                    if direct and not _is_aligned(chunk):
                        direct = not _set_direct(file, False)
                    if direct:
                        direct = _write_direct(file, chunk)
                        continue
                    unsynced += _write_all(file, chunk)
                    if unsynced >= _SYNC_BYTES:
                        # evens out the disk's work and lets a failing disk be heard early
                        file.flush()
                        os.fsync(file.fileno())
                        unsynced = 0
                self._finish(file, temporary, size)
                confirm()
                self._rename(temporary, path, lambda: self.size(name) == size and not os.path.lexists(temporary))
                renamed = True
                if (arrived := self.size(name)) != size:
                    raise size_error(path, arrived, size)
                _sync_folder(self.root or "/")
            except BaseException:
                self._close_and_remove(file, temporary)
                if renamed and new:
                    self._discard(name)
                raise

    def probe(self) -> bool:
        self._call("write", "pipe_file", self.path(PROBE), b"write test")
        self.delete(PROBE)
        return True  # the system's own promise

    def delete(self, name: str) -> None:
        """Delete a file, durably; a missing one is fine."""
        path = self.path(name)
        try:
            self.fs.rm_file(path)
        except FileNotFoundError:
            return
        _sync_folder(os.path.dirname(path))

    def _rename(self, temporary: str, path: str, done: Callable[[], bool]) -> None:
        try:
            os.replace(temporary, path)
        except FileNotFoundError:
            # NFS may say so of a rename that it repeated after it had succeeded
            if not done():
                raise

    def _link(self, temporary: str, path: str) -> bool:
        """Give ``temporary`` its final name unless that is taken. False where there are no hard links."""
        try:
            os.link(temporary, path)
        except FileExistsError:
            # NFS may say so of a link that it repeated after it had succeeded
            if os.stat(temporary).st_nlink < 2:
                raise
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            return False
        return True

    def _create(self, path: str, data: bytes) -> None:
        file = self.fs.open(path, "xb")
        try:
            _write_all(file, data)
            self._finish(file, path, len(data))
        except BaseException:
            self._close_and_remove(file, path)
            raise

    def _finish(self, file: Any, path: str, size: int) -> None:
        """Sync, close and check the size. Closing counts: NFS may report a failed write only then."""
        file.flush()
        # space that was reserved makes a file look whole, so the position is asked as well
        if file.tell() != size:
            raise size_error(path, file.tell(), size)
        os.fsync(file.fileno())
        file.close()
        arrived = int(self.fs.info(path)["size"])
        if arrived != size:
            raise size_error(path, arrived, size)

    def _close_and_remove(self, file: Any, path: str) -> None:
        with contextlib.suppress(Exception):
            file.close()
        self._remove(path)

    def _remove(self, path: str) -> None:
        with contextlib.suppress(Exception):
            self.fs.rm_file(path)


def make_filesystem(url: str, storage_options: Mapping[str, Any] | None = None) -> tuple[Any, str]:
    """A filesystem of our own for ``url``, and the path on it.

    It is never shared: fsspec's cached instances share transactions and keep listings that other writers make untrue.

    Raises:
        ValueError: The protocol isn't known, or the filesystem refuses the options.
        ConnectionError: It asked a service about the options, and that didn't answer.
        ImportError: The package for the protocol isn't installed.

    >>> fs, path = make_filesystem("memory://bucket/run")
    >>> path
    '/bucket/run'
    """
    options: dict[str, Any] = {**(storage_options or {}), "skip_instance_cache": True, "use_listings_cache": False}
    protocol = url.split("://", 1)[0].split("::", 1)[0] if "://" in url else "file"
    if protocol in _EXTRAS:  # S3: botocore has room for 10 requests at once, and ten thousand records may be there
        options["config_kwargs"] = {"max_pool_connections": MOST_CONNECTIONS, **options.get("config_kwargs", {})}
    try:
        fsspec.get_filesystem_class(protocol)  # type: ignore[no-untyped-call]
    except ValueError as error:
        known = ", ".join(_COMMON_PROTOCOLS)
        raise ValueError(
            f"dirpath={url!r}: fsspec knows no protocol {protocol!r}; use one of {known}, "
            "or another of fsspec.available_protocols()"
        ) from error
    except ImportError as error:
        extra = _EXTRAS.get(protocol)
        fix = f"pip install 'lightning-ckpt-policy[{extra}]'" if extra else f"what is missing: {error}"
        raise ImportError(f"dirpath={url!r}: the package for {protocol!r} isn't installed; {fix}") from error
    try:
        if "://" not in url:  # fsspec would take a "::" in a local path for a chain of filesystems
            fs = fsspec.filesystem("file", **options)  # type: ignore[no-untyped-call]
            return fs, str(fs._strip_protocol(url))
        fs, path = fsspec.core.url_to_fs(url, **options)  # type: ignore[no-untyped-call]
    except Exception as error:
        text = redact(str(error) if isinstance(error, (ValueError, TypeError)) else repr(error), storage_options)
        # a text with a secret in it must not come back in the chain of causes either
        cause = error if redact_error(error, storage_options) and "***" not in text else None
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):  # it asked who one is
            raise ConnectionError(
                f"dirpath={url!r}: the filesystem can't be reached with its storage_options: {text}"
            ) from cause
        raise ValueError(f"dirpath={url!r}: the filesystem refuses its storage_options: {text}") from cause
    return _Discreet(fs, storage_options) if storage_options else fs, str(path)


class _Discreet:
    """A filesystem, or a file of it, whose errors don't quote its ``storage_options``."""

    def __init__(self, target: Any, options: Mapping[str, Any]) -> None:
        self.__dict__.update(_target=target, _options=options)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if not callable(value):
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                result = value(*args, **kwargs)
            except Exception as error:
                if redact_error(error, self._options):
                    raise
                raise OSError(redact(f"{type(error).__name__}: {error}", self._options)) from None
            return _Discreet(result, self._options) if name == "open" else result

        return call

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._target, name, value)

    def __enter__(self) -> _Discreet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def redact_error(error: BaseException, options: Mapping[str, Any] | None) -> bool:
    """Take the options' values out of an error and of what caused it; whether their texts are free of them then.

    An ``OSError`` keeps its kind and the path it names, which is no secret.
    """
    seen: list[BaseException] = []
    pending: list[BaseException | None] = [error]
    while pending:
        one = pending.pop()
        if one is None or one in seen:
            continue
        seen.append(one)
        if redact(text := f"{one!r} {one}", options) != text:
            one.args = tuple(redact(part, options) if isinstance(part, str) else part for part in one.args)
            if isinstance(one, OSError) and isinstance(one.strerror, str):
                one.strerror = redact(one.strerror, options)
        pending += [one.__cause__, one.__context__]
    return all(isinstance(one, OSError) or redact(text := f"{one!r} {one}", options) == text for one in seen)


def make_backend(url: str, storage_options: Mapping[str, Any] | None = None) -> Backend:
    """The backend for ``url``, chosen by the filesystem's protocol.

    >>> type(make_backend("memory://bucket/run")).__name__, type(make_backend("/tmp/run")).__name__
    ('MemoryBackend', 'LocalBackend')
    """
    fs, path = make_filesystem(url, storage_options)
    protocol = fs.protocol if isinstance(fs.protocol, str) else fs.protocol[0]
    backend = _BACKENDS.get(protocol)
    if backend is None and getattr(fs, "async_impl", False):
        from lightning_ckpt_policy.object_stores import OBJECT_STORES  # it builds on this module

        backend = OBJECT_STORES.get(protocol)
    made = (backend or FolderBackend)(fs, path, storage_options)
    made.fresh = lambda: make_filesystem(url, storage_options)[0]
    return made


_BACKENDS: dict[str, type[Backend]] = {"file": LocalBackend, "local": LocalBackend, "memory": MemoryBackend}


def redact(text: str, storage_options: Mapping[str, Any] | None) -> str:
    """``text`` without any value of ``storage_options`` that is long enough to be a secret.

    >>> redact("bad key abcdef", {"secret": "abcdef"})
    'bad key ***'
    """
    forms = {form for value in _texts(storage_options or {}) for form in _forms(value)}
    for form in sorted(forms, key=len, reverse=True):
        text = text.replace(form, "***")
    return text


def _forms(value: str) -> set[str]:
    """How a value may be written in an error: as it is, quoted as in Python, JSON or a URL, or line by line."""
    lines = [line for line in value.splitlines() if len(line) >= 8]
    quoted = {repr(value)[1:-1], json.dumps(value)[1:-1], quote(value), quote(value, safe=""), quote_plus(value)}
    return {value, *lines, *quoted}


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, (tuple, list, set)):
        for inner in value:
            yield from _texts(inner)
    elif isinstance(value, bytes):
        yield from _texts(value.decode(errors="replace"))
    elif isinstance(value, str) and len(value) >= 4:
        yield value


def _write_all(file: Any, data: bytes | memoryview) -> int:
    """Write all of ``data``, however little the file takes at a time. Returns its bytes."""
    view = memoryview(data).cast("B")
    size = view.nbytes
    while view.nbytes:
        taken = file.write(view)
        if taken is None:  # some files don't say; they take everything or raise
            break
        if taken <= 0:
            raise OSError(errno.EIO, "the file takes no more bytes")
        view = view[taken:]
    return size


def _set_direct(file: Any, on: bool) -> bool:
    """Let what is written to a file pass the page cache by, or not; whether that could be set.

    It takes a fraction of the processor's time, which training needs, and pushes nothing out of the cache.
    """
    if not hasattr(os, "O_DIRECT"):
        return False
    try:
        flags = fcntl.fcntl(file.fileno(), fcntl.F_GETFL)
        fcntl.fcntl(file.fileno(), fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
    except OSError:  # not every filesystem can
        return False
    return True


def _is_aligned(chunk: bytes | memoryview) -> bool:
    data = np.frombuffer(chunk, np.uint8)
    return data.nbytes % _BLOCK_BYTES == 0 and data.ctypes.data % _BLOCK_BYTES == 0


def _write_direct(file: Any, chunk: bytes | memoryview) -> bool:
    """Write an aligned chunk past the page cache; whether that went well, or it was written through it."""
    start = file.tell()
    try:
        _write_all(file, chunk)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EFAULT) or not _set_direct(file, False):
            raise
        file.seek(start)
        _write_all(file, chunk)
        return False
    return True


def _reserve(file: Any, path: str, size: int) -> None:
    """Reserve the disk space, so that a full disk is found before anything is written."""
    if size == 0 or not hasattr(os, "posix_fallocate") or _is_nfs(path):
        return
    try:
        os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        if error.errno in _NOT_RESERVABLE:
            return
        raise


@contextlib.contextmanager
def _telling_of_a_full_disk(path: str, size: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        there = os.statvfs(os.path.dirname(path))
        raise OSError(
            error.errno,
            f"the disk is full: {size:,} bytes are needed and {there.f_bavail * there.f_frsize:,} are free; "
            "free some space or keep fewer checkpoints",
            path,
        ) from error


def _is_nfs(path: str) -> bool:
    """Whether ``path`` lies on NFS, where the C library reserves space by writing to every block over the network."""
    try:
        with open("/proc/self/mountinfo") as file:
            mounts = [line.split(" - ", 1) for line in file]
    except OSError:
        return False
    kinds = {}
    for left, right in mounts:
        mount = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), left.split()[4])
        kinds[mount.rstrip("/")] = right.split()[0]
    folder = os.path.realpath(os.path.dirname(path))
    while folder.rstrip("/") not in kinds and folder != "/":
        folder = os.path.dirname(folder)
    return kinds.get(folder.rstrip("/"), "").startswith("nfs")


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP):  # some shares can't sync a folder
            raise
    finally:
        os.close(descriptor)


def _abandon(file: Any) -> None:
    """Drop a file that is being written without letting its upload be finished."""
    try:
        file.discard()
    except Exception:
        pass  # what was uploaded stays unfinished, which nobody sees
    finally:
        with contextlib.suppress(Exception):
            file.closed = True


def size_error(path: str, arrived: int | None, size: int) -> OSError:
    what = "nothing" if arrived is None else f"{arrived:,} bytes"
    return OSError(errno.EIO, f"{what} arrived instead of {size:,} bytes", path)
