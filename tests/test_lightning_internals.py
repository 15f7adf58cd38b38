"""What ``_lightning.py`` relies on. A failure here names what the installed Lightning changed."""

from __future__ import annotations

import inspect
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning
import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_ckpt_policy import _lightning
from tests.models import fit

pytestmark = pytest.mark.core
CHANGED = f"Lightning {lightning.__version__} changed "


def test_parse_ckpt_path_has_the_expected_arguments() -> None:
    original = inspect.unwrap(_CheckpointConnector._parse_ckpt_path)
    assert list(inspect.signature(original).parameters)[:3] == ["self", "state_fn", "ckpt_path"], (
        CHANGED + "_CheckpointConnector._parse_ckpt_path"
    )


@pytest.mark.parametrize("strategy", [SingleDeviceStrategy, DDPStrategy])
def test_strategies_save_through_the_checkpoint_io(strategy: type[Strategy]) -> None:
    assert strategy.save_checkpoint is Strategy.save_checkpoint, CHANGED + f"{strategy.__name__}.save_checkpoint"
    assert strategy.checkpoint_io is Strategy.checkpoint_io, CHANGED + f"{strategy.__name__}.checkpoint_io"


def test_a_strategy_tells_its_timeout() -> None:
    trainer = Trainer(accelerator="cpu", devices=2, strategy=DDPStrategy(timeout=timedelta(seconds=7)), logger=False)
    assert _lightning.group_timeout(trainer) == 7, CHANGED + "DDPStrategy._timeout"


def test_the_loop_tells_where_a_batch_stands(tmp_path: Path) -> None:
    seen: list[tuple[int, bool, bool, bool]] = []

    class Look(Callback):
        def on_train_batch_end(
            self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            if trainer.current_epoch == 0:
                seen.append(
                    (
                        batch_idx,
                        _lightning.gradients_pending(trainer),
                        _lightning.validation_is_due(trainer),
                        _lightning.is_last_batch(trainer),
                    )
                )

    fit(tmp_path, None, callbacks=[Look()], accumulate_grad_batches=3, validate=True, val_check_interval=5)
    assert seen == [(index, index not in (2, 5, 8, 9), index in (4, 9), index == 9) for index in range(10)], (
        CHANGED + "_should_accumulate, _should_check_val_fx or _num_ready_batches_reached"
    )


def test_a_dumped_checkpoint_holds_the_batch_progress(tmp_path: Path) -> None:
    dumped: list[Any] = []

    class Dump(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            if trainer.global_step == 3:
                trainer.save_checkpoint(tmp_path / "a.ckpt")

        def on_save_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: Any) -> None:
            _lightning.mark_batch_completed(checkpoint)
            dumped.append(checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"])

    fit(tmp_path, None, callbacks=[Dump()], max_steps=4)
    assert dumped[0]["current"]["completed"] == dumped[0]["current"]["processed"] == 3
    assert dumped[0]["total"]["completed"] == dumped[0]["total"]["processed"] == 3


def test_train_loaders_and_the_early_stop_rule(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Look(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            seen.append(
                (
                    len(_lightning.train_loaders(trainer)),
                    _lightning.may_stop(trainer, False),
                    _lightning.may_stop(trainer, True),
                )
            )

    fit(tmp_path, None, callbacks=[Look()], max_epochs=2, min_epochs=2, limit_train_batches=1)
    assert seen == [(1, False, False), (1, False, True)], CHANGED + "fit_loop.min_epochs or epoch_progress"


def test_the_sigterm_notifier_is_told_from_a_users_handler(tmp_path: Path) -> None:
    found: list[Any] = []

    def mine(*_: Any) -> None: ...

    class Look(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            found.append(_lightning.without_sigterm_notifier(trainer, signal.getsignal(signal.SIGTERM)))
            assert not trainer.received_sigterm
            _lightning.stop_as_after_sigterm(trainer)
            assert trainer.received_sigterm

    before = signal.signal(signal.SIGTERM, mine)
    try:
        with pytest.raises(SIGTERMException):
            fit(tmp_path, None, callbacks=[Look()])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert found == [[mine]], CHANGED + "_SignalConnector._sigterm_notifier_fn or _HandlersCompose"


def test_the_loops_tell_where_a_validation_stands(tmp_path: Path) -> None:
    between: list[bool] = []
    ends: list[bool] = []

    class Look(Callback):
        def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
            between.append(_lightning.is_between_batches(trainer))

        def on_validation_batch_end(self, trainer: Trainer, *args: Any) -> None:
            ends.append(_lightning.validation_ends(trainer))
            between.append(_lightning.is_between_batches(trainer))

    fit(tmp_path, None, callbacks=[Look()], validate=True, val_check_interval=5, max_epochs=1)
    assert ends == [False, False, True] * 2, CHANGED + "val_loop.batch_progress"
    assert between == [False] * 5 + [True] * 3 + [False] * 8, CHANGED + "epoch_loop.batch_progress"
