"""A checkpoint is an ordinary Lightning file: it is read where this package can't be imported (case 33)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_ckpt_policy import CheckpointPolicy, EveryNTrainSteps, KeepAll
from tests.models import fit

pytestmark = pytest.mark.core

STOCK = """
import sys
sys.modules["lightning_ckpt_policy"] = None  # importing it is an error now
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
    def training_step(self, batch, batch_idx):
        return self.body(batch).pow(2).mean()
    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

path, root = sys.argv[1:]
mapped = torch.load(path, weights_only=True, mmap=True)
assert mapped["global_step"] == 4
Net.load_from_checkpoint(path)
trainer = Trainer(max_steps=9, accelerator="cpu", logger=False, enable_checkpointing=False, default_root_dir=root,
                  enable_progress_bar=False)
trainer.fit(Net(), StatefulDataLoader(torch.randn(40, 4), batch_size=4, shuffle=True), ckpt_path=path)
assert trainer.global_step == 9
print("read without the package")
"""


def test_stock_lightning_and_torch_read_it_without_this_package(tmp_path: Path) -> None:
    policy = CheckpointPolicy(tmp_path / "ckpt", EveryNTrainSteps(4), KeepAll())
    fit(tmp_path, policy, max_steps=4)
    done = subprocess.run(
        [sys.executable, "-c", STOCK, policy.last_model_path, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert "read without the package" in done.stdout, done.stderr[-3000:]


def test_case_33_a_checkpoint_holds_nothing_that_weights_only_refuses(tmp_path: Path) -> None:
    policy = CheckpointPolicy(tmp_path / "ckpt", EveryNTrainSteps(4), KeepAll())
    fit(tmp_path, policy, max_steps=4, validate=True)
    checkpoint = torch.load(policy.last_model_path, weights_only=True)
    progress = checkpoint["lightning_ckpt_policy"]["progress"]
    assert progress.pop("elapsed") > 0
    assert progress == {"step": 4, "epoch": 0, "validations": 0, "highest": {}, "lowest": {}}
    assert len(checkpoint["lightning_ckpt_policy"]["rng"]) == 1


def test_case_12_the_file_is_as_large_as_a_synchronous_one(tmp_path: Path) -> None:
    policy = CheckpointPolicy(tmp_path / "ckpt", EveryNTrainSteps(4), KeepAll())
    trainer = fit(tmp_path, policy, max_steps=4).trainer  # type: ignore[attr-defined]
    direct = tmp_path / "direct.ckpt"
    torch.save(torch.load(policy.last_model_path), direct)
    assert abs(direct.stat().st_size - Path(policy.last_model_path).stat().st_size) < 2000
    assert trainer.global_step == 4
