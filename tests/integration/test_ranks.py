"""Two ranks (DDP, gloo, CPU): they decide alike, rank 0 writes, every rank resumes exactly, nobody hangs.

Run as ``python -m tests.integration.test_ranks ROOT`` it is a set of fits on two ranks that are not to be used like
that; each rank says what came of each.
"""

from __future__ import annotations

import json
import os
import re
import sys
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy

from lightning_ckpt_policy import CheckpointError, CheckpointPolicy, CheckpointStore, EveryNTrainSteps, callback
from tests.integration.helpers import final, finish, run, start
from tests.models import Net, differences, fit

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


def noted(root: Path, rank: int) -> list[tuple[int, str, str, bool]]:
    """Of each collective of the policy: the step, its name, the hook, whether it ran in the main thread."""
    calls: list[tuple[int, str, str, bool]] = json.loads((root / f"collectives-{rank}.json").read_text())
    return calls


@pytest.mark.parametrize(
    ("trigger", "loader"),
    [
        ("EveryNTrainSteps(4) | (lambda now, since: now.step % 5 == 0)", "stateful"),
        ("EveryInterval(seconds=0.05)", "stateful"),
        ("EveryNEpochs(1)", "stateful"),
        ("EveryNEpochs(1)", "plain"),
    ],
)
def test_save_and_resume_exactly(tmp_path: Path, undisturbed: Callable[[str], Path], trigger: str, loader: str) -> None:
    lying = ("--lying-clock", "0" if loader == "plain" else "1")  # no clock but rank 0's matters, and that may jump
    options = (*TWO, "--trigger", trigger, "--loader", loader, *lying)
    run(tmp_path, *options, "--drain", "--crash-at", "17", "--crash-how", "kill", expect=None)
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


def test_a_signal_to_one_rank_stops_all_of_them(tmp_path: Path, undisturbed: Callable[[str], Path]) -> None:
    trigger = ("--trigger", "AtSteps([1000]) | OnSignal('SIGTERM', stop=True)")
    sent = ("--crash-at", "13", "--crash-how", "sigterm", "--crash-rank", "1")
    run(tmp_path, *TWO, *trigger, *sent)
    store = CheckpointStore(str(tmp_path / "ckpt"))
    (record,) = store.records()
    store.verify(record)
    assert 14 <= record.step <= 20  # at the end of an epoch at the latest, since that validates
    assert record.world_size == 2
    assert [attempt.status for attempt in store.attempts()] == ["stopped"]
    run(tmp_path, *TWO, *trigger)
    for each in (0, 1):
        expected, resumed = final(undisturbed("stateful"), each), final(tmp_path, each)
        assert differences({**expected, "batches": 0}, {**resumed, "batches": 0}) == []


def test_case_09_a_signal_to_the_whole_process_group_with_workers(
    tmp_path: Path, undisturbed: Callable[[str], Path]
) -> None:
    options = (*TWO, "--trigger", "AtSteps([1000]) | OnSignal('SIGTERM', stop=True)", "--workers", "2")
    output = run(tmp_path, *options, "--crash-at", "13", "--crash-how", "sigterm to all", "--crash-rank", "1")
    assert "DataLoader worker" not in output
    store = CheckpointStore(str(tmp_path / "ckpt"))
    (record,) = store.records()
    store.verify(record)
    assert [attempt.status for attempt in store.attempts()] == ["stopped"]
    run(tmp_path, *options)
    for each in (0, 1):
        expected, resumed = final(undisturbed("stateful"), each), final(tmp_path, each)
        assert differences({**expected, "batches": 0}, {**resumed, "batches": 0}) == []


@pytest.mark.parametrize(
    ("devices", "where", "at", "saved"),
    [
        ("2", "validation", "9", (10, "validation_batch_end")),
        ("2", "validation", "0", (1, "batch_end")),  # in the sanity check
        ("4", "training", "9", (10, "validation_batch_end")),  # the first of a fit is heard after the first batch
    ],
    ids=["in a validation", "in the sanity check", "to all of four"],
)
def test_signals_save_once_and_leave_no_handler(
    tmp_path: Path, devices: str, where: str, at: str, saved: tuple[int, str]
) -> None:
    trigger = ("--trigger", "AtSteps([1000]) | OnSignal('SIGTERM', stop=True)")
    to = ("--crash-rank", "1") if devices == "2" else ()
    sent = ("--crash-at", at, "--crash-how", "sigterm", "--crash-where", where, *to)
    output = run(tmp_path, "--devices", devices, "--sanity-check", *trigger, *sent)
    store = CheckpointStore(str(tmp_path / "ckpt"))
    (record,) = store.records()
    store.verify(record)
    assert record.world_size == int(devices)
    assert (record.step, record.point) == saved
    assert [attempt.status for attempt in store.attempts()] == ["stopped"]
    assert [f"HANDLER {rank} True" in output for rank in range(int(devices))] == [True] * int(devices), output


def test_what_a_handler_of_one_rank_raises_ends_all_once_the_state_is_saved(tmp_path: Path) -> None:
    trigger = ("--trigger", "AtSteps([1000]) | OnSignal('SIGUSR1')", "--group-timeout", "30")
    output = run(
        tmp_path, *TWO, *trigger, "--crash-at", "13", "--crash-how", "handler", "--crash-rank", "1", expect=None
    )
    assert "RuntimeError: the launcher's handler" in output
    store = CheckpointStore(str(tmp_path / "ckpt"))
    (record,) = store.records()
    store.verify(record)
    assert 14 <= record.step <= 20


def test_case_17_saves_back_to_back_change_nothing(tmp_path: Path, undisturbed: Callable[[str], Path]) -> None:
    run(tmp_path, *TWO, "--trigger", "EveryNTrainSteps(1)", "--retention", "KeepAll()", "--drain")
    assert [record.step for record in CheckpointStore(str(tmp_path / "ckpt")).records()] == list(range(1, 31))
    for rank in (0, 1):
        assert differences(final(undisturbed("stateful"), rank), final(tmp_path, rank)) == []
        collectives = noted(tmp_path, rank)
        assert collectives
        assert all(in_main_thread for _, _, _, in_main_thread in collectives)


def test_nothing_is_exchanged_where_nothing_is_to_be_agreed(tmp_path: Path) -> None:
    trigger = "EveryInterval(hours=1) | OnImprovement('val_loss') | OnSignal('SIGUSR1')"
    run(tmp_path, *TWO, "--trigger", trigger, "--epochs", "10", "--drain")
    first, second = noted(tmp_path, 0), noted(tmp_path, 1)
    assert first == second
    at_batches = [step for step, _, hook, _ in first if hook == "on_train_batch_end"]
    assert len(at_batches) <= 100 / 32 + 5
    assert len(set(at_batches)) == len(at_batches)  # each of them is a single collective
    assert {hook for _, _, hook, _ in first} <= {
        "on_train_batch_end",
        "on_validation_start",
        "on_validation_batch_end",
        "on_validation_end",
        "on_before_optimizer_step",
        "on_train_end",
    }


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


def test_a_full_disk_of_rank_0_ends_all_ranks_together(tmp_path: Path, undisturbed: Callable[[str], Path]) -> None:
    full = ("--crash-at", "9", "--crash-how", "full", "--crash-rank", "0")
    output = run(tmp_path, *TWO, "--drain", *full, expect=1)
    assert "3 saves in a row failed" in output
    assert "CheckpointSaveError: rank 0: CheckpointSaveError" in output  # of the same kind everywhere
    store = CheckpointStore(str(tmp_path / "ckpt"))
    assert [record.step for record in store.records()] == [4, 8]
    run(tmp_path, *TWO)
    for rank in (0, 1):
        assert (
            differences({**final(undisturbed("stateful"), rank), "batches": 0}, {**final(tmp_path, rank), "batches": 0})
            == []
        )


def test_a_full_disk_of_another_rank_makes_no_difference(tmp_path: Path, undisturbed: Callable[[str], Path]) -> None:
    run(tmp_path, *TWO, "--crash-at", "1", "--crash-how", "full", "--crash-rank", "1")
    newest = CheckpointStore(str(tmp_path / "ckpt")).latest()
    assert newest is not None
    assert newest.step == 30
    for rank in (0, 1):
        assert differences(final(undisturbed("stateful"), rank), final(tmp_path, rank)) == []


def test_a_function_that_answers_differently_on_the_ranks_is_an_error(tmp_path: Path) -> None:
    trigger = ("--trigger", "AtSteps([99]) | (lambda now, since: now.step == 4 + rank)", "--group-timeout", "10")
    output = run(tmp_path, *TWO, *trigger, expect=None)
    told = r"rank 0 is to save at step 4, and rank 1 didn't come to that within"
    assert re.search(f"CheckpointPolicy: by trigger=.* {told} 4.5 s", output)  # a warning
    assert re.search(f"CheckpointError: by trigger=.* {told} 9 s", output)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_a_policy_is_an_error(tmp_path: Path, rank: int) -> None:
    output = run(tmp_path, *TWO, "--policy-rank", str(rank), "--group-timeout", "10", expect=None)
    told = (
        f"at setup rank {rank} is to compare its CheckpointPolicy with that of the others, and rank {1 - rank} didn't"
    )
    assert f"CheckpointPolicy: {told} come to that within 4.5 s" in output  # a warning
    assert re.search(f"CheckpointError: {told} come to that within 9 s.*no CheckpointPolicy", output)


# What isn't to be used like that


class LoadAlone(Callback):
    """Rank 1 alone loads the newest checkpoint in the middle of a fit."""

    def on_train_epoch_end(self, trainer: Trainer, *args: Any) -> None:
        (used,) = (one for one in trainer.callbacks if isinstance(one, CheckpointPolicy))
        if trainer.global_rank == 1:
            trainer.strategy.load_checkpoint(used.last_model_path)


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class Mean(Callback):
    """Notes BatchNorm's running mean where a fit begins and ends."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def note(self, trainer: Trainer, pl_module: Any) -> None:
        with self.file.open("a") as file:
            print(json.dumps(pl_module.body[1].running_mean.tolist()), file=file)

    on_train_start = on_train_end = note


class Odd(Callback):
    """Whose state can't be pickled on rank 1."""

    def setup(self, trainer: Trainer, *args: Any, **options: Any) -> None:
        self.rank = trainer.global_rank

    def rank_state_dict(self) -> Any:
        return {"open": (lambda: 1) if self.rank else 1}

    def load_rank_state_dict(self, state: Any) -> None:
        raise NotImplementedError


def never(number: int, now: Any, since: Any) -> bool:
    return False


def main(root: Path) -> None:
    rank = int(os.environ.get("LOCAL_RANK", 0))

    def attempt(name: str, *used: CheckpointPolicy, **options: Any) -> None:
        outcome = "fine"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                fit(root, list(used), **{"devices": 2, "strategy": "ddp", "max_epochs": 1, **options})
            except (CheckpointError, ValueError) as error:
                outcome = f"{type(error).__name__}: {error}"
        told = [str(warning.message) for warning in caught if "can't see" in str(warning.message)]
        (root / f"{name}-{rank}").write_text("\n".join([outcome, *told]))

    folder, own = root / "ckpt", root / f"own-{rank}"
    unnamed = partial(never, 1)  # its repr holds an address, which differs between processes
    attempt("first", CheckpointPolicy(folder, EveryNTrainSteps(4) | unnamed), callbacks=[LoadAlone()])
    attempt("trigger", CheckpointPolicy(folder, EveryNTrainSteps(4 + rank)))
    attempt("dirpath", CheckpointPolicy(own))
    attempt("number", *(CheckpointPolicy(root / str(number)) for number in range(1 + rank)))
    attempt("options", CheckpointPolicy(folder, storage_options={"key": "hidden", "token": "hidden"} if rank else None))
    attempt("unpicklable", CheckpointPolicy(root / "unpicklable"), callbacks=[Odd()])
    attempt("strategy", CheckpointPolicy(folder), strategy=ModelParallelStrategy())
    mean = Mean(root / f"means-{rank}")
    for epochs in (1, 2):
        attempt(
            "manual",
            CheckpointPolicy(root / "manual"),
            model=Manual,
            callbacks=[mean],
            max_epochs=epochs,
            ckpt_path="last",
        )
    own.mkdir()
    os.chdir(own)
    callback._SHARED_WITHIN = 0.5
    attempt("apart", CheckpointPolicy("/proc/self/cwd/ckpt"))
    attempt("apart_last", CheckpointPolicy("/proc/self/cwd/ckpt"), ckpt_path="last")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("outcomes")
    status, output = finish(start(root, module="tests.integration.test_ranks"))
    assert status == 0, output
    return root


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("first", "fine"),
        (
            "trigger",
            "ValueError: trigger differs between the ranks: EveryNTrainSteps(n=4) on rank 0, EveryNTrainSteps(n=5) on "
            "rank 1. Ranks must decide alike: give each of them the same arguments",
        ),
        (
            "dirpath",
            "ValueError: dirpath differs between the ranks: '{root}/own-0' on rank 0, '{root}/own-1' on rank 1.",
        ),
        ("manual", "fine"),
        ("number", "ValueError: the number of CheckpointPolicy callbacks differs between the ranks: 1 on rank 0, 2 on"),
        ("options", "ValueError: storage_options differs between the ranks: [] on rank 0, ['key', 'token'] on rank 1."),
        ("strategy", "ValueError: strategy=ModelParallelStrategy saves checkpoints in its own way"),
        ("apart", "fine"),
        (
            "apart_last",
            "CheckpointError: dirpath='/proc/self/cwd/ckpt': rank 1 can't see what rank 0 writes there: a resume",
        ),
    ],
)
def test_what_ranks_are_told(outcomes: Path, name: str, told: str) -> None:
    for rank in (0, 1):
        outcome = (outcomes / f"{name}-{rank}").read_text()
        assert outcome.startswith(told.format(root=outcomes)), outcome
        assert "hidden" not in outcome
        assert ("so this can't be resumed" in outcome) == (name == "apart" and rank == 0)


def test_a_state_of_one_rank_that_cannot_be_pickled_is_an_error_on_all(outcomes: Path) -> None:
    told = "CheckpointSaveError: what Odd.rank_state_dict() returns can't be pickled"
    for rank, there in ((0, f"CheckpointError: rank 1: {told}"), (1, told)):
        assert (outcomes / f"unpicklable-{rank}").read_text().startswith(there)


def test_a_resume_gives_all_ranks_the_buffers_of_rank_0(outcomes: Path) -> None:
    """Of a BatchNorm in manual optimization, in which DDP doesn't keep them alike."""
    means = [[json.loads(line) for line in (outcomes / f"means-{rank}").read_text().splitlines()] for rank in (0, 1)]
    (_, ended_0, resumed_0, _), (_, ended_1, resumed_1, _) = means
    assert ended_0 != ended_1
    assert resumed_0 == resumed_1 == ended_0


if __name__ == "__main__":
    main(Path(sys.argv[-1]))
