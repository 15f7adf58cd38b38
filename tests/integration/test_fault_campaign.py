"""A short fault campaign; the long one's figures are in ``benchmarks/results``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.helpers import REPOSITORY


def campaign(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "benchmarks/fault_campaign.py", "--out", str(out), *options],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_a_short_campaign_breaks_no_promise(tmp_path: Path) -> None:
    done = campaign(tmp_path / "out.json", "--faults", "150", "--flips", "50", "--seed", "7")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    figures = json.loads((tmp_path / "out.json").read_text())
    assert figures["faults"]["injected"] == 150
    assert figures["payload_bits"]["caught"] == figures["payload_bits"]["flipped"] == 50
    assert "believed" not in figures["record_bits"]
    assert sum(sum(outcomes.values()) for outcomes in figures["faults"]["outcomes"].values()) == 150


def test_the_campaign_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that doesn't clean up after a failed save is found out."""
    import fsspec

    from benchmarks import fault_campaign
    from lightning_ckpt_policy import CheckpointStore
    from lightning_ckpt_policy.snapshot import take_snapshot
    from tests.faults import Fault, FaultFileSystem

    fsspec.register_implementation("faulty", FaultFileSystem, clobber=True)
    image = take_snapshot({"a": 1})
    fault = Fault("error_after", "os.replace", 2)
    assert fault_campaign.one_fault(tmp_path / "good", image, fault) == "failed, nothing left"
    monkeypatch.setattr(CheckpointStore, "_undo", lambda *args: True)
    with pytest.raises(AssertionError, match="reads as a checkpoint"):
        fault_campaign.one_fault(tmp_path / "bad", image, Fault("error_after", "os.replace", 2))
