"""The errors this package raises. Everything it raises on purpose about checkpoints is a ``CheckpointError``."""

from __future__ import annotations


class CheckpointError(Exception):
    """Base of this package's errors about checkpoints.

    >>> issubclass(DamagedCheckpointError, CheckpointError)
    True
    """


class CheckpointSaveError(CheckpointError):
    """A checkpoint couldn't be confirmed: nothing under its final names reads as a checkpoint.

    >>> issubclass(CheckpointSaveError, CheckpointError)
    True
    """


class DamagedCheckpointError(CheckpointError, ValueError):
    """A payload isn't what its record says: missing, of another size, or with another checksum.

    >>> issubclass(DamagedCheckpointError, ValueError)
    True
    """


class SnapshotChangedError(CheckpointError):
    """State was changed while it was being copied, so that the copy isn't of one moment.

    >>> issubclass(SnapshotChangedError, CheckpointError)
    True
    """


class SupersededError(CheckpointError):
    """A later attempt of the same run has begun, so this one must neither write nor prune.

    >>> issubclass(SupersededError, CheckpointError)
    True
    """


class PinnedError(CheckpointError, ValueError):
    """A pinned checkpoint was to be deleted.

    >>> issubclass(PinnedError, ValueError)
    True
    """


class BucketNotFoundError(CheckpointError, FileNotFoundError):
    """The bucket or container of a store doesn't exist.

    >>> issubclass(BucketNotFoundError, FileNotFoundError)
    True
    """


def describe(error: BaseException | None) -> str:
    """An error as text, with its type.

    >>> describe(ValueError("no"))
    'ValueError: no'
    """
    return f"{type(error).__name__}: {error}"
