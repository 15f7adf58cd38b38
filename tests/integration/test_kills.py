"""SIGKILL at random moments: what is confirmed is whole, and the job run again ends as if it had never been killed."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch

from lightning_ckpt_policy import CheckpointStore
from tests.integration.helpers import final, kill, run, start
from tests.models import differences

pytestmark = pytest.mark.timeout(240)
EVERY_STEP = ("--trigger", "EveryNTrainSteps(1)", "--step-seconds", "0.02")


@pytest.mark.parametrize("seed", [0, 1])
def test_case_19_killed_three_times_at_random(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    run(tmp_path / "whole", "--no-policy")
    folder = tmp_path / "killed" / "ckpt"
    store = CheckpointStore(str(folder))
    for _ in range(3):
        process = start(tmp_path / "killed", *EVERY_STEP)
        before = {record.path for record in store.records()}
        deadline = time.monotonic() + 60
        while {record.path for record in store.records()} <= before and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.3))
        kill(process)
        assert store.records()
        for record in store.records():
            store.verify(record)
            torch.load(folder / record.path, weights_only=True)
        assert {path.name for path in folder.glob("*.ckpt")} >= {record.path for record in store.records()}
    run(tmp_path / "killed", *EVERY_STEP)
    whole, killed = final(tmp_path / "whole"), final(tmp_path / "killed")
    assert killed["batches"] == whole["batches"][-len(killed["batches"]) :]
    assert differences({**whole, "batches": 0}, {**killed, "batches": 0}) == []
    assert len(store.records()) == 2
    assert store.records()[-1].step == 30
    assert sorted(path.name for path in folder.iterdir() if path.is_file()) == sorted(
        name for record in store.records() for name in (record.path, record.path + ".json")
    )


def test_case_24_a_second_process_loads_each_checkpoint_as_soon_as_it_is_confirmed(tmp_path: Path) -> None:
    process = start(tmp_path, *EVERY_STEP, "--retention", "KeepAll()", "--epochs", "20")
    store = CheckpointStore(str(tmp_path / "ckpt"))
    loaded: set[str] = set()
    deadline = time.monotonic() + 100
    try:
        while len(loaded) < 50 and time.monotonic() < deadline:
            for record in store.records():
                if record.path not in loaded:
                    checkpoint = torch.load(store.path_of(record), weights_only=True)
                    assert checkpoint["global_step"] == record.step
                    loaded.add(record.path)
    finally:
        kill(process)
    assert len(loaded) >= 50
