"""Loader workers that outlive a signal to their whole process group, so that a fit can go on to its next save point."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from torch.utils.data import DataLoader

_POSSIBLE = hasattr(os, "register_at_fork") and hasattr(signal, "sigwaitinfo")
# what makes another program of this process or of a child, which would never get a signal that is blocked here
_STARTS_A_PROGRAM = frozenset({"subprocess.Popen", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"})

_shielded: dict[object, frozenset[int]] = {}
_fork = threading.local()


def shield_workers(names: Iterable[str]) -> Callable[[], None]:
    """Let signals pass by the workers that a ``DataLoader`` forks from now on, but for SIGTERM of this process itself.

    SLURM sends signals to all processes of a job, and a worker that one ends makes its fit fail before it could save. A
    worker that starts a program takes signals as before, since that program would be deaf as well. Workers that are
    spawned, or forked by a fork server, aren't shielded, nor is any where the system has no ``sigwaitinfo`` (macOS).

    Args:
        names: Of the signals.

    Returns:
        What ends it.

    >>> release = shield_workers(["SIGTERM"])
    >>> release()
    """
    token = object()
    _shielded[token] = frozenset(signal.Signals[name] for name in names)

    def release() -> None:
        _shielded.pop(token, None)

    return release


def _before_fork() -> None:
    _fork.signals = frozenset[int]().union(*_shielded.values())
    if _fork.signals:
        _fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _fork.signals)


def _after_fork_in_parent() -> None:
    if _fork.signals:
        signal.pthread_sigmask(signal.SIG_SETMASK, _fork.mask)


def _after_fork_in_child() -> None:
    _shielded.clear()
    if _fork.signals and not (_made_by_a_loader() and _pass_by(_fork.signals)):
        signal.pthread_sigmask(signal.SIG_SETMASK, _fork.mask)


def _made_by_a_loader() -> bool:
    frame = sys._getframe()
    while frame is not None:
        loader = frame.f_locals.get("self")
        if isinstance(loader, DataLoader) and loader.num_workers > 0:  # else its dataset is at work in this process
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _pass_by(signals: frozenset[int]) -> bool:
    """Take signals, which are blocked in all threads, in one that looks who sent them; whether that is possible."""
    parent = os.getppid()

    def take() -> None:
        while True:
            info = signal.sigwaitinfo(signals)
            asked = info.si_signo == signal.SIGTERM and info.si_pid == parent
            if asked or os.getppid() != parent:  # there is no fit any more that it would end
                os._exit(0)  # as torch does

    def on_event(event: str, _: tuple[Any, ...]) -> None:
        if event in _STARTS_A_PROGRAM:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)

    with contextlib.suppress(RuntimeError):  # no thread is to be had
        threading.Thread(target=take, name="ckpt-signals", daemon=True).start()
        sys.addaudithook(on_event)
        return True
    return False


if _POSSIBLE:
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
