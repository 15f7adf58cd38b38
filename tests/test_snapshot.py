"""The image is what a file saved at the same moment holds, whatever happens to the state afterwards."""

from __future__ import annotations

import io
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lightning_ckpt_policy.snapshot import CHUNK_BYTES, take_snapshot


class Custom:
    def __init__(self) -> None:
        self.tensor = torch.ones(3)
        self.numbers = [1, 2]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom) and torch.equal(self.tensor, other.tensor) and self.numbers == other.numbers


def load(image: Any) -> Any:
    return torch.load(io.BytesIO(b"".join(image.chunks())), weights_only=False)


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
    direct = io.BytesIO()
    torch.save({"value": value}, direct)
    image = take_snapshot({"value": value})
    change()
    assert b"".join(image.chunks()) == direct.getvalue()
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
    with pytest.raises(Exception, match=r"(?i)pickle"):
        take_snapshot({"a": lambda: None})
