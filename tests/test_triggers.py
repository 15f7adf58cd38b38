from __future__ import annotations

import copy
import dataclasses
import functools
import math
import pickle
import timeit
from collections.abc import Iterable
from typing import Any

import jsonargparse
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_ckpt_policy import triggers
from lightning_ckpt_policy.triggers import (
    AfterValidation,
    AllOf,
    AnyOf,
    AtSteps,
    EveryInterval,
    EveryNEpochs,
    EveryNTrainSteps,
    Progress,
    Trigger,
    When,
    as_trigger,
)

STEPS, EPOCHS, HALF_HOUR = EveryNTrainSteps(4), EveryNEpochs(1), EveryInterval(minutes=30)


def always(now: Progress, since: Progress) -> bool:
    return True


class Never:
    def __call__(self, now: Progress, since: Progress) -> bool:
        return False


unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no failure


def paste(text: str) -> object:
    return eval(text, dict(vars(triggers)))


def saves(trigger: Trigger, points: Iterable[Progress]) -> dict[int, tuple[str, ...]]:
    """The step and the reasons of every save, where each point can be served at once."""
    made: dict[int, tuple[str, ...]] = {}
    since = Progress()
    for now in points:
        if reasons := trigger.due(now, since):
            assert now.step not in made
            made[now.step] = reasons
            since = now
    return made


def batches(count: int, per_epoch: int, steps_each: int = 1) -> list[Progress]:
    return [Progress(step=b * steps_each, epoch=b // per_epoch, time=float(b)) for b in range(1, count + 1)]


# Each trigger by itself


@pytest.mark.parametrize(
    ("trigger", "since", "now", "due"),
    [
        (STEPS, {}, {"step": 3}, False),
        (STEPS, {}, {"step": 4}, True),
        (STEPS, {"step": 4}, {"step": 4}, False),
        (STEPS, {"step": 4}, {"step": 7}, False),
        (STEPS, {"step": 3}, {"step": 5}, True),
        (STEPS, {"step": 5}, {"step": 8}, True),
        (STEPS, {"step": 1}, {"step": 1000}, True),
        (EveryNEpochs(), {"step": 5}, {"step": 9}, False),
        (EveryNEpochs(), {}, {"epoch": 1}, True),
        (EveryNEpochs(3), {"epoch": 1}, {"epoch": 2}, False),
        (EveryNEpochs(3), {"epoch": 2}, {"epoch": 4}, True),
        (AfterValidation(), {}, {"epoch": 1}, False),
        (AfterValidation(), {"validations": 1}, {"validations": 2}, True),
        (AfterValidation(2), {"validations": 2}, {"validations": 3}, False),
        (AtSteps([5, 9]), {}, {"step": 4}, False),
        (AtSteps([5, 9]), {}, {"step": 5}, True),
        (AtSteps([5, 9]), {"step": 5}, {"step": 8}, False),
        (AtSteps([5, 9]), {"step": 6}, {"step": 20}, True),
        (AtSteps([5, 9]), {"step": 9}, {"step": 900}, False),
        (HALF_HOUR, {"time": 100.0}, {"time": 1899.9}, False),
        (HALF_HOUR, {"time": 100.0}, {"time": 1900.0}, True),
        (EveryInterval(hours=1, minutes=1, seconds=0.5), {}, {"time": 3660.4}, False),
        (EveryInterval(hours=1, minutes=1, seconds=0.5), {}, {"time": 3660.5}, True),
        (When(always), {}, {}, True),
        (When(Never()), {}, {"step": 1}, False),
    ],
)
def test_due(trigger: Trigger, since: dict[str, Any], now: dict[str, Any], due: bool) -> None:
    assert trigger.due(Progress(**now), Progress(**since)) == ((repr(trigger),) if due else ())


@pytest.mark.parametrize(
    ("trigger", "text"),
    [
        (STEPS, "EveryNTrainSteps(n=4)"),
        (EPOCHS, "EveryNEpochs(n=1)"),
        (AfterValidation(), "AfterValidation(n=1)"),
        (AtSteps(iter([9, 5, 9])), "AtSteps(steps=(5, 9))"),
        (EveryInterval(hours=2.0, seconds=0.5), "EveryInterval(hours=2, seconds=0.5)"),
        (HALF_HOUR, "EveryInterval(minutes=30)"),
        (STEPS | EPOCHS, "EveryNTrainSteps(n=4) | EveryNEpochs(n=1)"),
        (STEPS & EPOCHS | HALF_HOUR, "EveryNTrainSteps(n=4) & EveryNEpochs(n=1) | EveryInterval(minutes=30)"),
        (STEPS & (EPOCHS | HALF_HOUR), "EveryNTrainSteps(n=4) & (EveryNEpochs(n=1) | EveryInterval(minutes=30))"),
        (AnyOf([STEPS]), "AnyOf([EveryNTrainSteps(n=4)])"),
        (AllOf([AnyOf([STEPS])]), "AllOf([AnyOf([EveryNTrainSteps(n=4)])])"),
        (AllOf([AnyOf([STEPS]), EPOCHS]), "AnyOf([EveryNTrainSteps(n=4)]) & EveryNEpochs(n=1)"),
    ],
)
def test_repr_can_be_pasted_back(trigger: Trigger, text: str) -> None:
    assert repr(trigger) == text
    assert paste(text) == trigger
    assert hash(paste(text)) == hash(trigger)
    assert pickle.loads(pickle.dumps(trigger)) == copy.deepcopy(trigger) == trigger


def test_numpy_integers_become_plain_ones() -> None:
    trigger = EveryNTrainSteps(np.int64(4)) | AtSteps(np.arange(10, 40, 10))
    assert repr(trigger) == "EveryNTrainSteps(n=4) | AtSteps(steps=(10, 20, 30))"


@pytest.mark.parametrize("trigger", [STEPS, HALF_HOUR, STEPS | EPOCHS, When(always)])
def test_triggers_are_frozen(trigger: Any) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(trigger, dataclasses.fields(trigger)[0].name, 3)


@pytest.mark.parametrize(
    ("trigger", "timed"),
    [
        (STEPS, False),
        (AtSteps([1]), False),
        (HALF_HOUR, True),
        (When(always), True),
        (STEPS | EPOCHS, False),
        (STEPS & (EPOCHS | HALF_HOUR), True),
    ],
)
def test_timed(trigger: Trigger, timed: bool) -> None:
    assert trigger.timed is timed


# Composition


def test_any_gives_every_reason_once_and_in_order() -> None:
    both = AllOf([STEPS, EPOCHS])
    now = Progress(step=4, epoch=1)
    assert (EPOCHS | both | AtSteps([9])).due(now, Progress()) == (repr(EPOCHS), repr(STEPS))
    assert both.due(now, Progress()) == (repr(STEPS), repr(EPOCHS))


@pytest.mark.parametrize("group", [AnyOf, AllOf])
def test_every_member_is_asked(group: type[AnyOf | AllOf]) -> None:
    asked = []

    def note(answer: bool, now: Progress, since: Progress) -> bool:
        asked.append(answer)
        return answer

    group([functools.partial(note, answer) for answer in (True, False, True)]).due(Progress(), Progress())
    assert asked == [True, False, True]


def test_flattened_without_repeats() -> None:
    assert (STEPS | (EPOCHS | HALF_HOUR) | STEPS).triggers == (STEPS, EPOCHS, HALF_HOUR)  # type: ignore[attr-defined]
    assert AllOf([STEPS, [EPOCHS, HALF_HOUR]]) == STEPS & (EPOCHS | HALF_HOUR)
    assert AnyOf([STEPS, [EPOCHS, (HALF_HOUR,)]]) == STEPS | EPOCHS | HALF_HOUR
    assert (STEPS | EPOCHS) != (STEPS & EPOCHS)
    assert (STEPS | EPOCHS) != (STEPS | HALF_HOUR)
    assert (STEPS | EPOCHS) != "something else"


def test_plain_functions_on_either_side() -> None:
    assert always | STEPS == STEPS | always == AnyOf([STEPS, When(always)])
    assert always & STEPS == STEPS & always == AllOf([STEPS, always])
    assert (STEPS & always).due(Progress(step=4), Progress()) == (repr(STEPS), f"When({__name__}.always)")


def test_repr_of_a_function_has_no_address_where_it_has_a_name() -> None:
    assert repr(When(always)) == f"When({__name__}.always)"
    assert repr(When([].append)).startswith("When(<built-in method append")  # type: ignore[arg-type]
    assert "Never object" in repr(When(Never()))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (STEPS, STEPS),
        ([STEPS], STEPS),
        ((STEPS, EPOCHS), STEPS | EPOCHS),
        ([STEPS, [EPOCHS, [HALF_HOUR]]], STEPS | EPOCHS | HALF_HOUR),
        (always, When(always)),
        ([always, STEPS], When(always) | STEPS),
    ],
)
def test_as_trigger(value: object, expected: Trigger) -> None:
    assert as_trigger(value) == expected


# Properties


leaves: st.SearchStrategy[Trigger] = st.one_of(
    st.integers(1, 7).map(EveryNTrainSteps),
    st.integers(1, 3).map(EveryNEpochs),
    st.integers(1, 3).map(AfterValidation),
    st.lists(st.integers(1, 40), min_size=1, max_size=4).map(AtSteps),
    st.floats(0.25, 50).map(lambda seconds: EveryInterval(seconds=seconds)),
)
trees: st.SearchStrategy[Trigger] = st.recursive(
    leaves,
    lambda inner: st.lists(inner, min_size=1, max_size=3).flatmap(lambda t: st.sampled_from([AnyOf(t), AllOf(t)])),
)


@st.composite
def moments(draw: st.DrawFn) -> tuple[Progress, Progress]:
    """(now, since): since is never ahead of now."""
    pairs = [sorted((draw(st.integers(0, 40)), draw(st.integers(0, 40)))) for _ in range(4)]
    since, now = (Progress(step=s, epoch=e, validations=v, time=float(t)) for s, e, v, t in zip(*pairs, strict=True))
    return now, since


@unhurried
@given(trees, trees, trees, moments())
def test_algebra(a: Trigger, b: Trigger, c: Trigger, moment: tuple[Progress, Progress]) -> None:
    assert a | b == b | a
    assert a & b == b & a
    assert (a | b) | c == a | (b | c)
    assert (a & b) & c == a & (b & c)
    assert hash(a | b) == hash(b | a)
    assert (a | b) | (b | a) == a | b
    for left, right in [(a | a, a), (a & a, a), (a & (b | c), (a & b) | (a & c)), (a | (a & b), a), (a & (a | b), a)]:
        assert bool(left.due(*moment)) == bool(right.due(*moment))
    assert bool((a | b).due(*moment)) == (bool(a.due(*moment)) or bool(b.due(*moment)))
    assert bool((a & b).due(*moment)) == (bool(a.due(*moment)) and bool(b.due(*moment)))
    assert set((a | b).due(*moment)) == {*a.due(*moment), *b.due(*moment)}
    assert len(set((a | b).due(*moment))) == len((a | b).due(*moment))


@unhurried
@given(trees)
def test_repr_of_any_tree_can_be_pasted_back(trigger: Trigger) -> None:
    assert paste(repr(trigger)) == trigger


@unhurried
@given(trees, moments(), st.integers(0, 20))
def test_due_stays_due_until_captured(trigger: Trigger, moment: tuple[Progress, Progress], more: int) -> None:
    now, since = moment
    later = Progress(
        step=now.step + more, epoch=now.epoch + more, validations=now.validations + more, time=now.time + more
    )
    if trigger.due(now, since):
        assert trigger.due(later, since)
    assert not trigger.due(now, now)


# Cases


def test_case_01_steps_or_epochs() -> None:
    made = saves(EveryNTrainSteps(4) | EveryNEpochs(1), batches(20, per_epoch=10))
    assert list(made) == [4, 8, 10, 12, 16, 20]
    assert made[10] == ("EveryNEpochs(n=1)",)
    assert made[20] == ("EveryNTrainSteps(n=4)", "EveryNEpochs(n=1)")


def test_case_02_interval_longer_than_an_epoch() -> None:
    assert list(saves(EveryNTrainSteps(25), batches(30, per_epoch=10))) == [25]


def test_case_03_every_ten_of_thirty() -> None:
    assert list(saves(EveryNTrainSteps(10), batches(30, per_epoch=30))) == [10, 20, 30]


def test_case_04_two_optimizers_jump_over_multiples() -> None:
    assert list(saves(EveryNTrainSteps(5), batches(10, per_epoch=10, steps_each=2))) == [6, 10, 16, 20]
    assert list(saves(AtSteps([5, 10, 15]), batches(10, per_epoch=10, steps_each=2))) == [6, 10, 16]


# Configuration


class Policy:
    def __init__(self, trigger: Trigger | list[Trigger]) -> None:
        self.trigger = as_trigger(trigger)


def of(name: str, **init_args: Any) -> dict[str, Any]:
    return {"class_path": f"lightning_ckpt_policy.triggers.{name}", "init_args": init_args}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # instantiate_classes: the old name works with every version
@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (of("EveryNTrainSteps", n=4), STEPS),
        ({"class_path": "lightning_ckpt_policy.triggers.EveryNEpochs"}, EPOCHS),
        ([of("EveryNTrainSteps", n=4), of("EveryInterval", minutes=30)], STEPS | HALF_HOUR),
        (of("EveryInterval", hours=0.5, seconds=1), EveryInterval(hours=0.5, seconds=1)),
        (
            of("AllOf", triggers=[of("AtSteps", steps=[9, 5]), of("AnyOf", triggers=[of("EveryNEpochs", n=1)])]),
            AllOf([AtSteps([5, 9]), AnyOf([EPOCHS])]),
        ),
        (
            of("AllOf", triggers=[of("AfterValidation", n=2), [of("EveryNEpochs"), of("EveryInterval", minutes=30)]]),
            AfterValidation(2) & (EPOCHS | HALF_HOUR),
        ),
        ([of("AllOf", triggers=[of("EveryNTrainSteps", n=4), of("EveryNEpochs")])], AllOf([STEPS, EPOCHS])),
    ],
)
def test_class_path_and_init_args(config: object, expected: Trigger) -> None:
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Policy, "policy")
    parsed = parser.parse_object({"policy": {"trigger": config}})
    again = parser.parse_string(parser.dump(parsed))
    for one in (parsed, again):
        made = parser.instantiate_classes(one).policy.trigger
        assert made == expected
        assert repr(made) == repr(expected)


# Bad input


@pytest.mark.parametrize("bad", [0, -1, True, 2.0, math.nan, "4", None], ids=repr)
@pytest.mark.parametrize("kind", [EveryNTrainSteps, EveryNEpochs, AfterValidation])
def test_bad_n(kind: Any, bad: object) -> None:
    with pytest.raises(ValueError) as caught:
        kind(bad)
    assert str(caught.value) == (
        f"n={bad!r}: an integer of at least 1 was expected; write {kind.__name__}(1) or more, or leave this trigger out"
    )


@pytest.mark.parametrize(
    ("bad", "parts"),
    [
        ([], ("steps=[]:", "at least one step", "AtSteps([100, 300])")),
        (100, ("steps=100:", "at least one step", "AtSteps([100, 300])")),
        ("100", ("steps='100':", "AtSteps([100, 300])")),
        ([100, 0], ("steps=0:", "at least 1", "AtSteps([100, 300])")),
        ([True], ("steps=True:", "at least 1")),
        ([1e4], ("steps=10000.0:", "an integer")),
    ],
)
def test_bad_steps(bad: Any, parts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as caught:
        AtSteps(bad)
    assert all(part in str(caught.value) for part in parts)


@pytest.mark.parametrize(
    ("bad", "start"),
    [
        ({}, "hours=0.0, minutes=0.0, seconds=0.0: a finite interval above 0 was expected; write EveryInterval("),
        ({"minutes": -1, "hours": 5}, "minutes=-1: a finite number of at least 0 was expected; write EveryInterval("),
        ({"seconds": math.nan}, "seconds=nan: a finite number"),
        ({"seconds": math.inf}, "seconds=inf: a finite number"),
        ({"hours": True}, "hours=True: a finite number"),
        ({"hours": "1h"}, "hours='1h': a finite number"),
        ({"hours": 10**400}, "hours=1000"),
        ({"hours": 1e308}, "hours=1e+308, minutes=0.0, seconds=0.0: a finite interval"),
    ],
)
def test_bad_interval(bad: dict[str, Any], start: str) -> None:
    with pytest.raises(ValueError) as caught:
        EveryInterval(**bad)
    assert str(caught.value).startswith(start)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("bad", [3, None, EveryNEpochs])
def test_bad_function(bad: Any) -> None:
    with pytest.raises(ValueError) as caught:
        When(bad)
    assert str(caught.value).startswith(f"function={bad!r}: a function of (now, since) was expected; write When(")


@pytest.mark.parametrize("group", [AnyOf, AllOf])
def test_bad_groups(group: Any) -> None:
    with pytest.raises(ValueError) as empty:
        group([])
    assert str(empty.value) == f"triggers=[]: {group.__name__} needs at least one; put one in the list"
    with pytest.raises(TypeError) as alone:
        group(STEPS)
    assert str(alone.value).startswith("triggers=EveryNTrainSteps(n=4): ")
    assert f"write {group.__name__}([a, b])" in str(alone.value)
    with pytest.raises(TypeError, match=r"^trigger=5: "):
        group([STEPS, 5])


@pytest.mark.parametrize("bad", [None, 5, "EveryNEpochs", {"class_path": "x"}, EveryNEpochs, {STEPS}])
def test_bad_trigger(bad: Any) -> None:
    with pytest.raises(TypeError) as caught:
        as_trigger(bad)
    message = str(caught.value)
    assert message.startswith(f"trigger={bad!r}: a trigger, a list of triggers or a function was expected; ")
    assert message.endswith("write for example EveryNTrainSteps(1000)")
    for compose in (lambda: STEPS | bad, lambda: bad | STEPS, lambda: STEPS & bad, lambda: bad & STEPS):
        with pytest.raises(TypeError) as composed:
            compose()
        assert str(composed.value) == message


def test_empty_list_is_no_trigger() -> None:
    with pytest.raises(ValueError, match=r"^triggers=\[\]: AnyOf needs at least one"):
        as_trigger([])


# Speed


def test_due_is_quick_enough_for_every_batch() -> None:
    trigger = (EveryNTrainSteps(1000) | EveryInterval(minutes=30) | AtSteps(range(1000, 1_000_000, 1000))) & EPOCHS
    now, since = Progress(step=700, time=10.0), Progress(step=1)
    best = min(timeit.repeat(lambda: trigger.due(now, since), number=1000, repeat=5)) / 1000
    assert best < 50e-6, f"{best * 1e6:.1f} µs"  # about 2 µs on an idle core
