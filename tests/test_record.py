"""Records as untrusted input: whatever lies in the folder, nothing outside is touched and nothing breaks."""

from __future__ import annotations

import dataclasses
import json
import math
import string
import uuid
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from lightning_ckpt_policy.record import (
    MAX_RECORD_BYTES,
    CheckpointRecord,
    RecordError,
    is_safe_name,
    is_safe_run_id,
)
from lightning_ckpt_policy.store import Attempt, CheckpointStore, Pending, _from_json
from tests.store_conformance import Folder, save

pytestmark = pytest.mark.core
GOOD: dict[str, Any] = {
    "schema_version": 1,
    "path": "step-0000000010.ckpt",
    "step": 10,
    "epoch": 1,
    "sequence": 3,
    "run_id": "run",
    "created_at": 1.5,
    "size": 3,
    "checksum": "crc32c:0a1b2c3d",
    "reason": ["EveryNTrainSteps(n=10)"],
    "metrics": {"val/loss": 0.5},
    "attempt": 2,
    "parent": None,
    "point": "batch_end",
    "world_size": 2,
    "weights_only": False,
    "pinned": False,
    "damaged": False,
    "doomed": [1, 2],
    "doomed_by": "KeepLast(n=1)",
    "held_seconds": 0.1,
    "write_seconds": None,
    "slowed_seconds": 0.5,
}
BAD_NAMES = [
    "../x.ckpt", "..", ".", "", "/etc/passwd", "a/b.ckpt", "a\\b.ckpt", ".hidden", "a\0b", "a\nb", "C:\\x", "gs://b/x",
    "~", "~/x.ckpt", "a b", "x" * 241, "é.ckpt", "a?b", "a*", "[a]", "-rf", "%2e%2e%2f", "a:b", "a#b", "a.ckpt\n",
]  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
NUMBERS = st.floats() | st.integers(-(10**400), 10**400)


def parse(values: Any) -> CheckpointRecord:
    return CheckpointRecord.from_json(json.dumps(values).encode())


def test_good_record_and_unknown_fields() -> None:
    record = parse(GOOD | {"of_a_later_version": [1]})
    assert record.step == 10
    assert record.reason == ("EveryNTrainSteps(n=10)",)
    written = json.loads(record.to_json())
    assert written.pop("record_checksum").startswith("crc32c:")
    assert written == GOOD


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_metrics(value: float) -> None:
    record = dataclasses.replace(parse(GOOD), metrics={"loss": value})
    assert json.loads(record.to_json())["metrics"] == {"loss": str(value)}  # JSON of any reader, not only Python's
    assert str(CheckpointRecord.from_json(record.to_json()).metrics["loss"]) == str(value)


@pytest.mark.parametrize("name", BAD_NAMES)
def test_case_33_names_that_leave_the_folder(name: str) -> None:
    assert not is_safe_name(name)
    with pytest.raises(RecordError, match="path="):
        parse(GOOD | {"path": name})
    with pytest.raises(RecordError, match="path="):
        dataclasses.replace(parse(GOOD), path=name)


@pytest.mark.parametrize("run_id", [*BAD_NAMES, "a+b", "x" * 65])
def test_case_33_run_ids_that_leave_the_folder(run_id: str) -> None:
    assert not is_safe_run_id(run_id)
    for field in ("run_id", "parent"):
        with pytest.raises(RecordError, match=f"{field}="):
            parse(GOOD | {field: run_id})


@pytest.mark.parametrize("field", [name for name in GOOD if name != "schema_version"])
@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -1,
        0,
        1.5,
        "1",
        "",
        [],
        [1],
        {},
        {"a": "b"},
        {"a": None},
        1 << 63,
        10**400,
        math.nan,
        math.inf,
        1e308,
    ],
    ids=lambda value: str(value)[:20],
)
def test_any_field_of_any_type(field: str, value: Any) -> None:
    refused = None
    try:
        record = parse(GOOD | {field: value})
    except RecordError as error:
        refused = str(error)
    if refused is not None:
        assert field in refused
        assert len(refused) < 400
    else:
        assert CheckpointRecord.from_json(record.to_json()).to_json() == record.to_json()


@pytest.mark.parametrize(
    "field", [name for name in GOOD if name in ("path", "step", "sequence", "run_id", "size", "checksum")]
)
def test_missing_field(field: str) -> None:
    with pytest.raises(RecordError, match=field):
        parse({key: value for key, value in GOOD.items() if key != field})


@pytest.mark.parametrize("version", [None, 0, 2, "1", 1.0, True, [1]])
def test_other_versions_are_refused(version: Any) -> None:
    with pytest.raises(RecordError, match="schema_version"):
        parse(GOOD | {"schema_version": version})


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"[]", b"null", b"3", b'"x"', b"\xff\xfe", b"{}", b'{"schema_version": 1}', b"[" * 100_000,
        b'{"a":' * 5_000, b'{"schema_version": ' + b"9" * 5_000 + b"}", b" " * (MAX_RECORD_BYTES + 1),
    ],
    ids=lambda data: f"{len(data)} bytes {data[:12]!r}",
)  # fmt: skip
def test_what_is_no_record(data: bytes) -> None:
    with pytest.raises(RecordError):
        CheckpointRecord.from_json(data)


@pytest.mark.parametrize("depth", [10, 500, 900, 990])
@pytest.mark.parametrize("field", ["path", "metrics", "reason", "step"])
def test_deep_nesting(depth: int, field: str) -> None:
    nested = "[" * depth + "]" * depth
    text = json.dumps(GOOD | {field: "HERE"}).replace('"HERE"', nested)
    with pytest.raises(RecordError):
        CheckpointRecord.from_json(text.encode())


@given(st.binary(max_size=300) | JSON.map(lambda value: json.dumps(value).encode()))
def test_fuzz_any_bytes(data: bytes) -> None:
    for parsed in (CheckpointRecord.from_json, lambda d: _from_json(Attempt, d), lambda d: _from_json(Pending, d)):
        with pytest.raises(RecordError):
            parsed(data)


@given(st.sampled_from(sorted(GOOD)), JSON | NUMBERS | st.text(alphabet=string.printable, max_size=30))
@example("created_at", 10**400)
@example("held_seconds", 10**400)
@example("metrics", {"loss": 10**400})
@settings(max_examples=300, deadline=None)
def test_fuzz_a_field(field: str, value: Any) -> None:
    """Either it is refused, or all that the store does with it stays in the folder and can be written back."""
    try:
        record = parse(GOOD | {field: value})
    except RecordError:
        return
    assert "/" not in record.path
    assert record.path not in (".", "..")
    assert CheckpointRecord.from_json(record.to_json()).to_json() == record.to_json()


@given(st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), min_size=1, max_size=4))
@settings(max_examples=300, deadline=None)
def test_fuzz_flipped_bytes(changes: list[tuple[int, int]]) -> None:
    data = bytearray(parse(GOOD).to_json())
    for place, value in changes:
        data[place % len(data)] = value
    try:
        record = CheckpointRecord.from_json(bytes(data))
    except RecordError:
        return
    assert is_safe_name(record.path)


@given(
    st.dictionaries(
        st.sampled_from(["a.ckpt", "b.ckpt", "step-0000000010.ckpt"]),
        st.binary(max_size=40)
        | st.tuples(st.sampled_from(sorted(GOOD)), JSON | NUMBERS).map(
            lambda change: json.dumps(GOOD | {change[0]: change[1]}).encode()
        ),
    )
)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_fuzz_a_store(files: dict[str, bytes]) -> None:
    """Whatever its records say, a store can be listed, written to and swept, and none of the files is harmed."""
    url = f"memory://{uuid.uuid4().hex}/run"
    store, folder = CheckpointStore(url), Folder(url, {})
    for suffix in (".json", ".pending"):
        for name, data in files.items():
            folder.put(name + suffix, data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        records = store.records()
        for record in records:
            assert folder.get(record.path + ".json")
            assert not store.whole(record) or record.size == 0
        store.latest()
        store.best("val/loss")
        store.sweep("someone", 9)
        mine = save(store, 77, run_id="someone")
        assert mine in store.records()
        store.delete(mine)
    assert {name: folder.get(name) for name in folder.names()} == {
        name + suffix: data for name, data in files.items() for suffix in (".json", ".pending")
    }


@pytest.mark.parametrize("name", ["../outside.ckpt", "/etc/hostname", "..", "a/../../outside.ckpt"])
def test_case_33_nothing_outside_is_opened_or_deleted(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = tmp_path / "outside.ckpt"
    outside.write_bytes(b"abc")
    (tmp_path / "outside.ckpt.json").write_bytes(b"{}")
    store = CheckpointStore(tmp_path / "run")
    store.check()
    good = save(store, 1)
    folder = tmp_path / "run"
    lying = json.dumps(GOOD | {"path": name}).encode()
    for file in ("x.ckpt.json", "outside.ckpt.json"):
        (folder / file).write_bytes(lying)
    marker = {"schema_version": 1, "name": name, "run_id": "run", "attempt": 1, "created_at": 0.0, "op": "delete"}
    (folder / "x.ckpt.pending").write_text(json.dumps(marker | {"token": "01234567"}))
    touched: list[str] = []
    for method in ("cat_file", "open", "rm_file", "info"):
        original = getattr(store.backend.fs, method)
        monkeypatch.setattr(
            store.backend.fs,
            method,
            lambda path, *a, _original=original, **k: (
                touched.append(str(getattr(path, "path", path))),
                _original(path, *a, **k),
            )[1],
        )
    with pytest.warns(UserWarning, match="is skipped"):
        assert store.records() == [good]
    assert store.latest() == good
    assert store.sweep("run", 99) == []
    assert touched
    assert all(f"{path}/".startswith(f"{folder}/") and ".." not in path for path in touched)
    assert outside.read_bytes() == b"abc"
    assert store.name_of(f"{folder}/{name}") is None
