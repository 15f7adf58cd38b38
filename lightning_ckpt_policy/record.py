"""What is known of one confirmed checkpoint: the JSON record that lies beside its payload."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from lightning_ckpt_policy.checksum import checksum_of

SCHEMA_VERSION = 1
RECORD_SUFFIX = ".json"
PENDING_SUFFIX = ".pending"
CHECKSUM_FIELD = "record_checksum"
MAX_RECORD_BYTES = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]{0,239}")
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_CHECKSUM = re.compile(r"[a-z0-9]+:[0-9a-f]+")
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class RecordError(ValueError):
    """A record that can't be read: not JSON, a field missing or of the wrong type, or a path outside its folder."""


def is_safe_name(name: object) -> bool:
    """Whether ``name`` is a plain file name that can't leave its folder.

    >>> is_safe_name("step-0000000010.ckpt"), is_safe_name("../x.ckpt"), is_safe_name("/etc/passwd")
    (True, False, False)
    """
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def is_safe_run_id(run_id: object) -> bool:
    """Whether ``run_id`` can stand in a file name.

    >>> is_safe_run_id("0f3a"), is_safe_run_id("a/b")
    (True, False)
    """
    return isinstance(run_id, str) and _RUN_ID.fullmatch(run_id) is not None


@dataclass(frozen=True, kw_only=True)
class CheckpointRecord:
    """One confirmed checkpoint.

    Attributes:
        path: File name of the payload inside the store's folder. Never contains a separator.
        step: Optimizer steps done when the state was captured (``trainer.global_step``).
        epoch: Epochs completed when the state was captured.
        sequence: Order of confirmation in the store, from 1. Order is decided by this alone, never by a clock.
        run_id: The run (lineage) that wrote it.
        created_at: Wall-clock time of capture, seconds since 1970-01-01 UTC.
        size: Bytes of the payload.
        checksum: ``"<algorithm>:<hex>"`` of the payload's bytes, e.g. ``"crc32c:0a1b2c3d"``.
        reason: Every trigger that was due, as its ``repr``.
        metrics: Metrics of these weights, logged after the optimizer update that made them. May hold NaN or infinity.
        attempt: Number of the process (group) of the run that wrote it, from 1.
        parent: ``run_id`` of the run this one branched from, if any.
        point: Where it was captured: ``"batch_end"``, ``"validation_end"``, ``"epoch_end"`` or, where a signal asked
            for it, ``"validation_batch_end"``.
        world_size: Number of ranks.
        weights_only: Whether optimizer and loop state are left out, so that it can't be resumed from.
        pinned: Retention never deletes it.
        damaged: Its payload was found not to match; it doesn't count for retention and isn't deleted by it.
        doomed: The ``sequence`` of each checkpoint that retention deletes together with this one and before it, noted
            before the first of them goes; empty otherwise.
        doomed_by: The rule that decided that, as ``repr`` tells it; another rule decides anew.
        held_seconds: How long the training loop was held by this save, seconds.
        write_seconds: How long writing the payload took in the background, seconds.
        slowed_seconds: How much later training is in the end because of a save, beside the time it is held for, as
            measured before this one, seconds; None where nobody measured it.

    >>> record = CheckpointRecord(
    ...     path="step-0000000010.ckpt", step=10, epoch=1, sequence=1, run_id="a", created_at=0.0,
    ...     size=3, checksum="crc32c:00000000", metrics={"val_loss": float("nan")})
    >>> CheckpointRecord.from_json(record.to_json()).step
    10
    """

    path: str
    step: int
    epoch: int
    sequence: int
    run_id: str
    created_at: float
    size: int
    checksum: str
    reason: tuple[str, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    attempt: int = 1
    parent: str | None = None
    point: str = "batch_end"
    world_size: int = 1
    weights_only: bool = False
    pinned: bool = False
    damaged: bool = False
    doomed: tuple[int, ...] = ()
    doomed_by: str = ""
    held_seconds: float | None = None
    write_seconds: float | None = None
    slowed_seconds: float | None = None

    def __post_init__(self) -> None:
        _check(self)

    def to_json(self) -> bytes:
        """The record as UTF-8 JSON. Non-finite numbers are written as the strings ``"nan"``, ``"inf"``, ``"-inf"``."""
        values: dict[str, Any] = {"schema_version": SCHEMA_VERSION}
        for f in fields(self):
            values[f.name] = getattr(self, f.name)
        values["reason"], values["doomed"] = list(self.reason), list(self.doomed)
        values["metrics"] = {k: v if math.isfinite(v) else str(v) for k, v in self.metrics.items()}
        values[CHECKSUM_FIELD] = _own_checksum(values)
        return (json.dumps(values, indent=1, allow_nan=False) + "\n").encode()

    @classmethod
    def from_json(cls, data: bytes) -> CheckpointRecord:
        """Read a record; unknown fields are ignored. A record with a flipped bit is recognised by its own checksum.

        Raises:
            RecordError: ``data`` isn't a record: the message names the field, its value and what was expected.
        """
        if len(data) > MAX_RECORD_BYTES:
            raise RecordError(f"a record of {len(data)} bytes; at most {MAX_RECORD_BYTES} are read")
        try:
            values = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise RecordError(f"not JSON: {error}") from error
        if not isinstance(values, dict):
            raise RecordError(f"a JSON object was expected, not {type(values).__name__}")
        version = values.get("schema_version")
        if not isinstance(version, int) or isinstance(version, bool) or not 1 <= version <= SCHEMA_VERSION:
            raise RecordError(
                f"schema_version={version!r}, this version reads 1 to {SCHEMA_VERSION}; upgrade lightning-ckpt-policy"
            )
        if CHECKSUM_FIELD in values:
            expected = values.pop(CHECKSUM_FIELD)
            if expected != _own_checksum(values):
                raise RecordError(f"{CHECKSUM_FIELD}={expected!r} doesn't fit the other fields: the record is damaged")
        known = {f.name for f in fields(cls)}
        kept = {k: v for k, v in values.items() if k in known}
        kept |= {name: tuple(kept[name]) for name in ("reason", "doomed") if isinstance(kept.get(name), list)}
        if isinstance(kept.get("metrics"), dict):
            kept["metrics"] = {
                k: _NON_FINITE.get(v, v) if isinstance(v, str) else v for k, v in kept["metrics"].items()
            }
        try:
            return cls(**kept)
        except TypeError as error:
            raise RecordError(f"a field is missing: {error}") from error


def _own_checksum(values: Mapping[str, Any]) -> str:
    """The checksum of a record's other fields, whatever their order and spacing in the file."""
    try:
        canonical = json.dumps(values, sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError) as error:
        raise RecordError(f"a value can't be read: {error}") from error
    return checksum_of([canonical.encode()])


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    whole = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 1023  # fits in a float
    return whole or isinstance(value, float)


def _check(record: CheckpointRecord) -> None:
    def need(name: str, good: bool, expected: str) -> None:
        if not good:
            value = repr(getattr(record, name))
            raise RecordError(f"{name}={value[:200]}: {expected} was expected")

    need("path", is_safe_name(record.path), "a plain file name without separators")
    need("run_id", is_safe_run_id(record.run_id), "letters, digits, '.', '_' or '-'")
    for name in ("step", "epoch", "size"):
        need(name, _is_int(getattr(record, name)) and 0 <= getattr(record, name) < 1 << 63, "an integer >= 0")
    for name in ("sequence", "attempt", "world_size"):  # bounded, so that the next one can still be counted
        need(name, _is_int(getattr(record, name)) and 1 <= getattr(record, name) < 1 << 53, "an integer >= 1")
    need("created_at", _is_number(record.created_at) and math.isfinite(record.created_at), "seconds since 1970")
    need(
        "checksum",
        isinstance(record.checksum, str) and _CHECKSUM.fullmatch(record.checksum) is not None,
        "'<algorithm>:<hex>'",
    )
    need(
        "reason",
        isinstance(record.reason, tuple) and all(isinstance(r, str) for r in record.reason),
        "a list of strings",
    )
    need(
        "doomed",
        isinstance(record.doomed, tuple) and all(_is_int(sequence) and sequence >= 1 for sequence in record.doomed),
        "a list of integers >= 1",
    )
    need(
        "metrics",
        isinstance(record.metrics, Mapping)
        and all(isinstance(k, str) and _is_number(v) for k, v in record.metrics.items()),
        "an object of numbers",
    )
    need("parent", record.parent is None or is_safe_run_id(record.parent), "null or a run id")
    for name in ("point", "doomed_by"):
        need(name, isinstance(getattr(record, name), str), "a string")
    for name in ("weights_only", "pinned", "damaged"):
        need(name, isinstance(getattr(record, name), bool), "true or false")
    for name in ("held_seconds", "write_seconds", "slowed_seconds"):
        value = getattr(record, name)
        need(name, value is None or (_is_number(value) and math.isfinite(value) and value >= 0), "seconds >= 0 or null")
