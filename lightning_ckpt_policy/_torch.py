"""torch's names that are private, or that not every supported version has, each used here and nowhere else.

A name that a later version takes away or changes is named by ``tests/test_torch_internals.py``.
"""

from __future__ import annotations

import pickle
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

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


def rendezvous_store() -> Any:
    """The key-value store by which the processes of the default group found each other."""
    return torch.distributed.distributed_c10d._get_default_store()


def is_set_within(store: Any, key: str, seconds: float) -> bool:
    """Wait until a key is in a store, or for so long."""
    try:
        store.wait([key], timedelta(seconds=seconds))
    except torch.distributed.DistStoreError:
        return False
    return True


def version_of(tensor: torch.Tensor) -> int:
    """How often autograd saw the tensor's memory being changed."""
    return tensor._version


def changes_in_backward(parameter: torch.Tensor) -> bool:
    """Whether a hook runs once the parameter's gradient is there, as optimizers that step in the backward pass use."""
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def save_without_data(checkpoint: Any, sink: Any, on_tensor: Callable[[torch.Tensor], None]) -> None:
    """As ``torch.save``, but instead of each storage's bytes ``sink.seek(size, 1)`` is called.

    Args:
        checkpoint: What to save.
        sink: A file object with ``write``, ``seek`` and ``flush``.
        on_tensor: Called with each tensor, in the order in which their storages come, before any storage does.

    Raises:
        RuntimeError: A tensor can't be saved in this way, or this version of torch can't.
    """
    skip_data = getattr(torch.serialization, "skip_data", None)
    if skip_data is None:
        raise RuntimeError("this version of torch has no skip_data")

    class Pickler(pickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, torch.Tensor):
                on_tensor(obj)
            return NotImplemented

    module = types.ModuleType("pickle_that_tells_of_tensors")
    module.Pickler = Pickler  # type: ignore[attr-defined]
    with skip_data():
        torch.save(checkpoint, sink, pickle_module=module)


def identity_of(storage: torch.UntypedStorage) -> int:
    """What tells a storage from any other that is alive."""
    identity: int = storage._cdata
    return identity
