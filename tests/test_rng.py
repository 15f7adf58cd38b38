from __future__ import annotations

import importlib
import inspect
import io
import random
import sys
import types
from collections.abc import Callable

import numpy as np
import pytest
import torch

from lightning_ckpt_policy.object_stores import _CLIENTS
from lightning_ckpt_policy.rng import collect_rng_state, draw_apart, restore_rng_state
from lightning_ckpt_policy.store import CheckpointStore
from tests.fault_proxy import Fault, FaultProxy
from tests.servers import Server


def draws() -> list[float]:
    return [random.gauss(0, 1), np.random.randn(), np.random.rand(), float(torch.randn(1)), random.random()]


def test_every_generator_goes_on_where_it_was() -> None:
    random.gauss(0, 1), np.random.randn()  # both keep a second draw back
    state = collect_rng_state()
    expected = draws()
    draws()
    restore_rng_state(state)
    assert draws() == expected


def test_state_survives_a_file_read_with_weights_only() -> None:
    np.random.randn()
    file = io.BytesIO()
    torch.save(collect_rng_state(), file)
    expected = draws()
    file.seek(0)
    restore_rng_state(torch.load(file, weights_only=True))
    assert draws() == expected


def test_a_state_without_numpy_leaves_numpy_alone() -> None:
    state = collect_rng_state()
    del state["numpy"]
    np.random.seed(3)
    expected = np.random.rand()
    np.random.seed(3)
    restore_rng_state(state)
    assert np.random.rand() == expected


def test_only_the_named_packages_draw_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    client, other = types.ModuleType("client.part"), types.ModuleType("clientele")
    for module in (client, other):
        module.random = random  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
    draw_apart(["client"])
    before = random.getstate()
    drawn = {client.random.random() for _ in range(9)}  # type: ignore[attr-defined]
    assert len(drawn) == 9
    assert random.getstate() == before
    assert other.random is random  # type: ignore[attr-defined]


def test_no_client_of_an_object_store_draws_from_the_trainings_generator() -> None:
    loaded = ("s3fs", "gcsfs.retry", "adlfs", "azure.core.pipeline.policies", "google.auth._exponential_backoff")
    for name in loaded:
        importlib.import_module(name)
    draw_apart(_CLIENTS)
    held = [
        f"{name}.{attribute}"
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in _CLIENTS
        for attribute, value in list(vars(module).items())
        if value is random or value is random._inst or getattr(value, "__self__", None) is random._inst  # type: ignore[attr-defined]
    ]
    assert held == []
    from botocore.retries import standard

    defaults = inspect.signature(standard.ExponentialBackoff).parameters["random"].default
    assert defaults.__self__ is not random._inst  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["moto", "fake-gcs"])  # azure's client has a generator for each wait
def test_a_store_that_fails_for_a_moment_changes_no_random_numbers(
    server_of: Callable[[str], Server], name: str
) -> None:
    server = server_of(name)
    fault = Fault("status", method="PUT|POST", times=2)
    with FaultProxy(server.port, fault) as proxy:
        store = CheckpointStore(f"{server.bucket}/random", server.options(proxy.port))
        before = random.getstate()
        store.check()
        assert fault.met > 2
        assert random.getstate() == before
