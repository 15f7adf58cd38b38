"""The servers of object stores, one of each for the whole test run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

import pytest

from tests.servers import Missing, Server, serving


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
