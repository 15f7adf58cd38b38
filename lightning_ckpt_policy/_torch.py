"""torch's names that are private, or that not every supported version has, each used here and nowhere else.

A name that a later version takes away or changes is named by ``tests/test_torch_internals.py``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_crc32_lock = threading.Lock()


@contextmanager
def without_crc32() -> Iterator[None]:
    """Let ``torch.save`` leave out the CRC-32 of each record, which costs more than the copy and is never looked at.

    The setting is the process's, so a save by another thread at this moment leaves them out as well; ``torch.load``
    reads both. torch before 2.6 can't leave them out.
    """
    if not hasattr(torch.serialization, "set_crc32_options"):
        yield
        return
    with _crc32_lock:
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            yield
        finally:
            torch.serialization.set_crc32_options(before)


def version_of(tensor: torch.Tensor) -> int:
    """How often autograd saw the tensor's memory being changed."""
    return tensor._version


def changes_in_backward(parameter: torch.Tensor) -> bool:
    """Whether a hook runs once the parameter's gradient is there, as optimizers that step in the backward pass use."""
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))
