from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from lightning_ckpt_policy.writer import BackgroundWriter


def test_jobs_run_in_order_saves_before_cleanups() -> None:
    writer = BackgroundWriter()
    gate = threading.Event()
    seen: list[str] = []
    writer.submit(lambda: (gate.wait(10), seen.append("first")))  # type: ignore[arg-type, func-returns-value]
    writer.submit_cleanup(lambda: seen.append("cleanup"))
    writer.submit(lambda: seen.append("second"))
    assert writer.saving
    assert not writer.drain(timeout=0.05)
    gate.set()
    assert writer.close(timeout=10)
    assert seen == ["first", "second", "cleanup"]
    assert writer.idle


def test_no_thread_is_left_and_a_later_job_starts_a_new_one() -> None:
    writer = BackgroundWriter()
    for round_ in range(3):
        done = threading.Event()
        writer.submit(done.set)
        assert writer.close(timeout=10)
        assert done.is_set()
        assert "ckpt-writer" not in [thread.name for thread in threading.enumerate()], round_


def test_a_job_that_hangs_is_given_up_and_the_next_one_runs() -> None:
    writer = BackgroundWriter()
    gate = threading.Event()
    seen: list[str] = []
    writer.submit(lambda: gate.wait() and None, timeout=0.1, on_timeout=lambda: seen.append("given up"))  # type: ignore[func-returns-value]
    writer.submit(lambda: seen.append("next"))
    assert writer.close(timeout=10)
    assert seen == ["given up", "next"]
    gate.set()


def test_an_escaped_error_is_logged_and_the_thread_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    writer = BackgroundWriter()
    done = threading.Event()

    def fail() -> None:
        raise ValueError("a bug")

    with caplog.at_level(logging.ERROR):
        writer.submit(fail)
        writer.submit(done.set)
        assert writer.close(timeout=10)
    assert done.is_set()
    assert "a bug" in caplog.text


def test_saves_only_does_not_wait_for_cleanups() -> None:
    writer = BackgroundWriter()
    gate = threading.Event()
    writer.submit_cleanup(lambda: gate.wait(30) and None)  # type: ignore[func-returns-value]
    assert writer.drain(timeout=5, saves_only=True)
    assert not writer.drain(timeout=0.05)
    gate.set()
    assert writer.close(timeout=10)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_neither_waits_nor_saves() -> None:
    writer = BackgroundWriter()
    gate = threading.Event()
    writer.submit(lambda: gate.wait(30) and None)  # type: ignore[func-returns-value]
    child = os.fork()
    if child == 0:
        code = 0
        try:
            if not (writer.drain() and writer.close()):
                code = 1
            try:
                writer.submit(lambda: None)
                code = 2
            except RuntimeError:
                pass
        finally:
            os._exit(code)
    deadline = time.monotonic() + 20
    while (result := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    if result == (0, 0):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    gate.set()
    assert result == (child, 0)
    assert writer.close(timeout=10)


def test_the_interpreter_waits_for_a_pending_job(tmp_path: object) -> None:
    code = (
        "import time\n"
        "from lightning_ckpt_policy.writer import BackgroundWriter\n"
        "writer = BackgroundWriter()\n"
        "writer.submit(lambda: (time.sleep(0.5), print('written', flush=True)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "written\n"


def test_the_interpreter_does_not_wait_for_ever() -> None:
    code = (
        "import time, logging\n"
        "from lightning_ckpt_policy.writer import BackgroundWriter\n"
        "BackgroundWriter.exit_timeout = 0.2\n"
        "writer = BackgroundWriter()\n"
        "writer.submit(lambda: time.sleep(1000))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "still unwritten" in done.stderr


def test_a_job_that_cannot_be_waited_for_is_given_up() -> None:
    """It may go on unseen, so it mustn't count as done."""
    writer = BackgroundWriter()
    given_up = threading.Event()
    writer.submit(lambda: None, timeout=float("inf"), on_timeout=given_up.set)
    assert writer.drain(10)
    assert given_up.is_set()
    writer.close(10)
