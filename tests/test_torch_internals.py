"""What this package uses of torch that isn't public: each test names what a new version changed."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

from lightning_ckpt_policy import _torch


def test_versions_count_changes() -> None:
    tensor = torch.zeros(3)
    before = _torch.version_of(tensor)
    tensor.add_(1)
    assert _torch.version_of(tensor) == before + 1
    assert _torch.version_of(tensor[1:]) == before + 1  # of the memory, not of the view


def test_hooks_that_step_in_the_backward_pass_are_seen() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    assert not _torch.changes_in_backward(parameter)
    handle = parameter.register_post_accumulate_grad_hook(lambda _: None)
    assert _torch.changes_in_backward(parameter)
    handle.remove()
    assert not _torch.changes_in_backward(parameter)


def test_a_store_tells_what_is_in_it_and_what_is_not() -> None:
    store = torch.distributed.HashStore()
    store.set("there", "")
    assert _torch.is_set_within(store, "there", 9)
    assert not _torch.is_set_within(store, "not there", 0.01)
    assert callable(torch.distributed.distributed_c10d._get_default_store)


class Sink:
    def __init__(self) -> None:
        self.writes: list[Any] = []

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self.writes.append((view.nbytes, bytes(view[:4])))
        return view.nbytes

    def flush(self) -> None:
        pass


@pytest.mark.skipif(not hasattr(torch.serialization, "set_crc32_options"), reason="torch before 2.6 always writes them")
def test_files_without_crc32_can_be_loaded() -> None:
    tensor = torch.randn(1000)
    file = io.BytesIO()
    with _torch.without_crc32():
        torch.save(tensor, file)
    file.seek(0)
    assert torch.equal(torch.load(file), tensor)


def test_a_storage_is_written_in_one_piece() -> None:
    """So that it can be told by its address, and copied later."""
    tensor = torch.ones(5 << 20)
    sink = Sink()
    torch.save(tensor, sink)  # type: ignore[arg-type]
    assert (tensor.nbytes, bytes(tensor[:1].numpy().tobytes())) in sink.writes
