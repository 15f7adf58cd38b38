"""The barrier is reached once, before anything in a fit can change weights, whatever else changes them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, TQDMProgressBar

from lightning_ckpt_policy.barrier import Barrier, may_change_weights_early, may_validate_other_weights
from tests.models import Net, fit

pytestmark = pytest.mark.core


class Put(ModelCheckpoint):
    """Puts up a barrier after a batch, as a policy does: after the other callbacks; notes what had happened by then."""

    def __init__(self, step: int, events: list[str]) -> None:
        super().__init__(save_last=False, save_top_k=0)
        self.step = step
        self.events = events
        self.going_on: list[bool] = []
        self.before: torch.Tensor | None = None
        self.same: list[bool] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step != self.step or self.before is not None:
            return
        self.events.clear()
        weights = torch.nn.utils.parameters_to_vector(pl_module.parameters()).clone()
        self.before = weights

        def reached(going_on: bool) -> None:
            self.going_on.append(going_on)
            self.events.append("barrier")
            self.same.append(torch.equal(weights, torch.nn.utils.parameters_to_vector(pl_module.parameters())))

        self.barrier = Barrier(trainer, pl_module, reached)


class Meddler(Callback):
    """Changes weights wherever a callback may, and says so."""

    def __init__(self, events: list[str], raises_at: int | None = None) -> None:
        self.events = events
        self.raises_at = raises_at

    def meddle(self, trainer: Trainer, pl_module: LightningModule, where: str) -> None:
        self.events.append(where)
        with torch.no_grad():
            for parameter in pl_module.parameters():
                parameter.add_(1e-3)

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == self.raises_at:
            raise ZeroDivisionError

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self.meddle(trainer, pl_module, "optimizer step")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.meddle(trainer, pl_module, "validation")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.meddle(trainer, pl_module, "epoch end")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.meddle(trainer, pl_module, "train end")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.meddle(trainer, pl_module, "exception")


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class OwnStep(Net):
    """Steps the optimizer in its own way, in which Lightning's hook never comes."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        getattr(optimizer, "optimizer", optimizer).step()


@pytest.mark.parametrize(
    ("make", "step", "options", "follows"),
    [
        (Net, 3, {}, "optimizer step"),
        (Manual, 3, {}, "optimizer step"),
        (OwnStep, 3, {}, None),
        (Net, 3, {"accumulate_grad_batches": 3}, "optimizer step"),
        (Net, 3, {"val_check_interval": 4, "validate": True, "accumulate_grad_batches": 1}, "optimizer step"),
        (Net, 2, {"val_check_interval": 5, "validate": True, "accumulate_grad_batches": 2}, "validation"),
        (Net, 10, {}, "epoch end"),
        (Net, 20, {"max_epochs": 2}, "epoch end"),
        (Net, 7, {"max_steps": 7}, "epoch end"),
    ],
)
def test_it_is_reached_before_weights_change(
    tmp_path: Path, make: Callable[[], LightningModule], step: int, options: dict[str, Any], follows: str | None
) -> None:
    events: list[str] = []
    put, meddler = Put(step, events), Meddler(events)
    if options.get("val_check_interval") == 5:  # the batch after the save is in a window, and then comes a validation
        put.step = 2
    ended = fit(tmp_path, None, model=make, callbacks=[meddler, put], **{"enable_checkpointing": True, **options})
    assert put.going_on == [True]
    assert put.same == [True]
    assert events.count("barrier") == 1
    assert events[0] == "barrier"
    if follows is not None:
        assert events[1] == follows
    trainer = ended.trainer  # type: ignore[attr-defined]
    assert not any(isinstance(callback, Barrier) for callback in trainer.callbacks)
    assert not any(optimizer._optimizer_step_pre_hooks for optimizer in trainer.optimizers)


def test_an_exception_reaches_it_too(tmp_path: Path) -> None:
    events: list[str] = []
    put, meddler = Put(3, events), Meddler(events, raises_at=3)
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, None, callbacks=[meddler, put], enable_checkpointing=True)
    assert put.going_on == [False]
    assert put.same == [True]
    assert events == ["barrier", "exception"]


def test_a_copy_of_the_callbacks_has_none(tmp_path: Path) -> None:
    put, copies = Put(3, []), []

    class Copies(Callback):
        def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
            if trainer.global_step == 3:
                copies.extend(copy.deepcopy([cb for cb in trainer.callbacks if isinstance(cb, Barrier)]))

    fit(tmp_path, None, callbacks=[Copies(), put], enable_checkpointing=True)
    assert [type(one) for one in copies] == [Callback]
    assert put.going_on == [True]


def test_it_is_reached_once(tmp_path: Path) -> None:
    events: list[str] = []
    put = Put(3, events)

    class Twice(Callback):
        def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
            if trainer.global_step == 3:
                put.barrier.reach()
                put.barrier.reach()

    fit(tmp_path, None, callbacks=[Twice(), put], enable_checkpointing=True)
    assert put.going_on == [True]


@pytest.mark.parametrize(
    ("hook", "early"),
    [
        ("on_train_batch_end", True),
        ("on_train_batch_start", True),
        ("on_before_zero_grad", True),
        ("on_validation_end", True),
        ("on_validation_model_eval", True),
        ("on_validation_model_train", True),
        ("on_train_epoch_end", False),
        ("on_validation_start", False),
        ("on_after_backward", False),
        (None, False),
    ],
)
def test_modules_that_may_change_weights_early_are_known(hook: str | None, early: bool) -> None:
    kind = type("Module", (Net,), {} if hook is None else {hook: lambda self, *args: None})
    assert may_change_weights_early(kind()) == (hook if early else None)


class Swaps(Callback):
    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pass


class Watches(Callback):
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pass


class OwnValidation(Net):
    def on_validation_start(self) -> None:
        pass


@pytest.mark.parametrize(
    ("make", "callbacks", "may"),
    [
        (Net, list, False),
        (Net, lambda: [Watches(), TQDMProgressBar(), EarlyStopping("val_loss"), LearningRateMonitor()], False),
        (Net, lambda: [Swaps()], True),
        (OwnValidation, list, True),
        (Net, lambda: [averaging()], True),
    ],
)
def test_other_weights_in_a_validation_are_suspected(
    make: Callable[[], LightningModule], callbacks: Callable[[], list[Callback]], may: bool
) -> None:
    trainer = Trainer(callbacks=callbacks(), logger=True, accelerator="cpu", enable_checkpointing=False)
    assert may_validate_other_weights(trainer, make()) == may


def averaging() -> Callback:
    """Lightning's own weight averaging."""
    callbacks = pytest.importorskip("lightning.pytorch.callbacks.weight_averaging", reason="came with Lightning 2.6")
    averaging: Callback = callbacks.WeightAveraging()
    return averaging
