"""One background thread that runs saves and deletes one at a time, saves first."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence

log = logging.getLogger(__name__)

Job = Callable[[], None]


class BackgroundWriter:
    """Runs jobs in the order they were given, saves before clean-up, never two at once.

    A job reports its own outcome; an exception that escapes one is logged. The thread starts with the first job and
    ends in :meth:`close`. It is a daemon, so that a store that hangs can't hold the interpreter's exit; an exit with
    jobs left waits for them, at most :attr:`exit_timeout` seconds, and says what was lost.

    >>> writer = BackgroundWriter()
    >>> done = []
    >>> writer.submit(lambda: done.append("saved"))
    >>> writer.drain(timeout=10), done
    (True, ['saved'])
    >>> writer.close(timeout=10)
    True
    """

    exit_timeout = 60.0

    def __init__(self) -> None:
        #: Called before anyone waits: it does what the jobs need of the thread that will wait
        self.before_wait: Job = lambda: None
        self._condition = threading.Condition()
        self._saves: deque[tuple[Job, float | None, Job | None]] = deque()
        self._cleanups: deque[tuple[Job, float | None, Job | None]] = deque()
        self._running: str | None = None
        self._thread: threading.Thread | None = None
        self._closing = False
        self._pid = os.getpid()
        self._unregister: Callable[[], object] | None = None

    def __reduce__(self) -> tuple[type[BackgroundWriter], tuple[()]]:
        return type(self), ()  # a copy has nothing to do yet

    @property
    def saving(self) -> bool:
        """Whether a save is waiting or being written."""
        return bool(self._saves) or self._running == "save"

    @property
    def idle(self) -> bool:
        """Whether nothing is waiting or running."""
        return not self._saves and not self._cleanups and self._running is None

    def submit(self, job: Job, *, timeout: float | None = None, on_timeout: Job | None = None) -> None:
        """Queue a save.

        Args:
            job: What to run.
            timeout: Seconds after which the job is given up: its thread is left behind and the next job runs.
            on_timeout: Called in the writer's thread once ``job`` was given up.
        """
        self._refuse_in_a_fork()
        with self._condition:
            self._saves.append((job, timeout, on_timeout))
            self._start()

    def submit_cleanup(self, job: Job, *, timeout: float | None = None, on_timeout: Job | None = None) -> None:
        """Queue a job that runs only while no save is waiting; the arguments are those of :meth:`submit`."""
        self._refuse_in_a_fork()
        with self._condition:
            self._cleanups.append((job, timeout, on_timeout))
            self._start()

    def drain(self, timeout: float | None = None, *, saves_only: bool = False) -> bool:
        """Wait until all jobs have run.

        Args:
            timeout: Seconds to wait at most; ``None`` waits as long as it takes.
            saves_only: Don't wait for clean-up jobs.

        Returns:
            Whether nothing is left.
        """
        if os.getpid() != self._pid:  # a forked child has no such thread and nothing to wait for
            return True
        self.before_wait()
        with self._condition:
            return self._condition.wait_for(lambda: not self.saving if saves_only else self.idle, timeout)

    def close(self, timeout: float | None = None) -> bool:
        """Wait as :meth:`drain` does, then end the thread. A later job starts a new one.

        Returns:
            Whether nothing was left.
        """
        if os.getpid() != self._pid:
            return True
        drained = self.drain(timeout)
        dropped: list[Job | None] = []
        with self._condition:
            thread, self._thread = self._thread, None
            self._closing = True
            if not drained:  # whoever waited is told that this is lost: it mustn't come about later
                dropped = [on_timeout for _, _, on_timeout in (*self._saves, *self._cleanups)]
                self._saves.clear()
                self._cleanups.clear()
                self._running = None
            self._condition.notify_all()
        for given_up in dropped:
            if given_up is not None:
                given_up()
        if thread is not None and drained:
            thread.join()
        if self._unregister is not None:
            self._unregister()
            self._unregister = None
        return drained

    def _refuse_in_a_fork(self) -> None:
        # before the lock, which another thread of the parent may have held when it forked
        if os.getpid() == self._pid:
            return
        if self._thread is None and self.idle:  # a launcher forked before anything was saved
            self._condition = threading.Condition()
            self._pid = os.getpid()
        else:
            raise RuntimeError("a checkpoint can't be saved from a forked child of the process that set the writer up")

    def _start(self) -> None:
        if self._thread is None:
            self._closing = False
            self._thread = threading.Thread(target=self._loop, name="ckpt-writer", daemon=True)
            self._thread.start()
            self._unregister = _wait_at_exit(self)
        self._condition.notify_all()

    def _loop(self) -> None:
        me = threading.current_thread()
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._saves or self._cleanups or self._thread is not me)
                if self._thread is not me:
                    return
                if self._saves:
                    job, timeout, on_timeout = self._saves.popleft()
                    self._running = "save"
                else:
                    job, timeout, on_timeout = self._cleanups.popleft()
                    self._running = "cleanup"
            try:
                if timeout is None:
                    job()
                elif not run_within(job, timeout) and on_timeout is not None:
                    on_timeout()
            except BaseException:  # a job reports its own errors: this one is a bug, and must not end the thread
                log.exception("a background checkpoint job failed")
                if on_timeout is not None:  # nobody waits for it any more, so it mustn't count as done
                    on_timeout()
            finally:
                del job, on_timeout
                with self._condition:
                    if self._thread is me:  # else it was closed over this job, and another thread may be at work
                        self._running = None
                        self._condition.notify_all()


def run_within(job: Job, timeout: float) -> bool:
    """Run ``job`` in a thread of its own; whether it ended within ``timeout`` seconds."""
    worker = threading.Thread(target=job, name="ckpt-save", daemon=True)
    try:
        worker.start()
    except RuntimeError:  # the interpreter is on its way out and starts no thread any more
        job()
        return True
    worker.join(timeout)
    return not worker.is_alive()


def run_together(jobs: Sequence[Job]) -> None:
    """Run jobs that report their own errors at once, all but the first in threads of their own, and wait for them."""
    threads = []
    for job in jobs[1:]:
        thread = threading.Thread(target=job, name="ckpt-cleanup", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # as above
            job()
        else:
            threads.append(thread)
    for job in jobs[:1]:
        job()
    for thread in threads:
        thread.join()


def _wait_at_exit(writer: BackgroundWriter) -> Callable[[], object]:
    reference = weakref.ref(writer)

    def wait() -> None:
        alive = reference()
        if alive is None or alive.idle:
            return
        started = time.monotonic()
        if not alive.close(alive.exit_timeout):
            log.error(
                "the process ends with a checkpoint still unwritten after waiting %.0f s: it is lost; "
                "older checkpoints are untouched",
                time.monotonic() - started,
            )

    atexit.register(wait)
    return lambda: atexit.unregister(wait)
