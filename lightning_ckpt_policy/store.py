"""The checkpoints of one folder: listed, verified, written and deleted so that a kill at any moment loses nothing.

A commit goes: pending marker, payload, record, marker removed. A delete goes: marker, record, payload, marker removed.
So a payload with a record is whole, and one without a record is either named by a marker, which lets the sweep of a
later attempt remove it, or isn't ours.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import io
import json
import math
import os
import re
import socket
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Literal, Protocol, TypeVar

import fsspec
from lightning.fabric.utilities.rank_zero import rank_zero_only
from tqdm import tqdm

from lightning_ckpt_policy import retention
from lightning_ckpt_policy.backends import (
    PROBE,
    Backend,
    Entry,
    LocalBackend,
    check_transfer,
    make_backend,
    redact,
    redact_error,
)
from lightning_ckpt_policy.checksum import ALGORITHM, Checksum, checksum_of
from lightning_ckpt_policy.errors import (
    CheckpointError,
    CheckpointSaveError,
    DamagedCheckpointError,
    PinnedError,
    SupersededError,
)
from lightning_ckpt_policy.record import (
    MAX_RECORD_BYTES,
    PENDING_SUFFIX,
    RECORD_SUFFIX,
    SCHEMA_VERSION,
    CheckpointRecord,
    RecordError,
    is_safe_name,
    is_safe_run_id,
)
from lightning_ckpt_policy.retry import reaching

PAYLOAD_SUFFIX = ".ckpt"
_ATTEMPTS = "attempts"
_CATALOGUE = f"{_ATTEMPTS}/records.catalogue"
_CATALOGUED_FROM = 200  # records that a start would read one by one
_MAX_CATALOGUE_BYTES = 64 << 20
_STATUSES = ("running", "finished", "stopped", "error")
_OPS = ("write", "delete")
_BAR_BYTES = 1 << 30
_CAN_BE_READ = "it can only be read; name a store that can be written to"
_IN_PLACE = "it shows a file before all of it is written; mount it as a folder and name that, or use an object store"
_UNFIT = {
    **dict.fromkeys(("http", "https", "data", "github", "git", "reference"), _CAN_BE_READ),
    **dict.fromkeys(("sftp", "ssh", "ftp", "hdfs", "arrow_hdfs", "webhdfs"), _IN_PLACE),
    **dict.fromkeys(("zip", "tar", "libarchive"), "an archive isn't a folder; name the folder it lies in"),
    "hf": "it makes a commit of each file; save elsewhere and upload what you publish",
}
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)
_UNREADABLE = (PermissionError, IsADirectoryError)
_Note = TypeVar("_Note", "Attempt", "Pending")


class Image(Protocol):
    """The bytes of a checkpoint, held until they are written."""

    @property
    def size(self) -> int:
        """Bytes."""

    checksum: str | None
    """``"crc32c:<hex>"`` of all bytes, None until they were read through."""

    def chunks(self) -> Iterator[memoryview]:
        """The bytes in order. Called again for another try."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One process (group) of a run. The highest number is the one that may write.

    Attributes:
        run_id: The run.
        number: From 1, one more than that of the attempt before it.
        created_at: When it began, seconds since 1970-01-01 UTC.
        parent: ``run_id`` of the run this one branched from, if any.
        status: ``"running"``, ``"finished"``, ``"stopped"`` or ``"error"``. A killed one stays ``"running"``.
        ended_at: When it ended, seconds since 1970-01-01 UTC; None while it runs.
        hostname: Where it runs.
        pid: Its process there.
        token: Tells it from any other.

    >>> Attempt(run_id="a", number=2, created_at=0.0).name
    'a-000002'
    """

    run_id: str
    number: int
    created_at: float
    parent: str | None = None
    status: str = "running"
    ended_at: float | None = None
    hostname: str = ""
    pid: int = 0
    token: str = ""

    def __post_init__(self) -> None:
        _need(self, "run_id", is_safe_run_id(self.run_id), "letters, digits, '.', '_' or '-'")
        _need(self, "number", _is_count(self.number), "an integer >= 1")
        _need(self, "created_at", _is_time(self.created_at), "seconds since 1970")
        _need(self, "parent", self.parent is None or is_safe_run_id(self.parent), "null or a run id")
        _need(self, "status", self.status in _STATUSES, f"one of {', '.join(_STATUSES)}")
        _need(self, "ended_at", self.ended_at is None or _is_time(self.ended_at), "seconds since 1970 or null")
        _need(self, "hostname", isinstance(self.hostname, str), "a string")
        _need(self, "pid", isinstance(self.pid, int), "an integer")
        _need(self, "token", isinstance(self.token, str), "a string")

    @property
    def name(self) -> str:
        """What its file is called, without the suffix."""
        return f"{self.run_id}-{self.number:06d}"


@dataclass(frozen=True, kw_only=True)
class Pending:
    """A marker: the write or delete of ``name`` has begun and isn't over.

    Attributes:
        name: The payload's file name.
        run_id: The run that does it.
        attempt: The attempt that does it.
        created_at: When it began, seconds since 1970-01-01 UTC.
        op: ``"write"`` or ``"delete"``.
        token: Tells this marker from any other of that name.
    """

    name: str
    run_id: str
    attempt: int
    created_at: float
    op: Literal["write", "delete"] = "write"
    token: str = field(default_factory=lambda: uuid.uuid4().hex[:8])

    def __post_init__(self) -> None:
        _need(self, "name", is_safe_name(self.name), "a plain file name without separators")
        _need(self, "run_id", is_safe_run_id(self.run_id), "letters, digits, '.', '_' or '-'")
        _need(self, "attempt", _is_count(self.attempt), "an integer >= 1")
        _need(self, "created_at", _is_time(self.created_at), "seconds since 1970")
        _need(self, "op", self.op in _OPS, f"one of {', '.join(_OPS)}")
        good = isinstance(self.token, str) and re.fullmatch("[0-9a-f]{8}", self.token) is not None
        _need(self, "token", good, "8 hex digits")


class CheckpointStore:
    """The checkpoints in one folder, local or remote.

    Reading is safe from any thread and process. Writing is meant for one background thread.

    Args:
        url: A local path (``~`` and relative ones are made absolute) or any fsspec URL. It is a ``str`` because
            ``Path`` would turn ``gs://bucket`` into ``gs:/bucket``.
        storage_options: Passed to the filesystem. No value of it appears in an error, a warning or a file.
        connections: Parts of a payload that go to (or come from) S3, GCS or Azure at once. ``None`` chooses from the
            payload's size: 8, and fewer of a payload so large that its parts are.
        part_bytes: Bytes of a part. ``None`` chooses from the size: 16 MiB, less for a payload below 128 MiB, more
            where a store takes no more than so many parts. A save takes up to twice ``connections * part_bytes``.

    Raises:
        TypeError: ``url`` is no path.
        ValueError: ``url`` is empty, has a query or a password in it, is a chain of filesystems, or of a protocol that
            isn't known or can't hold checkpoints; ``connections``
            isn't from 1 to 128, or ``part_bytes`` from 5 MiB (the least that S3 takes) to 4,000 MiB (Azure's most).
        ImportError: The package for the protocol isn't installed.

    >>> store = CheckpointStore("memory://example")
    >>> store.records()
    []
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        storage_options: Mapping[str, Any] | None = None,
        *,
        connections: int | None = None,
        part_bytes: int | None = None,
    ) -> None:
        self._given = _checked_url(url)
        if storage_options is not None and not isinstance(storage_options, Mapping):
            raise TypeError(
                f"storage_options: a dictionary as for fsspec was expected, not {type(storage_options).__name__}"
            )
        self._options = dict(storage_options or {})
        check_transfer(connections, part_bytes)
        self._connections = connections
        self._part_bytes = part_bytes
        self._used: set[str] = set()  # names given out by this process
        self._sequence = 0
        self._numbers: dict[str, int] = {}  # run -> this process's attempt
        self._noted: set[str] = set()  # the attempts that had begun when this process's own did
        self._ended: set[str] = set()  # attempts that have noted their end
        self._names: set[str] | None = None  # in the folder, as they were listed since then
        self._unswept: dict[str, Entry | None] | None = None  # that listing, for the sweep that follows it
        self._parsed: dict[str, tuple[Entry, CheckpointRecord | None]] = {}
        self._texts: dict[str, tuple[str, str]] = {}  # of records: their version and text, where reading is slow
        self._uncatalogued = 0
        self._warned: set[str] = set()
        self._connect()

    def _connect(self) -> None:
        # a filesystem doesn't survive a fork, nor does a lock that another thread held
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._backend_now = make_backend(self._given, self._options)
        self._backend_now.connections = self._connections
        self._backend_now.part_bytes = self._part_bytes

    @property
    def backend(self) -> Backend:
        """The files of the folder, through a filesystem of this store and this process only."""
        if self._pid != os.getpid():
            self._connect()
        return self._backend_now

    @property
    def url(self) -> str:
        """The folder: a plain absolute path if it is local, else its URL. No slash at the end."""
        return self.backend.url("") if isinstance(self.backend, LocalBackend) else self._given

    def __repr__(self) -> str:
        return f"CheckpointStore({self.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        again = functools.partial(CheckpointStore, connections=self._connections, part_bytes=self._part_bytes)
        return again, (self._given, self._options)

    # Reading

    def path_of(self, record: CheckpointRecord) -> str:
        """Full path (local) or URL of a record's payload.

        >>> record = CheckpointRecord(path="step-0000000010.ckpt", step=10, epoch=1, sequence=1, run_id="a",
        ...     created_at=0.0, size=3, checksum="crc32c:00000000")
        >>> CheckpointStore("memory://example").path_of(record)
        'memory://example/step-0000000010.ckpt'
        """
        return self._full(record.path)

    def name_of(self, path: str | os.PathLike[str]) -> str | None:
        """The file name of a path or URL that lies directly in this folder; None if it lies elsewhere.

        >>> store = CheckpointStore("memory://example")
        >>> store.name_of("memory://example/a.ckpt"), store.name_of("/example/a.ckpt")
        ('a.ckpt', None)
        """
        text = os.fspath(path)
        protocols = self.backend.fs.protocol
        protocol = text.split("://", 1)[0] if "://" in text else "file"
        if protocol not in ((protocols,) if isinstance(protocols, str) else protocols):
            return None
        stripped = str(self.backend.fs._strip_protocol(text))
        if isinstance(self.backend, LocalBackend):
            stripped = os.path.normpath(stripped)
        folder, _, name = stripped.rpartition("/")
        return name if folder == self.backend.root and is_safe_name(name) else None

    def records(self) -> list[CheckpointRecord]:
        """Every record in the folder now, in order of confirmation.

        A record that can't be read, isn't valid or names another payload is skipped with one warning, and never
        deleted. One whose payload is missing or has another size is among them (see `whole`).
        Only records that changed since the last call are read again.

        Raises:
            OSError: The folder can't be listed, or a record not be read for a reason that may pass.
        """
        return self._scan()[0]

    def listed(self) -> tuple[list[CheckpointRecord], set[str]]:
        """`records`, and the names of everything in the folder, from one look at it."""
        records, entries = self._scan()
        return records, set(entries)

    def whole(self, record: CheckpointRecord) -> bool:
        """Whether the payload is there with the right size, and wasn't marked damaged. One request; reads no bytes."""
        return not record.damaged and self.backend.size(record.path) == record.size

    def latest(self, run_id: str | None = None) -> CheckpointRecord | None:
        """The newest whole checkpoint of a run, by default of the run that holds the highest sequence; None if none.

        >>> CheckpointStore("memory://example").latest() is None
        True
        """
        candidates = self._whole_ones(run_id)
        return candidates[-1] if candidates else None

    def best(
        self, monitor: str, mode: Literal["min", "max"] = "min", run_id: str | None = None
    ) -> CheckpointRecord | None:
        """The whole checkpoint of a run with the best metric; None if none has it. The default run is as in `latest`.

        Args:
            monitor: Name of the metric, as it was logged.
            mode: ``"min"`` where lower is better, ``"max"`` where higher is.
            run_id: The run.

        Raises:
            ValueError: ``mode`` is another word.

        >>> CheckpointStore("memory://example").best("val_loss") is None
        True
        """
        return retention.best(self._whole_ones(run_id), monitor, mode)

    def verify(self, record: CheckpointRecord) -> None:
        """Read a payload through and compare it with its record, a few MiB at a time.

        Raises:
            DamagedCheckpointError: It is missing, or has another size or checksum.
            CheckpointError: Its kind of checksum isn't known to this version.
        """
        for _ in self._verified_chunks(record):
            pass

    def open_verified(self, record: CheckpointRecord) -> BinaryIO:
        """The payload in memory, read once and verified on the way. Takes as much memory as it has bytes.

        On a terminal, a bar shows how far a payload of 1 GiB or more is.

        Raises:
            DamagedCheckpointError: It is missing, or has another size or checksum.
            CheckpointError: Its kind of checksum isn't known to this version.
        """
        return _held(record, self._verified_chunks(record))

    def open(self, record: CheckpointRecord) -> BinaryIO:
        """The payload as a file, not verified; from an object store in memory, with a bar as in `open_verified`.

        Raises:
            FileNotFoundError: It is missing.
            DamagedCheckpointError: It has another size.
        """
        backend = self.backend
        size = backend.size(record.path)
        if size not in (None, record.size):
            raise self._damaged(record, f"has {size:,} bytes instead of {record.size:,}")
        # a file there is read in one request after the other
        return _held(record, backend.chunks(record.path)) if backend.slow_reads else backend.open(record.path)

    # Changing

    def check(self) -> None:
        """Make the folder and see that it can be written to; warns of a store without conditional writes.

        Raises:
            NotADirectoryError: It is a file.
            PermissionError: It can't be written to.
            ConnectionError: The store doesn't answer.
            OSError: Anything else is wrong.
        """
        try:
            keeps = reaching()(self._probe)
        except (NotADirectoryError, FileExistsError):
            raise self._no_folder() from None
        except (ConnectionError, TimeoutError) as error:
            raise ConnectionError(
                f"dirpath={self.url!r} doesn't answer ({self._redacted(error)}): see that the store can be reached "
                "from here, and that the endpoint or account in storage_options or the environment is the right one"
            ) from None
        except Exception as error:
            number = error.errno if isinstance(error, OSError) else errno.EIO
            if isinstance(error, PermissionError) or number in _READ_ONLY:
                raise PermissionError(
                    f"dirpath={self.url!r} can't be written to ({self._redacted(error)}): "
                    "give this user the right to make and delete files there, or use another dirpath"
                ) from None
            if isinstance(error, CheckpointError) or isinstance(self.backend, LocalBackend):
                raise
            raise OSError(
                number or errno.EIO,
                f"dirpath={self.url!r} can't be used ({self._redacted(error)[:300]}): see that it is a store of that "
                "kind, and that the endpoint and the other storage_options are right",
            ) from (error if redact_error(error, self._options) else None)
        if not keeps:
            self._warn(
                PROBE,
                f"dirpath={self.url!r}: this store takes no notice of If-None-Match. That is safe as long as one "
                "process at a time saves there; two at once could overwrite each other's checkpoints",
            )

    def _probe(self) -> bool:
        if self.backend.is_file():
            raise NotADirectoryError
        self.backend.makedirs()
        return self.backend.probe()

    def _no_folder(self) -> NotADirectoryError:
        return NotADirectoryError(
            f"dirpath={self.url!r} or {_ATTEMPTS!r} in it is a file, or lies under one: name another folder, or move "
            "the file away"
        )

    def delete(self, record: CheckpointRecord) -> None:
        """Delete a checkpoint: its record first, then its payload. Again is fine; so is one that is gone.

        Raises:
            PinnedError: It is pinned.
            RecordError: Its record can't be read any more, so it isn't known what would be deleted.
        """
        backend = self.backend
        current = self._read_record(record.path)
        pinned = PinnedError(
            f"{self.path_of(record)!r} is pinned and can't be deleted: unpin it first, "
            "with store.pin(record, pinned=False)"
        )
        token: str | None = None
        if current is None:
            begun = self._read_marker(record.path)
            if begun is None or begun.op != "delete" or begun.run_id != record.run_id:
                return
            token = begun.token
        elif _identity(current) != _identity(record):
            return  # another checkpoint has the name now
        else:
            if current.pinned:
                raise pinned
            attempt = max(record.attempt, self._numbers.get(record.run_id, 1))
            marker = Pending(
                name=record.path, run_id=record.run_id, attempt=attempt, created_at=time.time(), op="delete"
            )
            try:
                backend.write(record.path + PENDING_SUFFIX, _to_json(marker), owner=_owner(marker))
                token = marker.token
            except BaseException as error:
                with contextlib.suppress(Exception):  # half a marker can't be understood, and nothing is deleted yet
                    there = self._read_marker(record.path)
                    if there is None or there.token == marker.token:
                        backend.delete(record.path + PENDING_SUFFIX)
                # a full disk has no room for the marker either, and the delete is what makes room: the worst that a
                # kill between the next two steps leaves is a payload that nobody owns
                if not (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)):
                    raise
            # someone may have pinned it before the marker was there to be seen
            current = self._read_record(record.path)
            if current is not None and current.pinned:
                backend.delete(record.path + PENDING_SUFFIX)
                raise pinned
            backend.delete(record.path + RECORD_SUFFIX)
        if self._is_still_deleting(record.path, token):
            backend.delete(record.path)
            backend.delete(record.path + PENDING_SUFFIX)

    def _is_still_deleting(self, name: str, token: str | None) -> bool:
        """Whether nobody else has finished a delete that was held up, and used the name again."""
        if self._read_record(name) is not None:
            return False
        marker = self._read_marker(name)
        return marker is None or marker.token == token  # whoever uses the name has a marker or a record there

    def pin(self, record: CheckpointRecord, pinned: bool = True) -> CheckpointRecord:
        """Keep a checkpoint from being deleted, or allow it again. Returns the record as it is now.

        Raises:
            CheckpointError: There is no such checkpoint any more.
        """
        return self._change(record, pinned=pinned)

    def mark_damaged(self, record: CheckpointRecord) -> CheckpointRecord:
        """Note that a payload doesn't match its record, so that it is never chosen again. Returns the record.

        Raises:
            CheckpointError: There is no such checkpoint any more.
        """
        return self._change(record, damaged=True)

    def note_doomed(self, record: CheckpointRecord, others: Sequence[CheckpointRecord], rule: str) -> CheckpointRecord:
        """Note that a rule deletes ``others`` and then this one, whatever happens in between. Returns the record.

        Raises:
            CheckpointError: There is no such checkpoint any more.
        """
        return self._change(record, doomed=tuple(other.sequence for other in others), doomed_by=rule)

    def begin(self, step: int, run_id: str, attempt: int, filename: str = "step-{step:010d}") -> Pending:
        """Take a name that was never used and mark it as being written.

        Args:
            step: The step the name is made from.
            run_id: The run that writes.
            attempt: The attempt that writes.
            filename: The name's pattern, without suffix. Only ``{step}`` can stand in it.

        Raises:
            ValueError: ``filename`` doesn't give a plain file name.
        """
        base = _base_name(filename, step)
        backend = self.backend
        taken = self._taken(run_id, attempt)
        version = 0
        while True:
            name = f"{base}-v{version}{PAYLOAD_SUFFIX}" if version else f"{base}{PAYLOAD_SUFFIX}"
            version += 1
            if name in self._used or not taken.isdisjoint((name, name + RECORD_SUFFIX, name + PENDING_SUFFIX)):
                continue
            pending = Pending(name=name, run_id=run_id, attempt=attempt, created_at=time.time())
            try:
                backend.write(name + PENDING_SUFFIX, _to_json(pending), owner=_owner(pending), exclusive=True)
            except FileExistsError:
                continue
            self._used.add(name)
            # another process may have taken the name, and be done with it, in the meantime
            if backend.size(name) is None and backend.size(name + RECORD_SUFFIX) is None:
                return pending
            backend.delete(name + PENDING_SUFFIX)

    def commit(
        self,
        pending: Pending,
        image: Image,
        draft: Mapping[str, Any],
        *,
        guard: Callable[[], None] = lambda: None,
        timeout: float | None = None,
    ) -> CheckpointRecord:
        """Write a checkpoint: payload, then record. On return it is confirmed.

        On any error nothing under its names reads as a checkpoint; what can't be removed stays named by the marker.

        Args:
            pending: From `begin`; good for one try.
            image: Its bytes.
            draft: The record's fields, without path, sequence, size and checksum.
            guard: Called when the payload is safe, before the record; raises if this save was given up.
            timeout: Seconds after which the requests to an object store are ended; ``None`` sets a limit to each of
                them only.

        Raises:
            RecordError: ``draft`` isn't valid.
            SupersededError: The marker is gone, since a later attempt of the run swept it.
            CheckpointSaveError: The image changed while it was being written.
            OSError: The store failed, or doesn't hold as many bytes as were sent.
        """
        backend = self.backend
        checksum = Checksum()

        def sent() -> Generator[memoryview, None, None]:
            for chunk in image.chunks():
                checksum.update(chunk)
                yield chunk

        def confirm() -> None:
            if image.checksum is None:
                image.checksum = str(checksum)
            elif image.checksum != str(checksum):
                raise CheckpointSaveError(
                    f"{self._full(pending.name)!r}: the staged copy changed while it was written "
                    f"({checksum} instead of {image.checksum})"
                )
            self._check_ours(pending)

        try:
            fields = {"run_id": pending.run_id, "attempt": pending.attempt, **draft}
            fields |= {"path": pending.name, "size": image.size, "checksum": f"{ALGORITHM}:00000000"}
            record = CheckpointRecord(**fields, sequence=1)  # a bad draft is found before anything is sent
            if len(record.to_json()) > MAX_RECORD_BYTES - 1024:
                raise CheckpointSaveError(
                    f"the record of step {record.step} has {len(record.to_json()):,} bytes, and at most "
                    f"{MAX_RECORD_BYTES:,} are read: log fewer metrics ({len(record.metrics):,}) or under shorter names"
                )
            began = time.monotonic()
            with backend.time_limit(timeout):
                with contextlib.closing(sent()) as chunks:
                    backend.write_payload(pending.name, chunks, image.size, confirm, pending.token)
                seconds = time.monotonic() - began
                guard()
                self._check_ours(pending)
                record = dataclasses.replace(
                    record, checksum=str(checksum), sequence=self._next_sequence(), write_seconds=seconds
                )
                backend.write(pending.name + RECORD_SUFFIX, record.to_json(), owner=_owner(pending))
        except BaseException as error:
            if not self._undo(pending) and isinstance(error, OSError):
                raise self._swept(pending) from error
            raise
        try:
            marker = self._read_marker(pending.name)
            swept = backend.size(pending.name) is None
        except Exception:
            return record  # a marker beside a record does no harm; the next sweep takes it away
        if marker is not None and marker.token != pending.token:
            return record  # a later attempt has begun to delete it
        if swept:
            # a later attempt swept the payload just before the record was written
            with contextlib.suppress(Exception):
                if backend.read(pending.name + RECORD_SUFFIX) == record.to_json():
                    backend.delete(pending.name + RECORD_SUFFIX)
                    if marker is not None:
                        backend.delete(pending.name + PENDING_SUFFIX)
            raise self._swept(pending)
        with contextlib.suppress(Exception):
            backend.delete(pending.name + PENDING_SUFFIX)
        return record

    def sweep(self, run_id: str, before_attempt: int) -> list[str]:
        """Remove what killed attempts of a run left: only what their markers, or a temporary's name, show to be theirs.

        Markers of other runs, of this attempt or a later one, and unreadable ones are left alone.

        Args:
            run_id: The run.
            before_attempt: Attempts with a lower number are swept.

        Returns:
            Names of the deleted files. What can't be deleted is left, with a warning.
        """
        swept: list[str] = []
        backend = self.backend
        entries, self._unswept = self._unswept, None
        if entries is None or self._numbers.get(run_id) != before_attempt:
            entries = backend.entries()
        if any(name.endswith(PENDING_SUFFIX) for name in entries):
            self._names = None  # an older attempt may have written its record since the folder was listed

        def remove(name: str) -> None:
            there = name in entries or backend.size(name) is not None
            backend.delete(name)
            if there:
                swept.append(name)

        def sweep_marked(name: str) -> None:
            marker = self._read_marker(name)
            if marker is None or marker.run_id != run_id or marker.attempt >= before_attempt:
                return
            self._used.add(name)  # the attempt that left it may still be alive
            if backend.size(name + RECORD_SUFFIX) is None:
                swept.extend(backend.drop_unfinished(name, marker.token))
                remove(name)
                late = self._read_record(name)  # the older attempt may have written it in the meantime
                if late is not None and late.run_id == run_id and late.attempt < before_attempt:
                    remove(name + RECORD_SUFFIX)
            remove(name + PENDING_SUFFIX)

        temporaries = re.compile(rf"\.{re.escape(run_id)}-(\d{{6,}})\.[0-9a-f]{{8}}\.tmp")

        def sweep_temporaries(folder: str, names: Mapping[str, object]) -> None:
            for name in sorted(names):
                match = temporaries.fullmatch(name)
                # a start that was killed before its attempt had its name left one of this attempt's number
                if match and int(match[1]) < before_attempt + (folder == _ATTEMPTS):
                    try_to(remove, f"{folder}/{name}" if folder else name)

        def try_to(do: Callable[[str], None], name: str) -> None:
            try:
                do(name)
            except Exception as error:
                self._warn(name, f"{self._full(name)!r} can't be swept now: {self._redacted(error)}")

        for name in sorted(entries):
            if name.endswith(PENDING_SUFFIX) and is_safe_name(name) and entries[name] is not None:
                try_to(sweep_marked, name[: -len(PENDING_SUFFIX)])
        sweep_temporaries("", entries)
        sweep_temporaries(_ATTEMPTS, backend.entries(_ATTEMPTS))
        return swept

    # Attempts

    def attempts(self, run_id: str | None = None) -> list[Attempt]:
        """The attempts of a run, or of all runs, by run and number. Unreadable ones are skipped with a warning."""
        listed = self._list_attempts()
        names = [name for name in sorted(listed) if _is_attempt(name, run_id) and listed[name] <= MAX_RECORD_BYTES]
        return sorted(self._read_attempts(names), key=lambda attempt: (attempt.run_id, attempt.number))

    def _read_attempts(self, names: Sequence[str], warn: bool = True) -> list[Attempt]:
        """Those that can be read, with a warning for each other."""
        found = []
        for path, data in self.backend.read_many([f"{_ATTEMPTS}/{name}" for name in names]).items():
            if isinstance(data, FileNotFoundError):
                continue
            try:
                if isinstance(data, Exception):
                    raise data
                attempt = _from_json(Attempt, data)
                if f"{_ATTEMPTS}/{attempt.name}{RECORD_SUFFIX}" != path:
                    raise RecordError(f"it tells of attempt {attempt.name!r}")
                found.append(attempt)
            except (RecordError, *_UNREADABLE) as error:
                if warn:
                    self._warn(path, f"{self._full(path)!r} is skipped, it isn't an attempt: {self._redacted(error)}")
        return found

    def interrupted_start(self) -> str | None:
        """The run whose very first start was killed before its attempt was noted; None if there is none."""
        for name in sorted(self.backend.entries(_ATTEMPTS)):
            match = re.fullmatch(r"\.(.+)-000001\.[0-9a-f]{8}\.tmp", name)
            if match and is_safe_run_id(match[1]):
                return match[1]
        return None

    def start_attempt(self, run_id: str, parent: str | None = None) -> Attempt:
        """Begin an attempt of a run. From now on every earlier one is superseded.

        Args:
            run_id: The run; a new one if the store has none of that name.
            parent: ``run_id`` of the run this one branched from, if any.

        Raises:
            NotADirectoryError: The folder, or ``attempts`` in it, is a file.
        """
        backend = self.backend
        noted = self._list_attempts()
        number = max((number for run, number in map(_run_and_number, noted) if run == run_id), default=0)
        while True:
            number += 1
            attempt = Attempt(
                run_id=run_id,
                number=number,
                created_at=time.time(),
                parent=parent,
                hostname=socket.gethostname(),
                pid=os.getpid(),
                token=uuid.uuid4().hex,
            )
            name = f"{_ATTEMPTS}/{attempt.name}{RECORD_SUFFIX}"
            try:
                backend.write(name, _to_json(attempt), owner=attempt.name, exclusive=True)
            except FileExistsError:
                continue
            except NotADirectoryError:
                raise self._no_folder() from None
            self._numbers[run_id] = number
            self._noted = {*noted, f"{attempt.name}{RECORD_SUFFIX}"}
            self._names = self._unswept = None
            self._write_catalogue(attempt.name)
            return attempt

    def finish_attempt(self, attempt: Attempt, status: str) -> None:
        """Note how an attempt ended: ``"finished"``, ``"stopped"`` or ``"error"``.

        Raises:
            ValueError: ``status`` is another word.
        """
        ended = dataclasses.replace(attempt, status=status, ended_at=time.time())
        self.backend.write(f"{_ATTEMPTS}/{attempt.name}{RECORD_SUFFIX}", _to_json(ended), owner=attempt.name)

    def note_ends(self, attempt: Attempt, records: Sequence[CheckpointRecord]) -> list[Attempt]:
        """Note of the run's earlier attempts that were killed when they were last alive: at their newest checkpoint.

        Their ``status`` stays ``"running"``. Without this it couldn't be told any more once that checkpoint is deleted.

        Args:
            attempt: The one that has just begun.
            records: The run's checkpoints.

        Returns:
            The earlier attempts.
        """
        earlier = []
        for other in self.attempts(attempt.run_id):
            if other.number >= attempt.number:
                continue
            alive = [record.created_at for record in records if record.attempt == other.number]
            if other.status == "running" and other.ended_at is None and alive:
                other = dataclasses.replace(other, ended_at=max(alive))
                self.backend.write(f"{_ATTEMPTS}/{other.name}{RECORD_SUFFIX}", _to_json(other), owner=attempt.name)
            earlier.append(other)
        return earlier

    def superseded(self, attempt: Attempt) -> bool:
        """Whether a later attempt of the run has begun. One request."""
        following = dataclasses.replace(attempt, number=attempt.number + 1)
        try:
            self.backend.read(f"{_ATTEMPTS}/{following.name}{RECORD_SUFFIX}")
        except FileNotFoundError:
            return False
        return True

    # Inner workings

    def _full(self, name: str) -> str:
        return f"{self.url}/{name}" if not self.url.endswith("/") else self.url + name

    def _redacted(self, error: BaseException) -> str:
        return redact(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__, self._options)

    def _warn(self, about: str, message: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            warnings.warn(message, stacklevel=4)

    def _scan(self, warn: bool = True) -> tuple[list[CheckpointRecord], dict[str, Entry | None]]:
        """All valid records, and everything in the folder."""
        backend = self.backend
        skip = self._skip if warn else _do_nothing
        try:
            entries = backend.entries()
        except NotADirectoryError:
            raise self._no_folder() from None
        suffix = PAYLOAD_SUFFIX + RECORD_SUFFIX
        listed = {name: entry for name, entry in entries.items() if entry is not None and name.endswith(suffix)}
        before, parsed = self._parsed, {}
        changed = []
        for name, entry in listed.items():
            known = before.get(name)
            if known is not None and entry.version is not None and known[0] == entry:
                parsed[name] = known
            elif not is_safe_name(name):
                skip(name, "its name isn't one that this package gives")
            elif entry.size > MAX_RECORD_BYTES:
                skip(name, f"it has {entry.size:,} bytes, a record has at most {MAX_RECORD_BYTES:,}")
            else:
                changed.append(name)
        for name, data in self._read_records(changed, listed).items():
            if isinstance(data, FileNotFoundError):
                continue  # deleted since the listing
            if isinstance(data, _UNREADABLE):
                skip(name, self._redacted(data))
                continue
            if isinstance(data, Exception):
                raise data
            record = None
            try:
                record = _parse_record(name, data)
            except RecordError as error:
                skip(name, str(error))
            if record is not None or warn:  # else it's said another time
                parsed[name] = (listed[name], record)
        self._parsed = parsed
        found = [record for _, record in parsed.values() if record is not None]
        found.sort(key=lambda record: (record.sequence, record.created_at, record.path))
        if found:
            with self._lock:
                self._sequence = max(self._sequence, found[-1].sequence)
        if self._numbers:
            self._names, self._unswept = set(entries), entries
        return found, entries

    def _read_records(self, names: Sequence[str], listed: Mapping[str, Entry]) -> Mapping[str, bytes | Exception]:
        """Records by name. Where reading many takes long, those that the catalogue still has right come from there."""
        if not self.backend.slow_reads:
            return self.backend.read_many(names)
        texts = {name: text for name, text in self._texts.items() if name in listed}
        if len(names) >= _CATALOGUED_FROM:
            texts.update(self._read_catalogue())
        current = {name: text for name in names if (text := texts.get(name)) and text[0] == repr(listed[name].version)}
        read = self.backend.read_many([name for name in names if name not in current])
        new = {
            name: (repr(listed[name].version), data.decode())
            for name, data in read.items()
            if isinstance(data, bytes) and data.isascii()  # as every record is
        }
        self._uncatalogued += len(new)
        self._texts = {name: text for name, text in texts.items() if name in listed} | new
        return {**{name: text.encode() for name, (_, text) in current.items()}, **read}

    def _read_catalogue(self) -> dict[str, tuple[str, str]]:
        """The texts of records, as an earlier start read them; each is true of one version of its file."""
        try:
            if (self.backend.size(_CATALOGUE) or 0) > _MAX_CATALOGUE_BYTES:
                return {}
            checksum, _, data = self.backend.read(_CATALOGUE).partition(b"\n")
            if checksum.decode() != checksum_of([data]):
                return {}
            values = json.loads(data)
            return {str(name): (str(version), str(text)) for name, (version, text) in values.items()}
        except (OSError, ValueError, TypeError, AttributeError, RecursionError):
            return {}  # it only saves time

    def _write_catalogue(self, owner: str) -> None:
        """Spare the next start what this one read."""
        if self._uncatalogued >= _CATALOGUED_FROM:
            data = json.dumps(self._texts).encode()
            if len(data) < _MAX_CATALOGUE_BYTES - 100:
                with contextlib.suppress(OSError):
                    self.backend.write(_CATALOGUE, f"{checksum_of([data])}\n".encode() + data, owner=owner)
            self._uncatalogued = 0

    def _skip(self, name: str, why: str) -> None:
        self._warn(name, f"the record {self._full(name)!r} is skipped: {why}. It is left where it is")

    def _whole_ones(self, run_id: str | None) -> list[CheckpointRecord]:
        records, entries = self._scan()
        if run_id is None and records:
            run_id = records[-1].run_id

        def whole(record: CheckpointRecord) -> bool:
            entry = entries.get(record.path)
            return not record.damaged and entry is not None and entry.size == record.size

        return [record for record in records if record.run_id == run_id and whole(record)]

    def _verified_chunks(self, record: CheckpointRecord) -> Iterator[bytes]:
        """The payload's chunks; ends only if they are all as the record says."""
        algorithm, _, expected = record.checksum.partition(":")
        if algorithm != ALGORITHM:
            raise CheckpointError(
                f"{self.path_of(record)!r} can't be verified: its checksum is of the kind {algorithm!r}, this version "
                f"knows {ALGORITHM!r}; upgrade lightning-ckpt-policy"
            )
        size = self.backend.size(record.path)
        if size is None:
            raise self._damaged(record, "is missing")
        if size != record.size:
            raise self._damaged(record, f"has {size:,} bytes instead of {record.size:,}")
        checksum, arrived = Checksum(), 0
        try:
            for chunk in self.backend.chunks(record.path):
                arrived += len(chunk)
                if arrived > record.size:
                    break
                checksum.update(chunk)
                yield chunk
        except FileNotFoundError:
            raise self._damaged(record, "is missing") from None
        if arrived != record.size:
            raise self._damaged(record, f"gave {arrived:,} bytes instead of {record.size:,}")
        if int(str(checksum).partition(":")[2], 16) != int(expected, 16):
            raise self._damaged(record, f"has the checksum {checksum} instead of {record.checksum}")

    def _damaged(self, record: CheckpointRecord, what: str) -> DamagedCheckpointError:
        return DamagedCheckpointError(
            f"checkpoint {self.path_of(record)!r} of step {record.step} is damaged: it {what}"
        )

    def _read_record(self, name: str) -> CheckpointRecord | None:
        try:
            return _parse_record(name + RECORD_SUFFIX, self.backend.read(name + RECORD_SUFFIX))
        except FileNotFoundError:
            return None

    def _read_marker(self, name: str) -> Pending | None:
        """The marker of ``name``; None if there is none or it can't be understood."""
        try:
            marker = _from_json(Pending, self.backend.read(name + PENDING_SUFFIX))
        except (FileNotFoundError, RecordError):
            return None
        return marker if marker.name == name else None

    def _change(self, record: CheckpointRecord, **changes: Any) -> CheckpointRecord:
        current = self._read_record(record.path)
        if current is None or _identity(current) != _identity(record):
            raise CheckpointError(f"{self.path_of(record)!r} isn't there any more: it was deleted by someone else")
        changed = dataclasses.replace(current, **changes)
        if changed != current:
            owner = f"{record.run_id}-{record.attempt:06d}"
            self.backend.write(record.path + RECORD_SUFFIX, changed.to_json(), owner=owner)
            marker = self._read_marker(record.path)
            deleting = marker is not None and marker.op == "delete"
            if deleting or ((changed.pinned or changed.doomed) and self.backend.size(record.path) is None):
                # a delete had begun before: a record without its payload must not come back
                self.backend.delete(record.path + RECORD_SUFFIX)
                raise CheckpointError(f"{self.path_of(record)!r} is being deleted, so it can't be changed any more")
        return changed

    def _taken(self, run_id: str, attempt: int) -> set[str]:
        """The names that others have given; learns the sequences of their records.

        The folder isn't listed again while nobody else can be at work in it. Whoever writes begins an attempt first:
        a later one of this run ends this one, and an earlier one can confirm nothing more.
        """
        if self._names is not None and self._numbers.get(run_id) == attempt:
            listed = self._list_attempts()
            if self._noted.issuperset(listed) and not self._has_company(listed, run_id):
                return self._names
            self._noted.update(listed)
        return set(self._scan(warn=False)[1])  # in the background, where a warning may be an error

    def _list_attempts(self) -> dict[str, int]:
        """The names of all attempts' files, and their bytes."""
        return {name: size for name, size in self.backend.list(_ATTEMPTS).items() if _is_attempt(name, None)}

    def _has_company(self, listed: Mapping[str, int], run_id: str) -> bool:
        """Whether the newest attempt of another run hasn't noted its end, so that it may be alive."""
        newest: dict[str, str] = {}
        for name in sorted(listed, key=_run_and_number):
            newest[_run_and_number(name)[0]] = name
        newest.pop(run_id, None)
        unsure = [name for name in newest.values() if name not in self._ended and listed[name] <= MAX_RECORD_BYTES]
        others = self._read_attempts(unsure, warn=False)
        self._ended.update(f"{other.name}{RECORD_SUFFIX}" for other in others if other.status != "running")
        return any(other.status == "running" for other in others)

    def _next_sequence(self) -> int:
        with self._lock:
            self._sequence += 1
            return self._sequence

    def _check_ours(self, pending: Pending) -> None:
        try:
            marker = _from_json(Pending, self.backend.read(pending.name + PENDING_SUFFIX))
        except FileNotFoundError:
            raise self._swept(pending) from None
        except RecordError as error:
            raise self._spoiled(pending) from error
        if marker.token != pending.token:
            raise self._spoiled(pending) if marker.attempt <= pending.attempt else self._swept(pending)

    def _spoiled(self, pending: Pending) -> DamagedCheckpointError:
        return DamagedCheckpointError(f"{self._full(pending.name + PENDING_SUFFIX)!r} isn't what was written there")

    def _swept(self, pending: Pending) -> SupersededError:
        return SupersededError(
            f"{self._full(pending.name)!r} isn't this process's to write any more: a later attempt of run "
            f"{pending.run_id!r} swept its marker. Stop the older process"
        )

    def _undo(self, pending: Pending) -> bool:
        """Remove what a failed commit left, as far as it can be; the marker goes last and only if all else is gone.

        Returns whether the marker was still ours; if not, nothing is touched.
        """
        backend = self.backend
        name = pending.name
        try:
            try:
                self._check_ours(pending)
            except SupersededError:
                # swept: whatever has the name now is someone else's, unless nobody has it and an upload ended late
                if backend.size(name + PENDING_SUFFIX) is None and backend.size(name + RECORD_SUFFIX) is None:
                    backend.delete(name)
                return False
            except DamagedCheckpointError:
                pass  # our own marker, spoiled: it goes too
            backend.delete(name + RECORD_SUFFIX)  # if this can't go, the payload must stay with it
            backend.drop_unfinished(name, pending.token)
            backend.delete(name)
            backend.delete(name + PENDING_SUFFIX)
        except Exception:
            return True  # the marker tells the next sweep
        if backend.retry_same_name:
            self._used.discard(name)
        return True


def _checked_url(url: str | os.PathLike[str]) -> str:
    text = os.fspath(url) if isinstance(url, os.PathLike) else url
    if not isinstance(text, str):
        raise TypeError(f"dirpath={text!r}: a local path or an fsspec URL was expected, not {type(text).__name__}")
    if not text.strip() or "\0" in text:
        raise ValueError(f"dirpath={text!r}: a local path or an fsspec URL was expected, e.g. 'gs://bucket/run'")
    if "://" not in text:
        path = os.path.abspath(os.path.expanduser(text))
        for match in re.finditer(r"/([a-z][a-z0-9+.-]*):(?=/|$)", path):
            if match[1] in fsspec.available_protocols():  # type: ignore[no-untyped-call]
                folder = path[match.end() :]
                meant = f"{match[1]}://{folder if match[1] in ('file', 'local') else folder.lstrip('/')}"
                raise ValueError(f"dirpath={text!r} has one slash where a URL has two: write {meant!r}, as a str")
        return path
    start, _, rest = text.partition("://")
    shown = f"{start}://{rest.partition('?')[0].rpartition('@')[2]}"
    if "?" in rest:
        raise ValueError(f"dirpath={shown!r} has a query after it: put what it says into storage_options")
    if re.match(r"[^/@]*:[^/@]*@", rest):
        raise ValueError(f"dirpath={shown!r} has a password in it: put it into storage_options")
    if "::" in text:
        raise ValueError(
            f"dirpath={shown!r} is a chain of filesystems, and a cache or an archive doesn't show at once what others "
            "write: name the store itself, e.g. 's3://bucket/run'"
        )
    if start in ("file", "local") and not rest:
        raise ValueError(f"dirpath={text!r} names no folder: write 'file:///folder'")
    if start in _UNFIT:
        raise ValueError(f"dirpath={shown!r} can't hold checkpoints: {_UNFIT[start]}")
    if not text.isprintable():
        raise ValueError(f"dirpath={shown!r} has a character in it that can't be printed: leave it out")
    return f"{start}://{rest.rstrip('/')}" if rest.strip("/") else text


def _do_nothing(*_: object) -> None:
    pass


def _held(record: CheckpointRecord, chunks: Iterator[bytes]) -> BinaryIO:
    held = io.BytesIO()
    with _loading_bar(record) as bar:
        for chunk in chunks:
            held.write(chunk)
            bar.update(len(chunk))
    held.seek(0)
    return held


def _loading_bar(record: CheckpointRecord) -> Any:
    """For what takes long, on a terminal, and on one rank."""
    hidden = record.size < _BAR_BYTES or getattr(rank_zero_only, "rank", 0) != 0
    title = f"Loading {record.path}"
    return tqdm(total=record.size, desc=title, unit="B", unit_scale=True, unit_divisor=1024, disable=hidden or None)


def _base_name(filename: str, step: int) -> str:
    try:
        base = filename.format(step=step)
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise ValueError(
            f"filename={filename!r} isn't a pattern ({type(error).__name__}: {error}): only {{step}} can stand in it, "
            "e.g. 'step-{step:010d}'"
        ) from error
    if not is_safe_name(f"{base}-v999999{PAYLOAD_SUFFIX}"):
        raise ValueError(
            f"filename={filename!r} gives {base!r}, which isn't a plain file name: use letters, digits and ._=+- only, "
            "begin with a letter or digit, and stay under 220 characters"
        )
    return base


def _owner(marker: Pending) -> str:
    return f"{marker.run_id}-{marker.attempt:06d}"


def _is_attempt(name: str, run_id: str | None) -> bool:
    match = re.fullmatch(r"(.+)-\d{6,12}\.json", name)
    return match is not None and (match[1] == run_id if run_id is not None else is_safe_run_id(match[1]))


def _run_and_number(attempt: str) -> tuple[str, int]:
    """Of an attempt's file name."""
    run_id, _, number = attempt.removesuffix(RECORD_SUFFIX).rpartition("-")
    return run_id, int(number)


def _parse_record(name: str, data: bytes) -> CheckpointRecord:
    try:
        record = CheckpointRecord.from_json(data)
    except RecordError:
        raise
    except Exception as error:  # whoever wrote the file may have meant to break us
        raise RecordError(f"it can't be read: {type(error).__name__}") from error
    if record.path + RECORD_SUFFIX != name:
        raise RecordError(f"path={record.path!r}: the record of {name[: -len(RECORD_SUFFIX)]!r} was expected")
    return record


def _identity(record: CheckpointRecord) -> tuple[Hashable, ...]:
    """Tells a checkpoint from a later one of the same name."""
    return record.run_id, record.sequence, record.created_at, record.checksum


def _to_json(note: Attempt | Pending) -> bytes:
    values = {"schema_version": SCHEMA_VERSION, **dataclasses.asdict(note)}
    return (json.dumps(values, indent=1, allow_nan=False) + "\n").encode()


def _from_json(kind: type[_Note], data: bytes) -> _Note:
    if len(data) > MAX_RECORD_BYTES:
        raise RecordError(f"{len(data)} bytes; at most {MAX_RECORD_BYTES} are read")
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"not JSON: {error}") from error
    if not isinstance(values, dict) or values.get("schema_version") != SCHEMA_VERSION:
        raise RecordError(f"a JSON object with schema_version={SCHEMA_VERSION} was expected")
    known = {f.name for f in dataclasses.fields(kind)}
    try:
        return kind(**{key: value for key, value in values.items() if key in known})
    except TypeError as error:
        raise RecordError(f"a field is missing or of the wrong type: {error}") from error


def _need(note: object, name: str, good: bool, expected: str) -> None:
    if not good:
        raise RecordError(f"{name}={str(getattr(note, name))[:200]!r}: {expected} was expected")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 1 << 63


def _is_time(value: Hashable) -> bool:
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    return good and -1e15 < value < 1e15 and math.isfinite(value)  # type: ignore[operator,arg-type]
