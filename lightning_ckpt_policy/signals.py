"""Signals as counts: a handler that only counts, in front of the handlers that were there before."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]
_SIGCHLD: signal.Signals | None = getattr(signal, "SIGCHLD", None)  # not on every platform
# how torch's error begins
_A_WORKER_ENDED = "DataLoader worker"
# counted as a signal once an earlier handler has raised
RAISED = "the error of its earlier handler"


class SignalCounter:
    """Counts how often signals arrive in this process, from `install` to `restore`.

    The handler that was there before is called too, except Python's own for SIGINT, which would raise at once. What it
    raises is held back until `raise_held`, so that a state can be saved first. A process that is forked in the meantime
    counts nothing and does what it would have done without.

    >>> counter = SignalCounter()
    >>> counter.install(["SIGUSR1"])
    True
    >>> signal.raise_signal(signal.SIGUSR1)
    >>> counter.restore()
    >>> dict(counter.counts)
    {'SIGUSR1': 1}
    """

    def __init__(self) -> None:
        # replaced, never changed: whoever holds it holds what had arrived up to then
        self.counts: Mapping[str, int] = {}
        self.held: BaseException | None = None
        self._earlier: dict[int, Any] = {}
        self._chained: dict[int, list[Handler]] = {}
        self._workers: Any = None
        self._pid = os.getpid()

    def install(self, names: Iterable[str], chain: Callable[[Any], list[Handler]] | None = None) -> bool:
        """Begin to count anew.

        Args:
            names: Of the signals.
            chain: Gives, for a handler that is there, those to call; by default that one.

        Returns:
            Whether that is possible: only the main thread can handle signals.
        """
        self.counts, self.held = {}, None
        self._pid = os.getpid()
        if threading.current_thread() is not threading.main_thread():
            return False
        for name in names:
            number = signal.Signals[name]
            earlier = signal.getsignal(number)
            self._earlier[number] = earlier
            handlers = [earlier] if chain is None else chain(earlier)
            self._chained[number] = [h for h in handlers if callable(h) and h is not signal.default_int_handler]
            signal.signal(number, self._arrived)
        return True

    def _spare_from_workers(self) -> None:
        # a signal to the whole process group ends dataloader workers too, for which torch would raise an error in the
        # middle of a batch; it still raises one where it waits for their data
        if self._workers is None and _SIGCHLD is not None and callable(signal.getsignal(_SIGCHLD)):
            self._workers = signal.signal(_SIGCHLD, self._child_ended)

    def _child_ended(self, number: int, frame: FrameType | None) -> None:
        try:
            self._workers(number, frame)
        except RuntimeError as error:
            if not str(error).startswith(_A_WORKER_ENDED):
                raise

    def restore(self) -> None:
        """Bring the earlier handlers back; one that was put in front of this one in the meantime stays."""
        if self._workers is not None:
            assert _SIGCHLD is not None
            if signal.getsignal(_SIGCHLD) == self._child_ended:
                signal.signal(_SIGCHLD, self._workers)
            self._workers = None
        for number, earlier in self._earlier.items():
            if signal.getsignal(number) == self._arrived:
                signal.signal(number, signal.SIG_DFL if earlier is None else earlier)
        self._earlier.clear()

    def raise_held(self) -> None:
        """Raise what an earlier handler raised, if one did; only once."""
        held, self.held = self.held, None
        if held is not None:
            self.counts = {name: count for name, count in self.counts.items() if name != RAISED}
            raise held

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            self._arrived_in_a_child(number, frame)
            return
        if number in self._earlier:
            name = signal.Signals(number).name
            self.counts = {**self.counts, name: self.counts.get(name, 0) + 1}
            self._spare_from_workers()
        for handler in self._chained[number]:
            try:
                handler(number, frame)
            except BaseException as error:
                self.held = error
                self.counts = {**self.counts, RAISED: 1}

    def _arrived_in_a_child(self, number: int, frame: FrameType | None) -> None:
        earlier = self._earlier.get(number, signal.SIG_IGN)
        handlers = [signal.default_int_handler] if earlier is signal.default_int_handler else self._chained[number]
        for handler in handlers:
            handler(number, frame)
        if not handlers and earlier != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
