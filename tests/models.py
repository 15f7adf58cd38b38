"""Small trainings whose every random draw matters, and what to compare of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_ckpt_policy import CheckpointPolicy
from lightning_ckpt_policy.rng import collect_rng_state

BATCHES = 10


class Rows(Dataset[torch.Tensor]):
    """``length`` fixed rows of 4 numbers."""

    def __init__(self, length: int) -> None:
        self.rows = torch.randn(length, 4, generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


def loader(kind: str = "stateful", batches: int = BATCHES, **kwargs: Any) -> Any:
    cls = {"stateful": StatefulDataLoader, "plain": DataLoader}[kind]
    return cls(Rows(batches * 4), batch_size=4, shuffle=True, **kwargs)


class Net(LightningModule):
    """BatchNorm, dropout, Adam, a scheduler per step; draws from all three generators in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        noise = random.random() + float(np.random.rand())
        loss = (self.body(batch + 0.1 * noise) - 1).pow(2).mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.body(batch).pow(2).mean())
        self.log("val/step", float(self.global_step))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Interrupted(Exception):
    """Stands for a crash."""


class Observer(Callback):
    """Records what each batch and validation saw; can crash at a step."""

    def __init__(self, crash_at: int | None = None) -> None:
        self.crash_at = crash_at
        self.batches: list[tuple[int, float]] = []
        self.validations: list[int] = []
        self.final: dict[str, Any] = {}

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.crash_at is not None and trainer.global_step >= self.crash_at:
            raise Interrupted(f"at step {trainer.global_step}")
        seen = batch.values() if isinstance(batch, dict) else [batch]
        total = sum(float(torch.as_tensor(part).sum()) for part in seen if part is not None)
        self.batches.append((trainer.global_step, total))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self.validations.append(trainer.global_step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.final = {
            "weights": {k: v.clone() for k, v in pl_module.state_dict().items()},
            "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
            "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
            "rng": collect_rng_state(),
            "step": trainer.global_step,
            "epoch": trainer.current_epoch,
        }


def differences(a: Any, b: Any, where: str = "") -> list[str]:
    """The places at which two nested states aren't equal bit for bit."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        return [] if same else [where]
    if isinstance(a, dict) and isinstance(b, dict):
        if a.keys() != b.keys():
            return [f"{where}: keys {sorted(map(str, a.keys() ^ b.keys()))}"]
        return [d for k in a for d in differences(a[k], b[k], f"{where}/{k}")]
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        if len(a) != len(b):
            return [f"{where}: length"]
        return [d for i, (x, y) in enumerate(zip(a, b, strict=True)) for d in differences(x, y, f"{where}[{i}]")]
    return [] if type(a) is type(b) and a == b else [f"{where}: {a!r} != {b!r}"]


def fit(
    root: Any,
    policy: CheckpointPolicy | list[CheckpointPolicy] | None,
    *,
    seed: int = 1,
    crash_at: int | None = None,
    ckpt_path: str | None = None,
    train: Callable[[], Any] = loader,
    validate: bool = False,
    model: LightningModule | Callable[[], LightningModule] = Net,
    callbacks: list[Callback] | None = None,
    **trainer_options: Any,
) -> Observer:
    """Train a model, made after seeding if it's a class; a fit that crashes on purpose returns like one that ends."""
    seed_everything(seed, verbose=False)
    observer = Observer(crash_at)
    policies = policy if isinstance(policy, list) else [policy] if policy is not None else []
    options: dict[str, Any] = {
        "max_epochs": 3,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": bool(policies),
        "num_sanity_val_steps": 0,
        "default_root_dir": str(root),
    }
    trainer = Trainer(callbacks=[observer, *(callbacks or []), *policies], **{**options, **trainer_options})
    val_loader = DataLoader(Rows(12), batch_size=4) if validate else None
    try:
        trainer.fit(model if isinstance(model, LightningModule) else model(), train(), val_loader, ckpt_path=ckpt_path)
    except Interrupted:
        assert crash_at is not None
    observer.trainer = trainer  # type: ignore[attr-defined]
    return observer


def drain_each_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each save be confirmed before training goes on, so that no trigger waits for one on its way."""
    original = CheckpointPolicy._save

    def save(self: CheckpointPolicy, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self._writer.drain(30)

    monkeypatch.setattr(CheckpointPolicy, "_save", save)
