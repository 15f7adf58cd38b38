"""CRC-32C of a checkpoint's bytes, taken piece by piece."""

from __future__ import annotations

from collections.abc import Iterable

import google_crc32c
import numpy as np

ALGORITHM = "crc32c"


class Checksum:
    """A running checksum. ``str()`` of it is what a record holds.

    >>> checksum = Checksum()
    >>> checksum.update(b"123")
    >>> checksum.update(memoryview(bytearray(b"456789")))
    >>> str(checksum)
    'crc32c:e3069283'
    """

    def __init__(self) -> None:
        self._crc = 0

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Take in the next bytes. ``data`` may be writable and of any item type, but must be contiguous."""
        # google_crc32c refuses bytearray and memoryview, but takes an array over the same memory
        self._crc = google_crc32c.extend(self._crc, np.frombuffer(data, np.uint8))

    @property
    def value(self) -> int:
        """The checksum of what was taken in so far."""
        return self._crc

    def __str__(self) -> str:
        return f"{ALGORITHM}:{self._crc:08x}"


def checksum_of(chunks: Iterable[bytes | bytearray | memoryview]) -> str:
    """The checksum of all ``chunks`` one after the other.

    >>> checksum_of([b"1234", b"56789"])
    'crc32c:e3069283'
    """
    checksum = Checksum()
    for chunk in chunks:
        checksum.update(chunk)
    return str(checksum)
