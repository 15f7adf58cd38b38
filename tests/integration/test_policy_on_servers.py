"""Whole trainings whose checkpoints lie in an object store, on servers that speak its protocol (cases 16 and 27-31)."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import fsspec
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from lightning_ckpt_policy import (
    CheckpointPolicy,
    CheckpointSaveError,
    CheckpointStore,
    EveryNTrainSteps,
    KeepLast,
    retry,
)
from tests.fault_proxy import Fault, FaultProxy
from tests.models import Net, Rows, fit
from tests.servers import Server
from tests.store_conformance import Folder, files_of
from tests.test_store_faults import FOREVER, OPERATIONS


class Place:
    """A folder on a server, behind a proxy."""

    def __init__(self, server: Server, proxy: FaultProxy) -> None:
        self.server, self.proxy = server, proxy
        self.operations = OPERATIONS[server.name]
        self.options = server.options(proxy.port)
        self.url = self.another()

    def another(self) -> str:
        return f"{self.server.bucket}/{uuid.uuid4().hex}/run"

    def policy(self, url: str | None = None, every: int = 2, keep: int = 9, **options: Any) -> CheckpointPolicy:
        rules = EveryNTrainSteps(every), KeepLast(keep)
        return CheckpointPolicy(
            url or self.url, *rules, save_on_train_end=False, storage_options=self.options, **options
        )

    def steps(self, url: str | None = None) -> list[int]:
        store = CheckpointStore(url or self.url, self.server.options())
        found = store.records()
        for record in found:
            store.verify(record)
        assert self.folder(url).names() == files_of(*found)
        return [record.step for record in found]

    def folder(self, url: str | None = None) -> Folder:
        return Folder(url or self.url, self.server.options())


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "_wait", lambda _: 0.01)


@pytest.fixture(params=OPERATIONS)
def place(request: pytest.FixtureRequest, server_of: Callable[[str], Server]) -> Iterator[Place]:
    server = server_of(request.param)
    with FaultProxy(server.port) as proxy:
        yield Place(server, proxy)


@pytest.mark.usefixtures("drained")
def test_case_29_resume_last_or_a_url(place: Place, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fit(tmp_path, place.policy(), max_steps=4)
    policy = place.policy()
    resumed = fit(tmp_path, policy, ckpt_path="last", max_steps=6)
    assert resumed.batches[0][0] == 4
    newest = policy.last_model_path
    assert newest == f"{place.url}/step-0000000006.ckpt"
    resumed = fit(tmp_path, place.policy(), ckpt_path=newest, max_steps=8)
    assert resumed.batches[0][0] == 6
    assert place.steps() == [2, 4, 6, 8]
    # without a policy there is nobody to say what the options are
    monkeypatch.setitem(fsspec.config.conf, place.server.protocol, place.server.options())
    weights = Net.load_from_checkpoint(f"{place.url}/step-0000000008.ckpt").state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in resumed.final["weights"].items())


@pytest.mark.usefixtures("drained")
def test_case_27_a_run_that_branches_off_leaves_the_first_ones_files_alone(place: Place, tmp_path: Any) -> None:
    policy = place.policy()
    fit(tmp_path, policy, max_steps=4)
    before = place.folder().files()
    branch = place.policy(place.another(), keep=1)
    resumed = fit(tmp_path, branch, ckpt_path=policy.last_model_path, max_steps=8)
    assert resumed.batches[0][0] == 4
    assert place.steps(branch.store.url) == [8]
    assert place.folder().files() == before


@pytest.mark.usefixtures("drained")
def test_case_28_a_delete_that_fails_is_told_and_tried_again(place: Place, tmp_path: Any) -> None:
    place.proxy.faults.append(Fault("status", "DELETE", r"02\.ckpt\.json", code=403, body=place.operations.denied))
    with pytest.warns(UserWarning, match=r"step-0000000002\.ckpt.*could not be deleted.*\(1 failed so far\)"):
        trained = fit(tmp_path, place.policy(keep=1), max_steps=8)
    assert trained.final["step"] == 8
    assert place.steps() == [8]


@pytest.mark.usefixtures("drained")
def test_case_30_a_reset_leaves_one_object(place: Place, tmp_path: Any) -> None:
    faults = [Fault("reset", *place.operations.part), Fault("lost", *place.operations.complete)]
    place.proxy.faults += faults
    fit(tmp_path, place.policy(every=4), max_steps=4)
    assert [fault.met > 0 for fault in faults] == [True, True]
    assert place.steps() == [4]


def test_case_30_a_missing_permission_ends_the_fit_and_is_named(place: Place, tmp_path: Any) -> None:
    denied = place.operations.denied
    place.proxy.faults.append(Fault("status", *place.operations.part, times=FOREVER, code=403, body=denied))
    with (
        pytest.warns(UserWarning, match="not allowed to write"),
        pytest.raises(CheckpointSaveError, match=place.operations.permission),
    ):
        fit(tmp_path, place.policy(max_consecutive_failures=1), max_steps=20)
    place.proxy.faults.clear()
    assert place.steps() == []


class Crash(Exception):
    pass


class Crashing(Callback):
    """Raises right after a save was begun."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 2:
            raise Crash


def test_case_16_a_crash_waits_for_the_save_on_its_way(place: Place, tmp_path: Any) -> None:
    place.proxy.faults.append(Fault("delay", *place.operations.part, seconds=1.0))
    with pytest.raises(Crash):
        fit(tmp_path, place.policy(), callbacks=[Crashing()], max_steps=8)
    assert place.proxy.faults[0].met == 1
    assert place.steps() == [2]


class Looking(Rows):
    """Its workers look into the store themselves."""

    def __init__(self, length: int, store: CheckpointStore) -> None:
        super().__init__(length)
        self.store = store

    def __getitem__(self, index: int) -> torch.Tensor:
        self.store.records()
        return super().__getitem__(index)


@pytest.mark.usefixtures("drained")
def test_case_31_forked_workers_do_not_hang(place: Place, tmp_path: Any) -> None:
    def train() -> Any:
        rows = Looking(24, policy.store)
        return DataLoader(rows, batch_size=4, num_workers=2, multiprocessing_context="fork", timeout=30)

    policy = place.policy()
    fit(tmp_path, policy, train=train, max_steps=2)
    policy = place.policy()
    assert [record.step for record in policy.store.records()] == [2]  # the parent has used its filesystem
    fit(tmp_path, policy, train=train, ckpt_path="last", max_steps=8)
    assert place.steps() == [2, 4, 6, 8]
