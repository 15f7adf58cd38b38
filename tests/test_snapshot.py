"""The image is what a file saved at the same moment holds, whatever happens to the state afterwards."""

from __future__ import annotations

import gc
import io
import mmap
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lightning_ckpt_policy import _torch, snapshot
from lightning_ckpt_policy.errors import CheckpointSaveError
from lightning_ckpt_policy.snapshot import CHUNK_BYTES, DEFER_BYTES, Image, Staging, still_storages, take_snapshot

MANY = DEFER_BYTES  # numbers, of four bytes each


class Tagged(torch.Tensor):
    pass


class Custom:
    def __init__(self) -> None:
        self.tensor = torch.ones(3)
        self.numbers = [1, 2]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom) and torch.equal(self.tensor, other.tensor) and self.numbers == other.numbers


def load(image: Any) -> Any:
    return torch.load(io.BytesIO(b"".join(image.chunks())), weights_only=False)


def direct(state: Any) -> bytes:
    """What ``torch.save`` writes."""
    file = io.BytesIO()
    with _torch.without_crc32():
        torch.save(state, file)
    return file.getvalue()


def content(image: Image) -> bytes:
    return b"".join(image.chunks())


def defer(state: dict[str, torch.Tensor], staging: Staging | None = None) -> Image:
    return take_snapshot(state, staging, still_storages(state.items()))


def tensor_in_place() -> tuple[Any, Callable[[], Any]]:
    value = torch.zeros(5)
    return value, lambda: value.fill_(1)


def tensor_data() -> tuple[Any, Callable[[], Any]]:
    value = torch.nn.Parameter(torch.zeros(5))
    return value, lambda: value.data.fill_(1)


def view() -> tuple[Any, Callable[[], Any]]:
    base = torch.zeros(6)
    return base[1:4], lambda: base.fill_(1)


def non_contiguous() -> tuple[Any, Callable[[], Any]]:
    base = torch.arange(6.0).reshape(2, 3)
    return base.t(), lambda: base.fill_(1)


def array() -> tuple[Any, Callable[[], Any]]:
    value = np.zeros(3)
    return value, lambda: value.fill(1)


def aliased_array() -> tuple[Any, Callable[[], Any]]:
    value = np.zeros(3)
    return torch.from_numpy(value), lambda: value.fill(1)


def a_set() -> tuple[Any, Callable[[], Any]]:
    value = {1, 2}
    return value, lambda: value.add(3)


def nested() -> tuple[Any, Callable[[], Any]]:
    value: Any = OrderedDict(a=[deque([torch.zeros(2)])], b={"c": (1, None)})
    return value, lambda: value["a"].append(1)


def custom() -> tuple[Any, Callable[[], Any]]:
    value = Custom()
    return value, lambda: (value.tensor.fill_(9), value.numbers.append(3))


def bfloat() -> tuple[Any, Callable[[], Any]]:
    value = torch.zeros(3, dtype=torch.bfloat16)
    return value, lambda: value.fill_(1)


def scalar_and_empty() -> tuple[Any, Callable[[], Any]]:
    value = [torch.tensor(3), torch.empty(0)]
    return value, lambda: value[0].fill_(1)


def sparse() -> tuple[Any, Callable[[], Any]]:
    value = torch.eye(3).to_sparse()
    return value, lambda: value.mul_(2)


@pytest.mark.parametrize(
    "make",
    [
        tensor_in_place,
        tensor_data,
        view,
        non_contiguous,
        array,
        aliased_array,
        a_set,
        nested,
        custom,
        bfloat,
        scalar_and_empty,
        sparse,
    ],
)
def test_a_later_change_does_not_reach_the_image(make: Callable[[], tuple[Any, Callable[[], Any]]]) -> None:
    value, change = make()
    expected = direct({"value": value})
    image = take_snapshot({"value": value})
    change()
    assert content(image) == expected
    load(image)


def test_case_12_tied_weights_stay_tied_and_are_stored_once() -> None:
    weight = torch.nn.Parameter(torch.randn(1000, 100))
    image = take_snapshot({"a": weight, "b": weight, "row": weight[3]})
    assert weight.nbytes < image.size < 1.1 * weight.nbytes
    loaded = load(image)
    assert loaded["a"].data_ptr() == loaded["b"].data_ptr()
    assert all(tensor.device.type == "cpu" for tensor in loaded.values())


def test_large_states_are_cut_in_chunks() -> None:
    image = take_snapshot({"a": torch.randn(3 * CHUNK_BYTES // 4 + 5)})
    sizes = [chunk.nbytes for chunk in image.chunks()]
    assert sum(sizes) == image.size
    assert set(sizes[:-1]) == {CHUNK_BYTES}
    assert 0 < sizes[-1] <= CHUNK_BYTES


def test_a_released_image_ends_a_writer_that_still_reads_it() -> None:
    image = take_snapshot({"a": torch.randn(3 * CHUNK_BYTES // 4)})
    chunks = image.chunks()
    next(chunks)
    image.release()
    with pytest.raises(RuntimeError, match="given up"):
        next(chunks)


def test_what_cannot_be_pickled_is_an_error_at_once() -> None:
    state = {"weight": torch.zeros(3), "mine": [lambda: None], "lock": threading.Lock()}
    with pytest.raises(CheckpointSaveError, match=r"under 'mine', 'lock' in the checkpoint can't be pickled \("):
        take_snapshot(state)


# copied later


def large() -> dict[str, torch.Tensor]:
    flat = torch.randn(3 * MANY)
    return {
        "weight": torch.nn.Parameter(torch.randn(MANY)),
        "half": torch.randn(5, MANY).to(torch.bfloat16),
        "complex": torch.randn(MANY, dtype=torch.complex64),
        "one": flat[:MANY],
        "other": flat[MANY:],
        "turned": torch.randn(MANY, 3).t(),
        "several chunks": torch.randn(5 * CHUNK_BYTES // 8),
        "small": torch.randn(3),
    }


@pytest.mark.parametrize("in_background", [True, False])
def test_what_stays_still_is_copied_later(in_background: bool) -> None:
    state = large()
    expected = direct(state)
    staging = Staging()
    image = defer(state, staging)
    deferred = sum(size for name, size in sizes(state).items() if name != "small")
    assert image.deferred == deferred
    assert not image.copied
    assert content(image) != expected
    if in_background:
        image.start()
    image.complete()
    assert image.copied
    assert image.changed is None
    assert content(image) == expected
    image.release()
    # the memory still holds those bytes: the next image must not show them
    other = {name: tensor.detach() + 1 for name, tensor in state.items()}
    again = defer(other, staging)
    again.complete()
    assert content(again) == direct(other)


def sizes(state: dict[str, torch.Tensor]) -> dict[str, int]:
    """Bytes of each storage, under the name that comes first."""
    found: dict[int, tuple[str, int]] = {}
    for name, tensor in state.items():
        storage = tensor.untyped_storage()
        found.setdefault(storage.data_ptr(), (name, storage.nbytes()))
    return dict(found.values())


def in_place(tensor: torch.Tensor) -> None:
    tensor.add_(1)


def unseen(tensor: torch.Tensor) -> None:
    tensor.data.add_(1)


def half_of_a_buffer() -> torch.Tensor:
    return torch.zeros(2, MANY)[0]


def every_other() -> torch.Tensor:
    return torch.zeros(2 * MANY)[::2]


def through_numpy(tensor: torch.Tensor) -> None:
    tensor.numpy()[:] += 1


def resized(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)


@pytest.mark.parametrize("name", ["half", "other", "several chunks"])
@pytest.mark.parametrize(
    ("change", "seen"), [(in_place, True), (unseen, False), (through_numpy, False), (resized, True)]
)
def test_a_change_before_the_copy_is_found(change: Callable[[torch.Tensor], None], seen: bool, name: str) -> None:
    state = large()
    tensor = state[name]
    if change is through_numpy and tensor.dtype == torch.bfloat16:
        tensor = state["turned"]
        name = "turned"
    image = defer(state)
    fingerprints = image.fingerprints()
    change(tensor)
    image.complete()
    # a view's name is that of the first one on its memory
    name = "one" if name == "other" else name
    assert image.changed == (name if seen else None)
    assert image.differs(fingerprints) == name


@pytest.mark.parametrize("change", [unseen, through_numpy])
def test_a_change_after_the_copy_is_found_too(change: Callable[[torch.Tensor], None]) -> None:
    """That the copy was quick is chance; the next one may not be."""
    state = large()
    image = defer(state)
    fingerprints = image.fingerprints()
    image.complete()
    change(state["turned"])
    assert image.differs(fingerprints) == "turned"


def test_no_change_is_no_difference() -> None:
    image = defer(large())
    fingerprints = image.fingerprints()
    image.start()
    image.complete()
    assert image.changed is None
    assert image.differs(fingerprints) is None


def test_a_storage_that_is_replaced_is_copied_as_it_was() -> None:
    weight = torch.nn.Parameter(torch.randn(MANY))
    expected = direct({"weight": weight})
    image = defer({"weight": weight})
    weight.data = torch.zeros(MANY)
    image.complete()
    assert content(image) == expected


def shared() -> torch.Tensor:
    return torch.zeros(MANY).share_memory_()


def subclass() -> torch.Tensor:
    return torch.zeros(MANY).as_subclass(Tagged)


def inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(MANY)


@pytest.mark.parametrize(
    "make",
    [
        shared,
        subclass,
        inference,
        lambda: torch.eye(200).to_sparse(),
        lambda: torch.eye(200).to_sparse_csr(),
        lambda: torch.quantize_per_tensor(torch.zeros(4 * MANY), 0.1, 0, torch.qint8),
        lambda: torch.zeros(MANY, device="meta"),
        lambda: torch.zeros(0),
        half_of_a_buffer,
        every_other,
        lambda: torch.tensor(1.0),
        lambda: torch.zeros(DEFER_BYTES // 4 - 1),
    ],
)
def test_what_may_change_or_is_small_is_copied_at_once(make: Callable[[], torch.Tensor]) -> None:
    assert still_storages([("tensor", make())]) == {}


def test_tensors_that_share_a_storage_out_among_them_may_be_copied_later() -> None:
    flat = torch.zeros(3, MANY)
    parts = [("a", flat[0]), ("b", flat[1:].t()), ("c", flat[0, :3])]
    assert [one.name for one in still_storages(parts).values()] == ["a"]
    assert still_storages(parts[::2]) == {}


def test_versions_are_those_of_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a hook changes while a checkpoint is put together is in it."""
    weight = torch.zeros(MANY)
    still = still_storages([("weight", weight)])
    weight.add_(1)
    image = take_snapshot({"weight": weight}, None, still)
    image.complete()
    assert image.changed is None
    assert content(image) == direct({"weight": weight})


def test_without_a_thread_it_is_copied_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", start)
    state = large()
    image = defer(state)
    image.start()
    image.complete()
    assert content(image) == direct(state)


def test_what_could_not_be_copied_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    image = defer(large())
    monkeypatch.setattr(snapshot, "_copy", lambda *_: 1 / 0)
    image.complete()
    assert image.changed == "several chunks"


# from a device


def plain() -> dict[str, Any]:
    weight = torch.nn.Parameter(torch.randn(MANY))
    return {
        **large(),
        "tied": [weight, weight],
        "view": weight[3:7],
        "empty": torch.empty(0),
        "no dimension": torch.tensor(3),
        "others": [1, {2}, np.arange(3), Custom()],
        "chunks": torch.randn(3 * CHUNK_BYTES // 4),
    }


@pytest.mark.parametrize("deferred", [True, False])
def test_storages_are_handed_over_by_themselves(deferred: bool) -> None:
    """As it is done with a device's, here with the host's."""
    state = plain()
    image = Image(Staging())
    tensors = [(name, tensor) for name, tensor in state.items() if isinstance(tensor, torch.Tensor)]
    with _torch.without_crc32():
        snapshot._save_from_device(state, image, still_storages(tensors) if deferred else {})
    assert bool(image.deferred) == deferred
    image.complete()
    assert content(image) == direct(state)


@pytest.mark.parametrize(
    "odd",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.quantize_per_tensor(torch.zeros(4), 0.1, 0, torch.qint8),
        lambda: torch.zeros(3).untyped_storage(),
        lambda: torch.zeros(3).as_subclass(type("Tagged", (torch.Tensor,), {})),
    ],
)
def test_what_cannot_be_handed_over_is_saved_as_usual(odd: Callable[[], Any], caplog: pytest.LogCaptureFixture) -> None:
    state = {**plain(), "odd": odd()}
    if isinstance(state["odd"], torch.Tensor) and type(state["odd"]) is not torch.Tensor:
        state["odd"] = torch.zeros(3).as_subclass(Tagged)
    image = Image(Staging())
    with _torch.without_crc32():
        snapshot._save_from_device(state, image, still_storages([("weight", state["half"])]))
    assert image.copied
    assert image.deferred == 0
    assert content(image) == direct(state)
    assert "all state is copied before training goes on" in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_device_is_copied_while_it_goes_on() -> None:
    state = {name: torch.nn.Parameter(value.detach().cuda()) for name, value in large().items()}
    expected = torch.load(io.BytesIO(direct(state)))
    staging = Staging(pinned=True)
    for _ in range(3):
        image = take_snapshot(state, staging, still_storages(state.items()))
        assert image.deferred
        fingerprints = image.fingerprints()
        image.start()
        image.complete()
        kept = {name: tensor.detach().clone() for name, tensor in state.items()}
        for tensor in state.values():
            tensor.data.zero_()  # queued behind the copy
        assert image.differs(fingerprints) is None
        loaded = load(image)
        assert all(torch.equal(loaded[name], expected[name]) for name in state)
        image.release()
        for name, tensor in state.items():
            tensor.data.copy_(kept[name])


# the memory


def addresses(image: Image) -> set[int]:
    return {np.frombuffer(chunk, np.uint8).ctypes.data for chunk in image.chunks()}


def test_memory_is_used_again() -> None:
    staging = Staging()
    first = take_snapshot(large(), staging)
    used, size = addresses(first), staging.size
    first.release()
    for _ in range(3):
        image = take_snapshot(large(), staging)
        assert addresses(image) == used
        image.release()
    assert staging.size == size
    del image, first
    staging.clear()
    assert staging.size == 0


def test_memory_given_back_after_the_end_is_let_go_of() -> None:
    staging = Staging()
    image = take_snapshot(large(), staging)
    staging.clear()
    image.release()
    del image
    assert staging.size == 0
    again = take_snapshot(large(), staging)
    again.release()
    assert staging.size > 0


def test_memory_of_an_image_that_was_lost_is_not_counted() -> None:
    staging = Staging()
    image = take_snapshot(large(), staging)
    assert staging.size
    del image
    assert staging.size == 0


def test_memory_that_may_be_read_by_a_writer_that_hangs_is_not_used_again() -> None:
    staging = Staging()
    image = take_snapshot(large(), staging)
    chunks = image.chunks()
    held = next(chunks)
    before = bytes(held)
    image.release(in_use=True)
    image.release()  # the writer's own, once it ends
    assert staging.size == CHUNK_BYTES  # that one is in the writer's hands
    other = take_snapshot(large(), staging)
    assert bytes(held) == before
    with pytest.raises(RuntimeError, match="given up"):
        next(chunks)
    assert other.size


def test_reserved_memory_is_what_the_first_image_uses() -> None:
    staging = Staging()
    thread = staging.reserve(3 * CHUNK_BYTES - 1)
    assert thread is not None
    thread.join()
    assert staging.size == 3 * CHUNK_BYTES
    image = take_snapshot({"a": torch.randn(5 * CHUNK_BYTES // 8)}, staging)
    assert len(addresses(image)) == 3
    assert staging.size == 3 * CHUNK_BYTES
    assert staging.reserve(3 * CHUNK_BYTES) is None
    assert staging.size == 3 * CHUNK_BYTES


def test_nothing_is_reserved_after_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    staging = Staging()
    monkeypatch.setattr("threading.Thread.start", lambda thread: None)  # it comes late
    thread = staging.reserve(3 * CHUNK_BYTES)
    assert thread is not None
    staging.clear()
    thread.run()
    assert staging.size == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine can page-lock memory")
def test_memory_that_cannot_be_page_locked_is_used_all_the_same() -> None:
    state = large()
    assert content(take_snapshot(state, Staging(pinned=True))) == direct(state)


def test_chunks_begin_at_a_page() -> None:
    image = take_snapshot(large())
    assert all(address % 4096 == 0 for address in addresses(image))


def test_an_error_gives_the_memory_back() -> None:
    staging = Staging()
    with pytest.raises(CheckpointSaveError, match="under 'b'"):
        take_snapshot({"a": torch.randn(MANY), "b": lambda: None}, staging)
    free = take_snapshot(large(), staging)
    assert staging.size == len(addresses(free)) * CHUNK_BYTES


def test_a_forked_child_has_memory_of_its_own() -> None:
    """And frees none of its parent's, in whose place there may be something else."""
    staging = Staging()
    image = take_snapshot(large(), staging)
    image.release()
    child = os.fork()
    if child == 0:
        if hasattr(mmap, "MADV_DONTFORK"):
            own = [mmap.mmap(-1, CHUNK_BYTES) for _ in range(40)]
            del image
            staging.clear()
            gc.collect()
            for memory in own:
                memory[:] = b"1" * CHUNK_BYTES
        state = {"a": torch.ones(3)}  # few: torch's own threads don't survive a fork
        os._exit(0 if content(take_snapshot(state, staging)) == direct(state) else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("before", [True, False])
def test_the_setting_of_torch_is_put_back(before: bool) -> None:
    torch.serialization.set_crc32_options(before)
    try:
        take_snapshot({"a": 1})
        assert torch.serialization.get_crc32_options() == before
    finally:
        torch.serialization.set_crc32_options(True)
