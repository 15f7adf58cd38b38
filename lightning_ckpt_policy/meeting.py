"""Ranks that wait for one another where it can be said which of them don't come."""

from __future__ import annotations

import time
import warnings

from lightning_ckpt_policy import _torch
from lightning_ckpt_policy.errors import CheckpointError

# seconds of the first look into the store, and between those that follow
_SLICE, _POLLS_AFTER = 5.0, 0.5
# seconds after which a rank that waits for others says so; it fails after this share of the process group's timeout
_TELLS_AFTER, _FAILS_AFTER = 30.0, 0.9


class Meeting:
    """Where ranks meet before a collective to which not all of them may come.

    They meet in the store of the process group. A rank that waits here for one that has gone on to another collective
    says so, rather than that the two are taken for one, or that it waits until the process group gives up.

    Args:
        name: What no other meeting of this process group is called; the same on every rank.
        rank: This rank.
        ranks: How many there are.
        timeout: Seconds after which a collective of theirs fails.
    """

    def __init__(self, name: str, rank: int, ranks: int, timeout: float) -> None:
        self._name = name
        self._rank = rank
        self._ranks = ranks
        self._limit = _FAILS_AFTER * timeout
        self._store = _torch.rendezvous_store()
        self._number, self._before = 0, ""

    def wait(self, aim: str, when: str, why: str) -> None:
        """Return once all ranks are here.

        Args:
            aim: What they meet for; the same on every rank.
            when: Begins the message if one doesn't come, as ``"at the start"``.
            why: Ends it: what may be the reason, and what to do.

        Raises:
            CheckpointError: One didn't come; it is named. Some time before, there is a warning.
        """
        store = self._store
        self._number += 1
        here = f"{self._name}/{self._number}/{aim}"
        store.set(self._of(self._rank), here)
        if store.add(here, 1) == self._ranks:
            store.set(f"{here}/all", "")
        began, told, patience = time.monotonic(), False, min(_TELLS_AFTER, self._limit / 2)
        # torch prints a warning wherever such a wait ends in vain, so there is a single one
        arrived = _torch.is_set_within(store, f"{here}/all", min(_SLICE, self._limit / 2))
        while not (arrived or store.check([f"{here}/all"])):
            if time.monotonic() - began < patience:
                time.sleep(_POLLS_AFTER)
                continue
            message = (
                f"{when} rank {self._rank} is {aim}, and {shown(self._absent(here))} didn't come to that within "
                f"{patience:g} s. {why}"
            )
            if told:
                raise CheckpointError(message)
            warnings.warn(f"CheckpointPolicy: {message}", stacklevel=2)
            told, patience = True, self._limit
        if self._rank == 0 and self._before:  # all ranks have left the one before
            store.delete_key(self._before)
            store.delete_key(f"{self._before}/all")
        self._before = here

    def _of(self, rank: int) -> str:
        return f"{self._name}/rank/{rank}"

    def _absent(self, here: str) -> list[int]:
        store = self._store
        return [
            rank
            for rank in range(self._ranks)
            if not store.check([self._of(rank)]) or store.get(self._of(rank)) != here.encode()
        ]


def shown(ranks: list[int]) -> str:
    """Ranks in words.

    >>> shown([1, 3])
    'ranks 1, 3'
    """
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}" + (", …" if len(ranks) > 8 else "")
