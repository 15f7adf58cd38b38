"""What is tried again, how often and how long apart."""

from __future__ import annotations

import errno
import random
import threading
import time
import traceback
from collections.abc import Callable

from tenacity import (
    AsyncRetrying,
    RetryCallState,
    Retrying,
    retry_if_exception,
    retry_if_exception_type,
    stop_after_attempt,
    stop_after_delay,
    wait_exponential,
)

from lightning_ckpt_policy.errors import BucketNotFoundError, DamagedCheckpointError

TRIES = 4
# seconds for which a machine's network may come up after a fit has begun
REACHED_WITHIN = 20.0
_FINAL_ERRNOS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.EFBIG}
)
_FINAL_TYPES = (PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError, BucketNotFoundError)


_backoff = wait_exponential(multiplier=0.2, max=20)
_chance = random.Random()  # tenacity's own jitter draws from the generator that training uses


def _wait(state: RetryCallState) -> float:
    return _backoff(state) + _chance.uniform(0, 0.2)


def is_transient(error: BaseException) -> bool:
    """Whether trying again may help: a full disk or a missing permission doesn't go away by itself.

    >>> is_transient(ConnectionResetError()), is_transient(PermissionError())
    (True, False)
    """
    if isinstance(error, _FINAL_TYPES) or (isinstance(error, OSError) and error.errno in _FINAL_ERRNOS):
        return False
    return isinstance(error, (OSError, DamagedCheckpointError))


def retrying(stop: threading.Event | None = None) -> Retrying:
    """Call a function until it succeeds, :data:`TRIES` times at most: ``retrying()(function, *args)``.

    Args:
        stop: Once set, the waits between tries are over at once.

    Raises:
        Exception: what the last try raised, or the first that isn't transient.

    >>> retrying()(int, "3")
    3
    """
    return Retrying(
        stop=stop_after_attempt(TRIES),
        wait=_wait,
        retry=retry_if_exception(is_transient),
        sleep=time.sleep if stop is None else stop.wait,  # type: ignore[arg-type]
        reraise=True,
    )


def reaching() -> Retrying:
    """Call a function until the store answers it, for :data:`REACHED_WITHIN` at least: ``reaching()(function, *args)``.

    Raises:
        Exception: what the last try raised, or the first that isn't a ``ConnectionError`` or ``TimeoutError``.
    """
    return Retrying(
        stop=stop_after_delay(REACHED_WITHIN),
        wait=_wait,
        retry=retry_if_exception_type((ConnectionError, TimeoutError)),
        reraise=True,
    )


def retrying_async(may_pass: Callable[[BaseException], bool]) -> AsyncRetrying:
    """As :func:`retrying`, for a coroutine function and errors of which ``may_pass`` is true."""
    return AsyncRetrying(stop=stop_after_attempt(TRIES), wait=_wait, retry=retry_if_exception(may_pass), reraise=True)


def forget_frames(error: BaseException) -> None:
    """Let go of what the frames of an error hold, as the bytes that were being written, before it is kept."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        one = pending.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            pending += [one.__cause__, one.__context__]
