"""``AsyncCheckpointIO`` by itself, under stock ``ModelCheckpoint`` and without a Trainer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_ckpt_policy import AsyncCheckpointIO, CheckpointSaveError
from lightning_ckpt_policy.backends import LocalBackend
from tests.models import fit

pytestmark = pytest.mark.core


@pytest.fixture
def act(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[int, str], None]]:
    """Put one function in the list: it is called with the number and the name of each payload write before it."""
    acts: list[Callable[[int, str], None]] = []
    calls: list[str] = []
    original = LocalBackend.write_payload

    def write(backend: LocalBackend, name: str, *args: Any, **options: Any) -> None:
        calls.append(name)
        for one in acts:
            one(len(calls), name)
        original(backend, name, *args, **options)

    monkeypatch.setattr(LocalBackend, "write_payload", write)
    return acts


def refuse(call: int, name: str) -> None:
    raise PermissionError("no")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_under_model_checkpoint(tmp_path: Path) -> None:
    stock = ModelCheckpoint(
        tmp_path / "ckpt", every_n_train_steps=4, save_top_k=2, monitor="train_loss", save_last=True
    )
    fit(tmp_path, None, callbacks=[stock], enable_checkpointing=True, plugins=[AsyncCheckpointIO()])
    assert set(names(tmp_path / "ckpt")) == {*(Path(p).name for p in stock.best_k_models), "last.ckpt"}
    last = torch.load(tmp_path / "ckpt" / "last.ckpt")["global_step"]
    observer = fit(
        tmp_path,
        None,
        callbacks=[ModelCheckpoint(tmp_path / "ckpt", save_last=True, every_n_train_steps=4)],
        enable_checkpointing=True,
        plugins=[AsyncCheckpointIO()],
        ckpt_path="last",
        max_epochs=4,
    )
    assert observer.batches[0][0] == last


def test_nothing_is_removed_before_what_replaces_it_is_written(
    tmp_path: Path, act: list[Callable[[int, str], None]]
) -> None:
    gate = threading.Event()
    seen: list[list[str]] = []
    act.append(lambda call, name: gate.wait(30) and None if call == 2 else None)  # type: ignore[func-returns-value]

    class Look(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            if trainer.global_step == 9:
                seen.append(names(tmp_path / "ckpt"))
                gate.set()

    stock = ModelCheckpoint(tmp_path / "ckpt", every_n_train_steps=4, save_top_k=1, filename="{step}")
    fit(
        tmp_path,
        None,
        callbacks=[Look(), stock],
        enable_checkpointing=True,
        plugins=[AsyncCheckpointIO()],
        max_steps=10,
    )
    assert seen == [["step=4.ckpt"]]
    assert names(tmp_path / "ckpt") == ["step=8.ckpt"]


def test_a_removal_behind_a_failed_write_is_not_done(tmp_path: Path, act: list[Callable[[int, str], None]]) -> None:
    act.append(lambda call, name: refuse(call, name) if call > 1 else None)
    stock = ModelCheckpoint(tmp_path / "ckpt", every_n_train_steps=4, save_top_k=1, filename="{step}")
    with (
        pytest.warns(UserWarning, match=r"step=4.ckpt' was kept, since .*step=8.ckpt' could not be written"),
        pytest.raises(CheckpointSaveError, match=r"last checkpoint, .*step=8.ckpt', could not be written.*no"),
    ):
        fit(
            tmp_path,
            None,
            callbacks=[stock],
            enable_checkpointing=True,
            plugins=[AsyncCheckpointIO()],
            max_steps=10,
        )
    assert names(tmp_path / "ckpt") == ["step=4.ckpt"]


def test_a_failed_write_does_not_end_the_run_and_is_not_raised_by_the_next_one(
    tmp_path: Path, act: list[Callable[[int, str], None]]
) -> None:
    act.append(lambda call, name: refuse(call, name) if call == 1 else None)
    io = AsyncCheckpointIO()
    stock = ModelCheckpoint(tmp_path / "ckpt", every_n_train_steps=4, save_top_k=-1, filename="{step}")
    with pytest.warns(UserWarning, match="step=4.ckpt' could not be written"):
        fit(tmp_path, None, callbacks=[stock], enable_checkpointing=True, plugins=[io], max_steps=10)
    assert names(tmp_path / "ckpt") == ["step=8.ckpt"]
    io.teardown()


def test_a_training_error_is_not_masked(tmp_path: Path, act: list[Callable[[int, str], None]]) -> None:
    act.append(refuse)
    stock = ModelCheckpoint(tmp_path / "ckpt", every_n_train_steps=4, save_top_k=-1)
    with pytest.warns(UserWarning, match="could not be written"):
        fit(tmp_path, None, callbacks=[stock], enable_checkpointing=True, plugins=[AsyncCheckpointIO()], crash_at=5)


def test_a_load_waits_for_the_write(tmp_path: Path, act: list[Callable[[int, str], None]]) -> None:
    act.append(lambda call, name: time.sleep(0.3))
    io = AsyncCheckpointIO()
    weight = torch.zeros(3)
    io.save_checkpoint({"weight": weight}, tmp_path / "a.ckpt")
    weight.fill_(1)
    assert io.load_checkpoint(tmp_path / "a.ckpt")["weight"].tolist() == [0, 0, 0]
    io.teardown()


def test_one_save_is_in_flight_at_most(tmp_path: Path, act: list[Callable[[int, str], None]]) -> None:
    gate = threading.Event()
    act.append(lambda call, name: gate.wait(30) and None)  # type: ignore[func-returns-value]
    io = AsyncCheckpointIO()
    io.save_checkpoint({"a": 1}, tmp_path / "a.ckpt")
    returned = threading.Event()

    def second() -> None:
        io.save_checkpoint({"a": 2}, tmp_path / "b.ckpt")
        returned.set()

    thread = threading.Thread(target=second)
    thread.start()
    assert not returned.wait(0.2)
    gate.set()
    thread.join(20)
    io.teardown()
    assert names(tmp_path) == ["a.ckpt", "b.ckpt"]


def test_a_write_that_hangs_is_given_up(tmp_path: Path, act: list[Callable[[int, str], None]]) -> None:
    gate = threading.Event()
    act.append(lambda call, name: gate.wait(60) and None)  # type: ignore[func-returns-value]
    io = AsyncCheckpointIO(save_timeout=0.2)
    io.save_checkpoint({"a": 1}, tmp_path / "a.ckpt")
    with (
        pytest.warns(UserWarning, match=r"save_timeout=0\.2"),
        pytest.raises(CheckpointSaveError, match=r"save_timeout=0\.2"),
    ):
        io.teardown()
    gate.set()
    deadline = time.monotonic() + 20
    while any(thread.name == "ckpt-save" for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not (tmp_path / "a.ckpt").exists()


def test_it_overwrites_as_a_checkpoint_io_does(tmp_path: Path) -> None:
    io = AsyncCheckpointIO()
    for value in (1, 2):
        io.save_checkpoint({"a": value}, str(tmp_path / "deep" / "er" / "a.ckpt"))
    assert io.load_checkpoint(tmp_path / "deep" / "er" / "a.ckpt") == {"a": 2}
    io.remove_checkpoint(tmp_path / "deep" / "er" / "a.ckpt")
    io.remove_checkpoint(tmp_path / "deep" / "er" / "a.ckpt")
    io.teardown()
    assert names(tmp_path / "deep" / "er") == []


def test_memory_and_storage_options(tmp_path: Path) -> None:
    io = AsyncCheckpointIO(storage_options={"skip_instance_cache": True})
    io.save_checkpoint({"a": 1}, "memory://test_io/a.ckpt")
    assert io.load_checkpoint("memory://test_io/a.ckpt") == {"a": 1}
    io.remove_checkpoint("memory://test_io/a.ckpt")
    io.teardown()
    with pytest.raises(FileNotFoundError):
        io.load_checkpoint("memory://test_io/a.ckpt")


@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_bad_timeouts_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="save_timeout"):
        AsyncCheckpointIO(save_timeout=value)


def test_a_write_that_was_given_up_does_not_reach_a_newer_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_ckpt_policy import backends

    gate, hanging = threading.Event(), threading.Event()
    original = backends._write_all

    def write_all(file: Any, data: Any) -> int:
        if not hanging.is_set():
            hanging.set()
            gate.wait(60)
        return original(file, data)

    monkeypatch.setattr(backends, "_write_all", write_all)
    io = AsyncCheckpointIO(save_timeout=0.3)
    path = tmp_path / "last.ckpt"
    io.save_checkpoint({"step": 10, "weight": torch.zeros(5000)}, path)
    with pytest.warns(UserWarning, match="save_timeout"):
        io.save_checkpoint({"step": 20, "weight": torch.ones(5000)}, path)
    io.writer.drain(20)
    good = path.read_bytes()
    gate.set()
    deadline = time.monotonic() + 20
    while any(thread.name == "ckpt-save" for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert path.read_bytes() == good
    assert io.load_checkpoint(path)["step"] == 20
    assert names(tmp_path) == ["last.ckpt"]
    io.teardown()


def test_a_removal_that_hangs_holds_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_ckpt_policy.io.DELETE_TIMEOUT", 0.2)
    gate = threading.Event()
    monkeypatch.setattr(LocalBackend, "delete", lambda *args: gate.wait(60) and None)
    io = AsyncCheckpointIO()
    with pytest.warns(UserWarning, match="could not be removed within"):  # noqa: PT031
        io.remove_checkpoint(tmp_path / "a.ckpt")
        io.save_checkpoint({"a": 1}, tmp_path / "b.ckpt")
        assert io.load_checkpoint(tmp_path / "b.ckpt") == {"a": 1}
        io.teardown()
    gate.set()
