"""The benchmark of what saving costs: a very short run of each mode, and its arithmetic."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import save_overhead
from tests.servers import Server

pytest.importorskip("matplotlib", reason="the benchmark draws: pip install 'lightning-ckpt-policy[bench]'")
SCRIPT = Path(__file__).parents[1] / "benchmarks" / "save_overhead.py"
SHORT = "--size 256KiB --tensors 2 --saves 1 --every 4 --rounds 1 --batch-size 4"


def run(folder: Path, options: str) -> tuple[dict[str, Any], str]:
    """The JSON file of a run, and what it printed; it saves below the folder, or to servers."""
    command = [sys.executable, str(SCRIPT), *SHORT.split(), *options.split(), "--out", str(folder / "out")]
    served = "--servers" in options
    command += [] if served else ["--url", str(folder / "store")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env={**os.environ, "COLUMNS": "200"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert served or (folder / "out.png").read_bytes().startswith(b"\x89PNG")
    assert not list((folder / "store").glob("*"))  # it clears up
    text = (folder / "out.json").read_text()
    assert str(folder) not in text
    return json.loads(text), done.stdout


def numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for part in value for number in numbers(part)]
    return [value] if isinstance(value, (int, float)) else []


@pytest.mark.timeout(300)
def test_compares(tmp_path: Path) -> None:
    result, said = run(tmp_path, "--variants none overlapped")
    assert set(result) == {"machine", "settings", "store", "summary", "failed", "runs"}
    assert result["failed"] == {}
    assert {row["variant"] for row in result["summary"]} == {"reference", "none", "overlapped"}
    assert all(math.isfinite(number) for number in numbers(result))
    ours = next(row["figures"] for row in result["summary"] if row["variant"] == "overlapped")
    assert {"held", "own_held", "loop", "slow_down", "memory", "cpu", "write", "idle", "held_to_copy"} <= set(ours)
    assert ours["own_held"]["median"] > 0
    assert "overlapped" in said


@pytest.mark.timeout(300)
def test_compares_on_servers(tmp_path: Path, server_of: Callable[[str], Server]) -> None:
    server_of("fake-gcs")  # skips where it isn't installed
    result, said = run(tmp_path, "--servers fake-gcs")
    assert result["failed"] == {}
    assert [(row["server"], row["variant"]) for row in result["summary"]] == [
        ("fake-gcs", "stock"),
        ("fake-gcs", "overlapped"),
    ]
    assert all(set(save_overhead.SERVED) <= set(row["figures"]) for row in result["summary"])
    assert "| fake-gcs | overlapped | " in said


def test_several_devices_train_together(tmp_path: Path) -> None:
    job = {"kind": "training", "variant": "overlapped", "devices": 2, "timed": False, "device": "cpu", "gil": False}
    job |= {"drained": False}
    job |= {"size": 1 << 18, "tensors": 2, "batch_size": 4, "saves": 1, "every": 4, "steps": 7, "records": 0}
    result = save_overhead.run({**job, "storage_options": {}}, str(tmp_path), local=True)
    assert result.get("error") is None
    assert result["saves"] == len(result["held_seconds"]) == 1


@pytest.mark.timeout(300)
def test_sweeps(tmp_path: Path) -> None:
    result, _ = run(tmp_path, "--sweep records --max-records 10 --variants overlapped")
    assert result["failed"] == {}
    assert [(row["axis"], row["value"]) for row in result["summary"]] == [("records", 10)]
    assert all({"start", "held"} <= set(row["figures"]) for row in result["summary"])
    assert all(math.isfinite(number) for number in numbers(result))


def test_figures_are_ratios_within_a_round() -> None:
    gib = save_overhead.GIB

    def training(loop: float, cpu: float, peak: int, held: list[float], write: float) -> dict[str, Any]:
        return {
            "saves": len(held),
            "step_seconds": 0.1,
            "held_seconds": held,
            "own_held_seconds": [],
            "batches_seconds": [],
            "write_seconds": [write for _ in held],
            "saved_seconds": [write + 1 for _ in held],
            "loop_seconds": loop,
            "total_seconds": loop + 1,
            "cpu_seconds": cpu,
            "saving_cpu_seconds": cpu - 10,
            "peak_bytes": peak,
        }

    found = save_overhead.figures(
        {
            ("reference", "copy and write"): {
                "state_bytes": gib,
                "copy_seconds": [0.1, 0.2, 9.0],
                "snapshot_seconds": [0.3],
                "plain_write_seconds": [1.0],
            },
            ("main", "none"): training(10.0, 10.0, gib, [], 0.0),
            ("main", "stock"): training(16.0, 16.0, 4 * gib, [3.0, 2.0], 2.0),
            ("main", "stock_async"): training(14.0, 18.0, 4 * gib, [0.5, 0.5], 4.0),
            ("main", "overlapped"): training(11.0, 12.0, 2 * gib, [0.5, 0.01, 0.01], 1.25),
            ("idle", "overlapped"): {"idle_seconds": 1e-5},
        }
    )
    assert found["reference"]["snapshot_to_copy"] == pytest.approx(1.5)
    ours = found["overlapped"]
    assert ours["held"] == 0.01
    assert ours["held_first"] == 0.5
    assert ours["held_to_copy"] == pytest.approx(0.05)
    assert ours["loop"] == 1.1
    assert ours["slow_down"] == pytest.approx(1 / 3)
    assert ours["slow_down_to_stock_async"] == pytest.approx(1 / 6)
    assert ours["cpu"] == pytest.approx(2 / 3)
    assert ours["saving_cpu_to_stock"] == pytest.approx(2 / 9)
    assert ours["memory"] == 1.0
    assert ours["write"] == gib / 1.25
    assert ours["write_to_plain"] == pytest.approx(0.8)
    assert ours["saved"] == 2.25
    assert ours["saved_to_stock"] == pytest.approx(0.75)
    assert ours["idle"] == 1e-5
    assert found["stock_async"]["held_to_overlapped"] == 50
    assert found["dcp"] == {}  # it failed


@pytest.mark.parametrize(("text", "size"), [("64MiB", 64 << 20), ("4GiB", 4 << 30), ("1.5KiB", 1536), ("12", 12)])
def test_sizes(text: str, size: int) -> None:
    assert save_overhead.as_bytes(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "0", "-1GiB", "64MB", "infGiB", "1 2"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(Exception, match="is no size"):
        save_overhead.as_bytes(text)
