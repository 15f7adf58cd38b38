"""What all tests have in common: how checkpoints are taken, and the servers of object stores."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator

import pytest

from lightning_ckpt_policy import snapshot
from tests.models import drain_each_save
from tests.servers import Missing, Server, serving


@pytest.fixture(autouse=True)
def small_tensors_are_deferred(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The models of these tests are tiny: let their state be copied in the background all the same."""
    if request.module.__name__ != "tests.test_snapshot":
        monkeypatch.setattr(snapshot, "DEFER_BYTES", 1)


@pytest.fixture(autouse=True)
def signals_do_what_they_do_by_default() -> Iterator[None]:
    """Whatever an earlier test left: a fit that fails at its start leaves Lightning's handlers in place."""
    names = [name for name in ("SIGTERM", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)]
    before = {name: signal.signal(signal.Signals[name], signal.SIG_DFL) for name in names}
    yield
    for name, handler in before.items():
        signal.signal(signal.Signals[name], signal.SIG_DFL if handler is None else handler)


@pytest.fixture
def drained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each save is confirmed before training goes on, so that no trigger waits for one on its way."""
    drain_each_save(monkeypatch)


@pytest.fixture(scope="session")
def server_of() -> Iterator[Callable[[str], Server]]:
    """The running server of a name. One that isn't installed fails the test in CI and skips it elsewhere."""
    running: dict[str, Server] = {}
    with contextlib.ExitStack() as stack:

        def get(name: str) -> Server:
            if name not in running:
                try:
                    running[name] = stack.enter_context(serving(name))
                except Missing as error:
                    if os.environ.get("CI"):
                        raise
                    pytest.skip(str(error))
            return running[name]

        yield get
