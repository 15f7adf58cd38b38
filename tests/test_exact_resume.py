"""A run that is interrupted and resumed ends bit for bit like one that never was; or Lightning's limit is asserted."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightning_ckpt_policy import AtSteps, CheckpointPolicy, KeepAll
from tests.models import differences, fit, loader


def interrupted_and_resumed(tmp_path: Path, save_at: int, crash_at: int, **options: Any) -> tuple[Any, Any, Any]:
    """An undisturbed fit, and one that crashed after the save at ``save_at`` and was resumed by new objects."""
    whole = fit(tmp_path, None, **options)

    def policy() -> CheckpointPolicy:
        return CheckpointPolicy(tmp_path / "ckpt", AtSteps([save_at]), KeepAll(), save_on_train_end=False)

    first = fit(tmp_path, policy(), crash_at=crash_at, **options)
    assert [record.step for record in CheckpointPolicy(tmp_path / "ckpt").store.records()] == [save_at]
    second = fit(tmp_path, policy(), ckpt_path="last", **{**options, "seed": 99})
    return whole, first, second


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
    whole, first, second = interrupted_and_resumed(tmp_path, save_at, save_at + 2, **validation, **limit)
    assert second.batches == whole.batches[save_at:]
    assert second.validations == [step for step in whole.validations if step > save_at]
    assert differences(whole.final, second.final) == []


@pytest.mark.core
@pytest.mark.parametrize("validate", [False, True], ids=["no validation", "validation"])
@pytest.mark.parametrize("save_at", [10, 20])
def test_plain_loader_resumes_exactly_at_epoch_ends(tmp_path: Path, save_at: int, validate: bool) -> None:
    whole, first, second = interrupted_and_resumed(
        tmp_path, save_at, save_at + 2, train=partial(loader, "plain"), validate=validate
    )
    assert second.batches == whole.batches[save_at:]
    assert differences(whole.final, second.final) == []
