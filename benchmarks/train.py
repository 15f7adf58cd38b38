"""Train a small GPT on the Python standard library's own source code, with checkpoints decided by a policy.

    python benchmarks/train.py fit --config benchmarks/train.yaml

The settings are in ``train.yaml``; each can be overridden, e.g. ``--trainer.max_steps 1200`` or ``--model.width 256``.
Kill it at any moment and run the same command again: it goes on from the newest checkpoint and ends with the same
weights. It prints at its end what was saved, kept and deleted, and what the saves cost.
"""

from __future__ import annotations

import math
import random
import sys
import sysconfig
import time
import warnings
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.cli import LightningCLI
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_ckpt_policy import CheckpointPolicy

VOCABULARY = 256  # bytes


def read_source(num_bytes: int) -> bytes:
    """The first ``num_bytes`` bytes of the standard library's modules, in an order that is always the same.

    Raises:
        RuntimeError: this Python has less source code than that.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        file
        for file in sorted(root.rglob("*.py"), key=lambda file: file.relative_to(root).as_posix())
        if file.relative_to(root).parts[0].removesuffix(".py") in sys.stdlib_module_names
        and not {"encodings", "pydoc_data", "test", "tests"} & set(file.relative_to(root).parts)
    ]
    random.Random(0).shuffle(files)
    text = bytearray()
    for file in files:
        if len(text) >= num_bytes:
            break
        text += file.read_bytes()
    if len(text) < num_bytes:
        raise RuntimeError(
            f"{root} holds {len(text)} bytes of Python source and {num_bytes} are wanted: "
            "lower --data.train_bytes, or use a Python that has its source files"
        )
    return bytes(text[:num_bytes])


class PythonSource(L.LightningDataModule):
    """Blocks of consecutive bytes of Python source.

    Args:
        batch_size: Blocks per batch.
        context: Bytes the model reads at once.
        train_bytes: Bytes to train on: one epoch.
        val_bytes: Bytes to validate on.
    """

    def __init__(
        self, batch_size: int = 32, context: int = 128, train_bytes: int = 1_000_000, val_bytes: int = 65_536
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.context = context
        self.train_bytes = train_bytes
        self.val_bytes = val_bytes

    def setup(self, stage: str) -> None:
        # validation first, so that it stays the same whatever train_bytes is
        text = torch.frombuffer(bytearray(read_source(self.val_bytes + self.train_bytes)), dtype=torch.uint8)
        self.val, self.train = (
            part.unfold(0, self.context + 1, self.context) for part in text.split([self.val_bytes, self.train_bytes])
        )

    def train_dataloader(self) -> StatefulDataLoader:
        # its position is saved with the checkpoint, so that a run killed inside an epoch goes on exactly there
        return StatefulDataLoader(self.train, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, batch_size=self.batch_size)


class Block(nn.Module):
    """One transformer layer: attention to earlier bytes, then a small network, each added to its input."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(L.LightningModule):
    """A byte-level GPT.

    Args:
        width: Size of a byte's vector.
        layers: Transformer layers.
        heads: Attention heads per layer; divides ``width``.
        context: Bytes read at once.
        dropout: Share of values dropped while training.
        learning_rate: Highest learning rate: reached after ``warmup_steps``, then lowered to a tenth along a cosine.
        warmup_steps: Optimizer steps of a rising learning rate.
    """

    def __init__(
        self,
        width: int = 128,
        layers: int = 3,
        heads: int = 4,
        context: int = 128,
        dropout: float = 0.1,
        learning_rate: float = 2e-3,
        warmup_steps: int = 50,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.warmup_steps = warmup_steps
        self.started_at: int | None = None  # the optimizer step where this process began to train
        self.bytes = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.bytes.weight
        for embedding in (self.bytes, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        positions = torch.arange(text.shape[1], device=text.device)
        x = self.dropout(self.bytes(text) + self.positions(positions))
        return self.head(self.norm(self.blocks(x)))

    def loss(self, block: Tensor) -> Tensor:
        """Cross-entropy of each byte given those before it, nats."""
        block = block.long()
        return F.cross_entropy(self(block[:, :-1]).flatten(0, 1), block[:, 1:].flatten())

    def training_step(self, block: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(block)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, block: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(block), prog_bar=True, batch_size=len(block), sync_dist=True)

    def configure_optimizers(self) -> dict[str, object]:
        steps = max(self.trainer.max_steps, self.warmup_steps + 1)

        def share(step: int) -> float:
            if step < self.warmup_steps:
                return (step + 1) / self.warmup_steps
            done = min(1.0, (step - self.warmup_steps) / (steps - self.warmup_steps))
            return 0.1 + 0.45 * (1 + math.cos(math.pi * done))

        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_start(self) -> None:
        self.started_at = self.global_step
        how = f"Going on after step {self.global_step}" if self.global_step else "Starting afresh"
        parameters = sum(parameter.numel() for parameter in self.parameters())
        self.print(f"{how}: {self.trainer.max_steps} steps in all, {parameters:,} parameters.")


class ProgressBar(TQDMProgressBar):
    """Lightning's, which after a resume inside an epoch knows neither the epoch nor how many batches it has."""

    @property
    def total_train_batches(self) -> int | float:
        return self.trainer.num_training_batches

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self.on_train_epoch_start(trainer)


class TrainCLI(LightningCLI):
    """``fit`` that says at its end what was saved."""

    def before_instantiate_classes(self) -> None:
        if self.config[self.subcommand].trainer.get("enable_progress_bar") is False:
            self.trainer_defaults = {}

    def before_fit(self) -> None:
        self.began = time.monotonic()

    def after_fit(self) -> None:
        seconds = time.monotonic() - self.began
        console = Console()
        policies = [c for c in self.trainer.callbacks if isinstance(c, CheckpointPolicy)]
        if self.trainer.is_global_zero:
            for policy in policies:
                report(policy, seconds, console)
            if self.model.started_at is None:
                console.print(
                    f"Nothing was left to train: step {self.trainer.global_step} of {self.trainer.max_steps} was "
                    "reached before. Raise --trainer.max_steps to go on, or remove the checkpoints to start afresh.",
                    highlight=False,
                )


def report(policy: CheckpointPolicy, seconds: float, console: Console) -> None:
    """Print what this process saved, what is kept and what was deleted, and the cost."""
    kept = policy.store.records()
    saved = [outcome.record for outcome in policy.history if outcome.record is not None]
    failed = [outcome for outcome in policy.history if outcome.record is None]
    table = Table(title=f"Checkpoints in {policy.store.url}")
    for name in ("step", "reason", "val_loss", "size", "held", "write", "now"):
        table.add_column(name, justify="left" if name in ("reason", "now") else "right", overflow="fold")
    kept_paths = {record.path for record in kept}
    records = {record.path: record for record in (*policy.deleted, *saved, *kept)}
    for record in sorted(records.values(), key=lambda record: record.sequence):
        table.add_row(
            str(record.step),
            ", ".join(reason.split("(")[0] for reason in record.reason),
            f"{record.metrics['val_loss']:.4f}" if "val_loss" in record.metrics else "",
            f"{record.size / 1e6:.1f} MB",
            milliseconds(record.held_seconds),
            milliseconds(record.write_seconds),
            "[green]kept" if record.path in kept_paths else "[dim]deleted",
        )
    for outcome in failed:
        table.add_row(
            str(outcome.step), f"{outcome.error}", "", "", milliseconds(outcome.held_seconds), "", "[red]failed"
        )
    console.print(table)
    lines = [f"Checkpoints: {len(kept)} kept, {len(policy.deleted)} deleted."]
    if policy.history:
        size = sum(record.size for record in saved) / 1e6
        held = sum(outcome.held_seconds for outcome in policy.history)
        lines.append(
            f"Saves: {len(saved)} done ({size:.1f} MB), {len(failed)} failed. They held training for {held:.2f} s "
            f"of {seconds:.1f} s ({held / seconds:.2%})."
        )
    console.print(*lines, sep="\n", highlight=False)


def milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.0f} ms"


if __name__ == "__main__":
    for text in (".*does not have many workers.*", ".*set_vital.*", ".*LeafSpec.*"):  # nothing a user could act on
        warnings.filterwarnings("ignore", text)
    TrainCLI(
        GPT,
        PythonSource,
        save_config_callback=None,
        trainer_defaults={"callbacks": [ProgressBar(refresh_rate=5)]},
    )
