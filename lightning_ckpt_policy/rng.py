"""The state of every random number generator, in a form that ``torch.load(weights_only=True)`` reads."""

from __future__ import annotations

import random
from typing import Any

import torch

try:
    import numpy
except ImportError:  # torch runs without it
    numpy = None  # type: ignore[assignment]


def collect_rng_state() -> dict[str, Any]:
    """Python's, NumPy's (the legacy global one) and torch's generators of this process, on every device.

    Returns:
        Tensors, numbers, strings and tuples only.

    >>> state = collect_rng_state()
    >>> drawn = random.random(), torch.rand(1).item()
    >>> restore_rng_state(state)
    >>> (random.random(), torch.rand(1).item()) == drawn
    True
    """
    version, words, gauss = random.getstate()
    # a tensor, since to pickle hundreds of numbers takes long
    state: dict[str, Any] = {"python": (version, torch.tensor(words), gauss), "torch": torch.get_rng_state()}
    if numpy is not None:
        name, key, position, has_gauss, cached = numpy.random.get_state(legacy=True)
        assert not isinstance(key, str)
        state["numpy"] = (str(name), torch.tensor(key.astype("int64")), int(position), int(has_gauss), float(cached))
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


def restore_rng_state(state: dict[str, Any]) -> None:
    """Set the generators to what :func:`collect_rng_state` returned; those absent from ``state`` are left alone."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(torch.as_tensor(words).tolist()), gauss))
    torch.set_rng_state(state["torch"].cpu())
    if numpy is not None and "numpy" in state:
        name, key, position, has_gauss, gauss = state["numpy"]
        numpy.random.set_state((name, key.cpu().numpy().astype("uint32"), position, has_gauss, gauss))
    if "cuda" in state and torch.cuda.is_available():
        for device, device_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(device_state.cpu(), device)
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"].cpu())
