"""When to save, in the background, and what to keep: checkpoints for PyTorch Lightning."""

from lightning_ckpt_policy.callback import CheckpointPolicy
from lightning_ckpt_policy.errors import (
    CheckpointError,
    CheckpointSaveError,
    DamagedCheckpointError,
    SnapshotChangedError,
    SupersededError,
)
from lightning_ckpt_policy.io import AsyncCheckpointIO
from lightning_ckpt_policy.ledger import SaveOutcome
from lightning_ckpt_policy.record import CheckpointRecord, RecordError
from lightning_ckpt_policy.retention import (
    KeepAll,
    KeepBest,
    KeepEveryInterval,
    KeepEveryNSteps,
    KeepLast,
    KeepSteps,
    KeepUnder,
    KeepWithin,
    Retention,
)
from lightning_ckpt_policy.store import CheckpointStore
from lightning_ckpt_policy.triggers import (
    AdaptiveInterval,
    AfterValidation,
    AtSteps,
    EveryInterval,
    EveryNEpochs,
    EveryNTrainSteps,
    OnImprovement,
    OnSignal,
    PhaseSchedule,
    Progress,
    Trigger,
)

__version__ = "0.1.0"

__all__ = [
    "AdaptiveInterval",
    "AfterValidation",
    "AsyncCheckpointIO",
    "AtSteps",
    "CheckpointError",
    "CheckpointPolicy",
    "CheckpointRecord",
    "CheckpointSaveError",
    "CheckpointStore",
    "DamagedCheckpointError",
    "EveryInterval",
    "EveryNEpochs",
    "EveryNTrainSteps",
    "KeepAll",
    "KeepBest",
    "KeepEveryInterval",
    "KeepEveryNSteps",
    "KeepLast",
    "KeepSteps",
    "KeepUnder",
    "KeepWithin",
    "OnImprovement",
    "OnSignal",
    "PhaseSchedule",
    "Progress",
    "RecordError",
    "Retention",
    "SaveOutcome",
    "SnapshotChangedError",
    "SupersededError",
    "Trigger",
]
