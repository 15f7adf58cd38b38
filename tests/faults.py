"""Filesystems that go wrong on purpose: by schedule, at random, or for good, as after a kill.

``FaultFileSystem`` wraps any fsspec filesystem and asks a `Schedule` before and after each of its calls. ``FaultyOs``
does the same for the calls that the local backend makes to ``os``. ``ObjectFileSystem`` is an object store in memory:
an object appears when its upload is finished, and there is no rename.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import fsspec
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

T = TypeVar("T")
_MANGLING = {"short", "truncate", "flip"}
ACTIONS = ("error", "error_after", "kill", "kill_after", "short", "truncate", "flip", "delay", "hang", "lag")


class Killed(BaseException):
    """The process is gone: every later call raises this too, so nothing that catches it can mend anything."""


def io_error() -> Exception:
    return OSError(errno.EIO, "injected fault")


@dataclass
class Fault:
    """One thing that goes wrong.

    Attributes:
        action: What goes wrong:
            ``"error"``: an error instead of the call; ``"error_after"``: the call is done, its answer lost;
            ``"kill"`` and ``"kill_after"``: the same for good;
            ``"short"``: a write takes half and says so; ``"truncate"``: it takes half and says it took all;
            ``"flip"``: one bit of what is written is another;
            ``"delay"``: ``seconds`` pass; ``"hang"``: nothing until ``schedule.release`` is set, then an error;
            ``"lag"``: a listing shows what the one before it showed.
        op: The operation, e.g. ``"write"`` or ``"os.fsync"``; ``"*"`` is any.
        kth: The how manieth such call, from 1; None is every one.
        path: Only calls whose path ends so.
    """

    action: str
    op: str = "*"
    kth: int | None = None
    path: str = ""
    error: Callable[[], Exception] = io_error
    seconds: float = 0.05
    seen: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        assert self.action in ACTIONS, self.action

    def matches(self, op: str, path: str) -> bool:
        if self.op not in ("*", op) or not path.endswith(self.path):
            return False
        self.seen += 1
        return self.kth is None or self.seen == self.kth


class Schedule:
    """Says which call goes wrong, and keeps a log of all.

    Args:
        faults: The faults.
        rate: Chance of each call to go wrong besides, by one of ``actions``.
        seed: Of that chance.
        actions: See ``Fault``.
    """

    def __init__(
        self, *faults: Fault, rate: float = 0.0, seed: int = 0, actions: Iterable[str] = ("error", "error_after")
    ) -> None:
        self.faults = list(faults)
        self.rate = rate
        self.actions = tuple(actions)
        self.log: list[tuple[str, str]] = []
        self.hits = 0
        self.dead = False
        self.release = threading.Event()
        self.hanging = threading.Event()
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return "Schedule()"  # fsspec makes a key of it

    def _faults_of(self, op: str, path: str) -> list[Fault]:
        with self._lock:
            self.log.append((op, path))
            found = [fault for fault in self.faults if fault.matches(op, path)]
            if self._random.random() < self.rate:
                found.append(Fault(self._random.choice(self.actions)))
            self.hits += len(found)
        return found

    def around(self, op: str, path: str, call: Callable[[set[str]], T]) -> T:
        """Make a call, with what goes wrong around it; it is told what should go wrong within."""
        if self.dead:
            raise Killed
        faults = self._faults_of(op, path)
        for fault in faults:
            if fault.action == "delay":
                time.sleep(fault.seconds)
            elif fault.action == "hang":
                self.hanging.set()
                self.release.wait()
                raise OSError(errno.ETIMEDOUT, "injected hang is over")
            elif fault.action == "error":
                raise fault.error()
            elif fault.action == "kill":
                self.dead = True
                raise Killed
        try:
            return call({fault.action for fault in faults})
        finally:
            for fault in faults:
                if fault.action == "error_after":
                    raise fault.error()
                if fault.action == "kill_after":
                    self.dead = True
                    raise Killed


def _mangled(data: Any, faults: set[str]) -> bytes:
    content = bytes(data)
    if "short" in faults:
        content = content[: (len(content) + 1) // 2]
    if "truncate" in faults:
        content = content[: len(content) // 2]
    if "flip" in faults and content:
        middle = len(content) // 2
        content = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    return content


class FaultFile:
    """A file of ``FaultFileSystem``."""

    def __init__(self, file: Any, path: str, schedule: Schedule) -> None:
        self.__dict__.update(file=file, path=path, schedule=schedule)

    def write(self, data: Any) -> int:
        def call(faults: set[str]) -> int:
            if faults.isdisjoint(_MANGLING):
                return int(self.file.write(data))
            content = _mangled(data, faults)
            self.file.write(content)
            return len(content) if "short" in faults else memoryview(data).nbytes

        return self.schedule.around("write", self.path, call)

    def read(self, *args: Any) -> bytes:
        return self.schedule.around("read", self.path, lambda _: self.file.read(*args))

    def flush(self) -> None:
        self.schedule.around("flush", self.path, lambda _: self.file.flush())

    def close(self) -> None:
        self.schedule.around("close", self.path, lambda _: self.file.close())

    def discard(self) -> None:
        self.schedule.around("discard", self.path, lambda _: self.file.discard())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.file, name, value)

    def __enter__(self) -> FaultFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class FaultFileSystem(AbstractFileSystem):
    """Another filesystem, with faults.

    Args:
        target_protocol: The protocol of the filesystem that does the work; this one passes for it.
        target_options: Its options.
        schedule: What goes wrong.
    """

    protocol = "faulty"
    cachable = False

    def __init__(
        self,
        target_protocol: str = "file",
        target_options: dict[str, Any] | None = None,
        schedule: Schedule | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        options = {"skip_instance_cache": True, "use_listings_cache": False, **(target_options or {})}
        self.target = fsspec.filesystem(target_protocol, **options)
        self.protocol = self.target.protocol
        self.schedule = schedule or Schedule()
        self._listings: dict[str, Any] = {}

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return (
            [cls._strip_protocol(one) for one in path]
            if isinstance(path, list)
            else (path.removeprefix("faulty://").rstrip("/") or "/")
        )

    def _around(self, op: str, path: str, call: Callable[[], T]) -> T:
        return self.schedule.around(op, path, lambda _: call())

    def open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        opened: list[Any] = []
        try:
            self._around("open", path, lambda: opened.append(self.target.open(path, mode, **kwargs)))
        except BaseException:
            for file in opened:
                if isinstance(file, AbstractBufferedFile):
                    file.closed = True  # else dropping it would finish an upload that nobody got to see
            raise
        return FaultFile(opened[0], path, self.schedule)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        def call(faults: set[str]) -> Any:
            key = (path, detail)
            before = self._listings.get(key)
            try:
                self._listings[key] = self.target.ls(path, detail=detail, **kwargs)
            except FileNotFoundError:
                if "lag" not in faults or before is None:
                    raise
            return before if "lag" in faults and before is not None else self._listings[key]

        return self.schedule.around("ls", path, call)

    def info(self, path: str, **kwargs: Any) -> Any:
        return self._around("info", path, lambda: self.target.info(path, **kwargs))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> Any:
        return self._around("cat_file", path, lambda: self.target.cat_file(path, start=start, end=end, **kwargs))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        def call(faults: set[str]) -> None:
            self.target.pipe_file(path, _mangled(value, faults), mode=mode, **kwargs)

        self.schedule.around("pipe_file", path, call)

    def rm_file(self, path: str) -> None:
        self._around("rm_file", path, lambda: self.target.rm_file(path))

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self._around("makedirs", path, lambda: self.target.makedirs(path, exist_ok=exist_ok))

    def unstrip_protocol(self, name: str) -> Any:
        return self.target.unstrip_protocol(name)


class FaultyOs:
    """``os`` with faults in the calls that make a local file durable; patch it over a module's ``os``."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def fsync(self, descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        self._schedule.around("os.fsync", path, lambda _: os.fsync(descriptor))

    def posix_fallocate(self, descriptor: int, offset: int, size: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        self._schedule.around("os.posix_fallocate", path, lambda _: os.posix_fallocate(descriptor, offset, size))

    def replace(self, source: str, target: str) -> None:
        self._schedule.around("os.replace", target, lambda _: os.replace(source, target))

    def link(self, source: str, target: str) -> None:
        self._schedule.around("os.link", target, lambda _: os.link(source, target))


class ObjectFile(AbstractBufferedFile):
    """An upload in parts; the object appears when the last one is in."""

    def _initiate_upload(self) -> None:
        self.parts: list[bytes] = []

    def _upload_chunk(self, final: bool = False) -> bool:
        self.parts.append(self.buffer.getvalue())
        if final:
            self.fs.pipe_file(self.path, b"".join(self.parts))
        return True

    def discard(self) -> None:
        self.parts = []


class ObjectFileSystem(AbstractFileSystem):
    """An object store in memory, shared by all instances."""

    protocol = "objects"
    root_marker = "/"
    objects: dict[str, tuple[bytes, int]] = {}  # noqa: RUF012 shared on purpose
    _versions = itertools.count()
    _lock = threading.Lock()

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        return "/" + path.removeprefix("objects://").strip("/")

    def _info(self, path: str) -> dict[str, Any]:
        data, version = self.objects[path]
        return {"name": path, "size": len(data), "type": "file", "etag": str(version)}

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        prefix = self._strip_protocol(path).rstrip("/") + "/"
        inside = [name for name in list(self.objects) if name.startswith(prefix)]
        if not inside:
            raise FileNotFoundError(path)
        found = [self._info(name) for name in inside if "/" not in name[len(prefix) :]]
        folders = {prefix + name[len(prefix) :].split("/")[0] for name in inside if "/" in name[len(prefix) :]}
        found += [{"name": folder, "size": 0, "type": "directory"} for folder in sorted(folders)]
        return found if detail else [info["name"] for info in found]

    def info(self, path: str, **kwargs: Any) -> Any:
        path = self._strip_protocol(path)
        try:
            return self._info(path)
        except KeyError:
            if any(name.startswith(path + "/") for name in list(self.objects)):
                return {"name": path, "size": 0, "type": "directory"}
            raise FileNotFoundError(path) from None

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        try:
            return self.objects[self._strip_protocol(path)][0][start:end]
        except KeyError:
            raise FileNotFoundError(path) from None

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        path = self._strip_protocol(path)
        with self._lock:
            if mode == "create" and path in self.objects:
                raise FileExistsError(path)
            self.objects[path] = (bytes(value), next(self._versions))

    def _rm(self, path: str) -> None:
        try:
            del self.objects[self._strip_protocol(path)]
        except KeyError:
            raise FileNotFoundError(path) from None

    def _open(self, path: str, mode: str = "rb", block_size: Any = None, autocommit: bool = True, **kwargs: Any) -> Any:
        kwargs.pop("cache_options", None)
        return ObjectFile(self, path, mode, block_size=block_size or 4096, autocommit=autocommit)


def register() -> None:
    """Let fsspec know the two filesystems. May be called again."""
    for cls in (FaultFileSystem, ObjectFileSystem):
        fsspec.register_implementation(cls.protocol, cls, clobber=True)
