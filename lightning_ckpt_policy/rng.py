"""The state of every random number generator, in a form that ``torch.load(weights_only=True)`` reads.

And what lets other code draw from a generator that isn't the training's.
"""

from __future__ import annotations

import functools
import importlib.util
import random
import sys
import types
from collections.abc import Collection
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


@functools.cache
def _other_random() -> types.ModuleType:
    """A second copy of Python's ``random``, with a generator of its own."""
    spec = importlib.util.find_spec("random")
    assert spec is not None
    assert spec.loader is not None
    other = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(other)
    return other


def draw_apart(packages: Collection[str]) -> None:
    """Let the modules of some packages that are loaded by now draw from another generator than the training does.

    The clients of object stores draw from Python's global one for the waits between their retries, so that a store
    which fails for a moment would change the random numbers of a training.
    """
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in packages and getattr(module, "random", None) is random:
            module.random = _other_random()  # type: ignore[attr-defined]
    backoff: Any = getattr(sys.modules.get("botocore.retries.standard"), "ExponentialBackoff", None)
    if backoff is not None:  # it holds the function itself
        apart = {random.random: _other_random().random}
        backoff.__init__.__defaults__ = tuple(
            apart.get(default, default) for default in backoff.__init__.__defaults__ or ()
        )
