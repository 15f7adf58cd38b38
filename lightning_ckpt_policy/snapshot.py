"""A checkpoint, taken at one moment, as the bytes of its file in host memory.

``torch.save`` writes the file into reused memory. What is known to stay still for a while may be left out at first
and copied by a background thread; :meth:`Image.complete` is then called before anything can change it.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lightning_ckpt_policy import _torch
from lightning_ckpt_policy.checksum import Checksum
from lightning_ckpt_policy.errors import CheckpointSaveError

log = logging.getLogger(__name__)

CHUNK_BYTES = 8 << 20
# a smaller tensor is copied at once: that takes no longer than to note that it has to be copied
DEFER_BYTES = 16 << 10
_PAGE = mmap.PAGESIZE
_Bytes = npt.NDArray[np.uint8]


class Staging:
    """Host memory in chunks of :data:`CHUNK_BYTES`, page-aligned, touched once and used again by each snapshot.

    A copy into memory that was never touched takes many times as long as one into memory that was.

    Args:
        pinned: Whether the memory is page-locked, for copies from a CUDA device.
    """

    def __init__(self, pinned: bool = False) -> None:
        self.pinned = pinned
        self._lock = threading.Lock()
        self._free: list[_Bytes] = []
        self._made: weakref.WeakValueDictionary[int, _Bytes] = weakref.WeakValueDictionary()
        self._wanted = 0
        self._open = True
        self._pid = os.getpid()

    def __reduce__(self) -> tuple[type[Staging], tuple[bool]]:
        return type(self), (self.pinned,)  # a copy in another process has no memory yet

    @property
    def size(self) -> int:
        """Bytes of all chunks, free or in use."""
        return len(self._made) * CHUNK_BYTES

    def _make(self) -> _Bytes:
        chunk = _new_chunk(self.pinned)
        self._made[id(chunk)] = chunk
        return chunk

    def take(self) -> _Bytes:
        """A chunk, with whatever it held before."""
        if self._pid != os.getpid():
            # a forked child doesn't have the parent's chunks, nor the thread that may have held the lock
            self._lock, self._pid = threading.Lock(), os.getpid()
            self._free = []
            self._made.clear()
        with self._lock:
            self._open = True
            return self._free.pop() if self._free else self._make()

    def give_back(self, chunks: Iterable[_Bytes]) -> None:
        """Let chunks be used again, or after :meth:`clear` let go of them."""
        with self._lock:
            if self._open:
                self._free.extend(chunks)

    def reserve(self, size: int) -> threading.Thread | None:
        """Make and touch chunks in the background until there are ``size`` bytes, or until :meth:`clear` is called."""
        with self._lock:
            self._wanted, self._open = size, True
            if self.size >= size:
                return None
        thread = threading.Thread(target=self._touch, name="ckpt-reserve", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # none is to be had: the first save makes its memory itself
            return None
        return thread

    def _touch(self) -> None:
        while True:
            with self._lock:
                if self.size >= self._wanted:
                    return
                chunk = self._make()
            ctypes.memset(chunk.ctypes.data, 0, CHUNK_BYTES)
            self.give_back([chunk])

    def clear(self) -> None:
        """Give the chunks back to the system: free ones now, others once they are given back."""
        with self._lock:
            self._wanted, self._open = 0, False
            self._free.clear()


# those of this process that are alive, for what a forked child has to do about them
_chunks_alive: weakref.WeakValueDictionary[int, _Bytes] = weakref.WeakValueDictionary()


def _keep_inherited_chunks() -> None:
    """In a forked child, never free a chunk: its memory wasn't inherited, and may be something else's by now."""
    for chunk in list(_chunks_alive.values()):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(chunk))
    _chunks_alive.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep_inherited_chunks)


def _new_chunk(pinned: bool) -> _Bytes:
    if pinned:
        with contextlib.suppress(RuntimeError):  # no more memory may be page-locked: slower, and as good
            pinned_chunk: _Bytes = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True).numpy()
            return pinned_chunk
    memory = mmap.mmap(-1, CHUNK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):  # a fork would make every page be copied at its next use
        if hasattr(mmap, advice):
            with contextlib.suppress(OSError):  # a kernel without it works as well, only slower
                memory.madvise(getattr(mmap, advice))
    chunk = np.frombuffer(memory, np.uint8)
    _chunks_alive[id(chunk)] = chunk
    return chunk


@dataclass(frozen=True)
class Still:
    """A storage that nothing changes until a moment that the caller knows.

    Attributes:
        name: What users call what lies in it.
        storage: The storage.
        address: Where it lies.
        tensors: The tensors that share it out among them.
    """

    name: str
    storage: torch.UntypedStorage
    address: int
    tensors: list[torch.Tensor] = field(default_factory=list)

    @property
    def on_device(self) -> bool:
        """Whether it lies in a CUDA device's memory."""
        return self.storage.device.type == "cuda"

    @property
    def moved(self) -> bool:
        """Whether its memory was given up."""
        return self.storage.data_ptr() != self.address

    @property
    def versions(self) -> list[int]:
        """How often autograd saw each tensor change. A hint: fused steps, ``.data`` and aliases don't count."""
        return [_torch.version_of(tensor) for tensor in self.tensors]

    @property
    def covered(self) -> bool:
        """Whether the tensors make up all of its memory, so that nothing else lies in it."""
        size = self.storage.nbytes()
        if self.tensors[0].nbytes == size and self.tensors[0].is_contiguous():
            return True
        end = 0
        for start, stop in sorted(_span(tensor) for tensor in self.tensors):
            if start > end:
                return False
            end = max(end, stop)
        return end == size


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First and last byte (exclusive) of the memory that a tensor fills; nothing if it leaves gaps."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    start = int(tensor.storage_offset()) * tensor.element_size()
    return start, start + (tensor.nbytes if tensor.permute(order).is_contiguous() else 0)


def still_storages(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[int, Still]:
    """The storages, by address, that may be copied later, of named tensors that stay still.

    Small ones are left out, those that aren't plain memory of this process alone, and those in which something else
    lies as well.

    >>> list(still_storages([("weight", torch.zeros(10_000)), ("bias", torch.zeros(3))]).values())[0].name
    'weight'
    """
    still: dict[int, Still] = {}
    for name, tensor in tensors:
        if (
            tensor.layout != torch.strided
            or tensor.device.type not in ("cpu", "cuda")
            or tensor.is_quantized
            or tensor.is_inference()
            or type(tensor) not in (torch.Tensor, torch.nn.Parameter)
        ):
            continue
        storage = tensor.untyped_storage()
        if storage.nbytes() < DEFER_BYTES or (tensor.device.type == "cpu" and storage.is_shared()):
            continue
        one = still.setdefault(storage.data_ptr(), Still(name, storage, storage.data_ptr()))
        one.tensors.append(tensor)
    return {address: one for address, one in still.items() if one.covered}


@dataclass(frozen=True)
class _Piece:
    """Bytes of a storage that are to be copied to a place in a chunk."""

    still: Still
    start: int
    chunk: _Bytes
    offset: int
    size: int

    def copy(self, in_background: bool, streams: Mapping[torch.device, torch.cuda.Stream]) -> None:
        if self.still.moved:
            return  # `changed` tells the caller
        if self.still.on_device:
            with torch.cuda.stream(streams[self.still.storage.device]):
                _copy_storage(self.chunk, self.offset, self.still.storage, self.start, self.size)
            return
        source = self.still.address + self.start
        if in_background:
            ctypes.memmove(self.chunk.ctypes.data + self.offset, source, self.size)
        else:
            _copy(self.chunk, self.offset, source, self.size)


class Image:
    """The bytes of a checkpoint file, held in chunks of host memory.

    Attributes:
        size: Bytes.
        deferred: Bytes that weren't copied at once.
        checksum: ``"crc32c:<hex>"`` of all bytes, once they were read through.
        held_seconds: How long the training loop was held for it, seconds.
        audit_seconds: How long checking the copy took, seconds; not part of `held_seconds`.
    """

    def __init__(self, staging: Staging) -> None:
        self.size = 0
        self.deferred = 0
        self.checksum: str | None = None
        self.held_seconds = 0.0
        self.audit_seconds = 0.0
        self._staging = staging
        self._chunks: list[_Bytes] | None = []
        self._still: list[tuple[Still, int, list[int]]] = []  # with its place in the file and its versions
        self._pieces: deque[_Piece] = deque()
        self._condition = threading.Condition()
        self._copying = 0
        self._failed: str | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}  # beside the one that trains

    # taking it

    def write(self, data: memoryview, still: Mapping[int, Still]) -> None:
        """Append bytes; those of a storage in ``still`` are only noted."""
        size = data.nbytes
        address = int(np.frombuffer(data, np.uint8).ctypes.data)
        one = still.get(address)
        if one is not None and one.storage.nbytes() == size:
            self._defer(one, size)
            return
        for chunk, offset, take in self._append(size):
            _copy(chunk, offset, address, take)
            address += take

    def write_small(self, data: bytearray) -> None:
        """As :meth:`write` for a few bytes that nothing else holds."""
        source, done = np.frombuffer(data, np.uint8), 0
        for chunk, offset, take in self._append(len(data)):
            chunk[offset : offset + take] = source[done : done + take]
            done += take

    def write_storage(self, storage: torch.UntypedStorage, still: Mapping[int, Still]) -> None:
        """Append a storage's bytes, or note them if it is in ``still``; it may lie on a device."""
        one = still.get(storage.data_ptr())
        if one is not None and one.storage.nbytes() == storage.nbytes():
            self._defer(one, storage.nbytes())
            return
        start = 0
        for chunk, offset, take in self._append(storage.nbytes()):
            _copy_storage(chunk, offset, storage, start, take, wait=True)
            start += take

    def _defer(self, one: Still, size: int) -> None:
        device = one.storage.device
        if one.on_device and device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._streams[device].wait_stream(torch.cuda.current_stream(device))  # what was computed so far
        self._still.append((one, self.size, one.versions))
        self.deferred += size
        done = 0
        for chunk, offset, take in self._append(size):
            self._pieces.append(_Piece(one, done, chunk, offset, take))
            done += take

    def clear(self) -> None:
        """Begin anew."""
        assert self._chunks is not None
        self._finish_streams()
        self._staging.give_back(self._chunks)
        self._chunks = []
        self._still.clear()
        self._pieces.clear()
        self.size = self.deferred = 0

    def _append(self, size: int) -> Iterator[tuple[_Bytes, int, int]]:
        """Places for the next ``size`` bytes: chunk, offset in it, bytes."""
        assert self._chunks is not None
        while size:
            offset = self.size % CHUNK_BYTES
            if offset == 0:
                self._chunks.append(self._staging.take())
            take = min(size, CHUNK_BYTES - offset)
            self.size += take
            size -= take
            yield self._chunks[-1], offset, take

    def start(self) -> None:
        """Begin to copy what was deferred, in a background thread."""
        if self._pieces:
            with contextlib.suppress(RuntimeError):  # no thread is to be had: `complete` does it all
                threading.Thread(target=self._copy_pieces, args=(True,), name="ckpt-copy", daemon=True).start()

    @property
    def copied(self) -> bool:
        """Whether nothing deferred is left to be copied."""
        return not self._pieces and not self._copying

    def complete(self) -> None:
        """Return once everything is copied, or will be before a device changes it; the caller's thread helps."""
        self._copy_pieces(in_background=False)
        with self._condition:
            self._condition.wait_for(lambda: not self._copying)
        for device, stream in self._streams.items():
            # a device's copies may not be over yet, but it changes nothing before they are
            torch.cuda.current_stream(device).wait_stream(stream)

    def _finish_streams(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()

    def _copy_pieces(self, in_background: bool) -> None:
        while True:
            with self._condition:
                if not self._pieces:
                    return
                piece = self._pieces.popleft()
                self._copying += 1
            try:
                piece.copy(in_background, self._streams)
            except Exception:  # the copy isn't used then
                log.exception("%s could not be copied", piece.still.name)
                self._failed = piece.still.name
            finally:
                del piece
                with self._condition:
                    self._copying -= 1
                    self._condition.notify_all()

    # checking it

    @property
    def changed(self) -> str | None:
        """The name of a deferred storage that is known to have changed since, None if none is."""
        for still, _, versions in self._still:
            if still.moved or still.versions != versions:
                return still.name
        return self._failed

    def fingerprints(self) -> list[str]:
        """Checksums of the deferred storages as they are now."""
        return [_checksum(_bytes_of(still)) for still, _, _ in self._still]

    def differs(self, fingerprints: list[str]) -> str | None:
        """The name of a deferred storage that isn't what ``fingerprints`` told any more, None if all are.

        Both the copy and the storage itself are looked at: the copy may have been made before a change by chance.
        """
        self._finish_streams()
        for (still, place, _), fingerprint in zip(self._still, fingerprints, strict=True):
            if still.moved or _checksum(_bytes_of(still)) != fingerprint:
                return still.name
            if _checksum(self._staged(place, still.storage.nbytes())) != fingerprint:
                return still.name
        return None

    def _staged(self, place: int, size: int) -> Iterator[_Bytes]:
        assert self._chunks is not None
        while size:
            index, offset = divmod(place, CHUNK_BYTES)
            take = min(size, CHUNK_BYTES - offset)
            yield self._chunks[index][offset : offset + take]
            place += take
            size -= take

    # using it

    def chunks(self) -> Iterator[memoryview]:
        """The bytes in order, read-only, at most :data:`CHUNK_BYTES` at a time.

        Raises:
            RuntimeError: the image was released.
        """
        self._finish_streams()
        for start in range(0, self.size, CHUNK_BYTES):
            with self._condition:
                if self._chunks is None:
                    raise RuntimeError("this snapshot's memory was released, since its save was given up")
                chunk = self._chunks[start // CHUNK_BYTES]
            yield chunk.data[: self.size - start].toreadonly()

    def release(self, *, in_use: bool = False) -> None:
        """Let the memory be used again, or, if a writer that hangs may still read it, let go of it."""
        with self._condition:
            chunks, self._chunks = self._chunks, None
            self._pieces.clear()
            self._still.clear()
            self._condition.wait_for(lambda: not self._copying)
        self._finish_streams()
        if chunks is not None and not in_use:
            self._staging.give_back(chunks)


class _Sink:
    """The file object that ``torch.save`` writes into."""

    def __init__(self, image: Image, still: Mapping[int, Still]) -> None:
        self._image = image
        self._still = still
        self._small = bytearray()  # many writes are of a few bytes
        self.storages: dict[int, torch.UntypedStorage] = {}  # that are to come, in order

    def write(self, data: memoryview) -> int:
        size = data.nbytes
        if size < DEFER_BYTES:
            self._small += data
        else:
            self.flush()
            self._image.write(data, self._still)
        return size

    def expect(self, tensor: torch.Tensor) -> None:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
            raise RuntimeError(f"{type(tensor).__name__} with layout {tensor.layout} isn't plain")
        storage = tensor.untyped_storage()
        if storage.nbytes():
            self.storages.setdefault(_torch.identity_of(storage), storage)

    def seek(self, size: int, whence: int) -> None:
        if size:
            self.flush()
            storage = self.storages.pop(next(iter(self.storages)))
            if whence != os.SEEK_CUR or storage.nbytes() != size:
                raise RuntimeError(f"a storage of {size} bytes is written where one of {storage.nbytes()} should be")
            self._image.write_storage(storage, self._still)

    def flush(self) -> None:
        if self._small:
            self._image.write_small(self._small)
            self._small = bytearray()


def take_snapshot(
    checkpoint: dict[str, Any], staging: Staging | None = None, still: Mapping[int, Still] | None = None
) -> Image:
    """Copy a checkpoint into host memory, as the bytes that ``torch.save`` writes for it.

    Whatever is changed afterwards (in place, through a view, in a NumPy array, in a custom object) doesn't reach the
    image, but for the storages in ``still``, which may not change before :meth:`Image.complete` has returned.
    Storages shared by several tensors are stored once, as in a file saved directly.

    Args:
        checkpoint: What ``Trainer.save_checkpoint`` dumped: anything that ``torch.save`` accepts.
        staging: The memory to use, by default new one.
        still: What needn't be copied at once, from :func:`still_storages`.

    Raises:
        CheckpointSaveError: There is an object that can't be pickled.
        Exception: What else ``torch.save`` raises.

    >>> import io
    >>> tensor = torch.zeros(2)
    >>> image = take_snapshot({"weight": tensor})
    >>> _ = tensor.fill_(1.0)
    >>> torch.load(io.BytesIO(b"".join(image.chunks())))
    {'weight': tensor([0., 0.])}
    """
    image = Image(staging or Staging())
    try:
        with _torch.without_crc32():
            if any(one.on_device for one in (still or {}).values()):
                _save_from_device(checkpoint, image, still or {})
            else:
                _save(checkpoint, _Sink(image, still or {}))
    except Exception as error:
        image.release()
        culprits = [key for key, value in checkpoint.items() if why_unsavable(value) is not None]
        if not culprits:
            raise
        raise CheckpointSaveError(
            f"what is under {', '.join(map(repr, culprits))} in the checkpoint can't be pickled ({error}): leave it "
            "out, or give it a __getstate__"
        ) from error
    except BaseException:
        image.release()
        raise
    return image


class _Nowhere:
    def write(self, data: memoryview) -> int:
        return data.nbytes

    def flush(self) -> None:
        pass


def why_unsavable(value: Any) -> Exception | None:
    """What ``torch.save`` raises for a value, ``None`` if it can be saved.

    >>> why_unsavable(3)
    """
    try:
        torch.save(value, _Nowhere())  # type: ignore[arg-type]
    except Exception as error:
        return error
    return None


def _save(checkpoint: dict[str, Any], sink: _Sink) -> None:
    torch.save(checkpoint, sink)  # type: ignore[arg-type]
    sink.flush()


def _save_from_device(checkpoint: dict[str, Any], image: Image, still: Mapping[int, Still]) -> None:
    """As ``torch.save``, which would copy what lies on a device by itself; if this can't, it does."""
    sink = _Sink(image, still)
    try:
        _torch.save_without_data(checkpoint, sink, sink.expect)
        sink.flush()
        if sink.storages:
            raise RuntimeError(f"{len(sink.storages)} storages weren't written")
    except Exception as error:
        log.warning("all state is copied before training goes on: %s: %s", type(error).__name__, error)
        image.clear()
        _save(checkpoint, _Sink(image, {}))


def _copy_storage(
    chunk: _Bytes, offset: int, storage: torch.UntypedStorage, start: int, size: int, *, wait: bool = False
) -> None:
    """Copy bytes of a storage into a chunk; from a device without waiting for it, unless asked to."""
    source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    torch.from_numpy(chunk[offset : offset + size]).copy_(source[start : start + size], non_blocking=not wait)


def _bytes_of(still: Still) -> Iterator[_Bytes]:
    size = still.storage.nbytes()
    if not still.on_device:
        yield _at(still.address, size)
        return
    chunk = np.empty(CHUNK_BYTES, np.uint8)
    for start in range(0, size, CHUNK_BYTES):
        take = min(CHUNK_BYTES, size - start)
        _copy_storage(chunk, 0, still.storage, start, take, wait=True)
        yield chunk[:take]


def _at(address: int, size: int) -> _Bytes:
    """The bytes at an address, without a copy."""
    memory: Any = (ctypes.c_ubyte * size).from_address(address)
    found: _Bytes = np.frombuffer(memory, np.uint8)
    return found


def _copy(chunk: _Bytes, offset: int, address: int, size: int) -> None:
    """Copy bytes into a chunk, with as many threads as torch uses."""
    torch.from_numpy(chunk[offset : offset + size]).copy_(torch.from_numpy(_at(address, size)))


def _checksum(parts: Iterable[_Bytes]) -> str:
    checksum = Checksum()
    for part in parts:
        checksum.update(part.data)
    return str(checksum)
