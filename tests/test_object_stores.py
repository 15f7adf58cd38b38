"""How transfers to and from object stores are set up, from Python and YAML, and what is seen of a long one."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.utilities.rank_zero import rank_zero_only

from lightning_ckpt_policy import CheckpointPolicy, CheckpointStore
from lightning_ckpt_policy import store as store_module
from tests.store_conformance import save
from tests.test_cli import cli, config

ROOT = Path(__file__).parents[1]
SETTINGS = {"connections": 3, "part_bytes": 6 << 20}


def test_a_policy_hands_its_settings_to_its_store() -> None:
    backend = CheckpointPolicy("memory://settings", **SETTINGS).store.backend
    assert (backend.connections, backend.part_bytes) == (3, 6 << 20)


def test_settings_in_yaml(tmp_path: Path) -> None:
    (policy,) = (
        callback
        for callback in cli(tmp_path, config(tmp_path, **SETTINGS), run=False).trainer.callbacks  # type: ignore[attr-defined]
        if isinstance(callback, CheckpointPolicy)
    )
    assert (policy.connections, policy.part_bytes) == (3, 6 << 20)


@pytest.mark.parametrize("kind", [CheckpointStore, CheckpointPolicy])
@pytest.mark.parametrize(
    ("key", "value", "limits"),
    [
        ("connections", 0, "1 to 128"),
        ("connections", 129, "1 to 128"),
        ("connections", "8", "1 to 128"),
        ("connections", True, "1 to 128"),
        ("part_bytes", 1 << 20, "5,242,880 to 4,194,304,000"),
        ("part_bytes", 4 << 30, "5,242,880 to 4,194,304,000"),
        ("part_bytes", 6e6, "5,242,880 to 4,194,304,000"),
    ],
)
def test_bad_settings(kind: Any, key: str, value: Any, limits: str) -> None:
    with pytest.raises(ValueError, match=f"{key}={value!r}: an integer from {limits} was expected"):
        kind("memory://a", **{key: value})


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("least", "rank", "stream", "shown"),
    [
        (10_000, 0, Terminal(), True),
        (10_001, 0, Terminal(), False),
        (10_000, 1, Terminal(), False),
        (10_000, 0, io.StringIO(), False),
    ],
)
def test_a_bar_shows_how_far_a_large_checkpoint_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, least: int, rank: int, stream: io.StringIO, shown: bool
) -> None:
    store = CheckpointStore(tmp_path)
    record = save(store, 1, b"x" * 10_000)
    monkeypatch.setattr(store_module, "_BAR_BYTES", least)
    monkeypatch.setattr(rank_zero_only, "rank", rank, raising=False)
    monkeypatch.setattr("sys.stderr", stream)
    assert store.open_verified(record).read() == b"x" * 10_000
    text = stream.getvalue()
    assert ("Loading step-0000000001.ckpt: 100%" in text and "9.77k/9.77k" in text) if shown else not text


def test_the_benchmark_of_connections(tmp_path: Path) -> None:
    pytest.importorskip("moto")
    command = [sys.executable, str(ROOT / "benchmarks" / "connections.py"), "--servers", "moto", "--out"]
    link = ("--size", "11", "--rounds", "1", "--connections", "2", "--rate", "100", "--latency", "1")
    done = subprocess.run(
        [*command, str(tmp_path / "out.json"), *link], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    runs = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert [(run["server"], run["connections"]) for run in runs] == [("moto", 1), ("moto", 2)]
    assert all(seconds > 0.05 for run in runs for seconds in run["seconds"].values())  # at least the link's time
