"""State that a callback has on each rank, where Lightning's ``state_dict`` keeps rank 0's alone.

A callback declares it with two methods, ``rank_state_dict()``, called on every rank at each save, and
``load_rank_state_dict(state)``, called when a fit is resumed with what the first one returned on the same rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lightning.pytorch import Callback

from lightning_ckpt_policy.errors import CheckpointSaveError
from lightning_ckpt_policy.snapshot import why_unsavable

_METHODS = ("rank_state_dict", "load_rank_state_dict")


def declaring(callbacks: Iterable[Callback]) -> dict[str, Any]:
    """The callbacks that have a state on each rank, by their ``state_key``.

    Raises:
        TypeError: One of them has but one of the two methods.
        ValueError: Two of them have the same ``state_key``.

    >>> class Seen(Callback):
    ...     samples = 0
    ...     def rank_state_dict(self):
    ...         return {"samples": self.samples}
    ...     def load_rank_state_dict(self, state):
    ...         self.samples = state["samples"]
    >>> list(declaring([Callback(), Seen()]))
    ['Seen']
    """
    found: dict[str, Any] = {}
    for callback in callbacks:
        there = [name for name in _METHODS if callable(getattr(callback, name, None))]
        if not there:
            continue
        name = type(callback).__name__
        if len(there) == 1:
            raise TypeError(f"{name} has {there[0]} alone: give it both of {' and '.join(_METHODS)}, or neither")
        if callback.state_key in found:
            raise ValueError(
                f"two callbacks with rank_state_dict have state_key={callback.state_key!r}: let {name}.state_key tell "
                "them apart"
            )
        found[callback.state_key] = callback
    return found


def collect_rank_state(callbacks: Iterable[Callback]) -> dict[str, Any]:
    """What this rank's callbacks give to be saved, by their ``state_key``.

    Raises:
        CheckpointSaveError: What one gives can't be pickled.
    """
    states: dict[str, Any] = {}
    for key, callback in declaring(callbacks).items():
        states[key] = callback.rank_state_dict()
        error = why_unsavable(states[key])
        if error is not None:
            raise CheckpointSaveError(
                f"what {type(callback).__name__}.rank_state_dict() returns can't be pickled ({error}): return plain "
                "values and tensors"
            ) from error
    return states


def restore_rank_state(callbacks: Iterable[Callback], state: Mapping[str, Any]) -> None:
    """Give this rank's callbacks back what :func:`collect_rank_state` returned."""
    for key, callback in declaring(callbacks).items():
        if key in state:
            callback.load_rank_state_dict(state[key])
