"""A checkpoint, taken at one moment, as bytes in host memory: everything is copied before the caller goes on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch

from lightning_ckpt_policy.checksum import checksum_of

CHUNK_BYTES = 8 << 20


class Image:
    """The bytes of a checkpoint file, held in chunks of host memory.

    Attributes:
        size: Bytes.
    """

    def __init__(self, chunks: list[memoryview]) -> None:
        self._chunks = chunks
        self._lock = threading.Lock()
        self.size = sum(chunk.nbytes for chunk in chunks)

    @cached_property
    def checksum(self) -> str:
        """``"crc32c:<hex>"`` of all bytes; worked out by the first thread that asks."""
        return checksum_of(self.chunks())

    def chunks(self) -> Iterator[memoryview]:
        """The bytes in order, read-only, at most :data:`CHUNK_BYTES` at a time.

        Raises:
            RuntimeError: the image was released.
        """
        index = 0
        while True:
            with self._lock:
                if self._chunks is None:
                    raise RuntimeError("this snapshot's memory was released, since its save was given up")
                if index == len(self._chunks):
                    return
                chunk = self._chunks[index]
            yield chunk
            index += 1

    def release(self) -> None:
        """Let go of the memory, also while a writer that hangs still holds this image."""
        with self._lock:
            self._chunks = None  # type: ignore[assignment]


class _Sink:
    """The file object that ``torch.save`` writes into."""

    def __init__(self) -> None:
        self._full: list[bytearray] = []
        self._current = bytearray()

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        start = 0
        while start < view.nbytes:
            take = min(CHUNK_BYTES - len(self._current), view.nbytes - start)
            self._current += view[start : start + take]
            start += take
            if len(self._current) == CHUNK_BYTES:
                self._full.append(self._current)
                self._current = bytearray()
        return view.nbytes

    def flush(self) -> None:
        pass

    def image(self) -> Image:
        chunks = [*self._full, self._current] if self._current else self._full
        return Image([memoryview(chunk).toreadonly() for chunk in chunks])


def take_snapshot(checkpoint: dict[str, Any]) -> Image:
    """Copy a checkpoint into host memory, as the bytes that ``torch.save`` writes for it.

    Whatever is changed afterwards (in place, through a view, in a NumPy array, in a custom object) doesn't reach the
    image; storages shared by several tensors are stored once, as in a file saved directly.

    Args:
        checkpoint: What ``Trainer.save_checkpoint`` dumped: anything that ``torch.save`` accepts.

    Raises:
        Exception: what ``torch.save`` raises for an object that can't be pickled.

    >>> import io
    >>> tensor = torch.zeros(2)
    >>> image = take_snapshot({"weight": tensor})
    >>> _ = tensor.fill_(1.0)
    >>> torch.load(io.BytesIO(b"".join(image.chunks())))
    {'weight': tensor([0., 0.])}
    """
    sink = _Sink()
    torch.save(checkpoint, sink)  # type: ignore[arg-type]
    return sink.image()
