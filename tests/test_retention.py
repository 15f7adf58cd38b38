from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jsonargparse
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from lightning_ckpt_policy import retention
from lightning_ckpt_policy.record import CheckpointRecord
from lightning_ckpt_policy.retention import (
    AllOf,
    AnyOf,
    KeepAll,
    KeepBest,
    KeepEveryInterval,
    KeepEveryNSteps,
    KeepLast,
    KeepSteps,
    KeepUnder,
    KeepWithin,
    Retention,
    Worth,
    as_retention,
    best,
    excess,
    plan,
)

NAN, INF = math.nan, math.inf
LAST, BEST, MILESTONES = KeepLast(2), KeepBest(1, "loss"), KeepSteps([10, 20])
NOW = 60.0  # the records are of the seconds before


def record(
    sequence: int,
    *,
    step: int | None = None,
    loss: float | None = None,
    at: float | None = None,
    size: int = 1,
    **values: Any,
) -> CheckpointRecord:
    metrics: Mapping[str, float] = {} if loss is None else {"loss": loss}
    return CheckpointRecord(
        path=f"{sequence}.ckpt",
        step=sequence if step is None else step,
        epoch=0,
        sequence=sequence,
        run_id="a",
        created_at=float(sequence) if at is None else at,
        size=size,
        checksum="crc32c:00000000",
        metrics=metrics,
        **values,
    )


def history(*losses: float | None) -> list[CheckpointRecord]:
    return [record(i, loss=loss) for i, loss in enumerate(losses, 1)]


def planned(rule: Retention, records: Sequence[CheckpointRecord], **options: Any) -> list[int]:
    return [r.sequence for r in plan(rule, records, **{"now": NOW, **options})]


def steps(*values: int) -> list[CheckpointRecord]:
    return [record(i, step=step) for i, step in enumerate(values, 1)]


def times(*values: float) -> list[CheckpointRecord]:
    return [record(i, at=at) for i, at in enumerate(values, 1)]


def sizes(*values: int, **fields: Sequence[Any]) -> list[CheckpointRecord]:
    return [
        record(i, size=size, **{name: each[i - 1] for name, each in fields.items()}) for i, size in enumerate(values, 1)
    ]


unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no failure


def paste(text: str) -> object:
    return eval(text, dict(vars(retention)))


# Each rule by itself


@pytest.mark.parametrize(
    ("rule", "records", "kept"),
    [
        (KeepAll(), history(1, 2, 3), {1, 2, 3}),
        (KeepAll(), [], set()),
        (KeepLast(), history(1, 2, 3), {3}),
        (KeepLast(2), history(1, 2, 3)[::-1], {2, 3}),
        (KeepLast(9), history(1, 2, 3), {1, 2, 3}),
        (KeepLast(2), [record(7, step=90), record(8, step=10), record(9, step=20)], {8, 9}),
        (KeepBest(2, "loss"), history(3, 1, 2), {2, 3}),
        (KeepBest(2, "loss", "max"), history(3, 1, 2), {1, 3}),
        (KeepBest(2, "loss"), history(1, 1, 1)[::-1], {1, 2}),
        (KeepBest(1, "loss", "max"), history(1, 2, 2), {2}),
        (KeepBest(3, "loss"), history(NAN, None, 1, NAN), {3}),
        (KeepBest(1, "loss"), history(NAN, None), set()),
        (KeepBest(1, "loss"), history(0, -INF, INF), {2}),
        (KeepBest(1, "loss", "max"), history(0, -INF, INF), {3}),
        (KeepBest(2, "loss"), history(INF, INF, 5), {1, 3}),
        (KeepBest(1, "other"), history(1, 2), set()),
        (KeepBest(10**18, "loss"), history(2, 1), {1, 2}),
        (KeepSteps([10, 20]), [record(1, step=9), record(2, step=10), record(3, step=21)], {2, 3}),
        (KeepSteps([10, 20]), [record(1, step=9), record(2, step=12), record(3, step=13)], {2}),
        (KeepSteps([10, 20]), [record(1, step=30), record(2, step=31)], {1}),
        (KeepSteps([10]), [record(3, step=10), record(2, step=10), record(4, step=11)], {3}),
        (KeepSteps([10]), [], set()),
        (KeepEveryNSteps(10), steps(9, 10, 11, 19, 20, 30), {2, 5, 6}),
        (KeepEveryNSteps(10), steps(0, 3, 9), set()),
        # irregular steps: the nearest at or after each multiple; one may stand for several
        (KeepEveryNSteps(10), steps(7, 13, 18, 26, 41, 47), {2, 4, 5}),
        (KeepEveryNSteps(10), [record(3, step=10), record(2, step=10), record(4, step=11)], {3}),
        (KeepEveryNSteps(10, last=2), steps(10, 20, 21, 50, 60), {4, 5}),
        (KeepEveryNSteps(10, last=9), steps(10, 20), {1, 2}),
        (KeepEveryInterval(seconds=10), times(3, 9, 10, 11, 35, 38), {1, 3, 5}),
        (KeepEveryInterval(seconds=10, last=1), times(3, 9, 10, 11), {3}),
        (KeepEveryInterval(hours=24), times(5 * 86400 - 1, 5 * 86400, 5 * 86400 + 1), {1, 2}),
        (KeepEveryInterval(seconds=10), [record(2, at=15), record(1, at=15)], {1}),
        (KeepEveryInterval(seconds=10), times(-5, -15), {1, 2}),
        (KeepWithin(seconds=10), times(-11, -10, -9.5, 5), {3, 4}),
        (KeepUnder("2B", of=KeepLast(3)), history(1, 2, 3, 4), {3, 4}),
        (KeepUnder("9B", of=KeepLast(3)), history(1, 2, 3, 4), {2, 3, 4}),
        (KeepUnder("1B", of=BEST), history(1, 3, 2), set()),
        (KeepUnder("2B", of=BEST), history(1, 3, 2), {1}),
        (LAST | BEST, history(3, 1, 2, 4, 5), {2, 4, 5}),
        (LAST & BEST, history(3, 1, 2), {2}),
        (LAST & BEST, history(1, 3, 2), set()),
        (AnyOf([BEST]), history(1, 3, 2), {1}),
        (AllOf([BEST]), history(1, 3, 2), {1}),
    ],
)
def test_keep(rule: Retention, records: list[CheckpointRecord], kept: set[int]) -> None:
    assert rule.keep(records, 0.0) == kept


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (KeepAll(), "KeepAll()"),
        (LAST, "KeepLast(n=2)"),
        (KeepBest(2, "val/loss", "max"), "KeepBest(n=2, monitor='val/loss', mode='max')"),
        (KeepSteps(iter([20, 10, 20])), "KeepSteps(steps=(10, 20))"),
        (KeepSteps(np.arange(10, 30, 10)), "KeepSteps(steps=(10, 20))"),
        (KeepEveryNSteps(np.int64(1000), last=5), "KeepEveryNSteps(n=1000, last=5)"),
        (KeepEveryInterval(hours=1.5), "KeepEveryInterval(hours=1.5)"),
        (KeepEveryInterval(hours=1, minutes=30, last=5), "KeepEveryInterval(hours=1, minutes=30, last=5)"),
        (KeepWithin(hours=12), "KeepWithin(hours=12)"),
        (
            KeepUnder("0.5 TB", of=[LAST, BEST]),
            "KeepUnder('500GB', of=KeepLast(n=2) | KeepBest(n=1, monitor='loss', mode='min'))",
        ),
        (
            KeepUnder(1024, of=LAST) | BEST,
            "KeepUnder('1KiB', of=KeepLast(n=2)) | KeepBest(n=1, monitor='loss', mode='min')",
        ),
        (
            KeepUnder(
                "2TB",
                of=KeepLast(2)
                | KeepEveryNSteps(1_000, last=5)
                | KeepEveryNSteps(10_000, last=10)
                | KeepBest(3, "val_loss")
                | KeepSteps([50_000, 100_000]),
            ),
            "KeepUnder('2TB', of=KeepLast(n=2) | KeepEveryNSteps(n=1000, last=5) | KeepEveryNSteps(n=10000, last=10) | "
            "KeepBest(n=3, monitor='val_loss', mode='min') | KeepSteps(steps=(50000, 100000)))",
        ),
        (LAST | MILESTONES, "KeepLast(n=2) | KeepSteps(steps=(10, 20))"),
        (LAST & (KeepAll() | MILESTONES), "KeepLast(n=2) & (KeepAll() | KeepSteps(steps=(10, 20)))"),
        (LAST & KeepAll() | MILESTONES, "KeepLast(n=2) & KeepAll() | KeepSteps(steps=(10, 20))"),
        (AllOf([LAST]), "AllOf([KeepLast(n=2)])"),
    ],
)
def test_repr_can_be_pasted_back(rule: Retention, text: str) -> None:
    assert repr(rule) == text
    assert paste(text) == rule
    assert hash(paste(text)) == hash(rule)
    assert pickle.loads(pickle.dumps(rule)) == copy.deepcopy(rule) == rule


@pytest.mark.parametrize(
    "rule", [LAST, BEST, MILESTONES, LAST | BEST, KeepEveryNSteps(5), KeepWithin(hours=1), KeepUnder("1GB", LAST)]
)
def test_rules_are_frozen(rule: Any) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(rule, dataclasses.fields(rule)[0].name, 3)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (LAST, LAST),
        ([LAST], LAST),
        ((LAST, BEST), LAST | BEST),
        ([LAST, [BEST, [MILESTONES]]], LAST | BEST | MILESTONES),
        (AllOf([LAST, [BEST, MILESTONES]]), LAST & (BEST | MILESTONES)),
    ],
)
def test_as_retention(value: object, expected: Retention) -> None:
    assert as_retention(value) == expected


def test_monitors_of_the_whole_tree() -> None:
    accuracy = KeepBest(3, "accuracy", "max")
    rule = LAST | accuracy & (BEST | MILESTONES) | KeepBest(5, "loss") | KeepBest(5, "loss", "max")
    assert LAST.monitors == ()
    assert rule.monitors == (("accuracy", "max"), ("loss", "min"), ("loss", "max"))


@pytest.mark.parametrize(
    ("records", "mode", "sequence"),
    [
        (history(3, 1, 1), "min", 2),
        (history(3, 1, 1), "max", 1),
        (history(NAN, None), "min", None),
        ([], "min", None),
        ([record(1, loss=0.0, damaged=True), record(2, loss=5.0)], "min", 2),
    ],
)
def test_best(records: list[CheckpointRecord], mode: Any, sequence: int | None) -> None:
    found = best(records, "loss", mode)
    assert (found and found.sequence) == sequence


# Planning


@pytest.mark.parametrize(
    ("rule", "records", "protect", "deleted"),
    [
        (KeepLast(1), [], set(), []),
        (KeepLast(1), history(1, 2, 3)[::-1], set(), [1, 2]),
        (KeepAll(), history(1, 2, 3), set(), []),
        (BEST, history(1, 2, 3), set(), [2]),
        (MILESTONES, history(1, 2, 3), set(), [1, 2]),
        (KeepLast(1), history(1, 2, 3), {"1.ckpt", "elsewhere.ckpt"}, [2]),
        (KeepLast(1), [record(1, pinned=True), record(2), record(3)], set(), [2]),
        (KeepLast(1), [record(1), record(2), record(3, damaged=True)], set(), [1]),
        (BEST, [record(1, loss=0.0, damaged=True), record(2, loss=1.0), record(3), record(4)], set(), [3]),
        (KeepLast(1), [record(1, damaged=True)], set(), []),
    ],
)
def test_plan(rule: Retention, records: list[CheckpointRecord], protect: set[str], deleted: list[int]) -> None:
    assert planned(rule, records, protect=protect) == deleted


class Nothing(Retention):
    def keep(self, records: Sequence[CheckpointRecord], now: float) -> set[int]:
        assert not any(r.damaged for r in records)
        return set()


def test_a_rule_of_ones_own_composes_and_cannot_delete_the_newest() -> None:
    nothing = Nothing()
    assert planned(nothing, [record(1), record(3, damaged=True), record(2)]) == [1]
    assert planned(nothing | KeepLast(2), history(1, 2, 3)) == [1]
    assert planned(nothing & KeepAll(), history(1, 2, 3)) == [1, 2]


@dataclasses.dataclass(frozen=True)
class Answers(Retention):
    answer: Any

    def keep(self, records: Sequence[CheckpointRecord], now: float) -> Any:
        return self.answer(records)


@pytest.mark.parametrize(
    "answer",
    [
        lambda records: records,
        lambda records: {record.path for record in records},
        lambda records: {record.step for record in records},
        lambda records: [[record.sequence] for record in records],
        lambda records: [record.sequence for record in records] + [99],
        lambda records: [True] * len(records),
        lambda records: {record.step > 0 for record in records},
        lambda records: bytes(record.sequence for record in records),
        lambda records: None,
        lambda records: records[0].sequence,
    ],
)
@pytest.mark.parametrize(
    "of",
    [
        lambda rule: rule,
        lambda rule: rule | KeepLast(1),
        lambda rule: rule & KeepLast(1),
        lambda rule: KeepUnder(1, of=rule),
    ],
)
def test_what_a_rule_of_ones_own_may_not_answer(answer: Any, of: Callable[[Retention], Retention]) -> None:
    with pytest.raises(TypeError, match=r"Answers.*keep returned .* it must return the sequence of each"):
        planned(of(Answers(answer)), steps(10, 20, 30))


class Explains(KeepAll):
    def __init__(self, ranked: Callable[[list[int]], Any]) -> None:
        object.__setattr__(self, "ranked", ranked)

    def worth(self, records: Sequence[CheckpointRecord], now: float) -> Any:
        return [(Worth.BEST, self.ranked([record.sequence for record in records]))]  # type: ignore[attr-defined]


def test_a_rule_of_ones_own_may_explain_itself_with_any_iterable() -> None:
    assert planned(KeepUnder("1MB", of=Explains(iter)), steps(10, 20, 30)) == []


@pytest.mark.parametrize(
    "ranked", [lambda them: [], lambda them: them[1:], lambda them: [*them, 99], lambda them: None]
)
@pytest.mark.parametrize("of", [lambda rule: rule, lambda rule: rule | KeepLast(1)])
def test_a_rule_of_ones_own_that_explains_something_else_deletes_nothing(ranked: Any, of: Any) -> None:
    with pytest.raises(TypeError, match=r"must hold exactly what its keep returns|not iterable"):
        planned(KeepUnder("1MB", of=of(Explains(ranked))), steps(10, 20, 30))


@pytest.mark.parametrize("kind", [list, frozenset, iter, np.array])
def test_a_rule_of_ones_own_may_answer_with_any_iterable(kind: Callable[[list[int]], object]) -> None:
    rule = Answers(lambda records: kind([record.sequence for record in records]))
    assert planned(rule, steps(10, 20, 30)) == []


def test_case_06_nan_is_never_best() -> None:
    rule = KeepBest(2, monitor="loss")
    records = history(NAN, 0.5, NAN, 0.4)
    assert rule.keep(records, 0.0) == {2, 4}
    assert planned(rule, records) == [1, 3]
    assert planned(rule, records[:3]) == [1], "a NaN checkpoint is still the last one"
    assert planned(rule | KeepLast(1), history(0.5, 0.4, 0.6, NAN)) == [3]


def test_case_26_last_and_best() -> None:
    there: list[CheckpointRecord] = []
    for sequence in range(1, 11):
        there.append(record(sequence, loss=0.1 if sequence == 2 else 1.0 + sequence))
        gone = plan(KeepLast(2) | KeepBest(1, "loss"), there, now=0.0)
        there = [r for r in there if r not in gone]
    assert [r.sequence for r in there] == [2, 9, 10]


def test_case_26_last_and_every_second_step() -> None:
    there: list[CheckpointRecord] = []
    for sequence in range(1, 6):
        there.append(record(sequence))
        gone = plan(KeepLast(1) | KeepEveryNSteps(2), there, now=0.0)
        there = [r for r in there if r not in gone]
    assert [r.sequence for r in there] == [2, 4, 5]


# A byte budget


EVERYTHING = KeepLast(3) | KeepEveryNSteps(10, last=3) | KeepBest(2, "loss") | KeepSteps([1])
LOSSES = [5, 1, 9, 9, 2, 9, 9, 9]
AT = [1, 5, 10, 20, 25, 31, 34, 37]  # 1 is a milestone, 2 and 5 are the best, 3, 4 and 6 the history, 6 to 8 the last


@pytest.mark.parametrize(
    ("budget", "kept"),
    [
        (8, {1, 2, 3, 4, 5, 6, 7, 8}),
        (7, {1, 2, 4, 5, 6, 7, 8}),  # the oldest of the history goes first
        (6, {1, 2, 5, 6, 7, 8}),
        (5, {1, 2, 5, 7, 8}),  # then the older of what is recent alone
        (4, {1, 2, 5, 8}),
        (3, {1, 2, 8}),  # then the worse of the best
        (2, {1, 8}),  # the newest and the milestone never go
        (1, {1, 8}),
    ],
)
def test_the_least_valuable_goes_first(budget: int, kept: set[int]) -> None:
    records = sizes(*[1] * 8, loss=LOSSES, step=AT)
    rule = KeepUnder(budget, of=EVERYTHING)
    assert rule.keep(records, NOW) == kept
    assert rule.keep(records[::-1], NOW) == kept
    assert excess(rule, records, now=NOW) == max(0, 2 - budget)


@pytest.mark.parametrize(
    ("rule", "records", "kept", "above"),
    [
        (KeepUnder("10B", KeepLast(3)), sizes(1, 9, 5, 5), {3, 4}, 0),
        (KeepUnder("10B", KeepLast(3)), sizes(1, 9, 1, 9), {3, 4}, 0),
        (KeepUnder("10B", KeepLast(3)), sizes(1, 1, 2, 8), {3, 4}, 0),  # none behind the first that doesn't fit
        (KeepUnder("10B", KeepLast(3)), sizes(1, 1, 2, 12), {4}, 2),
        (KeepUnder("10B", KeepLast(3)), sizes(8, 1, 1, 1, pinned=[True] + [False] * 3), {3, 4}, 0),
        (KeepUnder("10B", KeepLast(3)), sizes(12, 1, 1, 3, pinned=[True] + [False] * 3), {4}, 5),
        (KeepUnder("10B", KeepSteps([1, 2])), sizes(8, 8, 1, 3), {1, 2}, 9),
        (KeepUnder("10B", KeepSteps([1, 2]) & KeepLast(3)), sizes(8, 8, 1, 3), {2}, 1),
        (KeepUnder("10B", KeepAll()), sizes(4, 4, 4, 4), {3, 4}, 0),
        (KeepUnder("10B", KeepWithin(seconds=58)), sizes(4, 4, 4, 1), {3, 4}, 0),
        (KeepUnder("10B", KeepUnder("5B", KeepLast(9))), sizes(2, 2, 2, 2), {3, 4}, 0),
        (KeepUnder("1B", KeepLast(1)) | KeepUnder("9B", KeepLast(2)), sizes(2, 2, 2, 2), {3, 4}, 1),
        (KeepUnder("1B", KeepLast(1)), [], set(), 0),
        (KeepLast(1), sizes(5, 5), {2}, 0),
    ],
)
def test_budget(rule: Retention, records: list[CheckpointRecord], kept: set[int], above: int) -> None:
    assert rule.keep(records, NOW) == kept
    assert excess(rule, [*records, record(99, size=500, damaged=True)], now=NOW) == above


def test_a_budget_over_groups_that_are_equal_keeps_the_same() -> None:
    a, b = KeepEveryNSteps(10), KeepEveryNSteps(15)
    records = steps(10, 15, 20, 30, 45, 46)
    for budget in range(1, 7):
        assert KeepUnder(budget, a | b).keep(records, NOW) == KeepUnder(budget, b | a).keep(records, NOW)


# Properties


leaves: st.SearchStrategy[Retention] = st.one_of(
    st.just(KeepAll()),
    st.integers(1, 4).map(KeepLast),
    st.builds(KeepBest, st.integers(1, 3), st.sampled_from(["loss", "other"]), st.sampled_from(["min", "max"])),
    st.lists(st.integers(1, 12), min_size=1, max_size=4).map(KeepSteps),
    st.builds(KeepEveryNSteps, st.integers(1, 5), st.none() | st.integers(1, 3)),
    st.builds(KeepEveryInterval, seconds=st.sampled_from([0.5, 3, 10]), last=st.none() | st.integers(1, 3)),
    st.builds(KeepWithin, seconds=st.sampled_from([1, 10, 40])),
)


def groups(inner: st.SearchStrategy[Retention]) -> st.SearchStrategy[Retention]:
    return st.lists(inner, min_size=1, max_size=3).flatmap(lambda r: st.sampled_from([AnyOf(r), AllOf(r)]))


def budgets(inner: st.SearchStrategy[Retention]) -> st.SearchStrategy[Retention]:
    return st.builds(KeepUnder, st.integers(1, 30), inner)


unions: st.SearchStrategy[Retention] = st.lists(leaves, min_size=1, max_size=4).map(AnyOf)
rules: st.SearchStrategy[Retention] = st.recursive(leaves, groups)
budgeted: st.SearchStrategy[Retention] = st.lists(leaves | budgets(unions), min_size=1, max_size=3).map(AnyOf)
everything: st.SearchStrategy[Retention] = st.recursive(leaves, lambda inner: groups(inner) | budgets(inner))
losses = st.sampled_from([None, NAN, INF, -INF, 0.0, 0.5, 0.5, 1.0])


@st.composite
def histories(draw: st.DrawFn) -> list[CheckpointRecord]:
    sequences = draw(st.lists(st.integers(1, 60), max_size=14, unique=True))
    return [
        record(
            sequence,
            step=draw(st.integers(0, 12)),
            loss=draw(losses),
            size=draw(st.integers(0, 6)),
            pinned=draw(st.integers(0, 5)) == 0,
            damaged=draw(st.integers(0, 5)) == 0,
        )
        for sequence in sequences
    ]


@st.composite
def runs(draw: st.DrawFn) -> list[CheckpointRecord]:
    """The saves of a run with failures and resumes: steps go back to a save before, clocks may, sequences never do."""
    saves: list[CheckpointRecord] = []
    step, clock = 0, 0.0
    for sequence in range(1, draw(st.integers(1, 25)) + 1):
        if saves and draw(st.integers(0, 5)) == 0:  # a crash, and a resume from one of the newest saves
            step = draw(st.sampled_from(saves[-2:])).step
            clock += draw(st.sampled_from([-1.0, 0.0, 20.0]))
        step += draw(st.integers(1, 4))
        clock += draw(st.sampled_from([0.5, 1.0, 5.0]))
        saves.append(record(sequence, step=step, at=clock, loss=draw(losses), size=draw(st.integers(0, 6))))
    return saves


def without(records: Sequence[CheckpointRecord], gone: Sequence[int]) -> list[CheckpointRecord]:
    return [r for r in records if r.sequence not in gone]


def undamaged(records: Sequence[CheckpointRecord]) -> list[CheckpointRecord]:
    return [r for r in records if not r.damaged]


@unhurried
@given(everything, everything, everything, histories())
def test_algebra(a: Retention, b: Retention, c: Retention, records: list[CheckpointRecord]) -> None:
    whole = undamaged(records)
    kept = {rule: rule.keep(whole, NOW) for rule in (a, b, c)}
    assert (a | b).keep(whole, NOW) == kept[a] | kept[b]
    assert (a & b).keep(whole, NOW) == kept[a] & kept[b]
    assert a | b == b | a
    assert a & b == b & a
    assert (a | b) | c == a | (b | c)
    assert (a & b) & c == a & (b & c)
    assert hash(a & b) == hash(b & a)
    for same in (a | a, a & a, a | (a & b), a & (a | b)):
        assert same.keep(whole, NOW) == kept[a]
    assert (a & (b | c)).keep(whole, NOW) == ((a & b) | (a & c)).keep(whole, NOW)
    assert paste(repr(a | b & c)) == a | b & c
    assert KeepUnder(9, a | b).keep(whole, NOW) == KeepUnder(9, b | a).keep(whole, NOW)


@unhurried
@given(everything, everything, histories())
def test_adding_a_rule_never_deletes_more(a: Retention, b: Retention, records: list[CheckpointRecord]) -> None:
    assert set(planned(a | b, records)) == set(planned(a, records)) & set(planned(b, records))
    assert set(planned(a, records)) <= set(planned(a & b, records))


@unhurried
@given(everything, histories(), st.randoms(use_true_random=False))
def test_planning(rule: Retention, records: list[CheckpointRecord], random: Any) -> None:
    protect = {r.path for r in records if random.random() < 0.1}
    gone = planned(rule, records, protect=protect)
    assert gone == sorted(set(gone))
    for r in records:
        if r.damaged or r.pinned or r.path in protect or r.sequence == max(u.sequence for u in undamaged(records)):
            assert r.sequence not in gone
    # free of the order of the records
    shuffled = random.sample(records, len(records))
    assert planned(rule, shuffled, protect=protect) == gone
    # planning again changes nothing
    assert planned(rule, without(records, gone), protect=protect) == []


@unhurried
@given(rules | budgeted, histories(), st.randoms(use_true_random=False))
def test_where_deletes_failed_no_others_are_asked_for(
    rule: Retention, records: list[CheckpointRecord], random: Any
) -> None:
    gone = planned(rule, records)
    some = [sequence for sequence in gone if random.random() < 0.5]
    assert set(planned(rule, without(records, some))) <= set(gone) - set(some)


@unhurried
@given(everything, histories())
def test_what_is_kept_stays_kept_when_others_go(rule: Retention, records: list[CheckpointRecord]) -> None:
    whole = undamaged(records)
    kept = rule.keep(whole, NOW)
    fewer = [r for r in whole if r.sequence in kept]
    assert rule.keep(fewer, NOW) == kept


@unhurried
@given(everything, histories())
def test_there_is_a_reason_for_all_that_is_kept_and_nothing_else(
    rule: Retention, records: list[CheckpointRecord]
) -> None:
    whole = undamaged(records)
    reasons = [ranked for _, ranked in rule.worth(whole, NOW)]
    assert set().union(*reasons) == rule.keep(whole, NOW)
    assert all(len(set(ranked)) == len(ranked) for ranked in reasons)


@unhurried
@given(st.integers(1, 30), rules, histories())
def test_a_budget_is_kept_to(budget: int, rule: Retention, records: list[CheckpointRecord]) -> None:
    whole = undamaged(records)
    limited = KeepUnder(budget, rule)
    left = without(whole, planned(limited, whole))
    above = sum(r.size for r in left) - budget
    over = excess(limited, records, now=NOW)
    assert limited.keep(whole, NOW) <= rule.keep(whole, NOW)
    assert above == over if over else above <= 0
    if over == 0 and sum(r.size for r in without(whole, planned(rule, whole))) <= budget:
        assert limited.keep(whole, NOW) == rule.keep(whole, NOW)
    for r in left:
        if r.sequence not in limited.keep(whole, NOW):
            assert r.pinned or r.sequence == max(u.sequence for u in whole)


def store_after(
    rule: Retention, saves: Sequence[CheckpointRecord], *, fails: Callable[[], bool], restart: Callable[[], bool]
) -> set[int]:
    """What is left of a run that plans after each confirmed save; deletes that failed are tried again."""
    there: list[CheckpointRecord] = []
    for one in saves:
        there.append(one)
        now = max(r.created_at for r in saves[: one.sequence])
        gone = plan(rule, there, now=now)
        assert one not in gone, "the newest confirmed one"
        assert planned(rule, without(there, [r.sequence for r in gone]), now=now) == []
        there = [r for r in there if r not in gone or fails()]
        if restart():  # nothing is known any more but the records, in whatever order the store lists them
            there = [CheckpointRecord.from_json(r.to_json()) for r in reversed(there)]
    gone = plan(rule, there, now=now)
    return {r.sequence for r in there if r not in gone}


@unhurried
@given(everything, runs(), st.randoms(use_true_random=False))
def test_a_restart_at_any_point_leads_to_the_same_store(
    rule: Retention, saves: list[CheckpointRecord], random: Any
) -> None:
    undisturbed = store_after(rule, saves, fails=lambda: False, restart=lambda: False)
    assert store_after(rule, saves, fails=lambda: False, restart=lambda: random.random() < 0.3) == undisturbed


@unhurried
@given(everything, histories(), st.lists(st.integers(-1, 5), max_size=3))
@example(KeepLast(2) & KeepBest(2, "loss"), history(1, 3, 2), [1])
@example(KeepUnder(5, KeepBest(2, "loss") | KeepLast(2)), sizes(6, 3, 1, loss=[1, 2, 3]), [1])
def test_a_kill_between_two_deletes_changes_nothing(
    rule: Retention, records: list[CheckpointRecord], kills: list[int]
) -> None:
    undisturbed = {r.sequence for r in without(records, planned(rule, records))}
    for deletes in [*kills, len(records)]:
        gone = plan(rule, records, now=NOW)
        if len(gone) > 1 and deletes >= 0:
            noted = dataclasses.replace(gone[-1], doomed=tuple(r.sequence for r in gone[:-1]), doomed_by=repr(rule))
            records = [noted if r is gone[-1] else r for r in records]
        records = without(records, [r.sequence for r in gone[: max(0, deletes)]])
        records = [CheckpointRecord.from_json(r.to_json()) for r in records]
    assert {r.sequence for r in records} == undisturbed


@pytest.mark.parametrize("rule", [KeepAll(), KeepLast(3), KeepSteps([10])], ids=repr)
def test_what_one_rule_has_doomed_another_may_keep(rule: Retention) -> None:
    records = history(1, 3, 2)
    doomed = [records[0].sequence]
    records[1] = dataclasses.replace(records[1], doomed=tuple(doomed), doomed_by=repr(KeepLast(1)))
    assert planned(KeepLast(1), records) == [*doomed, records[1].sequence]
    assert planned(rule, records) == planned(rule, history(1, 3, 2))


@unhurried
@given(unions, runs(), st.randoms(use_true_random=False))
def test_an_online_run_with_failing_deletes_and_a_replay_of_its_records_agree(
    rule: Retention, saves: list[CheckpointRecord], random: Any
) -> None:
    now = max(r.created_at for r in saves)
    replayed = {r.sequence for r in without(saves, planned(rule, saves, now=now))}
    for failing in (0.0, 0.3):
        left = store_after(
            rule, saves, fails=lambda f=failing: random.random() < f, restart=lambda: random.random() < 0.3
        )
        assert left == replayed


# Configuration


class Policy:
    def __init__(self, retention: Retention | list[Retention]) -> None:
        self.retention = as_retention(retention)


def of(name: str, **init_args: Any) -> dict[str, Any]:
    return {"class_path": f"lightning_ckpt_policy.retention.{name}", "init_args": init_args}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # instantiate_classes: the old name works with every version
@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (of("KeepLast", n=2), LAST),
        ({"class_path": "lightning_ckpt_policy.retention.KeepAll"}, KeepAll()),
        (
            [of("KeepLast", n=2), of("KeepBest", n=2, monitor="val/loss", mode="max"), of("KeepSteps", steps=[20, 10])],
            LAST | KeepBest(2, "val/loss", "max") | MILESTONES,
        ),
        (
            of("AllOf", rules=[of("KeepLast", n=2), [of("KeepBest", monitor="loss"), of("KeepSteps", steps=[10, 20])]]),
            LAST & (BEST | MILESTONES),
        ),
        ([of("AllOf", rules=[of("KeepLast", n=2)]), of("KeepAll")], AllOf([LAST]) | KeepAll()),
        (of("KeepEveryNSteps", n=1000, last=5), KeepEveryNSteps(1000, last=5)),
        (of("KeepEveryInterval", hours=24, last=7), KeepEveryInterval(hours=24, last=7)),
        (of("KeepWithin", hours=1, minutes=30), KeepWithin(hours=1, minutes=30)),
        (of("KeepUnder", budget="500GB", of=of("KeepLast", n=2)), KeepUnder("500GB", LAST)),
        (of("KeepUnder", budget=10**12, of=of("KeepLast", n=2)), KeepUnder("1TB", LAST)),
        (
            [of("KeepUnder", budget="2TB", of=[of("KeepLast", n=2), of("KeepBest", monitor="loss")]), of("KeepAll")],
            KeepUnder("2TB", LAST | BEST) | KeepAll(),
        ),
    ],
)
def test_class_path_and_init_args(config: object, expected: Retention) -> None:
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Policy, "policy")
    parsed = parser.parse_object({"policy": {"retention": config}})
    shown = parser.dump(parsed)
    again = parser.parse_string(shown)
    for one in (parsed, again):
        made = parser.instantiate_classes(one).policy.retention
        assert made == expected
        assert repr(made) == repr(expected)
    # making the objects leaves the configuration as it was: LightningCLI writes it out afterwards
    assert parser.dump(parsed) == parser.dump(again) == shown


# Bad input


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KeepLast(0), "n=0: an integer of at least 1 was expected; write KeepLast(1) or more, or KeepAll() to"),
        (lambda: KeepLast(-1), "n=-1: an integer of at least 1 was expected; write KeepLast(1) or more, or KeepAll()"),
        (lambda: KeepLast(True), "n=True: an integer of at least 1"),
        (lambda: KeepBest("val_loss"), "n='val_loss': an integer of at least 1 was expected; write KeepBest(1, mon"),
        (lambda: KeepBest(2), "monitor='': the name of a logged metric was expected; write KeepBest(1, monitor="),
        (lambda: KeepBest(2, None), "monitor=None: the name of a logged metric"),
        (lambda: KeepBest(2, "loss", "lowest"), "mode='lowest': 'min' or 'max' was expected; use 'min' where lower"),
        (lambda: best([], "loss", "auto"), "mode='auto': 'min' or 'max' was expected"),
        (lambda: KeepSteps([]), "steps=[]: a list with at least one step was expected; write KeepSteps([10_000, "),
        (lambda: KeepSteps(5), "steps=5: a list with at least one step"),
        (lambda: KeepSteps([5, 0]), "steps=0: an integer of at least 1 was expected; every step is 1 or more; write K"),
        (lambda: KeepEveryNSteps(0), "n=0: an integer of at least 1 was expected; write KeepEveryNSteps(1000), or Kee"),
        (lambda: KeepEveryNSteps(5, 0), "last=0: an integer of at least 1 was expected; write last=5, or leave it out"),
        (lambda: KeepEveryInterval(hours=1, last=True), "last=True: an integer of at least 1"),
        (
            lambda: KeepEveryInterval(),
            "hours=0.0, minutes=0.0, seconds=0.0: a finite interval above 0 was expected",
        ),
        (
            lambda: KeepWithin(hours=-1),
            "hours=-1: a finite number of at least 0 was expected; write KeepWithin(",
        ),
        (
            lambda: KeepUnder("500G", LAST),
            "budget='500G': a number of bytes above 0 was expected, whole (5e11) or with a unit",
        ),
        (lambda: KeepUnder(0, LAST), "budget=0: a number of bytes above 0"),
        (lambda: KeepUnder("lots", LAST), "budget='lots': a number of bytes above 0"),
        (lambda: KeepUnder("1GB", []), "rules=[]: AnyOf needs at least one"),
        (lambda: AnyOf([]), "rules=[]: AnyOf needs at least one; put one in the list"),
        (lambda: AllOf([]), "rules=[]: AllOf needs at least one; put one in the list"),
        (lambda: as_retention([]), "rules=[]: AnyOf needs at least one"),
    ],
)
def test_bad_values(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        make()
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("bad", [None, 3, "KeepLast", {"class_path": "x"}, KeepLast, len, [3]])
def test_bad_retention(bad: Any) -> None:
    with pytest.raises(TypeError) as caught:
        as_retention(bad)
    value = 3 if bad == [3] else bad
    message = f"retention={value!r}: a retention rule or a list of rules was expected; write for example KeepLast(3)"
    assert str(caught.value) == message
    for compose in (lambda: LAST | bad, lambda: LAST & bad, lambda: AnyOf([LAST, bad])):
        with pytest.raises(TypeError) as composed:
            compose()
        assert str(composed.value) == message


def test_a_rule_in_place_of_a_list() -> None:
    with pytest.raises(TypeError, match=r"^rules=KeepLast\(n=2\): AnyOf takes one list; write AnyOf\(\[a, b\]\)"):
        AnyOf(LAST)  # type: ignore[arg-type]


# Speed


def test_a_hundred_thousand_records() -> None:
    one = record(1)
    records = []
    for i in range(100_000):  # copies, since checking each would take longer than the planning
        made = copy.copy(one)
        made.__dict__.update(
            path=f"{i}.ckpt",
            step=i * 10,
            created_at=i * 60.0,
            sequence=i + 1,
            metrics={"loss": float(i * 7919 % 100_003)},
        )
        records.append(made)
    rule = (
        KeepLast(5)
        | KeepBest(10, "loss")
        | KeepBest(1000, "loss", "max") & KeepAll()
        | KeepSteps(range(100, 10**6, 100))
        | KeepEveryNSteps(1000)
        | KeepEveryInterval(hours=1)
    )
    budget = KeepUnder("20kB", KeepLast(5000) | KeepBest(3000, "loss") | KeepEveryNSteps(50) | KeepWithin(hours=1))
    for each in (rule, budget):
        seconds = []
        for _ in range(3):
            start = time.process_time()
            gone = plan(each, records, now=1e7)
            seconds.append(time.process_time() - start)
        assert 75_000 < len(gone) < 100_000
        assert min(seconds) < 0.5
