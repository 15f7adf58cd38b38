"""A run that is interrupted and resumed ends bit for bit like one that never was; or Lightning's limit is asserted."""

from __future__ import annotations

import copy
import inspect
import pickle
import random
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_ckpt_policy import AfterValidation, AtSteps, CheckpointPolicy, EveryNEpochs, EveryNTrainSteps, KeepAll
from tests.models import BATCHES, Net, Rows, differences, drain_each_save, fit, loader


def interrupted_and_resumed(
    tmp_path: Path,
    save_at: int,
    crash_at: int,
    *,
    model: type[LightningModule] = Net,
    callbacks: Any = list,
    seed: int = 99,
    saved: int | None = None,
    **options: Any,
) -> tuple[Any, Any, Any]:
    """An undisturbed fit, and one that crashed after the save at ``save_at`` and was resumed by new objects."""

    def run(*args: Any, **more: Any) -> Any:
        return fit(tmp_path, *args, **{**options, **more}, model=model, callbacks=callbacks())

    whole = run(None)

    def policy() -> CheckpointPolicy:
        return CheckpointPolicy(tmp_path / "ckpt", AtSteps([save_at]), KeepAll(), save_on_train_end=False)

    first = run(policy(), crash_at=crash_at)
    assert [record.step for record in CheckpointPolicy(tmp_path / "ckpt").store.records()] == [saved or save_at]
    second = run(policy(), ckpt_path="last", seed=seed)
    return whole, first, second


def assert_exact(whole: Any, second: Any, save_at: int) -> None:
    assert second.batches == [(step, batch) for step, batch in whole.batches if step >= save_at]
    assert differences(whole.final, second.final) == []


@pytest.mark.core
@pytest.mark.parametrize("limit", [{"max_epochs": 3}, {"max_steps": 30}], ids=["max_epochs", "max_steps"])
@pytest.mark.parametrize(
    "validation",
    [
        pytest.param({}, id="no validation"),
        pytest.param({"validate": True}, id="validation at epoch ends"),
        pytest.param({"validate": True, "val_check_interval": 5}, id="validation mid-epoch"),
        pytest.param({"validate": True, "check_val_every_n_epoch": 2}, id="validation every 2 epochs"),
    ],
)
@pytest.mark.parametrize("save_at", [3, 5, 10, 20, 13, 25])
def test_stateful_loader_resumes_exactly_anywhere(
    tmp_path: Path, save_at: int, validation: dict[str, Any], limit: dict[str, Any]
) -> None:
    whole, _, second = interrupted_and_resumed(tmp_path, save_at, save_at + 2, **validation, **limit)
    assert second.batches == whole.batches[save_at:]
    assert second.validations == [step for step in whole.validations if step > save_at]
    assert differences(whole.final, second.final) == []


@pytest.mark.core
class DrawsAtEpochEnds(Net):
    def on_train_epoch_end(self) -> None:
        torch.randn(3), random.random()


@pytest.mark.core
@pytest.mark.parametrize("model", [Net, DrawsAtEpochEnds])
@pytest.mark.parametrize("kind", ["plain", "stateful"])
@pytest.mark.parametrize(
    "validation",
    [
        pytest.param({}, id="no validation"),
        pytest.param({"validate": True}, id="validation"),
        pytest.param({"validate": True, "check_val_every_n_epoch": 2}, id="validation every 2 epochs"),
    ],
)
@pytest.mark.parametrize("save_at", [10, 20])
def test_any_loader_resumes_exactly_at_epoch_ends(
    tmp_path: Path, save_at: int, validation: dict[str, Any], kind: str, model: Any
) -> None:
    whole, _, second = interrupted_and_resumed(
        tmp_path, save_at, save_at + 2, train=partial(loader, kind), model=model, **validation
    )
    assert second.batches == whole.batches[save_at:]
    assert differences(whole.final, second.final) == []


class Manual(Net):
    """Manual optimization with two optimizers, one of which steps in every second batch only."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:  # type: ignore[override]
        for index, optimizer in enumerate(self.optimizers()):  # type: ignore[arg-type]
            if index == 0 or batch_idx % 2:
                optimizer.zero_grad()
                self.manual_backward(self.body(batch + random.random()).pow(2).mean())
                optimizer.step()

    def configure_optimizers(self) -> Any:
        half = list(self.parameters())
        return [torch.optim.Adam(half[:3], lr=0.01), torch.optim.SGD(half[3:], lr=0.01, momentum=0.9)]


class PerEpoch(Net):
    """A scheduler that steps per epoch."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Augmented(Rows):
    """Draws at random in each item."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + torch.rand(4)


def stateful(dataset: type[Dataset[Any]], **options: Any) -> Any:
    return StatefulDataLoader(dataset(40), batch_size=4, shuffle=True, **options)  # type: ignore[call-arg]


@pytest.mark.parametrize("save_at", [3, 6, 15])
def test_manual_optimization_with_two_optimizers(tmp_path: Path, save_at: int) -> None:
    whole, _, second = interrupted_and_resumed(tmp_path, save_at, save_at + 3, model=Manual)
    assert_exact(whole, second, save_at)


@pytest.mark.parametrize(("save_at", "validate"), [(4, False), (10, False), (10, True), (14, True)])
def test_a_scheduler_per_epoch(tmp_path: Path, save_at: int, validate: bool) -> None:
    whole, _, second = interrupted_and_resumed(tmp_path, save_at, save_at + 2, model=PerEpoch, validate=validate)
    assert_exact(whole, second, save_at)


@pytest.mark.parametrize("save_at", [1, 2, 4, 6])
def test_accumulation_windows(tmp_path: Path, save_at: int) -> None:
    whole, _, second = interrupted_and_resumed(tmp_path, save_at, save_at + 1, accumulate_grad_batches=3)
    assert_exact(whole, second, save_at)


def test_a_crash_inside_an_accumulation_window(tmp_path: Path) -> None:
    # a trigger that is due within the window waits for its end; the batches since are trained again
    whole, first, second = interrupted_and_resumed(
        tmp_path, 2, 3, accumulate_grad_batches=3, callbacks=list, max_epochs=2
    )
    assert len(first.batches) == 9
    assert_exact(whole, second, 2)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("save_at", [4, 10, 13])
def test_stateful_loader_with_workers(tmp_path: Path, save_at: int, workers: int) -> None:
    train = partial(stateful, Rows, num_workers=workers)
    whole, _, second = interrupted_and_resumed(tmp_path, save_at, save_at + 2, train=train)
    assert_exact(whole, second, save_at)


def test_random_augmentation_without_workers(tmp_path: Path) -> None:
    whole, _, second = interrupted_and_resumed(tmp_path, 13, 15, train=partial(stateful, Augmented))
    assert_exact(whole, second, 13)


@pytest.mark.skipif(not hasattr(lightning.pytorch.callbacks, "EMAWeightAveraging"), reason="came with Lightning 2.6")
@pytest.mark.parametrize(("save_at", "validate"), [(3, False), (10, False), (10, True), (13, True)])
def test_averaged_weights(tmp_path: Path, save_at: int, validate: bool) -> None:
    from lightning.pytorch.callbacks import EMAWeightAveraging

    whole, _, second = interrupted_and_resumed(
        tmp_path, save_at, save_at + 2, validate=validate, callbacks=lambda: [EMAWeightAveraging(decay=0.9)]
    )
    assert_exact(whole, second, save_at)


def test_a_crash_during_validation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drain_each_save(monkeypatch)

    class Breaks(Net):
        broken = True

        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            if Breaks.broken and self.global_step == 20 and batch_idx == 1:
                raise RuntimeError("in validation")
            super().validation_step(batch, batch_idx)

    def policy() -> CheckpointPolicy:
        return CheckpointPolicy(tmp_path / "ckpt", EveryNTrainSteps(6), KeepAll())

    whole = fit(tmp_path, None, validate=True)
    with pytest.raises(RuntimeError, match="in validation"):
        fit(tmp_path, policy(), validate=True, model=Breaks)
    Breaks.broken = False
    second = fit(tmp_path, policy(), validate=True, model=Breaks, ckpt_path="last", seed=99)
    assert second.batches[0][0] == 18
    assert_exact(whole, second, 18)


@pytest.mark.parametrize("validation", [{}, {"validate": True}, {"validate": True, "val_check_interval": 5}])
@pytest.mark.parametrize("save_at", [3, 5, 10, 13, 15, 20])
def test_logged_steps_and_values_go_on(tmp_path: Path, save_at: int, validation: dict[str, Any]) -> None:
    class Log(DummyLogger):
        def __init__(self) -> None:
            super().__init__()
            self.rows: list[tuple[int, dict[str, float]]] = []

        def log_metrics(self, metrics: Any, step: int | None = None) -> None:  # type: ignore[override]
            self.rows.append((step or 0, dict(metrics)))

    def policy() -> CheckpointPolicy:
        return CheckpointPolicy(tmp_path / "ckpt", AtSteps([save_at]), KeepAll(), save_on_train_end=False)

    logs = [Log(), Log(), Log()]
    common: dict[str, Any] = {"log_every_n_steps": 1, **validation}
    fit(tmp_path, None, logger=logs[0], **common)
    fit(tmp_path, policy(), logger=logs[1], crash_at=save_at + 2, **common)
    fit(tmp_path, policy(), logger=logs[2], ckpt_path="last", seed=99, **common)
    assert logs[2].rows
    assert logs[2].rows == logs[0].rows[-len(logs[2].rows) :]
    trained = [step for step, metrics in logs[2].rows if "train_loss" in metrics]
    assert trained == list(range(save_at, 30))


class EpochMetric(Net):
    """Logs the mean of an epoch, and draws at the ends of epochs."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("mean_loss", loss, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        assert self.trainer.callback_metrics["mean_loss"] > 0


class DrawsAtStart(Net):
    def on_train_start(self) -> None:
        torch.randn(3)


def two_loaders(kinds: tuple[str, str], mode: str) -> CombinedLoader:
    return CombinedLoader({"a": loader(kinds[0]), "b": loader(kinds[1], batches=6)}, mode)


class TakesDict(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch["a"] if batch["a"] is not None else batch["b"], batch_idx)


@pytest.mark.parametrize("crash_at", [9, 10, 13])
@pytest.mark.parametrize(
    ("model", "options"),
    [
        pytest.param(Net, {"limit_train_batches": 5, "max_epochs": 6}, id="cut off"),
        pytest.param(Net, {"limit_train_batches": 5, "max_epochs": 6, "validate": True}, id="cut off, validation"),
        pytest.param(Net, {"overfit_batches": 4, "max_epochs": 5}, id="overfit_batches"),
        pytest.param(EpochMetric, {}, id="metric of an epoch"),
        pytest.param(EpochMetric, {"validate": True}, id="metric of an epoch, validation"),
        pytest.param(DrawsAtStart, {}, id="draws at the start"),
        pytest.param(
            Net, {"callbacks": [GradientAccumulationScheduler({0: 1, 1: 2, 2: 3})]}, id="accumulation scheduler"
        ),
    ],
)
def test_odd_trainings_saved_at_every_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Any, options: dict[str, Any], crash_at: int
) -> None:
    drain_each_save(monkeypatch)

    def run(*args: Any, **more: Any) -> Any:
        return fit(tmp_path, *args, model=model, **{**copy.deepcopy(options), **more})

    def policy() -> CheckpointPolicy:
        return CheckpointPolicy(tmp_path / "ckpt", EveryNTrainSteps(1), KeepAll())

    whole = run(None)
    run(policy(), crash_at=crash_at)
    again = run(policy(), ckpt_path="last", seed=99)
    assert again.batches == whole.batches[-len(again.batches) :]
    assert differences(whole.final, again.final) == []


@pytest.mark.parametrize("validate", [False, True])
@pytest.mark.parametrize("mode", ["max_size_cycle", "max_size", "min_size"])
@pytest.mark.parametrize("kinds", [("stateful", "stateful"), ("stateful", "plain")])
def test_several_loaders_at_an_epochs_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kinds: tuple[str, str], mode: str, validate: bool
) -> None:
    drain_each_save(monkeypatch)

    def run(*args: Any, **more: Any) -> Any:
        train = partial(two_loaders, kinds, mode)
        return fit(tmp_path, *args, model=TakesDict, train=train, validate=validate, **more)

    def policy() -> CheckpointPolicy:
        return CheckpointPolicy(tmp_path / "ckpt", EveryNEpochs(1), KeepAll())

    whole = run(None)
    run(policy(), crash_at=13)
    again = run(policy(), ckpt_path="last", seed=99)
    assert again.batches == whole.batches[-len(again.batches) :]
    assert differences(whole.final, again.final) == []


def test_early_stopping_on_any_metric_survives_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drain_each_save(monkeypatch)
    for metric, validate in (("mean_loss", False), ("mean_loss", True), ("val_loss", True)):
        root = tmp_path / f"{metric}-{validate}"

        def run(*args: Any, root: Path = root, metric: str = metric, validate: bool = validate, **more: Any) -> Any:
            stop = EarlyStopping(metric, patience=3, min_delta=1e9)
            observer = fit(root, *args, model=EpochMetric, callbacks=[stop], validate=validate, max_epochs=9, **more)
            return observer, stop

        def policy(root: Path = root) -> CheckpointPolicy:
            return CheckpointPolicy(root / "ckpt", EveryNEpochs(1), KeepAll())

        whole, stop = run(None)
        run(policy(), crash_at=22)
        again, stopped = run(policy(), ckpt_path="last", seed=99)
        assert again.batches[0][0] == 20
        assert (stopped.stopped_epoch, stopped.best_score) == (stop.stopped_epoch, stop.best_score)
        assert differences(whole.final, again.final) == []


# What Lightning itself can't resume exactly. Each asserts the limit, so that a version that lifts it is noticed.


def warned(caught: list[warnings.WarningMessage], text: str) -> bool:
    return any(text in str(warning.message) for warning in caught)


@pytest.fixture
def caught() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        yield messages


def test_limit_a_plain_loader_in_the_middle_of_an_epoch_sees_other_data(tmp_path: Path, caught: Any) -> None:
    whole, _, second = interrupted_and_resumed(tmp_path, 13, 15, train=partial(loader, "plain"))
    assert second.batches[0] != whole.batches[13]
    assert warned(caught, "no state_dict")


def test_limit_random_augmentation_in_workers_differs(tmp_path: Path) -> None:
    whole, _, second = interrupted_and_resumed(tmp_path, 13, 15, train=partial(stateful, Augmented, num_workers=2))
    assert second.batches != whole.batches[13:]


class Placed(Net):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["folder"] = Path("data")


def test_limit_state_of_a_class_that_is_not_trusted_needs_weights_only_false(tmp_path: Path) -> None:
    fit(tmp_path, CheckpointPolicy(tmp_path / "ckpt", EveryNTrainSteps(4)), model=Placed, max_epochs=1)
    options = inspect.signature(Trainer.fit).parameters
    if "weights_only" in options:  # else Lightning trusts what it loads
        with pytest.raises(pickle.UnpicklingError, match="weights_only"):
            fit(tmp_path, CheckpointPolicy(tmp_path / "ckpt"), model=Placed, ckpt_path="last")
    trainer = Trainer(
        max_epochs=2, logger=False, enable_progress_bar=False, callbacks=[CheckpointPolicy(tmp_path / "ckpt")]
    )
    trusted: Any = {"weights_only": False} if "weights_only" in options else {}
    trainer.fit(Placed(), loader(), ckpt_path="last", **trusted)
    assert trainer.global_step == 20


class Stream(IterableDataset[torch.Tensor]):
    """Has no length, and a state."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.position < 40:
            self.position += 1
            yield torch.full((4,), float(self.position))
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def test_limit_a_loader_without_length_loses_a_batch(tmp_path: Path, caught: Any) -> None:
    whole, _, second = interrupted_and_resumed(
        tmp_path, 4, 6, train=lambda: StatefulDataLoader(Stream(), batch_size=4), max_epochs=1
    )
    assert second.batches[0][1] == whole.batches[5][1]
    assert warned(caught, "no length")


class Target(Net):
    """Keeps a moving target in a buffer, updated in the module's own hook (as in BYOL)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("target", torch.zeros(()))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.target += 1  # type: ignore[operator]


def test_limit_the_modules_own_batch_end_hook_is_lost(tmp_path: Path, caught: Any) -> None:
    whole, _, second = interrupted_and_resumed(tmp_path, 13, 15, model=Target)
    assert int(whole.final["weights"]["target"]) == 30
    assert int(second.final["weights"]["target"]) == 29
    assert warned(caught, "Target.on_train_batch_end")


class Plateau(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


class AfterValidationDraw(Net):
    def on_validation_end(self) -> None:
        torch.randn(3)


def test_limit_the_modules_own_validation_end_hook_is_lost(tmp_path: Path, caught: Any) -> None:
    whole, _, second = interrupted_and_resumed(tmp_path, 10, 12, model=AfterValidationDraw, validate=True)
    assert differences(whole.final, second.final) != []
    assert warned(caught, "AfterValidationDraw.on_validation_end")


class Accumulates(Manual):
    """One optimizer steps in each batch, the other one gathers four."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:  # type: ignore[override]
        first, second = self.optimizers()  # type: ignore[misc]
        self.manual_backward(self.body(batch).pow(2).mean())
        first.step()
        first.zero_grad()
        if batch_idx % 4 == 3:
            second.step()
            second.zero_grad()


def test_limit_gradients_that_a_module_gathers_by_itself_are_lost(tmp_path: Path, caught: Any) -> None:
    whole, _, second = interrupted_and_resumed(tmp_path, 2, 4, model=Accumulates)
    assert differences(whole.final, second.final) != []
    assert warned(caught, "an optimizer that has gradients didn't step")


def test_limit_reloaded_dataloaders(tmp_path: Path, caught: Any) -> None:
    whole, _, second = interrupted_and_resumed(tmp_path, 13, 15, reload_dataloaders_every_n_epochs=2)
    assert differences(whole.final, second.final) != []
    assert warned(caught, "reload_dataloaders_every_n_epochs")


def test_limit_the_mean_of_an_epoch_covers_only_what_follows_the_resume(tmp_path: Path) -> None:
    class Log(Callback):
        def __init__(self) -> None:
            self.means: list[float] = []

        def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
            self.means.append(float(trainer.callback_metrics["mean_loss"]))

    logs: list[Log] = []

    def callbacks() -> list[Callback]:
        logs.append(Log())
        return [logs[-1]]

    interrupted_and_resumed(tmp_path, 13, 15, model=EpochMetric, callbacks=callbacks)
    assert logs[0].means[1] != logs[2].means[0]
    assert logs[0].means[2] == logs[2].means[1]


def test_limit_reduce_lr_on_plateau_skips_a_step(tmp_path: Path, caught: Any) -> None:
    whole, _, second = interrupted_and_resumed(tmp_path, 10, 12, model=Plateau, validate=True)
    assert whole.final["schedulers"][0]["last_epoch"] == second.final["schedulers"][0]["last_epoch"] + 1
    assert warned(caught, "ReduceLROnPlateau")


def test_every_save_point_of_a_long_run_resumes_exactly(tmp_path: Path) -> None:
    """One run saves everywhere it may; resuming from each of its checkpoints ends the same."""
    options: dict[str, Any] = {"validate": True, "val_check_interval": 4, "max_epochs": 2}
    whole = fit(
        tmp_path, CheckpointPolicy(tmp_path / "all", EveryNTrainSteps(1) | AfterValidation(), KeepAll()), **options
    )
    for record in CheckpointPolicy(tmp_path / "all").store.records():
        if record.step < 20:
            path = str(tmp_path / "all" / record.path)
            again = fit(tmp_path, CheckpointPolicy(tmp_path / "x", AtSteps([99])), ckpt_path=path, seed=7, **options)
            assert_exact(whole, again, record.step)


def test_limit_an_epoch_that_is_shorter_than_what_was_done_of_it(tmp_path: Path) -> None:
    def shares(ranks: int) -> Any:  # as a DistributedSampler gives each of so many ranks
        return loader(batches=BATCHES // ranks)

    policy = CheckpointPolicy(tmp_path / "ck", trigger=AtSteps([8]), save_on_train_end=False)
    fit(tmp_path, policy, train=lambda: shares(1), crash_at=9)
    with pytest.raises(RuntimeError, match="iter"):
        fit(tmp_path, CheckpointPolicy(tmp_path / "ck"), train=lambda: shares(2), ckpt_path="last")
