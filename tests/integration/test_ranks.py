"""Two ranks (DDP, gloo, CPU): they decide alike, rank 0 writes, every rank resumes exactly, nobody hangs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from lightning_ckpt_policy import CheckpointStore
from tests.integration.helpers import final, run
from tests.models import differences

pytestmark = pytest.mark.timeout(240)
TWO = ("--devices", "2")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a run without saves, with a kind of loader."""

    @cache
    def folder(loader: str) -> Path:
        root = tmp_path_factory.mktemp(loader)
        run(root, *TWO, "--no-policy", "--loader", loader)
        return root

    return folder


@pytest.mark.parametrize(
    ("trigger", "loader"),
    [
        ("EveryNTrainSteps(4)", "stateful"),
        ("EveryInterval(seconds=0.05)", "stateful"),
        ("EveryNEpochs(1)", "stateful"),
        ("EveryNEpochs(1)", "plain"),
    ],
)
def test_save_and_resume_exactly(tmp_path: Path, undisturbed: Callable[[str], Path], trigger: str, loader: str) -> None:
    options = (*TWO, "--trigger", trigger, "--loader", loader)
    run(tmp_path, *options, "--crash-at", "17", "--crash-how", "kill", expect=None)
    killed_at = CheckpointStore(str(tmp_path / "ckpt")).latest()
    assert killed_at is not None
    assert 0 < killed_at.step <= 17
    assert killed_at.world_size == 2
    run(tmp_path, *options)
    for rank in (0, 1):
        expected, resumed = final(undisturbed(loader), rank), final(tmp_path, rank)
        assert resumed["batches"] == expected["batches"][killed_at.step :]
        assert differences({**expected, "batches": 0}, {**resumed, "batches": 0}) == []
    newest = CheckpointStore(str(tmp_path / "ckpt")).latest()
    assert newest is not None
    assert newest.step == 30
    assert newest.run_id == killed_at.run_id


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_rank_stops_all_of_them(tmp_path: Path, undisturbed: Callable[[str], Path], rank: int) -> None:
    trigger = ("--trigger", "AtSteps([1000]) | OnSignal('SIGTERM', stop=True)")
    sent = ("--crash-at", "13", "--crash-how", "sigterm", "--crash-rank", str(rank))
    run(tmp_path, *TWO, *trigger, *sent)
    store = CheckpointStore(str(tmp_path / "ckpt"))
    (record,) = store.records()
    store.verify(record)
    assert (record.step, record.world_size) == (14, 2)
    assert [attempt.status for attempt in store.attempts()] == ["stopped"]
    run(tmp_path, *TWO, *trigger)
    for each in (0, 1):
        expected, resumed = final(undisturbed("stateful"), each), final(tmp_path, each)
        assert differences({**expected, "batches": 0}, {**resumed, "batches": 0}) == []


def test_saving_changes_nothing(tmp_path: Path, undisturbed: Callable[[str], Path]) -> None:
    run(tmp_path, *TWO, "--trigger", "EveryNTrainSteps(1)")
    for rank in (0, 1):
        assert differences(final(undisturbed("stateful"), rank), final(tmp_path, rank)) == []


@pytest.mark.parametrize("rank", ["0", "1"])
def test_an_error_on_one_rank_ends_the_run(tmp_path: Path, rank: str) -> None:
    output = run(tmp_path, *TWO, "--drain", "--crash-at", "9", "--crash-rank", rank, expect=None, timeout=100)
    store = CheckpointStore(str(tmp_path / "ckpt"))
    newest = store.latest()
    assert newest is not None, output
    assert newest.step == 8
    store.verify(newest)


def test_ranks_agree_that_a_copy_is_no_good(tmp_path: Path) -> None:
    output = run(tmp_path, *TWO, "--trigger", "AtSteps([4, 20])", "--retention", "KeepAll()", "--meddle-at", "4")
    assert output.count("was changed between the save point of step 4") == 1
    assert [record.step for record in CheckpointStore(str(tmp_path / "ckpt")).records()] == [5, 20, 30]


def test_no_rank_waits_in_a_collective_for_a_slow_store(tmp_path: Path) -> None:
    options = ("--epochs", "1", "--write-seconds", "14", "--group-timeout", "9", "--trigger", "EveryNEpochs(1)")
    run(tmp_path, *TWO, *options)
    newest = CheckpointStore(str(tmp_path / "ckpt")).latest()
    assert newest is not None
    assert newest.step == 10


def test_a_store_that_fails_ends_all_ranks_together(tmp_path: Path) -> None:
    output = run(tmp_path, *TWO, "--fail-writes", "--trigger", "EveryNTrainSteps(1)", expect=1)
    assert "3 saves in a row failed" in output
    assert "rank 0: CheckpointSaveError" in output
