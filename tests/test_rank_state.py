"""State that callbacks have on each rank. That each of several ranks gets its own: ``integration/test_ranks.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader

from lightning_ckpt_policy import AtSteps, CheckpointPolicy
from lightning_ckpt_policy.errors import CheckpointSaveError
from tests.models import Rows, fit


class Seen(Callback):
    def __init__(self, name: str = "seen") -> None:
        self.name = name
        self.batches = 0

    @property
    def state_key(self) -> str:
        return self.name

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        self.batches += 1

    def rank_state_dict(self) -> dict[str, int]:
        return {"batches": self.batches}

    def load_rank_state_dict(self, state: dict[str, int]) -> None:
        self.batches = state["batches"]


class Half(Callback):
    def rank_state_dict(self) -> dict[str, int]:
        return {}


class Unpicklable(Seen):
    def rank_state_dict(self) -> dict[str, Any]:
        return {"open": lambda: self.batches}


def policy(root: Path) -> CheckpointPolicy:
    return CheckpointPolicy(root / "ckpt", AtSteps([4]))


def test_a_resume_gives_it_back_and_a_validation_does_not(tmp_path: Path) -> None:
    fit(tmp_path, policy(tmp_path), callbacks=[Seen(), Seen("other")], crash_at=7)
    seen = Seen()
    trainer = fit(tmp_path, policy(tmp_path), callbacks=[seen], ckpt_path="last", validate=True).trainer  # type: ignore[attr-defined]
    assert seen.batches == 30
    seen.batches = 0
    trainer.validate(trainer.lightning_module, DataLoader(Rows(12), batch_size=4), ckpt_path="last")
    assert seen.batches == 0


def test_another_number_of_ranks_is_told(tmp_path: Path) -> None:
    fit(tmp_path, policy(tmp_path), callbacks=[Seen()], crash_at=7)
    path = tmp_path / "ckpt" / "step-0000000004.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    states = checkpoint["lightning_ckpt_policy"]["rank_states"]
    assert states == [{"seen": {"batches": 4}}]
    states.append({"seen": {"batches": 9}})
    torch.save(checkpoint, tmp_path / "two.ckpt")
    seen = Seen()
    with pytest.warns(UserWarning, match=r"holds the state of Seen on 2 rank\(s\), this fit has 1"):
        fit(tmp_path, policy(tmp_path), callbacks=[seen], ckpt_path=str(tmp_path / "two.ckpt"))
    assert seen.batches == 30


@pytest.mark.parametrize(
    ("callbacks", "error", "message"),
    [
        ([Half()], TypeError, "Half has rank_state_dict alone: give it both of"),
        ([Seen(), Seen()], ValueError, "two callbacks with rank_state_dict have state_key='seen'"),
    ],
)
def test_what_is_refused_at_setup(tmp_path: Path, callbacks: list[Callback], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        fit(tmp_path, policy(tmp_path), callbacks=callbacks)


def test_what_cannot_be_pickled_is_told_with_its_callback(tmp_path: Path) -> None:
    with pytest.raises(CheckpointSaveError, match=r"what Unpicklable\.rank_state_dict\(\) returns can't be pickled"):
        fit(tmp_path, policy(tmp_path), callbacks=[Seen(), Unpicklable("other")])
