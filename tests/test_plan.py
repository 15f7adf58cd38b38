"""``benchmarks/plan.py``: a policy from a configuration, simulated."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*args: str) -> subprocess.CompletedProcess[str]:
    script = ROOT / "benchmarks" / "plan.py"
    return subprocess.run(
        [sys.executable, str(script), *args], capture_output=True, text=True, timeout=100, check=False
    )


def test_a_configuration_is_simulated() -> None:
    config = ROOT / "benchmarks" / "recipes" / "spot_gcs.yaml"
    done = run("--config", str(config), "--step", "1", "--checkpoint", "4GB", "--mtbf", "4h", "--duration", "2d")
    assert done.returncode == 0, done.stderr
    assert "spot_gcs" in done.stdout
    assert "GB" in done.stdout


def test_a_value_that_cannot_be_understood_is_named() -> None:
    done = run("--config", str(ROOT / "benchmarks" / "train.yaml"), "--checkpoint", "big")
    assert done.returncode != 0
    assert done.stderr.startswith("--checkpoint='big': a number of bytes above 0 was expected")


def test_recipes_plot_and_comparison(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = run("--failures", "20", "--out", str(tmp_path))
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG"), done.stderr
    results = json.loads((tmp_path / "plan.json").read_text())
    assert sorted(results["recipes"]) == ["gpu_node_nfs", "laptop", "month_512_gpus", "spot_gcs"]
    assert results["recipes"]["month_512_gpus"]["peak_bytes"] == 21 * 10**12, "one above the budget at times"


def test_the_committed_comparison_is_within_five_percent() -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / "plan.json").read_text())
    rows = results["adaptive"]
    assert [row["mtbf_over_cost"] for row in rows] == [10, 30, 100, 300, 1_000, 3_000, 10_000]
    for row in rows:
        assert row["failures"] == 10_000
        assert max(row["given_over_best"], row["learned_over_best"]) <= 1.05


@pytest.mark.parametrize(
    ("text", "status", "told"),
    [
        ("trainer: {callbacks: [{class_path: lightning_ckpt_policy.CheckpointPolicy}]}", 0, "Cost:"),
        ("trainer: {callbacks: {class_path: x.CheckpointPolicy, init_args: {trigger: null}}}", 0, "give --epoch-steps"),
        ("trainer: {callbacks: [{class_path: lightning.pytorch.callbacks.Timer}]}", 1, "no CheckpointPolicy"),
        ("seed_everything: 1", 1, "no CheckpointPolicy"),
        ("", 1, "no CheckpointPolicy"),
    ],
)
def test_configurations_without_rules_or_policy(tmp_path: Path, text: str, status: int, told: str) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(text)
    done = run("--config", str(config), "--mtbf", "8h", "--duration", "2d")
    assert done.returncode == status
    assert told in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
