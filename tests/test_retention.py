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
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_ckpt_policy import retention
from lightning_ckpt_policy.record import CheckpointRecord
from lightning_ckpt_policy.retention import (
    AllOf,
    AnyOf,
    KeepAll,
    KeepBest,
    KeepLast,
    KeepSteps,
    Retention,
    as_retention,
    best,
    plan,
)

NAN, INF = math.nan, math.inf
LAST, BEST, MILESTONES = KeepLast(2), KeepBest(1, "loss"), KeepSteps([10, 20])


def record(sequence: int, *, step: int | None = None, loss: float | None = None, **values: Any) -> CheckpointRecord:
    metrics: Mapping[str, float] = {} if loss is None else {"loss": loss}
    return CheckpointRecord(
        path=f"{sequence}.ckpt",
        step=sequence if step is None else step,
        epoch=0,
        sequence=sequence,
        run_id="a",
        created_at=float(sequence),
        size=1,
        checksum="crc32c:00000000",
        metrics=metrics,
        **values,
    )


def history(*losses: float | None) -> list[CheckpointRecord]:
    return [record(i, loss=loss) for i, loss in enumerate(losses, 1)]


def planned(rule: Retention, records: Sequence[CheckpointRecord], **options: Any) -> list[int]:
    return [r.sequence for r in plan(rule, records, now=0.0, **options)]


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


@pytest.mark.parametrize("rule", [LAST, BEST, MILESTONES, LAST | BEST])
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


# Properties


leaves: st.SearchStrategy[Retention] = st.one_of(
    st.just(KeepAll()),
    st.integers(1, 4).map(KeepLast),
    st.builds(KeepBest, st.integers(1, 3), st.sampled_from(["loss", "other"]), st.sampled_from(["min", "max"])),
    st.lists(st.integers(1, 12), min_size=1, max_size=4).map(KeepSteps),
)
rules: st.SearchStrategy[Retention] = st.recursive(
    leaves,
    lambda inner: st.lists(inner, min_size=1, max_size=3).flatmap(lambda r: st.sampled_from([AnyOf(r), AllOf(r)])),
)
losses = st.sampled_from([None, NAN, INF, -INF, 0.0, 0.5, 0.5, 1.0])


@st.composite
def histories(draw: st.DrawFn) -> list[CheckpointRecord]:
    sequences = draw(st.lists(st.integers(1, 60), max_size=14, unique=True))
    return [
        record(
            sequence,
            step=draw(st.integers(0, 12)),
            loss=draw(losses),
            pinned=draw(st.integers(0, 5)) == 0,
            damaged=draw(st.integers(0, 5)) == 0,
        )
        for sequence in sequences
    ]


def without(records: Sequence[CheckpointRecord], gone: Sequence[int]) -> list[CheckpointRecord]:
    return [r for r in records if r.sequence not in gone]


def undamaged(records: Sequence[CheckpointRecord]) -> list[CheckpointRecord]:
    return [r for r in records if not r.damaged]


@unhurried
@given(rules, rules, rules, histories())
def test_algebra(a: Retention, b: Retention, c: Retention, records: list[CheckpointRecord]) -> None:
    whole = undamaged(records)
    kept = {rule: rule.keep(whole, 0.0) for rule in (a, b, c)}
    assert (a | b).keep(whole, 0.0) == kept[a] | kept[b]
    assert (a & b).keep(whole, 0.0) == kept[a] & kept[b]
    assert a | b == b | a
    assert a & b == b & a
    assert (a | b) | c == a | (b | c)
    assert (a & b) & c == a & (b & c)
    assert hash(a & b) == hash(b & a)
    for same in (a | a, a & a, a | (a & b), a & (a | b)):
        assert same.keep(whole, 0.0) == kept[a]
    assert (a & (b | c)).keep(whole, 0.0) == ((a & b) | (a & c)).keep(whole, 0.0)
    assert paste(repr(a | b & c)) == a | b & c


@unhurried
@given(rules, rules, histories())
def test_adding_a_rule_never_deletes_more(a: Retention, b: Retention, records: list[CheckpointRecord]) -> None:
    assert set(planned(a | b, records)) == set(planned(a, records)) & set(planned(b, records))
    assert set(planned(a, records)) <= set(planned(a & b, records))


@unhurried
@given(rules, histories(), st.randoms(use_true_random=False))
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
    # planning again changes nothing, and where only some of the deletes went through it asks for no others
    assert planned(rule, without(records, gone), protect=protect) == []
    some = [sequence for sequence in gone if random.random() < 0.5]
    assert set(planned(rule, without(records, some), protect=protect)) <= set(gone) - set(some)


@unhurried
@given(rules, histories())
def test_what_is_kept_stays_kept_when_others_go(rule: Retention, records: list[CheckpointRecord]) -> None:
    whole = undamaged(records)
    kept = rule.keep(whole, 0.0)
    fewer = [r for r in whole if r.sequence in kept]
    assert rule.keep(fewer, 0.0) == kept


@unhurried
@given(st.lists(leaves, min_size=1, max_size=4).map(AnyOf), histories())
def test_pruning_after_every_save_ends_like_pruning_once(rule: Retention, records: list[CheckpointRecord]) -> None:
    there: list[CheckpointRecord] = []
    for one in sorted(records, key=lambda r: r.sequence):
        there.append(one)
        there = without(there, planned(rule, there))
    assert {r.sequence for r in there} == {r.sequence for r in without(records, planned(rule, records))}


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
    ],
)
def test_class_path_and_init_args(config: object, expected: Retention) -> None:
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Policy, "policy")
    parsed = parser.parse_object({"policy": {"retention": config}})
    again = parser.parse_string(parser.dump(parsed))
    for one in (parsed, again):
        made = parser.instantiate_classes(one).policy.retention
        assert made == expected
        assert repr(made) == repr(expected)


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
        made.__dict__.update(path=f"{i}.ckpt", step=i * 10, sequence=i + 1, metrics={"loss": float(i * 7919 % 100_003)})
        records.append(made)
    rule = (
        KeepLast(5)
        | KeepBest(10, "loss")
        | KeepBest(1000, "loss", "max") & KeepAll()
        | KeepSteps(range(100, 10**6, 100))
    )
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        gone = plan(rule, records, now=0.0)
        seconds.append(time.perf_counter() - start)
    assert 80_000 < len(gone) < 100_000
    assert min(seconds) < 0.5
