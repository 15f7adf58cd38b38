from __future__ import annotations

import io
import random

import numpy as np
import torch

from lightning_ckpt_policy.rng import collect_rng_state, restore_rng_state


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
