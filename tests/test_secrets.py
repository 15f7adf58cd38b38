"""No value of ``storage_options`` reaches a file, a log, a warning, an exception or a ``repr``."""

from __future__ import annotations

import errno
import logging
import subprocess
import sys
import textwrap
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from lightning.pytorch import Callback, Trainer

from lightning_ckpt_policy import (
    AsyncCheckpointIO,
    CheckpointPolicy,
    CheckpointStore,
    EveryNTrainSteps,
    KeepLast,
    retry,
)
from tests.faults import Fault, ObjectFileSystem, Schedule, register
from tests.integration.helpers import REPOSITORY
from tests.models import fit

register()
pytestmark = pytest.mark.timeout(60)
SECRETS = ("sk-live-0123456789", "hunter2hunter2", "AKIANESTEDKEY", "bytes-of-a-token")


def options(schedule: Schedule, kind: str = "file") -> dict[str, Any]:
    """Options with secrets at every depth."""
    return {
        "target_protocol": kind,
        "schedule": schedule,
        "secret": SECRETS[0],
        "target_options": {
            "password": SECRETS[1],
            "client_kwargs": {"keys": [SECRETS[2]], "token": SECRETS[3].encode()},
        },
    }


def telling(kind: type[OSError] = OSError, number: int = errno.EIO) -> Callable[[], Exception]:
    """An error as badly behaved stores raise it: it quotes what it was given, also in what caused it."""

    def make() -> Exception:
        try:
            raise ValueError(f"request signed with {SECRETS[1]} and {SECRETS[3]}")
        except ValueError as cause:
            error = kind(number, f"403 for key={SECRETS[0]} ({SECRETS[2]})")
            error.__cause__ = cause
            return error

    return make


def leaks(text: str) -> list[str]:
    return [secret for secret in SECRETS if secret in text]


def with_causes(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)) + repr(error)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "_wait", lambda _: 0.0)


@pytest.fixture
def schedule() -> Schedule:
    return Schedule()


class Told:
    """Everything that was said."""

    def __init__(self, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
        self.caplog, self.capfd = caplog, capfd
        self.caught: list[warnings.WarningMessage] = []
        self.errors: list[BaseException] = []

    def text(self) -> str:
        out, err = self.capfd.readouterr()
        parts = [out, err, self.caplog.text]
        parts += [f"{warning.message} {warning.source!r}" for warning in self.caught]
        parts += [str(record.__dict__) for record in self.caplog.records]
        parts += [with_causes(error) for error in self.errors]
        return "\n".join(parts)


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> Iterator[Told]:
    caplog.set_level(logging.DEBUG)
    everything = Told(caplog, capfd)
    with warnings.catch_warnings(record=True) as everything.caught:
        warnings.simplefilter("always")
        yield everything


def policy(root: Path, schedule: Schedule, kind: str = "file", **more: Any) -> CheckpointPolicy:
    more = {"max_consecutive_failures": 99, **more}
    url = f"faulty://{root}/ckpt"
    return CheckpointPolicy(url, EveryNTrainSteps(2), KeepLast(1), storage_options=options(schedule, kind), **more)


class Drain(Callback):
    """Lets faults begin with training; no save is on its way when the next one is due."""

    def __init__(self, *faults: Fault) -> None:
        self.faults = faults

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        used: Any = trainer.checkpoint_callback
        used._writer.drain(20)
        if trainer.global_step == 5:
            used.store._backend_now.fs.schedule.faults.extend(self.faults)


REFUSED = telling(PermissionError, errno.EACCES)
FULL = telling(OSError, errno.ENOSPC)
RESET = telling(ConnectionResetError, errno.ECONNRESET)
SAVE_FAULTS = [
    ("file", "open", ".tmp", RESET),
    ("file", "write", ".tmp", FULL),
    ("file", "close", ".tmp", telling()),
    ("file", "info", ".tmp", telling()),
    ("file", "ls", "", telling()),
    ("file", "cat_file", ".pending", REFUSED),
    ("file", "rm_file", ".json", telling()),
    ("objects", "write", ".ckpt", FULL),
    ("objects", "close", ".ckpt", REFUSED),
    ("objects", "pipe_file", ".ckpt.json", RESET),
    ("objects", "rm_file", ".ckpt", REFUSED),
]


@pytest.mark.parametrize(("kind", "op", "path", "error"), SAVE_FAULTS)
def test_a_fit_over_a_store_whose_errors_tell(
    tmp_path: Path, told: Told, kind: str, op: str, path: str, error: Callable[[], Exception]
) -> None:
    schedule = Schedule()
    used = policy(tmp_path, schedule, kind, max_consecutive_failures=2 if op in ("open", "close") else 99)
    try:
        fit(tmp_path, used, callbacks=[Drain(Fault("error", op=op, path=path, error=error))])
    except Exception as raised:
        told.errors.append(raised)
    assert schedule.hits
    assert told.errors or op == "rm_file"
    told.errors += [outcome.error for outcome in used.history if outcome.error is not None]
    assert leaks(told.text()) == []
    assert leaks(repr([used, used.store, used._io, used.history, used._ledger, used._attempt])) == []
    files = {str(path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    files |= {name: data for name, (data, _) in ObjectFileSystem.objects.items() if name.startswith(str(tmp_path))}
    assert any("/attempts/" in name for name in files)
    for name, data in files.items():
        assert leaks(data.decode("latin-1")) == [], name


@pytest.mark.parametrize("op", ["open", "write", "close", "ls", "info", "cat_file", "pipe_file", "makedirs", "rm_file"])
def test_a_start_and_a_resume_over_a_store_whose_errors_tell(
    tmp_path: Path, schedule: Schedule, told: Told, op: str
) -> None:
    if op != "makedirs":
        fit(tmp_path, policy(tmp_path, schedule), max_steps=4)
    schedule.faults.append(Fault("error", op=op, error=telling()))
    for kind in ((OSError, errno.EIO), (PermissionError, errno.EACCES)):
        schedule.faults[0].error = telling(*kind)
        for ckpt_path in (None, "last"):
            try:
                fit(tmp_path, policy(tmp_path, schedule), max_steps=6, ckpt_path=ckpt_path)
            except Exception as error:
                told.errors.append(error)
    assert schedule.hits
    assert leaks(told.text()) == []


@pytest.mark.parametrize("work", ["save", "load", "remove"])
def test_the_io_alone(tmp_path: Path, schedule: Schedule, told: Told, work: str) -> None:
    io = AsyncCheckpointIO(options(schedule))
    path = f"faulty://{tmp_path}/a.ckpt"
    io.save_checkpoint({"a": 1}, path)
    io.writer.drain(20)
    schedule.faults.append(Fault("error", error=telling()))
    try:
        if work == "save":
            io.save_checkpoint({"a": 2}, path)
        elif work == "load":
            io.load_checkpoint(path)
        else:
            io.remove_checkpoint(path)
        io.teardown()
    except Exception as error:
        told.errors.append(error)
    finally:
        io.writer.close(20)
    assert schedule.hits
    assert leaks(told.text()) == []
    assert leaks(repr([io, io.writer])) == []


CALLS: dict[str, Callable[[CheckpointStore], object]] = {
    "records": lambda store: store.records(),
    "latest": lambda store: store.latest(),
    "check": lambda store: store.check(),
    "attempts": lambda store: store.attempts(),
    "begin": lambda store: store.begin(1, "run", 1),
    "start_attempt": lambda store: store.start_attempt("run"),
    "sweep": lambda store: store.sweep("run", 2),
}


@pytest.mark.parametrize("call", CALLS)
def test_the_store_alone(tmp_path: Path, schedule: Schedule, told: Told, call: str) -> None:
    store = CheckpointStore(f"faulty://{tmp_path}/ckpt", options(schedule))
    store.check()
    store.begin(5, "run", 1)
    schedule.faults.append(Fault("error", error=telling()))
    try:
        CALLS[call](store)
    except Exception as error:
        told.errors.append(error)
    assert schedule.hits
    assert leaks(told.text()) == []
    assert leaks(repr([store, store.backend])) == []


def test_refused_options(tmp_path: Path, told: Told) -> None:
    for build in (CheckpointStore, lambda url, given: CheckpointPolicy(url, storage_options=given).store):
        with pytest.raises((ValueError, TypeError)) as raised:
            build(f"faulty://{tmp_path}", {"target_protocol": SECRETS[0], "secret": SECRETS[1]})
        told.errors.append(raised.value)
    assert leaks(told.text()) == []


@pytest.mark.parametrize(
    ("kind", "told_as"),
    [
        (ConnectionError, ConnectionError),
        (TimeoutError, ConnectionError),
        (FileNotFoundError, ValueError),
        (KeyError, ValueError),
        (AttributeError, ValueError),
        (RuntimeError, ValueError),
    ],
)
def test_options_that_another_error_quotes(
    tmp_path: Path, told: Told, monkeypatch: pytest.MonkeyPatch, kind: type[Exception], told_as: type[Exception]
) -> None:
    """As gcsfs's, which asks Google whose a token is and fails with the URL it asked."""
    encoded = quote(SECRETS[0], safe="")

    def refuse(*_: Any, **__: Any) -> Any:
        try:
            raise RuntimeError(f"cause: {SECRETS[0]}")
        except RuntimeError as error:
            raise kind(f"no answer from https://host/tokeninfo?access_token={encoded}") from error

    monkeypatch.setattr("fsspec.core.url_to_fs", refuse)
    with pytest.raises(told_as, match=rf"dirpath='faulty://{tmp_path}'.*storage_options") as raised:
        CheckpointStore(f"faulty://{tmp_path}", {"token": SECRETS[0]})
    told.errors.append(raised.value)
    text = told.text()
    assert leaks(text) == []
    assert encoded not in text


def test_an_uncaught_error_of_a_script(tmp_path: Path) -> None:
    """What Python itself prints of it, with all its causes."""
    script = """
        import sys
        from pathlib import Path
        from tests.faults import Fault, Schedule
        from tests.models import fit
        from tests.test_secrets import REFUSED, policy
        schedule = Schedule(Fault("error", op="cat_file", path=".pending", error=REFUSED))
        fit(sys.argv[1], policy(Path(sys.argv[1]), schedule, max_consecutive_failures=2))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 1, done.stderr
    assert "CheckpointSaveError" in done.stderr
    assert leaks(done.stdout + done.stderr) == []
