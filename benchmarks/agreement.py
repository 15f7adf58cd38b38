"""Simulate ranks that agree when to save: do they, with how many collectives, and how late does a save come?

    python benchmarks/agreement.py --out benchmarks/results/agreement.json

Runs the code that a training runs, one instance for each rank. Steps take a second, give or take. Every rank but the
first has a clock of its own that runs fast or slow, begins anywhere and jumps once. A save is due each time an interval
has passed. In a second training, of steps of 10 ms, a signal arrives on a random rank. Exits with 1 if ranks ever come
to different answers.

For each number of ranks, and for each way in which steps vary:

    collectives   exchanges in which ranks agree; "allowed": one per 32 steps, one for a save that comes sooner, and six
    off           by how much a save comes later or sooner than rank 0 alone would have saved, at most; 1 is the longest
                  step since the save before it, or 1 % of the interval
    signal        after how many steps a signal is known to all ranks
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from lightning_ckpt_policy import AtSteps, EveryInterval, OnSignal
from lightning_ckpt_policy.agreement import Agreement, Report
from lightning_ckpt_policy.interval import Measured, SaveCost
from lightning_ckpt_policy.triggers import Progress, Trigger

KINDS: dict[str, dict[str, float]] = {
    "nothing": {"jitter": 0.0},
    "jitter of 10 %": {},
    "a doubling": {"drift": 1.0},
    "1 % stragglers": {"stragglers": 0.01},
    "jitter of 30 %": {"jitter": 0.3},
}
RANK_STEPS = 1_200_000  # steps times ranks of a training, if it isn't to be shorter than wanted
STEPS_PER_EXCHANGE = 32
Clock = Callable[[float], float]


class Disagreement(Exception):
    """Ranks have come to different answers."""


class Waiting(Exception):
    """A rank has come to the collective, and waits for the others."""


class Rank:
    def __init__(self, number: int, trigger: Trigger, clock: Clock) -> None:
        self.agreement = Agreement(self.exchange, leads=number == 0, watches=trigger.timed, signals=trigger.signals)
        self.trigger, self.clock = trigger, clock
        self.since = Progress()
        self.step = 0
        self.arrived: dict[str, int] = {}
        self.brought: Sequence[float] = ()
        self.agreed: Sequence[float] | None = None

    def exchange(self, values: Sequence[float]) -> Sequence[float]:
        if self.agreed is None:
            self.brought = values
            raise Waiting
        agreed, self.agreed = self.agreed, None
        return agreed

    def progress(self, steps: int = 0, seconds: float = 0.0) -> Progress:
        time = self.agreement.time + seconds
        return Progress(
            step=self.step + steps,
            time=time,
            elapsed=time,
            signals=self.agreement.signals,
            measured=self.agreement.measured,
        )

    def due(self, steps: int = 0, seconds: float = 0.0) -> bool:
        return bool(self.trigger.due(self.progress(steps, seconds), self.since))


@dataclass
class Outcome:
    """At which steps something happened, and rank 0's clock after each step."""

    clock: np.ndarray
    saves: list[int] = field(default_factory=list)
    exchanges: list[int] = field(default_factory=list)
    heard: list[int] = field(default_factory=list)
    in_vain: list[int] = field(default_factory=list)

    def allowed(self) -> float:
        """Exchanges: one per 32 steps on average, or one for a save if it comes sooner, and some to begin with."""
        waits = np.diff([0, *self.saves, len(self.clock) - 1])
        return float(np.maximum(waits / STEPS_PER_EXCHANGE, 1).sum()) + 6

    def most_in_vain(self) -> float:
        """How often a save was found to be still on its way, at most, for each doubling of the steps it took."""
        waits = [*self.saves, len(self.clock) - 1]
        counts = np.diff(np.searchsorted(self.in_vain, waits))
        return float((counts / (1 + np.log2(1 + np.diff(waits)))).max(initial=0))

    def lateness(self, interval: float, busy: float = 0.0) -> list[float]:
        """How much later than rank 0 alone would have saved; 1 is the longest step since the save before, or 1 %."""
        shares = []
        for before, step in zip([0, *self.saves], self.saves, strict=False):
            began = self.clock[before]
            alone = int(np.searchsorted(self.clock, began + max(interval, busy)))
            if alone == len(self.clock):  # a save shortly before the end, and sooner
                continue
            longest = float(np.diff(self.clock[before : max(step, alone) + 1]).max())
            shares.append((self.clock[step] - self.clock[alone]) / max(longest, interval / 100))
        return shares


def train(
    trigger: Trigger,
    seconds: np.ndarray,
    clocks: Sequence[Clock],
    *,
    signals: dict[int, list[tuple[int, str]]] | None = None,
    confirm: float = 0.0,
    slow: float = 1.0,
    epoch: int = 10**9,
) -> Outcome:
    """Train with one rank per clock, steps of these seconds and saves that take ``confirm`` of rank 0's seconds.

    One save in five takes ``slow`` times as long. The first step of each epoch of ``epoch`` steps includes what comes
    before it.
    """
    ranks = [Rank(number, trigger, clock) for number, clock in enumerate(clocks)]
    leader = ranks[0]
    true = 0.0
    outcome = Outcome(np.array([leader.clock(t) for t in np.concatenate([[0.0], np.cumsum(seconds)])]))
    free_at = -math.inf
    measured = Measured()

    def exchange() -> None:
        reports = [
            Report(
                clock=rank.clock(true),
                busy=rank is leader and rank.clock(true) < free_at,
                measured=measured if rank is leader else Measured(),
                signals=rank.arrived,
            )
            for rank in ranks
        ]
        for rank, report in zip(ranks, reports, strict=True):
            with contextlib.suppress(Waiting):
                rank.agreement.exchange(report, rank.due)
        agreed = np.array([rank.brought for rank in ranks]).max(axis=0).tolist()
        for rank, report in zip(ranks, reports, strict=True):
            rank.agreed = agreed
            rank.agreement.exchange(report, rank.due)
        outcome.exchanges.append(leader.step)
        if not leader.agreement.free:
            outcome.in_vain.append(leader.step)

    def all_say(answers: list[bool]) -> bool:
        if len(set(answers)) > 1:
            raise Disagreement(f"the ranks disagree at step {leader.step}")
        return answers[0]

    if trigger.timed:
        exchange()
        for rank in ranks:
            rank.since = rank.progress()
    for step, duration in enumerate(seconds, start=1):
        true += duration
        if step % epoch == 1:
            for rank in ranks:
                rank.agreement.interrupted()
        for number, name in (signals or {}).get(step, ()):
            ranks[number].arrived[name] = ranks[number].arrived.get(name, 0) + 1
        times = []
        comes = []
        for rank in ranks:
            rank.step = step
            comes.append(rank.agreement.tick(rank.clock(true)))
            times.append(rank.agreement.time)
        if len(set(times)) > 1 or times[0] < leader.since.time:
            raise Disagreement(f"the clock of step {step} is {min(times)} to {max(times)}, or goes back")
        if all_say(comes):
            exchange()
        if leader.agreement.signals and not outcome.heard:
            outcome.heard.append(step)
        if not all_say([rank.due() for rank in ranks]):
            continue
        if all_say([rank.agreement.asks() for rank in ranks]):
            exchange()
        if not all_say([rank.agreement.free for rank in ranks]):
            continue
        outcome.saves.append(step)
        free_at = leader.clock(true) + confirm * (slow if len(outcome.saves) % 5 == 0 else 1)
        measured = Measured(cost=SaveCost(confirm=confirm), uptime=true)
        for rank in ranks:
            rank.since = rank.progress().captured(rank.since)
            rank.agreement.saved(rank.due)
    return outcome


def steps(count: int, *, jitter: float = 0.1, stragglers: float = 0.0, drift: float = 0.0, seed: int = 1) -> np.ndarray:
    """Seconds of so many steps of about one second, some of which take five, all slower by ``drift`` in the end."""
    random = np.random.default_rng(seed)
    seconds = random.gamma(jitter**-2, jitter**2, count) if jitter else np.ones(count)
    seconds[random.random(count) < stragglers] *= 5
    return np.asarray(seconds * np.linspace(1, 1 + drift, count))


def lying(rate: float = 1.0, offset: float = 0.0, jump_at: float = math.inf, jump: float = 0.0) -> Clock:
    return lambda true: offset + rate * true + (jump if true >= jump_at else 0.0)


def liars(count: int, seconds: float, random: np.random.Generator) -> list[Clock]:
    """A clock for each rank, of which only the first is true; the others jump within so many seconds."""
    return [lying()] + [
        lying(random.uniform(0.3, 3), random.uniform(-1e6, 1e6), random.uniform(0, seconds), random.uniform(-1e4, 1e4))
        for _ in range(count - 1)
    ]


def simulate(ranks: int, kind: str, count: int, interval: float) -> dict[str, Any]:
    """A row of the table."""
    random = np.random.default_rng([ranks, list(KINDS).index(kind)])
    seed = int(random.integers(2**32))
    row: dict[str, Any] = {"ranks": ranks, "steps vary by": kind, "steps": count, "agreed": True}
    at, rank = int(random.integers(50, 120)), int(random.integers(ranks))
    listening = AtSteps([count]) | OnSignal("SIGUSR1")
    short = steps(200, **KINDS[kind], seed=seed) / 100
    try:
        timed = train(
            EveryInterval(seconds=interval), steps(count, **KINDS[kind], seed=seed), liars(ranks, count, random)
        )
        signalled = train(listening, short, liars(ranks, 2, random), signals={at: [(rank, "SIGUSR1")]})
    except Disagreement as error:
        return {**row, "agreed": False, "why": str(error)}
    return {
        **row,
        "saves": len(timed.saves),
        "collectives": len(timed.exchanges),
        "allowed": round(timed.allowed(), 1),
        "per step": round(len(timed.exchanges) / count, 4),
        "off": round(float(np.abs(timed.lateness(interval)).max(initial=0)), 3),
        "signal": signalled.heard[0] - at,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 64, 512, 4096], help="default: 2 to 4096")
    parser.add_argument(
        "--steps",
        type=int,
        default=600,
        help="of the shortest training; few ranks train up to ten times as long (default: 600)",
    )
    parser.add_argument("--interval", type=float, default=100.0, help="seconds between two saves (default: 100)")
    parser.add_argument("--out", type=Path, help="write the results there, as JSON")
    arguments = parser.parse_args(argv)
    for name, least in {"steps": 200, "interval": 1}.items():
        if getattr(arguments, name) < least:
            parser.error(f"--{name} {getattr(arguments, name)}: give at least {least}")
    if min(arguments.ranks) < 1:
        parser.error(f"--ranks {min(arguments.ranks)}: give at least 1")
    rows = [
        simulate(ranks, kind, max(arguments.steps, min(10 * arguments.steps, RANK_STEPS // ranks)), arguments.interval)
        for ranks in arguments.ranks
        for kind in KINDS
    ]
    if arguments.out is not None:
        versions = {"lightning-ckpt-policy": metadata.version("lightning-ckpt-policy")}
        result = {"interval_seconds": arguments.interval, "versions": versions, "rows": rows}
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    table = Table(title=f"A save is due every {arguments.interval:g} s")
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console().print(table)
    return 0 if all(row["agreed"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
