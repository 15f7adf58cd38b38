"""The ``CheckpointIO`` that writes in the background: by itself under ``ModelCheckpoint``, or for a policy."""

from __future__ import annotations

import functools
import os
import sys
import threading
import uuid
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.plugins.io import CheckpointIO

from lightning_ckpt_policy import _lightning
from lightning_ckpt_policy.backends import make_backend
from lightning_ckpt_policy.errors import CheckpointSaveError, describe
from lightning_ckpt_policy.ledger import DELETE_TIMEOUT, SaveInFlight
from lightning_ckpt_policy.retry import forget_frames, retrying
from lightning_ckpt_policy.snapshot import Image, Staging, Still, take_snapshot
from lightning_ckpt_policy.writer import BackgroundWriter

# seconds; large enough for a terabyte at 600 MB/s, small enough that a dead store is noticed the same day
DEFAULT_SAVE_TIMEOUT = 1800.0
# seconds, some thirty years; what the system can't wait for is an error only once a save is on its way
MOST_SAVE_TIMEOUT = 1e9
# seconds over save_timeout for which the end of a fit waits, so that a save that is given up is reported as that
GRACE = 10.0


@dataclass
class SaveRequest:
    """What a policy hands to ``Trainer.save_checkpoint(storage_options=...)``, to be given an image.

    Attributes:
        staging: The memory to use.
        still: What needn't be copied at once.
        image: The answer.
    """

    staging: Staging
    still: Mapping[int, Still]
    image: Image | None = None


class AsyncCheckpointIO(CheckpointIO):
    """Writes checkpoints in the background, durably, and removes nothing before what replaces it is written.

    By itself it serves stock ``ModelCheckpoint``: ``Trainer(plugins=[AsyncCheckpointIO()])``. A save copies all state
    to host memory and returns; one save is in flight at most, the next one waits for it. A removal waits for the
    writes asked for before it, and isn't done if the newest of them failed. A failed write is warned about, and is an
    error at the end of the fit if it was the last one. ``CheckpointPolicy`` brings its own instance.

    Args:
        storage_options: Credentials and endpoints for the fsspec filesystem, as ``fsspec.open`` takes them.
        save_timeout: Seconds a save may take before it counts as failed.

    Raises:
        TypeError, ValueError: ``save_timeout`` isn't a positive number, or is above 1e9.

    >>> import tempfile
    >>> io = AsyncCheckpointIO()
    >>> path = tempfile.mkdtemp() + "/a.ckpt"
    >>> io.save_checkpoint({"epoch": 3}, path)
    >>> io.load_checkpoint(path)
    {'epoch': 3}
    >>> io.teardown()
    """

    def __init__(
        self, storage_options: dict[str, Any] | None = None, *, save_timeout: float = DEFAULT_SAVE_TIMEOUT
    ) -> None:
        if isinstance(save_timeout, bool) or not isinstance(save_timeout, (int, float)):
            raise TypeError(f"save_timeout={save_timeout!r} must be a number of seconds, e.g. 1800")
        if not 0 < save_timeout <= MOST_SAVE_TIMEOUT:
            raise ValueError(
                f"save_timeout={save_timeout!r} must be a positive number of seconds, e.g. 1800, and at most "
                f"{MOST_SAVE_TIMEOUT:g}, which is as good as no limit"
            )
        if storage_options is not None and not isinstance(storage_options, Mapping):
            raise TypeError(
                f"storage_options must be a dict of what fsspec.open takes, not a {type(storage_options).__name__}"
            )
        self.save_timeout = save_timeout
        self.writer = BackgroundWriter()
        self._storage_options = storage_options
        # set by CheckpointPolicy: saves without a request are then a user's own, and stay synchronous
        self.managed = False
        # set by CheckpointPolicy: each opens a path of its store, verified, or returns None
        self.openers: list[Callable[[str], BinaryIO | None]] = []
        # the policies' own, ended with this one
        self.writers: list[BackgroundWriter] = []
        self._staging = Staging()
        self._lock = threading.Lock()
        self._failed: tuple[str, BaseException] | None = None
        self._unreported: list[str] = []
        self._gave_up = False

    def __reduce__(self) -> tuple[Any, ...]:
        # a copy in another process (a spawning launcher) or a deep copy has nothing in flight
        return _make, (type(self), self._storage_options, self.save_timeout)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Copy ``checkpoint`` to host memory and queue its write.

        Args:
            checkpoint: The state to save.
            path: Local path or fsspec URL.
            storage_options: Options for this path's filesystem, over those given at construction.
        """
        if isinstance(storage_options, SaveRequest):
            storage_options.image = take_snapshot(checkpoint, storage_options.staging, storage_options.still)
            return
        target, options = str(path), {**(self._storage_options or {}), **(storage_options or {})}
        if self.managed:
            _write_file(take_snapshot(checkpoint), target, options, SaveInFlight(), "")
            return
        self.writer.drain(saves_only=True)
        self._report()
        image = take_snapshot(checkpoint, self._staging)
        save = SaveInFlight()
        # a write that was given up may still have the usual temporary open
        tag = uuid.uuid4().hex[:8] if self._gave_up else ""

        def run() -> None:
            try:
                _write_file(image, target, options, save, tag)
            except BaseException as error:
                if save.settle():
                    self._fail(target, error)
            else:
                if save.settle():
                    with self._lock:
                        self._failed = None
            finally:
                image.release()

        def give_up() -> None:
            if not save.settle():
                return
            save.given_up.set()
            self._gave_up = True
            image.release(in_use=True)
            self._fail(target, CheckpointSaveError(f"it didn't finish within save_timeout={self.save_timeout:g} s"))

        self.writer.submit(run, timeout=self.save_timeout, on_timeout=give_up)

    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint, once all writes that were asked for are done.

        Args:
            path: Local path or fsspec URL.
            map_location: As in ``torch.load``.
            weights_only: As in ``torch.load``.

        Raises:
            FileNotFoundError: There is nothing at ``path``.
            DamagedCheckpointError: The payload doesn't match its record.
        """
        for writer in (self.writer, *self.writers):
            writer.drain()
        source = str(path)
        if weights_only is None:
            weights_only = _lightning.default_weights_only()
        for opener in self.openers:
            opened = opener(source)
            if opened is not None:
                with opened:
                    loaded: dict[str, Any] = torch.load(opened, map_location=map_location, weights_only=weights_only)
                return loaded
        if source.startswith(("http://", "https://")) or not self._storage_options:
            return _lightning.load_plain(source, map_location, weights_only)
        folder, name = _split(source)
        with make_backend(folder, self._storage_options).open(name) as file:
            remote: dict[str, Any] = torch.load(file, map_location=map_location, weights_only=weights_only)
        return remote

    def remove_checkpoint(self, path: str | Path) -> None:
        """Queue the removal of ``path`` behind the writes asked for before; skipped if the newest of them failed."""
        target = str(path)

        def run() -> None:
            with self._lock:
                failed = self._failed
            if failed is not None:
                self._warn(f"{target!r} was kept, since {failed[0]!r} could not be written")
                return
            folder, name = _split(target)
            try:
                retrying()(make_backend(folder, self._storage_options).delete, name)
            except Exception as error:  # a removal never ends training; it is reported
                self._warn(f"{target!r} could not be removed: {describe(error)}")

        if self.managed:
            TorchCheckpointIO().remove_checkpoint(target)
        else:
            self.writer.submit(
                run,
                timeout=DELETE_TIMEOUT,
                on_timeout=lambda: self._warn(f"{target!r} could not be removed within {DELETE_TIMEOUT:g} s"),
            )

    def teardown(self) -> None:
        """Wait for all writes and end the background thread.

        Raises:
            CheckpointSaveError: The newest write failed, unless another error is on its way already.
        """
        # a policy has waited for its own already
        closed = [writer.close(GRACE) for writer in self.writers]
        if not self.writer.close(self.save_timeout + GRACE) or not all(closed):
            self._warn("the fit ended with background work on checkpoints undone: the store didn't answer in time")
        self._staging.clear()
        failed, self._failed = self._failed, None
        self._report()
        if failed is not None and sys.exc_info()[0] is None:
            raise CheckpointSaveError(
                f"the last checkpoint, {failed[0]!r}, could not be written: {type(failed[1]).__name__}: {failed[1]}. "
                "Older checkpoints were kept"
            ) from failed[1]

    def _fail(self, target: str, error: BaseException) -> None:
        forget_frames(error)
        with self._lock:
            self._failed = (target, error)
        self._warn(f"{target!r} could not be written: {describe(error)}. Older checkpoints are kept")

    def _warn(self, message: str) -> None:
        with self._lock:
            self._unreported.append(message)

    def _report(self) -> None:
        """Say on the caller's thread what happened in the background."""
        with self._lock:
            messages, self._unreported = self._unreported, []
        for message in messages:
            warnings.warn(f"Checkpoint {message}", stacklevel=3)


def _make(kind: type[AsyncCheckpointIO], options: dict[str, Any] | None, save_timeout: float) -> AsyncCheckpointIO:
    return kind(options, save_timeout=save_timeout)


def _write_file(image: Image, path: str, options: Mapping[str, Any], save: SaveInFlight, tag: str) -> None:
    folder, name = _split(path)
    backend = make_backend(folder, options or None)
    backend.makedirs()
    write = functools.partial(backend.write_payload, name, confirm=save.guard, tag=tag)
    retrying(save.given_up)(lambda: write(image.chunks(), image.size))


def _split(path: str) -> tuple[str, str]:
    folder, _, name = path.replace(os.sep, "/").rpartition("/")
    return folder or ("/" if path.startswith("/") else "."), name
