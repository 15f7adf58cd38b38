"""What all tests have in common."""

from __future__ import annotations

import pytest

from lightning_ckpt_policy import snapshot
from tests.models import drain_each_save


@pytest.fixture(autouse=True)
def small_tensors_are_deferred(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The models of these tests are tiny: let their state be copied in the background all the same."""
    if request.module.__name__ != "tests.test_snapshot":
        monkeypatch.setattr(snapshot, "DEFER_BYTES", 1)


@pytest.fixture
def drained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each save is confirmed before training goes on, so that no trigger waits for one on its way."""
    drain_each_save(monkeypatch)
