"""Object stores over real servers: the conformance suite on each."""

from __future__ import annotations

import contextlib
import sys
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from lightning_ckpt_policy import object_stores
from lightning_ckpt_policy.store import CheckpointStore
from tests.servers import Server
from tests.store_conformance import Folder, StoreConformance


class ServerConformance(StoreConformance):
    name: str

    @pytest.fixture(autouse=True)
    def _quick(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # moto says 500 for ever of an upload that was aborted
        monkeypatch.setattr(object_stores, "REQUEST_SECONDS", 10.0)

    @pytest.fixture
    def server(self, server_of: Callable[[str], Server]) -> Server:
        return server_of(self.name)

    @pytest.fixture
    def url(self, server: Server) -> str:
        return f"{server.bucket}/{uuid.uuid4().hex}/run"

    @pytest.fixture
    def options(self, server: Server) -> dict[str, Any]:
        return server.options()

    def test_a_prefix_that_is_an_object(self, url: str, options: dict[str, Any], folder: Folder) -> None:
        folder.fs.pipe_file(f"{folder.root}/a", b"")
        with contextlib.suppress(OSError):  # a store that is a disk can't have both
            folder.put("a/inside", b"")
        with pytest.raises(NotADirectoryError, match=r"dirpath=.*is a file"):
            CheckpointStore(f"{url}/a", options).check()


class TestS3(ServerConformance):
    name = "moto"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="nanio needs Python 3.11")
@pytest.mark.filterwarnings("ignore:.*takes no notice of If-None-Match")
class TestS3OnDisk(ServerConformance):
    name = "nanio"

    def test_check_is_silent(self, other: CheckpointStore, folder: Folder) -> None:
        with pytest.warns(UserWarning, match=r"takes no notice of If-None-Match.*one process at a time"):
            other.check()
        super().test_check_is_silent(other, folder)  # it's said once
        assert folder.names() == set()

    def test_attempts_at_once_get_different_numbers(self, url: str, options: dict[str, Any]) -> None:
        pytest.skip("nanio takes no notice of If-None-Match")

    def test_case_22_two_writers_at_once(self, url: str, options: dict[str, Any], folder: Folder) -> None:
        pytest.skip("nanio takes no notice of If-None-Match")


class TestGcs(ServerConformance):
    name = "fake-gcs"


class TestAzure(ServerConformance):
    name = "azurite"
